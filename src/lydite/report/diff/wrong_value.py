"""The wrong value on both sides: its statistics, where it differs, plots and heat maps."""

from dataclasses import dataclass, replace

import numpy as np

from lydite.diff.result import Row
from lydite.report.diff.heat_maps import Maps, draw_maps
from lydite.report.diff.plots import Density, Histogram, Lines, density, histogram, lines
from lydite.report.diff.read_values import Array, Value, apart, statistics
from lydite.report.diff.row_text import number
from lydite.report.page import Table
from lydite.trace.events import Event, Stats, WeightInfo

MAX_LISTED = 8  # single values

STATISTICS = ("min", "max", "mean", "std", "rms")


@dataclass(frozen=True)
class Tensor:
    """What a page shows of one value."""

    note: str
    numbers: Table
    differences_title: str
    differences: Table | None
    lines: Lines | None = None
    histogram: Histogram | None = None
    density: Density | None = None
    maps: tuple[Maps, ...] = ()


def show_value(value: Value) -> Tensor:
    """Statistics and plots of a value; what was not recorded is left out."""
    reference, port, both = value.reference, value.port, value.together
    with np.errstate(all="ignore"):  # a broken value may hold anything
        table = _statistics(_side(value.pair.reference, reference), _side(value.pair.port, port))
        title, differences = _differences(*both) if both else ("", None)
        bare = Tensor(value.note, table, title, differences)
        if reference is None or port is None or value.pair.event.kind == "ids":
            return bare
        if short := lines(reference, port):
            return replace(bare, lines=short)
        return replace(
            bare,
            histogram=histogram(reference, port),
            density=density(*both) if both else None,
            maps=draw_maps(value),
        )


def show_parameter(reference: WeightInfo | None, port: WeightInfo | None) -> Tensor:
    """A parameter that differs; traces have its statistics only."""
    sides = [
        ("×".join(map(str, info.shape)) or "scalar", info.dtype, info.stats) if info else None
        for info in (reference, port)
    ]
    note = "Traces contain statistics of parameters, not their values."
    return Tensor(note, _statistics(*sides), "", None)


_Side = tuple[str, str, Stats | None]


def _side(events: tuple[Event, ...], array: Array | None) -> _Side:
    shape = " + ".join("×".join(map(str, event.shape)) or "scalar" for event in events)
    return shape, events[0].dtype, statistics(events[0], array)


def _statistics(*sides: _Side | None) -> Table:
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


def _differences(reference: Array, port: Array) -> tuple[str, Table | None]:
    """The largest differences; of whole numbers the first."""
    away = apart(reference, port).reshape(-1)
    wrong = int((away > 0).sum())
    if not wrong:
        return "No value differs.", None
    whole = bool((reference == np.rint(reference)).all())
    count = min(MAX_LISTED, wrong)
    if whole:
        at = np.flatnonzero(away > 0)[:count]
    else:
        top = np.argpartition(away, -count)[-count:]
        at = top[np.argsort(-away[top], kind="stable")]
    expected, values = (side.reshape(-1)[at].astype(float) for side in (reference, port))
    rows = tuple(
        (
            f"[{', '.join(str(int(i)) for i in np.unravel_index(index, reference.shape))}]",
            *((_whole(a), _whole(b)) if whole else _distinct(a, b)),
            (_whole if whole else number)(float(away[index])),
        )
        for index, a, b in zip(at, expected, values, strict=True)
    )
    share = f"{wrong:,} of {away.size:,} values differ"
    title = f"{share}; the {'first' if whole else 'largest differences'}:"
    head = ("at", "reference", "port", "|difference|")
    return title, Table(head, rows, numeric=frozenset({1, 2, 3}))


def _distinct(*values: float) -> list[str]:
    """Two numbers with enough digits to show their difference."""
    texts = [number(value) for value in values]
    for digits in range(4, 10):
        if texts[0] != texts[1]:
            break
        texts = [number(value, digits + 1) for value in values]
    return texts


def _whole(value: float) -> str:
    return f"{value:.0f}" if abs(value) < 1e15 else number(value)


def headline(row: Row) -> str:
    """Site, shape and dtype of a row in one line."""
    shape = "×".join(map(str, row.shape)) or "scalar"
    return f"{row.name}, step {row.step}: {shape}, {row.dtype}"
