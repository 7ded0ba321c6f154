"""Z-Image through the pipeline against diffusers: same folder, same seeds, every pixel."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.request import Request
from lydite.pipelines.pipeline import Pipeline
from support import tiny_z_image
from support.against_diffusers import (
    calibrate,
    draw_port,
    draw_reference,
    guidance,
    load_reference,
    off_by,
    parity,
    run,
)
from support.distance import relative_l2

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

REQUEST = Request(prompt="a red star", steps=3, width=32, height=48)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_z_image.make_pipeline(tmp_path_factory.mktemp("z_image") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference("ZImagePipeline", folder)


def test_every_pixel_is_within_one_level(folder: Path, reference: Any) -> None:
    pipeline = Pipeline.open(folder)
    pictures: list[np.ndarray] = []
    for size, changes in (
        ((32, 48), {}),
        ((64, 40), {"prompt": "the fox of snow in a blue ring " * 6, "steps": 4}),
        ((32, 48), {"guidance": 0.5}),  # unlike in other families, on above 0
        ((48, 48), {"guidance": 3.0, "negative": "the star in the blue snow " * 3}),
        ((16, 80), {"prompt": ""}),
    ):
        request = REQUEST.replace(width=size[0], height=size[1], **changes)
        request = pipeline.plan(request).request
        image = draw_reference(reference, request, 7, **guidance(request))
        pictures.append(draw_port(pipeline, request, 7))
        assert off_by(pictures[-1], image) <= 1, changes
    assert not np.array_equal(pictures[0], pictures[2])
    assert (pipeline.defaults.steps, pipeline.defaults.guidance) == (8, 0.0)


@pytest.mark.parametrize("strength", [0.4, 1.0])
def test_img2img_means_what_it_means_in_diffusers(
    folder: Path, reference: Any, strength: float
) -> None:
    from diffusers import ZImageImg2ImgPipeline
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    other = ZImageImg2ImgPipeline(**reference.components)
    other.set_progress_bar_config(disable=True)
    pipeline = Pipeline.open(folder)
    request = pipeline.plan(REQUEST.replace(strength=strength, steps=5), pixels).request
    options = {"image": Image.fromarray(pixels), "strength": strength, **guidance(request)}
    image = draw_reference(other, request, 5, **options)
    assert off_by(draw_port(pipeline, request, 5, image=pixels), image) <= 1


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_inpainting_means_what_it_means_in_diffusers(
    folder: Path, reference: Any, strength: float
) -> None:
    from diffusers import ZImageInpaintPipeline
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    mask = np.zeros((48, 32), np.uint8)
    mask[8:32, 8:24] = 255
    other = ZImageInpaintPipeline(**reference.components)
    other.set_progress_bar_config(disable=True)
    pipeline = Pipeline.open(folder)
    request = pipeline.plan(REQUEST.replace(strength=strength, steps=5), pixels, mask).request
    images = {"image": Image.fromarray(pixels), "mask_image": Image.fromarray(mask)}
    image = draw_reference(other, request, 5, **images, strength=strength, **guidance(request))
    assert off_by(draw_port(pipeline, request, 5, image=pixels, mask=mask), image) <= 1


@pytest.mark.parametrize("prompt", ["", "🦊 {red} [blue]", "一只红色的狐狸", "star " * 600])
def test_text_features_and_what_is_cut_off(folder: Path, reference: Any, prompt: str) -> None:
    pipeline = Pipeline.open(folder)
    plan = pipeline.plan(REQUEST.replace(prompt=prompt))
    with torch.no_grad():
        (text,), _ = reference.encode_prompt(prompt, do_classifier_free_guidance=False)
    features = pipeline.encode(plan)["text"]
    assert features.shape == (1, *text.shape)
    assert relative_l2(features[0], text) < 1e-5
    assert bool(pipeline.truncated(plan)) == (len(prompt) > 2500)


def test_parity_agrees(folder: Path) -> None:
    verdict = parity(folder, "a red star", "--size", "32x48", "--steps", 2)
    assert verdict["verdict"] == "agree", verdict["sentence"]
    values = {each["name"]: each["values"] for each in verdict["components"]}
    assert values["transformer"] > 300 and values["text_encoder"] > 80


def test_parity_of_runs_that_start_from_an_image(folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    options = ("--image", tmp_path / "image.png", "--strength", 0.5, "--steps", 4)
    options += ("--guidance", 0.5)  # on, unlike in other families
    verdict = parity(folder, "a red star", *options)
    assert verdict["verdict"] == "agree", verdict["sentence"]


def test_it_is_audited_calibrated_and_fits(folder: Path, tmp_path: Path) -> None:
    assert run("audit", folder).exit_code == 0
    assert calibrate(folder, tmp_path, "--size", "32x32") == {"sample": 4}
    pipeline = Pipeline.open(folder, low_memory=True, bits=8)
    request = REQUEST.replace(guidance=2.0)
    together = [picture.pixels for picture in pipeline.generate(request, [1, 2], batch=2)]
    assert pipeline.model.loaded == ()
    whole = draw_port(Pipeline.open(folder), request, 2)
    assert np.abs(together[1].astype(int) - whole.astype(int)).mean() < 3
