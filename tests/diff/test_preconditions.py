"""Gates: what differs before any activation does, and what only looks different."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.result import Verdict
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

X = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


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


def judge(tmp_path: Path, **port: Any) -> Verdict:
    return compare(write(tmp_path / "ref"), write(tmp_path / "port", **port))


WRONG = X + 1


@pytest.mark.parametrize(
    ("changes", "site"),
    [
        ({"ids": (1, 3, 0)}, "pipeline/ids"),
        ({"ids": (1, 2)}, "pipeline/ids"),
        ({"sigmas": (1.0, 0.75, 0.0)}, "pipeline/sigmas"),
        ({"sigmas": (1.0, 0.5, 0.25, 0.0)}, "pipeline/sigmas"),
        ({"sigmas": (0.0, 0.5, 1.0)}, "pipeline/sigmas"),
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
        {"sigmas": (1.0, 0.5)},  # without the final zero
        {"sigmas": np.array((1.0, 0.5, 0.0), np.float32) * np.float32(1 + 1e-7)},
        {"ids": np.array([[1], [2], [0]])},
        {"weight": W.T.copy()},  # the same values in another order
        {"weight": W.astype(np.float16)},
    ],
)
def test_what_only_looks_different_passes(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert judge(tmp_path, **changes).verdict == "agree"


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
        ({"prompt": "a"}, {"prompt": "b"}, "cannot-compare"),
        ({"guidance": 3}, {"guidance": 3.0}, "agree"),
        ({"negative": ""}, {"negative": None}, "agree"),
        ({"seed": 1}, {"seed": 2}, "agree"),  # noise is held against noise, not seed against seed
        ({"model": "x"}, {"model": "y"}, "agree"),
        ({"steps": 4}, {}, "agree"),
        ({"width": 64}, {"width": 128}, "cannot-compare"),
    ],
)
def test_conditions(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], answer: str
) -> None:
    found = compare(
        write(tmp_path / "ref", conditions=theirs), write(tmp_path / "port", conditions=ours)
    )
    assert found.verdict == answer
