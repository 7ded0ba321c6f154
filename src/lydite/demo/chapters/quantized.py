"""Chapter: the network in 4 bits, rounded to nearest and by GPTQ, judged."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lydite.calibrate.model_session import ModelSession, model_hash
from lydite.calibrate.request_record import conditions_of
from lydite.calibrate.run import RunCallbacks, run_here
from lydite.calibrate.settings import Description, plan_of
from lydite.calibrate.settings import Settings as SetSettings
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.writer import Writer
from lydite.demo.chapter import DemoChapter, Result, Settings
from lydite.demo.demo import Demo, Tick
from lydite.embedded.captions import training_prompts
from lydite.evaluate.paired import psnr
from lydite.pipelines.picture import Pixels
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.blocks import choose_samples
from lydite.quantize.export import export
from lydite.quantize.plan import uniform_plan
from lydite.quantize.provenance import Provenance
from lydite.quantize.quantize_blocks import Method
from lydite.quantize.quantize_blocks import Settings as QuantizeSettings
from lydite.quantize.quantize_network import provenance, quantize_network
from lydite.quantize.work import Work
from lydite.report.contact_sheets import png_bytes
from lydite.report.page import Block, Callout, Chapter, Commands, Fact, Figure, Figures, Table

TITLE = "The network in 4 bits"
BITS, GROUP = 4, 64
CALIBRATED = 8  # pictures, of training prompts; with 4 GPTQ gains less than pictures differ
SHOWN = 4  # prompts of the first sheet that are drawn again
SAMPLES = 64
METHODS: Mapping[Method, str] = {
    "rtn": "rounded to nearest",
    "gptq": "by GPTQ",
}


def run(demo: Demo, tick: Tick) -> Result:
    """Calibrate, quantize by two methods, draw the same pictures, and compare."""
    prompts = demo.settings.prompts[:SHOWN]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _calibrate(demo, folder / "set", tick)
        full = [_draw(demo.pipeline, demo, prompt, n, tick) for n, prompt in enumerate(prompts)]
        drawn: dict[Method, list[Pixels]] = {}
        records: dict[Method, Provenance] = {}
        for method in METHODS:
            records[method] = _quantize(demo.pipeline, folder, method)
            pipeline = Pipeline.open(folder / method / "model", dtype="float32")
            drawn[method] = [_draw(pipeline, demo, p, n, tick) for n, p in enumerate(prompts)]
    scores: dict[Method, list[float]] = {
        method: [psnr(one, other) for one, other in zip(full, drawn[method], strict=True)]
        for method in METHODS
    }
    means: dict[Method, float] = {
        method: float(np.mean(values)) for method, values in scores.items()
    }
    learned = records["gptq"]
    left = float(np.mean([unit.after / unit.nearest for unit in learned.units]))
    changed = float(np.mean(list(learned.changed.values())))
    share = learned.bytes_before / learned.bytes_after
    error = f"GPTQ leaves {100 * left:.0f} % of the error that rounding to nearest makes in a block"
    pictures = f"PSNR of {len(prompts)} pictures: " + ", ".join(
        f"{METHODS[method]} {value:.1f} dB" for method, value in means.items()
    )
    lead = (
        f"The linears of the transformer in {BITS} bits with groups of {GROUP}, those of the "
        f"modulation in 8: the network takes {share:.1f} times less memory than in 16 bits. GPTQ "
        f"looks at {SAMPLES} samples of a calibration set of {CALIBRATED} pictures that was drawn "
        f"here, and rounds {100 * changed:.0f} % of the integers otherwise than to nearest."
    )
    blocks: list[Block] = [
        _table(scores, means),
        Figures(tuple(_figures(prompts, full, drawn, scores)), size="small"),
        Callout(f"{error}. {pictures}. One picture differs from another by more than these methods "
                "do: compare many, with lydite evaluate.", "good"),
        Commands((
            "lydite quantize embedded --bits 4 --out q4/",
            "lydite generate 'a red star' --model q4/",
        )),
    ]  # fmt: skip
    fact = Fact(f"{100 * left:.0f} %", "of the rounding error of 4 bits is left by GPTQ", "good")
    return Result((error, pictures), Chapter(TITLE, lead, tuple(blocks)), fact)


def _calibrate(demo: Demo, folder: Path, tick: Tick) -> None:
    pipeline = demo.pipeline
    request = demo.plan("").request
    settings = SetSettings(
        model_hash(pipeline), conditions_of(request, pipeline.model.dtype), "F32", "embedded"
    )
    texts = [prompt.text for prompt in training_prompts(CALIBRATED, seed=4242)]
    plan = plan_of(
        [(text, 1000 + n) for n, text in enumerate(texts)],
        range(demo.settings.steps),
        pictures=False,
    )
    with Writer.start(folder, settings, plan) as writer:
        session = ModelSession(Description(settings, plan), pipeline)
        run_here(writer, session, RunCallbacks(stepped=lambda image, step: tick()))


def _quantize(pipeline: Pipeline, folder: Path, method: Method) -> Provenance:
    shapes = pipeline.model.components[pipeline.family.network].expected
    settings = QuantizeSettings(method, uniform_plan(shapes, BITS, GROUP))
    with CalibrationSet.open(folder / "set") as opened, Work.open(folder / method) as work:
        samples = choose_samples(opened, 1, SAMPLES, SAMPLES)
        used = None if method == "rtn" else opened
        results = quantize_network(pipeline, used, samples, settings, work)
        described = {
            "source_model": "embedded",
            "source_hash": opened.settings.model_hash,
            "set_hash": opened.content_hash,
        }
    weights = {path: weight for each in results for path, weight in each.weights.items()}
    export(pipeline, weights, folder / method / "model")
    return provenance(pipeline, results, settings, described)


def _draw(pipeline: Pipeline, demo: Demo, prompt: str, seed: int, tick: Tick) -> Pixels:
    run = pipeline.plan(demo.plan(prompt).request)
    picture = next(pipeline.generate(run, [seed]))
    for _ in range(run.steps):
        tick()
    return picture.pixels


def _table(scores: dict[Method, list[float]], means: dict[Method, float]) -> Table:
    rows = tuple(
        (METHODS[method], f"{means[method]:.1f} dB", f"{min(values):.1f} dB")
        for method, values in scores.items()
    )
    return Table(("weights", "PSNR, mean", "worst"), rows)


def _figures(
    prompts: tuple[str, ...],
    full: list[Pixels],
    drawn: dict[Method, list[Pixels]],
    scores: dict[Method, list[float]],
) -> list[Figure]:
    figures: list[Figure] = []
    for number, prompt in enumerate(prompts):
        figures.append(
            Figure(png_bytes(full[number]), f"{prompt}, full precision", "full precision", prompt)
        )
        for method, pictures in drawn.items():
            caption = f"{METHODS[method]}: {scores[method][number]:.1f} dB"
            figures.append(
                Figure(png_bytes(pictures[number]), f"{prompt}, {caption}", caption, prompt)
            )
    return figures


def _steps(settings: Settings) -> int:
    shown = len(settings.prompts[:SHOWN])
    return settings.steps * (CALIBRATED + shown * (1 + len(METHODS)))


CHAPTER = DemoChapter(TITLE, _steps, run)
