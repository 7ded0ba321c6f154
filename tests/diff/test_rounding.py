"""Limits: what is rounding, and what is not."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.measure.rounding import (
    UNIT,
    coarser,
    estimated_rounding,
    fixed_rounding,
    is_sinusoid,
    limit_for,
    local_rounding,
    measured_rounding,
)
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


F32, BF16 = 2.0**-24, 2.0**-9


@pytest.mark.parametrize(
    ("dtype", "count", "given", "times"),
    [
        ("f32", 64, {}, 8), ("f64", 64, {}, 8), ("c64", 64, {"measured": False}, 8),
        ("bf16", 64, {}, 4), ("f16", 16, {}, 5), ("bf16", 0, {}, 11), ("f8_e4m3", 64, {}, 4),
        ("bf16", 64, {"measured": False}, 4), ("f16", 1, {"measured": False}, 4),
        ("f32", 64, {"ratio": 10.0}, 20), ("bf16", 64, {"ratio": 3.0}, 6),
        ("f32", 64, {"before": 10.0}, 40), ("f32", 64, {"before": 10.0, "measured": False}, 100),
        ("f32", 64, {"before": 1e3}, 300), ("f32", 64, {"ratio": 1e3}, 300),
        ("bf16", 64, {"before": 1e3}, 20), ("bf16", 64, {"ratio": 1e3, "measured": False}, 20),
        ("bf16", 64, {"before": 30.0, "carried": 40.0}, 45),  # of values that round far more
        ("bf16", 64, {"before": 1e3, "carried": 40.0}, 160),
        ("f32", 64, {"before": 1e3, "carried": 1.0}, 300),
    ],
)  # fmt: skip
def test_a_limit_is_so_many_times_the_rounding(
    dtype: str, count: int, given: dict[str, Any], times: float
) -> None:
    """Measured on correct ports; `before` and `carried` are given in roundings here."""
    known = {"before": 0.0, "carried": 0.0, "ratio": 0.0, "measured": True} | given
    known["before"] *= 1e-5
    known["carried"] *= 1e-5
    found = limit_for(1e-5, dtype, count, **known)
    assert found.rounding == 1e-5 and found.limit == pytest.approx(times * 1e-5)


def test_what_rounding_to_expect() -> None:
    units = {"f64": 2.0**-53, "f32": F32, "c64": F32, "f16": 2.0**-11, "bf16": BF16,
             "f8_e4m3": 1 / 16, "f8_e5m2": 1 / 8}  # fmt: skip
    assert units == UNIT and coarser("f32", "bf16") == "bf16" == coarser("bf16", "f16")
    assert coarser("i64", "f64") == "f64"
    for dtype, unit in (*units.items(), ("i64", F32)):
        assert estimated_rounding(dtype, 0) == 2 * unit
        assert estimated_rounding(dtype, 16) == 6 * unit
        assert measured_rounding(unit / 16, dtype) == unit == measured_rounding(unit, dtype)
        assert measured_rounding(unit / 17, dtype) == fixed_rounding(dtype)
    assert fixed_rounding("f32") == 300 * F32 and fixed_rounding("bf16") == 0.5 * BF16**0.5
    for dtype, rounding, expected in (
        ("f32", 1e-9, 1e-3), ("f32", 1e-2, 1e-2), ("bf16", 1e-9, 1e-3), ("bf16", BF16 / 16, BF16),
        ("bf16", 1e-1, 1e-1), ("bf16", BF16 / 17, 1e-3),
    ):  # fmt: skip
        assert local_rounding(rounding, dtype, 1e-3) == expected


def test_which_values_are_sinusoids() -> None:
    angles = np.outer(np.arange(3.0), np.exp(-np.arange(4.0)))
    halves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(3, 8)
    for value in (halves, pairs, halves[0], pairs.astype(np.float32), halves[:, [0, 1, 4, 5]]):
        assert is_sinusoid(value)
    for value in (
        1.02 * halves,
        halves[:, :7],
        halves[:, [0, 4]],
        np.ones((3, 8), int),
        halves[0, 0],
    ):
        assert not is_sinusoid(np.asarray(value))


def test_one_rounding_to_bfloat16_is_about_its_unit() -> None:
    values = np.random.default_rng(0).standard_normal(10_000)
    rounded = values.astype(ml_dtypes.bfloat16).astype(np.float64)
    error = np.linalg.norm(rounded - values) / np.linalg.norm(values)
    assert 0.7 * UNIT["bf16"] < error < UNIT["bf16"]


def test_references_finer_than_the_port_do_not_measure_its_rounding(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 64))
    reference = write(tmp_path / "f32", {"a": x.astype(np.float32)}, "float32")
    floor = write(tmp_path / "f64", {"a": x}, "float64")
    for scale, answer in ((1.0, "agree"), (1.03, "diverge")):
        values = {"a": (scale * x).astype(ml_dtypes.bfloat16)}
        port = write(tmp_path / f"port-{scale}", values, "bfloat16")
        verdict = compare(reference, port, floor=floor)
        assert verdict.verdict == answer and verdict.floor_source.startswith("estimated")


def test_a_floor_of_another_run_lets_nothing_agree(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).standard_normal
    x = draw((4, 64))
    reference = write(tmp_path / "f32", {"a": x.astype(np.float32)}, "float32")
    floor = write(tmp_path / "f64", {"a": x + 0.5 * draw(x.shape)}, "float64")
    port = write(tmp_path / "port", {"a": (1.05 * x).astype(np.float32)}, "float32")
    assert compare(reference, port, floor=floor).verdict != "agree"


def test_a_last_value_a_little_above_an_estimated_limit_is_a_divergence(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 4, 64)).astype(np.float32)
    reference = write(tmp_path / "ref", {"a": x, "b": y}, "float32")
    limit = compare(reference, reference).rows[-1].limit
    assert limit is not None
    values = {"a": x, "b": y.astype(np.float64) * (1 + 2 * limit)}
    verdict = compare(reference, write(tmp_path / "port", values, "float32"))
    assert (verdict.verdict, verdict.site) == ("diverge", "b")  # nothing after it agrees


def test_a_value_is_not_excused_by_its_own_later_steps(tmp_path: Path) -> None:
    """Those of another value would show that it was recorded at another point."""
    x = np.random.default_rng(0).standard_normal((6, 4, 7)).astype(np.float32)
    traces: list[Trace] = []
    for name, first in (("ref", x[0]), ("port", x[0, :, :5])):
        with TraceWriter(tmp_path / name, Header(dtype="float32")) as writer:
            for step, value in enumerate((first, *x[1:])):
                writer.add("net/latents", value, step=step)
        traces.append(Trace.open(tmp_path / name))
    verdict = compare(*traces)
    assert (verdict.verdict, verdict.step) == ("diverge", 0)


def test_right_values_after_a_wrong_one_do_not_excuse_it(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 4, 64)).astype(np.float32)
    right = {f"layers.{index}": value for index, value in enumerate(x)}
    reference = write(tmp_path / "ref", right, "float32")
    for dtype in ("float32", "bfloat16"):
        wrong = right | {"layers.1": 1.08 * right["layers.1"]}
        verdict = compare(reference, write(tmp_path / dtype, wrong, dtype))
        assert (verdict.verdict, verdict.site) == ("diverge", "layers.1")


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


def test_whole_numbers_are_equal_or_wrong_and_pixels_may_round(tmp_path: Path) -> None:
    for dtype, answer in ((np.int32, "diverge"), (np.uint8, "agree")):
        numbers = np.arange(1000).astype(dtype)
        other = numbers.copy()
        other[7] += 1
        name = np.dtype(dtype).name
        reference = write(tmp_path / f"ref-{name}", {"a": numbers}, "float32")
        port = write(tmp_path / f"port-{name}", {"a": other}, "float32")
        assert compare(reference, port).verdict == answer


def test_values_of_a_coarse_run_may_be_stored_finer(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    reference = write(tmp_path / "ref", {"a": x}, "float32")
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    for dtype, answer in (("bfloat16", "agree"), ("float32", "diverge")):
        port = write(tmp_path / dtype, {"a": rounded}, dtype)
        assert compare(reference, port).verdict == answer
