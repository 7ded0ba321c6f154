"""HunyuanDiT in NumPy, as a port of the authors' repository to MLX would be: channels last.

The structure and most names are those of Tencent's HunyuanDiT (hydit/modules): q, k and v in one
matrix, k and v of cross-attention in another, `norm2` before the MLP and `norm3` before
cross-attention, shift before scale in the last layer. As in mlx-examples the batch is the prompt,
then the negative prompt; q and k are (batch, tokens, heads, channels). diffusers'
HunyuanDiT2DModel is the reference, with the loop of HunyuanDiTPipeline and DDIM.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, HunyuanDiT2DModel
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

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

NAME = "hunyuandit"
HEADS, HEAD, LAYERS, RATIO = 2, 16, 6, 4.3637
WIDTH, CHANNELS, PATCH, WAVE = HEADS * HEAD, 4, 2, 256
ROWS, COLUMNS = 8, 12
HIGH, WIDE = ROWS // PATCH, COLUMNS // PATCH
TEXT, TEXT_T5, POOLED, POOL_HEADS = 20, 32, 12, 8
TOKENS, TOKENS_T5 = 7, 9
VALID, VALID_T5 = (5, 3), (7, 4)  # tokens of the prompt and of the negative prompt
BASE_SIZE = 512 // 8 // PATCH  # RoPE's grid in training
ORIGINAL, CROP = (768, 1024), (0, 0)
STEPS, GUIDANCE = 3, 5.0
BETAS, TRAINED = (0.00085, 0.03), 1000
INPUTS = ("prompt_embeds", "prompt_attention_mask", "prompt_embeds_2", "prompt_attention_mask_2")


def reference(folder: Path, dtype: str) -> None:
    """The loop of HunyuanDiTPipeline for one image, from embeddings to latents."""
    config: dict[str, Any] = dict(num_attention_heads=HEADS, attention_head_dim=HEAD)
    config |= dict(in_channels=CHANNELS, patch_size=PATCH, sample_size=ROWS, hidden_size=WIDTH)
    config |= dict(num_layers=LAYERS, mlp_ratio=RATIO, cross_attention_dim=TEXT)
    config |= dict(cross_attention_dim_t5=TEXT_T5, pooled_projection_dim=POOLED)
    config |= dict(text_len=TOKENS, text_len_t5=TOKENS_T5)
    model = randomised(lambda: HunyuanDiT2DModel(**config), 91)
    for name, parameter in model.named_parameters():
        if name.endswith(("to_out.0.weight", "attn2.to_v.weight")) or "pooler" in name:
            parameter.mul_(2)  # each attention and each text matters
        if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
            parameter.mul_(1 + noise(len(name), len(parameter)) / 4)
    model = saved(model, folder, "transformer", dtype)
    scheduler = DDIMScheduler(
        beta_start=BETAS[0],
        beta_end=BETAS[1],
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        scheduler.set_timesteps(STEPS)
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/alphas_cumprod", scheduler.alphas_cumprod, kind="schedule")
        masks = [(torch.arange(TOKENS) < valid).long()[None] for valid in VALID]
        masks_2 = [(torch.arange(TOKENS_T5) < valid).long()[None] for valid in VALID_T5]
        halves: dict[str, list[torch.Tensor]] = {
            "prompt_embeds": [*noise(7, 2, 1, TOKENS, TEXT).to(model.dtype)],
            "prompt_attention_mask": masks,
            "prompt_embeds_2": [*noise(8, 2, 1, TOKENS_T5, TEXT_T5).to(model.dtype)],
            "prompt_attention_mask_2": masks_2,
        }
        for name, (prompt, negative) in halves.items():
            recorder.record(f"pipeline/{name}", prompt, kind="input")
            recorder.record(f"pipeline/negative_{name}", negative, kind="input")
        text, mask, text_2, mask_2 = (torch.cat(halves[name][::-1]) for name in INPUTS)
        crops = get_resize_crop_region_for_grid((HIGH, WIDE), BASE_SIZE)
        rope = get_2d_rotary_pos_embed(HEAD, crops, (HIGH, WIDE))
        sizes = torch.tensor([[*ORIGINAL, ROWS * 8, COLUMNS * 8, *CROP]] * 2, dtype=model.dtype)
        recorder.record("pipeline/add_time_ids", sizes, kind="input")
        latents = noise(9, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/noise", latents, kind="input")
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            predicted = model(
                torch.cat([latents] * 2),
                torch.tensor([t] * 2).to(model.dtype),
                encoder_hidden_states=text,
                text_embedding_mask=mask,
                encoder_hidden_states_t5=text_2,
                text_embedding_mask_t5=mask_2,
                image_meta_size=sizes,
                style=torch.tensor([0, 0]),
                image_rotary_emb=rope,
                return_dict=False,
            )[0]
            uncond, cond = predicted.chunk(2, dim=1)[0].chunk(2)
            predicted = uncond + GUIDANCE * (cond - uncond)
            recorder.record("pipeline/noise_pred", predicted)
            latents = scheduler.step(predicted, int(t), latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the names of the original; matrices stay (out, in)."""
    new: dict[str, Array] = {}

    def put(name: str, *old: str) -> None:
        for end in ("weight", "bias"):
            if f"{old[0]}.{end}" in w:
                new[f"{name}.{end}"] = np.concatenate([w[f"{x}.{end}"] for x in old])

    kernel = w["pos_embed.proj.weight"]  # (width, channels, rows, columns)
    if bug == "patch_kernel_channels_first":
        kernel = kernel.reshape(WIDTH, PATCH, PATCH, CHANNELS)
    else:
        kernel = kernel.transpose(0, 2, 3, 1).copy()
    new["x_embedder.proj.weight"] = kernel
    new["x_embedder.proj.bias"] = w["pos_embed.proj.bias"]
    new["text_embedding_padding"] = w["text_embedding_padding"]
    if bug == "padding_is_zeros":
        new["text_embedding_padding"] = np.zeros_like(w["text_embedding_padding"])
    put("mlp_t5.0", "text_embedder.linear_1")
    put("mlp_t5.2", "text_embedder.linear_2")
    extra = "time_extra_emb"
    put("t_embedder.mlp.0", f"{extra}.timestep_embedder.linear_1")
    put("t_embedder.mlp.2", f"{extra}.timestep_embedder.linear_2")
    new["pooler.positional_embedding"] = w[f"{extra}.pooler.positional_embedding"]
    for x in "qkvc":
        put(f"pooler.{x}_proj", f"{extra}.pooler.{x}_proj")
    put("style_embedder", f"{extra}.style_embedder")
    put("extra_embedder.0", f"{extra}.extra_embedder.linear_1")
    put("extra_embedder.2", f"{extra}.extra_embedder.linear_2")
    for i in range(LAYERS):
        name = f"blocks.{i}"
        put(f"{name}.norm1", f"{name}.norm1.norm")
        put(f"{name}.default_modulation.1", f"{name}.norm1.linear")
        second, third = ("norm2", "norm3") if bug == "norms_not_renamed" else ("norm3", "norm2")
        put(f"{name}.norm2", f"{name}.{second}")
        put(f"{name}.norm3", f"{name}.{third}")
        put(f"{name}.attn1.Wqkv", *(f"{name}.attn1.to_{x}" for x in "qkv"))
        put(f"{name}.attn2.q_proj", f"{name}.attn2.to_q")
        order = "vk" if bug == "cross_values_first" else "kv"
        put(f"{name}.attn2.kv_proj", *(f"{name}.attn2.to_{x}" for x in order))
        for attention in ("attn1", "attn2"):
            put(f"{name}.{attention}.q_norm", f"{name}.{attention}.norm_q")
            put(f"{name}.{attention}.k_norm", f"{name}.{attention}.norm_k")
            put(f"{name}.{attention}.out_proj", f"{name}.{attention}.to_out.0")
        put(f"{name}.mlp.fc1", f"{name}.ff.net.0.proj")
        put(f"{name}.mlp.fc2", f"{name}.ff.net.2")
        if i > LAYERS // 2:
            put(f"{name}.skip_norm", f"{name}.skip_norm")
            put(f"{name}.skip_linear", f"{name}.skip_linear")
    put("final_layer.linear", "proj_out")
    for end in ("weight", "bias"):  # diffusers has the scale first
        scale, shift = np.split(w[f"norm_out.linear.{end}"], 2)
        both = (scale, shift) if bug == "final_halves_not_exchanged" else (shift, scale)
        new[f"final_layer.adaLN_modulation.1.{end}"] = np.concatenate(both)
    return new


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def crop_region() -> tuple[tuple[int, int], tuple[int, int]]:
    """Where this picture's grid lies in the square of training: its first and last corner."""
    if HIGH > WIDE:
        high, wide = BASE_SIZE, round(BASE_SIZE / HIGH * WIDE)
    else:
        high, wide = round(BASE_SIZE / WIDE * HIGH), BASE_SIZE
    top, left = round((BASE_SIZE - high) / 2), round((BASE_SIZE - wide) / 2)
    return (top, left), (top + high, left + wide)


def rope_table(bug: str | None) -> tuple[Array, Array]:
    """Cosines and sines of (tokens, half of a head's channels): columns, then rows."""
    start, stop = crop_region()
    axes: list[Array] = []
    for a, b, n in zip(start, stop, (HIGH, WIDE), strict=True):
        end = b if bug == "rope_grid_to_the_end" else b * (n - 1) / n
        axes.append(np.linspace(a, end, n, dtype=np.float32))
    rows, columns = np.meshgrid(*axes, indexing="ij")
    order = (rows, columns) if bug == "rope_rows_first" else (columns, rows)
    size = HEAD // 2
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = (1 / np.float32(10000) ** exponents).astype(np.float32)
    angles = np.concatenate([where.reshape(-1, 1) * frequencies for where in order], -1)
    return np.cos(angles), np.sin(angles)


class HunYuanDiT:
    """The forward pass; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}
        self.rope = rope_table(bug)

    def tap(self, name: str, x: Array, kind: str = "activation") -> Array:
        taps.tap(name, x.astype(self.dtype), kind=kind)
        return x

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]
        return self.tap(name, self.r(y))

    def normed(self, x: Array) -> Array:
        y = x - x.mean(-1, keepdims=True)
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(1e-6))

    def norm(self, name: str, x: Array) -> Array:
        if self.bug == "qk_norm_without_mean" and name.endswith(("q_norm", "k_norm")):
            y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6))
        else:
            y = self.normed(x)
        return self.tap(name, self.r(y * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]))

    def sinusoid(self, t: Array) -> Array:
        half = WAVE // 2
        exponents = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32)
        frequencies = torch.exp(torch.from_numpy(exponents / np.float32(half))).numpy()
        angles = t.reshape(-1, 1).astype(np.float32) * frequencies
        parts = [np.cos(angles), np.sin(angles)]
        return self.r(np.concatenate(parts[::-1] if self.bug == "time_sines_first" else parts, -1))

    def pooler(self, x: Array) -> Array:
        """One vector of T5's tokens: attention of their mean to itself and to all of them."""
        x = np.concatenate([self.r(x.mean(1, keepdims=True)), x], 1)
        if self.bug != "pooler_without_positions":
            x = self.r(x + self.p["pooler.positional_embedding"])
        q = self.linear("pooler.q_proj", x[:, :1])
        k, v = self.linear("pooler.k_proj", x), self.linear("pooler.v_proj", x)
        q, k, v = (y.reshape(len(x), -1, POOL_HEADS, TEXT_T5 // POOL_HEADS) for y in (q, k, v))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * np.float32((TEXT_T5 // POOL_HEADS) ** -0.5)
        y = np.einsum("bhqk,bkhd->bqhd", softmax(scores), v)
        y = self.tap("pooler.attention", self.r(y).reshape(len(x), TEXT_T5))
        return self.linear("pooler.c_proj", y)

    def condition(self, t: float, text_t5: Array, sizes: Array) -> Array:
        """The sum of what the time says and what pooled text, sizes and style say."""
        e = self.tap("t_embedder.sinusoid", self.sinusoid(np.full(2, t)))
        e = self.r(silu(self.linear("t_embedder.mlp.0", e)))
        e = self.linear("t_embedder.mlp.2", e)
        pooled = self.pooler(text_t5)
        meta = self.tap("image_meta_size_emb", self.sinusoid(sizes).reshape(2, -1))
        style = np.repeat(self.p["style_embedder.weight"], 2, 0)
        extra = [pooled, meta, style]
        if self.bug == "sizes_before_pooled":
            extra = [meta, pooled, style]
        x = self.tap("extra_vec", np.concatenate(extra, -1))
        x = self.linear("extra_embedder.2", self.r(silu(self.linear("extra_embedder.0", x))))
        return self.tap("c", self.r(e + x))

    def text(self, text: Array, mask: Array, text_t5: Array, mask_t5: Array) -> Array:
        """Both texts one after the other; a learned table is in place of padding."""
        x = self.linear("mlp_t5.0", text_t5)
        x = self.r(gelu(x) if self.bug == "t5_gelu" else silu(x))
        x = np.concatenate([text, self.linear("mlp_t5.2", self.tap("mlp_t5.1", x))], 1)
        kept = np.concatenate([mask, mask_t5], 1)[..., None] > 0
        return self.tap("text_states", np.where(kept, x, self.p["text_embedding_padding"]))

    def rotated(self, x: Array) -> Array:
        """Turns pairs of neighbouring channels of (batch, tokens, heads, channels)."""
        cos, sin = (y[:, None] for y in self.rope)
        if self.bug == "rope_turns_halves":
            a, b = np.split(x, 2, -1)
            return self.r(np.concatenate([a * cos - b * sin, a * sin + b * cos], -1))
        a, b = x[..., ::2], x[..., 1::2]
        return self.r(np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape))

    def attended(self, name: str, q: Array, k: Array, v: Array) -> Array:
        scores = np.einsum("bqhd,bkhd->bhqk", q * np.float32(HEAD**-0.5), k)
        y = np.einsum("bhqk,bkhd->bqhd", softmax(scores), v)
        y = self.tap(f"{name}.attention", self.r(y).reshape(*y.shape[:2], WIDTH))
        return self.linear(f"{name}.out_proj", y)

    def self_attention(self, name: str, x: Array) -> Array:
        qkv = self.linear(f"{name}.Wqkv", x)
        if self.bug == "qkv_of_each_head":
            q, k, v = np.moveaxis(qkv.reshape(*x.shape[:2], HEADS, 3, HEAD), 3, 0)
        else:
            q, k, v = np.moveaxis(qkv.reshape(*x.shape[:2], 3, HEADS, HEAD), 2, 0)
        q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q = self.tap(f"{name}.q_rope", self.rotated(q))
        k = self.tap(f"{name}.k_rope", self.rotated(k))
        return self.attended(name, q, k, v)

    def cross_attention(self, name: str, x: Array, text: Array) -> Array:
        q = self.linear(f"{name}.q_proj", x).reshape(*x.shape[:2], HEADS, HEAD)
        kv = self.linear(f"{name}.kv_proj", text).reshape(*text.shape[:2], 2, HEADS, HEAD)
        q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", kv[:, :, 0])
        if self.bug != "cross_queries_not_rotated":
            q = self.tap(f"{name}.q_rope", self.rotated(q))
        return self.attended(name, q, k, kv[:, :, 1])

    def block(self, i: int, x: Array, c: Array, text: Array, skip: Array | None) -> Array:
        bug, name = self.bug, f"blocks.{i}"
        if skip is not None:
            both = (skip, x) if bug == "skip_before_tokens" else (x, skip)
            h = self.norm(f"{name}.skip_norm", np.concatenate(both, -1))
            x = self.linear(f"{name}.skip_linear", h)
        e = c if bug == "modulation_without_silu" else self.r(silu(c))
        shift = self.linear(f"{name}.default_modulation.1", e)[:, None]
        h = self.r(self.norm(f"{name}.norm1", x) + shift)
        x = self.r(x + self.self_attention(f"{name}.attn1", h))
        h = self.norm(f"{name}.norm3", x)
        x = self.r(x + self.cross_attention(f"{name}.attn2", h, text))
        h = self.linear(f"{name}.mlp.fc1", self.norm(f"{name}.norm2", x))
        h = h / (1 + np.exp(np.float32(-1.702) * h)) if bug == "mlp_quick_gelu" else gelu(h)
        h = self.tap(f"{name}.mlp.act", self.r(h))
        return self.tap(name, self.r(x + self.linear(f"{name}.mlp.fc2", h)))

    def final_layer(self, x: Array, c: Array) -> Array:
        name = "final_layer"
        e = self.linear(f"{name}.adaLN_modulation.1", self.r(silu(c)))
        shift, scale = np.split(e[:, None], 2, -1)
        x = self.tap(f"{name}.norm_final", self.r(self.normed(x)))
        return self.linear(f"{name}.linear", self.r(self.r(x * self.r(1 + scale)) + shift))

    def patches(self, x: Array) -> Array:
        """(batch, tokens, patch) of (batch, rows, columns, channels)."""
        x = x.reshape(-1, HIGH, PATCH, WIDE, PATCH, CHANNELS)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(len(x), HIGH * WIDE, -1)

    def unpatchify(self, x: Array) -> Array:
        x = x.reshape(-1, HIGH, WIDE, PATCH, PATCH, 2 * CHANNELS)
        columns_first = self.bug == "unpatchify_columns_first"
        x = x.transpose(0, 1, 4, 2, 3, 5) if columns_first else x.transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, ROWS, COLUMNS, 2 * CHANNELS)

    def __call__(self, x: Array, t: float, texts: tuple[Array, ...], sizes: Array) -> Array:
        bug = self.bug
        taps.tap("freqs_cis_img.cos", self.rope[0])
        taps.tap("freqs_cis_img.sin", self.rope[1])
        text = self.text(*texts)
        c = self.condition(t, texts[2], sizes)
        kernel = self.p["x_embedder.proj.weight"].reshape(WIDTH, -1)
        x = self.patches(x) @ kernel.T + self.p["x_embedder.proj.bias"]
        x = self.tap("x_embedder", self.r(x))
        skips: list[Array] = []
        for i in range(LAYERS):
            skip = None
            if i > LAYERS // 2:
                skip = skips.pop(0 if bug == "skips_in_order" else -1)
            x = self.block(i, x, c, text, skip)
            if i < LAYERS // 2 - 1:
                skips.append(x)
        return self.tap("model_out", self.unpatchify(self.final_layer(x, c)))


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Timesteps, and the products of alphas."""
    if bug == "betas_linear":
        betas = np.linspace(*BETAS, TRAINED)
    else:
        betas = np.linspace(BETAS[0] ** 0.5, BETAS[1] ** 0.5, TRAINED) ** 2
    offset = 0 if bug == "timesteps_without_offset" else 1
    times = np.arange(STEPS)[::-1] * (TRAINED // STEPS) + offset
    return times, np.cumprod(1 - betas).astype(np.float32)


def ddim(v: Array, i: int, x: Array, times: Array, alphas: Array, bug: str | None) -> Array:
    """One step of DDIM; the model predicts v."""
    before = times[i] - TRAINED // STEPS
    last = np.float32(1) if bug == "last_alpha_is_one" else alphas[0]
    now, then = alphas[times[i]], alphas[before] if before >= 0 else last
    if bug == "prediction_is_noise":
        eps, x0 = v, (x - np.sqrt(1 - now) * v) / np.sqrt(now)
    else:
        x0 = np.sqrt(now) * x - np.sqrt(1 - now) * v
        eps = np.sqrt(now) * v + np.sqrt(1 - now) * x
    return np.sqrt(then) * x0 + np.sqrt(1 - then) * eps


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = HunYuanDiT(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    r = net.r
    both = [
        np.concatenate([value(f"pipeline/{name}"), value(f"pipeline/negative_{name}")])
        for name in INPUTS
    ]
    if bug == "t5_mask_of_ones":
        both[3] = np.ones_like(both[3])
    texts = (r(both[0]), both[1], r(both[2]), both[3])
    target = (ROWS * 8, COLUMNS * 8)
    parts = (ORIGINAL, CROP, target) if bug == "sizes_as_sdxl" else (ORIGINAL, target, CROP)
    sizes = r(np.array([sum(parts, ())] * 2))
    x = r(value("pipeline/noise").transpose(0, 2, 3, 1))
    times, alphas = schedule(bug)
    kept = {k: v.astype(dtype) for k, v in net.p.items()} if weights else None
    blocks = ("clip_*", "t5_*", "image_meta_size", "noise", "timesteps", "alphas_cumprod")
    blocks += ("text_states", "c", "x_embedder", "blocks.?", "final_layer.linear")
    blocks += ("model_out", "guided", "latents")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("timesteps", times, kind="schedule")
        taps.tap("alphas_cumprod", alphas, kind="schedule")
        net.tap("clip_states", texts[0], kind="input")
        taps.tap("clip_mask", texts[1], kind="input")
        net.tap("t5_states", texts[2], kind="input")
        taps.tap("t5_mask", texts[3], kind="input")
        net.tap("image_meta_size", sizes, kind="input")
        net.tap("noise", x, kind="input")
        for i, t in enumerate(times):
            taps.set_step(i)
            y = net(np.concatenate([x, x]), float(r(t)), texts, sizes)
            y = y[..., CHANNELS:] if bug == "variance_taken" else y[..., :CHANNELS]
            cond, uncond = np.split(y, 2)
            if bug == "guidance_halves_exchanged":
                cond, uncond = uncond, cond
            guided = net.tap("guided", r(uncond + r(GUIDANCE * r(cond - uncond))))
            x = net.tap("latents", r(ddim(guided, i, x, times, alphas, bug)))


NO_COUNTERPART: tuple[str, ...] = (r"^freqs_cis_img\.(cos|sin)$",)  # there, each number is twice

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos|interchang|wrong way|mix(ed)? up"
SCHEDULE = r"schedule|sigma|timestep|alpha|\bbetas?\b"
ROPE = r"\brope\b|rotat|rotary|position"
BUGS = (
    Bug(
        "patch_kernel_channels_first",
        "The patch kernel is reshaped to channels last, not transposed.",
        (LOADED, SWAPPED, r"layout|channel|\bax[ei]s\b|flatten|reshap"),
        "weights",
    ),
    Bug(
        "norms_not_renamed",
        "The norm before cross-attention and that before the MLP have each other's weights.",
        (LOADED, SWAPPED, r"norm2.*norm3|norm3.*norm2"),
        "weights",
    ),
    Bug(
        "final_halves_not_exchanged",
        "The last layer's modulation has the scale's weights for the shift, and vice versa.",
        (LOADED, SWAPPED, r"shift.*scale|scale.*shift|chunk|split|halves"),
        "weights",
    ),
    Bug(
        "cross_values_first",
        "Cross-attention's fused matrix has the values before the keys.",
        (LOADED, SWAPPED, r"values?\b.*keys?\b|keys?\b.*values?\b|to_k.*to_v|to_v.*to_k"),
        "weights",
    ),
    Bug(
        "padding_is_zeros",
        "The learned embedding of padding is not loaded and stays zeros.",
        (LOADED, r"padd|zero"),
        "weights",
    ),
    Bug(
        "t5_mask_of_ones",
        "T5's mask is ones, so its padding is not replaced by the learned embedding.",
        (r"mask|padd", r"\binput|\bones\b"),
        "inputs",
    ),
    Bug(
        "sizes_as_sdxl",
        "Sizes are in SDXL's order: the crop before the target size.",
        (r"\bsizes\b|meta_size|crop|target|time_ids|micro", SWAPPED, r"\binput"),
        "inputs",
    ),
    Bug(
        "betas_linear",
        "Betas are linear, not the squares of linear roots.",
        (SCHEDULE, r"linear|noise level"),
        "schedule",
    ),
    Bug(
        "timesteps_without_offset",
        "Timesteps lack the offset of 1.",
        (r"offset|off.by.one|\bone (less|lower|early)|shifted", SCHEDULE),
        "schedule",
    ),
    Bug(
        "time_sines_first",
        "Sinusoids of time and sizes have sines first, then cosines.",
        (r"\bcos|\bsin(e|es|us)?\b|flip", SWAPPED, r"halves"),
    ),
    Bug(
        "sizes_before_pooled",
        "The extra condition has the sizes before the pooled text.",
        (SWAPPED, r"concat|pooled|meta_size|extra_vec|time_ids"),
    ),
    Bug(
        "pooler_without_positions",
        "The pooler does not add its positional embedding.",
        (r"position|\bpos_?emb",),
    ),
    Bug(
        "modulation_without_silu",
        "The blocks' modulation lacks its SiLU.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "t5_gelu",
        "The MLP of T5's tokens has GELU, not SiLU.",
        (r"gelu|silu|swish|activation",),
    ),
    Bug(
        "rope_rows_first",
        "RoPE has rows in the first half of a head's channels, columns in the second.",
        (r"\bax[ei]s\b|rows?\b|column|height|width|\bh\b.*\bw\b", SWAPPED, r"coordinate|\bgrid"),
    ),
    Bug(
        "rope_grid_to_the_end",
        "RoPE's grid reaches the end of its region; the reference stops one place before.",
        (r"endpoint|linspace|off.by.one|\bgrid|coordinate|position|interpolat|spac(ed|ing)",),
    ),
    Bug(
        "rope_turns_halves",
        "RoPE turns a head's first half with its second, not neighbouring channels.",
        (r"interleav|neighbou?r|adjacent|half|halves|\bpair|rotate_half|neox",),
    ),
    Bug(
        "cross_queries_not_rotated",
        "RoPE is not applied to the queries of cross-attention.",
        (ROPE,),
    ),
    Bug(
        "qk_norm_without_mean",
        "Norms of q and k do not subtract the mean: RMS norm in place of layer norm.",
        (r"\brms|\bmean\b|layer.?norm|cent(er|re|r)",),
    ),
    Bug(
        "qkv_of_each_head",
        "The fused q, k and v are split as if each head had its three parts together.",
        (r"heads?\b|interleav|layout|reshap|split|fused|chunk", SWAPPED),
    ),
    Bug(
        "skips_in_order",
        "Long skip connections are taken first in, first out, not the last one first.",
        (
            r"skip|shortcut|\bstack\b|\bpop|fifo|lifo|queue",
            r"(another|other|wrong) (block|layer)|blocks\.[01]\b",
        ),
    ),
    Bug(
        "skip_before_tokens",
        "The skip connection is before the tokens where both are joined.",
        (r"concat|join|skip", SWAPPED, r"halves"),
    ),
    Bug(
        "mlp_quick_gelu",
        "The MLP's GELU is x * sigmoid(1.702 x), not that with tanh.",
        (r"gelu|tanh|sigmoid|activation|approximat|1\.702",),
    ),
    Bug(
        "unpatchify_columns_first",
        "Rows and columns in a patch are exchanged when the picture is put together.",
        (r"patch|layout|\bax[ei]s\b|reshap|rows?\b.*column", SWAPPED),
    ),
    Bug(
        "guidance_halves_exchanged",
        "Guidance takes the negative prompt's half of the batch for the prompt's.",
        (r"guid|\bcfg\b|\buncond|negative|batch", SWAPPED),
    ),
    Bug(
        "prediction_is_noise",
        "The sampler takes the model's prediction for noise (epsilon); it is v.",
        (r"epsilon|\beps\b|\bv.?pred|velocity|prediction.?type|predicts?\b|parametri[sz]",),
    ),
    Bug(
        "variance_taken",
        "The half of channels with the learned variance is taken for the prediction.",
        (r"sigma|varianc|halves|\bhalf\b|chunk|split|channel",),
    ),
    Bug(
        "last_alpha_is_one",
        "The last step ends at an alpha of 1, not at the first of the schedule.",
        (r"alpha|last step|final step|set_alpha|step size|coefficient|sampler|solver",),
    ),
)
