"""How fast two traces are compared, and in how much memory, against a plain allclose loop.

    .venv/bin/python benchmarks/diff_cost.py                       1 GiB a side, float32
    .venv/bin/python benchmarks/diff_cost.py --gib 4 --dtype bfloat16

The traces are written first (a DiT's residual stream, port = reference + rounding). The loop is
what people write by hand: np.allclose on every pair of equal names. Both read the same mapped
files, each in a process of its own with one thread, turn and turn about. Bytes are those of both
sides together.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROUNDS = 3
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
VALUES = 4096 * 1536  # of one event: 4,096 tokens, as at 1024² pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of each side")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--way", choices=("lydite", "allclose"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(WAYS[options.way](options.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        size = write_traces(options)
        rows: dict[str, list[dict[str, float]]] = {"lydite": [], "allclose": []}
        for _ in range(ROUNDS):
            for way, results in rows.items():
                results.append(in_a_process(way, options))
    for way, results in rows.items():
        best = min(results, key=lambda row: row["cpu_s"])
        rate = size / best["cpu_s"] / 1e9
        print(f"{way}: {rate:.2f} GB/s per core, {best['peak_mib']:.0f} MiB of memory")
    ratio = min(r["cpu_s"] for r in rows["lydite"]) / min(r["cpu_s"] for r in rows["allclose"])
    print(f"ratio lydite / allclose: {ratio:.2f} of the time ({size / 2**30:.1f} GiB read)")


def write_traces(options: argparse.Namespace) -> int:
    """Two traces that agree; returns their bytes together."""
    import ml_dtypes
    import numpy as np

    from lydite.trace.events import Header
    from lydite.trace.writer import Capture, TraceWriter

    dtype: Any = np.float32 if options.dtype == "float32" else ml_dtypes.bfloat16
    generator = np.random.default_rng(0)
    base = generator.standard_normal(VALUES, dtype=np.float32).reshape(1, 4096, 1536)
    noise = generator.standard_normal(VALUES, dtype=np.float32).reshape(base.shape) * 1e-7
    count = max(1, round(options.gib * 2**30 / (VALUES * np.dtype(dtype).itemsize)))
    capture = Capture(budget=2**50)
    for side, offset in (("reference", 0.0), ("port", noise)):
        header = Header(side=side, framework="numpy", dtype=options.dtype)
        with TraceWriter(options.folder / side, header, capture) as writer:
            for index in range(count):
                value = ((base + offset) * np.float32(1 + index)).astype(dtype)
                writer.add(f"net/blocks.{index}", value)
    return 2 * count * VALUES * np.dtype(dtype).itemsize


def in_a_process(way: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--folder", str(options.folder)]
    done = subprocess.run(command, env=os.environ | ONE_THREAD, capture_output=True, check=True)
    return json.loads(done.stdout)


def with_lydite(folder: Path) -> dict[str, float]:
    from lydite.diff.compare import compare
    from lydite.trace.reader import Trace

    with Trace.open(folder / "reference") as ours, Trace.open(folder / "port") as theirs:
        with measured() as figures:
            verdict = compare(ours, theirs)
        assert verdict.verdict == "agree", verdict.sentence
    return figures


def with_allclose(folder: Path) -> dict[str, float]:
    import numpy as np

    from lydite.trace.reader import Trace

    with Trace.open(folder / "reference") as ours, Trace.open(folder / "port") as theirs:
        other = {event.name: event for event in theirs.events}
        with measured() as figures:
            for event in ours.events:
                a, b = ours.read(event), theirs.read(other[event.name])
                a, b = (x if x.dtype == np.float32 else x.astype(np.float32) for x in (a, b))
                assert np.allclose(a, b, atol=1e-2, rtol=1e-2)
    return figures


class measured(dict[str, float]):
    """CPU seconds of a block and how far its private memory grew; mapped files are counted out."""

    def __enter__(self) -> "measured":
        self._first = self._most = _private_memory()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        self._start = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self["cpu_s"] = time.process_time() - self._start
        self._done.set()
        self._watch.join()
        self["peak_mib"] = self._most - self._first

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, _private_memory())


def _private_memory() -> float:
    """MiB; where the kernel does not tell private from mapped, the most there ever was of both."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


WAYS = {"lydite": with_lydite, "allclose": with_allclose}

if __name__ == "__main__":
    main()
