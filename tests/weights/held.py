"""A checkpoint held in memory, for tests that make hundreds."""

from collections.abc import Mapping
from typing import Any, cast

from lydite.core.checkpoint import Checkpoint
from lydite.core.dtypes import NAMES
from lydite.core.tensorheader import TensorInfo
from lydite.weights.source import Scope


class Held:
    """What `Scope` asks of a checkpoint."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays
        self.tensors = {
            name: TensorInfo(name, NAMES[x.dtype], x.shape, 0, x.nbytes)
            for name, x in arrays.items()
        }

    def read(self, name: str) -> Any:
        return self.arrays[name]


def held(arrays: Mapping[str, Any], prefix: str = "", exclude: tuple[str, ...] = ()) -> Scope:
    return Scope(cast(Checkpoint, Held(arrays)), prefix, exclude)
