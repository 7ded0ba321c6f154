"""A sampler of the registry with its options bound, as a problem asks for it."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lydite.conform.network import place_of, sigma_of
from lydite.conform.problem import Problem
from lydite.core.errors import InputError
from lydite.sampling.samplers import find_sampler
from lydite.sampling.steps import Noise, Step

# (denoise, x, sigmas, noise) -> steps
Method = Callable[[Any, Any, Sequence[float], Noise[Any]], Iterator[Step[Any]]]

# Measured: the weights of diffusers' DEIS are differences of logarithms, divided by steps in them.
# In float32 that costs 2.2e-7 n over n steps in order 2 and 2.4e-9 n³ in order 3; twice that here.
# ComfyUI's deis, deis_tab here, integrates by ten thousand rectangles, and is off by 5e-5.
ROUGH = {("deis", 2): (5e-7, 1), ("deis", 3): (5e-9, 3), ("deis_tab", 3): (1e-4, 0)}
LOOKED_UP = ("middle", "below")  # options of pndm and tcd that are functions,
BY_TIMESTEP = "timestep"  # and their value for one that looks its sigma up in the table


@dataclass(frozen=True)
class Registered:
    """A method that is known by its name and options."""

    problem: Problem
    name: str
    options: dict[str, Any]

    def __post_init__(self) -> None:
        find_sampler(self.name)  # an error while the problem is read, not in the middle of a run

    def __call__(self, denoise: Any, x: Any, sigmas: Any, noise: Any) -> Iterator[Step[Any]]:
        sampler = find_sampler(self.name)
        given = noise if sampler.noise != "none" else None
        options = {
            key: looked_up(self.problem, self.name, key, self.options)
            if key in LOOKED_UP and isinstance(value, str)
            else value
            for key, value in self.options.items()
        }
        return sampler.run(denoise, x, sigmas, noise=given, **options)

    @property
    def roughness(self) -> float:
        """How far float32 may take a right one beyond what replays show, where that is much."""
        order: Any = self.options.get("order", find_sampler(self.name).options.get("order"))
        factor, power = ROUGH.get((self.name, order), (0.0, 1))
        return factor * self.problem.steps**power

    def nudged(self) -> tuple["Registered", ...]:
        """With eta a unit of float32 more and less.

        An ancestral step goes down to √(σ_next² − up²). Where up is nearly σ_next, float32 leaves
        little of the difference, as if eta were off by a unit: k-diffusion and diffusers are off by
        3e-4 in the first of two Karras steps of dpm_2_ancestral.
        """
        known = find_sampler(self.name).options
        if "eta" not in known:
            return ()
        eta = self.options.get("eta", known["eta"])
        return tuple(
            Registered(self.problem, self.name, {**self.options, "eta": eta * factor})
            for factor in (1 - 2.0**-23, 1 + 2.0**-23)
        )


def looked_up(problem: Problem, sampler: str, option: str, options: dict[str, Any]) -> Any:
    """diffusers' way to find a sigma that no step begins or ends at: by its timestep."""
    if options[option] != BY_TIMESTEP:
        raise InputError(f"{option} is {options[option]!r:.60}; expected {BY_TIMESTEP!r}.")
    if not problem.table:
        raise InputError(f"{option} = {BY_TIMESTEP} needs a model with a noise table, as sd15 has.")
    if option == "middle":
        return lambda sigma, after: sigma_of(
            problem, (place_of(problem, sigma) + place_of(problem, after)) / 2
        )
    share = 1 - options.get("gamma", find_sampler(sampler).options["gamma"])
    return lambda sigma: sigma_of(problem, math.floor(share * place_of(problem, sigma) + 1e-6))
