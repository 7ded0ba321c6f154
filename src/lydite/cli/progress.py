"""A progress bar with seconds per step, on stderr."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class StepBar:
    """Counts steps; lines printed meanwhile appear above it."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("steps"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("steps", total=total, pace="")
        self._start: float | None = None
        self._done = 0

    def advance(self) -> None:
        """One more step is done."""
        now = time.perf_counter()
        self._done += 1
        if self._start is None:  # the first step also warms up; it does not count
            self._start, pace = now, ""
        else:
            pace = f"{(now - self._start) / (self._done - 1):.3g} s/it"
        self._progress.update(self._task, advance=1, pace=pace)

    def print(self, line: str) -> None:
        """A line above the bar."""
        if self._quiet:
            return
        if self._progress.disable:
            click.echo(line, err=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def saved(self, path: Path, seed: int) -> None:
        """A picture is on disk: its path to stdout, for scripts; the seed for people."""
        if self._quiet:
            return
        if self._progress.disable:
            click.echo(path)
        else:
            self.print(f"{path}  seed {seed}")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
