"""`Standing`: steps of one token a slot whose tensors stay where they are, so that a CUDA graph can replay them.

A graph replays addresses: what a step reads must lie where it lay when the graph was captured. `Standing` holds ids,
slots and positions of a batch in tensors of its own. `step()` gives them as an ordinary `Step`; `advance()` moves every
position on by one, in place.

Which groups a step completes is a number that would change the shapes of what is made. A standing step makes every
token's latent, whether its group is complete or not: the row of an open group is seen by nobody, and is written again
when the group's last token comes.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from openv41.errors import InputError
from openv41.state.step import Run, Step


class Standing:
    """The next token of some slots, again and again. `lengths`: what each slot holds already. `ahead`: by how many
    positions a captured step may move on before it is captured anew.

    The cache must have `slack` of at least 1 (an open group's rows are then read from the ring itself), and pages for
    the tokens to come. Raises `InputError` for lists of unequal length, and for an `ahead` below 1.
    """

    def __init__(self, slots: Sequence[int], lengths: Sequence[int], device: str | torch.device, ahead: int) -> None:
        if not slots or len(slots) != len(lengths):
            raise InputError(f"a standing step needs a length for each slot, got {len(slots)} and {len(lengths)}")
        if ahead < 1:
            raise InputError(f"a standing step moves on by at least 1 position, got ahead={ahead}: raise it")
        self.ahead = ahead
        self.slots, self.lengths = list(slots), list(lengths)
        self.ids: Int[Tensor, "n"] = torch.zeros(len(slots), dtype=torch.int64, device=device)
        self.slot = torch.tensor(self.slots, device=device)
        self.position = torch.tensor(self.lengths, device=device)
        self.row = torch.arange(len(slots), device=device)
        self.nothing = torch.zeros(len(slots), dtype=torch.bool, device=device)
        self.floor = torch.zeros_like(self.position)

    def step(self) -> Step:
        """The step as it stands. Its tensors share the memory of these ones; what is worked out from them is not kept
        from one call to the next."""
        places = enumerate(zip(self.slots, self.lengths, strict=True))
        position = self.position.view(-1)
        return Step(
            ids=self.ids,
            slot=self.slot,
            position=position,
            start=position,
            runs=tuple(Run(slot, length, 1, first) for first, (slot, length) in places),
            wanted=self.row,
            image=self.nothing,
            floor=self.floor,
            ahead=self.ahead,
        )

    def advance(self) -> None:
        """Every slot has its token: on to the next position."""
        self.position += 1
        self.lengths = [length + 1 for length in self.lengths]
