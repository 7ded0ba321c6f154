"""k-diffusion's samplers against diffusers' schedulers, run here on the sigmas they make."""

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lydite.sampling.analytic import Mixture
from lydite.sampling.registry import SAMPLERS, make_schedule
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel
from lydite.sampling.samplers.algebra import ancestral_down
from lydite.sampling.schedules.flow import FlowSigmas

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),  # diffusers'
]

STEPS = (1, 2, 3, 4, 7, 20, 50)
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
KARRAS = SD | {"use_karras_sigmas": True}
DRAWN = np.random.default_rng(5).standard_normal((100, 2, 3, 4)).astype(np.float32)
SOFT = {"means": (-0.8, 0.6), "spread": 0.35}
Second = Callable[[float, float], float]  # where a step calls the network again


def middle(sigma: float, sigma_next: float) -> float:
    return math.sqrt(sigma * sigma_next)


def ancestral_middle(sigma: float, sigma_next: float) -> float:
    return middle(sigma, ancestral_down(VE, sigma, sigma_next, 1.0))


def end(sigma: float, sigma_next: float) -> float:
    return sigma_next


@dataclass(frozen=True)
class Case:
    scheduler: str
    sampler: str
    config: dict[str, Any] = field(default_factory=lambda: KARRAS)
    noise_model: NoiseModel = VE
    second: Second | None = None

    def __str__(self) -> str:
        spacing = "karras" if "use_karras_sigmas" in self.config else ""
        return f"{self.scheduler}-{spacing or self.noise_model.name}"


CASES = [
    Case("EulerDiscreteScheduler", "euler"),
    Case("EulerDiscreteScheduler", "euler", SD),
    Case("EulerAncestralDiscreteScheduler", "euler_ancestral", SD),
    Case("HeunDiscreteScheduler", "heun", second=end),
    Case("HeunDiscreteScheduler", "heun", SD, second=end),
    Case("KDPM2DiscreteScheduler", "dpm_2", second=middle),
    Case("KDPM2AncestralDiscreteScheduler", "dpm_2_ancestral", second=ancestral_middle),
    Case("LMSDiscreteScheduler", "lms"),
    Case("LMSDiscreteScheduler", "lms", SD),
    Case("DPMSolverSDEScheduler", "dpmpp_sde", second=middle),
    Case("FlowMatchEulerDiscreteScheduler", "euler", {"shift": 3.0}, FLOW),
    Case("FlowMatchHeunDiscreteScheduler", "heun", {"shift": 3.0}, FLOW, end),
    Case("LTXEulerAncestralRFScheduler", "euler_ancestral", {}, FLOW),
]


def find(name: str, patch: pytest.MonkeyPatch) -> Any:
    if name != "DPMSolverSDEScheduler":
        return getattr(importlib.import_module("diffusers"), name)
    patch.setitem(sys.modules, "torchsde", ModuleType("torchsde"))  # its noise is handed to it
    return importlib.import_module("diffusers.schedulers.scheduling_dpmsolver_sde").__dict__[name]


def calls(case: Case, levels: list[float]) -> Iterator[tuple[float, bool]]:
    """The sigma of each call of the network, and whether it is the last of its step."""
    for sigma, sigma_next in pairwise(levels):
        twice = case.second is not None and sigma_next > 0
        yield sigma, not twice
        if case.second is not None and sigma_next > 0:
            yield case.second(sigma, sigma_next), True


def theirs(case: Case, steps: int, patch: pytest.MonkeyPatch) -> tuple[list[float], list[Any]]:
    """The scheduler's sigmas, and x after each of its steps."""
    torch = pytest.importorskip("torch")
    kind = find(case.scheduler, patch)
    scheduler = kind(**case.config)
    if case.scheduler.startswith("LTX"):
        schedule = make_schedule("flow_shift", steps, FlowSigmas(3.0))
        scheduler.set_timesteps(sigmas=schedule.sigmas.tolist())
    else:
        scheduler.set_timesteps(steps)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    levels = [sigma for sigma, _ in groupby(scheduler.sigmas.tolist())]  # two-call ones repeat
    handed = (torch.from_numpy(each) for each in DRAWN[1:])
    module = importlib.import_module(kind.__module__)
    patch.setattr(module, "randn_tensor", lambda *_, **__: next(handed), raising=False)
    scheduler.noise_sampler = lambda *_: next(handed)
    denoise = Mixture(**SOFT, noise_model=case.noise_model, xp=torch)
    x, states = torch.from_numpy(DRAWN[0] * np.float32(levels[0])), []
    made = list(calls(case, levels))
    timesteps = scheduler.timesteps[: len(made)]  # LTX's end with a 0
    for (sigma, whole), timestep in zip(made, timesteps, strict=True):
        scheduler.is_scale_input_called = True  # its warning that one forgot c_in
        x = scheduler.step((x - denoise(x, sigma)) / sigma, timestep, x).prev_sample
        states += [x] if whole else []
    return levels, states


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_step_is_that_of_diffusers(case: Case, steps: int, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    levels, expected = theirs(case, steps, monkeypatch)
    assert len(levels) == steps + 1
    handed = (torch.from_numpy(each) for each in DRAWN[1:])
    start = torch.from_numpy(DRAWN[0] * np.float32(levels[0]))
    denoise = Mixture(**SOFT, noise_model=case.noise_model, xp=torch)
    ours = SAMPLERS[case.sampler].run(denoise, start, levels, noise=lambda *_: next(handed))
    # in float32 diffusers' √(σ² − up²) of two sigmas far apart keeps four digits
    bar = 1e-4 if case.sampler == "dpm_2_ancestral" and steps == 2 else 1e-5
    for step, wanted in zip(ours, expected, strict=True):
        scale = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(step.x, wanted, rtol=0, atol=bar * scale)


@pytest.mark.parametrize("shift", (1.0, 3.0))
@pytest.mark.parametrize("steps", (*STEPS, 1000))
def test_euler_follows_sd3_on_our_own_schedule(steps: int, shift: float):
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    denoise = Mixture(**SOFT, noise_model=FLOW, xp=torch)
    x = start = torch.from_numpy(DRAWN[0])
    schedule = make_schedule("sd3_diffusers", steps, FlowSigmas(shift))
    ours = SAMPLERS["euler"].run(denoise, start, schedule.sigmas.tolist())
    for timestep, step in zip(scheduler.timesteps, ours, strict=True):
        velocity = (x - denoise(x, step.sigma)) / step.sigma
        x = scheduler.step(velocity, timestep, x).prev_sample
        bar = 1e-6 if steps <= 50 else 1e-5  # float32 rounding adds up as √steps
        torch.testing.assert_close(step.x, x, rtol=0, atol=bar * max(1.0, float(x.abs().max())))
