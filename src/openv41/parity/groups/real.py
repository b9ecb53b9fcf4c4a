"""real: attention layers at the released sizes. Weights and inputs are made by recipe; a prompt, then single steps that
all stand at the same position, each with its own number of candidate blocks.

Of the prompt a step needs only what the layers keep: window, latents, index keys. The reference operations take minutes
for whole prompts of this size. With them the recorded rows of the prompt are run one at a time, and of the tokens in
between only what is kept is written; since these operations are row-stable, the bits are those of the whole prompt.
Other sets run the prompt in one call.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openv41.config import Config
from openv41.model.attention import Attention
from openv41.model.far import Source
from openv41.ops import Ops
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds
from openv41.parity.fill import fill, model_config
from openv41.parity.folder import BadCase, Case, Skip
from openv41.parity.groups.window import recent
from openv41.parity.picks import Seen, Watch, block_best, compare_most, mask_of, without_offset
from openv41.parity.recipe import make
from openv41.plan import plan_layers
from openv41.state import Cache, Sight, Step

Y = Bounds(atol=0.05, relative_rms_error=0.06)
SCORES, CACHES = Bounds(min_equal=0.99, atol=0.06), Bounds(quantum=0.35, min_equal=0.99)


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if not all(isinstance(case.config.get(key), dict) for key in ("weights", "prompt", "steps")):
        raise Skip("unknown kind of real case: its config has no recipes for weights, prompt and steps")
    layers = Layers(case, ops)
    layers.run_prompt(sheet)
    for blocks in case.config["steps"]:
        layers.run_step(sheet, blocks)


class Layers:
    def __init__(self, case: Case, ops: Ops) -> None:
        self.case, self.ops = case, ops
        recipes = case.config["weights"]
        if not all(layer.isdigit() and isinstance(recipes[layer], dict) for layer in recipes):
            raise BadCase("config.weights must map numbers of layers to the recipes of their tensors")
        self.config = model_config(case)
        self.numbers = sorted(int(layer) for layer in recipes)
        table = plan_layers(self.config)
        if not self.numbers or self.numbers[-1] >= self.config.n_layers:
            raise BadCase(f"config.weights names layers {self.numbers}, the model has {self.config.n_layers}")
        self.plan = [table[layer] for layer in self.numbers]
        weights = {layer: _weights(recipes[str(layer)]) for layer in self.numbers}
        self.attention = self._attention(self.config, weights)
        self.prompt = case.whole("prefill", least=1)
        self.cache = Cache(self.config, 1, self.prompt + 1, slack=1, layers=self.plan)
        self.cache.open()

    def _attention(self, config: Config, weights: Mapping[int, Mapping[str, Tensor]]) -> list[Attention]:
        parts = []
        for layer in self.numbers:
            attention = Attention(config, layer, self.ops)
            fill(attention, weights[layer], root=f"layers.{layer}.attn.")
            parts.append(attention)
        return parts

    # The prompt

    def run_prompt(self, sheet: Sheet) -> None:
        kept = self.case["kept_rows"].tolist() if "kept_rows" in self.case else []
        if kept != sorted(set(kept)) or not all(0 <= row < self.prompt for row in kept):
            raise BadCase(f"kept_rows must ascend within the prompt of {self.prompt} tokens, got {kept}")
        inputs = [self._input(self.case.config["prompt"], layer, self.prompt) for layer in self.numbers]
        watches = {part.layer: Watch(part.indexer) for part in self.attention if part.indexer is not None}
        frugal = self.ops.name == "reference"
        rows: dict[int, list[Tensor]] = {layer: [] for layer in self.numbers}
        for start, end in _around(kept, self.prompt) if frugal else [(0, self.prompt)]:
            whole = not frugal or start in kept
            step = self.cache.step([(0, [0] * (end - start))])
            self.cache.admit(step)
            sight = Sight()
            for attention, x in zip(self.attention, inputs, strict=True):
                if whole:
                    y, sight = attention(x[start:end], step, sight, self.cache)
                    rows[attention.layer].append(y)
                else:
                    self._keep(attention, x[start:end], step)
            self.cache.extend(step)
        sheet.notes.append(f"prompt of {self.prompt}: attention over {f'rows {kept}' if frugal else 'all rows'}")
        for layer in self.numbers:
            y = torch.cat(rows[layer]) if rows[layer] else torch.zeros(0)
            places = list(range(len(kept))) if frugal else kept
            self._compare_prompt(sheet, layer, y[places], watches[layer].rows(places) if layer in watches else None)
        self._compare_caches(sheet)

    def _keep(self, attention: Attention, x: Tensor, step: Step) -> None:
        """What a layer keeps of tokens, without attending from them."""
        attention.window(x, step, self.cache.windows[attention.layer])
        if isinstance(attention.far, Source):
            attention.far.publish(x, step, Sight(), self.cache)

    def _input(self, recipes: Any, layer: int, tokens: int) -> Tensor:
        spec = recipes.get(str(layer)) if isinstance(recipes, Mapping) else None
        if not isinstance(spec, Mapping):
            raise BadCase(f"config has no recipe for an input of layer {layer}")
        x, scale = make(spec)
        if scale is not None or x.shape != (1, tokens, self.config.dim):
            raise BadCase(f"{spec.get('name')}: must be bf16, 1 x {tokens} x {self.config.dim}, is {list(x.shape)}")
        return x[0]

    def _compare_prompt(self, sheet: Sheet, layer: int, y: Tensor, seen: Seen | None) -> None:
        """Tied rows with other picks have another result, and are left out."""
        case, judged, same = self.case, torch.ones(len(y), dtype=torch.bool), torch.ones(len(y), dtype=torch.bool)
        if seen is not None and f"prefill_idx_rows.{layer}" in case:
            recorded = without_offset(case[f"prefill_idx_rows.{layer}"][0], self.prompt)
            tied = case[f"prefill_tie_rows.{layer}"][0]
            same = ~compare_most(sheet, f"prefill_idx_rows.{layer}", seen.picks, recorded, tied, self._missable())
            judged = same | ~tied
        if f"prefill_y_rows.{layer}" in case:
            wanted = case[f"prefill_y_rows.{layer}"][0]
            if wanted.shape != y.shape:
                raise BadCase(f"prefill_y_rows.{layer} must have shape {[1, *y.shape]}, has {[1, *wanted.shape]}")
            _compare_y(sheet, f"prefill_y_rows.{layer}", y[judged], wanted[judged], same[judged], case)

    def _compare_caches(self, sheet: Sheet) -> None:
        case, pairs = self.case, {}
        window = self.config.window_size
        for what in case.matching("window_kv."):
            layer = what.removeprefix("window_kv.")
            if not layer.isdigit() or int(layer) not in self.numbers:
                raise BadCase(f"{what}: config.weights has no such layer")
            recorded = case[what]  # the ring's last slots
            count = recorded.shape[1]
            slots = torch.zeros(1, window, recorded.shape[2], dtype=recorded.dtype)
            ours = recent(self.cache, int(layer), 1)
            held = torch.arange(max(0, self.prompt - window), self.prompt) % window
            slots[:, held] = ours
            pairs[what] = slots[:, window - count :], recorded
        sources = [row for row in self.plan if row.latents_from == row.layer]
        for what, kind in (("compress_kv_first_last", "latents"), ("index_k_first_last", "keys")):
            if what in case and sources:
                rows = self.cache.view(kind, sources[0].layer, 0)
                pairs[what] = rows[[0, min(1, len(rows) - 1), len(rows) - 1]].unsqueeze(0), case[what]
        sheet.compare_all(pairs, bounds(case.tolerance, "caches", otherwise=CACHES))

    # One step

    def run_step(self, sheet: Sheet, blocks: str) -> None:
        """A token after the prompt, taken back afterwards: the next step stands at the same position."""
        case, inputs = self.case, self.case.config["steps"][blocks]
        if not blocks.isdigit() or not isinstance(inputs, Mapping):
            raise BadCase(f"config.steps must map a number of candidate blocks to inputs, got {blocks!r}")
        weights = {part.layer: dict(part.named_parameters()) for part in self.attention}
        layers = self._attention(model_config(case, candidate_topk_blocks=int(blocks)), weights)
        watches = [Watch(part.indexer) if part.indexer is not None else None for part in layers]
        step = self.cache.step([(0, [0])])
        self.cache.admit(step)
        sight = Sight()
        candidates = None
        for attention, watch in zip(layers, watches, strict=True):
            layer, start = attention.layer, f"blocks{blocks}."
            x = self._input(inputs.get("inputs"), layer, 1)
            y, sight = attention(x, step, sight, self.cache)
            same = torch.ones(1, dtype=torch.bool)
            if watch is not None:
                seen = watch.seen[-1]
                if seen.blocks is not None:
                    candidates = mask_of(seen.blocks, self.config.candidate_block_size, seen.scores.shape[1])
                    self._compare_candidates(sheet, start, candidates, int(blocks))
                same = ~self._compare_picks(sheet, start, layer, seen, candidates)
            if f"{start}y.{layer}" in case:
                _compare_y(sheet, f"{start}y.{layer}", y, case[f"{start}y.{layer}"][0], same, case)
        self.cache.extend(step)
        self.cache.rewind(0, self.prompt)

    def _compare_candidates(self, sheet: Sheet, start: str, ours: Tensor, most: int) -> None:
        """A block whose best recorded score lies within the scores' tolerance of the boundary may be kept or not."""
        what = f"{start}candidates"
        source = self.config.candidate_source_layer
        if what not in self.case:
            return
        recorded = self.case[what][0]
        if recorded.shape != ours.shape:
            raise BadCase(f"{what} must have shape {[1, *ours.shape]}, has {[1, *recorded.shape]}")
        scores, block = self.case[f"{start}scores.{source}"][0], self.config.candidate_block_size
        visible = torch.full((len(scores),), (self.prompt + 1) // self.config.compress_ratios[source])
        best = block_best(scores, visible, block)
        if best.shape[1] <= most:
            return sheet.compare(what, ours, recorded, EXACT)
        edge = best.sort(-1, descending=True).values[:, most - 1 : most]
        near = (best - edge).abs() <= bounds(self.case.tolerance, "scores", otherwise=SCORES).atol
        decided = ~mask_of(near, block, ours.shape[1])
        sheet.compare(what, ours[decided], recorded[decided], EXACT)
        kept = [int(mask[:, ::block].sum()) for mask in (ours, recorded)]
        sheet.require(what, kept[0] == kept[1], f"{kept[0]} blocks are kept, wanted {kept[1]}")

    def _compare_picks(self, sheet: Sheet, start: str, layer: int, seen: Seen, candidates: Tensor | None) -> Tensor:
        case, what = self.case, f"{start}scores.{layer}"
        if what in case:
            wanted = case[what][0]
            allowed = bounds(case.tolerance, "scores", otherwise=SCORES)
            inside = torch.ones_like(seen.scores, dtype=torch.bool)
            if candidates is not None and self.plan[self.numbers.index(layer)].within is not None:
                inside = candidates & case[f"{start}candidates"][0]
            sheet.compare(what, seen.scores[inside], wanted[inside], allowed)
            if f"{start}margin.{layer}" in case:
                k = self.config.index_topk
                best = seen.scores.float().sort(-1, descending=True).values[0, k - 1 : k + 1]
                near = Bounds(atol=allowed.atol)
                sheet.compare(f"{start}margin.{layer}", best, case[f"{start}margin.{layer}"], near)
        if f"{start}idx.{layer}" not in case:
            return torch.zeros(1, dtype=torch.bool)
        recorded = without_offset(case[f"{start}idx.{layer}"][0], self.config.window_size)
        return compare_most(sheet, f"{start}idx.{layer}", seen.picks, recorded, seen.tied, self._missable())

    def _missable(self) -> int:
        """How many picks of a row may be others: `at least 510 of the 512 positions equal` makes 2."""
        words = str(self.case.tolerance.get("idx", "")).split()
        numbers = [int(word) for word in words if word.isdigit()]
        if words[:2] == ["at", "least"] and len(numbers) > 1 and 0 <= numbers[1] - numbers[0] <= numbers[1] // 50:
            return numbers[1] - numbers[0]
        return 2


def _weights(recipes: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {}
    for name, spec in recipes.items():
        if not isinstance(spec, Mapping):
            raise BadCase(f"config.weights: {name} must have a recipe")
        tensors[name], scale = make(spec)
        if scale is not None:
            tensors[f"{name.removesuffix('weight')}scale"] = scale
    return tensors


def _around(kept: list[int], count: int) -> Iterator[tuple[int, int]]:
    """`count` positions as spans in order, each kept row a span by itself."""
    start = 0
    for row in kept:
        if start < row:
            yield start, row
        yield row, row + 1
        start = row + 1
    if start < count:
        yield start, count


def _compare_y(sheet: Sheet, what: str, got: Tensor, wanted: Tensor, same: Tensor, case: Case) -> None:
    """Rows with the recorded picks must be nearer than those with a few others."""
    allowed = bounds(case.tolerance, "y", otherwise=Y)
    if got.shape != wanted.shape:
        raise BadCase(f"{what} must have shape {[1, *got.shape]}, has {[1, *wanted.shape]}")
    rules = case.tolerance.get("y")
    tight = rules.get("relative_rms_error_if_positions_equal") if isinstance(rules, Mapping) else None
    share = tight if isinstance(tight, float) and 0 <= tight <= 1 else 0.01
    equal = replace(allowed, relative_rms_error=min(share, allowed.relative_rms_error))
    sheet.compare(what, got[same], wanted[same], equal)
    sheet.compare(what, got[~same], wanted[~same], allowed)
