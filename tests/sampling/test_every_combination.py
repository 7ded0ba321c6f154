"""Samplers on schedules for prediction types: every two of the choices meet, and x is finite.

Left out is only what the registry calls impossible: sampler or schedule of the other noise model.
"""

from collections.abc import Sequence
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

from lydite.sampling.denoiser import PREDICTIONS, Guided, Prediction, constant
from lydite.sampling.registry import SAMPLERS, SCHEDULES, make_schedule
from lydite.sampling.schedules.flow import FlowSigmas
from lydite.sampling.schedules.schedule import Schedule
from lydite.sampling.schedules.table import STABLE_DIFFUSION, ContinuousSigmas

COUNTS = (1, 2, 5)
Case = tuple[str, str, str, int]  # sampler, schedule, prediction, steps
MODELS: dict[str, Any] = {
    "eps": STABLE_DIFFUSION,
    "v": STABLE_DIFFUSION,
    "x0": STABLE_DIFFUSION,
    "edm": ContinuousSigmas(),
    "cosmos": ContinuousSigmas(timestep_formula="cosmos"),
    "flow": FlowSigmas(shift=3.0),
}
DRAWN = np.random.default_rng(5).standard_normal((24, 2, 3))


@cache
def schedule_of(name: str, steps: int, prediction: str) -> Schedule:
    own: dict[str, Any] = {}
    if name == "custom":
        own = {"sigmas": [*np.linspace(0.95, 0.05, steps), 0.0]}
    return make_schedule(name, steps, MODELS[prediction], **own)


def guided(prediction: Prediction, schedule: Schedule) -> Guided[Any]:
    """A network with two prompts that answers within ±1, by its timestep."""

    def network(x: Any, timestep: float, prompts: Sequence[int]) -> list[Any]:
        return [np.tanh(x + 0.01 * np.tanh(timestep) + (-0.2, 0.3)[index]) for index in prompts]

    return Guided(network, prediction, schedule.timestep_of, constant(3.0))


def pairs(case: Case) -> set[tuple[Any, ...]]:
    """What a case covers: each two of its choices, and the sampler on the schedule at its steps."""
    sampler, kind, prediction, steps = case
    return {(sampler, kind), (sampler, prediction, steps), (kind, prediction, steps)}


def chosen() -> list[Case]:
    """Enough of the possible cases for every pair of choices, drawn in a fixed order."""
    possible = [
        (sampler.name, kind.name, prediction.name, steps)
        for prediction in PREDICTIONS.values()
        for kind in SCHEDULES.values()
        for sampler in SAMPLERS.values()
        for steps in COUNTS
        if prediction.noise_model.name in kind.noise_models
        and prediction.noise_model.name in sampler.noise_models
    ]
    np.random.default_rng(0).shuffle(possible)
    covered: set[tuple[Any, ...]] = set()
    cases: list[Case] = []
    for sampler, kind, prediction, steps in possible:
        case = (str(sampler), str(kind), str(prediction), int(steps))
        if not pairs(case) <= covered:
            cases.append(case)
            covered |= pairs(case)
    return cases


def is_finite(sampler: str, kind: str, prediction: str, steps: int) -> bool:
    schedule, type_ = schedule_of(kind, steps, prediction), PREDICTIONS[prediction]
    normals = cycle(DRAWN[1:])
    walked = SAMPLERS[sampler].run(
        guided(type_, schedule),
        type_.start(DRAWN[0], float(schedule.sigmas[0])),
        schedule.sigmas.tolist(),
        noise=lambda *_: next(normals),
    )
    values = [value for step in walked for value in (step.x, step.denoised)]
    return bool(values) and all(np.isfinite(value).all() for value in values)


def test_samplers_on_schedules_for_prediction_types_are_finite():
    cases = chosen()
    failed = [case for case in cases if not is_finite(*case)]
    assert failed == []
    for place, names in enumerate((SAMPLERS, SCHEDULES, PREDICTIONS, COUNTS)):
        assert {case[place] for case in cases} == set(names)
