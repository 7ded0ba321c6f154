"""Progress of long work where there is no terminal."""

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
