"""Recall of the indexers: of the latents that a layer's attention weighs most, how many its indexer has picked."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from openv41.model.transformer import Transformer
from openv41.train.data import Pack
from openv41.train.language import run_headless
from openv41.train.lessons import Lessons


@torch.no_grad()
def measure(model: Transformer, pieces: Sequence[np.ndarray]) -> dict[str, Any]:
    """The mean over the pieces, by layer; what chance would give beside it, from how many latents there are to see."""
    device = model.embed.weight.device
    found: dict[int, list[float]] = {}
    for piece in pieces:
        with Lessons(model) as lessons:
            run_headless(model, Pack((piece,)).step(device))
        for layer, share in lessons.recall().items():
            found.setdefault(layer, []).append(share)
    config, tokens = model.config, len(pieces[0]) - 1
    rows = [
        {
            "layer": layer,
            "recall": float(np.mean(shares)) if all(map(math.isfinite, shares)) else None,
            "chance": chance(tokens, config.compress_ratios[layer], config.index_topk),
        }
        for layer, shares in found.items()
    ]
    return {"documents": len(pieces), "tokens": tokens, "picks": config.index_topk, "rows": rows}


def chance(tokens: int, ratio: int, picks: int) -> float | None:
    """The share that picks at random would find, over the tokens that see more latents than they may pick."""
    visible = (np.arange(tokens) + 1) // ratio
    many = visible[visible > picks]
    return float((picks / many).mean()) if len(many) else None


def table(found: dict[str, Any]) -> str:
    def shown(share: float | None) -> str:
        return "-" if share is None else f"{share:.3f}"

    rows = [f"| {row['layer']} | {shown(row['recall'])} | {shown(row['chance'])} |" for row in found["rows"]]
    return "\n".join(["| layer | recall | picks at random |", "|---|---|---|", *rows])
