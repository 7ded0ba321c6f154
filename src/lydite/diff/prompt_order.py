"""Ports that run with and without the prompt in another order than the reference.

Guidance takes two predictions. A reference has the negative prompt in the first half of the batch,
or in the first of two calls, and a port may have it in the second. Neither is wrong, so such a port
is read in the order of the reference.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from numpy.typing import NDArray

from lydite.diff.measure.axes import best_fit, possible_fits
from lydite.diff.measure.masks import is_mask
from lydite.diff.pairing.name_matching import close_stats
from lydite.diff.trace_view import TraceView, other_half_first
from lydite.trace.events import Event
from lydite.trace.reader import Trace

SIMILAR = 1e-2  # of two values' statistics, as bfloat16 rounds
EQUAL = 0.05  # relative error; that of two prompts is far larger
CLOSER = 0.25  # of the error in the other order: wrong values may be near to both
MAX_READ = 8  # values of a component that show its order
MAX_TRIED = 64  # values of a component that are looked at
MAX_COUNT = 2**24  # numbers in one of them

COMPUTED = ("activation", "input")
Half = Mapping[tuple[str, str], int]  # how often a value is computed for one of two prompts


def views(reference: Trace, port: Trace) -> tuple[TraceView, TraceView, tuple[str, ...]]:
    """Both traces in the form in which they are compared, and what was done to the port's."""
    ours = TraceView.of(reference)
    return ours, *in_order_of(ours, TraceView.of(port))


def in_order_of(reference: Trace, port: TraceView) -> tuple[TraceView, tuple[str, ...]]:
    """The port with the two prompts in the reference's order, and a remark where that is another.

    Where a value is in the same order, the port exchanges the prompts somewhere itself: a bug.
    """
    sizes, halves = _exchanged_batches(reference, port), _calls_of_half(port)
    sizes -= _sizes_of_results(port, halves)
    has_other_calls = _has_other_calls(reference, port)
    if not sizes and not has_other_calls:
        return port, ()
    exchanged: set[int] = set()
    events: list[Event] = []
    for event in port.events:
        half = halves.get((event.name, event.slot))
        if event.kind in COMPUTED and len(event.shape) > 1 and event.shape[0] in sizes:
            exchanged.add(event.i)
            event = msgspec.structs.replace(event, hash=None)
        if event.kind in COMPUTED and half and has_other_calls:
            call = (event.call + half) % (2 * half)
            event = msgspec.structs.replace(event, call=call)
        events.append(event)
    what = ["halves of the batch"] * bool(sizes) + ["calls"] * has_other_calls
    remark = (
        f"the port has the two {' and '.join(what)} in the other order (with and without the "
        "prompt); its values are compared in the reference's"
    )
    return replace(port, events=tuple(events), exchanged=frozenset(exchanged)), (remark,)


def _sizes_of_results(port: Trace, halves: Half) -> set[int]:
    """Sizes of batches that only the port's last value has, which joins the results of two calls.

    Nothing of the port takes their order into account.
    """
    if 1 not in halves.values():
        return set()
    computed = [event for event in port.events if event.kind in COMPUTED]
    before = {event.shape[0] for event in computed[:-1] if len(event.shape) > 1}
    return {event.shape[0] for event in computed[-1:] if len(event.shape) > 1} - before


def _component(event: Event) -> str:
    """The first part of a name, without numbers."""
    return re.sub(r"\d+", "", re.split(r"[./]", event.name)[0])


def _is_batch(event: Event) -> bool:
    return len(event.shape) > 1 and event.shape[0] > 0 and event.shape[0] % 2 == 0


def _exchanged_batches(reference: Trace, port: Trace) -> set[int]:
    """The sizes of batches of which the port has the other half first; none where one has not."""
    votes = _Votes()
    by_count, halves = _by_count(reference), _calls_of_half(port)
    for event in votes.to_try(port):
        count = event.stats.count if event.stats else 0
        if halves.get((event.name, event.slot)) == 1:
            _vote_of_call(votes, event, port, reference, by_count[2 * count])
        for other in by_count[count] if _is_batch(event) else ():
            if not _is_batch(other) or not _are_similar(other, event):
                continue
            value, expected = port.read(event), reference.read(other)
            if is_mask(expected) or _are_equal(expected, other_half_first(expected)):
                continue  # the masks themselves may be exchanged
            same, other = (_error(x, expected) for x in (value, other_half_first(value)))
            if min(same, other) < EQUAL and min(same, other) < CLOSER * max(same, other):
                votes.add(event, event.shape[0], is_other=other < same)
                break
    return votes.all_other()


def _vote_of_call(
    votes: "_Votes", event: Event, port: Trace, reference: Trace, batches: Iterable[Event]
) -> None:
    """Whether the first of two calls has the first half of a batch of the reference."""
    for other in batches:
        if other.shape[:1] != (2,) or len(other.shape) < 2:
            continue
        value = port.read(event)
        is_half = [_are_equal(value, half) for half in reference.read(other)]
        if sum(is_half) == 1:
            votes.add(event, len(is_half), is_other=is_half.index(True) != event.call)
            return


def _has_other_calls(reference: Trace, port: Trace) -> bool:
    """Whether what is computed twice has the other call first, wherever that shows."""
    halves, port_halves = _calls_of_half(reference), _calls_of_half(port)
    if (by_length := _has_other_lengths(reference, port, halves, port_halves)) is not None:
        return by_length
    votes = _Votes()
    by_count = _by_count(reference)
    for event in votes.to_try(port):
        if (half := port_halves.get((event.name, event.slot))) is None:
            continue
        for other in by_count[event.stats.count if event.stats else 0]:
            if halves.get((other.name, other.slot)) != half or not _are_similar(other, event):
                continue
            call = (other.call + half) % (2 * half)
            second = reference.find(other.name, other.slot, other.step, call)
            if second is None or second.hash == other.hash or _are_similar(second, other):
                continue
            if event.call in (other.call, call) and _are_equal(
                port.read(event), reference.read(other)
            ):
                votes.add(event, 0, is_other=event.call == call)
                break
    return bool(votes.all_other())


def _has_other_lengths(
    reference: Trace, port: Trace, halves: Half, port_halves: Half
) -> bool | None:
    """Whether the prompts' lengths have the other order, right or wrong; None if they do not show.

    The values of two prompts of 7 and 4 tokens are (7, width) and (4, width), also wrong ones.
    """
    right, own = _lengths(reference, halves), _lengths(port, port_halves)
    same = {pair for pair in own if pair in right and pair[::-1] not in right}
    other = {pair for pair in own if pair not in right and pair[::-1] in right}
    return bool(other) if bool(same) != bool(other) else None


def _lengths(trace: Trace, halves: Half) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes that values have in the first and in the second call, where they differ."""
    shapes: dict[tuple[str, str], dict[int, tuple[int, ...]]] = defaultdict(dict)
    for event in _first_step(trace):
        if halves.get((event.name, event.slot)) == 1:
            shapes[event.name, event.slot][event.call] = tuple(n for n in event.shape if n != 1)
    calls = ((of_call[0], of_call[1]) for of_call in shapes.values() if len(of_call) == 2)
    return {pair for pair in calls if pair[0] != pair[1]}


class _Votes:
    """How many values are in the other order, and in the same, by the size of their batch."""

    def __init__(self) -> None:
        self.orders: dict[int, set[bool]] = defaultdict(set)
        self.counts: Counter[str] = Counter()  # by component

    def all_other(self) -> set[int]:
        """The sizes of which some values are in the other order, and none in the same."""
        return {size for size, found in self.orders.items() if found == {True}}

    def add(self, event: Event, size: int, *, is_other: bool) -> None:
        """One more value that shows the order."""
        self.orders[size].add(is_other)
        self.counts[_component(event)] += 1

    def to_try(self, port: Trace) -> Iterator[Event]:
        """The first values of each component, until enough of them have shown an order."""
        tried: Counter[str] = Counter()
        for event in _first_step(port):
            component = _component(event)
            tried[component] += 1
            is_open = tried[component] <= MAX_TRIED and self.counts[component] < MAX_READ
            if is_open and port.has_values(event):
                yield event


def _calls_of_half(trace: Trace) -> dict[tuple[str, str], int]:
    """How often a value is computed for one prompt, where each step has it for two."""
    counts: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for event in trace.events:
        counts[event.name, event.slot][event.step] += 1
    found: dict[tuple[str, str], int] = {}
    for site, steps in counts.items():
        half, rest = divmod(max(steps.values()), 2)
        if not rest and len(set(steps.values())) == 1:
            found[site] = half
    return found


def _first_step(trace: Trace) -> Iterator[Event]:
    """What the first step computes."""
    first = min((event.step for event in trace.events if event.kind in COMPUTED), default=0)
    return (e for e in trace.events if e.step == first and e.kind in COMPUTED)


def _by_count(trace: Trace) -> Mapping[int, list[Event]]:
    """Values of the first step by how many numbers they have."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in _first_step(trace):
        if event.stats and event.stats.count <= MAX_COUNT and trace.has_values(event):
            found[event.stats.count].append(event)
    return found


def _are_similar(a: Event, b: Event) -> bool:
    return a.stats is not None and b.stats is not None and close_stats(a.stats, b.stats, SIMILAR)


def _are_equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return _error(a, b) < EQUAL


def _error(a: NDArray[Any], b: NDArray[Any]) -> float:
    return best_fit(possible_fits(a.shape, b.shape), a, b)[1]
