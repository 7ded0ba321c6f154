"""Stable Diffusion XL: its U-Net, and what published ports of SD 1.x and XL got wrong around it."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from lydite.models import layers, unet
from lydite.models.text.clip import CLIPTextModel, CLIPTextOutput
from lydite.models.vae.kl import AutoencoderKL
from lydite.sampling.denoiser import Prediction
from lydite.tokenizers.tokenizer import Tokenizer
from seeded_bugs.bugs.schedule import bug, changed_timesteps
from seeded_bugs.cases import Apply, Site, inputs, outputs
from seeded_bugs.patches import attribute, forward, forwards, setting

RESNET = "unet/down_blocks.0.resnets.0"


def called(owner: Any, new: Any) -> Apply:
    """Every module of a class computes `new(module, …)`."""
    return attribute(owner, "__call__", lambda original: new)


def resnet(temb: Any) -> Apply:
    """Resnets with another form of what the embedding of the timestep adds: temb(module, x)."""

    def new(self: Any, x: mx.array, embedding: mx.array) -> mx.array:
        hidden = self.conv1(layers.silu(self.norm1(x))) + temb(self, embedding)
        hidden = self.conv2(layers.silu(self.norm2(hidden)))
        return (self.conv_shortcut(x) if "conv_shortcut" in self else x) + hidden

    return called(unet.ResnetBlock, new)


def not_activated(self: Any, embedding: mx.array) -> mx.array:
    return self.time_emb_proj(embedding)[:, None, None]


def not_added(self: Any, embedding: mx.array) -> float:
    self.time_emb_proj(layers.silu(embedding))
    return 0.0


def first_half_activated(self: Any, x: mx.array) -> mx.array:
    gate, x = mx.split(self.proj(x), 2, axis=-1)
    return x * layers.gelu(gate)


def padded_behind(self: Any, x: mx.array) -> mx.array:
    """As a VAE pads: nothing in front, one row and column behind."""
    return self.conv(mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])[:, 1:, 1:])


def interpolated(self: Any, x: mx.array, size: Any) -> mx.array:
    """Each row of the doubled picture is the mean of itself and the next."""
    doubled = layers.double_size(x)
    doubled = (doubled + mx.concatenate([doubled[:, 1:], doubled[:, -1:]], axis=1)) / 2
    return self.conv(doubled[:, : size[0], : size[1]] if size else doubled)


def oldest_first(self: Any, original: Any, **given: Any) -> mx.array:
    skips = given["res_hidden_states_tuple"]
    return original(**{**given, "res_hidden_states_tuple": skips[::-1]})


def skip_in_front(
    self: Any,
    original: Any,
    hidden_states: mx.array,
    temb: mx.array,
    res_hidden_states_tuple: tuple[mx.array, ...],
    encoder_hidden_states: mx.array,
    upsample_size: Any,
) -> mx.array:
    x = hidden_states
    for index, resnet in enumerate(self.resnets):
        x = resnet(mx.concatenate([res_hidden_states_tuple[-1 - index], x], axis=-1), temb)
        if "attentions" in self:
            x = self.attentions[index](x, encoder_hidden_states=encoder_hidden_states)
    return self.upsamplers[0](x, upsample_size) if "upsamplers" in self else x


def numbers_first(
    self: Any,
    timesteps: mx.array,
    *,
    pooled: mx.array,
    time_ids: mx.array,
    guidance: mx.array | None = None,
) -> mx.array:
    dtype = self.conv_in.bias.dtype
    time = layers.sinusoids(timesteps, self.config.block_out_channels[0]).astype(dtype)
    numbers = layers.sinusoids(time_ids, self.config.addition_time_embed_dim).flatten(1)
    added = mx.concatenate([numbers.astype(dtype), pooled.astype(dtype)], axis=-1)
    return self.time_embedding(time[:, None], guidance) + self.add_embedding(added)


def of_the_scaled(self: Prediction, x: mx.array, output: mx.array, sigma: float) -> mx.array:
    return x * self.c_in(sigma) - output * sigma


def other_ids(original: Any) -> Any:
    def join(self: Tokenizer, texts: Any) -> Any:
        ids, owners = original(self, texts)
        return np.where(np.array(owners) >= 0, ids - 1, ids).astype(np.int32), owners

    return join


BUGS = (
    bug(
        "time-embedding-not-activated",
        "activation_missing",
        "B23",
        inputs(f"{RESNET}.time_emb_proj"),
        resnet(not_activated),
        "SiLU comes before the linear of a resnet's timestep embedding.",
    ),
    bug(
        "time-embedding-not-added",
        "branch_missing",
        "A2",
        inputs(f"{RESNET}.norm2"),
        resnet(not_added),
        "A resnet adds the projected timestep embedding between its convolutions.",
    ),
    bug(
        "geglu-halves-exchanged",
        "gate_up_swapped",
        "B24",
        outputs("unet/down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0"),
        called(layers.GEGLU, first_half_activated),
        "GELU is applied to the second half of the projection.",
    ),
    bug(
        "downsampling-padded-behind",
        "padding_side",
        "D40",
        inputs("unet/down_blocks.0.downsamplers.0.conv"),
        called(unet.Downsample, padded_behind),
        "The U-Net pads one row and column on each side, unlike the VAE.",
    ),
    bug(
        "upsampling-interpolated",
        "resize_kind",
        "D41",
        inputs("unet/up_blocks.0.upsamplers.0.conv"),
        called(unet.Upsample, interpolated),
        "Repeat each pixel twice.",
    ),
    bug(
        "oldest-skip-connection-first",
        "skip_order",
        "D38",
        inputs("unet/up_blocks.2.resnets.0"),
        forward("unet/up_blocks.2", oldest_first),
        "The newest skip connection is used first.",
    ),
    bug(
        "skip-connection-in-front",
        "concat_order",
        "D38",
        inputs("unet/up_blocks.0.resnets.0"),
        forwards("unet", r"up_blocks\.\d+", skip_in_front),
        "The skip connection's channels come after those of the block.",
    ),
    bug(
        "time-ids-before-pooled-text",
        "concat_order",
        "D38",
        inputs("unet/add_embedding"),
        attribute(unet.UNet, "embed_time", lambda original: numbers_first),
        "Pooled text comes first, then the embedded time ids.",
    ),
    bug(
        "input-not-scaled",
        "input_scale",
        "E46",
        inputs("unet"),
        attribute(Prediction, "scaled", lambda original: lambda self, x, sigma: x),
        "Divide the latents by √(1 + σ²) before the U-Net.",
    ),
    bug(
        "denoised-of-the-scaled-latents",
        "sampler_step",
        "E47",
        outputs("pipeline/latents"),
        attribute(Prediction, "denoised", lambda original: of_the_scaled),
        "The denoised value is computed from the latents before scaling.",
    ),
    bug(
        "timesteps-even-under-karras",
        "schedule_timesteps",
        "E50",
        outputs("pipeline/timesteps"),
        changed_timesteps(lambda timesteps: np.linspace(999, 0, len(timesteps))),
        "Compute the timesteps from Karras' sigmas.",
    ),
    bug(
        "post-quant-conv-missing",
        "layer_missing",
        "A2",
        (*inputs("vae/decoder"), *outputs("vae/post_quant_conv")),
        setting("vae", "config", lambda config: replace(config, use_post_quant_conv=False)),
        "The latents pass post_quant_conv before the decoder.",
    ),
    bug(
        "latents-scaled-twice",
        "vae_scaling",
        "E56",
        inputs("vae/decode"),
        attribute(
            AutoencoderKL,
            "denormalize",
            lambda original: lambda self, x: original(self, original(self, x)),
        ),
        "Divide the latents by the VAE's factor once.",
    ),
    bug(
        "token-ids-off-by-one",
        "vocabulary_order",
        "F59",
        outputs("pipeline/token_ids"),
        attribute(Tokenizer, "join", other_ids),
        "Number the tokens as vocab.json does.",
    ),
    bug(
        "last-layer-of-clip",
        "hidden_layer",
        "F61",
        outputs("pipeline/prompt_embeds"),
        attribute(CLIPTextOutput, "penultimate", lambda original: property(lambda o: o.last)),
        "SDXL takes the last but one layer of both encoders.",
    ),
    bug(
        "pooled-text-not-projected",
        "layer_missing",
        "A2",
        (Site("text_encoder_2", "out.text_embeds"),),
        called(CLIPTextModel, lambda self, input_ids: self.text_model(input_ids)),
        "The pooled text of the second encoder passes text_projection.",
    ),
)
