"""Does it fit? What one GPU of several has to hold, and the largest context or batch for which it would.

Weights are divided by rules that are printed (`ASSUMPTIONS`); state is what `Cache` takes, page by page; scores and
activations are those of this library's code. The largest context and batch are found by trying: what fits is monotone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from typing import Any, Literal

from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.ledger import STACKED
from openv41.explain.scene import Scene, counted_model
from openv41.model.picking import bytes_of_score
from openv41.ops.pieces import BYTES
from openv41.state import Cache
from openv41.state.kinds import bytes_of_slot

GIB = 1 << 30
Place = Literal["device", "host", "disk"]
CHUNK = 2048
"""Tokens of a prompt in one step: what activations are reckoned with."""

ASSUMPTIONS = (
    "weights as this library holds them: fp8 and fp4 as on disk, head and what else computes in float32 widened",
    "routed experts are divided among all GPUs; heads, shared expert, embedding and head among those of a group (tp)",
    "the rest of every layer, vision included, stands on every GPU",
    "groups share the sequences; within a group every GPU keeps all of its sequences' state, because one vector a "
    "position is key and value of all heads",
    "state in packed records, in pages; a ring's slack is that of a draft if there is one",
    f"a GPU works in pieces of {BYTES >> 20:,} MiB at most: index scores take that, or one token's if that is more",
    f"activations: the widest call's inputs and outputs for {CHUNK:,} tokens, three times",
    "Engram's table lies on the devices (divided among all), in host memory, or in a mapped file on disk",
)


@dataclass(frozen=True)
class Plan:
    """What is asked: `gpus` of `memory` bytes each, in groups of `tp`; `context` tokens a sequence, `batch` sequences
    in all. Raises `InputError` for numbers that cannot be."""

    gpus: int
    memory: int
    tp: int = 1
    context: int = 131072
    batch: int = 1
    engram: Place = "host"
    draft: bool = True
    reserve: int = 4 * GIB
    """Bytes of a GPU that are left alone: the runtime's own, fragments."""

    def check(self, config: Config) -> None:
        for name in ("gpus", "tp", "context", "batch"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name} must be 1 or more, got {value}")
        if self.memory <= 0 or self.reserve < 0:
            raise InputError(f"memory must be above 0 and the reserve not below, got {self.memory} and {self.reserve}")
        if self.gpus % self.tp:
            raise InputError(f"tp must divide the number of GPUs ({self.gpus}), got {self.tp}")
        if config.o_groups % self.tp:
            raise InputError(f"tp must divide the {config.o_groups} groups of heads (o_groups), got {self.tp}")
        if self.context > config.context:
            raise InputError(f"the context is {config.context} tokens at most, got {self.context}")

    @property
    def groups(self) -> int:
        return self.gpus // self.tp

    @property
    def sequences(self) -> int:
        """Of the fullest group."""
        return -(-self.batch // self.groups)


@dataclass
class Answer:
    """Bytes of one GPU by what they are for; what lies elsewhere; and the largest context and batch that fit."""

    plan: Plan
    rows: list[tuple[str, str, int]]
    """(kind, what, bytes): kind is weights, state or scratch."""
    elsewhere: dict[str, int] = field(default_factory=dict)
    largest_context: int = 0
    largest_batch: int = 0

    @property
    def used(self) -> int:
        return sum(count for _, _, count in self.rows)

    @property
    def free(self) -> int:
        return self.plan.memory - self.used

    @property
    def fits(self) -> bool:
        return self.free >= 0

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "fits": self.fits,
            "gpus": plan.gpus, "tp": plan.tp, "groups": plan.groups, "memory": plan.memory,
            "context": plan.context, "batch": plan.batch, "sequences_per_group": plan.sequences,
            "engram": plan.engram, "draft": plan.draft,
            "per_gpu": [{"kind": kind, "what": what, "bytes": count} for kind, what, count in self.rows],
            "used": self.used, "free": self.free, "elsewhere": self.elsewhere,
            "largest_context": self.largest_context, "largest_batch": self.largest_batch,
            "assumptions": list(ASSUMPTIONS),
        }  # fmt: skip


def fit(config: Config, plan: Plan) -> Answer:
    """What one GPU holds. `largest_context` is for the batch asked for, `largest_batch` for the context; 0: not one."""
    plan.check(config)
    weights, elsewhere = _weights(config, plan)
    fixed = sum(count for _, _, count in weights) + plan.reserve

    def room(context: int, batch: int) -> bool:
        sequences = -(-batch // plan.groups)
        state = sum(state_bytes(config, sequences, context, plan.draft).values())
        return fixed + state + _scores(config, context) + activations(config) <= plan.memory

    state = state_bytes(config, plan.sequences, plan.context, plan.draft)
    rows = [
        *weights,
        *(("state", name, count) for name, count in state.items() if count),
        ("scratch", "index scores", _scores(config, plan.context)),
        ("scratch", "activations", activations(config)),
        ("scratch", "left alone", plan.reserve),
    ]
    return Answer(
        plan,
        rows,
        elsewhere,
        largest(lambda context: room(context, plan.batch), config.context),
        largest(lambda batch: room(plan.context, batch), 1 << 20),
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `fits` holds; 0 if it does not for 1."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def state_bytes(config: Config, sequences: int, context: int, draft: bool) -> dict[str, int]:
    """By kind, what `Cache` takes for so many slots of so many tokens, packed: pages are as large as they are there."""
    slack = config.dspark_block_size if draft and config.n_mtp_layers else 0
    sizes = bytes_of_slot(config, slack)
    page = _page(config)
    pages = sequences + -(-sequences * context // page)
    fixed = {name: sequences * count for name, count in sizes.fixed.items() if draft or name != "draft"}
    return {
        **fixed,
        **{name: round(pages * page * count) for name, count in sizes.per_token.items()},
        "pages": 8 * sequences * min(pages, -(-config.context // page)),
    }


@lru_cache(maxsize=8)
def _page(config: Config) -> int:
    return Cache(config, 1, 1, device="meta").pages.tokens


@lru_cache(maxsize=8)
def activations(config: Config) -> int:
    tokens = min(CHUNK, config.context)
    root = Scene(config, "prefill", 0, tokens).record()
    return 3 * max(span.activations() for span in root.walk())


def _scores(config: Config, context: int) -> int:
    if not config.index_source_layers:
        return 0
    ratios = [config.compress_ratios[layer] for layer in config.index_source_layers]
    return max(BYTES, context // min(ratios) * bytes_of_score(config.index_n_heads))


GROUPED = (".wq_b.", ".wo_a.", ".wo_b.", ".attn_sink", ".shared_experts.", "embed.weight", "head.weight")
"""In the names of what is divided among the GPUs of a group: heads, groups of heads, inner widths, the vocabulary."""


def _weights(config: Config, plan: Plan) -> tuple[list[tuple[str, str, int]], dict[str, int]]:
    model, _ = counted_model(config)
    rows: dict[str, float] = {}
    table = 0
    for name, parameter in model.named_parameters():
        if name.startswith("mtp.") and not plan.draft:
            continue
        if ".engram.embed." in name:
            table += parameter.nbytes
            continue
        divisor = 1
        if STACKED in name:
            what, divisor = "routed experts", plan.gpus
        elif ".indexer." not in name and any(part in f"{name}" for part in GROUPED):
            what, divisor = "heads, shared experts, embedding, head", plan.tp
        else:
            what = "all else"
        if name.startswith("mtp."):
            what = "draft"
        elif name.startswith(("vision.", "aligner.", "image_")):
            what, divisor = "vision", 1
        rows[what] = rows.get(what, 0) + parameter.nbytes / divisor
    elsewhere = {}
    if table:
        if plan.engram == "device":
            rows["Engram's tables"] = table / plan.gpus
        else:
            elsewhere[f"Engram's tables ({plan.engram})"] = table
    return [("weights", what, ceil(count)) for what, count in rows.items()], elsewhere


def as_text(answer: Answer) -> str:
    """A table of one GPU, and what follows."""
    from openv41.explain.render import columns

    plan = answer.plan
    rows = [["", "one GPU", "GiB", "%"]]
    for kind, what, count in [*answer.rows, ("", "together", answer.used)]:
        rows.append([kind, what, f"{count / GIB:,.2f}", f"{100 * count / plan.memory:.1f}"])
    verdict = (
        f"fits, {answer.free / GIB:,.2f} GiB free"
        if answer.fits
        else f"does not fit: {-answer.free / GIB:,.2f} GiB missing"
    )
    lines = [
        f"{plan.gpus} GPU{'s' if plan.gpus > 1 else ''} of {plan.memory / GIB:g} GiB in groups of {plan.tp}; "
        f"{plan.batch} sequence{'s' if plan.batch > 1 else ''} of {plan.context:,} tokens, {plan.sequences} a group",
        "",
        *columns(rows),
        "",
        f"{verdict}",
        *(f"elsewhere: {what} {count / GIB:,.1f} GiB" for what, count in answer.elsewhere.items()),
        _largest("context", answer.largest_context, f"with batch {plan.batch}", "tokens"),
        _largest("batch", answer.largest_batch, f"at {plan.context:,} tokens", "sequences"),
        "",
        "assumptions",
        *(f"  - {one}" for one in ASSUMPTIONS),
    ]
    return "\n".join(lines)


def _largest(what: str, count: int, where: str, unit: str) -> str:
    return f"largest {what} {where}: " + (f"{count:,} {unit}" if count else "none fits")
