"""Z-Image's transformer against diffusers: tiny, random weights, through the real loader."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError, InputError
from lydite.models.z_image import ZImageTransformer, position_ids
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import folder_component
from lydite.trace.mlx_capture import walk
from lydite.weights.load import parameters
from support import tiny_sd3, tiny_z_image
from support.distance import relative_l2
from support.norms import assert_same_norms

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}
TIMES = (0.0, 268.75, 500.0, 991.07)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(1)
    reference = tiny_z_image.make_transformer()
    folder = tmp_path_factory.mktemp("z_image") / "transformer"
    reference.save_pretrained(folder)
    return reference, folder


def inputs(height: int = 8, width: int = 6, text: int = 5, batch: int = 2):
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return draw(batch, 4, height, width), draw(batch, text, 40)


def run_reference(model: Any, latents, text, time: float) -> np.ndarray:
    with torch.no_grad():
        out = model(
            list(latents.to(model.dtype)[:, :, None]),
            torch.full((len(latents),), time / 1000),
            list(text.to(model.dtype)),
        ).sample
    return torch.stack(out)[:, :, 0].permute(0, 2, 3, 1).float().numpy()


def run_port(model: ZImageTransformer, dtype: mx.Dtype, latents, text, time: float) -> np.ndarray:
    cast = lambda x: mx.array(x.numpy()).astype(dtype)  # noqa: E731
    times = (np.array(TIMES) / 1000).astype(np.float32) * 1000  # rounded as the reference does
    tables = model.modulation(mx.array(times), dtype)
    step = {name: table[TIMES.index(time)] for name, table in tables.items()}
    _, _, height, width = latents.shape
    positions = model.positions(text.shape[1], height // 2, width // 2)
    out = model(cast(latents.permute(0, 2, 3, 1)), model.embed_text(cast(text)), step, positions)
    assert out.dtype == dtype
    return np.array(out.astype(mx.float32))


def load(folder: Path, dtype: mx.Dtype = mx.float32) -> ZImageTransformer:
    model = folder_component(folder, KINDS).load(dtype)
    assert isinstance(model, ZImageTransformer)
    return model


@pytest.mark.parametrize("time", [0.0, 268.75, 991.07])
@pytest.mark.parametrize("size", [(8, 6, 5), (16, 16, 32), (2, 18, 70)])
def test_equal_in_float32(pair, time: float, size: tuple[int, int, int]) -> None:
    """Text and image that need filling up and that do not."""
    reference, folder = pair
    expected = run_reference(reference, *inputs(*size), time)
    found = run_port(load(folder), mx.float32, *inputs(*size), time)
    # torch rounds two of the 128 frequencies the other way, and a late time multiplies that
    assert relative_l2(found, expected) < (5e-6 if time < 900 else 1e-5)  # 2.3e-6 and 6.8e-6


@pytest.mark.parametrize("size", [(64, 64), (83, 41), (1, 1)])
def test_positions_are_the_references_at_real_size(pair, size: tuple[int, int]) -> None:
    from diffusers.models.transformers.transformer_z_image import RopeEmbedder

    model, dims, lens = load(pair[1]), (32, 48, 48), (1536, 512, 512)
    width = sum(dims) * model.config.n_heads
    model.config = replace(model.config, dim=width, axes_dims=dims, axes_lens=lens)
    embed = RopeEmbedder(model.config.rope_theta, list(dims), list(lens))
    expected = embed(torch.from_numpy(position_ids(1024, *size)))
    table = model.positions(1024, *size)
    for found, wanted in ((table.cos, expected.real), (table.sin, expected.imag)):
        error = np.abs(np.array(found) - wanted.numpy())
        assert error.max() < 1e-6  # 3e-5 where angles are not rounded


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_good_as_the_references_own(pair, name: str) -> None:
    reference, folder = pair
    exact = run_reference(reference, *inputs(), 500.0)
    half = tiny_sd3.reload(reference, folder, getattr(torch, name))
    expected = relative_l2(run_reference(half, *inputs(), 500.0), exact)
    found = relative_l2(run_port(load(folder, HALF[name]), HALF[name], *inputs(), 500.0), exact)
    assert found < 2 * expected  # measured at most 1.2 times


def test_every_module_has_a_name_of_the_reference(pair) -> None:
    reference, folder = pair
    model = load(folder)
    assert {path for path, _ in walk(model)} <= {name for name, _ in reference.named_modules()}
    assert set(parameters(model)) == set(reference.state_dict())


def test_what_goes_beyond_the_positions_is_refused(pair) -> None:
    model = load(pair[1])
    with pytest.raises(InputError, match="shorter prompt"):
        model.positions(240, 4, 4)
    with pytest.raises(InputError, match="smaller size"):
        model.positions(5, 65, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes_dims": [4, 8, 8]}, "axes_dims"),
        ({"all_patch_size": [1]}, "all_patch_size"),
        ({"siglip_feat_dim": 1152}, "siglip_feat_dim"),
        ({"qk_norm": False}, "qk_norm"),
    ],
)
def test_config_we_cannot_run_is_refused(pair, tmp_path: Path, change, message: str) -> None:
    raw = json.loads((pair[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError, match=message):
        folder_component(tmp_path, KINDS)


def test_norms_have_the_numbers_of_the_reference(pair) -> None:
    reference, folder = pair
    assert_same_norms(load(folder), reference)
