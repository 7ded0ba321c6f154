"""One observer of a run: progress, debugging, recording, calibration and injection.

Every value that passes between the stages of a picture goes through `Observer.observe`; what it
returns is what the run goes on with.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import NotFiniteError

Stage = Literal[
    "encoder_output",  # name: the encoder, or the encoder and which of its outputs
    "conditioning",  # name: which of the family's conditioning arrays
    "sigmas",  # NumPy, float64
    "timesteps",  # NumPy, float64
    "image_latents",  # img2img: mean of the encoded picture
    "noise",  # standard normals that the run starts from
    "denoiser_input",  # the sampler's x at a sigma, before the network's input scaling
    "network_output",  # of one call: the negative prompt's rows first, then the prompt's
    "prediction",  # after guidance: what the sampler's step is computed from
    "denoised",  # the network's estimate of the finished latents
    "latents",  # after a step
    "vae_input",
    "image",  # (1, H, W, 3) from -1 to 1
]

BOTH_PROMPTS = "uncond + cond"  # name of a network output with a half for each prompt


class Observer:
    """The observer that does nothing: arrays stay lazy."""

    def observe(
        self,
        stage: Stage,
        value: Any,
        *,
        name: str = "",
        step: int | None = None,
        sigma: float | None = None,
    ) -> Any:
        """See a value and return the one to go on with."""
        return value

    def begin_batch(self, first: int, seeds: Sequence[int]) -> None:
        """Pictures `first`, `first + 1`, … are drawn next, from these seeds."""

    def all_steps(self, steps: int) -> AbstractContextManager[None]:
        """While this context is open, modules compute values for all steps at once."""
        return nullcontext()


class Observers(Observer):
    """Several observers, one after the other."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def observe(
        self,
        stage: Stage,
        value: Any,
        *,
        name: str = "",
        step: int | None = None,
        sigma: float | None = None,
    ) -> Any:
        for observer in self._observers:
            value = observer.observe(stage, value, name=name, step=step, sigma=sigma)
        return value

    def begin_batch(self, first: int, seeds: Sequence[int]) -> None:
        for observer in self._observers:
            observer.begin_batch(first, seeds)

    @contextmanager
    def all_steps(self, steps: int) -> Generator[None]:
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.all_steps(steps))
            yield


@dataclass(frozen=True, eq=False)
class FinishedStep:
    """One finished step of one batch."""

    index: int
    first: int  # position of the batch's first picture among all of the run
    seeds: tuple[int, ...]
    denoised: mx.array  # the estimate of the finished latents; `Pipeline.decode` shows it


class StepReporter(Observer):
    """Calls a function after each finished step."""

    def __init__(self, on_step: Callable[[FinishedStep], None]) -> None:
        self._on_step = on_step
        self._first, self._seeds = 0, ()
        self._denoised = mx.zeros(())

    def begin_batch(self, first: int, seeds: Sequence[int]) -> None:
        self._first, self._seeds = first, tuple(seeds)

    def observe(
        self,
        stage: Stage,
        value: Any,
        *,
        name: str = "",
        step: int | None = None,
        sigma: float | None = None,
    ) -> Any:
        if stage == "denoised":
            self._denoised = value
        elif stage == "latents":
            self._on_step(FinishedStep(step or 0, self._first, self._seeds, self._denoised))
        return value


class Debugger(Observer):
    """The modes of `--debug`: nan, timing, shapes. NaN stops the run with an exception.

    Timing waits for a value before and after the steps, and for the first step. The others run as
    they do without it, one while the next is prepared: their times are those between two of them.
    """

    def __init__(self, modes: set[str], report: Callable[[str], None], network: str) -> None:
        self._modes, self._report, self._network = modes, report, network
        self._last = time.perf_counter()
        self._seconds: dict[str, list[float]] = {}
        self._steps: list[list[float]] = []  # of each batch

    def begin_batch(self, first: int, seeds: Sequence[int]) -> None:
        self._steps.append([])

    def observe(
        self,
        stage: Stage,
        value: Any,
        *,
        name: str = "",
        step: int | None = None,
        sigma: float | None = None,
    ) -> Any:
        if not isinstance(value, mx.array) or stage in ("denoiser_input", "denoised"):
            return value
        label = self._label(stage, name, step)
        facts: list[str] = []
        if "timing" in self._modes and stage not in ("network_output", "prediction"):
            facts.append(f"{self._timed(stage, value) * 1000:9.2f} ms")
        if "shapes" in self._modes and stage != "prediction":
            facts.append(f"{tuple(value.shape)} {str(value.dtype).removeprefix('mlx.core.')}")
        if facts:
            self._report(f"{label:<32} {'  '.join(facts)}")
        if "nan" in self._modes:
            self._require_finite(label, name, value)
        return value

    def _timed(self, stage: Stage, value: mx.array) -> float:
        """Seconds since the last value."""
        steps = self._steps[-1] if self._steps else []
        if stage != "latents" or not steps:
            mx.eval(value)  # MLX is lazy: without this the time would be counted elsewhere
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._seconds.setdefault(stage, []).append(seconds)
        if stage == "latents":
            steps.append(seconds)
        return seconds

    def summary(self, load_seconds: float) -> list[str]:
        """With timing: where the seconds of the run went, and the peak of memory."""
        if "timing" not in self._modes:
            return []
        groups = {
            "text": ("encoder_output", "conditioning"),
            "steps": ("latents", "vae_input"),  # the decoder's input waits for the last step
            "decode": ("image",),
        }
        totals = {
            title: sum(sum(self._seconds.get(stage, ())) for stage in stages)
            for title, stages in groups.items()
        }
        # The second is only handed over while the first has been waited for.
        later = [seconds for steps in self._steps for seconds in steps[2:]]
        per_step = ""
        if self._steps and self._steps[0]:
            per_step = f" ({sum(map(len, self._steps))}, the first {self._steps[0][0]:.3g} s"
            per_step += f", median {median(later):.3g} s)" if later else ")"
        return [
            f"load {load_seconds:.2f} s, text {totals['text']:.2f} s, "
            f"steps {totals['steps']:.2f} s{per_step}, decode {totals['decode']:.2f} s",
            f"peak memory {mx.get_peak_memory() / 2**20:,.0f} MiB (MLX arrays)",
        ]

    def _label(self, stage: Stage, name: str, step: int | None) -> str:
        words = {"network_output": self._network, "encoder_output": "", "image": "vae output"}
        label = f"{words.get(stage, stage.replace('_', ' '))} {name}".strip()
        return label if step is None else f"step {step} {label}"

    def _require_finite(self, label: str, name: str, value: mx.array) -> None:
        if name != BOTH_PROMPTS:
            require_finite(label, value)
            return
        half = value.shape[0] // 2  # say which prompt's half is wrong
        for prompt, rows in ("uncond", value[:half]), ("cond", value[half:]):
            require_finite(label.replace(name, prompt), rows)


def require_finite(label: str, array: mx.array) -> None:
    """Raise NotFiniteError with counts and statistics when `array` holds NaN or Inf."""
    if mx.isfinite(array).all().item():
        return
    values = np.array(array.astype(mx.float32))
    nan, inf = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    raise NotFiniteError(
        f"{label}: {nan} of {values.size} values are NaN, {inf} are Inf; {_statistics(values)}. "
        "Everything checked before this was finite."
    )


def _statistics(values: NDArray[np.float32]) -> str:
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return "none is finite"
    return (
        f"of the finite ones min {finite.min():.4g}, max {finite.max():.4g}, "
        f"mean {finite.mean():.4g}, std {finite.std():.4g}"
    )
