"""The most memory that a process holds, and programs that are run to find it."""

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def told_by(program: str) -> int:
    """The number that a program prints, run in a process of its own with one thread."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def peak() -> int:
    """In bytes. Linux keeps the parent's peak in `ru_maxrss` across a start of another program, so a small process that
    a large one started would seem never to grow: there `VmHWM`, of this program alone, is asked."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
