"""`lydite evaluate` on the embedded model: figures, records, resuming, errors of one line."""

import json
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from PIL import Image

from lydite import embedded
from lydite.calibrate.run import Model
from lydite.calibrate.settings import digest
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.writer import Writer
from lydite.cli.evaluate import models
from lydite.cli.evaluate.metric_options import SHOWN, print_evaluation
from lydite.cli.evaluate.models import IMAGES, evaluated_images
from lydite.cli.main import lydite
from lydite.core.errors import LyditeError
from lydite.core.request import Request
from lydite.evaluate.embedded_metrics import held_out
from lydite.evaluate.evaluation import Distance, Evaluation, Pair, StepError
from lydite.evaluate.flat_field import residual_noise
from lydite.evaluate.intervals import Summary
from lydite.pipelines.pipeline import Pipeline
from support.calibration import SETTINGS, plan

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
    assert sorted(pair["seed"] for pair in record["worst"]) == [0, 1, 2]
    assert record["paired"]["psnr"]["ci95"] is None and "too few" in record["warnings"][0]
    prompts, seeds = list(held_out())[:3], list(range(3))
    assert record["record"]["prompts"] == {"count": 3, "hash": digest(prompts)}
    assert record["record"]["seeds"] == {"first": 0, "last": 2, "hash": digest(seeds)}
    for side in ("reference", "candidate"):
        with CalibrationSet.open(run / side) as drawn:
            facts = record["record"][side]
            assert facts["set"] == drawn.content_hash and facts["dtype"] == "float32"
            assert facts["model_hash"] == drawn.settings.model_hash


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


def test_other_settings_in_the_same_folder_are_refused_in_the_users_words(run: Path) -> None:
    words = ("embedded", "--against", "embedded", *DRAW, "--out", run)
    for more, text in (
        (("--bits", 4), "was begun with --bits 3, and this command is with --bits 4"),
        ((), "was begun with --bits 3, and this command is without --bits"),
        (("--bits", 3, "--dtype", "float16"), "--dtype: 'float32', 'float16'"),
        (("--bits", 3, "--seed", 9), "another folder"),
    ):
        error = _run(*words, *more).exception
        assert isinstance(error, LyditeError) and text in str(error), error
    assert json.loads((run / models.ROUNDED).read_text()) == {"bits": 3}  # a refusal leaves it
    error = _run(*words, "--bits", 4).exception
    assert f"--against {run / 'reference'}" in str(error) and "--out" in str(error)


@pytest.mark.parametrize(
    ("model", "words", "text"),
    [
        ("nopefolder", (), "nopefolder"),
        ("empty", (), "empty"),
        ("embedded", ("--prompts", "nope.txt"), "nope.txt"),
        ("embedded", ("--guidance", "5,3", "--flat-field", "a gray background"), "guidance"),
        ("embedded", ("--keep-steps", "9"), "keep-steps"),
    ],
)
def test_inputs_are_checked_before_anything_is_drawn(
    model: str, words: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    result = _run(model, "--against", "embedded", *DRAW, "--out", "out", *words)
    assert isinstance(result.exception, LyditeError) and text in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_an_even_surface_is_drawn_with_more_and_more_steps(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "FLAT_STEPS", (1, 2))
    monkeypatch.setattr(models, "FLAT_IMAGES", 2)
    flat = ("--flat-field", "a gray background", "--seed", 5)
    words = ("embedded", "--against", run / "reference", "--bits", 3, *flat, "-q")
    record = _json(*words, "--out", tmp_path / "out")
    pipeline = Pipeline.open("embedded")
    for row, steps in zip(record["flat_field"], (1, 2), strict=True):
        pictures = pipeline.generate(Request("a gray background", steps=steps), [5, 6])
        noise = fmean(residual_noise(picture.pixels) for picture in pictures)
        assert row["steps"] == steps and row["reference"] == pytest.approx(noise, rel=1e-3)
        assert row["candidate"] != row["reference"]


def test_errors_are_one_line_each(tmp_path: Path, run: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    Image.new("RGB", (20, 20)).save(other / "x.png")
    missing, part = tmp_path / "missing.pth", tmp_path / "part"
    Writer.start(part, SETTINGS, plan(1)).close()
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
        (("set", part), "the set lacks 1 image. Resume it"),
        (("embedded", "--against", part), "the set is not complete. Resume it first"),
    ):
        result = _run(*arguments)
        assert isinstance(result.exception, LyditeError), (arguments, result.output)
        message = str(result.exception)
        assert text in message and "\n" not in message, message


def test_the_tables_hold_the_figures_of_the_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = Summary(30.5, 31.25, 2.5, (28.0, 33.0), 25.0, 36.0, 8)
    one = Summary(0.25, 0.2, None, None, 0.1, 0.4, 1)
    pairs = [Pair(f"p{number}", {"psnr": 20.0 + number}) for number in range(9)]
    evaluation = Evaluation(
        paired={"psnr": summary, "latent_error": one},
        distribution={
            "fid": Distance(12.5, (8, 9)),
            "share": Distance(0.5, (8,), ci95=(0.2, 0.8)),
            "frechet_judge": Distance(0.5, (8, 8)),
        },
        steps=[StepError(0, summary), StepError(4, one)],
        growth=1.5,
        worst=[replace(pairs[0], prompt="a star"), *pairs[1:]],
        identical=2,
        warnings=["odd"],
        record={"pictures": 8},
        flat_field=[{"steps": 4, "reference": 1.0, "candidate": 2.5}],
    )
    source: Any = None
    options = {"html": None, "as_json": False, "overwrite": False}
    print_evaluation(evaluation, source, source, options)
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert ["psnr", "30.5", "28", "to", "33", "31.25", "25", "8"] in lines
    assert ["latent_error", "0.25", "–", "0.2", "0.4", "1"] in lines
    assert ["fid", "12.5", "8", "and", "9"] in lines and "note: odd\n" in err
    assert ["share", "0.5", "0.2", "to", "0.8", "8"] in lines
    assert "latent_error at step 4: 0.25; it grows by a factor of 1.5 a step (the error" in out
    assert "2 pairs are identical" in out and "frechet_judge: Fréchet distance" in out
    assert "4 steps: noise 1.00 in the reference, 2.50 in the candidate" in out
    worst = [line for line in out.splitlines() if line.startswith("worst")]
    assert len(worst) == 8 // 3 < SHOWN and "p0" in worst[0] and "psnr 20" in worst[0]
    assert "a star" in worst[0] and "“" not in worst[1]
    many = replace(evaluation, paired={"psnr": replace(summary, n=100)}, identical=1)
    print_evaluation(many, source, source, options)
    out = capsys.readouterr().out
    assert out.count("\nworst  p") == SHOWN and "1 pair is identical" in out
    print_evaluation(evaluation, source, source, options | {"as_json": True})
    assert json.loads(capsys.readouterr().out)["paired"]["psnr"]["mean"] == 30.5
    bare = Evaluation({}, {}, [StepError(0, one)], 1.5, [], 0, [], {"pictures": 8})
    print_evaluation(bare, source, source, options)
    assert capsys.readouterr().out == ""


def test_a_page_is_not_replaced_unasked(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    arguments = ("set", run / "candidate", "--against", run / "reference", "--html", page)
    result = _run(*arguments)
    assert isinstance(result.exception, LyditeError) and page.read_text() == "mine"
    assert _run(*arguments, "--overwrite").exit_code == 0 and "psnr" in page.read_text()


def test_which_images_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = Model(embedded.NAME), Model("somewhere")
    options = {"prompts": None, "images": None, "seed": 7}
    images = evaluated_images(options, own)
    assert len(images) == IMAGES and len({seed for _, seed in images}) == IMAGES
    assert evaluated_images(options | {"images": 3}, own) == images[:3]
    with pytest.raises(LyditeError, match="no prompts"):
        evaluated_images(options, other)
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    given = options | {"prompts": tmp_path / "p.txt"}
    assert [prompt for prompt, _ in evaluated_images(given, other)] == ["one", "two"]
    four = evaluated_images(given | {"images": 4}, other)
    assert [prompt for prompt, _ in four] == ["one", "two", "one", "two"]
    monkeypatch.setattr(models, "MOST_IMAGES", 2)
    assert len(evaluated_images(given, other)) == 2
    with pytest.raises(LyditeError, match="at most 2"):
        evaluated_images(given | {"images": 3}, other)


def test_help_and_errors_name_files_that_are_read(tmp_path: Path) -> None:
    examples = [line for line in _run("images", "--help").output.splitlines() if "--lpips" in line]
    assert any(".safetensors" in line for line in examples)
    assert not any(".pth" in line for line in examples)
    Image.new("RGB", (20, 20)).save(tmp_path / "x.png")
    nowhere = tmp_path / "nowhere.safetensors"
    for words in (("--inception", nowhere), ("--lpips", "alex", nowhere, nowhere)):
        error = str(_run("images", tmp_path, tmp_path, *words).exception)
        assert "as a safetensors file (`lydite inspect FILE.pth` prints" in error
    (tmp_path / "a.pth").write_bytes(b"")
    error = str(CliRunner().invoke(lydite, ["inspect", str(tmp_path / "a.pth")]).exception)
    assert "Convert it to safetensors" in error and "python -c" in error


def test_help_teaches() -> None:
    (flat,) = (each for each in models.command.params if each.name == "flat_field")
    assert tuple(map(int, re.findall(r"\d+", str(vars(flat)["help"])))) == models.FLAT_STEPS
    for arguments in (), ("models",), ("images",), ("set",):
        result = _run(*arguments, "--help")
        assert result.exit_code == 0 and "lydite evaluate" in result.output
