"""`lydite evaluate` on the embedded model: figures, records, resuming, errors of one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from lydite.cli.main import lydite
from lydite.core.errors import LyditeError

DRAW = ["--images", "3", "--steps", "2", "-q"]


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(lydite, ["evaluate", *map(str, arguments)])


def _json(*arguments: object) -> Any:
    result = _run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    _json("embedded", "--against", "embedded", "--bits", "3", *DRAW, "--out", folder)
    return folder


def test_both_models_are_drawn_and_compared(run: Path) -> None:
    record = json.loads((run / "evaluation.json").read_text())
    assert record["paired"]["psnr"]["n"] == 3 and 5 < record["paired"]["psnr"]["mean"] < 60
    assert record["paired"]["latent_error"]["mean"] > 0
    assert {"frechet_judge", "prompt_accuracy_candidate"} <= record["distribution"].keys()
    assert record["record"]["candidate"]["bits"] == 3
    assert record["record"]["request"]["steps"] == 2
    assert record["steps"][0]["error"]["max"] == 0  # the same noise


def test_a_record_that_is_not_of_an_evaluation_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text("mine")
    result = _run("embedded", "--against", "embedded", *DRAW, "--out", tmp_path)
    assert isinstance(result.exception, LyditeError) and "another folder" in str(result.exception)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_that_lost_its_end_is_resumed_to_the_same_record(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "evaluation.json").unlink()
    last = max((copy / "candidate" / "shards").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    last.unlink()
    _json("embedded", "--against", "embedded", "--bits", "3", *DRAW, "--out", copy)
    assert (copy / "evaluation.json").read_bytes() == (run / "evaluation.json").read_bytes()


def test_a_set_is_a_reference_that_is_not_drawn_again(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    arguments = "embedded", "--against", run / "reference", "--out", out, "-q"
    result = _json(*arguments, "--html", tmp_path / "page.html")
    assert result["identical"] == 3 and result["paired"]["latent_error"]["max"] == 0
    assert not (out / "reference").exists()
    assert b"3 pairs are identical" in (tmp_path / "page.html").read_bytes()


def test_sets_are_compared_without_a_model(run: Path) -> None:
    whole = json.loads((run / "evaluation.json").read_text())
    two = _json("set", run / "candidate", "--against", run / "reference")
    assert two["paired"] == whole["paired"] and two["steps"] == whole["steps"]
    images = _json("images", run / "reference", run / "candidate")
    assert images["paired"]["psnr"] == whole["paired"]["psnr"]
    assert "prompt_accuracy" in _json("set", run / "candidate")["distribution"]


def test_other_settings_in_the_same_folder_are_refused(run: Path) -> None:
    result = _run("embedded", "--against", "embedded", "--bits", "4", *DRAW, "--out", run)
    assert isinstance(result.exception, LyditeError)


def test_errors_are_one_line_each(tmp_path: Path, run: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    Image.new("RGB", (20, 20)).save(other / "x.png")
    missing = tmp_path / "missing.pth"
    for arguments, text in (
        (("images", empty, other), "no picture"),
        (("images", other, tmp_path / "nowhere"), "no such"),
        (("images", other, run / "candidate"), "no name in common"),
        (("images", other, other, "--unpaired"), "--inception"),
        (("images", other, other, "--common", "--unpaired"), "exclude"),
        (("images", other, other, "--inception", missing), "no such file"),
        (("images", other, other, "--lpips", "squeeze", missing, missing), "alex or vgg"),
        (("images", other, other, "--html", other / "page.html"), "input"),
        (("embedded", "--against", run / "reference", "--images", "3"), "own prompts"),
        (("set", other), "set.json"),
    ):
        result = _run(*arguments)
        assert isinstance(result.exception, LyditeError), (arguments, result.output)
        message = str(result.exception)
        assert text in message and "\n" not in message, message


def test_help_teaches() -> None:
    for arguments in (), ("models",), ("images",), ("set",):
        result = _run(*arguments, "--help")
        assert result.exit_code == 0 and "lydite evaluate" in result.output
