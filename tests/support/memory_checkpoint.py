"""A checkpoint in memory, for tests that need hundreds."""

from collections.abc import Mapping
from typing import Any, cast

from lydite.core.checkpoint import Checkpoint
from lydite.core.dtypes import NAMES
from lydite.core.tensorfile import TensorInfo
from lydite.weights.audit import TensorView


class MemoryCheckpoint:
    """The part of `Checkpoint` that `TensorView` uses."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays
        self.tensors = {
            name: TensorInfo(name, NAMES[x.dtype], x.shape, 0, x.nbytes)
            for name, x in arrays.items()
        }

    def read(self, name: str) -> Any:
        return self.arrays[name]


def in_memory(
    arrays: Mapping[str, Any], prefix: str = "", exclude: tuple[str, ...] = ()
) -> TensorView:
    return TensorView(cast(Checkpoint, MemoryCheckpoint(arrays)), prefix, exclude)
