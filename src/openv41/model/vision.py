"""Vision: pictures become rows of the model's width, which stand in the prompt like embedded tokens.

    patches [p, 3, size, size] -> one linear map -> p rows of the tower's width
        -> blocks of attention (every patch of a picture sees every other) and a gated MLP -> norm     (`VisionTower`)
        -> ratio x ratio neighbours side by side -> two linear maps -> rows of the model's width       (`Aligner`)

Several pictures run together, their patches one after another without padding: all maps take the rows as they come, and
attention is told how many belong to each picture. `grids` says how: (rows, columns) of patches, a picture each.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from openv41.config import Config
from openv41.model.layers import Linear, RMSNorm, Rotary, empty_weight
from openv41.ops import Ops
from openv41.state import Picture

NORM_EPS = 1e-6
"""Of the tower's norms; the rest of the model has 1e-20."""

Grids = Sequence[tuple[int, int]]
"""(rows, columns) of each picture, in the order in which their patches are packed."""

PATCHES = 16384
"""Patches that go through the tower together. The widest activation of the released one takes 11 KiB a patch."""


class BiasedLinear(nn.Module):
    """y = x @ weight.T + bias, rounded once. No other part of the model has biases in its linear maps."""

    def __init__(self, inputs: int, outputs: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight, _ = empty_weight("bf16", outputs, inputs)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=torch.bfloat16))

    def forward(self, x: Float[Tensor, "p inputs"]) -> Float[Tensor, "p outputs"]:
        return self.ops.linear_bias(x, self.weight, self.bias)


class PatchEmbedding(nn.Module):
    """A patch, flattened by colour, row, column, to the tower's width."""

    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        self.proj = BiasedLinear(3 * config.vision_patch_size**2, config.vision_dim, ops)

    def forward(self, patches: Float[Tensor, "p 3 size size"]) -> Float[Tensor, "p width"]:
        return self.proj(patches.flatten(1))


class VisionAttention(nn.Module):
    """Attention among all patches of a picture. Queries and keys are turned by the patch's row and column."""

    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        self.ops, self.heads = ops, config.vision_n_heads
        self.scale = (config.vision_dim // config.vision_n_heads) ** -0.5
        self.wqkv = BiasedLinear(config.vision_dim, 3 * config.vision_dim, ops)
        self.wo = BiasedLinear(config.vision_dim, config.vision_dim, ops)

    def forward(
        self, x: Float[Tensor, "p width"], angles: tuple[Tensor, Tensor], lengths: Sequence[int]
    ) -> Float[Tensor, "p width"]:
        q, k, v = self.wqkv(x).unflatten(1, (3, self.heads, -1)).unbind(1)  # [p, h, d] each
        out = self.ops.full_attention(self.turn(q, angles), self.turn(k, angles), v, lengths, self.scale)
        return self.wo(out.flatten(1))

    def turn(self, x: Float[Tensor, "p h d"], angles: tuple[Tensor, Tensor]) -> Float[Tensor, "p h d"]:
        """The tower pairs entry i with entry i + d / 2, where `rotate` takes neighbours: so the two halves are shuffled
        together first. They stay so; queries and keys alike, their products are the same."""
        pairs = x.unflatten(-1, (2, -1)).mT.flatten(-2)
        return self.ops.rotate(pairs, *angles, inverse=False)


class VisionMLP(nn.Module):
    """w2(silu(gate) * up); w1 makes both, the gate first."""

    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.w1 = Linear(config.vision_dim, 2 * config.vision_inter_dim, "bf16", ops)
        self.w2 = Linear(config.vision_inter_dim, config.vision_dim, "bf16", ops)

    def forward(self, x: Float[Tensor, "p width"]) -> Float[Tensor, "p width"]:
        gate, up = self.w1(x).chunk(2, -1)
        return self.w2(self.ops.activate(gate, "silu") * up)  # rounded between the two factors, as published


class VisionBlock(nn.Module):
    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.vision_dim, NORM_EPS, ops, torch.float32)
        self.attn = VisionAttention(config, ops)
        self.norm2 = RMSNorm(config.vision_dim, NORM_EPS, ops, torch.float32)
        self.mlp = VisionMLP(config, ops)

    def forward(
        self, x: Float[Tensor, "p width"], angles: tuple[Tensor, Tensor], lengths: Sequence[int]
    ) -> Float[Tensor, "p width"]:
        x = x + self.attn(self.norm1(x), angles, lengths)
        return x + self.mlp(self.norm2(x))


class VisionTower(nn.Module):
    """Patches [p, 3, size, size] of several pictures, one after another, -> features [p, width]."""

    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.rotary = Rotary(config.vision_dim // config.vision_n_heads // 2, config.vision_rope_theta)
        self.patch_embed = PatchEmbedding(config, ops)
        self.blocks = nn.ModuleList(VisionBlock(config, ops) for _ in range(config.vision_n_layers))
        self.norm = RMSNorm(config.vision_dim, NORM_EPS, ops, torch.float32)

    def forward(self, patches: Float[Tensor, "p 3 size size"], grids: Grids) -> Float[Tensor, "p width"]:
        x = self.patch_embed(patches.to(self.ops.dtype))
        angles, lengths = self.angles(grids, x.device), [prod(grid) for grid in grids]
        for block in self.blocks:
            x = block(x, angles, lengths)
        return self.norm(x)

    def angles(self, grids: Grids, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine [p, half the width of a head] of each patch: half of the angles tell its row, half its
        column."""
        places = torch.cat([torch.cartesian_prod(torch.arange(h), torch.arange(w)) for h, w in grids]).to(device)
        (row_cos, row_sin), (column_cos, column_sin) = (self.rotary.at(place) for place in places.unbind(1))
        return torch.cat((row_cos, column_cos), 1), torch.cat((row_sin, column_sin), 1)


class Aligner(nn.Module):
    """Features [p, width] -> rows [t, dim], one for every `ratio` x `ratio` patches of a picture, in reading order.

    A grid that does not divide is filled up with zeros, on its right and below.
    """

    def __init__(self, config: Config, ops: Ops) -> None:
        super().__init__()
        self.ops, self.ratio = ops, config.vision_downsample_ratio
        self.w1 = BiasedLinear(config.vision_dim * self.ratio**2, config.dim, ops)
        self.w2 = BiasedLinear(config.dim, config.dim, ops)

    def forward(self, features: Float[Tensor, "p width"], grids: Grids) -> Float[Tensor, "t dim"]:
        each = features.split([prod(grid) for grid in grids])
        cells = torch.cat([self.cells(one, *grid) for one, grid in zip(each, grids, strict=True)])
        return self.w2(self.ops.activate(self.w1(cells), "gelu"))

    def cells(self, features: Float[Tensor, "p width"], rows: int, columns: int) -> Float[Tensor, "t inputs"]:
        """Each cell's features side by side: by channel, then row and column within the cell."""
        r = self.ratio
        grid = F.pad(features.unflatten(0, (rows, columns)), (0, 0, 0, -columns % r, 0, -rows % r))
        return grid.unflatten(1, (-1, r)).unflatten(0, (-1, r)).permute(0, 2, 4, 1, 3).flatten(0, 1).flatten(1)


def packs(pictures: Sequence[Picture], most: int) -> Iterator[list[Picture]]:
    """The pictures in order, in lists of `most` patches together; a larger one is alone."""
    some: list[Picture] = []
    for picture in pictures:
        if some and sum(len(one.patches) for one in some) + len(picture.patches) > most:
            yield some
            some = []
        some.append(picture)
    if some:
        yield some
