"""What a seed means: torch's CPU generator, or MLX's own; and what a sampler's noise is."""

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError, shown
from lydite.sampling.brownian import BrownianNoise
from lydite.sampling.noise import STREAMS, NoiseStreams, StreamRule
from lydite.sampling.program_conventions import Convention, uses_brownian_path
from lydite.sampling.registry import NoiseKind
from lydite.sampling.sampler_types import Noise

Shape = tuple[int, ...]  # (C, …), torch's order; arrays are (B, …, C) in float32


class RunNoise(Protocol):
    """The noise of one batch: `first` for the latents, then calls for the sampler's steps."""

    def first(self) -> mx.array: ...
    def __call__(self, sigma: float, sigma_next: float, /) -> mx.array: ...


def torch_noise(
    seeds: Sequence[int], shape: Shape, rule: StreamRule = STREAMS["lydite"]
) -> RunNoise:
    """As diffusers draws with one CPU generator per image, or as the rule has it."""
    return NoiseStreams(seeds, shape, _channels_last, rule)


class MLXNoise:
    """From `mx.random`, one key per image, or one for all."""

    def __init__(
        self, seeds: Sequence[int], shape: Shape, rule: StreamRule = STREAMS["lydite"]
    ) -> None:
        self._seeds, self._shape, self._rule = seeds, shape, rule
        self._keys = self._fresh(0)
        self._moved = rule.delta is None

    def first(self) -> mx.array:
        images = len(self._seeds) // len(self._keys)  # of one key
        normals: list[mx.array] = []
        for index, key in enumerate(self._keys):
            self._keys[index], use = mx.random.split(key)
            normals.append(mx.random.normal((images, *self._shape), key=use))
        return mx.moveaxis(mx.concatenate(normals), 1, -1)

    def __call__(self, sigma: float, sigma_next: float) -> mx.array:
        if not self._moved:
            self._keys, self._moved = self._fresh(self._rule.delta or 0), True
        return self.first()

    def _fresh(self, delta: int) -> list[mx.array]:
        seeds = self._seeds if self._rule.batch == "image" else self._seeds[:1]
        return [mx.random.key((seed + delta) % 2**64) for seed in seeds]


def whole_seeds(seeds: Iterable[int]) -> tuple[int, ...]:
    """Seeds as Python's whole numbers, which may be NumPy's; InputError."""
    expected = "expected whole numbers in a list, as [1, 2]"
    if isinstance(seeds, str | bytes) or not isinstance(seeds, Iterable):
        raise InputError(f"seeds is {shown(seeds)}; {expected}, found {type(seeds).__name__}.")
    found = list(seeds)
    for seed in found:
        if not isinstance(seed, Integral) or isinstance(seed, bool):
            raise InputError(f"seeds has {shown(seed)}; {expected}, found {type(seed).__name__}.")
        if not -(2**63) <= int(seed) < 2**64:
            raise InputError(f"seeds has {seed}; expected -2**63 to 2**64 - 1.")
    return tuple(int(seed) for seed in found)


NOISES: dict[str, Callable[[Sequence[int], Shape, StreamRule], RunNoise]] = {
    "torch": torch_noise,
    "mlx": MLXNoise,
}


def sampler_noise(
    kind: NoiseKind, convention: Convention, seeds: Sequence[int], shape: Shape, run: RunNoise
) -> Noise[mx.array] | None:
    """What a sampler adds: nothing, a Brownian path of each image, or what comes next of `run`."""
    if kind == "none":
        return None
    if uses_brownian_path(convention, kind):
        return BrownianNoise(seeds, shape, _channels_last)
    return run


def _channels_last(normals: NDArray[np.float32]) -> mx.array:
    return mx.array(np.moveaxis(normals, 1, -1))
