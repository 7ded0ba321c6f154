"""The options that decide a picture, shared by generate, trace, parity and calibrate run."""

import re
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lydite.cli.complete import complete_convention, complete_sampler, complete_schedule
from lydite.core.device import DEVICES, request_device
from lydite.core.errors import InputError, shown
from lydite.core.request import Request
from lydite.weights.quantized_format import BITS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lydite.pipelines.family import Run
    from lydite.pipelines.picture import Pixels

DTYPES = ("auto", "float32", "bfloat16", "float16")
NOISES = ("torch", "mlx")  # whose generator a seed means
MOST_SEEDS = 10_000
MOST_AT_ONCE = 1024
LONG_START = 0.12  # in sigma: after a longer first step flow models draw a grey background
MORE_THAN_EVEN = 1.4  # times an even step
FEW_STEPS = 25  # UniPC needs as many where the step before the last is long
F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[F], F]


def apply_options(options: tuple[Option[Any], ...], command: F) -> F:
    """Decorate a command with options, which `--help` lists in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def _take_device(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    request_device(value)


device_option = click.option(
    "--device",
    type=click.Choice(DEVICES),
    expose_value=False,
    callback=_take_device,
    help="Where MLX computes; by default LYDITE_DEVICE, or what MLX takes by itself.",
)


def model_options(command: F) -> F:
    """Which model, and where it runs."""
    options = (
        click.option("-m", "--model", metavar="FOLDER|FILE|HUB-ID",
                     help="diffusers folder, single file or hub id; default: the embedded model."),
        components_option,
        revision_option,
        device_option,
    )  # fmt: skip
    return apply_options(options, command)


revision_option = click.option(
    "--revision",
    metavar="REVISION",
    help="Branch, tag or commit of a hub id; the same as owner/name@REVISION.",
)


def with_revision(model: str, revision: str | None) -> str:
    """The name of a model with its revision: owner/name@revision."""
    if revision is None:
        return model
    if "@" in model or model.count("/") != 1 or Path(model).exists():
        raise InputError(f"--revision {revision}: {model} is not a hub id such as owner/name.")
    return f"{model}@{revision}"


components_option = click.option(
    "--components",
    metavar="FOLDER",
    help="Take what MODEL lacks (text encoders, tokenizers, VAE) from here. MODEL may be one "
    "component, which replaces the one here.",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="Precision of the networks; auto: float32 on a CPU, bfloat16 elsewhere.",
)


def image_options(command: F) -> F:
    """The picture that a run starts from."""
    options = (
        click.option("-i", "--image", metavar="FILE",
                     help="img2img: start from this picture. FLUX.2: show it to the network."),
        click.option("--strength", type=float,
                     help="img2img: share of the steps to run; 1 ignores the picture. By default "
                          "the model's own: 0.3 to 0.8, and about 1 with --mask."),
        click.option("--mask", metavar="FILE",
                     help="Inpainting: draw --image anew where this picture is white."),
        click.option("--feather", metavar="PIXELS", type=click.IntRange(0, 1024),
                     help="Inpainting: soften the mask's edge by this much, and leave every pixel "
                          "outside of it as it was."),
    )  # fmt: skip
    return apply_options(options, command)


def image_notes(options: Mapping[str, Any], run: "Run") -> Iterator[str]:
    """What is changed of --image before it is used, in a sentence each."""
    from lydite.pipelines.picture import describe_file

    if not options.get("image") or run.image is None:
        return
    size, transparent = describe_file(Path(options["image"]))
    height, width = run.image.shape[:2]
    if size != (width, height):
        yield f"--image is {size[0]}×{size[1]}; it is resized to {width}×{height}."
    if transparent:
        yield "--image has transparent pixels; their transparency is dropped."


def read_images(
    options: Mapping[str, Any],
) -> "tuple[Pixels | None, NDArray[np.uint8] | None]":
    """The pictures of --image and --mask."""
    from lydite.pipelines.inpainting import read_mask
    from lydite.pipelines.picture import read_pixels

    image = read_pixels(Path(options["image"])) if options.get("image") else None
    return image, read_mask(Path(options["mask"])) if options.get("mask") else None


def request_options(command: F) -> F:
    """Everything but prompt and seed; what is not given is as the checkpoint has it."""
    options = (
        click.option("-n", "--negative", help="What the picture should not show."),
        click.option("--steps", type=click.IntRange(1, 10_000),
                     help="Denoising steps; by default the model's own number."),
        click.option("--guidance", metavar="N|N,N…",
                     help="Weight of the prompt; 1 or less turns guidance off. Several numbers, as "
                          "5,5,3,1, are one for each step."),
        click.option("--true-guidance", metavar="N", type=float,
                     help="FLUX.1 with --negative: weight of the prompt against it. --guidance is "
                          "an input of that model."),
        click.option("--guidance-rescale", metavar="SHARE", type=float,
                     help="Undo the contrast that guidance adds: 0 = off, 0.7 = recommended, "
                          "1 = full."),
        click.option("--guidance-interval", metavar="A:B",
                     help="Guide only this part of the steps, e.g. 0.2:0.8; 0 is the first step, 1 "
                          "the end. Other steps evaluate the network once, not twice."),
        click.option("--size", metavar="WxH",
                     help="Pixels, e.g. 1024x768, or 1024 for a square; by default the model's own "
                          "size, or that of --image."),
        click.option("--width", type=click.IntRange(1, 999_999), help="Pixels; or use --size."),
        click.option("--height", type=click.IntRange(1, 999_999), help="Pixels; or use --size."),
        click.option("--sampler", metavar="NAME", shell_complete=complete_sampler,
                     help="By default the checkpoint's own. `lydite sampler list` names them: "
                          "euler, heun, dpmpp_2m, dpmpp_2m_sde, uni_pc, …"),
        click.option("--eta", type=float,
                     help="Share of fresh noise in each step: 0 adds none, 1 all. The sampler's "
                          "own by default; `lydite sampler show NAME` has it."),
        click.option("--option", "options", multiple=True, metavar="NAME=N",
                     help="Another number of the sampler, e.g. s_noise=0.9; repeatable."),
        click.option("--schedule", metavar="NAME", shell_complete=complete_schedule,
                     help="By default the checkpoint's own; beta_sigmas, simple, …, and karras for "
                          "Stable Diffusion 1.x, 2.x, XL."),
        click.option("--convention", metavar="NAME", shell_complete=complete_convention,
                     help="Whose choices where programs differ under one name: lydite (default), "
                          "k-diffusion, comfyui, a1111 or diffusers."),
        click.option("--noise", type=click.Choice(NOISES),
                     help="Whose random generator a seed means; torch (default): as in diffusers."),
        click.option("--clip-skip", metavar="N", type=click.IntRange(1, 100),
                     help="Stable Diffusion 1.x, 2.x, XL: leave out the last N layers of CLIP for "
                          "the prompt, as diffusers does. A1111's clip skip is one more."),
        click.option("--text-length", type=int,
                     help="Number of tokens of a text encoder that takes any number, as T5."),
    )  # fmt: skip
    return apply_options(options, command)


_AS_GIVEN = (
    "negative",
    "steps",
    "true_guidance",
    "guidance_rescale",
    "schedule",
    "convention",
    "noise",
    "text_length",
    "strength",
    "feather",
    "clip_skip",
    "weighting",
    "refine_from",
)


def read_request(options: Mapping[str, Any], base: Request | None = None) -> Request:
    """The request that options ask for; what they leave out is as in `base`."""
    base = base or Request()
    changes: dict[str, Any] = {
        name: options[name] for name in _AS_GIVEN if options.get(name) is not None
    }
    if options.get("guidance") is not None:
        scales = read_scales(options["guidance"])
        changes |= {"guidance": max(scales), "guidance_steps": scales if len(scales) > 1 else ()}
    if options.get("guidance_interval") is not None:
        changes["guidance_interval"] = read_interval(options["guidance_interval"])
    changes |= _read_sides(options)
    numbers = dict(base.options)
    if options.get("sampler") is not None:
        changes["sampler"], numbers = options["sampler"], {}  # another sampler's numbers are void
    numbers |= read_numbers(options.get("options", ()), options.get("eta"))
    return base.replace(**changes, options=numbers)


def _read_sides(options: Mapping[str, Any]) -> dict[str, int]:
    sides = {name: options.get(name) for name in ("width", "height")}
    given = {name: side for name, side in sides.items() if side is not None}
    if options.get("size") is None:
        return given
    if given:
        raise InputError(f"--size and --{min(given)} together; give one of them.")
    text = options["size"]
    found = re.fullmatch(r"([1-9]\d{0,5})(?:[xX×]([1-9]\d{0,5}))?", text)
    if not found:
        raise InputError(
            f"--size is {text!r}; expected WIDTHxHEIGHT in pixels, e.g. 1024x768, or one number "
            "for a square."
        )
    return {"width": int(found[1]), "height": int(found[2] or found[1])}


def read_scales(text: str) -> tuple[float, ...]:
    """`7` or `7,7,5,3` as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--guidance is {text!r:.60}; expected a number, or one for each step as 5,5,3,1."
        ) from None


def read_interval(text: str) -> tuple[float, float]:
    """`0.2:0.8` as two shares of the steps."""
    first, _, last = text.partition(":")
    try:
        return float(first), float(last)
    except ValueError:
        raise InputError(
            f"--guidance-interval is {text!r:.60}; expected two shares of the steps, as 0.2:0.8."
        ) from None


def read_numbers(pairs: tuple[str, ...], eta: float | None) -> dict[str, float]:
    """NAME=N as a dictionary, a later one over an earlier one, and --eta over all."""
    result: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            result[name.strip()] = float(text)
        except ValueError:
            raise InputError(
                f"--option is {pair!r:.60}; expected NAME=N, as s_noise=0.9."
            ) from None
    return result if eta is None else {**result, "eta": eta}


def read_seeds(texts: tuple[str, ...], batch: int = 1) -> tuple[int, ...]:
    """`1`, `1-4`, `1,5,9` as numbers; one seed is the first of as many as the batch holds."""
    if not 1 <= batch <= MOST_AT_ONCE:
        raise InputError(f"--batch is {batch}; expected 1 to {MOST_AT_ONCE}.")
    seeds: list[int] = []
    for part in ",".join(texts).split(","):
        found = re.fullmatch(r"\s*(-?\d{1,20})(?:-(\d{1,20}))?\s*", part)
        if not found:
            raise InputError(f"--seed is {part!r}; expected a number, a range 1-4, or 1,5,9.")
        first = int(found[1])
        last = int(found[2]) if found[2] else first
        if not first <= last < first + MOST_SEEDS:
            raise InputError(f"--seed {part}: expected a rising range of at most {MOST_SEEDS:,}.")
        seeds.extend(range(first, last + 1))
    if len(seeds) == 1:
        seeds = list(range(seeds[0], seeds[0] + batch))
    if outside := [seed for seed in seeds if not -(2**63) <= seed < 2**64]:
        raise InputError(f"--seed {outside[0]}: expected a number from -2^63 to 2^64 - 1.")
    return tuple(seeds)


def read_lora_option(text: str) -> tuple[str, float]:
    """`FILE` or `FILE:WEIGHT`."""
    name, colon, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        return text, 1.0
    if not colon or Path(text).exists():
        return text, 1.0
    if not isfinite(weight):
        raise InputError(f"--lora {shown(text)}: the weight is {number}; expected a number.")
    return name, weight


def read_embedding_option(text: str) -> tuple[str, str | None]:
    """`FILE` or `FILE:WORD`."""
    name, colon, word = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, None
    return name, word


bits_option = click.option(
    "--bits",
    type=click.Choice([str(bits) for bits in BITS]),
    help="Round the weights of transformers and large text encoders to the nearest value while "
    "reading them. A calibrated export is better.",
)
overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace output files that exist; never an input."
)


def typed_options(ctx: click.Context) -> set[str]:
    """Names of the parameters that the user gave."""
    default = click.core.ParameterSource.DEFAULT
    return {name for name in ctx.params if ctx.get_parameter_source(name) is not default}


def typed_arguments(ctx: click.Context, without: tuple[str, ...]) -> list[str]:
    """The arguments the user gave, except some."""
    words: list[str] = []
    typed = typed_options(ctx)
    for parameter in ctx.command.params:
        name, value = parameter.name or "", ctx.params.get(parameter.name or "")
        if name in without or name not in typed:
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        else:
            for item in value if isinstance(value, tuple) else (value,):
                parts = () if item is True else item if isinstance(item, tuple) else (item,)
                words += [parameter.opts[-1], *map(str, parts)]
    return words


def idle_options(run: "Run", typed: set[str]) -> Iterator[str]:
    """Options that change nothing, or more than is meant, in a sentence each."""
    request = run.request
    guidance = request.guidance or 0.0
    if "strength" in typed and run.image is None:
        yield "--strength does nothing without --image."
    if "feather" in typed and run.mask is None:
        yield "--feather does nothing without --mask."
    if "true_guidance" in typed and run.guidance != "distilled":
        yield "--true-guidance does nothing with this model; --guidance is its scale."
    if not run.is_guided:
        off = f"with --guidance {guidance:g}"
        if run.guidance == "distilled":
            off = f"with --true-guidance {request.true_guidance or 1.0:g}"
        if request.negative:
            least = 0 if run.guidance == "above_0" else 1
            yield f"--negative does nothing {off}; above {least} it does."
        elif run.guidance == "negative" and guidance > 1:
            off = "without --negative"
            yield f"--guidance {guidance:g} does nothing {off}; --negative ' ' turns it on."
        elif run.guidance == "distilled":
            off = "without --negative"
        for name in ("guidance_rescale", "guidance_interval", "true_guidance"):
            if name in typed and (name != "true_guidance" or run.guidance == "distilled"):
                yield f"--{name.replace('_', '-')} does nothing {off}."
    long_step = run.steps < FEW_STEPS and run.schedule.name in ("sd3_diffusers", "flow_shift")
    if run.sampler.name.startswith("uni_pc") and long_step:
        yield f"{run.sampler.name}: {run.sampler.note}."
    if run.sampler.pair and run.guidance != "distilled" and guidance > 1:
        yield (
            f"{run.sampler.name} is made for a --guidance between 0 and 1, as 0.6; "
            f"{guidance:g} is very strong."
        )


def long_start(run: "Run") -> Iterator[str]:
    """Where the first step of a flow model leaves too little of the noise, in a sentence.

    The first steps decide the layout and the background. Schedules for noise that is added (`ve`),
    as karras, pass over the high sigmas of flow models, unless there are many steps.
    """
    from lydite.sampling.registry import SCHEDULES

    for_flow = "ve" not in SCHEDULES[run.schedule.name].noise_models
    if for_flow or run.prediction.noise_model.name != "flow":
        return
    first, second = (float(sigma) for sigma in run.schedule.sigmas[:2])
    if first > 0.9 and first - second > max(LONG_START, MORE_THAN_EVEN / run.steps):  # not img2img
        yield (
            f"{run.schedule.name} takes its first step from sigma {first:.2f} to {second:.2f}: "
            "flow models then often draw a grey background. Try more --steps, or --schedule "
            "beta_sigmas."
        )
