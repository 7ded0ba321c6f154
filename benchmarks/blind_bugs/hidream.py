"""HiDream's image transformer in NumPy, with channels last and the names of Flux-like engines.

Projections of q, k and v are one matrix, and so are both input matrices of each SwiGLU; experts are
stacked. Each expert computes all tokens, and its share of a token is zero where it was not chosen.
diffusers' HiDreamImageTransformer2DModel is the reference. Each step calls the network once, with
the prompt first and the negative prompt second in the batch (the reference has them the other way
round), and ends with an Euler step of flow matching. Latents are not square, so padding is added.
"""

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, HiDreamImageTransformer2DModel

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

NAME = "hidream"
HEADS, HEAD, DOUBLE, SINGLE = 2, 16, 2, 2
WIDTH, CHANNELS, PATCH, AXES = HEADS * HEAD, 4, 2, (8, 4, 4)
EXPERTS, CHOSEN = 4, 2
T5, LLAMA, POOLED_L, POOLED_G = 24, 20, 6, 10
T5_TOKENS, LLAMA_TOKENS, STATES = 5, 7, 6
LLAMA_LAYERS = (0, 1, 3, 4)  # of the hidden states of Llama, one for each block
ROWS, COLUMNS, LARGEST = 6, 8, 8  # of latents; the largest latents are square
HIGH, WIDE, PLACES = ROWS // PATCH, COLUMNS // PATCH, (LARGEST // PATCH) ** 2
WAVE = 256
STEPS, SHIFT, GUIDANCE = 3, 3.0, 3.0


def reference(folder: Path, dtype: str) -> None:
    """The loop of HiDreamImagePipeline for one image, from embeddings to latents."""
    config: dict[str, Any] = dict(patch_size=PATCH, in_channels=CHANNELS, num_layers=DOUBLE)
    config |= dict(num_single_layers=SINGLE, attention_head_dim=HEAD, num_attention_heads=HEADS)
    config |= dict(caption_channels=[T5, LLAMA], text_emb_dim=POOLED_L + POOLED_G)
    config |= dict(num_routed_experts=EXPERTS, num_activated_experts=CHOSEN)
    config |= dict(axes_dims_rope=AXES, max_resolution=(LARGEST, LARGEST))
    config |= dict(llama_layers=list(LLAMA_LAYERS))
    model = randomised(lambda: HiDreamImageTransformer2DModel(**config), 83)
    for name, parameter in model.named_parameters():
        if "adaLN_modulation" in name or "gate.weight" in name:
            parameter.mul_(2)  # each gate matters, and routers are decided
        if "rms_norm" in name:
            parameter.mul_(1 + noise(len(name), WIDTH) / 4)
    model = saved(model, folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / STEPS, STEPS).tolist())
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        t5 = noise(11, 2, T5_TOKENS, T5).to(model.dtype)
        llama = noise(12, STATES, 2, LLAMA_TOKENS, LLAMA).to(model.dtype)
        pooled = noise(13, 2, POOLED_L + POOLED_G).to(model.dtype)
        latents = noise(14, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/prompt_embeds_t5", t5, kind="input")
        recorder.record("pipeline/prompt_embeds_llama3", llama, kind="input")
        recorder.record("pipeline/pooled_prompt_embeds", pooled, kind="input")
        recorder.record("pipeline/noise", latents, kind="input")
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            both = torch.cat([latents, latents])
            texts = dict(encoder_hidden_states_t5=t5, encoder_hidden_states_llama3=llama)
            texts |= dict(pooled_embeds=pooled)
            predicted = model(both, t.expand(2), return_dict=False, **texts)[0]
            uncond, cond = (-predicted).chunk(2)
            predicted = uncond + GUIDANCE * (cond - uncond)
            recorder.record("pipeline/noise_pred", predicted)
            latents = scheduler.step(predicted, t, latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the port's names: fused projections and stacked experts, all (out, in)."""
    new: dict[str, Array] = {}

    def put(name: str, *old: str) -> None:
        """Linear layers, one below the other where they are fused."""
        for end in ("weight", "bias"):
            if f"{old[0]}.{end}" in w:
                new[f"{name}.{end}"] = np.concatenate([w[f"{x}.{end}"] for x in old])

    def attention(name: str, old: str, stream: str) -> None:
        put(f"{name}.qkv", *(f"{old}.to_{x}{stream}" for x in "qkv"))
        put(f"{name}.proj", f"{old}.to_out{stream}")
        new[f"{name}.norm.query_norm.scale"] = w[f"{old}.q_rms_norm{stream}.weight"]
        new[f"{name}.norm.key_norm.scale"] = w[f"{old}.k_rms_norm{stream}.weight"]

    def swiglu(name: str, old: str) -> None:
        put(f"{name}.w13", f"{old}.w1", f"{old}.w3")
        put(f"{name}.w2", f"{old}.w2")

    def experts(name: str, old: str) -> None:
        new[f"{name}.router.weight"] = w[f"{old}.gate.weight"]
        w1, w2, w3 = (
            np.stack([w[f"{old}.experts.{e}.{x}.weight"] for e in range(EXPERTS)])
            for x in ("w1", "w2", "w3")
        )
        new[f"{name}.experts.w13"] = np.concatenate([w1, w3], 1)
        new[f"{name}.experts.w2"] = w2
        swiglu(f"{name}.shared", f"{old}.shared_experts")

    put("img_in", "x_embedder.proj")
    for name, old in (
        ("time_in", "t_embedder.timestep_embedder"),
        ("vector_in", "p_embedder.pooled_embedder"),
    ):
        put(f"{name}.in_layer", f"{old}.linear_1")
        put(f"{name}.out_layer", f"{old}.linear_2")
    for i in range(DOUBLE + SINGLE):
        put(f"llama_in.{i}", f"caption_projection.{i}.linear")
    put("t5_in", f"caption_projection.{DOUBLE + SINGLE}.linear")
    for i in range(DOUBLE):
        name, old = f"double_blocks.{i}", f"double_stream_blocks.{i}.block"
        put(f"{name}.mod.lin", f"{old}.adaLN_modulation.1")
        attention(f"{name}.img_attn", f"{old}.attn1", "")
        attention(f"{name}.txt_attn", f"{old}.attn1", "_t")
        experts(f"{name}.img_moe", f"{old}.ff_i")
        swiglu(f"{name}.txt_mlp", f"{old}.ff_t")
    for i in range(SINGLE):
        name, old = f"single_blocks.{i}", f"single_stream_blocks.{i}.block"
        put(f"{name}.mod.lin", f"{old}.adaLN_modulation.1")
        attention(f"{name}.attn", f"{old}.attn1", "")
        experts(f"{name}.moe", f"{old}.ff_i")
    put("final_layer.mod.lin", "final_layer.adaLN_modulation.1")
    put("final_layer.linear", "final_layer.linear")
    if bug == "fused_values_before_keys":
        for end in ("weight", "bias"):
            q, k, v = np.split(new[f"single_blocks.0.attn.qkv.{end}"], 3)
            new[f"single_blocks.0.attn.qkv.{end}"] = np.concatenate([q, v, k])
    if bug == "experts_have_one_down":
        down = new["double_blocks.1.img_moe.experts.w2"]
        new["double_blocks.1.img_moe.experts.w2"] = np.stack([down[0]] * EXPERTS)
    if bug == "shared_w3_before_w1":
        gate, up = np.split(new["single_blocks.0.moe.shared.w13.weight"], 2)
        new["single_blocks.0.moe.shared.w13.weight"] = np.concatenate([up, gate])
    if bug == "text_key_norm_of_image":
        scale = new["double_blocks.0.img_attn.norm.key_norm.scale"]
        new["double_blocks.0.txt_attn.norm.key_norm.scale"] = scale
    return new


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class HiDream:
    """The forward pass; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}
        self.rope = self.rope_table()

    def tap(self, name: str, x: Array, kind: str = "activation") -> Array:
        taps.tap(name, x.astype(self.dtype), kind=kind)
        return x

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.weight"].T
        if f"{name}.bias" in self.p:
            y = y + self.p[f"{name}.bias"]
        return self.tap(name, self.r(y))

    def layer_norm(self, name: str, x: Array) -> Array:
        y = x - x.mean(-1, keepdims=True)
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(1e-6))
        return self.tap(name, self.r(y))

    def rms_norm(self, name: str, x: Array) -> Array:
        """Of q or k, over the whole width."""
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5))
        return self.tap(name, self.r(y * self.p[f"{name}.scale"]))

    def modulated(self, name: str, x: Array, shift: Array, scale: Array) -> Array:
        return self.tap(name, self.r(self.r(x * self.r(1 + scale)) + shift))

    def modulation(self, name: str, vec: Array) -> list[Array]:
        """Rows of (batch, 1, width)."""
        y = self.linear(f"{name}.lin", self.tap(f"{name}.act", self.r(silu(vec))))
        return np.split(y[:, None], y.shape[-1] // WIDTH, -1)

    def mlp_embedder(self, name: str, x: Array) -> Array:
        x = self.linear(f"{name}.in_layer", x)
        if not (self.bug == "pooled_without_silu" and name == "vector_in"):
            x = self.r(silu(x))
        return self.linear(f"{name}.out_layer", x)

    def timestep_embedding(self, t: float) -> Array:
        if self.bug == "timestep_bfloat16":
            t = float(np.float32(t).astype(ml_dtypes.bfloat16))
        half = WAVE // 2
        angles = np.float32(t) * torch.exp(-math.log(10000) * torch.arange(half) / half).numpy()
        emb = np.concatenate([np.cos(angles), np.sin(angles)])
        return self.tap("timestep_embedding", self.r(np.stack([emb, emb])))

    def rope_table(self) -> tuple[Array, Array]:
        """Cosines and sines of (tokens, half of a head's channels), for the longest sequence."""
        ids = np.zeros((PLACES + T5_TOKENS + 2 * LLAMA_TOKENS, 3))
        where = np.indices((HIGH, WIDE)).reshape(2, -1).T
        first = 0 if self.bug == "rope_rows_on_first_axis" else 1
        ids[: len(where), first : first + 2] = where
        if self.bug == "text_positions_counted":
            ids[PLACES:, 0] = np.arange(len(ids) - PLACES)
        parts: list[Array] = []
        for at, size in enumerate(AXES):
            parts.append(ids[:, at, None] * 10000.0 ** (-np.arange(0, size, 2) / size))
        angles = np.concatenate(parts, -1)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def apply_rope(self, x: Array) -> Array:
        """Turns pairs of neighbouring channels of (batch, tokens, heads, channels)."""
        cos, sin = (y[: x.shape[1], None] for y in self.rope)
        if self.bug == "rope_halves":
            a, b = np.split(x, 2, -1)
            return self.r(np.concatenate([a * cos - b * sin, a * sin + b * cos], -1))
        a, b = x[..., ::2], x[..., 1::2]
        return self.r(np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape))

    def qkv(self, name: str, x: Array, padded: bool) -> list[Array]:
        """Each of (batch, tokens, heads, channels); keys of the image's padding are zeros."""
        q, k, v = np.split(self.linear(f"{name}.qkv", x), 3, -1)
        q = self.rms_norm(f"{name}.norm.query_norm", q)
        k = self.rms_norm(f"{name}.norm.key_norm", k)
        if padded:
            k = k.copy()
            k[:, HIGH * WIDE : PLACES] = 0
        return [y.reshape(*y.shape[:2], HEADS, HEAD) for y in (q, k, v)]

    def attention(self, name: str, q: Array, k: Array, v: Array) -> Array:
        q = self.tap(f"{name}.q", self.apply_rope(q))
        k = self.tap(f"{name}.k", self.apply_rope(k))
        self.tap(f"{name}.v", v)
        scale = np.float32(HEAD**-0.5)
        if self.bug == "attention_scaled_twice":
            q = q * scale
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
        if self.bug == "padding_keys_masked":
            scores[..., HIGH * WIDE : PLACES] = -np.inf
        y = np.einsum("bhqk,bkhd->bqhd", softmax(scores), v)
        return self.tap(f"{name}.attention", self.r(y).reshape(*y.shape[:2], WIDTH))

    def swiglu(self, name: str, x: Array) -> Array:
        gate, up = np.split(self.linear(f"{name}.w13", x), 2, -1)
        h = self.tap(f"{name}.hidden", self.r(self.r(silu(gate)) * up))
        return self.linear(f"{name}.w2", h)

    def moe(self, name: str, x: Array) -> Array:
        """Chosen experts, weighted by their softmax over all experts, and the shared expert."""
        bug, r = self.bug, self.r
        logits = self.linear(f"{name}.router", x)
        scores = r(1 / (1 + np.exp(-logits)) if bug == "router_sigmoid" else softmax(logits))
        self.tap(f"{name}.scores", scores)
        chosen = np.argsort(-scores, axis=-1, kind="stable")[..., :CHOSEN]
        shares = np.zeros_like(scores)
        np.put_along_axis(shares, chosen, np.take_along_axis(scores, chosen, -1), -1)
        if bug == "shares_normalised":
            shares = r(shares / shares.sum(-1, keepdims=True))
        self.tap(f"{name}.shares", shares)
        h = r(np.einsum("bnd,efd->benf", x, self.p[f"{name}.experts.w13"]))
        gate, up = np.split(h, 2, -1)
        y = r(r(silu(gate)) * up)
        y = r(np.einsum("benf,edf->bend", y, self.p[f"{name}.experts.w2"]))
        self.tap(f"{name}.experts", y)
        routed = np.zeros_like(x)
        for e in range(EXPERTS):
            routed = r(routed + r(y[:, e] * shares[..., e, None]))
        self.tap(f"{name}.routed", routed)
        if bug == "shared_expert_missing" and name.startswith("single"):
            return self.tap(name, routed)
        return self.tap(name, r(routed + self.swiglu(f"{name}.shared", x)))

    def double_block(self, i: int, img: Array, txt: Array, vec: Array) -> tuple[Array, Array]:
        name, r = f"double_blocks.{i}", self.r
        m = self.modulation(f"{name}.mod", vec)
        if self.bug == "modulation_by_sublayer":
            m = m[0:3] + m[6:9] + m[3:6] + m[9:12]
        shift, scale, gate, shift_f, scale_f, gate_f = m[:6]
        t_shift, t_scale, t_gate, t_shift_f, t_scale_f, t_gate_f = m[6:]
        h = self.layer_norm(f"{name}.img_norm1", img)
        h = self.modulated(f"{name}.img_modulated1", h, shift, scale)
        g = self.layer_norm(f"{name}.txt_norm1", txt)
        g = self.modulated(f"{name}.txt_modulated1", g, t_shift, t_scale)
        ours, theirs = self.qkv(f"{name}.img_attn", h, True), self.qkv(f"{name}.txt_attn", g, False)
        q, k, v = (np.concatenate(x, 1) for x in zip(ours, theirs, strict=True))
        y = self.attention(name, q, k, v)
        img_y = self.linear(f"{name}.img_attn.proj", y[:, :PLACES])
        txt_y = self.linear(f"{name}.txt_attn.proj", y[:, PLACES:])
        img = self.tap(f"{name}.img_mid", r(r(gate * img_y) + img))
        txt = self.tap(f"{name}.txt_mid", r(r(t_gate * txt_y) + txt))
        h = self.layer_norm(f"{name}.img_norm2", img)
        h = self.modulated(f"{name}.img_modulated2", h, shift_f, scale_f)
        g = self.layer_norm(f"{name}.txt_norm2", txt)
        g = self.modulated(f"{name}.txt_modulated2", g, t_shift_f, t_scale_f)
        img = r(r(gate_f * self.moe(f"{name}.img_moe", h)) + img)
        txt = r(r(t_gate_f * self.swiglu(f"{name}.txt_mlp", g)) + txt)
        return self.tap(f"{name}.img", img), self.tap(f"{name}.txt", txt)

    def single_block(self, i: int, x: Array, vec: Array) -> Array:
        name, r = f"single_blocks.{i}", self.r
        shift, scale, gate, shift_f, scale_f, gate_f = self.modulation(f"{name}.mod", vec)
        h = self.layer_norm(f"{name}.norm1", x)
        h = self.modulated(f"{name}.modulated1", h, shift, scale)
        y = self.attention(name, *self.qkv(f"{name}.attn", h, True))
        x = self.tap(f"{name}.mid", r(r(gate * self.linear(f"{name}.attn.proj", y)) + x))
        h = self.layer_norm(f"{name}.norm2", x)
        h = self.modulated(f"{name}.modulated2", h, shift_f, scale_f)
        y = self.moe(f"{name}.moe", h)
        if not (self.bug == "mlp_gate_missing" and i == 1):
            y = r(gate_f * y)
        return self.tap(name, r(y + x))

    def patchify(self, x: Array) -> Array:
        """(batch, tokens, patch) of (batch, rows, columns, channels), with padding of zeros."""
        x = x.reshape(-1, HIGH, PATCH, WIDE, PATCH, CHANNELS).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(len(x), HIGH * WIDE, -1)
        return self.tap("patches", np.pad(x, ((0, 0), (0, PLACES - HIGH * WIDE), (0, 0))))

    def unpatchify(self, x: Array) -> Array:
        x = x[:, : HIGH * WIDE]
        x = x.reshape(-1, HIGH, WIDE, PATCH, PATCH, CHANNELS).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(len(x), ROWS, COLUMNS, CHANNELS)

    def __call__(self, x: Array, t: float, t5: Array, llama: Array, pooled: Array) -> Array:
        """`llama` has one hidden state for each block."""
        bug = self.bug
        taps.tap("rope_cos", self.rope[0])
        taps.tap("rope_sin", self.rope[1])
        img = self.linear("img_in", self.patchify(x))
        time = self.mlp_embedder("time_in", self.timestep_embedding(t))
        vec = self.tap("vec", self.r(time + self.mlp_embedder("vector_in", pooled)))
        states = [self.linear(f"llama_in.{i}", y) for i, y in enumerate(llama)]
        txt = np.concatenate([self.linear("t5_in", t5), states[-1]], 1)
        tokens = txt.shape[1]
        for i in range(DOUBLE):
            img, txt = self.double_block(i, img, np.concatenate([txt, states[i]], 1), vec)
            txt = txt[:, -tokens:] if bug == "last_text_tokens_kept" else txt[:, :tokens]
        x = np.concatenate([img, txt], 1)
        for i in range(SINGLE):
            x = np.concatenate([x, states[DOUBLE + i]], 1)
            x = self.single_block(i, x, vec)[:, : PLACES + tokens]
        shift, scale = self.modulation("final_layer.mod", vec)
        y = self.layer_norm("final_layer.norm", x[:, :PLACES])
        y = self.modulated("final_layer.modulated", y, shift, scale)
        return self.tap("model", self.unpatchify(self.linear("final_layer.linear", y)))


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Timesteps, and sigmas with the last one, 0."""
    shift = 1.0 if bug == "schedule_not_shifted" else SHIFT
    sigmas = np.linspace(1, 1 / STEPS, STEPS).astype(np.float32)
    sigmas = (shift * sigmas / (1 + (shift - 1) * sigmas)).astype(np.float32)
    return sigmas * np.float32(1000), np.append(sigmas, np.float32(0))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = HiDream(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    r = net.r
    t5 = r(value("pipeline/prompt_embeds_t5")[::-1])  # the prompt is first here
    llama = r(value("pipeline/prompt_embeds_llama3")[:, ::-1])
    off = 1 if bug == "llama_states_off_by_one" else 0
    llama = llama[[k + off for k in LLAMA_LAYERS]]
    pooled = r(value("pipeline/pooled_prompt_embeds")[::-1])
    if bug == "pooled_order_exchanged":
        pooled = np.concatenate([pooled[:, POOLED_L:], pooled[:, :POOLED_L]], 1)
    x = r(value("pipeline/noise").transpose(0, 2, 3, 1))
    times, sigmas = schedule(bug)
    kept = {k: v.astype(dtype) for k, v in net.p.items()} if weights else None
    blocks = ("clip_pooled", "t5", "llama", "noise", "timesteps", "sigmas", "img_in", "vec")
    blocks += ("double_blocks.?.img", "double_blocks.?.txt", "single_blocks.?")
    blocks += ("final_layer.linear", "model", "velocity", "latent")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("timesteps", times, kind="schedule")
        taps.tap("sigmas", sigmas, kind="schedule")
        net.tap("t5", t5, kind="input")
        net.tap("llama", llama, kind="input")
        net.tap("clip_pooled", pooled, kind="input")
        net.tap("noise", x, kind="input")
        for i, t in enumerate(times):
            taps.set_step(i)
            predicted = net(np.concatenate([x, x]), float(t), t5, llama, pooled)
            cond, uncond = np.split(predicted, 2)
            if bug == "guidance_exchanged":
                cond, uncond = uncond, cond
            velocity = -r(uncond + r(GUIDANCE * r(cond - uncond)))
            if bug == "velocity_not_negated":
                velocity = -velocity
            net.tap("velocity", velocity)
            x = net.tap("latent", r(x + (sigmas[i + 1] - sigmas[i]) * velocity))


NO_COUNTERPART: tuple[str, ...] = (
    r"^rope_(cos|sin)$",  # the reference has matrices of both
    r"moe\.(router|scores|shares|experts|routed)$",  # the reference has the chosen experts only
)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
HALF = r"f16|float16|\bhalf\b|fp16|precision|round|\bcast"
SCHEDULE = r"schedule|sigma|timestep"
BUGS = (
    Bug(
        "fused_values_before_keys",
        "Single block 0's fused projection has values before keys.",
        (LOADED, r"values?\b.*keys?\b|keys?\b.*values?\b|fused|qkv"),
        "weights",
    ),
    Bug(
        "experts_have_one_down",
        "In double block 1 each expert has the second matrix of expert 0.",
        (
            LOADED,
            r"dupl|(another|other|same|wrong|first) expert|experts?\b.*(same|index|equal|expert 0)",
        ),
        "weights",
    ),
    Bug(
        "shared_w3_before_w1",
        "Weights of single block 0's shared expert are joined as w3, w1: SiLU has the wrong half.",
        (LOADED, r"w1|w3|\bgate.*\bup\b|\bup\b.*gate|halves|other half|\bchunk"),
        "weights",
    ),
    Bug(
        "text_key_norm_of_image",
        "In double block 0 the norm of the text's keys has the weight of the image's.",
        (LOADED, r"dupl|(another|other|wrong|image'?s?) (norm|stream|param)|same (norm|param)"),
        "weights",
    ),
    Bug(
        "llama_states_off_by_one",
        "Each block has Llama's hidden state of the layer after the right one.",
        (
            r"llama|hidden state|\binputs?\b.*(text|prompt)",
            r"(text|prompt)\w*.*(input|feature|embed)",
            r"off.by.one|(wrong|other|another|next) (layer|state|index)|layer index",
        ),
        "inputs",
    ),
    Bug(
        "pooled_order_exchanged",
        "The pooled embeddings of both CLIP models are concatenated in the wrong order.",
        (
            r"pooled|\bclip",
            r"\binputs?\b.*(order|swap|exchang|permut)",
        ),
        "inputs",
    ),
    Bug(
        "schedule_not_shifted",
        "The schedule is not shifted.",
        (r"\bshift", SCHEDULE),
        "schedule",
    ),
    Bug(
        "timestep_bfloat16",
        "The timestep is rounded to bfloat16 before its sinusoid.",
        (HALF, r"truncat"),
    ),
    Bug(
        "pooled_without_silu",
        "The embedder of the pooled text lacks its SiLU.",
        (r"silu|swish|activation|non.?linear",),
    ),
    Bug(
        "rope_rows_on_first_axis",
        "RoPE has rows and columns on its first two axes, not on the last two.",
        (
            r"\bax[ei]s\b|\brows?\b|column|\bheight",
            r"position|coordinate|\bgrid|\bids\b",
            r"section|share of the (head|channels)",
        ),
    ),
    Bug(
        "rope_halves",
        "RoPE turns pairs of the head's two halves, not pairs of neighbours.",
        (r"interleav|\bpair|halves|half|neighbou?r|adjacent|neox|gpt-?j|even|odd",),
    ),
    Bug(
        "text_positions_counted",
        "Text tokens have positions 0, 1, 2 … on RoPE's first axis; they should be all zero.",
        (r"position|\bids?\b|coordinate|rotated by|arange|text.*(\brope|rotat)|rope.*text",),
    ),
    Bug(
        "padding_keys_masked",
        "Padding of the image is masked out; the reference only makes its keys zero.",
        (
            r"mask|padd",
            r"(all|fewer|more) (keys|tokens)|ignor\w+ (some )?(keys|tokens)",
        ),
    ),
    Bug(
        "attention_scaled_twice",
        "Scores of attention are divided by the root of a head's width twice.",
        (r"\bscal(e|ed|es|ing)\b|\broot\b|sqrt|temperature|softmax factor|twice",),
    ),
    Bug(
        "router_sigmoid",
        "The router has a sigmoid, not a softmax.",
        (
            r"sigmoid|scoring",
            r"(rout|\bgat(e|ing)\b|expert)\w*.*(softmax|activation|function|scor|probabilit)",
            r"(softmax|activation|scor|probabilit)\w*.*(rout|\bgat(e|ing)\b|expert)",
        ),
    ),
    Bug(
        "shares_normalised",
        "Weights of the chosen experts are divided by their sum.",
        (
            r"normali[sz]\w*.*(expert|rout|top.?k|\bgat|weights?\b|shares?\b)",
            r"(expert|rout|top.?k|\bgat|weights?\b|shares?\b).*normali[sz]",
            r"\bsums? to (1|one)|divided by their sum",
        ),
    ),
    Bug(
        "shared_expert_missing",
        "Single blocks lack the shared expert.",
        (
            r"shared",
            r"expert.*(miss|lack|left out|not added|drop|absent|omit|skip)",
        ),
    ),
    Bug(
        "modulation_by_sublayer",
        "A double block's modulation is read as attention of both streams, then MLP of both.",
        (r"chunk|split|modulat|adaln",),
    ),
    Bug(
        "last_text_tokens_kept",
        "After a double block the last text tokens are kept, not the first.",
        (
            r"slic|(first|last|other|wrong) (\d+ )?(\w+ )?tokens|\btail\b|\bcut",
            r"tokens?.*(kept|keeps|order|from the (end|start))|offset|truncat",
        ),
    ),
    Bug(
        "mlp_gate_missing",
        "Single block 1 adds its experts without the gate.",
        (
            r"\b(un)?gat(e|es|ed|ing)\b|modulat",
            r"factor|multipl|\bscal(e|ed|ing)\b",
        ),
    ),
    Bug(
        "guidance_exchanged",
        "The prediction with the prompt and the one without it are exchanged in the guidance.",
        (r"guid|\bcfg\b|uncond|negative|classifier.free",),
    ),
    Bug(
        "velocity_not_negated",
        "The network's result is not negated before the step.",
        (r"\bsign\b|negat|opposite|minus|-1\b|invert",),
    ),
)
