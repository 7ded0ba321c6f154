"""Queries that a port records after their rotation, and the reference only before it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

DRAW = np.random.default_rng(3)
X = DRAW.standard_normal((2, 9, 16))
LAYERS = [DRAW.standard_normal((16, 16)) / 4 for _ in range(8)]


def rotated(x: Any, direction: int = 1) -> Any:
    angles = np.outer(np.arange(9), 100.0 ** (-np.arange(4) / 4))
    cos, sin = np.cos(angles), direction * np.sin(angles)
    heads = x.reshape(2, 9, 2, 8).swapaxes(1, 2)
    a, b = heads[..., :4], heads[..., 4:]
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), -1)


def run(*, port: bool, records_after: bool = True, wrong: str = "") -> list[tuple[str, Any]]:
    """Two blocks of attention and a layer; `wrong` is wrong in the second."""
    names = ("b{}_q", "b{}_mix", "b{}_out", "b{}_up") if port else (
        "net/blocks.{}.q", "net/blocks.{}.sdpa", "net/blocks.{}.out", "net/blocks.{}.mlp"
    )  # fmt: skip
    events: list[tuple[str, Any]] = []
    x = X
    for number, layers in enumerate((LAYERS[:4], LAYERS[4:])):
        bug = wrong if number == 1 else ""
        before = (x @ layers[0]).reshape(2, 9, 2, 8).swapaxes(1, 2)
        q = rotated(x @ layers[0], -1 if bug == "rotation" else 1)
        k = rotated(x @ layers[1])
        scores = np.exp(q @ k.swapaxes(-1, -2))
        mixed = (scores / scores.sum(-1, keepdims=True) @ k).swapaxes(1, 2).reshape(X.shape)
        out = x + mixed @ layers[2]
        x = out + (np.abs if bug == "up" else np.tanh)(out @ layers[3])
        kept = q if port or records_after else before
        kept = [kept, mixed, out, x]
        if not port and records_after:
            events.append((f"net/blocks.{number}.qn", before))
        events += [(name.format(number), value) for name, value in zip(names, kept, strict=True)]
    return events


def write(folder: Path, events: list[tuple[str, Any]]) -> Trace:
    with TraceWriter(folder, Header(dtype="float32")) as writer:
        for name, value in events:
            writer.add(name, np.asarray(value, np.float32))
    return Trace.open(folder)


@pytest.mark.parametrize("records_after", [True, False])
@pytest.mark.parametrize(("wrong", "site"), [("", None), ("rotation", "b1_q"), ("up", "b1_up")])
def test_a_value_before_its_rotation_is_no_counterpart_of_one_after(
    tmp_path: Path, records_after: bool, wrong: str, site: str | None
) -> None:
    reference = write(tmp_path / "r", run(port=False, records_after=records_after))
    found = compare(reference, write(tmp_path / "p", run(port=True, wrong=wrong)))
    if wrong == "rotation" and not records_after:
        site = "b1_mix"  # the first value that the reference has as well
    assert (found.verdict, found.port_site) == ("diverge" if wrong else "agree", site)
