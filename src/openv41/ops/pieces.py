"""How much of something large is made at a time.

Rows of queries, their gathered keys, scores, logits: what an operation makes on its way may be far larger than what it
is given and what it gives. So it is made in pieces. On a CPU a piece should stay near a core's cache, and each
operation has its own number. On a GPU every piece costs the same few microseconds to begin, however small: there as
much is made at once as `BYTES` hold, and up to there neither the number of tokens nor that of sequences changes how
often something is begun.
"""

import torch

LAUNCH_BOUND = ("cuda",)
"""Types of device on which it costs more to begin an operation than to work on a few thousand rows."""

BYTES = 2 << 30
"""What a piece may take on such a device."""


def launch_bound(device: torch.device) -> bool:
    """Whether few large operations are better there than many small ones."""
    return device.type in LAUNCH_BOUND


def rows_at_once(device: torch.device, bytes_of_row: int, otherwise: int) -> int:
    """How many rows that take so many bytes to make at a time: `otherwise` where beginning costs little."""
    return max(1, BYTES // max(1, bytes_of_row)) if launch_bound(device) else otherwise
