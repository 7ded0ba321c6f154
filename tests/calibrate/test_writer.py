"""Making, resuming and reading a set: committed means there, once, whatever comes between."""

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lydite.calibrate.settings import Plan, plan_of
from lydite.calibrate.store.lock import lock_owner
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import SHARDS
from lydite.calibrate.store.shards import write_shard
from lydite.calibrate.store.verify import verify
from lydite.calibrate.store.writer import Committed, Writer, command_line
from lydite.core.errors import CalibrationError, FileError
from support.calibration import (
    SETTINGS,
    FaultyDisk,
    check_finished,
    check_kept,
    draw,
    faulty,
    items,
    latent,
    plan,
)


def test_a_run_goes_on_where_it_was_and_does_nothing_twice(tmp_path: Path) -> None:
    whole = draw(tmp_path / "whole", 4)
    drawn: list[int] = []
    draw(tmp_path / "set", 2, drawn.append)
    assert draw(tmp_path / "set", 4, drawn.append) == whole
    assert drawn == [0, 1, 2, 3]
    assert draw(tmp_path / "set", 4, drawn.append) == whole and len(drawn) == 4
    with Writer.start(tmp_path / "set", SETTINGS, plan(4)) as writer:
        assert writer.commit(items(writer.builder, 2)) == Committed(0, 0)


def test_a_plan_has_no_step_that_its_run_never_reaches(tmp_path: Path) -> None:
    last = int(SETTINGS.conditions["steps"]) - 1
    Writer.start(tmp_path / "set", SETTINGS, plan_of([("a", 1)], (0, last))).close()
    with pytest.raises(CalibrationError, match=f"step {last + 1} of a run of {last + 1} steps"):
        Writer.start(tmp_path / "other", SETTINGS, plan_of([("a", 1)], (0, last + 1)))
    assert not (tmp_path / "other").exists()


def test_the_content_hash_depends_on_content_alone(tmp_path: Path) -> None:
    whole = draw(tmp_path / "whole", 2)
    with Writer.start(tmp_path / "other", SETTINGS, plan(2)) as writer:
        everything = items(writer.builder, 1) + items(writer.builder, 0)
        hashes = [writer.content_hash]
        for item in everything[::2] + everything[1::2]:  # a shard for each, in another order
            writer.commit([item])
            hashes.append(writer.content_hash)
    assert hashes[-1] == whole and len(set(hashes)) == len(hashes)
    with Writer.start(tmp_path / "changed", SETTINGS, plan(1)) as writer:
        sample = writer.builder.sample(0, 0, {"x": latent(0, 0)}, sigma=1, timestep=0)
        writer.commit([sample])
        one = writer.content_hash
    with Writer.start(tmp_path / "again", SETTINGS, plan(1)) as writer:
        writer.commit([writer.builder.sample(0, 0, {"x": latent(0, 0)}, sigma=0.5, timestep=0)])
        assert writer.content_hash != one  # sigma is content


def test_other_settings_are_refused_with_their_names(tmp_path: Path) -> None:
    draw(tmp_path, 1)
    other = msgspec.structs.replace(
        SETTINGS, conditions=SETTINGS.conditions | {"shift": 1.5}, dtype="F32"
    )
    with pytest.raises(CalibrationError, match=r"dtype: 'BF16', 'F32'; shift: 3.0, 1.5; the set's"):
        Writer.start(tmp_path, other, plan(1))
    with pytest.raises(CalibrationError, match="image 0 is 'a drawing of 0 cats' with seed 0"):
        Writer.start(tmp_path, SETTINGS, plan_of([("a dog", 0)], [0]))
    draw(tmp_path, 1)  # and neither left a lock behind


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(FileError, match=r"not empty and not a calibration set \(it holds 'thesis"):
        draw(tmp_path, 1)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(FileError, match="not a folder"):
        draw(tmp_path / "thesis.tex", 1)
    with pytest.raises(CalibrationError, match="no calibration set"):
        CalibrationSet.open(tmp_path)


def test_a_plan_is_checked_and_any_seed_is_one(tmp_path: Path) -> None:
    for wrong in (plan_of([("a", 0)], [-1]), Plan(plan(1).images * 2, (0,))):
        with pytest.raises(CalibrationError, match="images of different numbers"):
            Writer.start(tmp_path / "wrong", SETTINGS, wrong)
    for wrong in (plan_of([("a", 2**80)], [0]), plan_of([("a", 0)], [50])):
        with pytest.raises(CalibrationError, match=r"seed|step"):
            Writer.start(tmp_path / "wrong", SETTINGS, wrong)
    assert not (tmp_path / "wrong").exists()
    seeds = [0, -1, 2**64 - 1]
    asked = plan_of([("\u00fc \U0001f408 \"'\n", seed) for seed in seeds], [0], pictures=False)
    with Writer.start(tmp_path / "set", SETTINGS, asked) as writer:
        writer.commit(writer.builder.sample(n, 0, {"x": latent(n, 0)}) for n in range(len(seeds)))
    assert verify(tmp_path / "set").complete
    with CalibrationSet.open(tmp_path / "set") as opened:
        assert [row.entry.seed for row in opened.rows()] == seeds


def test_one_key_has_one_content(tmp_path: Path) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(1)) as writer:
        first = writer.builder.sample(0, 0, {"x": latent(0, 0)})
        other = writer.builder.sample(0, 0, {"x": latent(0, 1)})
        with pytest.raises(CalibrationError, match=r"image 0 step 0 .* differs"):
            writer.commit([first, other])
        assert writer.index.counts() == {}
        assert writer.commit([first, first]).items == 1
        with pytest.raises(CalibrationError, match=r"image 0 step 0 .* differs"):
            writer.commit([other])


def test_conditioning_is_kept_once_per_prompt(tmp_path: Path) -> None:
    asked = plan_of([("a cat", 0), ("a cat", 1), ("a dog", 2)], [0], conditioning=True)
    text = np.ones((77, 64), np.float32)
    with Writer.start(tmp_path, SETTINGS, asked) as writer:
        assert len([1 for steps in writer.missing().values() for s in steps if s is None]) == 5
        for image in asked.images:
            sample = writer.builder.sample(image.number, 0, {"x": latent(image.number, 0)})
            writer.commit([sample, writer.builder.conditioning(image.prompt, {"text": text})])
        assert writer.index.counts() == {"conditioning": 2, "sample": 3}


def test_readers_see_what_is_committed_while_a_run_writes(tmp_path: Path) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(2)) as writer:
        with CalibrationSet.open(tmp_path) as reader:
            writer.commit(items(writer.builder, 0))
            assert reader.index.counts() == {}
        with CalibrationSet.open(tmp_path) as reader:
            rows = list(reader.rows())
            values = reader.read(rows[1])["x"]
        writer.commit(items(writer.builder, 1))
    assert [(row.image, row.step) for row in rows] == [(0, 0), (0, 4), (0, 8)]
    np.testing.assert_array_equal(values, latent(0, 4).astype(values.dtype))


def test_a_reader_leaves_nothing_behind(tmp_path: Path) -> None:
    draw(tmp_path, 1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with CalibrationSet.open(tmp_path) as reader:
        assert len(list(reader.rows())) == 3
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(1)) as writer:
        made = items(writer.builder, 0)
    for take in (lambda: writer.commit(made), writer.collect):
        with pytest.raises(CalibrationError, match="this writer is closed"):
            take()
    writer.close()


def test_the_writer_of_another_process_takes_nothing_and_keeps_its_lock(tmp_path: Path) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(1)) as writer:
        made = items(writer.builder, 0)
        writer._process = os.getppid()  # as in a child that was forked
        for take in (lambda: writer.commit(made), writer.collect):
            with pytest.raises(CalibrationError, match="belongs to another process"):
                take()
        writer.close()
        assert lock_owner(tmp_path) is not None
        writer._process = os.getpid()
        assert writer.commit(made).items == 4
    assert lock_owner(tmp_path) is None


def test_a_complete_shard_is_part_of_the_set_and_one_of_another_run_is_refused(
    tmp_path: Path,
) -> None:
    whole = draw(tmp_path / "whole", 2)
    draw(tmp_path / "set", 1)
    with Writer.start(tmp_path / "set", SETTINGS, plan(2)) as writer:
        write_shard(tmp_path / "set" / SHARDS, SETTINGS, items(writer.builder, 1))
    with Writer.start(tmp_path / "set", SETTINGS, plan(2)) as writer:
        assert not writer.missing() and writer.content_hash == whole
    other = msgspec.structs.replace(SETTINGS, model_hash="beef")
    with Writer.start(tmp_path / "other", other, plan(1)) as writer:
        writer.commit(items(writer.builder, 0))
    (foreign,) = (tmp_path / "other" / SHARDS).iterdir()
    shutil.copy(foreign, tmp_path / "set" / SHARDS)
    with pytest.raises(CalibrationError, match=r"made with other settings .*model_hash: 'beef'"):
        draw(tmp_path / "set", 2)


def test_an_interrupt_at_any_call_leaves_a_set_that_goes_on(memory: Path) -> None:
    whole = draw(memory / "whole", 2)
    with faulty(FaultyDisk()) as counted:
        draw(memory / "counted", 2)
    for k in range(1, counted.calls + 1):
        folder, acknowledged = memory / str(k), set[int]()
        with faulty(FaultyDisk(k, "interrupt")), pytest.raises(KeyboardInterrupt):
            draw(folder, 2, acknowledged.add)
        check_kept(folder, 2, acknowledged)
        check_finished(folder, 2, whole)
        shutil.rmtree(folder)


def test_after_a_failure_the_writer_is_closed_and_the_set_is_free(tmp_path: Path) -> None:
    writer = Writer.start(tmp_path, SETTINGS, plan(2), resume="lydite calibrate run --images 2")
    with (
        faulty(FaultyDisk(1, "EIO")),
        pytest.raises(FileError, match=r"committed is safe.* resume with: lydite .* --images 2$"),
    ):
        writer.commit(items(writer.builder, 0))
    with pytest.raises(CalibrationError, match="this writer is closed"):
        writer.commit(items(writer.builder, 0))
    draw(tmp_path, 2)
    plain = rf"resume with: lydite calibrate run --out {tmp_path}$"
    with faulty(FaultyDisk(1, "EIO")), pytest.raises(FileError, match=plain):
        Writer.start(tmp_path, SETTINGS, plan(2))


def test_commands_in_messages_are_quoted_and_stay_on_one_line() -> None:
    assert command_line("lydite", Path("a set"), 3) == "lydite 'a set' 3"
    assert "\n" not in command_line("lydite", "two\nlines")


def test_seeds_end_at_64_bits_and_a_moved_model_is_known_by_its_new_name(tmp_path: Path) -> None:
    moved = msgspec.structs.replace(SETTINGS, model="there")
    Writer.start(tmp_path / "set", SETTINGS, plan_of([("a", 2**64 - 1)], (0,))).close()
    with Writer.start(tmp_path / "set", moved, plan_of([("a", 2**64 - 1)], (0,))) as writer:
        assert writer.settings.model == "there"
    with pytest.raises(CalibrationError, match=f"{2**64} is no seed"):
        Writer.start(tmp_path / "other", SETTINGS, plan_of([("a", 2**64)], (0,)))


def test_the_leftover_of_an_interrupted_write_is_no_foreign_file_and_is_removed(
    tmp_path: Path,
) -> None:
    leftover = tmp_path / ".set.json.1.part"
    leftover.touch()
    draw(tmp_path, 1)
    assert not leftover.exists()
