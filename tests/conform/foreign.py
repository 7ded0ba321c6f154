"""diffusers' schedulers on an image predictor that is a formula, and what the judge says of them.

Each is driven in its own coordinates and with its own prediction type; its latents are made ours by
a factor for each sigma. Noise it draws is recorded, and becomes the problem's.
"""

import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lydite.conform.judge import judge
from lydite.conform.make_problem import DENOISERS
from lydite.conform.problem import Problem
from lydite.conform.result import Verdict
from lydite.sampling.sampler_types import VE, NoiseModel

from .planted import written

SHAPE = (2, 3, 4)
START = np.random.default_rng(7).standard_normal(SHAPE)
Unit = Callable[[float], float]  # by how much our x is larger than their sample, at a sigma
Output = Callable[[Any, Any, float], Any]  # (sample, denoised, sigma) -> what the network predicts


def vp(sigma: float) -> float:
    return math.hypot(1.0, sigma)


def one(sigma: float) -> float:
    return 1.0


def image(sample: Any, denoised: Any, sigma: float) -> Any:
    return denoised


def eps_of_vp(sample: Any, denoised: Any, sigma: float) -> Any:
    return (sample * vp(sigma) - denoised) / sigma


def slope(sample: Any, denoised: Any, sigma: float) -> Any:
    """Noise under the noise model `ve`, a velocity under `flow`."""
    return (sample - denoised) / sigma


def downhill(sample: Any, denoised: Any, sigma: float) -> Any:
    return (denoised - sample) / sigma


@dataclass
class Driven:
    """One run of a scheduler: what a problem is made from, and x after each step."""

    sigmas: list[float]
    noise_model: NoiseModel = VE
    start: Any = None
    xs: list[Any] = field(default_factory=list)
    normals: list[Any] = field(default_factory=list)
    table: tuple[float, ...] = ()  # for samplers that look into it

    def verdict(self, sampler: str, denoiser: str, options: dict[str, Any]) -> Verdict:
        start = np.asarray(self.start, np.float64)
        problem = Problem(
            sampler,
            self.noise_model.name,
            "denoised",
            tuple(self.sigmas),
            (0.0,) * (len(self.sigmas) - 1),
            SHAPE,
            tuple((start / self.sigmas[0]).ravel().tolist()),
            tuple(start.ravel().tolist()),
            DENOISERS[denoiser],
            normals=tuple(tuple(each.ravel().tolist()) for each in self.normals),
            options=options,
            table=self.table,
        )
        return judge(problem, written(self.xs))


@dataclass
class Foreign:
    """A scheduler, and how to speak with it."""

    scheduler: Any
    denoiser: str
    noise_model: NoiseModel = VE
    unit: Unit = vp
    output: Output = image

    def drive(
        self,
        sigmas: Sequence[float],
        timesteps: Sequence[Any],
        calls: Sequence[tuple[float, int | None]] | None = None,
        step: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Driven:
        """Over `calls`: the sigma of each call of the network, and the step it ends, if any."""
        torch = pytest.importorskip("torch")
        levels = [float(sigma) for sigma in sigmas]
        calls = calls or [(sigma, index) for index, sigma in enumerate(levels[:-1])]
        denoise = DENOISERS[self.denoiser].under(self.noise_model)
        start = START * (levels[0] if self.noise_model == VE and self.unit is one else 1.0)
        sample = torch.from_numpy(start).float()
        run = Driven(levels, self.noise_model, sample.double().numpy() * self.unit(levels[0]))
        with drawing() as drawn, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's logarithm of a tensor
            for (sigma, ends), timestep in zip(calls, timesteps, strict=True):
                wide = sample.double()
                denoised = torch.from_numpy(denoise(wide.numpy() * self.unit(sigma), sigma))
                output = self.output(wide, denoised, sigma).float()
                self.scheduler.is_scale_input_called = True  # its warning that one forgot c_in
                stepped = (step or self.scheduler.step)(output, timestep, sample, **options)
                sample = stepped if isinstance(stepped, torch.Tensor) else stepped.prev_sample
                run.normals += drawn[-1:]  # some draw twice, and use the last
                drawn.clear()
                if ends is not None:
                    run.xs.append(sample.double().numpy() * self.unit(levels[ends + 1]))
        return run


class drawing:
    """Known noise in place of diffusers', written down as it is drawn."""

    def __init__(self) -> None:
        self.drawn: list[np.ndarray] = []
        self.random = np.random.default_rng(11)
        self.patch = pytest.MonkeyPatch()

    def draw(self, *_: Any, **__: Any) -> Any:
        torch = pytest.importorskip("torch")
        values = self.random.standard_normal(SHAPE).astype(np.float32)
        self.drawn.append(values.astype(np.float64))
        return torch.from_numpy(values)

    def __enter__(self) -> list[np.ndarray]:
        for name, module in list(sys.modules.items()):
            if name.startswith("diffusers.schedulers.") and hasattr(module, "randn_tensor"):
                self.patch.setattr(module, "randn_tensor", self.draw)
            if name.endswith(("dpmsolver_sde", "cosine_dpmsolver_multistep")):
                kind = module.BrownianTreeNoiseSampler
                self.patch.setattr(kind, "__init__", lambda *_, **__: None)
                self.patch.setattr(kind, "__call__", self.draw)
        return self.drawn

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def find(name: str) -> Any:
    """A scheduler's class; two want torchsde, whose noise is handed to them."""
    places = {
        "DPMSolverSDEScheduler": "scheduling_dpmsolver_sde",
        "CosineDPMSolverMultistepScheduler": "scheduling_cosine_dpmsolver_multistep",
    }
    if name not in places:
        return getattr(pytest.importorskip("diffusers"), name)
    sys.modules.setdefault("torchsde", ModuleType("torchsde"))
    return getattr(importlib.import_module(f"diffusers.schedulers.{places[name]}"), name)


def made(name: str, **config: Any) -> Any:
    pytest.importorskip("diffusers").utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated kinds of algorithms
        return find(name)(**config)


def respaced(scheduler: Any, *count: int, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's copy=
        scheduler.set_timesteps(*count, **options)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    return scheduler


def table(scheduler: Any) -> list[float]:
    """The sigma of each timestep of a model's training."""
    kept = scheduler.alphas_cumprod.double()
    return ((1 - kept) / kept).sqrt().tolist()


def two_calls(
    sigmas: Sequence[float], second: Callable[[float, float], float]
) -> Iterator[tuple[float, int | None]]:
    """The calls of a method that looks twice in each step but one to 0."""
    for index, (sigma, after) in enumerate(pairwise(sigmas)):
        if after > 0:
            yield sigma, None
            yield second(sigma, after), index
        else:
            yield sigma, index
