"""A Brownian path over sigma: noise for SDE samplers that does not depend on how steps are cut.

W is a function of the seed and of sigma alone, found by bridges between ever closer points: Lévy's
construction; as a virtual tree, Li et al. (2020), arXiv 2001.01328. The points are halves of halves
of each octave [2ᵏ, 2ᵏ⁺¹], so that small sigmas are cut as finely as large ones. Only the difference
of two values means anything, so W is 0 at sigma 1.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError
from lydite.sampling.noise import ToArray
from lydite.sampling.sampler_types import A

LEVELS = 16  # bridges in an octave: points 1.5e-5 of it apart, straight lines between them
LOWEST = -20  # octave; from 2⁻²⁰ to 0 it is one step
HIGHEST = 20


class BrownianPath:
    """The path of one image: `at(b) − at(a)` has variance |b − a| in each value."""

    def __init__(self, seed: int, shape: Sequence[int]) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise InputError(f"seed is {seed!r}; expected a whole number.")
        self._seed, self._shape = seed % 2**64, tuple(shape)
        self._octaves: dict[int, NDArray[np.float64]] = {0: np.zeros(self._shape)}
        self._known: dict[float, NDArray[np.float64]] = {}

    def at(self, sigma: float) -> NDArray[np.float64]:
        """W at a sigma: the same whatever was asked before."""
        if sigma not in self._known:  # a step begins where one has ended
            if len(self._known) == 4:
                del self._known[next(iter(self._known))]
            self._known[sigma] = self._find(float(sigma))
        return self._known[sigma]

    def _find(self, sigma: float) -> NDArray[np.float64]:
        if not 0 <= sigma < 2.0**HIGHEST:
            raise InputError(f"Brownian path at sigma {sigma}; expected 0 to {2**HIGHEST}.")
        octave = math.frexp(sigma)[1] - 1 if sigma >= 2.0**LOWEST else LOWEST - 1
        if octave < LOWEST:
            share = sigma / 2.0**LOWEST
            return self._end(LOWEST - 1) * (1 - share) + self._end(LOWEST) * share
        (left, right), bridges = _weights(sigma / 2.0**octave - 1)
        result = self._end(octave) * left + self._end(octave + 1) * right
        for node, weight in bridges.items():
            result += self._normals(octave, node) * (weight * math.sqrt(2.0**octave))
        return result

    def _end(self, octave: int) -> NDArray[np.float64]:
        """W at 2^octave, or at 0 for the octave below the lowest."""
        if octave not in self._octaves:
            if octave > 0:
                step = self._normals(octave - 1, 0) * math.sqrt(2.0 ** (octave - 1))
                self._octaves[octave] = self._end(octave - 1) + step
            else:
                width = 2.0**octave if octave >= LOWEST else 2.0**LOWEST
                step = self._normals(octave, 0) * math.sqrt(width)
                self._octaves[octave] = self._end(octave + 1) - step
        return self._octaves[octave]

    def _normals(self, octave: int, node: int) -> NDArray[np.float32]:
        """The normals of one place of the tree, from a bit stream that NumPy keeps as it is."""
        place = np.random.SeedSequence([self._seed, octave - LOWEST + 1, node])
        count = math.prod(self._shape)
        words = np.random.SFC64(place).random_raw((count + 1) // 2).view(np.uint16)
        halves = _quantiles().take(words[: 2 * count])
        return (halves[:count] + halves[count:]).reshape(self._shape)


def _weights(place: float) -> tuple[tuple[float, float], dict[int, float]]:
    """What a place in an octave, 0 to 1, takes of its two ends, and of the normals of each node.

    The numbers are found first, so that each array is read once. A middle is half of both ends and
    a bridge of variance (b − t)(t − a)/(b − a), which is a quarter of the width.
    """
    left, right = np.zeros(2 + LEVELS), np.zeros(2 + LEVELS)  # both ends, then level by level
    left[0] = right[1] = 1
    nodes, node = list[int](), 1
    for level in range(LEVELS):
        if place == 0:
            break
        middle = (left + right) * 0.5
        middle[2 + level] = math.sqrt(1 / 2**level / 4)
        nodes.append(node)
        place *= 2
        node *= 2
        if place < 1:
            right = middle
        else:
            left, place, node = middle, place - 1, node + 1
    ends, bridges = np.split(left * (1 - place) + right * place, [2])
    first, last = ends.tolist()
    return (first, last), dict(zip(nodes, bridges.tolist(), strict=False))


@cache
def _quantiles() -> NDArray[np.float32]:
    """65536 normals, equally likely; two of them added are as good as continuous, and reach 6.

    Scaled so that the sum of two has variance 1. A lookup costs a fifth of drawing a normal.
    """
    inverse = NormalDist().inv_cdf
    upper = np.array([inverse((place + 0.5) / 65536) for place in range(32768, 65536)])
    table = np.concatenate([-upper[::-1], upper])
    return (table / math.sqrt(2 * np.mean(table**2))).astype(np.float32)


class BrownianNoise(Generic[A]):
    """`steps.Noise` from one path per image: W(a → b)/√|b − a|, standard normal."""

    def __init__(self, seeds: Sequence[int], shape: Sequence[int], to_array: ToArray[A]) -> None:
        if not seeds:
            raise InputError("noise needs at least one seed.")
        self._paths, self._to_array = [BrownianPath(seed, shape) for seed in seeds], to_array

    def __call__(self, sigma: float, sigma_next: float) -> A:
        if sigma == sigma_next:
            raise InputError(f"Brownian noise from sigma {sigma} to itself has no direction.")
        scale = 1 / math.sqrt(abs(sigma_next - sigma))
        each: list[NDArray[np.float32]] = []
        for path in self._paths:
            start = path.at(sigma)
            each.append(((path.at(sigma_next) - start) * scale).astype(np.float32))
        return self._to_array(np.stack(each))
