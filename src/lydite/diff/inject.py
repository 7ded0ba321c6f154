"""Injection: the port run once more on the reference's values, so that one bug is one wrong value.

The reference's values are written down as the port would have written them: its names, its axis
orders. A port in any language then only has to look its own name up. Every value it computes is
recorded first and replaced after, so what is left of an error is what was done at that place.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.compare import compare
from lydite.diff.pairing import Pair, pair
from lydite.diff.renames import Rename
from lydite.diff.result import Verdict
from lydite.diff.values import Layouts, see
from lydite.trace.events import Header
from lydite.trace.store import Trace
from lydite.trace.writer import TraceWriter

Rerun = Callable[[Path, Path], None]  # run the port on the values of one folder, record to another


def isolate(
    reference: Trace,
    port: Trace,
    rerun: Rerun,
    scratch: Path,
    *,
    floor: Trace | None = None,
    renames: dict[str, Rename] | None = None,
    tolerance: float | None = None,
) -> Verdict:
    """Compare, run the port again on the reference's values, and compare what each place does.

    `floor`, if given, is the reference in another precision run on the same injected values: its
    rounding at each place alone. The verdict is the second comparison's; its `sources` are all
    places that go wrong by themselves, in order.
    """
    free = compare(reference, port, renames=renames)
    if free.verdict == "cannot-compare" or not free.rows:
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
            renames=renames,
            tolerance=tolerance,
            isolated=True,
            without=misplaced,
        )
    return replace(found, remarks=(*free.remarks, *found.remarks))


def write_injection(
    reference: Trace,
    port: Trace,
    folder: Path,
    *,
    without: Collection[str] = (),
    renames: dict[str, Rename] | None = None,
) -> None:
    """Write the reference's values under the port's names and in its axis orders."""
    layouts = Layouts()
    header = Header(side="reference", framework=reference.header.framework, dtype="float32")
    with TraceWriter(folder, header) as writer:
        for each in _in_port_order(pair(reference, port, renames).pairs):
            if each.port_site.name not in without and each.site.kind == "activation":
                _write(writer, each, see(each, reference, port, layouts))


def _write(writer: TraceWriter, each: Pair, seen: Any) -> None:
    if seen.reference is None or seen.fit is None or len(each.port) != 1:
        return
    event = each.port_site
    value: NDArray[Any] = seen.fit.undo(np.asarray(seen.reference), event.shape)
    writer.add(event.name, value, port=event.port, kind=event.kind, step=event.step)


def _in_port_order(pairs: Iterable[Pair]) -> list[Pair]:
    return sorted(pairs, key=lambda each: each.port_site.i)
