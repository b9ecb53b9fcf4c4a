"""What commands write: results on stdout, notes on stderr."""

import json
import sys
from typing import Any


def note(text: str) -> None:
    """One line for the person, beside the result."""
    print(f"openv41: {text}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Readable where the output takes every character, escaped elsewhere."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, indent=2, ensure_ascii=not unicode), flush=True)


def human_bytes(count: int) -> str:
    """1234567 -> 1.2 MiB"""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def table(rows: list[list[str]]) -> str:
    """Aligned columns, without blanks at line ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
