"""SDXL's base model and its refiner in one run, against diffusers' two pipelines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.core.request import Request
from lydite.pipelines.memory import estimate
from lydite.pipelines.picture import read_pixels, read_record
from lydite.pipelines.pipeline import Pipeline
from support import tiny_sd
from support.against_diffusers import load_reference, off_by, run

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity
REQUEST = Request(
    prompt="a red star", negative="fox", steps=5, guidance=4.0, width=48, height=40, refine_from=0.6
)
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)


def draw_reference(
    request: Request, seed: int, base: Any, refiner: Any, **given: Any
) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    common: dict[str, Any] = {
        "prompt": request.prompt,
        "negative_prompt": request.negative or None,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "generator": generator,
    }
    size = {} if given else {"width": request.width, "height": request.height}
    latents = base(
        **common, **size, **given, denoising_end=request.refine_from, output_type="latent"
    ).images
    return refiner(
        **common, image=latents, denoising_start=request.refine_from, output_type="np"
    ).images[0]


SCHEDULERS = {
    "EulerDiscreteScheduler": {},
    "DDIMScheduler": {"clip_sample": False, "set_alpha_to_one": False},  # latents of unit variance
    "EulerAncestralDiscreteScheduler": {},  # goes on with the same random numbers
    "DPMSolverMultistepScheduler": {},  # its last step is the refiner's
    "PNDMScheduler": {"skip_prk_steps": True},  # lists a timestep twice
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_pictures_are_as_of_two_pipelines(sd_folder: Any, scheduler: str, tmp_path: Path) -> None:
    import diffusers

    theirs: dict[str, Any] = {}
    for variant, task in (("sdxl", ""), ("sdxl-refiner", "Img2Img")):
        pipeline = load_reference(f"StableDiffusionXL{task}Pipeline", sd_folder(variant))
        kind, changes = getattr(diffusers, scheduler), SCHEDULERS[scheduler]
        pipeline.scheduler = kind.from_config(pipeline.scheduler.config, **changes)
        pipeline.save_pretrained(tmp_path / variant)
        theirs["refiner" if task else "base"] = pipeline
    ours = Pipeline.open(tmp_path / "sdxl", refiner=tmp_path / "sdxl-refiner")
    first, second = ours.generate(REQUEST, (1, 5), batch=2)
    assert off_by(first.pixels, draw_reference(REQUEST, 1, **theirs)) <= 1
    assert off_by(second.pixels, draw_reference(REQUEST, 5, **theirs)) <= 1
    early = REQUEST.replace(negative="", refine_from=0.4)
    other = next(ours.generate(early, [1]))
    assert off_by(other.pixels, draw_reference(early, 1, **theirs)) <= 1
    assert np.abs(other.pixels.astype(int) - first.pixels).max() > 10  # the refiner shows
    plan = ours.plan(REQUEST)
    assert plan.steps + (plan.refining.steps if plan.refining else 0) == plan.all_steps == 5


def test_img2img_is_refined_too(sd_folder: Any) -> None:
    from PIL import Image

    base = load_reference("StableDiffusionXLImg2ImgPipeline", sd_folder("sdxl"))
    refiner = load_reference("StableDiffusionXLImg2ImgPipeline", sd_folder("sdxl-refiner"))
    request = REQUEST.replace(strength=0.8, width=None, height=None)
    image = draw_reference(request, 1, base, refiner, image=Image.fromarray(PIXELS), strength=0.8)
    ours = Pipeline.open(sd_folder("sdxl"), refiner=sd_folder("sdxl-refiner"))
    assert off_by(next(ours.generate(request, [1], image=PIXELS)).pixels, image) <= 1


def test_the_networks_of_both_are_loaded_in_turn(sd_folder: Any) -> None:
    plain = Pipeline.open(sd_folder("sdxl"), refiner=sd_folder("sdxl-refiner"))
    frugal = Pipeline.open(sd_folder("sdxl"), refiner=sd_folder("sdxl-refiner"), low_memory=True)
    assert plain.refiner and frugal.refiner
    seeds, loaded = (3, 4, 5), set[tuple[str, ...]]()
    expected = [picture.pixels for picture in plain.generate(REQUEST, seeds, batch=2)]
    states = frugal.denoise(frugal.plan(REQUEST), seeds, batch=2)
    for _ in states:
        loaded.add((*frugal.model.loaded, *(f"2 {name}" for name in frugal.refiner.model.loaded)))
    assert loaded == {("2 unet",)}
    pictures = [picture.pixels for picture in frugal.generate(REQUEST, seeds, batch=2)]
    assert all(np.array_equal(a, b) for a, b in zip(pictures, expected, strict=True))
    both, alone = estimate(plain, plain.plan(REQUEST)), estimate(plain.refiner, plain.plan(REQUEST))
    assert both.together > alone.together and both.in_turn < alone.together


def test_the_command_line_and_its_replay(sd_folder: Any, tmp_path: Path) -> None:
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    models = ("-m", sd_folder("sdxl"), "--refiner", sd_folder("sdxl-refiner"))
    given = ("--steps", 5, "--size", "32x32", "-s", 3, "-q", "--record-paths", "--preview", 2)
    assert run("generate", "a red star", *models, *given, "-o", first).exit_code == 0
    record = read_record(first)
    assert record.refiner == str(sd_folder("sdxl-refiner")) and record.request.refine_from == 0.8
    assert {path.stem for path in tmp_path.glob("first_*")} == {"first_step002", "first_step004"}
    assert run("generate", "--from", first, "-o", again, "-q").exit_code == 0
    assert np.array_equal(read_pixels(first), read_pixels(again))
    other = ("--refiner", sd_folder("sdxl"), "-o", tmp_path / "other.png", "-q")
    assert run("generate", "--from", first, *other).exit_code == 0  # any SDXL model may go on
    assert not np.array_equal(read_pixels(first), read_pixels(tmp_path / "other.png"))


def test_what_cannot_be_refined_is_said(sd_folder: Any, tmp_path: Path) -> None:
    ours = Pipeline.open(sd_folder("sdxl"), refiner=sd_folder("sdxl-refiner"))
    for changes, message in (
        ({"refine_from": 0.01}, "steps come before"),
        ({"refine_from": 1.5}, "between 0 and 1"),
    ):
        with pytest.raises(InputError, match=message):
            ours.plan(REQUEST.replace(**changes))
    with pytest.raises(InputError, match="own steps"):
        next(ours.generate(REQUEST.replace(sampler="dpm_fast"), [1]))
    with pytest.raises(InputError, match="inpainting"):
        ours.plan(REQUEST, PIXELS, PIXELS[..., 0])
    with pytest.raises(InputError, match="without a refiner"):
        Pipeline.open(sd_folder("sdxl")).plan(REQUEST)
    with pytest.raises(InputError, match="cannot refine"):
        Pipeline.open(sd_folder("sdxl"), refiner=sd_folder("sd1"))
    other = tiny_sd.make_pipeline(tmp_path / "refiner", "sdxl-refiner")
    config = other / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace('"steps_offset": 1', '"steps_offset": 0'))
    with pytest.raises(InputError, match="is not that of"):
        Pipeline.open(sd_folder("sdxl"), refiner=other).plan(REQUEST)
