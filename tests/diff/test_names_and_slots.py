"""Names, steps in names, equal parameters and slots: the rules of pairing one by one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import msgspec
import numpy as np
import pytest

from lydite.diff.name_map import Rename
from lydite.diff.pairing.name_matching import (
    StepsFromNames,
    _split_step,
    close_stats,
    match_spelling,
    match_weights,
    module_of,
    same_values,
)
from lydite.diff.pairing.paired_events import _match_slots, _step_offset
from lydite.trace.events import Header, Site, Stats, WeightInfo
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter, _weight

X = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "rest", "step"),
    [
        ("step3/latents", "latents", 3), ("net/step_12/x", "net/x", 12), ("x.step4", "x", 4),
        ("x/steps-5/y", "x/y", 5), ("iteration 6 x", "x", 6), ("x_iter.7", "x", 7),
        ("step3", "step3", None), ("misstep3/x", "misstep3/x", None),
        ("step3x/y", "step3x/y", None), ("steps/x", "steps/x", None), ("x", "x", None),
    ],
)  # fmt: skip
def test_the_step_in_a_name(name: str, rest: str, step: int | None) -> None:
    assert _split_step(name) == (rest, step)


def test_steps_of_names_are_those_of_the_values(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", Header()) as writer:
        writer.add("step9/selftest", np.zeros(8, np.float32), kind="selftest")
        for step in (0, 1, 1, 2):
            writer.add(f"step{step}/x", np.full(3, float(step), np.float32))
        writer.add("step2/y", np.zeros(3, np.float32), step=2)
        writer.add("step2/z", np.zeros(3, np.float32), step=1)  # says another step itself
        writer.add("plain", np.zeros(3, np.float32))
    with Trace.open(tmp_path / "t") as trace:
        found = StepsFromNames.of(trace)
        assert [(e.name, e.step, e.call) for e in found.trace.events] == [
            ("step9/selftest", 0, 0), ("x", 0, 0), ("x", 1, 0), ("x", 1, 1), ("x", 2, 0),
            ("y", 2, 0), ("step2/z", 1, 0), ("plain", 0, 0),
        ]  # fmt: skip
        assert found.without_step("step5/x") == "x" and {"x", "step2/x", "plain"} <= found.names
        written = ("step0/x", "step1/x", "step2/x", "plain")
        assert found.written_names(["x", "plain", "none"]) == written
    with TraceWriter(tmp_path / "one", Header()) as writer:
        writer.add("step3/x", np.zeros(3, np.float32))
    with Trace.open(tmp_path / "one") as trace:  # one number may be part of the name
        found = StepsFromNames.of(trace)
        assert found.trace is trace and found.without_step("step3/x") == "step3/x"
        assert found.written_names(["a"]) == ("a",)


def test_the_module_of_a_parameter() -> None:
    assert module_of("net/a.b.weight") == "net/a.b" and module_of("a/weight") == "a"
    assert module_of("weight") == "weight"


@pytest.mark.parametrize(
    ("port", "reference", "found"),
    [
        (["v"], ["encoder.0.attention.v"], {}),  # one word does not identify it
        (["attention.v"], ["encoder.0.attention.v"], {"attention.v": "encoder.0.attention.v"}),
        (["noise"], ["pipeline/noise"], {"noise": "pipeline/noise"}),
        (["a/x", "b/x"], ["x"], {}),  # two would have one
        (["first/a.b"], ["vae/a.b"], {"first/a.b": "vae/a.b"}),
        (["first/b"], ["vae/b"], {}),
        (["first/a.b", "second/a.b"], ["vae/a.b"], {}),
        (["x", "X"], ["x"], {"x": "x"}),
    ],
)
def test_names_that_differ_in_spelling(
    port: list[str], reference: list[str], found: dict[str, str]
) -> None:
    assert match_spelling(port, reference) == found


def info(values: Any) -> WeightInfo:
    return _weight("w", np.asarray(values))


def stats(**changes: Any) -> Stats:
    return msgspec.structs.replace(Stats(64, -4.0, 4.0, 0.5, 1.9, 2.0), **changes)


@pytest.mark.parametrize(
    ("changes", "close"),
    [
        ({}, True), ({"count": 65}, False), ({"rms": None}, False), ({"max": None}, False),
        ({"rms": 2.0 + 1.9e-3}, True), ({"rms": 2.0 - 2.1e-3}, False),
        ({"mean": 0.5 - 1.9e-3}, True), ({"mean": 0.5 + 2.1e-3}, False),
        ({"min": -4.0 + 1.9e-2}, True), ({"min": -4.0 - 2.1e-2}, False),
        ({"max": 4.0 - 1.9e-2}, True), ({"max": 4.0 + 2.1e-2}, False),
    ],
)  # fmt: skip
def test_statistics_are_close_for_the_size_of_the_values(
    changes: dict[str, Any], close: bool
) -> None:
    assert close_stats(stats(**changes), stats(), 1e-3) == close


def test_parameters_with_the_same_values() -> None:
    assert same_values(info(X), info(X)) and same_values(info(X), info(X.T.copy()))
    assert not same_values(info(X), info(X * 1.0001))
    assert not same_values(info(np.ones(9)), info(np.full(9, 1.0 + 1e-9)))  # many are constant
    assert not same_values(WeightInfo((9,), "f32"), info(np.ones(9)))
    even = np.tanh(X)
    for values in (even, even[0, :4]):  # of few values the moments show the rounding
        for dtype in (ml_dtypes.bfloat16, np.float16):
            assert same_values(info(values.astype(dtype)), info(values))
    assert not same_values(info((X * 1.01).astype(ml_dtypes.bfloat16)), info(X))
    twice = {"a": info(X), "b": info(X + 1)}
    assert match_weights({"p": info(X.T.copy()), "q": info(X + 1)}, twice) == {"p": "a", "q": "b"}
    assert match_weights({"p": info(X)}, {"a": info(X), "b": info(X)}) == {}
    assert match_weights({"p": info(X), "q": info(X)}, {"a": info(X)}) == {}
    reshaped = {"a": info(X[:, None])}  # axes of length 1 do not count
    assert match_weights({"p": info(X)}, reshaped) == {"p": "a"}
    assert match_weights({"p": info(X.reshape(50, 40))}, {"a": info(X)}) == {"p": "a"}
    assert match_weights({"p": info(X.reshape(100, 20))}, {"a": info(X)}) == {}


@pytest.mark.parametrize(
    ("port", "reference", "found"),
    [
        ("in.0:6 out:4", "in.0:6 out:4", "in.0>in.0 out>out"),
        ("in.0:6 in.1:4", "in.a:6 in.b:4", "in.0>in.a in.1>in.b"),
        ("in.0:6 in.1:4", "in.a:4 in.b:6", ""),  # in their order only
        ("in.0:6", "in.a:6 in.b:6", ""),
        ("out:6", "out.sample:6", "out>out.sample"),
        ("out:6 out.1:4", "out:4 out.1:6", "out>out.1 out.1>out"),
        ("out:6 out.1:6", "out.a:6 out.b:6", ""),  # sizes do not tell
        ("out:6", "out.a:6 out.b:6", ""),
        ("out:6", "out:5", "out>out"),  # of another size: still the output
    ],
)
def test_slots_of_one_name(port: str, reference: str, found: str) -> None:
    sides = [
        [SimpleNamespace(slot=word.split(":")[0], shape=(int(word.split(":")[1]),))
         for word in side.split()]
        for side in (reference, port)
    ]  # fmt: skip
    events: Any = sides
    matched = _match_slots(events[0], events[1], Rename((Site("x"),)))
    assert matched == dict(pair.split(">") for pair in found.split())
    given = Rename((Site("x"),), slots={"out": "out.9"})
    expected = {word.split(":")[0]: word.split(":")[0] for word in port.split()}
    expected |= {"out": "out.9"} if "out" in expected else {}
    assert _match_slots(events[0], events[1], given) == expected


def test_outputs_of_one_size_are_told_apart_by_their_content() -> None:
    """A port returns a tuple where the reference has a class with names, in another order."""
    values = {"out.last": 1.0, "out.hidden.0": 5.0, "out.hidden.1": 3.0}
    own = {"out.0": 3.01, "out.1": 5.0, "out.2": 5.0}  # the last one is a copy
    sides: Any = [
        [SimpleNamespace(slot=slot, shape=(6,)) for slot in side] for side in (values, own)
    ]

    def distance(reference: Any, port: Any) -> float:
        return abs(values[reference.slot] - own[port.slot])

    found = _match_slots(sides[0], sides[1], Rename((Site("x"),)), distance)
    assert found == {"out.0": "out.hidden.1", "out.1": "out.hidden.0"}


@pytest.mark.parametrize(
    ("reference", "port", "offset"),
    [
        ((0, 1, 2), (1, 2, 3), 1), ((0, 1, 2), (0, 1, 2), 0), ((0, 1, 2), (1, 3), 1),
        ((0, 1, 2), (1, 2), 0), ((0,), (1,), 0), ((1, 2), (1, 2, 3), 0), ((0, 1), (), 0),
    ],
)  # fmt: skip
def test_a_port_may_count_steps_from_1(
    reference: tuple[int, ...], port: tuple[int, ...], offset: int
) -> None:
    traces = [
        SimpleNamespace(events=[SimpleNamespace(step=step, kind="activation") for step in steps])
        for steps in (reference, port)
    ]
    selftest = SimpleNamespace(step=0, kind="selftest")
    traces[1].events.append(selftest)
    found, remarks = _step_offset(*cast(Any, traces))
    assert found == offset and len(remarks) == offset
