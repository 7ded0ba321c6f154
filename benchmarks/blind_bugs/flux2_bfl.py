"""FLUX.2's transformer and sampler in torch, with one reference image.

The structure, the names of weights and the rotary matrices are those of the authors' repository
(black-forest-labs/flux2, src/flux2); diffusers' Flux2Transformer2DModel with the loop of
Flux2Pipeline is the reference. The guidance scale is an input of the network, so each step is one
call.
"""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
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
from lydite.trace import taps
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "flux2_bfl"
HEADS, HEAD, AXES, THETA, RATIO, WAVE = 2, 16, (4, 4, 4, 4), 2000, 3.0, 32
WIDTH, HIDDEN = HEADS * HEAD, int(HEADS * HEAD * RATIO)
DOUBLE, SINGLE = 2, 3
LATENT, CHANNELS = 4, 16  # channels of a latent image, and of its 2×2 patches
ROWS, COLUMNS, OTHER_ROWS, OTHER_COLUMNS = 4, 6, 4, 3  # patches of the image and of the other one
TOKENS, TEXT, TAKEN = 7, 8, 3  # of the text encoder: tokens, width, layers that are taken
STEPS, GUIDANCE, BN_EPS = 3, 4.0, 1e-4


def reference(folder: Path, dtype: str) -> None:
    """The loop of Flux2Pipeline with an image as condition, from embeddings to latents."""
    config: dict[str, Any] = dict(in_channels=CHANNELS, num_layers=DOUBLE, mlp_ratio=RATIO)
    config |= dict(num_single_layers=SINGLE, attention_head_dim=HEAD, num_attention_heads=HEADS)
    config |= dict(joint_attention_dim=TAKEN * TEXT, timestep_guidance_channels=WAVE)
    config |= dict(axes_dims_rope=AXES, rope_theta=THETA)
    model = randomised(lambda: Flux2Transformer2DModel(**config), 83)
    for name, parameter in model.named_parameters():
        if "modulation" in name or name.startswith("norm_out"):
            parameter.mul_(2)  # each shift, scale and gate matters
        if name.endswith(("norm_q.weight", "norm_k.weight", "added_q.weight", "added_k.weight")):
            parameter.mul_(1.5 * (1 + noise(len(name), HEAD) / 4))
    model = saved(model, folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        layers = noise(11, 1, TAKEN, TOKENS, TEXT).to(model.dtype)
        recorder.record("pipeline/text_hidden_states", layers, kind="input")
        prompt = layers.permute(0, 2, 1, 3).reshape(1, TOKENS, TAKEN * TEXT)
        recorder.record("pipeline/prompt_embeds", prompt)
        mean = (noise(12, 1, CHANNELS, 1, 1) / 2).to(model.dtype)
        variance = (1.5 + noise(13, 1, CHANNELS, 1, 1) / 4).to(model.dtype)
        std = torch.sqrt(variance + BN_EPS)
        other = noise(14, 1, LATENT, 2 * OTHER_ROWS, 2 * OTHER_COLUMNS).to(model.dtype)
        recorder.record("pipeline/bn_mean", mean, kind="input")
        recorder.record("pipeline/bn_var", variance, kind="input")
        recorder.record("pipeline/reference_latents", other, kind="input")
        other = (Flux2Pipeline._patchify_latents(other) - mean) / std
        other_ids = Flux2Pipeline._prepare_image_ids([other])
        other = Flux2Pipeline._pack_latents(other)
        recorder.record("pipeline/image_latents", other)
        latents = noise(15, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/noise", latents, kind="input")
        ids = Flux2Pipeline._prepare_latent_ids(latents)
        latents = Flux2Pipeline._pack_latents(latents)
        text_ids = Flux2Pipeline._prepare_text_ids(prompt)
        image_ids = torch.cat([ids, other_ids], 1)
        recorder.record("pipeline/txt_ids", text_ids, kind="input")
        recorder.record("pipeline/img_ids", image_ids, kind="input")
        mu = compute_empirical_mu(latents.shape[1], STEPS)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / STEPS, STEPS).tolist(), mu=mu)
        scheduler.set_begin_index(0)
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        guidance = torch.full([1], GUIDANCE)
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            predicted = model(
                hidden_states=torch.cat([latents, other], 1),
                timestep=t.expand(1).to(latents.dtype) / 1000,
                guidance=guidance,
                encoder_hidden_states=prompt,
                txt_ids=text_ids,
                img_ids=image_ids,
                return_dict=False,
            )[0]
            predicted = predicted[:, : latents.size(1)]
            recorder.record("pipeline/noise_pred", predicted)
            latents = scheduler.step(predicted, t, latents, return_dict=False)[0]
            recorder.record("pipeline/latents", latents)
        latents: Any = Flux2Pipeline._unpack_latents_with_ids(latents, ids)
        latents = latents * std + mean
        recorder.record("pipeline/denormalized", latents)
        recorder.record("pipeline/unpatchified", Flux2Pipeline._unpatchify_latents(latents))


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the names of the original, with q, k and v as one matrix."""
    new: dict[str, Array] = {}
    for name, old in (
        ("img_in", "x_embedder"),
        ("txt_in", "context_embedder"),
        ("time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
        ("time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
        ("guidance_in.in_layer", "time_guidance_embed.guidance_embedder.linear_1"),
        ("guidance_in.out_layer", "time_guidance_embed.guidance_embedder.linear_2"),
        ("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
        ("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
        ("single_stream_modulation.lin", "single_stream_modulation.linear"),
        ("final_layer.linear", "proj_out"),
    ):
        new[f"{name}.weight"] = w[f"{old}.weight"]
    scale, shift = np.split(w["norm_out.linear.weight"], 2)
    halves = (scale, shift) if bug == "final_halves_not_swapped" else (shift, scale)
    new["final_layer.adaLN_modulation.1.weight"] = np.concatenate(halves)
    for i in range(DOUBLE):
        block, old = f"double_blocks.{i}", f"transformer_blocks.{i}"
        for stream, (q, k, v), norm, out, mlp in (
            ("img", ("to_q", "to_k", "to_v"), "norm_", "to_out.0", "ff"),
            (
                "txt",
                ("add_q_proj", "add_k_proj", "add_v_proj"),
                "norm_added_",
                "to_add_out",
                "ff_context",
            ),
        ):
            if bug == "txt_mlp_of_image" and i == 1:
                mlp = "ff"
            order = (k, q, v) if bug == "txt_qkv_order" and stream == "txt" else (q, k, v)
            fused = [w[f"{old}.attn.{x}.weight"] for x in order]
            new[f"{block}.{stream}_attn.qkv.weight"] = np.concatenate(fused)
            for x, name in (("q", "query_norm"), ("k", "key_norm")):
                new[f"{block}.{stream}_attn.norm.{name}.scale"] = w[f"{old}.attn.{norm}{x}.weight"]
            new[f"{block}.{stream}_attn.proj.weight"] = w[f"{old}.attn.{out}.weight"]
            new[f"{block}.{stream}_mlp.0.weight"] = w[f"{old}.{mlp}.linear_in.weight"]
            new[f"{block}.{stream}_mlp.2.weight"] = w[f"{old}.{mlp}.linear_out.weight"]
    for i in range(SINGLE):
        block, old = f"single_blocks.{i}", f"single_transformer_blocks.{i}.attn"
        if bug == "single_block_off_by_one" and i == 2:
            old = "single_transformer_blocks.1.attn"
        new[f"{block}.linear1.weight"] = w[f"{old}.to_qkv_mlp_proj.weight"]
        new[f"{block}.linear2.weight"] = w[f"{old}.to_out.weight"]
        new[f"{block}.norm.query_norm.scale"] = w[f"{old}.norm_q.weight"]
        new[f"{block}.norm.key_norm.scale"] = w[f"{old}.norm_k.weight"]
    if bug == "key_scale_not_loaded":
        scale = new["single_blocks.1.norm.key_norm.scale"]
        new["single_blocks.1.norm.key_norm.scale"] = np.ones_like(scale)
    return new


def rope(position: Tensor, dim: int, bug: str | None) -> Tensor:
    """Rotation matrices of (batch, tokens, dim / 2, 2, 2)."""
    theta = 10000 if bug == "rope_theta_of_flux1" else THETA
    omega = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.einsum("bn,d->bnd", position.double(), omega)
    out = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    return out.unflatten(-1, (2, 2)).float()


def apply_rope(x: Tensor, pe: Tensor, bug: str | None) -> Tensor:
    """Turns neighbouring channels of (batch, heads, tokens, channels)."""
    if bug == "rope_halves":
        pairs = x.float().unflatten(-1, (2, -1)).transpose(-1, -2).unsqueeze(-2)
    else:
        pairs = x.float().unflatten(-1, (-1, 1, 2))
    out = pe[..., 0] * pairs[..., 0] + pe[..., 1] * pairs[..., 1]
    if bug == "rope_halves":
        out = out.transpose(-1, -2)
    return out.reshape(x.shape).to(x.dtype)


def timestep_embedding(t: Tensor, dim: int, bug: str | None, time_factor: float = 1000.0) -> Tensor:
    t = time_factor * t
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
    args = t[:, None].float() * freqs[None]
    waves = [torch.cos(args), torch.sin(args)]
    if bug == "sinusoid_sine_first":
        waves.reverse()
    return torch.cat(waves, -1).to(t.dtype)


class MLPEmbedder(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.in_layer = nn.Linear(WAVE, WIDTH, bias=False)
        self.out_layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = taps.tap(f"{self.name}.in_layer", self.in_layer(x))
        return taps.tap(f"{self.name}.out_layer", self.out_layer(F.silu(x)))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HEAD))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(torch.mean(y**2, -1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * self.scale


class QKNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_norm = RMSNorm()
        self.key_norm = RMSNorm()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q), self.key_norm(k)


class SiLUActivation(nn.Module):
    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.bug = bug

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        if self.bug == "swiglu_halves_exchanged":
            x1, x2 = x2, x1
        return F.silu(x1) * x2


class Modulation(nn.Module):
    """Shift, scale and gate, once or twice, that all blocks of a kind share."""

    def __init__(self, name: str, double: bool, bug: str | None) -> None:
        super().__init__()
        self.name, self.bug = name, bug
        self.multiplier = 6 if double else 3
        self.lin = nn.Linear(WIDTH, self.multiplier * WIDTH, bias=False)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        without = self.bug == "single_modulation_without_silu" and self.multiplier == 3
        out = taps.tap(f"{self.name}.lin", self.lin(vec if without else F.silu(vec)))
        return out[:, None].chunk(self.multiplier, -1)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.norm = QKNorm()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def split_heads(x: Tensor) -> Tensor:
    """(batch, tokens, channels) as (batch, heads, tokens, channels of a head)."""
    return x.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)


def attention(name: str, q: Tensor, k: Tensor, v: Tensor, pe: Tensor, bug: str | None) -> Tensor:
    q = taps.tap(f"{name}.q_rope", apply_rope(q, pe, bug))
    k = taps.tap(f"{name}.k_rope", apply_rope(k, pe, bug))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class DoubleStreamBlock(nn.Module):
    def __init__(self, name: str, bug: str | None) -> None:
        super().__init__()
        self.name, self.bug = name, bug
        self.img_attn, self.txt_attn = SelfAttention(), SelfAttention()
        self.img_mlp, self.txt_mlp = (
            nn.Sequential(
                nn.Linear(WIDTH, 2 * HIDDEN, bias=False),
                SiLUActivation(bug),
                nn.Linear(HIDDEN, WIDTH, bias=False),
            )
            for _ in range(2)
        )

    def heads(self, stream: str, x: Tensor, shift: Tensor, scale: Tensor) -> list[Tensor]:
        """q, k and v of a stream."""
        name, attn = f"{self.name}.{stream}_attn", getattr(self, f"{stream}_attn")
        x = taps.tap(f"{self.name}.{stream}_modulated", (1 + scale) * layer_norm(x) + shift)
        q, k, v = map(split_heads, taps.tap(f"{name}.qkv", attn.qkv(x)).chunk(3, -1))
        q, k = attn.norm(q, k)
        taps.tap(f"{name}.q", q)
        taps.tap(f"{name}.k", k)
        return [q, k, taps.tap(f"{name}.v", v)]

    def mlp(self, stream: str, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        layers = getattr(self, f"{stream}_mlp")
        x = taps.tap(f"{self.name}.{stream}_mlp_in", (1 + scale) * layer_norm(x) + shift)
        for i, layer in enumerate(layers):
            x = taps.tap(f"{self.name}.{stream}_mlp.{i}", layer(x))
        return x

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        pe: Tensor,
        img_mod: tuple[Tensor, ...],
        txt_mod: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = img_mod
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = txt_mod
        if self.bug == "txt_scale_before_shift":
            txt_shift1, txt_scale1 = txt_scale1, txt_shift1
            txt_shift2, txt_scale2 = txt_scale2, txt_shift2
        img_heads = self.heads("img", img, img_shift1, img_scale1)
        txt_heads = self.heads("txt", txt, txt_shift1, txt_scale1)
        q, k, v = (torch.cat(both, 2) for both in zip(txt_heads, img_heads, strict=True))
        attn = taps.tap(f"{self.name}.attn", attention(self.name, q, k, v, pe, self.bug))
        n = txt.shape[1]
        img_attn = taps.tap(f"{self.name}.img_attn.proj", self.img_attn.proj(attn[:, n:]))
        txt_attn = taps.tap(f"{self.name}.txt_attn.proj", self.txt_attn.proj(attn[:, :n]))
        before = img
        img = taps.tap(f"{self.name}.img_mid", img + img_gate1 * img_attn)
        source = before if self.bug == "mlp_before_attention" else img
        img = img + img_gate2 * self.mlp("img", source, img_shift2, img_scale2)
        txt = taps.tap(f"{self.name}.txt_mid", txt + txt_gate1 * txt_attn)
        gate = txt_gate1 if self.bug == "txt_mlp_gate_of_attention" else txt_gate2
        txt = txt + gate * self.mlp("txt", txt, txt_shift2, txt_scale2)
        return taps.tap(f"{self.name}.img", img), taps.tap(f"{self.name}.txt", txt)


class SingleStreamBlock(nn.Module):
    """Attention and MLP side by side, with their matrices as one."""

    def __init__(self, name: str, bug: str | None) -> None:
        super().__init__()
        self.name, self.bug = name, bug
        self.linear1 = nn.Linear(WIDTH, 3 * WIDTH + 2 * HIDDEN, bias=False)
        self.linear2 = nn.Linear(WIDTH + HIDDEN, WIDTH, bias=False)
        self.norm = QKNorm()
        self.mlp_act = SiLUActivation(bug)

    def forward(self, x: Tensor, pe: Tensor, mod: tuple[Tensor, ...]) -> Tensor:
        name, bug = self.name, self.bug
        shift, scale, gate = mod
        x_mod = taps.tap(f"{name}.x_mod", (1 + scale) * layer_norm(x) + shift)
        fused = taps.tap(f"{name}.linear1", self.linear1(x_mod))
        qkv, mlp = fused.split([3 * WIDTH, 2 * HIDDEN], -1)
        if bug == "single_heads_interleaved":
            q, k, v = (y.unflatten(-1, (HEAD, HEADS)).permute(0, 3, 1, 2) for y in qkv.chunk(3, -1))
        else:
            q, k, v = map(split_heads, qkv.chunk(3, -1))
        if bug == "norm_after_rope":
            q, k = apply_rope(q, pe, bug), apply_rope(k, pe, bug)
            q, k = self.norm(q, k)
            taps.tap(f"{name}.q", q)
            taps.tap(f"{name}.k", k)
            attn = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        else:
            q, k = self.norm(q, k)
            taps.tap(f"{name}.q", q)
            taps.tap(f"{name}.k", k)
            attn = attention(name, q, k, v, pe, bug)
        taps.tap(f"{name}.v", v)
        taps.tap(f"{name}.attn", attn)
        parts = [attn, taps.tap(f"{name}.mlp_act", self.mlp_act(mlp))]
        if bug == "single_mlp_concatenated_first":
            parts.reverse()
        out = taps.tap(f"{name}.linear2", self.linear2(torch.cat(parts, -1)))
        return taps.tap(name, x + gate * out)


class LastLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CHANNELS, bias=False)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH, bias=False))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, -1)
        x = taps.tap("final_layer.norm_final", (1 + scale) * layer_norm(x) + shift)
        return taps.tap("final_layer", self.linear(x))


class Flux2(nn.Module):
    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.bug = bug
        self.img_in = nn.Linear(CHANNELS, WIDTH, bias=False)
        self.txt_in = nn.Linear(TAKEN * TEXT, WIDTH, bias=False)
        self.time_in, self.guidance_in = MLPEmbedder("time_in"), MLPEmbedder("guidance_in")
        self.double_stream_modulation_img = Modulation("double_stream_modulation_img", True, bug)
        self.double_stream_modulation_txt = Modulation("double_stream_modulation_txt", True, bug)
        self.single_stream_modulation = Modulation("single_stream_modulation", False, bug)
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(f"double_blocks.{i}", bug) for i in range(DOUBLE)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(f"single_blocks.{i}", bug) for i in range(SINGLE)
        )
        self.final_layer = LastLayer()

    def pe_embedder(self, ids: Tensor) -> Tensor:
        """(batch, 1, tokens, channels of a head / 2, 2, 2) of ids of (batch, tokens, axes)."""
        turns = [rope(ids[..., i], dim, self.bug) for i, dim in enumerate(AXES)]
        return torch.cat(turns, -3).unsqueeze(1)

    def forward(
        self,
        x: Tensor,
        x_ids: Tensor,
        timesteps: Tensor,
        ctx: Tensor,
        ctx_ids: Tensor,
        guidance: Tensor,
    ) -> Tensor:
        bug = self.bug
        emb = taps.tap("timestep_emb", timestep_embedding(timesteps, WAVE, bug))
        vec = self.time_in(emb)
        factor = 1.0 if bug == "guidance_not_scaled" else 1000.0
        emb = taps.tap("guidance_emb", timestep_embedding(guidance, WAVE, bug, factor))
        vec = taps.tap("vec", vec + self.guidance_in(emb))
        mod_img = self.double_stream_modulation_img(vec)
        mod_txt = self.double_stream_modulation_txt(vec)
        mod_single = self.single_stream_modulation(vec)
        img = taps.tap("img_in", self.img_in(x))
        txt = taps.tap("txt_in", self.txt_in(ctx))
        pe_x, pe_ctx = self.pe_embedder(x_ids), self.pe_embedder(ctx_ids)
        pe = taps.tap("pe", torch.cat([pe_ctx, pe_x], 2))
        for block in self.double_blocks:
            img, txt = block(img, txt, pe, mod_img, mod_txt)
        x = torch.cat([txt, img], 1)
        if bug == "rope_image_before_text":
            pe = torch.cat([pe_x, pe_ctx], 2)
        for block in self.single_blocks:
            x = block(x, pe, mod_single)
        n = txt.shape[1]
        x = x[:, :-n] if bug == "text_cut_from_end" else x[:, n:]
        return self.final_layer(x, vec)


def prc_txt(x: Tensor, bug: str | None) -> Tensor:
    """Position ids of text: (0, 0, 0, number)."""
    l = torch.arange(x.shape[1])
    if bug == "text_ids_zero":
        l = torch.zeros_like(l)
    ids = torch.zeros(1, x.shape[1], 4, dtype=torch.int64)
    ids[..., 3] = l
    return ids


def prc_img(x: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """Tokens and position ids, (time, row, column, 0), of (batch, channels, rows, columns)."""
    _, _, h, w = x.shape
    ids = torch.cartesian_prod(torch.tensor([t]), torch.arange(h), torch.arange(w), torch.arange(1))
    return x.flatten(2).transpose(1, 2), ids[None]


def encode_image_refs(
    z: Tensor, mean: Tensor, std: Tensor, bug: str | None
) -> tuple[Tensor, Tensor]:
    """Tokens and ids of the reference image; its latents are patches, normalised."""
    b, c, h, w = z.shape
    z = z.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
    z = z.reshape(b, 4 * c, h // 2, w // 2)
    if bug != "reference_not_normalised":
        z = (z - mean) / std
    return prc_img(z, 0 if bug == "reference_time_zero" else 10)


def get_schedule(num_steps: int, image_seq_len: int, bug: str | None) -> Tensor:
    """Times from 1 to 0."""
    a1, b1 = 8.73809524e-05, 1.89833333
    a2, b2 = 0.00016927, 0.45666666
    m_200, m_10 = a2 * image_seq_len + b2, a1 * image_seq_len + b1
    slope = (m_200 - m_10) / 190.0
    mu = slope * num_steps + m_200 - 200.0 * slope
    if bug == "mu_of_flux1":
        mu = 0.5 + (1.15 - 0.5) / (4096 - 256) * (image_seq_len - 256)
    end = 1 / num_steps if bug == "schedule_ends_one_step_early" else 0
    t = np.linspace(1, end, num_steps + 1, dtype=np.float32)  # torch rounds in another way
    with np.errstate(divide="ignore"):
        return torch.from_numpy(math.exp(mu) / (math.exp(mu) + (1 / t - 1)))


def unpatchify(x: Tensor, bug: str | None) -> Tensor:
    b, c, h, w = x.shape
    if bug == "unpatchify_patch_first":
        x = x.reshape(b, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(b, c // 4, 2 * h, 2 * w)


@torch.no_grad()
def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)

    def get(name: str) -> Tensor:
        return torch.from_numpy(value(f"pipeline/{name}")).to(getattr(torch, dtype))

    state = converted(checkpoint(folder, "transformer"), bug)
    model = Flux2(bug)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()})
    model = model.to(getattr(torch, dtype)).eval()
    kept = {k: v.astype(dtype) for k, v in state.items()} if weights else None
    blocks = ("txt", "noise", "timesteps", "img_cond_seq", "img_in", "txt_in", "vec", "pred")
    blocks += ("double_blocks.?.img", "double_blocks.?.txt", "single_blocks.?", "final_layer")
    blocks += ("img", "x", "bn.*", "ae_refs", "decoded_z")
    with port_trace(out, dump, dtype, blocks, kept):
        hidden = taps.tap("txt_layers", get("text_hidden_states"), kind="input")
        order = (0, 2, 3, 1) if bug == "text_layers_interleaved" else (0, 2, 1, 3)
        txt = taps.tap("txt", hidden.permute(order).reshape(1, TOKENS, -1))
        mean = taps.tap("bn.running_mean", get("bn_mean"), kind="input")
        var = taps.tap("bn.running_var", get("bn_var"), kind="input")
        std = torch.sqrt(var + BN_EPS)
        refs = taps.tap("ae_refs", get("reference_latents"), kind="input")
        cond, cond_ids = encode_image_refs(refs, mean, std, bug)
        taps.tap("img_cond_seq", cond)
        z = taps.tap("noise", get("noise"), kind="input")
        img, img_ids = prc_img(z, 0)
        ctx_ids = taps.tap("txt_ids", prc_txt(txt, bug), kind="input")
        x_ids = taps.tap("img_ids", torch.cat([img_ids, cond_ids], 1), kind="input")
        times = taps.tap("timesteps", get_schedule(STEPS, img.shape[1], bug), kind="schedule")
        guidance = torch.full((1,), GUIDANCE, dtype=img.dtype)
        for i, (t_curr, t_prev) in enumerate(pairwise(times)):
            taps.set_step(i)
            pred = model(
                x=torch.cat([img, cond], 1),
                x_ids=x_ids,
                timesteps=(1000 * t_curr[None]).to(img.dtype) / 1000,  # rounded as in diffusers
                ctx=txt,
                ctx_ids=ctx_ids,
                guidance=guidance,
            )
            n = img.shape[1]
            pred = pred[:, -n:] if bug == "prediction_of_last_tokens" else pred[:, :n]
            taps.tap("pred", pred)
            img = taps.tap("img", img + (t_prev - t_curr).item() * pred)
        x = img.transpose(1, 2).unflatten(-1, (ROWS, COLUMNS))
        x = taps.tap("x", x * (var if bug == "denormalised_with_variance" else std) + mean)
        taps.tap("decoded_z", unpatchify(x, bug))


NO_COUNTERPART: tuple[str, ...] = (
    r"^pe$",  # the reference has cosines and sines, each number twice
    r"_attn\.qkv$",  # the reference has three values
)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos"
SCHEDULE = r"schedule|sigma|timestep"
BUGS = (
    Bug(
        "final_halves_not_swapped",
        "The final layer's modulation has the reference's halves (scale, shift), read as (shift, "
        "scale).",
        (r"shift.*scale|scale.*shift|halves|chunk|split", LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "txt_qkv_order",
        "The fused matrix of the text streams has the order k, q, v.",
        (LOADED, SWAPPED, r"quer(y|ies).*keys?\b|keys?\b.*quer(y|ies)|\bqkv\b"),
        "weights",
    ),
    Bug(
        "key_scale_not_loaded",
        "Single block 1's norm of keys keeps its scale of ones.",
        (LOADED, r"\bones\b|initial|default|key_norm|\bgain\b|affine"),
        "weights",
    ),
    Bug(
        "txt_mlp_of_image",
        "Double block 1's MLP of the text has the weights of the image's.",
        (LOADED, r"dupl|another|(image|img)\S* (mlp|feed)|same (mlp|param)|other stream"),
        "weights",
    ),
    Bug(
        "single_block_off_by_one",
        "Single block 2 has the weights of single block 1.",
        (LOADED, r"blocks\.1|(another|other|wrong|previous) (layer|block)|dupl|index"),
        "weights",
    ),
    Bug(
        "text_layers_interleaved",
        "The text's features have the axis of layers innermost, not one layer after the other.",
        (r"layout|\bax[ei]s\b|reshap|interleav|flatten|concat|\bstack", SWAPPED),
        "inputs",
    ),
    Bug(
        "reference_not_normalised",
        "The reference image's latents are not normalised by the mean and variance of the VAE.",
        (
            r"normali[sz]|standardi[sz]|batch.?norm|\bbn\b|\bmean\b|variance|\bstd\b",
            r"\bscal(e|ed|ing)\b|shift|offset|affine",
        ),
        "inputs",
    ),
    Bug(
        "reference_time_zero",
        "The reference image's tokens have time 0 in their position ids, not 10.",
        (r"position|\bids?\b|coordinate|\brope\b|rotary|offset", r"\btime\b|temporal"),
        "inputs",
    ),
    Bug(
        "text_ids_zero",
        "Position ids of the text are all zeros.",
        (r"position|\bids?\b|coordinate|\brope\b|rotary", r"\bzeros?\b"),
        "inputs",
    ),
    Bug(
        "mu_of_flux1",
        "The shift of the schedule is FLUX.1's line of the sequence's length.",
        (r"\bshift|\bmu\b", SCHEDULE),
        "schedule",
    ),
    Bug(
        "schedule_ends_one_step_early",
        "The times are evenly spaced from 1 to 1 / steps, not to 0, before they are shifted.",
        (r"terminal|\bend(s|ing)?\b|\blast\b|\bfinal\b|off.by.one|spac|zero", SCHEDULE),
        "schedule",
    ),
    Bug(
        "guidance_not_scaled",
        "The guidance is not multiplied by 1000 before its sinusoid.",
        (r"\b0?\.?(1000|001)\b|1e-?3|factor|multipl|\bscal(e|ed|ing)\b|\bunits?\b",),
    ),
    Bug(
        "sinusoid_sine_first",
        "Sinusoids have sines before cosines.",
        (r"\bsin(e|es)?\b|\bcos(ine|ines)?\b|flip_sin", SWAPPED, r"halves"),
    ),
    Bug(
        "single_modulation_without_silu",
        "The modulation of the single blocks lacks its SiLU.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "rope_theta_of_flux1",
        "RoPE's base is 10000, not 2000.",
        (r"theta|\bbase\b|frequenc|wavelength|\bperiod",),
    ),
    Bug(
        "rope_halves",
        "RoPE turns channels of the two halves of a head, not neighbours, in the reference's way.",
        (r"interleav|neighbou?r|\bhal(f|ves)\b|\bpair(s|ed|ing)?\b|rotate_half|adjacent|neox",),
    ),
    Bug(
        "rope_image_before_text",
        "In the single blocks the rotations are those of the image, then the text; the tokens are "
        "text, then image.",
        (r"\brope\b|rotat|rotary|position", SWAPPED, r"text (tokens )?(first|before|after)"),
    ),
    Bug(
        "norm_after_rope",
        "In the single blocks q and k are normed after RoPE.",
        (
            r"(norm\w*).*(\brope\b|rotat|rotary)|(\brope\b|rotat|rotary).*(norm\w*)",
            r"\b(after|before) (the )?(\brope\b|rotat|rotary|norm)",
        ),
    ),
    Bug(
        "single_heads_interleaved",
        "The single blocks split q, k and v as (channels, heads), not (heads, channels).",
        (r"heads?\b", r"interleav|reshap|layout|\bax[ei]s\b", SWAPPED),
    ),
    Bug(
        "swiglu_halves_exchanged",
        "SwiGLU applies SiLU to the second half and multiplies by the first.",
        (r"\bhal(f|ves)\b|chunk|split", SWAPPED, r"swiglu|\bglu\b|\bgat(e|es|ed|ing)\b"),
    ),
    Bug(
        "single_mlp_concatenated_first",
        "The second matrix of single blocks gets MLP and attention in the wrong order.",
        (r"concat|\bcat\b|join", SWAPPED),
    ),
    Bug(
        "txt_scale_before_shift",
        "The text's modulation in double blocks takes the shift as scale and the scale as shift.",
        (r"shift.*scale|scale.*shift|chunk|split", SWAPPED),
    ),
    Bug(
        "txt_mlp_gate_of_attention",
        "The MLP of the text is gated by the gate of attention.",
        (r"\b(un)?gat(e|es|ed|ing)\b|modulat",),
    ),
    Bug(
        "mlp_before_attention",
        "The image's MLP in double blocks reads the stream before attention was added.",
        (
            r"residual|parallel|before (the )?attention|without (the )?attention",
            r"(block|layer)'?s? (own )?input|input of (the )?(block|layer|mlp|norm)",
        ),
    ),
    Bug(
        "text_cut_from_end",
        "After the single blocks the last tokens are cut off, as if text came after the image.",
        (
            r"slic|\bcut\b|token|crop|remov|drop|offset|shifted by|\brows?\b",
            r"text (tokens )?(first|last|before|after)",
        ),
    ),
    Bug(
        "prediction_of_last_tokens",
        "The prediction is that of the last tokens, which include the reference image's.",
        (
            r"slic|\bcut\b|token|crop|offset|shifted by|\brows?\b",
            r"reference image|condition(ing)? image",
        ),
    ),
    Bug(
        "denormalised_with_variance",
        "The result is multiplied by the variance, not by its root.",
        (
            r"variance|\bvar\b|\bstd\b|sqrt|\broot\b|standard deviation",
            r"denormali|batch.?norm|\bbn\b|\bscal(e|ed|ing)\b|factor",
        ),
    ),
    Bug(
        "unpatchify_patch_first",
        "Channels of the result are read as (patch, channel), not (channel, patch).",
        (r"patch|layout|\bax[ei]s\b|reshap|pixel.?shuffle", SWAPPED, r"interleav"),
    ),
)
