"""What people do to a set: files are lost, edited, or copied from elsewhere."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from lydite.calibrate.settings import plan_of
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.repair import repair
from lydite.calibrate.store.set_file import (
    INCOMING,
    NAME,
    QUARANTINE,
    SHARDS,
    read_description,
)
from lydite.calibrate.store.status import status
from lydite.calibrate.store.verify import verify
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import CalibrationError, FileError, InputError
from support.calibration import SETTINGS, draw, items, plan


def started(folder: Path, planned: int, drawn: int) -> Path:
    """A set of which some images are drawn."""
    with Writer.start(folder, SETTINGS, plan(planned)) as writer:
        for number in range(drawn):
            writer.commit(items(writer.builder, number))
    return folder


def some_shard(folder: Path) -> Path:
    return sorted((folder / SHARDS).iterdir())[0]


def test_lost_shards_are_drawn_again(tmp_path: Path) -> None:
    whole = draw(tmp_path, 3)
    shutil.rmtree(tmp_path / SHARDS)
    assert status(tmp_path).missing == verify(tmp_path).missing == 12
    assert not repair(tmp_path).rewritten
    assert draw(tmp_path, 3) == whole


def test_a_set_without_its_description_is_not_begun_anew(tmp_path: Path) -> None:
    started(tmp_path, 5, 2)
    (tmp_path / NAME).unlink()
    with pytest.raises(CalibrationError, match=r"set.json: missing.*Run: lydite calibrate repair"):
        draw(tmp_path, 5)
    with pytest.raises(CalibrationError, match=r"set.json: missing.*Run: lydite calibrate repair"):
        status(tmp_path)
    assert repair(tmp_path).from_shards
    assert read_description(tmp_path).plan.images == plan(2).images


def test_spaces_in_the_description_cost_nothing(tmp_path: Path) -> None:
    started(tmp_path, 5, 2)
    text = (tmp_path / NAME).read_text()
    (tmp_path / NAME).write_text(json.dumps(json.loads(text)))
    with pytest.raises(CalibrationError, match="damaged"):
        status(tmp_path)
    done = repair(tmp_path)
    assert done.rewritten and not done.from_shards
    assert (tmp_path / NAME).read_text() == text
    assert [path.name.endswith(NAME) for path in (tmp_path / QUARANTINE).iterdir()] == [True]


def other_set(folder: Path) -> Path:
    """A set of the same settings whose numbers mean other images."""
    others = plan_of([("a dog", 7), ("two dogs", 8)], (0, 4, 8))
    with Writer.start(folder, SETTINGS, others) as writer:
        writer.commit(items(writer.builder, 0))
    return folder


@pytest.mark.parametrize("settings", ["same", "other"])
def test_shards_of_another_set_are_quarantined(tmp_path: Path, settings: str) -> None:
    whole, other = draw(tmp_path / "set", 2), other_set(tmp_path / "other")
    if settings == "other":
        conditions = replace(SETTINGS, conditions={"sampler": "heun"})
        with Writer.start(tmp_path / "heun", conditions, plan(1)) as writer:
            writer.commit(items(writer.builder, 0))
        other = tmp_path / "heun"
    shutil.copy(some_shard(other), tmp_path / "set" / SHARDS)
    with pytest.raises(CalibrationError, match=r"from another set|made with other settings"):
        draw(tmp_path / "set", 2)
    assert not verify(tmp_path / "set").sound
    assert repair(tmp_path / "set").quarantined == (some_shard(other).name,)
    assert verify(tmp_path / "set").complete and draw(tmp_path / "set", 2) == whole


def test_an_incoming_shard_of_another_set_is_quarantined(tmp_path: Path) -> None:
    whole, other = draw(tmp_path / "set", 2), other_set(tmp_path / "other")
    shutil.copy(some_shard(other), tmp_path / "set" / "incoming")
    assert draw(tmp_path / "set", 2) == whole
    assert verify(tmp_path / "set").quarantined == 1


@pytest.mark.parametrize("which", ["of other settings", "of other images", "older"])
def test_another_description_is_found_and_repaired(tmp_path: Path, which: str) -> None:
    started(tmp_path / "set", 2, 2)
    older = (tmp_path / "set" / NAME).read_bytes()
    whole = draw(tmp_path / "set", 3)
    if which == "of other images":
        older = (other_set(tmp_path / "other") / NAME).read_bytes()
    elif which == "of other settings":
        conditions = replace(SETTINGS, conditions={"sampler": "heun"})
        Writer.start(tmp_path / "other", conditions, plan(2)).close()
        older = (tmp_path / "other" / NAME).read_bytes()
    right = read_description(tmp_path / "set")
    (tmp_path / "set" / NAME).write_bytes(older)
    if which != "older":
        for refuse in (CalibrationSet.open, lambda folder: draw(folder, 2)):
            with pytest.raises(CalibrationError, match=r"made with other settings|image . is"):
                refuse(tmp_path / "set")
    assert not verify(tmp_path / "set").sound
    assert repair(tmp_path / "set").rewritten
    repaired = read_description(tmp_path / "set")
    assert repaired.plan == right.plan and repaired.settings.hash == right.settings.hash
    assert verify(tmp_path / "set").complete and draw(tmp_path / "set", 3) == whole


def test_a_plan_does_not_grow_while_shards_are_damaged(tmp_path: Path) -> None:
    draw(tmp_path, 2)
    os.truncate(some_shard(tmp_path), 100)
    with pytest.raises(CalibrationError, match="Run: lydite calibrate repair"):
        draw(tmp_path, 5)
    assert read_description(tmp_path).plan == plan(2)


@pytest.mark.parametrize("what", [NAME, SHARDS])
def test_what_may_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    draw(tmp_path, 2)
    open_file = os.open

    def denied(path: Path, *given: Any, **more: Any) -> Any:
        if what in (Path(path).name, Path(path).parent.name):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *given, **more)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(FileError, match=r"cannot be read .*Permission denied"):
        verify(tmp_path)


def test_the_time_left_follows_from_the_times_of_the_newest_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, conditions={**SETTINGS.conditions, "compute": "float32"})
    with Writer.start(tmp_path, settings, plan(6)) as writer:
        for number in range(4):
            writer.commit(items(writer.builder, number))
    for path, time in zip((tmp_path / SHARDS).iterdir(), (100, 110, 121, 500), strict=True):
        os.utime(path, (time, time))
    assert status(tmp_path).seconds_left == pytest.approx(2 * 11.0)
    monkeypatch.setattr("lydite.calibrate.store.status.RECENT", 3)
    assert status(tmp_path).seconds_left == pytest.approx(2 * (11 + 379) / 2)


def test_a_plan_that_cannot_be_read_back_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lydite.calibrate.store.set_file.MAX_BYTES", 1000)
    with pytest.raises(InputError, match=r"the plan of 20 images takes .* Make several sets"):
        Writer.start(tmp_path / "set", SETTINGS, plan(20))
    assert not (tmp_path / "set" / NAME).exists()


@pytest.mark.parametrize("name", [SHARDS, INCOMING, QUARANTINE])
def test_a_folder_of_a_set_that_is_a_link_leads_to_no_change_elsewhere(
    tmp_path: Path, name: str
) -> None:
    folder, other = tmp_path / "set", tmp_path / "other"
    draw(folder, 2)
    other.mkdir()
    for path in (".mine.part", "0" * 64 + ".safetensors", "thesis.txt"):
        (other / path).write_text("mine")
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).symlink_to(other)
    for write in (lambda: repair(folder), lambda: draw(folder, 3)):
        with pytest.raises(FileError, match="is a link"):
            write()
    assert len(os.listdir(other)) == 3


def test_a_lock_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    """A set from others may hold a link whose target the user can write."""
    folder, thesis = tmp_path / "set", tmp_path / "thesis.txt"
    draw(folder, 1)
    thesis.write_text("mine")
    (folder / "claim").unlink()
    (folder / "claim").symlink_to(thesis)
    for write in (lambda: repair(folder), lambda: draw(folder, 2)):
        with pytest.raises(FileError):
            write()
    assert thesis.read_text() == "mine"
    (folder / "claim").unlink()
    os.mkfifo(folder / "claim")
    with pytest.raises(FileError, match="not a file"):
        repair(folder)
    assert status(folder).writer is None


def test_a_plan_made_from_shards_has_their_conditioning_and_counts_what_is_missing(
    tmp_path: Path,
) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(2, conditioning=True)) as writer:
        made = items(writer.builder, 0)
        prompt = writer.plan.images[0].prompt
        made.append(writer.builder.conditioning(prompt, {"text": np.ones((2, 3), np.float32)}))
        writer.commit(made)
    assert repair(tmp_path).missing == len(made)
    (tmp_path / NAME).unlink()
    done = repair(tmp_path)
    assert done.from_shards and (done.items, done.missing) == (len(made), 0)
    assert read_description(tmp_path).plan.conditioning
