"""stack: attention layers of every role in a row, each with its own input; a prompt, then single steps."""

import torch
from torch import Tensor

from openv41.model.attention import Attention
from openv41.ops import Ops
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds
from openv41.parity.fill import fill, model_config, weights_of
from openv41.parity.folder import BadCase, Case, Skip
from openv41.parity.groups.window import in_ring_order, recent
from openv41.parity.picks import Watch, compare_picks, mask_of, without_offset
from openv41.plan import plan_layers
from openv41.state import Cache, Sight

Y, CACHES = Bounds(atol=0.01, min_equal=0.97), Bounds(quantum=0.35, min_equal=0.995)
SCORES, STATE = Bounds(max_ulp=2, min_equal=0.98), Bounds(atol=2e-6, rtol=2e-6)


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if not case.matching("y."):
        raise Skip("unknown kind of stack case: it has no y")
    Stack(case, ops).run(sheet)


class Stack:
    def __init__(self, case: Case, ops: Ops) -> None:
        self.case, self.config = case, model_config(case)
        self.prompt, self.steps = case.whole("prefill", least=1), case.whole("steps")
        self.plan = plan_layers(self.config)[: self.config.n_layers]
        own_keys = case.settings.get("own_keys", "own_keys" in case.name)
        layers = range(self.config.n_layers)
        self.layers = [self._layer(layer, ops, bool(own_keys)) for layer in layers]
        self.watches = {part.layer: Watch(part.indexer) for part in self.layers if part.indexer is not None}
        self.x = [case.lender(f"x.{layer}")[f"x.{layer}"] for layer in layers]  # [b, t, dim] each
        self.batch, self.tokens = self.x[0].shape[:2]
        if self.tokens != self.prompt + self.steps or any(x.shape != self.x[0].shape for x in self.x):
            raise BadCase(f"every x must have prefill {self.prompt} + steps {self.steps} tokens, x.0 has {self.tokens}")
        self.cache = Cache(self.config, self.batch, self.batch * self.tokens)
        for _ in range(self.batch):
            self.cache.open()

    def _layer(self, layer: int, ops: Ops, own_keys: bool) -> Attention:
        attention = Attention(self.config, layer, ops, "own_keys" if own_keys else "as_written")
        fill(attention, weights_of(self.case, f"w.{layer}."))
        return attention

    def run(self, sheet: Sheet) -> None:
        y = [self._take(0, self.prompt)]
        self._compare_caches(sheet, "prefill", self.prompt)
        y += [self._take(at, at + 1) for at in range(self.prompt, self.tokens)]
        self._compare_caches(sheet, "end", self.tokens)
        other = {layer: self._compare_picks(sheet, layer) for layer in self.watches}
        self._compare_outputs(sheet, torch.cat(y, 2), other)

    def _take(self, start: int, end: int) -> Tensor:
        """Run some positions through all layers: y [layers, b, t, dim]."""
        step = self.cache.step((slot, [0] * (end - start)) for slot in range(self.batch))
        self.cache.admit(step)
        sight, results = Sight(), []
        for layer, x in zip(self.layers, self.x, strict=True):
            y, sight = layer(x[:, start:end].flatten(0, 1), step, sight, self.cache)
            results.append(y.unflatten(0, (self.batch, -1)))
        self.cache.extend(step)
        return torch.stack(results)

    def _compare_outputs(self, sheet: Sheet, y: Tensor, other: dict[int, Tensor]) -> None:
        """Rows whose picks lawfully differ from the recorded ones have another result, and are left out."""
        pairs, left_out = {}, 0
        for layer, row in enumerate(self.plan):
            if f"y.{layer}" in self.case:
                same = torch.ones(self.batch, self.tokens, dtype=torch.bool)
                if row.picks_from is not None:
                    same = ~other.get(row.picks_from, ~same)
                wanted = self.case[f"y.{layer}"]
                if wanted.shape != y[layer].shape:
                    raise BadCase(f"y.{layer} must have shape {list(y[layer].shape)}, has {list(wanted.shape)}")
                pairs[f"y.{layer}"] = y[layer][same], wanted[same]
                left_out += int((~same).sum())
        sheet.compare_all(pairs, bounds(self.case.tolerance, "y", otherwise=Y))
        if left_out:
            sheet.notes.append(f"{left_out} rows of y left out: tied, other picks")

    def _compare_picks(self, sheet: Sheet, layer: int) -> Tensor:
        """Scores, candidates and picks of one indexer. Returns the rows [b, t] whose picks differ from the recorded."""
        case, other = self.case, []
        if f"idx_prefill.{layer}" not in case:
            return torch.zeros(self.batch, self.tokens, dtype=torch.bool)
        prompt, *steps = self.watches[layer].seen
        above = self.plan[layer].within
        tied = case[f"tie.{layer}"]
        free = case.lender(f"tie.{above}")[f"tie.{above}"] if above is not None else torch.zeros_like(tied)
        for when, seen, offset in (
            ("prefill", [prompt], self.prompt),
            ("decode", steps, self.config.window_size),
        ):
            if not seen:
                continue
            span = slice(0, self.prompt) if when == "prefill" else slice(self.prompt, None)
            recorded_scores = case[f"score_{when}.{layer}"]  # [b, t, p]
            scores = _wide([one.scores for one in seen], self.batch, recorded_scores.shape[2], torch.nan)
            open_rows = free[:, span]
            allowed = bounds(case.tolerance, "scores", otherwise=SCORES)
            what = f"score_{when}.{layer}"
            if scores.shape != recorded_scores.shape:
                raise BadCase(f"{what} must have shape {list(scores.shape)}, has {list(recorded_scores.shape)}")
            sheet.compare(what, scores[~open_rows], recorded_scores[~open_rows], allowed)
            if f"candidates_{when}.{layer}" in case:
                self._compare_candidates(sheet, layer, when, [one.blocks for one in seen], tied[:, span])
            picks = _wide([one.picks for one in seen], self.batch, seen[-1].picks.shape[1], -1)
            recorded = without_offset(case[f"idx_{when}.{layer}"], offset)
            differ = compare_picks(
                sheet, f"idx_{when}.{layer}", picks.flatten(0, 1), recorded.flatten(0, 1), tied[:, span].flatten(),
                (scores.flatten(0, 1), recorded_scores.flatten(0, 1)), judged=~open_rows.flatten(),
            )  # fmt: skip
            other.append(differ.unflatten(0, (self.batch, -1)))
        return torch.cat(other, 1)

    def _compare_candidates(
        self, sheet: Sheet, layer: int, when: str, blocks: list[Tensor | None], tied: Tensor
    ) -> None:
        what, block = f"candidates_{when}.{layer}", self.config.candidate_block_size
        recorded = self.case[what]
        lengths = [self.prompt] if when == "prefill" else range(self.prompt + 1, self.tokens + 1)
        ratio = self.plan[layer].ratio
        masks = []
        for kept, length in zip(blocks, lengths, strict=True):
            if kept is None:
                raise BadCase(f"{what}: layer {layer} is no candidate source")
            masks.append(mask_of(kept, block, length // ratio).to(torch.uint8))
        ours = _wide(masks, self.batch, recorded.shape[2], 2)
        if ours.shape != recorded.shape:
            raise BadCase(f"{what} must have shape {list(ours.shape)}, has {list(recorded.shape)}")
        sheet.compare(what, ours[~tied], recorded.to(torch.uint8)[~tied], EXACT)

    def _compare_caches(self, sheet: Sheet, when: str, length: int) -> None:
        stored, states = {}, {}
        kinds = {"compress_kv": "latents", "index_k": "keys"}
        for what in self.case.matching(f"{when}."):
            kind, _, number = what.removeprefix(f"{when}.").partition(".")
            if not number.isdigit() or int(number) >= len(self.plan):
                raise BadCase(f"{what}: must end in the number of a layer")
            layer, recorded = int(number), self.case[what]
            if kind == "window_kv":
                stored[what] = (
                    recent(self.cache, layer, self.batch),
                    in_ring_order(recorded, length, self.config.window_size),
                )
            elif kind in kinds:
                rows = [self.cache.view(kinds[kind], layer, slot) for slot in range(self.batch)]
                stored[what] = torch.stack(rows), recorded
            elif kind in ("kv_state", "score_state"):
                rows = [self.cache.view("group", layer, slot) for slot in range(self.batch)]
                half = torch.stack(rows).chunk(2, -1)[kind == "score_state"]
                states[what] = half, recorded[:, : half.shape[1]]
            else:
                raise BadCase(f"{what}: unknown kind of cache")
        sheet.compare_all(stored, bounds(self.case.tolerance, "caches", otherwise=CACHES))
        sheet.compare_all(states, bounds(self.case.tolerance, "state", otherwise=STATE))


def _wide(parts: list[Tensor], batch: int, width: int, padding: int | float) -> Tensor:
    """Packed rows of several calls [b * t, k] as one tensor [b, all t, width]."""
    return torch.cat(
        [
            torch.nn.functional.pad(part, (0, max(0, width - part.shape[1])), value=padding).unflatten(0, (batch, -1))
            for part in parts
        ],
        1,
    )
