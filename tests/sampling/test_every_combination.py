"""Every sampler on every schedule for every prediction type: the picture is finite.

Left out is only what the registry calls impossible: sampler or schedule of the other noise model.
"""

from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

from lydite.sampling.guidance import Guided, TwoPrompts, constant
from lydite.sampling.prediction import PREDICTIONS, Predicted, Prediction
from lydite.sampling.samplers import SAMPLERS
from lydite.sampling.schedules import (
    SCHEDULES,
    STABLE_DIFFUSION,
    ContinuousSigmas,
    FlowSigmas,
    Schedule,
    make_schedule,
)

COUNTS = (1, 2, 5)
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
    """A network with two prompts that answers within ±1, and is told its timestep."""

    def network(lean: float) -> Predicted[Any]:
        def answer(x: Any, timestep: float) -> Any:
            return np.tanh(x + 0.01 * np.tanh(timestep) + lean)

        return Predicted(answer, prediction, schedule.timestep_of)

    return Guided(TwoPrompts(network(0.3), network(-0.2)), constant(3.0))


def possible() -> list[tuple[str, str, str, int]]:
    return [
        (sampler.name, kind.name, prediction.name, steps)
        for prediction in PREDICTIONS.values()
        for kind in SCHEDULES.values()
        for sampler in SAMPLERS.values()
        for steps in COUNTS
        if prediction.noise_model.name in kind.noise_models
        and prediction.noise_model.name in sampler.noise_models
    ]


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


def test_all_samplers_on_all_schedules_for_all_prediction_types_are_finite():
    cases = possible()
    failed = [case for case in cases if not is_finite(*case)]
    assert failed == []
    assert len(set(cases)) > 20_000  # 21,690 as this is written
    for place, names in enumerate((SAMPLERS, SCHEDULES, PREDICTIONS, COUNTS)):
        assert {case[place] for case in cases} == set(names)
