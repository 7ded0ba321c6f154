"""Guidance, sampler, noise and latents, after the network: classes E of docs/bug-classes.md."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx

from lydite.models import mmdit
from lydite.models.vae.kl import AutoencoderKL
from lydite.pipelines import planning, steps
from lydite.pipelines.noise import NOISES
from lydite.sampling.denoiser import Prediction
from lydite.sampling.sampler_types import Step
from seeded_bugs.bugs.schedule import bug
from seeded_bugs.bugs.weights import BLOCK_0, FLOAT32, bfloat16
from seeded_bugs.cases import Apply, inputs, outputs
from seeded_bugs.patches import ChangedNoise, attribute, entry

LATENTS, VELOCITY = outputs("pipeline/latents"), outputs("pipeline/velocity")
DECODED = inputs("vae/post_quant_conv")


def sampled(step: Callable[[Any, Any, float, float], Any]) -> Apply:
    """A sampler with another step: step(x, denoised, sigma, sigma_next)."""

    def sample(denoise: Any, x: Any, sigmas: Any) -> Iterator[Step[Any]]:
        for index, (sigma, after) in enumerate(pairwise(map(float, sigmas))):
            denoised = denoise(x, sigma)
            x = step(x, denoised, sigma, after)
            taken = Step(index, sigma, after, x, denoised)
            yield taken
            x = taken.x

    return attribute(
        planning,
        "find_sampler",
        lambda original: lambda name: replace(original(name), function=sample),
    )


def euler(x: Any, denoised: Any, sigma: float, after: float) -> Any:
    return x + (x - denoised) / sigma * (after - sigma)


def guided(change: Callable[[Any, Any, float], Any]) -> Apply:
    def with_change(original: Any) -> Any:
        return lambda *args, **options: original(*args, **{**options, "guide": change})

    return attribute(steps, "Guided", with_change)


def some_channels(uncond: mx.array, cond: mx.array, scale: float) -> mx.array:
    whole = uncond + (cond - uncond) * scale
    return mx.concatenate([whole[..., :3], cond[..., 3:]], axis=-1)


def remembered(original: Any) -> Any:
    """Modulation computed for every step, and the first step's used for all of them."""

    def modulation(self: Any, timesteps: mx.array, pooled: mx.array) -> Any:
        tables = original(self, timesteps, pooled)
        return {path: mx.repeat(table[:1], len(table), axis=0) for path, table in tables.items()}

    return modulation


def denormalized(change: Callable[[mx.array, float, float], mx.array]) -> Apply:
    """The step from the diffusion model's latents to the decoder's: change(x, scale, shift)."""

    def new(self: Any, latent: mx.array) -> mx.array:
        return change(latent, self.config.scaling_factor, self.config.shift_factor)

    return attribute(AutoencoderKL, "denormalize", lambda original: new)


def rounded_noise(original: Any) -> Any:
    return lambda *about: ChangedNoise(original(*about), bfloat16)


BUGS = (
    bug(
        "prediction-sign",
        "prediction_sign",
        "E54",
        LATENTS,
        attribute(Prediction, "denoised", lambda _: lambda self, x, v, sigma: x + v * sigma),
        "The image is x − σ·v.",
        severity="fatal",
    ),
    bug(
        "euler-adds-denoised",
        "sampler_step",
        "E48",
        LATENTS,
        sampled(lambda x, denoised, sigma, after: x + denoised * (after - sigma)),
        "Add the slope (x − denoised)/σ, not the denoised image.",
        severity="fatal",
    ),
    bug(
        "euler-wrong-sigma",
        "sampler_step",
        "E48",
        LATENTS,
        sampled(lambda x, d, sigma, after: x + (x - d) / max(after, 1e-3) * (after - sigma)),
        "The slope divides by the sigma the step starts from.",
        held_out=True,
    ),
    bug(
        "latents-in-bf16",
        "bf16_rounding",
        "E57",
        LATENTS,
        sampled(lambda *step: bfloat16(euler(*step))),
        "Keep the latents in float32 between steps.",
        severity="subtle",
        seen_in=FLOAT32,
    ),
    bug(
        "noise-in-bf16",
        "bf16_rounding",
        "E57",
        outputs("pipeline/noise"),
        entry(NOISES, "torch", rounded_noise),
        "Draw the noise in float32.",
        severity="subtle",
    ),
    bug(
        "noise-of-another-generator",
        "noise_generator",
        "E57",
        outputs("pipeline/noise"),
        entry(NOISES, "torch", lambda original: NOISES["mlx"]),
        "A seed means torch's CPU generator.",
        severity="fatal",
        held_out=True,
    ),
    bug(
        "cfg-swapped",
        "cfg_swapped",
        "E55",
        VELOCITY,
        guided(lambda uncond, cond, scale: cond + (uncond - cond) * scale),
        "The negative prompt is the first half of the batch.",
        severity="fatal",
    ),
    bug(
        "cfg-papers-weight",
        "cfg_scale",
        "E55",
        VELOCITY,
        guided(lambda uncond, cond, scale: uncond + (cond - uncond) * (scale + 1)),
        "guidance_scale is 1 + w of the paper.",
    ),
    bug(
        "cfg-some-channels",
        "cfg_channels",
        "E55",
        VELOCITY,
        guided(some_channels),
        "Guide all channels.",
        held_out=True,
    ),
    bug(
        "modulation-kept-from-first-step",
        "stale_state",
        "E58",
        outputs(f"{BLOCK_0}.norm1"),
        attribute(mmdit.MMDiT, "modulation", remembered),
        "Compute the modulation for every step.",
        severity="fatal",
        step=1,
    ),
    bug(
        "vae-scale-missing",
        "vae_scaling",
        "E56",
        DECODED,
        denormalized(lambda x, scale, shift: x + shift),
        "Divide by scaling_factor first.",
    ),
    bug(
        "vae-shift-missing",
        "vae_scaling",
        "E56",
        DECODED,
        denormalized(lambda x, scale, shift: x / scale),
        "Add shift_factor.",
        severity="subtle",
        seen_in=FLOAT32,
    ),
    bug(
        "vae-scale-twice",
        "vae_scaling",
        "E56",
        DECODED,
        denormalized(lambda x, scale, shift: (x / scale + shift) / scale + shift),
        "The latents are unscaled once, before the decoder.",
    ),
    bug(
        "vae-multiplied",
        "vae_scaling",
        "E56",
        DECODED,
        denormalized(lambda x, scale, shift: x * scale + shift),
        "Divide by scaling_factor on the way to the decoder.",
    ),
    bug(
        "vae-shift-before-scale",
        "vae_scaling",
        "E56",
        DECODED,
        denormalized(lambda x, scale, shift: (x + shift) / scale),
        "Divide first, then add the shift.",
        severity="subtle",
        seen_in=FLOAT32,
        held_out=True,
    ),
)
