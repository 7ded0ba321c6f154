"""Record one run: the current step, which values are kept, which are replaced."""

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
from lydite.trace.events import EventId, Header
from lydite.trace.reader import Trace
from lydite.trace.writer import Capture, TraceWriter, remove_trace


class InjectionSource(Protocol):
    """Values that replace the run's own."""

    def wants(self, name: str, slot: str) -> bool:
        """Whether values of this name and slot are replaced."""
        ...

    def value(self, event_id: EventId) -> NDArray[Any] | None:
        """The reference's value of this event, or None to keep the run's own."""
        ...


@dataclass(frozen=True)
class Injection:
    """The values of another trace at the sites `at`: NAME for its outputs, NAME:SLOT for others.

    Both parts are shell patterns. A name without wildcards has to be in the reference.
    """

    reference: Trace
    at: tuple[str, ...]

    def wants(self, name: str, slot: str) -> bool:
        """Whether a pattern matches; without a slot it means the outputs."""
        return any(matches(pattern, name, slot, default_slots="out*") for pattern in self.at)

    def value(self, event_id: EventId) -> NDArray[Any] | None:
        """The reference's value at the same name, slot, step and call."""
        event = self.reference.find(*event_id)
        if event is not None:
            return self.reference.read(event)
        name, slot, step, call = event_id
        if any(name == pattern.rpartition(":")[0] or name == pattern for pattern in self.at):
            raise TraceError(
                f"{at(self.reference.folder)}: no {name} [{slot}] at step {step}, call {call}, "
                "which was to be injected. Record it there, or leave it out of the list."
            )
        return None


class Recorder:
    """Records values under `scope/module.path` names; the loop that owns the steps sets `step`."""

    def __init__(self, writer: TraceWriter, *, inject: InjectionSource | None = None) -> None:
        self.writer, self.inject = writer, inject
        self.step = 0
        self.inside: list[str] = []  # the recorded modules that are running, the innermost last
        self.injected: list[EventId] = []
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
        inject: InjectionSource | None = None,
        overwrite: bool = False,
    ) -> Self:
        """Begin a trace in a folder that is new or empty; `overwrite` replaces a trace there."""
        if overwrite:
            remove_trace(Path(folder))
        return cls(TraceWriter(Path(folder), header or Header(), capture), inject=inject)

    def wants(self, name: str, slot: str = "out") -> bool:
        """Whether a value of this name and slot would be kept or replaced."""
        return any(self._plan(name, slot))

    def record(
        self,
        name: str,
        value: Any,
        *,
        slot: str = "out",
        kind: str = "activation",
        dims: str | None = None,
    ) -> Any:
        """Record `value` and return it, or the reference's value where that is injected."""
        keep, replace = self._plan(name, slot)
        if not (keep or replace) or os.getpid() != self._process:  # a fork shares the files
            return value
        step = self.step
        if type(step) is not int or step < 0:
            raise InputError(f"step is {step!r}; expected a whole number from 0.")
        with self._lock:
            if keep:
                array = _read(name, slot, value)
                self._describe(value)
                event = self.writer.add(name, array, slot=slot, kind=kind, step=step, dims=dims)
                call = event.call
            else:
                call = self.writer.count(name, slot, step)
        return self._injected(value, (name, slot, step, call)) if replace else value

    def describe(self, **changes: Any) -> None:
        """Change fields of the header: conditions, framework, device, dtype, side."""
        self._described |= bool(changes.get("framework"))
        self.writer.describe(**changes)

    def close(self, *, complete: bool = True) -> None:
        """Finish the trace; `complete`: the run ended by itself."""
        if os.getpid() == self._process:
            self.writer.close(complete=complete)

    def __enter__(self) -> Self:
        _outer.append(self)  # taps record here while the block runs
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self in _outer:
            _outer.remove(self)
        self.close(complete=kind is None)

    def _plan(self, name: str, slot: str) -> tuple[bool, bool]:
        plan = self._wanted.get((name, slot))
        if plan is None:
            points = self.writer.capture.points
            keep = any(matches(pattern, name, slot, default_slots="*") for pattern in points)
            plan = (keep, self.inject is not None and self.inject.wants(name, slot))
            self._wanted[name, slot] = plan
        return plan

    def _injected(self, value: Any, event_id: EventId) -> Any:
        assert self.inject is not None
        new = self.inject.value(event_id)
        if new is None:
            return value
        name, slot, step, call = event_id
        own = _read(name, slot, value).shape
        if new.shape != own:
            raise TraceError(
                f"{name} [{slot}], step {step}, call {call}: the reference's value to inject has "
                f"shape {list(new.shape)}, this run's has {list(own)}. Another order of axes needs "
                "a map with dims; another size needs equal conditions."
            )
        self.injected.append(event_id)
        return like(value, new)

    def _describe(self, value: Any) -> None:
        if not self._described and (framework := framework_of(value)) != "python":
            self.describe(framework=framework)


_outer: list[Recorder] = []


def entered() -> Recorder | None:
    """The recorder of the innermost `with Recorder.start(…)` block, or None."""
    return _outer[-1] if _outer else None


def full_name(scope: str, path: str) -> str:
    """`scope/path`; the root module of a scope is just the scope."""
    return f"{scope}/{path}" if scope and path else scope or path


def matches(pattern: str, name: str, slot: str, *, default_slots: str) -> bool:
    """Whether a shell pattern NAME or NAME:SLOT covers this; NAME alone means `default_slots`."""
    if pattern == name:  # it may contain a colon
        return fnmatch.fnmatchcase(slot, default_slots)
    name_pattern, colon, slot_pattern = pattern.rpartition(":")
    if not colon:
        name_pattern, slot_pattern = pattern, default_slots
    same = name == name_pattern or bool(_compiled(name_pattern)(name))
    return same and bool(_compiled(slot_pattern)(slot))


def _read(name: str, slot: str, value: Any) -> NDArray[Any]:
    try:
        return to_numpy(value)
    except TraceError as error:
        raise TraceError(f"{name} [{slot}]: {error}") from error


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    return re.compile(fnmatch.translate(pattern)).match
