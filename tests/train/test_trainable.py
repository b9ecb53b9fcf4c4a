"""Float weights and their published form: built alike from a seed, written, and read again."""

import torch

from openv41 import formats
from openv41.config import SpecialIds
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Step
from openv41.train.trainable import build, published
from openv41.weights.load import Checkpoint, load_into
from openv41.weights.names import place, published_tensors
from openv41.weights.write import write_checkpoint
from tests.small import drafting_config, small_config, tokens
from tests.train.runs import plain_ops

SPECIAL = SpecialIds(0, 1, 2)


def test_a_seed_and_a_name_give_the_weights():
    one, again, other = (build(drafting_config(), plain_ops(), seed) for seed in (3, 3, 4))
    for (name, a), b, c in zip(one.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b), name
        drawn = a.dim() > 1 and name not in ("mtp.1.markov_head.head.weight", "mtp.1.confidence_head.proj.weight")
        assert torch.equal(a, c) != (drawn and not name.endswith(("q_weight", "k_weight"))), name
    smaller = dict(build(small_config(), plain_ops(), 3).named_parameters())
    assert torch.equal(smaller["layers.1.attn.wq_a.weight"], one.layers[1].attn.wq_a.weight)


def test_published_tensors_are_the_packed_weights(tmp_path):
    config = drafting_config()
    model = build(config, plain_ops(), 1)
    write_checkpoint(tmp_path / "model", config, SPECIAL, published(model))
    read = Transformer(config, choose("cpu", "cpu"))
    load_into(read, Checkpoint.open(tmp_path / "model"))
    linear, stack, table = read.layers[1].attn.wq_a, read.layers[1].ffn.experts.w1, read.layers[2].engram.embed
    for stored, packed in (
        (linear, formats.pack_fp8_weight(model.layers[1].attn.wq_a.weight)),
        (stack, formats.pack_fp4_weight(model.layers[1].ffn.experts.w1.weight)),
        (table, formats.WINDOW.pack(model.layers[2].engram.embed.weight)),
    ):
        for a, b in zip((stored.weight, stored.scale), packed, strict=True):
            assert torch.equal(a.detach().view(torch.uint8), b.detach().view(torch.uint8))
    assert torch.equal(read.embed.weight, model.embed.weight.bfloat16())
    assert torch.equal(read.layers[0].hc_ffn.base, model.layers[0].hc_ffn.base)


def test_a_checkpoint_read_as_floats_and_written_again_is_the_same_values(tmp_path):
    """Packing values that a format holds gives these values again; bits may differ where a scale has a choice."""
    config = drafting_config()
    write_checkpoint(tmp_path / "a", config, SPECIAL, published(build(config, plain_ops(), 1)))
    once = build(config, plain_ops(), 9, tmp_path / "a")
    write_checkpoint(tmp_path / "b", config, SPECIAL, published(once))
    twice = build(config, plain_ops(), 9, tmp_path / "b")
    for (name, a), b in zip(once.named_parameters(), twice.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_first_forward_is_a_plain_residual_network():
    model = build(drafting_config(), plain_ops(), 1)
    ids = tokens(model.config, 20, 0)
    logits = model(Step.pack([(0, 0, ids)], "all")).logits
    assert logits.softmax(1).max() < 2 / model.config.vocab_size
    pre, post, comb = model.layers[2].hc_attn.coefficients(torch.ones(1, model.config.hc_mult, model.config.dim))
    assert (pre - 1 / model.config.hc_mult).abs().max() < 0.1 and (post - 1).abs().max() < 0.2
    assert (comb[0] - torch.eye(model.config.hc_mult)).abs().max() < 0.1


def test_published_numerics_train_what_is_shipped():
    """The forward is the published one, of the rounded weights, and gradients reach the masters all the same."""
    config = drafting_config(vocab_size=96)
    model = build(config, choose("cpu", training=True), 1)
    model.head.weight.data.mul_(30)
    step = Step.pack([(0, 0, tokens(config, 12, 0))], "all")
    logits = model(step, prefill="full").logits
    stored = Transformer(config, choose("cpu"))
    write = published(model)
    parameters = dict(stored.named_parameters())
    with torch.no_grad():
        for name, spec in published_tensors(config).items():
            where, value = place(name), write(name, spec)
            target = parameters[where.parameter]
            target = target if where.index is None else target[where.index]
            target.copy_(value.view(target.dtype) if target.dtype == torch.uint8 else value)
    assert (stored(step, prefill="full").logits - logits).abs().mean() < 0.05 * logits.abs().mean()
    logits.square().mean().backward()
    for name in ("layers.1.attn.wq_a.weight", "layers.2.ffn.experts.w1.weight", "layers.2.engram.wkv.weight"):
        assert dict(model.named_parameters())[name].grad.abs().sum() > 0, name


def test_one_stream_is_a_plain_residual_network(seed):
    """Its sublayers are added up by hand here; what would mix streams is no parameter that moves."""
    config = drafting_config(hc_mult=1)
    model = build(config, plain_ops(), seed)
    step = Step.pack([(0, 0, tokens(config, 20, seed))], "all")
    cache = model.fresh_cache(step)
    cache.admit(step)
    streams, sight = model.begin(step, cache)
    x = streams.h[:, 0]
    for block in model.blocks():
        if block.engram is not None:
            x = block.engram(x.unsqueeze(1), sight.ngrams, step.image).squeeze(1)
        y, sight = block.attn(block.attn_norm(x), step, sight, cache)
        x = x + y
        x = x + block.ffn(block.ffn_norm(x), step.image)
    logits = model(step).logits
    torch.testing.assert_close(logits, model.head(model.norm(x)), rtol=1e-3, atol=1e-4)
    logits.square().mean().backward()
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".hc_" in name)
    assert model.layers[0].attn.wq_a.weight.grad.any()
