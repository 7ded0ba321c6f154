"""From which recorded values a value was computed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.data_flow import MAX_VISITED, DataFlow, Upstream
from lydite.trace.events import Event, Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter


def flow(folder: Path, *values: tuple[str, str, float]) -> tuple[dict[str, Event], DataFlow]:
    """Values as (name, slot, content); events by `name slot`."""
    with TraceWriter(folder, Header()) as writer:
        for name, slot, content in values:
            kind = "input" if name == "noise" else "activation"
            writer.add(name, np.full(3, content, np.float32), slot=slot, kind=kind)
    trace = Trace.open(folder)
    return {f"{event.name} {event.slot}": event for event in trace.events}, DataFlow(trace)


def names(events: Sequence[Event]) -> list[str]:
    return [f"{event.name} {event.slot}" for event in events]


NETWORK = (
    ("noise", "out", 0), ("net", "in.0", 0), ("net.a", "in.0", 0), ("net.a", "out", 1),
    ("net.b", "in.0", 1), ("net.b", "out", 2), ("net.c", "in.0", 3), ("net.c", "out", 4),
    ("net", "out", 5),
)  # fmt: skip


def test_the_nearest_known_values(tmp_path: Path) -> None:
    events, known = flow(tmp_path / "run", *NETWORK)
    numbers = {name: event.i for name, event in events.items()}
    found = known.upstream(events["net.b out"], {numbers["net.a out"]})
    assert names(found.nearest) == ["net.a out"] and names(found.passed) == ["net.b in.0"]
    assert not found.is_open and found.is_anchored
    # 3 is the content of no value: computed from net's input and from what was returned before
    found = known.upstream(events["net.c out"], {numbers["net.a out"], numbers["net.b out"]})
    assert set(names(found.nearest)) == {"net.a out", "net.b out"}
    assert names(found.passed) == ["noise out", "net in.0", "net.c in.0"] and not found.is_open
    found = known.upstream(events["net out"], {numbers["net.c out"]})
    assert "net.c out" in names(found.nearest)
    assert not known.upstream(events["net.b out"], ()).nearest


def test_a_way_back_without_a_known_value_is_open(tmp_path: Path) -> None:
    events, known = flow(tmp_path / "run", *NETWORK[1:])  # net's input came from nowhere
    assert known.upstream(events["net.b out"], ()).is_open
    closed = known.upstream(events["net.b out"], {events["net.a out"].i})
    assert not closed.is_open and closed.is_anchored


def test_a_trace_without_inputs_is_a_chain_that_is_followed_so_far(tmp_path: Path) -> None:
    count = MAX_VISITED + 20
    events, known = flow(tmp_path / "run", *((f"v{n}", "out", n) for n in range(count)))
    found = known.upstream(events[f"v{count - 1} out"], {0})
    assert found.is_open and len(found.passed) == MAX_VISITED - 1
    near = known.upstream(events["v10 out"], {events["v7 out"].i})
    assert names(near.nearest) == ["v7 out"] and names(near.passed) == ["v8 out", "v9 out"]


def test_a_sum_is_computed_from_all_its_terms(tmp_path: Path) -> None:
    """What a module inside returns and no other takes: two embeddings that are added."""
    events, known = flow(
        tmp_path / "run",
        ("net", "in.0", 0), ("net.a", "in.0", 0), ("net.a.fc", "in.0", 0), ("net.a.fc", "out", 1),
        ("net.a", "out", 1), ("net.b", "in.0", 0), ("net.b", "out", 2), ("net.c", "in.0", 2),
        ("net.c", "out", 3), ("net", "out", 4),
    )  # fmt: skip
    numbers = {name: event.i for name, event in events.items()}
    found = known.upstream(events["net out"], {numbers["net.a out"], numbers["net.c out"]})
    assert set(names(found.nearest)) == {"net.a out", "net.c out"}


@pytest.mark.parametrize(
    ("nearest", "passed", "is_open", "closed", "anchored"),
    [
        (1, 0, False, True, True), (1, 16, False, True, True), (1, 17, False, True, False),
        (0, 0, False, False, False), (1, 0, True, False, False),
    ],
)  # fmt: skip
def test_known_values_on_every_way_and_few_operations_after_them(
    nearest: int, passed: int, is_open: bool, closed: bool, anchored: bool
) -> None:
    events: Any = [None] * 20
    way = Upstream(tuple(events[:nearest]), tuple(events[:passed]), is_open)
    assert (way.is_closed, way.is_anchored) == (closed, anchored)


def test_a_second_call_that_is_given_other_slots_is_computed_from_what_it_was_given(
    tmp_path: Path,
) -> None:
    """A module that takes a picture first, and a list of pictures in its second call."""
    first = [("m", "in.0", 1), ("m.a", "in.0", 1), ("m.a", "out", 2), ("m", "out", 3)]
    given = [("x", "out", 5), ("m", "in.0.0", 4), ("m", "in.0.1", 5), ("m.b", "in.0", 4)]
    second = [("m.b", "out", 6), ("m", "out", 7), ("m", "out.1", 8)]
    events, known = flow(tmp_path / "run", *first, *given, *second)
    known_values = {event.i for event in events.values() if event.name != "m"}
    found = known.upstream(events["m out"], known_values)  # the last one of this name and slot
    assert names(found.nearest) == ["m.b out", "x out"]
    assert names(known.results(events["x out"])) == ["m out", "m out.1"]


def test_a_value_recorded_by_hand_comes_from_the_one_before_it(tmp_path: Path) -> None:
    events, known = flow(tmp_path / "run", *NETWORK, ("guided", "out", 6), ("latents", "out", 7))
    found = known.upstream(events["latents out"], {events["net out"].i})
    assert names(found.passed) == ["guided out"] and names(found.nearest) == ["net out"]
    assert found.is_open  # it may be computed from others too
