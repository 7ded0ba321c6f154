"""DeBERTa v2 in NumPy as fairseq would lay it out: tokens first, then sentences, then channels.

q, k and v are one product whose columns go by heads, as Megatron's. Positions are looked up in
one table for each layer. Names are in camel case, the layer first and counted from 1.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DebertaV2Config, DebertaV2Model

from blind_bugs.planting import (
    Array,
    Bug,
    checkpoint,
    given,
    port_trace,
    randomised,
    reference_trace,
    rounder,
    saved,
)
from lydite.trace import taps
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "deberta"
TABLE, WIDTH, HIDDEN, LAYERS, HEADS, WORDS = 20, 32, 56, 3, 4, 40
HEAD, SPAN, LONGEST, TOKENS, VALID, EPS = WIDTH // HEADS, 6, 32, 14, 10, 1e-5
CLS, SEP, PAD, SPLIT = 1, 2, 0, 6


def reference(folder: Path, dtype: str) -> None:
    """Two sentences, the second padded; the convolution of the large model beside layer 1."""
    config: dict[str, Any] = dict(vocab_size=WORDS, hidden_size=WIDTH, embedding_size=TABLE)
    config |= dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, layer_norm_eps=EPS)
    config |= dict(intermediate_size=HIDDEN, max_position_embeddings=LONGEST, type_vocab_size=2)
    config |= dict(relative_attention=True, position_buckets=SPAN, norm_rel_ebd="layer_norm")
    config |= dict(share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False)
    config |= dict(conv_kernel_size=3, conv_act="tanh", initializer_range=0.25)
    model = randomised(lambda: DebertaV2Model(DebertaV2Config(**config)), 83)
    model = saved(model, folder, "text_encoder", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="text_encoder", weights=True),
        watch_function(recorder, F, "softmax"),
    ):
        generator = torch.Generator().manual_seed(6)
        ids = torch.randint(3, WORDS, (2, TOKENS), generator=generator)
        ids[:, 0], ids[0, -1], ids[1, VALID - 1], ids[1, VALID:] = CLS, SEP, SEP, PAD
        mask = torch.ones(2, TOKENS, dtype=torch.long)
        mask[1, VALID:] = 0
        segments = (torch.arange(TOKENS) >= SPLIT).long().expand(2, -1) * mask
        recorder.record("pipeline/input_ids", ids, kind="ids")
        recorder.record("pipeline/token_type_ids", segments, kind="ids")
        recorder.record("pipeline/attention_mask", mask, kind="input")
        out = model(ids, attention_mask=mask, token_type_ids=segments)
        recorder.record("pipeline/prompt_embeds", out.last_hidden_state)


def by_heads(parts: list[Array]) -> Array:
    """(…, heads, which of the parts, head's channels) as one axis, of (…, width) each."""
    shape = parts[0].shape[:-1]
    return np.stack([p.reshape(*shape, HEADS, HEAD) for p in parts], -2).reshape(*shape, -1)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port."""
    new = {"words.table": w["embeddings.word_embeddings.weight"]}
    new["segments.table"] = w["embeddings.token_type_embeddings.weight"]
    if bug == "segments_exchanged":
        new["segments.table"] = new["segments.table"][::-1].copy()
    new["words.proj"] = w["embeddings.embed_proj.weight"].T.copy()
    new["relative.table"] = w["encoder.rel_embeddings.weight"]
    if bug == "relative_table_reversed":
        new["relative.table"] = new["relative.table"][::-1].copy()

    def put_norm(name: str, old: str) -> None:
        new[f"{name}.gain"], new[f"{name}.shift"] = w[f"{old}.weight"], w[f"{old}.bias"]

    put_norm("inputNorm", "embeddings.LayerNorm")
    put_norm("relativeNorm", "encoder.LayerNorm")
    put_norm("convNorm", "encoder.conv.LayerNorm")
    kernel = w["encoder.conv.conv.weight"]  # (out, in, taps)
    if bug == "conv_kernel_flipped":
        kernel = kernel[..., ::-1]
    order = (2, 0, 1) if bug == "conv_kernel_not_transposed" else (2, 1, 0)
    new["conv.kernel"] = kernel.transpose(order).copy()
    new["conv.bias"] = w["encoder.conv.conv.bias"]
    for i in range(LAYERS):
        old, b = f"encoder.layer.{i}", f"layer{i + 1}"
        kinds = ("query", "value", "key") if bug == "values_before_keys" and i == 1 else None
        parts = [f"{old}.attention.self.{x}_proj" for x in kinds or ("query", "key", "value")]
        if bug == "qkv_columns_not_by_heads" and i == 0:
            new[f"{b}/qkv.matrix"] = np.concatenate([w[f"{p}.weight"].T for p in parts], -1)
            new[f"{b}/qkv.bias"] = np.concatenate([w[f"{p}.bias"] for p in parts])
        else:
            new[f"{b}/qkv.matrix"] = by_heads([w[f"{p}.weight"].T for p in parts])
            new[f"{b}/qkv.bias"] = by_heads([w[f"{p}.bias"] for p in parts])
        source = "encoder.layer.1" if bug == "attention_out_of_other_layer" and i == 2 else old
        pairs = (("attnOut", f"{source}.attention.output.dense"),)
        pairs += (("mlpIn", f"{old}.intermediate.dense"), ("mlpOut", f"{old}.output.dense"))
        for name, path in pairs:
            new[f"{b}/{name}.matrix"] = w[f"{path}.weight"].T.copy()
            new[f"{b}/{name}.bias"] = w[f"{path}.bias"]
        put_norm(f"{b}/attnNorm", f"{old}.attention.output.LayerNorm")
        put_norm(f"{b}/mlpNorm", f"{old}.output.LayerNorm")
    if bug == "attention_out_not_transposed":
        new["layer2/attnOut.matrix"] = new["layer2/attnOut.matrix"].T.copy()
    if bug == "mlp_stored_float16":
        new["layer3/mlpOut.matrix"] = new["layer3/mlpOut.matrix"].astype("f2").astype("f4")
    return new


def erf(x: Array) -> Array:
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()


class Reader:
    """The forward pass; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.q(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, slot: str = "out") -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype), slot=slot)
        return x

    def dense(self, name: str, x: Array) -> Array:
        y = self.q(x @ self.p[f"{name}.matrix"] + self.p[f"{name}.bias"])
        return self.tap(name, y)

    def norm(self, name: str, x: Array) -> Array:
        bug, gain, shift = self.bug, self.p[f"{name}.gain"], self.p[f"{name}.shift"]
        eps = 1e-3 if bug == "norm_eps" else EPS
        y = x - x.mean(-1, keepdims=True)
        var = y.var(-1, keepdims=True, ddof=int(bug == "variance_unbiased"))
        y = y / np.sqrt(var + np.float32(eps))
        if bug == "mlp_norm_shift_missing" and name == "layer2/mlpNorm":
            shift = np.zeros_like(shift)
        return self.tap(name, self.q(y * gain + shift))

    def buckets(self) -> Array:
        """Rows of the table of relative positions, as (queries, keys)."""
        bug = self.bug
        away = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
        if bug == "positions_key_minus_query":
            away = -away
        mid = SPAN // 2
        far = np.maximum(np.abs(away), mid).astype(np.float32) / np.float32(mid)
        steps = np.log(far) / np.log(np.float32((LONGEST - 1) / mid)) * (mid - 1)
        steps = np.floor(steps) if bug == "buckets_rounded_down" else np.ceil(steps)
        sign = 1 if bug == "buckets_without_sign" else np.sign(away)
        bucket = np.where(np.abs(away) <= mid, away, (steps + mid) * sign)
        if bug == "positions_clipped_not_bucketed":
            bucket = away
        zero = SPAN - 1 if bug == "position_table_offset" else SPAN
        rows = np.clip(bucket.astype(np.int64) + zero, 0, 2 * SPAN - 1)
        taps.tap("relative/rows", rows)
        return rows

    def relative(self) -> Array:
        table = self.p["relative.table"]
        if self.bug == "relative_norm_missing":
            return table
        return self.norm("relativeNorm", table)

    def heads(self, b: str, x: Array) -> Array:
        """q, k and v of (tokens, sentences, width) as (3, sentences, heads, tokens, channels)."""
        y = self.dense(f"{b}/qkv", x)
        return y.reshape(*x.shape[:2], HEADS, 3, HEAD).transpose(3, 1, 2, 0, 4)

    def attention(self, b: str, x: Array, seen: Array) -> Array:
        bug = self.bug
        q, k, v = self.heads(b, x)
        table = self.table[:, None]
        if bug == "position_bias_missing":
            y = self.q(table @ self.p[f"{b}/qkv.matrix"])
        else:
            y = self.q(table @ self.p[f"{b}/qkv.matrix"] + self.p[f"{b}/qkv.bias"])
        pq, pk, _ = y.reshape(2 * SPAN, 1, HEADS, 3, HEAD).transpose(3, 1, 2, 0, 4)
        if bug == "position_key_and_query_exchanged":
            pq, pk = pk, pq
        self.tap(f"{b}/posKey", pk)
        self.tap(f"{b}/posQuery", pq)
        parts = 1 if bug == "scale_without_parts" else 3
        scale = np.float32(math.sqrt(HEAD * parts))
        content = self.q(np.einsum("bhqd,bhkd->bhqk", q, self.q(k / scale)))
        c2p = self.q(np.einsum("bhqd,bhrd->bhqr", q, np.broadcast_to(pk, (2, *pk.shape[1:]))))
        p2c = self.q(np.einsum("bhkd,bhrd->bhkr", k, np.broadcast_to(pq, (2, *pq.shape[1:]))))
        rows = np.broadcast_to(self.rows, (2, HEADS, TOKENS, TOKENS))
        back = rows if bug == "p2c_rows_of_query" else rows.swapaxes(2, 3)
        c2p = np.take_along_axis(c2p, rows, -1)
        p2c = np.take_along_axis(p2c, back, -1)
        if bug != "p2c_not_transposed":
            p2c = p2c.swapaxes(2, 3)
        shrink = np.float32(1) if bug == "position_scores_unscaled" else scale
        position = np.zeros_like(content)
        if bug != "c2p_missing":
            position = position + self.q(c2p / shrink)
        position = self.q(position + self.q(p2c / shrink))
        scores = self.tap(f"{b}/scores", self.q(content + position))
        if bug == "masked_scores_small" and b == "layer2":
            scores = np.where(seen, scores, np.float32(-5))
        else:
            scores = np.where(seen, scores, np.finfo(np.float32).min)
        if bug == "scores_float16" and b == "layer3":
            scores = np.clip(scores, -6e4, 6e4).astype(np.float16).astype(np.float32)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        shares = self.tap(f"{b}/shares", self.q(e / e.sum(-1, keepdims=True)))
        y = self.q(shares @ v)  # (sentences, heads, tokens, channels)
        if bug == "heads_after_channels" and b == "layer1":
            y = y.transpose(2, 0, 3, 1)
        else:
            y = y.transpose(2, 0, 1, 3)
        return self.dense(f"{b}/attnOut", self.tap(f"{b}/context", y.reshape(x.shape)))

    def mlp(self, b: str, x: Array) -> Array:
        h = self.dense(f"{b}/mlpIn", x)
        if self.bug == "mlp_gelu_tanh":
            h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        else:
            h = 0.5 * h * (1 + erf(h / np.float32(math.sqrt(2))))
        return self.dense(f"{b}/mlpOut", self.q(h.astype(np.float32)))

    def layer(self, b: str, x: Array, seen: Array) -> Array:
        bug = self.bug
        y = self.attention(b, x, seen)
        if bug == "norm_before_residual" and b == "layer3":
            middle = self.q(self.norm(f"{b}/attnNorm", y) + x)
        else:
            middle = self.norm(f"{b}/attnNorm", self.q(y + x))
        y = self.mlp(b, x if bug == "mlp_reads_layer_input" and b == "layer2" else middle)
        start = x if bug == "mlp_residual_from_layer_input" and b == "layer3" else middle
        return self.tap(b, self.norm(f"{b}/mlpNorm", self.q(y + start)))

    def convolution(self, x: Array, beside: Array, mask: Array) -> Array:
        """Of the embeddings, added to the first layer's result."""
        bug = self.bug
        pad = (2, 0) if bug == "conv_causal" else (1, 1)
        wide = np.pad(x, (pad, (0, 0), (0, 0)))
        y = sum(wide[i : i + TOKENS] @ self.p["conv.kernel"][i] for i in range(3))
        y = self.tap("conv", self.q(y + self.p["conv.bias"])) * mask
        y = self.q(np.maximum(y, 0) if bug == "conv_relu" else np.tanh(y))
        if bug == "conv_not_added_to_layer":
            beside = x
        y = self.norm("convNorm", self.q(beside + y))
        return self.tap("convResult", y if bug == "conv_result_not_masked" else y * mask)

    def embeddings(self, ids: Array, segments: Array, mask: Array) -> Array:
        bug = self.bug
        rows = ids - 1 if bug == "words_one_row_early" else ids
        x = self.tap("words", self.p["words.table"][rows])
        kinds = self.tap("segments", self.p["segments.table"][segments])
        x = self.q(self.q(x + kinds) @ self.p["words.proj"])
        x = self.norm("inputNorm", self.tap("words/projected", x))
        return self.tap("input", x if bug == "input_padding_not_zeroed" else x * mask)

    def __call__(self, ids: Array, segments: Array, mask: Array) -> Array:
        """All of (tokens, sentences)."""
        bug = self.bug
        keep = mask[..., None].astype(np.float32)
        x = before = first = self.embeddings(ids, segments, keep)
        self.rows, self.table = self.buckets(), self.relative()
        allowed = mask.T.astype(bool)
        seen = allowed[:, None, None] & allowed[:, None, :, None]
        if bug == "padding_attended":
            seen = np.ones_like(seen)
        if bug == "padded_queries_see_words":
            seen = np.broadcast_to(allowed[:, None, None], seen.shape)
        for i in range(1, LAYERS + 1):
            before = x
            x = self.layer(f"layer{i}", x, seen)
            if i == (2 if bug == "conv_after_second_layer" else 1):
                source = before if bug == "conv_after_second_layer" else first
                source = x if bug == "conv_reads_layer_result" else source
                x = self.convolution(source, x, keep)
        result = before if bug == "last_layer_unused" else x
        return self.tap("result", result)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Reader(converted(checkpoint(folder, "text_encoder"), bug), bug, dtype)
    names = ("input_ids", "token_type_ids", "attention_mask")
    ids, segments, mask = (value(f"pipeline/{name}") for name in names)
    if bug == "padded_on_the_left":
        ids[1], mask[1] = np.roll(ids[1], TOKENS - VALID), np.roll(mask[1], TOKENS - VALID)
        segments[1] = np.roll(segments[1], TOKENS - VALID)
    if bug == "start_token_missing":
        ids[0, :-1] = ids[0, 1:]
    if bug == "segments_all_zero":
        segments[:] = 0
    if bug == "mask_one_longer":
        mask[1, VALID] = 1
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("given/*", "input", "relativeNorm", "layer?", "convResult", "result")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("given/ids", ids.T.copy(), kind="ids")
        taps.tap("given/segments", segments.T.copy(), kind="ids")
        taps.tap("given/mask", mask.T.copy(), kind="input")
        net(ids.T, segments.T, mask.T)


NO_COUNTERPART: tuple[str, ...] = (r"^relative/rows$", r"/posKey$", r"/posQuery$", r"/scores$")

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers"
BUCKET = r"bucket|logarithm|relative position|rel(ative)?_pos|\bpositions?\b"
BUGS = (
    Bug(
        "segments_exchanged",
        "The two rows of the segments' table are exchanged.",
        (
            LOADED,
            r"\brows?\b",
            SWAPPED,
        ),
        "weights",
    ),
    Bug(
        "relative_table_reversed",
        "The table of relative positions is in reverse order.",
        (
            LOADED,
            r"flip|\brows?\b",
            SWAPPED,
        ),
        "weights",
    ),
    Bug(
        "conv_kernel_flipped",
        "The convolution's kernel is flipped in time.",
        (
            LOADED,
            r"flip|mirror",
            SWAPPED,
        ),
        "weights",
    ),
    Bug(
        "conv_kernel_not_transposed",
        "The convolution's input and output channels are exchanged.",
        (
            LOADED,
            r"transpos",
            SWAPPED,
        ),
        "weights",
    ),
    Bug(
        "values_before_keys",
        "Layer 2's fused product has v before k.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "qkv_columns_not_by_heads",
        "Layer 1's fused weight is q, k, v in blocks; its product is read by heads.",
        (LOADED, r"heads?\b|interleav|layout|reshap|split", SWAPPED),
        "weights",
    ),
    Bug(
        "attention_out_of_other_layer",
        "Layer 3's attention output has layer 2's weights.",
        (
            LOADED,
            r"(another|other|previous) (layer|block)|dupl|same param",
        ),
        "weights",
    ),
    Bug(
        "attention_out_not_transposed",
        "Layer 2's square attention output is not transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "mlp_stored_float16",
        "Layer 3's last weight was stored in float16.",
        (LOADED, r"f16|float16|\bhalf\b|fp16|precision|round"),
        "weights",
    ),
    Bug(
        "words_one_row_early",
        "The table of words is read one row too early.",
        (r"\brows?\b|off.by.one|index|shift|\bids?\b|look.?up|token|offset",),
        "ids",
    ),
    Bug(
        "padded_on_the_left",
        "The second sentence is padded on the left.",
        (r"pad|\bids?\b|token|\broll|shift|side|left|right",),
        "ids",
    ),
    Bug(
        "start_token_missing",
        "The first sentence lost its start token.",
        (r"\bids?\b|token|\bcls\b|\bbos\b|shift|start|off.by.one",),
        "ids",
    ),
    Bug(
        "segments_all_zero",
        "All tokens are of segment 0.",
        (r"segment|token.type|\bids?\b|zero",),
        "ids",
    ),
    Bug(
        "mask_one_longer",
        "The second sentence's mask has one token more.",
        (r"mask|padd|off.by.one",),
        "inputs",
    ),
    Bug(
        "input_padding_not_zeroed",
        "Embeddings of padding are not set to zero.",
        (r"mask|padd|zero",),
    ),
    Bug("norm_eps", "Norms have eps 1e-3.", (r"\beps",)),
    Bug(
        "variance_unbiased",
        "Norms divide by n - 1.",
        (r"unbiased|ddof|n ?[-\u2212] ?1|bessel|varianc|\bstd|correct",),
    ),
    Bug(
        "mlp_norm_shift_missing",
        "Layer 2's last norm does not add its bias.",
        (r"\bbias|shift|affine|beta|offset",),
    ),
    Bug(
        "positions_key_minus_query",
        "Relative positions are key minus query.",
        (r"sign|negat|direction|transpos|flip|mirror", BUCKET, SWAPPED),
    ),
    Bug(
        "buckets_rounded_down",
        "Logarithmic buckets are rounded down, not up.",
        (r"round|floor|ceil", BUCKET),
    ),
    Bug(
        "buckets_without_sign",
        "Logarithmic buckets lack the sign.",
        (r"sign|negat|direction|absolute", BUCKET),
    ),
    Bug(
        "positions_clipped_not_bucketed",
        "Relative positions are clipped, without logarithmic buckets.",
        (r"clip|clamp|linear", BUCKET),
    ),
    Bug(
        "position_table_offset",
        "The middle of the position table is taken one row early.",
        (r"off.by.one|offset|\brows?\b|shift|index", BUCKET),
    ),
    Bug(
        "relative_norm_missing",
        "The table of relative positions is not normed.",
        (
            r"norm.*(missing|skip|not (appl|run|used)|left out|lack|unused|never)",
            r"(missing|skip|\bno\b|without|lacks?).*norm|un-?normed|not normed",
        ),
    ),
    Bug(
        "position_bias_missing",
        "Positions pass the query's and key's layers without bias.",
        (r"\bbias",),
    ),
    Bug(
        "position_key_and_query_exchanged",
        "Positions as keys and as queries are exchanged.",
        (
            BUCKET,
            SWAPPED,
        ),
    ),
    Bug(
        "scale_without_parts",
        "Scores are divided by the root of the head's width, not of three times that.",
        (r"\bscal(e|es|ed|ing)\b|sqrt|square root|factor",),
    ),
    Bug(
        "position_scores_unscaled",
        "The positions' scores are not scaled.",
        (r"\bscal(e|es|ed|ing)\b|sqrt|square root|factor",),
    ),
    Bug(
        "p2c_rows_of_query",
        "Position to content looks up the rows of (query, key) at (key, query).",
        (r"p2c|transpos|sign|negat|direction|gather|look.?up|index", BUCKET, SWAPPED),
    ),
    Bug(
        "p2c_not_transposed",
        "Scores of position to content are not transposed.",
        (r"p2c|transpos|\bax[ei]s\b", BUCKET, SWAPPED),
    ),
    Bug(
        "c2p_missing",
        "Content to position is not added.",
        (r"c2p|(not|never) added|missing (term|summand|addend|bias)|score bias", BUCKET),
    ),
    Bug(
        "padding_attended",
        "Attention has no mask.",
        (r"mask|padd",),
    ),
    Bug(
        "padded_queries_see_words",
        "Only keys are masked; padded queries attend to words.",
        (r"mask|padd|quer(y|ies)|empty rows?",),
    ),
    Bug(
        "masked_scores_small",
        "Layer 2 sets hidden scores to -5.",
        (r"mask|-inf|minus infinity|padd",),
    ),
    Bug(
        "scores_float16",
        "Layer 3's scores are float16.",
        (r"f16|float16|\bhalf\b|fp16|precision|round",),
    ),
    Bug(
        "heads_after_channels",
        "Layer 1 joins heads after their channels.",
        (r"heads?\b|transpos|reshap|layout|\bax[ei]s\b|permut|interleav",),
    ),
    Bug(
        "mlp_gelu_tanh",
        "The MLP's GELU is that with tanh.",
        (r"tanh|gelu|\berf\b|approximat",),
    ),
    Bug(
        "norm_before_residual",
        "Layer 3 norms the attention, then adds its input.",
        (
            r"norm.*(before|after|sum|residual|order|place)|(residual|sum|after|added).*norm|pre.norm",
        ),
    ),
    Bug(
        "mlp_reads_layer_input",
        "Layer 2's MLP reads the layer's input.",
        (
            r"parallel|beside|residual|(before|without) (the )?att|input of (the )?(block|layer)",
            r"(block|layer)'?s? (own )?input|att\w* .*(missing|skip|not added)",
        ),
    ),
    Bug(
        "mlp_residual_from_layer_input",
        "Layer 3 adds its MLP to the layer's input.",
        (
            r"residual|skip connection|input of (the )?layer|layer'?s? (own )?input",
            r"(without|before) (the )?att|att\w* .*(missing|skip|not added)|layer2\b(?!/)",
        ),
    ),
    Bug(
        "conv_causal",
        "The convolution is causal.",
        (r"causal|pad|shift|offset|off.by.one",),
    ),
    Bug("conv_relu", "The convolution's activation is ReLU.", (r"relu|tanh|activation",)),
    Bug(
        "conv_not_added_to_layer",
        "The convolution is added to its own input, not to layer 1.",
        (
            r"residual|skip connection|own input|(not|without) add",
            r"(wrong|other|another|earlier) (value|summand|addend)",
        ),
    ),
    Bug(
        "conv_result_not_masked",
        "The convolution's normed result keeps padding.",
        (r"mask|padd|zero",),
    ),
    Bug(
        "conv_after_second_layer",
        "The convolution is beside layer 2.",
        (
            r"(wrong|other|another|later|earlier|next) layer|skip|missing|too (late|early)",
            r"not (run|called|applied|added)|off.by.one",
        ),
    ),
    Bug(
        "conv_reads_layer_result",
        "The convolution reads layer 1's result, not the embeddings.",
        (
            r"(wrong|other|another|later) (input|value|layer)|reads|\binput\b.*(differ|wrong)",
            r"layer 1'?s? (result|output)|output of (the )?(first )?layer",
        ),
    ),
    Bug(
        "last_layer_unused",
        "The result is of one layer earlier.",
        (
            r"hidden.?state|too early|too few|fewer|skip|layer2\b(?!/)|layer\.1\b(?!\.)",
            r"(one|another|other|wrong|earlier|previous|last|missing) (layer|block)",
            r"(layer|block)s?\b.*(missing|not (run|applied|called))|earlier (value|output)",
        ),
    ),
)
