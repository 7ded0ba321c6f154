"""The deep compression autoencoder in MLX, by the names of efficientvit's release, channels last.

Kernels are (out, rows, columns, in), those of one pixel (in, out), those of groups (groups, in,
out); q, k and v are one product. Pictures are bytes: cropped, encoded, decoded. The decoder's last
stage has batch norms, as in the first releases.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from diffusers import AutoencoderDC
from torch.nn import functional as F

from blind_bugs.planting import (
    Array,
    Bug,
    checkpoint,
    given,
    port_trace,
    randomised,
    reference_trace,
    saved,
)
from lydite.trace.arrays import to_numpy
from lydite.trace.taps import tap
from lydite.trace.torch_capture import record_modules

NAME = "dcae"
WIDTHS, HEAD, LATENT, SCALING = (8, 16, 32), 16, 4, 0.41407
ENCODER, DECODER = (1, 1, 1), (1, 1, 2)  # blocks of the stages
LAST = len(WIDTHS) - 1
GIVEN, CROP = (27, 35), (24, 32)


def made() -> AutoencoderDC:
    """The model with statistics as of training; convolutions that resize count for more."""
    model_class: Any = AutoencoderDC  # diffusers' types of its tuples are too narrow
    model = model_class(
        latent_channels=LATENT,
        attention_head_dim=HEAD,
        encoder_block_types=("ResBlock", "EfficientViTBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=WIDTHS,
        decoder_block_out_channels=WIDTHS,
        encoder_layers_per_block=ENCODER,
        decoder_layers_per_block=DECODER,
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        decoder_norm_types=("batch_norm", "rms_norm", "rms_norm"),
        decoder_act_fns=("relu", "silu", "silu"),
        scaling_factor=SCALING,
    )
    for name, parameter in model.named_parameters():
        if name.endswith((".0.conv.weight", ".1.conv.weight")):
            parameter.data.mul_(2)
        if "to_" in name:
            parameter.data.mul_(1.5)
        if "decoder.conv_out" in name:
            parameter.data.mul_(1.2)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(0.2 * torch.randn(buffer.shape))
        if name.endswith("running_var"):
            buffer.copy_(0.05 + 0.2 * torch.rand(buffer.shape))
    return model


def reference(folder: Path, dtype: str) -> None:
    """Two pictures there and back."""
    model = saved(randomised(made, 43), folder, "vae", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="vae", weights=True),
    ):
        coarse = torch.rand(2, 3, 7, 9, generator=torch.Generator().manual_seed(8))
        pictures = F.interpolate(coarse, GIVEN, mode="bicubic").clamp(0, 1).mul(255).round()
        pictures = pictures.permute(0, 2, 3, 1).to(torch.uint8)
        recorder.record("pipeline/images", pictures, kind="input")
        top, left = ((n - m) // 2 for n, m in zip(GIVEN, CROP, strict=True))
        cropped = pictures[:, top : top + CROP[0], left : left + CROP[1]]
        pixels = cropped.permute(0, 3, 1, 2).float() / 127.5 - 1
        recorder.record("pipeline/pixel_values", pixels, kind="input")
        latents = model.encode(pixels.to(model.dtype)).latent * SCALING
        recorder.record("pipeline/latents", latents)
        image = model.decode(latents / SCALING).sample
        recorder.record("pipeline/image", (image.float() / 2 + 0.5).clamp(0, 1))


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters by the release's names."""
    new: dict[str, Array] = {}

    def copied(name: str, source: str, *ends: str) -> None:
        for end in ends:
            new[f"{name}.{end}"] = w[f"{source}.{end}"]

    def conv(name: str, source: str) -> None:
        """A convolution with or without bias; one of one pixel is a matrix (in, out)."""
        kernel = w[f"{source}.weight"]
        if kernel.ndim == 2:
            kernel = kernel[..., None, None]
        matrix = kernel.shape[2:] == (1, 1)
        new[f"{name}.weight"] = kernel[..., 0, 0].T if matrix else kernel.transpose(0, 2, 3, 1)
        if f"{source}.bias" in w:
            new[f"{name}.bias"] = w[f"{source}.bias"]

    def block(b: str, old: str) -> None:
        if f"{old}.conv.weight" in w:  # one that resizes
            conv(f"{b}.main.conv", f"{old}.conv")
            return
        if f"{old}.conv1.weight" in w:
            conv(f"{b}.main.conv1.conv", f"{old}.conv1")
            conv(f"{b}.main.conv2.conv", f"{old}.conv2")
            copied(f"{b}.main.conv2.norm", f"{old}.norm", "weight", "bias")
            if f"{old}.norm.running_mean" in w:
                copied(f"{b}.main.conv2.norm", f"{old}.norm", "running_mean", "running_var")
            return
        context, local = f"{b}.context_module.main", f"{b}.local_module.main"
        letters = "kqv" if bug == "qkv_in_order_of_the_file" and b.startswith("enc") else "qkv"
        fused = np.concatenate([w[f"{old}.attn.to_{s}.weight"] for s in letters])
        new[f"{context}.qkv.conv.weight"] = fused.T
        scale = f"{old}.attn.to_qkv_multiscale.0"
        if f"{scale}.proj_in.weight" in w:
            conv(f"{context}.aggreg.0.0", f"{scale}.proj_in")
            kernel = w[f"{scale}.proj_out.weight"].reshape(-1, HEAD, HEAD)
            new[f"{context}.aggreg.0.1.weight"] = kernel.swapaxes(1, 2)
        conv(f"{context}.proj.conv", f"{old}.attn.to_out")
        copied(f"{context}.proj.norm", f"{old}.attn.norm_out", "weight", "bias")
        for name in ("inverted", "depth", "point"):
            conv(f"{local}.{name}_conv.conv", f"{old}.conv_out.conv_{name}")
        copied(f"{local}.point_conv.norm", f"{old}.conv_out.norm", "weight", "bias")

    conv("encoder.project_in.conv", "encoder.conv_in")
    conv("encoder.project_out.main.op_list.0.conv", "encoder.conv_out")
    conv("decoder.project_in.main.conv", "decoder.conv_in")
    copied("decoder.project_out.op_list.0", "decoder.norm_out", "weight", "bias")
    conv("decoder.project_out.op_list.2.conv", "decoder.conv_out")
    for i in range(LAST + 1):
        resizes = 1 if i < LAST else 0
        for j in range(ENCODER[i] + resizes):
            block(f"encoder.stages.{i}.op_list.{j}", f"encoder.down_blocks.{i}.{j}")
        for j in range(DECODER[i] + resizes):
            block(f"decoder.stages.{i}.op_list.{j}", f"decoder.up_blocks.{i}.{j}")
    return {k: np.ascontiguousarray(v) for k, v in wrongly_loaded(new, bug).items()}


def wrongly_loaded(new: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """The bugs of the loader that concern a few parameters."""
    if bug == "kernel_columns_for_rows":
        name = "decoder.stages.0.op_list.1.main.conv1.conv.weight"
        new[name] = new[name].swapaxes(1, 2)
    if bug == "aggreg_of_encoder":
        name = "stages.2.op_list.0.context_module.main.aggreg.0.0.weight"
        new[f"decoder.{name}"] = new[f"encoder.{name}"]
    if bug == "running_statistics_not_loaded":
        name = "decoder.stages.0.op_list.1.main.conv2.norm.running"
        new[f"{name}_mean"] = np.zeros(WIDTHS[0], np.float32)
        new[f"{name}_var"] = np.ones(WIDTHS[0], np.float32)
    if bug == "norms_of_block_exchanged":
        b = "encoder.stages.1.op_list.0"
        for end in ("weight", "bias"):
            first = f"{b}.context_module.main.proj.norm.{end}"
            second = f"{b}.local_module.main.point_conv.norm.{end}"
            new[first], new[second] = new[second], new[first]
    if bug == "norm_bias_lost":
        name = "encoder.stages.2.op_list.0.local_module.main.point_conv.norm.bias"
        new[name] = np.zeros_like(new[name])
    if bug == "project_out_stored_float16":
        name = "encoder.project_out.main.op_list.0.conv.weight"
        new[name] = new[name].astype(np.float16).astype(np.float32)
    if bug == "proj_not_transposed":
        name = "encoder.stages.1.op_list.0.context_module.main.proj.conv.weight"
        new[name] = new[name].T
    if bug == "decoder_blocks_exchanged":
        first, second = (f"decoder.stages.2.op_list.{j}." for j in range(2))
        ends = [k.removeprefix(first) for k in new if k.startswith(first)]
        for end in ends:
            new[first + end], new[second + end] = new[second + end], new[first + end]
    if bug == "inverted_bias_of_first_half":
        name = "decoder.stages.2.op_list.1.local_module.main.inverted_conv.conv.bias"
        half = len(new[name]) // 2
        new[name] = np.where(np.arange(2 * half) < half, new[name], np.float32(0))
    return new


def preprocessed(pictures: Array, bug: str | None) -> Array:
    """(pictures, rows, columns, channels) in float32, of bytes."""
    odd = 1 if bug == "crop_rounded_up" else 0
    top, left = ((n - m + odd) // 2 for n, m in zip(GIVEN, CROP, strict=True))
    x = pictures[:, top : top + CROP[0], left : left + CROP[1]].astype(np.float32)
    if bug == "blue_first":
        x = x[..., ::-1]
    if bug == "pixels_from_zero":
        return x / 255
    return x / np.float32(128 if bug == "bytes_over_128" else 127.5) - 1


class DCAE:
    """Encoder and decoder; `p` are the parameters in the run's precision."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: mx.Dtype) -> None:
        self.p = {name: mx.array(value).astype(dtype) for name, value in p.items()}
        self.bug, self.dtype = bug, dtype

    def conv(self, name: str, x: mx.array) -> mx.array:
        """Of the input's size; a kernel with one input channel is depthwise."""
        bug, kernel = self.bug, self.p[f"{name}.weight"]
        if kernel.ndim == 2:
            y = x @ kernel
        else:
            around = kernel.shape[1] // 2
            groups = x.shape[-1] // kernel.shape[-1]
            if bug == "edges_repeated" and name == "encoder.project_in.conv":
                x = mx.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="edge")
                around = 0
            if bug == "padded_at_the_end" and name == "encoder.stages.1.op_list.1.main.conv":
                x = mx.pad(x, [(0, 0), (0, 2), (0, 2), (0, 0)])
                around = 0
            y = mx.conv2d(x, kernel, padding=around, groups=groups)
        if f"{name}.bias" in self.p:
            y = y + self.p[f"{name}.bias"]
        return tap(name, y)

    def norm(self, name: str, x: mx.array) -> mx.array:
        """Over channels, with gain and bias; over statistics where the norm has them."""
        bug, y = self.bug, x.astype(mx.float32)
        gain, bias = self.p[f"{name}.weight"], self.p[f"{name}.bias"]
        if f"{name}.running_var" in self.p:
            ends = ("running_mean", "running_var")
            mean, variance = (self.p[f"{name}.{end}"].astype(mx.float32) for end in ends)
            if bug == "statistics_of_batch":
                mean, variance = y.mean((0, 1, 2)), y.var((0, 1, 2))
            root = variance if bug == "variance_for_deviation" else mx.sqrt(variance + 1e-5)
            return tap(name, ((y - mean) / root * gain + bias).astype(x.dtype))
        if bug == "norm_centred" and name == "encoder.stages.0.op_list.0.main.conv2.norm":
            y = y - y.mean(-1, keepdims=True)
        if bug == "norms_bfloat16":
            y = y.astype(mx.bfloat16)
        eps = 1e-6 if bug == "norm_eps" else 1e-5
        axes = (1, 2, 3) if bug == "norms_over_picture" else (-1,)
        y = y * mx.rsqrt((y * y).mean(axes, keepdims=True) + eps)
        if bug == "norms_without_bias":
            return tap(name, y.astype(x.dtype) * gain)
        return tap(name, y.astype(x.dtype) * gain + bias)

    def residual(self, b: str, x: mx.array, active: str) -> mx.array:
        y = self.conv(f"{b}.main.conv1.conv", x)
        if active == "relu" and self.bug != "silu_in_last_stage":
            y = mx.maximum(y, 0)
        else:
            y = y * mx.sigmoid(y)
        y = self.conv(f"{b}.main.conv2.conv", y)
        if self.bug == "norm_after_sum" and b == "decoder.stages.1.op_list.1":
            return tap(b, self.norm(f"{b}.main.conv2.norm", x + y))
        return tap(b, x + self.norm(f"{b}.main.conv2.norm", y))

    def attended(self, qkv: mx.array) -> mx.array:
        """Linear attention of (batch, tokens, 3 channels): q, k, v of one head after the other."""
        bug, (batch, n, channels) = self.bug, qkv.shape
        heads = channels // (3 * HEAD)
        if bug == "qkv_split_in_thirds":
            q, k, v = qkv.reshape(batch, n, 3, heads, HEAD).transpose(2, 0, 3, 1, 4)
        else:
            q, k, v = qkv.reshape(batch, n, heads, 3, HEAD).transpose(3, 0, 2, 1, 4)
        if bug == "feature_map_of_elu":
            q, k = (mx.where(y > 0, y + 1, mx.exp(y)) for y in (q, k))
        else:
            q, k = mx.maximum(q, 0), mx.maximum(k, 0)
        if bug == "values_rectified":
            v = mx.maximum(v, 0)
        q, k, v = (y.astype(mx.float32) for y in (q, k, v))
        sums, total = k.swapaxes(-1, -2) @ v, k.sum(-2, keepdims=True)
        if bug == "sums_float16":
            sums = sums.astype(mx.float16).astype(mx.float32)
        y, weight = q @ sums, (q * total).sum(-1, keepdims=True)
        y = y / n if bug == "divided_by_tokens" else y / (weight + 1e-15)
        return y.transpose(0, 2, 1, 3).reshape(batch, n, heads * HEAD)

    def context(self, b: str, x: mx.array) -> mx.array:
        """Attention of the projections and of their neighbourhoods, beside the input."""
        bug, (batch, rows, columns, _) = self.bug, x.shape
        scales = [self.conv(f"{b}.qkv.conv", x)]
        if f"{b}.aggreg.0.0.weight" in self.p:
            y = scales[0]
            if bug != "neighbourhoods_of_one_pixel":
                y = self.conv(f"{b}.aggreg.0.0", y)
            y = mx.expand_dims(y.reshape(*y.shape[:-1], -1, HEAD), -2)
            y = y @ self.p[f"{b}.aggreg.0.1.weight"]
            scales.append(tap(f"{b}.aggreg.0.1", y.reshape(scales[0].shape)))
        if bug == "scales_exchanged":
            scales = scales[::-1]
        flat = [y.reshape(batch, rows * columns, -1) for y in scales]
        y = mx.concatenate([self.attended(y) for y in flat], -1).astype(x.dtype)
        if bug == "tokens_back_by_columns" and b.startswith("encoder.stages.1"):
            y = y.reshape(batch, columns, rows, -1).swapaxes(1, 2)
        y = tap(f"{b}.att", y.reshape(batch, rows, columns, -1))
        y = self.conv(f"{b}.proj.conv", y)
        if not (bug == "proj_norm_missing" and b.startswith("encoder.stages.2")):
            y = self.norm(f"{b}.proj.norm", y)
        lost = bug == "context_residual_missing" and b.startswith("decoder.stages.2.op_list.1")
        return tap(b, y if lost else x + y)

    def local(self, b: str, x: mx.array, start: mx.array) -> mx.array:
        y = self.conv(f"{b}.inverted_conv.conv", x)
        if self.bug != "inverted_without_silu":
            y = y * mx.sigmoid(y)
        y = self.conv(f"{b}.depth_conv.conv", y)
        y, gate = mx.split(y, 2, -1)
        if self.bug == "gate_is_first_half":
            y, gate = gate, y
        gate = mx.sigmoid(gate) * (1 if self.bug == "gate_of_sigmoid" else gate)
        y = self.norm(f"{b}.point_conv.norm", self.conv(f"{b}.point_conv.conv", y * gate))
        return tap(b, start + y)

    def block(self, b: str, x: mx.array, active: str = "silu") -> mx.array:
        if f"{b}.main.conv1.conv.weight" in self.p:
            return self.residual(b, x, active)
        y = self.context(f"{b}.context_module.main", x)
        early = self.bug == "local_residual_of_block" and b == "encoder.stages.2.op_list.0"
        return self.local(f"{b}.local_module.main", y, x if early else y)

    def unshuffled(self, x: mx.array) -> mx.array:
        """Half as large; a channel's four pixels are neighbours."""
        batch, rows, columns, channels = x.shape
        x = x.reshape(batch, rows // 2, 2, columns // 2, 2, channels)
        inside = self.bug == "unshuffled_channels_inside"
        x = x.transpose(0, 1, 3, 2, 4, 5) if inside else x.transpose(0, 1, 3, 5, 2, 4)
        return x.reshape(batch, rows // 2, columns // 2, 4 * channels)

    def shuffled(self, x: mx.array) -> mx.array:
        """Twice as large."""
        batch, rows, columns, channels = x.shape
        x = x.reshape(batch, rows, columns, channels // 4, 2, 2)
        turned = self.bug == "shuffled_columns_first"
        x = x.transpose(0, 1, 5, 2, 4, 3) if turned else x.transpose(0, 1, 4, 2, 5, 3)
        return x.reshape(batch, rows * 2, columns * 2, channels // 4)

    def averaged(self, name: str, x: mx.array, channels: int) -> mx.array:
        """Fewer channels: the mean of each few neighbours."""
        group = x.shape[-1] // channels
        if self.bug == "shortcut_of_distant_channels":
            x = x.reshape(*x.shape[:-1], group, channels).mean(-2)
        else:
            x = x.reshape(*x.shape[:-1], channels, group)
            summed = self.bug == "shortcut_summed" and "stages" in name
            x = x.sum(-1) if summed else x.mean(-1)
        return tap(f"{name}.shortcut", x)

    def down(self, b: str, x: mx.array, channels: int) -> mx.array:
        y = self.unshuffled(self.conv(f"{b}.main.conv", x))
        return tap(b, y + self.averaged(b, self.unshuffled(x), channels))

    def up(self, b: str, x: mx.array, channels: int) -> mx.array:
        y = self.shuffled(self.conv(f"{b}.main.conv", x))
        if self.bug == "growing_without_shortcut" and b == "decoder.stages.1.op_list.0":
            return tap(b, y)
        if self.bug == "shortcut_of_nearest_pixels" and b == "decoder.stages.0.op_list.0":
            few = x.reshape(*x.shape[:-1], channels, -1).mean(-1)
            short = mx.repeat(mx.repeat(few, 2, 1), 2, 2)
        else:
            short = self.shuffled(mx.repeat(x, 4 * channels // x.shape[-1], -1))
        return tap(b, y + tap(f"{b}.shortcut", short))

    def encode(self, x: mx.array) -> mx.array:
        x = self.conv("encoder.project_in.conv", x.astype(self.dtype))
        for i, blocks in enumerate(ENCODER):
            for j in range(blocks):
                x = self.block(f"encoder.stages.{i}.op_list.{j}", x)
            if i < LAST:
                x = self.down(f"encoder.stages.{i}.op_list.{blocks}", x, WIDTHS[i + 1])
        y = self.conv("encoder.project_out.main.op_list.0.conv", x)
        if self.bug != "last_shortcut_missing":
            y = y + self.averaged("encoder.project_out", x, LATENT)
        return tap("encoder", y)

    def decode(self, x: mx.array) -> mx.array:
        bug, times = self.bug, WIDTHS[-1] // LATENT
        short = mx.tile(x, (1, 1, 1, times)) if bug == "latents_tiled" else mx.repeat(x, times, -1)
        x = self.conv("decoder.project_in.main.conv", x) + short
        x = tap("decoder.project_in", x)
        for i in reversed(range(LAST + 1)):
            first = 1 if i < LAST else 0
            if first:
                x = self.up(f"decoder.stages.{i}.op_list.0", x, WIDTHS[i])
            count = DECODER[i] - (1 if bug == "last_block_not_run" and i == LAST else 0)
            for j in range(first, first + count):
                b = f"decoder.stages.{i}.op_list.{j}"
                x = self.block(b, x, "silu" if i else "relu")
        if bug != "last_norm_missing":
            x = self.norm("decoder.project_out.op_list.0", x)
        if bug != "last_relu_missing":
            x = mx.maximum(x, 0)
        return self.conv("decoder.project_out.op_list.2.conv", x)

    def __call__(self, pixels: mx.array) -> None:
        bug = self.bug
        latents = self.encode(pixels)
        latents = latents / SCALING if bug == "latents_divided_by_factor" else latents * SCALING
        if bug == "latents_stored_float16":
            latents = latents.astype(mx.float16).astype(self.dtype)
        latents = tap("latents", latents)
        x = self.decode(latents if bug == "decoded_as_scaled" else latents / SCALING)
        x = x.astype(mx.float32)
        if bug != "image_left_from_minus_one":
            x = x / 2 + 0.5
        tap("reconstruction", x if bug == "image_not_clamped" else mx.clip(x, 0, 1))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = DCAE(converted(checkpoint(folder, "vae"), bug), bug, getattr(mx, dtype))
    pictures = value("pipeline/images")
    pixels = preprocessed(pictures, bug)
    kept: dict[str, Any] | None = None
    if weights:
        kept = {name: to_numpy(v) for name, v in net.p.items()}
    blocks = ("given.*", "encoder.project_in.conv", "encoder", "latents", "reconstruction")
    blocks += ("encoder.stages.?.op_list.?", "decoder.stages.?.op_list.?", "decoder.project_in")
    blocks += ("*.local_module.main",)
    with port_trace(out, dump, dtype, blocks, kept):
        tap("given.pictures", pictures, kind="input")
        tap("given.pixels", pixels, kind="input")
        net(mx.array(pixels))


NO_COUNTERPART: tuple[str, ...] = (r"\.shortcut$",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter|buffer"
SWAPPED = r"swap|exchang|\border\b|permut|revers|mixed up|interchang"
SHUFFLE = r"shuffle|depth.?to.?space|space.?to.?depth|sub.?pixel"
MISSING = r"miss|skip|without|lack|not (appl|run|used|called|add)|left out|omit|\bno\b|never|drop"
BUGS = (
    Bug(
        "kernel_columns_for_rows",
        "A kernel of the decoder's stage 0 has rows and columns exchanged.",
        (LOADED, SWAPPED, r"transpos|\brows?\b|column|layout|\bax[ei]s\b|height|width"),
        "weights",
    ),
    Bug(
        "qkv_in_order_of_the_file",
        "The encoder's fused products were made as k, q, v, in the file's order.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "aggreg_of_encoder",
        "The decoder's first kernel of neighbourhoods is the encoder's.",
        (
            LOADED,
            r"dupl|twice|(another|other|same|wrong) (block|layer|network|kernel)",
            r"(of|from|is) the encoder",
        ),
        "weights",
    ),
    Bug(
        "running_statistics_not_loaded",
        "The batch norm's running mean and variance were not loaded.",
        (LOADED, r"running|statistic|default|initial|zero.*one|\bmean\b|variance"),
        "weights",
    ),
    Bug(
        "norm_bias_lost",
        "The bias of the norm after the encoder's last MLP was not loaded.",
        (LOADED, r"\bbias|zero"),
        "weights",
    ),
    Bug(
        "project_out_stored_float16",
        "The encoder's last kernel was stored in float16.",
        (LOADED, r"f16|float16|fp16|half.(precision|float)|precision|round"),
        "weights",
    ),
    Bug(
        "proj_not_transposed",
        "The output matrix of the encoder's attention in stage 1 is not transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "decoder_blocks_exchanged",
        "The two blocks of the decoder's stage 2 have each other's weights.",
        (LOADED, SWAPPED, r"each other|(another|other|wrong) (block|layer)"),
        "weights",
    ),
    Bug(
        "inverted_bias_of_first_half",
        "A bias of the last attention block's MLP is zero in its second half.",
        (LOADED, r"\bbias|zero|\bhalf\b"),
        "weights",
    ),
    Bug(
        "crop_rounded_up",
        "The crop begins one pixel late.",
        (r"\bcrop|cent(re|er)|offset|shift|\broll|off.by.one|one (pixel|column|row)",),
        "inputs",
    ),
    Bug(
        "blue_first",
        "Pictures have blue first.",
        (r"\bbgr\b|\brgb\b|\bblue\b|\bred\b|colou?r|flip|channels? (are )?(order|revers)", SWAPPED),
        "inputs",
    ),
    Bug(
        "pixels_from_zero",
        "Pixels reach from 0 to 1, not from -1 to 1.",
        (r"range|\[?0(\.0)?, ?1|-1|\b255\b|127\.5|normali[sz]|\bscal(e|ed|ing)\b|affine",),
        "inputs",
    ),
    Bug(
        "bytes_over_128",
        "Bytes are divided by 128, not by 127.5.",
        (r"\b128\b|127\.5|\b255\b|\b256\b|normali[sz]|\bscal(e|ed|ing)\b|factor|affine|range",),
        "inputs",
    ),
    Bug(
        "edges_repeated",
        "The first convolution repeats edges; it should see zeros.",
        (r"\bedges?\b|padd|border|boundar|replicat|reflect|zeros?\b",),
    ),
    Bug(
        "padded_at_the_end",
        "The second convolution that shrinks is padded at the end alone.",
        (r"padd|shift|offset|off.by.one|\broll|asymmetr|one (pixel|row|column)|\bsame\b",),
    ),
    Bug(
        "unshuffled_channels_inside",
        "Unshuffling keeps channels innermost: (row, column, channel) for (channel, row, column).",
        (SWAPPED, r"transpos|reshap|layout|\bax[ei]s\b|interleav|channels? (first|last|inner)"),
    ),
    Bug(
        "shuffled_columns_first",
        "Shuffling takes columns for rows in each four pixels.",
        (SWAPPED, r"transpos|\brows?\b|column|layout|\bax[ei]s\b|height|width"),
    ),
    Bug(
        "shortcut_of_distant_channels",
        "Shortcuts average channels that lie apart, not neighbours.",
        (
            r"group|neighbou?r|adjacent|consecutive|strid|reshap|interleav|layout|\bax[ei]s\b",
            SWAPPED,
        ),
    ),
    Bug(
        "shortcut_summed",
        "The shortcuts that shrink are sums, not means.",
        (
            r"\bsum(s|med|ming)?\b.*(mean|averag|divid)|(mean|averag|divid).*\bsum",
            r"(miss|\bno|without|lack|instead of|not)\w*\b.*(\bmean\b|averag|divid)",
            r"\bscal(e|ed|ing)\b|factor|twice|doubl|group size",
        ),
    ),
    Bug(
        "last_shortcut_missing",
        "The encoder's end has no shortcut.",
        (r"shortcut|residual|skip connection", rf"({MISSING}).*(add|sum|branch)"),
    ),
    Bug(
        "latents_tiled",
        "The decoder's first shortcut tiles latents, it should repeat each channel.",
        (r"\btil(e|ed|ing)\b|repeat|interleav|duplicat|group", SWAPPED),
    ),
    Bug(
        "shortcut_of_nearest_pixels",
        "The last shortcut that grows repeats pixels of averaged channels, not shuffling them.",
        (SHUFFLE, r"nearest|repeat|interpol|upsampl|resiz|duplicat|averag|\bmean\b"),
    ),
    Bug(
        "qkv_split_in_thirds",
        "Attention splits q, k and v in thirds, not head by head.",
        (
            r"split|chunk|interleav|layout|reshap|(per|by|each|within) (a )?head|thirds?\b|fused",
            SWAPPED,
            r"heads? (first|major|axis)|head.by.head",
        ),
    ),
    Bug(
        "values_rectified",
        "Values pass a ReLU as q and k.",
        (r"relu|activation|non-?linear|negative|rectif|feature map|clamp|clip",),
    ),
    Bug(
        "sums_float16",
        "Sums of values by keys are float16.",
        (r"f16|float16|fp16|half.(precision|float)|precision|round",),
    ),
    Bug(
        "divided_by_tokens",
        "Attention is divided by the number of tokens, not by the sum of its weights.",
        (r"divi|denominat|normali[sz]|number of (tokens|pixels)|length|\bsum\b|\bones\b",),
    ),
    Bug(
        "neighbourhoods_of_one_pixel",
        "The second scale has no convolution over five pixels.",
        (
            rf"(conv|depth.?wise|5 ?x ?5|aggreg|proj_in|kernel).*({MISSING})",
            rf"({MISSING}).*(conv|depth.?wise|5 ?x ?5|aggreg|proj_in|kernel)",
            r"identity|bypass|(one|single) pixel",
        ),
    ),
    Bug(
        "scales_exchanged",
        "The second scale comes before the first.",
        (
            SWAPPED,
            r"concat|multi.?scale.*(first|before)|halves|scale comes|before the (first|plain)",
            r"which scale",
        ),
    ),
    Bug(
        "tokens_back_by_columns",
        "The encoder's stage 1 puts tokens back as columns by rows.",
        (
            r"height|width|\brows?\b|column|grid|transpos|reshap|layout|\bax[ei]s\b|raster",
            SWAPPED,
        ),
    ),
    Bug(
        "proj_norm_missing",
        "The attention of the encoder's stage 2 has no norm at its end.",
        (rf"norm\w*.*({MISSING})|({MISSING}).*norm|un-?normed", r"not normed"),
    ),
    Bug(
        "context_residual_missing",
        "The last attention block does not add attention to its input.",
        (r"residual|skip connection|shortcut", rf"(input|stream).*({MISSING})|not add(ed)?\b"),
    ),
    Bug(
        "gate_is_first_half",
        "The SiLU of the MLP's product is of the first half.",
        (
            SWAPPED,
            r"(first|second|other|wrong|two) (half|halves|part|chunk|branch|operand|factor)|halves",
        ),
    ),
    Bug(
        "gate_of_sigmoid",
        "The MLP's gate is a sigmoid, not a SiLU.",
        (r"silu|swish|sigmoid|activation|non-?linear|\bglu\b",),
    ),
    Bug(
        "local_residual_of_block",
        "The encoder's last MLP adds to the block's input, not to the attention's result.",
        (
            r"residual|skip connection|(block|layer)'?s? (own )?input|input of (the )?block",
            r"(before|without) (the )?att|att\w* .*(missing|lost|not added|drop)",
        ),
    ),
    Bug(
        "norm_after_sum",
        "A residual block of the decoder norms the sum, not what it adds.",
        (
            r"residual|post-?norm|norm\w*.*(after|sum|before)|(after|sum|before).*norm|skip conn",
            r"\border\b",
        ),
    ),
    Bug(
        "silu_in_last_stage",
        "The decoder's last stage has SiLU for ReLU.",
        (r"silu|swish|relu|activation|non-?linear",),
    ),
    Bug("norm_eps", "The norms over channels have eps 1e-6.", (r"\beps",)),
    Bug(
        "norm_centred",
        "The first block's norm subtracts the mean.",
        (r"\bmean|layer ?norm|cent(er|re)|subtract",),
    ),
    Bug(
        "statistics_of_batch",
        "The batch norm uses the batch's own statistics.",
        (r"batch.*statistic|statistic.*batch|running|training|\btrain\b|\beval\b|own (mean|stat)",),
    ),
    Bug(
        "variance_for_deviation",
        "The batch norm divides by the variance, not by its root.",
        (r"varianc|sqrt|root|deviation|\bstd\b",),
    ),
    Bug(
        "latents_stored_float16",
        "Latents are stored in float16.",
        (r"f16|float16|fp16|half.(precision|float)|precision|round",),
    ),
    Bug(
        "decoded_as_scaled",
        "The decoder is given latents that are not divided by the factor.",
        (r"scaling.?factor|0\.41|2\.41|divid|multipl|\b(un|de|re)?-?scal(e|ed|ing)\b|factor",),
    ),
    Bug(
        "last_block_not_run",
        "The second block of the decoder's stage 2 is not run.",
        (
            r"(block|layer)s?\b[ '.\w]{0,40} (miss|skip|left out|omit|not (run|appl|call|exec))",
            r"(block|layer)s?\b( \w+){0,4} (never|dropped|unused)",
            r"(skip|miss|omit|drop|without|lack)\w*( the| a| one)?( \w+){0,2} (block|layer)",
            r"(one|fewer|last) (block|layer)s?\b|too few|off.by.one|depth",
        ),
    ),
    Bug(
        "last_relu_missing",
        "The decoder's last convolution is given the norm without its ReLU.",
        (r"relu|activation|non-?linear|rectif|negative|conv_act",),
    ),
    Bug(
        "image_not_clamped",
        "Pixels are not limited to 0 to 1.",
        (r"clamp|clip|\brange\b|limit|satur|negative|outside|below 0|above 1|beyond",),
    ),
)

MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "norms_of_block_exchanged",
        "The two norms of the encoder's stage 1 have each other's weights.",
        (LOADED, SWAPPED, r"each other|(another|other|wrong) (norm|layer|module)"),
        "weights",
    ),
    Bug(
        "norms_bfloat16",
        "The norms over channels are computed in bfloat16.",
        (r"bf16|bfloat16|half.(precision|float)|precision|round|\bcast|dtype|upcast",),
    ),
    Bug(
        "norms_over_picture",
        "The norms divide by the root mean square of the whole picture, not of each pixel.",
        (
            r"\bax[ei]s\b|\bdims?\b|dimension|spatial|\brows?\b|column|height|width|group ?norm",
            r"(each|per|every|all) (pixel|position|location)|whole (picture|image|tensor|sample)",
            r"all (values|three|axes)|over all\b",
        ),
    ),
    Bug(
        "norms_without_bias",
        "The norms over channels do not add their bias.",
        (r"\bbias|(additive|offset|shift|beta)\b",),
    ),
    Bug(
        "feature_map_of_elu",
        "q and k pass ELU + 1, not ReLU.",
        (r"\belu|relu|activation|non-?linear|feature map|kernel function|negative|rectif",),
    ),
    Bug(
        "inverted_without_silu",
        "The MLPs' first convolution has no SiLU.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "growing_without_shortcut",
        "The decoder's first block that grows has no shortcut.",
        (r"shortcut|residual|skip connection|identity", rf"({MISSING}).*(add|sum|branch)"),
    ),
    Bug(
        "last_norm_missing",
        "The decoder's last norm is not applied.",
        (
            rf"norm\w*.*({MISSING})|({MISSING}).*norm|un-?normed|unnormali[sz]ed",
            r"not (normed|normali[sz]ed)|norm_out",
        ),
    ),
    Bug(
        "latents_divided_by_factor",
        "The encoder's latents are divided by the factor, they should be multiplied.",
        (
            r"scaling.?factor|0\.41|2\.41|5\.83|0\.17|divid|multipl|invers|reciproc",
            r"\b(un|de|re)?-?scal(e|ed|ing)\b|factor",
        ),
    ),
    Bug(
        "image_left_from_minus_one",
        "The decoded picture is cut to 0 to 1 without being moved from -1 to 1.",
        (
            r"\brange\b|\[?-1|0\.5|/ ?2|\bhalf|halv|denormali[sz]|(un|re|de)-?normali[sz]|affine",
            r"\b(un|de|re)?-?scal(e|ed|ing)\b|shift|offset|post.?process|rescal",
        ),
    ),
)
