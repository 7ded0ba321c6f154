"""UMT5's encoder in MLX with the parameter names of T5X, and Wan's zeros after the last token.

Kernels are (in, out), heads stay beside the tokens: (batch, tokens, heads, channels). Most values
are recorded, with the inputs of attention and of the last layer of the MLP.
"""

import math
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from transformers import UMT5Config, UMT5EncoderModel
from transformers.models.umt5 import modeling_umt5

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

NAME = "umt5"
WIDTH, HEADS, LAYERS, HIDDEN, VOCABULARY = 24, 4, 4, 40, 60
HEAD, BUCKETS, DISTANCE, LENGTH, USED = WIDTH // HEADS, 8, 12, 16, (16, 11)


def reference(folder: Path, dtype: str) -> None:
    """Two prompts of 16 and 11 tokens."""
    config = UMT5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=HEAD,
        d_ff=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=DISTANCE,
        feed_forward_proj="gated-gelu",
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    model = saved(randomised(lambda: UMT5EncoderModel(config), 15), folder, "text_encoder", dtype)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCABULARY, (2, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor(USED)[:, None]).long()
    ids = torch.where(torch.arange(LENGTH) == torch.tensor(USED)[:, None] - 1, 1, ids) * mask
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="text_encoder", weights=True),
        watch_function(recorder, modeling_umt5, "eager_attention_forward", as_name="attention"),
    ):
        recorder.record("pipeline/input_ids", ids, kind="ids")
        recorder.record("pipeline/attention_mask", mask, kind="input")
        out = model(ids, mask).last_hidden_state
        recorder.record("pipeline/prompt_embeds", out * mask[..., None].to(out.dtype))


RULES = (
    (r"^shared\.weight", "token_embedder.embedding"),
    (r"^encoder\.block\.(\d)\.layer\.\d\.", r"encoder/layers_\1/"),
    (r"SelfAttention\.relative_attention_bias\.weight", "relpos_bias.rel_embedding"),
    (r"SelfAttention\.q\.weight", "attention/query.kernel"),
    (r"SelfAttention\.k\.weight", "attention/key.kernel"),
    (r"SelfAttention\.v\.weight", "attention/value.kernel"),
    (r"SelfAttention\.o\.weight", "attention/out.kernel"),
    (r"DenseReluDense\.(wi_0|wi_1|wo)\.weight", r"mlp/\1.kernel"),
    (r"^encoder\.final_layer_norm\.weight", "encoder/encoder_norm.scale"),
)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under T5X's names; kernels transposed."""
    new: dict[str, Array] = {}
    for old, value in w.items():
        if old == "encoder.embed_tokens.weight":
            continue
        norm = "pre_attention_layer_norm" if ".layer.0." in old else "pre_mlp_layer_norm"
        name = re.sub(r"(\.block\..*)layer_norm\.weight", rf"\1{norm}.scale", old)
        for pattern, into in RULES:
            name = re.sub(pattern, into, name)
        new[name] = value.T.copy() if name.endswith("kernel") else value
    layer = "encoder/layers_{}/{}".format
    if bug == "position_bias_of_first_layer":
        for i in range(1, LAYERS):
            new[layer(i, "relpos_bias.rel_embedding")] = new[layer(0, "relpos_bias.rel_embedding")]
    if bug == "gate_kernels_exchanged":
        a, b = layer(2, "mlp/wi_0.kernel"), layer(2, "mlp/wi_1.kernel")
        new[a], new[b] = new[b], new[a]
    if bug == "out_kernel_not_transposed":
        new[layer(1, "attention/out.kernel")] = new[layer(1, "attention/out.kernel")].T.copy()
    if bug == "norm_not_loaded":
        new[layer(3, "pre_mlp_layer_norm.scale")] = np.ones(WIDTH, np.float32)
    if bug == "value_kernel_of_key":
        new[layer(0, "attention/value.kernel")] = new[layer(0, "attention/key.kernel")]
    return new


def buckets(bug: str | None) -> Array:
    """Row: query, column: key."""
    place = np.arange(LENGTH)
    relative = place[None] - place[:, None]
    relative = -relative if bug == "bucket_sign" else relative
    count = BUCKETS // 2
    far = 128 if bug == "bucket_distance_default" else DISTANCE
    if bug == "bucket_one_direction":
        count, base, relative = BUCKETS, 0, -np.minimum(relative, 0)
    else:
        later = relative >= 0 if bug == "bucket_zero_is_later" else relative > 0
        base, relative = later * count, np.abs(relative)
    exact = count if bug == "bucket_all_exact" else count // 2
    span = math.log(far / exact)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(relative.astype(np.float32) / exact) / span * (count - exact)
    ratio = np.where(relative < exact, 0, ratio)
    large = exact + (np.round(ratio) if bug == "bucket_rounded" else np.floor(ratio)).astype(int)
    return base + np.where(relative < exact, relative, np.minimum(large, count - 1))


class Encoder:
    def __init__(self, p: dict[str, Array], bug: str | None, dtype: mx.Dtype) -> None:
        self.p = {k: mx.array(v).astype(dtype) for k, v in p.items()}
        self.bug, self.dtype = bug, dtype

    def dense(self, path: str, x: mx.array) -> mx.array:
        return tap(path, x @ self.p[f"{path}.kernel"])

    def norm(self, path: str, x: mx.array) -> mx.array:
        bug, y = self.bug, x.astype(mx.float32)
        if bug == "layer_norm" and path.endswith("pre_attention_layer_norm"):
            y = y - y.mean(-1, keepdims=True)
        eps = 1e-3 if bug == "norm_eps" else 1e-6
        y = (y * mx.rsqrt((y * y).mean(-1, keepdims=True) + eps)).astype(self.dtype)
        scale = self.p[f"{path}.scale"]
        return tap(
            path, y * (1 + scale if bug == "norm_one_plus" and "layers_3" in path else scale)
        )

    def attention(self, path: str, x: mx.array, mask: mx.array, i: int) -> mx.array:
        bug, b = self.bug, len(x)
        q, k, v = (self.dense(f"{path}/{n}", x) for n in ("query", "key", "value"))
        shape = (b, LENGTH, HEADS, HEAD)
        if bug == "heads_split_last" and i == 0:
            q, k, v = (y.reshape(b, LENGTH, HEAD, HEADS).swapaxes(2, 3) for y in (q, k, v))
        else:
            q, k, v = (y.reshape(shape) for y in (q, k, v))
        table = self.p[f"encoder/layers_{i}/relpos_bias.rel_embedding"]
        bias = table[mx.array(self.buckets)].transpose(2, 0, 1)  # heads, query, key
        bias = tap(f"{path}/bias", bias.swapaxes(1, 2) if bug == "bias_transposed" else bias)
        scores = mx.einsum("bqhd,bkhd->bhqk", q, k)
        if bug == "scores_scaled":
            scores = scores * HEAD**-0.5
        if bug == "bias_times_scale" and i == 1:
            bias = bias * HEAD**-0.5
        if not (bug == "bias_in_first_layer_only" and i > 0):
            scores = scores + bias
        tap(f"{path}/scores", scores)
        if bug == "mask_zero_one":
            scores = scores + mask[:, None, None].astype(scores.dtype)
        elif bug == "mask_of_queries":
            scores = mx.where(mask[:, None, :, None], scores, -1e9)
        elif bug == "causal":
            scores = mx.where(mask[:, None, None], scores, -1e9)
            scores = mx.where(mx.tril(mx.ones((LENGTH, LENGTH))) > 0, scores, -1e9)
        elif bug != "mask_ignored" and not (bug == "mask_ignored_from_layer_2" and i >= 2):
            scores = mx.where(mask[:, None, None], scores, -1e9)
        kind = mx.float16 if bug == "softmax_f16" and i == 2 else mx.float32
        axis = -2 if bug == "softmax_over_queries" and i == 3 else -1
        weights = mx.softmax(mx.maximum(scores, -1e4).astype(kind), axis=axis).astype(self.dtype)
        tap(f"{path}/weights", weights)
        y = mx.einsum("bhqk,bkhd->bqhd", weights, v)
        tap(f"{path}/mix", y)
        return self.dense(f"{path}/out", y.reshape(b, LENGTH, WIDTH))

    def mlp(self, path: str, x: mx.array) -> mx.array:
        bug, a, b = self.bug, self.dense(f"{path}/wi_0", x), self.dense(f"{path}/wi_1", x)
        if bug == "gate_on_second":
            a, b = b, a
        y = activation(a, bug) * b
        y = activation(a, bug) if bug == "gate_ignored" and "layers_1" in path else y
        if bug == "gated_clamped" and "layers_0" in path:
            y = mx.clip(y, -0.05, 0.05)
        return self.dense(f"{path}/wo", tap(f"{path}/wo", y, slot="in.0"))

    def __call__(self, ids: Array, mask: Array) -> mx.array:
        bug, used = self.bug, mx.array(mask) > 0
        self.buckets = tap("encoder/buckets", buckets(bug))
        rows = self.p["token_embedder.embedding"]
        x = rows[mx.array(ids)]
        x = x * math.sqrt(WIDTH) if bug == "embedding_scaled" else x
        x = x.astype(mx.bfloat16).astype(self.dtype) if bug == "embedding_bf16" else x
        x = tap("token_embedder", x)
        states = [x]
        for i in range(LAYERS):
            path = f"encoder/layers_{i}"
            if bug == "layer_skipped" and i == 2:
                continue
            n = self.norm(f"{path}/pre_attention_layer_norm", x)
            y = self.attention(f"{path}/attention", n, used, i)
            start = n if bug == "residual_of_norm" and i == 1 else x
            middle = tap(f"{path}/middle", start + y)
            n = self.norm(
                f"{path}/pre_mlp_layer_norm", x if bug == "mlp_parallel" and i == 2 else middle
            )
            z = self.mlp(f"{path}/mlp", n)
            x = tap(path, z if bug == "mlp_residual_missing" and i == 3 else middle + z)
            states.append(x)
        x = states[-2] if bug == "layer_before_last" else x
        x = x if bug == "final_norm_missing" else self.norm("encoder/encoder_norm", x)
        kept = mask
        if bug == "last_token_cut":
            kept = (np.arange(LENGTH) < mask.sum(1, keepdims=True) - 1).astype(mask.dtype)
        if bug == "padding_kept":
            kept = np.ones_like(mask)
        x = x.astype(mx.float16).astype(x.dtype) if bug == "result_f16" else x
        return tap("prompt", x * mx.array(kept)[..., None].astype(x.dtype))


def activation(x: mx.array, bug: str | None) -> mx.array:
    if bug == "gelu_erf":
        return x * (1 + mx.erf(x / math.sqrt(2))) / 2
    if bug == "gelu_quick":
        return x * mx.sigmoid(1.702 * x)
    if bug == "relu":
        return mx.maximum(x, 0)
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, kind = given(folder), getattr(mx, dtype)
    ids, mask = value("pipeline/input_ids"), value("pipeline/attention_mask")
    if bug == "end_token_missing":
        ids = np.where(ids == 1, 0, ids)
    if bug == "padded_left":
        ids = np.stack([np.roll(row, LENGTH - n) for row, n in zip(ids, USED, strict=True)])
    if bug == "ids_shifted_by_one":
        ids = np.where(ids > 1, ids - 1, ids)
    if bug == "mask_counts_one_more":
        mask = (np.arange(LENGTH) < mask.sum(1, keepdims=True) + 1).astype(mask.dtype)
    encoder = Encoder(converted(checkpoint(folder, "text_encoder"), bug), bug, kind)
    kept = {k: to_numpy(v) for k, v in encoder.p.items()} if weights else None
    blocks = ("ids", "mask", "token_embedder", "encoder/layers_?", "encoder/encoder_norm", "prompt")
    with port_trace(out, dump, dtype, blocks, kept):
        tap("ids", ids, kind="ids")
        tap("mask", mask, kind="input")
        encoder(ids, mask)


NO_COUNTERPART = (r"/attention/scores$",)

WEIGHT, BUCKET, MASK = r"load|weight|param", r"bucket|position|relative", r"mask|padding"
BUGS = (
    Bug("position_bias_of_first_layer", "All layers have the first's bias.", (WEIGHT,), "weights"),
    Bug("gate_kernels_exchanged", "wi_0 and wi_1 are exchanged.", (WEIGHT, r"swap"), "weights"),
    Bug("out_kernel_not_transposed", "A square kernel is transposed.", (r"transpos",), "weights"),
    Bug("norm_not_loaded", "A norm's scale is all ones.", (WEIGHT, r"ones|default"), "weights"),
    Bug("value_kernel_of_key", "The first value kernel is the key's.", (WEIGHT,), "weights"),
    Bug("end_token_missing", "The end token is missing.", (r"token|\bids?\b|eos|end",), "ids"),
    Bug("padded_left", "The tokens are padded on the left.", (r"pad|left|shift|roll|ids",), "ids"),
    Bug(
        "ids_shifted_by_one",
        "Token ids are one too small.",
        (r"offset|off by|\bone\b|ids|shift",),
        "ids",
    ),
    Bug("mask_counts_one_more", "The mask has one token more.", (MASK,), "inputs"),
    Bug(
        "bucket_sign", "Relative positions have the other sign.", (BUCKET, r"sign|transpos|direct")
    ),
    Bug("bucket_distance_default", "The largest distance is 128, not 12.", (BUCKET, r"distance")),
    Bug("bucket_one_direction", "Buckets are those of a decoder.", (BUCKET, r"direction|causal")),
    Bug("bucket_zero_is_later", "Distance 0 is in the later half.", (BUCKET,)),
    Bug("bucket_all_exact", "Each distance has a bucket up to the end.", (BUCKET, r"exact|clamp")),
    Bug("bucket_rounded", "Logarithmic buckets are rounded, not cut.", (BUCKET, r"round|floor")),
    Bug("bias_transposed", "The position bias is transposed.", (r"transpos|swap|sign|direction",)),
    Bug(
        "bias_times_scale", "The position bias of layer 1 is scaled.", (r"bias|scale|sqrt|factor",)
    ),
    Bug("bias_in_first_layer_only", "Only layer 0 adds its bias.", (r"bias|missing|not added",)),
    Bug("scores_scaled", "Scores are scaled; T5's are not.", (r"scale|sqrt|root",)),
    Bug("mask_zero_one", "The mask is added as 0 and 1.", (MASK,)),
    Bug("mask_of_queries", "The mask is applied to queries.", (MASK,)),
    Bug("causal", "Attention is causal.", (r"causal|triang|future|mask",)),
    Bug("mask_ignored", "The mask is not used.", (MASK,)),
    Bug("mask_ignored_from_layer_2", "Layers 2 and 3 do not use the mask.", (MASK,)),
    Bug("softmax_f16", "Softmax of layer 2 is in float16.", (r"f16|float16|half|precision",)),
    Bug("softmax_over_queries", "Softmax of layer 3 is over queries.", (r"softmax|ax[ei]s",)),
    Bug("heads_split_last", "Layer 0 splits channels before heads.", (r"head|reshape|layout",)),
    Bug("layer_norm", "Norms before attention subtract the mean.", (r"mean|rms|layer ?norm|cent",)),
    Bug("norm_eps", "Norms have eps 1e-3, not 1e-6.", (r"\beps",)),
    Bug("norm_one_plus", "Norms of layer 3 multiply by 1 + scale.", (r"1 ?\+|\bone\b|plus",)),
    Bug("gate_on_second", "The activation is on wi_1.", (r"swap|gate|order|branch|other",)),
    Bug("gate_ignored", "Layer 1 does not multiply by wi_1.", (r"gate|multipl|product|missing",)),
    Bug("gated_clamped", "The hidden values are clamped in layer 0.", (r"clamp|clip",)),
    Bug("gelu_erf", "The MLP uses erf GELU.", (r"gelu|erf",)),
    Bug("gelu_quick", "The MLP uses quick GELU.", (r"gelu|1\.702|sigmoid",)),
    Bug("relu", "The MLP uses ReLU.", (r"relu|activation",)),
    Bug(
        "embedding_scaled",
        "Embeddings are multiplied by the root.",
        (r"scale|sqrt|root|factor|times",),
    ),
    Bug("embedding_bf16", "Embeddings are rounded to bfloat16.", (r"bf16|bfloat|precision|cast",)),
    Bug("layer_skipped", "Layer 2 is skipped.", (r"skip|missing|not (run|called)",)),
    Bug("residual_of_norm", "Layer 1 adds to the normed input.", (r"residual|norm",)),
    Bug("mlp_parallel", "Layer 2's MLP reads the layer's input.", (r"residual|\binput|parallel",)),
    Bug(
        "mlp_residual_missing", "Layer 3's MLP has no residual.", (r"residual|skip|added|missing",)
    ),
    Bug(
        "layer_before_last",
        "The last norm reads the layer before.",
        (r"\binput|hidden|previous|skip",),
    ),
    Bug("final_norm_missing", "The last norm is missing.", (r"norm|missing|skip",)),
    Bug(
        "last_token_cut", "The end token's features are zero.", (r"token|mask|zero|length|cut|end",)
    ),
    Bug("padding_kept", "Features of padding are not zero.", (MASK, r"zero")),
    Bug("result_f16", "The result is rounded to float16.", (r"f16|float16|half|precision",)),
)
