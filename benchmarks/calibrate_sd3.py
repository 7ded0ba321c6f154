"""A calibration set of a model of SD3-medium's size, on a GPU: what it costs, what a kill costs.

    .venv/bin/python benchmarks/calibrate_sd3.py --folder BIG            some minutes on an H200
    .venv/bin/python benchmarks/calibrate_sd3.py --folder SMALL --tiny   to see that it runs

The weights are random, and 8.5 GB of them are written into the folder first. `cost` draws images
plainly and as a run does, turn and turn about. `run`, `activations` and `blocks` are the commands:
each is timed, then killed half-way on another output and resumed, and both results must be equal.
`statistics` compares one sample's statistics as the GPU makes them with NumPy's.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from lydite.core.fast_blas import use_one_thread

use_one_thread()  # before MLX

import mlx.core as mx  # noqa: E402

import calibrate_run  # noqa: E402
from calibrate_activations import SD3_MEDIUM  # noqa: E402
from lydite.calibrate.activations.device_moments import DeviceMoments  # noqa: E402
from lydite.calibrate.activations.places import Places, moments_now  # noqa: E402
from lydite.calibrate.model_session import model_hash, open_pipeline  # noqa: E402
from lydite.calibrate.replay import network, replaying  # noqa: E402
from lydite.calibrate.request_record import conditions_of  # noqa: E402
from lydite.calibrate.run import Model  # noqa: E402
from lydite.calibrate.settings import Settings  # noqa: E402
from lydite.calibrate.store.reader import CalibrationSet  # noqa: E402
from lydite.core.files import size_text  # noqa: E402
from lydite.core.request import Request  # noqa: E402
from untrained_sd3 import TRANSFORMER, VAE, make_untrained  # noqa: E402

LYDITE = [sys.executable, "-m", "lydite", "calibrate"]
PROMPTS = ("a red star", "a fox in snow")
WIDTHS = (128, 256, 512, 512)
SD3_VAE = replace(VAE, block_out_channels=WIDTHS, layers_per_block=2, norm_num_groups=32)
PARTS = ("cost", "run", "activations", "statistics", "blocks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, required=True, help="for the model and the sets")
    parser.add_argument("--tiny", action="store_true", help="a small model and picture")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--images", type=int, default=2, help="of the set")
    parser.add_argument("--rounds", type=int, default=8, help="images of each kind of `cost`")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--budget", default="6GB", help="of the blocks")
    options = parser.parse_args()
    options.size = 64 if options.tiny else 1024
    folder, model = options.folder, options.folder / "model"
    if not (model / "model_index.json").exists():
        start = time.perf_counter()
        transformer, vae = (TRANSFORMER, VAE) if options.tiny else (SD3_MEDIUM, SD3_VAE)
        clips = (32, 64) if options.tiny else (768, 1280)
        make_untrained(model, transformer=transformer, vae=vae, clip_widths=clips)
        print(f"model written in {time.perf_counter() - start:.0f} s", flush=True)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    if "cost" in options.only:
        cost(options, model)
    drawn = folder / "drawn"
    if "run" in options.only:
        words = ["--prompts", folder / "prompts.txt", "--images", options.images]
        words += ["--steps", options.steps, "--keep-steps", "every:4"]
        words += ["--size", f"{options.size}x{options.size}"]
        compared(["run", "-m", model, *words], drawn)
    if "activations" in options.only:
        compared(["activations", drawn], folder / "stats.sqlite")
    if "statistics" in options.only:
        both(drawn, model)
    if "blocks" in options.only:
        compared(["blocks", drawn, "--tokens", 32, "--budget", options.budget], folder / "blocks")


def cost(options: argparse.Namespace, model: Path) -> None:
    """An image drawn and an image stored."""
    start = time.perf_counter()
    pipeline = open_pipeline(Model(str(model)), "auto")
    pipeline.model.prepare()
    loaded = time.perf_counter()
    hashed = model_hash(pipeline)
    print(f"loaded in {loaded - start:.1f} s, hashed in {time.perf_counter() - loaded:.1f} s")
    size = {"width": options.size, "height": options.size}
    run = pipeline.plan(Request("", steps=options.steps, **size))
    settings = Settings(hashed, conditions_of(run.request, pipeline.model.dtype), "BF16")
    for every in (1, 4):
        kept = range(0, options.steps, every)
        print(f"every:{every}")
        calibrate_run.cost(
            options.folder / f"cost-{every}", pipeline, run, settings, options.rounds, kept
        )


def compared(words: list[object], out: Path) -> None:
    """Time a command, then kill it half-way on another output, and let it go on."""
    whole = timed([*words, "--out", out])
    cut = out.with_name(f"cut-{out.name}")
    again = [*LYDITE, *map(str, words), "--out", str(cut), "--quiet"]
    with subprocess.Popen(again, stdout=subprocess.DEVNULL) as process:
        time.sleep(0.7 * whole)
        process.kill()
    resumed = timed([*words, "--out", cut])
    same = "equal" if content(out) == content(cut) else "ANOTHER RESULT"
    print(
        f"{words[0]}: {whole:.1f} s; killed at {0.7 * whole:.1f} s, resumed {resumed:.1f} s: {same}"
    )
    size = sum(path.stat().st_size for path in [out, *out.rglob("*")] if path.is_file())
    print(f"{words[0]}: {size_text(size)}", flush=True)


def timed(words: list[object]) -> float:
    start = time.perf_counter()
    subprocess.run([*LYDITE, *map(str, words), "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def content(out: Path) -> str:
    """What has to be equal."""
    if out.is_file():
        return hashlib.sha256(out.read_bytes()).hexdigest()
    told = subprocess.run([*LYDITE, "status", str(out), "--json"], capture_output=True, check=True)
    return json.loads(told.stdout)["content_hash"]


def both(drawn: Path, model: Path) -> None:
    """Seconds of one sample: looked at by nobody, by the device and by NumPy."""
    with CalibrationSet.open(drawn) as opened:
        row = next(iter(opened.rows("sample")))
        x, settings, entry = opened.read(row)["x"], opened.settings, row.entry
    pipeline = open_pipeline(Model(str(model)), "auto")
    found = {}
    for name, measure in (("device", DeviceMoments()), ("NumPy", moments_now)):
        places = Places(network(pipeline), measure=measure)
        with replaying(pipeline, settings, places) as replay:
            spent = []
            for _ in range(4 if name == "device" else 1):
                mx.reset_peak_memory()
                start = time.perf_counter()
                replay.run(entry, x)
                found[name] = places.taken()
                spent.append(time.perf_counter() - start)
        peak = size_text(mx.get_peak_memory())
        values = sum(each.count * len(each.mean) for each in found[name].values())
        print(
            f"statistics by {name}: {statistics.median(spent):.2f} s a sample, {values:,} values, "
            f"{peak} of MLX's memory at most",
            flush=True,
        )
    pairs = [(each, found["NumPy"][place]) for place, each in found["device"].items()]
    exact = all((a.counts == b.counts).all() and (a.high == b.high).all() for a, b in pairs)
    ratios = (a.variance / b.variance for a, b in pairs if (b.variance > 0).all())
    apart = max(float(abs(ratio - 1).max()) for ratio in ratios)
    print(f"histograms and extremes equal: {exact}; variances apart by {apart:.1e} at most")


if __name__ == "__main__":
    main()
