"""`Sight`: one descent through the layers, what a source hands down to the layers below it."""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from openv41.errors import CacheError
from openv41.state.tables import Joined, Paged


@dataclass(frozen=True)
class Sight:
    """What the layers above hand down. A source replaces what it makes; readers read.

    `latents` and `keys`: the tables of the latest KV source (`Joined` where latents carry gradient). `picks` [n, k]:
    compressed positions that the latest index source chose, ascending, -1 for none; `rows`: the same as row numbers of
    the latents. `candidates` [n, blocks]: the blocks within which a re-scorer picks. `ngrams` [n, max n]: each token's
    compressed id and those before it.
    """

    latents: Paged | Joined | None = None
    keys: Paged | None = None
    picks: Int[Tensor, "n k"] | None = None
    rows: Int[Tensor, "n k"] | None = None
    candidates: Bool[Tensor, "n blocks"] | None = None
    ngrams: Int[Tensor, "n order"] | None = None

    def holds(self, latents: Paged) -> bool:
        """Whether these latents are handed down already."""
        return self.latents is not None and self.latents.paged is latents

    def having(self, **changes: Any) -> "Sight":
        return replace(self, **changes)

    def rows_of(self, rows: Int[Tensor, "kept"]) -> "Sight":
        """The same for some of the step's tokens only."""

        per_token = {name: getattr(self, name) for name in ("picks", "rows", "candidates", "ngrams")}
        return self.having(**{name: None if one is None else one[rows] for name, one in per_token.items()})

    def source(self) -> tuple[Paged | Joined, Paged]:
        """Latents and index keys of the latest KV source."""
        if self.latents is None or self.keys is None:
            raise CacheError("no layer above has made latents: run the layers in order, from a KV source on")
        return self.latents, self.keys

    def far(self) -> tuple[Tensor, Int[Tensor, "n k"]]:
        """The table of latents and each token's rows of it."""
        if self.latents is None or self.rows is None:
            raise CacheError("no layer above has picked positions: run the layers in order, from an index source on")
        return self.latents.table, self.rows
