"""HunyuanVideo's transformer in MLX, with a UniPC sampler of its own: channels last, no batch axis.

Laid out as the original repository's: q, k and v are one product, in single blocks together with
the MLP; the patch embedding is a product with unfolded patches. RoPE's table is (cos, sin) pairs.
"""

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import HunyuanVideoTransformer3DModel, UniPCMultistepScheduler

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
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "hunyuanvideo"
HEADS, HEAD, DOUBLE, SINGLE, REFINER = 2, 16, 2, 2, 2
WIDTH, AXES, THETA = HEADS * HEAD, (4, 6, 6), 256.0
CHANNELS, FRAMES, ROWS, COLUMNS, PATCH = 4, 3, 4, 6, 2
N_TEXT, VALID, TEXT, POOLED, FREQS = 7, 5, 20, 12, 256
GRID = (FRAMES, ROWS // PATCH, COLUMNS // PATCH)
N_IMAGE, STEPS, SHIFT, GUIDANCE = math.prod(GRID), 3, 7.0, 6.0


def reference(folder: Path, dtype: str) -> None:
    """Three steps of diffusers' transformer and scheduler; latents are float32 as in its pipeline.

    Timesteps and guidance are never rounded to the precision of the run.
    """
    config: dict[str, Any] = dict(in_channels=CHANNELS, out_channels=CHANNELS, mlp_ratio=4.0)
    config |= dict(num_attention_heads=HEADS, attention_head_dim=HEAD, num_layers=DOUBLE)
    config |= dict(num_single_layers=SINGLE, num_refiner_layers=REFINER, patch_size=PATCH)
    config |= dict(text_embed_dim=TEXT, pooled_projection_dim=POOLED, rope_axes_dim=AXES)
    model = randomised(lambda: HunyuanVideoTransformer3DModel(**config, rope_theta=THETA), 21)
    model = saved(model, folder, "transformer", dtype)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
    )
    scheduler.set_timesteps(STEPS)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        latents = noise(1, 1, CHANNELS, FRAMES, ROWS, COLUMNS)
        latents = latents.double() if dtype == "float64" else latents
        text = noise(2, 1, N_TEXT, TEXT).to(model.dtype)
        pooled = noise(3, 1, POOLED).to(model.dtype)
        mask = torch.tensor([[1] * VALID + [0] * (N_TEXT - VALID)])
        guidance = torch.tensor([GUIDANCE]) * 1000.0
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/noise", latents, kind="input")
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/prompt_attention_mask", mask, kind="input")
        recorder.record("pipeline/pooled_prompt_embeds", pooled, kind="input")
        recorder.record("pipeline/guidance", guidance, kind="input")
        for recorder.step, t in enumerate(scheduler.timesteps):
            velocity = model(
                hidden_states=latents.to(model.dtype),
                timestep=t.expand(1),
                encoder_hidden_states=text,
                encoder_attention_mask=mask,
                pooled_projections=pooled,
                guidance=guidance,
            ).sample
            recorder.record("pipeline/noise_pred", velocity)
            latents = scheduler.step(velocity, t, latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        new[f"{name}.weight"] = np.concatenate([w[f"{p}.weight"] for p in parts])
        new[f"{name}.bias"] = np.concatenate([w[f"{p}.bias"] for p in parts])

    def put_mlp(name: str, old: str, first: str = "linear_1", second: str = "linear_2") -> None:
        put(f"{name}.fc1", f"{old}.{first}")
        put(f"{name}.fc2", f"{old}.{second}")

    kernel = w["x_embedder.proj.weight"][:, :, 0]  # out, channels, rows, columns
    if bug != "patch_kernel_not_permuted":
        kernel = kernel.transpose(0, 2, 3, 1)
    new["patch.weight"] = kernel.reshape(WIDTH, -1).copy()
    new["patch.bias"] = w["x_embedder.proj.bias"]

    guidance = "timestep" if bug == "guidance_has_time_weights" else "guidance"
    put_mlp("vec.time", "time_text_embed.timestep_embedder")
    put_mlp("vec.guide", f"time_text_embed.{guidance}_embedder")
    put_mlp("vec.clip", "time_text_embed.text_embedder")

    old = "context_embedder"
    put_mlp("ref.time", f"{old}.time_text_embed.timestep_embedder")
    put_mlp("ref.text", f"{old}.time_text_embed.text_embedder")
    put("ref.in", f"{old}.proj_in")
    for i in range(REFINER):
        old, b = f"context_embedder.token_refiner.refiner_blocks.{i}", f"ref.{i}"
        put(f"{b}.ln1", f"{old}.norm1")
        put(f"{b}.ln2", f"{old}.norm2")
        put(f"{b}.qkv", *(f"{old}.attn.to_{x}" for x in "qkv"))
        put(f"{b}.proj", f"{old}.attn.to_out.0")
        put_mlp(b, f"{old}.ff", "net.0.proj", "net.2")
        if bug == "refiner_gates_of_first_block":
            old = old[:-1] + "0"
        put(f"{b}.gates", f"{old}.norm_out.linear")

    for i in range(DOUBLE):
        old, b = f"transformer_blocks.{i}", f"dbl.{i}"
        text_qkv = "kqv" if bug == "text_qkv_fused_in_wrong_order" and i == 1 else "qkv"
        put(f"{b}.img.qkv", *(f"{old}.attn.to_{x}" for x in "qkv"))
        put(f"{b}.txt.qkv", *(f"{old}.attn.add_{x}_proj" for x in text_qkv))
        put(f"{b}.img.proj", f"{old}.attn.to_out.0")
        put(f"{b}.txt.proj", f"{old}.attn.to_add_out")
        for s, end in (("img", ""), ("txt", "_context")):
            put(f"{b}.{s}.mod", f"{old}.norm1{end}.linear")
            put_mlp(f"{b}.{s}", f"{old}.ff{end}", "net.0.proj", "net.2")
        for x in "qk":
            new[f"{b}.img.{x}norm"] = w[f"{old}.attn.norm_{x}.weight"]
            new[f"{b}.txt.{x}norm"] = w[f"{old}.attn.norm_added_{x}.weight"]
        if bug == "text_k_norm_is_q_norm" and i == 0:
            new[f"{b}.txt.knorm"] = new[f"{b}.txt.qnorm"]

    for i in range(SINGLE):
        old, b = f"single_transformer_blocks.{i}", f"sgl.{i}"
        parts = [*(f"{old}.attn.to_{x}" for x in "qkv"), f"{old}.proj_mlp"]
        if bug == "single_fused_mlp_first" and i == 0:
            parts = [parts[3], *parts[:3]]
        put(f"{b}.lin1", *parts)
        put(f"{b}.lin2", f"{old}.proj_out")
        j = i - 1 if bug == "single_modulation_of_previous" and i == 1 else i
        put(f"{b}.mod", f"single_transformer_blocks.{j}.norm.linear")
        for x in "qk":
            new[f"{b}.{x}norm"] = w[f"{old}.attn.norm_{x}.weight"]

    put("final.mod", "norm_out.linear")
    put("final.out", "proj_out")
    if bug == "text_projection_stored_bf16":
        new["ref.in.weight"] = new["ref.in.weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    return new


def sinusoid(t: float, bug: str | None) -> Array:
    """Cosines, then sines, in float32 (guidance is 6000: the order of operations matters)."""
    half = FREQS // 2
    exponent = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32)
    exponent = exponent / np.float32(half - 1 if bug == "time_frequency_shift" else half)
    angles = np.float32(t) * np.exp(exponent.astype(np.float64)).astype(np.float32)
    return np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)


class HyVideo:
    """The forward pass: tokens are (tokens, width), heads (heads, tokens, channels)."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.bug, self.dtype = bug, getattr(mx, dtype)
        self.p = {k: mx.array(v).astype(self.dtype) for k, v in p.items()}
        self.rope = self.angles()

    def product(self, name: str, x: mx.array) -> mx.array:
        return x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]

    def lin(self, name: str, x: mx.array) -> mx.array:
        return taps.tap(name, self.product(name, x))

    def ln(self, x: mx.array, affine: str = "") -> mx.array:
        eps = 1e-5 if self.bug == "layer_norm_default_eps" else 1e-6
        if not affine:
            return mx.fast.layer_norm(x, None, None, eps)
        w, b = self.p[f"{affine}.weight"], self.p[f"{affine}.bias"]
        if self.bug == "refiner_norm_without_bias":
            b = None
        return mx.fast.layer_norm(x, w, b, eps)

    def rms(self, x: mx.array, name: str) -> mx.array:
        w = self.p[name]
        if self.bug == "qk_norm_across_heads" and name.startswith("dbl"):
            flat = x.swapaxes(0, 1).reshape(-1, WIDTH)
            flat = mx.fast.rms_norm(flat, mx.concatenate([w] * HEADS), 1e-6)
            return flat.reshape(-1, HEADS, HEAD).swapaxes(0, 1)
        return mx.fast.rms_norm(x, w, 1e-6)

    def gelu(self, x: mx.array, name: str) -> mx.array:
        if self.bug == "gelu_exact" and name.startswith("dbl"):
            return nn.gelu(x)
        return nn.gelu_approx(x)

    def mlp(self, name: str, x: mx.array) -> mx.array:
        """Of a double block."""
        bug, hidden = self.bug, self.lin(f"{name}.fc1", x)
        if bug == "image_mlp_half" and name == "dbl.0.img":
            hidden = hidden.astype(mx.float16).astype(self.dtype)
        hidden = taps.tap(f"{name}.act", self.gelu(hidden, name))
        return self.lin(f"{name}.fc2", hidden)

    def embed(self, name: str, x: mx.array) -> mx.array:
        """Linear, SiLU, linear."""
        y = self.product(f"{name}.fc1", x)
        if self.bug == "pooled_text_gelu" and name == "vec.clip":
            return self.lin(f"{name}.fc2", nn.gelu_approx(y))
        return self.lin(f"{name}.fc2", nn.silu(y))

    def sin(self, name: str, t: float) -> mx.array:
        return taps.tap(name, mx.array(sinusoid(t, self.bug)).astype(self.dtype))

    def angles(self) -> mx.array:
        """Pairs (cos, sin) of the image's tokens: tokens, channels / 2, 2."""
        bug = self.bug
        order = "xy" if bug == "rope_grid_xy" else "ij"
        grid = np.meshgrid(*(np.arange(n, dtype=np.float32) for n in GRID), indexing=order)
        positions = [g.reshape(-1) for g in grid]
        parts = []
        widths = AXES[::-1] if bug == "rope_axis_widths_reversed" else AXES
        for x, d in zip(positions, widths, strict=True):
            whole = HEAD if bug == "rope_exponent_of_head" else d
            parts.append(np.outer(x, THETA ** -(np.arange(0, d, 2) / whole)))
        a = np.concatenate(parts, 1)
        table = mx.array(np.stack([np.cos(a), np.sin(a)], -1).astype(np.float32))
        return table.astype(mx.bfloat16).astype(mx.float32) if bug == "rope_bf16" else table

    def rotated(self, x: mx.array) -> mx.array:
        cos, sin = self.rope[..., 0], self.rope[..., 1]
        if x.shape[1] != N_IMAGE:  # only where text is rotated too, by mistake
            cos, sin = (mx.concatenate([a, a[:N_TEXT]]) for a in (cos, sin))
        if self.bug == "rope_other_direction":
            sin = -sin
        pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        y = mx.stack([a * cos - b * sin, b * cos + a * sin], -1)
        return y.reshape(x.shape).astype(x.dtype)

    def heads(self, x: mx.array) -> mx.array:
        return x.reshape(-1, HEADS, HEAD).swapaxes(0, 1)

    def attend(self, name: str, q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
        """Attention over all tokens: (heads, tokens, channels) to (tokens, width)."""
        bug, scale = self.bug, HEAD**-0.5
        if bug == "refiner_scale_of_width" and name.startswith("ref"):
            scale = WIDTH**-0.5
        if bug == "mask_of_ones_added" and name.startswith("dbl"):
            mask = mask.astype(q.dtype)
        y = mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=scale, mask=mask)
        if bug == "heads_not_moved_back" and name == "ref.1":
            return taps.tap(f"{name}.attn", y[0].reshape(-1, WIDTH))
        return taps.tap(f"{name}.attn", y[0].swapaxes(0, 1).reshape(-1, WIDTH))

    def refine(self, text: mx.array, mask: Array, t: float, vec: mx.array) -> mx.array:
        bug = self.bug
        weights = mx.array(mask.astype(np.float32))[:, None]
        if bug == "pooled_without_mask":
            weights = mx.ones_like(weights)
        pooled = (text.astype(mx.float32) * weights).sum(0) / weights.sum()
        pooled = taps.tap("ref.pooled", pooled.astype(self.dtype))
        step = self.embed("ref.time", self.sin("ref.freqs", t))
        c = taps.tap("ref.cond", step + self.embed("ref.text", pooled))
        if bug == "refiner_conditioned_by_vec":
            c = vec
        x = self.lin("ref.in", text)
        keep = mask.astype(bool)
        square = keep[None] & keep[:, None]
        square[:, 0] = True
        if bug == "refiner_causal":
            square = square & np.tril(np.ones_like(square))
        for i in range(REFINER):
            x = self.refiner_block(f"ref.{i}", x, c, mx.array(square.tolist()))
        return x

    def refiner_block(self, b: str, x: mx.array, c: mx.array, mask: mx.array) -> mx.array:
        bug, start = self.bug, x
        y = self.lin(f"{b}.qkv", taps.tap(f"{b}.ln1", self.ln(x, f"{b}.ln1")))
        q, k, v = (self.heads(z) for z in mx.split(y, 3, -1))
        y = self.lin(f"{b}.proj", self.attend(b, q, k, v, mask))
        attention, mlp = mx.split(self.lin(f"{b}.gates", nn.silu(c)), 2)
        if bug == "refiner_gates_swapped":
            attention, mlp = mlp, attention
        x = taps.tap(f"{b}.mid", x + y * attention)
        y = self.ln(start if bug == "refiner_mlp_parallel" else x, f"{b}.ln2")
        y = self.product(f"{b}.fc1", y)
        y = nn.gelu_approx(y) if bug == "refiner_gelu" else nn.silu(y)
        y = self.lin(f"{b}.fc2", taps.tap(f"{b}.act", y))
        return taps.tap(b, x + y * mlp)

    def qkv(self, b: str, fused: mx.array) -> list[mx.array]:
        """q, k and v of a stream, as heads, normed, not rotated."""
        q, k, v = (self.heads(x) for x in mx.split(fused, 3, -1))
        return [self.rms(q, f"{b}.qnorm"), self.rms(k, f"{b}.knorm"), v]

    def double(
        self, i: int, img: mx.array, txt: mx.array, vec: mx.array, mask: mx.array
    ) -> tuple[mx.array, mx.array]:
        bug, b = self.bug, f"dbl.{i}"
        if bug == "double_block_run_twice":
            b = "dbl.0"
        x, mods, parts = {"img": img, "txt": txt}, {}, {}
        for s in x:
            c = nn.silu(vec)
            c = nn.silu(c) if bug == "silu_twice" and s == "img" else c
            mods[s] = mx.split(self.lin(f"{b}.{s}.mod", c), 6)
            if bug == "modulation_halves_swapped" and s == "img" and i == 1:
                mods[s] = mods[s][3:] + mods[s][:3]
            shift, scale = mods[s][:2]
            y = taps.tap(f"{b}.{s}.pre", self.ln(x[s]) * (1 + scale) + shift)
            parts[s] = self.qkv(f"{b}.{s}", self.lin(f"{b}.{s}.qkv", y))
        q, k, v = parts["img"]
        q = self.rotated(q)
        k = k if bug == "keys_not_rotated" and i == 1 else self.rotated(k)
        pairs = zip((q, k, v), parts["txt"], strict=True)
        q, k, v = (mx.concatenate([*pair], 1) for pair in pairs)
        y = self.attend(b, taps.tap(f"{b}.q", q), taps.tap(f"{b}.k", k), v, mask)
        rows = {"img": y[:N_IMAGE], "txt": y[N_IMAGE:]}
        for s in ("img", "txt"):
            y, (_, _, gate, shift, scale, last) = self.lin(f"{b}.{s}.proj", rows[s]), mods[s]
            if bug == "text_mlp_modulated_by_image" and s == "txt" and i == 0:
                shift, scale = mods["img"][3:5]
            before = x[s]
            x[s] = taps.tap(f"{b}.{s}.mid", x[s] + gate * y)
            raw = bug == "text_mlp_norm_missing" and s == "txt" and i == 1
            y = x[s] if raw else self.ln(x[s])
            y = taps.tap(f"{b}.{s}.pre2", y * (1 + scale) + shift)
            y = last * self.mlp(f"{b}.{s}", y)
            start = before if bug == "text_mlp_residual_from_input" and s == "txt" else x[s]
            x[s] = taps.tap(f"{b}.{s}", start + y)
        return x["img"], x["txt"]

    def single(self, i: int, x: mx.array, vec: mx.array, mask: mx.array) -> mx.array:
        bug, b = self.bug, f"sgl.{i}"
        c = vec if bug == "single_modulation_without_silu" else nn.silu(vec)
        shift, scale, gate = mx.split(self.lin(f"{b}.mod", c), 3)
        y = self.lin(f"{b}.lin1", taps.tap(f"{b}.pre", self.ln(x) * (1 + scale) + shift))
        fused, h = y[:, : 3 * WIDTH], y[:, 3 * WIDTH :]
        if bug == "rotated_before_norm" and i == 0:
            q, k, v = (self.heads(z) for z in mx.split(fused, 3, -1))
            n = N_IMAGE
            q, k = (mx.concatenate([self.rotated(z[:, :n]), z[:, n:]], 1) for z in (q, k))
            q, k = self.rms(q, f"{b}.qnorm"), self.rms(k, f"{b}.knorm")
        elif bug == "text_rotated":
            q, k, v = self.qkv(b, fused)
            q, k = self.rotated(q), self.rotated(k)
        else:
            q, k, v = self.qkv(b, fused)
            n = N_IMAGE
            q, k = (mx.concatenate([self.rotated(z[:, :n]), z[:, n:]], 1) for z in (q, k))
        y = self.attend(b, taps.tap(f"{b}.q", q), taps.tap(f"{b}.k", k), v, mask)
        h = taps.tap(f"{b}.act", self.gelu(h, b))
        both = [h, y] if bug == "single_joins_mlp_first" and i == 1 else [y, h]
        y = self.lin(f"{b}.lin2", mx.concatenate(both, -1))
        if bug == "single_gate_tanh":
            gate = mx.tanh(gate)
        return taps.tap(b, x + gate * y)

    def patched(self, x: mx.array) -> mx.array:
        """(frames, rows, columns, channels) to tokens of (row, column, channel)."""
        f, h, w = GRID
        y = x.reshape(f, h, PATCH, w, PATCH, CHANNELS).transpose(0, 1, 3, 2, 4, 5)
        if self.bug == "tokens_columns_first":
            y = y.swapaxes(1, 2)
        return y.reshape(N_IMAGE, -1)

    def unpatched(self, x: mx.array) -> mx.array:
        """Tokens of (channel, row, column) to (frames, rows, columns, channels)."""
        f, h, w = GRID
        if self.bug == "unpatchify_channels_last":
            y = x.reshape(f, h, w, PATCH, PATCH, CHANNELS).transpose(0, 1, 3, 2, 4, 5)
            return y.reshape(FRAMES, ROWS, COLUMNS, CHANNELS)
        y = x.reshape(f, h, w, CHANNELS, PATCH, PATCH)
        return y.transpose(0, 1, 4, 2, 5, 3).reshape(FRAMES, ROWS, COLUMNS, CHANNELS)

    def __call__(
        self, x: mx.array, text: mx.array, mask: Array, pooled: mx.array, t: float, guidance: float
    ) -> mx.array:
        bug = self.bug
        if bug == "timestep_bf16":
            t = float(mx.array(t).astype(mx.bfloat16))
        img = self.lin("patch", self.patched(x.astype(self.dtype)))
        vec = self.embed("vec.time", self.sin("vec.freqs", t))
        guide = self.embed("vec.guide", self.sin("vec.guide.freqs", guidance))
        if bug != "guidance_not_added":
            vec = vec + guide
        clip = self.embed("vec.clip", pooled)
        vec = taps.tap("vec", vec if bug == "pooled_text_not_added" else vec + clip)
        txt = self.refine(text, mask, t, vec)
        keep = np.concatenate([np.ones(N_IMAGE, bool), mask.astype(bool)])
        if bug == "mask_text_first":
            keep = np.concatenate([mask.astype(bool), np.ones(N_IMAGE, bool)])
        if bug == "mask_one_too_long":
            keep[N_IMAGE + VALID] = True
        attend = mx.array(keep)[None]
        for i in range(DOUBLE):
            img, txt = self.double(i, img, txt, vec, attend)
        tokens = [txt, img] if bug == "single_text_first" else [img, txt]
        joint = mx.concatenate(tokens)
        if bug == "single_mask_missing":
            attend = mx.ones_like(attend)
        for i in range(SINGLE):
            joint = self.single(i, joint, vec, attend)
        x = joint[:N_IMAGE]
        scale, shift = mx.split(self.lin("final.mod", nn.silu(vec)), 2)
        if bug == "final_halves_swapped":
            scale, shift = shift, scale
        x = mx.fast.rms_norm(x, None, 1e-6) if bug == "final_rms_norm" else self.ln(x)
        x = taps.tap("final.pre", x * (1 + scale) + shift)
        return taps.tap("velocity", self.unpatched(self.lin("final.out", x)))


class UniPC:
    """UniPC of order 2 (B(h) = e^h - 1) for flow models: predicts x0, float32 latents."""

    def __init__(self, bug: str | None) -> None:
        self.bug = bug
        end = 0.0 if bug == "sigmas_to_zero" else 0.001
        s = np.linspace(1, end, STEPS + 1)[:-1]
        s = s if bug == "flow_shift_missing" else SHIFT * s / (1 + (SHIFT - 1) * s)
        s = SHIFT * s / (1 + (SHIFT - 1) * s) if bug == "flow_shift_twice" else s
        s[0] = min(s[0], 1 - 1e-6)  # else log(0)
        times = s * 1000
        self.times = np.round(times) if bug == "timesteps_rounded" else np.trunc(times)
        self.sigmas = np.append(s, 0).astype(np.float32)
        self.x0: list[mx.array] = []
        self.last: mx.array | None = None
        self.order = 0

    def lam(self, i: int) -> float:
        s = float(self.sigmas[i])
        return math.log(1 - s) - math.log(s) if s > 0 else math.inf

    def update(self, i: int, x: mx.array, order: int, new: mx.array | None = None) -> mx.array:
        """From sigma i to sigma i + 1; with `new`, x0 at the end, the corrector."""
        s, t = float(self.sigmas[i]), float(self.sigmas[i + 1])
        m0, h = self.x0[i], self.lam(i + 1) - self.lam(i)
        phi = math.expm1(-h)
        bh = -h if self.bug == "solver_bh1" else phi
        difference, rk = None, 1.0
        if order == 2:
            rk = (self.lam(i - 1) - self.lam(i)) / h
            difference = (self.x0[i - 1] - m0) / rk
            if self.bug == "history_sign":
                difference = -difference
        if new is None:
            rest = 0.0 if difference is None else 0.5 * difference
        elif difference is None:
            rest = 0.5 * (new - m0)
        else:
            phi2 = phi / -h - 1
            b = np.array([phi2 / bh, 2 * (phi2 / -h - 0.5) / bh])
            rho = np.linalg.solve(np.array([[1, 1], [rk, 1]]), b)
            rest = float(rho[0]) * difference + float(rho[1]) * (new - m0)
        y = (t / s) * x - (1 - t) * phi * m0
        return y if math.isinf(h) else y - (1 - t) * bh * rest

    def step(self, i: int, velocity: mx.array, x: mx.array) -> mx.array:
        bug, v = self.bug, velocity.astype(mx.float32)
        sigma = float(self.sigmas[i])
        if bug == "x0_with_timestep_as_sigma":
            sigma = float(self.times[i]) / 1000
        x0 = x - sigma * v
        if i > 0 and bug != "corrector_missing":
            assert self.last is not None
            x = self.update(i - 1, self.last, self.order, x0)
        self.x0.append(x - sigma * v if bug == "x0_of_corrected_sample" else x0)
        self.order = 1 if bug == "solver_order_one" else min(2, STEPS - i, i + 1)
        self.last = x
        return self.update(i, x, self.order)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    mx.set_default_device(mx.cpu)
    value = given(folder)
    net, sampler = (
        HyVideo(converted(checkpoint(folder, "transformer"), bug), bug, dtype),
        UniPC(bug),
    )
    x = mx.array(value("pipeline/noise")[0].transpose(1, 2, 3, 0).astype(np.float32))
    text = mx.array(value("pipeline/prompt_embeds")[0]).astype(net.dtype)
    pooled = mx.array(value("pipeline/pooled_prompt_embeds")[0]).astype(net.dtype)
    mask = value("pipeline/prompt_attention_mask")[0]
    guidance = GUIDANCE if bug == "guidance_not_times_1000" else GUIDANCE * 1000
    if bug == "prompt_last_token_cut":
        mask = np.where(np.arange(N_TEXT) == VALID - 1, 0, mask)
    blocks = ("in/*", "sched/*", "patch", "vec", "ref.?", "dbl.?.img", "dbl.?.txt", "sgl.?")
    blocks += ("velocity", "latent")
    kept = {k: to_numpy(v) for k, v in net.p.items()} if weights else None
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("sched/sigmas", sampler.sigmas, kind="schedule")
        taps.tap("sched/times", sampler.times.astype(np.float32), kind="schedule")
        taps.tap("in/noise", x, kind="input", dims="f h w c")
        taps.tap("in/text", text, kind="input")
        taps.tap("in/text_mask", mask, kind="input")
        taps.tap("in/clip", pooled, kind="input")
        taps.tap("in/guidance", np.array([guidance], np.float32), kind="input")
        taps.tap("rope", net.rope)
        for i in range(STEPS):
            taps.set_step(i)
            velocity = net(x, text, mask, pooled, float(sampler.times[i]), guidance)
            x = sampler.step(i, velocity, x)
            if bug == "latents_bf16":
                x = x.astype(mx.bfloat16).astype(mx.float32)
            taps.tap("latent", x)


NO_COUNTERPART = (r"^rope$",)

ORDER = r"order|swap|permut|chunk|split"
PRECISION = r"bf16|bfloat|precision|\bcast|round"
BUGS = (
    # Conversion of the checkpoint.
    Bug(
        "patch_kernel_not_permuted",
        "The kernel of the patch embedding is flattened channels first, patches channels last.",
        (r"permut|transpos|layout|reshap|flatten|order|load|weight|kernel",),
        "weights",
    ),
    Bug(
        "text_projection_stored_bf16",
        "The weight of the refiner's input projection was rounded to bfloat16.",
        (PRECISION + r"|quanti|load|weight",),
        "weights",
    ),
    Bug(
        "guidance_has_time_weights",
        "The guidance embedder has the timestep embedder's weights.",
        (r"load|weight|parameter",),
        "weights",
    ),
    Bug(
        "text_qkv_fused_in_wrong_order",
        "dbl.1 joins the text's weights as k, q, v.",
        (ORDER + r"|load|weight|fus",),
        "weights",
    ),
    Bug(
        "text_k_norm_is_q_norm",
        "dbl.0 norms the text's keys with the weight for queries.",
        (r"load|weight|parameter",),
        "weights",
    ),
    Bug(
        "single_fused_mlp_first",
        "sgl.0 joins the weights as mlp, q, k, v and splits q, k, v, mlp.",
        (ORDER + r"|load|weight|fus",),
        "weights",
    ),
    Bug(
        "single_modulation_of_previous",
        "sgl.1 has sgl.0's modulation weights.",
        (r"load|weight|parameter|dupl",),
        "weights",
    ),
    Bug(
        "double_block_run_twice",
        "Both double blocks are the first one.",
        (r"load|weight|parameter|dupl|same block|other block|wrong block|block 0|twice|again",),
        "weights",
    ),
    # Activations.
    Bug("pooled_text_gelu", "The pooled text has GELU, not SiLU.", (r"gelu|silu|activation",)),
    Bug("refiner_gelu", "The refiner's MLP has GELU, not SiLU.", (r"gelu|silu|activation",)),
    Bug("gelu_exact", "Double blocks have erf GELU.", (r"gelu|\berf|tanh",)),
    Bug(
        "single_modulation_without_silu",
        "Single blocks modulate by a product of vec, without SiLU.",
        (r"silu|activation",),
    ),
    Bug("silu_twice", "The image's modulation applies SiLU twice.", (r"silu|activation|twice",)),
    # Norms.
    Bug(
        "qk_norm_across_heads",
        "Double blocks norm q and k over all heads together.",
        (r"head|across|ax[ei]s|group|whole width|all channels",),
    ),
    Bug(
        "refiner_norm_without_bias",
        "The refiner's LayerNorms lack their bias.",
        (r"bias|affine",),
    ),
    Bug("layer_norm_default_eps", "All LayerNorms have eps 1e-5.", (r"\beps",)),
    Bug(
        "rotated_before_norm",
        "sgl.0 rotates q and k before their norm.",
        (r"(before|after|order|swap).*(norm|rot|rope)|(norm|rot|rope).*(before|after|order|swap)",),
    ),
    Bug(
        "final_rms_norm",
        "The last norm is RMSNorm.",
        (r"\brms|\bmean\b|layer ?norm|cent(er|re)",),
    ),
    # Attention and masks.
    Bug(
        "refiner_scale_of_width",
        "The refiner scales scores by the root of the width, not of the head's.",
        (r"\bscale\b|scaling|unscaled|sqrt|\broot|temperature|head.?dim",),
    ),
    Bug(
        "mask_of_ones_added",
        "Double blocks add the boolean mask to the scores as 0 and 1.",
        (r"mask|additive|-inf|pad",),
    ),
    Bug(
        "heads_not_moved_back",
        "ref.1 reshapes (heads, tokens, channels) without moving the heads back.",
        (r"head|transpos|permut|layout|reshap",),
    ),
    Bug("refiner_causal", "The refiner's mask is causal as well.", (r"causal|mask|triang",)),
    Bug(
        "mask_text_first",
        "The joint mask is in the order text, image.",
        (r"mask|\border|token",),
    ),
    Bug("mask_one_too_long", "One padding token may be attended to.", (r"mask|padd",)),
    # Positions.
    Bug(
        "rope_grid_xy",
        "The grid of positions is built with indexing xy.",
        (r"ax[ei]s|grid|position|order|transpos|permut|token|coordinate",),
    ),
    Bug(
        "rope_exponent_of_head",
        "RoPE's frequencies divide by the head's width, not the axis's.",
        (r"frequenc|theta|\bbase\b|exponent|ax[ei]s|head.?dim",),
    ),
    Bug(
        "rope_other_direction",
        "RoPE rotates in the other direction.",
        (r"sign|direction|conjugat|invers|negat|opposite|backward|minus",),
    ),
    Bug("rope_bf16", "RoPE's table is rounded to bfloat16.", (PRECISION,)),
    Bug(
        "keys_not_rotated",
        "dbl.1 does not rotate keys.",
        (r"rope|rotar|rotat|position",),
    ),
    Bug(
        "text_rotated",
        "Single blocks rotate text tokens as well.",
        (r"rope|rotar|rotat|position",),
    ),
    # Timestep, guidance, pooled text.
    Bug(
        "time_frequency_shift",
        "Frequencies of the sinusoids are divided by half - 1.",
        (r"frequenc|shift|half|127|period|denominator",),
    ),
    Bug(
        "guidance_not_times_1000",
        "Guidance is embedded as 6, not 6000.",
        (r"guidance|1000|scale|factor",),
        "inputs",
    ),
    Bug(
        "guidance_not_added",
        "The guidance's embedding is computed and not added.",
        (r"guid|missing|not added|left out|omit|\bterm|summand|skip",),
    ),
    Bug(
        "timestep_bf16",
        "The timestep is rounded to bfloat16.",
        (PRECISION + r"|timestep(?!_)|998|1000",),
    ),
    Bug(
        "pooled_without_mask",
        "The refiner's pooled text is the mean over padding too.",
        (r"mask|padd|\bmean\b|pooling|average",),
    ),
    Bug(
        "refiner_conditioned_by_vec",
        "The refiner's blocks are conditioned by vec, not by its own embedding.",
        (r"\bvec\b|condition|(other|wrong|another|different) (value|input)|instead of",),
    ),
    # Modulation and residuals.
    Bug(
        "modulation_halves_swapped",
        "dbl.1 takes the image's attention chunks for the MLP and the reverse.",
        (ORDER + r"|shift|scale|gate|roll",),
    ),
    Bug(
        "text_mlp_modulated_by_image",
        "dbl.0's text MLP has the image's shift and scale.",
        (r"shift|scale|modulat|stream|image|img",),
    ),
    Bug("single_gate_tanh", "Gates of single blocks pass tanh.", (r"tanh|gate",)),
    Bug(
        "refiner_gates_swapped",
        "The refiner's gates of attention and MLP are swapped.",
        (ORDER + r"|\bgate\b|gate_",),
    ),
    Bug(
        "refiner_mlp_parallel",
        "The refiner's MLP is given the block's input, not the sum with attention.",
        (r"residual|parallel|earlier|previous|instead of|skip|(other|block's) input|input of",),
    ),
    Bug(
        "text_mlp_residual_from_input",
        "The text's MLP is added to the block's input; attention is lost.",
        (r"residual|skip|block's input|input of|added to|\blost|missing",),
    ),
    # Order of tokens and pixels.
    Bug(
        "single_text_first",
        "Single blocks join text before image, everything else expects the image first.",
        (r"order|concat|swap|token|permut|text",),
    ),
    Bug(
        "tokens_columns_first",
        "Patches are listed column by column.",
        (r"order|transpos|permut|layout|ax[ei]s|token|column|swap",),
    ),
    Bug(
        "unpatchify_channels_last",
        "The last product is read as (row, column, channel).",
        (r"unpatch|patch|layout|permut|channel|transpos|order|reshap|rearrang|pixel",),
    ),
    # Schedule and sampler.
    Bug(
        "flow_shift_missing",
        "Sigmas are not shifted.",
        (r"shift|sigma|schedule",),
        "schedule",
    ),
    Bug(
        "sigmas_to_zero", "Sigmas run from 1 to 0, not to 0.001.", (r"sigma|schedule",), "schedule"
    ),
    Bug(
        "timesteps_rounded",
        "Timesteps are rounded, not truncated.",
        (r"timestep|time|round|trunc|integer|schedule",),
        "schedule",
    ),
    Bug(
        "corrector_missing",
        "UniPC without its corrector.",
        (r"corrector|correction|unipc|predictor|multistep|order",),
    ),
    Bug(
        "history_sign",
        "The second order's difference has the other sign.",
        (r"\bsign|negat|history|difference|order|multistep|coefficient|previous",),
    ),
    Bug(
        "solver_bh1",
        "B(h) is h, not e^h - 1.",
        (r"\bbh|b\(h\)|b_h|expm1|unipc|solver.?type|coefficient",),
    ),
    Bug(
        "x0_with_timestep_as_sigma",
        "x0 uses the whole timestep / 1000 as sigma.",
        (r"sigma|timestep(?!_)|coefficient|\bx_?0\b",),
    ),
    Bug("latents_bf16", "Latents are kept in bfloat16 between steps.", (PRECISION,)),
    # Precision and inputs.
    Bug(
        "image_mlp_half",
        "dbl.0 rounds the image MLP's hidden values to float16.",
        (r"f16|float16|half|precision|round|\bcast",),
    ),
    Bug(
        "prompt_last_token_cut",
        "The mask ends one token too early.",
        (r"mask|token|prompt|text",),
        "inputs",
    ),
)

MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "refiner_gates_of_first_block",
        "ref.1 has ref.0's weights of the gates.",
        (
            r"load|weight|parameter|dupl|refiner_blocks\.0|ref\.0",
            r"(another|other|first|previous|wrong) block",
        ),
        "weights",
    ),
    Bug(
        "pooled_text_not_added",
        "The pooled text's embedding is computed and not added.",
        (r"pooled|\bclip\b|text_embedder|missing|not added|left out|omit|\bterm|summand|skip",),
    ),
    Bug(
        "rope_axis_widths_reversed",
        "RoPE gives its axes widths 6, 6, 4 and not 4, 6, 6.",
        (r"\bax[ei]s|axes_dim|widths?\b|\bdim(ension)?s?\b|frequenc|" + ORDER,),
    ),
    Bug(
        "text_mlp_norm_missing",
        "dbl.1 modulates the text before the MLP without its norm.",
        (
            r"norm.*(missing|skip|not (appl|run|used|called)|left out|lack|unused|never|omit)",
            r"(missing|skip|\bno\b|without|lacks?|omit|forg).*norm|un-?norm|not norm",
        ),
    ),
    Bug(
        "single_joins_mlp_first",
        "sgl.1 joins the MLP's part before the attention's.",
        (r"order|concat|swap|exchang|permut|\bjoin",),
    ),
    Bug(
        "single_mask_missing",
        "Single blocks attend to the text's padding.",
        (r"mask|padd",),
    ),
    Bug(
        "final_halves_swapped",
        "The last modulation is taken as shift, scale.",
        (ORDER + r"|exchang|halves|scale.*shift|shift.*scale",),
    ),
    Bug(
        "flow_shift_twice",
        "Sigmas are shifted twice.",
        (r"shift|sigma|schedule",),
        "schedule",
    ),
    Bug(
        "solver_order_one",
        "UniPC has order 1 in all steps, not 2.",
        (r"\border\b|multistep|history|solver|previous|unipc|predictor|corrector",),
    ),
    Bug(
        "x0_of_corrected_sample",
        "UniPC keeps the x0 of the corrected sample, not of the sample that the model was given.",
        (
            r"correct(ed|or|ion)|\bx_?0\b|unipc|converted|model_output|(before|after).*(sample|latent)",
        ),
    ),
)
