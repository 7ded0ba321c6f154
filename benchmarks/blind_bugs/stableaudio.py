"""Stable Audio's conditioner, transformer and sampler as functions of torch tensors.

Audio is (batch, time, channels) everywhere. Each product records its input too, under its own
name; the gate comes first in the MLP's fused weight. The sampler is DPM++ 2M of EDM's sigmas.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import EDMDPMSolverMultistepScheduler, StableAudioDiTModel
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from torch import Tensor

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
from lydite.trace.taps import set_step, tap
from lydite.trace.torch_capture import record_modules

NAME = "stableaudio"
HEADS, KV, HEAD, LAYERS, CHANNELS, FRAMES = 4, 2, 8, 3, 6, 11
WIDTH, CROSS, COND, TEXT, WAVE, N_TEXT, VALID = HEADS * HEAD, KV * HEAD, 12, 10, 16, 6, 4
START, END, LONGEST, NUMBERS = 1.5, 12.0, 10.0, 256
STEPS, GUIDANCE, LOW, HIGH = 4, 3.5, 0.3, 40.0


def reference(folder: Path, dtype: str) -> None:
    """The pipeline without a negative prompt; the end is beyond the longest audio."""
    config: dict[str, Any] = dict(sample_size=FRAMES, in_channels=CHANNELS, out_channels=CHANNELS)
    config |= dict(num_layers=LAYERS, attention_head_dim=HEAD, num_attention_heads=HEADS)
    config |= dict(num_key_value_attention_heads=KV, cross_attention_dim=CROSS, time_proj_dim=WAVE)
    config |= dict(global_states_input_dim=2 * COND, cross_attention_input_dim=COND)
    model = randomised(lambda: StableAudioDiTModel(**config), 71)
    for name, parameter in model.named_parameters():
        if name.endswith(("to_q.weight", "to_out.0.weight", "proj.0.weight")):
            parameter.mul_(2)
    projection = randomised(lambda: StableAudioProjectionModel(TEXT, COND, 0.0, LONGEST), 72)
    model = saved(model, folder, "transformer", dtype)
    projection = saved(projection, folder, "projection_model", dtype)
    options: dict[str, Any] = dict(sigma_min=LOW, sigma_max=HIGH, sigma_data=1.0)
    options |= dict(sigma_schedule="exponential", prediction_type="v_prediction")
    scheduler: Any = EDMDPMSolverMultistepScheduler(**options)
    scheduler.set_timesteps(STEPS)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, projection, scope="projection_model", weights=True),
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        x = noise(1, 1, CHANNELS, FRAMES).to(model.dtype)
        text = noise(2, 1, N_TEXT, TEXT).to(model.dtype)
        mask = (torch.arange(N_TEXT) < VALID).long()[None]
        seconds = torch.tensor([START]), torch.tensor([END])
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/prompt_embeds", text, kind="input")
        recorder.record("pipeline/attention_mask", mask, kind="input")
        recorder.record("pipeline/seconds", torch.cat(seconds), kind="input")
        found = projection(text, *seconds)
        text = found.text_hidden_states * mask.unsqueeze(-1).to(model.dtype)
        start, end = found.seconds_start_hidden_states, found.seconds_end_hidden_states
        context = torch.cat([text, start, end], 1)
        context = torch.cat([torch.zeros_like(context), context])
        recorder.record("pipeline/context", context)
        duration = torch.cat([torch.cat([start, end], 2)] * 2)
        recorder.record("pipeline/duration", duration)
        rope: Any = get_1d_rotary_pos_embed(
            HEAD // 2, FRAMES + 1, use_real=True, repeat_interleave_real=False
        )
        recorder.record("pipeline/rope_cos", rope[0])
        recorder.record("pipeline/rope_sin", rope[1])
        x = recorder.record("pipeline/scaled_noise", x * scheduler.init_noise_sigma)
        for recorder.step, t in enumerate(scheduler.timesteps):
            both = scheduler.scale_model_input(torch.cat([x, x]), t)
            out = model(both, t[None], context, duration, rope, return_dict=False)[0]
            without, with_text = out.chunk(2)
            guided = without + GUIDANCE * (with_text - without)
            recorder.record("pipeline/noise_pred", guided)
            x = scheduler.step(guided, t, x).prev_sample
            recorder.record("pipeline/latents", x)


def converted(folder: Path, bug: str | None) -> dict[str, Tensor]:
    """Parameters of this port."""
    w = {k: torch.from_numpy(v) for k, v in checkpoint(folder, "transformer").items()}
    w |= {k: torch.from_numpy(v) for k, v in checkpoint(folder, "projection_model").items()}
    new: dict[str, Tensor] = {}

    def put(name: str, *parts: str) -> None:
        for end, short in (("weight", "w"), ("bias", "b")):
            if f"{parts[0]}.{end}" in w:
                new[f"{name}.{short}"] = torch.cat([w[f"{p}.{end}"] for p in parts])

    put("cond.text", "text_projection")
    for s in ("start", "end"):
        source = "start" if bug == "end_has_weights_of_start" else s
        old = f"{source}_number_conditioner.time_positional_embedding"
        new[f"cond.{s}.freqs"] = w[f"{old}.0.weights"]
        put(f"cond.{s}", f"{old}.1")
    new["time.freqs"] = w["time_proj.weight"]
    for i, j in ((0, 1), (2, 2)):
        put(f"time.{j}", f"timestep_proj.{i}")
        put(f"glob.{j}", f"global_proj.{i}")
        put(f"ctx.{j}", f"cross_attention_proj.{i}")
    ends = ("postprocess_conv", "preprocess_conv")
    if bug != "convolutions_exchanged":
        ends = ends[::-1]
    for name, old in zip(("pre", "post"), ends, strict=True):
        new[f"{name}.w"] = w[f"{old}.weight"][..., 0]
    put("into", "proj_in")
    put("onto", "proj_out")
    for i in range(LAYERS):
        old, b = f"transformer_blocks.{i}", f"h{i}"
        put(f"{b}.sa.qkv", *(f"{old}.attn1.to_{x}" for x in "qkv"))
        put(f"{b}.sa.o", f"{old}.attn1.to_out.0")
        put(f"{b}.xa.q", f"{old}.attn2.to_q")
        order = "vk" if bug == "cross_values_before_keys" and i == 0 else "kv"
        put(f"{b}.xa.kv", *(f"{old}.attn2.to_{x}" for x in order))
        put(f"{b}.xa.o", f"{old}.attn2.to_out.0")
        put(f"{b}.ff.up", f"{old}.ff.net.0.proj")
        if bug != "gate_and_value_not_exchanged":
            for end in "wb":
                new[f"{b}.ff.up.{end}"] = torch.cat(new[f"{b}.ff.up.{end}"].chunk(2)[::-1])
        put(f"{b}.ff.down", f"{old}.ff.net.2")
        numbers = (1, 3, 2) if bug == "norms_exchanged" and i == 2 else (1, 2, 3)
        for n, name in zip(numbers, ("sa.ln", "xa.ln", "ff.ln"), strict=True):
            put(f"{b}.{name}", f"{old}.norm{n}")
    if bug == "cross_out_transposed":
        new["h1.xa.o.w"] = new["h1.xa.o.w"].T.contiguous()
    if bug == "frequencies_stored_float16":
        new["time.freqs"] = new["time.freqs"].half().float()
    return new


class Audio:
    """Everything but the loop."""

    def __init__(self, p: dict[str, Tensor], bug: str | None, dtype: torch.dtype) -> None:
        self.p, self.bug, self.dtype = {k: v.to(dtype) for k, v in p.items()}, bug, dtype

    def dense(self, name: str, x: Tensor) -> Tensor:
        x = tap(name, x, slot="in.0")
        return tap(name, F.linear(x, self.p[f"{name}.w"], self.p.get(f"{name}.b")))

    def pair(self, name: str, x: Tensor) -> Tensor:
        """Two layers with SiLU between."""
        x = self.dense(f"{name}.1", x)
        return self.dense(f"{name}.2", x if self.bug == f"{name}_without_silu" else F.silu(x))

    def norm(self, name: str, x: Tensor) -> Tensor:
        w, b = self.p[f"{name}.w"], self.p[f"{name}.b"]
        eps = 1e-3 if self.bug == "norm_eps" else 1e-5
        return tap(name, F.layer_norm(x, (WIDTH,), w, b, eps))

    def number(self, name: str, seconds: Tensor) -> Tensor:
        """The embedding of a time in the audio, as (1, 1, channels)."""
        bug = self.bug
        if bug != "seconds_not_clamped":
            seconds = seconds.clamp(0, LONGEST)
        t = (seconds / LONGEST).to(self.dtype)[:, None]
        a = t * self.p[f"{name}.freqs"] * (2 * math.pi)
        return self.dense(name, torch.cat([t, a.sin(), a.cos()], -1))[:, None]

    def conditions(self, text: Tensor, mask: Tensor, seconds: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens for cross attention, first those of no prompt, and the durations."""
        bug = self.bug
        text = self.dense("cond.text", text)
        if bug != "padding_not_zeroed":
            text = text * mask[..., None].to(text.dtype)
        start = self.number("cond.start", seconds[:1])
        end = self.number("cond.end", seconds[1:])
        context = torch.cat([text, start, end], 1)
        without = torch.zeros_like(context)
        if bug == "seconds_without_prompt":
            without[:, N_TEXT:] = context[:, N_TEXT:]
        pair = [end, start] if bug == "duration_end_first" else [start, end]
        duration = torch.cat([torch.cat(pair, -1)] * 2)
        return tap("context", torch.cat([without, context])), tap("duration", duration)

    def clock(self, t: Tensor) -> Tensor:
        a = 2 * math.pi * t.to(self.dtype)[:, None] * self.p["time.freqs"]
        parts = [a.cos(), a.sin()]
        if self.bug == "time_sines_first":
            parts.reverse()
        return self.pair("time", tap("time.wave", torch.cat(parts, -1)))

    def table(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the joined tokens, for half of a head's rotated channels."""
        bug = self.bug
        rotated = HEAD if bug == "rope_all_channels" else HEAD // 2
        width = HEAD if bug == "rope_exponent_of_head" else rotated
        f = 10000.0 ** -(torch.arange(0, rotated, 2).float() / width)
        positions = torch.arange(FRAMES + 1).float()
        if bug == "rope_audio_from_zero":
            positions = (positions - 1).clamp(0)
        a = positions[:, None] * f
        return tap("rope.cos", a.cos()), tap("rope.sin", a.sin())

    def rotate(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """The first channels of (batch, heads, tokens, channels)."""
        cos, sin = table
        n = 2 * cos.shape[-1]
        y, rest = x[..., :n].float(), x[..., n:]
        if self.bug == "rope_last_channels":
            rest, y = x[..., :-n], x[..., -n:].float()
        if self.bug == "rope_neighbours":
            a, b = y[..., ::2], y[..., 1::2]
            y = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = y.chunk(2, -1)
            y = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        parts = [y.to(x.dtype), rest]
        if self.bug == "rope_last_channels":
            parts.reverse()
        return torch.cat(parts, -1)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        scores = q.float() @ k.float().mT * HEAD**-0.5
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        y = (scores.softmax(-1) @ v.float()).to(q.dtype)
        return y.transpose(1, 2).flatten(2)

    def self_attention(self, b: str, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        bug = self.bug
        qkv = self.dense(f"{b}.qkv", x)
        if bug == "heads_before_qkv" and b == "h1.sa":
            q, k, v = qkv.unflatten(-1, (HEADS, 3, HEAD)).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = qkv.unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        q = self.rotate(q, table)
        if bug != "keys_not_rotated":
            k = self.rotate(k, table)
        q, k = tap(f"{b}.qr", q), tap(f"{b}.kr", k)
        return self.dense(f"{b}.o", self.mix(q, k, v))

    def cross_attention(self, b: str, x: Tensor, c: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        bug = self.bug
        q = self.dense(f"{b}.q", x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        if bug == "cross_queries_rotated":
            q = self.rotate(q, table)
        k, v = self.dense(f"{b}.kv", c).unflatten(-1, (2, KV, HEAD)).permute(2, 0, 3, 1, 4)
        if bug == "kv_heads_tiled":
            k, v = (y.repeat(1, HEADS // KV, 1, 1) for y in (k, v))
        else:
            k, v = (y.repeat_interleave(HEADS // KV, 1) for y in (k, v))
        seen = None
        if bug == "cross_padding_hidden":
            at = torch.arange(c.shape[1])
            seen = (at < VALID) | (at >= N_TEXT)
        return self.dense(f"{b}.o", self.mix(q, k, v, seen))

    def mlp(self, b: str, x: Tensor) -> Tensor:
        gate, up = self.dense(f"{b}.up", x).chunk(2, -1)
        act = F.gelu(gate) if self.bug == "mlp_geglu" else F.silu(gate)
        return self.dense(f"{b}.down", act * up)

    def block(self, b: str, x: Tensor, c: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        bug = self.bug

        def own(x: Tensor) -> Tensor:
            return x + self.self_attention(f"{b}.sa", self.norm(f"{b}.sa.ln", x), table)

        def cross(x: Tensor) -> Tensor:
            y = self.norm(f"{b}.xa.ln", x)
            y = x if bug == "cross_reads_without_norm" and b == "h1" else y
            y = self.cross_attention(f"{b}.xa", y, c, table)
            return y if bug == "cross_residual_missing" and b == "h2" else x + y

        before = x
        x = own(cross(x)) if bug == "cross_attention_first" and b == "h0" else cross(own(x))
        source = before if bug == "mlp_reads_block_input" and b == "h1" else x
        return tap(b, x + self.mlp(f"{b}.ff", self.norm(f"{b}.ff.ln", source)))

    def __call__(self, x: Tensor, t: Tensor, context: Tensor, duration: Tensor) -> Tensor:
        """The prediction for (batch, time, channels)."""
        bug = self.bug
        c = self.pair("ctx", context)
        g = self.pair("glob", duration)
        time = self.clock(t)[:, None]
        g = g if bug == "time_not_added" else g + time
        table = self.table()
        y = self.dense("pre", x)
        x = self.dense("into", y if bug == "pre_residual_missing" else y + x)
        parts = [x, g] if bug == "global_token_last" else [g, x]
        x = tap("joined", torch.cat(parts, 1))
        count = LAYERS - 1 if bug == "last_block_not_run" else LAYERS
        for i in range(count):
            x = self.block(f"h{i}", x, c, table)
        x = self.dense("onto", x)
        x = x[:, :-1] if bug in ("global_token_last", "last_token_cut") else x[:, 1:]
        y = self.dense("post", x)
        return tap("out", y if bug == "post_residual_missing" else y + x)


def schedule(bug: str | None) -> Tensor:
    """Sigmas with the last zero."""
    sigmas = torch.linspace(math.log(LOW), math.log(HIGH), STEPS).exp().flip(0)
    if bug == "sigmas_of_karras":
        ramp = torch.linspace(0, 1, STEPS)
        sigmas = (HIGH ** (1 / 7) + ramp * (LOW ** (1 / 7) - HIGH ** (1 / 7))) ** 7
    if bug == "sigma_without_last":
        sigmas = torch.linspace(math.log(LOW), math.log(HIGH), STEPS + 1).exp().flip(0)[:-1]
    return torch.cat([sigmas, torch.zeros(1)])


def clean_audio(x: Tensor, v: Tensor, sigma: float, bug: str | None) -> Tensor:
    """The denoised audio of a v-prediction."""
    total = sigma**2 + 1
    if bug == "prediction_is_noise":
        return x - sigma * v
    return x / total - sigma / math.sqrt(total) * v


def sample(net: Audio, x: Tensor, context: Tensor, duration: Tensor, bug: str | None) -> None:
    sigmas = schedule(bug)
    times = 0.25 * sigmas[:-1].log()
    if bug == "time_log10":
        times = 0.25 * sigmas[:-1].log10()
    tap("sampler.sigmas", sigmas, kind="schedule")
    tap("sampler.times", times, kind="schedule")
    level = HIGH if bug == "noise_scaled_by_sigma" else math.sqrt(HIGH**2 + 1)
    x = tap("sampler.start", (x.float() * level).to(net.dtype))
    previous: Tensor | None = None
    for i in range(STEPS):
        set_step(i)
        sigma, then = float(sigmas[i]), float(sigmas[i + 1])
        y = x if bug == "input_not_scaled" else x.float() / math.sqrt(sigma**2 + 1)
        y = torch.cat([y.to(net.dtype)] * 2)
        out = net(y, times[i][None], context, duration)
        without, with_text = out.chunk(2)
        if bug == "guidance_halves_exchanged":
            without, with_text = with_text, without
        v = tap("sampler.v", without + GUIDANCE * (with_text - without))
        d = tap("sampler.clean", clean_audio(x.float(), v.float(), sigma, bug).to(net.dtype))
        slope = d.float()
        if previous is not None and (then > 0 or bug == "last_step_second_order"):
            before = math.log(float(sigmas[i - 1]) / sigma)
            r = before / (math.log(sigma / then) if then > 0 else before)
            half = 1.0 if bug == "correction_not_halved" else 0.5
            slope = slope + half / r * (d.float() - previous.float())
        if not (bug == "previous_kept_from_first" and previous is not None):
            previous = d
        ratio = then / sigma
        x = tap("sampler.x", (ratio * x.float() + (1 - ratio) * slope).to(net.dtype))


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, run = given(folder), getattr(torch, dtype)
    net = Audio(converted(folder, bug), bug, run)
    x = torch.from_numpy(value("pipeline/noise"))
    x = x.reshape(1, FRAMES, CHANNELS) if bug == "noise_reshaped" else x.transpose(1, 2)
    x = x.contiguous().to(run)
    text = torch.from_numpy(value("pipeline/prompt_embeds")).to(run)
    mask = torch.from_numpy(value("pipeline/attention_mask"))
    seconds = torch.from_numpy(value("pipeline/seconds"))
    if bug == "start_always_zero":
        seconds[0] = 0
    blocks = ("given.*", "context", "duration", "joined", "h?:out", "out", "sampler.*", "glob.2")
    blocks += ("time.2", "ctx.2", "cond.*:out")
    with port_trace(out, dump, dtype, blocks, None) as recorder, torch.no_grad():
        if weights:
            kept = {k: v.float().numpy() for k, v in net.p.items()}
            recorder.writer.add_weights(kept)
        tap("given.noise", x, kind="input")
        tap("given.text", text, kind="input")
        tap("given.mask", mask, kind="input")
        tap("given.seconds", seconds, kind="input")
        context, duration = net.conditions(text, mask, seconds)
        sample(net, x, context, duration, bug)


NO_COUNTERPART: tuple[str, ...] = (r"^sampler\.clean$", r"^joined$")

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|order|permut|revers"
BUGS = (
    Bug(
        "end_has_weights_of_start",
        "The end's conditioner has the start's weights.",
        (
            LOADED,
            r"dupl|another (layer|module)|same param",
        ),
        "weights",
    ),
    Bug(
        "convolutions_exchanged",
        "The convolutions before and after the transformer are exchanged.",
        (
            LOADED,
            SWAPPED,
        ),
        "weights",
    ),
    Bug(
        "cross_values_before_keys",
        "The first cross attention's fused product is joined as v, k.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "gate_and_value_not_exchanged",
        "The MLP's fused weight keeps the value first, and the gate is read first.",
        (LOADED, r"half|halves|gate|silu|chunk", SWAPPED),
        "weights",
    ),
    Bug(
        "norms_exchanged",
        "The last block's norms before cross attention and the MLP are exchanged.",
        (
            LOADED,
            SWAPPED,
        ),
        "weights",
    ),
    Bug(
        "cross_out_transposed",
        "The square weight after the second cross attention is transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "frequencies_stored_float16",
        "The time's Fourier frequencies were stored in float16.",
        (LOADED, r"f16|float16|\bhalf\b|fp16|precision|round"),
        "weights",
    ),
    Bug("norm_eps", "Norms have eps 1e-3.", (r"\beps",)),
    Bug(
        "glob_without_silu",
        "The durations' two layers have no SiLU between.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "ctx_without_silu",
        "The text's two layers have no SiLU between.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "seconds_not_clamped",
        "The end of the audio is not clamped to the longest.",
        (r"clamp|clip|range|bound|limit|maximum",),
        "inputs",
    ),
    Bug(
        "padding_not_zeroed",
        "Padding of the text is not set to zero.",
        (r"mask|padd|zero",),
    ),
    Bug(
        "seconds_without_prompt",
        "The call without prompt keeps the tokens of the seconds.",
        (r"zero|negative|uncond|\bseconds\b|without (a )?prompt|\bnull\b",),
    ),
    Bug(
        "duration_end_first",
        "Durations are joined with the end first.",
        (
            r"concat|half|halves|\broll",
            SWAPPED,
        ),
    ),
    Bug("start_always_zero", "The audio's start is 0.", (r"\bseconds\b|\bstart\b|zero",), "inputs"),
    Bug(
        "time_sines_first",
        "Sines of the time come before cosines.",
        (r"\bcos|\bsin|flip", SWAPPED),
    ),
    Bug(
        "time_not_added",
        "The time is not added to the global token.",
        (
            r"(not|never) (added|used)|missing (term|summand|addend|input)|residual",
            r"without the time|duration\w* (alone|only)",
        ),
    ),
    Bug(
        "rope_all_channels",
        "RoPE rotates all channels of a head, not half of them.",
        (r"partial|rotat\w* (all|dim|width|channels|half)|all channels|half|rope.*(dim|width)",),
    ),
    Bug(
        "rope_exponent_of_head",
        "Exponents of RoPE divide by the head's width, not the rotated.",
        (r"frequenc|exponent|theta|\bbase\b|inv_freq|rope.*(dim|width|channels)",),
    ),
    Bug(
        "rope_audio_from_zero",
        "Audio positions begin with 0, as the global token's.",
        (r"position|offset|off.by.one|roll|shift|begin",),
    ),
    Bug(
        "rope_last_channels",
        "RoPE rotates the last half of a head's channels.",
        (r"half|halves|partial|(last|second|other|wrong) .*channels|rotated (part|channels)",),
    ),
    Bug(
        "rope_neighbours",
        "RoPE rotates neighbours.",
        (r"half|halves|interleav|neighbou?r|adjacent|pair",),
    ),
    Bug(
        "keys_not_rotated",
        "Only queries are rotated.",
        (
            r"(not|un|without|missing|no|skip\w*|lacks?)\b.*(rope|rotat|rotary)|unrotated",
            r"(rope|rotat\w*|rotary)\b.*(missing|not|skip|only|absent)",
        ),
    ),
    Bug(
        "cross_queries_rotated",
        "Queries of cross attention are rotated.",
        (
            r"(extra|should not|also|addition\w*|appl\w*|remove|is) .*(rope|rotat|rotary)",
            r"(rope|rotat\w*|rotary)\b.*(extra|should not|appl|remove|not in the ref)",
        ),
    ),
    Bug(
        "heads_before_qkv",
        "The second block's fused product is split as heads first, then q, k and v.",
        (r"heads?\b|split|reshap|interleav|layout", SWAPPED),
    ),
    Bug(
        "kv_heads_tiled",
        "Keys and values of cross attention are tiled over the heads.",
        (r"\btil(e|ed|ing)|repeat|group|interleav|gqa|\bkv\b|heads? (order|of)",),
    ),
    Bug(
        "cross_padding_hidden",
        "Cross attention does not see padding, which the reference attends to.",
        (r"mask|padd",),
    ),
    Bug("mlp_geglu", "The MLP's gate is GELU.", (r"gelu|silu|swish|activation",)),
    Bug(
        "cross_reads_without_norm",
        "The second block's cross attention reads its input without the norm.",
        (
            r"norm.*(missing|skip|not (appl|run|used)|left out|lack|unused|never)",
            r"(missing|skip|\bno\b|without|lacks?).*norm|un-?normed|not normed",
            r"before (the )?norm|input of (the )?norm",
        ),
    ),
    Bug(
        "cross_residual_missing",
        "The last block's cross attention is not added to its input.",
        (r"residual|skip connection|(not|without) add|input.*(not added|missing)",),
    ),
    Bug(
        "cross_attention_first",
        "The first block runs cross attention before self attention.",
        (
            r"before (self|own|the)|after (self|own|the)|order|cross.*(input|reads)",
            r"input of (the )?(block|layer)",
        ),
    ),
    Bug(
        "mlp_reads_block_input",
        "The second block's MLP reads the block's input.",
        (
            r"parallel|beside|residual|(before|without) (the )?att|input of (the )?(block|layer)",
            r"(block|layer)'?s? (own )?input|att\w* .*(missing|skip|not added)",
        ),
    ),
    Bug(
        "pre_residual_missing",
        "The first convolution is not added to its input.",
        (r"residual|skip connection|(not|without) add|input.*(not added|missing)",),
    ),
    Bug(
        "post_residual_missing",
        "The last convolution is not added to its input.",
        (r"residual|skip connection|(not|without) add|input.*(not added|missing)",),
    ),
    Bug(
        "global_token_last",
        "The global token is the last, not the first.",
        (
            r"token|concat|prepend|append|\broll|shift|position",
            SWAPPED,
        ),
    ),
    Bug(
        "last_token_cut",
        "The last token is cut off, not the global one.",
        (r"token|slice|offset|off.by.one|crop|\broll|shift|\bcut\b",),
    ),
    Bug(
        "last_block_not_run",
        "The last block is not run.",
        (
            r"skip|too few|fewer|missing|not (run|called|applied|recorded)|never|too early",
            r"(one|another|other|wrong|earlier|previous|last) (layer|block)|earlier (value|output)",
        ),
    ),
    Bug(
        "sigmas_of_karras",
        "Sigmas are Karras's, not exponential.",
        (r"sigma|schedule|karras|exponential|timestep",),
        "schedule",
    ),
    Bug(
        "sigma_without_last",
        "Sigmas are spaced for one step more and stop before the smallest.",
        (r"sigma|schedule|off.by.one|spac|timestep",),
        "schedule",
    ),
    Bug(
        "time_log10",
        "The time is a quarter of the decimal logarithm.",
        (r"\blog|timestep|schedule|\btimes?\b|factor|\bscal",),
        "schedule",
    ),
    Bug(
        "noise_reshaped",
        "The noise is reshaped to channels last, not transposed.",
        (r"noise|layout|transpos|reshap|permut|\bax[ei]s\b|channel",),
        "inputs",
    ),
    Bug(
        "noise_scaled_by_sigma",
        "The noise is multiplied by sigma, not the root of its square + 1.",
        (r"\bscal(e|es|ed|ing)\b|factor|sqrt|root|multipl",),
    ),
    Bug(
        "input_not_scaled",
        "The network's input is not divided by the root of sigma squared + 1.",
        (r"scal|sigma|factor|sqrt|root|multipl|divid",),
    ),
    Bug(
        "guidance_halves_exchanged",
        "Guidance takes the first half of the batch as that with text.",
        (r"guid|\bcfg\b|\bcond|uncond|negative|half|halves|batch", SWAPPED),
    ),
    Bug(
        "prediction_is_noise",
        "The prediction is taken as noise, not as velocity.",
        (r"epsilon|noise|prediction.type|v.prediction|velocity|c_skip|c_out|precondition",),
    ),
    Bug(
        "last_step_second_order",
        "The last step is of second order.",
        (r"order|last step|final|euler|multistep|history|previous|correct",),
    ),
    Bug(
        "correction_not_halved",
        "The second order's correction is not halved.",
        (r"half|0\.5|second.order|multistep|correct|coefficient|factor|midpoint",),
    ),
    Bug(
        "previous_kept_from_first",
        "The second order always uses the first step's prediction.",
        (r"previous|step 0|stale|history|multistep|second.order|cach",),
    ),
)
