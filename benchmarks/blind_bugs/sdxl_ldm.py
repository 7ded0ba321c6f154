"""SDXL's U-Net and loop (Podell et al. 2023, arXiv 2307.01952) in MLX, names of its first code.

The modules are called as in the authors' generative-models (sgm): input_blocks, middle_block,
output_blocks, label_emb, attn1, attn2, ff.net.0.proj. Channels last; attn1 has one layer for q, k
and v, attn2 one for k and v. The prompt comes first in the batch, the negative prompt second.
Guidance works on denoised pictures, and Euler's slope is (x - denoised) / sigma.
"""

import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import EulerDiscreteScheduler, UNet2DConditionModel

from blind_bugs.planting import (
    Array,
    Bug,
    checkpoint,
    given,
    noise,
    port_trace,
    randomised,
    reference_trace,
    saved,
)
from lydite.trace.function_capture import watch_function
from lydite.trace.mlx_capture import record_modules
from lydite.trace.taps import set_step, tap
from lydite.trace.torch_capture import record_modules as record_torch_modules

mx.set_default_device(mx.cpu)

NAME = "sdxl_ldm"
WIDTHS, DEPTHS, HEAD, GROUPS = (16, 32, 48), (0, 1, 2), 8, 8
CHANNELS, ROWS, COLUMNS, TOKENS = 4, 8, 12, 7
CLIP_L, CLIP_G, SIZE = 8, 16, 8  # widths of the two encoders, and of the sinusoids of one size
CONTEXT, VECTOR, TIME = CLIP_L + CLIP_G, CLIP_G + 6 * SIZE, 4 * WIDTHS[0]
SIZES = (1037, 1521, 12, 36, 1024, 1536)  # original, crop, target; rows before columns
STEPS, GUIDANCE, BETA_START, BETA_END, TRAIN = 3, 3.0, 0.00085, 0.012, 1000


def reference(folder: Path, dtype: str) -> None:
    """Three steps of Euler, as the SDXL pipeline runs them: the negative prompt first."""
    down = tuple("CrossAttnDownBlock2D" if d else "DownBlock2D" for d in DEPTHS)
    up = tuple("CrossAttnUpBlock2D" if d else "UpBlock2D" for d in reversed(DEPTHS))
    config: dict[str, Any] = dict(in_channels=CHANNELS, out_channels=CHANNELS, layers_per_block=1)
    config |= dict(block_out_channels=WIDTHS, down_block_types=down, up_block_types=up)
    config |= dict(transformer_layers_per_block=(1, *DEPTHS[1:]), norm_num_groups=GROUPS)
    config |= dict(attention_head_dim=tuple(w // HEAD for w in WIDTHS), cross_attention_dim=CONTEXT)
    config |= dict(use_linear_projection=True, addition_embed_type="text_time")
    config |= dict(addition_time_embed_dim=SIZE, projection_class_embeddings_input_dim=VECTOR)
    model = randomised(lambda: UNet2DConditionModel(**config), 63)
    model.conv_out.weight.mul_(0.5)  # as a prediction of noise, not far larger
    model = saved(model, folder, "unet", dtype)
    options: dict[str, Any] = dict(beta_start=BETA_START, beta_end=BETA_END)
    options |= dict(beta_schedule="scaled_linear", timestep_spacing="leading", steps_offset=1)
    scheduler: Any = EulerDiscreteScheduler(**options)
    scheduler.set_timesteps(STEPS)
    with (
        reference_trace(folder, dtype) as recorder,
        record_torch_modules(recorder, model, scope="unet", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        x = noise(6, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        first = noise(7, 2, TOKENS, CLIP_L).to(model.dtype)
        second = noise(8, 2, TOKENS, CLIP_G).to(model.dtype)
        pooled = noise(9, 2, CLIP_G).to(model.dtype)
        sizes = torch.tensor([SIZES, SIZES], dtype=torch.float32)
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/hidden_states", first, kind="input")
        recorder.record("pipeline/hidden_states_2", second, kind="input")
        embeds = torch.cat([first, second], -1)
        recorder.record("pipeline/prompt_embeds", embeds, kind="input")
        recorder.record("pipeline/pooled_prompt_embeds", pooled, kind="input")
        recorder.record("pipeline/time_ids", sizes, kind="input")
        x = recorder.record("pipeline/scaled_noise", x * scheduler.init_noise_sigma)
        added = {"text_embeds": pooled, "time_ids": sizes}
        for recorder.step, t in enumerate(scheduler.timesteps):
            both = scheduler.scale_model_input(torch.cat([x, x]), t)
            out = model(both, t, encoder_hidden_states=embeds, added_cond_kwargs=added)
            negative, positive = out.sample.chunk(2)
            guided = negative + GUIDANCE * (positive - negative)
            recorder.record("pipeline/noise_pred", guided)
            x, clean = scheduler.step(guided, t, x, return_dict=False)
            recorder.record("pipeline/pred_original_sample", clean)
            recorder.record("pipeline/latents", x)


class Layer(nn.Module):
    """A module that knows its place, and the bug."""

    def __init__(self, place: str, bug: str | None) -> None:
        super().__init__()
        self.place, self.bug = place, bug

    def has(self, bug: str, where: str = "") -> bool:
        return self.bug == bug and self.place.startswith(where)


def group_norm(width: int, eps: float) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, width, eps, pytorch_compatible=True)


def heads_of(x: mx.array) -> mx.array:
    """(b, n, heads * d) as (b, heads, n, d)."""
    b, n, c = x.shape
    return x.reshape(b, n, c // HEAD, HEAD).transpose(0, 2, 1, 3)


class SelfAttention(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = [nn.Linear(width, width)]

    def __call__(self, x: mx.array) -> mx.array:
        q, k, v = (heads_of(part) for part in mx.split(self.to_qkv(x), 3, -1))
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=HEAD**-0.5)
        return self.to_out[0](y.transpose(0, 2, 1, 3).reshape(x.shape))


class CrossAttention(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(CONTEXT, 2 * width, bias=False)
        self.to_out = [nn.Linear(width, width)]

    def __call__(self, x: mx.array, context: mx.array) -> mx.array:
        b, n, c = x.shape
        q, (k, v) = self.to_q(x), mx.split(self.to_kv(context), 2, -1)
        if self.has("heads_last", "output_blocks.0"):
            q, k, v = (z.reshape(b, -1, HEAD, c // HEAD).transpose(0, 3, 1, 2) for z in (q, k, v))
        else:
            q, k, v = heads_of(q), heads_of(k), heads_of(v)
        scale = (c if self.has("cross_scale_of_width") else HEAD) ** -0.5
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)
        return self.to_out[0](y.transpose(0, 2, 1, 3).reshape(b, n, c))


class GEGLU(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.proj = nn.Linear(width, 8 * width)

    def __call__(self, x: mx.array) -> mx.array:
        y, gate = mx.split(self.proj(x), 2, -1)
        if self.has("geglu_gate_first", "output_blocks.0"):
            y, gate = gate, y
        return y * (nn.gelu_approx(gate) if self.has("gelu_tanh") else nn.gelu(gate))


class FeedForward(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.net = [GEGLU(place, bug, width), nn.Identity(), nn.Linear(4 * width, width)]

    def __call__(self, x: mx.array) -> mx.array:
        return self.net[2](self.net[0](x))


class TransformerBlock(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.norm1, self.attn1 = nn.LayerNorm(width), SelfAttention(place, bug, width)
        self.norm2, self.attn2 = nn.LayerNorm(width), CrossAttention(place, bug, width)
        self.norm3, self.ff = nn.LayerNorm(width), FeedForward(place, bug, width)

    def __call__(self, x: mx.array, context: mx.array) -> mx.array:
        x = self.attn1(self.norm1(x)) + x
        y = x if self.has("cross_without_norm", "output_blocks.2") else self.norm2(x)
        before, x = x, self.attn2(y, context) + x
        if self.has("feed_reads_before_cross", "input_blocks.3"):
            return self.ff(self.norm3(before)) + x
        return self.ff(self.norm3(x)) + x


class SpatialTransformer(Layer):
    def __init__(self, place: str, bug: str | None, level: int) -> None:
        super().__init__(place, bug)
        width = WIDTHS[level]
        self.norm = group_norm(width, 1e-6)
        self.proj_in, self.proj_out = nn.Linear(width, width), nn.Linear(width, width)
        self.transformer_blocks = [
            TransformerBlock(f"{place}.transformer_blocks.{i}", bug, width)
            for i in range(DEPTHS[level])
        ]

    def __call__(self, x: mx.array, context: mx.array) -> mx.array:
        b, h, w, c = x.shape
        y = self.proj_in(self.norm(x).reshape(b, h * w, c))
        blocks = self.transformer_blocks
        if self.has("loop_ends_early", "output_blocks.1"):
            blocks = blocks[:-1]
        for block in blocks:
            y = block(y, context)
        y = self.proj_out(y)
        if self.has("tokens_unflattened_across", "input_blocks.3"):
            y = y.reshape(b, w, h, c).transpose(0, 2, 1, 3)
        y = y.reshape(b, h, w, c)
        return y if self.has("spatial_residual_missing", "input_blocks.5") else y + x


class ResBlock(Layer):
    def __init__(self, place: str, bug: str | None, wide: int, out: int) -> None:
        super().__init__(place, bug)
        self.in_layers = [group_norm(wide, 1e-5), nn.SiLU(), nn.Conv2d(wide, out, 3, padding=1)]
        self.emb_layers = [nn.SiLU(), nn.Linear(TIME, out)]
        conv = nn.Conv2d(out, out, 3, padding=1)
        self.out_layers = [group_norm(out, 1e-5), nn.SiLU(), nn.Identity(), conv]
        if wide != out:
            self.skip_connection = nn.Conv2d(wide, out, 1)

    def __call__(self, x: mx.array, emb: mx.array) -> mx.array:
        norm, silu, conv = self.in_layers
        y = conv(silu(norm(x)))
        emb = self.emb_layers[1](self.emb_layers[0](emb))[:, None, None]
        norm, silu, _, conv = self.out_layers
        late = self.has("emb_after_second_norm", "middle_block.2")
        y = norm(y) + emb if late else norm(y + emb)
        y = conv(silu(y))
        return y + (self.skip_connection(x) if "skip_connection" in self else x)


class Downsample(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.at_end = self.has("downsample_pads_end", "input_blocks.4")
        self.op = nn.Conv2d(width, width, 3, stride=2, padding=0 if self.at_end else 1)

    def __call__(self, x: mx.array) -> mx.array:
        if self.at_end:
            x = mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])
        return self.op(x)


class Upsample(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def __call__(self, x: mx.array) -> mx.array:
        b, h, w, c = x.shape
        x = mx.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c))
        return self.conv(x.reshape(b, 2 * h, 2 * w, c))


def waves(x: Array, width: int) -> Array:
    """Cosines, then sines, of each number."""
    half = width // 2
    freqs = np.exp(-math.log(10000) * np.arange(half, dtype=np.float32) / half)
    angles = x.astype(np.float32)[..., None] * freqs.astype(np.float32)
    return np.concatenate([np.cos(angles), np.sin(angles)], -1)


class UNetModel(Layer):
    def __init__(self, bug: str | None) -> None:
        super().__init__("", bug)
        self.time_embed = [nn.Linear(WIDTHS[0], TIME), nn.SiLU(), nn.Linear(TIME, TIME)]
        self.label_emb = [[nn.Linear(VECTOR, TIME), nn.SiLU(), nn.Linear(TIME, TIME)]]
        self.input_blocks: list[list[nn.Module]] = [[nn.Conv2d(CHANNELS, WIDTHS[0], 3, padding=1)]]
        wide, kept = WIDTHS[0], [WIDTHS[0]]
        for level, width in enumerate(WIDTHS):
            at = f"input_blocks.{len(self.input_blocks)}"
            self.input_blocks.append(self.pair(at, level, wide))
            wide = width
            kept.append(wide)
            if level < len(WIDTHS) - 1:
                at = f"input_blocks.{len(self.input_blocks)}"
                self.input_blocks.append([Downsample(at, bug, wide)])
                kept.append(wide)
        self.middle_block = [
            ResBlock("middle_block.0", bug, wide, wide),
            SpatialTransformer("middle_block.1", bug, len(WIDTHS) - 1),
            ResBlock("middle_block.2", bug, wide, wide),
        ]
        self.output_blocks: list[list[nn.Module]] = []
        for level in reversed(range(len(WIDTHS))):
            for i in range(2):
                at = f"output_blocks.{len(self.output_blocks)}"
                layers = self.pair(at, level, wide + kept.pop())
                wide = WIDTHS[level]
                if level and i:
                    layers.append(Upsample(at, bug, wide))
                self.output_blocks.append(layers)
        norm, conv = group_norm(wide, 1e-5), nn.Conv2d(wide, CHANNELS, 3, padding=1)
        self.out = [norm, nn.SiLU(), conv]

    def pair(self, at: str, level: int, wide: int) -> list[nn.Module]:
        """A resnet, and a transformer where the level has one."""
        layers: list[nn.Module] = [ResBlock(at, self.bug, wide, WIDTHS[level])]
        if DEPTHS[level]:
            layers.append(SpatialTransformer(at, self.bug, level))
        return layers

    def run(
        self, name: str, layers: list[nn.Module], x: mx.array, emb: mx.array, context: mx.array
    ) -> mx.array:
        """A row of layers, each with what it takes."""
        for layer in layers:
            if isinstance(layer, ResBlock):
                x = layer(x, emb)
            elif isinstance(layer, SpatialTransformer):
                x = layer(x, context)
            else:
                step: Any = layer
                x = step(x)
        return tap(f"diffusion_model/{name}", x)

    def __call__(self, x: mx.array, t: float, context: mx.array, y: mx.array) -> mx.array:
        wave = mx.array(waves(np.full(len(x), t), WIDTHS[0])).astype(x.dtype)
        tap("diffusion_model/timestep_embedding", wave)
        first, silu, second = self.time_embed
        emb = second(silu(first(wave)))
        first, silu, second = self.label_emb[0]
        y = first(y)
        y = second(y if self.has("label_silu_missing") else silu(y))
        emb = tap("diffusion_model/emb", emb + y)
        hs: list[mx.array] = []
        for i, layers in enumerate(self.input_blocks):
            x = self.run(f"input_blocks.{i}", layers, x, emb, context)
            hs.append(x)
        x = self.run("middle_block", self.middle_block, x, emb, context)
        for i, layers in enumerate(self.output_blocks):
            skip = hs.pop()
            parts = [skip, x] if self.has("skip_joined_first") and i == 2 else [x, skip]
            x = self.run(f"output_blocks.{i}", layers, mx.concatenate(parts, -1), emb, context)
        norm, silu, conv = self.out
        x = norm(x)
        return conv(x if self.has("last_silu_missing") else silu(x))


RESNET = (
    ("norm1", "in_layers.0"),
    ("conv1", "in_layers.2"),
    ("time_emb_proj", "emb_layers.1"),
    ("norm2", "out_layers.0"),
    ("conv2", "out_layers.3"),
    ("conv_shortcut", "skip_connection"),
)
TOP = (
    ("conv_in.", "input_blocks.0.0."),
    ("conv_norm_out.", "out.0."),
    ("conv_out.", "out.2."),
    ("time_embedding.linear_1.", "time_embed.0."),
    ("time_embedding.linear_2.", "time_embed.2."),
    ("add_embedding.linear_1.", "label_emb.0.0."),
    ("add_embedding.linear_2.", "label_emb.0.2."),
)


def sgm_name(old: str) -> str:
    """The name in the authors' checkpoint of a parameter of diffusers."""
    for a, b in TOP:
        if old.startswith(a):
            return b + old.removeprefix(a)
    side, rest = old.split(".", 1)
    if side == "mid_block":
        kind, i, rest = rest.split(".", 2)
        place = f"middle_block.{2 * int(i) if kind == 'resnets' else 1}"
    else:
        level, kind, i, rest = rest.split(".", 3)
        down = side == "down_blocks"
        at = 2 * int(level) + int(i) + (1 if down else 0)
        part = {"resnets": 0, "attentions": 1, "downsamplers": 0, "upsamplers": 2}[kind]
        at += 1 if kind in ("downsamplers", "upsamplers") else 0
        place = f"{'input_blocks' if down else 'output_blocks'}.{at}.{part}"
        if kind == "downsamplers":
            rest = rest.replace("conv", "op")
    if kind == "resnets":
        for a, b in RESNET:
            rest = re.sub(rf"^{a}\b", b, rest)
    return f"{place}.{rest}"


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: kernels as (out, rows, columns, in), fused q, k and v."""
    new: dict[str, Array] = {}
    for old, value in w.items():
        kernel = value.ndim == 4
        new[sgm_name(old)] = value.transpose(0, 2, 3, 1).copy() if kernel else value.copy()
    for name in [n for n in new if ".attn1.to_q." in n]:
        parts = [new.pop(name.replace("to_q", f"to_{x}")) for x in "qkv"]
        new[name.replace("to_q", "to_qkv")] = np.concatenate(parts)
    for name in [n for n in new if ".attn2.to_k." in n]:
        order = "vk" if bug == "values_before_keys" and name.startswith("middle_block") else "kv"
        parts = [new.pop(name.replace("to_k", f"to_{x}")) for x in order]
        new[name.replace("to_k", "to_kv")] = np.concatenate(parts)
    if bug == "proj_in_transposed":
        name = "input_blocks.3.1.proj_in.weight"
        new[name] = new[name].T.copy()
    if bug == "kernel_in_out_exchanged":
        name = "middle_block.0.in_layers.2.weight"
        new[name] = new[name].swapaxes(0, 3).copy()
    if bug == "block_loaded_twice":
        second = "input_blocks.5.1.transformer_blocks.1."
        for name in [n for n in new if n.startswith(second)]:
            new[name] = new[name.replace("transformer_blocks.1.", "transformer_blocks.0.")]
    if bug == "shortcut_bias_missing":
        name = "output_blocks.3.0.skip_connection.bias"
        new[name] = np.zeros_like(new[name])
    if bug == "label_emb_bfloat16":
        name = "label_emb.0.0.weight"
        new[name] = new[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    if bug == "norms_exchanged":
        for kind in ("weight", "bias"):
            a, b = (f"output_blocks.1.1.transformer_blocks.1.norm{i}.{kind}" for i in (1, 3))
            new[a], new[b] = new[b], new[a]
    return new


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Sigmas with the last zero, and the index of each but that."""
    betas = np.linspace(BETA_START**0.5, BETA_END**0.5, TRAIN, dtype=np.float64) ** 2
    bars = np.cumprod(1 - betas)
    table = ((1 - bars) / bars) ** 0.5
    times = np.arange(STEPS)[::-1] * (TRAIN // STEPS) + (0 if bug == "offset_missing" else 1)
    sigmas = np.append(table[times], 0)
    if bug == "time_of_next_step":
        times = np.append(times[1:], 0)
    return sigmas.astype(np.float32), times.astype(np.float32)


def conditions(folder: Path, bug: str | None, run: mx.Dtype) -> tuple[mx.array, mx.array]:
    """The context and the vector of the two calls, the prompt's before the negative prompt's."""
    value = given(folder)
    first, second, pooled, sizes = (
        value(f"pipeline/{n}")[::-1]
        for n in ("hidden_states", "hidden_states_2", "pooled_prompt_embeds", "time_ids")
    )
    if bug == "negative_pooled_for_both":
        pooled = pooled[[1, 1]]
    if bug == "sizes_columns_first":
        sizes = sizes[:, [1, 0, 3, 2, 5, 4]]
    if bug == "crop_after_target":
        sizes = sizes[:, [0, 1, 4, 5, 2, 3]]
    sizes = tap("conditioner/sizes", np.ascontiguousarray(sizes), kind="input")
    if bug == "sizes_bfloat16":
        sizes = sizes.astype(ml_dtypes.bfloat16).astype(np.float32)
    pooled = tap("conditioner/pooled", np.ascontiguousarray(pooled), kind="input")
    parts = [second, first] if bug == "encoders_exchanged" else [first, second]
    context = mx.array(np.concatenate(parts, -1)).astype(run)
    vector = np.concatenate([pooled, waves(sizes, SIZE).reshape(2, -1)], -1)
    vector = tap("conditioner/vector", mx.array(vector.astype(np.float32)).astype(run))
    return tap("conditioner/crossattn", context, kind="input"), vector


class Sampler:
    """Euler's steps in float32; the picture between them is in the run's precision."""

    def __init__(self, net: UNetModel, context: mx.array, vector: mx.array, bug: str | None):
        self.net, self.context, self.vector, self.bug = net, context, vector, bug

    def denoised(self, x: mx.array, sigma: float, t: float) -> mx.array:
        """The guided prediction of the clean picture."""
        y = x.astype(mx.float32)
        c_in = 1 / math.sqrt(sigma**2 + 1)
        both = (mx.concatenate([y, y]) * c_in).astype(x.dtype)
        eps = self.net(tap("denoiser/input", both), t, self.context, self.vector)
        out = tap("denoiser/output", y - sigma * eps.astype(mx.float32))
        positive, negative = mx.split(out, 2)
        if self.bug == "guidance_halves_exchanged":
            positive, negative = negative, positive
        return tap("sampler/denoised", negative + GUIDANCE * (positive - negative))

    def __call__(self, x: mx.array, sigmas: Array, times: Array) -> None:
        for i in range(STEPS):
            set_step(i)
            now, then = float(sigmas[i]), float(sigmas[i + 1])
            clean = self.denoised(x, now, float(times[i]))
            y = x.astype(mx.float32)
            d = tap("sampler/d", (y - clean) / now)
            start = clean if self.bug == "step_from_denoised" and then > 0 else y
            x = tap("sampler/x", (start + d * (then - now)).astype(x.dtype))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    run = getattr(mx, dtype)
    net = UNetModel(bug)
    loaded = converted(checkpoint(folder, "unet"), bug)
    net.load_weights([(k, mx.array(v).astype(run)) for k, v in loaded.items()])
    start = given(folder)("pipeline/noise").transpose(0, 2, 3, 1)
    x = mx.array(np.ascontiguousarray(start)).astype(run)
    sigmas, times = schedule(bug)
    blocks = ("sampler/*", "conditioner/*", "diffusion_model/emb", "diffusion_model/middle_block")
    blocks += ("diffusion_model/input_blocks.?", "diffusion_model/output_blocks.?")
    blocks += ("diffusion_model:out",)
    with (
        port_trace(out, dump, dtype, blocks, None) as recorder,
        record_modules(recorder, net, scope="diffusion_model", weights=weights),
    ):
        tap("sampler/sigmas", sigmas, kind="schedule")
        tap("sampler/timesteps", times, kind="schedule")
        tap("sampler/noise", x, kind="input")
        context, vector = conditions(folder, bug, run)
        scale = math.sqrt(float(sigmas[0]) ** 2 + 1)
        x = tap("sampler/start", (x.astype(mx.float32) * scale).astype(run))
        Sampler(net, context, vector, bug)(x, sigmas, times)


# Each call's own denoised picture: the reference has the guided one alone.
NO_COUNTERPART: tuple[str, ...] = (r"^denoiser/output$",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|\border\b|permut|revers"
RESIDUAL = r"residual|skip connection|\b(input|in\.0)\b.*(not added|missing)|add.*(input|in\.0)"
BUGS = (
    Bug(
        "values_before_keys",
        "The middle block's fused layer of the context is joined as v, k.",
        (LOADED, SWAPPED, r"fused|\bjoin|concat"),
        "weights",
    ),
    Bug(
        "proj_in_transposed",
        "The square proj_in of input block 3 is transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "kernel_in_out_exchanged",
        "The first kernel of the middle has its in and out channels exchanged.",
        (LOADED, r"transpos", SWAPPED),
        "weights",
    ),
    Bug(
        "block_loaded_twice",
        "The second transformer block of input block 5 has the first one's weights.",
        (LOADED, r"dupl|twice|another (layer|module|block)"),
        "weights",
    ),
    Bug(
        "shortcut_bias_missing",
        "The 1x1 shortcut of output block 3 has no bias.",
        (LOADED, r"\bbias"),
        "weights",
    ),
    Bug(
        "label_emb_bfloat16",
        "The first layer of label_emb was stored in bfloat16.",
        (LOADED, r"bf16|bfloat|precision|round"),
        "weights",
    ),
    Bug(
        "norms_exchanged",
        "The second block of output block 1 has norm1 and norm3 exchanged.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "encoders_exchanged",
        "The context has the second encoder's features before the first one's.",
        (SWAPPED, r"concat|\bjoin|encoder|prompt|context|channel|roll|shift"),
        "inputs",
    ),
    Bug(
        "sizes_columns_first",
        "Sizes are given as width and height.",
        (SWAPPED, r"height|width|time_ids|\bsizes?\b|rows?\b|column"),
        "inputs",
    ),
    Bug(
        "crop_after_target",
        "The crop comes after the target size.",
        (SWAPPED, r"crop|target|time_ids|\bsizes?\b|roll|shift"),
        "inputs",
    ),
    Bug(
        "negative_pooled_for_both",
        "Both calls have the negative prompt's pooled vector.",
        (
            r"pooled|text_embeds|negative|prompt|uncond|\bcond",
            r"batch|same (row|value)|both|repeat|dupl|broadcast",
        ),
        "inputs",
    ),
    Bug(
        "sizes_bfloat16",
        "Sizes are rounded to bfloat16 before their sinusoids.",
        (r"bf16|bfloat|precision|round|\bcast",),
    ),
    Bug(
        "label_silu_missing",
        "label_emb has no SiLU between its layers.",
        (r"silu|swish|activation|nonlinear",),
    ),
    Bug(
        "emb_after_second_norm",
        "The last resnet of the middle adds the embedding after its second norm.",
        (
            r"before (the )?(second )?norm|after (the )?(second )?norm|norm\w* (before|after)",
            r"\b(emb|embedding|temb|time|time_emb_proj|emb_layers)\b.*(norm|add|miss|late|order)",
            r"(norm|add|miss|late)\w*.*\b(emb|embedding|temb|time|time_emb_proj)\b",
        ),
    ),
    Bug(
        "cross_scale_of_width",
        "Cross-attention scales scores by the whole width.",
        (r"\bscal(e|es|ed|ing)\b|sqrt|square root|factor|head.?dim",),
    ),
    Bug(
        "heads_last",
        "Cross-attention of output block 0 splits channels as (d, heads).",
        (r"\bheads?\b|interleav|layout|reshap|split|permut|transpos",),
    ),
    Bug(
        "cross_without_norm",
        "Cross-attention of output block 2 reads its input without norm2.",
        (
            r"norm2?\b.*(missing|skipped|not applied|left out|unused|omit)",
            r"(without|no|missing|skips?|skipped|omit\w*) (the |its )?((layer )?norm|norm2)",
            r"un-?norm|(before|instead of) (the )?(norm|normed|normalized)",
            r"residual|(wrong|other|another) (value|input|tensor)|reads",
        ),
    ),
    Bug(
        "feed_reads_before_cross",
        "The feed-forward of input block 3 reads the value before cross-attention.",
        (
            r"parallel|residual|before (the )?(cross|attn2)|without (the )?(cross|attn2)",
            r"attn2.*(missing|not added|left out|skipped)|cross.attention.*(missing|not added)",
            r"(wrong|other|another|earlier|previous) (value|input|tensor|module|layer)|reads",
            r"input of",
        ),
    ),
    Bug("gelu_tanh", "GEGLU has GELU with tanh.", (r"gelu|tanh|\berf",)),
    Bug(
        "geglu_gate_first",
        "GEGLU of output block 0 takes the gate from the first half.",
        (SWAPPED, r"gate|halves|half|chunk|split|geglu"),
    ),
    Bug(
        "tokens_unflattened_across",
        "The transformer of input block 3 gives tokens back column by column.",
        (r"reshap|layout|transpos|rows?\b|column|height|width|permut|order|\bax[ei]s\b|tokens",),
    ),
    Bug(
        "spatial_residual_missing",
        "The transformer of input block 5 does not add its input.",
        (RESIDUAL,),
    ),
    Bug(
        "loop_ends_early",
        "The transformer of output block 1 leaves out its last block.",
        (
            r"(block|layer|module)s?.*(missing|skipped|left out|not run|never|omit|not applied)",
            r"(skip(s|ped)|missing|left out|without|omit\w*|leaves out).*(block|layer|module)",
            r"(earlier|previous|wrong|other|another) (value|input|output|block|layer|module)",
            r"one (too few|block|layer)|identity|output of|too early|depth",
        ),
    ),
    Bug(
        "skip_joined_first",
        "Output block 2 joins the skip before its own features.",
        (SWAPPED, r"concat|\bjoin|roll|shift"),
    ),
    Bug(
        "downsample_pads_end",
        "Input block 4 pads below and at the right alone.",
        (r"\bpad",),
    ),
    Bug(
        "last_silu_missing",
        "There is no SiLU before the last convolution.",
        (r"silu|swish|activation|nonlinear",),
    ),
    Bug(
        "offset_missing",
        "Timesteps have no offset of 1.",
        (r"offset|timestep|sigma|schedule|off.by.one|\btimes?\b|spacing",),
        "schedule",
    ),
    Bug(
        "time_of_next_step",
        "The network gets the timestep of the next step.",
        (r"timestep|schedule|off.by.one|\btimes?\b|next step|roll|shift",),
        "schedule",
    ),
    Bug(
        "guidance_halves_exchanged",
        "Guidance takes the prompt's prediction for the negative prompt's.",
        (r"guid|\bcfg\b|\bcond|uncond|negative", SWAPPED),
    ),
    Bug(
        "step_from_denoised",
        "Euler's step starts from the denoised picture.",
        (
            r"denoised|clean|pred_original|x_?0\b|starts? from|euler|sampler",
            r"(wrong|other|another|previous) (x|sample|value|latents?)\b|residual|\bstep\b",
        ),
    ),
)
