"""Contact sheets: pictures in rows, a caption under each, as one image."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]  # (H, W, 3)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont  # the second without FreeType

PAPER, INK, MARK = "#faf9f7", "#26241f", "#c8372d"
FRAME = 4  # pixels of the frame around a marked tile


@dataclass(frozen=True)
class Tile:
    """A picture, its caption, and whether it is framed in red."""

    pixels: Pixels
    caption: str
    marked: bool = False


def contact_sheet(tiles: Sequence[Tile], *, columns: int, side: int, text: int = 15) -> Image.Image:
    """Tiles `side` pixels wide with captions of `text` pixels; each row as tall as it needs."""
    if not tiles or columns < 1:
        raise ValueError(f"{len(tiles)} tiles in {columns} columns; expected at least one of each.")
    columns = min(columns, len(tiles))
    font = ImageFont.load_default(text)
    gap, line = max(side // 10, 2 * FRAME), round(1.3 * text)
    captions = [wrap(tile.caption, font, side) for tile in tiles]
    rows = [
        range(first, min(first + columns, len(tiles))) for first in range(0, len(tiles), columns)
    ]
    pictures = [Image.fromarray(scale_to_width(tile.pixels, side)) for tile in tiles]
    heights = [
        max(pictures[i].height for i in row) + gap // 2 + line * max(len(captions[i]) for i in row)
        for row in rows
    ]
    size = (gap + columns * (side + gap), gap + sum(height + gap for height in heights))
    sheet = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(sheet)
    top = gap
    for row, height in zip(rows, heights, strict=True):
        for column, index in enumerate(row):
            left = gap + column * (side + gap)
            picture = pictures[index]
            if tiles[index].marked:
                box = (left, top, left + side, top + picture.height)
                pen.rectangle(_grown(box, FRAME), fill=MARK)
            sheet.paste(picture, (left, top))
            for number, words in enumerate(captions[index]):
                below = top + picture.height + gap // 2 + number * line
                pen.text((left, below), words, fill=INK, font=font)
        top += height + gap
    return sheet


def wrap(caption: str, font: Font, width: int) -> list[str]:
    """Lines no wider than `width`; a word that alone is wider is cut."""
    lines: list[str] = []
    for word in caption.split():
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width:
            lines[-1] = joined
            continue
        while len(word) > 1 and font.getlength(word) > width:
            cut = next(
                n for n in range(len(word), 0, -1) if n == 1 or font.getlength(word[:n]) <= width
            )
            lines.append(word[:cut])
            word = word[cut:]
        lines.append(word)
    return lines


def png_bytes(picture: Image.Image | Pixels) -> bytes:
    """A picture as a PNG file in memory."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def scale_to_width(pixels: Pixels, width: int) -> Pixels:
    """The picture `width` pixels wide, in its proportions."""
    image = Image.fromarray(pixels)
    height = max(1, round(image.height * width / image.width))
    return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS))


def _grown(box: tuple[int, int, int, int], by: int) -> tuple[int, int, int, int]:
    left, top, right, bottom = box
    return left - by, top - by, right + by - 1, bottom + by - 1
