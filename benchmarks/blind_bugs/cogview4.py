"""CogView4's transformer (Zhipu AI, 2025; diffusers' CogView4Transformer2DModel) in MLX.

With the sampling loop of its pipeline: flow matching whose sigmas are shifted by the number of
tokens while the timesteps are not, and classifier-free guidance with both prompts in one batch.
Latents are NHWC, weights are (in, out), q, k and v are one product, patches are in the order
(row, column, channel). As in the reference, text tokens precede image tokens.
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
from diffusers import CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler

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
from lydite.trace.function_capture import watch_function
from lydite.trace.taps import set_step, tap
from lydite.trace.torch_capture import record_modules

mx.set_default_device(mx.cpu)

NAME = "cogview4"
HEADS, HEAD, LAYERS = 2, 16, 3
WIDTH, TEXT, COND, SIZES = HEADS * HEAD, 20, 24, 16
CHANNELS, PATCH, ROWS, COLUMNS, N_TEXT = 4, 2, 4, 6, 5
N_IMAGE, ROPE_AXES = ROWS * COLUMNS, (12, 16)
STEPS, GUIDANCE = 3, 3.5
BASE_TOKENS, BASE_SHIFT, MAX_SHIFT = 256, 0.25, 0.75
ORIGINAL, TARGET, CROP = (80, 112), (64, 96), (4, 12)


def reference(folder: Path, dtype: str) -> None:
    """Three steps with guidance; sizes and timesteps are float32 in each precision."""
    config: dict[str, Any] = dict(patch_size=PATCH, in_channels=CHANNELS, out_channels=CHANNELS)
    config |= dict(num_layers=LAYERS, attention_head_dim=HEAD, num_attention_heads=HEADS)
    config |= dict(text_embed_dim=TEXT, time_embed_dim=COND, condition_dim=SIZES)
    config |= dict(rope_axes_dim=ROPE_AXES)
    model = randomised(lambda: CogView4Transformer2DModel(**config), 141)
    for name, parameter in model.named_parameters():
        if "norm1" in name or "embedder" in name:
            parameter.mul_(1.8)  # larger gates: each block matters
        if "patch_embed" in name:
            parameter.mul_(0.3)
    model = saved(model, folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=BASE_SHIFT,
        max_shift=MAX_SHIFT,
        base_image_seq_len=BASE_TOKENS,
        time_shift_type="linear",
    )
    timesteps = np.linspace(1000, 1, STEPS).astype(np.int64).astype(np.float32)
    mu = MAX_SHIFT * math.sqrt(N_IMAGE / BASE_TOKENS) + BASE_SHIFT
    scheduler.set_timesteps(timesteps=timesteps, sigmas=timesteps / 1000, mu=mu)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        embeds = noise(2, 2, N_TEXT, TEXT).to(model.dtype)  # the negative prompt, the prompt
        x = noise(1, 1, CHANNELS, ROWS * PATCH, COLUMNS * PATCH)
        sizes = [torch.tensor([size], dtype=torch.float32) for size in (ORIGINAL, TARGET, CROP)]
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/prompt_embeds", embeds, kind="input")
        names = ("original_size", "target_size", "crop_coords")
        for name, size in zip(names, sizes, strict=True):
            recorder.record(f"pipeline/{name}", size, kind="input")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        for recorder.step in range(STEPS):
            t = scheduler.timesteps[recorder.step]
            both = model(
                torch.cat([x.to(model.dtype)] * 2),
                embeds,
                t.expand(2),
                *(size.repeat(2, 1) for size in sizes),
            ).sample
            negative, positive = both.chunk(2)
            guided = negative + GUIDANCE * (positive - negative)
            recorder.record("pipeline/guided", guided)
            x = scheduler.step(guided, t, x, return_dict=False)[0]
            recorder.record("pipeline/latents", x)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: weights as (in, out), patches channels last, q, k, v joined."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        new[f"{name}.w"] = np.concatenate([w[f"{p}.weight"] for p in parts]).T.copy()
        new[f"{name}.b"] = np.concatenate([w[f"{p}.bias"] for p in parts])

    put("patch", "patch_embed.proj")
    if bug != "patch_weight_order":
        rows = new["patch.w"].reshape(CHANNELS, PATCH, PATCH, WIDTH)
        new["patch.w"] = rows.transpose(1, 2, 0, 3).reshape(-1, WIDTH).copy()
    put("prompt", "patch_embed.text_proj")
    for own, old in (("time", "timestep_embedder"), ("size", "condition_embedder")):
        for i in (1, 2):
            put(f"cond.{own}.fc{i}", f"time_condition_embed.{old}.linear_{i}")
    for i in range(LAYERS):
        old, name = f"transformer_blocks.{i}", f"layers.{i}"
        put(f"{name}.adaln", f"{old}.norm1.linear")
        put(f"{name}.qkv", *(f"{old}.attn1.to_{x}" for x in "qkv"))
        put(f"{name}.attn_out", f"{old}.attn1.to_out.0")
        put(f"{name}.mlp.fc1", f"{old}.ff.net.0.proj")
        source = "transformer_blocks.1" if bug == "fc2_of_previous_layer" and i == 2 else old
        put(f"{name}.mlp.fc2", f"{source}.ff.net.2")
    if bug == "qkv_by_heads":
        for end in "wb":
            x = new[f"layers.1.qkv.{end}"]
            x = x.reshape(-1, 3, HEADS, HEAD).swapaxes(1, 2)
            new[f"layers.1.qkv.{end}"] = x.reshape(new[f"layers.1.qkv.{end}"].shape).copy()
    put("out_norm.lin", "norm_out.linear")
    put("head", "proj_out")
    new["head.w"] = _channels_last(new["head.w"])
    new["head.b"] = _channels_last(new["head.b"])
    return new


def _channels_last(x: Array) -> Array:
    """Output channels (channel, row, column) as (row, column, channel)."""
    y = np.moveaxis(x.reshape(-1, CHANNELS, PATCH, PATCH), 1, -1)
    return np.ascontiguousarray(y.reshape(x.shape))


class Transformer:
    """The forward pass of both prompts, in the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.bug, self.dtype = bug, getattr(mx, dtype)
        self.p = {k: mx.array(v).astype(self.dtype) for k, v in p.items()}

    def lin(self, name: str, x: mx.array) -> mx.array:
        return tap(name, x @ self.p[f"{name}.w"] + self.p[f"{name}.b"])

    def ln(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, None, None, 1e-6 if self.bug == "ln_eps" else 1e-5)

    def sinusoids(self, x: mx.array, channels: int) -> mx.array:
        """Cosines, then sines, of each number."""
        half = channels // 2
        exponents = -math.log(10000) * np.arange(half, dtype=np.float32) / half
        freqs = np.exp(exponents.astype(np.float64)).astype(np.float32)
        angles = x[..., None] * mx.array(freqs)
        return mx.concatenate([mx.cos(angles), mx.sin(angles)], -1)

    def cond(self, t: mx.array, sizes: tuple[mx.array, ...]) -> mx.array:
        """Of the timestep, and of original size, crop and target size, in this order."""
        x = tap("cond.time.sin", self.sinusoids(t, WIDTH)).astype(self.dtype)
        time = self.lin("cond.time.fc2", nn.silu(self.lin("cond.time.fc1", x)))
        original, target, crop = sizes
        order = (original, crop, target)
        if self.bug == "size_order":
            order = (original, target, crop)
        parts = [self.sinusoids(s, SIZES).reshape(len(s), -1) for s in order]
        x = tap("cond.size.sin", mx.concatenate(parts, -1).astype(self.dtype))
        size = self.lin("cond.size.fc2", nn.silu(self.lin("cond.size.fc1", x)))
        x = nn.silu(tap("cond.sum", time + size))
        if self.bug == "cond_bfloat16":
            x = x.astype(mx.bfloat16).astype(self.dtype)
        return tap("cond", x)

    def patches(self, x: mx.array) -> mx.array:
        x = x.reshape(len(x), ROWS, PATCH, COLUMNS, PATCH, CHANNELS)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(len(x), N_IMAGE, -1)
        return self.lin("patch", tap("patch", x, slot="in.0"))

    def rope(self) -> tuple[mx.array, mx.array]:
        """Cosines and sines of (tokens, channels of a head): rows, columns, and both again."""
        half = HEAD // 2
        freqs = (1 / 10000 ** (np.arange(0, half, 2, dtype=np.float32) / half)).astype(np.float32)
        spread = [
            np.arange(n) * axis // n for n, axis in zip((ROWS, COLUMNS), ROPE_AXES, strict=True)
        ]
        if self.bug == "rope_positions_unscaled":
            spread = [np.arange(ROWS), np.arange(COLUMNS)]
        row, column = np.repeat(spread[0], COLUMNS), np.tile(spread[1], ROWS)
        if self.bug == "rope_axes_swapped":
            row, column = column, row
        angles = np.stack([row, column], 1).astype(np.float32)[..., None] * freqs
        angles = np.tile(angles.reshape(N_IMAGE, half), 2)
        cos, sin = mx.array(np.cos(angles)), mx.array(np.sin(angles))
        return tap("rope.cos", cos), tap("rope.sin", sin)

    def rotate(self, x: mx.array, rope: tuple[mx.array, mx.array]) -> mx.array:
        """Rotates the image tokens of (batch, heads, tokens, channels)."""
        cos, sin = rope
        if self.bug == "rope_on_first_tokens":
            turned, rest = x[:, :, :N_IMAGE], x[:, :, N_IMAGE:]
        else:
            rest, turned = x[:, :, :N_TEXT], x[:, :, N_TEXT:]
        y = turned.astype(mx.float32)
        if self.bug == "rope_neighbours":
            other = mx.stack([-y[..., 1::2], y[..., ::2]], -1).reshape(y.shape)
        else:
            other = mx.concatenate([-y[..., HEAD // 2 :], y[..., : HEAD // 2]], -1)
        y = (y * cos + other * sin).astype(self.dtype)
        parts = [y, rest] if self.bug == "rope_on_first_tokens" else [rest, y]
        return mx.concatenate(parts, 2)

    def attention(self, name: str, x: mx.array, rope: tuple[mx.array, mx.array]) -> mx.array:
        b, n, _ = x.shape
        fused = self.lin(f"{name}.qkv", tap(f"{name}.qkv", x, slot="in.0"))
        q, k, v = fused.reshape(b, n, 3, HEADS, HEAD).transpose(2, 0, 3, 1, 4)
        if self.bug == "qk_norm_after_rope":
            q, k = self.ln(self.rotate(q, rope)), self.ln(self.rotate(k, rope))
        else:
            q = self.rotate(tap(f"{name}.q_norm", self.ln(q)), rope)
            k = self.rotate(tap(f"{name}.k_norm", self.ln(k)), rope)
        q, k, v = tap(f"{name}.q", q), tap(f"{name}.k", k), tap(f"{name}.v", v)
        scale = 1.0 if self.bug == "attention_scale_one" else HEAD**-0.5
        mask = None
        if self.bug == "text_blind_to_image":
            seen = np.ones((n, n), bool)
            seen[:N_TEXT, N_TEXT:] = False
            mask = mx.array(seen)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        y = tap(f"{name}.attn", y.transpose(0, 2, 1, 3).reshape(b, n, WIDTH))
        return self.lin(f"{name}.attn_out", y)

    def mlp(self, name: str, x: mx.array) -> mx.array:
        y = self.lin(f"{name}.fc1", tap(f"{name}.fc1", x, slot="in.0")).astype(mx.float32)
        y = nn.gelu(y) if self.bug == "gelu_erf" else nn.gelu_approx(y)
        return self.lin(f"{name}.fc2", tap(f"{name}.act", y.astype(self.dtype)))

    def layer(
        self, i: int, img: mx.array, txt: mx.array, cond: mx.array, rope: tuple[mx.array, mx.array]
    ) -> tuple[mx.array, mx.array]:
        """Chunks alternate: of the image, of the text, for each shift, scale and gate."""
        bug, name = self.bug, f"layers.{i}"
        chunks = mx.split(self.lin(f"{name}.adaln", cond)[:, None], 12, -1)
        a, c = chunks[::2], chunks[1::2]
        if bug == "adaln_six_and_six":
            a, c = chunks[:6], chunks[6:]
        parts = [self.ln(txt) * (1 + c[1]) + c[0], self.ln(img) * (1 + a[1]) + a[0]]
        y = self.attention(name, mx.concatenate(parts, 1), rope)
        gate = a[2] if bug == "text_gate_of_image" else c[2]
        img_mid = tap(f"{name}.img_mid", img + y[:, N_TEXT:] * a[2])
        txt_mid = tap(f"{name}.txt_mid", txt + y[:, :N_TEXT] * gate)
        y = self.mlp(f"{name}.mlp", self.ln(img_mid) * (1 + a[4]) + a[3])
        img = tap(f"{name}.img", img_mid + y * a[5])
        normed = self.ln(txt if bug == "text_norm2_of_input" else txt_mid)
        y = self.mlp(f"{name}.mlp", normed * (1 + c[4]) + c[3])
        return img, tap(f"{name}.txt", txt_mid + y * c[5])

    def head(self, x: mx.array, cond: mx.array) -> mx.array:
        """Scale precedes shift here."""
        cond = nn.silu(cond) if self.bug == "out_norm_silu" else cond
        scale, shift = mx.split(self.lin("out_norm.lin", cond)[:, None], 2, -1)
        x = self.lin("head", tap("out_norm", self.ln(x) * (1 + scale) + shift))
        x = x.reshape(len(x), ROWS, COLUMNS, PATCH, PATCH, CHANNELS)
        swapped = self.bug == "unpatchify_rows_columns"
        x = x.transpose(0, 1, 4, 2, 3, 5) if swapped else x.transpose(0, 1, 3, 2, 4, 5)
        return tap("velocity", x.reshape(len(x), ROWS * PATCH, COLUMNS * PATCH, CHANNELS))

    def __call__(
        self, x: mx.array, embeds: mx.array, t: mx.array, sizes: tuple[mx.array, ...]
    ) -> mx.array:
        rope = self.rope()
        img, txt = self.patches(x), self.lin("prompt", embeds)
        cond = self.cond(t, sizes)
        for i in range(LAYERS):
            img, txt = self.layer(i, img, txt, cond, rope)
        return self.head(img, cond)


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Shifted sigmas with a last 0, and timesteps, which are not shifted."""
    times = np.linspace(1000, 1, STEPS).astype(np.int64).astype(np.float32)
    mu = MAX_SHIFT * math.sqrt(N_IMAGE / BASE_TOKENS) + BASE_SHIFT
    shift = math.exp(mu) if bug == "shift_exponential" else mu
    sigmas = (shift / (shift + (1 / (times / 1000) - 1))).astype(np.float32)
    if bug == "timesteps_shifted":
        times = sigmas * 1000
    return np.append(sigmas, np.float32(0)), times


def guide(both: mx.array, bug: str | None) -> mx.array:
    negative, positive = both[:1], both[1:]
    start = positive if bug == "guidance_from_positive" else negative
    return tap("guided", start + GUIDANCE * tap("guide.delta", positive - negative))


def sample(
    net: Transformer,
    x: mx.array,
    embeds: mx.array,
    sizes: tuple[mx.array, ...],
    sigmas: Array,
    times: Array,
) -> None:
    pairs = tuple(mx.concatenate([s, s]) for s in sizes)
    levels = np.append(times / 1000, 0) if net.bug == "euler_unshifted" else sigmas
    for i in range(STEPS):
        set_step(i)
        t = tap("in.t", mx.full((2,), float(times[i]), mx.float32), kind="schedule")
        both = net(mx.concatenate([x, x]).astype(net.dtype), embeds, t, pairs)
        guided = guide(both, net.bug)
        dt = float(levels[i + 1]) - float(levels[i])
        x = (x.astype(mx.float32) + dt * guided.astype(mx.float32)).astype(net.dtype)
        x = tap("latents", x)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    parameters = converted(checkpoint(folder, "transformer"), bug)
    net = Transformer(parameters, bug, dtype)
    x = mx.array(np.ascontiguousarray(value("pipeline/noise").transpose(0, 2, 3, 1)))
    embeds = mx.array(value("pipeline/prompt_embeds")).astype(net.dtype)
    if bug == "negative_embeds_zero":
        embeds = mx.concatenate([mx.zeros_like(embeds[:1]), embeds[1:]])
    original, target = value("pipeline/original_size"), value("pipeline/target_size")
    if bug == "sizes_width_first":
        original, target = original[:, ::-1], target[:, ::-1]
    given_sizes = (original, target, value("pipeline/crop_coords"))
    sizes = tuple(mx.array(np.ascontiguousarray(s)) for s in given_sizes)
    (sigmas, times), kept = schedule(bug), None
    if weights:
        narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        kept = {k: v.astype(narrow) for k, v in parameters.items()}
    blocks = ("in.*", "patch", "prompt", "cond", "layers.?.img", "layers.?.txt", "velocity")
    blocks += ("guided", "latents")
    with port_trace(out, dump, dtype, blocks, kept):
        tap("in.noise", x, kind="input")
        tap("in.prompt", embeds, kind="input")
        for name, size in zip(("original", "target", "crop"), sizes, strict=True):
            tap(f"in.{name}", size, kind="input")
        tap("in.sigmas", sigmas, kind="schedule")
        tap("in.times", times, kind="schedule")
        sample(net, x, embeds, sizes, sigmas, times)


NO_COUNTERPART = (r"^guide\.delta$",)

LOADED = r"\bload|checkpoint|\bweights?\b.{0,60}(order|layout|permut|other|wrong|another|differ)"
LOWER = r"bf16|bfloat|(lower|reduced|less|half|narrower)[ -]precision|rounded to|rounds|\bcast"
SWAP = r"swap|exchang|\border|permut|rearrang"
BUGS = (
    Bug(
        "fc2_of_previous_layer",
        "The second MLP layer of layer 2 is loaded with layer 1's.",
        (LOADED, r"dupl|same param|(previous|another|other|wrong) (layer|block)|\bblocks?\.1\b"),
        "weights",
    ),
    Bug(
        "patch_weight_order",
        "The patch weight keeps the order (channel, row, column) of its inputs.",
        (LOADED, SWAP, r"channels?[ -](first|last)|layout|transpos"),
        "weights",
    ),
    Bug(
        "qkv_by_heads",
        "Layer 1's fused q, k, v weight is grouped by heads, but the product is split in thirds.",
        (LOADED, SWAP, r"interleav|group|per[ -]head|by heads?|layout"),
        "weights",
    ),
    Bug(
        "ln_eps",
        "All layer norms have eps 1e-6.",
        (r"\beps|epsilon", r"1e-0?6"),
    ),
    Bug(
        "qk_norm_after_rope",
        "q and k are normed after the rotation.",
        (
            r"(before|after) (the )?(rotary|rope|rotat|norm|q_norm|k_norm|position)",
            r"norm.{0,60}(rotary|rope|rotat)|(rotary|rope|rotat).{0,60}norm",
            SWAP,
        ),
    ),
    Bug(
        "text_norm2_of_input",
        "The text's second norm is of the block's input, without the attention's residual.",
        (
            r"residual|\bskip",
            r"(without|before|missing|lacks?|no) .{0,30}attention",
            r"attention.{0,60}(missing|not added|left out)",
            r"block'?s input|input of the block|stale|norm2_context",
        ),
    ),
    Bug(
        "gelu_erf",
        "The MLP has the exact GELU, not the one with tanh.",
        (r"\berf\b|tanh", r"exact.{0,20}gelu|gelu.{0,40}(exact|approx)|approx\w* gelu"),
    ),
    Bug(
        "out_norm_silu",
        "The last norm passes its condition through SiLU once more.",
        (
            r"silu|swish",
            r"activation.{0,40}(twice|again|extra|more)|(twice|extra).{0,40}activation",
        ),
    ),
    Bug(
        "attention_scale_one",
        "Scores of attention are not divided by the root of a head's channels.",
        (
            r"(score|attention|softmax|logit|\bqk?\b).{0,80}\b(scal(e|es|ed|ing)|factor)\b",
            r"\b(scal(e|es|ed|ing)|factor)\b.{0,80}(score|attention|softmax|logit|\bqk?\b)",
            r"sqrt|root|√|head_dim|temperature",
        ),
    ),
    Bug(
        "text_blind_to_image",
        "Text tokens do not attend to image tokens.",
        (r"mask", r"text.{0,60}(attend|see)", r"(attend|see)s? .{0,40}(text|image)"),
    ),
    Bug(
        "rope_axes_swapped",
        "The rotation takes columns first, then rows.",
        (
            r"\bax[ei]s\b|transpos|\bcolumns?\b|\brows?\b",
            r"(rope|rotary|position|frequenc).{0,80}(swap|exchang|order|permut)",
            r"(swap|exchang|order|permut).{0,80}(rope|rotary|position|frequenc|height|width)",
        ),
    ),
    Bug(
        "rope_neighbours",
        "The rotation pairs neighbouring channels, not the halves of a head.",
        (r"interleav|neighbou?r|adjacent|\bpairs?\b|\bpaired|halves|rotate_half|even.{0,20}odd",),
    ),
    Bug(
        "rope_positions_unscaled",
        "Positions of the rotation are 0, 1, 2, not spread over the model's largest grid.",
        (
            r"position",
            r"\bgrid|rope_axes_dim|spread|stretch|interpolat",
            r"(rope|rotary|angle|frequenc).{0,60}(scal|factor|times|base|theta)",
        ),
    ),
    Bug(
        "rope_on_first_tokens",
        "The rotation is of the first tokens of the joined text and image, not of the image's.",
        (
            r"(text|image|first|last|wrong|other|all) tokens?",
            r"offset|text.{0,40}(rotat|rope|rotary)|(rotat|rope|rotary).{0,60}(text|image|offset)",
        ),
    ),
    Bug(
        "adaln_six_and_six",
        "The twelve chunks of the modulation are read as six of the image and six of the text.",
        (r"chunk|interleav|split|alternat", SWAP, r"(shift|scale).{0,60}(gate|scale|text|context)"),
    ),
    Bug(
        "text_gate_of_image",
        "The text's residual of attention has the image's gate.",
        (
            r"gates?\b.{0,80}(image|img|wrong|other|another|chunk|swap|exchang|same)",
            r"(image|img|wrong|other|another|chunk|swap|exchang|same).{0,80}\bgate",
            r"(wrong|other|another|image|img).{0,30}(chunk|modulation|stream)",
        ),
    ),
    Bug(
        "size_order",
        "The size conditions are joined as original, target, crop.",
        (SWAP, r"crop|target.?size|concat"),
    ),
    Bug(
        "sizes_width_first",
        "The original and target sizes are given as (width, height).",
        (SWAP, r"width|height|\bsizes?\b|original|revers|flip|\binputs?\b"),
        "inputs",
    ),
    Bug(
        "negative_embeds_zero",
        "The negative prompt's embeds are zero.",
        (r"zero|negative|uncond|embeds|prompt|\binputs?\b",),
        "inputs",
    ),
    Bug(
        "timesteps_shifted",
        "Timesteps are shifted like the sigmas.",
        (r"timestep|shift|schedule|\bsigma",),
        "schedule",
    ),
    Bug(
        "shift_exponential",
        "Sigmas are shifted with exp(mu), not with mu.",
        (r"exponential|\bexp\b|\bmu\b|shift|\bsigmas?\b|schedule",),
        "schedule",
    ),
    Bug(
        "guidance_from_positive",
        "Guidance starts from the prompt's prediction.",
        (
            r"guidance|\bcfg\b",
            r"conditional|\b4\.5\b|(positive|negative).{0,40}(predict|start|base)",
        ),
    ),
    Bug(
        "euler_unshifted",
        "The step of Euler's method is a difference of unshifted sigmas.",
        (
            r"\bdt\b|step.?size|step.{0,20}length|\bsigmas?\b|timestep",
            r"(velocity|prediction|guided|update).{0,60}(factor|multipl|scaled|times)",
        ),
    ),
    Bug(
        "cond_bfloat16",
        "The condition is rounded to bfloat16.",
        (LOWER,),
    ),
    Bug(
        "unpatchify_rows_columns",
        "Rows and columns inside a patch are exchanged.",
        (r"unpatch|(in|of|inside|within) (a|each|the) patch", SWAP, r"transpos|layout|ax[ei]s"),
    ),
)
