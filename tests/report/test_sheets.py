"""Contact sheets: every picture in its place, captions that fit, misses framed."""

import io
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageColor, ImageFont

from lydite.report.contact_sheets import (
    FRAME,
    INK,
    MARK,
    PAPER,
    Pixels,
    Tile,
    contact_sheet,
    png_bytes,
    scale_to_width,
    wrap,
)


def plain(color: str, width: int = 16, height: int = 16) -> Pixels:
    return np.full((height, width, 3), ImageColor.getrgb(color), np.uint8)


def places(sheet: Image.Image, color: str) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of all pixels of one colour."""
    hits = (np.asarray(sheet) == ImageColor.getrgb(color)).all(axis=-1)
    rows, columns = hits.any(axis=1).nonzero()[0], hits.any(axis=0).nonzero()[0]
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def test_tiles_stand_in_rows_in_reading_order() -> None:
    colors = ("red", "lime", "blue", "cyan", "magenta")
    sheet = contact_sheet([Tile(plain(color), "") for color in colors], columns=3, side=64)
    boxes = [places(sheet, color) for color in colors]
    assert all(right - left == bottom - top == 64 for left, top, right, bottom in boxes)
    assert boxes[0][0] < boxes[1][0] < boxes[2][0] and boxes[3][0] == boxes[0][0]
    assert boxes[0][1] == boxes[1][1] == boxes[2][1] < boxes[3][1] == boxes[4][1]


def test_a_sheet_has_no_empty_columns() -> None:
    tiles = [Tile(plain("red"), "one"), Tile(plain("blue"), "two")]
    one, two, nine = (contact_sheet(tiles, columns=n, side=64).width for n in (1, 2, 9))
    assert one < two == nine


def test_captions_are_written_under_their_own_pictures() -> None:
    tiles = [Tile(plain("red"), "many words " * 6), Tile(plain("blue"), "")]
    sheet = contact_sheet(tiles, columns=2, side=96)
    left, _, right, bottom = places(sheet, "red")
    below = np.asarray(sheet)[bottom:]
    ink = (below != ImageColor.getrgb(PAPER)).any(axis=(0, 2)).nonzero()[0]
    assert left <= ink.min() and ink.max() < right


def test_a_longer_caption_makes_a_taller_sheet() -> None:
    short, long = (
        contact_sheet([Tile(plain("red"), text)], columns=1, side=96) for text in ["a", "b"]
    )
    assert short.size == long.size
    long = contact_sheet([Tile(plain("red"), "word " * 40)], columns=1, side=96)
    assert long.width == short.width and long.height > short.height


@pytest.mark.parametrize("long", [0, 1, 3])
@pytest.mark.parametrize("flat", [0, 1, 3])
def test_no_caption_is_covered_by_the_next_row_or_cut_off(long: int, flat: int) -> None:
    """A row has room for its tallest picture and its longest caption, whichever these are."""
    colors, caption = ("red", "lime", "blue", "cyan"), "word " * 12
    tiles = [
        Tile(plain(color, height=8 if at == flat else 16), caption if at == long else "one")
        for at, color in enumerate(colors)
    ]
    sheet = contact_sheet(tiles, columns=2, side=96)
    boxes = [places(sheet, color) for color in colors]
    left, _, right, bottom = boxes[long]
    end = min(box[1] for box in boxes[2:]) if long < 2 else sheet.height
    inked = np.asarray(sheet)[bottom:end, left:right] != ImageColor.getrgb(PAPER)
    rows = inked.any(axis=(1, 2))
    lines = len(wrap(caption, ImageFont.load_default(15), 96))
    assert lines > 3 and (np.diff(rows.astype(int)) == 1).sum() >= lines  # a gap above each
    assert not rows[-3:].any()


def test_only_marked_tiles_are_framed() -> None:
    tiles = [Tile(plain("red"), "", marked=True), Tile(plain("blue"), "")]
    sheet = contact_sheet(tiles, columns=2, side=64)
    inner = places(sheet, "red")
    grown = tuple(edge + by for edge, by in zip(inner, (-FRAME, -FRAME, FRAME, FRAME), strict=True))
    assert places(sheet, MARK) == grown
    with pytest.raises(IndexError):
        places(contact_sheet(tiles[1:], columns=2, side=64), MARK)


def test_pictures_keep_their_proportions() -> None:
    wide = Tile(plain("red", width=32, height=16), "", marked=True)
    sheet = contact_sheet([wide], columns=1, side=64)
    left, top, right, bottom = places(sheet, "red")
    assert (right - left, bottom - top) == (64, 32)
    assert places(sheet, MARK) == (left - FRAME, top - FRAME, right + FRAME, bottom + FRAME)
    for width, height, wanted in ((8, 4, (32, 64)), (64, 64, (64, 64)), (900, 1, (1, 64))):
        assert scale_to_width(plain("red", width, height), 64).shape == (*wanted, 3)


def test_captions_are_dark_on_light_and_frames_are_red() -> None:
    paper, ink, mark = (ImageColor.getrgb(color) for color in (PAPER, INK, MARK))
    assert min(paper) > 240 and max(ink) < 60 and mark[0] > 3 * max(mark[1:])
    sheet = np.asarray(contact_sheet([Tile(plain("red"), "words")], columns=1, side=64))
    below = sheet[64 + 10 :].astype(int).sum(axis=2)
    assert below.max() == sum(paper) and below.min() < 200


def test_lines_fit_and_no_letter_is_lost() -> None:
    font = ImageFont.load_default(15)
    text = "a supercalifragilisticexpialidocious ring   and a star"
    lines = wrap(text, font, 80)
    assert all(font.getlength(line) <= 80 for line in lines) and len(lines) > 3
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    for line, after in pairwise(lines):  # and each line is as full as it can be
        word = after.split()[0]
        assert font.getlength(f"{line} {word}") > 80 or font.getlength(f"{line}{word[0]}") > 80
    assert wrap("two words", font, 80) == ["two words"]
    exact: Any = font.getlength("two words")
    assert wrap("two words", font, exact) == ["two words"]
    assert wrap("two words", font, exact - 1) == ["two", "words"]
    assert wrap("", font, 80) == [] and wrap("ab", font, 1) == ["a", "b"]


@pytest.mark.parametrize(("tiles", "columns"), [([], 4), ([Tile(plain("red"), "")], 0)])
def test_an_empty_sheet_is_refused(tiles: list[Tile], columns: int) -> None:
    with pytest.raises(ValueError, match="expected at least one"):
        contact_sheet(tiles, columns=columns, side=64)


def test_png_bytes_are_the_picture() -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    for picture in (pixels, Image.fromarray(pixels)):
        with Image.open(io.BytesIO(png_bytes(picture))) as image:
            assert image.format == "PNG" and np.array_equal(np.asarray(image), pixels)
