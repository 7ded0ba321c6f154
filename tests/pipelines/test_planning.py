"""Plans of a refiner, without a model: who may refine whom, and where it takes over."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.core.request import Request
from lydite.pipelines import planning
from lydite.pipelines.observer import Observer
from lydite.pipelines.planning import check_refiner, hand_over
from lydite.pipelines.steps import run_steps
from lydite.sampling.sampler_types import Step

TIMESTEPS, SIGMAS = np.array([900.0, 700, 500, 300]), np.array([9.0, 7, 5, 3, 0])


def part(
    *,
    refines: bool = True,
    channels: int = 4,
    factor: int = 8,
    needs: tuple[str, ...] = (),
    family: Any = None,
) -> Any:
    """As much of a pipeline as planning looks at."""
    own = SimpleNamespace(refines=refines, title="XL", needs=lambda _: needs)
    levels = SimpleNamespace(levels=np.arange(1000))
    return SimpleNamespace(
        family=family or own,
        model=None,
        name="model",
        latents=SimpleNamespace(channels=channels, factor=factor),
        scheduler=SimpleNamespace(levels=lambda tokens, steps: levels),
    )


def test_who_may_refine_whom() -> None:
    xl = part()
    check_refiner(xl, part(family=xl.family))
    plain, masked = part(refines=False), part(needs=("image", "mask"))
    for pipeline, refiner in ((xl, part()), (plain, plain)):
        with pytest.raises(InputError, match="XL cannot refine XL"):
            check_refiner(pipeline, refiner)
    changes: tuple[dict[str, Any], ...] = ({"channels": 16}, {"factor": 16})
    for change in changes:
        with pytest.raises(InputError, match="its latents are not those of model"):
            check_refiner(xl, part(family=xl.family, **change))
    with pytest.raises(InputError, match="takes a mask is no refiner"):
        check_refiner(masked, masked)


def planned(**changes: Any) -> Any:
    request = Request(
        steps=4, guidance_steps=(1.0,) * 4, guidance_interval=(0.1, 0.9), strength=0.5
    )
    schedule = SimpleNamespace(timesteps=TIMESTEPS, sigmas=SIGMAS)
    return SimpleNamespace(request=request.replace(**changes), schedule=schedule, mask=None)


@pytest.mark.parametrize(
    ("share", "stop"), [(0.05, 0), (0.1, 1), (0.2, 1), (0.3, 2), (0.5, 3), (0.69, 3), (0.7, 4)]
)
def test_the_refiner_takes_over_by_the_share_of_the_timesteps(
    share: float, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def plan_run(pipeline: Any, request: Request, *, first: int) -> Any:
        asked.update(request=request, first=first)
        return SimpleNamespace(schedule=SimpleNamespace(sigmas=SIGMAS[first:]))

    monkeypatch.setattr(planning, "plan_run", plan_run)
    monkeypatch.setattr(planning, "replace", lambda run, **fields: (run, fields))
    pipeline, run = part(), planned(refine_from=share)
    run.strength, run.is_guided = "strength", True
    if stop in (0, 4):
        with pytest.raises(InputError, match=f"{share:g}: {stop} of the 4 steps come before it"):
            hand_over(pipeline, run, pipeline)
        return
    found: Any = hand_over(pipeline, run, pipeline)
    assert asked["first"] == stop
    plain = asked["request"]
    assert (plain.strength, plain.guidance_steps, plain.guidance_interval) == (None, (), (0.0, 1.0))
    assert found[0] is run and found[1]["stop"] == stop
    refining = found[1]["refining"][1]
    assert refining["request"] is run.request and refining["first"] == stop
    assert (refining["strength"], refining["is_guided"]) == ("strength", True)


def test_a_refiner_that_cannot_take_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, run = part(), planned(refine_from=0.5)
    other = SimpleNamespace(schedule=SimpleNamespace(sigmas=SIGMAS[2:]))
    monkeypatch.setattr(planning, "plan_run", lambda *_, **__: other)
    with pytest.raises(InputError, match="its schedule of 4 steps is not that of model"):
        hand_over(pipeline, run, pipeline)
    run.mask = np.zeros((8, 8))
    with pytest.raises(InputError, match="inpainting with a refiner is not supported"):
        hand_over(pipeline, run, pipeline)


@pytest.mark.parametrize("stop", [None, 1])
def test_no_refiner_goes_on_after_steps_that_the_sampler_chose(stop: int | None) -> None:
    x = mx.zeros((1, 2, 2, 4))

    def steps(*_: Any, **__: Any) -> Any:
        yield Step(index=0, sigma=1.0, sigma_next=0.3, x=x, denoised=x)

    sampler = SimpleNamespace(name="own", noise_for=lambda _: "none", run=steps)
    run: Any = SimpleNamespace(
        sampler=sampler, options={}, convention=None, shape=(4, 2, 2), variance_preserving=False,
        schedule=SimpleNamespace(sigmas=np.array([1.0, 0.5, 0.0])), stop=stop, first=0, steps=2,
    )  # fmt: skip
    start: Any = SimpleNamespace(seeds=(1,), noise=None, x=x)
    denoise: Any = SimpleNamespace(inpainting=None, step=0)
    if stop is None:
        assert run_steps(run, denoise, start, Observer()) is x and denoise.step == 1
    else:
        with pytest.raises(InputError, match="sampler own chooses its own steps, so a refiner"):
            run_steps(run, denoise, start, Observer())
