"""What is known of a sampler beside its code."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lydite.core.errors import InputError
from lydite.sampling.law import Law
from lydite.sampling.steps import Denoise, Noise, Step


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
    noise: Literal["none", "stream", "path"] = "none"  # "path": a Brownian one
    laws: tuple[str, ...] = ("ve", "flow")
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
        self.check_law(denoise.law)
        if self.noise != "none":
            if noise is None:
                raise InputError(f"sampler {self.name} adds noise; pass a source of it.")
            options["noise"] = noise
        return self.sample(denoise, x, sigmas, **options)

    def check_law(self, law: Law) -> None:
        if law.name not in self.laws:
            kinds = {"ve": "eps and v", "flow": "flow"}
            raise InputError(
                f"sampler {self.name} is for {kinds[self.laws[0]]} models; this is a "
                f"{kinds[law.name]} model. See `lydite sampler list`."
            )
