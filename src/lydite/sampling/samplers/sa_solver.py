"""SA-Solver: a stochastic Adams predictor and corrector on the denoised image.

Xue et al. (2023), arXiv 2309.05019. τ says how much of the noise is made anew: 0 is the ODE, 1 the
diffusion's own reverse. With κ = 1 + τ² and h the step in λ,

    x' = x·(σ'/σ)·exp(−τ²h) + Σ D·κα'·∫exp(κv)L(v)dv + σ'·√(1 − exp(−2τ²h))·noise,

where L are the Lagrange polynomials through the calls looked at: the last ones for the predictor,
the one at the end of the step as well for the corrector, which keeps the predictor's noise.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Generic

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import VE, A, Denoise, Noise, NoiseModel, Step
from lydite.sampling.samplers.algebra import Call, exponential_weights, make_call

Tau = Callable[[float, float], float]  # of the two ends of a step
# Sigmas between which diffusers' default adds noise: timesteps 200 and 800 of SD 1.5 and SDXL, and
# of a flow model.
BANDS = {"ve": (0.5705, 5.1227), "flow": (0.2, 0.8)}


def sample_sa_solver(
    denoise: Denoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    tau: Tau | None = None,
    predictor_order: int = 2,
    corrector_order: int = 2,
    simple_order_2: bool = True,
    taper: tuple[int, int] | None = (0, 2),
    s_noise: float = 1.0,
    pece: bool = False,
) -> Iterator[Step[A]]:
    """Each step is predicted, its end seen, then corrected with what was seen (PEC).

    Options follow diffusers' SASolverScheduler. `simple_order_2` takes h²/2 for the integral of a
    slope in order 2. With k steps to go the predictor's order is at most k + `taper[0]`, the
    corrector's k + `taper[1]`. ComfyUI has orders 3 and 4, no simple order 2, taper (−1, 0) and a τ
    of the end of a step. `pece` calls again after each correction. A step's x is the predicted one.
    """
    levels, model = [float(sigma) for sigma in sigmas], denoise.noise_model
    share = tau or default_tau(model)
    most = max(predictor_order, corrector_order)
    past: list[Call[A]] = []  # newest first
    jump: _Jump[A] | None = None  # the last prediction, to be corrected
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        left = len(levels) - 1 - index
        ahead, behind = (left + more for more in taper) if taper else (most, most)
        denoised = denoise(x, sigma)
        past = [make_call("data", model, x, denoised, sigma), *past][:most]
        order = min(corrector_order, len(past), behind)
        if jump is not None:
            x = jump.land(model, past[:order], simple_order_2)
            if pece:
                denoised = denoise(x, sigma)
                past[0] = make_call("data", model, x, denoised, sigma)
        order = max(1, min(predictor_order, len(past), ahead))
        jump = _Jump(x, sigma, sigma_next, share(sigma, sigma_next), None)
        if jump.tau > 0 and sigma_next > 0:
            normals = noise(sigma, sigma_next) * s_noise
            jump = _Jump(x, sigma, sigma_next, jump.tau, normals)
        x = jump.land(model, past[:order], simple_order_2)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


@dataclass(frozen=True)
class _Jump(Generic[A]):
    """One step before the denoised images are known that direct it."""

    x: A
    sigma: float
    sigma_next: float
    tau: float
    normals: A | None

    def land(self, model: NoiseModel, calls: Sequence[Call[A]], simple: bool) -> A:
        """x at the end of the step, by a polynomial through `calls`."""
        end = model.half_log_snr(self.sigma_next)
        h, kappa = end - model.half_log_snr(self.sigma), 1 + self.tau**2
        fall = math.exp(-(self.tau**2) * h) if self.tau else 1.0  # 0·∞ from pure noise
        x = self.x * (self.sigma_next / self.sigma * fall)
        for call, weight in zip(*_weighted(calls, end, h, kappa, simple), strict=True):
            x = x + call.denoised * (model.alpha(self.sigma_next) * weight)
        if self.normals is not None:
            x = x + self.normals * (self.sigma_next * math.sqrt(1 - fall**2))
        return x


def _weighted(
    calls: Sequence[Call[A]], end: float, h: float, kappa: float, simple: bool
) -> tuple[list[Call[A]], list[float]]:
    """The calls that count and their weights, κ·∫exp(κv)L(v)dv; pure noise is too far to count."""
    seen = [call for call in calls if call.half_log_snr > -math.inf]
    if len(seen) < 2 or h == math.inf:
        return [calls[0]], [-math.expm1(-kappa * h)]
    nodes = [call.half_log_snr - end for call in seen]
    values = [kappa * weight for weight in exponential_weights(nodes, h, kappa)]
    if simple and len(calls) == 2:
        slope = (kappa * h + math.expm1(-kappa * h)) / kappa**2
        more = kappa * (h * h / 2 - slope) / (nodes[0] - nodes[1])
        values = [values[0] + more, values[1] - more]
    return seen, values


def default_tau(model: NoiseModel) -> Tau:
    """1 in the middle of the way, where fresh noise mends most, and 0 near both ends."""
    low, high = BANDS["ve" if model == VE else "flow"]
    return lambda sigma, _: 1.0 if low <= sigma <= high else 0.0


METHODS = (
    Sampler(
        "sa_solver",
        sample_sa_solver,
        "a stochastic Adams predictor, corrected with the next step's call",
        "Xue et al. (2023), arXiv 2309.05019",
        proofs=("diffusers SASolverScheduler", "ComfyUI", "identity", "order", "stationarity"),
        noise="stream",
    ),
    Sampler(
        "sa_solver_pece",
        partial(sample_sa_solver, pece=True),
        "sa_solver with a call of its own after each correction",
        "Xue et al. (2023), arXiv 2309.05019; ComfyUI",
        proofs=("ComfyUI", "identity", "order", "stationarity"),
        calls=2,
        noise="stream",
    ),
)
