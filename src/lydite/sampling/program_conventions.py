"""The choices on which programs differ under one name, and what each program chooses.

k-diffusion 0.1.1 and diffusers 0.42.1; ComfyUI (acbf08c) and A1111 (82a973c) by their behaviour.
Every preset can be changed in one place with `dataclasses.replace`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from lydite.core.errors import InputError
from lydite.sampling.noise import STREAMS, StreamRule
from lydite.sampling.registry import NoiseKind, Sampler, find_schedule, suggestion
from lydite.sampling.schedules.flow import FlowSigmas, shift_sigmas
from lydite.sampling.schedules.schedule import (
    MOST_STEPS,
    Final,
    ModelSigmas,
    Rule,
    Schedule,
    check_count,
    from_step,
    read_only_schedule,
)
from lydite.sampling.schedules.table import NoiseTable

# These ask for the half log-SNR, which is −∞ at σ = 1 of a flow model.
SNR_SAMPLERS = frozenset(
    {"dpmpp_sde", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde", "er_sde", "seeds_2"}
    | {"seeds_3", "exp_heun_2_x0", "exp_heun_2_x0_sde", "sa_solver", "sa_solver_pece"}
)

Meaning = Literal["diffusers", "diffusers_sd3", "comfyui", "a1111"]

# What img2img strength means: (n, strength) → (steps made, steps run: the last ones).
MEANINGS: dict[str, Callable[[int, float], tuple[int, int]]] = {
    # Its share of the steps, rounded down; SD3 rounds down what is left out instead.
    "diffusers": lambda n, s: (n, int(n * s)),
    "diffusers_sd3": lambda n, s: (n, n - int(n - n * s)),
    # All n steps, out of a longer schedule.
    "comfyui": lambda n, s: (n, n) if s > 0.9999 else (int(n / s), n),
    # Its share and one; its option "exactly the amount of steps" is as ComfyUI.
    "a1111": lambda n, s: (n, int(min(s, 0.999) * n) + 1),
}


@dataclass(frozen=True)
class Convention:
    """One program's choices; the defaults are our own."""

    name: str
    timesteps: Rule = "interpolate"  # of a sigma between two levels of a table
    flow_timesteps: Rule = "interpolate"  # of a flow sigma
    final: Final = "zero"
    # Samplers for which one step more is made, and the sigma before the last dropped.
    discard_penultimate: frozenset[str] = frozenset()
    # Methods of higher order take a last step of the first: where it ends at 0, or also wherever
    # there are fewer than 15 steps.
    last_step: Literal["first_order_at_zero", "first_order_below_15"] = "first_order_at_zero"
    stream: StreamRule = STREAMS["lydite"]  # of ancestral samplers, and of the first noise
    brownian: bool = True  # SDE samplers draw from a Brownian path, our own in every preset
    # The share of the way from 1 at which a flow run starts for samplers that ask for its log-SNR.
    flow_start: float | None = None
    strength: Meaning | None = None  # None: as diffusers' pipeline of the model's family has it
    unit_variance: Literal["never", "at_sigma_max", "leading"] = "never"  # √(1 + σ²) in place of σ
    # Schedules that have another name here, or options that are others than ours.
    names: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    automatic: Mapping[str, str] = field(default_factory=dict)  # schedule by sampler; "" for others


_TWICE = {"double_shift": True}
CONVENTIONS = {
    each.name: each
    for each in (
        Convention("lydite"),
        Convention("k-diffusion", stream=STREAMS["k-diffusion"]),
        Convention(
            "comfyui",
            timesteps="nearest",
            discard_penultimate=frozenset({"dpm_2", "dpm_2_ancestral", "uni_pc", "uni_pc_bh2"}),
            stream=STREAMS["comfyui"],
            flow_start=1e-4,
            strength="comfyui",
            unit_variance="at_sigma_max",
            names={"beta": "beta_timesteps"},
            options={
                "normal": _TWICE,
                "sgm_uniform": _TWICE,
                "align_your_steps": {"by": "timestep"},
            },
        ),
        Convention(
            "a1111",
            discard_penultimate=frozenset({"dpm_2", "dpm_2_ancestral", "dpmpp_3m_sde"}),
            stream=STREAMS["a1111"],
            strength="a1111",
            names={
                "uniform": "normal",
                "ddim": "ddim_uniform",
                "beta": "beta_sigmas",
                "kl_optimal": "kl_optimal_a1111",
            },
            options={"align_your_steps": {"ending": "append"}},
            automatic={
                **dict.fromkeys(("dpmpp_2m", "dpmpp_sde", "dpmpp_2s_ancestral"), "karras"),
                **dict.fromkeys(("dpm_2", "dpm_2_ancestral", "restart"), "karras"),
                **dict.fromkeys(("dpmpp_2m_sde", "dpmpp_2m_sde_heun"), "exponential"),
                "dpmpp_3m_sde": "exponential",
                "": "normal",
            },
        ),
        Convention(
            "diffusers",
            flow_timesteps="interpolate",  # its multistep solvers truncate
            last_step="first_order_below_15",
            stream=STREAMS["diffusers"],
            brownian=False,
            strength="diffusers",
            unit_variance="leading",
            names={"beta": "beta_sigmas"},
        ),
    )
}


def find_convention(name: str) -> Convention:
    """The preset called `name`."""
    if name not in CONVENTIONS:
        raise InputError(
            f"convention is {name!r:.60}; expected one of {', '.join(CONVENTIONS)}."
            f"{suggestion(name, CONVENTIONS)}"
        )
    return CONVENTIONS[name]


def schedule_name(convention: Convention, name: str, sampler: str = "") -> str:
    """Our name for what the convention calls `name`; `automatic` goes by the sampler."""
    if name == "automatic" and convention.automatic:
        return convention.automatic.get(sampler, convention.automatic[""])
    if name == "beta" and "beta" not in convention.names:
        raise InputError(
            "schedule beta means beta_timesteps in ComfyUI and beta_sigmas in diffusers and A1111; "
            "name one of the two, or a convention."
        )
    return convention.names.get(name, name)


def plan_schedule(
    convention: Convention,
    *,
    sampler: str,
    schedule: str,
    steps: int,
    model: ModelSigmas,
    strength: float = 1.0,
    meaning: Meaning = "diffusers_sd3",
    final: Final | None = None,
    own_timesteps: bool = False,
    **options: Any,
) -> Schedule:
    """The steps that the program would run; below strength 1, those left for img2img.

    `meaning` is for a convention that has none. For a checkpoint's own scheduler: its `final`, and
    its timesteps instead of the convention's.
    """
    name = schedule_name(convention, schedule, sampler)
    made, run = strength_steps(convention.strength or meaning, steps, strength)
    discards = sampler in convention.discard_penultimate
    chosen = {**convention.options.get(name, {}), **options}
    timed = model if own_timesteps else with_timestep_rule(model, convention)
    result = find_schedule(name).make(
        made + discards, timed, final=final or convention.final, **chosen
    )
    if discards:
        result = discard_penultimate(result)
    if strength < 1:
        result = from_step(result, max(len(result.timesteps) - run, 0))
    if convention.flow_start is not None and sampler in SNR_SAMPLERS:
        result = start_below_one(result, timed, convention.flow_start)
    return result


def strength_steps(meaning: Meaning, steps: int, strength: float) -> tuple[int, int]:
    """(steps made, steps run) of an img2img at `strength`; without an image it is 1 and (n, n)."""
    if meaning not in MEANINGS:
        raise InputError(f"strength means {meaning!r}; expected one of {', '.join(MEANINGS)}.")
    check_count("steps", steps, MOST_STEPS)
    if not 0 < strength <= 1:
        raise InputError(f"strength is {strength}; expected a number above 0 and at most 1.")
    made, run = (steps, steps) if strength == 1 else MEANINGS[meaning](steps, strength)
    if run < 1:
        raise InputError(f"strength {strength} leaves none of the {steps} steps.")
    return made, min(run, made)


def with_timestep_rule(model: ModelSigmas, convention: Convention) -> ModelSigmas:
    """The model with timesteps as the convention has them."""
    if isinstance(model, NoiseTable):
        return replace(model, rule=convention.timesteps)
    if isinstance(model, FlowSigmas):
        return replace(model, rule=convention.flow_timesteps)
    return model


def discard_penultimate(schedule: Schedule) -> Schedule:
    """Without the sigma before the last one, whose step some samplers take badly: one step less."""
    if len(schedule.timesteps) < 2:
        raise InputError("one step alone has no penultimate sigma; make one step more.")
    kept = np.delete(schedule.sigmas, -2)
    return read_only_schedule(
        schedule.name, kept, schedule.timesteps[:-1].copy(), schedule.timestep_between
    )


def start_below_one(schedule: Schedule, model: ModelSigmas, share: float) -> Schedule:
    """A flow schedule from σ = 1 started `share` of the way down instead, the shift applied."""
    if not isinstance(model, FlowSigmas) or schedule.sigmas[0] < 1:
        return schedule
    sigmas, timesteps = schedule.sigmas.copy(), schedule.timesteps.copy()
    sigmas[0] = shift_sigmas(1 - share, model.shift)
    timesteps[0] = model.timestep_of(float(sigmas[0]))
    return read_only_schedule(schedule.name, sigmas, timesteps, schedule.timestep_between)


def has_unit_variance(convention: Convention, schedule: Schedule, model: ModelSigmas) -> bool:
    """Whether the first noise is √(1 + σ²) wide; `Prediction.start` takes the answer."""
    if convention.unit_variance == "leading":
        return schedule.name.startswith("leading")
    top, first = float(model.levels[-1]), float(schedule.sigmas[0])
    at_top = first > top or math.isclose(first, top, rel_tol=1e-5)
    return convention.unit_variance == "at_sigma_max" and at_top


def uses_brownian_path(convention: Convention, kind: NoiseKind) -> bool:
    """Whether a sampler of this kind takes its noise from a Brownian path."""
    return kind == "path" and convention.brownian


def options_of(convention: Convention, schedule: Schedule, sampler: Sampler) -> dict[str, Any]:
    """What a convention sets of a multistep sampler's options; the user's word goes before it."""
    if sampler.options.get("lower_order_final") is not True:
        return {}
    return {"lower_order_final": last_step_is_first_order(convention, schedule)}


def last_step_is_first_order(convention: Convention, schedule: Schedule) -> bool:
    """Whether a method of higher order falls back for its last step."""
    few = convention.last_step == "first_order_below_15" and len(schedule.timesteps) < 15
    return few or float(schedule.sigmas[-1]) == 0
