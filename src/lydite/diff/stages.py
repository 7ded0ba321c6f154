"""Two stages compared: a value that is right, but recorded elsewhere or in another axis order."""

from collections.abc import Iterable
from math import prod
from typing import Any

from numpy.typing import NDArray

from lydite.diff.arrays import relative_error, wide
from lydite.diff.axes import best_fit, possible_fits
from lydite.diff.calls import Pair
from lydite.diff.result import Row
from lydite.diff.rows import Sides
from lydite.trace.events import Event
from lydite.trace.store import Trace

NEAR = 60  # events around a place among which its value is looked for


def elsewhere(sides: Sides, pair: Pair, row: Row) -> str | None:
    """A remark, when one side's value is another of the other side's, near it; None when not."""
    if len(pair.port) > 1 or len(pair.reference) > 1:
        return None
    limit = max(row.limit or 0.0, 1e-3 if row.dtype in ("bf16", "f16") else 1e-5)
    reference, port = sides.reference, sides.port
    if _is_moved(sides, pair, limit):
        return f"{row.name} holds the same values in another axis order, not a bug"
    for mine, event, other_side, other, said in (
        (port, pair.port_site, reference, pair.site, "the reference has"),
        (reference, pair.site, port, pair.port_site, "the port has"),
    ):
        if not mine.has_values(event):
            continue
        value = wide(mine.read(event))
        for name, candidate in around(other_side, other, inside=False):
            if _fits(value, candidate, limit):
                return (
                    f"{row.name} holds what {said} at {name}: recorded at another stage, not a bug"
                )
    return None


def around(trace: Trace, here: Event, *, inside: bool = True) -> Iterable[tuple[str, NDArray[Any]]]:
    """Other values of a trace around one event, of its size.

    A module that gives what a part `inside` it gave has left something out: that is no other stage.
    """
    size = prod(here.shape)
    for event in trace.events:
        if not inside and event.name.startswith((f"{here.name}.", f"{here.name}/")):
            continue
        near = abs(event.i - here.i) <= NEAR and event.i != here.i and event.step == here.step
        alike = prod(event.shape) == size and event.kind == here.kind
        if near and alike and trace.has_values(event):
            yield str(event), wide(trace.read(event))


def _is_moved(sides: Sides, pair: Pair, limit: float) -> bool:
    """Whether the two are one value in two axis orders that its shape does not tell apart."""
    reference, port = sides.reference, sides.port
    if not (reference.has_values(pair.site) and port.has_values(pair.port_site)):
        return False
    return _fits(wide(port.read(pair.port_site)), wide(reference.read(pair.site)), limit)


def _fits(value: NDArray[Any], other: NDArray[Any], limit: float) -> bool:
    """Whether some axis order makes the two one."""
    fit, error = best_fit(possible_fits(value.shape, other.shape), value, other)
    return fit is not None and error <= limit and relative_error(fit.apply(value), other) <= limit
