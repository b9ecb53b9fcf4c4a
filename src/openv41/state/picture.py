"""`Picture`: an image on its way into a prompt, and the span of tokens that it becomes there.

A span is a start, the picture's rows of cells, each closed by a newline, and an end. All of its tokens carry the same
id; a type tells them apart.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Int
from torch import Tensor

from openv41.errors import InputError


class Mark(IntEnum):
    """What a token of a span stands for. Tokens of text have the type -1."""

    START = 0
    CELL = 1
    NEWLINE = 2
    END = 3


TEXT = -1


@dataclass(frozen=True, eq=False)
class Picture:
    """Patches [rows * columns, 3, size, size] in reading order, colours from -1 to 1. Raises `InputError`."""

    patches: Tensor
    rows: int
    columns: int

    def __post_init__(self) -> None:
        shape, count = tuple(self.patches.shape), self.rows * self.columns
        if self.rows < 1 or self.columns < 1 or len(shape) != 4 or shape[:2] != (count, 3) or shape[2] != shape[3]:
            raise InputError(
                f"a picture of {self.rows} x {self.columns} patches must be [{count}, 3, size, size], got {list(shape)}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows, self.columns

    def types(self, ratio: int) -> Int[Tensor, "t"]:
        """The types of its span's tokens, `ratio` x `ratio` patches being one cell."""
        return span_types(*cells(self.rows, self.columns, ratio))

    def tokens(self, ratio: int) -> int:
        return span_length(*cells(self.rows, self.columns, ratio))


@dataclass(frozen=True, eq=False)
class Placed:
    """A picture in a prompt: its span begins at the position `start`."""

    start: int
    picture: Picture


def cells(rows: int, columns: int, ratio: int) -> tuple[int, int]:
    """Rows and columns of cells that a grid of patches becomes."""
    return -(-rows // ratio), -(-columns // ratio)


def span_length(rows: int, columns: int) -> int:
    """Tokens of a span of so many rows and columns of cells."""
    return rows * (columns + 1) + 2


def span_types(rows: int, columns: int) -> Int[Tensor, "t"]:
    """The type of each token of such a span."""
    line = [Mark.CELL] * columns + [Mark.NEWLINE]
    return torch.tensor([Mark.START] + line * rows + [Mark.END], dtype=torch.int64)
