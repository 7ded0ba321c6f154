"""FLUX.2-klein through the pipeline against diffusers: same folder, same seeds, every pixel."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import ConfigError, InputError
from lydite.core.request import Request
from lydite.core.tensorfile import save
from lydite.pipelines.pipeline import Pipeline
from support import tiny_flux2, tiny_sd3
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
    root = tmp_path_factory.mktemp("flux2")
    return {
        name: tiny_flux2.make_pipeline(root / name, distilled=name == "distilled")
        for name in ("base", "distilled")
    }


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: load_reference("Flux2KleinPipeline", path) for name, path in folders.items()}


def options(reference: Any, request: Request) -> dict[str, Any]:
    """diffusers takes the features of a negative prompt; without them it uses the empty one."""
    found: dict[str, Any] = {"guidance_scale": request.guidance}
    if request.negative:
        with torch.no_grad():
            text, _ = reference.encode_prompt(
                request.negative, max_sequence_length=request.text_length
            )
        found["negative_prompt_embeds"] = text
    return found


def test_every_pixel_is_within_one_level(folders, references) -> None:
    pipeline, reference = Pipeline.open(folders["base"]), references["base"]
    pictures: list[np.ndarray] = []
    for size, changes in (
        ((32, 48), {}),
        ((64, 40), {"prompt": "the fox of snow in a blue ring " * 6, "steps": 4}),
        ((32, 48), {"guidance": 1.0}),
        ((48, 48), {"guidance": 3.0, "negative": "the star in the blue snow"}),
        ((16, 96), {"prompt": "", "text_length": 512}),
    ):
        request = REQUEST.replace(width=size[0], height=size[1], **changes)
        request = pipeline.plan(request).request
        image = draw_reference(reference, request, 7, **options(reference, request))
        pictures.append(draw_port(pipeline, request, 7))
        assert off_by(pictures[-1], image) <= 1, changes
    assert not np.array_equal(pictures[0], pictures[2])


def test_a_distilled_model_runs_without_guidance(folders, references) -> None:
    pipeline = Pipeline.open(folders["distilled"])
    request = pipeline.plan(REQUEST).request
    assert request.guidance == 1.0
    image = draw_reference(references["distilled"], request, 7, guidance_scale=4.0)  # ignored
    assert off_by(draw_port(pipeline, request, 7), image) <= 1
    for changes in ({"guidance": 4.0}, {"guidance_steps": (1.0, 2.0, 1.0)}, {"negative": "fox"}):
        with pytest.raises(InputError, match="distilled"):
            pipeline.plan(REQUEST.replace(**changes))


def test_defaults_are_those_of_each_model(folders) -> None:
    base, distilled = (Pipeline.open(folders[name]) for name in ("base", "distilled"))
    assert (base.defaults.steps, base.defaults.guidance) == (50, 4.0)
    assert (distilled.defaults.steps, distilled.defaults.guidance) == (4, 1.0)
    request = base.plan(Request(prompt="a star")).request
    assert (request.width, request.height, request.text_length) == (512, 512, 512)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_an_image_is_a_reference_as_in_diffusers(folders, references, guidance: float) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (80, 64, 3), dtype=np.uint8)
    pipeline, reference = Pipeline.open(folders["base"], low_memory=True), references["base"]
    plan = pipeline.plan(REQUEST.replace(guidance=guidance, width=None, height=None), pixels)
    request = plan.request
    assert (request.width, request.height) == (64, 80)
    image = draw_reference(
        reference, request, 5, image=Image.fromarray(pixels), **options(reference, request)
    )
    picture = draw_port(pipeline, request, 5, image=pixels)
    assert off_by(picture, image) <= 1
    assert not np.array_equal(picture, draw_port(pipeline, request, 5))
    with pytest.raises(InputError, match="--strength"):
        pipeline.plan(REQUEST.replace(strength=0.5), pixels)
    with pytest.raises(InputError, match="inpainting is not supported"):
        pipeline.plan(REQUEST, pixels, np.zeros((80, 64), np.uint8))


@pytest.mark.parametrize("prompt", ["", "<|endoftext|> 🦊 {red}", "一只红色的狐狸", "star " * 600])
def test_text_features_and_what_is_cut_off(folders, references, prompt: str) -> None:
    """The features of padding too; a prompt may have the token that pads."""
    pipeline = Pipeline.open(folders["base"])
    plan = pipeline.plan(REQUEST.replace(prompt=prompt, text_length=None, guidance=1.0))
    with torch.no_grad():
        text, _ = references["base"].encode_prompt(prompt)
    features = pipeline.encode(plan)["text"]
    assert features.shape == (1, 512, 24)
    assert relative_l2(features, text) < 1e-5
    assert bool(pipeline.truncated(plan)) == (len(prompt) > 2500)


def test_a_batch_and_tiles_draw_what_the_reference_draws(folders, references) -> None:
    """A tile is measured in the VAE's own latents, which are not those of the steps."""
    pipeline = Pipeline.open(folders["base"], tile=64)
    request = pipeline.plan(REQUEST.replace(width=96, height=80)).request
    together = [picture.pixels for picture in pipeline.generate(request, [1, 2], batch=2)]
    reference = load_reference("Flux2KleinPipeline", folders["base"])
    reference.vae.enable_tiling()
    reference.vae.tile_sample_min_size, reference.vae.tile_latent_min_size = 64, 16
    image = draw_reference(reference, request, 2, **options(reference, request))
    assert off_by(together[1], image) <= 1
    whole = draw_port(Pipeline.open(folders["base"]), request, 2)
    assert np.abs(together[1].astype(int) - whole).max() > 1


def test_bfloat16_is_as_good_as_the_references_own(folders, references) -> None:
    pipeline = Pipeline.open(folders["base"], dtype="bfloat16")
    request = pipeline.plan(REQUEST).request
    noise = torch.randn(1, 16, 6, 4, generator=torch.Generator().manual_seed(1))
    guidance = options(references["base"], request)
    exact = draw_reference(references["base"], request, 1, latents=noise, **guidance)
    narrow = load_reference("Flux2KleinPipeline", folders["base"], torch_dtype=torch.bfloat16)
    half = draw_reference(narrow, request, 1, latents=noise.bfloat16(), **guidance)
    floor = relative_l2(half, exact)
    assert floor < 0.1  # the same picture
    assert relative_l2(draw_port(pipeline, request, 1) / 255, exact) < 2 * floor


def test_parity_agrees(folders, tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    points = [word for name in ("transformer*", "vae*", "pipeline*") for word in ("--points", name)]
    image = ("--image", tmp_path / "image.png", *points)
    cases = {"base": ("--size", "32x48", "--negative", "blue fox"), "distilled": image}
    for name, more in cases.items():
        arguments = ("a red star", "--text-length", 24, "--steps", 2)
        verdict = parity(folders[name], *arguments, *more)
        assert verdict["verdict"] == "agree", verdict["sentence"]
        assert verdict["image"]["largest"] <= 1
        values = {each["name"]: each["values"] for each in verdict["components"]}
        assert values["transformer"] > 300
        if name == "base":
            assert values["text_encoder"] > 500 and values["vae"] > 100
        else:
            assert values["vae"] > 200  # with the encoder's


def test_it_is_audited_calibrated_and_quantized(tmp_path: Path) -> None:
    """Heads of 32 channels: groups of 64 inputs fit."""
    folder = tiny_flux2.make_pipeline(
        tmp_path / "model", distilled=True, attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8)
    )
    result = run("audit", folder)
    assert result.exit_code == 0 and "bn.num_batches_tracked" in result.output
    size = ("--size", "32x32", "--text-length", 12)
    assert calibrate(folder, tmp_path, *size) == {"sample": 4}
    made = ("--set", tmp_path / "set", "--eval-images", 2, "--out", tmp_path / "q4", "-q")
    assert run("quantize", folder, "--method", "rtn", "--bits", 4, *made).exit_code == 0
    quantized = json.loads((tmp_path / "q4" / "transformer" / "config.json").read_text())
    assert quantized["quantization"]["bits"] == 4
    pipeline = Pipeline.open(tmp_path / "q4", low_memory=True)
    picture, whole = (draw_port(each, REQUEST, 2) for each in (pipeline, Pipeline.open(folder)))
    assert pipeline.model.loaded == () and pipeline.defaults.steps == 4
    assert 0 < np.abs(picture.astype(int) - whole).mean() < 3


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_the_authors_file_draws_the_same(tmp_path: Path, prefix: str) -> None:
    sizes = {"attention_head_dim": 128, "num_attention_heads": 1}
    folder = tiny_flux2.make_pipeline(
        tmp_path / "model", distilled=True, axes_dims_rope=(32, 32, 32, 32), **sizes
    )
    tensors = tiny_flux2.original_transformer(tiny_sd3.read_tensors(folder / "transformer"))
    file = tmp_path / "flux-2-klein.safetensors"
    save(file, {f"{prefix}{name}": x for name, x in tensors.items()})
    pipeline = Pipeline.open(file, components=folder)
    assert pipeline.defaults.steps == 4  # model_index.json of the other folder says so
    assert np.array_equal(
        draw_port(pipeline, REQUEST, 1), draw_port(Pipeline.open(folder), REQUEST, 1)
    )
    assert run("audit", file).exit_code == 0
    if not prefix:
        arguments = ("a star", "--size", "16x16", "--text-length", 8, "--steps", 1)
        assert parity(file, "--components", folder, *arguments)["verdict"] == "agree"


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("transformer", {"guidance_embeds": True}, "guidance_embeds"),
        ("transformer", {"joint_attention_dim": 40}, "joint_attention_dim 40"),
        ("transformer", {"in_channels": 64}, "in_channels 64"),
        ("text_encoder", {"num_hidden_layers": 27}, "27 layers"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    folders, tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(folders["base"], folder)
    config = folder / part / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        Pipeline.open(folder)
