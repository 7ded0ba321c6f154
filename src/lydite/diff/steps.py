"""Steps that stand in names: `step3/latents` is `latents` at step 3.

A dump by hand often has one name per step and says nothing else of it. For pairing the number is
taken out of the name; what is shown keeps the name as it was written.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from lydite.trace.events import Event
from lydite.trace.store import Trace

STEP = re.compile(r"(?:(?<=[/._\- ])|^)(?:step|steps|iter|iteration)[_\-. ]?(\d+)(?=[/._\- ]|$)")


@dataclass(frozen=True)
class Counted:
    """A trace with its steps out of the names, and the way back."""

    trace: Trace
    original: dict[int, Event]  # by number; empty when nothing was changed

    @classmethod
    def of(cls, trace: Trace) -> "Counted":
        """The trace itself, unless several of its names differ in the number of a step only."""
        found = {event.i: told for event in trace.events if (told := _told(event)) is not None}
        if len({told.step for told in found.values()}) < 2:
            return cls(trace, {})
        calls: Counter[tuple[str, str, int]] = Counter()
        events: list[Event] = []
        for event in trace.events:
            told = found.get(event.i, event)
            place = (told.name, told.slot, told.step)
            events.append(msgspec.structs.replace(told, call=calls[place]))
            calls[place] += 1
        original = {event.i: event for event in trace.events}
        return cls(replace(trace, events=tuple(events)), original)

    @property
    def names(self) -> set[str]:
        """Every name, as it was written and without its step."""
        written = {event.name for event in self.original.values()}
        return written | {event.name for event in self.trace.events}

    def name(self, name: str) -> str:
        """The name without its step, as this trace has it."""
        return _without_step(name)[0] if self.original else name

    def back(self, events: Iterable[Event]) -> tuple[Event, ...]:
        """Events as they were written."""
        return tuple(self.original.get(event.i, event) for event in events)

    def written(self, names: Iterable[str]) -> tuple[str, ...]:
        """All names that were written for these."""
        if not self.original:
            return tuple(names)
        wanted = set(names)
        said = (event.name for event in self.original.values() if event.kind != "selftest")
        return tuple(dict.fromkeys(name for name in said if self.name(name) in wanted))


def _told(event: Event) -> Event | None:
    name, step = _without_step(event.name)
    if step is None or event.kind == "selftest" or event.step not in (0, step):
        return None
    return msgspec.structs.replace(event, name=name, step=step)


def _without_step(name: str) -> tuple[str, int | None]:
    found = STEP.search(name)
    if found is None:
        return name, None
    before, after = name[: found.start()], name[found.end() :]
    left = before + after[1:] if before or after else ""
    left = left if after else before[:-1]
    return (left, int(found[1])) if left.strip("/._- ") else (name, None)
