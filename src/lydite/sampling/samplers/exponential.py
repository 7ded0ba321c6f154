"""What exponential integrators share: the linear part of a step in λ is solved exactly.

Reference: Hochbruck and Ostermann (2010) for the φ functions; with data prediction and noise,
Gonzalez et al. (2023), arXiv 2305.14267. h is the growth of λ over a step, η the share of noise.
"""

import math
from collections.abc import Iterable

from lydite.sampling.noise_model import NoiseModel
from lydite.sampling.steps import A


def carried(
    model: NoiseModel, x: A, denoised: A, sigma: float, sigma_to: float, eta: float = 0.0
) -> A:
    """x at `sigma_to` if `denoised` stayed what it is, by the SDE's drift; η = 0 is the ODE."""
    ratio = sigma_to / sigma
    keep = ratio * fall(model, sigma, sigma_to) ** eta
    return x * keep + denoised * (model.alpha(sigma_to) - model.alpha(sigma) * keep)


def fall(model: NoiseModel, sigma: float, sigma_to: float) -> float:
    """exp(−h): 0 from pure noise and to no noise, where h has no end."""
    return sigma_to * model.alpha(sigma) / (sigma * model.alpha(sigma_to))


def slope_weight(h: float) -> float:
    """h·φ₂(−h) = 1 − φ₁(−h): what the slope of the denoised counts over a step of length h."""
    if h < 1e-5:  # the difference would lose half of its digits
        return h / 2 - h * h / 6
    return 1 + math.expm1(-h) / h


def finite_start(model: NoiseModel, sigmas: Iterable[float], near_one: float) -> list[float]:
    """The sigmas, with `near_one` for the pure noise a flow starts from: its λ is −∞.

    x is left as it is. ComfyUI's value is what the model's shift s makes of 0.9999: with u for it,
    s·u / (1 + (s − 1)·u).
    """
    levels = [float(sigma) for sigma in sigmas]
    if levels and model.alpha(levels[0]) <= 0:
        levels[0] = near_one
    return levels
