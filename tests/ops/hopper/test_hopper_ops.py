"""The whole model with the Hopper operations: each one beside the reference's, from the same inputs."""

import pytest
import torch

from openv41.bench.agree import Beside
from openv41.commands.doctor import agreement, operations
from openv41.errors import OpsError
from openv41.formats import INDEX, WINDOW, pack_fp8_weight
from openv41.model.attention import Attention
from openv41.model.indexer import Keys
from openv41.model.transformer import Transformer
from openv41.ops import Ops, ReferenceOps, choose, opening, selecting
from openv41.ops.hopper import HopperOps, products
from openv41.state import Cache
from tests.small import fill_randomly, small_config, small_model, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

EXACT = ("rms_norm", "rotate", "quantise", "store", "read", "index_scores", "pick", "pick_blocks", "pool",
         "rotated_store", "pooled")  # fmt: skip
"""Operations whose bits are the reference's."""


def model_of(ops: Ops) -> Transformer:
    """A window, a source of ratio 2, the candidate source and a re-scorer, of widths that the kernels take."""
    roles = dict(
        n_layers=4, compress_ratios=(0, 2, 1, 1), kv_source_layers=(1, 2), index_source_layers=(1, 2, 3),
        candidate_source_layer=2, candidate_topk_blocks=3, index_topk=4, engram_layer_ids=(), engram_num_embeddings=(),
    )  # fmt: skip
    return small_model(small_config(head_dim=64, o_lora_rank=64, **roles), ops).to(DEVICE)


@pytest.fixture(scope="module")
def beside(seed: int) -> Beside:
    """A prompt of 9 tokens and one of 6 beside each other, then a token each, from records."""
    judge = ReferenceOps()
    both = Beside(judge, HopperOps())
    model = model_of(judge)
    for module in model.modules():
        if getattr(module, "ops", None) is judge:
            module.ops = both
    cache = Cache(model.config, 2, 64, slack=1, store="packed", device=DEVICE)
    slots = [cache.open(), cache.open()]
    with torch.no_grad():
        for lengths in ((9, 6), (1, 1)):
            parts = zip(slots, lengths, strict=True)
            model(cache.step([(slot, tokens(model.config, n, seed + n).to(DEVICE)) for slot, n in parts]), cache)
    return both


def test_every_operation_of_a_layer_is_compared(beside: Beside) -> None:
    wanted = {"linear", "linear_wide", "grouped_linear", "sparse_attention", *EXACT} - {"quantise", "read"}
    assert wanted <= beside.results.keys()


@pytest.mark.parametrize("name", EXACT)
def test_the_same_bits_come_out(beside: Beside, name: str) -> None:
    for got, wanted in beside.results.get(name, []):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "most"), [
    ("linear", 1e-3), ("linear_wide", 1e-5), ("grouped_linear", 1e-3), ("rotated_linear", 1e-2),
    ("rounded_grouped_linear", 1e-2),
])  # fmt: skip
def test_products_differ_in_last_bits(beside: Beside, name: str, most: float) -> None:
    """Last bits that a rounding to fp8 or fp4 follows may fall on the other side of it."""
    assert beside.results[name] and all(distance(*pair) < most for pair in beside.results[name])


def test_attention_differs_as_its_probabilities_are_rounded(beside: Beside) -> None:
    """Both lists begin a block of their own; the reference's blocks go over the border. So probabilities are rounded
    against other maxima, where lists are no multiple of a block."""
    for name in ("sparse_attention", "rotated_attention"):
        assert beside.results[name] and all(distance(*pair) < 1e-2 for pair in beside.results[name])


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of one norm as a share of the other."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


class Simple:
    """The same operations, without those that a set may have besides the protocol."""

    def __init__(self) -> None:
        self.ops = HopperOps()

    def __getattr__(self, name: str):
        if name in ("select", "query_window"):
            raise AttributeError(name)
        return getattr(self.ops, name)


@torch.no_grad()
@pytest.mark.parametrize("rank", [32, 64])
@pytest.mark.parametrize(("store", "slack"), [("packed", 1), ("wide", 1), ("packed", 0)])
def test_a_layer_begins_at_one_go_as_it_does_step_by_step(store: str, slack: int, rank: int, seed: int) -> None:
    """Queries, and the window as each token sees it: of a prompt longer than the ring, then of a token a sequence,
    written straight into the ring; ranks that fill a tile of products, and that do not."""
    config = small_config(head_dim=64, o_lora_rank=64, q_lora_rank=rank, engram_layer_ids=(), engram_num_embeddings=())
    layers = [Attention(config, 1, ops).to(DEVICE) for ops in (HopperOps(), Simple())]
    for layer in layers:
        fill_randomly(layer, seed)
    assert opening(layers[0].ops) is not None and opening(layers[1].ops) is None
    caches = [Cache(config, 2, 64, slack=slack, store=store, device=DEVICE) for _ in layers]
    for lengths in ((9, 6), (1, 1), (1, 1)):
        x = torch.randn(sum(lengths), 64, generator=torch.Generator().manual_seed(seed + len(lengths))).bfloat16()
        begun = []
        for layer, cache in zip(layers, caches, strict=True):
            slots = [slot for slot, length in enumerate(cache.lengths) if length is not None] or [
                cache.open(),
                cache.open(),
            ]
            step = cache.step([(slot, [0] * n) for slot, n in zip(slots, lengths, strict=True)])
            cache.admit(step)
            asked, _, table, rows = layer.begin(x.to(DEVICE), step, cache.windows[1])
            q = asked()
            cache.extend(step)
            seen = ReferenceOps().read(table[rows.clamp_min(0)], WINDOW).masked_fill(rows.unsqueeze(-1) < 0, 0)
            begun.append((q, seen))
        for got, wanted in zip(*begun, strict=True):
            assert got.shape == wanted.shape and distance(got, wanted) < 1e-2
        assert (begun[0][1] == begun[1][1]).float().mean() > 0.99


@torch.no_grad()
def test_picks_for_a_whole_step_are_those_of_its_runs(seed: int) -> None:
    """What every source and re-scorer hands down, from the same inputs, in a chunk and in a token a sequence."""
    assert selecting(HopperOps()) is not None and selecting(Simple()) is None
    whole, runs = model_of(HopperOps()), model_of(Simple())
    compared = 0
    for layer in (1, 2, 3):
        own, other = whole.layers[layer].attn.indexer, runs.layers[layer].attn.indexer
        ratio = own.ratio
        cache = Cache(whole.config, 2, 64, store="packed", device=DEVICE)
        slots = [cache.open(), cache.open()]
        for lengths in ((9, 6), (1, 1)):
            step = cache.step([(slot, [0] * n) for slot, n in zip(slots, lengths, strict=True)])
            cache.admit(step)
            cache.extend(step)
            table = cache.sources[1 if ratio == 2 else 2].keys
            generator = torch.Generator().manual_seed(seed + layer)
            for slot in slots:
                rows = torch.randn(cache.length(slot) // ratio, 32, generator=generator).bfloat16().to(DEVICE)
                table.put(slot, own.ops.store(rows, INDEX, True))
            x = torch.randn(len(step), 64, generator=generator).bfloat16().to(DEVICE)
            qr = torch.randn(len(step), 32, generator=generator).bfloat16().to(DEVICE)
            keys = [Keys.of_slot(table, run.slot, run.end // ratio, own.ops) for run in step.runs]
            within = None if layer < 3 else whole.layers[2].attn.indexer(x, qr, step, keys, None).blocks
            got, wanted = own(x, qr, step, keys, within), other(x, qr, step, keys, within)
            torch.testing.assert_close(got.positions, wanted.positions)
            assert (got.blocks is None) == (layer != 2) and (got.blocks is None or got.blocks.equal(wanted.blocks))
            compared += int((got.positions >= 0).sum())
    assert compared > 100


def test_the_doctor_tells_what_is_its_own_and_finds_it_right() -> None:
    owners = operations(HopperOps(), DEVICE)["owners"]
    assert {name for name, owner in owners.items() if owner == "HopperOps"} == {
        "linear", "linear_wide", "grouped_linear", "rms_norm", "rotate", "quantise", "store", "read", "index_scores",
        "pick", "pick_blocks", "select", "sparse_attention", "rotated_linear", "rotated_store", "rotated_attention",
        "rounded_grouped_linear", "query_window", "pooled",
    }  # fmt: skip
    assert owners["experts"] == "FastOps" and "select" not in operations(ReferenceOps(), DEVICE)["owners"]
    assert all(check["agrees"] for check in agreement(HopperOps(), DEVICE))


def test_an_activation_is_rounded_once(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """By the norm that makes it, and for all maps; but again after a change in place. The results are the same."""
    rounds = []
    original = products.round_activation
    monkeypatch.setattr(products, "round_activation", lambda x: (rounds.append(1), original(x))[1])
    ops = HopperOps()
    weight, scale = (one.to(DEVICE) for one in pack_fp8_weight(torch.randn(64, 64, generator=rng)))
    x = torch.randn(3, 64, generator=rng).bfloat16().to(DEVICE)
    normed = ops.rms_norm(x, torch.ones(64, dtype=torch.bfloat16, device=DEVICE), 1e-20)
    first, second = ops.linear(normed, weight, scale), ops.linear(normed, weight, scale)
    assert not rounds and first.equal(second) and first.equal(ops.linear(normed.clone(), weight, scale))
    normed.mul_(3)
    assert ops.linear(normed, weight, scale).equal(ops.linear(normed.clone(), weight, scale)) and len(rounds) == 3


def test_what_is_put_off_is_done_once_when_it_is_asked_for() -> None:
    ops, done = HopperOps(), []
    for way in (ops.put_off, ops.meanwhile):
        task = way(lambda x, y: (done.append(y), x + y)[1], torch.ones(2, device=DEVICE), len(done))
        assert task() is task() and float(task()[0]) == 1 + done[-1]
    assert done == [0, 1]


@pytest.mark.gpu
@torch.no_grad()
def test_streams_beside_the_callers_change_no_bit(seed: int) -> None:
    """Tokens one after another, by a set that uses them and by one that does not."""
    logits = []
    for overlaps in (False, True):
        ops = HopperOps()
        ops.overlaps = overlaps
        model = model_of(ops)
        cache = Cache(model.config, 2, 64, slack=1, store="packed", device=DEVICE)
        slots = [cache.open(), cache.open()]
        for lengths in ((9, 6), *[(1, 1)] * 12):
            parts = zip(slots, lengths, strict=True)
            step = cache.step([(slot, tokens(model.config, n, seed + n).to(DEVICE)) for slot, n in parts])
            logits.append(model(step, cache).logits)
    half = len(logits) // 2
    assert all(one.equal(other) for one, other in zip(logits[:half], logits[half:], strict=True))


def test_plain_numerics_are_for_others() -> None:
    with pytest.raises(OpsError, match="published numerics, got 'plain'"):
        HopperOps("plain")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_a_hopper_gpu_it_is_refused() -> None:
    with pytest.raises(OpsError, match="compute capability 9.0, not on cpu"):
        choose("cpu", "hopper")
    with pytest.raises(OpsError, match="compute capability 9.0, not on cuda"):
        choose("cuda", "hopper")
