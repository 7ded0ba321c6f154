"""Limits: what is rounding, and what is not."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lydite.diff.compare import compare
from lydite.diff.measure.rounding import UNIT, fixed_rounding, measured_rounding
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter


def write(folder: Path, values: dict[str, Any], dtype: str) -> Trace:
    with TraceWriter(folder, Header(dtype=dtype)) as writer:
        for name, value in values.items():
            writer.add(name, value)
    return Trace.open(folder)


def test_only_a_difference_of_zero_gets_the_limit_of_a_fixed_precision() -> None:
    unit = UNIT["f32"]
    assert measured_rounding(0.0, "f32") == fixed_rounding("f32") > 100 * unit
    assert measured_rounding(unit / 8, "f32") == unit
    assert measured_rounding(5 * unit, "f32") == 5 * unit


def test_references_finer_than_the_port_do_not_measure_its_rounding(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 64))
    reference = write(tmp_path / "f32", {"a": x.astype(np.float32)}, "float32")
    floor = write(tmp_path / "f64", {"a": x}, "float64")
    for scale, answer in ((1.0, "agree"), (1.03, "diverge")):
        values = {"a": (scale * x).astype(ml_dtypes.bfloat16)}
        port = write(tmp_path / f"port-{scale}", values, "bfloat16")
        verdict = compare(reference, port, floor=floor)
        assert verdict.verdict == answer and verdict.floor_source.startswith("estimated")


def test_another_shape_of_the_last_value_is_a_divergence(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).standard_normal
    x = draw((2, 8)).astype(np.float32)
    reference = write(tmp_path / "ref", {"a": x, "b": draw((2, 5))}, "float32")
    port = write(tmp_path / "port", {"a": x, "b": draw((2, 7))}, "float32")
    verdict = compare(reference, port)
    assert (verdict.verdict, verdict.site) == ("diverge", "b")


def test_an_error_that_grows_slowly_is_a_divergence_in_the_end(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((40, 4, 64))
    exact = {f"layers.{index}": value for index, value in enumerate(x)}
    rounded = {name: value.astype(np.float32) for name, value in exact.items()}
    grown = {
        name: (value * (1 + 1e-8 * 1.5**index)).astype(np.float32)
        for index, (name, value) in enumerate(exact.items())
    }
    reference = write(tmp_path / "f32", rounded, "float32")
    port = write(tmp_path / "port", grown, "float32")
    for floor in (None, write(tmp_path / "f64", exact, "float64")):
        verdict = compare(reference, port, floor=floor)
        assert verdict.verdict == "diverge" and verdict.error is not None and verdict.error < 1e-3


def test_values_of_a_coarse_run_may_be_stored_finer(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    reference = write(tmp_path / "ref", {"a": x}, "float32")
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    for dtype, answer in (("bfloat16", "agree"), ("float32", "diverge")):
        port = write(tmp_path / dtype, {"a": rounded}, dtype)
        assert compare(reference, port).verdict == answer
