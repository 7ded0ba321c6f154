"""Progress of long work on stderr: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from lydite.cli.safe_streams import escape, progress_stream

EVERY = 10.0  # seconds between two lines where there is no terminal


class StepBar:
    """Counts steps; lines printed meanwhile appear above the bar."""

    def __init__(
        self,
        total: int,
        *,
        quiet: bool,
        unit: str = "step",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._quiet, self._total, self._unit, self._clock = quiet, total, unit, clock
        console = Console(file=progress_stream())
        self._bar = Progress(
            TextColumn(f"{unit}s"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task(unit, total=total, pace="")
        self._start: float | None = None
        self._last = clock()
        self._done = 0

    def advance(self) -> None:
        """One more step is done."""
        now = self._clock()
        self._done += 1
        pace = ""
        if self._start is None:  # the first step also warms up; it does not count
            self._start = now
        else:
            seconds = (now - self._start) / (self._done - 1)
            pace = f"{seconds:.3g} s/{self._unit}"
            if self._bar.disable and now - self._last >= EVERY:
                self._last = now
                left = seconds * (self._total - self._done)
                self.print(f"{self._unit} {self._done} of {self._total}, {pace}, {left:.0f} s left")
        self._bar.update(self._task, advance=1, pace=pace)

    def print(self, line: str) -> None:
        """A line above the bar."""
        if self._quiet:
            return
        if self._bar.disable:
            click.echo(line, err=True)
        else:
            text = Text(escape(line))  # not markup, no :emoji:
            self._bar.console.print(text, soft_wrap=True)

    def saved(self, path: Path, seed: int) -> None:
        """A picture is on disk: its path to stdout, for scripts; the seed for people."""
        if self._quiet:
            return
        if self._bar.disable:
            click.echo(path)
        else:
            self.print(f"{path}  seed {seed}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
