"""Bria 3.2's transformer in MLX, built like the Flux of mlx-examples; latents have channels last.

Names of values and weights are those of Flux's own repository (double_blocks, single_blocks,
img_in …), with fused weights; diffusers' BriaTransformer2DModel and the loop of BriaPipeline, with
guidance and its normalisation, are the reference. A batch is the negative prompt and the prompt.
"""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import BriaPipeline, BriaTransformer2DModel, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from mlx.utils import tree_flatten

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
from lydite.trace.torch_capture import record_modules

NAME = "bria_mlx"
HEADS, HEAD, DOUBLE, SINGLE, TEXT, TOKENS, WAVE = 3, 16, 2, 3, 20, 7, 256
WIDTH, CHANNELS, PATCH, AXES = HEADS * HEAD, 4, 2, (4, 6, 6)
ROWS, COLUMNS = 8, 10
PERIOD = 16384  # longest of the timestep's sinusoids; float32 exp agrees among libraries here
HIGH, WIDE = ROWS // PATCH, COLUMNS // PATCH
PLACES = HIGH * WIDE
STEPS, GUIDANCE = 3, 4.0
VALID = (3, 5)  # tokens of the negative prompt and of the prompt; features after them are zeros
SHIFTS: dict[str, Any] = dict(
    base_image_seq_len=16, max_image_seq_len=64, base_shift=0.5, max_shift=1.15
)


def reference(folder: Path, dtype: str) -> None:
    """The loop of BriaPipeline for one image, from embeddings to latents."""
    config: dict[str, Any] = dict(in_channels=CHANNELS * PATCH**2, num_layers=DOUBLE)
    config |= dict(num_single_layers=SINGLE, attention_head_dim=HEAD, num_attention_heads=HEADS)
    config |= dict(joint_attention_dim=TEXT, axes_dims_rope=list(AXES), time_theta=PERIOD)
    model = randomised(lambda: BriaTransformer2DModel(**config), 83)
    for at, (name, parameter) in enumerate(model.named_parameters()):
        if ".attn.norm_" in name:
            parameter.mul_(1 + noise(at, HEAD) / 3)
        if name.endswith((".linear.weight", "to_out.0.weight", "to_add_out.weight")):
            parameter.mul_(2)  # each gate and each attention matters
    model = saved(model, folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **SHIFTS)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / STEPS, STEPS).tolist(),
            mu=calculate_shift(PLACES, *SHIFTS.values()),
        )
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        texts = noise(5, 2, TOKENS, TEXT)
        for text, valid in zip(texts, VALID, strict=True):
            text[valid:] = 0
        prompts = texts.to(model.dtype)
        unpacked = noise(6, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/negative_prompt_embeds", prompts[:1], kind="input")
        recorder.record("pipeline/prompt_embeds", prompts[1:], kind="input")
        recorder.record("pipeline/noise", unpacked, kind="input")
        latents = BriaPipeline._pack_latents(unpacked, 1, CHANNELS, ROWS, COLUMNS)
        places: Any = (1, HIGH, WIDE, latents.device, latents.dtype)
        ids = dict(
            txt_ids=torch.zeros(TOKENS, 3),
            img_ids=BriaPipeline._prepare_latent_image_ids(*places)[0],
        )
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            predicted = model(
                hidden_states=torch.cat([latents] * 2),
                timestep=t.expand(2),
                encoder_hidden_states=prompts,
                return_dict=False,
                **ids,
            )[0]
            uncond, cond = predicted.chunk(2)
            predicted = uncond + GUIDANCE * (cond - uncond)
            recorder.record("pipeline/noise_pred_guided", predicted)
            predicted = predicted * (0.7 * (cond.std() / predicted.std())) + 0.3 * predicted
            recorder.record("pipeline/noise_pred", predicted)
            latents = scheduler.step(predicted, t, latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)
            unpacked = BriaPipeline._unpack_latents(latents, HIGH, WIDE, 1)
            recorder.record("pipeline/latents_unpacked", unpacked)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under Flux's names; projections of the same input are one matrix."""
    new: dict[str, Array] = {}

    def put(name: str, *old: str) -> None:
        for end in ("weight", "bias"):
            new[f"{name}.{end}"] = np.concatenate([w[f"{x}.{end}"] for x in old])

    put("img_in", "x_embedder")
    put("txt_in", "context_embedder")
    put("time_in.in_layer", "time_embed.timestep_embedder.linear_1")
    put("time_in.out_layer", "time_embed.timestep_embedder.linear_2")
    for i in range(DOUBLE):
        to, old = f"double_blocks.{i}", f"transformer_blocks.{i}"
        added = [f"{old}.attn.add_{x}_proj" for x in "qkv"]
        if bug == "text_keys_values_exchanged":
            added = [added[0], added[2], added[1]]
        put(f"{to}.img_attn.qkv", *(f"{old}.attn.to_{x}" for x in "qkv"))
        put(f"{to}.txt_attn.qkv", *added)
        put(f"{to}.img_attn.proj", f"{old}.attn.to_out.0")
        put(f"{to}.txt_attn.proj", f"{old}.attn.to_add_out")
        for stream, mid, end in (("img", "", ""), ("txt", "added_", "_context")):
            put(f"{to}.{stream}_mod.lin", f"{old}.norm1{end}.linear")
            put(f"{to}.{stream}_mlp.0", f"{old}.ff{end}.net.0.proj")
            put(f"{to}.{stream}_mlp.2", f"{old}.ff{end}.net.2")
            if bug == "text_query_norm_of_image":
                mid = ""
            for x, norm in (("q", "query_norm"), ("k", "key_norm")):
                part = "" if x == "q" else ("added_" if stream == "txt" else "")
                part = mid if x == "q" else part
                new[f"{to}.{stream}_attn.{norm}.weight"] = w[f"{old}.attn.norm_{part}{x}.weight"]
    for i in range(SINGLE):
        to, old = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
        put(f"{to}.modulation.lin", f"{old}.norm.linear")
        put(f"{to}.linear1", *(f"{old}.attn.to_{x}" for x in "qkv"), f"{old}.proj_mlp")
        put(f"{to}.linear2", f"{old}.proj_out")
        new[f"{to}.query_norm.weight"] = w[f"{old}.attn.norm_q.weight"]
        new[f"{to}.key_norm.weight"] = w[f"{old}.attn.norm_k.weight"]
    put("final_layer.linear", "proj_out")
    put("final_layer.modulation", "norm_out.linear")
    if bug != "final_shift_scale_not_exchanged":  # here the shift is first
        for end in ("weight", "bias"):
            scale, shift = np.split(new[f"final_layer.modulation.{end}"], 2)
            new[f"final_layer.modulation.{end}"] = np.concatenate([shift, scale])
    return new


class Part(nn.Module):
    """What the layers share: where they are, the planted bug, and taps below their name."""

    def __init__(self, path: str, bug: str | None) -> None:
        super().__init__()
        self.path, self.bug = path, bug

    def tap(self, name: str, x: mx.array) -> mx.array:
        return taps.tap(".".join(filter(None, (self.path, name))), x)


def sinusoid(t: mx.array, bug: str | None) -> mx.array:
    """In NumPy: one bit of a frequency matters at t = 1000, as does MLX's cosine."""
    half = WAVE // 2
    exponents = np.float32(-math.log(PERIOD)) * np.arange(half, dtype=np.float32)
    frequencies = np.exp((exponents / np.float32(half)).astype(np.float64)).astype(np.float32)
    angles = np.array(t.astype(mx.float32))[:, None] * frequencies
    first, second = np.cos(angles), np.sin(angles)
    if bug == "time_sines_first":
        first, second = second, first
    return mx.array(np.concatenate([first, second], -1))


def rope_table(ids: mx.array) -> tuple[mx.array, mx.array]:
    """Cosines and sines of (tokens, half of a head's channels)."""
    where, parts = np.array(ids, np.float64), []
    for axis, size in enumerate(AXES):
        frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
        parts.append(where[:, axis, None] * frequencies)
    angles = np.concatenate(parts, -1)
    return mx.array(np.cos(angles).astype(np.float32)), mx.array(np.sin(angles).astype(np.float32))


def apply_rope(x: mx.array, pe: tuple[mx.array, mx.array], bug: str | None) -> mx.array:
    """Turns pairs of neighbouring channels of (batch, heads, tokens, channels)."""
    cos, sin = pe
    y = x.astype(mx.float32)
    if bug == "rope_halves":
        a, b = mx.split(y, 2, axis=-1)
        return mx.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)
    a, b = y[..., ::2], y[..., 1::2]
    return mx.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape).astype(x.dtype)


def heads_of(qkv: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values as (batch, heads, tokens, channels)."""
    batch, tokens, _ = qkv.shape
    q, k, v = qkv.reshape(batch, tokens, 3, HEADS, HEAD).transpose(2, 0, 3, 1, 4)
    return q, k, v


def attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=HEAD**-0.5, mask=mask)


def merged(x: mx.array) -> mx.array:
    batch, _, tokens, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, tokens, WIDTH)


def layer_norm(x: mx.array) -> mx.array:
    return mx.fast.layer_norm(x, None, None, 1e-6)


class Embedder(Part):
    def __init__(self, path: str, bug: str | None) -> None:
        super().__init__(path, bug)
        self.in_layer = nn.Linear(WAVE, WIDTH)
        self.out_layer = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.tap("in_layer", self.in_layer(x))
        return self.tap("out_layer", self.out_layer(self.tap("silu", nn.silu(x))))


class Modulation(Part):
    """Rows of (batch, 1, width): shift, scale and gate, once or twice."""

    def __init__(self, path: str, bug: str | None, count: int) -> None:
        super().__init__(path, bug)
        self.count = count
        self.lin = nn.Linear(WIDTH, count * WIDTH)

    def __call__(self, vec: mx.array) -> list[mx.array]:
        single = self.count == 3
        vec = vec if self.bug == "single_modulation_without_silu" and single else nn.silu(vec)
        y = self.tap("lin", self.lin(vec))
        return list(mx.split(y[:, None], self.count, axis=-1))


class StreamAttention(Part):
    """Projections of one of the two streams; both attend together."""

    def __init__(self, path: str, bug: str | None) -> None:
        super().__init__(path, bug)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.query_norm = nn.RMSNorm(HEAD, eps=1e-6)
        self.key_norm = nn.RMSNorm(HEAD, eps=1e-6)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = heads_of(self.tap("qkv", self.qkv(x)))
        q = self.tap("query_norm", self.query_norm(q))
        k = self.tap("key_norm", self.key_norm(k))
        return q, k, self.tap("v", v)


class DoubleBlock(Part):
    def __init__(self, path: str, bug: str | None) -> None:
        super().__init__(path, bug)
        self.img_mod = Modulation(f"{path}.img_mod", bug, 6)
        self.txt_mod = Modulation(f"{path}.txt_mod", bug, 6)
        self.img_attn = StreamAttention(f"{path}.img_attn", bug)
        self.txt_attn = StreamAttention(f"{path}.txt_attn", bug)
        self.img_mlp = [nn.Linear(WIDTH, 4 * WIDTH), nn.gelu_approx, nn.Linear(4 * WIDTH, WIDTH)]
        self.txt_mlp = [nn.Linear(WIDTH, 4 * WIDTH), nn.gelu_approx, nn.Linear(4 * WIDTH, WIDTH)]

    def mlp(self, stream: str, x: mx.array) -> mx.array:
        for at, layer in enumerate(self[f"{stream}_mlp"]):
            x = self.tap(f"{stream}_mlp.{at}", layer(x))
        return x

    def __call__(
        self,
        img: mx.array,
        txt: mx.array,
        vec: mx.array,
        pe: tuple[mx.array, mx.array],
        mask: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        bug = self.bug
        image = self.img_mod(vec)
        text = self.img_mod(vec) if bug == "text_uses_image_modulation" else self.txt_mod(vec)
        x = self.tap("img_norm1", layer_norm(img))
        iq, ik, iv = self.img_attn(self.tap("img_modulated", (1 + image[1]) * x + image[0]))
        x = self.tap("txt_norm1", layer_norm(txt))
        tq, tk, tv = self.txt_attn(self.tap("txt_modulated", (1 + text[1]) * x + text[0]))
        q, k, v = (mx.concatenate(pair, 2) for pair in ([tq, iq], [tk, ik], [tv, iv]))
        q = self.tap("q_rope", apply_rope(q, pe, bug))
        k = self.tap("k_rope", apply_rope(k, pe, bug))
        y = attention(q, k, v, mask)
        y = y.reshape(y.shape[0], -1, WIDTH) if bug == "heads_not_transposed" else merged(y)
        y = self.tap("attn", y)
        before = img
        y_txt, y_img = y[:, : txt.shape[1]], y[:, txt.shape[1] :]
        img = img + image[2] * self.tap("img_attn.proj", self.img_attn.proj(y_img))
        x = before if bug == "image_mlp_before_attention" else img
        x = self.tap("img_norm2", layer_norm(x))
        img = img + image[5] * self.mlp("img", (1 + image[4]) * x + image[3])
        txt = txt + text[2] * self.tap("txt_attn.proj", self.txt_attn.proj(y_txt))
        x = self.tap("txt_norm2", layer_norm(txt))
        txt = txt + text[5] * self.mlp("txt", (1 + text[4]) * x + text[3])
        return self.tap("img", img), self.tap("txt", txt)


class SingleBlock(Part):
    def __init__(self, path: str, bug: str | None) -> None:
        super().__init__(path, bug)
        self.modulation = Modulation(f"{path}.modulation", bug, 3)
        self.linear1 = nn.Linear(WIDTH, 7 * WIDTH)
        self.linear2 = nn.Linear(5 * WIDTH, WIDTH)
        self.query_norm = nn.RMSNorm(HEAD, eps=1e-6)
        self.key_norm = nn.RMSNorm(HEAD, eps=1e-6)

    def __call__(
        self,
        x: mx.array,
        vec: mx.array,
        pe: tuple[mx.array, mx.array],
        mask: mx.array | None,
    ) -> mx.array:
        bug = self.bug
        shift, scale, gate = self.modulation(vec)
        h = self.tap("pre_norm", layer_norm(x))
        h = self.tap("modulated", (1 + scale) * h + shift)
        h = self.tap("linear1", self.linear1(h))
        qkv, mlp = mx.split(h, [3 * WIDTH], axis=-1)
        q, k, v = heads_of(qkv)
        if bug == "single_norm_after_rope":
            q, k = (apply_rope(y, pe, bug) for y in (q, k))
            q = self.tap("q_rope", self.query_norm(q))
            k = self.tap("k_rope", self.key_norm(k))
        else:
            q = self.tap("query_norm", self.query_norm(q))
            k = self.tap("key_norm", self.key_norm(k))
            q = self.tap("q_rope", apply_rope(q, pe, bug))
            k = self.tap("k_rope", apply_rope(k, pe, bug))
        y = self.tap("attn", merged(attention(q, k, v, mask)))
        act = nn.gelu_fast_approx if bug == "single_gelu_sigmoid" else nn.gelu_approx
        mlp = self.tap("mlp_act", act(mlp))
        both = [mlp, y] if bug == "single_mlp_before_attention" else [y, mlp]
        y = self.tap("linear2", self.linear2(mx.concatenate(both, -1)))
        return self.tap("", x + gate * y)


class FinalLayer(Part):
    def __init__(self, path: str, bug: str | None) -> None:
        super().__init__(path, bug)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.linear = nn.Linear(WIDTH, CHANNELS * PATCH**2)

    def __call__(self, x: mx.array, vec: mx.array) -> mx.array:
        shift, scale = mx.split(self.modulation(nn.silu(vec))[:, None], 2, axis=-1)
        x = self.tap("norm_final", layer_norm(x))
        x = self.tap("modulated", (1 + scale) * x + shift)
        return self.tap("linear", self.linear(x))


class Bria(Part):
    def __init__(self, bug: str | None) -> None:
        super().__init__("", bug)
        self.img_in = nn.Linear(CHANNELS * PATCH**2, WIDTH)
        self.txt_in = nn.Linear(TEXT, WIDTH)
        self.time_in = Embedder("time_in", bug)
        self.double_blocks = [DoubleBlock(f"double_blocks.{i}", bug) for i in range(DOUBLE)]
        self.single_blocks = [SingleBlock(f"single_blocks.{i}", bug) for i in range(SINGLE)]
        self.final_layer = FinalLayer("final_layer", bug)

    def position_ids(self) -> mx.array:
        """The text is at 0, patches at (0, row, column)."""
        rows, columns = np.indices((HIGH, WIDE)).reshape(2, -1)
        image = np.stack([np.zeros_like(rows), rows, columns], -1)
        text = np.zeros((TOKENS, 3), image.dtype)
        if self.bug == "text_tokens_numbered":
            text += np.arange(TOKENS)[:, None]
        ids = np.concatenate([text, image]).astype(np.float32)
        return taps.tap("ids", mx.array(ids), kind="input")

    def patchify(self, x: mx.array) -> mx.array:
        """(batch, tokens, patch) of (batch, rows, columns, channels)."""
        x = x.reshape(-1, HIGH, PATCH, WIDE, PATCH, CHANNELS)
        order = (0, 1, 3, 5, 2, 4)
        if self.bug == "patches_channels_last":
            order = (0, 1, 3, 2, 4, 5)
        return self.tap("patches", x.transpose(order).reshape(-1, PLACES, CHANNELS * PATCH**2))

    def unpatchify(self, x: mx.array) -> mx.array:
        x = x.reshape(-1, HIGH, WIDE, CHANNELS, PATCH, PATCH)
        order = (0, 1, 4, 2, 5, 3)
        if self.bug == "unpatchify_rows_columns":
            order = (0, 1, 5, 2, 4, 3)
        return x.transpose(order).reshape(-1, ROWS, COLUMNS, CHANNELS)

    def __call__(self, x: mx.array, txt: mx.array, t: mx.array) -> mx.array:
        """Tokens of the velocity."""
        mask = None
        if self.bug == "text_padding_masked":
            real = [[j < n for j in range(TOKENS)] + [True] * PLACES for n in VALID]
            mask = mx.array(real)[:, None, None]
        wave = self.tap("sinusoid", sinusoid(t, self.bug).astype(x.dtype))
        vec = self.time_in(wave)
        cos, sin = rope_table(self.position_ids())
        pe = self.tap("pe_cos", cos), self.tap("pe_sin", sin)
        img = self.tap("img_in", self.img_in(self.patchify(x)))
        txt = self.tap("txt_in", self.txt_in(txt))
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, pe, mask)
        x = mx.concatenate([txt, img], 1)
        for block in self.single_blocks:
            x = block(x, vec, pe, mask)
        x = x[:, :PLACES] if self.bug == "image_tokens_from_front" else x[:, TOKENS:]
        return self.final_layer(self.tap("img_out", x), vec)


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Timesteps, and sigmas with the last one, 0."""
    first, most, low, high = SHIFTS.values()
    mu = low + (high - low) * (PLACES - first) / (most - first)
    end = 1 / 1000 if bug == "sigmas_end_at_a_thousandth" else 1 / STEPS
    sigmas = np.linspace(1, end, STEPS).astype(np.float32)
    factor = mu if bug == "shift_without_exp" else math.exp(mu)
    sigmas = (factor / (factor + (1 / sigmas - 1))).astype(np.float32)
    return sigmas * np.float32(1000), np.append(sigmas, np.float32(0))


def guided(pred: mx.array, bug: str | None) -> mx.array:
    """Guidance, whose deviation is then brought partly back to that of the prompt's prediction."""
    cond, uncond = mx.split(pred, 2) if bug == "batch_halves_exchanged" else mx.split(pred, 2)[::-1]
    y = taps.tap("guided", uncond + GUIDANCE * (cond - uncond))
    ratio = mx.std(cond.astype(mx.float32)) / mx.std(y.astype(mx.float32))
    rescale = 0.3 if bug == "rescale_parts_exchanged" else 0.7
    y = y * (rescale * ratio).astype(y.dtype) + (1 - rescale) * y
    return taps.tap("rescaled", y)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, kind = given(folder), getattr(mx, dtype)
    net = Bria(bug)
    parameters = converted(checkpoint(folder, "transformer"), bug)
    net.load_weights([(k, mx.array(v)) for k, v in parameters.items()])
    net.set_dtype(kind)
    flat: Any = tree_flatten(net.parameters())
    kept = {k: np.array(v.astype(mx.float32)).astype(dtype) for k, v in flat} if weights else None
    names = ("negative_prompt_embeds", "prompt_embeds")
    txt = mx.array(np.concatenate([value(f"pipeline/{x}") for x in names])).astype(kind)
    x = mx.array(value("pipeline/noise").transpose(0, 2, 3, 1)).astype(kind)
    times, sigmas = schedule(bug)
    blocks = ("txt", "noise", "timesteps", "sigmas", "img_in", "txt_in", "time_in.out_layer")
    blocks += ("double_blocks.?.img", "double_blocks.?.txt", "single_blocks.?")
    blocks += ("final_layer.linear", "guided", "rescaled", "latents")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("timesteps", times, kind="schedule")
        taps.tap("sigmas", sigmas, kind="schedule")
        txt = taps.tap("txt", txt, kind="input")
        x = taps.tap("noise", x, kind="input")
        for i, t in enumerate(times):
            taps.set_step(i)
            pred = net(mx.concatenate([x, x]), txt, mx.array([float(t)] * 2).astype(kind))
            velocity = net.unpatchify(guided(pred, bug)).astype(mx.float32)
            x = x.astype(mx.float32) + float(sigmas[i + 1] - sigmas[i]) * velocity
            if bug == "latents_in_bfloat16":
                x = x.astype(mx.bfloat16)
            x = taps.tap("latents", x.astype(kind))


NO_COUNTERPART: tuple[str, ...] = (r"^pe_(cos|sin)$",)  # the reference has each number twice

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos"
SCHEDULE = r"schedule|sigma|timestep"
BUGS = (
    Bug(
        "text_keys_values_exchanged",
        "The text's fused projection is in the order q, v, k: keys have the weights of values.",
        (LOADED, SWAPPED, r"values?\b.*keys?\b|keys?\b.*values?\b"),
        "weights",
    ),
    Bug(
        "final_shift_scale_not_exchanged",
        "The last modulation's halves were not exchanged when loading: its scale is the shift.",
        (LOADED, SWAPPED, r"shift.*scale|scale.*shift|chunk|split|\bhalf|halves"),
        "weights",
    ),
    Bug(
        "text_query_norm_of_image",
        "The norm of the text's queries has the weight of the image's.",
        (LOADED, r"dupl|another|other norm|same (norm|param)", r"norm_(added_)?q|quer(y|ies)"),
        "weights",
    ),
    Bug(
        "shift_without_exp",
        "The schedule is shifted by mu, not by exp(mu).",
        (r"\bshift|exp\b|exponen|\bmu\b", SCHEDULE),
        "schedule",
    ),
    Bug(
        "sigmas_end_at_a_thousandth",
        "Sigmas before the shift go down to 1/1000, not to 1/steps.",
        (r"linspace|spac(ed|ing)|\bend(s|point)?\b|\blast\b|minimum|sigma_min", SCHEDULE),
        "schedule",
    ),
    Bug(
        "time_sines_first",
        "The timestep's embedding has sines before cosines.",
        (SWAPPED, r"\bcos(ine)?s?\b|\bsin(e|es)?\b|flip|\bhalf|halves"),
    ),
    Bug(
        "text_tokens_numbered",
        "Text tokens have positions 0, 1, 2 …; in the reference all are at 0.",
        (r"position|\bids?\b|\brope\b|rotary|coordinate|txt_ids",),
        "inputs",
    ),
    Bug(
        "text_padding_masked",
        "Attention masks the padding of the text; the reference attends to it.",
        (r"mask|padd", r"(all|fewer) (keys|tokens)|ignor\w+ (some )?(keys|tokens)"),
    ),
    Bug(
        "patches_channels_last",
        "Patches are (row, column, channel), not (channel, row, column).",
        (r"patch|\bpack|channel|layout|\bax[ei]s\b|reshap|flatten", SWAPPED),
    ),
    Bug(
        "rope_halves",
        "RoPE turns pairs of a head's first and second half, not neighbouring channels.",
        (r"interleav|\bpair|neighbo|adjacent|halves|\bhalf\b|rotate_half|neox|gpt-?j",),
    ),
    Bug(
        "single_norm_after_rope",
        "Single blocks norm queries and keys after RoPE, not before it.",
        (
            r"(\bnorm|rms).*(after|before|order|follow|preced).*(\brope|rotat|rotary)",
            r"(\brope|rotat|rotary).*(after|before|order|follow|preced).*(\bnorm|rms)",
            r"order of.*(\bnorm|rms).*(\brope|rotat|rotary)|order of.*(\brope|rotat).*(\bnorm|rms)",
        ),
    ),
    Bug(
        "heads_not_transposed",
        "In double blocks heads are merged without moving their axis behind the tokens.",
        (r"heads?\b|\bax[ei]s\b|layout|reshap|transpos|permut|merg",),
    ),
    Bug(
        "text_uses_image_modulation",
        "The text of double blocks is modulated by the image's shifts, scales and gates.",
        (
            r"img_mod|norm1\.linear",
            r"(other|wrong|another|same|image|dupl|shared).*(modul|stream|norm1|shift|scale)",
            r"(modul|stream|norm1|shift|scale).*(other|wrong|another|same|image|dupl|shared)",
        ),
    ),
    Bug(
        "image_mlp_before_attention",
        "The image's MLP takes the block's input, without the result of attention.",
        (
            r"(block|layer)'?s? (own )?input|input of (the )?(block|layer)",
            r"residual|skip connection|shortcut|stale|parallel",
            r"(before|without|lack|miss|omit|skip|leav)\w*.*attention",
            r"attention.*(missing|left out|not (yet )?added|skipped|omitted)",
        ),
    ),
    Bug(
        "single_modulation_without_silu",
        "The modulation of single blocks lacks its SiLU.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "single_gelu_sigmoid",
        "The MLP of single blocks has GELU by a sigmoid, not by tanh.",
        (r"gelu|tanh|sigmoid|activation|approximat",),
    ),
    Bug(
        "single_mlp_before_attention",
        "Single blocks concatenate the MLP before attention; the weights expect it after.",
        (r"concat|\bcat\b|join|stack", SWAPPED),
    ),
    Bug(
        "image_tokens_from_front",
        "The result takes the first tokens as the image's; the text is in front.",
        (
            r"slic|\bcut|offset|split|first (tokens|rows|20)|\bfront|\bstart|crop",
            r"text.*(token|part)|(token|part)\w*.*text|encoder_hidden|sequence|shifted|roll",
        ),
    ),
    Bug(
        "unpatchify_rows_columns",
        "Rows and columns inside a patch are exchanged in the result.",
        (r"patch|pack|layout|\bax[ei]s\b|reshap|rows?\b|column|height|width", SWAPPED),
    ),
    Bug(
        "batch_halves_exchanged",
        "The first half of the batch is taken for the prompt's; it is the negative prompt's.",
        (
            r"guid|\bcfg\b|\b(un)?cond(itional)?\b|negative",
            r"(halves|half|batch|chunk|split).*(swap|exchang|order|revers)|swap|exchang",
        ),
    ),
    Bug(
        "rescale_parts_exchanged",
        "0.3 of the guided prediction is rescaled and 0.7 is kept, not the other way round.",
        (
            r"rescal|normali[sz]|deviation|\bstd\b",
            r"\b0\.[37]\b|\bscal(e|ed|ing|es)\b|factor|multipl|times|\bmix|blend|magnitude",
        ),
    ),
    Bug(
        "latents_in_bfloat16",
        "Latents are rounded to bfloat16 after each step.",
        (r"bf16|bfloat|\bhalf\b|precision|round|\bcast|mantissa|float16|f16",),
    ),
)
