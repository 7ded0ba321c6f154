"""Stable Diffusion 3.5's transformer in MLX, with guidance and skip-layer guidance for two steps.

Names are those of the original checkpoint (joint_blocks.N.x_block, .context_block); qkv is one
product. Latents are (batch, rows, columns, channels), and the joint attention has the text first.
"""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

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
from lydite.trace.arrays import to_numpy
from lydite.trace.torch_capture import record_modules

NAME = "sd35"
HEADS, HEAD, LAYERS, DUAL = 3, 8, 5, (0, 1, 2)
WIDTH, CHANNELS, PATCH, TABLE, BASE = HEADS * HEAD, 4, 2, 9, 16
ROWS, COLUMNS, TOKENS, TEXT, POOLED, WAVE = 10, 12, 7, 20, 28, 256
HIGH, WIDE = ROWS // PATCH, COLUMNS // PATCH
STEPS, SHIFT, GUIDANCE = 2, 3.0, 3.5
SKIPPED, SKIP_SCALE, SKIP_START, SKIP_STOP = (2,), 2.8, 0.01, 0.6


def made() -> SD3Transformer2DModel:
    """The model, with gates that let each block matter."""
    config: dict[str, Any] = dict(sample_size=BASE, patch_size=PATCH, in_channels=CHANNELS)
    config |= dict(num_layers=LAYERS, attention_head_dim=HEAD, num_attention_heads=HEADS)
    config |= dict(joint_attention_dim=TEXT, caption_projection_dim=WIDTH, out_channels=CHANNELS)
    config |= dict(pooled_projection_dim=POOLED, pos_embed_max_size=TABLE, qk_norm="rms_norm")
    model = SD3Transformer2DModel(**config, dual_attention_layers=DUAL)
    for name, parameter in model.named_parameters():
        if ".norm1" in name:
            parameter.data.mul_(3)
        if ".norm_q" in name or ".norm_k" in name:
            parameter.data.mul_(1.2)
    return model


def reference(folder: Path, dtype: str) -> None:
    """The loop of StableDiffusion3Pipeline; layers are skipped at the second step."""
    model = saved(randomised(made, 35), folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(sigmas=[1 - i / STEPS for i in range(STEPS)])
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
    ):
        x = noise(1, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        text, negative = (noise(i, 1, TOKENS, TEXT).to(model.dtype) for i in (2, 3))
        pooled, negative_pooled = (noise(i, 1, POOLED).to(model.dtype) for i in (4, 5))
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/negative_prompt_embeds", negative, kind="input")
        recorder.record("pipeline/pooled_prompt_embeds", pooled, kind="input")
        recorder.record("pipeline/negative_pooled_prompt_embeds", negative_pooled, kind="input")
        texts, both = torch.cat([negative, text]), torch.cat([negative_pooled, pooled])
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            out = model(torch.cat([x, x]), texts, both, t.expand(2), return_dict=False)[0]
            uncond, cond = out.chunk(2)
            v = uncond + GUIDANCE * (cond - uncond)
            if STEPS * SKIP_START < i < STEPS * SKIP_STOP:
                skipped = list(SKIPPED)
                out = model(x, text, pooled, t.expand(1), skip_layers=skipped, return_dict=False)
                v = v + (cond - out[0]) * SKIP_SCALE
            recorder.record("pipeline/velocity", v)
            x = scheduler.step(v, t, x, return_dict=False)[0]
            recorder.record("pipeline/latents", x)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        for end in ("weight", "bias"):
            new[f"{name}.{end}"] = np.concatenate([w[f"{p}.{end}"] for p in parts])

    kernel = w["pos_embed.proj.weight"]  # (width, channels, rows, columns)
    if bug == "patch_kernel_reshaped":
        kernel = kernel.reshape(WIDTH, PATCH, PATCH, CHANNELS)
    else:
        kernel = kernel.transpose(0, 2, 3, 1)
    new["x_embedder.proj.weight"] = np.ascontiguousarray(kernel)
    new["x_embedder.proj.bias"] = w["pos_embed.proj.bias"]
    new["pos_embed"] = w["pos_embed.pos_embed"]
    for name, old in (("t", "timestep"), ("y", "text")):
        for layer in (1, 2):
            source = old
            if bug == "embedders_second_layers_exchanged" and layer == 2:
                source = "text" if old == "timestep" else "timestep"
            part = f"time_text_embed.{source}_embedder.linear_{layer}"
            put(f"{name}_embedder.mlp.{2 * layer - 2}", part)
    put("context_embedder", "context_embedder")
    for i in range(LAYERS):
        old, x = f"transformer_blocks.{i}", f"joint_blocks.{i}.x_block"
        c = f"joint_blocks.{i}.context_block"
        put(f"{x}.adaLN_modulation.1", f"{old}.norm1.linear")
        put(f"{x}.attn.qkv", *(f"{old}.attn.to_{s}" for s in "qkv"))
        order = "qvk" if bug == "context_values_before_keys" and i == 3 else "qkv"
        put(f"{c}.attn.qkv", *(f"{old}.attn.add_{s}_proj" for s in order))
        put(f"{x}.attn.proj", f"{old}.attn.to_out.0")
        for s in "qk":
            new[f"{x}.attn.ln_{s}.weight"] = w[f"{old}.attn.norm_{s}.weight"]
            new[f"{c}.attn.ln_{s}.weight"] = w[f"{old}.attn.norm_added_{s}.weight"]
        if i in DUAL:
            second = (
                "attn" if bug == "second_attention_has_weights_of_first" and i == 1 else "attn2"
            )
            put(f"{x}.attn2.qkv", *(f"{old}.{second}.to_{s}" for s in "qkv"))
            put(f"{x}.attn2.proj", f"{old}.attn2.to_out.0")
            for s in "qk":
                new[f"{x}.attn2.ln_{s}.weight"] = w[f"{old}.attn2.norm_{s}.weight"]
        put(f"{x}.mlp.fc1", f"{old}.ff.net.0.proj")
        put(f"{x}.mlp.fc2", f"{old}.ff.net.2")
        if i == LAYERS - 1:
            put(f"{c}.adaLN_modulation.1", f"{old}.norm1_context.linear")
            continue
        put(f"{c}.adaLN_modulation.1", f"{old}.norm1_context.linear")
        put(f"{c}.attn.proj", f"{old}.attn.to_add_out")
        put(f"{c}.mlp.fc1", f"{old}.ff_context.net.0.proj")
        put(f"{c}.mlp.fc2", f"{old}.ff_context.net.2")
    put("final_layer.adaLN_modulation.1", "norm_out.linear")
    put("final_layer.linear", "proj_out")
    # diffusers keeps scale before shift in these two; the original has shift first
    halved = [f"joint_blocks.{LAYERS - 1}.context_block.adaLN_modulation.1"]
    if bug != "final_modulation_halves_not_swapped":
        halved.append("final_layer.adaLN_modulation.1")
    for name in halved:
        for end in ("weight", "bias"):
            scale, shift = np.split(new[f"{name}.{end}"], 2)
            new[f"{name}.{end}"] = np.concatenate([shift, scale])
    if bug == "key_norms_of_streams_exchanged":
        a, b = (f"joint_blocks.2.{s}_block.attn.ln_k.weight" for s in ("x", "context"))
        new[a], new[b] = new[b], new[a]
    if bug == "mlps_of_streams_exchanged":
        for end in ("weight", "bias"):
            a, b = (f"joint_blocks.1.{s}_block.mlp.fc1.{end}" for s in ("x", "context"))
            new[a], new[b] = new[b], new[a]
    if bug == "context_proj_bias_not_loaded":
        new["joint_blocks.0.context_block.attn.proj.bias"] = np.zeros(WIDTH, np.float32)
    if bug == "fc2_went_through_bfloat16":
        weight = mx.array(new["joint_blocks.3.x_block.mlp.fc2.weight"]).astype(mx.bfloat16)
        new["joint_blocks.3.x_block.mlp.fc2.weight"] = np.array(weight.astype(mx.float32))
    if bug == "qkv_rows_interleaved_by_head":
        for end in ("weight", "bias"):
            name = f"joint_blocks.0.x_block.attn2.qkv.{end}"
            rows = new[name].reshape(3, HEADS, HEAD, *new[name].shape[1:])
            new[name] = np.ascontiguousarray(rows.swapaxes(0, 1)).reshape(new[name].shape)
    return new


class MMDiT:
    """The transformer; `p` has the parameters in the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.bug, self.dtype = bug, getattr(mx, dtype)
        self.p = {k: mx.array(v).astype(self.dtype) for k, v in p.items()}
        self.vectors: dict[str, mx.array] = {}

    def linear(self, name: str, x: mx.array) -> mx.array:
        y = mx.addmm(self.p[f"{name}.bias"], x, self.p[f"{name}.weight"].T)
        return taps.tap(name, y)

    def norm(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, None, None, 1e-6)

    def head_norm(self, name: str, x: mx.array, weights: str = "") -> mx.array:
        """Of (batch, tokens, heads, channels)."""
        weight = self.p[f"{weights or name}.weight"]
        if self.bug == "rms_weight_plus_one":
            weight = weight + 1
        if self.bug == "head_norms_centred":
            return taps.tap(name, mx.fast.layer_norm(x, weight, None, 1e-6))
        return taps.tap(name, mx.fast.rms_norm(x, weight, 1e-6))

    def time(self, t: mx.array) -> mx.array:
        bug, half = self.bug, WAVE // 2
        # by torch: the last bit of a frequency is multiplied by up to 1000
        freqs = mx.array(torch.exp(-math.log(10000) * torch.arange(half) / half).numpy())
        a = t.astype(mx.float32)[:, None] * freqs
        if bug == "time_angles_bfloat16":
            a = (t.astype(mx.bfloat16)[:, None] * freqs.astype(mx.bfloat16)).astype(mx.float32)
        x = mx.concatenate([mx.cos(a), mx.sin(a)], -1).astype(self.dtype)
        x = taps.tap("t_embedder.freqs", x)
        return self.linear("t_embedder.mlp.2", nn.silu(self.linear("t_embedder.mlp.0", x)))

    def vector(self, t: mx.array, pooled: mx.array) -> mx.array:
        """What the modulations are computed from."""
        bug = self.bug
        key = str(t[0].item())
        if bug == "vector_kept_from_first_step" and self.vectors:
            return next(iter(self.vectors.values()))[-len(pooled) :]
        if bug == "vector_cached_by_timestep" and key in self.vectors:
            return self.vectors[key][: len(pooled)]
        y = self.linear("y_embedder.mlp.0", pooled)
        if bug != "pooled_without_silu":
            y = nn.silu(y)
        c = self.time(t) + self.linear("y_embedder.mlp.2", y)
        self.vectors[key] = taps.tap("vec", c)
        return nn.silu(c) if bug == "silu_outside_and_inside" else c

    def positions(self) -> mx.array:
        """(rows, columns, width) of the table's middle."""
        bug = self.bug
        table = self.p["pos_embed"].reshape(TABLE, TABLE, WIDTH)
        if bug == "position_table_float16":
            table = table.astype(mx.float16).astype(self.dtype)
        if bug == "positions_of_own_grid":
            omega = 1 / 10000 ** (np.arange(WIDTH // 4) / (WIDTH // 4))
            a, b = np.arange(WIDE)[:, None] * omega, np.arange(HIGH)[:, None] * omega
            across = np.concatenate([np.sin(a), np.cos(a)], 1)[None].repeat(HIGH, 0)
            down = np.concatenate([np.sin(b), np.cos(b)], 1)[:, None].repeat(WIDE, 1)
            return mx.array(np.concatenate([across, down], -1).astype(np.float32)).astype(
                self.dtype
            )
        top, left = (TABLE - HIGH) // 2, (TABLE - WIDE) // 2
        if bug == "crop_from_corner":
            top = left = 0
        if bug == "crop_offsets_exchanged":
            top, left = left, top
        return table[top : top + HIGH, left : left + WIDE]

    def modulation(self, block: str, c: mx.array, n: int) -> list[mx.array]:
        bare = self.bug == "final_modulation_without_silu" and block == "final_layer"
        y = self.linear(f"{block}.adaLN_modulation.1", c if bare else nn.silu(c))
        return list(mx.split(y[:, None, :], n, axis=-1))

    def heads(self, name: str, x: mx.array, q_norm: str = "") -> list[mx.array]:
        """q, k and v as (batch, tokens, heads, channels)."""
        y = self.linear(f"{name}.qkv", x).reshape(*x.shape[:2], 3, HEADS, HEAD)
        q, k, v = y[:, :, 0], y[:, :, 1], y[:, :, 2]
        if self.bug == "second_attention_without_qk_norm" and name.endswith("attn2"):
            return [q, k, v]
        q = self.head_norm(f"{name}.ln_q", q, q_norm)
        return [q, self.head_norm(f"{name}.ln_k", k), v]

    def sdpa(self, q: mx.array, k: mx.array, v: mx.array, name: str) -> mx.array:
        bug = self.bug
        scale = (WIDTH if bug == "scores_scaled_by_model_width" else HEAD) ** -0.5
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        if bug == "scores_bfloat16" and "blocks.4" in name:
            scores = (q @ k.swapaxes(2, 3) * scale).astype(mx.bfloat16)
            y = mx.softmax(scores, axis=-1).astype(self.dtype) @ v
        else:
            y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)
        if not (bug == "heads_merged_without_swap" and name == "joint_blocks.1.x_block.attn2"):
            y = y.swapaxes(1, 2)
        return y.reshape(len(q), -1, WIDTH)

    def joint_attention(self, i: int, ctx: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
        bug = self.bug
        xb, cb = f"joint_blocks.{i}.x_block", f"joint_blocks.{i}.context_block"
        other = f"{xb}.attn.ln_q" if bug == "text_queries_have_image_norm" and i == 1 else ""
        c, h = self.heads(f"{cb}.attn", ctx, other), self.heads(f"{xb}.attn", x)
        q, k, v = (mx.concatenate(list(pair), axis=1) for pair in zip(c, h, strict=True))
        if bug == "values_joined_image_first" and i == 3:
            v = mx.concatenate([h[2], c[2]], axis=1)
        y = self.sdpa(q, k, v, f"joint_blocks.{i}.attn")
        yc, yx = mx.split(y, [ctx.shape[1]], axis=1)
        return taps.tap(f"{cb}.attn.mix", yc), taps.tap(f"{xb}.attn.mix", yx)

    def mlp(self, name: str, x: mx.array) -> mx.array:
        h = self.linear(f"{name}.fc1", x)
        h = nn.gelu(h) if self.bug == "gelu_by_erf" else nn.gelu_approx(h)
        return self.linear(f"{name}.fc2", h)

    def half(self, block: str, x: mx.array, m: list[mx.array]) -> mx.array:
        """The MLP's half of a block."""
        bug = self.bug
        shift, scale, gate = m
        if bug == "mlp_scale_before_shift" and block.endswith("x_block"):
            shift, scale = scale, shift
        n = x if bug == "text_mlp_unnormed" and block.endswith("context_block") else self.norm(x)
        h = taps.tap(f"{block}.norm2", n * (1 + scale) + shift)
        y = self.mlp(f"{block}.mlp", h)
        ungated = bug == "context_mlp_ungated" and block == "joint_blocks.1.context_block"
        return taps.tap(block, x + (y if ungated else gate * y))

    def joint_block(
        self, i: int, ctx: mx.array, x: mx.array, c: mx.array
    ) -> tuple[mx.array, mx.array]:
        bug = self.bug
        xb, cb = f"joint_blocks.{i}.x_block", f"joint_blocks.{i}.context_block"
        dual, last = i in DUAL, i == LAYERS - 1
        m = self.modulation(xb, c, 9 if dual else 6)
        if bug == "second_attention_takes_parts_of_mlp" and dual:
            m = [*m[:3], *m[6:], *m[3:6]]
        mc = self.modulation(cb, c, 2 if last else 6)
        n, nc = self.norm(x), self.norm(ctx)
        hx = taps.tap(f"{xb}.norm1", n * (1 + m[1]) + m[0])
        hc = taps.tap(f"{cb}.norm1", nc * (1 + mc[1]) + mc[0])
        yc, yx = self.joint_attention(i, hc, hx)
        y = x + m[2] * self.linear(f"{xb}.attn.proj", yx)
        if dual and not (bug == "second_attention_one_layer_short" and i == DUAL[-1]):
            n = self.norm(y) if bug == "second_attention_reads_updated_stream" else n
            h = taps.tap(f"{xb}.norm1_2", n * (1 + m[7]) + m[6])
            q, k, v = self.heads(f"{xb}.attn2", h)
            h = self.sdpa(q, k, v, f"{xb}.attn2")
            h = self.linear(f"{xb}.attn2.proj", taps.tap(f"{xb}.attn2.mix", h))
            y = y + (m[2] if bug == "second_attention_has_gate_of_first" else m[8]) * h
        y = self.half(xb, y, m[3:6])
        if last:
            return ctx, y
        yc = mc[2] * self.linear(f"{cb}.attn.proj", yc)
        start = hc if bug == "context_residual_from_norm" and i == 2 else ctx
        return self.half(cb, start + yc, mc[3:6]), y

    def __call__(
        self,
        x: mx.array,
        t: mx.array,
        context: mx.array,
        pooled: mx.array,
        skip: tuple[int, ...] = (),
    ) -> mx.array:
        bug = self.bug
        weight, bias = self.p["x_embedder.proj.weight"], self.p["x_embedder.proj.bias"]
        h = taps.tap("x_embedder.proj", mx.conv2d(x, weight, stride=PATCH) + bias)
        h = h + self.positions()
        if bug == "tokens_by_columns":
            h = h.swapaxes(1, 2)
        h = taps.tap("x_embedder", h.reshape(len(x), -1, WIDTH))
        c = self.vector(t, pooled)
        ctx = self.linear("context_embedder", context)
        for i in range(LAYERS):
            if i not in skip:
                ctx, h = self.joint_block(i, ctx, h, c)
            elif bug == "skipped_layers_still_change_text":
                ctx, _ = self.joint_block(i, ctx, h, c)
        shift, scale = self.modulation("final_layer", c, 2)
        h = taps.tap("final_layer.norm_final", self.norm(h) * (1 + scale) + shift)
        h = self.linear("final_layer.linear", h)
        h = h.reshape(len(x), HIGH, WIDE, PATCH, PATCH, CHANNELS)
        if bug == "pixels_of_patches_transposed":
            h = h.swapaxes(3, 4)
        h = h.transpose(0, 1, 3, 2, 4, 5).reshape(len(x), ROWS, COLUMNS, CHANNELS)
        return taps.tap("mmdit", h)


def schedule(bug: str | None) -> tuple[list[float], list[float]]:
    """Sigmas with the last one, and timesteps."""

    def shifted(s: float) -> float:
        return SHIFT * s / (1 + (SHIFT - 1) * s)

    sigmas = [shifted(1 - i / STEPS) for i in range(STEPS)]
    if bug == "sigmas_shifted_twice":
        sigmas = [shifted(s) for s in sigmas]
    times = [1000 * s for s in sigmas]
    if bug == "timesteps_count_from_zero":
        times = [t - 1 for t in times]
    end = shifted(0.001) if bug == "last_sigma_not_zero" else 0.0
    return [*sigmas, end], times


def sample(net: MMDiT, x: mx.array, context: mx.array, pooled: mx.array) -> None:
    bug, dtype = net.bug, net.dtype
    sigmas, times = schedule(bug)
    taps.tap("sampler.sigmas", mx.array(sigmas, mx.float32), kind="schedule")
    taps.tap("sampler.timesteps", mx.array(times, mx.float32), kind="schedule")
    skip = tuple(s - 1 for s in SKIPPED) if bug == "skipped_layers_from_one" else SKIPPED
    start = int(SKIP_START * STEPS) - 1 if bug == "layers_skipped_at_first_step" else 0.02
    for i in range(STEPS):
        taps.set_step(i)
        t = mx.array(times[i], mx.float32)
        out = net(mx.concatenate([x, x]), mx.full((2,), t), context, pooled)
        uncond, cond = mx.split(out, 2)
        base = cond if bug == "guidance_added_to_conditional" else uncond
        towards = cond if bug == "guidance_without_difference" else cond - uncond
        v = taps.tap("v_mix", base + GUIDANCE * towards)
        if start < i < SKIP_STOP * STEPS:
            row = slice(0, 1) if bug == "skip_pass_with_negative_prompt" else slice(1, 2)
            out = net(x, mx.full((1,), t), context[row], pooled[row], skip)
            away = (v if bug == "skip_guidance_from_guided" else cond) - out
            v = v + (-away if bug == "skip_guidance_towards_skipped" else away) * SKIP_SCALE
        v = taps.tap("velocity", v)
        width = -1 / STEPS if bug == "steps_of_even_width" else sigmas[i + 1] - sigmas[i]
        x = (x.astype(mx.float32) + width * v).astype(dtype)
        if bug == "latents_float16":
            x = x.astype(mx.float16).astype(dtype)
        x = taps.tap("latents", x)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = MMDiT(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    start = value("pipeline/noise")
    if bug == "noise_reshaped_not_transposed":
        start = start.reshape(1, ROWS, COLUMNS, CHANNELS)
    else:
        start = start.transpose(0, 2, 3, 1).copy()
    negative, text = (value(f"pipeline/{s}prompt_embeds") for s in ("negative_", ""))
    pair = [value(f"pipeline/{s}pooled_prompt_embeds") for s in ("negative_", "")]
    if bug == "negative_prompt_zeroed":
        negative = np.zeros_like(negative)
    if bug == "pooled_order_reversed":
        pair.reverse()
    x, context, pooled = (
        mx.array(v).astype(net.dtype)
        for v in (start, np.concatenate([negative, text]), np.concatenate(pair))
    )
    kept = {k: to_numpy(v) for k, v in net.p.items()} if weights else None
    blocks = ("init.*", "sampler.*", "x_embedder", "vec", "context_embedder")
    blocks += ("joint_blocks.?.x_block", "joint_blocks.?.context_block", "mmdit", "velocity")
    with port_trace(out, dump, dtype, (*blocks, "latents"), kept):
        taps.tap("init.noise", x, kind="input")
        taps.tap("init.context", context, kind="input")
        taps.tap("init.pooled", pooled, kind="input")
        sample(net, x, context, pooled)


NO_COUNTERPART: tuple[str, ...] = (r"^v_mix$",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|interchang"
CHUNKS = r"chunk|split|\bhal(f|ves)\b|\bmodulation\b"
TABLE_PLACE = r"crop|cent(er|re)|corner|offset|top|left|origin"
SKIP_LAYERS = (
    r"skip(s|ped|ping)?[- _]?(the )?(layer|block|guid|pass)"
    r"|(layer|block)\w*\b.{0,40}\bskip|layer guidance|\bslg"
)
NARROW = r"b?f(loat)?16|fp16|\bhalf\b|precision|round|\bcast|narrow"
BUGS = (
    Bug(
        "patch_kernel_reshaped",
        "The patch kernel is reshaped to (out, rows, columns, in), not transposed.",
        (LOADED, r"kernel|layout|transpos|reshap|channel", SWAPPED),
        "weights",
    ),
    Bug(
        "embedders_second_layers_exchanged",
        "The second layers of t_embedder and y_embedder are exchanged; they have one shape.",
        (LOADED, SWAPPED, r"(other|wrong) (layer|module|embedder)"),
        "weights",
    ),
    Bug(
        "context_values_before_keys",
        "Block 3's text qkv is joined as q, v, k.",
        (LOADED, SWAPPED, r"q, ?v, ?k"),
        "weights",
    ),
    Bug(
        "second_attention_has_weights_of_first",
        "Block 1's attn2.qkv is loaded from attn.",
        (LOADED, r"dupl|twice|another|same"),
        "weights",
    ),
    Bug(
        "key_norms_of_streams_exchanged",
        "Block 2's ln_k of the image and of the text are exchanged.",
        (LOADED, SWAPPED, r"(other|wrong) (stream|norm)"),
        "weights",
    ),
    Bug(
        "context_proj_bias_not_loaded",
        "Block 0's output bias of the text's attention stays zero.",
        (LOADED, r"\bbias"),
        "weights",
    ),
    Bug(
        "fc2_went_through_bfloat16",
        "Block 3's fc2 was stored in bfloat16.",
        (LOADED, NARROW),
        "weights",
    ),
    Bug(
        "qkv_rows_interleaved_by_head",
        "Block 0's attn2.qkv has its rows per head (q, k, v of head 0, of head 1, ...).",
        (LOADED, r"interleav|per head|\bheads?\b|layout|permut|order"),
        "weights",
    ),
    Bug(
        "final_modulation_halves_not_swapped",
        "The last modulation is converted without exchanging scale and shift.",
        (LOADED, SWAPPED, CHUNKS),
        "weights",
    ),
    Bug(
        "sigmas_shifted_twice",
        "The shift of 3 is applied to sigmas twice.",
        (r"shift|sigma|twice|schedule|timestep",),
        "schedule",
    ),
    Bug(
        "timesteps_count_from_zero",
        "Timesteps are one less, as if they counted from 0.",
        (r"off.by.one|timestep|one less|minus 1|- ?1\b|from (zero|0)|offset",),
        "schedule",
    ),
    Bug(
        "last_sigma_not_zero",
        "The list of sigmas ends with the smallest one instead of 0.",
        (r"sigma|last|final|terminal|end|zero|schedule",),
        "schedule",
    ),
    Bug(
        "noise_reshaped_not_transposed",
        "The noise is reshaped to channels last, not transposed.",
        (r"transpos|reshap|layout|channel|permut|noise|latents?|\bax[ei]s\b",),
        "inputs",
    ),
    Bug(
        "negative_prompt_zeroed",
        "The negative prompt's embeddings are zeros.",
        (r"zero|negative|uncond|prompt|encoder_hidden|half of the batch|first row|row 0",),
        "inputs",
    ),
    Bug(
        "pooled_order_reversed",
        "Pooled texts are joined as positive, negative.",
        (SWAPPED, r"pooled|negative|batch"),
        "inputs",
    ),
    Bug(
        "text_queries_have_image_norm",
        "Block 1 norms the text's queries with the image's ln_q.",
        (
            r"norm_added_q|context_block\.attn\.ln_q|text'?s? (q|quer)",
            r"(other|wrong|another|image'?s?|same) (stream|norm|weight|ln_q|param)",
        ),
    ),
    Bug(
        "second_attention_without_qk_norm",
        "q and k of attn2 are not normed.",
        (
            r"norm.*(missing|skip|not (appl|run|used|called)|left out|lack|unused|never)",
            r"(missing|skip|\bno\b|without|lacks?|never).*norm|un-?normed|not normed",
        ),
    ),
    Bug(
        "rms_weight_plus_one",
        "RMSNorms multiply by 1 + weight.",
        (r"1 ?\+|\+ ?1|plus (one|1)|\bone\b|\bgain|offset",),
    ),
    Bug(
        "second_attention_reads_updated_stream",
        "attn2 reads a norm of the stream after the first attention.",
        (
            r"after (the |its )?(first |joint )?att|updated|sequential|parallel|beside",
            r"input of (the )?(block|layer)|block'?s? (own )?input|\bstale|residual",
            r"att\w*( is| was)? (already )?added|before (the |its )?(first |joint )?att",
        ),
    ),
    Bug(
        "gelu_by_erf",
        "MLPs use the exact GELU, not the one with tanh.",
        (r"gelu|tanh|erf|approximat",),
    ),
    Bug(
        "silu_outside_and_inside",
        "SiLU is applied to the vector before the blocks and in each modulation again.",
        (r"silu|swish|activation|twice",),
    ),
    Bug(
        "scores_scaled_by_model_width",
        "Scores are scaled by the root of the model's width, not of a head's.",
        (r"\bscal(e|ed|ing)|head_dim|sqrt|root|temperature|softmax",),
    ),
    Bug(
        "values_joined_image_first",
        "Block 3 joins values as image, text; queries and keys as text, image.",
        (r"concat|join|order|\broll|shift|rotat", SWAPPED, r"(image|text).*(first|before)"),
    ),
    Bug(
        "second_attention_one_layer_short",
        "Block 2 lacks its second attention.",
        (
            r"attn2.*(missing|skip|not (appl|run|used|called|record|added)|left out|lack|never)",
            r"(missing|skip|\bno\b|without|lacks?|never).*(attn2|second attention|dual)",
            r"(second|dual).attention|residual.*missing|off.by.one",
        ),
    ),
    Bug(
        "heads_merged_without_swap",
        "Block 1's attn2 merges heads without moving them next to their channels.",
        (r"head|merg|transpos|reshap|layout|permut|order", SWAPPED),
    ),
    Bug("scores_bfloat16", "Block 4's scores are rounded to bfloat16.", (NARROW,)),
    Bug(
        "crop_from_corner",
        "Positions are the first rows and columns of the table, not its middle.",
        (TABLE_PLACE, r"position|\bslic"),
    ),
    Bug(
        "crop_offsets_exchanged",
        "The table is cut at (left, top), not at (top, left).",
        (TABLE_PLACE, r"position|\bslic|rows?\b|column|height|width"),
    ),
    Bug(
        "positions_of_own_grid",
        "Positions are computed anew for the latents' grid, from 0 and with no scale.",
        (TABLE_PLACE, r"position|\bgrid|interpolat|\bscal|table"),
    ),
    Bug("position_table_float16", "The table of positions is rounded to float16.", (NARROW,)),
    Bug(
        "time_angles_bfloat16",
        "Angles of the time's sinusoid are computed in bfloat16.",
        (NARROW,),
    ),
    Bug(
        "mlp_scale_before_shift",
        "The image's MLP takes its shift for the scale and its scale for the shift.",
        (CHUNKS, SWAPPED, r"shift.*\bfor\b.*scale|(wrong|other) part"),
    ),
    Bug(
        "second_attention_has_gate_of_first",
        "attn2 is gated with the gate of the first attention.",
        (r"gate|chunk|split|\bmodulation\b|wrong part",),
    ),
    Bug(
        "context_mlp_ungated",
        "Block 1's MLP of the text is added without its gate.",
        (r"\bgate|\bmodulation\b|multipl|factor|un-?gated",),
    ),
    Bug(
        "context_residual_from_norm",
        "Block 2 adds the text's attention to the normed text.",
        (r"residual|skip connection|normed|normali[sz]ed|before the norm|after (the )?norm",),
    ),
    Bug(
        "vector_kept_from_first_step",
        "The vector of modulation is computed once, at the first step.",
        (r"cach|stale|(first|previous|other|earlier|last) step|step 0|reus|not (renewed|updated)",),
    ),
    Bug(
        "vector_cached_by_timestep",
        "The skip pass reuses the step's cached vector, whose first row is the negative prompt's.",
        (
            r"cach|stale|reus|negative|uncond|pooled|first row|row 0|batch",
            r"(first|other|another|wrong|earlier|previous) (call|row|sample|half|element)",
        ),
    ),
    Bug(
        "skipped_layers_from_one",
        "Skipped layers are counted from 1: layer 1 is skipped, layer 2 is not.",
        (SKIP_LAYERS, r"off.by.one|(counted|from) 1|wrong (layer|block)|other (layer|block)"),
    ),
    Bug(
        "layers_skipped_at_first_step",
        "Skip-layer guidance is applied at the first step too.",
        (SKIP_LAYERS, r"off.by.one|first step|step 0|extra (call|run|pass)|more call|guidance"),
    ),
    Bug(
        "skipped_layers_still_change_text",
        "A skipped layer still changes the text.",
        (
            r"\bskip|(text|context).*(still|unchanged)",
            r"(extra|additional|more|another) (call|run|time)|once more|too (often|many)",
        ),
    ),
    Bug(
        "skip_pass_with_negative_prompt",
        "The pass with skipped layers has the negative prompt.",
        (r"negative|uncond|prompt|first row|row 0|encoder_hidden|batch|pooled",),
    ),
    Bug(
        "skip_guidance_from_guided",
        "Skip-layer guidance subtracts from the guided prediction, not from the conditional one.",
        (SKIP_LAYERS, r"guid|\bcfg|\bcond(itional)?\b"),
    ),
    Bug(
        "guidance_added_to_conditional",
        "Guidance is added to the conditional prediction: the scale is one too much.",
        (r"guid|\bcfg|\bcond(itional)?\b|uncond|one too (much|large|many)|3\.5|4\.5",),
    ),
    Bug(
        "pixels_of_patches_transposed",
        "Rows and columns within a patch are exchanged in the result.",
        (r"patch|transpos|layout|\bax[ei]s\b|rows?\b|column|pixel", SWAPPED),
    ),
    Bug("latents_float16", "Latents are rounded to float16 after each step.", (NARROW,)),
)

NOT_NORMED = (
    r"norm\w*\b.*(miss|skip|not (appl|run|used|called|record)|left out|lack|never|omit)",
    r"(miss|skip|omit|\bno\b|without|lack|never|before)\w*\b.*norm|not (layer.?)?norm",
    r"un-?norm",
)
MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "mlps_of_streams_exchanged",
        "Block 1's first MLP layers of the image and of the text are exchanged.",
        (LOADED, SWAPPED, r"(other|wrong|another) (stream|layer|mlp)|ff_context"),
        "weights",
    ),
    Bug(
        "head_norms_centred",
        "q and k pass a LayerNorm, which subtracts the mean, not an RMSNorm.",
        (r"layer ?norm|\brms|\bmean\b|cent(er|re)|subtract",),
    ),
    Bug(
        "pooled_without_silu",
        "The pooled text's embedder has no SiLU between its layers.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "final_modulation_without_silu",
        "The last modulation is made from the vector without SiLU.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "text_mlp_unnormed",
        "The text's MLPs read the stream without the norm before the modulation.",
        NOT_NORMED,
    ),
    Bug(
        "second_attention_takes_parts_of_mlp",
        "attn2 takes the modulation's parts of the MLP, and the MLP those of attn2.",
        (CHUNKS, SWAPPED, r"(wrong|other|another) (part|piece|slice|row|chunk)|\bshift\b|\bgate"),
    ),
    Bug(
        "tokens_by_columns",
        "Patches become tokens column by column.",
        (
            r"transpos|reshap|layout|column|\brows?\b|\bax[ei]s\b|permut|height|width|flatten|raster",
            SWAPPED,
        ),
    ),
    Bug(
        "guidance_without_difference",
        "Guidance adds the conditional prediction itself, not its difference to the other.",
        (
            r"guid|\bcfg\b|uncond|negative|\bcond(itional)?\b",
            r"difference (of|between|to|from)|(not|without) subtract",
        ),
    ),
    Bug(
        "skip_guidance_towards_skipped",
        "Skip-layer guidance has the other sign: it moves towards the skipped pass.",
        (
            SKIP_LAYERS,
            r"\bsign\b|negat|opposite|subtract|minus|revers|direction|" + SWAPPED,
        ),
    ),
    Bug(
        "steps_of_even_width",
        "Each step has the width 1/2, not the difference of its sigmas.",
        (
            r"\bdt\b|step.?(size|length|width)|width of|\bdelta\b|\buniform|constant step",
            r"(even|equal)(ly)? (step|width|spac)|sigmas?\b|1 ?/ ?(steps|n|2)\b|euler",
        ),
    ),
)
