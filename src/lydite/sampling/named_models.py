"""Noise levels of models by name, or of a checkpoint by its folder."""

from pathlib import Path

from lydite.core.config import read_json
from lydite.core.errors import InputError, at
from lydite.sampling.scheduler_config import read_scheduler_config
from lydite.sampling.schedules.flow import FlowSigmas, mu_of_tokens, shift_of_mu
from lydite.sampling.schedules.schedule import ModelSigmas
from lydite.sampling.schedules.table import STABLE_DIFFUSION, ContinuousSigmas

MODELS: dict[str, ModelSigmas] = {
    "sd15": STABLE_DIFFUSION,
    "sdxl": STABLE_DIFFUSION,
    "sd3": FlowSigmas(3.0),
    "flux": FlowSigmas(shift_of_mu(mu_of_tokens(4096))),
    "flow": FlowSigmas(),
    "edm": ContinuousSigmas(),
    "cosmos": ContinuousSigmas(timestep_formula="cosmos"),
}
TOKENS = 4096  # of an image of 1024 × 1024 pixels, where a shift depends on them


def find_model(name: str) -> ModelSigmas:
    """A model by its name here, or by the folder of its checkpoint."""
    if name in MODELS:
        return MODELS[name]
    folder = Path(name)
    for path in (folder / "scheduler" / "scheduler_config.json", folder / "scheduler_config.json"):
        if path.is_file():
            return _levels(path)
    if folder.is_file() and folder.suffix == ".json":
        return _levels(folder)
    raise InputError(
        f"model {name!r:.100} is none of {', '.join(MODELS)}, and no folder with "
        "scheduler/scheduler_config.json."
    )


def default_schedule(model: ModelSigmas) -> str:
    return "flow_shift" if model.noise_model.name == "flow" else "karras"


def default_prediction(model: ModelSigmas) -> str:
    if model.noise_model.name == "flow":
        return "flow"
    if isinstance(model, ContinuousSigmas):
        return "denoised" if model.timestep_formula == "v" else model.timestep_formula
    return "eps"


def _levels(path: Path) -> ModelSigmas:
    config = read_scheduler_config(read_json(path, infinity=True), where=at(path))
    return config.levels(TOKENS, 50)
