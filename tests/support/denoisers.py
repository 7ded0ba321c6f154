"""Denoisers made of plain functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lydite.sampling.sampler_types import VE, NoiseModel


@dataclass(frozen=True)
class FunctionDenoiser:
    """A function of (x, sigma) as a denoiser."""

    function: Callable[[Any, float], Any]
    noise_model: NoiseModel = VE

    def __call__(self, x: Any, sigma: float) -> Any:
        return self.function(x, sigma)
