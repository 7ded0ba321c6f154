"""Align Your Steps: 11 optimised sigmas per model family, interpolated to any number of steps.

Reference: Sabour et al. (2024), arXiv 2404.14507, and the tables its authors publish; diffusers
0.42.1 carries the same ones in scheduling_utils.py, with 0 in the place of the last.
"""

from typing import Literal

import numpy as np

from lydite.core.errors import InputError
from lydite.sampling.registry import ScheduleKind
from lydite.sampling.schedules.curves import under
from lydite.sampling.schedules.schedule import Floats, ModelSigmas, Points
from lydite.sampling.schedules.table import NoiseTable

SIGMAS = {
    "sd15": (14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029),
    "sdxl": (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029),
    "svd": (700.0, 54.5, 15.886, 7.977, 4.248, 1.789, 0.981, 0.403, 0.173, 0.034, 0.002),
}
TIMESTEPS = {
    "sd15": (999, 850, 736, 645, 545, 455, 343, 233, 124, 24, 0),
    "sdxl": (999, 845, 730, 587, 443, 310, 193, 116, 53, 13, 0),
}
Ending = Literal["replace", "append"]


def align_your_steps(
    model: ModelSigmas,
    steps: int,
    *,
    family: str = "sd15",
    ending: Ending = "replace",
    by: Literal["sigma", "timestep"] = "sigma",
) -> Points:
    """The table of a family, log σ interpolated.

    `ending`: n + 1 sigmas of which the last is replaced by 0 (the authors, diffusers, ComfyUI), or
    n and a 0 appended (A1111). `by`: sigmas as published, or those of the model's own table at the
    published timesteps (ComfyUI).
    """
    tables = SIGMAS if by == "sigma" else TIMESTEPS
    if family not in tables or ending not in ("replace", "append"):
        raise InputError(
            f"align_your_steps: family {family!r}, ending {ending!r}; expected one of "
            f"{', '.join(tables)}, and replace or append."
        )
    if by == "sigma":
        sigmas = under(model.noise_model, np.array(SIGMAS[family]))
    elif isinstance(model, NoiseTable) and len(model.levels) == 1000:
        sigmas = model.levels[list(TIMESTEPS[family])]
    else:
        raise InputError("align_your_steps by timestep is for models with 1000 of them.")
    if ending == "append":
        return Points(_interpolated(sigmas, steps))
    return Points(_interpolated(sigmas, steps + 1)[:-1])


def _interpolated(sigmas: Floats, count: int) -> Floats:
    """From the lowest, as the authors do: one sigma alone is the lowest."""
    known, wanted = np.linspace(0, 1, len(sigmas)), np.linspace(0, 1, count)
    return np.exp(np.interp(wanted, known, np.log(sigmas[::-1])))[::-1]


METHODS = (
    ScheduleKind(
        "align_your_steps",
        align_your_steps,
        "steps optimised for SD 1.5, SDXL or SVD",
        "Sabour et al. (2024), arXiv 2404.14507",
        ("diffusers AysSchedules", "ComfyUI", "A1111"),
    ),
)
