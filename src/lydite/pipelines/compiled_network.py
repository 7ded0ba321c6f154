"""A network as the steps of a run call it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from lydite.models import cpu
from lydite.models.layers import at_timestep, on_cpu, this_timestep
from lydite.trace.mlx_compilation import compiles


def for_device(network: nn.Module) -> Callable[..., mx.array]:
    """Compiled on a GPU; on a CPU with parts of the batch on several cores."""
    return partial(_in_parts, network) if on_cpu() else compiled(network)


def compiled(network: nn.Module) -> Callable[..., mx.array]:
    """On a GPU fewer, larger kernels pay at once; on a CPU MLX would call a C++ compiler first."""
    if on_cpu():
        return network

    @mx.compile
    def graph(timestep: mx.array | None, *arguments: Any) -> Any:
        with at_timestep(timestep):  # an input: else that of the first call would be in the graph
            return network(*arguments)  # pyright: ignore[reportCallIssue]

    return lambda *arguments: graph(this_timestep(), *arguments)


def _in_parts(network: nn.Module, *arguments: Any) -> mx.array:
    """The batch is the first axis of the first argument, and of every array as long as it.

    Who watches modules or exchanges them turns compilation off, and sees whole batches.
    """
    rows = arguments[0].shape[0]
    parts = min(rows, len(cpu.streams()))
    if parts == 1 or not compiles():
        return network(*arguments)

    def part(index: int) -> mx.array:
        rows_of_part = slice(rows * index // parts, rows * (index + 1) // parts)
        return network(*tree_map(lambda x: x[rows_of_part] if len(x) == rows else x, arguments))

    return mx.concatenate(cpu.in_parallel(partial(part, index) for index in range(parts)))
