"""A sampler: its function, and what is known of it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from lydite.core.errors import InputError
from lydite.sampling.registry import Method
from lydite.sampling.steps import Denoise, Noise, Step

NoiseKind = Literal["none", "stream", "path"]  # "path": a Brownian one


@dataclass(frozen=True)
class Sampler(Method):
    """A sampler; its function is a generator of steps over (denoise, x, sigmas)."""

    order: float | None = None  # of convergence, where it solves an ODE
    calls: int = 1  # of the network in a step
    noise: NoiseKind = "none"  # what it adds as it stands
    noise_with_eta: bool = False  # adds none as it stands, but a stream's where `eta` is above 0
    pair: bool = False  # needs the unconditional prediction beside the guided one
    note: str = ""  # what its users should know

    kind = "sampler"

    def run(
        self,
        denoise: Denoise[Any],
        x: Any,
        sigmas: Sequence[float],
        *,
        noise: Noise[Any] | None = None,
        **options: Any,
    ) -> Iterator[Step[Any]]:
        """The steps; `noise` is left out for a sampler that adds none."""
        self.check_noise_model(denoise.noise_model)
        self.check_options(options)
        levels = self._levels(sigmas)
        if self.noise_for(options) != "none":
            if noise is None:
                raise InputError(f"sampler {self.name} adds noise; pass a source of it.")
            options["noise"] = noise
        return self.function(denoise, x, levels, **options)

    def noise_for(self, options: Mapping[str, Any]) -> NoiseKind:
        """What it adds with these options."""
        return "stream" if self.noise_with_eta and options.get("eta") else self.noise

    def _levels(self, sigmas: Sequence[float]) -> list[float]:
        """The sigmas as they can be walked.

        The last may repeat the one before it, as in some of diffusers' schedules. Elsewhere such a
        step is refused: a method that looks back would divide by its width.
        """
        levels = [float(sigma) for sigma in sigmas]
        if len(levels) < 2:
            raise InputError(f"sampler {self.name}: {len(levels)} sigmas; a step needs two.")
        for index, sigma in enumerate(levels):
            if not 0 <= sigma < math.inf:
                raise InputError(
                    f"sampler {self.name}: sigma {index} is {sigma}; expected a finite number, 0 "
                    "or more."
                )
        for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
            if sigma == sigma_next and (index < len(levels) - 2 or index == 0 or sigma == 0):
                raise InputError(
                    f"sampler {self.name}: sigmas {index} and {index + 1} are both {sigma}; a step "
                    "must go somewhere. Drop one of the two."
                )
        return levels
