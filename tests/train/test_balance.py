"""Balance loss against its formula, loads against a count, and the rule that evens them out."""

import pytest
import torch

from openv41.config import Config
from openv41.model.experts import Router
from openv41.ops import choose
from openv41.state import Step
from openv41.train.balance import Routing, balance_loss, imbalances
from openv41.train.language import run_headless
from openv41.train.trainable import build
from tests.small import drafting_config, tokens
from tests.train.runs import plain_ops


def test_the_loss_is_its_formula(rng):
    scores = torch.rand(11, 5, generator=rng).double().requires_grad_()
    chosen = torch.stack([torch.randperm(5, generator=rng)[:2] for _ in range(11)])
    sequence = torch.tensor([0] * 3 + [1] * 7 + [2])
    total = torch.zeros((), dtype=torch.float64)
    for number, length in enumerate((3, 7, 1)):
        of = sequence == number
        for expert in range(5):
            f = 5 / (2 * length) * float((chosen[of] == expert).sum())
            p = (scores[of, expert] / scores[of].sum(1)).mean()
            total = total + f * p * length / 11
    loss = balance_loss(scores, chosen, sequence)
    assert torch.allclose(loss, total)
    assert torch.allclose(*(torch.autograd.grad(x, scores, retain_graph=True)[0] for x in (loss, total)))


def test_even_loads_and_scores_give_one():
    chosen = torch.arange(8).unflatten(0, (4, 2))
    assert float(balance_loss(torch.ones(4, 8), chosen, torch.zeros(4, dtype=torch.int64))) == pytest.approx(1.0)
    loads = {"even": torch.ones(8), "one": torch.tensor([8.0, 0, 0, 0]), "unused": torch.zeros(3)}
    assert imbalances(loads) == {"even": 1.0, "one": 4.0} and imbalances({}) == {}


def test_loads_count_what_was_chosen_and_only_during_a_step():
    model = build(drafting_config(), plain_ops(), 1)
    routing = Routing(model)
    step = Step.pack([(0, 0, tokens(model.config, 9, 0)), (1, 0, tokens(model.config, 4, 1))], "all")
    seen = {}
    for path, router in routing.routers.items():
        router.register_forward_hook(lambda m, x, y, path=path: seen.update({path: y[1]}))
    run_headless(model, step)
    assert not any(load.sum() for load in routing.loads.values())
    with routing.during(step):
        run_headless(model, step)
    assert len(routing.watched) == model.config.n_layers
    for path, load in routing.loads.items():
        expected = seen[path].flatten().bincount(minlength=len(load)) if path in seen else 0 * load
        assert torch.equal(load, expected.float()), path
    assert sum(path.startswith("mtp.") and bool(load.sum()) for path, load in routing.loads.items()) == 0
    gradients = torch.autograd.grad(routing.loss(), [m.weight for p, m in routing.routers.items() if p[:3] != "mtp"])
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("function", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_the_sign_rule_moves_loads_towards_even(function, rng):
    """A router that prefers some experts strongly, whatever its weights: the bias alone evens it out."""
    config = Config.tiny().replace(dtype="bf16", expert_dtype=None, score_func=function, vision_n_layers=0)
    router = Router(config, 8, 2, choose("cpu", "reference", "plain", dtype=torch.float32)).float()
    router.requires_grad_(False)
    router.weight.normal_(std=0.3 * config.dim**-0.5, generator=rng)
    lean = torch.linalg.pinv(router.weight) @ torch.linspace(-0.45, 0.45, 8)  # what the logits are on average
    model = torch.nn.ModuleDict({"gate": router})
    routing, image = Routing(model), torch.zeros(256, dtype=torch.bool)
    loads = []
    for _ in range(400):
        routing.clear()
        with routing.during(None):
            router(torch.randn(256, config.dim, generator=rng) + lean, image)
        loads.append(imbalances(routing.loads)["gate"])
        routing.move_bias(0.002)
    assert sum(loads[:5]) / 5 > 2
    assert sum(loads[-20:]) / 20 < 1 + 0.25 * (sum(loads[:5]) / 5 - 1)
    assert router.weight.grad is None
