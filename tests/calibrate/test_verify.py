"""Verify names what is damaged, missing or unhealthy, and repair keeps all that is whole."""

import json
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from lydite.calibrate.store import files as disk
from lydite.calibrate.store import seal
from lydite.calibrate.store.index import Index
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.recovery import QUARANTINE
from lydite.calibrate.store.repair import rebuild, repair
from lydite.calibrate.store.set_file import SHARDS
from lydite.calibrate.store.value_checks import Healthy
from lydite.calibrate.store.verify import Suspect, verify
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import CalibrationError, FileError
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
    assert (done.again, done.quarantined) == (("image 1 step 4",), (path.name,))
    assert not done.index_rebuilt and done.items == 11
    assert (tmp_path / QUARANTINE / path.name).exists()
    found = verify(tmp_path)
    assert found.sound and (found.missing, found.quarantined) == (1, 1)
    assert draw(tmp_path, 3) == whole and verify(tmp_path).complete


def test_a_damaged_header_is_written_anew_and_nothing_is_lost(tmp_path: Path) -> None:
    whole = draw(tmp_path, 2)
    path = shard_of(tmp_path, 1)
    before = path.read_bytes()
    for place in (0, 9, 200):
        damage(path, place)
        assert len(verify(tmp_path).damage[0].items) == 4
        done = repair(tmp_path)
        assert (done.again, done.mended, done.quarantined) == ((), 1, ())
        assert path.read_bytes() == before
    check_finished(tmp_path, 2, whole)


def test_a_missing_or_short_shard_costs_its_image_alone(tmp_path: Path) -> None:
    whole = draw(tmp_path, 3)
    first, second = shard_of(tmp_path, 0), shard_of(tmp_path, 1)
    first.unlink()
    second.write_bytes(second.read_bytes()[:1000])
    found = verify(tmp_path)
    assert sorted(len(damaged.items) for damaged in found.damage) == [4, 4]
    assert any(damaged.why == "the file is missing" for damaged in found.damage)
    done = repair(tmp_path)
    assert len(done.again) == 8 and "image 0 step 8" in done.again
    assert draw(tmp_path, 3) == whole and verify(tmp_path).complete


@pytest.mark.parametrize("what", ["index.sqlite", seal.SEAL, "set.json"])
def test_a_lost_or_damaged_file_besides_the_shards_is_made_again(tmp_path: Path, what: str) -> None:
    whole = draw(tmp_path, 2)
    damage(tmp_path / what, 40)
    assert not verify(tmp_path).sound
    with pytest.raises(CalibrationError, match="damaged"):
        draw(tmp_path, 2)
    done = repair(tmp_path)
    assert done.again == () and (done.set_from or done.index_rebuilt)
    check_finished(tmp_path, 2, whole)
    (tmp_path / what).unlink()
    rebuild(tmp_path)
    check_finished(tmp_path, 2, whole)


def test_a_row_that_says_something_else_is_found_without_the_seal(tmp_path: Path) -> None:
    whole = draw(tmp_path, 2)
    for change in (
        "UPDATE item SET step = 5 WHERE step = 4 AND image = 0",
        "UPDATE item SET entry = replace(entry, '\"seed\":1', '\"seed\":2')",
        "UPDATE item SET shard = 3 - shard WHERE step = 8",
        "UPDATE shard SET bytes = bytes + 1 WHERE id = 1",
        "DELETE FROM item WHERE kind = 'picture' AND image = 1",
    ):
        index = Index.open(tmp_path / "index.sqlite", write=True)
        index._db.execute(change)
        index.settle()
        index.close()
        seal.write_seal(tmp_path / "index.sqlite")
        assert {damaged.file for damaged in verify(tmp_path).damage} == {"index.sqlite"}, change
        assert repair(tmp_path).index_rebuilt
        check_finished(tmp_path, 2, whole)


def test_rebuild_needs_the_shards_alone(tmp_path: Path) -> None:
    whole = draw(tmp_path / "set", 3)
    (tmp_path / "bare").mkdir()
    shutil.copytree(tmp_path / "set" / SHARDS, tmp_path / "bare" / SHARDS)
    done = rebuild(tmp_path / "bare")
    assert done.items == 12 and done.index_rebuilt and done.set_from
    check_finished(tmp_path / "bare", 3, whole)
    with pytest.raises(CalibrationError, match=r"no calibration set \(there is no shards/"):
        rebuild(tmp_path)
    (tmp_path / SHARDS).mkdir()
    with pytest.raises(CalibrationError, match="no shard to make one from"):
        rebuild(tmp_path)


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
        sample = writer.make.sample(1, 0, {"x": np.array(values, np.float32)})
        writer.commit([sample, *items(writer.make, 1)[1:]])
    found = verify(tmp_path)
    assert found.sound and found.missing == 0 and not found.complete
    shape = "x: shape [4], most of the set have [4, 8, 8]"
    assert found.suspects == (Suspect("image 1 step 0", why), Suspect("image 1 step 0", shape))


def test_the_healthy_range_can_be_chosen(tmp_path: Path) -> None:
    draw(tmp_path, 1)
    found = verify(tmp_path, Healthy(absmax=float(np.abs(latent(0, 4)).max()) - 0.1))
    assert "image 0 step 4" in {suspect.item for suspect in found.suspects}


def test_verify_does_not_disturb_a_writer_or_take_its_work_for_damage(tmp_path: Path) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(2)) as writer:
        writer.commit(items(writer.make, 0))
        found = verify(tmp_path)
        assert found.sound and found.missing == 4
        assert found.writer and "process" in str(found.writer)
        with pytest.raises(CalibrationError, match="being written by process"):
            repair(tmp_path)
        writer.commit(items(writer.make, 1))
    assert verify(tmp_path).complete


def test_a_writer_that_comes_while_verify_looks_at_the_seal_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path, 1)
    started: list[Writer] = []

    def start_first(path: Path) -> str | None:
        monkeypatch.undo()
        started.append(Writer.start(tmp_path, SETTINGS, plan(1)))
        return seal.seal_fault(path)

    monkeypatch.setattr(seal, "seal_fault", start_first)
    assert verify(tmp_path).sound
    started[0].close()


def test_something_that_is_no_set_is_said_to_be_none(tmp_path: Path) -> None:
    found = verify(tmp_path)
    assert not found.sound and "no calibration set" in found.damage[0].why


def test_a_page_of_the_index_that_breaks_in_mid_walk_is_damage_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path, 2)

    def torn(self: Index, name: str) -> list[object]:
        raise CalibrationError("index.sqlite: database disk image is malformed")

    monkeypatch.setattr(Index, "rows_of", torn)
    found = verify(tmp_path)
    assert not found.sound and found.items == {"picture": 2, "sample": 6}
    assert [each.file for each in found.damage] == ["index.sqlite"]
    assert found.content_hash is None and found.missing is None


def test_a_full_disk_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(tmp_path, 1)

    def no_room(path: Path, **_: bool) -> Index:  # for the file by which SQLite reads a journal
        raise disk.DiskError(path, sqlite3.OperationalError("disk I/O error"))

    monkeypatch.setattr(Index, "open", no_room)
    (found,) = verify(tmp_path).damage
    assert found.file == "index.sqlite" and "disk I/O error" in found.why
    monkeypatch.setattr(disk, "free_bytes", lambda _: 4096)
    with pytest.raises(FileError, match=r"disk I/O error; 4\.0 KiB free"):
        verify(tmp_path)
