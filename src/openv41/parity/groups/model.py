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
from openv41.state import Cache, Picture, Step
from openv41.state.picture import TEXT, Mark

STREAMS, MIXES, TAPS = Bounds(min_equal=0.97, atol=0.05), Bounds(atol=1e-3), Bounds(max_ulp=1)
PICTURED, PICTURED_MIXES = Bounds(atol=0.25, relative_rms_error=0.05), Bounds(atol=0.01)
"""Of the first block from a picture's first cell on. What enters there is no recorded stream but what our own tower
makes, whose last bits depend on the order of bf16 sums. Two cells exchanged are a relative error of 0.3."""
HEAD = Bounds(atol=1e-3, rtol=1e-4)
"""Logits from the recorded last stream: one norm and one float32 product."""
DRAFTS = Bounds(atol=0.05, rms_error=5e-3)
"""Logits and confidence from the recorded taps: a few layers, in which a rounding may fall the other way."""
NEAR, LOOSE = Bounds(atol=0.05), Bounds(atol=torch.inf, rms_error=0.3)
LONG = 256
"""Prompts from here on count as long: their end-to-end results drift apart."""


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if "ids" not in case or "logits" not in case:
        raise Skip("unknown kind of model case: it has no ids and logits")
    model = Model(case, ops)
    model.check_span(sheet)
    model.block_by_block(sheet)
    model.end_to_end(sheet)
    if case.matching("spec_"):
        model.drafts(sheet)


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
        self.picture = self._picture()
        self.types = torch.full_like(self.ids, TEXT)
        if self.picture is not None:
            self.types[:, : self.prompt] = case["token_types"]
        self.features: Tensor | None = None

    def _picture(self) -> Picture | None:
        """The picture in the prompt, where there is one."""
        told = self.case.settings.get("image")
        if "patches" not in self.case:
            return None
        size = [told.get(key) for key in ("n_vit_h", "n_vit_w")] if isinstance(told, Mapping) else [None]
        if self.batch != 1 or {type(value) for value in size} != {int}:
            raise BadCase("a prompt with patches must be one sequence, and config.image must tell n_vit_h and n_vit_w")
        return Picture(self.case["patches"], *size)

    def check_span(self, sheet: Sheet) -> None:
        """The picture's tokens as we would lay them out."""
        if self.picture is None:
            return
        own, start = self.picture.types(self.config.vision_downsample_ratio), self.case.settings["image"].get("start")
        ids, types = self.ids[0, : self.prompt], torch.full((self.prompt,), TEXT)
        if type(start) is not int or not 0 <= start <= self.prompt - len(own):
            raise BadCase(f"config.image.start must leave room for {len(own)} tokens in the prompt, got {start!r}")
        types[start : start + len(own)] = own
        sheet.compare("token_types", types, self.case["token_types"][0], EXACT)
        span = ids[start : start + len(own)]
        sheet.require("ids", bool((span == self.config.image_token_id).all()), "a span has the image token's id")

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
        fill(transformer, self.weights)
        if transformer.lookback is not None:
            transformer.lookback.token_map.copy_(self._token_map())
        parts = [(layer, block.attn.indexer) for layer, block in enumerate(transformer.blocks())]
        return transformer, {layer: Watch(indexer) for layer, indexer in parts if indexer is not None}

    def _cache(self, draft: bool = False) -> Cache:
        cache = Cache(self.config, self.batch, self.batch * self.tokens, draft=draft)
        for _ in range(self.batch):
            cache.open()
        return cache

    def _step(self, cache: Cache, start: int, end: int) -> Step:
        parts = [(slot, self.ids[slot, start:end]) for slot in range(self.batch)]
        image = self.types[:, start:end].flatten() != TEXT
        if self.picture is None or not image.any():
            return cache.step(parts)
        if self.features is None:
            (self.features,) = self.transformer.see([self.picture])
        return cache.step(parts, image=image, features=self.features)

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
        pictured = (self.types == Mark.CELL).cummax(1).values[:, tail] & judged[0]
        judged[0] &= ~pictured
        for what, ours, wanted, otherwise, loosely in (
            ("block_outputs", ours_h, h, STREAMS, PICTURED),
            ("block_pre_mix", ours_pre, pre, MIXES, PICTURED_MIXES),
        ):
            after = ours[0][:, tail][pictured], wanted[0][:, tail][pictured]
            sheet.compare(f"{what}.0 from the picture on", *after, loosely)
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

    def _recorded(self, what: str, along: int = 2) -> Tensor:
        """The recorded values at all positions, which lie along one dimension: where a case has those of the steps
        alone, its prompt is that of the case whose prefill it shares."""
        own = self.case[what]
        missing = self.tokens - own.shape[along]
        if not missing:
            return own
        for relative in self.case.relatives():
            if what not in relative or "ids" not in relative or relative[what].shape[along] < missing:
                continue
            if torch.equal(relative["ids"][:, :missing], self.ids[:, :missing]):
                return torch.cat((relative[what].narrow(along, 0, missing), own), along)
        raise BadCase(f"{what}: {own.shape[along]} of {self.tokens} positions, and no related case has the others")

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

    # Drafts

    def drafts(self, sheet: Sheet) -> None:
        """A draft after every single step, from the recorded taps of all tokens so far and the token that came next.
        Where another token was drafted, all behind it is another draft: it is left out."""
        draft = self.transformer.mtp
        if draft is None:
            raise BadCase("config.n_mtp_layers is 0, but drafts (spec_*) are recorded")
        main, given = self._recorded("main_hidden", 1), self.case["greedy_next"]  # [b, t, width], [b, 1 + steps]
        cache, proposals = self._cache(draft=True), []
        for call, (start, end) in enumerate(self.spans):
            step = self._step(cache, start, end)
            cache.admit(step)
            draft.remember(main[:, start:end].flatten(0, 1), step, cache)
            cache.extend(step)
            if call:
                proposals.append(draft.greedy(given[:, call], range(self.batch), cache))
        ids, logits, confidence = (torch.stack(values, 1) for values in zip(*proposals, strict=True))
        told = _rules(self.case.tolerance, "end to end", "short")
        same = (ids == self.case["spec_ids"]).all(-1)  # [b, steps]
        share, least = float(same.double().mean()), 0.9
        sheet.require("spec_ids", share >= least, f"equal in {share:.0%} of the steps, {least:.0%} needed")
        for what, ours in (("spec_logits", logits), ("spec_conf", confidence)):
            allowed = bounds(told, what, otherwise=DRAFTS)
            sheet.compare(what, ours[same], self.case[what][same], allowed)
        sheet.notes.append(f"drafts of {int(same.sum())} of {same.numel()} steps agree")

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
