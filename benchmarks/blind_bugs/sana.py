"""Sana's transformer in NumPy, by the names of NVlabs' release: channels last, q, k, v fused.

The embedding's kernel is (rows, columns, in, out), the depthwise one (rows, columns, channels), all
others (in, out). Two steps of flow matching with guidance; the long prompt's states are cut as the
pipeline cuts them.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, SanaTransformer2DModel

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

NAME = "sana"
CHANNELS, PATCH, LAYERS, CAPTION, RATIO = 4, 2, 3, 20, 2.5
HEADS, HEAD, CROSS_HEADS, CROSS_HEAD = 4, 6, 3, 8
WIDTH, HIDDEN = HEADS * HEAD, int(HEADS * HEAD * RATIO)
ROWS, COLUMNS, BASE, STRETCH = 8, 12, 8, 2.0  # latents; of training; of the positions
TEXT, KEPT, REAL, REAL_NEGATIVE = 11, 7, 9, 3  # tokens
STEPS, SHIFT, GUIDANCE, SCALING = 2, 2.5, 4.5, 0.41407


def made() -> SanaTransformer2DModel:
    """The model; q and k of the cross-attention are larger, captions smaller than untrained."""
    model_class: Any = SanaTransformer2DModel  # diffusers types a factor as a whole number
    model = model_class(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD,
        num_layers=LAYERS,
        num_cross_attention_heads=CROSS_HEADS,
        cross_attention_head_dim=CROSS_HEAD,
        cross_attention_dim=WIDTH,
        caption_channels=CAPTION,
        mlp_ratio=RATIO,
        sample_size=BASE,
        patch_size=PATCH,
        interpolation_scale=STRETCH,
        qk_norm="rms_norm_across_heads",
    )
    larger = {
        "attn2.norm_q": 2.0,
        "attn2.to_out": 2.0,
        "attn1.to_out": 2.0,
        "conv_point": 3.0,
        "conv_depth": 2.0,
        "caption_projection.linear_2": 0.3,
    }
    for name, parameter in model.named_parameters():
        parameter.data.mul_(next((n for part, n in larger.items() if part in name), 1.0))
    return model


def reference(folder: Path, dtype: str) -> None:
    """The loop of SanaPipeline with the scheduler of flow matching."""
    model = saved(randomised(made, 52), folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        latents = noise(3, 1, CHANNELS, ROWS, COLUMNS)
        positive, negative = noise(4, 1, TEXT, CAPTION), noise(5, 1, KEPT, CAPTION)
        mask = (torch.arange(TEXT) < REAL).long()[None]
        negative_mask = (torch.arange(KEPT) < REAL_NEGATIVE).long()[None]
        latents = recorder.record("pipeline/noise", latents, kind="input")
        recorder.record("pipeline/text_states", positive, kind="input")
        recorder.record("pipeline/text_mask", mask, kind="input")
        recorder.record("pipeline/negative_text_states", negative, kind="input")
        recorder.record("pipeline/negative_text_mask", negative_mask, kind="input")
        kept = [0, *range(1 - KEPT, 0)]
        embeds = torch.cat([negative, positive[:, kept]])
        masks = torch.cat([negative_mask, mask[:, kept]])
        recorder.record("pipeline/prompt_embeds", embeds)
        recorder.record("pipeline/prompt_attention_mask", masks)
        scheduler.set_timesteps(sigmas=[1 - i / STEPS for i in range(STEPS)])
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            out = model(
                torch.cat([latents] * 2).to(model.dtype),
                encoder_hidden_states=embeds.to(model.dtype),
                encoder_attention_mask=masks,
                timestep=t.expand(2),
            ).sample.float()
            plain, prompted = out.chunk(2)
            velocity = plain + GUIDANCE * (prompted - plain)
            recorder.record("pipeline/velocity", velocity)
            latents = scheduler.step(velocity, t, latents).prev_sample
            latents = recorder.record("pipeline/latents", latents)
        recorder.record("pipeline/vae_input", latents.to(model.dtype) / SCALING)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port."""
    new: dict[str, Array] = {}

    def linear(name: str, *sources: str) -> None:
        """One product of several, each with its outputs last."""
        new[f"{name}.weight"] = np.concatenate([w[f"{s}.weight"] for s in sources]).T
        if f"{sources[0]}.bias" in w:
            new[f"{name}.bias"] = np.concatenate([w[f"{s}.bias"] for s in sources])

    order = (2, 3, 1, 0)
    if bug == "embedder_columns_for_rows":
        order = (3, 2, 1, 0)
    new["x_embedder.proj.weight"] = w["patch_embed.proj.weight"].transpose(order)
    new["x_embedder.proj.bias"] = w["patch_embed.proj.bias"]
    linear("t_embedder.mlp.0", "time_embed.emb.timestep_embedder.linear_1")
    linear("t_embedder.mlp.2", "time_embed.emb.timestep_embedder.linear_2")
    linear("t_block.1", "time_embed.linear")
    linear("y_embedder.y_proj.fc1", "caption_projection.linear_1")
    linear("y_embedder.y_proj.fc2", "caption_projection.linear_2")
    new["attention_y_norm.weight"] = w["caption_norm.weight"]
    for i in range(LAYERS):
        old, b = f"transformer_blocks.{i}", f"blocks.{i}"
        letters = "kqv" if bug == "qkv_in_order_of_the_file" and i == 1 else "qkv"
        linear(f"{b}.attn.qkv", *(f"{old}.attn1.to_{s}" for s in letters))
        linear(f"{b}.attn.proj", f"{old}.attn1.to_out.0")
        before = f"transformer_blocks.{i - 1}"
        source = before if bug == "cross_q_of_block_before" and i == 2 else old
        linear(f"{b}.cross_attn.q_linear", f"{source}.attn2.to_q")
        linear(f"{b}.cross_attn.kv_linear", f"{old}.attn2.to_k", f"{old}.attn2.to_v")
        linear(f"{b}.cross_attn.proj", f"{old}.attn2.to_out.0")
        for place, number in (("attn", 1), ("cross_attn", 2)):
            for s in "qk":
                new[f"{b}.{place}.{s}_norm.weight"] = w[f"{old}.attn{number}.norm_{s}.weight"]
        for name in ("inverted", "depth", "point"):
            kernel = w[f"{old}.ff.conv_{name}.weight"]
            kernel = kernel[:, 0].transpose(1, 2, 0) if name == "depth" else kernel[..., 0, 0].T
            if bug == "depth_kernel_turned" and name == "depth" and i == 1:
                kernel = kernel[::-1, ::-1]
            new[f"{b}.mlp.{name}_conv.conv.weight"] = kernel
            if name != "point":
                new[f"{b}.mlp.{name}_conv.conv.bias"] = w[f"{old}.ff.conv_{name}.bias"]
        owner = before if bug == "table_of_block_before" and i == 2 else old
        table = w[f"{owner}.scale_shift_table"]
        if bug == "table_rows_scale_first":
            table = table[[1, 0, 2, 4, 3, 5]]
        new[f"{b}.scale_shift_table"] = table
    new["final_layer.scale_shift_table"] = w["scale_shift_table"]
    linear("final_layer.linear", "proj_out")
    if bug == "cross_proj_not_transposed":
        name = "blocks.0.cross_attn.proj.weight"
        new[name] = new[name].T
    if bug == "k_norms_left_at_one":
        new |= {k: np.ones_like(v) for k, v in new.items() if k.endswith(".attn.k_norm.weight")}
    if bug == "y_norm_scaled_again":  # the release makes this gain small when it is created
        new["attention_y_norm.weight"] = new["attention_y_norm.weight"] * np.float32(0.01)
    if bug == "t_block_stored_float16":
        stored = new["t_block.1.weight"].astype(np.float16)
        new["t_block.1.weight"] = stored.astype(np.float32)
    return {name: np.ascontiguousarray(value) for name, value in new.items()}


class Sana:
    """The forward pass; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.q(v) for k, v in p.items()}

    def tap(self, name: str, x: Array) -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype))
        return x

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.weight"]
        if f"{name}.bias" in self.p:
            y = y + self.p[f"{name}.bias"]
        return self.tap(name, self.q(y))

    def silu(self, x: Array) -> Array:
        return self.q(x / (1 + np.exp(-x)))

    def layer_norm(self, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        n = WIDTH - (1 if self.bug == "variance_unbiased" else 0)
        variance = (centred * centred).sum(-1, keepdims=True) / n
        return self.q(centred / np.sqrt(variance + np.float32(1e-6)))

    def rms_norm(self, name: str, x: Array, eps: float = 1e-5) -> Array:
        squares = (x * x).mean(-1, keepdims=True)
        if self.bug == "q_and_k_normed_per_head" and ".attn." in name:
            heads = x.reshape(*x.shape[:-1], HEADS, HEAD)
            squares = np.repeat((heads * heads).mean(-1), HEAD, -1)
        y = self.q(x / np.sqrt(squares + np.float32(eps)))
        return self.tap(name, self.q(y * self.p[f"{name}.weight"]))

    def modulated(self, x: Array, shift: Array, scale: Array) -> Array:
        scale = scale if self.bug == "modulated_without_one" else self.q(1 + scale)
        return self.q(self.q(self.layer_norm(x) * scale) + shift)

    def positions(self, rows: int, columns: int) -> Array:
        """(rows, columns, width): first the column's sines and cosines, then the row's."""
        bug, quarter, base = self.bug, WIDTH // 4, BASE // PATCH
        omega = 1e4 ** (-np.arange(quarter) / quarter)

        def of(n: int) -> Array:
            place = np.arange(n) * (STRETCH if bug == "stretch_multiplied" else 1 / STRETCH)
            if bug != "base_size_ignored":
                place = place * base / n
            angles = place[:, None] * omega
            sine, cosine = np.sin(angles), np.cos(angles)
            parts = (cosine, sine) if bug == "cosines_first" else (sine, cosine)
            return np.concatenate(parts, -1)

        down = np.broadcast_to(of(rows)[:, None], (rows, columns, WIDTH // 2))
        across = np.broadcast_to(of(columns)[None], (rows, columns, WIDTH // 2))
        parts = (down, across) if bug == "rows_before_columns" else (across, down)
        return np.concatenate(parts, -1).astype(np.float32)

    def patches(self, x: Array) -> Array:
        """(batch, rows, columns, width) of latents (batch, rows, columns, channels)."""
        batch, rows, columns, _ = x.shape
        rows, columns = rows // PATCH, columns // PATCH
        x = x.reshape(batch, rows, PATCH, columns, PATCH, CHANNELS)
        y = np.einsum("brpcqi,pqio->brco", x, self.p["x_embedder.proj.weight"], optimize=True)
        y = self.tap("x_embedder", self.q(y + self.p["x_embedder.proj.bias"]))
        return self.tap("x_embedder.pos", self.q(y + self.positions(rows, columns)))

    def time(self, t: Array) -> tuple[Array, Array]:
        """The embedding (batch, width) and what all blocks share (batch, 6, width)."""
        bug, half = self.bug, 128
        if bug == "time_truncated":
            t = np.trunc(t)
        last = half - 1 if bug == "time_frequencies_to_the_end" else half
        rates = np.exp(np.float32(-np.log(1e4)) * np.arange(half, dtype=np.float32) / last)
        angles = t[:, None] * rates.astype(np.float32)
        wave = self.tap(
            "t_embedder.freq", self.q(np.concatenate([np.cos(angles), np.sin(angles)], -1))
        )
        y = self.linear("t_embedder.mlp.2", self.silu(self.linear("t_embedder.mlp.0", wave)))
        z = y if bug == "t_block_without_silu" else self.silu(y)
        return y, self.linear("t_block.1", z).reshape(len(t), 6, WIDTH)

    def gelu(self, x: Array) -> Array:
        inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)
        return self.q(x * (1 + np.tanh(inner)) / 2)

    def captions(self, y: Array) -> Array:
        y = self.gelu(self.linear("y_embedder.y_proj.fc1", y))
        y = self.linear("y_embedder.y_proj.fc2", y)
        if self.bug == "captions_not_normed":
            return y
        return self.rms_norm("attention_y_norm", y, 1e-6 if self.bug == "y_norm_eps" else 1e-5)

    def attention(self, b: str, x: Array) -> Array:
        """Linear: values are gathered by keys once, and each query reads the sum."""
        bug, (batch, n, _) = self.bug, x.shape
        q, k, v = np.split(self.linear(f"{b}.attn.qkv", x), 3, -1)
        if bug == "normed_after_relu":
            q, k = np.maximum(q, 0), np.maximum(k, 0)
        q, k = self.rms_norm(f"{b}.attn.q_norm", q), self.rms_norm(f"{b}.attn.k_norm", k)
        q = q if bug == "queries_without_relu" else np.maximum(q, 0)
        k = np.maximum(k, 0)
        q, k, v = (y.reshape(batch, n, HEADS, HEAD) for y in (q, k, v))
        vk = np.einsum("bnhd,bnhe->bhde", v, k)
        if bug == "sums_float16" and b == "blocks.1":
            vk = vk.astype(np.float16).astype(np.float32)
        self.tap(f"{b}.attn.vk", vk)
        y = np.einsum("bhde,bnhe->bnhd", vk, q)
        if bug == "divided_by_length":
            y = y / n
        else:
            total = np.einsum("bhe,bnhe->bnh", k.sum(1), q)
            y = y / (total[..., None] + np.float32(1e-15))
        return self.linear(f"{b}.attn.proj", self.q(y.reshape(batch, n, WIDTH)))

    def cross_attention(self, b: str, x: Array, y: Array, seen: Array) -> Array:
        bug, (batch, n, _) = self.bug, x.shape
        q = self.linear(f"{b}.cross_attn.q_linear", x)
        kv = self.linear(f"{b}.cross_attn.kv_linear", y)
        if bug == "kv_split_by_head" and b == "blocks.1":
            kv = kv.reshape(batch, -1, CROSS_HEADS, 2, CROSS_HEAD).swapaxes(2, 3)
            kv = kv.reshape(batch, -1, 2 * WIDTH)
        k, v = np.split(kv, 2, -1)
        q = self.rms_norm(f"{b}.cross_attn.q_norm", q)
        k = self.rms_norm(f"{b}.cross_attn.k_norm", k)
        q, k, v = (z.reshape(batch, -1, CROSS_HEADS, CROSS_HEAD) for z in (q, k, v))
        size = HEAD if bug == "cross_scale_of_linear_heads" else CROSS_HEAD
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * np.float32(size**-0.5)
        if bug == "mask_added_as_it_is":
            scores = scores + seen[:, None, None].astype(np.float32)
        elif bug != "padding_visible":
            scores = np.where(seen[:, None, None] > 0, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares = shares / shares.sum(-1, keepdims=True)
        z = self.q(np.einsum("bhqk,bkhd->bqhd", shares, v))
        z = self.tap(f"{b}.cross_attn.sdpa", z.reshape(batch, n, WIDTH))
        return self.linear(f"{b}.cross_attn.proj", z)

    def depth_conv(self, name: str, x: Array) -> Array:
        """Each channel by itself, of (batch, rows, columns, channels)."""
        how = "edge" if self.bug == "depth_edges_repeated" else "constant"
        rows, columns = x.shape[1:3]
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode=how)
        kernel, y = self.p[f"{name}.weight"], self.p[f"{name}.bias"]
        for i in range(3):
            for j in range(3):
                y = y + padded[:, i : i + rows, j : j + columns] * kernel[i, j]
        return self.tap(name, self.q(y))

    def mix_ffn(self, b: str, x: Array, grid: tuple[int, int]) -> Array:
        bug, (batch, n, _) = self.bug, x.shape
        if bug == "grid_of_columns_by_rows":
            grid = (grid[1], grid[0])
        y = self.linear(f"{b}.mlp.inverted_conv.conv", x.reshape(batch, *grid, WIDTH))
        if bug != "inverted_without_silu":
            y = self.silu(y)
        y, gate = np.split(self.depth_conv(f"{b}.mlp.depth_conv.conv", y), 2, -1)
        if bug == "gate_is_first_half":
            y, gate = gate, y
        y = self.tap(f"{b}.mlp.glu", self.q(y * self.silu(gate)))
        y = self.linear(f"{b}.mlp.point_conv.conv", y)
        if bug == "point_with_silu":
            y = self.silu(y)
        return y.reshape(batch, n, WIDTH)

    def block(
        self, b: str, x: Array, y: Array, t: Array, seen: Array, grid: tuple[int, int]
    ) -> Array:
        bug = self.bug
        table = self.q(self.p[f"{b}.scale_shift_table"] + t)[:, :, None]
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = table.swapaxes(0, 1)
        normed = self.tap(f"{b}.norm1", self.modulated(x, shift, scale))
        z = self.attention(b, normed)
        start = normed if bug == "residual_from_normed" and b == "blocks.1" else x
        x = self.tap(f"{b}.after_attn", self.q(start + self.q(gate * z)))
        asks = self.layer_norm(x) if bug == "cross_attention_of_normed" and b == "blocks.2" else x
        z = self.cross_attention(b, asks, y, seen)
        if bug == "cross_attention_gated" and b == "blocks.0":
            z = self.q(gate * z)
        x = self.tap(f"{b}.after_cross", self.q(x + z))
        if bug == "mlp_modulated_as_attention":
            shift_mlp, scale_mlp = shift, scale
        z = self.tap(f"{b}.norm2", self.modulated(x, shift_mlp, scale_mlp))
        z = self.mix_ffn(b, z, grid)
        if bug == "gate_of_attention_twice":
            gate_mlp = gate
        return self.tap(b, self.q(x + self.q(gate_mlp * z)))

    def unpatched(self, x: Array, rows: int, columns: int) -> Array:
        """(batch, rows, columns, channels) of the latents."""
        if self.bug == "channels_before_patch":
            x = x.reshape(len(x), rows, columns, CHANNELS, PATCH, PATCH).transpose(0, 1, 4, 2, 5, 3)
        else:
            x = x.reshape(len(x), rows, columns, PATCH, PATCH, CHANNELS).swapaxes(2, 3)
        return x.reshape(len(x), rows * PATCH, columns * PATCH, CHANNELS)

    def __call__(self, latents: Array, t: Array, text: Array, seen: Array) -> Array:
        x = self.patches(self.q(latents))
        batch, rows, columns, _ = x.shape
        x = x.reshape(batch, rows * columns, WIDTH)
        t, shared = self.time(t)
        y = self.captions(self.q(text))
        for i in range(LAYERS):
            x = self.block(f"blocks.{i}", x, y, shared, seen, (rows, columns))
        if self.bug == "last_layer_activates_time":
            t = self.silu(t)
        table = self.q(self.p["final_layer.scale_shift_table"] + t[:, None])
        if self.bug == "last_norm_missing":
            x = self.q(self.q(x * self.q(1 + table[:, 1:])) + table[:, :1])
        else:
            x = self.modulated(x, table[:, :1], table[:, 1:])
        x = self.linear("final_layer.linear", x)
        return self.tap("sana.out", self.unpatched(x, rows, columns))


def conditions(value: Any, bug: str | None) -> tuple[Array, Array]:
    """States and mask of the negative prompt and the prompt; of the latter the first and last."""
    states, mask = value("pipeline/text_states"), value("pipeline/text_mask")
    empty, empty_mask = value("pipeline/negative_text_states"), value("pipeline/negative_text_mask")
    kept = [0, *range(TEXT - KEPT + 1, TEXT)]
    if bug == "first_states_kept":
        kept = list(range(KEPT))
    seen = mask[:, :KEPT] if bug == "mask_of_first_states" else mask[:, kept]
    if bug == "mask_of_prompt_for_both":
        empty_mask = seen
    return np.concatenate([empty, states[:, kept]]), np.concatenate([empty_mask, seen])


def schedule(bug: str | None) -> Array:
    sigmas = 1 - np.arange(STEPS) / STEPS
    if bug == "sigmas_reach_the_end":
        sigmas = np.linspace(1, 0.001, STEPS)
    if bug != "shift_missing":
        sigmas = SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)
    return np.append(sigmas, 0).astype(np.float32)


def sampled(net: Sana, latents: Array, text: Array, seen: Array) -> None:
    bug, sigmas = net.bug, schedule(net.bug)
    taps.tap("sampler.sigmas", sigmas, kind="schedule")
    times = sigmas[:-1] * np.float32(1 if bug == "time_from_0_to_1" else 1000)
    taps.tap("sampler.timesteps", times, kind="schedule")
    for i in range(STEPS):
        taps.set_step(i)
        out = net(np.concatenate([latents] * 2), times[[i, i]], text, seen)
        plain, prompted = np.split(out, 2)
        if bug == "guidance_halves_exchanged":
            plain, prompted = prompted, plain
        start = prompted if bug == "guidance_from_prompted" else plain
        flow = start + np.float32(GUIDANCE) * (prompted - plain)
        taps.tap("sampler.flow", flow)
        at = 0 if bug == "first_step_width_kept" else i
        width = sigmas[at + 1] - sigmas[at]
        latents = latents + (-width if bug == "flow_subtracted" else width) * flow
        taps.tap("sampler.latents", latents)
    latents = net.q(latents)
    factor = np.float32(SCALING)
    done = latents * factor if bug == "scaling_multiplied" else latents / factor
    net.tap("dcae.in", net.q(done))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Sana(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    latents = value("pipeline/noise")
    if bug == "noise_reshaped":
        latents = latents.reshape(1, ROWS, COLUMNS, CHANNELS)
    else:
        latents = latents.transpose(0, 2, 3, 1)
    text, seen = conditions(value, bug)
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("sampler.*", "text.*", "x_embedder", "t_block.1", "attention_y_norm", "blocks.?")
    with port_trace(out, dump, dtype, (*blocks, "sana.out", "dcae.in"), kept):
        taps.tap("sampler.noise", latents, kind="input")
        taps.tap("text.states", text, kind="input")
        taps.tap("text.mask", seen, kind="input")
        sampled(net, latents, text, seen)


NO_COUNTERPART: tuple[str, ...] = (r"blocks\.\d\.attn\.vk$",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|\border\b|permut|revers|mixed up|interchang"
BUGS = (
    Bug(
        "qkv_in_order_of_the_file",
        "Block 1's fused product was made as k, q, v, in the file's order.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "cross_q_of_block_before",
        "The last block's cross-attention has the q of the block before.",
        (LOADED, r"dupl|twice|(another|other|previous|same) (block|layer)|(block|layer) before"),
        "weights",
    ),
    Bug(
        "embedder_columns_for_rows",
        "The embedder's kernel has rows and columns exchanged.",
        (LOADED, SWAPPED, r"transpos|\brows?\b|column|layout|\bax[ei]s\b|height|width"),
        "weights",
    ),
    Bug(
        "depth_kernel_turned",
        "Block 1's depthwise kernel is turned by 180 degrees.",
        (LOADED, r"flip|mirror|\b180\b|rotat|turned|convolution.*correlation|\brevers"),
        "weights",
    ),
    Bug(
        "table_rows_scale_first",
        "The tables have scale before shift.",
        (LOADED, SWAPPED, r"shift.*scale|scale.*shift"),
        "weights",
    ),
    Bug(
        "cross_proj_not_transposed",
        "The weight of block 0's cross-attention output is not transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "k_norms_left_at_one",
        "The gains of the self-attention's k norms were not loaded and stayed one.",
        (
            LOADED,
            r"\bones\b|(is|at|to|be|stayed|equals?) (1|one)\b|all.?one",
            r"initial|default|missing|\bgain",
        ),
        "weights",
    ),
    Bug(
        "y_norm_scaled_again",
        "The gain of the captions' norm is multiplied by 0.01, which the file contains already.",
        (LOADED, r"0\.01|\b100\b|hundred|\bscal(e|ed|ing)\b|factor|\bgain\b"),
        "weights",
    ),
    Bug(
        "t_block_stored_float16",
        "The time block's weight was stored in float16.",
        (LOADED, r"f16|float16|fp16|half.(precision|float)|precision|round"),
        "weights",
    ),
    Bug(
        "noise_reshaped",
        "The noise is reshaped to channels last, not transposed.",
        (r"transpos|reshap|layout|\bax[ei]s\b|permut|channels?.(last|first)|nchw|nhwc", SWAPPED),
        "inputs",
    ),
    Bug(
        "first_states_kept",
        "Of the prompt the first seven states are kept, not the first and the last six.",
        (r"truncat|\bcut\b|slic|select|\bindex|wrong tokens|(first|last) (\w+ )?(tokens|states)",),
        "inputs",
    ),
    Bug(
        "mask_of_first_states",
        "The prompt's mask is of its first seven tokens, the states are others.",
        (r"mask|\bpad(s|ding|ded)?\b",),
        "inputs",
    ),
    Bug(
        "mask_of_prompt_for_both",
        "The negative prompt has the prompt's mask.",
        (r"mask|\bpad(s|ding|ded)?\b",),
        "inputs",
    ),
    Bug(
        "rows_before_columns",
        "Positions have the row's half first.",
        (
            SWAPPED,
            r"\brows?\b|column|height|width|transpos|\bax[ei]s\b|\bh\b.*\bw\b|x.*\by\b.*half",
        ),
    ),
    Bug(
        "cosines_first",
        "Positions have cosines before sines.",
        (SWAPPED, r"\bcos|\bsin(es?)?\b|flip"),
    ),
    Bug(
        "base_size_ignored",
        "Positions count patches; they should span the grid of training.",
        (
            r"base.?size|\bscal(e|ed|ing)\b|interpol|factor|stretch",
            r"grid (size|of training)|spac(ed|ing)|normali[sz]|frequenc|coordinate|span|divid",
        ),
    ),
    Bug(
        "time_from_0_to_1",
        "The model is given sigma, not 1000 sigma.",
        (r"\b1000\b|thousand|\bscal(e|ed|ing)\b|factor|sigma|unit interval|multipl|0 to 1",),
        "schedule",
    ),
    Bug(
        "time_truncated",
        "The time is cut to a whole number.",
        (r"truncat|\bint(eger)?s?\b|round|whole|fraction|floor|\bcast",),
    ),
    Bug(
        "time_frequencies_to_the_end",
        "The time's frequencies reach 1/10000: half - 1 for half.",
        (r"frequenc|exponent|half ?- ?1|\b12[78]\b|downscale|off.by.one|period|shift",),
    ),
    Bug(
        "t_block_without_silu",
        "The time block has no SiLU.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "last_layer_activates_time",
        "The last layer's modulation is of SiLU of the time's embedding.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "queries_without_relu",
        "Only keys pass the ReLU.",
        (r"relu|activation|non-?linear|negative|kernel function|feature map|clamp|clip",),
    ),
    Bug(
        "divided_by_length",
        "Linear attention is divided by the number of tokens, not by the sum of its weights.",
        (r"divi|denominat|normali[sz]|number of tokens|length|\bsum\b|ones|pad(ded)? (row|value)",),
    ),
    Bug(
        "q_and_k_normed_per_head",
        "q and k are normed per head, not over all.",
        (
            r"(per|each|by|single|within|across|over|all) (the )?heads?|head.?wise|head.?dim",
            r"norm\w*.*(\bax[ei]s\b|channels of (a|one|each) head)",
        ),
    ),
    Bug(
        "normed_after_relu",
        "q and k are normed after the ReLU.",
        (r"relu|activation|\border\b|(before|after) (the )?(norm|rms)",),
    ),
    Bug(
        "sums_float16",
        "Block 1's sums of values by keys are float16.",
        (r"f16|float16|fp16|half.(precision|float)|precision|round",),
    ),
    Bug("padding_visible", "Pads of the prompts are seen.", (r"mask|\bpad(s|ding|ded)?\b",)),
    Bug(
        "cross_scale_of_linear_heads",
        "Cross-attention is scaled by the channels of the linear attention's heads.",
        (r"\bscal(e|ed|ing)\b|sqrt|root|\*\* ?-0\.5|temperature|head.?(dim|size)|1\.15|0\.86",),
    ),
    Bug(
        "kv_split_by_head",
        "Block 1 splits keys and values head by head.",
        (
            r"split|chunk|interleav|layout|reshap|(per|by|each) head|fused|head.by.head",
            SWAPPED,
            r"heads? (first|major|axis)",
        ),
    ),
    Bug(
        "cross_attention_of_normed",
        "The last block's cross-attention asks with the normed stream.",
        (
            r"\b(extra|addition|norm2|layer.?norm|pre-?norm|normed|normali[sz]ed|un-?normed)",
            r"norms? (is )?(applied|run|too much|one more|not in)|(remove|no|without) (the )?norm",
        ),
    ),
    Bug(
        "cross_attention_gated",
        "Block 0 multiplies cross-attention by the gate of self-attention.",
        (r"\bgat(e|es|ed|ing)\b|gate_msa|modulat|multipl",),
    ),
    Bug(
        "inverted_without_silu",
        "The first convolution of the MLP has no SiLU.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "gate_is_first_half",
        "The SiLU of the MLP's product is of the first half.",
        (
            SWAPPED,
            r"(first|second|other|wrong|two) (half|halves|part|chunk|branch|operand|factor)|halves",
        ),
    ),
    Bug(
        "depth_edges_repeated",
        "The depthwise convolution repeats edges; it should see zeros.",
        (r"\bedges?\b|padd|border|boundar|replicat|reflect|zeros?\b",),
    ),
    Bug(
        "grid_of_columns_by_rows",
        "The MLP takes tokens for columns by rows.",
        (
            r"height|width|\brows?\b|column|grid|transpos|reshap|layout|\bax[ei]s\b|raster|aspect",
            SWAPPED,
        ),
    ),
    Bug(
        "gate_of_attention_twice",
        "The MLP is gated by the attention's gate.",
        (r"\bgat(e|es|ed|ing)\b|gate_m|chunk|(wrong|other|first) (chunk|row)",),
    ),
    Bug("y_norm_eps", "The captions' norm has eps 1e-6.", (r"\beps",)),
    Bug(
        "modulated_without_one",
        "Norms are multiplied by scale, not by 1 + scale.",
        (r"1 ?\+|\+ ?1|(without|missing|lacks?|add\w*|the) (1|one)\b|plus|\(1",),
    ),
    Bug(
        "variance_unbiased",
        "LayerNorms divide the variance by n - 1.",
        (r"variance|unbiased|n ?- ?1|bessel|\bddof\b|correction|std|deviation",),
    ),
    Bug(
        "channels_before_patch",
        "The output's channels are taken as (channels, rows, columns).",
        (
            r"patch|transpos|reshap|layout|\bax[ei]s\b|permut|channels?.(last|first|before)|\(channels?,|interleav",
            SWAPPED,
        ),
    ),
    Bug(
        "guidance_from_prompted",
        "Guidance is added to the prompted velocity: its scale is one more.",
        (r"guid|\bcfg\b|uncond|\+ ?1|5\.5|4\.5|one (more|too)|off.by.one",),
    ),
    Bug(
        "guidance_halves_exchanged",
        "The prompted and the plain velocity are exchanged.",
        (SWAPPED, r"guid|\bcfg\b|uncond|negative|halves|\bsign\b|batch"),
    ),
    Bug(
        "shift_missing",
        "Sigmas are not shifted.",
        (r"shift|sigmas?\b.*(linear|even|uniform)",),
        "schedule",
    ),
    Bug(
        "first_step_width_kept",
        "The second step has the width of the first.",
        (
            r"\bdt\b|step.?(size|length|width)|width of",
            r"sigmas?\b|\bindex|first step|delta|difference of",
        ),
    ),
    Bug(
        "scaling_multiplied",
        "The latents for the VAE are multiplied by the factor, not divided by it.",
        (r"multipl|divid|invers|reciproc|scaling.?factor|0\.41|2\.41|5\.83|0\.17",),
    ),
)

NOT_NORMED = (
    r"norm\w*\b.*(miss|skip|not (appl|run|used|called|record)|left out|lack|never|omit)",
    r"(miss|skip|omit|\bno\b|without|lack|never|before)\w*\b.*norm|not (layer.?)?norm",
    r"un-?norm",
)
MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "table_of_block_before",
        "The last block's table is that of the block before.",
        (
            LOADED,
            r"dupl|twice|(another|other|previous|same|wrong) (block|layer)|(block|layer) before",
            r"blocks\.1\b|off.by.one|index",
        ),
        "weights",
    ),
    Bug(
        "stretch_multiplied",
        "Positions are multiplied by the interpolation scale, not divided by it.",
        (
            r"interpol|\bscal(e|ed|ing)\b|factor|stretch|multipl|divid|invers|reciproc",
            r"frequenc|coordinate|grid (size|spacing)",
        ),
    ),
    Bug(
        "captions_not_normed",
        "The captions' norm is not applied.",
        NOT_NORMED,
    ),
    Bug(
        "mask_added_as_it_is",
        "The mask of ones and zeros is added to the scores; pads should get minus infinity.",
        (r"mask|\bpad(s|ding|ded)?\b|-inf|minus infinity|-1e4|-10000|bias",),
    ),
    Bug(
        "point_with_silu",
        "The last convolution of the MLP is followed by a SiLU.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "residual_from_normed",
        "Block 1 adds self-attention to its normed input.",
        (
            r"residual|skip connection|identity",
            r"(normed|normali[sz]ed|modulated) (input|x\b|stream|tokens|value)",
            r"(after|before|output of) (the )?norm",
        ),
    ),
    Bug(
        "mlp_modulated_as_attention",
        "The MLP's input is modulated by the attention's shift and scale.",
        (
            r"chunk|split|(wrong|other|first|same) (rows?|part|piece|slice|pair|half)|modulat",
            r"\bshift\b.*\bscale\b|\bscale\b.*\bshift\b|shift_m|scale_m|rows? of (the )?table",
        ),
    ),
    Bug(
        "last_norm_missing",
        "The last layer modulates without its norm.",
        NOT_NORMED,
    ),
    Bug(
        "sigmas_reach_the_end",
        "Sigmas before the shift are spaced from 1 to 0.001, not from 1 in steps of 1/2.",
        (
            r"sigmas?\b|linspace|spac(ed|ing)|schedule|timestep",
            r"off.by.one|end.?point|last (sigma|value)|evenly|0\.001|minimum",
        ),
        "schedule",
    ),
    Bug(
        "flow_subtracted",
        "The step subtracts the velocity's share; it should add it.",
        (
            r"\bsign|subtract|negat|minus (the|its|dt|v)|opposite|direction|revers|invert|flipp",
            r"\bdt\b|step.?(size|width)|sigma.*(next|order|differ)",
        ),
    ),
)
