"""What a set of operations may have besides the protocol, and how it is asked for. A set without it does the same by
simple operations; the model says how.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from openv41.ops.compound import Angles, Place


@runtime_checkable
class Opening(Protocol):
    """What a set may have besides: the first maps of an attention layer, and what follows from them, at one go."""

    def query_window(
        self,
        x: Float[Tensor, "n inputs"],
        wq_a: tuple[Tensor, Tensor | None],
        wkv: tuple[Tensor, Tensor | None],
        q_norm: tuple[Tensor, float],
        kv_norm: tuple[Tensor, float],
        angles: Angles,
        packed: bool,
        into: Place | None,
    ) -> tuple[Float[Tensor, "n r"], Shaped[Tensor, "_ _"]]:
        """The low-rank vectors `rms_norm(linear(x, wq_a), q_norm)`, already rounded as the quantised maps that read
        them would round them; and the window's rows, `rotated_store(linear(x, wkv), kv_norm)`. These go into rows of a
        table of the same kind, `into`: the table is returned; or into new ones."""


def opening(ops: Any) -> Opening | None:
    """The same set, if it has that operation too."""
    return ops if hasattr(ops, "query_window") else None


@runtime_checkable
class Selecting(Protocol):
    """What a set may have besides: score and pick for all tokens of a step at once, through the pages of the cache."""

    def select(
        self,
        q: Float[Tensor, "n i c"],
        weights: Float[Tensor, "n i"],
        table: Shaped[Tensor, "rows _"],
        slot: Int[Tensor, "n"],
        pages: Int[Tensor, "slots pages"],
        per_page: int,
        visible: Int[Tensor, "n"],
        k: int,
        most: int,
        runs: Sequence[int],
        block: int,
        keep: int,
        within: Bool[Tensor, "n blocks"] | None,
        kept: int,
        budget: int,
    ) -> tuple[Int[Tensor, "n k"], Int[Tensor, "n k"], Bool[Tensor, "n blocks"] | None]:
        """Each token's picks among its slot's first `visible` positions (`most` at most), as `index_scores` and `pick`
        give them, and their rows; with `keep`, its best blocks of `block` positions too, as `pick_blocks` gives them.

        Position p of slot s is row `pages[s, p // per_page] * per_page + p % per_page` of the table. `runs`: tokens of
        one slot in a row, run by run. `within`: blocks inside which to pick, `kept` of a row's at most. `budget`: bytes
        of scores that may exist at a time."""


def selecting(ops: Any) -> Selecting | None:
    """The same set, if it has that operation too."""
    return ops if hasattr(ops, "select") else None


def meanwhile(ops: Any, run: Callable[..., Tensor], *inputs: Any) -> Callable[[], Tensor]:
    """What gives `run(*inputs)`, for which nothing waits before it is asked for: a set that can begins it beside what
    comes next; the others do it now."""
    return _by("meanwhile", ops, run, inputs)


def put_off(ops: Any, run: Callable[..., Tensor], *inputs: Any) -> Callable[[], Tensor]:
    """The same of something long: a set that can begins it when it finds time, at the latest when it is asked for."""
    return _by("put_off", ops, run, inputs)


def already(result: Tensor) -> Callable[[], Tensor]:
    """What is there, as something to be asked for."""
    return partial(_itself, result)


def _by(way: str, ops: Any, run: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Callable[[], Tensor]:
    own: Callable[..., Callable[[], Tensor]] | None = getattr(ops, way, None)
    return already(run(*inputs)) if own is None else own(run, *inputs)


def _itself(result: Tensor) -> Tensor:
    return result


BESIDES: tuple[type, ...] = (Opening, Selecting)
"""What some sets have and others do not."""
