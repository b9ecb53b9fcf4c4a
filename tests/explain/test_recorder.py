"""Shapes are observed: the counted model, without memory, against a real run of the same calls with real values."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from openv41.config import Config
from openv41.explain.counting import CountingOps
from openv41.explain.recorder import Recorder, Span
from openv41.explain.scene import Scene, record_picture
from openv41.model.transformer import Transformer
from openv41.ops import Compound, Ops, choose
from openv41.plan import plan_layers
from openv41.state import Cache
from tests.small import fill_randomly

SEEING = Config.tiny()
TINY = SEEING.replace(vision_n_layers=0)


class Listened(Compound):
    """Operations with the recorder's ear, which tell it nothing. What is made of several asks for them here."""

    def __init__(self, ops: Ops) -> None:
        self.ops, self.listener = ops, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)


def real_model(config: Config, ops: Any, seed: int) -> Transformer:
    model = Transformer(config, ops)
    fill_randomly(model, seed)
    if model.lookback is not None:
        model.lookback.token_map.copy_(torch.arange(config.vocab_size) % config.engram_compressed_vocab_size)
    return model


def standing(config: Config, model: Transformer, batch: int, position: int, tokens: int, **options: Any) -> Cache:
    """A cache whose slots hold `position` tokens that were really run."""
    cache = Cache(config, batch, batch * (position + tokens), draft=True, **options)
    ids = torch.arange(position) % (config.vocab_size - 2)
    slots = [cache.open() for _ in range(batch)]
    if position:
        output = model(cache.step([(slot, ids) for slot in slots]), cache)
        assert model.mtp is not None
        model.mtp.remember(output.taps, output.tapped, cache)
    return cache


def edges(span: Span) -> list[Any]:
    return [
        (one.path, one.method, [(v.name, v.shape, v.axes, v.dtype) for v in one.inputs],
         [(v.name, v.shape, v.axes, v.dtype) for v in one.outputs])
        for one in span.walk()
    ]  # fmt: skip


def state(span: Span) -> dict[Any, tuple[int, int]]:
    return {key: (one.read, one.written) for key, one in span.state.items()}


@pytest.mark.parametrize(
    ("position", "tokens", "batch"), [(0, 45, 1), (0, 1, 2), (37, 1, 2), (70, 1, 1), (30, 6, 2), (21, 40, 2)]
)
@torch.no_grad()
def test_a_real_run_has_the_same_shapes(position: int, tokens: int, batch: int, seed: int) -> None:
    """Of every edge of every part, and the same bytes of state."""
    ops = Listened(choose("cpu", "cpu"))
    model = real_model(TINY, ops, seed)
    cache = standing(TINY, model, batch, position, tokens, store="packed")
    recorder = Recorder(plan_layers(TINY), batch, tokens)
    ids = torch.arange(tokens)
    with recorder.on(model, cache, ops):  # type: ignore[arg-type]
        model(cache.step([(slot, ids) for slot in range(batch)]), cache, prefill="full")
    counted = Scene(TINY, "prefill", position, tokens, batch).record("full")
    assert edges(recorder.root) == edges(counted)
    assert state(recorder.root) == state(counted)


@torch.no_grad()
def test_a_real_draft_has_the_same_shapes(seed: int) -> None:
    ops = Listened(choose("cpu", "cpu"))
    model = real_model(TINY, ops, seed)
    assert model.mtp is not None
    cache = standing(TINY, model, 2, 37, 1, store="packed")
    recorder = Recorder(plan_layers(TINY), 2, TINY.dspark_block_size)
    with recorder.on(model, cache, ops):  # type: ignore[arg-type]
        model.mtp.begin(torch.tensor([3, 5]), [0, 1], cache)
    counted = Scene(TINY, "decode", 37, 1, 2).record_draft()
    assert edges(recorder.root)[1:] == edges(counted)[1 : len(edges(recorder.root))]
    assert len(edges(recorder.root)) > 20


@pytest.mark.parametrize(("rows", "columns", "count"), [(4, 6, 1), (5, 7, 3)])
@torch.no_grad()
def test_a_real_look_at_pictures_has_the_same_shapes_and_products(
    rows: int, columns: int, count: int, seed: int
) -> None:
    """Of every edge of tower and aligner; their products are those that PyTorch's own counter sees."""
    ops = Listened(choose("cpu", "reference", "plain", dtype=torch.bfloat16))
    model = real_model(SEEING, ops, seed)
    assert model.vision is not None and model.aligner is not None
    recorder = Recorder(plan_layers(SEEING), 1, rows * columns)
    size, grids = SEEING.vision_patch_size, [(rows, columns)] * count
    patches = torch.zeros(count * rows * columns, 3, size, size, dtype=ops.dtype)
    with recorder.on(model, Cache(SEEING, 1, 1), ops), FlopCounterMode(display=False) as counter:  # type: ignore[arg-type]
        model.aligner(model.vision(patches, grids), grids)
    counted = record_picture(SEEING, rows, columns, count)
    assert edges(recorder.root) == edges(counted) and len(edges(counted)) > 4
    assert sum(counted.flops.values()) == counter.get_total_flops()


@torch.no_grad()
def test_recording_leaves_nothing_behind(seed: int) -> None:
    ops = Listened(choose("cpu", "cpu"))
    model = real_model(TINY, ops, seed)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    cache = Cache(TINY, 1, 64)
    tables = dict(cache.windows[0].__dict__)
    cache.open()
    with pytest.raises(RuntimeError, match="in the middle"), Recorder(plan_layers(TINY), 1, 3).on(model, cache, ops):  # type: ignore[arg-type]
        assert "forward" in model.layers[0].__dict__
        raise RuntimeError("in the middle")
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys(), name
    assert cache.windows[0].__dict__.keys() == tables.keys() and ops.__dict__.keys() == {"ops", "listener"}


def test_every_operation_is_counted() -> None:
    assert [name for name in vars(Ops) if not name.startswith("_") and not hasattr(CountingOps, name)] == []


ATTEND = CountingOps.sparse_attention


def attend_all(self: CountingOps, q: Any, near: Any, near_rows: Any, far: Any, far_rows: Any, *rest: Any) -> Any:
    """Counts every entry of attention's lists, as a plain product does: the empty ones too."""
    full = None if far_rows is None else torch.zeros_like(far_rows)
    return ATTEND(self, q, near, torch.zeros_like(near_rows), far, full, *rest)


@pytest.mark.parametrize(("position", "tokens", "batch"), [(80, 1, 1), (80, 1, 3), (64, 5, 2), (0, 60, 1), (13, 29, 2)])
@torch.no_grad()
def test_products_against_torchs_own_counter(
    position: int, tokens: int, batch: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain operations multiply by PyTorch's matrix products and nothing else: its counter sees the same number."""
    ops = choose("cpu", "reference", "plain", dtype=torch.float32)
    model = real_model(TINY, ops, seed)
    cache = standing(TINY, model, batch, position, tokens, dtype=torch.float32)
    for block in model.blocks():
        if block.attn.indexer is not None:
            block.attn.indexer.score_bytes = 1 << 62
    step = cache.step([(slot, torch.arange(tokens)) for slot in range(batch)])
    with FlopCounterMode(display=False) as counter:
        model(step, cache, prefill="full")
    if position < 80:  # lists are not full
        monkeypatch.setattr(CountingOps, "sparse_attention", attend_all)
    scene = Scene(TINY.replace(norm_eps=1e-19 * (1 + position)), "prefill", position, tokens, batch)  # not a kept one
    assert sum(scene.record("full").flops.values()) == counter.get_total_flops()
