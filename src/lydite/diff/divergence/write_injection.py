"""Injection: run the port again on the reference's values, so that one bug is one wrong value.

The reference's values are written as the port would have written them: with its names and in its
axis orders. A port in any language then only has to look up its own name. Every value it computes
is recorded first and then replaced, so an error that remains was made by that module.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.compare import compare
from lydite.diff.divergence.first import open_margin
from lydite.diff.measure.aligned import AlignedPair, Layouts, align_values
from lydite.diff.name_map import Rename
from lydite.diff.pairing.pair_traces import pair_traces
from lydite.diff.pairing.paired_events import BY_NAME, Pair
from lydite.diff.prompt_order import views
from lydite.diff.result import Verdict
from lydite.trace.events import Event, EventId, Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

Rerun = Callable[[Path, Path], None]  # run the port on the values of a folder, record to another


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
    """Compare, run the port again on the reference's values, and compare what each module does.

    `free` is the verdict without injection, if there is one already. `floor`, if given, is the
    reference in another precision run on the same injected values: the rounding of each module
    alone. The verdict is the second comparison's; its `sources` are all sites that are wrong on the
    reference's inputs, in order.
    """
    free = free or compare(reference, port, renames=renames)
    if not free.rows:
        return free
    values = scratch / "reference-as-port"
    # Injecting a value that was recorded at another point would break a correct port.
    misplaced = {row.port_site for row in free.ignored_rows}
    write_injection(reference, port, values, without=misplaced, renames=renames)
    rerun(values, scratch / "injected")
    with Trace.open(scratch / "injected") as again:
        verdict = compare(
            reference,
            again,
            floor=floor,
            renames={**_guessed(reference, port, renames), **(renames or {})},
            tolerance=tolerance,
            isolated=True,
            without=misplaced,
            least=None if floor else _limits(free),
        )
    return replace(verdict, remarks=(*free.remarks, *verdict.remarks))


def _limits(free: Verdict) -> dict[EventId, float]:
    """The limits without injection: what one module rounds is not measured, only estimated.

    A value that agrees without injection is not wrong by itself because of a little more.
    """
    return {
        (row.site, row.slot, row.step, row.call): row.limit * open_margin(row.dtype)
        if row.agrees
        else row.limit
        for row in free.rows
        if row.limit is not None
    }


def _guessed(reference: Trace, port: Trace, renames: dict[str, Rename] | None) -> dict[str, Rename]:
    """Pairs of the free run not found by name: the injected run alone would not show them."""
    guessed: dict[str, Rename] = {}
    reference, port, _ = views(reference, port)
    for pair in pair_traces(reference, port, renames).pairs:
        if pair.how in BY_NAME or pair.port_event.slot != "out":
            continue
        refs = tuple(dict.fromkeys(event.site for event in pair.reference))
        guessed[pair.port_event.name] = Rename(refs, axis=pair.axis, how=pair.how)
    return guessed


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
    reference, port, _ = views(reference, port)
    pairs = pair_traces(reference, port, renames).pairs
    layouts.learn(pairs, reference, port)
    header = Header(side="reference", framework=reference.header.framework, dtype="float32")
    with TraceWriter(folder, header) as writer:
        for pair in sorted(pairs, key=lambda pair: pair.port_event.i):
            if pair.port_event.name in without:
                continue
            values = align_values(pair, reference, port, layouts)
            for ordered, value in _as_port(pair, values):
                event, value = port.written(ordered), port.as_written(ordered, value)
                key = (event.name, event.slot, event.step)
                for _ in range(event.call - calls[key]):  # calls without a counterpart
                    writer.count(*key)
                calls[key] = event.call + 1
                writer.add(event.name, value, slot=event.slot, kind=event.kind, step=event.step)


def _as_port(pair: Pair, values: AlignedPair) -> Iterator[tuple[Event, NDArray[Any]]]:
    """The reference's value in the port's axis order and parts, for each event of the pair."""
    if values.reference is None or values.is_own_form:
        return
    if values.fit is None:  # ids and tables
        if len(pair.port) == 1 and values.reference.shape == pair.port_event.shape:
            yield pair.port_event, values.reference
        return
    if len(pair.port) == 1:
        yield pair.port_event, values.fit.undo(values.reference, pair.port_event.shape)
        return
    events = [pair.port[index] for index in values.order]
    lengths = [event.shape[0] if event.shape else 1 for event in events]
    whole = values.fit.undo(values.reference, (sum(lengths), *events[0].shape[1:]))
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    for index in np.argsort(values.order):
        yield events[index], parts[index].reshape(events[index].shape)
