"""What people do to a set behind its back: files go, are edited, come from elsewhere."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.recovery import QUARANTINE
from lydite.calibrate.store.repair import Repaired, rebuild, repair
from lydite.calibrate.store.set_file import NAME as SET
from lydite.calibrate.store.set_file import SHARDS, plan_of, read_description
from lydite.calibrate.store.status import status
from lydite.calibrate.store.verify import verify
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import CalibrationError, FileError, InputError
from support.calibration import SETTINGS, draw, items, plan


def started(folder: Path, planned: int, drawn: int) -> Path:
    """A set of which some images are drawn."""
    with Writer.start(folder, SETTINGS, plan(planned)) as writer:
        for number in range(drawn):
            writer.commit(items(writer.make, number))
    return folder


def some_shard(folder: Path) -> Path:
    return sorted((folder / SHARDS).iterdir())[0]


@pytest.mark.parametrize("how", ["gone", "cut", "all"])
def test_a_run_does_not_go_on_without_its_shards(tmp_path: Path, how: str) -> None:
    whole = draw(tmp_path, 3)
    if how == "all":
        shutil.rmtree(tmp_path / SHARDS)
    elif how == "gone":
        some_shard(tmp_path).unlink()
    else:
        os.truncate(some_shard(tmp_path), 100)
    with pytest.raises(CalibrationError, match=r"gone, or not as long.*lydite calibrate repair"):
        draw(tmp_path, 3)
    told = status(tmp_path)
    assert len(told.lost) == (3 if how == "all" else 1) and told.content_hash is None
    assert told.missing == 4 * len(told.lost) and told.images_complete == 3 - len(told.lost)
    found = verify(tmp_path)
    assert not found.sound and found.content_hash is None and found.missing == told.missing
    repair(tmp_path)
    assert draw(tmp_path, 3) == whole


def test_a_set_without_its_description_is_not_begun_anew(tmp_path: Path) -> None:
    started(tmp_path, 5, 2)
    (tmp_path / SET).unlink()
    with pytest.raises(CalibrationError, match=r"set.json: missing.*Run: lydite calibrate repair"):
        draw(tmp_path, 5)
    with pytest.raises(CalibrationError, match=r"set.json: missing.*Run: lydite calibrate repair"):
        status(tmp_path)
    assert repair(tmp_path).set_from == "the index"
    assert read_description(tmp_path).plan == plan(5), "images that are not drawn are still planned"


def test_spaces_in_the_description_cost_nothing(tmp_path: Path) -> None:
    started(tmp_path, 5, 2)
    text = (tmp_path / SET).read_text()
    (tmp_path / SET).write_text(json.dumps(json.loads(text)))
    with pytest.raises(CalibrationError, match="damaged"):
        status(tmp_path)
    assert repair(tmp_path).set_from == "itself"
    assert (tmp_path / SET).read_text() == text
    assert [path.name.endswith(SET) for path in (tmp_path / QUARANTINE).iterdir()] == [True]


def test_a_description_that_says_something_else_comes_from_the_index(tmp_path: Path) -> None:
    started(tmp_path, 5, 2)
    text = (tmp_path / SET).read_text()
    (tmp_path / SET).write_text(text.replace("4 cats", "5 cats"))
    assert repair(tmp_path).set_from == "the index"
    assert (tmp_path / SET).read_text() == text


def test_without_both_the_shards_speak(tmp_path: Path) -> None:
    started(tmp_path, 5, 2)
    (tmp_path / SET).unlink()
    (tmp_path / "index.sqlite").write_bytes(b"no index at all")
    assert rebuild(tmp_path).set_from == "the shards"
    assert read_description(tmp_path).plan.images == plan(2).images


def other_set(folder: Path) -> Path:
    """A set of the same settings whose numbers mean other images."""
    others = plan_of([("a dog", 7), ("two dogs", 8)], (0, 4, 8))
    with Writer.start(folder, SETTINGS, others) as writer:
        writer.commit(items(writer.make, 0))
    return folder


@pytest.mark.parametrize("mend", [repair, rebuild])
@pytest.mark.parametrize("settings", ["same", "other"])
def test_shards_of_another_set_are_set_aside(
    tmp_path: Path, mend: Callable[[Path], Repaired], settings: str
) -> None:
    whole, other = draw(tmp_path / "set", 2), other_set(tmp_path / "other")
    if settings == "other":
        conditions = replace(SETTINGS, conditions={"sampler": "heun"})
        with Writer.start(tmp_path / "heun", conditions, plan(1)) as writer:
            writer.commit(items(writer.make, 0))
        other = tmp_path / "heun"
    shutil.copy(some_shard(other), tmp_path / "set" / SHARDS)
    with pytest.raises(CalibrationError, match=r"of another set|made with other settings"):
        draw(tmp_path / "set", 2)
    assert not verify(tmp_path / "set").sound
    assert mend(tmp_path / "set").quarantined == (some_shard(other).name,)
    assert verify(tmp_path / "set").complete and draw(tmp_path / "set", 2) == whole


def test_a_shard_of_another_set_is_not_taken_in(tmp_path: Path) -> None:
    whole, other = draw(tmp_path / "set", 2), other_set(tmp_path / "other")
    shutil.copy(some_shard(other), tmp_path / "set" / "incoming")
    assert draw(tmp_path / "set", 2) == whole
    assert verify(tmp_path / "set").quarantined == 1


@pytest.mark.parametrize("which", ["of other settings", "of other images", "older"])
def test_another_description_is_refused_by_all_and_mended(tmp_path: Path, which: str) -> None:
    started(tmp_path / "set", 2, 2)
    older = (tmp_path / "set" / SET).read_bytes()
    whole = draw(tmp_path / "set", 3)
    if which == "of other images":
        older = (other_set(tmp_path / "other") / SET).read_bytes()
    elif which == "of other settings":
        conditions = replace(SETTINGS, conditions={"sampler": "heun"})
        Writer.start(tmp_path / "other", conditions, plan(2)).close()
        older = (tmp_path / "other" / SET).read_bytes()
    right = (tmp_path / "set" / SET).read_bytes()
    (tmp_path / "set" / SET).write_bytes(older)
    for look in (status, CalibrationSet.open, lambda folder: draw(folder, 2)):
        with pytest.raises(
            CalibrationError, match=r"set\.json|made with other settings|image 0 is"
        ):
            look(tmp_path / "set")
    assert not verify(tmp_path / "set").sound
    assert repair(tmp_path / "set").set_from == "the index"
    assert (tmp_path / "set" / SET).read_bytes() == right
    assert verify(tmp_path / "set").complete and draw(tmp_path / "set", 3) == whole


def test_the_index_of_another_set_is_made_anew(tmp_path: Path) -> None:
    whole = draw(tmp_path / "set", 2)
    for path in other_set(tmp_path / "other").glob("index.*"):
        shutil.copy(path, tmp_path / "set")
    assert not verify(tmp_path / "set").sound
    done = repair(tmp_path / "set")
    assert done.index_rebuilt and done.set_from is None
    assert draw(tmp_path / "set", 2) == whole


def test_a_plan_does_not_grow_while_shards_are_lost(tmp_path: Path) -> None:
    draw(tmp_path, 2)
    some_shard(tmp_path).unlink()
    with pytest.raises(CalibrationError, match="gone, or not as long"):
        draw(tmp_path, 5)
    assert read_description(tmp_path).plan == plan(2)


def test_who_may_not_write_reads_what_a_killed_writer_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.fork() == 0:
        writer = Writer.start(tmp_path, SETTINGS, plan(3))
        writer.commit(items(writer.make, 0))
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
    assert (tmp_path / "index.sqlite-wal").stat().st_size > 0
    monkeypatch.setattr("lydite.calibrate.store.database.os.access", lambda _, how: how != os.W_OK)
    for memory in (True, False):  # as it was left, and as a copy of the folder may have it
        if not memory:
            (tmp_path / "index.sqlite-shm").unlink()
        with CalibrationSet.open(tmp_path) as opened:
            assert len(list(opened.rows(None))) == 4
        assert verify(tmp_path).sound


@pytest.mark.parametrize("what", ["index.sqlite", SET, SHARDS])
def test_what_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    draw(tmp_path, 2)
    open_file, access = Path.open, os.access

    def denied(path: Path, *given: Any, **more: Any) -> Any:
        if what in (path.name, path.parent.name):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *given, **more)

    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(os, "access", lambda path, how: path.name != what and access(path, how))
    with pytest.raises(FileError, match=r"cannot be read .*Permission denied"):
        verify(tmp_path)


def test_the_time_left_is_that_of_runs(tmp_path: Path) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(6)) as writer:
        for number, time in enumerate((100.0, 110.0, 121.0, 500.0)):
            writer.commit(items(writer.make, number), drawn=time)
    assert status(tmp_path).seconds_left == pytest.approx(2 * 11.0)
    for path in (tmp_path / SHARDS).iterdir():
        os.utime(path, (0, 0))
    assert status(tmp_path).seconds_left == pytest.approx(2 * 11.0)


def test_a_plan_that_cannot_be_read_back_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lydite.calibrate.store.set_file.MAX_BYTES", 1000)
    with pytest.raises(InputError, match=r"the plan of 20 images takes .* Make several sets"):
        Writer.start(tmp_path / "set", SETTINGS, plan(20))
    assert not (tmp_path / "set" / SET).exists()
