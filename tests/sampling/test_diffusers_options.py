"""What the options of the solvers in λ mean, against those of diffusers."""

from collections.abc import Iterator
from typing import Any

import pytest

from lydite.sampling.samplers.deis import sample_deis
from lydite.sampling.samplers.dpm_solver import (
    sample_dpm_multistep,
    sample_dpm_singlestep,
    sample_sde_dpm_multistep,
)
from lydite.sampling.samplers.unipc import sample_uni_pc
from support.schedulers import (
    ABOVE_ZERO,
    DOUBLE,
    FLOW_SIGMAS,
    MULTISTEP,
    STEPS,
    Case,
    Sample,
    distance,
)

pytestmark = pytest.mark.parity

SINGLESTEP, INVERSE = "DPMSolverSinglestepScheduler", "DPMSolverMultistepInverseScheduler"
UNIPC, DEIS = "UniPCMultistepScheduler", "DEISMultistepScheduler"
ALGORITHMS = {"data": "dpmsolver++", "noise": "dpmsolver"}
ON_NOISE_SDE = {"algorithm_type": "sde-dpmsolver", **ABOVE_ZERO}
SCHEMES: tuple[tuple[str, Sample], ...] = (
    (MULTISTEP, sample_dpm_multistep),
    (SINGLESTEP, sample_dpm_singlestep),
)
LOWER = {"lower_order_final": False}


def dpm_solver() -> Iterator[Case]:
    for scheduler, sample in SCHEMES:
        for order in (1, 2, 3):
            yield Case(scheduler, {"solver_order": order, **FLOW_SIGMAS}, sample, {"order": order})
            for kind, algorithm in ALGORITHMS.items():
                for solver in ("midpoint", "heun"):
                    for lower in (True, False):
                        config = {
                            "solver_order": order,
                            "solver_type": solver,
                            "algorithm_type": algorithm,
                            "lower_order_final": lower,
                            **ABOVE_ZERO,
                        }
                        options = {
                            "order": order,
                            "solver": solver,
                            "kind": kind,
                            "lower_order_final": lower,
                        }
                        if order > 1 or (lower and solver == "heun"):
                            yield Case(scheduler, config, sample, options)
    for order in (2, 3):
        heun = {"solver_order": order, "solver_type": "heun"}  # down to 0
        yield Case(SINGLESTEP, heun, sample_dpm_singlestep, {"order": order, "solver": "heun"})
    last = {"euler_at_final": True}
    yield Case(MULTISTEP, {**last, **ABOVE_ZERO}, sample_dpm_multistep, last)


def inverse() -> Iterator[Case]:
    for order in (1, 2, 3):
        for kind, algorithm in ALGORITHMS.items():
            config = {"solver_order": order, "algorithm_type": algorithm}
            yield Case(INVERSE, config, sample_dpm_multistep, {"order": order, "kind": kind})


def deis() -> Iterator[Case]:
    for order in (1, 2, 3):
        config, options = {"solver_order": order}, {"order": order}
        yield Case(DEIS, config | FLOW_SIGMAS, sample_deis, options)
        yield Case(DEIS, config | {"use_karras_sigmas": True}, sample_deis, options)
        yield Case(DEIS, config | LOWER, sample_deis, options | LOWER)


def uni_pc() -> Iterator[Case]:
    for order in (1, 2, 3):
        for variant in ("bh1", "bh2"):
            config: dict[str, Any] = {"solver_order": order, "solver_type": variant, **ABOVE_ZERO}
            options: dict[str, Any] = {"order": order, "variant": variant}
            yield Case(UNIPC, config | FLOW_SIGMAS, sample_uni_pc, options)
            yield Case(UNIPC, config | LOWER, sample_uni_pc, options | LOWER)
            on_noise = config | {"predict_x0": False}
            yield Case(UNIPC, on_noise, sample_uni_pc, options | {"kind": "noise"})
        config = {"solver_order": order, "solver_type": "bh2"}  # down to 0
        yield Case(UNIPC, config | FLOW_SIGMAS, sample_uni_pc, {"order": order, "variant": "bh2"})
    for skipped in ([0, 3], list(range(50))):
        config = {"disable_corrector": skipped}
        yield Case(UNIPC, config, sample_uni_pc, config | {"variant": "bh2"})


@pytest.mark.parametrize("case", [*dpm_solver(), *inverse(), *deis(), *uni_pc()], ids=str)
def test_an_option_means_what_it_means_in_diffusers(case: Case):
    for steps in STEPS[:-1]:
        mine, theirs = case.run(steps, "float64")
        assert distance(mine, theirs) < DOUBLE.get(case.scheduler, 1e-9)


@pytest.mark.parametrize(
    ("config", "options"),
    (
        ({"solver_type": "heun"}, {"solver": "heun"}),
        (LOWER, LOWER),
        ({"euler_at_final": True}, {"euler_at_final": True}),
    ),
)
def test_an_option_of_the_sde_means_what_it_means_in_diffusers(config: Any, options: Any):
    for steps in STEPS[:-1]:
        case = Case(MULTISTEP, ON_NOISE_SDE | config, sample_sde_dpm_multistep, options)
        mine, theirs = case.run(steps, "float64", random=True)
        assert distance(mine, theirs) < DOUBLE[MULTISTEP]


@pytest.mark.parametrize("steps", (14, 15))
def test_the_order_falls_at_the_end_of_fewer_than_fifteen_steps(steps: int):
    config, options = {"solver_order": 3, **ABOVE_ZERO}, {"order": 3}
    for case in (
        Case(MULTISTEP, config, sample_dpm_multistep, options),
        Case(DEIS, {"solver_order": 3}, sample_deis, options),
    ):
        mine, theirs = case.run(steps, "float64")
        assert distance(mine, theirs) < DOUBLE.get(case.scheduler, 1e-9)
