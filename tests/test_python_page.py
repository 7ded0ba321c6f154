"""docs/python.md and README's example, run as they stand there."""

import contextlib
import importlib.util
import inspect
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lydite
from lydite.core import errors
from lydite.core.request import FIELDS
from lydite.pipelines.observer import Observer
from lydite.pipelines.pipeline import Pipeline

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/python.md"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/run_doc_commands.py, which runs any page in processes of its own."""
    spec = importlib.util.spec_from_file_location("run_doc", ROOT / "tools/run_doc_commands.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def run(block: Any) -> str:
    """What a block prints; exec is faster than a process for each."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(block.text, f"{PAGE.name}:{block.line}", "exec"), {})
    return said.getvalue()


def test_the_page_prints_what_it_says(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = tool.blocks(PAGE.read_text())
    assert len(blocks) >= 8 and all(block.language == "python" for block in blocks)
    assert {block.line: tool.unsaid(block, run(block)) for block in blocks} == {
        block.line: [] for block in blocks
    }


def test_the_example_of_the_readme_runs_twice(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (b for b in tool.blocks((ROOT / "README.md").read_text()) if b.language == "python")
    for _ in range(2):
        run(block)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"heart_{seed}.png" for seed in (1, 2, 3)
    ]


def options() -> list[str]:
    return [name for name in inspect.signature(Pipeline.open).parameters if name != "model"]


def test_the_page_names_every_field_option_and_error() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(named) == sorted([*FIELDS, *options()])
    kinds = [each.__name__ for each in errors.LyditeError.__subclasses__()]
    own = {name for name in kinds if hasattr(errors, name)}
    assert {name for name in own if f"`{name}`" not in text} == set()
    assert Observer.__name__ in text


def test_the_help_of_open_names_every_option() -> None:
    text = lydite.open.__doc__ or ""
    assert [name for name in options() if f"    {name}: " not in text] == []
