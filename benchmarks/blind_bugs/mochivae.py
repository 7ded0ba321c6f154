"""Mochi's video decoder in MLX: channels last, so tensors are (1, frames, rows, columns, channels).

From normalised latents to pixels between 0 and 1. Kernels are (out, t, y, x, in), matrices
(in, out).
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import torch
from diffusers import AutoencoderKLMochi

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
from lydite.trace import taps
from lydite.trace.torch_capture import record_modules

NAME = "mochivae"
WIDTHS, LATENT, GROUPS = (64, 64, 32), 12, 32  # of the middle, and after each growth
TIMES, SPACE, FRAMES, ROWS, COLUMNS = (3, 2), 2, 2, 2, 3
SCALING, LATE = 1.15, 5  # LATE frames are cut off


def reference(folder: Path, dtype: str) -> None:
    """What the pipeline does with latents: denormalise, decode, scale to 0 … 1."""
    config: dict[str, Any] = dict(encoder_block_out_channels=(32, 32, 32))
    config |= dict(decoder_block_out_channels=WIDTHS[::-1], layers_per_block=(1, 1, 1, 2))
    config |= dict(temporal_expansions=TIMES[::-1], spatial_expansions=(SPACE, SPACE))
    config |= dict(add_attention_block=(False,) * 4, scaling_factor=SCALING)
    vae = saved(randomised(lambda: AutoencoderKLMochi(**config), 41), folder, "vae", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, vae, scope="vae", weights=True),
    ):
        latents = noise(4, 1, LATENT, FRAMES, ROWS, COLUMNS).to(vae.dtype)
        recorder.record("pipeline/latents", latents, kind="input")
        mean, std = (
            torch.tensor(x).view(1, LATENT, 1, 1, 1).to(vae.dtype)
            for x in (vae.config.latents_mean, vae.config.latents_std)
        )
        latents = latents * std / SCALING + mean
        recorder.record("pipeline/denormalised", latents)
        frames = vae.decode(latents).sample
        recorder.record("pipeline/frames", frames)
        video = (frames / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)
        recorder.record("pipeline/video", video)


def statistics(folder: Path) -> tuple[Array, Array]:
    """The latents' mean and deviation that the checkpoint's configuration has."""
    config = json.loads((folder / "model" / "vae" / "config.json").read_text())
    mean, deviation = (np.array(config[f"latents_{x}"], np.float32) for x in ("mean", "std"))
    return mean, deviation


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """The decoder's parameters under this port's names and in its layouts."""
    new: dict[str, Array] = {}

    def conv(name: str, old: str) -> None:
        axes = (0, 2, 3, 4, 1)
        if bug == "kernel_rows_columns_swapped" and name == "grow.1.0.second":
            axes = (0, 2, 4, 3, 1)
        new[f"{name}.kernel"] = w[f"{old}.weight"].transpose(axes).copy()
        new[f"{name}.bias"] = w[f"{old}.bias"]

    def dense(name: str, old: str) -> None:
        new[f"{name}.matrix"] = w[f"{old}.weight"].T.copy()
        new[f"{name}.bias"] = w[f"{old}.bias"]

    def unit(name: str, old: str) -> None:
        for own, i in (("first", 1), ("second", 2)):
            swapped = bug == "unit_norms_swapped" and name == "grow.0.0"
            conv(f"{name}.{own}", f"{old}.conv{i}.conv")
            norm = f"{old}.norm{3 - i if swapped else i}.norm_layer"
            new[f"{name}.{own}_even.gain"] = w[f"{norm}.weight"]
            new[f"{name}.{own}_even.shift"] = w[f"{norm}.bias"]

    conv("open", "decoder.conv_in")
    unit("middle.0", "decoder.block_in.resnets.0")
    again = "0" if bug == "middle_loaded_twice" else "1"
    unit("middle.1", f"decoder.block_in.resnets.{again}")
    for i in range(2):
        unit(f"grow.{i}.0", f"decoder.up_blocks.{i}.resnets.0")
        dense(f"grow.{i}.spread", f"decoder.up_blocks.{i}.proj")
    unit("close.0", "decoder.block_out.resnets.0")
    dense("colour", "decoder.proj_out")
    if bug == "second_bias_not_loaded":
        new["middle.0.second.bias"] = np.zeros_like(new["middle.0.second.bias"])
    return new


class Net:
    """The forward pass; `d` is the precision of every value, sums are in float32."""

    def __init__(
        self, p: dict[str, Array], latents: tuple[Array, Array], bug: str | None, dtype: str
    ) -> None:
        self.bug, self.d = bug, getattr(mx, dtype)
        self.mean, self.std = (mx.array(x).astype(self.d) for x in latents)
        self.p = {k: mx.array(v).astype(self.d) for k, v in p.items()}

    def tap(self, name: str, x: mx.array, kind: str = "activation") -> mx.array:
        return taps.tap(name, x, kind=kind)

    def padded(self, name: str, x: mx.array) -> mx.array:
        """Room for a kernel of 3: two frames before, a row and a column on each side."""
        bug, late = self.bug, 0
        if bug == "time_padded_on_both_sides":
            late = 1
        if bug == "time_padded_behind" and name == "close.0.first":
            late = 2
        time, space = [(0, 0), (2 - late, late), (0, 0), (0, 0), (0, 0)], [(0, 0)] * 5
        space[2] = space[3] = (1, 1)
        x = mx.pad(x, time, mode="edge")
        return mx.pad(x, space, mode="constant" if bug == "space_padded_with_zeros" else "edge")

    def conv(self, name: str, x: mx.array) -> mx.array:
        kernel, bias = self.p[f"{name}.kernel"], self.p[f"{name}.bias"]
        pieces = [x]
        if self.bug == "pieces_without_memory" and name.startswith("grow.1"):
            pieces = mx.split(x, 2, 1)  # pieces of frames, each padded by its own first one
        if kernel.shape[1] > 1:
            pieces = [self.padded(name, piece) for piece in pieces]
        ys = [mx.conv_general(y.astype(mx.float32), kernel.astype(mx.float32)) for y in pieces]
        return self.tap(name, (mx.concatenate(ys, 1) + bias.astype(mx.float32)).astype(self.d))

    def dense(self, name: str, x: mx.array) -> mx.array:
        y = x.astype(mx.float32) @ self.p[f"{name}.matrix"].astype(mx.float32)
        return self.tap(name, (y + self.p[f"{name}.bias"].astype(mx.float32)).astype(self.d))

    def even(self, name: str, x: mx.array) -> mx.array:
        """GroupNorm of each frame by itself."""
        bug, (_, t, h, w, c) = self.bug, x.shape
        groups = 16 if bug == "groups_of_sixteen" and c == 64 else GROUPS
        y = x.reshape(t, h * w, groups, c // groups).astype(mx.float32)
        axes: tuple[int, ...] = (1, 3)
        if bug == "norm_over_all_frames":
            axes = (0, 1, 3)
        if bug == "norm_groups_interleaved":
            y, axes = x.reshape(t, h * w, c // groups, groups).astype(mx.float32), (1, 2)
        if bug == "norm_f16" and name == "grow.0.0.second_even":
            y = y.astype(mx.float16)
        eps = 1e-6 if bug == "norm_eps" else 1e-5
        y = y - y.mean(axes, keepdims=True)
        variance = (y * y).mean(axes, keepdims=True)
        y = (y * mx.rsqrt(variance + eps)).astype(mx.float32).reshape(x.shape)
        if bug == "norm_without_gain" and name == "close.0.first_even":
            return self.tap(name, y.astype(self.d))
        y = y * self.p[f"{name}.gain"].astype(mx.float32)
        return self.tap(name, (y + self.p[f"{name}.shift"].astype(mx.float32)).astype(self.d))

    def bent(self, x: mx.array, last: bool = False) -> mx.array:
        y = x.astype(mx.float32)
        if self.bug == "relu_at_end" and last:
            return mx.maximum(x, 0)
        return (y * mx.sigmoid(y)).astype(self.d)

    def unit(self, name: str, x: mx.array) -> mx.array:
        bug, start = self.bug, x
        for part in ("first", "second"):
            if bug == "activation_before_norm" and name == "grow.1.0" and part == "second":
                y = self.even(f"{name}.{part}_even", self.bent(x))
            else:
                y = self.even(f"{name}.{part}_even", x)
                if not (bug == "activation_missing" and name == "middle.0" and part == "second"):
                    y = self.bent(y)
            x = self.conv(f"{name}.{part}", y)
        if bug == "residual_missing" and name == "close.0":
            return self.tap(name, x)
        return self.tap(name, x + start)

    def unfolded(self, i: int, x: mx.array) -> mx.array:
        """Channels to time and space."""
        bug, st, (_, t, h, w, c) = self.bug, TIMES[i], x.shape
        c = c // (st * SPACE * SPACE)
        if bug == "unfolded_channels_last":
            x = x.reshape(t, h, w, st, SPACE, SPACE, c).transpose(0, 3, 1, 4, 2, 5, 6)
        elif bug == "unfolded_columns_first":
            x = x.reshape(t, h, w, c, st, SPACE, SPACE).transpose(0, 4, 1, 6, 2, 5, 3)
        else:
            x = x.reshape(t, h, w, c, st, SPACE, SPACE).transpose(0, 4, 1, 5, 2, 6, 3)
        return self.tap(f"grow.{i}", x.reshape(1, t * st, h * SPACE, w * SPACE, c))

    def denormalised(self, z: mx.array) -> mx.array:
        bug, mean, std = self.bug, self.mean, self.std
        if bug == "latents_normalised_again":
            z = (z - mean) * SCALING / std
        elif bug == "latents_mean_missing":
            z = z * std / SCALING
        elif bug == "scaling_ignored":
            z = z * std + mean
        else:
            z = z * std / SCALING + mean
        return self.tap("latents.real", z)

    def __call__(self, z: mx.array) -> None:
        bug = self.bug
        x = self.conv("open", self.denormalised(z))
        for i in range(2):
            x = self.unit(f"middle.{i}", x)
        for i in range(2):
            x = self.unit(f"grow.{i}.0", x)
            x = self.unfolded(i, self.dense(f"grow.{i}.spread", x))
        x = self.unit("close.0", x)
        x = x if bug == "last_activation_missing" else self.tap("close.bent", self.bent(x, True))
        x = self.dense("colour", x)
        x = self.tap("frames", x[:, :-LATE] if bug == "last_frames_dropped" else x[:, LATE:])
        x = x if bug == "pixels_not_shifted" else x / 2 + 0.5
        self.tap("video", x if bug == "pixels_not_clipped" else mx.clip(x, 0, 1))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    p = converted(checkpoint(folder, "vae"), bug)
    z = np.moveaxis(given(folder)("pipeline/latents"), 1, -1)
    if bug == "latents_mirrored":
        z = z[:, :, :, ::-1].copy()
    kept = p if weights else None
    if kept and dtype != "float32":
        narrow = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
        kept = {k: v.astype(narrow) for k, v in kept.items()}
    blocks = ("latents*", "open", "middle.?", "grow.?", "close.?", "colour", "frames", "video")
    with mx.stream(mx.cpu), port_trace(out, dump, dtype, blocks, kept):
        net = Net(p, statistics(folder), bug, dtype)
        net(net.tap("latents", mx.array(z).astype(net.d), kind="input"))


NO_COUNTERPART = ()

NORM = r"(?<![\w./])(group ?|layer ?)?norm"  # the word, not a part of a module's name
UNFOLD = (
    r"permut|transpos|layout|reshape|order|axes|axis|shuffle|unpatch|depth.?to.?space|interleav"
)
LATENTS = r"\bmean\b|\bstd|deviation|denormali|scaling|latents? (statistics|mean|scale)"
BUGS = (
    Bug("latents_normalised_again", "Latents are normalised, not denormalised.", (LATENTS,)),
    Bug("latents_mean_missing", "The latents' mean is not added.", (LATENTS + r"|offset|shift",)),
    Bug("scaling_ignored", "The scaling factor is ignored.", (r"scal|factor|1\.15|0\.869",)),
    Bug(
        "latents_mirrored",
        "The latents' columns are in reverse.",
        (r"mirror|flip|revers|order|column|\binput",),
        "inputs",
    ),
    Bug(
        "kernel_rows_columns_swapped",
        "A kernel's rows and columns are swapped.",
        (r"transpos|permut|swap|layout|axes|load|weight",),
        "weights",
    ),
    Bug("unit_norms_swapped", "A unit's norms are swapped.", (r"load|weight|swap",), "weights"),
    Bug(
        "middle_loaded_twice",
        "The second unit has the first's weights.",
        (r"load|weight",),
        "weights",
    ),
    Bug("second_bias_not_loaded", "A convolution has no bias.", (r"bias|load|zero",), "weights"),
    Bug("time_padded_on_both_sides", "Time is padded on both sides.", (r"\bpad|causal",)),
    Bug("time_padded_behind", "One convolution pads time behind.", (r"\bpad|causal",)),
    Bug("space_padded_with_zeros", "Rows and columns are padded with zeros.", (r"\bpad",)),
    Bug(
        "pieces_without_memory",
        "The last growth convolves two pieces of frames, each by itself.",
        (r"chunk|piece|cache|tile|frames|temporal|\btime\b|\bpad|causal",),
    ),
    Bug(
        "groups_of_sixteen",
        "Wide norms have 16 groups.",
        (r"\bgroups\b|\b16\b|\b32\b|number of group",),
    ),
    Bug(
        "norm_over_all_frames",
        "Norms are over all frames.",
        (r"frame|\btime\b|temporal|axes|axis",),
    ),
    Bug(
        "norm_groups_interleaved",
        "A group's channels are 32 apart.",
        (
            r"groups?\b.*(interleav|layout|order|channel|stride)|interleav|stride|apart|every|layout",
        ),
    ),
    Bug("norm_eps", "Norms have eps 1e-6, not 1e-5.", (r"\beps",)),
    Bug("norm_f16", "One norm is in float16.", (r"f16|float16|\bhalf\b|precision",)),
    Bug("norm_without_gain", "A norm has no gain and shift.", (r"gain|affine|weight|bias|scale",)),
    Bug("relu_at_end", "The last activation is ReLU.", (r"relu|silu|swish|activation",)),
    Bug(
        "activation_before_norm",
        "A unit's second activation precedes the norm.",
        (r"order|silu|swish|activation",),
    ),
    Bug(
        "activation_missing",
        "A unit's second activation is missing.",
        (r"silu|swish|activation",),
    ),
    Bug("residual_missing", "The last unit has no residual.", (r"residual|skip|added|missing",)),
    Bug("unfolded_channels_last", "Channels are split as (t, y, x, c).", (UNFOLD,)),
    Bug(
        "unfolded_columns_first", "Channels are split as (c, t, x, y).", (UNFOLD + r"|swap|column",)
    ),
    Bug("last_activation_missing", "The last activation is missing.", (r"silu|swish|activation",)),
    Bug(
        "last_frames_dropped",
        "The last frames are dropped, not the first.",
        (r"frame|crop|slice|drop|offset|shift|roll",),
    ),
    Bug(
        "pixels_not_shifted",
        "Pixels are clipped, not scaled from -1 … 1.",
        (r"scal|shift|0\.5|range|offset|factor|half|\+ ?1",),
    ),
    Bug("pixels_not_clipped", "Pixels are not clipped.", (r"clip|clamp|range|bound",)),
)
