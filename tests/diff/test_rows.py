"""How a pair is judged: the rounding that is expected of it, and the errors that came before it."""

from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.measure.aligned import AlignedPair
from lydite.diff.measure.distance import Distance
from lydite.diff.measure.rounding import UNIT, Limit, fixed_rounding
from lydite.diff.measure.rows import (
    Comparison,
    Error,
    _against_second,
    _depths,
    _estimate,
    _KnownErrors,
    _limit,
    _sinusoids_not_compared,
)
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

X = np.random.default_rng(0).standard_normal((4, 8))
WAVES = np.concatenate([np.sin(X), np.cos(X)], axis=1)


def values(reference: Any, port: Any = None) -> AlignedPair:
    return AlignedPair(reference, reference if port is None else port)


@pytest.mark.parametrize(
    ("stored", "value", "dtype", "expected"),
    [
        ("u8", X, "f32", 3e-4), ("i8", X, "bf16", 3e-4),
        ("i32", X, "f32", 0.0), ("u64", X, "f32", 0.0), ("bool", X, "f32", 0.0),
        ("f32", WAVES, "f32", 300 * 2.0**-24), ("f32", WAVES, "bf16", fixed_rounding("bf16")),
        ("f32", X, "f32", 6 * 2.0**-24), ("f32", None, "f32", 6 * 2.0**-24),
    ],
)  # fmt: skip
def test_the_rounding_to_expect_of_a_value(
    stored: str, value: Any, dtype: str, expected: float
) -> None:
    assert _estimate(stored, values(value), dtype, 16) == expected


@pytest.mark.parametrize(
    ("given", "dtype", "rounding", "expected"),
    [
        ({}, "f32", 1e-6, Limit(1e-6, 8e-6)),  # measured
        ({}, "f32", None, Limit(1e-5, 8e-5)),  # estimated
        ({}, "f32", 0.099, Limit(0.099, 8 * 0.099)), ({}, "f32", 0.101, Limit(1e-5, 8e-5)),
        ({}, "bf16", 0.2, Limit(0.2, 0.8)),  # coarse numbers may round by as much
        ({"tolerance": 0.5}, "f32", 1e-6, Limit(1e-6, 0.5)),
        ({"tolerance": 0.5}, "f32", None, Limit(1e-5, 0.5)),
        ({"isolated": True}, "f32", 1e-6, Limit(1e-5, 8e-5)),  # of one module at least the estimate
        ({"isolated": True}, "f32", 1e-4, Limit(1e-4, 8e-4)),
    ],
)  # fmt: skip
def test_limits_of_measured_and_estimated_rounding(
    given: dict[str, Any], dtype: str, rounding: float | None, expected: Limit
) -> None:
    none = cast(Any, None)
    found = _limit(Comparison(none, none, **given), dtype, rounding, Error(), 1e-5, 64)
    assert (found.rounding, found.limit) == pytest.approx((expected.rounding, expected.limit))


def test_limits_of_whole_numbers_and_pixels() -> None:
    traces = Comparison(cast(Any, None), cast(Any, None), tolerance=0.5)
    assert _limit(traces, "f32", 1e-3, Error(), 0.0, 64) == Limit(0.0, 0.0)
    plain = Comparison(cast(Any, None), cast(Any, None))
    assert _limit(plain, "f32", 1e-6, Error(), 3e-4, 64).rounding == 3e-4
    assert _limit(plain, "f32", 1e-3, Error(), 3e-4, 64).rounding == 1e-3
    grown = _limit(plain, "f32", None, Error(unexplained=1e-4, ratio=9.0), 1e-6, 64)
    assert grown.limit == pytest.approx(3e-4)  # the cap, below ten times what came in
    assert _limit(plain, "f32", None, Error(ratio=9.0), 1e-6, 64).limit == pytest.approx(18e-6)


FINE, COARSE = UNIT["f64"], UNIT["f32"]


@pytest.mark.parametrize(
    ("units", "dtype", "of_second", "measures"),
    [
        ((COARSE, FINE), "f32", True, True),  # the second run is the more precise reference
        ((FINE, COARSE), "f32", False, True),
        ((COARSE, COARSE), "f32", False, True),
        ((FINE, FINE), "f32", False, False),  # both finer than the port: its rounding is not shown
        ((FINE, COARSE), "bf16", False, False),
        ((COARSE, UNIT["bf16"]), "bf16", False, True),
        ((COARSE, inf), "f32", False, True),
    ],
)
def test_the_error_is_against_the_more_precise_reference(
    units: tuple[float, float], dtype: str, of_second: bool, measures: bool
) -> None:
    first, second, port = X, X * (1 + 1e-3), X * (1 + 1e-2)
    known = Distance(0.5, 0.5, 1.0, X.size)
    found, rounding = _against_second(second, units, values(first, port), known, dtype)
    assert found is not None
    if of_second:
        assert found.error == pytest.approx(1e-2 - 1e-3, rel=0.01)
    else:
        assert found is known
    assert (rounding is not None) == measures
    assert rounding is None or rounding == pytest.approx(1e-3, rel=0.01)
    for other in (None, second[:, :3]):  # not kept, or of another shape
        assert _against_second(other, units, values(first, port), known, dtype) == (known, None)


class _Flow:
    """What a value was computed from, as it is told."""

    def __init__(self, nearest: dict[int, list[int]]) -> None:
        self.nearest = nearest

    def upstream(self, event: Any, known: Any) -> Any:
        near = [SimpleNamespace(i=i) for i in self.nearest.get(event.i, ()) if i in known]
        return SimpleNamespace(is_open=event.i not in self.nearest, nearest=near)


def event(number: int, name: str = "net/a") -> Any:
    return SimpleNamespace(i=number, name=name)


def test_errors_come_from_what_a_value_is_computed_from() -> None:
    errors = _KnownErrors(cast(Any, _Flow({9: [0, 2], 8: []})))
    for number in range(4):
        known = Error(unexplained=1.0 + number, ratio=9.0 - number, rounding=5.0 - number)
        errors.add([event(number)], known)
    assert errors.before([event(9)]) == Error(3.0, 9.0, 5.0)
    assert errors.before([event(8)]) == Error()  # nothing comes in


@pytest.mark.parametrize(
    ("scope", "before", "known"),
    [("net/b", 15, True), ("net/b", 16, False), ("vae/b", 3, True), ("vae/b", 4, False)],
)
def test_errors_of_the_values_before_where_the_trace_does_not_show_whence_they_come(
    scope: str, before: int, known: bool
) -> None:
    """Sixteen of the component, and four of any."""
    errors = _KnownErrors(cast(Any, _Flow({})))
    errors.add([event(0)], Error(1.0, 2.0))
    for number in range(before):
        errors.add([event(1 + number)], Error(0.5, 0.5))
    expected = Error(1.0, 2.0) if known else Error(0.5, 0.5)
    assert errors.before([event(99, scope)]) == expected


@pytest.mark.parametrize(("parameters", "hidden"), [(0, 0), (8, 0), (9, 9)])
def test_operations_that_were_not_recorded_count_in_every_step(
    parameters: int, hidden: int
) -> None:
    kinds = [("ids", "ids", 0), ("a", "selftest", 0), *(("net/a", "activation", 0),) * 2,
             *((f"net/{n}", "activation", 1) for n in "bcd")]  # fmt: skip
    events = [
        SimpleNamespace(i=i, name=name, kind=kind, step=step)
        for i, (name, kind, step) in enumerate(kinds)
    ]
    weights = dict.fromkeys(range(parameters))
    trace = SimpleNamespace(events=events, weights=lambda: weights)
    expected = {2: hidden, 3: 1 + hidden, **{4 + n: 2 + n + 2 * hidden for n in range(3)}}
    assert _depths(cast(Any, trace)) == expected


def sines(folder: Path, dtype: str, times: list[float], *, error: float = 0.0) -> Trace:
    """A sinusoid of times, recorded twice, and a layer of it."""
    angles = np.outer(times, 10_000.0 ** -np.linspace(0, 1, 32)) * (1 + error)
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    layer = waves @ np.random.default_rng(1).standard_normal((64, 16))
    with TraceWriter(folder, Header(dtype=dtype)) as writer:
        writer.add("time", np.array(times), slot="in.0")
        writer.add("time", waves)
        writer.add("again", waves)
        writer.add("layer", layer)
    return Trace.open(folder)


@pytest.mark.parametrize(("dtype", "verdict"), [("bfloat16", "agree"), ("float32", "diverge")])
def test_a_time_of_sixteen_bits_is_another_angle(tmp_path: Path, dtype: str, verdict: str) -> None:
    reference = sines(tmp_path / "ref", "float32", [999.0, 437.0])
    port = sines(tmp_path / "port", dtype, [999.0, 437.0], error=2.0**-10)
    assert compare(reference, port).verdict == verdict


def test_a_sinusoid_that_is_compared_under_another_name_adds_no_rounding(tmp_path: Path) -> None:
    reference = sines(tmp_path / "ref", "float32", [999.0])
    named = [event for event in reference.events if event.slot == "out"]
    pairs = [SimpleNamespace(reference=(named[0],))]
    assert not _sinusoids_not_compared(reference, cast(Any, pairs))
    assert [event.name for event in _sinusoids_not_compared(reference, [])] == ["time", "again"]
    with TraceWriter(tmp_path / "taken", Header()) as writer:  # and what takes it adds none
        for name, slot in (("time", "out"), ("layer", "in.0")):
            writer.add(name, reference.read(named[0]), slot=slot)
    taken = _sinusoids_not_compared(Trace.open(tmp_path / "taken"), [])
    assert [event.name for event in taken] == ["time"]
