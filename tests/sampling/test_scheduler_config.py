"""scheduler_config.json against diffusers: keys, defaults, sigmas and timesteps of every class."""

import inspect
import json
import warnings
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import ConfigError, InputError
from lydite.sampling import scheduler_config
from lydite.sampling.denoiser import EPS, VELOCITY, V
from lydite.sampling.registry import find_sampler
from lydite.sampling.scheduler_config import SchedulerConfig, read_scheduler_config
from lydite.sampling.schedules.flow import flux2_mu

STEPS = (1, 2, 7, 20)
TOKENS = 1024
CLASSES = scheduler_config._CLASSES
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
UNCLIPPED = {"clip_sample": False}
SDE = {"algorithm_type": "sde-dpmsolver++"}
V_ZERO_SNR = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}

# What checkpoints ship with: the class, its keys, and (sampler, schedule) of ours.
SHIPPED: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "sd15": (
        "PNDM",
        {**SD, "skip_prk_steps": True, "steps_offset": 1, "set_alpha_to_one": False}
        | {"trained_betas": None, "clip_sample": False},
        ("plms", "leading"),
    ),
    "sd21": (
        "DDIM",
        {**SD, "clip_sample": False, "prediction_type": "v_prediction", "set_alpha_to_one": False}
        | {"skip_prk_steps": True, "steps_offset": 1, "trained_betas": None},
        ("ddim", "leading"),
    ),
    "sdxl": (
        "EulerDiscrete",
        {**SD, "clip_sample": False, "interpolation_type": "linear", "sample_max_value": 1.0}
        | {"set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1}
        | {"timestep_spacing": "leading", "use_karras_sigmas": False, "trained_betas": None},
        ("euler", "leading"),
    ),
    "sdxl-turbo": (
        "EulerAncestralDiscrete",
        {**SD, "timestep_spacing": "trailing", "steps_offset": 1, "skip_prk_steps": True}
        | {"clip_sample": False, "set_alpha_to_one": False, "interpolation_type": "linear"},
        ("euler_ancestral", "trailing"),
    ),
    "sd3": ("FlowMatchEulerDiscrete", {"shift": 3.0}, ("euler", "sd3_diffusers")),
    "schnell": (
        "FlowMatchEulerDiscrete",
        {"shift": 1.0, "use_dynamic_shifting": False, "max_shift": 1.15},
        ("euler", "flux"),
    ),
    "dev": (
        "FlowMatchEulerDiscrete",
        {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15},
        ("euler", "flux"),
    ),
    "qwen-image": (
        "FlowMatchEulerDiscrete",
        {"use_dynamic_shifting": True, "max_shift": 0.9, "max_image_seq_len": 8192}
        | {"shift_terminal": 0.02, "time_shift_type": "exponential", "invert_sigmas": False},
        ("euler", "flux"),
    ),
    "lcm": (
        "LCM",
        {**SD, "clip_sample": False, "original_inference_steps": 50, "timestep_scaling": 10.0},
        ("lcm", "lcm_timesteps"),
    ),
    "svd": (
        "EulerDiscrete",
        {**SD, "prediction_type": "v_prediction", "use_karras_sigmas": True, "sigma_min": 0.002}
        | {"sigma_max": 700.0, "timestep_type": "continuous", "timestep_spacing": "leading"},
        ("euler", "karras"),
    ),
    "playground": ("EDMDPMSolverMultistep", {}, ("dpmpp_2m", "karras")),
    "sana": (
        "DPMSolverMultistep",
        {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"},
        ("dpmpp_2m", "flow_match"),
    ),
    "wan": (
        "UniPCMultistep",
        {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"},
        ("uni_pc_bh2", "flow_match"),
    ),
}
EVEN = ("schnell", "dev", "qwen-image")
CURVES = [{}, *({f"use_{name}_sigmas": True} for name in ("karras", "exponential", "beta"))]
SPACINGS = [{"timestep_spacing": name, "steps_offset": 1} for name in ("leading", "trailing")]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("FlowMatchEulerDiscrete", {"shift": 3.0, "shift_terminal": 0.1, "use_beta_sigmas": True}),
    ("FlowMatchEulerDiscrete", {"use_dynamic_shifting": True, "time_shift_type": "linear"}),
    ("FlowMatchEulerDiscrete", {"shift": 2.0, "stochastic_sampling": True}),
    ("FlowMatchHeunDiscrete", {"shift": 3.0}),
    ("FlowMatchLCM", {"shift": 3.0}),
    *(
        (name, SD | config)
        for name in ("EulerDiscrete", "LMSDiscrete", "HeunDiscrete")
        for config in CURVES + SPACINGS
    ),
    *(("KDPM2Discrete", SD | config) for config in (*CURVES[:2], SPACINGS[0])),
    ("EulerDiscrete", SD | V_ZERO_SNR | SPACINGS[1]),
    ("EulerDiscrete", {"final_sigmas_type": "sigma_min"} | SPACINGS[1]),
    ("EulerAncestralDiscrete", SD),
    ("KDPM2AncestralDiscrete", SD | {"use_karras_sigmas": True}),
    ("DDIM", SD | UNCLIPPED | {"set_alpha_to_one": True, "steps_offset": 1}),
    ("DDIM", SD | UNCLIPPED | {"set_alpha_to_one": False}),
    *(("DDPM", SD | UNCLIPPED | config) for config in ({}, {"timestep_spacing": "linspace"})),
    ("DDPM", SD | UNCLIPPED | SPACINGS[1] | V_ZERO_SNR),
    *(
        (name, SD | config)
        for name in ("DPMSolverMultistep", "UniPCMultistep", "DEISMultistep")
        for config in CURVES + SPACINGS
    ),
    *(("DPMSolverSinglestep", SD | config) for config in CURVES),
    ("DPMSolverMultistep", SD | {"final_sigmas_type": "sigma_min", "algorithm_type": "dpmsolver"}),
    ("DPMSolverMultistep", {"beta_schedule": "squaredcos_cap_v2", "use_karras_sigmas": True}),
    ("EDMEuler", {"sigma_schedule": "exponential"}),
    ("LCM", SD | {"original_inference_steps": 100}),
]
CASES = [(name, config) for name, config, _ in SHIPPED.values()] + MORE


def read(name: str, config: dict[str, Any], **options: Any) -> SchedulerConfig:
    raw = {"_class_name": f"{name}Scheduler", **config}
    return read_scheduler_config(raw, where="scheduler_config.json", **options)


def made_by_diffusers(name: str, config: dict[str, Any], steps: int, even: bool) -> Any:
    diffusers = pytest.importorskip("diffusers")
    diffusers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = getattr(diffusers, f"{name}Scheduler").from_config(dict(config))
        options: dict[str, Any] = {"num_inference_steps": steps}
        if config.get("use_dynamic_shifting"):
            get = scheduler.config.get
            ends = get("base_image_seq_len"), get("max_image_seq_len")
            slope = (get("max_shift") - get("base_shift")) / (ends[1] - ends[0])
            options["mu"] = get("base_shift") + slope * (TOKENS - ends[0])
        if even:
            options = options | {"sigmas": np.linspace(1.0, 1 / steps, steps)}
        scheduler.set_timesteps(**options)
    return scheduler


def levels(name: str, scheduler: Any) -> tuple[np.ndarray, np.ndarray]:
    """(sigmas, timesteps) of the steps, whatever the class keeps."""
    timesteps = scheduler.timesteps.numpy()
    if name == "PNDM":
        timesteps = scheduler._timesteps[::-1]
    if name in ("PNDM", "DDIM", "DDPM", "LCM"):
        kept = scheduler.alphas_cumprod.double().numpy()
        with np.errstate(divide="ignore"):
            table = np.sqrt((1 - kept) / kept)
        final = getattr(scheduler, "final_alpha_cumprod", None)
        lowest = name in ("PNDM", "DDIM") and final is not None and float(final) < 1
        return np.append(table[timesteps.astype(int)], table[0] if lowest else 0.0), timesteps
    if name.startswith("KDPM2"):
        timesteps = timesteps[::2]
    elif "Heun" in name:
        timesteps = (
            timesteps[::2] if len(timesteps) == 1 else np.append(timesteps[:1], timesteps[1::2])
        )
    sigmas = [sigma for sigma, _ in groupby(scheduler.sigmas.tolist())]
    return np.array(sigmas), timesteps[: len(sigmas) - 1]


@pytest.mark.parity
@pytest.mark.parametrize(("name", "config"), CASES, ids=lambda value: str(value)[:80])
def test_sigmas_and_timesteps_are_those_of_diffusers(name: str, config: dict[str, Any]):
    even = any(SHIPPED[key][1] is config for key in EVEN)
    ours = read(name, config, grid="even" if even else "trained")
    find_sampler(ours.sampler).check_options(ours.sampler_options)
    curve = any(config.get(f"use_{curve}_sigmas") for curve in ("karras", "exponential", "beta"))
    for steps in STEPS:
        if steps == 1 and (curve or config.get("shift_terminal") or "EDM" in name):
            continue  # diffusers starts at the lowest sigma, or divides by 0
        if name == "DDIM" and config.get("timestep_spacing") == "trailing" and 1000 % steps:
            continue
        sigmas, timesteps = levels(name, made_by_diffusers(name, config, steps, even))
        if len(set(sigmas.tolist())) == 1:
            continue  # one step of no length
        schedule = ours.make_schedule(steps, TOKENS)
        fresh = np.append(np.diff(sigmas) != 0, True)  # ours has no steps of no length
        known = np.isfinite(sigmas[fresh])
        bar = 3e-4 if config.get("rescale_betas_zero_snr") else 5e-6
        np.testing.assert_allclose(
            schedule.sigmas[known], sigmas[fresh][known], rtol=bar, atol=1e-12, err_msg=str(steps)
        )
        apart = np.abs(schedule.timesteps - timesteps[fresh[: len(timesteps)]])
        # rounded from float32 there, it falls to the other side of a whole number now and then
        rounded = (curve and "Multistep" in name) or name == "DPMSolverSinglestep"
        assert np.count_nonzero(apart > 3e-3) <= (1 if rounded else 0), (steps, apart)
        assert apart.max() <= 1


@pytest.mark.parametrize("key", SHIPPED)
def test_checkpoints_in_the_wild_have_our_names(key: str):
    name, config, wanted = SHIPPED[key]
    ours = read(name, config, grid="even" if key in EVEN else "trained")
    assert (ours.sampler, ours.schedule) == wanted
    assert ours.class_name == f"{name}Scheduler"


@pytest.mark.parametrize("key", ["sd15", "sd21", "sdxl", "sd3"])
def test_a_late_start_is_where_diffusers_lists_the_step(key: str):
    """img2img and a refiner cut the list of timesteps, in which PNDM has the second one twice."""
    name, config, _ = SHIPPED[key]
    listed = made_by_diffusers(name, config, 7, even=False).timesteps.numpy()
    ours = read(name, config)
    for step, timestep in enumerate(ours.make_schedule(7).timesteps):
        first = int(np.flatnonzero(np.isclose(listed, timestep))[0])
        assert ours.position(step) == first


def test_prediction_end_and_first_noise():
    sd21, sdxl, sd3 = (read(*SHIPPED[key][:2]) for key in ("sd21", "sdxl", "sd3"))
    assert (sd21.prediction, sd21.final, sd21.unit_variance) == (V, "sigma_min", True)
    assert (sdxl.prediction, sdxl.final, sdxl.unit_variance) == (EPS, "zero", True)
    assert (sd3.prediction, sd3.final, sd3.unit_variance) == (VELOCITY, "zero", False)


def test_a_pipeline_can_bring_its_own_mu():
    config = read(*SHIPPED["dev"][:2], grid="even", mu=flux2_mu)
    few, many = (config.levels(4096, steps).levels for steps in (10, 200))
    assert (few[:-1] > many[:-1]).all()


@pytest.mark.parity
@pytest.mark.parametrize("name", CLASSES)
def test_the_keys_and_defaults_are_those_of_diffusers(name: str):
    diffusers = pytest.importorskip("diffusers")
    kind = CLASSES[name]
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    theirs = {key: each.default for key, each in parameters.items() if key != "self"}
    ours = {**kind.defaults, **kind.refused}
    assert set(ours) | kind.ignored == set(theirs)
    assert ours == {key: value for key, value in theirs.items() if key in ours}


@pytest.mark.parity
@pytest.mark.parametrize("name", ("DPMSolverMultistep", "EulerDiscrete", "FlowMatchEulerDiscrete"))
def test_a_file_that_diffusers_writes_is_read(name: str, tmp_path: Any):
    from lydite.core.config import read_json

    scheduler = getattr(pytest.importorskip("diffusers"), f"{name}Scheduler")()
    scheduler.save_config(tmp_path)
    path = tmp_path / "scheduler_config.json"
    raw = read_json(path, infinity=True)
    assert read_scheduler_config(raw, where=path).class_name == f"{name}Scheduler"
    assert json.loads(path.read_text()).keys() == raw.keys()


@pytest.mark.parametrize(
    ("name", "config", "message"),
    (
        ("DDIM", {}, "clip_sample is True by default; only False"),
        ("DDIM", UNCLIPPED | {"timestep_spacing": "linspace"}, "timestep_spacing linspace"),
        ("PNDM", {}, "skip_prk_steps is False by default; only True"),
        ("PNDM", {"skip_prk_steps": True, "prediction_type": "v_prediction"}, "averages"),
        ("EulerDiscrete", {"trained_betas": [0.1]}, "trained_betas is"),
        ("EulerDiscrete", {"use_sine_sigmas": False}, "not understood ['use_sine_sigmas']"),
        ("EulerDiscrete", {"beta_start": "0.1"}, "beta_start"),
        ("EulerDiscrete", {"num_train_timesteps": 10**9}, "num_train_timesteps"),
        ("EulerDiscrete", CURVES[1] | SPACINGS[0], "use_karras_sigmas with timestep_spacing"),
        ("EulerDiscrete", {"prediction_type": "flow_prediction"}, "use_flow_sigmas"),
        ("FlowMatchEulerDiscrete", {"invert_sigmas": True}, "invert_sigmas is True; only False"),
        ("DEISMultistep", {"use_flow_sigmas": True}, "use_flow_sigmas is supported with"),
        ("DPMSolverMultistep", {"algorithm_type": "x"}, "algorithm_type is 'x'"),
        (
            "DPMSolverMultistep",
            {"algorithm_type": "dpmsolver"},
            "needs final_sigmas_type sigma_min",
        ),
        ("DPMSolverMultistep", SDE | {"solver_order": 3}, "solver_order 3 of sde-dpmsolver++"),
        ("DPMSolverSinglestep", SDE, "with solver_order 1 only"),
        ("LCM", {"timestep_scaling": 1.0}, "timestep_scaling"),
        ("LCM", {"original_inference_steps": 1000}, "timestep_scaling"),
        ("DDIM", UNCLIPPED | {"thresholding": True}, "thresholding is True; only False"),
        (
            "EulerDiscrete",
            {"timestep_type": "continuous", "prediction_type": "v_prediction"},
            "timestep_type continuous is supported with use_karras_sigmas",
        ),
        (
            "EulerDiscrete",
            CURVES[1] | SPACINGS[0] | {"sigma_min": 0.1},  # one of the ends alone
            "use_karras_sigmas with timestep_spacing",
        ),
        (
            "UniPCMultistep",
            CURVES[1] | {"final_sigmas_type": "sigma_min", "sigma_min": 0.1},
            "sigma_min with sigma_min of its own",
        ),
        (
            "FlowMatchEulerDiscrete",
            {"use_dynamic_shifting": True, "base_image_seq_len": 4096},
            "base_image_seq_len is not below",
        ),
        ("EDMEuler", {"prediction_type": "v_prediction"}, "prediction_type epsilon"),
        *(
            (
                "DPMSolverMultistep",
                {"use_flow_sigmas": True, "prediction_type": "flow_prediction", **wrong},
                "use_flow_sigmas is supported with",
            )
            for wrong in (CURVES[1], {"final_sigmas_type": "sigma_min"})
        ),
        *(
            ("DPMSolverSinglestep", {"algorithm_type": "sde-dpmsolver", **more}, message)
            for more, message in (
                ({}, "needs final_sigmas_type sigma_min"),
                ({"final_sigmas_type": "sigma_min", "solver_order": 1}, "solver_order 1 only"),
            )
        ),
        (
            "DPMSolverMultistep",
            SDE | {"final_sigmas_type": "sigma_min"},
            "solver_order 2 of sde-dpmsolver++ with final_sigmas_type sigma_min",
        ),
        *(
            ("FlowMatchEulerDiscrete", {key: value}, key)
            for key, value in (
                ("num_train_timesteps", 1),
                ("shift", 0),
                ("shift", 1001),
                ("shift_terminal", 1.0),
                ("shift_terminal", -0.1),
                ("base_image_seq_len", 0),
                ("time_shift_type", "other"),
            )
        ),
        *(
            ("EulerDiscrete", {key: value}, key)
            for key in ("beta_start", "beta_end", "sigma_min", "sigma_max")
            for value in (0, -1)
        ),
        ("EulerDiscrete", {"beta_end": 1}, "beta_end"),
        ("EulerDiscrete", {"steps_offset": -1}, "steps_offset"),
        ("UniPCMultistep", {"solver_order": 4}, "solver_order"),
        ("ScoreSdeVe", {}, "_class_name is 'ScoreSdeVeScheduler'; expected one of"),
    ),
)
def test_what_cannot_be_run_is_refused_by_its_key(name: str, config: Any, message: str):
    with pytest.raises(ConfigError) as error:
        read(name, config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_trailing_steps_of_ddim_have_to_divide_its_timesteps():
    config = read("DDIM", UNCLIPPED | SPACINGS[1])
    assert len(config.make_schedule(50).timesteps) == 50
    with pytest.raises(InputError, match="7 steps of DDIMScheduler"):
        config.make_schedule(7)
