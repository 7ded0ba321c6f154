"""Verify lists what is damaged, missing or suspicious; repair keeps all that is undamaged."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.repair import repair
from lydite.calibrate.store.set_file import NAME, OLD_FILES, QUARANTINE, SHARDS
from lydite.calibrate.store.status import status
from lydite.calibrate.store.value_checks import ValueLimits
from lydite.calibrate.store.verify import SuspiciousItem, verify
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import CalibrationError
from lydite.core.tensorfile import read_header
from support.calibration import SETTINGS, check_finished, draw, items, latent, plan


def shard_of(folder: Path, image: int) -> Path:
    with CalibrationSet.open(folder) as opened:
        return folder / SHARDS / next(row.shard for row in opened.rows() if row.image == image)


def damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def step_place(path: Path, step: int) -> int:
    """The first byte of a step's latent."""
    header = read_header(path)
    entries = json.loads(header.metadata["entries"])
    number = next(n for n, entry in enumerate(entries) if entry.get("step") == step)
    return header.tensors[f"{number:04}/x"].start


def test_a_whole_set_is_complete_and_a_part_of_it_is_sound(tmp_path: Path) -> None:
    whole = draw(tmp_path, 3)
    found = verify(tmp_path)
    assert found.complete and found.content_hash == whole
    assert (found.items, found.shards) == ({"sample": 9, "picture": 3}, 3)
    assert found.bytes == sum(path.stat().st_size for path in (tmp_path / SHARDS).iterdir())
    Writer.start(tmp_path, SETTINGS, plan(5)).close()
    found = verify(tmp_path)
    assert found.sound and not found.complete and found.missing == 8


def test_a_damaged_sample_is_named_and_alone_computed_again(tmp_path: Path) -> None:
    whole = draw(tmp_path, 3)
    path = shard_of(tmp_path, 1)
    damage(path, step_place(path, 4))
    (found,) = verify(tmp_path).damage
    assert (found.file, found.items) == (f"{SHARDS}/{path.name}", ("image 1 step 4",))
    with CalibrationSet.open(tmp_path) as opened:
        row = next(row for row in opened.rows() if (row.image, row.step) == (1, 4))
        with pytest.raises(CalibrationError, match=r"image 1 step 4 is damaged\. Run: lydite"):
            opened.read(row)
    done = repair(tmp_path)
    assert (done.dropped, done.quarantined) == (("image 1 step 4",), (path.name,))
    assert not done.rewritten and (done.items, done.missing) == (11, 1)
    assert (tmp_path / QUARANTINE / path.name).exists()
    found = verify(tmp_path)
    assert found.sound and (found.missing, found.quarantined) == (1, 1)
    assert draw(tmp_path, 3) == whole and verify(tmp_path).complete


@pytest.mark.parametrize("place", [0, 9, 200, "cut", "gone", "pipe"])
def test_a_damaged_or_missing_shard_costs_its_image_alone(tmp_path: Path, place: int | str) -> None:
    whole = draw(tmp_path, 3)
    path = shard_of(tmp_path, 1)
    if isinstance(place, int):
        damage(path, place)  # in its header
    elif place == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    if place == "pipe":
        os.mkfifo(path)
    result, state = verify(tmp_path), status(tmp_path)
    lost = place != "gone"
    assert result.sound is not lost and result.missing == 4
    assert state.missing == 4 and len(state.lost) == lost and (state.content_hash is None) == lost
    if lost:
        for refuse in (CalibrationSet.open, lambda folder: draw(folder, 5)):
            with pytest.raises(CalibrationError, match=r"Run: lydite calibrate repair"):
                refuse(tmp_path)
    done = repair(tmp_path)
    assert done.missing == 4 and len(done.quarantined) == lost
    assert draw(tmp_path, 3) == whole and verify(tmp_path).complete


def test_a_damaged_description_is_found_and_written_again(tmp_path: Path) -> None:
    whole = draw(tmp_path, 2)
    damage(tmp_path / NAME, 40)
    assert not verify(tmp_path).sound
    with pytest.raises(CalibrationError, match="damaged"):
        draw(tmp_path, 2)
    done = repair(tmp_path)
    assert done.rewritten and done.from_shards and not done.missing
    assert draw(tmp_path, 2) == whole and verify(tmp_path).complete


def test_the_index_of_earlier_versions_is_ignored_and_removed(tmp_path: Path) -> None:
    whole = draw(tmp_path, 2)
    for name in OLD_FILES:
        (tmp_path / name).write_bytes(b"damaged in any way")
    assert verify(tmp_path).complete and status(tmp_path).content_hash == whole
    check_finished(tmp_path, 2, whole)
    assert not [name for name in OLD_FILES if (tmp_path / name).exists()]


def test_a_set_is_repaired_from_its_shards_alone(tmp_path: Path) -> None:
    whole = draw(tmp_path / "set", 3)
    (tmp_path / "bare").mkdir()
    shutil.copytree(tmp_path / "set" / SHARDS, tmp_path / "bare" / SHARDS)
    done = repair(tmp_path / "bare")
    assert done.items == 12 and done.from_shards
    check_finished(tmp_path / "bare", 3, whole)
    with pytest.raises(CalibrationError, match=r"no calibration set \(there is no shards/"):
        repair(tmp_path)
    (tmp_path / SHARDS).mkdir()
    with pytest.raises(CalibrationError, match="no readable shard"):
        repair(tmp_path)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([1.0, np.nan, np.inf, 2.0], "x: 1 NaN and 1 Inf among 4 values"),
        ([3.0, 3.0, 3.0, 3.0], "x: all values are 3"),
        ([1.0, -2e4, 0.0, 2.0], "x: values up to 1.997e+04, expected at most 1e+04"),
    ],
)
def test_values_no_network_should_be_given_are_suspect(
    tmp_path: Path, values: list[float], why: str
) -> None:
    draw(tmp_path, 1)
    with Writer.start(tmp_path, SETTINGS, plan(2)) as writer:
        sample = writer.builder.sample(1, 0, {"x": np.array(values, np.float32)})
        writer.commit([sample, *items(writer.builder, 1)[1:]])
    found = verify(tmp_path)
    assert found.sound and found.missing == 0 and not found.complete
    shape = "x: shape [4], most of the set have [4, 8, 8]"
    assert found.suspects == (
        SuspiciousItem("image 1 step 0", why),
        SuspiciousItem("image 1 step 0", shape),
    )


def test_the_healthy_range_can_be_chosen(tmp_path: Path) -> None:
    draw(tmp_path, 1)
    found = verify(tmp_path, ValueLimits(absmax=float(np.abs(latent(0, 4)).max()) - 0.1))
    assert "image 0 step 4" in {suspect.item for suspect in found.suspects}


def test_verify_does_not_disturb_a_writer_or_take_its_work_for_damage(tmp_path: Path) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(2)) as writer:
        writer.commit(items(writer.builder, 0))
        found = verify(tmp_path)
        assert found.sound and found.missing == 4
        assert found.writer and "process" in str(found.writer)
        with pytest.raises(CalibrationError, match="being written by process"):
            repair(tmp_path)
        writer.commit(items(writer.builder, 1))
    assert verify(tmp_path).complete


def test_something_that_is_no_set_is_said_to_be_none(tmp_path: Path) -> None:
    found = verify(tmp_path)
    assert not found.sound and "no calibration set" in found.damage[0].why


def test_items_twice_in_a_set_count_once_and_two_contents_are_damage(tmp_path: Path) -> None:
    draw(tmp_path / "set", 2)
    with Writer.start(tmp_path / "twice", SETTINGS, plan(2)) as writer:
        for image in (0, 1):
            writer.commit(items(writer.builder, image)[:2])
    for path in (tmp_path / "twice" / SHARDS).iterdir():
        shutil.copy(path, tmp_path / "set" / SHARDS)
    result = verify(tmp_path / "set")
    assert result.complete and result.items == {"sample": 6, "picture": 2}
    whole = result.content_hash
    assert status(tmp_path / "set").content_hash == whole
    assert repair(tmp_path / "set").quarantined == () and verify(tmp_path / "set").complete
    with Writer.start(tmp_path / "other", SETTINGS, plan(2)) as writer:
        sample = writer.builder.sample(0, 0, {"x": latent(5, 5)}, sigma=1, timestep=0)
        writer.commit([sample])
    for path in (tmp_path / "other" / SHARDS).iterdir():
        shutil.copy(path, tmp_path / "set" / SHARDS)
    assert not verify(tmp_path / "set").sound
    with pytest.raises(CalibrationError, match="has other values in shard"):
        CalibrationSet.open(tmp_path / "set")
    assert len(repair(tmp_path / "set").quarantined) == 1
    draw(tmp_path / "set", 2)
    assert verify(tmp_path / "set").complete
