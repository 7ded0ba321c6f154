"""What a run may not do: change a weight, depend on its neighbours, or differ from itself."""

import gc
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.device import current_device
from lydite.core.errors import ConfigError, FileError, InputError, NotFiniteError
from lydite.core.request import LONGEST_PROMPT, Request
from lydite.pipelines import planning
from lydite.pipelines.model_files import find_components
from lydite.pipelines.noise import MLXNoise, sampler_noise
from lydite.pipelines.observer import Debugger, FinishedStep, Observer, StepReporter
from lydite.pipelines.picture import Picture
from lydite.pipelines.pipeline import AHEAD, Pipeline
from lydite.pipelines.planning import MOST_FEATHER
from lydite.sampling.brownian import BrownianNoise
from lydite.sampling.noise import StreamRule
from lydite.sampling.program_conventions import CONVENTIONS
from lydite.sampling.registry import SAMPLERS
from lydite.weights.load import parameter_hash, parameters

REQUEST = Request("a red fox", steps=3, width=32, height=32, text_length=4)


@pytest.fixture(scope="module")
def pipeline(untrained: Path) -> Pipeline:
    return Pipeline.open(untrained)


def hashes(pipeline: Pipeline) -> dict[str, str]:
    return {
        name: parameter_hash(pipeline.model.network(name)) for name in pipeline.model.components
    }


def same(first: Picture, second: Picture) -> bool:
    return np.array_equal(first.pixels, second.pixels)


def test_no_weight_changes_over_images_previews_debugging_and_an_interruption(pipeline) -> None:
    before = hashes(pipeline)

    def interrupt(step: FinishedStep) -> None:
        if step.index == 1:
            raise KeyboardInterrupt

    lines: list[str] = []
    debugger = Debugger({"nan", "timing", "shapes"}, lines.append, "transformer")
    preview = StepReporter(lambda step: pipeline.decode(step.denoised) and None)
    list(pipeline.generate(REQUEST, [1]))
    list(pipeline.generate(REQUEST, [2], observer=preview))
    list(pipeline.generate(REQUEST, [3], observer=debugger))
    with pytest.raises(KeyboardInterrupt):
        list(pipeline.generate(REQUEST, [4], observer=StepReporter(interrupt)))
    assert hashes(pipeline) == before
    assert "peak memory" in debugger.summary(1.0)[-1]
    assert "the first" in debugger.summary(1.0)[0]
    assert any("step 2 latents" in line and "ms" in line for line in lines)


def test_the_hash_notices_one_bit(untrained: Path) -> None:
    pipeline = Pipeline.open(untrained)
    transformer = pipeline.model.network("transformer")
    before = parameter_hash(transformer)
    transformer["proj_out"]["bias"] = transformer["proj_out"]["bias"] + 1e-7
    assert parameter_hash(transformer) != before


def test_two_runs_are_bit_identical(pipeline, untrained: Path) -> None:
    first = list(pipeline.generate(REQUEST, [7, 8]))
    again = list(pipeline.generate(REQUEST, [7, 8]))
    fresh = list(Pipeline.open(untrained).generate(REQUEST, [7, 8]))
    assert all(map(same, first, again)) and all(map(same, first, fresh))
    assert not same(*first)


def test_an_image_does_not_depend_on_its_batch(pipeline) -> None:
    together = list(pipeline.generate(REQUEST, [1, 2, 3], batch=3))
    for picture in together:
        alone = next(pipeline.generate(REQUEST, [picture.seed]))
        off = np.abs(alone.pixels.astype(int) - picture.pixels.astype(int))
        assert off.max() <= 1 and off.mean() < 0.01  # to rounding


def test_low_memory_draws_the_same_and_keeps_nothing(pipeline, untrained: Path) -> None:
    frugal = Pipeline.open(untrained, low_memory=True)
    drawn = list(frugal.generate(REQUEST, [1, 2]))
    assert all(map(same, drawn, pipeline.generate(REQUEST, [1, 2])))
    assert frugal.model.loaded == ()


def test_low_memory_holds_one_network_at_a_time(untrained: Path) -> None:
    sizes = {
        name: sum(value.nbytes for value in parameters(component.load(mx.float32)).values())
        for name, component in find_components(untrained).items()
    }
    frugal = Pipeline.open(untrained, low_memory=True)
    gc.collect()  # networks of earlier tests, which would be freed while this one measures
    mx.clear_cache()
    before = mx.get_active_memory()
    held: dict[str, int] = {}

    class Memory(Observer):
        def observe(self, stage, value, *, name="", step=None, sigma=None):
            if isinstance(value, mx.array):
                mx.eval(value)
            held[name or stage] = mx.get_active_memory() - before
            return value

    gc.disable()  # a network must not wait for a collection
    try:
        list(frugal.generate(REQUEST, [1], observer=Memory()))
    finally:
        gc.enable()
    if current_device().kind != "cpu":
        pytest.skip("a GPU frees buffers when the work that reads them ends, not before")
    assert held["latents"] > sizes["transformer"]
    assert held["vae_input"] < sizes["vae"] + sizes["transformer"] / 2
    assert held["text_encoder_2"] < sizes["text_encoder_2"] + sizes["text_encoder"]


def test_low_memory_still_decodes_what_was_finished_before_ctrl_c(untrained: Path) -> None:
    frugal = Pipeline.open(untrained, low_memory=True)

    def interrupt(step: FinishedStep) -> None:
        if step.seeds == (2,):
            raise KeyboardInterrupt

    pictures = frugal.generate(REQUEST, [1, 2, 3], observer=StepReporter(interrupt))
    assert next(pictures).seed == 1
    with pytest.raises(KeyboardInterrupt):
        next(pictures)


def test_seeds_mean_torchs_noise_unless_mlx_is_asked_for(pipeline) -> None:
    torch_like = next(pipeline.generate(REQUEST, [1]))
    own = next(pipeline.generate(REQUEST.replace(noise="mlx"), [1]))
    again = next(pipeline.generate(REQUEST.replace(noise="mlx"), [1]))
    assert same(own, again) and not same(own, torch_like)


@pytest.mark.parametrize("place", ["sigmas", "timesteps", "noise", "conditioning", "prediction"])
def test_a_run_goes_on_with_what_an_observer_returns(pipeline, place: str) -> None:
    seen: list[float | None] = []

    class Change(Observer):
        def observe(self, stage, value, *, name="", step=None, sigma=None):
            if stage == "denoiser_input":
                seen.append(sigma)
            return value * 0.9 if stage == place else value

    plain = next(pipeline.generate(REQUEST, [1]))
    other = next(pipeline.generate(REQUEST, [1], observer=Change()))
    assert not same(plain, other)
    factor = 0.9 if place == "sigmas" else 1.0
    sigmas = pipeline.plan(REQUEST).schedule.sigmas[:-1] * factor
    assert seen == pytest.approx(sigmas.tolist(), rel=1e-12)


def test_nan_is_caught_where_it_appears(untrained: Path) -> None:
    pipeline = Pipeline.open(untrained)
    transformer = pipeline.model.network("transformer")
    transformer["proj_out"]["bias"] = mx.full(transformer["proj_out"]["bias"].shape, mx.nan)
    with pytest.raises(
        NotFiniteError, match=r"step 0 transformer uncond: 256 of 256 values are NaN"
    ):
        list(pipeline.generate(REQUEST, [1], observer=Debugger({"nan"}, print, "transformer")))


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [("transformer", "proj_out", "latents before the VAE"), ("vae", "decoder", "vae output")],
)
def test_what_is_not_finite_becomes_no_picture(
    untrained: Path, name: str, layer: str, message: str
) -> None:
    pipeline = Pipeline.open(untrained)
    module = pipeline.model.network(name)[layer]
    last = module if "bias" in module else module["conv_out"]
    last["bias"] = mx.full(last["bias"].shape, mx.inf)
    with pytest.raises(NotFiniteError, match=message) as caught:
        next(pipeline.generate(REQUEST, [1]))
    assert caught.value.exit_code == 1  # the numbers are wrong, not the input


def test_the_smallest_and_the_largest_size_are_planned(pipeline) -> None:
    run = pipeline.plan(REQUEST.replace(width=16, height=384))
    assert (run.request.width, run.request.height) == (16, 384)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 33}, "width is 33; expected a multiple of 16 from 16 to 384. The nearest is 32"),
        ({"height": 4096}, "height is 4096; .* The nearest is 384"),
        ({"width": 47}, "The nearest is 48"),
        ({"width": 3}, "The nearest is 16"),
        ({"negative": "a" * (LONGEST_PROMPT + 1)}, f"characters; at most {LONGEST_PROMPT}"),
        ({"prompt": "\udcff"}, "not valid Unicode"),
        ({"guidance": math.inf}, "guidance is inf"),
        ({"guidance_steps": (1.0, math.nan)}, "guidance is nan"),
        ({"guidance_rescale": 1.01}, "guidance_rescale is 1.01"),
        (
            {"sampler": "euler_ancestral", "options": {"eta": -0.1}},
            "option eta is -0.1; expected 0",
        ),
        ({"sampler": "euler_ancestral", "options": {"eta": 11.0}}, "option eta is 11.0"),
        ({"options": {"depth": 1.0}}, "sampler euler has no option 'depth'"),
        ({"steps": 0}, "steps is 0"),
        ({"schedule": "carrots"}, "there is no schedule 'carrots'"),
        ({"schedule": "beta"}, "schedule beta means beta_timesteps in ComfyUI"),
        ({"sampler": "oiler"}, "there is no sampler 'oiler'"),
        ({"convention": "mflux"}, "convention is 'mflux'; expected one of lydite"),
        ({"noise": "cuda"}, "noise is 'cuda'"),
        ({"text_length": 0}, "text_length is 0"),
        ({"clip_skip": 1}, "clip skip is not supported"),
        ({"feather": -1}, "feather is -1"),
        ({"feather": MOST_FEATHER + 1}, f"expected 0 to {MOST_FEATHER} pixels"),
        ({"weighting": "a1111"}, "weights in prompts are not supported"),
        ({"refine_from": 0.5}, "refine_from without a refiner"),
    ],
)
def test_bad_requests_name_the_option(pipeline, change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(pipeline.generate(REQUEST.replace(**change), [1]))


@pytest.mark.parametrize(
    ("name", "fits", "refused"),
    [
        ("text_length", (1, 4096), (0, 4097)),
        ("feather", (0, 1024), (-1, 1025)),
        ("guidance_rescale", (0.0, 1.0), (-0.001, 1.001)),
        ("guidance", (-100.0, 1e9), (math.inf, -math.inf, math.nan)),
        ("true_guidance", (0.0,), (math.inf, math.nan)),
        ("prompt", ("a" * 10_000, "\ud7ff"), ("a" * 10_001, "\ud800")),
        ("negative", ("a" * 10_000,), ("a" * 10_001, "\udfff")),
        ("weighting", (None,), ("", "A1111", "lydite")),
        ("noise", ("torch", "mlx"), ("", "cuda")),
        ("width", (16, 384), (0, -16, 8, 385, 400)),
        ("height", (16, 384), (0, -16, 8, 385, 400)),
        ("refine_from", (), (0.0, 1.0, -0.1, math.nan)),
    ],
)
def test_a_value_is_planned_up_to_its_limits(
    pipeline, name: str, fits: tuple, refused: tuple
) -> None:
    for value in fits:
        planned = pipeline.plan(REQUEST.replace(**{name: value})).request
        assert getattr(planned, name) == (None if name == "true_guidance" else value)
    for value in refused:
        with pytest.raises(InputError) as caught:
            pipeline.plan(REQUEST.replace(**{name: value}))
        assert ("prompt" if name == "negative" else name.split("_")[-1]) in str(caught.value)


LIMITS = {
    "eta": (0.0, 10.0), "s_noise": (0.0, 10.0), "gamma": (0.0, 10.0), "curvature": (0.0, 1.0),
    "r": (0.01, 1.0), "rtol": (1e-4, 1.0), "atol": (1e-4, 1.0),
}  # fmt: skip


def test_options_of_samplers_are_numbers_within_limits() -> None:
    assert planning.NUMBERS == LIMITS
    seen: set[str] = set()
    for sampler in SAMPLERS.values():
        for name in set(sampler.options) & set(LIMITS):
            seen.add(name)
            low, high = LIMITS[name]
            for value in (low, high):
                planning._check_numbers(sampler, {name: value})
            for value in (math.nextafter(low, -1), math.nextafter(high, 99), math.nan):
                with pytest.raises(InputError, match=f"option {name} is"):
                    planning._check_numbers(sampler, {name: value})
        for name in set(sampler.options) - set(LIMITS):
            with pytest.raises(InputError, match="that can be set here"):
                planning._check_numbers(sampler, {name: 1.0})
    assert seen == set(LIMITS)


def test_batches_masks_and_loras_that_cannot_be_used(pipeline, untrained: Path) -> None:
    image, mask = np.zeros((32, 32, 3), np.uint8), np.zeros((32, 32), np.uint8)
    with pytest.raises(InputError, match="batch is 0"):
        list(pipeline.generate(REQUEST, [1], batch=0))
    with pytest.raises(InputError, match="without an image"):
        pipeline.plan(REQUEST, None, mask)
    with pytest.raises(InputError, match="mask: expected a PIL image or an array"):
        pipeline.plan(REQUEST, image, mask[None])
    with pytest.raises(InputError, match="leave out --bits"):
        Pipeline.open(untrained, loras=[("a.safetensors", 1.0)], bits=4)
    pipeline.plan(REQUEST.replace(feather=MOST_FEATHER))


def test_a_plan_fills_in_what_the_checkpoint_says(pipeline) -> None:
    request = pipeline.plan(Request("a")).request
    assert (request.width, request.height, request.steps, request.guidance) == (128, 128, 28, 7.0)
    assert (request.sampler, request.schedule) == ("euler", "sd3_diffusers")
    assert request.text_length == 256 and request.strength is None


def test_the_checkpoints_scheduler_decides_without_being_asked(untrained, tmp_path) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shift": 1.0}))
    plain, shifted = (Pipeline.open(each).plan(REQUEST) for each in (folder, untrained))
    assert plain.schedule.sigmas[1] < shifted.schedule.sigmas[1]


def test_the_schedule_is_made_once_for_a_picture(untrained, monkeypatch) -> None:
    made: list[object] = []
    plan_schedule = planning.plan_schedule
    monkeypatch.setattr(
        planning, "plan_schedule", lambda *a, **k: made.append(a) or plan_schedule(*a, **k)
    )
    pipeline = Pipeline.open(untrained)
    list(pipeline.generate(pipeline.plan(REQUEST), [1, 2], batch=1))
    assert len(made) == 1


def test_a_checkpoint_may_say_how_it_is_meant_to_be_run(untrained, tmp_path) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    (folder / "lydite.json").write_text('{"steps": 5, "guidance": 2.5}')
    request = Pipeline.open(folder).plan(Request("a")).request
    assert (request.steps, request.guidance, request.text_length) == (5, 2.5, 256)
    (folder / "lydite.json").write_text('{"steps": 5, "colour": 2.5}')
    with pytest.raises(ConfigError, match="colour"):
        Pipeline.open(folder)


@pytest.mark.parametrize(
    "name", ["steps", "guidance", "width", "height", "text_length", "strength", "refine_from"]
)
def test_0_is_planned_or_refused_and_never_the_models_own_value(pipeline, name: str) -> None:
    image = np.zeros((32, 32, 3), np.uint8) if name == "strength" else None
    try:
        planned = pipeline.plan(REQUEST.replace(**{name: 0}), image).request
    except InputError as error:
        assert re.search(r"\b0\b", str(error))
    else:
        assert getattr(planned, name) == 0


@pytest.mark.parametrize("strength", [0.0, 1.5, float("nan")])
def test_a_strength_outside_0_to_1_is_refused(pipeline, strength: float) -> None:
    with pytest.raises(InputError, match="strength is"):
        pipeline.plan(REQUEST.replace(strength=strength), np.zeros((32, 32, 3), np.uint8))


def test_a_photo_that_is_too_large_is_named_with_a_size_that_fits(pipeline) -> None:
    with pytest.raises(InputError, match=r"the image is 800×400; .* Add --size 384x192"):
        pipeline.plan(Request("a"), np.zeros((400, 800, 3), np.uint8))


def test_img2img_takes_the_size_of_its_image(pipeline) -> None:
    request = pipeline.plan(Request("a"), np.zeros((50, 39, 3), np.uint8)).request
    assert (request.width, request.height) == (32, 48)
    tiny = pipeline.plan(Request("a"), np.zeros((5, 39, 3), np.uint8)).request
    assert (tiny.width, tiny.height) == (32, 16)


def test_what_is_not_read_of_a_prompt_is_said_of_encoders_that_count(pipeline, monkeypatch) -> None:
    plan = pipeline.plan(Request("a " * 80 + "quiet fox"))
    notes = pipeline.truncated(plan)
    assert [note.split(" reads 77 tokens")[0] for note in notes] == [
        "text_encoder",
        "text_encoder_2",
    ]
    assert all(note.endswith("quiet fox'") or note.endswith("quiet fox") for note in notes)
    monkeypatch.setattr(
        pipeline, "defaults", replace(pipeline.defaults, untrained=("text_encoder_2",))
    )
    assert pipeline.truncated(plan) == notes[:1]
    assert pipeline.truncated(pipeline.plan(Request("a fox"))) == []
    weighted = replace(plan, request=plan.request.replace(prompt="(a:1.2) " * 80 + "[quiet] fox"))
    assert "1.2" in pipeline.truncated(weighted)[0]
    weighted = replace(weighted, request=weighted.request.replace(weighting="a1111"))
    assert pipeline.truncated(weighted)[0].endswith("a a a quiet fox'")


def test_a_tokenizer_of_another_model_is_refused(untrained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    path = folder / "tokenizer" / "vocab.json"
    vocabulary = json.loads(path.read_text())
    vocabulary["extra</w>"] = len(vocabulary)
    swapped = {token: index for token, index in vocabulary.items()}
    swapped["<|endoftext|>"], swapped["extra</w>"] = len(vocabulary) - 1, len(vocabulary) - 2
    path.write_text(json.dumps(swapped))
    with pytest.raises(ConfigError, match="belongs to another model"):
        list(Pipeline.open(folder).generate(REQUEST, [1]))


@pytest.mark.parametrize("part", ["vae", "text_encoder_2", "transformer", "tokenizer", "scheduler"])
def test_a_missing_part_is_named(untrained: Path, tmp_path: Path, part: str) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    shutil.rmtree(folder / part)
    with pytest.raises(FileError, match=part):
        Pipeline.open(folder)


def test_the_vae_runs_in_float32_where_float16_would_overflow(untrained: Path) -> None:
    half = Pipeline.open(untrained, dtype="float16").model
    assert half.dtype_of("transformer") == mx.float16
    vae = half.network("vae")
    assert vae.decoder.conv_in.weight.dtype == mx.float32


def test_fresh_noise_of_the_sampler_has_a_seed_of_its_own() -> None:
    rule = StreamRule(delta=3)
    noise = MLXNoise([5], (4, 2, 2), rule)
    first = noise.first()
    assert mx.array_equal(first, MLXNoise([5], (4, 2, 2)).first())
    assert mx.array_equal(noise(1.0, 0.5), MLXNoise([8], (4, 2, 2)).first())
    again = MLXNoise([5], (4, 2, 2), StreamRule(delta=0))
    assert mx.array_equal(again.first(), again(1.0, 0.5)) and not mx.array_equal(first, again(1, 0))
    below, above = (MLXNoise([seed], (4, 2, 2)).first() for seed in (-1, 2**64 - 1))
    assert mx.array_equal(below, above)  # as in torch
    assert not mx.array_equal(first, MLXNoise([5 + 2**32], (4, 2, 2)).first())


def test_noise_of_each_image_or_of_the_whole_batch() -> None:
    seeds, shape = [5, 6, 7], (4, 2, 3)
    own, whole = MLXNoise(seeds, shape), MLXNoise(seeds, shape, StreamRule(batch="whole"))
    for _ in range(2):  # the first noise, and what follows
        ours, theirs = own.first(), whole.first()
        assert ours.shape == theirs.shape == (3, 2, 3, 4)
        assert not mx.array_equal(ours[:1], ours[1:2])
        assert not mx.array_equal(theirs[:1], theirs[1:2])
    alone = MLXNoise([6], shape)
    assert mx.array_equal(alone.first(), MLXNoise(seeds, shape).first()[1:2])
    other = MLXNoise([5, 0, 0], shape, StreamRule(batch="whole"))  # of the first seed alone
    assert mx.array_equal(other.first(), MLXNoise(seeds, shape, StreamRule(batch="whole")).first())


@pytest.mark.parametrize(
    ("kind", "convention", "source"),
    [
        ("none", "lydite", "nothing"),
        ("stream", "lydite", "run"),
        ("path", "lydite", "path"),
        ("path", "diffusers", "run"),
        ("none", "diffusers", "nothing"),
    ],
)
def test_where_a_samplers_noise_comes_from(kind, convention: str, source: str) -> None:
    run = MLXNoise([1], (4, 2, 2))
    found = sampler_noise(kind, CONVENTIONS[convention], [1], (4, 2, 2), run)
    kinds = {"nothing": found is None, "run": found is run}
    assert kinds | {"path": isinstance(found, BrownianNoise)} == {
        name: name == source for name in ("nothing", "run", "path")
    }


def test_tokenizers_of_two_lengths_are_one_clear_error(untrained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(untrained, tmp_path / "model"))
    path = folder / "tokenizer_2" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 7}))
    with pytest.raises(ConfigError, match="model_max_length"):
        next(Pipeline.open(folder).generate(REQUEST, [1]))


def test_buffers_in_flight_are_bounded_on_cuda_and_the_limit_is_given_back(
    pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = list(pipeline.generate(REQUEST, [7]))
    limits = [10**15]

    def set_memory_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    monkeypatch.setenv("LYDITE_GPU_BRANCHES", "1")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_memory_limit", set_memory_limit)
    (picture,) = pipeline.generate(REQUEST, [7])
    assert len(limits) == 5 and limits[2] == limits[4] == 10**15  # of the steps, of the decoder
    assert all(AHEAD <= limit < 10**15 for limit in limits[1::2])
    limits[:] = [10]  # the user's own is lower: it stays
    with pipeline._few_buffers(2**22):
        assert limits[-1] == 10
    assert limits[1] >= 2 * 4 * AHEAD and limits[2:] == [10, 10]  # float32, four times the pixels
    assert np.abs(picture.pixels.astype(int) - plain[0].pixels).max() <= 1
