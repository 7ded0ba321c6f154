"""Denoisers that need no network: the exact answer for data whose distribution is known.

They run on arrays of any library that `xp` names; a wrong sampler gives other numbers on them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from lydite.sampling.sampler_types import VE, NoiseModel


@dataclass(frozen=True)
class Zero:
    """All data is 0."""

    noise_model: NoiseModel = VE

    def __call__(self, x: Any, sigma: float) -> Any:
        return x * 0.0


@dataclass(frozen=True)
class Identity:
    """Nothing is noise: every step leaves x as it is, under the noise model `ve`."""

    noise_model: NoiseModel = VE

    def __call__(self, x: Any, sigma: float) -> Any:
        return x


@dataclass(frozen=True)
class Gaussian:
    """Data drawn from N(mean, spread²), each value for itself."""

    mean: float = 0.3
    spread: float = 0.5
    noise_model: NoiseModel = VE

    def __call__(self, x: Any, sigma: float) -> Any:
        alpha, data, noise = self.noise_model.alpha(sigma), self.spread**2, sigma**2
        return (x * (data * alpha) + noise * self.mean) / (data * alpha**2 + noise)

    def follow(self, x: Any, sigma: float, sigma_next: float) -> Any:
        """Where the ODE takes x from one sigma to another: exact, whatever the steps."""
        alpha, alpha_next = self.noise_model.alpha(sigma), self.noise_model.alpha(sigma_next)
        ratio = self._width(sigma_next) / self._width(sigma)
        return (x - alpha * self.mean) * ratio + alpha_next * self.mean

    def _width(self, sigma: float) -> float:
        return math.hypot(self.noise_model.alpha(sigma) * self.spread, sigma)


@dataclass(frozen=True)
class Mixture:
    """Data drawn from several narrow Gaussians, equally likely: the posterior is not linear."""

    means: Sequence[float] = (-0.8, 0.6)
    spread: float = 0.1
    noise_model: NoiseModel = VE
    xp: ModuleType = np

    def __call__(self, x: Any, sigma: float) -> Any:
        alpha = self.noise_model.alpha(sigma)
        width = (alpha * self.spread) ** 2 + sigma**2
        logits = [(x - alpha * mean) ** 2 * (-0.5 / width) for mean in self.means]
        top = logits[0]
        for each in logits[1:]:
            top = self.xp.maximum(top, each)
        shares = [self.xp.exp(each - top) for each in logits]
        parts = [Gaussian(mean, self.spread, self.noise_model)(x, sigma) for mean in self.means]
        mixed, total = shares[0] * parts[0], shares[0]
        for share, part in zip(shares[1:], parts[1:], strict=True):
            mixed, total = mixed + share * part, total + share
        return mixed / total
