"""Where the recorded cases lie."""

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
