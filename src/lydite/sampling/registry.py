"""Samplers and schedules by name: what is known of each, and the module that holds it.

A module of `samplers` or `schedules` lists its own as METHODS, and is imported when one is used.
"""

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar

from lydite.core.errors import InputError
from lydite.sampling.sampler_types import Denoise, Noise, NoiseModel, Step
from lydite.sampling.schedules.schedule import (
    MOST_STEPS,
    Final,
    ModelSigmas,
    Schedule,
    check_count,
    finish_schedule,
)

MODELS = {"ve": "eps and v", "flow": "flow"}  # by noise model
NoiseKind = Literal["none", "stream", "path"]  # "path": a Brownian one


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


@dataclass(frozen=True)
class Sampler(Method):
    """A sampler; its function is a generator of steps over (denoise, x, sigmas)."""

    order: float | None = None  # of convergence, where it solves an ODE
    calls: int = 1  # of the network in a step
    noise: NoiseKind = "none"  # what it adds as it stands
    noise_with_eta: bool = False  # adds none as it stands, but a stream's where `eta` is above 0
    pair: bool = False  # needs the unconditional prediction beside the guided one
    note: str = ""  # what its users should know

    kind = "sampler"

    def run(
        self,
        denoise: Denoise[Any],
        x: Any,
        sigmas: Sequence[float],
        *,
        noise: Noise[Any] | None = None,
        **options: Any,
    ) -> Iterator[Step[Any]]:
        """The steps; `noise` is left out for a sampler that adds none."""
        self.check_noise_model(denoise.noise_model)
        self.check_options(options)
        levels = self._levels(sigmas)
        if self.noise_for(options) != "none":
            if noise is None:
                raise InputError(f"sampler {self.name} adds noise; pass a source of it.")
            options["noise"] = noise
        return self.function(denoise, x, levels, **options)

    def noise_for(self, options: Mapping[str, Any]) -> NoiseKind:
        """What it adds with these options."""
        return "stream" if self.noise_with_eta and options.get("eta") else self.noise

    def _levels(self, sigmas: Sequence[float]) -> list[float]:
        """The sigmas as they can be walked.

        The last may repeat the one before it, as in some of diffusers' schedules. Elsewhere such a
        step is refused: a method that looks back would divide by its width.
        """
        levels = [float(sigma) for sigma in sigmas]
        if len(levels) < 2:
            raise InputError(f"sampler {self.name}: {len(levels)} sigmas; a step needs two.")
        for index, sigma in enumerate(levels):
            if not 0 <= sigma < math.inf:
                raise InputError(
                    f"sampler {self.name}: sigma {index} is {sigma}; expected a finite number, 0 "
                    "or more."
                )
        for index, (sigma, sigma_next) in enumerate(pairwise(levels)):
            if sigma == sigma_next and (index < len(levels) - 2 or index == 0 or sigma == 0):
                raise InputError(
                    f"sampler {self.name}: sigmas {index} and {index + 1} are both {sigma}; a step "
                    "must go somewhere. Drop one of the two."
                )
        return levels


@dataclass(frozen=True)
class ScheduleKind(Method):
    """A schedule; its function gives the sigmas for (model, steps, options)."""

    count: str = "n"  # how many steps come of n
    needs: tuple[str, ...] = ()  # options without a default

    kind = "schedule"

    def make(
        self, steps: int, model: ModelSigmas, *, final: Final = "zero", **options: Any
    ) -> Schedule:
        """The schedule in `steps` steps for one model."""
        check_count("steps", steps, MOST_STEPS)
        self.check_noise_model(model.noise_model)
        self.check_options(options)
        for name in self.needs:
            if name not in options:
                raise InputError(f"schedule {self.name} needs the option {name!r}.")
        return finish_schedule(self.name, self.function(model, steps, **options), model, final)


M = TypeVar("M", bound=Method)


class Methods(Mapping[str, M], Generic[M]):
    """Samplers or schedules by name; the module of one is imported when it is looked up."""

    def __init__(self, package: str, kind: str, modules: Mapping[str, tuple[str, ...]]) -> None:
        self._package, self._kind = package, kind
        self._module_of = {name: module for module, names in modules.items() for name in names}

    def __getitem__(self, name: str) -> M:
        module = import_module(f"lydite.sampling.{self._package}.{self._module_of[name]}")
        return next(method for method in module.METHODS if method.name == name)

    def __contains__(self, name: object) -> bool:
        return name in self._module_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._module_of)

    def __len__(self) -> int:
        return len(self._module_of)

    def find(self, name: str) -> M:
        """The one called `name`; an unknown name is an error with a suggestion."""
        if name not in self:
            raise InputError(
                f"there is no {self._kind} {name!r:.60}.{suggestion(name, self)} "
                f"`lydite sampler list` names all {len(self)}."
            )
        return self[name]


SAMPLERS: Methods[Sampler] = Methods(
    "samplers",
    "sampler",
    {
        "euler": ("euler", "euler_ancestral"),
        "heun": ("heun", "dpm_2", "heunpp2"),
        "ancestral": ("dpm_2_ancestral", "dpmpp_2s_ancestral"),
        "lms": ("lms",),
        "dpm_fast": ("dpm_fast", "dpm_adaptive"),
        "dpmpp": ("dpmpp_2m", "dpmpp_sde", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde"),
        "ddim": ("ddim", "ddim_inverse", "ddpm"),
        "pndm": ("plms", "pndm", "ipndm", "ipndm_v"),
        "dpm_solver": (
            "dpmsolver_2m",
            "dpmsolver_3m",
            "dpmsolverpp_3m",
            "dpmsolver_2s",
            "dpmsolver_3s",
            "dpmsolverpp_2s",
            "dpmsolverpp_3s",
            "sde_dpmsolver_1m",
            "sde_dpmsolver_2m",
        ),
        "deis": ("deis", "deis_tab"),
        "unipc": ("uni_pc", "uni_pc_bh2"),
        "sa_solver": ("sa_solver", "sa_solver_pece"),
        "consistency": ("lcm", "tcd"),
        "restart": ("restart",),
        "res": (
            "res_multistep",
            "res_multistep_ancestral",
            "res_multistep_cfg_pp",
            "res_multistep_ancestral_cfg_pp",
        ),
        "gradient_estimation": ("gradient_estimation", "gradient_estimation_cfg_pp"),
        "er_sde": ("er_sde",),
        "seeds_solver": ("seeds_2", "seeds_3", "exp_heun_2_x0", "exp_heun_2_x0_sde"),
        "cfg_pp": (
            "euler_cfg_pp",
            "ddim_cfg_pp",
            "euler_ancestral_cfg_pp",
            "dpmpp_2s_ancestral_cfg_pp",
            "dpmpp_2m_cfg_pp",
        ),
    },
)
SCHEDULES: Methods[ScheduleKind] = Methods(
    "schedules",
    "schedule",
    {
        "spaced": (
            "normal",
            "sgm_uniform",
            "simple",
            "ddim_uniform",
            "linspace",
            "linspace_dpm",
            "leading",
            "leading_dpm",
            "trailing",
            "lcm_timesteps",
            "beta_timesteps",
        ),
        "curves": (
            "karras",
            "exponential",
            "polyexponential",
            "beta_sigmas",
            "kl_optimal",
            "kl_optimal_a1111",
            "linear_quadratic",
            "vp",
            "laplace",
            "custom",
        ),
        "align_your_steps": ("align_your_steps",),
        "flow": ("flow_shift", "sd3_diffusers", "flux", "flow_match"),
    },
)


def find_sampler(name: str) -> Sampler:
    """The sampler called `name`."""
    return SAMPLERS.find(name)


def find_schedule(name: str) -> ScheduleKind:
    """The schedule called `name`."""
    return SCHEDULES.find(name)


def make_schedule(
    name: str, steps: int, model: ModelSigmas, *, final: Final = "zero", **options: Any
) -> Schedule:
    """The schedule called `name` in `steps` steps for one model, float64."""
    return find_schedule(name).make(steps, model, final=final, **options)


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
