"""`lydite parity`: one checkpoint in Lydite and in diffusers, from token ids to the picture."""

import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite.cli.aliases import AliasedOption
from lydite.cli.diff import print_answer
from lydite.cli.recording import (
    capture_options,
    floor_dtype,
    plan_recording,
    read_capture,
    record_port,
    reference_job,
    seed_option,
)
from lydite.cli.request_options import (
    components_option,
    device_option,
    image_options,
    overwrite_option,
    request_options,
    revision_option,
    typed_arguments,
)
from lydite.cli.tables import wide_console
from lydite.core.errors import FileError, InputError

if TYPE_CHECKING:
    from lydite.diff.result import Row, Verdict
    from lydite.pipelines.family import Run
    from lydite.pipelines.pipeline import Pipeline
    from lydite.trace.reader import Trace
    from lydite.trace.writer import Capture

PROMPT = "a large red star above a small blue ring"
LARGEST_ROUNDING = 0.1  # relative, of float32
DTYPES = ("float32", "bfloat16", "float16")
TRACES = ("reference", "floor", "port")  # folders in --keep-traces


@dataclass(frozen=True)
class Component:
    """One network, or the pipeline between them, in a comparison."""

    name: str
    values: int  # compared
    error: float | None  # the largest
    floor: float | None  # what rounding alone may do there
    ratio: float | None
    verdict: str  # "agree", "diverge" (the first to), "follow" (wrong after that)


@dataclass(frozen=True)
class ImageDifference:
    """How far apart the two pictures are, in levels of 255."""

    largest: int
    equal: int  # pixels with all channels equal
    pixels: int


@click.command("parity")
@click.argument("model", required=False)
@click.argument("prompt", required=False)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True,
              help="Precision of our side; the reference runs in float32.")  # fmt: skip
@components_option
@revision_option
@device_option
@seed_option
@request_options
@image_options
@capture_options
@click.option("--keep-traces", "keep", cls=AliasedOption, old=("--keep",),
              type=click.Path(path_type=Path), metavar="FOLDER",
              help="Keep the three traces here, for lydite diff.")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE",
              help="Write a page: error curve, module tree, pictures.")  # fmt: skip
@overwrite_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@click.pass_context
def command(
    ctx: click.Context,
    model: str | None,
    prompt: str | None,
    dtype: str,
    points: tuple[str, ...],
    budget: str,
    keep: Path | None,
    html: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Compare our pipeline with diffusers on the same checkpoint, prompt and noise.

    MODEL is a diffusers folder, a hub id, or a single file with --components; by default the model
    inside the package. Three runs are recorded and compared: ours, diffusers in float32, and
    diffusers once more in float64 (with --dtype bfloat16 or float16: in that precision). The two
    runs of diffusers show the rounding error of every value. Token ids, schedule, weights and noise
    are compared first, then every module of every network at every step, then the picture.

    \b
    lydite parity                                   the embedded model, four steps
    lydite parity sd3-folder/ "a red fox" --size 512x512 --budget 20GB
    lydite parity sd3-folder/ --dtype bfloat16 --steps 2 --keep-traces traces
    lydite parity sd3.safetensors --components sd3-folder/ --json

    Needs pip install 'lydite[reference]'. Exit status: 0 they agree, 1 they diverge, 2 they could
    not be compared.
    """
    from lydite.core.outputs import check_output
    from lydite.diff.compare import compare
    from lydite.reference.jobs import check_installed
    from lydite.trace.reader import Trace

    check_installed()
    if html:
        given = [model, options["components"], options["image"], options["mask"]]
        inputs = [Path(name) for name in given if name]
        check_output(html, overwrite=overwrite, inputs=inputs)
    pipeline, run, seed = plan_recording(prompt or PROMPT, {"model": model, **options}, dtype)
    capture = read_capture("full", points, budget)
    with _folder(keep) as folder:
        _record(pipeline, run, seed, dtype, folder, capture, quiet=quiet)
        checkpoint = pipeline.model.path if pipeline.model.path.is_dir() else None
        del pipeline, run  # frees the networks
        with (
            Trace.open(folder / "reference") as theirs,
            Trace.open(folder / "floor") as floor,
            Trace.open(folder / "port") as ours,
        ):
            check_recorded(theirs, points)
            verdict = compare(theirs, ours, floor=floor, checkpoint=checkpoint)
            if dtype == "float32":
                check_reference(verdict)
            components = by_component(verdict)
            image = image_difference(theirs, ours)
            if html:
                from lydite.report.diff.page import write_page

                write_page(html, verdict, theirs, ours, overwrite=overwrite)
    if as_json:
        click.echo(_to_json(verdict, components, image))
    else:
        _print(verdict, components, image)
        if html:
            click.echo(f"page: {html}")
        if following := _next(ctx, verdict, keep):
            click.echo(f"next: {following}")
    sys.exit(verdict.exit_code)


def check_recorded(trace: "Trace", points: tuple[str, ...]) -> None:
    """InputError when no value of a run had a name that was asked for."""
    if points and all(event.kind == "weight" for event in trace.events):
        raise InputError(
            f"--points {' '.join(points)}: no value of the run has such a name. Names are like "
            "vae/decoder.conv_in; give one pattern for each --points."
        )


def by_component(verdict: "Verdict") -> list[Component]:
    """The rows of a verdict summed up by network, in order of execution."""
    rows: dict[str, list[Row]] = {}
    for row in verdict.rows:
        rows.setdefault(_scope(row.site), []).append(row)
    first = _scope(verdict.site or "")
    return [_component(name, group, verdict, first) for name, group in rows.items()]


def check_reference(verdict: "Verdict") -> None:
    """ReferenceFailed when float32 and float64 are two different runs: any port would agree."""
    from lydite.reference.jobs import ReferenceFailed

    for row in verdict.rows:
        if row.floor is not None and row.floor > LARGEST_ROUNDING:
            raise ReferenceFailed(
                f"diffusers differs from itself by {row.floor:.2g} at {row.name}, step {row.step}, "
                "between float32 and float64, so it is no reference. Is something in it random, "
                "or not loaded?"
            )


def image_difference(reference: "Trace", port: "Trace") -> ImageDifference | None:
    """The two pictures in whole levels; None when one of them was not kept."""
    import numpy as np

    pixels: list[Any] = []
    for trace in (reference, port):
        event = trace.find("pipeline/image")
        if event is None or not trace.has_values(event):
            return None
        pixels.append(np.round(np.asarray(trace.read(event), np.float32) * 255))
    theirs, ours = pixels
    if theirs.shape != ours.shape:
        return None
    apart = np.abs(ours - theirs).reshape(-1, theirs.shape[-1])
    return ImageDifference(int(apart.max()), int((apart == 0).all(axis=-1).sum()), len(apart))


def _scope(name: str) -> str:
    return name.split("/")[0]  # a network's root module is called as the network


def _component(name: str, rows: "Sequence[Row]", verdict: "Verdict", first: str) -> Component:
    known = [row for row in rows if row.error is not None]
    worst = max(known, key=lambda row: row.error or 0.0, default=None)
    error, floor = (worst.error, worst.floor) if worst else (None, None)
    word = "agree"
    ignored = verdict.ignored_rows
    if verdict.verdict != "agree" and any(r.wrong and r not in ignored for r in rows):
        word = "diverge" if name == first else "follow"
    ratio = error / floor if error is not None and floor else None
    return Component(name, len(known), error, floor, ratio, word)


def _record(
    pipeline: "Pipeline",
    run: "Run",
    seed: int,
    dtype: str,
    folder: Path,
    capture: "Capture",
    *,
    quiet: bool,
) -> None:
    from lydite.cli.progress import StepBar
    from lydite.reference.jobs import TraceOutput, run_job

    reference, floor, port = (folder / name for name in TRACES)
    outputs = TraceOutput(str(reference)), TraceOutput(str(floor), floor_dtype(dtype))
    job = reference_job(pipeline, run, seed, outputs, capture)
    with StepBar(3 * run.steps, quiet=quiet) as bar:
        record_port(pipeline, run, seed, port, capture=capture, on_step=bar.advance)
        pipeline.model.unload()
        run_job(job, bar.advance)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="lydite-parity-") as folder:
            yield Path(folder)
        return
    taken = [keep / name for name in TRACES if (keep / name).exists()]
    if taken:
        raise FileError(f"{taken[0]}: exists. Give --keep-traces another folder.")
    yield keep


def _print(
    verdict: "Verdict", components: Sequence[Component], image: ImageDifference | None
) -> None:
    print_answer(verdict)
    click.echo("gates: " + "; ".join(
        f"{gate.name} {gate.word} ({gate.detail})" for gate in verdict.gates
    ))  # fmt: skip
    if components:
        _print_components(components)
    if image is None:
        click.echo("picture: not compared; one side did not keep it (--budget, --points)")
    else:
        click.echo(
            f"picture: largest difference {image.largest} of 255, "
            f"{image.equal:,} of {image.pixels:,} pixels equal"
        )


def _print_components(components: Sequence[Component]) -> None:
    from rich.table import Table

    colors = {"agree": "green", "diverge": "red", "follow": "yellow"}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("component", "values", "largest error", "rounding there", "×", ""):
        table.add_column(title, justify="left" if title in ("component", "") else "right")
    for each in components:
        table.add_row(
            each.name,
            f"{each.values:,}",
            "" if each.error is None else f"{each.error:.2e}",
            "" if each.floor is None else f"{each.floor:.1e}",
            "" if each.ratio is None else f"{each.ratio:.2g}",
            f"[{colors[each.verdict]}]{each.verdict}[/]",
        )
    wide_console().print(table)


def _to_json(
    verdict: "Verdict", components: Sequence[Component], image: ImageDifference | None
) -> str:
    """What `lydite diff --json` says, and more; null stands for what is not finite."""
    import msgspec

    more = {"components": components, "image": image}
    return msgspec.json.format(
        msgspec.json.encode({**verdict.to_json(), **more}), indent=1
    ).decode()


def _next(ctx: click.Context, verdict: "Verdict", keep: Path | None) -> str | None:
    """Where the numbers can be looked at one by one."""
    if keep is not None:
        reference, floor, port = (str(keep / name) for name in TRACES)
        return shlex.join(["lydite", "diff", reference, port, "--floor", floor])
    if verdict.verdict == "agree":
        return None
    typed = typed_arguments(ctx, without=("as_json", "html", "quiet"))
    return shlex.join(["lydite", "parity", *typed, "--keep-traces", "traces"])
