"""What the verbs of `lydite sampler` share: models, options as NAME=VALUE, a fixed start."""

import json
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from lydite.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lydite.sampling.registry import Method

MODEL_HELP = (
    "sd15, sdxl, sd3, flux, flow, edm, cosmos, or a folder with scheduler/scheduler_config.json."
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--model, --steps and --option."""
    for option in reversed((
        click.option("-m", "--model", default=None, metavar="NAME|FOLDER",
                     help=f"Whose noise levels: {MODEL_HELP}"),
        click.option("-n", "--steps", type=click.IntRange(1, 1000), default=None,
                     help="Number of steps."),
        click.option("-o", "--option", "options", multiple=True, metavar="NAME=VALUE",
                     help="An option of the sampler or schedule; repeatable."),
    )):  # fmt: skip
        command = option(command)
    return command


def read_options(pairs: Iterable[str]) -> dict[str, Any]:
    """NAME=VALUE as a dictionary; a value is a number, true, false, null, or a word."""
    result: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--option is {pair!r:.60}; expected NAME=VALUE, as in eta=0.5.")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if not isinstance(value, bool | int | float | str | None):
            raise InputError(f"--option {name}: {text:.60} is no number and no word.")
        result[name] = value
    return result


def kind_of(name: str) -> str:
    """Whether a name is a sampler's or a schedule's."""
    from lydite.sampling.registry import SAMPLERS, SCHEDULES, suggestion

    if name in SAMPLERS:
        return "sampler"
    if name in SCHEDULES:
        return "schedule"
    hint = suggestion(name, [*SAMPLERS, *SCHEDULES])
    raise InputError(
        f"there is no sampler and no schedule {name!r:.60}.{hint} See `lydite sampler list`."
    )


def model_for(noise_models: tuple[str, ...], model: str | None) -> str:
    """The model that was named, or one that the name is for."""
    return model or ("sd15" if "ve" in noise_models else "sd3")


def shared_noise_models(methods: "Sequence[Method]") -> tuple[str, ...]:
    """The noise models that all of them are for."""
    return tuple(
        name
        for name in methods[0].noise_models
        if all(name in each.noise_models for each in methods)
    )


def start(sigma: float) -> "NDArray[Any]":
    """Four values that every run here starts from."""
    import numpy as np

    return np.array([1.4, 0.35, -0.6, -1.1]) * sigma


def finite(value: Any) -> Any:
    """JSON has no infinity: null stands for an error without measure."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
