"""The npz layout of other tools: paths of its files, and readers that trust none of them.

`samples/IIII_SSS.npz` holds one step of one image, `images/IIII.png` its picture, and
`conditioning/IIII_conditioning.npz` what the text encoders made of its prompt.
"""

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pictures

from lydite.core.errors import CalibrationError, FileError, at, shown
from lydite.core.files import open_regular
from lydite.pipelines.picture import read_pixels

MAX_BYTES = 2**30  # of one sample, unpacked
LABELS = ("timestep", "sigma", "image_id")
MANIFEST = "manifest.json"
FOLDERS = SAMPLES, PICTURES, CONDITIONING = "samples", "images", "conditioning"
EXAMPLE = f"{SAMPLES}/0001_004.npz (image 1, step 4)"
_SAMPLE = re.compile(r"(\d{4,})_(\d{3,})\.npz")


def sample_path(root: Path, number: int, step: int) -> Path:
    """Where one step of an image lies."""
    return root / SAMPLES / f"{number:04}_{step:03}.npz"


def picture_path(root: Path, number: int) -> Path:
    """Where a finished picture lies."""
    return root / PICTURES / f"{number:04}.png"


def conditioning_path(root: Path, number: int) -> Path:
    """Where the conditioning of the prompt lies that this image has first."""
    return root / CONDITIONING / f"{number:04}_conditioning.npz"


def samples_in(source: Path) -> dict[int, dict[int, Path]]:
    """The file of each step of each image; an npz file of another name is an error."""
    folder = source / SAMPLES
    if not folder.is_dir():
        raise CalibrationError(f"{at(source)}: no folder {SAMPLES}/ in it.")
    files: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.glob("*.npz")):
        match = _SAMPLE.fullmatch(path.name)
        if match is None or not path.is_file():
            raise CalibrationError(f"{at(path)}: expected a file named as {EXAMPLE}.")
        steps, step = files.setdefault(int(match[1]), {}), int(match[2])
        if step in steps:
            raise CalibrationError(f"{at(path)}: the same image and step as {steps[step].name}.")
        steps[step] = path
    if not files:
        raise CalibrationError(f"{at(source)}: no samples in it. Expected files as {EXAMPLE}.")
    return files


def npz_bytes(arrays: dict[str, NDArray[Any]]) -> bytes:
    """Arrays as `np.savez` writes them: stored, one .npy a name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, array in arrays.items():
            with packed.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return buffer.getvalue()


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file: no pickle, and no more than MAX_BYTES."""
    try:
        with open_regular(path) as file:
            with zipfile.ZipFile(file) as packed:
                size = sum(member.file_size for member in packed.infolist())
            if size > MAX_BYTES:
                raise CalibrationError(f"{size} bytes unpacked, limit {MAX_BYTES}.")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return {name: np.asarray(arrays[name]) for name in arrays.files}
    except CalibrationError:
        raise
    except Exception as error:  # of zipfile and NumPy, which raise anything for damaged files
        raise CalibrationError(f"not a readable npz file ({error}).") from error


def read_label(name: str, value: NDArray[Any] | None) -> float | None:
    """The one number of a label; None when the file does not have it."""
    if value is None:
        return None
    if value.size != 1 or value.dtype.kind not in "iuf" or not np.isfinite(value).all():
        raise CalibrationError(f"expected one number as {name}, found {shown(value)}.")
    return float(value.item())


def png_bytes(pixels: NDArray[Any]) -> bytes:
    """A picture as a PNG file."""
    buffer = io.BytesIO()
    Pictures.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def read_picture(path: Path) -> NDArray[Any]:
    """The pixels of a PNG."""
    try:
        return read_pixels(path, ("PNG",))
    except FileError as error:
        raise CalibrationError(f"not a readable PNG ({error})") from error
