"""Ctrl-C and SIGTERM at moments that are easily forgotten: one word, status 130, no traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from lydite.calibrate.run import RunCallbacks
from lydite.cli.calibrate import draw_missing
from lydite.cli.calibrate.draw_missing import StopRequest
from lydite.cli.progress import StepBar
from support.calibration import same_blas
from support.calibration_cli import SMALL, calibrate


def run(untrained: Path, folder: Path, *hands: object) -> subprocess.Popen[str]:
    """A long run in a session of its own."""
    prompts = folder.parent / "prompts.txt"
    prompts.write_text("a red star\na fox in snow\n")
    words = [sys.executable, "-m", "lydite", "calibrate", "run", "-m", untrained, *SMALL, *hands,
             "--prompts", prompts, "--images", 500, "--out", folder]  # fmt: skip
    return subprocess.Popen(
        [str(word) for word in words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **same_blas()},
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def count_workers(group: int) -> int:
    listed = subprocess.run(
        ["ps", "-eww", "-o", "pgid,args"], capture_output=True, text=True, check=True
    )
    lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines()]
    return sum(line[0] == str(group) and "spawn_main" in line[1] for line in lines if line[1:])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once_and_the_old_handlers_come_back(number: int) -> None:
    before, stop = signal.getsignal(number), StopRequest()
    with stop.listening():
        signal.raise_signal(number)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("finished", [0, 1, 3])
def test_a_stopped_run_says_how_much_is_drawn(
    finished: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks: list[None] = []
    monkeypatch.setattr(StepBar, "advance", lambda _: ticks.append(None))

    def draw(*given: Any) -> None:
        callbacks: RunCallbacks = given[-1]
        for image in range(finished):
            callbacks.stepped(image, 0)  # a worker that is lost began it
            callbacks.finished(image)
        callbacks.stepped(finished, 0)
        signal.raise_signal(signal.SIGTERM)
        assert callbacks.stopping()
        raise KeyboardInterrupt

    monkeypatch.setattr(draw_missing, "_run_on_workers", draw)
    options, none = draw_missing.WorkerOptions(1, None, quiet=False), cast(Any, None)
    with pytest.raises(KeyboardInterrupt):
        draw_missing._draw(none, none, none, options, images=4, steps=2, command="again")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"stopped: {finished} of the 4 missing images are drawn. Resume with:",
        "again",
    ]
    assert len(ticks) == 2 * finished + 1


def test_an_interrupt_while_workers_start_is_heard_by_the_pool_alone(
    untrained: Path, tmp_path: Path
) -> None:
    process = run(untrained, tmp_path / "set", "--workers", 2)
    wait_for(lambda: count_workers(process.pid) > 0)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors and "a worker ended" not in errors
    assert f"lydite calibrate run --out {tmp_path / 'set'} --workers 2\n" in errors


def test_sigterm_ends_a_run_on_ray_as_it_ends_any_other(untrained: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = tmp_path / "set"
    process = run(untrained, folder, "--ray", "auto")
    wait_for(lambda: bool(list(folder.glob("shards/*.safetensors"))))
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors and "***" not in errors
    assert f"lydite calibrate run --out {folder} --ray auto\n" in errors
    found = json.loads(calibrate("verify", folder, "--json").stdout)
    assert found["verdict"] == "incomplete" and found["items"]["picture"] >= 1
