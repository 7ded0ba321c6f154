"""`lydite demo` as a person runs it, on a few small pictures."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lydite.cli.main import lydite
from lydite.core.errors import FileError, InputError
from lydite.demo import chapter, page
from lydite.demo.chapter import DemoChapter, Settings
from lydite.demo.chapter import Result as ChapterResult
from lydite.demo.chapters import against_diffusers, audit, contact_sheet, reproduce_from_png
from lydite.pipelines.picture import read_pixels
from lydite.reference.jobs import ReferenceMissing
from lydite.report.page import Chapter

FEW = Settings(prompts=("a large red star above a small blue ring",), held_out=1, steps=2)


@pytest.fixture
def few(monkeypatch) -> None:
    """A small demo on a machine without diffusers."""

    def missing(*arguments: object, **options: object) -> None:
        raise ReferenceMissing("torch is not installed; pip install 'lydite[reference]' adds it.")

    monkeypatch.setattr(chapter, "Settings", lambda: FEW)
    monkeypatch.setattr(against_diffusers, "run_job", missing)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(lydite, ["demo", *map(str, arguments)])


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_chapters_run_and_an_earlier_demo_is_replaced(few, tmp_path, monkeypatch) -> None:
    quick = (
        audit.CHAPTER,
        contact_sheet.CHAPTER,
        against_diffusers.CHAPTER,
        reproduce_from_png.CHAPTER,
    )
    monkeypatch.setattr(page, "CHAPTERS", quick)  # tests/demo/test_page.py runs all of them
    folder = tmp_path / "a b" / "demo"
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures/01.png").write_text("of an earlier demo")
    page.write_page(folder, [])
    result = run("-o", folder)
    assert result.exit_code == 0, result.exception
    for number, demo_chapter in enumerate(page.CHAPTERS, 1):
        assert f"{number}  {demo_chapter.title}" in result.stdout
    assert "clean" in result.stdout and "identical" in result.stdout
    assert "Skipped: torch is not installed" in result.stdout
    assert f"{folder / 'index.html'}" in result.stdout and "generate" in result.stdout
    assert not result.stderr
    assert {"index.html", "sheet.png", "pictures/01.png"} <= names(folder)
    assert read_pixels(folder / "pictures/01.png").shape == (128, 128, 3)
    assert page.CHAPTERS[0].title in (folder / "index.html").read_text()
    assert not [name for name in names(folder) if name.endswith(".part")]


@pytest.mark.parametrize("passed", [(True, True), (True, False), (False, True), (False,)])
def test_a_chapter_that_is_wrong_ends_with_1_after_the_page(
    passed: tuple[bool, ...], few, tmp_path, monkeypatch
) -> None:
    results = iter([ChapterResult(("line",), Chapter("t", "l"), passed=each) for each in passed])
    demo_chapter = DemoChapter("t", lambda settings: 0, lambda demo, tick: next(results))
    monkeypatch.setattr(page, "CHAPTERS", (demo_chapter,) * len(passed))
    assert run("-o", tmp_path).exit_code == (0 if all(passed) else 1)
    assert (tmp_path / "index.html").is_file()


def test_a_folder_that_cannot_be_used_is_one_clear_error_before_any_work(few, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "index.html").write_text("somebody's")
    before = names(tmp_path)
    for out, kind, message in (
        ("", InputError, "--out is empty"),
        (tmp_path / "file", FileError, "not a folder"),
        (tmp_path, FileError, "no page of an earlier demo"),
    ):
        result = run("-o", out)
        assert isinstance(result.exception, kind) and not result.output
        assert message in str(result.exception) and "\n" not in str(result.exception)
    assert names(tmp_path) == before


def test_help_says_what_it_does_and_imports_nothing_slow() -> None:
    code = (
        "import sys; from lydite.cli.main import lydite;"
        "lydite.main(['demo', '--help'], standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('mlx.core', 'numpy', 'torch', 'jinja2')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "index.html" in done.stdout and "--out" in done.stdout


def test_ctrl_c_leaves_whole_files_and_one_line(tmp_path) -> None:
    command = [sys.executable, "-m", "lydite", "demo", "-o", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "pictures/01.png").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, "interrupted")
    left = names(tmp_path)
    assert "pictures/01.png" in left and "index.html" not in left
    assert all(read_pixels(tmp_path / name).shape == (128, 128, 3) for name in left)
