"""Stable Cascade's prior, stage C, in NumPy with channels last.

The architecture is that of StageC in the authors' repository (Stability-AI/StableCascade,
modules/stage_c.py), with its fused matrix of attention, and the sampler is that of its gdf folder,
which steps by way of x0; diffusers' StableCascadeUNet and DDPMWuerstchenScheduler are the
reference. Prompt and negative prompt are one batch. A block's name has its level, its number and
the letter of its kind: C of convolution, T of timestep, A of attention.
"""

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDPMWuerstchenScheduler
from diffusers.models import StableCascadeUNet
from diffusers.schedulers import scheduling_ddpm_wuerstchen

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

NAME = "cascade_prior"
CHANNELS, ROWS, COLUMNS = 4, 7, 8
WIDTHS, HEADS, WAVE, CONDITION = (16, 24), (2, 3), 16, 20
DOWN, UP = (1, 2), (2, 1)  # groups of C, T and A in each level, in the order of execution
TEXT, POOLED, IMAGE, TOKENS, SPLIT = 12, 12, 10, 5, 2
STEPS, GUIDANCE, OFFSET = 3, 2.0, 0.008
EXTRA = ("sca", "crp")


def reference(folder: Path, dtype: str) -> None:
    """The loop of StableCascadePriorPipeline, from embeddings to the image's embedding."""
    config: dict[str, Any] = dict(in_channels=CHANNELS, out_channels=CHANNELS)
    config |= dict(timestep_ratio_embedding_dim=WAVE, conditioning_dim=CONDITION)
    config |= dict(block_out_channels=WIDTHS, num_attention_heads=HEADS)
    config |= dict(down_num_layers_per_block=DOWN, up_num_layers_per_block=UP)
    config |= dict(clip_text_in_channels=TEXT, clip_text_pooled_in_channels=POOLED)
    config |= dict(clip_image_in_channels=IMAGE, clip_seq=SPLIT, switch_level=(True,))
    model = randomised(lambda: StableCascadeUNet(**config), 91)
    for name, parameter in model.named_parameters():
        if name.endswith(("gamma", "beta")):
            parameter.mul_(10)
        if "mapper" in name and "blocks" in name:
            parameter.mul_(1.5)  # times and conditions matter
        if name.endswith("to_out.0.weight"):
            parameter.mul_(3)
    model = saved(model, folder, "prior", dtype)
    scheduler: Any = DDPMWuerstchenScheduler()
    numbers = iter(noise(25, STEPS, 1, CHANNELS, ROWS, COLUMNS))

    def drawn(*_: Any, **__: Any) -> torch.Tensor:
        return recorder.record("pipeline/step_noise", next(numbers).to(model.dtype), kind="input")

    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="prior", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
        patch.object(scheduling_ddpm_wuerstchen, "randn_tensor", drawn),
    ):
        scheduler.set_timesteps(STEPS)
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        text = noise(21, 2, TOKENS, TEXT).to(model.dtype)
        pooled = noise(22, 2, 1, POOLED).to(model.dtype)
        image = noise(23, 1, 1, IMAGE).to(model.dtype)
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/prompt_embeds_pooled", pooled, kind="input")
        recorder.record("pipeline/image_embeds", image, kind="input")
        images = torch.cat([image, torch.zeros_like(image)])
        latents = noise(24, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/noise", latents, kind="input")
        for i, t in enumerate(scheduler.timesteps[:-1]):
            recorder.step = i
            ratio = t.expand(1).to(model.dtype)
            both = model(
                sample=torch.cat([latents] * 2),
                timestep_ratio=torch.cat([ratio] * 2),
                clip_text_pooled=pooled,
                clip_text=text,
                clip_img=images,
                return_dict=False,
            )[0]
            cond, uncond = both.chunk(2)
            predicted = torch.lerp(uncond, cond, GUIDANCE)
            recorder.record("pipeline/noise_pred", predicted)
            latents = scheduler.step(predicted, ratio, latents).prev_sample
            recorder.record("pipeline/latents", latents)


def layout(groups: tuple[int, ...], levels: tuple[int, ...]) -> list[tuple[int, list[str]]]:
    """Level and names of blocks, such as 3C, of each part of an encoder or decoder."""
    return [
        (level, [f"{3 * i + k}{kind}" for i in range(n) for k, kind in enumerate("CTA")])
        for n, level in zip(groups, levels, strict=True)
    ]


ENCODER, DECODER = layout(DOWN, (0, 1)), layout(UP, (1, 0))


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters for channels last; matrices stay (out, in), and q, k and v become one."""
    new: dict[str, Array] = {}

    def put(name: str, old: str) -> None:
        weight = w[f"{old}.weight"]
        new[f"{name}.weight"] = weight[..., 0, 0] if weight.ndim == 4 else weight
        new[f"{name}.bias"] = w[f"{old}.bias"]

    for name in ("clip_txt_mapper", "clip_txt_pooled_mapper", "clip_img_mapper"):
        put(name, name)
    put("embedding", "embedding.1")
    put("downscale", "down_downscalers.1.1.blocks.0")
    put("upscale", "up_upscalers.0.1.blocks.1")
    put("clf", "clf.1")
    for side, parts in (("down", ENCODER), ("up", DECODER)):
        for at, (_, names) in enumerate(parts):
            for i, kind in enumerate(names):
                name, old = f"{side}.{at}.{kind}", f"{side}_blocks.{at}.{i}"
                if bug == "up_block_loaded_twice" and name == "up.0.3C":
                    old = "up_blocks.0.0"
                if kind.endswith("C"):
                    axes = (3, 2, 0, 1) if bug == "kernel_rows_columns" else (2, 3, 0, 1)
                    kernel = w[f"{old}.depthwise.weight"].transpose(axes)  # (rows, columns, c, 1)
                    new[f"{name}.depthwise.weight"] = kernel[..., 0]
                    new[f"{name}.depthwise.bias"] = w[f"{old}.depthwise.bias"]
                    put(f"{name}.mlp.in", f"{old}.channelwise.0")
                    put(f"{name}.mlp.out", f"{old}.channelwise.4")
                    for x in ("gamma", "beta"):
                        new[f"{name}.grn.{x}"] = w[f"{old}.channelwise.2.{x}"].reshape(-1)
                elif kind.endswith("T"):
                    put(f"{name}.mapper", f"{old}.mapper")
                    for x in EXTRA:
                        put(f"{name}.mapper_{x}", f"{old}.mapper_{x}")
                else:
                    put(f"{name}.kv_mapper", f"{old}.kv_mapper.1")
                    order = "qvk" if bug == "in_proj_order" and side == "up" else "qkv"
                    for end in ("weight", "bias"):
                        fused = [w[f"{old}.attention.to_{x}.{end}"] for x in order]
                        new[f"{name}.attn.in_proj.{end}"] = np.concatenate(fused)
                    put(f"{name}.attn.out_proj", f"{old}.attention.to_out.0")
    if bug == "grn_gamma_beta":
        for name in [name for name in new if name.endswith("grn.gamma")]:
            beta = name.replace("gamma", "beta")
            new[name], new[beta] = new[beta], new[name]
    if bug == "mapper_crp_left_out":
        for name in [name for name in new if "mapper_crp" in name]:
            new[name] = np.zeros_like(new[name])
    return new


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array, tanh: bool) -> Array:
    if tanh:
        return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float32])(x / np.float32(2**0.5)))


def layer_norm(x: Array) -> Array:
    y = x - x.mean(-1, keepdims=True)
    return y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(1e-6))


def resized(x: Array, rows: int, columns: int, corners: bool = True) -> Array:
    """Bilinear interpolation of (batch, rows, columns, channels); corners are aligned."""
    for axis, size in ((1, rows), (2, columns)):
        old = x.shape[axis]
        if corners:
            at = np.arange(size) * ((old - 1) / max(size - 1, 1))
        else:
            at = np.clip((np.arange(size) + 0.5) * (old / size) - 0.5, 0, old - 1)
        low = np.minimum(np.floor(at + 1e-9).astype(int), old - 1)
        high = np.minimum(low + 1, old - 1)
        share = (at - low).astype(np.float32).reshape([-1 if i == axis else 1 for i in range(4)])
        x = x.take(low, axis) * (1 - share) + x.take(high, axis) * share
    return x


class StageC:
    """The forward pass; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, kind: str = "activation") -> Array:
        taps.tap(name, x.astype(self.dtype), kind=kind)
        return x

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]
        return self.tap(name, self.r(y))

    def norm(self, name: str, x: Array) -> Array:
        return self.tap(name, self.r(layer_norm(x)))

    def gen_r_embedding(self, ratio: Array) -> Array:
        """Sinusoids of (batch,)."""
        half = WAVE // 2
        whole = half if self.bug == "r_frequencies_of_half" else half - 1
        step = np.float32(-math.log(10000) / whole)
        frequencies = np.exp((np.arange(half, dtype=np.float32) * step).astype(np.float64))
        angles = self.r(ratio * 10000)[:, None] * frequencies.astype(np.float32)
        waves = [np.sin(angles), np.cos(angles)]
        if self.bug == "r_cosine_first":
            waves.reverse()
        return self.r(np.concatenate(waves, -1))

    def gen_c_embeddings(self, text: Array, pooled: Array, image: Array) -> Array:
        """Tokens that attention sees: of the text, its pooled vector and the image."""
        parts = [self.linear("clip_txt_mapper", text)]
        for name, x in (("clip_txt_pooled_mapper", pooled), ("clip_img_mapper", image)):
            y = self.linear(name, x)
            if self.bug == "pooled_tokens_interleaved":
                y = y.reshape(len(y), CONDITION, SPLIT).transpose(0, 2, 1)
            parts.append(y.reshape(len(y), SPLIT, CONDITION))
        clip = np.concatenate(parts, 1)
        return clip if self.bug == "clip_norm_left_out" else self.norm("clip_norm", clip)

    def depthwise(self, name: str, x: Array) -> Array:
        kernel = self.p[f"{name}.weight"]
        if self.bug == "depthwise_flipped":
            kernel = kernel[::-1, ::-1]
        _, h, w, _ = x.shape
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        y = self.p[f"{name}.bias"] + sum(
            padded[:, i : i + h, j : j + w] * kernel[i, j] for i in range(3) for j in range(3)
        )
        return self.tap(name, self.r(y))

    def grn(self, name: str, x: Array) -> Array:
        """Global response norm over rows and columns."""
        gx = self.r(np.sqrt((x * x).sum((1, 2), keepdims=True)))
        axes = (0, 1, 2, 3) if self.bug == "grn_mean_over_batch" else -1
        nx = self.r(gx / self.r(gx.mean(axes, keepdims=True) + np.float32(1e-6)))
        y = self.p[f"{name}.gamma"] * self.r(x * nx) + self.p[f"{name}.beta"]
        return self.tap(name, self.r(y + x))

    def conv_block(self, name: str, x: Array, skip: Array | None) -> Array:
        bug = self.bug
        if bug == "norm_before_depthwise":
            h = self.depthwise(f"{name}.depthwise", self.norm(f"{name}.norm", x))
        else:
            h = self.norm(f"{name}.norm", self.depthwise(f"{name}.depthwise", x))
        if skip is not None:
            both = (skip, h) if bug == "skip_concatenated_first" else (h, skip)
            h = np.concatenate(both, -1)
        h = self.linear(f"{name}.mlp.in", h)
        h = self.tap(f"{name}.mlp.act", self.r(gelu(h, tanh=bug == "gelu_tanh")))
        h = self.linear(f"{name}.mlp.out", self.grn(f"{name}.grn", h))
        return self.tap(name, self.r(x + h))

    def time_block(self, name: str, x: Array, r_embed: Array) -> Array:
        ratio, *extra = np.split(r_embed, 1 + len(EXTRA), -1)
        ab = self.linear(f"{name}.mapper", ratio)
        for kind, embedded in zip(EXTRA, extra, strict=True):
            ab = self.r(ab + self.linear(f"{name}.mapper_{kind}", embedded))
        a, b = np.split(ab[:, None, None], 2, -1)
        if self.bug == "timestep_shift_first":
            a, b = b, a
        return self.tap(name, self.r(x * (1 + a) + b))

    def attn_block(self, name: str, x: Array, clip: Array, heads: int) -> Array:
        bug = self.bug
        kv = clip if bug == "kv_mapper_without_silu" else self.r(silu(clip))
        kv = self.linear(f"{name}.kv_mapper", kv)
        h = self.norm(f"{name}.norm", x)
        n, rows, columns, c = x.shape
        own = (x if bug == "self_tokens_not_normed" else h).reshape(n, -1, c)
        kv = np.concatenate([own, kv], 1)
        if bug == "image_tokens_left_out":
            kv = kv[:, rows * columns :]
        weight, bias = (self.p[f"{name}.attn.in_proj.{x}"] for x in ("weight", "bias"))
        result: list[Array] = []
        for kind, source, m, b in zip(
            "qkv",
            (h.reshape(n, -1, c), kv, kv),
            np.split(weight, 3),
            np.split(bias, 3),
            strict=True,
        ):
            y = self.tap(f"{name}.attn.{kind}", self.r(source @ m.T + b))
            result.append(y.reshape(n, -1, heads, c // heads))
        q, k, v = result
        scores = np.einsum("nqhd,nkhd->nhqk", q, k) * np.float32((c // heads) ** -0.5)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("nhqk,nkhd->nqhd", e / e.sum(-1, keepdims=True), v)
        y = self.tap(f"{name}.attn.sdpa", self.r(y).reshape(n, -1, c))
        y = self.linear(f"{name}.attn.out_proj", y)
        if bug == "attention_columns_first":
            y = y.reshape(n, columns, rows, c).transpose(0, 2, 1, 3)
        return self.tap(name, self.r(x + y.reshape(x.shape)))

    def level(
        self,
        name: str,
        part: tuple[int, list[str]],
        x: Array,
        r_embed: Array,
        clip: Array,
        skip: Array | None = None,
    ) -> Array:
        level, kinds = part
        for i, kind in enumerate(kinds):
            if kind.endswith("C"):
                x = self.conv_block(f"{name}.{kind}", x, None if i else skip)
            elif kind.endswith("T"):
                x = self.time_block(f"{name}.{kind}", x, r_embed)
            else:
                x = self.attn_block(f"{name}.{kind}", x, clip, HEADS[level])
        return x

    def downscale(self, x: Array) -> Array:
        x = self.linear("downscale", self.norm("downscale.norm", x))
        corners = self.bug != "downscale_corners_not_aligned"
        x = resized(x, x.shape[1] // 2, x.shape[2] // 2, corners)
        return self.tap("downscale.resized", self.r(x))

    def upscale(self, x: Array) -> Array:
        x = self.norm("upscale.norm", x)
        if self.bug == "upscale_nearest":
            x = x.repeat(2, 1).repeat(2, 2)
        else:
            x = self.r(resized(x, 2 * x.shape[1], 2 * x.shape[2]))
        return self.linear("upscale", self.tap("upscale.resized", x))

    def __call__(self, x: Array, ratio: Array, text: Array, pooled: Array, image: Array) -> Array:
        bug = self.bug
        embedded = [self.gen_r_embedding(ratio)]
        for kind in EXTRA:
            condition = ratio if bug == "sca_is_ratio" and kind == "sca" else np.zeros_like(ratio)
            embedded.append(self.gen_r_embedding(condition))
        r_embed = self.tap("r_embed", np.concatenate(embedded, -1))
        clip = self.gen_c_embeddings(text, pooled, image)
        x = self.norm("embedding.norm", self.linear("embedding", x))
        first = self.level("down.0", ENCODER[0], x, r_embed, clip)
        skip = x if bug == "skip_before_blocks" else first
        x = self.level("down.1", ENCODER[1], self.downscale(first), r_embed, clip)
        x = self.upscale(self.level("up.0", DECODER[0], x, r_embed, clip))
        if x.shape != skip.shape:
            x = self.tap("up.1.resized", self.r(resized(x, *skip.shape[1:3])))
        x = self.level("up.1", DECODER[1], x, r_embed, clip, skip)
        return self.linear("clf", self.norm("clf.norm", x))


def alpha_cumprod(t: float, bug: str | None) -> float:
    """The cosine schedule's share of signal at a time."""
    s = 0.0 if bug == "cosine_offset_missing" else OFFSET
    start = math.cos(s / (1 + s) * math.pi / 2) ** 2
    value = math.cos((t + s) / (1 + s) * math.pi / 2) ** 2 / start
    return min(max(value, 0.0001), 0.9999)


def sampled(
    net: StageC, x: Array, predicted: Array, t: float, before: float, drawn: Array, last: bool
) -> Array:
    """A step of DDPM: x0, then x at the time `before` with new noise."""
    bug = net.bug
    now, then = alpha_cumprod(t, bug), alpha_cumprod(before, bug)
    a, b, a_prev, b_prev = (np.float32(y**0.5) for y in (now, 1 - now, then, 1 - then))
    x0 = net.tap("x0", (x - b * predicted) / a)
    variance = (1 - then) / (1 - now) * (1 - now / then)
    kept = np.float32((1 - then - variance) ** 0.5)
    if bug == "direction_ignores_noise":
        kept = b_prev
    y = a_prev * x0 + kept * predicted
    return net.r(y if last else y + np.float32(variance**0.5) * drawn)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = StageC(converted(checkpoint(folder, "prior"), bug), bug, dtype)
    r = net.r
    text, pooled = r(value("pipeline/prompt_embeds")), r(value("pipeline/prompt_embeds_pooled"))
    image = r(value("pipeline/image_embeds"))
    images = np.concatenate([image, image if bug == "negative_has_image" else 0 * image])
    x = r(value("pipeline/noise").transpose(0, 2, 3, 1))
    number = STEPS + 2 if bug == "steps_off_by_one" else STEPS + 1
    times = torch.linspace(1, 0, number).numpy()[: STEPS + 1]  # NumPy's rounds in another way
    kept = {k: v.astype(dtype) for k, v in net.p.items()} if weights else None
    blocks = ("clip_txt", "clip_txt_pooled", "clip_img", "noise", "r", "r_embed", "clip_norm")
    blocks += ("embedding.norm", "down.?.??", "downscale.resized", "up.?.??", "upscale", "clf")
    blocks += ("guided", "x0", "x")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("r", times, kind="schedule")
        net.tap("clip_txt", text, kind="input")
        net.tap("clip_txt_pooled", pooled, kind="input")
        net.tap("clip_img", images, kind="input")
        net.tap("noise", x, kind="input")
        for i in range(STEPS):
            taps.set_step(i)
            t, before = times[i : i + 2]
            ratio = r(np.full(2, t))
            both = net(np.concatenate([x, x]), ratio, text, pooled, images)
            cond, uncond = both[:1], both[1:]
            if bug == "guidance_chunks_exchanged":
                cond, uncond = uncond, cond
            guided = net.tap("guided", r(uncond + np.float32(GUIDANCE) * (cond - uncond)))
            drawn = r(value("pipeline/step_noise", step=i)).reshape(1, CHANNELS, ROWS, COLUMNS)
            drawn = net.tap("drawn", drawn.transpose(0, 2, 3, 1), kind="input")
            x = sampled(net, x, guided, float(ratio[0]), float(before), drawn, i == STEPS - 1)
            net.tap("x", x)


NO_COUNTERPART: tuple[str, ...] = (
    r"^x0$",  # the reference steps from one sample to the next without it
)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos"
SCHEDULE = r"schedule|sigma|timestep|alpha"
BUGS = (
    Bug(
        "in_proj_order",
        "The fused matrix of attention in up blocks has the order q, v, k.",
        (LOADED, SWAPPED, r"values?\b.*keys?\b|keys?\b.*values?\b|\bqkv\b"),
        "weights",
    ),
    Bug(
        "kernel_rows_columns",
        "Rows and columns of the depthwise kernels are exchanged on loading.",
        (LOADED, SWAPPED, r"layout|\bax[ei]s\b|rows?\b|column|kernel"),
        "weights",
    ),
    Bug(
        "grn_gamma_beta",
        "Gamma and beta of the global response norms are exchanged.",
        (LOADED, SWAPPED, r"gamma.*beta|beta.*gamma"),
        "weights",
    ),
    Bug(
        "mapper_crp_left_out",
        "The timestep blocks' matrix and bias for crp are left out: its embedding is not zero.",
        (LOADED, r"\bcrp\b|zero|missing|left out|omit|\bbias"),
        "weights",
    ),
    Bug(
        "up_block_loaded_twice",
        "The second convolution block of the first up level has the weights of the first.",
        (LOADED, r"(another|other|wrong|previous) (layer|block)|dupl|index|twice"),
        "weights",
    ),
    Bug(
        "negative_has_image",
        "The negative half of the batch has the image's embedding, not zeros.",
        (r"zero", r"image|\bclip_img\b|\bclip_image", r"uncond|negative"),
        "inputs",
    ),
    Bug(
        "steps_off_by_one",
        "The times are spaced for one step more, so the last time is not 0.",
        (r"off.by.one|spac|linspace|terminal|\bend(s|ing)?\b|\blast\b|\bfinal\b", SCHEDULE),
        "schedule",
    ),
    Bug(
        "cosine_offset_missing",
        "The cosine schedule lacks its offset of 0.008.",
        (r"offset|0\.008|cosine", SCHEDULE, r"coefficient|variance|noise level|\bsnr\b"),
    ),
    Bug(
        "pooled_tokens_interleaved",
        "The projections of pooled text and image are split into tokens by the wrong axis.",
        (r"layout|\bax[ei]s\b|reshap|interleav|\bview\b|split", SWAPPED),
    ),
    Bug(
        "clip_norm_left_out",
        "The norm of the condition's tokens is left out.",
        (r"\bnorm(ali[sz]\w*|ed|s)?\b|layer.?norm|clip_norm",),
    ),
    Bug(
        "r_frequencies_of_half",
        "Frequencies of the time's sinusoid divide by half, not by half - 1.",
        (
            r"frequenc|exponent|\bbase\b|wavelength|\bperiod|downscale_freq_shift",
            r"divi(de|sor)|denominator|half",
        ),
    ),
    Bug(
        "r_cosine_first",
        "Sinusoids have cosines before sines.",
        (r"\bsin(e|es)?\b|\bcos(ine|ines)?\b|flip_sin", SWAPPED, r"halves"),
    ),
    Bug(
        "sca_is_ratio",
        "The condition sca is the time, not zero.",
        (r"\bsca\b|condition|zero", r"embedding of (the )?time"),
    ),
    Bug(
        "timestep_shift_first",
        "Timestep blocks take the first half as shift and the second as scale.",
        (r"shift.*scale|scale.*shift|chunk|split|\bhal(f|ves)\b", SWAPPED),
    ),
    Bug(
        "norm_before_depthwise",
        "Convolution blocks norm before the depthwise convolution, not after it.",
        (r"norm\w*.*(convol|depthwise)|(convol|depthwise).*norm", SWAPPED, r"\b(before|after)\b"),
    ),
    Bug(
        "depthwise_flipped",
        "The depthwise kernels are flipped: a true convolution, not a correlation.",
        (r"flip|mirror|revers|rotat|180|correlation|kernel\w* (order|orientation)",),
    ),
    Bug(
        "gelu_tanh",
        "GELU is the approximation with tanh, not exact.",
        (r"gelu|\berf\b|tanh|activation|approximat",),
    ),
    Bug(
        "grn_mean_over_batch",
        "The global response norm divides by the mean over batch and channels, not channels.",
        (r"batch|\bax[ei]s\b|\bdim(s|ension)?\b|\bmean\b", r"response|\bgrn\b|normali[sz]"),
    ),
    Bug(
        "skip_concatenated_first",
        "The up level's first block joins the skip before its own channels, not after.",
        (r"concat|\bcat\b|join", SWAPPED),
    ),
    Bug(
        "skip_before_blocks",
        "The skip is the first level's input, from before its blocks.",
        (
            r"\bskip|shortcut|residual|level_outputs",
            r"(level|block|layer)'?s? (own )?input|before (the|its) blocks|earlier",
        ),
    ),
    Bug(
        "kv_mapper_without_silu",
        "The condition's tokens lack the SiLU before their projection.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "self_tokens_not_normed",
        "Attention's own tokens, as keys and values, are not normed.",
        (r"norm", r"(block|layer)'?s? (own )?input|input of (the )?(block|layer)"),
    ),
    Bug(
        "image_tokens_left_out",
        "Self-attention is left out: keys and values are only those of the condition's tokens.",
        (
            r"self.?attention|self_attn|concat|cross.?attention",
            r"(fewer|some|missing) (keys|tokens)|keys and values|mask|number of (keys|tokens)",
            r"(own|image|latent)\w* tokens",
        ),
    ),
    Bug(
        "attention_columns_first",
        "Attention's result is put back with columns before rows.",
        (r"\bax[ei]s\b|rows?\b|column|height|width|spatial", SWAPPED, r"reshap|layout|flatten"),
    ),
    Bug(
        "downscale_corners_not_aligned",
        "The bilinear downscaling does not align corners.",
        (r"align|corner|interpol|bilinear|resiz|resampl|downs(cal|ampl)|half.?pixel|grid",),
    ),
    Bug(
        "upscale_nearest",
        "The upscaling takes the nearest value, not a bilinear one.",
        (r"nearest|interpol|bilinear|resiz|resampl|ups(cal|ampl)|align|corner",),
    ),
    Bug(
        "guidance_chunks_exchanged",
        "The halves of the batch are exchanged in guidance: the negative prompt is the prompt.",
        (r"guid|\bcfg\b|\buncond|negative", SWAPPED, r"halves|chunk"),
    ),
    Bug(
        "direction_ignores_noise",
        "The step keeps the whole predicted noise, though it adds new noise too.",
        (
            r"\bddpm\b|\bddim\b|posterior|variance|stochastic|ancestral|\beta\b",
            r"(new|added|fresh|predicted|step) noise|noise (term|scale|level|std)",
            r"coefficient|sampler|solver|\bstep of the (schedul|sampl)",
        ),
    ),
)
