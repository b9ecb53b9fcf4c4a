"""The most memory that this process has held."""

import resource
from pathlib import Path


def peak() -> int:
    """In bytes. Linux keeps the parent's peak in `ru_maxrss` across a start of another program, so a small process that
    a large one started would seem never to grow: there `VmHWM`, of this program alone, is asked."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
