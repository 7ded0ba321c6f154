"""Kandinsky 2.2's decoder in NumPy: channels last, HWIO kernels, transposed linear weights.

The UNet's blocks are enc1, enc2, core, dec1, dec2 with layers r1, a1, shrink, grow; q, k and v of
the image are one product, k and v of the image's embedding another. A DDPM loop of three steps
with learned variance and guidance is around it. Mostly results are recorded.
"""

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.schedulers import scheduling_ddpm

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

NAME = "kandinsky"
LATENT, ROWS, COLUMNS, WIDTHS, GROUPS = 4, 8, 6, (16, 32), 4
HEAD, IMAGE, CONTEXT, TOKENS = 8, 24, 20, 32  # channels of a head, of the embedding, of its tokens
STEPS, GUIDANCE, CLIP, OFFSET, BETAS = 3, 4.0, 2.0, 1, (0.00085, 0.012)


def reference(folder: Path, dtype: str) -> None:
    """The loop of the pipeline, with noise that is recorded before each step."""
    config: dict[str, Any] = dict(in_channels=LATENT, out_channels=2 * LATENT, layers_per_block=1)
    config |= dict(block_out_channels=WIDTHS, norm_num_groups=GROUPS, attention_head_dim=HEAD)
    config |= dict(down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"))
    config |= dict(up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"))
    config |= dict(mid_block_type="UNetMidBlock2DSimpleCrossAttn", cross_attention_dim=CONTEXT)
    config |= dict(resnet_time_scale_shift="scale_shift", addition_embed_type="image")
    config |= dict(encoder_hid_dim=IMAGE, encoder_hid_dim_type="image_proj")
    model = randomised(lambda: UNet2DConditionModel(**config), 22)
    model.conv_out.weight.mul_(0.35)  # so that the variance is between its bounds, as if trained
    model = saved(model, folder, "unet", dtype)
    scheduler = DDPMScheduler(
        beta_start=BETAS[0],
        beta_end=BETAS[1],
        beta_schedule="linear",
        variance_type="learned_range",
        clip_sample=True,
        clip_sample_range=CLIP,
        steps_offset=OFFSET,
    )
    scheduler.set_timesteps(STEPS)
    shape = (1, LATENT, ROWS, COLUMNS)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="unet", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        image = noise(1, 1, IMAGE).to(model.dtype)
        image = torch.cat([torch.zeros_like(image), image])
        recorder.record("pipeline/image_embeds", image, kind="input")
        latents = noise(2, *shape).to(model.dtype)
        recorder.record("pipeline/noise", latents, kind="input")
        for recorder.step in range(STEPS):
            t = scheduler.timesteps[recorder.step]
            kwargs = {"image_embeds": image}
            both = model(torch.cat([latents] * 2), t, None, added_cond_kwargs=kwargs).sample
            pred, variance = both.split(LATENT, dim=1)
            without, given_image = pred.chunk(2)
            pred = without + GUIDANCE * (given_image - without)
            pred = recorder.record("pipeline/noise_pred", pred)
            variance = recorder.record("pipeline/variance_pred", variance.chunk(2)[1])
            fresh = noise(3 + recorder.step, *shape).to(model.dtype)
            recorder.record("pipeline/step_noise", fresh, kind="input")
            with patch.object(scheduling_ddpm, "randn_tensor", lambda *_, x=fresh, **__: x):
                result: Any = scheduler.step(torch.cat([pred, variance], 1), int(t), latents)
            recorder.record("pipeline/pred_original_sample", result.pred_original_sample)
            latents = recorder.record("pipeline/latents", result.prev_sample)


RESNETS = {
    "enc1.r1": "down_blocks.0.resnets.0",
    "enc1.shrink": "down_blocks.0.downsamplers.0",
    "enc2.r1": "down_blocks.1.resnets.0",
    "core.r1": "mid_block.resnets.0",
    "core.r2": "mid_block.resnets.1",
    "dec1.r1": "up_blocks.0.resnets.0",
    "dec1.r2": "up_blocks.0.resnets.1",
    "dec1.grow": "up_blocks.0.upsamplers.0",
    "dec2.r1": "up_blocks.1.resnets.0",
    "dec2.r2": "up_blocks.1.resnets.1",
}
ATTENTIONS = {
    "enc2.a1": "down_blocks.1.attentions.0",
    "core.a1": "mid_block.attentions.0",
    "dec1.a1": "up_blocks.0.attentions.0",
    "dec1.a2": "up_blocks.0.attentions.1",
}


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: W is (in, out) or (rows, columns, in, out)."""
    new: dict[str, Array] = {}

    def linear(name: str, *parts: str) -> None:
        new[f"{name}.W"] = np.concatenate([w[f"{p}.weight"] for p in parts]).T.copy()
        new[f"{name}.b"] = np.concatenate([w[f"{p}.bias"] for p in parts])

    def conv(name: str, old: str) -> None:
        axes = (3, 2, 1, 0) if bug == "kernels_columns_first" else (2, 3, 1, 0)
        new[f"{name}.W"] = w[f"{old}.weight"].transpose(axes).copy()
        new[f"{name}.b"] = w[f"{old}.bias"]

    def norm(name: str, old: str) -> None:
        new[f"{name}.g"], new[f"{name}.b"] = w[f"{old}.weight"], w[f"{old}.bias"]

    linear("temb.fc1", "time_embedding.linear_1")
    linear("temb.fc2", "time_embedding.linear_2")
    linear("pooled.fc", "add_embedding.image_proj")
    norm("pooled.ln", "add_embedding.image_norm")
    linear("ctx.fc", "encoder_hid_proj.image_embeds")
    norm("ctx.ln", "encoder_hid_proj.norm")
    conv("stem", "conv_in")
    for name, old in RESNETS.items():
        norm(f"{name}.gn1", f"{old}.norm1")
        conv(f"{name}.c1", f"{old}.conv1")
        linear(f"{name}.emb", f"{old}.time_emb_proj")
        norm(f"{name}.gn2", f"{old}.norm2")
        conv(f"{name}.c2", f"{old}.conv2")
        if f"{old}.conv_shortcut.weight" in w:
            linear(f"{name}.short", f"{old}.conv_shortcut")
            new[f"{name}.short.W"] = np.squeeze(new[f"{name}.short.W"], (0, 1))
    for name, old in ATTENTIONS.items():
        norm(f"{name}.gn", f"{old}.group_norm")
        linear(f"{name}.qkv", *(f"{old}.to_{x}" for x in "qkv"))
        order = "vk" if bug == "context_values_as_keys" and name == "dec1.a2" else "kv"
        linear(f"{name}.ckv", *(f"{old}.add_{x}_proj" for x in order))
        linear(f"{name}.proj", f"{old}.to_out.0")
        if bug == "context_biases_dropped":
            new[f"{name}.ckv.b"] = np.zeros_like(new[f"{name}.ckv.b"])
    norm("head.gn", "conv_norm_out")
    conv("head", "conv_out")
    if bug == "kernel_reshaped":
        new["enc2.r1.c2.W"] = w["down_blocks.1.resnets.0.conv2.weight"].reshape(3, 3, 32, 32)
    if bug == "grow_norm_not_loaded":
        new["dec1.grow.gn1.g"] = np.ones_like(new["dec1.grow.gn1.g"])
        new["dec1.grow.gn1.b"] = np.zeros_like(new["dec1.grow.gn1.b"])
    if bug == "projection_not_transposed":
        new["enc2.a1.proj.W"] = new["enc2.a1.proj.W"].T.copy()
    return new


class Net:
    """The UNet's forward pass; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.q(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, kind: str = "activation") -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype), kind=kind)
        return x

    def of(self, name: str, end: str) -> Array:
        if self.bug == "second_attention_is_first":
            name = name.replace("dec1.a2", "dec1.a1")
        return self.p[f"{name}.{end}"]

    def linear(self, name: str, x: Array) -> Array:
        return self.tap(name, self.q(x @ self.of(name, "W") + self.of(name, "b")))

    def conv(self, name: str, x: Array) -> Array:
        w = self.p[f"{name}.W"]
        if self.bug == "head_kernel_flipped" and name == "head":
            w = w[::-1, ::-1]
        sides = ((0, 0), (1, 1), (1, 1), (0, 0))
        if self.bug == "padding_on_one_side" and name == "dec2.r1.c1":
            sides = ((0, 0), (0, 2), (0, 2), (0, 0))
        x, (_, rows, columns, _) = np.pad(x, sides), x.shape
        parts = [x[:, i : i + rows, j : j + columns] for i in range(3) for j in range(3)]
        y = np.concatenate(parts, -1) @ w.reshape(-1, w.shape[-1])
        return self.tap(name, self.q(y + self.p[f"{name}.b"]))

    def silu(self, x: Array) -> Array:
        return self.q(x / (1 + np.exp(-x)))

    def group_norm(self, name: str, x: Array) -> Array:
        bug, groups, eps = self.bug, GROUPS, 1e-5
        in_attention = name.endswith(".gn") and name != "head.gn"
        if bug == "attention_norm_groups" and in_attention:
            groups = 8
        if bug == "resnet_norm_eps" and name.endswith(("gn1", "gn2")):
            eps = 1e-6
        b, c = x.shape[0], x.shape[-1]
        y = x.reshape(b, -1, groups, c // groups)
        axes: tuple[int, ...] = (1, 3)
        if bug == "groups_interleaved" and name.startswith("dec1.r2"):
            y, axes = x.reshape(b, -1, c // groups, groups), (1, 2)
        if bug == "attention_norm_per_token" and name == "dec1.a1.gn":
            axes = (3,)
        ddof = 1 if bug == "head_norm_unbiased" and name == "head.gn" else 0
        y = y - y.mean(axes, keepdims=True)
        y = y / np.sqrt(y.var(axes, keepdims=True, ddof=ddof) + eps)
        y = y.reshape(x.shape) * self.of(name, "g") + self.of(name, "b")
        return self.tap(name, self.q(y))

    def layer_norm(self, name: str, x: Array) -> Array:
        y = x - x.mean(-1, keepdims=True)
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)
        return self.tap(name, self.q(y * self.p[f"{name}.g"] + self.p[f"{name}.b"]))

    def time(self, t: int, image: Array) -> Array:
        """The timestep's embedding plus the image's."""
        bug, half = self.bug, WIDTHS[0] // 2
        below = half - 1 if bug == "frequencies_to_the_end" else half
        exponent = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32)
        freqs = np.exp(exponent / np.float32(below))
        if bug == "frequencies_f16":
            freqs = freqs.astype(np.float16).astype(np.float32)
        a = np.float32(t) * freqs
        parts = [np.sin(a), np.cos(a)] if bug == "sin_first" else [np.cos(a), np.sin(a)]
        x = self.tap("temb.waves", self.q(np.tile(np.concatenate(parts), (2, 1))))
        x = self.linear("temb.fc1", x)
        if bug == "time_gelu":
            x = self.q(0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5)))
        else:
            x = self.silu(x)
        x = self.linear("temb.fc2", x)
        y = self.linear("pooled.fc", image)
        y = y if bug == "pooled_norm_missing" else self.layer_norm("pooled.ln", y)
        return self.tap("temb", self.q(x + y))

    def context(self, image: Array) -> Array:
        x = self.linear("ctx.fc", image)
        if self.bug == "context_channels_first":
            x = x.reshape(-1, CONTEXT, TOKENS).swapaxes(1, 2)
        else:
            x = x.reshape(-1, TOKENS, CONTEXT)
        x = self.layer_norm("ctx.ln", x)
        if self.bug == "context_without_image_zero":
            x = self.tap("ctx", x * np.array([0, 1], np.float32)[:, None, None])
        return x

    def shrunk(self, x: Array) -> Array:
        b, h, w, c = x.shape
        return self.q(x.reshape(b, h // 2, 2, w // 2, 2, c).mean((2, 4)))

    def grown(self, x: Array) -> Array:
        if self.bug == "grow_bilinear":
            for axis in (1, 2):
                n = x.shape[axis]
                at = np.clip((np.arange(2 * n) + 0.5) / 2 - 0.5, 0, n - 1)
                low = np.floor(at).astype(int)
                part = (at - low).astype(np.float32).reshape((-1,) + (1,) * (3 - axis))
                high = np.minimum(low + 1, n - 1)
                x = x.take(low, axis) * (1 - part) + x.take(high, axis) * part
            return self.q(x)
        return x.repeat(2, 1).repeat(2, 2)

    def resnet(self, name: str, x: Array, resample: str = "") -> Array:
        bug = self.bug
        h = self.silu(self.group_norm(f"{name}.gn1", x))
        late = bug == "shrink_after_conv" and resample == "shrink"
        if resample:
            change = self.shrunk if resample == "shrink" else self.grown
            h = h if late else self.tap(f"{name}.h2", change(h))
            if bug == "shrink_shortcut_strided" and resample == "shrink":
                x = self.tap(f"{name}.x2", x[:, ::2, ::2])
            else:
                x = self.tap(f"{name}.x2", change(x))
        h = self.conv(f"{name}.c1", h)
        h = self.tap(f"{name}.h2", self.shrunk(h)) if late else h
        emb = self.temb if bug == "embedding_without_silu" else self.silu(self.temb)
        emb = self.linear(f"{name}.emb", emb)[:, None, None]
        scale, shift = np.split(emb, 2, -1)
        if bug == "shift_before_scale":
            scale, shift = shift, scale
        one = 0 if bug == "one_missing" and name == "core.r2" else 1
        if bug == "modulated_before_norm" and name == "dec2.r1":
            h = self.q(self.q(h * self.q(one + scale)) + shift)
            h = self.group_norm(f"{name}.gn2", h)
        else:
            h = self.group_norm(f"{name}.gn2", h)
            if not (bug == "grow_not_modulated" and resample == "grow"):
                h = self.q(self.q(h * self.q(one + scale)) + shift)
                h = self.tap(f"{name}.mod", h)
        h = self.conv(f"{name}.c2", self.silu(h))
        if f"{name}.short.W" in self.p:
            x = self.linear(f"{name}.short", x)
        return self.tap(name, self.q(x + h))

    def attention(self, name: str, x: Array) -> Array:
        bug, (b, _, _, c) = self.bug, x.shape
        heads = HEAD if bug == "heads_of_head_channels" else c // HEAD
        n = self.group_norm(f"{name}.gn", x)
        qkv = self.linear(f"{name}.qkv", n)
        q, k, v = (y.reshape(b, -1, heads, c // heads) for y in np.split(qkv, 3, -1))
        ckv = self.linear(f"{name}.ckv", self.ctx)
        ck, cv = (y.reshape(b, -1, heads, c // heads) for y in np.split(ckv, 2, -1))
        if bug == "only_context" and name == "enc2.a1":
            k, v = ck, cv
        else:
            values = [v, cv] if bug == "values_context_last" and name == "core.a1" else [cv, v]
            k, v = np.concatenate([ck, k], 1), np.concatenate(values, 1)
        k = self.tap(f"{name}.k", k)
        width = c if bug == "scale_of_all_heads" and name[:3] == "dec" else c // heads
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * np.float32(width**-0.5)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        e = e / e.sum(-1, keepdims=True)
        if bug == "probabilities_bf16" and name == "dec1.a1":
            e = e.astype(ml_dtypes.bfloat16).astype(np.float32)
        y = self.q(np.einsum("bhqk,bkhd->bqhd", e, v))
        y = self.tap(f"{name}.att", y.reshape(b, -1, c))
        y = self.linear(f"{name}.proj", y).reshape(x.shape)
        start = n if bug == "residual_of_norm" and name == "core.a1" else x
        return self.tap(name, self.q(start + y))

    def __call__(self, x: Array, t: int, image: Array) -> Array:
        bug = self.bug
        self.temb, self.ctx = self.time(t, image), self.context(image)
        s1 = self.conv("stem", x)
        s2 = self.resnet("enc1.r1", s1)
        s3 = self.resnet("enc1.shrink", s2, "shrink")
        s4 = self.resnet("enc2.r1", s3)
        x = self.attention("enc2.a1", s4)
        s4 = s4 if bug == "skip_before_attention" else x
        x = self.resnet("core.r1", x)
        x = self.resnet("core.r2", self.attention("core.a1", x))
        x = self.attention("dec1.a1", self.resnet("dec1.r1", self.joined(x, s4)))
        x = self.attention("dec1.a2", self.resnet("dec1.r2", self.joined(x, s3)))
        x = self.resnet("dec1.grow", x, "grow")
        s2, s1 = (s1, s2) if bug == "skips_first_in_first_out" else (s2, s1)
        x = self.resnet("dec2.r1", self.joined(x, s2))
        x = self.resnet("dec2.r2", self.joined(x, s1))
        return self.conv("head", self.silu(self.group_norm("head.gn", x)))

    def joined(self, x: Array, skip: Array) -> Array:
        return np.concatenate([skip, x] if self.bug == "skip_before_stream" else [x, skip], -1)


class Sampler:
    """DDPM with a variance between two bounds; each operation is rounded as the latents are."""

    def __init__(self, net: Net, bug: str | None) -> None:
        self.q, self.bug, self.tap = net.q, bug, net.tap
        low, high = BETAS
        if bug == "betas_scaled_linear":
            betas = np.linspace(low**0.5, high**0.5, 1000) ** 2
        else:
            betas = np.linspace(low, high, 1000)
        self.betas = betas.astype(np.float32)
        self.kept = np.cumprod(1 - self.betas, dtype=np.float64).astype(np.float32)

    def steps(self) -> list[int]:
        if self.bug == "timesteps_trailing":
            return [int(t) - 1 for t in np.round(np.arange(1000, 0, -1000 / STEPS))]
        offset = 0 if self.bug == "timesteps_without_offset" else OFFSET
        return [i * (1000 // STEPS) + offset for i in reversed(range(STEPS))]

    def guided(self, both: Array) -> tuple[Array, Array]:
        """The noise and the variance's place between its bounds, -1 to 1."""
        q, bug = self.q, self.bug
        pred, variance = both[..., :LATENT], both[..., LATENT:]
        without, given_image = pred[:1], pred[1:]
        start = given_image if bug == "guidance_from_conditional" else without
        pred = q(start + q(GUIDANCE * q(given_image - without)))
        row = 0 if bug == "variance_of_unconditional" else 1
        return self.tap("guided.eps", pred), self.tap("guided.var", variance[row : row + 1])

    def step(self, x: Array, pred: Array, place: Array, fresh: Array, t: int, prev: int) -> Array:
        q, bug, one = self.q, self.bug, np.float32(1)
        kept = self.kept[t - 1 if bug == "alpha_of_step_before" else t]
        kept_prev = self.kept[prev] if prev >= 0 else one
        if bug == "last_alpha_not_one" and prev < 0:
            kept_prev = self.kept[0]
        alpha = kept / kept_prev
        if bug == "beta_of_one_step":
            alpha = one - self.betas[t]
        beta, rest, rest_prev = one - alpha, one - kept, one - kept_prev
        x0 = q(q(x - q(np.sqrt(rest) * pred)) / np.sqrt(kept))
        limit = 1.0 if bug == "clip_at_one" else CLIP
        x0 = x0 if bug == "not_clipped" else np.clip(x0, -limit, limit)
        x0 = self.tap("ddpm.x0", x0)
        mean = q(np.sqrt(kept_prev) * beta / rest * x0)
        mean = self.tap("ddpm.mean", q(mean + q(np.sqrt(alpha) * rest_prev / rest * x)))
        low = np.log(np.maximum(rest_prev / rest * beta, np.float32(1e-20)))
        high = np.log(beta)
        place = place if bug == "variance_not_mapped" else q(q(place + 1) / 2)
        log = q(q(place * high) + q(q(1 - place) * low))
        std = q(np.exp(log if bug == "variance_as_deviation" else q(np.float32(0.5) * log)))
        std = self.tap("ddpm.std", std)
        if bug == "last_step_without_noise" and prev < 0:
            return self.tap("ddpm.x", mean)
        return self.tap("ddpm.x", q(mean + q(std * fresh)))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Net(converted(checkpoint(folder, "unet"), bug), bug, dtype)
    sampler = Sampler(net, bug)
    image, x = value("pipeline/image_embeds"), value("pipeline/noise").transpose(0, 2, 3, 1)
    if bug == "noise_reshaped":
        x = value("pipeline/noise").reshape(1, ROWS, COLUMNS, LATENT)
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("in.*", "temb", "ctx.ln", "stem", "enc?.??", "enc?.shrink", "core.??", "dec?.??")
    blocks += ("dec?.grow", "head", "guided.*", "ddpm.x0", "ddpm.x")
    with port_trace(out, dump, dtype, blocks, kept) as recorder:
        steps = sampler.steps()
        taps.tap("in.steps", np.array(steps), kind="schedule")
        image = net.tap("in.image", net.q(image), "input")
        x = net.tap("in.x", net.q(x), "input")
        for i, (t, prev) in enumerate(zip(steps, [*steps[1:], -1], strict=True)):
            recorder.step = i
            pred, place = sampler.guided(net(np.concatenate([x, x]), t, image))
            fresh = value("pipeline/step_noise", step=0 if bug == "noise_reused" else i)
            fresh = net.tap("in.fresh", net.q(fresh.transpose(0, 2, 3, 1)), "input")
            x = sampler.step(x, pred, place, fresh, t, prev)


NO_COUNTERPART = (r"^ddpm\.(mean|std)$",)

LOAD = r"load|checkpoint|convert|weights? (differ|of|is|are)|parameter"
SWAP = r"swap|exchang|\border|reverse"
STEP_BEFORE = r"off.by.one|neighbou?r|index|t ?[-−] ?1|step before|previous (time)?step"
BUGS = (
    Bug(
        "kernel_reshaped",
        "A 3x3 kernel of enc2.r1 is reshaped to HWIO, not transposed.",
        (r"reshap|transpos|permut|layout|\baxes\b", LOAD),
        "weights",
    ),
    Bug(
        "kernels_columns_first",
        "All kernels have columns before rows.",
        (r"transpos|permut|layout|\baxes\b|rows|height|width", LOAD),
        "weights",
    ),
    Bug(
        "context_values_as_keys",
        "dec1.a2's fused projection of the context has v before k.",
        (SWAP + r"|fused|halves|permut", LOAD),
        "weights",
    ),
    Bug(
        "context_biases_dropped",
        "The context's k and v have no bias in any attention.",
        (r"\bbias|zeros?\b", LOAD),
        "weights",
    ),
    Bug(
        "grow_norm_not_loaded",
        "The first norm of the upsampling resnet keeps its initial ones and zeros.",
        (r"not loaded|never loaded|initial|default|ones|affine|identity", LOAD),
        "weights",
    ),
    Bug(
        "projection_not_transposed",
        "enc2.a1's square output projection is not transposed.",
        (r"transpos", LOAD),
        "weights",
    ),
    Bug(
        "second_attention_is_first",
        "The second attention of dec1 uses the first one's layer.",
        (
            r"(weights?|parameters?|layer|module) of (another|the other|dec1\.a1|\S*attentions\.0)",
            r"(other|another|wrong|same|first) (layer|module|block|weight|parameter)|twice|shared",
            r"dec1\.a1|attentions\.0|load|index",
        ),
    ),
    Bug(
        "head_kernel_flipped",
        "The last convolution flips its kernel, as scipy's does.",
        (r"flip|correlation|revers|mirror|rotat|180",),
    ),
    Bug(
        "padding_on_one_side",
        "A convolution of dec2.r1 is padded at the right and bottom only.",
        (r"\bpad|shift|offset",),
    ),
    Bug(
        "shrink_shortcut_strided",
        "The shortcut of the downsampling resnet takes every second pixel, not the mean of four.",
        (r"average|\bmean|pool|strid|subsampl|every (second|other)|nearest|downsampl(?!ers)",),
    ),
    Bug(
        "shrink_after_conv",
        "The downsampling resnet pools after its first convolution, not before.",
        (r"\bpool|downsampl(?!ers)|average|\border|(before|after).{0,30}(conv|pool)|resolution",),
    ),
    Bug(
        "grow_bilinear",
        "The upsampling resnet interpolates bilinearly.",
        (r"bilinear|linear(ly)? interpol|interpolat|nearest|upsampl(?!ers)",),
    ),
    Bug(
        "grow_not_modulated",
        "The upsampling resnet does not apply the embedding's scale and shift.",
        (r"scale|shift|modulat|\btime(?!_)|\btemb(?!\.)|(?<!_)embedding|FiLM",),
    ),
    Bug("time_gelu", "The time MLP uses GELU.", (r"gelu|silu|swish|activation",)),
    Bug(
        "embedding_without_silu",
        "The resnets project the embedding without SiLU before.",
        (r"silu|swish|activation|nonlinear|non-linear",),
    ),
    Bug(
        "sin_first",
        "The timestep's sines come before the cosines.",
        (r"\bsin|\bcos|flip|" + SWAP,),
    ),
    Bug(
        "frequencies_to_the_end",
        "The frequencies are divided by half - 1 (freq_shift 1).",
        (r"freq|half ?[-−] ?1|period|\bbase\b|exponent|denominator",),
    ),
    Bug(
        "frequencies_f16",
        "The timestep's frequencies are rounded to float16.",
        (r"f16|fp16|float16|precision|rounded",),
    ),
    Bug(
        "pooled_norm_missing",
        "The image embedding for the time has no LayerNorm.",
        (r"(?<![._\w])norm|layer ?norm",),
    ),
    Bug(
        "context_channels_first",
        "The image's tokens are reshaped as channels by tokens.",
        (r"reshap|transpos|permut|layout|\baxes\b|" + SWAP + r"|interleav",),
    ),
    Bug(
        "context_without_image_zero",
        "The unconditional context is zeros, not the projection of a zero embedding.",
        (r"zero|uncond|negative|\brow\b|batch|first (half|item|element|sample)|mask",),
    ),
    Bug(
        "attention_norm_groups",
        "The attentions' norms have 8 groups instead of 4.",
        (r"\bgroups?\b(?! ?norm)",),
    ),
    Bug(
        "attention_norm_per_token",
        "dec1.a1's GroupNorm takes each token by itself.",
        (
            r"(per|each|every|over|single|separate\w*|across|by|with\w*) (\w+ ){0,2}"
            r"(token|position|pixel)",
            r"spatial|\baxes\b|\baxis\b|layer ?norm",
        ),
    ),
    Bug(
        "groups_interleaved",
        "dec1.r2's norms have every fourth channel in a group.",
        (
            r"interleav|strid|every (4th|fourth|n-?th)|channel.{0,20}(order|group)|layout",
            r"\bgroups?\b(?! ?norm)",
        ),
    ),
    Bug(
        "resnet_norm_eps",
        "The resnets' norms have eps 1e-6 instead of 1e-5.",
        (r"\beps|epsilon",),
    ),
    Bug(
        "head_norm_unbiased",
        "The last norm divides by n - 1 in its variance.",
        (r"unbiased|bessel|ddof|n ?[-−] ?1|sample variance|correction|biased",),
    ),
    Bug(
        "heads_of_head_channels",
        "There are 8 heads of 4 channels, not 4 of 8.",
        (r"\bheads?\b",),
    ),
    Bug(
        "scale_of_all_heads",
        "dec1's scores are scaled by the whole width.",
        (r"scale|sqrt|root|temperature",),
    ),
    Bug(
        "values_context_last",
        "core.a1 joins the context's values after the image's, the keys before.",
        (r"concat|join|permut|roll|" + SWAP,),
    ),
    Bug(
        "only_context",
        "enc2.a1 attends to the context only.",
        (
            r"context.{0,20}only|only.{0,20}(context|added|cross|encoder)|concat|join",
            r"(own|self|image).{0,30}(key|value|token)|(self|cross).?attention",
            r"(fewer|shorter|missing|lack\w*|without|left out).{0,30}(key|token)",
        ),
    ),
    Bug(
        "residual_of_norm",
        "core.a1 adds to its normed input.",
        (r"residual|skip connection|normed|normali[sz]ed|shortcut",),
    ),
    Bug(
        "probabilities_bf16",
        "dec1.a1's probabilities are rounded to bfloat16.",
        (r"bf16|bfloat|precision|rounded|f16|float16",),
    ),
    Bug(
        "shift_before_scale",
        "All resnets take the shift from the first half.",
        (r"shift.*scale|scale.*shift|halves|wrong half|first half|chunk|" + SWAP,),
    ),
    Bug(
        "one_missing",
        "core.r2 multiplies by scale, not 1 + scale.",
        (r"\b1 ?\+|\+ ?1\b|(one|1) plus|plus (1|one)|(without|missing|add\w*) (the )?(1|one)\b",),
    ),
    Bug(
        "modulated_before_norm",
        "dec2.r1 applies scale and shift before its second norm.",
        (r"(before|after).{0,40}norm|norm.{0,40}(before|after)|\border|modulat|scale|shift",),
    ),
    Bug(
        "skip_before_stream",
        "The decoder joins skip and stream in the other order.",
        (r"concat|join|permut|channel|" + SWAP,),
    ),
    Bug(
        "skips_first_in_first_out",
        "dec2's two skips are exchanged.",
        (r"\bskip(?!ped)|enc1\.r1|stem|conv_in|fifo|other (value|input|tensor)|" + SWAP,),
    ),
    Bug(
        "skip_before_attention",
        "enc2's skip is taken before its attention.",
        (
            r"\bskip(?!ped)|enc2\.r1|(before|without|misses|missing).{0,30}att",
            r"resnets?\.0|earlier|other (value|input|tensor)|input of",
        ),
    ),
    Bug(
        "variance_of_unconditional",
        "The variance is that of the unconditional half.",
        (r"uncond|(other|first|second|wrong) half|batch|\brow\b|chunk|slice|" + SWAP,),
    ),
    Bug(
        "guidance_from_conditional",
        "Guidance is added to the conditional prediction.",
        (r"guid(?!ed\.)|uncond|condition|cfg",),
    ),
    Bug(
        "not_clipped",
        "The predicted x0 is not clipped.",
        (r"clip|clamp|threshold|saturat",),
    ),
    Bug(
        "clip_at_one",
        "x0 is clipped at 1, not 2.",
        (r"clip|clamp|threshold|saturat",),
    ),
    Bug(
        "variance_as_deviation",
        "The noise is scaled by the variance, not its root.",
        (r"variance(?!_)|deviation|sigma|sqrt|root|0\.5|\blog\b|amount of noise|noise scale",),
    ),
    Bug(
        "variance_not_mapped",
        "The predicted variance is not mapped from -1..1 to 0..1.",
        (r"variance(?!_)|deviation|sigma|learned|frac|mapped|amount of noise|noise scale",),
    ),
    Bug(
        "beta_of_one_step",
        "The coefficients have the table's beta, of one training step.",
        (r"beta|coefficient|alpha|posterior|one (training )?step|consecutive|schedule",),
    ),
    Bug(
        "alpha_of_step_before",
        "alphas_cumprod is read at t - 1.",
        (r"alpha|cumprod|sigma|coefficient|" + STEP_BEFORE,),
    ),
    Bug(
        "betas_scaled_linear",
        "Betas are linear in the square root, as Stable Diffusion's.",
        (r"beta|alpha|cumprod|scaled.linear|sigma|schedule|coefficient",),
    ),
    Bug(
        "last_alpha_not_one",
        "The last step ends at alphas_cumprod[0], not 1.",
        (r"alpha|cumprod|coefficient|sigma|end of the schedule",),
    ),
    Bug(
        "last_step_without_noise",
        "The last step, at t = 1, adds no noise.",
        (r"(?<![/_])noise(?!_)|variance(?!_)|stochastic",),
    ),
    Bug(
        "timesteps_without_offset",
        "The timesteps have no offset of 1.",
        (r"timestep|offset|schedule|\+ ?1\b",),
        "schedule",
    ),
    Bug(
        "timesteps_trailing",
        "The timesteps are spaced as trailing, not leading.",
        (r"timestep|trailing|leading|spacing|schedule",),
        "schedule",
    ),
    Bug(
        "noise_reused",
        "Each step adds the noise of the first.",
        (r"(?<!/)noise(?!_pred)|reuse|stale|same (value|noise)|step 0",),
        "inputs",
    ),
    Bug(
        "noise_reshaped",
        "The first latents are reshaped to channels last, not transposed.",
        (r"reshap|transpos|permut|layout|\baxes\b|(?<!/)noise(?!_)",),
        "inputs",
    ),
)
