"""Chroma's transformer in NumPy: no batch axis, transposed weights, block counters from 1.

q, k and v are one product, in single blocks together with the MLP. Only results are recorded,
at most operations.
"""

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import ChromaTransformer2DModel

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

NAME = "chroma"
HEADS, HEAD, DOUBLE, SINGLE = 2, 16, 2, 3
WIDTH, TEXT, CHANNELS, AXES = HEADS * HEAD, 20, 8, (4, 6, 6)
N_TEXT, ROWS, COLUMNS, APPROXIMATOR, HIDDEN, DEPTH = 6, 4, 3, 32, 24, 2
N_IMAGE, MODS = ROWS * COLUMNS, 3 * SINGLE + 12 * DOUBLE + 2


def reference(folder: Path, dtype: str) -> None:
    """One call of the transformer; the mask is float, which adds 1 to the scores it allows."""
    config: dict[str, Any] = dict(in_channels=CHANNELS, num_layers=DOUBLE, num_single_layers=SINGLE)
    config |= dict(attention_head_dim=HEAD, num_attention_heads=HEADS, joint_attention_dim=TEXT)
    config |= dict(axes_dims_rope=AXES, approximator_num_channels=APPROXIMATOR)
    config |= dict(approximator_hidden_dim=HIDDEN, approximator_layers=DEPTH)
    model = randomised(lambda: ChromaTransformer2DModel(**config), 12)
    model = saved(model, folder, "transformer", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        ids = torch.zeros(ROWS, COLUMNS, 3)
        ids[..., 1], ids[..., 2] = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
        mask = torch.tensor([[1.0] * 4 + [0.0] * 2 + [1.0] * N_IMAGE]).to(model.dtype)
        image = noise(1, 1, N_IMAGE, CHANNELS).to(model.dtype)
        text = noise(2, 1, N_TEXT, TEXT).to(model.dtype)
        time = torch.tensor([0.5])
        recorder.record("pipeline/latents", image, kind="input")
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/attention_mask", mask, kind="input")
        recorder.record("pipeline/timestep", time, kind="schedule")
        out = model(
            image,
            text,
            time.to(model.dtype) if dtype == "float64" else time,
            img_ids=ids.flatten(0, 1),
            txt_ids=torch.zeros(N_TEXT, 3),
            attention_mask=mask,
        ).sample
        recorder.record("pipeline/noise_pred", out)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: weights as (in, out), q, k, v and the single blocks' MLP fused."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        new[f"{name}.W"] = np.concatenate([w[f"{p}.weight"] for p in parts]).T.copy()
        new[f"{name}.b"] = np.concatenate([w[f"{p}.bias"] for p in parts])

    put("img_in", "x_embedder")
    put("txt_in", "context_embedder")
    put("gl.in", "distilled_guidance_layer.in_proj")
    put("gl.out", "distilled_guidance_layer.out_proj")
    for i in range(DEPTH):
        put(f"gl.{i + 1}.a", f"distilled_guidance_layer.layers.{i}.linear_1")
        put(f"gl.{i + 1}.b", f"distilled_guidance_layer.layers.{i}.linear_2")
        j = 0 if bug == "approximator_norm_loaded_twice" else i
        new[f"gl.{i + 1}.norm.g"] = w[f"distilled_guidance_layer.norms.{j}.weight"]
    for i in range(DOUBLE):
        old, b = f"transformer_blocks.{i}", f"D{i + 1}"
        put(f"{b}.img.qkv", *(f"{old}.attn.to_{x}" for x in "qkv"))
        put(f"{b}.txt.qkv", *(f"{old}.attn.add_{x}_proj" for x in "qkv"))
        out = "to_out.0" if bug == "text_projection_of_image" and i == 0 else "to_add_out"
        put(f"{b}.img.proj", f"{old}.attn.to_out.0")
        put(f"{b}.txt.proj", f"{old}.attn.{out}")
        for s, end in (("img", ""), ("txt", "_context")):
            put(f"{b}.{s}.fc1", f"{old}.ff{end}.net.0.proj")
            put(f"{b}.{s}.fc2", f"{old}.ff{end}.net.2")
        for x in "qk":
            swapped = bug == "qk_norms_of_streams_swapped" and i == 1
            new[f"{b}.img.n{x}.g"] = w[f"{old}.attn.norm_{'added_' * swapped}{x}.weight"]
            new[f"{b}.txt.n{x}.g"] = w[f"{old}.attn.norm_{'added_' * (not swapped)}{x}.weight"]
    for i in range(SINGLE):
        old, b = f"single_transformer_blocks.{i}", f"S{i + 1}"
        source = "single_transformer_blocks.1" if bug == "single_loaded_twice" and i == 2 else old
        put(f"{b}.lin1", *(f"{source}.attn.to_{x}" for x in "qkv"), f"{source}.proj_mlp")
        put(f"{b}.lin2", f"{old}.proj_out")
        for x in "qk":
            new[f"{b}.n{x}.g"] = w[f"{old}.attn.norm_{x}.weight"]
    put("final", "proj_out")
    if bug == "projection_not_transposed":
        new["D2.img.proj.W"] = new["D2.img.proj.W"].T.copy()
    if bug == "second_mlp_bias_zero":
        new["D1.img.fc2.b"] = np.zeros_like(new["D1.img.fc2.b"])
    return new


class Net:
    """The forward pass; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.q(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, slot: str = "out") -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype), slot=slot)
        return x

    def lin(self, name: str, x: Array) -> Array:
        return self.tap(name, self.q(x @ self.p[f"{name}.W"] + self.p[f"{name}.b"]))

    def ln(self, x: Array, eps: float = 1e-6) -> Array:
        x = x - x.mean(-1, keepdims=True)
        return self.q(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))

    def rms(self, x: Array, g: Array, eps: float = 1e-6) -> Array:
        if self.bug == "qk_layer_norm" and eps == 1e-6:
            x = x - x.mean(-1, keepdims=True)
        eps = 1e-3 if self.bug == "qk_norm_eps" and eps == 1e-6 else eps
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        if self.bug == "qk_norm_without_weight" and eps == 1e-6:
            return self.q(y)
        return self.q(self.q(y) * g)

    def gelu(self, x: Array, single: bool = False) -> Array:
        if self.bug == "gelu_quick" and not single:
            return self.q(x / (1 + np.exp(-1.702 * x)))
        if self.bug == "gelu_erf_single" and single:
            return self.q(x * 0.5 * (1 + np.vectorize(math.erf)(x / 2**0.5)))
        return self.q(0.5 * x * (1 + np.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))))

    def modulated(self, x: Array, shift: Array, scale: Array, one: float = 1.0) -> Array:
        return self.q(self.q(x * self.q(one + scale)) + shift)

    def sinusoid(self, t: Array, dim: int, flip: bool = False, less: int = 0) -> Array:
        half = dim // 2
        freqs = np.exp(-math.log(10000) * np.arange(half, dtype=np.float32) / (half - less))
        a = t[:, None].astype(np.float32) * freqs.astype(np.float32)
        return np.concatenate([np.sin(a), np.cos(a)] if flip else [np.cos(a), np.sin(a)], -1)

    def modulations(self, t: float) -> Array:
        """The table of all shifts, scales and gates: single blocks, image, text, final."""
        bug, quarter = self.bug, APPROXIMATOR // 4
        t = t if bug == "timestep_not_scaled" else t * 1000
        less = 1 if bug == "time_frequencies_to_the_end" else 0
        step = self.sinusoid(np.array([t]), quarter, bug == "time_sin_first", less)
        strength = np.full(1, 4000.0 if bug == "guidance_as_in_flux" else 0.0)
        guidance = self.sinusoid(strength, quarter) * (bug != "guidance_zeros")
        factor = 1 if bug == "index_not_scaled" else 1000
        rows = np.arange(1, MODS + 1) if bug == "index_from_one" else np.arange(MODS)
        index = self.sinusoid(rows * factor, 2 * quarter, bug == "index_sin_first")
        same = np.repeat(np.concatenate([step, guidance], 1), MODS, 0)
        parts = [index, same] if bug == "index_before_time" else [same, index]
        x = self.tap("gl.vec", self.q(np.concatenate(parts, 1)))
        x = self.lin("gl.in", x)
        for i in range(1, DEPTH + 1):
            n = self.tap(f"gl.{i}.norm", self.rms(x, self.p[f"gl.{i}.norm.g"], 1.1920929e-07))
            y = self.lin(f"gl.{i}.a", x if bug == "approximator_norm_missing" and i == 2 else n)
            y = self.gelu(y) if bug == "approximator_gelu" else self.q(y / (1 + np.exp(-y)))
            y = self.lin(f"gl.{i}.b", y)
            x = y if bug == "approximator_residual" and i == 2 else self.q(x + y)
        table = self.lin("gl.out", x)
        return table.astype(ml_dtypes.bfloat16).astype(np.float32) if bug == "table_bf16" else table

    def angles(self) -> tuple[Array, Array]:
        bug = self.bug
        ids = np.zeros((N_TEXT + N_IMAGE, 3))
        rows, columns = np.mgrid[:ROWS, :COLUMNS].reshape(2, -1)
        first, second = (2, 1) if bug == "rope_rows_columns_swapped" else (1, 2)
        ids[N_TEXT:, first], ids[N_TEXT:, second] = rows, columns
        if bug == "rope_image_after_text":
            ids[N_TEXT:, 1:] += N_TEXT
        if bug == "text_counted_in_first_axis":
            ids[:N_TEXT, 0] = np.arange(N_TEXT)
        theta = 256.0 if bug == "rope_theta" else 10000.0
        parts = [ids[:, i : i + 1] * theta ** -(np.arange(0, d, 2) / d) for i, d in enumerate(AXES)]
        a = np.concatenate(parts, 1)
        a = np.roll(a, -N_TEXT, 0) if bug == "rope_image_first" else a
        taps.tap("pe", np.stack([np.cos(a), np.sin(a)], -1).astype(np.float32))
        return np.cos(a).astype(np.float32)[:, None], np.sin(a).astype(np.float32)[:, None]

    def rotated(self, x: Array) -> Array:
        cos, sin = self.pe
        if self.bug == "rope_halves":
            a, b = np.split(x, 2, -1)
            return self.q(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1))
        a, b = x[..., 0::2], x[..., 1::2]
        return self.q(np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape))

    def split(self, qkv: Array, name: str) -> list[Array]:
        """q, k, v as (tokens, heads, channels), q and k normed."""
        q, k, v = (x.reshape(len(x), HEADS, HEAD) for x in np.split(qkv, 3, -1))
        if self.bug == "heads_split_last" and name == "S1":
            q, k, v = (
                x.reshape(-1, WIDTH).reshape(-1, HEAD, HEADS).swapaxes(1, 2) for x in (q, k, v)
            )
        return [self.rms(q, self.p[f"{name}.nq.g"]), self.rms(k, self.p[f"{name}.nk.g"]), v]

    def attention(self, name: str, q: Array, k: Array, v: Array) -> Array:
        bug, m = self.bug, self.mask
        if not (bug == "single_not_rotated" and name == "S2"):
            q, k = self.rotated(q), self.rotated(k)
        q, k = self.tap(f"{name}.q", q), self.tap(f"{name}.k", k)
        if bug == "values_rotated" and name == "D1":
            v = self.rotated(v)
        scale = 1 if bug == "attention_unscaled" and name == "S2" else HEAD**-0.5
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        if bug == "mask_as_minus_infinity":
            scores = scores + np.where(m > 0, 0, -1e9)
        elif bug == "mask_of_keys_only":
            scores = scores + m
        elif not (bug == "mask_ignored" or (bug == "mask_ignored_single" and name[0] == "S")):
            scores = scores + m[:, None] * m
        if bug == "scores_f16" and name == "D2":
            scores = scores.astype(np.float16).astype(np.float32)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        e = e / e.sum(-1, keepdims=True)
        return self.tap(f"{name}.att", self.q(np.einsum("hqk,khd->qhd", e, v).reshape(-1, WIDTH)))

    def double(self, i: int, img: Array, txt: Array, table: Array) -> tuple[Array, Array]:
        bug, b = self.bug, f"D{i}"
        at = 3 * SINGLE + 6 * (i - 1)
        mods = {"img": table[at : at + 6], "txt": table[at + 6 * DOUBLE :][:6]}
        if bug == "text_modulation_beside_image":
            at = 3 * SINGLE + 12 * (i - 1)
            mods = {"img": table[at : at + 6], "txt": table[at + 6 : at + 12]}
        if bug == "double_modulation_from_start":
            mods["img"] = table[6 * (i - 1) : 6 * i]
        x, qkv = {"txt": txt, "img": img}, {}
        for s, y in x.items():
            shift, scale = mods[s][:2]
            if bug == "scale_before_shift":
                shift, scale = scale, shift
            y = self.tap(f"{b}.{s}.pre", self.modulated(self.ln(y), shift, scale))
            qkv[s] = self.split(self.lin(f"{b}.{s}.qkv", y), f"{b}.{s}")
        order = ("img", "txt") if bug == "joint_image_first" else ("txt", "img")
        q, k, v = (np.concatenate([qkv[s][j] for s in order]) for j in range(3))
        y = self.attention(b, q, k, v)
        n = N_IMAGE if bug == "joint_image_first" else N_TEXT
        parts = dict(zip(order, (y[:n], y[n:]), strict=True))
        for s in ("img", "txt"):
            shift, scale, gate = mods[s][3:]
            y = self.lin(f"{b}.{s}.proj", parts[s])
            first = 1 if bug == "attention_gate_missing" and s == "txt" and i == 1 else mods[s][2]
            before = x[s]
            x[s] = self.tap(f"{b}.{s}.mid", self.q(x[s] + self.q(first * y)))
            y = self.ln(x[s], 1e-2 if bug == "norm2_eps" and i == 2 else 1e-6)
            if bug == "norm2_rms_text" and s == "txt":
                y = self.q(x[s] / np.sqrt((x[s] ** 2).mean(-1, keepdims=True) + 1e-6))
            y = self.modulated(
                y, shift, scale, 0.0 if bug == "one_plus_missing" and i == 2 else 1.0
            )
            y = self.tap(f"{b}.{s}.act", self.gelu(self.lin(f"{b}.{s}.fc1", y)))
            y = self.lin(f"{b}.{s}.fc2", y)
            y = y if bug == "mlp_gate_missing" and s == "img" and i == 2 else self.q(gate * y)
            late = bug == "image_mlp_residual_from_input" and s == "img" and i == 1
            x[s] = self.tap(f"{b}.{s}", self.q((before if late else x[s]) + y))
        return x["img"], x["txt"]

    def single(self, i: int, x: Array, table: Array) -> Array:
        bug, b = self.bug, f"S{i}"
        shift, scale, gate = table[3 * (i - 1) : 3 * i]
        if bug == "single_gate_first":
            gate, shift, scale = shift, scale, gate
        normed = self.ln(x)
        y = self.lin(f"{b}.lin1", self.tap(f"{b}.pre", self.modulated(normed, shift, scale)))
        qkv, h = y[:, : 3 * WIDTH], y[:, 3 * WIDTH :]
        y = self.attention(b, *self.split(qkv, b))
        h = h if bug == "single_gelu_missing" and i == 3 else self.gelu(h, True)
        joined = np.concatenate([h, y] if bug == "mlp_before_attention" and i == 1 else [y, h], 1)
        y = self.lin(f"{b}.lin2", self.tap(f"{b}.lin2", joined, "in.0"))
        start = normed if bug == "single_residual_of_norm" and i == 3 else x
        return self.tap(b, self.q(start + self.q(gate * y)))

    def __call__(self, img: Array, txt: Array, mask: Array, t: float) -> Array:
        bug = self.bug
        img, self.mask = self.lin("img_in", self.q(img)), mask
        table = self.modulations(t)
        txt, self.pe = self.lin("txt_in", self.q(txt)), self.angles()
        for i in range(1, DOUBLE + 1):
            new_img, new_txt = self.double(i, img, txt, table)
            img, txt = new_img, (txt if bug == "text_stream_not_kept" and i == 1 else new_txt)
        x = np.concatenate([txt, img])
        for i in range(1, SINGLE + 1):
            x = x if bug == "single_skipped" and i == 2 else self.single(i, x, table)
        x = x[:N_IMAGE] if bug == "text_tokens_decoded" else x[N_TEXT:]
        shift, scale = table[:2] if bug == "final_modulation_of_first_rows" else table[-2:]
        if bug == "final_scale_first":
            shift, scale = scale, shift
        x = x if bug == "final_norm_missing" else self.ln(x)
        return self.lin("final", self.tap("final.pre", self.modulated(x, shift, scale)))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Net(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    img, txt, mask = (
        value(f"pipeline/{name}")[0] for name in ("latents", "prompt_embeds", "attention_mask")
    )
    t = float(value("pipeline/timestep")[0])
    if bug == "timestep_of_int":
        t = round(t)
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("in.*", "D?.img", "D?.txt", "S?", "final", "gl.out")
    with port_trace(out, dump, dtype, blocks, kept):
        for name, x in (("in.img", img), ("in.txt", txt), ("in.mask", mask)):
            taps.tap(name, net.q(x).astype(dtype), kind="input")
        taps.tap("in.t", np.array([t], np.float32), kind="schedule")
        net(img, txt, mask, t)


NO_COUNTERPART = (r"^pe$",)

SWAP = r"shift|swap|order|chunk"
BUGS = (
    Bug(
        "text_projection_of_image",
        "Text uses the image's projection.",
        (r"load|weight",),
        "weights",
    ),
    Bug(
        "qk_norms_of_streams_swapped",
        "q/k norms of the streams swap.",
        (r"load|weight",),
        "weights",
    ),
    Bug("single_loaded_twice", "S3 has S2's first layer.", (r"load|weight|dupl",), "weights"),
    Bug("projection_not_transposed", "A square weight is transposed.", (r"transpos",), "weights"),
    Bug("second_mlp_bias_zero", "A bias of the MLP is zero.", (r"bias|zero|load",), "weights"),
    Bug("qk_layer_norm", "q and k have LayerNorm, not RMSNorm.", (r"mean|rms|layer ?norm|center",)),
    Bug("qk_norm_eps", "q's and k's norm has eps 1e-3.", (r"\beps",)),
    Bug(
        "qk_norm_without_weight",
        "The weight of q's and k's norm is unused.",
        (r"weight|affine|gain",),
    ),
    Bug("gelu_quick", "Double blocks use quick GELU.", (r"gelu|1\.702|sigmoid",)),
    Bug("gelu_erf_single", "Single blocks use erf GELU.", (r"gelu|erf",)),
    Bug("timestep_not_scaled", "The timestep is not multiplied by 1000.", (r"1000|scale|factor",)),
    Bug(
        "timestep_of_int",
        "The timestep 0.5 is rounded to 0.",
        (r"timestep|round|integer",),
        "schedule",
    ),
    Bug("time_sin_first", "The timestep's sines come first.", (r"sin|cos|flip|order|swap",)),
    Bug("guidance_zeros", "Guidance 0 is embedded as zeros.", (r"guidance|zero|cos|missing|part",)),
    Bug(
        "index_not_scaled", "Modulation indices are not multiplied.", (r"1000|scale|factor|index",)
    ),
    Bug("index_sin_first", "The indices' sines come first.", (r"sin|cos|flip|order|swap",)),
    Bug("index_before_time", "The index is put before the time.", (r"order|concat|swap|permut",)),
    Bug(
        "approximator_norm_missing",
        "A norm is not applied.",
        (r"norm|missing|skip|not appl",),
    ),
    Bug("approximator_gelu", "The approximator uses GELU.", (r"gelu|silu|activation",)),
    Bug("approximator_residual", "A residual is missing.", (r"residual|skip|added|missing",)),
    Bug(
        "table_bf16",
        "The modulation table is rounded to bfloat16.",
        (r"bf16|bfloat|precision|cast",),
    ),
    Bug("rope_rows_columns_swapped", "RoPE's rows and columns swap.", (r"ax[ei]s|swap|position",)),
    Bug(
        "rope_image_after_text",
        "Image positions begin after the text.",
        (r"offset|position|shift",),
    ),
    Bug("rope_theta", "RoPE has base 256.", (r"theta|base|frequenc",)),
    Bug(
        "rope_image_first",
        "Angles are in the order image, text.",
        (r"order|position|offset|roll|token",),
    ),
    Bug("rope_halves", "RoPE rotates halves.", (r"half|halves|interleav",)),
    Bug("heads_split_last", "S1 splits channels before heads.", (r"head|reshape|layout",)),
    Bug("attention_unscaled", "S2's scores are not scaled.", (r"scale|sqrt|root",)),
    Bug("mask_as_minus_infinity", "The mask excludes, where it adds 1.", (r"mask|additive|-inf",)),
    Bug("mask_of_keys_only", "The mask is not applied to queries.", (r"mask",)),
    Bug("mask_ignored", "The mask is not used.", (r"mask",)),
    Bug("mask_ignored_single", "Single blocks do not use the mask.", (r"mask",)),
    Bug("scores_f16", "D2's scores are rounded to float16.", (r"f16|float16|half|precision",)),
    Bug(
        "text_modulation_beside_image",
        "Text chunks follow each image's.",
        (SWAP + r"|index|offset|row",),
    ),
    Bug(
        "double_modulation_from_start",
        "Rows of single blocks are used.",
        (SWAP + r"|index|offset|row",),
    ),
    Bug("scale_before_shift", "Shift and scale are swapped.", (SWAP,)),
    Bug(
        "joint_image_first",
        "Image tokens precede text in attention.",
        (r"order|concat|swap|token|roll",),
    ),
    Bug("attention_gate_missing", "D1's text has no attention gate.", (r"gate",)),
    Bug("norm2_eps", "D2's second norm has eps 1e-2.", (r"\beps",)),
    Bug("norm2_rms_text", "The text's second norm is RMSNorm.", (r"rms|mean|layer ?norm|center",)),
    Bug("one_plus_missing", "D2 multiplies by scale, not 1 + scale.", (r"1 ?\+|\bone\b|scale",)),
    Bug("mlp_gate_missing", "D2's image MLP has no gate.", (r"gate",)),
    Bug(
        "text_stream_not_kept",
        "D1's text result is dropped.",
        (r"skip|\binput|\btext|stream|previous|earlier",),
    ),
    Bug("single_gate_first", "A single block's chunks are gate, shift, scale.", (SWAP + r"|gate",)),
    Bug(
        "mlp_before_attention",
        "S1 joins MLP and attention in the other order.",
        (r"order|concat|swap",),
    ),
    Bug("single_residual_of_norm", "S3 adds to the normed input.", (r"residual|norm",)),
    Bug("single_skipped", "S2 is skipped.", (r"skip|missing|not (run|called)",)),
    Bug(
        "text_tokens_decoded", "The first tokens are decoded.", (r"token|slice|offset|\btext|crop",)
    ),
    Bug("final_scale_first", "The last shift and scale are swapped.", (SWAP,)),
    Bug("final_norm_missing", "The last norm is missing.", (r"norm|missing|skip",)),
)

MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "approximator_norm_loaded_twice",
        "The approximator's second norm has the weight of its first.",
        (r"load|weight|parameter|dupl|norms\.0|(other|another|first|wrong) (norm|layer)",),
        "weights",
    ),
    Bug(
        "index_from_one",
        "Modulation indices are counted from 1, not from 0.",
        (
            r"off.by.one|\bindex|\bindices|arange|offset",
            r"(from|start\w*|begin\w*) (with |at )?(1|one)\b",
        ),
    ),
    Bug(
        "guidance_as_in_flux",
        "Guidance is embedded as 4 * 1000, where it is always 0.",
        (r"guidance|4000|\bzeros?\b",),
    ),
    Bug(
        "time_frequencies_to_the_end",
        "Frequencies of the timestep are divided by half - 1.",
        (
            r"frequenc|freq_shift|half ?- ?1|denominator|divi|exponent|wavelength|\bperiod",
            r"off.by.one",
        ),
    ),
    Bug(
        "text_counted_in_first_axis",
        "Text tokens are counted in the first axis of positions; they are at 0.",
        (r"position|\bids?\b|arange|count|\btext\b.*(rope|rotat)|(rope|rotat).*\btext\b",),
    ),
    Bug(
        "single_not_rotated",
        "S2 does not rotate q and k.",
        (r"\brope\b|rotar|rotat|un-?rotated|position",),
    ),
    Bug(
        "values_rotated",
        "D1 rotates values too.",
        (r"\b(v|values?|to_v)\b.*(\brope|rotat|rotar)|(\brope|rotat|rotar).*\b(v|values?|to_v)\b",),
    ),
    Bug(
        "image_mlp_residual_from_input",
        "D1 adds the image's MLP to the block's input; attention is lost.",
        (
            r"residual|skip connection|block'?s? input|input of (the )?(block|layer)",
            r"attention.*(missing|lost|not added|left out|dropped)|without (the )?attention",
        ),
    ),
    Bug(
        "single_gelu_missing",
        "S3's MLP has no activation.",
        (r"gelu|activation|non-?linear",),
    ),
    Bug(
        "final_modulation_of_first_rows",
        "The last shift and scale are the table's first rows, not its last.",
        (r"\brows?\b|\bindex|offset|slice|modulation|(wrong|first|other) (part|entries|chunk)",),
    ),
)
