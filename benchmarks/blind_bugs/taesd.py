"""TAESD (AutoencoderTiny), encoder and decoder, in NumPy: channels last, kernels as (h, w, i, o).

The port is given a picture as bytes and does what a pipeline does: it resizes and normalizes,
encodes, keeps the latents in [0, 1] and back, scales them for a diffusion model and back, decodes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny

from blind_bugs.planting import (
    Array,
    Bug,
    checkpoint,
    given,
    port_trace,
    randomised,
    reference_trace,
    rounder,
    saved,
)
from lydite.trace import taps
from lydite.trace.torch_capture import record_modules

NAME = "taesd"
CHANNELS, LATENT, MAGNITUDE, OFFSET, SCALING, SHIFT = 16, 4, 3, 0.5, 0.72, 0.11
ENCODER, DECODER = (1, 2, 1), (1, 2, 1)  # blocks of each stage
GIVEN, SIZE = (17, 26), (24, 32)  # rows and columns


def made() -> AutoencoderTiny:
    """The model, with weights that keep values of the size that trained ones give."""
    width = (CHANNELS,) * 3
    config: dict[str, Any] = dict(encoder_block_out_channels=width, latent_channels=LATENT)
    config |= dict(decoder_block_out_channels=width, scaling_factor=SCALING, shift_factor=SHIFT)
    config |= dict(latent_magnitude=MAGNITUDE, latent_shift=OFFSET)
    model = AutoencoderTiny(**config, num_encoder_blocks=ENCODER, num_decoder_blocks=DECODER)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 4:
            parameter.data.mul_(2 if name.startswith("encoder") else 1.2)
    first: Any = model.encoder.layers[-1]
    last: Any = model.decoder.layers[-1]
    first.weight.data.mul_(14)
    last.weight.data.mul_(0.12)
    last.bias.data.add_(0.5)
    return model


def reference(folder: Path, dtype: str) -> None:
    """A picture to latents and back."""
    vae = saved(randomised(made, 41), folder, "vae", dtype)
    methods = ("encode", "scale_latents", "unscale_latents", "decode")
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, vae, scope="vae", methods=methods, weights=True),
    ):
        coarse = torch.rand(1, 3, 6, 8, generator=torch.Generator().manual_seed(8))
        image = F.interpolate(coarse, GIVEN, mode="bicubic").clamp(0, 1).mul(255).round()
        image = image.permute(0, 2, 3, 1).to(torch.uint8)
        recorder.record("pipeline/image", image, kind="input")
        x = F.interpolate(image.permute(0, 3, 1, 2).float(), SIZE, mode="bilinear")
        x = recorder.record("pipeline/pixels", x / 127.5 - 1, kind="input")
        x = vae.encode(x.to(vae.dtype)).latents
        x = vae.unscale_latents(vae.scale_latents(x))
        x = recorder.record("pipeline/latents", (x - SHIFT) * SCALING)
        x = recorder.record("pipeline/to_decode", x / SCALING + SHIFT)
        x = vae.decode(x).sample
        recorder.record("pipeline/decoded_image", (x / 2 + 0.5).clamp(0, 1))


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port; the reference counts all layers of a coder, this port stages."""
    new: dict[str, Array] = {}

    def conv(name: str, old: str) -> None:
        new[f"{name}.k"] = w[f"{old}.weight"].transpose(2, 3, 1, 0).copy()
        if f"{old}.bias" in w:
            new[f"{name}.b"] = w[f"{old}.bias"]

    def block(name: str, old: str) -> None:
        for j, layer in enumerate((0, 2, 4), 1):
            conv(f"{name}.c{j}", f"{old}.conv.{layer}")

    at = 0
    for i, blocks in enumerate(ENCODER):
        conv(f"enc.s{i}.conv", f"encoder.layers.{at}")
        for j in range(blocks):
            block(f"enc.s{i}.b{j}", f"encoder.layers.{at + 1 + j}")
        at += 1 + blocks
    conv("enc.out", f"encoder.layers.{at}")
    conv("dec.in", "decoder.layers.0")
    at = 2
    for i, blocks in enumerate(DECODER):
        for j in range(blocks):
            same = bug == "block_loaded_twice" and (i, j) == (1, 1)
            block(f"dec.s{i}.b{j}", f"decoder.layers.{at + j - same}")
        last = i == len(DECODER) - 1
        at += blocks + (not last)
        conv("dec.out" if last else f"dec.s{i}.conv", f"decoder.layers.{at}")
        at += 1
    if bug == "kernel_rotated":  # as for a convolution that is no correlation
        new["dec.s0.conv.k"] = new["dec.s0.conv.k"][::-1, ::-1].copy()
    if bug == "kernel_inputs_outputs_swapped":
        new["enc.s1.b0.c2.k"] = new["enc.s1.b0.c2.k"].swapaxes(2, 3).copy()
    if bug == "bias_missing":
        new["enc.out.b"] = np.zeros_like(new["enc.out.b"])
    return new


def resized(x: Array, rows: int, columns: int, corners: bool = False) -> Array:
    """A picture (rows, columns, channels), linearly."""
    for axis, new in enumerate((rows, columns)):
        old = x.shape[axis]
        at = (np.arange(new) + 0.5) * old / new - 0.5
        if corners:
            at = np.arange(new) * (old - 1) / (new - 1)
        at = np.clip(at, 0, old - 1)
        low = np.floor(at).astype(int)
        part = (at - low).astype(np.float32)
        part = part[:, None, None] if axis == 0 else part[None, :, None]
        high = np.minimum(low + 1, old - 1)
        x = np.take(x, low, axis) * (1 - part) + np.take(x, high, axis) * part
    return x


class Net:
    """The forward pass of one picture; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.q(v) for k, v in p.items()}

    def tap(self, name: str, x: Array) -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype))
        return x

    def conv(self, name: str, x: Array, stride: int = 1) -> Array:
        around = ((1, 1), (1, 1), (0, 0))
        if self.bug == "stride_padded_at_end" and stride == 2:
            around = ((0, 1), (0, 1), (0, 0))
        edge = self.bug == "padding_of_edge" and name == "dec.s1.conv"
        x = np.pad(x, around, mode="edge" if edge else "constant")
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (0, 1))[::stride, ::stride]
        y = np.einsum("yxcij,ijco->yxo", windows, self.p[f"{name}.k"], optimize=True)
        return self.tap(name, self.q(y + self.p.get(f"{name}.b", np.float32(0))))

    def act(self, x: Array, name: str = "") -> Array:
        if self.bug == "leaky_relu" and name.startswith("dec"):
            return self.q(np.where(x > 0, x, np.float32(0.01) * x))
        return np.maximum(x, 0)

    def block(self, b: str, x: Array) -> Array:
        bug = self.bug
        y = self.tap(f"{b}.r1", self.act(self.conv(f"{b}.c1", x), b))
        y = self.tap(f"{b}.r2", self.act(self.conv(f"{b}.c2", y), b))
        y = self.conv(f"{b}.c3", y)
        if bug == "residual_missing" and b == "enc.s2.b0":
            return self.tap(b, self.act(y))
        if bug == "relu_before_sum" and b == "dec.s0.b0":
            return self.tap(b, self.q(self.act(y) + x))
        return self.tap(b, self.act(self.q(y + x)))

    def encode(self, x: Array) -> Array:
        bug = self.bug
        if bug != "pixels_not_moved_to_zero":
            x = self.q(self.q(x + 1) / 2)
        for i, blocks in enumerate(ENCODER):
            x = self.conv(f"enc.s{i}.conv", x, 2 if i else 1)
            if bug == "relu_after_first" and i == 0:
                x = self.act(x)
            for j in range(blocks):
                x = self.block(f"enc.s{i}.b{j}", x)
        return self.conv("enc.out", x)

    def kept(self, x: Array) -> Array:
        """Latents to [0, 1] and back."""
        bug = self.bug
        wide = np.float32(MAGNITUDE if bug == "magnitude_not_doubled" else 2 * MAGNITUDE)
        x = self.q(self.q(x / wide) + np.float32(OFFSET))
        x = self.tap("lat.unit", x if bug == "unit_clip_missing" else np.clip(x, 0, 1))
        if bug == "latents_as_bytes":
            x = self.q(np.round(x * 255) / np.float32(255))
        if bug == "unscaled_before_shift":
            return self.tap("lat.raw", self.q(self.q(x * 2 * MAGNITUDE) - np.float32(OFFSET)))
        return self.tap("lat.raw", self.q(self.q(x - np.float32(OFFSET)) * 2 * MAGNITUDE))

    def larger(self, x: Array) -> Array:
        bug = self.bug
        if bug == "upsampled_linearly":
            return self.q(resized(x, 2 * x.shape[0], 2 * x.shape[1]))
        if bug == "upsampled_by_tiles":
            return np.tile(x, (2, 2, 1))
        return x.repeat(2, 0).repeat(2, 1)

    def decode(self, x: Array) -> Array:
        bug = self.bug
        if bug == "tanh_not_widened":
            x = self.q(self.q(np.tanh(x)) * 3)
        elif bug != "tanh_missing":
            x = self.q(self.q(np.tanh(self.q(x / 3))) * 3)
        x = self.conv("dec.in", self.tap("dec.soft", x))
        x = x if bug == "first_relu_missing" else self.act(x)
        for i, blocks in enumerate(DECODER):
            for j in range(blocks):
                if not (bug == "block_skipped" and (i, j) == (1, 1)):
                    x = self.block(f"dec.s{i}.b{j}", x)
            if bug == "stage_f16" and i == 1:
                x = x.astype(np.float16).astype(np.float32)
            if i == len(DECODER) - 1:
                break
            if bug == "upsampled_after_conv" and i == 0:
                x = self.tap(f"dec.s{i}.up", self.larger(self.conv(f"dec.s{i}.conv", x)))
            else:
                x = self.conv(f"dec.s{i}.conv", self.tap(f"dec.s{i}.up", self.larger(x)))
        x = self.conv("dec.out", x)
        return self.tap("dec", x if bug == "output_from_zero" else self.q(self.q(x * 2) - 1))

    def __call__(self, pixels: Array) -> None:
        bug = self.bug
        x = self.kept(self.encode(self.q(pixels)))
        scaling, shift = np.float32(SCALING), np.float32(SHIFT)
        x = self.tap("lat.scaled", self.q(self.q(x - shift) * scaling))
        if bug == "scaled_twice":
            x = self.q(self.q(x * scaling) + shift)
        elif bug == "shift_before_scaling":
            x = self.q(self.q(x + shift) / scaling)
        else:
            x = self.q(self.q(x / scaling) + shift)
        x = self.q(self.q(self.decode(self.tap("lat.back", x)) / 2) + np.float32(0.5))
        self.tap("picture", x if bug == "picture_not_clipped" else np.clip(x, 0, 1))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    image = given(folder)("pipeline/image")[0]
    net = Net(converted(checkpoint(folder, "vae"), bug), bug, dtype)
    pixels = resized(image.astype(np.float32), *SIZE, corners=bug == "resized_to_corners")
    pixels = pixels / np.float32(255 if bug == "pixels_from_zero" else 127.5)
    pixels = pixels if bug == "pixels_from_zero" else pixels - 1
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("in.*", "enc.s?.b?", "enc.out", "lat.*", "dec.s?.b?", "dec", "picture")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("in.image", image, kind="input")
        taps.tap("in.pixels", pixels, kind="input")
        net(pixels)


NO_COUNTERPART: tuple[str, ...] = ()

POSITION = r"half.pixel|corner|cent(er|re)s?\b|offset|grid|sampl|align|resiz|interpolat"
BUGS = (
    Bug("resized_to_corners", "Corners are aligned in resizing.", (POSITION,), "inputs"),
    Bug(
        "pixels_from_zero",
        "Pixels are from 0 to 1.",
        (r"range|normali[sz]|scal(e|ed|ing)|shift|0 to 1|\[0, ?1\]|\* ?2|factor|offset",),
        "inputs",
    ),
    Bug(
        "kernel_rotated",
        "A kernel of the decoder is turned by 180 degrees.",
        (r"flip|rotat|revers|load|weight|transpos|kernel",),
        "weights",
    ),
    Bug(
        "kernel_inputs_outputs_swapped",
        "A kernel has inputs and outputs swapped.",
        (r"transpos|swap|layout|load|weight|kernel|\bax[ei]s\b",),
        "weights",
    ),
    Bug(
        "block_loaded_twice",
        "A block of the decoder has the weights of the one before.",
        (r"load|weight|dupl|twice",),
        "weights",
    ),
    Bug("bias_missing", "The encoder's last bias is zero.", (r"bias|zero|load",), "weights"),
    Bug(
        "pixels_not_moved_to_zero",
        "The encoder does not move its pixels to [0, 1].",
        (
            r"range|scal(e|ed|ing)|shift|normali[sz]|0 to 1|\[0, ?1\]|\[-1, ?1\]|offset",
            r"x ?\+ ?1|\+ ?1\b|/ ?2\b|\* ?0\.5|half|affine|0\.5",
        ),
    ),
    Bug(
        "stride_padded_at_end",
        "Convolutions with stride pad at the end only.",
        (r"padd|asymmetr|offset|shift|one pixel",),
    ),
    Bug(
        "padding_of_edge",
        "A convolution of the decoder pads with the edge.",
        (r"padd|edge|replicat|border|\brim\b",),
    ),
    Bug(
        "relu_after_first",
        "The encoder's first convolution has a ReLU.",
        (r"relu|activation|clipped at 0|negative|max\(0",),
    ),
    Bug("leaky_relu", "The decoder's blocks have leaky ReLU.", (r"leaky|relu|slope|negative",)),
    Bug(
        "residual_missing",
        "A block of the encoder has no skip.",
        (r"residual|skip|\badd(ed|ition|s)?\b|shortcut|\bsum",),
    ),
    Bug(
        "relu_before_sum",
        "A block of the decoder has the last ReLU before its sum.",
        (r"relu|activation|order",),
    ),
    Bug(
        "magnitude_not_doubled",
        "Latents are divided by the magnitude, not by twice of it.",
        (r"factor|scal(e|ed|ing)|times|magnitude|\* ?2|/ ?[36]|twice|doubl|multipl|divid",),
    ),
    Bug("unit_clip_missing", "Latents are not clipped to [0, 1].", (r"cl(i|a)m?p|range|limit",)),
    Bug(
        "unscaled_before_shift",
        "Latents are multiplied before 0.5 is subtracted.",
        (r"order|offset|shift|subtract|constant|add(ed|s|ition)|bias",),
    ),
    Bug(
        "latents_as_bytes",
        "Latents are rounded to bytes.",
        (r"byte|uint8|8.bit|quanti|round|precision|1/255|\b25[56]\b",),
    ),
    Bug(
        "scaled_twice",
        "Latents are multiplied by the scaling factor again, not divided.",
        (r"scal(e|ed|ing)|factor|divid|multipl|inverse|times",),
    ),
    Bug(
        "shift_before_scaling",
        "The shift is added before the division.",
        (r"order|shift|offset|scal(e|ed|ing)|add(ed|s|ition)|constant",),
    ),
    Bug("tanh_missing", "The decoder does not clamp by tanh.", (r"tanh|clamp|squash|soft",)),
    Bug(
        "tanh_not_widened",
        "The decoder's tanh has no division by 3.",
        (r"tanh|/ ?3|divid|scal(e|ed|ing)|factor|clamp",),
    ),
    Bug(
        "first_relu_missing",
        "The decoder's first ReLU is missing.",
        (r"relu|activation|negative|max\(0",),
    ),
    Bug(
        "upsampled_linearly",
        "Values are enlarged linearly.",
        (r"linear|nearest|interpolat|upsampl|mode",),
    ),
    Bug(
        "upsampled_by_tiles",
        "Values are enlarged by tiling.",
        (r"til(e|ing)|repeat|nearest|upsampl|order|interleav",),
    ),
    Bug(
        "upsampled_after_conv",
        "The first stage of the decoder enlarges after its convolution.",
        (r"upsampl|order|nearest|enlarg|resiz|resolution|repeat|swap",),
    ),
    Bug(
        "block_skipped",
        "A block of the decoder is skipped.",
        (r"skip|missing|not (run|called|applied)|(dec\.s1\.b0|layers\.5)\b(?!\.)|fewer|too few",),
    ),
    Bug("stage_f16", "A stage of the decoder is float16.", (r"f16|float16|half|precision",)),
    Bug(
        "output_from_zero",
        "The decoder's result stays in [0, 1].",
        (
            r"range|scal(e|ed|ing)|shift|normali[sz]|0 to 1|\[0, ?1\]|\[-1, ?1\]|offset",
            r"\* ?2|- ?1\b|factor|affine|twice|doubl",
        ),
    ),
    Bug("picture_not_clipped", "The picture is not clipped.", (r"cl(i|a)m?p|range|limit",)),
)
