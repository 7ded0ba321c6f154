"""The lines of docs/trace-format.md that write weights.json, run as they stand there."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from lydite.diff.preconditions import check_weights
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

DOCS = Path(__file__).parents[2] / "docs/trace-format.md"


def test_weights_written_by_hand_are_compared(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    code: dict[str, Any] = {}
    for block in blocks:
        if "def put" in block or "def weights" in block:
            exec(block, code)
    weight = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    for name, values in (("port", weight.T), ("wrong", weight * 2)):
        (tmp_path / name).mkdir()
        code["header"](tmp_path / name, True)
        code["add"](tmp_path / name, 0, "net", weight)
        code["weights"](tmp_path / name, {"net.weight": values})
    with TraceWriter(tmp_path / "ref", Header()) as writer:
        writer.add("net", weight)
        writer.add_weights({"net.weight": weight})
    reference = Trace.open(tmp_path / "ref")
    right, _ = check_weights(reference, Trace.open(tmp_path / "port"))
    wrong, _ = check_weights(reference, Trace.open(tmp_path / "wrong"))
    assert right.gate.word == "ok" and "1 parameter" in right.gate.detail
    assert wrong.gate.word == "FAILED" and "net.weight" in wrong.gate.detail
