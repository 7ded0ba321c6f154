"""The network as the sampler sees it: `denoise(x, sigma)` for one prompt, size and schedule."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from lydite.models.layers import on_cpu
from lydite.models.mmdit import MMDiT, Modulation
from lydite.pipelines.sd3_text import Conditioning
from lydite.pipelines.watch import Watch, unwatched
from lydite.sampling.guidance import Strength, cfg, cfg_rescale
from lydite.sampling.noise_model import FLOW
from lydite.sampling.prediction import flow_denoised
from lydite.sampling.schedules import Schedule


class Denoiser:
    """Computes once what is constant over the steps, and then one velocity per step."""

    noise_model = FLOW

    def __init__(
        self,
        transformer: MMDiT,
        conditioning: Conditioning,
        schedule: Schedule,
        *,
        height: int,
        width: int,
        batch: int,
        strength: Strength,
        rescale: float = 0.0,
        watch: Watch = unwatched,
    ) -> None:
        self._transformer, self._pooled, self._schedule = transformer, conditioning.pooled, schedule
        timesteps = mx.array(schedule.timesteps.astype(np.float32))
        self._modulation = transformer.modulation(timesteps, self._pooled)  # (S, C, n, D)
        text = transformer.embed_text(conditioning.text)
        self._text = mx.repeat(text, batch, axis=0)  # (C*B, S, D)
        self._positions = transformer.positions(height, width)
        mx.eval(self._modulation, self._text, self._positions)
        # On a GPU fewer, larger kernels pay at once; on a CPU MLX would call a C++ compiler first.
        self._network = transformer if on_cpu() else mx.compile(transformer)
        self._steps = {float(sigma): index for index, sigma in enumerate(schedule.sigmas[:-1])}
        self._dtype = conditioning.text.dtype
        self._batch, self._prompts = batch, conditioning.text.shape[0]
        self._strength, self._rescale, self._watch = strength, rescale, watch
        # Sees each guided velocity, and gives the one the sampler goes on with.
        self.on_velocity: Callable[[mx.array], mx.array] | None = None

    def __call__(self, x: mx.array, sigma: float) -> mx.array:
        """The clean latents the network sees in x, (B, h, w, C) in float32."""
        if self._prompts > 1 and self._strength(sigma) > 1:
            return self.pair(x, sigma)[0]
        (cond,) = self._velocities(x, sigma, 1)
        return self._denoised(x, cond, sigma)

    def pair(self, x: mx.array, sigma: float) -> tuple[mx.array, mx.array]:
        """What it sees with guidance and what without the prompt: the same when that is off."""
        *uncond, cond = self._velocities(x, sigma, self._prompts)
        guided = cond
        if uncond:
            guided = cfg(uncond[0], cond, float(self._strength(sigma)))
            if self._rescale:
                guided = cfg_rescale(guided, cond, self._rescale)
        denoised = self._denoised(x, guided, sigma)
        return denoised, flow_denoised(x, uncond[0], sigma) if uncond else denoised

    def _denoised(self, x: mx.array, velocity: mx.array, sigma: float) -> mx.array:
        if self.on_velocity:
            velocity = self.on_velocity(velocity)
        return flow_denoised(x, velocity, sigma)

    def _velocities(self, x: mx.array, sigma: float, prompts: int) -> list[mx.array]:
        """One velocity for each of the last `prompts`, the negative one first, in float32."""
        inputs = mx.concatenate([x] * prompts).astype(self._dtype)  # (C*B, h, w, C)
        text = self._text[-prompts * self._batch :]  # (C*B, S, D)
        velocity = self._network(inputs, text, self._tables(sigma, prompts), self._positions)
        parts = mx.split(velocity.astype(mx.float32), prompts)
        mx.async_eval(*parts)  # the sampler draws its noise meanwhile
        place = f"step {self._steps[sigma]}" if sigma in self._steps else f"sigma {sigma:.4g}"
        for part, name in zip(parts, ("uncond", "cond")[-prompts:], strict=True):
            self._watch(f"{place} transformer" + (f" {name}" if self._prompts > 1 else ""), part)
        return list(parts)

    def _tables(self, sigma: float, prompts: int) -> Modulation:
        """Tables of the adaptive norms; some samplers look between two steps of the schedule."""
        if sigma in self._steps:
            tables, at = self._modulation, self._steps[sigma]
        else:
            timestep = mx.array([self._schedule.timestep_of(sigma)], dtype=mx.float32)
            tables, at = self._transformer.modulation(timestep, self._pooled), 0
        return {
            path: mx.repeat(table[at, -prompts:], self._batch, axis=0)
            for path, table in tables.items()
        }
