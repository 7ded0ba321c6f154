"""Every sampler by its name."""

from lydite.core.errors import InputError
from lydite.sampling.samplers import (
    ancestral,
    cfg_pp,
    consistency,
    ddim,
    deis,
    dpm_solver,
    dpmpp,
    er_sde,
    euler,
    gradient_estimation,
    heun,
    kdpm,
    lms,
    pndm,
    res,
    restart,
    sa_solver,
    seeds,
    unipc,
)
from lydite.sampling.samplers.sampler import Sampler

FAMILIES = (
    euler,
    heun,
    ancestral,
    lms,
    kdpm,
    dpmpp,
    ddim,
    pndm,
    dpm_solver,
    deis,
    unipc,
    sa_solver,
    consistency,
    restart,
    res,
    gradient_estimation,
    er_sde,
    seeds,
    cfg_pp,
)
SAMPLERS = {sampler.name: sampler for family in FAMILIES for sampler in family.FAMILY}


def find_sampler(name: str) -> Sampler:
    """The sampler called `name`."""
    if name not in SAMPLERS:
        raise InputError(
            f"there is no sampler {name!r}; `lydite sampler list` names all {len(SAMPLERS)}."
        )
    return SAMPLERS[name]
