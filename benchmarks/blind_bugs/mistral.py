"""Mistral as a text encoder in NumPy: q, k and v one product, weights as (in, out), layers from 1.

Two prompts, the second padded on the left; the features are the last but one hidden state.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import MistralConfig, MistralModel

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

NAME = "mistral"
WIDTH, HIDDEN, LAYERS, HEADS, GROUPS, HEAD = 40, 56, 4, 4, 2, 12
WINDOW, THETA, EPS, WORDS, TOKENS, BOS, EOS = 4, 1e6, 1e-5, 48, 11, 1, 2
PADDED = 4


def reference(folder: Path, dtype: str) -> None:
    """One call; pads are end tokens, as in tokenizers without a pad of their own."""
    rope = dict(rope_type="default", rope_theta=THETA)
    config: dict[str, Any] = dict(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=HIDDEN)
    config |= dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=HEAD)
    config |= dict(num_key_value_heads=GROUPS, sliding_window=WINDOW, rms_norm_eps=EPS)
    config |= dict(rope_parameters=rope, initializer_range=0.15, max_position_embeddings=64)
    model = randomised(lambda: MistralModel(MistralConfig(**config)), 21)
    model = saved(model, folder, "text_encoder", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="text_encoder", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        generator = torch.Generator().manual_seed(4)
        ids = torch.randint(3, WORDS, (2, TOKENS), generator=generator)
        mask = torch.ones(2, TOKENS, dtype=torch.long)
        ids[0, 0], ids[1, PADDED], ids[:, -1] = BOS, BOS, EOS
        ids[1, :PADDED], mask[1, :PADDED] = EOS, 0
        recorder.record("pipeline/input_ids", ids, kind="ids")
        recorder.record("pipeline/attention_mask", mask, kind="input")
        out = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        recorder.record("pipeline/prompt_embeds", out.hidden_states[-2])


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port."""
    new = {"wte.table": w["embed_tokens.weight"], "out_norm.g": w["norm.weight"]}
    for i in range(LAYERS):
        old, b = f"layers.{i}", f"L{i + 1}"
        q, k, v = (w[f"{old}.self_attn.{x}_proj.weight"] for x in "qkv")
        if bug == "qk_rows_interleaved":  # as in the original files of Mistral and Llama
            q, k = (
                x.reshape(-1, 2, HEAD // 2, WIDTH).swapaxes(1, 2).reshape(-1, WIDTH) for x in (q, k)
            )
        parts = (q, v, k) if bug == "values_before_keys" else (q, k, v)
        new[f"{b}.qkv.W"] = np.concatenate(parts).T.copy()
        new[f"{b}.o.W"] = w[f"{old}.self_attn.o_proj.weight"].T.copy()
        new[f"{b}.gate.W"] = w[f"{old}.mlp.gate_proj.weight"].T.copy()
        new[f"{b}.up.W"] = w[f"{old}.mlp.up_proj.weight"].T.copy()
        down = "layers.0" if bug == "down_of_other_layer" and i == 1 else old
        new[f"{b}.down.W"] = w[f"{down}.mlp.down_proj.weight"].T.copy()
        names = ("input_layernorm", "post_attention_layernorm")
        for j, name in enumerate(names, 1):
            new[f"{b}.n{j}.g"] = w[f"{old}.{name}.weight"]
    return new


class Encoder:
    """The forward pass; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.q(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, slot: str = "out") -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype), slot=slot)
        return x

    def linear(self, name: str, x: Array) -> Array:
        return self.tap(name, self.q(x @ self.p[f"{name}.W"]))

    def norm(self, name: str, x: Array) -> Array:
        g, eps = self.p[f"{name}.g"], 1e-6 if self.bug == "norm_eps" else EPS
        if self.bug == "norm_layer" and name == "L3.n2":
            x = x - x.mean(-1, keepdims=True)
        if self.bug == "norm_one_plus":
            g = 1 + g
        root = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps))
        return self.tap(name, self.q(g * self.q(x / root)))

    def angles(self) -> tuple[Array, Array]:
        """Cosines and sines of (tokens and one more, half of a head's channels)."""
        width = WIDTH // HEADS if self.bug == "rope_width" else HEAD
        frequencies = THETA ** -(np.arange(0, HEAD, 2, dtype=np.float32) / width)
        a = np.arange(TOKENS + 1, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
        cos, sin = self.q(np.cos(a)), self.q(np.sin(a))
        self.tap("rope.cos", cos[:TOKENS])
        self.tap("rope.sin", sin[:TOKENS])
        return cos, sin

    def rotate(self, x: Array, late: int = 0) -> Array:
        """RoPE of (prompts, tokens, heads, channels), in halves."""
        cos, sin = (c[late : late + TOKENS, None] for c in self.pe)
        if self.bug == "rope_interleaved":
            a, b = x[..., ::2], x[..., 1::2]
        else:
            a, b = np.split(x, 2, -1)
        a, b = self.q(a * cos) + self.q(-b * sin), self.q(b * cos) + self.q(a * sin)
        if self.bug == "rope_interleaved":
            return self.q(np.stack([a, b], -1).reshape(x.shape))
        return self.q(np.concatenate([a, b], -1))

    def allowed(self, mask: Array) -> Array:
        """What each token sees, as (prompts, 1, queries, keys)."""
        bug = self.bug
        window = WINDOW + 1 if bug == "window_one_longer" else WINDOW
        away = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
        seen = (away >= 0) & (away < window)
        if bug == "causal_missing":
            seen = np.abs(away) < window
        if bug == "padding_ignored":
            mask = np.ones_like(mask)
        return (seen & (mask[:, None] > 0))[:, None]

    def attention(self, b: str, x: Array, seen: Array) -> Array:
        bug = self.bug
        qkv = self.linear(f"{b}.qkv", x)
        q, k, v = (
            y.reshape(*y.shape[:2], -1, HEAD)
            for y in np.split(qkv, [HEADS * HEAD, (HEADS + GROUPS) * HEAD], -1)
        )
        late = 1 if bug == "rope_keys_one_late" else 0
        q, k = self.tap(f"{b}.qr", self.rotate(q)), self.tap(f"{b}.kr", self.rotate(k, late))
        if bug == "groups_tiled":
            k, v = (np.tile(y, (1, 1, HEADS // GROUPS, 1)) for y in (k, v))
        else:
            k, v = (np.repeat(y, HEADS // GROUPS, 2) for y in (k, v))
        scale = (WIDTH // HEADS if bug == "scale_of_width" else HEAD) ** -0.5
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * np.float32(scale)
        if bug == "masked_scores_zero" and b == "L2":
            scores, seen = scores * seen, np.ones_like(seen)
        if bug == "empty_rows_average":
            scores = np.where(seen, scores, np.float32(-1e9))
            seen = np.ones_like(seen)
        if bug == "scores_f16" and b == "L3":
            scores = scores.astype(np.float16).astype(np.float32)
        e = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        e = e / np.maximum(e.sum(-1, keepdims=True), 1e-30)  # rows that see nothing stay zero
        out = self.q(np.einsum("bhqk,bkhd->bqhd", e, v))
        if bug == "heads_not_moved_back" and b == "L2":
            out = out.swapaxes(1, 2)
        out = self.tap(f"{b}.mix", out.reshape(*x.shape[:2], -1))
        return self.linear(f"{b}.o", out)

    def feed_forward(self, b: str, x: Array) -> Array:
        gate, up = self.linear(f"{b}.gate", x), self.linear(f"{b}.up", x)
        if self.bug == "gate_and_up_swapped":
            gate, up = up, gate
        a = gate / (1 + np.exp(-gate))
        return self.linear(f"{b}.down", self.tap(f"{b}.h", self.q(self.q(a) * up)))

    def layer(self, b: str, x: Array, seen: Array) -> Array:
        normed = self.norm(f"{b}.n1", x)
        y = self.attention(b, normed, seen)
        first = normed if self.bug == "residual_of_norm" and b == "L3" else x
        middle = self.tap(f"{b}.mid", self.q(first + y))
        beside = self.bug == "mlp_beside_attention" and b == "L2"
        y = self.feed_forward(b, self.norm(f"{b}.n2", x if beside else middle))
        return self.tap(b, self.q(middle + y))

    def __call__(self, ids: Array, mask: Array) -> Array:
        bug = self.bug
        rows = (ids + 1) % WORDS if bug == "embedding_rows_shifted" else ids
        x = self.p["wte.table"][rows]
        if bug == "embeddings_scaled":
            x = self.q(x * np.float32(WIDTH**0.5))
        x = self.tap("wte", x)
        self.pe, seen = self.angles(), self.allowed(mask)
        count = LAYERS - (2 if bug == "one_layer_too_early" else 1)
        for i in range(1, count + 1):
            x = self.layer(f"L{i}", x, seen)
        if bug == "final_norm_applied":
            x = self.norm("out_norm", x)
        return self.tap("features", x)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    net = Encoder(converted(checkpoint(folder, "text_encoder"), bug), bug, dtype)
    ids, mask = value("pipeline/input_ids"), value("pipeline/attention_mask")
    if bug == "padded_on_the_right":
        ids[1], mask[1] = np.roll(ids[1], -PADDED), np.roll(mask[1], -PADDED)
    if bug == "bos_twice":
        ids[0] = np.concatenate([[BOS], ids[0, :-1]])
    if bug == "mask_from_pad_id":
        mask = (ids != EOS).astype(mask.dtype)
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    with port_trace(out, dump, dtype, ("tok.*", "wte", "L?", "features"), kept):
        taps.tap("tok.ids", ids, kind="ids")
        taps.tap("tok.mask", mask, kind="input")
        net(ids, mask)


NO_COUNTERPART: tuple[str, ...] = ()

BUGS = (
    Bug(
        "values_before_keys",
        "The fused product was made as q, v, k.",
        (r"load|weight", r"swap|order|permut", r"\bkv\b|\bk and v|key.*value"),
        "weights",
    ),
    Bug(
        "qk_rows_interleaved",
        "Rows of q and k are in the interleaved order of the original files.",
        (r"interleav|permut|reorder|\border|\brows?\b", r"load|weight", r"rope|rotary|halves"),
        "weights",
    ),
    Bug(
        "down_of_other_layer",
        "The second layer has the first one's down projection.",
        (r"load|weight|dupl|twice|other layer",),
        "weights",
    ),
    Bug(
        "embedding_rows_shifted",
        "The table is read one row too far.",
        (r"\brows?\b|off.by.one|index|shift|\bids?\b|look.?up|token|offset",),
        "ids",
    ),
    Bug(
        "padded_on_the_right",
        "The second prompt is padded on the right.",
        (r"pad|\bids?\b|token|roll|shift|side|left|right",),
        "ids",
    ),
    Bug(
        "bos_twice",
        "The first prompt begins with two start tokens and lost its end.",
        (r"\bids?\b|token|\bbos\b|shift|start",),
        "ids",
    ),
    Bug(
        "mask_from_pad_id",
        "The mask is made from the pad id, which the end token has too.",
        (r"mask",),
        "inputs",
    ),
    Bug("padding_ignored", "The padding mask is not applied.", (r"mask|padd",)),
    Bug(
        "window_one_longer",
        "The window has one key more.",
        (r"window|off.by.one|mask|band",),
    ),
    Bug(
        "causal_missing",
        "The window reaches as far to later tokens.",
        (r"causal|future|later|mask|triang|bidirectional",),
    ),
    Bug(
        "masked_scores_zero",
        "The second layer sets hidden scores to 0 before the softmax.",
        (r"mask|-inf|minus infinity",),
    ),
    Bug(
        "empty_rows_average",
        "Pads, which see nothing, average all values.",
        (r"mask|empty|padd|rows? (that|without|which)|-inf|nothing|uniform|average|mean of",),
    ),
    Bug(
        "rope_interleaved",
        "RoPE rotates neighbours.",
        (r"half|halves|interleav|neighbou?r|adjacent",),
    ),
    Bug(
        "rope_width",
        "RoPE's exponents divide by width / heads, not by the head's channels.",
        (r"frequenc|exponent|theta|\bbase\b|inv_freq|rope.*(dim|width|channels)",),
    ),
    Bug(
        "rope_keys_one_late",
        "Keys are rotated as if one position later.",
        (r"position|offset|off.by.one|roll|shift",),
    ),
    Bug(
        "groups_tiled",
        "Keys and values are tiled over the query heads, not repeated.",
        (r"til(e|ing)|repeat|group|interleav|gqa|\bkv\b|heads? (order|of)",),
    ),
    Bug(
        "scale_of_width",
        "Scores are scaled by width / heads.",
        (r"scal(e|ing)|sqrt|root|\*\* ?-0\.5|factor",),
    ),
    Bug(
        "heads_not_moved_back",
        "The second layer joins heads without moving their axis.",
        (r"head|transpos|reshape|layout|\bax[ei]s\b|permut",),
    ),
    Bug("norm_eps", "The norms have eps 1e-6.", (r"\beps",)),
    Bug(
        "norm_layer",
        "The third layer's second norm centers.",
        (r"\bmean|layer ?norm|cent(er|re)|subtract",),
    ),
    Bug("norm_one_plus", "Norms multiply by 1 + weight.", (r"1 ?\+|\+ ?1|\bone\b|plus",)),
    Bug(
        "gate_and_up_swapped",
        "The activation is of up, not of gate.",
        (r"swap|gate.*\bup\b|\bup\b.*gate|order|other (half|factor|branch|operand|part|input)",),
    ),
    Bug(
        "mlp_beside_attention",
        "The second layer's MLP reads the layer's input.",
        (
            r"parallel|beside|residual|(before|without) (the )?att|input of (the )?(block|layer)",
            r"(block|layer)'?s? (own )?input|att\w* .*(missing|skip|not added)|\bL1\b(?!\.)",
        ),
    ),
    Bug(
        "residual_of_norm",
        "The third layer adds attention to the normed input.",
        (r"residual|norm(ed|alized)?\b.*add|add.*norm|skip",),
    ),
    Bug(
        "embeddings_scaled",
        "Embeddings are multiplied by the root of the width.",
        (r"scal(e|ed|ing)|sqrt|root|factor|times|multipl",),
    ),
    Bug(
        "one_layer_too_early",
        "The features are of one layer earlier.",
        (
            r"hidden.?state|too early|too few|fewer|skip|\bL2\b(?!\.)|layers\.1\b(?!\.)",
            r"(one|another|other|wrong|earlier|previous|last|missing) (layer|block)",
            r"(layer|block)s?\b.*(missing|not (run|applied|called))|earlier (value|output)",
        ),
    ),
    Bug(
        "final_norm_applied",
        "The features pass the final norm.",
        (
            r"norm\w*\b.*(appl|extra|should not|remove|not in the ref|one more|\bafter)",
            r"(extra|addition|remove|without|before|final|last).*norm|hidden.?state|norm(ed|ali[sz])",
        ),
    ),
    Bug("scores_f16", "The third layer's scores are float16.", (r"f16|float16|half|precision",)),
)
