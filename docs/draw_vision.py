"""Draws the pictures of docs/vision.md: a scene, and the span of tokens that it becomes. Needs Pillow.

    python docs/draw_vision.py [FOLDER]

The scene is made of formulas, so it belongs to nobody. Everything that is shown of the span comes from the package:
the resized image is put together from the patches that the model would get, and the tokens from their types.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from openv41.config import Config
from openv41.inputs.image import make_picture, plan_image
from openv41.state import Mark, Picture

SIZE = (640, 480)
PAPER, INK, FAINT = (255, 255, 255), (30, 30, 30), (150, 150, 150)
COLOURS = {Mark.START: (38, 139, 90), Mark.NEWLINE: (203, 120, 28), Mark.END: (180, 44, 60)}
WORDS = {Mark.START: "start", Mark.NEWLINE: "new\nline", Mark.END: "end"}
SIDE, GAP, MARGIN = 34, 4, 24
"""Of a token in the drawing."""


def scene(width: int, height: int) -> Image.Image:
    """Evening over hills: a sky, a sun, three ranges, and a lake that mirrors them."""
    x, y = np.meshgrid(np.linspace(0, 4, width), np.linspace(0, 3, height))
    shore = 2.2
    up = np.where(y > shore, 2 * shore - y - 0.02 * np.sin(40 * y + 3 * np.sin(3 * x)), y)  # what the lake mirrors
    colour = np.stack((70 + 75 * up, 90 + 45 * up, 170 - 20 * up), 2)
    glow = np.exp(-((x - 2.9) ** 2 + (up - 0.95) ** 2) / 0.25)[..., None]
    colour += glow * np.array([110, 60, -30])
    colour[(x - 2.9) ** 2 + (up - 0.95) ** 2 < 0.05] = (255, 236, 180)
    for far, (level, tint) in enumerate(((1.35, (120, 110, 150)), (1.65, (80, 85, 120)), (1.95, (38, 56, 70)))):
        ridge = level + 0.22 * np.sin(1.7 * x + 2 * far) * np.cos(0.9 * x + far) + 0.05 * np.sin(9 * x + 5 * far)
        colour[up > ridge] = tint
    colour[y > shore] = colour[y > shore] * 0.72 + np.array([8, 16, 30])
    return Image.fromarray(colour.clip(0, 255).astype(np.uint8))


def put_together(picture: Picture) -> Image.Image:
    """The resized image, back from its patches."""
    size = picture.patches.shape[-1]
    grid = picture.patches.float().unflatten(0, picture.grid).permute(0, 3, 1, 4, 2).reshape(
        picture.rows * size, picture.columns * size, 3
    )  # fmt: skip
    return Image.fromarray(((grid + 1) * 127.5).round().to(torch.uint8).numpy())


def draw_patches(picture: Picture, ratio: int) -> Image.Image:
    """The resized image with its patches (thin lines) and cells (thick ones); cells reach beyond it where it ends."""
    size = picture.patches.shape[-1]
    cell = size * ratio
    rows, columns = -(-picture.rows // ratio), -(-picture.columns // ratio)
    canvas = Image.new("RGB", (columns * cell + 1, rows * cell + 1), PAPER)
    canvas.paste(put_together(picture), (0, 0))
    pen = ImageDraw.Draw(canvas, "RGBA")
    for step, width, shade in ((size, 1, 70), (cell, 2, 230)):
        for x in range(0, canvas.width, step):
            pen.line((x, 0, x, canvas.height), (255, 255, 255, shade) if x < picture.columns * size else FAINT, width)
        for y in range(0, canvas.height, step):
            pen.line((0, y, canvas.width, y), (255, 255, 255, shade) if y < picture.rows * size else FAINT, width)
    pen.rectangle((0, 0, canvas.width - 1, canvas.height - 1), outline=FAINT)
    return canvas


def draw_span(picture: Picture, ratio: int) -> Image.Image:
    """The tokens in the order of the prompt, a line for every row of cells, each cell showing what lies in it."""
    size = picture.patches.shape[-1] * ratio
    image, types = put_together(picture), picture.types(ratio).tolist()
    padded = Image.new("RGB", (-(-image.width // size) * size, -(-image.height // size) * size), PAPER)
    padded.paste(image, (0, 0))
    columns = padded.width // size
    canvas = Image.new("RGB", ((columns + 3) * (SIDE + GAP), (padded.height // size) * (SIDE + GAP)), PAPER)
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(9)
    row, column, lines = 0, 1, padded.height // size
    for kind in types:
        place = {Mark.START: (0, 0), Mark.END: (columns + 2, lines - 1)}.get(kind, (column, row))
        x, y = place[0] * (SIDE + GAP), place[1] * (SIDE + GAP)
        if kind == Mark.CELL:
            left, top = (column - 1) * size, row * size
            canvas.paste(padded.crop((left, top, left + size, top + size)).resize((SIDE, SIDE)), (x, y))
            column += 1
        else:
            pen.rounded_rectangle((x, y, x + SIDE - 1, y + SIDE - 1), 5, COLOURS[Mark(kind)])
            pen.text((x + SIDE / 2, y + SIDE / 2), WORDS[Mark(kind)], PAPER, font, "mm", align="center", spacing=1)
            if kind == Mark.NEWLINE:
                row, column = row + 1, 1
    return canvas


def draw(image: Image.Image, config: Config) -> Image.Image:
    """Both side by side, with their numbers."""
    ratio, plan = config.vision_downsample_ratio, plan_image(*image.size, config)
    picture = make_picture(image, config)
    left, right = draw_patches(picture, ratio), draw_span(picture, ratio)
    head = 60
    canvas = Image.new(
        "RGB", (left.width + right.width + 3 * MARGIN, max(left.height, right.height) + head + 2 * MARGIN), PAPER
    )
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(16)
    canvas.paste(left, (MARGIN, head + MARGIN))
    at = left.width + 2 * MARGIN
    canvas.paste(right, (at, head + MARGIN))
    pen.text(
        (MARGIN, MARGIN),
        f"{image.width} x {image.height} pixels, resized to {plan.width} x {plan.height}:\n"
        f"{plan.columns} x {plan.rows} patches of {config.vision_patch_size} pixels",
        INK, font,
    )  # fmt: skip
    pen.text(
        (at, MARGIN),
        f"{plan.cell_columns} x {plan.cell_rows} cells "
        f"of {ratio} x {ratio} patches, a token each; with start, newlines and end\n"
        f"{plan.tokens} tokens, read line by line",
        INK, font,
    )  # fmt: skip
    return canvas


def main(folder: Path) -> None:
    image = scene(*SIZE)
    image.quantize(128).save(folder / "scene.png", optimize=True)
    draw(image, Config.released()).quantize(128).save(folder / "vision.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
