"""Flux Kontext in plain torch functions, as a burn or candle port would be laid out.

Linears are (in, out). Joint blocks hold one qkv per stream, solo blocks one `wide` product of qkv
and the MLP's first layer; the solo stream is text and picture in one tensor. The port packs the
noise and the reference picture's latents, and makes ids and sigmas itself.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux_kontext import FluxKontextPipeline, calculate_shift

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
from lydite.trace import taps
from lydite.trace.arrays import to_numpy
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "fluxkontext"
HEADS, HEAD, JOINT, SOLO = 5, 16, 2, 3
WIDTH, AXES, THETA = HEADS * HEAD, (4, 6, 6), 10000
CHANNELS, TEXT_WIDTH, POOLED, WORDS = 3, 20, 28, 7
ROWS, COLUMNS, PICTURE_ROWS, PICTURE_COLUMNS = 6, 10, 8, 12  # of latents, before packing
SCALING, SHIFT, GUIDANCE, STEPS, WAVE = 0.3611, 0.1159, 2.5, 2, 256
STATIC_SHIFT, BASE_SHIFT, MAX_SHIFT, BASE_TOKENS, MAX_TOKENS = 3.0, 0.5, 1.15, 256, 4096
Tensor = torch.Tensor


def made() -> FluxTransformer2DModel:
    config: dict[str, Any] = dict(in_channels=4 * CHANNELS, num_layers=JOINT)
    config |= dict(num_single_layers=SOLO, attention_head_dim=HEAD, num_attention_heads=HEADS)
    config |= dict(joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=POOLED)
    return FluxTransformer2DModel(**config, guidance_embeds=True, axes_dims_rope=AXES)


def tuned(model: FluxTransformer2DModel) -> FluxTransformer2DModel:
    """So that each part matters to the result."""
    damped = torch.linspace(-8, 0, WAVE // 2).exp().repeat(2)  # trained ones hardly see fast waves
    for name, parameter in model.named_parameters():
        x = parameter.data
        if name.startswith(("x_embedder", "context_embedder")):
            x.mul_(0.3)
        if ".norm_" in name:
            x.copy_(1.5 + 0.4 * torch.randn(x.shape))
        if name.endswith((".to_out.0.weight", ".to_add_out.weight", ".norm.linear.weight")):
            x.mul_(3)
        if ".net.0.proj" in name or ".proj_mlp" in name or name.startswith("proj_out"):
            x.mul_(3)
        if name.endswith(
            ("timestep_embedder.linear_1.weight", "guidance_embedder.linear_1.weight")
        ):
            x.mul_(2 * damped)
    return model


def reference(folder: Path, dtype: str) -> None:
    """Two steps of the pipeline's loop with one reference picture."""
    model = saved(tuned(randomised(made, 57)), folder, "transformer", dtype)
    config: dict[str, Any] = dict(shift=STATIC_SHIFT, use_dynamic_shifting=True)
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    pack, ids_of = FluxKontextPipeline._pack_latents, FluxKontextPipeline._prepare_latent_image_ids
    cpu, kind = torch.device("cpu"), model.dtype
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        text = noise(2, 1, WORDS, TEXT_WIDTH)  # the last two words are padding, not zero
        text = recorder.record("pipeline/prompt_embeds", text.to(kind), kind="input")
        pooled = noise(3, 1, POOLED).to(kind)
        recorder.record("pipeline/pooled_prompt_embeds", pooled, kind="input")
        guidance = torch.full([1], GUIDANCE)
        recorder.record("pipeline/guidance", guidance, kind="input")
        start = noise(4, 1, CHANNELS, ROWS, COLUMNS).to(kind)
        recorder.record("pipeline/noise", start, kind="input")
        mode = 2 * noise(5, 1, CHANNELS, PICTURE_ROWS, PICTURE_COLUMNS).to(kind) + 0.3
        recorder.record("pipeline/image_mode", mode, kind="input")
        image = recorder.record("pipeline/image_latents", (mode - SHIFT) * SCALING)
        image = pack(image, 1, CHANNELS, PICTURE_ROWS, PICTURE_COLUMNS)
        latents = recorder.record("pipeline/latents", pack(start, 1, CHANNELS, ROWS, COLUMNS))
        text_ids = torch.zeros(WORDS, 3).to(kind)
        image_ids = ids_of(1, PICTURE_ROWS // 2, PICTURE_COLUMNS // 2, cpu, kind)
        image_ids[..., 0] = 1
        latent_ids = torch.cat([ids_of(1, ROWS // 2, COLUMNS // 2, cpu, kind), image_ids], dim=0)
        recorder.record("pipeline/text_ids", text_ids, kind="input")
        recorder.record("pipeline/latent_ids", latent_ids, kind="input")
        mu = calculate_shift(latents.shape[1], BASE_TOKENS, MAX_TOKENS, BASE_SHIFT, MAX_SHIFT)
        sigmas: Any = np.linspace(1.0, 1 / STEPS, STEPS)
        scheduler.set_timesteps(sigmas=sigmas, mu=mu)
        times: Any = scheduler.timesteps
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", times, kind="schedule")
        scheduler.set_begin_index(0)
        for step, t in enumerate(times):
            recorder.step = step
            out = model(
                hidden_states=torch.cat([latents, image], dim=1),
                timestep=t.expand(1).to(kind) / 1000,
                guidance=guidance,
                pooled_projections=pooled,
                encoder_hidden_states=text,
                txt_ids=text_ids,
                img_ids=latent_ids,
                return_dict=False,
            )[0]
            out = recorder.record("pipeline/noise_pred", out[:, : latents.size(1)])
            latents = scheduler.step(out, t, latents, return_dict=False)[0]
            latents = recorder.record("pipeline/latents_next", latents)
        whole = FluxKontextPipeline._unpack_latents(latents, ROWS * 8, COLUMNS * 8, 8)
        recorder.record("pipeline/unpacked", whole)


def int8(x: Array) -> Array:
    """As read from an int8 file with one scale."""
    scale = np.abs(x).max() / 127
    return (np.round(x / scale) * scale).astype(np.float32)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        new[f"{name}.w"] = np.concatenate([w[f"{p}.weight"] for p in parts]).T.copy()
        new[f"{name}.b"] = np.concatenate([w[f"{p}.bias"] for p in parts])

    put("tok.pic", "x_embedder")
    put("tok.txt", "context_embedder")
    for name, old in (("time", "timestep"), ("guide", "guidance"), ("pool", "text")):
        if bug == "time_and_guide_files_mixed_up" and name != "pool":
            old = {"timestep": "guidance", "guidance": "timestep"}[old]
        put(f"cond.{name}.up", f"time_text_embed.{old}_embedder.linear_1")
        put(f"cond.{name}.down", f"time_text_embed.{old}_embedder.linear_2")
    for i in range(JOINT):
        b = f"transformer_blocks.{i}"
        put(f"joint.{i}.pic.ada", f"{b}.norm1.linear")
        put(f"joint.{i}.txt.ada", f"{b}.norm1_context.linear")
        put(f"joint.{i}.pic.qkv", *(f"{b}.attn.to_{x}" for x in "qkv"))
        put(f"joint.{i}.txt.qkv", *(f"{b}.attn.add_{x}_proj" for x in "qkv"))
        for x in "qk":
            new[f"joint.{i}.pic.n{x}"] = w[f"{b}.attn.norm_{x}.weight"]
            new[f"joint.{i}.txt.n{x}"] = w[f"{b}.attn.norm_added_{x}.weight"]
        put(f"joint.{i}.pic.mix", f"{b}.attn.to_out.0")
        put(f"joint.{i}.txt.mix", f"{b}.attn.to_add_out")
        for s, old in (("pic", "ff"), ("txt", "ff_context")):
            put(f"joint.{i}.{s}.fc1", f"{b}.{old}.net.0.proj")
            old = "ff" if bug == "text_mlp_end_of_picture" and i == 1 else old
            put(f"joint.{i}.{s}.fc2", f"{b}.{old}.net.2")
    for i in range(SOLO):
        b = f"single_transformer_blocks.{i}"
        put(f"solo.{i}.ada", f"{b}.norm.linear")
        parts = [f"{b}.attn.to_{x}" for x in "qkv"] + [f"{b}.proj_mlp"]
        put(f"solo.{i}.wide", *(parts[3:] + parts[:3] if bug == "wide_mlp_rows_first" else parts))
        for x in "qk":
            new[f"solo.{i}.n{x}"] = w[f"{b}.attn.norm_{x}.weight"]
        put(f"solo.{i}.back", f"{b}.proj_out")
    put("head.ada", "norm_out.linear")
    put("head.lin", "proj_out")
    if bug == "qkv_rows_per_head":  # rows (head, part, channel) instead of (part, head, channel)
        for end, lead in (("w", WIDTH), ("b", 1)):
            x = new[f"joint.1.pic.qkv.{end}"].reshape(lead, 3, HEADS, HEAD).swapaxes(1, 2)
            new[f"joint.1.pic.qkv.{end}"] = x.reshape(new[f"joint.1.pic.qkv.{end}"].shape).copy()
    if bug == "text_query_norm_of_picture":
        new["joint.0.txt.nq"] = new["joint.0.pic.nq"]
    if bug == "entry_rows_patch_major":  # rows of the kernel: (channel, y, x) -> (y, x, channel)
        x = new["tok.pic.w"].reshape(CHANNELS, 2, 2, WIDTH)
        new["tok.pic.w"] = x.transpose(1, 2, 0, 3).reshape(-1, WIDTH).copy()
    if bug == "pool_weight_transposed":
        new["cond.pool.down.w"] = new["cond.pool.down.w"].T.copy()
    if bug == "int8_left_in_solo":
        new["solo.1.back.w"] = int8(new["solo.1.back.w"])
    return new


def packed(x: Tensor, patch_first: bool = False) -> Tensor:
    """(channels, rows, columns) to (tokens, channels * 2 * 2)."""
    c, rows, columns = x.shape
    x = x.reshape(c, rows // 2, 2, columns // 2, 2)
    x = x.permute(1, 3, 2, 4, 0) if patch_first else x.permute(1, 3, 0, 2, 4)
    return x.reshape(rows // 2 * (columns // 2), 4 * c)


def grid(rows: int, columns: int, picture: int) -> Tensor:
    """Ids of a grid's tokens: picture, row, column."""
    y = torch.arange(rows).repeat_interleave(columns)
    x = torch.arange(columns).repeat(rows)
    return torch.stack([torch.full_like(y, picture), y, x], -1).float()


def positions(bug: str | None) -> Tensor:
    """Ids of words, latents, and the reference picture, in the order of the tokens."""
    rows, columns = PICTURE_ROWS // 2, PICTURE_COLUMNS // 2
    words, own, other = (
        torch.zeros(WORDS, 3),
        grid(ROWS // 2, COLUMNS // 2, 0),
        grid(rows, columns, 1),
    )
    if bug == "latents_ids_of_pixels":
        own[:, 1:] *= 2
    if bug == "picture_index_zero":
        other[:, 0] = 0
    if bug == "picture_beside_latents":
        other[:, 0] = 0
        other[:, 2] += COLUMNS // 2
    if bug == "picture_ids_down_columns":
        other = grid(columns, rows, 1)[:, [0, 2, 1]]
    if bug == "picture_ids_by_latent_width":
        n = torch.arange(rows * columns)
        other[:, 1], other[:, 2] = n // (COLUMNS // 2), n % (COLUMNS // 2)
    if bug == "words_counted":
        words[:, 2] = torch.arange(WORDS)
    return torch.cat([words, own, other])


def levels(bug: str | None) -> Tensor:
    """Sigmas with the dynamic shift, and the last zero."""
    tokens = ROWS // 2 * (COLUMNS // 2)
    if bug == "shift_counts_picture":
        tokens += PICTURE_ROWS // 2 * (PICTURE_COLUMNS // 2)
    slope = (MAX_SHIFT - BASE_SHIFT) / (MAX_TOKENS - BASE_TOKENS)
    mu = tokens * slope + BASE_SHIFT - slope * BASE_TOKENS
    x = np.linspace(1, 1 / STEPS, STEPS).astype(np.float32)
    if bug == "mu_not_exponentiated":
        x = mu / (mu + (1 / x - 1))
    else:
        x = math.exp(mu) / (math.exp(mu) + (1 / x - 1))
    end = 1 / 1000 if bug == "sigma_end_above_zero" else 0
    return torch.tensor([*x.tolist(), end], dtype=torch.float32)


class Kontext:
    """The network; streams are (1, tokens, width), heads (1, heads, tokens, channels)."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.bug, self.kind = bug, getattr(torch, dtype)
        self.p = {k: torch.from_numpy(np.ascontiguousarray(v)).to(self.kind) for k, v in p.items()}
        self.kept_cond: Tensor | None = None
        self.kept_text: Tensor | None = None

    def lin(self, name: str, x: Tensor) -> Tensor:
        return taps.tap(name, x @ self.p[f"{name}.w"] + self.p[f"{name}.b"])

    def norm(self, x: Tensor, where: str = "") -> Tensor:
        """Without weights."""
        y = x.float()
        loose = self.bug == "joint_norm_eps_default" and where.startswith("joint")
        unbiased = self.bug == "variance_unbiased" and where.startswith("solo")
        mean, var = (
            y.mean(-1, keepdim=True),
            y.var(-1, keepdim=True, correction=1 if unbiased else 0),
        )
        if self.bug == "solo_norm_not_centred" and where.startswith("solo.0"):
            mean, var = 0 * mean, y.square().mean(-1, keepdim=True)
        y = (y - mean) * torch.rsqrt(var + (1e-5 if loose else 1e-6))
        return y.to(x.dtype)

    def rms(self, name: str, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (y * self.p[name].float()).to(x.dtype)

    def waves(self, t: Tensor) -> Tensor:
        half = WAVE // 2
        freq = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        angle = t.float()[:, None] * freq[None]
        if self.bug == "waves_in_bfloat16":
            angle = (t.bfloat16()[:, None] * freq.bfloat16()[None]).float()
        parts = [angle.cos(), angle.sin()]
        return torch.cat(parts[::-1] if self.bug == "sines_first" else parts, -1).to(self.kind)

    def condition(self, t: Tensor, guide: Tensor, pooled: Tensor) -> Tensor:
        bug = self.bug
        if bug == "condition_of_first_step" and self.kept_cond is not None:
            return taps.tap("cond", self.kept_cond)
        time = t.to(self.kind) * 1000
        guide = guide.to(self.kind) * (1 if bug == "guidance_left_small" else 1000)
        x = self.lin("cond.time.up", taps.tap("cond.time.waves", self.waves(time)))
        c = self.lin("cond.time.down", F.silu(x))
        if bug != "guidance_branch_absent":
            x = self.lin("cond.guide.up", taps.tap("cond.guide.waves", self.waves(guide)))
            c = taps.tap("cond.time_guide", c + self.lin("cond.guide.down", F.silu(x)))
        x = self.lin("cond.pool.up", pooled)
        x = x if bug == "pool_branch_not_activated" else F.silu(x)
        self.kept_cond = taps.tap("cond", c + self.lin("cond.pool.down", x))
        return self.kept_cond

    def tables(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of (tokens, half of a head)."""
        bug, parts = self.bug, []
        axes = (AXES[1], AXES[2], AXES[0]) if bug == "axis_widths_rolled" else AXES
        for i, wide in enumerate(axes):
            over = HEAD if bug == "exponent_over_head" else wide
            freq = THETA ** (-torch.arange(0, wide, 2, dtype=torch.float64) / over)
            parts.append(ids[:, i, None].double() * freq)
        angle = torch.cat(parts, -1)
        cos, sin = angle.cos().float(), angle.sin().float()
        return taps.tap("rope.cos", cos), taps.tap("rope.sin", sin)

    def rotate(self, x: Tensor, solo: bool = False) -> Tensor:
        cos, sin = self.rope
        if solo and self.bug == "solo_table_picture_first":
            cos, sin = (torch.cat([t[WORDS:], t[:WORDS]]) for t in (cos, sin))
        if solo and self.bug == "solo_rotated_backwards":
            sin = -sin
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)

    def attend(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Result (1, tokens, width)."""
        bug = self.bug
        taps.tap(f"{name}.q", q)
        taps.tap(f"{name}.k", k)
        if bug == "values_with_key_norm" and name == "solo.0":
            v = self.rms("solo.0.nk", v)
        divisor = WIDTH if bug == "scores_over_width" else HEAD
        scores = q.float() @ k.float().mT * divisor**-0.5
        if bug == "scores_scaled_twice" and name == "joint.1":
            scores = scores * divisor**-0.5
        if bug == "picture_blind_to_latents" and name.startswith("joint"):
            start = WORDS + ROWS // 2 * (COLUMNS // 2)
            scores[..., start:, WORDS:start] = -torch.inf
        y = scores.softmax(-1).to(v.dtype) @ v
        if bug == "heads_joined_untransposed" and name == "solo.2":
            y = y.reshape(1, -1, WIDTH)
        else:
            y = y.transpose(1, 2).flatten(2)
        return taps.tap(f"{name}.ctx", y)

    def modulation(self, name: str, c: Tensor, parts: int) -> tuple[Tensor, ...]:
        x = F.silu(c)
        if self.bug == "solo_silu_twice" and name.startswith("solo"):
            x = F.silu(x)
        return self.lin(f"{name}.ada", x)[:, None].chunk(parts, -1)

    def shifted(self, name: str, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return taps.tap(name, self.norm(x, name) * (1 + scale) + shift)

    def joint(self, i: int, pic: Tensor, txt: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        bug, streams, ready, mods = self.bug, {"txt": txt, "pic": pic}, {}, {}
        for s, x in streams.items():
            name = f"joint.{i}.{s}"
            m = self.modulation(name, c, 6)
            mods[s] = m
            qkv = self.lin(f"{name}.qkv", self.shifted(f"{name}.pre", x, m[1], m[0]))
            q, k, v = (self.heads(y) for y in qkv.chunk(3, -1))
            ready[s] = self.rms(f"{name}.nq", q), self.rms(f"{name}.nk", k), v
        q, k, v = (torch.cat(y, 2) for y in zip(ready["txt"], ready["pic"], strict=True))
        y = self.attend(f"joint.{i}", self.rotate(q), self.rotate(k), v)
        done: dict[str, Tensor] = {}
        cut = y.shape[1] - WORDS if bug == "joint_split_picture_first" else WORDS
        parts = {"txt": y[:, :cut], "pic": y[:, cut:]}
        if bug == "joint_split_picture_first":
            parts = {"txt": parts["pic"], "pic": parts["txt"]}
        for s, part in parts.items():
            name, x, m = f"joint.{i}.{s}", streams[s], mods[s]
            x = taps.tap(f"{name}.mid", x + m[2] * self.lin(f"{name}.mix", part))
            h = self.lin(f"{name}.fc1", self.shifted(f"{name}.pre2", x, m[4], m[3]))
            exact = bug == "gelu_with_erf"
            h = self.lin(f"{name}.fc2", F.gelu(h, approximate="none" if exact else "tanh"))
            done[s] = taps.tap(name, x + m[5] * h)
        return done["pic"], done["txt"]

    def solo(self, i: int, x: Tensor, c: Tensor) -> Tensor:
        """Of text and picture in one stream."""
        bug, name = self.bug, f"solo.{i}"
        shift, scale, gate = self.modulation(name, c, 3)
        h = self.shifted(f"{name}.pre", x, scale, shift)
        q, k, v, up = self.lin(f"{name}.wide", h).split([WIDTH, WIDTH, WIDTH, 4 * WIDTH], -1)
        q, k = self.rms(f"{name}.nq", self.heads(q)), self.rms(f"{name}.nk", self.heads(k))
        y = self.attend(name, self.rotate(q, True), self.rotate(k, True), self.heads(v))
        act = F.gelu(up, approximate="tanh")
        if bug == "activation_over_both":
            y = F.gelu(y, approximate="tanh")
        parts = [act, y] if bug == "mlp_before_attention" and i == 1 else [y, act]
        y = self.lin(f"{name}.back", taps.tap(f"{name}.cat", torch.cat(parts, -1)))
        start = h if bug == "solo_skip_from_normed" and i == 2 else x
        y = y if bug == "solo_gate_missing" and i == 1 else gate * y
        return taps.tap(name, start + y)

    def head(self, x: Tensor, c: Tensor) -> Tensor:
        scale, shift = self.lin("head.ada", F.silu(c))[:, None].chunk(2, -1)
        if self.bug == "head_shift_is_first":
            scale, shift = shift, scale
        return self.lin("head.lin", self.shifted("head.pre", x, scale, shift))

    def __call__(
        self, tokens: Tensor, text: Tensor, c: Tensor, table: tuple[Tensor, Tensor]
    ) -> Tensor:
        bug, self.rope = self.bug, table
        pic = self.lin("tok.pic", tokens)
        txt = self.lin("tok.txt", text) if self.kept_text is None else self.kept_text
        for i in range(JOINT):
            pic, txt = self.joint(i, pic, txt, c)
        if bug == "text_stream_carried_over":
            self.kept_text = txt
        x = torch.cat([txt, pic], 1)
        for i in range(SOLO - 1 if bug == "last_solo_forgotten" else SOLO):
            x = self.solo(i, x, c)
        return self.head(x[:, WORDS:], c)


def unpacked(x: Tensor, bug: str | None) -> Tensor:
    """(rows, columns, channels) of the tokens."""
    x = x.reshape(ROWS // 2, COLUMNS // 2, CHANNELS, 2, 2)
    x = x.permute(0, 4, 1, 3, 2) if bug == "patch_transposed_at_end" else x.permute(0, 3, 1, 4, 2)
    return x.reshape(ROWS, COLUMNS, CHANNELS)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Kontext(converted(checkpoint(folder, "transformer"), bug), bug, dtype)

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(value(f"pipeline/{name}")).to(net.kind)

    text, pooled, start = (tensor(x) for x in ("prompt_embeds", "pooled_prompt_embeds", "noise"))
    mode, guide = tensor("image_mode"), torch.from_numpy(value("pipeline/guidance"))
    if bug == "text_padding_blanked":
        text[:, -2:] = 0
    ids, sigmas = positions(bug), levels(bug)
    kept = {k: to_numpy(v) for k, v in net.p.items()} if weights else None
    blocks = (
        "in.*",
        "cond",
        "tok.*",
        "rope.*",
        "joint.?.???",
        "solo.?",
        "head.lin",
        "step.*",
        "sched.*",
    )
    with port_trace(out, dump, dtype, (*blocks, "result"), kept):
        for name, x in (("noise", start), ("text", text), ("pooled", pooled), ("guide", guide)):
            taps.tap(f"in.{name}", x, kind="input")
        taps.tap("in.picture", mode, kind="input")
        taps.tap("in.ids", ids, kind="input")
        taps.tap("sched.sigmas", sigmas, kind="schedule")
        picture = (mode - SHIFT) * SCALING
        if bug == "picture_shift_after_scaling":
            picture = mode * SCALING - SHIFT
        picture = taps.tap("in.picture_scaled", picture)[0]
        picture = packed(picture, patch_first=bug == "picture_patches_channels_last")[None]
        x = taps.tap("in.tokens", packed(start[0])[None])
        n, table = x.shape[1], net.tables(ids)
        for step in range(STEPS):
            taps.set_step(step)
            at = sigmas[step + 1] if bug == "time_one_step_ahead" else sigmas[step]
            if bug == "time_before_the_shift":
                at = torch.tensor(1 - step / STEPS)
            time = taps.tap("step.time", (at * 1000).expand(1).to(net.kind) / 1000, kind="schedule")
            c = net.condition(time, guide, pooled)
            both = [picture, x] if bug == "picture_tokens_first" else [x, picture]
            tokens = taps.tap("step.tokens", torch.cat(both, 1))
            v = net(tokens, text, c, table)
            if bug == "picture_stepped_too":
                picture = (picture + (sigmas[step + 1] - sigmas[step]) * v[:, n:]).to(net.kind)
            at_end = bug in ("velocity_of_last_tokens", "picture_tokens_first")
            v = taps.tap("step.velocity", v[:, -n:] if at_end else v[:, :n])
            moved = x.float() + (sigmas[step + 1] - sigmas[step]) * v.float()
            if bug == "latents_in_half":
                moved = moved.half().float()
            x = taps.tap("step.latents", moved.to(net.kind))
        taps.tap("result", unpacked(x[0], bug))


NO_COUNTERPART: tuple[str, ...] = (r"^cond\.time_guide$",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers"
IDS = r"position|coordinate|\bids?\b"
PRECISION = r"bf16|bfloat16|f16|float16|\bhalf\b|precision|round|\bcast"
BUGS = (
    Bug(
        "qkv_rows_per_head",
        "The fused qkv of the picture in joint block 1 is stored head by head.",
        (LOADED, SWAPPED, r"\bheads?\b|layout|interleav|transpos"),
        "weights",
    ),
    Bug(
        "text_query_norm_of_picture",
        "The text's queries in joint block 0 are normed with the picture's weight.",
        (LOADED, r"norm_q\b|another|other stream|dupl|same (norm|param)"),
        "weights",
    ),
    Bug(
        "entry_rows_patch_major",
        "Inputs of the first linear are in the order (row, column, channel).",
        (LOADED, SWAPPED, r"channel|patch|layout|transpos"),
        "weights",
    ),
    Bug(
        "int8_left_in_solo",
        "The last linear of solo block 1 was read from an int8 file.",
        (LOADED, r"int8|8.bit|quanti[sz]|round|precision"),
        "weights",
    ),
    Bug(
        "wide_mlp_rows_first",
        "The fused linear of the solo blocks has the MLP before q, k and v.",
        (LOADED, SWAPPED, r"split|slice|offset|concat"),
        "weights",
    ),
    Bug(
        "time_and_guide_files_mixed_up",
        "The time's MLP has the guidance's weights, and the other way round.",
        (LOADED, SWAPPED, r"mix(ed)?.up"),
        "weights",
    ),
    Bug(
        "picture_index_zero",
        "Ids of the reference picture begin with 0, as those of the latents.",
        (IDS, r"index|first axis|\brope\b|offset"),
        "ids",
    ),
    Bug(
        "picture_beside_latents",
        "The reference picture's ids lie to the right of the latents'.",
        (IDS, r"offset|shift|\brope\b|first axis"),
        "ids",
    ),
    Bug(
        "picture_ids_down_columns",
        "Ids of the reference picture go down columns; its tokens go along rows.",
        (IDS, r"\brows?\b|column|transpos|height|width|\brope\b", SWAPPED),
        "ids",
    ),
    Bug(
        "picture_ids_by_latent_width",
        "Ids of the reference picture are made with the latents' width.",
        (IDS, r"\brows?\b|column|height|width|\bgrid|\brope\b"),
        "ids",
    ),
    Bug(
        "words_counted",
        "Ids of the text count its words in the last axis; they are zeros.",
        (IDS, r"zeros?\b|arange|\brope\b|count"),
        "ids",
    ),
    Bug(
        "shift_counts_picture",
        "The dynamic shift counts the reference picture's tokens too.",
        (r"\bmu\b|number of tokens|sequence length|seq_len|sigma|schedule|time.?shift",),
        "schedule",
    ),
    Bug(
        "mu_not_exponentiated",
        "The shift of the sigmas takes mu, not its exponential.",
        (r"\bmu\b|time.?shift|expon|\bexp\b|sigma|schedule",),
        "schedule",
    ),
    Bug(
        "sigma_end_above_zero",
        "The last sigma is 0.001, not 0.",
        (r"last sigma|final sigma|terminal|zero|sigma|schedule|\bdt\b|step size",),
        "schedule",
    ),
    Bug(
        "time_one_step_ahead",
        "The network gets the time of the next step.",
        (r"next (step|sigma|time)|off.by.one|index|timestep|step\.time|one step|sigma|schedule",),
        "schedule",
    ),
    Bug(
        "text_padding_blanked",
        "Embeddings of the text's padding are set to zero.",
        (r"padd|mask|zero|prompt_embeds|input",),
        "inputs",
    ),
    Bug(
        "picture_shift_after_scaling",
        "The reference picture's latents are scaled before the shift is subtracted.",
        (r"order|shift|scal(e|ed|ing)|offset|constant|normali[sz]|subtract",),
        "inputs",
    ),
    Bug(
        "picture_patches_channels_last",
        "Patches of the reference picture have their channels last.",
        (r"channel|patch|pack|layout|transpos|\bax[ei]s\b", SWAPPED),
        "inputs",
    ),
    Bug(
        "waves_in_bfloat16",
        "Angles of time and guidance are computed in bfloat16.",
        (PRECISION,),
    ),
    Bug(
        "sines_first",
        "Sines come before cosines in the waves of time and guidance.",
        (r"\bcos|\bsin|flip", SWAPPED),
    ),
    Bug(
        "guidance_left_small",
        "The guidance is not multiplied by 1000.",
        (r"1000|1e3|factor|multipl|guidance.*scal|scal.*guidance",),
    ),
    Bug(
        "guidance_branch_absent",
        "The guidance's embedding is not added.",
        (
            r"guidance.*(missing|not (added|used)|left out|lost|absent|without|never|unused)",
            r"(missing|without|lacks?|not added|no) .*guidance|missing (term|summand|addend)",
            r"(not|never) added|guidance_embed",
        ),
    ),
    Bug(
        "condition_of_first_step",
        "The condition of the first step is kept for all.",
        (r"stale|cache|kept|first step|step 0|previous (step|call)|earlier|reus|unchanged",),
    ),
    Bug("joint_norm_eps_default", "Norms of the joint blocks have eps 1e-5.", (r"\beps",)),
    Bug(
        "variance_unbiased",
        "Norms of the solo blocks divide the variance by n - 1.",
        (
            r"unbiased|bessel|n ?[-−] ?1\b|ddof|correction|varianc|standard deviation|79 ?/ ?80",
            r"0\.993|1\.006",
        ),
    ),
    Bug(
        "values_with_key_norm",
        "Values of solo block 0 are normed as its keys are.",
        (
            r"\b(v|to_v)\b.{0,40}norm|norm.{0,40}\b(v|to_v)\b|(extra|additional) norm",
            r"norm\w* (of|on|to|applied to) (the )?values|values? (is|are|was|were) .{0,12}norm",
        ),
    ),
    Bug(
        "axis_widths_rolled",
        "RoPE gives its axes widths 6, 6, 4 and not 4, 6, 6.",
        (r"\bax[ei]s|axes_dim|\bdim(ension)?s?\b|widths?\b|frequenc", SWAPPED),
    ),
    Bug(
        "exponent_over_head",
        "RoPE's exponents are divided by the head's width, not the axis's.",
        (r"frequenc|expon|divi(d|s)|denominator|\bdim(ension)?s?\b|theta|\bbase\b|wavelength",),
    ),
    Bug(
        "solo_table_picture_first",
        "RoPE's tables of the solo blocks have the picture before the text.",
        (SWAPPED, r"\broll|shift|offset|position|table|cos\b.*sin|concat"),
    ),
    Bug(
        "scores_over_width",
        "Scores are divided by the root of the width, not of a head's.",
        (
            r"\b(scores?|logits|temperature|sqrt|root|factor|head_dim)\b|√|-0\.5",
            r"(attention|softmax|quer).*scal|scal.*(attention|softmax|quer)",
        ),
    ),
    Bug(
        "picture_blind_to_latents",
        "In joint blocks the reference picture does not attend to the latents.",
        (r"mask|not attend|unseen|hidden from|(cannot|do(es)? not) see|\bfewer keys",),
    ),
    Bug(
        "heads_joined_untransposed",
        "Heads of the last solo block are joined without their transposition.",
        (r"transpos|reshap|layout|\bheads?\b|\bax[ei]s\b", SWAPPED),
    ),
    Bug(
        "solo_silu_twice",
        "Modulations of the solo blocks apply SiLU to what had SiLU.",
        (r"silu|swish|activation|twice",),
    ),
    Bug(
        "head_shift_is_first",
        "The last norm takes the first half of its modulation as the shift.",
        (r"chunk|split|half|halves", SWAPPED, r"scale.*shift|shift.*scale"),
    ),
    Bug("gelu_with_erf", "GELU of the joint blocks is exact, not by tanh.", (r"gelu|tanh|\berf",)),
    Bug(
        "activation_over_both",
        "Solo blocks apply GELU to the attention's result too.",
        (r"gelu|activation|nonlinear|non-linear",),
    ),
    Bug(
        "solo_skip_from_normed",
        "The last solo block adds its result to the normed stream.",
        (r"residual|skip|shortcut|\badd(ed|ition|s)?\b|norm(ed|ali[sz]ed|_hidden)|pre-?norm",),
    ),
    Bug(
        "mlp_before_attention",
        "Solo block 1 joins the MLP's part before the attention's.",
        (r"concat|\bcat\b|join", SWAPPED),
    ),
    Bug(
        "picture_tokens_first",
        "Tokens of the reference picture come before the latents.",
        (SWAPPED, r"concat|\bcat\b|join|\broll|\b(comes?|before|first)\b"),
    ),
    Bug(
        "velocity_of_last_tokens",
        "The prediction is read from the last tokens, not the first.",
        (r"slice|offset|last|first|\bend\b|\broll|range|wrong (part|tokens|rows)|split|shift",),
    ),
    Bug(
        "last_solo_forgotten",
        "The last solo block does not run.",
        (
            r"skip|missing|not (run|called|applied)|fewer|too few|never|left out",
            r"single_transformer_blocks\.(1|2)\b(?!\.)|solo\.(1|2)\b(?!\.)",
        ),
    ),
    Bug(
        "text_stream_carried_over",
        "The second step starts with the text stream that the first left.",
        (
            r"stale|cache|kept|carr(y|ied)|previous|earlier|step 0|first step|reus|overwrit",
            r"in.place",
        ),
    ),
    Bug(
        "picture_stepped_too",
        "The sampler moves the reference picture's tokens as well.",
        (
            r"picture|reference.?s? (image|tokens|latents)|image_latents|image tokens",
            r"updat|stepp?(ed|ing)|changed|moved|denois|not constant|overwrit|in.place",
        ),
    ),
    Bug("latents_in_half", "Latents are rounded to float16 after a step.", (PRECISION,)),
    Bug(
        "patch_transposed_at_end",
        "Rows and columns of each patch are exchanged in the result.",
        (r"transpos|\brows?\b|column|height|width|\bax[ei]s\b|patch|layout|unpack", SWAPPED),
    ),
)

MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "text_mlp_end_of_picture",
        "The last linear of the text's MLP in joint block 1 is the picture's.",
        (LOADED, r"\bff\.net|another|other (stream|mlp|layer)|dupl|\b(picture|image)'?s\b"),
        "weights",
    ),
    Bug(
        "pool_weight_transposed",
        "A square weight of the pooled text's MLP is transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "latents_ids_of_pixels",
        "Ids of the latents count latent pixels, two for each token.",
        (IDS, r"\brope\b|factor|twice|doubl|half|pixel|stride|\bscal"),
        "ids",
    ),
    Bug(
        "time_before_the_shift",
        "The network gets the time of the schedule without its shift.",
        (r"\btime|timestep|sigma|schedule|shift|\bmu\b",),
        "schedule",
    ),
    Bug(
        "pool_branch_not_activated",
        "The pooled text's MLP has no SiLU between its linears.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "solo_norm_not_centred",
        "The norm of solo block 0 is an RMS norm.",
        (r"\brms|\bmean\b|cent(er|re)|subtract|layer ?norm",),
    ),
    Bug(
        "solo_rotated_backwards",
        "Solo blocks rotate queries and keys the other way.",
        (
            r"\bsign|negat|conjugat|invers|backward|opposite|other way|clockwise|direction|minus",
            r"revers|mirror|\bflip",
        ),
    ),
    Bug(
        "scores_scaled_twice",
        "Scores of joint block 1 are divided by the root of the head's width twice.",
        (
            r"\b(scores?|logits|temperature|sqrt|root|factor|head_dim|twice)\b|√|-0\.5",
            r"(attention|softmax|quer).*scal|scal.*(attention|softmax|quer)",
        ),
    ),
    Bug(
        "joint_split_picture_first",
        "Joint blocks cut attention's result as if the picture came before the text.",
        (
            r"split|\bcut\b|slic|offset|concat|boundary|\broll|order|swap|exchang|permut",
            r"(picture|image|text).*(first|before)|wrong (tokens|rows|part)",
        ),
    ),
    Bug(
        "solo_gate_missing",
        "Solo block 1 adds its result without the gate.",
        (r"\bgat(e|es|ed|ing)\b",),
    ),
)
