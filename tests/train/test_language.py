"""The language loss in pieces is the loss at once, with the same gradients, and the model's own forward behind it."""

import torch
from torch.nn import functional as F

from openv41.state import Step
from openv41.train.balance import Routing
from openv41.train.language import language_loss, run_headless
from openv41.train.trainable import build
from tests.small import drafting_config, tokens
from tests.train.runs import plain_ops


def test_pieces_give_the_loss_and_the_gradients_of_the_whole():
    model = build(drafting_config(), plain_ops(), 1)
    model.head.weight.data.mul_(30)
    step = Step.pack([(0, 0, tokens(model.config, 9, 0)), (1, 0, tokens(model.config, 14, 1))], "all")
    targets = tokens(model.config, 23, 2)
    watched = ["head.weight", "embed.weight", "layers.2.attn.wq_a.weight", "layers.5.ffn.experts.w2.weight"]
    parameters = [dict(model.named_parameters())[name] for name in watched]

    whole = F.cross_entropy(model(step, prefill="full").logits.float(), targets)
    expected = torch.autograd.grad(whole, parameters)
    for rows in (1, 7, 23, 1000):
        hidden, output = run_headless(model, step)
        assert hidden.shape == (23, 64) and output.logits.shape == (0, 96) and len(output.taps) == 23
        loss = language_loss(model.head, hidden, targets, rows)
        assert torch.allclose(loss, whole, atol=1e-6)
        for a, b in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def test_the_head_is_put_back():
    model = build(drafting_config(), plain_ops(), 1)
    step = Step.pack([(0, 0, tokens(model.config, 9, 0))], "all")
    run_headless(model, step)
    assert model(step).logits.shape == (9, 96)


def test_no_piece_of_logits_is_kept_for_the_way_back():
    head = torch.nn.Linear(8, 1000, bias=False)
    hidden = torch.randn(64, 8, requires_grad=True)
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        language_loss(head, hidden, torch.randint(1000, (64,)), 16)
    assert max(kept, default=0) <= 1000 * 8  # the weight at most, never 16 x 1000 logits


def test_running_layers_once_more_gives_the_same_gradients_and_counts():
    config = drafting_config()
    step = Step.pack([(0, 0, tokens(config, 9, 0)), (1, 0, tokens(config, 14, 1))], "all")
    found = []
    for recompute in (False, True):
        model = build(config, plain_ops(), 1)
        model.head.weight.data.mul_(30)
        routing = Routing(model)
        with routing.during(step):
            hidden, _ = run_headless(model, step, recompute)
        loss = language_loss(model.head, hidden, tokens(config, 23, 2), 8) + routing.loss()
        loss.backward()
        gradients = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
        found.append((float(loss.detach()), gradients, routing.loads))
    (loss, gradients, loads), (again, others, counts) = found
    assert loss == again and all(torch.equal(loads[path], counts[path]) for path in loads)
    assert gradients.keys() == others.keys()
    assert all(torch.allclose(gradients[name], others[name], atol=1e-7) for name in gradients)
