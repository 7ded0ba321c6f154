"""Kandinsky 5's image-to-video transformer in NumPy, as an engine for inference would have it.

There is no batch axis; the projections of self-attention are one matrix, and so are the keys and
values of cross-attention. RoPE multiplies complex numbers. diffusers'
Kandinsky5Transformer3DModel is the reference. Each step calls the network with the prompt, then
with the negative prompt, and ends with an Euler step of flow matching for all frames but the
first, which is the given image.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, Kandinsky5Transformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_kandinsky import (
    Kandinsky5Attention,
    Kandinsky5AttnProcessor,
)

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
)
from lydite.trace import taps
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "kandinsky5"
AXES = (4, 6, 6)  # channels of a head for frames, rows, columns
HEADS, HEAD, FFN, TIME, TEXT, CLIP = 2, sum(AXES), 56, 28, 20, 12
WIDTH, CHANNELS, PATCH = HEADS * HEAD, 4, 2
TEXT_LAYERS, LAYERS = 2, 3
FRAMES, ROWS, COLUMNS = 3, 8, 6
HIGH, WIDE = ROWS // PATCH, COLUMNS // PATCH
PLACES = FRAMES * HIGH * WIDE
STEPS, SHIFT, GUIDANCE = 3, 5.0, 4.0
ROPE_SCALE = (1.0, 2.0, 2.0)  # of frames, rows, columns
TOKENS = (8, 6)  # of the prompt and of the negative prompt
EPS_LAYER, EPS_RMS = 1e-5, float(np.finfo(np.float32).eps)


class FloatRotary(Kandinsky5AttnProcessor):
    """The model's own processor, but q and k stay in the run's precision after RoPE.

    The original rounds them to bfloat16 in each precision.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        rotary_emb: Any = None,
        sparse_params: Any = None,
    ) -> Any:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = attn.to_query(hidden_states), attn.to_key(source), attn.to_value(source)
        query, key, value = (x.unflatten(-1, (attn.num_heads, -1)) for x in (query, key, value))
        query = attn.query_norm(query.float()).type_as(query)
        key = attn.key_norm(key.float()).type_as(key)
        if rotary_emb is not None:
            query, key = rotated(query, rotary_emb), rotated(key, rotary_emb)
        out = dispatch_attention_fn(query, key, value)
        return attn.out_layer(out.flatten(-2, -1))


def rotated(x: Any, rope: Any) -> Any:
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2).float()
    return (rope * pairs).sum(-1).reshape(x.shape).type_as(x)


def reference(folder: Path, dtype: str) -> None:
    """The loop of Kandinsky5I2VPipeline for one video, from embeddings to latents."""
    config: dict[str, Any] = dict(in_visual_dim=CHANNELS, out_visual_dim=CHANNELS, in_text_dim=TEXT)
    config |= dict(in_text_dim2=CLIP, time_dim=TIME, patch_size=(1, PATCH, PATCH), model_dim=WIDTH)
    config |= dict(ff_dim=FFN, num_text_blocks=TEXT_LAYERS, num_visual_blocks=LAYERS)
    config |= dict(axes_dims=AXES, visual_cond=True)
    model = randomised(lambda: Kandinsky5Transformer3DModel(**config), 91)
    for name, parameter in model.named_parameters():
        if "modulation" in name:
            parameter.mul_(4)  # each gate matters
        if name.endswith(("query_norm.weight", "key_norm.weight")):
            parameter.mul_(1.2 + noise(len(name), HEAD) / 3)
    path = folder / "model" / "transformer"
    if not path.exists():
        model.save_pretrained(path)
    model = Kandinsky5Transformer3DModel.from_pretrained(
        path, torch_dtype=getattr(torch, dtype)
    )  # keeps the embedding of the time and the modulations in float32
    model.eval().requires_grad_(False)
    for layer in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        layer.register_forward_pre_hook(lambda m, inputs: (inputs[0].to(m.weight.dtype),))
    for module in model.modules():
        if isinstance(module, Kandinsky5Attention):
            processor: Any = FloatRotary()
            module.set_processor(processor)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        scheduler.set_timesteps(sigmas=np.linspace(1, 0, STEPS + 1)[:-1].tolist())
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        texts = [noise(11 + i, 1, n, TEXT).to(model.dtype) for i, n in enumerate(TOKENS)]
        clips = [noise(13 + i, 1, CLIP).to(model.dtype) for i in range(2)]
        image = noise(15, 1, 1, ROWS, COLUMNS, CHANNELS).to(model.dtype)
        latents = noise(16, 1, FRAMES, ROWS, COLUMNS, CHANNELS).to(model.dtype)
        for prefix, text, clip in zip(("", "negative_"), texts, clips, strict=True):
            recorder.record(f"pipeline/{prefix}prompt_embeds_qwen", text, kind="input")
            recorder.record(f"pipeline/{prefix}prompt_embeds_clip", clip, kind="input")
        recorder.record("pipeline/image_latents", image, kind="input")
        recorder.record("pipeline/noise", latents, kind="input")
        latents[:, :1] = image
        cond, mask = torch.zeros_like(latents), torch.zeros_like(latents[..., :1])
        cond[:, :1], mask[:, :1] = image, 1
        places = [torch.arange(n) for n in (FRAMES, HIGH, WIDE)]
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            results = [
                model(
                    hidden_states=torch.cat([latents, cond, mask], -1),
                    encoder_hidden_states=text,
                    timestep=t.expand(1).to(model.dtype),
                    pooled_projections=clip,
                    visual_rope_pos=places,
                    text_rope_pos=torch.arange(text.shape[1]),
                    scale_factor=ROPE_SCALE,
                    return_dict=False,
                )
                for text, clip in zip(texts, clips, strict=True)
            ]
            velocity = results[1] + GUIDANCE * (results[0] - results[1])
            recorder.record("pipeline/pred_velocity", velocity)
            moved = scheduler.step(velocity[:, 1:], t, latents[:, 1:], return_dict=False)[0]
            latents = torch.cat([latents[:, :1], moved], 1)
            recorder.record("pipeline/latents", latents)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the names of the engine; matrices stay (out, in)."""
    new: dict[str, Array] = {}

    def put(name: str, *old: str) -> None:
        """One parameter of several that the reference keeps apart."""
        for end in ("weight", "bias"):
            parts = [w[f"{x}.{end}"] for x in old if f"{x}.{end}" in w]
            if parts:
                new[f"{name}.{end}"] = np.concatenate(parts)

    put("time_in.fc1", "time_embeddings.in_layer")
    put("time_in.fc2", "time_embeddings.out_layer")
    for name, old in (("txt_in", "text_embeddings"), ("clip_in", "pooled_text_embeddings")):
        put(f"{name}.proj", f"{old}.in_layer")
        put(f"{name}.norm", f"{old}.norm")
    put("img_in.proj", "visual_embeddings.in_layer")
    for kind, short, count in (("text", "txt", TEXT_LAYERS), ("visual", "img", LAYERS)):
        for i in range(count):
            old, name = f"{kind}_transformer_blocks.{i}", f"{short}.{i}"
            put(f"{name}.mod", f"{old}.{kind}_modulation.out_layer")
            attention = f"{old}.self_attention"
            order = ("query", "key", "value")
            if bug == "qkv_in_another_order" and name == "img.1":
                order = ("query", "value", "key")
            put(f"{name}.attn.qkv", *(f"{attention}.to_{x}" for x in order))
            put(f"{name}.attn.q_norm", f"{attention}.query_norm")
            put(f"{name}.attn.k_norm", f"{attention}.key_norm")
            put(f"{name}.attn.proj", f"{attention}.out_layer")
            if kind == "visual":
                cross = f"{old}.cross_attention"
                put(f"{name}.cross.q", f"{cross}.to_query")
                put(f"{name}.cross.kv", f"{cross}.to_key", f"{cross}.to_value")
                put(f"{name}.cross.q_norm", f"{cross}.query_norm")
                put(f"{name}.cross.k_norm", f"{cross}.key_norm")
                put(f"{name}.cross.proj", f"{cross}.out_layer")
            put(f"{name}.ffn.up", f"{old}.feed_forward.in_layer")
            put(f"{name}.ffn.down", f"{old}.feed_forward.out_layer")
    put("final.mod", "out_layer.modulation.out_layer")
    put("final.proj", "out_layer.out_layer")
    if bug == "cross_key_norm_of_self":
        new["img.0.cross.k_norm.weight"] = new["img.0.attn.k_norm.weight"]
    if bug == "final_modulation_bias_missing":
        new["final.mod.bias"] = np.zeros_like(new["final.mod.bias"])
    return new


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    erf = np.vectorize(math.erf, otypes=[np.float32])(x / np.float32(math.sqrt(2)))
    return np.float32(0.5) * x * (1 + erf)


def gelu_sigmoid(x: Array) -> Array:
    return x / (1 + np.exp(np.float32(-1.702) * x))


def frequencies(count: int, divisor: int) -> Array:
    """From 1 down to almost 1 / 10000, in float32 as torch computes them."""
    exponents = np.float32(-math.log(10000)) * np.arange(count, dtype=np.float32)
    return np.exp((exponents / np.float32(divisor)).astype(np.float64)).astype(np.float32)


class Kandinsky:
    """The forward pass; `r` rounds to the precision of the run, time and modulations keep all."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: v if wide(k) else self.r(v) for k, v in p.items()}
        self.img_rope = self.rope_3d()

    def tap(self, name: str, x: Array, slot: str = "out", kind: str = "activation") -> Array:
        """`x` is rounded already."""
        taps.tap(name, x.astype(self.dtype), slot=slot, kind=kind)
        return x

    def tap32(self, name: str, x: Array) -> Array:
        """Of a value that keeps float32 in each precision."""
        taps.tap(name, x)
        return x

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.weight"].T
        if f"{name}.bias" in self.p:
            y = y + self.p[f"{name}.bias"]
        return self.tap32(name, y) if wide(name) else self.tap(name, self.r(y))

    def layer_norm(self, x: Array) -> Array:
        y = x - x.mean(-1, keepdims=True)
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(EPS_LAYER))

    def norm_weighted(self, name: str, x: Array) -> Array:
        y = self.layer_norm(x) * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]
        return self.tap(name, self.r(y))

    def rms_norm(self, name: str, x: Array) -> Array:
        """Of q or k, (tokens, heads, channels), over the channels of each head."""
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(EPS_RMS))
        return self.tap(name, self.r(y * self.p[f"{name}.weight"]))

    def modulate(self, name: str, x: Array, shift: Array, scale: Array) -> Array:
        y = self.tap32(name, self.layer_norm(x))
        cross = name.startswith("img") and name.endswith("norm2")
        one = 0 if self.bug == "scale_without_one" and cross else 1
        return self.tap(f"{name}.modulated", self.r(y * (one + scale) + shift))

    def time(self, t: Array, clip: Array) -> Array:
        less = 1 if self.bug == "time_frequencies_of_half_minus_one" else 0
        angles = t * frequencies(WIDTH // 2, WIDTH // 2 - less)
        x = self.tap32("time_in.sinusoid", np.concatenate([np.cos(angles), np.sin(angles)]))
        x = self.linear("time_in.fc1", x)
        x = self.linear("time_in.fc2", self.tap32("time_in.act", silu(x)))
        y = self.norm_weighted("clip_in.norm", self.linear("clip_in.proj", clip))
        return self.tap32("vec", x + y)

    def modulation(self, name: str, vec: Array, rows: int) -> Array:
        skipped = self.bug == "text_modulation_without_silu" and name.startswith("txt")
        return self.linear(f"{name}.mod", vec if skipped else silu(vec)).reshape(rows, WIDTH)

    def rope_1d(self, count: int) -> Array:
        return np.outer(np.arange(count, dtype=np.float32), frequencies(HEAD // 2, HEAD // 2))

    def rope_3d(self) -> Array:
        """Angles of (tokens, half of a head's channels): frames, rows, columns."""
        grid = np.indices((FRAMES, HIGH, WIDE)).reshape(3, -1).astype(np.float32)
        parts: list[Array] = []
        for where, width, scale in zip(grid, AXES, ROPE_SCALE, strict=True):
            angles = np.outer(where, frequencies(width // 2, width // 2))
            if self.bug != "rope_without_scale":
                angles = angles / np.float32(scale)
            parts.append(angles)
        return np.concatenate(parts, -1)

    def rotate(self, x: Array, angles: Array) -> Array:
        """Turns pairs of neighbouring channels of (tokens, heads, channels)."""
        turn = (np.cos(angles) + 1j * np.sin(angles)).astype(np.complex64)[:, None]
        if self.bug == "rope_pairs_of_halves":
            a, b = np.split(x, 2, -1)
            y = (a + 1j * b).astype(np.complex64) * turn
            return self.r(np.concatenate([y.real, y.imag], -1))
        y = np.ascontiguousarray(x).view(np.complex64) * turn
        return self.r(y.view(np.float32))

    def attend(self, name: str, q: Array, k: Array, v: Array) -> Array:
        """Of (tokens, heads, channels)."""
        scores = np.einsum("qhd,khd->hqk", q, k) * np.float32(HEAD**-0.5)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y = self.r(np.einsum("hqk,khd->hqd", e / e.sum(-1, keepdims=True), v))
        if self.bug != "heads_joined_without_transpose":
            y = y.transpose(1, 0, 2)
        y = self.tap(f"{name}.attention", y.reshape(-1, WIDTH))
        return self.linear(f"{name}.proj", y)

    def heads(self, x: Array) -> Array:
        return x.reshape(-1, HEADS, HEAD)

    def self_attention(self, name: str, x: Array, angles: Array) -> Array:
        qkv = self.r(x @ self.p[f"{name}.qkv.weight"].T + self.p[f"{name}.qkv.bias"])
        q, k, v = np.split(qkv, 3, -1)
        for part, y in zip("qkv", (q, k, v), strict=True):
            self.tap(f"{name}.{part}", y)
        q, k, v = (self.heads(y) for y in (q, k, v))
        if self.bug == "query_norm_after_rope":
            q = self.rms_norm(f"{name}.q_norm", self.rotate(q, angles))
        else:
            q = self.rotate(self.rms_norm(f"{name}.q_norm", q), angles)
        k = self.rms_norm(f"{name}.k_norm", k)
        if not (self.bug == "text_keys_not_rotated" and name.startswith("txt")):
            k = self.rotate(k, angles)
        q, k = self.tap(f"{name}.q_rope", q), self.tap(f"{name}.k_rope", k)
        return self.attend(name, q, k, v)

    def cross_attention(self, name: str, x: Array, text: Array) -> Array:
        q = self.rms_norm(f"{name}.q_norm", self.heads(self.linear(f"{name}.q", x)))
        kv = self.r(text @ self.p[f"{name}.kv.weight"].T + self.p[f"{name}.kv.bias"])
        k, v = np.split(kv, 2, -1)
        self.tap(f"{name}.k", k)
        self.tap(f"{name}.v", v)
        k = self.rms_norm(f"{name}.k_norm", self.heads(k))
        return self.attend(name, q, k, self.heads(v))

    def ffn(self, name: str, x: Array) -> Array:
        act = gelu_sigmoid if self.bug == "gelu_by_sigmoid" else gelu
        x = self.tap(f"{name}.act", self.r(act(self.linear(f"{name}.up", x))))
        return self.linear(f"{name}.down", x)

    def text_block(self, i: int, x: Array, vec: Array, angles: Array) -> Array:
        name = f"txt.{i}"
        shift, scale, gate, shift_f, scale_f, gate_f = self.modulation(name, vec, 6)
        h = self.modulate(f"{name}.norm1", x, shift, scale)
        x = self.r(x + gate * self.self_attention(f"{name}.attn", h, angles))
        h = self.modulate(f"{name}.norm2", x, shift_f, scale_f)
        return self.tap(name, self.r(x + gate_f * self.ffn(f"{name}.ffn", h)))

    def image_block(self, i: int, x: Array, text: Array, vec: Array) -> Array:
        name = f"img.{i}"
        mod_a, mod_c, mod_f = self.modulation(name, vec, 9).reshape(3, 3, WIDTH)
        if self.bug == "cross_and_ffn_modulation_exchanged":
            mod_c, mod_f = mod_f, mod_c
        h = self.modulate(f"{name}.norm1", x, mod_a[0], mod_a[1])
        x = self.r(x + mod_a[2] * self.self_attention(f"{name}.attn", h, self.img_rope))
        h = self.modulate(f"{name}.norm2", x, mod_c[0], mod_c[1])
        y = self.cross_attention(f"{name}.cross", h, text)
        x = self.r(x + mod_c[2] * y)
        h = self.modulate(f"{name}.norm3", x, mod_f[0], mod_f[1])
        return self.tap(name, self.r(x + mod_f[2] * self.ffn(f"{name}.ffn", h)))

    def patchify(self, x: Array) -> Array:
        """(tokens, patch) of (frames, rows, columns, channels)."""
        x = x.reshape(FRAMES, HIGH, PATCH, WIDE, PATCH, -1)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(PLACES, -1)

    def unpatchify(self, x: Array) -> Array:
        """Channels are first in a patch of the result, though last in a patch of the input."""
        if self.bug == "unpatchify_channels_last":
            x = x.reshape(FRAMES, HIGH, WIDE, PATCH, PATCH, CHANNELS).transpose(0, 1, 3, 2, 4, 5)
        else:
            x = x.reshape(FRAMES, HIGH, WIDE, CHANNELS, PATCH, PATCH).transpose(0, 1, 4, 2, 5, 3)
        return x.reshape(FRAMES, ROWS, COLUMNS, CHANNELS)

    def __call__(self, x: Array, t: Array, text: Array, clip: Array) -> Array:
        taps.tap("img_rope_angles", self.img_rope)
        text = self.norm_weighted("txt_in.norm", self.linear("txt_in.proj", text))
        embedded = text
        vec = self.time(t, clip)
        angles = self.rope_1d(len(text))
        for i in range(TEXT_LAYERS):
            text = self.text_block(i, text, vec, angles)
        context = embedded if self.bug == "context_before_text_blocks" else text
        x = self.linear("img_in.proj", self.patchify(x))
        for i in range(LAYERS):
            x = self.image_block(i, x, context, vec)
        shift, scale = self.modulation("final", vec, 2)
        x = self.modulate("final.norm", x, shift, scale)
        return self.tap("model", self.unpatchify(self.linear("final.proj", x)))


def wide(name: str) -> bool:
    """Whether a layer keeps float32: those of the time and the modulations."""
    return name.startswith("time_in") or ".mod" in name


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Timesteps, and sigmas with the last one, 0."""
    sigmas = np.linspace(1, 0, STEPS + 1).astype(np.float32)
    if bug != "schedule_not_shifted":
        sigmas = (SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)).astype(np.float32)
    return sigmas[:-1] * np.float32(1000), sigmas


def conditioned(x: Array, image: Array, bug: str | None) -> Array:
    """The network's input: latents, the image in the first frame, and where an image is given."""
    cond, mask = np.zeros_like(x), np.zeros_like(x[..., :1])
    cond[0], mask[0] = image, 1
    parts = (x, mask, cond) if bug == "mask_before_image" else (x, cond, mask)
    return np.concatenate(parts, -1)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Kandinsky(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    r = net.r
    prompt, negative = (r(value(f"pipeline/{x}prompt_embeds_qwen")[0]) for x in ("", "negative_"))
    clip, clip_n = (r(value(f"pipeline/{x}prompt_embeds_clip")[0]) for x in ("", "negative_"))
    image, x = r(value("pipeline/image_latents")[0, 0]), r(value("pipeline/noise")[0])
    if bug == "negative_padded_without_mask":
        negative = np.pad(negative, ((0, TOKENS[0] - TOKENS[1]), (0, 0)))
    times, sigmas = schedule(bug)
    kept = {k: v.astype("float32" if wide(k) else dtype) for k, v in net.p.items()}
    blocks = ("prompt*", "clip*", "negative*", "noise", "image", "timesteps", "sigmas")
    blocks += ("img_in.proj", "vec", "txt.?", "img.?", "final.proj", "model", "velocity", "latent")
    with port_trace(out, dump, dtype, blocks, kept if weights else None):
        taps.tap("timesteps", times, kind="schedule")
        taps.tap("sigmas", sigmas, kind="schedule")
        net.tap("prompt", prompt, kind="input")
        net.tap("clip", clip, kind="input")
        net.tap("negative", negative, kind="input")
        net.tap("clip_negative", clip_n, kind="input")
        net.tap("image", image, kind="input")
        net.tap("noise", x, kind="input")
        x[0] = image
        for i, t in enumerate(times):
            taps.set_step(i)
            full = net.tap("img_in", conditioned(x, image, bug), slot="in.0")
            t = r(sigmas[i] if bug == "time_below_one" else t)
            cond = net(full, t, prompt, clip)
            uncond = net(full, t, negative, clip if bug == "clip_of_prompt_in_both" else clip_n)
            if bug == "guidance_pair_exchanged":
                cond, uncond = uncond, cond
            velocity = net.tap("velocity", r(uncond + r(GUIDANCE * r(cond - uncond))))
            moved = r(x + (sigmas[i + 1] - sigmas[i]) * velocity)
            if bug != "first_frame_moves":
                moved[0] = image
            x = net.tap("latent", moved)


NO_COUNTERPART: tuple[str, ...] = (
    r"^img_rope_angles$",  # the reference has a matrix of each angle
)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos|interchang|mixed up"
SCHEDULE = r"schedule|sigma|timestep"
BUGS = (
    Bug(
        "qkv_in_another_order",
        "Block 1's matrix of self-attention has queries, values, keys; it is read as q, k, v.",
        (LOADED, SWAPPED, r"values?\b.*keys?\b|keys?\b.*values?\b"),
        "weights",
    ),
    Bug(
        "cross_key_norm_of_self",
        "Block 0's cross-attention has the weight of self-attention's norm of keys.",
        (
            LOADED,
            r"dupl|another|other norm|same (norm|param)",
            r"key_norm|k_norm|norm of (the )?keys",
        ),
        "weights",
    ),
    Bug(
        "final_modulation_bias_missing",
        "The bias of the last layer's modulation is zeros.",
        (LOADED, r"\bbias|zero"),
        "weights",
    ),
    Bug(
        "mask_before_image",
        "The network's input has the mask before the image's latents, not after them.",
        (r"channels?\b.*(order|swap|exchang|permut|concat)", SWAPPED, r"concat|\bmask\b|condition"),
        "inputs",
    ),
    Bug(
        "clip_of_prompt_in_both",
        "The pass of the negative prompt has the pooled CLIP embedding of the prompt.",
        (r"pooled|\bclip\b|negative|\buncond",),
        "inputs",
    ),
    Bug(
        "negative_padded_without_mask",
        "The negative prompt is filled with zeros up to the prompt's length, and no mask is used.",
        (
            r"\bpad|mask|\blengths?\b|zeros?\b.*tokens?|tokens?\b.*zeros?",
            r"(more|extra|additional|number of|fewer) (tokens|keys|rows)|shape|negative",
        ),
        "inputs",
    ),
    Bug(
        "schedule_not_shifted",
        "The schedule's sigmas are even: the shift is left out.",
        (r"\bshift|unshifted", SCHEDULE),
        "schedule",
    ),
    Bug(
        "time_below_one",
        "The network is given sigma as its time, not 1000 times sigma.",
        (
            r"1000|1e3|thousand|\bunits?\b",
            r"(sigma|time).*(scal(e|ed|ing)\b|factor|multipl)",
            r"(scal(e|ed|ing)\b|factor|multipl).*(sigma|time)",
        ),
        "schedule",
    ),
    Bug(
        "time_frequencies_of_half_minus_one",
        "The exponents of the time's frequencies divide by half - 1, not by half.",
        (
            r"frequenc|exponent|theta|\bbase\b|wavelength|\bperiod",
            r"divi(de|sor)|denominator|off.by.one|downscale|half\s*-\s*1|minus one",
        ),
    ),
    Bug(
        "text_modulation_without_silu",
        "The modulations of the text's blocks are of the time itself, without SiLU.",
        (r"silu|swish|activation|nonlinear",),
    ),
    Bug(
        "scale_without_one",
        "The modulation before cross-attention multiplies by scale, not by 1 + scale.",
        (
            r"1 ?\+|\+ ?1\b|plus (one|1)|(add(s|ing)?|without|missing|lacks) (the )?(one|1)\b",
            r"\bscal(e|ed|ing)\b|modulat",
        ),
    ),
    Bug(
        "cross_and_ffn_modulation_exchanged",
        "Cross-attention has the MLP's three rows of the modulation, and the MLP those of it.",
        (r"modulat|shift|scale|\bgate|chunk|split", SWAPPED),
    ),
    Bug(
        "rope_without_scale",
        "RoPE does not divide the angles of rows and columns by the scale factor, 2.",
        (
            r"\bscal(e|ed|ing)\b|factor|divi(de|sor)|multipl|twice|\bhalf\b|interpolat",
            r"(position|coordinate|\bgrid|angle|frequenc)\w*.*(larger|smaller|stretch)",
        ),
    ),
    Bug(
        "rope_pairs_of_halves",
        "RoPE turns channel i with channel i + half, not neighbouring channels.",
        (r"interleav|neighbou?r|adjacent|\bpair|halves|rotate.?half|half.?split|even.*odd",),
    ),
    Bug(
        "query_norm_after_rope",
        "Queries are normed after RoPE, not before it.",
        (
            SWAPPED,
            r"\bnorm.*(before|after)|(before|after).*\bnorm",
            r"(before|after).*(rope|rotat)|(rope|rotat).*(before|after)",
        ),
    ),
    Bug(
        "text_keys_not_rotated",
        "Keys of the text's blocks are not rotated; queries are.",
        (r"\brope\b|rotat|rotary|position",),
    ),
    Bug(
        "heads_joined_without_transpose",
        "Attention's result is joined as (heads, tokens, channels), not transposed before.",
        (
            r"\bheads?\b.*(ax[ei]s|merg|join|layout|reshap|flatten)",
            SWAPPED,
            r"layout|\bax[ei]s\b|reshap|flatten",
        ),
    ),
    Bug(
        "gelu_by_sigmoid",
        "GELU is x * sigmoid(1.702 x), not the exact one.",
        (r"gelu|\berf\b|sigmoid|activation|approximat",),
    ),
    Bug(
        "context_before_text_blocks",
        "Cross-attention reads the text as it was before the text's blocks.",
        (
            r"(text|context|prompt|encoder|cross).*(before|skip|unrefined|earlier|raw\b|embedding)",
            r"(another|other|wrong|stale|earlier|different) (value|tensor|input|text|context)",
            r"\bskip|bypass|not applied|left out",
        ),
    ),
    Bug(
        "unpatchify_channels_last",
        "The result's patches are read as (rows, columns, channels).",
        (r"channel|patch|layout|\bax[ei]s\b|reshap", SWAPPED),
    ),
    Bug(
        "guidance_pair_exchanged",
        "Guidance takes the prompt's prediction for that without it, and the other way round.",
        (r"guid|\bcfg\b", r"\buncond|negative", SWAPPED),
    ),
    Bug(
        "first_frame_moves",
        "The Euler step changes the first frame too, which is the given image.",
        (
            r"first (frame|rows?)|frame 0|\bimage\b|given frame",
            r"mask|only (a )?part|some (places|frames)|region|kept (fixed|clean)",
        ),
    ),
)
