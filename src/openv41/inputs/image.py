"""Images: from a file to patches, and the rule that says how many.

    file -> colours of 8 bits, upright, nothing transparent -> resized, the rest gray -> patches  (a `Picture`)

The rule keeps an image's shape: small ones are enlarged to `vision_min_pixels`, and those that would take more than
`vision_max_n_token` tokens are reduced. Decoding needs Pillow (the extra `vision`); the rule does not.

A file is not trusted: only plain raster formats are opened, the size that it states is checked before anything is
decoded, and whatever goes wrong with it is one `InputError`.
"""

import io
import math
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from openv41.config import Config
from openv41.errors import InputError
from openv41.inputs.tokenizer import Tokenizer
from openv41.state import Picture, Placed
from openv41.state.picture import cells, span_length

if TYPE_CHECKING:
    from PIL.Image import Image

Source = str | os.PathLike[str] | bytes
"""A path, or the bytes of a file."""

PLACEHOLDER = "<image>"
"""What is written in a prompt where an image belongs."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is opened. Formats that run programs or lay out pages are not among them."""

MAX_PIXELS = 1 << 26
"""Pixels of an image, 67 million: decoded they take 200 MB."""

GRAY = (127, 127, 127)
"""What is left free beside a resized image."""

WHITE = (255, 255, 255, 255)
"""What transparent places show."""


# The rule


class Plan(NamedTuple):
    """What an image becomes: pixels of the resized image, patches, cells (a token each), and tokens in all."""

    height: int
    width: int
    rows: int
    columns: int
    cell_rows: int
    cell_columns: int
    tokens: int


def plan_image(width: int, height: int, config: Config) -> Plan:
    """The plan for an image of that many pixels. Raises `InputError` for less than one."""
    if width < 1 or height < 1:
        raise InputError(f"an image must have at least 1 x 1 pixels, got {width} x {height}")
    patch, ratio = config.vision_patch_size, config.vision_downsample_ratio
    rows, columns = _patches(width, height, config)
    cell_rows, cell_columns = cells(rows, columns, ratio)
    tokens = span_length(cell_rows, cell_columns)
    return Plan(rows * patch, columns * patch, rows, columns, cell_rows, cell_columns, tokens)


def _patches(width: float | int, height: float | int, config: Config) -> tuple[int, int]:
    """Rows and columns of patches."""
    patch = config.vision_patch_size
    if config.vision_max_wh_ratio is not None:
        width = min(width, height * config.vision_max_wh_ratio)
    if width * height < config.vision_min_pixels:
        growth = (config.vision_min_pixels / (width * height)) ** 0.5
        width, height = int(width * growth), int(height * growth)
    rows, columns = math.ceil(height / patch), math.ceil(width / patch)
    if span_length(*cells(rows, columns, config.vision_downsample_ratio)) > config.vision_max_n_token:
        return _reduced(width, height, config)
    return rows, columns


def _reduced(width: float | int, height: float | int, config: Config) -> tuple[int, int]:
    """The most patches in the image's own shape whose tokens are allowed.

    w columns of cells and r w rows of them, r being height over width, take r w (w + 1) + 2 tokens.
    """
    patch, ratio, most = config.vision_patch_size, config.vision_downsample_ratio, config.vision_max_n_token
    shape = height / width
    cell_columns = math.sqrt((most - 2) / shape + 0.25) - 0.5
    cell_rows = cell_columns * shape
    if cell_columns < 1:  # taller than the tokens can show: one column
        return (most - 2) // 2 * ratio, ratio
    if cell_rows < 1:  # wider: one row
        return ratio, (most - 3) * ratio
    cell = patch * ratio
    scale = min(math.floor(cell_columns) * cell / width, math.floor(cell_rows) * cell / height)
    rows, columns = math.floor(height * scale / patch), math.floor(width * scale / patch)
    return max(1, rows), max(1, columns)  # cells of one patch could leave none


# In a prompt


def place_pictures(
    text: str, pictures: Sequence[Picture], tokenizer: Tokenizer, config: Config
) -> tuple[list[int], tuple[Placed, ...]]:
    """The ids of a text after the begin id, each `PLACEHOLDER` in it become a picture's span; and where those begin."""
    pieces = text.split(PLACEHOLDER)
    ids, placed = tokenizer.encode(pieces[0]), []
    for picture, piece in zip(pictures, pieces[1:], strict=True):
        placed.append(Placed(len(ids), picture))
        ids += [config.image_token_id] * picture.tokens(config.vision_downsample_ratio)
        ids += tokenizer.encode(piece, bos=False)
    return ids, tuple(placed)


# Decoding


def read_picture(source: Source, config: Config) -> Picture:
    """A file's image as patches. Raises `InputError`."""
    return make_picture(read_image(source), config)


def make_picture(image: "Image", config: Config) -> Picture:
    """An RGB image as patches: resized by the plan, colours from -1 to 1."""
    plan = plan_image(image.width, image.height, config)
    most = config.vision_max_wh_ratio
    whole = most is not None and image.width >= most * image.height  # pressed together rather than padded
    resized = _fit(image, plan.width, plan.height, whole)
    size = config.vision_patch_size
    colours = (torch.from_numpy(np.array(resized, dtype=np.float32)) / 255 - 0.5) / 0.5  # [height, width, 3]
    grid = colours.unflatten(1, (plan.columns, size)).unflatten(0, (plan.rows, size))
    patches = grid.permute(0, 2, 4, 1, 3).flatten(0, 1)  # [patches, 3, size, size]
    return Picture(patches.to(torch.bfloat16).contiguous(), plan.rows, plan.columns)


def _fit(image: "Image", width: int, height: int, whole: bool) -> "Image":
    """The image enlarged or reduced to fit, in the middle of gray; or to fill the whole, whatever its shape."""
    pillow = _pillow()
    inner = [width, height]
    if not whole and image.width * height > image.height * width:
        inner[1] = max(1, round(image.height / image.width * width))
    elif not whole and image.width * height < image.height * width:
        inner[0] = max(1, round(image.width / image.height * height))
    resized = image.resize((inner[0], inner[1]), pillow.Resampling.BICUBIC)
    if inner == [width, height]:
        return resized
    canvas = pillow.new("RGB", (width, height), GRAY)
    canvas.paste(resized, (round((width - inner[0]) * 0.5), round((height - inner[1]) * 0.5)))
    return canvas


def read_image(source: Source) -> "Image":
    """A file's image in RGB, turned upright as its EXIF data say, on white where it is transparent.

    Of an animation the first frame is taken; values of 16 bits are rounded to 8. Raises `InputError` for a file that
    cannot be read, is no image, is broken, or has more than `MAX_PIXELS` pixels.
    """
    pillow = _pillow()
    from PIL import UnidentifiedImageError

    name = _name(source)
    try:
        with open(source, "rb") if not isinstance(source, bytes) else io.BytesIO(source) as file, _quiet():
            return _decoded(pillow, name, file)
    except InputError:
        raise
    except UnidentifiedImageError:
        raise InputError(f"{name} is no image that can be read: it must be one of {', '.join(FORMATS)}") from None
    except pillow.DecompressionBombError:
        raise InputError(f"{name} has more than {MAX_PIXELS} pixels: make it smaller") from None
    except OSError as error:
        if error.strerror:  # the file, not what is in it
            raise InputError(f"{name} cannot be read: {error.strerror}") from error
        raise InputError(f"{name} is a broken image: {_one_line(error)}") from error
    except Exception as error:  # decoders raise anything at all on a file that is made up
        raise InputError(f"{name} is a broken image: {_one_line(error)}") from error


def _name(source: Source) -> str:
    """What to call it. A pipe or a device is refused before it is opened: that could wait forever."""
    if isinstance(source, bytes):
        return "the image"
    if not isinstance(source, str | os.PathLike):
        raise InputError(f"an image is a path or the bytes of a file, got {type(source).__name__}")
    name = os.fspath(source)
    try:
        regular = stat.S_ISREG(os.stat(name).st_mode)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError:
        raise InputError(f"{name!r} is no path: it has a NUL character") from None
    if not regular:
        raise InputError(f"{name} is no plain file: give the path of an image")
    return name


def _decoded(pillow: Any, name: str, file: Any) -> "Image":
    with pillow.open(file, formats=FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise InputError(f"{name} has {width} x {height} pixels, at most {MAX_PIXELS} are read: make it smaller")
        image.load()
        turn = _turn(image)
        upright = _to_rgb(pillow, name, image)
    return upright if turn is None else upright.transpose(turn)


def _to_rgb(pillow: Any, name: str, image: "Image") -> "Image":
    if image.mode.startswith("I"):  # 16 bits, in a wider type with some versions
        values = np.asarray(image).astype(np.int64)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise InputError(f"{name} holds whole numbers beyond 16 bits: save it with 8 or 16 bits")
        return pillow.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise InputError(f"{name} holds floating-point colours of no known range: save it with 8 or 16 bits")
    if image.getbands()[-1] not in ("A", "a") and "transparency" not in image.info:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", image.size, WHITE), shown).convert("RGB")


def _turn(image: "Image") -> Any:
    """What turns the image upright, by the orientation (1 to 8) in its EXIF data. Broken data say nothing."""
    from PIL.Image import Transpose

    turns: dict[Any, Transpose] = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        return turns.get(image.getexif().get(0x0112))
    except Exception:  # the picture itself is whole
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Pillow's remarks: what is wrong with a file is either an error of ours or does not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("reading images needs Pillow: pip install 'openv41[vision]'") from error
    return Image


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
