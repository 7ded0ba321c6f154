"""From which recorded values a value was computed, as far as the reference's trace shows it.

The input of a module is the earlier value with the same content. Where no value has it (a sum, a
product), it was computed from what the module around it was given and from what the modules beside
it returned last. A value that was recorded by hand was computed from the one recorded before it,
and possibly from others.
"""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from math import inf

from lydite.trace.events import Event
from lydite.trace.reader import Trace

BESIDE = 3  # outputs of modules beside a value that it may have been computed from
FEW = 16  # values between known ones and the next: little rounding adds up
MAX_VISITED = 200  # values looked at on the way back
Call = tuple[str, int, int]  # name and step of a module, and the number of its call there
GIVEN = ("input", "ids", "schedule")  # kinds of values that a run starts from


@dataclass(frozen=True)
class Upstream:
    """What lies before a value: the nearest known values, and those passed on the way to them."""

    nearest: tuple[Event, ...]  # known, the nearest first
    passed: tuple[Event, ...]  # not known, in order of execution
    is_open: bool  # some way back meets no known value

    @property
    def is_closed(self) -> bool:
        """Whether known values lead to this one on every way."""
        return bool(self.nearest) and not self.is_open

    @property
    def is_anchored(self) -> bool:
        """Whether known values lead to this one on every way, and in few operations."""
        return self.is_closed and len(self.passed) <= FEW


class DataFlow:
    """The values of one trace, and what each was computed from."""

    def __init__(self, trace: Trace) -> None:
        self._events = [event for event in trace.events if event.kind != "selftest"]
        self._position = {event.i: at for at, event in enumerate(self._events)}
        self._inputs: dict[Call, list[Event]] = defaultdict(list)
        self._outputs: dict[Call, list[Event]] = defaultdict(list)
        self._same: dict[str, list[Event]] = defaultdict(list)  # by content
        self._calls = _calls(self._events)
        for event in self._events:
            calls = self._inputs if _is_input(event) else self._outputs
            calls[self._calls[event.i]].append(event)
            if event.hash:
                self._same[event.hash].append(event)
        self._known_sources: dict[int, list[Event]] = {}
        self._by_hand: set[int] = set()  # numbers of values of which more sources may exist

    def upstream(self, event: Event, known: Collection[int]) -> Upstream:
        """The nearest values before `event` whose numbers are `known`."""
        nearest: list[Event] = []
        passed: list[Event] = []
        waiting = deque(self._sources(event))
        is_open = self._is_open(event)
        seen = {event.i}
        while waiting:
            other = waiting.popleft()
            if other.i in seen:
                continue
            seen.add(other.i)
            if other.i in known:
                nearest.append(other)
                continue
            passed.append(other)
            sources = self._sources(other)
            is_open |= self._is_open(other)
            if len(seen) >= MAX_VISITED:
                is_open = True
                break
            waiting.extend(sources)
        passed.sort(key=lambda other: other.i)
        return Upstream(tuple(nearest), tuple(passed), is_open)

    @property
    def has_inputs(self) -> bool:
        """Whether the trace has what modules were given: else all values are recorded by hand."""
        return bool(self._inputs)

    def results(self, event: Event) -> list[Event]:
        """What the modules returned that take this value, in order of execution."""
        later = (other for other in self._same.get(event.hash or "", ()) if other.i > event.i)
        takers = [other for other in later if _is_input(other)]
        calls = dict.fromkeys(self._calls[other.i] for other in takers)
        outputs = [output for call in calls for output in self._outputs.get(call, ())]
        return sorted((e for e in outputs if e.hash != event.hash), key=lambda other: other.i)

    def outputs(self, event: Event) -> list[Event]:
        """What the call of a module returned that was given this value."""
        return self._outputs.get(self._calls[event.i], [])

    def _is_open(self, event: Event) -> bool:
        """Whether a value may have been computed from values that the trace does not show."""
        return event.kind not in GIVEN and (not self._sources(event) or event.i in self._by_hand)

    def _sources(self, event: Event) -> list[Event]:
        if event.i not in self._known_sources:
            self._known_sources[event.i] = self._find_sources(event)
        return self._known_sources[event.i]

    def _find_sources(self, event: Event) -> list[Event]:
        if event.kind in GIVEN:
            return []
        same = self._same.get(event.hash or "", [])
        if at := bisect_left(same, event.i, key=lambda other: other.i):
            return [same[at - 1]]
        if _is_input(event):
            return self._beside(event)
        inputs = self._inputs.get(self._calls[event.i], [])
        inner = self._inner(event, min((e.i for e in inputs), default=-1))
        if inner or inputs:
            return [*inner, *inputs]
        return self._before(event)

    def _inner(self, event: Event, start: float) -> list[Event]:
        """The last output of a module inside the one that returned `event`, and those not taken.

        What no other module takes is a term of a sum, as the embeddings of time and text.
        """
        beginnings = (f"{event.name}.", f"{event.name}/")
        inside = [e for e in self._recent(event, start) if e.name.startswith(beginnings)]
        outputs = [other for other in inside if not _is_input(other)]
        taken = {other.hash for other in inside if _is_input(other)}
        names = {other.name for other in outputs}
        terms = [
            other
            for other in outputs
            if other.hash not in taken and not any(part in names for part in _around(other.name))
        ]
        return list({e.i: e for e in (*outputs[-1:], *reversed(terms))}.values())

    def _beside(self, event: Event) -> list[Event]:
        """What the module around `event`'s was given, and what its other modules returned last."""
        around, inputs = event.name, []
        while around and not inputs:
            around = around[: max(around.rfind("."), around.rfind("/"), 0)]
            calls = takewhile(
                lambda given: bool(given) and given[0].i < event.i,
                (self._inputs.get((around, event.step, call), []) for call in count()),
            )
            inputs = next(iter(deque(calls, maxlen=1)), [])
        if not inputs:
            return self._before(event)
        start = min(other.i for other in inputs)
        outputs = [e for e in self._recent(event, start) if not _is_input(e)]
        return [*outputs[-BESIDE:], *inputs]

    def _before(self, event: Event) -> list[Event]:
        """The value recorded before one that is not known to be computed by a module."""
        at = self._position[event.i]
        if not self._inputs:
            return [self._events[at - 1]] if at else []
        self._by_hand.add(event.i)
        earlier = (e for e in reversed(self._events[:at]) if e.kind == "activation")
        return list(islice(earlier, 1))

    def _recent(self, event: Event, start: float) -> list[Event]:
        at = self._position[event.i]
        first = self._position.get(int(start), 0) if start not in (-1, inf) else 0
        return [e for e in self._events[max(first, at - MAX_VISITED) : at] if e.step == event.step]


def _calls(events: Sequence[Event]) -> dict[int, Call]:
    """By the number of each event, the call of a module in a step that it belongs to.

    `Event.call` counts by slot: two calls of one module may be given other slots.
    """
    calls: dict[int, Call] = {}
    number: Counter[tuple[str, int]] = Counter()
    slots: dict[tuple[str, int], list[str]] = defaultdict(list)
    for event in events:
        module = event.name, event.step
        known = slots[module]
        is_next = event.slot in known or (_is_input(event) and known and known[-1][:3] == "out")
        if is_next:
            number[module] += 1
            known.clear()
        known.append(event.slot)
        calls[event.i] = (*module, number[module])
    return calls


def _around(name: str) -> list[str]:
    """The names of the modules around one, the innermost first."""
    cuts = [at for at, letter in enumerate(name) if letter in "./"]
    return [name[:at] for at in reversed(cuts)]


def _is_input(event: Event) -> bool:
    return event.slot.startswith("in")
