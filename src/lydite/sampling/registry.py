"""What samplers and schedules are known by: a name, a source, proofs, options."""

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from lydite.core.errors import InputError
from lydite.sampling.noise_model import NoiseModel

MODELS = {"ve": "eps and v", "flow": "flow"}  # by noise model


@dataclass(frozen=True)
class Method:
    """A function under its name; its keyword-only parameters are the options."""

    name: str
    function: Callable[..., Any]
    about: str  # in one line
    source: str  # where it is from: the paper, or the program that made it known
    proofs: tuple[str, ...]  # "k-diffusion", "diffusers DDIMScheduler", "identity", "order", …
    noise_models: tuple[str, ...] = ("ve", "flow")

    kind = ""  # "sampler", "schedule"

    @property
    def options(self) -> dict[str, Any]:
        """Options with their defaults; `noise` is a source and not an option."""
        parameters = inspect.signature(self.function).parameters.values()
        named = (each for each in parameters if each.kind is each.KEYWORD_ONLY)
        return {each.name: each.default for each in named if each.name != "noise"}

    def check_noise_model(self, noise_model: NoiseModel) -> None:
        if noise_model.name not in self.noise_models:
            raise InputError(
                f"{self.kind} {self.name} is for {MODELS[self.noise_models[0]]} models, not for "
                f"{MODELS[noise_model.name]} ones. See `lydite sampler list`."
            )

    def check_options(self, options: Mapping[str, Any]) -> None:
        known = self.options
        for name in options:
            if name not in known:
                raise InputError(
                    f"{self.kind} {self.name} has no option {name!r:.60}; it has "
                    f"{', '.join(known) or 'none'}."
                )


M = TypeVar("M", bound=Method)


def find_method(methods: Mapping[str, M], name: str, kind: str) -> M:
    """The sampler or schedule called `name`; an unknown name is an error with a suggestion."""
    if name not in methods:
        raise InputError(
            f"there is no {kind} {name!r:.60}.{suggestion(name, methods)} "
            f"`lydite sampler list` names all {len(methods)}."
        )
    return methods[name]


# Names that A1111 shows and writes into its PNG files, where they are not ours.
A1111_SAMPLERS = {"dpm2": "dpm_2", "unipc": "uni_pc", "ddim_cfgpp": "ddim_cfg_pp"}
A1111_SCHEDULES = {"beta": "beta_sigmas", "kl_optimal": "kl_optimal_a1111", "uniform": "normal"}
SUFFIXES = A1111_SCHEDULES | {
    name: name for name in ("karras", "exponential", "polyexponential", "sgm_uniform", "simple")
}


def suggestion(name: str, known: Collection[str]) -> str:
    """A sentence that names what `name` may mean, with a space before it; or nothing."""
    plain = _plain(name)
    plain = A1111_SCHEDULES.get(plain, plain) if plain not in known else plain
    if plain in known:
        return f" Did you mean {plain}?"
    for suffix, schedule in SUFFIXES.items():
        sampler = plain.removesuffix(f"_{suffix}")
        if sampler != plain and sampler in known:
            return f" Did you mean --sampler {sampler} --schedule {schedule}?"
    near = difflib.get_close_matches(plain, known, 3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _plain(name: str) -> str:
    """`DPM++ 2S a Karras` as dpmpp_2s_ancestral_karras."""
    words = re.split(r"[\s_-]+", name.strip().lower().replace("++", "pp"))
    plain = "_".join("ancestral" if word == "a" else word for word in words)
    for shown, ours in A1111_SAMPLERS.items():
        plain = re.sub(rf"^{shown}(?=_|$)", ours, plain)
    return plain
