"""What both traces know about one wrong value: the evidence for `findings`."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.divergence.first import values_nearby
from lydite.diff.findings.evidence import Evidence, Recorded
from lydite.diff.measure.aligned import AlignedPair, Layouts, align_values
from lydite.diff.measure.distance import wide
from lydite.diff.pairing.name_matching import module_of
from lydite.diff.pairing.paired_events import Pair, Pairing
from lydite.diff.reference_parameters import ParameterValues
from lydite.trace.events import Event
from lydite.trace.reader import Trace

MAX_BEFORE = 200  # values before the first wrong one from which it may have been computed
MAX_SMALL = 24  # vectors before these, as the embedding of the time
MAX_CALLS = 12  # values of earlier calls of the same module
MAX_KEPT = 2**19  # numbers of a value that a port may keep from step to step


class EvidenceReader:
    """Reads the values of pairs, and what was computed before them."""

    def __init__(
        self,
        reference: Trace,
        port: Trace,
        pairing: Pairing,
        layouts: Layouts,
        parameters: ParameterValues,
    ) -> None:
        self.reference, self.port, self.pairing = reference, port, pairing
        self.layouts, self.parameters = layouts, parameters
        # By the number of the reference's event, where that or its other calls are the whole pair.
        self._pair_of = {
            pair.event.i: pair
            for pair in pairing.pairs
            if len(pair.port) == 1 and (len(pair.reference) == 1 or _are_calls(pair.reference))
        }
        content = {pair.event.hash: pair for pair in self._pair_of.values() if pair.event.hash}
        for event in reference.events:  # what a module takes is what another one returned
            if event.hash in content:
                self._pair_of.setdefault(event.i, content[event.hash])

    def forget(self, pair: Pair) -> None:
        """The port's value is not the counterpart of the reference's."""
        self._pair_of = {i: other for i, other in self._pair_of.items() if other is not pair}

    def values(self, pair: Pair) -> AlignedPair:
        """Both values in one axis order."""
        return align_values(pair, self.reference, self.port, self.layouts)

    def evidence(self, pair: Pair, rounding: float) -> Evidence:
        """A pair's values and those around them; `rounding` is the relative error it explains."""
        values, event = self.values(pair), self._producer(pair)
        empty = np.zeros(0, np.float32)
        return Evidence(
            reference=wide(values.reference) if values.reference is not None else empty,
            port=wide(values.port) if values.port is not None else empty,
            floor=rounding,
            name=event.name,
            slot=event.slot,
            dtype=pair.port_event.dtype,
            kind=pair.event.kind,
            dims=pair.ref_dims or pair.event.dims,
            inputs=self._inputs(event),
            others=lambda: self._nearby(pair.event),
            near=lambda: self._nearby(pair.event, any_size=True),
            before=lambda: self._before(event, pair.reference),
            beside=lambda: self._beside(pair.event),
            parameters=lambda: self.parameters.of_module(event.name),
            parameters_of=self.parameters.of_module,
            parameters_like=lambda shape: self.parameters.like(event.name, shape),
            parameters_inside=lambda width: self.parameters.inside(event.name, width),
            tables=self._tables,
            step=event.step,
        )

    def _producer(self, pair: Pair) -> Event:
        """The module that computed a value, where a module around it only returns it."""
        event, twin = pair.event, pair.event.alias_of
        if len(pair.reference) > 1 or twin is None or event.slot != "out":
            return event
        inner = next(other for other in self.reference.events if other.i == twin)
        inside = inner.name.startswith((f"{event.name}.", f"{event.name}/"))
        return inner if inside and inner.slot == "out" else event

    def _nearby(
        self, event: Event, *, any_size: bool = False
    ) -> Iterator[tuple[str, NDArray[Any]]]:
        """Other values of the reference around one event, by name."""
        near = values_nearby(self.reference, event, any_size=any_size)
        return ((str(other), value) for other, value in near)

    def _before(self, event: Event, calls_of: Sequence[Event] = ()) -> Iterator[Recorded]:
        """The reference's values before one in its step, the last first, and what came before it.

        That is the same value in the step before, and what the run began with. Where the port runs
        several calls of the reference as one batch, theirs are joined.
        """
        joined = calls_of if _are_calls(calls_of) else ()
        earlier = [other for other in self.reference.events if other.i < event.i]
        same_step = [other for other in earlier if other.step == event.step]
        steps = (event.step - 1, event.step - 2)
        begun = [e for e in reversed(earlier) if e.site == event.site and e.step in steps]
        begun += [other for other in earlier if other.kind == "input"]
        # Small values beside it in the step before: a port may keep them.
        begun += [
            other
            for other in earlier
            if other.step == event.step - 1
            and prod(other.shape) <= MAX_KEPT
            and other.name.startswith(module_of(event.name) or event.name)
        ]
        # A step of a sampler takes what the network was given, long before.
        calls = [e for e in same_step if e.name == event.name and e.kind == "activation"]
        outer = [other for other in same_step if "." not in other.name + event.name]
        # The conditioning that is computed once and used in all blocks.
        small = [other for other in same_step[:-MAX_BEFORE] if len(other.shape) == 2]
        begun = [*small[:MAX_SMALL], *begun]
        begun = [*calls[-MAX_CALLS:], *begun]  # a layer may keep what an earlier call of it took
        for other in (*outer, *reversed(same_step[-MAX_BEFORE:]), *begun):
            if other.kind in ("activation", "input") and self.reference.has_values(other):
                value = wide(self._joined(other, joined) if joined else self.reference.read(other))
                step = "" if other.step == event.step else f", step {other.step}"
                name, is_input = f"{other}{step}", other.kind == "input"
                own = lambda i=other.i: self._ports_value(i)  # noqa: E731
                yield Recorded(name, value, own, is_input)

    def _joined(self, event: Event, calls_of: Sequence[Event]) -> NDArray[Any]:
        """A value with those of the other calls, where each call has it; else the value alone.

        Positions of one row are the same in each call, and belong to each row of the batch.
        """
        found = [
            self.reference.find(event.name, event.slot, other.step, other.call)
            for other in calls_of
        ]
        parts = [self.reference.read(e) for e in found if e and self.reference.has_values(e)]
        whole = len(parts) == len(calls_of) and parts[0].ndim and event in found
        if whole and len(parts[0]) == 1 and all(np.array_equal(p, parts[0]) for p in parts):
            return parts[0]
        return np.concatenate(parts) if whole else self.reference.read(event)

    def _beside(self, event: Event) -> Iterator[Recorded]:
        """The other outputs of the call that returns a value."""
        for other in self.reference.events if event.slot.startswith("out") else ():
            same = (other.name, other.step, other.call) == (event.name, event.step, event.call)
            same = same and other.slot != event.slot and other.slot.startswith("out")
            if same and self.reference.has_values(other):
                value = wide(self.reference.read(other))
                yield Recorded(str(other), value, lambda i=other.i: self._ports_value(i))

    def _tables(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """The reference's tables of sigmas and timesteps, also those recorded step by step."""
        entries: dict[str, list[NDArray[Any]]] = {}
        for event in self.reference.events:
            if event.kind in ("schedule", "scalar") and self.reference.has_values(event):
                entries.setdefault(event.name, []).append(wide(self.reference.read(event)))
        for name, parts in entries.items():
            if len(parts) == 1 or all(part.size == 1 for part in parts):
                yield name, np.concatenate([part.reshape(-1) for part in parts])

    def _ports_value(self, i: int) -> NDArray[Any] | None:
        """What the port has in the place of the reference's event number i."""
        pair = self._pair_of.get(i)
        value = self.values(pair).port if pair is not None else None
        return None if value is None else wide(value)

    def _inputs(self, here: Event) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
        """The inputs of the same call of the module, reference's and port's, by slot."""
        inputs: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        for other in self.pairing.pairs:
            event = other.event
            same = (event.name, event.step, event.call) == (here.name, here.step, here.call)
            same = same and len(other.reference) == 1  # not two streams that the port joins
            if same and event.slot.startswith("in") and not here.slot.startswith("in"):
                values = self.values(other)
                if values.reference is not None and values.port is not None:
                    inputs[event.slot] = (wide(values.reference), wide(values.port))
        return inputs


def _are_calls(events: Sequence[Event]) -> bool:
    """Whether values are those of several calls of one module, or of several steps."""
    return len(events) > 1 and len({event.site for event in events}) == 1
