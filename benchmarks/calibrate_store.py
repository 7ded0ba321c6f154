"""What the calibration store costs: commits in a small and a large set, memory, bytes an image.

    .venv/bin/python benchmarks/calibrate_store.py               some minutes, 0.5 GB of disk
    .venv/bin/python benchmarks/calibrate_store.py --only size

`rate` fills one set with 500 samples and another with 50,000, then commits to both turn and turn
about; the ratio is of the medians. `size` stores the latents of one SD3 image, 51 steps of
16×64×64, as a set and as one npz file a step in float32, which is what others do.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.npz_export import export_npz
from lydite.calibrate.settings import Dtype, Plan, Settings, plan_of
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.status import status
from lydite.calibrate.store.verify import verify
from lydite.calibrate.store.writer import Writer

DTYPES: tuple[Dtype, ...] = ("F32", "F16", "BF16")
CONDITIONS = {"sampler": "euler", "schedule": "shifted", "shift": 3, "steps": 50}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", choices=("rate", "size"))
    parser.add_argument("--few", type=int, default=500, help="samples")
    parser.add_argument("--many", type=int, default=50_000, help="samples")
    parser.add_argument("--kept", type=int, default=25, help="samples of an image, one commit")
    parser.add_argument("--rounds", type=int, default=100, help="commits to each, timed")
    parser.add_argument("--folder", type=Path, help="where the sets are made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.only in (None, "rate"):
            rate(Path(folder), options.few, options.many, options.kept, options.rounds)
        if options.only in (None, "size"):
            size(Path(folder))


def rate(folder: Path, few: int, many: int, kept: int, rounds: int) -> None:
    """Commits a second at both sizes, and the memory of the process at both."""
    base = np.random.default_rng(0).standard_normal((4, 32, 32), np.float32)
    sets = {
        count: Writer.start(folder / str(count), Settings("f00d", CONDITIONS, "BF16"), plan)
        for count, plan in ((n, planned(n // kept + rounds, kept)) for n in (few, many))
    }
    print(f"{kept} samples of {base.nbytes // 2} bytes a commit")
    for count, writer in sets.items():
        start, begin = time.perf_counter(), memory()
        for image in range(count // kept):
            if image == few // kept:
                begin = memory()
            commit(writer, image, kept, base)
        seconds = time.perf_counter() - start
        grown = f"{memory() - begin:+.1f} MiB after the first {few} samples"
        print(f"  {count} samples: {count / seconds:.0f} a second, {grown}, {files()} files open")
    spent: dict[int, list[float]] = {count: [] for count in sets}
    for number in range(rounds):
        for count, writer in sorted(sets.items(), reverse=bool(number % 2)):
            start = time.perf_counter()
            commit(writer, count // kept + number, kept, base)
            spent[count].append(time.perf_counter() - start)
    usual = {count: statistics.median(times) for count, times in spent.items()}
    for count, seconds in usual.items():
        each = f"{seconds * 1000:.2f} ms a commit, {kept / seconds:.0f} samples a second"
        print(f"  at {count} samples: {each}")
    print(f"  rate at {many} / rate at {few}: {usual[few] / usual[many]:.3f}")
    for count, writer in sets.items():
        start = time.perf_counter()
        writer.close()
        closed = time.perf_counter()
        with Writer.start(writer.folder, writer.settings, writer.plan):
            opened = time.perf_counter()
        times = f"closed in {closed - start:.2f} s, opened in {opened - closed:.2f} s"
        shards = len(writer.index.shards)
        print(f"  {count} samples in {shards} shards: {times}")
    start = time.perf_counter()
    found = verify(folder / str(many))
    seconds = time.perf_counter() - start
    print(f"  verify of {found.bytes / 2**20:.0f} MiB: {seconds:.1f} s, sound: {found.sound}")


def planned(images: int, kept: int) -> Plan:
    prompts = [(f"a drawing of {n} cats", n) for n in range(images)]
    return plan_of(prompts, range(kept), pictures=False)


def commit(writer: Writer, image: int, kept: int, base: NDArray[np.float32]) -> None:
    writer.commit(
        writer.builder.sample(
            image, step, {"x": base + image + step / kept}, sigma=1, timestep=step
        )
        for step in range(kept)
    )


def size(folder: Path) -> None:
    """Bytes of the same samples in each layout, and what a narrower dtype changes."""
    images, steps = 4, 51
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((images, steps, 1, 16, 64, 64), np.float32)
    sets: dict[str, tuple[int, float]] = {}
    for dtype in DTYPES:
        place = folder / dtype
        plan = planned(images, steps)
        with Writer.start(place, Settings("f00d", CONDITIONS, dtype), plan) as writer:
            for image in range(images):
                writer.commit(
                    writer.builder.sample(
                        image, s, {"x": latents[image, s]}, sigma=1 - s / 50, timestep=1000 - 20 * s
                    )
                    for s in range(steps)
                )
        with CalibrationSet.open(place) as opened:
            kept = [opened.read(row)["x"].astype(np.float64) for row in opened.rows()]
        error = np.stack(kept).reshape(latents.shape) - latents
        sets[dtype] = on_disk(place), float(np.linalg.norm(error) / np.linalg.norm(latents))
        start = time.perf_counter()
        assert verify(place).complete
        seconds = time.perf_counter() - start
        print(f"verify in {dtype}: {status(place).bytes / seconds / 2**20:.0f} MiB a second")
    export_npz(folder / "F32", folder / "npz")
    npz = on_disk(folder / "npz")
    print(f"{images} images of {steps} latents 16×64×64, bytes an image, of npz in float32")
    print(f"  npz   {npz / images:12,.0f}")
    for dtype, (count, error) in sets.items():
        share = f"{count / npz:.3f} of npz, relative error of the values {error:.1e}"
        print(f"  {dtype:<5} {count / images:12,.0f}  {share}")


def on_disk(folder: Path) -> int:
    """Blocks that the files take, as `du` counts them."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def memory() -> float:
    """The largest resident size so far, in MiB."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (2**20 if os.uname().sysname == "Darwin" else 2**10)


def files() -> int:
    """Open files of this process, where the system says so."""
    handles = Path("/proc/self/fd")
    return len(list(handles.iterdir())) if handles.is_dir() else 0


if __name__ == "__main__":
    main()
