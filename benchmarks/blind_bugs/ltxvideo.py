"""LTX-Video from one image, in plain torch: functions over a dict of weights, few of them fused.

The architecture is that of Lightricks/LTX-Video; diffusers' LTXVideoTransformer3DModel and the loop
of LTXImageToVideoPipeline are the reference. Videos are (frames, rows, columns, channels) without a
batch, the prompt comes before the negative one, heads stay merged, and each name begins with its
step. Text and RoPE are computed once, before the loop.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, LTXVideoTransformer3DModel
from diffusers.models.transformers import transformer_ltx
from torch import Tensor

from blind_bugs.planting import (
    Array,
    Bug,
    checkpoint,
    given,
    noise,
    port_trace,
    randomised,
    reference_trace,
    saved,
)
from lydite.trace import taps
from lydite.trace.arrays import to_numpy
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

NAME = "ltxvideo"
HEADS, HEAD, LAYERS, CAPTION, TOKENS, CHANNELS, WAVE = 4, 8, 3, 20, 7, 6, 256
WIDTH, FRAMES, ROWS, COLUMNS, STEPS = HEADS * HEAD, 3, 3, 4, 3
AREA, GUIDANCE, RESCALE = ROWS * COLUMNS, 3.0, 0.7
PLACES, VALID = FRAMES * AREA, (2, 5)  # tokens of the negative prompt and of the prompt
SHIFTS, LENGTHS, TERMINAL = (0.95, 2.05), (1024, 4096), 0.1
RATE, TIMES_SMALLER, SMALLER = 25, 8, 32  # frames per second; the VAE's compression
LARGEST = (20, 2048, 2048)  # frames, rows and columns that RoPE takes as 1


def packed(x: Tensor) -> Tensor:
    """(1, places, channels) of (1, channels, frames, rows, columns)."""
    return x.flatten(2).transpose(1, 2)


def unpacked(x: Tensor) -> Tensor:
    return x.transpose(1, 2).unflatten(2, (FRAMES, ROWS, COLUMNS))


def reference(folder: Path, dtype: str) -> None:
    """The loop of the pipeline: latents stay float32, the image's frame is kept."""
    config: dict[str, Any] = dict(in_channels=CHANNELS, out_channels=CHANNELS, num_layers=LAYERS)
    config |= dict(num_attention_heads=HEADS, attention_head_dim=HEAD, caption_channels=CAPTION)
    model = randomised(lambda: LTXVideoTransformer3DModel(**config, cross_attention_dim=WIDTH), 71)
    for name, parameter in model.named_parameters():
        if ".to_q.weight" in name or ".to_out.0.weight" in name:
            parameter.mul_(2)  # attention matters
    model = saved(model, folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=SHIFTS[0],
        max_shift=SHIFTS[1],
        base_image_seq_len=LENGTHS[0],
        max_image_seq_len=LENGTHS[1],
        shift_terminal=TERMINAL,
    )
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
        watch_function(recorder, transformer_ltx, "apply_rotary_emb"),
    ):
        slope = (SHIFTS[1] - SHIFTS[0]) / (LENGTHS[1] - LENGTHS[0])
        mu = PLACES * slope + SHIFTS[0] - slope * LENGTHS[0]
        sigmas = np.linspace(1.0, 1 / STEPS, STEPS)
        scheduler.set_timesteps(STEPS, sigmas=sigmas, mu=mu)
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        text = noise(11, 2, TOKENS, CAPTION).to(model.dtype)
        mask = torch.arange(TOKENS)[None] < torch.tensor(VALID)[:, None]
        image = noise(12, 1, CHANNELS, 1, ROWS, COLUMNS)
        start = noise(13, 1, CHANNELS, FRAMES, ROWS, COLUMNS)
        mean, std = noise(14, CHANNELS) / 3, noise(15, CHANNELS).abs() + 0.5
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/prompt_attention_mask", mask, kind="input")
        recorder.record("pipeline/image_latents", image, kind="input")
        recorder.record("pipeline/noise", start, kind="input")
        recorder.record("pipeline/latents_mean", mean, kind="input")
        recorder.record("pipeline/latents_std", std, kind="input")
        kept = torch.zeros(1, 1, FRAMES, ROWS, COLUMNS)
        kept[:, :, 0] = 1
        latents = packed(image.repeat(1, 1, FRAMES, 1, 1) * kept + start * (1 - kept))
        kept = packed(kept).squeeze(-1)
        recorder.record("pipeline/initial_latents", latents, kind="input")
        recorder.record("pipeline/conditioning_mask", kept, kind="input")
        for i, t in enumerate(scheduler.timesteps):
            recorder.step = i
            predicted = model(
                hidden_states=torch.cat([latents] * 2).to(model.dtype),
                encoder_hidden_states=text,
                timestep=t.expand(2).unsqueeze(-1) * (1 - torch.cat([kept, kept])),
                encoder_attention_mask=mask,
                num_frames=FRAMES,
                height=ROWS,
                width=COLUMNS,
                rope_interpolation_scale=(TIMES_SMALLER / RATE, SMALLER, SMALLER),
                return_dict=False,
            )[0].float()
            uncond, cond = predicted.chunk(2)
            both = uncond + GUIDANCE * (cond - uncond)
            rescaled = both * (cond.std() / both.std())
            both = RESCALE * rescaled + (1 - RESCALE) * both
            recorder.record("pipeline/noise_pred", both)
            velocity, x = unpacked(both), unpacked(latents)
            moved = scheduler.step(velocity[:, :, 1:], t, x[:, :, 1:], return_dict=False)[0]
            latents = packed(torch.cat([x[:, :, :1], moved], 2))
            recorder.record("pipeline/latents", latents)
        video = unpacked(latents) * std.view(1, -1, 1, 1, 1) + mean.view(1, -1, 1, 1, 1)
        recorder.record("pipeline/video_latents", video)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: matrices stay (out, in)."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        for end, old in (("w", "weight"), ("b", "bias")):
            new[f"{name}.{end}"] = np.concatenate([w[f"{part}.{old}"] for part in parts])

    put("patchify", "proj_in")
    put("clock/one", "time_embed.emb.timestep_embedder.linear_1")
    put("clock/two", "time_embed.emb.timestep_embedder.linear_2")
    put("clock/six", "time_embed.linear")
    put("caption/one", "caption_projection.linear_1")
    put("caption/two", "caption_projection.linear_2")
    for i in range(LAYERS):
        old, b = f"transformer_blocks.{i}", f"layer{i}"
        order = "qvk" if bug == "values_before_keys" and i == 1 else "qkv"
        put(f"{b}/self/qkv", *(f"{old}.attn1.to_{x}" for x in order))
        put(f"{b}/cross/q", f"{old}.attn2.to_q")
        source = "transformer_blocks.1" if bug == "cross_keys_of_layer_before" and i == 2 else old
        put(f"{b}/cross/kv", f"{source}.attn2.to_k", f"{source}.attn2.to_v")
        for own, other in (("self", "attn1"), ("cross", "attn2")):
            put(f"{b}/{own}/out", f"{old}.{other}.to_out.0")
            new[f"{b}/{own}/q_norm.g"] = w[f"{old}.{other}.norm_q.weight"]
            new[f"{b}/{own}/k_norm.g"] = w[f"{old}.{other}.norm_k.weight"]
        put(f"{b}/mlp/up", f"{old}.ff.net.0.proj")
        put(f"{b}/mlp/down", f"{old}.ff.net.2")
        table = w[f"{old}.scale_shift_table"]
        if bug == "tables_width_first":
            table = table.reshape(WIDTH, 6).T.copy()
        new[f"{b}/ada.table"] = table
    new["last/ada.table"] = w["scale_shift_table"]
    put("last/out", "proj_out")
    if bug == "query_key_norms_exchanged":
        q, k = "layer0/self/q_norm.g", "layer0/self/k_norm.g"
        new[q], new[k] = new[k], new[q]
    if bug == "cross_bias_missing":
        new["layer2/cross/out.b"] = np.zeros_like(new["layer2/cross/out.b"])
    if bug == "caption_transposed":
        new["caption/two.w"] = new["caption/two.w"].T.copy()
    return new


def rotated(x: Tensor, table: tuple[Tensor, Tensor], bug: str | None) -> Tensor:
    """RoPE over all channels of the merged heads; pairs are neighbours."""
    cos, sin = table
    if bug == "rope_halves":
        a, b = x.float().chunk(2, -1)
        turned = torch.cat([-b, a], -1)
    else:
        a, b = x.float()[..., 0::2], x.float()[..., 1::2]
        turned = torch.stack([-b, a], -1).flatten(-2)
    return (x.float() * cos + turned * sin).to(x.dtype)


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Of (batch, tokens, width); `bias` (batch, keys) is added to the scores."""
    q, k, v = (x.float().unflatten(-1, (HEADS, HEAD)) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
    if bias is not None:
        scores = scores + bias[:, None, None]
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2)


class Ltx:
    """The network; `at` is the prefix of a name."""

    def __init__(self, p: dict[str, Tensor], bug: str | None) -> None:
        self.p, self.bug, self.at = p, bug, ""
        self.dtype = p["patchify.w"].dtype

    def tap(self, name: str, x: Tensor, slot: str = "out") -> Tensor:
        return taps.tap(f"{self.at}{name}", x, slot=slot)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.tap(name, F.linear(x, self.p[f"{name}.w"], self.p[f"{name}.b"]))

    def rms(self, x: Tensor) -> Tensor:
        y = x.float()
        if self.bug == "block_norms_centred":
            y = y - y.mean(-1, keepdim=True)
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def qk_norm(self, name: str, x: Tensor) -> Tensor:
        """Over the whole width, all heads at once."""
        y = x.float()
        if self.bug == "qk_norm_per_head":
            y = y.unflatten(-1, (HEADS, HEAD))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        y = y.reshape(x.shape) * self.p[f"{name}.g"].float()
        return self.tap(name, y.to(x.dtype))

    def rope(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of (places, width), of the middle of 0 … 1 in each axis."""
        bug, count = self.bug, WIDTH // 6
        scales = (TIMES_SMALLER / RATE, SMALLER, SMALLER)
        if bug == "frames_without_rate":
            scales = (1.0, SMALLER, SMALLER)
        sizes = (FRAMES, ROWS, COLUMNS)
        axes = [
            torch.arange(n, dtype=torch.float32) * scale / largest
            for n, scale, largest in zip(sizes, scales, LARGEST, strict=True)
        ]
        where = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(PLACES, 3)
        speeds = 10000.0 ** torch.linspace(0.0, 1.0, count) * math.pi / 2
        angles = speeds * (where[..., None] * 2 - 1)  # (places, 3, count)
        if bug != "rope_axis_by_axis":
            angles = angles.transpose(1, 2)
        angles = angles.flatten(1).repeat_interleave(2, -1)
        cos, sin = angles.cos(), angles.sin()
        rest = WIDTH - 6 * count
        ones, zeros = torch.ones(PLACES, rest), torch.zeros(PLACES, rest)
        parts = [[ones, cos], [zeros, sin]]
        if bug == "rope_rest_at_end":
            parts = [[cos, ones], [sin, zeros]]
        cos, sin = (torch.cat(x, -1) for x in parts)
        if bug == "rope_tables_bfloat16":
            cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
        return self.tap("rope/cos", cos), self.tap("rope/sin", sin)

    def caption(self, text: Tensor) -> Tensor:
        x = F.gelu(self.linear("caption/one", text), approximate="tanh")
        return self.linear("caption/two", self.tap("caption/two", x, "in.0"))

    def clock(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Of (batch, places): six vectors for the layers, and one for the end."""
        half = WAVE // 2
        if self.bug == "time_below_one":
            t = t / 1000
        speeds = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        angles = t[..., None] * speeds
        x = torch.cat([angles.cos(), angles.sin()], -1).to(self.dtype)
        x = self.linear("clock/one", self.tap("clock/one", x, "in.0"))
        x = self.linear("clock/two", F.silu(x))
        return self.linear("clock/six", F.silu(x)), x

    def attention(
        self,
        name: str,
        x: Tensor,
        text: Tensor | None,
        table: tuple[Tensor, Tensor],
        bias: Tensor | None,
    ) -> Tensor:
        """To itself with RoPE where there is no text."""
        late = self.bug == "qk_norm_after_rope" and text is None
        if text is None:
            q, k, v = self.linear(f"{name}/qkv", x).chunk(3, -1)
        else:
            q = self.linear(f"{name}/q", x)
            k, v = self.linear(f"{name}/kv", text).chunk(2, -1)
        if not late:
            q, k = self.qk_norm(f"{name}/q_norm", q), self.qk_norm(f"{name}/k_norm", k)
        if text is None:
            q, k = (rotated(y, table, self.bug) for y in (q, k))
        if late:
            q, k = self.qk_norm(f"{name}/q_norm", q), self.qk_norm(f"{name}/k_norm", k)
        for j, y in enumerate((q, k, v)):
            self.tap(f"{name}/mix", y, f"in.{j}")
        y = self.tap(f"{name}/mix", attended(q, k, v, bias).to(self.dtype))
        return self.linear(f"{name}/out", y)

    def layer(
        self,
        i: int,
        x: Tensor,
        text: Tensor,
        six: Tensor,
        table: tuple[Tensor, Tensor],
        bias: Tensor,
    ) -> Tensor:
        bug, b = self.bug, f"layer{i}"
        ada = self.tap(f"{b}/ada", self.p[f"{b}/ada.table"] + six.unflatten(-1, (6, WIDTH)))
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = ada.unbind(-2)
        y = self.rms(x) * (1 + scale_a) + shift_a
        y = self.attention(f"{b}/self", y, None, table, None)
        x = x + (y if bug == "attention_gate_missing" and i == 1 else y * gate_a)
        x = self.tap(f"{b}/middle", x)
        x = x + self.attention(f"{b}/cross", x, text, table, bias)
        if bug == "mlp_modulated_as_attention":
            shift_m, scale_m = shift_a, scale_a
        y = self.tap(f"{b}/mlp/up", self.rms(x) * (1 + scale_m) + shift_m, "in.0")
        y = F.gelu(self.linear(f"{b}/mlp/up", y), approximate="tanh")
        y = self.linear(f"{b}/mlp/down", self.tap(f"{b}/mlp/down", y, "in.0"))
        return self.tap(b, x + y * gate_m)

    def __call__(
        self, x: Tensor, t: Tensor, text: Tensor, table: tuple[Tensor, Tensor], bias: Tensor
    ) -> Tensor:
        """The velocities of (batch, places, channels)."""
        x = self.linear("patchify", x.to(self.dtype))
        six, time = self.clock(t)
        for i in range(LAYERS):
            x = self.layer(i, x, text, six, table, bias)
        shift, scale = (self.p["last/ada.table"] + time[..., None, :]).unbind(-2)
        if self.bug == "last_scale_before_shift":
            shift, scale = scale, shift
        x = self.tap("last/norm", F.layer_norm(x, (WIDTH,), eps=1e-6))
        x = self.tap("last/out", x * (1 + scale) + shift, "in.0")
        return self.linear("last/out", x).float()


def schedule(bug: str | None) -> Array:
    """Sigmas, shifted by the number of tokens and stretched to the terminal, then 0."""
    places = AREA if bug == "shift_of_one_frame" else PLACES
    share = (places - LENGTHS[0]) / (LENGTHS[1] - LENGTHS[0])
    mu = SHIFTS[0] + (SHIFTS[1] - SHIFTS[0]) * share
    x = np.linspace(1, 1 / STEPS, STEPS).astype(np.float32)
    x = math.exp(mu) / (math.exp(mu) + (1 / x - 1))
    if bug != "terminal_missing":
        x = 1 - (1 - x) / ((1 - x[-1]) / (1 - TERMINAL))
    return np.append(x, 0).astype(np.float32)


def guided(cond: Tensor, uncond: Tensor, bug: str | None) -> Tensor:
    """With most of its deviation brought back to that of the prompt's prediction."""
    if bug == "predictions_exchanged":
        cond, uncond = uncond, cond
    y = uncond + GUIDANCE * (cond - uncond)
    if bug == "rescale_missing":
        return y
    return RESCALE * (y * (cond.std() / y.std())) + (1 - RESCALE) * y


def flat(x: Tensor, bug: str | None) -> Tensor:
    """Frames, rows and columns as one axis of places."""
    if bug == "places_by_column":
        x = x.transpose(1, 2)
    return x.reshape(PLACES, -1)


def video_of(x: Tensor, bug: str | None) -> Tensor:
    if bug == "places_by_column":
        return x.reshape(FRAMES, COLUMNS, ROWS, -1).transpose(1, 2)
    return x.reshape(FRAMES, ROWS, COLUMNS, -1)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    kind, value = getattr(torch, dtype), given(folder)

    def input_of(name: str) -> Tensor:
        return torch.from_numpy(np.array(value(f"pipeline/{name}")))

    new = converted(checkpoint(folder, "transformer"), bug)
    p = {name: torch.from_numpy(np.ascontiguousarray(x)).to(kind) for name, x in new.items()}
    text, seen = input_of("prompt_embeds").flip(0).to(kind), input_of("prompt_attention_mask")
    seen = seen.bool().flip(0)
    if bug == "mask_of_prompt_for_both":
        seen = seen[:1].repeat(2, 1)
    first = FRAMES - 1 if bug == "image_in_last_frame" else 0
    x = input_of("noise")[0].permute(1, 2, 3, 0).clone()
    x[first] = input_of("image_latents")[0, :, 0].permute(1, 2, 0)
    kept = torch.zeros(FRAMES, ROWS, COLUMNS)
    kept[first] = 1
    sigmas = schedule(bug)
    mean, std = input_of("latents_mean"), input_of("latents_std")
    infos = {name: to_numpy(q) for name, q in p.items()} if weights else None
    net = Ltx(p, bug)
    blocks = ("given/*", "caption/two:out", "step?/patchify", "step?/layer?", "step?/last/out")
    blocks += ("step?/clock/six", "step?/guided", "step?/latents", "video")
    with port_trace(out, dump, dtype, blocks, infos), torch.no_grad():
        taps.tap("given/sigmas", sigmas, kind="schedule")
        taps.tap("given/times", sigmas[:-1] * np.float32(1000), kind="schedule")
        taps.tap("given/text", text, kind="input")
        taps.tap("given/seen", seen, kind="input")
        taps.tap("given/start", x, kind="input")
        taps.tap("given/kept", kept, kind="input")
        caption, table = net.caption(text), net.rope()
        hidden = seen if bug == "mask_inverted" else ~seen
        bias = hidden.float() * -10000.0
        for i in range(STEPS):
            net.at = f"step{i}/"
            t = torch.tensor(sigmas[i] * np.float32(1000)).expand(2, PLACES)
            if bug != "time_of_image_not_zero":
                t = t * (1 - flat(kept, bug)[:, 0])
            y = net(flat(x, bug).expand(2, -1, -1), t, caption, table, bias)
            y = net.tap("guided", video_of(guided(y[0], y[1], bug), bug))
            moved = x + float(sigmas[i + 1] - sigmas[i]) * y
            if bug != "image_frame_moved":
                moved = torch.where(kept[..., None] > 0, x, moved)
            if bug == "latents_bfloat16":
                moved = moved.bfloat16().float()
            x = net.tap("latents", moved)
        taps.tap("video", (x + mean) * std if bug == "mean_before_deviation" else x * std + mean)


NO_COUNTERPART = (r"^step\d/layer\d/ada$",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers|transpos"
POSITION = r"position|coordinate|\bgrid\b"
HALF = r"bf16|bfloat16|\bhalf\b|16.bit|precision|round|\bcast"
BUGS = (
    Bug(
        "values_before_keys",
        "The fused product of layer 1's self-attention was joined as q, v, k.",
        (LOADED, SWAPPED, r"keys?\b.*values?\b|values?\b.*keys?\b", r"\bq, ?v, ?k\b|\bqvk\b"),
        "weights",
    ),
    Bug(
        "cross_keys_of_layer_before",
        "Layer 2's cross keys and values have the weights of layer 1.",
        (LOADED, r"blocks\.1|(another|other|wrong|previous) (layer|block)|dupl|index"),
        "weights",
    ),
    Bug(
        "query_key_norms_exchanged",
        "The norms of layer 0's queries and keys have each other's weights.",
        (LOADED, SWAPPED, r"norm_[qk]|[qk]_norm|quer(y|ies).*keys?\b|keys?\b.*quer(y|ies)"),
        "weights",
    ),
    Bug(
        "cross_bias_missing",
        "The last layer's cross-attention lacks its output bias.",
        (LOADED, r"\bbias"),
        "weights",
    ),
    Bug(
        "tables_width_first",
        "The layers' tables are read as (width, 6) and transposed.",
        (LOADED, SWAPPED, r"table|reshap|layout|\bax[ei]s\b"),
        "weights",
    ),
    Bug(
        "caption_transposed",
        "The square weight of the second caption layer is transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "image_in_last_frame",
        "The image is kept in the last frame, not in the first.",
        (r"frame|\bimage|condition", SWAPPED, r"\binput|initial|latents|mask"),
        "inputs",
    ),
    Bug(
        "mask_of_prompt_for_both",
        "The negative prompt has the prompt's mask.",
        (r"mask|padd", r"negative|uncond|both prompts|batch"),
        "inputs",
    ),
    Bug(
        "mask_inverted",
        "The bias of cross-attention hides the valid tokens.",
        (r"mask|padd", r"invert|negat|opposite|complement|hides?\b|hidden"),
    ),
    Bug(
        "terminal_missing",
        "Sigmas are not stretched to the terminal value of 0.1.",
        (r"terminal|stretch", r"\bsigmas?\b|schedule|timestep"),
        "schedule",
    ),
    Bug(
        "shift_of_one_frame",
        "The shift of sigmas counts the tokens of one frame only.",
        (r"\bmu\b|shift|token|frame|sequence|length", r"\bsigmas?\b|schedule|timestep"),
        "schedule",
    ),
    Bug(
        "time_of_image_not_zero",
        "The image's tokens have the step's time, not 0.",
        (
            r"per.token|each token|first frame|condition|\bmask|\bimage",
            r"timestep|\btime\b|\bzero",
        ),
    ),
    Bug(
        "time_below_one",
        "The network gets sigma, not 1000 times sigma.",
        (r"1000|\bthousand|0\.001|\bsigma|timestep|\btime\b|\bscal|factor",),
    ),
    Bug(
        "frames_without_rate",
        "RoPE counts latent frames, not seconds.",
        (r"frame|\bfps|rate|second|tempor|\bscal|factor", POSITION),
    ),
    Bug(
        "rope_rest_at_end",
        "The two channels that RoPE leaves alone are the last, not the first.",
        (
            r"padd|\brest\b|remain|left over|unrotated|(not|un) ?rotated|identity",
            r"(first|last|front|end|begin|start).*channel|channel.*(first|last|front|end|start)",
            r"shift|offset|\broll|order|concat",
        ),
    ),
    Bug(
        "rope_halves",
        "RoPE pairs a channel with that of the other half.",
        (r"half|halves|interleav|neighbo|adjacent|pair|even|\bodd\b",),
    ),
    Bug(
        "rope_axis_by_axis",
        "RoPE's angles are ordered by axis, then by frequency.",
        (r"\bax[ei]s\b|interleav|frequenc|transpos|layout|order|permut", POSITION),
    ),
    Bug(
        "rope_tables_bfloat16",
        "RoPE's tables are rounded to bfloat16.",
        (HALF,),
    ),
    Bug(
        "qk_norm_per_head",
        "Queries and keys are normed in each head by itself.",
        (r"heads?\b|\bax[ei]s\b|all channels|whole|(full|entire) width",),
    ),
    Bug(
        "qk_norm_after_rope",
        "Queries and keys of self-attention are normed after RoPE.",
        (
            r"(norm|rope|rotat\w*|rotary)\b.*(before|after|order|first)",
            r"(before|after|first).*(norm|rope|rotat|rotary)",
        ),
    ),
    Bug(
        "block_norms_centred",
        "The layers' norms subtract the mean.",
        (r"\bmean\b|layer ?norm|cent(er|re)|subtract",),
    ),
    Bug(
        "attention_gate_missing",
        "Layer 1's self-attention is added without its gate.",
        (
            r"\b(un)?gat(e|es|ed|ing)\b|modulat",
            r"unscaled|not (multipl|scal)",
            r"(missing|without|skip\w*|lacks?|no) (the |its )?(factor|scal)",
        ),
    ),
    Bug(
        "mlp_modulated_as_attention",
        "The MLP's modulation has the shift and scale of attention.",
        (r"chunk|modulat|\bscale|\bshift|(wrong|other|first) (part|row|piece|slice)",),
    ),
    Bug(
        "last_scale_before_shift",
        "The last modulation takes the shift as scale and the scale as shift.",
        (r"shift.*scale|scale.*shift|chunk|split", SWAPPED),
    ),
    Bug(
        "predictions_exchanged",
        "Guidance takes the negative prompt's prediction as the prompt's.",
        (SWAPPED, r"guid|\bcfg\b", r"negative|uncond"),
    ),
    Bug(
        "rescale_missing",
        "Guidance is not rescaled to the deviation of the prompt's prediction.",
        (r"rescal|\bstd\b|deviation|\bscal|factor|guid|\bcfg\b",),
    ),
    Bug(
        "image_frame_moved",
        "The sampler's step changes the image's frame too.",
        (r"first frame|frame 0|condition|\bimage|\bmask|kept|frozen|(all|every) frame|in-?paint",),
    ),
    Bug(
        "latents_bfloat16",
        "Latents are rounded to bfloat16 after each step.",
        (HALF,),
    ),
    Bug(
        "places_by_column",
        "Tokens of a frame go down columns, not along rows.",
        (r"\brows?\b|column|layout|height|width|\bax[ei]s\b", SWAPPED, POSITION),
    ),
    Bug(
        "mean_before_deviation",
        "The latents' mean is added before they are multiplied by the deviation.",
        (r"\bmean\b|deviation|\bstd\b|statistic|normali", r"order|before|after"),
    ),
)
