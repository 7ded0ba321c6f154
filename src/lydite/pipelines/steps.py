"""The steps of a run: the network as they call it, the denoiser over it, the loop."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import hypot
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from lydite.core.errors import InputError
from lydite.models import cpu
from lydite.models.layers import at_timestep, on_cpu, this_timestep
from lydite.pipelines.family import Network, Run
from lydite.pipelines.inpainting import Inpainting
from lydite.pipelines.noise import RunNoise, sampler_noise
from lydite.pipelines.observer import BOTH_PROMPTS, Observer
from lydite.sampling.denoiser import Guide, Guided
from lydite.trace.mlx_compilation import compiles


def for_device(network: nn.Module) -> Callable[..., mx.array]:
    """Compiled on a GPU; on a CPU with parts of the batch on several cores."""
    return partial(_in_parts, network) if on_cpu() else compiled(network)


def compiled(network: nn.Module) -> Callable[..., mx.array]:
    """On a GPU fewer, larger kernels pay at once; on a CPU MLX would call a C++ compiler first."""
    if on_cpu():
        return network

    @mx.compile
    def graph(timestep: mx.array | None, *arguments: Any) -> Any:
        with at_timestep(timestep):  # an input: else that of the first call would be in the graph
            return network(*arguments)  # pyright: ignore[reportCallIssue]

    return lambda *arguments: graph(this_timestep(), *arguments)


def _in_parts(network: nn.Module, *arguments: Any) -> mx.array:
    """The batch is the first axis of the first argument, and of every array as long as it.

    Who watches modules or exchanges them turns compilation off, and sees whole batches.
    """
    rows = arguments[0].shape[0]
    parts = min(rows, len(cpu.streams()))
    if parts == 1 or not compiles():
        return network(*arguments)

    def part(index: int) -> mx.array:
        rows_of_part = slice(rows * index // parts, rows * (index + 1) // parts)
        return network(*tree_map(lambda x: x[rows_of_part] if len(x) == rows else x, arguments))

    return mx.concatenate(cpu.in_parallel(partial(part, index) for index in range(parts)))


@dataclass(frozen=True, eq=False)
class Batch:
    """Pictures that are denoised together, before or after the steps of a run."""

    first: int  # position of its first picture among all of the run
    seeds: tuple[int, ...]
    noise: RunNoise  # what comes next of each seed's
    x: mx.array  # latents
    inpainting: Inpainting | None = None


class Denoiser:
    """`denoise(x, sigma)` over a bound network; every value passes the run's observer."""

    def __init__(self, network: Network, run: Run, guide: Guide, observer: Observer) -> None:
        self._network, self._run, self._guide = network, run, guide
        self._observer = observer
        self._prompts = len(run.prompts)
        self.noise_model = run.prediction.noise_model
        self.step = 0  # of the schedule, set by the loop over the sampler's steps
        self.inpainting: Inpainting | None = None  # of the batch
        self._started = False

    @property
    def _guided(self) -> Guided[mx.array]:
        """Made for each call: kept, it would be in a cycle, and the network freed late."""
        return Guided(
            self._outputs,
            self._run.prediction,
            self._run.schedule.timestep_of,
            self._run.strength,
            self._run.request.guidance_rescale,
            prompts=self._prompts,
            guide=self._guide,
            on_output=self._observed_prediction,
        )

    def begin(self, first: int = 0, inpainting: Inpainting | None = None) -> None:
        """A new batch follows, whose first step has this number."""
        self.step, self.inpainting, self._started = first, inpainting, False

    def __call__(self, x: mx.array, sigma: float) -> mx.array:
        """The clean latents the network sees in x, (B, …, C) in float32."""
        blended = self._blended(x, sigma)
        denoised = self._guided(self._observed_input(blended, sigma), sigma)
        return denoised if blended is x else denoised + (x - blended)

    def pair(self, x: mx.array, sigma: float) -> tuple[mx.array, mx.array]:
        """With guidance, and with the negative prompt alone."""
        blended = self._blended(x, sigma)
        guided, uncond = self._guided.pair(self._observed_input(blended, sigma), sigma)
        if blended is x:
            return guided, uncond
        return guided + (x - blended), uncond + (x - blended)

    def _blended(self, x: mx.array, sigma: float) -> mx.array:
        """Inpainting replaces a sampler's x within a step too, but not the one it starts from.

        The sampler goes on from the x that it gave: what it computes of it and the denoised latents
        is as of the replaced one, when the difference is added to the denoised latents.
        """
        started, self._started = self._started, True
        return self.inpainting.blend(x, sigma) if self.inpainting and started else x

    def _observed_input(self, x: mx.array, sigma: float) -> mx.array:
        return self._observer.observe("denoiser_input", x, step=self.step, sigma=sigma)

    def _observed_prediction(self, prediction: mx.array, sigma: float) -> mx.array:
        return self._observer.observe("prediction", prediction, step=self.step, sigma=sigma)

    def _outputs(self, x: mx.array, timestep: float, prompts: Sequence[int]) -> Sequence[mx.array]:
        """One output for each of the prompts, which are all of the run's or the last one."""
        name = BOTH_PROMPTS if len(prompts) > 1 else "cond" if self._prompts > 1 else ""
        if self.inpainting is not None and self.inpainting.channels is not None:
            x = mx.concatenate([x, self.inpainting.channels], axis=-1)
        with at_timestep(timestep):
            output = self._network(x, timestep, len(prompts))  # (prompts·B, …, C)
        mx.async_eval(output)  # the sampler draws its noise meanwhile
        output = self._observer.observe("network_output", output, name=name, step=self.step)
        return list(mx.split(output, len(prompts)))


def run_steps(run: Run, denoise: Denoiser, batch: Batch, observer: Observer) -> mx.array:
    """The latents after all steps."""
    kind = run.sampler.noise_for(run.options)
    added = sampler_noise(kind, run.convention, batch.seeds, run.shape, batch.noise)
    sigmas, x = run.schedule.sigmas.tolist(), batch.x
    # A scheduler of diffusers that ends above 0 leaves the latents in the form it computes with.
    last = sigmas[-1 if run.stop is None else run.stop]
    scale = hypot(1, last) if run.variance_preserving else 1.0
    steps = run.sampler.run(denoise, x, sigmas, noise=added, **run.options)
    before = x
    for step in islice(steps, run.stop):
        if run.stop is not None and step.sigma_next != sigmas[step.index + 1]:
            raise InputError(
                f"sampler {run.sampler.name} chooses its own steps, so a refiner cannot go on "
                "after some of them. Choose another sampler."
            )
        # The next step is prepared while this one runs; two steps' graphs are the most there are.
        mx.async_eval(step.x)
        mx.eval(before)
        index = run.first + step.index
        observer.observe("denoised", step.denoised, step=index)
        if denoise.inpainting is not None and step.index < run.steps - 1:
            step.x = denoise.inpainting.blend(step.x, step.sigma_next)
        elif denoise.inpainting is not None:
            step.x = denoise.inpainting.finish(step.x, scale)
        before = x = step.x = observer.observe("latents", step.x, step=index)
        denoise.step = index + 1
    return x / scale if scale != 1 else x


def resume(run: Run, batches: Iterable[Batch], observer: Observer) -> Iterator[Batch]:
    """Batches as another model left them, in the form that the run's sampler computes with."""
    scale = hypot(1, float(run.schedule.sigmas[0])) if run.variance_preserving else 1.0
    for batch in batches:
        observer.begin_batch(batch.first, batch.seeds)
        yield replace(batch, x=batch.x * scale)
