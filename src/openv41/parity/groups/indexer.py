"""indexer: one that owns its keys (`latent`), and candidate blocks from given scores (`mask`)."""

import torch
from torch import Tensor

from openv41.formats import INDEX
from openv41.model.indexer import Indexer, Keys
from openv41.model.layers import Rotary
from openv41.ops import Ops
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds
from openv41.parity.fill import fill, model_config, weights_of
from openv41.parity.folder import BadCase, Case, Skip
from openv41.parity.picks import Watch, block_best, compare_picks, mask_of, tied_blocks, without_offset
from openv41.plan import plan_layers
from openv41.state import Step

SCORES = Bounds(max_ulp=2, min_equal=0.98)
STORED = Bounds(quantum=0.35, min_equal=0.995)


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if "mask" in case and "scores" in case:
        _candidates(case, ops, sheet)
    elif "latent" in case and "qr" in case:
        _own_keys(case, ops, sheet)
    else:
        raise Skip("unknown kind of indexer case: it has neither scores and mask nor latent and qr")


def _candidates(case: Case, ops: Ops, sheet: Sheet) -> None:
    scores, mask = case["scores"], case["mask"]  # [b, n, p] each
    block, most = case.whole("block_size", least=1), case.whole("topk_blocks", least=1)
    batch, rows, positions = scores.shape
    visible = case["lens"].flatten() if "lens" in case else torch.full((rows,), case.whole("len"))
    if visible.shape != (rows,) or int(visible.max()) > positions or int(visible.min()) < 0:
        raise BadCase(f"lens must be one number for each of {rows} rows, up to {positions}")
    got = [ops.pick_blocks(scores[b], visible, block, most) for b in range(batch)]
    masks = torch.stack([mask_of(blocks, block, positions) for blocks in got])
    tied = torch.stack([tied_blocks(scores[b], visible, block, most) for b in range(batch)])
    sheet.compare("mask", masks[~tied], mask[~tied], bounds(case.tolerance, "mask"))
    if tied.any():
        _tied_candidates(sheet, scores, visible, block, masks, mask, tied)


def _tied_candidates(
    sheet: Sheet, scores: Tensor, visible: Tensor, block: int, ours: Tensor, theirs: Tensor, tied: Tensor
) -> None:
    """Either of two equal blocks may be kept: as many blocks, none of them worse."""
    best = torch.stack([block_best(row, visible, block) for row in scores])

    def kept(mask: Tensor) -> Tensor:  # the best scores of the blocks kept, best first
        return best.masked_fill(~mask[..., ::block], -torch.inf).sort(-1, descending=True).values

    sheet.compare("mask (tied rows)", kept(ours)[tied], kept(theirs)[tied], EXACT)


def _own_keys(case: Case, ops: Ops, sheet: Sheet) -> None:
    config = model_config(case)
    layer = next(iter(config.kv_source_layers), None)
    if layer is None:
        raise BadCase("config.kv_source_layers names no layer that owns index keys")
    row = plan_layers(config)[layer]
    rotary = Rotary.for_branch(config, compressed=True)
    indexer = Indexer(config, row, rotary, ops)
    fill(indexer, weights_of(case))
    watch = Watch(indexer)
    x, qr, latent = case["x"], case["qr"], case["latent"]  # [b, t, dim], [b, t, r], [b, p, d]
    batch, tokens = x.shape[:2]
    if latent.shape[:2] != (batch, tokens // row.ratio):
        raise BadCase(f"latent must have {batch} x {tokens // row.ratio} rows, has {list(latent.shape[:2])}")
    first = (torch.arange(latent.shape[1]) * row.ratio).repeat(batch)
    keys = ops.quantise(indexer.keys(latent.flatten(0, 1), first), INDEX).unflatten(0, (batch, -1))
    sheet.compare("k_cache", keys, case["k_cache"], bounds(case.tolerance, "k_cache", "keys", otherwise=STORED))

    def take(start: int, end: int) -> Step:
        step = Step.pack([(slot, start, [0] * (end - start)) for slot in range(batch)])
        known = [Keys.of(keys[slot, : end // row.ratio]) for slot in range(batch)]
        indexer(x[:, start:end].flatten(0, 1), qr[:, start:end].flatten(0, 1), step, known, within=None)
        return step

    prompt = case.whole("prefill", least=1)
    spans = {"prefill": (0, prompt)} | {f"decode_{at}": (at, at + 1) for at in range(prompt, tokens)}
    scores = {}
    for name, (start, end) in spans.items():
        step = take(start, end)
        seen = watch.seen[-1]
        wanted = case[f"{name}_scores"].flatten(0, 1)
        scores[f"{name}_scores"] = seen.scores, wanted
        if name == "prefill":
            q, _ = indexer.queries(x[:, :end].flatten(0, 1), qr[:, :end].flatten(0, 1), step.position)
            allowed = bounds(case.tolerance, "prefill_q", "queries", otherwise=STORED)
            sheet.compare("prefill_q", q, case["prefill_q"].flatten(0, 1), allowed)
        offset = prompt if start == 0 else case.whole("decode_offset")
        recorded = without_offset(case[f"{name}_idx"].flatten(0, 1), offset)
        tied = case[f"{name}_tie"].flatten()
        compare_picks(sheet, f"{name}_idx", seen.picks, recorded, tied, (seen.scores, wanted))
    sheet.compare_all(scores, bounds(case.tolerance, "scores", otherwise=SCORES))
