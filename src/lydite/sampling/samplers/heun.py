"""Steps that look at the slope twice or three times."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import A, Denoise, Step
from lydite.sampling.samplers.algebra import Churn, churned, heun_step, midpoint_step, slope


def sample_heun(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, churn: Churn[A] | None = None
) -> Iterator[Step[A]]:
    """Heun steps: algorithm 2 of Karras et al. (2022). A step to 0 is Euler's."""
    levels = [float(sigma) for sigma in sigmas]
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        x, start = churned(churn, denoise.noise_model, x, sigma, len(levels) - 1)
        x, denoised = heun_step(denoise, x, start, sigma_next)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_dpm_2(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, churn: Churn[A] | None = None
) -> Iterator[Step[A]]:
    """The slope halfway in log sigma, after DPM-Solver-2 of Lu et al. (2022). The last is Euler."""
    levels = [float(sigma) for sigma in sigmas]
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        x, start = churned(churn, denoise.noise_model, x, sigma, len(levels) - 1)
        x, denoised = midpoint_step(denoise, x, start, sigma_next)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


def sample_heunpp2(
    denoise: Denoise[A], x: A, sigmas: Iterable[float], *, churn: Churn[A] | None = None
) -> Iterator[Step[A]]:
    """Heun++: the slopes here, one and two sigmas on, the later ones weighted by their sigma.

    A slope at σ weighs σ / (k·σ₀), where k slopes are looked at and σ₀ is the start; the slope here
    takes the rest. The step before the last looks at two slopes, the last at one.
    """
    levels = [float(sigma) for sigma in sigmas]
    for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
        x, start = churned(churn, denoise.noise_model, x, sigma, len(levels) - 1)
        denoised = denoise(x, start)
        first = slope(x, denoised, start)
        ahead = levels[index + 1 : -1][:2]
        there, at, last, bent = x, start, first, first
        for later in ahead:
            there, at = there + last * (later - at), later
            last = slope(there, denoise(there, later), later)
            bent = bent + (last - first) * (later / ((len(ahead) + 1) * levels[0]))
        x = x + bent * (sigma_next - start)
        step = Step(index, sigma, sigma_next, x, denoised)
        yield step
        x = step.x


METHODS = (
    Sampler(
        "heun",
        sample_heun,
        "the mean of the slopes at both ends",
        "Karras et al. (2022), algorithm 2",
        proofs=(
            "k-diffusion",
            "diffusers HeunDiscreteScheduler",
            "diffusers FlowMatchHeunDiscreteScheduler",
            "ComfyUI",
            "order",
        ),
        order=2,
        calls=2,
    ),
    Sampler(
        "dpm_2",
        sample_dpm_2,
        "the slope halfway in log sigma",
        "k-diffusion, after Lu et al. (2022), DPM-Solver-2",
        proofs=("k-diffusion", "diffusers KDPM2DiscreteScheduler", "ComfyUI", "order"),
        order=2,
        calls=2,
    ),
    Sampler(
        "heunpp2",
        sample_heunpp2,
        "three slopes, weighted by their sigmas; not of second order for all its calls",
        "ComfyUI",
        proofs=("ComfyUI", "order"),
        order=1,
        calls=3,
    ),
)
