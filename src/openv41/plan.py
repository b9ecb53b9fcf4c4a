"""Who reads whom: one row per layer, from the four lists of the configuration.

A layer sees its own window and, where its ratio is above 0, a far part: *latents* (one for `ratio` tokens) and *picks*
(which latents to read). A source makes both, a re-scorer makes picks among a source's latents, a reader makes neither.
The picks of a re-scorer below a candidate source stay within the blocks which that source chose.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Literal

from openv41.config import Config

Half = Literal["encoder", "decoder", "draft"]


class Role(Enum):
    """What a layer does about the far past."""

    WINDOW = "window"
    SOURCE = "source"
    CANDIDATE_SOURCE = "candidate source"
    RESCORER = "re-scorer"
    READER = "reader"


@dataclass(frozen=True)
class LayerPlan:
    """One row of the table. None stands where a question does not arise."""

    layer: int  # draft stages are numbered on after the backbone
    role: Role
    ratio: int  # tokens per latent; 0 for a window alone
    latents_from: int | None  # the layer whose latents and index keys this one reads; its own number in a source
    picks_from: int | None  # the layer whose picks this one reads; its own number in a source or a re-scorer
    within: int | None  # the candidate source whose blocks bound this re-scorer's picks
    name: str  # as in a checkpoint: layers.7, mtp.0
    half: Half  # encoder: before the last KV source; decoder: from it on, or all if there is none
    engram: bool  # reads the n-gram memory before its attention
    theta: float  # base of the rotary frequencies
    yarn: bool  # rotary frequencies stretched beyond the original length
    tapped: bool  # the draft reads the stream that enters this layer
    experts: int
    experts_per_token: int

    @property
    def publishes_candidates(self) -> bool:
        """Whether this layer chooses the blocks within which later layers pick."""
        return self.role is Role.CANDIDATE_SOURCE


@lru_cache
def plan_layers(config: Config) -> tuple[LayerPlan, ...]:
    """The table: the backbone's layers, then the draft's stages."""
    backbone = [_backbone_row(config, layer) for layer in range(config.n_layers)]
    return (*backbone, *(_draft_row(config, stage) for stage in range(config.n_mtp_layers)))


def _backbone_row(config: Config, layer: int) -> LayerPlan:
    ratio = config.compress_ratios[layer]
    role = _role(config, layer)
    bounded = role is Role.RESCORER and 0 <= config.candidate_source_layer < layer
    return LayerPlan(
        layer=layer,
        role=role,
        ratio=ratio,
        latents_from=_latest(config.kv_source_layers, layer) if ratio else None,
        picks_from=_latest(config.index_source_layers, layer) if ratio else None,
        within=config.candidate_source_layer if bounded else None,
        name=f"layers.{layer}",
        half="encoder" if layer < max(config.kv_source_layers, default=0) else "decoder",
        engram=layer in config.engram_layer_ids,
        theta=config.compress_rope_theta if ratio else config.rope_theta,
        yarn=ratio > 0 and config.original_seq_len > 0,
        tapped=config.n_mtp_layers > 0 and layer in config.dspark_target_layer_ids,
        experts=config.n_routed_experts,
        experts_per_token=config.n_activated_experts,
    )


def _role(config: Config, layer: int) -> Role:
    if config.compress_ratios[layer] == 0:
        return Role.WINDOW
    if layer == config.candidate_source_layer:
        return Role.CANDIDATE_SOURCE
    if layer in config.kv_source_layers:
        return Role.SOURCE
    return Role.RESCORER if layer in config.index_source_layers else Role.READER


def _latest(sources: Sequence[int], layer: int) -> int:
    return max(source for source in sources if source <= layer)


def _draft_row(config: Config, stage: int) -> LayerPlan:
    return LayerPlan(
        layer=config.n_layers + stage,
        role=Role.WINDOW,
        ratio=0,
        latents_from=None,
        picks_from=None,
        within=None,
        name=f"mtp.{stage}",
        half="draft",
        engram=False,
        theta=config.rope_theta,
        yarn=False,
        tapped=False,
        experts=config.dspark_n_routed_experts or config.n_routed_experts,
        experts_per_token=config.dspark_n_activated_experts or config.n_activated_experts,
    )


def last_published(plan: Sequence[LayerPlan], layer: int, position: int) -> int | None:
    """The KV source whose index keys were the last to be published when `layer` scores at `position`, in single steps.

    A source publishes at the positions that complete one of its groups, layers in ascending order, each before it
    scores. The published code keeps one slot for index keys, so a source of ratio 2 that completes nothing scores
    against whatever is in the slot: the keys of a later layer, from the step before. None: nothing was published yet.
    """
    sources = [row for row in plan if row.latents_from == row.layer]
    longest = max((row.ratio for row in sources), default=0)
    for step in range(position, max(position - longest - 1, -1), -1):  # within `longest` steps every source publishes
        published = [row.layer for row in sources if (step + 1) % row.ratio == 0]
        before = [source for source in published if step < position or source <= layer]
        if before:
            return max(before)
    return None


def plan_rows(config: Config) -> list[dict[str, Any]]:
    """The table ready for JSON, one object per layer."""
    return [
        {**asdict(row), "role": row.role.value, "publishes_candidates": row.publishes_candidates}
        for row in plan_layers(config)
    ]


def plan_table(config: Config) -> list[list[str]]:
    """The table as text, a row of headings first; "-" where a question does not arise."""
    headings = "layer name half role ratio latents picks within memory theta yarn tapped experts active".split()
    rows = [
        (row.layer, row.name, row.half, row.role.value, row.ratio, row.latents_from, row.picks_from, row.within)
        + (row.engram, row.theta, row.yarn, row.tapped, row.experts, row.experts_per_token)
        for row in plan_layers(config)
    ]
    return [headings, *([_cell(value) for value in row] for row in rows)]


def _cell(value: object) -> str:
    if value is None or value is False:
        return "-"
    if value is True:
        return "yes"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def format_plan(config: Config) -> str:
    """The table in aligned columns, numbers to the right."""
    table = plan_table(config)
    columns = list(zip(*table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [any(cell[0].isdigit() for cell in column[1:]) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        for row in table
    ]
    return "\n".join(line.rstrip() for line in lines)
