"""Pictures in the prompts of a batch: what stands for their tokens in the steps that read the prompts.

A picture goes through the tower once, with the first step that holds a token of it and together with all others that
begin there. A border between two steps may lie inside of it: the rows that later steps need wait until then.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from openv41.errors import InputError
from openv41.model.transformer import Transformer
from openv41.state import Placed


class Pictures:
    """`placed`: of each sequence its pictures, in order."""

    def __init__(self, transformer: Transformer, placed: Sequence[Sequence[Placed]]) -> None:
        ratio = transformer.config.vision_downsample_ratio
        self.transformer = transformer
        self.spans = [
            [(one.start, one.start + one.picture.tokens(ratio), one.picture) for one in each] for each in placed
        ]
        self.seen: dict[tuple[int, int], Float[Tensor, "t dim"]] = {}

    def take(
        self, parts: Sequence[tuple[int, int, int]]
    ) -> tuple[Bool[Tensor, "n"] | None, Float[Tensor, "i dim"] | None]:
        """`image` and `features` of a step, for parts (sequence, first position, position behind the last), that
        continue where the parts before have ended. None where no picture has a token in it."""
        marked: list[range] = []
        wanted: list[tuple[tuple[int, int], slice]] = []
        before = 0
        for sequence, first, last in parts:
            for number, (start, end, _) in enumerate(self.spans[sequence]):
                if start < last and end > first:
                    some = range(max(start, first), min(end, last))
                    marked.append(range(some.start - first + before, some.stop - first + before))
                    wanted.append(((sequence, number), slice(some.start - start, some.stop - start)))
            before += last - first
        if not wanted:
            return None, None
        image = torch.zeros(before, dtype=torch.bool)
        for some in marked:
            image[some.start : some.stop] = True
        self._see([key for key, _ in wanted if key not in self.seen])
        features = torch.cat([self.seen[key][rows] for key, rows in wanted])
        for key, rows in wanted:
            if rows.stop == len(self.seen[key]):
                del self.seen[key]
        return image.to(features.device), features

    def _see(self, keys: Sequence[tuple[int, int]]) -> None:
        pictures = [self.spans[sequence][number][2] for sequence, number in keys]
        self.seen.update(zip(keys, self.transformer.see(pictures), strict=True))


def check_pictures(transformer: Transformer, ids: Sequence[int], placed: Sequence[Placed], name: str) -> None:
    """Raises `InputError` unless each picture's span lies in the prompt, behind the one before it, and has its id."""
    config = transformer.config
    if placed and transformer.vision is None:
        raise InputError(f"{name} has images, but the model has no vision tower; give it text alone")
    behind = 0
    for number, one in enumerate(placed, 1):
        end = one.start + one.picture.tokens(config.vision_downsample_ratio)
        if not behind <= one.start or end > len(ids):
            raise InputError(
                f"image {number} of {name} takes positions {one.start} to {end - 1}: it must lie within the "
                f"{len(ids)} tokens of the prompt, behind the image before it (which ends at {behind})"
            )
        if any(id != config.image_token_id for id in ids[one.start : end]):
            raise InputError(f"image {number} of {name}: all its tokens must have the id {config.image_token_id}")
        behind = end
