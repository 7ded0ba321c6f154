"""Every sampler by its name."""

from lydite.sampling.registry import find_method
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
    return find_method(SAMPLERS, name, "sampler")
