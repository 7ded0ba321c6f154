"""Values that the port scales and the reference does not, or keeps under one name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.pairing.pair_names import NamePairs
from lydite.diff.pairing.pair_traces import pair_traces
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

DRAW = np.random.default_rng(4)
Q, V = DRAW.standard_normal((2, 2, 12, 16)).astype(np.float32)
W = DRAW.standard_normal((2, 16, 16)) / 4


def write(folder: Path, *values: tuple[str, Any]) -> Trace:
    with TraceWriter(folder, Header(dtype="float32")) as writer:
        for name, value in values:
            writer.add(name, np.asarray(value, np.float32))
    return Trace.open(folder)


def attention(q: Any) -> Any:
    scores = np.exp(q @ V.swapaxes(1, 2) / 4)
    return scores / scores.sum(-1, keepdims=True) @ V


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_what_the_port_scales_has_no_counterpart(factor: float, tmp_path: Path) -> None:
    """The attention is wrong, and not what the port has scaled before it."""
    result = attention(Q)
    reference = write(
        tmp_path / "ref", ("net/q", Q), ("net/v", V), ("net/attn", result), ("net/o", result @ W[0])
    )
    wrong = result[:, ::-1] + 0.5
    port = write(
        tmp_path / "port", ("a", Q), ("b", V), ("c", factor * Q), ("d", wrong), ("e", wrong @ W[0])
    )
    assert "c" not in {pair.port_event.name for pair in pair_traces(reference, port).pairs}
    assert compare(reference, port).port_site == "d"


def test_a_wrong_factor_is_found_where_the_reference_scales_too(tmp_path: Path) -> None:
    reference = write(
        tmp_path / "ref", ("net/x", Q), ("net/scaled", 4 * Q), ("net/o", 4 * Q @ W[0])
    )
    port = write(tmp_path / "port", ("a", Q), ("b", 3 * Q), ("c", 3 * Q @ W[0]))
    assert compare(reference, port).port_site == "b"


@pytest.mark.parametrize(("error", "copies"), [(2e-6, {"b"}), (2e-5, set())])
def test_a_value_that_is_normed_again_is_a_copy(
    error: float, copies: set[str], tmp_path: Path
) -> None:
    """A norm changes a normed value by rounding only: its content shows no counterpart."""
    again = Q * (1 + error * DRAW.choice([-1, 1], Q.shape))
    port = write(tmp_path / "port", ("a", Q), ("b", again), ("c", V))
    assert NamePairs(port, port).copies == copies
