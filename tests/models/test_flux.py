"""FLUX.1 against diffusers: tiny models with random weights, through the real loader."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.checkpoint import open_checkpoint
from lydite.core.config import read_config
from lydite.core.errors import ConfigError
from lydite.core.tensorfile import save
from lydite.models.flux import DoubleBlock, FluxConfig, FluxTransformer, position_ids
from lydite.models.modulation import clip_float16
from lydite.models.packing import pack_latents, unpack_latents
from lydite.models.rotary_attention import rotation
from lydite.pipelines.families.flux_single_file import infer_transformer
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.inferred_models import Shapes
from lydite.pipelines.model import Component, folder_component
from lydite.trace.mlx_capture import walk
from lydite.weights.load import parameter_hash, parameters
from lydite.weights.maps import flux as flux_map
from lydite.weights.rules import resolve
from support import tiny_flux, tiny_sd3
from support.distance import relative_l2
from support.norms import assert_same_norms

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}
LAYERS = ("in_layer", "out_layer")
TIMESTEPS = (1000.0, 731.25, 500.0, 8.93)
GUIDANCE = 4.0  # with 500.0 exact in bfloat16, to which the reference rounds both


@pytest.fixture(scope="module", params=tiny_flux.VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(1)
    reference = tiny_flux.make_transformer(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "transformer"
    reference.save_pretrained(folder)
    return reference, folder


def inputs(model: Any, rows: int = 4, columns: int = 3, batch: int = 2):
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    config = model.config
    tokens = draw(batch, rows * columns, config.in_channels)
    text = draw(batch, 5, config.joint_attention_dim)
    return tokens, text, draw(batch, config.pooled_projection_dim), (rows, columns)


def run_reference(model: Any, tokens, text, pooled, size, timestep: float) -> np.ndarray:
    from diffusers import FluxPipeline

    ids = FluxPipeline._prepare_latent_image_ids(1, size[0], size[1], "cpu", torch.float32)
    guided = model.config.guidance_embeds
    with torch.no_grad():
        out = model(
            hidden_states=tokens.to(model.dtype),
            encoder_hidden_states=text.to(model.dtype),
            pooled_projections=pooled.to(model.dtype),
            timestep=torch.full((len(tokens),), timestep / 1000),
            img_ids=ids,
            txt_ids=torch.zeros(text.shape[1], 3),
            guidance=torch.full((len(tokens),), GUIDANCE) if guided else None,
        ).sample
    return out.float().numpy()


def run_port(
    model: FluxTransformer, dtype: mx.Dtype, tokens, text, pooled, size, timestep: float
) -> np.ndarray:
    cast = lambda x: mx.array(x.numpy()).astype(dtype)  # noqa: E731
    guidance = mx.array([GUIDANCE]) if model.config.guidance_embeds else None
    tables = model.modulation(mx.array(TIMESTEPS), cast(pooled), guidance)
    step = {name: table[TIMESTEPS.index(timestep)] for name, table in tables.items()}
    positions = model.positions(text.shape[1], *size)
    out = model(cast(tokens), model.embed_text(cast(text)), step, positions)
    assert out.dtype == dtype
    return np.array(out.astype(mx.float32))


def load(folder: Path, dtype: mx.Dtype = mx.float32) -> FluxTransformer:
    model = folder_component(folder, KINDS).load(dtype)
    assert isinstance(model, FluxTransformer)
    return model


@pytest.mark.parametrize("timestep", [1000.0, 731.25, 8.93])
@pytest.mark.parametrize("size", [(4, 3), (1, 9), (16, 16)])
def test_equal_in_float32(pair, timestep: float, size: tuple[int, int]) -> None:
    reference, folder = pair
    tensors = inputs(reference, *size)
    expected = run_reference(reference, *tensors, timestep)
    found = run_port(load(folder), mx.float32, *tensors, timestep)
    assert relative_l2(found, expected) < 5e-6  # measured at most 7e-7


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_good_as_the_references_own(pair, name: str) -> None:
    reference, folder = pair
    tensors = inputs(reference)
    exact = run_reference(reference, *tensors, 500.0)
    half = tiny_sd3.reload(reference, folder, getattr(torch, name))
    expected = relative_l2(run_reference(half, *tensors, 500.0), exact)
    found = relative_l2(run_port(load(folder, HALF[name]), HALF[name], *tensors, 500.0), exact)
    assert found < 2 * expected  # measured at most 1.1 times


def test_every_module_has_a_name_of_the_reference(pair) -> None:
    reference, folder = pair
    names = {name for name, _ in reference.named_modules()}
    model = load(folder)
    assert {path for path, _ in walk(model)} <= names
    assert set(parameters(model)) == set(reference.state_dict())


def test_guidance_goes_only_to_a_model_distilled_from_it(pair) -> None:
    _, folder = pair
    model = load(folder)
    wrong = None if model.config.guidance_embeds else mx.array([GUIDANCE])
    with pytest.raises(ValueError, match="guidance"):
        model.modulation(mx.array(TIMESTEPS), mx.zeros((1, 20)), wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes_dims_rope": [4, 8, 8]}, "axes_dims_rope"),
        ({"axes_dims_rope": [3, 9, 12]}, "axes_dims_rope"),
        ({"patch_size": 2}, "patch_size"),
        ({"qk_norm": "layer_norm"}, "qk_norm"),
    ],
)
def test_config_we_cannot_run_is_refused(pair, tmp_path: Path, change, message: str) -> None:
    raw = json.loads((pair[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError, match=message):
        folder_component(tmp_path, KINDS)


def test_latents_are_packed_as_in_the_pipeline() -> None:
    from diffusers import FluxPipeline

    latents = torch.randn(2, 16, 6, 8)
    expected = FluxPipeline._pack_latents(latents, 2, 16, 6, 8)
    channels_last = mx.array(latents.permute(0, 2, 3, 1).numpy())
    tokens = pack_latents(channels_last)
    assert np.array_equal(np.array(tokens), expected.numpy())
    assert mx.array_equal(unpack_latents(tokens, 6, 8), channels_last)


def test_positions_are_those_of_the_pipeline_and_exact_at_real_size() -> None:
    from diffusers import FluxPipeline
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed

    from lydite.models.rotary_attention import rotation

    image = FluxPipeline._prepare_latent_image_ids(1, 128, 96, "cpu", torch.float32)
    ids = torch.cat([torch.zeros(512, 3), image])
    assert np.array_equal(position_ids(512, 128, 96), ids.numpy())
    cos, sin = FluxPosEmbed(10000, [16, 56, 56])(ids)
    table = rotation(ids.numpy(), (16, 56, 56))
    assert np.abs(np.array(table.cos) - cos[:, ::2].numpy()).max() < 1e-7
    assert np.abs(np.array(table.sin) - sin[:, ::2].numpy()).max() < 1e-7


@pytest.mark.parametrize("guidance", [False, True])
def test_original_names_are_read_as_the_references_converter_reads_them(guidance: bool) -> None:
    """Random tensors with the real number of rows, which the converter takes for granted."""
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    tensors = original_tensors(guidance)
    expected = convert_flux_transformer_checkpoint_to_diffusers(
        {name: torch.from_numpy(x) for name, x in tensors.items()}
    )
    resolution = resolve(tensors, flux_map.ORIGINAL)
    assert not (resolution.surplus or resolution.dropped or resolution.copies)
    assert resolution.recipes.keys() == expected.keys()
    for target, recipe in resolution.recipes.items():
        stored = [tensors[name] for name in recipe.sources]
        value = recipe.build(stored)
        assert recipe.shape([x.shape for x in stored]) == value.shape
        np.testing.assert_array_equal(value, expected[target].numpy(), err_msg=target)


def original_tensors(guidance: bool) -> dict[str, np.ndarray]:
    """Every tensor of a FLUX.1 file with two blocks of either kind; matrices have two columns."""
    width = 3072
    linears = {
        **{f"{name}.{layer}": width for name in ("time_in", "vector_in") for layer in LAYERS},
        **({f"guidance_in.{layer}": width for layer in LAYERS} if guidance else {}),
        "img_in": width,
        "txt_in": width,
        "final_layer.linear": 64,
        "final_layer.adaLN_modulation.1": 2 * width,
    }
    scales: list[str] = []
    for index in range(2):
        for stream in ("img", "txt"):
            block = f"double_blocks.{index}.{stream}"
            linears[f"{block}_mod.lin"] = 6 * width
            linears |= {f"{block}_attn.qkv": 3 * width, f"{block}_attn.proj": width}
            linears |= {f"{block}_mlp.0": 4 * width, f"{block}_mlp.2": width}
            scales += [f"{block}_attn.norm.{name}_norm.scale" for name in ("query", "key")]
        block = f"single_blocks.{index}"
        linears |= {f"{block}.linear1": 7 * width, f"{block}.linear2": width}
        linears[f"{block}.modulation.lin"] = 3 * width
        scales += [f"{block}.norm.{name}_norm.scale" for name in ("query", "key")]
    generator = np.random.default_rng(0)
    draw = lambda *shape: generator.standard_normal(shape, np.float32)  # noqa: E731
    return {
        **{f"{name}.weight": draw(rows, 2) for name, rows in linears.items()},
        **{f"{name}.bias": draw(rows) for name, rows in linears.items()},
        **{name: draw(128) for name in scales},
    }


@pytest.mark.parametrize("variant", tiny_flux.VARIANTS)
def test_geometry_and_weights_come_from_the_original_file_alone(
    variant: str, tmp_path: Path
) -> None:
    sizes = {"attention_head_dim": 128, "num_attention_heads": 1, "axes_dims_rope": (16, 56, 56)}
    tiny_flux.make_transformer(variant, **sizes).save_pretrained(tmp_path / "folder")
    expected = folder_component(tmp_path / "folder", KINDS)
    path = tmp_path / "flux.safetensors"
    save(path, tiny_flux.original_transformer(tiny_sd3.read_tensors(tmp_path / "folder")))
    with open_checkpoint(path) as checkpoint:
        shapes = Shapes({name: tensor.shape for name, tensor in checkpoint.tensors.items()})
    name, raw, rules = infer_transformer(shapes, {}, flux_map.ORIGINAL)
    kind = KINDS[name]
    config = read_config(kind.config, raw, where=path)
    channels = expected.config.out_channels or expected.config.in_channels
    assert config == replace(expected.config, out_channels=channels)
    port = Component("transformer", path, kind, config, rules).load(mx.float32)
    assert parameter_hash(port) == parameter_hash(expected.load(mx.float32))


def test_an_overflow_of_float16_becomes_its_largest_number() -> None:
    large = mx.array([1e5, -1e5, 1.0])
    assert clip_float16(large.astype(mx.float16)).tolist() == [65504, -65504, 1]
    assert mx.array_equal(clip_float16(large), large)


def test_the_text_of_a_block_does_not_overflow_in_float16() -> None:
    block = DoubleBlock(FluxConfig(4, 1, 0, 8, 1, 8, 8, False, axes_dims_rope=(2, 2, 4)))
    block.set_dtype(mx.float16)
    block.ff_context.net[2].bias = mx.ones((8,), mx.float16)
    still = mx.zeros((1, 6, 8), mx.float16)
    overflowing = mx.concatenate([still[:, :5], mx.full((1, 1, 8), 3e4, mx.float16)], axis=1)
    text, image = mx.full((1, 3, 8), 6e4, mx.float16), mx.ones((1, 4, 8), mx.float16)
    positions = rotation(position_ids(3, 2, 2), (2, 2, 4))
    found, _ = block(text, image, still, overflowing, positions)
    assert found.dtype == mx.float16 and mx.isfinite(found).all() and found.max() == 65504


def test_norms_have_the_numbers_of_the_reference(pair) -> None:
    reference, folder = pair
    assert_same_norms(load(folder), reference)
