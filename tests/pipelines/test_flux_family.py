"""FLUX.1 through the pipeline against diffusers: same folder, same seeds, every pixel."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import ConfigError, InputError
from lydite.core.request import Request
from lydite.core.tensorfile import save
from lydite.pipelines.pipeline import Pipeline
from support import tiny_flux, tiny_sd3
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

REQUEST = Request(prompt="a red star", steps=3, width=32, height=48, text_length=24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flux")
    return {name: tiny_flux.make_pipeline(root / name, name) for name in tiny_flux.VARIANTS}


def guidance(request: Request) -> dict[str, Any]:
    if not request.negative:
        return {"guidance_scale": request.guidance}
    return {
        "guidance_scale": request.guidance,
        "negative_prompt": request.negative,
        "true_cfg_scale": request.true_guidance,
    }


@pytest.mark.parametrize("name", ["dev", "schnell"])
def test_every_pixel_is_within_one_level(folders, name: str) -> None:
    reference = load_reference("FluxPipeline", folders[name])
    pipeline = Pipeline.open(folders[name])
    pictures: list[np.ndarray] = []
    for size, changes in (
        ((32, 48), {}),
        ((64, 40), {"prompt": "the fox of snow in a blue ring " * 6, "steps": 4}),
        ((32, 48), {"guidance": 7.5}),
        ((32, 48), {"negative": "blue fox"}),
        ((32, 48), {"negative": "blue fox in the snow", "true_guidance": 2.0}),
        ((16, 96), {"prompt": ""}),
    ):
        request = REQUEST.replace(width=size[0], height=size[1], **changes)
        request = pipeline.plan(request).request
        image = draw_reference(reference, request, 7, **guidance(request))
        pictures.append(draw_port(pipeline, request, 7))
        assert off_by(pictures[-1], image) <= 1, changes
    distilled = name == "dev"  # schnell takes the guidance and ignores it
    assert np.array_equal(pictures[0], pictures[2]) != distilled
    assert not np.array_equal(pictures[0], pictures[3])
    assert not np.array_equal(pictures[3], pictures[4])


def test_defaults_are_those_of_each_model(folders) -> None:
    dev, schnell = (Pipeline.open(folders[name]).defaults for name in ("dev", "schnell"))
    assert (dev.steps, dev.guidance, dev.text_length) == (28, 3.5, 512)
    assert (schnell.steps, schnell.guidance, schnell.text_length) == (4, 0.0, 256)


@pytest.mark.parametrize("strength", [0.35, 1.0])
def test_img2img_means_what_it_means_in_diffusers(folders, strength: float) -> None:
    from diffusers import FluxImg2ImgPipeline
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    reference = load_reference("FluxPipeline", folders["dev"])
    reference = FluxImg2ImgPipeline(**reference.components)
    reference.set_progress_bar_config(disable=True)
    pipeline = Pipeline.open(folders["dev"])
    request = pipeline.plan(REQUEST.replace(strength=strength, steps=6), pixels).request
    image = draw_reference(
        reference,
        request,
        5,
        image=Image.fromarray(pixels),
        strength=strength,
        **guidance(request),
    )
    assert off_by(draw_port(pipeline, request, 5, image=pixels), image) <= 1


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_inpainting_means_what_it_means_in_diffusers(folders, strength: float) -> None:
    from diffusers import FluxInpaintPipeline
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    mask = np.zeros((48, 32), np.uint8)
    mask[8:32, 8:24] = 255
    other = FluxInpaintPipeline(**load_reference("FluxPipeline", folders["dev"]).components)
    other.set_progress_bar_config(disable=True)
    pipeline = Pipeline.open(folders["dev"])
    request = pipeline.plan(REQUEST.replace(strength=strength, steps=5), pixels, mask).request
    images = {"image": Image.fromarray(pixels), "mask_image": Image.fromarray(mask)}
    image = draw_reference(other, request, 5, **images, strength=strength, **guidance(request))
    assert off_by(draw_port(pipeline, request, 5, image=pixels, mask=mask), image) <= 1


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_fill_draws_under_a_mask_as_in_diffusers(folders, strength: float) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    mask = np.zeros((48, 32), np.uint8)
    mask[7:31, 9:23] = 255  # not at the edges of latents
    pipeline = Pipeline.open(folders["fill"])
    assert (pipeline.defaults.steps, pipeline.defaults.guidance) == (50, 30.0)
    request = pipeline.plan(REQUEST.replace(strength=strength, steps=4), pixels, mask).request
    images = {"image": Image.fromarray(pixels), "mask_image": Image.fromarray(mask)}
    reference = load_reference("FluxFillPipeline", folders["fill"])
    image = draw_reference(
        reference, request, 5, **images, strength=strength, guidance_scale=request.guidance
    )
    picture = draw_port(pipeline, request, 5, image=pixels, mask=mask)
    assert off_by(picture, image) <= 1
    batch = pipeline.generate(request, [4, 5], image=pixels, mask=mask, batch=2)
    assert np.abs(list(batch)[1].pixels.astype(int) - picture).max() <= 1
    with pytest.raises(InputError, match="--mask"):
        pipeline.plan(REQUEST, pixels)


def test_parity_of_fill(folders, tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "mask.png")
    options = ("--image", tmp_path / "image.png", "--mask", tmp_path / "mask.png")
    options += ("--steps", 2, "--text-length", 12)
    verdict = parity(folders["fill"], "a red star", *options)
    assert verdict["verdict"] == "agree", verdict["sentence"]
    with pytest.raises(InputError, match="takes no negative prompt"):
        parity(folders["fill"], "a red star", *options, "-n", "snow")


@pytest.mark.parametrize("prompt", ["", "🦊 (red:1.2) [blue]", "一只红色的狐狸", "star " * 600])
def test_text_features_and_what_is_cut_off(folders, prompt: str) -> None:
    pipeline = Pipeline.open(folders["dev"])
    run = pipeline.plan(REQUEST.replace(prompt=prompt, text_length=None))
    with torch.no_grad():
        text, pooled, _ = load_reference("FluxPipeline", folders["dev"]).encode_prompt(prompt)
    conditioning = pipeline.encode(run)
    assert conditioning["text"].shape == (1, 512, 64)
    assert relative_l2(conditioning["text"], text) < 1e-5
    assert relative_l2(conditioning["pooled"], pooled) < 1e-5
    notes = pipeline.truncated(run)
    assert [note.split()[0] for note in notes] == (
        ["text_encoder", "text_encoder_2"] if len(prompt) > 100 else []
    )


def test_a_batch_draws_what_single_pictures_are(folders) -> None:
    pipeline = Pipeline.open(folders["dev"])
    request = REQUEST.replace(negative="blue fox")
    together = [picture.pixels for picture in pipeline.generate(request, [1, 2], batch=2)]
    for seed, pixels in zip((1, 2), together, strict=True):
        alone = draw_port(pipeline, request, seed)
        assert np.abs(pixels.astype(int) - alone.astype(int)).max() <= 1


def test_samplers_between_the_steps_and_low_memory(folders) -> None:
    """heun evaluates at sigmas of its own schedule; networks are freed in turn."""
    request = REQUEST.replace(sampler="dpm_2", negative="blue fox")
    expected = draw_port(Pipeline.open(folders["dev"]), request, 3)
    pipeline = Pipeline.open(folders["dev"], low_memory=True)
    assert np.array_equal(draw_port(pipeline, request, 3), expected)
    assert pipeline.model.loaded == ()


def test_bfloat16_is_as_good_as_the_references_own(folders) -> None:
    pipeline = Pipeline.open(folders["dev"], dtype="bfloat16")
    request = pipeline.plan(REQUEST).request
    noise = torch.randn(1, 16, 12, 8, generator=torch.Generator().manual_seed(1))
    reference = load_reference("FluxPipeline", folders["dev"])
    packed = reference._pack_latents(noise, *noise.shape)
    exact = draw_reference(reference, request, 1, latents=packed, **guidance(request))
    narrow = load_reference("FluxPipeline", folders["dev"], torch_dtype=torch.bfloat16)
    half = draw_reference(narrow, request, 1, latents=packed.bfloat16(), **guidance(request))
    floor = relative_l2(half, exact)
    assert floor < 0.1  # the same picture
    assert relative_l2(draw_port(pipeline, request, 1) / 255, exact) < 2 * floor


def test_parity_agrees(folders) -> None:
    for name, options in {"dev": ("--negative", "blue fox"), "schnell": ()}.items():
        arguments = ("a red star", "--size", "32x48", "--text-length", 24, "--steps", 2)
        verdict = parity(folders[name], *arguments, *options)
        assert verdict["verdict"] == "agree", verdict["sentence"]
        assert verdict["image"]["largest"] <= 1
        assert verdict["image"]["pixels"] == 32 * 48
        values = {each["name"]: each["values"] for each in verdict["components"]}
        assert values["transformer"] > 300 and values["vae"] > 50
        assert values["text_encoder"] > 50 and values["text_encoder_2"] > 50


def test_latents_of_another_run_are_injected_into_the_reference(folders, tmp_path: Path) -> None:
    """The loop has packed latents, the trace has them as pictures."""
    from lydite.trace.reader import Trace

    arguments = ("-m", folders["dev"], "--size", "32x48", "--steps", 1, "--text-length", 8, "-q")
    arguments = (*arguments, "--side", "reference", "--points", "pipeline/*")
    one, two = tmp_path / "one", tmp_path / "two"
    assert run("trace", "a star", *arguments, "-s", 1, "-o", one).exit_code == 0
    injected = ("--inject", one, "--at", "pipeline/latents")
    assert run("trace", "a star", *arguments, *injected, "-s", 2, "-o", two).exit_code == 0
    with Trace.open(one) as first, Trace.open(two) as second:
        for name, equal in {"pipeline/noise": False, "pipeline/image": True}.items():
            events = first.find(name), second.find(name)
            assert events[0] and events[1]
            assert np.array_equal(first.read(events[0]), second.read(events[1])) == equal, name


def test_parity_of_runs_that_start_from_an_image(folders, tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    options = (
        "--image",
        tmp_path / "image.png",
        "--strength",
        0.5,
        "--steps",
        4,
        "--text-length",
        24,
    )
    verdict = parity(folders["dev"], "a red star", *options)
    assert verdict["verdict"] == "agree", verdict["sentence"]


def test_it_is_audited_and_calibrated(folders, tmp_path: Path) -> None:
    assert run("audit", folders["schnell"]).exit_code == 0
    size = ("--size", "32x32", "--text-length", 12)
    assert calibrate(folders["schnell"], tmp_path, *size) == {"sample": 4}


def test_true_guidance_is_part_of_a_set_only_where_it_is_used(folders) -> None:
    from lydite.calibrate.request_record import conditions_of, request_of

    pipeline = Pipeline.open(folders["dev"])
    plain = pipeline.plan(REQUEST.replace(true_guidance=3.0)).request
    assert "true_guidance" not in conditions_of(plain, "float32")
    guided = pipeline.plan(REQUEST.replace(negative="snow")).request
    conditions = conditions_of(guided, "float32")
    assert conditions["true_guidance"] == 4.0
    assert request_of(conditions)[0] == guided.replace(prompt="")


def test_options_that_do_nothing_are_named(folders, tmp_path: Path) -> None:
    def notes(*options: object) -> str:
        size = ("--size", "16x16", "--steps", 1, "--text-length", 8)
        picture = ("-o", tmp_path / "picture.png", "--overwrite")
        result = run("generate", "a fox", "-m", folders["dev"], *size, *picture, *options)
        assert result.exit_code == 0, result.output
        return result.output

    assert "does nothing without --negative" in notes("--true-guidance", 3)
    assert "does nothing with --true-guidance 1" in notes("--true-guidance", 1, "-n", "snow")
    assert "does nothing" not in notes("--true-guidance", 3, "-n", "snow")
    with pytest.raises(InputError, match="one guidance"):
        Pipeline.open(folders["dev"]).plan(REQUEST.replace(guidance_steps=(1.0, 2.0, 3.0)))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The authors' file with the transformer alone, and the folder that has the rest."""
    folder = tiny_flux.make_pipeline(
        tmp_path_factory.mktemp("flux") / "dev", attention_head_dim=128, axes_dims_rope=(16, 56, 56)
    )
    file = folder.parent / "flux1-dev.safetensors"
    save(file, tiny_flux.original_transformer(tiny_sd3.read_tensors(folder / "transformer")))
    return file, folder


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_the_authors_file_draws_the_same(original, tmp_path: Path, prefix: str) -> None:
    file, folder = original
    renamed = {f"{prefix}{name}": x for name, x in tiny_sd3.read_tensors(file).items()}
    save(tmp_path / "flux.safetensors", renamed)
    pipeline = Pipeline.open(tmp_path / "flux.safetensors", components=folder)
    assert pipeline.defaults.steps == 28
    assert np.array_equal(
        draw_port(pipeline, REQUEST, 1), draw_port(Pipeline.open(folder), REQUEST, 1)
    )
    assert run("audit", tmp_path / "flux.safetensors").exit_code == 0


def test_a_transformer_with_another_input_is_refused(folders, tmp_path: Path) -> None:
    """The pixels of a mask depend on the VAE's factor."""
    import shutil

    folder = tmp_path / "fill"
    shutil.copytree(folders["dev"], folder)
    config = folder / "transformer" / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "in_channels": 384, "out_channels": 64}))
    with pytest.raises(ConfigError, match="in_channels 384"):
        Pipeline.open(folder)
