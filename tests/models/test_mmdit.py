"""MMDiT against diffusers' SD3Transformer2DModel: tiny, random weights, through the real loader."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lydite.models.mmdit import MMDiT
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import folder_component
from support import tiny_sd3
from support.distance import relative_l2
from support.norms import assert_same_norms

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}
TIMESTEPS = (1000.0, 731.25, 8.93)


@pytest.fixture(scope="module", params=tiny_sd3.VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(1)
    reference = tiny_sd3.make_transformer(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "transformer"
    reference.save_pretrained(folder)
    return reference, folder


def inputs(height: int = 8, width: int = 8, batch: int = 2):
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return draw(batch, 16, height, width), draw(batch, 11, 64), draw(batch, 40)


def run_reference(model, latent, text, pooled, timestep: float) -> np.ndarray:
    with torch.no_grad():
        out = model(
            hidden_states=latent.to(model.dtype),
            encoder_hidden_states=text.to(model.dtype),
            pooled_projections=pooled.to(model.dtype),
            timestep=torch.full((latent.shape[0],), timestep),
        ).sample
    return out.float().numpy()


def run_ours(model: MMDiT, dtype: mx.Dtype, latent, text, pooled, timestep: float) -> np.ndarray:
    cast = lambda x: mx.array(x.numpy()).astype(dtype)  # noqa: E731
    timesteps = mx.array(TIMESTEPS)
    tables = model.modulation(timesteps, cast(pooled))
    step = {name: table[TIMESTEPS.index(timestep)] for name, table in tables.items()}
    out = model(
        cast(latent.permute(0, 2, 3, 1)),
        model.embed_text(cast(text)),
        step,
        model.positions(latent.shape[2], latent.shape[3]),
    )
    return np.array(out.astype(mx.float32)).transpose(0, 3, 1, 2)


def load(folder: Path, dtype: mx.Dtype = mx.float32) -> MMDiT:
    model = folder_component(folder, KINDS).load(dtype)
    assert isinstance(model, MMDiT)
    return model


@pytest.mark.parametrize("timestep", TIMESTEPS)
@pytest.mark.parametrize("size", [(8, 8), (12, 6), (24, 24)])
def test_equal_in_float32(pair, timestep: float, size: tuple[int, int]) -> None:
    reference, folder = pair
    tensors = inputs(*size)
    theirs = run_reference(reference, *tensors, timestep)
    ours = run_ours(load(folder), mx.float32, *tensors, timestep)
    assert relative_l2(ours, theirs) < 5e-6  # fp32, three blocks; measured 0.9e-6 to 1.7e-6


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_good_as_the_references_own(pair, name: str) -> None:
    reference, folder = pair
    tensors = inputs()
    exact = run_reference(reference, *tensors, 731.25)
    half = tiny_sd3.reload(reference, folder, getattr(torch, name))
    theirs = relative_l2(run_reference(half, *tensors, 731.25), exact)
    ours = relative_l2(run_ours(load(folder, HALF[name]), HALF[name], *tensors, 731.25), exact)
    assert ours < 2 * theirs


def test_a_table_row_is_the_same_alone_or_among_others(pair) -> None:
    _, folder = pair
    model = load(folder)
    pooled = mx.array(inputs()[2].numpy())
    together = model.modulation(mx.array(TIMESTEPS), pooled)
    alone = model.modulation(mx.array(TIMESTEPS[1:2]), pooled)
    for name, table in alone.items():
        assert relative_l2(together[name][1], table[0]) < 1e-6


def test_norms_have_the_numbers_of_the_reference(pair) -> None:
    reference, folder = pair
    assert_same_norms(load(folder), reference)
