"""A U-Net like SDXL's under the names of its original checkpoint, in torch, with UniPC's solver.

The model predicts v. Sigmas are Karras's, guidance is rescaled, there are four steps. The port has
q, k and v of self-attention in one product, and writes the schedule and the solver itself.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel, UniPCMultistepScheduler

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
from lydite.trace.torch_capture import record_modules

NAME = "unipc"
CHANNELS, ROWS, COLUMNS, TOKENS, TEXT, POOLED = 4, 10, 14, 9, 20, 12
FULL, LOW, GROUPS, HEADS, DEPTH, IDS = 16, 24, 4, 3, 2, 6  # FULL and LOW: widths of the two levels
TRAIN, BETAS, STEPS, RHO = 1000, (0.00085, 0.012), 4, 7.0
GUIDANCE, RESCALE = 2.2, 0.7
SIZES = (
    (80, 112, 0, 0, 80, 112),
    (152, 104, 8, 0, 80, 112),
)  # of the negative prompt; of the prompt


def made() -> UNet2DConditionModel:
    """Two levels; only the lower one has transformers."""
    config: dict[str, Any] = dict(sample_size=ROWS, in_channels=CHANNELS, out_channels=CHANNELS)
    config |= dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), layers_per_block=2)
    config |= dict(up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=TEXT)
    config |= dict(block_out_channels=(FULL, LOW), norm_num_groups=GROUPS)
    config |= dict(attention_head_dim=(2, HEADS), transformer_layers_per_block=(1, DEPTH))
    config |= dict(use_linear_projection=True, addition_embed_type="text_time")
    config |= dict(addition_time_embed_dim=IDS)
    config |= dict(projection_class_embeddings_input_dim=POOLED + 6 * IDS)
    model = UNet2DConditionModel(**config)
    for name, parameter in model.named_parameters():
        if "time_emb_proj" in name or "to_out" in name or "proj_out" in name:
            parameter.data.mul_(1.5)
        if "to_q" in name or "to_k" in name:
            parameter.data.mul_(1.5)
    return model


def reference(folder: Path, dtype: str) -> None:
    """The loop of StableDiffusionXLPipeline."""
    model = saved(randomised(made, 23), folder, "unet", dtype)
    config: dict[str, Any] = dict(prediction_type="v_prediction", beta_schedule="scaled_linear")
    config |= dict(beta_start=BETAS[0], beta_end=BETAS[1], use_karras_sigmas=True)
    scheduler: Any = UniPCMultistepScheduler(**config)
    scheduler.set_timesteps(STEPS)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="unet", weights=True),
    ):
        x = noise(1, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        negative, text = (noise(i, 1, TOKENS, TEXT).to(model.dtype) for i in (2, 3))
        negative_pooled, pooled = (noise(i, 1, POOLED).to(model.dtype) for i in (4, 5))
        ids = torch.tensor(SIZES)
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/negative_prompt_embeds", negative, kind="input")
        recorder.record("pipeline/pooled_prompt_embeds", pooled, kind="input")
        recorder.record("pipeline/negative_pooled_prompt_embeds", negative_pooled, kind="input")
        recorder.record("pipeline/add_time_ids", ids, kind="input")
        texts = torch.cat([negative, text])
        added = {"text_embeds": torch.cat([negative_pooled, pooled]), "time_ids": ids}
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            both = scheduler.scale_model_input(torch.cat([x, x]), t)
            out = model(both, t, texts, added_cond_kwargs=added, return_dict=False)[0]
            uncond, cond = out.chunk(2)
            v = uncond + GUIDANCE * (cond - uncond)
            axes = (1, 2, 3)  # from here to `v` as in rescale_noise_cfg
            scaled = v * (cond.std(axes, keepdim=True) / v.std(axes, keepdim=True))
            v = recorder.record("pipeline/v", RESCALE * scaled + (1 - RESCALE) * v)
            x = scheduler.step(v, t, x, return_dict=False)[0]
            recorder.record("pipeline/latents", x)


# blocks of the original and of diffusers: residual blocks, transformers, other layers
RESIDUAL = {
    "input_blocks.1.0": "down_blocks.0.resnets.0",
    "input_blocks.2.0": "down_blocks.0.resnets.1",
    "input_blocks.4.0": "down_blocks.1.resnets.0",
    "input_blocks.5.0": "down_blocks.1.resnets.1",
    "middle_block.0": "mid_block.resnets.0",
    "middle_block.2": "mid_block.resnets.1",
    "output_blocks.0.0": "up_blocks.0.resnets.0",
    "output_blocks.1.0": "up_blocks.0.resnets.1",
    "output_blocks.2.0": "up_blocks.0.resnets.2",
    "output_blocks.3.0": "up_blocks.1.resnets.0",
    "output_blocks.4.0": "up_blocks.1.resnets.1",
    "output_blocks.5.0": "up_blocks.1.resnets.2",
}
ATTENDING = {
    "input_blocks.4.1": "down_blocks.1.attentions.0",
    "input_blocks.5.1": "down_blocks.1.attentions.1",
    "middle_block.1": "mid_block.attentions.0",
    "output_blocks.0.1": "up_blocks.0.attentions.0",
    "output_blocks.1.1": "up_blocks.0.attentions.1",
    "output_blocks.2.1": "up_blocks.0.attentions.2",
}
OTHER = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "input_blocks.3.0.op": "down_blocks.0.downsamplers.0.conv",
    "output_blocks.2.2.conv": "up_blocks.0.upsamplers.0.conv",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
LAYERS = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the original's names."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        for end in ("weight", "bias"):
            if f"{parts[0]}.{end}" in w:
                new[f"{name}.{end}"] = np.concatenate([w[f"{p}.{end}"] for p in parts])

    for name, old in OTHER.items():
        put(name, old)
    for name, old in RESIDUAL.items():
        for layer, part in LAYERS.items():
            put(f"{name}.{layer}", f"{old}.{part}")
    for name, old in ATTENDING.items():
        for layer in ("norm", "proj_in", "proj_out"):
            put(f"{name}.{layer}", f"{old}.{layer}")
        for j in range(DEPTH):
            block, part = f"{name}.transformer_blocks.{j}", f"{old}.transformer_blocks.{j}"
            order = "vqk" if bug == "self_attention_values_first" and name[:2] == "mi" else "qkv"
            put(f"{block}.attn1.to_qkv", *(f"{part}.attn1.to_{s}" for s in order))
            for layer in ("attn2.to_q", "attn2.to_k", "attn2.to_v", "norm1", "norm2", "norm3"):
                put(f"{block}.{layer}", f"{part}.{layer}")
            for layer in ("attn1.to_out.0", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2"):
                put(f"{block}.{layer}", f"{part}.{layer}")

    def exchange(a: str, b: str) -> None:
        for name in [k for k in new if k.startswith(f"{a}.")]:
            other = b + name.removeprefix(a)
            new[name], new[other] = new[other], new[name]

    if bug == "last_two_blocks_exchanged":
        exchange("output_blocks.4.0", "output_blocks.5.0")
    if bug == "group_norms_of_block_exchanged":
        exchange("input_blocks.2.0.in_layers.0", "input_blocks.2.0.out_layers.0")
    if bug == "stride_kernel_rows_are_columns":
        kernel = new["input_blocks.3.0.op.weight"]
        new["input_blocks.3.0.op.weight"] = np.ascontiguousarray(kernel.swapaxes(2, 3))
    if bug == "time_projection_of_block_before":
        for end in ("weight", "bias"):
            name = f"emb_layers.1.{end}"
            new[f"output_blocks.1.0.{name}"] = new[f"output_blocks.0.0.{name}"]
    if bug == "proj_in_stored_as_8_bits":
        weight = new["middle_block.1.proj_in.weight"]
        step = np.abs(weight).max(1, keepdims=True) / np.float32(127)
        new["middle_block.1.proj_in.weight"] = np.round(weight / step) * step
    return new


class UNet:
    """The forward pass, batch of the negative prompt and the prompt."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.bug, self.dtype = bug, getattr(torch, dtype)
        self.p = {k: torch.from_numpy(v.copy()).to(self.dtype) for k, v in p.items()}
        self.embedded: torch.Tensor | None = None
        self.cached: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return taps.tap(name, F.linear(x, self.p[f"{name}.weight"], self.p.get(f"{name}.bias")))

    def conv(self, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        weight, bias = self.p[f"{name}.weight"], self.p[f"{name}.bias"]
        around = weight.shape[-1] // 2
        if self.bug == "stride_padded_at_end_only" and stride == 2:
            return taps.tap(name, F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, bias, stride))
        return taps.tap(name, F.conv2d(x, weight, bias, stride, around))

    def group_norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        weight, bias = self.p[f"{name}.weight"], self.p[f"{name}.bias"]
        if self.bug == "groups_of_every_fourth_channel":
            n, c, h, w = x.shape
            y = x.reshape(n, c // GROUPS, GROUPS, h, w).transpose(1, 2).reshape(x.shape)
            y = F.group_norm(y, GROUPS, eps=eps).reshape(n, GROUPS, c // GROUPS, h, w)
            y = y.transpose(1, 2).reshape(x.shape)
            return taps.tap(name, y * weight[:, None, None] + bias[:, None, None])
        return taps.tap(name, F.group_norm(x, GROUPS, weight, bias, eps))

    def layer_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.p[f"{name}.weight"], self.p[f"{name}.bias"]
        return taps.tap(name, F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5))

    def waves(self, t: torch.Tensor, width: int) -> torch.Tensor:
        """Cosines and sines of each number in `t`."""
        half = width // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        a = t.float()[:, None] * freqs
        return torch.cat([a.cos(), a.sin()], -1)

    def embedding(self, t: float, pooled: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bug = self.bug
        if bug == "embedding_kept_from_first_step" and self.embedded is not None:
            return self.embedded
        y = taps.tap("t_emb", self.waves(torch.full((2,), t), FULL).to(self.dtype))
        emb = self.linear("time_embed.2", F.silu(self.linear("time_embed.0", y)))
        sizes = self.waves(ids.flatten(), IDS)
        if bug == "size_waves_all_cosines_first":
            sizes = sizes.reshape(2, 6, 2, IDS // 2).transpose(1, 2)
        sizes = sizes.reshape(2, -1).to(self.dtype)
        parts = [sizes, pooled] if bug == "sizes_before_pooled_text" else [pooled, sizes]
        y = taps.tap("vector", torch.cat(parts, -1))
        emb = emb + self.linear("label_emb.0.2", F.silu(self.linear("label_emb.0.0", y)))
        self.embedded = taps.tap("emb", emb)
        return emb

    def res_block(self, b: str, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        bug = self.bug
        h = F.silu(self.group_norm(f"{b}.in_layers.0", x, 1e-5))
        h = self.conv(f"{b}.in_layers.2", h)
        e = self.linear(f"{b}.emb_layers.1", F.silu(emb))[:, :, None, None]
        if bug == "embedding_added_after_norm" and b == "input_blocks.1.0":
            h = self.group_norm(f"{b}.out_layers.0", h, 1e-5) + e
        else:
            h = self.group_norm(f"{b}.out_layers.0", h + e, 1e-5)
        h = self.conv(f"{b}.out_layers.3", F.silu(h))
        if f"{b}.skip_connection.weight" in self.p:
            x = self.conv(f"{b}.skip_connection", x)
        return taps.tap(b, x + h)

    def attend(self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bug = self.bug
        heads = HEADS
        if bug == "head_count_taken_for_head_width":
            heads = LOW // HEADS
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        if bug == "cross_queries_scaled_before" and name.endswith("attn2"):
            q = q * (LOW // HEADS) ** -0.5
        if bug == "weights_of_attention_float16" and name.startswith("input_blocks.5"):
            scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
            y = scores.softmax(-1).half().to(self.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        y = taps.tap(f"{name}.sdpa", y.transpose(1, 2).flatten(2))
        return self.linear(f"{name}.to_out.0", y)

    def text_keys(self, place: str, j: int, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values of the text; they are the same in each step."""
        key = place if self.bug == "text_keys_shared_by_blocks" else f"{place}.{j}"
        if key not in self.cached or self.bug != "text_keys_shared_by_blocks":
            name = f"{place}.transformer_blocks.{j}.attn2"
            self.cached[key] = self.linear(f"{name}.to_k", text), self.linear(f"{name}.to_v", text)
        return self.cached[key]

    def feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bug = self.bug
        y, gate = self.linear(f"{name}.net.0.proj", x).chunk(2, -1)
        if bug == "gelu_on_first_half":
            y, gate = gate, y
        gate = F.gelu(gate, approximate="tanh" if bug == "gelu_by_tanh" else "none")
        return self.linear(f"{name}.net.2", taps.tap(f"{name}.net.0", y * gate))

    def transformer(self, place: str, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        bug = self.bug
        n, c, rows, columns = x.shape
        h = self.group_norm(f"{place}.norm", x, 1e-6).flatten(2).transpose(1, 2)
        h = self.linear(f"{place}.proj_in", h)
        for j in range(DEPTH):
            if bug == "middle_transformer_one_deep" and place == "middle_block.1" and j:
                continue
            b = f"{place}.transformer_blocks.{j}"
            y = self.layer_norm(f"{b}.norm1", h)
            q, k, v = self.linear(f"{b}.attn1.to_qkv", y).chunk(3, -1)
            h = h + self.attend(f"{b}.attn1", q, k, v)
            y = self.layer_norm(f"{b}.norm2", h)
            k, v = self.text_keys(place, j, text)
            h = h + self.attend(f"{b}.attn2", self.linear(f"{b}.attn2.to_q", y), k, v)
            y = self.layer_norm(f"{b}.norm3", h)
            h = taps.tap(b, h + self.feed_forward(f"{b}.ff", y))
        h = self.linear(f"{place}.proj_out", h)
        if bug == "tokens_back_by_columns" and place == "input_blocks.5.1":
            h = h.reshape(n, columns, rows, c).transpose(1, 2)
        h = h.reshape(n, rows, columns, c).permute(0, 3, 1, 2)
        return taps.tap(place, h + x)

    def __call__(
        self, x: torch.Tensor, t: float, text: torch.Tensor, pooled: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        bug = self.bug
        emb = self.embedding(t, pooled, ids)
        h = self.conv("input_blocks.0.0", x)
        hs = [h]
        for i in (1, 2, 3, 4, 5):
            if i == 3:
                h = self.conv("input_blocks.3.0.op", h, 2)
            else:
                h = self.res_block(f"input_blocks.{i}.0", h, emb)
            kept = h
            if i > 3:
                h = self.transformer(f"input_blocks.{i}.1", h, text)
            hs.append(kept if bug == "skip_kept_before_attention" and i == 5 else h)
        h = self.res_block("middle_block.0", h, emb)
        h = self.transformer("middle_block.1", h, text)
        h = self.res_block("middle_block.2", h, emb)
        if bug == "last_skips_exchanged":
            hs[0], hs[1] = hs[1], hs[0]
        for i in range(6):
            skip = hs.pop()
            pair = [skip, h] if bug == "skip_before_stream" and i == 1 else [h, skip]
            h = taps.tap(f"output_blocks.{i}.in", torch.cat(pair, 1))
            h = self.res_block(f"output_blocks.{i}.0", h, emb)
            if i < 3:
                h = self.transformer(f"output_blocks.{i}.1", h, text)
            if i == 2:
                h = F.interpolate(h, scale_factor=2, mode="nearest")
                h = self.conv("output_blocks.2.2.conv", h)
        h = F.silu(self.group_norm("out.0", h, 1e-5))
        return self.conv("out.2", h)


def schedule(bug: str | None) -> tuple[Array, Array]:
    """Karras's sigmas with 0 at the end, and the timesteps nearest to them."""
    low, high = BETAS
    if bug == "betas_linear":
        betas = torch.linspace(low, high, TRAIN)
    else:
        betas = torch.linspace(low**0.5, high**0.5, TRAIN) ** 2
    kept = torch.cumprod(1 - betas, 0)
    table = np.array(((1 - kept) / kept) ** 0.5)
    first, last = float(table[-1]) ** (1 / RHO), float(table[0]) ** (1 / RHO)
    ramp = np.linspace(0, 1, STEPS)
    if bug == "karras_ramp_of_one_step_more":
        ramp = np.linspace(0, 1, STEPS + 1)[:-1]
    sigmas = (first + ramp * (last - first)) ** RHO
    times = np.interp(np.log(sigmas), np.log(table), np.arange(TRAIN))
    times = times if bug == "times_not_rounded" else times.round()
    return np.append(sigmas, 0).astype(np.float32), times.astype(np.float32)


class UniPC:
    """UniP and UniC of order 2 with B(h) = exp(h) - 1, on predictions of the clean sample."""

    def __init__(self, sigmas: Array, bug: str | None) -> None:
        self.bug, self.sigmas = bug, torch.from_numpy(sigmas)
        self.alpha = 1 / (self.sigmas**2 + 1) ** 0.5
        self.sigma = self.sigmas * self.alpha
        self.snr = torch.log(self.alpha) - torch.log(self.sigma)
        if bug == "log_snr_float16":
            self.snr = self.snr.half().float()
        self.clean: list[torch.Tensor] = []
        self.order = 0
        self.start = torch.zeros(())

    def clean_sample(self, v: torch.Tensor, x: torch.Tensor, i: int) -> torch.Tensor:
        if self.bug == "clean_sample_with_karras_sigma":
            return self.alpha[i] * x - self.sigmas[i] * v
        return self.alpha[i] * x - self.sigma[i] * v

    def coefficients(self, h: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
        """Of UniC at order 2: the solution of two equations."""
        phi = torch.expm1(h) / h - 1
        factor, right = 1, []
        for k in (1, 2):
            right.append(phi * factor / self.by(h))
            factor *= k if self.bug == "factorial_one_behind" else k + 1
            phi = phi / h - 1 / factor
        left = torch.stack([torch.ones(2), torch.stack([ratio, torch.ones(())])])
        return torch.linalg.solve(left, torch.stack(right))

    def by(self, h: torch.Tensor) -> torch.Tensor:
        return h if self.bug == "solver_bh1" else torch.expm1(h)

    def moved(self, x: torch.Tensor, i: int, j: int, correct: torch.Tensor | None) -> torch.Tensor:
        """From sigma i to sigma j, with the prediction at j when correcting."""
        bug = self.bug
        past = self.clean[:-1] if correct is not None else self.clean
        now = past[-1]
        h = -(self.snr[j] - self.snr[i])
        share = self.sigma[j] / self.sigma[i]
        if bug == "stream_scaled_by_karras_sigmas":
            share = self.sigmas[j] / self.sigmas[i]
        y = share * x - self.alpha[j] * torch.expm1(h) * now
        ratio, slope = torch.ones(()), None
        if self.order == 2:
            ratio = (self.snr[i - 1] - self.snr[i]) / -h
            slope = past[-2] - now
            slope = slope if bug == "slope_not_divided_by_ratio" else slope / ratio
        if correct is None:
            if slope is None:
                return y.to(x.dtype)
            return (y - self.alpha[j] * self.by(h) * 0.5 * slope).to(x.dtype)
        if slope is None:
            change = 0.5 * (correct - now)
        else:
            a, b = self.coefficients(h, ratio).to(x.dtype)
            change = a * slope + b * (correct - now)
        return (y - self.alpha[j] * self.by(h) * change).to(x.dtype)

    def step(self, v: torch.Tensor, x: torch.Tensor, i: int) -> torch.Tensor:
        bug = self.bug
        clean = taps.tap("x0_pred", self.clean_sample(v, x, i))
        self.clean.append(clean)
        predicted = x
        if i > 0 and not (bug == "corrector_starts_late" and i == 1):
            x = taps.tap("x_corrected", self.moved(self.start, i - 1, i, clean))
            if bug == "clean_sample_of_corrected":
                self.clean[-1] = self.clean_sample(v, x, i)
        warm = i if bug == "second_order_one_step_late" else i + 1
        self.order = max(1, min(2, STEPS - i, warm))
        self.start = predicted if bug == "corrected_sample_not_kept" else x
        return self.moved(x, i, i + 1, None)


def guided(out: torch.Tensor, bug: str | None) -> torch.Tensor:
    """Guidance, with the spread of the prompt's prediction."""
    uncond, cond = out.chunk(2)
    v = taps.tap("v_mix", uncond + GUIDANCE * (cond - uncond))
    axes = (2, 3) if bug == "rescaled_per_channel" else (1, 2, 3)
    like = uncond if bug == "rescaled_to_unconditional" else cond
    scaled = v * (like.std(axes, keepdim=True) / v.std(axes, keepdim=True))
    part = 1 - RESCALE if bug == "rescale_share_reversed" else RESCALE
    return taps.tap("v_final", part * scaled + (1 - part) * v)


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
    names = ("negative_", "")
    sizes = value("pipeline/add_time_ids")
    if bug == "sizes_width_before_height":
        sizes = sizes[:, [1, 0, 3, 2, 5, 4]]
    if bug == "crop_after_target_size":
        sizes = sizes[:, [0, 1, 4, 5, 2, 3]]
    texts = np.concatenate([value(f"pipeline/{s}prompt_embeds") for s in names])
    pooled = np.concatenate([value(f"pipeline/{s}pooled_prompt_embeds") for s in names])
    if bug == "negative_pooled_is_positive":
        pooled[0] = pooled[1]
    sigmas, times = schedule(bug)
    start = value("pipeline/noise")
    if bug == "noise_times_first_sigma":
        start = start * sigmas[0]
    x, text, vector = (torch.from_numpy(a).to(net.dtype) for a in (start, texts, pooled))
    kept = {k: to_numpy(v) for k, v in net.p.items()} if weights else None
    blocks = ("start.*", "schedule.*", "emb", "input_blocks.?.?", "middle_block.?", "latents")
    blocks += ("output_blocks.?.?", "out.2", "v_final", "x0_pred")
    with port_trace(out, dump, dtype, blocks, kept), torch.no_grad():
        taps.tap("schedule.sigmas", sigmas, kind="schedule")
        taps.tap("schedule.times", times, kind="schedule")
        taps.tap("start.noise", x, kind="input")
        taps.tap("start.text", text, kind="input")
        taps.tap("start.pooled", vector, kind="input")
        taps.tap("start.sizes", sizes, kind="input")
        solver = UniPC(sigmas, bug)
        for i in range(STEPS):
            taps.set_step(i)
            both = torch.cat([x, x])
            v = guided(net(both, float(times[i]), text, vector, torch.from_numpy(sizes)), bug)
            x = taps.tap("latents", solver.step(v, x, i))


NO_COUNTERPART: tuple[str, ...] = (r"^v_mix$", r"^x0_pred$", r"^x_corrected$")

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|interchang"
NARROW = r"b?f(loat)?16|fp16|\bhalf\b|precision|round|\bcast|narrow"
TABLE = r"schedul|sigma|timestep|karras"
SIZE_WORDS = r"time_ids|size|crop|micro|height|width"
SOLVER = r"solver|corrector|unic\b|unipc|predictor|multistep"
BUGS = (
    Bug(
        "self_attention_values_first",
        "The middle block's self-attention is joined as v, q, k.",
        (LOADED, SWAPPED, r"v, ?q, ?k"),
        "weights",
    ),
    Bug(
        "last_two_blocks_exchanged",
        "The residual blocks of output_blocks.4 and .5 have each other's weights.",
        (LOADED, SWAPPED, r"(other|wrong|another) (layer|module|block)|off.by.one"),
        "weights",
    ),
    Bug(
        "group_norms_of_block_exchanged",
        "The two group norms of input_blocks.2.0 have each other's weights.",
        (LOADED, SWAPPED, r"(other|wrong|another) (layer|module|norm)"),
        "weights",
    ),
    Bug(
        "stride_kernel_rows_are_columns",
        "The kernel of the downsampling has rows and columns exchanged.",
        (LOADED, SWAPPED, r"transpos|kernel|rows?\b|column|layout|\bax[ei]s\b"),
        "weights",
    ),
    Bug(
        "time_projection_of_block_before",
        "output_blocks.1.0's time projection is that of output_blocks.0.0.",
        (LOADED, r"dupl|twice|(other|wrong|another|same) (layer|module|block|param)|that of"),
        "weights",
    ),
    Bug(
        "proj_in_stored_as_8_bits",
        "The middle transformer's proj_in was rounded to 8 bits.",
        (LOADED, r"quanti|int8|8.bit|precision|round"),
        "weights",
    ),
    Bug(
        "betas_linear",
        "Betas are linear, not squares of linear roots.",
        (TABLE, r"\bbetas?\b|linear"),
        "schedule",
    ),
    Bug(
        "karras_ramp_of_one_step_more",
        "Karras's ramp has one point more, and the last is dropped.",
        (TABLE, r"\bramp|off.by.one|linspace|sigma_min|spacing"),
        "schedule",
    ),
    Bug(
        "times_not_rounded",
        "Timesteps of Karras's sigmas are not rounded.",
        (r"timestep|\btimes?\b|round|integer|fraction|schedule",),
        "schedule",
    ),
    Bug(
        "sizes_width_before_height",
        "Sizes and crops are given as (width, height).",
        (SIZE_WORDS, SWAPPED),
        "inputs",
    ),
    Bug(
        "crop_after_target_size",
        "The crop comes after the target's size.",
        (SIZE_WORDS, SWAPPED),
        "inputs",
    ),
    Bug(
        "negative_pooled_is_positive",
        "The negative prompt has the prompt's pooled text.",
        (r"pooled|negative|uncond|text_embeds|\bsame\b|dupl|text",),
        "inputs",
    ),
    Bug(
        "noise_times_first_sigma",
        "The noise is multiplied by the first sigma.",
        (r"init_noise|sigma|\bscal(e|ed|ing)|noise|factor|multipl|times|latents?",),
        "inputs",
    ),
    Bug(
        "size_waves_all_cosines_first",
        "Sinusoids of sizes have cosines of all numbers first, then sines.",
        (r"\bsin|\bcos|flip|reshap|interleav|layout|transpos|permut|order", SIZE_WORDS),
    ),
    Bug(
        "sizes_before_pooled_text",
        "The sizes' sinusoids come before the pooled text.",
        (r"concat|\bcat\b|join|order|\broll|shift|before|first", SWAPPED),
    ),
    Bug(
        "embedding_added_after_norm",
        "input_blocks.1.0 adds the embedding after its second norm.",
        (
            r"(norm|norm2|out_layers)\b.*(before|after|order)",
            r"(before|after).*(norm|out_layers)|\b(emb|temb|embedding|projection)\b.*(add|missing)",
        ),
    ),
    Bug(
        "embedding_kept_from_first_step",
        "The embedding of time is computed at the first step only.",
        (r"cach|stale|(first|previous|other|earlier|last) step|step 0|reus|not (renewed|updated)",),
    ),
    Bug(
        "groups_of_every_fourth_channel",
        "Group norms take every fourth channel for a group.",
        (r"groups\b|group of|grouping|interleav|strided|pytorch_compatible|every",),
    ),
    Bug(
        "gelu_on_first_half",
        "GEGLU applies GELU to the first half.",
        (r"half|halves|chunk|gate|gelu|geglu", SWAPPED),
    ),
    Bug("gelu_by_tanh", "GEGLU has the GELU with tanh.", (r"gelu|tanh|erf|approximat",)),
    Bug(
        "head_count_taken_for_head_width",
        "There are 8 heads of 3 channels, not 3 of 8.",
        (r"heads?\b|head_dim",),
    ),
    Bug(
        "cross_queries_scaled_before",
        "Queries of the text's attention are scaled twice.",
        (r"\bscal(e|ed|ing)|head_dim|sqrt|root|temperature|twice|factor",),
    ),
    Bug(
        "weights_of_attention_float16",
        "Weights of the attention of input_blocks.5 are rounded to float16.",
        (NARROW,),
    ),
    Bug(
        "text_keys_shared_by_blocks",
        "The second block of a transformer reuses the first one's keys and values of the text.",
        (
            r"cach|reus|shared|dupl|transformer_blocks\.0|(other|first|another|same) (block|layer)",
            r"to_[kv].*(missing|not (run|called|record)|fewer|skip)|wrong (block|layer)",
        ),
    ),
    Bug(
        "middle_transformer_one_deep",
        "The middle transformer runs one block of two.",
        (
            r"skip|missing|not (run|called|applied|record)|fewer|too few|depth|left out|lacks?\b",
            r"off.by.one|one block",
        ),
    ),
    Bug(
        "tokens_back_by_columns",
        "input_blocks.5.1 folds tokens back with columns outside.",
        (r"transpos|layout|reshap|rows?\b|column|height|width|token|\bax[ei]s\b", SWAPPED),
    ),
    Bug(
        "stride_padded_at_end_only",
        "The downsampling pads at the right and below only.",
        (r"\bpad|asymmetr|offset|shift|one pixel",),
    ),
    Bug(
        "skip_kept_before_attention",
        "The last skip is kept before its transformer.",
        (
            r"\bskips?\b|concat|\bcat\b|hidden state|before (the |its )?(att|transf)",
            r"(other|another|wrong|earlier) (value|layer|tensor|block|input)",
        ),
    ),
    Bug(
        "last_skips_exchanged",
        "The last two blocks take each other's skips.",
        (r"\bskips?\b|concat|\bcat\b", SWAPPED),
    ),
    Bug(
        "skip_before_stream",
        "output_blocks.1 joins skip and stream in the other order.",
        (r"concat|\bcat\b|join|\broll|skip.*(first|before)|shift", SWAPPED),
    ),
    Bug(
        "rescaled_per_channel",
        "The spread for rescaling is that of each channel.",
        (r"channel|\bstd\b|spread|deviation|\bax[ei]s\b|dims?\b|rescal",),
    ),
    Bug(
        "rescaled_to_unconditional",
        "Guidance is rescaled to the spread of the unconditional prediction.",
        (r"uncond|\bstd\b|spread|deviation|rescal|negative",),
    ),
    Bug(
        "rescale_share_reversed",
        "The rescaled prediction has the share 1 - 0.7.",
        (r"rescal|share|\bmix|1 ?- ?|0\.[37]|\bphi\b", SWAPPED),
    ),
    Bug(
        "clean_sample_with_karras_sigma",
        "The clean sample is computed with sigma, not with sigma times alpha.",
        (r"alpha|sigma|v.?prediction|x0|clean|denoised|conver", SOLVER),
    ),
    Bug(
        "stream_scaled_by_karras_sigmas",
        "The stream is scaled by the ratio of sigmas, not of sigma times alpha.",
        (r"alpha|sigma|ratio|\bscal(e|ed|ing)|coefficient", SOLVER),
    ),
    Bug(
        "slope_not_divided_by_ratio",
        "The difference of predictions is not divided by the ratio of steps.",
        (r"ratio|\br_?k\b|\bd1s?\b|second.order|order|differen|coefficient|divid", SOLVER),
    ),
    Bug(
        "solver_bh1",
        "The solver has B(h) = h.",
        (r"bh1|bh2|b\(h\)|b_h|expm1|solver.type|coefficient", SOLVER),
    ),
    Bug(
        "corrector_starts_late",
        "The second step is not corrected.",
        (r"correct|unic\b|order|off.by.one|history|previous|multistep", SOLVER),
    ),
    Bug(
        "second_order_one_step_late",
        "The second step is of order 1.",
        (r"order|warm|off.by.one|history|previous|multistep|euler|ddim", SOLVER),
    ),
    Bug(
        "corrected_sample_not_kept",
        "The next correction starts from the sample before this one.",
        (r"correct|last_sample|start|unic\b|history|previous|multistep|stale|uncorrected", SOLVER),
    ),
    Bug(
        "clean_sample_of_corrected",
        "The clean sample is computed anew from the corrected sample.",
        (r"correct|x0|clean|denoised|history|previous|multistep|twice", SOLVER),
    ),
    Bug(
        "factorial_one_behind",
        "The corrector's factorials are one behind.",
        (r"factorial|coefficient|rho|correct|unic\b|linear system|phi", SOLVER),
    ),
    Bug(
        "log_snr_float16",
        "Logarithms of signal to noise are rounded to float16.",
        (NARROW, r"lambda|log.?snr|\blog\b"),
    ),
)
