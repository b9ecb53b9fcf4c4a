"""model: a small whole model. Block by block from recorded streams, which is the test; then end to end, loosely.

Random models are chaotic: one rounding in the last bit can move a pick, and from there on everything differs. So every
block is given the recorded stream and mix that enter it, for the prompt and then step by step, while all blocks share
one cache that fills as in a real run. A row whose picks were tied is left out of the blocks that read these picks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from openv41.model.indexer import IndexKeys
from openv41.model.streams import Streams
from openv41.model.transformer import Prefill, Transformer
from openv41.ops import Ops
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds
from openv41.parity.fill import fill, model_config, weights_of
from openv41.parity.folder import BadCase, Case, Skip
from openv41.parity.picks import TorchTies, Watch
from openv41.plan import plan_layers
from openv41.state import Cache, Step

STREAMS, MIXES, TAPS = Bounds(min_equal=0.97, atol=0.05), Bounds(atol=1e-3), Bounds(max_ulp=1)
HEAD = Bounds(atol=1e-3, rtol=1e-4)
"""Logits from the recorded last stream: one norm and one float32 product."""
ELSEWHERE = ("vision.", "aligner.", "image_", "mtp.")
NEAR, LOOSE = Bounds(atol=0.05), Bounds(atol=torch.inf, rms_error=0.3)
LONG = 256
"""Prompts from here on count as long: their end-to-end results drift apart."""


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if "patches" in case or "token_types" in case:
        raise Skip("vision tower not implemented yet")
    if "ids" not in case or "logits" not in case:
        raise Skip("unknown kind of model case: it has no ids and logits")
    model = Model(case, ops)
    model.block_by_block(sheet)
    model.end_to_end(sheet)
    if case.matching("spec_"):
        sheet.notes.append("drafts (spec_*) not checked: no model/draft.py yet")


class Model:
    def __init__(self, case: Case, ops: Ops) -> None:
        self.case, self.config = case, model_config(case)
        own_keys = case.settings.get("own_keys", "own_keys" in case.name)
        self.index_keys: IndexKeys = "own_keys" if own_keys else "as_written"
        self.weights, self.ops = weights_of(case, sample="embed."), ops
        self.plan = plan_layers(self.config)[: self.config.n_layers]
        self.ids = case["ids"]  # [b, t]
        self.batch, self.tokens = self.ids.shape
        self.prompt, self.steps = case.whole("prefill", least=1), case.whole("steps")
        if self.tokens != self.prompt + self.steps:
            raise BadCase(f"ids must have prefill {self.prompt} + steps {self.steps} tokens, has {self.tokens}")
        self.spans = [(0, self.prompt), *((at, at + 1) for at in range(self.prompt, self.tokens))]

    def _token_map(self) -> Tensor:
        """The compressed id of every token: recorded, or told by the one rule that small configurations use."""
        told = self.case.settings.get("tokenizer")
        if "token_map" in self.case:
            return self.case["token_map"].long()
        if told != "ids 2k and 2k+1 share compressed id k":
            raise Skip(f"unknown token map: config.tokenizer says {told!r}")
        return torch.arange(self.config.vocab_size) // 2

    def _transformer(self, ops: Ops) -> tuple[Transformer, dict[int, Watch]]:
        """The model, and a listener at each of its indexers."""
        transformer = Transformer(self.config, ops, self.index_keys)
        fill(transformer, self.weights, elsewhere=ELSEWHERE)
        if transformer.lookback is not None:
            transformer.lookback.token_map.copy_(self._token_map())
        parts = [(layer, block.attn.indexer) for layer, block in enumerate(transformer.blocks())]
        return transformer, {layer: Watch(indexer) for layer, indexer in parts if indexer is not None}

    def _cache(self) -> Cache:
        cache = Cache(self.config, self.batch, self.batch * self.tokens)
        for _ in range(self.batch):
            cache.open()
        return cache

    def _step(self, cache: Cache, start: int, end: int) -> Step:
        return cache.step((slot, self.ids[slot, start:end]) for slot in range(self.batch))

    # Block by block

    def block_by_block(self, sheet: Sheet) -> None:
        h, pre = self._recorded("block_outputs"), self._recorded("block_pre_mix")  # [layer, b, t, m, dim], [.., m]
        self.transformer, self.watches = self._transformer(self.ops)
        cache, parts = self._cache(), []
        for start, end in self.spans:
            parts.append(self._descend(cache, start, end, h[:, :, start:end], pre[:, :, start:end]))
        columns = zip(zip(*parts, strict=True), (2, 2, 1, 1), strict=True)
        ours_h, ours_pre, taps, logits = (torch.cat(column, at) for column, at in columns)
        open_rows = self._undecided()  # [layer, b, t]
        kept = self.case["block_outputs"].shape[2]  # the last so many positions are this case's own
        tail, judged = slice(self.tokens - kept, None), ~open_rows[:, :, self.tokens - kept :]
        told: Mapping[str, Any] = _rules(self.case.tolerance, "block by block")
        for what, ours, wanted, otherwise in (
            ("block_outputs", ours_h, h, STREAMS),
            ("block_pre_mix", ours_pre, pre, MIXES),
        ):
            pairs = {
                f"{what}.{layer}": (ours[layer][:, tail][judged[layer]], wanted[layer][:, tail][judged[layer]])
                for layer in range(len(self.plan))
            }
            sheet.compare_all(pairs, bounds(told, what, otherwise=otherwise))
        if "main_hidden" in self.case and taps.shape[2]:
            wanted, allowed = self.case["main_hidden"], bounds(told, "main_hidden", otherwise=TAPS)
            sheet.compare("main_hidden", taps[:, -wanted.shape[1] :], wanted, allowed)
        self._compare_head(sheet, logits)
        if left_out := int(open_rows[:, :, tail].sum()):
            sheet.notes.append(f"{left_out} of {open_rows[:, :, tail].numel()} rows of blocks left out: tied")

    def _recorded(self, what: str) -> Tensor:
        """The recorded values at all positions: where a case has those of the steps alone, its prompt is that of the
        case whose prefill it shares."""
        own = self.case[what]
        missing = self.tokens - own.shape[2]
        if not missing:
            return own
        for relative in self.case.relatives():
            if what not in relative or "ids" not in relative or relative[what].shape[2] < missing:
                continue
            if torch.equal(relative["ids"][:, :missing], self.ids[:, :missing]):
                return torch.cat((relative[what][:, :, :missing], own), 2)
        raise BadCase(f"{what}: {own.shape[2]} of {self.tokens} positions, and no related case has the others")

    def _descend(self, cache: Cache, start: int, end: int, h: Tensor, pre: Tensor) -> tuple[Tensor, ...]:
        """One step, each block from the recorded stream: streams, mixes, taps, and logits of the last token."""
        step = self._step(cache, start, end)
        cache.admit(step)
        streams, sight = self.transformer.begin(step, cache)
        results, mixes, taps = [], [], [h.new_empty(len(step), 0)]
        for layer, block in enumerate(self.transformer.blocks()):
            if layer:
                streams = Streams(h[layer - 1].flatten(0, 1), pre[layer - 1].flatten(0, 1))
            streams = block.recall(streams, step, sight)
            if block.tapped:
                taps.append(block.tap(streams))
            streams, sight = block(streams, step, sight, cache)
            results.append(streams.h.unflatten(0, (self.batch, -1)))
            mixes.append(streams.pre.unflatten(0, (self.batch, -1)))
        cache.extend(step)
        logits = self.transformer.logits(Streams(h[-1].flatten(0, 1), pre[-1].flatten(0, 1)), step)
        return (
            torch.stack(results), torch.stack(mixes),
            torch.cat(taps, 1).unflatten(0, (self.batch, -1)), logits.unsqueeze(1),
        )  # fmt: skip

    def _undecided(self) -> Tensor:
        """Rows [layer, b, t] that may differ lawfully: the picks that the layer reads, or the blocks within which they
        were picked, were tied."""
        tied = self._tied()
        rows = [torch.zeros(self.batch, self.tokens, dtype=torch.bool)] * len(self.plan)
        return torch.stack([tied.get(row.picks_from, rows[at]) for at, row in enumerate(self.plan)])

    def _tied(self) -> dict[int | None, Tensor]:
        """For each indexer the rows [b, t] whose picks were open."""
        tied: dict[int | None, Tensor] = {}
        for layer, watch in self.watches.items():
            tied[layer] = torch.cat([seen.tied.unflatten(0, (self.batch, -1)) for seen in watch.seen], 1)
            if (within := self.plan[layer].within) is not None:
                tied[layer] |= tied[within]
        return tied

    def _compare_head(self, sheet: Sheet, logits: Tensor) -> None:
        wanted = self.case["logits"]
        sheet.compare("logits from the last block", logits, wanted, bounds({}, otherwise=HEAD))
        if "greedy_next" in self.case:
            sheet.compare("greedy_next", wanted.argmax(-1), self.case["greedy_next"], EXACT)

    # End to end

    def end_to_end(self, sheet: Sheet) -> None:
        """The mean error of the model as it is; and for short prompts, nearly every step by itself. For these, ties are
        taken as torch's own top-k takes them (either of two equal scores would do, and leads elsewhere), and all layers
        are run for all tokens, so that picks can be compared."""
        rules, wanted = self.case.tolerance, self.case["logits"]
        transformer, _ = self._transformer(self.ops)
        logits = self._generate(transformer, "halo")
        sheet.require("logits end to end", bool(logits.isfinite().all()), "they must be finite")
        loose = bounds(_rules(rules, "end to end", "long"), "logits", otherwise=LOOSE)
        sheet.compare("logits end to end", logits, wanted, loose)
        if self.prompt < LONG:
            transformer, watches = self._transformer(TorchTies(self.ops))
            logits = self._generate(transformer, "full")
            self._judge_steps(sheet, logits, self._parted(watches))

    def _generate(self, transformer: Transformer, prefill: Prefill) -> Tensor:
        """Logits [b, 1 + steps, vocab]."""
        cache = self._cache()
        steps = [transformer(self._step(cache, *span), cache, prefill).logits for span in self.spans]
        return torch.stack(steps, 1)

    def _parted(self, watches: Mapping[int, Watch]) -> int:
        """The first call in which an untied row picked other positions than it did from the recorded streams: a
        rounding fell the other way, and from there on the sequences part."""
        tied, parted = self._tied(), len(self.spans)
        for layer, watch in watches.items():
            for call, (start, end) in enumerate(self.spans):
                other = (watch.seen[call].picks != self.watches[layer].seen[call].picks).any(1)
                if bool((other & ~tied[layer][:, start:end].flatten()).any()):
                    parted = min(parted, call)
        return parted

    def _judge_steps(self, sheet: Sheet, logits: Tensor, parted: int) -> None:
        rules = _rules(self.case.tolerance, "end to end", "short").get("logits")
        near = bounds({"logits": rules}, "logits", otherwise=NEAR).atol
        share = rules.get("steps_within") if isinstance(rules, Mapping) else None
        least = float(share) if isinstance(share, int | float) and 0 <= share <= 1 else 0.9
        apart = (logits - self.case["logits"])[:, :parted].abs().amax((0, 2))
        if len(apart):
            within, worst = float((apart <= near).double().mean()), float(apart.max())
            text = f"{within:.0%} of {len(apart)} steps within {near:g}, {least:.0%} needed; worst {worst:.2g}"
            sheet.require("logits end to end, step by step", within >= least, text)
            sheet.notes.append(f"{len(apart)} of {len(self.spans)} steps end to end within {worst:.2g}")
        if parted < len(self.spans):
            sheet.notes.append(f"step {parted} end to end picks otherwise after a rounding: mean error from there on")


def _rules(tolerance: Mapping[str, Any], *words: str) -> Mapping[str, Any]:
    """The part of a tolerance whose name has all the words. One given as a text holds rules for several tensors:
    `name rule number, rule number; name ...`."""
    for name, rules in tolerance.items():
        if all(word in name for word in words):
            if isinstance(rules, Mapping):
                return rules
            parts = [part.rpartition(":")[2].split() for part in str(rules).split(";")]
            return {part[0]: " ".join(part[1:]) for part in parts if part}
    return {}
