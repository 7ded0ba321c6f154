"""Llama as a text encoder, as HiDream uses it, in NumPy.

Weights are (in, out) under the names of Meta's own files: q, k and v are one product, gate and up
another. Heads stay next to channels: (prompts, tokens, heads, channels). The port pads its prompts
itself, and joins T5's tokens and the states of several layers for each block of the transformer.
"""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_hidream_image import TextProjection
from transformers import LlamaConfig, LlamaModel

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
from lydite.trace import taps
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "llamatext"
HEADS, SHARED, HEAD, LAYERS, HIDDEN, TOKENS_KNOWN = 6, 3, 16, 5, 120, 150
WIDTH, GROUP, EPS = HEADS * HEAD, HEADS // SHARED, 1e-5
THETA, FACTOR, LOW, HIGH, TRAINED, LONGEST = 500.0, 8.0, 1.0, 4.0, 256, 2048
TOKENS, CAPTION, T5_WIDTH, T5_TOKENS = 13, 36, 40, 9
TAKEN = (0, 1, 2, 3, 4, 4, 4)  # the layer of each block of the transformer
BOS, PAD = 140, 141  # as in Llama 3, padding is the token that ends a turn
PROMPTS = ((BOS, 17, 58, PAD, 33, 71, 9), (BOS, 4, 91, 33, 120, 6, 58, 77, 2, 101, 45, 88, 17))


class Captions(ModelMixin, ConfigMixin):
    """HiDream's projections of its text: one for each block, the last for T5."""

    @register_to_config
    def __init__(self, blocks: int = len(TAKEN)) -> None:
        super().__init__()
        widths = [WIDTH] * blocks + [T5_WIDTH]
        self.projections = torch.nn.ModuleList([TextProjection(w, CAPTION) for w in widths])

    def forward(self, states: torch.Tensor, t5: torch.Tensor) -> torch.Tensor:
        texts = [self.projections[i](states[k]) for i, k in enumerate(TAKEN)]
        texts.append(self.projections[-1](t5))
        initial = torch.cat([texts[-1], texts[-2]], dim=1)
        return torch.stack([torch.cat([initial, text], dim=1) for text in texts[:-1]])


def made() -> LlamaModel:
    config = LlamaConfig(
        vocab_size=TOKENS_KNOWN,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=SHARED,
        max_position_embeddings=LONGEST,
        rms_norm_eps=EPS,
        bos_token_id=BOS,
        eos_token_id=PAD,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=THETA,
            factor=FACTOR,
            low_freq_factor=LOW,
            high_freq_factor=HIGH,
            original_max_position_embeddings=TRAINED,
        ),
    )
    return LlamaModel(config)


def tuned(model: LlamaModel) -> LlamaModel:
    """So that each part matters to the result."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(0.3 * torch.randn(parameter.shape))
        if name.endswith(("q_proj.weight", "k_proj.weight", "o_proj.weight")):
            parameter.mul_(2)
    return model


def reference(folder: Path, dtype: str) -> None:
    """A negative prompt and a prompt, padded at the left."""
    model = saved(tuned(randomised(made, 71)), folder, "text_encoder_4", dtype)
    captions = saved(randomised(Captions, 72), folder, "caption_projection", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="text_encoder_4", weights=True),
        record_modules(recorder, captions, scope="caption_projection", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
        rows = [[PAD] * (TOKENS - len(prompt)) + list(prompt) for prompt in PROMPTS]
        ids = recorder.record("pipeline/input_ids", torch.tensor(rows), kind="ids")
        mask = (torch.arange(TOKENS)[None] >= TOKENS - lengths[:, None]).long()
        recorder.record("pipeline/attention_mask", mask, kind="input")
        t5 = noise(6, len(PROMPTS), T5_TOKENS, T5_WIDTH).to(model.dtype)
        recorder.record("pipeline/prompt_embeds_t5", t5, kind="input")
        out = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        states = torch.stack(out.hidden_states[1:], dim=0)
        recorder.record("pipeline/prompt_embeds_llama3", states)
        recorder.record("pipeline/text_of_blocks", captions(states, t5))


def pairs_order(x: Array, heads: int) -> Array:
    """Rows of a head in the order that neighbours are rotated, as llama.cpp stores them."""
    return x.reshape(heads, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(x.shape)


def converted(w: dict[str, Array], captions: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port."""
    table = w["embed_tokens.weight"]
    if bug == "embedding_table_shifted":
        table = np.roll(table, 1, 0)
    new = {"tok": table, "norm": w["norm.weight"]}
    for i in range(LAYERS):
        old = f"layers.{i}"
        q, k, v = (w[f"{old}.self_attn.{x}_proj.weight"] for x in "qkv")
        if bug == "rows_still_in_pairs":
            q, k = pairs_order(q, HEADS), pairs_order(k, SHARED)
        if bug == "keys_values_head_by_head" and i == 3:
            both = np.stack([x.reshape(SHARED, HEAD, WIDTH) for x in (k, v)], 1)
            k, v = np.split(both.reshape(2 * SHARED * HEAD, WIDTH), 2)
        new[f"blk{i}.wqkv"] = np.concatenate([q, k, v]).T.copy()
        halves = [w[f"{old}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
        if bug == "w1_and_w3_mixed_up" and i == 0:
            halves.reverse()
        new[f"blk{i}.w13"] = np.concatenate(halves).T.copy()
        stale = bug == "wo_of_earlier_shard" and i == 4
        new[f"blk{i}.wo"] = w[f"layers.{i - stale}.self_attn.o_proj.weight"].T.copy()
        new[f"blk{i}.w2"] = w[f"{old}.mlp.down_proj.weight"].T.copy()
        norms = [w[f"{old}.{x}_layernorm.weight"] for x in ("input", "post_attention")]
        if bug == "norms_of_layer_crossed" and i == 2:
            norms.reverse()
        new[f"blk{i}.attn_norm"], new[f"blk{i}.ffn_norm"] = norms
    for i in range(len(TAKEN)):
        at = max(i - 1, 0) if bug == "projections_off_by_one" else i
        new[f"cap{i}"] = captions[f"projections.{at}.linear.weight"].T.copy()
    new["cap_t5"] = captions[f"projections.{len(TAKEN)}.linear.weight"].T.copy()
    if bug == "float8_weight_kept":
        new["blk1.w2"] = new["blk1.w2"].astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return new


def prompts_of(ids: Array, mask: Array, bug: str | None) -> tuple[Array, Array]:
    """Tokens and mask as this port's tokenizer gives them."""
    texts = [row[seen.astype(bool)].tolist() for row, seen in zip(ids, mask, strict=True)]
    pad = 0 if bug == "pad_token_zero" else PAD
    if bug == "no_start_token":
        texts = [text[1:] for text in texts]
    if bug == "start_token_twice":
        texts = [[BOS, *text][:TOKENS] for text in texts]
    rows, seen = [], []
    for text in texts:
        room = TOKENS - len(text)
        if bug == "padded_at_right":
            rows.append(text + [pad] * room)
            seen.append([1] * len(text) + [0] * room)
        else:
            rows.append([pad] * room + text)
            seen.append([0] * room + [1] * len(text))
    tokens, mask = np.array(rows), np.array(seen)
    if bug == "mask_from_pad_token":
        mask = (tokens != pad).astype(mask.dtype)
    return tokens, mask


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


class Encoder:
    """The forward pass; `r` rounds each result to the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.r, self.bug, self.dtype = rounder(dtype), bug, dtype
        self.p = {k: self.r(v) for k, v in p.items()}

    def tap(self, name: str, x: Array, slot: str = "out", kind: str = "activation") -> Array:
        taps.tap(name, x if self.dtype == "float32" else x.astype(self.dtype), slot=slot, kind=kind)
        return x

    def mul(self, name: str, x: Array) -> Array:
        return self.tap(name, self.r(x @ self.p[name]))

    def norm(self, name: str, x: Array) -> Array:
        eps = np.float32(1e-6 if self.bug == "rms_eps_millionth" else EPS)
        y = self.r(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))
        return self.tap(name, self.r(y * self.p[name]))

    def frequencies(self) -> Array:
        """Of the pairs of a head, with Llama 3's scaling."""
        bug = self.bug
        f = (1 / THETA ** (np.arange(0, HEAD, 2, dtype=np.float32) / HEAD)).astype(np.float32)
        if bug == "rope_scaling_ignored":
            return f
        if bug == "all_frequencies_divided":
            return f / np.float32(FACTOR)
        trained = LONGEST if bug == "context_of_long_model" else TRAINED
        waves = 2 * math.pi / f
        part = (trained / waves - LOW) / (HIGH - LOW)
        if bug == "smooth_part_reversed":
            part = 1 - part
        between = (1 - part) * f / FACTOR + part * f
        if bug == "no_band_between":
            between = f
        y = np.where(waves > trained / LOW, f / FACTOR, f)
        inside = (waves <= trained / LOW) & (waves >= trained / HIGH)
        return np.where(inside, between, y).astype(np.float32)

    def tables(self) -> tuple[Array, Array]:
        """Cosines and sines of (tokens, half of a head)."""
        f = self.tap("rope.freqs", self.frequencies())
        if self.bug == "frequencies_cast_to_bfloat16":
            f = f.astype(ml_dtypes.bfloat16).astype(np.float32)
        angles = np.arange(TOKENS, dtype=np.float32)[:, None] * f
        cos, sin = self.r(np.cos(angles)), self.r(np.sin(angles))
        return self.tap("rope.cos", cos), self.tap("rope.sin", sin)

    def rotate(self, x: Array, table: tuple[Array, Array], query: bool = False) -> Array:
        """Of (prompts, tokens, heads, channels)."""
        bug = self.bug
        cos, sin = (t[:, None] for t in table)
        if bug == "rope_on_neighbours":
            a, b = x[..., ::2], x[..., 1::2]
        else:
            a, b = np.split(x, 2, -1)
        if bug == "queries_one_ahead" and query:  # as if one token were in the cache
            cos, sin = (np.concatenate([t[1:], t[-1:]]) for t in (cos, sin))
        y = [self.r(self.r(a * cos) - self.r(b * sin)), self.r(self.r(b * cos) + self.r(a * sin))]
        if bug == "half_of_head_rotated":
            quarter = HEAD // 4
            y = [np.concatenate([y[0][..., :quarter], a[..., quarter:]], -1), y[1]]
            y[1] = np.concatenate([y[1][..., :quarter], b[..., quarter:]], -1)
        if bug == "rope_on_neighbours":
            return np.stack(y, -1).reshape(x.shape)
        return np.concatenate(y, -1)

    def visible(self, mask: Array) -> Array:
        """Which keys each token sees: (prompts, queries, keys)."""
        bug = self.bug
        causal = np.tri(TOKENS, dtype=bool)
        if bug == "not_causal":
            causal[:] = True
        keys = mask.astype(bool)
        if bug == "mask_of_first_prompt":
            keys = np.broadcast_to(keys[:1], keys.shape)
        return causal[None] & keys[:, None, :]

    def attention(self, i: int, x: Array, table: tuple[Array, Array], seen: Array) -> Array:
        bug, n = self.bug, len(x)
        qkv = self.mul(f"blk{i}.wqkv", x).reshape(n, TOKENS, HEADS + 2 * SHARED, HEAD)
        q, k, v = np.split(qkv, [HEADS, HEADS + SHARED], 2)
        q = self.tap(f"blk{i}.q_rope", self.rotate(q, table, query=True))
        k = self.tap(f"blk{i}.k_rope", self.rotate(k, table))
        if bug == "values_rotated_too" and i == 1:
            v = self.rotate(v, table)
        if bug == "cache_of_first_prompt" and i == 2:
            v = np.broadcast_to(v[:1], v.shape)
        if bug == "shared_heads_tiled":
            k, v = (np.tile(y, (1, 1, GROUP, 1)) for y in (k, v))
        else:
            k, v = (y.repeat(GROUP, 2) for y in (k, v))
        divisor = WIDTH // SHARED if bug == "scale_of_shared_heads" else HEAD
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(np.float32(divisor))
        if bug == "scores_capped":
            scores = 30 * np.tanh(scores / 30)
        seen = seen[:, None]
        if bug == "blind_rows_spread_evenly":
            scores = np.where(seen, scores, np.float32(-1e30))
        else:
            scores = np.where(seen, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        e = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = e.sum(-1, keepdims=True)
        share = (e / np.where(total > 0, total, 1)).astype(np.float32)
        if bug == "softmax_in_half" and i == 3:
            share = share.astype(np.float16).astype(np.float32)
        y = self.r(np.einsum("bhqk,bkhd->bqhd", share, v)).reshape(n, TOKENS, WIDTH)
        return self.mul(f"blk{i}.wo", self.tap(f"blk{i}.heads", y))

    def feed(self, i: int, x: Array) -> Array:
        bug = self.bug
        gate, up = np.split(self.mul(f"blk{i}.w13", x), 2, -1)
        if bug == "activation_after_product" and i == 2:
            y = silu(gate * up)
        else:
            y = self.r(silu(gate)) * up
        return self.mul(f"blk{i}.w2", self.tap(f"blk{i}.hidden", self.r(y)))

    def block(self, i: int, x: Array, table: tuple[Array, Array], seen: Array) -> Array:
        bug = self.bug
        h = self.norm(f"blk{i}.attn_norm", x)
        start = h if bug == "skip_takes_normed" and i == 3 else x
        middle = self.tap(f"blk{i}.mid", self.r(start + self.attention(i, h, table, seen)))
        self.middle = middle
        y = self.feed(i, self.norm(f"blk{i}.ffn_norm", middle))
        return self.tap(f"blk{i}", self.r(middle + y))

    def states(self, tokens: Array, mask: Array) -> list[Array]:
        """After each layer; the last is normed."""
        bug = self.bug
        x = self.tap("tok", self.p["tok"][tokens])
        if bug == "embedding_times_root":
            x = self.r(x * np.float32(math.sqrt(WIDTH)))
        table, seen = self.tables(), self.visible(mask)
        taps.tap("seen", seen)
        found = [x]
        for i in range(LAYERS):
            if bug == "last_layer_not_run" and i == LAYERS - 1:
                found.append(x)
                break
            x = self.block(i, x, table, seen)
            if bug == "layer_run_again" and i == 1:
                x = self.block(i, x, table, seen)
            found.append(self.middle if bug == "state_before_mlp" and i == 3 else x)
        if bug == "every_state_normed":
            return [self.norm("norm", y) for y in found[1:]]
        last = self.norm("norm", x)
        if bug != "last_state_not_normed":
            found[-1] = last
        return found[:-1] if bug == "states_count_embedding" else found[1:]

    def joined(self, states: list[Array], t5: Array) -> Array:
        """The text of each block: (blocks, prompts, tokens, width)."""
        bug = self.bug
        at = (*TAKEN[:-1], TAKEN[-1] - 1) if bug == "last_block_takes_layer_before" else TAKEN
        texts = [self.mul(f"cap{i}", states[k]) for i, k in enumerate(at)]
        words = self.mul("cap_t5", t5)
        last = texts[-2] if bug == "start_from_wrong_end" else texts[-1]
        parts = [last, words] if bug == "llama_before_t5" else [words, last]
        start = self.tap("start", np.concatenate(parts, 1))
        return np.stack([np.concatenate([start, text], 1) for text in texts])

    def __call__(self, tokens: Array, mask: Array, t5: Array) -> None:
        states = self.states(tokens, mask)
        self.tap("states", np.stack(states))
        self.tap("texts", self.joined(states, t5))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    w, captions = (checkpoint(folder, x) for x in ("text_encoder_4", "caption_projection"))
    net = Encoder(converted(w, captions, bug), bug, dtype)
    ids, mask = (value(f"pipeline/{x}") for x in ("input_ids", "attention_mask"))
    tokens, mask = prompts_of(ids, mask, bug)
    t5 = net.r(value("pipeline/prompt_embeds_t5"))
    if bug == "t5_prompts_reversed":
        t5 = t5[::-1]
    kept = net.p if weights else None
    if kept and dtype != "float32":
        kept = {k: v.astype(dtype) for k, v in kept.items()}
    blocks = ("given.*", "tok", "blk?", "norm", "states", "cap?", "cap_t5", "start", "texts")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("given.tokens", tokens, kind="ids")
        taps.tap("given.mask", mask, kind="input")
        net.tap("given.t5", t5, kind="input")
        net(tokens, mask, t5)


NO_COUNTERPART: tuple[str, ...] = (r"^rope\.freqs$", r"^start$")

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers"
TOKEN = r"input_ids|\bids?\b|tokeni[sz]|special token|given\.tokens|other tokens|prompt.*token"
FREQUENCY = r"frequenc|wavelength|inv_freq|theta|\bbase\b|rope.?scal|scal\w* (of )?(the )?rope"
WRONG_STATE = r"(wrong|other|another|different|previous|next|earlier) (layer|(hidden )?state)"
BUGS = (
    Bug(
        "rows_still_in_pairs",
        "Rows of q and k are in llama.cpp's order, for RoPE of neighbours.",
        (LOADED, SWAPPED, r"interleav|pairs?\b|neighbo|half|halves|layout"),
        "weights",
    ),
    Bug(
        "keys_values_head_by_head",
        "Layer 3 has k and v joined head by head.",
        (LOADED, SWAPPED, r"interleav|\bheads?\b|layout"),
        "weights",
    ),
    Bug(
        "w1_and_w3_mixed_up",
        "Layer 0 has gate and up exchanged.",
        (LOADED, SWAPPED, r"\bgate|half|halves|silu|mix(ed)?.up"),
        "weights",
    ),
    Bug(
        "wo_of_earlier_shard",
        "The last layer's attention has the output weight of the layer before.",
        (LOADED, r"layers\.3\b|another layer|other layer|previous layer|dupl|stale"),
        "weights",
    ),
    Bug(
        "norms_of_layer_crossed",
        "Layer 2 has the weights of its two norms exchanged.",
        (LOADED, SWAPPED, r"layernorm|gain|mix(ed)?.up"),
        "weights",
    ),
    Bug(
        "embedding_table_shifted",
        "The table of embeddings is shifted by a row.",
        (LOADED, r"\broll|shift|off.by.one|\brows?\b|embed_tokens|embedding table"),
        "weights",
    ),
    Bug(
        "projections_off_by_one",
        "Each block has the projection of the block before.",
        (LOADED, r"off.by.one|projections?\.\d|index|shift|another|other|previous"),
        "weights",
    ),
    Bug(
        "float8_weight_kept",
        "The last linear of layer 1 was stored in float8.",
        (LOADED, r"f8|float8|fp8|e4m3|8.bit|quanti[sz]|round|precision"),
        "weights",
    ),
    Bug(
        "no_start_token",
        "Prompts lack the token that begins them.",
        (TOKEN, r"\bbos\b|special|missing|shift"),
        "ids",
    ),
    Bug(
        "start_token_twice",
        "Prompts have the first token twice.",
        (TOKEN, r"\bbos\b|special|twice|double|dupl|shift"),
        "ids",
    ),
    Bug("pad_token_zero", "The padding is token 0.", (TOKEN, r"padd?"), "ids"),
    Bug("padded_at_right", "Prompts are padded at the right.", (TOKEN, r"padd|\bright\b"), "ids"),
    Bug(
        "mask_from_pad_token",
        "The mask is where tokens are not the padding's, also inside a prompt.",
        (r"mask|padd",),
        "inputs",
    ),
    Bug(
        "t5_prompts_reversed",
        "T5's results have the prompt before the negative prompt.",
        (SWAPPED, r"batch|negative|\bt5\b|\brolled|input"),
        "inputs",
    ),
    Bug("rms_eps_millionth", "Norms have eps 1e-6.", (r"\beps",)),
    Bug(
        "rope_scaling_ignored",
        "RoPE's frequencies are not scaled.",
        (FREQUENCY,),
    ),
    Bug(
        "all_frequencies_divided",
        "All of RoPE's frequencies are divided by the factor.",
        (FREQUENCY, r"linear|factor 8|by 8\b|/ ?8\b|0\.125"),
    ),
    Bug(
        "no_band_between",
        "Frequencies between the two limits are not interpolated.",
        (FREQUENCY, r"smooth|interpolat|medium|band"),
    ),
    Bug(
        "smooth_part_reversed",
        "Interpolation of frequencies has its weights exchanged.",
        (FREQUENCY, r"smooth|interpolat|medium|band"),
    ),
    Bug(
        "context_of_long_model",
        "RoPE's limits are of the long context, not of the one trained first.",
        (FREQUENCY, r"context|original_max|max_position"),
    ),
    Bug(
        "frequencies_cast_to_bfloat16",
        "RoPE's frequencies were cast to bfloat16 with the model.",
        (r"bf16|bfloat16|f16|float16|\bhalf\b|precision|round|\bcast", r"inv_freq|frequenc"),
    ),
    Bug(
        "rope_on_neighbours",
        "RoPE rotates neighbours, not halves.",
        (r"half|halves|interleav|neighbo|adjacent|pair",),
    ),
    Bug(
        "queries_one_ahead",
        "Queries have the positions of the next tokens.",
        (r"position|off.by.one|offset|shift|cache|\bone (token|place|step)",),
    ),
    Bug(
        "half_of_head_rotated",
        "RoPE rotates half of a head's channels.",
        (
            r"partial|fraction|(part|half|some|only) .{0,20}(channels|head|dim)",
            r"(un|not )rotated|rotary_dim|frequenc|number of (rotated )?(channels|dim)",
        ),
    ),
    Bug(
        "values_rotated_too",
        "Layer 1 rotates the values as well.",
        (r"rope|rotat|rotary",),
    ),
    Bug("not_causal", "Attention is not causal.", (r"causal|mask|bidirectional|future|later tok",)),
    Bug(
        "mask_of_first_prompt",
        "All prompts have the first one's mask.",
        (r"mask|padd",),
    ),
    Bug(
        "blind_rows_spread_evenly",
        "Tokens that see nothing get the mean of all values, not zero.",
        (r"mask|padd|fully|uniform|\bmean of|average",),
    ),
    Bug(
        "cache_of_first_prompt",
        "Layer 2 takes the first prompt's values for all.",
        (r"cache|batch|broadcast|first (prompt|row|item|sample)|prompt 0|shared|same values",),
    ),
    Bug(
        "shared_heads_tiled",
        "Shared heads are tiled, not repeated.",
        (r"til(e|ed|ing)|repeat|group|gqa|kv.?heads?|key.?value heads?|\bheads?\b", SWAPPED),
    ),
    Bug(
        "scale_of_shared_heads",
        "Scores are divided by the root of width / shared heads.",
        (
            r"\b(scores?|logits|temperature|sqrt|root|factor|head_dim)\b|√|-0\.5",
            r"(attention|softmax|quer).*scal|scal.*(attention|softmax|quer)",
        ),
    ),
    Bug(
        "scores_capped",
        "Scores are capped by tanh, as Gemma's are.",
        (r"cap|tanh|clamp|squash|\bscores\b|logits",),
    ),
    Bug(
        "softmax_in_half",
        "Probabilities of layer 3 are float16.",
        (r"f16|float16|\bhalf\b|fp16|precision|round|\bcast",),
    ),
    Bug(
        "activation_after_product",
        "Layer 2 applies SiLU to the product.",
        (r"silu|swish|activation|order|product",),
    ),
    Bug(
        "skip_takes_normed",
        "Layer 3 adds attention to the normed stream.",
        (r"residual|skip|shortcut|norm(ed|ali[sz]ed)|pre-?norm|\badd(ed|ition|s)?\b",),
    ),
    Bug(
        "embedding_times_root",
        "Embeddings are multiplied by the root of the width.",
        (r"scal(e|ed|ing)|factor|sqrt|root|√|multipl|9\.79|9\.8\b",),
    ),
    Bug(
        "layer_run_again",
        "Layer 1 runs twice.",
        (r"twice|again|repeat|dupl|extra (call|layer|block)|two times|2 times|called",),
    ),
    Bug(
        "last_layer_not_run",
        "The last layer does not run.",
        (
            r"skip|missing|not (run|called|applied)|fewer|too few|never|left out|clip.skip",
            r"layers\.(3|4)\b(?!\.)|blk(3|4)\b(?!\.)",
        ),
    ),
    Bug(
        "state_before_mlp",
        "The state of layer 3 is taken before its MLP.",
        (
            WRONG_STATE,
            r"(before|without|missing|lacks?|not) .{0,20}\b(mlp|feed)",
            r"mlp.{0,30}(missing|not add|left out|skipped)",
            r"after (the )?attention|post_attention_layernorm|\bmid\b|residual|skip",
        ),
    ),
    Bug(
        "last_state_not_normed",
        "The last state is taken before the norm.",
        (r"\bnorm\b|(final|last) (rms)?norm|normed|normali[sz]ed|before (the )?norm",),
    ),
    Bug(
        "every_state_normed",
        "The last norm is applied to each state.",
        (r"\bnorm\b|(final|last) (rms)?norm|normed|normali[sz]ed|before (the )?norm",),
    ),
    Bug(
        "states_count_embedding",
        "States begin with the embedding.",
        (
            WRONG_STATE,
            r"off.by.one|layer index|shift|embedding|embed_tokens|layer (before|earlier)",
        ),
    ),
    Bug(
        "last_block_takes_layer_before",
        "The last block takes the state of the layer before the last.",
        (
            WRONG_STATE,
            r"off.by.one|index|layers?\.3\b|penultimate|second.last|layer (before|earlier)",
        ),
    ),
    Bug(
        "start_from_wrong_end",
        "All blocks begin with the text of the last block but one, not of the last.",
        (
            WRONG_STATE,
            r"off.by.one|index|projections?\.5\b|cap5|penultimate|second.last|last but one",
            r"(wrong|other|another|different) (part|piece|projection|text|value)|concat",
        ),
    ),
    Bug(
        "llama_before_t5",
        "Llama's text comes before T5's.",
        (r"concat|\bcat\b|join|\broll", SWAPPED, r"\b(before|first)\b"),
    ),
)
