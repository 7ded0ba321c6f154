"""Learned rounding: AdaRound, QDrop's joint reconstruction, and TaQ-DiT on top of it.

Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", ICML 2020; Li et al.,
"BRECQ", ICLR 2021; Wei et al., "QDrop: Randomly Dropping Quantization for Extremely Low-bit
Post-Training Quantization", ICLR 2022; Liu et al., "TaQ-DiT: Time-aware Quantization for Diffusion
Transformers", arXiv 2411.14172.

Each weight is rounded up or down by h(α) between 0 and 1, learned so that a module's outputs stay
those of the full-precision module, and driven to 0 or 1 towards the end. The ranges of activations
are learned together with it (LSQ), while half of the activations, at random, are not rounded.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from lydite.core.errors import NotFiniteError
from lydite.models.layers import Linear, of_this_step, on_cpu
from lydite.quantize.blocks import Rows
from lydite.quantize.grid import Floats, Grid, ScaleDtype, stored
from lydite.quantize.input_ranges import InputRange
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.weights.quantized_format import LOW_RANK

LOW, HIGH = -0.1, 1.1  # h is stretched beyond 0 and 1 and clipped, so that it reaches both
TOKENS = 256  # of the model that TaQ-DiT's balance of losses was found on
Arrays = dict[str, mx.array]
Params = dict[str, Arrays]


@dataclass(frozen=True)
class Recipe:
    """How rounding is learned. The defaults are TaQ-DiT's, for its number of iterations."""

    iterations: int = 20_000
    batch: int = 32
    rounding_rate: float = 1e-3  # Adam's, for α
    range_rate: float = 4e-5  # Adam's, for activations; falls to 0 as a cosine
    scale_rate: float = 0.0  # Adam's, for scales, offsets and biases of weights; 0: they stay
    balance: float = 0.01  # λ, the weight of the loss that drives h to 0 or 1
    warm_up: float = 0.2  # share of the iterations without that loss
    sharpest: float = 20.0  # β, falls linearly
    flattest: float = 2.0
    keep: float = 0.5  # share of activations that are not rounded
    mix: float = 0.5  # share of inputs that are those of the full-precision network
    seed: int = 0

    def sharpness(self, step: int) -> float:
        """β at an iteration."""
        start = self.warm_up * self.iterations
        done = max(step - start, 0) / max(self.iterations - start, 1)
        return self.sharpest + (self.flattest - self.sharpest) * done

    def balance_at(self, step: int) -> float:
        """λ at an iteration."""
        return 0.0 if step < self.warm_up * self.iterations else self.balance

    def range_rate_at(self, step: int) -> float:
        """The rate of activation ranges at an iteration."""
        return self.range_rate * 0.5 * (1 + math.cos(math.pi * step / self.iterations))


def short_recipe(iterations: int, seed: int = 0, activations: bool = False) -> Recipe:
    """For few iterations: larger steps, so that weights still reach the other side.

    α begins within ±2.4 and has to cross 0 to be rounded the other way. Where only weights are
    rounded, inputs are those behind quantized blocks.
    """
    rate = min(max(1e-3, 7.0 / iterations), 1e-2)
    mix = 0.5 if activations else 0.0
    return Recipe(iterations=iterations, rounding_rate=rate, mix=mix, seed=seed)


def rounding(alpha: mx.array) -> mx.array:
    """h(α), between 0 (round down) and 1 (round up)."""
    return mx.clip(mx.sigmoid(alpha) * (HIGH - LOW) + LOW, 0, 1)


def inverse_rounding(share: Floats) -> Floats:
    """The α whose h is `share`."""
    return -np.log((HIGH - LOW) / (share - LOW) - 1)


@dataclass(eq=False)
class Target:
    """One linear to round: its grid, and which range its input has.

    Where that range divides channels, `weight` is the one that takes the divisor over.
    """

    weight: Floats
    bias: Floats | None
    grid: Grid
    inputs: str | None = None  # name of the range
    store: ScaleDtype = "float16"  # of scales and offsets, where they are learned
    start: Floats | None = None  # the weight that rounding begins from, where it is another
    branch: Mapping[str, Floats] = field(default_factory=dict[str, Floats])  # of low rank, beside


class TrialLinear(Linear):
    """A linear whose weight is set from outside, and whose input may be rounded.

    Linears of the same input, such as query, key and value, share `last`: that input, and what it
    was rounded to.
    """

    def __init__(
        self, target: Target, inputs: InputRange | None, last: list[mx.array] | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.weight = mx.array(target.weight)
        if target.bias is not None:
            self.bias = mx.array(target.bias)
        # Not parameters: a private attribute is none in mlx.nn.
        self._inputs, self._scale = inputs, mx.array(inputs.scale if inputs else 1.0)
        self._last: list[mx.array] = [] if last is None else last
        self._times = mx.array(inputs.times) if inputs and inputs.times is not None else None
        # One number for each channel: mx.compile writes a single number into the source of a
        # kernel, and each layer would have to compile its own.
        zero = np.asarray(inputs.zero if inputs else 0.0, np.float32)
        self._zero = mx.array(zero if zero.ndim else np.full(target.weight.shape[1], zero))
        self._keep: tuple[float, mx.array] | None = None
        self._shift = mx.array(inputs.shift) if inputs and inputs.shift is not None else None
        self._divisor = mx.array(inputs.divisor) if inputs and inputs.divisor is not None else None
        self._branch = [mx.array(target.branch[name]) for name in LOW_RANK if target.branch]

    def __call__(self, x: mx.array) -> mx.array:
        y = self._product(x)
        if self._branch:
            down, up = self._branch
            y = y + (x @ down.T) @ up.T
        return y

    def _product(self, x: mx.array) -> mx.array:
        if self._inputs is None:
            return super().__call__(x)
        if not self._last or self._last[0] is not x:
            self._last[:] = [x, self._rounded(x, self._inputs.most)]
        return super().__call__(self._last[1])

    def _rounded(self, x: mx.array, most: int) -> mx.array:
        if self._shift is not None:
            x = x - self._shift
        if self._divisor is not None:
            x = x / self._divisor
        scale, zero = self._scale, self._zero
        if self._times is not None:
            scale, zero = of_this_step((scale, zero), self._times, x.ndim)
        rounded = round_input(x, scale, zero, most)
        if self._keep is None:
            return rounded
        share, key = self._keep
        return mx.where(mx.random.bernoulli(share, x.shape, key), x, rounded)


def round_input(x: mx.array, scale: mx.array, zero: mx.array | float, most: int) -> mx.array:
    """x on the grid scale · (0 … most − zero), with gradients for x inside it and for the scale.

    The gradient of the scale is divided by √(values · most), as LSQ does.
    """
    weight = 1 / math.sqrt(x.size * most)
    scale = mx.maximum(mx.abs(scale), 1e-9)
    scale = mx.stop_gradient(scale * (1 - weight)) + scale * weight
    steps = x / scale
    steps = steps + mx.stop_gradient(mx.round(steps) - steps)  # rounding passes gradients on
    return (mx.clip(steps + zero, 0, most) - zero) * scale


@dataclass(eq=False)
class Learned:
    """The result of one reconstruction, and its errors on rows that were not learned from."""

    weights: dict[str, QuantizedWeight]
    before: float  # rounded to nearest
    after: float
    undecided: float  # share of weights whose h was not within 1e-3 of 0 or 1 at the end


@dataclass(eq=False)
class Problem:
    """A module to reconstruct: its layers by name, its rows, and what it should return."""

    module: Any
    install: Callable[[Mapping[str, nn.Module]], None]
    targets: Mapping[str, Target]
    ranges: Mapping[str, InputRange]
    rows: Sequence[Rows]
    outputs: Sequence[list[mx.array]]  # of the full-precision module, for each of `rows`

    def error(self) -> float:
        """The relative error of the outputs on held-out rows, with the layers as they are."""
        pairs = [
            rows.error(self.module, wanted)
            for rows, wanted in zip(self.rows, self.outputs, strict=True)
        ]
        error, total = (sum(each) for each in zip(*pairs, strict=True))
        return math.sqrt(error / max(total, 1e-30))


def reconstruct(
    problem: Problem,
    recipe: Recipe,
    *,
    tick: Callable[[int, float], None] = lambda step, loss: None,
) -> Learned:
    """Learn how the weights of a module are rounded."""
    last: dict[str, list[mx.array]] = {name: [] for name in problem.ranges}
    trial = {
        name: TrialLinear(
            target, problem.ranges.get(target.inputs or ""), last.get(target.inputs or "")
        )
        for name, target in problem.targets.items()
    }
    floors, params = _start(problem, recipe)
    problem.install(trial)
    nearest = {name: target.grid.round(target.weight) for name, target in problem.targets.items()}
    before = _held_out_error(problem, trial, nearest, params)
    optimizers = {group: each for group, each in _optimizers(recipe).items() if group in params}
    for group, optimizer in optimizers.items():
        optimizer.init(params[group])

    def loss(params: Params, rows: Rows, batch: Arrays, wanted: list[mx.array]) -> mx.array:
        _set_soft(trial, problem, params, floors, recipe, batch["key"])
        total = mx.array(0.0)
        for output, full in zip(rows.call(problem.module, batch), wanted, strict=True):
            tokens = output.size // (output.shape[0] * output.shape[-1])
            squares = (output.astype(mx.float32) - full).square()
            total = total + squares.mean(axis=(0, -1)).sum() * (TOKENS / tokens)
        for alpha in params["alpha"].values():
            decided = mx.abs(2 * rounding(alpha) - 1) ** batch["sharpness"]
            total = total + batch["balance"] * (1 - decided).sum()
        return total

    steps = [_step(loss, rows, optimizers) for rows in problem.rows]
    learned = np.array([rows.learned for rows in problem.rows])
    generator = np.random.default_rng([recipe.seed, 1])
    key = mx.random.key(recipe.seed)
    for step in range(recipe.iterations):
        chosen = generator.choice(len(learned), p=learned / learned.sum())
        index = generator.integers(0, learned[chosen], recipe.batch)
        key, own = mx.random.split(key)
        schedule = {
            "sharpness": mx.array(recipe.sharpness(step)),
            "balance": mx.array(recipe.balance_at(step)),
        }
        if "range" in optimizers:
            optimizers["range"].learning_rate = recipe.range_rate_at(step)
        pieces = _pieces(problem.rows[chosen], problem.outputs[chosen], index, recipe.mix, own)
        value, params = steps[chosen](params, schedule, pieces)
        # No iteration ahead of the GPU: it would take its memory a second time.
        mx.eval(params, [optimizer.state for optimizer in optimizers.values()], value)
        if not math.isfinite(reached := float(value)):
            raise NotFiniteError("the loss of the reconstruction is NaN or Inf.")
        tick(step + 1, reached)
    hard = {
        name: _hardened(problem.targets[name], floors[name], alpha)
        for name, alpha in params["alpha"].items()
    }
    after = _held_out_error(problem, trial, hard, params)
    undecided = _undecided(params["alpha"])
    if after > before:  # too few iterations, or too few rows: the start is the better end
        hard, params, after = nearest, _start(problem, recipe)[1], before
    return Learned(_finished(problem, hard, params), before, after, undecided)


Piece = tuple[Arrays, list[mx.array]]  # inputs, and the outputs of the full-precision module


def _pieces(
    rows: Rows, outputs: Sequence[mx.array], index: NDArray[np.int64], mix: float, key: mx.array
) -> Iterator[Piece]:
    """A batch in pieces of the same size, each of which fits the memory."""
    count = next(
        n
        for n in range(1, len(index) + 1)
        if len(index) % n == 0 and len(index) // n <= rows.at_once
    )
    for part in np.split(index, count):
        key, own, mixing = mx.random.split(key, 3)
        batch = _mixed(rows, mx.array(part), mix, mixing)
        yield {**batch, "key": own}, [full[mx.array(part)] for full in outputs]


def _step(
    loss: Callable[..., mx.array], rows: Rows, optimizers: Mapping[str, optim.Adam]
) -> Callable[..., tuple[mx.array, Params]]:
    """One iteration: the loss and the parameters after it; on a GPU fewer, larger kernels."""
    gradient = mx.value_and_grad(lambda params, *rest: loss(params, rows, *rest))

    def update(gradients: Params, params: Params) -> Params:
        return {
            group: optimizer.apply_gradients(gradients[group], params[group])
            for group, optimizer in optimizers.items()
        }

    if not on_cpu():
        state = [optimizer.state for optimizer in optimizers.values()]
        gradient, update = mx.compile(gradient), mx.compile(update, inputs=state, outputs=state)

    def step(params: Params, schedule: Arrays, pieces: Iterable[Piece]) -> tuple[mx.array, Params]:
        sums, count = None, 0
        for batch, wanted in pieces:
            found = gradient(params, {**batch, **schedule}, wanted)
            sums = found if sums is None else tree_map(mx.add, sums, found)
            mx.eval(sums)  # one piece in memory at a time
            count += 1
        value, gradients = tree_map(lambda total: total / count, sums)
        return value, update(gradients, params)

    return step


def _hardened(target: Target, floor: mx.array, alpha: mx.array) -> NDArray[np.uint8]:
    """The integers that learned rounding ends in."""
    steps = mx.clip(floor + (alpha >= 0), 0, target.grid.most)
    return np.array(steps.astype(mx.uint8)).reshape(target.weight.shape)


def _start(problem: Problem, recipe: Recipe) -> tuple[Arrays, Params]:
    """The integers below each weight, and the parameters before the first iteration."""
    floors: Arrays = {}
    alphas: Arrays = {}
    for name, target in problem.targets.items():
        begin = target.weight if target.start is None else target.start
        position = target.grid.position(begin)  # (rows, groups, inputs of a group)
        floor = np.floor(np.clip(position, -0.5, target.grid.most + 0.5))
        position = np.clip(position, floor, floor + 1)
        floors[name] = mx.array(floor)
        alphas[name] = mx.array(inverse_rounding(position - floor).astype(np.float32))
    params: Params = {"alpha": alphas}
    if problem.ranges:
        params["range"] = {name: mx.array(each.scale) for name, each in problem.ranges.items()}
    if recipe.scale_rate:
        params["weight"] = {}
        for name, target in problem.targets.items():
            params["weight"][f"{name} scale"] = mx.ones(target.grid.scales.shape)
            params["weight"][f"{name} offset"] = mx.zeros(target.grid.scales.shape)
            if target.bias is not None:
                params["weight"][f"{name} bias"] = mx.zeros(target.bias.shape)
    return floors, params


def _weight(target: Target, steps: mx.array, params: Params, name: str) -> mx.array:
    """The weight for integers, or real numbers, on its grid."""
    scales, offsets = mx.array(target.grid.scales), mx.array(target.grid.offsets)
    if "weight" in params:
        # in units of a step of the grid: Adam's rate then means the same for every layer
        offsets = offsets + scales * params["weight"][f"{name} offset"]
        scales = scales * params["weight"][f"{name} scale"]
    steps = mx.clip(steps, 0, target.grid.most)
    return (steps * scales[..., None] + offsets[..., None]).reshape(target.weight.shape)


def _bias(target: Target, params: Params, name: str) -> mx.array | None:
    if target.bias is None:
        return None
    bias = mx.array(target.bias)
    change = params.get("weight", {}).get(f"{name} bias")
    # in units of the bias' own size, for the same reason; not one number, as in TrialLinear
    unit = np.full_like(target.bias, np.abs(target.bias).mean() + 1e-6)
    return bias if change is None else bias + change * mx.array(unit)


def _folded(bias: mx.array | None, weight: mx.array, inputs: InputRange) -> mx.array | None:
    """The bias that gives back what the shift of the input takes."""
    folded = inputs.folded()
    if folded is None:
        return bias
    given = weight @ mx.array(folded)
    return given if bias is None else bias + given


def _set(trial: Mapping[str, TrialLinear], problem: Problem, params: Params, steps: Arrays) -> None:
    for name, target in problem.targets.items():
        layer = trial[name]
        layer._last.clear()
        layer.weight = _weight(target, steps[name], params, name)
        bias = _bias(target, params, name)
        if target.inputs:
            layer._scale = params["range"][target.inputs]
            bias = _folded(bias, layer.weight, problem.ranges[target.inputs])
        if bias is not None:
            layer.bias = bias


def _set_soft(
    trial: Mapping[str, TrialLinear],
    problem: Problem,
    params: Params,
    floors: Arrays,
    recipe: Recipe,
    key: mx.array,
) -> None:
    steps = {name: floors[name] + rounding(alpha) for name, alpha in params["alpha"].items()}
    _set(trial, problem, params, steps)
    for layer, each in zip(trial.values(), mx.random.split(key, len(trial)), strict=True):
        layer._keep = (recipe.keep, each) if recipe.keep else None


def _mixed(rows: Rows, index: mx.array, share: float, key: mx.array) -> Arrays:
    """Inputs behind quantized blocks, a share of their values from the full-precision network."""
    mixed = rows.arrays(rows.quantized, index)
    for name, full in rows.full.items() if share else ():
        key, own = mx.random.split(key)
        chosen = mx.random.bernoulli(share, mixed[name].shape, own)
        mixed[name] = mx.where(chosen, full[index], mixed[name])
    return mixed


def _optimizers(recipe: Recipe) -> dict[str, optim.Adam]:
    return {
        "alpha": optim.Adam(recipe.rounding_rate),
        "range": optim.Adam(recipe.range_rate),
        "weight": optim.Adam(recipe.scale_rate),
    }


def _held_out_error(
    problem: Problem,
    trial: Mapping[str, TrialLinear],
    integers: Mapping[str, NDArray[np.uint8]],
    params: Params,
) -> float:
    steps = {
        name: mx.array(problem.targets[name].grid.grouped(each.astype(np.float32)))
        for name, each in integers.items()
    }
    _set(trial, problem, params, steps)
    for layer in trial.values():
        layer._keep = None
    return problem.error()


def _undecided(alphas: Arrays) -> float:
    shares = [np.array(rounding(alpha)).reshape(-1) for alpha in alphas.values()]
    values = np.concatenate(shares)
    return float(((values > 1e-3) & (values < 1 - 1e-3)).mean())


def _finished(
    problem: Problem, integers: Mapping[str, NDArray[np.uint8]], params: Params
) -> dict[str, QuantizedWeight]:
    finished: dict[str, QuantizedWeight] = {}
    for name, target in problem.targets.items():
        grid, extras = target.grid, dict(target.branch)
        if "weight" in params:
            scale, offset = (np.array(params["weight"][f"{name} {x}"]) for x in ("scale", "offset"))
            scales, offsets = grid.scales * scale, grid.offsets + grid.scales * offset
            grid = Grid(stored(scales, target.store), stored(offsets, target.store), grid.bits)
        bias = _bias(target, params, name)
        if target.inputs:
            each = problem.ranges[target.inputs]
            bias = _folded(bias, mx.array(grid.values(integers[name])), each)
            scale = np.maximum(np.abs(np.array(params["range"][target.inputs])), 1e-9)
            extras |= replace(each, scale=scale).extras()
        found = None if bias is None else np.array(bias)
        finished[name] = QuantizedWeight(integers[name], grid, found, extras)
    return finished
