"""Scales, offsets and biases tuned by distillation through the whole denoiser; integers stay.

After DWQ of mlx-lm (Hannun, 2025), which tunes language models so. Here the loss is the mean square
of the difference between the outputs of the quantized and of the full-precision network, for the
stored latents of a calibration set. It comes after any other method.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from lydite.calibrate.replay import latent_of, network
from lydite.calibrate.request_record import request_of
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.dtypes import widen
from lydite.core.errors import InputError, NotFiniteError
from lydite.models.layers import QuantizedLinear, at_timestep
from lydite.pipelines.family import Conditioning
from lydite.pipelines.pipeline import SILENT, Pipeline
from lydite.quantize.blocks import HELD_OUT, choose_samples
from lydite.quantize.grid import Grid, ScaleDtype, stored
from lydite.quantize.plan import KEPT_BITS
from lydite.quantize.quantized_weight import QuantizedWeight, exchange_layer
from lydite.trace.mlx_compilation import not_compiled
from lydite.weights.load import to_mlx
from lydite.weights.quantized_format import is_sensitive

Params = dict[str, dict[str, mx.array]]  # of each layer: changes of scale, offset and bias


@dataclass(frozen=True)
class TuneRecipe:
    """How scales are tuned."""

    iterations: int = 200
    batch: int = 4  # samples of an iteration, one after the other
    rate: float = 1e-3  # Adam's, of a step of the grid; falls to 0 as a cosine
    samples: int = 256  # of the set, at most
    store: ScaleDtype = "float16"
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Tuned:
    """Layers, and the relative errors of the network's output on samples not learned from."""

    weights: dict[str, QuantizedWeight]
    before: float
    after: float

    @property
    def improved(self) -> bool:
        """If not, the layers are those before."""
        return self.after < self.before


@dataclass(frozen=True, eq=False)
class _Sample:
    row: Row
    x: mx.array  # (1, …, C)
    wanted: mx.array


def tune(
    pipeline: Pipeline,
    opened: CalibrationSet,
    weights: Mapping[str, QuantizedWeight],
    recipe: TuneRecipe,
    tick: Callable[[int, float], None] = lambda step, loss: None,
) -> Tuned:
    """Tune all layers of fewer than 8 bits but those that compute modulation before the steps."""
    chosen = {
        path: weight
        for path, weight in weights.items()
        if weight.grid.bits < KEPT_BITS and not is_sensitive(f"{path}.weight")
    }
    rows = choose_samples(opened, 1, recipe.samples, recipe.samples)
    if not chosen or len(rows) < 2:
        raise InputError(
            "tuning needs layers of fewer than 8 bits and a set of 2 samples at least."
        )
    with not_compiled(), _Network(pipeline, opened) as net:
        samples = [net.sample(row) for row in rows]
        layers = {path: _Trained.of(weight) for path, weight in chosen.items()}
        others = {path: weight.layer() for path, weight in weights.items() if path not in chosen}
        net.install({**others, **layers})
        held_out = max(int(HELD_OUT * len(samples)), 1)
        learned, unseen = samples[:-held_out], samples[-held_out:]
        before = net.error(unseen)
        params = _learn(net, layers, chosen, learned, recipe, tick)
        tuned = {path: _finished(chosen[path], params[path], recipe.store) for path in chosen}
        net.install({path: weight.layer() for path, weight in tuned.items()})
        after = net.error(unseen)
    if not math.isfinite(after):
        raise NotFiniteError("the network returns NaN or Inf after its scales were tuned.")
    return Tuned({**weights, **tuned} if after < before else dict(weights), before, after)


def _learn(
    net: "_Network",
    layers: Mapping[str, "_Trained"],
    weights: Mapping[str, QuantizedWeight],
    samples: Sequence[_Sample],
    recipe: TuneRecipe,
    tick: Callable[[int, float], None],
) -> Params:
    params: Params = {path: _no_changes(weight) for path, weight in weights.items()}

    def loss(params: Params, run: Callable[[], mx.array], wanted: mx.array) -> mx.array:
        for path, layer in layers.items():
            layer.change(weights[path], params[path])
        return (run() - wanted).square().mean() / wanted.square().mean()

    gradient = mx.value_and_grad(loss)
    optimizer = optim.Adam(recipe.rate)
    generator = np.random.default_rng([recipe.seed, 3])
    for step in range(recipe.iterations):
        total, summed = 0.0, tree_map(mx.zeros_like, params)
        for number in generator.integers(0, len(samples), recipe.batch):
            sample = samples[number]
            value, found = gradient(params, net.bound(sample), sample.wanted)
            summed = tree_map(mx.add, summed, found)
            mx.eval(value, summed)  # the graph of one sample at a time
            total += _number(value) / recipe.batch
        if not math.isfinite(total):
            raise NotFiniteError("the loss of tuning scales is NaN or Inf.")
        optimizer.learning_rate = (
            recipe.rate * 0.5 * (1 + math.cos(math.pi * step / recipe.iterations))
        )
        params = optimizer.apply_gradients(summed, params)
        mx.eval(params, optimizer.state)
        tick(step + 1, total)
    return params


class _Trained(QuantizedLinear):
    """A quantized linear whose scales, offsets and bias are changed from outside."""

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "_Trained":
        rows, inputs = weight.integers.shape
        chosen = weight.format
        layer = cls(inputs, rows, weight.bias is not None, chosen.group, chosen.bits)
        for name, array in weight.arrays().items():
            layer[name] = mx.array(array)
        return layer

    def change(self, weight: QuantizedWeight, changes: Mapping[str, mx.array]) -> None:
        """Use other scales, offsets and biases than the weight's."""
        scales, offsets, bias = _changed(weight, changes)
        repeats = self.scales.shape[1] // scales.shape[1]
        self.scales, self.biases = (mx.repeat(x, repeats, axis=1) for x in (scales, offsets))
        if bias is not None:
            self.bias = bias

    def _rounded_input(self, x: mx.array) -> mx.array:
        moved = self._moved_input(x)
        return moved + mx.stop_gradient(super()._rounded_input(x) - moved)


def _no_changes(weight: QuantizedWeight) -> dict[str, mx.array]:
    changes = {name: mx.zeros(weight.grid.scales.shape) for name in ("scale", "offset")}
    return changes if weight.bias is None else {**changes, "bias": mx.zeros(weight.bias.shape)}


def _changed(
    weight: QuantizedWeight, changes: Mapping[str, mx.array]
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Scales, offsets and bias; changes are in units of a step, or of the bias' own size."""
    scales = mx.array(weight.grid.scales)
    offsets = mx.array(weight.grid.offsets) + scales * changes["offset"]
    scales = scales * (1 + changes["scale"])
    if weight.bias is None:
        return scales, offsets, None
    size = float(np.abs(weight.bias).mean() + 1e-6)
    return scales, offsets, mx.array(weight.bias) + size * changes["bias"]


def _finished(
    weight: QuantizedWeight, changes: Mapping[str, mx.array], store: ScaleDtype
) -> QuantizedWeight:
    scales, offsets, bias = _changed(weight, changes)
    grid = Grid(stored(np.array(scales), store), stored(np.array(offsets), store), weight.grid.bits)
    return replace(weight, grid=grid, bias=None if bias is None else np.array(bias))


def _number(value: mx.array) -> float:
    return float(np.array(value))


class _Network:
    """The network with exchanged layers, and its outputs for samples of a set, in float32."""

    def __init__(self, pipeline: Pipeline, opened: CalibrationSet) -> None:
        self._pipeline, self._opened = pipeline, opened
        request, _ = request_of(opened.settings.conditions)
        self._run = pipeline.plan(request)
        self._network = network(pipeline)
        self._conditioning: dict[str, Conditioning] = {}
        self._replaced: dict[str, nn.Module] = {}

    def __enter__(self) -> "_Network":
        return self

    def __exit__(self, *_: object) -> None:
        for path, layer in self._replaced.items():
            exchange_layer(self._network, path, layer)

    def install(self, layers: Mapping[str, nn.Module]) -> None:
        for path, layer in layers.items():
            before = exchange_layer(self._network, path, layer)
            self._replaced.setdefault(path, before)

    def sample(self, row: Row) -> _Sample:
        """With the output of the network as it is now."""
        x = to_mlx(widen(latent_of(self._opened, row))).astype(mx.float32)[None]
        sample = _Sample(row, x, mx.array(0.0))
        wanted = self.bound(sample)()
        mx.eval(wanted)
        return replace(sample, wanted=wanted)

    def bound(self, sample: _Sample) -> Callable[[], mx.array]:
        """Computes the network's output for a sample, of both prompts where it is guided."""
        entry = sample.row.entry
        assert entry.sigma is not None
        run = replace(self._run, request=self._run.request.replace(prompt=entry.prompt))
        if entry.prompt not in self._conditioning:
            found = self._pipeline.encode(run)
            self._conditioning[entry.prompt] = {
                name: array.astype(mx.float32) for name, array in found.items()
            }
        bound = self._pipeline.family.bind(
            self._pipeline.model, self._conditioning[entry.prompt], run, 1, SILENT
        )
        guided = run.sampler.pair or float(run.strength(entry.sigma)) > 1
        prompts = len(run.prompts) if guided else 1
        x = run.prediction.scaled(sample.x, entry.sigma)
        timestep = run.schedule.timestep_of(entry.sigma)

        def output() -> mx.array:
            with at_timestep(timestep):
                return bound(x, timestep, prompts)

        return output

    def error(self, samples: Sequence[_Sample]) -> float:
        """The relative error of the network's outputs."""
        error = total = 0.0
        for sample in samples:
            found = self.bound(sample)()
            error += _number((found - sample.wanted).square().sum())
            total += _number(sample.wanted.square().sum())
        return math.sqrt(error / max(total, 1e-30))
