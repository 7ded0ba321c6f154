"""Stable Diffusion's VAE in MLX: channels last, named and counted as in the CompVis checkpoint.

The port is given a picture as bytes. It resizes and crops it, encodes it, draws latents from the
posterior with given noise, scales them for a diffusion model and back, and decodes them. The levels
of the decoder are counted as the encoder's: the one that runs first is `decoder.up.1`.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

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
from lydite.trace.torch_capture import record_modules

NAME = "sdvae"
CHANNELS, LATENT, GROUPS, DEPTH = (16, 24), 4, 8, 2
SCALING, SDXL_SCALING, FLUX_SHIFT = 0.18215, 0.13025, 0.1159
GIVEN, SIZE = (41, 47), (20, 28)  # rows and columns
LEVELS = len(CHANNELS)
HIGH, WIDE = SIZE[0] // 2, SIZE[1] // 2  # of latents
ATTENTION = ("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")
GAINS = {".to_q.weight": 2.0, ".to_k.weight": 2.0, "encoder.conv_out": 1.5, "encoder.conv_in": 0.7}
GAINS |= {"attentions.0.to_out.0.weight": 1.5, "decoder.conv_out.weight": 1.6}


def made() -> AutoencoderKL:
    """Two levels, so one change of resolution; attention in the middle has one head."""
    config: dict[str, Any] = dict(block_out_channels=CHANNELS, latent_channels=LATENT)
    config |= dict(down_block_types=("DownEncoderBlock2D",) * LEVELS, layers_per_block=DEPTH)
    config |= dict(up_block_types=("UpDecoderBlock2D",) * LEVELS, norm_num_groups=GROUPS)
    return AutoencoderKL(**config, scaling_factor=SCALING, sample_size=SIZE[0])


def tuned(vae: AutoencoderKL) -> AutoencoderKL:
    """Weights of such sizes that attention is not even and pixels fill their range."""
    for name, parameter in vae.named_parameters():
        for part, factor in GAINS.items():
            if part in name:
                parameter.data.mul_(factor)
    return vae


def picture() -> Array:
    """Bytes (rows, columns, RGB): soft colours with some grain."""
    generator = torch.Generator().manual_seed(3)
    soft = F.interpolate(torch.rand(1, 3, 5, 7, generator=generator), GIVEN, mode="bicubic")
    grain = torch.rand(1, 3, *GIVEN, generator=generator)
    return (0.7 * soft + 0.3 * grain).clamp(0, 1).mul(255).byte()[0].permute(1, 2, 0).numpy()


def reference(folder: Path, dtype: str) -> None:
    """A picture to latents and back, as the pipelines for image to image do."""
    vae = saved(tuned(randomised(made, 91)), folder, "vae", dtype)
    processor = VaeImageProcessor(vae_scale_factor=2)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, vae, scope="vae", methods=("encode", "decode"), weights=True),
    ):
        image = recorder.record("pipeline/image", picture(), kind="input")
        pixels: Any = processor.preprocess(Image.fromarray(image), *SIZE, resize_mode="crop")
        pixels = recorder.record("pipeline/pixels", pixels, kind="input")
        epsilon = noise(9, 1, LATENT, HIGH, WIDE).to(vae.dtype)
        epsilon = recorder.record("pipeline/posterior_noise", epsilon, kind="input")
        posterior = vae.encode(pixels.to(vae.dtype)).latent_dist
        recorder.record("pipeline/posterior_mean", posterior.mean)
        recorder.record("pipeline/posterior_std", posterior.std)
        latents = (posterior.mean + posterior.std * epsilon) * vae.config.scaling_factor
        latents = recorder.record("pipeline/latents", latents)
        decoded = vae.decode(latents / vae.config.scaling_factor).sample
        recorder.record("pipeline/decoded_image", (decoded / 2 + 0.5).clamp(0, 1))


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: kernels (out, rows, columns, in), attention as 1x1 kernels."""
    new: dict[str, Array] = {}

    def norm(name: str, old: str) -> None:
        new[f"{name}.weight"], new[f"{name}.bias"] = w[f"{old}.weight"], w[f"{old}.bias"]

    def conv(name: str, old: str) -> None:
        weight = w[f"{old}.weight"]
        if weight.ndim == 2:
            weight = weight[:, :, None, None]
        axes = (0, 2, 3, 1)
        if bug == "kernel_rows_for_columns" and name == "encoder.down.1.block.0.conv1":
            axes = (0, 3, 2, 1)
        new[f"{name}.weight"] = weight.transpose(axes).copy()
        new[f"{name}.bias"] = w[f"{old}.bias"]

    def block(name: str, old: str) -> None:
        for i in (1, 2):
            norm(f"{name}.norm{i}", f"{old}.norm{i}")
            conv(f"{name}.conv{i}", f"{old}.conv{i}")
        if f"{old}.conv_shortcut.weight" in w:
            conv(f"{name}.nin_shortcut", f"{old}.conv_shortcut")

    def coder(name: str) -> None:
        conv(f"{name}.conv_in", f"{name}.conv_in")
        block(f"{name}.mid.block_1", f"{name}.mid_block.resnets.0")
        twice = bug == "second_middle_block_loaded_from_first" and name == "decoder"
        block(f"{name}.mid.block_2", f"{name}.mid_block.resnets.{int(not twice)}")
        # Without their prefix the two coders' attention parts have the same names.
        from_coder = "encoder" if bug == "decoder_attention_from_encoder" else name
        old = f"{from_coder}.mid_block.attentions.0"
        norm(f"{name}.mid.attn_1.norm", f"{old}.group_norm")
        for own, theirs in ATTENTION:
            conv(f"{name}.mid.attn_1.{own}", f"{old}.{theirs}")
        norm(f"{name}.norm_out", f"{name}.conv_norm_out")
        conv(f"{name}.conv_out", f"{name}.conv_out")

    coder("encoder")
    coder("decoder")
    conv("quant_conv", "quant_conv")
    conv("post_quant_conv", "post_quant_conv")
    for i in range(LEVELS):
        for j in range(DEPTH):
            block(f"encoder.down.{i}.block.{j}", f"encoder.down_blocks.{i}.resnets.{j}")
        if i < LEVELS - 1:
            conv(
                f"encoder.down.{i}.downsample.conv", f"encoder.down_blocks.{i}.downsamplers.0.conv"
            )
        theirs = LEVELS - 1 - i
        for j in range(DEPTH + 1):
            at = 3 - j if bug == "upper_blocks_in_other_order" and i == 1 and j > 0 else j
            block(f"decoder.up.{i}.block.{j}", f"decoder.up_blocks.{theirs}.resnets.{at}")
        if i > 0:
            conv(f"decoder.up.{i}.upsample.conv", f"decoder.up_blocks.{theirs}.upsamplers.0.conv")

    def exchange(a: str, b: str) -> None:
        for end in ("weight", "bias"):
            new[f"{a}.{end}"], new[f"{b}.{end}"] = new[f"{b}.{end}"], new[f"{a}.{end}"]

    if bug == "values_for_output_product":
        exchange("decoder.mid.attn_1.v", "decoder.mid.attn_1.proj_out")
    if bug == "key_weight_transposed":
        name = "encoder.mid.attn_1.k.weight"
        new[name] = new[name].swapaxes(0, 3).copy()
    if bug == "shortcut_bias_forgotten":
        name = "decoder.up.0.block.0.nin_shortcut.bias"
        new[name] = np.zeros_like(new[name])
    if bug == "norms_of_a_block_exchanged":
        exchange("encoder.down.0.block.1.norm1", "encoder.down.0.block.1.norm2")
    if bug == "enlarging_kernel_in_bfloat16":
        name = "decoder.up.1.upsample.conv.weight"
        new[name] = new[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    if bug == "encoder_norm_scale_left_at_one":
        new["encoder.norm_out.weight"] = np.ones_like(new["encoder.norm_out.weight"])
    return new


def prepared(image: Array, bug: str | None) -> Array:
    """The picture, to the size of the model and cropped to its proportions, in [-1, 1]."""
    rows, columns = SIZE
    part = max(rows / image.shape[0], columns / image.shape[1])
    large = (int(image.shape[0] * part), int(image.shape[1] * part))
    size = (large[1], large[0])  # PIL has the width first
    filters = Image.Resampling
    kind = filters.BILINEAR if bug == "resized_bilinearly" else filters.LANCZOS
    if bug == "resized_without_bytes":
        planes = [
            Image.fromarray(image[..., c].astype(np.float32)).resize(size, kind) for c in range(3)
        ]
        x = np.stack([np.asarray(plane) for plane in planes], -1)
    else:
        x = np.asarray(Image.fromarray(image).resize(size, kind)).astype(np.float32)
    top, left = (large[0] - rows) // 2, (large[1] - columns) // 2
    if bug == "cropped_from_corner":
        top = left = 0
    x = x[top : top + rows, left : left + columns]
    if bug == "blue_first":
        x = x[..., ::-1]
    most = 127 if bug == "pixels_over_127" else 127.5
    return (x / np.float32(most) - 1)[None]


class VAE:
    """Both coders; all values are (1, rows, columns, channels)."""

    def __init__(self, w: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.bug, self.dtype = bug, getattr(mx, dtype)
        self.w = {name: mx.array(x).astype(self.dtype) for name, x in w.items()}

    def conv(self, name: str, x: mx.array, stride: int = 1) -> mx.array:
        """Zeros around; before a stride only after the end, as the checkpoint was trained."""
        bug, weight = self.bug, self.w[f"{name}.weight"]
        if weight.shape[1] == 3:
            around = (0, 1) if stride == 2 else (1, 1)
            if stride == 2 and bug == "stride_padded_on_all_sides":
                around = (1, 1)
            edge = bug == "latents_padded_with_edge" and name == "decoder.conv_in"
            x = mx.pad(x, [(0, 0), around, around, (0, 0)], mode="edge" if edge else "constant")
        y = mx.conv2d(x, weight, stride=stride) + self.w[f"{name}.bias"]
        return taps.tap(name, y)

    def norm(self, name: str, x: mx.array) -> mx.array:
        """Group norm; statistics are float32."""
        bug, (b, h, w, c) = self.bug, x.shape
        groups = 1 if bug == "attention_norm_in_one_group" and "attn" in name else GROUPS
        y = x.astype(mx.float32)
        eps = 1e-5 if bug == "eps_of_torch_default" else 1e-6
        if bug == "channels_dealt_to_groups":
            y = y.reshape(b, h * w, c // groups, groups)
            axes: tuple[int, ...] = (1, 2)
        else:
            y = y.reshape(b, h * w, groups, c // groups)
            axes = (1, 3)
        freedom = 1 if bug == "variance_of_a_sample" else 0
        mean, variance = mx.mean(y, axes, keepdims=True), mx.var(y, axes, True, freedom)
        y = ((y - mean) * mx.rsqrt(variance + eps)).reshape(b, h, w, c).astype(self.dtype)
        return taps.tap(name, y * self.w[f"{name}.weight"] + self.w[f"{name}.bias"])

    def swish(self, name: str, x: mx.array) -> mx.array:
        if self.bug == "swish_with_gelu_factor" and name.startswith("decoder.up"):
            return x * mx.sigmoid(1.702 * x)
        return x * mx.sigmoid(x)

    def block(self, name: str, x: mx.array) -> mx.array:
        bug = self.bug
        if bug == "swish_before_norm" and name == "decoder.up.0.block.1":
            y = self.norm(f"{name}.norm1", self.swish(name, x))
        else:
            y = self.swish(name, self.norm(f"{name}.norm1", x))
        first = y
        y = self.norm(f"{name}.norm2", self.conv(f"{name}.conv1", y))
        y = self.conv(f"{name}.conv2", self.swish(name, y))
        if f"{name}.nin_shortcut.weight" in self.w:
            wrong = bug == "shortcut_of_normed_values" and name.startswith("encoder")
            x = self.conv(f"{name}.nin_shortcut", first if wrong else x)
        if bug == "skip_only_with_shortcut" and name == "decoder.up.1.block.0":
            return taps.tap(name, y)
        return taps.tap(name, x + y)

    def attention(self, name: str, x: mx.array) -> mx.array:
        """One head over all places."""
        bug, (b, h, w, c) = self.bug, x.shape
        decoding = name.startswith("decoder")
        y = self.norm(f"{name}.norm", x)
        if bug == "attention_of_unnormed" and decoding:
            y = x
        q, k, v = (self.conv(f"{name}.{s}", y).reshape(b, h * w, c) for s in "qkv")
        scores = q.astype(mx.float32) @ k.astype(mx.float32).swapaxes(1, 2)
        if bug != "scores_without_scale" or decoding:
            scores = scores * c**-0.5
        if bug == "scores_in_float16" and decoding:
            scores = scores.astype(mx.float16)
        over = -2 if bug == "softmax_over_queries" and decoding else -1
        share = mx.softmax(scores, axis=over).astype(self.dtype)
        y = taps.tap(f"{name}.share", share) @ v
        if bug == "places_folded_by_column" and decoding:
            y = y.reshape(b, w, h, c).swapaxes(1, 2)
        y = self.conv(f"{name}.proj_out", y.reshape(b, h, w, c))
        return taps.tap(name, x + y)

    def middle(self, name: str, x: mx.array) -> mx.array:
        bug = self.bug
        x = self.block(f"{name}.block_1", x)
        if bug == "attention_after_both_blocks" and name.startswith("decoder"):
            return self.attention(f"{name}.attn_1", self.block(f"{name}.block_2", x))
        if bug != "encoder_attention_left_out" or name.startswith("decoder"):
            x = self.attention(f"{name}.attn_1", x)
        return self.block(f"{name}.block_2", x)

    def end(self, name: str, x: mx.array) -> mx.array:
        x = self.norm(f"{name}.norm_out", x)
        if self.bug != "encoder_ends_without_swish" or name == "decoder":
            x = self.swish(name, x)
        return self.conv(f"{name}.conv_out", x)

    def encode(self, x: mx.array) -> mx.array:
        x = self.conv("encoder.conv_in", x)
        for i in range(LEVELS):
            for j in range(DEPTH):
                x = self.block(f"encoder.down.{i}.block.{j}", x)
            if i < LEVELS - 1:
                x = self.conv(f"encoder.down.{i}.downsample.conv", x, 2)
        x = self.end("encoder", self.middle("encoder.mid", x))
        return x if self.bug == "quant_conv_left_out" else self.conv("quant_conv", x)

    def enlarged(self, x: mx.array) -> mx.array:
        """Each pixel four times."""
        b, h, w, c = x.shape
        y = mx.broadcast_to(x[:, :, None, :, None], (b, h, 2, w, 2, c))
        if self.bug == "enlarged_axes_not_interleaved":  # (h, 2) rows but (2, w) columns
            y = mx.broadcast_to(x[:, :, None, None], (b, h, 2, 2, w, c))
        return y.reshape(b, 2 * h, 2 * w, c)

    def decode(self, z: mx.array) -> mx.array:
        bug = self.bug
        z = self.conv("post_quant_conv", z)
        x = self.middle("decoder.mid", self.conv("decoder.conv_in", z))
        for i in reversed(range(LEVELS)):
            for j in range(DEPTH + (bug != "decoder_levels_as_short_as_encoder")):
                x = self.block(f"decoder.up.{i}.block.{j}", x)
            if i > 0:
                x = self.conv(f"decoder.up.{i}.upsample.conv", self.enlarged(x))
        return self.end("decoder", x)

    def drawn(self, moments: mx.array, epsilon: mx.array) -> mx.array:
        """Latents of the posterior."""
        bug = self.bug
        mean, logvar = mx.split(moments, 2, axis=-1)
        mean = taps.tap("posterior.mean", mean)
        half = 1.0 if bug == "deviation_from_whole_logvar" else 0.5
        deviation = taps.tap("posterior.std", mx.exp(half * mx.clip(logvar, -30, 20)))
        return mean if bug == "mean_instead_of_draw" else mean + deviation * epsilon

    def __call__(self, pixels: mx.array, epsilon: mx.array) -> None:
        bug = self.bug
        x = self.drawn(self.encode(pixels.astype(self.dtype)), epsilon.astype(self.dtype))
        x = x * (SDXL_SCALING if bug == "factor_of_sdxl" else SCALING)
        if bug == "latents_kept_in_float16":
            x = x.astype(mx.float16).astype(self.dtype)
        x = taps.tap("latents", x) / SCALING
        if bug == "shift_of_flux_added":
            x = x + FLUX_SHIFT
        if bug == "decoded_in_two_halves":
            parts = [self.decode(part) for part in mx.split(x, 2, axis=2)]
            x = mx.concatenate(parts, axis=2)
        else:
            x = self.decode(x)
        if bug != "pixels_left_around_zero":
            x = x / 2 + 0.5
        x = mx.clip(x, 0, 1)
        if bug == "picture_rounded_to_bytes":
            x = mx.round(x * 255) / 255
        taps.tap("picture", x)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    vae = VAE(converted(checkpoint(folder, "vae"), bug), bug, dtype)
    image = value("pipeline/image")
    pixels = prepared(image, bug)
    epsilon = value("pipeline/posterior_noise")
    if bug == "noise_read_as_channels_last":
        epsilon = epsilon.reshape(1, HIGH, WIDE, LATENT)
    else:
        epsilon = epsilon.transpose(0, 2, 3, 1)
    kept = {k: np.array(v.astype(mx.float32)) for k, v in vae.w.items()} if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(ml_dtypes.bfloat16) for k, v in kept.items()}
    blocks = ("given.*", "*coder.conv_in", "*.block.?", "*.block_?", "*.attn_1", "*sample.conv")
    blocks += ("quant_conv", "latents", "decoder.conv_out", "picture")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("given.image", image, kind="input")
        taps.tap("given.pixels", pixels, kind="input")
        taps.tap("given.noise", epsilon, kind="input")
        vae(mx.array(pixels), mx.array(epsilon))


NO_COUNTERPART: tuple[str, ...] = (r"\.attn_1\.share$",)

LOADED = r"load|checkpoint|conver(t|s)|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|mix|revers|interchang"
HALF = r"f16|float16|\bhalf\b|fp16|precision|round|\bcast|quanti"
RESIZED = r"resiz|resampl|interpolat|lanczos|bilinear|antialias|filter"
GROUPED = r"\bgroups?\b|group ?norm"
FOLD = r"reshap|transpos|layout|\bax[ei]s\b|permut"
SKIPPED = r"skip|missing|not (run|called|applied|recorded|used)|left out|never|omit"
RESIDUAL = r"residual|skip|shortcut|not added|\bsum\b|addition|identity"
BUGS = (
    Bug(
        "kernel_rows_for_columns",
        "A kernel of the encoder's second level has rows and columns exchanged.",
        (LOADED, SWAPPED, r"transpos|\baxes\b|kernel|layout"),
        "weights",
    ),
    Bug(
        "upper_blocks_in_other_order",
        "The last two blocks of the decoder's level 1 are loaded in the other order.",
        (LOADED, SWAPPED, r"another block|other block|index"),
        "weights",
    ),
    Bug(
        "values_for_output_product",
        "The decoder's attention has the weights of v and of the output exchanged.",
        (LOADED, SWAPPED, r"to_v|to_out|proj_out"),
        "weights",
    ),
    Bug(
        "key_weight_transposed",
        "The weight of the encoder's keys is transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "shortcut_bias_forgotten",
        "The shortcut of the decoder's level 0 has no bias.",
        (LOADED, r"\bbias"),
        "weights",
    ),
    Bug(
        "norms_of_a_block_exchanged",
        "The two norms of an encoder's block are exchanged.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "second_middle_block_loaded_from_first",
        "The decoder's second middle block has the weights of the first.",
        (LOADED, r"dupl|twice|resnets\.0|another block|other block"),
        "weights",
    ),
    Bug(
        "decoder_attention_from_encoder",
        "The decoder's attention has the weights of the encoder's.",
        (LOADED, r"encoder'?s?\b.*(attention|attn)|dupl|another"),
        "weights",
    ),
    Bug(
        "enlarging_kernel_in_bfloat16",
        "A kernel of the decoder was stored in bfloat16.",
        (LOADED, HALF, r"bf16|bfloat16"),
        "weights",
    ),
    Bug(
        "encoder_norm_scale_left_at_one",
        "The scale of the encoder's last norm is one, not loaded.",
        (LOADED, r"default|initial|\bones?\b"),
        "weights",
    ),
    Bug(
        "blue_first",
        "The picture's channels are blue, green, red.",
        (r"\bbgr\b|\brgb\b|channel|" + SWAPPED, r"\bax[ei]s\b|flip"),
        "inputs",
    ),
    Bug(
        "resized_bilinearly",
        "The picture is resized by a bilinear filter, not Lanczos.",
        (RESIZED,),
        "inputs",
    ),
    Bug(
        "resized_without_bytes",
        "The resized picture is not rounded to bytes.",
        (RESIZED, r"round|byte|uint8|8.?bit|quanti|precision|\bclip|clamp"),
        "inputs",
    ),
    Bug(
        "cropped_from_corner",
        "The picture is cropped from its corner, not its centre.",
        (r"crop|cent(er|re)|corner|offset|shift|roll", RESIZED),
        "inputs",
    ),
    Bug(
        "pixels_over_127",
        "Pixels are divided by 127, not by 127.5.",
        (r"127|range|normali[sz]|scal(e|ed|ing)|factor|divid|multipl|offset",),
        "inputs",
    ),
    Bug(
        "noise_read_as_channels_last",
        "The posterior's noise is reshaped to channels last, not transposed.",
        (FOLD, r"channel|noise|order"),
        "inputs",
    ),
    Bug(
        "stride_padded_on_all_sides",
        "The convolution with stride is padded on all sides.",
        (r"padd|asymmetr|offset|shift|one pixel|symmetr",),
    ),
    Bug(
        "latents_padded_with_edge",
        "The decoder's first convolution is padded with the edge's values.",
        (r"padd|\bedges?\b|replicat|border|\brim\b",),
    ),
    Bug(
        "channels_dealt_to_groups",
        "Neighbouring channels go to different groups, as in mlx.nn.GroupNorm by default.",
        (GROUPED, r"pytorch_compatible|interleav|stride"),
    ),
    Bug(
        "attention_norm_in_one_group",
        "The norms before attention have one group.",
        (GROUPED, r"layer ?norm"),
    ),
    Bug("eps_of_torch_default", "The norms have eps 1e-5, not 1e-6.", (r"\beps|epsilon",)),
    Bug(
        "variance_of_a_sample",
        "The norms divide by n - 1.",
        (r"varianc|n ?- ?1|unbias|bessel|ddof|sample (var|std)|correction|deviation",),
    ),
    Bug(
        "swish_with_gelu_factor",
        "The decoder's levels have x sigmoid(1.702 x).",
        (r"1\.702|gelu|silu|swish|sigmoid|activation",),
    ),
    Bug(
        "swish_before_norm",
        "A block of the decoder has its first activation before its norm.",
        (r"silu|swish|activation|before.*norm|norm.*(before|after)",),
    ),
    Bug(
        "shortcut_of_normed_values",
        "The encoder's shortcut reads the normed values, not the block's input.",
        (
            r"shortcut|residual|skip|wrong (input|tensor|value)|block'?s (own )?input",
            r"(reads|given|takes|input (is|of)).*(norm|nonlinearity|activation|silu)",
        ),
    ),
    Bug(
        "skip_only_with_shortcut",
        "A block of the decoder without a shortcut does not add its input.",
        (RESIDUAL,),
    ),
    Bug(
        "attention_of_unnormed",
        "The decoder's attention reads its input without the norm.",
        (
            r"norm.*(missing|skip|not (appl|run|used)|left out|lack|unused|never|ignor|bypass)",
            r"(missing|skip|\bno\b|without|lacks?|before|bypass).*norm|un-?normed|not normed",
            r"wrong (input|tensor|value)",
        ),
    ),
    Bug(
        "scores_without_scale",
        "The encoder's scores are not divided by the root of the width.",
        (
            r"sqrt|root|temperature|softmax|scores|logits|head.?dim",
            r"attention.*scal|scal.*attention",
        ),
    ),
    Bug(
        "scores_in_float16",
        "The decoder's scores are in float16.",
        (HALF,),
    ),
    Bug(
        "softmax_over_queries",
        "The decoder's softmax goes over queries.",
        (r"softmax|\bax[ei]s\b|quer(y|ies)|transpos|normali[sz]",),
    ),
    Bug(
        "places_folded_by_column",
        "The decoder's attention folds its places as if they went down columns.",
        (FOLD, r"\brows?\b|columns?\b|height|width|order"),
    ),
    Bug(
        "encoder_attention_left_out",
        "The encoder has no attention.",
        (SKIPPED, r"no attention|attentions\.0 (is|was)"),
    ),
    Bug(
        "attention_after_both_blocks",
        "The decoder's attention comes after the second middle block.",
        (r"order|swap|exchang|after (both|the second)|resnets\.1 (runs|comes)|too (late|early)",),
    ),
    Bug(
        "encoder_ends_without_swish",
        "The encoder has no activation before its last convolution.",
        (r"silu|swish|activation|conv_act|nonlinear",),
    ),
    Bug(
        "quant_conv_left_out",
        "The 1x1 convolution after the encoder is left out.",
        (SKIPPED, r"(without|no|lacks?) (the )?quant_conv"),
    ),
    Bug(
        "enlarged_axes_not_interleaved",
        "Columns are repeated as a whole, not each.",
        (r"til(e|ing)|repeat|nearest|upsampl|interleav|enlarg|interpolat|broadcast|" + FOLD,),
    ),
    Bug(
        "decoder_levels_as_short_as_encoder",
        "The decoder's levels run two blocks, not three.",
        (SKIPPED, r"fewer|too few|layers_per_block|number of blocks|off.by.one"),
    ),
    Bug(
        "deviation_from_whole_logvar",
        "The deviation is exp(logvar), without the half.",
        (r"log.?var|varianc|deviation|\bstd\b|\bexp\b|squar|\bhalf\b|0\.5|sqrt|root|power",),
    ),
    Bug(
        "mean_instead_of_draw",
        "Latents are the posterior's mean, without noise.",
        (r"\bmean\b|\bmode\b|noise|sampl(e|ing)\b|draw|determin",),
    ),
    Bug(
        "factor_of_sdxl",
        "Latents are multiplied by SDXL's factor.",
        (r"scal(e|ed|ing)|factor|0\.13025|0\.18215|multipl|times",),
    ),
    Bug(
        "shift_of_flux_added",
        "A shift is added to the latents before decoding.",
        (r"shift|offset|constant|\badd(s|ed|ition)?\b|0\.1159|bias",),
    ),
    Bug(
        "latents_kept_in_float16",
        "Latents went through float16.",
        (HALF,),
    ),
    Bug(
        "decoded_in_two_halves",
        "The latents are decoded in two halves without overlap.",
        (r"til(e|ed|ing)|halves|\bsplit|chunk|seam|slic|part of|overlap|\bhalf\b|width",),
    ),
    Bug(
        "pixels_left_around_zero",
        "Pixels in [-1, 1] are clipped to [0, 1], not moved there.",
        (r"range|scal(e|ed|ing)|shift|offset|0\.5|denormali[sz]|/ ?2\b|\* ?2\b|affine|factor",),
    ),
    Bug(
        "picture_rounded_to_bytes",
        "The picture is rounded to bytes.",
        (r"byte|uint8|8.?bit|quanti|round|precision|1/255|\b25[56]\b",),
    ),
)
