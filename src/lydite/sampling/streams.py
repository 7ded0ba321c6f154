"""Where the noise of a run comes from: one stream per image, or one for the whole batch.

The normals are those of torch's CPU generator (noise.py). A1111 and ComfyUI: by their behaviour.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError
from lydite.sampling.noise import TorchGenerator
from lydite.sampling.steps import A, Noise

# Makes (B, *shape) in float32 the caller's array, e.g. moves channels last and hands it to MLX.
ToArray = Callable[[NDArray[np.float32]], A]


@dataclass(frozen=True)
class StreamRule:
    """How a program draws noise.

    `batch`: "image", each image from a generator of its own, so that it does not depend on the
    others; or "whole", all images from the generator of the first seed. `delta`: the sampler's
    noise is drawn from fresh generators with the seed moved by so much; None goes on where the
    first noise ended.
    """

    batch: Literal["image", "whole"] = "image"
    delta: int | None = None


STREAMS = {
    "lydite": StreamRule(),
    "diffusers": StreamRule(),  # given a list of generators, as its documentation advises
    "k-diffusion": StreamRule(batch="whole"),
    "comfyui": StreamRule(batch="whole", delta=1),  # on a CPU; on a GPU it moves by 0
    "a1111": StreamRule(),
}


class NoiseStreams(Generic[A]):
    """The noise of one run: `first` for the latents, then calls for the sampler's steps.

    A call, (sigma, sigma_next), gives the next normals whatever the sigmas are.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        shape: Sequence[int],  # of one image, in torch's order: (C, h, w)
        to_array: ToArray[A],
        rule: StreamRule = STREAMS["lydite"],
    ) -> None:
        if not seeds:
            raise InputError("noise needs at least one seed.")
        self._seeds, self._shape, self._to_array, self._rule = tuple(seeds), shape, to_array, rule
        self._generators = self._fresh(0)
        self._moved = rule.delta is None

    def first(self) -> A:
        """The noise that the latents start as; to be drawn before the sampler's."""
        return self._draw()

    def __call__(self, sigma: float, sigma_next: float) -> A:
        if not self._moved:
            self._generators, self._moved = self._fresh(self._rule.delta or 0), True
        return self._draw()

    def _fresh(self, delta: int) -> list[TorchGenerator]:
        seeds = self._seeds if self._rule.batch == "image" else self._seeds[:1]
        return [TorchGenerator((seed + delta) % 2**64 if delta else seed) for seed in seeds]

    def _draw(self) -> A:
        if self._rule.batch == "whole":
            return self._to_array(self._generators[0].randn((len(self._seeds), *self._shape)))
        return self._to_array(np.stack([each.randn(self._shape) for each in self._generators]))


def recorded(normals: Sequence[A]) -> Noise[A]:
    """Normals given beforehand, one after another: so that two programs see the same ones."""
    waiting = iter(normals)
    return lambda sigma, sigma_next: next(waiting)
