"""Sensitivity: what one rounded linear does to pictures, measured once and resumed."""

import json
import multiprocessing
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from lydite.calibrate.replay import network
from lydite.calibrate.run import Model
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.worker_pool import PoolCallbacks
from lydite.cli.quantize.plan import command
from lydite.core.errors import CalibrationError, FileError, InputError, NotFiniteError
from lydite.pipelines.observer import Observer, Stage
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize import sensitivity
from lydite.quantize.grid import fit_grid
from lydite.quantize.plan import read_plan
from lydite.quantize.sensitivity import (
    Measurement,
    Sensitivity,
    choose_trajectories,
    in_processes,
    measure_layer,
    measure_sensitivity,
    read_sensitivity,
)
from lydite.trace.mlx_capture import walk
from lydite.weights.load import parameter_hash, parameter_specs
from support import replays
from support.calibration import same_blas

FEED_FORWARD = "transformer_blocks.0.ff.net.2"
MODULATION = "transformer_blocks.0.norm1.linear"  # computed for all steps at once
IMAGES = 2


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return replays.loaded(replays.make_small(tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(scope="module")
def opened(
    pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CalibrationSet]:
    folder = replays.draw_set(tmp_path_factory.mktemp("sets") / "set", pipeline)
    with CalibrationSet.open(folder) as found:
        yield found


@pytest.fixture(scope="module")
def measured(
    pipeline: Pipeline, opened: CalibrationSet, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Sensitivity, Path]:
    file = tmp_path_factory.mktemp("measured") / "sensitivity.json"
    return measure_sensitivity(pipeline, opened, images=IMAGES, file=file), file


def test_is_the_error_of_the_latents_at_the_end(
    measured: tuple[Sensitivity, Path], pipeline: Pipeline, opened: CalibrationSet
) -> None:
    found, _ = measured
    modules = dict(walk(network(pipeline)))
    images = [rows[0].image for rows in choose_trajectories(opened, IMAGES, replays.STEPS)]
    assert len(set(images)) == IMAGES

    def ends() -> list[NDArray[np.float32]]:
        """As the pipeline draws them, with Euler's method as well."""
        request = replays.REQUEST
        latents: list[NDArray[np.float32]] = []
        for image in opened.plan.images:
            if image.number in images:
                last = _LastLatents()
                run = pipeline.plan(request.replace(prompt=image.prompt))
                list(pipeline.generate(run, [image.seed], observer=last))
                latents.append(last.latents)
        return latents

    full = ends()
    for path in (FEED_FORWARD, MODULATION):
        layer: Any = modules[path]
        kept = layer.weight
        weight = np.array(kept)
        grid = fit_grid(weight, 3, 64)
        layer.weight = mx.array(grid.values(grid.round(weight)))
        rounded = ends()
        layer.weight = kept
        squares = [
            np.square(one - other).sum() / np.square(other).sum()
            for one, other in zip(rounded, full, strict=True)
        ]
        expected = np.sqrt(np.mean(squares))
        assert expected > 0
        assert found.errors[path][3] == pytest.approx(expected, rel=1e-2)


class _LastLatents(Observer):
    latents: NDArray[np.float32]

    def observe(self, stage: Stage, value: Any, **_: Any) -> Any:
        if stage == "latents":
            self.latents = np.array(value)
        return value


def test_steps_are_spread_from_the_first_on(opened: CalibrationSet) -> None:
    (rows,) = choose_trajectories(opened, 1, 2)
    assert [row.step for row in rows] == [0, 1]
    assert len(choose_trajectories(opened, 99, 99)) == len(replays.PROMPTS)


def test_each_image_keeps_its_own_steps_in_order() -> None:
    """Rows lie in a set as they were finished; images may keep other numbers of steps."""
    rows = [
        SimpleNamespace(image=image, step=step)
        for step in (7, 0, 11, 3, 5, 1, 2, 4, 6, 8, 9, 10)
        for image in range(5)
        if image != 2 or step < 2
    ]
    opened: Any = SimpleNamespace(rows=lambda kind: iter(rows if kind == "sample" else ()))
    for steps, wanted in ((1, [0]), (4, [0, 3, 6, 9]), (5, [0, 2, 4, 7, 9]), (99, [*range(12)])):
        chosen: Any = choose_trajectories(opened, 99, steps)
        assert sorted({row.image for each in chosen for row in each}) == [0, 1, 2, 3, 4]
        for each in chosen:
            assert len({row.image for row in each}) == 1
            short = each[0].image == 2
            assert [row.step for row in each] == ([0, 1][:steps] if short else wanted)
    few: list[Any] = choose_trajectories(opened, 3, 1)
    assert len({each[0].image for each in few}) == 3
    assert few == choose_trajectories(opened, 3, 1)
    empty: Any = SimpleNamespace(rows=lambda kind: iter(()), folder=Path("set"))
    with pytest.raises(CalibrationError, match="no samples"):
        choose_trajectories(empty, 1, 1)


def test_which_linears_are_measured() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(64, 8), nn.Linear(96, 8), nn.Linear(40, 8)
            self.norm, self.conv = nn.LayerNorm(64), nn.Conv2d(64, 8, 1)

    for group, paths in ((64, {"a"}), (32, {"a", "b"}), (0, {"a", "b"})):
        assert sensitivity._linears(Net(), group).keys() == paths


def test_every_linear_is_measured_and_the_network_is_as_before(
    measured: tuple[Sensitivity, Path], pipeline: Pipeline, opened: CalibrationSet
) -> None:
    found, _ = measured
    assert {FEED_FORWARD, MODULATION, "proj_out", "context_embedder"} <= set(found.errors)
    from lydite.calibrate.model_session import require_model

    require_model(opened.settings, pipeline)


def test_goes_on_where_it_was_stopped_to_the_same_file(
    measured: tuple[Sensitivity, Path],
    pipeline: Pipeline,
    opened: CalibrationSet,
    tmp_path: Path,
) -> None:
    found, file = measured
    part = tmp_path / "part.json"
    kept = dict(list(found.errors.items())[:-2])
    part.write_bytes(Sensitivity(found.fingerprint, 64, IMAGES, kept).to_json())
    done: list[int] = []
    again = measure_sensitivity(
        pipeline, opened, images=IMAGES, file=part, on_layer=lambda n, total: done.append(n)
    )
    assert done == [len(found.errors) - 1, len(found.errors)]
    assert again == found == read_sensitivity(part)
    assert part.read_bytes() == file.read_bytes()


def test_refuses_what_was_measured_otherwise(
    measured: tuple[Sensitivity, Path], pipeline: Pipeline, opened: CalibrationSet, tmp_path: Path
) -> None:
    _, file = measured
    same: dict[str, Any] = {"images": IMAGES, "file": file}
    others: list[dict[str, Any]] = [{"images": 1}, {"group": 32}, {"widths": (4,)}, {"steps": 2}]
    for changes in others:
        with pytest.raises(FileError, match="another model, set or settings"):
            measure_sensitivity(pipeline, opened, **same | changes)
    broken = tmp_path / "broken.json"
    broken.write_text('{"errors": 1}')
    with pytest.raises(FileError, match="not a file of sensitivities"):
        measure_sensitivity(pipeline, opened, images=1, file=broken)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [(np.nan, NotFiniteError, "returns NaN or Inf"), (0.0, CalibrationError, "no linear changes")],
)
def test_errors_that_say_nothing_are_refused_and_the_network_is_as_before(
    value: float,
    error: type[Exception],
    message: str,
    pipeline: Pipeline,
    opened: CalibrationSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, runs = parameter_hash(network(pipeline)), list[None]()

    def ends(self: Any) -> list[NDArray[np.float64]]:
        runs.append(None)
        return [np.ones(3) + (value if len(runs) > 1 else 0.0)]

    monkeypatch.setattr(sensitivity._LayerErrors, "ends", ends)
    with pytest.raises(error, match=message):
        measure_sensitivity(pipeline, opened, images=1, file=tmp_path / "file.json")
    assert parameter_hash(network(pipeline)) == before


def test_a_measurement_that_is_stopped_keeps_what_it_has(
    pipeline: Pipeline, opened: CalibrationSet, tmp_path: Path
) -> None:
    file, done = tmp_path / "file.json", list[int]()

    def measure(steps: int = 1) -> None:
        measure_sensitivity(
            pipeline, opened, images=1, steps=steps, file=file,
            on_layer=lambda n, total: done.append(n), stopping=lambda: len(done) == 2,
        )  # fmt: skip

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            measure()
        assert done == [1, 2] and len(read_sensitivity(file).errors) == 2


# In other processes


def test_workers_and_tasks_of_ray_measure_the_same(
    measured: tuple[Sensitivity, Path],
    pipeline: Pipeline,
    opened: CalibrationSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two linears are left to two processes, then two to what a task of Ray calls."""
    for name, value in same_blas().items():
        monkeypatch.setenv(name, value)
    found, file = measured
    model, part = Model(str(pipeline.model.path)), tmp_path / "part.json"

    def tasks(measurement: Measurement, paths: list[str], callbacks: PoolCallbacks) -> None:
        shared = pickle.dumps(measurement)
        for path in reversed(paths):
            callbacks.finished(path, measure_layer(shared, model, path))
        other = msgspec.structs.replace(opened.settings, model_hash="0" * 64)
        wrong = pickle.dumps(replace(measurement, settings=other))
        assert isinstance(measure_layer(wrong, model, paths[0]), CalibrationError)
        sensitivity._opened_once.cache_clear()

    for elsewhere in (in_processes(model, 2), tasks):
        kept = dict(list(found.errors.items())[1:-1])
        part.write_bytes(Sensitivity(found.fingerprint, 64, IMAGES, kept).to_json())
        options: dict[str, Any] = {"images": IMAGES, "file": part, "elsewhere": elsewhere}
        assert measure_sensitivity(pipeline, opened, **options) == found
        assert part.read_bytes() == file.read_bytes()
    assert not multiprocessing.active_children()


# `lydite quantize plan`


def plan(*words: object) -> str:
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_plan_meets_the_target_and_is_saved(
    measured: tuple[Sensitivity, Path], pipeline: Pipeline, opened: CalibrationSet, tmp_path: Path
) -> None:
    found, file = measured
    saved, shapes = tmp_path / "plan.json", parameter_specs(network(pipeline))
    words = (pipeline.model.path, "--set", opened.folder, "--images", IMAGES)
    words = (*words, "--sensitivity", file, "--bpw", 4.5)
    text = plan(*words, "--save", saved)
    most = max(found.errors, key=lambda path: found.errors[path][3])
    assert min(found.errors, key=lambda path: text.index(f"{path} ")) == most
    made = read_plan(saved, shapes)
    assert 4.3 < made.bits_per_weight(shapes) <= 4.5
    assert len({layer.bits for layer in made.layers.values()}) > 1
    record = json.loads(plan(*words, "--json"))
    assert record["plan"] == json.loads(saved.read_text())
    assert record["bytes_after"] < record["bytes_before"] / 2
    with pytest.raises(FileError, match="exists already"):
        plan(*words, "--save", saved)


def test_without_a_set_the_plan_is_uniform(pipeline: Pipeline) -> None:
    text = plan(pipeline.model.path, "--bits", 4, "--leave-out", "*attn*")
    assert "--set SET" in text and "in 4 bits" in text
    with pytest.raises(InputError, match="--set SET"):
        plan(pipeline.model.path, "--bpw", 4)
    with pytest.raises(InputError, match="exclude"):
        plan(pipeline.model.path, "--bpw", 4, "--bits", 4)
