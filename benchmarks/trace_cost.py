"""What recording costs: time against an unrecorded run, bytes against the budget, bytes a second.

    .venv/bin/python benchmarks/trace_cost.py               all three
    .venv/bin/python benchmarks/trace_cost.py --only model  the embedded model alone

The embedded model draws with and without a recorder on every module of its transformer and VAE,
turn and turn about; ratios are of medians, and of CPU seconds too, for a machine that is shared.
The other two write made-up values of a large transformer at 256² pixels: 60 blocks, 20 values a
block, 256 × 3072 in bfloat16.
"""

import argparse
import shutil
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lydite.trace.events import Event, Header
from lydite.trace.reader import Trace
from lydite.trace.recorder import Recorder
from lydite.trace.writer import Capture, Level, TraceWriter

BLOCKS, VALUES, SHAPE = 60, 20, (256, 3072)
LEVELS: tuple[Level, ...] = ("stats", "sketch", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", choices=("model", "budget", "speed"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture-steps", type=int, default=4)
    parser.add_argument("--budget", type=int, default=Capture().budget, help="bytes")
    parser.add_argument("--trace-steps", type=int, default=2, help="of the made-up model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "model"):
            model(Path(folder), options.rounds, options.picture_steps)
        if options.only in (None, "speed"):
            speed(Path(folder))
        if options.only in (None, "budget"):
            budget(Path(folder), options.budget, options.trace_steps)


def model(folder: Path, rounds: int, steps: int) -> None:
    """Seconds of one picture with nothing, and with every module recorded at each level."""
    from lydite import embedded
    from lydite.core.request import Request
    from lydite.pipelines.pipeline import Pipeline

    pipeline = Pipeline.open(embedded.NAME, dtype="float32")
    run = pipeline.plan(Request("a red circle", steps=steps))
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ("unrecorded", *LEVELS)}
    events: tuple[Event, ...] = ()
    draw(pipeline, run, None)  # warm
    for _ in range(rounds):
        spent["unrecorded"].append(draw(pipeline, run, None))
        for level in LEVELS:
            recorder = Recorder.start(folder / "run", capture=Capture(level))
            spent[level].append(draw(pipeline, run, recorder))
            events = Trace.open(folder / "run").events
            shutil.rmtree(folder / "run")
    values = sum(int(np.prod(event.shape)) for event in events)
    print(f"embedded model, {steps} steps: {len(events)} values, {values / 1e6:.0f} M numbers")
    middle = {name: np.median(rows, axis=0) for name, rows in spent.items()}
    for name, (wall, cpu) in middle.items():
        plain_wall, plain_cpu = middle["unrecorded"]
        ratios = f"ratio {wall / plain_wall:5.2f}, of CPU seconds {cpu / plain_cpu:5.2f}"
        each = (cpu - plain_cpu) / len(events) * 1e6
        print(f"  {name:<11} {wall:7.2f} s  {ratios}  {each:6.0f} µs a value")


def draw(pipeline: Any, run: Any, recorder: Recorder | None) -> tuple[float, float]:
    """Seconds of one picture, the closing of the trace included: on the wall, of the CPU."""
    from lydite.trace.mlx_capture import record_modules

    start, cpu = time.perf_counter(), time.process_time()
    with ExitStack() as stack:
        if recorder is not None:
            stack.enter_context(recorder)
            for name in ("transformer", "vae"):
                network = pipeline.model.network(name)
                stack.enter_context(record_modules(recorder, network, scope=name))
        list(pipeline.generate(run, [0]))
    return time.perf_counter() - start, time.process_time() - cpu


def speed(folder: Path) -> None:
    """Bytes a second at each level, over one block of the made-up model."""
    value = made_up(0)
    print(f"values of {value.nbytes / 2**20:.2f} MiB, bfloat16")
    for level in LEVELS:
        start = time.perf_counter()
        with TraceWriter(folder / level, Header(), Capture(level)) as writer:
            for number in range(2 * VALUES):
                writer.add("x", changed(value, number))
        seconds = time.perf_counter() - start
        size = 2 * VALUES * value.nbytes
        print(f"  {level:<7} {size / seconds / 1e6:7.0f} MB/s of values taken in")
        shutil.rmtree(folder / level)


def budget(folder: Path, limit: int, steps: int) -> None:
    """Bytes on disk of a default trace of the made-up model, against its budget."""
    value = made_up(1)
    start = time.perf_counter()
    with TraceWriter(folder / "run", Header(), Capture(budget=limit)) as writer:
        for step in range(steps):
            for block in range(BLOCKS):
                for number in range(VALUES):
                    changed(value, (step * BLOCKS + block) * VALUES + number)
                    writer.add(f"transformer/blocks.{block}.{number}", value, step=step)
    seconds = time.perf_counter() - start
    events = Trace.open(folder / "run").events
    size = sum(path.stat().st_size for path in (folder / "run").iterdir())
    kept = Counter("full" if e.shard else "sketch" if e.sketch else "stats" for e in events)
    share = f"{size / 2**20:.0f} MiB of {limit / 2**20:.0f} ({size / limit:.1%})"
    print(
        f"{BLOCKS} blocks × {VALUES} values × {steps} steps: {share}, {seconds:.1f} s, {dict(kept)}"
    )
    assert size <= limit, "over its budget"


def made_up(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(ml_dtypes.bfloat16)


def changed(value: Any, number: int) -> Any:
    """The same array with another beginning, so that no two are twins."""
    value.reshape(-1)[:2] = number // 128, number % 128
    return value


if __name__ == "__main__":
    main()
