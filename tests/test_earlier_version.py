"""Files written by version 0.1 still open, replay and resume (tests/data/version_0_1.tar.xz)."""

import json
import shutil
import sqlite3
import tarfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from lydite import embedded
from lydite.calibrate.settings import Description
from lydite.calibrate.store.set_file import read_description, write_description
from lydite.cli.main import lydite
from lydite.core.errors import FileError
from lydite.pipelines.model_hash import sampled_hash
from lydite.pipelines.picture import read_pixels, read_record
from lydite.pipelines.pipeline import Pipeline

ARCHIVE = Path(__file__).parent / "data" / "version_0_1.tar.xz"
SET_HASH = "ea1e137744686a3eddc29ae7f6bf89202afe228005f3590b5bb9bd78c1f99e6d"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "version_0_1"


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(lydite, [str(each) for each in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("name", ["plain", "sampler", "img2img"])
def test_pictures_are_replayed(old: Path, tmp_path: Path, name: str) -> None:
    source, again = old / f"{name}.png", tmp_path / "again.png"
    image = ("--image", old / "plain.png") if name == "img2img" else ()
    assert run("generate", "--from", source, *image, "-o", again, "-q").exit_code == 0
    apart = np.abs(read_pixels(source).astype(int) - read_pixels(again).astype(int))
    assert apart.max() <= 1  # 0 on the machine that drew them


def test_the_hash_in_a_picture_is_known(old: Path) -> None:
    model = Pipeline.open(embedded.NAME).model
    assert read_record(old / "plain.png").model_hash == sampled_hash(model)


def test_a_trace_is_compared_with_one_of_today(old: Path, tmp_path: Path) -> None:
    run("trace", "a red star", "--steps", 2, "--size", "64x64", "-o", tmp_path / "new", "-q",
        "--points", "pipeline/*")  # fmt: skip
    result = run("diff", old / "trace", tmp_path / "new", "--json")
    verdict = json.loads(result.output)
    assert verdict["verdict"] == "agree" and len(verdict["rows"]) >= 6


def test_a_set_is_verified_read_and_resumed(old: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(old / "set", tmp_path / "set")
    assert json.loads(run("calibrate", "status", folder, "--json").output)["content_hash"] == (
        SET_HASH
    )
    assert run("calibrate", "verify", folder).exit_code == 0
    options = ("--steps", 4, "--keep", "every:2", "--size", "64x64", "-q")
    prompts = ("--prompts", old / "prompts.txt", "--images", 3)
    assert run("calibrate", "run", *prompts, *options, "--out", folder).exit_code == 0
    status = json.loads(run("calibrate", "status", folder, "--json").output)
    assert (status["images_complete"], status["missing"]) == (3, 0)


def test_statistics_are_merged_and_plotted(old: Path, tmp_path: Path) -> None:
    parts, out = (old / "stats_1.sqlite", old / "stats_2.sqlite"), tmp_path / "all.sqlite"
    assert run("calibrate", "activations", *parts, "--out", out).exit_code == 0
    assert run("calibrate", "activations", out, "--plot", tmp_path / "page.html").exit_code == 0
    with sqlite3.connect(out) as file:
        assert file.execute("select count(*) from sample").fetchone() == (3,)


def test_digests_and_problems_are_read(old: Path, tmp_path: Path) -> None:
    assert run("audit", "embedded", "--against", old / "digests.json").exit_code == 0
    (tmp_path / "answer.json").write_text('{"x": [[0.0]]}')
    result = run("sampler", "conform", old / "problem.json", tmp_path / "answer.json")
    assert result.exit_code in (1, 2) and "Traceback" not in result.output


def test_a_set_that_names_a_hub_id_downloads_nothing(old: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(old / "set", tmp_path / "set"))
    known = read_description(folder)
    settings = replace(known.settings, model="evil-owner/evil-name")
    write_description(folder, Description(settings, known.plan))
    for verb in (("run", "--out", folder), ("activations", folder, "--out", tmp_path / "a.sqlite")):
        words = ["calibrate", *(str(word) for word in verb)]
        error = CliRunner().invoke(lydite, words).exception
        assert isinstance(error, FileError) and "--model" in str(error)
