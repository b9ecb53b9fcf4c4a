"""The values that travel with the data, and their lifetimes.

`Step`   one call: `n` tokens of any mixture of sequences. Frozen.
`Sight`  one descent through the layers: what a source hands down to the layers below it. Replaced, never changed.
`Cache`  conversations: all that a sequence keeps between calls. Changed in place, by verbs.
`Standing`  steps of one token a slot whose tensors stay where they are: what a captured graph replays.
`Picture`  an image on its way into a prompt. Frozen; nothing is left of it but rows of the step that it lies in.

A sequence lives in a *slot* of the cache. Tables are two-dimensional and read by row number; -1 names no row. Slots,
rings and pages are then only a matter of row numbers, and `Ring` and `Paged` are where those are worked out.
"""

from openv41.state.cache import Cache, SourceState
from openv41.state.picture import Mark, Picture, Placed
from openv41.state.sight import Sight
from openv41.state.standing import Standing
from openv41.state.step import Groups, Reach, Run, Step
from openv41.state.tables import Joined, Paged, Pages, Ring

__all__ = [
    "Cache", "Groups", "Joined", "Mark", "Paged", "Pages", "Picture", "Placed", "Reach", "Ring", "Run", "Sight",
    "SourceState", "Standing", "Step",
]  # fmt: skip
