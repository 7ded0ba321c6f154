"""Quantize the network of a model from beginning to end, and say how it was done."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.nn as nn
import msgspec

from lydite import __version__
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.blocks import CALL_BYTES, BlockRows, find_blocks
from lydite.quantize.methods.dwq import TuneRecipe, tune
from lydite.quantize.provenance import Provenance, UnitError
from lydite.quantize.quantize_blocks import (
    DATA_FREE,
    LEARNED,
    BlockResult,
    Settings,
    quantize_blocks,
    round_layers,
    units_of,
    weight_of,
)
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.quantize.work import Work
from lydite.trace.mlx_capture import walk
from lydite.weights.load import parameter_specs
from lydite.weights.quantized_format import (
    DIVISOR,
    LOW_RANK,
    bits_per_weight,
    bytes_in_memory,
    is_sensitive,
)

OUTSIDE = ""  # path of the result that holds the layers outside every block
TUNED = "network after tuning"  # and of the one that DWQ ends in


def needs_set(settings: Settings) -> bool:
    """Whether the method learns from a calibration set."""
    data_free = settings.method in DATA_FREE and not settings.act_bits
    return not data_free or settings.tune > 0


def quantize_network(
    pipeline: Pipeline,
    opened: CalibrationSet | None,
    samples: Sequence[Row],
    settings: Settings,
    work: Work,
    *,
    call_bytes: int = CALL_BYTES,
    on_sample: Callable[[], None] = lambda: None,
    on_step: Callable[[str, int, float], None] = lambda unit, step, loss: None,
    on_block: Callable[[BlockResult], None] = lambda result: None,
) -> list[BlockResult]:
    """The results of all blocks; those that are in the folder of work are taken from there.

    `on_block` is called for the others, and for the layers outside of the blocks.
    """
    finished, results = work.results(), list[BlockResult]()
    for number, result in enumerate(
        _results(pipeline, opened, samples, settings, finished, call_bytes, on_sample, on_step)
    ):
        results.append(result)
        if result.path not in finished:
            work.add(number, result)
            on_block(result)
    return results


def _results(
    pipeline: Pipeline,
    opened: CalibrationSet | None,
    samples: Sequence[Row],
    settings: Settings,
    finished: Mapping[str, BlockResult],
    call_bytes: int,
    on_sample: Callable[[], None],
    on_step: Callable[[str, int, float], None],
) -> Iterator[BlockResult]:
    net = pipeline.model.network(pipeline.family.network)
    linears = {path: module for path, module in walk(net) if path in settings.plan.layers}
    blocks = find_blocks(pipeline.family, net)
    inside = {path for block in blocks for path in block.linears}
    outside = {path: module for path, module in linears.items() if path not in inside}
    yield finished.get(OUTSIDE) or BlockResult(OUTSIDE, round_layers(outside, settings))
    if opened is None:
        for block in blocks:
            layers = {path: linears[path] for path in block.linears if path in linears}
            yield finished.get(block.path) or BlockResult(
                block.path, round_layers(layers, settings)
            )
        return
    rows = BlockRows(pipeline, opened, samples, on_sample, call_bytes)
    try:
        yield from quantize_blocks(
            rows, pipeline.family, settings, finished=finished, on_step=on_step
        )
    finally:
        rows.install(rows.original)


def tune_network(
    pipeline: Pipeline,
    opened: CalibrationSet,
    results: Sequence[BlockResult],
    settings: Settings,
    work: Work,
    tick: Callable[[int, float], None] = lambda step, loss: None,
) -> BlockResult:
    """The layers whose scales, offsets and biases were tuned, which replace those of the blocks."""
    if (known := work.results().get(TUNED)) is not None:
        return known
    weights = {path: weight for result in results for path, weight in result.weights.items()}
    recipe = TuneRecipe(iterations=settings.tune, seed=settings.recipe.seed, store=settings.store)
    tuned = tune(pipeline, opened, weights, recipe, tick)
    changed = {
        path: weight for path, weight in tuned.weights.items() if weight is not weights[path]
    }
    after = min(tuned.after, tuned.before)  # what got worse is not used
    result = BlockResult(TUNED, changed, [UnitError(TUNED, tuned.before, after)])
    work.add(len(results), result)
    return result


@dataclass(frozen=True)
class StepCount:
    """What is left to do: iterations of learned methods, else blocks."""

    total: int
    learned: bool
    blocks: int  # of the network
    finished: int  # of these


def count_steps(
    pipeline: Pipeline, settings: Settings, finished: Mapping[str, BlockResult]
) -> StepCount:
    """For the length of a progress bar."""
    net = pipeline.model.network(pipeline.family.network)
    blocks = find_blocks(pipeline.family, net)
    done = sum(block.path in finished for block in blocks)
    if settings.method not in LEARNED:
        return StepCount(len(blocks) - done, False, len(blocks), done)
    units = sum(
        len(
            units_of(
                pipeline.family,
                block,
                [path for path in block.linears if not is_sensitive(f"{path}.weight")],
                settings,
            )
        )
        for block in blocks
        if block.path not in finished
    )
    return StepCount(units * settings.recipe.iterations, True, len(blocks), done)


def sample_bytes(pipeline: Pipeline, opened: CalibrationSet) -> int:
    """What one sample takes in memory while its rows pass the blocks.

    Counted by its arrays, not by the memory in use: a run that is resumed has to choose the same
    samples.
    """
    first = next(iter(opened.rows("sample")))
    rows = BlockRows(pipeline, opened, [first])
    _, own = next(iter(rows.walk()))
    held = sum(
        array.nbytes for each in own for array in (*each.full.values(), *each.shared.values())
    )
    # inputs and outputs of a block, at full precision and behind quantized blocks
    return 4 * held + rows.waiting_bytes


def provenance(
    pipeline: Pipeline,
    results: Sequence[BlockResult],
    settings: Settings,
    described: Mapping[str, Any],
) -> Provenance:
    """What is written beside an export; `described` are the names and hashes of its sources."""
    name = pipeline.family.network
    shapes = parameter_specs(pipeline.model.network(name))
    layers = dict(walk(pipeline.model.network(name)))
    weights = {path: weight for result in results for path, weight in result.weights.items()}
    formats = {f"{path}.weight": weight.format for path, weight in weights.items()}
    return Provenance(
        lydite=__version__,
        mlx=version("mlx"),
        method=f"{settings.method} + dwq" if settings.tune else settings.method,
        settings=msgspec.to_builtins(settings),
        bits_per_weight=bits_per_weight(formats, shapes),
        bytes_before=bytes_in_memory(shapes, 2),
        bytes_after=bytes_in_memory(shapes, 2, formats),
        changed={path: _changed(layers[path], weights[path]) for path in sorted(weights)},
        units=[error for result in results for error in result.errors],
        activations=settings.activations,
        seed=settings.recipe.seed,
        **described,
    )


def _changed(layer: nn.Module, weight: QuantizedWeight) -> float:
    """The share of integers that rounding to nearest, on the same grid, would not have given."""
    full, _ = weight_of(layer)
    if set(LOW_RANK) <= set(weight.extras):
        down, up = (weight.extras[name] for name in LOW_RANK)
        full = full - up @ down
    if DIVISOR in weight.extras:
        full = full * weight.extras[DIVISOR]
    return float((weight.grid.round(full) != weight.integers).mean())
