"""A class-conditional UNet2DModel as MLX modules, with guidance and Heun steps of Karras sigmas.

Channels last; q, k and v are one layer, 1x1 convolutions are linear layers, scale and shift of the
time are called FiLM. Modules are recorded as a whole, the sampler by taps: a step is one call.
"""

import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import HeunDiscreteScheduler, UNet2DModel

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
from lydite.trace.mlx_capture import record_modules
from lydite.trace.taps import set_step, tap
from lydite.trace.torch_capture import record_modules as record_torch_modules

mx.set_default_device(mx.cpu)

NAME = "ddpm_heun"
WIDTHS, GROUPS, HEAD, EPS, TIME = (16, 24, 32), 4, 8, 1e-5, 64
ATTEND = (False, True, False)  # by level
CHANNELS, ROWS, COLUMNS, CLASSES, LABEL, NULL = 3, 8, 12, 6, 2, 5
STEPS, GUIDANCE, CLIP, BETA_START, BETA_END, TRAIN = 3, 2.5, 2.5, 0.00085, 0.012, 1000


def reference(folder: Path, dtype: str) -> None:
    """Three steps of Heun: five calls of both classes, the null class first."""
    down = tuple("AttnDownBlock2D" if a else "DownBlock2D" for a in ATTEND)
    up = tuple("AttnUpBlock2D" if a else "UpBlock2D" for a in reversed(ATTEND))
    config: dict[str, Any] = dict(in_channels=CHANNELS, out_channels=CHANNELS, norm_eps=EPS)
    config |= dict(block_out_channels=WIDTHS, down_block_types=down, up_block_types=up)
    config |= dict(layers_per_block=1, norm_num_groups=GROUPS, attn_norm_num_groups=GROUPS)
    config |= dict(attention_head_dim=HEAD, downsample_padding=0, num_class_embeds=CLASSES)
    config |= dict(freq_shift=1, flip_sin_to_cos=False, resnet_time_scale_shift="scale_shift")
    model = randomised(lambda: UNet2DModel(**config), 57)
    model.conv_out.weight.mul_(0.25)  # few values reach the clip
    model = saved(model, folder, "unet", dtype)
    options: dict[str, Any] = dict(beta_start=BETA_START, beta_end=BETA_END, clip_sample=True)
    options |= dict(beta_schedule="scaled_linear", clip_sample_range=CLIP)
    scheduler: Any = HeunDiscreteScheduler(
        **options, use_karras_sigmas=True, timestep_spacing="trailing"
    )
    scheduler.set_timesteps(STEPS)
    with (
        reference_trace(folder, dtype) as recorder,
        record_torch_modules(recorder, model, scope="unet", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        x = noise(5, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        labels = torch.tensor([NULL, LABEL])
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/class_labels", labels, kind="ids")
        x = recorder.record("pipeline/scaled_noise", x * scheduler.init_noise_sigma)
        for recorder.step, t in enumerate(scheduler.timesteps):
            both = scheduler.scale_model_input(torch.cat([x, x]), t)
            without, with_class = model(both, t, labels).sample.chunk(2)
            guided = without + GUIDANCE * (with_class - without)
            recorder.record("pipeline/noise_pred", guided)
            x, clean = scheduler.step(guided, t, x, return_dict=False)
            recorder.record("pipeline/pred_original_sample", clean)
            recorder.record("pipeline/latents", x)


class Layer(nn.Module):
    """A module that knows its place, and the bug."""

    def __init__(self, place: str, bug: str | None) -> None:
        super().__init__()
        self.place, self.bug = place, bug

    def has(self, bug: str, where: str = "") -> bool:
        return self.bug == bug and self.place.startswith(where)

    def norm(self, width: int) -> nn.GroupNorm:
        eps = 1e-3 if self.bug == "norm_eps" else EPS
        torch_order = self.bug != "groups_of_strided_channels"
        return nn.GroupNorm(GROUPS, width, eps, pytorch_compatible=torch_order)


class Res(Layer):
    def __init__(self, place: str, bug: str | None, wide: int, out: int) -> None:
        super().__init__(place, bug)
        self.gn_a, self.gn_b = self.norm(wide), self.norm(out)
        self.conv_a = nn.Conv2d(wide, out, 3, padding=1)
        self.conv_b = nn.Conv2d(out, out, 3, padding=1)
        self.film = nn.Linear(TIME, 2 * out)
        if wide != out:
            self.side = nn.Linear(wide, out)

    def __call__(self, x: mx.array, c: mx.array) -> mx.array:
        normed = self.gn_a(x)
        y = self.conv_a(nn.silu(normed))
        film = self.film(c if self.has("film_without_silu") else nn.silu(c))
        scale, shift = mx.split(film[:, None, None], 2, -1)
        if self.has("film_halves_swapped", "dec"):
            scale, shift = shift, scale
        one = 0 if self.has("film_without_one", "enc.2") else 1
        if self.has("film_before_norm", "core.res_b"):
            y = self.gn_b(y * (one + scale) + shift)
        else:
            y = self.gn_b(y) * (one + scale) + shift
        y = self.conv_b(nn.silu(y))
        if self.has("shortcut_after_norm", "enc.1"):
            x = normed
        x = self.side(x) if "side" in self else x
        return (x + y) / math.sqrt(2) if self.has("sum_over_root_two", "core") else x + y


class Attend(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.gn = self.norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def __call__(self, x: mx.array) -> mx.array:
        b, h, w, c = x.shape
        heads = 1 if self.has("one_head", "core") else c // HEAD
        y = self.gn(x)
        fused = self.qkv(y.reshape(b, h * w, c))
        if self.has("heads_before_qkv", "dec"):
            q, k, v = fused.reshape(b, h * w, heads, 3, -1).transpose(3, 0, 2, 1, 4)
        else:
            q, k, v = fused.reshape(b, h * w, 3, heads, -1).transpose(2, 0, 3, 1, 4)
        scale = (c if self.has("scale_of_width") else q.shape[-1]) ** -0.5
        z = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)
        if not self.has("heads_not_moved_back", "enc"):
            z = z.transpose(0, 2, 1, 3)
        z = self.out(z.reshape(b, h, w, c))
        if self.has("attention_residual_missing", "core"):
            return z
        return z + (y if self.has("attention_residual_of_norm", "dec") else x)


class Shrink(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def __call__(self, x: mx.array) -> mx.array:
        pad = (1, 1) if self.has("downsample_padded_around") else (0, 1)
        return self.conv(mx.pad(x, [(0, 0), pad, pad, (0, 0)]))


class Grow(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def __call__(self, x: mx.array) -> mx.array:
        if self.has("upsample_linear"):
            return self.conv(nn.Upsample(2, "linear", align_corners=False)(x))
        if self.has("upsample_tiled", "dec.1"):
            return self.conv(mx.tile(x, (1, 2, 2, 1)))
        return self.conv(mx.repeat(mx.repeat(x, 2, 1), 2, 2))


class Down(Layer):
    def __init__(self, place: str, bug: str | None, level: int) -> None:
        super().__init__(place, bug)
        width = WIDTHS[level]
        self.res = Res(f"{place}.res", bug, WIDTHS[max(level - 1, 0)], width)
        if ATTEND[level]:
            self.att = Attend(f"{place}.att", bug, width)
        if level < len(WIDTHS) - 1:
            self.shrink = Shrink(f"{place}.shrink", bug, width)

    def __call__(self, x: mx.array, c: mx.array) -> tuple[mx.array, list[mx.array]]:
        x = early = self.res(x, c)
        if "att" in self:
            x = self.att(x)
        kept = [early if self.has("skip_before_attention") else x]
        if "shrink" in self:
            x = self.shrink(x)
            kept.append(x)
        return x, kept


class Core(Layer):
    def __init__(self, place: str, bug: str | None, width: int) -> None:
        super().__init__(place, bug)
        self.res_a = Res(f"{place}.res_a", bug, width, width)
        self.att = Attend(f"{place}.att", bug, width)
        self.res_b = Res(f"{place}.res_b", bug, width, width)

    def __call__(self, x: mx.array, c: mx.array) -> mx.array:
        return self.res_b(self.att(self.res_a(x, c)), c)


class Up(Layer):
    def __init__(self, place: str, bug: str | None, level: int) -> None:
        super().__init__(place, bug)
        width, below = WIDTHS[level], WIDTHS[min(level + 1, len(WIDTHS) - 1)]
        skips = (width, WIDTHS[max(level - 1, 0)])
        self.res = [
            Res(f"{place}.res.{i}", bug, (width if i else below) + skip, width)
            for i, skip in enumerate(skips)
        ]
        if ATTEND[level]:
            self.att = [Attend(f"{place}.att.{i}", bug, width) for i in range(2)]
        if level:
            self.grow = Grow(f"{place}.grow", bug, width)

    def __call__(self, x: mx.array, c: mx.array, kept: list[mx.array]) -> mx.array:
        skips = [kept.pop(), kept.pop()]
        if self.has("skips_exchanged", "dec.2"):
            skips.reverse()
        for i, skip in enumerate(skips):
            parts = [skip, x] if self.has("skip_joined_first", "dec.1") else [x, skip]
            x = self.res[i](mx.concatenate(parts, -1), c)
            if "att" in self:
                x = self.att[i](x)
        return self.grow(x) if "grow" in self else x


class Clock(Layer):
    def __init__(self, place: str, bug: str | None) -> None:
        super().__init__(place, bug)
        self.fc1, self.fc2 = nn.Linear(WIDTHS[0], TIME), nn.Linear(TIME, TIME)
        self.labels = nn.Embedding(CLASSES, TIME)

    def __call__(self, t: float, labels: mx.array) -> mx.array:
        half = WIDTHS[0] // 2
        shift = 0 if self.has("time_frequency_shift") else 1
        freqs = np.exp(-math.log(10000) * np.arange(half, dtype=np.float32) / (half - shift))
        if self.has("time_bfloat16"):
            t = float(ml_dtypes.bfloat16(t))
        a = mx.array(np.float32(t) * freqs.astype(np.float32))
        parts = [mx.sin(a), mx.cos(a)]
        if self.has("time_cosines_first"):
            parts.reverse()
        wave = tap("unet/clock.wave", mx.concatenate(parts)[None].astype(self.fc1.weight.dtype))
        y = nn.silu(self.fc1(mx.repeat(wave, len(labels), 0)))
        if self.has("class_before_second_layer"):
            return self.fc2(y + self.labels(labels))
        return self.fc2(y) + self.labels(labels)


class Unet(Layer):
    def __init__(self, bug: str | None) -> None:
        super().__init__("", bug)
        self.clock = Clock("clock", bug)
        self.stem = nn.Conv2d(CHANNELS, WIDTHS[0], 3, padding=1)
        self.enc = [Down(f"enc.{i}", bug, i) for i in range(3)]
        self.core = Core("core", bug, WIDTHS[-1])
        self.dec = [Up(f"dec.{i}", bug, 2 - i) for i in range(3)]
        self.head_norm = self.norm(WIDTHS[0])
        self.head = nn.Conv2d(WIDTHS[0], CHANNELS, 3, padding=1)

    def __call__(self, x: mx.array, t: float, labels: mx.array) -> mx.array:
        c = self.clock(t, labels)
        if self.has("stem_edge_padding"):
            x = mx.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="edge")
            x = self.stem(x)[:, 1:-1, 1:-1]
        else:
            x = self.stem(x)
        kept = [x]
        for stage in self.enc:
            x, more = stage(x, c)
            kept += more
        x = self.core(x, c)
        for stage in self.dec:
            x = stage(x, c, kept)
        x = self.head_norm(x)
        return self.head(nn.silu(x))


RULES = (
    (r"^conv_in", "stem"),
    (r"^conv_norm_out", "head_norm"),
    (r"^conv_out", "head"),
    (r"^time_embedding\.linear_", "clock.fc"),
    (r"^class_embedding", "clock.labels"),
    (r"^down_blocks\.(\d)\.resnets\.0", r"enc.\1.res"),
    (r"^down_blocks\.(\d)\.attentions\.0", r"enc.\1.att"),
    (r"^down_blocks\.(\d)\.downsamplers\.0", r"enc.\1.shrink"),
    (r"^mid_block\.resnets\.0", "core.res_a"),
    (r"^mid_block\.resnets\.1", "core.res_b"),
    (r"^mid_block\.attentions\.0", "core.att"),
    (r"^up_blocks\.(\d)\.resnets", r"dec.\1.res"),
    (r"^up_blocks\.(\d)\.attentions", r"dec.\1.att"),
    (r"^up_blocks\.(\d)\.upsamplers\.0", r"dec.\1.grow"),
    (r"norm1", "gn_a"),
    (r"norm2", "gn_b"),
    (r"conv1", "conv_a"),
    (r"conv2", "conv_b"),
    (r"time_emb_proj", "film"),
    (r"conv_shortcut", "side"),
    (r"group_norm", "gn"),
    (r"to_out\.0", "out"),
)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: kernels as (out, rows, columns, in), fused q, k and v."""
    new: dict[str, Array] = {}
    for old, value in w.items():
        name = old
        for pattern, into in RULES:
            name = re.sub(pattern, into, name)
        if value.ndim == 4:
            value = value[..., 0, 0] if ".side." in name else value.transpose(0, 2, 3, 1)
        new[name] = value.copy()
    for name in [n for n in new if ".to_q." in n]:
        order = "qvk" if bug == "values_before_keys" and name.startswith("core") else "qkv"
        parts = [new.pop(name.replace("to_q", f"to_{x}")) for x in order]
        new[name.replace("to_q", "qkv")] = np.concatenate(parts)
    if bug == "kernel_rows_columns":
        new["dec.0.res.1.conv_b.weight"] = new["dec.0.res.1.conv_b.weight"].swapaxes(1, 2).copy()
    if bug == "attention_out_transposed":
        new["enc.1.att.out.weight"] = new["enc.1.att.out.weight"].T.copy()
    if bug == "second_core_resnet_is_first":
        for name in [n for n in new if n.startswith("core.res_b")]:
            new[name] = new[name.replace("res_b", "res_a")]
    if bug == "film_bias_zero":
        new["enc.2.res.film.bias"] = np.zeros_like(new["enc.2.res.film.bias"])
    if bug == "head_stored_float16":
        new["head.weight"] = new["head.weight"].astype(np.float16).astype(np.float32)
    return new


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Sigmas with the last zero, and the timestep of each but that."""
    start, end = (b**0.5 for b in (BETA_START, BETA_END))
    betas = torch.linspace(start, end, TRAIN, dtype=torch.float32) ** 2
    if bug == "betas_linear":
        betas = torch.linspace(BETA_START, BETA_END, TRAIN, dtype=torch.float32)
    bars = torch.cumprod(1 - betas, 0)
    table = (((1 - bars) / bars) ** 0.5).numpy()
    marks = np.round(np.arange(TRAIN, 0, -TRAIN / STEPS)) - 1
    ends = np.interp(marks[[0, -1]], np.arange(TRAIN), table)
    rho = 5.0 if bug == "karras_rho" else 7.0
    ramp = np.linspace(0, 1, STEPS)
    sigmas = (ends[0] ** (1 / rho) + ramp * (ends[1] ** (1 / rho) - ends[0] ** (1 / rho))) ** rho
    times = np.interp(np.log(sigmas), np.log(table), np.arange(TRAIN))
    if bug == "times_rounded":
        times = np.round(times)
    return np.append(sigmas, 0).astype(np.float32), times.astype(np.float32)


class Heun:
    """The sampler: two calls a step, one in the last."""

    def __init__(self, net: Unet, labels: mx.array, dtype: mx.Dtype, bug: str | None) -> None:
        self.net, self.labels, self.dtype, self.bug, self.calls = net, labels, dtype, bug, 0

    def f32(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32)

    def slope(self, x: mx.array, sigma: float, t: float, scale: float) -> mx.array:
        """(x - clean) / sigma of a guided call of the network."""
        bug = self.bug
        set_step(self.calls)
        self.calls += 1
        divisor = 1.0 if bug == "input_not_scaled" else math.sqrt(scale**2 + 1)
        y = (self.f32(x) / divisor).astype(self.dtype)
        without, with_class = mx.split(self.net(mx.concatenate([y, y]), t, self.labels), 2)
        start = with_class if bug == "guidance_from_conditional" else without
        eps = tap("heun/eps", start + GUIDANCE * (with_class - without))
        clean = self.f32(x) - sigma * self.f32(eps)
        if bug != "clip_missing":
            clean = mx.clip(clean, -CLIP, CLIP)
        clean = tap("heun/clean", clean.astype(self.dtype))
        below = self.first if bug == "slope_over_first_sigma" else sigma
        return tap("heun/slope", ((self.f32(x) - self.f32(clean)) / below).astype(self.dtype))

    def __call__(self, x: mx.array, sigmas: Array, times: Array) -> None:
        bug = self.bug
        for i in range(STEPS):
            now, then = float(sigmas[i]), float(sigmas[i + 1])
            self.first = now
            d = self.slope(x, now, float(times[i]), now)
            size = then - now
            y = (self.f32(x) + size * self.f32(d)).astype(self.dtype)
            if then == 0:
                tap("heun/x", y)
                break
            tap("heun/x", y)
            late = float(times[i] if bug == "second_call_at_first_time" else times[i + 1])
            scale = now if bug == "second_input_scaled_by_first" else then
            d2 = self.slope(y, then, late, scale)
            mean = 0.5 * (self.f32(d) + self.f32(d2))
            if bug == "second_slope_alone":
                mean = self.f32(d2)
            start = y if bug == "second_half_from_predicted" else x
            x = (self.f32(start) + size * mean).astype(self.dtype)
            x = tap("heun/x", x)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, run = given(folder), getattr(mx, dtype)
    net = Unet(bug)
    loaded = converted(checkpoint(folder, "unet"), bug)
    net.load_weights([(k, mx.array(v).astype(run)) for k, v in loaded.items()])
    start = value("pipeline/noise")
    if bug == "noise_reshaped":
        start = start.reshape(1, ROWS, COLUMNS, CHANNELS)
    else:
        start = start.transpose(0, 2, 3, 1)
    x = mx.array(np.ascontiguousarray(start)).astype(run)
    ids = value("pipeline/class_labels").astype(np.int32)
    if bug == "null_class_zero":
        ids[0] = 0
    if bug == "label_one_late":
        ids[1] += 1
    labels = mx.array(ids)
    sigmas, times = schedule(bug)
    blocks = ("in/*", "heun/*", "unet:out", "unet/clock:out", "unet/stem:out", "unet/core:out")
    blocks += ("unet/enc.?:out", "unet/dec.?:out", "unet/head:out", "unet/enc.?:out.*")
    with (
        port_trace(out, dump, dtype, blocks, None) as recorder,
        record_modules(recorder, net, scope="unet", weights=weights),
    ):
        tap("in/sigmas", sigmas, kind="schedule")
        tap("in/times", times, kind="schedule")
        tap("in/noise", x, kind="input")
        tap("in/labels", labels, kind="ids")
        top = float(sigmas[0])
        if bug == "noise_scaled_with_one":
            top = math.sqrt(top**2 + 1)
        x = tap("in/start", (x.astype(mx.float32) * top).astype(run))
        Heun(net, labels, run, bug)(x, sigmas, times)


NO_COUNTERPART: tuple[str, ...] = (r"^heun/slope$",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers"
BUGS = (
    Bug(
        "values_before_keys",
        "The middle attention's fused layer is joined as q, v, k.",
        (r"load|weight|conver", SWAPPED),
        "weights",
    ),
    Bug(
        "kernel_rows_columns",
        "A kernel of the first decoder stage has rows and columns exchanged.",
        (LOADED, r"transpos|rows?\b|column", SWAPPED),
        "weights",
    ),
    Bug(
        "attention_out_transposed",
        "The square weight after the encoder's attention is transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "second_core_resnet_is_first",
        "The second resnet of the middle has the first one's weights.",
        (
            LOADED,
            r"dupl|twice|another (layer|module|block)",
        ),
        "weights",
    ),
    Bug(
        "film_bias_zero",
        "The bias of the third stage's time layer is zero.",
        (LOADED, r"\bbias"),
        "weights",
    ),
    Bug(
        "head_stored_float16",
        "The last convolution's kernel was stored in float16.",
        (LOADED, r"f16|float16|\bhalf\b|fp16|precision|round"),
        "weights",
    ),
    Bug(
        "film_without_silu",
        "Resnets give the time embedding to their linear layer without SiLU.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "film_halves_swapped",
        "The decoder takes the shift first, then the scale.",
        (SWAPPED, r"chunk|halves|split|shift.*scale|scale.*shift"),
    ),
    Bug(
        "film_without_one",
        "The third encoder stage multiplies by scale, not 1 + scale.",
        (r"1 ?\+|\+ ?1|plus one|\bone\b",),
    ),
    Bug(
        "film_before_norm",
        "The last resnet of the middle scales and shifts before its norm.",
        (
            r"before (the )?norm|after (the )?norm|order|norm\w* (before|after)",
            r"(modulat|scale|shift|film)\w* .*norm",
        ),
    ),
    Bug(
        "shortcut_after_norm",
        "The second encoder stage's shortcut reads the normed input.",
        (r"shortcut|residual|skip|norm(ed|alized)",),
    ),
    Bug(
        "sum_over_root_two",
        "The middle's resnets divide their sum by the root of two.",
        (r"sqrt|root|factor|scal(e|ed|ing)|0\.707|divid|multipl",),
    ),
    Bug("norm_eps", "Group norms have eps 1e-3.", (r"\beps",)),
    Bug(
        "groups_of_strided_channels",
        "Group norms are MLX's, whose groups are of strided channels.",
        (r"\bgroups\b|stride|pytorch_compatible|interleav|group(s|ing) (of|order)",),
    ),
    Bug(
        "one_head",
        "The middle's attention has one head.",
        (r"\bheads\b|(one|single) head|head count|head.?dim",),
    ),
    Bug(
        "heads_before_qkv",
        "The decoder's fused product is split as heads first, then q, k and v.",
        (r"heads?\b|split|reshap|interleav|layout", SWAPPED),
    ),
    Bug(
        "scale_of_width",
        "Scores are scaled by the whole width.",
        (r"\bscal(e|es|ed|ing)\b|sqrt|square root|factor",),
    ),
    Bug(
        "heads_not_moved_back",
        "The encoder's attention joins heads without moving their axis.",
        (r"heads?\b|transpos|reshap|layout|\bax[ei]s\b|permut",),
    ),
    Bug(
        "attention_residual_missing",
        "The middle's attention does not add its input.",
        (r"residual|skip connection|(input|in\.0).*(not added|missing)|add.*(input|in\.0)",),
    ),
    Bug(
        "attention_residual_of_norm",
        "The decoder's attention adds its normed input.",
        (r"residual|norm(ed|alized)?\b.*add|add.*norm|skip connection",),
    ),
    Bug(
        "downsample_padded_around",
        "Downsampling pads all four sides.",
        (r"pad",),
    ),
    Bug(
        "upsample_linear",
        "Upsampling is bilinear.",
        (r"nearest|linear|interpol|resiz|upsampl",),
    ),
    Bug(
        "upsample_tiled",
        "The second upsampling tiles the picture.",
        (r"til(e|ed|ing)|repeat|nearest|interpol|resiz|upsampl",),
    ),
    Bug(
        "skip_before_attention",
        "The second stage's skip is taken before its attention.",
        (
            r"skip|before (the )?att|without (the )?att|att\w*.*(missing|not (run|applied|added))",
            r"(wrong|other|another|earlier) (value|layer|feature|tensor|input)",
        ),
    ),
    Bug(
        "skips_exchanged",
        "The last stage takes its two skips in the other order.",
        (SWAPPED, r"skip|conv_in|stem|(wrong|other|another|earlier) (value|layer|feature|input)"),
    ),
    Bug(
        "skip_joined_first",
        "The second decoder stage joins the skip before its own features.",
        (SWAPPED, r"concat|\bjoin|skip"),
    ),
    Bug(
        "stem_edge_padding",
        "The first convolution pads with the edge.",
        (r"pad|edge|replicat",),
    ),
    Bug(
        "time_frequency_shift",
        "Frequencies of the time divide by half, not half - 1.",
        (r"frequenc|freq_shift|half|downscale|denominator|exponent|\bperiod",),
    ),
    Bug(
        "time_bfloat16",
        "The time is rounded to bfloat16 before the sinusoids.",
        (r"bf16|bfloat|precision|round|\bcast",),
    ),
    Bug(
        "time_cosines_first",
        "Cosines come before sines.",
        (r"\bcos|\bsin|flip", SWAPPED),
    ),
    Bug(
        "class_before_second_layer",
        "The class is added before the second time layer.",
        (r"\bclass\b|\blabel\b|before the second|added (before|earlier|to the input)|order",),
    ),
    Bug(
        "null_class_zero",
        "The call without class has label 0.",
        (r"class|label|\bids?\b|index|token",),
        "ids",
    ),
    Bug(
        "label_one_late",
        "The label is one too large.",
        (r"class|label|\bids?\b|index|off.by.one|shift|token",),
        "ids",
    ),
    Bug(
        "betas_linear",
        "Betas are linear, not of linear roots.",
        (r"beta|sigma|schedule|linear|timestep",),
        "schedule",
    ),
    Bug("karras_rho", "Karras's rho is 5.", (r"rho|sigma|schedule|karras|timestep",), "schedule"),
    Bug(
        "times_rounded",
        "Timesteps are rounded to integers.",
        (r"round|integer|\bint\b|fraction|timestep|schedule|\btimes?\b",),
        "schedule",
    ),
    Bug(
        "noise_reshaped",
        "The noise is reshaped to channels last, not transposed.",
        (r"noise|layout|transpos|reshap|permut|\bax[ei]s\b|channel",),
        "inputs",
    ),
    Bug(
        "noise_scaled_with_one",
        "The noise is multiplied by the root of sigma squared + 1.",
        (r"scal|sigma|factor|sqrt|root|multipl",),
    ),
    Bug(
        "input_not_scaled",
        "The network's input is not divided by the root of sigma squared + 1.",
        (r"scal|sigma|factor|sqrt|root|multipl|divid",),
    ),
    Bug(
        "second_input_scaled_by_first",
        "Heun's second input is scaled by the first sigma.",
        (r"scal|sigma|factor|sqrt|root|multipl|divid",),
    ),
    Bug(
        "second_call_at_first_time",
        "Heun's second call gets the first timestep.",
        (
            r"timestep|\btimes?\b.*(step|previous|earlier|other|stale|same|call|off)",
            r"stale|(previous|earlier|step 0).*(timestep|\btime\b)|off.by.one|repeat",
        ),
        "schedule",
    ),
    Bug(
        "guidance_from_conditional",
        "Guidance starts from the prediction with class.",
        (r"guid|\bcfg\b|\bcond|uncond",),
    ),
    Bug("clip_missing", "The clean picture is not clipped.", (r"clip|clamp|range|bound|limit",)),
    Bug(
        "slope_over_first_sigma",
        "Heun's second slope is divided by the first sigma.",
        (r"sigma(?!s\b)|deriv|divid|factor|second.order|corrector|denominator",),
    ),
    Bug(
        "second_slope_alone",
        "The second slope is used, not the mean of both.",
        (r"\bmean of|average|second.order|corrector|trapez|euler|half|0\.5",),
    ),
    Bug(
        "second_half_from_predicted",
        "Heun's second half starts from the predicted sample.",
        (r"predicted|starts? from|second.order|corrector|(previous|kept|other) (x|sample)",),
    ),
)
