"""Values that have the same rows on both sides, turned or in another order.

A rotation of q and k keeps the length of each row, right or wrong, and two streams of tokens may be
joined in another order.
"""

from collections import defaultdict
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.measure.distance import relative_error, wide
from lydite.diff.measure.rounding import FINE
from lydite.diff.pairing.pair_names import WEAK, NamePairs
from lydite.diff.pairing.similarity import is_input
from lydite.trace.events import Event, Site
from lydite.trace.reader import Trace

SAME_LENGTHS = 1e-5  # relative difference of the lengths of rows that are the same rows
NEAR_LENGTHS = 2e-3  # the same of rows that were rounded to 16 bits
LEAST_SPREAD = 1e-3  # of lengths: rows after a norm without weights all have one length
TURNED = 0.03  # relative difference of the sums of rows that are other rows
MAX_ROWS = 2**24  # numbers of a value whose rows are measured


def with_same_rows(names: NamePairs) -> dict[str, Site]:
    """Free names whose rows are those of one of the reference's values, turned or in another order.

    Of a value before and after its rotation the one after is taken; a value that the reference
    records only before it is no counterpart of the one after.
    """
    free: dict[int, list[tuple[Site, Event]]] = defaultdict(list)
    for site, event in names.free_events().items():
        free[prod(event.shape)].append((site, event))
    claims: dict[Site, list[str]] = defaultdict(list)
    for name, event in names.left_events(copies=False).items():
        if event.dtype not in FINE:
            continue
        same = [
            site
            for site, other in free[prod(event.shape)]
            if _have_same_lengths(names, event, other, SAME_LENGTHS)
        ]
        last = max(same, key=lambda site: names.reference_events[site].i, default=None)
        if last and not _is_before_rotation(names, name, last, SAME_LENGTHS):
            claims[last].append(name)
    return {claimants[0]: site for site, claimants in claims.items() if len(claimants) == 1}


def turned_guesses(names: NamePairs) -> set[str]:
    """Names paired by a guess with what the reference records before a rotation, the port after."""
    return {
        name
        for name, rename in names.found.items()
        if rename.how in WEAK and len(rename.ref) == 1
        for site in rename.ref
        if (event := names.port_events.get(name)) is not None
        and (other := names.reference_events.get(site)) is not None
        and _have_same_lengths(names, event, other, NEAR_LENGTHS)
        and _is_before_rotation(names, name, site, NEAR_LENGTHS)
    }


def _is_before_rotation(names: NamePairs, name: str, site: Site, limit: float) -> bool:
    """Whether a value has turned rows of one that the reference records before a rotation only.

    What is rotated rightly or wrongly has a value with the same lengths before it, or is what
    attention takes.
    """
    event = names.reference_events[site]
    return (
        not is_input(site)
        and _is_turned(names, name, site)
        and not any(
            other.hash != event.hash
            and other.step == event.step
            and _have_same_lengths(names, event, other, limit)
            for other in names.reference_events.values()
            if prod(other.shape) == prod(event.shape)
        )
    )


def _have_same_lengths(names: NamePairs, one: Event, other: Event, limit: float) -> bool:
    """Whether the rows of a value have the lengths of those of a reference's, in whatever order."""
    if not _may_be_rows(one, other, limit):
        return False
    side = names.reference if names.reference_events.get(one.site) is one else names.port
    lengths = _row_lengths(side, one, limit), _row_lengths(names.reference, other, limit)
    if lengths[0] is None or lengths[1] is None:
        return False
    return relative_error(lengths[0], lengths[1]) < limit


def _is_turned(names: NamePairs, name: str, site: Site) -> bool:
    """Whether rows of the same lengths are other rows, in whatever order."""
    sides = (names.port, names.port_events[name]), (names.reference, names.reference_events[site])
    sums = [
        np.sort(wide(trace.read(event)).reshape(-1, event.shape[-1]).sum(-1, dtype=np.float64))
        for trace, event in sides
    ]
    return relative_error(*sums) > TURNED


def _may_be_rows(one: Event, other: Event, limit: float) -> bool:
    """Whether two values may have the same rows: their norms tell most apart."""
    a, b = one.stats, other.stats
    return (
        one.kind == other.kind == "activation"
        and len(one.shape) > 2
        and one.shape[-1] == other.shape[-1] > 1
        and prod(one.shape) <= MAX_ROWS
        and a is not None
        and b is not None
        and bool(a.rms and b.rms)
        and abs((a.rms or 0.0) - (b.rms or 0.0)) < limit * (b.rms or 0.0)
    )


def _row_lengths(trace: Trace, event: Event, limit: float) -> NDArray[Any] | None:
    """The lengths of a value's rows in increasing order; None where they hardly differ."""
    if not trace.has_values(event):
        return None
    rows = wide(trace.read(event)).reshape(-1, event.shape[-1])
    lengths = np.sort(np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64)))
    return lengths if lengths.std() > max(LEAST_SPREAD, 3 * limit) * lengths.mean() else None
