"""Wan 2.1's video autoencoder in NumPy: encode five frames, scale the latents, decode them.

Frames, rows, columns, channels; the names are those of Wan's repository. Frames go through in
chunks with a cache, as there, so that a name occurs once for each chunk. Convolutions are recorded
with their inputs.
"""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from numpy.lib.stride_tricks import sliding_window_view

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
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "wan_vae"
BASE, Z, FRAMES, HEIGHT, WIDTH = 4, 4, 5, 8, 12
MEAN, STD = (0.1, -0.3, 0.25, 0.05), (1.4, 0.7, 1.1, 2.3)


def reference(folder: Path, dtype: str) -> None:
    """Encode, normalise, denormalise, decode."""

    def make() -> AutoencoderKLWan:
        return AutoencoderKLWan(
            base_dim=BASE,
            z_dim=Z,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=list(MEAN),
            latents_std=list(STD),
        )

    model = randomised(make, 16)
    model.decoder.conv_out.weight.mul_(4)  # some values of the video leave -1 … 1
    model = saved(model, folder, "vae", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="vae", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        video = torch.tanh(noise(1, 1, 3, FRAMES, HEIGHT, WIDTH)).to(model.dtype)
        video = recorder.record("pipeline/video_in", video, kind="input")
        mean, std = (torch.tensor(x).view(1, Z, 1, 1, 1).to(model.dtype) for x in (MEAN, STD))
        z = recorder.record("pipeline/mode", model.encode(video).latent_dist.mode())
        latents = recorder.record("pipeline/latents", (z - mean) / std)
        z = recorder.record("pipeline/unscaled", latents * std + mean)
        recorder.record("pipeline/video", model.decode(z).sample)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the names of Wan's repository; kernels as (t, h, w, in, out)."""
    table = {"quant_conv": "conv1", "post_quant_conv": "conv2"}
    flat = {"encoder": ["down_blocks.0", "down_blocks.1", "down_blocks.2", "down_blocks.3"]}
    flat["encoder"].append("down_blocks.4")
    flat["decoder"] = ["up_blocks.0.resnets.0", "up_blocks.0.resnets.1", "up_blocks.0.upsamplers.0"]
    flat["decoder"] += ["up_blocks.1.resnets.0", "up_blocks.1.resnets.1"]
    flat["decoder"] += [
        "up_blocks.1.upsamplers.0",
        "up_blocks.2.resnets.0",
        "up_blocks.2.resnets.1",
    ]
    if bug == "up_blocks_exchanged":
        flat["decoder"][6:] = flat["decoder"][:5:-1]
    for net, many in flat.items():
        down = "downsamples" if net == "encoder" else "upsamples"
        blocks = {old: f"{net}.{down}.{i}" for i, old in enumerate(many)}
        blocks |= {
            "mid_block.resnets.0": f"{net}.middle.0",
            "mid_block.resnets.1": f"{net}.middle.2",
        }
        for old, block in blocks.items():
            old = f"{net}.{old}"
            table |= {f"{old}.norm1": f"{block}.residual.0", f"{old}.conv1": f"{block}.residual.2"}
            table |= {f"{old}.norm2": f"{block}.residual.3", f"{old}.conv2": f"{block}.residual.6"}
            table |= {
                f"{old}.conv_shortcut": f"{block}.shortcut",
                f"{old}.time_conv": f"{block}.time_conv",
            }
            table |= {f"{old}.resample.1": f"{block}.resample.1"}
        for part in ("norm", "to_qkv", "proj"):
            table[f"{net}.mid_block.attentions.0.{part}"] = f"{net}.middle.1.{part}"
        table |= {f"{net}.conv_in": f"{net}.conv1", f"{net}.norm_out": f"{net}.head.0"}
        table[f"{net}.conv_out"] = f"{net}.head.2"
    new: dict[str, Array] = {}
    for old, value in w.items():
        module, end = old.rsplit(".", 1)
        if value.ndim == 5 and end == "weight":
            value = value.transpose(2, 3, 4, 1, 0)
        elif value.ndim == 4 and end == "weight":
            value = value.transpose(2, 3, 1, 0)[None]
        new[f"{table[module]}.{end}"] = value.reshape(-1) if end == "gamma" else value
    if bug == "kernel_reversed_in_time":
        new["decoder.conv1.weight"] = new["decoder.conv1.weight"][::-1].copy()
    if bug == "kernel_rows_columns":
        name = "encoder.downsamples.1.resample.1.weight"
        new[name] = new[name].swapaxes(1, 2).copy()
    if bug == "gamma_of_other_norm":
        new["decoder.head.0.gamma"] = new["decoder.upsamples.7.residual.3.gamma"]
    if bug == "bias_not_loaded":
        name = "encoder.middle.2.residual.6.bias"
        new[name] = np.zeros_like(new[name])
    return new


class Vae:
    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.q(v) for k, v in p.items()}
        self.cache: dict[str, Array] = {}

    def tap(self, name: str, x: Array, slot: str = "out") -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype), slot=slot)
        return x

    def conv(self, name: str, x: Array, stride: tuple[int, int, int] = (1, 1, 1)) -> Array:
        """Without padding."""
        w = self.p[f"{name}.weight"]
        if self.bug == "head_f16" and name == "decoder.head.2":
            x, w = (y.astype(np.float16).astype(np.float32) for y in (x, w))
        views = sliding_window_view(x, w.shape[:3], axis=(0, 1, 2))
        views = views[:: stride[0], :: stride[1], :: stride[2]]  # t h w c kt kh kw
        y = np.einsum("thwcijk,ijkco->thwo", views, w, optimize=True)
        return self.tap(name, self.q(y + self.p[f"{name}.bias"]))

    def causal(self, name: str, x: Array) -> Array:
        """A convolution of 3 frames that sees the last two frames of earlier chunks."""
        bug, own = self.bug, f"{name}.weight"
        self.tap(name, x, "in.0")
        side = self.p[own].shape[1] // 2
        before = self.cache.get(name)
        if before is None or (bug == "cache_unused" and name == "decoder.middle.0.residual.2"):
            before = x[:0]
            if bug == "first_frame_repeated" and name == "encoder.conv1":
                before = np.repeat(x[:1], 2, 0)
        lack = np.zeros((2 - len(before), *x.shape[1:]), np.float32)
        whole = np.concatenate([lack, before, x])
        if bug == "padding_centered" and name == "decoder.upsamples.0.residual.6":
            whole = np.concatenate([whole[1:], np.zeros_like(x[:1])])
        kept = np.concatenate([before, x])[-2:]
        if bug == "cache_of_one_frame" and len(kept) > 1:
            kept = kept[-1:]
        if bug == "cache_reversed" and name == "decoder.head.2":
            kept = kept[::-1]
        if not (bug == "cache_stale" and name in self.cache and "upsamples.3.residual.2" in name):
            self.cache[name] = kept
        mode = (
            "edge" if bug == "padding_edge" and name == "encoder.downsamples.0.residual.2" else ""
        )
        pads = [(0, 0), (side, side), (side, side), (0, 0)]
        return self.conv(name, np.pad(whole, pads, mode="edge") if mode else np.pad(whole, pads))

    def norm(self, name: str, x: Array) -> Array:
        bug = self.bug
        if bug == "norm_centered" and "middle" in name:
            x = x - x.mean(-1, keepdims=True)
        axes = (
            (0, -1)
            if bug == "norm_over_frames" and name == "decoder.upsamples.3.residual.0"
            else -1
        )
        length = np.sqrt((x * x).sum(axes, keepdims=True))
        if bug == "norm_eps":
            length = np.sqrt(length**2 + 1e-2)
        y = self.q(x / np.maximum(length, 1e-12))
        root = (
            1.0 if bug == "norm_root_missing" and name == "encoder.head.0" else x.shape[-1] ** 0.5
        )
        y = self.q(y * root)
        gamma = self.p[f"{name}.gamma"]
        return self.tap(
            name, y if bug == "gamma_ignored" and name == "decoder.head.0" else self.q(y * gamma)
        )

    def act(self, x: Array, name: str = "") -> Array:
        if self.bug == "gelu" and name.startswith("decoder"):
            return self.q(x * 0.5 * (1 + np.vectorize(math.erf)(x / 2**0.5)))
        if self.bug == "silu_missing" and name == "decoder.upsamples.4.second":
            return x
        if self.bug == "relu_in_head" and name == "encoder.head":
            return np.maximum(x, 0)
        return self.q(x / (1 + np.exp(-x)))

    def residual(self, name: str, x: Array) -> Array:
        bug = self.bug
        late = bug == "shortcut_after_norm" and name == "decoder.upsamples.3"
        short = x
        if f"{name}.shortcut.weight" in self.p and not late:
            short = self.conv(f"{name}.shortcut", x)
        y = self.act(self.norm(f"{name}.residual.0", x), f"{name}.first")
        short = self.conv(f"{name}.shortcut", y) if late else short
        y = self.causal(f"{name}.residual.2", y)
        y = self.act(self.norm(f"{name}.residual.3", y), f"{name}.second")
        y = self.causal(f"{name}.residual.6", y)
        if bug == "residual_missing" and name == "encoder.middle.2":
            return self.tap(name, y)
        return self.tap(name, self.q(y + short))

    def attention(self, name: str, x: Array) -> Array:
        bug, (t, h, w, c) = self.bug, x.shape
        y = self.conv(f"{name}.to_qkv", self.norm(f"{name}.norm", x)).reshape(t, h * w, 3 * c)
        if bug == "attention_over_frames" and name.startswith("encoder"):
            y = y.reshape(1, t * h * w, 3 * c)
        if bug == "qkv_interleaved" and name.startswith("decoder"):
            q, k, v = (y[..., i::3] for i in range(3))
        else:
            q, k, v = np.split(y, 3, -1)
        k, v = (v, k) if bug == "key_value_swapped" and name.startswith("encoder") else (k, v)
        if bug == "attention_bf16":
            q, k, v = (z.astype(ml_dtypes.bfloat16).astype(np.float32) for z in (q, k, v))
        scores = q @ k.swapaxes(1, 2) * (1 if bug == "attention_unscaled" else c**-0.5)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y = self.q(e / e.sum(-1, keepdims=True) @ v)
        if bug == "attention_grid_transposed":
            y = y.reshape(t, w, h, c).swapaxes(1, 2)
        y = self.conv(f"{name}.proj", self.tap(f"{name}.attend", y.reshape(t, h, w, c)))
        return self.tap(name, y if bug == "attention_residual" else self.q(x + y))

    def down(self, name: str, x: Array) -> Array:
        bug, pads = self.bug, [(0, 0), (0, 1), (0, 1), (0, 0)]
        if bug == "down_padding_before":
            pads = [(0, 0), (1, 0), (1, 0), (0, 0)]
        y = np.pad(x, pads)
        if bug == "down_padding_edge" and name.endswith("3"):
            y = np.pad(x, pads, mode="edge")
        y = self.conv(f"{name}.resample.1", y, (1, 2, 2))
        if f"{name}.time_conv.weight" in self.p:
            before = self.cache.get(name)
            self.cache[name] = y[-1:]
            if before is not None:
                before = np.zeros_like(before) if bug == "down_cache_zero" else before
                y = self.conv(f"{name}.time_conv", np.concatenate([before, y]), (2, 1, 1))
        return self.tap(name, y)

    def up(self, name: str, x: Array) -> Array:
        bug, (t, h, w, c) = self.bug, x.shape
        if f"{name}.time_conv.weight" in self.p:
            own = f"{name}.time_conv"
            if name in self.cache or bug == "up_first_frame_doubled":
                if bug == "up_cache_has_first_frame" and own not in self.cache:
                    self.cache[own] = self.cache[name]
                y = self.causal(own, x)
                if bug == "up_channels_interleaved":
                    y = y.reshape(t, h, w, c, 2).transpose(0, 4, 1, 2, 3)
                else:
                    y = y.reshape(t, h, w, 2, c).transpose(0, 3, 1, 2, 4)
                y = y[:, ::-1] if bug == "up_frames_swapped" else y
                x = y.reshape(2 * t, h, w, c)
            self.cache[name] = x[-1:]
        if bug == "upsample_bilinear" and name == "decoder.upsamples.5":
            y = torch.from_numpy(x).permute(0, 3, 1, 2)
            y = F.interpolate(y, scale_factor=2, mode="bilinear")
            x = self.q(y.permute(0, 2, 3, 1).numpy())
        elif bug == "upsample_tiled" and name == "decoder.upsamples.2":
            x = np.tile(x, (1, 2, 2, 1))
        else:
            x = x.repeat(2, 1).repeat(2, 2)
        return self.tap(
            name, self.conv(f"{name}.resample.1", np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]))
        )

    def middle(self, net: str, x: Array) -> Array:
        x = self.residual(f"{net}.middle.0", x)
        if not (self.bug == "attention_skipped" and net == "decoder"):
            x = self.attention(f"{net}.middle.1", x)
        return self.tap(f"{net}.middle", self.residual(f"{net}.middle.2", x))

    def head(self, net: str, x: Array) -> Array:
        return self.tap(
            net,
            self.causal(f"{net}.head.2", self.act(self.norm(f"{net}.head.0", x), f"{net}.head")),
        )

    def encoder(self, x: Array) -> Array:
        x = self.causal("encoder.conv1", x)
        for i in range(5):
            name = f"encoder.downsamples.{i}"
            x = self.down(name, x) if i in (1, 3) else self.residual(name, x)
        return self.head("encoder", self.middle("encoder", x))

    def decoder(self, x: Array) -> Array:
        x = self.middle("decoder", self.causal("decoder.conv1", x))
        for i in range(8):
            name = f"decoder.upsamples.{i}"
            if not (self.bug == "block_skipped" and i == 1):
                x = self.up(name, x) if i in (2, 5) else self.residual(name, x)
        return self.head("decoder", x)

    def __call__(self, video: Array) -> None:
        bug = self.bug
        y = np.concatenate([self.encoder(part) for part in np.split(video, (1,))])
        y = self.conv("conv1", y)
        z = self.tap("mu", y[..., Z:] if bug == "mode_is_logvar" else y[..., :Z])
        mean, std = self.q(MEAN), self.q(STD)
        if bug == "scale_times_std":
            x = (z - mean) * std
        elif bug == "scale_before_shift":
            x = z / std - mean
        else:
            x = (z if bug == "mean_ignored" else self.q(z - mean)) / std
        x = self.tap("latents", self.q(x))
        order = slice(None, None, -1) if bug == "unscale_order" else slice(None)
        z = self.tap("unscaled", self.q(self.q(x * std[order]) + mean[order]))
        x = z if bug == "post_quant_skipped" else self.conv("conv2", z)
        parts = []
        for part in np.split(x, len(x)):
            if bug == "cache_cleared_between_chunks":
                self.cache = {k: v for k, v in self.cache.items() if k == "decoder.upsamples.2"}
            parts.append(self.decoder(part))
        y = np.concatenate(parts)
        if bug != "not_clamped":
            y = np.clip(y, 0 if bug == "clamped_to_zero" else -1, 1)
        self.tap("video", y)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    vae = Vae(converted(checkpoint(folder, "vae"), bug), bug, dtype)
    video = given(folder)("pipeline/video_in")[0].transpose(1, 2, 3, 0)
    if bug == "video_bgr":
        video = video[..., ::-1]
    if bug == "video_zero_to_one":
        video = video / 2 + 0.5
    if bug == "frames_reversed":
        video = video[::-1]
    video = vae.q(video)
    kept = vae.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("pixels", "*coder.*samples.?", "*coder.middle", "*coder", "mu", "latents", "unscaled")
    with port_trace(out, dump, dtype, (*blocks, "video"), kept):
        taps.tap("pixels", video.astype(dtype), kind="input")
        vae(video)


NO_COUNTERPART: tuple[str, ...] = ()

CACHE, WEIGHT = r"cache|causal|chunk|frame|tempor|\btime\b|previous", r"load|weight|param"
BUGS = (
    Bug("up_blocks_exchanged", "Two blocks' weights are exchanged.", (WEIGHT, r"swap"), "weights"),
    Bug(
        "kernel_reversed_in_time",
        "A kernel is reversed in time.",
        (r"flip|revers|\btime\b",),
        "weights",
    ),
    Bug("kernel_rows_columns", "A kernel is transposed.", (r"transpos|swap|ax[ei]s",), "weights"),
    Bug("gamma_of_other_norm", "The last norm has another's gamma.", (WEIGHT,), "weights"),
    Bug("bias_not_loaded", "A bias is zero.", (r"bias|zero|load",), "weights"),
    Bug("video_bgr", "The video is BGR.", (r"bgr|channel|order|revers|permut",), "inputs"),
    Bug("video_zero_to_one", "The video is 0 … 1.", (r"range|scale|normal|affine",), "inputs"),
    Bug(
        "frames_reversed",
        "The frames are reversed.",
        (r"revers|flip|order|permut|frame",),
        "inputs",
    ),
    Bug("head_f16", "The last convolution is in float16.", (r"f16|float16|half|precision",)),
    Bug("cache_unused", "A convolution ignores earlier chunks.", (CACHE,)),
    Bug(
        "first_frame_repeated", "Time is padded with the first frame.", (r"pad|repeat|replic|edge",)
    ),
    Bug("padding_centered", "Time is padded on both sides.", (r"pad|causal|centre|center|symm",)),
    Bug("cache_of_one_frame", "One frame is cached, not two.", (CACHE,)),
    Bug("cache_reversed", "Cached frames are in the other order.", (CACHE, r"revers|order")),
    Bug("cache_stale", "A cache is not updated.", (CACHE, r"stale")),
    Bug("cache_cleared_between_chunks", "Caches are cleared for each chunk.", (CACHE,)),
    Bug("padding_edge", "A convolution pads with the edge.", (r"pad|edge|border",)),
    Bug("norm_centered", "Norms of the middle subtract the mean.", (r"mean|cent|layer ?norm|rms",)),
    Bug("norm_over_frames", "A norm is over frames too.", (r"ax[ei]s|norm.*(over|dim)|frame",)),
    Bug("norm_eps", "Norms have eps 1e-2.", (r"\beps",)),
    Bug(
        "norm_root_missing",
        "A norm lacks the root of the channels.",
        (r"sqrt|root|scale|factor|rms",),
    ),
    Bug(
        "gamma_ignored", "The last norm's gamma is not used.", (r"gamma|affine|gain|weight|scale",)
    ),
    Bug("gelu", "The decoder uses GELU.", (r"gelu|silu|activation",)),
    Bug("silu_missing", "A SiLU is missing.", (r"silu|activation",)),
    Bug("relu_in_head", "The encoder's head uses ReLU.", (r"relu|silu|activation",)),
    Bug(
        "shortcut_after_norm",
        "A shortcut reads the normed value.",
        (r"shortcut|\binput|residual|norm",),
    ),
    Bug("residual_missing", "A residual is missing.", (r"residual|skip|shortcut|added|missing",)),
    Bug(
        "attention_over_frames",
        "Attention is over all frames.",
        (r"frame|\btime\b|batch|token|ax[ei]s",),
    ),
    Bug(
        "qkv_interleaved",
        "q, k, v are every third channel.",
        (r"interleav|order|chunk|split|stride",),
    ),
    Bug("key_value_swapped", "Key and value are swapped.", (r"swap|order|chunk",)),
    Bug("attention_bf16", "q, k and v are rounded to bfloat16.", (r"bf16|bfloat|precision|cast",)),
    Bug("attention_unscaled", "Scores are not scaled.", (r"scale|sqrt|root",)),
    Bug(
        "attention_grid_transposed",
        "Tokens become a transposed grid.",
        (r"transpos|permut|order|resh",),
    ),
    Bug("attention_residual", "Attention has no residual.", (r"residual|skip|added|missing",)),
    Bug(
        "attention_skipped",
        "The decoder's attention is skipped.",
        (r"skip|missing|not (run|called)",),
    ),
    Bug(
        "down_padding_before",
        "Downsampling pads left and top.",
        (r"pad|asymm|offset|shift|left|top",),
    ),
    Bug("down_padding_edge", "Downsampling pads with the edge.", (r"pad|edge|border",)),
    Bug("down_cache_zero", "Zeros precede the second chunk.", (CACHE, r"zero|pad")),
    Bug("up_first_frame_doubled", "The first frame is doubled in time.", (CACHE, r"shape|length")),
    Bug("up_cache_has_first_frame", "The first frame is cached for time.", (CACHE,)),
    Bug(
        "up_channels_interleaved",
        "Frame pairs are every second channel.",
        (r"interleav|order|chunk|resh",),
    ),
    Bug("up_frames_swapped", "The two new frames are swapped.", (r"swap|order|revers|frame",)),
    Bug("upsample_bilinear", "Upsampling is bilinear.", (r"bilinear|nearest|upsampl|interpol",)),
    Bug(
        "upsample_tiled",
        "Upsampling tiles the picture.",
        (r"tile|repeat|nearest|upsampl|interpol",),
    ),
    Bug(
        "block_skipped",
        "A block of the decoder is skipped.",
        (r"skip|missing|not (run|called)",),
    ),
    Bug(
        "mode_is_logvar",
        "The second half is taken as the mean.",
        (r"half|halves|logvar|chunk|order|swap",),
    ),
    Bug("scale_times_std", "Latents are multiplied by std.", (r"std|scale|multipl|divid|factor",)),
    Bug(
        "scale_before_shift", "Latents are divided before the shift.", (r"shift|mean|order|offset",)
    ),
    Bug("mean_ignored", "The mean is not subtracted.", (r"shift|mean|offset|subtract",)),
    Bug(
        "unscale_order",
        "Statistics are in another channel order.",
        (r"order|std|mean|scale|channel",),
    ),
    Bug(
        "post_quant_skipped",
        "The 1x1 convolution is skipped.",
        (r"skip|missing|not (run|called)",),
    ),
    Bug("not_clamped", "The video is not clamped.", (r"clamp|clip",)),
    Bug("clamped_to_zero", "The video is clamped to 0 … 1.", (r"clamp|clip|range",)),
)
