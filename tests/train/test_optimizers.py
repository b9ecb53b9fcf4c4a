"""Groups, schedule, clipping, and what each optimizer may touch."""

import math

import pytest
import torch

from openv41.state import Step
from openv41.train.optimizers import GROUPS, Optimizers, groups_of, rate_at
from openv41.train.settings import OptimizerSettings
from openv41.train.trainable import build
from tests.small import drafting_config, seeing_config, tokens
from tests.train.runs import plain_ops


@pytest.fixture
def model():
    return build(drafting_config(), plain_ops(), seed=1)


def test_every_parameter_is_in_exactly_one_group():
    for config in (drafting_config(), seeing_config()):
        model = build(config, plain_ops(), 0)
        groups = groups_of(model)
        names = [name for group in groups.values() for name in group]
        assert tuple(groups) == GROUPS
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        optimizers = Optimizers(model, OptimizerSettings())
        held = [id(p) for part in optimizers.parts.values() for group in part.param_groups for p in group["params"]]
        assert len(held) == len(set(held))
        stacks = [one for one in optimizers.held["muon"] if one.stacked]
        moved = {id(p) for name in GROUPS[:-1] for p in groups[name].values()}
        whole = set(held) - {id(matrix) for one in stacks for matrix in one.parts}
        assert moved - {id(one.parameter) for one in stacks} == whole


def test_groups_hold_what_they_say(model):
    groups = groups_of(model)
    assert all(p.dim() >= 2 for p in groups["matrices"].values())
    assert {"embed.weight", "head.weight"} <= groups["embeddings"].keys()
    assert set(groups["tables"]) == {"layers.0.engram.embed.weight", "layers.2.engram.embed.weight"}
    assert all(name.endswith("gate.bias") for name in groups["balance"])
    for leaf in ("norm.weight", "attn_sink", ".base", ".scale", ".fn"):
        named = [name for name, _ in model.named_parameters() if name.endswith(leaf)]
        assert named and set(named) <= groups["vectors"].keys(), leaf
    decayed = {
        id(p) for part in Optimizers(model, OptimizerSettings()).parts.values() for group in part.param_groups
        if group.get("weight_decay") for p in group["params"]
    }  # fmt: skip
    assert not decayed & {id(p) for name in ("vectors", "tables", "balance") for p in groups[name].values()}


def test_the_schedule_rises_and_falls():
    rates = [rate_at(step, 101, 10, 0.1) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0 and rates[100] == pytest.approx(0.1)
    assert rates[55] == pytest.approx(0.55)  # half way down
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rate_at(0, 1, 0, 0.5) == 1.0


def losses(model, ids):
    return model(Step.pack([(0, 0, ids)], "all")).logits.square().mean()


def test_clipping_scales_all_gradients_alike(model):
    optimizers = Optimizers(model, OptimizerSettings(clip=1e-3))
    losses(model, tokens(model.config, 20, 0)).backward()
    norm = optimizers.norm()
    dense = [p.grad.to_dense() for _, p in optimizers.trained()]
    assert float(norm) == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in dense)), rel=1e-5)
    assert norm > 1e-3
    optimizers.clip(norm)
    assert float(optimizers.norm()) == pytest.approx(1e-3, rel=1e-4)
    optimizers.clip(torch.tensor(1e-9))  # short ones stay
    assert float(optimizers.norm()) == pytest.approx(1e-3, rel=1e-4)


def test_only_rows_that_were_looked_up_move(model):
    optimizers = Optimizers(model, OptimizerSettings(weight_decay=0.5))
    table = model.layers[2].engram.embed.weight
    model.layers[2].engram.wkv.weight.data.normal_()
    losses(model, tokens(model.config, 6, 0)).backward()
    assert table.grad.is_sparse
    rows = table.grad.coalesce().indices()[0]
    before = table.detach().clone()
    optimizers.step()
    moved = (table != before).any(1).nonzero().squeeze(1)
    assert 0 < len(moved) < len(table) and set(moved.tolist()) <= set(rows.tolist())


def test_a_sparse_gradient_is_the_dense_one(model):
    ids = tokens(model.config, 12, 3)
    table = model.layers[2].engram.embed.weight
    model.layers[2].engram.wkv.weight.data.normal_()
    losses(model, ids).backward()
    sparse, table.grad = table.grad.to_dense(), None
    model.ops.look_up_rows = lambda values, scale, rows: values[rows]
    losses(model, ids).backward()
    assert not table.grad.is_sparse and torch.allclose(table.grad, sparse, atol=1e-7)


def test_what_has_no_gradient_stays(model):
    optimizers = Optimizers(model, OptimizerSettings(weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses(model, tokens(model.config, 20, 0)).backward()
    trained = {name for name, _ in optimizers.trained()}
    optimizers.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed <= trained
    assert not any(name.startswith("mtp.") or name.endswith("gate.bias") for name in trained)
    assert {"layers.0.ffn.experts.w1.weight", "layers.3.attn.wq_a.weight", "embed.weight"} <= changed


def test_a_stack_of_experts_moves_as_its_matrices_would(model):
    name = "layers.0.ffn.experts.w1.weight"
    stack = dict(model.named_parameters())[name]
    gradient = torch.randn(stack.shape)
    alone = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    settings = OptimizerSettings()
    muon = torch.optim.Muon(alone, settings.rate, settings.weight_decay, 0.95, adjust_lr_fn="match_rms_adamw")
    for place, matrix in enumerate(alone):
        matrix.grad = gradient[place].clone()
    muon.step()
    stack.grad = gradient
    Optimizers(model, settings).step()
    assert torch.equal(stack.detach(), torch.stack([matrix.detach() for matrix in alone]))


def test_rates_of_all_groups_follow_the_share(model):
    optimizers = Optimizers(model, OptimizerSettings(rate=0.01, table_factor=5.0))
    optimizers.set_rate(0.5)
    rates = {name: {group["lr"] for group in part.param_groups} for name, part in optimizers.parts.items()}
    assert rates == {"muon": {0.005}, "adamw": {0.005}, "tables": {0.025}}
