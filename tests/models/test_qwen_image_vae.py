"""AutoencoderKLQwenImage against diffusers on single frames, through the real loader."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError
from lydite.models.vae.qwen_image import AutoencoderKLQwenImage
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import folder_component
from lydite.trace.mlx_capture import walk
from lydite.weights.audit import audit
from support import tiny_qwen_image, tiny_sd3
from support.distance import relative_l2

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(1)
    reference = tiny_qwen_image.make_vae()
    folder = tmp_path_factory.mktemp("qwen") / "vae"
    reference.save_pretrained(folder)
    return reference, folder


def load(folder: Path, dtype: mx.Dtype = mx.float32) -> AutoencoderKLQwenImage:
    model = folder_component(folder, KINDS).load(dtype)
    assert isinstance(model, AutoencoderKLQwenImage)
    return model


def normals(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def frame(x: np.ndarray, dtype: Any) -> Any:
    """Channels last to the reference's (B, C, frames, H, W)."""
    return torch.from_numpy(x).permute(0, 3, 1, 2)[:, :, None].to(dtype)


def picture(x: Any) -> np.ndarray:
    return x[:, :, 0].permute(0, 2, 3, 1).float().numpy()


def encode_reference(model: Any, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad():
        posterior = model.encode(frame(image, model.dtype)).latent_dist
    return picture(posterior.mean), picture(posterior.std)


def decode_reference(model: Any, latent: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return picture(model.decode(frame(latent, model.dtype)).sample)


@pytest.mark.parametrize("size", [(6, 6), (3, 8), (1, 1)])
def test_decoder_is_equal_in_float32(pair, size: tuple[int, int]) -> None:
    reference, folder = pair
    latent = normals(2, *size, 4)
    found = load(folder).decode(mx.array(latent))
    expected = decode_reference(reference, latent)
    assert relative_l2(np.array(found), expected) < 1e-5  # measured at most 1.6e-6


@pytest.mark.parametrize("size", [(48, 48), (24, 64), (8, 8)])
def test_encoder_is_equal_in_float32(pair, size: tuple[int, int]) -> None:
    reference, folder = pair
    image = np.clip(normals(2, *size, 3), -1, 1)
    found = load(folder).encode(mx.array(image))
    for part, expected in zip(found, encode_reference(reference, image), strict=True):
        assert relative_l2(np.array(part), expected) < 1e-5  # measured at most 1.2e-6


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_good_as_the_references_own(pair, name: str) -> None:
    reference, folder = pair
    latent, image = normals(1, 6, 6, 4), np.clip(normals(1, 48, 48, 3), -1, 1)
    half, port = tiny_sd3.reload(reference, folder, getattr(torch, name)), load(folder, HALF[name])
    exact = decode_reference(reference, latent)
    expected = relative_l2(decode_reference(half, latent), exact)
    pixels = port.decode(mx.array(latent).astype(HALF[name])).astype(mx.float32)
    assert relative_l2(np.array(pixels), exact) < 2 * expected
    exact = encode_reference(reference, image)[0]
    expected = relative_l2(encode_reference(half, image)[0], exact)
    mean = port.encode(mx.array(image).astype(HALF[name])).mean.astype(mx.float32)
    assert relative_l2(np.array(mean), exact) < 2 * expected


def test_latents_are_normalized_as_in_the_pipeline(pair) -> None:
    reference, folder = pair
    model, latent = load(folder), normals(2, 3, 5, 4)
    mean, std = (torch.tensor(reference.config[f"latents_{name}"]) for name in ("mean", "std"))
    expected = torch.from_numpy(latent) / (1.0 / std) + mean  # as before decoding
    raw = model.denormalize(mx.array(latent))
    assert relative_l2(np.array(raw), expected.numpy()) < 1e-6
    assert relative_l2(np.array(model.normalize(raw)), latent) < 1e-6


def test_every_module_has_a_name_of_the_reference(pair) -> None:
    reference, folder = pair
    names = {name for name, _ in reference.named_modules()}
    assert {path for path, _ in walk(load(folder))} <= names


def test_only_what_changes_the_number_of_frames_is_dropped(pair) -> None:
    component = folder_component(pair[1], KINDS)
    with component.scope() as scope:
        ledger = audit(scope, component.expected, component.rules, where="here")
    assert ledger.clean
    assert {row.tensor.split(".")[-2] for row in ledger.dropped} == {"time_conv"}
    assert len(ledger.dropped) == 2 * (2 + 2)  # weight and bias; encoder and decoder


def test_no_slice_for_the_past_reaches_a_picture(pair) -> None:
    reference = tiny_qwen_image.make_vae()
    reference.load_state_dict(pair[0].state_dict())
    latent, image = normals(1, 4, 4, 4), normals(1, 32, 32, 3)
    before = decode_reference(reference, latent), encode_reference(reference, image)[0]
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.ndim == 5:
                past = slice(None) if "time_conv" in name else slice(-1)
                parameter[:, :, past] = 7.0
    after = decode_reference(reference, latent), encode_reference(reference, image)[0]
    for first, second in zip(before, after, strict=True):
        assert relative_l2(second, first) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_scales": [0.5]}, "attn_scales"),
        ({"latents_mean": [0.0]}, "latents_mean"),
        ({"latents_std": [1.0, 1.0, 0.0, 1.0]}, "latents_std"),
        ({"temperal_downsample": [True]}, "temperal_downsample"),
        ({"is_residual": True}, "is_residual"),
    ],
)
def test_config_we_cannot_run_is_refused(pair, tmp_path: Path, change, message: str) -> None:
    raw = json.loads((pair[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ConfigError, match=message):
        folder_component(tmp_path, KINDS)
