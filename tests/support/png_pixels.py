"""Pictures of a page, read back from its PNGs."""

import io

import numpy as np
from PIL import Image

from lydite.pipelines.picture import Pixels


def png_pixels(png: bytes) -> Pixels:
    """The colours of a PNG, also of one with a palette."""
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))
