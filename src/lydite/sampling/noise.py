"""Noise of a run: torch's CPU normals in NumPy, from one stream per image or one for the batch.

A seed means the same picture as in diffusers and ComfyUI. What A1111 and ComfyUI draw is known by
their behaviour.

Reference: torch 2.13.0, ATen/core/{MT19937RNGEngine,DistributionsHelper}.h and
ATen/native/cpu/DistributionTemplates.h. Torch has two float32 kernels that differ by up to 2.4e-6;
this is the one of x86 (AVX2 and AVX-512), on every machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError
from lydite.sampling.sampler_types import A

BLOCK = 16  # values torch makes at a time; a smaller array takes another path altogether


class TorchGenerator:
    """`torch.Generator("cpu")` after `manual_seed(seed)`: the same normals, call by call."""

    def __init__(self, seed: int):
        if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
            raise InputError(f"seed is {seed!r}; expected a whole number from -2**63 to 2**64 - 1.")
        # Torch starts its twister from the low 32 bits alone. RandomState is that same twister,
        # and NumPy has promised never to change its stream.
        self._twister = np.random.RandomState(seed % 2**32)
        self._spare: float | None = None  # the second of a scalar pair, waiting for its call

    def randn(self, shape: Sequence[int]) -> NDArray[np.float32]:
        """The next `torch.randn(shape, generator=…)`."""
        count = math.prod(shape)
        values = self._blocks(count) if count >= BLOCK else self._scalars(count)
        return values.reshape(tuple(shape))

    def _blocks(self, count: int) -> NDArray[np.float32]:
        values = np.empty(count, np.float32)
        whole = count - count % BLOCK
        values[:whole] = _box_muller(self._words(count)[:whole])
        if whole < count:  # torch redraws the last 16 values rather than fill a part of a block
            values[-BLOCK:] = _box_muller(self._words(BLOCK))
        return values

    def _scalars(self, count: int) -> NDArray[np.float32]:
        return np.array([self._scalar() for _ in range(count)], np.float32)

    def _scalar(self) -> float:
        if self._spare is not None:
            value, self._spare = self._spare, None
            return value
        high1, low1, high2, low2 = self._words(4).tolist()
        angle = 2 * math.pi * _uniform53(high1, low1)
        radius = math.sqrt(-2 * math.log1p(-_uniform53(high2, low2)))
        self._spare = radius * math.sin(angle)
        return radius * math.cos(angle)

    def _words(self, count: int) -> NDArray[np.uint32]:
        return self._twister.randint(0, 2**32, count, dtype=np.uint32)


def _box_muller(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Blocks of 8 radii and 8 angles made into 8 cosines and 8 sines.

    Each value is rounded to float32 where torch rounds it; log, cos and sin are computed in float64
    in between, so that the last bit does not depend on NumPy's own float32 kernels.
    """
    uniform = (words & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)  # exact
    uniform = uniform.reshape(-1, 2, BLOCK // 2)
    radius = np.sqrt((-2 * np.log(1 - uniform[:, 0], dtype=np.float64)).astype(np.float32))
    angle = uniform[:, 1] * np.float32(2 * math.pi)
    values = np.empty_like(uniform)
    values[:, 0] = radius * np.cos(angle, dtype=np.float64).astype(np.float32)
    values[:, 1] = radius * np.sin(angle, dtype=np.float64).astype(np.float32)
    return values.reshape(-1)


def _uniform53(high: int, low: int) -> float:
    return ((high << 32 | low) & (2**53 - 1)) * 2.0**-53


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
