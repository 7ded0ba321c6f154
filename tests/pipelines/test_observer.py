"""The debugger of `--debug`."""

import mlx.core as mx
import pytest

from lydite.core.errors import NotFiniteError
from lydite.pipelines.observer import BOTH_PROMPTS, Debugger


def debugger(*modes: str) -> tuple[Debugger, list[str]]:
    lines: list[str] = []
    return Debugger(set(modes), lines.append, "transformer"), lines


def test_nan_stops_with_counts_statistics_and_the_prompt() -> None:
    observer, _ = debugger("nan")
    observer.observe("vae_input", mx.ones((4,)))
    rows = mx.array([[1.0, mx.nan, 3.0, mx.inf, -mx.inf], [0.0] * 5])
    with pytest.raises(NotFiniteError) as caught:
        observer.observe("network_output", rows, name=BOTH_PROMPTS, step=3)
    text = str(caught.value)
    assert "step 3 transformer uncond: 1 of 5 values are NaN, 2 are Inf" in text
    assert "min 1, max 3, mean 2, std 1" in text and "\n" not in text


def test_nothing_finite_is_said() -> None:
    with pytest.raises(NotFiniteError, match="none is finite"):
        debugger("nan")[0].observe("image", mx.full((3,), mx.nan, dtype=mx.bfloat16))


def test_shapes_and_timing_are_lines() -> None:
    observer, lines = debugger("shapes", "timing")
    observer.observe("vae_input", mx.zeros((1, 4, 4, 16), mx.bfloat16))
    assert "vae input" in lines[0] and "(1, 4, 4, 16) bfloat16" in lines[0] and "ms" in lines[0]


def test_modes_that_are_off_print_nothing() -> None:
    observer, lines = debugger("nan")
    observer.observe("vae_input", mx.zeros((2,)))
    other, more = debugger("shapes")
    other.observe("vae_input", mx.full((1,), mx.nan))
    assert lines == [] and len(more) == 1 and "NaN" not in more[0]
