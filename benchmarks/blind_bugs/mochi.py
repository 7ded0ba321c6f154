"""Mochi's transformer in NumPy: no batch axis, video tokens as (frames, places, width).

The video's q, k and v are one product, the text's k and v one; gate and up of the MLPs are two
weights here. Taps are few, their layer is the last part of the name, and weights are (in, out).
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import MochiTransformer3DModel

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

NAME = "mochi"
HEADS, HEAD, LAYERS, TEXT_WIDTH, TEXT, WAVE = 3, 8, 3, 20, 32, 24
WIDTH, POOL_HEADS, CHANNELS, PATCH = HEADS * HEAD, 8, 4, 2
FRAMES, ROWS, COLUMNS, TOKENS, VALID = 3, 4, 6, 7, 5
HIGH, WIDE = ROWS // PATCH, COLUMNS // PATCH
PLACES, AREA, TIME = HIGH * WIDE, 192 * 192, 731.25


def reference(folder: Path, dtype: str) -> None:
    """One call; two of the text's tokens are padding."""
    config: dict[str, Any] = dict(patch_size=PATCH, num_attention_heads=HEADS, num_layers=LAYERS)
    config |= dict(attention_head_dim=HEAD, pooled_projection_dim=TEXT_WIDTH, in_channels=CHANNELS)
    config |= dict(text_embed_dim=TEXT, time_embed_dim=WAVE, max_sequence_length=TOKENS)
    model = randomised(lambda: MochiTransformer3DModel(**config), 43)
    for name, parameter in model.named_parameters():
        if ".norm1" in name:
            parameter.mul_(3)  # larger gates: each block matters
        if name.endswith("to_q.weight") or name.endswith("add_q_proj.weight"):
            parameter.mul_(2)
    model = saved(model, folder, "transformer", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        x = noise(1, 1, CHANNELS, FRAMES, ROWS, COLUMNS).to(model.dtype)
        text = noise(2, 1, TOKENS, TEXT).to(model.dtype)
        mask = torch.arange(TOKENS)[None] < VALID
        time = torch.tensor([TIME])
        recorder.record("pipeline/timestep", time, kind="schedule")
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/prompt_attention_mask", mask, kind="input")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # autocast knows no float32 here
            out = model(x, text, time, mask, return_dict=False)[0]
        recorder.record("pipeline/noise_pred", out)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        new[f"{name}.w"] = np.concatenate([w[f"{p}.weight"] for p in parts]).T.copy()
        if f"{parts[0]}.bias" in w:
            new[f"{name}.b"] = np.concatenate([w[f"{p}.bias"] for p in parts])

    def put_halves(names: tuple[str, str], old: str) -> None:
        for name, weight in zip(names, np.split(w[f"{old}.weight"], 2), strict=True):
            new[f"{name}.w"] = weight.T.copy()

    kernel = w["patch_embed.proj.weight"]  # (width, channels, rows, columns)
    if bug != "patch_kernel_channels_first":
        kernel = kernel.transpose(0, 2, 3, 1)
    new["patch.w"] = kernel.reshape(WIDTH, -1).T.copy()
    new["patch.b"] = w["patch_embed.proj.bias"]
    new["freqs"] = w["pos_frequencies"]
    put("clock_1", "time_embed.timestep_embedder.linear_1")
    put("clock_2", "time_embed.timestep_embedder.linear_2")
    put("pool_q", "time_embed.pooler.to_q")
    put_halves(("pool_k", "pool_v"), "time_embed.pooler.to_kv")
    k, v = np.split(w["time_embed.pooler.to_kv.bias"], 2)
    new["pool_k.b"], new["pool_v.b"] = (v, k) if bug == "pool_biases_exchanged" else (k, v)
    put("pool_out", "time_embed.pooler.to_out")
    put("caption", "time_embed.caption_proj")
    for i in range(LAYERS):
        old, last = f"transformer_blocks.{i}", i == LAYERS - 1
        order = "kqv" if bug == "keys_before_queries" and i == 1 else "qkv"
        put(f"vis_qkv_{i}", *(f"{old}.attn1.to_{x}" for x in order))
        put(f"txt_q_{i}", f"{old}.attn1.add_q_proj")
        put(f"txt_kv_{i}", f"{old}.attn1.add_k_proj", f"{old}.attn1.add_v_proj")
        put(f"vis_out_{i}", f"{old}.attn1.to_out.0")
        for x in "qk":
            new[f"vis_{x}n_{i}.g"] = w[f"{old}.attn1.norm_{x}.weight"]
            new[f"txt_{x}n_{i}.g"] = w[f"{old}.attn1.norm_added_{x}.weight"]
        put(f"vis_mod_{i}", f"{old}.norm1.linear")
        put_halves((f"vis_up_{i}", f"vis_gate_{i}"), f"{old}.ff.net.0.proj")
        put(f"vis_down_{i}", f"{old}.ff.net.2")
        if last:
            put(f"txt_mod_{i}", f"{old}.norm1_context.linear_1")
            continue
        put(f"txt_mod_{i}", f"{old}.norm1_context.linear")
        put(f"txt_out_{i}", f"{old}.attn1.to_add_out")
        halves = (f"txt_up_{i}", f"txt_gate_{i}")
        if bug == "text_gate_is_first_half" and i == 0:
            halves = (f"txt_gate_{i}", f"txt_up_{i}")
        put_halves(halves, f"{old}.ff_context.net.0.proj")
        put(f"txt_down_{i}", f"{old}.ff_context.net.2")
    put("final_mod", "norm_out.linear")
    put("final_out", "proj_out")
    if bug == "text_k_norm_is_q_norm":
        new["txt_kn_1.g"] = new["txt_qn_1.g"]
    if bug == "attention_out_not_transposed":
        new["vis_out_1.w"] = new["vis_out_1.w"].T.copy()
    if bug == "attention_out_bias_missing":
        del new["vis_out_2.b"]
    if bug == "text_modulation_of_other_layer":
        for end in "wb":
            new[f"txt_mod_1.{end}"] = new[f"txt_mod_0.{end}"]
    if bug == "clock_stored_float16":
        new["clock_2.w"] = new["clock_2.w"].astype(np.float16).astype(np.float32)
    return new


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


class Asymm:
    """The forward pass; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, slot: str = "out", kind: str = "activation") -> Array:
        y = x if self.dtype == "float32" else x.astype(self.dtype)
        taps.tap(name, y, slot=slot, kind=kind)
        return x

    def lin(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.w"]
        if f"{name}.b" in self.p:
            y = y + self.p[f"{name}.b"]
        return self.r(y)

    def rms(self, x: Array, factor: Array | float = 1.0) -> Array:
        """Without weights, and with a factor before the rounding."""
        eps = np.float32(1e-5 if self.bug == "norm_eps" else 1e-6)
        if self.bug == "norms_centered":
            x = x - x.mean(-1, keepdims=True)
        return self.r(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * factor)

    def head_norm(self, name: str, x: Array) -> Array:
        """Of (tokens, heads, channels)."""
        axes = (-2, -1) if self.bug == "qk_norm_over_heads" else -1
        root = np.sqrt((x * x).mean(axes, keepdims=True) + np.float32(1e-5))
        return self.r(x / root * self.p[f"{name}.g"])

    def clock(self, t: float) -> Array:
        half = WAVE // 2
        exponents = np.float32(-np.log(10000)) * np.arange(half, dtype=np.float32)
        divisor = half - 1 if self.bug == "time_frequency_shift" else half
        a = np.float32(t) * np.exp(exponents / np.float32(divisor))
        x = self.r(np.concatenate([np.cos(a), np.sin(a)]))
        x = self.r(silu(self.tap("clock_1", self.lin("clock_1", x))))
        return self.tap("clock_2", self.lin("clock_2", x))

    def pool(self, text: Array, mask: Array) -> Array:
        """Attention of the mean of the text's tokens to itself and to them."""
        bug = self.bug
        seen = np.ones_like(mask) if bug == "pool_mean_of_padding_too" else mask
        share = self.r(seen / seen.sum())
        mean = self.r(self.r(text * share[:, None]).sum(0))
        mean = self.tap("pool_mean", text[0] if bug == "pool_query_first_token" else mean)
        x = np.concatenate([mean[None], text])
        seen = np.concatenate([[True], mask])
        if bug == "pool_sees_padding":
            seen[:] = True
        if bug == "pool_without_mean_key":
            seen[0] = False
        q = self.lin("pool_q", mean).reshape(POOL_HEADS, -1)
        k, v = (self.lin(f"pool_{s}", x).reshape(TOKENS + 1, POOL_HEADS, -1) for s in "kv")
        scores = np.einsum("hd,khd->hk", q, k) * np.float32(q.shape[-1] ** -0.5)
        scores = np.where(seen, scores, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y = self.r(np.einsum("hk,khd->hd", e / e.sum(-1, keepdims=True), v)).reshape(-1)
        return self.tap("pool_out", self.lin("pool_out", y))

    def rope(self) -> tuple[Array, Array]:
        """Cosines and sines of (frames * places, heads, half of a head's channels)."""
        bug = self.bug
        scale = np.sqrt(AREA / PLACES)
        if bug == "positions_without_area":
            scale = 1.0

        def centres(n: int) -> Array:
            edges = np.linspace(-n * scale / 2, n * scale / 2, n + 1).astype(np.float32)
            if bug == "positions_at_edges":
                return edges[:-1]
            return (edges[:-1] + edges[1:]) / 2

        t = np.arange(FRAMES, dtype=np.float32)
        if bug == "frames_from_one":
            t = t + 1
        grid = np.meshgrid(t, centres(HIGH), centres(WIDE), indexing="ij")
        if bug == "rows_and_columns_exchanged":
            grid = [grid[0], grid[2], grid[1]]
        where = np.stack(grid, -1).reshape(-1, 3)
        table = self.p["freqs"]
        if bug == "frequencies_heads_first":
            table = table.reshape(HEADS, 3, -1).swapaxes(0, 1)
        if bug == "frequencies_of_first_head":
            table = np.repeat(table[:, :1], HEADS, 1)
        a = np.einsum("na,ahf->nhf", where, table).astype(np.float32)
        cos, sin = np.cos(a), np.sin(a)
        if bug == "rope_tables_float16":
            cos, sin = (y.astype(np.float16).astype(np.float32) for y in (cos, sin))
        taps.tap("rope_cos", cos)
        taps.tap("rope_sin", sin)
        return cos, sin

    def rotate(self, x: Array, table: tuple[Array, Array], key: bool = False) -> Array:
        cos, sin = table
        if self.bug == "keys_rotated_back" and key:
            sin = -sin
        if self.bug == "rope_halves":
            a, b = np.split(x, 2, -1)
        else:
            a, b = x[..., ::2], x[..., 1::2]
        a, b = self.r(a * cos - b * sin), self.r(a * sin + b * cos)
        if self.bug == "rope_halves":
            return np.concatenate([a, b], -1)
        return np.stack([a, b], -1).reshape(x.shape)

    def attention(self, i: int, vis: Array, txt: Array, mask: Array) -> tuple[Array, Array]:
        """Both streams, the video first; padding gets zeros."""
        bug, n = self.bug, FRAMES * PLACES
        flat = vis.reshape(n, WIDTH)
        qkv = self.tap(f"vis_qkv_{i}", self.lin(f"vis_qkv_{i}", flat))
        q, k, v = qkv.reshape(n, 3, HEADS, HEAD).transpose(1, 0, 2, 3)
        tq = self.tap(f"txt_q_{i}", self.lin(f"txt_q_{i}", txt)).reshape(TOKENS, HEADS, HEAD)
        tkv = self.tap(f"txt_kv_{i}", self.lin(f"txt_kv_{i}", txt))
        tk, tv = tkv.reshape(TOKENS, 2, HEADS, HEAD).transpose(1, 0, 2, 3)
        if bug == "qk_norm_after_rope":
            q = self.head_norm(f"vis_qn_{i}", self.rotate(q, self.table))
            k = self.head_norm(f"vis_kn_{i}", self.rotate(k, self.table, True))
        else:
            q = self.rotate(self.head_norm(f"vis_qn_{i}", q), self.table)
            k = self.rotate(self.head_norm(f"vis_kn_{i}", k), self.table, True)
        tq = self.head_norm(f"txt_qn_{i}", tq)
        if not (bug == "text_keys_not_normed" and i == 0):
            tk = self.head_norm(f"txt_kn_{i}", tk)
        self.tap(f"vis_qr_{i}", q)
        self.tap(f"vis_kr_{i}", k)
        q, k, v = (np.concatenate(y) for y in ((q, tq), (k, tk), (v, tv)))
        seen = np.concatenate([np.ones(n, bool), mask])
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(HEAD**-0.5)
        if bug != "padding_attended":
            scores = np.where(seen, scores, np.float32(-np.inf))
        if bug == "scores_float16" and i == 2:
            scores = scores.astype(np.float16).astype(np.float32)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), v)
        y = self.tap(f"mix_{i}", self.r(y * seen[:, None, None]).reshape(len(seen), WIDTH))
        if bug == "result_split_text_first" and i == 1:
            return self.lin(f"vis_out_{i}", y[TOKENS:]).reshape(vis.shape), y[:TOKENS]
        out = self.tap(f"vis_out_{i}", self.lin(f"vis_out_{i}", y[:n]))
        return out.reshape(vis.shape), y[n:]

    def chunks(self, name: str, c: Array) -> list[Array]:
        """Scale and gate of attention, scale and gate of the MLP."""
        c = c if self.bug == "modulation_without_silu" else self.r(silu(c))
        y = self.tap(name, self.lin(name, c))
        scale_a, gate_a, scale_m, gate_m = np.split(y, 4)
        if self.bug == "chunks_scales_first":
            gate_a, scale_m = scale_m, gate_a
        if self.bug == "gates_without_tanh":
            return [scale_a, gate_a, scale_m, gate_m]
        return [scale_a, self.r(np.tanh(gate_a)), scale_m, self.r(np.tanh(gate_m))]

    def mlp(self, s: str, i: int, x: Array) -> Array:
        up, gate = self.lin(f"{s}_up_{i}", x), self.lin(f"{s}_gate_{i}", x)
        if self.bug == "video_mlp_gelu" and s == "vis":
            act = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            act = silu(gate)
        h = self.tap(f"{s}_hidden_{i}", self.r(up * self.r(act.astype(np.float32))))
        return self.tap(f"{s}_down_{i}", self.lin(f"{s}_down_{i}", h))

    def add(self, s: str, i: int, x: Array, attended: Array, m: list[Array]) -> Array:
        """Attention's result and the MLP's, normed and gated, added to a stream."""
        bug = self.bug
        if bug == "post_norm_missing" and s == "vis" and i == 0:
            y = self.r(x + self.r(attended * m[1]))
        elif bug == "gate_before_post_norm" and s == "vis" and i == 2:
            y = self.r(x + self.rms(self.r(attended * m[1])))
        else:
            y = self.r(x + self.rms(attended, m[1]))
        one = 0 if bug == "text_mlp_scale_without_one" and s == "txt" else 1
        scale = m[0] if bug == "mlp_scale_of_attention" and s == "vis" and i == 1 else m[2]
        h = self.mlp(s, i, self.rms(x if bug == "mlp_beside" and i == 0 else y, one + scale))
        start = x if bug == "text_attention_lost" and s == "txt" and i == 1 else y
        return self.tap(f"{s}_{i}", self.r(start + self.rms(h, m[3])))

    def layer(self, i: int, vis: Array, txt: Array, c: Array, mask: Array) -> tuple[Array, Array]:
        bug = self.bug
        mv = self.chunks(f"vis_mod_{i}", c)
        nv = self.rms(vis, 1 + mv[0])
        if i == LAYERS - 1:
            scale = self.tap(f"txt_mod_{i}", self.lin(f"txt_mod_{i}", self.r(silu(c))))
            nt = self.rms(txt, 1.0 if bug == "last_text_scale_missing" else 1 + scale)
            return self.add("vis", i, vis, self.attention(i, nv, nt, mask)[0], mv), txt
        mt = self.chunks(f"txt_mod_{i}", c)
        nt = self.rms(txt, 1 + mt[0])
        yv, yt = self.attention(i, nv, nt, mask)
        yt = self.tap(f"txt_out_{i}", self.lin(f"txt_out_{i}", yt))
        return self.add("vis", i, vis, yv, mv), self.add("txt", i, txt, yt, mt)

    def patches(self, x: Array) -> Array:
        """(frames, places, patch) of (channels, frames, rows, columns)."""
        x = x.reshape(CHANNELS, FRAMES, HIGH, PATCH, WIDE, PATCH)
        order = (1, 4, 2, 3, 5, 0) if self.bug == "places_by_column" else (1, 2, 4, 3, 5, 0)
        return x.transpose(order).reshape(FRAMES, PLACES, -1)

    def video(self, x: Array) -> Array:
        if self.bug == "output_channels_first":
            x = x.reshape(FRAMES, HIGH, WIDE, CHANNELS, PATCH, PATCH).transpose(3, 0, 1, 4, 2, 5)
        else:
            x = x.reshape(FRAMES, HIGH, WIDE, PATCH, PATCH, CHANNELS).transpose(5, 0, 1, 3, 2, 4)
        return x.reshape(CHANNELS, FRAMES, ROWS, COLUMNS)

    def __call__(self, x: Array, t: float, text: Array, mask: Array) -> Array:
        bug = self.bug
        time = self.clock(t)
        c = self.r(time + self.pool(text, mask))
        if bug == "pooled_text_not_added":
            c = time
        c = self.tap("cond", c)
        txt = self.tap("caption", self.lin("caption", text))
        self.table = self.rope()
        patches = self.tap("patch", self.patches(x), slot="in.0")
        vis = self.tap("patch", self.lin("patch", patches))
        for i in range(LAYERS):
            vis, txt = self.layer(i, vis, txt, c, mask)
        mod = c if bug == "final_without_silu" else self.r(silu(c))
        scale, shift = np.split(self.tap("final_mod", self.lin("final_mod", mod)), 2)
        y = vis - vis.mean(-1, keepdims=True)
        y = self.r(y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(1e-6)))
        y = self.tap("final_norm", self.r(self.r(y * self.r(1 + scale)) + shift))
        y = self.tap("final_out", self.lin("final_out", y))
        return self.tap("velocity", self.video(y))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Asymm(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    x, text = (net.r(value(f"pipeline/{name}")[0]) for name in ("noise", "prompt_embeds"))
    mask = value("pipeline/prompt_attention_mask")[0].astype(bool)
    if bug == "mask_one_token_short":
        mask[VALID - 1] = False
    time = float(value("pipeline/timestep")[0])
    if bug == "time_truncated":
        time = float(int(time))
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("given_*", "patch", "caption", "cond", "vis_?", "txt_?", "final_out", "velocity")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("given_time", np.array([time], np.float32), kind="schedule")
        taps.tap("given_mask", mask, kind="input")
        net.tap("given_noise", x, kind="input")
        net.tap("given_text", text, kind="input")
        net(x, time, text, mask)


NO_COUNTERPART: tuple[str, ...] = (r"^cond$", r"^pool_mean$")

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers"
POSITION = r"position|coordinate|\bgrid"
BUGS = (
    Bug(
        "patch_kernel_channels_first",
        "The patch kernel's rows are in the order (channel, row, column); patches are not.",
        (LOADED, r"layout|channel|transpos", SWAPPED),
        "weights",
    ),
    Bug(
        "pool_biases_exchanged",
        "The pooler's k has the bias of v, and v that of k.",
        (LOADED, r"\bbias", SWAPPED),
        "weights",
    ),
    Bug(
        "keys_before_queries",
        "The fused product of layer 1 was joined as k, q, v.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "text_gate_is_first_half",
        "The text's first MLP takes the first half of the fused weight as the gate.",
        (LOADED, SWAPPED, r"half|halves|gate|silu"),
        "weights",
    ),
    Bug(
        "text_k_norm_is_q_norm",
        "The text's keys of layer 1 have the norm of its queries.",
        (
            LOADED,
            r"dupl|another|same (norm|param)",
        ),
        "weights",
    ),
    Bug(
        "attention_out_not_transposed",
        "The square weight after layer 1's attention is not transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "attention_out_bias_missing",
        "The last layer's attention lacks its output bias.",
        (r"\bbias", LOADED),
        "weights",
    ),
    Bug(
        "text_modulation_of_other_layer",
        "The text of layer 1 is modulated with layer 0's weights.",
        (LOADED, r"transformer_blocks\.0|another (layer|block)|other (layer|block)|dupl"),
        "weights",
    ),
    Bug(
        "clock_stored_float16",
        "The second time layer's weight was stored in float16.",
        (LOADED, r"f16|float16|\bhalf\b|fp16|precision|round"),
        "weights",
    ),
    Bug(
        "mask_one_token_short",
        "The mask lacks the last valid token.",
        (r"mask|padd|off.by.one",),
        "inputs",
    ),
    Bug(
        "time_truncated",
        "The timestep is truncated to an integer.",
        (r"timestep|\btime\b|integer|truncat|\bint\b|round|fraction",),
        "schedule",
    ),
    Bug("norm_eps", "The norms without weights have eps 1e-5.", (r"\beps",)),
    Bug(
        "norms_centered",
        "The norms without weights subtract the mean.",
        (r"\bmean|layer ?norm|cent(er|re)|subtract",),
    ),
    Bug(
        "qk_norm_over_heads",
        "The norms of q and k take their mean over heads too.",
        (r"heads?\b|\bax[ei]s\b|all channels|whole|last dim",),
    ),
    Bug(
        "qk_norm_after_rope",
        "The video's q and k are normed after RoPE.",
        (
            r"(norm|rope|rotat\w*|rotary)\b.*(before|after|order)",
            r"(before|after).*(norm|rope|rotat|rotary)",
        ),
    ),
    Bug(
        "text_keys_not_normed",
        "The text's keys of layer 0 are not normed.",
        (
            r"norm.*(missing|skip|not (appl|run|used)|left out|lack|unused|never)",
            r"(missing|skip|\bno\b|without|lacks?).*norm|un-?normed|not normed",
        ),
    ),
    Bug(
        "time_frequency_shift",
        "Frequencies of the time divide by half - 1.",
        (r"frequenc|freq_shift|half|downscale|denominator|exponent|\bperiod",),
    ),
    Bug(
        "pool_mean_of_padding_too",
        "The pooler's mean is of all tokens, with padding.",
        (r"mask|padd|mean of (all|every)|average",),
    ),
    Bug("pool_sees_padding", "The pooler attends to padding.", (r"mask|padd",)),
    Bug(
        "pool_query_first_token",
        "The pooler's query is the first token, not the mean.",
        (r"\bmean\b|average|first token|token 0|other (token|query)",),
    ),
    Bug(
        "pool_without_mean_key",
        "The pooler does not attend to the mean itself.",
        (r"mask|\bmean\b|average|first (token|key)|itself|key (fewer|less|missing)",),
    ),
    Bug(
        "pooled_text_not_added",
        "The pooled text is not added to the time.",
        (
            r"(not|never) (added|used)|missing (term|summand|addend|input)|\bpooled\b",
            r"without the text|(time|timestep) (alone|only)",
        ),
    ),
    Bug(
        "positions_without_area",
        "Positions are not scaled by the root of the base area.",
        (r"area|\bscal|factor", POSITION),
    ),
    Bug(
        "positions_at_edges",
        "Positions are edges of the grid's cells, not centres.",
        (
            r"cent(re|er)s?\b|edge|shift|offset",
            POSITION,
        ),
    ),
    Bug(
        "frames_from_one",
        "Frames are counted from 1.",
        (
            r"frame|off.by.one|begin|start|shift|offset",
            POSITION,
        ),
    ),
    Bug(
        "rows_and_columns_exchanged",
        "RoPE takes columns for rows.",
        (r"\bax[ei]s\b|rows?\b|column|height|width|transpos", SWAPPED, POSITION),
    ),
    Bug(
        "frequencies_heads_first",
        "RoPE's learned frequencies are reshaped to heads first.",
        (r"reshap|heads?\b|layout|transpos|\bax[ei]s\b|frequenc", SWAPPED),
    ),
    Bug(
        "frequencies_of_first_head",
        "All heads use the first one's frequencies.",
        (r"\bheads?\b|frequenc|broadcast|shared",),
    ),
    Bug(
        "rope_tables_float16",
        "RoPE's tables are rounded to float16.",
        (r"f16|float16|\bhalf\b|fp16|precision|round|\bcast",),
    ),
    Bug(
        "keys_rotated_back",
        "Keys are rotated the other way.",
        (r"sign|conj|negat|direction|opposite|invers|backward|other way",),
    ),
    Bug("rope_halves", "RoPE pairs halves.", (r"half|halves|interleav|neighbo|adjacent|pair",)),
    Bug("padding_attended", "The joint attention has no mask.", (r"mask|padd",)),
    Bug(
        "scores_float16",
        "The last layer's scores are float16.",
        (r"f16|float16|\bhalf\b|fp16|precision|round",),
    ),
    Bug(
        "result_split_text_first",
        "Layer 1 splits the attention's result as if the text came first.",
        (r"split|slice|offset|order|\broll|shift|concat|text (tokens )?(comes? )?(first|before)",),
    ),
    Bug(
        "modulation_without_silu",
        "Modulations lack SiLU.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "chunks_scales_first",
        "Modulations are taken as scale, scale, gate, gate.",
        (r"chunk|split", SWAPPED),
    ),
    Bug("gates_without_tanh", "Gates are used without tanh.", (r"tanh",)),
    Bug(
        "video_mlp_gelu",
        "The video's MLPs use GELU.",
        (r"gelu|silu|swish|activation",),
    ),
    Bug(
        "post_norm_missing",
        "Layer 0 does not norm the video's attention before its gate.",
        (
            r"norm.*(missing|skip|not (appl|run|used)|left out|lack|unused|never)",
            r"(missing|skip|\bno\b|without|lacks?).*norm|un-?normed|not normed",
        ),
    ),
    Bug(
        "gate_before_post_norm",
        "The last layer gates the attention before its norm.",
        (r"gate.*(before|inside|norm|order|place)|before.*norm|norm.*(before|after|order|place)",),
    ),
    Bug(
        "text_mlp_scale_without_one",
        "The text's MLPs multiply by scale, not 1 + scale.",
        (r"1 ?\+|\+ ?1|plus one|\bone\b",),
    ),
    Bug(
        "mlp_scale_of_attention",
        "Layer 1's MLP of the video has the scale of attention.",
        (r"chunk|\bscale|split|modulation|wrong part",),
    ),
    Bug(
        "mlp_beside",
        "Layer 0's MLPs read the stream before attention.",
        (
            r"parallel|beside|residual|(before|without) (the )?att|input of (the )?(block|layer)",
            r"(block|layer)'?s? (own )?input|att\w* .*(missing|skip|not added)",
        ),
    ),
    Bug(
        "text_attention_lost",
        "Layer 1 adds the text's MLP to the block's input.",
        (
            r"residual|skip connection|block'?s input|att\w* .*(missing|not added|left out|lost)",
            r"(without|before) (the )?attention|input of (the )?(block|layer)",
        ),
    ),
    Bug(
        "last_text_scale_missing",
        "The last layer's text is normed without its scale.",
        (r"\bscale\b|modulat|factor|multipl",),
    ),
    Bug(
        "places_by_column",
        "Tokens of a frame go down columns, not along rows.",
        (r"\brows?\b|column|transpos|layout|token", SWAPPED),
    ),
    Bug(
        "output_channels_first",
        "The result's patches are read as channels, rows, columns.",
        (r"channel|patch|transpos|layout|\bax[ei]s\b", SWAPPED),
    ),
    Bug("final_without_silu", "The last modulation lacks SiLU.", (r"silu|swish|activation",)),
)
