"""What a step of training costs a GPU beside its arithmetic: how often it begins something, how often it is waited for.

Counted on a CPU, with the operations and the pieces that a GPU would take: see `tests.launches`. Widths do not matter
to these numbers; layers, stages of the draft, and Sinkhorn's rounds do.
"""

import functools

import numpy as np
import pytest
import torch

from openv41.config import Config, engram_primes
from openv41.ops import choose
from openv41.train.balance import Routing
from openv41.train.data import Pack
from openv41.train.draft import draft_loss, draw_blocks
from openv41.train.language import language_loss, run_headless
from openv41.train.lessons import Lessons, Target
from openv41.train.optimizers import Optimizers
from openv41.train.settings import OptimizerSettings
from openv41.train.trainable import build
from tests.launches import Launches, counted_as_on_a_gpu


def mini_shape() -> Config:
    """The roles, layers, experts and draft stages of openv41-mini, of an eighth of its width."""
    primes = engram_primes(2, 3, 2, 50)
    return Config.released().replace(
        vocab_size=96, dim=32, moe_inter_dim=32, n_layers=9, n_mtp_layers=3,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0), kv_source_layers=(1, 4), index_source_layers=(1, 4, 6, 8),
        candidate_source_layer=4, candidate_topk_blocks=8, candidate_block_size=8, index_topk=16, index_n_heads=4,
        index_head_dim=32, n_heads=4, head_dim=32, rope_head_dim=16, q_lora_rank=32, o_groups=2, o_lora_rank=32,
        window_size=16, n_routed_experts=12, n_activated_experts=2, original_seq_len=2048, rope_factor=16,
        engram_layer_ids=(1, 3), engram_n_heads=2, engram_head_dim=32, engram_vocab_size=50,
        engram_compressed_vocab_size=48, engram_num_embeddings=tuple(sum(map(sum, layer)) for layer in primes),
        vision_n_layers=0, image_token_id=95, dspark_target_layer_ids=(6, 7, 8), dspark_markov_rank=32,
        dspark_noise_token_id=94, dspark_n_routed_experts=4, dspark_n_activated_experts=1,
    )  # fmt: skip


class Trained:
    """A model that takes steps, all of whose losses are asked for."""

    def __init__(self, numerics: str) -> None:
        dtype = torch.float32 if numerics == "plain" else None
        self.config = mini_shape()
        self.model = build(self.config, choose("cpu", "fast", numerics, training=True, dtype=dtype), 0)
        self.optimizers, self.routing = Optimizers(self.model, OptimizerSettings()), Routing(self.model)
        for group in self.optimizers.parts["adamw"].param_groups:
            group["foreach"] = True  # which is PyTorch's own choice on a GPU

    def counted(self, tokens: int, sequences: int) -> dict[str, Launches]:
        """A step of so many tokens, by part."""
        ids = np.random.default_rng(tokens).integers(3, 90, size=(sequences, tokens // sequences + 1))
        pack, model, parts = Pack(tuple(ids)), self.model, {}
        self.routing.clear()
        with counted_as_on_a_gpu() as parts["forward"]:
            step, targets, lessons = pack.step(), pack.targets(), Lessons(model)
            with self.routing.during(step), lessons:
                hidden, output = run_headless(model, step)
        with counted_as_on_a_gpu() as parts["losses"]:
            losses = [language_loss(model.head, hidden, targets, 2048), 1e-4 * self.routing.loss()]
            losses += lessons.losses(Target()).values()
        with counted_as_on_a_gpu() as parts["draft"]:
            blocks = draw_blocks(pack, self.config.dspark_block_size, 16, torch.Generator().manual_seed(0))
            with self.routing.during(None):
                draft = draft_loss(model.mtp, output, blocks)
            losses += [draft.language, draft.confidence]
        with counted_as_on_a_gpu() as parts["backward"]:
            torch.stack(losses).sum().backward()
        with counted_as_on_a_gpu() as parts["optimizers"]:
            self.optimizers.clip(self.optimizers.norm())
            self.optimizers.step()
            self.routing.move_bias(1e-3)
        return parts


@functools.cache
def trained(numerics: str) -> Trained:
    """After a step that makes what is made once: momenta, angles of the positions."""
    first = Trained(numerics)
    first.counted(384, 2)
    return first


def total(parts: dict[str, Launches]) -> int:
    return sum(part.count for part in parts.values())


@pytest.mark.parametrize(("numerics", "most", "waits"), [("plain", 8500, 30), ("published", 18000, 30)])
def test_a_step_begins_few_operations_and_waits_seldom(numerics: str, most: int, waits: int) -> None:
    parts = trained(numerics).counted(192, 3)
    for name, part in parts.items():
        print(f"{name:10} {part.count:6} kernels, {part.waits.total()} waits; {dict(part.waits)}")
    assert total(parts) <= most
    # SparseAdam and AdamW ask for counts of steps, which lie on the host wherever parameters are.
    assert sum(part.waits.total() for name, part in parts.items() if name != "optimizers") <= waits


def test_neither_tokens_nor_sequences_matter() -> None:
    """Three times the tokens, twice the sequences."""
    model = trained("plain")
    few, many = model.counted(128, 2), model.counted(384, 4)
    for part in few:
        assert few[part].by_operation == many[part].by_operation, part
        assert few[part].waits.total() == many[part].waits.total(), part
