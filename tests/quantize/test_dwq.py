"""Tuning of scales through the whole network: less error on samples that were not learned from."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.calibrate.replay import Replay, latent_of
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.errors import InputError, NotFiniteError
from lydite.models.layers import QuantizedLinear
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.grid import Grid
from lydite.quantize.input_ranges import InputRange
from lydite.quantize.methods.dwq import TuneRecipe, _finished, _Network, _Trained, tune
from lydite.quantize.plan import uniform_plan
from lydite.quantize.quantize_blocks import Settings, round_layers
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.weights.load import parameter_hash, parameter_specs
from lydite.weights.quantized_format import is_sensitive
from support import replays

FEW = TuneRecipe(iterations=12)


def rounded(pipeline: Pipeline, bits: int, group: int = 64) -> dict[str, QuantizedWeight]:
    net = pipeline.model.network("transformer")
    plan = uniform_plan(parameter_specs(net), bits, group)
    layers: dict[str, Any] = {p: m for p, m in net.named_modules() if p in plan.layers}
    return round_layers(layers, Settings("rtn", plan))


@pytest.mark.parametrize("group", [64, 0])
def test_the_error_goes_down_and_integers_stay(
    group: int, pipeline: Pipeline, opened: CalibrationSet
) -> None:
    net = pipeline.model.network("transformer")
    before, ticks = parameter_hash(net), list[tuple[int, float]]()
    weights = rounded(pipeline, 3, group)
    tuned = tune(pipeline, opened, weights, FEW, lambda *tick: ticks.append(tick))
    assert parameter_hash(net) == before and [step for step, _ in ticks] == [*range(1, 13)]
    losses = [loss for _, loss in ticks]
    assert 0 < sum(losses[6:]) < sum(losses[:6])
    assert losses[0] == pytest.approx(tuned.before**2, rel=0.8)  # squared, of other samples
    assert tuned.improved and tuned.after < 0.9 * tuned.before
    for path, weight in weights.items():
        own = tuned.weights[path]
        np.testing.assert_array_equal(own.integers, weight.integers)
        same = np.array_equal(own.grid.scales, weight.grid.scales)
        unused = path == "transformer_blocks.1.attn.add_q_proj"  # no text leaves the last block
        assert same == (is_sensitive(f"{path}.weight") or unused)
        np.testing.assert_array_equal(own.grid.scales, own.grid.scales.astype(np.float16))
        assert own.grid.scales.shape == weight.grid.scales.shape


def test_the_output_is_what_the_sampler_gets(pipeline: Pipeline, opened: CalibrationSet) -> None:
    class Nothing:
        def wants(self, path: str, slot: str) -> bool:
            return False

        def add(self, path: str, slot: str, value: Any) -> None: ...

    net, replay = _Network(pipeline, opened), Replay(pipeline, opened.settings, Nothing())
    guidance = replays.REQUEST.guidance
    assert guidance is not None
    for row in opened.rows("sample"):
        negative, positive = np.array(net.sample(row).wanted)
        x, sigma = latent_of(opened, row), row.entry.sigma or 0.0
        found = x - sigma * (negative + guidance * (positive - negative))
        np.testing.assert_allclose(found, replay.run(row.entry, x), rtol=1e-4, atol=1e-5)


def test_what_got_worse_is_not_kept(pipeline: Pipeline, opened: CalibrationSet) -> None:
    weights = rounded(pipeline, 3)
    tuned = tune(pipeline, opened, weights, replace(FEW, iterations=2, rate=3.0))
    assert not tuned.improved and tuned.after > tuned.before
    assert all(tuned.weights[path] is weight for path, weight in weights.items())


def test_what_is_not_finite_is_an_error_and_the_network_is_as_before(
    pipeline: Pipeline, opened: CalibrationSet
) -> None:
    net = pipeline.model.network("transformer")
    before = parameter_hash(net)
    with pytest.raises(NotFiniteError, match="NaN or Inf"):
        tune(pipeline, opened, rounded(pipeline, 3), replace(FEW, iterations=2, rate=1e38))
    assert parameter_hash(net) == before


@pytest.mark.parametrize("biased", [True, False])
def test_changes_are_in_steps_of_the_grid_and_sizes_of_the_bias(biased: bool) -> None:
    grid = Grid(np.array([[0.5], [2.0]], np.float32), np.array([[-1.0], [3.0]], np.float32), 3)
    bias = np.array([1.0, -3.0], np.float32) if biased else None
    weight = QuantizedWeight(np.zeros((2, 32), np.uint8), grid, bias)
    changes = {name: mx.zeros(shape) for name, shape in (("scale", (2, 1)), ("offset", (2, 1)))}
    changes |= {"bias": mx.array([0.0, 0.25])} if biased else {}
    changes["scale"] += mx.array([[0.25], [-0.5]])
    changes["offset"] += mx.array([[1.0], [-0.5]])
    found = _finished(weight, changes, "float32")
    assert found.grid.scales.tolist() == [[0.625], [1.0]]
    assert found.grid.offsets.tolist() == [[-0.5], [2.0]] and found.integers is weight.integers
    if found.bias is None:
        assert not biased
    else:
        np.testing.assert_allclose(found.bias, [1.0, -2.5], atol=1e-5)


def test_gradients_pass_inputs_that_are_rounded(pipeline: Pipeline, opened: CalibrationSet) -> None:
    scales, lowest = np.array([0.05, 0.04], np.float32), np.array([500, 0], np.float32)
    extras = InputRange(8, scales, 128, times=lowest).extras()
    weights = {
        path: weight if is_sensitive(f"{path}.weight") else replace(weight, extras=extras)
        for path, weight in rounded(pipeline, 3).items()
    }
    tuned = tune(pipeline, opened, weights, replace(FEW, iterations=4))
    assert tuned.improved
    first = "transformer_blocks.0.attn.to_q"  # reached only through the inputs of other layers
    assert (tuned.weights[first].grid.scales != weights[first].grid.scales).any()
    assert tuned.weights[first].extras == extras


def test_a_tuned_layer_rounds_its_input_as_the_quantized_one(pipeline: Pipeline) -> None:
    extras = InputRange(8, np.array([0.05], np.float32), 128).extras()
    layer = _Trained.of(replace(next(iter(rounded(pipeline, 3).values())), extras=extras))
    x = mx.random.normal((5, layer["scales"].shape[1] * layer.group_size))
    expected = QuantizedLinear._rounded_input(layer, x)
    assert mx.allclose(layer._rounded_input(x), expected, atol=1e-6)
    assert not mx.allclose(expected, x, atol=1e-3)
    slope = mx.grad(lambda x: layer._rounded_input(x).sum())(x)
    assert mx.allclose(slope, mx.ones_like(x))


def test_eight_bits_are_not_tuned(pipeline: Pipeline, opened: CalibrationSet) -> None:
    with pytest.raises(InputError, match="fewer than 8 bits"):
        tune(pipeline, opened, rounded(pipeline, 8), FEW)
