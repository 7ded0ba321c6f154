"""Pixels from files of all kinds, and masks."""

import os
import zlib
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from lydite.core.errors import FileError
from lydite.pipelines.inpainting import (
    Inpainting,
    fit_mask,
    hide,
    latent_mask,
    mask_channels,
    overlay,
    read_mask,
)
from lydite.pipelines.picture import describe_file, opened_image, read_pixels, read_record
from lydite.sampling.denoiser import find_prediction


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_and_a_mask_are_turned_as_their_exif_says(
    orientation: int, ending: str, tmp_path: Path
) -> None:
    """Pixels, mask and the size that is told without them: 5 to 8 lie on their side."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{ending}"
    Image.new("RGB", (40, 24), "red").save(path, exif=exif)
    width, height = (24, 40) if orientation >= 5 else (40, 24)
    assert read_pixels(path).shape == (height, width, 3)
    assert read_mask(path).shape == (height, width)
    assert describe_file(path) == ((width, height), False)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    ramp = np.array([[0, 257 * 100, 257 * 200 - 1, 65535]], np.uint16)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    assert read_pixels(tmp_path / "a.png")[0, :, 0].tolist() == [0, 100, 199, 255]


def test_transparency_and_grey_become_rgb(tmp_path: Path) -> None:
    for mode in ("RGBA", "L", "P", "1"):
        Image.new(mode, (4, 6)).save(tmp_path / "a.png")
        assert read_pixels(tmp_path / "a.png").shape == (6, 4, 3)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n"


def test_no_other_program_is_started_for_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow goes by content, and hands PostScript to Ghostscript."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "photo.png").write_bytes(EPS)
    for read in (read_pixels, read_record):
        with pytest.raises(FileError, match="cannot be read as an image"):
            read(tmp_path / "photo.png")
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("size", [(13_000, 13_000), (1, 10**6), (10**6, 1)])
@pytest.mark.parametrize("mode", ["L", "I;16", "RGB"])
def test_size_is_checked_before_pixels_are_decoded(
    tmp_path: Path, mode: str, size: tuple[int, int]
) -> None:
    depth = {"L": (8, 0), "I;16": (16, 0), "RGB": (8, 2)}[mode]
    header = b"".join(side.to_bytes(4, "big") for side in size) + bytes([*depth, 0, 0, 0])
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
        for kind, body in chunks
    )
    (tmp_path / "bomb.png").write_bytes(data)
    with pytest.raises(FileError, match=r"too many|Bomb"):
        read_pixels(tmp_path / "bomb.png")


@pytest.mark.parametrize(
    ("size", "fits"),
    [((8192, 8192), True), ((8192, 8193), False), ((2**16, 1), True), ((1, 2**16 + 1), False)],
)
def test_the_largest_picture_that_is_read(
    size: tuple[int, int], fits: bool, tmp_path: Path
) -> None:
    path = tmp_path / "large.png"
    Image.new("1", size).save(path, compress_level=1)
    expected = nullcontext() if fits else pytest.raises(FileError, match="too many")
    with expected, opened_image(path) as image:
        assert image.size == size


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for read in (read_pixels, read_record):
        with pytest.raises(FileError, match="not a file"):
            read(tmp_path / "pipe.png")


def test_a_mask_gets_the_size_of_the_picture_and_a_soft_edge() -> None:
    mask = np.zeros((8, 16), np.uint8)
    mask[:, 8:] = 255
    assert np.array_equal(fit_mask(mask, 16, 8, 0), mask)
    assert fit_mask(mask, 32, 24, 0).shape == (24, 32)
    soft = fit_mask(mask, 16, 8, 2)
    assert 0 < soft[4, 6] < soft[4, 8] < 255 and soft[4, 0] == 0
    assert soft[4, 7] > fit_mask(mask, 16, 8, 1)[4, 6]


def test_a_mask_is_resized_as_diffusers_resizes_it() -> None:
    mask = np.random.default_rng(0).integers(0, 256, (12, 8), dtype=np.uint8)
    expected = Image.fromarray(mask).resize((5, 7), Image.Resampling.LANCZOS)
    assert np.array_equal(fit_mask(mask, 5, 7, 0), np.asarray(expected))


def test_what_is_hidden_and_what_stays() -> None:
    image = np.full((2, 3, 3), 255, np.uint8)
    image[0] = 0
    mask = np.array([[0, 127, 128], [0, 255, 255]], np.uint8)
    shown = hide(image, mask)
    assert shown[:, :, 0].tolist() == [[-1, -1, 0], [1, 0, 0]]
    new = np.full_like(image, 100)
    assert overlay(new, image, mask)[:, :, 0].tolist()[1] == [255, 100, 100]
    latents = np.array(latent_mask(np.repeat(np.repeat(mask, 4, 0), 4, 1), 4))
    assert latents[0, :, :, 0].tolist() == [[0, 0, 1], [0, 1, 1]] and latents.shape == (1, 2, 3, 1)
    rest = mx.ones((2, 2, 3, 5))
    channels = np.array(mask_channels(np.repeat(np.repeat(mask, 4, 0), 4, 1), rest, 4))
    assert channels.shape == (2, 2, 3, 6) and np.array_equal(
        channels[1, :, :, 0], latents[0, :, :, 0]
    )
    assert (channels[..., 1:] == 1).all()


def test_outside_of_the_mask_are_the_latents_of_the_picture() -> None:
    prediction = find_prediction("flow")
    mask = mx.array([[[[1.0], [0.0]]]])
    x, clean, noise = (mx.full((1, 1, 2, 1), value) for value in (5.0, 2.0, 4.0))
    step = Inpainting(mask, prediction, clean, noise)
    assert np.array(step.blend(x, 0.25)).ravel().tolist() == [5.0, 0.75 * 2 + 0.25 * 4]
    assert np.array(step.finish(x, 3.0)).ravel().tolist() == [5.0, 6.0]
    shown = Inpainting(mask, prediction)  # a network that is shown the rest replaces nothing
    assert shown.blend(x, 0.25) is x and shown.finish(x, 3.0) is x
