"""Guidance: two predictions made into one."""

from lydite.sampling.steps import A


def cfg(uncond: A, cond: A, scale: float) -> A:
    """Classifier-free guidance, Ho and Salimans (2022): 0 is uncond, 1 is cond, more goes beyond.

    The weight is diffusers' `guidance_scale`; the paper's own w is `scale - 1`.
    """
    return uncond + (cond - uncond) * scale
