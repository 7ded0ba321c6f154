"""PixArt-Sigma as MLX modules: channels last, fused q, k, v, the prompt before the negative one.

The architecture is that of PixArtMS in the authors' repository (PixArt-alpha/PixArt-sigma), whose
names the modules have; diffusers' PixArtTransformer2DModel is the reference. Whole modules are
recorded, beside taps for positions, modulations and the loop: guidance, then DPM-Solver++(2M).
"""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DPMSolverMultistepScheduler, PixArtTransformer2DModel
from diffusers.models import embeddings

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
from lydite.trace.function_capture import watch_function
from lydite.trace.mlx_capture import record_modules as record_mlx_modules
from lydite.trace.torch_capture import record_modules

NAME = "pixart_sigma"
HEADS, HEAD, LAYERS, CAPTION, TOKENS = 4, 8, 3, 20, 7
WIDTH, CHANNELS, PATCH, SAMPLE, SCALE = HEADS * HEAD, 4, 2, 8, 2
ROWS, COLUMNS, STEPS, GUIDANCE, WAVE = 8, 12, 4, 2.5, 256
HIGH, WIDE = ROWS // PATCH, COLUMNS // PATCH
VALID = (3, 6)  # tokens of the negative prompt and of the prompt


def reference(folder: Path, dtype: str) -> None:
    """The loop of PixArtSigmaPipeline for one image, from embeddings to latents."""
    config: dict[str, Any] = dict(num_attention_heads=HEADS, attention_head_dim=HEAD)
    config |= dict(num_layers=LAYERS, in_channels=CHANNELS, out_channels=2 * CHANNELS)
    config |= dict(cross_attention_dim=WIDTH, caption_channels=CAPTION, sample_size=SAMPLE)
    config |= dict(patch_size=PATCH, interpolation_scale=SCALE, use_additional_conditions=False)
    model = randomised(lambda: PixArtTransformer2DModel(**config), 57)
    for name, parameter in model.named_parameters():
        if name.endswith("scale_shift_table"):
            parameter.mul_(2)  # each gate matters
        if "to_q.weight" in name or "to_k.weight" in name:
            parameter.mul_(2)
    model = saved(model, folder, "transformer", dtype)
    scheduler = DPMSolverMultistepScheduler()
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
        watch_function(recorder, embeddings, "get_2d_sincos_pos_embed"),
    ):
        scheduler.set_timesteps(STEPS)
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        text = noise(5, 2, TOKENS, CAPTION).to(model.dtype)
        mask = torch.arange(TOKENS)[None] < torch.tensor(VALID)[:, None]
        latents = noise(6, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/prompt_attention_mask", mask, kind="input")
        recorder.record("pipeline/noise", latents, kind="input")
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            both = model(
                torch.cat([latents] * 2),
                encoder_hidden_states=text,
                encoder_attention_mask=mask,
                timestep=t.expand(2),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
                return_dict=False,
            )[0]
            uncond, cond = both.chunk(2)
            predicted = (uncond + GUIDANCE * (cond - uncond)).chunk(2, dim=1)[0]
            recorder.record("pipeline/noise_pred", predicted)
            latents = scheduler.step(predicted, t, latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under this port's names; matrices stay (out, in)."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        for end in ("weight", "bias"):
            new[f"{name}.{end}"] = np.concatenate([w[f"{part}.{end}"] for part in parts])

    axes = (0, 3, 2, 1) if bug == "kernel_rows_columns_exchanged" else (0, 2, 3, 1)
    new["x_embedder.weight"] = w["pos_embed.proj.weight"].transpose(axes).copy()
    new["x_embedder.bias"] = w["pos_embed.proj.bias"]
    put("t_embedder.fc1", "adaln_single.emb.timestep_embedder.linear_1")
    put("t_embedder.fc2", "adaln_single.emb.timestep_embedder.linear_2")
    put("t_block", "adaln_single.linear")
    put("y_embedder.fc1", "caption_projection.linear_1")
    put("y_embedder.fc2", "caption_projection.linear_2")
    for i in range(LAYERS):
        old, own = f"transformer_blocks.{i}", f"blocks.{i}"
        order = "kqv" if bug == "keys_before_queries" and i == 1 else "qkv"
        put(f"{own}.attn.qkv", *(f"{old}.attn1.to_{x}" for x in order))
        put(f"{own}.attn.proj", f"{old}.attn1.to_out.0")
        put(f"{own}.cross_attn.q_linear", f"{old}.attn2.to_q")
        order = "vk" if bug == "cross_values_before_keys" and i == 2 else "kv"
        put(f"{own}.cross_attn.kv_linear", *(f"{old}.attn2.to_{x}" for x in order))
        put(f"{own}.cross_attn.proj", f"{old}.attn2.to_out.0")
        put(f"{own}.mlp.fc1", f"{old}.ff.net.0.proj")
        put(f"{own}.mlp.fc2", f"{old}.ff.net.2")
        new[f"{own}.scale_shift_table"] = w[f"{old}.scale_shift_table"]
    put("final_layer.linear", "proj_out")
    new["final_layer.scale_shift_table"] = w["scale_shift_table"]
    if bug == "cross_queries_transposed":
        name = "blocks.0.cross_attn.q_linear.weight"
        new[name] = new[name].T.copy()
    if bug == "cross_proj_of_self_attention":
        for end in ("weight", "bias"):
            new[f"blocks.0.cross_attn.proj.{end}"] = new[f"blocks.0.attn.proj.{end}"]
    if bug == "mlp_of_block_before":
        for end in ("weight", "bias"):
            new[f"blocks.2.mlp.fc2.{end}"] = new[f"blocks.1.mlp.fc2.{end}"]
    if bug == "table_not_loaded":
        new["blocks.1.scale_shift_table"] = np.zeros_like(new["blocks.1.scale_shift_table"])
    if bug == "caption_stored_float16":
        weight = new["y_embedder.fc1.weight"]
        new["y_embedder.fc1.weight"] = weight.astype(np.float16).astype(np.float32)
    return new


def attend(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    """Attention of (batch, heads, tokens, channels); the result has its heads merged."""
    y = mx.fast.scaled_dot_product_attention(q, k, v, scale=HEAD**-0.5, mask=mask)
    return y.transpose(0, 2, 1, 3).reshape(q.shape[0], -1, WIDTH)


def heads_of(x: mx.array) -> mx.array:
    return x.reshape(x.shape[0], -1, HEADS, HEAD).transpose(0, 2, 1, 3)


def layer_norm() -> nn.LayerNorm:
    return nn.LayerNorm(WIDTH, eps=1e-6, affine=False)


class PlainRMSNorm(nn.Module):
    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, None, 1e-6)


class TimestepEmbedder(nn.Module):
    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.bug = bug
        self.fc1, self.fc2 = nn.Linear(WAVE, WIDTH), nn.Linear(WIDTH, WIDTH)

    def __call__(self, t: mx.array) -> mx.array:
        half = WAVE // 2
        frequencies = mx.exp(-np.log(10000) / half * mx.arange(half, dtype=mx.float32))
        angles = t.astype(mx.float32)[:, None] * frequencies
        parts = [mx.cos(angles), mx.sin(angles)]
        if self.bug == "time_sine_first":
            parts.reverse()
        x = mx.concatenate(parts, -1).astype(self.fc1.weight.dtype)
        return self.fc2(nn.silu(self.fc1(x)))


class Mlp(nn.Module):
    """Of a block, and of captions."""

    def __init__(self, bug: str | None, size: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, hidden), nn.Linear(hidden, WIDTH)
        self.act = nn.GELU() if bug == "mlp_gelu_exact" and size == WIDTH else nn.GELU("precise")
        if bug == "captions_by_silu" and size == CAPTION:
            self.act = nn.SiLU()

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(self.act(self.fc1(x)))


class SelfAttention(nn.Module):
    def __init__(self, bug: str | None, i: int) -> None:
        super().__init__()
        self.bug, self.i = bug, i
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: mx.array) -> mx.array:
        qkv = self.qkv(x)
        if self.bug == "heads_before_qkv" and self.i == 0:  # (heads, 3, channels)
            y = qkv.reshape(x.shape[0], -1, HEADS, 3, HEAD).transpose(3, 0, 2, 1, 4)
            q, k, v = y[0], y[1], y[2]
        else:
            q, k, v = (heads_of(y) for y in mx.split(qkv, 3, -1))
        return self.proj(attend(q, k, v, None))


class CrossAttention(nn.Module):
    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.bug = bug
        self.q_linear, self.kv_linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: mx.array, y: mx.array, mask: mx.array) -> mx.array:
        q = heads_of(self.q_linear(x))
        k, v = (heads_of(z) for z in mx.split(self.kv_linear(y), 2, -1))
        if self.bug == "mask_inverted":
            mask = mx.logical_not(mask)
        return self.proj(attend(q, k, v, None if self.bug == "padding_attended" else mask))


class Block(nn.Module):
    def __init__(self, bug: str | None, i: int) -> None:
        super().__init__()
        self.bug, self.i = bug, i
        self.norm1, self.norm2 = layer_norm(), layer_norm()
        self.attn, self.cross_attn = SelfAttention(bug, i), CrossAttention(bug)
        self.mlp = Mlp(bug, WIDTH, 4 * WIDTH)
        self.scale_shift_table = mx.zeros((6, WIDTH))

    def __call__(self, x: mx.array, y: mx.array, t: mx.array, mask: mx.array) -> mx.array:
        bug, i = self.bug, self.i
        six = self.scale_shift_table[None] + t.reshape(-1, 6, WIDTH)
        taps.tap(f"block{i}_six", six)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = mx.split(six, 6, 1)
        if bug == "attention_scale_first":
            shift_a, scale_a = scale_a, shift_a
        a = self.attn(self.norm1(x) * (1 + scale_a) + shift_a)
        if bug == "attention_gate_of_mlp" and i == 1:
            gate_a = gate_m
        x = x + gate_a * a
        seen = x
        if bug == "cross_queries_normed" and i == 1:
            seen = mx.fast.layer_norm(x, None, None, 1e-6)
        before = x
        x = x + self.cross_attn(seen, y, mask)
        one = 0 if bug == "mlp_scale_without_one" else 1
        h = self.norm2(before if bug == "mlp_beside_cross_attention" else x)
        h = self.mlp(h * (one + scale_m) + shift_m)
        return x + (h if bug == "mlp_gate_missing" and i == 2 else gate_m * h)


class FinalLayer(nn.Module):
    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.bug = bug
        self.norm_final = layer_norm()
        if bug == "final_norm_rms":
            self.norm_final = PlainRMSNorm()
        self.linear = nn.Linear(WIDTH, PATCH * PATCH * 2 * CHANNELS)
        self.scale_shift_table = mx.zeros((2, WIDTH))

    def __call__(self, x: mx.array, t: mx.array) -> mx.array:
        if self.bug == "final_time_activated":
            t = nn.silu(t)
        shift, scale = mx.split(self.scale_shift_table[None] + t[:, None], 2, 1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class PixArt(nn.Module):
    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.bug = bug
        self.x_embedder = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.t_embedder, self.t_block = TimestepEmbedder(bug), nn.Linear(WIDTH, 6 * WIDTH)
        self.y_embedder = Mlp(bug, CAPTION, WIDTH)
        self.blocks = [Block(bug, i) for i in range(LAYERS)]
        self.final_layer = FinalLayer(bug)

    def positions(self) -> mx.array:
        """Sines and cosines of columns, then of rows: (rows, columns, width)."""
        bug, base = self.bug, SAMPLE // PATCH
        scale = 1 if bug == "positions_without_scale" else SCALE

        def coordinates(n: int) -> Array:
            stretch = 1.0 if bug == "positions_not_stretched" else n / base
            return np.arange(n, dtype=np.float64) / stretch / scale

        def waves(where: Array) -> Array:
            quarter = WIDTH // 4
            angles = where[..., None] / 10000 ** (np.arange(quarter) / quarter)
            return np.concatenate([np.sin(angles), np.cos(angles)], -1)

        down, along = np.meshgrid(coordinates(HIGH), coordinates(WIDE), indexing="ij")
        parts = [waves(along), waves(down)]
        if bug == "positions_rows_first":
            parts.reverse()
        table = mx.array(np.concatenate(parts, -1).astype(np.float32))
        if bug == "positions_bfloat16":
            table = table.astype(mx.bfloat16).astype(mx.float32)
        return taps.tap("pos_embed", table)

    def __call__(self, x: mx.array, t: mx.array, y: mx.array, mask: mx.array) -> mx.array:
        bug, n = self.bug, x.shape[0]
        x = self.x_embedder(x)
        x = (x + self.positions()).astype(x.dtype).reshape(n, HIGH * WIDE, WIDTH)
        taps.tap("tokens", x)
        t = self.t_embedder(t)
        six = self.t_block(t if bug == "time_block_without_silu" else nn.silu(t))
        y = self.y_embedder(y)
        for block in self.blocks:
            x = block(x, y, six, mask[:, None, None])
        x = self.final_layer(x, t)
        if bug == "patches_channels_first":
            x = x.reshape(n, HIGH, WIDE, 2 * CHANNELS, PATCH, PATCH).transpose(0, 1, 4, 2, 5, 3)
        else:
            x = x.reshape(n, HIGH, WIDE, PATCH, PATCH, 2 * CHANNELS).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(n, ROWS, COLUMNS, 2 * CHANNELS)


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Timesteps, and sigmas with the last one, 0."""
    betas = np.linspace(0.0001, 0.02, 1000)
    if bug == "betas_scaled_linear":
        betas = np.linspace(0.0001**0.5, 0.02**0.5, 1000) ** 2
    bars = np.cumprod(1 - betas.astype(np.float32), dtype=np.float64)
    steps = np.linspace(0, 999, STEPS + 1).round()[:0:-1].astype(np.int64)
    if bug == "timesteps_leading":
        steps = np.arange(STEPS, 0, -1) * (1000 // (STEPS + 1))
    sigmas = np.sqrt((1 - bars) / bars)[steps - 1 if bug == "sigmas_one_time_early" else steps]
    return steps, np.append(sigmas, 0.0).astype(np.float32)


class Solver:
    """DPM-Solver++ of order 2, midpoint; the first and the last step are of order 1."""

    def __init__(self, sigmas: Array, bug: str | None) -> None:
        self.sigmas, self.bug = [float(x) for x in sigmas], bug
        self.before: mx.array | None = None

    def __call__(self, i: int, eps: mx.array, x: mx.array) -> mx.array:
        now, to = self.sigmas[i], self.sigmas[i + 1]
        alpha, alpha_to = (1 + now * now) ** -0.5, (1 + to * to) ** -0.5
        share = now if self.bug == "noise_not_scaled_by_alpha" else alpha * now
        clean = taps.tap("x0", (x - share * eps) / alpha)
        d = clean
        if self.before is not None and to > 0:
            r = np.log(self.sigmas[i - 1] / now) / np.log(now / to)
            if self.bug == "step_ratio_inverted":
                r = 1 / r
            half = 1 if self.bug == "correction_not_halved" else 0.5
            d = clean + float(half / r) * (clean - self.before)
        self.before = clean
        x = x.astype(mx.float32) * (alpha_to * to / (alpha * now))
        return (x + alpha_to * (1 - to / now) * d.astype(mx.float32)).astype(eps.dtype)


def guided(both: mx.array, bug: str | None) -> mx.array:
    """Of the prompt's and the negative prompt's prediction; without the variance."""
    kept = both[..., CHANNELS:] if bug == "variance_taken" else both[..., :CHANNELS]
    cond, uncond = kept[:1], kept[1:]
    if bug == "guidance_halves_exchanged":
        cond, uncond = uncond, cond
    if bug == "guidance_of_prompt":
        return cond + GUIDANCE * (cond - uncond)
    y = uncond + GUIDANCE * (cond - uncond)
    if bug == "guidance_three_channels":
        y = mx.concatenate([y[..., :3], cond[..., 3:]], -1)
    return y


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, kind = given(folder), getattr(mx, dtype)
    model = PixArt(bug)
    new = converted(checkpoint(folder, "transformer"), bug)
    model.load_weights([(name, mx.array(w)) for name, w in new.items()])
    model.set_dtype(kind)
    text = mx.array(value("pipeline/prompt_embeds")[::-1].copy()).astype(kind)
    seen = mx.array(value("pipeline/prompt_attention_mask").astype(bool)[::-1].copy())
    x = mx.array(value("pipeline/noise").transpose(0, 2, 3, 1).copy()).astype(kind)
    if bug == "masks_exchanged":
        seen = seen[::-1]
    if bug == "negative_prompt_zeros":
        text = mx.stack([text[0], mx.zeros_like(text[1])])
    steps, sigmas = schedule(bug)
    solver = Solver(sigmas, bug)
    blocks = ("text", "seen", "noise", "timesteps", "sigmas", "tokens", "guided", "latent")
    blocks += ("pixart", "pixart/?_embedder", "pixart/blocks.?", "pixart/final_layer")
    with (
        port_trace(out, dump, dtype, blocks, None) as recorder,
        record_mlx_modules(recorder, model, scope="pixart", weights=weights),
        watch_function(recorder, sys.modules[__name__], "attend"),
    ):
        taps.tap("timesteps", steps, kind="schedule")
        taps.tap("sigmas", sigmas, kind="schedule")
        taps.tap("text", text, kind="input")
        taps.tap("seen", seen, kind="input")
        taps.tap("noise", x, kind="input")
        for i, t in enumerate(steps):
            taps.set_step(i)
            both = model(mx.concatenate([x, x]), mx.array([int(t)] * 2), text, seen)
            x = solver(i, taps.tap("guided", guided(both, bug)), x)
            if bug == "latents_float16":
                x = x.astype(mx.float16).astype(kind)
            x = taps.tap("latent", x)


NO_COUNTERPART = (r"^block\d_six$", r"^x0$")

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos"
POSITION = r"position|coordinate|\bgrid\b"
HALF = r"f16|float16|\bhalf\b|fp16|precision|round|\bcast"
BUGS = (
    Bug(
        "kernel_rows_columns_exchanged",
        "The patch kernel's rows and columns are exchanged by the transposition.",
        (LOADED, SWAPPED, r"\bax[ei]s\b|layout|rows?\b|column"),
        "weights",
    ),
    Bug(
        "keys_before_queries",
        "The fused product of block 1 was joined as k, q, v.",
        (LOADED, SWAPPED, r"quer(y|ies)\b.*keys?\b|keys?\b.*quer(y|ies)", r"\bk, ?q\b|\bkqv\b"),
        "weights",
    ),
    Bug(
        "cross_values_before_keys",
        "The fused product of block 2's cross-attention was joined as v, k.",
        (LOADED, SWAPPED, r"values?\b.*keys?\b|keys?\b.*values?\b", r"\bv, ?k\b|\bvk\b"),
        "weights",
    ),
    Bug(
        "cross_queries_transposed",
        "The square weight of block 0's cross queries is transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "mlp_of_block_before",
        "Block 2's second MLP layer has the weights of block 1.",
        (LOADED, r"blocks\.1|(another|other|wrong|previous) (layer|block)|dupl|index"),
        "weights",
    ),
    Bug(
        "table_not_loaded",
        "Block 1's scale and shift table stays zero.",
        (LOADED, r"zero|table|missing"),
        "weights",
    ),
    Bug(
        "caption_stored_float16",
        "The first caption layer's weight was stored in float16.",
        (LOADED, HALF),
        "weights",
    ),
    Bug(
        "masks_exchanged",
        "The prompt has the negative prompt's mask, and the other way round.",
        (r"mask|padd", SWAPPED, r"prompt|batch|negative|uncond"),
        "inputs",
    ),
    Bug(
        "negative_prompt_zeros",
        "The negative prompt's features are zeros, not the encoder's.",
        (r"zero|negative|uncond|empty", r"prompt|\btext\b|embed", r"\binput"),
        "inputs",
    ),
    Bug(
        "timesteps_leading",
        "Timesteps are spaced as 'leading', not as 'linspace'.",
        (r"leading|linspace|spacing|spaced", r"timestep|schedule|sigma"),
        "schedule",
    ),
    Bug(
        "betas_scaled_linear",
        "Betas are linear in their roots.",
        (r"\bbetas?\b|scaled.linear|linear|root", r"schedule|sigma"),
        "schedule",
    ),
    Bug(
        "positions_without_scale",
        "Positions are not divided by the interpolation scale.",
        (r"scal|factor|divid|interpolat|multipl", POSITION),
    ),
    Bug(
        "positions_not_stretched",
        "Positions are not stretched to the base size of 4.",
        (r"scal|factor|stretch|base.?size|interpolat|divid|extent", POSITION),
    ),
    Bug(
        "positions_rows_first",
        "The first half of the position's channels is of rows, not of columns.",
        (r"\bax[ei]s\b|rows?\b|columns?\b|height|width|half|halves", SWAPPED, POSITION),
    ),
    Bug(
        "time_sine_first",
        "The timestep's sines come before the cosines.",
        (r"\bsin|\bcos|flip|half|halves", SWAPPED),
    ),
    Bug(
        "final_time_activated",
        "The last modulation is of SiLU of the time's embedding.",
        (r"silu|swish|activation|activated",),
    ),
    Bug(
        "mlp_gelu_exact",
        "The blocks' MLPs have GELU with erf, not with tanh.",
        (r"gelu|\berf\b|tanh|activation|approximat",),
    ),
    Bug(
        "mlp_scale_without_one",
        "The MLP's modulation multiplies by scale, not by 1 + scale.",
        (r"1 ?\+|\+ ?1|plus one|\bone\b|add(s|ed|ing)? 1",),
    ),
    Bug(
        "attention_scale_first",
        "Attention's modulation takes the shift as scale and the scale as shift.",
        (r"shift.*scale|scale.*shift|chunk|split", SWAPPED),
    ),
    Bug(
        "attention_gate_of_mlp",
        "Block 1's attention is gated with the MLP's gate.",
        (r"gate|chunk|split|modulation", r"(wrong|other|another|last) (part|row|piece|slice)"),
    ),
    Bug(
        "cross_queries_normed",
        "Block 1's cross-attention reads the normed tokens.",
        (r"norm",),
    ),
    Bug(
        "mlp_gate_missing",
        "Block 2's MLP is added without its gate.",
        (
            r"\b(un)?gat(e|es|ed|ing)\b|modulat",
            r"unscaled|not (multipl|scal)",
            r"(missing|without|skip\w*|lacks?|no) (the |its )?(factor|scal)",
        ),
    ),
    Bug(
        "final_norm_rms",
        "The last norm is an RMSNorm: it does not subtract the mean.",
        (r"\brms|\bmean\b|cent(er|re)|layer ?norm|subtract",),
    ),
    Bug(
        "padding_attended",
        "Cross-attention has no mask.",
        (r"mask|padd",),
    ),
    Bug(
        "heads_before_qkv",
        "Block 0 splits the fused product as (heads, 3, channels).",
        (r"\bheads?\b|interleav|layout|reshap|fused|split", SWAPPED),
    ),
    Bug(
        "patches_channels_first",
        "The result's patches are read as (channels, rows, columns).",
        (r"channel|patch|layout|\bax[ei]s\b|reshap", SWAPPED),
    ),
    Bug(
        "guidance_three_channels",
        "Guidance is applied to the first three channels only.",
        (r"channel|three|\b3\b|guid|\bcfg\b|slice|part of",),
    ),
    Bug(
        "guidance_of_prompt",
        "Guidance starts from the prompt's prediction, so its scale is one more.",
        (
            r"guid|\bcfg\b",
            r"\buncond|negative|(starts|based) (from|on)|3\.5|scale (\+|plus) (1|one)",
        ),
    ),
    Bug(
        "step_ratio_inverted",
        "The solver's ratio of log steps is inverted.",
        (
            r"ratio|\br0\b|revers|invert|reciproc|inverse",
            r"solver|sampler|second.order|order 2|multistep|correction|extrapol|history",
        ),
    ),
    Bug("latents_float16", "Latents are rounded to float16 after each step.", (HALF,)),
)

MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "cross_proj_of_self_attention",
        "The output of block 0's cross-attention has the weights of its self-attention.",
        (
            LOADED,
            r"dupl|twice|(another|other|wrong|same|self) ?-?(layer|attention|module)|attn1",
        ),
        "weights",
    ),
    Bug(
        "captions_by_silu",
        "Captions are projected with SiLU between the layers, not GELU.",
        (r"silu|swish|gelu|activation|non-?linear",),
    ),
    Bug(
        "mask_inverted",
        "Cross-attention sees the padding alone: its mask is negated.",
        (r"mask|\bpad(s|ding|ded)?\b",),
    ),
    Bug(
        "mlp_beside_cross_attention",
        "The MLP reads the stream before cross-attention was added.",
        (
            r"parallel|beside|residual|(before|without) (the )?(cross|att|add)|stale|\bold\b",
            r"un-?updated|not (yet )?(added|updated|includ)|wrong order|input of (the )?mlp",
            r"(cross|att)\w* .*(missing|skip|not added|left out|lack)",
        ),
    ),
    Bug(
        "time_block_without_silu",
        "The blocks' modulation is made from the time's embedding without SiLU.",
        (r"silu|swish|activation|activated|non-?linear",),
    ),
    Bug("positions_bfloat16", "The table of positions is rounded to bfloat16.", (HALF,)),
    Bug(
        "sigmas_one_time_early",
        "Sigmas are those of the time before each timestep.",
        (
            r"sigmas?\b|alphas?(_cumprod)?\b|schedule|index",
            r"off.by.one|one (time|index|step|entry) |t ?- ?1|shift|offset|early|earlier",
        ),
        "schedule",
    ),
    Bug(
        "noise_not_scaled_by_alpha",
        "The predicted noise is multiplied by sigma alone when x0 is computed, not by alpha too.",
        (
            r"\balpha|\bsigma|\bscal(e|ed|ing)\b|factor|coefficient|variance.exploding|\bv[ep]\b",
            r"x_?0\b|clean|denois|epsilon|conver(t|sion)|predicted (sample|noise)",
        ),
    ),
    Bug(
        "correction_not_halved",
        "The second-order term of the solver lacks its factor of one half.",
        (
            r"\bhalf|halv|0\.5|1 ?/ ?2|twice|doubl|factor|coefficient",
            r"second.order|order 2|multistep|correction|extrapol|history|solver|midpoint|\bD1\b",
        ),
    ),
    Bug(
        "guidance_halves_exchanged",
        "Guidance takes the prompt's prediction for the negative prompt's.",
        (r"guid|\bcfg\b|uncond|negative|halves|batch|\bsign\b", SWAPPED),
    ),
)
