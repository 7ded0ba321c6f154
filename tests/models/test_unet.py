"""The U-Net against diffusers' UNet2DConditionModel: tiny, random weights, the real loader."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.config import read_config
from lydite.core.device import GPU_BRANCHES
from lydite.core.errors import ConfigError, InputError
from lydite.models import unet
from lydite.models.unet import UNet, guidance_embedding
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import folder_component
from lydite.trace.mlx_capture import record_modules
from support import tiny_sd, tiny_sd3
from support.distance import relative_l2
from support.norms import assert_same_norms

torch = pytest.importorskip("torch")
from support.unet_runs import TIMESTEPS, Inputs, inputs, run_port, run_reference, to_mlx  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=tiny_sd.UNETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(1)
    reference = tiny_sd.make_unet(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "unet"
    reference.save_pretrained(folder)
    return reference, folder


def add_residuals(model: Any, tensors: Inputs) -> Inputs:
    """The same with what a ControlNet gives, whose shapes are those of the skip connections."""
    shapes: list[Any] = []
    blocks = [model.conv_in, *model.down_blocks]
    outputs = lambda _, __, out: shapes.extend([out] if torch.is_tensor(out) else out[1])  # noqa: E731
    handles = [block.register_forward_hook(outputs) for block in blocks]
    run_reference(model, tensors, TIMESTEPS[0])
    for handle in handles:
        handle.remove()
    generator = torch.Generator().manual_seed(8)
    residuals = [0.3 * torch.randn(x.shape, generator=generator) for x in [*shapes, shapes[-1]]]
    return {
        **tensors,
        "down_block_additional_residuals": tuple(residuals[:-1]),
        "mid_block_additional_residual": residuals[-1],
    }


def load(folder: Path, dtype: mx.Dtype = mx.float32) -> UNet:
    model = folder_component(folder, KINDS).load(dtype)
    assert isinstance(model, UNet)
    return model


@pytest.mark.parametrize("timestep", TIMESTEPS)
def test_equal_in_float32(pair, timestep: float) -> None:
    reference, folder = pair
    tensors = inputs(reference)
    expected = run_reference(reference, tensors, timestep)
    assert relative_l2(run_port(load(folder), tensors, timestep), expected) < 5e-6


@pytest.mark.parametrize("size", [(9, 12), (13, 7), (24, 16)])
def test_equal_at_sizes_that_do_not_divide(pair, size: tuple[int, int]) -> None:
    reference, folder = pair
    tensors = inputs(reference, size)
    expected = run_reference(reference, tensors, 500.0)
    assert relative_l2(run_port(load(folder), tensors, 500.0), expected) < 5e-6


def test_equal_with_the_residuals_of_a_controlnet(pair) -> None:
    reference, folder = pair
    tensors = add_residuals(reference, inputs(reference))
    expected = run_reference(reference, tensors, 500.0)
    assert relative_l2(run_port(load(folder), tensors, 500.0), expected) < 5e-6
    plain = run_reference(reference, inputs(reference), 500.0)
    assert relative_l2(plain, expected) > 1e-2  # they have an effect


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_is_as_good_as_the_references_own(pair, name: str) -> None:
    reference, folder = pair
    tensors, dtype = inputs(reference), getattr(mx, name)
    exact = run_reference(reference, tensors, 500.0)
    half = tiny_sd3.reload(reference, folder, getattr(torch, name))
    rounding = relative_l2(run_reference(half, tensors, 500.0), exact)
    port = run_port(load(folder, dtype), tensors, 500.0, dtype)
    assert relative_l2(port, exact) < 2 * rounding


class Values:
    """Every output of a module, by its path."""

    def __init__(self) -> None:
        self.outputs: dict[str, np.ndarray] = {}

    def record(self, name: str, value: mx.array, *, slot: str) -> mx.array:
        if slot == "out":
            array = np.array(value)
            self.outputs[name] = array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
        return value


def reference_outputs(model: Any, tensors: Inputs) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}

    def hook(path: str) -> Any:
        def record(_: Any, __: Any, out: Any) -> None:
            out = out if torch.is_tensor(out) else out[0]
            if torch.is_tensor(out):
                found[path] = out.numpy().copy()

        return record

    handles = [m.register_forward_hook(hook(path)) for path, m in model.named_modules() if path]
    run_reference(model, tensors, 500.0)
    for handle in handles:
        handle.remove()
    return found


def test_every_module_has_the_references_name_and_values(pair) -> None:
    reference, folder = pair
    tensors, model = inputs(reference), load(folder)
    expected = reference_outputs(reference, tensors)
    values = Values()
    with record_modules(values, model, scope="unet"):
        run_port(model, tensors, 500.0)
    found = {name.removeprefix("unet/"): x for name, x in values.outputs.items() if "/" in name}
    embeddings = {path for path in found if path.startswith(("time_embedding", "add_embedding"))}
    assert found.keys() <= expected.keys()
    # What only the reference has as modules: activations, sinusoids and dropout.
    activations = ("nonlinearity", "act", "conv_act", "time_proj", "add_time_proj", "dropout")
    assert {
        path
        for path in expected.keys() - found.keys()
        if path.split(".")[-1] not in activations and not path.endswith("to_out.1")
    } == set()
    for path in found.keys() - embeddings:  # those are computed for all steps at once
        batch = expected[path].shape[0]
        port = np.broadcast_to(found[path], (batch, *found[path].shape[1:]))
        assert relative_l2(port, expected[path]) < 1e-5, path


def test_one_steps_embedding_is_the_same_alone_or_among_others(pair) -> None:
    reference, folder = pair
    model, added = load(folder), inputs(reference).get("added_cond_kwargs")
    given = {}
    if added:
        given = {"pooled": to_mlx(added["text_embeds"], mx.float32)}
        given["time_ids"] = to_mlx(added["time_ids"], mx.float32)
    together = model.embed_time(mx.array(TIMESTEPS), **given)
    alone = model.embed_time(mx.array(TIMESTEPS[1:2]), **given)
    assert relative_l2(together[1], alone[0]) < 1e-6


@pytest.mark.parametrize("branches", ["", "1"], ids=["cpu", "gpu-branches"])
def test_large_values_stay_finite_in_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, branches: str
) -> None:
    """Scores of q·k beyond 65504, and group norms over values whose squares are."""
    monkeypatch.setenv(GPU_BRANCHES, branches)
    factor = 1000.0 if branches else 60.0  # MLX multiplies q by the scale first
    reference = tiny_sd.make_unet("sd2", upcast_attention=True)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "to_q" in name or "to_k" in name:
                parameter.mul_(factor)
            if name == "conv_in.weight":
                parameter.mul_(2000.0)
    reference.save_pretrained(tmp_path)
    tensors = inputs(reference)
    port = run_port(load(tmp_path, mx.float16), tensors, 500.0, mx.float16)
    assert np.isfinite(port).all()
    if not branches:
        assert relative_l2(port, run_reference(reference, tensors, 500.0)) < 0.05


def test_the_guidance_embedding_of_a_latent_consistency_model() -> None:
    from diffusers import LatentConsistencyModelPipeline

    embed: Any = LatentConsistencyModelPipeline.get_guidance_scale_embedding
    expected = embed(None, torch.tensor([8.5, 1.0]) - 1, 256)
    # Angles reach 7500, where one rounding of a frequency is 5e-4.
    assert relative_l2(guidance_embedding(mx.array([8.5, 1.0]), 256), expected) < 1e-4


def test_missing_conditioning_is_named(pair) -> None:
    reference, folder = pair
    model = load(folder)
    if reference.config.addition_embed_type:
        with pytest.raises(InputError, match="pooled text and time ids"):
            model.embed_time(mx.array([1.0]))
        with pytest.raises(InputError, match="this U-Net takes"):
            model.embed_time(mx.array([1.0]), pooled=mx.zeros((1, 24)), time_ids=mx.zeros((1, 4)))
    elif not reference.config.time_cond_proj_dim:
        with pytest.raises(InputError, match="time_cond_proj_dim"):
            model.embed_time(mx.array([1.0]), guidance=mx.zeros((1, 32)))


# unet/config.json as published: SD 1.4 (the first keys there were), SD 2.1, SDXL, its refiner.
FIRST_KEYS: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "_diffusers_version": "0.2.2",
    "act_fn": "silu",
    "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280],
    "center_input_sample": False,
    "cross_attention_dim": 768,
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "downsample_padding": 1,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": 4,
    "layers_per_block": 2,
    "mid_block_scale_factor": 1,
    "norm_eps": 1e-05,
    "norm_num_groups": 32,
    "out_channels": 4,
    "sample_size": 64,
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
}


def read(raw: Mapping[str, Any]) -> unet.UNetConfig:
    return read_config(
        unet.UNetConfig, raw, where="config.json", ignored=unet.IGNORED, fixed=unet.FIXED
    )


def test_configs_of_every_generation_are_accounted_for() -> None:
    from diffusers import UNet2DConditionModel

    assert read(FIRST_KEYS).heads == (8, 8, 8, 8)
    current = dict(UNet2DConditionModel(block_out_channels=(32,) * 4).config)
    assert read(current).block_out_channels == (32,) * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_embed_type": "timestep"}, "class_embed_type"),
        ({"num_class_embeds": 1000}, "num_class_embeds"),
        ({"resnet_time_scale_shift": "scale_shift"}, "resnet_time_scale_shift"),
        ({"only_cross_attention": [True, True, True, False]}, "only_cross_attention"),
        ({"addition_embed_type": "image"}, "addition_embed_type"),
        ({"addition_embed_type": "text_time"}, "addition_time_embed_dim"),
        ({"encoder_hid_dim_type": "ip_image_proj"}, "encoder_hid_dim_type"),
        ({"down_block_types": ["AttnDownBlock2D"] * 4}, "down_block_types"),
        ({"attention_head_dim": [5, 10, 20]}, "each of the 4 levels"),
        ({"attention_head_dim": 7}, "not a multiple"),
        ({"transformer_layers_per_block": [1, 1, 1, [1, 2, 3]]}, "does not fit"),
        ({"new_key": 1}, "not understood"),
    ],
)
def test_configs_we_cannot_run_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(FIRST_KEYS | change)


def test_norms_have_the_numbers_of_the_reference(pair) -> None:
    reference, folder = pair
    assert_same_norms(load(folder), reference)
