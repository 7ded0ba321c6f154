"""What a calibration run costs beside plain generation, and what a second worker brings.

    .venv/bin/python benchmarks/calibrate_run.py                 some minutes, the embedded model
    .venv/bin/python benchmarks/calibrate_run.py --only cost --rounds 20

`cost` draws the same images turn and turn about, as `lydite generate` does and as a calibration run
that keeps every step and commits each image. Ratios are of pairs, of sums and of the fastest, in
wall and CPU seconds, for a machine that is shared; the commit is timed by itself as well. `workers`
makes the same set with one worker and with two, turn and turn about, and times the images after
the models are loaded. Equal content is checked. One process uses more than one core, since MLX
computes while Python prepares what comes next; so the same is measured of processes that only
draw, and have nothing in common: what two of them bring is what the machine can give.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from lydite.core.fast_blas import use_one_thread

use_one_thread()  # before MLX

from lydite import embedded  # noqa: E402
from lydite.calibrate.model_session import ModelSession, model_hash, open_pipeline  # noqa: E402
from lydite.calibrate.request_record import conditions_of  # noqa: E402
from lydite.calibrate.run import Model, RunCallbacks  # noqa: E402
from lydite.calibrate.settings import (  # noqa: E402
    Description,
    Image,
    Plan,
    Settings,
    plan_of,
)
from lydite.calibrate.store.writer import Writer  # noqa: E402
from lydite.calibrate.workers import run_workers  # noqa: E402
from lydite.core.request import Request  # noqa: E402
from lydite.pipelines.family import Run  # noqa: E402
from lydite.pipelines.pipeline import Pipeline  # noqa: E402

MODEL = Model(embedded.NAME)
PROMPT = "a large red star above a small blue ring"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", choices=("cost", "workers"))
    parser.add_argument("--rounds", type=int, default=12, help="images of each kind")
    parser.add_argument("--images", type=int, default=12, help="of a set that workers make")
    parser.add_argument("--turns", type=int, default=3, help="sets with one worker and with two")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    pipeline = open_pipeline(MODEL, "float32")
    pipeline.model.prepare()
    run = planned_run(pipeline, options.steps)
    settings = Settings(model_hash(pipeline), conditions_of(run.request, "float32"), "F32")
    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "cost"):
            steps = range(options.steps)
            cost(Path(folder, "cost"), pipeline, run, settings, options.rounds, steps)
        if options.only in (None, "workers"):
            workers(Path(folder), settings, options.images, options.turns)


def planned_run(pipeline: Pipeline, steps: int) -> Run:
    return pipeline.plan(Request(PROMPT, steps=steps))


def planned(images: int, steps: Iterable[int]) -> Plan:
    return plan_of([(PROMPT, seed) for seed in range(images)], steps)


def commit(
    writer: Writer,
    session: ModelSession,
    spent: list[float],
    image: Image,
    wanted: list[int | None],
) -> None:
    items = session.items(image, wanted)
    start = time.perf_counter()
    writer.commit(items)
    spent.append(time.perf_counter() - start)


def cost(
    folder: Path,
    pipeline: Pipeline,
    run: Run,
    settings: Settings,
    rounds: int,
    kept: Iterable[int],
) -> None:
    """Seconds of an image, plain and stored."""
    plan = planned(rounds + 1, kept)
    session = ModelSession(Description(settings, plan), pipeline)
    plain: list[tuple[float, float]] = []
    stored: list[tuple[float, float]] = []
    commits: list[float] = []
    with Writer.start(folder, settings, plan) as writer:
        for image, wanted in writer.missing().items():
            plainly = partial(lambda *given: list(pipeline.generate(*given)), run, [image.seed])
            storing = partial(
                lambda *given: commit(writer, session, commits, *given), image, wanted
            )
            turns = [(plainly, plain), (storing, stored)]
            for draw, times in turns if image.number % 2 else reversed(turns):
                start = time.perf_counter(), time.process_time()
                draw()
                times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    plain, stored = plain[1:], stored[1:]  # the first of each warms up
    for number, name in enumerate(("wall", "CPU")):
        one, other = ([each[number] for each in times] for times in (plain, stored))
        ratio = statistics.median(b / a for a, b in zip(one, other, strict=True))
        print(
            f"cost, {rounds} images of {run.steps} steps, {name} seconds: plain "
            f"{statistics.median(one):.3f}, stored {statistics.median(other):.3f}; median ratio of "
            f"pairs {ratio:.3f}, of sums {sum(other) / sum(one):.3f}, of the fastest "
            f"{min(other) / min(one):.3f}"
        )
    share = statistics.median(commits) / statistics.median(each[0] for each in plain)
    print(f"cost, of which the commit {1000 * statistics.median(commits):.1f} ms, {share:.1%}")


def workers(folder: Path, settings: Settings, images: int, turns: int) -> None:
    """Seconds of a set with one worker and with two, loading left out."""
    plan = planned(images, range(int(settings.conditions["steps"])))
    spent: dict[int, list[float]] = {1: [], 2: []}
    plain: dict[int, list[float]] = {1: [], 2: []}
    hashes: set[str] = set()
    names = count()
    for _ in range(turns):
        for workers, times in spent.items():
            with Writer.start(folder / f"workers-{next(names)}", settings, plan) as writer:
                finished: list[float] = []
                callbacks = RunCallbacks(
                    finished=lambda image, to=finished: to.append(time.perf_counter())
                )
                run_workers(writer, MODEL, workers, callbacks)
                hashes.add(writer.content_hash)
            # from the first round of images to the last: what lies between is independent work
            done = len(finished) - workers
            times.append((finished[-1] - finished[workers - 1]) / done)
            plain[workers].append(independent_processes(settings, workers, images // 2))
    assert len(hashes) == 1, "the sets differ"
    reached = print_ratio(f"workers, {turns} sets of {images} images", spent)
    possible = print_ratio("processes that only draw", plain)
    print(f"workers reach {reached / possible:.2f} of what the machine gives")


def print_ratio(what: str, spent: dict[int, list[float]]) -> float:
    """Print what two bring, and return it."""
    pairs = [one / two for one, two in zip(spent[1], spent[2], strict=True)]
    one, two = statistics.median(spent[1]), statistics.median(spent[2])
    print(
        f"{what}: an image takes {one:.3f} s with one, {two:.3f} s with two; ratios "
        f"{', '.join(f'{ratio:.2f}' for ratio in pairs)}, median {statistics.median(pairs):.2f}"
    )
    return statistics.median(pairs)


def independent_processes(settings: Settings, count: int, images: int) -> float:
    """Seconds of an image when so many processes draw and do nothing else."""
    context = multiprocessing.get_context("spawn")
    begin, times = context.Barrier(count), context.Queue()
    steps = int(settings.conditions["steps"])
    processes = [
        context.Process(target=draw, args=(begin, times, steps, images)) for _ in range(count)
    ]
    for process in processes:
        process.start()
    spent = [times.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return statistics.mean(spent) / images / count


def draw(begin: Any, times: Any, steps: int, images: int) -> None:
    pipeline = open_pipeline(MODEL, "float32")
    run = planned_run(pipeline, steps)
    for _ in pipeline.generate(run, [0]):
        pass
    begin.wait()
    start = time.perf_counter()
    for seed in range(images):
        for _ in pipeline.generate(run, [seed]):
            pass
    times.put(time.perf_counter() - start)


if __name__ == "__main__":
    main()
