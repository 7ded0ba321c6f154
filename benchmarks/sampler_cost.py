"""What a sampler's own arithmetic costs beside the network: every sampler, one step, on MLX.

    .venv/bin/python benchmarks/sampler_cost.py                     all samplers
    .venv/bin/python benchmarks/sampler_cost.py euler dpmpp_2m_sde  some of them
    .venv/bin/python benchmarks/sampler_cost.py --sd3               beside SD3-medium, on a GPU

The network is replaced by one that answers at once with arrays made beforehand, so what is left is
the sampler: its arithmetic, the noise it draws, one `mx.eval` a step, as the pipeline has it.
A row is the mean over the steps of a run, each the fastest of several runs: other programs disturb
that least. First the arithmetic, then what the drawing of noise adds.
Shares are of one call of the network with guidance, measured in the same run: of the embedded
model, the smallest there is, on its latents of 16×16×16. Samplers that call the network twice or
three times a step are held to one call all the same. The last two columns are for latents of the
size of a 1024² picture of SD3, 64 times as large.

`--sd3` takes a network of SD3-medium's size with random bfloat16 weights and a 1024² picture. Noise
is drawn while the network runs; what it adds is the difference of two whole runs, with noise that
is drawn and with noise that is there already.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import lydite  # noqa: F401  isort: skip - before MLX, for its BLAS

import mlx.core as mx
import numpy as np

from lydite import embedded
from lydite.core.request import Request
from lydite.models.mmdit import MMDiT, MMDiTConfig
from lydite.pipelines.families.sd3 import BoundMMDiT
from lydite.pipelines.family import Run
from lydite.pipelines.noise import sampler_noise, torch_noise
from lydite.pipelines.pipeline import SILENT, Pipeline
from lydite.pipelines.steps import Denoiser
from lydite.sampling.denoiser import Prediction, cfg
from lydite.sampling.program_conventions import CONVENTIONS
from lydite.sampling.registry import SAMPLERS, Sampler, find_sampler, make_schedule
from lydite.sampling.sampler_types import FLOW, VE, NoiseModel
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.schedule import Schedule
from lydite.sampling.schedules.table import STABLE_DIFFUSION

STEPS = 20
SMALL, LARGE = (16, 16, 16), (16, 128, 128)  # (C, h, w) of the embedded model, and of SD3 at 1024²
BAR = 0.01


@dataclass
class Instant:
    """A network that takes no time: its answers are there already."""

    answers: Sequence[mx.array]
    noise_model: NoiseModel

    def __post_init__(self) -> None:
        self._next = cycle(self.answers)

    def __call__(self, x: mx.array, sigma: float) -> mx.array:
        return next(self._next)

    def pair(self, x: mx.array, sigma: float) -> tuple[mx.array, mx.array]:
        return next(self._next), next(self._next)


@dataclass(frozen=True)
class Cost:
    """Seconds per step of one sampler, on small and on large latents."""

    name: str
    noise: str
    arithmetic: tuple[float, float]  # with its noise there already
    drawing: tuple[float, float]  # what the drawing of it adds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("samplers", nargs="*", metavar="SAMPLER", help="all by default")
    parser.add_argument("--repeat", type=int, default=15, help="runs of which the fastest counts")
    parser.add_argument("--sd3", action="store_true", help="a network of SD3-medium's size")
    options = parser.parse_args()
    samplers = [find_sampler(name) for name in options.samplers] or list(SAMPLERS.values())
    if options.sd3:
        beside_sd3([each for each in samplers if "flow" in each.noise_models], options.repeat)
        return
    network = network_call(options.repeat)
    report([cost(each, options.repeat) for each in samplers], network)


def network_call(repeat: int) -> float:
    """Seconds of one call of the embedded model with guidance: a batch of 2."""
    pipeline = Pipeline.open(embedded.NAME, dtype="float32")
    request = Request("a large red star above a small blue ring on white", steps=STEPS)
    run = pipeline.plan(request)
    denoise = pipeline.denoiser(run, pipeline.encode(run), 1)
    x = normals(SMALL, 0)

    def seconds() -> float:
        start = time.perf_counter()
        mx.eval(denoise(x, 1.0))
        return time.perf_counter() - start

    return min(seconds() for _ in range(4 * repeat))


def beside_sd3(samplers: Sequence[Sampler], repeat: int) -> None:
    """Arithmetic alone, and the noise beside a real network, for one 1024² picture."""
    schedule = make_schedule("normal", STEPS, FlowSigmas(3.0))
    denoise = sd3_denoiser(schedule)
    x, sigmas = normals(LARGE, 1), schedule.sigmas.tolist()
    seconds: list[float] = []
    for _ in range(repeat):
        start = time.perf_counter()
        mx.eval(denoise(x, sigmas[0]))
        seconds.append(time.perf_counter() - start)
    network = statistics.median(seconds)
    print(f"a call at SD3-medium's size, 1024², batch 2, {mx.default_device()}: "
          f"{network * 1e3:.1f} ms")  # fmt: skip
    print(f"{'sampler':32}{'ms':>8}{'share':>8}{'noise':>8}{'share':>8}")
    arithmetic: list[tuple[str, float]] = []
    noise: list[tuple[str, float]] = []
    for sampler in samplers:
        own = run_of(sampler, LARGE, drawn=False, repeat=repeat)
        arithmetic.append((sampler.name, own))
        added = 0.0
        if sampler.noise != "none":
            whole = [
                min(picture_of(sampler, denoise, x, sigmas, drawn=drawn) for _ in range(3))
                for drawn in (False, True)
            ]
            added = max(0.0, whole[1] - whole[0]) / STEPS
            noise.append((sampler.name, added))
        print(f"{sampler.name:32}{own * 1e3:8.3f}{own / network:8.2%}{added * 1e3:8.3f}"
              f"{added / network:8.2%}", flush=True)  # fmt: skip
    verdict("arithmetic", arithmetic, network)
    if noise:
        verdict("noise, drawn while the network runs", noise, network)


def sd3_denoiser(schedule: Schedule) -> Denoiser:
    """A transformer of SD3-medium's size that knows nothing."""
    from sd3_gpu import CONFIG, TEXT

    model = MMDiT(MMDiTConfig(**CONFIG))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    text = mx.random.normal((2, TEXT, CONFIG["joint_attention_dim"])).astype(mx.bfloat16)
    pooled = mx.random.normal((2, CONFIG["pooled_projection_dim"])).astype(mx.bfloat16)
    run = Run(
        request=Request(guidance=5.0),
        schedule=schedule,
        sampler=find_sampler("euler"),
        options={},
        convention=CONVENTIONS["lydite"],
        prediction=Prediction("flow"),
        strength=lambda _: 5.0,
        is_guided=True,
        guidance="cfg",
        unit_variance=False,
        variance_preserving=False,
        shape=LARGE,
    )
    network = BoundMMDiT(model, {"text": text, "pooled": pooled}, run, 1, SILENT)
    return Denoiser(network, run, cfg, SILENT)


def picture_of(
    sampler: Sampler, denoise: Denoiser, x: mx.array, sigmas: list[float], *, drawn: bool
) -> float:
    """Seconds of one picture."""
    ready = cycle([normals(LARGE, seed) for seed in (5, 6)])
    start = time.perf_counter()
    noise: Any = lambda *_: next(ready)  # noqa: E731
    if drawn:
        streams = torch_noise([7], LARGE)
        noise = sampler_noise(sampler.noise, CONVENTIONS["lydite"], [7], LARGE, streams)
    for step in sampler.run(denoise, x, sigmas, noise=noise):
        mx.eval(step.x)
    return time.perf_counter() - start


def cost(sampler: Sampler, repeat: int) -> Cost:
    def both(*, drawn: bool) -> tuple[float, float]:
        small = run_of(sampler, SMALL, drawn=drawn, repeat=repeat)
        return small, run_of(sampler, LARGE, drawn=drawn, repeat=max(3, repeat // 3))

    still, whole = both(drawn=False), (0.0, 0.0)
    if sampler.noise != "none":
        whole = both(drawn=True)
    small, large = (max(0.0, whole[at] - still[at]) for at in (0, 1))
    return Cost(sampler.name, sampler.noise, still, (small, large))


def run_of(sampler: Sampler, shape: tuple[int, int, int], *, drawn: bool, repeat: int) -> float:
    """Seconds per step; with `drawn` the noise comes from a seed, as it does in a picture."""
    noise_model = FLOW if "flow" in sampler.noise_models else VE
    model: Any = FlowSigmas(3.0) if noise_model == FLOW else STABLE_DIFFUSION
    sigmas = make_schedule("normal", STEPS, model).sigmas.tolist()
    x, answers = normals(shape, 1), [normals(shape, seed) for seed in (2, 3, 4)]
    ready = cycle([normals(shape, seed) for seed in (5, 6)])

    def picture() -> list[float]:
        noise: Any = lambda *_: next(ready)  # noqa: E731
        if drawn:
            streams = torch_noise([7], shape)
            noise = sampler_noise(sampler.noise, CONVENTIONS["lydite"], [7], shape, streams)
        times = [time.perf_counter()]
        for step in sampler.run(Instant(answers, noise_model), x, sigmas, noise=noise):
            mx.eval(step.x)
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    picture()
    runs = zip(*(picture() for _ in range(repeat)), strict=True)
    return statistics.mean(min(times) for times in runs)


def normals(shape: tuple[int, int, int], seed: int) -> mx.array:
    channels, height, width = shape
    values = np.random.default_rng(seed).standard_normal((1, height, width, channels), np.float32)
    result = mx.array(values)
    mx.eval(result)
    return result


def report(costs: Sequence[Cost], network: float) -> None:
    print(f"a call of the embedded model, batch 2, {mx.default_device()}: {network * 1e3:.1f} ms")
    print(f"{'':32}{'latents 16×16×16':^32}{'1024²':^18}")
    print(f"{'sampler':32}{'ms':>8}{'share':>8}{'noise':>8}{'share':>8}{'ms':>9}{'noise':>9}")
    for each in sorted(costs, key=lambda each: -each.arithmetic[0]):
        (small, large), (drawn, drawn_large) = each.arithmetic, each.drawing
        print(
            f"{each.name:32}{small * 1e3:8.3f}{small / network:8.2%}{drawn * 1e3:8.3f}"
            f"{drawn / network:8.2%}{large * 1e3:9.2f}{drawn_large * 1e3:9.2f}"
        )
    verdict("arithmetic", [(each.name, each.arithmetic[0]) for each in costs], network)
    for kind in ("stream", "path"):
        drawn = [(each.name, each.drawing[0]) for each in costs if each.noise == kind]
        if drawn:
            verdict(f"noise from a {kind}", drawn, network)


def verdict(what: str, times: Sequence[tuple[str, float]], network: float) -> None:
    above = [name for name, seconds in times if seconds > BAR * network]
    most = max(seconds for _, seconds in times) / network
    line = f"{what}: {len(times) - len(above)} of {len(times)} within {BAR:.0%}, at most {most:.2%}"
    print(line + (f"; above: {', '.join(above)}" if above else ""))


if __name__ == "__main__":
    main()
