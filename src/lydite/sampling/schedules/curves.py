"""Schedules that are curves between the highest and the lowest sigma of a model.

References: k-diffusion 0.1.1, sampling.py (karras, exponential, polyexponential, vp); diffusers
0.42.1 and A1111 (beta in sigma); A1111 and ComfyUI by their numbers (kl_optimal, laplace).
"""

import math

import numpy as np

from lydite.core.errors import InputError
from lydite.sampling.registry import ScheduleKind
from lydite.sampling.sampler_types import NoiseModel
from lydite.sampling.schedules.beta_quantile import beta_quantile
from lydite.sampling.schedules.schedule import Floats, ModelSigmas, Points


def karras(
    model: ModelSigmas,
    steps: int,
    *,
    rho: float = 7.0,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
    whole: bool = False,
) -> Points:
    """Even steps of σ^(1/ρ). `whole` rounds their timesteps: diffusers' KDPM2."""
    low, high = _ends(model, sigma_min, sigma_max)
    sigmas = karras_between(high, low, steps, rho)
    if not whole:
        return Points(sigmas)
    return Points(sigmas, np.array([round(model.timestep_of(float(each))) for each in sigmas]))


def exponential(
    model: ModelSigmas,
    steps: int,
    *,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
) -> Points:
    """Even steps of log σ."""
    low, high = _ends(model, sigma_min, sigma_max)
    return Points(exponential_between(high, low, steps))


def polyexponential(
    model: ModelSigmas,
    steps: int,
    *,
    rho: float = 1.0,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
) -> Points:
    """Even steps raised to ρ, of log σ; ρ = 1 is `exponential`."""
    low, high = _ends(model, sigma_min, sigma_max)
    ramp = np.linspace(1, 0, steps) ** rho
    return Points(_exact_ends(high, low, np.exp(ramp * math.log(high / low) + math.log(low))))


def beta_sigmas(
    model: ModelSigmas,
    steps: int,
    *,
    alpha: float = 0.6,
    beta: float = 0.6,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
) -> Points:
    """Sigmas at quantiles of a Beta distribution: `beta` of diffusers and A1111."""
    low, high = _ends(model, sigma_min, sigma_max)
    return Points(beta_between(high, low, steps, alpha, beta))


def kl_optimal(
    model: ModelSigmas,
    steps: int,
    *,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
) -> Points:
    """Even steps of atan σ; n sigmas, then 0."""
    low, high = _ends(model, sigma_min, sigma_max)
    return Points(_even_angles(high, low, steps))


def kl_optimal_a1111(
    model: ModelSigmas,
    steps: int,
    *,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
) -> Points:
    """Even steps of atan σ; n + 1 sigmas, the last of them sigma_min and not 0."""
    low, high = _ends(model, sigma_min, sigma_max)
    return Points(_even_angles(high, low, steps + 1), complete=True)


def linear_quadratic(
    model: ModelSigmas, steps: int, *, threshold: float = 0.025, linear_steps: int | None = None
) -> Points:
    """Even small steps that take `threshold` off by the middle, then a parabola added to them."""
    if steps == 1:
        return Points(model.levels[-1:])
    first = steps // 2 if linear_steps is None else linear_steps
    if not (0 < threshold < 1 and 1 <= first < steps):
        raise InputError(
            f"linear_quadratic: threshold {threshold}, linear_steps {first} of {steps}; expected "
            "a number between 0 and 1, and one linear step or more, but not all."
        )
    slope, at = threshold / first, np.arange(steps)
    bend = (1 - slope * steps) / (steps - first) ** 2  # so that the last step ends at 0
    taken = slope * at + bend * np.maximum(at - first, 0) ** 2
    return Points(model.levels[-1] * (1 - taken))


def vp(
    model: ModelSigmas,
    steps: int,
    *,
    beta_d: float = 19.9,
    beta_min: float = 0.1,
    eps_s: float = 1e-3,
) -> Points:
    """The continuous VP process of Song et al. (2021) in even steps of its time."""
    time = np.linspace(1, eps_s, steps)
    return Points(
        under(model.noise_model, np.sqrt(np.expm1(beta_d * time**2 / 2 + beta_min * time)))
    )


def laplace(
    model: ModelSigmas,
    steps: int,
    *,
    mu: float = 0.0,
    beta: float = 0.5,
    sigma_min: float | None = None,
    sigma_max: float | None = None,
) -> Points:
    """Quantiles of a Laplace distribution in −λ, cut off at the ends of the model."""
    low, high = _ends(model, sigma_min, sigma_max)
    share = np.linspace(0, 1, steps)
    inside = 1 - 2 * np.abs(0.5 - share) + 1e-5  # so that the ends are finite
    log_sigma = mu - beta * np.sign(0.5 - share) * np.log(inside)
    return Points(np.clip(under(model.noise_model, np.exp(log_sigma)), low, high))


def custom(model: ModelSigmas, steps: int, *, sigmas: list[float]) -> Points:
    """Sigmas as given, all n + 1 of them."""
    if len(sigmas) != steps + 1:
        raise InputError(
            f"custom: {len(sigmas)} sigmas make {len(sigmas) - 1} steps, not {steps}; give one "
            "more sigma than steps."
        )
    return Points(np.array(sigmas, np.float64), complete=True)


def karras_between(high: float, low: float, steps: int, rho: float = 7.0) -> Floats:
    top, bottom = high ** (1 / rho), low ** (1 / rho)
    return _exact_ends(high, low, (top + np.linspace(0, 1, steps) * (bottom - top)) ** rho)


def exponential_between(high: float, low: float, steps: int) -> Floats:
    return _exact_ends(high, low, np.exp(np.linspace(math.log(high), math.log(low), steps)))


def beta_between(
    high: float, low: float, steps: int, alpha: float = 0.6, beta: float = 0.6
) -> Floats:
    shares = (1 - np.linspace(0, 1, steps)).tolist()
    return low + np.array([beta_quantile(share, alpha, beta) for share in shares]) * (high - low)


def under(noise_model: NoiseModel, sigma: Floats) -> Floats:
    """A sigma of the noise model `ve` as the one with the same signal-to-noise ratio."""
    return sigma if noise_model.name == "ve" else sigma / (1 + sigma)


def _even_angles(high: float, low: float, count: int) -> Floats:
    return _exact_ends(high, low, np.tan(np.linspace(math.atan(high), math.atan(low), count)))


def _exact_ends(high: float, low: float, sigmas: Floats) -> Floats:
    """Without rounding at the ends: above 1 would be no flow sigma, above `low` no end."""
    sigmas[-1] = low
    sigmas[0] = high
    return sigmas


def _ends(
    model: ModelSigmas, sigma_min: float | None, sigma_max: float | None
) -> tuple[float, float]:
    low = float(model.levels[0]) if sigma_min is None else float(sigma_min)
    high = float(model.levels[-1]) if sigma_max is None else float(sigma_max)
    if not 0 < low < high < math.inf:
        raise InputError(f"sigma_min {low} and sigma_max {high}; expected 0 < min < max.")
    return low, high


_EULER = "diffusers EulerDiscreteScheduler"
METHODS = (
    ScheduleKind(
        "karras",
        karras,
        "even steps of σ^(1/7): small ones where there is little noise",
        "Karras et al. (2022), eq. 5",
        ("k-diffusion", "ComfyUI", "A1111", _EULER),
    ),
    ScheduleKind(
        "exponential",
        exponential,
        "even steps of log σ",
        "k-diffusion",
        ("k-diffusion", "ComfyUI", "A1111", _EULER),
    ),
    ScheduleKind(
        "polyexponential",
        polyexponential,
        "a power of even steps, of log σ",
        "k-diffusion",
        ("k-diffusion", "A1111"),
    ),
    ScheduleKind(
        "beta_sigmas",
        beta_sigmas,
        "sigmas at quantiles of Beta(0.6, 0.6)",
        "Lee et al. (2024), arXiv 2407.12173, as in diffusers and A1111",
        (_EULER, "A1111"),
    ),
    ScheduleKind(
        "kl_optimal",
        kl_optimal,
        "even steps of atan σ, then 0",
        "Sabour et al. (2024), arXiv 2404.14507, as in ComfyUI",
        ("ComfyUI",),
    ),
    ScheduleKind(
        "kl_optimal_a1111",
        kl_optimal_a1111,
        "even steps of atan σ that end at sigma_min, not at 0",
        "Sabour et al. (2024), arXiv 2404.14507, as in A1111",
        ("A1111",),
    ),
    ScheduleKind(
        "linear_quadratic",
        linear_quadratic,
        "half the steps for the first 2.5 %, then ever larger ones",
        "Genmo's Mochi",
        ("diffusers MochiPipeline", "ComfyUI"),
    ),
    ScheduleKind(
        "vp",
        vp,
        "the continuous VP process; starts at sigma 152",
        "Song et al. (2021), arXiv 2011.13456",
        ("k-diffusion",),
    ),
    ScheduleKind(
        "laplace",
        laplace,
        "quantiles of a Laplace distribution of log σ",
        "Hang et al. (2024), arXiv 2407.03297, as in ComfyUI",
        ("ComfyUI",),
        count="n, or fewer where the ends are cut off",
    ),
    ScheduleKind("custom", custom, "sigmas of your own", "you", ("identity",), needs=("sigmas",)),
)
