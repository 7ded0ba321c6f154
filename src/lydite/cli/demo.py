"""`lydite demo`: every main feature on the model inside the package."""

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from lydite.cli.request_options import device_option
from lydite.cli.safe_streams import progress_stream
from lydite.core.errors import InputError


@click.command("demo")
@device_option
@click.option(
    "-o",
    "--out",
    metavar="FOLDER",
    default="demo",
    show_default=True,
    help="Folder for the page and the pictures; those of an earlier demo are replaced.",
)
def command(out: str) -> None:
    """Draw, judge, compare and replay with the model inside the package: a minute or two.

    The model is a tiny Stable Diffusion 3, trained on drawn scenes: shapes, colours, sizes, places
    and backgrounds. Nothing is downloaded. The demo audits it, draws a contact sheet, shows one
    picture step by step, judges three dozen unseen prompts and shows every miss, compares a picture
    with diffusers' where that is installed, finds a planted bug, and replays a picture from its
    PNG.

    \b
    lydite demo                       everything in demo/; open demo/index.html
    lydite demo --out /tmp/lydite     somewhere else

    The page contains its pictures, so it can be mailed; the PNGs are beside it. Exit status: 0
    fine, 1 a tensor or a replayed pixel is wrong, 2 the folder could not be used, 130 interrupted.
    """
    if not out:
        raise InputError("--out is empty; expected a folder.")
    from lydite import embedded
    from lydite.demo.chapter import Settings
    from lydite.demo.demo import Demo
    from lydite.demo.page import CHAPTERS, make_folder, write_page

    start = time.perf_counter()
    demo = Demo(make_folder(Path(out)), Settings())
    results = []
    for number, chapter in enumerate(CHAPTERS, 1):
        click.secho(f"{number}  {chapter.title}", bold=True)
        with _bar(chapter.steps(demo.settings)) as tick:
            results.append(chapter.run(demo, tick))
        for line in results[-1].lines:
            click.echo(f"   {line}")
    page = write_page(demo.folder, results)

    seconds = time.perf_counter() - start
    lydite = shlex.quote(sys.argv[0])
    click.secho(f"Everything on one page, in {seconds:.0f} s: {page}", bold=True)
    click.echo("Next:")
    click.echo(f'   {lydite} generate "a small pink heart above a large blue square"')
    click.echo(f"   {lydite} inspect {shlex.quote(str(embedded.MODEL))}")
    click.echo(f'   {lydite} generate "a red fox" --model YOUR-MODEL')
    if not all(one.passed for one in results):
        sys.exit(1)


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr that is gone when the chapter ends; none without a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(file=progress_stream())
    columns = (SpinnerColumn(), TextColumn("steps"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not (steps and console.is_terminal),
    ) as progress:
        task = progress.add_task("", total=steps)
        yield lambda: progress.advance(task)
