"""Plans without a model: what is completed and refused, and where a refiner takes over."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.core.request import Request
from lydite.pipelines import planning
from lydite.pipelines.family import Defaults, LatentSpace
from lydite.pipelines.observer import Observer
from lydite.pipelines.planning import (
    check_inputs,
    check_refiner,
    complete,
    hand_over,
    plan_run,
)
from lydite.pipelines.steps import run_steps
from lydite.sampling.sampler_types import Step
from lydite.sampling.scheduler_config import read_scheduler_config

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


IMAGE, MASK = np.zeros((40, 72, 3), np.uint8), np.zeros((40, 72), np.uint8)
DEFAULTS = Defaults(
    steps=5, guidance=2.5, text_length=7, strength=0.6, mask_strength=0.9, true_guidance=4.0
)


def whole(*, refiner: Any = None, guided: bool = True, **family: Any) -> Any:
    """A pipeline as `plan` sees it before a schedule is made."""
    known: dict[str, Any] = {"guidance": "cfg", "image": "start", "inpaints": True, "needs": ()}
    known |= {"weighs_prompts": True, "skips_layers": True} | family
    needs = known.pop("needs")
    return SimpleNamespace(
        family=SimpleNamespace(title="T", needs=lambda _: needs, **known),
        model=None,
        name="model",
        defaults=replace(DEFAULTS, guided=guided),
        scheduler=SimpleNamespace(sampler="euler", schedule="simple"),
        latents=LatentSpace(4, 8, 2, default=(64, 32), largest=128),
        refiner=refiner,
    )


@pytest.mark.parametrize(
    ("family", "image", "mask", "message"),
    [
        ({}, None, None, ""),
        ({}, IMAGE, None, ""),
        ({}, IMAGE, MASK, ""),
        ({}, None, MASK, "a mask without an image; add --image"),
        ({"inpaints": False}, IMAGE, None, ""),
        ({"inpaints": False}, IMAGE, MASK, "inpainting is not supported; it is for FLUX.1, "),
        ({"needs": ("image",)}, None, None, r"draws over an image; add --image FILE\.$"),
        ({"needs": ("image",)}, IMAGE, None, ""),
        ({"needs": ("image", "mask")}, None, None, "draws into an image; .* and --mask FILE"),
        ({"needs": ("image", "mask")}, IMAGE, None, "draws under a mask; add --mask"),
        ({"needs": ("image", "mask")}, IMAGE, MASK, ""),
    ],
)
def test_images_and_masks_that_a_model_takes(
    family: dict[str, Any], image: Any, mask: Any, message: str
) -> None:
    if not message:
        check_inputs(whole(**family), image, mask)
        return
    with pytest.raises(InputError, match=message):
        check_inputs(whole(**family), image, mask)


@pytest.mark.parametrize(
    ("parts", "changes", "message"),
    [
        ({"weighs_prompts": False}, {"weighting": "a1111"}, "weights in prompts are not"),
        ({}, {"weighting": "a1111"}, ""),
        ({"skips_layers": False}, {"clip_skip": 0}, "clip skip is not supported"),
        ({}, {"clip_skip": 1}, ""),
        ({}, {"refine_from": 0.5}, "without a refiner"),
        ({"refiner": "second"}, {"refine_from": 0.5}, ""),
        ({"guidance": "distilled"}, {"guidance_steps": (1.0,)}, "one guidance for all steps"),
        ({}, {"guidance_steps": (9.0,)}, ""),
        ({"guided": False}, {"guidance": 1.0}, ""),
        ({"guided": False}, {"guidance": 1.01}, "distilled to run without guidance"),
        ({"guided": False}, {"guidance_steps": (1.0, 1.01)}, "distilled to run without"),
        ({"guided": False}, {"negative": "x"}, "distilled to run without"),
        ({"guided": False}, {"guidance": -3.0, "guidance_steps": (0.0, 1.0)}, ""),
    ],
)
def test_what_a_model_or_its_family_does_not_take(
    parts: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    if not message:
        planned = complete(whole(**parts), Request(**changes), None, None)
        assert all(getattr(planned, name) == value for name, value in changes.items())
        return
    with pytest.raises(InputError, match=message):
        complete(whole(**parts), Request(**changes), None, None)


def test_what_is_not_asked_for_is_the_models_own() -> None:
    found = complete(whole(), Request("a"), None, None)
    own = Request(
        "a", steps=5, guidance=2.5, width=64, height=32, sampler="euler", schedule="simple",
        text_length=7,
    )  # fmt: skip
    assert found == own
    asked = own.replace(
        steps=1, guidance=0.0, width=16, height=128, sampler="heun", schedule="karras",
        text_length=1,
    )  # fmt: skip
    assert complete(whole(), asked, None, None) == asked


@pytest.mark.parametrize(
    ("family", "image", "mask", "asked", "strength"),
    [
        ("start", None, None, 0.3, None),
        ("start", IMAGE, None, None, 0.6),
        ("start", IMAGE, MASK, None, 0.9),
        ("start", IMAGE, None, 0.3, 0.3),
        ("start", IMAGE, MASK, 0.0, 0.0),
        ("reference", IMAGE, None, None, None),
    ],
)
def test_the_strength_of_an_image(
    family: str, image: Any, mask: Any, asked: float | None, strength: float | None
) -> None:
    found = complete(whole(image=family), Request(strength=asked), image, mask)
    assert found.strength == strength
    if image is not None:  # rounded down to what the model draws
        assert (found.width, found.height) == (64, 32)


def test_a_reference_image_has_no_strength() -> None:
    with pytest.raises(InputError, match="leave out --strength"):
        complete(whole(image="reference"), Request(strength=0.5), IMAGE, None)
    complete(whole(image="reference"), Request(strength=0.5), None, None)


def test_true_guidance_and_the_refiners_share() -> None:
    for kind, negative, asked, found in (
        ("distilled", "x", None, 4.0),
        ("distilled", "x", 0.0, 0.0),
        ("distilled", "", 3.0, None),
        ("cfg", "x", 3.0, None),
    ):
        request = Request(negative=negative, true_guidance=asked)
        assert complete(whole(guidance=kind), request, None, None).true_guidance == found
    assert complete(whole(refiner="second"), Request(), None, None).refine_from == 0.8
    assert complete(whole(), Request(), None, None).refine_from is None


def scheduled(name: str, **keys: Any) -> Any:
    """A pipeline whose checkpoint has this scheduler config."""
    pipeline = whole(strength="diffusers")
    raw = {"_class_name": f"{name}Scheduler", **keys}
    pipeline.scheduler = read_scheduler_config(raw, where="scheduler_config.json")
    return pipeline


def run_of(pipeline: Any, **changes: Any) -> Any:
    return plan_run(pipeline, complete(pipeline, Request("a", steps=10, **changes), None, None))


def test_what_a_checkpoint_says_of_its_schedule_holds_for_that_schedule() -> None:
    ddim = scheduled("DDIM", clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    lowest = float(ddim.scheduler.levels(0, 10).levels[0])
    for changes in ({}, {"sampler": "euler"}):  # whatever the sampler
        run = run_of(ddim, **changes)
        assert (run.schedule.name, run.schedule.timesteps[-1]) == ("leading", 1)
        assert run.schedule.sigmas[-1] == pytest.approx(lowest)
        assert run.unit_variance and run.variance_preserving
    other = run_of(ddim, schedule="karras")
    assert (other.schedule.name, other.schedule.sigmas[-1]) == ("karras", 0)
    assert not other.unit_variance and not other.variance_preserving


def test_what_a_checkpoint_says_of_its_sampler_holds_for_that_sampler() -> None:
    unipc = scheduled("UniPCMultistep", solver_order=3, disable_corrector=[0])
    for changes in ({}, {"schedule": "karras"}):  # whatever the schedule
        options = run_of(unipc, **changes).options
        assert (options["order"], options["disable_corrector"]) == (3, (0,))
    assert "order" not in run_of(unipc, sampler="euler").options
    ddim = scheduled("DDIM", clip_sample=False)
    assert run_of(ddim, options={"eta": 0.5}).options["eta"] == 0.5  # the user's word goes first


def test_a_number_of_steps_that_the_checkpoints_own_scheduler_does_not_run() -> None:
    ddim = scheduled("DDIM", clip_sample=False, timestep_spacing="trailing")
    request = run_of(ddim).request.replace(steps=7)
    with pytest.raises(InputError, match="7 steps of DDIMScheduler"):
        plan_run(ddim, request)
    for changes in ({"sampler": "euler"}, {"schedule": "karras"}):  # it is not its own then
        assert plan_run(ddim, request.replace(**changes)).steps == 7


@pytest.mark.parametrize(
    ("sides", "size"), [((3, 20), (16, 8)), ((8, 7), (8, 8)), ((31, 32), (32, 24))]
)
def test_a_picture_has_the_size_of_its_image_in_whole_units(
    sides: tuple[int, int], size: tuple[int, int]
) -> None:
    latents = SimpleNamespace(multiple=8, largest=None, default=(64, 64))
    pipeline: Any = SimpleNamespace(latents=latents)
    image = np.zeros((*sides, 3), np.uint8)
    assert planning._size(pipeline, Request(), image) == size
    assert planning._size(pipeline, Request(), None) == (64, 64)
