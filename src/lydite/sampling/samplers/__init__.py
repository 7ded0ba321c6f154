"""Every sampler by its name."""

from lydite.core.errors import InputError
from lydite.sampling.samplers import euler
from lydite.sampling.samplers.sampler import Sampler

FAMILIES = (euler,)
SAMPLERS = {sampler.name: sampler for family in FAMILIES for sampler in family.FAMILY}


def find_sampler(name: str) -> Sampler:
    """The sampler called `name`."""
    if name not in SAMPLERS:
        raise InputError(
            f"there is no sampler {name!r}; `lydite sampler list` names all {len(SAMPLERS)}."
        )
    return SAMPLERS[name]
