"""The value a verdict is about, read from both traces in one axis order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import LyditeError
from lydite.diff.measure.aligned import Layouts, align_values
from lydite.diff.measure.distance import wide
from lydite.diff.name_map import Rename
from lydite.diff.pairing.pair_traces import pair_traces
from lydite.diff.pairing.paired_events import Pair, Pairing, pair_events
from lydite.diff.prompt_order import views
from lydite.diff.result import Row, Verdict
from lydite.trace.events import Event, Site, Stats
from lydite.trace.reader import Trace

MAX_EXAMPLES = 12  # rows read first, for the axis orders they need

Array = NDArray[Any]
Renames = Mapping[str, Rename]


@dataclass(frozen=True)
class Sides:
    """Both traces and their pairs."""

    reference: Trace
    port: Trace
    pairing: Pairing

    @classmethod
    def of(
        cls, verdict: Verdict, reference: Trace, port: Trace, renames: Renames | None = None
    ) -> "Sides":
        """Paired again; without the map that `compare` had, its names follow from the verdict."""
        if verdict.verdict == "cannot-compare" and verdict.site is None:  # not comparable at all
            return cls(reference, port, Pairing((), (), ()))
        reference, port, _ = views(reference, port)
        try:
            pairing = pair_traces(reference, port, renames)
        except LyditeError:  # values that cannot be read: the names of the verdict
            names = {row.port_site: Rename((Site(row.site),)) for row in verdict.rows}
            return cls(reference, port, pair_events(reference, port, names, ()))
        known = {(pair.event.name, pair.port_event.name) for pair in pairing.pairs}
        names = [(row.site, row.port_site) for row in verdict.rows]
        names += [(verdict.site, verdict.port_site)] if verdict.site and verdict.port_site else []
        missing = {b: Rename((Site(a),)) for a, b in names if (a, b) not in known}
        if renames is None and missing:
            pairing = pair_traces(reference, port, missing)
        return cls(reference, port, pairing)

    def find(self, row: Row) -> Pair | None:
        """The pair a row was measured on."""
        event_id = (row.site, row.slot, row.step, row.call)
        return next((pair for pair in self.pairing.pairs if pair.event.id == event_id), None)

    def find_name(self, name: str, port_name: str | None) -> Pair | None:
        """The first pair of two names: what a gate failed at."""
        names = (name, port_name)
        return next(
            (p for p in self.pairing.pairs if (p.event.name, p.port_event.name) == names), None
        )

    def read(self, pair: Pair, rows: Iterable[Row] = ()) -> "Value":
        """Both values in the reference's axis order, or a note why they are missing."""
        layouts = Layouts()
        try:
            for row in _rows_with_notes(rows):
                if example := self.find(row):
                    align_values(example, self.reference, self.port, layouts)
            values = align_values(pair, self.reference, self.port, layouts)
        except LyditeError as error:
            return Value(pair, None, None, str(error))
        if values.reference is None or values.port is None:
            return Value(pair, None, None, "Only statistics of this value were recorded.")
        return Value(pair, _real(values.reference), _real(values.port), values.note)


@dataclass(frozen=True, eq=False)
class Value:
    """A value on both sides; None where only statistics were kept."""

    pair: Pair
    reference: Array | None
    port: Array | None
    note: str

    @property
    def together(self) -> tuple[Array, Array] | None:
        """Both, when they can be compared element by element."""
        if self.reference is None or self.port is None or not self.reference.size:
            return None
        return (self.reference, self.port) if self.reference.shape == self.port.shape else None

    @property
    def dims(self) -> str | None:
        """Axis names in the reference's order, where they are known."""
        return self.pair.ref_dims or self.pair.event.dims


def statistics(event: Event, values: Array | None) -> Stats | None:
    """Statistics of a value: measured here, or from its trace."""
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


def _rows_with_notes(rows: Iterable[Row]) -> list[Row]:
    """One row for each assumption about the axis order."""
    noted: dict[str, Row] = {}
    for row in rows:
        if row.note:
            noted.setdefault(row.note, row)
    return list(noted.values())[:MAX_EXAMPLES]


def _real(array: Array) -> Array:
    """Real numbers of at least float32; complex ones as pairs along the last axis."""
    return wide(array.astype(np.complex64) if array.dtype.kind == "c" else array)
