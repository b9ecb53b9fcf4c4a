"""The kinds of state that a sequence has, as a table: what `docs/state.md` prints, and what bytes a slot takes.

`bytes_of_slot` works the sizes out from the configuration alone; `Cache.nbytes` asks the tensors. Tests hold the two
against each other.
"""

from dataclasses import dataclass

from openv41.config import Config
from openv41.formats import INDEX, LATENT, WINDOW
from openv41.plan import plan_layers


@dataclass(frozen=True)
class Kind:
    """One kind of state, in words."""

    name: str
    holds: str
    kept_by: str
    written: str
    read_by: str
    after_rewind: str


KINDS = (
    Kind(
        "window",
        "a ring of `window_size + slack` vectors of a head's width",
        "every layer",
        "every token",
        "the layer's own attention",
        "rows of rejected tokens are overwritten before they are read",
    ),
    Kind(
        "latents",
        "one vector per `ratio` tokens, in pages",
        "KV sources",
        "when a group is complete",
        "attention of the source and of the layers that read it",
        "rows past the length are never read",
    ),
    Kind(
        "keys",
        "one index key per `ratio` tokens, in pages",
        "KV sources",
        "with the latents",
        "indexers of the source and of re-scorers",
        "as latents",
    ),
    Kind(
        "group",
        "kv and gate in float32 of the last `slack + ratio - 1` tokens",
        "KV sources of ratio 2",
        "every token",
        "the compressor, when the group is complete",
        "as window",
    ),
    Kind(
        "tail",
        "id and image flag of the last `order - 1 + slack` tokens",
        "the model",
        "every token",
        "the n-gram hash of Engram",
        "as window",
    ),
    Kind(
        "draft",
        "a ring of `window_size + slack` vectors of a head's width",
        "the draft's stages, where asked for",
        "every token, when the draft is told of it",
        "the stage's attention",
        "as window",
    ),
)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a slot: `fixed` by kind, whatever its length, and `per_token` by kind."""

    fixed: dict[str, int]
    per_token: dict[str, float]


def bytes_of_slot(config: Config, slack: int = 0, packed: bool = True) -> Sizes:
    """Sizes in a cache of that storage (packed records, or bf16 rows), with the draft's rings. Pages round `per_token`
    up; see `Cache`."""

    def row(form_bytes: int, width: int) -> int:
        return form_bytes if packed else 2 * width

    backbone = plan_layers(config)[: config.n_layers]
    ratios = [layer.ratio for layer in backbone if layer.latents_from == layer.layer]
    window = row(WINDOW.record_bytes(config.head_dim), config.head_dim)
    latent = row(LATENT.record_bytes(config.head_dim), config.head_dim)
    key = row(INDEX.record_bytes(config.index_head_dim), config.index_head_dim)
    groups = sum(2 * config.head_dim * 4 * (slack + ratio - 1) for ratio in ratios if ratio > 1)
    return Sizes(
        fixed={
            "window": config.n_layers * (config.window_size + slack) * window,
            "group": groups,
            "tail": 2 * 8 * max(1, config.engram_max_ngram_size - 1 + slack),
            "draft": config.n_mtp_layers * (config.window_size + slack) * window,
        },
        per_token={
            "latents": sum(latent / ratio for ratio in ratios),
            "keys": sum(key / ratio for ratio in ratios),
        },
    )


def state_table(config: Config) -> str:
    """The table of kinds, in Markdown, with the bytes of a packed slot without slack."""
    sizes = bytes_of_slot(config)
    lines = ["| kind | holds | kept by | bytes | written | read by | after a rewind |", "|---|---|---|---|---|---|---|"]
    for kind in KINDS:
        if kind.name in sizes.fixed:
            size = f"{sizes.fixed[kind.name]:,} a slot"
        else:
            size = f"{sizes.per_token[kind.name]:,.0f} a token"
        cells = (kind.name, kind.holds, kind.kept_by, size, kind.written, kind.read_by, kind.after_rewind)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
