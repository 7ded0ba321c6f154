"""Samplers against diffusers' schedulers, run here step by step on the same sigmas."""

import importlib
import inspect
import json
import sys
from itertools import combinations, product
from types import ModuleType
from typing import Any

import pytest

from lydite.core.errors import ConfigError
from lydite.sampling.sampler_types import FLOW, VE
from lydite.sampling.samplers.sa_solver import sample_sa_solver
from lydite.sampling.scheduler_config import read_scheduler_config
from support.schedulers import (
    ABOVE_ZERO,
    DOUBLE,
    FLOW_SIGMAS,
    MULTISTEP,
    SD,
    STEPS,
    Case,
    Scheduler,
    denoised,
    distance,
    drawn,
    noise,
    ours,
    size,
)

pytestmark = pytest.mark.parity

SINGLESTEP = "DPMSolverSinglestepScheduler"
UNIPC, DEIS, SA = "UniPCMultistepScheduler", "DEISMultistepScheduler", "SASolverScheduler"
ON_NOISE = {"algorithm_type": "dpmsolver", **ABOVE_ZERO}
ON_NOISE_SDE = {"algorithm_type": "sde-dpmsolver", **ABOVE_ZERO}
ON_DATA_SDE = {"algorithm_type": "sde-dpmsolver++"}
EDM = "EDMDPMSolverMultistepScheduler"

PLAIN = (
    Case(MULTISTEP, {}, "dpmpp_2m", {}),
    Case(MULTISTEP, {"solver_type": "heun"}, "res_multistep", {}),
    Case(MULTISTEP, {"solver_order": 3}, "dpmsolverpp_3m", {}),
    Case(MULTISTEP, ON_NOISE, "dpmsolver_2m", {}),
    Case(MULTISTEP, ON_NOISE | {"solver_order": 3}, "dpmsolver_3m", {}),
    Case(SINGLESTEP, {}, "dpmsolverpp_2s", {}),
    Case(SINGLESTEP, {"solver_order": 3}, "dpmsolverpp_3s", {}),
    Case(SINGLESTEP, ON_NOISE, "dpmsolver_2s", {}),
    Case(SINGLESTEP, ON_NOISE | {"solver_order": 3}, "dpmsolver_3s", {}),
    Case(UNIPC, {"solver_type": "bh1", **ABOVE_ZERO}, "uni_pc", {}),
    Case(UNIPC, {}, "uni_pc_bh2", {}),
    Case(DEIS, {}, "deis", {}),
)
RANDOM = (
    Case(MULTISTEP, ON_NOISE_SDE | {"solver_order": 1}, "sde_dpmsolver_1m", {}),
    Case(MULTISTEP, ON_NOISE_SDE, "sde_dpmsolver_2m", {}),
    Case(MULTISTEP, ON_DATA_SDE | {"solver_order": 1}, "ddpm", {}),
    Case(MULTISTEP, ON_DATA_SDE, "dpmpp_2m_sde", {}),
    Case(MULTISTEP, ON_DATA_SDE | {"solver_type": "heun"}, "dpmpp_2m_sde_heun", {}),
    Case(MULTISTEP, ON_DATA_SDE | FLOW_SIGMAS, "dpmpp_2m_sde", {}),
)


@pytest.mark.parametrize(
    ("case", "random"),
    [(case, False) for case in PLAIN] + [(case, True) for case in RANDOM],
    ids=str,
)
def test_every_step_is_that_of_diffusers(case: Case, random: bool):
    for steps in STEPS:
        single, single_theirs = case.run(steps, "float32", random)
        double, double_theirs = case.run(steps, "float64", random)
        assert distance(double, double_theirs) < DOUBLE.get(case.scheduler, 1e-9)
        # its float32 weights are differences of logarithms, and lose up to half of their digits
        rounding = distance(single_theirs, double_theirs)
        assert distance(single, single_theirs) < max(1e-5, 2 * rounding)


CHOICES: dict[str, tuple[Any, ...]] = {
    "solver_order": (1, 2, 3),
    "solver_type": ("midpoint", "heun", "logrho", "bh1", "bh2"),
    "algorithm_type": ("dpmsolver++", "dpmsolver", "sde-dpmsolver++", "sde-dpmsolver", "deis"),
    "lower_order_final": (True, False),
    "euler_at_final": (False, True),
    "final_sigmas_type": ("zero", "sigma_min"),
    "disable_corrector": ([], [1, 2]),
    "predict_x0": (True, False),
}


@pytest.mark.parametrize("name", (MULTISTEP, SINGLESTEP, UNIPC, DEIS))
def test_keys_of_a_config_choose_what_the_class_runs(name: str):
    """Every pair of values of two keys."""
    kind = getattr(pytest.importorskip("diffusers"), name)
    known = inspect.signature(kind.__init__).parameters
    own = {key: values for key, values in CHOICES.items() if key in known}
    configs = {
        json.dumps({first: one, second: other}): {first: one, second: other}
        for first, second in combinations(own, 2)
        for one, other in product(own[first], own[second])
    }
    ran = set[str]()
    for config in configs.values():
        raw = {"_class_name": name, **SD, "prediction_type": "sample", **config}
        try:
            read = read_scheduler_config(raw, where="config")
            case = Case(name, config, read.sampler, dict(read.sampler_options))
            mine, theirs = case.run(7, "float64", "sde" in str(config))
        except (ConfigError, NotImplementedError, RuntimeError, ValueError):
            continue  # refused here, or by diffusers while it runs
        if theirs[-1].isnan().any():  # UniPC's B(h) = h, of a step to 0
            mine, theirs = mine[:-1], theirs[:-1]
        assert distance(mine, theirs) < DOUBLE.get(name, 1e-9), config
        ran |= {f"{key}={value}" for key, value in config.items()}
    assert len(ran) >= sum(map(len, own.values())) - 2


def test_uni_pc_ends_at_the_denoised_image_where_diffusers_has_no_number():
    """There B(h) = h is ∞ on a step to 0, and multiplies a correction of 0."""
    mine, theirs = Case(UNIPC, {"solver_type": "bh1"}, "uni_pc", {}).run(7, "float64")
    assert distance(mine[:-1], theirs[:-1]) < 1e-9
    assert theirs[-1].isnan().all()
    assert mine[-1].isfinite().all()


@pytest.mark.parametrize("config", ({}, FLOW_SIGMAS), ids=("ve", "flow"))
@pytest.mark.parametrize("orders", ((2, 2), (1, 1), (3, 3), (3, 4), (2, 1), (1, 3)))
@pytest.mark.parametrize("lower", (True, False))
def test_sa_solver_is_that_of_diffusers(orders: tuple[int, int], config: Any, lower: bool):
    def tau_func(timestep: Any) -> float:  # none, all, and something between
        return 0.0 if timestep < 200 else 1.0 if timestep < 700 else 0.4

    config = SD | {
        "prediction_type": "sample",
        "predictor_order": orders[0],
        "corrector_order": orders[1],
        "lower_order_final": lower,
        **config,
    }
    noise_model = FLOW if "use_flow_sigmas" in config else VE
    for steps in STEPS:
        scheduler = Scheduler(SA, steps, "float64", config)
        scheduler.inner.tau_func = tau_func
        sigmas = scheduler.sigmas
        told = dict(zip(sigmas, scheduler.timesteps.tolist(), strict=False))
        theirs = scheduler.images(noise_model, sigmas)
        for precision, bar in (("float32", 1e-5), ("float64", 1e-9)):
            mine = ours(
                sample_sa_solver,
                noise_model,
                sigmas,
                precision,
                predictor_order=orders[0],
                corrector_order=orders[1],
                taper=(0, 2) if lower else None,
                tau=lambda sigma, _, told=told: tau_func(told[sigma]),
                noise=noise(sigmas, precision),
            )
            assert distance(mine, theirs) < bar


@pytest.mark.parametrize("config", ({}, FLOW_SIGMAS), ids=("ve", "flow"))
def test_sa_solver_adds_noise_where_diffusers_does_by_default(config: Any):
    noise_model = FLOW if config else VE
    scheduler = Scheduler(SA, 50, "float64", SD | {"prediction_type": "sample"} | config)
    sigmas = scheduler.sigmas
    mine = ours("sa_solver", noise_model, sigmas, "float64", noise=noise(sigmas, "float64"))
    assert distance(mine, scheduler.images(noise_model, sigmas)) < 1e-9


def edm(scheduler: Any, sigmas: list[float]) -> list[Any]:
    """The states of a scheduler whose network has EDM's scalings, in units of √(1 + σ²)."""
    x, data, states = drawn(-1, scheduler.precision) * size(VE, sigmas[0]), 0.5, []
    scheduler.inner.is_scale_input_called = True
    for index, sigma in enumerate(sigmas[:-1]):
        norm = (sigma**2 + data**2) ** 0.5
        output = (denoised(x, sigma) - x * (data / norm) ** 2) / (sigma * data / norm)
        x = scheduler.step(output, index, x)
        states.append(x / size(VE, sigmas[index + 1]))
    return states


@pytest.mark.parametrize(
    ("name", "config", "sampler"),
    (
        ("EDMEulerScheduler", {}, "euler"),
        (EDM, {"solver_order": 1}, "ddim"),
        (EDM, {"solver_order": 2}, "dpmpp_2m"),
        (EDM, {"solver_order": 3}, "dpmsolverpp_3m"),
        (EDM, {"solver_order": 1, "algorithm_type": "sde-dpmsolver++"}, "ddpm"),
        (EDM, {"solver_order": 2, "algorithm_type": "sde-dpmsolver++"}, "dpmpp_2m_sde"),
    ),
)
def test_edm_is_another_prediction_and_not_another_sampler(name: str, config: Any, sampler: str):
    for steps in STEPS:
        scheduler = Scheduler(name, steps, "float64", config)
        sigmas = scheduler.sigmas
        options = {"noise": noise(sigmas, "float64")} if "sde" in str(config) else {}
        theirs = edm(scheduler, sigmas)
        # Euler's is in float32, where a step from 80 to 0.002 leaves little of x
        bar = 2e-5 if name == "EDMEulerScheduler" else 1e-9
        assert distance(ours(sampler, VE, sigmas, "float64", **options), theirs) < bar


@pytest.mark.parametrize("solver", ("midpoint", "heun"))
def test_cosine_dpm_solver_is_dpmpp_2m_sde(solver: str, monkeypatch: pytest.MonkeyPatch):
    if "torchsde" not in sys.modules:  # its noise is handed over below
        monkeypatch.setitem(sys.modules, "torchsde", ModuleType("torchsde"))
    place = "diffusers.schedulers.scheduling_cosine_dpmsolver_multistep"
    found = importlib.import_module(place).CosineDPMSolverMultistepScheduler
    monkeypatch.setattr(importlib.import_module("diffusers"), found.__name__, found, raising=False)
    config = {"sigma_data": 0.5, "prediction_type": "epsilon", "solver_type": solver}
    for steps in STEPS:
        scheduler = Scheduler(found.__name__, steps, "float64", config)
        sigmas = scheduler.sigmas
        of_step = noise(sigmas, "float64")
        scheduler.inner.noise_sampler = lambda a, b, of_step=of_step: of_step(float(a), float(b))
        mine = ours("dpmpp_2m_sde", VE, sigmas, "float64", noise=of_step, solver=solver)
        assert distance(mine, edm(scheduler, sigmas)) < 1e-9


@pytest.mark.parametrize("precision", ("float32", "float64"))
def test_heun_under_the_noise_model_flow_is_that_of_diffusers(precision: str):
    for steps in STEPS:
        scheduler = Scheduler("FlowMatchHeunDiscreteScheduler", steps, precision, {"shift": 3.0})
        x, theirs = drawn(-1, precision), []
        for index, level in enumerate(scheduler.timesteps):
            sigma = float(level) / 1000
            x = scheduler.step((x - denoised(x, sigma)) / sigma, index, x)
            if index % 2 or index == 2 * steps - 2:  # the end of a step of two calls, or the last
                theirs.append(x)
        levels = (scheduler.timesteps / 1000).tolist()
        mine = ours("heun", FLOW, [levels[0], *levels[1::2], 0.0], precision)
        assert distance(mine, theirs) < 1e-5


@pytest.mark.parametrize("precision", ("float32", "float64"))
def test_lcm_under_the_noise_model_flow_is_that_of_diffusers(precision: str):
    for steps in STEPS:
        scheduler = Scheduler("FlowMatchLCMScheduler", steps, precision, {"shift": 3.0})
        sigmas, x, theirs = scheduler.sigmas, drawn(-1, precision), []
        for index, sigma in enumerate(sigmas[:-1]):
            x = scheduler.step((x - denoised(x, sigma)) / sigma, index, x)
            theirs.append(x)
        mine = ours("lcm", FLOW, sigmas, precision, noise=noise(sigmas, precision))
        assert distance(mine, theirs) < 1e-5  # it casts to float32
