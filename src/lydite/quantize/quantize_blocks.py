"""Quantize a network: block by block, from the rows of a calibration set."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from lydite.models.layers import FLOAT_PRODUCTS, input_products
from lydite.pipelines.family import Family
from lydite.quantize.blocks import TIMES, Block, BlockRows, Rows, capture_unit
from lydite.quantize.grid import Floats, Grid, ScaleDtype, fit_grid, float_grid
from lydite.quantize.input_ranges import (
    InputRange,
    balance,
    group_times,
    is_behind_gelu,
    plain_range,
    time_aware_range,
)
from lydite.quantize.methods.awq import fold_scales, value_pairs
from lydite.quantize.methods.gptq import Inputs, gptq, prepare_inputs
from lydite.quantize.methods.hqq import hqq_grid
from lydite.quantize.methods.low_rank import low_rank
from lydite.quantize.methods.reconstruct import Problem, Recipe, Target, reconstruct
from lydite.quantize.plan import KEPT_BITS, LayerPlan, Plan
from lydite.quantize.provenance import UnitError
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.quantize.range_search import Range
from lydite.quantize.watch_modules import watch_calls
from lydite.trace.mlx_capture import walk

Method = Literal[
    "rtn", "hqq", "awq", "gptq", "adaround", "joint", "taqdit", "smoothquant", "ptq4dit"
]
AFFINE_ONLY: tuple[Method, ...] = ("hqq", "adaround", "joint", "taqdit", "ptq4dit")
DATA_FREE: tuple[Method, ...] = ("rtn", "hqq")
LEARNED: tuple[Method, ...] = ("adaround", "joint", "taqdit", "ptq4dit")
CALIBRATED: tuple[Method, ...] = ("gptq", *LEARNED)
SEEN_ROWS, GROUP_ROWS = 64, 16  # by which ranges of activations are found: in all, of a group


@dataclass(frozen=True)
class Settings:
    """What decides the result, beside the model and the calibration set."""

    method: Method
    plan: Plan
    act_bits: int | None = None  # of the inputs of linears, simulated
    act_groups: int = 1  # of steps, each with a range of its own
    quantize_input: bool = False  # to the format of the weights, where MLX has such products
    search: Range = "mse"  # of the range of weights
    recipe: Recipe = field(default_factory=Recipe)
    unit: Literal["module", "block"] = "module"
    start: Literal["weights", "gptq"] = "weights"  # of learned rounding
    shift: bool = True  # of TaQ-DiT
    migrate: bool = True
    store: ScaleDtype = "float16"
    rank: int = 0  # of a branch at 16 bits beside each weight of fewer than 8 bits
    tune: int = 0  # iterations of DWQ after it

    @property
    def activations(self) -> Literal["simulated", "mx.qqmm"] | None:
        """How inputs are rounded on this device, if they are."""
        if self.quantize_input:
            return input_products(each.mode for each in self.plan.layers.values())
        return input_products(()) if self.act_bits else None


@dataclass(eq=False)
class BlockResult:
    """The layers of one block, and the proof that they were learned."""

    path: str
    weights: dict[str, QuantizedWeight]
    errors: list[UnitError] = field(default_factory=list[UnitError])


def round_layers(layers: Mapping[str, nn.Module], settings: Settings) -> dict[str, QuantizedWeight]:
    """Linears without any data: round-to-nearest, or HQQ's grid."""
    return {
        path: _rounded(layers[path], settings.plan.layers[path], settings)
        for path in layers
        if path in settings.plan.layers
    }


def quantize_blocks(
    rows: BlockRows,
    family: Family,
    settings: Settings,
    *,
    finished: Mapping[str, BlockResult] | None = None,
    on_step: Callable[[str, int, float], None] = lambda unit, step, loss: None,
) -> Iterator[BlockResult]:
    """Each block's result; `finished` ones are taken as they are."""
    for block, each in rows.walk():
        done = (finished or {}).get(block.path)
        result = done or _Block(rows, family, settings, block, each, on_step).quantize()
        rows.quantized |= {path: weight.layer() for path, weight in result.weights.items()}
        rows.install({path: rows.full[path] for path in block.linears})
        yield result


@dataclass(eq=False)
class _Block:
    """One block under work."""

    source: BlockRows
    family: Family
    settings: Settings
    block: Block
    rows: list[Rows]
    on_step: Callable[[str, int, float], None]

    def quantize(self) -> BlockResult:
        self.result = BlockResult(self.block.path, {})
        stages = self._stages()
        called = {path for stage in stages for path in stage}
        planned = [path for path in self.block.linears if path in self.settings.plan.layers]
        # those outside the block's call, such as modulation, have no rows
        self._finish(
            round_layers(self._full([p for p in planned if p not in called]), self.settings)
        )
        if self.settings.method == "awq":
            self._fold_scales(stages)
        if self.settings.method in LEARNED:
            self._learn(stages)
        else:
            self._in_stages(stages)
        return self.result

    def _full(self, paths: Sequence[str]) -> dict[str, nn.Module]:
        return {path: self.source.full[path] for path in paths}

    def _finish(self, weights: Mapping[str, QuantizedWeight]) -> None:
        self.result.weights |= weights
        self.source.install({path: weight.layer() for path, weight in weights.items()})

    def _stages(self) -> list[list[str]]:
        """Planned linears that the block calls, those of one input together, in order of calls."""
        stages: dict[int, list[str]] = {}
        alive: list[Any] = []

        def keep(path: str, args: Any, kwargs: Any, output: Any) -> Any:
            alive.append(args[0])  # while it lives, its id is its own
            stages.setdefault(id(args[0]), []).append(path)
            return output

        layers = self._full([p for p in self.block.linears if p in self.settings.plan.layers])
        with watch_calls(layers, keep):
            first = self.rows[0]
            mx.eval(first.call(self.block.module, first.arrays(first.full, slice(0, 1))))
        return list(stages.values())

    def _fold_scales(self, stages: Sequence[Sequence[str]]) -> None:
        """AWQ: exchange the full-precision layers by others that compute the same."""
        parts = {path: weight_of(self.source.full[path]) for stage in stages for path in stage}
        weights = {path: weight for path, (weight, _) in parts.items()}
        biases = {path: bias for path, (_, bias) in parts.items() if bias is not None}

        def rounded(path: str, weight: Floats) -> Floats:
            grid = _grid(weight, self.settings.plan.layers[path], self.settings)
            return grid.values(grid.round(weight))

        for pair in value_pairs(weights):
            inputs = {path: self._inputs(path) for path in pair.taking}
            changed, moved = fold_scales(pair, weights, biases, inputs, rounded)
            for path in (*pair.giving, *pair.taking):
                layer: Any = copy(self.source.full[path])
                layer.weight = mx.array(changed[path])
                if path in moved:
                    layer.bias = mx.array(moved[path])
                self.source.full[path] = layer
                self.source.install({path: layer})

    # One linear after the other

    def _in_stages(self, stages: Sequence[Sequence[str]]) -> None:
        outputs = [rows.forward(self.block.module, rows.full) for rows in self.rows]
        problem = Problem(self.block.module, self.source.install, {}, {}, self.rows, outputs)
        nearest = round_layers(
            self._full([path for stage in stages for path in stage]),
            replace(self.settings, method="rtn", rank=0),
        )
        self.source.install({path: weight.layer() for path, weight in nearest.items()})
        before = problem.error()
        self.source.install(self._full([path for stage in stages for path in stage]))
        for stage in stages:
            weights = nearest
            inputs = self._input_range(stage) if self.settings.act_bits else None
            if self.settings.method == "gptq":
                known = self._known_inputs(stage[0], inputs)
                weights = {path: self._gptq(path, known, inputs) for path in stage}
            elif self.settings.method in ("hqq", "awq") or self.settings.rank or inputs is not None:
                weights = {path: self._plain(path, inputs) for path in stage}
            self._finish({path: weights[path] for path in stage})
        self.result.errors.append(UnitError(self.block.path, before, problem.error()))

    def _known_inputs(self, path: str, inputs: InputRange | None) -> Inputs:
        """For GPTQ: the sum of x·xᵀ over the inputs of a linear behind quantized blocks."""
        sums: list[NDArray[np.float64]] = []

        def add(_: str, args: Any, kwargs: Any, output: Any) -> Any:
            x = args[0].reshape(-1, args[0].shape[-1]).astype(mx.float32)
            if inputs is not None and inputs.divisor is not None:
                x = x / mx.array(inputs.divisor)
            product = np.array(x.T @ x, np.float64)
            sums[:] = [product + (sums[0] if sums else 0)]
            return output

        self._run_learned(path, add)
        return prepare_inputs(sums[0])

    def _run_learned(
        self,
        path: str,
        on_call: Any,
        most: int | None = None,
        times: tuple[float, float] = (-np.inf, np.inf),
    ) -> None:
        """Run the block, as it is now, on the rows to learn from; report a linear's calls."""
        low, high = times
        with watch_calls({path: self.source.installed(path)}, on_call):
            for rows in self.rows:
                own = np.array(rows.shared[TIMES][: rows.learned])
                chosen = np.flatnonzero((low <= own) & (own < high))[:most]
                for first in range(0, len(chosen), rows.at_once):
                    batch = mx.array(chosen[first : first + rows.at_once])
                    mx.eval(rows.call(self.block.module, rows.arrays(rows.quantized, batch)))

    def _gptq(self, path: str, known: Inputs, inputs: InputRange | None) -> QuantizedWeight:
        target = self._target(path, inputs)
        integers, _ = gptq(target.weight, known, target.grid)
        return _result(target, integers, inputs, self.settings)

    def _plain(self, path: str, inputs: InputRange | None) -> QuantizedWeight:
        target = self._target(path, inputs)
        return _result(target, target.grid.round(target.weight), inputs, self.settings)

    def _target(
        self, path: str, inputs: InputRange | None = None, name: str | None = None
    ) -> Target:
        plan = self.settings.plan.layers[path]
        return _target(self.source.full[path], plan, self.settings, inputs, name)

    # Ranges of activations

    def _input_range(self, stage: Sequence[str]) -> InputRange:
        found = self._range_of(stage, self._inputs(stage[0]))
        if self.settings.act_groups == 1:
            return found
        lowest = group_times(self._learned_times(), self.settings.act_groups)
        return found.for_groups(  # the inputs of one group in memory at a time
            (low, self._inputs(stage[0], GROUP_ROWS, (low, above)))
            for low, above in zip(lowest, [np.inf, *lowest], strict=False)
        )

    def _learned_times(self, most: int | None = None) -> Floats:
        """Timesteps of the rows to learn from, in their order."""
        return np.concatenate(
            [np.array(rows.shared[TIMES][: rows.learned])[:most] for rows in self.rows]
        )

    def _inputs(
        self, path: str, most: int = SEEN_ROWS, times: tuple[float, float] = (-np.inf, np.inf)
    ) -> Floats:
        """The inputs of a linear at some rows, of steps from one to below another timestep.

        (rows, tokens, channels), as many as fit the memory for one call of the block.
        """
        found: list[Floats] = []

        def keep(_: str, args: Any, kwargs: Any, output: Any) -> Any:
            if sum(each.nbytes for each in found) < self.source.call_bytes:
                found.append(np.array(args[0].astype(mx.float32)))
            return output

        self._run_learned(path, keep, most, times)
        return np.concatenate([each.reshape(len(each), -1, each.shape[-1]) for each in found])

    def _range_of(self, stage: Sequence[str], values: Floats) -> InputRange:
        assert self.settings.act_bits is not None
        bits, method = self.settings.act_bits, self.settings.method
        if method == "taqdit" and is_behind_gelu(values).any():
            return time_aware_range(
                values,
                bits,
                shift=self.settings.shift,
                migrate=self.settings.migrate,
                seed=self.settings.recipe.seed,
            )
        if method in ("smoothquant", "ptq4dit") and not is_behind_gelu(values).any():
            weights = [weight_of(self.source.full[path])[0] for path in stage]
            times = self._learned_times(SEEN_ROWS)[: len(values)] if method == "ptq4dit" else None
            divisor = balance(values, weights, times=times)
            return replace(plain_range(values / divisor, bits), divisor=divisor)
        return plain_range(values, bits)

    # A module at a time

    def _learn(self, stages: Sequence[Sequence[str]]) -> None:
        ranges: dict[str, InputRange] = {}
        names: dict[str, str] = {}
        if self.settings.act_bits and self.settings.method != "adaround":
            for stage in stages:
                ranges[stage[0]] = self._input_range(stage)
                names |= dict.fromkeys(stage, stage[0])
        called = [path for stage in stages for path in stage]
        for path, module, paths in units_of(self.family, self.block, called, self.settings):
            rows, outputs = capture_unit(self.source, self.block, module, self.rows)
            used = {
                name: ranges[name]
                for name in dict.fromkeys(names.get(p, "") for p in paths)
                if name
            }
            targets = {
                each: self._target(each, used.get(names.get(each, "")), names.get(each))
                for each in paths
            }
            if self.settings.start == "gptq":
                self._start_from_gptq(targets, used, stages)
            problem = Problem(module, self.source.install, targets, used, rows, outputs)
            learned = reconstruct(
                problem,
                self.settings.recipe,
                tick=lambda step, loss, path=path: self.on_step(path, step, loss),
            )
            self._finish(learned.weights)
            if self.settings.method == "adaround" and self.settings.act_bits:
                self._finish(self._with_ranges(learned.weights, stages))
            # with the layers as they will be stored
            self.result.errors.append(UnitError(path, learned.before, problem.error()))

    def _start_from_gptq(
        self,
        targets: Mapping[str, Target],
        ranges: Mapping[str, InputRange],
        stages: Sequence[Sequence[str]],
    ) -> None:
        """Begin with weights that make up for the rounding of others."""
        for stage in stages:
            own = [path for path in stage if path in targets]
            if not own:
                continue
            known = self._known_inputs(own[0], ranges.get(targets[own[0]].inputs or ""))
            for path in own:
                target = targets[path]
                integers, target.start = gptq(target.weight, known, target.grid)
                self.source.install(
                    {
                        path: _result(
                            target, integers, ranges.get(target.inputs or ""), self.settings
                        ).layer()
                    }
                )

    def _with_ranges(
        self, weights: Mapping[str, QuantizedWeight], stages: Sequence[Sequence[str]]
    ) -> dict[str, QuantizedWeight]:
        """The same weights with ranges for their inputs."""
        found: dict[str, QuantizedWeight] = {}
        for stage in stages:
            own = [path for path in stage if path in weights]
            if own:
                extras = self._input_range(own).extras()
                found |= {
                    path: replace(weights[path], extras={**weights[path].extras, **extras})
                    for path in own
                }
        return found


def units_of(
    family: Family, block: Block, called: Sequence[str], settings: Settings
) -> list[tuple[str, nn.Module, list[str]]]:
    """Modules to reconstruct with the called linears inside each, in order of calls."""
    modules = {
        f"{block.path}.{path}" if path else block.path: module
        for path, module in walk(block.module)
    }
    units = [path for path in modules if any(re.fullmatch(r.modules, path) for r in family.blocks)]
    inside = {unit: [path for path in called if path.startswith(f"{unit}.")] for unit in units}
    covered = sum(len(paths) for paths in inside.values())
    if settings.unit == "block" or covered < len(called):
        return [(block.path, block.module, list(called))]
    order = sorted(
        (unit for unit in units if inside[unit]), key=lambda u: called.index(inside[u][0])
    )
    return [(unit, modules[unit], inside[unit]) for unit in order]


def _rounded(layer: nn.Module, plan: LayerPlan, settings: Settings) -> QuantizedWeight:
    target = _target(layer, plan, settings)
    return _result(target, target.grid.round(target.weight), None, settings)


def _target(
    layer: nn.Module,
    plan: LayerPlan,
    settings: Settings,
    inputs: InputRange | None = None,
    name: str | None = None,
) -> Target:
    """What is rounded of a linear: its weight, or what a branch of low rank leaves of it."""
    weight, bias = weight_of(layer)
    weight = weight if inputs is None else inputs.scaled(weight)
    extras: dict[str, Floats] = {}
    if settings.rank and plan.bits < KEPT_BITS:
        branch = low_rank(
            weight, lambda w: _grid(w, plan, settings), settings.rank, store=settings.store
        )
        weight, extras = branch.residual, branch.extras(inputs and inputs.divisor)
    grid = _grid(weight, plan, settings)
    return Target(weight, bias, grid, name, settings.store, branch=extras)


def weight_of(layer: Any) -> tuple[Floats, Floats | None]:
    """Of a linear, or of a convolution as a matrix, in float32."""
    weight = np.array(layer.weight.flatten(1).astype(mx.float32))
    return weight, np.array(layer.bias.astype(mx.float32)) if "bias" in layer else None


def _grid(weight: Floats, plan: LayerPlan, settings: Settings) -> Grid:
    group = plan.group or None
    if plan.mode != "affine":
        return float_grid(weight, plan.mode)
    if settings.method == "hqq":
        return hqq_grid(weight, plan.bits, group, settings.store)
    search = "minmax" if settings.method == "rtn" else settings.search
    return fit_grid(weight, plan.bits, group, search=search, store=settings.store)


def _result(
    target: Target, integers: NDArray[np.uint8], inputs: InputRange | None, settings: Settings
) -> QuantizedWeight:
    if inputs is None:
        rounded = settings.quantize_input and target.grid.mode in FLOAT_PRODUCTS
        return QuantizedWeight(integers, target.grid, target.bias, target.branch, rounded)
    bias, folded = target.bias, inputs.folded()
    if folded is not None:
        given = target.grid.values(integers) @ folded
        bias = given if bias is None else bias + given
    return QuantizedWeight(integers, target.grid, bias, {**inputs.extras(), **target.branch})
