"""What samplers are written against: arrays of any library, a denoiser, a source of noise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lydite.sampling.noise_model import NoiseModel


class Array(Protocol):
    """What this package needs of an array; MLX, torch and NumPy arrays have it."""

    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...


A = TypeVar("A", bound=Array)


class Denoise(Protocol[A]):
    """The network as a sampler sees it: the clean image it predicts from `x` at `sigma`."""

    @property
    def noise_model(self) -> NoiseModel: ...
    def __call__(self, x: A, sigma: float, /) -> A: ...


class PairDenoise(Denoise[A], Protocol):
    """A denoiser that also gives the unconditional prediction, as CFG++ needs."""

    def pair(self, x: A, sigma: float, /) -> tuple[A, A]:
        """(guided, unconditional)."""
        ...


# Standard normals in the shape of x for the way from one sigma to the next. A Brownian path gives
# the same ones for the same two sigmas, whatever steps lie between; a stream, the next ones.
Noise = Callable[[float, float], A]


@dataclass
class Step(Generic[A]):
    """One step from `sigma` to `sigma_next`: `x` after it, and the `denoised` that directed it.

    The sampler goes on from `x` as the caller leaves it.
    """

    index: int
    sigma: float
    sigma_next: float
    x: A
    denoised: A
