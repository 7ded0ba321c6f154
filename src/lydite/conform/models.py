"""Models as schedules see them, by name or from a folder: their noise levels and timesteps."""

from pathlib import Path
from typing import Any

import numpy as np

from lydite.conform.problem import Problem
from lydite.core.errors import InputError, at
from lydite.core.jsonfile import read_json
from lydite.sampling.schedules import (
    STABLE_DIFFUSION,
    ContinuousSigmas,
    FlowSigmas,
    ModelSigmas,
    NoiseTable,
)
from lydite.sampling.schedules.flow import mu_of_tokens, shift_of_mu
from lydite.sampling.schedules.table import DIFFUSERS_CLAMP, alphas_cumprod, betas, noise_table

MODELS: dict[str, ModelSigmas] = {
    "sd15": STABLE_DIFFUSION,
    "sdxl": STABLE_DIFFUSION,
    "sd3": FlowSigmas(3.0),
    "flux": FlowSigmas(shift_of_mu(mu_of_tokens(4096))),  # 1024 × 1024 pixels
    "flow": FlowSigmas(),
    "edm": ContinuousSigmas(),
    "cosmos": ContinuousSigmas(timestep_formula="cosmos"),
}
ABOUT = {
    "sd15": "Stable Diffusion 1.5, 2.1: 1000 levels, sigma 0.029 to 14.6",
    "sdxl": "the same levels",
    "sd3": "flow, shift 3",
    "flux": "flow, shift exp(1.15) for 1024 × 1024",
    "flow": "flow, not shifted",
    "edm": "sigma 0.002 to 80 without a table; timestep ln(sigma)/4",
    "cosmos": "the same sigmas; timestep sigma/(sigma + 1)",
}


def find_model(name: str) -> ModelSigmas:
    """A model by its name here, or by the folder of its checkpoint."""
    if name in MODELS:
        return MODELS[name]
    folder = Path(name)
    for path in (folder / "scheduler" / "scheduler_config.json", folder / "scheduler_config.json"):
        if path.is_file():
            return _described(read_json(path), path)
    if folder.is_file() and folder.suffix == ".json":
        return _described(read_json(folder), folder)
    raise InputError(
        f"model {name!r:.100} is none of {', '.join(MODELS)}, and no folder with "
        "scheduler/scheduler_config.json."
    )


def model_of(problem: Problem) -> ModelSigmas | None:
    """The model a problem was made for, as far as the problem tells."""
    if problem.noise_model == "flow":
        shift, train = problem.settings.get("shift", 1.0), problem.training_steps
        if not isinstance(shift, int | float) or not 0 < shift < 1e6:
            return None
        return FlowSigmas(float(shift), train, float(train), problem.rule)
    if problem.prediction in ("edm", "cosmos"):
        return ContinuousSigmas(timestep_formula=problem.prediction)
    if len(problem.table) < 2:
        return None
    return NoiseTable(np.array(problem.table), problem.rule)


def default_schedule(model: ModelSigmas) -> str:
    return "flow_shift" if model.noise_model.name == "flow" else "karras"


def default_prediction(model: ModelSigmas) -> str:
    if model.noise_model.name == "flow":
        return "flow"
    if isinstance(model, ContinuousSigmas):
        return "denoised" if model.timestep_formula == "v" else model.timestep_formula
    return "eps"


def _described(raw: dict[str, Any], path: Path) -> ModelSigmas:
    """The noise levels a scheduler_config.json of diffusers describes."""
    count = raw.get("num_train_timesteps", 1000)
    if not isinstance(count, int) or isinstance(count, bool):
        raise InputError(f"{at(path)}: num_train_timesteps is {count!r:.40}; expected a number.")
    if "beta_schedule" in raw or "beta_start" in raw:
        first, last = (
            raw.get(key, value) for key, value in (("beta_start", 1e-4), ("beta_end", 0.02))
        )
        if not all(isinstance(each, int | float) and 0 < each < 1 for each in (first, last)):
            raise InputError(f"{at(path)}: beta_start and beta_end are not between 0 and 1.")
        clamp = DIFFUSERS_CLAMP if raw.get("rescale_betas_zero_snr") else None
        spaced = betas(raw.get("beta_schedule", "linear"), first, last, count)
        return noise_table(alphas_cumprod(spaced), clamp=clamp)
    shift = raw.get("shift", 1.0)
    if "FlowMatch" in str(raw.get("_class_name")) and isinstance(shift, int | float):
        if raw.get("use_dynamic_shifting"):
            shift = shift_of_mu(mu_of_tokens(4096))
        return FlowSigmas(float(shift), count, float(count))
    raise InputError(
        f"{at(path)}: no noise levels found: neither betas nor a FlowMatch scheduler with a shift."
    )
