"""Images: the rule for any size, and files of every kind, broken ones among them."""

import io
import math
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from openv41.config import Config
from openv41.errors import InputError
from openv41.inputs import image as images
from openv41.inputs.image import make_picture, place_pictures, plan_image, read_image, read_picture
from openv41.inputs.tokenizer import Tokenizer
from openv41.state import Picture
from openv41.weights.tiny import SPECIAL, train_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
RELEASED = Config.released()
SMALL = RELEASED.replace(vision_max_n_token=20, vision_min_pixels=4900)


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def scene(width: int, height: int) -> Image.Image:
    """Colours that tell every corner apart."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack((x, y, 255 - x), 2).astype(np.uint8))


def colours(image: Image.Image) -> np.ndarray:
    return np.asarray(image, dtype=np.int64)


# The rule


@given(st.integers(1, 60_000), st.integers(1, 60_000), st.sampled_from([None, 1, 4, 2.5]), st.sampled_from([1, 2, 3]))
@example(1, 2**40, None, 3)
@example(2**40, 1, None, 3)
@example(7, 3000, None, 1)
def test_any_size_takes_at_most_the_tokens_allowed(width: int, height: int, most: float | None, ratio: int) -> None:
    config = RELEASED.replace(vision_max_wh_ratio=most, vision_downsample_ratio=ratio)
    plan = plan_image(width, height, config)
    assert plan.rows >= 1 and plan.columns >= 1 and plan.tokens <= config.vision_max_n_token
    assert (plan.height, plan.width) == (plan.rows * 14, plan.columns * 14)
    assert (plan.cell_rows, plan.cell_columns) == (math.ceil(plan.rows / ratio), math.ceil(plan.columns / ratio))
    assert plan.tokens == plan.cell_rows * (plan.cell_columns + 1) + 2


@given(st.integers(500, 4000), st.integers(500, 4000))
def test_the_shape_is_kept_to_a_patch(width: int, height: int) -> None:
    plan = plan_image(width, height, RELEASED)
    assert (plan.rows - 1) / (plan.columns + 1) <= height / width <= (plan.rows + 1) / (plan.columns - 1)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_no_pixels_no_plan(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="at least 1 x 1 pixels"):
        plan_image(*size, RELEASED)


def test_the_rule_needs_no_pillow() -> None:
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from openv41.config import Config; from openv41.errors import InputError\n"
        "from openv41.inputs.image import plan_image, read_image\n"
        "assert plan_image(640, 480, Config.released()).tokens == 206\n"
        "try: read_image(b'')\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "reading images needs Pillow: pip install 'openv41[vision]'\n"


# Patches


@pytest.mark.parametrize("size", [(90, 60), (60, 90), (98, 70), (1, 1), (300, 2), (2, 300)])
def test_patches_are_the_padded_image_in_reading_order(size: tuple[int, int]) -> None:
    picture, plan = make_picture(scene(*size), SMALL), plan_image(*size, SMALL)
    assert picture.grid == (plan.rows, plan.columns) and picture.patches.dtype == torch.bfloat16
    padded = colours(ImageOps.pad(scene(*size), (plan.width, plan.height), color=(127, 127, 127)))
    for place, patch in enumerate(picture.patches.float().unbind()):
        row, column = divmod(place, plan.columns)
        wanted = torch.from_numpy(padded[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]).permute(2, 0, 1)
        torch.testing.assert_close(patch, wanted.float() / 127.5 - 1, rtol=0, atol=2**-8)


def test_an_image_thinner_than_a_pixel_still_shows() -> None:
    picture = make_picture(Image.new("RGB", (9000, 1), (255, 0, 0)), SMALL)
    assert bool((picture.patches[:, 0] > 0.9).any())


def test_a_shape_beyond_the_ratio_is_pressed_together() -> None:
    config = SMALL.replace(vision_max_wh_ratio=2)
    picture = make_picture(Image.new("RGB", (400, 50), (255, 255, 255)), config)
    assert bool((picture.patches == 1).all())  # no gray beside it
    assert picture.grid == make_picture(Image.new("RGB", (100, 50)), config).grid


# Files


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG"])
def test_every_format_is_read(kind: str) -> None:
    near = 60 if kind in ("JPEG", "WEBP", "GIF") else 0
    image = read_image(file_of(scene(40, 30), kind))
    assert (image.mode, image.size) == ("RGB", (40, 30))
    assert np.abs(colours(image) - colours(scene(40, 30))).max() <= near


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "RGB"])
def test_every_mode_is_read(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    source = scene(40, 30).convert(mode)
    assert colours(read_image(file_of(source, kind))).tolist() == colours(source.convert("RGB")).tolist()


def test_16_bits_are_rounded_to_8() -> None:
    values = np.array([[0, 257, 32768, 65535, 128, 129]], np.uint16)
    shown = colours(read_image(file_of(Image.fromarray(values))))
    assert shown[0, :, 0].tolist() == [0, 1, 128, 255, 0, 1] and (shown[..., 0] == shown[..., 2]).all()
    wide = colours(read_image(file_of(Image.fromarray(values.astype(np.int32)), "TIFF")))
    assert (wide == shown).all()


def test_transparent_places_show_white() -> None:
    pixels = np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 51]]], np.uint8)
    assert colours(read_image(file_of(Image.fromarray(pixels)))).tolist() == [[[10, 20, 30], [255] * 3, [204] * 3]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    assert colours(read_image(file_of(palette, transparency=1))).tolist() == [[[10, 20, 30], [255] * 3]]
    gray = Image.fromarray(np.array([[[7, 255], [7, 0]]], np.uint8), "LA")
    assert colours(read_image(file_of(gray))).tolist() == [[[7] * 3, [255] * 3]]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    data = file_of(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )
    assert np.abs(colours(read_image(data)) - [255, 0, 0]).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_exif_turns_the_image_upright(orientation: int, kind: str) -> None:
    upright = scene(40, 24)
    back = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]  # what a camera held so would have stored
    stored = upright if back is None else upright.transpose(Image.Transpose(back))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    image = read_image(file_of(stored, kind, exif=exif, **options))
    assert image.size == (40, 24) and (colours(image) == colours(upright)).all()
    assert make_picture(image, SMALL).grid == make_picture(upright, SMALL).grid


def test_broken_exif_says_nothing() -> None:
    data = file_of(scene(40, 24), "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01" * 7)
    assert read_image(data).size == (40, 24)


# What is refused: one clear error


def test_a_path_names_itself_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "note.png").write_text("no image")
    for name, reason in (
        ("none.png", "No such file"),
        (".", "no plain file"),
        ("note.png", "no image that can be read"),
    ):
        with pytest.raises(InputError, match=f"{name}.*{reason}") as caught:
            read_image(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_file_is_one_error(kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    data = file_of(Image.fromarray(noise), kind)
    for length in (0, 1, 10, len(data) // 4, len(data) // 2, len(data) * 9 // 10):
        try:
            image = read_image(data[:length])
        except InputError as error:
            assert "\n" not in str(error)
        else:  # the decoder may have all pixels before a GIF's end
            assert image.size == (60, 50) and kind == "GIF" and length > len(data) // 2


@given(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]), st.data())
def test_a_file_with_changed_bytes_is_an_image_or_one_error(kind: str, data: st.DataObject) -> None:
    broken = bytearray(file_of(scene(12, 9), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert read_image(bytes(broken)).mode == "RGB"
    except InputError as error:
        assert "\n" not in str(error)


def png_of(width: int, height: int) -> bytes:
    """A few bytes that say they are a large picture."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(8193, 8192), (10_000, 10_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1)])
def test_a_bomb_is_refused_before_it_is_decoded(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(InputError, match="make it smaller"):
        read_image(png_of(*size))


def test_the_largest_size_allowed_is_tried() -> None:
    assert images.MAX_PIXELS == 8192 * 8192
    with pytest.raises(InputError, match="broken image"):  # its pixels are missing
        read_image(png_of(8192, 8192))


@pytest.mark.parametrize("data", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"%PDF-1.4\n", b"<svg/>"])
def test_formats_that_run_programs_are_not_opened(data: bytes) -> None:
    with pytest.raises(InputError, match="it must be one of PNG, JPEG"):
        read_image(data)


def test_floating_point_colours_are_refused() -> None:
    with pytest.raises(InputError, match="no known range"):
        read_image(file_of(Image.new("F", (4, 4)), "TIFF"))


# In a prompt


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(Config.tiny().vocab_size), SPECIAL)


def test_placeholders_become_spans(tokenizer: Tokenizer) -> None:
    config = Config.tiny()
    one, other = (read_picture(file_of(scene(*size)), config) for size in ((90, 60), (30, 200)))
    ids, placed = place_pictures("What is <image><image> here?", [one, other], tokenizer, config)
    before, after = tokenizer.encode("What is "), tokenizer.encode(" here?", bos=False)
    counts = [each.tokens(config.vision_downsample_ratio) for each in (one, other)]
    assert ids == [*before, *[config.image_token_id] * sum(counts), *after]
    assert [each.start for each in placed] == [len(before), len(before) + counts[0]]
    assert [each.picture for each in placed] == [one, other]


def test_without_pictures_a_text_is_a_text(tokenizer: Tokenizer) -> None:
    assert place_pictures("plain", [], tokenizer, Config.tiny()) == (tokenizer.encode("plain"), ())


def test_types_tell_the_tokens_of_a_span_apart() -> None:
    picture: Callable[..., Picture] = lambda r, c: Picture(torch.zeros(r * c, 3, 14, 14), r, c)  # noqa: E731
    assert picture(4, 7).types(3).tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    assert picture(1, 1).types(3).tolist() == [0, 1, 2, 3]


# The page


def test_the_page_tells_the_rule() -> None:
    page = (ROOT / "docs" / "vision.md").read_text()
    rows = re.findall(r"\| ([\d,]+) x ([\d,]+) \| (\d+) x ([\d,]+) \| (\d+) x (\d+) \| ([\d,]+) \|", page)
    assert len(rows) == 5
    for row in rows:
        width, height, columns, lines, cell_columns, cell_rows, tokens = (int(cell.replace(",", "")) for cell in row)
        plan = plan_image(width, height, RELEASED)
        assert (plan.columns, plan.rows) == (columns, lines)
        assert (plan.cell_columns, plan.cell_rows, plan.tokens) == (cell_columns, cell_rows, tokens)
    assert f"{images.MAX_PIXELS:,}" in page


def test_the_pages_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "draw_vision.py"), str(tmp_path)], check=True)
    for name in ("scene.png", "vision.png"):
        drawn, kept = read_image(tmp_path / name), read_image(ROOT / "docs" / name)
        assert drawn.size == kept.size
        assert np.abs(colours(drawn) - colours(kept)).mean() < 2  # letters may differ with another Pillow


def test_what_is_no_file_at_all(tmp_path: Path) -> None:
    """Each is refused before it is opened: a pipe would wait for its writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused = {pipe: "no plain file", tmp_path: "no plain file", "a\0b": "NUL", tmp_path / "none": "cannot be read"}
    for source, words in refused.items():
        with pytest.raises(InputError, match=words):
            read_image(source)


def test_numbers_beyond_16_bits(tmp_path: Path) -> None:
    path = tmp_path / "wide.tif"
    Image.fromarray(np.array([[70_000, 5]], dtype=np.int32)).save(path)
    with pytest.raises(InputError, match="beyond 16 bits"):
        read_image(path)
