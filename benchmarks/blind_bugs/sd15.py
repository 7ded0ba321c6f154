"""Stable Diffusion 1.5 in NumPy, channels last, by the names of the first release.

CLIP encodes both prompts in one batch; the U-Net has two levels; PLMS takes three steps, the first
with two calls of the U-Net. Kernels are (rows, columns, in, out), weights (in, out).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import PNDMScheduler, UNet2DConditionModel
from scipy.special import erf
from transformers import CLIPTextConfig, CLIPTextModel

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
from lydite.trace.function_capture import watch_function
from lydite.trace.taps import set_step, tap
from lydite.trace.torch_capture import record_modules

NAME = "sd15"
WIDTHS, GROUPS, HEADS, LATENTS, ROWS, COLUMNS = (16, 32), 4, 2, 4, 10, 6
TEXT, TEXT_HEADS, TEXT_LAYERS, TEXT_HIDDEN, CONTEXT = 12, 2, 2, 20, 9
WORDS, START, END = 40, 38, 39
IDS = (  # negative prompts, then prompts; the tokenizer pads with the end token
    (START, *(END,) * 8),
    (START, 4, 17, END, *(END,) * 5),
    (START, 21, 9, 30, 2, END, *(END,) * 3),
    (START, 13, 35, 6, 28, 11, 3, 19, END),
)
STEPS, GUIDANCE, SCALE_FACTOR, TIMES = 3, 2.5, 0.18215, 1000
BETA_START, BETA_END = 0.00085, 0.012
UNET, CLIP = "model.diffusion_model", "cond_stage_model.transformer.text_model"
# block of the first release -> the U-Net's resnet, and what follows it
BLOCKS = {
    "input_blocks.1": ("down_blocks.0.resnets.0", "down_blocks.0.attentions.0"),
    "input_blocks.3": ("down_blocks.1.resnets.0", ""),
    "output_blocks.0": ("up_blocks.0.resnets.0", ""),
    "output_blocks.1": ("up_blocks.0.resnets.1", "up_blocks.0.upsamplers.0"),
    "output_blocks.2": ("up_blocks.1.resnets.0", "up_blocks.1.attentions.0"),
    "output_blocks.3": ("up_blocks.1.resnets.1", "up_blocks.1.attentions.1"),
}
RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}


def unet() -> UNet2DConditionModel:
    """The U-Net; attention is made sharper than new layers have it."""
    model = UNet2DConditionModel(
        sample_size=ROWS,
        block_out_channels=WIDTHS,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT,
        attention_head_dim=HEADS,
        norm_num_groups=GROUPS,
    )
    for name, parameter in model.named_parameters():
        if "to_q" in name or "to_k" in name:
            parameter.data.mul_(2)
        if "to_out" in name or "to_v" in name or "ff.net" in name or "conv_out" in name:
            parameter.data.mul_(1.4)
    return model


def clip() -> CLIPTextModel:
    """The text encoder, with larger embeddings."""
    config = CLIPTextConfig(
        vocab_size=WORDS,
        hidden_size=TEXT,
        intermediate_size=TEXT_HIDDEN,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=TEXT_HEADS,
        max_position_embeddings=CONTEXT,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        initializer_factor=3.0,
    )
    model = CLIPTextModel(config)
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            parameter.data.mul_(4)
    return model


def reference(folder: Path, dtype: str) -> None:
    """Two pictures, each with its prompt and negative prompt."""
    text = saved(randomised(clip, 51), folder, "text_encoder", dtype)
    model = saved(randomised(unet, 52), folder, "unet", dtype)
    scheduler: Any = PNDMScheduler(
        beta_start=BETA_START,
        beta_end=BETA_END,
        beta_schedule="scaled_linear",
        skip_prk_steps=True,
        steps_offset=1,
    )
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, text, scope="text_encoder", weights=True),
        record_modules(recorder, model, scope="unet", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        ids = torch.tensor(IDS)
        recorder.record("pipeline/input_ids", ids, kind="ids")
        negative, positive = (text(x)[0] for x in (ids[:2], ids[2:]))
        embeds = torch.cat([negative, positive])
        recorder.record("pipeline/prompt_embeds", embeds)
        latents = noise(8, 2, LATENTS, ROWS, COLUMNS)
        recorder.record("pipeline/noise", latents, kind="input")
        scheduler.set_timesteps(STEPS)
        latents = latents.to(model.dtype) * scheduler.init_noise_sigma
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/alphas_cumprod", scheduler.alphas_cumprod, kind="schedule")
        for step, t in enumerate(scheduler.timesteps):
            recorder.step = step
            recorder.record("pipeline/latents", latents)
            both = scheduler.scale_model_input(torch.cat([latents] * 2), t)
            predicted = model(both, t, embeds, return_dict=False)[0]
            without, with_text = predicted.chunk(2)
            predicted = without + GUIDANCE * (with_text - without)
            recorder.record("pipeline/epsilon", predicted)
            latents = scheduler.step(predicted, t, latents, return_dict=False)[0]
            recorder.record("pipeline/next_latents", latents)
        recorder.record("pipeline/vae_input", latents / SCALE_FACTOR)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of both models (`unet.`, `text_encoder.`) by the first release's names."""
    new: dict[str, Array] = {}

    def copied(name: str, source: str) -> None:
        x = w[f"{source}.weight"]
        if x.ndim == 4:
            x = x.transpose(2, 3, 1, 0)
        elif x.ndim == 2 and "embedding" not in name:
            x = x.T
        new[f"{name}.weight"] = x
        if f"{source}.bias" in w:
            new[f"{name}.bias"] = w[f"{source}.bias"]

    def resnet(name: str, source: str) -> None:
        for part, old in RESNET.items():
            if bug == "norm_of_other_layers" and part == "out_layers.0" and "middle" in name:
                old = "norm1"
            if f"{source}.{old}.weight" in w:
                copied(f"{name}.{part}", f"{source}.{old}")

    def transformer(name: str, source: str) -> None:
        for part in ("norm", "proj_in", "proj_out"):
            copied(f"{name}.{part}", f"{source}.{part}")
        for i in (1, 2):
            keys, values = "kv"
            if bug == "keys_and_values_exchanged" and i == 2 and "input" in name:
                keys, values = values, keys
            attn, old = (f"{x}.transformer_blocks.0.attn{i}" for x in (name, source))
            for part, s in (("q", "q"), ("k", keys), ("v", values)):
                copied(f"{attn}.to_{part}", f"{old}.to_{s}")
            copied(f"{attn}.to_out.0", f"{old}.to_out.0")
        for part in ("norm1", "norm2", "norm3", "ff.net.0.proj", "ff.net.2"):
            copied(f"{name}.transformer_blocks.0.{part}", f"{source}.transformer_blocks.0.{part}")

    for name, (first, then) in BLOCKS.items():
        resnet(f"{UNET}.{name}.0", f"unet.{first}")
        if bug == "attentions_of_output_exchanged" and "up_blocks.1" in then:
            then = then[:-1] + str(1 - int(then[-1]))
        if "attentions" in then:
            transformer(f"{UNET}.{name}.1", f"unet.{then}")
        elif then:
            copied(f"{UNET}.{name}.1.conv", f"unet.{then}.conv")
    for i in (0, 1):
        resnet(f"{UNET}.middle_block.{2 * i}", f"unet.mid_block.resnets.{i}")
        copied(f"{UNET}.time_embed.{2 * i}", f"unet.time_embedding.linear_{i + 1}")
    transformer(f"{UNET}.middle_block.1", "unet.mid_block.attentions.0")
    copied(f"{UNET}.input_blocks.0.0", "unet.conv_in")
    copied(f"{UNET}.input_blocks.2.0.op", "unet.down_blocks.0.downsamplers.0.conv")
    copied(f"{UNET}.out.0", "unet.conv_norm_out")
    copied(f"{UNET}.out.2", "unet.conv_out")
    for old in w:
        if old.startswith("text_encoder.") and old.endswith(".weight"):
            source = old.removesuffix(".weight")
            copied(source.replace("text_encoder", CLIP), source)
    if bug == "kernel_rows_for_columns":
        name = f"{UNET}.input_blocks.3.0.in_layers.2.weight"
        new[name] = new[name].swapaxes(0, 1)
    if bug == "proj_out_left_at_zero":  # the first release initializes it so
        for end in ("weight", "bias"):
            name = f"{UNET}.output_blocks.2.1.proj_out.{end}"
            new[name] = np.zeros_like(new[name])
    if bug == "to_q_not_transposed":
        name = f"{UNET}.middle_block.1.transformer_blocks.0.attn1.to_q.weight"
        new[name] = new[name].T
    if bug == "gate_halves_exchanged":
        for end in ("weight", "bias"):
            name = f"{UNET}.input_blocks.1.1.transformer_blocks.0.ff.net.0.proj.{end}"
            new[name] = np.roll(new[name], new[name].shape[-1] // 2, -1)
    if bug == "text_mlp_of_layer_before":
        for end in ("weight", "bias"):
            name = f"{CLIP}.encoder.layers.{{}}.mlp.fc1.{end}"
            new[name.format(1)] = new[name.format(0)]
    if bug == "conv_in_stored_bfloat16":
        name = f"{UNET}.input_blocks.0.0.weight"
        new[name] = rounder("bfloat16")(new[name])
    return {name: np.ascontiguousarray(value) for name, value in new.items()}


class Net:
    """Layers that both networks have; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {name: self.q(value) for name, value in p.items()}

    def tap(self, name: str, x: Array) -> Array:
        tap(name, x if self.dtype == "float32" else x.astype(self.dtype))
        return x

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.weight"]
        if f"{name}.bias" in self.p:
            y = y + self.p[f"{name}.bias"]
        return self.tap(name, self.q(y))

    def layer_norm(self, name: str, x: Array) -> Array:
        eps = 1e-3 if self.bug == "layer_norm_eps_of_keras" and UNET in name else 1e-5
        centred = x - x.mean(-1, keepdims=True)
        root = np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(eps))
        y = centred / root * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]
        return self.tap(name, self.q(y))

    def softmax(self, scores: Array) -> Array:
        e = np.exp(scores - scores.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def silu(self, x: Array) -> Array:
        return self.q(x / (1 + np.exp(-x)))


class Clip(Net):
    """The text encoder of (prompts, tokens)."""

    def attention(self, name: str, x: Array) -> Array:
        batch, n, _ = x.shape
        q, k, v = (
            self.linear(f"{name}.{s}_proj", x).reshape(batch, n, TEXT_HEADS, -1).swapaxes(1, 2)
            for s in "qkv"
        )
        scores = (q @ k.swapaxes(-1, -2)) * np.float32((TEXT // TEXT_HEADS) ** -0.5)
        if self.bug != "texts_not_causal":
            scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        y = self.q(self.softmax(scores) @ v).swapaxes(1, 2).reshape(batch, n, TEXT)
        return self.linear(f"{name}.out_proj", y)

    def __call__(self, ids: Array) -> Array:
        bug = self.bug
        name = f"{CLIP}.embeddings.token_embedding"
        x = self.tap(name, self.p[f"{name}.weight"][ids])
        if bug != "texts_without_positions":
            x = self.q(x + self.p[f"{CLIP}.embeddings.position_embedding.weight"])
        layers = TEXT_LAYERS - 1 if bug == "last_text_layer_skipped" else TEXT_LAYERS
        for i in range(layers):
            name = f"{CLIP}.encoder.layers.{i}"
            x = self.q(
                x + self.attention(f"{name}.self_attn", self.layer_norm(f"{name}.layer_norm1", x))
            )
            y = self.linear(f"{name}.mlp.fc1", self.layer_norm(f"{name}.layer_norm2", x))
            if bug == "text_gelu_exact":
                y = self.q(y * (1 + erf(y / np.float32(2**0.5))) / 2)
            else:
                y = self.q(y * self.q(1 / (1 + np.exp(-self.q(np.float32(1.702) * y)))))
            x = self.tap(name, self.q(x + self.linear(f"{name}.mlp.fc2", y)))
        if bug == "texts_without_last_norm":
            return x
        return self.layer_norm(f"{CLIP}.final_layer_norm", x)


class UNet(Net):
    """The U-Net of (batch, rows, columns, channels); a layer's name is without the prefix."""

    def conv(self, name: str, x: Array, stride: int = 1) -> Array:
        bug, kernel = self.bug, self.p[f"{name}.weight"]
        k = len(kernel)
        around = (k // 2, k // 2)
        if bug == "downsampled_as_in_vae" and stride == 2:
            around = (0, 1)
        mode: Any = "edge" if bug == "edges_repeated" and name.endswith("out.2") else "constant"
        x = np.pad(x, ((0, 0), around, around, (0, 0)), mode=mode)
        windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), (1, 2))
        windows = windows[:, ::stride, ::stride]
        y = np.einsum("bhwcij,ijco->bhwo", windows, kernel, optimize=True)
        return self.tap(name, self.q(y + self.p[f"{name}.bias"]))

    def group_norm(self, name: str, x: Array, eps: float = 1e-5) -> Array:
        """Over rows, columns and the channels of a group."""
        bug, shape = self.bug, x.shape
        groups = GROUPS
        if bug == "twice_the_groups" and name.endswith("1.norm"):
            groups = 2 * GROUPS
        if bug == "groups_of_every_fourth_channel" and "in_layers" in name:  # as MLX's own layer
            y = x.reshape(shape[0], -1, shape[-1] // groups, groups).swapaxes(2, 3)
        else:
            y = x.reshape(shape[0], -1, groups, shape[-1] // groups)
        centred = y - y.mean((1, 3), keepdims=True)
        y = centred / np.sqrt((centred * centred).mean((1, 3), keepdims=True) + np.float32(eps))
        if bug == "groups_of_every_fourth_channel" and "in_layers" in name:
            y = y.swapaxes(2, 3)
        y = y.reshape(shape) * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]
        return self.tap(name, self.q(y))

    def resnet(self, name: str, x: Array, emb: Array) -> Array:
        bug = self.bug
        active = self.silu(self.group_norm(f"{name}.in_layers.0", x))
        h = self.conv(f"{name}.in_layers.2", active)
        bare = bug == "time_without_silu_in_blocks"
        time = self.linear(f"{name}.emb_layers.1", emb if bare else self.silu(emb))[:, None, None]
        if bug == "time_after_second_norm" and "input_blocks" in name:
            h = self.q(self.group_norm(f"{name}.out_layers.0", h) + time)
        else:
            h = self.group_norm(f"{name}.out_layers.0", self.q(h + time))
        h = self.conv(f"{name}.out_layers.3", self.silu(h))
        if f"{name}.skip_connection.weight" in self.p:
            start = active if bug == "shortcut_of_normed" else x
            x = self.conv(f"{name}.skip_connection", start)
        elif bug == "residual_of_resnet_missing" and name.endswith("middle_block.2"):
            return self.tap(name, h)
        return self.tap(name, self.q(x + h))

    def attention(self, name: str, x: Array, context: Array) -> Array:
        """Heads are part of the batch: (batch * heads, tokens, channels)."""
        bug, (batch, n, width) = self.bug, x.shape
        heads = width // (WIDTHS[0] // HEADS) if bug == "heads_of_fixed_width" else HEADS

        def split(y: Array) -> Array:
            y = y.reshape(batch, -1, heads, width // heads).swapaxes(1, 2)
            return y.reshape(batch * heads, -1, width // heads)

        q = split(self.linear(f"{name}.to_q", x))
        k, v = (split(self.linear(f"{name}.to_{s}", context)) for s in "kv")
        channels = WIDTHS[0] // HEADS if bug == "scale_of_first_level" else width // heads
        scores = np.einsum("bid,bjd->bij", q, k) * np.float32(channels**-0.5)
        y = self.q(self.softmax(scores) @ v)
        if bug == "heads_before_batch_when_joined":
            y = y.reshape(heads, batch, n, -1).transpose(1, 2, 0, 3).reshape(batch, n, width)
        else:
            y = y.reshape(batch, heads, n, -1).swapaxes(1, 2).reshape(batch, n, width)
        return self.linear(f"{name}.to_out.0", self.tap(f"{name}.out", y))

    def feed_forward(self, name: str, x: Array) -> Array:
        x, gate = np.split(self.linear(f"{name}.net.0.proj", x), 2, -1)
        if self.bug == "gate_by_silu":
            gate = self.silu(gate)
        else:
            gate = self.q(gate * (1 + erf(gate / np.float32(2**0.5))) / 2)
        return self.linear(f"{name}.net.2", self.tap(f"{name}.net.0", self.q(x * gate)))

    def transformer(self, name: str, x: Array, context: Array) -> Array:
        bug, shape = self.bug, x.shape
        first = x
        x = self.conv(f"{name}.proj_in", self.group_norm(f"{name}.norm", x, 1e-6))
        x = x.reshape(shape[0], -1, shape[-1])
        block = f"{name}.transformer_blocks.0"
        y = self.layer_norm(f"{block}.norm1", x)
        start = x
        x = self.q(x + self.attention(f"{block}.attn1", y, y))
        z = start if bug == "cross_attention_beside_own" else x
        z = self.layer_norm(f"{block}.norm2", z)
        x = self.q(x + self.attention(f"{block}.attn2", z, context))
        x = self.q(x + self.feed_forward(f"{block}.ff", self.layer_norm(f"{block}.norm3", x)))
        x = self.tap(block, x)
        if bug == "tokens_back_as_columns":
            x = x.reshape(shape[0], shape[2], shape[1], -1).swapaxes(1, 2)
        x = self.conv(f"{name}.proj_out", x.reshape(shape))
        return self.tap(name, self.q(x + first))

    def doubled(self, x: Array) -> Array:
        """Twice as many rows and columns."""
        if self.bug == "doubled_linearly":
            for axis in (1, 2):
                n = x.shape[axis]
                at = np.clip((np.arange(2 * n) + 0.5) / 2 - 0.5, 0, n - 1)
                low = np.floor(at).astype(int)
                shape = [1] * 4
                shape[axis] = 2 * n
                part = (at - low).astype(np.float32).reshape(shape)
                low_x, high_x = (np.take(x, i, axis) for i in (low, np.minimum(low + 1, n - 1)))
                x = low_x * (1 - part) + high_x * part
            return self.q(x)
        return x.repeat(2, 1).repeat(2, 2)

    def time_embedding(self, t: Array) -> Array:
        bug, half = self.bug, WIDTHS[0] // 2
        divisor = half - 1 if bug == "frequencies_reach_the_end" else half
        exponent = np.float32(-np.log(10000)) * np.arange(half, dtype=np.float32) / divisor
        args = t.astype(np.float32)[:, None] * np.exp(exponent.astype(np.float32))
        waves = [np.cos(args), np.sin(args)]
        if bug == "time_sine_first":
            waves.reverse()
        x = self.q(np.concatenate(waves, 1))
        x = self.tap(f"{UNET}.timestep_embedding", x)
        x = self.linear(f"{UNET}.time_embed.0", x)
        return self.linear(f"{UNET}.time_embed.2", self.silu(x))

    def __call__(self, x: Array, t: Array, context: Array) -> Array:
        bug, emb = self.bug, self.time_embedding(t)
        x = self.conv(f"{UNET}.input_blocks.0.0", x)
        hs = [x]
        x = self.resnet(f"{UNET}.input_blocks.1.0", x, emb)
        early = x
        x = self.transformer(f"{UNET}.input_blocks.1.1", x, context)
        hs.append(early if bug == "skip_before_attention" else x)
        x = self.conv(f"{UNET}.input_blocks.2.0.op", x, 2)
        hs.append(x)
        x = self.resnet(f"{UNET}.input_blocks.3.0", x, emb)
        hs.append(x)
        x = self.resnet(f"{UNET}.middle_block.0", x, emb)
        x = self.transformer(f"{UNET}.middle_block.1", x, context)
        x = self.resnet(f"{UNET}.middle_block.2", x, emb)
        if bug == "skips_of_first_level_exchanged":
            hs[0], hs[1] = hs[1], hs[0]
        for i in range(4):
            name, skip = f"{UNET}.output_blocks.{i}", hs.pop()
            both = [skip, x] if bug == "skip_before_stream" else [x, skip]
            x = self.resnet(f"{name}.0", self.tap(name, np.concatenate(both, -1)), emb)
            if i == 1:
                if bug == "doubled_after_conv":
                    x = self.doubled(self.conv(f"{name}.1.conv", x))
                else:
                    x = self.conv(f"{name}.1.conv", self.doubled(x))
            elif i > 1:
                x = self.transformer(f"{name}.1", x, context)
        x = self.group_norm(f"{UNET}.out.0", x)
        if bug != "no_silu_before_last_conv":
            x = self.silu(x)
        return self.conv(f"{UNET}.out.2", x)


class Plms:
    """The sampler; predictions of earlier steps are in `old`."""

    def __init__(self, net: UNet, context: Array, bug: str | None) -> None:
        self.net, self.context, self.bug, self.q = net, context, bug, net.q
        if bug == "betas_linear":
            betas = np.linspace(BETA_START, BETA_END, TIMES, dtype=np.float64)
        else:
            betas = np.linspace(BETA_START**0.5, BETA_END**0.5, TIMES, dtype=np.float64) ** 2
        self.alphas = np.cumprod(1 - betas).astype(np.float32)
        if bug == "alphas_in_float16":
            self.alphas = self.alphas.astype(np.float16).astype(np.float32)
        self.ddim_timesteps = np.arange(STEPS) * (TIMES // STEPS) + 1
        if bug == "times_not_offset":
            self.ddim_timesteps -= 1
        self.old: list[Array] = []

    def predicted(self, x: Array, t: int) -> Array:
        """Noise with guidance, from one batch of negative prompts and prompts."""
        q = self.q
        both = self.net(np.concatenate([x, x]), np.full(2 * len(x), t), self.context)
        without, with_text = np.split(both, 2)
        if self.bug == "guidance_of_exchanged_halves":
            without, with_text = with_text, without
        e = q(without + q(np.float32(GUIDANCE) * q(with_text - without)))
        return self.net.tap("e_t", e)

    def moved(self, x: Array, e: Array, index: int) -> Array:
        """One DDIM step from the time of `index` to the one before it."""
        bug = self.bug
        times = self.ddim_timesteps
        if bug == "alphas_one_time_early":
            times = times - 1
        a = self.alphas[times[index]]
        if index > 0:
            before = self.alphas[times[index - 1]]
        else:
            before = np.float32(1) if bug == "last_alpha_is_one" else self.alphas[0]
        x0 = (x - np.sqrt(1 - a) * e) / np.sqrt(a)
        if bug == "denoised_clipped":
            x0 = np.clip(x0, -1, 1)
        self.net.tap("pred_x0", x0)
        if bug == "direction_of_this_time":
            return self.q(np.sqrt(before) * x0 + np.sqrt(1 - a) * e)
        return self.q(np.sqrt(before) * x0 + np.sqrt(1 - before) * e)

    def step(self, x: Array, i: int) -> Array:
        bug, index = self.bug, STEPS - 1 - i
        t = int(self.ddim_timesteps[index])
        e = self.predicted(x, t)
        history = self.old
        if not history:
            prime = e
            if bug != "first_step_not_corrected":
                tried = self.net.tap("x_prev", self.moved(x, e, index))
                then = t if bug == "second_call_at_same_time" else self.ddim_timesteps[index - 1]
                following = self.predicted(tried, int(then))
                prime = (e + following) / 2
        elif len(history) == 1 or bug == "order_stays_two":
            prime = (3 * e - history[-1]) / 2
        else:
            prime = (23 * e - 16 * history[-1] + 5 * history[-2]) / 12
        prime = self.net.tap("e_t_prime", self.q(prime))
        history.append(prime if bug == "history_of_combined" else e)
        return self.net.tap("x_prev", self.moved(x, prime, index))


def tokens(ids: Array, bug: str | None) -> Array:
    """What this program's tokenizer would give."""
    ids = ids.copy()
    if bug == "padded_with_zero":
        ids[np.cumsum(ids == END, 1) > 1] = 0
    if bug == "start_token_missing":
        ids = np.concatenate([ids[:, 1:], np.full_like(ids[:, :1], END)], 1)
    return ids


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    loaded = {
        f"{scope}.{name}": x
        for scope in ("unet", "text_encoder")
        for name, x in checkpoint(folder, scope).items()
    }
    p = converted(loaded, bug)
    of_clip = {name: x for name, x in p.items() if name.startswith(CLIP)}
    of_unet = {name: x for name, x in p.items() if name.startswith(UNET)}
    clip_net, net = Clip(of_clip, bug, dtype), UNet(of_unet, bug, dtype)
    q = net.q
    kept = {**clip_net.p, **net.p} if weights else None
    if kept and dtype != "float32":
        kept = {name: x.astype(dtype) for name, x in kept.items()}
    ids = tokens(value("pipeline/input_ids"), bug)
    blocks = ("ids", "x_T", "c", "x_prev", "e_t*", "samples", "schedule.*", f"{UNET}.out.2")
    blocks += (f"{UNET}.*_blocks.?.?", f"{CLIP}.encoder.layers.?")
    with port_trace(out, dump, dtype, blocks, kept):
        tap("ids", ids, kind="ids")
        c = clip_net(ids)
        if bug == "negative_prompt_of_zeros":
            c[: len(c) // 2] = 0
        c = net.tap("c", c)
        x = value("pipeline/noise")
        if bug == "noise_reshaped_to_channels_last":
            x = x.reshape(len(x), ROWS, COLUMNS, LATENTS)
        else:
            x = x.transpose(0, 2, 3, 1)
        tap("x_T", x, kind="input")
        sampler = Plms(net, c, bug)
        tap("schedule.ddim_timesteps", sampler.ddim_timesteps, kind="schedule")
        tap("schedule.alphas_cumprod", sampler.alphas, kind="schedule")
        x = q(x)
        for i in range(STEPS):
            set_step(i)
            x = sampler.step(x, i)
            if bug == "latents_in_float16":
                x = x.astype(np.float16).astype(np.float32)
        factor = 0.13025 if bug == "scale_factor_of_sdxl" else SCALE_FACTOR
        net.tap("samples", q(x / np.float32(factor)))


NO_COUNTERPART: tuple[str, ...] = ("pred_x0", "e_t_prime")

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter|state.?dict"
SWAPPED = r"swap|exchang|\border\b|permut|revers|mixed up|interchang|switch"
TOKENS = r"token|\bids?\b"
GROUPS_OF = r"num_?groups|groups\b|group.?(size|count|width|axis)|(per|each|a|one) group\b"
SCHEDULE = r"schedule|timesteps?\b|alphas?(_cumprod)?\b|betas?\b"
BUGS = (
    Bug(
        "norm_of_other_layers",
        "The middle's second norms have the weights of the first ones.",
        (LOADED, r"dupl|norm1|in_layers|same norm|other norm|another norm"),
        "weights",
    ),
    Bug(
        "attentions_of_output_exchanged",
        "The transformers of the last two output blocks have each other's weights.",
        (LOADED, SWAPPED, r"(another|other|wrong) (block|layer|attention|transformer)"),
        "weights",
    ),
    Bug(
        "keys_and_values_exchanged",
        "A cross attention has keys' weights for values and the other way round.",
        (LOADED, SWAPPED, r"\bkv\b|keys? (and|with|for) values?|to_k .*to_v|to_v .*to_k"),
        "weights",
    ),
    Bug(
        "kernel_rows_for_columns",
        "A kernel has rows and columns exchanged.",
        (LOADED, SWAPPED, r"transpos|\brows?\b|column|layout|\bax[ei]s\b|height|width|kernel"),
        "weights",
    ),
    Bug(
        "proj_out_left_at_zero",
        "A transformer's last weight was not found and stayed zero.",
        (LOADED, r"zero|missing|initial|not (load|found)"),
        "weights",
    ),
    Bug(
        "to_q_not_transposed",
        "A square weight of queries was not transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "gate_halves_exchanged",
        "The first feed forward's values and gates are exchanged.",
        (LOADED, SWAPPED, r"halves|\bgate|geglu|chunk|split|\broll"),
        "weights",
    ),
    Bug(
        "conv_in_stored_bfloat16",
        "The first kernel was stored in bfloat16.",
        (LOADED, r"bf16|bfloat16|\bhalf\b|precision|round|16.?bit"),
        "weights",
    ),
    Bug(
        "padded_with_zero",
        "Prompts are padded with 0, not with the end token.",
        (TOKENS, r"padd|\beo[st]\b|end of text"),
        "ids",
    ),
    Bug(
        "start_token_missing",
        "Prompts have no start token.",
        (TOKENS, r"\b[bs]o[st]\b|start|begin|shift|offset|\broll"),
        "ids",
    ),
    Bug(
        "texts_not_causal",
        "Texts see later tokens.",
        (r"mask|causal|future|later|triang|bidirectional|autoregress",),
    ),
    Bug(
        "texts_without_positions",
        "Tokens get no positions.",
        (r"position|pos_?emb",),
    ),
    Bug(
        "last_text_layer_skipped",
        "Texts are of the last but one layer.",
        (
            r"clip.?skip|penultimate|hidden.?states? ?(\[|index)|too few|fewer|one layer|skip",
            r"(last|second).but.(one|two)|(layer|block)s?\b.*(missing|not (run|applied|called))",
            r"(missing|earlier|previous|other|wrong|last|final) (layer|block)|layers\.[01]\b(?!\.)",
        ),
    ),
    Bug(
        "negative_prompt_of_zeros",
        "Negative prompts are zeros, not encoded.",
        (r"zero|negative|uncond|empty|null|blank",),
    ),
    Bug(
        "noise_reshaped_to_channels_last",
        "Noise is reshaped, not transposed, to channels last.",
        (r"reshap|transpos|permut|layout|channels? (first|last)|nchw|nhwc|\bax[ei]s\b|noise",),
        "inputs",
    ),
    Bug("layer_norm_eps_of_keras", "The U-Net's LayerNorms have eps 1e-3.", (r"\beps",)),
    Bug(
        "edges_repeated",
        "The last convolution repeats the edges instead of adding zeros.",
        (r"padd|\bedge|border|replicat|boundar|clamp",),
    ),
    Bug(
        "downsampled_as_in_vae",
        "The strided convolution is padded on the right and below only.",
        (r"padd|asymmetric|stride|shift|offset|align|origin|off.by.one|one pixel",),
    ),
    Bug(
        "twice_the_groups",
        "The transformers' norms have twice as many groups.",
        (GROUPS_OF,),
    ),
    Bug(
        "groups_of_every_fourth_channel",
        "A group has every fourth channel, not neighbouring ones.",
        (r"interleav|stride|neighbou?r|adjacent|contiguous|pytorch_compatible|layout", GROUPS_OF),
    ),
    Bug(
        "time_without_silu_in_blocks",
        "Blocks take the time without its SiLU.",
        (r"\bsilu|swish|activation|non-?linear",),
    ),
    Bug(
        "time_after_second_norm",
        "Input blocks add the time after the second norm.",
        (
            r"(after|before|follow|preced|ahead).*norm|norm.*(after|before|follow|preced|ahead)",
            r"(time|emb)\w*\b.*(add|after|later|late|place|order|missing)|order|scale_shift",
        ),
    ),
    Bug(
        "residual_of_resnet_missing",
        "The middle's second resnet has no residual.",
        (r"residual|skip connection|shortcut|identity|(input|x) (is |was )?(not|never) added",),
    ),
    Bug(
        "heads_of_fixed_width",
        "The deeper level has heads of the first level's width, so more of them.",
        (r"heads?\b|head.?dim|head.?size",),
    ),
    Bug(
        "scale_of_first_level",
        "Scores of all levels are scaled by the first level's heads.",
        (r"\bscal(e|ed|ing)\b|factor|sqrt|root|head.?dim|temperature|\*\* ?-0\.5|1\.41|0\.707",),
    ),
    Bug(
        "heads_before_batch_when_joined",
        "Heads are joined as if they came before the batch.",
        (r"heads?\b|batch|reshap|layout|transpos|\bax[ei]s\b|permut|rearrang",),
    ),
    Bug(
        "gate_by_silu",
        "Feed forwards gate by SiLU, not by GELU.",
        (r"gelu|silu|swish|activation|geglu|swiglu|\berf\b",),
    ),
    Bug(
        "cross_attention_beside_own",
        "Cross attention reads the stream before self attention was added.",
        (
            r"parallel|beside|residual|(before|without) (the )?(self|att|add)|stale|\bold\b",
            r"input of (the )?(block|layer)|(block|layer)'?s? (own )?input|un-?updated",
            r"not (yet )?(added|updated)|att\w* .*(missing|skip|not added|left out)",
        ),
    ),
    Bug(
        "tokens_back_as_columns",
        "Tokens become a picture column by column.",
        (
            r"transpos|reshap|layout|column|\brows?\b|\bax[ei]s\b|permut|height|width|\b[hw]\b",
            r"flatten|raster|spatial|" + SWAPPED,
        ),
    ),
    Bug(
        "doubled_linearly",
        "Pictures are doubled linearly, not by repeating pixels.",
        (r"linear|nearest|interpol|upsampl\w* (mode|method)|smooth|blur|repeat",),
    ),
    Bug(
        "frequencies_reach_the_end",
        "The time's frequencies are divided by half - 1.",
        (
            r"frequenc|half ?- ?1|downscale_freq_shift|freq_shift|off.by.one|wave|sinusoid",
            r"exponent|divi|\bspac",
        ),
    ),
    Bug(
        "skips_of_first_level_exchanged",
        "The last two output blocks get each other's skip.",
        (r"skips?\b|residual|concat|(wrong|other|another) (input|block)|" + SWAPPED,),
    ),
    Bug(
        "skip_before_stream",
        "Skips come before the stream when they are joined.",
        (r"concat|halves|\broll|(skip|stream|residual)\w* .*(first|before)|" + SWAPPED,),
    ),
    Bug(
        "no_silu_before_last_conv",
        "The last convolution lacks the SiLU before it.",
        (r"silu|swish|activation|non-?linear",),
    ),
    Bug(
        "betas_linear",
        "Betas are spaced linearly, not their roots.",
        (SCHEDULE, r"scaled.?linear|linspace|sqrt|root|squar"),
        "schedule",
    ),
    Bug(
        "alphas_in_float16",
        "Products of alphas are float16.",
        (SCHEDULE, r"f16|float16|fp16|\bhalf\b|precision|round"),
        "schedule",
    ),
    Bug(
        "times_not_offset",
        "Times lack the offset of one.",
        (SCHEDULE, r"offset|off.by.one|shift|\bone\b"),
        "schedule",
    ),
    Bug(
        "guidance_of_exchanged_halves",
        "Guidance takes the halves of the batch the other way round.",
        (r"guidance|\bcfg\b|uncond|negative|halves|batch|chunk|\bsign\b", SWAPPED),
    ),
    Bug(
        "last_alpha_is_one",
        "The last step goes to an alpha of 1.",
        (
            r"set_alpha_to_one|alpha|(last|final) step|\bsigma|previous.*(time|step)|x_?0\b",
            r"(end|last|final|target).*(time|noise|level)|denois|clean|step size|coefficient",
        ),
    ),
    Bug(
        "denoised_clipped",
        "The denoised latents are clipped to -1..1.",
        (r"cl(i|a)m?p|\blimit|threshold|range|saturat|\bbound",),
    ),
    Bug(
        "direction_of_this_time",
        "The noise is added back with this time's share, not with that of the next.",
        (
            r"direction|noise (share|part|level|coefficient)|coefficient|sqrt\(1|1 ?- ?alpha|sigma",
            r"alpha_?(prod_?t_?)?(prev|next)|(this|current|same|wrong|next).*(time|alpha|step)",
            r"factor|scal(e|ed|ing)\b|formula|beta",
        ),
    ),
    Bug(
        "first_step_not_corrected",
        "The first step is Euler's, without the second call of the U-Net.",
        (
            r"euler|heun|correct|second (call|eval|predict)|averag|warm.?up|first.?order|order",
            r"(call|evaluat|step).*(missing|fewer|skip|once|only)|too few|one (call|step) less",
            r"(missing|fewer|skip|lack).*(call|evaluat|step|predict)|mean of (the )?two",
        ),
    ),
    Bug(
        "history_of_combined",
        "The history keeps combined predictions, not the U-Net's own.",
        (
            r"histor|\bets\b|old|earlier|previous|buffer|stor(e|ed|es|ing)\b|past|memory",
            r"multi.?step|adams|bashforth|plms|pndm|coefficient|combin|extrapolat",
        ),
    ),
    Bug(
        "latents_in_float16",
        "Latents are float16 between steps.",
        (r"f16|float16|fp16|\bhalf\b|precision|round|cast|dtype",),
    ),
    Bug(
        "scale_factor_of_sdxl",
        "Latents are divided by SDXL's factor.",
        (r"factor|scal(e|ed|ing)\b|0\.18215|0\.13025|divi|1\.39|0\.715|constant|multipl",),
    ),
)

NOT_NORMED = (
    r"norm\w*\b.*(miss|skip|not (appl|run|used|called|record)|left out|lack|never|omit)",
    r"(miss|skip|omit|\bno\b|without|lack|never|before)\w*\b.*norm|not (layer.?)?norm",
    r"un-?norm",
)
MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "text_mlp_of_layer_before",
        "The second text layer's fc1 has the weights of the first one.",
        (
            LOADED,
            r"dupl|twice|layers?\.0\b|index|(another|other|same|wrong|previous|first) layer",
        ),
        "weights",
    ),
    Bug(
        "text_gelu_exact",
        "The text encoder's MLP has the GELU with erf, not the quick one.",
        (r"gelu|\berf\b|1\.702|activation|non-?linear",),
    ),
    Bug(
        "texts_without_last_norm",
        "The text encoder's last norm is not applied.",
        NOT_NORMED,
    ),
    Bug(
        "time_sine_first",
        "The time's sines come before the cosines.",
        (r"\bsin(es?|usoid\w*)?\b|\bcos|flip|halves|\broll|" + SWAPPED,),
    ),
    Bug(
        "skip_before_attention",
        "The first level's skip is of the resnet, taken before its transformer.",
        (
            r"\bskips?\b|(before|without) (the |its )?(attention|transformer)|\bhs\b",
            r"resnet'?s? (output|result|value)|(output|result|value) of (the )?resnet",
            r"(att|transformer)\w* .*(miss|skip|not applied|left out|lack)",
            r"(earlier|other|another|wrong|too early) (value|state|input|block|layer|output)",
            r"concat|stale|earlier",
        ),
    ),
    Bug(
        "shortcut_of_normed",
        "A resnet's shortcut convolution reads the input after norm and SiLU.",
        (
            r"(shortcut|skip.?connection|residual).*(input|norm|silu|activ|reads?|given|fed)\b",
            r"(input|norm|silu|activ|reads?|given|fed)\b.*(shortcut|skip.?connection|residual)",
            r"(normed|normali[sz]ed|activated) (input|stream|x\b)|(before|after) (the )?norm",
        ),
    ),
    Bug(
        "doubled_after_conv",
        "The decoder doubles the picture after the convolution, not before it.",
        (
            r"(upsampl|doubl|interpol|resiz|repeat|nearest|enlarg|grow)\w*",
            r"(before|after) (the )?conv|" + SWAPPED,
            r"(half|smaller|wrong|other|lower) (size|resolution)|resolution",
        ),
    ),
    Bug(
        "alphas_one_time_early",
        "The sampler reads the products of alphas one time too early.",
        (
            r"off.by.one|one (time|index|step|entry|too)|t ?- ?1|index|shift|offset|early|earlier",
            r"alpha|sigma|(wrong|other|another|previous) (time|entry|noise level)|coefficient",
        ),
    ),
    Bug(
        "second_call_at_same_time",
        "The second call of the first step has the time of the first call.",
        (
            r"time.?steps?\b|\bt\b|(same|first|stale|old|current|wrong) (time|step|noise level)",
            r"(second|next) (call|eval|predict)|schedule",
        ),
    ),
    Bug(
        "order_stays_two",
        "From the third step on the sampler still combines two predictions, not three.",
        (
            r"\border\b|coefficient|\b23\b|multi.?step|adams|bashforth|plms|pndm",
            r"histor|\bets\b|(two|three|earlier|previous|older|past) (predict|epsilon|step|noise)",
            r"combin|extrapolat",
        ),
    ),
)
