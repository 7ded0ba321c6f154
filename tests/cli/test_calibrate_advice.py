"""What `lydite calibrate` advises is what helps."""

import json
import os
import shutil
from pathlib import Path

import pytest

from support.calibration_cli import SMALL, calibrate, content


@pytest.fixture(scope="module")
def drawn(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a set of two images drawn with it."""
    place = tmp_path_factory.mktemp("advice")
    model = shutil.copytree(untrained, place / "model")
    (place / "prompts.txt").write_text("a red star\na fox in snow\n")
    result = calibrate("run", "-m", model, "--prompts", place / "prompts.txt", *SMALL,
                       "--out", place / "set")  # fmt: skip
    assert result.exit_code == 0, result.exception
    return model, place / "set"


def copied(folder: Path, to: Path, *, lose: int = 0) -> Path:
    shutil.copytree(folder, to)
    for path in sorted((to / "shards").iterdir())[:lose]:
        path.unlink()
    return to


def test_a_complete_set_is_repaired_without_its_model(
    drawn: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = copied(drawn[1], tmp_path / "set")
    text = (folder / "set.json").read_text()
    (folder / "set.json").write_text(text.replace(str(drawn[0]), str(tmp_path / "moved")))
    result = calibrate("repair", folder)
    assert result.exit_code == 0 and "wrote set.json again from the shards" in result.stdout
    assert content(folder) == content(drawn[1])


def test_a_model_that_moved_is_asked_for_once(drawn: tuple[Path, Path], tmp_path: Path) -> None:
    model, whole = drawn
    folder = copied(whole, tmp_path / "set", lose=1)
    calibrate("repair", folder, "--no-run")
    moved = shutil.copytree(model, tmp_path / "moved")
    hidden = model.rename(model.with_name("hidden"))
    try:
        result = calibrate("run", "--out", folder)
        assert "if it moved, give --model" in str(result.exception)
        assert calibrate("run", "--out", folder, "--model", moved).exit_code == 0
    finally:
        hidden.rename(model)
    assert content(folder) == content(whole)
    assert json.loads(calibrate("status", folder, "--json").stdout)["model"] == str(moved)


def test_damaged_shards_are_shown_by_status_and_refused_by_run(
    drawn: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = copied(drawn[1], tmp_path / "set")
    os.truncate(next((folder / "shards").iterdir()), 1000)
    shown = calibrate("status", folder).stdout
    assert f"Run: lydite calibrate repair {folder}" in shown and "content" not in shown
    assert "lydite calibrate repair" in str(calibrate("run", "--out", folder).exception)
    assert calibrate("repair", folder).exit_code == 0
    assert content(folder) == content(drawn[1])


def test_unfinished_blocks_are_gone_on_with_by_blocks(
    drawn: tuple[Path, Path], tmp_path: Path
) -> None:
    blocks = tmp_path / "blocks"
    words = ["blocks", drawn[1], "--out", blocks, "--tokens", 4]
    assert calibrate(*words).exit_code == 0
    whole = content(blocks)
    sorted((blocks / "shards").iterdir())[0].unlink()
    told = [calibrate("repair", blocks), calibrate("status", blocks), calibrate("verify", blocks)]
    assert [each.exit_code for each in told] == [0, 0, 1]
    for each in told:
        assert "the lydite calibrate blocks command that made it" in each.stdout
    assert calibrate(*words).exit_code == 0 and content(blocks) == whole


def test_fewer_images_than_planned_are_noted(drawn: tuple[Path, Path]) -> None:
    model, folder = drawn
    prompts = folder.with_name("prompts.txt")
    result = calibrate("run", "-m", model, "--prompts", prompts, "--images", 1, *SMALL,
                       "--out", folder)  # fmt: skip
    assert result.exit_code == 0 and "never removed" in result.stderr
