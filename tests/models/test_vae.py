"""AutoencoderKL against diffusers', encoder and decoder, with and without the quant convs."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.models.vae.kl import AutoencoderKL
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import folder_component
from support import tiny_sd3
from support.distance import relative_l2
from support.norms import assert_same_norms

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

VARIANTS: dict[str, dict[str, Any]] = {
    "sd3": {"use_quant_conv": False, "use_post_quant_conv": False},
    "sd1": {"latent_channels": 4, "scaling_factor": 0.18215, "shift_factor": None},
    "sdxl": {"latent_channels": 4, "scaling_factor": 0.13025, "shift_factor": None},
    "no-attention": {"mid_block_add_attention": False},
    "deeper": {"layers_per_block": 2, "block_out_channels": (16, 32, 32)},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(2)
    reference = tiny_sd3.make_vae(**VARIANTS[request.param])
    folder = tmp_path_factory.mktemp(request.param) / "vae"
    reference.save_pretrained(folder)
    return reference, folder


def load(folder, dtype: mx.Dtype = mx.float32) -> AutoencoderKL:
    model = folder_component(folder, KINDS).load(dtype)
    assert isinstance(model, AutoencoderKL)
    return model


def last(x: Any) -> mx.array:
    return mx.array(x.numpy().transpose(0, 2, 3, 1))


def first(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).transpose(0, 3, 1, 2)


def picture() -> Any:
    return torch.rand(2, 3, 32, 24, generator=torch.Generator().manual_seed(3)) * 2 - 1


def latent(model: Any) -> Any:
    shape = (2, model.config.latent_channels, 8, 6)
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


def test_encoder_and_decoder_are_equal_in_float32(pair) -> None:
    reference, folder = pair
    ours = load(folder)
    with torch.no_grad():
        theirs = reference.encode(picture()).latent_dist
        decoded = reference.decode(latent(reference)).sample
    posterior = ours.encode(last(picture()))
    assert relative_l2(first(posterior.mean), theirs.mean) < 1e-5
    assert relative_l2(first(posterior.std), theirs.std) < 1e-5
    assert relative_l2(first(ours.decode(last(latent(reference)))), decoded) < 1e-5


def test_extreme_log_variances_are_cut_as_in_the_reference(pair, tmp_path: Path) -> None:
    reference = deepcopy(pair[0])
    layer = reference.quant_conv or reference.encoder.conv_out
    with torch.no_grad():
        layer.bias += torch.linspace(-90, 90, len(layer.bias))
        theirs = reference.encode(picture()).latent_dist
    reference.save_pretrained(tmp_path)
    posterior = load(tmp_path).encode(last(picture()))
    assert relative_l2(first(posterior.std), theirs.std) < 1e-5


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_is_as_good_as_the_references_own(pair, name: str) -> None:
    reference, folder = pair
    dtype, half = getattr(mx, name), tiny_sd3.reload(reference, folder, getattr(torch, name))
    z, x = latent(reference), picture()
    ours = load(folder, dtype)
    with torch.no_grad():
        decoded, mean = reference.decode(z).sample, reference.encode(x).latent_dist.mean
        theirs = half.decode(z.to(half.dtype)).sample.float()
        their_mean = half.encode(x.to(half.dtype)).latent_dist.mean.float()
    floor = relative_l2(theirs, decoded)
    assert relative_l2(first(ours.decode(last(z).astype(dtype))), decoded) < 2 * floor
    floor = relative_l2(their_mean, mean)
    assert relative_l2(first(ours.encode(last(x).astype(dtype)).mean), mean) < 2 * floor


def test_scale_and_shift_are_each_others_inverse(pair) -> None:
    reference, folder = pair
    ours = load(folder)
    z = last(latent(reference))
    shift = reference.config.shift_factor or 0.0
    expected = (latent(reference) - shift) * reference.config.scaling_factor
    assert relative_l2(first(ours.normalize(z)), expected) < 1e-6
    assert relative_l2(ours.denormalize(ours.normalize(z)), z) < 1e-6


def test_a_config_says_whether_float16_is_enough(tmp_path: Path) -> None:
    """A pipeline in float16 decodes in float32 where it is not: SDXL's first VAE gives NaN."""
    for upcast in (True, False):
        tiny_sd3.make_vae(force_upcast=upcast).save_pretrained(tmp_path)
        assert folder_component(tmp_path, KINDS).config.force_upcast is upcast
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["force_upcast"]  # SD 1.x's configs are older than the key
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert folder_component(tmp_path, KINDS).config.force_upcast is True


def test_activations_beyond_float16_are_finite_in_float32_and_bfloat16(tmp_path: Path) -> None:
    reference = tiny_sd3.make_vae(**VARIANTS["sdxl"])
    with torch.no_grad():
        for norm in ("norm1", "norm2"):
            reference.decoder.up_blocks[1].resnets[0].get_submodule(norm).weight.mul_(3e4)
    reference.save_pretrained(tmp_path)
    z = latent(reference)
    with torch.no_grad():
        expected = reference.decode(z).sample
    for dtype, tolerance in ((mx.float32, 1e-5), (mx.bfloat16, 0.1)):
        decoded = load(tmp_path, dtype).decode(last(z).astype(dtype))
        assert relative_l2(first(decoded), expected) < tolerance
    assert not np.isfinite(
        first(load(tmp_path, mx.float16).decode(last(z).astype(mx.float16)))
    ).all()


def test_norms_have_the_numbers_of_the_reference(pair) -> None:
    reference, folder = pair
    assert_same_norms(load(folder), reference)
