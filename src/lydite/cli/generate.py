"""`lydite generate`: text, or text and an image, to PNG."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite import embedded
from lydite.cli.guidance import guidance_options, idle_options, sampler_options
from lydite.cli.paths import picture_path, save_new
from lydite.cli.settings import DTYPES, Plan, Settings, make_plan, replay
from lydite.core.errors import shown

if TYPE_CHECKING:
    from lydite.pipelines.metadata import Record
    from lydite.pipelines.sd3 import Picture, Progress, Request, StableDiffusion3


@click.command("generate")
@click.argument("prompt", required=False)
@click.option(
    "-m",
    "--model",
    metavar="FOLDER|FILE|HUB-ID",
    help="diffusers folder, file or hub id; the embedded one by default.",
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
@click.option("--steps", type=int, help="Denoising steps: 28, or 16 with the embedded model.")
@guidance_options
@click.option(
    "--size",
    metavar="WxH",
    help="Pixels, e.g. 1024x768; by default the model's own, or --image's.",
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
@sampler_options
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

    Without --model the tiny model inside the package draws: shapes, colours, sizes, places and
    backgrounds, up to three objects.

    \b
    lydite generate "a large red star above a small blue ring"
    lydite generate "a red fox in snow" -m sd3-folder/ --seed 7
    lydite generate "a red fox" -m sd3.safetensors --components sd3-folder/ -s 1-4 --batch 2
    lydite generate "in oil" -m sd3-folder/ --image photo.png --strength 0.7
    lydite generate "a red fox" -m sd3-folder/ --sampler dpmpp_2m --schedule karras --steps 20
    lydite generate "a red star" --guidance 5 --guidance-rescale 0.7 --guidance-interval 0.2:0.8
    lydite generate "a red star" --steps 4 --guidance 5,5,3,1 --sampler ddim --eta 0.5
    lydite generate --from lydite_7.png                the same picture again, bit for bit
    lydite generate "a fox" -m sd3-folder/ --debug nan,timing

    The PNG remembers every setting (A1111 text and one JSON key). Ctrl-C keeps what is finished.
    """
    default = click.core.ParameterSource.DEFAULT
    typed = {name for name in options if ctx.get_parameter_source(name) is not default}
    settings, record = replay(Settings(**options), typed)
    plan = make_plan(settings, record)
    pipeline = _open(plan)
    request = pipeline.complete(plan.request)
    pipeline.strength(request)
    for note in idle_options(request, typed):
        click.echo(f"note: {note}", err=True)
    _note_truncation(pipeline, request, plan.model)
    pipeline.networks.prepare()  # slow: everything that can be refused has been
    _run(pipeline, request, plan, record)


def _open(plan: Plan) -> "StableDiffusion3":
    import mlx.core as mx

    from lydite.models.layers import on_cpu
    from lydite.pipelines.hub import locate
    from lydite.pipelines.sd3 import StableDiffusion3
    from lydite.pipelines.sd3_files import open_files

    name = plan.settings.dtype
    if name == "auto":
        name = "float32" if on_cpu() else "bfloat16"
    components = plan.settings.components
    files = open_files(locate(plan.model), locate(components) if components else None)
    low_memory = plan.settings.low_memory
    return StableDiffusion3(files, dtype=getattr(mx, name), low_memory=low_memory)


def _run(
    pipeline: "StableDiffusion3", request: "Request", plan: Plan, record: "Record | None"
) -> None:
    from lydite.cli.progress import StepBar
    from lydite.pipelines.metadata import model_hash, write_png
    from lydite.pipelines.watch import Debugger, unwatched

    settings = plan.settings
    fingerprint = model_hash(pipeline.files.components)
    if record and record.model_hash != fingerprint:
        click.echo("note: the model is not the one this picture was made with.", err=True)
    steps = len(pipeline.schedule(request).timesteps) * -(-len(plan.seeds) // settings.batch)
    finished = 0

    def target(seed: int, index: int) -> Path:
        return picture_path(plan.template, request, seed=seed, index=index, model=plan.model)

    with StepBar(steps, quiet=settings.quiet) as bar:

        def on_step(progress: "Progress") -> None:
            bar.advance()
            done = progress.index + 1
            if settings.preview and done % settings.preview == 0 and done < progress.total:
                _save_previews(progress, target, overwrite=settings.overwrite)

        try:
            for picture in pipeline.generate(
                request,
                plan.seeds,
                batch=settings.batch,
                on_step=on_step,
                watch=Debugger(plan.debug, bar.print) if plan.debug else unwatched,
            ):
                made = _record(pipeline, request, picture, plan, fingerprint)
                path = save_new(
                    target(picture.seed, finished),
                    partial(write_png, pixels=picture.pixels, record=made),
                    overwrite=settings.overwrite,
                )
                finished += 1
                bar.saved(path, picture.seed)
        except KeyboardInterrupt:
            bar.print(f"interrupted: {finished} of {len(plan.seeds)} pictures are saved.")
            raise


def _save_previews(
    progress: "Progress", target: Callable[[int, int], Path], *, overwrite: bool
) -> None:
    from PIL import Image

    for offset, (seed, pixels) in enumerate(zip(progress.seeds, progress.preview(), strict=True)):
        final = target(seed, progress.first + offset)
        path = final.with_name(f"{final.stem}_step{progress.index + 1:03d}.png")
        save = partial(Image.fromarray(pixels).save, format="PNG")
        save_new(path, save, overwrite=overwrite)


def _record(
    pipeline: "StableDiffusion3",
    request: "Request",
    picture: "Picture",
    plan: Plan,
    fingerprint: str,
) -> "Record":
    from lydite.pipelines.metadata import Record

    assert request.width and request.height
    return Record(
        model=_lasting(plan.model),
        model_hash=fingerprint,
        components=_lasting(plan.settings.components),
        prompt=request.prompt,
        negative=request.negative,
        seed=picture.seed,
        steps=request.steps,
        guidance=request.guidance,
        guidance_steps=request.guidance_steps,
        guidance_rescale=request.guidance_rescale,
        guidance_interval=request.guidance_interval,
        options=dict(request.options),
        width=request.width,
        height=request.height,
        sampler=request.sampler,
        schedule=request.schedule,
        convention=request.convention,
        text_length=request.text_length,
        noise=request.noise,
        dtype=str(pipeline.dtype).removeprefix("mlx.core."),
        image=_lasting(plan.settings.image),
        image_hash=plan.image_hash,
        strength=request.strength if request.image is not None else None,
        mlx=version("mlx"),
    )


def _lasting(name: str | None) -> Any:
    """A path that is good from any folder; a hub id and the embedded model stay as they are."""
    if name is None or name == embedded.NAME or not Path(name).exists():
        return name
    return str(Path(name).expanduser().absolute())


def _note_truncation(pipeline: "StableDiffusion3", request: "Request", model: str) -> None:
    encoders = {"text_encoder", "text_encoder_3"} & set(pipeline.files.tokenizers)
    if model == embedded.NAME:
        encoders.discard("text_encoder_3")  # a stub whose output is zero, whatever it reads
    for encoder in sorted(encoders):
        tokenizer = pipeline.files.tokenizer(encoder, request.text_length)
        if lost := tokenizer.truncated(request.prompt):
            room = f"{encoder} reads {tokenizer.max_length} tokens"
            click.echo(f"note: {room}; it does not see: …{shown(lost.strip())}", err=True)
