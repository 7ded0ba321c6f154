"""Flux in MLX, by the names of the first release: fused qkv, linear1 and linear2, NHWC latents.

The last layer's modulation is shift and scale, as released, so its halves are exchanged. MLX's own
fast norms and attention; angles are kept as cosines and sines of half of a head's channels.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline, calculate_shift

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
from lydite.trace.arrays import to_numpy
from lydite.trace.function_capture import watch_function
from lydite.trace.taps import set_step, tap
from lydite.trace.torch_capture import record_modules

NAME = "fluxmlx"
HEADS, AXES, DOUBLE, SINGLE, TEXT, POOLED, TOKENS = 3, (4, 6, 6), 2, 2, 20, 14, 7
HEAD = sum(AXES)
WIDTH, HIDDEN = HEADS * HEAD, 4 * HEADS * HEAD
CHANNELS, ROWS, COLUMNS = 4, 8, 12  # of latents
STEPS, GUIDANCE = 3, 3.5
BASE_TOKENS, MOST_TOKENS, BASE_SHIFT, MAX_SHIFT = 16, 64, 0.5, 1.15
SCALING, SHIFTING = 0.3611, 0.1159
DOUBLE_PARTS = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
}


def made() -> FluxTransformer2DModel:
    """The transformer; its norms of queries and keys are far from 1, its modulation larger."""
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * CHANNELS,
        num_layers=DOUBLE,
        num_single_layers=SINGLE,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT,
        pooled_projection_dim=POOLED,
        guidance_embeds=True,
        axes_dims_rope=AXES,
    )
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "norm_" in name and parameter.ndim == 1 and "norm_out" not in name:
            parameter.data.mul_(1.1 + 0.4 * torch.randn(parameter.shape, generator=generator))
        if "norm" in name and "linear" in name:
            parameter.data.mul_(1.6)
        if "time_text_embed" in name:
            parameter.data.mul_(1.4)
    return model


def reference(folder: Path, dtype: str) -> None:
    """Two pictures, each with its prompt."""
    model = saved(randomised(made, 61), folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=BASE_SHIFT,
        max_shift=MAX_SHIFT,
        base_image_seq_len=BASE_TOKENS,
        max_image_seq_len=MOST_TOKENS,
    )
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        embeds = (1.2 * noise(70, 2, TOKENS, TEXT)).to(model.dtype)
        pooled = (0.8 * noise(71, 2, POOLED)).to(model.dtype)
        recorder.record("pipeline/prompt_embeds", embeds, kind="input")
        recorder.record("pipeline/pooled_prompt_embeds", pooled, kind="input")
        start = noise(9, 2, CHANNELS, ROWS, COLUMNS)
        recorder.record("pipeline/noise", start, kind="input")
        latents = FluxPipeline._pack_latents(start, 2, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        text_ids = torch.zeros(TOKENS, 3, dtype=model.dtype)
        where: Any = (2, ROWS // 2, COLUMNS // 2, "cpu", model.dtype)
        image_ids = FluxPipeline._prepare_latent_image_ids(*where)
        limits = (BASE_TOKENS, MOST_TOKENS, BASE_SHIFT, MAX_SHIFT)
        mu = calculate_shift(latents.shape[1], *limits)
        scheduler.set_timesteps(STEPS, sigmas=list(np.linspace(1.0, 1 / STEPS, STEPS)), mu=mu)
        scheduler.set_begin_index(0)
        recorder.record("pipeline/mu", np.float32(mu), kind="scalar")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        for step, t in enumerate(scheduler.timesteps):
            recorder.step = step
            recorder.record("pipeline/latents", latents)
            velocity = model(
                hidden_states=latents,
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                timestep=t.expand(2).to(model.dtype) / 1000,
                guidance=torch.full([2], GUIDANCE),
                img_ids=image_ids,
                txt_ids=text_ids,
                return_dict=False,
            )[0]
            recorder.record("pipeline/velocity", velocity)
            latents = scheduler.step(velocity, t, latents, return_dict=False)[0]
            recorder.record("pipeline/next_latents", latents)
        latents = FluxPipeline._unpack_latents(latents, 8 * ROWS, 8 * COLUMNS, 8)
        recorder.record("pipeline/vae_input", latents / SCALING + SHIFTING)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters by the first release's names."""
    new: dict[str, Array] = {}

    def joined(name: str, *sources: str) -> None:
        for end in ("weight", "bias"):
            new[f"{name}.{end}"] = np.concatenate([w[f"{source}.{end}"] for source in sources])

    joined("img_in", "x_embedder")
    joined("txt_in", "context_embedder")
    joined("final_layer.linear", "proj_out")
    joined("final_layer.adaLN_modulation.1", "norm_out.linear")
    if bug != "last_shift_and_scale_kept":
        for end in ("weight", "bias"):
            name = f"final_layer.adaLN_modulation.1.{end}"
            new[name] = np.roll(new[name], WIDTH, 0)
    sources = {"time_in": "timestep", "guidance_in": "guidance", "vector_in": "text"}
    if bug == "guidance_in_is_time_in":
        sources["guidance_in"] = "timestep"
    for name, source in sources.items():
        for part, i in (("in_layer", 1), ("out_layer", 2)):
            joined(f"{name}.{part}", f"time_text_embed.{source}_embedder.linear_{i}")
    for i in range(DOUBLE):
        name, old = f"double_blocks.{i}", f"transformer_blocks.{i}"
        for part, source in DOUBLE_PARTS.items():
            if bug == "modulations_of_streams_exchanged" and part.endswith("mod.lin") and i == 1:
                source = DOUBLE_PARTS["txt_mod.lin" if "img" in part else "img_mod.lin"]
            joined(f"{name}.{part}", f"{old}.{source}")
        joined(f"{name}.img_attn.qkv", *(f"{old}.attn.to_{s}" for s in "qkv"))
        joined(f"{name}.txt_attn.qkv", *(f"{old}.attn.add_{s}_proj" for s in "qkv"))
        for stream, kind in (("img", "norm"), ("txt", "norm_added")):
            for part, s in (("query_norm", "q"), ("key_norm", "k")):
                if bug == "query_and_key_norms_exchanged" and stream == "txt":
                    s = "k" if s == "q" else "q"
                scale = w[f"{old}.attn.{kind}_{s}.weight"]
                new[f"{name}.{stream}_attn.norm.{part}.scale"] = scale
    for i in range(SINGLE):
        later = SINGLE - 1 - i if bug == "single_blocks_in_other_order" else i
        name, old = f"single_blocks.{i}", f"single_transformer_blocks.{later}"
        parts = [f"{old}.attn.to_q", f"{old}.attn.to_k", f"{old}.attn.to_v", f"{old}.proj_mlp"]
        if bug == "linear1_with_mlp_first":
            parts = parts[3:] + parts[:3]
        joined(f"{name}.linear1", *parts)
        joined(f"{name}.linear2", f"{old}.proj_out")
        joined(f"{name}.modulation.lin", f"{old}.norm.linear")
        for part, s in (("query_norm", "q"), ("key_norm", "k")):
            new[f"{name}.norm.{part}.scale"] = w[f"{old}.attn.norm_{s}.weight"]
    if bug == "qkv_rows_by_head":
        for end in ("weight", "bias"):
            name = f"double_blocks.0.img_attn.qkv.{end}"
            rows = new[name].reshape(3, HEADS, HEAD, -1).swapaxes(0, 1)
            new[name] = rows.reshape(new[name].shape)
    if bug == "mlp_of_four_bits":
        name = "double_blocks.1.img_mlp.2.weight"
        packed = mx.quantize(mx.array(new[name]), group_size=32, bits=4)
        new[name] = to_numpy(mx.dequantize(*packed, group_size=32, bits=4))
    if bug == "text_bias_left_at_zero":
        new["txt_in.bias"] = np.zeros_like(new["txt_in.bias"])
    return {name: np.ascontiguousarray(value) for name, value in new.items()}


def patchify(x: mx.array, bug: str | None) -> mx.array:
    """(batch, rows, columns, channels) to tokens of channels, rows, columns of a patch."""
    batch, rows, columns, channels = x.shape
    x = x.reshape(batch, rows // 2, 2, columns // 2, 2, channels)
    axes = (0, 1, 3, 2, 4, 5) if bug == "patches_with_channels_last" else (0, 1, 3, 5, 2, 4)
    return x.transpose(*axes).reshape(batch, -1, 4 * channels)


def unpatchify(x: mx.array, bug: str | None) -> mx.array:
    batch = len(x)
    if bug == "tokens_back_by_columns":
        x = x.reshape(batch, COLUMNS // 2, ROWS // 2, -1).swapaxes(1, 2)
    x = x.reshape(batch, ROWS // 2, COLUMNS // 2, CHANNELS, 2, 2)
    return x.transpose(0, 1, 4, 2, 5, 3).reshape(batch, ROWS, COLUMNS, CHANNELS)


def positions(texts: int, bug: str | None) -> mx.array:
    """(tokens, 3): nothing for texts, then 0, row and column of patches."""
    rows, columns = ROWS // 2, COLUMNS // 2
    row, column = (a.reshape(-1) for a in np.indices((rows, columns)))
    first = np.zeros_like(row)
    if bug == "picture_after_texts":
        row, column = row + texts, column + texts
    axes = [first, row, column]
    if bug == "columns_before_rows":
        axes = [first, column, row]
    if bug == "rows_on_first_axis":
        axes = [row, column, first]
    ids = np.stack(axes, -1)
    text = np.zeros((texts, 3), ids.dtype)
    if bug == "texts_counted":
        text[:, 0] = np.arange(texts)
    return mx.array(np.concatenate([text, ids]).astype(np.float32))


def rotations(ids: mx.array, bug: str | None) -> tuple[mx.array, mx.array]:
    """Cosines and sines (tokens, half of a head's channels)."""
    angles = []
    for axis, width in enumerate(AXES):
        omega = 10000.0 ** (-mx.arange(0, width, 2, dtype=mx.float32) / width)
        angles.append(ids[:, axis, None] * omega)
    a = mx.concatenate(angles, -1)
    cos, sin = mx.cos(a), mx.sin(a)
    if bug == "rotations_in_bfloat16":
        cos, sin = (y.astype(mx.bfloat16).astype(mx.float32) for y in (cos, sin))
    return cos, sin


class Flux:
    """The transformer; `p` are the parameters in the run's precision."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: mx.Dtype) -> None:
        self.p = {name: mx.array(value).astype(dtype) for name, value in p.items()}
        self.bug, self.dtype = bug, dtype

    def linear(self, name: str, x: mx.array) -> mx.array:
        return tap(name, mx.addmm(self.p[f"{name}.bias"], x, self.p[f"{name}.weight"].T))

    def silu(self, x: mx.array) -> mx.array:
        return x * mx.sigmoid(x)

    def gelu(self, x: mx.array) -> mx.array:
        y = x.astype(mx.float32)
        y = 0.5 * y * (1 + mx.tanh((2 / np.pi) ** 0.5 * (y + 0.044715 * y**3)))
        return y.astype(x.dtype)

    def layer_norm(self, x: mx.array) -> mx.array:
        eps = 1e-5 if self.bug == "layer_norm_eps_of_mlx" else 1e-6
        return mx.fast.layer_norm(x, None, None, eps)

    def qk_norm(self, name: str, x: mx.array) -> mx.array:
        bug, scale = self.bug, self.p[f"{name}.scale"]
        if bug == "single_blocks_without_qk_norm" and name.startswith("single"):
            return x
        if bug == "qk_norm_is_layer_norm":
            x = x - x.mean(-1, keepdims=True)
        return tap(name, mx.fast.rms_norm(x, scale, 1e-6))

    def embedder(self, name: str, x: mx.array) -> mx.array:
        x = self.linear(f"{name}.in_layer", x)
        if self.bug == "vector_in_by_gelu" and name == "vector_in":
            x = self.gelu(x)
        else:
            x = self.silu(x)
        return self.linear(f"{name}.out_layer", x)

    def timestep_embedding(self, t: mx.array, name: str) -> mx.array:
        """256 waves of a number times 1000."""
        bug = self.bug
        factor = 1 if bug == "guidance_not_times_1000" and name == "guidance" else 1000
        period = 1000 if bug == "period_of_1000" else 10000
        exponent = np.float32(-np.log(period)) * np.arange(128, dtype=np.float32) / 128
        frequencies = np.exp(exponent.astype(np.float64)).astype(np.float32)
        args = (factor * t).astype(mx.float32)[:, None] * mx.array(frequencies)
        waves = mx.concatenate([mx.cos(args), mx.sin(args)], -1)
        return tap(f"{name}_embedding", waves.astype(self.dtype))

    def vector(self, t: mx.array, pooled: mx.array) -> mx.array:
        vec = self.embedder("time_in", self.timestep_embedding(t, "time"))
        if self.bug != "guidance_left_out":
            strength = mx.full((len(pooled),), GUIDANCE, dtype=self.dtype)
            vec = vec + self.embedder("guidance_in", self.timestep_embedding(strength, "guidance"))
        return tap("vec", vec + self.embedder("vector_in", pooled))

    def modulation(self, name: str, vec: mx.array) -> list[mx.array]:
        """Shift, scale, gate, once or twice."""
        y = self.linear(f"{name}.lin", self.silu(vec))
        parts = list(mx.split(y[:, None], y.shape[-1] // WIDTH, -1))
        if self.bug == "first_modulation_used_twice" and name.endswith("1.txt_mod"):
            parts = parts[:3] * 2
        return parts

    def modulated(self, name: str, x: mx.array, part: list[mx.array]) -> mx.array:
        shift, scale = part[:2]
        one = 0 if self.bug == "mlp_scale_without_one" and name.endswith("img_mlp_in") else 1
        return tap(name, (one + scale) * self.layer_norm(x) + shift)

    def split(self, name: str, qkv: mx.array) -> list[mx.array]:
        """q and k normed, and v, each (batch, heads, tokens, channels)."""
        batch, n, _ = qkv.shape
        if self.bug == "heads_behind_channels" and name.startswith("double"):
            q, k, v = qkv.reshape(batch, n, 3, HEAD, HEADS).transpose(2, 0, 4, 1, 3)
        else:
            q, k, v = qkv.reshape(batch, n, 3, HEADS, HEAD).transpose(2, 0, 3, 1, 4)
        return [self.qk_norm(f"{name}.query_norm", q), self.qk_norm(f"{name}.key_norm", k), v]

    def rotated(self, x: mx.array) -> mx.array:
        cos, sin = self.pe
        y = x.astype(mx.float32)
        if self.bug == "rotated_by_halves":
            a, b = mx.split(y, 2, -1)
            return mx.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
        a, b = y[..., ::2], y[..., 1::2]
        y = mx.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
        return y.astype(x.dtype)

    def attention(self, name: str, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        bug, scale = self.bug, HEAD**-0.5
        q = tap(f"{name}.q", self.rotated(q))
        k = tap(f"{name}.k", k if bug == "keys_not_rotated" else self.rotated(k))
        if bug == "queries_scaled_before":
            q = q * scale
        mask: Any = "causal" if bug == "attention_causal" and name == "single_blocks.1" else None
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        y = y.swapaxes(1, 2).reshape(len(y), -1, WIDTH)
        return tap(f"{name}.attention", y)

    def double_block(
        self, name: str, img: mx.array, txt: mx.array, vec: mx.array
    ) -> tuple[mx.array, mx.array]:
        bug, n = self.bug, txt.shape[1]
        img_mod = self.modulation(f"{name}.img_mod", vec)
        txt_mod = self.modulation(f"{name}.txt_mod", vec)
        y = self.modulated(f"{name}.img_attn_in", img, img_mod)
        image = self.split(f"{name}.img_attn.norm", self.linear(f"{name}.img_attn.qkv", y))
        z = self.modulated(f"{name}.txt_attn_in", txt, txt_mod)
        text = self.split(f"{name}.txt_attn.norm", self.linear(f"{name}.txt_attn.qkv", z))
        if bug == "picture_joined_first":  # the rotations have texts first
            both = [mx.concatenate([a, b], 2) for a, b in zip(image, text, strict=True)]
            y = self.attention(name, *both)
            y = mx.concatenate([y[:, -n:], y[:, :-n]], 1)
        else:
            both = [mx.concatenate([a, b], 2) for a, b in zip(text, image, strict=True)]
            y = self.attention(name, *both)
        img = img + img_mod[2] * self.linear(f"{name}.img_attn.proj", y[:, n:])
        txt = txt + txt_mod[2] * self.linear(f"{name}.txt_attn.proj", y[:, :n])
        for stream, mod in (("img", img_mod[3:]), ("txt", txt_mod[3:])):
            x = img if stream == "img" else txt
            y = self.modulated(f"{name}.{stream}_mlp_in", x, mod)
            y = self.gelu(self.linear(f"{name}.{stream}_mlp.0", y))
            y = self.linear(f"{name}.{stream}_mlp.2", tap(f"{name}.{stream}_mlp.1", y))
            y = mod[2] * y
            alone = bug == "text_mlp_without_residual" and (stream, name[-1]) == ("txt", "0")
            y = tap(f"{name}.{stream}", y if alone else x + y)
            img, txt = (y, txt) if stream == "img" else (img, y)
        return img, txt

    def single_block(self, name: str, x: mx.array, vec: mx.array) -> mx.array:
        bug, mod = self.bug, self.modulation(f"{name}.modulation", vec)
        y = self.modulated(f"{name}.pre_norm", x, mod)
        qkv, mlp = mx.split(self.linear(f"{name}.linear1", y), [3 * WIDTH], -1)
        attention = self.attention(name, *self.split(f"{name}.norm", qkv))
        if bug == "single_gelu_of_erf":
            mlp = mlp * (1 + mx.erf(mlp / 2**0.5)) / 2
        else:
            mlp = self.gelu(mlp)
        out = self.linear(f"{name}.linear2", mx.concatenate([attention, mlp], -1))
        if bug == "single_residual_of_normed" and name.endswith("1"):
            x = y
        if bug == "single_gate_on_sum" and name.endswith("0"):
            return tap(name, mod[2] * (x + out))
        return tap(name, x + mod[2] * out)

    def __call__(self, img: mx.array, txt: mx.array, t: mx.array, pooled: mx.array) -> mx.array:
        bug = self.bug
        img, txt = self.linear("img_in", img), self.linear("txt_in", txt)
        vec, n = self.vector(t, pooled), txt.shape[1]
        ids = tap("ids", positions(n, bug))
        self.pe = rotations(ids, bug)
        tap("pe.cos", self.pe[0])
        tap("pe.sin", self.pe[1])
        for i in range(DOUBLE):
            img, txt = self.double_block(f"double_blocks.{i}", img, txt, vec)
        x = mx.concatenate([txt, img], 1)
        for i in range(SINGLE):
            x = self.single_block(f"single_blocks.{i}", x, vec)
        x = x[:, :-n] if bug == "texts_cut_at_wrong_end" else x[:, n:]
        bare = bug == "last_modulation_without_silu"
        y = self.linear("final_layer.adaLN_modulation.1", vec if bare else self.silu(vec))
        shift, scale = mx.split(y[:, None], 2, -1)
        x = tap("final_layer.norm_final", (1 + scale) * self.layer_norm(x) + shift)
        return self.linear("final_layer.linear", x)


def schedule(bug: str | None) -> tuple[Array, float]:
    """Times from 1 to 0, later ones closer to 1 for more tokens."""
    tokens = ROWS * COLUMNS // 4
    base, most = (256, 4096) if bug == "mu_of_released_sizes" else (BASE_TOKENS, MOST_TOKENS)
    mu = BASE_SHIFT + (MAX_SHIFT - BASE_SHIFT) / (most - base) * (tokens - base)
    times = np.linspace(1, 0, STEPS + 1)
    if bug == "last_step_of_no_length":
        times = np.append(np.linspace(1, 0, STEPS), 0)
    if bug != "times_not_shifted":
        times = np.exp(mu) / (np.exp(mu) + (1 / np.maximum(times, 1e-9) - 1))
        times[-1] = 0
    return times.astype(np.float32), mu


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, kind = given(folder), getattr(mx, dtype)
    net = Flux(converted(checkpoint(folder, "transformer"), bug), bug, kind)
    kept = {name: to_numpy(x) for name, x in net.p.items()} if weights else None
    texts = mx.array(value("pipeline/prompt_embeds")).astype(kind)
    pooled = mx.array(value("pipeline/pooled_prompt_embeds")).astype(kind)
    if bug == "prompts_cut_at_five":
        texts = texts[:, :5]
    if bug == "pooled_made_unit_length":
        pooled = pooled / mx.sqrt((pooled * pooled).sum(-1, keepdims=True))
    blocks = ("given.*", "times", "mu", "img", "img_in", "txt_in", "vec", "velocity", "latents")
    blocks += ("double_blocks.?.???", "single_blocks.?", "final_layer.linear")
    with port_trace(out, dump, dtype, blocks, kept):
        tap("given.t5", texts, kind="input")
        tap("given.clip", pooled, kind="input")
        x = mx.array(value("pipeline/noise").transpose(0, 2, 3, 1))
        if bug == "noise_in_bfloat16":
            x = x.astype(mx.bfloat16).astype(mx.float32)
        tap("given.noise", x, kind="input")
        times, mu = schedule(bug)
        tap("mu", np.float32(mu), kind="scalar")
        tap("times", times, kind="schedule")
        img = patchify(x.astype(kind), bug)
        for step in range(STEPS):
            set_step(step)
            img = tap("img", img)
            t = mx.full((len(img),), float(times[step]) * 1000, dtype=kind) / 1000
            velocity = tap("velocity", net(img, texts, t, pooled))
            length = float(times[step + 1] - times[step])
            if bug == "steps_of_equal_length":
                length = -1 / STEPS
            change = velocity * mx.array(length, dtype=mx.float32)
            img = (img.astype(mx.float32) + change).astype(kind)
        latents = unpatchify(img, bug)
        shift = 0 if bug == "shift_factor_forgotten" else SHIFTING
        tap("latents", (latents / SCALING + shift).astype(kind))


NO_COUNTERPART: tuple[str, ...] = ()

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter|state.?dict"
SWAPPED = r"swap|exchang|\border\b|permut|revers|mixed up|interchang|switch"
POSITION = r"position|\bids?\b|\bgrid\b|coordinate"
AXES_OF = r"\bax[ei]s\b|\brows?\b|column|height|width|\b[hw]\b|transpos"
RESIDUAL = r"residual|skip connection|identity"
BUGS = (
    Bug(
        "last_shift_and_scale_kept",
        "The last modulation is loaded as scale and shift, which are shift and scale here.",
        (LOADED, SWAPPED, r"shift (and|,) ?scale|scale (and|,) ?shift|halves|\broll|chunk"),
        "weights",
    ),
    Bug(
        "guidance_in_is_time_in",
        "The guidance's embedder has the weights of the time's.",
        (LOADED, r"dupl|time_in|timestep_embedder|same (weight|embed)|another embed"),
        "weights",
    ),
    Bug(
        "modulations_of_streams_exchanged",
        "One block's modulations of picture and texts have each other's weights.",
        (LOADED, SWAPPED, r"(other|wrong|another) (stream|modulation)|norm1_context"),
        "weights",
    ),
    Bug(
        "query_and_key_norms_exchanged",
        "Texts' norms of queries and keys have each other's weights.",
        (LOADED, SWAPPED, r"norm_added_[qk]|(query|key)_norm.*(key|query)_norm"),
        "weights",
    ),
    Bug(
        "single_blocks_in_other_order",
        "Single blocks have each other's weights.",
        (LOADED, SWAPPED, r"(another|other|wrong) (block|layer)|dupl"),
        "weights",
    ),
    Bug(
        "linear1_with_mlp_first",
        "linear1 has the MLP's rows before those of q, k and v.",
        (LOADED, SWAPPED, r"\broll|fused|split|concat|mlp('s)? (rows )?(first|before)"),
        "weights",
    ),
    Bug(
        "qkv_rows_by_head",
        "One fused weight has q, k and v of each head together.",
        (LOADED, SWAPPED, r"interleav|per.?head|by head|head.?(major|first|wise)|reorder|layout"),
        "weights",
    ),
    Bug(
        "mlp_of_four_bits",
        "One weight was quantized to four bits.",
        (LOADED, r"quanti|\bbits?\b|4.?bit|precision|int4|q4|round"),
        "weights",
    ),
    Bug(
        "text_bias_left_at_zero",
        "The bias of the texts' first layer is zero.",
        (LOADED, r"\bbias|zero"),
        "weights",
    ),
    Bug(
        "prompts_cut_at_five",
        "Prompts are cut at five tokens.",
        (r"token|truncat|\bcut\b|length|max_(seq|length)|shorter|fewer|missing rows|slic",),
        "inputs",
    ),
    Bug(
        "pooled_made_unit_length",
        "Pooled features are divided by their length.",
        (r"normali[sz]|unit|\bl2\b|\blength\b|\bnorm\b|scal(e|ed|ing)\b|factor|magnitude",),
        "inputs",
    ),
    Bug(
        "patches_with_channels_last",
        "Patches have their channels last, not first.",
        (
            r"pack|patch|rearrang|permut|2 ?x ?2|layout|channels? (first|last)|pixel.?unshuffle",
            r"\bax[ei]s\b|transpos|channel.?(order|major)|" + SWAPPED,
        ),
    ),
    Bug(
        "tokens_back_by_columns",
        "Tokens become a picture column by column.",
        (r"un-?pack|un-?patch|patch|reshap|layout|permut|raster|" + AXES_OF, SWAPPED),
    ),
    Bug(
        "picture_after_texts",
        "The picture's positions begin where texts end.",
        (POSITION, r"offset|shifted|start|begin|after (the )?text|text length"),
    ),
    Bug(
        "columns_before_rows",
        "The rotation has columns before rows.",
        (POSITION, AXES_OF, SWAPPED),
    ),
    Bug(
        "rows_on_first_axis",
        "Rows and columns are on the first two axes, not on the last two.",
        (POSITION, AXES_OF, r"\broll|time axis|first (two|axis|channel)|shifted|axes_dim"),
    ),
    Bug(
        "texts_counted",
        "Texts have positions that count, not zeros.",
        (POSITION, r"arange|count|zero|text.*rotat|rotat.*text"),
    ),
    Bug(
        "rotations_in_bfloat16",
        "Cosines and sines of the rotation are bfloat16.",
        (r"bf16|bfloat16|\bhalf\b|precision|round|16.?bit|cast|dtype",),
    ),
    Bug(
        "rotated_by_halves",
        "The rotation takes halves of a head, not neighbours.",
        (r"half|halves|interleav|neighbou?r|adjacent|\bpair|rotate_half|neox|traditional",),
    ),
    Bug(
        "keys_not_rotated",
        "Only queries are rotated.",
        (
            r"(rope|rot)\w*.*(missing|skip|not (appl|run|used)|left out|lack|only|never|omit)",
            r"(missing|skip|\bno\b|without|lacks?|omit|un-?|not |only).*(rope|rot(at|ary))",
            r"only (the )?quer|keys?\b.*(not|never|without|un-?)\s*(be |get )?(rot|rope|posi)",
        ),
    ),
    Bug(
        "queries_scaled_before",
        "Queries are scaled before attention, which scales again.",
        (r"scal(e|ed|ing)\b|factor|sqrt|root|twice|temperature|\*\* ?-0\.5|0\.25|1/16",),
    ),
    Bug(
        "picture_joined_first",
        "Double blocks join the picture before texts, unlike the rotations.",
        (
            r"concat|join|(text|txt|image|img|picture).*(first|before)|\broll|sequence order",
            POSITION,
            SWAPPED,
        ),
    ),
    Bug(
        "qk_norm_is_layer_norm",
        "Queries and keys lose their mean before the norm.",
        (r"\bmean|layer.?norm|cent(er|re)|subtract|rms",),
    ),
    Bug(
        "layer_norm_eps_of_mlx",
        "LayerNorms have MLX's own eps, 1e-5.",
        (r"\beps",),
    ),
    Bug(
        "single_blocks_without_qk_norm",
        "Single blocks do not norm queries and keys.",
        (
            r"norm\w*\b.*(missing|skip|not (appl|run|used|called)|left out|lack|unused|never|omit)",
            r"(missing|skip|\bno\b|without|lacks?|omit|forg).*norm|un-?norm|not norm|qk.?norm",
        ),
    ),
    Bug(
        "attention_causal",
        "The last block's attention is causal.",
        (r"mask|causal|future|later tokens|triang|bidirectional|autoregress",),
    ),
    Bug(
        "heads_behind_channels",
        "Double blocks split channels before heads.",
        (
            r"heads?\b.*(channel|layout|order|reshap|split|last|axis|transpos|interleav|inner)",
            r"(channel|layout|order|reshap|split|axis|axes|transpos|interleav|swap|stride).*heads?\b",
            r"transpos|reshap|interleav|\bax[ei]s\b|permut|unflatten|rearrang",
        ),
    ),
    Bug(
        "mlp_scale_without_one",
        "The picture's scale before MLPs is not added to one.",
        (r"1 ?\+|\+ ?1\b|\bones?\b|plus|without adding|identity|scale.*\badd",),
    ),
    Bug(
        "first_modulation_used_twice",
        "One block's texts take attention's shift, scale and gate for the MLP too.",
        (
            r"modulation.*(twice|first|same|second|attention|wrong|reus|half|chunk)|chunk|reus",
            r"(msa|attention)'?s? .*(mlp|second)|mlp.*(msa|attention'?s)|same (shift|scale|gate)",
            r"(first|wrong|other|same) (three|half|part|chunk|set|modulation)|twice",
        ),
    ),
    Bug(
        "single_gate_on_sum",
        "The first single block's gate multiplies the stream as well.",
        (
            r"gat(e|ed|es|ing)\b.*(sum|residual|whole|both|stream|input|after|outside|x \+)",
            r"(sum|residual|whole|stream|after).*gat(e|ed|es|ing)\b|bracket|parenthes|precedence",
            RESIDUAL,
        ),
    ),
    Bug(
        "last_modulation_without_silu",
        "The last modulation lacks the SiLU before it.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "single_gelu_of_erf",
        "Single blocks have the GELU with erf.",
        (r"gelu|\berf\b|tanh|activation",),
    ),
    Bug(
        "vector_in_by_gelu",
        "The pooled features' embedder has a GELU, not a SiLU.",
        (r"gelu|silu|swish|activation|non-?linear",),
    ),
    Bug(
        "single_residual_of_normed",
        "The last single block adds to the modulated stream.",
        (
            RESIDUAL,
            r"(normed|modulated|normali[sz]ed) (input|stream|value|x\b)",
            r"(adds?|added|sum).*(norm|modulat)|(block|layer)'?s? (own )?input",
        ),
    ),
    Bug(
        "text_mlp_without_residual",
        "The first block's text MLP replaces the stream.",
        (RESIDUAL, r"(stream|input|\bx\b).*(not|never) added|replac|overwrit|without adding"),
    ),
    Bug(
        "texts_cut_at_wrong_end",
        "After the single blocks tokens are cut off at the end, where the picture is.",
        (
            r"slic|\bcut\b|crop|(text|txt).*(end|begin|first|kept|left|drop|remov|strip)|\broll",
            r"(wrong|other|first|last) (end|tokens|rows|part|side)|split|offset|shifted|off.by",
        ),
    ),
    Bug(
        "guidance_not_times_1000",
        "The guidance is embedded without its factor of 1000.",
        (r"1000|time_?factor|factor|scal(e|ed|ing)\b|multipl|guidance (value|input)",),
    ),
    Bug(
        "period_of_1000",
        "The longest wave of times is 1000, not 10000.",
        (r"period|frequenc|wave|\b10_?000\b|theta|exponent|\bbase\b|sinusoid",),
    ),
    Bug(
        "guidance_left_out",
        "The guidance is not embedded.",
        (
            r"guidance.*(missing|\bnot\b|left out|skip|lack|never|omit|ignor|unused|zero|absent)",
            r"(missing|without|lack|skip|\bno\b|omit|ignor|leaves? out|forg).*guidance",
            r"distill|schnell|guidance_embeds",
        ),
    ),
    Bug(
        "mu_of_released_sizes",
        "mu is of the line through 256 and 4096 tokens, whatever the configuration says.",
        (
            r"\bmu\b|shift|schedule|sigmas?\b|timesteps?\b",
            r"base_image_seq_len|max_image_seq_len|4096|seq_?len|resolution",
        ),
        "schedule",
    ),
    Bug(
        "last_step_of_no_length",
        "Times reach 0 one step early, so the last step has no length.",
        (
            r"schedule|sigmas?\b|timesteps?\b|linspace|spac(ed|ing)|times\b",
            r"off.by.one|last step|(number|count) of steps|end ?point|too early|1 ?/ ?(steps|n)",
        ),
        "schedule",
    ),
    Bug(
        "times_not_shifted",
        "Times are not shifted at all.",
        (r"shift|\bmu\b|schedule|sigmas?\b|timesteps?\b|linear",),
        "schedule",
    ),
    Bug(
        "steps_of_equal_length",
        "The sampler's steps are all 1 / steps long.",
        (
            r"step (size|length)|\bdt\b|euler|delta|interval|sigma|(equal|uniform|constant) step",
            r"factor|scal(e|ed|ing)\b|multipl|difference|1 ?/ ?(steps|n|3)|uniform|spacing",
        ),
    ),
    Bug(
        "noise_in_bfloat16",
        "Noise is rounded to bfloat16.",
        (r"bf16|bfloat16|\bhalf\b|precision|round|16.?bit|cast|dtype|noise",),
        "inputs",
    ),
    Bug(
        "shift_factor_forgotten",
        "Latents do not get the decoder's shift.",
        (r"shift|offset|\bmean\b|constant|bias|0\.1159|additive",),
    ),
)
