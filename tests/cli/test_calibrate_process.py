"""`lydite calibrate run` as a process: killed, interrupted, out of disk, alone and with workers."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.errors import FileError
from support.calibration import FaultyDisk, faulty, same_blas
from support.calibration_cli import SMALL, calibrate, content

Command = list[object]


@pytest.fixture(scope="module")
def command(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A run, but for its images and its folder."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.csv"
    prompts.write_text("id,prompt\n1,a red star\n2,a fox in snow\n")
    return ["run", "-m", untrained, "--prompts", prompts, *SMALL]


@pytest.fixture(scope="module")
def whole(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images made in one go."""
    folder = tmp_path_factory.mktemp("sets") / "whole"
    assert calibrate(*command, "--images", 3, "--out", folder).exit_code == 0
    return folder


def started(*arguments: object, out: Path) -> subprocess.Popen[str]:
    """A real run in a session of its own, of which at least one image is committed."""
    words = [sys.executable, "-m", "lydite", "calibrate", *arguments, "--out", out]
    process = subprocess.Popen(
        [str(word) for word in words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **same_blas()},
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(out.glob("shards/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return process


def check_cut(folder: Path, whole: Path) -> None:
    """What a cut run left is sound, and equal to what an uninterrupted one makes."""
    found = json.loads(calibrate("verify", folder, "--json").stdout)
    assert found["sound"] and not found["complete"] and found["items"]["picture"] >= 1
    with CalibrationSet.open(folder) as cut, CalibrationSet.open(whole) as made:
        kept = {row.key: row.digest for row in cut.rows(None)}
        known = {row.key: row.digest for row in made.rows(None)}
    shared = kept.keys() & known.keys()
    assert shared and all(kept[key] == known[key] for key in shared)


def check_nobody_left(group: int) -> None:
    """The session of a run has no process any more."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a worker outlived its run")


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGKILL, 1),
        (signal.SIGKILL, 2),
        (signal.SIGINT, 1),
        (signal.SIGINT, 2),
        (signal.SIGTERM, 1),
    ],
)
def test_a_run_that_is_stopped_leaves_a_sound_set_and_says_how_to_go_on(
    command: Command, whole: Path, tmp_path: Path, number: signal.Signals, workers: int
) -> None:
    folder = tmp_path / "a set"
    process = started(*command, "--images", 500, "--workers", workers, out=folder)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal sends it: to the workers, too
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    check_nobody_left(process.pid)
    check_cut(folder, whole)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert f"lydite calibrate run --out '{folder}'" in errors


def test_a_killed_run_resumed_by_its_folder_alone_has_the_content_of_an_uninterrupted_one(
    command: Command, whole: Path, tmp_path: Path
) -> None:
    process = started(*command, "--images", 3, out=tmp_path / "set")
    process.kill()
    process.communicate(timeout=60)
    words = [sys.executable, "-m", "lydite", "calibrate", "verify", str(tmp_path / "set")]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert said.returncode == 1 and "Resume with: lydite calibrate run --out" in said.stdout
    assert calibrate("run", "--out", tmp_path / "set").exit_code == 0
    assert content(tmp_path / "set") == content(whole)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_full_disk_stops_the_run_with_the_command_to_go_on(
    command: Command, whole: Path, tmp_path: Path, share: float
) -> None:
    run = [*command, "--images", 3, "--out"]
    with faulty(FaultyDisk()) as healthy:
        assert calibrate(*run, tmp_path / "counted").exit_code == 0
    folder = tmp_path / "set"
    with faulty(FaultyDisk(int(healthy.calls * share), "ENOSPC", once=False)):
        result = calibrate(*run, folder)
    assert isinstance(result.exception, FileError)
    message = str(result.exception)
    assert "No space left" in message
    assert f"resume with: lydite calibrate run --out {folder}" in message and " free" in message
    assert json.loads(calibrate("verify", folder, "--json").stdout)["sound"]
    assert calibrate("run", "--out", folder).exit_code == 0
    assert content(folder) == content(whole)


def test_before_there_is_a_set_the_command_to_go_on_with_is_the_one_that_was_typed(
    command: Command, whole: Path, tmp_path: Path
) -> None:
    folder, again = tmp_path / "a set", list[str]()
    noisy = ["--sampler", "euler_ancestral", "--option", "s_noise=0.9", "--option", "eta=0.5"]
    for more in ([*noisy, "--conditioning"], ["--images", 3]):
        words = [str(word) for word in (*command, *more, "--out", folder)]
        with faulty(FaultyDisk(1, "ENOSPC")):
            message = str(calibrate(*words).exception)
        again = shlex.split(message.split("resume with: lydite calibrate ")[1])
        assert sorted(again) == sorted("--model" if word == "-m" else word for word in words)
    assert calibrate(*again).exit_code == 0
    assert content(folder) == content(whole)


def test_a_model_that_has_moved_is_named_in_the_command_to_go_on_with(
    untrained: Path, whole: Path, tmp_path: Path
) -> None:
    folder, model = tmp_path / "set", shutil.copytree(untrained, tmp_path / "a model")
    shutil.copytree(whole, folder)
    for words in (
        ["run", "--out", folder],
        ["activations", whole, "--out", tmp_path / "out.sqlite"],
        ["blocks", whole, "--out", tmp_path / "blocks"],
    ):
        with faulty(FaultyDisk(1, "EIO")):
            message = str(calibrate(*words, "--model", model, "--components", model).exception)
        told = shlex.split(message.split("resume with: ")[1])
        assert told[told.index("--model") + 1] == told[told.index("--components") + 1] == str(model)
