"""One run being recorded: which step it is at, which names are kept, what is given back instead."""

import fnmatch
import os
import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from lydite.core.errors import InputError, TraceError, at
from lydite.trace.arrays import framework_of, like, to_numpy
from lydite.trace.events import Header
from lydite.trace.store import Trace
from lydite.trace.writer import Capture, TraceWriter

Place = tuple[str, str, int, int]  # name, port, step, call


class Source(Protocol):
    """Where values come from that replace the run's own."""

    def wants(self, name: str, port: str) -> bool:
        """Whether values of this name and port are replaced."""
        ...

    def value(self, place: Place) -> NDArray[Any] | None:
        """What stands at this place of the reference, or None to leave the run its own."""
        ...


@dataclass(frozen=True)
class Injection:
    """The values of another trace at the places `at`: NAME for its outputs, NAME:PORT for others.

    Both parts are shell patterns. A name without wildcards has to be in the reference.
    """

    reference: Trace
    at: tuple[str, ...]

    def wants(self, name: str, port: str) -> bool:
        """Whether a pattern matches; without a port it means the outputs."""
        return any(matches(pattern, name, port, ports="out*") for pattern in self.at)

    def value(self, place: Place) -> NDArray[Any] | None:
        """The reference's value at the same name, port, step and call."""
        event = self.reference.find(*place)
        if event is not None:
            return self.reference.read(event)
        name, port, step, call = place
        if any(name == pattern.rpartition(":")[0] or name == pattern for pattern in self.at):
            raise TraceError(
                f"{at(self.reference.folder)}: no {name} [{port}] at step {step}, call {call}, "
                "which was to be injected. Record it there, or leave it out of the list."
            )
        return None


class Recorder:
    """Records values under `scope/module.path` names; the loop that owns the steps sets `step`."""

    def __init__(self, writer: TraceWriter, *, inject: Source | None = None) -> None:
        self.writer, self.inject = writer, inject
        self.step = 0
        self.injected: list[Place] = []
        self._process, self._lock = os.getpid(), threading.RLock()
        self._wanted: dict[tuple[str, str], tuple[bool, bool]] = {}
        self._described = bool(writer.header.framework)

    @classmethod
    def start(
        cls,
        folder: Path | str,
        *,
        header: Header | None = None,
        capture: Capture | None = None,
        inject: Source | None = None,
    ) -> Self:
        """Begin a trace in a folder that is new or empty."""
        return cls(TraceWriter(Path(folder), header or Header(), capture), inject=inject)

    def wants(self, name: str, port: str = "out") -> bool:
        """Whether a value here would be kept or replaced."""
        return any(self._plan(name, port))

    def record(
        self,
        name: str,
        value: Any,
        *,
        port: str = "out",
        kind: str = "activation",
        dims: str | None = None,
    ) -> Any:
        """Keep `value`, and hand it back, or the reference's where that is injected."""
        keep, replace = self._plan(name, port)
        if not (keep or replace) or os.getpid() != self._process:  # a fork shares our files
            return value
        step = self.step
        if type(step) is not int or step < 0:
            raise InputError(f"step is {step!r}; expected a whole number from 0.")
        with self._lock:
            if keep:
                array = _read(name, port, value)
                self._describe(value)
                event = self.writer.add(name, array, port=port, kind=kind, step=step, dims=dims)
                call = event.call
            else:
                call = self.writer.count(name, port, step)
        return self._injected(value, (name, port, step, call)) if replace else value

    def describe(self, **changes: Any) -> None:
        """Change fields of the header: conditions, framework, device, dtype, side."""
        self._described |= bool(changes.get("framework"))
        self.writer.describe(**changes)

    def close(self, *, complete: bool = True) -> None:
        """Finish the trace; `complete` says that the run ended by itself."""
        if os.getpid() == self._process:
            self.writer.close(complete=complete)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(complete=kind is None)

    def _plan(self, name: str, port: str) -> tuple[bool, bool]:
        plan = self._wanted.get((name, port))
        if plan is None:
            points = self.writer.capture.points
            keep = any(matches(pattern, name, port, ports="*") for pattern in points)
            plan = (keep, self.inject is not None and self.inject.wants(name, port))
            self._wanted[name, port] = plan
        return plan

    def _injected(self, value: Any, place: Place) -> Any:
        assert self.inject is not None
        new = self.inject.value(place)
        if new is None:
            return value
        name, port, step, call = place
        own = _read(name, port, value).shape
        if new.shape != own:
            raise TraceError(
                f"{name} [{port}], step {step}, call {call}: the reference's value to inject has "
                f"shape {list(new.shape)}, this run's has {list(own)}. Another order of axes needs "
                "a map with dims; another size needs equal conditions."
            )
        self.injected.append(place)
        return like(value, new)

    def _describe(self, value: Any) -> None:
        if not self._described and (framework := framework_of(value)) != "python":
            self.describe(framework=framework)


def full_name(scope: str, path: str) -> str:
    """`scope/path`; the root module of a scope is just the scope."""
    return f"{scope}/{path}" if scope and path else scope or path


def matches(pattern: str, name: str, port: str, *, ports: str) -> bool:
    """Whether NAME or NAME:PORT, both shell patterns, covers this; `ports` when it names none."""
    if pattern == name:  # it may hold brackets
        return fnmatch.fnmatchcase(port, ports)
    name_pattern, colon, port_pattern = pattern.rpartition(":")
    if not colon:
        name_pattern, port_pattern = pattern, ports
    same = name == name_pattern or bool(_compiled(name_pattern)(name))
    return same and bool(_compiled(port_pattern)(port))


def _read(name: str, port: str, value: Any) -> NDArray[Any]:
    try:
        return to_numpy(value)
    except TraceError as error:
        raise TraceError(f"{name} [{port}]: {error}") from error


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    return re.compile(fnmatch.translate(pattern)).match
