"""A collection that is killed anywhere goes on to the file of one that was not, byte for byte."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lydite.calibrate.activations.collect import Progress, Selection, collect
from lydite.calibrate.activations.file import STATE
from lydite.calibrate.activations.statistics_state import load_state
from lydite.calibrate.settings import plan_of
from lydite.calibrate.store.lock import WriterLock
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.writer import Writer
from lydite.cli.calibrate.activations import (
    MOST_BANDS,
    _check_group_steps,
    _read_part,
    activations,
)
from lydite.core.errors import CalibrationError, FileError, LyditeError
from lydite.pipelines.pipeline import Pipeline
from support import calibration as calibrating
from support import replays

WANTED = Selection(group=64)
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support import calibration as calibrating, replays
from lydite.calibrate.activations.collect import Selection, collect
from lydite.calibrate.store.reader import CalibrationSet
drawn, model, out, where, number = (*map(Path, sys.argv[2:5]), sys.argv[5], int(sys.argv[6]))

def counted(progress):
    if where == "sample" and progress.done == number:
        os.kill(os.getpid(), signal.SIGKILL)

with CalibrationSet.open(drawn) as opened:
    pipeline = replays.loaded(model)
    with calibrating.faulty(calibrating.FaultyDisk(number if where == "disk" else 0, "kill")):
        collect(opened, pipeline, out, Selection(group=64), on_sample=counted, share=0)
"""


@pytest.fixture(scope="module")
def drawn(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return replays.draw_set(tmp_path_factory.mktemp("sets") / "set", pipeline, images=2)


@pytest.fixture(scope="module")
def expected(drawn: Path, pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a collection that nothing disturbed."""
    path = tmp_path_factory.mktemp("statistics") / "whole.sqlite"
    with CalibrationSet.open(drawn) as opened:
        collect(opened, pipeline, path, WANTED)
    return path.read_bytes()


@pytest.mark.parametrize(("where", "number"), [("sample", 4), ("disk", 25)])
def test_after_kill_9_the_finished_file_is_the_same(
    where: str, number: int, drawn: Path, pipeline: Pipeline, expected: bytes, memory: Path
) -> None:
    out, tests = memory / "out.sqlite", str(Path(replays.__file__).parents[1])
    arguments = [tests, drawn, pipeline.model.path, out, where, str(number)]
    environment = {**os.environ, **calibrating.same_blas()}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], timeout=120, check=False, env=environment
    )
    assert done.returncode == -signal.SIGKILL and not out.exists()
    kept = len(load_state(memory / "out.sqlite.work" / STATE).keys)
    assert 0 < kept < 6
    with CalibrationSet.open(drawn) as opened:
        assert collect(opened, pipeline, out, WANTED) == 6 - kept
    assert out.read_bytes() == expected
    assert [path.name for path in memory.iterdir()] == ["out.sqlite"]


def test_every_failing_call_to_the_disk_is_told_and_nothing_is_torn(
    drawn: Path, pipeline: Pipeline, expected: bytes, memory: Path
) -> None:
    with CalibrationSet.open(drawn) as opened:
        with calibrating.faulty(calibrating.FaultyDisk()) as healthy:
            collect(opened, pipeline, memory / "healthy.sqlite", WANTED, share=0)
        for number in (3, 12, healthy.calls - 6, healthy.calls - 4):
            out = memory / f"{number}.sqlite"
            with (
                calibrating.faulty(calibrating.FaultyDisk(number, "ENOSPC")),
                pytest.raises(
                    FileError, match=r"free\).*resume with: lydite calibrate activations"
                ),
            ):
                collect(opened, pipeline, out, WANTED, share=0)
            collect(opened, pipeline, out, WANTED)
            assert out.read_bytes() == expected, number


def test_asked_to_stop_it_keeps_what_it_has(
    drawn: Path, pipeline: Pipeline, expected: bytes, memory: Path
) -> None:
    seen: list[Progress] = []
    out = memory / "out.sqlite"
    with CalibrationSet.open(drawn) as opened:
        with pytest.raises(KeyboardInterrupt):
            collect(
                opened, pipeline, out, WANTED, on_sample=seen.append, stopping=lambda: len(seen) > 2
            )
        state = (memory / "out.sqlite.work" / STATE).read_bytes()
        assert collect(opened, pipeline, out, WANTED) == 3
        assert [path.name for path in memory.iterdir()] == ["out.sqlite"]
        (memory / "out.sqlite.work").mkdir()  # as when it is killed at its very end
        (memory / "out.sqlite.work" / STATE).write_bytes(state)
        assert collect(opened, pipeline, out, WANTED) == 0  # it is there
        assert [path.name for path in memory.iterdir()] == ["out.sqlite"]
        with pytest.raises(FileError, match="holds statistics of other samples"):
            collect(opened, pipeline, out, Selection(group_steps="all"))
    assert out.read_bytes() == expected


def test_a_state_of_other_wishes_and_a_damaged_one_are_refused(
    drawn: Path, pipeline: Pipeline, memory: Path
) -> None:
    out, state = memory / "out.sqlite", memory / "out.sqlite.work" / STATE
    with CalibrationSet.open(drawn) as opened:
        with pytest.raises(KeyboardInterrupt):
            collect(opened, pipeline, out, WANTED, stopping=lambda: True)
        with pytest.raises(
            CalibrationError, match="begun with another set, --group-steps or --group"
        ):
            collect(opened, pipeline, out, Selection())
        with pytest.raises(CalibrationError, match="has other samples now"):
            collect(opened, pipeline, out, replace(WANTED, part=(2, 2)))
        data = bytearray(state.read_bytes())
        data[-1000] ^= 1
        state.write_bytes(data)
        with pytest.raises(CalibrationError, match="damaged"):
            collect(opened, pipeline, out, WANTED)


def test_one_process_collects_into_one_file(drawn: Path, pipeline: Pipeline, memory: Path) -> None:
    (memory / "out.sqlite.work").mkdir()
    claim = WriterLock(memory / "out.sqlite.work")
    try:
        with CalibrationSet.open(drawn) as opened, pytest.raises(CalibrationError) as told:
            collect(opened, pipeline, memory / "out.sqlite", WANTED)
        assert f"process {os.getpid()}" in str(told.value)
    finally:
        claim.release()


def run(*arguments: object) -> str:
    """The command's output; a clear error is raised as it is."""
    with click.Context(click.Command("calibrate")):
        result = CliRunner().invoke(activations, list(map(str, arguments)))
    if isinstance(result.exception, LyditeError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_collects_merges_and_draws(drawn: Path, tmp_path: Path) -> None:
    for part in (1, 2):
        run(drawn, "--out", tmp_path / f"{part}.sqlite", "--part", f"{part}/2", "-q")
    told = run(tmp_path / "1.sqlite", tmp_path / "2.sqlite", "--out", tmp_path / "all.sqlite",
               "--plot", tmp_path / "all.html")  # fmt: skip
    assert "6 samples" in told
    page = (tmp_path / "all.html").read_text()
    assert "Outlier channels" in page and "After GELU" in page and "ff.net.2 in" in page
    assert "picture: " in run(tmp_path / "all.sqlite", "--plot", tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    halves = (tmp_path / "1.sqlite", tmp_path / "2.sqlite")
    for written, words in (
        ("all.sqlite", (*halves, "--out", tmp_path / "all.sqlite")),
        ("all.png", (tmp_path / "all.sqlite", "--plot", tmp_path / "all.png")),
    ):
        before = (tmp_path / written).read_bytes()
        (tmp_path / written).write_bytes(before[:100])
        with pytest.raises(LyditeError, match="exists"):
            run(*words)
        run(*words, "--overwrite")
        assert (tmp_path / written).read_bytes()[:8] == before[:8]


@pytest.mark.parametrize(
    ("text", "part"),
    [("1/1", (1, 1)), ("2/3", (2, 3)), ("3/3", (3, 3)), ("0/3", None), ("4/3", None), ("2", None)],
)
def test_parts_and_groups_of_steps(text: str, part: tuple[int, int] | None) -> None:
    if part is None:
        with pytest.raises(LyditeError, match="--part"):
            _read_part(text)
    else:
        assert _read_part(text) == part
    for rule in ("step", "all", "1", str(MOST_BANDS)):
        _check_group_steps(rule)
    for rule in ("", "0", "-1", "1.5", "every", str(MOST_BANDS + 1)):
        with pytest.raises(LyditeError, match="--group-steps"):
            _check_group_steps(rule)


def test_bad_input_is_one_clear_error(drawn: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.sqlite"
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.sqlite").write_text("no database at all, but long enough to be read as one")
    with contextlib.closing(sqlite3.connect(tmp_path / "other.sqlite")) as connection:
        connection.execute("CREATE TABLE t (x)")
    settings = CalibrationSet.open(drawn).settings
    Writer.start(tmp_path / "bare", settings, plan_of([("a", 0)], [0], pictures=False)).close()
    for arguments, message in (
        ((tmp_path / "empty", "--out", out), "no calibration set"),
        ((tmp_path / "nothing", "--plot", tmp_path / "a.png"), "no such file"),
        ((tmp_path / "bare", "--out", out), "holds no samples"),
        ((tmp_path / "text.sqlite", "--plot", tmp_path / "a.png"), "not statistics of activations"),
        ((tmp_path / "other.sqlite", "--plot", tmp_path / "a.png"), "another SQLite file"),
        ((drawn,), "--out is missing"),
        ((drawn, drawn, "--out", out), "one set at a time"),
        ((drawn, "--out", out, "--group-steps", "week"), "--group-steps is .week"),
        ((drawn, "--out", out, "--part", "3/2"), "--part is '3/2'"),
        ((drawn, "--out", out, "--plot", tmp_path / "a.pdf"), "ends in .html or .png"),
        ((drawn, "--out", tmp_path, "-q"), "is a folder"),
        ((drawn, "--out", tmp_path / "out.parquet"), "written as SQLite"),
        ((drawn, "--out", out, "--model", tmp_path / "gone"), "no such file or folder"),
    ):
        with pytest.raises(LyditeError, match=message):
            run(*arguments)
    assert not out.exists() and not list(tmp_path.glob("*.work"))
