"""DINOv2 with registers in NumPy: channels-last pixels, SwiGLU as one product, counters from 1.

Two photos of another size than the position table's: it is resampled, up in rows, down in columns.
The descriptor is the class token beside the mean of the patches.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

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
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "dinov2"
WIDTH, HEADS, LAYERS, PATCH, REGISTERS, GRID = 32, 4, 3, 4, 3, 4
HEAD, ROWS, COLUMNS = WIDTH // HEADS, 6, 3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def reference(folder: Path, dtype: str) -> None:
    """One call for both photos; no mask, no dropout."""
    config = Dinov2WithRegistersConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        mlp_ratio=4,
        image_size=GRID * PATCH,
        patch_size=PATCH,
        num_register_tokens=REGISTERS,
        initializer_range=0.15,
        use_swiglu_ffn=True,
    )
    model = saved(randomised(lambda: Dinov2WithRegistersModel(config), 31), folder, "dino", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="dino", weights=True),
        watch_function(recorder, F, "interpolate"),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        photos = torch.randint(
            0,
            256,
            (2, 3, ROWS * PATCH, COLUMNS * PATCH),
            generator=torch.Generator().manual_seed(3),
            dtype=torch.uint8,
        )
        recorder.record("pipeline/image", photos, kind="input")
        mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
        pixels = ((photos / 255 - mean) / std).to(model.dtype)
        recorder.record("pipeline/pixel_values", pixels, kind="input")
        result = model(pixels)
        patches = result.last_hidden_state[:, 1 + REGISTERS :]
        descriptor = torch.cat([result.pooler_output, patches.mean(1)], 1)
        recorder.record("pipeline/descriptor", descriptor)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: matrices as (in, out), the patch kernel as (y, x, channel)."""
    kernel = w["embeddings.patch_embeddings.projection.weight"]
    axes = (2, 3, 1, 0)
    if bug == "kernel_channels_first":
        axes = (1, 2, 3, 0)
    if bug == "kernel_rows_columns_swapped":
        axes = (3, 2, 1, 0)
    new = {
        "patch.W": kernel.transpose(axes).reshape(-1, WIDTH).copy(),
        "patch.b": w["embeddings.patch_embeddings.projection.bias"],
        "head_token": w["embeddings.cls_token"][0],
        "memory": w["embeddings.register_tokens"][0],
        "where": w["embeddings.position_embeddings"][0],
        "end.g": w["layernorm.weight"],
        "end.b": w["layernorm.bias"],
    }
    if bug == "registers_not_loaded":
        new["memory"] = np.zeros_like(new["memory"])
    for i in range(LAYERS):
        old, b = f"encoder.layer.{i}", f"L{i + 1}"
        pairs = {
            "Q": "attention.attention.query",
            "K": "attention.attention.key",
            "V": "attention.attention.value",
            "join": "attention.output.dense",
            "wide": "mlp.weights_in",
            "back": "mlp.weights_out",
        }
        for own, name in pairs.items():
            new[f"{b}.{own}.W"] = w[f"{old}.{name}.weight"].T.copy()
            new[f"{b}.{own}.b"] = w[f"{old}.{name}.bias"]
        for j in (1, 2):
            new[f"{b}.ln{j}.g"] = w[f"{old}.norm{j}.weight"]
            new[f"{b}.ln{j}.b"] = w[f"{old}.norm{j}.bias"]
            other = 3 - j if bug == "layer_scales_swapped" and i == 0 else j
            new[f"{b}.amount{j}"] = w[f"{old}.layer_scale{other}.lambda1"]
        if bug == "value_bias_not_loaded" and i == 2:
            new[f"{b}.V.b"] = np.zeros_like(new[f"{b}.V.b"])
    return new


def resampling(size: int, to: int, bug: str | None) -> Array:
    """The matrix of cubic resampling with antialiasing from `size` to `to` places."""
    scale = size / to
    if bug == "positions_resampled_with_offset":
        scale = size / (to + 0.1)
    wider = 1.0 if bug == "positions_not_antialiased" else max(scale, 1.0)
    a = -0.75 if bug == "positions_not_antialiased" else -0.5
    matrix = np.zeros((to, size))
    for i in range(to):
        center = scale * (i + 0.5) - 0.5
        if bug == "positions_corners_aligned":
            center = i * (size - 1) / (to - 1)
        first, last = int(np.floor(center - 2 * wider)), int(np.ceil(center + 2 * wider))
        for j in range(first, last + 1):
            x = abs(j - center) / wider
            if x < 1:
                weight = ((a + 2) * x - (a + 3)) * x * x + 1
            else:
                weight = (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0
            if bug == "positions_not_antialiased":
                matrix[i, min(max(j, 0), size - 1)] += weight  # outside: the edge again
            elif 0 <= j < size:
                matrix[i, j] += weight
    return (matrix / matrix.sum(1, keepdims=True)).astype(np.float32)


class Net:
    """The forward pass; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.q(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, kind: str = "activation") -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype), kind=kind)
        return x

    def dense(self, name: str, x: Array) -> Array:
        return self.tap(name, self.q(x @ self.p[f"{name}.W"] + self.p[f"{name}.b"]))

    def norm(self, name: str, x: Array) -> Array:
        eps = 1e-5 if self.bug == "norm_eps" else 1e-6
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        if self.bug == "end_norm_rms" and name == "end":
            centred, variance = x, (x * x).mean(-1, keepdims=True)
        y = centred / np.sqrt(variance + eps)
        if self.bug == "norm_eps_outside_root":
            y = centred / (np.sqrt(variance) + eps)
        return self.tap(name, self.q(y * self.p[f"{name}.g"] + self.p[f"{name}.b"]))

    def positions(self) -> tuple[Array, Array]:
        """Those of the class token and of the patches, in this photo's grid."""
        bug, table = self.bug, self.p["where"]
        grid = table[1:].reshape(GRID, GRID, WIDTH)
        if bug == "positions_columns_first":
            grid = grid.swapaxes(0, 1)
        up, down = resampling(GRID, ROWS, bug), resampling(GRID, COLUMNS, bug)
        new = np.einsum("ri,ijc,kj->rkc", up, grid, down).astype(np.float32)
        return table[:1], self.tap("where", self.q(new)).reshape(-1, WIDTH)

    def embedded(self, pixels: Array) -> Array:
        bug, n = self.bug, len(pixels)
        x = pixels.reshape(n, ROWS, PATCH, COLUMNS, PATCH, 3).swapaxes(2, 3)
        if bug == "patches_columns_first":
            x = x.swapaxes(1, 2)
        patches = self.dense("patch", x.reshape(n, ROWS * COLUMNS, -1))
        of_class, of_patches = self.positions()
        head, memory = (np.repeat(self.p[x][None], n, 0) for x in ("head_token", "memory"))
        if bug != "class_without_position":
            head = self.q(head + of_class)
        patches = self.q(patches + of_patches)
        parts = [head, memory, patches]
        if bug == "registers_last":
            parts = [head, patches, memory]
        if bug == "registers_first":
            parts = [memory, head, patches]
        return self.tap("sequence", np.concatenate(parts, 1))

    def attention(self, b: str, x: Array) -> Array:
        bug, (n, t, _) = self.bug, x.shape
        q, k, v = (self.dense(f"{b}.{letter}", x) for letter in "QKV")
        if bug == "heads_split_last" and b == "L3":
            q, k, v = (y.reshape(n, t, HEAD, HEADS).swapaxes(2, 3) for y in (q, k, v))
        else:
            q, k, v = (y.reshape(n, t, HEADS, HEAD) for y in (q, k, v))
        scores = np.einsum("nqhd,nkhd->nhqk", q, k) * HEAD**-0.5
        e = np.exp(scores - scores.max(-1, keepdims=True))
        e = e / e.sum(-1, keepdims=True)
        y = np.einsum("nhqk,nkhd->nqhd", e, v).reshape(n, t, WIDTH)
        return self.dense(f"{b}.join", self.tap(f"{b}.heard", self.q(y)))

    def mlp(self, b: str, x: Array) -> Array:
        bug = self.bug
        gate, value = np.split(self.dense(f"{b}.wide", x), 2, -1)
        if bug == "swiglu_halves_swapped":
            gate, value = value, gate
        if bug == "swiglu_interleaved" and b == "L1":
            both = np.concatenate([gate, value], -1)
            gate, value = both[..., 0::2], both[..., 1::2]
        if bug == "gelu_in_gate":
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return self.dense(f"{b}.back", self.tap(f"{b}.gated", self.q(self.q(gate) * value)))

    def block(self, i: int, x: Array) -> Array:
        bug, b, start = self.bug, f"L{i}", x
        y = self.attention(b, self.norm(f"{b}.ln1", x))
        if bug == "layer_scale_on_sum" and i == 2:
            x = self.q(self.q(x + y) * self.p[f"{b}.amount1"])
        elif bug == "layer_scale_missing" and i == 1:
            x = self.q(x + y)
        else:
            x = self.q(x + self.tap(f"{b}.part1", self.q(y * self.p[f"{b}.amount1"])))
        self.tap(f"{b}.mid", x)
        y = self.norm(f"{b}.ln2", x)
        y = self.mlp(b, y)
        y = self.tap(f"{b}.part2", self.q(y * self.p[f"{b}.amount2"]))
        if bug == "residual_of_block_input" and i == 2:
            x = start
        return self.tap(b, self.q(x + y))

    def __call__(self, pixels: Array) -> None:
        bug, x = self.bug, self.embedded(self.q(pixels))
        for i in range(1, LAYERS + 1):
            x = self.block(i, x)
        y = self.norm("end", x)
        pooled = self.tap("pooled", x[:, 0] if bug == "pooled_without_norm" else y[:, 0])
        first = 1 if bug == "registers_in_mean" else 1 + REGISTERS
        self.tap("descriptor", np.concatenate([pooled, self.q(y[:, first:].mean(1))], 1))


def normalised(photos: Array, bug: str | None) -> Array:
    """Pixels of channels-last photos as the network wants them."""
    mean, std = (np.array(x, np.float32) for x in (MEAN, STD))
    if bug == "statistics_of_half":
        mean, std = np.full_like(mean, 0.5), np.full_like(std, 0.5)
    if bug == "channels_bgr":
        photos = photos[..., ::-1]
    return (photos.astype(np.float32) / 255 - mean) / std


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    net = Net(converted(checkpoint(folder, "dino"), bug), bug, dtype)
    photos = np.moveaxis(given(folder)("pipeline/image"), 1, -1)
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("photo", "pixels", "sequence", "L?", "end", "descriptor")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("photo", photos, kind="input")
        net(net.tap("pixels", net.q(normalised(photos, bug)), kind="input"))


NO_COUNTERPART = ()

NORM = r"(?<![\w./])(layer ?)?norm"  # the word, not a part of a module's name
BUGS = (
    Bug(
        "statistics_of_half",
        "Pixels are normalised with 0.5 instead of ImageNet's mean and deviation.",
        (r"mean|std|deviation|normali|scale|pixel|\binput",),
        "inputs",
    ),
    Bug("channels_bgr", "Photos are read as BGR.", (r"bgr|channel|revers|flip|order",), "inputs"),
    Bug(
        "kernel_channels_first",
        "The patch kernel keeps its channels before rows and columns.",
        (r"layout|transpos|permut|channel|order|axes|load|weight",),
        "weights",
    ),
    Bug(
        "kernel_rows_columns_swapped",
        "The patch kernel's rows and columns are swapped.",
        (r"transpos|permut|swap|rows|axes|load|weight",),
        "weights",
    ),
    Bug(
        "registers_not_loaded",
        "Register tokens are zero.",
        (r"load|zero|regist|weight",),
        "weights",
    ),
    Bug(
        "layer_scales_swapped", "L1's layer scales are swapped.", (r"load|weight|swap",), "weights"
    ),
    Bug("value_bias_not_loaded", "L3's values have no bias.", (r"bias|load|zero",), "weights"),
    Bug(
        "patches_columns_first",
        "Patches are counted down the columns.",
        (r"order|transpos|permut|column|rows|raster",),
    ),
    Bug(
        "positions_columns_first",
        "The position grid is read down the columns.",
        (r"transpos|swap|column|axes|permut|order",),
    ),
    Bug(
        "positions_not_antialiased",
        "Positions are resampled without antialiasing.",
        (r"alias|cubic|0\.75",),
    ),
    Bug(
        "positions_corners_aligned",
        "Positions are resampled with aligned corners.",
        (r"corner|align",),
    ),
    Bug(
        "positions_resampled_with_offset",
        "Positions are resampled by (size + 0.1) / grid.",
        (
            r"0\.1\b|offset|scale.?factor",
            r"(sampling|resiz|interpolat)\w* (scale|grid|point|position)",
        ),
    ),
    Bug(
        "class_without_position",
        "The class token has no position.",
        (r"position|\bcls|class token|first (token|row)",),
    ),
    Bug(
        "registers_last",
        "Registers come after the patches; the last rows are taken as patches.",
        (r"regist|order|permut|roll|token|concat",),
    ),
    Bug(
        "registers_first",
        "Registers come before the class token; the first row is taken as its.",
        (r"regist|order|permut|roll|swap|token|concat",),
    ),
    Bug(
        "heads_split_last",
        "L3 splits channels as (head channels, heads).",
        (r"\bheads?\b|interleav|layout|reshape",),
    ),
    Bug("norm_eps", "Norms have eps 1e-5, not 1e-6.", (r"\beps",)),
    Bug(
        "norm_eps_outside_root",
        "Norms add eps to the deviation, not to the variance.",
        (r"\beps|outside|deviation",),
    ),
    Bug("end_norm_rms", "The last norm is an RMSNorm.", (r"\brms|\bmean\b|cent(er|re)",)),
    Bug(
        "layer_scale_missing",
        "L1's attention has no layer scale.",
        (r"missing|skip|without|omit|unscaled|not (applied|multiplied|scaled)",),
    ),
    Bug(
        "layer_scale_on_sum",
        "L2's layer scale multiplies the residual too.",
        (r"residual|\bsum\b|order|after (the )?add|before (the )?scal",),
    ),
    Bug(
        "residual_of_block_input",
        "L2's MLP is added to the block's input.",
        (r"residual|\binput|attention.*(missing|dropped|lost)|skip",),
    ),
    Bug(
        "swiglu_halves_swapped", "The gate is the second half.", (r"swap|order|halves|chunk|gate",)
    ),
    Bug(
        "swiglu_interleaved",
        "L1's gate is each other channel.",
        (r"interleav|halves|layout|split|chunk",),
    ),
    Bug("gelu_in_gate", "The gate has GELU, not SiLU.", (r"gelu|silu|swish|activation",)),
    Bug("pooled_without_norm", "The class token is not normed.", (NORM,)),
    Bug(
        "registers_in_mean",
        "The mean is over registers too.",
        (r"regist|\bmean\b|averag|slice|token|crop|offset",),
    ),
)
