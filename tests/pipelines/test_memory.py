"""Models on small machines: weights in few bits, memory known beforehand, decoding in tiles."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from click.testing import CliRunner

from lydite import embedded
from lydite.cli.main import lydite
from lydite.core.errors import InputError
from lydite.core.request import Request
from lydite.core.tensorfile import TensorFile
from lydite.models.layers import WHOLE_ATTENTION, double_size
from lydite.pipelines import memory
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.memory import (
    PIXEL_ARRAYS,
    TILE,
    TOKEN_ARRAYS,
    MemoryEstimate,
    _channels,
    _width,
    estimate,
    fit_in_memory,
)
from lydite.pipelines.model import Model, folder_component
from lydite.pipelines.picture import read_pixels, read_record
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.tiles import check_tile, decode_tiles
from lydite.weights.load import parameters
from lydite.weights.quantized_format import GROUP, formats_for
from lydite.weights.rules import stored_names
from support import tiny_flux, tiny_qwen_image, tiny_sd3

PROMPT = "a large red star above a small blue ring"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(lydite, [str(argument) for argument in arguments])


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_to_the_nearest(bits: int) -> None:
    whole = Pipeline.open("embedded").model.network("transformer")
    model = Pipeline.open("embedded", bits=bits).model
    network = model.network("transformer")
    assert sum(x.nbytes for x in parameters(network).values()) == model.components[
        "transformer"
    ].nbytes(mx.float32, bits)
    rounded = dict(network.named_modules())
    kinds = set[tuple[str, int]]()
    for path, linear in whole.named_modules():
        module = rounded[path]
        if not isinstance(linear, nn.Linear):
            continue
        if not isinstance(module, nn.QuantizedLinear):
            assert np.array_equal(module.weight, linear.weight), path
            continue
        expected = mx.quantize(linear.weight, group_size=GROUP, bits=module.bits)
        for name, array in zip(("weight", "scales", "biases"), expected, strict=True):
            assert np.array_equal(module[name], array), (path, name)
        kinds.add((path.split(".")[-1], module.bits))
    assert ("to_q", bits) in kinds and ("linear", 8) in kinds  # modulation never in 4
    vae = model.network("vae")
    assert not any(isinstance(module, nn.QuantizedLinear) for _, module in vae.named_modules())


def test_the_whole_network_is_never_in_memory_unrounded() -> None:
    model = Pipeline.open("embedded", bits=4).model
    component = model.components["transformer"]
    largest = max(int(np.prod(shape)) for shape in component.expected.values()) * 4
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model.network("transformer")
    peak = mx.get_peak_memory() - before
    assert peak < component.nbytes(mx.float32, 4) + 4 * largest
    assert peak < 0.6 * component.nbytes(mx.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("upcast", [True, False])
def test_weights_in_memory_are_counted_exactly(dtype: str, upcast: bool, tmp_path: Path) -> None:
    """Also in float16, in which parts of T5 and most VAEs stay in float32."""
    folder = shutil.copytree(embedded.MODEL, tmp_path / "model")
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"force_upcast": upcast}))
    for bits in (None, 4):
        model = Pipeline.open(folder, dtype=dtype, bits=bits).model
        counted = memory.weights_in_memory(model.components, dtype, bits).weights
        for name in model.components:
            loaded = parameters(model.network(name)).values()
            assert counted[name] == sum(array.nbytes for array in loaded), name


def test_a_picture_remembers_bits_and_tiles(tmp_path: Path) -> None:
    first, again, plain = (tmp_path / f"{name}.png" for name in ("first", "again", "plain"))
    request = (PROMPT, "-s", 1, "--steps", 1, "-q")
    assert run("generate", *request, "--bits", 4, "--tile", 128, "-o", first).exit_code == 0
    assert run("generate", "--from", first, "-q", "-o", again).exit_code == 0
    assert run("generate", *request, "-o", plain).exit_code == 0
    assert np.array_equal(read_pixels(first), read_pixels(again))
    assert not np.array_equal(read_pixels(first), read_pixels(plain))
    records = [read_record(path) for path in (first, again, plain)]
    assert [(record.bits, record.tile) for record in records] == [(4, 128), (4, 128), (None, None)]


def test_eight_bits_are_closer_than_four() -> None:
    request = Request(prompt=PROMPT, steps=3, width=64, height=64)
    pictures = {
        bits: next(Pipeline.open("embedded", bits=bits).generate(request, [3])).pixels.astype(int)
        for bits in (None, 4, 8)
    }
    apart = {bits: np.abs(pictures[bits] - pictures[None]).mean() for bits in (4, 8)}
    assert apart[8] < 2 < 30 > apart[4] > apart[8]


def test_which_weights_get_how_many_bits() -> None:
    with pytest.raises(InputError, match="bits is 7"):
        Pipeline.open("embedded", bits=7)
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    shapes = {
        "transformer_blocks.0.ff.net.2.weight": (64, 256),
        "transformer_blocks.1.ff.net.2.weight": (64, 100),
        "transformer_blocks.0.img_mod.1.weight": (64, 256),
        "proj_out.weight": (64, 256),
        "single_transformer_blocks.0.proj_out.weight": (64, 256),
        bias: (32, 64),
    }
    assert {path: each.bits for path, each in formats_for(4, shapes).items()} == {
        "transformer_blocks.0.ff.net.2.weight": 4,
        "transformer_blocks.0.img_mod.1.weight": 8,
        "single_transformer_blocks.0.proj_out.weight": 4,
    }


# Tiles


@pytest.mark.parity
@pytest.mark.parametrize("size", [(24, 24), (40, 16), (33, 50)])
@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderKLQwenImage"])
def test_tiles_are_blended_as_in_diffusers(
    tmp_path: Path, kind: str, size: tuple[int, int]
) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    kl = kind == "AutoencoderKL"
    vae = tiny_sd3.make_vae() if kl else tiny_qwen_image.make_vae()
    with torch.no_grad():  # no value beyond 1, where ours would be clipped before the blending
        for parameter in vae.decoder.conv_out.parameters():
            parameter.mul_(0.3)
    vae.save_pretrained(tmp_path)
    factor, channels = (4, 16) if kl else (8, 4)
    latents = torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(1))
    if kl:
        vae.tile_latent_min_size, vae.tile_sample_min_size = 16, 64
    else:
        vae.tile_sample_min_height = vae.tile_sample_min_width = 128
        vae.tile_sample_stride_height = vae.tile_sample_stride_width = 96
    vae.enable_tiling()
    with torch.no_grad():
        expected = vae.decode(latents if kl else latents[:, :, None]).sample
    expected = (expected if kl else expected[:, :, 0]).permute(0, 2, 3, 1).numpy()
    network = folder_component(tmp_path, KINDS).load(mx.float32)
    ours = decode_tiles(network, mx.array(latents.permute(0, 2, 3, 1).numpy()), 16 * factor, factor)
    assert ours.shape == expected.shape
    assert np.abs(np.array(ours) - expected).max() < 2e-4 * np.abs(expected).max()


def test_a_small_picture_is_decoded_whole() -> None:
    pipeline = Pipeline.open("embedded", tile=128)
    request = Request(prompt=PROMPT, steps=1, width=64, height=64)
    whole = next(Pipeline.open("embedded").generate(request, [1])).pixels
    assert np.array_equal(next(pipeline.generate(request, [1])).pixels, whole)
    with pytest.raises(InputError, match="tile is 100"):
        check_tile(100, 8)


# Memory known beforehand

QWEN_IMAGE = {
    "transformer": {
        "_class_name": "QwenImageTransformer2DModel",
        "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56],
        "guidance_embeds": False,
        "in_channels": 64,
        "joint_attention_dim": 3584,
        "num_attention_heads": 24,
        "num_layers": 60,
        "out_channels": 16,
        "patch_size": 2,
    },
    "text_encoder": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": 152064,
    },
    "vae": {
        "_class_name": "AutoencoderKLQwenImage",
        "attn_scales": [],
        "base_dim": 96,
        "dim_mult": [1, 2, 4, 4],
        "latents_mean": [0.0] * 16,
        "latents_std": [1.0] * 16,
        "num_res_blocks": 2,
        "temperal_downsample": [False, True, True],
        "z_dim": 16,
    },
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Qwen-Image's size: real headers, and holes where the values would be."""
    folder = tmp_path_factory.mktemp("large") / "qwen-image"
    index: dict[str, Any] = {"_class_name": "QwenImagePipeline"}
    for name, config in QWEN_IMAGE.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        component = folder_component(folder / name, KINDS)
        class_name = config.get("_class_name") or config["architectures"][0]
        index[name] = ["diffusers", class_name]
        header: dict[str, Any] = {}
        end = 0
        for target, shape in component.expected.items():
            if name == "vae":  # kernels over three frames, of which one is used
                shape = (shape[0], shape[3], 3, shape[1], shape[2]) if len(shape) == 4 else shape
            (stored, *_) = stored_names(target, component.rules)
            size = 2 * int(np.prod(shape))
            header[stored] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            end += size
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with open(folder / name / "model.safetensors", "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + end)
    tiny_qwen_image.write_tokenizer(folder / "tokenizer")
    (folder / "scheduler").mkdir()
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", **tiny_qwen_image.SCHEDULER}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_a_large_model_opens_plans_and_estimates_from_headers(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: TensorFile, name: str) -> Any:
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(TensorFile, "read", refuse)
    pipeline = Pipeline.open(large, dtype="bfloat16")
    plan = pipeline.plan(Request(prompt="a fox", negative=" "))
    assert (plan.request.width, plan.steps) == (1024, 50)
    needed = memory.estimate(pipeline, plan)
    assert sum(needed.weights.values()) > 54e9
    four = memory.estimate(pipeline, plan, bits=4)
    assert four.in_turn < 16e9 < needed.in_turn
    result = json.loads(run("inspect", large, "--json").output)
    assert result["memory"]["bfloat16"]["networks"]["transformer"] == 40_860_802_176
    assert result["memory"]["--bits 4"]["low_memory"] < 15e9


def test_generate_refuses_what_does_not_fit_and_says_what_would(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 17 * 10**9)
    result = run("generate", "a fox", "-m", large, "--dtype", "bfloat16", "-q")
    assert isinstance(result.exception, InputError)
    assert "Add --bits 4" in str(result.exception)


def test_generate_loads_networks_in_turn_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    pipeline = Pipeline.open("embedded")
    needed = memory.estimate(pipeline, pipeline.plan(Request(prompt=PROMPT)))
    assert needed.in_turn < needed.together
    monkeypatch.setattr(memory, "available", lambda: needed.together - 1)
    options = (PROMPT, "--steps", 1, "-o", tmp_path / "picture.png", "-s", 1)
    assert "loaded in turn, as with --low-memory" in run("generate", *options).output
    assert "memory" not in run("generate", *options, "--low-memory").output


@pytest.mark.parity
def test_low_memory_holds_one_network_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    folders = (
        tiny_flux.make_pipeline(tmp_path / "flux"),
        tiny_qwen_image.make_pipeline(tmp_path / "qwen"),
    )
    loaded: list[tuple[str, ...]] = []
    network = Model.network

    def watched(model: Model, name: str) -> Any:
        loaded.append((*model.loaded, name))
        return network(model, name)

    monkeypatch.setattr(Model, "network", watched)
    pixels = np.zeros((32, 32, 3), np.uint8)
    for folder in folders:
        pipeline = Pipeline.open(folder, low_memory=True)
        list(pipeline.generate(Request(prompt="a fox", steps=2), [1, 2], image=pixels))
    assert max(len(set(names)) for names in loaded) == 1, loaded


def test_a_large_picture_is_decoded_in_tiles_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "PIXEL_ARRAYS", 10_000)
    monkeypatch.setattr(memory, "TILE", 64)
    pipeline = Pipeline.open("embedded")
    runs = [pipeline.plan(Request(prompt=PROMPT))]
    needed = memory.estimate(pipeline, runs[0])
    monkeypatch.setattr(memory, "available", lambda: needed.weights["vae"] + needed.decoding - 1)
    (note,) = memory.fit_in_memory(pipeline, runs, 1)
    assert pipeline.tile == 64 and "tiles of 64" in note


def test_a_batch_that_does_not_fit_is_refused_before_a_weight_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "TOKEN_ARRAYS", 10_000)
    pipeline = Pipeline.open("embedded")
    runs = [pipeline.plan(Request(prompt=PROMPT))]
    needed = memory.estimate(pipeline, runs[0], 2)
    monkeypatch.setattr(memory, "available", lambda: needed.together)
    assert memory.fit_in_memory(pipeline, runs, 2) == []
    with pytest.raises(InputError, match="--batch"):
        memory.fit_in_memory(pipeline, runs, 4)
    assert pipeline.model.loaded == ()


@pytest.mark.parametrize(
    ("pixels", "factor", "fits"),
    [(128, 8, True), (160, 8, True), (127, 8, False), (96, 8, False), (144, 8, False),
     (256, 16, True), (128, 16, False)],
)  # fmt: skip
def test_sides_of_tiles(pixels: int, factor: int, fits: bool) -> None:
    if fits:
        assert check_tile(pixels, factor) == pixels
        return
    with pytest.raises(InputError, match=f"multiple of {4 * factor}"):
        check_tile(pixels, factor)


@pytest.mark.parametrize("height", [16, 17, 24, 25, 28, 29, 40])
@pytest.mark.parametrize("width", [16, 17, 23, 24, 25, 29])
def test_tiles_of_a_decoder_without_context_are_the_whole_picture(height: int, width: int) -> None:
    class Doubling:
        """Each of the latents becomes 2 × 2 pixels, whatever is beside it."""

        calls = 0

        def decode(self, latents: mx.array) -> mx.array:
            self.calls += 1
            assert max(latents.shape[1:3]) <= 16 or latents.shape[1:3] == (height, width)
            return double_size(latents)

    latents, vae = mx.array(np.random.default_rng(0).normal(size=(1, height, width, 3))), Doubling()
    found = decode_tiles(vae, latents, 32, 2)
    assert mx.allclose(found, double_size(latents), atol=1e-6)
    assert (vae.calls == 1) == (max(height, width) <= 16)


def planned(**more: Any) -> Any:
    request = {"width": 1024, "height": 512, "text_length": 100} | more
    return SimpleNamespace(request=SimpleNamespace(**request), image=None)


def opened(weights: dict[str, int], **more: Any) -> Any:
    """A pipeline of which only sizes are known."""
    parts = {
        name: SimpleNamespace(nbytes=lambda dtype, bits, size=size: size // (2 if bits else 1),
                              widens=name == "vae")
        for name, size in weights.items()
    }  # fmt: skip
    configs = {"transformer": SimpleNamespace(inner_dim=64),
               "vae": SimpleNamespace(block_out_channels=(8, 16, 32))}  # fmt: skip
    model = SimpleNamespace(components=parts, dtype="bfloat16", bits=None, low_memory=False,
                            config=configs.__getitem__)  # fmt: skip
    latents = SimpleNamespace(vae_factor=8, tokens=lambda width, height: width * height // 256)
    family = SimpleNamespace(network="transformer", image="start")
    known = {"model": model, "latents": latents, "family": family, "refiner": None, "tile": None}
    return SimpleNamespace(**known | more)


WEIGHTS = {"transformer": 10_000_000_000, "vae": 200_000_000, "text_encoder": 4_000_000_000}


def test_work_of_a_run_is_estimated_from_its_size() -> None:
    found = estimate(opened(WEIGHTS), planned())
    tokens = 1024 * 512 // 256 + 100
    assert found.denoising == tokens * 64 * TOKEN_ARRAYS * 2
    scores = min(1024 * 512 // 64, WHOLE_ATTENTION) ** 2
    assert found.decoding == (1024 * 512 * 16 * PIXEL_ARRAYS + 3 * scores) * 2
    assert estimate(opened(WEIGHTS), planned(), 3).denoising == 3 * found.denoising
    tiled = estimate(opened(WEIGHTS, tile=256), planned())
    scores = min(256 * 256 // 64, WHOLE_ATTENTION) ** 2
    assert tiled.decoding == (256 * 256 * 16 * PIXEL_ARRAYS + 3 * scores) * 2
    shown = opened(WEIGHTS)
    shown.family.image = "reference"
    run = planned()
    assert estimate(shown, run) == found
    run.image = np.zeros((8, 8, 3))
    assert estimate(shown, run).denoising > 1.9 * found.denoising > 0
    assert estimate(opened(WEIGHTS), run) == found
    both = estimate(opened(WEIGHTS, refiner=opened({"transformer": 7})), planned())
    assert both.weights["refiner transformer"] == 7 and len(both.weights) == 4
    assert estimate(opened(WEIGHTS), planned(), bits=4).weights["vae"] == WEIGHTS["vae"] // 2


def test_the_peak_of_networks_together_and_in_turn() -> None:
    sizes = MemoryEstimate({"transformer": 50, "vae": 10, "text_encoder": 55}, 20, 30)
    assert (sizes.together, sizes.in_turn) == (115 + 30, 70)
    assert MemoryEstimate({"unet": 50, "vae": 45, "text_encoder": 55}, 1, 30).in_turn == 75
    assert MemoryEstimate({"vae": 5, "refiner unet": 50}, 20, 30).in_turn == 70


@pytest.mark.parametrize(
    ("kind", "less", "low_memory"),
    [("together", 0, False), ("together", 1, True), ("in_turn", 0, True), ("in_turn", 1, None)],
)
def test_what_is_done_where_memory_is_short(
    kind: str, less: int, low_memory: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = opened(WEIGHTS)
    small, run = planned(width=64, height=64), planned()
    limit = getattr(estimate(pipeline, run), kind) - less
    monkeypatch.setattr(memory, "available", lambda: limit)
    if low_memory is None:
        with pytest.raises(InputError, match="this run needs about"):
            fit_in_memory(pipeline, [small, run], 1)
        return
    assert len(fit_in_memory(pipeline, [small, run], 1)) == low_memory
    assert (pipeline.model.low_memory, pipeline.tile) == (low_memory, None)


def test_the_largest_picture_decides_and_tiles_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = opened({"transformer": 1000, "vae": 1000}, refiner=opened({"transformer": 7}))
    large = planned(width=8192, height=8192)
    needed = estimate(pipeline, large).decoding
    monkeypatch.setattr(memory, "available", lambda: needed)
    (note,) = fit_in_memory(pipeline, [large, planned()], 1)
    assert "8192×8192" in note and pipeline.tile == pipeline.refiner.tile == TILE
    assert not pipeline.model.low_memory
    pipeline.tile = 4096  # the user's own stays, whether it fits or not
    monkeypatch.setattr(memory, "available", lambda: 10)
    with pytest.raises(InputError, match="this run needs about"):
        fit_in_memory(pipeline, [large], 1)
    assert pipeline.tile == 4096


def test_the_advice_is_the_first_width_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, run = opened(WEIGHTS), planned()
    monkeypatch.setattr(memory, "available", lambda: 6_000_000_000)
    with pytest.raises(InputError, match="Add --bits 8 "):
        fit_in_memory(pipeline, [run], 1)
    monkeypatch.setattr(memory, "available", lambda: 4_000_000_000)
    with pytest.raises(InputError, match="A smaller --size"):
        fit_in_memory(pipeline, [run], 1)


def test_widths_are_read_off_any_config() -> None:
    widths = SimpleNamespace(block_out_channels=(320, 1280, 640), widths=(5,))
    assert [_width(SimpleNamespace(**{key: 7})) for key in ("inner_dim", "dim")] == [7, 7]
    assert (_width(widths), _width(SimpleNamespace())) == (1280, 0)
    assert _channels(widths) == 1280 and _channels(SimpleNamespace(widths=(3, 4, 9))) == 4
    assert _channels(SimpleNamespace()) == 0
