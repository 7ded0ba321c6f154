"""ControlNet and UNet of Stable Diffusion 1.5's type in MLX: one guided DDIM step.

Channels last, camelCase names with slashes, fused projections. Recorded are the places where a
parameter is used, the blocks, and the arithmetic after the networks.
"""

import math
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import ControlNetModel, DDIMScheduler, UNet2DConditionModel

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
from lydite.trace.taps import tap
from lydite.trace.torch_capture import record_modules

NAME = "controlnet"
CHANNELS, CONTEXT, TOKENS, GROUPS, HEADS = (8, 16), 12, 5, 4, 2
HEIGHT, WIDTH, SCALE, GUIDANCE = 8, 6, 0.8, 5.0


def reference(folder: Path, dtype: str) -> None:
    """One step: both prompts in a batch, the negative one first."""
    common: dict[str, Any] = dict(block_out_channels=CHANNELS, layers_per_block=1, in_channels=4)
    common |= dict(cross_attention_dim=CONTEXT, attention_head_dim=HEADS, norm_num_groups=GROUPS)
    common |= dict(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"))
    unet = randomised(
        lambda: UNet2DConditionModel(
            **common,
            sample_size=8,
            out_channels=4,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        13,
    )
    control = randomised(
        lambda: ControlNetModel(**common, conditioning_embedding_out_channels=(4, 6)), 14
    )
    unet = saved(unet, folder, "unet", dtype)
    control = saved(control, folder, "controlnet", dtype)
    betas: dict[str, Any] = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    scheduler: Any = DDIMScheduler(
        **betas, clip_sample=False, set_alpha_to_one=False, steps_offset=1
    )
    scheduler.set_timesteps(4)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, control, scope="controlnet", weights=True),
        record_modules(recorder, unet, scope="unet", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        latents = noise(1, 1, 4, HEIGHT, WIDTH).to(unet.dtype)
        text = noise(2, 2, TOKENS, CONTEXT).to(unet.dtype)
        image = torch.sigmoid(noise(3, 1, 3, 2 * HEIGHT, 2 * WIDTH)).to(unet.dtype)
        recorder.record("pipeline/noise", latents, kind="input")
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/control_image", image, kind="input")
        t, both = scheduler.timesteps[1], torch.cat([latents] * 2)
        images = torch.cat([image] * 2)
        down, mid = control(both, t, text, images, conditioning_scale=SCALE, return_dict=False)
        out = unet(
            both,
            t,
            text,
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid,
        ).sample
        negative, positive = out.chunk(2)
        guided = recorder.record("pipeline/guided", negative + GUIDANCE * (positive - negative))
        recorder.record("pipeline/latents", scheduler.step(guided, t, latents).prev_sample)


RULES = (
    (r"controlnet_down_blocks\.(\d)", r"zero\1"),
    (r"controlnet_mid_block", "zeroMid"),
    (r"(down|up)_blocks\.(\d+)\.", r"\1\2/"),
    (r"mid_block\.", "mid/"),
    (r"resnets\.(\d)\.", r"res\1/"),
    (r"attentions\.(\d)\.", r"attn\1/"),
    (r"transformer_blocks\.0\.", ""),
    (r"attn1\.", "selfAttn/"),
    (r"attn2\.", "crossAttn/"),
    (r"(attn\d/)norm1", r"\1lnSelf"),
    (r"(attn\d/)norm2", r"\1lnCross"),
    (r"(attn\d/)norm3", r"\1lnMlp"),
    (r"ff\.net\.0\.proj", "mlpIn"),
    (r"ff\.net\.2", "mlpOut"),
    (r"to_out\.0", "out"),
    (r"(norm|conv)1", r"\1A"),
    (r"(norm|conv)2", r"\1B"),
    (r"time_emb_proj", "timeBias"),
    (r"conv_shortcut", "shortcut"),
    (r"(down|up)samplers\.0\.conv", r"\1sample"),
    (r"time_embedding\.linear_(\d)", r"timeMlp\1"),
    (r"controlnet_cond_embedding\.blocks\.(\d)", r"hint/block\1"),
    (r"controlnet_cond_embedding\.conv_(in|out)", r"hint/\1"),
    (r"conv_norm_out", "normOut"),
)


def converted(folder: Path, bug: str | None) -> dict[str, Array]:
    """Both networks' parameters: this port's names, kernels as (out, h, w, in), fused parts."""
    new: dict[str, Array] = {}
    for scope, short in (("controlnet", "ctrl"), ("unet", "unet")):
        for old, value in checkpoint(folder, scope).items():
            name = old
            for pattern, into in RULES:
                name = re.sub(pattern, into, name)
            new[f"{short}/{name}"] = value.transpose(0, 2, 3, 1) if value.ndim == 4 else value
    if bug == "control_stem_of_unet":
        new["ctrl/conv_in.weight"] = new["unet/conv_in.weight"]
    if bug == "kernel_rows_columns":
        new["unet/up1/res0/convB.weight"] = new["unet/up1/res0/convB.weight"].swapaxes(1, 2)
    if bug == "zero_bias_dropped":
        new["ctrl/zero2.bias"] = np.zeros_like(new["ctrl/zero2.bias"])
    if bug == "norms_exchanged":
        a, b = "unet/down0/attn0/lnSelf.weight", "unet/down0/attn0/lnCross.weight"
        new[a], new[b] = new[b], new[a]
    for key in [k for k in new if k.endswith("Attn/to_q.weight")]:
        parts = {x: new.pop(key.replace("to_q", f"to_{x}")) for x in "qkv"}
        base = key.removesuffix("/to_q.weight")
        if base.endswith("selfAttn"):
            new[f"{base}/qkv.weight"] = np.concatenate([parts[x] for x in "qkv"])
        else:
            order = "vk" if bug == "fused_value_first" and base.startswith("unet/mid") else "kv"
            new[f"{base}/query.weight"] = parts["q"]
            new[f"{base}/keyValue.weight"] = np.concatenate([parts[x] for x in order])
    return new


class Networks:
    """Both networks by path; the path of a tap is the path of its parameters."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: mx.Dtype) -> None:
        self.p = {k: mx.array(v).astype(dtype) for k, v in p.items()}
        self.bug, self.dtype = bug, dtype

    def linear(self, path: str, x: mx.array) -> mx.array:
        y = x @ self.p[f"{path}.weight"].T
        skip = self.bug == "out_bias_missing" and path == "unet/down0/attn0/selfAttn/out"
        return tap(path, y + self.p[f"{path}.bias"] if f"{path}.bias" in self.p and not skip else y)

    def conv(self, path: str, x: mx.array, stride: int = 1) -> mx.array:
        w, bug = self.p[f"{path}.weight"], self.bug
        pad = w.shape[1] // 2
        if pad and bug == "padding_edge" and path.endswith("up0/res1/convA"):
            x, pad = mx.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="edge"), 0
        if stride == 2 and bug == "downsample_asymmetric" and path == "unet/down0/downsample":
            x, pad = mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)]), 0
        return tap(path, mx.conv2d(x, w, stride=stride, padding=pad) + self.p[f"{path}.bias"])

    def group_norm(self, path: str, x: mx.array, eps: float) -> mx.array:
        b, h, w, c = x.shape
        groups = 2 if self.bug == "groups_two" and "/res" in path else GROUPS
        if self.bug == "res_norm_eps" and "/res" in path:
            eps = 1e-3
        y = x.astype(mx.float32)
        if self.bug == "groups_strided" and path == "unet/normOut":
            y = y.reshape(b, h * w, c // groups, groups).swapaxes(2, 3)
        else:
            y = y.reshape(b, h * w, groups, c // groups)
        mean = y.mean(axis=(1, 3), keepdims=True)
        var = y.var(axis=(1, 3), keepdims=True, ddof=int(self.bug == "variance_unbiased"))
        y = (y - mean) * mx.rsqrt(var + eps)
        if self.bug == "groups_strided" and path == "unet/normOut":
            y = y.swapaxes(2, 3)
        y = y.reshape(b, h, w, c) * self.p[f"{path}.weight"] + self.p[f"{path}.bias"]
        return tap(path, y.astype(self.dtype))

    def layer_norm(self, path: str, x: mx.array) -> mx.array:
        eps = 1e-2 if self.bug == "layer_norm_eps" else 1e-5
        weight, bias = self.p[f"{path}.weight"], self.p[f"{path}.bias"]
        if self.bug == "layer_norm_no_bias" and path.endswith("mid/attn0/lnMlp"):
            bias = None
        return tap(path, mx.fast.layer_norm(x, weight, bias, eps))

    def time(self, net: str, t: float, batch: int) -> mx.array:
        half = CHANNELS[0] // 2
        shift = 1 if self.bug == "time_freq_shift" else 0
        freqs = np.exp(-math.log(10000) * np.arange(half) / (half - shift)).astype(np.float32)
        a = np.float32(t) * freqs
        parts = (
            [np.sin(a), np.cos(a)]
            if self.bug == f"time_sin_first_{net}"
            else [np.cos(a), np.sin(a)]
        )
        x = mx.array(np.concatenate(parts)[None].repeat(batch, 0)).astype(self.dtype)
        x = self.linear(f"{net}/timeMlp1", x)
        return self.linear(
            f"{net}/timeMlp2", mx.maximum(x, 0) if self.bug == "time_relu" else silu(x)
        )

    def resnet(self, path: str, x: mx.array, emb: mx.array) -> mx.array:
        bug = self.bug
        y = self.conv(f"{path}/convA", silu(self.group_norm(f"{path}/normA", x, 1e-5)))
        bias = self.linear(f"{path}/timeBias", emb if bug == "time_silu_missing" else silu(emb))
        if bug == "time_after_norm" and path == "unet/mid/res0":
            y = self.group_norm(f"{path}/normB", y, 1e-5) + bias[:, None, None]
        else:
            y = (
                y
                if bug == "time_not_added" and path == "unet/up0/res0"
                else y + bias[:, None, None]
            )
            y = self.group_norm(f"{path}/normB", y, 1e-5)
        if bug == "res_f16" and path == "unet/up1/res1":
            y = y.astype(mx.float16).astype(y.dtype)
        y = self.conv(
            f"{path}/convB", y if bug == "res_silu_missing" and "up0/res1" in path else silu(y)
        )
        short = self.conv(f"{path}/shortcut", x) if f"{path}/shortcut.weight" in self.p else x
        if bug == "shortcut_missing" and path == "unet/mid/res1":
            return y
        return (short + y) / (
            math.sqrt(2) if bug == "residual_over_root_two" and "unet" in path else 1
        )

    def attention(self, q: mx.array, k: mx.array, v: mx.array, path: str) -> mx.array:
        bug, (b, _, c) = self.bug, q.shape
        heads = c // HEADS if bug == "head_count_is_head_size" else HEADS

        def split(x: mx.array) -> mx.array:
            if bug == "heads_split_last" and "up1" in path:
                return x.reshape(b, -1, c // heads, heads).transpose(0, 3, 1, 2)
            return x.reshape(b, -1, heads, c // heads).swapaxes(1, 2)

        scale = c**-0.5 if bug == "attention_scale" else (c // heads) ** -0.5
        scores = (split(q) @ split(k).swapaxes(2, 3) * scale).astype(mx.float32)
        y = mx.softmax(scores, axis=-1).astype(v.dtype) @ split(v)
        return self.linear(f"{path}/out", y.swapaxes(1, 2).reshape(b, -1, c))

    def transformer(self, path: str, x: mx.array, context: mx.array) -> mx.array:
        bug, (b, h, w, c) = self.bug, x.shape
        y = self.conv(f"{path}/proj_in", self.group_norm(f"{path}/norm", x, 1e-6))
        y = y.reshape(b, h * w, c)
        n = self.layer_norm(f"{path}/lnSelf", y)
        q, k, v = mx.split(self.linear(f"{path}/selfAttn/qkv", n), 3, axis=-1)
        y = y + self.attention(q, k, v, f"{path}/selfAttn")
        n = self.layer_norm(f"{path}/lnCross", y)
        q = self.linear(f"{path}/crossAttn/query", n)
        if bug == "context_swapped" and path.startswith("ctrl/mid"):
            context = context[::-1]
        if bug == "context_first_tokens":
            context = context[:, : TOKENS - 1]
        k, v = mx.split(self.linear(f"{path}/crossAttn/keyValue", context), 2, axis=-1)
        z = self.attention(q, k, v, f"{path}/crossAttn")
        y = z if bug == "cross_residual_missing" and "up1/attn0" in path else y + z
        n = self.layer_norm(f"{path}/lnMlp", y)
        a, gate = mx.split(self.linear(f"{path}/mlpIn", n), 2, axis=-1)
        if bug == "geglu_halves":
            a, gate = gate, a
        y = y + self.linear(f"{path}/mlpOut", a * gelu(gate, bug))
        if bug == "grid_transposed" and "mid" in path:
            y = y.reshape(b, w, h, c).swapaxes(1, 2)
        y = self.conv(f"{path}/proj_out", y.reshape(b, h, w, c))
        return y if bug == "transformer_residual_missing" and "up1/attn1" in path else x + y

    def encoder(self, net: str, x: mx.array, emb: mx.array, context: mx.array) -> list[mx.array]:
        """The results of the stem and the down blocks, the middle last."""
        results = [x]
        for i in range(2):
            x = self.resnet(f"{net}/down{i}/res0", x, emb)
            x = self.transformer(f"{net}/down{i}/attn0", x, context) if i == 0 else x
            results.append(x)
            if i == 0:
                x = self.conv(f"{net}/down{i}/downsample", x, stride=2)
                results.append(x)
            tap(f"{net}/down{i}", x)
        x = self.resnet(f"{net}/mid/res0", x, emb)
        x = self.transformer(f"{net}/mid/attn0", x, context)
        return [*results, tap(f"{net}/mid", self.resnet(f"{net}/mid/res1", x, emb))]

    def control(self, x: mx.array, t: float, context: mx.array, image: mx.array) -> list[mx.array]:
        bug, emb = self.bug, self.time("ctrl", t, len(x))
        x = self.conv("ctrl/conv_in", x)
        act = (lambda y: mx.maximum(y, 0)) if bug == "hint_relu" else silu
        hint = act(self.conv("ctrl/hint/in", image))
        strides = (2, 1) if bug == "hint_stride_early" else (1, 2)
        hint = act(self.conv("ctrl/hint/block0", hint, strides[0]))
        hint = self.conv("ctrl/hint/block1", hint, strides[1])
        hint = self.conv("ctrl/hint/out", hint if bug == "hint_last_silu" else act(hint))
        x = x if bug == "hint_not_added" else x + hint
        parts = self.encoder("ctrl", x, emb, context)
        names = [*(f"ctrl/zero{i}" for i in range(len(parts) - 1)), "ctrl/zeroMid"]
        results = [self.conv(n, y) for n, y in zip(names, parts, strict=True)]
        scale = 1.0 if bug == "control_scale_missing" else SCALE
        scaled = [y * scale for y in results]
        if bug == "control_scale_not_on_mid":
            scaled[-1] = results[-1]
        if bug == "control_guess_scales":
            scaled = [y * float(s) for y, s in zip(scaled, np.logspace(-1, 0, 5), strict=True)]
        return scaled

    def unet(self, x: mx.array, t: float, context: mx.array, extra: list[mx.array]) -> mx.array:
        bug, emb = self.bug, self.time("unet", t, len(x))
        *skips, x = self.encoder("unet", self.conv("unet/conv_in", x), emb, context)
        *more, mid = extra
        if bug == "control_shifted":
            more = [more[1], more[0], *more[2:]]
        if bug != "control_on_skips_missing":
            skips = [a + b for a, b in zip(skips, more, strict=True)]
        x = x if bug == "control_mid_missing" else x + mid
        for i in range(2):
            for j in range(2):
                skip = skips.pop(0 if bug == "skips_in_order" and (i, j) == (1, 0) else -1)
                parts = [skip, x] if bug == "skip_first" and (i, j) == (1, 1) else [x, skip]
                x = self.resnet(f"unet/up{i}/res{j}", mx.concatenate(parts, axis=-1), emb)
                x = self.transformer(f"unet/up{i}/attn{j}", x, context) if i == 1 else x
            if i == 0:
                if bug == "upsample_bilinear":
                    x = bilinear(x)
                else:
                    x = mx.repeat(mx.repeat(x, 2, axis=1), 2, axis=2)
                x = self.conv("unet/up0/upsample", x)
            tap(f"unet/up{i}", x)
        x = self.group_norm("unet/normOut", x, 1e-5)
        return self.conv("unet/conv_out", x if bug == "out_silu_missing" else silu(x))


def silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def gelu(x: mx.array, bug: str | None) -> mx.array:
    if bug == "geglu_silu":
        return silu(x)
    if bug == "gelu_tanh":
        return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * (1 + mx.erf(x / math.sqrt(2))) / 2


def bilinear(x: mx.array) -> mx.array:
    y = torch.from_numpy(np.array(x)).permute(0, 3, 1, 2)
    y = F.interpolate(y, scale_factor=2, mode="bilinear").permute(0, 2, 3, 1)
    return mx.array(y.numpy()).astype(x.dtype)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, kind = given(folder), getattr(mx, dtype)
    nets = Networks(converted(folder, bug), bug, kind)
    latents, image = (
        mx.array(value(f"pipeline/{n}").transpose(0, 2, 3, 1)) for n in ("noise", "control_image")
    )
    text = mx.array(value("pipeline/prompt_embeds"))
    if bug == "prompts_swapped":
        text = text[::-1]
    if bug == "image_bgr":
        image = image[..., ::-1]
    if bug == "image_minus_one_to_one":
        image = image * 2 - 1
    times = value("pipeline/timesteps")
    times = times - 1 if bug == "timesteps_without_offset" else times
    blocks = ("given/*", "*/down?", "*/mid", "*/up?", "*/conv_out", "sampler/*")
    kept = {k: to_numpy(v) for k, v in nets.p.items()} if weights else None
    with port_trace(out, dump, dtype, blocks, kept):
        tap("given/times", times, kind="schedule")
        latents = tap("given/latents", latents.astype(kind), kind="input")
        text = tap("given/text", text.astype(kind), kind="input")
        image = tap("given/image", image.astype(kind), kind="input")
        t = int(times[1])
        both, images = mx.concatenate([latents] * 2), mx.concatenate([image] * 2)
        extra = nets.control(both, t, text, images)
        negative, positive = mx.split(nets.unet(both, t, text, extra), 2)
        if bug == "guidance_order":
            negative, positive = positive, negative
        base = positive if bug == "guidance_from_positive" else negative
        guided = tap("sampler/eps", base + GUIDANCE * (positive - negative))
        tap("sampler/next", ddim(latents, guided, t, bug))


def ddim(x: mx.array, eps: mx.array, t: int, bug: str | None) -> mx.array:
    ends = (0.00085, 0.012)
    betas = np.linspace(ends[0] ** 0.5, ends[1] ** 0.5, 1000) ** 2
    betas = np.linspace(*ends, 1000) if bug == "betas_linear" else betas
    alphas = np.cumprod(1 - betas)
    a, before = float(alphas[t]), float(alphas[t - 250])
    if bug == "alpha_of_same_step":
        before = float(alphas[t - 249])
    clean = (x - math.sqrt(1 - a) * eps) / math.sqrt(a)
    clean = mx.clip(clean, -1, 1) if bug == "clean_clipped" else clean
    noise_part = 1 - before if bug == "noise_root_missing" else math.sqrt(1 - before)
    return math.sqrt(before) * clean + noise_part * eps


NO_COUNTERPART: tuple[str, ...] = ()

BUGS = (
    Bug(
        "control_stem_of_unet",
        "ControlNet's first kernel is the UNet's.",
        (r"load|weight",),
        "weights",
    ),
    Bug(
        "kernel_rows_columns",
        "A kernel has rows and columns swapped.",
        (r"transpos|swap|ax[ei]s",),
        "weights",
    ),
    Bug("zero_bias_dropped", "A zero convolution has no bias.", (r"bias|zero|load",), "weights"),
    Bug(
        "norms_exchanged",
        "Two norms' weights are exchanged.",
        (r"load|weight|swap|exchang",),
        "weights",
    ),
    Bug(
        "fused_value_first",
        "Key and value are fused in the other order.",
        (r"order|swap|fuse|weight",),
        "weights",
    ),
    Bug("out_bias_missing", "An attention's output has no bias.", (r"bias",)),
    Bug("padding_edge", "A convolution pads with the edge.", (r"pad|edge|border",)),
    Bug("downsample_asymmetric", "The downsampling pads right and bottom only.", (r"pad|asymm",)),
    Bug("groups_two", "Norms of residual blocks have 2 groups.", (r"group",)),
    Bug(
        "groups_strided", "The last norm's groups are strided channels.", (r"group|channel|order",)
    ),
    Bug("res_norm_eps", "Norms of residual blocks have eps 1e-3.", (r"\beps",)),
    Bug(
        "variance_unbiased",
        "Group norms divide by n - 1.",
        (r"unbias|n ?- ?1|ddof|bessel|varianc",),
    ),
    Bug("layer_norm_eps", "Layer norms have eps 1e-2.", (r"\beps",)),
    Bug("layer_norm_no_bias", "One layer norm has no bias.", (r"bias",)),
    Bug("time_freq_shift", "Timestep frequencies divide by half - 1.", (r"shift|freq|half|sinus",)),
    Bug(
        "time_sin_first_unet", "The UNet's timestep has sines first.", (r"sin|cos|flip|order|swap",)
    ),
    Bug(
        "time_sin_first_ctrl",
        "The ControlNet's timestep has sines first.",
        (r"sin|cos|flip|order|swap",),
    ),
    Bug("time_relu", "The timestep embedding uses ReLU.", (r"relu|silu|activation",)),
    Bug("time_silu_missing", "The time bias is computed without SiLU.", (r"silu|activation",)),
    Bug(
        "time_after_norm",
        "The time bias is added after the norm.",
        (r"order|\btime\b|added|adds",),
    ),
    Bug(
        "time_not_added",
        "A residual block ignores the time.",
        (r"\btime\b|added|adds|missing|bias|term",),
    ),
    Bug("res_f16", "A norm's result is rounded to float16.", (r"f16|float16|half|precision",)),
    Bug("res_silu_missing", "The second SiLU of a block is missing.", (r"silu|activation",)),
    Bug(
        "shortcut_missing",
        "A residual block adds no input.",
        (r"residual|skip|shortcut|added|missing",),
    ),
    Bug(
        "residual_over_root_two",
        "Residual blocks divide by the root of 2.",
        (r"scale|factor|sqrt|root|0\.707|1\.41",),
    ),
    Bug("head_count_is_head_size", "2 is taken as the size of a head.", (r"head",)),
    Bug("heads_split_last", "Channels are split before heads.", (r"head|reshape|layout",)),
    Bug(
        "attention_scale", "Scores are divided by the root of all channels.", (r"scale|sqrt|root",)
    ),
    Bug(
        "context_swapped",
        "The middle of ControlNet has the prompts swapped.",
        (r"batch|swap|order|prompt|context|permut|revers",),
    ),
    Bug(
        "context_first_tokens",
        "The last text token is cut off.",
        (r"token|length|trunc|crop|shape|context|\btext",),
    ),
    Bug(
        "cross_residual_missing",
        "Cross-attention's residual is missing.",
        (r"residual|skip|added|missing",),
    ),
    Bug(
        "geglu_halves",
        "GEGLU's value and gate are swapped.",
        (r"half|halves|gate|swap|order|chunk",),
    ),
    Bug("geglu_silu", "The gate uses SiLU.", (r"silu|gelu|activation|swi",)),
    Bug("gelu_tanh", "The gate uses tanh GELU.", (r"gelu|tanh|erf",)),
    Bug(
        "grid_transposed",
        "Tokens become a grid in the other order.",
        (r"transpos|permut|order|ax[ei]s|reshape",),
    ),
    Bug(
        "transformer_residual_missing",
        "A transformer's residual is missing.",
        (r"residual|skip|added|missing",),
    ),
    Bug("hint_relu", "The hint's convolutions use ReLU.", (r"relu|silu|activation",)),
    Bug("hint_stride_early", "The stride is in the earlier convolution.", (r"stride|shape|size",)),
    Bug(
        "hint_last_silu",
        "SiLU before the hint's last convolution is missing.",
        (r"silu|activation",),
    ),
    Bug("hint_not_added", "The hint is not added.", (r"hint|added|adds|missing|sum|term|cond",)),
    Bug("control_scale_missing", "The control scale is 1.", (r"scale|factor|0\.8|1\.25",)),
    Bug(
        "control_scale_not_on_mid",
        "The middle's control is not scaled.",
        (r"scale|factor|0\.8|1\.25",),
    ),
    Bug("control_guess_scales", "Scales of guess mode are used.", (r"scale|factor",)),
    Bug(
        "control_shifted",
        "The first two control results are swapped.",
        (r"order|swap|residual|control|skip",),
    ),
    Bug(
        "control_on_skips_missing",
        "Control is not added to the skips.",
        (r"residual|control|skip|added|adds|missing",),
    ),
    Bug(
        "control_mid_missing",
        "Control is not added to the middle.",
        (r"residual|control|added|adds|missing|term",),
    ),
    Bug(
        "skips_in_order",
        "A skip is taken from the other end.",
        (r"skip|\binput|order|residual|concat",),
    ),
    Bug("skip_first", "The skip is put before the input.", (r"order|concat|swap|skip|permut",)),
    Bug("upsample_bilinear", "Upsampling is bilinear.", (r"bilinear|nearest|upsampl|interpol",)),
    Bug("out_silu_missing", "SiLU before the last convolution is missing.", (r"silu|activation",)),
    Bug(
        "prompts_swapped",
        "The positive prompt is first.",
        (r"order|swap|prompt|batch|revers|permut",),
        "inputs",
    ),
    Bug("image_bgr", "The control image is BGR.", (r"bgr|channel|order|revers|permut",), "inputs"),
    Bug(
        "image_minus_one_to_one",
        "The control image is scaled to -1 … 1.",
        (r"scale|range|normal|shift|2 ?\*|-1|affine",),
        "inputs",
    ),
    Bug(
        "timesteps_without_offset",
        "Timesteps are one too small.",
        (r"offset|off by|\bone\b|- ?1|shift",),
        "schedule",
    ),
    Bug(
        "guidance_order",
        "Guidance takes the prompts in the other order.",
        (r"guidance|cfg|swap|order",),
    ),
    Bug(
        "guidance_from_positive",
        "Guidance starts at the positive result.",
        (r"guidance|cfg|scale",),
    ),
    Bug("betas_linear", "The betas are linear.", (r"beta|alpha|schedule|sigma",)),
    Bug(
        "alpha_of_same_step",
        "The previous alpha is one step off.",
        (r"alpha|sigma|off by|schedule",),
    ),
    Bug("clean_clipped", "The clean latents are clipped.", (r"clip|clamp|thresh",)),
    Bug(
        "noise_root_missing",
        "A square root is missing in the step.",
        (r"sqrt|root|square|sigma|noise|coeff",),
    ),
)
