"""The whole model with the Hopper operations: each one beside the reference's, from the same inputs."""

import pytest
import torch

from openv41.bench.agree import Beside
from openv41.commands.doctor import agreement, operations
from openv41.errors import OpsError
from openv41.formats import INDEX
from openv41.model.indexer import Keys
from openv41.model.transformer import Transformer
from openv41.ops import Ops, ReferenceOps, choose, selecting
from openv41.ops.hopper import HopperOps
from openv41.state import Cache
from tests.small import small_config, small_model, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

EXACT = ("rms_norm", "rotate", "quantise", "store", "read", "index_scores", "pick", "pick_blocks", "pool")
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


@pytest.mark.parametrize(("name", "most"), [("linear", 1e-3), ("linear_wide", 1e-5), ("grouped_linear", 1e-3)])
def test_products_differ_in_last_bits(beside: Beside, name: str, most: float) -> None:
    assert all(distance(*pair) < most for pair in beside.results[name])


def test_attention_differs_as_its_probabilities_are_rounded(beside: Beside) -> None:
    """Both lists begin a block of their own; the reference's blocks go over the border. So probabilities are rounded
    against other maxima, where lists are no multiple of a block."""
    assert all(distance(*pair) < 1e-2 for pair in beside.results["sparse_attention"])


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of one norm as a share of the other."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


class ByRuns:
    """The same operations, without the one that picks for a whole step."""

    def __init__(self) -> None:
        self.ops = HopperOps()

    def __getattr__(self, name: str):
        if name == "select":
            raise AttributeError(name)
        return getattr(self.ops, name)


@torch.no_grad()
def test_picks_for_a_whole_step_are_those_of_its_runs(seed: int) -> None:
    """What every source and re-scorer hands down, from the same inputs, in a chunk and in a token a sequence."""
    assert selecting(HopperOps()) is not None and selecting(ByRuns()) is None
    whole, runs = model_of(HopperOps()), model_of(ByRuns())
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
        "pick", "pick_blocks", "select", "sparse_attention",
    }  # fmt: skip
    assert owners["experts"] == "FastOps" and "select" not in operations(ReferenceOps(), DEVICE)["owners"]
    assert all(check["agrees"] for check in agreement(HopperOps(), DEVICE))


def test_plain_numerics_are_for_others() -> None:
    with pytest.raises(OpsError, match="published numerics, got 'plain'"):
        HopperOps("plain")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_a_hopper_gpu_it_is_refused() -> None:
    with pytest.raises(OpsError, match="compute capability 9.0, not on cpu"):
        choose("cpu", "hopper")
    with pytest.raises(OpsError, match="compute capability 9.0, not on cuda"):
        choose("cuda", "hopper")
