"""Gates: what differs before any activation does, and what only looks different."""

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.measure.rounding import UNIT
from lydite.diff.name_map import Rename
from lydite.diff.preconditions import (
    GateResult,
    _are_equal,
    _difference,
    _is_comparable,
    _of_one_length,
    _passed,
    check_weights,
)
from lydite.diff.result import Verdict
from lydite.trace.events import Header, Site, WeightInfo
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter, _weight

X = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


RMS = float(np.sqrt(np.square(W).mean()))


def write(
    folder: Path,
    *,
    ids: Any = (1, 2, 0),
    sigmas: Any = (1.0, 0.5, 0.0),
    weight: Any = W,
    out: Any = X,
    conditions: dict[str, Any] | None = None,
) -> Trace:
    with TraceWriter(folder, Header(dtype="float32", conditions=conditions or {})) as writer:
        writer.add("pipeline/ids", np.array(ids, np.int64), kind="ids")
        writer.add("pipeline/sigmas", np.array(sigmas), kind="schedule")
        writer.add("net", np.asarray(out))
        writer.add_weights({"net/proj.weight": weight})
    return Trace.open(folder)


def info(values: Any) -> WeightInfo:
    return _weight("w", np.asarray(values))


def judge(tmp_path: Path, **port: Any) -> Verdict:
    return compare(write(tmp_path / "ref"), write(tmp_path / "port", **port))


WRONG = X + 1


@pytest.mark.parametrize(
    ("changes", "site"),
    [
        ({"ids": (1, 3, 0)}, "pipeline/ids"),
        ({"ids": (1, 2)}, "pipeline/ids"),
        ({"sigmas": (1.0, 0.75, 0.0)}, "pipeline/sigmas"),
        ({"sigmas": (1.0, 0.5001, 0.0)}, "pipeline/sigmas"),
        ({"sigmas": (1.0, 0.5, 0.25, 0.0)}, "pipeline/sigmas"),
        ({"sigmas": (0.1, 0.5, 1.0)}, "pipeline/sigmas"),
        ({"sigmas": (1.0, 0.5, 0.0, 0.25)}, "pipeline/sigmas"),
        ({"sigmas": (1.0, np.nan, 0.0)}, "pipeline/sigmas"),
        ({"weight": W * 2}, "net/proj.weight"),
        ({"weight": W * 1.001}, "net/proj.weight"),
        ({"weight": np.ones_like(W)}, "net/proj.weight"),
    ],
)
def test_a_failing_gate_is_the_site(tmp_path: Path, changes: dict[str, Any], site: str) -> None:
    found = judge(tmp_path, **changes, out=WRONG)
    assert (found.verdict, found.site) == ("diverge", site)
    assert found.findings and "before any activation" in found.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"sigmas": (0.0, 0.5, 1.0)},  # as ldm lists its timesteps
        {"sigmas": (1.0, 0.5)},  # without the final zero
        {"sigmas": np.array((1.0, 0.5, 0.0), np.float32) * np.float32(1 + 1e-7)},
        {"ids": np.array([[1], [2], [0]])},
        {"weight": W.T.copy()},  # the same values in another order
        {"weight": W.astype(np.float16)},
    ],
)
def test_what_only_looks_different_passes(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert judge(tmp_path, **changes).verdict == "agree"


@pytest.mark.parametrize(
    ("kind", "value", "passes"),
    [
        ("schedule", 10 * (1 + 0.9e-5), True), ("schedule", 10 * (1 + 1.2e-5), False),
        ("input", 10 * (1 + 15 * 2**-24), True), ("input", 10 * (1 + 34 * 2**-24), False),
    ],
)  # fmt: skip
def test_tables_and_inputs_may_differ_by_rounding(
    tmp_path: Path, kind: str, value: float, passes: bool
) -> None:
    for side, last in (("ref", 10.0), ("port", value)):
        with TraceWriter(tmp_path / side, Header()) as writer:
            first = 2.0 if kind == "schedule" else last
            writer.add("pipeline/table", np.array([first, last]), kind=kind)
            writer.add("net", X)
    found = compare(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"))
    gate = next(gate for gate in found.gates if gate.name in (kind, f"{kind}s"))
    assert (gate.passed, gate.compared) == (passes, True)
    if kind == "schedule" and not passes:
        assert f"entry 1 is 10 in the reference, {value:.6g} in the port" in gate.detail


@pytest.mark.parametrize(("dtype", "passes"), [("bfloat16", True), ("float32", False)])
def test_inputs_may_differ_by_the_rounding_of_the_run(
    tmp_path: Path, dtype: str, passes: bool
) -> None:
    """A port that runs in 16 bits and keeps its arrays in 32."""
    for side, value in (("ref", X), ("port", X.astype(ml_dtypes.bfloat16))):
        header = Header(dtype="float32" if side == "ref" else dtype)
        with TraceWriter(tmp_path / side, header) as writer:
            writer.add("pipeline/noise", value.astype(np.float32), kind="input")
            writer.add("net", value.astype(np.float32))
    found = compare(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"))
    (gate,) = (gate for gate in found.gates if gate.name == "inputs")
    assert (gate.passed, found.verdict) == (passes, "agree" if passes else "diverge")


@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
def test_a_coarse_table_may_differ_by_its_own_rounding(
    tmp_path: Path, share: float, passes: bool
) -> None:
    right = 10 / (1 - share * 2 * UNIT["bf16"])
    for side, value, dtype in (("ref", right, np.float64), ("port", 10.0, ml_dtypes.bfloat16)):
        with TraceWriter(tmp_path / side, Header()) as writer:
            writer.add("pipeline/table", np.array([value, 2.0], dtype), kind="schedule")
            writer.add("net", X)
    found = compare(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"))
    assert next(gate.passed for gate in found.gates if gate.name == "schedule") == passes


@pytest.mark.parametrize(
    ("port", "reference", "said"),
    [
        (info(W), info(W[:4]), r"shape \[4, 8\] in the reference, \[8, 8\] in the port"),
        (info(np.full((8, 8), 3.0)), info(W), "every value is 3"),
        (info(2 * W), info(W), f"rms {RMS:.4g} in the reference, {2 * RMS:.4g} in the port"),
        (info(W + 1), info(W), "rms"),
        (info(np.sort(W, axis=None).reshape(8, 8)), info(W), "other values"),
        (info(W.reshape(4, 16)), info(W), "other values"),
        (WeightInfo((2,), "f32"), info(W), "shape"),
        (WeightInfo((8, 8), "f32"), info(W), "other values"),
    ],
)
def test_how_two_parameters_differ(port: WeightInfo, reference: WeightInfo, said: str) -> None:
    assert re.match(said, _difference(port, reference))


def test_parameters_are_equal_by_hash_or_by_statistics() -> None:
    assert _are_equal(info(W), info(W)) and not _are_equal(info(W), info(2 * W))
    assert _are_equal(info(W), info(W.T.copy()))  # other hash, same statistics
    assert _are_equal(info(W.astype(np.float16)), info(W))
    assert not _are_equal(info((W * 1.001).astype(np.float32)), info(W))
    assert not _are_equal(WeightInfo((8, 8), "f32"), info(W))
    assert not _is_comparable(WeightInfo((8, 8), "f32"), info(W)) and _is_comparable(
        info(W), info(W)
    )


def test_gates_say_how_much_was_compared(tmp_path: Path) -> None:
    for side in ("ref", "port"):
        with TraceWriter(tmp_path / side, Header()) as writer:
            for number in range(3):
                writer.add(f"pipeline/in.{number}", np.ones((3, 1), np.float32), kind="input")
            writer.add("net", X)
    found = compare(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"))
    details = {gate.name: (gate.detail, gate.compared) for gate in found.gates}
    assert details["inputs"] == ("3 values equal", True)
    assert details["ids"] == ("none recorded on both sides", False)


@pytest.mark.parametrize(
    ("compared", "chosen", "detail"),
    [
        (0, 0, "none recorded on both sides"),
        (0, 2, "other shapes, or values not kept"),
        (1, 1, "1 table equal"),
        (2, 2, "2 tables equal"),
        (1, 4, "1 table equal, 3 not compared"),
    ],
)
def test_a_gate_that_passes_says_what_it_left_out(compared: int, chosen: int, detail: str) -> None:
    pairs: Any = [None] * chosen
    found = _passed("schedule", compared, pairs, "table").gate
    assert (found.passed, found.detail, found.compared) == (True, detail, compared > 0)


@pytest.mark.parametrize(
    ("name", "dtype", "slot", "gate"),
    [
        ("net/input_ids", np.int64, "out", True), ("prompt_tokens", np.int32, "out", True),
        ("net/counts", np.int64, "out", False), ("net/input_ids", np.float32, "out", False),
        ("net/input_ids", np.int64, "in.0", False),
    ],
)  # fmt: skip
def test_ids_of_a_dump_without_kinds_are_known_by_name_and_dtype(
    name: str, dtype: Any, slot: str, gate: bool, tmp_path: Path
) -> None:
    for side, last in (("ref", 900), ("port", 901)):
        with TraceWriter(tmp_path / side, Header(dtype="float32")) as writer:
            writer.add(name, np.array([[5, 7, 300, last]], dtype), slot=slot)
            writer.add("net", X)
    found = compare(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"))
    assert any(each.name == "ids" and not each.passed for each in found.gates) == gate
    if gate:
        assert "1 of 4 ids differ, first at position 3: 900" in found.sentence


def test_either_table_may_leave_out_the_final_zero(tmp_path: Path) -> None:
    for sigmas, answer in (((1.0, 0.5), "agree"), ((1.0,), "diverge")):
        reference = write(tmp_path / f"ref-{len(sigmas)}", sigmas=sigmas)
        assert compare(reference, write(tmp_path / f"port-{len(sigmas)}")).verdict == answer


def test_a_gate_that_no_value_confirms_is_a_remark(tmp_path: Path) -> None:
    found = judge(tmp_path, weight=W * 2)  # folded elsewhere: the output is right
    assert found.verdict == "agree"
    assert any("net/proj.weight" in remark for remark in found.remarks)


def test_ids_come_before_the_schedule(tmp_path: Path) -> None:
    found = judge(tmp_path, ids=(9, 9, 9), sigmas=(3.0, 2.0, 1.0), out=WRONG)
    assert found.site == "pipeline/ids"


@pytest.mark.parametrize(
    ("ours", "theirs", "answer"),
    [
        *(({name: 1}, {name: 2}, "cannot-compare") for name in ("steps", "guidance", "strength")),
        *(({name: "a"}, {name: "b"}, "cannot-compare") for name in ("prompt", "negative")),
        *(({name: 64}, {name: 128}, "cannot-compare") for name in ("width", "height")),
        ({"guidance": 3}, {"guidance": 3.0}, "agree"),
        ({"negative": ""}, {"negative": None}, "agree"),
        ({"seed": 1}, {"seed": 2}, "agree"),  # noise is held against noise, not seed against seed
        ({"model": "x"}, {"model": "y"}, "agree"),
        ({"steps": 4}, {}, "agree"),
    ],
)
def test_conditions(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], answer: str
) -> None:
    found = compare(
        write(tmp_path / "ref", conditions=theirs), write(tmp_path / "port", conditions=ours)
    )
    assert found.verdict == answer


def weights_gate(
    tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any], **more: Any
) -> GateResult:
    for name, weights in (("ref", theirs), ("port", ours)):
        with TraceWriter(tmp_path / name, Header()) as writer:
            writer.add("net", X)
            writer.add_weights(weights)
    return check_weights(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"), **more)[0]


BLOCKS = {
    f"up.{i}.{name}": np.random.default_rng(10 * i + j).standard_normal((8, 8)).astype("f4")
    for i in range(3)
    for j, name in enumerate(("q.weight", "k.weight", "v.weight"))
}


def test_blocks_counted_from_the_other_end_are_no_difference(tmp_path: Path) -> None:
    ours = {f"up.{2 - int(name[3])}{name[4:]}": value for name, value in BLOCKS.items()}
    assert weights_gate(tmp_path, BLOCKS, ours).gate.word == "ok"


@pytest.mark.parametrize(("last", "passed"), [("up.3.embed.weight", True), (None, False)])
def test_modules_in_one_list_may_have_names_of_each_other(
    last: str | None, passed: bool, tmp_path: Path
) -> None:
    """What the reference calls `mid` is the port's first block; with a value lost it is a bug."""
    a, b, c = (np.random.default_rng(i).standard_normal((4, 3 + i)).astype("f4") for i in range(3))
    theirs = {"mid.embed.weight": a, "up.0.embed.weight": b, "up.1.embed.weight": c}
    ours = {"up.0.embed.weight": a, "up.1.embed.weight": b} | ({last: c} if last else {})
    assert weights_gate(tmp_path, theirs, ours).gate.passed == passed


@pytest.mark.parametrize(
    "names", [("up.1.q.weight", "up.1.k.weight"), ("up.0.q.weight", "up.1.q.weight")]
)
def test_two_exchanged_parameters_are_a_difference(tmp_path: Path, names: tuple[str, str]) -> None:
    a, b = names
    found = weights_gate(tmp_path, BLOCKS, {**BLOCKS, a: BLOCKS[b], b: BLOCKS[a]})
    assert not found.gate.passed and f"it equals the reference's {b}" in found.gate.detail


def test_parameters_of_other_names_are_compared(tmp_path: Path) -> None:
    ours = {f"l{name[3]}/{name[5]}": value.T for name, value in BLOCKS.items() if name[3] != "2"}
    ours["l2/qkv"] = np.concatenate([BLOCKS[f"up.2.{n}.weight"] for n in "qkv"])
    detail = weights_gate(tmp_path, BLOCKS, ours).gate.detail
    assert detail == "6 parameters equal, 1 fused or split"


def test_a_map_holds_for_parameters(tmp_path: Path) -> None:
    renames = {"a": Rename((Site("up.0.q"),))}
    found = weights_gate(
        tmp_path, BLOCKS, {"a.weight": 2 * BLOCKS["up.0.q.weight"]}, renames=renames
    )
    assert found.parameters == (("up.0.q.weight", "a.weight"),)


@pytest.mark.parametrize("customary", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4])  # of 9: a third is an exception, more is a custom
def test_weights_that_alone_are_transposed_or_not_are_named(
    tmp_path: Path, customary: bool, count: int
) -> None:
    ours = {n: value.T if customary else value for n, value in BLOCKS.items()}
    names = list(ours)[4 : 4 + count]
    ours |= {name: ours[name].T for name in names}
    found = weights_gate(tmp_path, BLOCKS, ours)
    named = names if count <= 3 else []
    assert found.gate.passed and found.turned == tuple((name, name) for name in named)


def test_only_a_final_zero_may_be_left_out_of_a_table() -> None:
    short, zero, more = np.array([1, 0.5]), np.array([1, 0.5, 0]), np.array([1, 0.5, 0.2])
    for one, other, sizes in ((zero, short, (2, 2)), (more, short, (3, 2)), (short, short, (2, 2))):
        assert tuple(map(len, _of_one_length(one, other))) == sizes
        assert tuple(map(len, _of_one_length(other, one))) == sizes[::-1]


def test_a_table_may_repeat_the_sigmas_of_a_sampler_with_two_calls_in_a_step() -> None:
    once, twice = np.array([3.0, 2, 1, 0]), np.array([3.0, 2, 2, 1, 1, 0])
    for other in (twice, twice[:-1]):
        for one, repeated in (_of_one_length(once, other), _of_one_length(other, once)[::-1]):
            assert one.tolist() == repeated.tolist()
    longer = np.array([3.0, 2, 2, 1, 1, 0.5, 0])
    assert tuple(map(len, _of_one_length(once, longer))) == (4, 7)


def test_ids_may_have_the_tokens_first(tmp_path: Path) -> None:
    """Of ids that are wrong in one place the others show the order."""
    ids = np.random.default_rng(0).integers(0, 99, (2, 14))
    for name, wrong in (("right", 0), ("wrong", 1)):
        sides: list[Trace] = []
        for side, value in (
            ("a", ids),
            ("b", (ids + wrong * (np.arange(28) == 5).reshape(2, 14)).T),
        ):
            with TraceWriter(tmp_path / name / side, Header()) as writer:
                writer.add("pipeline/ids", value, kind="ids")
                writer.add("net", X)
            sides.append(Trace.open(tmp_path / name / side))
        found = compare(*sides)
        assert found.verdict == ("diverge" if wrong else "agree")
        assert not wrong or "1 of 28 ids differ, first at position 5" in found.sentence


def record_times(folder: Path, times: Any, given: Any, embedded: Any, out: Any) -> Trace:
    """A loop whose network embeds its time, which it is given alone, and returns `out`."""
    with TraceWriter(folder, Header(dtype="float32")) as writer:
        writer.add("pipeline/timesteps", np.array(times, np.float32), kind="schedule")
        for step, (time, embedding) in enumerate(zip(given, embedded, strict=True)):
            values = (np.array(value, np.float32) for value in ([time], embedding, out))
            names = (("net/time_embed", "in.0"), ("net/time_embed", "out"), ("net", "out"))
            for (name, slot), value in zip(names, values, strict=True):
                writer.add(name, value, slot=slot, step=step)
    return Trace.open(folder)


TIMES, EMBEDDED = (900.0, 600.0, 300.0), np.random.default_rng(5).standard_normal((3, 1, 32))


@pytest.mark.parametrize(
    ("times", "embedded", "out", "site"),
    [
        ((0.9, 0.6, 0.3), EMBEDDED, X, None),
        ((0.9, 0.6, 0.3), EMBEDDED, WRONG, "net"),  # another bug, which is named
        ((0.9, 0.6, 0.3), EMBEDDED + 1, X, "pipeline/timesteps"),  # its embedding is another
        ((0.9, 0.6, 0.3), EMBEDDED[[0, 1, 1]], X, "pipeline/timesteps"),  # in one step
        ((0.9, 0.6, 0.3), EMBEDDED[..., ::-1], WRONG, "net/time_embed"),  # in another order
        ((0.9, 0.5, 0.3), EMBEDDED, X, "pipeline/timesteps"),  # no multiple
        ((0.0, 0.0, 0.0), EMBEDDED, X, "pipeline/timesteps"),
        ((float("nan"), 0.6, 0.3), EMBEDDED, X, "pipeline/timesteps"),
    ],
)
def test_times_may_have_another_unit_where_their_embedding_agrees(
    times: Any, embedded: Any, out: Any, site: str | None, tmp_path: Path
) -> None:
    reference = record_times(tmp_path / "ref", TIMES, TIMES, EMBEDDED, X)
    port = record_times(tmp_path / "port", times, times, embedded, out)
    found = compare(reference, port)
    assert (found.verdict, found.site) == ("diverge" if site else "agree", site)
    said = any("0.001 × the reference's" in remark for remark in found.remarks)
    assert said == (site != "pipeline/timesteps")


@pytest.mark.parametrize(("last", "agrees"), [(0.6, True), (0.7, False)])
def test_times_may_be_counted_from_noise_to_picture(
    last: float, agrees: bool, tmp_path: Path
) -> None:
    sigmas = (1.0, 0.85, 0.4)
    reference = record_times(tmp_path / "ref", sigmas, sigmas, EMBEDDED, X)
    times = (0.0, 0.15, last)
    port = record_times(tmp_path / "port", times, times, EMBEDDED, X)
    found = compare(reference, port)
    assert found.verdict == ("agree" if agrees else "diverge")
    assert any("-1 × the reference's + 1" in remark for remark in found.remarks) == agrees


def test_an_embedding_of_more_than_the_time_shows_no_unit(tmp_path: Path) -> None:
    """What is given other numbers than the reference's times was not computed from a time alone."""
    sides = [
        record_times(tmp_path / name, times, (1.0, 2.0, 3.0), EMBEDDED, X)
        for name, times in (("ref", TIMES), ("port", (0.9, 0.6, 0.3)))
    ]
    assert compare(*sides).site == "pipeline/timesteps"
