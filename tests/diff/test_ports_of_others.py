"""The correct ports of `benchmarks/blind_bugs`, whose authors had not read the comparison."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lydite.diff.compare import compare
from lydite.trace.reader import Trace
from score_blind_bugs import FLOORS, PORTS

pytestmark = pytest.mark.parity


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PORTS)
def test_a_correct_port_agrees(name: str, tmp_path: Path) -> None:
    module: Any = importlib.import_module(f"blind_bugs.{name}")
    wholes = {"dump": "full", "weights": True, "dtype": "float32"}
    blocks = {"dump": "blocks", "weights": False, "dtype": "bfloat16"}
    with torch.no_grad():
        for dtype in ("float32", *FLOORS.values()):
            module.reference(tmp_path, dtype)
        for variant in (wholes, {**wholes, "dtype": "bfloat16"}, blocks):
            port = tmp_path / "-".join(map(str, variant.values()))
            module.port(tmp_path, port, None, **variant)
            floor = Trace.open(tmp_path / f"ref_{FLOORS[variant['dtype']]}")
            verdict = compare(Trace.open(tmp_path / "ref_float32"), Trace.open(port), floor=floor)
            assert verdict.verdict == "agree", (variant, verdict.sentence)
