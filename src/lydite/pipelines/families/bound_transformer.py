"""Transformers that run each prompt at its own length: FLUX, Qwen-Image and Z-Image.

Reference: diffusers 0.42.1, the loops of pipelines/flux and pipelines/qwenimage. Each prompt is a
call of its own: the prompt first, then the negative one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from lydite.models.cpu import in_parallel
from lydite.models.layers import on_cpu
from lydite.models.modulation import Modulation
from lydite.models.packing import pack_latents, unpack_latents
from lydite.pipelines.family import LatentSpace, Run
from lydite.pipelines.model import Model
from lydite.pipelines.observer import Observer
from lydite.pipelines.steps import compiled

SIDE = 128  # of the latents of the size that the models were made for
MakeTables = Callable[[mx.array, int], Modulation]  # (timesteps, number of the prompt) → all steps


class BoundTransformer:
    """A transformer with its texts, positions and modulation tables for every step.

    It is given packed latents, and its output is unpacked.
    """

    def __init__(
        self,
        transformer: Any,
        texts: Sequence[mx.array],
        make_tables: MakeTables,
        run: Run,
        batch: int,
        observer: Observer,
        *,
        shared_tables: bool = False,
    ) -> None:
        """`shared_tables`: the tables do not depend on the prompt."""
        self._make_tables, self._batch, self._dtype = make_tables, batch, texts[0].dtype
        _, self._height, self._width = run.shape
        timesteps = mx.array(run.schedule.timesteps.astype(np.float32))
        tables: dict[int, Modulation] = {}
        embedded: dict[int, mx.array] = {}
        with observer.all_steps(timesteps.size):
            for prompt in reversed(range(len(texts))):
                if not (shared_tables and tables):
                    tables[prompt] = self._tables_for(timesteps, prompt)
                embedded[prompt] = transformer.embed_text(texts[prompt])
        last = tables[len(texts) - 1]
        self._tables = [tables.get(prompt, last) for prompt in range(len(texts))]
        self._texts = [mx.repeat(embedded[prompt], batch, axis=0) for prompt in range(len(texts))]
        self._positions = [self.positions(transformer, text.shape[1]) for text in texts]
        mx.eval(self._tables, self._texts, self._positions)
        self._network = compiled(transformer)
        self._steps = {float(at): index for index, at in enumerate(run.schedule.timesteps)}

    def __call__(self, x: mx.array, timestep: float, prompts: int) -> mx.array:
        tokens = self.pack(x).astype(self._dtype)  # (B, L, 4C)

        def call(prompt: int) -> mx.array:
            tables = self._tables_at(timestep, prompt)
            return self._network(tokens, self._texts[prompt], tables, self._positions[prompt])

        used = reversed(range(len(self._texts) - prompts, len(self._texts)))
        calls = [partial(call, prompt) for prompt in used]
        outputs = in_parallel(calls) if on_cpu() else [call() for call in calls]
        joined = mx.concatenate(outputs[::-1]).astype(mx.float32)  # (prompts·B, L, 4C)
        return self.unpack(joined, self._height, self._width)

    def positions(self, transformer: Any, text_length: int) -> Any:
        """Of the tokens of a text and of the latents."""
        return transformer.positions(text_length, self._height // 2, self._width // 2)

    def pack(self, latents: mx.array) -> mx.array:
        """Latents (B, h, w, C) as the network takes them."""
        return pack_latents(latents)

    def unpack(self, output: mx.array, height: int, width: int) -> mx.array:
        """The network's output as the velocity of latents: (B, h, w, C)."""
        return unpack_latents(output, height, width)

    def _tables_at(self, timestep: float, prompt: int) -> Modulation:
        """This step's tables; some samplers evaluate between two steps of the schedule."""
        if timestep in self._steps:
            tables, step = self._tables[prompt], self._steps[timestep]
        else:
            at = mx.array([timestep], dtype=mx.float32)
            tables, step = self._tables_for(at, prompt), 0
        return {path: table[step] for path, table in tables.items()}

    def _tables_for(self, timesteps: mx.array, prompt: int) -> Modulation:
        """For all steps and pictures of a batch: (S, B, n, D) each."""
        tables = self._make_tables(timesteps, prompt)
        return {path: mx.repeat(table, self._batch, axis=1) for path, table in tables.items()}


def latents(model: Model) -> LatentSpace:
    """Any size: positions are computed, not learnt."""
    vae = model.config("vae")
    side = SIDE * vae.factor
    return LatentSpace(vae.latent_channels, vae.factor, patch=2, default=(side, side))
