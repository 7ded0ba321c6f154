"""diffusers' schedulers driven by an analytic network, and our samplers on the same sigmas.

diffusers keeps VP latents, which are ours divided by √(1 + σ²); states are compared as diffusers
has them. Its tables are float32. In double they are widened after `set_timesteps`, so that what it
computes from them is too, and only the rounding of its own formulas is left out.
"""

import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lydite.sampling.registry import SAMPLERS
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel, Step
from support.denoisers import FunctionDenoiser

STEPS = (1, 2, 3, 4, 7, 20, 50)
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SHAPE = (2, 3, 4)
DRAWN = np.random.default_rng(3).standard_normal((2 * max(STEPS), *SHAPE))
MULTISTEP = "DPMSolverMultistepScheduler"
FLOW_SIGMAS = {"use_flow_sigmas": True, "flow_shift": 3.0}
ABOVE_ZERO = {"final_sigmas_type": "sigma_min"}
DOUBLE = {MULTISTEP: 1e-5}  # its float64 is float32 inside; the others stay within 1e-9
Sample = Callable[..., Iterator[Step[Any]]]


def size(noise_model: NoiseModel, sigma: float) -> float:
    """By how much our latents are larger than diffusers'."""
    return math.hypot(1.0, sigma) if noise_model == VE else 1.0


def denoised(x: Any, sigma: float) -> Any:
    """Bends with x and with sigma, and is no posterior of anything."""
    torch = pytest.importorskip("torch")
    return torch.tanh(x / math.hypot(1.0, sigma)) * 0.7 + 0.1


def drawn(index: int, precision: str) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(DRAWN[index]).to(getattr(torch, precision))


@dataclass
class Scheduler:
    """A scheduler of diffusers after `set_timesteps`, with noise that is known beforehand."""

    name: str
    steps: int
    precision: str
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
        diffusers.utils.logging.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "dpmsolver" is on its way out there, NumPy's copy=
            self.inner = getattr(diffusers, self.name)(**self.config)
            self.inner.set_timesteps(self.steps)
        if hasattr(self.inner, "set_begin_index"):
            self.inner.set_begin_index(0)
        for table in ("sigmas", "alphas_cumprod", "final_alpha_cumprod", "initial_alpha_cumprod"):
            if hasattr(self.inner, table):
                values = getattr(self.inner, table)
                setattr(self.inner, table, values.to(getattr(torch, self.precision)))
        self.module = importlib.import_module(type(self.inner).__module__)

    @property
    def timesteps(self) -> Any:
        return self.inner.timesteps

    @property
    def sigmas(self) -> list[float]:
        return self.inner.sigmas.tolist()

    @property
    def table(self) -> list[float]:
        """The sigma of each timestep of the model's training."""
        kept = self.inner.alphas_cumprod.double()
        return ((1 - kept) / kept).sqrt().tolist()

    def step(self, output: Any, index: int, sample: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if hasattr(self.module, "randn_tensor"):
                normals = drawn(index, self.precision)
                patch.setattr(self.module, "randn_tensor", lambda *_, **__: normals)
            timestep = self.timesteps[index]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy's logarithm of a tensor
                return self.inner.step(output, timestep, sample, **options).prev_sample

    def images(self, noise_model: NoiseModel, sigmas: Sequence[float], **options: Any) -> list[Any]:
        """x after each step, of a network that predicts the image."""
        sample, states = drawn(-1, self.precision), []
        for index, sigma in enumerate(sigmas[:-1]):
            output = denoised(sample * size(noise_model, sigma), sigma)
            sample = self.step(output, index, sample, **options)
            states.append(sample)
        return states

    def noises(self, sigmas: Sequence[float], **options: Any) -> list[Any]:
        """The same of one that predicts the noise, under the noise model `ve`."""
        sample, states = drawn(-1, self.precision), []
        for index, sigma in enumerate(sigmas):
            x = sample * size(VE, sigma)
            sample = self.step((x - denoised(x, sigma)) / sigma, index, sample, **options)
            states.append(sample)
        return states


def ours(
    sampler: str | Sample,
    noise_model: NoiseModel,
    sigmas: Sequence[float],
    precision: str,
    **options: Any,
) -> list[Any]:
    """The same of a sampler of ours."""
    begin = drawn(-1, precision) * size(noise_model, sigmas[0])
    sample = SAMPLERS[sampler].run if isinstance(sampler, str) else sampler
    denoise = options.pop("denoise", FunctionDenoiser(denoised, noise_model))
    steps = sample(denoise, begin, sigmas, **options)
    return [step.x / size(noise_model, step.sigma_next) for step in steps]


def noise(sigmas: Sequence[float], precision: str) -> Callable[[float, float], Any]:
    """The noise of a scheduler's step, for the step of ours from the same sigma."""
    return lambda sigma, _: drawn(list(sigmas).index(sigma), precision)


@dataclass(frozen=True)
class Case:
    """A scheduler with its settings, and the sampler of ours that should do the same."""

    scheduler: str
    config: dict[str, Any]
    sampler: str | Sample
    options: dict[str, Any]

    def __str__(self) -> str:
        config = "-".join(f"{key}={value}" for key, value in self.config.items())
        return f"{self.scheduler.removesuffix('Scheduler')}-{config}"

    def run(self, steps: int, precision: str, random: bool = False) -> tuple[list[Any], list[Any]]:
        """(ours, theirs): the states after each step."""
        noise_model = FLOW if "use_flow_sigmas" in self.config else VE
        config = SD | {"prediction_type": "sample"} | self.config
        scheduler = Scheduler(self.scheduler, steps, precision, config)
        options = dict(self.options)
        if random:
            options["noise"] = noise(scheduler.sigmas, precision)
        mine = ours(self.sampler, noise_model, scheduler.sigmas, precision, **options)
        return mine, scheduler.images(noise_model, scheduler.sigmas)


def distance(states: Sequence[Any], others: Sequence[Any]) -> float:
    """The largest difference, in units of the largest value where that is above 1."""
    assert len(states) == len(others)
    pairs = zip(states, others, strict=True)
    return max(
        float((a.double() - b.double()).abs().max() / max(1.0, float(b.abs().max())))
        for a, b in pairs
    )
