"""The folder of work: what is finished is not done again, and only one process writes it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  bfloat16 of NumPy
import numpy as np
import pytest

from lydite.core import files
from lydite.core.errors import CalibrationError, FileError, InputError
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize import export as exports
from lydite.quantize import quantize_network as networks
from lydite.quantize.export import WEIGHTS, _files, export, network_tensors
from lydite.quantize.grid import Grid
from lydite.quantize.plan import uniform_plan
from lydite.quantize.provenance import UnitError
from lydite.quantize.quantize_blocks import BlockResult, Settings
from lydite.quantize.quantize_network import count_steps, quantize_network
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.quantize.work import (
    EVALUATION,
    FINISHED,
    JOB,
    MARK,
    MODEL,
    Work,
    is_finished,
    read_result,
    work_folder,
    write_result,
)
from lydite.weights.load import parameter_specs


@pytest.fixture
def settings(pipeline: Pipeline) -> Settings:
    shapes = parameter_specs(pipeline.model.network("transformer"))
    return Settings("rtn", uniform_plan(shapes, 4, 64))


def test_what_is_finished_is_not_rounded_again(
    pipeline: Pipeline, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    rounded: list[set[str]] = []
    usual = networks.round_layers

    def count(layers: Any, settings: Settings) -> Any:
        rounded.append(set(layers))
        return usual(layers, settings)

    monkeypatch.setattr(networks, "round_layers", count)

    def run() -> list[Any]:
        seen.clear()
        rounded.clear()
        with Work.open(tmp_path / "out.work") as work:
            return quantize_network(pipeline, None, [], settings, work,
                                    on_block=lambda result: seen.append(result.path))  # fmt: skip

    first = run()
    assert [result.path for result in first] == seen and len(rounded) == len(first) == 3
    assert {path for layers in rounded for path in layers} == set(settings.plan.layers)
    blocks = sorted((tmp_path / "out.work/blocks").iterdir())
    assert [path.name for path in blocks] == [f"00{n}.safetensors" for n in range(3)]
    blocks[1].unlink()
    again = run()
    assert len(rounded) == 1 and rounded[0] == set(first[1].weights)  # the one that is missing
    assert [result.path for result in again] == [result.path for result in first]
    assert seen == [first[1].path]  # what is finished is not announced again
    for one, other in zip(first, again, strict=True):
        assert one.weights.keys() == other.weights.keys()
        for path, weight in one.weights.items():
            assert (weight.integers == other.weights[path].integers).all()
    left = count_steps(pipeline, settings, {})
    assert (left.total, left.blocks, left.finished) == (2, 2, 0)  # not the layers outside of them
    left = count_steps(pipeline, settings, {result.path: result for result in first[:2]})
    assert (left.total, left.blocks, left.finished) == (1, 2, 1)


def test_another_job_in_the_same_folder_is_named(tmp_path: Path) -> None:
    folder = work_folder(tmp_path / "out")
    assert folder == tmp_path / "out.work"
    job = {"source_hash": "a", "settings": {"method": "rtn", "plan": {"x": 1}, "rank": 0}}
    with Work.open(folder) as work:
        work.describe(job)
        work.describe(job)
        text = (folder / JOB).read_bytes()
        for change, name in (
            ({"source_hash": "b"}, "MODEL"),
            ({"settings": {**job["settings"], "rank": 4}}, "--rank"),
            ({"settings": {**job["settings"], "plan": {"x": 2}}}, "--bits, .* or --plan"),
            ({"samples": 3}, "--samples or --memory"),
            ({"other": 3}, "other"),
        ):
            with pytest.raises(
                InputError, match=f"begun with another value of {name}. Give the same"
            ):
                work.describe({**job, **change})
        assert (folder / JOB).read_bytes() == text
        with pytest.raises(CalibrationError, match="being written by"):
            Work.open(folder)
    assert (folder / MARK).is_file()
    with Work.open(folder) as work:  # a run that was closed is resumed, a finished one is gone
        work.describe(job)
        for name in (MODEL, EVALUATION):
            (folder / name).mkdir()
        work.finish(tmp_path / "out")
    assert not folder.exists() and (tmp_path / "out" / EVALUATION).is_dir()


def test_an_export_asks_for_room_and_replaces_what_a_killed_run_left(
    pipeline: Pipeline, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pipeline.model.path
    network = sum(p.stat().st_size for p in (source / "transformer").glob("*.safetensors"))
    needed = network + sum((source / path).stat().st_size for path in _files(pipeline))
    folder = tmp_path / "model"
    (folder / "old").mkdir(parents=True)
    for free, fits in ((needed + files.RESERVE - 1, False), (needed + files.RESERVE, True)):
        monkeypatch.setattr(files, "free_bytes", lambda _, free=free: free)
        if not fits:
            with pytest.raises(FileError, match="needs about"):
                export(pipeline, {}, folder)
            assert [path.name for path in folder.iterdir()] == ["old"]
    with Work.open(tmp_path / "out.work") as work:
        results = quantize_network(pipeline, None, [], settings, work)
    weights = {path: weight for result in results for path, weight in result.weights.items()}
    named: list[str] = []
    export(pipeline, weights, folder, named.append)
    assert (folder / "transformer" / WEIGHTS).is_file() and not (folder / "old").exists()
    assert sorted(named) == sorted([*map(str, _files(pipeline)), f"transformer/{WEIGHTS}"])


@pytest.mark.parametrize(
    ("source", "scales"), [("float32", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16")]
)
def test_scales_have_the_precision_of_the_source(
    pipeline: Pipeline, settings: Settings, source: str, scales: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with Work.open(tmp_path / "out.work") as work:
        results = quantize_network(pipeline, None, [], settings, work)
    weights = {path: weight for result in results for path, weight in result.weights.items()}
    usual = exports.parameter
    monkeypatch.setattr(
        exports, "parameter", lambda *given: np.array(usual(*given)).astype(np.dtype(source))
    )
    tensors = network_tensors(pipeline.model.components["transformer"], weights)
    path = "transformer_blocks.0.ff.net.2"
    for part, dtype in (("scales", scales), ("biases", scales), ("bias", source)):
        assert tensors[f"{path}.{part}"].dtype == np.dtype(dtype), part
    assert tensors[f"{path}.weight"].dtype == np.uint32
    assert tensors["pos_embed.proj.weight"].dtype == np.dtype(source)


@pytest.mark.parametrize(("after", "kept"), [(0.1, 0.1), (0.3, 0.2)])
def test_tuning_that_gains_nothing_changes_nothing(
    pipeline: Pipeline, settings: Settings, after: float, kept: float,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    better = after < 0.2
    calls: list[Any] = []

    def tune(*given: Any) -> Any:
        weights, recipe = given[2], given[3]
        calls.append(recipe)
        first = next(iter(weights))
        changed = {first: replace(weights[first])} if better else {}
        return SimpleNamespace(weights={**weights, **changed}, before=0.2, after=after)

    monkeypatch.setattr(networks, "tune", tune)
    tuned = replace(settings, tune=7, recipe=replace(settings.recipe, seed=5))
    with Work.open(tmp_path / "out.work") as work:
        results = quantize_network(pipeline, None, [], settings, work)
        opened: Any = None
        result = networks.tune_network(pipeline, opened, results, tuned, work)
        assert (result.errors[0].nearest, result.errors[0].after) == (0.2, kept)
        assert len(result.weights) == better
        again = networks.tune_network(pipeline, opened, results, tuned, work)
    (recipe,) = calls  # the second time it is taken from the folder
    assert (recipe.iterations, recipe.seed, recipe.store) == (7, 5, settings.store)
    assert again.errors == result.errors and again.weights.keys() == result.weights.keys()


def test_a_finished_folder_is_removed_and_a_link_to_one_is_not_followed(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "out.work"
    elsewhere = tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
        for name in (FINISHED, MARK, JOB):
            (place / name).write_text("")
        (place / "blocks").mkdir()
    (folder / MODEL).mkdir()
    assert not is_finished(out) and folder.exists()  # the model is not in its place yet
    (folder / MODEL).rmdir()
    assert is_finished(out) and not folder.exists() and not is_finished(out)
    folder.symlink_to(elsewhere)
    assert not is_finished(out) and len(list(elsewhere.iterdir())) == 4


@pytest.mark.parametrize("name", ["blocks", "set", "model", "evaluation", MARK, JOB])
def test_no_part_of_the_folder_of_work_may_be_a_link(name: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "out.work", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    with Work.open(folder):
        pass
    place = folder / name
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    place.symlink_to(elsewhere / "file" if "." in name else elsewhere)
    with pytest.raises(FileError, match=r"is a link\. Remove it"):
        Work.open(folder)


def test_a_finished_run_holds_no_lock_and_one_that_is_refused_neither(tmp_path: Path) -> None:
    work = Work.open(tmp_path / "out.work")
    for name in (MODEL, EVALUATION):
        (work.folder / name).mkdir()
    work.finish(tmp_path / "out")
    assert work._lock._handle is None
    leftover = tmp_path / "out.work" / "blocks" / ".000.safetensors.1.part"
    with Work.open(tmp_path / "out.work"):
        leftover.touch()
    with Work.open(tmp_path / "out.work"):
        assert not leftover.exists()


def test_a_finished_block_is_read_as_it_was_written(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)

    def weight(mode: Any, *, rounded: bool) -> QuantizedWeight:
        scales, offsets = draw.standard_normal((2, 4, 2)).astype(np.float32)
        integers = draw.integers(0, 16, (4, 64)).astype(np.uint8)
        extras = {"input_range": np.ones(3, np.float32)}
        return QuantizedWeight(
            integers, Grid(scales, offsets, 4, mode), scales[:, 0], extras, rounded
        )

    layers = {"a.q": weight("affine", rounded=True), "a.k": weight("nvfp4", rounded=False)}
    result = BlockResult("a", layers, [UnitError("a.q", 0.5, 0.25)])
    write_result(tmp_path / "block", result)
    found = read_result(tmp_path / "block")
    assert (found.path, found.errors, {*found.weights}) == ("a", result.errors, {"a.q", "a.k"})
    for name, own in layers.items():
        other = found.weights[name]
        assert (other.grid.bits, other.grid.mode) == (own.grid.bits, own.grid.mode)
        assert other.quantize_input == own.quantize_input
        for one, two in (
            (other.integers, own.integers),
            (other.grid.scales, own.grid.scales),
            (other.grid.offsets, own.grid.offsets),
            (other.bias, own.bias),
            (other.extras["input_range"], own.extras["input_range"]),
        ):
            assert one is not None and two is not None and np.array_equal(one, two)
