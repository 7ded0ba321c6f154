"""Mistakes inside a method: its memory of earlier steps, and how it weighs two slopes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lydite.conform.mistakes.mistake import Mistake
from lydite.conform.problem import noise_model_of
from lydite.conform.replay import Plan, restarted
from lydite.sampling.sampler_types import VE, NoiseModel, Step

# (denoised, its forerunners newest first, half of 1/r with r = h_last/h) -> the directed denoised
Extrapolate = Callable[[Any, list[Any], float], Any]
# (denoise, x, sigma, the next sigma) -> the slope at the end of a Heun step
SecondSlope = Callable[[Any, Any, float, float], Any]


def forgetful(plan: Plan) -> Plan | None:
    return restarted(plan)


@dataclass(frozen=True)
class _AsVe:
    """A denoiser of a flow model that says it is of one of the noise model ve."""

    inner: Any
    noise_model: NoiseModel = VE

    def __call__(self, x: Any, sigma: float) -> Any:
        return self.inner(x, sigma)

    def pair(self, x: Any, sigma: float) -> tuple[Any, Any]:
        return self.inner.pair(x, sigma)


def taken_for_ve(plan: Plan) -> Plan | None:
    """On the ODE another discretisation, with noise another process."""
    if plan.problem.noise_model != "flow":
        return None

    def method(denoise: Any, x: Any, sigmas: Any, noise: Any) -> Iterator[Step[Any]]:
        return plan.method(_AsVe(denoise), x, sigmas, noise)

    return replace(plan, method=method)


def two_step(extrapolate: Extrapolate, *, in_sigma: bool = False) -> Callable[[Plan], Plan | None]:
    """DPM-Solver++(2M) with another extrapolation of its two denoised images."""

    def apply(plan: Plan) -> Plan | None:
        if plan.problem.sampler != "dpmpp_2m":
            return None
        noise_model = noise_model_of(plan.problem)

        def method(denoise: Any, x: Any, sigmas: Any, noise: Any) -> Iterator[Step[Any]]:
            earlier: list[Any] = []
            for at in range(len(sigmas) - 1):
                sigma, after = float(sigmas[at]), float(sigmas[at + 1])
                denoised = denoise(x, sigma)
                directed = denoised
                if earlier and after > 0:
                    before = float(sigmas[at - 1])
                    lambdas = [noise_model.half_log_snr(each) for each in (before, sigma, after)]
                    places = [-before, -sigma, -after] if in_sigma else lambdas
                    half = (places[2] - places[1]) / (places[1] - places[0]) / 2
                    if math.isfinite(half) and half > 0:
                        directed = extrapolate(denoised, earlier, half)
                ratio = after / sigma
                x = x * ratio + directed * (
                    noise_model.alpha(after) - noise_model.alpha(sigma) * ratio
                )
                earlier = [denoised, *earlier]
                yield Step(at, sigma, after, x, denoised)

        return replace(plan, method=method)

    return apply


def heun_slopes(
    weigh: Callable[[Any, Any], Any],
    second_slope: SecondSlope = lambda denoise, x, sigma, after: (x - denoise(x, after)) / after,
) -> Callable[[Plan], Plan | None]:
    """Heun's step with other weights of its two slopes, or another second slope."""

    def apply(plan: Plan) -> Plan | None:
        if plan.problem.sampler != "heun" or plan.problem.options:
            return None

        def method(denoise: Any, x: Any, sigmas: Any, noise: Any) -> Iterator[Step[Any]]:
            for at in range(len(sigmas) - 1):
                sigma, after = float(sigmas[at]), float(sigmas[at + 1])
                denoised = denoise(x, sigma)
                slope = (x - denoised) / sigma
                ahead = x + slope * (after - sigma)
                if after > 0:
                    second = second_slope(denoise, ahead, sigma, after)
                    ahead = x + weigh(slope, second) * (after - sigma)
                x = ahead
                yield Step(at, sigma, after, x, denoised)

        return replace(plan, method=method)

    return apply


def _stale_sigma(denoise: Any, x: Any, sigma: float, after: float) -> Any:
    return (x - denoise(x, sigma)) / sigma


def _stale_denoised(denoise: Any, x: Any, sigma: float, after: float) -> Any:
    return (x - denoise(x, sigma)) / after


FIX_2M = (
    "D′ = (1 + 1/(2r))·D − 1/(2r)·D_last with r = h_last/h, h a step in λ = log(α/σ); "
    "then keep D as the next step's D_last."
)

HISTORY = (
    Mistake(
        "ve-form-on-flow",
        "takes the form for eps models of its method, on a flow model",
        "A flow latent is (1 − σ)·image + σ·noise: λ is ln((1 − σ)/σ), a step weighs the denoised "
        "with α = 1 − σ, and noise is added so that the rest is scaled down. ComfyUI's dpmpp_2m "
        "does without.",
        taken_for_ve,
    ),
    Mistake(
        "history-dropped",
        "forgets the steps before: every step is its method's first",
        "Keep what the last steps computed; a multistep method of order k needs k − 1 of them.",
        forgetful,
    ),
    Mistake(
        "history-not-updated",
        "keeps the first step's denoised as the last one for ever",
        FIX_2M,
        two_step(lambda now, earlier, half: now * (1 + half) - earlier[-1] * half),
    ),
    Mistake(
        "history-swapped",
        "has the new and the last denoised swapped",
        FIX_2M,
        two_step(lambda now, earlier, half: earlier[0] * (1 + half) - now * half),
    ),
    Mistake(
        "step-ratio-inverted",
        "divides the steps the other way round: r = h/h_last",
        FIX_2M,
        two_step(lambda now, earlier, half: now + (now - earlier[0]) * (0.25 / half)),
    ),
    Mistake(
        "step-ratio-not-halved",
        "extrapolates by 1/r instead of 1/(2r)",
        FIX_2M,
        two_step(lambda now, earlier, half: now + (now - earlier[0]) * (2 * half)),
    ),
    Mistake(
        "step-ratio-in-sigma",
        "measures steps in sigma instead of log(α/σ)",
        FIX_2M,
        two_step(lambda now, earlier, half: now + (now - earlier[0]) * half, in_sigma=True),
    ),
    Mistake(
        "step-ratio-left-out",
        "takes all steps as equal: r = 1",
        FIX_2M,
        two_step(lambda now, earlier, half: now + (now - earlier[0]) * 0.5),
    ),
    Mistake(
        "history-sign",
        "adds the last denoised instead of subtracting it",
        FIX_2M,
        two_step(lambda now, earlier, half: now * (1 - half) + earlier[0] * half),
    ),
    Mistake(
        "slopes-not-averaged",
        "adds Heun's two slopes without halving",
        "x + (d + d₂)/2 · Δσ.",
        heun_slopes(lambda first, second: first + second),
    ),
    Mistake(
        "second-slope-alone",
        "takes Heun's second slope alone",
        "x + (d + d₂)/2 · Δσ.",
        heun_slopes(lambda first, second: second),
    ),
    *(
        Mistake(
            "second-call-at-first-sigma",
            "calls the network a second time at the step's first sigma and timestep",
            "The second call of a Heun step is at the next sigma: x, sigma, timestep and c_in all "
            "change.",
            heun_slopes(lambda first, second: (first + second) * 0.5, slope),
        )
        for slope in (_stale_sigma, _stale_denoised)
    ),
)
