"""Tables of rotations and probabilities: values that are told from all others, right or wrong.

A port keeps tables in a layout of its own: half as wide, both in one value, without a batch.
Cosines and sines of the same angles have squares that add up to one, so that a table is known by
its numbers, and a wrong table has a counterpart although no number of it is right. Probabilities of
attention are known by their sums, also with a wrong mask or scale.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.axes import fits_of
from lydite.diff.name_map import Rename
from lydite.diff.pairing.pair_names import WEAK, NamePairs, compatible
from lydite.diff.pairing.paired_events import COMPLEX
from lydite.diff.pairing.similarity import Comparer, ValueReader, is_input
from lydite.trace.events import Event, Site

ONE = 2e-2  # by how much squares of bfloat16 cosines and sines miss one
FEWEST = 16  # numbers of a table
MOST = 2**20
SAME = 2e-3  # between the angles of two equal tables
NEAR = 4  # values between the cosines and the sines of a table

Key = TypeVar("Key", str, Site)


def by_tables(names: NamePairs) -> None:
    """Wrong tables of cosines and sines, with the reference's that no other name has."""
    comparer = names.comparer
    outputs = {s: e for s, e in names.reference_events.items() if not is_input(s)}
    tables = list(_tables(comparer.reference, outputs))
    _leave_out_pairs(names, [_columns(comparer.reference, [outputs[s] for s in t]) for t in tables])
    for table in _tables(comparer.port, names.port_events) if tables else ():
        if all(_is_right(names, name) for name in table):
            continue
        own = _columns(comparer.port, [names.port_events[name] for name in table])
        if any(
            _same_columns(own, _columns(comparer.reference, [outputs[site] for site in other]))
            for other in tables
        ):
            # A right table in another layout, or one that only its use shows to be wrong.
            for name in table:
                rename = names.found.get(name)
                if rename is None or rename.how in WEAK:
                    names.found.pop(name, None)
                    names.ignored.add(name)
                    names.tables.add(name)
            continue
        free = {
            other: _similarity(comparer, names, table, other)
            for other in tables
            if all(_is_free(names, site, table) for site in other)
            and fits_of(names.port_events[table[0]].shape, outputs[other[0]].shape)[0]
        }
        if free:
            best = max(free, key=lambda other: free[other])
            for name, site in zip(table, best, strict=True):
                names.found[name] = Rename((site,), how="similarity")
    _pair_sinusoids(names)
    _pair_in_order(names, _is_rotation)
    _pair_in_order(names, ValueReader.is_probability)


def _pair_in_order(names: NamePairs, is_one: Callable[[ValueReader, Event], bool]) -> None:
    """Values of one kind and size, where both sides have as many of them: each with its like."""
    readers = names.comparer.port, names.comparer.reference
    left: dict[int, list[str]] = defaultdict(list)
    for name, event in names.left_events(copies=False).items():
        if is_one(readers[0], event):
            left[prod(event.shape)].append(name)
    free: dict[int, dict[str, Site]] = defaultdict(dict)
    for site, event in names.free_events(copies=False).items() if left else ():
        if prod(event.shape) in left and is_one(readers[1], event):
            free[prod(event.shape)].setdefault(readers[1].content(event) or str(site), site)
    for size, group in left.items():
        sites = list(free[size].values())
        events = [names.reference_events[site] for site in sites]
        if len(group) == len(sites) and all(
            compatible(names.port_events[name], [event])
            for name, event in zip(group, events, strict=True)
        ):
            names.add(dict(zip(group, sites, strict=True)), "similarity")


def _leave_out_pairs(names: NamePairs, tables: Sequence[NDArray[Any]]) -> None:
    """Leave out right tables that have each cosine beside its sine, whatever their names are."""
    reader = names.comparer.port
    for name, event in names.port_events.items() if tables else ():
        if 2 not in event.shape[1:] or event.kind != "activation" or not _is_small(reader, event):
            continue
        value = reader.read(event).astype(np.float64)
        for axis in (n for n, size in enumerate(event.shape) if size == 2 and n > 0):
            cosines, sines = np.moveaxis(value, axis, 0)
            own = np.arctan2(sines, cosines)
            own = np.sort(own.reshape(-1, own.shape[-1]), 0).T
            if _add_up(cosines, sines) and any(_same_columns(own, table) for table in tables):
                names.found.pop(name, None)
                names.ignored.add(name)


def _pair_sinusoids(names: NamePairs) -> None:
    """Cosines and sines side by side in one value, where both sides have as many of a size."""
    readers = names.comparer.port, names.comparer.reference
    left = names.left_events(copies=False)
    free = names.free_events(inputs=False, copies=False)
    own = [n for n, e in left.items() if e.shape and _is_sinusoid(readers[0], e, e.shape[-1])]
    sizes = {prod(left[name].shape) for name in left}
    for size in sizes:
        sites = [
            site
            for site, event in free.items()
            if prod(event.shape) == size
            and event.shape
            and _is_sinusoid(readers[1], event, event.shape[-1])
        ]
        widths = {free[site].shape[-1] for site in sites}
        group = [
            name
            for name, event in left.items()
            if prod(event.shape) == size
            and (name in own or any(_is_sinusoid(readers[0], event, w) for w in widths))
        ]
        if len(group) == len(sites) and all(
            compatible(left[name], [free[site]]) for name, site in zip(group, sites, strict=True)
        ):
            names.add(dict(zip(group, sites, strict=True)), "similarity")


def _is_right(names: NamePairs, name: str) -> bool:
    """Whether a name has a counterpart that is its own, and no guess."""
    rename = names.found.get(name)
    if rename is None or rename.how in WEAK:
        return False
    return rename.how != "equal" or not _word(name) or len(rename.ref) != 1


def _is_free(names: NamePairs, site: Site, table: Sequence[str]) -> bool:
    """Whether no name but those of the table has this site."""
    return all(site not in r.ref or n in table for n, r in names.found.items())


def _similarity(
    comparer: Comparer, names: NamePairs, table: Sequence[str], other: Sequence[Site]
) -> float:
    pairs = zip(table, other, strict=True)
    return sum(
        comparer.correlation(names.reference_events[b], names.port_events[a]) for a, b in pairs
    )


def _tables(reader: ValueReader, events: Mapping[Key, Event]) -> Iterator[tuple[Key, Key]]:
    """Two values of one shape each whose squares add up to one: the cosines first."""
    small = [
        (key, event)
        for key, event in events.items()
        if event.kind == "activation" and len(event.shape) > 1 and _is_small(reader, event)
    ]
    small.sort(key=lambda each: each[1].i)
    for number, (a, first) in enumerate(small):
        for b, second in small[number + 1 : number + 1 + NEAR]:
            if first.shape != second.shape or second.i - first.i > NEAR:
                continue
            x, y = (reader.read(event).astype(np.float64) for event in (first, second))
            if _add_up(x, y):
                yield (a, b) if _cosines_first(a, b, x, y) else (b, a)


def _cosines_first(a: str | Site, b: str | Site, x: NDArray[Any], y: NDArray[Any]) -> bool:
    """Whether the first of two values has the cosines: by its name, else by slow rotations."""
    words = _word(a), _word(b)
    return words[0] == "cos" if set(words) == {"cos", "sin"} else x.mean() >= y.mean()


def _word(key: str | Site) -> str:
    found = re.findall("cos|sin", str(key).rpartition("/")[2].lower())
    return found[-1] if found else ""


def _columns(reader: ValueReader, table: Sequence[Event]) -> NDArray[Any]:
    """The angles of each column of a table, sorted: in whatever order its rows and columns are."""
    cosines, sines = (reader.read(event).astype(np.float64) for event in table)
    angles = np.arctan2(sines, cosines)
    return np.sort(angles.reshape(-1, angles.shape[-1]), 0).T


def _same_columns(own: NDArray[Any], right: NDArray[Any]) -> bool:
    """Whether each column of one table is one of the other's, and the other way round."""
    if own.shape[1] % right.shape[1]:
        return False
    own = own[:, :: own.shape[1] // right.shape[1]]  # rows may be there for each head
    apart = np.stack([np.abs(right - column).max(-1) for column in own])
    return bool(max(apart.min(0).max(), apart.min(1).max()) < SAME)


def _is_small(reader: ValueReader, event: Event) -> bool:
    """Whether all numbers lie between −1 and 1, and there are enough of them."""
    is_table = FEWEST <= prod(event.shape) <= MOST and event.dtype not in COMPLEX
    stats = reader.stats(event) if is_table else None
    if stats is None or stats.min is None or stats.max is None or not reader.can_read(event):
        return False
    return bool(stats.min >= -1 - ONE and 0.5 < stats.max <= 1 + ONE)


def _is_sinusoid(reader: ValueReader, event: Event, width: int) -> bool:
    """Whether a value has rows of this width with the cosines in one half."""
    if event.kind != "activation" or width % 2 or width < 4 or not _is_small(reader, event):
        return False
    if event.shape[-1] % width:
        return False
    rows = reader.read(event).astype(np.float64).reshape(-1, width)
    return _add_up(rows[:, : width // 2], rows[:, width // 2 :])


def _is_rotation(reader: ValueReader, event: Event) -> bool:
    """Whether a value has each cosine beside its sine."""
    if len(event.shape) < 2 or event.shape[-1] % 2 or event.kind != "activation":
        return False
    if not _is_small(reader, event):
        return False
    value = reader.read(event).astype(np.float64)
    return _add_up(value[..., 0::2], value[..., 1::2])


def _add_up(x: NDArray[Any], y: NDArray[Any]) -> bool:
    return bool(np.abs(x * x + y * y - 1).max() < ONE) and bool(np.ptp(x) > ONE)
