"""Options that decide a picture: guidance, the sampler with its numbers, its schedule and noise."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lydite.core.errors import InputError

if TYPE_CHECKING:
    from lydite.pipelines.request import Request

NOISES = ("torch", "mlx")  # whose generator a seed means
F = TypeVar("F", bound=Callable[..., Any])


def guidance_options(command: F) -> F:
    """How strongly the prompt counts, and at which steps."""
    options = (
        click.option("--guidance", metavar="N|N,N…",
                     help="Weight of the prompt: 7, or 3 with the embedded model; 1 or less turns "
                          "it off. Several, as 5,5,3,1, are one for each step."),
        click.option("--guidance-rescale", metavar="SHARE", type=float, default=0.0,
                     show_default=True,
                     help="Undo the contrast that guidance adds: 0 not at all, 0.7 as its authors "
                          "advise, 1 wholly."),
        click.option("--guidance-interval", metavar="A:B",
                     help="Guide only this part of the steps, e.g. 0.2:0.8; 0 is the first step, 1 "
                          "the end. Other steps ask the network once, not twice."),
    )  # fmt: skip
    return _applied(options, command)


def sampler_options(command: F) -> F:
    """The sampler with its numbers, its schedule, and where its noise comes from."""
    options = (
        click.option("--sampler", metavar="NAME", default="euler", show_default=True,
                     help="`lydite sampler list` has them all: heun, dpmpp_2m, dpmpp_2m_sde, "
                          "uni_pc, …"),
        click.option("--eta", type=float,
                     help="Share of fresh noise in each step: 0 adds none, 1 all. The sampler's "
                          "own by default; `lydite sampler show NAME` has it."),
        click.option("--option", "options", multiple=True, metavar="NAME=N",
                     help="Another number of the sampler, e.g. s_noise=0.9; repeatable."),
        click.option("--schedule", metavar="NAME", default="sd3_diffusers", show_default=True,
                     help="sd3_diffusers (as diffusers runs it), flow_shift (as in the paper), "
                          "karras, …"),
        click.option("--convention", metavar="NAME", default="lydite", show_default=True,
                     help="Whose choices where programs differ under one name: lydite, "
                          "k-diffusion, comfyui, a1111 or diffusers."),
        click.option("--noise", type=click.Choice(NOISES), default="torch", show_default=True,
                     help="torch: the same start as diffusers for a seed."),
        click.option("--text-length", type=int,
                     help="T5 tokens: 256, or 16 with the embedded model."),
    )  # fmt: skip
    return _applied(options, command)


def read_scales(text: str) -> tuple[float, ...]:
    """`7` or `7,7,5,3` as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--guidance is {text!r:.60}; expected a number, or one for each step as 5,5,3,1."
        ) from None


def read_interval(text: str | None) -> tuple[float, float]:
    """`0.2:0.8` as two shares of the steps; all of them by default."""
    if text is None:
        return 0.0, 1.0
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


def idle_options(request: "Request", typed: set[str]) -> Iterator[str]:
    """What was asked for and changes nothing, or more than is meant, in a sentence each."""
    from lydite.sampling.samplers import find_sampler

    if "strength" in typed and request.image is None:
        yield "--strength does nothing without --image."
    if not request.is_guided:
        if request.negative:
            yield f"--negative does nothing with --guidance {request.guidance:g}; above 1 it does."
        for name in ("guidance_rescale", "guidance_interval"):
            if name in typed:
                option = name.replace("_", "-")
                yield f"--{option} does nothing with --guidance {request.guidance:g}."
    if find_sampler(request.sampler).pair and request.guidance > 1:
        yield (
            f"{request.sampler} is made for a --guidance between 0 and 1, as 0.6; "
            f"{request.guidance:g} is very strong."
        )


def _applied(options: tuple[Callable[[F], F], ...], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command
