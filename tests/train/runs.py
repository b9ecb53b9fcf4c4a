"""Small training runs: a model of 120 thousand weights with every role, and texts that a simple grammar makes."""

import json
import random

import torch

from openv41.config import engram_primes
from openv41.ops import choose
from openv41.train.settings import Settings
from tests.small import drafting_config

WHO = ("the fisherman", "his daughter", "an old keeper", "the boat", "a candle", "the harbour")
DOES = ("looks at", "passes", "remembers", "waits for", "never sees", "turns to")


def config_of_runs():
    """Four layers: a window alone, two sources, a re-scorer; memory before two of them, one draft stage."""
    primes = engram_primes(2, 2, 1, 50)
    return drafting_config(
        vocab_size=320, dspark_noise_token_id=318, image_token_id=319, dim=32, n_heads=2, n_layers=4, n_mtp_layers=1,
        compress_ratios=(0, 2, 1, 1, 0), kv_source_layers=(1, 2), index_source_layers=(1, 2, 3), n_routed_experts=3,
        candidate_source_layer=2, dspark_target_layer_ids=(2, 3), hc_mult=2, hc_sinkhorn_iters=4, window_size=8,
        engram_layer_ids=(0, 1), engram_n_heads=1, engram_num_embeddings=[sum(map(sum, layer)) for layer in primes],
    )  # fmt: skip


def plain_ops():
    """What runs compute with unless they say otherwise."""
    return choose("cpu", numerics="plain", training=True, dtype=torch.float32)


def texts(count, seed=0):
    """Documents of a few sentences, subject, verb, object."""
    draw = random.Random(seed)
    return [
        " ".join(f"{draw.choice(WHO)} {draw.choice(DOES)} {draw.choice(WHO)}." for _ in range(draw.randint(2, 12)))
        for _ in range(count)
    ]


def settings_of(folder, **sections):
    """Settings of a quick run in `folder`; each section's changes by name."""
    (folder / "model.json").write_text(json.dumps(config_of_runs().to_dict()))
    lines = [json.dumps({"text": text}) for text in texts(120)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    values = {
        "folder": "run",
        "steps": 6,
        "model": {"base": "model.json", "tokenizer": "tiny"},
        "data": {
            "train": ["texts.jsonl"], "validation_share": 0.1, "validation_tokens": 256, "context": 64, "tokens": 64,
        },
        "optimizer": {"rate": 1.2e-2, "warmup": 3},
        "loss": {},
        "record": {"validate_every": 0, "checkpoint_every": 2},
    }  # fmt: skip
    for name, changes in sections.items():
        values[name] = values[name] | changes if isinstance(changes, dict) else changes
    (folder / "train.toml").write_text(as_toml(values))
    return Settings.from_toml(folder / "train.toml")


def as_toml(values):
    """TOML of a table of values and tables."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for section, inner in values.items():
        if isinstance(inner, dict):
            # A table within a section is written in one line.
            flat = {key: value for key, value in inner.items() if not isinstance(value, dict)}
            tables = {key: as_toml(inner[key]).replace("\n", ", ") for key in inner.keys() - flat.keys()}
            lines += [f"[{section}]", as_toml(flat), *(f"{key} = {{ {text} }}" for key, text in tables.items())]
    return "\n".join(lines)
