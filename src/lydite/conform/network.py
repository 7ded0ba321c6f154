"""A network that is a formula: it takes a scaled latent and a timestep, as a real one does.

It believes what it is told. A wrong scale or a wrong timestep gives a wrong prediction, so that
c_in, timestep and denoised are the candidate's own work.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np

from lydite.conform.problem import Array, Denoiser, Problem, noise_model_of
from lydite.sampling.prediction import Prediction, find_prediction

LEAST = 1e-4  # the network never divides by less


def prediction_of(problem: Problem) -> Prediction:
    """The scalings of the problem's prediction type; not for `denoised`, which has none."""
    return Prediction(find_prediction(problem.prediction).name, problem.sigma_data)


def predict(problem: Problem, denoiser: Denoiser, model_input: Any, timestep: float) -> Any:
    """F(model_input, timestep) of the problem's prediction type."""
    sigma, kind = sigma_of(problem, timestep), prediction_of(problem)
    x = model_input / kind.c_in(sigma)
    denoised = denoiser.under(noise_model_of(problem))(x, sigma)
    return (denoised - x * kind.c_skip(sigma)) / kind.c_out(sigma)


def c_in(problem: Problem, sigma: float) -> float:
    """What a latent is multiplied with before it goes into the network."""
    return prediction_of(problem).c_in(sigma)


def denoised_from(problem: Problem, x: Any, prediction: Any, sigma: float) -> Any:
    """The image that a prediction points at; `x` is the latent without c_in."""
    return prediction_of(problem).denoised(x, prediction, sigma)


def sigma_of(problem: Problem, timestep: float) -> float:
    """The sigma the network understands a timestep as."""
    if problem.table:
        return math.exp(float(np.interp(timestep, *_logs(problem.table))))
    if problem.prediction == "edm":
        return math.exp(4 * min(max(timestep, -3.0), 3.0))
    if problem.prediction == "cosmos":
        timestep = min(max(timestep, LEAST), 1 - LEAST)
        return timestep / (1 - timestep)
    return max(timestep / problem.training_steps, LEAST)


def timestep_of(problem: Problem, sigma: float) -> float:
    """The timestep of a sigma that is none of the problem's, by its rule."""
    place = place_of(problem, sigma)
    if problem.rule == "interpolate":
        return place
    return float(math.floor(place) if problem.rule == "truncate" else round(place))


def place_of(problem: Problem, sigma: float) -> float:
    """The timestep of a sigma, fraction and all: the inverse of `sigma_of`."""
    if problem.table:
        places, logs = _logs(problem.table)
        return float(np.interp(math.log(sigma), logs, places)) if sigma > 0 else 0.0
    if problem.prediction == "edm":
        return math.log(max(sigma, LEAST)) / 4
    if problem.prediction == "cosmos":
        return sigma / (sigma + 1)
    return sigma * problem.training_steps


@lru_cache(maxsize=8)
def _logs(table: tuple[float, ...]) -> tuple[Array, Array]:
    """(t, log sigma); a run asks for it hundreds of times."""
    return np.arange(len(table)), np.log(table)


def words(problem: Problem) -> dict[str, str]:
    """Every formula a candidate has to write, in words that fit any language."""
    noise = "ve" if problem.noise_model == "ve" else "flow"
    alpha = "1" if noise == "ve" else "1 - sigma"
    said = {
        "x": f"start from x, which is noise * {_start(problem)}",
        "denoiser": DENOISERS[problem.denoiser.name].format(alpha=alpha),
        "answer": 'write {"x": [...]} with the values of x after each step as one list, or a trace '
        "with x after step i as event sampler/x, step i (0 is the first); see docs/conform.md",
    }
    if problem.prediction != "denoised":
        said["network"] = NETWORKS[problem.prediction].format(T=problem.training_steps)
        said["network"] = said["network"].replace("sigma_data", f"{problem.sigma_data:g}")
        between = TIMESTEPS[problem.prediction].format(T=problem.training_steps)
        said["timestep"] = (
            f"the network is told timesteps[i] at sigmas[i]; between them {between}"
            f"{RULES[problem.rule] if problem.table or problem.noise_model == 'flow' else ''}"
        )
    if problem.guidance:
        said["guidance"] = (
            "F = uncond + scale * (cond - uncond); cond is F of the network with `denoiser`, "
            "uncond that of the one with guidance.uncond"
        )
    for (sampler, option), meant in LOOKED_UP.items():
        if problem.sampler == sampler and option in problem.options:
            said[option] = meant
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
    "D(x, sigma) = sum(p d) / sum(p), each value of x for itself; subtract the largest exponent "
    "first, or every p may be 0",
}
LOOKED_UP = {
    ("pndm", "middle"): "the sigma halfway in a Runge-Kutta step is that of the timestep halfway",
    ("tcd", "below"): "a step goes down to the sigma of timestep floor((1 - gamma) t), t that of "
    "the step's end; the last step goes to its end",
}
_TABLE = "the t with exp(interp(t, log(table))) = sigma"
TIMESTEPS = {
    "eps": _TABLE,
    "v": _TABLE,
    "x0": _TABLE,
    "edm": "t = ln(sigma) / 4",
    "cosmos": "t = sigma / (sigma + 1)",
    "flow": "t = {T} * sigma",
}
_TOLD = (
    "F(u, t): sigma = exp(interp(t, log(table))), t clamped to the table; x = u sqrt(sigma^2 + 1); "
)
_SHOWN = "Its input u is x / sqrt(sigma^2 + 1), and "
NETWORKS = {
    "eps": _TOLD + "F = (x - D(x, sigma)) / sigma. " + _SHOWN + "x - sigma F is the denoised",
    "v": _TOLD
    + "F = (x / (sigma^2 + 1) - D(x, sigma)) sqrt(sigma^2 + 1) / sigma. "
    + _SHOWN
    + "x / (sigma^2 + 1) - F sigma / sqrt(sigma^2 + 1) is the denoised",
    "x0": _TOLD + "F = D(x, sigma). " + _SHOWN + "F is the denoised",
    "edm": "F(u, t): s = sigma_data, sigma = exp(4 t), t clamped to -3 ... 3; "
    "w = sqrt(sigma^2 + s^2), x = u w; "
    "F = (D(x, sigma) - x s^2 / w^2) w / (sigma s). "
    "Its input u is x / w, and x s^2 / w^2 + F sigma s / w is the denoised",
    "cosmos": "F(u, t): sigma = t / (1 - t), t clamped to 0.0001 ... 0.9999; x = u (sigma + 1); "
    "F = (x / (sigma + 1) - D(x, sigma)) (sigma + 1) / sigma. "
    "Its input u is x / (sigma + 1), and (x - sigma F) / (sigma + 1) is the denoised",
    "flow": "F(x, t): sigma = max(t / {T}, 0.0001); F = (x - D(x, sigma)) / sigma. "
    "Its input is x as it is, and x - sigma F is the denoised",
}
