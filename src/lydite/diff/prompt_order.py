"""Ports that run with and without the prompt in another order than the reference.

Guidance takes two predictions. A reference has the negative prompt in the first half of the batch,
or in the first of two calls, and a port may have it in the second. Neither is wrong, so such a port
is read in the order of the reference.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from numpy.typing import NDArray

from lydite.diff.measure.axes import best_fit, possible_fits
from lydite.diff.pairing.name_matching import close_stats
from lydite.diff.trace_view import TraceView, other_half_first
from lydite.trace.events import Event
from lydite.trace.reader import Trace

SIMILAR = 1e-2  # of two values' statistics, as bfloat16 rounds
EQUAL = 0.05  # relative error; that of two prompts is far larger
MAX_READ = 8  # values of a component that show its order
MAX_TRIED = 64  # values of a component that are looked at
MAX_COUNT = 2**24  # numbers in one of them

COMPUTED = ("activation", "input")
Votes = Mapping[str, Counter[bool]]  # by component: how often a value was in the other order


def views(reference: Trace, port: Trace) -> tuple[TraceView, TraceView, tuple[str, ...]]:
    """Both traces in the form in which they are compared, and what was done to the port's."""
    ours = TraceView.of(reference)
    return ours, *in_order_of(ours, TraceView.of(port))


def in_order_of(reference: Trace, port: TraceView) -> tuple[TraceView, tuple[str, ...]]:
    """The port with the two prompts in the reference's order, and a remark where that is another.

    A component of which some values are in the same order is left as it is.
    """
    (batches, sizes), calls = _batch_votes(reference, port), _call_votes(reference, port)
    exchanged: set[int] = set()
    events: list[Event] = []
    halves = _calls_of_half(port)
    for event in port.events:
        component = _component(event)
        is_batch = len(event.shape) > 1 and event.shape[0] in sizes and event.kind in COMPUTED
        if is_batch and _is_other(batches, component):
            exchanged.add(event.i)
            event = msgspec.structs.replace(event, hash=None)
        half = halves.get((event.name, event.slot))
        if _is_other(calls, component) and half and event.kind in COMPUTED:
            call = (event.call + half) % (2 * half)
            event = msgspec.structs.replace(event, call=call)
        events.append(event)
    what = ["halves of the batch"] if exchanged else []
    what += ["calls"] if any(_is_other(calls, component) for component in calls) else []
    if not what:
        return port, ()
    remark = (
        f"the port has the two {' and '.join(what)} in the other order (with and without the "
        "prompt); its values are compared in the reference's"
    )
    return replace(port, events=tuple(events), exchanged=frozenset(exchanged)), (remark,)


def _component(event: Event) -> str:
    """The first part of a name, without numbers."""
    return re.sub(r"\d+", "", re.split(r"[./]", event.name)[0])


def _is_batch(event: Event) -> bool:
    return len(event.shape) > 1 and event.shape[0] > 0 and event.shape[0] % 2 == 0


def _is_other(votes: Votes, component: str) -> bool:
    """Whether values of a component, or of any if it shows nothing, are in the other order."""
    own = votes.get(component)
    if own:
        return own[True] > 0 and not own[False]
    return any(each[True] > 0 and not each[False] for each in votes.values())


def _batch_votes(reference: Trace, port: Trace) -> tuple[Votes, set[int]]:
    """Of batches whose halves differ: whether the port has the other first. And their sizes."""
    votes: dict[str, Counter[bool]] = defaultdict(Counter)
    sizes: set[int] = set()
    by_count = _by_count(reference)
    for event in _to_try(port, votes):
        own = votes[_component(event)]
        if not _is_batch(event):
            continue
        for other in by_count[event.stats.count if event.stats else 0]:
            if not _is_batch(other) or not _are_similar(other, event):
                continue
            value, expected = port.read(event), reference.read(other)
            if _are_equal(expected, other_half_first(expected)):
                continue
            if _are_equal(value, expected):
                own[False] += 1
                break
            if _are_equal(other_half_first(value), expected):
                own[True] += 1
                sizes.add(event.shape[0])
                break
    return votes, sizes


def _call_votes(reference: Trace, port: Trace) -> Votes:
    """Of values that are computed twice: whether the port has the other call first."""
    votes: dict[str, Counter[bool]] = defaultdict(Counter)
    halves, port_halves = _calls_of_half(reference), _calls_of_half(port)
    by_count = _by_count(reference)
    for event in _to_try(port, votes):
        own, half = votes[_component(event)], port_halves.get((event.name, event.slot))
        if not half:
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
                own[event.call == call] += 1
                break
    return votes


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


def _to_try(port: Trace, votes: Votes) -> Iterator[Event]:
    """The first values of each component, until enough of them have shown an order."""
    tried: Counter[str] = Counter()
    for event in _first_step(port):
        component = _component(event)
        tried[component] += 1
        enough = sum(votes[component].values()) >= MAX_READ if component in votes else False
        if tried[component] <= MAX_TRIED and not enough and port.has_values(event):
            yield event


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
    return best_fit(possible_fits(a.shape, b.shape), a, b)[1] < EQUAL
