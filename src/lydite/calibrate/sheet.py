"""A contact sheet: the pictures of a set side by side, to look at."""

import io
import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from lydite.calibrate.outputs import check_output, mark_png, png_kind
from lydite.calibrate.store.files import make_folder, write_sealed
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.errors import CalibrationError, at

MOST = 400  # pictures on a sheet; of more, as many evenly spread over the set
SIDE, GAP = 128, 14  # pixels
TEXT, LINE, LINES = 11, 14, 2  # the size of letters, the height of a line, lines under a picture
LONGEST = 80  # characters of a prompt that are looked at
ACROSS, DOWN = SIDE + GAP, SIDE + LINES * LINE + GAP  # from one picture to the next
PAPER, INK = "#dedbd3", "#26241f"  # a white picture has an edge on this paper
KIND = png_kind("contact sheet")
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont  # the second without FreeType


def check_sheet(path: Path) -> None:
    """Refuse a name that is taken by something else, before the pictures are read."""
    check_output(path, KIND)


def write_sheet(folder: Path | str, path: Path, most: int = MOST) -> int:
    """Write the pictures of a set into one PNG, with numbers and prompts; how many it shows."""
    check_sheet(path)
    with CalibrationSet.open(folder) as opened:
        rows = _spread(list(opened.rows("picture")), most)
        if not rows:
            raise CalibrationError(f"{at(Path(folder))}: no picture in it yet.")
        columns = math.ceil(math.sqrt(len(rows)))
        lines = math.ceil(len(rows) / columns)
        sheet = Image.new("RGB", (GAP + columns * ACROSS, GAP + lines * DOWN), PAPER)
        draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
        for place, row in enumerate(rows):
            left, top = GAP + place % columns * ACROSS, GAP + place // columns * DOWN
            picture = Image.fromarray(opened.read(row)["pixels"])
            picture.thumbnail((SIDE, SIDE))
            sheet.paste(picture, (left, top))
            below = top + picture.height + 2
            for number, words in enumerate(caption(f"{row.image}: {row.entry.prompt}", font)):
                draw.text((left, below + number * LINE), words, INK, font)
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    make_folder(path.parent)
    write_sealed(path, [mark_png(buffer.getvalue(), KIND)])
    return len(rows)


def caption(text: str, font: Font) -> list[str]:
    """The beginning of a text, in a few lines as wide as a picture."""
    words, lines = text[:LONGEST].split(), list[str]()
    while words and len(lines) < LINES:
        count = len(words)
        while count > 1 and font.getlength(" ".join(words[:count])) > SIDE:
            count -= 1
        lines.append(" ".join(words[:count]))
        words = words[count:]
    if words or len(text) > LONGEST:
        lines[-1] += " …"
    return [_cut(line, font) for line in lines]


def _cut(line: str, font: Font) -> str:
    whole = line
    while len(line) > 1 and font.getlength(line if line == whole else f"{line}…") > SIDE:
        line = line[:-1]
    return line if line == whole else f"{line}…"


def _spread(rows: list[Row], most: int) -> list[Row]:
    if len(rows) <= most:
        return rows
    return [rows[n * len(rows) // most] for n in range(most)]
