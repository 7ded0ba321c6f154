"""What people do to a set behind its back: files go, are edited, come from elsewhere."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from calibrating import SETTINGS, draw, items, plan
from lydite.calibrate.recovery import QUARANTINE
from lydite.calibrate.repair import rebuild, repair
from lydite.calibrate.setfile import NAME as SET
from lydite.calibrate.setfile import SHARDS, plan_of, read_description
from lydite.calibrate.status import status
from lydite.calibrate.store import CalibrationSet
from lydite.calibrate.verify import verify
from lydite.calibrate.writer import Writer
from lydite.core.errors import CalibrationError, InputError


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


def test_shards_of_two_sets_do_not_mix(tmp_path: Path) -> None:
    draw(tmp_path / "set", 2)
    others = plan_of([("a dog", 7), ("two dogs", 8)], (0, 4, 8))
    with Writer.start(tmp_path / "other", SETTINGS, others) as writer:
        writer.commit(items(writer.make, 0))
    shutil.copy(some_shard(tmp_path / "other"), tmp_path / "set" / SHARDS)
    said = r"image 0 is .*Shards of two sets are in one folder"
    for what in (rebuild, repair, lambda folder: draw(folder, 2)):
        with pytest.raises(CalibrationError, match=said):
            what(tmp_path / "set")
    found = verify(tmp_path / "set")
    assert any("shards of two sets" in each.why for each in found.damage)


def test_who_may_not_write_reads_what_a_killed_writer_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.fork() == 0:
        writer = Writer.start(tmp_path, SETTINGS, plan(3))
        writer.commit(items(writer.make, 0))
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()
    assert (tmp_path / "index.sqlite-wal").stat().st_size > 0
    monkeypatch.setattr("lydite.calibrate.database.os.access", lambda *_: False)
    for memory in (True, False):  # as it was left, and as a copy of the folder may have it
        if not memory:
            (tmp_path / "index.sqlite-shm").unlink()
        with CalibrationSet.open(tmp_path) as opened:
            assert len(list(opened.rows(None))) == 4
        assert verify(tmp_path).sound


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
    monkeypatch.setattr("lydite.calibrate.setfile.MAX_BYTES", 1000)
    with pytest.raises(InputError, match=r"the plan of 20 images takes .* Make several sets"):
        Writer.start(tmp_path / "set", SETTINGS, plan(20))
    assert not (tmp_path / "set" / SET).exists()
