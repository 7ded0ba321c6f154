"""What `lydite trace` and `lydite parity` share: one picture, recorded on either side."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lydite import embedded
from lydite.cli.settings import read_seeds, read_size
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.reference.jobs import Dtype, Job, Run
    from lydite.trace.recorder import InjectionSource
    from lydite.trace.writer import Capture, Level

STEPS = 4  # the first, the last, and two between: enough for an error to grow, few enough to keep
BUDGET = "2GB"
LEVELS = ("full", "sketch", "stats")
UNITS = ("", "k", "m", "g", "t")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Drawing:
    """The picture: everything that decides the run but its side and precision."""

    model: str
    path: Path
    components: Path | None
    prompt: str
    negative: str
    seed: int
    steps: int
    guidance: float
    width: int | None  # None: the size the model was made for
    height: int | None
    text_length: int


def drawing_options(command: F) -> F:
    """The options of `lydite generate` that decide one picture."""
    options = (
        click.option("--components", metavar="FOLDER",
                     help="Take what a single file lacks (encoders, tokenizers, VAE) from here."),
        click.option("-n", "--negative", default="", help="What the picture should not show."),
        click.option("-s", "--seed", default="0", show_default=True,
                     help="Of torch's CPU generator, on both sides."),
        click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True,
                     help="Denoising steps."),
        click.option("--guidance", type=float,
                     help="Weight of the prompt: 7, or 3 with the embedded model."),
        click.option("--size", metavar="WxH", help="Pixels; by default the model's own size."),
        click.option("--text-length", type=int,
                     help="T5 tokens: 256, or 16 with the embedded model."),
    )  # fmt: skip
    return _applied(options, command)


def capture_options(command: F) -> F:
    """How much of the run is kept."""
    options = (
        click.option("--points", multiple=True, metavar="PATTERN",
                     help="Keep only these names, e.g. 'vae/*' or 'vae/*:out'; repeatable."),
        click.option("--budget", default=BUDGET, show_default=True, metavar="BYTES",
                     help="Of a trace, e.g. 500MB; past it values shrink to sketches and "
                          "statistics, and the run goes on."),
    )  # fmt: skip
    return _applied(options, command)


def read_drawing(
    model: str | None,
    prompt: str,
    *,
    components: str | None,
    negative: str,
    seed: str,
    steps: int,
    guidance: float | None,
    size: str | None,
    text_length: int | None,
) -> Drawing:
    """The options checked, and the model found."""
    from lydite.pipelines.hub import locate

    model = model or embedded.NAME
    usual = (7.0, 256) if model != embedded.NAME else (embedded.GUIDANCE, embedded.TEXT_LENGTH)
    seeds = read_seeds((seed,), batch=1)
    if len(seeds) != 1:
        raise InputError(f"--seed is {seed!r}; expected one number: a trace is of one picture.")
    width, height = read_size(size)
    return Drawing(
        model=model,
        path=locate(model),
        components=locate(components) if components else None,
        prompt=prompt,
        negative=negative,
        seed=seeds[0],
        steps=steps,
        guidance=usual[0] if guidance is None else guidance,
        width=width,
        height=height,
        text_length=usual[1] if text_length is None else text_length,
    )


def read_capture(level: "Level", points: tuple[str, ...], budget: str) -> "Capture":
    """What is kept of a run."""
    from lydite.trace.writer import Capture

    return Capture(level, points or ("*",), budget=read_bytes(budget))


def read_bytes(text: str) -> int:
    """`500MB` or `2GiB` as a number."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found or float(found[1]) == 0:
        raise InputError(f"--budget is {text!r}; expected a size such as 500MB or 2GB.")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** UNITS.index(found[2]))


def record_ours(
    drawing: Drawing,
    dtype: str,
    folder: Path,
    *,
    capture: "Capture",
    on_step: Callable[[], None],
    inject: "InjectionSource | None" = None,
) -> None:
    """Draw with MLX and leave a trace; the networks are let go of afterwards."""
    import mlx.core as mx

    from lydite.pipelines.sd3 import Request, StableDiffusion3
    from lydite.pipelines.sd3_files import open_files
    from lydite.pipelines.sd3_trace import record

    request = Request(
        prompt=drawing.prompt,
        negative=drawing.negative,
        steps=drawing.steps,
        guidance=drawing.guidance,
        width=drawing.width,
        height=drawing.height,
        text_length=drawing.text_length,
    )
    files = open_files(drawing.path, drawing.components)
    pipeline = StableDiffusion3(files, dtype=getattr(mx, dtype))
    pipeline.schedule(pipeline.complete(request))  # slow things come after what can be refused
    pipeline.networks.prepare()
    record(
        pipeline,
        request,
        drawing.seed,
        folder,
        model=drawing.model,
        capture=capture,
        inject=inject,
        on_step=lambda _: on_step(),
    )


def reference_job(
    drawing: Drawing, runs: "tuple[Run, ...]", capture: "Capture", **injection: Any
) -> "Job":
    """The same picture as a job for diffusers."""
    from lydite.reference.jobs import Job

    return Job(
        model=str(drawing.path),
        name=drawing.model,
        components=str(drawing.components) if drawing.components else None,
        prompt=drawing.prompt,
        negative=drawing.negative,
        seed=drawing.seed,
        steps=drawing.steps,
        guidance=drawing.guidance,
        width=drawing.width,
        height=drawing.height,
        text_length=drawing.text_length,
        runs=runs,
        level=capture.level,
        points=capture.points,
        budget=capture.budget,
        **injection,
    )


def floor_dtype(dtype: str) -> "Dtype":
    """The precision whose second run of the reference shows its rounding for a port in `dtype`."""
    floors: dict[str, Dtype] = {
        "float32": "float64",
        "bfloat16": "bfloat16",
        "float16": "float16",
    }
    return floors[dtype]


def typed_arguments(ctx: click.Context, without: tuple[str, ...]) -> list[str]:
    """The arguments the user gave, but for some."""
    default = click.core.ParameterSource.DEFAULT
    words: list[str] = []
    for parameter in ctx.command.params:
        name, value = parameter.name or "", ctx.params.get(parameter.name or "")
        if name in without or ctx.get_parameter_source(name) is default:
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [word for each in values for word in (parameter.opts[-1], str(each))]
    return words


def _applied(options: tuple[Callable[[F], F], ...], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command
