"""The debugger of `--debug`, and observers together."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from lydite.core.errors import NotFiniteError
from lydite.pipelines import observer as observing
from lydite.pipelines.observer import (
    BOTH_PROMPTS,
    Debugger,
    FinishedStep,
    Observer,
    Observers,
    StepReporter,
)


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


def test_where_the_seconds_went(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(observing.time, "perf_counter", lambda: clock[0])
    observer, lines = debugger("timing")

    def after(seconds: float, stage: Any, **named: Any) -> None:
        clock[0] += seconds
        observer.observe(stage, mx.zeros((1,)), **named)

    after(1, "encoder_output", name="text_encoder")
    after(2, "conditioning", name="pooled")
    observer.begin_batch(0, (1,))
    for step, seconds in enumerate((5.0, 9.0, 0.25, 0.5, 0.75)):
        after(0, "network_output", step=step)
        after(0, "prediction", step=step)
        after(0, "denoised", step=step)
        after(seconds, "latents", step=step)
    after(4, "vae_input")
    after(7, "image")
    first, second = observer.summary(3.0)
    assert first == (
        "load 3.00 s, text 3.00 s, steps 19.50 s (5, the first 5 s, median 0.5 s), decode 7.00 s"
    )
    assert second.startswith("peak memory ") and second.endswith("MiB (MLX arrays)")
    assert len(lines) == 9 and "step 1 latents" in lines[3] and " 9000.00 ms" in lines[3]
    assert debugger("nan")[0].summary(3.0) == []


def test_labels_say_which_value_it_is() -> None:
    observer, lines = debugger("shapes")
    observer.observe("network_output", mx.zeros((2,)), name="cond", step=0)
    observer.observe("encoder_output", mx.zeros((2,)), name="text_encoder_2")
    observer.observe("image", mx.zeros((2,)))
    for stage in ("prediction", "denoiser_input", "denoised"):
        observer.observe(stage, mx.zeros((2,)))
    assert [line.split("  ")[0] for line in lines] == [
        "step 0 transformer cond",
        "text_encoder_2",
        "vae output",
    ]


def test_the_half_of_the_prompt_is_named(on_the_cpu: None) -> None:
    observer, _ = debugger("nan")
    rows = mx.array([[1.0, 2.0], [mx.nan, 3.0]])
    with pytest.raises(NotFiniteError, match="step 0 transformer cond: 1 of 2"):
        observer.observe("network_output", rows, name=BOTH_PROMPTS, step=0)


def test_observers_see_one_anothers_values_in_order() -> None:
    seen: list[Any] = []

    class Adder(Observer):
        def __init__(self, number: int) -> None:
            self.number = number

        def observe(self, stage, value, *, name="", step=None, sigma=None):
            seen.append((self.number, stage, value, name, step, sigma))
            return value + self.number

        def begin_batch(self, first, seeds):
            seen.append((self.number, first, seeds))

        @contextmanager
        def all_steps(self, steps: int) -> Iterator[None]:
            seen.append((self.number, steps))
            yield
            seen.append((self.number, "left"))

    both = Observers(Adder(1), Adder(2))
    assert both.observe("noise", 10, name="n", step=4, sigma=0.5) == 13
    both.begin_batch(3, (7, 8))
    with both.all_steps(6):
        seen.append("inside")
    assert seen == [
        (1, "noise", 10, "n", 4, 0.5), (2, "noise", 11, "n", 4, 0.5),
        (1, 3, (7, 8)), (2, 3, (7, 8)),
        (1, 6), (2, 6), "inside", (2, "left"), (1, "left"),
    ]  # fmt: skip


def test_a_finished_step_is_reported_with_its_batch() -> None:
    steps: list[FinishedStep] = []
    reporter = StepReporter(steps.append)
    denoised, latents = mx.zeros((1,)), mx.ones((1,))
    reporter.begin_batch(2, [5, 6])
    for step in (0, 1):
        assert reporter.observe("denoised", denoised, step=step) is denoised
        assert reporter.observe("latents", latents, step=step) is latents
        reporter.observe("prediction", latents, step=step)
    assert [(s.index, s.first, s.seeds) for s in steps] == [(0, 2, (5, 6)), (1, 2, (5, 6))]
    assert all(step.denoised is denoised for step in steps)
