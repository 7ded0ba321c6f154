"""A contact sheet: the pictures of a set side by side, to look at."""

import io
import math
from pathlib import Path

from PIL import Image, ImageDraw

from lydite.calibrate.disk import write_sealed
from lydite.calibrate.index import Row
from lydite.calibrate.store import CalibrationSet
from lydite.core.errors import CalibrationError, at

MOST = 400  # pictures on a sheet; of more, as many evenly spread over the set
SIDE, CAPTION = 128, 12  # pixels


def write_sheet(folder: Path | str, path: Path, most: int = MOST) -> int:
    """Write the pictures of a set into one PNG, with their numbers; how many it shows."""
    with CalibrationSet.open(folder) as opened:
        rows = _spread(list(opened.rows("picture")), most)
        if not rows:
            raise CalibrationError(f"{at(Path(folder))}: no picture in it yet.")
        columns = math.ceil(math.sqrt(len(rows)))
        lines = math.ceil(len(rows) / columns)
        sheet = Image.new("RGB", (columns * SIDE, lines * (SIDE + CAPTION)), "white")
        draw = ImageDraw.Draw(sheet)
        for place, row in enumerate(rows):
            left, top = place % columns * SIDE, place // columns * (SIDE + CAPTION)
            picture = Image.fromarray(opened.read(row)["pixels"])
            picture.thumbnail((SIDE, SIDE))
            sheet.paste(picture, (left, top + CAPTION))
            draw.text((left + 2, top), str(row.image), "black")
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    write_sealed(path, [buffer.getvalue()])
    return len(rows)


def _spread(rows: list[Row], most: int) -> list[Row]:
    if len(rows) <= most:
        return rows
    return [rows[n * len(rows) // most] for n in range(most)]
