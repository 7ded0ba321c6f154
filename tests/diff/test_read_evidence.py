"""What is read around a wrong value: its module's call, values near it, what came before it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lydite.diff import read_evidence
from lydite.diff.compare import _Comparer
from lydite.diff.divergence.first import NEARBY, values_nearby
from lydite.diff.divergence.search import DivergenceSearch
from lydite.diff.measure.aligned import AlignedPair, Layouts
from lydite.diff.pairing.pair_traces import pair_traces
from lydite.diff.pairing.paired_events import Pair
from lydite.diff.read_evidence import EvidenceReader
from lydite.diff.reference_parameters import ParameterValues
from lydite.diff.result import Finding, Row
from lydite.diff.verdict_text import ignored_text
from lydite.trace.events import Event, Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

DRAW = np.random.default_rng(0)


def value(*shape: int) -> Any:
    return DRAW.standard_normal(shape).astype(np.float32)


def write(folder: Path, events: list[tuple[str, Any, dict[str, Any]]]) -> Trace:
    with TraceWriter(folder, Header()) as writer:
        for name, array, more in events:
            writer.add(name, array, **more)
    return Trace.open(folder)


def find(trace: Trace, name: str, slot: str = "out", step: int = 0, call: int = 0) -> Event:
    event = trace.find(name, slot, step, call)
    assert event is not None
    return event


def test_values_near_one_are_of_its_step_and_size(tmp_path: Path) -> None:
    x = value(3, 4)
    far = [(f"far.{n}", value(2), {}) for n in range(NEARBY)]
    events = [
        ("too_far", value(3, 4), {}), ("edge", value(4, 3), {}), *far[1:],
        ("net/a", x, {}), ("net/a.part", value(3, 4), {}), ("net/ab", value(12), {}),
        ("small", value(2), {}), ("table", value(3, 4), {"kind": "schedule"}),
        ("later", value(3, 4), {"step": 1}), ("same", value(3, 4), {}),
    ]  # fmt: skip
    with write(tmp_path / "t", events) as trace:
        event = find(trace, "net/a")

        def names(**how: Any) -> list[str]:
            return [near.name for near, _ in values_nearby(trace, event, **how)]

        assert names() == ["edge", "net/a.part", "net/ab", "same"]
        assert names(inside=False) == ["edge", "net/ab", "same"]
        assert {"small", "far.1"} < set(names(any_size=True)) and "table" not in names(
            any_size=True
        )
        taken = find(trace, "same").hash
        assert taken and names(without={taken}) == ["edge", "net/a.part", "net/ab"]


@pytest.fixture
def reader(tmp_path: Path) -> Any:
    """A reader of two traces, and the pair of one name."""
    noise = value(2, 3)
    right = [
        ("noise", noise, {"kind": "input"}),
        ("net/a", value(2, 3), {"slot": "in.0", "step": 0}), ("net/a", value(2, 3), {"step": 0}),
        ("net/c", value(2, 2), {"step": 0}), ("net/far.b", value(2), {"step": 0}),
        ("net/a", value(2, 3), {"slot": "in.0", "step": 1}),
        ("net/b", value(2, 3), {"step": 1}), ("net/a", value(2, 3), {"step": 1}),
        ("net/z.last", value(2, 3), {"step": 1}), ("net/z.size", value(5), {"step": 1}),
    ]  # fmt: skip
    wrong = [(name, array + 1, more) for name, array, more in right]
    traces = write(tmp_path / "ref", right), write(tmp_path / "port", wrong)
    pairing = pair_traces(*traces)
    made = EvidenceReader(*traces, pairing, Layouts(), ParameterValues(traces[0]))

    def pair(name: str, slot: str = "out", step: int = 1) -> Pair:
        found = [p for p in pairing.pairs if p.event.id == (name, slot, step, 0)]
        return found[0]

    return made, pair


def test_what_came_before_a_value(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pair = reader
    e = made.evidence(pair("net/a"), 0.25)
    assert (e.floor, e.name, e.slot, e.dtype, e.kind) == (0.25, "net/a", "out", "f32", "activation")
    assert np.allclose(e.port, e.reference + 1)
    before = {recorded.name: recorded for recorded in e.before()}
    small = ["net/a [in.0], step 0", "net/c, step 0", "net/far.b, step 0"]
    begun = ["net/a, step 0", "noise, step 0"]
    assert list(before) == ["net/a [in.0], step 1", "net/b, step 1", *begun, *small]
    first = next(iter(before.values()))
    own = first.own()
    assert own is not None and np.allclose(own, first.value + 1)
    alike = {"net/a [in.0], step 1", "net/b, step 1", "net/z.last, step 1"}
    assert {name for name, _ in e.others()} == alike
    assert {name for name, _ in e.near()} == alike | {"net/z.size, step 1"}
    assert set(e.inputs) == {"in.0"}  # of the same step and call
    given = e.inputs["in.0"]
    assert np.allclose(given[1], given[0] + 1)
    assert made.evidence(pair("net/a", "in.0"), 0.0).inputs == {}
    made.forget(pair("net/b"))
    forgotten = {recorded.name: recorded for recorded in made.evidence(pair("net/a"), 0.0).before()}
    assert forgotten["net/b, step 1"].own() is None
    monkeypatch.setattr(read_evidence, "MAX_KEPT", 3)
    few = {recorded.name: None for recorded in made.evidence(pair("net/a"), 0.0).before()}
    assert list(few)[2:] == [*begun, "net/far.b, step 0"]
    for most, names in (
        (9, ("net/a", "net/b", "net/a [in.0]")),
        (2, ("net/a", "net/b", "net/a [in.0]")),
    ):
        monkeypatch.setattr(read_evidence, "MAX_BEFORE", most)
        last = [recorded.name for recorded in made.evidence(pair("net/z.last"), 0.0).before()]
        assert last == [*(f"{name}, step 1" for name in names), "noise, step 0"]


def test_the_axis_names_of_a_map_come_first(reader: Any) -> None:
    made, pair = reader
    named = replace(pair("net/a"), ref_dims="b c", dims="b c")
    assert made.evidence(named, 0.0).dims == "b c"
    assert made.evidence(pair("net/a"), 0.0).dims is None


def row(error: float | None, limit: float | None = 1e-6, *, wrong: bool = True) -> Row:
    return Row("v", "v", "out", 0, 0, "activation", (2,), "f32", error, 1e-7, limit, wrong)


def test_why_a_wrong_value_is_not_the_bug() -> None:
    right = row(0.0, wrong=False)
    assert "does not explain the larger error behind it" in ignored_text(row(2e-6), [row(1.0)])
    assert "v is 2 × its limit" in ignored_text(row(2e-6), [row(1.0)])
    assert "another value than its counterpart" in ignored_text(row(1.0), [row(0.5)])
    assert "the limits are estimates" in ignored_text(row(3e-6), [right])
    assert "differs, and no later value does" in ignored_text(row(3.1e-6), [right])
    assert "has another shape, and no later" in ignored_text(row(None), [right])
    assert "has another shape" in ignored_text(row(None), [row(1.0)])


@pytest.mark.parametrize(
    ("factor", "noise", "is_one"),
    [(1.009, 0, False), (1.011, 0, True), (0.989, 0, True), (0.5, 0, True), (-1, 0, True),
     (0.5, 0.9e-3, True), (0.5, 1.2e-3, False)],
)  # fmt: skip
def test_a_value_that_is_a_multiple_of_the_references(
    factor: float, noise: float, is_one: bool
) -> None:
    right, other = value(40, 50), value(40, 50)
    port = factor * (right + noise * np.linalg.norm(right) / np.linalg.norm(other) * other)
    search: Any = object.__new__(DivergenceSearch)

    def judged(reference: Any, port: Any) -> bool:
        pair = AlignedPair(reference, port)
        search.reader = SimpleNamespace(values=lambda _: pair)
        return search._is_multiple(None)

    assert judged(right, port) == is_one
    assert not judged(right, port[:, :9]) and not judged(np.zeros_like(right), port)
    assert not judged(None, port) and not judged(right, None)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"i": 18}, True), ({"i": 2}, True), ({"i": 19}, False), ({"i": 1}, False),  # eight beside
        ({"step": 1}, False), ({"shape": (9,)}, False), ({"slot": "in.0"}, True),
        ({"slot": "out.1"}, True), ({"name": "here"}, False), ({"hash": "taken"}, False),
    ],
)  # fmt: skip
def test_another_counterpart_is_looked_for_beside_a_guess(
    changes: dict[str, Any], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(**more: Any) -> Any:
        known = {"i": 10, "step": 0, "shape": (2,), "slot": "out", "name": "other", "hash": None}
        known |= {"kind": "activation", "dtype": "f32"}
        return SimpleNamespace(**known | more)

    here, other = event(name="here"), event(**{"i": 12} | changes)
    pair = Pair((here,), (here,), "order")
    paired = Pair((event(name="paired", hash="taken"),), (here,), "name")
    forgotten: list[Pair] = []
    comparer: Any = object.__new__(_Comparer)
    comparer.reader = SimpleNamespace(
        forget=forgotten.append, evidence=lambda pair, _: pair.reference[0]
    )
    comparer.pairing = SimpleNamespace(pairs=(pair, paired))
    comparer.traces = SimpleNamespace(reference=SimpleNamespace(events=[here, other]))
    finding = Finding("a", "b", "c")
    monkeypatch.setattr("lydite.diff.compare.replayed", lambda e: (finding,) if e is other else ())
    told, evidence, findings = comparer._other_counterpart(pair, row(1.0), "own")
    assert forgotten == [pair] and findings == ((finding,) if found else ())
    assert (told.site, evidence) == ((other.name, other) if found else ("v", "own"))
