"""Lumina-Next's image transformer in NumPy: a batch of two, latents with channels last.

The architecture is that of NextDiT in the authors' repository (Alpha-VLLM/Lumina-T2X,
lumina_next_t2i/models), whose names the values and weights have; diffusers' LuminaNextDiT2DModel is
the reference. As there, one attention module sees image and text and has one set of queries, time
runs from 0 (noise) to 1 (image), and a step of Euler adds the velocity.
"""

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, LuminaNextDiT2DModel
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

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

NAME = "lumina_next"
DIM, HEADS, KV_HEADS, HEAD, LAYERS, TEXT, TOKENS, WAVE = 64, 4, 2, 16, 3, 24, 9, 256
CHANNELS, PATCH, ROWS, COLUMNS = 4, 2, 10, 12
HIGH, WIDE = ROWS // PATCH, COLUMNS // PATCH
PLACES = HIGH * WIDE
STEPS, SHIFT, GUIDANCE = 3, 3.0, 4.0
BASE_PLACES, SCALING, WATERSHED = 12, 1.5, 0.3  # of larger images: attention's and RoPE's scaling
VALID = (7, 4)  # tokens of the prompt and of the negative prompt; the rest is padding


def filled() -> LuminaNextDiT2DModel:
    """The model without memory left as it was: its token for padding is unused and not set."""
    config: dict[str, Any] = dict(sample_size=16, patch_size=PATCH, in_channels=CHANNELS)
    config |= dict(hidden_size=DIM, num_layers=LAYERS, num_attention_heads=HEADS)
    config |= dict(num_kv_heads=KV_HEADS, multiple_of=8, cross_attention_dim=TEXT)
    model = LuminaNextDiT2DModel(**config)
    torch.nn.init.normal_(model.pad_token, std=0.02)
    return model


def reference(folder: Path, dtype: str) -> None:
    """The loop of LuminaPipeline for one image, from embeddings to latents."""
    model = randomised(filled, 131)
    for at, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith(".gate"):
            parameter.mul_(20)  # the text matters
        elif "norm" in name and parameter.ndim == 1 and "linear" not in name:
            parameter.add_(noise(200 + at, *parameter.shape) / 4)
        elif "norm1.linear.weight" in name:
            parameter.mul_(2)
    for layer in model.layers:  # as converted weights of the original, whose queries are shared
        layer.attn2.to_q.load_state_dict(layer.attn1.to_q.state_dict())
        layer.attn2.norm_q.load_state_dict(layer.attn1.norm_q.state_dict())
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
        embeds = noise(132, 2, TOKENS, TEXT).to(model.dtype)
        mask = (torch.arange(TOKENS) < torch.tensor(VALID)[:, None]).long()
        latents = noise(133, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/prompt_embeds", embeds[:1], kind="input")
        recorder.record("pipeline/prompt_attention_mask", mask[:1], kind="input")
        recorder.record("pipeline/negative_prompt_embeds", embeds[1:], kind="input")
        recorder.record("pipeline/negative_prompt_attention_mask", mask[1:], kind="input")
        recorder.record("pipeline/noise", latents, kind="input")
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            time = 1 - t.expand(2) / scheduler.config.num_train_timesteps
            linear, ntk = (SCALING, 1.0) if time[0] < WATERSHED else (1.0, SCALING)
            rope = get_2d_rotary_pos_embed_lumina(
                HEAD, 384, 384, linear_factor=linear, ntk_factor=ntk
            )
            output = model(
                hidden_states=torch.cat([latents] * 2),
                timestep=time,
                encoder_hidden_states=embeds,
                encoder_mask=mask,
                image_rotary_emb=rope,
                cross_attention_kwargs={"base_sequence_length": BASE_PLACES},
                return_dict=False,
            )[0]
            predicted = output.chunk(2, dim=1)[0]
            cond, uncond = predicted[:, :3].chunk(2)
            guided = uncond + GUIDANCE * (cond - uncond)
            predicted = torch.cat([guided, predicted[:1, 3:]], dim=1)
            recorder.record("pipeline/noise_pred", predicted)
            latents = scheduler.step(-predicted, t, latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the names of the original; matrices stay (out, in)."""
    new: dict[str, Array] = {}

    def put(name: str, old: str) -> None:
        for end in ("weight", "bias"):
            if f"{old}.{end}" in w:
                new[f"{name}.{end}"] = w[f"{old}.{end}"]

    put("x_embedder", "patch_embedder.proj")
    if bug != "patch_weight_channels_first":  # patches are (row, column, channel) here
        kernel = w["patch_embedder.proj.weight"].reshape(DIM, CHANNELS, PATCH, PATCH)
        new["x_embedder.weight"] = kernel.transpose(0, 2, 3, 1).reshape(DIM, -1).copy()
    put("t_embedder.mlp.0", "time_caption_embed.timestep_embedder.linear_1")
    put("t_embedder.mlp.2", "time_caption_embed.timestep_embedder.linear_2")
    put("cap_embedder.0", "time_caption_embed.caption_embedder.0")
    put("cap_embedder.1", "time_caption_embed.caption_embedder.1")
    gate, up = "linear_1", "linear_3"
    if bug == "ffn_w1_w3_exchanged":
        gate, up = up, gate
    after, before = "norm2", "ffn_norm1"
    if bug == "ffn_norm_is_norm2":  # by the number in the name
        after, before = before, after
    for i in range(LAYERS):
        layer = f"layers.{i}"
        for name, old in (
            ("attention.wq", "attn1.to_q"),
            ("attention.wk", "attn1.to_k"),
            ("attention.wv", "attn1.to_v"),
            ("attention.wk_y", "attn2.to_k"),
            ("attention.wv_y", "attn2.to_v"),
            ("attention.wo", "attn2.to_out.0"),
            ("attention.q_norm", "attn1.norm_q"),
            ("attention.k_norm", "attn1.norm_k"),
            (
                "attention.ky_norm",
                "attn1.norm_k" if bug == "ky_norm_is_k_norm" else "attn2.norm_k",
            ),
            ("feed_forward.w1", f"feed_forward.{gate}"),
            ("feed_forward.w2", "feed_forward.linear_2"),
            ("feed_forward.w3", f"feed_forward.{up}"),
            ("attention_norm1", "norm1.norm"),
            ("attention_norm2", after),
            ("ffn_norm1", before),
            ("ffn_norm2", "ffn_norm2"),
            ("attention_y_norm", "norm1_context"),
            ("adaLN_modulation.1", "norm1.linear"),
        ):
            put(f"{layer}.{name}", f"{layer}.{old}")
        new[f"{layer}.attention.gate"] = w[f"{layer}.gate"]
        if bug == "qk_norm_bias_dropped":
            for name in ("q_norm", "k_norm", "ky_norm"):
                bias = f"{layer}.attention.{name}.bias"
                new[bias] = np.zeros_like(new[bias])
    put("final_layer.adaLN_modulation.1", "norm_out.linear_1")
    put("final_layer.linear", "norm_out.linear_2")
    return new


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def freqs_cis(t: float, bug: str | None) -> tuple[Array, Array]:
    """Cosines and sines of (tokens, pairs of a head): row and column take turns.

    Early steps stretch positions, later ones raise theta, as the image is larger than in training.
    """
    early = t < WATERSHED or bug == "rope_linear_at_each_step"
    linear, ntk = (SCALING, 1.0) if early else (1.0, SCALING)
    exponents = np.arange(0, HEAD, 4, dtype=np.float32) / np.float32(HEAD)
    freqs = np.float32(1) / np.float32(10000.0 * ntk) ** exponents / np.float32(linear)
    rows, columns = np.indices((HIGH, WIDE), dtype=np.float32).reshape(2, -1)
    if bug == "rope_angles_bfloat16":
        freqs = freqs.astype(ml_dtypes.bfloat16).astype(np.float32)
    angles_h, angles_w = np.outer(rows, freqs), np.outer(columns, freqs)
    if bug == "rope_rows_then_columns":
        angles = np.concatenate([angles_h, angles_w], -1)
    else:
        angles = np.stack([angles_h, angles_w], -1).reshape(PLACES, HEAD // 2)
    if bug == "rope_angles_bfloat16":
        angles = angles.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.cos(angles), np.sin(angles)


class NextDiT:
    """The forward pass; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, slot: str = "out", kind: str = "activation") -> Array:
        """`x` is rounded already where the reference keeps the precision of the run."""
        taps.tap(name, x.astype(self.dtype), slot=slot, kind=kind)
        return x

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.weight"].T
        if f"{name}.bias" in self.p:
            y = y + self.p[f"{name}.bias"]
        return self.tap(name, self.r(y))

    def layer_norm(self, name: str, x: Array, eps: float = 1e-5, centred: bool = True) -> Array:
        y = x - x.mean(-1, keepdims=True) if centred else x
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(eps))
        if f"{name}.weight" in self.p:
            y = y * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]
        return self.tap(name, self.r(y))

    def rms_norm(self, name: str, x: Array) -> Array:
        y = self.r(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5)))
        return self.tap(name, self.r(y * self.p[f"{name}.weight"]))

    def timestep_embedding(self, t: float) -> Array:
        half = WAVE // 2
        freqs = np.exp(np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / half)
        args = np.full((2, 1), t, np.float32) * freqs.astype(np.float32)
        parts = [np.cos(args), np.sin(args)]
        if self.bug == "time_sine_first":
            parts.reverse()
        return self.tap("t_embedder.freq", self.r(np.concatenate(parts, -1)))

    def adaln_input(self, t: float, cap_feats: Array, cap_mask: Array) -> Array:
        """The embedding of the time plus that of the mean of the text."""
        x = self.linear("t_embedder.mlp.0", self.timestep_embedding(t))
        x = self.tap("t_embedder.mlp.1", self.r(silu(x)))
        x = self.linear("t_embedder.mlp.2", x)
        if self.bug == "pool_with_padding":
            pooled = cap_feats.mean(1)
        else:
            weight = cap_mask[..., None].astype(np.float32)
            pooled = (cap_feats * weight).sum(1) / weight.sum(1)
        pooled = self.tap("cap_feats_pool", self.r(pooled))
        cap = self.linear("cap_embedder.1", self.layer_norm("cap_embedder.0", pooled))
        return self.tap("adaln_input", self.r(x + cap))

    def rotated(self, x: Array, rope: tuple[Array, Array]) -> Array:
        """Turns pairs of neighbouring channels of (batch, tokens, heads, channels)."""
        cos, sin = (y[:, None] for y in rope)
        a, b = x[..., ::2], x[..., 1::2]
        return self.r(np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape))

    def repeated(self, x: Array) -> Array:
        """Keys or values for all heads of queries."""
        if self.bug == "kv_heads_tiled":
            return np.tile(x, (1, 1, HEADS // KV_HEADS, 1))
        return np.repeat(x, HEADS // KV_HEADS, axis=2)

    def attend(self, q: Array, k: Array, v: Array, scale: float, mask: Array | None) -> Array:
        scores = np.einsum("bqhd,bkhd->bhqk", q, self.repeated(k)) * np.float32(scale)
        if mask is not None:
            scores = np.where(mask[:, None, None] > 0, scores, np.float32(-np.inf))
        return self.r(np.einsum("bhqk,bkhd->bqhd", softmax(scores), self.repeated(v)))

    def attention(
        self, name: str, x: Array, rope: tuple[Array, Array], y: Array, y_mask: Array
    ) -> Array:
        """Tokens of the image attend to themselves and, through a gate for each head, to text."""
        bug, p = self.bug, self.p
        self.tap(name, x, slot="in.x")
        self.tap(name, y, slot="in.y")
        centred = bug != "qk_norm_not_centred"
        xq = self.layer_norm(f"{name}.q_norm", self.linear(f"{name}.wq", x), centred=centred)
        xk = self.layer_norm(f"{name}.k_norm", self.linear(f"{name}.wk", x), centred=centred)
        xv = self.linear(f"{name}.wv", x)
        plain = xq.reshape(2, PLACES, HEADS, HEAD)
        xk, xv = (z.reshape(2, PLACES, KV_HEADS, HEAD) for z in (xk, xv))
        xq = self.tap(f"{name}.xq", self.rotated(plain, rope))
        xk = self.tap(f"{name}.xk", self.rotated(xk, rope))
        scale = math.sqrt(math.log(PLACES, BASE_PLACES) / HEAD)
        output = self.tap(f"{name}.output_x", self.attend(xq, xk, xv, scale, None))

        yk = self.layer_norm(f"{name}.ky_norm", self.linear(f"{name}.wk_y", y), centred=centred)
        yv = self.linear(f"{name}.wv_y", y)
        yk, yv = (z.reshape(2, TOKENS, KV_HEADS, HEAD) for z in (yk, yv))
        if bug != "text_scale_proportional":
            scale = HEAD**-0.5
        yq = plain if bug == "text_queries_not_rotated" else xq
        mask = None if bug == "text_mask_missing" else y_mask
        output_y = self.tap(f"{name}.output_y", self.attend(yq, yk, yv, scale, mask))
        gate = self.r(np.tanh(p[f"{name}.gate"]))
        output_y = self.tap(f"{name}.gated_y", self.r(output_y * gate[:, None]))
        output = self.r(output + output_y).reshape(2, PLACES, DIM)
        return self.linear(f"{name}.wo", self.tap(f"{name}.output", output))

    def feed_forward(self, name: str, x: Array) -> Array:
        gate = self.r(silu(self.linear(f"{name}.w1", x)))
        self.tap(f"{name}.silu", gate)
        h = self.r(gate * self.linear(f"{name}.w3", x))
        return self.linear(f"{name}.w2", self.tap(f"{name}.w2", h, slot="in.0"))

    def layer(
        self,
        i: int,
        x: Array,
        rope: tuple[Array, Array],
        y: Array,
        y_mask: Array,
        adaln_input: Array,
    ) -> Array:
        bug, name, r = self.bug, f"layers.{i}", self.r
        e = adaln_input if bug == "modulation_without_silu" else r(silu(adaln_input))
        e = self.linear(f"{name}.adaLN_modulation.1", e)
        scale_msa, gate_msa, scale_mlp, gate_mlp = np.split(e[:, None], 4, axis=-1)
        if bug == "modulation_scales_then_gates":
            gate_msa, scale_mlp = scale_mlp, gate_msa
        gate_msa = r(np.tanh(gate_msa))
        if bug != "mlp_gate_without_tanh":
            gate_mlp = r(np.tanh(gate_mlp))
        h = r(self.rms_norm(f"{name}.attention_norm1", x) * r(1 + scale_msa))
        y = self.rms_norm(f"{name}.attention_y_norm", y)
        h = self.attention(f"{name}.attention", h, rope, y, y_mask)
        x = r(x + r(gate_msa * self.rms_norm(f"{name}.attention_norm2", h)))
        self.tap(f"{name}.ffn_norm1", x, slot="in.0")
        h = r(self.rms_norm(f"{name}.ffn_norm1", x) * r(1 + scale_mlp))
        h = self.feed_forward(f"{name}.feed_forward", self.tap(f"{name}.mlp_input", h))
        return self.tap(name, r(x + r(gate_mlp * self.rms_norm(f"{name}.ffn_norm2", h))))

    def final_layer(self, x: Array, adaln_input: Array) -> Array:
        e = self.r(silu(adaln_input))
        scale = self.linear("final_layer.adaLN_modulation.1", e)[:, None]
        x = self.layer_norm("final_layer.norm_final", x, eps=1e-6)
        x = self.tap("final_layer.linear", self.r(x * self.r(1 + scale)), slot="in.0")
        return self.linear("final_layer.linear", x)

    def patchify(self, x: Array) -> Array:
        """(batch, tokens, patch) of (batch, rows, columns, channels)."""
        x = x.reshape(-1, HIGH, PATCH, WIDE, PATCH, CHANNELS)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, PLACES, PATCH * PATCH * CHANNELS)

    def unpatchify(self, x: Array) -> Array:
        """The image; its channels are those of the velocity and of the unused variance."""
        x = x.reshape(-1, HIGH, WIDE, PATCH, PATCH, 2 * CHANNELS)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, ROWS, COLUMNS, 2 * CHANNELS)

    def __call__(self, x: Array, t: float, cap_feats: Array, cap_mask: Array) -> Array:
        rope = freqs_cis(t, self.bug)
        taps.tap("freqs_cos", rope[0])
        taps.tap("freqs_sin", rope[1])
        x = self.linear("x_embedder", self.patchify(x))
        adaln_input = self.adaln_input(t, cap_feats, cap_mask)
        for i in range(LAYERS):
            x = self.layer(i, x, rope, cap_feats, cap_mask, adaln_input)
        return self.tap("model", self.unpatchify(self.final_layer(x, adaln_input)))

    def forward_with_cfg(self, x: Array, t: float, cap_feats: Array, cap_mask: Array) -> Array:
        """The velocity; as in the original, guidance changes three of the channels."""
        out = self(np.concatenate([x, x]), t, cap_feats, cap_mask)[..., :CHANNELS]
        n = CHANNELS if self.bug == "guidance_of_all_channels" else 3
        eps, rest = out[..., :n], out[:1, ..., n:]
        cond, uncond = eps[:1], eps[1:]
        half = self.r(uncond + self.r(GUIDANCE * self.r(cond - uncond)))
        return self.tap("velocity", np.concatenate([half, rest], -1))


def times(bug: str | None) -> Array:
    """The grid of the solver from 0 (noise) to 1 (image), with its end."""
    t = np.linspace(0, 1, STEPS + 1)
    if bug == "grid_of_training_steps":
        t = np.append(np.linspace(0, 1 - 1 / 1000, STEPS), 1)
    if bug == "shift_towards_image":
        t = SHIFT * t / (1 + (SHIFT - 1) * t)
    else:
        t = t / (t + SHIFT - SHIFT * t)
    return t.astype(np.float32)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = NextDiT(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    r = net.r
    both = ("prompt", "negative_prompt")
    cap_feats = r(np.concatenate([value(f"pipeline/{name}_embeds") for name in both]))
    cap_mask = np.concatenate([value(f"pipeline/{name}_attention_mask") for name in both])
    if bug == "negative_mask_of_prompt":
        cap_mask[1] = cap_mask[0]
    x = r(value("pipeline/noise").transpose(0, 2, 3, 1))
    grid = times(bug)
    kept = {k: v.astype(dtype) for k, v in net.p.items()} if weights else None
    blocks = ("cap_*", "z", "t", "x_embedder", "adaln_input", "layers.?")
    blocks += ("final_layer.linear", "model", "velocity", "x")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("t", grid, kind="schedule")
        net.tap("cap_feats", cap_feats, kind="input")
        taps.tap("cap_mask", cap_mask, kind="input")
        net.tap("z", x, kind="input")
        for i in range(STEPS):
            taps.set_step(i)
            v = net.forward_with_cfg(x, float(grid[i]), cap_feats, cap_mask)
            x = net.tap("x", r(x + (grid[i + 1] - grid[i]) * v))


NO_COUNTERPART: tuple[str, ...] = (
    r"^t$",  # one minus the reference's sigmas
    r"^freqs_(cos|sin)$",  # the reference has complex numbers
    r"^layers\.\d\.attention\.xk$",  # the reference repeats keys for the heads of queries
    r"^layers\.\d\.attention\.gated_y$",  # a product inside a block
)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos|interchang"
SCHEDULE = r"schedule|sigma|timestep|\btime grid|\bgrid\b"
BUGS = (
    Bug(
        "patch_weight_channels_first",
        "The patch embedding's weight has the order (channel, row, column); patches do not.",
        (LOADED, SWAPPED, r"layout|channel|\bax[ei]s\b|flatten|reshap"),
        "weights",
    ),
    Bug(
        "ffn_w1_w3_exchanged",
        "The MLP's w1 has the weights of w3, and the other way round.",
        (
            LOADED,
            SWAPPED,
            r"w1\b.*w3|w3\b.*w1\b|linear_1.*linear_3|linear_3.*linear_1|gate.*\bup\b",
        ),
        "weights",
    ),
    Bug(
        "ky_norm_is_k_norm",
        "The norm of the text's keys has the weight and bias of the norm of the image's keys.",
        (
            LOADED,
            r"dupl|another|other norm|same (norm|param)",
            r"self.attention's (key )?norm|image's keys",
        ),
        "weights",
    ),
    Bug(
        "qk_norm_bias_dropped",
        "Norms of queries and keys have biases of zeros.",
        (LOADED, r"\bbias|zero"),
        "weights",
    ),
    Bug(
        "ffn_norm_is_norm2",
        "The norm before the MLP has the weight of that after attention, and the other way round.",
        (LOADED, SWAPPED, r"norm2.*ffn_norm1|ffn_norm1.*norm2|another|other norm"),
        "weights",
    ),
    Bug(
        "pool_with_padding",
        "The mean of the text's features counts padding too.",
        (
            r"mask|padd|\bpool",
            r"\b(mean|averag\w+)\b.*\b(token|text|caption)",
            r"(all|valid) tokens",
        ),
    ),
    Bug(
        "text_mask_missing",
        "Attention to the text does not mask padding.",
        (r"mask|padd", r"(all|more|extra) (keys|tokens)|valid (keys|tokens)"),
    ),
    Bug(
        "negative_mask_of_prompt",
        "The negative prompt has the mask of the prompt, so some of its padding counts.",
        (r"mask|padd", r"(all|more|extra|valid) (keys|tokens)|number of tokens"),
        "inputs",
    ),
    Bug(
        "shift_towards_image",
        "The formula that shifts sigmas shifts the times, so steps at the noise are large.",
        (r"\bshift", SCHEDULE),
        "schedule",
    ),
    Bug(
        "grid_of_training_steps",
        "The grid's last time before the end is 0.999, as if sigmas ran to 1 / 1000.",
        (SCHEDULE, r"linspace|spacing|off.by.one|end.?point|sigma_min"),
        "schedule",
    ),
    Bug(
        "time_sine_first",
        "The sinusoid of the time has sines before cosines.",
        (r"\bsin(e|es|us)?\b.*\bcos|\bcos(ine|ines)?\b.*\bsin", r"flip|halves|" + SWAPPED),
    ),
    Bug(
        "modulation_scales_then_gates",
        "The modulation is split into two scales and two gates, not scale, gate, scale, gate.",
        (r"chunk|split|slice", SWAPPED, r"scale.*\bgate|\bgate.*scale"),
    ),
    Bug(
        "mlp_gate_without_tanh",
        "The gate of the MLP lacks its tanh.",
        (r"tanh|activation|squash|saturat|nonlinear",),
    ),
    Bug(
        "modulation_without_silu",
        "The modulation of the blocks lacks its SiLU.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "text_scale_proportional",
        "The scale of proportional attention is used for the text as well.",
        (
            r"\bscal(e|es|ed|ing)\b|sqrt|temperature|softmax factor|proportional",
            r"base.?seq|log(arithm)?\b.*(sequence|length|tokens)",
        ),
    ),
    Bug(
        "rope_rows_then_columns",
        "RoPE's pairs are all of the rows, then all of the columns; they should take turns.",
        (
            r"interleav|concat|alternat|take turns|layout|stack",
            SWAPPED,
            r"\bax[ei]s\b|rows?\b|column|height|width|\b[hw]\b.*\b[hw]\b",
        ),
    ),
    Bug(
        "rope_linear_at_each_step",
        "RoPE stretches positions at each step; later ones should raise theta instead.",
        (
            r"\bntk\b|theta|\bbase\b|frequenc|linear.?(factor|scal)|watershed|wavelength",
            r"(rope|rotary|position)\w*.*(\bscal|interpol|stretch|factor)",
        ),
    ),
    Bug(
        "rope_angles_bfloat16",
        "RoPE's frequencies and angles are rounded to bfloat16.",
        (r"bf16|bfloat16|\bhalf\b|f16|precision|round|\bcast",),
    ),
    Bug(
        "text_queries_not_rotated",
        "Queries that attend to the text lack RoPE.",
        (r"\brope\b|rotat|rotary|position|unrotated",),
    ),
    Bug(
        "kv_heads_tiled",
        "Heads of keys and values are tiled (0, 1, 0, 1), not repeated (0, 0, 1, 1).",
        (
            r"\btil(e|ed|ing)\b|repeat|interleav|\bgqa\b|group|kv.?head",
            r"heads?\b.*(" + SWAPPED + r"|assign|map|share|wrong)|(" + SWAPPED + r").*\bheads?\b",
        ),
    ),
    Bug(
        "qk_norm_not_centred",
        "Norms of queries and keys do not subtract the mean, as RMS norms.",
        (r"\brms|cent(er|re)|subtract|\bmean\b",),
    ),
    Bug(
        "guidance_of_all_channels",
        "Guidance changes all four channels, not the first three.",
        (r"(guid|\bcfg\b).*(channel|three|\b3\b|four|\b4\b)", r"channels?\b.*(guid|\bcfg\b)"),
    ),
)
