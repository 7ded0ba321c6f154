"""Z-Image in MLX: two captions as a batch, channels last, q, k, v fused, gate and up fused.

The reference is diffusers' transformer in the loop of ZImagePipeline: guidance by the caption that
goes away from the negative one, renormalized, and two Euler steps of a shifted schedule.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
from diffusers.models.transformers import transformer_z_image

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

NAME = "zimage"
HEADS, HEAD, COND, CAPTION, CHANNELS, PATCH = 3, 20, 44, 26, 6, 2
WIDTH, MULTIPLE, FREQUENCIES = HEADS * HEAD, 32, 256
AXES, LENGTHS, THETA = (4, 8, 8), (128, 24, 24), 256.0
REFINERS, LAYERS = 2, 3
ROWS, COLUMNS = 8, 14  # of latents
HIGH, WIDE = ROWS // PATCH, COLUMNS // PATCH
PATCHES = HIGH * WIDE
PROMPT, NEGATIVE = 37, 11  # tokens
STEPS, SHIFT, GUIDANCE, LIMIT, TRUNCATION = 2, 2.6, 3.0, 1.0, 0.8
SIZES = {"t_embedder": 0.5, "adaLN_modulation": 0.8, "norm_q": 1.2, "all_final_layer": 0.7}


def made() -> ZImageTransformer2DModel:
    """The model; the conditioning's width is a constant of its module and larger than this one."""
    config: dict[str, Any] = dict(in_channels=CHANNELS, dim=WIDTH, n_layers=LAYERS)
    config |= dict(n_refiner_layers=REFINERS, n_heads=HEADS, n_kv_heads=HEADS)
    config |= dict(cap_feat_dim=CAPTION, rope_theta=THETA, axes_dims=AXES, axes_lens=LENGTHS)
    usual = transformer_z_image.ADALN_EMBED_DIM
    transformer_z_image.ADALN_EMBED_DIM = COND
    try:
        model = ZImageTransformer2DModel(**config)
    finally:
        transformer_z_image.ADALN_EMBED_DIM = usual
    model.x_pad_token.data.normal_()
    model.cap_pad_token.data.normal_()
    return model


def tuned(model: ZImageTransformer2DModel) -> ZImageTransformer2DModel:
    """Weights of such sizes that the time matters and rounding does not grow much."""
    for name, parameter in model.named_parameters():
        parameter.data.mul_(next((x for part, x in SIZES.items() if part in name), 1))
    return model


def reference(folder: Path, dtype: str) -> None:
    """The pipeline's loop, from noise to latents."""
    model = saved(tuned(randomised(made, 71)), folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1 / STEPS, STEPS).tolist())
    wide = torch.float64 if dtype == "float64" else torch.float32
    latents = noise(5, 1, CHANNELS, ROWS, COLUMNS)
    prompt, negative = noise(6, PROMPT, CAPTION), 0.7 * noise(7, NEGATIVE, CAPTION)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        recorder.record("pipeline/noise", latents, kind="input")
        recorder.record("pipeline/prompt_embeds", prompt, kind="input")
        recorder.record("pipeline/negative_prompt_embeds", negative, kind="input")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        captions = [prompt.to(model.dtype), negative.to(model.dtype)]
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            time = (1000 - t.expand(1)) / 1000
            scale = 0.0 if float(time) > TRUNCATION else GUIDANCE
            assert scale > 0
            pictures = list(latents.to(model.dtype).repeat(2, 1, 1, 1).unsqueeze(2).unbind(0))
            out = model(pictures, time.repeat(2), captions, return_dict=False)[0]
            positive, other = (x.to(wide) for x in out)
            velocity = positive + scale * (positive - other)
            most = torch.linalg.vector_norm(positive) * LIMIT
            size = torch.linalg.vector_norm(velocity)
            if size > most:
                velocity = velocity * (most / size)
            velocity = recorder.record("pipeline/velocity", -velocity[None].squeeze(2))
            latents = scheduler.step(velocity, t, latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this engine; weights stay (out, in) as mlx.nn.Linear has them."""
    new: dict[str, Array] = {}

    def put(name: str, *old: str) -> None:
        new[f"{name}.weight"] = np.concatenate([w[f"{x}.weight"] for x in old])
        if f"{old[0]}.bias" in w:
            new[f"{name}.bias"] = np.concatenate([w[f"{x}.bias"] for x in old])

    def layer(name: str, old: str) -> None:
        put(f"{name}.wqkv", *(f"{old}.attention.to_{x}" for x in "qkv"))
        put(f"{name}.wo", f"{old}.attention.to_out.0")
        put(f"{name}.q_norm", f"{old}.attention.norm_q")
        put(f"{name}.k_norm", f"{old}.attention.norm_k")
        late = bug == "up_rows_before_gate_rows" and name == "joint_layers.2"
        other = bug == "text_mlp_of_image_layer" and name == "text_layers.0"
        mlp = f"{'noise_refiner.0' if other else old}.feed_forward"
        put(f"{name}.w13", *(f"{mlp}.w{x}" for x in ("31" if late else "13")))
        put(f"{name}.w2", f"{mlp}.w2")
        put(f"{name}.pre_attn", f"{old}.attention_norm1")
        put(f"{name}.post_attn", f"{old}.attention_norm2")
        put(f"{name}.pre_mlp", f"{old}.ffn_norm1")
        put(f"{name}.post_mlp", f"{old}.ffn_norm2")
        if f"{old}.adaLN_modulation.0.weight" in w:
            put(f"{name}.modulate", f"{old}.adaLN_modulation.0")

    put("patch_proj", "all_x_embedder.2-1")
    put("time_mlp.0", "t_embedder.mlp.0")
    put("time_mlp.1", "t_embedder.mlp.2")
    put("text_norm", "cap_embedder.0")
    put("text_proj", "cap_embedder.1")
    put("head.modulate", "all_final_layer.2-1.adaLN_modulation.1")
    put("head.proj", "all_final_layer.2-1.linear")
    new["image_pad"], new["text_pad"] = w["x_pad_token"][0], w["cap_pad_token"][0]
    for i in range(REFINERS):
        layer(f"image_layers.{i}", f"noise_refiner.{i}")
        layer(f"text_layers.{i}", f"context_refiner.{i}")
    for i in range(LAYERS):
        layer(f"joint_layers.{i}", f"layers.{i}")

    if bug == "qkv_rows_grouped_by_head":
        rows = new["joint_layers.1.wqkv.weight"].reshape(3, HEADS, HEAD, WIDTH)
        new["joint_layers.1.wqkv.weight"] = rows.swapaxes(0, 1).reshape(-1, WIDTH).copy()
    if bug == "square_weight_transposed":
        new["image_layers.0.wo.weight"] = new["image_layers.0.wo.weight"].T.copy()
    if bug == "pad_vectors_exchanged":
        new["image_pad"], new["text_pad"] = new["text_pad"], new["image_pad"]
    if bug == "head_modulation_bias_dropped":
        new["head.modulate.bias"] = np.zeros_like(new["head.modulate.bias"])
    if bug == "patch_weight_for_channels_first":
        weight = new["patch_proj.weight"].reshape(WIDTH, PATCH * PATCH, CHANNELS)
        new["patch_proj.weight"] = weight.swapaxes(1, 2).reshape(WIDTH, -1).copy()
    if bug == "down_projection_in_eight_bits":
        weight = new["joint_layers.0.w2.weight"]
        unit = np.abs(weight).max(1, keepdims=True) / np.float32(127)
        new["joint_layers.0.w2.weight"] = np.round(weight / unit) * unit
    if bug == "sandwich_norms_mixed_up":
        a, b = "joint_layers.1.post_attn.weight", "joint_layers.1.pre_mlp.weight"
        new[a], new[b] = new[b], new[a]
    if bug == "refiner_index_not_advanced":
        for name in [x for x in new if x.startswith("image_layers.1.")]:
            new[name] = new[name.replace(".1.", ".0.", 1)]
    return new


def padded(n: int) -> int:
    """The next multiple of 32."""
    return n + -n % MULTIPLE


def grid(start: int, frames: int, rows: int, columns: int) -> Array:
    """Positions (frame, row, column) of tokens."""
    axes = np.arange(start, start + frames), np.arange(rows), np.arange(columns)
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)


def stacked(items: list[mx.array], length: int) -> mx.array:
    """A batch of sequences, zeros after their ends."""
    return mx.stack([mx.pad(x[:length], [(0, max(length - len(x), 0)), (0, 0)]) for x in items])


def visible(lengths: list[int], total: int) -> mx.array | None:
    """Which keys each caption's tokens see; None where all."""
    if min(lengths) == total:
        return None
    return (mx.arange(total)[None] < mx.array(lengths)[:, None])[:, None, None]


class Rope:
    """Cosines and sines of (batch, tokens, half of a head), float32."""

    def __init__(self, positions: list[Array], length: int, bug: str | None) -> None:
        self.bug = bug
        tables = [self.angles(x) for x in positions]
        self.cos = stacked([mx.array(np.cos(x)) for x in tables], length)
        self.sin = stacked([mx.array(np.sin(x)) for x in tables], length)

    def angles(self, positions: Array) -> Array:
        theta = 10000.0 if self.bug == "theta_of_ten_thousand" else THETA
        parts = [
            positions[:, i : i + 1] * theta ** (-np.arange(0, width, 2) / width)
            for i, width in enumerate(AXES)
        ]
        return np.concatenate(parts, -1).astype(np.float32)

    def __call__(self, x: mx.array) -> mx.array:
        """Of (batch, tokens, heads, head): neighbours are a pair."""
        y = x.astype(mx.float32)
        a, b = y[..., 0::2], y[..., 1::2]
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        if self.bug == "rotation_in_bfloat16":
            cos, sin = (z.astype(mx.bfloat16).astype(mx.float32) for z in (cos, sin))
        y = mx.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)
        return y.astype(x.dtype)


class Engine:
    """The transformer; a step's latents are (1, rows, columns, channels)."""

    def __init__(self, w: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.bug, self.dtype = bug, getattr(mx, dtype)
        self.w = {name: mx.array(x).astype(self.dtype) for name, x in w.items()}
        self.condition: mx.array | None = None

    def lin(self, name: str, x: mx.array) -> mx.array:
        y = x @ self.w[f"{name}.weight"].T
        if f"{name}.bias" in self.w:
            y = y + self.w[f"{name}.bias"]
        return taps.tap(name, y)

    def rms(self, name: str, x: mx.array, eps: float = 1e-5) -> mx.array:
        return mx.fast.rms_norm(x, self.w[f"{name}.weight"], eps)

    def time(self, t: float) -> mx.array:
        """The conditioning of a time between 0 (noise) and 1."""
        bug = self.bug
        if bug == "time_vector_computed_once" and self.condition is not None:
            return self.condition
        if bug != "time_from_zero_to_one":
            t = float(np.float32(t) * np.float32(1000))
        half = FREQUENCIES // 2
        exponents = np.float32(-np.log(10000)) * np.arange(half, dtype=np.float32)
        angles = np.float32(t) * np.exp(exponents / np.float32(half))
        parts = [np.cos(angles), np.sin(angles)]
        if bug == "sines_before_cosines":
            parts.reverse()
        x = mx.array(np.concatenate(parts)[None]).astype(self.dtype)
        x = self.lin("time_mlp.0", taps.tap("time_waves", x))
        self.condition = self.lin("time_mlp.1", nn.silu(x))
        return self.condition

    def attention(self, n: str, x: mx.array, rope: Rope, mask: mx.array | None) -> mx.array:
        bug, batch, length = self.bug, *x.shape[:2]
        qkv = self.lin(f"{n}.wqkv", x).reshape(batch, length, 3, HEADS, HEAD)
        q, k, v = (qkv[:, :, i] for i in range(3))
        late = bug == "normed_after_rotation" and n.startswith("joint")
        if late:
            q, k = rope(q), rope(k)
        q = self.rms(f"{n}.q_norm", q)
        key_norm = "q_norm" if bug == "one_norm_for_queries_and_keys" else "k_norm"
        k = self.rms(f"{n}.{key_norm}", k)
        if not late:
            q, k = rope(q), rope(k)
        q, k = taps.tap(f"{n}.q", q), taps.tap(f"{n}.k", k)
        q, k, v = (y.transpose(0, 2, 1, 3) for y in (q, k, v))
        root = WIDTH if bug == "scores_by_full_width" else HEAD
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=root**-0.5, mask=mask)
        if bug != "heads_not_moved_back" or n != "image_layers.1":
            y = y.transpose(0, 2, 1, 3)
        y = taps.tap(f"{n}.heads", y.reshape(batch, length, WIDTH))
        return self.lin(f"{n}.wo", y)

    def mlp(self, n: str, x: mx.array) -> mx.array:
        gate, up = mx.split(self.lin(f"{n}.w13", x), 2, axis=-1)
        if self.bug == "mlp_sigmoid" and n.startswith("text"):
            gate = mx.sigmoid(gate)
        else:
            gate = nn.silu(gate)
        return self.lin(f"{n}.w2", taps.tap(f"{n}.hidden", gate * up))

    def layer(
        self,
        n: str,
        x: mx.array,
        rope: Rope,
        mask: mx.array | None,
        condition: mx.array | None = None,
    ) -> mx.array:
        """Norms before and after both parts; scales and gates where there is a time."""
        bug = self.bug
        eps = 1e-6 if bug == "eps_of_layer_norms" else 1e-5
        one = mx.array(1, self.dtype)
        scale_a = gate_a = scale_m = gate_m = one
        if condition is not None:
            c = nn.silu(condition) if bug == "silu_before_every_modulation" else condition
            parts = self.lin(f"{n}.modulate", c)[:, None]
            scale_a, gate_a, scale_m, gate_m = mx.split(parts, 4, axis=-1)
            scale_a, scale_m = one + scale_a, one + scale_m
            gate_a = mx.tanh(gate_a)
            if not (bug == "mlp_gate_without_tanh" and n == "joint_layers.1"):
                gate_m = mx.tanh(gate_m)
            taps.tap(f"{n}.gates", mx.concatenate([gate_a, gate_m], -1))
        y = taps.tap(f"{n}.attn_in", self.rms(f"{n}.pre_attn", x, eps) * scale_a)
        y = self.rms(f"{n}.post_attn", self.attention(n, y, rope, mask), eps)
        x = x + gate_a * taps.tap(f"{n}.post_attn", y)
        y = taps.tap(f"{n}.mlp_in", self.rms(f"{n}.pre_mlp", x, eps) * scale_m)
        y = self.rms(f"{n}.post_mlp", self.mlp(n, y), eps)
        return taps.tap(n, x + gate_m * y)

    def positions(self, lengths: list[int]) -> tuple[list[Array], list[Array]]:
        """Of each caption's image and text tokens, with those of padding."""
        bug = self.bug
        image: list[Array] = []
        text: list[Array] = []
        for i, length in enumerate(lengths):
            padding = -length % MULTIPLE
            # Learned padding continues the count; what fills the batch stands at the origin.
            text.append(np.concatenate([grid(1, length + padding, 1, 1), np.zeros((padding, 3))]))
            start = padded(length) + 1
            if bug == "image_starts_at_last_text_position":
                start = padded(length)
            if bug == "image_starts_after_true_length":
                start = length + 1
            if bug == "positions_kept_for_second_caption" and i == 1:
                start = padded(lengths[0]) + 1
            rest = np.zeros((padded(PATCHES) - PATCHES, 3))
            if bug == "padding_patches_at_image_start":
                rest[:, 0] = start
            image.append(np.concatenate([grid(start, 1, HIGH, WIDE), rest]))
        return image, text

    def image_tokens(self, x: mx.array) -> mx.array:
        """Patches, embedded, and learned padding; the same for both captions."""
        x = x.astype(self.dtype).reshape(HIGH, PATCH, WIDE, PATCH, CHANNELS)
        x = x.transpose(0, 2, 1, 3, 4).reshape(PATCHES, -1)
        x = self.lin("patch_proj", taps.tap("patches", x))
        count = padded(PATCHES) - PATCHES
        rest = mx.broadcast_to(self.w["image_pad"], (count, WIDTH))
        if self.bug == "padding_repeats_last_patch":
            rest = mx.broadcast_to(x[-1], (count, WIDTH))
        x = mx.concatenate([x, rest])
        return taps.tap("image_tokens", mx.stack([x, x]))

    def text_tokens(self, captions: list[mx.array], length: int) -> mx.array:
        """Captions, embedded, with learned padding, then zeros to the longer one."""
        items: list[mx.array] = []
        for caption in captions:
            x = caption.astype(self.dtype)
            if self.bug != "caption_norm_missing":
                x = self.rms("text_norm", x)
            x = self.lin("text_proj", x)
            rest = mx.broadcast_to(self.w["text_pad"], (-len(x) % MULTIPLE, WIDTH))
            items.append(mx.concatenate([x, rest]))
        return taps.tap("text_tokens", stacked(items, length))

    def picture(self, x: mx.array) -> mx.array:
        """(batch, rows, columns, channels) of the tokens' pixels."""
        x = x[:, :PATCHES]
        if self.bug == "tokens_unfolded_by_column":
            x = x.reshape(-1, WIDE, HIGH, PATCH, PATCH, CHANNELS).swapaxes(1, 2)
        else:
            x = x.reshape(-1, HIGH, WIDE, PATCH, PATCH, CHANNELS)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, ROWS, COLUMNS, CHANNELS)

    def head(self, x: mx.array, c: mx.array) -> mx.array:
        bug = self.bug
        c = c if bug == "head_without_silu" else nn.silu(c)
        scale = self.lin("head.modulate", c)[:, None]
        if bug != "head_scale_without_one":
            scale = mx.array(1, self.dtype) + scale
        if bug == "head_norm_keeps_mean":
            x = mx.fast.rms_norm(x, None, 1e-6)
        else:
            x = mx.fast.layer_norm(x, None, None, 1e-6)
        return self.lin("head.proj", taps.tap("head.norm", x * scale))

    def __call__(self, x: mx.array, t: float, captions: list[mx.array]) -> mx.array:
        bug = self.bug
        c = self.time(t)
        lengths = [len(x) for x in captions]
        text_lengths = [padded(n) for n in lengths]
        longest, image_length = max(text_lengths), padded(PATCHES)
        image_at, text_at = self.positions(lengths)

        image = self.image_tokens(x)
        rope = Rope(image_at, image_length, bug)
        taps.tap("image_cos", rope.cos)
        for i in range(REFINERS):
            condition = None if bug == "image_layers_without_time" else c
            image = self.layer(f"image_layers.{i}", image, rope, None, condition)

        text = raw = self.text_tokens(captions, longest)
        rope, mask = Rope(text_at, longest, bug), visible(text_lengths, longest)
        if bug == "learned_text_padding_hidden":
            mask = visible(lengths, longest)
        for i in range(REFINERS - (bug == "second_text_layer_left_out")):
            text = self.layer(f"text_layers.{i}", text, rope, mask)
        if bug == "joint_text_before_refining":
            text = raw

        total = image_length + longest
        both = [
            mx.concatenate([a, b[:n]]) for a, b, n in zip(image, text, text_lengths, strict=True)
        ]
        at = [
            np.concatenate([a, b[:n]])
            for a, b, n in zip(image_at, text_at, text_lengths, strict=True)
        ]
        if bug == "text_placed_before_image":
            both = [mx.concatenate([b[image_length:], b[:image_length]]) for b in both]
            at = [np.concatenate([b[image_length:], b[:image_length]]) for b in at]
        joint = taps.tap("joint_tokens", stacked(both, total))
        rope = Rope(at, total, bug)
        mask = visible([image_length + n for n in text_lengths], total)
        if bug == "shorter_caption_sees_filling":
            mask = None
        for i in range(LAYERS):
            joint = self.layer(f"joint_layers.{i}", joint, rope, mask, c)
        return taps.tap("velocities", self.picture(self.head(joint, c)))


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Sigmas with the last 0, and times of 0 to 1000."""
    sigmas = np.linspace(1, 1 / STEPS, STEPS, dtype=np.float32)
    if bug != "schedule_not_shifted":
        sigmas = np.float32(SHIFT) * sigmas / (1 + np.float32(SHIFT - 1) * sigmas)
    times = sigmas * np.float32(1000)
    last = 0.001 if bug == "last_sigma_not_zero" else 0
    return np.append(sigmas, np.float32(last)), times


def guided(velocities: mx.array, sigma: float, bug: str | None) -> mx.array:
    """What the step follows."""
    x = velocities.astype(mx.float32)
    positive, negative = x[0:1], x[1:2]
    if bug == "captions_exchanged_in_guidance":
        positive, negative = negative, positive
    t = sigma if bug == "truncation_compares_sigma" else 1 - sigma
    if t > TRUNCATION:
        return -positive
    y = negative if bug == "guidance_starts_at_negative" else positive
    y = y + GUIDANCE * (positive - negative)
    if bug == "guidance_renorm_missing":
        return -y
    axes = (-1,) if bug == "guidance_renorm_per_pixel" else (0, 1, 2, 3)
    most, size = (mx.sqrt(mx.square(z).sum(axes, keepdims=True)) for z in (positive, y))
    y = y * mx.minimum(LIMIT * most / size, 1)
    return y if bug == "velocity_sign" else -y


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    engine = Engine(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    latents = value("pipeline/noise")
    if bug == "noise_reshaped_to_channels_last":
        latents = latents.reshape(1, ROWS, COLUMNS, CHANNELS)
    else:
        latents = latents.transpose(0, 2, 3, 1)
    prompt, negative = (value(f"pipeline/{x}prompt_embeds") for x in ("", "negative_"))
    if bug == "negative_caption_cut":
        negative = negative[:-1]
    if bug == "prompt_stored_in_half":
        prompt = prompt.astype(np.float16).astype(np.float32)
    sigmas, times = schedule(bug)
    kept = {k: np.array(v.astype(mx.float32)) for k, v in engine.w.items()} if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(ml_dtypes.bfloat16) for k, v in kept.items()}
    blocks = ("given.*", "schedule.*", "image_tokens", "text_tokens", "joint_tokens")
    blocks += ("*_layers.?", "head.proj", "velocities", "guided", "latents")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("given.noise", latents, kind="input")
        taps.tap("given.prompt", prompt, kind="input")
        taps.tap("given.negative", negative, kind="input")
        taps.tap("schedule.sigmas", sigmas, kind="schedule")
        taps.tap("schedule.times", times, kind="schedule")
        captions = [mx.array(prompt), mx.array(negative)]
        first = x = mx.array(latents)
        for i in range(STEPS):
            taps.set_step(i)
            t = float((1000 - times[i]) / np.float32(1000))
            if bug == "time_counted_from_data":
                t = float(sigmas[i])
            if bug == "time_to_whole_thousandths":
                t = np.floor(t * 1000) / 1000
            taps.tap("model_time", np.array([t], np.float32), kind="schedule")
            seen = first if bug == "model_reads_first_noise" else x
            v = guided(engine(seen, t, captions), float(sigmas[i]), bug)
            taps.tap("guided", v)
            size = float(sigmas[i + 1] - sigmas[i])
            if bug == "steps_of_equal_size":
                size = -1 / STEPS
            x = x + mx.array(size) * v
            if bug == "latents_narrowed_each_step":
                x = x.astype(mx.bfloat16).astype(mx.float32)
            taps.tap("latents", x)


NO_COUNTERPART: tuple[str, ...] = (r"\.gates$",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|mix|revers|interchang"
HALF = r"f16|float16|\bhalf\b|fp16|precision|round|\bcast|quanti"
POSITION = r"position|\brope\b|coordinate|\bgrid|rotary|angle|offset"
MASK = r"mask|padd|filling|filler"
TIME = r"\btime|timestep|sigma|schedul"
BUGS = (
    Bug(
        "qkv_rows_grouped_by_head",
        "The fused product of joint layer 1 has its rows grouped by head; it is read in thirds.",
        (LOADED, r"heads?\b.*(group|interleav|pack)|(group|interleav|pack).*heads?\b", SWAPPED),
        "weights",
    ),
    Bug(
        "up_rows_before_gate_rows",
        "The last joint layer's fused MLP weight has up (w3) before gate (w1).",
        (LOADED, SWAPPED, r"half|halves|\bgate\b|silu|\bw1\b|\bw3\b"),
        "weights",
    ),
    Bug(
        "square_weight_transposed",
        "The weight after the first image layer's attention is transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "pad_vectors_exchanged",
        "The learned padding of image and text are exchanged.",
        (LOADED, SWAPPED, r"pad"),
        "weights",
    ),
    Bug(
        "head_modulation_bias_dropped",
        "The bias of the head's modulation is zero.",
        (LOADED, r"\bbias", r"zero"),
        "weights",
    ),
    Bug(
        "patch_weight_for_channels_first",
        "The columns of the patch weight are channels first; patches are channels last.",
        (LOADED, r"layout|channel|transpos", SWAPPED),
        "weights",
    ),
    Bug(
        "down_projection_in_eight_bits",
        "The down weight of joint layer 0 went through 8 bits with a scale for each row.",
        (LOADED, HALF, r"int8|8.?bit|eight"),
        "weights",
    ),
    Bug(
        "sandwich_norms_mixed_up",
        "In joint layer 1 the norm after attention and the one before the MLP are exchanged.",
        (LOADED, SWAPPED, r"attention_norm2|ffn_norm1"),
        "weights",
    ),
    Bug(
        "refiner_index_not_advanced",
        "The second image layer has the weights of the first.",
        (LOADED, r"noise_refiner\.0|dupl|another (layer|block)|other (layer|block)|index|twice"),
        "weights",
    ),
    Bug(
        "negative_caption_cut",
        "The negative caption lacks its last token.",
        (
            r"off.by.one|last token|one token|truncat|short|length|fewer|\bcut\b|negative",
            r"token count|number of tokens",
        ),
        "inputs",
    ),
    Bug(
        "noise_reshaped_to_channels_last",
        "The noise is reshaped to channels last, not transposed.",
        (r"reshap|transpos|layout|channel|permut|noise|\bax[ei]s\b|initial latent|order",),
        "inputs",
    ),
    Bug(
        "prompt_stored_in_half",
        "The caption's embeddings were kept in float16.",
        (HALF, r"prompt|caption|embed"),
        "inputs",
    ),
    Bug(
        "schedule_not_shifted",
        "The schedule has no shift.",
        (r"shift|sigma|schedul|timestep",),
        "schedule",
    ),
    Bug(
        "last_sigma_not_zero",
        "The last step ends at 0.001, not at 0.",
        (r"sigma|schedul|terminal|\b0\.001|(last|final) (value|step|entry)|zero",),
        "schedule",
    ),
    Bug(
        "time_counted_from_data",
        "The model is given sigma and not 1 - sigma.",
        (TIME, r"revers|invert|1 ?- ?|one minus|flip"),
        "schedule",
    ),
    Bug(
        "time_to_whole_thousandths",
        "The time is truncated to whole steps of 1000.",
        (TIME, r"truncat|integer|round|\bint\b|floor|whole"),
        "schedule",
    ),
    Bug(
        "time_from_zero_to_one",
        "The time is not multiplied by 1000 before its waves.",
        (r"1000|t_scale|time.*scal|scal.*time|factor|multipl",),
    ),
    Bug(
        "sines_before_cosines",
        "The waves of the time are sines, then cosines.",
        (r"\bsin|\bcos|flip|" + SWAPPED + r"|half|halves",),
    ),
    Bug(
        "time_vector_computed_once",
        "The time's vector of the first step is used in the second too.",
        (r"cach|stale|first step|previous step|earlier step|step 0|reus|not updat|same at",),
    ),
    Bug(
        "silu_before_every_modulation",
        "The layers' modulations have a SiLU before them, as the head's has.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "head_scale_without_one",
        "The head multiplies by scale, not by 1 + scale.",
        (r"1 ?\+|\+ ?1|plus one|\bone\b|\bscale\b",),
    ),
    Bug(
        "head_norm_keeps_mean",
        "The head's norm is an RMS norm, not a layer norm.",
        (r"\bmean|\brms.?norm|layer ?norm|cent(er|re)|subtract",),
    ),
    Bug(
        "one_norm_for_queries_and_keys",
        "Keys are normed with the queries' weight.",
        (r"norm_[qk]|[qk]_norm|(key|quer(y|ies)).*(norm|weight)|norm.*(key|quer(y|ies))",),
    ),
    Bug(
        "eps_of_layer_norms",
        "The layers' norms have eps 1e-6 and not 1e-5.",
        (r"\beps|epsilon",),
    ),
    Bug(
        "mlp_sigmoid",
        "The text layers' MLPs have a sigmoid and not SiLU.",
        (r"sigmoid|silu|swish|activation",),
    ),
    Bug(
        "scores_by_full_width",
        "Scores are divided by the root of the width, not of a head's width.",
        (r"sqrt|root|temperature|softmax|attention.*scal|scal.*attention|head.?dim|scores|logits",),
    ),
    Bug(
        "heads_not_moved_back",
        "The second image layer joins (heads, tokens) without moving the heads back.",
        (r"heads?\b|transpos|reshap|layout|\bax[ei]s\b|permut",),
    ),
    Bug(
        "shorter_caption_sees_filling",
        "The joint layers have no mask, so the shorter caption sees the batch's zeros.",
        (MASK,),
    ),
    Bug(
        "learned_text_padding_hidden",
        "The text layers' mask hides the learned padding too.",
        (MASK,),
    ),
    Bug(
        "padding_repeats_last_patch",
        "The image's padding is the last patch, not the learned vector.",
        (r"pad|repeat|last (patch|token)",),
    ),
    Bug(
        "image_starts_at_last_text_position",
        "The image's first axis starts at the text's length, without the 1 that is added.",
        (r"off.by.one|start|\+ ?1\b|by one", POSITION),
    ),
    Bug(
        "image_starts_after_true_length",
        "The image's first axis starts after the caption's own length, not the padded one.",
        (r"start|length|padd", POSITION),
    ),
    Bug(
        "padding_patches_at_image_start",
        "The image's padding stands at the image's first position, not at the origin.",
        (r"padd", POSITION),
    ),
    Bug(
        "positions_kept_for_second_caption",
        "The negative caption's image has the positions of the first caption's image.",
        (r"cach|reus|negative|start|shared", POSITION),
    ),
    Bug(
        "text_placed_before_image",
        "The joint sequence has text first; the head's first tokens are taken as the image.",
        (
            r"concat|order|text (tokens )?(comes? )?(first|before)|\broll|sequence",
            SWAPPED,
        ),
    ),
    Bug(
        "tokens_unfolded_by_column",
        "The result's tokens are unfolded as if they went down columns.",
        (r"\brows?\b|column|transpos|layout|unpatch|reshap|\bax[ei]s\b|height|width", SWAPPED),
    ),
    Bug(
        "second_text_layer_left_out",
        "Only one text layer runs.",
        (
            r"skip|missing|not (run|called|applied|recorded)|fewer|left out|too few|never",
            r"only (one|1|a single)|(one|1) (layer|block)",
        ),
    ),
    Bug(
        "joint_text_before_refining",
        "The joint layers are given the text as it was before its layers.",
        (
            r"unrefined|wrong (hidden|tensor|value|input)|skip",
            r"(not|never) (used|run|applied)|bypass|earlier|stale|cap_embedder|text_proj",
        ),
    ),
    Bug(
        "guidance_starts_at_negative",
        "Guidance starts at the negative result, as is usual, not at the positive one.",
        (r"guidance|cfg|negative|uncond|classifier|positive",),
    ),
    Bug(
        "guidance_renorm_missing",
        "The guided result is not brought back to the positive one's norm.",
        (r"renorm|rescal|vector.?norm|factor|magnitude|scal(e|ed|ing)\b|guidance|multipl",),
    ),
    Bug(
        "guidance_renorm_per_pixel",
        "The guided result's norm is limited at each pixel.",
        (r"renorm|rescal|vector.?norm|per.(pixel|channel|token)|\bax[ei]s\b|guidance",),
    ),
    Bug(
        "velocity_sign",
        "The guided result is not negated.",
        (r"sign|negat|minus|opposite|flip|invert|× ?-1|\* ?-1",),
    ),
    Bug(
        "truncation_compares_sigma",
        "Guidance is off where sigma, not 1 - sigma, is above the limit: at the first step.",
        (r"guidance|truncat|cfg|uncond|negative",),
    ),
    Bug(
        "model_reads_first_noise",
        "The second step's model reads the first noise.",
        (r"stale|first (noise|step)|initial|previous step|earlier step|not updat|noise|step 0",),
    ),
    Bug(
        "latents_narrowed_each_step",
        "Latents are kept in bfloat16 between steps.",
        (HALF, r"bf16|bfloat16"),
    ),
)

MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "text_mlp_of_image_layer",
        "The first text layer's MLP has the weights of the first image layer's.",
        (
            LOADED,
            r"noise_refiner|image_layers|dupl|(another|other|wrong) (layer|block|module|refiner)",
        ),
        "weights",
    ),
    Bug(
        "caption_norm_missing",
        "Captions are projected without their norm.",
        (
            r"norm.*(missing|skip|not (appl|run|used|called)|left out|lack|unused|never|omit)",
            r"(missing|skip|\bno\b|without|lacks?|omit|forg).*norm|un-?norm|not norm",
        ),
    ),
    Bug(
        "theta_of_ten_thousand",
        "RoPE has base 10000, not 256.",
        (r"theta|\bbase\b|frequenc|10[, ]?000|\b256\b|wavelength|exponent",),
    ),
    Bug(
        "rotation_in_bfloat16",
        "RoPE's cosines and sines are rounded to bfloat16.",
        (HALF, r"bf16|bfloat16"),
    ),
    Bug(
        "normed_after_rotation",
        "Joint layers norm queries and keys after their rotation.",
        (
            r"norm.*(after|before|follow).*(rot|rope)|(rot|rope).*(after|before|follow).*norm",
            r"\border\b|swap|exchang|revers|commut",
        ),
    ),
    Bug(
        "mlp_gate_without_tanh",
        "Joint layer 1 uses the MLP's gate without tanh.",
        (r"tanh|gate.*(squash|bound|activation|non-?linear)",),
    ),
    Bug(
        "image_layers_without_time",
        "The image layers run without modulation by the time.",
        (r"condition|modulat|ada_?ln|\bgates?\b|\bscales?\b",),
    ),
    Bug(
        "head_without_silu",
        "The head's modulation lacks the SiLU before it.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "captions_exchanged_in_guidance",
        "Guidance takes the negative caption's result for the positive one, and the reverse.",
        (SWAPPED, r"guidance|cfg|negative|uncond|classifier|positive"),
    ),
    Bug(
        "steps_of_equal_size",
        "Both Euler steps have size 1/2, not the difference of sigmas.",
        (
            r"\bdt\b|step (size|length)|sigma|euler|interval|\bdelta|uniform|equal|schedul",
            r"1 ?/ ?(steps|2)\b|sampler|update|factor",
        ),
    ),
)
