"""Pixels from files, and at another size."""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from lydite.core.errors import FileError, InputError, shown
from lydite.core.files import atomic_path

Pixels = NDArray[np.uint8]  # (H, W, 3)
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}  # we write


def check_format(path: Path) -> str:
    """The format that the ending of a name means, or InputError."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(
            f"{shown(str(path))}: pictures are PNG, JPEG or WebP; end the name in "
            f"{', '.join(FORMATS)}."
        )
    return FORMATS[path.suffix.lower()]


def open_image(path: Path) -> Image.Image:
    """A decoded image file, or FileError."""
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except FileNotFoundError as error:
        raise FileError(f"{path}: no such file.") from error
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
        raise FileError(f"{path}: cannot be read as an image ({error}).") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise FileError(f"{path}: {error}") from error


def read_pixels(path: Path) -> Pixels:
    """An image file as (H, W, 3), turned as its EXIF says; transparency is dropped."""
    image = ImageOps.exif_transpose(open_image(path))
    if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip at 255
        image = Image.fromarray((np.asarray(image, np.int64) // 257).clip(0, 255).astype(np.uint8))
    return np.asarray(image.convert("RGB"))


def resize(pixels: Pixels, width: int, height: int) -> Pixels:
    """Lanczos, as diffusers resizes the input of img2img."""
    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def pixel_hash(pixels: Pixels) -> str:
    """A hash of the pixels themselves, whatever file they came from."""
    return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()


def save_pixels(path: Path, pixels: Pixels | Image.Image, *, replace: bool = True) -> None:
    """Write a picture without metadata."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    with atomic_path(path, replace=replace) as temporary:
        image.save(temporary, format=check_format(path), optimize=True)
