"""Guidance: two predictions made into one, and how strongly at each sigma."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import numpy as np

from lydite.core.errors import InputError
from lydite.sampling.noise_model import NoiseModel
from lydite.sampling.prediction import Prediction
from lydite.sampling.steps import A

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


Guide = Callable[[Any, Any, float], Any]  # (uncond, cond, scale) → the output that is used


def constant(scale: float) -> Strength:
    """The same guidance at every sigma."""
    return lambda sigma: scale


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


class Network(Protocol[A]):
    """A network with its prompts; what is constant over the steps is inside."""

    def __call__(self, x: A, timestep: float, prompts: Sequence[int], /) -> Sequence[A]:
        """One output in float32 for each of the prompts, given by index."""
        ...


@dataclass(frozen=True)
class Guided(Generic[A]):
    """A network as a denoiser, with classifier-free guidance on its outputs.

    It has one prompt, or two: the negative one first. Where guidance is 1 or less the negative one
    is not run.
    """

    network: Network[A]  # is given x·c_in
    prediction: Prediction
    timestep_of: Callable[[float], float]  # of a schedule, or of the model's sigmas
    strength: Strength
    rescale: float = 0.0  # phi of `cfg_rescale`
    prompts: int = 2
    guide: Guide = cfg
    # Sees each guided output with its sigma, and returns the one to use.
    on_output: Callable[[A, float], A] | None = None

    @property
    def noise_model(self) -> NoiseModel:
        return self.prediction.noise_model

    def __call__(self, x: A, sigma: float) -> A:
        if self.prompts > 1 and self.strength(sigma) > 1:
            return self.pair(x, sigma)[0]
        (cond,) = self._outputs(x, sigma, (self.prompts - 1,))
        return self._denoised(x, cond, sigma)

    def pair(self, x: A, sigma: float) -> tuple[A, A]:
        """(guided, unconditional), as CFG++ needs; with one prompt both are the same."""
        if self.prompts == 1:
            denoised = self(x, sigma)
            return denoised, denoised
        uncond, cond = self._outputs(x, sigma, (0, 1))
        guided = self.guide(uncond, cond, float(self.strength(sigma)))
        if self.rescale:
            guided = cfg_rescale(guided, cond, self.rescale)
        denoised = self._denoised(x, guided, sigma)
        return denoised, self.prediction.denoised(x, uncond, sigma)

    def _outputs(self, x: A, sigma: float, prompts: tuple[int, ...]) -> Sequence[A]:
        return self.network(self.prediction.scaled(x, sigma), self.timestep_of(sigma), prompts)

    def _denoised(self, x: A, output: A, sigma: float) -> A:
        if self.on_output is not None:
            output = self.on_output(output, sigma)
        return self.prediction.denoised(x, output, sigma)
