"""`calibrate activations` and `blocks` killed at random times: is anything lost, is the end equal?

    .venv/bin/python benchmarks/calibrate_replay_kills.py --kills 20

A child works on a small set with a random model and says after each sample what is safe. It is
killed with SIGKILL at a random moment and started again, until it comes to its end undisturbed.
Then the file is held, byte for byte, or the set, by its content hash, against one that was never
interrupted; this goes on until there were enough kills. Ends with status 1 at the first loss.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from lydite.calibrate.steady import preload_steady

preload_steady()  # before MLX

from lydite.calibrate.activations import Progress, Wanted, collect  # noqa: E402
from lydite.calibrate.activations_merge import STATE  # noqa: E402
from lydite.calibrate.activations_state import load_state  # noqa: E402
from lydite.calibrate.blocks import Kept, store_blocks  # noqa: E402
from lydite.calibrate.conditions import conditions_of  # noqa: E402
from lydite.calibrate.keys import Settings  # noqa: E402
from lydite.calibrate.setfile import Description, plan_of  # noqa: E402
from lydite.calibrate.store import CalibrationSet  # noqa: E402
from lydite.calibrate.studio import Model, Studio, open_pipeline  # noqa: E402
from lydite.calibrate.trajectories import model_hash  # noqa: E402
from lydite.calibrate.verify import verify  # noqa: E402
from lydite.calibrate.writer import Writer  # noqa: E402
from lydite.pipelines.sd3 import Request  # noqa: E402
from lydite.pipelines.untrained import make_untrained  # noqa: E402

Job = Literal["activations", "blocks"]
IMAGES, STEPS = 6, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        job, drawn, out = options.child
        work(job, Path(drawn), Path(out), lambda done: print(done, flush=True))
        return
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drawn = draw(folder / "set", make_untrained(folder / "model"))
        for job in ("activations", "blocks"):
            whole = folder / f"whole-{job}"
            work(job, drawn, whole, lambda _: None)
            kills, runs = 0, 0
            while kills < options.kills:
                out = folder / f"{job}-{runs}"
                kills += disturbed(job, drawn, out, chance)
                runs += 1
                if content(job, out) != content(job, whole):
                    sys.exit(f"{job}: after the kills the result is another")
            print(f"{job}: {kills} kills over {runs} runs, nothing lost, every result equal")


def disturbed(job: Job, drawn: Path, out: Path, chance: random.Random) -> int:
    """Work until the end, killed on the way; how many kills it took."""
    kills = safe = 0
    while True:
        command = [sys.executable, __file__, "--child", job, str(drawn), str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            after = chance.randint(1, 6)
            for line in child.stdout:
                safe, after = max(safe, int(line)), after - 1
                if after == 0:
                    time.sleep(chance.random() * 0.3)
                    child.kill()
        if child.returncode == 0:
            return kills
        if child.returncode != -signal.SIGKILL:
            sys.exit(f"{job}: the child ended with {child.returncode}")
        kills += 1
        if not finished(job, out) and kept(job, out) < safe:
            sys.exit(f"{job}: {safe} samples were safe, {kept(job, out)} are there")


def work(job: Job, drawn: Path, out: Path, safe: Callable[[int], None]) -> None:
    """One run; `safe` is told how many samples cannot be lost any more."""
    with CalibrationSet.open(drawn) as opened:
        pipeline = open_pipeline(Model(opened.settings.model), "float32")
        pipeline.networks.prepare()
        if job == "activations":

            def counted(progress: Progress) -> None:
                safe(progress.done - 1)  # the one before has been written

            collect(opened, pipeline, out, Wanted(), on_sample=counted, share=0)
        else:
            kept = Kept(8, "F32")
            store_blocks(
                opened, pipeline, out, kept, 10**9, on_sample=lambda done, total: safe(done)
            )


def finished(job: Job, out: Path) -> bool:
    return job == "activations" and out.exists()


def kept(job: Job, out: Path) -> int:
    """How many samples a killed run left."""
    if job == "activations":
        state = out.with_name(f"{out.name}.work") / STATE
        return len(load_state(state).keys) if state.exists() else 0
    with CalibrationSet.open(out) as opened:
        return len(list(opened.rows()))


def content(job: Job, out: Path) -> bytes:
    """What has to be equal."""
    if job == "activations":
        return out.read_bytes()
    found = verify(out)
    if not found.complete:
        sys.exit(f"{out}: {found}")
    return str(found.content_hash).encode()


def draw(folder: Path, model: Path) -> Path:
    """A set of a few images."""
    pipeline = open_pipeline(Model(str(model)), "float32")
    pipeline.networks.prepare()
    request = pipeline.complete(Request("", steps=STEPS, text_length=8, width=64, height=64))
    settings = Settings(model_hash(pipeline), conditions_of(request, "float32"), model=str(model))
    plan = plan_of([("a red star", n) for n in range(IMAGES)], range(STEPS), pictures=False)
    studio = Studio(Description(settings, plan), pipeline)
    with Writer.start(folder, settings, plan) as writer:
        for image, wanted in writer.missing().items():
            writer.commit(studio.trajectories.items(image, wanted))
    return folder


if __name__ == "__main__":
    main()
