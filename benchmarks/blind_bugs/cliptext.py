"""CLIP's text encoder with projection, as the modules of another torch program: q, k, v fused.

Two prompts, one padded with 0; the first has an added token whose id is above the end token's.
Features are the last but one hidden state, the context ends with the pooled projection.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

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
from lydite.trace import taps
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "cliptext"
WIDTH, HIDDEN, HEADS, LAYERS, POSITIONS, VOCABULARY = 32, 80, 4, 3, 16, 60
HEAD = WIDTH // HEADS
START, END, PAD = 57, 58, 0
IDS = (
    (START, 5, 59, 23, 41, 7, 30, 12, 33, END),
    (START, 14, 9, END, PAD, PAD, PAD, PAD, PAD, PAD),
)


def reference(folder: Path, dtype: str) -> None:
    """One call for both prompts, without an attention mask, as diffusers does."""
    config = CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        projection_dim=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
        initializer_factor=1.5,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )
    model = randomised(lambda: CLIPTextModelWithProjection(config), 21)
    model = saved(model, folder, "text_encoder", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="text_encoder", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        ids = torch.tensor(IDS)
        recorder.record("pipeline/input_ids", ids, kind="ids")
        result = model(ids, output_hidden_states=True)
        features, pooled = result.hidden_states[-2], result.text_embeds
        recorder.record("pipeline/prompt_embeds", features)
        recorder.record("pipeline/pooled_prompt_embeds", pooled)
        recorder.record("pipeline/context", torch.cat([features, pooled[:, None]], 1))


class Norm(nn.Module):
    """LayerNorm in float32."""

    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.unbiased = bug == "norm_unbiased_variance"
        self.eps = 1e-6 if bug == "norm_eps" else 1e-5

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        variance = y.var(-1, keepdim=True, unbiased=self.unbiased)
        y = (y - y.mean(-1, keepdim=True)) * torch.rsqrt(variance + self.eps)
        return (y * self.gain.float() + self.shift.float()).to(x.dtype)


class Mix(nn.Module):
    """Causal self-attention with one product for q, k and v."""

    def __init__(self, bug: str | None, at: int) -> None:
        super().__init__()
        self.bug, self.at = bug, at
        self.hidden = torch.zeros(1, dtype=torch.bool)  # what is not seen; the tower sets it
        self.fused, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def tap(self, name: str, x: Tensor) -> Tensor:
        return taps.tap(f"tower/stages.{self.at}.mix.{name}", x)

    def forward(self, x: Tensor) -> Tensor:
        bug, (b, n, _) = self.bug, x.shape
        y = self.fused(x)
        if bug == "fused_split_per_head" and self.at == 1:
            q, k, v = y.view(b, n, HEADS, 3, HEAD).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = y.view(b, n, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        q, k, v = self.tap("q", q), self.tap("k", k), self.tap("v", v)
        scale = WIDTH**-0.5 if bug == "scale_of_width" else HEAD**-0.5
        scores = q.float() @ k.float().mT * scale
        if bug == "bias_not_scaled" and self.at == 0:
            bias = self.fused.bias[:WIDTH].view(1, HEADS, 1, HEAD).float()
            scores = ((q.float() - bias) * scale + bias) @ k.float().mT
        if not (bug == "causal_in_first_only" and self.at > 0):
            scores = scores.masked_fill(self.hidden, -1e9)
        y = scores.softmax(-1).to(v.dtype) @ v
        if bug == "heads_merged_first" and self.at == 2:
            return self.back(y.reshape(b, n, WIDTH))
        return self.back(y.transpose(1, 2).reshape(b, n, WIDTH))


class Bend(nn.Module):
    """The activation."""

    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.bug = bug

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "gelu_erf":
            return F.gelu(x)
        return x * torch.sigmoid((1.7 if self.bug == "quick_gelu_rounded" else 1.702) * x)


class Feed(nn.Module):
    """The MLP."""

    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.bend = Bend(bug)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.bend(self.widen(x)))


class Stage(nn.Module):
    """One layer."""

    def __init__(self, bug: str | None, at: int) -> None:
        super().__init__()
        self.bug, self.at = bug, at
        self.upper, self.mix = Norm(bug), Mix(bug, at)
        self.lower, self.feed = Norm(bug), Feed(bug)

    def forward(self, x: Tensor) -> Tensor:
        start, normed = x, self.upper(x)
        mixed = self.mix(normed)
        x = (normed if self.bug == "residual_of_norm" and self.at == 1 else x) + mixed
        x = taps.tap(f"tower/stages.{self.at}.middle", x)
        y = start if self.bug == "mlp_beside_attention" and self.at == 2 else x
        return x + self.feed(self.lower(y))


class Tower(nn.Module):
    """The encoder; returns the features, and the pooled projection."""

    def __init__(self, bug: str | None) -> None:
        super().__init__()
        self.bug = bug
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(POSITIONS, WIDTH))
        self.stages = nn.ModuleList([Stage(bug, i) for i in range(LAYERS)])
        self.top, self.head = Norm(bug), nn.Linear(WIDTH, WIDTH, bias=False)

    def embedded(self, ids: Tensor) -> Tensor:
        first = 1 if self.bug == "positions_from_one" else 0
        places = self.places[first : first + ids.shape[1]]
        return taps.tap("tower/embedded", self.words(ids) + places)

    def pooled(self, ids: Tensor, x: Tensor) -> Tensor:
        at = (ids == END).int().argmax(-1)
        if self.bug == "pooled_at_highest_id":
            at = ids.argmax(-1)
        return x[torch.arange(len(ids)), at]

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        bug, n = self.bug, ids.shape[1]
        x = self.embedded(ids)
        ahead = 2 if bug == "causal_one_ahead" else 1
        hidden = torch.ones(n, n, dtype=torch.bool).triu(ahead)[None, None]
        if bug == "padding_masked":
            after = (ids == END).int().cumsum(-1) - (ids == END).int() > 0
            hidden = hidden | after[:, None, None]
        taps.tap("tower/hidden_places", hidden.float())
        states = [x]
        for stage in self.stages:
            mix: Any = stage.mix
            mix.hidden = hidden
            states.append(stage(states[-1]))
        features = states[-1 if bug == "features_of_last" else -2]
        last = states[-2] if bug == "last_stage_skipped_for_pooled" else states[-1]
        y = last if bug == "pooled_without_norm" else self.top(last)
        if bug == "features_normed":
            features = self.top(features)
        pooled = self.head(taps.tap("tower/chosen", self.pooled(ids, y)))
        if bug == "pooled_normalised":
            pooled = F.normalize(pooled, dim=-1)
        return features, pooled


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """The checkpoint under this program's names."""
    end = "text_model.final_layer_norm"
    if bug == "end_norm_of_last_layer":
        end = f"text_model.encoder.layers.{LAYERS - 1}.layer_norm2"
    new = {
        "words.weight": w["text_model.embeddings.token_embedding.weight"],
        "places": w["text_model.embeddings.position_embedding.weight"],
        "head.weight": w["text_projection.weight"],
        "top.gain": w[f"{end}.weight"],
        "top.shift": w[f"{end}.bias"],
    }
    for i in range(LAYERS):
        old, stage = f"text_model.encoder.layers.{i}", f"stages.{i}"
        order = "kvq" if bug == "fused_in_file_order" else "qkv"
        first, second = ("2", "1") if bug == "norms_swapped" and i == 0 else ("1", "2")
        for kind in ("weight", "bias"):
            parts = [w[f"{old}.self_attn.{x}_proj.{kind}"] for x in order]
            new[f"{stage}.mix.fused.{kind}"] = np.concatenate(parts)
            new[f"{stage}.mix.back.{kind}"] = w[f"{old}.self_attn.out_proj.{kind}"]
            new[f"{stage}.feed.widen.{kind}"] = w[f"{old}.mlp.fc1.{kind}"]
            new[f"{stage}.feed.narrow.{kind}"] = w[f"{old}.mlp.fc2.{kind}"]
            own = {"weight": "gain", "bias": "shift"}[kind]
            new[f"{stage}.upper.{own}"] = w[f"{old}.layer_norm{first}.{kind}"]
            new[f"{stage}.lower.{own}"] = w[f"{old}.layer_norm{second}.{kind}"]
    if bug == "head_transposed":
        new["head.weight"] = new["head.weight"].T.copy()
    if bug == "fused_bias_not_loaded":
        new["stages.1.mix.fused.bias"] = np.zeros_like(new["stages.1.mix.fused.bias"])
    return new


def tokens(ids: Array, bug: str | None) -> Array:
    """The ids as this program's tokenizer would give them."""
    ids = ids.copy()
    if bug == "start_token_missing":
        ids = np.concatenate([ids[:, 1:], np.full_like(ids[:, :1], PAD)], 1)
    if bug == "padded_with_end":
        ids[ids == PAD] = END
    return ids


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    model = Tower(bug).eval().requires_grad_(False)
    state = converted(checkpoint(folder, "text_encoder"), bug)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()})
    model.to(getattr(torch, dtype))
    ids = torch.from_numpy(tokens(given(folder)("pipeline/input_ids"), bug))
    blocks = ("prompt.*", "tower/embedded", "tower/stages.?:out", "tower/head", "result.*")
    with (
        port_trace(out, dump, dtype, blocks, None) as recorder,
        record_modules(recorder, model, scope="tower", weights=weights),
    ):
        taps.tap("prompt.tokens", ids, kind="ids")
        features, pooled = model(ids)
        taps.tap("result.features", features)
        taps.tap("result.pooled", pooled)
        taps.tap("result.context", torch.cat([features, pooled[:, None]], 1))


NO_COUNTERPART = (r"^tower/hidden_places$",)

NORM = r"(?<![\w./])(layer ?)?norm"  # the word, not a part of a module's name
STATE = (
    r"hidden.?state|penultimate|skip|(last|next|previous|earlier|later|another|other) "
    r"(layer|block|stage|value|module|output)|(output|value|result)s? of|"
    r"instead of|too (late|early)"
)

BUGS = (
    Bug(
        "fused_in_file_order",
        "The fused weight holds k, v, q, and is split as q, k, v.",
        (r"load|weight|order|swap|permut",),
        "weights",
    ),
    Bug(
        "fused_bias_not_loaded",
        "Stage 1's q, k and v have no bias.",
        (r"bias|load|zero",),
        "weights",
    ),
    Bug("norms_swapped", "Stage 0's two norms are swapped.", (r"load|weight|swap",), "weights"),
    Bug(
        "end_norm_of_last_layer",
        "The last norm has the weights of the last layer's second norm.",
        (r"load|weight",),
        "weights",
    ),
    Bug("head_transposed", "The square projection is transposed.", (r"transpos",), "weights"),
    Bug(
        "start_token_missing",
        "The prompts begin without the start token.",
        (r"token|\bids?\b|start|bos",),
        "ids",
    ),
    Bug(
        "padded_with_end",
        "Prompts are padded with the end token, not 0.",
        (r"\bpad|token|\bids?\b",),
        "ids",
    ),
    Bug("positions_from_one", "Positions begin at 1.", (r"position|offset|shift|off by|roll",)),
    Bug(
        "norm_unbiased_variance",
        "Norms divide by the variance of n - 1.",
        (r"unbiased|variance|ddof|bessel|n ?[-−] ?1",),
    ),
    Bug("norm_eps", "Norms have eps 1e-6, not 1e-5.", (r"\beps",)),
    Bug(
        "fused_split_per_head",
        "Stage 1 takes q, k, v of each head, not heads of q, k, v.",
        (r"head|interleav|layout|reshape|fused|split|permut",),
    ),
    Bug(
        "heads_merged_first",
        "Stage 2 merges heads without moving them behind the tokens.",
        (r"head|transpos|layout|reshape|permut|axes",),
    ),
    Bug(
        "scale_of_width",
        "Scores are scaled by the width, not a head's.",
        (r"scal|sqrt|root|head.dim",),
    ),
    Bug(
        "bias_not_scaled",
        "Stage 0 scales q before its bias is added.",
        (r"bias|scal",),
    ),
    Bug(
        "causal_in_first_only",
        "Only the first stage has the causal mask.",
        (r"mask|causal|future|later token",),
    ),
    Bug(
        "causal_one_ahead",
        "Each token sees the next one.",
        (r"mask|causal|future|next|diagonal|ahead|later token",),
    ),
    Bug("padding_masked", "Tokens after the end are masked.", (r"mask|\bpad",)),
    Bug("gelu_erf", "The MLP has GELU, not quick GELU.", (r"gelu|1\.702|erf",)),
    Bug(
        "quick_gelu_rounded",
        "Quick GELU has the factor 1.7.",
        (r"1\.70?2?\b|gelu|sigmoid|factor",),
    ),
    Bug("residual_of_norm", "Stage 1 adds to the normed input.", (r"residual", NORM)),
    Bug(
        "mlp_beside_attention",
        "Stage 2's MLP reads the stage's input.",
        (
            r"parallel|residual|skip|(before|without) (the )?attention",
            r"attention.*(missing|not added)",
            r"(block|layer|stage|wrong|another|other)('s)? (own )?input|input of (the|another)",
        ),
    ),
    Bug(
        "features_of_last",
        "Features are the last hidden state.",
        (STATE,),
    ),
    Bug("features_normed", "The last norm is applied to the features.", (NORM,)),
    Bug(
        "last_stage_skipped_for_pooled",
        "The pooled value comes from the last but one stage.",
        (STATE,),
    ),
    Bug("pooled_without_norm", "The pooled value is not normed.", (NORM,)),
    Bug(
        "pooled_at_highest_id",
        "The pooled token is that of the highest id.",
        (r"token|position|\bend\b|\beos|argmax|index|row",),
    ),
    Bug(
        "pooled_normalised",
        "The pooled value has length 1.",
        (r"normali[sz]|unit (length|norm)|\blength|\bl2\b|F\.normalize",),
    ),
)
