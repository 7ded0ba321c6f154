"""A network is run on samples it can take; of others one error says what was found."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from lydite.calibrate.activations.collect import Selection, collect
from lydite.calibrate.blocks import BlockOptions, store_blocks
from lydite.calibrate.replay import Replay
from lydite.calibrate.settings import Plan
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.verify import verify
from lydite.calibrate.store.writer import Writer
from lydite.cli.calibrate.activations import activations
from lydite.core.errors import CalibrationError, LyditeError, NotFiniteError
from lydite.core.request import Request
from lydite.pipelines.pipeline import Pipeline

Change = Callable[[NDArray[Any]], dict[str, NDArray[Any]]]


def changed(drawn: Path, folder: Path, change: Change) -> Path:
    """A set of one sample of another, changed: as a foreign tool might have written it."""
    with CalibrationSet.open(drawn) as source:
        row = next(iter(source.rows()))
        image, entry = source.plan.images[0], row.entry
        plan = Plan((image,), (source.plan.steps[0],), pictures=False)
        with Writer.start(folder, source.settings, plan) as writer:
            numbers = {"sigma": entry.sigma, "timestep": entry.timestep}
            tensors = change(source.read(row)["x"])
            writer.commit([writer.builder.sample(image.number, plan.steps[0], tensors, **numbers)])
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"latent": x}, "image 0 step 0: expected a latent x, found latent"),
        (
            lambda x: {"x": x.transpose(2, 0, 1)},
            r"x of shape \[8, 8, 16\] .*\[16, 8, 8\] in float32",
        ),
        (lambda x: {"x": x[::2, ::2]}, r"x of shape \[8, 8, 16\] .*\[4, 4, 16\] in float32"),
        (lambda x: {"x": np.concatenate([x[:4], x[4:]], 1)}, r"\[8, 8, 16\] .*\[4, 16, 16\]"),
        (lambda x: {"x": x.astype(np.int64)}, r"\[8, 8, 16\] in int64"),
    ],
)
def test_a_sample_that_the_network_cannot_take_is_one_error(
    drawn: Path, pipeline: Pipeline, tmp_path: Path, change: Change, message: str
) -> None:
    folder = changed(drawn, tmp_path / "set", change)
    with CalibrationSet.open(folder) as opened:
        with pytest.raises(CalibrationError, match=message):
            collect(opened, pipeline, tmp_path / "out.sqlite", Selection())
        with pytest.raises(CalibrationError, match=message):
            store_blocks(opened, pipeline, tmp_path / "blocks", BlockOptions(), 10**9)
    assert os.listdir(tmp_path) == ["set"]


def test_blocks_that_are_not_finite_are_named_and_not_stored(
    drawn: Path, pipeline: Pipeline, tmp_path: Path
) -> None:
    def spoil(x: NDArray[Any]) -> dict[str, NDArray[Any]]:
        x = x.copy()
        x[0, 0, 0] = np.nan
        return {"x": x}

    folder = changed(drawn, tmp_path / "set", spoil)
    told = r"image 0 step 0: transformer_blocks\.0\..*: NaN or Inf among its values"
    with CalibrationSet.open(folder) as opened, pytest.raises(NotFiniteError, match=told):
        store_blocks(opened, pipeline, tmp_path / "blocks", BlockOptions(), 10**9)
    assert os.listdir(tmp_path) == ["set"] and verify(folder).suspects


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(activations, list(map(str, arguments)))
    assert isinstance(result.exception, LyditeError), result.output
    return str(result.exception)


def test_statistics_and_their_plots_replace_nothing_else(
    drawn: Path, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("mine")
    (tmp_path / "dangling.sqlite").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    kept = sorted(os.listdir(tmp_path))
    for name, message in (
        ("dangling.sqlite", "is a link"),
        ("pipe", "a device or a pipe"),
        (drawn / "stats.sqlite", "lies inside the calibration set"),
    ):
        assert message in refused(drawn, "--out", tmp_path / name)
        assert message in refused(whole, whole, "--out", tmp_path / name)
    assert "not statistics" in refused(drawn, "--out", tmp_path / "text.txt")
    assert "exists already" in refused(whole, whole, "--out", tmp_path / "text.txt")
    assert "exists already" in refused(whole, "--out", whole)
    assert "input" in refused(whole, "--out", whole, "--overwrite")
    for plot in ("page.html", "picture.png"):
        (tmp_path / plot).write_bytes((tmp_path / "text.txt").read_bytes())
        assert "exists already" in refused(whole, "--plot", tmp_path / plot)
        assert (tmp_path / plot).read_text() == "mine"
        (tmp_path / plot).unlink()
        for more in ((), ("--overwrite",)):  # made, with its folder, and replaced
            words = [str(whole), "--plot", f"{tmp_path}/n/{plot}", *more]
            result = CliRunner().invoke(activations, words)
            assert result.exit_code == 0, result.exception
    assert sorted(os.listdir(tmp_path / "n")) == ["page.html", "picture.png"]
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "n"])
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "dangling.sqlite").is_symlink()


def test_a_source_that_is_not_there_is_told_what_it_could_be(tmp_path: Path) -> None:
    told = refused(tmp_path / "nosuch", "--out", tmp_path / "out.sqlite")
    assert "nosuch: no such file or folder. Expected a calibration set, or statistics" in told


def test_the_conditioning_of_the_last_sixteen_prompts_is_kept() -> None:
    encoded: list[str] = []
    bound: list[tuple[str, str]] = []

    def encode(run: Any) -> str:
        encoded.append(run.request.prompt)
        return f"conditioning of {run.request.prompt}"

    def denoiser(run: Any, conditioning: str, batch: int) -> str:
        bound.append((run.request.prompt, conditioning))
        return f"denoiser of {run.request.prompt}"

    @dataclass
    class Run:
        request: Request

    replay: Any = object.__new__(Replay)
    replay._run, replay._prompt, replay._denoiser = Run(Request("")), None, None
    replay._conditioning, replay._ahead = {}, None
    replay._pipeline = SimpleNamespace(encode=encode, denoiser=denoiser)
    names = [f"p{n}" for n in range(17)]
    for name in (*names[:16], "p0", "p0", "p16", "p1", "p0"):
        assert replay._denoiser_of(name) == f"denoiser of {name}"
        assert bound[-1] == (name, f"conditioning of {name}") and replay._ahead is None
    assert encoded == [*names, "p0"]  # the oldest one is forgotten for the seventeenth
    assert len(bound) == 16 + 1 + 3 and len(replay._conditioning) == 16
