"""The debugger of `--debug`."""

import mlx.core as mx
import pytest

from lydite.core.errors import NotFiniteError
from lydite.pipelines.watch import Debugger


def test_nan_stops_with_counts_statistics_and_the_place() -> None:
    watch = Debugger({"nan"}, print)
    watch("fine", mx.ones((4,)))
    with pytest.raises(NotFiniteError) as caught:
        watch("step 3 transformer cond", mx.array([1.0, mx.nan, 3.0, mx.inf, -mx.inf]))
    text = str(caught.value)
    assert "step 3 transformer cond: 1 of 5 values are NaN, 2 are Inf" in text
    assert "min 1, max 3, mean 2, std 1" in text and "\n" not in text


def test_nothing_finite_is_said() -> None:
    with pytest.raises(NotFiniteError, match="none is finite"):
        Debugger({"nan"}, print)("x", mx.full((3,), mx.nan, dtype=mx.bfloat16))


def test_shapes_and_timing_are_lines() -> None:
    lines: list[str] = []
    Debugger({"shapes", "timing"}, lines.append)("vae input", mx.zeros((1, 4, 4, 16), mx.bfloat16))
    assert "vae input" in lines[0] and "(1, 4, 4, 16) bfloat16" in lines[0] and "ms" in lines[0]


def test_modes_that_are_off_say_nothing() -> None:
    lines: list[str] = []
    Debugger({"nan"}, lines.append)("x", mx.zeros((2,)))
    Debugger({"shapes"}, lines.append)("y", mx.full((1,), mx.nan))  # not asked to look
    assert len(lines) == 1 and "NaN" not in lines[0]
