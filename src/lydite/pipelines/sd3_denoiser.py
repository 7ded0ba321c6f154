"""The network as the sampler sees it: `denoise(x, sigma)` for one prompt, size and schedule."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from lydite.models.layers import on_cpu
from lydite.models.mmdit import MMDiT
from lydite.pipelines.sd3_text import Conditioning
from lydite.pipelines.watch import Watch, unwatched
from lydite.sampling.guidance import cfg
from lydite.sampling.law import FLOW
from lydite.sampling.prediction import flow_denoised
from lydite.sampling.schedules import Schedule


class Denoiser:
    """Computes once what is constant over the steps, and then one velocity per step."""

    law = FLOW

    def __init__(
        self,
        transformer: MMDiT,
        conditioning: Conditioning,
        schedule: Schedule,
        *,
        height: int,
        width: int,
        batch: int,
        guidance: float,
        watch: Watch = unwatched,
    ) -> None:
        timesteps = mx.array(schedule.timesteps.astype(np.float32))
        self._modulation = transformer.modulation(timesteps, conditioning.pooled)  # (S, C, n, D)
        text = transformer.embed_text(conditioning.text)
        self._text = mx.repeat(text, batch, axis=0)  # (C*B, S, D)
        self._positions = transformer.positions(height, width)
        mx.eval(self._modulation, self._text, self._positions)
        # On a GPU fewer, larger kernels pay at once; on a CPU MLX would call a C++ compiler first.
        self._network = transformer if on_cpu() else mx.compile(transformer)
        self._steps = {float(sigma): index for index, sigma in enumerate(schedule.sigmas[:-1])}
        self._dtype = conditioning.text.dtype
        self._batch, self._prompts = batch, conditioning.text.shape[0]
        self._guidance, self._watch = guidance, watch
        # Sees each guided velocity, and gives the one the sampler goes on with.
        self.on_velocity: Callable[[mx.array], mx.array] | None = None

    def __call__(self, x: mx.array, sigma: float) -> mx.array:
        """The clean latents the network sees in x, (B, h, w, C) in float32."""
        return flow_denoised(x, self.velocity(x, self._steps[sigma]), sigma)

    def velocity(self, x: mx.array, step: int) -> mx.array:
        """The guided velocity at one step of the schedule, in float32."""
        tables = {
            path: mx.repeat(table[step], self._batch, axis=0)
            for path, table in self._modulation.items()
        }
        inputs = mx.concatenate([x] * self._prompts).astype(self._dtype)  # (C*B, h, w, C)
        velocity = self._network(inputs, self._text, tables, self._positions).astype(mx.float32)
        if self._prompts == 1:
            self._watch(f"step {step} transformer", velocity)
        else:
            uncond, cond = mx.split(velocity, 2)
            self._watch(f"step {step} transformer uncond", uncond)
            self._watch(f"step {step} transformer cond", cond)
            velocity = cfg(uncond, cond, self._guidance)
        return self.on_velocity(velocity) if self.on_velocity else velocity
