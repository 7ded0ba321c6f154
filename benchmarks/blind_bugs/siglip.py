"""SigLIP's image encoder with its pooling head in MLX: pixels channels last, q, k and v fused.

The port is given two pictures as bytes, of another size than the model was made for: it normalizes
them and resizes the table of positions.
"""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from transformers import SiglipVisionConfig, SiglipVisionModel

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
from lydite.trace import taps
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "siglip"
WIDTH, HIDDEN, LAYERS, HEADS, PATCH, SIDE = 48, 64, 3, 4, 8, 4
HEAD, PICTURES, ROWS, COLUMNS = WIDTH // HEADS, 2, 3, 5
N, EPS = ROWS * COLUMNS, 1e-6
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def reference(folder: Path, dtype: str) -> None:
    """One call with pixels from -1 to 1."""
    config: dict[str, Any] = dict(hidden_size=WIDTH, intermediate_size=HIDDEN, patch_size=PATCH)
    config |= dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, image_size=SIDE * PATCH)
    model = randomised(lambda: SiglipVisionModel(SiglipVisionConfig(**config)), 31)
    model = saved(model, folder, "image_encoder", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="image_encoder", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
        watch_function(recorder, F, "interpolate"),
    ):
        generator = torch.Generator().manual_seed(6)
        shape = (PICTURES, ROWS * PATCH, COLUMNS * PATCH, 3)
        image = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        pixels = (image.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        recorder.record("pipeline/image", image, kind="input")
        recorder.record("pipeline/pixel_values", pixels, kind="input")
        out = model(pixels.to(model.dtype), interpolate_pos_encoding=True)
        recorder.record("pipeline/image_embeds", out.pooler_output)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: linear weights as (in, out), the patches' kernel as (o, h, w, i)."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        new[f"{name}.w"] = np.concatenate([w[f"{p}.weight"] for p in parts]).T.copy()
        new[f"{name}.b"] = np.concatenate([w[f"{p}.bias"] for p in parts])

    def norm(name: str, old: str) -> None:
        new[f"{name}.g"], new[f"{name}.b"] = w[f"{old}.weight"], w[f"{old}.bias"]

    kernel = w["embeddings.patch_embedding.weight"]
    if bug == "kernel_reshaped":
        new["stem.conv.w"] = kernel.reshape(WIDTH, PATCH, PATCH, 3)
    else:
        axes = (0, 3, 2, 1) if bug == "kernel_sides_swapped" else (0, 2, 3, 1)
        new["stem.conv.w"] = kernel.transpose(axes).copy()
    new["stem.conv.b"] = w["embeddings.patch_embedding.bias"]
    new["stem.pos.table"] = w["embeddings.position_embedding.weight"]
    for i in range(LAYERS):
        old, b = f"encoder.layers.{i}", f"enc.{i}"
        norm(f"{b}.ln_a", f"{old}.layer_norm1")
        norm(f"{b}.ln_b", f"{old}.layer_norm2")
        order = "kvq" if bug == "fused_in_checkpoint_order" else "qkv"
        put(f"{b}.qkv", *(f"{old}.self_attn.{x}_proj" for x in order))
        put(f"{b}.proj", f"{old}.self_attn.out_proj")
        put(f"{b}.fc1", f"{old}.mlp.fc1")
        put(f"{b}.fc2", f"{old}.mlp.fc2")
    norm("post", "post_layernorm")
    new["head.probe"] = w["head.probe"]
    joined, bias = w["head.attention.in_proj_weight"], w["head.attention.in_proj_bias"]
    if bug == "head_fused_by_heads":
        joined = joined.reshape(HEADS, 3, HEAD, WIDTH).swapaxes(0, 1).reshape(-1, WIDTH)
        bias = bias.reshape(HEADS, 3, HEAD).swapaxes(0, 1).ravel()
    for x, part, part_bias in zip("qkv", np.split(joined, 3), np.split(bias, 3), strict=True):
        new[f"head.{x}.w"], new[f"head.{x}.b"] = part.T.copy(), part_bias
    put("head.proj", "head.attention.out_proj")
    norm("head.ln", "head.layernorm")
    put("head.fc1", "head.mlp.fc1")
    put("head.fc2", "head.mlp.fc2")
    return new


def cubic(x: Array, a: float) -> Array:
    """Keys' kernel at distances x."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def resizing(old: int, new: int, bug: str | None) -> Array:
    """The matrix (new, old) that resizes one axis with cubic interpolation."""
    at = (np.arange(new) + 0.5) * old / new - 0.5
    if bug == "positions_align_corners":
        at = np.arange(new) * (old - 1) / (new - 1)
    matrix = np.zeros((new, old))
    wide = max(1.0, old / new) if bug == "positions_antialiased" else 1.0
    for i in range(new):
        taken = np.arange(math.floor(at[i]) - 3, math.floor(at[i]) + 5)
        if bug == "positions_bilinear":
            weight = np.maximum(0, 1 - np.abs(taken - at[i]))
        else:
            cube = -0.5 if bug in ("positions_antialiased", "positions_cubic_half") else -0.75
            weight = cubic((taken - at[i]) / wide, cube)
        if bug == "positions_antialiased":  # which leaves out what lies outside
            weight = np.where((taken >= 0) & (taken < old), weight, 0)
        np.add.at(matrix[i], np.clip(taken, 0, old - 1), weight / weight.sum())
    return matrix.astype(np.float32)


class Net:
    """The forward pass in the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.bug, self.dtype = bug, getattr(mx, dtype)
        self.p = {k: mx.array(v).astype(self.dtype) for k, v in p.items()}

    def linear(self, name: str, x: mx.array) -> mx.array:
        return taps.tap(name, mx.addmm(self.p[f"{name}.b"], x, self.p[f"{name}.w"]))

    def norm(self, name: str, x: mx.array) -> mx.array:
        eps = 1e-5 if self.bug == "norm_eps" else EPS
        y = mx.fast.layer_norm(x, self.p[f"{name}.g"], self.p[f"{name}.b"], eps)
        return taps.tap(name, y)

    def gelu(self, name: str, x: mx.array) -> mx.array:
        x, bug = x.astype(mx.float32), self.bug
        if bug == "gelu_erf" and name == "enc.1.act":
            y = 0.5 * x * (1 + mx.erf(x / 2**0.5))
        elif bug == "head_gelu_quick" and name == "head.act":
            y = x * mx.sigmoid(1.702 * x)
        else:
            y = 0.5 * x * (1 + mx.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x * x * x)))
        return taps.tap(name, y.astype(self.dtype))

    def mlp(self, b: str, x: mx.array) -> mx.array:
        return self.linear(f"{b}.fc2", self.gelu(f"{b}.act", self.linear(f"{b}.fc1", x)))

    def heads(self, b: str, x: mx.array) -> mx.array:
        if self.bug == "channels_before_heads" and b == "enc.0":
            return x.reshape(PICTURES, -1, HEAD, HEADS).transpose(0, 3, 1, 2)
        return x.reshape(PICTURES, -1, HEADS, HEAD).transpose(0, 2, 1, 3)

    def attention(self, b: str, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        bug = self.bug
        q, k, v = (self.heads(b, x) for x in (q, k, v))
        scale = HEAD**-0.5
        if bug == "scale_of_width" and b == "enc.1":
            scale = WIDTH**-0.5
        scores = (q.astype(mx.float32) * scale) @ k.astype(mx.float32).swapaxes(-1, -2)
        if bug == "causal_mask" and b != "head":
            later = mx.arange(N)[:, None] < mx.arange(N)
            scores = mx.where(later, -mx.inf, scores)
        wrong_axis = bug == "softmax_over_queries" and b == "enc.2"
        weights = mx.softmax(scores, axis=-2 if wrong_axis else -1)
        y = weights @ v.astype(mx.float32)
        y = y.transpose(0, 2, 1, 3).reshape(PICTURES, -1, WIDTH).astype(self.dtype)
        return self.linear(f"{b}.proj", taps.tap(f"{b}.att", y))

    def positions(self) -> mx.array:
        table, bug = self.p["stem.pos.table"], self.bug
        if bug == "positions_cropped":
            return taps.tap("stem.pos", table[:N])
        grid = table.astype(mx.float32).reshape(SIDE, SIDE, WIDTH)
        down, across = (mx.array(resizing(SIDE, n, bug)) for n in (ROWS, COLUMNS))
        grid = (down @ grid.reshape(SIDE, -1)).reshape(ROWS, SIDE, WIDTH)
        return taps.tap("stem.pos", (across @ grid).reshape(N, WIDTH).astype(self.dtype))

    def stem(self, pixels: mx.array) -> mx.array:
        x = mx.conv2d(pixels, self.p["stem.conv.w"], stride=PATCH) + self.p["stem.conv.b"]
        x = taps.tap("stem.conv", x)
        if self.bug == "patches_by_columns":
            x = x.swapaxes(1, 2)
        return taps.tap("stem", x.reshape(PICTURES, N, WIDTH) + self.positions())

    def block(self, b: str, x: mx.array) -> mx.array:
        y = self.norm(f"{b}.ln_a", x)
        y = self.attention(b, *mx.split(self.linear(f"{b}.qkv", y), 3, axis=-1))
        middle = taps.tap(f"{b}.mid", x + y)
        y = self.mlp(b, self.norm(f"{b}.ln_b", middle))
        if self.bug == "residual_of_input" and b == "enc.1":
            return taps.tap(b, x + y)
        return taps.tap(b, middle + y)

    def head(self, x: mx.array) -> mx.array:
        bug = self.bug
        probe = mx.broadcast_to(self.p["head.probe"], (PICTURES, 1, WIDTH))
        q, k, v = (self.linear(f"head.{n}", y) for n, y in (("q", probe), ("k", x), ("v", x)))
        y = self.attention("head", q, k, v)
        normed = self.norm("head.ln", y)
        first = normed if bug == "head_residual_of_norm" else y
        z = self.mlp("head", y if bug == "head_norm_missing" else normed)
        return (first + z)[:, 0]

    def __call__(self, pixels: mx.array) -> mx.array:
        bug = self.bug
        x = self.stem(pixels)
        for i in range(LAYERS):
            if not (bug == "layer_skipped" and i == LAYERS - 1):
                x = self.block(f"enc.{i}", x)
        normed = self.norm("post", x)
        pooled = self.head(x if bug == "head_before_norm" else normed)
        if bug == "pooled_to_unit_length":
            pooled = pooled / mx.sqrt((pooled * pooled).sum(-1, keepdims=True))
        return taps.tap("pooled", pooled)


def normalized(image: Array, bug: str | None) -> Array:
    """Pixels from -1 to 1 in float32."""
    x = image[..., ::-1] if bug == "pixels_bgr" else image
    x = x.astype(np.float32) / np.float32(256 if bug == "pixels_by_256" else 255)
    if bug == "pixels_from_zero":
        return x
    if bug == "pixels_mean_of_clip":
        return (x - np.array(CLIP_MEAN, np.float32)) / np.array(CLIP_STD, np.float32)
    x = (x - np.float32(0.5)) / np.float32(0.5)
    return x.astype(np.float16).astype(np.float32) if bug == "pixels_f16" else x


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    mx.set_default_device(mx.cpu)
    image = given(folder)("pipeline/image")
    net = Net(converted(checkpoint(folder, "image_encoder"), bug), bug, dtype)
    kept = None
    if weights:
        kept = {k: np.array(v.astype(mx.float32)) for k, v in net.p.items()}
        if dtype != "float32":
            kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("in.*", "stem", "enc.?", "post", "pooled")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("in.image", image, kind="input")
        pixels = taps.tap("in.pixels", mx.array(normalized(image, bug)), kind="input")
        net(pixels.astype(net.dtype))


NO_COUNTERPART = (r"^head\.[qkv]$", r"^head\.att$")  # inside of torch's attention

RESIZED = r"cubic|resiz|resampl|interpolat"
BUGS = (
    Bug("pixels_bgr", "Channels are blue, green, red.", (r"bgr|channel|revers|flip",), "inputs"),
    Bug(
        "pixels_by_256",
        "Pixels are divided by 256.",
        (r"25[56]|scal(e|ed|ing)|factor|normali[sz]",),
        "inputs",
    ),
    Bug(
        "pixels_from_zero",
        "Pixels are from 0 to 1.",
        (r"range|normali[sz]|scal(e|ed|ing)|shift|0 to 1|\[0, ?1\]|0\.5",),
        "inputs",
    ),
    Bug(
        "pixels_mean_of_clip",
        "Pixels have CLIP's mean and deviation.",
        (r"mean|std|deviation|normali[sz]|clip|channel",),
        "inputs",
    ),
    Bug("pixels_f16", "Pixels are float16.", (r"f16|float16|half|precision|round",), "inputs"),
    Bug(
        "kernel_sides_swapped",
        "Rows and columns of the patches' kernel are swapped.",
        (r"transpos|layout|swap|load|weight|\bax[ei]s\b",),
        "weights",
    ),
    Bug(
        "kernel_reshaped",
        "The patches' kernel is reshaped to channels last.",
        (r"transpos|layout|reshap|load|weight|\bax[ei]s\b",),
        "weights",
    ),
    Bug(
        "fused_in_checkpoint_order",
        "The fused product was made as k, v, q.",
        (r"order|swap|permut|load|weight",),
        "weights",
    ),
    Bug(
        "head_fused_by_heads",
        "The head's fused weights are split as heads of q, k and v.",
        (r"load|weight|order|split|permut|head.*(first|layout)|interleav",),
        "weights",
    ),
    Bug("positions_bilinear", "Positions are resized linearly.", (r"linear|cubic|resampl|mode",)),
    Bug(
        "positions_cubic_half",
        "The cubic kernel has a = -0.5.",
        (r"cubic|-0\.5\b|-0\.75|\ba ?=|kernel|catmull",),
    ),
    Bug("positions_align_corners", "Corners are aligned.", (r"corner|half.pixel|cent(er|re)s?",)),
    Bug("positions_antialiased", "Positions are resized with antialias.", (r"alias|pillow|\bpil",)),
    Bug(
        "positions_cropped",
        "The first rows of the table are taken, unresized.",
        (RESIZED + r"|crop|slice|first \d* ?(rows|positions|entries)|not scaled",),
    ),
    Bug(
        "patches_by_columns",
        "Patches are listed column by column.",
        (r"column|row|order|transpos|permut|swap|raster",),
    ),
    Bug("norm_eps", "Norms have eps 1e-5.", (r"\beps",)),
    Bug("gelu_erf", "The second block has GELU with erf.", (r"\berf|tanh|exact",)),
    Bug("head_gelu_quick", "The head has quick GELU.", (r"quick|1\.702|sigmoid|gelu",)),
    Bug(
        "channels_before_heads",
        "The first block splits channels before heads.",
        (r"head|reshape|layout|interleav",),
    ),
    Bug(
        "scale_of_width",
        "The second block scales by the width.",
        (r"scal(e|ing)|sqrt|root|\*\* ?-0\.5",),
    ),
    Bug("causal_mask", "Blocks have the text's causal mask.", (r"causal|mask|later|future",)),
    Bug(
        "softmax_over_queries",
        "The third block's softmax is over queries.",
        (r"softmax.*(ax[ei]s|dim|quer)|\bax[ei]s\b|quer(y|ies)\b.*(sum|normali)",),
    ),
    Bug(
        "residual_of_input",
        "The second block's MLP is added to the block's input.",
        (
            r"residual|(block|layer)'?s? (own )?input|att\w* .*(missing|lost|not added)",
            r"\benc\.0\b(?!\.)",
        ),
    ),
    Bug(
        "head_residual_of_norm",
        "The head's MLP is added to the normed value.",
        (r"residual|norm(ed|ali[sz]ed)|before the norm|after the norm",),
    ),
    Bug(
        "head_norm_missing",
        "The head's MLP reads the unnormed value.",
        (
            r"(without|before|missing|skip|not appl|left out).*norm|un-?norm|\bskip|missing",
            r"norm.*(missing|not appl|not (been )?norm|left out|before)|\bhead\.proj\b(?!\.)",
        ),
    ),
    Bug(
        "head_before_norm",
        "The head reads the value before the last norm.",
        (
            r"(without|before|missing|skip|not appl|left out).*norm|un-?norm|\bskip|missing",
            r"norm.*(missing|not appl|left out|before)|(\benc|layers)\.2\b(?!\.)",
        ),
    ),
    Bug(
        "layer_skipped",
        "The last block is skipped.",
        (
            r"skip|missing|not (run|called|applied)|(block|layer)s?.*(fewer|too few)|too early",
            r"(\benc|layers)\.1\b(?!\.)",
        ),
    ),
    Bug(
        "pooled_to_unit_length",
        "The pooled value is divided by its length.",
        (r"normali[sz]|\bl2\b|length|divid|scal(e|ed|ing)|factor|\bunit\b",),
    ),
)
