"""The tensors that fill one model: a whole checkpoint, or the part of it under a prefix."""

from collections.abc import Mapping

from lydite.core.checkpoint import Checkpoint
from lydite.core.tensorheader import TensorInfo
from lydite.weights.layout import Array


class TensorView:
    """Tensors of `checkpoint` under `prefix` and not under `exclude`, by their names without it."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str = "", exclude: tuple[str, ...] = ()
    ) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self.tensors: Mapping[str, TensorInfo] = {
            name.removeprefix(prefix): info
            for name, info in checkpoint.tensors.items()
            if name.startswith(prefix) and not name.startswith(exclude)
        }

    def read(self, name: str) -> Array:
        return self._checkpoint.read(self._prefix + name)

    def full_name(self, name: str) -> str:
        """The name in the file, for messages."""
        return self._prefix + name
