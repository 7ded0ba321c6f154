"""A network that is a formula: it takes a scaled latent and a timestep, as a real one does.

It believes what it is told. A wrong scale or a wrong timestep gives a wrong prediction, so that
c_in, timestep and denoised are the candidate's own work.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np

from lydite.conform.problem import Array, Denoiser, Problem, law_of

LEAST = 1e-4  # the network never divides by less


def predict(problem: Problem, denoiser: Denoiser, model_input: Any, timestep: float) -> Any:
    """F(model_input, timestep) of the problem's prediction type."""
    sigma = sigma_of(problem, timestep)
    x = model_input / c_in(problem, sigma)
    denoised = denoiser.under(law_of(problem))(x, sigma)
    if problem.prediction == "v":
        total = sigma**2 + 1
        return (x / total - denoised) * (math.sqrt(total) / sigma)
    return (x - denoised) / sigma  # eps and flow


def c_in(problem: Problem, sigma: float) -> float:
    """What a latent is multiplied with before it goes into the network."""
    return 1 / math.sqrt(sigma**2 + 1) if problem.prediction in ("eps", "v") else 1.0


def denoised_from(prediction_type: str, x: Any, prediction: Any, sigma: float) -> Any:
    """The image that a prediction points at; `x` is the latent without c_in."""
    if prediction_type == "v":
        total = sigma**2 + 1
        return x / total - prediction * (sigma / math.sqrt(total))
    return x - prediction * sigma


def sigma_of(problem: Problem, timestep: float) -> float:
    """The sigma the network understands a timestep as."""
    if not problem.table:
        return max(timestep / problem.training_steps, LEAST)
    return math.exp(float(np.interp(timestep, *_logs(problem.table))))


def timestep_of(problem: Problem, sigma: float) -> float:
    """The timestep of a sigma that is none of the problem's, by its rule."""
    place = place_of(problem, sigma)
    if problem.rule == "interpolate":
        return place
    return float(math.floor(place) if problem.rule == "truncate" else round(place))


def place_of(problem: Problem, sigma: float) -> float:
    """Where a sigma lies in the table, as a fraction: the inverse of `sigma_of`."""
    if not problem.table:
        return sigma * problem.training_steps
    if sigma <= 0:
        return 0.0
    places, logs = _logs(problem.table)
    return float(np.interp(math.log(sigma), logs, places))


@lru_cache(maxsize=8)
def _logs(table: tuple[float, ...]) -> tuple[Array, Array]:
    """(t, log sigma); a run asks for it hundreds of times."""
    return np.arange(len(table)), np.log(table)


def words(problem: Problem) -> dict[str, str]:
    """Every formula a candidate has to write, in words that fit any language."""
    noise = "ve" if problem.law == "ve" else "flow"
    alpha = "1" if noise == "ve" else "1 - sigma"
    said = {
        "x": f"start from x, which is noise * {_start(problem)}",
        "denoiser": DENOISERS[problem.denoiser.name].format(alpha=alpha),
        "trace": "write x after step i as event sampler/x, step i (0 is the first), in the given "
        "shape; see docs/conform.md",
    }
    if problem.prediction != "denoised":
        said["network"] = NETWORKS[problem.prediction].format(T=problem.training_steps)
        between = (
            "the t with exp(interp(t, log(table))) = sigma"
            if problem.table
            else f"t = {problem.training_steps} * sigma"
        )
        said["timestep"] = (
            f"the network is told timesteps[i] at sigmas[i]; between them {between}"
            f"{RULES[problem.rule]}"
        )
    if problem.guidance:
        said["guidance"] = (
            "uncond + scale * (cond - uncond); cond is the network with `denoiser`, uncond the "
            "one with guidance.uncond"
        )
    if problem.normals:
        said["normals"] = "the k-th time noise is needed it is normals[k], counted from 0"
    return said


def _start(problem: Problem) -> str:
    pairs = zip(problem.x, problem.noise, strict=True)
    narrow = all(math.isclose(x, noise * problem.sigmas[0], rel_tol=1e-9) for x, noise in pairs)
    return "sigmas[0]" if narrow else "sqrt(1 + sigmas[0]^2)"


RULES = {
    "interpolate": ", fraction and all",
    "nearest": ", rounded",
    "round": ", rounded",
    "truncate": ", cut to a whole number",
}
DENOISERS = {
    "zero": "D(x, sigma) = 0",
    "identity": "D(x, sigma) = x",
    "gaussian": "m = means[0], s = spread, a = {alpha}: "
    "D(x, sigma) = (s^2 a x + sigma^2 m) / (s^2 a^2 + sigma^2)",
    "mixture": "s = spread, a = {alpha}, w = s^2 a^2 + sigma^2; for each m of means: "
    "p = exp(-(x - a m)^2 / (2 w)), d = (s^2 a x + sigma^2 m) / w; "
    "D(x, sigma) = sum(p d) / sum(p), each value of x for itself",
}
NETWORKS = {
    "eps": "F(u, t): sigma = exp(interp(t, log(table))), t clamped to the table; "
    "x = u sqrt(sigma^2 + 1); F = (x - D(x, sigma)) / sigma. "
    "Its input u is x / sqrt(sigma^2 + 1), and x - sigma F is the denoised",
    "v": "F(u, t): sigma = exp(interp(t, log(table))), t clamped to the table; "
    "x = u sqrt(sigma^2 + 1); F = (x / (sigma^2 + 1) - D(x, sigma)) sqrt(sigma^2 + 1) / sigma. "
    "Its input u is x / sqrt(sigma^2 + 1), and x / (sigma^2 + 1) - F sigma / sqrt(sigma^2 + 1) is "
    "the denoised",
    "flow": "F(x, t): sigma = max(t / {T}, 0.0001); F = (x - D(x, sigma)) / sigma. "
    "Its input is x as it is, and x - sigma F is the denoised",
}
