"""The recorder: what goes in and out at the edges of the model's parts, while the model runs.

It stands at method calls (`Attention.forward`, `Attention.query`, ...) and at the cache's tables, and changes nothing.
Each call becomes a `Span`: the shapes that went in and came out, what the operations inside it would multiply and read,
the bytes of state read and written. Spans nest as the calls do.

Shapes are shown in one view, however the step is packed:

    n tokens                    -> [batch, position, ...]
    groups that a step completes -> [batch, group, ...]
    a table of latents or keys  -> [batch, compressed position, width]: the positions that the last token may see
    candidate blocks            -> [batch, position, compressed position], a mask
    a ring                      -> [batch, slot, width]

Names of axes are read from the shapes in the method's own signature. What a layer reads of `Sight` is watched field by
field, so a layer that came to read something else would show it.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from openv41.explain.counting import CountingOps, values_in
from openv41.formats import INDEX, LATENT, WINDOW, BlockFormat
from openv41.model.attention import Attention
from openv41.model.block import Block
from openv41.model.draft import MarkovHead
from openv41.model.far import Source
from openv41.model.indexer import Indexer
from openv41.model.streams import Streams
from openv41.model.transformer import Output, Transformer
from openv41.model.vision import VisionBlock
from openv41.plan import LayerPlan
from openv41.state import Cache, Groups, Paged, Ring, Sight, Step

AXES = {
    "dim": "model width", "h": "head", "d": "head width", "r": "rank", "m": "stream", "k": "pick", "e": "expert",
    "i": "index head", "c": "index width", "v": "vocabulary", "vocab": "vocabulary", "w": "window row", "p": "patch",
    "t": "cell", "3": "colour", "j": "wanted token", "width": "width", "block": "place", "places": "place",
    "b": "batch",
    "groups": "group", "g": "group", "size": "pixel", "kept": "position", "order": "n-gram", "rows": "row",
    "inputs": "input", "outputs": "output",
}  # fmt: skip

RESULTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Attention", "forward"): ("y", "sight"),
    ("Attention", "query"): ("q", "qr"),
    ("Attention", "window"): ("", "window rows"),
    ("Attention", "stored"): ("row",),
    ("Attention", "output"): ("y",),
    ("Indexer", "forward"): ("picks",),
    ("Indexer", "queries"): ("q", "weights"),
    ("Compressor", "forward"): ("latents",),
    ("Router", "forward"): ("routing", "chosen"),
    ("Transformer", "logits"): ("logits",),
    ("Engram", "forward"): ("streams",),
    ("MarkovHead", "embedding"): ("embedding",),
    ("WideLinear", "forward"): ("bias of the logits",),
    ("ConfidenceHead", "forward"): ("confidence",),
    ("Draft", "forward"): ("hidden",),
    ("Draft", "logits"): ("logits",),
    ("VisionTower", "forward"): ("features",),
    ("Aligner", "forward"): ("rows",),
    ("Block", "forward"): ("streams", "sight"),
    ("Stage", "descend"): ("streams",),
    ("Drafting", "next"): ("logits", "confidence"),
    ("ops", "pick_blocks"): ("candidates",),
    ("ops", "sparse_attention"): ("out",),
    ("HyperConnection", "read"): ("x",),
    ("HyperConnection", "write"): ("streams",),
}
"""Names of what a method returns, where one word says more than "y"."""

LATENTS, KEYS = "latents", "keys"

FORMS = {"window": WINDOW, "draft": WINDOW, LATENTS: LATENT, KEYS: INDEX}
"""In which format rows of a kind of state are stored; the other kinds are plain numbers."""


@dataclass(frozen=True)
class Value:
    """One thing that crosses an edge: its name, its shape in the view, what the axes are, and its type."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str
    nbytes: int = 0
    """Of an activation; 0 for what lies in the cache."""


@dataclass
class Touched:
    """Bytes of one kind of state that a call reads and writes, of all its sequences together."""

    read: int = 0
    written: int = 0


@dataclass
class Span:
    """One call. `flops` by format, `read` in bytes by kind, and `state` by (kind, layer) include those of `inside`."""

    path: str
    method: str
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    flops: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    state: dict[tuple[str, int], Touched] = field(default_factory=dict)
    inside: list["Span"] = field(default_factory=list)
    count: int = 1

    def touch(self, kind: str, layer: int, read: int = 0, written: int = 0) -> None:
        touched = self.state.setdefault((kind, layer), Touched())
        touched.read += read
        touched.written += written

    def walk(self) -> Iterator["Span"]:
        yield self
        for span in self.inside:
            yield from span.walk()

    def activations(self) -> int:
        """Bytes of what goes in and comes out."""
        return sum(value.nbytes for value in (*self.inputs, *self.outputs))


class Watched(Sight):
    """A `Sight` that notes which of its fields are asked for."""

    FIELDS = frozenset(one.name for one in fields(Sight))

    @classmethod
    def over(cls, sight: Sight) -> "Watched":
        watched = cls(**{name: getattr(sight, name) for name in cls.FIELDS})
        object.__setattr__(watched, "asked", [])
        return watched

    def __getattribute__(self, name: str) -> Any:
        if name in Watched.FIELDS:
            asked = self.__dict__.get("asked")
            if asked is not None and name not in asked:
                asked.append(name)
        return super().__getattribute__(name)

    def having(self, **changes: Any) -> Sight:
        return Sight(**{name: self.__dict__[name] for name in self.FIELDS} | changes)

    def holds(self, latents: Paged) -> bool:
        return self.__dict__["latents"] is latents  # whether they are published is no reading of them


class Recorder:
    """Spans of one call after another. `batch` sequences of `tokens` tokens: how the view unpacks a step."""

    def __init__(self, plan: Sequence[LayerPlan], batch: int, tokens: int) -> None:
        self.batch, self.tokens = batch, tokens
        self.plan = {f"{row.name}.attn": row for row in plan}
        self.root = Span("", "")
        self.stack = [self.root]
        self.step: Step | None = None
        self.sight: Sight | None = None
        self.seen: dict[int, int] = {}  # by ratio, compressed positions that the step's sequences see together

    # Listening

    @contextmanager
    def on(self, model: Transformer, cache: Cache, ops: CountingOps) -> Iterator["Recorder"]:
        """Record while the context lasts. The model, the cache and the operations are then as before."""
        undo: list[Callable[[], None]] = []
        ops.listener, before = self._operation, ops.listener
        try:
            for path, owner, method in edges(model):
                undo.append(self._stand_at(owner, method, path))
            for method in ("sparse_attention", "pick_blocks"):
                undo.append(self._stand_at(ops, method, None))
            for kind, layer, table in tables(cache):
                undo += self._watch_table(kind, layer, table)
            undo.append(self._watch_reads(ops))
            yield self
        finally:
            for take_away in reversed(undo):
                take_away()
            ops.listener = before

    def stand_at(self, owner: Any, method: str, path: str) -> None:
        """Record a method of a value that does not outlive the recording."""
        self._stand_at(owner, method, path)

    def _stand_at(self, owner: Any, method: str, path: str | None) -> Callable[[], None]:
        original = getattr(owner, method)
        described: Any = CountingOps if path is None else type(owner)
        kind, signature = "ops" if path is None else type(owner).__name__, _signature(described, method)
        annotations = _annotations(described, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            span = Span(self.stack[-1].path if path is None else path, method if path is not None else f"ops.{method}")
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            watched = None
            if isinstance(owner, Attention) and method == "forward":
                self._take(arguments["step"])
                self.sight = arguments["sight"]
                watched = arguments["sight"] = Watched.over(arguments["sight"])
                args, kwargs = (), arguments
            self.stack[-1].inside.append(span)
            self.stack.append(span)
            try:
                attends = path is None and method == "sparse_attention"
                span.inputs = list(self._attention(arguments) if attends else self._inputs(arguments, annotations))
                if isinstance(owner, Indexer) and method == "forward":
                    span.inputs += self._scored(arguments)
                if method == "begin" and isinstance(owner, Transformer):  # rows of the embedding are no operation
                    row = owner.embed.weight
                    self._operation("embed", Counter(), Counter(table=len(arguments["step"]) * row.nbytes // len(row)))
                    self._take(arguments["step"])
                if method == "logits" and isinstance(owner, Transformer):  # it takes the rows that are wanted
                    span.inputs = [_share(one, arguments["step"]) for one in span.inputs]
                result = original(*args, **kwargs)
                if watched is not None:
                    span.inputs += self._sight({name: getattr(watched, name) for name in watched.__dict__["asked"]})
                span.outputs = list(self._outputs(kind, method, result, annotations.get("return"), arguments))
                if path is None and method == "sparse_attention":
                    self._attended(span, arguments)
            finally:
                self.stack.pop()
            return result

        owner.__dict__[method] = call
        return lambda: owner.__dict__.pop(method)

    def _take(self, step: Step) -> None:
        if step is not self.step:
            self.step, self.seen = step, {}

    def _operation(self, op: str, flops: Counter[str], read: Counter[str]) -> None:
        for span in self.stack:
            span.flops.update(flops)
            span.read.update(read)

    def _touch(self, kind: str, layer: int, read: int = 0, written: int = 0) -> None:
        for span in self.stack:
            span.touch(kind, layer, read, written)

    # State

    def _watch_table(self, kind: str, layer: int, table: Ring | Paged) -> list[Callable[[], None]]:
        def replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
            table.__dict__[name] = make(getattr(table, name))
            return lambda: table.__dict__.pop(name)

        def writes(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(at: Any, values: Tensor) -> None:
                rows = values.shape[0]
                if isinstance(table, Ring):
                    rows = sum(min(run.length, table.size) for run in at.runs)
                self._touch(kind, layer, written=rows * _row_bytes(table))
                original(at, values)

            return call

        def reads(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(step: Step, *rest: Any) -> Any:
                back = rest[-1]
                self._touch(kind, layer, read=sum(min(run.start, back) for run in step.runs) * _row_bytes(table))
                return original(step, *rest)

            return call

        def rooms(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(groups: Groups) -> Any:
                self._touch(kind, layer, written=len(groups.slot) * _row_bytes(table))
                return original(groups)

            return call

        undo = [replace("write", writes)]
        if isinstance(table, Paged):
            undo.append(replace("room", rooms))
        if kind in ("group", "tail"):
            undo.append(replace("push", reads))
        return undo

    def _watch_reads(self, ops: CountingOps) -> Callable[[], None]:
        """Index keys are read where they are decoded."""
        original = ops.read

        def read(rows: Tensor, form: Any) -> Tensor:
            if form is INDEX and self.step is not None:
                row = self._row()
                source = _source(row)
                # A key that several tokens gather counts once.
                most = self._together(row.ratio) * rows.shape[-1]
                layer = next(span for span in reversed(self.stack) if span.path in self.plan)
                already = layer.state.get((KEYS, source), Touched()).read
                self._touch(KEYS, source, read=min(rows.nbytes, most - already))
            return original(rows, form)

        ops.__dict__["read"] = read
        return lambda: ops.__dict__.pop("read")

    def _attended(self, span: Span, arguments: dict[str, Any]) -> None:
        """Window rows and latents that attention reads: each row once a call, however many tokens see it."""
        if not span.path.endswith(".attn"):
            return
        row = self.plan[span.path]
        near, near_rows, far_rows = arguments["near"], arguments["near_rows"], arguments["far_rows"]
        if row.half == "draft":  # behind the rows of the ring stand those of the block itself
            self._touch("draft", row.layer, read=(len(near) - len(arguments["q"])) * near.shape[1] * near.itemsize)
            return
        if self.step is None:
            return
        width = near_rows.shape[1]
        seen = sum(run.length + min(run.start, width - 1) for run in self.step.runs)
        self._touch("window", row.layer, read=seen * near.shape[1])
        if far_rows is not None:
            picked = (far_rows >= 0).sum(1)
            rows = sum(
                min(int(picked[run.first : run.first + run.length].sum()), run.end // row.ratio)
                for run in self.step.runs
            )
            self._touch(LATENTS, _source(row), read=rows * arguments["far"].shape[1])

    # Describing

    def _inputs(self, arguments: dict[str, Any], annotations: dict[str, Any]) -> Iterator[Value]:
        for name, value in arguments.items():
            if name == "history":
                shape = (self.batch, value.shape[0] // self.batch, _values(WINDOW, value))
                yield Value("main tokens", shape, ("batch", "row", "head width"), _rows_name(WINDOW, value))
            elif isinstance(value, Tensor):
                if value.is_floating_point() or name in ("ids", "ngrams", "chosen"):
                    yield self.describe("streams" if name == "h" else name, value, annotations.get(name))
            elif isinstance(value, Streams):
                yield from self._streams(value)
            elif isinstance(value, Ring) and name == "ring":
                yield self._ring(value)
            elif isinstance(value, Step) and not {"x", "h", "streams"} & set(arguments):
                yield self.describe("ids", value.ids, None, ("n",))

    def _attention(self, arguments: dict[str, Any]) -> Iterator[Value]:
        """Of the operation: rows of tables, as each sequence has them."""
        near, far = arguments["near"], arguments["far"]
        yield self.describe("q", arguments["q"], None, ("n", "h", "d"))
        yield Value(
            "window", (self.batch, near.shape[0] // self.batch, _values(WINDOW, near)), ("batch", "row", "head width"),
            _rows_name(WINDOW, near),
        )  # fmt: skip
        yield self.describe("window rows", arguments["near_rows"], None, ("n", "w"))
        if far is not None:
            shape = (self.batch, self._positions(self._ratio()), _values(LATENT, far))
            yield Value("latents", shape, ("batch", "compressed position", "head width"), _rows_name(LATENT, far))
            yield self.describe("picks", arguments["far_rows"], None, ("n", "k"))

    def _scored(self, arguments: dict[str, Any]) -> Iterator[Value]:
        """Of the indexer: the keys it may score, and the candidates among them."""
        keys = arguments["keys"]
        shape = (self.batch, max(known.count for known in keys), keys[0].upto(0).shape[1])
        yield Value("index keys", shape, ("batch", "compressed position", "index width"), f"{INDEX.name} records")
        if arguments["within"] is not None:
            yield self._mask(arguments["within"])

    def _ratio(self) -> int:
        return self._row().ratio

    def _row(self) -> LayerPlan:
        """Of the layer that is running."""
        paths = (path for span in reversed(self.stack) for path in (span.path, f"{span.path}.attn"))
        return next(self.plan[path] for path in paths if path in self.plan)

    def _outputs(
        self, kind: str, method: str, result: Any, annotation: Any, arguments: dict[str, Any]
    ) -> Iterator[Value]:
        if method == "store_keys":  # they are not given back
            yield self._stored_keys(arguments["latents"], arguments["table"])
            return
        results = result if isinstance(result, tuple) and not hasattr(result, "_fields") else (result,)
        names = RESULTS.get(
            (kind, method), ("y",) if len(results) == 1 else tuple(f"y{i}" for i in range(len(results)))
        )
        parts = getattr(annotation, "__args__", None) if isinstance(result, tuple) else None
        for place, value in enumerate(results):
            name = names[place] if place < len(names) else f"y{place}"
            if not name:
                continue
            if isinstance(value, Tensor):
                own = parts[place] if parts and place < len(parts) else annotation
                if name == "candidates":
                    yield self._mask(value)
                else:
                    yield self.describe(name, value, own)
            elif isinstance(value, Streams):
                yield from self._streams(value)
            elif isinstance(value, Sight):
                before = arguments.get("sight")
                old = before.__dict__ if isinstance(before, Sight) else {}
                changed = {
                    one.name: value.__dict__[one.name]
                    for one in fields(Sight)
                    if value.__dict__[one.name] is not old.get(one.name)
                }
                yield from self._sight(changed)
            elif hasattr(value, "positions") and hasattr(value, "blocks"):
                yield self.describe("picks", value.positions, None, ("n", "k"))
                if value.blocks is not None:
                    yield self._mask(value.blocks)
            elif isinstance(value, Output):
                yield self.describe("logits", value.logits, None, ("j", "vocab"))
                if value.taps is not None:
                    yield self.describe("taps", value.taps, None, ("n", "width"))

    def _stored_keys(self, latents: Tensor, table: Paged) -> Value:
        keys = table.table[:1].expand(len(latents), -1)
        width = _values(INDEX, keys)
        shape = (self.batch, len(latents) // self.batch, width)
        return Value("index keys", shape, ("batch", "group", "index width"), _stored_name(table, KEYS), keys.nbytes)

    def describe(self, name: str, value: Tensor, annotation: Any, axes: tuple[str, ...] | None = None) -> Value:
        if axes is None:
            axes = tuple(getattr(annotation, "dim_str", "").split())
        if len(axes) != value.dim() or any(axis.startswith("*") for axis in axes):
            axes = ("n", *["width"] * (value.dim() - 1))
        shape, words = list(value.shape), [AXES.get(axis, axis) for axis in axes]
        if axes and axes[0] in ("n", "kept") and value.shape[0] % self.batch == 0:
            shape[:1], words[:1] = [self.batch, value.shape[0] // self.batch], ["batch", "position"]
        elif axes and axes[0] in ("groups", "j") and value.shape[0] % self.batch == 0:
            word = "group" if axes[0] == "groups" else "wanted position"
            shape[:1], words[:1] = [self.batch, value.shape[0] // self.batch], ["batch", word]
        return Value(name, tuple(shape), tuple(words), dtype_name(value), value.nbytes)

    def _streams(self, streams: Streams) -> Iterator[Value]:
        yield self.describe("streams", streams.h, None, ("n", "m", "dim"))
        yield self.describe("pre", streams.pre, None, ("n", "m"))

    def _ring(self, ring: Ring) -> Value:
        slots, size, width = ring.table.shape
        shape = (self.batch, size, values_in(WINDOW, width) if ring.packed else width)
        return Value("ring", shape, ("batch", "slot", "head width"), _stored_name(ring, "window"))

    def _sight(self, changed: dict[str, Any]) -> Iterator[Value]:
        for name, value in changed.items():
            if isinstance(value, Paged):
                yield self._paged(name, value)
            elif name == "candidates" and value is not None:
                yield self._mask(value)
            elif name == "picks" and value is not None:
                yield self.describe("picks", value, None, ("n", "k"))
            elif name == "rows" and value is not None and "picks" not in changed:
                yield self.describe("picks", value, None, ("n", "k"))  # a reader takes them as rows of the table
            elif name == "ngrams" and value is not None:
                yield self.describe("ngrams", value, None, ("n", "order"))

    def _paged(self, name: str, table: Paged) -> Value:
        form = LATENT if name == LATENTS else INDEX
        width = table.table.shape[1]
        shape = (self.batch, self._positions(table.ratio), values_in(form, width) if table.packed else width)
        words = ("batch", "compressed position", "head width" if name == LATENTS else "index width")
        return Value("latents" if name == LATENTS else "index keys", shape, words, _stored_name(table, name))

    def _mask(self, blocks: Tensor) -> Value:
        shape = (self.batch, max(1, blocks.shape[0] // self.batch), self._positions(self._ratio()))
        return Value("candidates", shape, ("batch", "position", "compressed position"), "bool", blocks.nbytes)

    def _together(self, ratio: int) -> int:
        if ratio not in self.seen:
            assert self.step is not None
            self.seen[ratio] = sum(run.end // ratio for run in self.step.runs)
        return self.seen[ratio]

    def _positions(self, ratio: int) -> int:
        assert self.step is not None
        return max(run.end for run in self.step.runs) // ratio


def edges(model: Transformer) -> Iterator[tuple[str, Any, str]]:
    """The calls that are recorded: (path, object, method)."""
    yield "", model, "begin"
    yield "", model, "logits"
    for path, module in model.named_modules():
        if isinstance(module, Block):
            stage = path.startswith("mtp.")
            yield path, module, "descend" if stage else "forward"
            for name in ("hc_attn", "hc_ffn"):
                for method in ("read", "write"):
                    yield f"{path}.{name}", getattr(module, name), method
            if stage:
                yield f"{path}.attn", module, "attend"
        elif isinstance(module, Attention):
            draft = path.startswith("mtp.")
            for method in ("query", "output", *(("stored",) if draft else ("forward", "window"))):
                yield path, module, method
            if isinstance(module.far, Source):
                yield path, module.far, "publish"
                yield f"{path}.indexer", module.indexer, "store_keys"
        elif isinstance(module, MarkovHead):
            yield path, module, "embedding"
            yield f"{path}.head", module.head, "forward"
        elif type(module).__name__ in FORWARD and (not path.startswith("vision.") or type(module) is VisionBlock):
            yield path, module, "forward"
    if model.mtp is not None:
        yield "mtp", model.mtp, "forward"
        yield "mtp", model.mtp, "vectors"
        yield "mtp", model.mtp, "logits"


FORWARD = frozenset(
    "RMSNorm Compressor Indexer Router RoutedExperts SwiGLU Experts Engram VisionTower Aligner ConfidenceHead"
    " VisionBlock".split()
)
"""Modules whose `forward` is an edge."""


def tables(cache: Cache) -> Iterator[tuple[str, int, Ring | Paged]]:
    """Every table of a cache, with its kind and the layer that keeps it (-1: the model)."""
    for layer, ring in cache.windows.items():
        yield "window", layer, ring
    for layer, ring in cache.drafts.items():
        yield "draft", layer, ring
    for layer, source in cache.sources.items():
        yield LATENTS, layer, source.latents
        yield KEYS, layer, source.keys
        if source.group is not None:
            yield "group", layer, source.group
    yield "tail", -1, cache.tail


def _source(row: LayerPlan) -> int:
    """The layer whose latents and index keys this one reads."""
    assert row.latents_from is not None, f"{row.name} reads no latents"
    return row.latents_from


def _row_bytes(table: Ring | Paged) -> int:
    return table.table.shape[-1] * table.table.dtype.itemsize


def _share(value: Value, step: Step) -> Value:
    """With the bytes of the rows alone whose logits are wanted."""
    return replace(value, nbytes=value.nbytes * len(step.wanted) // len(step))


def _values(form: BlockFormat, rows: Tensor) -> int:
    return values_in(form, rows.shape[-1]) if rows.dtype == torch.uint8 else rows.shape[-1]


def _rows_name(form: BlockFormat, rows: Tensor) -> str:
    return f"{form.name} records" if rows.dtype == torch.uint8 else dtype_name(rows)


def dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.").replace("bfloat16", "bf16")


def _stored_name(table: Ring | Paged, kind: str) -> str:
    form = FORMS[kind]
    return f"{form.name} records" if table.packed else dtype_name(table.table)


@cache
def _signature(owner: Any, method: str) -> inspect.Signature:
    """Of a bound method."""
    signature = inspect.signature(getattr(owner, method))
    return signature.replace(parameters=list(signature.parameters.values())[1:])


@cache
def _annotations(owner: Any, method: str) -> dict[str, Any]:
    return dict(getattr(inspect.unwrap(getattr(owner, method)), "__annotations__", {}))
