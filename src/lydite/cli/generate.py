"""`lydite generate`: text, or text and an image, to PNG."""

import re
import secrets
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite.cli.paths import check_template, free_path, picture_path
from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.pipelines.metadata import Record
    from lydite.pipelines.sd3 import Picture, Progress, Request, StableDiffusion3

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEBUG = ("nan", "timing", "shapes", "all")


@click.command("generate")
@click.argument("prompt", required=False)
@click.option(
    "-m", "--model", metavar="FOLDER|FILE|HUB-ID", help="diffusers folder, single file, or hub id."
)
@click.option(
    "--components",
    metavar="FOLDER",
    help="Take what MODEL lacks (text encoders, tokenizers, VAE) from here.",
)
@click.option("-n", "--negative", default="", help="What the picture should not show.")
@click.option(
    "-s",
    "--seed",
    "seeds",
    multiple=True,
    metavar="N|A-B|N,N…",
    help="One or several; a random one by default.",
)
@click.option("--steps", default=28, show_default=True, help="Denoising steps.")
@click.option(
    "--guidance",
    default=7.0,
    show_default=True,
    help="Weight of the prompt; 1 or less turns guidance off.",
)
@click.option(
    "--size", metavar="WxH", help="Pixels, e.g. 1024x768; the model's own size by default."
)
@click.option(
    "--batch",
    default=1,
    show_default=True,
    help="Pictures denoised together. With one seed S it draws S, S+1, …",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="auto: float32 on CPU, bfloat16 elsewhere.",
)
@click.option(
    "--schedule",
    default="sd3_diffusers",
    show_default=True,
    help="sd3_diffusers (as diffusers runs it) or flow_shift (as in the paper).",
)
@click.option(
    "--noise",
    type=click.Choice(["torch", "mlx"]),
    default="torch",
    show_default=True,
    help="torch: the same start as diffusers for a seed.",
)
@click.option("--text-length", default=256, show_default=True, help="T5 tokens.")
@click.option("-i", "--image", metavar="FILE", help="img2img: start from this picture.")
@click.option(
    "--strength",
    default=0.6,
    show_default=True,
    help="img2img: share of the steps to run; 1 ignores the picture.",
)
@click.option(
    "-o",
    "--out",
    default="lydite_{seed}.png",
    show_default=True,
    help="File, folder or template with {seed} {index} {prompt} {model} {steps} {guidance} "
    "{width} {height}.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace existing files; otherwise a number is added to the name.",
)
@click.option(
    "--preview",
    metavar="N",
    type=click.IntRange(min=1),
    help="Also write what the network sees every N steps.",
)
@click.option("--low-memory", is_flag=True, help="Load and free the networks one after the other.")
@click.option("--debug", metavar="MODES", help="Comma-separated: nan, timing, shapes, or all.")
@click.option(
    "--from",
    "source",
    metavar="PNG",
    help="Replay a picture made here; other options override its settings.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress bar, only errors.")
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Draw PROMPT with a Stable Diffusion 3 or 3.5 model.

    \b
    lydite generate "a red fox in snow" -m sd3-folder/ --seed 7
    lydite generate "a red fox" -m sd3.safetensors --components sd3-folder/ -s 1-4 --batch 2
    lydite generate "in oil" -m sd3-folder/ --image photo.png --strength 0.7
    lydite generate --from lydite_7.png                the same picture again, bit for bit
    lydite generate "a fox" -m sd3-folder/ --debug nan,timing

    The PNG remembers every setting (A1111 text and one JSON key). Ctrl-C keeps what is finished.
    """
    from lydite.pipelines.hub import locate
    from lydite.pipelines.sd3 import StableDiffusion3

    settings = _settings(ctx, options)
    plan = _plan(settings)
    dtype = _dtype(settings["dtype"])
    pipeline = StableDiffusion3.load(
        locate(settings["model"]),
        dtype=dtype,
        low_memory=settings["low_memory"],
        components=locate(settings["components"]) if settings["components"] else None,
    )
    request = pipeline.complete(plan.request)
    _warn_truncation(pipeline, request)
    _run(pipeline, request, plan, settings)


@dataclass(frozen=True)
class Plan:
    """The checked form of the options."""

    request: "Request"
    seeds: tuple[int, ...]
    batch: int
    template: str
    debug: frozenset[str]
    image_hash: str | None


def _settings(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with those of a replayed picture below the ones given by hand."""
    if not options["source"]:
        if options["prompt"] is None:
            raise InputError('no prompt. Say what to draw: lydite generate "a red fox" -m MODEL.')
        if options["model"] is None:
            raise InputError("no model. Name one with --model FOLDER|FILE|HUB-ID.")
        return options
    from lydite.pipelines.metadata import read_record

    record = read_record(Path(options["source"]))
    remembered: dict[str, Any] = {
        "prompt": record.prompt,
        "negative": record.negative,
        "model": record.model,
        "components": record.components,
        "seeds": (str(record.seed),),
        "steps": record.steps,
        "guidance": record.guidance,
        "size": f"{record.width}x{record.height}",
        "dtype": record.dtype,
        "schedule": record.schedule,
        "noise": record.noise,
        "text_length": record.text_length,
        "image": record.image,
        "image_hash": record.image_hash,
        "model_hash": record.model_hash,
    }
    if record.strength is not None:
        remembered["strength"] = record.strength
    given = {
        name: value
        for name, value in options.items()
        if name not in remembered
        or (
            ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
            and value is not None
        )
    }
    settings = {**options, **remembered, **given}
    if "image" in given:
        settings["image_hash"] = None
    return settings


def _plan(settings: dict[str, Any]) -> Plan:
    from lydite.pipelines.images import pixel_hash, read_pixels
    from lydite.pipelines.sd3 import Request

    width, height = _size(settings["size"])
    template = check_template(settings["out"])
    image = image_hash = None
    if settings["image"]:
        image = read_pixels(Path(settings["image"]))
        image_hash = pixel_hash(image)
        if settings.get("image_hash") not in (None, image_hash):
            raise InputError(
                f"{settings['image']}: not the image this picture was made from; "
                "name the right one with --image."
            )
    request = Request(
        prompt=settings["prompt"],
        negative=settings["negative"],
        steps=settings["steps"],
        guidance=settings["guidance"],
        width=width,
        height=height,
        schedule=settings["schedule"],
        text_length=settings["text_length"],
        noise=settings["noise"],
        image=image,
        strength=settings["strength"],
    )
    seeds = _seeds(settings["seeds"], settings["batch"])
    return Plan(request, seeds, settings["batch"], template, _debug(settings["debug"]), image_hash)


def _run(
    pipeline: "StableDiffusion3", request: "Request", plan: Plan, settings: dict[str, Any]
) -> None:
    from lydite.cli.progress import StepBar
    from lydite.pipelines.metadata import model_hash, save_png
    from lydite.pipelines.watch import Debugger, unwatched

    fingerprint = model_hash(pipeline.files.components)
    if settings.get("model_hash") not in (None, fingerprint):
        click.echo("note: the model is not the one this picture was made with.", err=True)
    total = len(pipeline.schedule(request).timesteps)
    batches = -(-len(plan.seeds) // plan.batch)
    finished = 0
    with StepBar(total * batches, quiet=settings["quiet"]) as bar:
        watch = Debugger(set(plan.debug), bar.print) if plan.debug else unwatched

        def on_step(progress: "Progress") -> None:
            bar.advance()
            every = settings["preview"]
            if every and (progress.index + 1) % every == 0 and progress.index + 1 < progress.total:
                _save_previews(progress, target)

        def target(seed: int, index: int) -> Path:
            return picture_path(
                plan.template, request, seed=seed, index=index, model=settings["model"]
            )

        try:
            for picture in pipeline.generate(
                request, plan.seeds, batch=plan.batch, on_step=on_step, watch=watch
            ):
                path = free_path(target(picture.seed, finished), overwrite=settings["overwrite"])
                save_png(
                    path, picture.pixels, _record(request, picture, settings, plan, fingerprint)
                )
                finished += 1
                bar.print(f"{path}  seed {picture.seed}")
        except KeyboardInterrupt:
            bar.print(f"interrupted: {finished} of {len(plan.seeds)} pictures are saved.")
            raise


def _save_previews(progress: "Progress", target: Any) -> None:
    from PIL import Image

    from lydite.core.files import atomic_path

    for index, (seed, pixels) in enumerate(zip(progress.seeds, progress.preview(), strict=True)):
        final = target(seed, index)
        path = final.with_name(f"{final.stem}_step{progress.index + 1:03d}.png")
        with atomic_path(path) as temporary:
            Image.fromarray(pixels).save(temporary, format="PNG")


def _record(
    request: "Request", picture: "Picture", settings: dict[str, Any], plan: Plan, fingerprint: str
) -> "Record":
    from lydite.pipelines.metadata import Record

    assert request.width and request.height
    return Record(
        model=settings["model"],
        model_hash=fingerprint,
        components=settings["components"],
        prompt=request.prompt,
        negative=request.negative,
        seed=picture.seed,
        steps=request.steps,
        guidance=request.guidance,
        width=request.width,
        height=request.height,
        schedule=request.schedule,
        text_length=request.text_length,
        noise=request.noise,
        dtype=str(_dtype(settings["dtype"])).removeprefix("mlx.core."),
        image=settings["image"],
        image_hash=plan.image_hash,
        strength=request.strength if request.image is not None else None,
        mlx=version("mlx"),
    )


def _warn_truncation(pipeline: "StableDiffusion3", request: "Request") -> None:
    for encoder in ("text_encoder", "text_encoder_3"):
        if encoder in pipeline.files.tokenizers:
            tokenizer = pipeline.files.tokenizer(encoder, request.text_length)
            if lost := tokenizer.truncated(request.prompt):
                room = f"{encoder} reads {tokenizer.max_length} tokens"
                click.echo(f"note: {room}; it does not see: …{lost.strip()}", err=True)


def _dtype(name: str) -> Any:
    from lydite.core.blas import preload

    preload()  # before MLX
    import mlx.core as mx

    if name == "auto":
        name = "float32" if mx.default_device() == mx.Device(mx.cpu) else "bfloat16"
    return getattr(mx, name)


def _size(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    found = re.fullmatch(r"([1-9]\d{0,5})[xX×]([1-9]\d{0,5})", text)
    if not found:
        raise InputError(f"--size is {text!r}; expected WIDTHxHEIGHT in pixels, e.g. 1024x768.")
    return int(found[1]), int(found[2])


def _seeds(texts: tuple[str, ...], batch: int) -> tuple[int, ...]:
    if batch < 1:
        raise InputError(f"--batch is {batch}; expected at least 1.")
    seeds: list[int] = []
    for part in ",".join(texts).split(",") if texts else [str(secrets.randbelow(2**32))]:
        found = re.fullmatch(r"\s*(-?\d{1,20})(?:-(\d{1,20}))?\s*", part)
        if not found:
            raise InputError(f"--seed is {part!r}; expected a number, a range 1-4, or 1,5,9.")
        first = int(found[1])
        last = int(found[2]) if found[2] else first
        if not first <= last < first + 10_000:
            raise InputError(f"--seed {part}: expected a rising range of at most 10,000.")
        seeds.extend(range(first, last + 1))
    if len(seeds) == 1:
        seeds = list(range(seeds[0], seeds[0] + batch))
    return tuple(seeds)


def _debug(text: str | None) -> frozenset[str]:
    modes = {mode.strip() for mode in text.split(",")} if text else set[str]()
    if unknown := modes - set(DEBUG):
        raise InputError(f"--debug has {', '.join(sorted(unknown))}; expected {', '.join(DEBUG)}.")
    return frozenset(DEBUG[:-1]) if "all" in modes else frozenset(modes)
