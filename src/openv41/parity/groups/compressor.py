"""compressor: tokens to latents, a prompt and then single steps; what an open group keeps in between."""

from collections.abc import Mapping

import torch
from torch import Tensor

from openv41.config import Config
from openv41.model.compressor import Compressor
from openv41.ops import Ops
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds
from openv41.parity.fill import fill, weights_of
from openv41.parity.folder import BadCase, Case, Skip
from openv41.state import Ring, Step

LATENTS, STATE = Bounds(max_ulp=1), Bounds(atol=2e-6, rtol=2e-6)


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if "decode_produced" in case:
        _latents(case, ops, sheet)
    elif case.matching("w."):
        _weights(case, ops, sheet)
    else:
        raise Skip("unknown kind of compressor case: it has neither decode_produced nor weights")


def _compressor(ratio: int, eps: float, weights: Mapping[str, Tensor], ops: Ops) -> Compressor:
    """A compressor asks nothing of a configuration but widths, which the weights have."""
    part = Compressor(Config.tiny().replace(norm_eps=eps), ratio, ops)
    fill(part, weights, loose=True)
    return part


def _weights(case: Case, ops: Ops, sheet: Sheet) -> None:
    weights = weights_of(case)
    _compressor(2 if "wgate.weight" in weights else 1, 1e-20, weights, ops)
    sheet.reported = True
    sheet.notes.append(f"{len(weights)} weights for other cases, read and fitted")


def _latents(case: Case, ops: Ops, sheet: Sheet) -> None:
    ratio, x = case.whole("ratio", least=1, most=64), case["x"]  # [b, t, dim]
    batch, tokens = x.shape[:2]
    part = _compressor(ratio, case.number("norm_eps"), weights_of(case), ops)
    width = 2 * part.norm.weight.shape[0]
    ring = Ring(batch, ratio - 1, width, torch.float32, "cpu") if ratio > 1 else None
    steps = len(case["decode_produced"])
    prompt = tokens - steps
    if prompt < 1:
        raise BadCase(f"x has {tokens} tokens, of which {steps} are single steps: no prompt is left")

    def take(start: int, end: int) -> Tensor:
        step = Step.pack([(slot, start, [0] * (end - start)) for slot in range(batch)])
        return part(x[:, start:end].flatten(0, 1), step, ring).unflatten(0, (batch, -1))

    def open_group(length: int) -> dict[str, tuple[Tensor, Tensor]]:
        if ring is None or not length % ratio:
            return {}
        when = "after_prefill" if length == prompt else "end"
        rows = torch.stack([ring.rows_of(slot, range(length - length % ratio, length)) for slot in range(batch)])
        halves = zip((f"kv_state_{when}", f"score_state_{when}"), rows.chunk(2, -1), strict=True)
        return {what: (half, case[what][:, : length % ratio]) for what, half in halves}

    latents = bounds(case.tolerance, otherwise=LATENTS)
    state = bounds(case.tolerance, "state", otherwise=STATE)
    out = take(0, prompt)
    if "prefill_out" in case or out.shape[1]:
        sheet.compare("prefill_out", out, case["prefill_out"], latents)
    sheet.compare_all(open_group(prompt), state)
    made = [take(at, at + 1) for at in range(prompt, tokens)]
    produced = torch.tensor([piece.shape[1] == 1 for piece in made])
    sheet.compare("decode_produced", produced, case["decode_produced"], EXACT)
    if "decode_out" in case or produced.any():
        sheet.compare("decode_out", torch.cat(made, 1) if made else out[:, :0], case["decode_out"], latents)
    sheet.compare_all(open_group(tokens), state)
