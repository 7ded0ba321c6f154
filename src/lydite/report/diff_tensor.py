"""The wrong value itself, on both sides: what it is like, where it differs, how it looks."""

from dataclasses import dataclass, replace

import numpy as np

from lydite.diff.result import Row
from lydite.report.diff_maps import Maps, draw_maps
from lydite.report.diff_plots import Density, Histogram, Lines, density, histogram, lines
from lydite.report.diff_rows import number
from lydite.report.diff_values import Array, Value, apart, statistics
from lydite.report.page import Table
from lydite.trace.events import Stats, WeightInfo

PLACES = 8  # single values listed

STATISTICS = ("min", "max", "mean", "std", "rms")


@dataclass(frozen=True)
class Tensor:
    """What a page shows of one value."""

    note: str
    numbers: Table
    places_title: str
    places: Table | None
    lines: Lines | None = None
    histogram: Histogram | None = None
    density: Density | None = None
    maps: tuple[Maps, ...] = ()


def picture(value: Value) -> Tensor:
    """Numbers and pictures of a value; what was not kept is left out."""
    theirs, ours, both = value.reference, value.port, value.together
    with np.errstate(all="ignore"):  # a broken value may hold anything
        table = _numbers(_side(value, "reference", theirs), _side(value, "port", ours))
        title, places = _places(*both) if both else ("", None)
        bare = Tensor(value.note, table, title, places)
        if theirs is None or ours is None or value.pair.site.kind == "ids":
            return bare
        if short := lines(theirs, ours):
            return replace(bare, lines=short)
        return replace(
            bare,
            histogram=histogram(theirs, ours),
            density=density(*both) if both else None,
            maps=draw_maps(value),
        )


def parameter(reference: WeightInfo | None, port: WeightInfo | None) -> Tensor:
    """A parameter that differs: traces hold what it is like, not its values."""
    sides = [
        ("×".join(map(str, info.shape)) or "scalar", info.dtype, info.stats) if info else None
        for info in (reference, port)
    ]
    note = "Traces keep statistics of parameters, not their values."
    return Tensor(note, _numbers(*sides), "", None)


_Side = tuple[str, str, Stats | None]


def _side(value: Value, name: str, array: Array | None) -> _Side:
    events = value.pair.reference if name == "reference" else value.pair.port
    shape = " + ".join("×".join(map(str, event.shape)) or "scalar" for event in events)
    return shape, events[0].dtype, statistics(events[0], array)


def _numbers(*sides: _Side | None) -> Table:
    """Statistics as rows, the two sides as columns."""
    names = ["shape", "dtype", *STATISTICS, "zeros", "NaN", "infinite"]
    columns: list[list[str]] = []
    for side in sides:
        if side is None:
            columns.append([""] * len(names))
            continue
        shape, dtype, stats = side
        cells = [shape, dtype]
        cells += [number(getattr(stats, name)) if stats else "" for name in STATISTICS]
        counts = (stats.zero, stats.nan, stats.inf) if stats else ()
        cells += [f"{count:,}" for count in counts] or ["", "", ""]
        columns.append(cells)
    rows = tuple(
        (name, *cells)
        for name, *cells in zip(names, *columns, strict=True)
        if not (name in ("NaN", "infinite") and set(cells) <= {"0", ""})
    )
    return Table(("", "reference", "port"), rows, numeric=frozenset({1, 2}))


def _places(reference: Array, port: Array) -> tuple[str, Table | None]:
    """The places that differ most, or of whole numbers the first that differ."""
    away = apart(reference, port).reshape(-1)
    wrong = int((away > 0).sum())
    if not wrong:
        return "No value differs.", None
    whole = bool((reference == np.rint(reference)).all())
    count = min(PLACES, wrong)
    if whole:
        at = np.flatnonzero(away > 0)[:count]
    else:
        top = np.argpartition(away, -count)[-count:]
        at = top[np.argsort(-away[top], kind="stable")]
    said = _whole if whole else number
    rows = tuple(
        (_index(int(flat), reference.shape), *(said(float(each)) for each in values))
        for flat in at
        for values in [(reference.reshape(-1)[flat], port.reshape(-1)[flat], away[flat])]
    )
    share = f"{wrong:,} of {away.size:,} values differ"
    title = f"{share}; the {'first' if whole else 'largest differences'}:"
    head = ("at", "reference", "port", "|difference|")
    return title, Table(head, rows, numeric=frozenset({1, 2, 3}))


def _index(flat: int, shape: tuple[int, ...]) -> str:
    return f"[{', '.join(str(int(at)) for at in np.unravel_index(flat, shape))}]"


def _whole(value: float) -> str:
    return f"{value:.0f}" if abs(value) < 1e15 else number(value)


def headline(row: Row) -> str:
    """Shape, dtype and place of a row in one line."""
    shape = "×".join(map(str, row.shape)) or "scalar"
    return f"{row.name}, step {row.step}: {shape}, {row.dtype}"
