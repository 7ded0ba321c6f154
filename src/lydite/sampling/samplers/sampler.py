"""What is known of a sampler beside its code."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from lydite.core.errors import InputError
from lydite.sampling.noise_model import NoiseModel
from lydite.sampling.steps import Denoise, Noise, Step

NoiseKind = Literal["none", "stream", "path"]  # "path": a Brownian one


@dataclass(frozen=True)
class Sampler:
    """A sampler under its name; `sample` is a generator of steps over (denoise, x, sigmas)."""

    name: str
    sample: Callable[..., Iterator[Step[Any]]]
    about: str  # in one line
    source: str  # where the method is from: the paper, or the program that made it known
    proofs: tuple[str, ...]  # "k-diffusion", "diffusers DDIMScheduler", "identity", "order", …
    order: float | None = None  # of convergence, where it solves an ODE
    calls: int = 1  # of the network in a step
    noise: NoiseKind = "none"  # what it adds as it stands
    noise_with_eta: bool = False  # adds none as it stands, but a stream's where `eta` is above 0
    noise_models: tuple[str, ...] = ("ve", "flow")
    pair: bool = False  # needs the unconditional prediction beside the guided one

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
        return self.sample(denoise, x, levels, **options)

    def noise_for(self, options: Mapping[str, Any]) -> NoiseKind:
        """What it adds with these options."""
        return "stream" if self.noise_with_eta and options.get("eta") else self.noise

    @property
    def options(self) -> dict[str, Any]:
        """What can be chosen, each with its default; `noise` is no choice but a source."""
        parameters = inspect.signature(self.sample).parameters.values()
        named = (each for each in parameters if each.kind is each.KEYWORD_ONLY)
        return {each.name: each.default for each in named if each.name != "noise"}

    def check_noise_model(self, model: NoiseModel) -> None:
        if model.name not in self.noise_models:
            kinds = {"ve": "eps and v", "flow": "flow"}
            raise InputError(
                f"sampler {self.name} is for {kinds[self.noise_models[0]]} models; this is a "
                f"{kinds[model.name]} model. See `lydite sampler list`."
            )

    def check_options(self, options: Mapping[str, Any]) -> None:
        known = self.options
        for name in options:
            if name not in known:
                raise InputError(
                    f"sampler {self.name} has no option {name!r:.60}; it has "
                    f"{', '.join(known) or 'none'}."
                )

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
