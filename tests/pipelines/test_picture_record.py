"""Records in PNG files, good and hostile."""

import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from PIL.JpegImagePlugin import get_sampling

from lydite.core.errors import FileError
from lydite.core.request import Request
from lydite.pipelines.picture import (
    Record,
    pixel_hash,
    read_pixels,
    read_record,
    resize,
    write_picture,
)

RECORD = Record(
    request=Request(
        'a "fox"\nin snow, 狐',
        steps=4,
        guidance=1.25,
        guidance_steps=(1.25, 1.0, 1.0, 1.0),
        width=8,
        height=8,
        sampler="ddim",
        options={"eta": 0.5},
        schedule="flow_shift",
        text_length=77,
    ),
    seed=2**63,
    model="m",
    model_hash="ab" * 32,
    dtype="float32",
)


@pytest.mark.parametrize("ending", ["png", "webp", "jpg"])
def test_a_record_survives_the_file(tmp_path: Path, ending: str) -> None:
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    path = tmp_path / f"a.{ending}"
    write_picture(path, pixels, RECORD, overwrite=False)
    assert read_record(path) == RECORD
    if ending != "jpg":
        assert np.array_equal(read_pixels(path), pixels)


def test_every_field_of_a_record_is_written() -> None:
    own = {name: f"a {name}" for name in Record.__struct_fields__ if name != "request"}
    own |= {
        "seed": 7,
        "bits": 4,
        "tile": 512,
        "loras": (("a", 0.5),),
        "embeddings": (("b", "word"),),
    }
    record = Record(request=RECORD.request, **own)  # pyright: ignore[reportArgumentType]
    assert {name: getattr(Record.from_json(record.to_json()), name) for name in own} == own


@pytest.mark.parametrize("ending", ["png", "webp", "jpg"])
def test_other_tools_find_the_settings_where_a1111_writes_them(tmp_path: Path, ending: str) -> None:
    """PNG: the text `parameters`. Else the EXIF comment, UNICODE and UTF-16 from the high byte."""
    path = tmp_path / f"a.{ending}"
    write_picture(path, np.zeros((8, 8, 3), np.uint8), RECORD, overwrite=False)
    with Image.open(path) as image:
        text = image.info.get("parameters")
        if ending != "png":
            comment = image.getexif().get_ifd(0x8769)[0x9286]
            assert comment[:8] == b"UNICODE\0"
            text = comment[8:].decode("utf-16-be")
    assert text == RECORD.a1111()


def test_a_jpeg_is_fine_and_has_a_colour_for_each_pixel(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    write_picture(tmp_path / "a.jpg", pixels, RECORD, overwrite=False)
    Image.fromarray(pixels).save(tmp_path / "b.jpg", quality=95, subsampling="4:4:4")
    with Image.open(tmp_path / "a.jpg") as ours, Image.open(tmp_path / "b.jpg") as theirs:
        assert getattr(ours, "quantization") == getattr(theirs, "quantization")  # noqa: B009
        assert get_sampling(ours) == get_sampling(theirs) == 0


def test_a_record_may_stand_behind_the_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_picture(path, np.zeros((8, 8, 3), np.uint8), RECORD, overwrite=False)
    data, chunks, at = path.read_bytes(), list[bytes](), 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        chunks.append(data[at:end])
        at = end
    chunks.sort(key=lambda chunk: (b"IHDR", b"IDAT", b"iTXt", b"IEND").index(chunk[4:8]))
    path.write_bytes(data[:8] + b"".join(chunks))
    assert read_record(path) == RECORD


def test_the_text_of_a1111() -> None:
    request = Request(
        "a fox", negative="fog, rain", steps=9, guidance=3.5, width=64, height=32,
        sampler="dpmpp_2m", schedule="karras", strength=0.25,
    )  # fmt: skip
    record = msgspec.structs.replace(RECORD, request=request, seed=7, model="x/a,b.safetensors")
    first, second, facts = record.a1111().split("\n")
    assert (first, second) == ("a fox", "Negative prompt: fog, rain")
    assert dict(fact.split(": ") for fact in facts.split(", ")) == {
        "Steps": "9", "Sampler": "DPM++ 2M", "Schedule type": "karras", "CFG scale": "3.5",
        "Seed": "7", "Size": "64x32", "Model hash": "ababababab", "Model": "a_b",
        "Denoising strength": "0.25", "Version": f"lydite {record.version}",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seed": "x"}', "{" * 5000, '{"model": NaN}'])
def test_damaged_metadata_is_one_error(tmp_path: Path, text: str) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("lydite", text)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", pnginfo=info)
    with pytest.raises(FileError, match=r"a\.png") as caught:
        read_record(tmp_path / "a.png")
    assert "\n" not in str(caught.value)


def test_broken_image_files_are_one_error(tmp_path: Path) -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    write_picture(tmp_path / "whole.png", pixels, RECORD, overwrite=False)
    whole = (tmp_path / "whole.png").read_bytes()
    header = b"IHDR" + struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    bomb = whole[:8] + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    for name, data in {"empty": b"", "text": b"hello", "cut": whole[:60], "bomb": bomb}.items():
        path = tmp_path / f"{name}.png"
        path.write_bytes(data)
        for read in (read_record, read_pixels):
            with pytest.raises(FileError, match=name):
                read(path)


def test_resizing_to_the_same_size_is_no_resizing() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (8, 6, 3), dtype=np.uint8)
    assert resize(pixels, 6, 8) is pixels
    assert resize(pixels, 12, 4).shape == (4, 12, 3)


def test_a1111_text_names_the_strength_only_for_img2img() -> None:
    assert "Denoising" not in RECORD.a1111()
    img2img = RECORD.request.replace(strength=0.5)
    assert "Denoising strength: 0.5" in msgspec.structs.replace(RECORD, request=img2img).a1111()


def test_the_hash_of_pixels_knows_their_size() -> None:
    pixels = np.arange(48, dtype=np.uint8)
    shapes = ((4, 4, 3), (2, 8, 3), (8, 2, 3), (6, 8))
    assert len({pixel_hash(pixels.reshape(shape)) for shape in shapes}) == len(shapes)
    assert pixel_hash(pixels) != pixel_hash(pixels[::-1])
