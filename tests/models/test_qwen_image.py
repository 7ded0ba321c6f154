"""Qwen-Image's transformer against diffusers: tiny, random weights, through the real loader."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError, InputError
from lydite.models.packing import unpack_latents
from lydite.models.qwen_image import QwenImageTransformer, position_ids
from lydite.models.rotary_attention import rotation
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import folder_component
from lydite.trace.mlx_capture import walk
from lydite.weights.load import parameters
from support import tiny_qwen_image, tiny_sd3
from support.distance import relative_l2
from support.norms import assert_same_norms

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}
TIMESTEPS = (1000.0, 731.25, 500.0, 8.93)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(1)
    reference = tiny_qwen_image.make_transformer()
    folder = tmp_path_factory.mktemp("qwen") / "transformer"
    reference.save_pretrained(folder)
    return reference, folder


def inputs(rows: int = 4, columns: int = 3, batch: int = 2, text: int = 5):
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return draw(batch, rows * columns, 16), 20 * draw(batch, text, 40), (rows, columns)


def run_reference(model: Any, tokens, text, size, timestep: float, mask=None) -> np.ndarray:
    with torch.no_grad():
        out = model(
            hidden_states=tokens.to(model.dtype),
            encoder_hidden_states=text.to(model.dtype),
            encoder_hidden_states_mask=mask,
            timestep=torch.full((len(tokens),), timestep / 1000),
            img_shapes=[[(1, *size)]] * len(tokens),
        ).sample
    return out.float().numpy()


def run_port(
    model: QwenImageTransformer, dtype: mx.Dtype, tokens, text, size, timestep: float, mask=None
) -> np.ndarray:
    cast = lambda x: mx.array(x.numpy()).astype(dtype)  # noqa: E731
    tables = model.modulation(mx.array(TIMESTEPS), dtype)
    step = {name: table[TIMESTEPS.index(timestep)] for name, table in tables.items()}
    out = model(
        cast(tokens),
        model.embed_text(cast(text)),
        step,
        model.positions(text.shape[1], *size),
        None if mask is None else mx.array(mask.numpy()),
    )
    assert out.dtype == dtype
    return np.array(out.astype(mx.float32))


def load(folder: Path, dtype: mx.Dtype = mx.float32) -> QwenImageTransformer:
    model = folder_component(folder, KINDS).load(dtype)
    assert isinstance(model, QwenImageTransformer)
    return model


@pytest.mark.parametrize("timestep", [1000.0, 731.25, 8.93])
@pytest.mark.parametrize("size", [(4, 3), (1, 9), (7, 7), (16, 16)])
def test_equal_in_float32(pair, timestep: float, size: tuple[int, int]) -> None:
    reference, folder = pair
    tensors = inputs(*size)
    expected = run_reference(reference, *tensors, timestep)
    found = run_port(load(folder), mx.float32, *tensors, timestep)
    assert relative_l2(found, expected) < 5e-6  # measured at most 1.8e-6


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_good_as_the_references_own(pair, name: str) -> None:
    reference, folder = pair
    tensors = inputs()
    exact = run_reference(reference, *tensors, 500.0)  # exact in bfloat16
    half = tiny_sd3.reload(reference, folder, getattr(torch, name))
    expected = relative_l2(run_reference(half, *tensors, 500.0), exact)
    found = relative_l2(run_port(load(folder, HALF[name]), HALF[name], *tensors, 500.0), exact)
    assert found < 2 * expected  # measured at most 1.1 times


def test_padding_under_the_mask_is_not_attended_to(pair) -> None:
    """Equal to the reference, and to the shorter prompt alone: a batch needs no other padding."""
    reference, folder = pair
    tokens, text, size = inputs(text=7)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    model = load(folder)
    expected = run_reference(reference, tokens, text, size, 500.0, mask)
    found = run_port(model, mx.float32, tokens, text, size, 500.0, mask)
    assert relative_l2(found, expected) < 5e-6
    alone = run_port(model, mx.float32, tokens[1:], text[1:, :4], size, 500.0)
    assert relative_l2(found[1:], alone) < 5e-6


def test_every_module_has_a_name_of_the_reference(pair) -> None:
    reference, folder = pair
    model = load(folder)
    assert {path for path, _ in walk(model)} <= {name for name, _ in reference.named_modules()}
    assert set(parameters(model)) == set(reference.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes_dims_rope": [4, 8, 8]}, "axes_dims_rope"),
        ({"zero_cond_t": True}, "zero_cond_t"),
        ({"use_layer3d_rope": True}, "use_layer3d_rope"),
        ({"guidance_embeds": True}, "guidance_embeds"),
    ],
)
def test_config_we_cannot_run_is_refused(pair, tmp_path: Path, change, message: str) -> None:
    raw = json.loads((pair[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError, match=message):
        folder_component(tmp_path, KINDS)


@pytest.mark.parametrize("size", [(64, 64), (83, 41), (1, 1)])
def test_positions_are_the_references_at_real_size(size: tuple[int, int]) -> None:
    from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

    embed = QwenEmbedRope(10000, [16, 56, 56], scale_rope=True)
    image, text = embed([(1, *size)], max_txt_seq_len=1024)
    expected = torch.cat([text, image])
    table = rotation(position_ids(1024, *size), (16, 56, 56), dtype=np.float32)
    for found, wanted in ((table.cos, expected.real), (table.sin, expected.imag)):
        assert np.abs(np.array(found) - wanted.numpy()).max() < 1e-5  # measured 4e-6


def test_a_prompt_beyond_the_references_tables_is_refused(pair) -> None:
    with pytest.raises(InputError, match="shorter prompt"):
        load(pair[1]).positions(4097, 4, 4)


def test_latents_are_unpacked_as_in_the_pipeline() -> None:
    from diffusers import QwenImagePipeline

    tokens = torch.randn(2, 12, 64)
    expected = QwenImagePipeline._unpack_latents(tokens, 48, 64, 8)[:, :, 0].permute(0, 2, 3, 1)
    assert np.array_equal(np.array(unpack_latents(mx.array(tokens.numpy()), 6, 8)), expected)


def test_norms_have_the_numbers_of_the_reference(pair) -> None:
    reference, folder = pair
    assert_same_norms(load(folder), reference)
