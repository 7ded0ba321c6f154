"""Guidance: two predictions made into one, and how strongly at each sigma."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import numpy as np

from lydite.core.errors import InputError
from lydite.sampling.noise_model import NoiseModel
from lydite.sampling.steps import A, Denoise

# How strong guidance is at a sigma; 1 is the prompt alone, and needs no second prediction.
Strength = Callable[[float], float]


def cfg(uncond: A, cond: A, scale: float) -> A:
    """Classifier-free guidance, Ho and Salimans (2022): 0 is uncond, 1 is cond, more goes beyond.

    The weight is diffusers' `guidance_scale`; the paper's own w is `scale - 1`.
    """
    return uncond + (cond - uncond) * scale


def cfg_rescale(guided: Any, cond: Any, phi: float) -> Any:
    """Lin et al. (2023), eq. 15 and 16: `phi` of the way back to the spread of `cond`.

    The spread is that of each image, over all axes but the first. It matters what is rescaled: the
    paper and diffusers take the network's output, ComfyUI the same as v.
    """
    return guided * (_spread(cond) / _spread(guided) * phi + (1 - phi))


def _spread(x: Any) -> Any:
    axes = tuple(range(1, len(x.shape)))
    away = x - x.mean(axis=axes, keepdims=True)
    # Without the small number a constant image would be 0/0.
    return ((away * away).mean(axis=axes, keepdims=True) + 1e-20) ** 0.5


def constant(scale: float) -> Strength:
    """The same guidance at every sigma."""
    return lambda sigma: scale


@dataclass(frozen=True)
class Interval:
    """Guidance where low < σ ≤ high, Kynkäänniemi et al. (2024); elsewhere the prompt alone."""

    scale: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise InputError(
                f"guidance interval is {self.low} to {self.high}; expected two rising sigmas."
            )

    def __call__(self, sigma: float) -> float:
        return self.scale if self.low < sigma <= self.high else 1.0


@dataclass(frozen=True)
class PerStep:
    """One scale for each step; a sigma between two grid points belongs to the step that began."""

    scales: Sequence[float]
    sigmas: Sequence[float]  # the schedule's, falling, one more than there are scales

    def __post_init__(self) -> None:
        if len(self.sigmas) != len(self.scales) + 1:
            raise InputError(
                f"guidance table has {len(self.scales)} scales for {len(self.sigmas) - 1} steps; "
                "give one for each."
            )

    def __call__(self, sigma: float) -> float:
        step = int(np.searchsorted(-np.asarray(self.sigmas), -sigma, side="right")) - 1
        return float(self.scales[min(max(step, 0), len(self.scales) - 1)])


def over_steps(
    sigmas: Sequence[float],
    scale: float,
    *,
    scales: Sequence[float] = (),
    share: tuple[float, float] = (0.0, 1.0),
) -> Strength:
    """Guidance over a schedule: one scale or one for each step, from one share of it to another.

    Of n steps, counted from 0, those are guided for which share[0] ≤ step/n < share[1].
    """
    steps, (first, last) = len(sigmas) - 1, share
    if not 0 <= first < last <= 1:
        raise InputError(
            f"guidance interval is {first:g} to {last:g}; expected two rising shares of the steps, "
            "from 0 to 1."
        )
    if not scales and share == (0.0, 1.0):
        return constant(scale)
    table = PerStep(tuple(scales) or (scale,) * steps, sigmas)
    guided = [first <= step / steps < last for step in range(steps)]
    if not any(guided):
        raise InputError(
            f"guidance interval {first:g} to {last:g} holds none of the {steps} steps; "
            f"a step is {1 / steps:.3g} of them."
        )
    within = [each if on else 1.0 for each, on in zip(table.scales, guided, strict=True)]
    return PerStep(within, sigmas)


class Prompted(Protocol[A]):
    """A network with two prompts."""

    @property
    def noise_model(self) -> NoiseModel: ...
    def cond(self, x: A, sigma: float, /) -> A: ...
    def both(self, x: A, sigma: float, /) -> tuple[A, A]:
        """(uncond, cond), perhaps in one call of the network."""
        ...


@dataclass(frozen=True)
class TwoPrompts(Generic[A]):
    """Two denoisers, one with the prompt and one without."""

    with_prompt: Denoise[A]
    without: Denoise[A]

    @property
    def noise_model(self) -> NoiseModel:
        return self.with_prompt.noise_model

    def cond(self, x: A, sigma: float) -> A:
        return self.with_prompt(x, sigma)

    def both(self, x: A, sigma: float) -> tuple[A, A]:
        return self.without(x, sigma), self.with_prompt(x, sigma)


@dataclass(frozen=True)
class Guided(Generic[A]):
    """Classifier-free guidance as a denoiser; `pair` is what CFG++ asks, Chung et al. (2024).

    Guidance on the denoised image is guidance on the network's output: both are linear in it.
    """

    prompted: Prompted[A]
    strength: Strength
    rescale: float = 0.0  # phi of `cfg_rescale`, on the denoised image

    @property
    def noise_model(self) -> NoiseModel:
        return self.prompted.noise_model

    def __call__(self, x: A, sigma: float) -> A:
        if self.strength(sigma) == 1:
            return self.prompted.cond(x, sigma)
        return self.pair(x, sigma)[0]

    def pair(self, x: A, sigma: float) -> tuple[A, A]:
        """(guided, unconditional)."""
        uncond, cond = self.prompted.both(x, sigma)
        guided = cfg(uncond, cond, float(self.strength(sigma)))
        return (cfg_rescale(guided, cond, self.rescale) if self.rescale else guided), uncond


@dataclass(frozen=True)
class Distilled(Generic[A]):
    """A model that was taught guidance and is told how much (FLUX dev): one prediction, no pair."""

    denoise: Callable[[A, float, float], A]  # (x, sigma, guidance) → denoised
    strength: Strength
    noise_model: NoiseModel

    def __call__(self, x: A, sigma: float) -> A:
        return self.denoise(x, sigma, float(self.strength(sigma)))
