"""The tower and the aligner by themselves: what they compute, and that pictures packed together stay apart."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from openv41.config import Config
from openv41.errors import InputError
from openv41.model.transformer import Transformer
from openv41.model.vision import packs
from openv41.ops import choose
from openv41.state import Mark, Picture
from openv41.weights.names import published_tensors
from tests.small import picture_of, seeing_config, small_config, small_model

CONFIG = seeing_config()
GRIDS = [(1, 1), (3, 3), (4, 5), (4, 5), (7, 2), (1, 8)]
PARTS = ("vision.", "aligner.", "image_")


def model_of(ops: str, numerics: str, seed: int, **options) -> Transformer:
    return small_model(CONFIG, choose("cpu", ops, numerics, **options), seed)


def pictures(seed: int) -> list[Picture]:
    return [picture_of(CONFIG, *grid, seed + number) for number, grid in enumerate(GRIDS)]


# Parameters


def test_released_parameters_have_the_published_names_and_sizes() -> None:
    config = Config.released()
    with torch.device("meta"):
        model = Transformer(config, choose("cpu", "reference"), draft=False)
    ours = {name: tuple(value.shape) for name, value in model.named_parameters() if name.startswith(PARTS)}
    published = {name: spec.shape for name, spec in published_tensors(config).items() if name.startswith(PARTS)}
    assert ours == published
    assert sum(torch.Size(shape).numel() for shape in ours.values()) == 485_268_480


def test_norms_are_wide_and_everything_else_is_bf16() -> None:
    model = Transformer(CONFIG, choose("cpu", "reference"))
    for name, value in model.named_parameters():
        if name.startswith(PARTS):
            assert value.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name


def test_a_model_without_vision_has_none_of_it() -> None:
    model = Transformer(small_config(), choose("cpu", "reference"))
    assert model.vision is None and model.aligner is None and model.image_start is None
    assert not [name for name, _ in model.named_parameters() if name.startswith(PARTS)]
    with pytest.raises(InputError, match="no vision tower"):
        model.see([])


# What it computes


def plain_tower(weights: dict[str, Tensor], patches: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Features and aligned rows of one picture, in float64, as one would write it for one picture alone."""
    heads, half = CONFIG.vision_n_heads, CONFIG.vision_dim // CONFIG.vision_n_heads // 2

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    frequency = 1.0 / CONFIG.vision_rope_theta ** (torch.arange(0, half, 2, dtype=torch.float64) / half)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angle = torch.cat([place.flatten().unsqueeze(1) * frequency for place in (row, column)], 1).unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    x = linear(patches.double().flatten(1), "vision.patch_embed.proj")
    for block in range(CONFIG.vision_n_layers):
        prefix = f"vision.blocks.{block}"
        q, k, v = (part.unflatten(1, (heads, -1)) for part in
                   linear(norm(x, f"{prefix}.norm1"), f"{prefix}.attn.wqkv").chunk(3, -1))  # fmt: skip
        scores = torch.einsum("ihd,jhd->hij", turned(q), turned(k)) * (2 * half) ** -0.5
        out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
        x = x + linear(out, f"{prefix}.attn.wo")
        gate, up = linear(norm(x, f"{prefix}.norm2"), f"{prefix}.mlp.w1").chunk(2, -1)
        x = x + linear(F.silu(gate) * up, f"{prefix}.mlp.w2")
    features = norm(x, "vision.norm")
    ratio = CONFIG.vision_downsample_ratio
    image = F.pad(features.T.unflatten(1, (rows, columns)), (0, -columns % ratio, 0, -rows % ratio))
    cells = F.unfold(image.unsqueeze(0), ratio, stride=ratio).squeeze(0).T
    return features, linear(F.gelu(linear(cells, "aligner.w1")), "aligner.w2")


@torch.no_grad()
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_plain_numerics_are_the_formulas(ops: str, seed: int) -> None:
    model = model_of(ops, "plain", seed)
    weights = {name: value.double() for name, value in model.named_parameters()}
    assert model.vision is not None and model.aligner is not None
    many = pictures(seed)
    features = model.vision(torch.cat([one.patches for one in many]), GRIDS)
    aligned = model.aligner(features, GRIDS)
    wanted = [plain_tower(weights, one.patches, *one.grid) for one in many]
    torch.testing.assert_close(features, torch.cat([one for one, _ in wanted]), rtol=1e-6, atol=1e-6)  # float32 angles
    torch.testing.assert_close(aligned, torch.cat([rows for _, rows in wanted]), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_pictures_packed_together_have_the_bits_that_they_have_alone(seed: int) -> None:
    model = model_of("reference", "published", seed)
    many = pictures(seed)
    together = model.see(many)
    for one, span in zip(many, together, strict=True):
        assert torch.equal(model.see([one])[0], span)
    assert not torch.equal(together[2], together[3])  # of one shape, next to each other, and not the same picture


@torch.no_grad()
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_the_sets_of_operations_agree(weights: str, seed: int) -> None:
    exact, fast = model_of("reference", "published", seed), model_of("cpu", "published", seed, weights=weights)
    for ours, wanted in zip(fast.see(pictures(seed)), exact.see(pictures(seed)), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0.03, atol=0.05)


@torch.no_grad()
def test_a_span_is_cells_between_learned_delimiters(seed: int) -> None:
    model = model_of("reference", "published", seed)
    one = picture_of(CONFIG, 4, 7, seed)  # 2 x 3 cells
    (span,) = model.see([one])
    types = one.types(CONFIG.vision_downsample_ratio)
    assert types.tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3] and len(span) == one.tokens(3) == 10
    assert model.image_start is not None and model.image_newline is not None and model.image_end is not None
    assert torch.equal(span[0], model.image_start) and torch.equal(span[9], model.image_end)
    assert torch.equal(span[[4, 8]], model.image_newline.expand(2, -1))
    assert model.vision is not None and model.aligner is not None
    rows = model.aligner(model.vision(one.patches, [one.grid]), [one.grid])
    assert torch.equal(span[types == Mark.CELL], rows)


@torch.no_grad()
def test_a_patch_moved_elsewhere_changes_all_features(seed: int) -> None:
    """Attention is not causal and knows places: two patches exchanged are another picture to every patch."""
    model = model_of("reference", "plain", seed)
    assert model.vision is not None
    one = picture_of(CONFIG, 3, 4, seed).patches
    moved = one[[11, *range(1, 11), 0]]
    before, after = model.vision(one, [(3, 4)]), model.vision(moved, [(3, 4)])
    assert bool((before[1:11] != after[1:11]).any(1).all()) and not torch.equal(before[0], after[11])


def test_gradients_reach_every_parameter(seed: int) -> None:
    model = model_of("reference", "plain", seed)
    torch.cat(model.see(pictures(seed))).square().sum().backward()
    for name, value in model.named_parameters():
        if name.startswith(PARTS):
            assert value.grad is not None and bool(value.grad.any()), name


# What is refused


def test_patches_of_another_size_are_refused(seed: int) -> None:
    model = model_of("reference", "published", seed)
    with pytest.raises(InputError, match=r"2 x 2 pixels, got 3 x 3"):
        model.see([Picture(torch.zeros(4, 3, 3, 3), 2, 2)])


@pytest.mark.parametrize("shape", [(5, 3, 2, 2), (4, 1, 2, 2), (4, 3, 2, 1), (4, 12)])
def test_a_picture_has_as_many_patches_as_its_grid(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="2 x 2 patches"):
        Picture(torch.zeros(shape), 2, 2)


def test_calls_of_the_tower_are_bounded(seed: int) -> None:
    many = [picture_of(CONFIG, *grid, seed) for grid in ((2, 2), (3, 3), (1, 1), (5, 5), (1, 2))]
    assert [[len(one.patches) for one in some] for some in packs(many, 13)] == [[4, 9], [1], [25], [2]]
    assert list(packs([], 13)) == []
