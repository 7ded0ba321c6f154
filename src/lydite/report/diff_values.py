"""The value a verdict is about, read from both traces and brought into one axis order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import LyditeError
from lydite.diff.arrays import wide
from lydite.diff.calls import Pair, Pairing
from lydite.diff.pairing import pair
from lydite.diff.renames import Rename
from lydite.diff.result import Row, Verdict
from lydite.diff.values import Layouts, Seen, see
from lydite.trace.events import Event, Stats
from lydite.trace.store import Trace

LESSONS = 12  # rows whose axis order is looked up before a value whose shape leaves it open

Array = NDArray[Any]
Renames = Mapping[str, Rename]


@dataclass(frozen=True)
class Sides:
    """Both traces and which of their values belong together."""

    reference: Trace
    port: Trace
    pairing: Pairing

    @classmethod
    def of(
        cls, verdict: Verdict, reference: Trace, port: Trace, renames: Renames | None = None
    ) -> "Sides":
        """Paired anew; without the map that `diff` had, names only it joined follow the verdict."""
        if verdict.verdict == "cannot-compare":  # the traces may not bear a closer look
            return cls(reference, port, Pairing((), (), ()))
        pairing = pair(reference, port, renames)
        known = {(found.site.name, found.port[0].name) for found in pairing.pairs}
        told = [(row.site, row.port_site) for row in verdict.rows]
        told += [(verdict.site, verdict.port_site)] if verdict.site and verdict.port_site else []
        missing = {ours: Rename((theirs,)) for theirs, ours in told if (theirs, ours) not in known}
        if renames is None and missing:
            pairing = pair(reference, port, missing)
        return cls(reference, port, pairing)

    def find(self, row: Row) -> Pair | None:
        """The pair a row was measured on."""
        place = (row.site, row.place, row.step, row.call)
        return next((found for found in self.pairing.pairs if found.site.id == place), None)

    def find_name(self, name: str, port_name: str | None) -> Pair | None:
        """The first pair of a name: what a gate failed at."""
        same = (found for found in self.pairing.pairs if found.site.name == name)
        return next((found for found in same if found.port[0].name == port_name), None)

    def read(self, found: Pair, rows: Iterable[Row] = ()) -> "Value":
        """Both values in the reference's axis order, or why they are not there."""
        layouts = Layouts()
        try:
            for row in _telling(rows):
                if lesson := self.find(row):
                    see(lesson, self.reference, self.port, layouts)
            seen = see(found, self.reference, self.port, layouts)
        except LyditeError as error:
            return Value(found, None, None, str(error))
        return _value(found, seen)


@dataclass(frozen=True, eq=False)
class Value:
    """A value on both sides; None where only statistics were kept."""

    pair: Pair
    reference: Array | None
    port: Array | None
    note: str

    @property
    def together(self) -> tuple[Array, Array] | None:
        """Both, when they can be compared place by place."""
        if self.reference is None or self.port is None or not self.reference.size:
            return None
        return (self.reference, self.port) if self.reference.shape == self.port.shape else None

    @property
    def dims(self) -> str | None:
        """Axis names in the reference's order, where somebody gave them."""
        return self.pair.ref_dims or self.pair.site.dims


def statistics(event: Event, values: Array | None) -> Stats | None:
    """What a side's value is like: measured here, or as its trace says."""
    if values is None or not values.size:
        return event.stats
    finite = values[np.isfinite(values)].astype(np.float64)
    counts = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    zero = int((values == 0).sum())
    if not finite.size:
        return Stats(values.size, nan=counts[0], inf=counts[1], zero=zero)
    with np.errstate(over="ignore"):
        rms = float(np.sqrt(np.mean(np.square(finite))))
        spread = float(finite.std())
    low, high, mean = float(finite.min()), float(finite.max()), float(finite.mean())
    return Stats(values.size, low, high, mean, spread, rms, *counts, zero)


def apart(reference: Array, port: Array) -> Array:
    """|port − reference|; ∞ where one is not finite and the other is not the same."""
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(port - reference)
        same = (port == reference) | (np.isnan(port) & np.isnan(reference))
    return np.where(same, 0, np.where(np.isfinite(gap), gap, np.inf))


def _telling(rows: Iterable[Row]) -> list[Row]:
    """One row for each axis order that had to be assumed, a few of each."""
    noted: dict[str, Row] = {}
    for row in rows:
        if row.note:
            noted.setdefault(row.note, row)
    return list(noted.values())[:LESSONS]


def _value(found: Pair, seen: Seen) -> Value:
    if seen.reference is None or seen.port is None:
        return Value(found, None, None, "Only statistics were kept of this value.")
    return Value(found, _plain(seen.reference), _plain(seen.port), seen.note)


def _plain(array: Array) -> Array:
    """Real numbers of at least float32; complex ones as pairs along the last axis."""
    return wide(array.astype(np.complex64) if array.dtype.kind == "c" else array)
