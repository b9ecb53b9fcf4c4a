"""A config in which every border comes early (window 4, top-k 2, two candidate blocks of 2), and models of it."""

import torch
from torch import nn

from openv41 import formats
from openv41.config import Config, engram_primes
from openv41.model.transformer import Transformer
from openv41.ops import Ops
from openv41.state import Cache, Picture, Step


def small_config(**changes) -> Config:
    primes = engram_primes(2, 2, 2, 50)
    values = dict(
        vocab_size=96, dim=64, moe_inter_dim=32, n_layers=6, n_mtp_layers=0, n_heads=4, head_dim=32, rope_head_dim=8,
        q_lora_rank=32, o_groups=2, o_lora_rank=32, window_size=4, compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_source_layers=(1, 3), index_source_layers=(1, 3, 5), candidate_source_layer=3, candidate_topk_blocks=2,
        candidate_block_size=2, index_topk=2, index_n_heads=2, index_head_dim=32, n_routed_experts=4,
        n_activated_experts=2, original_seq_len=256, rope_factor=4, engram_layer_ids=(0, 2), engram_max_ngram_size=3,
        engram_n_heads=2, engram_head_dim=32, engram_vocab_size=50, engram_compressed_vocab_size=48,
        engram_num_embeddings=tuple(sum(map(sum, layer)) for layer in primes), vision_n_layers=0,
        vision_dim=32, vision_n_heads=2, vision_inter_dim=32, vision_patch_size=2, vision_max_n_token=40,
        vision_min_pixels=64, image_token_id=95, dspark_block_size=0, dspark_target_layer_ids=(),
        dspark_noise_token_id=0,
    )  # fmt: skip
    values.update(changes)
    return Config.released().replace(**values)


def drafting_config(**changes) -> Config:
    """The same with a draft: two stages, blocks of three tokens, the taps of the three upper layers."""
    values = dict(
        n_mtp_layers=2, compress_ratios=(0, 2, 2, 1, 1, 1, 0, 0), dspark_block_size=3, dspark_noise_token_id=94,
        dspark_target_layer_ids=(3, 4, 5), dspark_markov_rank=32, dspark_n_routed_experts=3,
        dspark_n_activated_experts=1,
    )  # fmt: skip
    return small_config(**(values | changes))


@torch.no_grad()
def fill_randomly(module: nn.Module, seed: int) -> None:
    """Seeded values in every parameter, of a size that keeps activations near 1, in each parameter's stored format."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape, std):
        return torch.randn(shape, generator=generator) * std

    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        if leaf == "scale" and parameter.dtype == torch.float8_e8m0fnu:
            continue  # filled with its weight
        if parameter.dtype == torch.float8_e4m3fn and "embed" in name:
            codes, scale = formats.WINDOW.pack(normal(parameter.shape, 1.0))
        elif parameter.dtype == torch.float8_e4m3fn:
            codes, scale = formats.pack_fp8_weight(normal(parameter.shape, parameter.shape[-1] ** -0.5))
        elif parameter.dtype == torch.uint8:
            shape = (*parameter.shape[:-1], parameter.shape[-1] * 2)
            codes, scale = formats.pack_fp4_weight(normal(shape, shape[-1] ** -0.5))
        else:
            if leaf in ("weight", "q_weight", "k_weight") and parameter.dim() == (2 if leaf != "weight" else 1):
                value = 1 + normal(parameter.shape, 0.2)
            elif "embed" in name and "patch_embed" not in name:
                value = normal(parameter.shape, 1.0)
            elif leaf == "fn" or parameter.dim() > 1:
                value = normal(parameter.shape, parameter.shape[-1] ** -0.5)
            elif leaf == "scale":
                value = torch.full(parameter.shape, 0.7)
            else:
                value = normal(parameter.shape, 0.5)
            parameter.copy_(value)
            continue
        parameter.copy_(codes)
        owner.scale.copy_(scale)


def small_model(config: Config, ops: Ops, seed: int = 0, index_keys: str = "own_keys") -> Transformer:
    model = Transformer(config, ops, index_keys)
    fill_randomly(model, seed)
    if model.lookback is not None:
        model.lookback.token_map.copy_(torch.arange(config.vocab_size) // 2 % config.engram_compressed_vocab_size)
    return model


def seeing_config(**changes) -> Config:
    """The same with a tower of two layers, whose patches have 2 x 2 pixels."""
    return small_config(**(dict(vision_n_layers=2) | changes))


def picture_of(config: Config, rows: int, columns: int, seed: int) -> Picture:
    size = config.vision_patch_size
    generator = torch.Generator().manual_seed(seed)
    patches = torch.rand(rows * columns, 3, size, size, generator=generator).mul(2).sub(1).bfloat16()
    return Picture(patches, rows, columns)


def tokens(config: Config, count: int, seed: int) -> torch.Tensor:
    return torch.randint(config.vocab_size - 1, (count,), generator=torch.Generator().manual_seed(seed))


def run_in_pieces(model: Transformer, ids: torch.Tensor, lengths, cache: Cache | None = None) -> torch.Tensor:
    """Logits [len(ids), vocab] of a sequence fed in pieces of the given lengths."""
    cache = cache or Cache(model.config, 1, len(ids), dtype=model.ops.dtype)
    slot = cache.open()
    logits, first = [], 0
    for length in lengths:
        step = cache.step([(slot, ids[first : first + length])], wanted="all")
        logits.append(model(step, cache).logits)
        first += length
    assert first == len(ids)
    return torch.cat(logits)


def run_at_once(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    return model(Step.pack([(0, 0, ids)], wanted="all")).logits


def readable(cache: Cache, slot: int) -> dict[str, torch.Tensor]:
    """Everything that a later call can read of a slot."""
    kept = {f"window.{layer}": cache.view("window", layer, slot) for layer in cache.windows}
    kept |= {f"draft.{layer}": cache.view("draft", layer, slot) for layer in cache.drafts}
    for layer, source in cache.sources.items():
        kinds = ("latents", "keys", "group") if source.group is not None else ("latents", "keys")
        kept |= {f"{kind}.{layer}": cache.view(kind, layer, slot) for kind in kinds}
    length = cache.length(slot)
    kept["tail"] = cache.tail.rows_of(slot, range(max(0, length - cache.config.engram_max_ngram_size + 1), length))
    return kept
