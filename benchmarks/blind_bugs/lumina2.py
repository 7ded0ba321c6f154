"""Lumina 2's transformer as another program's torch modules, with its sampler and guidance.

q, k, v are one layer, gate and up of the MLP too. Modules are recorded by hooks; rotated q and k,
chunks of the modulation, RoPE's tables, joint tokens and the sampler's values by taps.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Transformer2DModel
from torch import Tensor, nn

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

NAME = "lumina2"
HEADS, KV, HEAD, AXES = 4, 2, 12, (4, 4, 4)
WIDTH, HIDDEN, TEXT, WAVE = HEADS * HEAD, 96, 40, 256
REFINERS, LAYERS, CHANNELS, PATCH = 1, 3, 4, 2
HEIGHT, BREADTH, N_TEXT, VALID, VALID_NEGATIVE = 6, 8, 8, 6, 3
STEPS, SHIFT, GUIDANCE, TRUNCATION = 3, 6.0, 4.0, 0.7


def reference(folder: Path, dtype: str) -> None:
    """The pipeline's loop: guidance, renormed, in the first two of three steps."""
    config: dict[str, Any] = dict(in_channels=CHANNELS, hidden_size=WIDTH, num_layers=LAYERS)
    config |= dict(num_refiner_layers=REFINERS, num_attention_heads=HEADS, num_kv_heads=KV)
    config |= dict(multiple_of=16, ffn_dim_multiplier=0.5, axes_dim_rope=AXES, cap_feat_dim=TEXT)
    config |= dict(axes_lens=(32, 16, 16), patch_size=PATCH)
    model = randomised(lambda: Lumina2Transformer2DModel(**config), 31)
    model = saved(model, folder, "transformer", dtype)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(sigmas=[1 - i / STEPS for i in range(STEPS)])
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        x = noise(1, 1, CHANNELS, HEIGHT, BREADTH).to(model.dtype)
        text = noise(2, 1, N_TEXT, TEXT).to(model.dtype)
        negative = noise(3, 1, N_TEXT, TEXT).to(model.dtype)
        mask = (torch.arange(N_TEXT) < VALID).long()[None]
        negative_mask = (torch.arange(N_TEXT) < VALID_NEGATIVE).long()[None]
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/prompt_attention_mask", mask, kind="input")
        recorder.record("pipeline/negative_prompt_embeds", negative, kind="input")
        recorder.record("pipeline/negative_prompt_attention_mask", negative_mask, kind="input")
        steps: Any = scheduler.timesteps
        step: Any = scheduler.step
        for i, t in enumerate(steps):
            recorder.step = i
            time = (1 - t / 1000).expand(1)
            velocity = predicted = model(x, time, text, mask, return_dict=False)[0]
            if (i + 1) / STEPS <= TRUNCATION:
                without = model(x, time, negative, negative_mask, return_dict=False)[0]
                velocity = without + GUIDANCE * (predicted - without)
                norms = [torch.norm(y, dim=-1, keepdim=True) for y in (predicted, velocity)]
                velocity = velocity * (norms[0] / norms[1])
            recorder.record("pipeline/noise_pred", velocity)
            x = step(-velocity, t, x, return_dict=False)[0]
            recorder.record("pipeline/latents", x)


class Part(nn.Module):
    """A module that knows its path below the root, and the bug."""

    def __init__(self, tag: str, bug: str | None) -> None:
        super().__init__()
        self.tag, self.bug = tag, bug

    def has(self, bug: str, where: str = "") -> bool:
        return self.bug == bug and self.tag.startswith(where)

    def tap(self, name: str, x: Tensor) -> Tensor:
        return tap(f"net/{self.tag}.{name}" if self.tag else f"net/{name}", x)


class Rms(Part):
    def __init__(self, tag: str, bug: str | None, width: int) -> None:
        super().__init__(tag, bug)
        self.gain = nn.Parameter(torch.ones(width))
        self.of_head = tag.endswith(("qn", "kn"))

    def forward(self, x: Tensor) -> Tensor:
        axes = (-2, -1) if self.has("qk_norm_over_heads") and self.of_head else (-1,)
        eps = 1e-6 if self.has("qk_norm_eps") and self.of_head else 1e-5
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(axes, keepdim=True) + eps)
        if self.has("cap_norm_plus_one", "cap_norm"):
            return y.to(x.dtype) * (1 + self.gain)
        return y.to(x.dtype) * self.gain


class Mix(Part):
    def __init__(self, tag: str, bug: str | None) -> None:
        super().__init__(tag, bug)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV) * HEAD, bias=False)
        self.qn = Rms(f"{tag}.qn", bug, HEAD)
        self.kn = Rms(f"{tag}.kn", bug, HEAD)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def rotated(self, x: Tensor, table: Tensor, key: bool = False) -> Tensor:
        if self.has("rope_conjugate_on_keys") and key:
            table = table.conj()
        pairs = x.float().unflatten(-1, (-1, 2))
        if self.has("rope_halves_per_axis"):
            pairs = x.float().unflatten(-1, (len(AXES), 2, 2)).transpose(-1, -2).flatten(-3, -2)
        y = torch.view_as_complex(pairs.contiguous()) * table[:, None]
        y = torch.view_as_real(y)
        if self.has("rope_halves_per_axis"):
            y = y.unflatten(-2, (len(AXES), 2)).transpose(-1, -2)
            return y.flatten(-3).to(x.dtype)
        return y.flatten(-2).to(x.dtype)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, n, _ = x.shape
        fused = self.qkv(x).unflatten(-1, (-1, HEAD))
        q, k, v = fused.split((HEADS, KV, KV), 2)
        if self.has("qk_norm_after_rope", "trunk"):
            q, k = self.qn(self.rotated(q, table)), self.kn(self.rotated(k, table, True))
        else:
            q, k = self.rotated(self.qn(q), table), self.rotated(self.kn(k), table, True)
        if self.has("kv_heads_tiled"):
            k, v = (y.repeat(1, 1, HEADS // KV, 1) for y in (k, v))
        else:
            k, v = (y.repeat_interleave(HEADS // KV, 2) for y in (k, v))
        q, k, v = self.tap("q", q), self.tap("k", k), self.tap("v", v)
        scale = HEAD**-0.5
        if self.has("scale_of_key_width", "trunk"):
            scale = (KV * HEAD) ** -0.5
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
        if self.has("trunk_causal", "trunk"):
            later = torch.ones(n, n, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        if mask is not None and not self.has("text_mask_missing"):
            scores = scores.masked_fill((mask == 0)[:, None, None], -math.inf)
        p = scores.softmax(-2 if self.has("softmax_over_queries", "trunk.2") else -1)
        if self.has("probabilities_bf16", "trunk.2"):
            p = p.bfloat16().float()
        y = (p @ v.float().transpose(1, 2)).to(x.dtype)
        if self.has("heads_not_transposed_back", "trunk.0"):
            return self.o(y.reshape(batch, n, WIDTH))
        return self.o(y.transpose(1, 2).reshape(batch, n, WIDTH))


class Swiglu(Part):
    def __init__(self, tag: str, bug: str | None) -> None:
        super().__init__(tag, bug)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        if self.has("silu_on_up", "trunk.1"):
            gate, up = up, gate
        if self.has("mlp_gelu", "refine_img"):
            act = F.gelu(gate.float(), approximate="tanh")
        else:
            act = F.silu(gate.float())
        return self.down(act.to(x.dtype) * up)


class Block(Part):
    """Sandwich norms; with `modulated`, a scale and a gate for attention and for the MLP."""

    def __init__(self, tag: str, bug: str | None, modulated: bool) -> None:
        super().__init__(tag, bug)
        self.pre_a, self.post_a, self.pre_m, self.post_m = (
            Rms(f"{tag}.{name}", bug, WIDTH) for name in ("pre_a", "post_a", "pre_m", "post_m")
        )
        self.mix, self.mlp = Mix(f"{tag}.mix", bug), Swiglu(f"{tag}.mlp", bug)
        self.mod = nn.Linear(WIDTH, 4 * WIDTH) if modulated else None

    def chunks(self, c: Tensor) -> list[Tensor]:
        assert self.mod is not None
        y = self.mod(c if self.has("modulation_without_silu") else F.silu(c))[:, None]
        scale_a, gate_a, scale_m, gate_m = y.chunk(4, -1)
        if self.has("chunks_scales_first"):
            gate_a, scale_m = scale_m, gate_a
        if self.has("mlp_scale_of_attention", "trunk.0"):
            scale_m = scale_a
        if self.has("mlp_gate_of_attention", "trunk.2"):
            gate_m = gate_a
        self.tap("gate_a", gate_a[:, 0])
        self.tap("scale_m", scale_m[:, 0])
        self.tap("gate_m", gate_m[:, 0])
        return [scale_a, gate_a, scale_m, gate_m]

    def forward(
        self, x: Tensor, table: Tensor, mask: Tensor | None = None, c: Tensor | None = None
    ) -> Tensor:
        if c is None:
            y = self.mix(self.pre_a(x), table, mask)
            h = x + (y if self.has("post_norm_missing", "refine_txt") else self.post_a(y))
            return h + self.post_m(self.mlp(self.pre_m(h)))
        scale_a, gate_a, scale_m, gate_m = self.chunks(c)
        if not self.has("gates_without_tanh"):
            gate_a, gate_m = gate_a.tanh(), gate_m.tanh()
        y = self.mix(self.pre_a(x) * (1 + scale_a), table, mask)
        if self.has("gate_inside_post_norm", "trunk.1"):
            h = x + self.post_a(gate_a * y)
        elif self.has("post_norm_of_sum", "trunk.0"):
            h = self.post_a(x + gate_a * y)
        else:
            h = x + gate_a * self.post_a(y)
        y = self.pre_m(h) * (1 + scale_m)
        start = x if self.has("attention_left_out_of_residual", "trunk.1") else h
        return start + gate_m * self.post_m(self.mlp(y))


class Clock(Part):
    def __init__(self, tag: str, bug: str | None) -> None:
        super().__init__(tag, bug)
        self.a, self.b = nn.Linear(WAVE, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        half = WAVE // 2
        if self.has("time_times_1000"):
            t = t * 1000
        last = half - 1 if self.has("time_frequency_shift") else half
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / last)
        wave = self.tap("wave", torch.cat([angles.cos(), angles.sin()], -1).to(dtype))
        return self.b(F.silu(self.a(wave)))


class Head(Part):
    def __init__(self, tag: str, bug: str | None) -> None:
        super().__init__(tag, bug)
        self.mod, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, PATCH**2 * CHANNELS)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        scale = self.mod(c if self.has("head_without_silu") else F.silu(c))[:, None]
        norm = F.rms_norm if self.has("head_rms_norm") else F.layer_norm
        return self.out(norm(x, (WIDTH,), eps=1e-6) * (1 + scale))


class Net(Part):
    def __init__(self, bug: str | None) -> None:
        super().__init__("", bug)
        self.patch_in = nn.Linear(PATCH**2 * CHANNELS, WIDTH)
        self.clock = Clock("clock", bug)
        self.cap_norm, self.cap_in = Rms("cap_norm", bug, TEXT), nn.Linear(TEXT, WIDTH)
        self.refine_txt, self.refine_img, self.trunk = (
            nn.ModuleList(Block(f"{name}.{i}", bug, name != "refine_txt") for i in range(count))
            for name, count in (
                ("refine_txt", REFINERS),
                ("refine_img", REFINERS),
                ("trunk", LAYERS),
            )
        )
        self.head = Head("head", bug)
        self.first: Tensor | None = None
        self.kept: Tensor | None = None

    def tokens(self, x: Tensor) -> Tensor:
        p = PATCH
        x = x.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # b c rows p columns p
        order = (0, 2, 4, 1, 3, 5) if self.has("patch_channels_first") else (0, 2, 4, 3, 5, 1)
        return self.tap("tokens", x.permute(order).flatten(3).flatten(1, 2))

    def image(self, x: Tensor, rows: int) -> Tensor:
        p = PATCH
        x = x.unflatten(1, (rows, -1)).unflatten(3, (p, p, CHANNELS))
        order = (0, 5, 1, 4, 2, 3) if self.has("output_pixels_transposed") else (0, 5, 1, 3, 2, 4)
        return x.permute(order).flatten(4).flatten(2, 3)

    def table(self, n: int, valid: int, rows: int, columns: int) -> Tensor:
        """RoPE of `n` text tokens and of the image, whose first axis is the text's length."""
        begin = 1 if self.has("rope_text_from_one") else 0
        text = torch.zeros(n, 3)
        text[:, 0] = torch.arange(n) + begin
        if self.has("text_positions_in_all_axes"):
            text[:] = torch.arange(n)[:, None]
        image = torch.zeros(rows, columns, 3)
        offset = N_TEXT if self.has("rope_offset_of_padded_text") else valid
        image[..., 0] = offset
        image[..., 1] = torch.arange(rows)[:, None]
        image[..., 2] = torch.arange(columns)
        positions = torch.cat([text, image.flatten(0, 1)]).double()
        parts = []
        for i, d in enumerate(AXES):
            width = HEAD if self.has("rope_exponent_of_head") else d
            frequencies = 10000.0 ** (-torch.arange(0, d, 2).double() / width)
            parts.append(positions[:, i : i + 1] * frequencies)
        angles = torch.cat(parts, -1)
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def forward(self, x: Tensor, t: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        rows, columns, valid = x.shape[2] // PATCH, x.shape[3] // PATCH, int(mask.sum())
        if self.has("clock_of_first_step") and self.kept is not None:
            c = self.kept
        else:
            c = self.kept = self.clock(t, x.dtype)
        text = self.cap_in(self.cap_norm(text))
        table = self.table(valid, valid, rows, columns)
        text_table = F.pad(table[:valid], (0, 0, 0, len(text[0]) - valid))  # 0: padding
        if self.has("text_refiner_not_rotated"):
            text_table = torch.ones_like(text_table)
        image_table = table[valid:]
        if self.has("image_refiner_table_from_start"):
            image_table = table[: rows * columns]
        x = self.patch_in(self.tokens(x))
        refined = text
        for block in self.refine_txt:
            refined = block(refined, self.tap("rope.text", text_table), mask)
        if not self.has("text_refiner_result_unused"):
            text = refined
        if self.has("text_kept_from_first_call"):
            text = self.first = text if self.first is None else self.first
        for block in () if self.has("image_refiner_skipped") else self.refine_img:
            x = block(x, self.tap("rope.image", image_table), c=c)
        if self.has("joint_with_padding"):
            valid = N_TEXT
            table = self.table(valid, int(mask.sum()), rows, columns)
        parts = [text[:, :valid], x]
        if self.has("joint_image_first"):
            parts.reverse()
        x = self.tap("joint", torch.cat(parts, 1))
        self.tap("rope.joint", table)
        for block in self.trunk:
            x = block(x, table, c=c)
        x = self.head(x, c)
        start = valid - 1 if self.has("output_one_token_early") else valid
        start = 0 if self.has("joint_image_first") else start
        return self.image(x[:, start : start + rows * columns], rows)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Tensor]:
    """Parameters by this port's names."""
    old = {k: torch.from_numpy(v) for k, v in w.items()}
    new: dict[str, Tensor] = {}
    layers = {
        "patch_in": "x_embedder",
        "clock.a": "time_caption_embed.timestep_embedder.linear_1",
        "clock.b": "time_caption_embed.timestep_embedder.linear_2",
        "cap_in": "time_caption_embed.caption_embedder.1",
        "head.mod": "norm_out.linear_1",
        "head.out": "norm_out.linear_2",
    }
    for to, source in layers.items():
        new[f"{to}.weight"], new[f"{to}.bias"] = old[f"{source}.weight"], old[f"{source}.bias"]
    new["cap_norm.gain"] = old["time_caption_embed.caption_embedder.0.weight"]
    blocks = {f"refine_txt.{i}": f"context_refiner.{i}" for i in range(REFINERS)}
    blocks |= {f"refine_img.{i}": f"noise_refiner.{i}" for i in range(REFINERS)}
    blocks |= {f"trunk.{i}": f"layers.{i}" for i in range(LAYERS)}
    if bug == "layer_index_repeated":
        blocks["trunk.2"] = "layers.1"
    for to, source in blocks.items():
        names, modulated = "qkv", not to.startswith("refine_txt")
        if bug == "keys_and_values_swapped" and to == "trunk.0":
            names = "qvk"
        attn, ff = f"{source}.attn", f"{source}.feed_forward"
        if bug == "text_refiner_has_image_attention" and not modulated:
            attn = "noise_refiner.0.attn"
        new[f"{to}.mix.qkv.weight"] = torch.cat([old[f"{attn}.to_{x}.weight"] for x in names])
        new[f"{to}.mix.o.weight"] = old[f"{attn}.to_out.0.weight"]
        for x in "qk":
            exchanged = bug == "qk_gains_exchanged" and to == "trunk.1"
            part = {"q": "k", "k": "q"}[x] if exchanged else x
            new[f"{to}.mix.{x}n.gain"] = old[f"{attn}.norm_{part}.weight"]
        gate, up = (3, 1) if bug == "w1_w3_swapped" else (1, 3)
        both = [old[f"{ff}.linear_{i}.weight"] for i in (gate, up)]
        new[f"{to}.mlp.gate_up.weight"] = torch.cat(both)
        new[f"{to}.mlp.down.weight"] = old[f"{ff}.linear_2.weight"]
        new[f"{to}.pre_a.gain"] = old[f"{source}.norm1{'.norm' * modulated}.weight"]
        post_a, pre_m = "norm2", "ffn_norm1"
        if bug == "norm2_taken_for_mlp":
            post_a, pre_m = pre_m, post_a
        new[f"{to}.post_a.gain"] = old[f"{source}.{post_a}.weight"]
        new[f"{to}.pre_m.gain"] = old[f"{source}.{pre_m}.weight"]
        new[f"{to}.post_m.gain"] = old[f"{source}.ffn_norm2.weight"]
        if modulated:
            new[f"{to}.mod.weight"] = old[f"{source}.norm1.linear.weight"]
            new[f"{to}.mod.bias"] = old[f"{source}.norm1.linear.bias"]
    if bug == "post_mlp_norm_not_loaded":
        new["trunk.1.post_m.gain"] = torch.ones(WIDTH)
    if bug == "time_bias_not_loaded":
        new["clock.b.bias"] = torch.zeros(WIDTH)
    if bug == "last_modulation_f16":
        new["trunk.2.mod.weight"] = new["trunk.2.mod.weight"].half().float()
    return new


def schedule(bug: str | None) -> Tensor:
    """Sigmas of the shifted flow, from 1 to 0."""
    s = torch.linspace(1, 1 / STEPS, STEPS, dtype=torch.float64)
    shift = 3.0 if bug == "schedule_shift_3" else SHIFT
    return torch.cat([shift * s / (1 + (shift - 1) * s), torch.zeros(1)]).float()


def guided(with_text: Tensor, without: Tensor, bug: str | None) -> Tensor:
    """Guidance, brought back to the length of the prediction with text along each row."""
    if bug == "prompts_exchanged_in_guidance":
        with_text, without = without, with_text
    base = with_text if bug == "guidance_from_conditional" else without
    y = base + GUIDANCE * (with_text - without)
    if bug == "guidance_on_three_channels":
        y = torch.cat([y[:, :3], with_text[:, 3:]], 1)
    if bug == "guidance_not_renormed":
        return y
    axis = 1 if bug == "guidance_renormed_over_channels" else -1
    target = torch.linalg.vector_norm(with_text, dim=axis, keepdim=True)
    return y * (target / torch.linalg.vector_norm(y, dim=axis, keepdim=True))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, run = given(folder), getattr(torch, dtype)
    net = Net(bug).eval().requires_grad_(False)
    net.load_state_dict(converted(checkpoint(folder, "transformer"), bug))
    net = net.to(run)
    x = torch.from_numpy(value("pipeline/noise")).to(run)
    prompts = []
    for name in ("", "negative_"):
        text = torch.from_numpy(value(f"pipeline/{name}prompt_embeds")).to(run)
        mask = torch.from_numpy(value(f"pipeline/{name}prompt_attention_mask"))
        prompts.append((text, mask))
    sigmas = schedule(bug)
    blocks = ("in/*", "loop/*", "net:out", "net/patch_in:out", "net/cap_in:out", "net/clock:out")
    blocks += ("net/refine_txt.?:out", "net/refine_img.?:out", "net/trunk.?:out", "net/head:out")
    with (
        port_trace(out, dump, dtype, blocks, None) as recorder,
        record_modules(recorder, net, scope="net", weights=weights),
    ):
        tap("loop/sigmas", sigmas, kind="schedule")
        tap("loop/timesteps", sigmas[:-1] * 1000, kind="schedule")
        tap("in/noise", x, kind="input")
        for name, (text, mask) in zip(("prompt", "negative"), prompts, strict=True):
            tap(f"in/{name}", text, kind="input")
            tap(f"in/{name}_mask", mask, kind="input")
        for i in range(STEPS):
            set_step(i)
            t = (sigmas[i] if bug == "time_not_reversed" else 1 - sigmas[i])[None]
            v = with_text = net(x, t, *prompts[0])
            end = TRUNCATION + 1 / STEPS if bug == "guidance_one_step_longer" else TRUNCATION
            if (i + 1) / STEPS <= end + 1e-6:
                text, mask = prompts[1]
                mask = prompts[0][1] if bug == "negative_with_mask_of_prompt" else mask
                v = guided(with_text, net(x, t, text, mask), bug)
            tap("loop/velocity", v)
            size = sigmas[i] - sigmas[i + 1]
            if bug == "euler_equal_steps":
                size = torch.tensor(1 / STEPS)
            sign = -1 if bug == "velocity_sign" else 1
            x = (x.float() + sign * size * v.float()).to(run)
            if bug == "latents_f16":
                x = x.half().to(run)
            tap("loop/latents", x)


NO_COUNTERPART: tuple[str, ...] = ()

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
POSITION = r"position|offset|\bids?\b|shift"
PRECISION = r"precision|round|\bcast"
BUGS = (
    Bug(
        "keys_and_values_swapped",
        "The fused layer of trunk.0 is joined as q, v, k.",
        (LOADED, r"order|swap|exchang|permut"),
        "weights",
    ),
    Bug(
        "text_refiner_has_image_attention",
        "The context refiner's attention has the noise refiner's weights.",
        (LOADED, r"noise_refiner|refine_img|another (layer|module|block)"),
        "weights",
    ),
    Bug(
        "w1_w3_swapped",
        "SwiGLU's linear_1 and linear_3 are swapped in all blocks.",
        (LOADED, r"swap|order|halves|exchang|permut|linear_3"),
        "weights",
    ),
    Bug(
        "norm2_taken_for_mlp",
        "norm2 (after attention) and ffn_norm1 (before the MLP) are swapped in all blocks.",
        (LOADED, r"swap|exchang|ffn_norm1|norm2"),
        "weights",
    ),
    Bug(
        "post_mlp_norm_not_loaded",
        "trunk.1's last norm keeps its initial weight of ones.",
        (LOADED, r"\bones\b|initial|affine|gain"),
        "weights",
    ),
    Bug(
        "time_bias_not_loaded",
        "The bias of the timestep's second layer is zero.",
        (LOADED, r"\bbias"),
        "weights",
    ),
    Bug(
        "last_modulation_f16",
        "trunk.2's modulation weights were stored in float16.",
        (LOADED, r"f16|float16|\bhalf\b|fp16", PRECISION),
        "weights",
    ),
    Bug(
        "cap_norm_plus_one",
        "The caption's norm multiplies by 1 + weight, as Gemma does.",
        (r"1 ?\+|\+ ?1|plus one|\bone\b|gemma|offset", LOADED),
    ),
    Bug(
        "qk_norm_over_heads",
        "The norms of q and k take their mean over heads and channels together.",
        (r"heads?\b|\bax[ei]s\b|\bgroups?\b|all channels|whole|last dim",),
    ),
    Bug("qk_norm_eps", "The norms of q and k have eps 1e-6.", (r"\beps",)),
    Bug(
        "qk_norm_after_rope",
        "In the trunk q and k are normed after RoPE, not before.",
        (r"after|before|order|\brope\b|rotat|rotary",),
    ),
    Bug(
        "rope_conjugate_on_keys",
        "Keys are rotated the other way in all blocks.",
        (r"sign|conj|negat|direction|opposite|invers|backward|other way",),
    ),
    Bug(
        "rope_halves_per_axis",
        "RoPE pairs halves of each axis, not neighbours.",
        (r"half|halves|interleav|neighbo|adjacent|pair",),
    ),
    Bug(
        "rope_text_from_one",
        "Text positions begin with 1.",
        (POSITION, r"begin|start"),
    ),
    Bug(
        "rope_offset_of_padded_text",
        "The image's first axis is the padded length of the text.",
        (POSITION, r"\bpad|length"),
    ),
    Bug(
        "rope_exponent_of_head",
        "Frequencies divide by the head's width, not the axis's.",
        (r"frequenc|theta|\bbase\b|exponent",),
    ),
    Bug(
        "image_refiner_table_from_start",
        "The noise refiner uses the first rows of the joint RoPE table.",
        (POSITION, r"slice|rows?\b|first tokens|order|\btext\b|roll"),
    ),
    Bug(
        "kv_heads_tiled",
        "Key and value heads are tiled, not each repeated.",
        (r"group|\bkv\b|repeat|interleav|\btile|heads?\b",),
    ),
    Bug(
        "scale_of_key_width",
        "The trunk scales scores by the width of all keys.",
        (r"\bscal|sqrt|square root",),
    ),
    Bug("text_mask_missing", "The context refiner attends to padding.", (r"mask|padd",)),
    Bug(
        "softmax_over_queries",
        "trunk.2's softmax is over queries.",
        (r"softmax|\bquer(y|ies)\b.*(ax[ei]s|dim)|(ax[ei]s|dim).*\bquer(y|ies)\b",),
    ),
    Bug(
        "probabilities_bf16",
        "trunk.2's attention probabilities are rounded to bfloat16.",
        (r"bf16|bfloat", PRECISION),
    ),
    Bug(
        "heads_not_transposed_back",
        "trunk.0 reshapes heads before tokens into channels.",
        (r"heads?\b|reshap|transpos|layout|permut",),
    ),
    Bug(
        "silu_on_up",
        "trunk.1's MLP activates the other half.",
        (r"half|halves|swap|order|\bup\b|exchang|other (part|chunk)",),
    ),
    Bug("mlp_gelu", "The noise refiner's MLP uses GELU.", (r"gelu|silu|swish|activation",)),
    Bug(
        "modulation_without_silu",
        "The modulation of all blocks lacks SiLU.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "chunks_scales_first",
        "The modulation's chunks are taken as scale, scale, gate, gate.",
        (r"order|chunk|swap|permut|split|exchang",),
    ),
    Bug(
        "mlp_scale_of_attention",
        "trunk.0's MLP is scaled by the scale of attention.",
        (r"chunk|\bscale|split|modulation|wrong part",),
    ),
    Bug("gates_without_tanh", "Gates are used without tanh.", (r"tanh",)),
    Bug(
        "post_norm_missing",
        "The context refiner's attention has no norm after it.",
        (
            r"norm.*(missing|skip|not appl|left out|lack|unused|never)",
            r"(missing|skip|\bno\b|without).*norm",
        ),
    ),
    Bug(
        "gate_inside_post_norm",
        "trunk.1 applies the gate before the norm after attention.",
        (
            r"gate.*(before|inside|norm|input|order|place|multipl)",
            r"before.*norm|norm.*(before|after|order|place)",
        ),
    ),
    Bug(
        "post_norm_of_sum",
        "trunk.0 norms the residual sum, not the attention.",
        (r"norm.*(before|after|sum|residual|order|place)|(residual|sum|after|added).*norm",),
    ),
    Bug(
        "attention_left_out_of_residual",
        "trunk.1 adds the MLP to the block's input.",
        (
            r"residual|skip connection|block'?s input|attention.*(missing|not added|left out)",
            r"without (the )?attention|in\.0 of the block",
        ),
    ),
    Bug(
        "time_times_1000",
        "The timestep is multiplied by 1000.",
        (r"1,?000|\bscale|factor|multipl",),
    ),
    Bug(
        "time_frequency_shift",
        "Frequencies of the timestep divide by half - 1.",
        (r"frequenc|freq_shift|half|downscale|denominator|exponent|\bperiod",),
    ),
    Bug("head_without_silu", "The last scale lacks SiLU.", (r"silu|swish|activation",)),
    Bug(
        "patch_channels_first",
        "Patches are flattened as channels, rows, columns.",
        (r"order|permut|transpos|layout|channel|patch|ax[ei]s",),
    ),
    Bug(
        "output_pixels_transposed",
        "Rows and columns in each patch are exchanged in the result.",
        (r"order|permut|transpos|layout|rows?\b|column|ax[ei]s|patch",),
    ),
    Bug(
        "output_one_token_early",
        "The image's tokens are cut one token early.",
        (r"token|slice|offset|off.by.one|crop|\broll|shift|\btext\b",),
    ),
    Bug(
        "text_refiner_result_unused",
        "The joint blocks get the text without its refiner's result.",
        (
            r"skip|unrefined|not (used|run|refined)|unused|earlier",
            r"context_refiner|refine_txt|cap_in|caption_embedder",
        ),
    ),
    Bug(
        "text_kept_from_first_call",
        "The refined text of the first call is used in all calls.",
        (
            r"(first|earlier|previous|another|other) call|call 0|cach|stale|negative",
            r"same (text|prompt)|(first|earlier|previous) prompt",
        ),
    ),
    Bug(
        "image_refiner_skipped",
        "The noise refiner is not run.",
        (r"skip|missing|not (run|called|applied|used|recorded)|never",),
    ),
    Bug(
        "joint_with_padding",
        "Padding of the text is kept in the joint blocks.",
        (r"\bpad|mask|length|longer|more tokens|number of tokens|token count",),
    ),
    Bug(
        "schedule_shift_3",
        "Sigmas are shifted by 3, not 6.",
        (r"shift|sigma|schedule",),
        "schedule",
    ),
    Bug(
        "time_not_reversed",
        "The model gets sigma, not 1 - sigma.",
        (r"1 ?[-\u2212]|revers|invert|complement|sigma|flip",),
        "schedule",
    ),
    Bug(
        "negative_with_mask_of_prompt",
        "The negative prompt is run with the prompt's mask.",
        (r"mask|length|padd",),
        "inputs",
    ),
    Bug(
        "guidance_from_conditional",
        "Guidance starts from the prediction with text.",
        (r"guid|\bcfg\b|\buncond|negative",),
    ),
    Bug(
        "guidance_on_three_channels",
        "Guidance is applied to three of four channels.",
        (r"channel",),
    ),
    Bug(
        "guidance_not_renormed",
        "The guided velocity keeps its length.",
        (r"norm|rescal|length|factor|magnitude",),
    ),
    Bug(
        "guidance_renormed_over_channels",
        "The guided velocity is renormed along channels, not rows.",
        (r"norm|rescal|ax[ei]s|channel|length|magnitude",),
    ),
    Bug(
        "guidance_one_step_longer",
        "The last step is guided too.",
        (r"guid|\bcfg\b|trunc|extra|additional|more calls|(second|another) call|call 1|negative",),
    ),
    Bug("velocity_sign", "The velocity is subtracted.", (r"sign|negat|subtract|opposite|-1",)),
    Bug(
        "euler_equal_steps",
        "Euler's steps are all 1/3.",
        (r"sigma|\bdt\b|step size|euler|interval|\bdelta|update|sampler|factor",),
    ),
    Bug(
        "latents_f16",
        "Latents are rounded to float16 after each step.",
        (r"f16|float16|\bhalf\b|fp16", PRECISION),
    ),
)

MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "qk_gains_exchanged",
        "trunk.1 norms q with the weight for k and k with the weight for q.",
        (LOADED, r"swap|exchang|interchang|norm_[qk]\b|\b[qk]n\b|gain"),
        "weights",
    ),
    Bug(
        "layer_index_repeated",
        "trunk.2 has all weights of trunk.1.",
        (
            LOADED,
            r"dupl|layers\.1\b|trunk\.1\b|(another|other|previous|same|wrong) (layer|block)",
            r"off.by.one|twice|repeat",
        ),
        "weights",
    ),
    Bug(
        "joint_image_first",
        "The joint tokens are image, then text; RoPE's table is text, then image.",
        (
            r"order|concat|swap|exchang|permut|\broll",
            r"image.*(first|before)|text.*(after|last|behind)|image,? then text",
        ),
    ),
    Bug(
        "text_positions_in_all_axes",
        "Text is counted in all three axes of RoPE, not in the first only.",
        (r"position|\bids?\b|coordinate", r"\bax[ei]s\b|zeros?\b|\brope\b|rotary"),
    ),
    Bug(
        "text_refiner_not_rotated",
        "The context refiner does not rotate q and k.",
        (r"\brope\b|rotat|rotary|un-?rotated|position",),
    ),
    Bug(
        "trunk_causal",
        "Attention in the trunk is causal.",
        (r"causal|mask|triang|(later|future|following|earlier|previous) (token|key|position)",),
    ),
    Bug(
        "head_rms_norm",
        "The last norm is RMSNorm, not LayerNorm.",
        (r"\brms|\bmean\b|layer ?norm|cent(er|re)|subtract",),
    ),
    Bug(
        "mlp_gate_of_attention",
        "trunk.2's MLP has the gate of attention.",
        (r"\bgates?\b|gate_|chunk|split|modulation|wrong part",),
    ),
    Bug(
        "clock_of_first_step",
        "The timestep's embedding of the first step is used in all steps.",
        (
            r"stale|cach|\bkept\b|reus|not (updated|recomputed|recorded|called|run)|constant",
            r"(first|previous|earlier|other|another) (step|call)|step 0|call 0|same time",
        ),
    ),
    Bug(
        "prompts_exchanged_in_guidance",
        "Guidance takes the negative prediction for the one with text, and the reverse.",
        (r"swap|exchang|interchang|revers|order|guid|\bcfg\b|negative|uncond",),
    ),
)
