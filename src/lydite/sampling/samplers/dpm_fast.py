"""DPM-Solver with steps of its own choice: in a fixed number of calls, or to a tolerance.

Lu et al. (2022), arXiv 2206.00927, in k-diffusion's form: the clock is t = −ln σ under either noise
model, so each step is a step on dx/dσ, which both share. Of the sigmas only the first, the last one
above 0 and their number count. The end is that last sigma: its noise stays in x.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError, NotFiniteError
from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Noise, Step
from lydite.sampling.samplers.algebra import add_noise, ancestral_down, slope

NEAR = 1e-5  # in t: how close to the end counts as there
SMALLEST = 1e-9  # in t: a shorter step than this gets nowhere


def sample_dpm_fast(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A] | None = None,
    eta: float = 0.0,
    s_noise: float = 1.0,
) -> Iterator[Step[A]]:
    """DPM-Solver-fast: even steps in t, of order 3 and a shorter end, n calls in all."""
    first, last, calls = _span(sigmas)
    if first == last:
        yield _only_step(denoise, x, first)
        return
    source = _noise(noise, eta)
    for index, (order, sigma, sigma_next) in enumerate(_fast_steps(first, last, calls)):
        down = max(last, ancestral_down(denoise.noise_model, sigma, sigma_next, eta))
        denoised = denoise(x, sigma)
        x = _orders(denoise, x, denoised, sigma, down, order)[-1]
        if source is not None and down < sigma_next:
            x = add_noise(
                denoise.noise_model, x, down, sigma_next, source(sigma, sigma_next) * s_noise
            )
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_dpm_adaptive(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    order: int = 3,
    rtol: float = 0.05,
    atol: float = 0.0078,
    h_init: float = 0.05,
    pcoeff: float = 0.0,
    icoeff: float = 1.0,
    dcoeff: float = 0.0,
    accept_safety: float = 0.81,
    noise: Noise[A] | None = None,
    eta: float = 0.0,
    s_noise: float = 1.0,
    to_numpy: Callable[[Any], NDArray[Any]] = np.asarray,
) -> Iterator[Step[A]]:
    """DPM-Solver-12 or -23: two orders side by side, and a PID controller that picks the step.

    Only accepted steps are yielded. x is read back with `to_numpy` to measure the error.
    """
    if order not in (2, 3):
        raise InputError(f"order is {order}; expected 2 or 3.")
    first, last, _ = _span(sigmas)
    if first == last:
        yield _only_step(denoise, x, first)
        return
    source = _noise(noise, eta)
    controller = _Controller(h_init, (pcoeff, icoeff, dcoeff), 1.5 if eta else order, accept_safety)
    t, end = -math.log(first), -math.log(last)
    sigma, low_before, denoised, index = first, x, None, 0
    while t < end - NEAR:
        t_next = min(end, t + controller.width)
        sigma_next = last if t_next == end else math.exp(-t_next)
        down = max(last, ancestral_down(denoise.noise_model, sigma, sigma_next, eta))
        if denoised is None:  # a step tried again starts from the same call
            denoised = denoise(x, sigma)
        *_, low, high = _orders(denoise, x, denoised, sigma, down, order)
        largest = np.maximum(np.abs(to_numpy(low)), np.abs(to_numpy(low_before)))
        misses = to_numpy(low - high) / np.maximum(atol, rtol * largest)
        error = float(np.linalg.norm(misses)) / math.sqrt(misses.size)
        if not math.isfinite(error):
            raise NotFiniteError(f"dpm_adaptive: x is not finite after a call at sigma {sigma}.")
        if controller.accepts(error):
            x, low_before = high, low
            if source is not None and down < sigma_next:
                x = add_noise(
                    denoise.noise_model, x, down, sigma_next, source(sigma, sigma_next) * s_noise
                )
            step = Step(index, sigma, sigma_next, x, denoised)
            yield step
            x = step.x
            t, sigma, denoised, index = t_next, sigma_next, None, index + 1
        elif controller.width < SMALLEST:
            raise InputError(
                f"dpm_adaptive: no step at sigma {sigma} is short enough for "
                f"atol {atol} and rtol {rtol}; allow more."
            )


class _Controller:
    """A PID controller of step width, as in k-diffusion."""

    def __init__(
        self, width: float, gains: tuple[float, float, float], order: float, safety: float
    ):
        p, i, d = gains
        self.width = abs(width)
        self.powers = ((p + i + d) / order, -(p + 2 * d) / order, d / order)
        self.safety = safety
        self.before: tuple[float, float] | None = None  # 1 / error of the last two accepted steps

    def accepts(self, error: float) -> bool:
        """Whether the step stands; the width of the next one, or of its repetition, is set."""
        inverse = 1 / (error + 1e-8)
        last, one_more = self.before or (inverse, inverse)
        now, then, earlier = self.powers
        factor = 1 + math.atan(inverse**now * last**then * one_more**earlier - 1)
        self.width *= factor
        accepted = factor >= self.safety
        if accepted or self.before is None:
            self.before = (inverse, last)
        return accepted


def _fast_steps(first: float, last: float, calls: int) -> list[tuple[int, float, float]]:
    """(order, from, to) of each step, `calls` calls in all."""
    count = calls // 3 + 1
    orders = [3] * (count - 2) + [2, 1] if calls % 3 == 0 else [3] * (count - 1) + [calls % 3]
    fall = math.log(last / first) / count
    starts = [first * math.exp(fall * step) for step in range(count)]
    return list(zip(orders, starts, [*starts[1:], last], strict=True))


def _orders(
    denoise: Denoise[A], x: A, denoised: A, sigma: float, sigma_next: float, order: int
) -> list[A]:
    """x at `sigma_next` by DPM-Solver of each order up to `order`, from the same calls.

    Algorithm 1 of the paper has its one inner call halfway; as the lower half of algorithm 2 it
    takes that of algorithm 2, a third of the way.
    """
    here, width = slope(x, denoised, sigma), sigma_next - sigma
    straight = x + here * width
    if order == 1:
        return [straight]
    h, share = math.log(sigma / sigma_next), 1 / order
    near = sigma * math.exp(-h * share)
    turn = _slope_at(denoise, x + here * (near - sigma), near) - here
    bent = straight + turn * (width / (2 * share))
    if order == 2:
        return [straight, bent]
    far = sigma * math.exp(-h * 2 / 3)
    lead = (sigma - far) / (h * 2 / 3) - far  # σ·(expm1(h) / h − 1) of the paper
    turn = _slope_at(denoise, x + here * (far - sigma) - turn * (lead * 2), far) - here
    lead = (sigma - sigma_next) / h - sigma_next
    return [straight, bent, straight - turn * (lead * 1.5)]


def _slope_at(denoise: Denoise[A], x: A, sigma: float) -> A:
    return slope(x, denoise(x, sigma), sigma)


def _span(sigmas: Iterable[float]) -> tuple[float, float, int]:
    """The first sigma, the last one above 0, and the number of steps."""
    levels = [float(sigma) for sigma in sigmas]
    return levels[0], levels[-1] or levels[-2], len(levels) - 1


def _only_step(denoise: Denoise[A], x: A, sigma: float) -> Step[A]:
    """From a lone sigma to 0: there is no lower one to stop at."""
    denoised = denoise(x, sigma)
    return Step(0, sigma, 0.0, denoised, denoised)


def _noise(noise: Noise[A] | None, eta: float) -> Noise[A] | None:
    if eta and noise is None:
        raise InputError(f"eta is {eta}; pass a source of noise, or leave eta at 0.")
    return noise


METHODS = (
    Sampler(
        "dpm_fast",
        sample_dpm_fast,
        "DPM-Solver of order 3, of 2 by its short last steps; stops at the last sigma above 0",
        "Lu et al. (2022), DPM-Solver-fast, as in k-diffusion",
        proofs=("k-diffusion", "order"),
        order=2,
        noise_with_eta=True,
    ),
    Sampler(
        "dpm_adaptive",
        sample_dpm_adaptive,
        "DPM-Solver-23 with as many steps as the tolerance asks for; stops above 0",
        "Lu et al. (2022), DPM-Solver-23, with k-diffusion's PID controller",
        proofs=("k-diffusion", "tolerance"),
        calls=3,
        noise_with_eta=True,
    ),
)
