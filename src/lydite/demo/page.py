"""The chapters in order, their folder, and the page they end in."""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from lydite import __version__
from lydite.core import files
from lydite.core.device import current_device
from lydite.core.errors import FileError, at
from lydite.core.files import read_bounded
from lydite.demo.chapter import DemoChapter, Result
from lydite.demo.chapters import (
    accuracy,
    against_diffusers,
    audit,
    contact_sheet,
    planted_bug,
    quantized,
    reproduce_from_png,
    steps,
)
from lydite.report.page import Chapter, Commands, Page, made_here, render

PAGE = "index.html"
MOST_BYTES = 2**28  # of a page
CHAPTERS: tuple[DemoChapter, ...] = (
    audit.CHAPTER,
    contact_sheet.CHAPTER,
    steps.CHAPTER,
    accuracy.CHAPTER,
    against_diffusers.CHAPTER,
    planted_bug.CHAPTER,
    quantized.CHAPTER,
    reproduce_from_png.CHAPTER,
)
NEXT = (
    'lydite generate "a small pink heart above a large blue square"',
    "lydite inspect YOUR-MODEL",
    "lydite audit YOUR-MODEL",
    "lydite parity YOUR-MODEL",
    "lydite quantize YOUR-MODEL --prompts PROMPTS.txt --out q4",
    'lydite generate "a red fox in snow" --model YOUR-MODEL',
)


def make_folder(folder: Path) -> Path:
    """Make the folder; FileError when its page would replace one that is not ours."""
    files.make_folder(folder)
    try:
        holds_files = any(folder.iterdir())
    except OSError as error:
        raise files.DiskError(folder, error) from error
    page = folder / PAGE
    if holds_files and not (page.exists() and made_here(read_bounded(page, MOST_BYTES))):
        raise FileError(
            f"{at(folder)}: holds files, and no page of an earlier demo; name another folder with "
            "--out."
        )
    files.try_folder(folder)
    return folder


def write_page(folder: Path, results: Sequence[Result]) -> Path:
    """One page of all chapters, with the pictures inside, at index.html."""
    lead = (
        "Lydite runs, verifies and quantizes diffusion models on MLX. Everything below was drawn, "
        "judged and checked by lydite demo on one machine, with the tiny Stable Diffusion 3 inside "
        "the package. Nothing was downloaded."
    )
    onwards = Chapter(
        "Now your own",
        "The same commands take a model of any family in README.md: a folder, a file, a hub id.",
        (Commands(NEXT),),
    )
    page = Page(
        "Lydite demo",
        lead,
        (*(one.chapter for one in results), onwards),
        facts=tuple(one.fact for one in results if one.fact),
        footer=_footer(),
    )
    files.write_atomic(folder / PAGE, render(page))
    return folder / PAGE


def _footer() -> str:
    return (
        f"lydite {__version__}, MLX {version('mlx')} on {current_device().describe()}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}. "
        "This page contains its pictures and loads nothing from the internet."
    )
