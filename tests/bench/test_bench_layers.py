"""The layers' benchmark, as far as it goes without a GPU: what it gives a layer, compares, and counts."""

import pytest
import torch

from openv41.bench import layers
from openv41.bench.gpu import Ceilings
from openv41.bench.measure import Timing
from openv41.config import Config
from openv41.errors import InputError
from openv41.ops import ReferenceOps
from openv41.ops.hopper import HopperOps
from openv41.plan import Role
from tests.small import small_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def config() -> Config:
    """Heads of a width that the kernels take, lists that fill whole blocks, fewer picks than positions."""
    return small_config(
        n_heads=2, head_dim=64, q_lora_rank=64, o_lora_rank=64, window_size=64, index_topk=64, candidate_topk_blocks=10,
        candidate_block_size=8, engram_layer_ids=(), engram_num_embeddings=(),
    )  # fmt: skip


def test_every_role_is_there_once(config: Config) -> None:
    wanted = [(Role.WINDOW, 0), (Role.SOURCE, 2), (Role.READER, 2), (Role.CANDIDATE_SOURCE, 1), (Role.READER, 1),
              (Role.RESCORER, 1)]  # fmt: skip
    assert [(row.role, row.ratio) for row in layers.roles(config)] == wanted
    assert len(layers.roles(Config.released())) == 6


def test_hopper_layers_agree_and_their_operations_are_timed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a run does for a source and a re-scorer, clocks aside."""
    ops = HopperOps()
    some = [layers.layer_of(config, row.layer, ops, DEVICE) for row in layers.roles(config) if row.layer in (1, 5)]
    report = layers.agreement_of(config, some, ReferenceOps(), 100, lambda line: None, ((2, 1), (1, 17)))
    assert report.passed, report.failures
    assert report.compared > 10_000 and report.equal > 0.9

    calls: list[str] = []

    def measured(given, repeats: int):
        for name, call in given.items():
            call()
            calls.append(name)
        return {name: Timing(2.0, 2.0, 2.0, repeats) for name in given}

    monkeypatch.setattr(layers, "captured", lambda call: call)
    monkeypatch.setattr(layers, "measure_gpu", measured)
    machine = layers._machine(Ceilings(4e12, 8e14, 1.6e15))
    case = layers.given(some[-1], config, 100, 2, 1, "re-scorer")
    figures = list(layers._time(case, some[-1], config, machine, 4))
    assert [figure.what.strip() for figure in figures][0] == "re-scorer, decode, batch 2"
    assert {"layer", "", "query_window 1", "select 1", "rotated_attention 1", "once a step"} <= set(calls)
    assert figures[0].value == 2000 and "% of the floor" in figures[0].note
    assert figures[1].what.strip() == "once a step, for all layers"


@torch.no_grad()
@pytest.mark.parametrize("number", range(6))
def test_nothing_of_a_layer_follows_from_positions_alone(config: Config, number: int) -> None:
    """What does has been worked out before the layer is timed: it remembers nothing more, and asks for no angles."""
    layer = layers.layer_of(config, number, ReferenceOps(), DEVICE)
    case = layers.given(layer, config, 100, 2, 1, "")
    remembered, angles = set(case.step._memo), len(layer.rotary.latest)
    case(layer)
    assert set(case.step._memo) == remembered and len(layer.rotary.latest) == angles
    assert case.fresh().position.equal(case.step.position) and not case.fresh()._memo


def test_a_batch_costs_its_sequences_and_the_weights_once(config: Config) -> None:
    layer = layers.layer_of(config, 5, HopperOps(), DEVICE)
    one, three = (layers.cost_of(layers.given(layer, config, 100, batch, 1, ""), layer, config) for batch in (1, 3))
    assert one.nbytes["weights"] == three.nbytes["weights"] > 0
    assert three.nbytes["state_read"] == 3 * one.nbytes["state_read"] > 0
    assert three.total_flops == 3 * one.total_flops


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
@pytest.mark.parametrize("name", ["layers", "kernels"])
def test_without_a_gpu_there_is_one_clear_error(name: str) -> None:
    from openv41.bench import Settings, kernels

    run = {"layers": layers.run, "kernels": kernels.run}[name]
    with pytest.raises(InputError, match="CUDA GPU, and torch sees none"):
        run(Settings("hopper", None), lambda line: None)
