"""The bench of seeded bugs: judges scored on our port of SD3 against diffusers.

    .venv/bin/python benchmarks/zoo.py --json zoo.json
    .venv/bin/python benchmarks/zoo.py --keep traces                  traces once, judges many times
    .venv/bin/python benchmarks/zoo.py --only linear-transposed,clean --dtypes float32
    .venv/bin/python benchmarks/zoo.py --judge MODULE:FUNCTION        another judge beside ours

A judge is a function of three folders, reference, port and the reference's own rounding. A float32
port is compared with a float32 reference and its float64 twin, another with the float32 reference
and its twin in the port's precision. Needs the `reference` extra; a quarter of an hour on two
cores, and 4 GB for --keep.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # arrays are tiny: threads only wait

from lydite.zoo import baselines, bench  # isort: skip - finds a fast BLAS before MLX comes

import mlx.core as mx
import numpy as np

from lydite.pipelines.sd3 import StableDiffusion3
from lydite.trace.events import Header
from lydite.trace.recorder import Recorder
from lydite.trace.store import Trace
from lydite.zoo.cases import Bug, Control, Part, bugs, controls
from lydite.zoo.port import ENCODING, record_port
from lydite.zoo.subject import NAME, REQUEST, SEED, make_subject, picture

FLOORS = {"float32": "float64", "bfloat16": "bfloat16", "float16": "float16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--judge", action="append", default=[], help="module:function, repeatable")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the port, for bugs")
    parser.add_argument("--clean", default="float16", help="dtypes without bugs, for false alarms")
    parser.add_argument("--only", default="", help="ids of cases, with commas")
    parser.add_argument("--no-baselines", action="store_true", help="leave the fixed rules out")
    parser.add_argument("--no-lydite", action="store_true", help="leave lydite diff out")
    parser.add_argument("--no-weights", action="store_true", help="traces without weights.json")
    parser.add_argument("--json", type=Path, help="where every score goes")
    parser.add_argument(
        "--keep", type=Path, help="a folder for all traces; those in it are not made again"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = options.keep or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        scores = run(options, root)
    summaries = bench.summarize(scores)
    print(table(summaries))
    print(misses(scores))
    if options.json:
        rows = {"scores": [asdict(s) for s in scores], "summary": [asdict(s) for s in summaries]}
        options.json.write_text(json.dumps(rows, indent=1))


def run(options: argparse.Namespace, root: Path) -> list[bench.Score]:
    """Every case in every dtype before every judge."""
    judges: dict[str, bench.Judge] = {}
    if not options.no_baselines:
        judges = {"fixed rule": baselines.fixed_rule, "allclose": baselines.allclose}
    if not options.no_lydite:
        judges["lydite"] = lydite
    judges |= {name: _imported(name) for name in options.judge}
    sound: list[bench.Case] = [None, *controls()]
    every: list[bench.Case] = [*sound, *bugs()]
    if options.only:
        wanted = set(options.only.split(","))
        every = [case for case in every if (case.id if case else "clean") in wanted]
    sides = Sides(root, keep=options.keep is not None, weights=not options.no_weights)
    plan = [(name, every) for name in options.dtypes.split(",") if name]
    plan += [(name, sound) for name in options.clean.split(",") if name and not options.only]
    scores: list[bench.Score] = []
    for dtype, cases in plan:
        start = time.monotonic()
        for score in bench.run(
            cases,
            dtypes=[dtype],
            judges=judges,
            reference=sides.reference,
            port=sides.port,
            done=sides.done,
        ):
            scores.append(score)
            if sys.stderr.isatty():
                print(f"\r{dtype} {score.case:<40}", end="", file=sys.stderr)
        print(f"{dtype}: {len(cases)} cases in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return scores


class Sides:
    """Both sides of the comparison, each run once per case and precision."""

    def __init__(self, root: Path, *, keep: bool, weights: bool) -> None:
        self.root, self.keep, self.weights = root, keep, weights
        self.model = root / "model"
        if not self.model.exists():
            make_subject(self.model)
        self._pipelines: dict[str, StableDiffusion3] = {}

    def reference(self, dtype: str, part: Part) -> tuple[Path, Path]:
        names = ("float32", FLOORS[dtype])
        folders = [self.root / f"reference-{part}-{name}" for name in names]
        runs = [(f, name) for f, name in zip(folders, names, strict=True) if not self._there(f)]
        if runs:
            (draw_reference if part == "draw" else encode_reference)(self.model, runs)
        for folder in folders:
            self._there(folder)
        return folders[0], folders[1]

    def port(self, case: bench.Case, dtype: str) -> Path:
        folder = self.root / f"port-{dtype}-{case.id if case else 'clean'}"
        if self._there(folder):
            return folder
        if dtype not in self._pipelines:
            made = StableDiffusion3.load(self.model, dtype=getattr(mx, dtype))
            self._pipelines[dtype] = made
        pipeline = self._pipelines[dtype]
        mx.random.seed(0)  # for the bug that draws
        with case.apply(pipeline) if case else nullcontext():
            part = case.part if isinstance(case, Bug) else "draw"
            dump = case.dump if isinstance(case, Control) else None
            record_port(pipeline, folder, part, dump)
        self._there(folder)
        return folder

    def _there(self, folder: Path) -> bool:
        """Whether a whole trace is there; what an interrupted run left is removed."""
        if not folder.exists():
            return False
        if not self.weights:
            (folder / "weights.json").unlink(missing_ok=True)
        with Trace.open(folder) as trace:
            if trace.header.complete:
                return True
        shutil.rmtree(folder)
        return False

    def done(self, folder: Path) -> None:
        if not self.keep:
            shutil.rmtree(folder)


def draw_reference(model: Path, runs: list[tuple[Path, str]]) -> None:
    """The same picture on diffusers, once for each folder and precision."""
    from lydite.reference.jobs import Job, Run, run_job

    job = Job(
        model=str(model),
        prompt=REQUEST.prompt,
        runs=tuple(Run(str(folder), cast(Any, dtype)) for folder, dtype in runs),
        negative=REQUEST.negative,
        seed=SEED,
        steps=REQUEST.steps,
        guidance=REQUEST.guidance,
        width=REQUEST.width,
        height=REQUEST.height,
        text_length=REQUEST.text_length,
        name=NAME,
    )
    run_job(job)


def encode_reference(model: Path, runs: list[tuple[Path, str]]) -> None:
    """The same picture through the encoder of diffusers' VAE."""
    import torch
    from diffusers import AutoencoderKL

    from lydite.trace.torch_capture import watching

    pixels = torch.from_numpy(picture().astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
    for folder, dtype in runs:
        precision = getattr(torch, dtype)
        vae: Any = AutoencoderKL.from_pretrained(model / "vae", dtype=precision)
        header = Header(side="reference", device="cpu", dtype=dtype, conditions=ENCODING)
        with torch.no_grad(), Recorder.start(folder, header=header) as recorder:
            with watching(recorder, vae, scope="vae"):
                mean = vae.encode(pixels.to(precision)).latent_dist.mean
            recorder.record("pipeline/image_latents", mean, dims="b c h w")


def lydite(reference: Path, port: Path, floor: Path) -> Any:
    """`lydite diff REFERENCE PORT --floor FLOOR`."""
    from lydite.diff.compare import compare

    with Trace.open(reference) as theirs, Trace.open(port) as ours, Trace.open(floor) as own:
        return compare(theirs, ours, floor=own)


def table(summaries: list[bench.Summary]) -> str:
    """The summary for people."""
    rows: list[tuple[str, ...]] = [
        (
            *("judge", "dtype", "part", "bugs", "exact", "block", "component", "flagged"),
            *("unseen fair", "clean flagged", "false alarms"),
        )
    ]
    rows += [
        (
            *(s.judge, s.dtype, s.part, str(s.bugs), str(s.exact), str(s.block)),
            *(str(s.component), f"{s.flagged:g}", f"{s.unseen_fair}/{s.unseen}"),
            *(str(s.clean_flagged), f"{s.false_alarms}/{s.controls + 1}"),
        )
        for s in summaries
        if s.bugs or s.unseen or s.part == "dev"
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def misses(scores: list[bench.Score]) -> str:
    """Every bug a judge other than the baselines placed wrongly, and every false alarm."""
    lines: list[str] = []
    for s in scores:
        wrong = s.alarm and not s.exact if not s.seen else not s.exact
        if s.judge not in ("fixed rule", "allclose") and wrong and (s.kind == "bug" or s.alarm):
            said = f"{s.site}:{s.place} step {s.step}" if s.site else s.verdict
            lines.append(f"{s.judge} {s.dtype} {s.case}: said {said}, truth {s.truth or 'no bug'}")
    return "\n".join(lines)


def _imported(name: str) -> bench.Judge:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    main()
