"""Qwen-Image in NumPy, by ComfyUI's names: latents of five axes, packed inside of the model.

q, k and v are one product, weights are (in, out), heads come before tokens, the rotation is a
table of 2x2 matrices. The sampler works on denoised pictures; the negative prompts run first.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline, calculate_shift

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

NAME = "qwenimage"
HEADS, AXES, LAYERS, TEXT = 3, (4, 6, 6), 3, 20
HEAD = sum(AXES)
WIDTH = HEADS * HEAD
CHANNELS, ROWS, COLUMNS = 4, 5, 6  # of latents; the rows and columns are those of patches
STEPS, CFG, TEMPLATE = 2, 3.5, 3
BASE_TOKENS, MOST_TOKENS, BASE_SHIFT, MAX_SHIFT = 16, 64, 0.5, 0.9
LENGTHS = {"positive": (7, 5), "negative": (3, 4)}  # tokens of prompts after the template
MEANS, DEVIATIONS = (-0.76, 0.31, 0.14, -0.52), (2.82, 1.45, 2.06, 1.73)


def made() -> QwenImageTransformer2DModel:
    """The transformer; its norms of queries, keys and texts are far from 1."""
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * CHANNELS,
        out_channels=CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=HEAD,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT,
        axes_dims_rope=AXES,
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.ndim == 1 and "norm_out" not in name:
            parameter.data.mul_(1 + 0.4 * torch.randn(parameter.shape, generator=generator))
        if "_mod.1" in name or "timestep_embedder" in name:
            parameter.data.mul_(1.6)
    return model


def encoded(hidden: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features without padding and template, then padded with zeros on the right."""
    kept = [row[keep.bool()][TEMPLATE:] for row, keep in zip(hidden, mask, strict=True)]
    features = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True)
    ones = [torch.ones(len(row), dtype=torch.long) for row in kept]
    return features, torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)


def reference(folder: Path, dtype: str) -> None:
    """Two pictures, each with a prompt and a negative prompt."""
    model = saved(randomised(made, 31), folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=BASE_SHIFT,
        max_shift=MAX_SHIFT,
        base_image_seq_len=BASE_TOKENS,
        max_image_seq_len=MOST_TOKENS,
    )
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        prompts = {}
        for seed, (sign, lengths) in enumerate(LENGTHS.items()):
            longest = TEMPLATE + max(lengths)
            hidden = (1.5 * noise(40 + seed, 2, longest, TEXT)).to(model.dtype)
            mask = torch.ones(2, longest, dtype=torch.long)
            for row, length in zip(mask, lengths, strict=True):
                row[: longest - TEMPLATE - length] = 0  # the tokenizer pads on the left
            recorder.record(f"text_encoder/{sign}_hidden_states", hidden, kind="input")
            recorder.record(f"text_encoder/{sign}_attention_mask", mask, kind="input")
            prompts[sign] = encoded(hidden, mask)
            recorder.record(f"pipeline/{sign}_prompt_embeds", prompts[sign][0])
            recorder.record(f"pipeline/{sign}_prompt_embeds_mask", prompts[sign][1], kind="input")
        start = noise(7, 2, 1, CHANNELS, 2 * ROWS, 2 * COLUMNS)
        recorder.record("pipeline/noise", start, kind="input")
        latents = QwenImagePipeline._pack_latents(start, 2, CHANNELS, 2 * ROWS, 2 * COLUMNS)
        latents = latents.to(model.dtype)
        sigmas = np.linspace(1.0, 1 / STEPS, STEPS)
        limits = (BASE_TOKENS, MOST_TOKENS, BASE_SHIFT, MAX_SHIFT)
        mu = calculate_shift(latents.shape[1], *limits)
        scheduler.set_timesteps(STEPS, sigmas=list(sigmas), mu=mu)
        scheduler.set_begin_index(0)
        recorder.record("pipeline/mu", np.float32(mu), kind="scalar")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        for step, t in enumerate(scheduler.timesteps):
            recorder.step = step
            recorder.record("pipeline/latents", latents)
            predicted = {}
            for sign, (features, mask) in prompts.items():
                predicted[sign] = model(
                    latents,
                    features,
                    mask,
                    t.expand(2).to(model.dtype) / 1000,
                    img_shapes=[[(1, ROWS, COLUMNS)]] * 2,
                    return_dict=False,
                )[0]
            positive, negative = predicted["positive"], predicted["negative"]
            guided = negative + CFG * (positive - negative)
            recorder.record("pipeline/guided", guided)
            length = torch.norm(positive, dim=-1, keepdim=True)
            guided = guided * (length / torch.norm(guided, dim=-1, keepdim=True))
            recorder.record("pipeline/velocity", guided)
            latents = scheduler.step(guided, t, latents, return_dict=False)[0]
            recorder.record("pipeline/next_latents", latents)
        size = (16 * ROWS, 16 * COLUMNS)
        latents = QwenImagePipeline._unpack_latents(latents, *size, 8)
        mean, deviation = (
            torch.tensor(x, dtype=latents.dtype).view(1, -1, 1, 1, 1) for x in (MEANS, DEVIATIONS)
        )
        recorder.record("pipeline/vae_input", latents / (1 / deviation) + mean)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters as (in, out), q, k and v as one."""
    new: dict[str, Array] = {"txt_norm.weight": w["txt_norm.weight"]}

    def linear(name: str, *sources: str) -> None:
        new[f"{name}.weight"] = np.concatenate([w[f"{s}.weight"].T for s in sources], 1)
        new[f"{name}.bias"] = np.concatenate([w[f"{s}.bias"] for s in sources])

    for name in ("img_in", "txt_in", "proj_out", "norm_out.linear"):
        linear(name, name)
    for i in (1, 2):
        name = f"time_text_embed.timestep_embedder.linear_{i}"
        linear(name, name)
    for i in range(LAYERS):
        name = f"transformer_blocks.{i}"
        order = "qvk" if bug == "fused_as_q_v_k" else "qkv"
        linear(f"{name}.attn.to_qkv", *(f"{name}.attn.to_{s}" for s in order))
        linear(f"{name}.attn.add_qkv_proj", *(f"{name}.attn.add_{s}_proj" for s in "qkv"))
        linear(f"{name}.attn.to_out", f"{name}.attn.to_out.0")
        linear(f"{name}.attn.to_add_out", f"{name}.attn.to_add_out")
        for s in "qk":
            new[f"{name}.attn.norm_{s}.weight"] = w[f"{name}.attn.norm_{s}.weight"]
            added = "norm" if bug == "text_norms_of_picture" else "norm_added"
            new[f"{name}.attn.norm_added_{s}.weight"] = w[f"{name}.attn.{added}_{s}.weight"]
        for stream in ("img", "txt"):
            linear(f"{name}.{stream}_mod.1", f"{name}.{stream}_mod.1")
            early = bug == "text_mlp_of_block_before" and stream == "txt" and i == 1
            source = "transformer_blocks.0" if early else name
            linear(f"{name}.{stream}_mlp.net.0.proj", f"{source}.{stream}_mlp.net.0.proj")
            linear(f"{name}.{stream}_mlp.net.2", f"{source}.{stream}_mlp.net.2")
    if bug == "add_out_not_transposed":
        name = "transformer_blocks.0.attn.to_add_out.weight"
        new[name] = new[name].T
    if bug == "text_value_bias_left_out":
        new["transformer_blocks.1.attn.add_qkv_proj.bias"][2 * WIDTH :] = 0
    if bug == "text_norm_left_at_one":
        new["txt_norm.weight"] = np.ones_like(new["txt_norm.weight"])
    if bug == "mod_bias_dropped":
        name = "transformer_blocks.1.img_mod.1.bias"
        new[name] = np.zeros_like(new[name])
    if bug == "final_halves_as_in_flux":  # other releases store shift before scale
        for end in ("weight", "bias"):
            name = f"norm_out.linear.{end}"
            new[name] = np.roll(new[name], WIDTH, -1)
    if bug == "img_in_from_float8":
        import ml_dtypes

        small = new["img_in.weight"].astype(ml_dtypes.float8_e4m3fn)
        new["img_in.weight"] = small.astype(np.float32)
    return {name: np.ascontiguousarray(value) for name, value in new.items()}


def text_features(hidden: Array, mask: Array, bug: str | None) -> tuple[Array, Array]:
    """Each prompt's own tokens from the left, and which of them are no padding."""
    template = TEMPLATE - 1 if bug == "template_token_kept" else TEMPLATE
    rows = [row[keep > 0][template:] for row, keep in zip(hidden, mask, strict=True)]
    if bug == "template_cut_before_padding":
        rows = [row[template:][keep[template:] > 0] for row, keep in zip(hidden, mask, strict=True)]
    longest = max(len(row) for row in rows)
    features = np.zeros((len(rows), longest, hidden.shape[-1]), np.float32)
    kept = np.zeros((len(rows), longest), np.int64)
    for i, row in enumerate(rows):
        start = longest - len(row) if bug == "features_padded_on_the_left" else 0
        features[i, start : start + len(row)], kept[i, : len(row)] = row, 1
    return features, kept


def patches(x: Array, bug: str | None = None) -> Array:
    """Two by two latents of (batch, channels, 1, rows, columns) as one token."""
    batch, channels, _, rows, columns = x.shape
    x = x.reshape(batch, channels, rows // 2, 2, columns // 2, 2)
    axes = (0, 2, 4, 3, 5, 1) if bug == "packed_channels_last" else (0, 2, 4, 1, 3, 5)
    return x.transpose(axes).reshape(batch, -1, channels * 4)


def picture(x: Array, rows: int, columns: int, bug: str | None = None) -> Array:
    """The inverse of `patches`."""
    batch, _, width = x.shape
    x = x.reshape(batch, rows, columns, width // 4, 2, 2)
    axes = (0, 3, 1, 5, 2, 4) if bug == "pixels_of_patch_transposed" else (0, 3, 1, 4, 2, 5)
    return x.transpose(axes).reshape(batch, width // 4, 1, 2 * rows, 2 * columns)


def image_ids(rows: int, columns: int, bug: str | None) -> Array:
    """(tokens, 3): frame, row, column; rows and columns are counted from the middle."""
    middle = [n // 2 if bug == "middle_rounded_down" else n - n // 2 for n in (rows, columns)]
    ids = np.zeros((rows, columns, 3), np.float32)
    ids[..., 1] = np.arange(rows)[:, None] - middle[0]
    ids[..., 2] = np.arange(columns) - middle[1]
    if bug == "row_and_column_exchanged":
        ids = ids[..., [0, 2, 1]]
    return ids.reshape(-1, 3)


def text_ids(length: int, rows: int, columns: int, bug: str | None) -> Array:
    """Texts go on along the diagonal where the picture ends."""
    start = max(rows, columns) if bug == "text_after_whole_side" else max(rows // 2, columns // 2)
    counted = np.arange(length, dtype=np.float32)
    if bug == "texts_at_one_position":
        counted = np.zeros_like(counted)
    return np.repeat(counted[:, None], 3, 1) + start


def embed_nd(ids: Array, bug: str | None) -> Array:
    """Rotations (1, tokens, half of a head's channels, 2, 2) of ids."""
    angles = []
    for axis, width in enumerate(AXES):
        divisor = HEAD if bug == "frequencies_of_whole_head" else width
        omega = 1 / 10000.0 ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(divisor))
        angles.append(ids[:, axis, None] * omega.astype(np.float32))
    a = np.concatenate(angles, 1).astype(np.float32)
    sin = -np.sin(a) if bug == "rotated_backwards" else np.sin(a)
    rows = np.stack([np.cos(a), -sin, sin, np.cos(a)], -1)
    return rows.reshape(1, *a.shape, 2, 2)


class QwenImage:
    """The transformer; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {name: self.q(value) for name, value in p.items()}

    def tap(self, name: str, x: Array) -> Array:
        tap(name, x if self.dtype == "float32" else x.astype(self.dtype))
        return x

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.p[f"{name}.weight"] + self.p[f"{name}.bias"]
        return self.tap(name, self.q(y))

    def silu(self, x: Array) -> Array:
        return self.q(x / (1 + np.exp(-x)))

    def layer_norm(self, name: str, x: Array) -> Array:
        bug = self.bug
        eps = 1e-3 if bug == "block_norms_eps" and "block" in name else 1e-6
        centred = x - x.mean(-1, keepdims=True)
        n = WIDTH - (1 if bug == "variance_of_n_minus_one" and name.endswith("img_norm1") else 0)
        variance = (centred * centred).sum(-1, keepdims=True) / n
        return self.tap(name, self.q(centred / np.sqrt(variance + np.float32(eps))))

    def rms_norm(self, name: str, x: Array, axes: tuple[int, ...] = (-1,)) -> Array:
        root = np.sqrt((x * x).mean(axes, keepdims=True) + np.float32(1e-6))
        return self.tap(name, self.q(self.q(x / root) * self.p[f"{name}.weight"]))

    def time_embedding(self, sigma: Array) -> Array:
        """(batch, width) of the time between 0 and 1, in 256 waves."""
        bug, name = self.bug, "time_text_embed.timestep_embedder"
        half = 128
        divisor = half - 1 if bug == "waves_reach_the_end" else half
        exponent = np.float32(-np.log(10000)) * np.arange(half, dtype=np.float32) / divisor
        waves = np.exp(exponent.astype(np.float32).astype(np.float64)).astype(np.float32)
        if bug == "time_as_whole_number":
            sigma = np.floor(sigma * 1000) / np.float32(1000)
        factor = np.float32(1 if bug == "time_not_multiplied" else 1000)
        args = factor * (sigma[:, None].astype(np.float32) * waves)
        x = self.q(np.concatenate([np.cos(args), np.sin(args)], 1))
        x = self.tap("time_text_embed.time_proj", x)
        x = self.linear(f"{name}.linear_1", x)
        return self.linear(f"{name}.linear_2", self.silu(x))

    def modulate(self, block: str, stream: str, vec: Array) -> tuple[list[Array], list[Array]]:
        """Shift, scale and gate for attention, then for the MLP."""
        bug = self.bug
        bare = bug == "text_modulation_without_silu" and stream == "txt"
        mod = self.linear(f"{block}.{stream}_mod.1", vec if bare else self.silu(vec))
        parts = np.split(mod[:, None], 6, -1)
        if bug == "gates_exchanged" and stream == "img" and block.endswith(".0"):
            parts[2], parts[5] = parts[5], parts[2]
        return parts[:3], parts[3:]

    def modulated(self, name: str, x: Array, part: list[Array]) -> Array:
        shift, scale, _ = part
        if self.bug == "text_scale_without_one" and name.endswith("txt_norm1_modulated"):
            return self.tap(name, self.q(self.q(x * scale) + shift))
        return self.tap(name, self.q(self.q(x * self.q(1 + scale)) + shift))

    def rotated(self, x: Array, pe: Array) -> Array:
        """Of (batch, heads, tokens, channels): 2x2 matrices times neighbours."""
        if self.bug == "rotated_by_halves":
            a, b = np.split(x, 2, -1)
        else:
            a, b = x[..., ::2], x[..., 1::2]
        a, b = (pe[..., i, 0] * a + pe[..., i, 1] * b for i in (0, 1))
        if self.bug == "rotated_by_halves":
            return self.q(np.concatenate([a, b], -1))
        return self.q(np.stack([a, b], -1).reshape(x.shape))

    def stream(self, name: str, x: Array, norms: str, pe: Array) -> tuple[Array, Array, Array]:
        """q, k and v (batch, heads, tokens, channels) of one stream; q and k normed, rotated."""
        bug, text = self.bug, norms == "norm_added"
        attn = name.rpartition(".")[0]
        qkv = self.linear(name, x).reshape(*x.shape[:2], 3, HEADS, HEAD)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)
        normed = []
        for s, y in (("q", q), ("k", k)):
            axes = (1, 3) if bug == "norm_of_all_heads" and not text and s == "k" else (-1,)
            if bug == "normed_after_rotation" and text:
                y = self.rms_norm(f"{attn}.{norms}_{s}", self.rotated(y, pe), axes)
            else:
                skip = bug == "text_keys_not_normed" and text and s == "k"
                y = y if skip else self.rms_norm(f"{attn}.{norms}_{s}", y, axes)
                y = self.rotated(y, pe)
            normed.append(y)
        return normed[0], normed[1], v

    def attention(
        self, name: str, img: Array, txt: Array, mask: Array, pe: Array
    ) -> tuple[Array, Array]:
        bug, n = self.bug, txt.shape[1]
        turns = pe[:, :n]
        if bug == "texts_not_rotated":
            turns = np.broadcast_to(np.eye(2, dtype=np.float32), turns.shape)
        text = self.stream(f"{name}.add_qkv_proj", txt, "norm_added", turns)
        image = self.stream(f"{name}.to_qkv", img, "norm", pe[:, n:])
        q, k, v = (np.concatenate(both, 2) for both in zip(text, image, strict=True))
        self.tap(f"{name}.joint_query", q)
        self.tap(f"{name}.joint_key", k)
        self.tap(f"{name}.joint_value", v)
        scale = WIDTH**-0.5 if bug == "scaled_by_whole_width" else HEAD**-0.5
        scores = (q @ k.swapaxes(-1, -2)) * np.float32(scale)
        seen = np.concatenate([mask, np.ones(img.shape[:2], mask.dtype)], 1)[:, None, None] > 0
        if bug != "padding_attended":
            scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        if bug == "probabilities_in_bfloat16":
            weights = rounder("bfloat16")(weights)
        y = self.q(weights @ v)
        if bug == "heads_joined_in_place" and name.endswith("1.attn"):
            y = y.reshape(len(y), -1, WIDTH)
        else:
            y = y.transpose(0, 2, 1, 3).reshape(len(y), -1, WIDTH)
        y = self.tap(f"{name}.joint_hidden_states", y)
        cut = img.shape[1] if bug == "split_as_picture_first" else n
        txt, img = y[:, :cut], y[:, cut:]
        if bug == "split_as_picture_first":
            txt, img = img, txt
        return self.linear(f"{name}.to_out", img), self.linear(f"{name}.to_add_out", txt)

    def mlp(self, name: str, x: Array) -> Array:
        x = self.linear(f"{name}.net.0.proj", x)
        inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)
        y = x * (1 + np.tanh(inner)) / 2
        if self.bug == "gelu_by_sigmoid" and "img" in name:
            y = x / (1 + np.exp(-np.float32(1.702) * x))
        y = self.tap(f"{name}.net.0", self.q(y))
        return self.linear(f"{name}.net.2", y)

    def block(
        self, name: str, img: Array, txt: Array, mask: Array, vec: Array, pe: Array
    ) -> tuple[Array, Array]:
        bug = self.bug
        img_1, img_2 = self.modulate(name, "img", vec)
        txt_1, txt_2 = self.modulate(name, "txt", vec)
        y = self.modulated(
            f"{name}.img_norm1_modulated", self.layer_norm(f"{name}.img_norm1", img), img_1
        )
        z = self.modulated(
            f"{name}.txt_norm1_modulated", self.layer_norm(f"{name}.txt_norm1", txt), txt_1
        )
        img_y, txt_y = self.attention(f"{name}.attn", y, z, mask, pe)
        if bug == "text_residual_of_normed" and name.endswith(".1"):
            txt = z
        before = txt
        img = self.q(img + self.q(img_1[2] * img_y))
        if not (bug == "text_gate_left_out" and name.endswith(".0")):
            txt_y = self.q(txt_1[2] * txt_y)
        txt = self.q(txt + txt_y)
        y = self.layer_norm(f"{name}.img_norm2", img)
        y = self.mlp(f"{name}.img_mlp", self.modulated(f"{name}.img_norm2_modulated", y, img_2))
        img = self.tap(f"{name}.img", self.q(img + self.q(img_2[2] * y)))
        beside = bug == "text_mlp_beside_attention"
        z = self.layer_norm(f"{name}.txt_norm2", before if beside else txt)
        part = img_2 if bug == "text_mlp_modulated_as_picture" and name.endswith(".0") else txt_2
        z = self.mlp(f"{name}.txt_mlp", self.modulated(f"{name}.txt_norm2_modulated", z, part))
        return img, self.tap(f"{name}.txt", self.q(txt + self.q(txt_2[2] * z)))

    def __call__(self, x: Array, sigma: Array, text: Array, mask: Array) -> Array:
        """The velocity of latents (batch, channels, 1, rows, columns)."""
        bug, rows, columns = self.bug, x.shape[-2] // 2, x.shape[-1] // 2
        img = self.tap("process_img", patches(x, bug))
        img = self.linear("img_in", img)
        txt = self.linear("txt_in", self.rms_norm("txt_norm", text))
        vec = self.time_embedding(sigma)
        ids = text_ids(txt.shape[1], rows, columns, bug)
        ids = np.concatenate([ids, image_ids(rows, columns, bug)])
        tap("ids", ids, kind="input")
        pe = embed_nd(ids, bug)
        tap("pe_embedder", pe)
        for i in range(LAYERS):
            img, txt = self.block(f"transformer_blocks.{i}", img, txt, mask, vec, pe)
        vec = vec if bug == "last_modulation_without_silu" else self.silu(vec)
        scale, shift = np.split(self.linear("norm_out.linear", vec)[:, None], 2, -1)
        img = self.layer_norm("norm_out.norm", img)
        img = self.tap("norm_out", self.q(self.q(img * self.q(1 + scale)) + shift))
        img = self.linear("proj_out", img)
        return self.tap("velocity_5d", picture(img, rows, columns, bug))


def schedule(bug: str | None) -> tuple[Array, float]:
    """Sigmas with the last 0, and mu of the picture's size."""
    tokens = ROWS * COLUMNS * (4 if bug == "mu_of_latent_pixels" else 1)
    slope = (MAX_SHIFT - BASE_SHIFT) / (MOST_TOKENS - BASE_TOKENS)
    mu = BASE_SHIFT + slope * (tokens - BASE_TOKENS)
    last = 1e-3 if bug == "schedule_to_sigma_min" else 1 / STEPS
    t = np.linspace(1.0, last, STEPS).astype(np.float32)
    shift = np.exp(mu)
    return np.append(shift / (shift + 1 / t - 1), 0).astype(np.float32), mu


def guided(net: QwenImage, positive: Array, negative: Array, bug: str | None) -> Array:
    """Guidance of which each token is as long as the positive prediction."""
    scale = np.float32(CFG)
    q, axes, size = net.q, (-1,), positive.shape
    if bug == "guidance_from_positive":
        x = q(positive + q(scale * q(positive - negative)))
    else:
        x = q(negative + q(scale * q(positive - negative)))
    net.tap("cfg_function", x)
    if bug == "guidance_not_rescaled":
        return x
    if bug == "rescaled_to_negative":
        positive = negative
    if bug == "rescaled_by_latent_pixel":  # ComfyUI's node CFGNorm has no patches
        axes = (1,)
    else:
        x, positive = patches(x), patches(positive)
    lengths = [q(np.sqrt((y * y).sum(axes, keepdims=True))) for y in (positive, x)]
    x = q(x * q(lengths[0] / lengths[1]))
    if axes == (1,):
        return x
    return picture(x, size[-2] // 2, size[-1] // 2)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = QwenImage(converted(checkpoint(folder, "transformer"), bug), bug, dtype)
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {name: x.astype(dtype) for name, x in kept.items()}
    blocks = ("conditioning.*", "noise", "sigmas", "mu", "x", "img_in", "txt_in", "velocity_5d")
    blocks += ("transformer_blocks.?.img", "transformer_blocks.?.txt", "cfg_*", "latent*")
    q = net.q
    with port_trace(out, dump, dtype, blocks, kept):
        texts = {}
        for sign in ("negative", "positive"):
            hidden = q(value(f"text_encoder/{sign}_hidden_states"))
            features, mask = text_features(
                hidden, value(f"text_encoder/{sign}_attention_mask"), bug
            )
            net.tap(f"conditioning.{sign}.cross_attn", features)
            tap(f"conditioning.{sign}.attention_mask", mask, kind="input")
            texts[sign] = features, mask
        sigmas, mu = schedule(bug)
        tap("mu", np.float32(mu), kind="scalar")
        tap("sigmas", sigmas, kind="schedule")
        start = value("pipeline/noise").swapaxes(1, 2)
        tap("noise", start, kind="input")
        x = q(start)
        for step in range(STEPS):
            set_step(step)
            sigma, following = sigmas[step], sigmas[step + 1]
            net.tap("x", x)
            at = following if bug == "time_of_next_step" else sigma
            time = np.repeat(q(q(at * np.float32(1000)) / np.float32(1000)), len(x))
            signs = ("negative", "positive")
            predicted = [net(x, time, *texts[sign]) for sign in signs]
            v = net.tap("cfg_result", guided(net, predicted[1], predicted[0], bug))
            used = following if bug == "denoised_of_next_sigma" and step == 0 else sigma
            denoised = x - used * v
            net.tap("denoised", denoised)
            slope = (x - denoised) / sigma
            x = q(x + slope * (following - sigma))
            if bug == "latents_kept_in_float16":
                x = x.astype(np.float16).astype(np.float32)
            net.tap("latent_next", x)
        mean, deviation = (q(np.array(y)).reshape(1, -1, 1, 1, 1) for y in (MEANS, DEVIATIONS))
        if bug == "mean_added_before_scaling":
            x = q(q(x + mean) * deviation)
        elif bug == "divided_by_deviation":
            x = q(q(x / deviation) + mean)
        else:
            x = q(q(x / q(1 / deviation)) + mean)
        net.tap("latent_process_out", x)


# "ids" are positions, which the reference only has as rotations
NO_COUNTERPART: tuple[str, ...] = ("ids", "denoised")

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter|state.?dict"
SWAPPED = r"swap|exchang|\border\b|permut|revers|mixed up|interchang|switch"
POSITION = r"position|\bids?\b|\bgrid\b|coordinate"
FREQUENCY = r"frequenc|\bomega\b|theta|inv_freq|exponent"
PATCHES = r"pack|patch|rearrang|permut|2 ?x ?2|layout|pixel.?(un)?shuffle|channels? (first|last)"
RESCALE = r"re-?scal|re-?norm|cfg.?norm|normali[sz]"
LENGTH = r"(norm\b|length|magnitude).*(guid|cond|pred|positive|combin|restor|kept|match)"
SCHEDULE = r"schedule|sigmas?\b|timesteps?\b"
BUGS = (
    Bug(
        "fused_as_q_v_k",
        "The picture's fused weights are q, v, k.",
        (LOADED, SWAPPED, r"\bkv\b|\bk and v\b|keys? and values?|values? and keys?|q, ?v, ?k"),
        "weights",
    ),
    Bug(
        "text_norms_of_picture",
        "Texts' queries and keys are normed with the picture's weights.",
        (LOADED, r"norm_added|same (norm|weight|gain)|dupl|image'?s (norm|gain)|other stream"),
        "weights",
    ),
    Bug(
        "text_mlp_of_block_before",
        "The second block's text MLP has the weights of the first.",
        (LOADED, r"dupl|(another|other|previous|wrong) (block|layer)|blocks\.0\b|off.by.one"),
        "weights",
    ),
    Bug(
        "add_out_not_transposed",
        "One square output weight was not transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "text_norm_left_at_one",
        "The weight of the texts' norm was not found and is one.",
        (LOADED, r"\bones\b|(at|to|is|of) one\b|missing|not (load|appl|found)|initial|default"),
        "weights",
    ),
    Bug(
        "mod_bias_dropped",
        "The bias of one block's modulation is zero.",
        (LOADED, r"\bbias|zero"),
        "weights",
    ),
    Bug(
        "final_halves_as_in_flux",
        "The last modulation was loaded as shift and scale, which are scale and shift.",
        (LOADED, SWAPPED, r"shift (and|,) ?scale|scale (and|,) ?shift|halves|\broll|chunk"),
        "weights",
    ),
    Bug(
        "img_in_from_float8",
        "The first weight was stored in float8.",
        (LOADED, r"f8|float8|fp8|e4m3|8.?bit|precision|round|quanti"),
        "weights",
    ),
    Bug(
        "template_token_kept",
        "One token of the template is kept before the prompt.",
        (r"template|prefix|system|drop|token|off.by.one|offset|shift|start.?id",),
        "inputs",
    ),
    Bug(
        "template_cut_before_padding",
        "The template's length is cut off before the padding on the left is.",
        (r"template|prefix|system|padd|drop|token|left|offset|shift|start.?id|\bmask",),
        "inputs",
    ),
    Bug(
        "packed_channels_last",
        "Patches have their channels last, not first.",
        (PATCHES, SWAPPED, r"channel|transpos|\bax[ei]s\b"),
    ),
    Bug(
        "pixels_of_patch_transposed",
        "Patches are unpacked with rows and columns exchanged within them.",
        (PATCHES, SWAPPED, r"transpos|\bax[ei]s\b|\brows?\b|column"),
    ),
    Bug(
        "middle_rounded_down",
        "The middle of an odd number of rows is rounded down.",
        (
            POSITION,
            r"round|floor|ceil|\bodd\b|middle|cent(er|re)|half|off.by.one|offset|// ?2|shifted",
        ),
    ),
    Bug(
        "text_after_whole_side",
        "Texts begin after the whole side, not after half of it.",
        (POSITION, r"half|// ?2|start|offset|max_vid_index|\bside\b|shifted|scale_rope|begin"),
    ),
    Bug(
        "row_and_column_exchanged",
        "The rotation has rows' positions for columns' and the other way round.",
        (SWAPPED, POSITION, r"transpos|\bax[ei]s\b|\brows?\b|column|height|width|\b[hw]\b"),
    ),
    Bug(
        "frequencies_of_whole_head",
        "Frequencies' exponents are divided by the head's channels, not by the axis's.",
        (FREQUENCY, r"\bdim\b|\bbase\b|axes_dim|(head|axis).*(width|channels|dim)|divi"),
    ),
    Bug(
        "rotated_backwards",
        "The rotation turns the other way.",
        (
            r"\bsign|negat|conjugat|invers|backward|opposite|other way|clockwise|direction|minus",
            r"revers|transpos|mirror|\bflip",
        ),
    ),
    Bug(
        "rotated_by_halves",
        "The rotation takes halves of a head, not neighbours.",
        (r"half|halves|interleav|neighbou?r|adjacent|pair|rotate_half|neox",),
    ),
    Bug(
        "norm_of_all_heads",
        "The picture's keys are normed over all heads.",
        (
            r"(across|all|over|whole|per|each|every).*heads?\b|head.?(dim|wise|size)|\bax[ei]s\b",
            r"heads? (together|at once|jointly)|(whole|full|inner).?(width|dim)|per.?token norm",
        ),
    ),
    Bug(
        "normed_after_rotation",
        "Texts' queries and keys are normed after the rotation.",
        (
            r"norm.*(after|before|follow).*(rot|rope)|(rot|rope).*(after|before|follow).*norm",
            r"\border\b|swap|exchang|revers|commut",
        ),
    ),
    Bug(
        "text_keys_not_normed",
        "Texts' keys are not normed.",
        (
            r"norm\w*\b.*(missing|skip|not (appl|run|used|called)|left out|lack|unused|never|omit)",
            r"(missing|skip|\bno\b|without|lacks?|omit|forg).*norm|un-?norm|not norm|norm_added_k",
        ),
    ),
    Bug(
        "scaled_by_whole_width",
        "Scores are divided by the root of the whole width.",
        (r"\bscal(e|ed|ing)\b|factor|sqrt|root|head.?dim|temperature|\*\* ?-0\.5|0\.577|1\.73",),
    ),
    Bug(
        "padding_attended",
        "Padding of texts is not masked.",
        (r"\bmask|padd|-inf|infinit",),
    ),
    Bug(
        "heads_joined_in_place",
        "The second block joins heads without moving their axis.",
        (r"heads?\b|transpos|reshap|layout|\bax[ei]s\b|permut|merge",),
    ),
    Bug(
        "split_as_picture_first",
        "The joint result is cut as if the picture came first.",
        (
            r"split|\bcut\b|slic|concat|boundary|(text|image|picture).*first|\border\b|swap",
            r"seq_?(txt|img)|wrong (length|place|offset|position)|off.by|offset|joint",
        ),
    ),
    Bug("block_norms_eps", "The blocks' norms have eps 1e-3.", (r"\beps",)),
    Bug(
        "variance_of_n_minus_one",
        "One norm's variance is divided by n - 1.",
        (r"variance|unbiased|n ?- ?1|bessel|\bddof\b|correction|\bstd\b|deviation",),
    ),
    Bug(
        "waves_reach_the_end",
        "The time's frequencies are divided by half - 1.",
        (
            FREQUENCY,
            r"downscale_freq_shift|half ?- ?1|off.by.one|wave|sinusoid|\b127\b|\b1[.]0*79|divi",
        ),
    ),
    Bug(
        "time_as_whole_number",
        "The time is a whole number of 1000.",
        (r"round|integer|\bint\b|whole|truncat|floor|\blong\b|cast|discrete|fraction",),
    ),
    Bug(
        "text_modulation_without_silu",
        "Texts' modulation lacks the SiLU before it.",
        (r"\bsilu|swish|activation|nonlinear|non-linear",),
    ),
    Bug(
        "gates_exchanged",
        "The first block's two gates of the picture are exchanged.",
        (r"gates?\b", r"chunk|msa.*mlp|mlp.*msa|modulation.*(order|part)|" + SWAPPED),
    ),
    Bug(
        "text_scale_without_one",
        "Texts' scale before attention is not added to one.",
        (r"1 ?\+|\+ ?1\b|\bones?\b|plus|without adding|identity|scale.*\badd",),
    ),
    Bug(
        "text_gate_left_out",
        "The first block adds the texts' attention without its gate.",
        (r"gat(e|ed|es|ing)\b",),
    ),
    Bug(
        "gelu_by_sigmoid",
        "The picture's GELU is the one by the sigmoid.",
        (r"gelu|tanh|sigmoid|1\.702|activation|\berf\b",),
    ),
    Bug(
        "text_residual_of_normed",
        "The second block adds texts' attention to the modulated stream.",
        (
            r"residual|skip connection|(normed|modulated) (input|stream|value|text)",
            r"(adds?|added|sum).*(norm|modulat)|(block|layer)'?s? (own )?input",
        ),
    ),
    Bug(
        "text_mlp_beside_attention",
        "Texts' MLPs read the stream before attention was added.",
        (
            r"parallel|beside|residual|(before|without) (the )?(att|add)|stale|\bold\b",
            r"input of (the )?(block|layer)|(block|layer)'?s? (own )?input|un-?updated",
            r"not (yet )?(added|updated)|att\w* .*(missing|skip|not added|left out)",
        ),
    ),
    Bug(
        "schedule_to_sigma_min",
        "Sigmas before the shift end at 0.001, not at 1 / steps.",
        (SCHEDULE, r"linspace|sigma.?min|\bend(s|ing)?\b|spacing|last|1 ?/ ?(steps|n)"),
        "schedule",
    ),
    Bug(
        "mu_of_latent_pixels",
        "mu is of the number of latent pixels, not of tokens.",
        (SCHEDULE, r"\bmu\b|\bshift|seq_?len|tokens|resolution|number of (patch|pixel)"),
        "schedule",
    ),
    Bug(
        "guidance_from_positive",
        "Guidance adds the whole scale to the positive prediction.",
        (
            r"guidance|\bcfg\b|scale ?[-+] ?1|off.by.one|uncond|negative|extrapolat",
            r"start(s|ed)? from|(positive|cond)\w* (prediction|as base)",
        ),
    ),
    Bug(
        "guidance_not_rescaled",
        "Guided predictions are not brought to the length of the positive ones.",
        (
            RESCALE,
            LENGTH,
            r"(guid|cond|pred|positive|combin|restor|match)\w*\b.*(norm\b|length|magn)",
        ),
    ),
    Bug(
        "rescaled_by_latent_pixel",
        "Lengths are of the channels of latents, not of packed tokens.",
        (
            r"\bax[ei]s\b|\bdim(ension)?s?\b|per (pixel|patch|token|channel)|packed|unpacked",
            r"(over|across|of) (the )?(\d+ )?channels|(latent|each) pixel|per.?(pixel|token|patch)",
            RESCALE,
        ),
    ),
    Bug(
        "time_of_next_step",
        "The model is told the time of the next step.",
        (r"next|timestep|\btime\b|off.by.one|\bsigma|one step|index|stale|ahead|later",),
    ),
    Bug(
        "denoised_of_next_sigma",
        "The first step's denoised picture is made with the next sigma.",
        (
            r"sigma|denois|x_?0\b|next|step size|\bdt\b|euler|factor|\bscal(e|ed|ing)\b|slope",
            r"multipl|delta",
        ),
    ),
    Bug(
        "latents_kept_in_float16",
        "Latents are float16 between steps.",
        (r"f16|float16|fp16|\bhalf\b|precision|round|cast|dtype",),
    ),
    Bug(
        "mean_added_before_scaling",
        "Latents get the mean before they are scaled.",
        (
            r"\bmean|\bstd\b|deviation|\border\b|latents_(mean|std)|denormal|affine",
            r"(add|shift|offset|scal|multipl)\w*.*(before|after|first)",
        ),
    ),
)

MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "text_value_bias_left_out",
        "The bias of texts' values in the second block is zero.",
        (LOADED, r"\bbias|zero"),
        "weights",
    ),
    Bug(
        "features_padded_on_the_left",
        "Texts' features are padded on the left, their mask on the right.",
        (r"padd|\bleft\b|\bright\b|align|shift|offset|\bside\b|\bmask|token.*(order|place)",),
        "inputs",
    ),
    Bug(
        "texts_at_one_position",
        "All tokens of a text have the position of its first.",
        (POSITION, r"arange|count|constant|same (place|angle|rotation)|\brope\b|rotary"),
    ),
    Bug(
        "time_not_multiplied",
        "The time is not multiplied by 1000 before its waves.",
        (r"1,?000|1e3|factor|multipl|\bscal(e|ed|ing)\b",),
    ),
    Bug(
        "texts_not_rotated",
        "Texts' queries and keys are not rotated.",
        (r"\brope\b|rotat|rotary|un-?rotated|position",),
    ),
    Bug(
        "probabilities_in_bfloat16",
        "Attention's probabilities are rounded to bfloat16.",
        (r"bf16|bfloat|precision|round|\bcast|dtype",),
    ),
    Bug(
        "text_mlp_modulated_as_picture",
        "The first block's text MLP has the picture's shift and scale.",
        (
            r"(image|img|picture|stream).*(modulat|shift|scale)",
            r"(modulat|shift|scale).*(image|img|picture|stream)|modulat",
        ),
    ),
    Bug(
        "last_modulation_without_silu",
        "The last modulation lacks the SiLU before it.",
        (r"\bsilu|swish|activation|non-?linear",),
    ),
    Bug(
        "rescaled_to_negative",
        "Guided predictions are brought to the length of the negative ones.",
        (RESCALE, LENGTH, r"negative|uncond"),
    ),
    Bug(
        "divided_by_deviation",
        "The final latents are divided by the deviation, not multiplied.",
        (r"\bstd\b|deviation|divi|multipl|invers|reciproc|latents_std|1 ?/|denormal",),
    ),
)
