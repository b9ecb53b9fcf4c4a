"""quant: the four block formats (`x`), and products of a quantised weight with a quantised activation (`a`)."""

from torch import Tensor

from openv41.formats import FORMATS, WINDOW, BlockFormat, unpack_weight
from openv41.ops import Ops
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds, same_bits
from openv41.parity.folder import Case, Skip

WIDE = Bounds(atol=1e-6, rtol=2e-6)
ROUNDED = Bounds(max_ulp=1, min_equal=0.99)


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    if "a" in case:
        _product(case, ops, sheet)
        return
    form = next((form for name, form in FORMATS.items() if case.name.startswith(name)), None)
    if form is None or "x" not in case:
        raise Skip(f"unknown kind of quant case: names begin with gemm or one of {', '.join(FORMATS)}")
    if case.name.endswith("nonfinite"):
        _report(case, form, sheet)
    else:
        _format(case, form, sheet)


def _format(case: Case, form: BlockFormat, sheet: Sheet) -> None:
    x = case["x"]
    codes, scales = form.pack(x)
    for what, got in (("q", codes), ("scale", scales), ("qdq", form.round(x))):
        sheet.compare(what, *same_bits(got, case[what]), EXACT)


def _report(case: Case, form: BlockFormat, sheet: Sheet) -> None:
    """What infinities and NaN become is not promised: said, not judged."""
    got, wanted = same_bits(form.round(case["x"]), case["qdq"])
    rows = int((got != wanted).flatten(1).any(1).sum()) if got.shape == wanted.shape else len(wanted)
    sheet.reported = True
    sheet.notes.append(f"reported, not judged: {rows} of {len(wanted)} rows with inf or NaN come out otherwise")


def _product(case: Case, ops: Ops, sheet: Sheet) -> None:
    a, weight, scale = case["a"], case["b_q"], case["b_scale"]
    codes, scales = WINDOW.pack(a)
    sheet.compare("a_q", *same_bits(codes, case["a_q"]), EXACT)
    sheet.compare("a_scale", *same_bits(scales, case["a_scale"]), EXACT)
    rounded, wide = ops.linear(a, weight, scale), _wide(a, weight, scale, ops)
    sheet.compare("out_float32", wide, case["out_float32"], bounds(case.tolerance, "out_float32", otherwise=WIDE))
    allowed = bounds(case.tolerance, "out_bfloat16", otherwise=ROUNDED)
    sheet.compare("out_bfloat16", rounded, case["out_bfloat16"], allowed)


def _wide(a: Tensor, weight: Tensor, scale: Tensor, ops: Ops) -> Tensor:
    """The product before it is rounded. `linear` rounds to its input's type, so float32 in gives float32 out, unless
    the set multiplies in bf16: there it is the plain wide product of the same values."""
    if getattr(ops, "bf16_products", False):
        return ops.linear_wide(WINDOW.round(a), unpack_weight(weight, scale))
    return ops.linear(a.float(), weight, scale)
