"""Injection: the port run once more on the reference's values, so that one bug is one wrong value.

The reference's values are written down as the port would have written them: its names, its axis
orders. A port in any language then only has to look its own name up. Every value it computes is
recorded first and replaced after, so what is left of an error is what was done at that place.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.calls import NAMED, Pair
from lydite.diff.compare import compare
from lydite.diff.pairing import pair
from lydite.diff.renames import Rename
from lydite.diff.result import Verdict
from lydite.diff.values import Layouts, Seen, see
from lydite.trace.events import Event, Header
from lydite.trace.store import Trace
from lydite.trace.writer import TraceWriter

Rerun = Callable[[Path, Path], None]  # run the port on the values of one folder, record to another


def isolate(
    reference: Trace,
    port: Trace,
    rerun: Rerun,
    scratch: Path,
    *,
    free: Verdict | None = None,
    floor: Trace | None = None,
    renames: dict[str, Rename] | None = None,
    tolerance: float | None = None,
) -> Verdict:
    """Compare, run the port again on the reference's values, and compare what each place does.

    `free` is the verdict on the two as they are, if there is one already. `floor`, if given, is the
    reference in another precision run on the same injected values: its rounding at each place
    alone. The verdict is the second comparison's; its `sources` are all places that go wrong by
    themselves, in order.
    """
    free = free or compare(reference, port, renames=renames)
    if not free.rows:
        return free
    values = scratch / "reference-as-port"
    misplaced = {row.port_site for row in free.aside}  # injecting there would break what is right
    write_injection(reference, port, values, without=misplaced, renames=renames)
    rerun(values, scratch / "injected")
    with Trace.open(scratch / "injected") as again:
        found = compare(
            reference,
            again,
            floor=floor,
            renames={**_guessed(reference, port, renames), **(renames or {})},
            tolerance=tolerance,
            isolated=True,
            without=misplaced,
        )
    return replace(found, remarks=(*free.remarks, *found.remarks))


def _guessed(reference: Trace, port: Trace, renames: dict[str, Rename] | None) -> dict[str, Rename]:
    """Pairs of the free run that no name speaks for: the second run alone would not show them."""
    found: dict[str, Rename] = {}
    for each in pair(reference, port, renames).pairs:
        if each.how in NAMED or each.port_site.slot != "out":
            continue
        refs = tuple(dict.fromkeys(event.name for event in each.reference))
        ports = {} if each.site.slot == "out" else {"out": each.site.slot}
        found[each.port_site.name] = Rename(refs, ports=ports, axis=each.axis, how=each.how)
    return found


def write_injection(
    reference: Trace,
    port: Trace,
    folder: Path,
    *,
    without: Collection[str] = (),
    renames: dict[str, Rename] | None = None,
) -> None:
    """Write the reference's values under the port's names and in its axis orders."""
    layouts, calls = Layouts(), Counter[tuple[str, str, int]]()
    pairs = pair(reference, port, renames).pairs
    layouts.look_ahead(pairs, reference, port)
    header = Header(side="reference", framework=reference.header.framework, dtype="float32")
    with TraceWriter(folder, header) as writer:
        for each in sorted(pairs, key=lambda each: each.port_site.i):
            if each.port_site.name in without:
                continue
            for event, value in _as_port(each, see(each, reference, port, layouts)):
                place = (event.name, event.slot, event.step)
                for _ in range(event.call - calls[place]):  # calls without a counterpart
                    writer.count(*place)
                calls[place] = event.call + 1
                writer.add(event.name, value, slot=event.slot, kind=event.kind, step=event.step)


def _as_port(each: Pair, seen: Seen) -> Iterator[tuple[Event, NDArray[Any]]]:
    """The reference's value turned and cut as the port has it, for each event of the pair."""
    if seen.reference is None:
        return
    if seen.fit is None:  # ids and tables are taken as they lie
        if len(each.port) == 1 and seen.reference.shape == each.port_site.shape:
            yield each.port_site, seen.reference
        return
    if len(each.port) == 1:
        yield each.port_site, seen.fit.undo(seen.reference, each.port_site.shape)
        return
    events = [each.port[at] for at in seen.order]
    lengths = [event.shape[0] if event.shape else 1 for event in events]
    whole = seen.fit.undo(seen.reference, (sum(lengths), *events[0].shape[1:]))
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    for at in np.argsort(seen.order):
        yield events[at], parts[at].reshape(events[at].shape)
