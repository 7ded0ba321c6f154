"""How many seeded bugs `lydite diff` finds in our ports of SD3 and SDXL, beside fixed thresholds.

    .venv/bin/python benchmarks/score_seeded_bugs.py --json scores.json
    .venv/bin/python benchmarks/score_seeded_bugs.py --model sdxl    bugs of its U-Net
    .venv/bin/python benchmarks/score_seeded_bugs.py --keep traces   record once, judge often
    .venv/bin/python benchmarks/score_seeded_bugs.py --only linear-transposed,clean --dtypes float32
    .venv/bin/python benchmarks/score_seeded_bugs.py --judge MODULE:FUNCTION

A judge is a function of three folders, reference, port and the reference's own rounding. A float32
port is compared with a float32 reference and its float64 twin, another with the float32 reference
and its twin in the port's precision. `lydite, injected` runs the port once more on the reference's
values; its floor is the twin run on the same values. Needs the `reference` extra; half an hour on
two cores, and 4 GB for --keep.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # arrays are tiny: threads only wait

from seeded_bugs import baselines, scoring  # isort: skip - imports lydite before MLX, for its BLAS

import mlx.core as mx
import numpy as np

from lydite.pipelines.pipeline import Pipeline
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.recorder import InjectionSource, Recorder
from lydite.trace.taps import injection
from seeded_bugs.cases import Bug, Control, Part, bugs, controls
from seeded_bugs.causes import judged
from seeded_bugs.recording import ENCODING, record_port
from seeded_bugs.tiny_model import MODELS, NAME, SEED, picture

FLOORS = {"float32": "float64", "bfloat16": "bfloat16", "float16": "float16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="sd3", choices=MODELS, help="that gets the bugs")
    parser.add_argument("--judge", action="append", default=[], help="module:function, repeatable")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the port, for bugs")
    parser.add_argument("--clean", default="float16", help="dtypes without bugs, for false alarms")
    parser.add_argument("--only", default="", help="ids of cases, with commas")
    parser.add_argument("--no-baselines", action="store_true", help="leave the fixed rules out")
    parser.add_argument("--no-lydite", action="store_true", help="leave lydite diff out")
    parser.add_argument("--no-inject", action="store_true", help="leave injected runs out")
    parser.add_argument("--no-weights", action="store_true", help="traces without weights.json")
    parser.add_argument("--json", type=Path, help="where every score goes")
    parser.add_argument(
        "--keep", type=Path, help="traces go to KEEP/MODEL; those in it are not made again"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = (options.keep or Path(folder)) / options.model
        root.mkdir(parents=True, exist_ok=True)
        scores = run(options, root)
    summaries = scoring.summarize(scores)
    for text in (table(summaries), spread(scores), named_causes(scores), misses(scores)):
        print(text, end="\n" if text else "")
    if options.json:
        rows = {"scores": [asdict(s) for s in scores], "summary": [asdict(s) for s in summaries]}
        options.json.write_text(json.dumps(rows, indent=1))


def run(options: argparse.Namespace, root: Path) -> list[scoring.Score]:
    """Every judge on every case in every dtype."""
    sides = Sides(
        root, options.model, keep=options.keep is not None, weights=not options.no_weights
    )
    judges: dict[str, scoring.Judge] = {}
    if not options.no_baselines:
        judges = {"fixed rule": baselines.fixed_rule, "allclose": baselines.allclose}
    if not options.no_lydite:
        judges["lydite"] = lydite
        if not options.no_inject:
            judges[f"lydite{scoring.INJECTED}"] = sides.injected
    judges |= {name: _imported(name) for name in options.judge}
    sound: list[scoring.Case] = [None, *controls(options.model)]
    all_cases: list[scoring.Case] = [*sound, *bugs(options.model)]
    if options.only:
        wanted = set(options.only.split(","))
        all_cases = [case for case in all_cases if (case.id if case else "clean") in wanted]
    plan = [(name, all_cases) for name in options.dtypes.split(",") if name]
    plan += [(name, sound) for name in options.clean.split(",") if name and not options.only]
    scores: list[scoring.Score] = []
    for dtype, cases in plan:
        start = time.monotonic()
        for score in scoring.run(
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

    def __init__(self, root: Path, model: str, *, keep: bool, weights: bool) -> None:
        self.root, self.keep, self.weights = root, keep, weights
        self.model = root / "model"
        if not self.model.exists():
            MODELS[model].make(self.model)
        self._pipelines: dict[str, Pipeline] = {}
        self._cases: dict[Path, tuple[scoring.Case, str]] = {}

    def reference(self, dtype: str, part: Part) -> tuple[Path, Path]:
        return self._reference("float32", part), self._reference(FLOORS[dtype], part)

    def local_floor(self, dtype: str, part: Part) -> Path:
        """The reference's rounding at each site alone: run on the values of its float32 run."""
        return self._reference(FLOORS[dtype], part, inject=self._reference("float32", part))

    def _reference(self, dtype: str, part: Part, inject: Path | None = None) -> Path:
        folder = self.root / f"reference-{part}-{dtype}{'-injected' if inject else ''}"
        if not self._recorded(folder):
            record = draw_reference if part == "draw" else encode_reference
            record(self.model, folder, dtype, inject)
        self._recorded(folder)
        return folder

    def port(self, case: scoring.Case, dtype: str) -> Path:
        folder = self.root / f"port-{dtype}-{case.id if case else 'clean'}"
        self._cases[folder] = case, dtype
        if not self._recorded(folder):
            self._record(case, dtype, folder)
        return folder

    def injected(self, reference: Path, port: Path, floor: Path) -> Any:
        """`lydite diff` of the port run again on the reference's values."""
        from lydite.diff.divergence.write_injection import isolate

        case, dtype = self._cases[port]

        def rerun(values: Path, out: Path) -> None:
            self._record(case, dtype, out, injection(values, "*:*"))

        free = lydite(reference, port, floor)
        local = self.local_floor(dtype, _part(case))
        with (
            tempfile.TemporaryDirectory() as scratch,
            Trace.open(reference) as reference_trace,
            Trace.open(port) as port_trace,
            Trace.open(local) as rounding,
        ):
            return isolate(
                reference_trace, port_trace, rerun, Path(scratch), free=free, floor=rounding
            )

    def _record(
        self, case: scoring.Case, dtype: str, folder: Path, inject: InjectionSource | None = None
    ) -> None:
        pipeline = self._pipelines.get(dtype)
        if pipeline is None:
            pipeline = Pipeline.open(self.model, dtype=dtype)
            self._pipelines[dtype] = pipeline
        mx.random.seed(0)  # for the bug that draws
        with case.apply(pipeline) if case else nullcontext():
            dump = case.dump if isinstance(case, Control) else None
            record_port(pipeline, folder, _part(case), dump, inject)
        self._recorded(folder)

    def _recorded(self, folder: Path) -> bool:
        """Whether the folder holds a complete trace; an incomplete one is removed."""
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


def draw_reference(model: Path, folder: Path, dtype: str, inject: Path | None) -> None:
    """The same picture on diffusers."""
    from lydite.reference.jobs import Job, TraceOutput, run_job

    pipeline = Pipeline.open(model)
    run = pipeline.plan(MODELS[pipeline.family.name].request)
    job = Job(
        family=pipeline.family.name,
        model=str(model),
        request=run.request,
        prediction=run.prediction.name,
        seed=SEED,
        outputs=(TraceOutput(str(folder), cast(Any, dtype)),),
        name=NAME,
        inject=str(inject) if inject else None,
        inject_at="*:*",
    )
    run_job(job)


def encode_reference(model: Path, folder: Path, dtype: str, inject: Path | None) -> None:
    """The same picture through the encoder of diffusers' VAE."""
    import torch
    from diffusers import AutoencoderKL

    from lydite.trace.torch_capture import record_modules

    pixels = torch.from_numpy(picture().astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
    precision = getattr(torch, dtype)
    vae: Any = AutoencoderKL.from_pretrained(model / "vae", dtype=precision)
    header = Header(side="reference", device="cpu", dtype=dtype, conditions=ENCODING)
    source = injection(inject, "*:*") if inject else None
    with torch.no_grad(), Recorder.start(folder, header=header, inject=source) as recorder:
        with record_modules(recorder, vae, scope="vae"):
            mean = vae.encode(pixels.to(precision)).latent_dist.mean
        recorder.record("pipeline/image_latents", mean, dims="b c h w")


@lru_cache(maxsize=1)  # the injected judge needs it once more
def lydite(reference: Path, port: Path, floor: Path) -> Any:
    """`lydite diff REFERENCE PORT --floor FLOOR --checkpoint MODEL`."""
    from lydite.diff.compare import compare

    with (
        Trace.open(reference) as reference_trace,
        Trace.open(port) as port_trace,
        Trace.open(floor) as rounding,
    ):
        model = reference.parent / "model"
        checkpoint = model if model.is_dir() else None
        return compare(reference_trace, port_trace, floor=rounding, checkpoint=checkpoint)


def table(summaries: list[scoring.Summary]) -> str:
    """The summary for people."""
    names = "judge dtype part bugs exact block component flagged sites mean kinds confirmed"
    rows = [(*names.split(), "unseen fair", "clean flagged", "false alarms")]
    rows += [_line(s) for s in summaries if s.bugs or s.unseen or s.part == "dev"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _line(s: scoring.Summary) -> tuple[str, ...]:
    injected = s.judge.endswith(scoring.INJECTED)
    wrong = (f"{s.sites:g}", f"{s.sites_mean:.1f}", f"{s.kinds:g}") if s.sites else ("-",) * 3
    return (
        *(s.judge, s.dtype, s.part, str(s.bugs), str(s.exact), str(s.block), str(s.component)),
        *(f"{s.flagged:g}", *wrong, str(s.confirmed) if injected else "-"),
        *(f"{s.unseen_fair}/{s.unseen}", str(s.clean_flagged)),
        f"{s.false_alarms}/{s.controls + 1}",
    )


def spread(scores: list[scoring.Score]) -> str:
    """How many bugs flag one site on the reference's values, how many two, and so on."""
    lines: list[str] = []
    counted = [s for s in scores if s.judge.endswith(scoring.INJECTED) and s.seen]
    for dtype in dict.fromkeys(s.dtype for s in counted):
        for what in ("sites", "kinds", "flagged"):
            counts = Counter(getattr(s, what) for s in counted if s.dtype == dtype)
            shown = ", ".join(f"{n}: {counts[n]}" for n in sorted(counts))
            lines.append(f"injected {dtype}, {what} per bug (number: bugs)  {shown}")
    return "\n".join(lines)


def named_causes(scores: list[scoring.Score]) -> str:
    """How many bugs the first finding explains, and how many it explains wrongly."""
    lines: list[str] = []
    for dtype in dict.fromkeys(s.dtype for s in scores):
        bugs = [s for s in scores if s.seen and s.dtype == dtype and s.judge == "lydite"]
        counts = Counter(judged(s.cause, s.causes) for s in bugs)
        if bugs:
            lines.append(
                f"lydite {dtype}: cause named {counts['named']} of {len(bugs)}, "
                f"wrong {counts['wrong']}, none {counts['none']}"
            )
    return "\n".join(lines)


def misses(scores: list[scoring.Score]) -> str:
    """Every bug that a judge (no baseline) put at a wrong site, and every false alarm."""
    lines: list[str] = []
    for s in scores:
        wrong = s.alarm and not s.exact if not s.seen else not s.exact
        if s.judge not in ("fixed rule", "allclose") and wrong and (s.kind == "bug" or s.alarm):
            site = f"{s.site}:{s.slot} step {s.step}" if s.site else s.verdict
            lines.append(f"{s.judge} {s.dtype} {s.case}: {site}, truth {s.truth or 'no bug'}")
    return "\n".join(lines)


def _part(case: scoring.Case) -> Part:
    return case.part if isinstance(case, Bug) else "draw"


def _imported(name: str) -> scoring.Judge:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    main()
