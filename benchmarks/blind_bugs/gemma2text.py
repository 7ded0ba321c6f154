"""Gemma 2 as a text encoder in NumPy, as llama.cpp builds its graph.

Weights have the names of GGUF files and the norms' weights are stored with 1 added; values have
the names of the graph's callbacks, with the layer's number after a dash. There is no batch axis:
each prompt, padded on the right, is one run. q, k and v are (tokens, heads, channels), scores
(heads, tokens, tokens). transformers' Gemma2Model is the reference, used as Sana's pipeline does:
the last hidden state of a prompt and of a negative prompt, then both with the negative one first.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma2Config, Gemma2Model
from transformers.models.gemma2 import modeling_gemma2

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

NAME = "gemma2text"
LAYERS, WIDTH, FFN, VOCABULARY = 4, 24, 40, 60
HEADS, KV_HEADS, HEAD = 4, 2, 8
WINDOW, SOFTCAP, QUERY_SCALAR = 5, 4.0, 18  # the scalar is not the size of a head
BASE, EPS = 10000.0, 1e-6
PAD, EOS, BOS = 0, 1, 2
TOKENS, VALID = 12, (10, 8)  # length, and tokens of the prompt and of the negative prompt


def reference(folder: Path, dtype: str) -> None:
    """The encoding of both prompts in SanaPipeline, from ids to hidden states."""
    sizes: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=FFN)
    sizes |= dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=HEAD)
    sizes |= dict(num_key_value_heads=KV_HEADS, max_position_embeddings=64, rms_norm_eps=EPS)
    sizes |= dict(query_pre_attn_scalar=QUERY_SCALAR, sliding_window=WINDOW)
    sizes |= dict(attn_logit_softcapping=SOFTCAP, attn_implementation="eager")
    config = Gemma2Config(**sizes)
    model = randomised(lambda: Gemma2Model(config), 83)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.mul_(5)  # 1 plus a quarter of noise
        if "q_proj" in name or "k_proj" in name:
            parameter.mul_(5)  # scores come near to the cap
        if "gate_proj" in name or "up_proj" in name:
            parameter.mul_(3)
        if "embed_tokens" in name:
            parameter.mul_(4)
    model = saved(model, folder, "text_encoder", dtype)
    model.rotary_emb = modeling_gemma2.Gemma2RotaryEmbedding(config)  # keeps float32, as loaded
    generator = torch.Generator().manual_seed(84)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="text_encoder", weights=True),
        watch_function(recorder, modeling_gemma2, "apply_rotary_pos_emb"),
        watch_function(recorder, modeling_gemma2, "eager_attention_forward"),
    ):
        states: list[torch.Tensor] = []
        for which, valid in zip(("prompt", "negative_prompt"), VALID, strict=True):
            ids = torch.randint(BOS + 1, VOCABULARY, (1, TOKENS), generator=generator)
            ids[:, 0] = BOS
            ids[:, valid:] = PAD
            mask = (torch.arange(TOKENS) < valid).long()[None]
            recorder.record(f"pipeline/{which}_ids", ids, kind="input")
            recorder.record(f"pipeline/{which}_attention_mask", mask, kind="input")
            embeds = model(ids, attention_mask=mask, use_cache=False)[0]
            recorder.record(f"pipeline/{which}_embeds", embeds)
            states.insert(0, embeds)
        recorder.record("pipeline/encoder_hidden_states", torch.cat(states))


def gguf(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters under the names of a GGUF file; matrices stay (out, in), norms get their 1."""
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    if bug == "norm_names_of_llama":  # there, post_attention_layernorm is the norm of the MLP
        names["post_attention_layernorm"] = "ffn_norm"
        names["pre_feedforward_layernorm"] = "post_attention_norm"
    if bug == "gate_is_up":
        names["mlp.gate_proj"], names["mlp.up_proj"] = "ffn_up", "ffn_gate"
    new = {"token_embd.weight": w["embed_tokens.weight"]}
    for i in range(LAYERS):
        for old, name in names.items():
            x = w[f"layers.{i}.{old}.weight"]
            if name.endswith("norm"):
                x = x + np.float32(1)
            if bug == "queries_permuted" and name in ("attn_q", "attn_k"):
                x = x.reshape(-1, 2, HEAD // 2, WIDTH).swapaxes(1, 2).reshape(x.shape)
            new[f"blk.{i}.{name}.weight"] = x
    one = 0 if bug == "output_norm_without_one" else 1
    new["output_norm.weight"] = w["norm.weight"] + np.float32(one)
    if bug == "values_are_keys":
        new["blk.2.attn_v.weight"] = new["blk.2.attn_k.weight"]
    if bug == "down_of_layer_before":
        new["blk.3.ffn_down.weight"] = new["blk.2.ffn_down.weight"]
    return new


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3)))


class Gemma2:
    """The graph of one prompt; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}

    def cb(self, x: Array, name: str, i: int | None = None, kind: str = "activation") -> Array:
        """Records `x` under the name of the graph's node."""
        whole = x.dtype.kind == "i"
        name = name if i is None else f"{name}-{i}"
        taps.tap(name, x if whole else x.astype(self.dtype), kind=kind)
        return x

    def norm(self, x: Array, name: str) -> Array:
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(EPS))
        return self.r(y * self.p[f"{name}.weight"])

    def mul_mat(self, name: str, x: Array) -> Array:
        return self.r(x @ self.p[f"{name}.weight"].T)

    def rope_table(self) -> tuple[Array, Array]:
        """Cosines and sines of (tokens, half of a head's channels)."""
        bug = self.bug
        base = 1e6 if bug == "rope_base_of_gemma3" else BASE
        size = WIDTH // HEADS if bug == "rope_exponents_of_width" else HEAD
        exponents = np.arange(0, HEAD, 2, dtype=np.float32) / np.float32(size)
        theta = (1 / np.float32(base) ** exponents).astype(np.float32)
        angles = np.arange(TOKENS, dtype=np.float32)[:, None] * theta
        return self.r(np.cos(angles)), self.r(np.sin(angles))

    def rope(self, x: Array) -> Array:
        """Turns each channel of the first half of a head with that of the second half."""
        cos, sin = (y[:, None] for y in self.rope_table())
        if self.bug == "rope_neighbours":
            a, b = x[..., ::2], x[..., 1::2]
            return self.r(np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape))
        a, b = np.split(x, 2, -1)
        return self.r(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1))

    def allowed(self, i: int, present: Array) -> Array:
        """Which keys (columns) a query (row) of layer i sees."""
        bug = self.bug
        q, k = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None]
        seen = k <= q if bug != "mask_not_causal" else np.full((TOKENS, TOKENS), True)
        if bug != "padding_not_masked":
            seen = seen & (present[None] > 0)
        sliding = i % 2 == (1 if bug == "sliding_layers_odd" else 0)
        if sliding and bug != "no_sliding_window":
            window = WINDOW + 1 if bug == "window_one_longer" else WINDOW
            seen = seen & (q - k < window)
        return seen

    def attention(self, x: Array, i: int, present: Array) -> Array:
        bug, name, cb = self.bug, f"blk.{i}", self.cb
        q = cb(self.mul_mat(f"{name}.attn_q", x).reshape(TOKENS, HEADS, HEAD), "Qcur", i)
        k = cb(self.mul_mat(f"{name}.attn_k", x).reshape(TOKENS, KV_HEADS, HEAD), "Kcur", i)
        v = cb(self.mul_mat(f"{name}.attn_v", x).reshape(TOKENS, KV_HEADS, HEAD), "Vcur", i)
        q, k = cb(self.rope(q), "Qcur_rope", i), cb(self.rope(k), "Kcur_rope", i)
        scale = np.float32((HEAD if bug == "scale_of_head" else QUERY_SCALAR) ** -0.5)
        if bug != "softcap_before_scale":
            q = cb(self.r(q * scale), "Qcur_scaled", i)
        groups = HEADS // KV_HEADS
        if bug == "kv_heads_tiled":
            k, v = np.tile(k, (1, groups, 1)), np.tile(v, (1, groups, 1))
        else:
            k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
        kq = np.einsum("qhd,khd->hqk", q, k)
        mask = np.where(self.allowed(i, present), np.float32(0), np.float32(-3e38))
        if bug == "softcap_after_mask":
            kq = kq + mask
        if bug != "no_softcap":
            kq = np.float32(SOFTCAP) * np.tanh(kq / np.float32(SOFTCAP))
        if bug == "softcap_before_scale":
            kq = kq * scale
        if bug != "softcap_after_mask":
            kq = kq + mask
        e = np.exp(kq - kq.max(-1, keepdims=True))
        kq = cb(self.r(e / e.sum(-1, keepdims=True)), "kq_soft_max", i)
        kqv = cb(self.r(np.einsum("hqk,khd->qhd", kq, v)).reshape(TOKENS, -1), "kqv_out", i)
        return cb(self.mul_mat(f"{name}.attn_output", kqv), "attn_out", i)

    def ffn(self, x: Array, i: int) -> Array:
        bug, name, cb = self.bug, f"blk.{i}", self.cb
        up = cb(self.mul_mat(f"{name}.ffn_up", x), "ffn_up", i)
        gate = cb(self.mul_mat(f"{name}.ffn_gate", x), "ffn_gate", i)
        y = gate / (1 + np.exp(-gate)) if bug == "ffn_silu" else gelu(gate)
        y = cb(self.r(y), "ffn_gelu", i)
        y = cb(self.r(y * up), "ffn_gate_par", i)
        return cb(self.mul_mat(f"{name}.ffn_down", y), "ffn_out", i)

    def layer(self, inp: Array, i: int, present: Array) -> Array:
        bug, name, cb = self.bug, f"blk.{i}", self.cb
        cur = cb(self.norm(inp, f"{name}.attn_norm"), "attn_norm", i)
        cur = self.attention(cur, i, present)
        if bug == "post_norm_of_sum":
            sa_out = cb(self.norm(self.r(inp + cur), f"{name}.post_attention_norm"), "sa_out", i)
        else:
            cur = cb(self.norm(cur, f"{name}.post_attention_norm"), "attn_post_norm", i)
            sa_out = cb(self.r(inp + cur), "sa_out", i)
        cur = cb(self.norm(sa_out, f"{name}.ffn_norm"), "ffn_norm", i)
        cur = self.ffn(cur, i)
        cur = cb(self.norm(cur, f"{name}.post_ffw_norm"), "ffn_post_norm", i)
        kept = inp if bug == "ffn_residual_of_input" else sa_out
        return cb(self.r(kept + cur), "l_out", i)

    def __call__(self, tokens: Array, present: Array) -> Array:
        bug, cb = self.bug, self.cb
        cur = cb(self.p["token_embd.weight"][tokens], "inp_embd")
        if bug != "embedding_not_scaled":
            cur = cb(self.r(cur * self.r(math.sqrt(WIDTH))), "inp_scaled")
        for i in range(LAYERS):
            cur = self.layer(cur, i, present)
        if bug == "result_not_normed":
            return cur
        return cb(self.norm(cur, "output_norm"), "result_norm")


def tokenized(ids: Array, valid: int, bug: str | None) -> tuple[Array, Array]:
    """A prompt's ids with BOS in front and padding after them, and which are no padding."""
    text = ids[1:valid]
    text = text if bug == "bos_missing" else np.concatenate([[BOS], text])
    fill = np.full(TOKENS - len(text), EOS if bug == "padded_with_eos" else PAD)
    both = [fill, text] if bug == "padded_on_the_left" else [text, fill]
    mask = np.concatenate([np.full(len(x), x is text) for x in both])
    return np.concatenate(both).astype(np.int32), mask.astype(np.int32)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    model = Gemma2(gguf(checkpoint(folder, "text_encoder"), bug), bug, dtype)
    kept = {k: v.astype(dtype) for k, v in model.p.items()} if weights else None
    blocks = ("inp_*", "l_out-?", "result_norm", "embeddings")
    with port_trace(out, dump, dtype, blocks, kept):
        states: list[Array] = []
        for which, valid in zip(("prompt", "negative_prompt"), VALID, strict=True):
            tokens, mask = tokenized(value(f"pipeline/{which}_ids")[0], valid, bug)
            model.cb(tokens, "inp_tokens", kind="input")
            model.cb(mask, "inp_mask", kind="input")
            states.append(model(tokens, mask))
        if bug != "prompt_first":
            states.reverse()
        model.cb(np.stack(states), "embeddings")


NO_COUNTERPART: tuple[str, ...] = (
    r"^inp_embd$",  # the reference's embedding is scaled already
    r"^Qcur_scaled-\d$",  # the reference scales the scores
)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|interchang|mix(ed)? up|wrong way"
BUGS = (
    Bug(
        "norm_names_of_llama",
        "The norm after attention and the norm before the MLP have each other's weights.",
        (LOADED, SWAPPED, r"post_attention_norm.*ffn_norm|ffn_norm.*post_attention_norm"),
        "weights",
    ),
    Bug(
        "output_norm_without_one",
        "The last norm multiplies by its weight, not by the weight plus 1.",
        (r"(1|one) (\+|plus)|(\+|plus|add\w*|minus|offset (of|by)) ?(1|one)\b", LOADED, r"offset"),
        "weights",
    ),
    Bug(
        "queries_permuted",
        "Weights of q and k are permuted as Llama's, for pairs of neighbouring channels.",
        (LOADED, SWAPPED, r"interleav|neighbou?r|adjacent|half|halves|layout"),
        "weights",
    ),
    Bug(
        "gate_is_up",
        "The MLP's gate and up projections have each other's weights.",
        (LOADED, SWAPPED, r"gate.*\bup\b|\bup\b.*gate"),
        "weights",
    ),
    Bug(
        "values_are_keys",
        "Layer 2's values have the weights of its keys.",
        (LOADED, r"dupl|another|same (matrix|tensor)|values?\b.*keys?\b|keys?\b.*values?\b"),
        "weights",
    ),
    Bug(
        "down_of_layer_before",
        "Layer 3's down projection has the weights of layer 2's.",
        (LOADED, r"(another|other|wrong|previous) (layer|block)|dupl|index"),
        "weights",
    ),
    Bug(
        "bos_missing",
        "Prompts lack the token that begins them, so all tokens are one place early.",
        (r"\bbos\b|begin|start (of|token)|first token|special token", r"token|\bids?\b|\binput"),
        "ids",
    ),
    Bug(
        "padded_with_eos",
        "Prompts are filled with the token that ends a text, not with that of padding.",
        (r"\bpad|\beos\b|end.of", r"token|\bids?\b|\binput"),
        "ids",
    ),
    Bug(
        "padded_on_the_left",
        "Prompts are padded on the left, not on the right.",
        (r"\bpad|\bleft\b|\bright\b|\bshifted\b", r"token|\bids?\b|\binput"),
        "ids",
    ),
    Bug(
        "embedding_not_scaled",
        "Embeddings are not multiplied by the root of the width.",
        (r"\bscal(e|ed|ing)\b|sqrt|\broot\b|factor|multipl|4\.9|4\.89|0\.204",),
    ),
    Bug(
        "mask_not_causal",
        "Attention is not causal: tokens see those after them.",
        (r"caus|bidirectional|future|(later|following) tokens|triang|mask",),
    ),
    Bug(
        "padding_not_masked",
        "Padding is not masked in attention.",
        (r"padd|mask",),
    ),
    Bug(
        "sliding_layers_odd",
        "The sliding window is in layers 1 and 3, not in 0 and 2.",
        (r"sliding|window|mask|local|\bodd\b|\beven\b|alternat",),
    ),
    Bug(
        "no_sliding_window",
        "No layer has the sliding window; all see the whole prompt.",
        (r"sliding|window|mask|local",),
    ),
    Bug(
        "window_one_longer",
        "The sliding window has one token more.",
        (r"sliding|window|mask|local|off.by.one",),
    ),
    Bug(
        "no_softcap",
        "Attention's scores are not capped.",
        (r"soft.?cap|\bcap(s|ped|ping)?\b|tanh|clamp|\bclip|bound",),
    ),
    Bug(
        "softcap_after_mask",
        "The mask is added before the cap, so masked keys get minus the cap and are seen.",
        (r"soft.?cap|\bcap(s|ped|ping)?\b|tanh|mask|leak",),
    ),
    Bug(
        "softcap_before_scale",
        "Scores are capped before they are scaled.",
        (
            r"soft.?cap|\bcap(s|ped|ping)?\b|tanh",
            r"\bscal(e|ed|ing)\b.*(order|after|before|late)|(order|after|before|late).*\bscal(e|ed)",
        ),
    ),
    Bug(
        "scale_of_head",
        "Scores are scaled by the root of a head's size, not of query_pre_attn_scalar.",
        (r"\bscal(e|ed|ing|ar)\b|sqrt|\broot\b|temperature|query_pre_attn|head.?(dim|size)",),
    ),
    Bug(
        "rope_neighbours",
        "RoPE turns pairs of neighbouring channels, not a head's first half with its second.",
        (r"interleav|neighbou?r|adjacent|half|halves|\bpair|rotate_half|neox",),
    ),
    Bug(
        "rope_base_of_gemma3",
        "RoPE's base is 1000000, not 10000.",
        (r"\bbase\b|theta|frequenc|wavelength|1e6|1000000|10000",),
    ),
    Bug(
        "rope_exponents_of_width",
        "RoPE's exponents divide by width / heads, not by the size of a head.",
        (r"frequenc|exponent|theta|\bbase\b|wavelength|divi(de|sor)|denominator",),
    ),
    Bug(
        "kv_heads_tiled",
        "Query head h reads key head h modulo their number, not h divided by the group's size.",
        (
            r"\bgqa\b|grouped|tile|repeat|interleav|(key|kv|query).{0,20}heads?|heads? (order|of)",
            r"order of (the )?heads",
        ),
    ),
    Bug(
        "ffn_silu",
        "The MLP's activation is SiLU, not GELU.",
        (r"silu|swish|gelu|activation",),
    ),
    Bug(
        "post_norm_of_sum",
        "The norm after attention is taken of the sum with the residual.",
        (
            r"residual|skip connection|shortcut",
            r"(after|of|before) the (sum|addition)|post.?norm",
            r"norm\w* .*(add|sum)|(add|sum)\w* .*norm",
        ),
    ),
    Bug(
        "ffn_residual_of_input",
        "The MLP's result is added to the layer's input, so that attention's is lost.",
        (
            r"residual|skip connection|shortcut",
            r"(block|layer)'?s? (own )?input|input of (the )?(block|layer)",
        ),
    ),
    Bug(
        "result_not_normed",
        "The result is the last layer's, without the last norm.",
        (
            r"norm.*(missing|not applied|lack|without|skip|omit|absent|left out|identity)",
            r"\b(missing|lack|without|skip|omit|before|no|not|last|final|output)\w*\b.*norm",
        ),
    ),
    Bug(
        "prompt_first",
        "The result has the prompt before the negative prompt.",
        (SWAPPED, r"batch|negative|\bfirst\b|\brows?\b|sequence"),
    ),
)
