"""The video autoencoder of LTX 0.9.1 in NumPy, as a port to MLX has it: channels are last.

The parameters have the names of the authors' repository (Lightricks/LTX-Video,
causal_video_autoencoder.py), where blocks and their up- and downsampling are one flat list, and
kernels are (out, frames, rows, columns, in). diffusers' AutoencoderKLLTXVideo is the reference. A
video is encoded, latents are drawn and normalised, then brought back, mixed with a little noise
and decoded, with the time of that noise.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLLTXVideo

from blind_bugs.planting import (
    Array,
    Bug,
    checkpoint,
    given,
    noise,
    port_trace,
    randomised,
    reference_trace,
    rounder,
    saved,
)
from lydite.trace import taps
from lydite.trace.torch_capture import record_modules

NAME = "ltx_vae"
LATENT, COLOURS, PATCH, WAVE = 6, 3, 2, 256
ENCODER, DECODER = (8, 12, 16), (16, 32)
FRAMES, ROWS, COLUMNS = 9, 32, 24
SCALING, DECODE_TIME, DECODE_NOISE = 0.8, 0.05, 0.025

# The flat lists: blocks of residual blocks (res), of one that changes the channels (res_y), and
# up- or downsampling (compress), with the reference's names.
ENCODER_BLOCKS = (
    ("res", "down_blocks.0.resnets", 1),
    ("compress", "down_blocks.0.downsamplers.0", 1),
    ("res_y", "down_blocks.0.conv_out", 1),
    ("res", "down_blocks.1.resnets", 1),
    ("compress", "down_blocks.1.downsamplers.0", 1),
    ("res_y", "down_blocks.1.conv_out", 1),
    ("res", "down_blocks.2.resnets", 1),
    ("res", "mid_block.resnets", 2),
)
DECODER_BLOCKS = (
    ("res", "mid_block", 2),
    ("compress", "up_blocks.0.upsamplers.0", 1),
    ("res", "up_blocks.0", 1),
    ("compress", "up_blocks.1.upsamplers.0", 1),
    ("res", "up_blocks.1", 2),
)


def reference(folder: Path, dtype: str) -> None:
    """As LTX's pipelines do it: encode, draw, normalise; then undo that, add noise, decode."""
    config: dict[str, Any] = dict(latent_channels=LATENT, patch_size=PATCH)
    config |= dict(block_out_channels=ENCODER, down_block_types=("LTXVideoDownBlock3D",) * 3)
    config |= dict(layers_per_block=(1, 1, 1, 2), spatio_temporal_scaling=(True, True, False))
    config |= dict(downsample_type=("conv",) * 3, decoder_block_out_channels=DECODER)
    config |= dict(decoder_layers_per_block=(2, 1, 2), upsample_residual=(True, True))
    config |= dict(decoder_spatio_temporal_scaling=(True, True), upsample_factor=(2, 2))
    config |= dict(decoder_inject_noise=(False,) * 3, timestep_conditioning=True)
    config |= dict(scaling_factor=SCALING)
    model = randomised(lambda: AutoencoderKLLTXVideo(**config), 37)
    for name, parameter in model.named_parameters():
        if name.endswith("scale_multiplier"):
            parameter.fill_(1000)
        elif "norm3" in name:
            parameter.add_(noise(len(name), *parameter.shape) / 4)
        elif "timestep_embedder" in name:
            parameter.mul_(2)  # the time matters
    model.latents_mean.copy_(noise(2, LATENT) / 4)
    model.latents_std.copy_(0.6 + noise(3, LATENT).abs() / 2)
    model = saved(model, folder, "vae", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="vae", weights=True),
    ):
        video = (noise(4, 1, COLOURS, FRAMES, ROWS, COLUMNS) / 2).clamp(-1, 1).to(model.dtype)
        recorder.record("pipeline/video", video, kind="input")
        posterior = model.encode(video).latent_dist
        drawn = noise(5, *posterior.mean.shape).to(model.dtype)
        extra = noise(6, *posterior.mean.shape).to(model.dtype)
        recorder.record("pipeline/posterior_noise", drawn, kind="input")
        recorder.record("pipeline/decode_noise", extra, kind="input")
        mean, std = (x[None, :, None, None, None] for x in (model.latents_mean, model.latents_std))
        latents = posterior.mean + posterior.std * drawn
        recorder.record("pipeline/sample", latents)
        latents = (latents - mean) * SCALING / std
        recorder.record("pipeline/latents", latents)
        latents = latents * std / SCALING + mean
        recorder.record("pipeline/denormalized_latents", latents)
        share = torch.tensor([DECODE_NOISE], dtype=model.dtype)
        latents = (1 - share) * latents + share * extra
        recorder.record("pipeline/noisy_latents", latents)
        time = torch.tensor([DECODE_TIME], dtype=model.dtype)
        recorder.record("pipeline/decode_timestep", time, kind="input")
        result = model.decode(latents, time, return_dict=False)[0]
        recorder.record("pipeline/decoded", result)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the names of the original, kernels with their inputs last."""
    new: dict[str, Array] = {}
    axes = (0, 2, 4, 3, 1) if bug == "kernels_columns_first" else (0, 2, 3, 4, 1)

    def conv(name: str, old: str) -> None:
        new[f"{name}.weight"] = w[f"{old}.conv.weight"].transpose(axes).copy()
        new[f"{name}.bias"] = w[f"{old}.conv.bias"]

    def resnet(name: str, old: str) -> None:
        conv(f"{name}.conv1.conv", f"{old}.conv1")
        conv(f"{name}.conv2.conv", f"{old}.conv2")
        if f"{old}.norm3.weight" in w:
            for end in ("weight", "bias"):
                new[f"{name}.norm3.norm.{end}"] = w[f"{old}.norm3.{end}"]
            conv(f"{name}.conv_shortcut.conv", f"{old}.conv_shortcut")
        if f"{old}.scale_shift_table" in w:
            new[f"{name}.scale_shift_table"] = w[f"{old}.scale_shift_table"]

    def time(name: str, old: str) -> None:
        for layer in ("linear_1", "linear_2"):
            for end in ("weight", "bias"):
                key = f"timestep_embedder.{layer}.{end}"
                new[f"{name}.{key}"] = w[f"{old}.{key}"]

    for side, blocks, kind in (
        ("encoder", ENCODER_BLOCKS, "down_blocks"),
        ("decoder", DECODER_BLOCKS, "up_blocks"),
    ):
        conv(f"{side}.conv_in.conv", f"{side}.conv_in")
        conv(f"{side}.conv_out.conv", f"{side}.conv_out")
        for i, (what, old, count) in enumerate(blocks):
            name, old = f"{side}.{kind}.{i}", f"{side}.{old}"
            if what == "compress":
                conv(f"{name}.conv", old if side == "encoder" else f"{old}.conv")
                continue
            if what == "res_y":
                resnet(name, old)
                continue
            inner = old if side == "encoder" else f"{old}.resnets"
            for k in range(count):
                resnet(f"{name}.res_blocks.{k}", f"{inner}.{k}")
            if side == "decoder":
                time(f"{name}.time_embedder", f"{old}.time_embedder")
    time("decoder.last_time_embedder", "decoder.time_embedder")
    new["decoder.last_scale_shift_table"] = w["decoder.scale_shift_table"]
    new["decoder.timestep_scale_multiplier"] = w["decoder.timestep_scale_multiplier"]
    new["per_channel_statistics.mean-of-means"] = w["latents_mean"]
    new["per_channel_statistics.std-of-means"] = w["latents_std"]
    if bug == "table_of_first_resnet":
        table = "decoder.up_blocks.{}.res_blocks.{}.scale_shift_table"
        new[table.format(4, 1)] = new[table.format(4, 0)]
    if bug == "convolutions_exchanged":
        for end in ("weight", "bias"):
            a, b = (f"encoder.down_blocks.6.res_blocks.0.conv{k}.conv.{end}" for k in (1, 2))
            new[a], new[b] = new[b], new[a]
    return new


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def conv3d(x: Array, kernel: Array, stride: int) -> Array:
    """Of (batch, frames, rows, columns, channels), padded already."""
    size = kernel.shape[1:4]
    windows = np.lib.stride_tricks.sliding_window_view(x, size, (1, 2, 3))
    windows = windows[:, ::stride, ::stride, ::stride].transpose(0, 1, 2, 3, 5, 6, 7, 4)
    return windows.reshape(*windows.shape[:4], -1) @ kernel.reshape(len(kernel), -1).T


def depth_to_space(x: Array, bug: str | None) -> Array:
    """Twice the frames, rows and columns; a channel's eight values are neighbours."""
    b, f, h, w, _ = x.shape
    if bug == "depth_to_space_channels_last":
        x = x.reshape(b, f, h, w, 2, 2, 2, -1).transpose(0, 1, 4, 2, 5, 3, 6, 7)
    else:
        x = x.reshape(b, f, h, w, -1, 2, 2, 2).transpose(0, 1, 5, 2, 6, 3, 7, 4)
    x = x.reshape(b, 2 * f, 2 * h, 2 * w, -1)
    return x[:, :-1] if bug == "last_frame_dropped" else x[:, 1:]


class CausalVideoAutoencoder:
    """Encoder and decoder; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, slot: str = "out", kind: str = "activation") -> Array:
        """`x` is rounded already."""
        taps.tap(name, x.astype(self.dtype), slot=slot, kind=kind)
        return x

    def act(self, name: str, x: Array) -> Array:
        return self.tap(name, self.r(silu(x)))

    def conv(self, name: str, x: Array, stride: int = 1) -> Array:
        """The encoder sees earlier frames only; the decoder sees one on each side."""
        bug, kernel = self.bug, self.p[f"{name}.weight"]
        causal = name.startswith("encoder") or bug == "decoder_causal"
        extent = kernel.shape[1] - 1
        before = extent if causal else extent // 2
        parts = [x[:, :1]] * before + [x] + [x[:, -1:]] * (extent - before)
        if bug == "causal_padding_of_zeros" and causal:
            parts[:before] = [np.zeros_like(x[:, :1])] * before
        edge = (kernel.shape[2] // 2,) * 2
        if bug == "strides_padded_after_only" and stride == 2:
            edge = (0, 1)
        x = np.pad(np.concatenate(parts, 1), ((0, 0), (0, 0), edge, edge, (0, 0)))
        return self.tap(name, self.r(conv3d(x, kernel, stride) + self.p[f"{name}.bias"]))

    def pixel_norm(self, name: str, x: Array) -> Array:
        """RMS over the channels of each pixel, without weights."""
        if self.bug == "decoder_norm_takes_mean_away" and name.startswith("decoder"):
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-8))
        return self.tap(name, self.r(y))

    def layer_norm(self, name: str, x: Array) -> Array:
        y = x - x.mean(-1, keepdims=True)
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(1e-6))
        return self.tap(name, self.r(y * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]))

    def linear(self, name: str, x: Array) -> Array:
        return self.tap(name, self.r(x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]))

    def time(self, name: str, t: Array) -> Array:
        """A block's own embedding of the time, (batch, values)."""
        half = WAVE // 2
        exponents = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32)
        frequencies = np.exp((exponents / np.float32(half)).astype(np.float64)).astype(np.float32)
        angles = t[:, None] * frequencies
        if self.bug == "time_angles_bfloat16":
            angles = rounder("bfloat16")(angles)
        x = np.concatenate([np.cos(angles), np.sin(angles)], -1)
        x = self.linear(f"{name}.timestep_embedder.linear_1", self.tap(f"{name}.proj", self.r(x)))
        x = self.act(f"{name}.timestep_embedder.act", x)
        x = self.linear(f"{name}.timestep_embedder.linear_2", x)
        return self.r(silu(x)) if self.bug == "time_activated_again" else x

    def rows(self, name: str, embedded: Array) -> list[Array]:
        """Rows of a table plus the time, of (batch, 1, 1, 1, channels) each."""
        table = self.p[name]
        x = self.r(embedded.reshape(len(embedded), *table.shape) + table)
        return [x[:, i, None, None, None] for i in range(len(table))]

    def modulate(self, x: Array, shift: Array, scale: Array) -> Array:
        return self.r(self.r(x * self.r(1 + scale)) + shift)

    def resnet(self, name: str, x: Array, embedded: Array | None = None) -> Array:
        shift_1 = scale_1 = shift_2 = scale_2 = None
        if embedded is not None:
            shift_1, scale_1, shift_2, scale_2 = self.rows(f"{name}.scale_shift_table", embedded)
            if self.bug == "scale_before_shift":
                shift_1, scale_1, shift_2, scale_2 = scale_1, shift_1, scale_2, shift_2
        h = self.pixel_norm(f"{name}.norm1", x)
        if shift_1 is not None and scale_1 is not None:
            h = self.modulate(h, shift_1, scale_1)
        h = self.conv(f"{name}.conv1.conv", self.act(f"{name}.act1", h))
        h = self.pixel_norm(f"{name}.norm2", h)
        if shift_2 is not None and scale_2 is not None:
            h = self.modulate(h, shift_2, scale_2)
        h = self.conv(f"{name}.conv2.conv", self.act(f"{name}.act2", h))
        if f"{name}.norm3.norm.weight" in self.p:
            norm = self.pixel_norm if self.bug == "shortcut_has_pixel_norm" else self.layer_norm
            x = self.conv(f"{name}.conv_shortcut.conv", norm(f"{name}.norm3.norm", x))
        return self.tap(name, self.r(h + x))

    def upsample(self, name: str, x: Array) -> Array:
        bug = self.bug
        kept = depth_to_space(x, bug)
        if bug == "residual_repeats_each_channel":
            kept = np.repeat(kept, 4, -1)
        else:
            kept = np.tile(kept, 4)
        y = depth_to_space(self.conv(f"{name}.conv", x), bug)
        return self.tap(name, self.r(y + kept))

    def patchify(self, x: Array) -> Array:
        """Channels are (colour, column of the patch, row of the patch)."""
        b, f, h, w, _ = x.shape
        x = x.reshape(b, f, h // PATCH, PATCH, w // PATCH, PATCH, COLOURS)
        x = x.transpose(0, 1, 2, 4, 6, 5, 3)
        return x.reshape(b, f, h // PATCH, w // PATCH, -1)

    def unpatchify(self, x: Array) -> Array:
        b, f, h, w, _ = x.shape
        x = x.reshape(b, f, h, w, COLOURS, PATCH, PATCH)
        if self.bug == "unpatchify_rows_first":
            x = x.transpose(0, 1, 2, 5, 3, 6, 4)
        else:
            x = x.transpose(0, 1, 2, 6, 3, 5, 4)
        return x.reshape(b, f, h * PATCH, w * PATCH, COLOURS)

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Means, and one logarithm of the variance for all channels."""
        x = self.tap("encoder.patches", self.patchify(x))
        x = self.conv("encoder.conv_in.conv", x)
        for i, (kind, _, count) in enumerate(ENCODER_BLOCKS):
            name = f"encoder.down_blocks.{i}"
            if kind == "compress":
                x = self.conv(f"{name}.conv", x, stride=2)
            elif kind == "res_y":
                x = self.resnet(name, x)
            else:
                for k in range(count):
                    x = self.resnet(f"{name}.res_blocks.{k}", x)
        x = self.act("encoder.conv_act", self.pixel_norm("encoder.conv_norm_out", x))
        x = self.conv("encoder.conv_out.conv", x)
        if self.bug == "variance_channel_first":
            return x[..., 1:], x[..., :1]
        return x[..., :-1], x[..., -1:]

    def decode(self, x: Array, t: Array) -> Array:
        bug = self.bug
        if bug != "time_without_multiplier":
            t = self.r(t * self.p["decoder.timestep_scale_multiplier"])
        x = self.conv("decoder.conv_in.conv", x)
        for i, (kind, _, count) in enumerate(DECODER_BLOCKS):
            name = f"decoder.up_blocks.{i}"
            if kind == "compress":
                x = self.upsample(name, x)
                continue
            embedded = self.time(f"{name}.time_embedder", t)
            for k in range(count):
                x = self.resnet(f"{name}.res_blocks.{k}", x, embedded)
        x = self.pixel_norm("decoder.conv_norm_out", x)
        embedded = self.time("decoder.last_time_embedder", t)
        if bug != "last_modulation_missing":
            x = self.modulate(x, *self.rows("decoder.last_scale_shift_table", embedded))
        x = self.conv("decoder.conv_out.conv", self.act("decoder.conv_act", x))
        return self.tap("decoder", self.unpatchify(x))

    def draw(self, mean: Array, logvar: Array, drawn: Array) -> Array:
        logvar = np.clip(logvar, -30, 20)
        if self.bug != "deviation_without_half":
            logvar = self.r(np.float32(0.5) * logvar)
        return self.tap("sample", self.r(mean + self.r(self.r(np.exp(logvar)) * drawn)))

    def normalize(self, x: Array) -> Array:
        mean, std = (self.p[f"per_channel_statistics.{k}-of-means"] for k in ("mean", "std"))
        x = self.r(self.r(self.r(x - mean) * np.float32(SCALING)) / std)
        return self.tap("latents", x)

    def un_normalize(self, x: Array) -> Array:
        mean, std = (self.p[f"per_channel_statistics.{k}-of-means"] for k in ("mean", "std"))
        x = self.r(x * std)
        if self.bug != "scaling_not_undone":
            x = self.r(x / np.float32(SCALING))
        return self.tap("latents_raw", self.r(x + mean))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    vae = CausalVideoAutoencoder(converted(checkpoint(folder, "vae"), bug), bug, dtype)
    r = vae.r
    names = ("video", "posterior_noise", "decode_noise")
    video, drawn, extra = (r(value(f"pipeline/{x}").transpose(0, 2, 3, 4, 1)) for x in names)
    if bug == "video_from_zero_to_one":
        video = r((video + 1) / 2)
    t, share = r([DECODE_TIME]), r(DECODE_NOISE)
    kept = {k: v.astype(dtype) for k, v in vae.p.items()} if weights else None
    blocks = ("video", "noise*", "timestep", "sample", "latents*", "decoder", "*.conv_in.conv")
    blocks += ("encoder.down_blocks.?", "*.res_blocks.?", "*_blocks.?.conv", "*.conv_out.conv")
    blocks += ("decoder.up_blocks.?",)
    with port_trace(out, dump, dtype, blocks, kept):
        vae.tap("video", video, kind="input")
        vae.tap("noise_posterior", drawn, kind="input")
        vae.tap("noise_decode", extra, kind="input")
        vae.tap("timestep", t, kind="input")
        x = vae.un_normalize(vae.normalize(vae.draw(*vae.encode(video), drawn)))
        kept_share = np.float32(1) if bug == "noise_added_to_all" else r(1 - share)
        x = vae.tap("latents_noisy", r(r(kept_share * x) + r(share * extra)))
        vae.decode(x, t)


NO_COUNTERPART: tuple[str, ...] = ()

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos|interchang|mixed up"
HALF = r"f16|float16|\bhalf\b|fp16|precision|round|\bcast"
PADDING = r"\bpad|causal|\bedges?\b|border|replicat"
BUGS = (
    Bug(
        "kernels_columns_first",
        "Kernels are (out, frames, columns, rows, in), with rows and columns exchanged.",
        (LOADED, SWAPPED, r"layout|\bax[ei]s\b|kernel.*(rows?|column|height|width)"),
        "weights",
    ),
    Bug(
        "table_of_first_resnet",
        "The second residual block of the last block has the table of the first.",
        (LOADED, r"(another|other|wrong|previous|first) (layer|block|resnet)|dupl|index"),
        "weights",
    ),
    Bug(
        "convolutions_exchanged",
        "The two convolutions of a residual block of the encoder are exchanged.",
        (LOADED, SWAPPED, r"conv1.*conv2|conv2.*conv1"),
        "weights",
    ),
    Bug(
        "video_from_zero_to_one",
        "The video is in 0..1, not in -1..1.",
        (
            r"\brange\b|\[0, ?1\]|\[-1, ?1\]|0\.\.1|normali[sz]|cent(er|re)|offset",
            r"(video|input|pixel)\w*.*(scal(e|ed|ing)\b|shift|affine|factor|differ)",
        ),
        "inputs",
    ),
    Bug(
        "causal_padding_of_zeros",
        "The encoder's convolutions have zeros before the first frame, not copies of it.",
        (PADDING, r"zeros?\b.*frame|frame.*zeros?\b|first frame"),
    ),
    Bug(
        "strides_padded_after_only",
        "Convolutions with stride are padded below and on the right only, as Stable Diffusion's.",
        (r"\bpad|asymmetr|\bedges?\b|border|off.by.one|\boffset|moved by|shifted by",),
    ),
    Bug(
        "shortcut_has_pixel_norm",
        "The shortcut has the norm without mean and weights, not LayerNorm.",
        (
            r"layer.?norm|pixel.?norm|rms.?norm|norm3|\bmean\b|cent(er|re)",
            r"affine|\bweights?\b|\bbias|gamma",
        ),
    ),
    Bug(
        "variance_channel_first",
        "The first channel of the encoder's result is taken as the variance, not the last one.",
        (
            r"log.?var|variance|channel|\bmoments?\b",
            r"split|chunk|slice|off.by.one|offset|index|\bshifted by|\broll",
        ),
    ),
    Bug(
        "deviation_without_half",
        "Deviations are exp(logvar), which is the variance, not exp(logvar / 2).",
        (
            r"varianc|log.?var|\bstd\b|standard deviation|deviations?\b|posterior",
            r"0\.5|\bhalf\b|square|sqrt|\broot\b",
        ),
    ),
    Bug(
        "scaling_not_undone",
        "Latents are not divided by the scaling factor before they are decoded.",
        (r"\bscal(e|ed|ing)\b|factor|divi(de|sor)|multipl|0\.8\b|1\.25\b",),
    ),
    Bug(
        "noise_added_to_all",
        "The decoder's noise is added to the whole latents, not to 1 - share of them.",
        (
            r"1 ?- ?\w+|one minus|\bshare|interpolat|\blerp|\bmix|blend|convex",
            r"nois.*(scal(e|ed|ing)\b|added|weight|factor)|(scal(e|ed|ing)\b|factor).*nois",
            r"0\.975|1\.02|lacks? (a|its) factor|weights? of (the )?(terms|sum)",
        ),
    ),
    Bug(
        "decoder_causal",
        "The decoder's convolutions are padded before the first frame only.",
        (PADDING, r"(frames?|time|temporal).*(shift|offset|before|both sides|symmetric)"),
    ),
    Bug(
        "time_without_multiplier",
        "The decoder's time is not multiplied by 1000.",
        (
            r"1000|1e3|thousand|\bunits?\b|multiplier",
            r"time.*(scal(e|ed|ing)\b|factor|multipl)|(scal(e|ed|ing)\b|factor|multipl).*time",
        ),
    ),
    Bug(
        "time_angles_bfloat16",
        "Angles of the time's sinusoid are rounded to bfloat16.",
        (HALF,),
    ),
    Bug(
        "time_activated_again",
        "The time's embedding goes through SiLU after its last layer too.",
        (r"silu|swish|activat|nonlinear",),
    ),
    Bug(
        "scale_before_shift",
        "The table's rows are read as scale, shift, scale, shift.",
        (r"shift.*scale|scale.*shift|chunk|split", SWAPPED),
    ),
    Bug(
        "decoder_norm_takes_mean_away",
        "The decoder's norms subtract the mean of the channels, as LayerNorm does.",
        (r"layer.?norm|\bmean\b|cent(er|re)|subtract", r"rms.?norm|pixel.?norm"),
    ),
    Bug(
        "depth_to_space_channels_last",
        "Upsampling reads channels as (frame, row, column, channel), not with the channel first.",
        (r"channel|layout|\bax[ei]s\b|reshap|shuffle|depth.to.space", SWAPPED),
    ),
    Bug(
        "last_frame_dropped",
        "Upsampling drops the last frame, not the first.",
        (
            r"(first|last) frame|frames?\b.*(drop|cut|remov|trim|slice|crop)",
            r"(drop|cut|remov|trim|slice|crop)\w*.*frames?\b",
            r"off.by.one|(moved|shifted|offset) by|(frames?|time|temporal).*(shift|offset)",
        ),
    ),
    Bug(
        "residual_repeats_each_channel",
        "Upsampling's residual repeats each channel four times in place, not all of them in turn.",
        (
            r"repeat|\btil(e|ed|ing)\b|interleav",
            r"channel.*(order|permut|swap)|(order|permut)\w*.*channel",
            r"residual|shortcut|skip connection",
        ),
    ),
    Bug(
        "last_modulation_missing",
        "The last norm is not modulated by the time.",
        (r"modulat|shift|\bscal(e|ed|ing)\b|adaln|\btable\b", r"time.*(ignor|unused|missing|not)"),
    ),
    Bug(
        "unpatchify_rows_first",
        "A patch of the result is read as (colour, row, column), not (colour, column, row).",
        (r"patch|rows?\b|column|height|width|\bax[ei]s\b", SWAPPED),
    ),
)
