"""Wan's text-to-video transformer in NumPy: no batch axis, latents and patches with channels last.

The architecture is that of WanModel in the authors' repository (Wan-Video/Wan2.1, wan/modules),
whose names the values and weights have; diffusers' WanTransformer3DModel is the reference. Each
step calls the network with the prompt, then with the negative prompt, and ends with an Euler step
of flow matching.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

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

NAME = "wan_t2v"
HEADS, HEAD, LAYERS, FFN, TEXT, TOKENS, WAVE = 2, 16, 3, 56, 20, 9, 24
WIDTH, CHANNELS, PATCH = HEADS * HEAD, 4, 2
FRAMES, ROWS, COLUMNS = 3, 8, 10
HIGH, WIDE = ROWS // PATCH, COLUMNS // PATCH
PLACES = FRAMES * HIGH * WIDE
STEPS, SHIFT, GUIDANCE = 3, 5.0, 3.5
VALID = (6, 3)  # tokens of the prompt and of the negative prompt; features after them are zeros


def reference(folder: Path, dtype: str) -> None:
    """The loop of WanPipeline for one video, from embeddings to latents."""
    config: dict[str, Any] = dict(patch_size=(1, PATCH, PATCH), num_attention_heads=HEADS)
    config |= dict(attention_head_dim=HEAD, in_channels=CHANNELS, out_channels=CHANNELS)
    config |= dict(text_dim=TEXT, freq_dim=WAVE, ffn_dim=FFN, num_layers=LAYERS)
    config |= dict(rope_max_seq_len=32)
    model = randomised(lambda: WanTransformer3DModel(**config), 71)
    for name, parameter in model.named_parameters():
        if "scale_shift_table" in name or name.endswith("to_out.0.weight"):
            parameter.mul_(2)  # each gate and each attention matters
        if name.endswith(("norm_q.weight", "norm_k.weight")):
            parameter.mul_(1 + noise(9, WIDTH) / 4)
    model = saved(model, folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        scheduler.set_timesteps(sigmas=np.linspace(1, 0, STEPS + 1)[:-1].tolist())
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        texts = noise(7, 2, TOKENS, TEXT)
        for text, valid in zip(texts, VALID, strict=True):
            text[valid:] = 0
        prompt, negative = texts.to(model.dtype).split(1)
        latents = noise(8, 1, CHANNELS, FRAMES, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/prompt_embeds", prompt, kind="input")
        recorder.record("pipeline/negative_prompt_embeds", negative, kind="input")
        recorder.record("pipeline/noise", latents, kind="input")
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            cond = model(latents, t.expand(1), prompt, return_dict=False)[0]
            uncond = model(latents, t.expand(1), negative, return_dict=False)[0]
            predicted = uncond + GUIDANCE * (cond - uncond)
            recorder.record("pipeline/noise_pred", predicted)
            latents = scheduler.step(predicted, t, latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the names of the original; matrices stay (out, in)."""
    new: dict[str, Array] = {}

    def put(name: str, old: str) -> None:
        new[f"{name}.weight"], new[f"{name}.bias"] = w[f"{old}.weight"], w[f"{old}.bias"]

    kernel = w["patch_embedding.weight"]  # (width, channels, frames, rows, columns)
    if bug != "patch_kernel_channels_first":
        kernel = kernel.transpose(0, 2, 3, 4, 1)
    new["patch_embedding.weight"] = kernel.reshape(WIDTH, -1).copy()
    new["patch_embedding.bias"] = w["patch_embedding.bias"]
    for name, old in (
        ("time_embedding.0", "time_embedder.linear_1"),
        ("time_embedding.2", "time_embedder.linear_2"),
        ("time_projection.1", "time_proj"),
        ("text_embedding.0", "text_embedder.linear_1"),
        ("text_embedding.2", "text_embedder.linear_2"),
    ):
        put(name, f"condition_embedder.{old}")
    for i in range(LAYERS):
        block = f"blocks.{i}"
        for name, old in (("self_attn", "attn1"), ("cross_attn", "attn2")):
            for x in "qkv":
                put(f"{block}.{name}.{x}", f"{block}.{old}.to_{x}")
            put(f"{block}.{name}.o", f"{block}.{old}.to_out.0")
            for x in ("norm_q", "norm_k"):
                new[f"{block}.{name}.{x}.weight"] = w[f"{block}.{old}.{x}.weight"]
        put(f"{block}.norm3", f"{block}.norm2")  # the original's third norm is the second here
        put(f"{block}.ffn.0", f"{block}.ffn.net.0.proj")
        put(f"{block}.ffn.2", f"{block}.ffn.net.2")
        new[f"{block}.modulation"] = w[f"{block}.scale_shift_table"][0]
    put("head.head", "proj_out")
    new["head.modulation"] = w["scale_shift_table"][0]
    if bug == "cross_keys_are_values":
        for end in ("weight", "bias"):
            k, v = (f"blocks.1.cross_attn.{x}.{end}" for x in "kv")
            new[k], new[v] = new[v], new[k]
    if bug == "key_norm_is_query_norm":
        new["blocks.0.self_attn.norm_k.weight"] = new["blocks.0.self_attn.norm_q.weight"]
    if bug == "modulation_of_block_before":
        new["blocks.2.modulation"] = new["blocks.1.modulation"]
    if bug == "ffn_bias_missing":
        new["blocks.1.ffn.2.bias"] = np.zeros_like(new["blocks.1.ffn.2.bias"])
    return new


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array, exact: bool = False) -> Array:
    if exact:
        erf = np.vectorize(math.erf, otypes=[np.float32])(x / np.float32(math.sqrt(2)))
        return 0.5 * x * (1 + erf)
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3)))


class Wan:
    """The forward pass; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}
        self.rope = self.rope_table()

    def tap(self, name: str, x: Array, slot: str = "out", kind: str = "activation") -> Array:
        """`x` is rounded already where the reference keeps the precision of the run."""
        taps.tap(name, x.astype(self.dtype), slot=slot, kind=kind)
        return x

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]
        return self.tap(name, self.r(y))

    def layer_norm(self, x: Array) -> Array:
        y = x - x.mean(-1, keepdims=True)
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(1e-6))

    def rms_norm(self, name: str, x: Array) -> Array:
        """Of q or k, over the whole width."""
        weight = self.p[f"{name}.weight"]
        if self.bug == "qk_norm_per_head":
            x, weight = x.reshape(-1, HEADS, HEAD), weight.reshape(HEADS, HEAD)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6)) * weight
        return self.tap(name, self.r(y.reshape(-1, WIDTH)))

    def sinusoid(self, t: float) -> Array:
        half = WAVE // 2
        exponents = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32)
        angles = np.float32(t) * np.exp(exponents / np.float32(half))
        if self.bug == "time_angles_float16":
            angles = angles.astype(np.float16).astype(np.float32)
        return self.tap("sinusoid", self.r(np.concatenate([np.cos(angles), np.sin(angles)])))

    def time(self, t: float) -> tuple[Array, Array]:
        """The embedding of the time, and the six rows that all blocks share."""
        x = self.linear("time_embedding.0", self.sinusoid(t))
        x = self.tap("time_embedding.1", self.r(silu(x)))
        e = self.linear("time_embedding.2", x)
        x = e if self.bug == "time_projection_without_silu" else self.r(silu(e))
        self.tap("time_projection.1", x, slot="in.0")
        return e, self.linear("time_projection.1", x).reshape(6, WIDTH)

    def text(self, context: Array) -> Array:
        x = self.linear("text_embedding.0", context)
        x = self.r(gelu(x, exact=self.bug == "text_gelu_exact"))
        return self.linear("text_embedding.2", self.tap("text_embedding.1", x))

    def rope_table(self) -> tuple[Array, Array]:
        """Cosines and sines of (tokens, half of a head's channels): frames, rows, columns."""
        bug, third = self.bug, 2 * (HEAD // 6)
        sizes = (HEAD - 2 * third, third, third)
        grid = np.indices((FRAMES, HIGH, WIDE)).reshape(3, -1)
        if bug == "rope_rows_columns_exchanged":
            grid = grid[[0, 2, 1]]
        parts: list[Array] = []
        for where, size in zip(grid, sizes, strict=True):
            whole = HEAD if bug == "rope_exponents_of_head" else size
            frequencies = 10000.0 ** (-np.arange(0, size, 2) / whole)
            parts.append(where[:, None] * frequencies)
        angles = np.concatenate(parts, -1)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rope_apply(self, x: Array) -> Array:
        """Turns pairs of neighbouring channels of (tokens, heads, channels)."""
        cos, sin = (y[:, None] for y in self.rope)
        a, b = x[..., ::2], x[..., 1::2]
        return self.r(np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape))

    def attention(self, name: str, x: Array, context: Array | None, valid: int) -> Array:
        """Of tokens to themselves, with RoPE, or to the text, without it and without a mask."""
        bug = self.bug
        self.tap(name, x, slot="in.0")
        source = x if context is None else context
        q = self.rms_norm(f"{name}.norm_q", self.linear(f"{name}.q", x))
        k = self.rms_norm(f"{name}.norm_k", self.linear(f"{name}.k", source))
        v = self.linear(f"{name}.v", source)
        q, k, v = (y.reshape(-1, HEADS, HEAD) for y in (q, k, v))
        if context is None:
            q = self.tap(f"{name}.rope_q", self.rope_apply(q))
            k = self.tap(f"{name}.rope_k", self.rope_apply(k))
        elif bug == "cross_queries_rotated":
            q = self.rope_apply(q)
        width = WIDTH if bug == "attention_scale_of_width" else HEAD
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(width**-0.5)
        if bug == "text_padding_masked" and context is not None:
            scores[..., valid:] = -np.inf
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), v)
        y = self.tap(f"{name}.attention", self.r(y).reshape(-1, WIDTH))
        return self.linear(f"{name}.o", y)

    def block(self, i: int, x: Array, e0: Array, context: Array, valid: int) -> Array:
        bug, name = self.bug, f"blocks.{i}"
        e = self.tap(f"{name}.e", self.p[f"{name}.modulation"] + e0)
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = e
        if bug == "ffn_scale_before_shift":
            shift_f, scale_f = scale_f, shift_f
        h = self.r(self.tap(f"{name}.norm1", self.layer_norm(x)) * (1 + scale_a) + shift_a)
        y = self.attention(f"{name}.self_attn", h, None, valid)
        kept = h if bug == "residual_of_modulated" and i == 1 else x
        x = self.r(kept + y * gate_a)
        h = self.layer_norm(x)
        if bug != "cross_norm_without_weights":
            h = h * self.p[f"{name}.norm3.weight"] + self.p[f"{name}.norm3.bias"]
        h = self.tap(f"{name}.norm3", self.r(h))
        y = self.attention(f"{name}.cross_attn", h, context, valid)
        x = self.r(x + (y * gate_a if bug == "cross_attention_gated" else y))
        h = self.tap(f"{name}.norm2", self.layer_norm(x))
        h = self.linear(f"{name}.ffn.0", self.r(h * (1 + scale_f) + shift_f))
        h = self.linear(f"{name}.ffn.2", self.tap(f"{name}.ffn.1", self.r(gelu(h))))
        return self.tap(name, self.r(x + h * gate_f))

    def head(self, x: Array, e: Array) -> Array:
        if self.bug == "head_time_activated":
            e = silu(e)
        shift, scale = self.tap("head.e", self.r(self.p["head.modulation"] + e))
        y = self.tap("head.norm", self.layer_norm(x))
        return self.linear("head.head", self.r(y * (1 + scale) + shift))

    def patches(self, x: Array) -> Array:
        """(tokens, patch) of (frames, rows, columns, channels)."""
        x = x.reshape(FRAMES, HIGH, PATCH, WIDE, PATCH, CHANNELS)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(PLACES, -1)

    def unpatchify(self, x: Array) -> Array:
        if self.bug == "unpatchify_channels_first":
            x = x.reshape(FRAMES, HIGH, WIDE, CHANNELS, PATCH, PATCH).transpose(0, 1, 4, 2, 5, 3)
        else:
            x = x.reshape(FRAMES, HIGH, WIDE, PATCH, PATCH, CHANNELS).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(FRAMES, ROWS, COLUMNS, CHANNELS)

    def __call__(self, x: Array, t: float, context: Array, valid: int) -> Array:
        taps.tap("freqs_cos", self.rope[0])
        taps.tap("freqs_sin", self.rope[1])
        x = self.linear("patch_embedding", self.patches(x))
        e, e0 = self.time(t)
        context = self.text(context)
        for i in range(LAYERS):
            x = self.block(i, x, e0, context, valid)
        return self.tap("model", self.unpatchify(self.head(x, e)))


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Timesteps, and sigmas with the last one, 0."""
    shift = 3.0 if bug == "shift_of_small_video" else SHIFT
    sigmas = np.linspace(1, 0, STEPS + 1).astype(np.float32)
    sigmas = (shift * sigmas / (1 + (shift - 1) * sigmas)).astype(np.float32)
    times = sigmas[:-1] * np.float32(1000)
    return np.trunc(times) if bug == "timesteps_integer" else times, sigmas


def contexts(prompts: Sequence[Array], bug: str | None) -> list[Array]:
    """Features of both prompts: cut to their lengths, then filled with zeros."""
    result: list[Array] = []
    for text, valid in zip(prompts, VALID, strict=True):
        n = valid - 1 if bug == "last_token_cut" else valid
        result.append(np.concatenate([text[:n], np.zeros((TOKENS - n, TEXT), np.float32)]))
    return result


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Wan(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    r = net.r
    names = ("prompt_embeds", "negative_prompt_embeds")
    prompt, negative = contexts([r(value(f"pipeline/{name}")[0]) for name in names], bug)
    x = r(value("pipeline/noise")[0].transpose(1, 2, 3, 0))
    times, sigmas = schedule(bug)
    kept = {k: v.astype(dtype) for k, v in net.p.items()} if weights else None
    blocks = ("context*", "noise", "timesteps", "sigmas", "patch_embedding", "blocks.?")
    blocks += ("head.head", "model", "guided", "latent")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("timesteps", times, kind="schedule")
        taps.tap("sigmas", sigmas, kind="schedule")
        net.tap("context", prompt, kind="input")
        net.tap("context_null", negative, kind="input")
        net.tap("noise", x, kind="input")
        for i, t in enumerate(times):
            taps.set_step(i)
            cond = net(x, float(t), prompt, VALID[0])
            uncond = net(x, float(t), negative, VALID[1])
            start = cond if bug == "guidance_from_prompt" else uncond
            guided = net.tap("guided", r(start + r(GUIDANCE * r(cond - uncond))))
            dt = sigmas[i + 1] - sigmas[i]
            if bug == "euler_even_steps":
                dt = np.float32(-1 / STEPS)
            x = net.tap("latent", r(x + dt * guided))


NO_COUNTERPART: tuple[str, ...] = (
    r"^blocks\.\d\.e$",  # table plus time: a sum inside a block
    r"^head\.e$",
    r"^freqs_(cos|sin)$",  # the reference has each number twice
)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos"
HALF = r"f16|float16|\bhalf\b|fp16|precision|round|\bcast"
SCHEDULE = r"schedule|sigma|timestep"
BUGS = (
    Bug(
        "patch_kernel_channels_first",
        "The patch kernel's inputs are in the order (channel, row, column); patches are not.",
        (LOADED, SWAPPED, r"layout|channel|\bax[ei]s\b|flatten|reshap"),
        "weights",
    ),
    Bug(
        "cross_keys_are_values",
        "Block 1's cross-attention has the weights of its values as keys, and the other way round.",
        (LOADED, SWAPPED, r"values?\b.*keys?\b|keys?\b.*values?\b"),
        "weights",
    ),
    Bug(
        "key_norm_is_query_norm",
        "Block 0's norm of keys has the weight of the norm of queries.",
        (LOADED, r"dupl|another|other norm|same (norm|param)", r"norm_q|quer(y|ies)"),
        "weights",
    ),
    Bug(
        "modulation_of_block_before",
        "Block 2 has the modulation table of block 1.",
        (LOADED, r"blocks\.1|(another|other|wrong|previous) (layer|block)|dupl|index"),
        "weights",
    ),
    Bug(
        "ffn_bias_missing",
        "The second linear layer of block 1's MLP has a bias of zeros.",
        (LOADED, r"\bbias|zero"),
        "weights",
    ),
    Bug(
        "last_token_cut",
        "The last token of each prompt is cut off and replaced by zeros.",
        (r"padd|mask|zero|off.by.one|truncat|\bcut\b", r"token|prompt|context|\btext\b|\binput"),
        "inputs",
    ),
    Bug(
        "timesteps_integer",
        "Timesteps are truncated to integers.",
        (r"integer|truncat|\bint\b|\bround|fraction|floor", SCHEDULE),
        "schedule",
    ),
    Bug(
        "shift_of_small_video",
        "The schedule is shifted by 3, not by 5.",
        (r"\bshift", SCHEDULE),
        "schedule",
    ),
    Bug(
        "time_angles_float16",
        "Angles of the timestep's sinusoid are rounded to float16.",
        (HALF,),
    ),
    Bug(
        "time_projection_without_silu",
        "The projection of the time lacks its SiLU.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "text_gelu_exact",
        "The text's MLP has GELU with erf, not with tanh.",
        (r"gelu|\berf\b|tanh|activation|approximat",),
    ),
    Bug(
        "qk_norm_per_head",
        "Norms of q and k take the mean of each head, not of the whole width.",
        (r"heads?\b|\bax[ei]s\b|whole|all channels|last dim|group", r"\bwidth\b"),
    ),
    Bug(
        "rope_rows_columns_exchanged",
        "RoPE takes columns for rows.",
        (r"\bax[ei]s\b|rows?\b|column|height|width", SWAPPED, r"position|coordinate|\bgrid"),
    ),
    Bug(
        "rope_exponents_of_head",
        "RoPE's exponents divide by the head's width, not by the axis's share of it.",
        (r"frequenc|exponent|theta|\bbase\b|wavelength|\bperiod", r"divi(de|sor)|denominator"),
    ),
    Bug(
        "cross_queries_rotated",
        "RoPE is applied to the queries of cross-attention too.",
        (r"\brope\b|rotat|rotary|position",),
    ),
    Bug(
        "attention_scale_of_width",
        "Attention divides by the root of the whole width, not of a head's.",
        (r"\bscal(e|ed|ing)\b|\broot\b|sqrt|temperature|softmax factor", r"head.?(dim|size|width)"),
    ),
    Bug(
        "text_padding_masked",
        "Cross-attention masks the padding of the text; the reference attends to it.",
        (r"mask|padd", r"(all|fewer) (keys|tokens)|ignor\w+ (some )?(keys|tokens)"),
    ),
    Bug(
        "ffn_scale_before_shift",
        "The MLP's modulation takes the shift as scale and the scale as shift.",
        (r"shift.*scale|scale.*shift|chunk|split", SWAPPED),
    ),
    Bug(
        "residual_of_modulated",
        "Block 1 adds attention to its normed and modulated input, not to the tokens.",
        (
            r"residual|skip connection|shortcut",
            r"(block|layer)'?s? (own )?input|input of (the )?(block|layer)",
            r"(add|sum)\w*.*(norm|modulat)|(norm|modulat)\w*.*(add|sum)",
        ),
    ),
    Bug(
        "cross_norm_without_weights",
        "The norm before cross-attention lacks its weight and bias.",
        (r"affine|\bweights?\b|\bbias|\bgain\b|gamma|elementwise|parameter",),
    ),
    Bug(
        "cross_attention_gated",
        "Cross-attention is multiplied by the gate of self-attention.",
        (r"\b(un)?gat(e|es|ed|ing)\b|modulat", r"factor|multipl|\bscal(e|ed|ing)\b"),
    ),
    Bug(
        "head_time_activated",
        "The head's modulation is of SiLU of the time's embedding.",
        (r"silu|swish|activation|activated",),
    ),
    Bug(
        "unpatchify_channels_first",
        "The result's patches are read as (channels, rows, columns).",
        (r"channel|patch|layout|\bax[ei]s\b|reshap", SWAPPED),
    ),
    Bug(
        "guidance_from_prompt",
        "Guidance starts from the prompt's prediction, so its scale is one more.",
        (
            r"guid|\bcfg\b",
            r"\buncond|negative|(starts|based) (from|on)|4\.5|scale (\+|plus) (1|one)",
        ),
    ),
    Bug(
        "euler_even_steps",
        "Steps of Euler have the size 1 / steps, not the difference of two sigmas.",
        (
            r"step.?size|\bdt\b|\bsize of (the|each) step|unshifted|uniform|even(ly)?\b|constant",
            r"sigma|euler|sampler|solver|\bstep of the (schedul|sampl)",
        ),
    ),
)
