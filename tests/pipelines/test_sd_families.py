"""Stable Diffusion 1.x, 2.x and XL against diffusers: same folder, same seeds, every pixel."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.errors import FileError, InputError
from lydite.core.request import Request
from lydite.pipelines.picture import read_pixels
from lydite.pipelines.pipeline import SILENT, Pipeline
from lydite.reference import sdxl
from support import tiny_sd
from support.against_diffusers import calibrate, load_reference, off_by, parity, run
from support.distance import relative_l2

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

# 18 × 12 latents: odd sizes further down in the U-Net
REQUEST = Request(
    prompt="a red star", negative="blue fox", steps=5, guidance=5.0, width=48, height=72
)
TEXT_TO_IMAGE = ("sd1", "sd2", "sdxl")
PIXELS = np.random.default_rng(0).integers(0, 256, (72, 48, 3), dtype=np.uint8)
MASK = np.zeros((72, 48), np.uint8)
MASK[20:60, 9:31] = 255
MASK[5:9, 40:] = 200
MASK[65:, :] = 90  # counts as black


def reference(folder: Path, task: str = "", **options: Any) -> Any:
    """diffusers' pipeline for text to image, Img2Img or Inpaint."""
    xl = "StableDiffusionXL" if folder.name.startswith("sdxl") else "StableDiffusion"
    return load_reference(f"{xl}{task}Pipeline", folder, **options)


def draw_reference(
    pipeline: Any, request: Request, seeds: tuple[int, ...] = (1,), **extra: Any
) -> np.ndarray:
    """(B, H, W, 3) floats in 0…1."""
    return pipeline(
        request.prompt,
        negative_prompt=request.negative or None,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance,
        num_images_per_prompt=len(seeds),
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="np",
        **extra,
    ).images


@pytest.mark.parametrize("variant", TEXT_TO_IMAGE)
def test_every_pixel_is_within_one_level(sd_folder: Any, variant: str) -> None:
    theirs, ours = reference(sd_folder(variant)), Pipeline.open(sd_folder(variant))
    seen: list[np.ndarray] = []
    for changes in ({}, {"negative": ""}, {"guidance": 1.0}, {"width": 64, "height": 64}):
        request, seeds = REQUEST.replace(**changes), (1, 2**40 + 7)
        size = {"width": request.width, "height": request.height}
        images = draw_reference(theirs, request, seeds, **size)
        pictures = list(ours.generate(request, seeds, batch=2))
        assert [picture.seed for picture in pictures] == list(seeds)
        for picture, image in zip(pictures, images, strict=True):
            assert off_by(picture.pixels, image) <= 1
        seen.append(pictures[0].pixels)
    for other in seen[1:3]:  # what was changed shows
        assert np.abs(seen[0].astype(int) - other).max() > 10


@pytest.mark.parametrize("variant", [*TEXT_TO_IMAGE, "sdxl-refiner"])
def test_img2img_means_what_it_means_in_diffusers(sd_folder: Any, variant: str) -> None:
    """Also where PNDM starts late, one timestep off in diffusers: at 0.9 and at 0.5."""
    from PIL import Image

    theirs, ours = reference(sd_folder(variant), "Img2Img"), Pipeline.open(sd_folder(variant))
    for strength, negative in ((0.2, ""), (0.5, "blue fox"), (0.9, "blue fox"), (1.0, "")):
        request = REQUEST.replace(strength=strength, negative=negative, width=None, height=None)
        image = draw_reference(theirs, request, image=Image.fromarray(PIXELS), strength=strength)[0]
        picture = next(ours.generate(request, [1], image=PIXELS))
        assert off_by(picture.pixels, image) <= 1, strength


@pytest.mark.parametrize("variant", tiny_sd.PIPELINES)
def test_inpainting_means_what_it_means_in_diffusers(sd_folder: Any, variant: str) -> None:
    """A plain model blends after each step, also within PNDM's first; one with 9 channels not."""
    from PIL import Image

    theirs, ours = reference(sd_folder(variant), "Inpaint"), Pipeline.open(sd_folder(variant))
    given: dict[str, Any] = {"image": Image.fromarray(PIXELS), "mask_image": Image.fromarray(MASK)}
    given |= {"width": 48, "height": 72}
    for strength, guidance in ((0.5, 5.0), (0.9, 1.0), (1.0, 5.0)):
        request = REQUEST.replace(strength=strength, guidance=guidance)
        pictures = list(ours.generate(request, (1, 2), image=PIXELS, mask=MASK, batch=2))
        for picture in pictures:  # a batch of diffusers has one sample of the image for all
            (image,) = draw_reference(theirs, request, (picture.seed,), **given, strength=strength)
            assert off_by(picture.pixels, image) <= 1, strength
        assert np.abs(pictures[0].pixels.astype(int) - pictures[1].pixels).max() > 20


def test_outside_of_a_mask_the_finished_latents_are_the_pictures(sd_folder: Any) -> None:
    """Also with PNDM, which ends above 0 in latents of another size."""
    ours = Pipeline.open(sd_folder("sd1"))
    run = ours.plan(REQUEST.replace(steps=2, strength=0.9), PIXELS, MASK)
    inpainting = ours._start(run, 0, (1,), SILENT).inpainting
    assert inpainting is not None and inpainting.clean is not None
    (batch,) = ours.denoise(run, (1,))
    assert float(run.schedule.sigmas[-1]) > 0
    apart = mx.where(inpainting.mask > 0, 0, mx.abs(batch.x - inpainting.clean))
    assert np.array(apart).max() < 1e-5


def test_a_soft_edge_is_as_diffusers_lays_the_picture_over(sd_folder: Any) -> None:
    from PIL import Image

    theirs, ours = reference(sd_folder("sd1"), "Inpaint"), Pipeline.open(sd_folder("sd1"))
    image, mask = Image.fromarray(PIXELS), theirs.mask_processor.blur(Image.fromarray(MASK), 4)
    drawn = draw_reference(theirs, REQUEST, image=image, mask_image=mask, width=48, height=72)
    new = Image.fromarray((drawn[0] * 255).round().astype(np.uint8))
    expected = np.asarray(theirs.image_processor.apply_overlay(mask, image, new)) / 255
    request = REQUEST.replace(feather=4)
    picture = next(ours.generate(request, [1], image=PIXELS, mask=MASK))
    assert off_by(picture.pixels, expected) <= 2  # theirs rounds twice
    outside = np.asarray(mask) == 0
    assert outside.sum() > 300
    assert np.array_equal(picture.pixels[outside], PIXELS[outside])
    assert ours.plan(REQUEST, PIXELS, MASK).request.strength == 1.0  # by default, as in diffusers


def test_inpainting_on_the_command_line_is_replayed(sd_folder: Any, tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(PIXELS).save(tmp_path / "image.png")
    Image.fromarray(MASK).save(tmp_path / "mask.png")
    names = ("--image", tmp_path / "image.png", "--mask", tmp_path / "mask.png")
    common = ("-m", sd_folder("inpainting"), "-q")
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    given = ("--steps", 3, "-s", 5, "--feather", 3, "-o", first, "--record-paths")
    assert run("generate", "a red star", *names, *given, *common).exit_code == 0
    assert run("generate", "--from", first, "-o", again, *common).exit_code == 0
    assert np.array_equal(read_pixels(first), read_pixels(again))
    for source in (("a red star", *names), ("--from", first)):  # which names them too
        for name in ("image.png", "mask.png"):
            with pytest.raises(FileError, match="belongs to the input"):
                run("generate", *source, "-o", tmp_path / name, "--overwrite", *common)
    Image.fromarray(255 - MASK).save(tmp_path / "mask.png")
    with pytest.raises(InputError, match="not the mask"):
        run("generate", "--from", first, "-o", again, *common)


def test_models_run_without_cuda_graphs_unless_the_user_wants_them(
    sd_folder: Any, untrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("MLX_USE_CUDA_GRAPHS", "MLX_MAX_OPS_PER_BUFFER")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    for model, together in ((untrained, "10"), (sd_folder("sd1"), "20")):
        for name in names:
            monkeypatch.setenv(name, "")  # so that it is restored
            monkeypatch.delenv(name)
        Pipeline.open(model)
        assert [os.environ[name] for name in names] == ["0", together]
    monkeypatch.setenv(names[0], "1")
    monkeypatch.setenv(names[1], "7")
    Pipeline.open(untrained)
    assert [os.environ[name] for name in names] == ["1", "7"]


def test_what_a_model_cannot_do_without_is_asked_for(sd_folder: Any) -> None:
    inpainting, refiner = (
        Pipeline.open(sd_folder("inpainting")),
        Pipeline.open(sd_folder("sdxl-refiner")),
    )
    with pytest.raises(InputError, match="--image FILE and --mask FILE"):
        inpainting.plan(REQUEST)
    with pytest.raises(InputError, match="under a mask"):
        inpainting.plan(REQUEST, PIXELS)
    with pytest.raises(InputError, match="over an image"):
        refiner.plan(REQUEST)
    with pytest.raises(InputError, match="without an image"):
        Pipeline.open(sd_folder("sd1")).plan(REQUEST, None, MASK)


def test_an_empty_negative_prompt_is_zeros_only_where_the_model_says_so(
    sd_folder: Any, tmp_path: Path
) -> None:
    plain = tiny_sd.make_pipeline(
        tmp_path / "sdxl-plain", "sdxl", force_zeros_for_empty_prompt=False
    )
    request = REQUEST.replace(negative="")
    unsaid = Path(shutil.copytree(plain, tmp_path / "sdxl-unsaid"))
    index = json.loads((plain / "model_index.json").read_text())
    del index["force_zeros_for_empty_prompt"]
    (unsaid / "model_index.json").write_text(json.dumps(index))
    for path, is_zero in ((unsaid, True), (plain, False)):
        pipeline = Pipeline.open(path)
        text = np.array(pipeline.encode(pipeline.plan(request))["text"])
        assert (np.abs(text[0]).max() == 0) == is_zero
        theirs = reference(path)
        image = draw_reference(theirs, request, width=48, height=72)[0]
        assert off_by(next(pipeline.generate(request, [1])).pixels, image) <= 1
        recorded = sdxl.FAMILY.encode(theirs, ["", request.prompt], request)["prompt_embeds"][0]
        own, negative, *_ = theirs.encode_prompt(request.prompt, negative_prompt=None, device="cpu")
        assert torch.allclose(recorded, torch.cat([negative, own]), atol=1e-5)


@pytest.mark.parametrize("variant", ["sd1", "sdxl"])
def test_clip_skip_is_of_the_prompt_alone(sd_folder: Any, variant: str) -> None:
    theirs, ours = reference(sd_folder(variant)), Pipeline.open(sd_folder(variant))
    if variant == "sd1":  # diffusers 0.42 looks for a part that transformers 5 no longer has
        vars(theirs.text_encoder)["text_model"] = theirs.text_encoder
    request = REQUEST.replace(clip_skip=1, steps=3)
    image = draw_reference(theirs, request, clip_skip=1, width=48, height=72)[0]
    picture = next(ours.generate(request, [1])).pixels
    assert off_by(picture, image) <= 1
    plain = next(ours.generate(request.replace(clip_skip=None), [1])).pixels
    assert np.abs(picture.astype(int) - plain).max() > 10
    with pytest.raises(InputError, match="layers that the text encoder has"):
        next(ours.generate(request.replace(clip_skip=3), [1]))
    if variant == "sdxl":
        options = ("--steps", 1, "--size", "32x32", "--clip-skip", 1, "--negative", "fox")
        assert parity(sd_folder(variant), "a red star", *options)["verdict"] == "agree"


@pytest.mark.parametrize("scheduler", ["UniPCMultistepScheduler", "DPMSolverMultistepScheduler"])
def test_another_scheduler_of_the_checkpoint_decides(
    sd_folder: Any, scheduler: str, tmp_path: Path
) -> None:
    import diffusers

    theirs = reference(sd_folder("sd1"))
    theirs.scheduler = getattr(diffusers, scheduler).from_config(theirs.scheduler.config)
    theirs.save_pretrained(tmp_path)
    image = draw_reference(theirs, REQUEST, width=48, height=72)[0]
    assert off_by(next(Pipeline.open(tmp_path).generate(REQUEST, [1])).pixels, image) <= 1


@pytest.mark.parametrize(("variant", "dtype"), [("sd2", "bfloat16"), ("sdxl", "float16")])
def test_narrow_floats_are_as_good_as_the_references_own(
    sd_folder: Any, variant: str, dtype: str
) -> None:
    path, request = sd_folder(variant), REQUEST.replace(steps=3)
    noise = torch.randn(1, 4, 18, 12, generator=torch.Generator().manual_seed(1))
    exact = draw_reference(reference(path), request, latents=noise, width=48, height=72)[0]
    narrow = reference(path, torch_dtype=getattr(torch, dtype))
    # a narrow pipeline would draw other normals from the same seed, so it is given ours
    latents = noise.to(getattr(torch, dtype))
    half = draw_reference(narrow, request, latents=latents, width=48, height=72)[0]
    ours = next(Pipeline.open(path, dtype=dtype).generate(request, [1])).pixels / 255
    rounding = relative_l2(half, exact)
    assert rounding < 0.1  # the same picture
    assert relative_l2(ours, exact) < 2 * rounding


@pytest.mark.parametrize("variant", tiny_sd.PIPELINES)
def test_the_parity_walk_agrees(sd_folder: Any, variant: str, tmp_path: Path) -> None:
    from PIL import Image

    steps = 2 if variant == "sd1" else 1  # two: PNDM's first is of two calls
    options: tuple[object, ...] = ("--steps", steps, "--size", "32x40", "--negative", "fox")
    if variant in ("sdxl-refiner", "inpainting"):
        Image.fromarray(PIXELS).save(tmp_path / "image.png")
        options += ("--image", tmp_path / "image.png", "--strength", 1)
    if variant == "inpainting":
        Image.fromarray(MASK).save(tmp_path / "mask.png")
        options += ("--mask", tmp_path / "mask.png")
    verdict = parity(sd_folder(variant), "a red star", *options)
    assert verdict["verdict"] == "agree", verdict["sentence"]
    assert verdict["image"]["largest"] <= 1
    values = {component["name"]: component["values"] for component in verdict["components"]}
    assert values["unet"] > 250 * steps and values["vae"] > 50 and values["pipeline"] >= 4
    assert min(values.get(name, 99) for name in ("text_encoder", "text_encoder_2")) > 20


def test_a_set_is_made_and_replayed(sd_folder: Any, tmp_path: Path) -> None:
    for variant in ("sd1", "sdxl"):
        (tmp_path / variant).mkdir()
        items = calibrate(sd_folder(variant), tmp_path / variant, "--size", "32x32")
        assert items == {"sample": 4}
    unet = Pipeline.open(sd_folder("sdxl")).model.network("unet")
    with CalibrationSet.open(tmp_path / "sdxl" / "blocks") as blocks:
        arrays = blocks.read(next(iter(blocks.rows())))
    stems = {name.removesuffix(".out") for name in arrays if name.endswith(".out")}
    assert len(stems) == 33
    for stem in stems:  # each module gives what was stored, from what was stored
        module: Any = unet
        for part in stem.split("."):
            module = module[int(part)] if part.isdigit() else module[part]
        x = mx.array(arrays[f"{stem}.in.0"].astype(np.float32))
        text = arrays.get(f"{stem}.in.encoder_hidden_states")
        given = () if text is None else (mx.array(text.astype(np.float32)),)
        out = np.array(module(x, *given))
        if stem.endswith("attn1"):
            out = out[:, arrays.get(f"{stem}.tokens", arrays["tokens.image"])]
        assert relative_l2(out, arrays[f"{stem}.out"].astype(np.float32)) < 2e-3, stem


@pytest.mark.parametrize("variant", tiny_sd.PIPELINES)
def test_it_is_audited(sd_folder: Any, variant: str) -> None:
    assert run("audit", sd_folder(variant)).exit_code == 0


def test_parts_that_do_not_fit_are_refused(sd_folder: Any, tmp_path: Path) -> None:
    path = tmp_path / "mixed"
    shutil.copytree(sd_folder("sd1"), path)
    shutil.rmtree(path / "unet")
    shutil.copytree(sd_folder("sdxl") / "unet", path / "unet")
    with pytest.raises(Exception, match="SDXL"):
        Pipeline.open(path)
    with pytest.raises(InputError, match="multiple of"):
        Pipeline.open(sd_folder("sd1")).plan(REQUEST.replace(width=50))


@pytest.mark.parametrize("variant", ["sd1", "sdxl", "sdxl-refiner", "inpainting"])
def test_a_single_file_draws_the_same_picture(variant: str, tmp_path: Path) -> None:
    path = tiny_sd.make_pipeline(tmp_path / variant, variant, original=True)
    file = tiny_sd.write_original_file(path, tmp_path / "model.safetensors")
    folder, single = Pipeline.open(path), Pipeline.open(file, components=path)
    assert single.family is folder.family and single.scheduler.class_name
    request = REQUEST.replace(steps=1, width=32, height=40, strength=1.0, negative="")
    given: dict[str, Any] = {}
    if variant in ("sdxl-refiner", "inpainting"):
        given = {"image": PIXELS[:40, :32]}
    if variant == "inpainting":
        given |= {"mask": MASK[:40, :32]}
    pictures = [next(p.generate(request, [4], **given)).pixels for p in (folder, single)]
    # To rounding: text_projection is transposed in a single file, and its sums have another order.
    assert np.abs(pictures[0].astype(int) - pictures[1]).max() <= 1 and pictures[0].std() > 5
    assert run("audit", file).exit_code == 0
    assert run("audit", file, "--against", path).exit_code == 0


def test_a_folder_of_half_precision_variants_opens(sd_folder: Any, tmp_path: Path) -> None:
    theirs = reference(sd_folder("sd1"), torch_dtype=torch.float16)
    theirs.save_pretrained(tmp_path, variant="fp16")
    assert list(tmp_path.glob("unet/*.fp16.safetensors"))
    request = REQUEST.replace(steps=2)
    ours = next(Pipeline.open(tmp_path).generate(request, [1])).pixels
    exact = reference(tmp_path, variant="fp16", torch_dtype=torch.float32)
    assert off_by(ours, draw_reference(exact, request, width=48, height=72)[0]) <= 1
    assert run("audit", tmp_path).exit_code == 0
