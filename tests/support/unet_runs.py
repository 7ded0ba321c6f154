"""One call of a U-Net, of the reference and of the port, with the same inputs."""

from typing import Any

import mlx.core as mx
import numpy as np
import torch

from lydite.models.unet import UNet

TIMESTEPS = (999.0, 500.0, 1.0, 261.75)
Inputs = dict[str, Any]


def inputs(model: Any, size: tuple[int, int] = (16, 8), batch: int = 2) -> Inputs:
    """What one call takes, in torch's layout."""
    config = model.config
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    found: Inputs = {
        "sample": draw(batch, config.in_channels, *size),
        "encoder_hidden_states": draw(batch, 11, config.cross_attention_dim),
    }
    if config.addition_embed_type:
        count = (
            config.projection_class_embeddings_input_dim - 24
        ) // config.addition_time_embed_dim
        ids = torch.tensor([[1024.0, 768.0, 0.0, 8.0, 1024.0, 640.0], [512.0] * 6])[:, :count]
        found["added_cond_kwargs"] = {"text_embeds": draw(batch, 24), "time_ids": ids}
    if config.time_cond_proj_dim:
        found["timestep_cond"] = draw(batch, config.time_cond_proj_dim)
    return found


def cast(value: Any, dtype: Any) -> Any:
    if isinstance(value, dict):
        return {name: cast(item, dtype) for name, item in value.items()}
    return tuple(x.to(dtype) for x in value) if isinstance(value, tuple) else value.to(dtype)


def run_reference(model: Any, tensors: Inputs, timestep: float) -> np.ndarray:
    with torch.no_grad():
        out = model(timestep=timestep, **cast(tensors, model.dtype)).sample
    return out.float().numpy()


def to_mlx(x: Any, dtype: mx.Dtype) -> mx.array:
    array = mx.array(x.numpy()).astype(dtype)
    return array.transpose(0, 2, 3, 1) if array.ndim == 4 else array


def run_port(
    model: UNet, tensors: Inputs, timestep: float, dtype: mx.Dtype = mx.float32
) -> np.ndarray:
    added = tensors.get("added_cond_kwargs", {})
    given: dict[str, mx.array] = {}
    if added:
        given = {"pooled": to_mlx(added["text_embeds"], dtype)}
        given["time_ids"] = to_mlx(added["time_ids"], mx.float32)
    if "timestep_cond" in tensors:
        given["guidance"] = to_mlx(tensors["timestep_cond"], dtype)
    steps = model.embed_time(mx.array(TIMESTEPS), **given)
    down = tensors.get("down_block_additional_residuals")
    mid = tensors.get("mid_block_additional_residual")
    out = model(
        to_mlx(tensors["sample"], dtype),
        steps[TIMESTEPS.index(timestep)],
        to_mlx(tensors["encoder_hidden_states"], dtype),
        down and tuple(to_mlx(x, dtype) for x in down),
        None if mid is None else to_mlx(mid, dtype),
    )
    assert out.dtype == dtype
    return np.array(out.astype(mx.float32)).transpose(0, 3, 1, 2)
