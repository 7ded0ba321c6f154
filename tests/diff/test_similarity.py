"""How alike two values and names are, on both sides of the numbers that decide it."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.pairing import similarity
from lydite.diff.pairing.similarity import (
    Comparer,
    ValueReader,
    _number_agreement,
    _similar_stats,
    name_similarity,
    names_of,
    other_slots,
)
from lydite.trace.events import Header, Stats
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

DRAW = np.random.default_rng(4)
X, Y = DRAW.standard_normal((2, 20, 30))


def trace(folder: Path, *values: Any, dtype: str = "float32", **more: Any) -> Trace:
    with TraceWriter(folder, Header(dtype=dtype)) as writer:
        for number, value in enumerate(values):
            writer.add(f"v{number}", np.asarray(value), **more)
    return Trace.open(folder)


def away(error: float, dtype: Any = np.float32) -> Any:
    gap = error * np.linalg.norm(X) / np.linalg.norm(Y) * Y
    return (X + gap).astype(dtype)


@pytest.mark.parametrize(
    ("error", "dtype", "run", "equal"),
    [
        (0.9e-4, np.float32, "float32", True), (1.1e-4, np.float32, "float32", False),
        (0.8e-2, np.float32, "bfloat16", True), (1.2e-2, np.float32, "bfloat16", False),
        (0.8e-2, ml_dtypes.bfloat16, "float32", True), (1.2e-2, np.float16, "float32", False),
    ],
)  # fmt: skip
def test_values_are_equal_up_to_the_rounding_of_a_run(
    error: float, dtype: Any, run: str, equal: bool, tmp_path: Path
) -> None:
    reference = trace(tmp_path / "ref", X.astype(np.float32), X[:, :9])
    port = trace(tmp_path / "port", away(error, dtype), away(error, dtype).T, dtype=run)
    comparer = Comparer.of(reference, port)
    for event in port.events[:2]:  # in any axis order
        assert comparer.are_equal(reference.events[:1], [event]) == equal
    assert comparer.are_equal(reference.events[1:2], port.events[:1]) is None
    assert comparer.are_equal(reference.events[:2], port.events[:2]) is None


def test_parts_are_joined_in_either_order(tmp_path: Path) -> None:
    halves = [X[:10].astype(np.float32), X[10:].astype(np.float32)]
    reference = trace(tmp_path / "ref", X.astype(np.float32), Y.astype(np.float32))
    for name, parts in (("one", halves), ("other", halves[::-1])):
        port = trace(tmp_path / name, *parts)
        comparer = Comparer.of(reference, port)
        assert comparer.are_equal(reference.events[:1], port.events[:2])
        assert comparer.are_equal(reference.events[1:2], port.events[:2]) is False


def test_the_score_of_a_pair(tmp_path: Path) -> None:
    reference = trace(tmp_path / "ref", X.astype(np.float32))
    scores: list[float] = []
    for error in (1e-6, 1e-3, 0.29, 0.31):
        port = trace(tmp_path / str(error), away(error))
        score, found = Comparer.of(reference, port).score(reference.events[0], port.events[0])
        assert found == pytest.approx(error, rel=0.02)
        scores.append(score)
    name = 1.0 + 0.5  # equal names with equal numbers
    assert scores[0] == pytest.approx(name + 3 + 3 + 1, abs=0.01)
    assert scores[1] == pytest.approx(name + 3 * (1 - 1e-3) + 1.5 + 1, abs=0.01)
    assert scores[2] > name + 2 and scores[3] == pytest.approx(name)  # too far: the name alone
    other = trace(tmp_path / "other", np.zeros((3, 7), np.float32))
    assert Comparer.of(reference, other).score(reference.events[0], other.events[0])[0] == -np.inf


def test_the_closer_value_outweighs_the_number_in_a_name(tmp_path: Path) -> None:
    reference = trace(tmp_path / "ref", away(0.18), X.astype(np.float32))  # v0 and v1
    port = trace(tmp_path / "port", away(0.013))
    comparer = Comparer.of(reference, port)
    far, near = (comparer.score(event, port.events[0])[0] for event in reference.events[:2])
    assert near > far


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [("x.1.y", "z.1", 0.5), ("x.1", "x.2", -0.5), ("x", "x.2", 0.0), ("x.1.2", "x.1", -0.5)],
)
def test_numbers_of_blocks(a: str, b: str, alike: float) -> None:
    assert _number_agreement(a, b) == alike
    assert name_similarity(a, a) == 1 and 0 <= name_similarity(a, b) < 1
    last, first = name_similarity("a.norm", "b.norm"), name_similarity("a.norm", "a.proj")
    assert last > first  # the last word counts most


def test_statistics_of_a_part() -> None:
    def stats(rms: float) -> Stats:
        return Stats(64, -1.0, 1.0, 0.0, rms, rms)

    for rms, alike in ((0.51, True), (0.49, False), (1.99, True), (2.01, False)):
        assert _similar_stats(stats(rms), stats(1.0), (2, 0)) == alike
    assert _similar_stats(stats(1.04), stats(1.0), (1, 0))
    assert not _similar_stats(stats(1.06), stats(1.0), (1, 0))


def test_rows_of_one_size_come_from_a_norm(tmp_path: Path) -> None:
    rows = X / np.sqrt(np.square(X).mean(-1, keepdims=True))
    spread = np.linspace(1, 1.02, 20)[:, None] ** 0.5
    values = [rows, rows * spread**0.9, rows * spread**1.1, rows[:8], rows[:7], X, rows[0]]
    found = trace(tmp_path / "t", *(value.astype(np.float32) for value in values))
    reader = ValueReader(found)
    events = [event for event in found.events if event.kind != "selftest"]
    normed = [reader.is_normed(event) for event in events]
    assert normed == [True, True, False, True, None, False, None]


def test_large_values_are_not_read_and_few_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trace(tmp_path / "t", *(np.full(6, float(n), np.float32) for n in range(5)))
    reader = ValueReader(found)
    monkeypatch.setattr(similarity, "MAX_CACHED", 3)
    for event in found.events:
        assert (reader.read(event) == found.read(event)).all() and len(reader.cache) <= 3
    assert list(reader.cache) == [event.i for event in found.events[-3:]]
    for most, readable in ((6, True), (5, False)):
        monkeypatch.setattr(similarity, "MAX_VALUES", most)
        assert reader.can_read(found.events[0]) == readable


def test_inputs_that_no_module_returned(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", Header()) as writer:
        for name, slot, number, step in (
            ("a", "in.0", 1, 0), ("a", "out", 2, 0), ("b", "in.0", 2, 0), ("b", "out.1", 3, 0),
            ("c", "in.0", 1, 0), ("d", "in.0", 2, 1),
        ):  # fmt: skip
            writer.add(name, np.full(3, float(number), np.float32), slot=slot, step=step)
    with Trace.open(tmp_path / "t") as found:
        assert [str(site) for site in other_slots(found)] == ["a [in.0]", "b [out.1]", "d [in.0]"]
        assert names_of(found) == ["a", "b", "c", "d"]
