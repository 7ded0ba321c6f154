"""`scheduler_config.json` of a checkpoint: what diffusers would run from it, in our names.

Reference: diffusers 0.42.1, schedulers/scheduling_*.py. A key that a class reads is honoured or
refused; a key that only other classes read is ignored, as diffusers does (SDXL ships an Euler
config with keys of DDIM and PNDM); any other key is an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lydite.core.errors import ConfigError, InputError, shown
from lydite.sampling.denoiser import EPS, VELOCITY, X0, Prediction, V
from lydite.sampling.registry import make_schedule
from lydite.sampling.schedules.flow import FlowSigmas, mu_of_tokens, shift_of_mu
from lydite.sampling.schedules.schedule import Final, ModelSigmas, Rule, Schedule, from_step
from lydite.sampling.schedules.table import (
    DIFFUSERS_CLAMP,
    BetaKind,
    ContinuousSigmas,
    alphas_cumprod,
    betas,
    noise_table,
)

# The last ᾱ where a class leaves it at 0, which is no finite sigma: off by 2e-6 of the latents.
NEARLY_ZERO = 2.0**-38

Levels = Callable[[int, int], ModelSigmas]  # (image tokens, steps) → noise levels
Mu = Callable[[int, int], float]  # (image tokens, steps) → mu of a dynamic shift
Grid = Literal["trained", "even"]


@dataclass(frozen=True)
class SchedulerConfig:
    """What diffusers runs by default: sampler, schedule and noise levels."""

    class_name: str
    prediction: Prediction
    sampler: str
    schedule: str
    levels: Levels
    sampler_options: Mapping[str, Any] = field(default_factory=dict)
    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    final: Final = "zero"
    # The first noise is √(1 + σ²) wide, not σ: `Prediction.start` takes it as `unit_variance`.
    unit_variance: bool = False
    # The class computes with x/√(1 + σ²), not with the sampler's x: so are its finished latents.
    variance_preserving: bool = False
    # The number of steps has to divide this one, or its steps do not end at its timesteps.
    divides: int | None = None

    def check_steps(self, steps: int) -> None:
        """Refuse a number of steps that the class does not run on its own timesteps."""
        if self.divides is not None and self.divides % steps:
            raise InputError(
                f"{steps} steps of {self.class_name} with trailing timesteps do not end at its "
                f"timesteps; take a number that divides {self.divides}, or another sampler."
            )

    def position(self, step: int) -> int:
        """Of a step in the class's list of timesteps: PNDM lists its second timestep twice."""
        return step + (self.class_name == "PNDMScheduler" and step > 1)

    def start_late(self, whole: Schedule, first: int) -> tuple[Schedule, Mapping[str, Any]]:
        """The schedule from position `first` of the list on, and options of the sampler.

        PNDM lists its second timestep twice, and img2img cuts its list by position: it starts one
        timestep earlier than other classes, and its state is one ahead of the list from then on.
        """
        if self.class_name != "PNDMScheduler" or first == 0:
            return from_step(whole, first), {}
        if first == 1:
            return from_step(whole, 1), {"before": float(whole.sigmas[0])}
        return from_step(whole, first - 1), {"skips_second": True}

    def make_schedule(self, steps: int, image_tokens: int = 0) -> Schedule:
        """The schedule in `steps` steps; the tokens count where the shift depends on them."""
        self.check_steps(steps)
        levels, options = self.levels(image_tokens, steps), self.schedule_options
        return make_schedule(self.schedule, steps, levels, final=self.final, **options)


class _Keys(msgspec.Struct, frozen=True):
    """Every key that some class reads; the defaults are those of `_CLASSES`."""

    num_train_timesteps: Annotated[int, Meta(ge=2, le=2**20)] = 1000
    beta_start: Annotated[float, Meta(gt=0, lt=1)] = 1e-4
    beta_end: Annotated[float, Meta(gt=0, lt=1)] = 0.02
    beta_schedule: BetaKind = "linear"
    rescale_betas_zero_snr: bool = False
    prediction_type: Literal["epsilon", "v_prediction", "sample", "flow_prediction"] = "epsilon"
    timestep_spacing: Literal["linspace", "leading", "trailing"] = "linspace"
    timestep_type: Literal["discrete", "continuous"] = "discrete"
    steps_offset: Annotated[int, Meta(ge=0, le=2**20)] = 0
    final_sigmas_type: Literal["zero", "sigma_min"] = "zero"
    set_alpha_to_one: bool = True
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    use_beta_sigmas: bool = False
    sigma_min: Annotated[float, Meta(gt=0)] | None = None
    sigma_max: Annotated[float, Meta(gt=0)] | None = None
    solver_order: Literal[1, 2, 3] = 2
    algorithm_type: str = "dpmsolver++"
    solver_type: str = "midpoint"
    lower_order_final: bool = True
    euler_at_final: bool = False
    predict_x0: bool = True
    disable_corrector: list[int] = []
    original_inference_steps: Annotated[int, Meta(ge=1, le=2**20)] = 50
    timestep_scaling: float = 10.0
    shift: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    flow_shift: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    use_flow_sigmas: bool = False
    use_dynamic_shifting: bool = False
    time_shift_type: Literal["exponential", "linear"] = "exponential"
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: Annotated[int, Meta(ge=1)] = 256
    max_image_seq_len: Annotated[int, Meta(ge=1)] = 4096
    shift_terminal: Annotated[float, Meta(ge=0, lt=1)] | None = None
    stochastic_sampling: bool = False
    sigma_data: Annotated[float, Meta(gt=0)] = 0.5
    sigma_schedule: Literal["karras", "exponential"] = "karras"
    rho: Annotated[float, Meta(gt=0)] = 7.0

    @property
    def curve(self) -> Literal["karras", "exponential", "beta"] | None:
        if self.use_karras_sigmas:
            return "karras"
        if self.use_exponential_sigmas:
            return "exponential"
        return "beta" if self.use_beta_sigmas else None


def read_scheduler_config(
    raw: Mapping[str, Any], *, where: object, grid: Grid = "trained", mu: Mu | None = None
) -> SchedulerConfig:
    """What diffusers runs from the parsed file `raw`, every key accounted for.

    Two things are the pipeline's and not the file's. `grid`: the steps before a flow shift, the
    scheduler's own (SD3) or even ones from 1 to 1/n (FLUX, Qwen-Image). `mu`: the dynamic shift of
    an image; without it a line through the two points of the config, as for FLUX and Qwen-Image.
    """
    name = raw.get("_class_name")
    if not isinstance(name, str) or name not in _CLASSES:
        known = ", ".join(sorted(_CLASSES))
        raise ConfigError(f"{where}: _class_name is {shown(name)}; expected one of {known}.")
    kind = _CLASSES[name]
    unknown = [key for key in raw if key not in _READ_BY_SOME and not key.startswith("_")]
    if unknown:
        raise ConfigError(f"{where}: {name}: not understood {shown(unknown)}.")
    values = {**kind.defaults, **kind.refused}
    values |= {key: value for key, value in raw.items() if key in values}
    for key, default in kind.refused.items():
        only = _ONLY.get(key, default)
        if values.pop(key) != only:
            found = f"{shown(raw[key])}" if key in raw else f"{shown(default)} by default"
            raise ConfigError(f"{where}: {name}: {key} is {found}; only {only!r} is supported.")
    try:
        keys = msgspec.convert(values, _Keys)
        return kind.read(keys, name, _Flow(grid, mu))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {name}: {error}.") from error
    except (_Unsupported, InputError) as error:
        raise ConfigError(f"{where}: {name}: {error}") from error


class _Unsupported(Exception):
    """Keys that are read, in a combination that has no name here."""


@dataclass(frozen=True)
class _Flow:
    grid: Grid
    mu: Mu | None

    def levels(self, keys: _Keys, shift: float, rule: Rule = "interpolate") -> Levels:
        train = keys.num_train_timesteps
        if not keys.use_dynamic_shifting:
            return _constant(FlowSigmas(shift, train, float(train), rule))
        if self.mu is None and keys.base_image_seq_len >= keys.max_image_seq_len:
            raise _Unsupported("base_image_seq_len is not below max_image_seq_len.")

        def dynamic(image_tokens: int, steps: int) -> ModelSigmas:
            if self.mu is not None:
                mu = self.mu(image_tokens, steps)
            else:
                mu = mu_of_tokens(
                    image_tokens,
                    base_tokens=keys.base_image_seq_len,
                    max_tokens=keys.max_image_seq_len,
                    base_mu=keys.base_shift,
                    max_mu=keys.max_shift,
                )
            return FlowSigmas(shift_of_mu(mu, keys.time_shift_type), train, float(train), rule)

        return dynamic


def _flow_match(keys: _Keys, name: str, flow: _Flow) -> SchedulerConfig:
    """FlowMatchEuler, FlowMatchHeun, FlowMatchLCM."""
    terminal = {"terminal": keys.shift_terminal} if keys.shift_terminal else {}
    twice = flow.grid == "trained" and not keys.use_dynamic_shifting
    if keys.curve or (twice and terminal):
        schedule = "flow_match"
        options = {"grid": flow.grid, "double_shift": twice, "curve": keys.curve, **terminal}
    elif flow.grid == "even":
        schedule, options = "flux", terminal
    else:
        schedule, options = "sd3_diffusers" if twice else "flow_shift", terminal
    sampler = {"FlowMatchHeunDiscreteScheduler": "heun", "FlowMatchLCMScheduler": "lcm"}.get(name)
    sampler = sampler or ("lcm" if keys.stochastic_sampling else "euler")
    levels = flow.levels(keys, keys.shift)
    return SchedulerConfig(name, VELOCITY, sampler, schedule, levels, schedule_options=options)


def _table(keys: _Keys, rule: Rule = "interpolate", clamp: float = DIFFUSERS_CLAMP) -> Levels:
    spaced = betas(keys.beta_schedule, keys.beta_start, keys.beta_end, keys.num_train_timesteps)
    last = clamp if keys.rescale_betas_zero_snr else None
    return _constant(noise_table(alphas_cumprod(spaced, float32=True), clamp=last, rule=rule))


def _constant(levels: ModelSigmas) -> Levels:
    return lambda image_tokens, steps: levels


def _prediction(keys: _Keys) -> Prediction:
    known = {"epsilon": EPS, "v_prediction": V, "sample": X0}
    if keys.prediction_type not in known:
        raise _Unsupported("prediction_type flow_prediction needs use_flow_sigmas.")
    return known[keys.prediction_type]


def _curve_schedule(keys: _Keys) -> tuple[str, dict[str, Any]]:
    name = "beta_sigmas" if keys.curve == "beta" else str(keys.curve)
    ends = {"sigma_min": keys.sigma_min, "sigma_max": keys.sigma_max}
    return name, {key: value for key, value in ends.items() if value is not None}


_K_DIFFUSION = {
    "EulerDiscreteScheduler": "euler",
    "EulerAncestralDiscreteScheduler": "euler_ancestral",
    "LMSDiscreteScheduler": "lms",
    "HeunDiscreteScheduler": "heun",
    "KDPM2DiscreteScheduler": "dpm_2",
    "KDPM2AncestralDiscreteScheduler": "dpm_2_ancestral",
}


def _k_diffusion(keys: _Keys, name: str, flow: _Flow) -> SchedulerConfig:
    """Euler, Euler ancestral, LMS, Heun, KDPM2: VE latents, timesteps with fractions."""
    levels, (schedule, options) = _table(keys), _spacing(keys)
    if keys.curve:
        schedule, options = _curve_schedule(keys)
        if len(options) < 2 and keys.timestep_spacing != "linspace":
            raise _Unsupported(
                f"use_{keys.curve}_sigmas with timestep_spacing {keys.timestep_spacing} takes its "
                "ends from the timesteps; supported with linspace, or with sigma_min and sigma_max."
            )
        if schedule == "karras" and name.startswith("KDPM2"):
            options["whole"] = True
    if keys.timestep_type == "continuous" and keys.prediction_type == "v_prediction":  # SVD
        if not keys.curve or keys.sigma_min is None or keys.sigma_max is None:
            raise _Unsupported(
                "timestep_type continuous is supported with use_karras_sigmas, sigma_min and "
                "sigma_max."
            )
        levels = _constant(ContinuousSigmas(keys.sigma_min, keys.sigma_max))
    return SchedulerConfig(
        name,
        _prediction(keys),
        _K_DIFFUSION[name],
        schedule,
        levels,
        schedule_options=options,
        final=keys.final_sigmas_type,
        unit_variance=keys.timestep_spacing == "leading",
    )


def _spacing(keys: _Keys, *, whole: bool = False) -> tuple[str, dict[str, Any]]:
    """`whole`: DDIM and its kin round the timesteps."""
    if keys.timestep_spacing == "leading":
        return "leading", {"offset": keys.steps_offset}
    rounded = whole and keys.timestep_spacing == "linspace"
    return keys.timestep_spacing, {"whole": True} if rounded else {}


def _ddim(keys: _Keys, name: str, flow: _Flow) -> SchedulerConfig:
    """DDIM, PNDM, DDPM. A step of the first two goes from t to t − T//n, not to the next t."""
    sampler = {"PNDMScheduler": "plms", "DDPMScheduler": "ddpm"}.get(name, "ddim")
    apart = sampler != "ddpm" and keys.timestep_spacing != "leading"
    if apart and keys.timestep_spacing == "linspace":
        raise _Unsupported("timestep_spacing linspace: its steps do not end at its timesteps.")
    if sampler == "plms" and keys.prediction_type != "epsilon":
        raise _Unsupported(
            f"prediction_type {keys.prediction_type}: it averages the network's outputs of several "
            "steps, and we average the noise in them. DDIMScheduler takes the same keys."
        )
    schedule, options = _spacing(keys, whole=True)
    return SchedulerConfig(
        name,
        _prediction(keys),
        sampler,
        schedule,
        _table(keys, clamp=NEARLY_ZERO),
        schedule_options=options,
        final="zero" if keys.set_alpha_to_one else "sigma_min",
        unit_variance=True,
        variance_preserving=True,
        divides=keys.num_train_timesteps if apart else None,
    )


def _lcm(keys: _Keys, name: str, flow: _Flow) -> SchedulerConfig:
    """LCM. Its c_skip, at most (sigma_data / (timestep_scaling·t))², is left out: below 1e-4."""
    stride = keys.num_train_timesteps // keys.original_inference_steps
    if (stride - 1) * keys.timestep_scaling < 50:
        raise _Unsupported("timestep_scaling is too small for its c_skip to be left out.")
    options = {"original_steps": keys.original_inference_steps}
    levels = _table(keys, clamp=NEARLY_ZERO)
    return SchedulerConfig(
        name,
        _prediction(keys),
        "lcm",
        "lcm_timesteps",
        levels,
        schedule_options=options,
        unit_variance=True,
        variance_preserving=True,
    )


def _solver(keys: _Keys, name: str, flow: _Flow) -> SchedulerConfig:
    """DPM-Solver multistep and singlestep, UniPC, DEIS: whole timesteps, the lowest left out."""
    deis, unipc = name == "DEISMultistepScheduler", name == "UniPCMultistepScheduler"
    single = name == "DPMSolverSinglestepScheduler"
    final: Final = "sigma_min" if deis else keys.final_sigmas_type
    if keys.use_flow_sigmas:
        return _flow_solver(keys, name, flow, final)
    rule: Rule = "interpolate"
    if keys.curve:
        schedule, options = _curve_schedule(keys)
        rounded = keys.curve == "karras" and (
            unipc or deis or single or keys.beta_schedule != "squaredcos_cap_v2"
        )
        rule = "round" if rounded else "truncate"
        if final == "sigma_min" and keys.sigma_min is not None:
            raise _Unsupported("final_sigmas_type sigma_min with sigma_min of its own.")
    elif single or keys.timestep_spacing == "linspace":
        schedule, options = "linspace_dpm", {}
    elif keys.timestep_spacing == "leading":
        schedule, options = "leading_dpm", {"offset": keys.steps_offset}
    else:
        schedule, options = "trailing", {}
    method = _solver_method(keys, name, final)
    return SchedulerConfig(
        name,
        _prediction(keys),
        method[0],
        schedule,
        _table(keys, rule),
        method[1],
        options,
        final,
        unit_variance=True,
        variance_preserving=True,
    )


def _flow_solver(keys: _Keys, name: str, flow: _Flow, final: Final) -> SchedulerConfig:
    if keys.curve or keys.prediction_type != "flow_prediction" or final != "zero":
        raise _Unsupported(
            "use_flow_sigmas is supported with prediction_type flow_prediction and "
            "final_sigmas_type zero, without karras, exponential or beta sigmas."
        )
    if name == "UniPCMultistepScheduler":
        options: dict[str, Any] = {"grid": "open", "first": 1 - 1e-6}
        if keys.shift_terminal:
            options["terminal"] = keys.shift_terminal
    else:
        options = {"grid": "below_one"}
    sampler, sampler_options = _solver_method(keys, name, final)
    levels = flow.levels(keys, keys.flow_shift, "truncate")
    return SchedulerConfig(name, VELOCITY, sampler, "flow_match", levels, sampler_options, options)


def _solver_method(keys: _Keys, name: str, final: Final) -> tuple[str, dict[str, Any]]:
    order, lower = keys.solver_order, {"lower_order_final": keys.lower_order_final}
    if name == "UniPCMultistepScheduler":
        sampler = {"bh1": "uni_pc"}.get(keys.solver_type, "uni_pc_bh2")  # others count as bh2
        options = {"order": order, **lower, "disable_corrector": tuple(keys.disable_corrector)}
        return sampler, options if keys.predict_x0 else options | {"kind": "noise"}
    if name == "DEISMultistepScheduler":
        return "deis", {"order": order, **lower}
    # what is not of DPM-Solver counts as the default in diffusers
    algorithm = "dpmsolver++" if keys.algorithm_type == "deis" else keys.algorithm_type
    solver = "heun" if keys.solver_type == "heun" else "midpoint"
    if algorithm not in ("dpmsolver++", "dpmsolver", "sde-dpmsolver++", "sde-dpmsolver"):
        raise _Unsupported(f"algorithm_type is {shown(algorithm)}, which is not supported.")
    kind = "data" if algorithm.endswith("++") else "noise"
    if kind == "noise" and final == "zero":
        raise _Unsupported(f"algorithm_type {algorithm} needs final_sigmas_type sigma_min.")
    last = lower | {"euler_at_final": keys.euler_at_final}
    if algorithm.startswith("sde-"):
        if name == "DPMSolverSinglestepScheduler" and (order > 1 or kind == "noise"):
            raise _Unsupported(f"algorithm_type {algorithm} is supported with solver_order 1 only.")
        if order == 3 or (kind == "data" and order == 2 and final != "zero"):
            raise _Unsupported(
                f"solver_order {order} of {algorithm} with final_sigmas_type {final} is not "
                "supported."
            )
        if kind == "noise":
            return f"sde_dpmsolver_{order}m", {"solver": solver, **last}
        heun = "_heun" if solver == "heun" else ""
        return ("ddpm", {}) if order == 1 else (f"dpmpp_2m_sde{heun}", {})
    if order == 1:
        return "ddim", {}
    if name == "DPMSolverSinglestepScheduler":
        options = {"solver": solver} | (lower if final == "sigma_min" else {})
        return f"dpmsolver{'pp' if kind == 'data' else ''}_{order}s", options
    if kind == "data" and order == 2:
        if solver == "midpoint" and final == "zero":
            return "dpmpp_2m", {}
        return "dpmsolver_2m", {"kind": "data", "solver": solver, **last}
    return f"dpmsolver{'pp' if kind == 'data' else ''}_{order}m", {"solver": solver, **last}


def _edm(keys: _Keys, name: str, flow: _Flow) -> SchedulerConfig:
    """EDMEuler and EDMDPMSolverMultistep."""
    if keys.prediction_type != "epsilon" or keys.sigma_min is None or keys.sigma_max is None:
        raise _Unsupported("EDM is supported with prediction_type epsilon.")
    levels = _constant(
        ContinuousSigmas(keys.sigma_min, keys.sigma_max, count=keys.num_train_timesteps)
    )
    solver = _solver_method(keys, name, keys.final_sigmas_type)
    sampler, options = ("euler", {}) if name == "EDMEulerScheduler" else solver
    return SchedulerConfig(
        name,
        Prediction("edm", keys.sigma_data),
        sampler,
        keys.sigma_schedule,
        levels,
        options,
        {"rho": keys.rho} if keys.sigma_schedule == "karras" else {},
        keys.final_sigmas_type,
        unit_variance=True,
    )


@dataclass(frozen=True)
class _Class:
    """A class of diffusers: the keys it reads with their defaults, and the refused among them."""

    read: Callable[[_Keys, str, _Flow], SchedulerConfig]
    defaults: Mapping[str, Any]
    refused: Mapping[str, Any] = field(default_factory=dict)  # all but one value, see `_ONLY`
    ignored: frozenset[str] = frozenset()


# The value that is supported where it is not the default of the class.
_ONLY: dict[str, Any] = {"clip_sample": False, "skip_prk_steps": True}

# fmt: off
_BETAS = {"num_train_timesteps": 1000, "beta_start": 0.0001, "beta_end": 0.02,
          "beta_schedule": "linear", "prediction_type": "epsilon"}
_OTHER_BETAS = _BETAS | {"beta_start": 0.00085, "beta_end": 0.012}
_LEARNED = {"trained_betas": None}
_SPACED = {"timestep_spacing": "linspace", "steps_offset": 0}
_CURVES = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
_RESCALED = {"rescale_betas_zero_snr": False}
_LEADING = _BETAS | {"timestep_spacing": "leading", "steps_offset": 0}
_CLIPPED = _LEARNED | {"clip_sample": True, "thresholding": False}
_THRESHOLDS = frozenset({"dynamic_thresholding_ratio", "sample_max_value"})
_CLIP_RANGES = _THRESHOLDS | {"clip_sample_range"}
_FLOW = {"num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": False,
         "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
         "max_image_seq_len": 4096, "shift_terminal": None, "time_shift_type": "exponential",
         **_CURVES}
_SOLVER = {"solver_order": 2, "lower_order_final": True, "use_flow_sigmas": False,
           "flow_shift": 1.0, "use_dynamic_shifting": False, "time_shift_type": "exponential",
           **_BETAS, **_CURVES}
_SIGMAS = {"sigma_min": None, "sigma_max": None, "final_sigmas_type": "zero"}
_THRESHOLD = _LEARNED | {"thresholding": False}
_METHOD = {"algorithm_type": "dpmsolver++", "solver_type": "midpoint"}
_DPM = _SOLVER | _METHOD | {"final_sigmas_type": "zero"}
_DPM_REFUSED = _THRESHOLD | {"lambda_min_clipped": float("-inf"), "variance_type": None}
_EDM = {"sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5, "sigma_schedule": "karras",
        "num_train_timesteps": 1000, "prediction_type": "epsilon", "rho": 7.0,
        "final_sigmas_type": "zero"}
_K = _SPACED | _CURVES
_CLASSES = {
    "FlowMatchEulerDiscreteScheduler": _Class(
        _flow_match, _FLOW | {"stochastic_sampling": False}, {"invert_sigmas": False}),
    "FlowMatchHeunDiscreteScheduler": _Class(
        _flow_match, {"num_train_timesteps": 1000, "shift": 1.0}),
    "FlowMatchLCMScheduler": _Class(
        _flow_match, _FLOW, {"invert_sigmas": False, "scale_factors": None},
        frozenset({"upscale_mode"})),
    "EulerDiscreteScheduler": _Class(
        _k_diffusion, _BETAS | _K | _RESCALED | _SIGMAS | {"timestep_type": "discrete"},
        _LEARNED | {"interpolation_type": "linear"}),
    "EulerAncestralDiscreteScheduler": _Class(
        _k_diffusion, _BETAS | _SPACED | _RESCALED, _LEARNED),
    "LMSDiscreteScheduler": _Class(_k_diffusion, _BETAS | _K, _LEARNED),
    "HeunDiscreteScheduler": _Class(
        _k_diffusion, _OTHER_BETAS | _K, _LEARNED | {"clip_sample": False},
        frozenset({"clip_sample_range"})),
    "KDPM2DiscreteScheduler": _Class(_k_diffusion, _OTHER_BETAS | _K, _LEARNED),
    "KDPM2AncestralDiscreteScheduler": _Class(_k_diffusion, _OTHER_BETAS | _K, _LEARNED),
    "DDIMScheduler": _Class(
        _ddim, _LEADING | _RESCALED | {"set_alpha_to_one": True}, _CLIPPED, _CLIP_RANGES),
    "PNDMScheduler": _Class(
        _ddim, _LEADING | {"set_alpha_to_one": False}, _LEARNED | {"skip_prk_steps": False}),
    "DDPMScheduler": _Class(
        _ddim, _LEADING | _RESCALED, _CLIPPED | {"variance_type": "fixed_small"}, _CLIP_RANGES),
    "LCMScheduler": _Class(
        _lcm, _OTHER_BETAS | _RESCALED | {"beta_schedule": "scaled_linear",
                                          "original_inference_steps": 50, "timestep_scaling": 10.0},
        _CLIPPED | {"clip_sample": False},
        _CLIP_RANGES | {"set_alpha_to_one", "steps_offset", "timestep_spacing"}),
    "DPMSolverMultistepScheduler": _Class(
        _solver, _DPM | _SPACED | _RESCALED | {"euler_at_final": False},
        _DPM_REFUSED | {"use_lu_lambdas": False}, _THRESHOLDS),
    "DPMSolverSinglestepScheduler": _Class(
        _solver, _DPM | {"lower_order_final": False}, _DPM_REFUSED, _THRESHOLDS),
    "UniPCMultistepScheduler": _Class(
        _solver, _SOLVER | _SPACED | _RESCALED | _SIGMAS | {
            "solver_type": "bh2", "predict_x0": True, "disable_corrector": [],
            "shift_terminal": None},
        _THRESHOLD | {"solver_p": None}, _THRESHOLDS),
    "DEISMultistepScheduler": _Class(
        _solver, _SOLVER | _SPACED, _THRESHOLD, _THRESHOLDS | {"algorithm_type", "solver_type"}),
    "EDMEulerScheduler": _Class(_edm, _EDM),
    "EDMDPMSolverMultistepScheduler": _Class(
        _edm, _EDM | _METHOD | {"solver_order": 2, "lower_order_final": True,
                                "euler_at_final": False},
        {"thresholding": False}, _THRESHOLDS),
}
# fmt: on
_READ_BY_SOME = frozenset().union(
    *({*kind.defaults, *kind.refused, *kind.ignored} for kind in _CLASSES.values())
)
