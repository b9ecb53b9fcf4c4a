"""gzip, bz2 and xz on the bytes that the model is measured on: all documents in one piece, and each by itself."""

import bz2
import gzip
import lzma
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": partial(gzip.compress, compresslevel=9, mtime=0),
    "bz2 -9": partial(bz2.compress, compresslevel=9),
    "xz -9e": partial(lzma.compress, preset=9 | lzma.PRESET_EXTREME),
}


def measure(texts: Sequence[str]) -> dict[str, Any]:
    """Bits per byte, headers included."""
    pieces = [text.encode() for text in texts]
    total = sum(map(len, pieces))
    whole = b"".join(pieces)
    bits = {
        name: {
            "together": 8 * len(pack(whole)) / total,
            "each": 8 * sum(len(pack(piece)) for piece in pieces) / total,
        }
        for name, pack in COMPRESSORS.items()
    }
    return {"documents": len(pieces), "bytes": total, "bits_per_byte": bits}


def rows(found: dict[str, Any]) -> list[str]:
    """For the table of bits per byte."""
    return [
        f"| {name}, {words} | {bits[way]:.3f} |"
        for name, bits in found["bits_per_byte"].items()
        for way, words in (("together", "all documents in one piece"), ("each", "each document by itself"))
    ]
