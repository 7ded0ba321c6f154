"""FLUX.2's transformer against diffusers: tiny, random weights, through the real loader."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.config import read_config
from lydite.core.errors import ConfigError
from lydite.core.tensorfile import save
from lydite.models.flux2 import Flux2Transformer, position_ids
from lydite.pipelines.families.flux2_single_file import infer_transformer
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.inferred_models import Shapes
from lydite.pipelines.model import Component, folder_component
from lydite.trace.mlx_capture import walk
from lydite.weights.load import parameter_hash, parameters
from support import tiny_flux2, tiny_sd3
from support.distance import relative_l2
from support.norms import assert_same_norms

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}
TIMESTEPS = (1000.0, 731.25, 500.0, 8.93)
GUIDANCE = 4.0


@pytest.fixture(scope="module", params=[True, False], ids=["dev", "klein"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(1)
    reference = tiny_flux2.make_transformer(guidance_embeds=request.param, eps=2e-3)
    folder = tmp_path_factory.mktemp("flux2") / "transformer"
    reference.save_pretrained(folder)
    return reference, folder


def inputs(rows: int = 4, columns: int = 3, batch: int = 2):
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return draw(batch, rows * columns, 16), draw(batch, 5, 40), (rows, columns)


def run_reference(model: Any, tokens, text, size, timestep: float) -> np.ndarray:
    from diffusers import Flux2KleinPipeline

    guided = model.config.guidance_embeds
    with torch.no_grad():
        out = model(
            hidden_states=tokens.to(model.dtype),
            encoder_hidden_states=text.to(model.dtype),
            timestep=torch.full((len(tokens),), timestep / 1000),
            img_ids=Flux2KleinPipeline._prepare_latent_ids(torch.zeros(1, 1, *size)),
            txt_ids=Flux2KleinPipeline._prepare_text_ids(text),
            guidance=torch.full((len(tokens),), GUIDANCE) if guided else None,
        ).sample
    return out.float().numpy()


def run_port(
    model: Flux2Transformer, dtype: mx.Dtype, tokens, text, size, timestep: float
) -> np.ndarray:
    cast = lambda x: mx.array(x.numpy()).astype(dtype)  # noqa: E731
    guidance = mx.array([GUIDANCE]) if model.config.guidance_embeds else None
    tables = model.modulation(mx.array(TIMESTEPS), dtype, guidance)
    step = {name: table[TIMESTEPS.index(timestep)] for name, table in tables.items()}
    positions = model.positions(text.shape[1], *size)
    out = model(cast(tokens), model.embed_text(cast(text)), step, positions)
    assert out.dtype == dtype
    return np.array(out.astype(mx.float32))


def load(folder: Path, dtype: mx.Dtype = mx.float32) -> Flux2Transformer:
    model = folder_component(folder, KINDS).load(dtype)
    assert isinstance(model, Flux2Transformer)
    return model


@pytest.mark.parametrize("timestep", [1000.0, 731.25, 8.93])
@pytest.mark.parametrize("size", [(4, 3), (1, 9), (16, 16)])
def test_equal_in_float32(pair, timestep: float, size: tuple[int, int]) -> None:
    reference, folder = pair
    expected = run_reference(reference, *inputs(*size), timestep)
    found = run_port(load(folder), mx.float32, *inputs(*size), timestep)
    assert relative_l2(found, expected) < 5e-6  # measured at most 1.7e-6


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_good_as_the_references_own(pair, name: str) -> None:
    reference, folder = pair
    exact = run_reference(reference, *inputs(), 500.0)
    half = tiny_sd3.reload(reference, folder, getattr(torch, name))
    expected = relative_l2(run_reference(half, *inputs(), 500.0), exact)
    found = relative_l2(run_port(load(folder, HALF[name]), HALF[name], *inputs(), 500.0), exact)
    assert found < 2 * expected  # measured at most 1.1 times


def test_every_module_has_a_name_of_the_reference(pair) -> None:
    reference, folder = pair
    model = load(folder)
    assert {path for path, _ in walk(model)} <= {name for name, _ in reference.named_modules()}
    assert set(parameters(model)) == set(reference.state_dict())


def test_positions_are_those_of_the_pipeline() -> None:
    from diffusers import Flux2KleinPipeline

    text = Flux2KleinPipeline._prepare_text_ids(torch.zeros(1, 7, 1))[0]
    image = Flux2KleinPipeline._prepare_latent_ids(torch.zeros(1, 1, 5, 6))[0]
    assert np.array_equal(position_ids(7, 5, 6), torch.cat([text, image]).numpy())
    reference = Flux2KleinPipeline._prepare_image_ids([torch.zeros(1, 1, 5, 6)])[0]
    ids = position_ids(7, 5, 6, reference=True)
    assert np.array_equal(ids, torch.cat([text, image, reference]).numpy())


@pytest.mark.parametrize("guidance", [False, True])
def test_original_names_are_read_as_the_references_converter_reads_them(
    guidance: bool, tmp_path: Path
) -> None:
    """And geometry and weights come from the original file alone."""
    from diffusers.loaders.single_file_utils import (
        convert_flux2_transformer_checkpoint_to_diffusers,
    )

    sizes = {"attention_head_dim": 128, "num_attention_heads": 1}
    tiny_flux2.make_transformer(
        guidance_embeds=guidance, axes_dims_rope=(32, 32, 32, 32), **sizes
    ).save_pretrained(tmp_path / "folder")
    tensors = tiny_sd3.read_tensors(tmp_path / "folder")
    original = tiny_flux2.original_transformer(tensors)
    converted = convert_flux2_transformer_checkpoint_to_diffusers(
        {name: torch.from_numpy(array) for name, array in original.items()}
    )
    assert converted.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(converted[name].numpy(), array, err_msg=name)

    path = tmp_path / "flux2.safetensors"
    save(path, original)
    shapes = Shapes({name: array.shape for name, array in original.items()})
    name, raw, rules = infer_transformer(shapes, {})
    config = read_config(KINDS[name].config, raw, where=path)
    expected = folder_component(tmp_path / "folder", KINDS)
    assert config == replace(expected.config, out_channels=16)
    port = Component("transformer", path, KINDS[name], config, rules).load(mx.float32)
    assert parameter_hash(port) == parameter_hash(expected.load(mx.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"axes_dims_rope": [8, 8, 8]}, "axes_dims_rope"), ({"patch_size": 2}, "patch_size")],
)
def test_config_we_cannot_run_is_refused(pair, tmp_path: Path, change, message: str) -> None:
    raw = json.loads((pair[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError, match=message):
        folder_component(tmp_path, KINDS)


def test_norms_have_the_numbers_of_the_reference(pair) -> None:
    reference, folder = pair
    assert_same_norms(load(folder), reference)
