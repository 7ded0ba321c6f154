"""Values that say the same in other numbers: masked scores, rows of a table, stand-ins for Inf."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.divergence.write_injection import write_injection
from lydite.diff.measure.distance import distance
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

TOKENS = 7
HIDDEN = np.triu(np.ones((TOKENS, TOKENS), bool), 1)
SCORES = np.random.default_rng(2).standard_normal((2, 3, TOKENS, TOKENS))
INDEX = np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))


def write(folder: Path, values: dict[str, Any], dtype: str = "f4") -> Trace:
    with TraceWriter(folder, Header()) as writer:
        for name, value in values.items():
            value = np.asarray(value)
            writer.add(name, value.astype(dtype) if value.dtype.kind == "f" else value)
    return Trace.open(folder)


def probabilities(scores: Any) -> Any:
    weights = np.exp(np.where(HIDDEN, -np.inf, scores))
    return weights / weights.sum(-1, keepdims=True)


def attention(names: tuple[str, str], scores: Any, right: Any = SCORES) -> dict[str, Any]:
    return {
        names[0]: scores,
        names[1]: probabilities(right) @ np.arange(TOKENS * 4.0).reshape(-1, 4),
    }


REFERENCE = attention(("net/scores", "net/attention"), np.where(HIDDEN, -3.4e38, SCORES))


@pytest.mark.parametrize("hidden", [-np.inf, -1e9, -3.3e38, None])
def test_scores_that_a_mask_hides_may_be_any_number(hidden: float | None, tmp_path: Path) -> None:
    scores = SCORES if hidden is None else np.where(HIDDEN, hidden, SCORES)
    port = write(tmp_path / "p", attention(("net/scores", "net/attention"), scores))
    found = compare(write(tmp_path / "r", REFERENCE), port)
    assert found.verdict == "agree", found.sentence
    notes = {row.port_site: row.note for row in found.rows}
    assert notes["net/scores"] == "scores that a mask hides are not compared"


def test_scores_that_a_mask_does_not_hide_are_compared(tmp_path: Path) -> None:
    wrong = 1.1 * SCORES
    port = write(tmp_path / "p", attention(("s", "a"), np.where(HIDDEN, -1e9, wrong), wrong))
    found = compare(write(tmp_path / "r", REFERENCE), port)
    assert (found.verdict, found.port_site) == ("diverge", "s")


def test_an_overflow_of_one_head_is_no_mask(tmp_path: Path) -> None:
    overflow = SCORES.copy()
    overflow[0, 1, 2, 3] = -np.inf
    reference = write(tmp_path / "r", {"net/x": SCORES, "net/scores": SCORES * 2})
    port = write(tmp_path / "p", {"net/x": SCORES, "net/scores": overflow * 2})
    assert compare(reference, port).verdict == "diverge"


def offsets(names: tuple[str, str, str], index: Any, index_used: Any = INDEX) -> dict[str, Any]:
    table = np.random.default_rng(3).standard_normal(2 * TOKENS)
    return {names[0]: SCORES, names[1]: index, names[2]: SCORES + table[index_used + TOKENS]}


def test_rows_of_a_table_stand_for_offsets(tmp_path: Path) -> None:
    """T5's relative positions are negative; rows of a table are not."""
    reference = write(tmp_path / "r", offsets(("net/x", "net/offsets", "net/biased"), INDEX))
    shifted = offsets(("x", "rows", "y"), INDEX + TOKENS)
    port = write(tmp_path / "p", shifted)
    found = compare(reference, port)
    assert found.verdict == "agree", found.sentence
    notes = {row.port_site: row.note for row in found.rows}
    assert notes["rows"] == f"rows of a table: offset 0 is row {TOKENS}"
    write_injection(reference, port, tmp_path / "i")
    assert {e.name for e in Trace.open(tmp_path / "i").events} == {"x", "y"}


def test_rows_of_one_name_on_both_sides_are_the_same_numbers(tmp_path: Path) -> None:
    names = "net/x", "net/offsets", "net/biased"
    reference = write(tmp_path / "r", offsets(names, INDEX))
    port = write(tmp_path / "p", offsets(names, INDEX + TOKENS))
    found = compare(reference, port)
    assert (found.verdict, found.site) == ("diverge", "net/offsets")


def test_what_stands_for_infinity_overflows_no_distance() -> None:
    lowest = np.finfo(np.float64).min
    assert distance(np.array([lowest, 1.0]), np.array([lowest, 1.0])).error == 0.0
    assert distance(np.array([lowest, 1.0]), np.array([-1.0, 1.0])).error > 1e100


def test_a_number_against_a_row_is_another_shape(tmp_path: Path) -> None:
    """A module that is given the timestep in the reference, and its embedding in the port."""
    reference = write(tmp_path / "r", {"net/x": SCORES, "net/time": 501.0})
    port = write(tmp_path / "p", {"net/x": SCORES, "net/time": np.ones((1, 16))})
    found = compare(reference, port)
    assert (found.verdict, found.site) == ("diverge", "net/time")
    assert [finding.cause for finding in found.findings] == ["other-shape"]
