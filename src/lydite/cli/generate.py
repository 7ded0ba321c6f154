"""`lydite generate`: text, or text and an image, to pictures."""

import json
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lydite import embedded
from lydite.cli.picture_files import (
    check_template,
    picture_path,
    recorded_name,
    save_new,
    save_picture,
)
from lydite.cli.progress import StepBar
from lydite.cli.request_options import (
    bits_option,
    dtype_option,
    idle_options,
    image_notes,
    image_options,
    long_start,
    model_options,
    read_embedding_option,
    read_images,
    read_lora_option,
    read_request,
    read_seeds,
    request_options,
    typed_options,
    with_revision,
)
from lydite.core.errors import FileError, InputError, shown

if TYPE_CHECKING:
    from lydite.pipelines.family import Run
    from lydite.pipelines.observer import FinishedStep
    from lydite.pipelines.picture import Picture, Record
    from lydite.pipelines.pipeline import Pipeline

DEBUG = ("nan", "timing", "shapes")


@click.command("generate")
@click.argument("words", metavar="[PROMPT]", nargs=-1)
@model_options
@click.option("--refiner", metavar="FOLDER|FILE|HUB-ID",
              help="Stable Diffusion XL: a second model, which runs the last steps.")  # fmt: skip
@click.option("--refine-from", metavar="SHARE", type=float,
              help="With --refiner: the share of the denoising before it, 0.8 by default; "
                   "diffusers' denoising_end and denoising_start.")  # fmt: skip
@click.option("--lora", "loras", multiple=True, metavar="FILE[:WEIGHT]",
              help="Add a LoRA, with weight 1 by default; repeatable.")  # fmt: skip
@click.option("--embedding", "embeddings", multiple=True, metavar="FILE[:WORD]",
              help="Textual inversion (Stable Diffusion 1.x, 2.x, XL): take the vectors of a word "
                   "of the prompt from FILE; repeatable.")  # fmt: skip
@click.option("--weighting", type=click.Choice(("a1111", "compel")),
              help="Read weights in the prompts (Stable Diffusion 1.x, 2.x, XL): a1111 has "
                   "(word:1.2) ((word)) [word], compel has word++ (some words)1.2.")  # fmt: skip
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw each prompt of a txt, csv or jsonl file.")  # fmt: skip
@click.option("-s", "--seed", "seeds", multiple=True, metavar="N|A-B|N,N…",
              help="One or several; a random one by default.")  # fmt: skip
@request_options
@click.option("--batch", default=1, show_default=True,
              help="Pictures denoised together. With one seed S it draws S, S+1, …")  # fmt: skip
@dtype_option
@image_options
@click.option("-o", "--out", default="lydite_{seed}.png", show_default=True,
              help="File, folder or template with {seed} {index} {prompt} {model} {steps} "
                   "{guidance} {width} {height}; .png, .jpg or .webp.")  # fmt: skip
@click.option("--overwrite", is_flag=True,
              help="Replace existing files; otherwise a number is added to the name.")  # fmt: skip
@click.option("--preview", metavar="N", type=click.IntRange(min=1),
              help="Also write the denoised estimate every N steps.")  # fmt: skip
@click.option("--low-memory", is_flag=True, help="Load and free the networks one after the other.")
@bits_option
@click.option("--tile", metavar="PIXELS", type=int,
              help="Decode pictures larger than this in overlapping tiles: less memory, almost the "
                   "same picture.")  # fmt: skip
@click.option("--debug", metavar="MODES", help="Comma-separated: nan, timing, shapes, or all.")
@click.option("--from", "source", metavar="PICTURE",
              help="Replay a picture made here; other options override its settings.")  # fmt: skip
@click.option("--record-paths", is_flag=True,
              help="Write absolute paths of model and image into the picture.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, only errors.")
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...], **options: Any) -> None:
    """Draw PROMPT.

    Without --model the tiny model inside the package draws: shapes, colours, sizes, places and
    backgrounds, up to three objects. PROMPT `-` reads one prompt a line from standard input.

    \b
    lydite generate "a large red star above a small blue ring"
    lydite generate "a red fox in snow" -m sd3-folder/ --seed 7
    lydite generate "a red fox" -m sd3.safetensors --components sd3-folder/ -s 1-4 --batch 2
    lydite generate "in oil" -m sd3-folder/ --image photo.png --strength 0.7
    lydite generate "a red fox" -m sdxl-folder/ --lora style.safetensors:0.8
    lydite generate "a red fox" -m sdxl-folder/ --refiner sdxl-refiner-folder/ --refine-from 0.8
    lydite generate "a hat" -m sd-folder/ --image photo.png --mask mask.png --feather 8
    lydite generate "a red fox" -m sd3-folder/ --sampler dpmpp_2m --schedule beta_sigmas --steps 20
    lydite generate "a red star" --guidance 5 --guidance-rescale 0.7 --guidance-interval 0.2:0.8
    lydite generate "a red star" --steps 4 --guidance 5,5,3,1 --sampler ddim --eta 0.5
    lydite generate --from lydite_7.png                the same picture again, bit for bit
    lydite generate "a fox" -m sd3-folder/ --debug nan,timing

    The file remembers every setting (A1111 text and one JSON key). Ctrl-C keeps what is finished.
    """
    typed = typed_options(ctx)
    options["loras"] = [read_lora_option(text) for text in options["loras"]]
    options["embeddings"] = [read_embedding_option(text) for text in options["embeddings"]]
    record = _read_source(options, typed)
    request = read_request(options, record.request if record else None)
    prompts = _read_prompts(words, options["prompts"], request.prompt)
    seeds = _read_seeds(options, record)
    template = check_template(options["out"])
    if options["overwrite"]:
        _check_names(template, prompts, seeds)
    modes = read_modes(options["debug"])
    image, mask = read_images(options)
    _check_image("image", image, options, record)
    _check_image("mask", mask, options, record)

    from lydite.pipelines.memory import fit_in_memory

    pipeline = _open(options, typed, record)
    runs = [pipeline.plan(request.replace(prompt=prompt), image, mask) for prompt in prompts]
    for note in _notes(pipeline, runs, options, typed, record):
        click.echo(f"note: {note}", err=True)
    for note in fit_in_memory(pipeline, runs, options["batch"]):
        click.echo(f"note: {note}", err=True)
    _check_outputs(pipeline, runs, seeds, template, options)
    start = time.perf_counter()
    for each in (pipeline, pipeline.refiner):
        if each is not None:
            each.model.prepare()  # slow: everything that can be refused has been
    _draw(pipeline, runs, seeds, template, modes, options, time.perf_counter() - start)


def _open(options: dict[str, Any], typed: set[str], record: "Record | None") -> "Pipeline":
    from lydite.pipelines.model_files import locate
    from lydite.pipelines.pipeline import Pipeline

    name = with_revision(options["model"] or embedded.NAME, options["revision"])
    for option, given in (("model", name), ("refiner", options["refiner"])):
        if record and option in typed:
            locate(given)  # what is typed may be downloaded; what a picture names may not
    return Pipeline.open(
        name,
        components=options["components"],
        dtype=options["dtype"],
        low_memory=options["low_memory"],
        fetch=record is None,
        bits=int(options["bits"]) if options["bits"] else None,
        tile=options["tile"],
        loras=options["loras"],
        refiner=options["refiner"],
        embeddings=options["embeddings"],
    )


def _notes(
    pipeline: "Pipeline",
    runs: "Sequence[Run]",
    options: dict[str, Any],
    typed: set[str],
    record: "Record | None",
) -> Iterator[str]:
    """What to know before the work; InputError where the model is not the one of the picture."""
    from lydite.core.device import compiles_kernels_first, current_device

    model = pipeline.model
    yield from idle_options(runs[0], typed)
    yield from long_start(runs[0])
    yield from image_notes(options, runs[0])
    for run in runs:
        yield from pipeline.truncated(run)
    if model.dtype == "float16" and model.components["vae"].widens:
        yield "the VAE runs in float32: it exceeds the range of float16."
    if rounding := model.components[pipeline.family.network].rounding_of_inputs():
        yield rounding
    if record and not pipeline.made(record):
        if not typed & {"model", "refiner", "loras", "embeddings"}:
            raise InputError(
                f"{options['source']}: was made with another model than the one at "
                f"{shown(pipeline.name)}. Name the right one with --model."
            )
        yield "the model is not the one this picture was made with."
    if record and record.device not in ("", current_device().describe()):
        yield f"the picture was drawn on {shown(record.device)}; last bits may differ here."
    if compiles_kernels_first():
        yield "MLX compiles kernels while it draws the first picture here."


def _draw(
    pipeline: "Pipeline",
    runs: "Sequence[Run]",
    seeds: Sequence[int],
    template: str,
    modes: set[str],
    options: dict[str, Any],
    load_seconds: float,
) -> None:
    """Draw every run with every seed, and write each picture as it is finished."""
    from lydite.pipelines.observer import Debugger, Observers, StepReporter

    written: list[dict[str, Any]] = []
    total = len(runs) * len(seeds)
    batches = -(-len(seeds) // options["batch"])
    quiet = options["quiet"] or options["as_json"]
    with StepBar(batches * sum(run.all_steps for run in runs), quiet=quiet) as bar:
        debugger = Debugger(modes, bar.print, pipeline.family.network)
        try:
            for number, run in enumerate(runs):

                def on_step(step: "FinishedStep", run: "Run" = run, number: int = number) -> None:
                    bar.advance()
                    done = step.index + 1
                    if (
                        options["preview"]
                        and done % options["preview"] == 0
                        and done < run.all_steps
                    ):
                        first = number * len(seeds) + step.first
                        _save_previews(pipeline, run, step, first, template, options)

                observers = [StepReporter(on_step), *([debugger] if modes else [])]
                pictures = pipeline.generate(
                    run, seeds, batch=options["batch"], observer=Observers(*observers)
                )
                for picture in pictures:
                    with _later_interrupt():
                        path, record = _save(
                            pipeline, run, picture, len(written), template, options
                        )
                        written.append({"path": str(path), **json.loads(record.to_json())})
                        bar.saved(path, picture.seed)
        except KeyboardInterrupt:
            said = f"interrupted: {len(written)} of {total} pictures are saved."
            if options["as_json"] and not options["quiet"]:  # then the bar prints nothing
                click.echo(said, err=True)
                for picture in written:
                    click.echo(picture["path"], err=True)
            bar.print(said)
            raise
        for line in debugger.summary(load_seconds):
            bar.print(line)
    if options["as_json"]:
        click.echo(json.dumps({"pictures": written}, indent=1))


@contextmanager
def _later_interrupt() -> Iterator[None]:
    """Ctrl-C waits: a picture that is written is counted too."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked and callable(before):  # not where Ctrl-C is ignored
        before(signal.SIGINT, None)


def _save(
    pipeline: "Pipeline",
    run: "Run",
    picture: "Picture",
    index: int,
    template: str,
    options: dict[str, Any],
) -> "tuple[Path, Record]":
    from lydite.pipelines.picture import write_picture

    overwrite = options["overwrite"]
    name = partial(recorded_name, absolute=options["record_paths"])
    record = msgspec.structs.replace(
        picture.record,
        model=name(pipeline.name),
        components=name(options["components"]),
        refiner=name(options["refiner"]),
        loras=tuple((name(file), weight) for file, weight in options["loras"]),
        embeddings=tuple((name(file), word) for file, word in picture.record.embeddings),
        image=name(options["image"]),
        mask=name(options["mask"]),
    )
    target = picture_path(
        template, run.request, seed=picture.seed, index=index, model=pipeline.name
    )
    path = save_picture(
        target,
        lambda free: write_picture(free, picture.pixels, record, overwrite=overwrite),
        overwrite=overwrite,
    )
    return path, record


def _save_previews(
    pipeline: "Pipeline",
    run: "Run",
    step: "FinishedStep",
    first: int,
    template: str,
    options: dict[str, Any],
) -> None:
    from lydite.pipelines.picture import save_pixels

    for offset, (seed, pixels) in enumerate(
        zip(step.seeds, pipeline.decode(step.denoised), strict=True)
    ):
        index, model = first + offset, pipeline.name
        final = picture_path(template, run.request, seed=seed, index=index, model=model)
        path = final.with_name(f"{final.stem}_step{step.index + 1:03d}{final.suffix}")
        overwrite = options["overwrite"]
        save_new(path, partial(save_pixels, pixels=pixels, replace=overwrite), overwrite=overwrite)


def _read_source(options: dict[str, Any], typed: set[str]) -> "Record | None":
    """With --from, what the picture remembers; options that were not typed take its values."""
    if not options["source"]:
        return None
    from lydite.pipelines.model_files import locate
    from lydite.pipelines.picture import read_record

    record = read_record(Path(options["source"]))
    for name in ("model", "components", "refiner", "image", "mask", "dtype", "bits", "tile"):
        if name not in typed:
            options[name] = getattr(record, name)
    for name, what in (("loras", "lora"), ("embeddings", "embedding")):
        if name in typed:
            continue
        options[name] = list(getattr(record, name))
        for file, _ in options[name]:
            if not Path(file).is_file():
                raise InputError(
                    f"{options['source']}: was made with the {what} {shown(file)}, which is not "
                    f"found under that name here. Name it with --{what}."
                )
    # a picture may name anything: nothing is fetched
    for name in ("model", "components", "refiner", "image", "mask"):
        value = options[name]
        if name in typed or value in (None, embedded.NAME):
            continue
        try:
            if name not in ("image", "mask"):
                locate(value, fetch=False)
            elif not Path(value).exists():
                raise FileNotFoundError
        except (FileError, OSError, ValueError):
            raise InputError(
                f"{options['source']}: was made with the {name} {shown(value)}, which is not found "
                f"under that name here. Name it with --{name}."
            ) from None
    return record


def _read_prompts(words: tuple[str, ...], file: Path | None, remembered: str) -> list[str]:
    if len(words) > 1:
        raise InputError(
            f"the prompt is {len(words)} words; put it in quotes: "
            f"lydite generate {shown(' '.join(words))}."
        )
    if file is not None:
        if words:
            raise InputError("a PROMPT and --prompts together; give one of them.")
        from lydite.calibrate.prompts import read_prompts

        return list(read_prompts(file).texts)
    if words == ("-",):
        return _prompts_on_stdin()
    if not words and not remembered:
        raise InputError('no prompt. Example: lydite generate "a red star".')
    return [words[0] if words else remembered]


def _prompts_on_stdin() -> list[str]:
    from lydite.calibrate.prompts import MAX_BYTES, read_lines

    data = sys.stdin.buffer.read(MAX_BYTES + 1) if sys.stdin else b""  # None: it was closed
    if len(data) > MAX_BYTES:
        raise InputError(f"standard input: more than {MAX_BYTES} bytes of prompts.")
    if not (prompts := read_lines(data, "standard input")):
        raise InputError("no prompt on standard input.")
    return prompts


def _check_names(template: str, prompts: Sequence[str], seeds: Sequence[int]) -> None:
    """Refuse to write two pictures of one run to the same file."""
    fields = set(re.findall(r"\{(\w+)", template))
    for values, names in ((seeds, ("seed", "index")), (prompts, ("prompt", "index"))):
        if len(values) > 1 and not fields & set(names):
            raise InputError(
                f"--out {template}: {len(values)} {names[0]}s and one name; "
                f"add {{{names[0]}}} or {{index}} to it."
            )


def _check_outputs(
    pipeline: "Pipeline",
    runs: "Sequence[Run]",
    seeds: Sequence[int],
    template: str,
    options: dict[str, Any],
) -> None:
    """Refuse before the work what cannot be written, or would replace an input."""
    from lydite.core.files import try_folder
    from lydite.core.outputs import check_output

    inputs = [Path(name) for name in (options["image"], options["mask"], options["source"]) if name]
    each = enumerate(product(runs, seeds)) if options["overwrite"] else ((0, (runs[0], seeds[0])),)
    for index, (run, seed) in each:
        path = picture_path(template, run.request, seed=seed, index=index, model=pipeline.name)
        if options["overwrite"]:
            check_output(path, overwrite=True, inputs=inputs)
        else:
            try_folder(path.parent)


def _read_seeds(options: dict[str, Any], record: "Record | None") -> tuple[int, ...]:
    texts = options["seeds"]
    if not texts:
        texts = (str(record.seed if record else secrets.randbelow(2**32)),)
    return read_seeds(texts, options["batch"])


def _check_image(name: str, pixels: Any, options: dict[str, Any], record: "Record | None") -> None:
    """With --from: the file is what the picture was made from, unless another one was typed."""
    if record is None or pixels is None:
        return
    from lydite.pipelines.picture import pixel_hash

    known = getattr(record, f"{name}_hash")
    if getattr(record, name) == options[name] and known not in (None, pixel_hash(pixels)):
        raise InputError(
            f"{options[name]}: not the {name} this picture was made from; "
            f"name the right one with --{name}."
        )


def read_modes(text: str | None) -> set[str]:
    """The modes of --debug."""
    modes = {mode.strip() for mode in text.split(",")} if text else set[str]()
    if unknown := modes - {*DEBUG, "all"}:
        raise InputError(
            f"--debug has {', '.join(sorted(unknown))}; expected {', '.join(DEBUG)} or all."
        )
    return set(DEBUG) if "all" in modes else modes
