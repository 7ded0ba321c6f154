"""Kandinsky 3's U-Net in NumPy, with channels last and kernels (out, rows, columns, in) as in MLX.

The structure and the names of weights are those of the authors' repository (ai-forever/Kandinsky-3,
kandinsky3/model); diffusers' Kandinsky3UNet is the reference. Each step calls the network once,
with the negative prompt first in the batch, and ends with a step of DDIM without noise.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, Kandinsky3UNet

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

NAME = "kandinsky3"
LEVELS, LAYERS, GROUPS, HEAD = (16, 24, 32, 40), 2, 2, 8
CHANNELS, FIRST, TIME, TEXT, CONTEXT = 4, 8, 48, 28, 24
ROWS, COLUMNS, TOKENS = 16, 24, 8
VALID = (3, 7)  # tokens of the negative prompt and of the prompt
TRAINED, STEPS, OFFSET, GUIDANCE, CLIP = 1000, 3, 1, 1.5, 2.0
DEEPEST = len(LEVELS) - 1


def reference(folder: Path, dtype: str) -> None:
    """The loop of Kandinsky3Pipeline for one image, from embeddings to latents, with DDIM."""
    config: dict[str, Any] = dict(in_channels=CHANNELS, time_embedding_dim=TIME, groups=GROUPS)
    config |= dict(attention_head_dim=HEAD, layers_per_block=LAYERS, block_out_channels=LEVELS)
    config |= dict(cross_attention_dim=CONTEXT, encoder_hid_dim=TEXT)
    model = randomised(lambda: Kandinsky3UNet(**config), 91)
    for name, parameter in model.named_parameters():
        if ".to_" in name:
            parameter.mul_(2)  # each attention matters
        if name.endswith(("blocks.3.projection.weight", "feed_forward.2.weight")):
            parameter.mul_(0.5)  # branches are small beside the shortcuts, as in a trained network
        if name.startswith("conv_out"):
            parameter.mul_(0.1)  # a step does not enlarge rounding
    model = saved(model, folder, "unet", dtype)
    options: dict[str, Any] = dict(clip_sample_range=CLIP, set_alpha_to_one=False)
    scheduler: Any = DDIMScheduler(
        beta_schedule="squaredcos_cap_v2",
        steps_offset=OFFSET,
        timestep_spacing="leading",
        **options,
    )
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="unet", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        scheduler.set_timesteps(STEPS)
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/alphas_cumprod", scheduler.alphas_cumprod, kind="schedule")
        mask = (torch.arange(TOKENS) < torch.tensor(VALID)[:, None]).float()
        features = noise(21, 2, TOKENS, TEXT).to(model.dtype)
        embeds = features * mask[..., None].to(model.dtype)
        latents = noise(22, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/text_features", features, kind="input")
        recorder.record("pipeline/prompt_embeds", embeds, kind="input")
        recorder.record("pipeline/attention_mask", mask, kind="input")
        recorder.record("pipeline/noise", latents, kind="input")
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            both = torch.cat([latents, latents])
            predicted = model(both, t, embeds, mask, return_dict=False)[0]
            uncond, cond = predicted.chunk(2)
            predicted = (GUIDANCE + 1) * cond - GUIDANCE * uncond
            recorder.record("pipeline/noise_pred", predicted)
            latents = scheduler.step(predicted, t, latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the names of the original; matrices stay (out, in)."""
    new: dict[str, Array] = {}

    def put(name: str, old: str) -> None:
        for end in ("weight", "bias"):
            if f"{old}.{end}" in w:
                new[f"{name}.{end}"] = w[f"{old}.{end}"]
        kernel = w.get(f"{old}.weight")
        if kernel is None or kernel.ndim != 4:
            return
        if name.endswith("up_sample"):  # of a transposed convolution: (in, out, rows, columns)
            order = (0, 2, 3, 1) if bug == "up_kernel_in_for_out" else (1, 2, 3, 0)
        else:
            order = (0, 3, 2, 1) if bug == "kernel_columns_for_rows" else (0, 2, 3, 1)
        new[f"{name}.weight"] = kernel.transpose(order).copy()

    def attention(name: str, old: str) -> None:
        for own, other in (("query", "q"), ("key", "k"), ("value", "v")):
            put(f"{name}.to_{own}", f"{old}.to_{other}")
        put(f"{name}.output_layer", f"{old}.to_out.0")

    def attention_block(name: str, old: str) -> None:
        for norm in ("in_norm", "out_norm"):
            put(f"{name}.{norm}.context_mlp.1", f"{old}.{norm}.context_mlp.1")
        attention(f"{name}.attention", f"{old}.attention")
        put(f"{name}.feed_forward.0", f"{old}.feed_forward.0")
        put(f"{name}.feed_forward.2", f"{old}.feed_forward.2")

    def resnet(name: str, old: str) -> None:
        for j in range(4):
            block = f"resnet_blocks.{j}"
            put(
                f"{name}.{block}.group_norm.context_mlp.1",
                f"{old}.{block}.group_norm.context_mlp.1",
            )
            for part in ("up_sample", "projection", "down_sample"):
                put(f"{name}.{block}.{part}", f"{old}.{block}.{part}")
        for part in ("shortcut_up_sample", "shortcut_projection", "shortcut_down_sample"):
            put(f"{name}.{part}", f"{old}.{part}")

    put("to_time_embed.1", "time_embedding.linear_1")
    put("to_time_embed.3", "time_embedding.linear_2")
    attention("feature_pooling.attention", "add_time_condition.attention")
    put("projection_lin", "encoder_hid_proj.projection_linear")
    put("projection_ln", "encoder_hid_proj.projection_norm")
    put("in_layer", "conv_in")
    for side in ("down", "up"):
        for level in range(len(LEVELS)):
            name, old = f"{side}_samples.{level}", f"{side}_blocks.{level}"
            if f"{old}.attentions.0.attention.to_q.weight" in w:
                attention_block(f"{name}.self_attention_block", f"{old}.attentions.0")
            for i in range(LAYERS):
                rows = f"{name}.resnet_attn_blocks.{i}"
                resnet(f"{rows}.0", f"{old}.resnets_in.{i}")
                if f"{old}.attentions.{i + 1}.attention.to_q.weight" in w:
                    attention_block(f"{rows}.1", f"{old}.attentions.{i + 1}")
                resnet(f"{rows}.2", f"{old}.resnets_out.{i}")
    put("out_layer.0", "conv_norm_out")
    put("out_layer.2", "conv_out")
    if bug == "middle_blocks_exchanged":
        stem = "down_samples.1.resnet_attn_blocks.0.2.resnet_blocks"
        for key in [k for k in new if k.startswith(f"{stem}.1.")]:
            other = key.replace(f"{stem}.1.", f"{stem}.2.")
            new[key], new[other] = new[other], new[key]
    if bug == "second_cross_is_first":
        stem = "down_samples.2.resnet_attn_blocks"
        for key in [k for k in new if k.startswith(f"{stem}.0.1.attention")]:
            new[key.replace(f"{stem}.0.1", f"{stem}.1.1")] = new[key]
    if bug == "shortcut_bias_missing":
        key = "up_samples.3.resnet_attn_blocks.0.0.shortcut_up_sample.bias"
        new[key] = np.zeros_like(new[key])
    return new


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3)))


class UNet:
    """The forward pass; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, kind: str = "activation") -> Array:
        taps.tap(name, x.astype(self.dtype), kind=kind)
        return x

    def linear(self, name: str, x: Array) -> Array:
        """Of the last axis; a kernel of size 1 is a matrix."""
        weight = self.p[f"{name}.weight"]
        y = x @ weight.reshape(len(weight), -1).T
        if f"{name}.bias" in self.p:
            y = y + self.p[f"{name}.bias"]
        return self.tap(name, self.r(y))

    def conv(self, name: str, x: Array) -> Array:
        """A kernel of size 1 or 3; the result has the size of `x`."""
        weight = self.p[f"{name}.weight"]
        if weight.shape[1] == 1:
            return self.linear(name, x)
        x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))
        windows = windows.transpose(0, 1, 2, 4, 5, 3).reshape(*windows.shape[:3], -1)
        return self.linear(name, windows)

    def half(self, name: str, x: Array) -> Array:
        """A kernel of size 2 in steps of 2."""
        b, rows, columns, n = x.shape
        x = x.reshape(b, rows // 2, 2, columns // 2, 2, n).transpose(0, 1, 3, 2, 4, 5)
        return self.linear(name, x.reshape(b, rows // 2, columns // 2, -1))

    def double(self, name: str, x: Array) -> Array:
        """A transposed kernel of size 2 in steps of 2."""
        b, rows, columns, n = x.shape
        y = np.einsum("bijc,ohwc->bihjwo", x, self.p[f"{name}.weight"])
        y = y.reshape(b, 2 * rows, 2 * columns, n) + self.p[f"{name}.bias"]
        return self.tap(name, self.r(y))

    def group_norm(self, x: Array) -> Array:
        eps = np.float32(1e-3 if self.bug == "group_norm_eps_of_keras" else 1e-5)
        b, n = len(x), x.shape[-1]
        if self.bug == "groups_interleaved":
            shape, order = (b, -1, n // GROUPS, GROUPS), (0, 3, 1, 2)
        else:
            shape, order = (b, -1, GROUPS, n // GROUPS), (0, 2, 1, 3)
        y = x.reshape(shape).transpose(order)
        kept, y = y.shape, y.reshape(b, GROUPS, -1)
        y = y - y.mean(-1, keepdims=True)
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + eps)
        return y.reshape(kept).transpose(np.argsort(order)).reshape(x.shape)

    def conditional_norm(self, name: str, x: Array, time: Array) -> Array:
        y = self.linear(f"{name}.context_mlp.1", self.r(silu(time)))[:, None, None]
        scale, shift = np.split(y, 2, -1)
        if self.bug == "shift_before_scale":
            scale, shift = shift, scale
        y = self.r(self.group_norm(x))
        return self.tap(name, self.r(self.r(y * self.r(scale + 1)) + shift))

    def attention(self, name: str, x: Array, context: Array, mask: Array | None) -> Array:
        """Of (batch, tokens, channels); `mask` is added to the scores."""
        q = self.linear(f"{name}.to_query", x)
        k, v = self.linear(f"{name}.to_key", context), self.linear(f"{name}.to_value", context)
        width = q.shape[-1]
        q, k, v = (y.reshape(*y.shape[:2], -1, HEAD) for y in (q, k, v))
        over = width if self.bug == "attention_scale_of_width" else HEAD
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * np.float32(over**-0.5)
        if mask is not None:
            scores = scores + mask[:, None, None]
        e = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), v)
        y = self.tap(f"{name}.heads", self.r(y).reshape(*y.shape[:2], width))
        return self.linear(f"{name}.output_layer", y)

    def attention_block(
        self, name: str, x: Array, time: Array, context: Array | None, mask: Array | None
    ) -> Array:
        """Attention to the context, or of all places to each other; then an MLP."""
        h = self.conditional_norm(f"{name}.in_norm", x, time)
        h = h.reshape(len(x), -1, x.shape[-1])
        h = self.attention(f"{name}.attention", h, h if context is None else context, mask)
        x = self.tap(f"{name}.attended", self.r(x + h.reshape(x.shape)))
        h = self.conditional_norm(f"{name}.out_norm", x, time)
        h = self.linear(f"{name}.feed_forward.0", h)
        h = self.r(gelu(h) if self.bug == "feed_forward_gelu" else silu(h))
        h = self.linear(f"{name}.feed_forward.2", self.tap(f"{name}.feed_forward.1", h))
        return self.tap(name, self.r(x + h))

    def resnet(self, name: str, x: Array, time: Array) -> Array:
        h = x
        for j in range(4):
            block = f"{name}.resnet_blocks.{j}"
            h = self.conditional_norm(f"{block}.group_norm", h, time)
            h = self.r(silu(h))
            if f"{block}.up_sample.weight" in self.p:
                h = self.double(f"{block}.up_sample", h)
            steps = [(f"{block}.projection", self.conv)]
            if f"{block}.down_sample.weight" in self.p:
                steps.append((f"{block}.down_sample", self.half))
            if self.bug == "down_sample_first":
                steps.reverse()
            for part, apply in steps:
                h = apply(part, h)
        if f"{name}.shortcut_up_sample.weight" in self.p:
            x = self.double(f"{name}.shortcut_up_sample", x)
        if f"{name}.shortcut_projection.weight" in self.p:
            x = self.conv(f"{name}.shortcut_projection", x)
        if f"{name}.shortcut_down_sample.weight" in self.p:
            x = self.half(f"{name}.shortcut_down_sample", x)
        return self.tap(name, self.r(x + h))

    def rows(self, name: str, x: Array, time: Array, context: Array, mask: Array) -> Array:
        for i in range(LAYERS):
            part = f"{name}.resnet_attn_blocks.{i}"
            x = self.resnet(f"{part}.0", x, time)
            if f"{part}.1.attention.to_query.weight" in self.p:
                x = self.attention_block(f"{part}.1", x, time, context, mask)
            x = self.resnet(f"{part}.2", x, time)
        return x

    def down_sample(self, i: int, x: Array, time: Array, context: Array, mask: Array) -> Array:
        name = f"down_samples.{i}"
        if i > 0:
            x = self.attention_block(f"{name}.self_attention_block", x, time, None, None)
        return self.tap(name, self.rows(name, x, time, context, mask))

    def up_sample(self, i: int, x: Array, time: Array, context: Array, mask: Array) -> Array:
        name = f"up_samples.{i}"
        x = self.rows(name, x, time, context, mask)
        if i < DEEPEST:
            x = self.attention_block(f"{name}.self_attention_block", x, time, None, None)
        return self.tap(name, x)

    def time_embed(self, t: float) -> Array:
        half = FIRST // 2
        last = half if self.bug == "sinusoid_without_endpoint" else half - 1
        angles = np.float32(t) * torch.exp(-math.log(10000) * torch.arange(half) / last).numpy()
        parts = [np.sin(angles), np.cos(angles)]
        if self.bug == "cosines_before_sines":
            parts.reverse()
        x = self.tap("to_time_embed.0", self.r(np.stack([np.concatenate(parts)] * 2)))
        x = self.linear("to_time_embed.1", x)
        x = self.tap("to_time_embed.2", self.r(silu(x)))
        return self.linear("to_time_embed.3", x)

    def text(self, context: Array) -> Array:
        x = self.linear("projection_lin", context)
        y = x - x.mean(-1, keepdims=True)
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(1e-5))
        y = y * self.p["projection_ln.weight"] + self.p["projection_ln.bias"]
        return self.tap("projection_ln", self.r(y))

    def feature_pooling(self, time: Array, context: Array, valid: Array, mask: Array) -> Array:
        """The time plus attention of the mean token, which counts the padding, to all tokens."""
        if self.bug == "pooled_mean_of_valid":
            mean = (context * valid[..., None]).sum(1, keepdims=True)
            mean = mean / valid.sum(1)[:, None, None]
        else:
            mean = context.mean(1, keepdims=True)
        mean = self.tap("feature_pooling.mean", self.r(mean))
        y = self.attention("feature_pooling.attention", mean, context, mask)
        return self.tap("feature_pooling", self.r(time + y[:, 0]))

    def __call__(self, x: Array, t: float, context: Array, valid: Array) -> Array:
        mask = self.r((1 - valid) * -10000)
        if self.bug == "mask_inverted":
            mask = self.r(valid * -10000)
        self.tap("context_mask", mask)
        context = self.text(context)
        time = self.feature_pooling(self.time_embed(t), context, valid, mask)
        x = self.conv("in_layer", x)
        skips: list[Array] = []
        for i in range(len(LEVELS)):
            x = self.down_sample(i, x, time, context, mask)
            skips.append(x)
        skips.pop()  # that of the deepest level goes on as it is
        for i in range(len(LEVELS)):
            if i > 0:
                pair = [x, skips.pop()]
                x = np.concatenate(pair[::-1] if self.bug == "skip_before_input" else pair, -1)
            x = self.up_sample(i, x, time, context, mask)
        y = self.r(self.group_norm(x) * self.p["out_layer.0.weight"] + self.p["out_layer.0.bias"])
        y = self.tap("out_layer.0", y)
        if self.bug != "out_layer_without_silu":
            y = self.tap("out_layer.1", self.r(silu(y)))
        return self.conv("out_layer.2", y)


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Timesteps, and the product of alphas at each trained timestep."""
    times = (np.arange(STEPS) * (TRAINED // STEPS))[::-1] + OFFSET
    if bug == "steps_offset_missing":
        times = times - OFFSET
    if bug == "betas_linear":
        betas = np.linspace(1e-4, 0.02, TRAINED)
    else:
        bars = np.cos((np.arange(TRAINED + 1) / TRAINED + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = np.minimum(1 - bars[1:] / bars[:-1], 0.999)
    alphas = np.cumprod(1 - betas.astype(np.float32), dtype=np.float32)
    return times.astype(np.int64), alphas


def ddim(x: Array, predicted: Array, now: Any, after: np.float32, net: UNet) -> Array:
    """From the product of alphas `now` to `after`."""
    r, one = net.r, np.float32(1)
    start = r(r(x - r(np.sqrt(one - now) * predicted)) / np.sqrt(now))
    start = net.tap("x_start", np.clip(start, -CLIP, CLIP))
    if net.bug == "noise_of_clipped_start":
        predicted = r(r(x - r(np.sqrt(now) * start)) / np.sqrt(one - now))
    return r(r(np.sqrt(after) * start) + r(np.sqrt(one - after) * predicted))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = UNet(converted(checkpoint(folder, "unet"), bug), bug, dtype)
    r = net.r
    valid = value("pipeline/attention_mask")
    context = r(value("pipeline/text_features"))
    if bug != "padding_features_kept":
        context = context * valid[..., None]
    x = r(value("pipeline/noise").transpose(0, 2, 3, 1))
    times, alphas = schedule(bug)
    kept = {k: v.astype(dtype) for k, v in net.p.items()} if weights else None
    blocks = ("context", "valid", "noise", "timesteps", "alphas_cumprod", "feature_pooling")
    blocks += ("projection_ln", "in_layer", "down_samples.?", "up_samples.?", "out_layer.2")
    blocks += ("eps", "latent")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("timesteps", times, kind="schedule")
        taps.tap("alphas_cumprod", alphas, kind="schedule")
        net.tap("context", context, kind="input")
        net.tap("valid", valid, kind="input")
        net.tap("noise", x, kind="input")
        for i, t in enumerate(times):
            taps.set_step(i)
            uncond, cond = np.split(net(np.concatenate([x, x]), float(t), context, valid), 2)
            scale = GUIDANCE - 1 if bug == "guidance_of_other_models" else GUIDANCE
            eps = net.tap("eps", r(r((scale + 1) * cond) - r(scale * uncond)))
            before = int(t) - TRAINED // STEPS
            x = net.tap("latent", ddim(x, eps, alphas[t], alphas[max(before, 0)], net))


NO_COUNTERPART: tuple[str, ...] = (
    r"^context_mask$",  # the reference has it for each head
    r"^x_start$",
)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SCHEDULE = r"schedule|sigma|timestep|alpha|beta"
BUGS = (
    Bug(
        "up_kernel_in_for_out",
        "Kernels of transposed convolutions have inputs and outputs exchanged.",
        (LOADED, r"layout|kernel|transpos|\bax[ei]s\b|inputs?\b.*outputs?\b"),
        "weights",
    ),
    Bug(
        "kernel_columns_for_rows",
        "Kernels of convolutions have rows and columns exchanged.",
        (LOADED, r"layout|kernel|transpos|\bax[ei]s\b|\brows?\b|column"),
        "weights",
    ),
    Bug(
        "middle_blocks_exchanged",
        "Two middle blocks of a ResNet at down level 1 have each other's weights.",
        (LOADED, r"(another|other|wrong|next|previous) (block|layer)|index"),
        "weights",
    ),
    Bug(
        "second_cross_is_first",
        "Down level 2's second cross-attention has the weights of its first.",
        (LOADED, r"dupl|(another|other|wrong|first|previous) (block|layer|attention)|index|same"),
        "weights",
    ),
    Bug(
        "shortcut_bias_missing",
        "The last level's transposed convolution of the shortcut has a bias of zeros.",
        (LOADED, r"\bbias|zero"),
        "weights",
    ),
    Bug(
        "padding_features_kept",
        "Text features of padding are not set to zero.",
        (
            r"padd|mask|\bzeroe?(d|s)?\b",
            r"(text|prompt|context|token)\w*.*(input|feature|embed)",
            r"(input|feature|embed)\w*.*(text|prompt|context|token)",
        ),
        "inputs",
    ),
    Bug(
        "mask_inverted",
        "The text's mask is inverted: padding is attended to, and tokens are not.",
        (r"mask|padd|(all|fewer|other|wrong) (keys|tokens)|ignor\w+ (some )?(keys|tokens)",),
    ),
    Bug(
        "sinusoid_without_endpoint",
        "Exponents of the timestep's sinusoid divide by half the channels, not by one less.",
        (
            r"frequenc|exponent|wavelength|\bperiod|sinusoid|downscale|freq_shift",
            r"divi(de|sor)|denominator|off.by.one|half - 1|endpoint",
        ),
    ),
    Bug(
        "cosines_before_sines",
        "The timestep's sinusoid has its cosines first.",
        (r"\bcos|\bsin\b|\bsines?\b|flip|halves.*(swap|exchang|order)",),
    ),
    Bug(
        "pooled_mean_of_valid",
        "The query of the pooling is the mean of the valid tokens only, not of all.",
        (
            r"mask|padd|\bvalid",
            r"\bmean\b|averag|\bpool",
            r"(all|fewer|some) (the )?tokens",
        ),
    ),
    Bug(
        "shift_before_scale",
        "Conditional norms take the first half as shift and the second as scale.",
        (r"shift.*scale|scale.*shift|chunk|split|halves",),
    ),
    Bug(
        "groups_interleaved",
        "A group of a norm is each second channel, not neighbouring channels.",
        (r"\bgroups?\b|interleav|strid|every|neighbou?r|contiguous|reshap|\bax[ei]s\b",),
    ),
    Bug(
        "group_norm_eps_of_keras",
        "Group norms have eps 1e-3, not 1e-5.",
        (r"\beps(ilon)?\b|1e-0?[35]",),
    ),
    Bug(
        "attention_scale_of_width",
        "Attention divides by the root of the whole width, not of a head's.",
        (
            r"\bscal(e|ed|es|ing)\b|\broot\b|sqrt|temperature|softmax factor",
            r"head.?(dim|size|width)",
        ),
    ),
    Bug(
        "feed_forward_gelu",
        "MLPs of attention blocks have GELU, not SiLU.",
        (r"gelu|silu|swish|activation|non.?linear",),
    ),
    Bug(
        "down_sample_first",
        "A ResNet's block halves the size before its convolution, not after it.",
        (
            r"down.?sampl|strid|halv|resolution|resiz",
            r"order of.*conv|conv\w*.*(order|swap|exchang)",
        ),
    ),
    Bug(
        "skip_before_input",
        "The skip connection is put before the input of a level, not after it.",
        (r"\bskip|concat|joined", r"channels?\b.*(order|swap|exchang)"),
    ),
    Bug(
        "out_layer_without_silu",
        "The last convolution's input lacks SiLU.",
        (r"silu|swish|activation|non.?linear",),
    ),
    Bug(
        "steps_offset_missing",
        "Timesteps lack the offset of 1.",
        (r"offset|off.by.one|\bone (less|too)|minus (1|one)", SCHEDULE),
        "schedule",
    ),
    Bug(
        "betas_linear",
        "Betas are linear; those of the reference follow a cosine.",
        (r"linear|cosine|squaredcos", SCHEDULE),
        "schedule",
    ),
    Bug(
        "guidance_of_other_models",
        "Guidance is the usual one, whose scale counts from the negative prompt: one less here.",
        (
            r"guid|\bcfg\b|classifier.free",
            r"scale (\+|-|plus|minus) (1|one)|(starts|based) (from|on)",
        ),
    ),
    Bug(
        "noise_of_clipped_start",
        "DDIM's noise is computed again from the clipped image.",
        (
            r"clip|clamp",
            r"ddim|sampler|solver|\bstep of the (schedul|sampl)",
            r"(noise|eps(ilon)?\b|direction).*(again|from the (start|image|x_?0)|recomput|rederiv)",
        ),
    ),
)
