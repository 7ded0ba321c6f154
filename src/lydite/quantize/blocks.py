"""The blocks of a network, one after the other, with the inputs that a calibration set gives them.

Each block has its rows twice: as in the full-precision network, and as behind quantized blocks.
Both start from the set's own latents. Inputs that were collected along the quantized model's own
trajectory would be paired with targets of another one. Only the rows of one block are in memory.

Where a block takes what the block before it returned, its rows are computed from the rows of that
block alone; otherwise the network is run again up to the block.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from lydite.calibrate.replay import Replay, latent_of, network
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.errors import CalibrationError, InputError, NotFiniteError
from lydite.core.files import size_text
from lydite.models.layers import at_timestep
from lydite.pipelines.family import Family
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.quantized_weight import exchange_layer, layer_at
from lydite.quantize.watch_modules import watch_calls
from lydite.trace.mlx_capture import walk

BATCH = 64  # rows of a call, at most
CALL_BYTES = 4 * 2**30  # that the values of a call, with their gradients, may take
# Of each value and each score of attention, how many are in memory while gradients are computed:
# as measured on an H200 (benchmarks/README.md, learned rounding).
KEPT_VALUES, KEPT_SCORES = 8, 4
HELD_OUT = 0.125  # share of the samples that only measure the error
TIMES = "timestep"  # of each row, among what rows share
Leaves = dict[str, Any]  # the flattened arguments of a call: arrays and anything else
_PARENT = re.compile(r"(.*\.\d+)\.[^.]+")


@dataclass(frozen=True, eq=False)
class Block:
    """One of the repeated blocks of a network, and the linears inside it."""

    path: str
    module: Any
    linears: tuple[str, ...]  # paths from the network on


def find_blocks(family: Family, net: nn.Module) -> list[Block]:
    """The blocks that the family's units of reconstruction are parts of."""
    modules = dict(walk(net))
    parents: dict[str, None] = {}
    for path in modules:
        is_unit = any(re.fullmatch(rule.modules, path) for rule in family.blocks)
        if is_unit and (parent := _PARENT.fullmatch(path)):
            parents[parent.group(1)] = None
    return [
        Block(path, modules[path], tuple(n for n in _linears(modules) if n.startswith(f"{path}.")))
        for path in parents
    ]


def _linears(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    return (path for path, module in modules.items() if isinstance(module, nn.Linear))


@dataclass(eq=False)
class Rows:
    """Calls of one block whose inputs have the same shapes, joined along the batch.

    `full` is what the block takes in the full-precision network, `quantized` what it takes behind
    quantized blocks, `shared` what is the same in both: (rows, …) by key. `fixed` is the same for
    all rows as well.
    """

    samples: list[int]  # their numbers among all samples
    fixed: Leaves
    shared: dict[str, mx.array]
    full: dict[str, mx.array]
    quantized: dict[str, mx.array]
    at_once: int = BATCH  # rows of a call

    def __len__(self) -> int:
        return len(next(iter((self.full or self.shared).values())))

    @property
    def learned(self) -> int:
        """How many rows, from the first, are learned from; the others measure the error."""
        size = len(self) // len(self.samples)
        held_out = int(HELD_OUT * len(self.samples)) or (len(self.samples) > 1)
        return len(self) - held_out * size

    def arrays(self, side: Mapping[str, mx.array], index: Any) -> dict[str, mx.array]:
        """Those of a side, `full` or `quantized`, at some rows."""
        return {key: array[index] for key, array in {**self.shared, **side}.items()}

    def call(self, module: Any, arrays: Mapping[str, mx.array]) -> list[mx.array]:
        """What a block returns for these arrays and what is fixed."""
        own = {key: array for key, array in arrays.items() if key.startswith(("args.", "kwargs."))}
        args, kwargs = _unflatten({**self.fixed, **own})
        with at_timestep(arrays.get(TIMES)):
            return output_arrays(module(*args, **kwargs))

    def batches(self, first: int = 0, stop: int | None = None) -> Iterator[slice]:
        """Rows in pieces of one call."""
        stop = len(self) if stop is None else stop
        return (slice(n, min(n + self.at_once, stop)) for n in range(first, stop, self.at_once))

    def fit(self, module: Any, budget: int) -> None:
        """Let calls of the module take as many rows as fit the budget of bytes."""
        values = scores = 0

        def count(path: str, args: Any, kwargs: Any, output: Any) -> Any:
            nonlocal values, scores
            arrays = output_arrays(output)
            values += sum(array.size for array in arrays)
            tokens = sum(array.size // array.shape[-1] for array in arrays)
            scores += getattr(inside[path], "heads", 0) * tokens**2
            return output

        inside = dict(walk(module))
        with watch_calls(inside, count):
            mx.eval(self.call(module, self.arrays(self.full, slice(0, 1))))
        self.at_once = max(
            1, min(BATCH, budget // (4 * (KEPT_VALUES * values + KEPT_SCORES * scores)))
        )

    def forward(self, module: Any, side: Mapping[str, mx.array]) -> list[mx.array]:
        """What a module, as it is now, returns for all rows."""
        parts: list[list[mx.array]] = []
        for batch in self.batches():
            outputs = self.call(module, self.arrays(side, batch))
            parts.append([output.astype(mx.float32) for output in outputs])
            mx.eval(parts[-1])
        joined = [mx.concatenate(list(each)) for each in zip(*parts, strict=True)]
        mx.eval(joined)
        if not all(mx.isfinite(array).all().item() for array in joined):
            raise NotFiniteError("a block returns NaN or Inf for the calibration set.")
        return joined

    def error(self, module: Any, wanted: Sequence[mx.array]) -> tuple[float, float]:
        """Of held-out rows behind quantized blocks: squares of errors and of what is wanted."""
        first = self.learned if self.learned < len(self) else 0
        error = total = 0.0
        for batch in self.batches(first):
            outputs = self.call(module, self.arrays(self.quantized, batch))
            for output, full in zip(outputs, wanted, strict=True):
                error += float((output.astype(mx.float32) - full[batch]).square().sum())
                total += float(full[batch].square().sum())
        return error, total


def output_arrays(value: Any) -> list[mx.array]:
    """The arrays that a block returns."""
    return [leaf for _, leaf in tree_flatten([value]) if isinstance(leaf, mx.array)]


def _flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Leaves:
    return {
        **{f"args.{key}": leaf for key, leaf in tree_flatten(list(args))},
        **{f"kwargs.{key}": leaf for key, leaf in tree_flatten(dict(kwargs))},
    }


def _unflatten(leaves: Leaves) -> tuple[list[Any], dict[str, Any]]:
    parts: dict[str, list[tuple[str, Any]]] = {"args": [], "kwargs": []}
    for key, leaf in leaves.items():
        part, _, rest = key.partition(".")
        parts[part].append((rest, leaf))
    args = tree_unflatten(parts["args"]) if parts["args"] else []
    kwargs = tree_unflatten(parts["kwargs"]) if parts["kwargs"] else {}
    return list(args), dict(kwargs)


def _evaluated(leaves: Leaves) -> Leaves:
    """Arrays in float32, without the graph they were computed by."""
    found = {
        key: leaf.astype(mx.float32) if isinstance(leaf, mx.array) else leaf
        for key, leaf in leaves.items()
    }
    mx.eval([leaf for leaf in found.values() if isinstance(leaf, mx.array)])
    return found


class _Reached(Exception):
    """The block was called; the rest of the network is not needed."""


class BlockRows:
    """The rows of one block after the other. The network's layers are exchanged meanwhile."""

    def __init__(
        self,
        pipeline: Pipeline,
        opened: CalibrationSet,
        samples: Sequence[Row],
        tick: Callable[[], None] = lambda: None,
        call_bytes: int = CALL_BYTES,
    ) -> None:
        self.call_bytes = call_bytes
        self._opened, self._samples, self._tick = opened, samples, tick
        self.network = network(pipeline)
        self.blocks = find_blocks(pipeline.family, self.network)
        if not self.blocks:
            raise InputError(f"{pipeline.family.title}: the network has no blocks to learn from.")
        self.full: dict[str, nn.Module] = {
            path: module
            for path, module in walk(self.network)
            if any(path in block.linears for block in self.blocks)
        }
        self.original = dict(self.full)  # `full` may be exchanged by layers that compute the same
        self.quantized: dict[str, nn.Module] = {}  # finished layers, which the caller adds
        self._replay = Replay(pipeline, opened.settings)
        # For a block that only takes what the one before it returned, and what no block changes:
        # key of an input -> number of the output, and the other inputs of each sample.
        self._links: dict[str, dict[str, int]] = {}
        self._others: dict[str, list[Leaves]] = {}
        self._first: list[Leaves] = []  # inputs of the first block, until its rows are made
        self._find_links()

    @property
    def waiting_bytes(self) -> int:
        """Of inputs that are kept until the walk reaches their block."""
        kept = [each for inputs in self._others.values() for each in inputs]
        return sum(leaf.nbytes for each in kept for leaf in output_arrays(each))

    def walk(self) -> Iterator[tuple[Block, list[Rows]]]:
        """Each block in the order of calls; before the next one its quantized layers are added."""
        rows: list[Rows] = []
        previous: Block | None = None
        for block in self.blocks:
            if previous is not None and block.path in self._links:
                rows = [self._advanced(previous, block, each) for each in rows]
                del self._others[block.path]
            else:
                rows = self._captured(block)
            for each in rows:
                each.fit(block.module, self.call_bytes)
            yield block, rows
            previous = block

    def install(self, layers: Mapping[str, nn.Module]) -> None:
        """Put layers into the network."""
        for path, layer in layers.items():
            exchange_layer(self.network, path, layer)

    def installed(self, path: str) -> nn.Module:
        """The layer that is in the network now."""
        return layer_at(self.network, path)

    def _advanced(self, last: Block, block: Block, rows: Rows) -> Rows:
        """The rows of a block from those of the one before it."""
        full = rows.forward(last.module, rows.full)
        self.install(
            {name: self.quantized[name] for name in last.linears if name in self.quantized}
        )
        quantized = rows.forward(last.module, rows.quantized)
        self.install({name: self.full[name] for name in last.linears})
        links, others = self._links[block.path], self._others[block.path]
        size = len(rows) // len(rows.samples)
        fixed, shared = _join([others[number] for number in rows.samples], size)
        return Rows(
            rows.samples,
            fixed,
            {**shared, TIMES: rows.shared[TIMES]},
            {key: full[number] for key, number in links.items()},
            {key: quantized[number] for key, number in links.items()},
        )

    def _captured(self, block: Block) -> list[Rows]:
        """The rows of a block from running the network up to it."""
        full = self._first or [self._inputs(block, sample) for sample in self._samples]
        quantized, self._first = full, []
        if self.quantized:
            self.install(self.quantized)
            self._replay.forget()  # modulation is computed ahead of the steps
            quantized = [self._inputs(block, sample) for sample in self._samples]
            self.install(self.full)
        groups: dict[Any, list[int]] = {}
        for number, leaves in enumerate(full):
            shapes = tuple((key, getattr(leaf, "shape", None)) for key, leaf in leaves.items())
            groups.setdefault(shapes, []).append(number)
        found: list[Rows] = []
        for numbers in groups.values():
            size = _first_array(full[numbers[0]]).shape[0]
            fixed, arrays = _join([full[n] for n in numbers], size)
            _, behind = _join([quantized[n] for n in numbers], size)
            entries = [self._samples[number].entry for number in numbers]
            times = np.repeat([self._replay.timestep(entry) for entry in entries], size)
            found.append(Rows(numbers, fixed, {TIMES: mx.array(times)}, arrays, behind))
        return found

    def _inputs(self, block: Block, sample: Row) -> Leaves:
        found: list[Leaves] = []

        def reached(path: str, args: Any, kwargs: Any, output: Any) -> Any:
            found.append(_evaluated(_flatten(args, kwargs)))
            raise _Reached

        try:
            with watch_calls({block.path: block.module}, reached):
                self._run(sample)
        except _Reached:
            self._tick()
            return found[0]
        raise CalibrationError(f"{block.path}: the network does not call it.")

    def _run(self, sample: Row) -> None:
        self._replay.run(sample.entry, latent_of(self._opened, sample))

    def _find_links(self) -> None:
        """Find out how blocks depend on each other, and keep what else they take.

        What depends on earlier blocks is what changes when the first block returns something else.
        """
        modules = {block.path: block.module for block in self.blocks}
        calls, changed = self._first_calls(modules, 1.0), self._first_calls(modules, 1.01)
        order = list(calls)
        self.blocks = sorted(self.blocks, key=lambda block: order.index(block.path))
        previous: list[mx.array] = []
        for path, (leaves, outputs) in calls.items():
            numbers = {id(output): number for number, output in enumerate(previous)}
            links = {key: numbers[id(leaf)] for key, leaf in leaves.items() if id(leaf) in numbers}
            others = {key: leaf for key, leaf in leaves.items() if key not in links}
            if links and all(_equal(leaf, changed[path][0][key]) for key, leaf in others.items()):
                self._links[path], self._others[path] = links, []
            previous = outputs
        linked = {path: modules[path] for path in (order[0], *self._links)}

        def keep(path: str, args: Any, kwargs: Any, output: Any) -> Any:
            leaves = _flatten(args, kwargs)
            if path not in self._links:
                self._first.append(_evaluated(leaves))
                return output
            others = {key: leaf for key, leaf in leaves.items() if key not in self._links[path]}
            self._others[path].append(_evaluated(others))
            return output

        for sample in self._samples if self._links else ():
            with watch_calls(linked, keep):
                self._run(sample)
            self._tick()

    def _first_calls(
        self, modules: Mapping[str, nn.Module], scale: float
    ) -> dict[str, tuple[Leaves, list[mx.array]]]:
        """The calls of all blocks for one sample, where the first one returns `scale` times its
        output."""
        calls: dict[str, tuple[Leaves, list[mx.array]]] = {}

        def keep(path: str, args: Any, kwargs: Any, output: Any) -> Any:
            if not calls and scale != 1:
                output = tree_map(lambda x: x * scale if isinstance(x, mx.array) else x, output)
            calls.setdefault(path, (_flatten(args, kwargs), output_arrays(output)))
            return output

        with watch_calls(modules, keep):
            self._run(self._samples[0])
        return calls


def _first_array(leaves: Leaves) -> mx.array:
    return next(leaf for leaf in leaves.values() if isinstance(leaf, mx.array))


def _join(samples: Sequence[Leaves], size: int) -> tuple[Leaves, dict[str, mx.array]]:
    """What is the same for all samples, and arrays with `size` rows for each of them."""
    fixed: Leaves = {}
    arrays: dict[str, mx.array] = {}
    for key, leaf in samples[0].items():
        if not isinstance(leaf, mx.array):
            fixed[key] = leaf
        elif leaf.ndim and leaf.shape[0] == size:
            arrays[key] = mx.concatenate([sample[key] for sample in samples])
        elif all(_equal(leaf, sample[key]) for sample in samples):
            fixed[key] = leaf
        else:
            raise InputError(f"input {key} of a block has no axis of rows: {leaf.shape}.")
    mx.eval(arrays)
    return fixed, arrays


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, mx.array):
        return bool(mx.array_equal(one, other).item())
    return one is other or one == other


def choose_samples(
    opened: CalibrationSet, sample_bytes: int, budget: int, most: int | None = None
) -> list[Row]:
    """As many samples as fit the budget, in random order, all steps equally often."""
    rows = list(opened.rows("sample"))
    fit = min(len(rows), budget // max(sample_bytes, 1), most or len(rows))
    if fit < 1:
        raise InputError(
            f"--memory is {size_text(budget)}, and one sample takes {size_text(sample_bytes)}."
        )
    shuffled = [rows[n] for n in np.random.default_rng(0).permutation(len(rows))]
    seen: Counter[int | None] = Counter()
    turns: list[tuple[int, Row]] = []  # the first of each step, the second of each step, …
    for row in shuffled:
        turns.append((seen[row.step], row))
        seen[row.step] += 1
    chosen = sorted(turns, key=lambda turn: turn[0])[:fit]
    return [row for _, row in chosen]


def capture_unit(
    source: BlockRows, block: Block, unit: nn.Module, rows: Sequence[Rows]
) -> tuple[list[Rows], list[list[mx.array]]]:
    """The rows of a module inside a block, and what it returns at full precision.

    Layers of the block that are finished stay in the network for the rows behind quantized ones.
    """
    finished = {path: source.installed(path) for path in block.linears}
    full_precision = {path: source.full[path] for path in block.linears}
    found: list[Rows] = []
    wanted: list[list[mx.array]] = []
    for each in rows:
        source.install(full_precision)
        if unit is block.module:
            found.append(each)
            wanted.append(each.forward(unit, each.full))
        else:
            fixed, full, outputs = _unit_calls(each, block, unit, each.full)
            source.install(finished)
            _, quantized, _ = _unit_calls(each, block, unit, each.quantized)
            shared = {key: array for key, array in each.shared.items() if key == TIMES}
            found.append(Rows(each.samples, fixed, shared, full, quantized))
            found[-1].fit(unit, source.call_bytes)
            wanted.append(outputs)
    source.install(finished)
    return found, wanted


def _unit_calls(
    rows: Rows, block: Block, unit: nn.Module, side: Mapping[str, mx.array]
) -> tuple[Leaves, dict[str, mx.array], list[mx.array]]:
    """The inputs of a module, fixed ones apart, and its outputs for all rows of its block."""
    inputs: list[Leaves] = []
    outputs: list[list[mx.array]] = []

    def keep(path: str, args: Any, kwargs: Any, output: Any) -> Any:
        inputs.append(_evaluated(_flatten(args, kwargs)))
        outputs.append([each.astype(mx.float32) for each in output_arrays(output)])
        mx.eval(outputs[-1])
        return output

    with watch_calls({"": unit}, keep):
        for batch in rows.batches():
            mx.eval(rows.call(block.module, rows.arrays(side, batch)))
    size = next(rows.batches()).stop
    fixed: Leaves = {}
    arrays: dict[str, mx.array] = {}
    for key, leaf in inputs[0].items():
        if isinstance(leaf, mx.array) and leaf.ndim and leaf.shape[0] == size:
            arrays[key] = mx.concatenate([each[key] for each in inputs])
        else:
            fixed[key] = leaf
    joined = [mx.concatenate(list(each)) for each in zip(*outputs, strict=True)]
    mx.eval(arrays, joined)
    return fixed, arrays, joined
