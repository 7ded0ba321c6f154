"""Progress of long work, on a terminal and elsewhere."""

import io
import sys
from itertools import count
from pathlib import Path

import pytest

from lydite.cli.progress import StepBar


def test_a_line_is_written_at_most_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = count(0, 4)
    with StepBar(12, quiet=False, clock=lambda: float(next(ticks))) as bar:
        for _ in range(12):
            bar.advance()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"step {step} of 12" for step in (3, 6, 9, 12)
    ]
    assert "4 s/step" in lines[0] and "36 s left" in lines[0]


def test_quiet_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = count(0, 100)
    with StepBar(3, quiet=True, clock=lambda: float(next(ticks))) as bar:
        for _ in range(3):
            bar.advance()
        bar.print("a line")
        bar.saved(Path("a.png"), 7)
    assert capsys.readouterr() == ("", "")


def test_the_path_of_a_picture_goes_to_stdout_and_the_rest_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StepBar(0, quiet=False) as bar:
        bar.print("a line")
        bar.saved(Path("a.png"), 7)
    assert capsys.readouterr() == ("a.png\n", "a line\n")


def test_on_a_terminal_lines_stand_above_the_bar_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, ticks = Terminal(), count(0, 100)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with StepBar(3, quiet=False, clock=lambda: float(next(ticks))) as bar:
        bar.print("[red] \x1b[2J :cat:")
        bar.saved(Path("a.png"), 7)
        for _ in range(3):
            bar.advance()
    shown = terminal.getvalue()
    assert "[red] \\x1b[2J :cat:" in shown and "a.png  seed 7" in shown
    assert "3/3" in shown and "100 s/step" in shown and "of 3" not in shown
    assert capsys.readouterr().out == ""
