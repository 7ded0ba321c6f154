"""Command lines that cannot be followed: one line that says why, and nothing is written."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lydite.calibrate.settings import Settings, plan_of
from lydite.calibrate.store.writer import Writer
from lydite.cli.calibrate.activations import MOST_BANDS, _check_group_steps
from lydite.cli.main import lydite
from lydite.cli.sampler.options import shared_noise_models
from lydite.core.errors import InputError, LyditeError
from lydite.sampling.registry import SAMPLERS, SCHEDULES
from support import calibration


def run(*arguments: object) -> Result:
    return CliRunner().invoke(lydite, [str(each) for each in arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("calibrate activations FILE FILE", "--out is missing: the file that is merged into"),
        ("calibrate activations FILE", "nothing to do: give a set and --out"),
        ("calibrate activations SET", "--out is missing: the file that the statistics go to"),
        ("calibrate activations SET FILE --out NEW", "one set at a time"),
        ("calibrate activations FILE --out NEW.parquet", "written as SQLite"),
        ("calibrate activations MISSING --out NEW", "no such file or folder"),
        ("calibrate import MISSING --out NEW", "no such folder"),
        ("calibrate import FILE --out NEW", "no such folder"),
        ("calibrate import SET --out NEW --settings FILE", "not JSON|JSON object"),
        ("calibrate import SET --out NEW --settings BAD", "Expected model_hash, conditions"),
        ("calibrate import SET --out NEW --settings GOOD", "manifest.json: no such file"),
        ("evaluate set BEGUN", "the set lacks 1 image. Resume it"),
        ("quantize UNTRAINED --set BEGUN --out NEW", "the set is not complete"),
        ("quantize UNTRAINED --out NEW", "no prompts: give --prompts FILE or --set SET"),
        (
            "quantize UNTRAINED --out NEW --eval-prompts LIST.txt",
            "no calibration set: give --set SET",
        ),
        ("sampler compare euler karras", "not of one kind"),
        ("sampler conform FILE --write NEW", "judging takes PROBLEM and ANSWER without it"),
        ("sampler conform FILE FILE --write NEW", "judging takes PROBLEM and ANSWER without it"),
    ],
)
def test_a_command_that_cannot_be_followed(
    arguments: str, message: str, tmp_path: Path, untrained: Path
) -> None:
    folders = {"SET": tmp_path / "set", "BEGUN": tmp_path / "begun"}
    with Writer.start(folders["BEGUN"], Settings("f00d", {}, "F32"), plan_of([("a", 0)], ())):
        pass
    folders["SET"].mkdir()
    files = {name: tmp_path / name for name in ("FILE", "BAD", "GOOD")}
    files["FILE"].write_text("no JSON")
    (tmp_path / "LIST.txt").write_text("a cat\n")
    files["BAD"].write_text(json.dumps({"model_hash": 3}))
    good = {"model_hash": "f00d", "conditions": {}, "dtype": "F32"}
    files["GOOD"].write_text(json.dumps(good))
    names: dict[str, Any] = {**folders, **files, "UNTRAINED": untrained}
    words = [
        names.get(word, tmp_path / word) if word.split(".")[0].isupper() else word
        for word in arguments.split()
    ]
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    result = run(*words)
    assert isinstance(result.exception, LyditeError), result.output
    with pytest.raises(LyditeError, match=message):
        raise result.exception
    assert "\n" not in str(result.exception) and not list(tmp_path.glob("NEW"))
    assert all(
        path.is_file() and path.read_bytes() == data for path, data in before.items() if data
    )


def test_any_two_samplers_and_any_two_schedules_are_for_one_noise_model() -> None:
    """So that `sampler compare` and `sampler plot` need not refuse a pair."""
    for methods in (SAMPLERS, SCHEDULES):
        for one in methods.values():
            assert all(shared_noise_models([one, other]) for other in methods.values())


def test_a_set_of_more_images_than_a_set_has_is_refused(
    tmp_path: Path, untrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nb\nc\n")
    arguments = ["calibrate", "run", "--prompts", prompts, "--model", untrained, "--size", "32x32"]
    arguments += ["--steps", 1, "--out", tmp_path / "set", "--text-length", 4]
    monkeypatch.setattr("lydite.cli.calibrate.run.MOST_IMAGES", 2)
    result = run(*arguments)
    assert isinstance(result.exception, InputError)
    assert "3 prompts, and a set has at most 2 images" in str(result.exception)
    assert not (tmp_path / "set").exists()
    monkeypatch.setattr("lydite.cli.calibrate.run.MOST_IMAGES", 3)
    result = run(*arguments)
    assert result.exit_code == 0, result.exception
    assert "note: 1 prompts come twice and are used once." in result.stderr


def test_the_sheet_of_a_damaged_set_is_not_written(tmp_path: Path) -> None:
    folder, sheet = tmp_path / "set", tmp_path / "sheet.png"
    calibration.draw(folder, 2)
    assert run("calibrate", "verify", folder, "--sheet", sheet).exit_code == 0 and sheet.exists()
    sheet.unlink()
    shard = next((folder / "shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    result = run("calibrate", "verify", folder, "--sheet", sheet)
    assert result.exit_code == 1 and not sheet.exists()
    assert "not written, since the set is damaged" in result.output
    assert f"lydite calibrate repair {folder}" in result.output


@pytest.mark.parametrize(
    ("rule", "sound"),
    [("step", True), ("all", True), ("1", True), (f"{MOST_BANDS}", True), ("0", False),
     (f"{MOST_BANDS + 1}", False), ("-1", False), ("steps", False), ("", False), ("1.5", False)],
)  # fmt: skip
def test_steps_are_grouped_by_a_word_or_a_number(rule: str, sound: bool) -> None:
    with nullcontext() if sound else pytest.raises(InputError, match="--group-steps is"):
        _check_group_steps(rule)
