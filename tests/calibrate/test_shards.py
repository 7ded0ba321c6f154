"""A shard describes and proves itself, and any safetensors reader opens it."""

import dataclasses
import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from lydite.calibrate.settings import Description, Dtype
from lydite.calibrate.store.shards import (
    ItemBuilder,
    Shard,
    read_shard_header,
    shard_header,
    shard_name,
    write_shard,
)
from lydite.core.errors import CalibrationError, FileError
from support.calibration import SETTINGS, items, latent, pixels, plan

MAKE = ItemBuilder(Description(SETTINGS, plan(2)))


def maker(dtype: Dtype) -> ItemBuilder:
    return ItemBuilder(Description(msgspec.structs.replace(SETTINGS, dtype=dtype), plan(2)))


def test_the_safetensors_package_reads_a_shard(tmp_path: Path) -> None:
    name, size = write_shard(tmp_path, SETTINGS, items(MAKE, 1))
    assert (tmp_path / name).stat().st_size == size
    with safe_open(tmp_path / name, "np") as file:
        metadata = file.metadata()
        entries = json.loads(metadata["entries"])
        number = next(n for n, entry in enumerate(entries) if entry["kind"] == "picture")
        np.testing.assert_array_equal(file.get_tensor(f"{number:04}/pixels"), pixels(1))
    assert (metadata["format"], metadata["version"]) == ("lydite-calibration", "1")
    assert json.loads(metadata["settings"])["model_hash"] == "f00d"
    first = next(entry for entry in entries if entry.get("step") == 4)
    assert (first["prompt"], first["seed"], first["image"]) == ("a drawing of 1 cats", 1, 1)
    data = latent(1, 4).astype(ml_dtypes.bfloat16).tobytes()
    assert first["tensors"]["x"]["sha256"] == hashlib.sha256(data).hexdigest()


def test_the_name_follows_from_the_content_alone(tmp_path: Path) -> None:
    made = items(MAKE, 0)
    one, _ = write_shard(tmp_path, SETTINGS, made)
    other, _ = write_shard(tmp_path, SETTINGS, made[::-1])
    assert one == other
    with Shard.open(tmp_path / one) as shard:
        assert shard_name(shard_header(shard.settings, shard.entries)) == one
        assert shard.damaged() == []


def test_floats_are_stored_in_the_dtype_of_the_set_and_integers_as_they_are(tmp_path: Path) -> None:
    values = {"x": np.array([1.0, 0.1], np.float64), "ids": np.arange(3), "m": np.array([True])}
    expected: dict[Dtype, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for dtype, name_of in expected.items():
        stored = maker(dtype).sample(0, 0, values).arrays
        assert [str(stored[name].dtype) for name in values] == [name_of, "int64", "bool"]


def test_a_value_that_does_not_fit_is_refused_and_not_made_infinite() -> None:
    with pytest.raises(CalibrationError, match=r"7e\+04 do not fit into F16. .*--store-dtype"):
        maker("F16").sample(0, 0, {"x": np.array([1.0, 7e4], np.float32)})
    with pytest.raises(CalibrationError, match=r"up to 1e\+300 do not fit into F32\.$"):
        maker("F32").sample(0, 0, {"x": np.array([1.0, 1e300])})
    whole = maker("F16").sample(0, 0, {"x": np.array([1.0, np.inf, np.nan], np.float32)})
    assert np.isnan(whole.arrays["x"][2])  # what was not finite before is for verify to find


def test_views_and_big_endian_values_are_stored_as_they_look(tmp_path: Path) -> None:
    grid = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    values = {"turned": grid.transpose(2, 0, 1), "big": grid.astype(">f4"), "one": np.float32(3)}
    item = maker("F32").sample(0, 0, {name: np.asarray(value) for name, value in values.items()})
    name, _ = write_shard(tmp_path, maker("F32").settings, [item])
    with Shard.open(tmp_path / name) as shard:
        stored = shard.read(0)
        assert shard.intact(0)
    for key, value in values.items():
        np.testing.assert_array_equal(stored[key], value)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 101, "ü", "a\n"])
def test_a_tensor_needs_a_plain_name(name: str) -> None:
    with pytest.raises(CalibrationError, match="expected a name"):
        MAKE.sample(0, 0, {name: np.zeros(1, np.float32)})


def test_a_picture_is_uint8_rgb_and_an_image_is_planned() -> None:
    with pytest.raises(CalibrationError, match="height × width × 3 in uint8"):
        MAKE.picture(0, np.zeros((3, 4, 4), np.float32))
    with pytest.raises(CalibrationError, match="image 7 is not in the plan"):
        MAKE.picture(7, pixels(0))


def test_a_key_that_is_not_that_of_its_run_is_refused(tmp_path: Path) -> None:
    item = items(MAKE, 0)[0]
    entry = msgspec.structs.replace(item.entry, prompt="another prompt")
    name, _ = write_shard(tmp_path, SETTINGS, [type(item)(entry, item.arrays)])
    with pytest.raises(CalibrationError, match="does not match its run"):
        Shard.open(tmp_path / name)


def test_a_renamed_or_foreign_file_is_no_shard(tmp_path: Path) -> None:
    name, _ = write_shard(tmp_path, SETTINGS, items(MAKE, 0))
    other = tmp_path / f"{'0' * 64}.safetensors"
    (tmp_path / name).rename(other)
    with pytest.raises(CalibrationError, match="does not match the file's name"):
        Shard.open(other)
    other.write_bytes(b"")
    with pytest.raises(CalibrationError, match="empty"):
        Shard.open(other)


class Failing:
    """A file with a bad sector."""

    def seek(self, _: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def close(self) -> None:
        pass


def test_a_tensor_that_the_disk_does_not_give_is_damaged(tmp_path: Path) -> None:
    name, _ = write_shard(tmp_path, SETTINGS, items(MAKE, 0))
    with Shard.open(tmp_path / name) as shard:
        broken = dataclasses.replace(shard, _file=cast(Any, Failing()))
        assert broken.damaged() == [0, 1, 2, 3]
        with pytest.raises(CalibrationError, match="Input/output error"):
            broken.read(0)


def test_a_file_that_cannot_be_opened_is_not_said_to_be_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        Shard.open(tmp_path / f"{'0' * 64}.safetensors")


def rewritten(path: Path, **metadata: str | None) -> Path:
    """The shard with other metadata, under the name that its header then has."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] |= metadata
    header["__metadata__"] = {k: v for k, v in header["__metadata__"].items() if v is not None}
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    changed = path.with_name(shard_name(head))
    changed.write_bytes(head + data[8 + length :])
    return changed


def test_a_header_that_is_not_a_shards_is_refused(tmp_path: Path) -> None:
    name, _ = write_shard(tmp_path, SETTINGS, items(MAKE, 1))
    entries = json.loads(json.loads(_head(tmp_path / name))["__metadata__"]["entries"])
    other = [{**entry, "seed": 99} if entry["kind"] == "sample" else entry for entry in entries]
    odd = [
        {**entry, "tensors": {k: {**v, "dtype": "F99"} for k, v in entry["tensors"].items()}}
        for entry in entries
    ]
    for metadata, said in (
        ({"format": "other"}, "expected lydite-calibration"), ({"version": "2"}, "expected"),
        ({"format": None}, "not a shard"), ({"settings": "{}"}, "not a shard"),
        ({"entries": "[1]"}, "not a shard"), ({"entries": json.dumps(other)}, "does not match"),
        ({"entries": json.dumps(odd)}, "F99"),
    ):  # fmt: skip
        with pytest.raises(CalibrationError, match=said):
            Shard.open(rewritten(tmp_path / name, **metadata))
    Shard.open(rewritten(tmp_path / name, note="harmless")).close()


def _head(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.parametrize("change", [-1, 1, 4096])
def test_a_shard_of_another_length_is_damaged(tmp_path: Path, change: int) -> None:
    name, size = write_shard(tmp_path, SETTINGS, items(MAKE, 1))
    assert read_shard_header(tmp_path / name).bytes == size
    os.truncate(tmp_path / name, size + change)
    with pytest.raises(CalibrationError, match=f"{size + change} bytes; expected {size}"):
        read_shard_header(tmp_path / name)
    header = read_shard_header(tmp_path / name, complete=False)
    assert header.bytes == size + change and len(header.entries) == 4
