"""How far a sampler ends from the exact answer, on data whose distribution is known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lydite.conform.make_problem import DENOISERS
from lydite.conform.problem import Array
from lydite.core.errors import InputError
from lydite.sampling.registry import find_sampler, find_schedule
from lydite.sampling.sampler_types import Step
from lydite.sampling.schedules.schedule import ModelSigmas

FINE = 4096  # steps of Heun's method that stand for the exact answer where there is no formula


@dataclass(frozen=True)
class WithPair:
    """An analytic denoiser whose unconditional answer is the same."""

    inner: Any

    @property
    def noise_model(self) -> Any:
        return self.inner.noise_model

    def __call__(self, x: Any, sigma: float) -> Any:
        return self.inner(x, sigma)

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        denoised = self.inner(x, sigma)
        return denoised, denoised


def denoiser_for(name: str, model: ModelSigmas) -> Any:
    """The named analytic denoiser under the model's noise model."""
    if name not in DENOISERS:
        raise InputError(f"denoiser is {name!r:.60}; expected one of {', '.join(DENOISERS)}.")
    return WithPair(DENOISERS[name].under(model.noise_model))


def trajectory(
    sampler: str, denoise: Any, x: Array, sigmas: Sequence[float], options: dict[str, Any]
) -> list[Step[Any]]:
    """The steps of a sampler; its noise, if it adds any, is always the same."""
    found = find_sampler(sampler)
    random = np.random.RandomState(0)

    def noise(sigma: float, sigma_next: float) -> Array:
        return random.standard_normal(x.shape)

    given = noise if found.noise != "none" else None
    return list(found.run(denoise, x, sigmas, noise=given, **options))


def exact(denoise: WithPair, x: Array, sigmas: Sequence[float]) -> Array:
    """Where the ODE leads from the first sigma to the last."""
    first, last = float(sigmas[0]), float(sigmas[-1])
    follow = getattr(denoise.inner, "follow", None)
    if follow is not None:
        return follow(x, first, last)
    # even in log sigma, so that the small ones are seen; the way from the last to 0 is a line
    grid = np.geomspace(first, max(last, 1e-4), FINE).tolist()
    path = [*grid, 0.0] if last == 0 else grid
    return trajectory("heun", denoise, x, path, {})[-1].x


def quiet_options(sampler: str) -> dict[str, Any]:
    """What makes a sampler add no noise, or an error when nothing does."""
    found = find_sampler(sampler)
    if found.noise == "none":
        return {}
    if "eta" not in found.options:
        raise InputError(
            f"sampler {sampler} always adds noise, so no run of it has an exact end to be held to."
        )
    return {"eta": 0.0}


def errors(
    sampler: str, schedule: str, model: ModelSigmas, denoiser: str, counts: Sequence[int], x: Array
) -> list[float]:
    """The largest error at the last sigma above 0, for each number of steps.

    The step from there to 0 is of order 1 in every method and would hide the rest. A sampler with
    eta runs with 0.
    """
    denoise, options = denoiser_for(denoiser, model), quiet_options(sampler)
    kind, result = find_schedule(schedule), []
    find_sampler(sampler).check_noise_model(model.noise_model)
    ends: dict[tuple[float, float], Array] = {}
    for count in counts:
        sigmas = kind.make(count + 1, model).sigmas.tolist()[:-1]  # the step to 0 is left out
        start, way = x * sigmas[0], (sigmas[0], sigmas[-1])
        if way not in ends:
            ends[way] = exact(denoise, start, way)
        end = trajectory(sampler, denoise, start, sigmas, options)[-1].x
        result.append(float(np.abs(end - ends[way]).max()))
    return result
