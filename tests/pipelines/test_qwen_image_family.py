"""Qwen-Image through the pipeline against diffusers: same folder, same seeds, every pixel."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError
from lydite.core.request import Request
from lydite.pipelines.families.qwen_image import guide
from lydite.pipelines.pipeline import Pipeline
from support import tiny_qwen_image
from support.against_diffusers import (
    calibrate,
    draw_port,
    draw_reference,
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
    return tiny_qwen_image.make_pipeline(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference("QwenImagePipeline", folder)


def guidance(request: Request) -> dict[str, Any]:
    if not request.negative:
        return {}
    return {"negative_prompt": request.negative, "true_cfg_scale": request.guidance}


def test_every_pixel_is_within_one_level(folder: Path, reference: Any) -> None:
    pipeline = Pipeline.open(folder)
    pictures: list[np.ndarray] = []
    for size, changes in (
        ((32, 48), {}),
        ((64, 48), {"prompt": "the fox of snow in a blue ring " * 6, "steps": 4}),
        ((48, 48), {"prompt": "a fox", "negative": "the star in the blue snow " * 3}),
        ((32, 48), {"negative": "blue fox"}),
        ((32, 48), {"negative": " ", "guidance": 2.5}),
        ((16, 80), {"prompt": ""}),
    ):
        request = REQUEST.replace(width=size[0], height=size[1], **changes)
        request = pipeline.plan(request).request
        image = draw_reference(reference, request, 7, **guidance(request))
        pictures.append(draw_port(pipeline, request, 7))
        assert off_by(pictures[-1], image) <= 1, changes
    assert not np.array_equal(pictures[0], pictures[3])
    assert not np.array_equal(pictures[3], pictures[4])


def test_a_number_of_rows_or_columns_may_be_odd(folder: Path, reference: Any) -> None:
    """Positions are centred; of an odd number the longer half is before the origin."""
    pipeline = Pipeline.open(folder)
    request = pipeline.plan(REQUEST.replace(width=112, height=80, steps=2)).request
    assert off_by(draw_port(pipeline, request, 1), draw_reference(reference, request, 1)) <= 1


def test_guidance_keeps_the_norm_of_each_token() -> None:
    """By diffusers' own lines, on packed velocities."""
    generator = torch.Generator().manual_seed(0)
    uncond, cond = (torch.randn(1, 4, 6, 8, generator=generator) for _ in range(2))
    from diffusers import QwenImagePipeline

    packed = [QwenImagePipeline._pack_latents(x, *x.shape) for x in (uncond, cond)]
    combined = packed[0] + 4.0 * (packed[1] - packed[0])
    norms = [torch.norm(x, dim=-1, keepdim=True) for x in (packed[1], combined)]
    expected = QwenImagePipeline._unpack_latents(combined * (norms[0] / norms[1]), 6, 8, 1)
    arrays = [mx.array(x.permute(0, 2, 3, 1).numpy()) for x in (uncond, cond)]
    ours = guide(arrays[0], arrays[1], 4.0)
    assert relative_l2(np.moveaxis(np.array(ours), -1, 1), expected[:, :, 0]) < 1e-6


@pytest.mark.parametrize("strength", [0.35, 1.0])
def test_img2img_means_what_it_means_in_diffusers(
    folder: Path, reference: Any, strength: float
) -> None:
    from diffusers import QwenImageImg2ImgPipeline
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    other = QwenImageImg2ImgPipeline(**reference.components)
    other.set_progress_bar_config(disable=True)
    pipeline = Pipeline.open(folder)
    request = REQUEST.replace(strength=strength, steps=6, negative="snow")
    request = pipeline.plan(request, pixels).request
    options = {"image": Image.fromarray(pixels), "strength": strength, **guidance(request)}
    image = draw_reference(other, request, 5, **options)
    assert off_by(draw_port(pipeline, request, 5, image=pixels), image) <= 1


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_inpainting_means_what_it_means_in_diffusers(
    folder: Path, reference: Any, strength: float
) -> None:
    from diffusers import QwenImageInpaintPipeline
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    mask = np.zeros((48, 32), np.uint8)
    mask[8:32, 8:24] = 255
    other = QwenImageInpaintPipeline(**reference.components)
    other.set_progress_bar_config(disable=True)
    pipeline = Pipeline.open(folder)
    request = pipeline.plan(REQUEST.replace(strength=strength, steps=5), pixels, mask).request
    images = {"image": Image.fromarray(pixels), "mask_image": Image.fromarray(mask)}
    image = draw_reference(other, request, 5, **images, strength=strength, **guidance(request))
    assert off_by(draw_port(pipeline, request, 5, image=pixels, mask=mask), image) <= 1


@pytest.mark.parametrize("length", [None, 300])
@pytest.mark.parametrize(
    "prompt", ["", "🦊 {red} [blue]", "一只红色的狐狸", "star " * 600, "zebra " * 1100]
)
def test_text_features_and_what_is_cut_off(
    folder: Path, reference: Any, prompt: str, length: int | None
) -> None:
    """The template's beginning is dropped, then the features are cut at the text length."""
    pipeline = Pipeline.open(folder)
    plan = pipeline.plan(REQUEST.replace(prompt=prompt, text_length=length))
    with torch.no_grad():
        text, mask = reference.encode_prompt(prompt, max_sequence_length=length or 512)
    conditioning = pipeline.encode(plan)
    assert mask is None and conditioning["text"].shape == text.shape
    assert relative_l2(conditioning["text"], text) < 1e-5
    notes = pipeline.truncated(plan)
    assert bool(notes) == (len(prompt) > 2500)
    if notes:
        assert f"reads {length or 512} tokens" in notes[0] and prompt.split()[-1] in notes[0]


def test_negative_prompt_turns_guidance_on(folder: Path, tmp_path: Path) -> None:
    options = ("--size", "16x16", "--steps", 1, "-o", tmp_path / "picture.png", "--overwrite")
    notes = run("generate", "a fox", "-m", folder, *options).output
    assert "--guidance 4 does nothing without --negative" in notes
    notes = run("generate", "a fox", "-n", " ", "-m", folder, *options).output
    assert "does nothing" not in notes
    notes = run("generate", "a fox", "-n", " ", "--true-guidance", 3, "-m", folder, *options).output
    assert "--true-guidance does nothing" in notes


def test_a_batch_low_memory_and_another_sampler(folder: Path) -> None:
    request = REQUEST.replace(negative="blue fox", sampler="dpm_2")
    pipeline = Pipeline.open(folder, low_memory=True)
    together = [picture.pixels for picture in pipeline.generate(request, [1, 2], batch=2)]
    assert pipeline.model.loaded == ()
    for seed, pixels in zip((1, 2), together, strict=True):
        alone = draw_port(Pipeline.open(folder), request, seed)
        assert np.abs(pixels.astype(int) - alone.astype(int)).max() <= 1


def test_bfloat16_is_as_good_as_the_references_own(folder: Path, reference: Any) -> None:
    pipeline = Pipeline.open(folder, dtype="bfloat16")
    request = pipeline.plan(REQUEST.replace(negative="blue fox")).request
    noise = torch.randn(1, 4, 6, 4, generator=torch.Generator().manual_seed(1))
    packed = reference._pack_latents(noise, *noise.shape)
    exact = draw_reference(reference, request, 1, latents=packed, **guidance(request))
    narrow = load_reference("QwenImagePipeline", folder, torch_dtype=torch.bfloat16)
    half = draw_reference(narrow, request, 1, latents=packed.bfloat16(), **guidance(request))
    floor = relative_l2(half, exact)
    assert floor < 0.1  # the same picture
    assert relative_l2(draw_port(pipeline, request, 1) / 255, exact) < 2 * floor


def test_parity_agrees(folder: Path) -> None:
    for options in (("--negative", "blue fox in the snow"), ()):
        verdict = parity(folder, "a red star", "--size", "32x48", "--steps", 2, *options)
        assert verdict["verdict"] == "agree", verdict["sentence"]
        assert verdict["image"]["largest"] <= 1
        values = {each["name"]: each["values"] for each in verdict["components"]}
        assert min(values["transformer"], values["text_encoder"], values["vae"]) > 70


def test_parity_of_runs_that_start_from_an_image(folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    options = ("--image", tmp_path / "image.png", "--strength", 0.5, "--steps", 4)
    verdict = parity(folder, "a red star", *options)
    assert verdict["verdict"] == "agree", verdict["sentence"]


def test_it_is_audited_and_calibrated(folder: Path, tmp_path: Path) -> None:
    assert run("audit", folder).exit_code == 0
    options = ("--size", "32x32", "--negative", "the snow of the star")
    assert calibrate(folder, tmp_path, *options) == {"sample": 4}


@pytest.mark.parametrize(
    ("component", "change", "message"),
    [
        ("transformer", {"guidance_embeds": True}, "guidance_embeds"),
        ("transformer", {"in_channels": 32}, "in_channels 32"),
        ("transformer", {"joint_attention_dim": 32}, "joint_attention_dim 32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, component: str, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    config = tmp_path / "model" / component / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        Pipeline.open(tmp_path / "model")
