"""CLIP with both towers in MLX, by the names of open_clip: sequence first inside the transformers.

The port is given pictures as bytes: it resizes them as Pillow does, crops, normalizes. Kernels are
(out, rows, columns, in), the projections (in, out), q, k, v one weight. A diffusion model gets the
last but one layer of the text, its pooled features, and how similar they are to the pictures.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
)

from blind_bugs.planting import (
    Array,
    Bug,
    checkpoint,
    given,
    port_trace,
    randomised,
    reference_trace,
    saved,
)
from lydite.trace.arrays import to_numpy
from lydite.trace.function_capture import watch_function
from lydite.trace.taps import tap
from lydite.trace.torch_capture import record_modules

NAME = "openclip"
WIDTH, HEADS, LAYERS, HIDDEN = 30, 5, 3, 44  # of the pictures' tower
TEXT_WIDTH, TEXT_HEADS, TEXT_LAYERS, TEXT_HIDDEN = 24, 3, 4, 52
JOINT, SIZE, PATCH, CONTEXT, VOCABULARY, SCALE = 18, 20, 5, 11, 50, 4.68
GIVEN = (34, 47)  # rows and columns of the pictures
START, END, PAD = 48, 49, 0
IDS = (
    (START, 31, 7, 22, 45, 3, 18, 40, 9, 26, END),
    (START, 12, 5, END, *(PAD,) * 7),
    (START, 33, 8, 19, 27, 41, END, *(PAD,) * 4),
)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def made() -> CLIPModel:
    """The model; embeddings and projections are larger than transformers' first ones."""
    text = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=TEXT_WIDTH,
        intermediate_size=TEXT_HIDDEN,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=TEXT_HEADS,
        max_position_embeddings=CONTEXT,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PAD,
        initializer_factor=1.5,
    )
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=SIZE,
        patch_size=PATCH,
        initializer_factor=1.5,
    )
    config = CLIPConfig(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        projection_dim=JOINT,
        logit_scale_init_value=SCALE,
    )
    model = CLIPModel(config)
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            parameter.data.mul_(4)
        if "q_proj" in name or "k_proj" in name:
            parameter.data.mul_(2.5)
        if name.endswith("self_attn.out_proj.weight"):
            parameter.data.mul_(1.5)
    return model


def reference(folder: Path, dtype: str) -> None:
    """Three prompts, two pictures."""
    model = saved(randomised(made, 71), folder, "clip", dtype)
    edge = {"height": SIZE, "width": SIZE}
    processor: Any = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=edge)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="clip", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        coarse = torch.rand(2, 3, 11, 13, generator=torch.Generator().manual_seed(5))
        pictures = F.interpolate(coarse, GIVEN, mode="bicubic").clamp(0, 1).mul(255).round()
        pictures = pictures.permute(0, 2, 3, 1).to(torch.uint8)
        ids = torch.tensor(IDS)
        recorder.record("pipeline/images", pictures, kind="input")
        recorder.record("pipeline/input_ids", ids, kind="ids")
        pixels = processor(list(pictures.numpy()), return_tensors="pt")["pixel_values"]
        recorder.record("pipeline/pixel_values", pixels, kind="input")
        result = model(ids, pixels.to(model.dtype), output_hidden_states=True)
        features = result.text_model_output.hidden_states[-2]
        recorder.record("pipeline/prompt_embeds", features)
        recorder.record("pipeline/pooled_prompt_embeds", result.text_embeds)
        recorder.record("pipeline/similarity", result.logits_per_text)
        parts = [features.flatten(1), result.text_embeds, result.logits_per_text]
        recorder.record("pipeline/conditioning", torch.cat(parts, 1))


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters by open_clip's names."""
    vision, text = "vision_model", "text_model"
    axes = (0, 3, 2, 1) if bug == "conv1_rows_for_columns" else (0, 2, 3, 1)
    new: dict[str, Array] = {
        "visual.class_embedding": w[f"{vision}.embeddings.class_embedding"],
        "visual.positional_embedding": w[f"{vision}.embeddings.position_embedding.weight"],
        "visual.conv1.weight": w[f"{vision}.embeddings.patch_embedding.weight"].transpose(axes),
        "visual.proj": w["visual_projection.weight"].T,
        "token_embedding.weight": w[f"{text}.embeddings.token_embedding.weight"],
        "positional_embedding": w[f"{text}.embeddings.position_embedding.weight"],
        "text_projection": w["text_projection.weight"].T,
        "logit_scale": w["logit_scale"],
    }

    def copied(name: str, source: str) -> None:
        for end in ("weight", "bias"):
            new[f"{name}.{end}"] = w[f"{source}.{end}"]

    copied("visual.ln_pre", f"{vision}.pre_layrnorm")  # the spelling is transformers'
    late = "pre_layrnorm" if bug == "ln_post_is_ln_pre" else "post_layernorm"
    copied("visual.ln_post", f"{vision}.{late}")
    copied("ln_final", f"{text}.final_layer_norm")
    towers = (("visual.transformer", vision, LAYERS), ("transformer", text, TEXT_LAYERS))
    for tower, source, layers in towers:
        for i in range(layers):
            name, old = f"{tower}.resblocks.{i}", f"{source}.encoder.layers.{i}"
            order = "kvq" if bug == "in_proj_in_file_order" and source == text else "qkv"
            for end in ("weight", "bias"):
                fused = [w[f"{old}.self_attn.{s}_proj.{end}"] for s in order]
                new[f"{name}.attn.in_proj_{end}"] = np.concatenate(fused)
            copied(f"{name}.attn.out_proj", f"{old}.self_attn.out_proj")
            copied(f"{name}.ln_1", f"{old}.layer_norm1")
            copied(f"{name}.ln_2", f"{old}.layer_norm2")
            copied(f"{name}.mlp.c_fc", f"{old}.mlp.fc1")
            copied(f"{name}.mlp.c_proj", f"{old}.mlp.fc2")
    if bug == "class_embedding_left_at_zero":
        new["visual.class_embedding"] = np.zeros_like(new["visual.class_embedding"])
    if bug == "in_proj_bias_of_queries_alone":
        name = "visual.transformer.resblocks.2.attn.in_proj_bias"
        new[name] = np.where(np.arange(3 * WIDTH) < WIDTH, new[name], np.float32(0))
    if bug == "c_fc_stored_float16":
        name = "transformer.resblocks.2.mlp.c_fc.weight"
        new[name] = new[name].astype(np.float16).astype(np.float32)
    if bug == "out_proj_transposed":
        name = "transformer.resblocks.1.attn.out_proj.weight"
        new[name] = new[name].T
    if bug == "c_proj_of_block_before":
        for end in ("weight", "bias"):
            blocks = "visual.transformer.resblocks"
            new[f"{blocks}.2.mlp.c_proj.{end}"] = new[f"{blocks}.1.mlp.c_proj.{end}"]
    if bug == "visual_positions_class_last":
        new["visual.positional_embedding"] = np.roll(new["visual.positional_embedding"], -1, 0)
    return {name: np.ascontiguousarray(value) for name, value in new.items()}


def cubic(x: Array, a: float) -> Array:
    x = np.abs(x)
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def filters(old: int, new: int, bug: str | None) -> Array:
    """Weights (new, old) of one axis; Pillow widens the kernel when it makes a picture smaller."""
    scale = old / new
    wide = max(scale, 1.0)
    reach = 1 if bug == "resized_bilinear" else 2
    table = np.zeros((new, old))
    for i in range(new):
        middle = (i + 0.5) * scale
        first = max(int(middle - reach * wide + 0.5), 0)
        last = min(int(middle + reach * wide + 0.5), old)
        x = (np.arange(first, last) - middle + 0.5) / wide
        y = cubic(x, -0.75 if bug == "cubic_of_opencv" else -0.5)
        if bug == "resized_bilinear":
            y = np.maximum(1 - np.abs(x), 0)
        table[i, first:last] = y / y.sum()
    return table


def preprocessed(picture: Array, bug: str | None) -> Array:
    """(rows, columns, channels) in float32, of bytes."""
    rows, columns = picture.shape[:2]
    short = min(rows, columns)
    grow = round if bug == "long_side_rounded" else int
    rows, columns = (grow(SIZE * n / short) for n in (rows, columns))
    if bug == "squashed_to_square":
        rows = columns = SIZE

    def as_bytes(x: Array) -> Array:
        return x if bug == "resized_in_float" else np.clip(np.floor(x + 0.5), 0, 255)

    x = picture.astype(np.float64)
    x = as_bytes(np.einsum("ow,hwc->hoc", filters(x.shape[1], columns, bug), x))
    x = as_bytes(np.einsum("oh,hwc->owc", filters(x.shape[0], rows, bug), x))
    odd = 1 if bug == "crop_rounded_up" else 0
    top, left = (rows - SIZE + odd) // 2, (columns - SIZE + odd) // 2
    x = x[top : top + SIZE, left : left + SIZE] / 255
    mean, std = np.array(MEAN), np.array(STD)
    if bug == "statistics_of_imagenet":
        mean, std = np.array((0.485, 0.456, 0.406)), np.array((0.229, 0.224, 0.225))
    return ((x - mean) / std).astype(np.float32)


def tokens(ids: Array, bug: str | None) -> Array:
    """What this program's tokenizer would give."""
    ids = ids.copy()
    if bug == "padded_with_end":
        ids[np.cumsum(ids == END, 1) > 0] = END
    if bug == "cut_without_end":
        ids[0, -1] = 23
    if bug == "start_missing":
        ids = np.concatenate([ids[:, 1:], np.full_like(ids[:, :1], PAD)], 1)
    return ids


class Clip:
    """Both towers; `p` are the parameters in the run's precision."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: mx.Dtype) -> None:
        self.p = {name: mx.array(value).astype(dtype) for name, value in p.items()}
        self.bug, self.dtype = bug, dtype

    def linear(self, name: str, x: mx.array) -> mx.array:
        return tap(name, x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"])

    def norm(self, name: str, x: mx.array) -> mx.array:
        y = x.astype(mx.float32)
        centred = y - y.mean(-1, keepdims=True)
        n = x.shape[-1] - (1 if self.bug == "ln_unbiased_variance" else 0)
        variance = (centred * centred).sum(-1, keepdims=True) / n
        eps = 1e-6 if self.bug == "ln_eps" else 1e-5
        root = mx.sqrt(variance + eps)
        gain, shift = (self.p[f"{name}.{end}"].astype(mx.float32) for end in ("weight", "bias"))
        return (centred / root * gain + shift).astype(x.dtype)

    def attention(self, name: str, x: mx.array, heads: int, mask: mx.array | None) -> mx.array:
        """Of (length, batch, width)."""
        bug, (n, batch, width) = self.bug, x.shape
        text = not name.startswith("visual")
        weight, bias = (self.p[f"{name}.in_proj_{end}"] for end in ("weight", "bias"))
        qkv = tap(f"{name}.in_proj", x @ weight.T + bias)
        if bug == "batch_taken_for_length" and text:
            qkv = qkv.reshape(batch, n, 3, heads, -1).transpose(2, 0, 3, 1, 4)
        elif bug == "in_proj_split_by_head" and name.endswith("resblocks.0.attn") and not text:
            qkv = qkv.reshape(n, batch, heads, 3, -1).transpose(3, 1, 2, 0, 4)
        else:
            qkv = qkv.reshape(n, batch, 3, heads, -1).transpose(2, 1, 3, 0, 4)
        q, k, v = qkv
        scale = (width // heads) ** -0.5
        if bug == "scores_scaled_by_width" and text:
            scale = width**-0.5
        scores = (q.astype(mx.float32) @ k.astype(mx.float32).swapaxes(-1, -2)) * scale
        if mask is not None:
            scores = scores + mask
        shares = mx.softmax(scores, -1).astype(x.dtype)
        y = (shares @ v).transpose(2, 0, 1, 3).reshape(n, batch, width)
        return self.linear(f"{name}.out_proj", tap(f"{name}.heads", y))

    def gelu(self, name: str, x: mx.array) -> mx.array:
        if self.bug == "visual_gelu_of_erf" and name.startswith("visual"):
            y = x * (1 + mx.erf(x / 2**0.5)) / 2
        else:
            y = x * mx.sigmoid(1.702 * x)
        return tap(f"{name}.gelu", y)

    def block(self, name: str, x: mx.array, heads: int, mask: mx.array | None) -> mx.array:
        bug = self.bug
        y = tap(f"{name}.ln_1", self.norm(f"{name}.ln_1", x))
        start = y if bug == "residual_from_ln_1" and name == "visual.transformer.resblocks.1" else x
        x = start + self.attention(f"{name}.attn", y, heads, mask)
        twice = bug == "ln_1_used_twice" and name == "transformer.resblocks.2"
        y = tap(f"{name}.ln_2", self.norm(f"{name}.{'ln_1' if twice else 'ln_2'}", x))
        y = self.linear(f"{name}.mlp.c_fc", y)
        y = self.linear(f"{name}.mlp.c_proj", self.gelu(f"{name}.mlp", y))
        x = x + y
        if bug == "visual_stream_float16" and name.startswith("visual"):
            x = x.astype(mx.float16).astype(x.dtype)
        return tap(name, x)

    def causal(self, n: int) -> mx.array:
        hidden = mx.arange(n)[None] > mx.arange(n)[:, None]
        if self.bug == "next_token_seen":
            hidden = mx.arange(n)[None] > mx.arange(n)[:, None] + 1
        return mx.where(hidden, -mx.inf, 0.0)

    def encode_image(self, pixels: mx.array) -> mx.array:
        bug = self.bug
        x = tap("visual.conv1", mx.conv2d(pixels, self.p["visual.conv1.weight"], stride=PATCH))
        x = x.reshape(len(x), -1, WIDTH)
        cls = mx.broadcast_to(self.p["visual.class_embedding"], (len(x), 1, WIDTH))
        x = mx.concatenate([x, cls] if bug == "class_token_last" else [cls, x], 1)
        positions = self.p["visual.positional_embedding"]
        if bug == "class_token_without_position":
            positions = mx.concatenate([mx.zeros_like(positions[:1]), positions[1:]])
        x = tap("visual.embedded", x + positions)
        if bug != "ln_pre_skipped":
            x = tap("visual.ln_pre", self.norm("visual.ln_pre", x))
        x = x.transpose(1, 0, 2)
        heads = TEXT_HEADS if bug == "heads_of_text_tower" else HEADS
        mask = self.causal(len(x)) if bug == "pictures_masked_causally" else None
        for i in range(LAYERS):
            x = self.block(f"visual.transformer.resblocks.{i}", x, heads, mask)
        x = x.transpose(1, 0, 2)
        pooled = x[:, 1:].mean(1) if bug == "patches_pooled_by_mean" else x[:, 0]
        x = tap("visual.ln_post", self.norm("visual.ln_post", pooled))
        return tap("encode_image", x @ self.p["visual.proj"])

    def encode_text(self, ids: Array) -> tuple[mx.array, mx.array]:
        """The projection of the pooled token, and the last but one layer."""
        bug = self.bug
        x = tap("token_embedding", self.p["token_embedding.weight"][mx.array(ids)])
        positions = self.p["positional_embedding"]
        if bug == "text_positions_from_one":
            positions = positions[mx.minimum(mx.arange(CONTEXT) + 1, CONTEXT - 1)]
        x = tap("embedded", x + positions).transpose(1, 0, 2)
        mask, states = self.causal(CONTEXT), []
        for i in range(TEXT_LAYERS):
            states.append(x)
            x = self.block(f"transformer.resblocks.{i}", x, TEXT_HEADS, mask)
        states.append(x)
        features = states[-3 if bug == "features_one_layer_early" else -2].transpose(1, 0, 2)
        if bug == "features_with_ln_final":
            features = self.norm("ln_final", features)
        x = x.transpose(1, 0, 2)
        normed = tap("ln_final", self.norm("ln_final", x))
        if bug != "pooled_before_ln_final":
            x = normed
        at = ids.argmax(-1)
        if bug == "pooled_at_last_position":
            at = np.full(len(ids), CONTEXT - 1)
        pooled = tap("pooled", x[mx.arange(len(ids)), mx.array(at)])
        return tap("encode_text", pooled @ self.p["text_projection"]), features

    def normalized(self, x: mx.array, name: str) -> mx.array:
        axis = 0 if self.bug == "normalized_over_batch" else -1
        if self.bug == "image_features_not_normalized" and name == "image_features":
            return tap(name, x)
        return tap(name, x / mx.sqrt((x * x).sum(axis, keepdims=True)))

    def __call__(self, pixels: mx.array, ids: Array) -> None:
        bug = self.bug
        picture = self.normalized(self.encode_image(pixels.astype(self.dtype)), "image_features")
        text, features = self.encode_text(ids)
        tap("penultimate", features)
        raw, text = text, self.normalized(text, "text_features")
        scale = mx.exp(self.p["logit_scale"])
        if bug == "logit_scale_clamped":
            scale = mx.minimum(scale, 100)
        similar = (text @ picture.T) * scale
        if bug == "similarity_of_pictures_reshaped":
            similar = similar.T.reshape(similar.shape)
        tap("logits_per_text", similar)
        if bug == "pooled_features_not_normalized":
            text = raw
        parts = [features.reshape(len(ids), -1), text, similar]
        tap("conditioning", mx.concatenate(parts, 1))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Clip(converted(checkpoint(folder, "clip"), bug), bug, getattr(mx, dtype))
    pictures, ids = value("pipeline/images"), tokens(value("pipeline/input_ids"), bug)
    pixels = np.stack([preprocessed(picture, bug) for picture in pictures])
    kept = {name: to_numpy(v) for name, v in net.p.items()} if weights else None
    blocks = ("given.*", "visual.conv1", "visual.transformer.resblocks.?", "encode_*")
    blocks += ("transformer.resblocks.?", "ln_final", "penultimate", "logits_*", "conditioning")
    with port_trace(out, dump, dtype, blocks, kept):
        tap("given.pictures", pictures, kind="input")
        tap("given.tokens", ids, kind="ids")
        tap("given.pixels", pixels, kind="input")
        net(mx.array(pixels), ids)


NO_COUNTERPART: tuple[str, ...] = ()

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|\border\b|permut|revers|mixed up|interchang"
TOKENS = r"token|\bids?\b"
RESIZE = r"resiz|resampl|interpol|scal(e|ed|ing)\b|image.?process|preprocess"
CAUSAL = r"mask|causal|future|next token|visib|\bahead\b|\bsees?\b"
FEATURES = r"hidden.?states? ?(\[|index)|penultimate|clip.?skip|(last|second).but.(one|two)"
BUGS = (
    Bug(
        "conv1_rows_for_columns",
        "The kernel of the patches has rows and columns exchanged.",
        (LOADED, SWAPPED, r"transpos|\brows?\b|column|layout|\bax[ei]s\b|height|width"),
        "weights",
    ),
    Bug(
        "ln_post_is_ln_pre",
        "The norm after the pictures' tower has the weights of the one before it.",
        (LOADED, r"pre_?layr?norm|ln_pre|dupl|same (norm|param)|another norm"),
        "weights",
    ),
    Bug(
        "in_proj_in_file_order",
        "The text's fused weights are k, v, q, in the file's order.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "class_embedding_left_at_zero",
        "The class embedding was not found and stayed zero.",
        (LOADED, r"class.?(embed|token)|\bcls\b|zero|missing|initial"),
        "weights",
    ),
    Bug(
        "in_proj_bias_of_queries_alone",
        "The last picture block's fused bias has zeros for keys and values.",
        (LOADED, r"\bbias|zero"),
        "weights",
    ),
    Bug(
        "c_fc_stored_float16",
        "A weight of the text's block 2 was stored in float16.",
        (LOADED, r"f16|float16|fp16|\bhalf\b|precision|round"),
        "weights",
    ),
    Bug(
        "out_proj_transposed",
        "The output weight of the text's block 1 is transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "c_proj_of_block_before",
        "The last picture block has the second MLP layer of the block before.",
        (LOADED, r"dupl|layers\.1\b|resblocks\.1\b|(another|other|previous) (block|layer)"),
        "weights",
    ),
    Bug(
        "visual_positions_class_last",
        "The pictures' positions have the class token's row at the end.",
        (LOADED, SWAPPED, r"\broll|shift|offset|position|off.by.one"),
        "weights",
    ),
    Bug(
        "padded_with_end",
        "Prompts are padded with the end token, not with 0.",
        (TOKENS, r"padd|\beo[st]\b|end of text"),
        "ids",
    ),
    Bug(
        "cut_without_end",
        "A long prompt is cut without its end token.",
        (TOKENS, r"truncat|\bcut\b|\beo[st]\b|end of text|\blast\b"),
        "ids",
    ),
    Bug(
        "start_missing",
        "Prompts lack the start token.",
        (TOKENS, r"\b[bs]o[st]\b|start|begin|shift|offset"),
        "ids",
    ),
    Bug(
        "resized_bilinear",
        "Pictures are resized linearly.",
        (RESIZE, r"linear|cubic|filter|kernel|blur|smooth"),
        "inputs",
    ),
    Bug(
        "cubic_of_opencv",
        "The cubic kernel has -0.75 for -0.5.",
        (RESIZE, r"cubic|filter|kernel|-?0\.75|-0\.5\b|sharp"),
        "inputs",
    ),
    Bug(
        "long_side_rounded",
        "The longer side is rounded, not truncated.",
        (RESIZE, r"round|truncat|\bint\b|floor|aspect|\bsize\b|width|\bside\b"),
        "inputs",
    ),
    Bug(
        "squashed_to_square",
        "Pictures are squashed to a square.",
        (RESIZE, r"aspect|squar|squash|stretch|\bcrop|distort|ratio"),
        "inputs",
    ),
    Bug(
        "resized_in_float",
        "Resized pictures are not rounded to bytes.",
        (RESIZE, r"round|byte|uint8|8.?bit|quanti|cl(i|a)m?p"),
        "inputs",
    ),
    Bug(
        "crop_rounded_up",
        "The crop begins one column late.",
        (r"\bcrop|cent(re|er)|offset|shift|\broll|off.by.one|one (pixel|column)|preprocess",),
        "inputs",
    ),
    Bug(
        "statistics_of_imagenet",
        "Pictures are normalized with ImageNet's statistics.",
        (r"\bmean\b|\bstd\b|statistic|imagenet|normali[sz]|affine|per.channel|preprocess",),
        "inputs",
    ),
    Bug(
        "ln_unbiased_variance",
        "LayerNorms divide the variance by n - 1.",
        (r"variance|unbiased|n ?- ?1|bessel|\bddof\b|correction|std|deviation",),
    ),
    Bug("ln_eps", "LayerNorms have eps 1e-6.", (r"\beps",)),
    Bug(
        "batch_taken_for_length",
        "The text's attention reshapes (length, batch) as if it were (batch, length).",
        (r"batch|reshap|layout|transpos|\bax[ei]s\b|length|sequence.first", SWAPPED),
    ),
    Bug(
        "in_proj_split_by_head",
        "The first picture block splits the fused product head by head.",
        (
            r"split|chunk|interleav|layout|reshap|per head|by head|head.by.head|fused",
            SWAPPED,
            r"heads? (first|major|axis|dim)",
        ),
    ),
    Bug(
        "scores_scaled_by_width",
        "The text's scores are divided by the root of the width, not of a head's.",
        (r"\bscal(e|ed|ing)\b|factor|sqrt|root|head.?dim|temperature|1\.73|0\.57",),
    ),
    Bug(
        "visual_gelu_of_erf",
        "The pictures' MLPs have the GELU with erf.",
        (r"gelu|\berf\b|sigmoid|1\.702|activation",),
    ),
    Bug(
        "residual_from_ln_1",
        "The picture block 1 adds its attention to the normed stream.",
        (
            r"residual|skip connection|normed (input|stream|value)|norm\w*'?s? (output|result)",
            r"(adds?|added|sum).*(norm|ln_1|layer_norm1)|(block|layer)'?s? (own )?input",
        ),
    ),
    Bug(
        "ln_1_used_twice",
        "The text's block 2 norms with ln_1 before its MLP.",
        (
            r"ln_1|layer_?norm_?1|first norm|other norm|another norm|wrong norm|same norm",
            r"norm.*(weight|gain|parameter)s? of|(wrong|other|another) (gain|weight|parameter)",
        ),
    ),
    Bug(
        "visual_stream_float16",
        "The pictures' residual stream is float16.",
        (r"f16|float16|fp16|\bhalf\b|precision|round",),
    ),
    Bug("next_token_seen", "The text sees one token ahead.", (CAUSAL, r"off.by.one|diagonal")),
    Bug(
        "class_token_last",
        "The class token is put after the patches.",
        (r"class|\bcls\b|concat|\broll|prepend|append|shift|off.by.one|last token", SWAPPED),
    ),
    Bug(
        "class_token_without_position",
        "The class token gets no position.",
        (r"position|pos_?embed|class|\bcls\b|first (token|row)|token 0|row 0",),
    ),
    Bug(
        "ln_pre_skipped",
        "The norm before the pictures' blocks is not applied.",
        (
            r"norm.*(missing|skip|not (appl|run|used|called)|left out|lack|unused|never)",
            r"(missing|skip|\bno\b|without|lacks?).*norm|un-?normed|not normed",
            r"ln_pre|pre_?layr?norm",
        ),
    ),
    Bug(
        "heads_of_text_tower",
        "The pictures' attention has the text's number of heads.",
        (r"heads?\b|head.?dim|head.?size",),
    ),
    Bug("pictures_masked_causally", "Pictures are masked causally.", (CAUSAL,)),
    Bug(
        "patches_pooled_by_mean",
        "Pictures are pooled by the mean of patches, not by the class token.",
        (r"pool|\bmean\b|averag|class|\bcls\b|first token|token 0",),
    ),
    Bug(
        "text_positions_from_one",
        "The text's positions begin at 1.",
        (r"position|off.by.one|pos_?embed",),
    ),
    Bug(
        "features_one_layer_early",
        "The diffusion model gets the last but two layer.",
        (
            FEATURES,
            r"(wrong|other|another|earlier|previous|different) (layer|block|state)",
            r"one (layer|block) (early|earlier|before|less|fewer)|off.by.one|layers\.[12]\b",
        ),
    ),
    Bug(
        "features_with_ln_final",
        "The last but one layer is normed for the diffusion model.",
        (r"norm|ln_final",),
    ),
    Bug(
        "pooled_before_ln_final",
        "The end token is pooled without the last norm.",
        (
            r"norm.*(missing|skip|not (appl|run|used)|left out|lack|unused|never|before|after)",
            r"(missing|skip|\bno\b|without|lacks?|before|un).*norm",
            r"ln_final|final_layer_norm|un-?normed|not normed",
        ),
    ),
    Bug(
        "pooled_at_last_position",
        "The text is pooled at the last position, not at the end token.",
        (r"pool|\beo[st]\b|end.of.text|argmax|last (position|token)|end token|\bindex|position",),
    ),
    Bug(
        "normalized_over_batch",
        "Features are divided by their length along the batch.",
        (r"\bax[ei]s\b|batch|\bdim(ension)?\b|normali[sz]|\blength\b|\bl2\b",),
    ),
    Bug(
        "image_features_not_normalized",
        "The picture's features keep their length.",
        (r"normali[sz]|unit|\bl2\b|\blength\b|\bnorm\b|cosine",),
    ),
    Bug(
        "logit_scale_clamped",
        "The scale of the similarity is at most 100.",
        (r"cl(i|a)m?p|\b100\b|\bmax(imum)?\b|limit|cap(ped)?\b|logit_scale|\bscal(e|ed|ing)\b",),
    ),
    Bug(
        "similarity_of_pictures_reshaped",
        "Similarities of pictures to prompts are reshaped, not transposed, to prompts by pictures.",
        (r"transpos|reshap|layout|logits_per_image|\bax[ei]s\b|\brows?\b|column", SWAPPED),
    ),
    Bug(
        "pooled_features_not_normalized",
        "The pooled features for the diffusion model keep their length.",
        (r"normali[sz]|unit|\bl2\b|\blength\b|\bnorm\b",),
    ),
)
