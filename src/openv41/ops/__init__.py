"""The one seam between the model's maths and the machine: a few named operations on tensors.

`ReferenceOps` says what each operation is; the other sets say how to do it fast. What a set does not override it
inherits by name. An overridden operation that meets a shape it cannot do raises `OpsError`: nothing falls back in
silence.

Letters: `n` tokens in this step, `t` rows attended to, `h` heads, `d` head dim, `m` streams, `k` picks, `e` experts,
`i` index heads, `c` index dim, `p` compressed positions, `r` rotary dim, `g` output groups.

`numerics` is "published" (bf16 activations, fp8 and fp4 rounding where the published model rounds) or "plain" (one
float dtype throughout, no rounding of our own: what the model would be on ideal hardware, and the form that can be
differentiated and compared to 1e-9).
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from openv41.errors import OpsError
from openv41.formats import BlockFormat
from openv41.ops.besides import BESIDES, Opening, Selecting, already, meanwhile, opening, put_off, selecting
from openv41.ops.compound import Angles, Compound, Place
from openv41.ops.pieces import launch_bound, rows_at_once
from openv41.ops.reference import Activation, Numerics, ReferenceOps


@runtime_checkable
class Ops(Protocol):
    """What the model asks of a machine. Shapes and meaning here; arithmetic and rounding in `ReferenceOps`."""

    name: str
    numerics: Numerics
    dtype: torch.dtype

    def linear(self, x: Float[Tensor, "n inputs"], weight: Tensor, scale: Tensor | None) -> Float[Tensor, "n outputs"]:
        """x @ weight.T with a stored weight; a quantised weight meets a quantised activation. In x's dtype."""

    def linear_wide(self, x: Float[Tensor, "n inputs"], weight: Tensor) -> Float[Tensor, "n outputs"]:
        """x @ weight.T left in the accumulator's precision (float32; float64 for float64)."""

    def linear_bias(self, x: Float[Tensor, "n inputs"], weight: Tensor, bias: Tensor) -> Float[Tensor, "n outputs"]:
        """x @ weight.T + bias, nothing quantised. In x's dtype."""

    def grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Tensor | None
    ) -> Float[Tensor, "n g outputs"]:
        """Each group of x with its own rows of weight [g * outputs, inputs]; the activation is not quantised."""

    def rms_norm(self, x: Float[Tensor, "*n k"], weight: Tensor, eps: float) -> Float[Tensor, "*n k"]:
        """x over its root mean square, times weight."""

    def rotate(
        self, x: Float[Tensor, "n *h d"], cos: Float[Tensor, "n half"], sin: Float[Tensor, "n half"], inverse: bool
    ) -> Float[Tensor, "n *h d"]:
        """Turn adjacent pairs of the last `2 * half` entries by the token's angles; `inverse` turns them back."""

    def quantise(self, x: Float[Tensor, "*n k"], form: BlockFormat) -> Float[Tensor, "*n k"]:
        """What x is after being stored in `form`."""

    def store(self, x: Float[Tensor, "*n k"], form: BlockFormat, packed: bool) -> Tensor:
        """What goes into a table for x: rounded rows, or (packed) records of bytes."""

    def read(self, rows: Tensor, form: BlockFormat) -> Float[Tensor, "*n k"]:
        """The values of rows taken from a table, rounded rows or records alike."""

    def pool(
        self, kv: Float[Tensor, "a d"], gate: Float[Tensor, "a d"], rows: Int[Tensor, "groups ratio"]
    ) -> Float[Tensor, "groups d"]:
        """One vector per group of rows: per channel, the softmax of the gates weights the kv."""

    def index_scores(
        self, q: Float[Tensor, "n i c"], weights: Float[Tensor, "n i"], keys: Float[Tensor, "p c"]
    ) -> Float[Tensor, "n p"]:
        """sum over heads of relu(q . key) * weight."""

    def pick(self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], k: int) -> Int[Tensor, "n k"]:
        """The k best of each row's first `visible` positions, ascending; -1 fills up. Equal scores: lower first."""

    def pick_blocks(
        self, scores: Float[Tensor, "n p"], visible: Int[Tensor, "n"], block: int, k: int
    ) -> Bool[Tensor, "n blocks"]:
        """The k blocks of positions with the highest maximum, the block of the newest visible position among them."""

    def sparse_attention(
        self,
        q: Float[Tensor, "n h d"],
        near: Shaped[Tensor, "a _"],
        near_rows: Int[Tensor, "n w"],
        far: Shaped[Tensor, "b _"] | None,
        far_rows: Int[Tensor, "n k"] | None,
        sink: Float[Tensor, "h"],
        scale: float,
    ) -> Float[Tensor, "n h d"]:
        """Softmax attention over the rows named, which are key and value at once, plus a sink; row -1 is nothing.

        Tables hold rounded rows [.., d], or records of bytes: near in the window's format, far in the latents'."""

    def full_attention(
        self,
        q: Float[Tensor, "n h d"],
        k: Float[Tensor, "n h d"],
        v: Float[Tensor, "n h d"],
        lengths: Sequence[int],
        scale: float,
    ) -> Float[Tensor, "n h d"]:
        """Softmax attention in which each row sees all rows of its own group: the first `lengths[0]` rows are one
        group, the next `lengths[1]` another, and so on."""

    def mix(
        self, streams: Float[Tensor, "n m dim"], fn: Tensor, base: Tensor, scale: Tensor, rounds: int, eps: float,
        norm_eps: float,
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"], Float[Tensor, "n m m"]]:  # fmt: skip
        """Mixing coefficients of the hyper-connection: pre (read), post (write), comb (carry over)."""

    def collapse(self, streams: Float[Tensor, "n m dim"], pre: Float[Tensor, "n m"]) -> Float[Tensor, "n dim"]:
        """The streams' mix that a sublayer reads."""

    def expand(
        self,
        y: Float[Tensor, "n dim"],
        streams: Float[Tensor, "n m dim"],
        post: Float[Tensor, "n m"],
        comb: Float[Tensor, "n m m"],
    ) -> Float[Tensor, "n m dim"]:
        """A sublayer's result written back to all streams."""

    def route(
        self, logits: Float[Tensor, "n e"], bias: Float[Tensor, "*n e"], k: int, scale: float, function: str
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Weights and numbers of each token's k experts, best first; the bias takes part in the choice only. Weights
        are scores over their sum, times scale; with k = 1 the score itself, times scale."""

    def swiglu(
        self, gate: Float[Tensor, "n f"], up: Float[Tensor, "n f"], limit: float, routing: Float[Tensor, "n 1"] | None
    ) -> Float[Tensor, "n f"]:
        """silu(gate) * up with both clamped at `limit` (0: not at all), times the routing weight."""

    def activate(self, x: Float[Tensor, "*n k"], function: Activation) -> Float[Tensor, "*n k"]:
        """silu (x times its sigmoid) or gelu (x times the normal distribution's share below x), element by element."""

    def experts(
        self,
        x: Float[Tensor, "n dim"],
        routing: Float[Tensor, "n k"],
        chosen: Int[Tensor, "n k"],
        w1: tuple[Tensor, Tensor | None],
        w2: tuple[Tensor, Tensor | None],
        w3: tuple[Tensor, Tensor | None],
        limit: float,
    ) -> Float[Tensor, "n dim"]:
        """Sum of the chosen experts' results in the accumulator's precision, in ascending order of expert."""

    def look_up_rows(self, table: Tensor, scale: Tensor | None, rows: Int[Tensor, "*n"]) -> Float[Tensor, "*n width"]:
        """Rows of a stored table, which may be a memory-mapped file: only the rows named are touched."""

    def engram_gate(
        self,
        streams: Float[Tensor, "n m dim"],
        keys: Float[Tensor, "n m dim"],
        value: Float[Tensor, "n dim"],
        weight: Float[Tensor, "m dim"],
        open: Bool[Tensor, "n"],
        eps: float,
    ) -> Float[Tensor, "n m dim"]:
        """streams + gate * value, the gate from the agreement of stream and key; where not `open` it is 0."""

    # Of several operations, as `ops.compound` composes them

    def rotated_linear(
        self,
        x: Float[Tensor, "n inputs"],
        weight: Tensor,
        scale: Any,
        width: int,
        angles: Angles,
        form: BlockFormat | None = None,
    ) -> Float[Tensor, "n h width"]:
        """A linear map to heads of `width`, their tails turned; rounded to `form` if there is one."""

    def rotated_store(
        self,
        x: Float[Tensor, "n d"],
        norm: tuple[Tensor, float] | None,
        angles: Angles,
        form: BlockFormat,
        packed: bool,
        into: Place | None = None,
    ) -> Shaped[Tensor, "_ _"]:
        """What goes into a table for x, (normed and) turned: into rows of it, or given back."""

    def pooled(
        self,
        kv: Float[Tensor, "a d"],
        gate: Float[Tensor, "a d"],
        rows: Int[Tensor, "groups ratio"],
        norm: tuple[Tensor, float],
    ) -> Float[Tensor, "groups d"]:
        """`pool`, normed."""

    def rotated_attention(
        self,
        q: Float[Tensor, "n h d"],
        near: Shaped[Tensor, "a _"],
        near_rows: Int[Tensor, "n w"],
        far: Shaped[Tensor, "b _"] | None,
        far_rows: Int[Tensor, "n k"] | None,
        sink: Float[Tensor, "h"],
        scale: float,
        angles: Angles,
    ) -> Float[Tensor, "n h d"]:
        """Sparse attention, its result turned back by the query's own angles."""

    def rounded_grouped_linear(
        self, x: Float[Tensor, "n g inputs"], weight: Tensor, scale: Any, form: BlockFormat | None
    ) -> Float[Tensor, "n outputs"]:
        """`grouped_linear`, the groups' results side by side, rounded as the map that reads them would round them."""


SETS = ("reference", "fast", "cpu", "hopper")

__all__ = [
    "BESIDES",
    "SETS",
    "Activation",
    "Angles",
    "Compound",
    "Numerics",
    "Opening",
    "Ops",
    "Place",
    "ReferenceOps",
    "Selecting",
    "already",
    "choose",
    "launch_bound",
    "meanwhile",
    "opening",
    "put_off",
    "rows_at_once",
    "selecting",
    "trains_by_kernel",
]


def choose(
    device: str | torch.device = "cpu",
    want: str = "auto",
    numerics: Numerics = "published",
    training: bool = False,
    **options: Any,
) -> Ops:
    """The set of operations for a device: "reference", "fast", "cpu", "hopper"; "auto" is cpu on a CPU, else fast.

    `training` makes it differentiable: the same results, with straight-through gradients (see `ops.training`).
    `options` go to the set's constructor: `dtype` with plain numerics, `weights` with the fast and cpu sets.
    Raises `OpsError` for an unknown name or a set that the device cannot run.
    """
    from openv41.ops.cpu import CpuOps
    from openv41.ops.fast import FastOps
    from openv41.ops.training import TrainingOps

    kind = torch.device(device).type
    if want == "auto":
        want = "cpu" if kind == "cpu" else "fast"
    if want not in SETS:
        raise OpsError(f"unknown set of ops {want!r}: use one of {', '.join(SETS)}, or auto")
    if want == "cpu" and kind != "cpu":
        raise OpsError(f"the cpu ops run on the CPU only, not on {kind}: use fast or auto there")
    sets: dict[str, type[ReferenceOps]] = {"reference": ReferenceOps, "fast": FastOps, "cpu": CpuOps}
    ops = (_hopper(device, training) if want == "hopper" else sets[want])(numerics, **options)
    return TrainingOps(ops) if training else ops


def _hopper(device: str | torch.device, training: bool) -> type[ReferenceOps]:
    """The class of the hopper ops, those for training or the others. Their kernels are only there where Triton is."""
    kind = torch.device(device)
    if kind.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(kind)[0] != 9:
        raise OpsError(f"the hopper ops run on GPUs of compute capability 9.0, not on {kind}: use fast or auto there")
    try:
        from openv41.ops.hopper import HopperOps, TrainedOps
    except ModuleNotFoundError as error:
        raise OpsError(f"the hopper ops need {error.name}: install the extra hopper, or use fast") from None
    return TrainedOps if training else HopperOps


def trains_by_kernel(device: str | torch.device, heads: int, width: int, streams: int, dim: int) -> bool:
    """Whether the hopper ops train here a model with so many heads of `width`, and so many streams of `dim`."""
    kind = torch.device(device)
    if kind.type != "cuda" or torch.cuda.get_device_capability(kind)[0] != 9 or find_spec("triton") is None:
        return False
    from openv41.ops.hopper import TrainedOps

    return TrainedOps.fits(heads, width, streams, dim)
