"""The vision tower at the released width, on images of several sizes: packed, and padded to the largest.

The padded twin does what a rectangular batch does: every image takes as many rows as the largest one, and attention
masks what is not there. Both run in the same process, in turn, on the same images and weights.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from openv41.bench.agree import EACH, Beside
from openv41.bench.layer import values
from openv41.bench.measure import measure, product
from openv41.bench.results import Agreement, Figure, Report, Settings
from openv41.config import Config
from openv41.inputs.image import plan_image
from openv41.model.vision import Aligner, VisionBlock, VisionTower
from openv41.ops import Ops, choose
from openv41.parity.compare import Bounds, Sheet

BLOCKS = 2
"""Blocks that are run: all 32 are alike."""
IMAGES = ((100, 100), (640, 480), (333, 777), (1024, 768))
"""Width and height in pixels of the images that are timed."""
COMPARED = ((4, 5), (3, 3), (7, 6))
"""Patches of those that the reference sees as well: it would take hours for the others."""
END = Bounds(atol=0.05, rtol=0.05, relative_rms_error=0.01)
RULES = (
    "every operation from the same inputs: at least 99 % equal, the rest within 2 % of the row's largest; the aligned "
    "rows within 0.05 and 5 %; packed and padded features likewise"
)


def released_tower() -> Config:
    """The configuration that is timed."""
    return Config.released().replace(vision_n_layers=BLOCKS)


@torch.no_grad()
def run(settings: Settings, progress: Callable[[str], None]) -> Report:
    """Compare tower and aligner with the reference, the padded twin with the packed tower, then take the figures."""
    config = released_tower()
    options: dict[str, Any] = {} if settings.weights is None else {"weights": settings.weights}
    progress(f"making the weights of {config.vision_n_layers} blocks and the aligner")
    bench = _Bench(settings, config, choose("cpu", settings.ops, **options), progress)
    agreement = bench.agreement()
    figures = tuple(bench.figures()) if agreement.passed else ()
    return Report("vision", bench.subject(), settings, agreement, figures, ABOUT if agreement.passed else ())


ABOUT = (
    "The images are of these sizes in pixels: " + ", ".join(f"{width} x {height}" for width, height in IMAGES) + ".",
    "The padded twin runs the same blocks on as many rows for each image as the largest has; masked attention for all.",
)


class _Bench:
    def __init__(self, settings: Settings, config: Config, ops: Ops, progress: Callable[[str], None]) -> None:
        self.settings, self.config, self.progress = settings, config, progress
        self.tower, self.aligner = VisionTower(config, ops), Aligner(config, ops)
        for root, part in (("vision", self.tower), ("aligner", self.aligner)):
            for name, parameter in part.named_parameters():
                drawn = values(f"{root}.{name}", prod(parameter.shape[:-1]), parameter.shape[-1]).view(parameter.shape)
                parameter.copy_(1 + drawn / 10 if "norm" in name else drawn * parameter.shape[-1] ** -0.5)
        plans = [plan_image(*size, config) for size in IMAGES]
        self.grids = [(plan.rows, plan.columns) for plan in plans]
        self.patches = self._patches("timed", self.grids)

    def _patches(self, name: str, grids: list[tuple[int, int]]) -> Tensor:
        size = self.config.vision_patch_size
        return values(name, sum(map(prod, grids)), 3 * size * size).unflatten(1, (3, size, size))

    def subject(self) -> str:
        count = sum(p.numel() for part in (self.tower, self.aligner) for p in part.parameters())
        return (
            f"{self.config.vision_n_layers} blocks and the aligner, {count:,} parameters, {len(self.grids)} images, "
            f"{len(self.patches):,} patches, {self.tower.ops.name} operations, threads: {torch.get_num_threads()}"
        )

    # Compare

    def agreement(self) -> Agreement:
        self.progress("comparing with the reference: small images, packed")
        grids = list(COMPARED)
        patches = self._patches("compared", grids)
        ours = self.aligner(self.tower(patches, grids), grids)
        beside: Any = Beside(choose("cpu", "reference"), self.tower.ops)
        tower, aligner = VisionTower(self.config, beside), Aligner(self.config, beside)
        tower.load_state_dict(self.tower.state_dict())
        aligner.load_state_dict(self.aligner.state_dict())
        beside.dtype = torch.bfloat16
        wanted = aligner(tower(patches, grids), grids)
        sheet = Sheet()
        for name, results in beside.results.items():
            sheet.compare_all({f"{name} {call}": pair for call, pair in enumerate(results)}, EACH)
        sheet.compare("aligned rows", ours, wanted, END)
        self.progress("comparing the padded twin with the packed tower")
        packed, padded = self.tower(self.patches, self.grids), self.padded()
        sheet.compare("padded features", padded, packed, END)
        each = [pair for results in beside.results.values() for pair in results]
        equal = sum(int((got == want).sum()) for got, want in each) / sum(want.numel() for _, want in each)
        failures = tuple(f"{one.what}: {one.text}" for one in sheet.findings if not one.passed)
        end = float((ours == wanted).double().mean())
        return Agreement(RULES, sum(got.numel() for got, _ in each), equal, end, failures)

    # The padded twin

    def padded(self) -> Tensor:
        """Features of all patches, in order, by way of a rectangular batch."""
        lengths = [prod(grid) for grid in self.grids]
        longest, tower = max(lengths), self.tower
        there = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)  # [b, longest]
        patches = self.patches.new_zeros(len(lengths), longest, *self.patches.shape[1:])
        patches[there] = self.patches
        cos, sin = (self.patches.new_zeros(*there.shape, part.shape[1], dtype=part.dtype) for part in self._angles())
        cos[there], sin[there] = self._angles()
        x = tower.patch_embed(patches.flatten(0, 1))
        for block in tower.blocks:
            assert isinstance(block, VisionBlock)
            x = self._padded_block(block, x, (cos.flatten(0, 1), sin.flatten(0, 1)), there)
        return tower.norm(x)[there.flatten()]

    def _angles(self) -> tuple[Tensor, Tensor]:
        return self.tower.angles(self.grids)

    def _padded_block(self, block: VisionBlock, x: Tensor, angles: tuple[Tensor, Tensor], there: Tensor) -> Tensor:
        """As the block itself, but attention of all images at once, under a mask."""
        attn = block.attn
        q, k, v = attn.wqkv(block.norm1(x)).unflatten(1, (3, attn.heads, -1)).unbind(1)
        rows = (attn.turn(q, angles), attn.turn(k, angles), v)
        queries, keys, shown = (part.float().unflatten(0, there.shape).transpose(1, 2) for part in rows)
        out = F.scaled_dot_product_attention(queries, keys, shown, there[:, None, None], scale=attn.scale)
        x = x + attn.wo(out.transpose(1, 2).flatten(0, 1).to(x.dtype).flatten(1))
        return x + block.mlp(block.norm2(x))

    # Measure

    def figures(self) -> Iterator[Figure]:
        self.progress("timing packed, padded, one image after another, and a float32 product, in turn")
        multiply, count = product()
        calls = {
            "packed": lambda: self.tower(self.patches, self.grids),
            "padded": self.padded,
            "alone": self._one_after_another,
            "product": multiply,
        }
        times = measure(calls, self.settings.repeats)
        packed, padded, alone, machine = (times[name] for name in calls)
        lengths = [prod(grid) for grid in self.grids]
        total, rows = self.operations(lengths), sum(lengths)
        rate, limit = total / packed.median / 1e6, count / machine.median / 1e6
        yield Figure("packed_ms", f"packed, {rows:,} rows", packed.median, "ms", packed)
        yield Figure("packed_gflop", "  counted", total / 1e9, "GFLOP")
        yield Figure("packed_gflop_s", "  which is", rate, "GFLOP/s")
        yield Figure("product_gflop_s", "  fp32 matrix products", limit, "GFLOP/s", note="squares of 2,048")
        yield Figure("padded_ms", f"padded, {max(lengths) * len(lengths):,} rows", padded.median, "ms", padded)
        yield Figure("padded_factor", "  over packed", padded.median / packed.median, "x", aim="above 1")
        yield Figure("alone_ms", "one image after another", alone.median, "ms", alone)
        yield Figure("alone_factor", "  over packed", alone.median / packed.median, "x")

    def _one_after_another(self) -> None:
        lengths = [prod(grid) for grid in self.grids]
        for patches, grid in zip(self.patches.split(lengths), self.grids, strict=True):
            self.tower(patches, [grid])

    def operations(self, lengths: list[int]) -> float:
        """Multiplications and additions of the tower's products: maps by rows, attention by pairs of rows."""
        width, inner = self.config.vision_dim, self.config.vision_inter_dim
        maps = 4 * width * width + 3 * width * inner
        embed = 3 * self.config.vision_patch_size**2 * width
        blocks = self.config.vision_n_layers
        rows, pairs = sum(lengths), sum(length * length for length in lengths)
        return 2.0 * (rows * (embed + blocks * maps) + blocks * 2 * pairs * width)
