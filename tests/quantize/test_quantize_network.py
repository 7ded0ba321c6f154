"""What a quantization needs, and what its record says of it; results whatever the memory."""

import gc
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lydite.calibrate.replay import Replay
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.errors import InputError
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.blocks import BlockRows, Rows, choose_samples
from lydite.quantize.grid import fit_grid
from lydite.quantize.methods.reconstruct import Recipe, _mixed, _pieces
from lydite.quantize.plan import LayerPlan, Plan, uniform_plan
from lydite.quantize.provenance import UnitError
from lydite.quantize.quantize_blocks import (
    BlockResult,
    Settings,
    _grid,
    quantize_blocks,
    round_layers,
)
from lydite.quantize.quantize_model import Quantization
from lydite.quantize.quantize_network import (
    _changed,
    count_steps,
    needs_set,
    provenance,
    sample_bytes,
)
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.quantize.work import Work, work_folder
from lydite.trace.mlx_capture import walk
from lydite.weights.load import parameter_specs
from lydite.weights.quantized_format import DIVISOR

PLAN = Plan({"a": LayerPlan(4)})


@pytest.mark.parametrize(
    ("method", "more", "needed"),
    [("rtn", {}, False), ("hqq", {}, False), ("rtn", {"act_bits": 8}, True),
     ("hqq", {"tune": 1}, True), ("awq", {}, True), ("gptq", {}, True), ("taqdit", {}, True)],
)  # fmt: skip
def test_which_methods_need_a_set(method: Any, more: dict[str, Any], needed: bool) -> None:
    assert needs_set(Settings(method, PLAN, **more)) == needed


def test_how_inputs_are_rounded_is_recorded() -> None:
    plain = Settings("rtn", Plan({"a": LayerPlan(4, 16, "nvfp4")}))
    assert plain.activations is None
    assert replace(plain, act_bits=8).activations == "simulated"
    assert replace(plain, quantize_input=True).activations in ("simulated", "mx.qqmm")


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_share_of_changed_integers_is_of_the_weight_that_was_rounded(
    divided: bool, rank: int
) -> None:
    draw = np.random.default_rng(0)
    layer = nn.Linear(64, 8)
    full, extras = np.array(layer.weight), dict[str, Any]()
    if rank:
        down, up = draw.standard_normal((rank, 64)), draw.standard_normal((8, rank))
        extras |= {"low_rank_down": down.astype(np.float32), "low_rank_up": up.astype(np.float32)}
        full = full - extras["low_rank_up"] @ extras["low_rank_down"]
    if divided:
        extras[DIVISOR] = draw.uniform(0.5, 2.0, 64).astype(np.float32)
        full = full * extras[DIVISOR]
    grid = fit_grid(full, 4, 64)
    integers = grid.round(full)
    assert _changed(layer, QuantizedWeight(integers, grid, extras=extras)) == 0.0
    integers[0, :16] ^= 1
    assert _changed(layer, QuantizedWeight(integers, grid, extras=extras)) == 16 / (8 * 64)


def test_the_record_is_of_all_results_and_the_last_one_of_a_layer(pipeline: Pipeline) -> None:
    net = pipeline.model.network("transformer")
    shapes = parameter_specs(net)
    plan = uniform_plan(shapes, 4, 64)
    settings = Settings("rtn", plan, recipe=Recipe(seed=7))
    modules = dict(walk(net))
    layers = round_layers({path: modules[path] for path in plan.layers}, settings)
    first, *_, last = sorted(layers)
    results = [
        BlockResult("a", layers, [UnitError("a", 0.5, 0.25)]),
        BlockResult("b", {}, [UnitError("b", 0.5, 0.75)]),
    ]
    sources = {"source_model": "m", "source_hash": "1" * 64, "set_hash": "2" * 64}
    made = provenance(pipeline, results, settings, sources)
    assert made.changed == dict.fromkeys(sorted(layers), 0.0)
    assert [unit.path for unit in made.units] == ["a", "b"] and made.improved == 1
    assert made.bits_per_weight == pytest.approx(plan.bits_per_weight(shapes))
    assert (made.method, made.seed, made.activations) == ("rtn", 7, None)
    assert (made.source_model, made.source_hash, made.set_hash) == ("m", "1" * 64, "2" * 64)
    weights = sum(prod(shape) for shape in shapes.values())
    packed = sum(prod(shapes[f"{path}.weight"]) for path in layers)
    assert made.bytes_before == 2 * weights
    assert made.bytes_after == 2 * (weights - packed) + packed * made.bits_per_weight / 8
    assert made.settings["method"] == "rtn" and made.settings["plan"]["layers"][first]
    changed = replace(layers[first], integers=layers[first].integers ^ np.uint8(1))
    results.append(BlockResult("tuned", {first: changed}, [UnitError("tuned", 0.5, 0.5)]))
    tuned = provenance(pipeline, results, replace(settings, tune=3), sources)
    assert tuned.method == "rtn + dwq" and tuned.changed[first] == 1 and tuned.changed[last] == 0


@pytest.mark.parametrize(("unit", "units"), [("block", 1), ("module", 4)])
def test_steps_of_learned_methods_are_iterations_of_units(
    unit: Any, units: int, pipeline: Pipeline
) -> None:
    plan = uniform_plan(parameter_specs(pipeline.model.network("transformer")), 4, 64)
    settings = Settings("adaround", plan, recipe=Recipe(iterations=30), unit=unit)
    left = count_steps(pipeline, settings, {})
    assert (left.learned, left.blocks, left.finished) == (True, 2, 0)
    finished = {"transformer_blocks.0": BlockResult("transformer_blocks.0", {})}
    after = count_steps(pipeline, settings, finished)
    assert (after.learned, after.blocks, after.finished) == (True, 2, 1)
    assert left.total - after.total == 30 * units and after.total % 30 == 0 < after.total
    plain = count_steps(pipeline, replace(settings, method="gptq"), finished)
    assert (plain.total, plain.learned, plain.finished) == (1, False, 1)


@pytest.mark.parametrize(("at_once", "size"), [(8, 6), (6, 6), (5, 3), (2, 2), (1, 1)])
def test_a_batch_is_cut_into_equal_pieces_that_fit(at_once: int, size: int) -> None:
    x = mx.arange(10)[:, None]
    rows = Rows([0], {}, {}, {"args.0": x}, {"args.0": x + 100}, at_once)
    index = np.array([3, 1, 4, 9, 5, 2])
    pieces = list(_pieces(rows, [2 * x], index, 0.0, mx.random.key(0)))
    assert [len(outputs[0]) for _, outputs in pieces] == [size] * (6 // size)
    inputs, wanted = (mx.concatenate(list(part)) for part in zip(
        *((arrays["args.0"], outputs[0]) for arrays, outputs in pieces), strict=True
    ))  # fmt: skip
    assert np.array_equal(inputs[:, 0], index + 100) and np.array_equal(wanted[:, 0], 2 * index)
    assert len({str(arrays["key"]) for arrays, _ in pieces}) == len(pieces)


@pytest.mark.parametrize(("samples", "held_out"), [(16, 2), (3, 1), (2, 1), (1, 1)])
@pytest.mark.parametrize("at_once", [1, 3, 16])
def test_the_error_is_of_rows_that_were_not_learned_from(
    samples: int, held_out: int, at_once: int
) -> None:
    """Two rows a sample; of one sample there are no others."""
    count = 2 * samples
    x = mx.arange(count, dtype=mx.float32)[:, None]
    rows = Rows(list(range(samples)), {}, {}, {"args.0": x}, {"args.0": x + 1}, at_once)
    assert rows.learned == count - 2 * held_out * (samples > 1)
    error, total = rows.error(nn.Identity(), [x])
    assert error == 2 * held_out and total == float((np.arange(count)[-2 * held_out :] ** 2).sum())


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_the_inputs_is_of_the_full_precision_network(share: float) -> None:
    zeros = mx.zeros((50, 200))
    rows = Rows([0], {}, {"kwargs.c": zeros}, {"args.0": zeros + 1}, {"args.0": zeros})
    mixed = _mixed(rows, mx.arange(40), share, mx.random.key(0))
    assert mixed["args.0"].shape == mixed["kwargs.c"].shape == (40, 200)
    assert mixed["args.0"].mean().item() == pytest.approx(share, abs=0.02)


def test_the_memory_of_a_call_does_not_change_the_result(
    pipeline: Pipeline, opened: CalibrationSet
) -> None:
    net = pipeline.model.network("transformer")
    settings = Settings("gptq", uniform_plan(parameter_specs(net), 3, 64))
    found: list[dict[str, QuantizedWeight]] = []
    for call_bytes in (1 << 30, 1):
        samples = choose_samples(opened, 1, 1 << 30)
        rows = BlockRows(pipeline, opened, samples, call_bytes=call_bytes)
        found.append(next(quantize_blocks(rows, pipeline.family, settings)).weights)
        rows.install(rows.original)
    many, one = found
    assert many.keys() == one.keys()
    for path, weight in many.items():
        assert (weight.integers == one[path].integers).mean() > 0.99


def test_what_a_sample_takes_does_not_depend_on_other_memory(
    pipeline: Pipeline, opened: CalibrationSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run, whose text encoders are loaded at another moment, chooses the same samples."""
    size = sample_bytes(pipeline, opened)
    others: list[mx.array] = []
    run = Replay.run

    def load_and_run(*words: Any) -> Any:
        others.append(mx.ones(2**20))
        mx.eval(others)
        return run(*words)

    monkeypatch.setattr(Replay, "run", load_and_run)
    assert sample_bytes(pipeline, opened) == size and others


def test_samples_take_no_more_memory_than_was_counted(
    pipeline: Pipeline, opened: CalibrationSet
) -> None:
    size, samples = sample_bytes(pipeline, opened), choose_samples(opened, 1, 1 << 30)
    gc.collect()  # what other tests left may not be freed meanwhile
    before = mx.get_active_memory()
    rows = BlockRows(pipeline, opened, samples)
    walk = rows.walk()
    next(walk)
    next(walk)
    held = mx.get_active_memory() - before
    assert 0.2 * len(samples) * size < held <= len(samples) * size


@pytest.mark.parametrize(
    ("size", "budget", "most", "count"),
    [(10, 1000, None, 60), (10, 309, None, 30), (10, 10, None, 1), (10, 1000, 17, 17),
     (0, 7, None, 7), (10, 30, 5, 3)],
)  # fmt: skip
def test_as_many_samples_as_fit_and_all_steps_equally_often(
    size: int, budget: int, most: int | None, count: int
) -> None:
    rows = [SimpleNamespace(step=n % 3, number=n) for n in range(60)]
    opened: Any = SimpleNamespace(rows=lambda kind: iter(rows))
    chosen: list[Any] = list(choose_samples(opened, size, budget, most))
    assert len(chosen) == count == len({row.number for row in chosen})
    steps = Counter(row.step for row in chosen)
    assert max(steps.values()) - min(steps[step] for step in range(3)) <= 1
    assert chosen == list(choose_samples(opened, size, budget, most))
    assert count < 60 or [row.number for row in chosen] != sorted(row.number for row in chosen)


def test_too_little_memory_for_one_sample_is_refused() -> None:
    opened: Any = SimpleNamespace(rows=lambda kind: iter([SimpleNamespace(step=0)]))
    with pytest.raises(InputError, match="one sample takes"):
        choose_samples(opened, 10, 9)


@pytest.mark.parametrize(
    ("method", "search"), [("rtn", "minmax"), ("gptq", "mse"), ("adaround", "mse")]
)
def test_nearest_takes_the_whole_range_and_the_others_search_one(method: Any, search: Any) -> None:
    layer = nn.Linear(64, 8)
    weight = np.array(layer.weight)
    settings = Settings(method, PLAN, store="float32")
    grid = _grid(weight, PLAN.layers["a"], settings)
    wanted = fit_grid(weight, 4, 64, search=search, store="float32")
    assert np.array_equal(grid.scales, wanted.scales)
    assert np.array_equal(grid.offsets, wanted.offsets)
    other = fit_grid(weight, 4, 64, search="mse" if search == "minmax" else "minmax")
    assert not np.allclose(grid.scales, other.scales, rtol=1e-2)
    assert _grid(weight, LayerPlan(4, 0), settings).scales.shape == (8, 1)
    assert _grid(weight, LayerPlan(4, 16, "nvfp4"), settings).mode == "nvfp4"


def test_a_begun_quantization_is_resumed_with_as_many_samples(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    plan = uniform_plan(parameter_specs(pipeline.model.network("transformer")), 4, 64)
    with Work.open(work_folder(tmp_path / "out")) as work:

        def begin(samples: int) -> Quantization:
            rows: Any = [None] * samples
            return Quantization("m", pipeline, None, rows, Settings("rtn", plan), work, 0)

        begin(8)
        begin(8)
        with pytest.raises(InputError, match="begun with another value of --samples or --memory"):
            begin(4)
