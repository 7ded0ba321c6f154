"""A trace as it is compared: complex values as real ones, both prompts in one order."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.distance import wide
from lydite.diff.pairing.paired_events import COMPLEX
from lydite.trace.events import Event
from lydite.trace.reader import Trace


@dataclass(frozen=True, eq=False)
class TraceView(Trace):
    """A trace whose values are read in another form.

    A reference may rotate by complex numbers; a port in Rust or NumPy has each cosine beside its
    sine. Of the events `exchanged` the batch is read with its second half first.
    """

    exchanged: frozenset[int] = field(default_factory=frozenset[int])  # by number
    _source: Trace | None = None

    @classmethod
    def of(cls, trace: Trace) -> "TraceView":
        """The same events, with real values."""
        events = tuple(map(_real, trace.events))
        return cls(trace.folder, trace.header, events, trace.lost, _source=trace)

    def has_values(self, event: Event) -> bool:
        return self._of.has_values(self.written(event))

    def read(self, event: Event) -> NDArray[Any]:
        value = self._of.read(self.written(event))
        value = wide(value) if value.dtype.kind == "c" else value
        return other_half_first(value) if event.i in self.exchanged else value

    def written(self, event: Event) -> Event:
        """The event as it is in the file."""
        return self._events[event.i]

    def as_written(self, event: Event, value: NDArray[Any]) -> NDArray[Any]:
        """A value of an event in the form that it has in the file."""
        value = other_half_first(value) if event.i in self.exchanged else value
        if self.written(event).dtype not in COMPLEX:
            return value
        kind = np.complex64 if value.dtype == np.float32 else np.complex128
        return np.ascontiguousarray(value).view(kind)

    @property
    def _of(self) -> Trace:
        assert self._source is not None
        return self._source

    @cached_property
    def _events(self) -> dict[int, Event]:
        return {event.i: event for event in self._of.events}


def other_half_first(value: NDArray[Any]) -> NDArray[Any]:
    """A batch with its second half first."""
    return np.roll(value, len(value) // 2, axis=0)


def _real(event: Event) -> Event:
    if event.dtype not in COMPLEX or not event.shape:
        return event
    shape = (*event.shape[:-1], 2 * event.shape[-1])
    dtype = "f32" if event.dtype == "c64" else "f64"
    return msgspec.structs.replace(event, shape=shape, dtype=dtype)
