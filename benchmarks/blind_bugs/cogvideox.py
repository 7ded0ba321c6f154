"""CogVideoX 1.5's transformer in torch, with the modules and names of the SAT repository.

Text and video are one sequence, q, k and v one product, the modulations of both norms one layer
of twelve chunks. Every module is recorded, with its inputs.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import CogVideoXTransformer3DModel
from diffusers.models import embeddings
from torch import Tensor, nn

from blind_bugs.planting import (
    Bug,
    checkpoint,
    given,
    noise,
    port_trace,
    randomised,
    reference_trace,
    saved,
)
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "cogvideox"
HEADS, HEAD, LAYERS, CHANNELS, PATCH = 2, 16, 3, 4, 2
WIDTH, TIME, TEXT, TOKENS = HEADS * HEAD, 16, 24, 7
FRAMES, HEIGHT, BREADTH = 4, 6, 8
GRID = (FRAMES // PATCH, HEIGHT // PATCH, BREADTH // PATCH)


def reference(folder: Path, dtype: str) -> None:
    """One call of the transformer on a batch of two."""
    config: dict[str, Any] = dict(
        num_attention_heads=HEADS, attention_head_dim=HEAD, num_layers=LAYERS
    )
    config |= dict(in_channels=CHANNELS, out_channels=CHANNELS, text_embed_dim=TEXT)
    config |= dict(time_embed_dim=TIME, ofs_embed_dim=TIME, patch_size=PATCH, patch_size_t=PATCH)
    config |= dict(sample_height=HEIGHT, sample_width=BREADTH, max_text_seq_length=TOKENS)
    model = randomised(
        lambda: CogVideoXTransformer3DModel(**config, use_rotary_positional_embeddings=True), 11
    )
    model = saved(model, folder, "transformer", dtype)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
        watch_function(recorder, embeddings, "apply_rotary_emb"),
        watch_function(recorder, embeddings, "get_3d_rotary_pos_embed"),
    ):
        latents = noise(1, 2, FRAMES, CHANNELS, HEIGHT, BREADTH).to(model.dtype)
        text = noise(2, 2, TOKENS, TEXT).to(model.dtype)
        latents = recorder.record("pipeline/latents", latents, kind="input")
        text = recorder.record("pipeline/prompt_embeds", text, kind="input")
        time = recorder.record("pipeline/timestep", torch.tensor([651.0, 651.0]), kind="schedule")
        ofs = recorder.record("pipeline/ofs", torch.tensor([2.0]), kind="input")
        rope = embeddings.get_3d_rotary_pos_embed(
            HEAD, None, GRID[1:], GRID[0], grid_type="slice", max_size=GRID[1:]
        )
        out = model(latents, text, time, ofs=ofs, image_rotary_emb=rope).sample
        recorder.record("pipeline/noise_pred", out)


Has = Callable[[str], bool]


def sinusoid(t: Tensor, dim: int, has: Has) -> Tensor:
    half = dim // 2
    shift = 1 if has("time_freq_shift") else 0
    freqs = torch.exp(-math.log(10000) * torch.arange(half).float() / (half - shift))
    args = t.float()[:, None] * freqs
    parts = [args.cos(), args.sin()]
    return torch.cat(parts[::-1] if has("time_sin_first") else parts, -1)


class Rotary(nn.Module):
    """Rotates neighbouring pairs of channels of the video tokens, which follow the text."""

    def __init__(self, has: Has) -> None:
        super().__init__()
        self.has = has
        axes = [torch.arange(n).float() for n in GRID]
        dims = [HEAD // 4, HEAD // 8 * 3, HEAD // 8 * 3]
        if has("rope_time_from_one"):
            axes[0] = axes[0] + 1
        if has("rope_channels_of_axes"):
            dims = [HEAD // 8 * 3, HEAD // 8 * 3, HEAD // 4]
        theta = 1000.0 if has("rope_theta") else 10000.0
        if has("rope_frequencies_of_whole_head"):
            freqs = [theta ** (-torch.arange(0, d, 2) / HEAD) for d in dims]
        else:
            freqs = [theta ** (-torch.arange(0, d, 2) / d) for d in dims]
        t, h, w = (torch.outer(a, f) for a, f in zip(axes, freqs, strict=True))
        n_t, n_h, n_w = GRID
        angle_t = t[:, None, None].expand(n_t, n_h, n_w, -1)
        angle_h = h[None, :, None].expand(n_t, n_h, n_w, -1)
        angle_w = w[None, None].expand(n_t, n_h, n_w, -1)
        if has("rope_height_width_swapped"):
            angle_h, angle_w = angle_w, angle_h
        angle = torch.cat([angle_t, angle_h, angle_w], -1).flatten(0, 2)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        has, n = self.has, math.prod(GRID)
        text, video = (x[:, :, n:], x[:, :, :n]) if has("rope_on_text") else x.split([TOKENS, n], 2)
        if has("rope_halves"):
            a, b = video.float().chunk(2, -1)
            out = torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)
        else:
            a, b = video.float()[..., 0::2], video.float()[..., 1::2]
            sin = -self.sin if has("rope_direction") else self.sin
            out = torch.stack([a * self.cos - b * sin, a * sin + b * self.cos], -1).flatten(-2)
        out = out.to(x.dtype)
        return torch.cat([out, text] if has("rope_on_text") else [text, out], 2)


class CoreAttention(nn.Module):
    def __init__(self, has: Has, i: int) -> None:
        super().__init__()
        self.has, self.i = has, i

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = WIDTH**-0.5 if self.has("attention_scale") else HEAD**-0.5
        if self.has("attention_bf16") and self.i == 1:
            q, k, v = (x.bfloat16() for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) * scale
        axis = 1 if self.has("softmax_over_heads") and self.i == 2 else -1
        return (scores.float().softmax(axis).to(v.dtype) @ v).to(self.dtype)

    dtype = torch.float32


class Attention(nn.Module):
    def __init__(self, has: Has, i: int) -> None:
        super().__init__()
        self.has, self.i = has, i
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.query_layernorm = nn.LayerNorm(HEAD, eps=1e-4 if has("qk_norm_eps") else 1e-6)
        self.key_layernorm = nn.LayerNorm(HEAD, eps=1e-6)
        self.rotary = Rotary(has)
        self.core_attention = CoreAttention(has, i)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=not has("dense_bias"))

    def forward(self, x: Tensor) -> Tensor:
        has, (b, s, _) = self.has, x.shape

        def heads(y: Tensor) -> Tensor:
            if has("heads_after_channels"):
                return y.view(b, s, HEAD, HEADS).permute(0, 3, 1, 2)
            return y.view(b, s, HEADS, HEAD).transpose(1, 2)

        q, k, v = (heads(y) for y in self.query_key_value(x).chunk(3, -1))
        if has("qk_norm_after_rope"):
            q, k = self.query_layernorm(self.rotary(q)), self.key_layernorm(self.rotary(k))
        elif has("key_norm_missing") and self.i == 2:
            q, k = self.rotary(self.query_layernorm(q)), self.rotary(k)
        else:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
            q = self.rotary(q)
            k = k if has("rope_query_only") else self.rotary(k)
        y = self.core_attention(q, k, v)
        y = y if has("heads_not_merged_back") and self.i == 1 else y.transpose(1, 2)
        return self.dense(y.reshape(b, s, WIDTH))


class Mlp(nn.Module):
    def __init__(self, has: Has, i: int) -> None:
        super().__init__()
        self.has, self.i = has, i
        self.dense_h_to_4h = nn.Linear(WIDTH, 4 * WIDTH)
        self.dense_4h_to_h = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense_h_to_4h(x)
        if self.has("mlp_silu") and self.i == 1:
            return self.dense_4h_to_h(F.silu(x))
        return self.dense_4h_to_h(F.gelu(x, approximate="none" if self.has("gelu_erf") else "tanh"))


class Layer(nn.Module):
    def __init__(self, has: Has, i: int) -> None:
        super().__init__()
        self.has, self.i = has, i
        eps = 1e-3 if has("layer_norm_eps") else 1e-5
        self.adaLN_modulation = nn.Linear(TIME, 12 * WIDTH)
        self.input_layernorm = nn.LayerNorm(WIDTH, eps=eps)
        self.attention = Attention(has, i)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH, eps=eps)
        self.mlp = Mlp(has, i)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        has, i = self.has, self.i
        mod = self.adaLN_modulation(emb if has("modulation_silu") else F.silu(emb))
        c = [y[:, None] for y in mod.chunk(12, -1)]  # video: msa, mlp; text: msa, mlp
        video, text = c[:6], c[6:]
        if has("modulation_streams_swapped"):
            video, text = text, video
        if has("modulation_scale_first"):
            video, text = ([y[1], y[0], *y[2:]] for y in (video, text))
        if has("gate_of_attention_for_mlp") and i == 1:
            video = [*video[:5], video[2]]

        def joint(k: int) -> Tensor:
            n = x.shape[1] - TOKENS
            return torch.cat([text[k].expand(-1, TOKENS, -1), video[k].expand(-1, n, -1)], 1)

        normed = self.input_layernorm(x)
        if has("norm_f16") and i == 0:
            normed = normed.half().to(x.dtype)
        y = normed * (1 + joint(1)) + joint(0)
        attention = self.attention(y)
        start = normed if has("residual_after_norm") and i == 2 else x
        gate = 1 if has("attention_gate_missing") and i == 2 else joint(2)
        x1 = start + gate * attention
        y = self.post_attention_layernorm(x if has("mlp_parallel") and i == 1 else x1)
        one = torch.ones(1, x.shape[1], 1, dtype=x.dtype)
        if has("text_one_plus_missing") and i == 1:
            one[:, :TOKENS] = 0
        y = self.mlp(y * (one + joint(4)) + joint(3))
        if has("text_mlp_missing") and i == 0:
            y = torch.cat([torch.zeros_like(y[:, :TOKENS]), y[:, TOKENS:]], 1)
        return x1 + joint(5) * y


class FinalLayer(nn.Module):
    def __init__(self, has: Has) -> None:
        super().__init__()
        self.has = has
        self.adaLN_modulation = nn.Linear(TIME, 2 * WIDTH)
        self.norm_final = nn.LayerNorm(WIDTH, eps=1e-5)
        self.linear = nn.Linear(WIDTH, PATCH**3 * CHANNELS)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(F.silu(emb))[:, None].chunk(2, -1)
        if self.has("final_scale_first"):
            shift, scale = scale, shift
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class DiffusionTransformer(nn.Module):
    def __init__(self, has: Has) -> None:
        super().__init__()
        self.has = has
        act = nn.GELU() if has("time_gelu") else nn.SiLU()
        self.time_embed = nn.Sequential(nn.Linear(WIDTH, TIME), act, nn.Linear(TIME, TIME))
        self.ofs_embed = nn.Sequential(nn.Linear(TIME, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.patch_proj = nn.Linear(PATCH**3 * CHANNELS, WIDTH)
        self.text_proj = nn.Linear(TEXT, WIDTH, bias=not has("text_bias"))
        self.layers = nn.ModuleList(Layer(has, i) for i in range(LAYERS))
        self.final_layernorm = nn.LayerNorm(WIDTH, eps=1e-5)
        self.final_layer = FinalLayer(has)

    def forward(self, latents: Tensor, text: Tensor, t: Tensor, ofs: Tensor) -> Tensor:
        has, (b, p) = self.has, (latents.shape[0], PATCH)
        t = t / 1000 if has("timestep_over_1000") else t
        emb = self.time_embed(sinusoid(t, WIDTH, has).to(latents.dtype))
        if not has("ofs_ignored"):
            emb = emb + self.ofs_embed(sinusoid(ofs, TIME, lambda _: False).to(latents.dtype))
        if has("frames_as_channels"):
            latents = latents.transpose(1, 2)
        x = latents.view(b, GRID[0], p, CHANNELS, GRID[1], p, GRID[2], p)
        order = (0, 1, 4, 6, 3, 2, 5, 7)
        if has("patch_channels_last"):
            order = (0, 1, 4, 6, 2, 5, 7, 3)
        if has("tokens_column_major"):
            order = (0, 1, 6, 4, 3, 2, 5, 7)
        x = self.patch_proj(x.permute(order).reshape(b, math.prod(GRID), -1))
        x = torch.cat([self.text_proj(text), x], 1)
        for i, layer in enumerate(self.layers):
            if not (has("layer_skipped") and i == 1):
                x = layer(x, emb)
        video = x[:, : math.prod(GRID)] if has("text_tokens_decoded") else x[:, TOKENS:]
        video = video if has("final_norm_missing") else self.final_layernorm(video)
        y = self.final_layer(video, emb)
        y = y.view(b, *GRID, CHANNELS, p, p, p)  # b t h w c pt ph pw
        order = (0, 1, 5, 4, 2, 6, 3, 7)
        if has("unpatch_rows_columns"):
            order = (0, 1, 5, 4, 2, 7, 3, 6)
        if has("unpatch_frames"):
            order = (0, 5, 1, 4, 2, 6, 3, 7)
        return y.permute(order).reshape(b, FRAMES, CHANNELS, HEIGHT, BREADTH)


def converted(w: dict[str, Tensor], has: Has) -> dict[str, Tensor]:
    """Diffusers' parameters under the names and in the layout of this port."""
    plain = {"patch_proj": "patch_embed.proj", "text_proj": "patch_embed.text_proj"}
    plain |= {"time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2"}
    plain |= {"ofs_embed.0": "ofs_embedding.linear_1", "ofs_embed.2": "ofs_embedding.linear_2"}
    plain |= {"final_layernorm": "norm_final", "final_layer.linear": "proj_out"}
    plain |= {"final_layer.adaLN_modulation": "norm_out.linear"}
    plain |= {"final_layer.norm_final": "norm_out.norm"}
    new: dict[str, Tensor] = {}
    for i in range(LAYERS):
        source = {1: 2, 2: 1}.get(i, i) if has("layers_loaded_in_other_order") else i
        old, layer = f"transformer_blocks.{source}", f"layers.{i}"
        plain |= {f"{layer}.input_layernorm": f"{old}.norm1.norm"}
        plain |= {f"{layer}.post_attention_layernorm": f"{old}.norm2.norm"}
        plain |= {f"{layer}.attention.query_layernorm": f"{old}.attn1.norm_q"}
        key_norm = "norm_q" if has("key_norm_from_query_norm") and i == 1 else "norm_k"
        plain |= {f"{layer}.attention.key_layernorm": f"{old}.attn1.{key_norm}"}
        plain |= {f"{layer}.attention.dense": f"{old}.attn1.to_out.0"}
        plain |= {f"{layer}.mlp.dense_h_to_4h": f"{old}.ff.net.0.proj"}
        plain |= {f"{layer}.mlp.dense_4h_to_h": f"{old}.ff.net.2"}
        qkv = "kqv" if has("fused_order_kqv") and i == 0 else "qkv"
        for end in ("weight", "bias"):
            parts = [w[f"{old}.attn1.to_{x}.{end}"] for x in qkv]
            new[f"{layer}.attention.query_key_value.{end}"] = torch.cat(parts)
            one, two = (w[f"{old}.norm{n}.linear.{end}"].chunk(2) for n in (1, 2))
            new[f"{layer}.adaLN_modulation.{end}"] = torch.cat([one[0], two[0], one[1], two[1]])
    new |= {f"{a}.{end}": w[f"{b}.{end}"] for a, b in plain.items() for end in ("weight", "bias")}
    if has("patch_weight_not_loaded"):
        new["patch_proj.weight"] = noise(5, *new["patch_proj.weight"].shape) * 0.1
    for name in ("text_proj.bias", *(f"layers.{i}.attention.dense.bias" for i in range(LAYERS))):
        if has("text_bias" if name == "text_proj.bias" else "dense_bias"):
            del new[name]
    return new


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    has, value = {bug}.__contains__, given(folder)
    model = DiffusionTransformer(has).eval().requires_grad_(False)
    state = {k: torch.from_numpy(v) for k, v in checkpoint(folder, "transformer").items()}
    model.load_state_dict(converted(state, has))
    model = model.to(getattr(torch, dtype))
    CoreAttention.dtype = getattr(torch, dtype)
    blocks = ("dit/layers.?:out", "dit:*", "dit/final_layer:out", "given/*")
    with (
        port_trace(out, dump, dtype, blocks, None) as recorder,
        record_modules(recorder, model, scope="dit", weights=weights),
    ):
        names = {"video": "latents", "text": "prompt_embeds", "t": "timestep", "ofs": "ofs"}
        x = {k: torch.from_numpy(value(f"pipeline/{v}")) for k, v in names.items()}
        for name in ("video", "text"):
            x[name] = recorder.record(
                f"given/{name}", x[name].to(CoreAttention.dtype), kind="input"
            )
        recorder.record("given/t", x["t"], kind="schedule")
        model(x["video"], x["text"], x["t"], x["ofs"])


# Text and video are one array here; where the reference has only the two parts, or where the
# modulation of both norms is one layer, no single value of it is the counterpart.
NO_COUNTERPART = (
    r"layers\.\d+$",
    r"layers\.\d+\.adaLN_modulation",
    r"layers\.\d+\.(input|post_attention)_layernorm",
)

BUGS = (
    Bug("rope_halves", "RoPE rotates halves, not neighbouring pairs.", (r"half|halves|interleav",)),
    Bug("rope_theta", "RoPE has base 1000, not 10000.", (r"theta|base|frequenc",)),
    Bug(
        "rope_direction", "RoPE rotates in the other direction.", (r"direction|sign|negat|invers",)
    ),
    Bug("rope_height_width_swapped", "RoPE's rows and columns are swapped.", (r"axes|axis|swap",)),
    Bug("rope_time_from_one", "RoPE's frames count from 1.", (r"offset|position|shift|start",)),
    Bug(
        "rope_channels_of_axes",
        "RoPE gives 6, 6, 4 channels to t, h, w.",
        (r"ax[ei]s|channels|dims|sizes",),
    ),
    Bug(
        "rope_frequencies_of_whole_head",
        "RoPE's exponent divides by the head.",
        (r"freq|exponent|theta|base",),
    ),
    Bug(
        "rope_on_text",
        "RoPE is applied to the first tokens, the text.",
        (r"token|offset|position|\btext",),
    ),
    Bug(
        "rope_query_only",
        "The key is not rotated.",
        (r"not (appl|rotat)|missing|without|skip|only",),
    ),
    Bug("qk_norm_eps", "The query's norm has eps 1e-4, not 1e-6.", (r"\beps",)),
    Bug("qk_norm_after_rope", "Norms of q and k follow RoPE.", (r"order|norm",)),
    Bug(
        "key_norm_missing", "The third layer has no key norm.", (r"norm.*(missing|skip|not appl)",)
    ),
    Bug("attention_scale", "Scores are divided by the root of all heads.", (r"scale|sqrt|root",)),
    Bug("attention_bf16", "Attention of layer 1 is in bfloat16.", (r"bf16|bfloat|precision|cast",)),
    Bug("softmax_over_heads", "Softmax is over heads in layer 2.", (r"softmax|axis",)),
    Bug("heads_after_channels", "Heads are split channels first.", (r"head|reshape|layout",)),
    Bug(
        "heads_not_merged_back",
        "Heads are merged untransposed.",
        (r"head|transpos|permut|reshape",),
    ),
    Bug("dense_bias", "The attention's output has no bias.", (r"bias",), "weights"),
    Bug("mlp_silu", "The feed-forward of layer 1 uses SiLU.", (r"silu|swish|activation",)),
    Bug("gelu_erf", "The feed-forward uses erf GELU, not tanh GELU.", (r"gelu|erf|tanh",)),
    Bug("layer_norm_eps", "The blocks' norms have eps 1e-3, not 1e-5.", (r"\beps",)),
    Bug(
        "norm_f16", "The first norm's result is rounded to float16.", (r"f16|float16|half|precis",)
    ),
    Bug("modulation_silu", "SiLU before the modulation is missing.", (r"silu|activation",)),
    Bug(
        "modulation_streams_swapped",
        "Text and video modulations are swapped.",
        (r"swap|order|chunk",),
    ),
    Bug("modulation_scale_first", "Scale and shift are swapped.", (r"shift|swap|order|chunk",)),
    Bug("gate_of_attention_for_mlp", "The MLP's gate is the attention's.", (r"gate|chunk",)),
    Bug("attention_gate_missing", "Layer 2 has no attention gate.", (r"gate",)),
    Bug("residual_after_norm", "Layer 2 adds to the normed input.", (r"residual|skip|norm",)),
    Bug(
        "mlp_parallel",
        "Layer 1's MLP reads the block's input.",
        (r"residual|\binput|parallel|added|adds",),
    ),
    Bug(
        "text_one_plus_missing",
        "Text is multiplied by scale, not 1 + scale.",
        (r"1 ?\+|\bone\b|scale",),
    ),
    Bug(
        "text_mlp_missing",
        "Text gets no feed-forward in layer 0.",
        (r"\btext|token|missing|part|zero",),
    ),
    Bug("layer_skipped", "The second layer is skipped.", (r"skip|missing|not (run|called)",)),
    Bug(
        "layers_loaded_in_other_order",
        "Layers 1 and 2 are swapped.",
        (r"weight|load|swap",),
        "weights",
    ),
    Bug(
        "key_norm_from_query_norm",
        "A key norm has the query's.",
        (r"weight|load|param",),
        "weights",
    ),
    Bug(
        "fused_order_kqv",
        "q, k and v are fused as k, q, v.",
        (r"order|fuse|swap|weight",),
        "weights",
    ),
    Bug("patch_weight_not_loaded", "The patch projection is random.", (r"load|weight",), "weights"),
    Bug("final_scale_first", "The last layer takes scale first.", (r"shift|swap|order|chunk",)),
    Bug("final_norm_missing", "The norm after the layers is missing.", (r"norm|missing|skip",)),
    Bug("text_bias", "The text projection has no bias.", (r"bias",), "weights"),
    Bug(
        "text_tokens_decoded", "The first tokens are decoded.", (r"token|slice|offset|\btext|crop",)
    ),
    Bug("time_gelu", "The timestep embedding uses GELU.", (r"gelu|activation|silu",)),
    Bug("time_freq_shift", "Timestep frequencies divide by half - 1.", (r"shift|freq|half",)),
    Bug("time_sin_first", "The timestep's sines come first.", (r"sin|cos|flip|order|swap",)),
    Bug("timestep_over_1000", "The timestep is divided by 1000.", (r"scale|1000|factor|timestep",)),
    Bug("ofs_ignored", "The ofs embedding is not added.", (r"ofs|added|adds|missing|sum|term",)),
    Bug(
        "frames_as_channels",
        "Frames and channels are exchanged.",
        (r"ax[ei]s|transpos|permut|order",),
    ),
    Bug(
        "patch_channels_last",
        "A patch is flattened channels last.",
        (r"order|patch|permut|flatten",),
    ),
    Bug("tokens_column_major", "Tokens are in column order.", (r"order|token|permut|transpos",)),
    Bug(
        "unpatch_rows_columns",
        "Patches are transposed at the end.",
        (r"patch|order|permut|transpos",),
    ),
    Bug("unpatch_frames", "Frames are put together patch first.", (r"patch|frame|order|permut",)),
)
