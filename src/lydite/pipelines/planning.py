"""What a run will do: a request completed with the checkpoint's own values, and checked.

Nothing is loaded. `Pipeline.plan` calls these in turn; every message names the option to change.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lydite.core.errors import InputError, first_of, is_unicode, shown
from lydite.core.request import LONGEST_PROMPT, Request
from lydite.pipelines.family import Run, families
from lydite.pipelines.inpainting import Mask, fit_mask
from lydite.pipelines.noise import NOISES
from lydite.pipelines.picture import Pixels, pixel_hash, resize
from lydite.pipelines.prompt_weights import PARSERS, plain_text
from lydite.sampling.denoiser import over_steps
from lydite.sampling.program_conventions import (
    Convention,
    find_convention,
    has_unit_variance,
    options_of,
    plan_schedule,
)
from lydite.sampling.registry import SAMPLERS, Sampler, find_sampler
from lydite.sampling.schedules.schedule import ModelSigmas, Schedule, from_step

if TYPE_CHECKING:
    from lydite.pipelines.pipeline import Pipeline

T = TypeVar("T")
MOST_TOKENS = 4096  # of T5, which learnt on 512
MOST_FEATHER = 1024
REFINE_FROM = 0.8  # as in diffusers' example
# The options of samplers that are plain numbers, from and to.
NUMBERS = {
    "eta": (0.0, 10.0),
    "s_noise": (0.0, 10.0),
    "gamma": (0.0, 10.0),
    "curvature": (0.0, 1.0),
    "r": (0.01, 1.0),
    "rtol": (1e-4, 1.0),
    "atol": (1e-4, 1.0),
}


def check_inputs(pipeline: "Pipeline", image: Pixels | None, mask: Mask | None) -> None:
    needs = pipeline.family.needs(pipeline.model)
    if image is None and "image" in needs:
        raise InputError(
            f"{pipeline.name}: this model draws {'into' if 'mask' in needs else 'over'} an image; "
            f"add --image FILE{' and --mask FILE' if 'mask' in needs else ''}."
        )
    if mask is None and "mask" in needs:
        raise InputError(f"{pipeline.name}: this model draws under a mask; add --mask FILE.")
    if mask is not None and image is None:
        raise InputError("a mask without an image; add --image FILE.")
    if mask is not None and not pipeline.family.inpaints:
        able = ", ".join(family.title for family in families() if family.inpaints)
        raise InputError(f"{pipeline.family.title}: inpainting is not supported; it is for {able}.")


def complete(
    pipeline: "Pipeline", request: Request, image: Pixels | None, mask: Mask | None
) -> Request:
    """The request with the checkpoint's own values where it has none, checked."""
    _check_values(request)
    _check_abilities(pipeline, request, image)
    defaults, scheduler = pipeline.defaults, pipeline.scheduler
    width, height = _size(pipeline, request, image)
    usual_strength = defaults.strength if mask is None else defaults.mask_strength
    starts = image is not None and pipeline.family.image != "reference"
    true_guidance = pipeline.family.guidance == "distilled" and bool(request.negative)
    refine_from = None if pipeline.refiner is None else REFINE_FROM
    return request.replace(
        steps=_or(request.steps, defaults.steps),
        guidance=_or(request.guidance, defaults.guidance),
        true_guidance=_or(request.true_guidance, defaults.true_guidance) if true_guidance else None,
        width=width,
        height=height,
        sampler=request.sampler or scheduler.sampler,
        schedule=request.schedule or scheduler.schedule,
        text_length=_or(request.text_length, defaults.text_length),
        strength=_or(request.strength, usual_strength) if starts else None,
        refine_from=_or(request.refine_from, refine_from),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_values(request: Request) -> None:
    """What no model takes."""
    if request.weighting not in (None, *PARSERS):
        raise InputError(
            f"weighting is {request.weighting!r:.60}; expected one of {', '.join(PARSERS)}."
        )
    for text in (request.prompt, request.negative or ""):
        if not is_unicode(text):
            raise InputError(f"the prompt {shown(text)} is not valid Unicode.")
        if len(text) > LONGEST_PROMPT:
            raise InputError(
                f"the prompt {shown(text)} has {len(text)} characters; at most {LONGEST_PROMPT}."
            )
        if request.weighting is not None:
            plain_text(text, request.weighting)  # what cannot be read is refused now
    if request.noise not in NOISES:
        raise InputError(f"noise is {request.noise!r}; expected one of {', '.join(NOISES)}.")
    if not 0 <= request.feather <= MOST_FEATHER:
        raise InputError(f"feather is {request.feather}; expected 0 to {MOST_FEATHER} pixels.")
    if request.refine_from is not None and not 0 < request.refine_from < 1:
        raise InputError(f"refine_from is {request.refine_from}; expected between 0 and 1.")
    if request.text_length is not None and not 1 <= request.text_length <= MOST_TOKENS:
        raise InputError(f"text_length is {request.text_length}; expected 1 to {MOST_TOKENS}.")
    for scale in (request.guidance, request.true_guidance, *request.guidance_steps):
        if scale is not None and not isfinite(scale):
            raise InputError(f"guidance is {scale}; expected a finite number.")
    if not 0 <= request.guidance_rescale <= 1:
        raise InputError(f"guidance_rescale is {request.guidance_rescale}; expected 0 to 1.")


def _check_abilities(pipeline: "Pipeline", request: Request, image: Pixels | None) -> None:
    """What this model or its family does not take."""
    family = pipeline.family
    if family.image == "reference" and image is not None and request.strength is not None:
        raise InputError(
            f"{family.title} is shown the image in every step, without a strength; leave out "
            "--strength."
        )
    if request.weighting is not None and not family.weighs_prompts:
        raise InputError(f"{family.title}: weights in prompts are not supported.")
    if request.clip_skip is not None and not family.skips_layers:
        raise InputError(f"{family.title}: clip skip is not supported.")
    if pipeline.refiner is None and request.refine_from is not None:
        raise InputError("refine_from without a refiner; add --refiner MODEL.")
    if family.guidance == "distilled" and request.guidance_steps:
        raise InputError(f"{family.title} takes one guidance for all steps.")
    guided = max(request.guidance or 0.0, *request.guidance_steps, 0.0) > 1
    if not pipeline.defaults.guided and (guided or request.negative):
        raise InputError(
            f"{pipeline.name}: this model is distilled to run without guidance. Leave out "
            "--guidance and --negative."
        )


def _size(pipeline: "Pipeline", request: Request, image: Pixels | None) -> tuple[int, int]:
    unit, largest = pipeline.latents.multiple, pipeline.latents.largest
    width, height = pipeline.latents.default
    if image is not None:
        height, width = (max(side - side % unit, unit) for side in image.shape[:2])
    sides = {"width": _or(request.width, width), "height": _or(request.height, height)}
    for name, side in sides.items():
        if side % unit or side < unit or (largest is not None and side > largest):
            raise InputError(_size_message(pipeline, name, side, request, image))
    return sides["width"], sides["height"]


def _size_message(
    pipeline: "Pipeline", name: str, side: int, request: Request, image: Pixels | None
) -> str:
    unit, largest = pipeline.latents.multiple, pipeline.latents.largest
    limit = f" to {largest}" if largest else ""
    if image is not None and getattr(request, name) is None and largest:
        scale = min(largest / max(image.shape[:2]), 1.0)
        fit = "x".join(
            str(max(int(length * scale) // unit, 1) * unit) for length in image.shape[1::-1]
        )
        return (
            f"the image is {image.shape[1]}×{image.shape[0]}; this model draws up to "
            f"{largest}×{largest}. Add --size {fit}."
        )
    near = max(round(side / unit), 1) * unit
    near = min(near, largest) if largest else near
    return (
        f"{name} is {side}; expected a multiple of {unit} from {unit}{limit}. "
        f"The nearest is {near}."
    )


def plan_run(
    pipeline: "Pipeline",
    request: Request,
    image: Pixels | None = None,
    mask: Mask | None = None,
    *,
    first: int = 0,
) -> Run:
    """Of a completed request. A refiner starts at step `first`."""
    assert request.sampler and request.schedule and request.steps is not None
    assert request.width and request.height and request.guidance is not None
    convention, sampler = find_convention(request.convention), find_sampler(request.sampler)
    sampler.check_noise_model(pipeline.scheduler.prediction.noise_model)
    _check_numbers(sampler, request.options)
    tokens = pipeline.latents.tokens(request.width, request.height)
    levels = pipeline.scheduler.levels(tokens, request.steps)
    # What the checkpoint itself says holds where its own sampler or schedule is used.
    own_sampler = request.sampler == pipeline.scheduler.sampler
    own_schedule = request.schedule == pipeline.scheduler.schedule
    schedule, late = _make_schedule(pipeline, request, convention, levels, first)
    scale, scales = _guidance_scales(pipeline, request)
    strength = over_steps(
        schedule.sigmas.tolist(), scale, scales=scales, share=request.guidance_interval
    )
    return Run(
        request=request,
        schedule=schedule,
        sampler=sampler,
        options={
            **options_of(convention, schedule, sampler),
            **(pipeline.scheduler.sampler_options if own_sampler else {}),
            **late,
            **request.options,
        },
        convention=convention,
        prediction=pipeline.scheduler.prediction,
        strength=strength,
        guidance=pipeline.family.guidance,
        is_guided=max(scales or (scale,)) > 1 or sampler.pair,
        unit_variance=(own_schedule and pipeline.scheduler.unit_variance)
        or has_unit_variance(convention, schedule, levels),
        variance_preserving=own_schedule and pipeline.scheduler.variance_preserving,
        shape=pipeline.latents.shape(request.width, request.height),
        image=None if image is None else resize(image, request.width, request.height),
        image_hash=None if image is None else pixel_hash(image),
        mask=None
        if mask is None
        else fit_mask(mask, request.width, request.height, request.feather),
        mask_hash=None if mask is None else pixel_hash(mask),
    )


def _make_schedule(
    pipeline: "Pipeline", request: Request, convention: Convention, levels: ModelSigmas, first: int
) -> tuple[Schedule, Mapping[str, Any]]:
    """The schedule, and options for a sampler that starts after the first of its steps."""
    assert request.sampler and request.schedule and request.steps is not None
    scheduler = pipeline.scheduler
    own_schedule = request.schedule == scheduler.schedule
    own = own_schedule and request.sampler == scheduler.sampler
    if own:
        scheduler.check_steps(request.steps)
    make = partial(
        plan_schedule,
        convention,
        sampler=request.sampler,
        schedule=request.schedule,
        steps=request.steps,
        model=levels,
        meaning=pipeline.family.strength,
        final=scheduler.final if own_schedule else None,
        own_timesteps=own,
        **(scheduler.schedule_options if own_schedule else {}),
    )
    schedule = make(strength=1.0 if request.strength is None else request.strength)
    late: Mapping[str, Any] = {}
    if own and convention.strength in (None, "diffusers"):
        whole = schedule if request.strength is None else make()
        skipped = len(whole.timesteps) - len(schedule.timesteps)
        schedule, late = scheduler.start_late(whole, skipped)
    if first and own:
        return scheduler.start_late(schedule, scheduler.position(first))
    return (from_step(schedule, first) if first else schedule), late


def _guidance_scales(pipeline: "Pipeline", request: Request) -> tuple[float, tuple[float, ...]]:
    """The scale of classifier-free guidance, and one for each step where they differ."""
    kind, scales = pipeline.family.guidance, request.guidance_steps
    if kind in ("negative", "distilled") and not request.negative:
        return 1.0, ()
    if kind == "distilled":
        return request.true_guidance or 1.0, ()
    above = 1.0 if kind == "above_0" else 0.0
    return above + (request.guidance or 0.0), tuple(above + scale for scale in scales)


def check_refiner(pipeline: "Pipeline", refiner: "Pipeline") -> None:
    """Only a model with the same latents can go on where another stops."""
    ours, theirs = pipeline.latents, refiner.latents
    if not pipeline.family.refines or refiner.family is not pipeline.family:
        raise InputError(
            f"{refiner.name}: {refiner.family.title} cannot refine {pipeline.family.title}; "
            "supported is Stable Diffusion XL with Stable Diffusion XL."
        )
    if "mask" in refiner.family.needs(refiner.model):
        raise InputError(f"{refiner.name}: a model that takes a mask is no refiner.")
    if (ours.channels, ours.factor) != (theirs.channels, theirs.factor):
        raise InputError(f"{refiner.name}: its latents are not those of {pipeline.name}.")


def hand_over(pipeline: "Pipeline", run: Run, refiner: "Pipeline") -> Run:
    """The run without its last steps, with a run of the refiner for these.

    As diffusers' `denoising_end` and `denoising_start`: by the share of the timesteps that the
    models were trained on. Every step is whole; diffusers stops within a step of Heun and
    within PNDM's first.
    """
    request, steps = run.request, len(run.schedule.timesteps)
    assert request.refine_from is not None and request.steps is not None
    if run.mask is not None:
        raise InputError("inpainting with a refiner is not supported; leave out --refiner.")
    trained = len(pipeline.scheduler.levels(0, request.steps).levels)
    cutoff = round(trained - request.refine_from * trained)
    stop = int((run.schedule.timesteps >= cutoff).sum())
    if not 0 < stop < steps:
        raise InputError(
            f"refine_from is {request.refine_from:g}: {stop} of the {steps} steps come before "
            "it; expected at least one before and one after it."
        )
    whole = request.replace(strength=None, guidance_steps=(), guidance_interval=(0.0, 1.0))
    refining = plan_run(refiner, whole, first=request.steps - (steps - stop))
    if not np.array_equal(refining.schedule.sigmas, run.schedule.sigmas[stop:]):
        raise InputError(
            f"{refiner.name}: its schedule of {request.steps} steps is not that of "
            f"{pipeline.name}, so it cannot go on where that model stops."
        )
    refining = replace(
        refining, request=request, strength=run.strength, is_guided=run.is_guided, first=stop
    )
    return replace(run, stop=stop, refining=refining)


def _check_numbers(sampler: Sampler, options: Mapping[str, float]) -> None:
    """Only numbers can be set here: some options of a sampler are none."""
    known = [name for name in sampler.options if name in NUMBERS]
    for name, value in options.items():
        if name not in known:
            has = [f"it has {', '.join(known) or 'none'}"] if known or name not in NUMBERS else []
            if name in NUMBERS:
                others = [each for each in SAMPLERS if name in SAMPLERS[each].options]
                has.append(f"samplers that have it: {first_of(others, 6)}")
            raise InputError(
                f"sampler {sampler.name} has no option {name!r:.60} that can be set here; "
                f"{'; '.join(has)}."
            )
        low, high = NUMBERS[name]
        if not low <= value <= high:
            raise InputError(f"option {name} is {value}; expected {low:g} to {high:g}.")
