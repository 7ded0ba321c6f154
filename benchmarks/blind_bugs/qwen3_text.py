"""Qwen3 (Yang et al. 2025, arXiv 2505.09388) as a prompt encoder, in NumPy.

Tokens of both prompts lie in one list of rows: values are (prompts * tokens, channels), and after
the split into heads (prompts, heads, tokens, channels). Matrices are stored as (in, out); one
matrix gives q, k and v, one the gate and the values of the MLP. As in the pipelines that read
several layers of Qwen3, features are three hidden states side by side; those of the template's
first tokens are dropped, those of padding are zero.
"""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3Model

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
from lydite.trace.function_capture import watch_function
from lydite.trace.taps import tap
from lydite.trace.torch_capture import record_modules

NAME = "qwen3_text"
WIDTH, HIDDEN, HEADS, GROUPS, HEAD, LAYERS, VOCABULARY = 32, 72, 4, 2, 12, 4, 90
THETA, EPS, PREFIX, PICKED = 1e6, 1e-6, 3, (1, 3)  # and the last state, normed
PAD, START, END, USER, ASSISTANT, LINE = 80, 81, 82, 83, 84, 85
IDS = (
    (START, USER, LINE, 17, 4, 62, 9, 33, 51, 28, END, LINE, START, ASSISTANT, LINE),
    (START, USER, LINE, 8, 45, END, LINE, START, ASSISTANT, LINE, PAD, PAD, PAD, PAD, PAD),
)


def reference(folder: Path, dtype: str) -> None:
    """One call for both prompts, padded at the end."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        max_position_embeddings=64,
        initializer_range=0.15,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        pad_token_id=PAD,
    )
    model = saved(randomised(lambda: Qwen3Model(config), 34), folder, "text_encoder", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="text_encoder", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        ids = torch.tensor(IDS)
        mask = (ids != PAD).long()
        recorder.record("pipeline/input_ids", ids, kind="ids")
        recorder.record("pipeline/attention_mask", mask, kind="input")
        result = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        states = [result.hidden_states[i] for i in PICKED] + [result.last_hidden_state]
        features = torch.stack(states, 2).flatten(2)
        recorder.record("pipeline/features", features)
        features = features[:, PREFIX:] * mask[:, PREFIX:, None].to(features.dtype)
        recorder.record("pipeline/prompt_embeds", features)


def ids_of(folder: Path, bug: str | None) -> Array:
    """The ids as this port's tokenizer and template would give them."""
    ids = given(folder)("pipeline/input_ids")
    if bug == "template_end_missing":  # without the assistant's first tokens
        for row in ids:
            text = row[row != PAD][:-3]
            row[:] = PAD
            row[: len(text)] = text
    if bug == "padded_at_start":
        for row in ids:
            row[:] = np.concatenate([row[row == PAD], row[row != PAD]])
    if bug == "start_token_added":
        ids = np.concatenate([np.full_like(ids[:, :1], END), ids[:, :-1]], 1)
    return ids


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: matrices as (in, out), q, k, v and gate, values joined."""
    new = {"table.rows": w["embed_tokens.weight"].copy(), "finish.gain": w["norm.weight"].copy()}
    for i in range(LAYERS):
        here, own = f"layers.{i}", f"depth{i}"
        letters = "qvk" if bug == "values_before_keys" and i == 1 else "qkv"
        joined = [w[f"{here}.self_attn.{x}_proj.weight"] for x in letters]
        new[f"{own}/mix/in.matrix"] = np.concatenate(joined).T
        back = w[f"{here}.self_attn.o_proj.weight"]
        reshaped = bug == "mix_out_reshaped" and i == 0
        new[f"{own}/mix/out.matrix"] = back.reshape(HEADS * HEAD, WIDTH) if reshaped else back.T
        parts = ("up", "gate") if bug == "gate_after_values" and i == 2 else ("gate", "up")
        joined = [w[f"{here}.mlp.{x}_proj.weight"] for x in parts]
        new[f"{own}/feed/in.matrix"] = np.concatenate(joined).T
        new[f"{own}/feed/out.matrix"] = w[f"{here}.mlp.down_proj.weight"].T
        a, b = "qk" if not (bug == "head_norms_exchanged" and i == 0) else "kq"
        new[f"{own}/mix/q_unit.gain"] = w[f"{here}.self_attn.{a}_norm.weight"]
        new[f"{own}/mix/k_unit.gain"] = w[f"{here}.self_attn.{b}_norm.weight"]
        new[f"{own}/pre_mix.gain"] = w[f"{here}.input_layernorm.weight"]
        new[f"{own}/pre_feed.gain"] = w[f"{here}.post_attention_layernorm.weight"]
    if bug == "key_gain_not_loaded":
        new["depth1/mix/k_unit.gain"] = np.ones(HEAD, np.float32)
    if bug == "feed_out_eight_bits":
        matrix = new["depth3/feed/out.matrix"]
        step = np.abs(matrix).max(0) / 127
        new["depth3/feed/out.matrix"] = (matrix / step).round() * step
    return {name: np.ascontiguousarray(x, np.float32) for name, x in new.items()}


class Encoder:
    """The port: `w` are its parameters, `r` rounds to the run's precision."""

    def __init__(self, w: dict[str, Array], r: Callable[[Array], Array], bug: str | None) -> None:
        self.w, self.r, self.bug = {name: r(x) for name, x in w.items()}, r, bug

    def matmul(self, name: str, x: Array) -> Array:
        return tap(name, self.r(x @ self.w[f"{name}.matrix"]))

    def unit(self, name: str, x: Array, axes: tuple[int, ...] = (-1,)) -> Array:
        """RMSNorm."""
        eps = 1e-5 if self.bug == "norm_eps" else EPS
        gain = self.w[f"{name}.gain"]
        if self.bug == "query_gain_plus_one" and name.endswith("q_unit"):
            gain = gain + 1
        if self.bug == "norm_subtracts_mean" and name.endswith("pre_feed"):
            x = x - x.mean(-1, keepdims=True)
        squares = (x * x).mean(axes, keepdims=True)
        if self.bug == "head_norms_by_length" and name.endswith(("q_unit", "k_unit")):
            squares = (x * x).sum(axes, keepdims=True)
        x = self.r(x / np.sqrt(squares + eps))
        return tap(name, self.r(x * gain))

    def angles(self, tokens: int) -> tuple[Array, Array]:
        """Cosines and sines of the rotation: (tokens, channels of a head)."""
        bug = self.bug
        theta = 1e4 if bug == "rotary_base_small" else THETA
        size = WIDTH // HEADS if bug == "rotary_size_of_width" else HEAD
        freqs = (1 / theta ** (np.arange(0, HEAD, 2, dtype=np.float32) / size)).astype(np.float32)
        a = np.arange(tokens, dtype=np.float32)[:, None] * freqs
        a = np.repeat(a, 2, -1) if bug == "angles_in_pairs" else np.concatenate([a, a], -1)
        if bug == "rotary_angles_bfloat16":
            a = a.astype(ml_dtypes.bfloat16).astype(np.float32)
        sine = -np.sin(a) if bug == "rotary_backwards" else np.sin(a)
        return tap("turn/cos", self.r(np.cos(a))), tap("turn/sin", self.r(sine))

    def turned(self, x: Array, turn: tuple[Array, Array]) -> Array:
        cos, sin = turn
        if self.bug == "rotary_neighbours":
            half = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        else:
            half = np.concatenate([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1)
        return self.r(self.r(x * cos) + self.r(half * sin))

    def mix(self, i: int, x: Array, turn: tuple[Array, Array], seen: Array) -> Array:
        """Attention; the heads of a group share their keys and values."""
        bug, name = self.bug, f"depth{i}/mix"
        b, _, n, _ = seen.shape
        fused = self.matmul(f"{name}/in", x).reshape(b, n, HEADS + 2 * GROUPS, HEAD)
        q, k, v = np.split(fused.transpose(0, 2, 1, 3), [HEADS, HEADS + GROUPS], 1)
        axes = (1, -1) if bug == "head_norm_over_all" and i == 1 else (-1,)
        late = bug == "head_norms_after_rotary"
        if late:
            q, k = self.turned(q, turn), self.turned(k, turn)
        if not (bug == "query_norm_missing" and i == 3):
            q = self.unit(f"{name}/q_unit", q, axes)
        k = self.unit(f"{name}/k_unit", k, axes)
        if not late:
            q = self.turned(q, turn)
            k = k if bug == "keys_not_turned" and i == 2 else self.turned(k, turn)
        if bug == "groups_tiled":
            k, v = (np.tile(y, (1, HEADS // GROUPS, 1, 1)) for y in (k, v))
        else:
            k, v = (np.repeat(y, HEADS // GROUPS, 1) for y in (k, v))
        q, k, v = tap(f"{name}/q", q), tap(f"{name}/k", k), tap(f"{name}/v", v)
        size = WIDTH // HEADS if bug == "scores_scaled_by_width_over_heads" else HEAD
        scores = q @ k.swapaxes(2, 3) * size**-0.5
        if bug == "window_in_upper_layers" and i >= 2:
            seen = seen & (np.arange(n)[:, None] - np.arange(n) < 4)
        scores = np.where(seen, scores, -1e9)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        y = self.r(shares / shares.sum(-1, keepdims=True) @ v)
        if not (bug == "heads_merged_without_swap" and i == 2):
            y = y.transpose(0, 2, 1, 3)
        y = tap(f"{name}/heads", y.reshape(b * n, HEADS * HEAD))
        return self.matmul(f"{name}/out", y)

    def feed(self, i: int, x: Array) -> Array:
        name = f"depth{i}/feed"
        gate, y = np.split(self.matmul(f"{name}/in", x), 2, -1)
        if self.bug == "feed_gelu":
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            gate = self.r(0.5 * gate * (1 + np.tanh(inner)))
        else:
            gate = self.r(gate / (1 + np.exp(-gate)))
        y = self.r(gate * y)
        if self.bug == "gated_bfloat16" and i == 0:
            y = y.astype(ml_dtypes.bfloat16).astype(np.float32)
        return self.matmul(f"{name}/out", tap(f"{name}/gated", y))

    def __call__(self, ids: Array, mask: Array) -> Array:
        bug, (b, n) = self.bug, ids.shape
        x = self.w["table.rows"][ids].reshape(b * n, WIDTH)
        if bug == "embedding_scaled":
            x = self.r(x * WIDTH**0.5)
        x = tap("table", x)
        turn = self.angles(n)
        diagonal = -1 if bug == "own_token_not_seen" else 0
        seen = np.tri(n, k=diagonal, dtype=bool) & (mask[:, None, None] > 0)
        if bug == "later_tokens_seen":
            seen = np.ones((n, n), bool) & (mask[:, None, None] > 0)
        tap("seen", seen, kind="input")
        states = [x]
        for i in range(LAYERS):
            start = x
            normed = self.unit(f"depth{i}/pre_mix", x)
            x = tap(f"depth{i}/middle", self.r(x + self.mix(i, normed, turn, seen)))
            normed = self.unit(f"depth{i}/pre_feed", x)
            if bug == "feed_added_to_input_of_layer" and i == 2:
                x = start
            x = tap(f"depth{i}", self.r(x + self.feed(i, normed)))
            states.append(x)
        return self.features(states, mask)

    def features(self, states: list[Array], mask: Array) -> Array:
        """Three states side by side, without the template's first tokens and padding."""
        bug, (b, n) = self.bug, mask.shape
        later = 1 if bug == "states_one_late" else 0
        picked = [states[i + later] for i in PICKED]
        if bug == "all_states_normed":
            picked = [self.unit("finish", x) for x in picked]
        last = states[-1]
        picked.append(last if bug == "last_state_not_normed" else self.unit("finish", last))
        x = np.stack(picked, -1 if bug == "states_interleaved" else 1).reshape(b, n, 3 * WIDTH)
        x = tap("prompt/features", x)
        keep = mask[:, :-PREFIX] if bug == "mask_not_cut" else mask[:, PREFIX:]
        x = x[:, :-PREFIX] if bug == "cut_at_end" else x[:, PREFIX:]
        if bug != "padding_kept":
            x = x * keep[..., None]
        return tap("prompt/context", self.r(x))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    loaded = converted(checkpoint(folder, "text_encoder"), bug)
    encoder = Encoder(loaded, rounder(dtype), bug)
    ids = ids_of(folder, bug)
    blocks = ("prompt/*", "table", "depth?", "finish", "seen")
    with port_trace(out, dump, dtype, blocks, encoder.w if weights else None):
        tap("prompt/tokens", ids, kind="ids")
        mask = tap("prompt/mask", (ids != PAD).astype(np.int64), kind="input")
        encoder(ids, mask)


NO_COUNTERPART: tuple[str, ...] = ()

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|\border\b|permut|revers"
NORM = r"(?<![\w./])(layer ?|rms ?)?norm"  # the word, not a part of a module's name
ROTARY = r"rotary|\brope\b|frequenc|\bangles?\b"
BUGS = (
    Bug(
        "gate_after_values",
        "Layer 2's fused MLP matrix holds the values before the gate.",
        (LOADED, SWAPPED, r"fused|\bjoin|concat|gate|halves"),
        "weights",
    ),
    Bug(
        "mix_out_reshaped",
        "Layer 0's matrix after attention is reshaped to (in, out), not transposed.",
        (LOADED, r"reshap|transpos|layout"),
        "weights",
    ),
    Bug(
        "head_norms_exchanged",
        "Layer 0's norms of q and k have each other's gain.",
        (LOADED, SWAPPED, r"each other|\bgains?\b"),
        "weights",
    ),
    Bug(
        "key_gain_not_loaded",
        "The gain of layer 1's norm of k is 1.",
        (LOADED, r"\bgain|\bones?\b|missing|scale"),
        "weights",
    ),
    Bug(
        "feed_out_eight_bits",
        "Layer 3's second MLP matrix has eight bits a number.",
        (LOADED, r"8.?bit|eight|int8|quanti[sz]|precision|round"),
        "weights",
    ),
    Bug(
        "template_end_missing",
        "The template's last three tokens are missing.",
        (r"token|\bids?\b|template|padd",),
        "ids",
    ),
    Bug(
        "start_token_added",
        "A token precedes the template.",
        (r"token|\bids?\b|shift|roll|offset|prepend",),
        "ids",
    ),
    Bug(
        "embedding_scaled",
        "Embeddings are multiplied by the root of the width, as in Gemma.",
        (r"\bscal(e|es|ed|ing)\b|sqrt|root|factor|multipl",),
    ),
    Bug("norm_eps", "Norms have eps 1e-5.", (r"\beps",)),
    Bug(
        "query_gain_plus_one",
        "Norms of q multiply by 1 + gain.",
        (r"1 ?\+|\+ ?1|plus one|\bone\b|gemma|offset",),
    ),
    Bug(
        "norm_subtracts_mean",
        "The norms before the MLP are LayerNorms.",
        (r"layer ?norms?\b|\bmean\b|cent(er|re)",),
    ),
    Bug(
        "head_norm_over_all",
        "Layer 1's norms of q and k are over all heads together.",
        (r"\bheads?\b|per.head|\bax[ei]s\b|whole|all channels|dimension",),
    ),
    Bug(
        "head_norms_after_rotary",
        "q and k are normed after the rotation.",
        (
            r"(before|after) (the )?(rotary|rope|rotat|norm|q_norm|k_norm|head|position)",
            SWAPPED,
            ROTARY,
            r"rotat",
        ),
    ),
    Bug(
        "query_norm_missing",
        "Layer 3's q is not normed.",
        (NORM, r"q_norm.*(missing|skipped|not applied)|un-?normed|unnormali[sz]ed"),
    ),
    Bug(
        "rotary_base_small",
        "The rotation's base is 10000.",
        (r"\bbase\b|theta|10000|1e4|frequenc|\bperiods?\b",),
    ),
    Bug(
        "rotary_size_of_width",
        "Frequencies divide by width over heads, not by the channels of a head.",
        (r"frequenc|head.?dim|exponent|\bdim\b|\bbase\b|theta|\bperiods?\b|channels",),
    ),
    Bug(
        "rotary_angles_bfloat16",
        "Angles of the rotation are rounded to bfloat16.",
        (r"bf16|bfloat|precision|round|\bcast",),
    ),
    Bug(
        "rotary_backwards",
        "Sines have the other sign.",
        (r"\bsign\b|negat|backward|direction|opposite|conjugat|-sin|−sin|inverse",),
    ),
    Bug(
        "rotary_neighbours",
        "Neighbouring channels are turned, not those of two halves.",
        (r"interleav|neighbou?r|adjacent|pair|halves|half|even",),
    ),
    Bug(
        "keys_not_turned",
        "Layer 2's keys are not turned.",
        (ROTARY, r"rotat|position|turn"),
    ),
    Bug(
        "groups_tiled",
        "Keys and values are tiled, so heads 0 and 2 share theirs.",
        (r"til(e|ed|ing)|repeat|grouped|\bgqa\b|\bgroups?\b|kv.heads?|interleav|heads?\b",),
    ),
    Bug(
        "window_in_upper_layers",
        "Layers 2 and 3 see the last four tokens alone.",
        (r"window|mask|sliding|\blocal|attend|\bsees?\b",),
    ),
    Bug("feed_gelu", "The MLP has GELU.", (r"gelu|silu|swish|activation",)),
    Bug(
        "later_tokens_seen",
        "Tokens see those after them.",
        (r"mask|causal|future|(later|next|following) token|after (it|them)|bidirection",),
        "inputs",
    ),
    Bug(
        "states_one_late",
        "Two of the three states are those of the next layer.",
        (
            r"hidden.?state|off.by.one|one (layer|block)? ?(too )?(late|later|off)|too late|index",
            r"(next|later|another|other|wrong) (layer|block|stage|state|value|module|output)",
            r"(output|value|result|state)s? of",
        ),
    ),
    Bug("all_states_normed", "The last norm is applied to all three states.", (NORM,)),
    Bug(
        "states_interleaved",
        "Channels of the three states alternate.",
        (r"interleav|alternat|\bstack|layout|permut|reshap|transpos|\border\b|\bax[ei]s\b",),
    ),
    Bug(
        "mask_not_cut",
        "The mask's first tokens are not dropped, so the padding's place is three late.",
        (r"mask|\bpad|zero|shift|roll|offset",),
    ),
    Bug(
        "cut_at_end",
        "Three tokens are dropped at the end, not at the beginning.",
        (r"shift|roll|offset|slic|prefix|template|drop|\bcut\b|token|crop|position",),
    ),
    Bug(
        "padding_kept",
        "Features of padding are not zero.",
        (r"\bpad|mask|zero",),
    ),
)

MORE_BUGS: tuple[Bug, ...] = (
    Bug(
        "padded_at_start",
        "The shorter prompt is padded at its start, not at its end.",
        (r"\bpad|left|token|\bids?\b",),
        "ids",
    ),
    Bug(
        "values_before_keys",
        "Layer 1's fused matrix holds the values before the keys.",
        (LOADED, SWAPPED, r"fused|\bjoin|concat|keys?\b.*values?\b|values?\b.*keys?\b|q, ?v, ?k"),
        "weights",
    ),
    Bug(
        "head_norms_by_length",
        "q and k are divided by their length, not by their root mean square.",
        (
            r"\blength|l2|\bsum\b|\bmean\b|\brms|euclid|unit norm|sqrt|root",
            r"\bscal(e|es|ed|ing)\b|factor|3\.46|0\.288?|\bdivi",
        ),
    ),
    Bug(
        "angles_in_pairs",
        "Angles are repeated for neighbouring channels, though the halves of a head are turned.",
        (
            r"interleav|neighbou?r|adjacent|pairs?\b|pairwise|halves|half|\beven\b|repeat|duplicat",
            r"concat|layout|" + SWAPPED,
        ),
    ),
    Bug(
        "scores_scaled_by_width_over_heads",
        "Scores are scaled by the root of width over heads, not of the channels of a head.",
        (
            r"\bscal(e|es|ed|ing)\b|sqrt|root|factor|temperature|head.?dim|\*\* ?-0\.5",
            r"1\.22|0\.816",
        ),
    ),
    Bug(
        "heads_merged_without_swap",
        "Layer 2 joins heads without moving them behind the tokens.",
        (r"\bheads?\b|merg|transpos|reshap|layout|permut|\bax[ei]s\b", SWAPPED),
    ),
    Bug(
        "gated_bfloat16",
        "Layer 0's product of gate and values is rounded to bfloat16.",
        (r"bf16|bfloat|precision|round|\bcast|dtype",),
    ),
    Bug(
        "own_token_not_seen",
        "The causal mask hides each token from itself.",
        (
            r"mask|causal|diagonal|triang|\btri[lu]?\b|(it|them)sel(f|ves)|own (token|position)",
            r"off.by.one|attend|\bsees?\b",
        ),
        "inputs",
    ),
    Bug(
        "feed_added_to_input_of_layer",
        "Layer 2 adds its MLP to the layer's input; attention is lost from the stream.",
        (
            r"residual|skip connection|(layer|block)'?s? (own )?input|input of (the )?layer",
            r"(before|without) (the )?att|att\w* .*(missing|lost|not added|drop)|stale",
        ),
    ),
    Bug(
        "last_state_not_normed",
        "The last of the three states lacks the last norm.",
        (NORM, r"un-?normed|unnormali[sz]ed|not normed|last_hidden"),
    ),
)
