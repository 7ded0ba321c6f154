"""The values of the reference's parameters: recorded in its trace, or read from its checkpoint."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lydite.core.checkpoint import Checkpoint, open_checkpoint
from lydite.core.errors import FileError
from lydite.diff.measure.distance import wide
from lydite.trace.reader import Trace

MAX_VALUES = 2**24  # of a parameter that is read


class ParameterValues:
    """Parameters by the reference's names, `component/path.weight`."""

    def __init__(self, reference: Trace, checkpoint: Path | None = None) -> None:
        self._closer = ExitStack()
        self._trace = reference
        self._recorded = {
            event.name: event
            for event in reference.events
            if event.kind == "weight" and reference.has_values(event)
        }
        self._files: dict[str, Checkpoint] = {}
        if checkpoint is not None:
            self._open(checkpoint)

    def of_module(self, name: str) -> dict[str, NDArray[Any]]:
        """The parameters of a module itself, by their own names: weight, bias."""
        beginning = f"{_dotted(name)}."
        return {
            path[len(beginning) :]: self._read(path)
            for path in self._names()
            if _dotted(path).startswith(beginning) and "." not in path[len(beginning) :]
        }

    def inside(self, name: str, width: int) -> Iterator[tuple[str, NDArray[Any]]]:
        """Parameters of a module and of those inside it whose last axis has this size."""
        for path in self._names():
            if _dotted(path).startswith(f"{_dotted(name)}.") and self._shape(path)[-1:] == (width,):
                yield path, self._read(path)

    @property
    def is_unused(self) -> bool:
        """Whether a checkpoint was given, and none of its parameters belongs to a module."""
        modules = {_dotted(event.name) for event in self._trace.events}
        names = (scope + name for scope, file in self._files.items() for name in file.tensors)
        return bool(self._files) and not any(
            _dotted(n).rpartition(".")[0] in modules for n in names
        )

    def like(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Parameters of the same component with this shape, without those of the module itself."""
        component = name.partition("/")[0]
        for path in self._names():
            own = _dotted(path).startswith(f"{_dotted(name)}.")
            if path.partition("/")[0] == component and not own and self._shape(path) == shape:
                yield path, self._read(path)

    def close(self) -> None:
        """Close the files."""
        self._closer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, checkpoint: Path) -> None:
        """A folder of components, or the weights of the only network."""
        scopes = {event.name.partition("/")[0] for event in self._trace.events}
        folders = [scope for scope in sorted(scopes) if (checkpoint / scope).is_dir()]
        for scope in folders:
            with suppress(FileError):  # the folder of a scheduler or tokenizer
                file = self._closer.enter_context(open_checkpoint(checkpoint / scope))
                self._files[f"{scope}/"] = file
        if not self._files:
            networks = scopes - {"pipeline", "selftest"}
            scope = f"{networks.pop()}/" if len(networks) == 1 else ""
            self._files[scope] = self._closer.enter_context(open_checkpoint(checkpoint))

    def _names(self) -> Iterator[str]:
        yield from self._recorded
        for scope, file in self._files.items():
            yield from (scope + name for name in file.tensors if scope + name not in self._recorded)

    def _shape(self, path: str) -> tuple[int, ...]:
        if path in self._recorded:
            return tuple(self._recorded[path].shape)
        scope, name = self._place(path)
        return tuple(self._files[scope].tensors[name].shape)

    def _read(self, path: str) -> NDArray[Any]:
        if prod(self._shape(path)) > MAX_VALUES:
            return np.zeros(0)
        if path in self._recorded:
            return wide(self._trace.read(self._recorded[path])).astype(np.float64)
        scope, name = self._place(path)
        return wide(self._files[scope].read(name)).astype(np.float64)

    def _place(self, path: str) -> tuple[str, str]:
        return next(
            (scope, path[len(scope) :])
            for scope, file in self._files.items()
            if path.startswith(scope) and path[len(scope) :] in file.tensors
        )


def _dotted(name: str) -> str:
    """`vae/encoder/conv_in` as `vae/encoder.conv_in`: a scope may name a part of a component."""
    component, separator, path = name.partition("/")
    return component + separator + path.replace("/", ".")
