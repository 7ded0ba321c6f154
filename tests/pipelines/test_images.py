"""Pixels from files of all kinds."""

from pathlib import Path

import numpy as np
from PIL import Image

from lydite.pipelines.picture import read_pixels


def test_a_photo_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held upright
    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.jpg", exif=exif)
    assert read_pixels(tmp_path / "a.jpg").shape == (40, 24, 3)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    ramp = np.array([[0, 257 * 100, 65535]], np.uint16)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    assert read_pixels(tmp_path / "a.png")[0, :, 0].tolist() == [0, 100, 255]


def test_transparency_and_grey_become_rgb(tmp_path: Path) -> None:
    for mode in ("RGBA", "L", "P", "1"):
        Image.new(mode, (4, 6)).save(tmp_path / "a.png")
        assert read_pixels(tmp_path / "a.png").shape == (6, 4, 3)
