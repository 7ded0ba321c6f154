"""AutoencoderKLFlux2 against diffusers': encoder, decoder, packing and stored statistics."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError
from lydite.models.vae.flux2 import AutoencoderKLFlux2
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import folder_component
from lydite.trace.mlx_capture import walk
from lydite.weights.load import parameters
from support import tiny_flux2, tiny_sd3
from support.distance import relative_l2
from support.norms import assert_same_norms

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

VARIANTS: dict[str, dict[str, Any]] = {
    "klein": {},
    "small decoder": {"decoder_block_out_channels": (4, 8, 8)},
    "without quant convs": {"use_quant_conv": False, "use_post_quant_conv": False},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(2)
    reference = tiny_flux2.make_vae(**VARIANTS[request.param])
    folder = tmp_path_factory.mktemp("vae") / "vae"
    reference.save_pretrained(folder)
    return reference, folder


def load(folder: Path, dtype: mx.Dtype = mx.float32) -> AutoencoderKLFlux2:
    model = folder_component(folder, KINDS).load(dtype)
    assert isinstance(model, AutoencoderKLFlux2)
    return model


def draw(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def last(x: Any) -> mx.array:
    return mx.array(x.numpy().transpose(0, 2, 3, 1))


def first(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).transpose(0, 3, 1, 2)


def test_encoder_and_decoder_are_equal_in_float32(pair) -> None:
    reference, folder = pair
    ours, picture, latent = load(folder), draw(2, 3, 32, 24), draw(2, 4, 8, 6)
    with torch.no_grad():
        theirs = reference.encode(picture).latent_dist
        decoded = reference.decode(latent).sample
    posterior = ours.encode(last(picture))
    assert relative_l2(first(posterior.mean), theirs.mean) < 1e-5
    assert relative_l2(first(posterior.std), theirs.std) < 1e-5
    assert relative_l2(first(ours.decode(last(latent))), decoded) < 1e-5  # at most 1.5e-6


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_is_as_good_as_the_references_own(pair, name: str) -> None:
    reference, folder = pair
    dtype, half = getattr(mx, name), tiny_sd3.reload(reference, folder, getattr(torch, name))
    latent = draw(2, 4, 8, 6)
    with torch.no_grad():
        exact = reference.decode(latent).sample
        theirs = half.decode(latent.to(half.dtype)).sample.float()
    found = first(load(folder, dtype).decode(last(latent).astype(dtype)))
    assert relative_l2(found, exact) < 2 * relative_l2(theirs, exact)


def test_latents_are_packed_and_normalized_as_in_the_pipeline(pair) -> None:
    from diffusers import Flux2KleinPipeline

    reference, folder = pair
    ours, latent = load(folder), draw(2, 4, 8, 6)
    packed = Flux2KleinPipeline._patchify_latents(latent)
    mean = reference.bn.running_mean.view(1, -1, 1, 1)
    deviation = torch.sqrt(reference.bn.running_var.view(1, -1, 1, 1) + 1e-4)
    normalized = ours.normalize(last(latent))
    assert relative_l2(first(normalized), (packed - mean) / deviation) < 1e-6
    assert relative_l2(first(ours.denormalize(normalized)), latent) < 1e-6


def test_every_module_has_a_name_of_the_reference(pair) -> None:
    reference, folder = pair
    ours = load(folder)
    assert {path for path, _ in walk(ours)} <= {name for name, _ in reference.named_modules()}
    counted = {"bn.num_batches_tracked"}
    assert set(parameters(ours)) == set(reference.state_dict()) - counted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": [1, 1]}, "patch_size"),
        ({"scaling_factor": 0.36}, "scaling_factor"),
        ({"decoder_block_out_channels": [8, 8]}, "decoder_block_out_channels"),
        ({"decoder_block_out_channels": [8, 8, 6]}, "decoder_block_out_channels"),
    ],
)
def test_config_we_cannot_run_is_refused(pair, tmp_path: Path, change, message: str) -> None:
    raw = json.loads((pair[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError, match=message):
        folder_component(tmp_path, KINDS)


def test_norms_have_the_numbers_of_the_reference(pair) -> None:
    reference, folder = pair
    assert_same_norms(load(folder), reference, only_theirs=("bn",))
