"""CFG++ of Chung et al. (2024), arXiv 2406.08070: guided image, unconditional noise.

A step goes to the guided image and puts back the noise that the *unconditional* prediction sees in
x. That is the plain step from x moved by α·(guided − uncond). The paper's guidance weight lies
between 0 and 1; A1111 divides the weight its users set by 12.5.

`written_for` is the noise model of a step. ComfyUI, whose names these are, writes all but Euler's
for VE, also on flow models, where they lean on the prompt by σ'·(guided − uncond) too much and
their ancestral noise leaves too much image; "model" takes the model's own and does neither.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal

from lydite.core.errors import InputError
from lydite.sampling.registry import Sampler
from lydite.sampling.sampler_types import VE, A, Denoise, Noise, NoiseModel, PairDenoise, Step
from lydite.sampling.samplers.algebra import (
    NEAR_ONE,
    add_noise,
    ddim_step,
    exp_minus_h,
    reverse_down,
    sigma_between,
)

Written = Literal["ve", "model"]


def sample_euler_cfg_pp(
    denoise: PairDenoise[A], x: A, sigmas: Iterable[float]
) -> Iterator[Step[A]]:
    """The DDIM of Chung et al. (2024), which in these coordinates is Euler's method."""
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        guided, uncond = denoise.pair(x, sigma)
        x = renoised(model, x, guided, uncond, sigma, sigma_next)
        step = Step(index, sigma, sigma_next, x, guided)
        yield step
        x = step.x


def sample_euler_ancestral_cfg_pp(
    denoise: PairDenoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
) -> Iterator[Step[A]]:
    """`euler_cfg_pp` beyond the next sigma, and back with fresh noise; DDIM's η is `eta`.

    With noise model `flow` the noise is that of the diffusion's own reverse, unlike the share of
    the step that `euler_ancestral` takes there.
    """
    model = denoise.noise_model
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        guided, uncond = denoise.pair(x, sigma)
        down = reverse_down(model, sigma, sigma_next, eta)
        x = renoised(model, x, guided, uncond, sigma, down)
        if down < sigma_next:
            x = add_noise(model, x, down, sigma_next, noise(sigma, sigma_next) * s_noise)
        step = Step(index, sigma, sigma_next, x, guided)
        yield step
        x = step.x


def sample_ddim_cfg_pp(
    denoise: PairDenoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A] | None = None,
    eta: float = 0.0,
    s_noise: float = 1.0,
) -> Iterator[Step[A]]:
    """`euler_cfg_pp`; with eta above 0, `euler_ancestral_cfg_pp`."""
    if eta == 0:
        return sample_euler_cfg_pp(denoise, x, sigmas)
    if noise is None:
        raise InputError(f"eta is {eta}; pass a source of noise, or leave eta at 0.")
    return sample_euler_ancestral_cfg_pp(denoise, x, sigmas, noise=noise, eta=eta, s_noise=s_noise)


def sample_dpmpp_2s_ancestral_cfg_pp(
    denoise: PairDenoise[A],
    x: A,
    sigmas: Iterable[float],
    *,
    noise: Noise[A],
    eta: float = 1.0,
    s_noise: float = 1.0,
    near_one: float = NEAR_ONE,
    written_for: Written = "ve",
    uncond_of: Literal["start", "middle"] = "middle",
) -> Iterator[Step[A]]:
    """DPM-Solver++(2S) with CFG++ and ancestral noise.

    ComfyUI ends a step with the unconditional image of its "middle" in place of that of its
    "start". Even where guided = uncond, that is not DPM-Solver++(2S): it loses contrast, and more
    steps do not mend it. "start" is the method.
    """
    model = model_of(written_for, denoise)
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        guided, uncond = denoise.pair(x, sigma)
        directed = guided
        down = reverse_down(model, sigma, sigma_next, eta)
        if down > 0:
            middle = sigma_between(model, sigma, down, 0.5, near_one)
            halfway = renoised(model, x, guided, uncond, sigma, middle)
            directed, latest = denoise.pair(halfway, middle)
            uncond = latest if uncond_of == "middle" else uncond
        x = ddim_step(model, shifted(model, x, guided, uncond, sigma), directed, sigma, down)
        if down < sigma_next:
            x = add_noise(model, x, down, sigma_next, noise(sigma, sigma_next) * s_noise)
        step = Step(index, sigma, sigma_next, x, guided)
        yield step
        x = step.x


def sample_dpmpp_2m_cfg_pp(
    denoise: PairDenoise[A], x: A, sigmas: Iterable[float], *, written_for: Written = "ve"
) -> Iterator[Step[A]]:
    """DPM-Solver++(2M) with CFG++, as ComfyUI has it.

    The slope is that from the last unconditional prediction to this guided one.
    """
    model = model_of(written_for, denoise)
    before: tuple[A, float] | None = None  # unconditional, and the step in λ after it
    for index, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        guided, uncond = denoise.pair(x, sigma)
        h = model.half_log_snr(sigma_next) - model.half_log_snr(sigma)
        x = renoised(model, x, guided, uncond, sigma, sigma_next)
        if before is not None and sigma_next > 0:
            share = model.alpha(sigma_next) * (1 - exp_minus_h(model, sigma, sigma_next))
            x = x + (guided - before[0]) * (share * h / (2 * before[1]))
        before = uncond, h
        step = Step(index, sigma, sigma_next, x, guided)
        yield step
        x = step.x


def model_of(written_for: Written, denoise: Denoise[Any]) -> NoiseModel:
    return VE if written_for == "ve" else denoise.noise_model


def renoised(model: NoiseModel, x: A, guided: A, uncond: A, sigma: float, sigma_to: float) -> A:
    """The guided image with the noise of the unconditional one, at `sigma_to`."""
    rest = x - uncond * model.alpha(sigma)
    return guided * model.alpha(sigma_to) + rest * (sigma_to / sigma)


def shifted(model: NoiseModel, x: A, guided: A, uncond: A, sigma: float) -> A:
    """x from which a plain step is one of CFG++."""
    return x if guided is uncond else x + (guided - uncond) * model.alpha(sigma)


METHODS = (
    Sampler(
        "euler_cfg_pp",
        sample_euler_cfg_pp,
        "euler that renoises with the unconditional prediction",
        "Chung et al. (2024), arXiv 2406.08070",
        proofs=("ComfyUI", "identity", "order"),
        order=1,
        pair=True,
    ),
    Sampler(
        "ddim_cfg_pp",
        sample_ddim_cfg_pp,
        "euler_cfg_pp under A1111's name; with eta above 0 it is euler_ancestral_cfg_pp",
        "Chung et al. (2024), arXiv 2406.08070, as in A1111",
        proofs=("identity", "order"),
        order=1,
        noise_with_eta=True,
        pair=True,
    ),
    Sampler(
        "euler_ancestral_cfg_pp",
        sample_euler_ancestral_cfg_pp,
        "euler_ancestral that renoises with the unconditional prediction",
        "ComfyUI, after Chung et al. (2024)",
        proofs=("ComfyUI", "identity", "stationarity"),
        noise="stream",
        pair=True,
    ),
    Sampler(
        "dpmpp_2s_ancestral_cfg_pp",
        sample_dpmpp_2s_ancestral_cfg_pp,
        "dpmpp_2s_ancestral that renoises with the unconditional prediction",
        "ComfyUI, after Lu et al. (2022b) and Chung et al. (2024)",
        proofs=("ComfyUI", "identity"),
        calls=2,
        noise="stream",
        pair=True,
    ),
    Sampler(
        "dpmpp_2m_cfg_pp",
        sample_dpmpp_2m_cfg_pp,
        "dpmpp_2m that renoises with the unconditional prediction",
        "ComfyUI, after Lu et al. (2022b) and Chung et al. (2024)",
        proofs=("ComfyUI", "identity", "order"),
        order=2,
        pair=True,
    ),
)
