"""`lydite calibrate` as a person uses it, on the untrained model."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lydite.calibrate.store.reader import CalibrationSet
from lydite.core import files
from lydite.core.errors import LyditeError
from support.calibration_cli import SMALL, calibrate, content


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("a red star\na fox in snow\n")
    return path


@pytest.fixture(scope="module")
def whole(untrained: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images made in one go."""
    folder = tmp_path_factory.mktemp("sets") / "whole"
    result = calibrate("run", "-m", untrained, "--prompts", prompts, "--images", 3, *SMALL,
                       "--out", folder)  # fmt: skip
    assert result.exit_code == 0, result.exception
    return folder


def test_a_run_leaves_a_whole_set_that_says_what_it_holds(whole: Path, tmp_path: Path) -> None:
    told = json.loads(calibrate("status", whole, "--json").stdout)
    assert told["items"] == {"picture": 3, "sample": 6} and told["missing"] == 0
    assert told["images_complete"] == 3 and told["writer"] is None
    sheet = tmp_path / "sheet.png"
    result = calibrate("verify", whole, "--sheet", sheet)
    assert result.exit_code == 0 and "verdict   whole" in result.stdout
    with Image.open(sheet) as image:
        assert image.width == 3 * 12 + 2 * 128  # two by two
    with CalibrationSet.open(whole) as opened:
        assert [(i.prompt, i.seed) for i in opened.plan.images] == [
            ("a red star", 0), ("a fox in snow", 1), ("a red star", 2)]  # fmt: skip


def test_more_images_and_steps_are_added_and_the_order_does_not_matter(
    untrained: Path, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    run = ["run", "-m", untrained, "--prompts", prompts, *SMALL, "--out", tmp_path / "set"]
    assert calibrate(*run, "--images", 1, "--keep-steps", "1").exit_code == 0
    assert json.loads(calibrate("status", tmp_path / "set", "--json").stdout)["planned"] == 2
    assert calibrate(*run, "--images", 3).exit_code == 0
    assert content(tmp_path / "set") == content(whole)


def test_a_first_column_that_nobody_named_is_told_with_its_first_prompt(
    untrained: Path, tmp_path: Path
) -> None:
    run = ["run", "-m", untrained, *SMALL, "--keep-steps", "0", "--prompts"]
    (tmp_path / "a.csv").write_text("a red star,1\na ring,2\n")
    (tmp_path / "b.csv").write_text("id;caption\n1;a red star\n2;a ring\n")
    told = [
        calibrate(*run, tmp_path / name, "--out", tmp_path / name[0]).stderr
        for name in ("a.csv", "b.csv")
    ]
    note = "no column is called prompt, caption or text; its first is taken, which begins with 'a r"
    assert note in told[0] and "note" not in told[1]
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_other_settings_are_refused_by_name_before_the_model_is_loaded(
    untrained: Path, prompts: Path, whole: Path
) -> None:
    before = content(whole)
    run = ["run", "-m", untrained, "--prompts", prompts, *SMALL, "--out", whole]
    result = calibrate(*run, "--sampler", "heun", "--store-dtype", "bfloat16", "--guidance", 2)
    assert isinstance(result.exception, LyditeError)
    message = str(result.exception)
    for difference in ("dtype: 'F32', 'BF16'", "sampler: 'euler', 'heun'", "guidance: 7.0, 2.0"):
        assert difference in message
    assert "steps" not in message.replace("guidance_steps", "")
    result = calibrate(*run, "--seed", 5)
    assert "image 0 is 'a red star' with seed 0 there" in str(result.exception)
    assert content(whole) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "2"], "--steps without --prompts"),
        ([], "no set to resume"),
        (["--prompts", "none.txt"], "no such file"),
        (["--prompts", "PROMPTS", "--keep-steps", "0,7", "--steps", "4"], "steps 0 to 3"),
        (["--prompts", "PROMPTS", "--sampler", "dpm_adaptive"], "chooses its own steps"),
        (["--prompts", "PROMPTS", "--sampler", "nonsense"], "nonsense"),
        (["--prompts", "PROMPTS", "--model", "/nowhere"], "no such file"),
        (["--prompts", "PROMPTS", "--workers", "2", "--ray", "auto"], "exclude each other"),
    ],
)
def test_bad_options_are_refused_and_leave_no_folder(
    prompts: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    typed = [str(prompts) if each == "PROMPTS" else each for each in options]
    folder = tmp_path / "set"
    if options == ["--steps", "2"]:
        folder.mkdir()
        (folder / "set.json").write_text("{}")
    result = calibrate("run", "--out", folder, *typed)
    assert isinstance(result.exception, LyditeError) and message in str(result.exception)
    assert not (folder / "shards").exists()


@pytest.mark.parametrize(
    "verb", ["status", "verify", "repair", "rebuild", "export", "import", "merge"]
)
def test_a_folder_that_is_no_set_is_one_error(tmp_path: Path, verb: str) -> None:
    (tmp_path / "folder").mkdir()
    out = [] if verb in ("status", "verify", "repair", "rebuild") else ["--out", tmp_path / "new"]
    for folder in (tmp_path / "folder", tmp_path / "none"):
        result = calibrate(verb, folder, *out)
        assert isinstance(result.exception, LyditeError), verb
        assert str(folder) in str(result.exception)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == []


def test_too_little_room_is_refused_before_the_first_image(
    untrained: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: files.RESERVE + 20_000)
    run = ["run", "-m", untrained, "--prompts", prompts, *SMALL, "--out", tmp_path / "set"]
    result = calibrate(*run, "--images", 9)
    assert "needs about" in str(result.exception)
    assert not (tmp_path / "set").exists()
    assert calibrate(*run, "--images", 1).exit_code == 0  # as the message advises
    result = calibrate(*run, "--images", 9)  # what is there already is not counted
    assert "about 54.1 KiB" in str(result.exception)  # 8 × (2 × (1024 + 600) + 3072 + 600)


def test_damage_is_found_and_only_that_is_drawn_again(
    untrained: Path, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    calibrate("merge", whole, "--out", folder)
    with CalibrationSet.open(folder) as opened:
        row = next(row for row in opened.rows() if row.image == 1)
    shard = folder / "shards" / row.shard
    data = bytearray(shard.read_bytes())
    data[-2] ^= 1
    shard.write_bytes(data)
    result = calibrate("verify", folder)
    assert result.exit_code == 1 and "repair" in result.stdout and "image 1" in result.stdout
    result = calibrate("repair", folder, "--no-run")
    assert "dropped 1 damaged items (image 1" in result.stdout
    assert json.loads(calibrate("status", folder, "--json").stdout)["missing"] == 1
    assert calibrate("repair", folder).exit_code == 0
    assert calibrate("verify", folder).exit_code == 0 and content(folder) == content(whole)


def test_old_spellings_are_accepted_and_not_shown(
    untrained: Path, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    run = ["run", "-m", untrained, "--prompts", prompts, *SMALL, "--images", 1]
    result = calibrate(*run, "--dtype", "bf16", "--out", tmp_path / "a")
    assert result.exit_code == 2 and "--store-dtype bfloat16" in result.stderr
    old = ["--keep", "1", "--compute", "float32"]
    new = ["--keep-steps", "1", "--dtype", "float32"]
    assert calibrate(*run, *old, "--out", tmp_path / "a").exit_code == 0
    assert calibrate(*run, *new, "--out", tmp_path / "b").exit_code == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")
    shown = calibrate("run", "--help").stdout
    assert "--keep " not in shown and "--compute" not in shown and "rebuild" not in shown
    calibrate("merge", whole, "--out", tmp_path / "set")
    result = calibrate("rebuild", tmp_path / "set")
    assert result.exit_code == 0 and "no index file" in result.stderr
    assert "9 undamaged items" in result.stdout and content(tmp_path / "set") == content(whole)


def test_two_halves_merge_into_the_whole_and_travel_as_npz(
    untrained: Path, prompts: Path, whole: Path, tmp_path: Path
) -> None:
    run = ["run", "-m", untrained, *SMALL, "--prompts", prompts]
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a red star"}\n')
    calibrate(*run, "--images", 2, "--out", tmp_path / "a")
    calibrate(*run[:-1], other, "--seed", 2, "--out", tmp_path / "b")
    result = calibrate("merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c")
    assert result.exit_code == 0 and content(tmp_path / "c") == content(whole)
    assert calibrate("merge", tmp_path / "b", "--out", tmp_path / "a").exit_code == 0
    assert content(tmp_path / "a") == content(whole)  # into a set that has an image of this number
    manifest = tmp_path / "manifest.json"
    result = calibrate("export", tmp_path / "c", "--out", tmp_path / "npz", "--manifest", manifest)
    assert result.exit_code == 0
    assert json.loads(manifest.read_text())["content_hash"] == content(whole)
    with np.load(tmp_path / "npz" / "samples" / "0002_001.npz") as sample:
        assert sample["x"].shape == (4, 4, 16) and int(sample["image_id"]) == 2
    assert calibrate("import", tmp_path / "npz", "--out", tmp_path / "d").exit_code == 0
    assert content(tmp_path / "d") == content(whole)
    assert "nothing to write" in str(calibrate("export", tmp_path / "c").exception)
