"""What statistics of activations and stored blocks cost beside the plain call of the network.

    .venv/bin/python benchmarks/calibrate_activations.py              a minute
    .venv/bin/python benchmarks/calibrate_activations.py --only sizes

`time` runs one sample plainly, with statistics and with blocks, turn and turn about; ratios are of
the medians. `memory` collects one, then four times as many samples, and reads the peak of the
process. `sizes` counts rows and bytes of the embedded model's file, and from the shapes of
SD3-medium what its file would have.
"""

import argparse
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from lydite.core.fast_blas import use_one_thread

use_one_thread()  # before MLX; on one thread, as the command

import numpy as np  # noqa: E402

from lydite import embedded  # noqa: E402
from lydite.calibrate.activations.collect import Selection, collect  # noqa: E402
from lydite.calibrate.activations.places import Places  # noqa: E402
from lydite.calibrate.blocks import BlockRecorder  # noqa: E402
from lydite.calibrate.model_session import Model, model_hash, open_pipeline  # noqa: E402
from lydite.calibrate.replay import Replay, network, replaying  # noqa: E402
from lydite.calibrate.request_record import conditions_of  # noqa: E402
from lydite.calibrate.settings import Settings, plan_of  # noqa: E402
from lydite.calibrate.store.reader import CalibrationSet  # noqa: E402
from lydite.calibrate.store.shards import Entry  # noqa: E402
from lydite.calibrate.store.writer import Writer  # noqa: E402
from lydite.core.files import size_text  # noqa: E402
from lydite.core.request import Request  # noqa: E402
from lydite.models.mmdit import MMDiT, MMDiTConfig  # noqa: E402
from lydite.pipelines.pipeline import Pipeline  # noqa: E402
from lydite.trace.mlx_capture import walk  # noqa: E402

PROMPTS = ("a red star", "a blue ring", "a large green square", "a small yellow circle")
SD3_MEDIUM = MMDiTConfig(
    sample_size=128, patch_size=2, in_channels=16, num_layers=24, attention_head_dim=64,
    num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536,
    pooled_projection_dim=2048, out_channels=16, pos_embed_max_size=192,
)  # fmt: skip


class Blind:
    """Looks at nothing."""

    def wants(self, path: str, slot: str) -> bool:
        return False

    def add(self, path: str, slot: str, value: object) -> None:
        raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=("time", "memory", "sizes"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    pipeline = open_pipeline(Model(embedded.NAME), "float32")
    pipeline.model.prepare()
    settings = settings_of(pipeline, options.steps)
    if options.only in (None, "time"):
        cost(pipeline, settings, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "memory"):
            memory(pipeline, settings, Path(folder))
        if options.only in (None, "sizes"):
            sizes(pipeline, settings, Path(folder))


def settings_of(pipeline: Pipeline, steps: int) -> Settings:
    request = pipeline.plan(Request("", steps=steps)).request
    return Settings(model_hash(pipeline), conditions_of(request, "float32"), model=embedded.NAME)


def cost(pipeline: Pipeline, settings: Settings, rounds: int) -> None:
    """One sample in three ways."""
    entry, x = sample(pipeline, settings)
    model, tap = network(pipeline), BlockRecorder(pipeline.family.blocks, 0)
    places = Places(model)
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "statistics": [], "blocks": []}
    plain = Replay(pipeline, settings, Blind())
    for number in range(rounds + 1):
        found = {"plain": timed(lambda: plain.run(entry, x))}
        with replaying(pipeline, settings, places) as replay:
            replay.run(entry, x)  # the prompt is read once, and not for each sample
            places.taken()
            found["statistics"] = timed(lambda r=replay: (r.run(entry, x), places.taken()))
        with replaying(pipeline, settings, tap) as replay:
            replay.run(entry, x)
            tap.begin("0")
            found["blocks"] = timed(lambda r=replay: r.run(entry, x))
        for name, seconds in found.items():
            if number:  # the first round warms up
                times[name].append(seconds)
    print(f"one sample, embedded model, median of {rounds}, both halves of guidance:")
    plain_clock, plain_cores = (
        statistics.median(each) for each in zip(*times["plain"], strict=True)
    )
    for name, each in times.items():
        clock, cores = (statistics.median(seconds) for seconds in zip(*each, strict=True))
        print(
            f"  {name:11} {1e3 * clock:6.1f} ms, {clock / plain_clock:.2f} × plain; "
            f"cores {1e3 * cores:6.1f} ms, {cores / plain_cores:.2f} × plain"
        )


def memory(pipeline: Pipeline, settings: Settings, folder: Path) -> None:
    """The peak of the process after one set, and after one four times as large."""
    for images in (2, 8):
        path = make_set(pipeline, settings, folder / f"memory-{images}", images, steps=4)
        with CalibrationSet.open(path) as opened:
            collect(opened, pipeline, folder / f"memory-{images}.sqlite", Selection())
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        print(f"memory: {size_text(peak)} at most after {images * 4} samples")


def sizes(pipeline: Pipeline, settings: Settings, folder: Path) -> None:
    """Rows and bytes of a whole run of the embedded model; SD3-medium by its shapes."""
    steps = int(settings.conditions["steps"])
    path = make_set(pipeline, settings, folder / "sizes", 1, steps=steps)
    out = folder / "sizes.sqlite"
    with CalibrationSet.open(path) as opened:
        collect(opened, pipeline, out, Selection())
    with closing(sqlite3.connect(f"{out.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        (rows,) = connection.execute("SELECT count(*) FROM channel").fetchone()
        (places,) = connection.execute("SELECT count(*) FROM place").fetchone()
    size = out.stat().st_size
    each = size / rows
    print(
        f"embedded: {places} places, {rows:,} rows at {steps} steps, {size_text(size)}, "
        f"{each:.0f} bytes a row"
    )
    channels = channel_count(MMDiT(SD3_MEDIUM))
    for kept, word in (
        (28, "28 steps"),
        (7, "7 steps (every:4)"),
        (4, "--per 4"),
        (1, "--per all"),
    ):
        rows = channels * kept
        print(f"SD3-medium, {word}: {rows:,} rows, about {size_text(rows * each)}")


def channel_count(model: MMDiT) -> int:
    """Channels of all places of a model, from the shapes of its weights; none is evaluated."""
    total = 0
    layers = Places(model).layers
    modules: list[tuple[str, Any]] = list(walk(model))
    for path, module in modules:
        if path in layers:
            total += module.weight.shape[0] + module.weight.shape[-1]  # out and in
        elif "to_q" in module:
            width = module.to_q.weight.shape[0]
            total += 3 * width + module.heads  # q, k, v, softmax
    return total


def sample(pipeline: Pipeline, settings: Settings) -> tuple[Entry, np.ndarray]:
    """A sample in the middle of a run."""
    from lydite.calibrate.request_record import request_of

    request, _ = request_of(settings.conditions)
    sigmas = pipeline.plan(request).schedule.sigmas.tolist()
    x = np.random.default_rng(0).standard_normal((16, 16, 16), np.float32)
    return Entry("0" * 64, "sample", PROMPTS[0], {}, 0, 0, 8, sigmas[len(sigmas) // 2]), x


def make_set(
    pipeline: Pipeline, settings: Settings, folder: Path, images: int, *, steps: int
) -> Path:
    """A set of noise at the run's sigmas: what it costs does not depend on the pictures."""
    from lydite.calibrate.request_record import request_of

    request, _ = request_of(settings.conditions)
    sigmas = pipeline.plan(request).schedule.sigmas.tolist()
    every = (len(sigmas) - 1) // steps
    kept = range(0, steps * every, every)
    drawn = [(PROMPTS[n % len(PROMPTS)], n) for n in range(images)]
    rng = np.random.default_rng(0)
    with Writer.start(folder, settings, plan_of(drawn, kept, pictures=False)) as writer:
        for image in writer.plan.images:
            tensors = [rng.standard_normal((16, 16, 16), np.float32) for _ in kept]
            writer.commit(
                writer.builder.sample(
                    image.number, step, {"x": x}, sigma=sigmas[step], timestep=0.0
                )
                for step, x in zip(kept, tensors, strict=True)
            )
    return folder


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of all cores: on a busy machine the second says more."""
    start, begin = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - begin


if __name__ == "__main__":
    main()
