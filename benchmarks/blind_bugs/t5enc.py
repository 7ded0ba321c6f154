"""T5's encoder (v1.1: gated GELU) in NumPy, by the tensor names of llama.cpp, kernels as in T5X.

The kernels of q, k, v are (in, heads, channels), that of the output (heads, channels, out), those
of the MLP (in, out); the table of distances is (heads, buckets). Two prompts, the second shorter;
a pipeline takes the second as the negative one and makes two pictures.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import T5Config, T5EncoderModel

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

NAME = "t5enc"
WIDTH, HIDDEN, LAYERS, HEADS, HEAD = 32, 64, 4, 4, 6
BUCKETS, FARTHEST, EPS, WORDS, TOKENS, PICTURES = 16, 14, 1e-6, 60, 16, 2
PAD, END = 0, 1
IDS = (
    (37, 4, 22, 51, 8, 4, 19, 45, 13, 30, 58, 7, 26, 41, 11, END),
    (16, 53, 29, 5, 34, 48, 10, 21, END, *(PAD,) * 7),
)


def made() -> T5EncoderModel:
    """The model; scores and distances count for more than in an untrained one."""
    config: dict[str, Any] = dict(vocab_size=WORDS, d_model=WIDTH, d_kv=HEAD, d_ff=HIDDEN)
    config |= dict(num_layers=LAYERS, num_heads=HEADS, feed_forward_proj="gated-gelu")
    config |= dict(relative_attention_num_buckets=BUCKETS, layer_norm_epsilon=EPS)
    config |= dict(relative_attention_max_distance=FARTHEST, pad_token_id=PAD, eos_token_id=END)
    model = T5EncoderModel(T5Config(**config))
    larger = {"shared": 0.3, ".q.": 3.0, "relative": 4.0, "wi_": 1.6, ".v.": 1.5}
    for name, parameter in model.named_parameters():
        parameter.data.mul_(next((n for end, n in larger.items() if end in name), 1.0))
    return model


def reference(folder: Path, dtype: str) -> None:
    """One call with both prompts, then what a pipeline makes of them."""
    model = saved(randomised(made, 33), folder, "text_encoder", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="text_encoder", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        ids = torch.tensor(IDS)
        mask = (ids != PAD).long()
        recorder.record("pipeline/input_ids", ids, kind="ids")
        recorder.record("pipeline/attention_mask", mask, kind="input")
        embeds = model(ids, attention_mask=mask).last_hidden_state
        positive, negative = embeds.repeat_interleave(PICTURES, 0).chunk(2)
        recorder.record("pipeline/prompt_embeds", torch.cat([negative, positive]))


def q8_0(x: Array) -> Array:
    """What is left of weights (in, out) in blocks of 32 inputs with one scale each."""
    rows = x.T.reshape(-1, 32)
    scale = (np.abs(rows).max(1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    return (np.round(rows / scale) * scale).reshape(x.T.shape).T


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port."""
    table = w["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    table = table.reshape(HEADS, BUCKETS) if bug == "rel_b_reshaped" else table.T
    new = {
        "token_embd.weight": w["shared.weight"],
        "enc.blk.0.attn_rel_b.weight": table,
        "enc.output_norm.weight": w["encoder.final_layer_norm.weight"],
    }
    for i in range(LAYERS):
        source = i - 1 if bug == "last_block_is_block_before" and i == LAYERS - 1 else i
        old, b = f"encoder.block.{source}.layer", f"enc.blk.{i}"
        for letter in "qkv":
            kernel = w[f"{old}.0.SelfAttention.{letter}.weight"].T
            new[f"{b}.attn_{letter}.weight"] = kernel.reshape(WIDTH, HEADS, HEAD)
        kernel = w[f"{old}.0.SelfAttention.o.weight"].T
        if bug == "o_kernel_channels_first" and i == 2:
            kernel = kernel.reshape(HEAD, HEADS, WIDTH).swapaxes(0, 1)
        new[f"{b}.attn_o.weight"] = kernel.reshape(HEADS, HEAD, WIDTH)
        new[f"{b}.attn_norm.weight"] = w[f"{old}.0.layer_norm.weight"]
        new[f"{b}.ffn_norm.weight"] = w[f"{old}.1.layer_norm.weight"]
        names = ("wi_1", "wi_0") if bug == "gate_and_up_exchanged" else ("wi_0", "wi_1")
        for end, name in zip(("gate", "up", "down"), (*names, "wo"), strict=True):
            new[f"{b}.ffn_{end}.weight"] = w[f"{old}.1.DenseReluDense.{name}.weight"].T

    def exchange(a: str, b: str) -> None:
        new[a], new[b] = new[b], new[a]

    if bug == "q_and_k_exchanged":
        exchange("enc.blk.1.attn_q.weight", "enc.blk.1.attn_k.weight")
    if bug == "norms_exchanged":
        exchange("enc.blk.1.attn_norm.weight", "enc.blk.1.ffn_norm.weight")
    if bug == "ffn_norm_left_at_one":
        new["enc.blk.2.ffn_norm.weight"] = np.ones(WIDTH, np.float32)
    if bug == "norms_one_plus":
        new |= {name: 1 + value for name, value in new.items() if "_norm." in name}
    if bug == "ffn_down_in_q8_0":
        new["enc.blk.0.ffn_down.weight"] = q8_0(new["enc.blk.0.ffn_down.weight"])
    return {name: np.ascontiguousarray(value) for name, value in new.items()}


def tokenized(ids: Array, bug: str | None) -> tuple[Array, Array]:
    """Ids and mask (1 of a token, 0 of a pad) as this program's tokenizer gives them."""
    prompts = [[int(x) for x in row if x != PAD] for row in ids]
    if bug == "end_missing":
        prompts = [p[:-1] for p in prompts]
    if bug == "long_prompt_cut":
        prompts = [p if len(p) <= 13 else [*p[:12], END] for p in prompts]
    pad = END if bug == "pads_are_end" else PAD
    rows, masks = [], []
    for p in prompts:
        pads = TOKENS - len(p)
        seen = [1] * len(p)
        if bug == "end_masked":
            seen[-1] = 0
        if bug == "padded_left":
            rows.append([pad] * pads + p)
            masks.append([0] * pads + seen)
        else:
            rows.append(p + [pad] * pads)
            masks.append(seen + [0] * pads)
    return np.array(rows), np.array(masks)


class Encoder:
    """The forward pass; `q` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.q, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.q(v) for k, v in p.items()}

    def tap(self, name: str, x: Array) -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype))
        return x

    def product(self, name: str, formula: str, x: Array) -> Array:
        y = np.einsum(formula, x, self.p[f"{name}.weight"], optimize=True)
        return self.tap(name, self.q(y))

    def norm(self, name: str, x: Array) -> Array:
        bug = self.bug
        if bug == "norm_centred" and name == "enc.blk.1.ffn_norm":
            x = x - x.mean(-1, keepdims=True)
        squares = (x * x).mean(-1, keepdims=True)
        if bug == "norm_sum_for_mean" and name == "enc.blk.3.attn_norm":
            squares = squares * WIDTH
        eps = 1e-5 if bug == "norm_eps" else EPS
        x = self.q(x / np.sqrt(squares + np.float32(eps)))
        return self.tap(name, self.q(x * self.p[f"{name}.weight"]))

    def buckets(self) -> Array:
        """The row of the table for each (query, key)."""
        bug, place = self.bug, np.arange(TOKENS)
        away = place[None, :] - place[:, None]
        if bug == "distance_sign_flipped":
            away = -away
        if bug == "keys_one_late":
            away = away + 1
        farthest = 128 if bug == "max_distance_default" else FARTHEST
        if bug == "buckets_of_decoder":
            count, first, away = BUCKETS, np.zeros_like(away), np.maximum(-away, 0)
        else:
            count = BUCKETS // 2
            after = away >= 0 if bug == "zero_counted_as_after" else away > 0
            first, away = after * count, np.abs(away)
        exact = count // 2
        far = np.log(np.maximum(away, 1).astype(np.float32) / exact)
        far = far / np.log(farthest / exact) * (count - exact)
        whole = np.rint(far) if bug == "far_buckets_rounded" else np.floor(far)
        far = np.minimum(exact + whole.astype(int), count - 1)
        return first + np.where(away < exact, away, far)

    def bias(self) -> Array:
        """(heads, queries, keys)."""
        rows = self.buckets()
        taps.tap("enc.pos_bucket", rows)
        return self.tap("enc.pos_bias", self.p["enc.blk.0.attn_rel_b.weight"][:, rows])

    def hidden(self, mask: Array) -> Array:
        """What is added to the scores, as (prompts, 1, queries or 1, keys)."""
        bug = self.bug
        seen = (mask > 0)[:, None, None, :]
        if bug == "padding_visible":
            seen = np.ones_like(seen)
        if bug == "later_tokens_hidden":
            seen = seen & (np.arange(TOKENS)[:, None] >= np.arange(TOKENS))
        if bug == "mask_added_as_ones":
            return seen.astype(np.float32)
        return np.where(seen, np.float32(0), np.float32(-np.inf))

    def attention(self, b: str, x: Array, away: Array | None, hidden: Array) -> Array:
        bug = self.bug
        q, k, v = (self.product(f"{b}.attn_{s}", "btd,dhc->bhtc", x) for s in "qkv")
        kq = np.einsum("bhqc,bhkc->bhqk", q, k)
        if bug == "scores_scaled":
            kq = kq * np.float32(HEAD**-0.5)
        if away is not None:
            kq = kq + away
        kq = kq + hidden
        if bug == "scores_float16" and b == "enc.blk.1":
            kq = kq.astype(np.float16).astype(np.float32)
        axis = -2 if bug == "softmax_over_queries" and b == "enc.blk.3" else -1
        top = kq.max(axis, keepdims=True)
        e = np.exp(kq - np.where(np.isfinite(top), top, 0))
        shares = e / np.maximum(e.sum(axis, keepdims=True), np.float32(1e-30))
        if bug == "pads_ask_nothing":  # their rows are left empty
            shares = shares * np.isfinite(hidden).swapaxes(-1, -2)
        self.tap(f"{b}.kq_soft_max", self.q(shares))
        y = self.tap(f"{b}.kqv", self.q(np.einsum("bhqk,bhkc->bhqc", shares, v)))
        if bug == "heads_not_moved_back" and b == "enc.blk.2":
            y = y.reshape(len(x), TOKENS, HEADS, HEAD).swapaxes(1, 2)
        return self.product(f"{b}.attn_o", "bhtc,hcd->btd", y)

    def gelu(self, x: Array) -> Array:
        if self.bug == "gelu_of_erf":
            erf = torch.special.erf(torch.from_numpy(x / np.float32(2**0.5))).numpy()
            return x * (1 + erf) / 2
        cubic = 0.0044715 if self.bug == "gelu_constant" else 0.044715
        inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(cubic) * x**3)
        return x * (1 + np.tanh(inner)) / 2

    def feed_forward(self, b: str, x: Array) -> Array:
        gate = self.product(f"{b}.ffn_gate", "btd,df->btf", x)
        up = self.product(f"{b}.ffn_up", "btd,df->btf", x)
        if self.bug == "gelu_of_product":
            y = self.q(self.gelu(gate * up))
        else:
            y = self.q(self.q(self.gelu(gate)) * up)
        return self.product(f"{b}.ffn_down", "btf,fd->btd", self.tap(f"{b}.ffn_gate_par", y))

    def block(self, b: str, x: Array, away: Array | None, hidden: Array) -> Array:
        bug = self.bug
        normed = self.norm(f"{b}.attn_norm", x)
        y = self.attention(b, normed, away, hidden)
        start = normed if bug == "attention_added_to_norm" and b == "enc.blk.1" else x
        middle = self.tap(f"{b}.ffn_inp", self.q(start + y))
        beside = bug == "ffn_beside_attention" and b == "enc.blk.2"
        y = self.feed_forward(b, self.norm(f"{b}.ffn_norm", x if beside else middle))
        return self.tap(f"{b}.l_out", self.q(middle + y))

    def embedded(self, ids: Array) -> Array:
        bug = self.bug
        x = self.p["token_embd.weight"][ids]
        if bug == "embeddings_times_root":
            x = self.q(x * np.float32(WIDTH**0.5))
        if bug == "pads_embedded_as_zero":
            x = x * (ids != PAD)[..., None]
        if bug == "sinusoids_added":
            rates = 1e4 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
            angles = np.arange(TOKENS)[:, None] * rates
            x = self.q(x + np.concatenate([np.sin(angles), np.cos(angles)], -1))
        return self.tap("enc.inp_embd", x)

    def __call__(self, ids: Array, mask: Array) -> Array:
        bug = self.bug
        x = self.embedded(ids)
        away, hidden = self.bias(), self.hidden(mask)
        count = LAYERS - (1 if bug == "last_block_not_run" else 0)
        for i in range(count):
            own = bug == "distances_in_first_block_alone" and i > 0
            x = self.block(f"enc.blk.{i}", x, None if own else away, hidden)
        if bug != "output_norm_skipped":
            x = self.norm("enc.output_norm", x)
        return self.tap("result_embd", x)

    def conditioning(self, x: Array, mask: Array) -> Array:
        """Two pictures of each, the negative prompt (the second) first."""
        bug = self.bug
        if bug == "pads_zeroed":  # as Wan does
            x = x * (mask > 0)[..., None]
        if bug == "negative_prompt_last":
            x = x[::-1]
        if bug == "pictures_tiled":
            return self.tap("cond", np.tile(x[::-1], (PICTURES, 1, 1)))
        return self.tap("cond", np.repeat(x[::-1], PICTURES, 0))


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
    ids, mask = tokenized(value("pipeline/input_ids"), bug)
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("tokens.*", "enc.inp_embd", "enc.blk.?.l_out", "result_embd", "cond")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("tokens.ids", ids, kind="ids")
        taps.tap("tokens.mask", mask, kind="input")
        net.conditioning(net(ids, mask), mask)


NO_COUNTERPART: tuple[str, ...] = (r"enc\.blk\.\d\.kq_soft_max",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|\border\b|permut|revers|mixed up|interchang"
TOKENS_OF = r"\b(token|input).?ids?\b|\bids\b|tokeni[sz]"
CAUSAL = (
    r"causal|future|later (tokens|keys)|uni-?directional|\bahead\b|triang|only (look|see)s? back"
)
BUGS = (
    Bug(
        "q_and_k_exchanged",
        "Block 1 has the kernels of q and k exchanged.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "o_kernel_channels_first",
        "The output kernel of block 2 was read as (channels, heads, out).",
        (
            LOADED,
            SWAPPED,
            r"channels?,? (first|heads)",
            r"transpos|interleav|layout|\bax[ei]s\b|reshap|heads? (major|first|order)",
        ),
        "weights",
    ),
    Bug(
        "gate_and_up_exchanged",
        "wi_0 and wi_1 are exchanged, so the GELU is of the linear half.",
        (LOADED, SWAPPED, r"gate.*\bup\b|wi_0.*wi_1|wi_1.*wi_0|\bup\b.*gate"),
        "weights",
    ),
    Bug(
        "rel_b_reshaped",
        "The table of distances was reshaped to (heads, buckets), not transposed.",
        (LOADED, r"transpos|reshap|layout|\bax[ei]s\b", SWAPPED),
        "weights",
    ),
    Bug(
        "last_block_is_block_before",
        "The last block has the weights of the block before.",
        (LOADED, r"dupl|twice|(another|other|previous|same) (block|layer)|(block|layer) before"),
        "weights",
    ),
    Bug(
        "norms_exchanged",
        "Block 1 has the gains of its two norms exchanged.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "ffn_norm_left_at_one",
        "The gain of block 2's second norm was not loaded and stayed one.",
        (
            LOADED,
            r"\bones\b|(is|at|to|be|stayed|equals?) (1|one)\b|all.?one",
            r"initial|default|missing|\bgain\b",
        ),
        "weights",
    ),
    Bug(
        "norms_one_plus",
        "One was added to all gains, as Gemma's need it.",
        (
            LOADED,
            r"1 ?\+|\+ ?1|(add|plus|minus|subtract)\w*( by)? (1|one)\b|one (is |was )?(added|too)",
            r"plus|gemma|offset",
        ),
        "weights",
    ),
    Bug(
        "ffn_down_in_q8_0",
        "The last kernel of block 0's MLP is quantized to 8 bits.",
        (LOADED, r"quanti|q8|int8|8.?bits?|precision|round"),
        "weights",
    ),
    Bug(
        "end_missing",
        "Prompts lack the end token.",
        (TOKENS_OF, r"\beo[st]\b|\bend\b|</s>|special"),
        "ids",
    ),
    Bug(
        "long_prompt_cut",
        "The first prompt is cut to 13 tokens.",
        (TOKENS_OF, r"truncat|\bcut\b|\bmax(imum)?.?length|too short|shorten"),
        "ids",
    ),
    Bug(
        "padded_left",
        "The second prompt is padded on the left.",
        (TOKENS_OF, r"padd|\bleft\b|\broll|shift|\bside\b"),
        "ids",
    ),
    Bug(
        "pads_are_end",
        "The second prompt is padded with the end token.",
        (TOKENS_OF, r"padd|pad_token|\beo[st]\b|end token"),
        "ids",
    ),
    Bug(
        "end_masked",
        "The mask leaves out the end token.",
        (r"mask|off.by.one|\bend token|\beo[st]\b|last token|\blengths?\b",),
        "inputs",
    ),
    Bug(
        "embeddings_times_root",
        "Embeddings are multiplied by the root of the width.",
        (r"scal(e|ed|ing)|sqrt|root|factor|times|multipl|5\.6[56]",),
    ),
    Bug(
        "pads_embedded_as_zero",
        "Pads have an embedding of zeros.",
        (r"padd|pads?\b|pad_token|zero|token 0|row 0|id 0",),
    ),
    Bug(
        "sinusoids_added",
        "Sinusoids of the position are added to the embeddings.",
        (r"sinus|absolute|position|\bsine|added to|pos_?emb",),
    ),
    Bug(
        "buckets_of_decoder",
        "Distances have the buckets of a decoder, which only looks back.",
        (
            CAUSAL,
            r"bi-?direction|(of|for|in) (a|the) decoder\b",
            r"one.?sided|both (sides|directions)|all (the )?buckets",
        ),
    ),
    Bug(
        "distance_sign_flipped",
        "Distances are query minus key.",
        (r"\bsign|flip|negat|transpos|query ?(-|minus)|direction|mirror|opposite", SWAPPED),
    ),
    Bug(
        "max_distance_default",
        "The farthest distance is 128, T5's default, not this model's 14.",
        (
            r"\b128\b|\b14\b|farthest|max(imum|imal)?.?distance",
            r"logarithm|\blog\b|far (keys|buckets)",
        ),
    ),
    Bug(
        "far_buckets_rounded",
        "Buckets of far keys are rounded, not truncated.",
        (r"round|truncat|floor|logarithm|\blog\b|integer|\bint\b|far (keys|buckets)",),
    ),
    Bug(
        "zero_counted_as_after",
        "A token's distance to itself is in the later half of the buckets.",
        (r"diagonal|zero|>=|\bitself\b|own (position|place)|off.by.one|distance 0",),
    ),
    Bug(
        "keys_one_late",
        "Distances are one too large.",
        (r"off.by.one|offset|\broll|shift|one (too|position|place|token|late|more)|\+ ?1\b",),
    ),
    Bug(
        "distances_in_first_block_alone",
        "Only the first block adds the bias of distances.",
        (
            r"shared|every (block|layer)|all (blocks|layers)|only (in )?(the )?first",
            r"(first|other|later) (block|layer)s? (alone|only)",
            r"bias.*(missing|not (added|applied|used)|lack|without|dropped)",
            r"(missing|not (added|applied|used)|lack|without|dropped).*bias",
        ),
    ),
    Bug(
        "scores_scaled",
        "Scores are divided by the root of a head's channels; T5's are not.",
        (r"\bscal(e|ed|ing)\b|sqrt|root|factor|\*\* ?-0\.5|temperature|0\.408|2\.449",),
    ),
    Bug(
        "padding_visible",
        "Pads are seen.",
        (r"mask|\bpad(s|ding|ded)?\b",),
    ),
    Bug(
        "later_tokens_hidden",
        "Tokens see no later ones.",
        (CAUSAL, r"mask|(of|for|in) (a|the) decoder\b|later ones"),
    ),
    Bug(
        "mask_added_as_ones",
        "The mask's ones and zeros are added to the scores, not 0 and minus infinity.",
        (r"mask|-inf|minus infinity|\bpad(s|ding|ded)?\b",),
    ),
    Bug(
        "pads_ask_nothing",
        "The attention of pads is left empty.",
        (
            r"mask|\bpad(s|ding|ded)?\b|empty|blank|\bzero(s|ed)?\b",
            r"(rows?|quer(y|ies)).*(nothing|hidden|no keys)",
        ),
    ),
    Bug(
        "heads_not_moved_back",
        "Block 2 joins heads without moving their axis.",
        (r"heads?\b.*(axis|order|layout|move)|transpos|reshape|layout|\bax[ei]s\b|permut",),
    ),
    Bug(
        "softmax_over_queries",
        "The last block's softmax is over queries.",
        (r"soft.?max|\bax[ei]s\b|over (the )?quer|dim(ension)?\b|normali[sz].*(quer|key|axis)",),
    ),
    Bug(
        "scores_float16",
        "Block 1's scores are float16.",
        (r"f16|float16|fp16|half.(precision|float)|precision|round",),
    ),
    Bug("norm_eps", "The norms have eps 1e-5.", (r"\beps",)),
    Bug(
        "norm_centred",
        "Block 1's second norm subtracts the mean.",
        (r"\bmean|layer ?norm\b|cent(er|re)|subtract",),
    ),
    Bug(
        "norm_sum_for_mean",
        "The last block's first norm divides by the root of the sum of squares, not of their mean.",
        (
            r"\bsum\b|\bl2\b|root|sqrt|unit length|euclid|squares|\brms\b",
            r"\bscal(e|ed|ing)\b|factor|5\.6[56]|0\.17[67]",
        ),
    ),
    Bug(
        "gelu_of_erf",
        "The GELU is the one with erf, not its approximation.",
        (r"gelu|\berf\b|tanh|approximat|activation",),
    ),
    Bug(
        "gelu_constant",
        "The GELU has 0.0044715 for 0.044715.",
        (r"gelu|0?\.0+44715|constant|coefficient|cubic|tanh|activation",),
    ),
    Bug(
        "gelu_of_product",
        "The GELU is of gate times up, not of gate alone.",
        (r"gelu|activation|(before|after) (the )?(product|multipl|gat)|gate.*\bup\b|wi_0.*wi_1",),
    ),
    Bug(
        "ffn_beside_attention",
        "Block 2's MLP reads the block's input.",
        (
            r"parallel|beside|residual|(before|without) (the )?att|input of (the )?(block|layer)",
            r"(block|layer)'?s? (own )?input|att\w* .*(missing|skip|not added)",
        ),
    ),
    Bug(
        "attention_added_to_norm",
        "Block 1 adds attention to the normed stream.",
        (
            r"residual|skip connection|normed (input|stream|value)|norm\w*'?s? (output|result)",
            r"(adds?|added|sum).*norm|(block|layer)'?s? (own )?input",
        ),
    ),
    Bug(
        "last_block_not_run",
        "The last block is not run, as for the last but one layer of CLIP.",
        (
            r"hidden.?states? ?(\[|index)|penultimate|clip.?skip|last.but.one|too early|off.by.one",
            r"(one|another|other|wrong|earlier|previous|last|missing) (layer|block)",
            r"(layer|block)s?\b.*(missing|skipp|not (run|applied|called))|too few|fewer",
        ),
    ),
    Bug(
        "output_norm_skipped",
        "The last norm is not applied.",
        (
            r"norm.*(missing|skip|not (appl|run|used|called)|left out|lack|unused|never|omit)",
            r"(missing|skip|\bno\b|without|lacks?|before|omit).*norm|un-?normed|not normed",
            r"final_layer_norm|output_norm",
        ),
    ),
    Bug(
        "pads_zeroed",
        "The features of pads are set to zero.",
        (r"zero|mask|\bpad(s|ding|ded)?\b",),
    ),
    Bug(
        "negative_prompt_last",
        "The negative prompt comes after the positive one.",
        (SWAPPED, r"negative|uncond|batch|first half|second half|concat|flip|\brow|which prompt"),
    ),
    Bug(
        "pictures_tiled",
        "Prompts are tiled for two pictures each, not repeated.",
        (SWAPPED, r"\btil(e|ed|ing)\b|repeat|interleav|batch|per.prompt|\brows?\b"),
    ),
)
