"""Whether what was read before is found again: a passage of random tokens, others in between, and the passage anew.

Nobody can know the passage the first time. The second time a model that finds it and reads on knows every token but
the first few. With the passage's beginning within the window of raw KV, window attention is enough; beyond it, the
tokens must have come through compressed positions that an indexer picked.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from figures.likelihood import nats
from openv41.model.transformer import Transformer

PASSAGE = 40
"""Tokens of a passage; with nothing in between, all of it lies within a window of 128."""
BETWEEN = (0, 60, 300, 1000, 4000)
KNOWN = 4
"""Tokens of the second passage by which the first may be recognised: they are not counted."""


def measure(
    model: Transformer, ids: range, window: int, draws: int, between: Sequence[int] = BETWEEN
) -> dict[str, Any]:
    """Mean nats of a passage's tokens the first time and the second, by tokens in between; of `draws` passages each,
    with tokens drawn from `ids`."""
    draw = np.random.default_rng(0)
    rows = []
    for gap in between:
        passages = [draw.integers(ids.start, ids.stop, PASSAGE) for _ in range(draws)]
        pieces = [np.concatenate((one, draw.integers(ids.start, ids.stop, gap), one)) for one in passages]
        values = np.stack(nats(model, pieces))
        again = PASSAGE + gap + KNOWN - 1  # the value before which this token stands
        rows.append(
            {
                "between": gap,
                "first": float(values[:, KNOWN : PASSAGE - 1].mean()),
                "again": float(values[:, again:].mean()),
            }
        )
    return {"passage": PASSAGE, "draws": draws, "window": window, "rows": rows}


def table(found: dict[str, Any]) -> str:
    rows = [f"| {row['between']:,} | {row['first']:.2f} | {row['again']:.2f} |" for row in found["rows"]]
    return "\n".join(
        [
            f"| random tokens in between (window {found['window']}; {found['draws']} passages of {found['passage']}) | "
            "nats a token, first | again |",
            "|---|---|---|",
            *rows,
        ]
    )
