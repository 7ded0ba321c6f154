"""Samplers: generators of steps over `denoise(x, sigma)`; the caller decides when to evaluate."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar


class Array(Protocol):
    """What this room asks of an array; MLX, torch and NumPy arrays all have it."""

    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...


A = TypeVar("A", bound=Array)
Denoise = Callable[[A, float], A]  # (x, sigma) → the clean image the network sees in x


@dataclass(frozen=True)
class Step(Generic[A]):
    """One step from `sigma` to `sigma_next`: `x` after it, and the `denoised` that directed it."""

    index: int
    sigma: float
    sigma_next: float
    x: A
    denoised: A


def sample_euler(denoise: Denoise[A], x: A, sigmas: Iterable[float]) -> Iterator[Step[A]]:
    """Euler steps: Algorithm 2 of Karras et al. (2022) without churn."""
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = denoise(x, sigma)
        slope = (x - denoised) / sigma
        x = x + slope * (sigma_next - sigma)
        yield Step(index, sigma, sigma_next, x, denoised)
