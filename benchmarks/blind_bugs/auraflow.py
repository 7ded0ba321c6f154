"""AuraFlow's transformer in MLX with its sampling loop: NHWC latents, weights as (in, out).

q, k and v are one product, the two inner layers of the MLP another. Image tokens come first in
every joined value; patches and their weights are in the order (row, column, channel).
"""

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

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
from lydite.trace.function_capture import watch_function
from lydite.trace.torch_capture import record_modules

mx.set_default_device(mx.cpu)

NAME = "auraflow"
HEADS, HEAD, JOINT, SINGLE = 2, 16, 2, 2
WIDTH, TEXT, CHANNELS, PATCH, TABLE = HEADS * HEAD, 20, 4, 2, 8
N_TEXT, PADDED, ROWS, COLUMNS = 6, 3, 3, 4
N_IMAGE, SINUSOIDS = ROWS * COLUMNS, 256
STEPS, SHIFT, GUIDANCE = 3, 1.73, 3.5


def reference(folder: Path, dtype: str) -> None:
    """Three steps with guidance; the pipeline zeroes the embeds of padding, and masks nothing."""
    config: dict[str, Any] = dict(sample_size=16, patch_size=PATCH, in_channels=CHANNELS)
    config |= dict(num_mmdit_layers=JOINT, num_single_dit_layers=SINGLE)
    config |= dict(attention_head_dim=HEAD, num_attention_heads=HEADS, joint_attention_dim=TEXT)
    config |= dict(caption_projection_dim=WIDTH, pos_embed_max_size=TABLE * TABLE)
    model = randomised(lambda: AuraFlowTransformer2DModel(**config), 81)
    for name, parameter in model.named_parameters():
        if "norm1" in name:
            parameter.mul_(3)  # larger gates: each block matters
    model = saved(model, folder, "transformer", dtype)
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(STEPS)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        embeds = noise(2, 2, N_TEXT, TEXT)  # of the negative prompt and the prompt
        embeds[0, -PADDED:] = 0
        embeds = embeds.to(model.dtype)
        x = noise(1, 1, CHANNELS, ROWS * PATCH, COLUMNS * PATCH).to(model.dtype)
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/prompt_embeds", embeds, kind="input")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        for recorder.step in range(STEPS):
            t = scheduler.timesteps[recorder.step]
            both = model(torch.cat([x] * 2), embeds, (t / 1000).expand(2)).sample
            negative, positive = both.chunk(2)
            guided = negative + GUIDANCE * (positive - negative)
            recorder.record("pipeline/guided", guided)
            x = scheduler.step(guided, t, x, return_dict=False)[0]
            recorder.record("pipeline/latents", x)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Array]:
    """Parameters of this port: weights as (in, out), fused, the patch's rows channels last."""
    new: dict[str, Array] = {}

    def put(name: str, *parts: str) -> None:
        new[f"{name}.w"] = np.concatenate([w[f"{p}.weight"] for p in parts]).T.copy()

    def put_mlp(name: str, old: str) -> None:
        order = (2, 1) if bug == "glu_halves_swapped" else (1, 2)
        put(f"{name}.gate_up", *(f"{old}.linear_{i}" for i in order))
        put(f"{name}.down", f"{old}.out_projection")

    put("patch.proj", "pos_embed.proj")
    if bug != "patch_weight_channel_order":
        rows = new["patch.proj.w"].reshape(CHANNELS, PATCH, PATCH, WIDTH)
        new["patch.proj.w"] = rows.transpose(1, 2, 0, 3).reshape(-1, WIDTH)
    new["patch.proj.b"] = w["pos_embed.proj.bias"]
    new["patch.pos"] = w["pos_embed.pos_embed"][0]
    put("ctx.proj", "context_embedder")
    if bug == "context_weight_float16":
        new["ctx.proj.w"] = new["ctx.proj.w"].astype(np.float16).astype(np.float32)
    registers = w["register_tokens"][0]
    new["ctx.reg"] = np.zeros_like(registers) if bug == "registers_zero" else registers
    for i in (1, 2):
        put(f"time.fc{i}", f"time_step_proj.linear_{i}")
        if not (bug == "time_bias_dropped" and i == 2):
            new[f"time.fc{i}.b"] = w[f"time_step_proj.linear_{i}.bias"]
    for i in range(JOINT):
        old = f"joint_transformer_blocks.{i}"
        for s, end in (("img", ""), ("txt", "_context")):
            name, qkv = f"mm{i}.{s}", "qkv"
            if bug == "qk_swapped_in_fused" and i == 1 and s == "img":
                qkv = "kqv"
            put(f"{name}.ada", f"{old}.norm1{end}.linear")
            form = f"{old}.attn." + ("add_{}_proj" if end else "to_{}")
            put(f"{name}.qkv", *(form.format(x) for x in qkv))
            put(f"{name}.o", f"{old}.attn.{'to_add_out' if end else 'to_out.0'}")
            put_mlp(name, f"{old}.ff{end}")
    if bug == "text_down_from_image":
        new["mm0.txt.down.w"] = new["mm0.img.down.w"].copy()
    for i in range(SINGLE):
        source = SINGLE - 1 - i if bug == "single_blocks_reversed" else i
        old, name = f"single_transformer_blocks.{source}", f"solo{i}"
        put(f"{name}.ada", f"{old}.norm1.linear")
        put(f"{name}.qkv", *(f"{old}.attn.to_{x}" for x in "qkv"))
        put(f"{name}.o", f"{old}.attn.to_out.0")
        put_mlp(name, f"{old}.ff")
    if bug == "v_part_not_transposed":
        v = new["solo1.qkv.w"][:, 2 * WIDTH :]
        new["solo1.qkv.w"][:, 2 * WIDTH :] = v.T.copy()
    put("head.ada", "norm_out.linear")
    put("head.out", "proj_out")
    return new


class Net:
    """The forward pass of both prompts, in the precision of the run."""

    def __init__(self, p: dict[str, Array], bug: str | None, dtype: str) -> None:
        self.bug, self.dtype = bug, getattr(mx, dtype)
        self.p = {k: mx.array(v).astype(self.dtype) for k, v in p.items()}
        self.heads, self.head = (4, WIDTH // 4) if bug == "four_heads" else (HEADS, HEAD)
        shift = 1 if bug == "time_freq_shift_one" else 0
        exponents = -math.log(10000) * np.arange(SINUSOIDS // 2) / (SINUSOIDS // 2 - shift)
        self.freqs = mx.array(np.exp(exponents).astype(np.float32))
        self.emb: mx.array | None = None

    def lin(self, name: str, x: mx.array) -> mx.array:
        y = x @ self.p[f"{name}.w"]
        if f"{name}.b" in self.p:
            y = y + self.p[f"{name}.b"]
        return taps.tap(name, y)

    def ln(self, x: mx.array) -> mx.array:
        return mx.fast.layer_norm(x, None, None, 1e-6 if self.bug == "ln_eps_1e6" else 1e-5)

    def qk_norm(self, x: mx.array) -> mx.array:
        if self.bug == "qk_rms":
            return mx.fast.rms_norm(x, None, 1e-5)
        return mx.fast.layer_norm(x, None, None, 1e-5)

    def time(self, t: mx.array) -> mx.array:
        """The embedding of the timesteps, which lie between 0 and 1."""
        if self.bug == "time_cached" and self.emb is not None:
            return self.emb
        angles = taps.tap("time.angles", t[:, None] * self.freqs * 1000)
        parts = [mx.cos(angles), mx.sin(angles)]
        if self.bug == "time_sin_first":
            parts.reverse()
        x = taps.tap("time.sin", mx.concatenate(parts, -1).astype(self.dtype))
        self.emb = self.lin("time.fc2", nn.silu(self.lin("time.fc1", x)))
        return self.emb

    def patches(self, x: mx.array) -> mx.array:
        """Tokens of the latents with the middle of the table of positions."""
        x = x.reshape(len(x), ROWS, PATCH, COLUMNS, PATCH, CHANNELS)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(len(x), N_IMAGE, -1)
        y = self.lin("patch.proj", taps.tap("patch.proj", x, slot="in.0"))
        top, left = TABLE // 2 - ROWS // 2, TABLE // 2 - COLUMNS // 2
        if self.bug == "pos_centre_rounding":
            top, left = (TABLE - ROWS) // 2, (TABLE - COLUMNS) // 2
        table = self.p["patch.pos"].reshape(TABLE, TABLE, WIDTH)
        if self.bug == "pos_column_major":
            table = table.swapaxes(0, 1)
        pos = table[top : top + ROWS, left : left + COLUMNS].reshape(N_IMAGE, WIDTH)
        if self.bug == "pos_without_stride":
            start = top * TABLE + left
            pos = self.p["patch.pos"][start : start + N_IMAGE]
        return taps.tap("patch", y + pos)

    def text(self, embeds: mx.array) -> mx.array:
        x = self.lin("ctx.proj", embeds)
        registers = mx.broadcast_to(self.p["ctx.reg"], (len(x), *self.p["ctx.reg"].shape))
        return taps.tap("ctx", mx.concatenate([registers, x], 1))

    def modulation(self, name: str, emb: mx.array) -> list[mx.array]:
        """Shift, scale and gate of attention, and those of the MLP, as (prompts, 1, width)."""
        bug = self.bug
        plain = bug == "single_silu_missing" and name.startswith("solo")
        y = self.lin(f"{name}.ada", emb if plain else nn.silu(emb))[:, None]
        if bug == "mods_interleaved" and name == "mm0.txt":
            return [y[..., i::6] for i in range(6)]
        mods = list(mx.split(y, 6, -1))
        if bug == "gate_tanh" and name == "solo0":
            mods[2], mods[5] = mx.tanh(mods[2]), mx.tanh(mods[5])
        return mods

    def qkv(self, name: str, x: mx.array) -> list[mx.array]:
        """q, k and v as (prompts, tokens, heads, channels), q and k normed."""
        q, k, v = mx.split(self.lin(f"{name}.qkv", x), 3, -1)
        if self.bug == "qk_norm_whole_width":
            q, k = self.qk_norm(q), self.qk_norm(k)
        q, k, v = (y.reshape(*y.shape[:2], self.heads, self.head) for y in (q, k, v))
        if self.bug != "qk_norm_whole_width":
            q = self.qk_norm(q)
            k = k if self.bug == "k_norm_missing" and name == "solo1" else self.qk_norm(k)
        return [q, k, v]

    def attention(self, name: str, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        bug, mask = self.bug, None
        q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))
        q, k = taps.tap(f"{name}.q", q), taps.tap(f"{name}.k", k)
        scale = WIDTH**-0.5 if bug == "scale_of_width" else self.head**-0.5
        n = q.shape[2]
        if bug == "causal_single" and name.startswith("solo"):
            mask = mx.tril(mx.ones((n, n), mx.bool_))
        if bug == "padding_masked":
            mask = mx.ones((2, 1, 1, n), mx.bool_)
            mask[0, ..., n - PADDED :] = False
        if bug == "probabilities_bfloat16" and name == "solo1":
            probabilities = mx.softmax((q * scale) @ k.swapaxes(2, 3), -1, precise=True)
            y = probabilities.astype(mx.bfloat16).astype(self.dtype) @ v
        else:
            y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        if not (bug == "heads_not_moved_back" and name == "mm1"):
            y = y.swapaxes(1, 2)
        return taps.tap(f"{name}.att", y.reshape(len(y), n, WIDTH))

    def mlp(self, name: str, x: mx.array) -> mx.array:
        gate, up = mx.split(x @ self.p[f"{name}.gate_up.w"], 2, -1)
        if self.bug == "silu_of_product" and name == "solo1":
            h = nn.silu(gate * up)
        elif self.bug == "sigmoid_gate" and name == "mm0.txt":
            h = mx.sigmoid(gate) * up
        else:
            h = nn.silu(gate) * up
        return self.lin(f"{name}.down", taps.tap(f"{name}.hid", h))

    def rest(self, name: str, x: mx.array, att: mx.array, mods: list[mx.array]) -> mx.array:
        """A stream after attention: both residuals begin at the block's input."""
        bug = self.bug
        gate, shift, scale, gate_mlp = mods[2:]
        single = name.startswith("solo")
        y = gate * self.lin(f"{name}.o", att)
        mid = y if bug == "norm2_without_residual" and name == "mm0.txt" else x + y
        mid = taps.tap(f"{name}.mid", mid)
        if bug == "norm2_unbiased" and single:
            wide = mid.astype(mx.float32)
            wide = wide - wide.mean(-1, keepdims=True)
            wide = wide * mx.rsqrt(wide.var(-1, keepdims=True, ddof=1) + 1e-5)
            y = wide.astype(self.dtype)
        else:
            y = self.ln(mid)
        y = taps.tap(f"{name}.pre2", y * (1 + scale) + shift)
        start = mid if bug == "single_residual_running" and single else x
        return taps.tap(name, start + gate_mlp * self.mlp(name, y))

    def pre(self, name: str, x: mx.array, mods: list[mx.array]) -> mx.array:
        return taps.tap(f"{name}.pre", self.ln(x) * (1 + mods[1]) + mods[0])

    def joint(self, i: int, img: mx.array, txt: mx.array, emb: mx.array) -> list[mx.array]:
        name, x = f"mm{i}", {"img": img, "txt": txt}
        mods = {s: self.modulation(f"{name}.{s}", emb) for s in x}
        if self.bug == "text_uses_image_modulation" and i == 1:
            mods["txt"] = mods["img"]
        parts = [self.qkv(f"{name}.{s}", self.pre(f"{name}.{s}", y, mods[s])) for s, y in x.items()]
        q, k, v = (mx.concatenate([part[j] for part in parts], 1) for j in range(3))
        if self.bug == "v_joined_text_first" and i == 0:
            v = mx.concatenate([parts[1][2], parts[0][2]], 1)
        y = self.attention(name, q, k, v)
        att = {"img": y[:, :N_IMAGE], "txt": y[:, N_IMAGE:]}
        return [self.rest(f"{name}.{s}", x[s], att[s], mods[s]) for s in x]

    def single(self, i: int, x: mx.array, emb: mx.array) -> mx.array:
        name = f"solo{i}"
        mods = self.modulation(name, emb)
        if self.bug == "mlp_gate_chunk_first" and i == 1:
            mods = [*mods[:3], mods[4], mods[5], mods[3]]
        att = self.attention(name, *self.qkv(name, self.pre(name, x, mods)))
        return self.rest(name, x, att, mods)

    def head_of(self, x: mx.array, emb: mx.array) -> mx.array:
        """The velocity; scale comes before shift here, and no norm before both."""
        bug = self.bug
        x = x[:, 1 : N_IMAGE + 1] if bug == "decoded_tokens_off_by_one" else x[:, :N_IMAGE]
        scale, shift = mx.split(self.lin("head.ada", nn.silu(emb))[:, None], 2, -1)
        if bug == "final_chunks_as_in_blocks":
            scale, shift = shift, scale
        x = self.ln(x) if bug == "final_extra_norm" else x
        x = self.lin("head.out", taps.tap("head.pre", x * (1 + scale) + shift))
        if bug == "unpatchify_channels_first":
            x = x.reshape(len(x), ROWS, COLUMNS, CHANNELS, PATCH, PATCH)
            x = x.transpose(0, 1, 4, 2, 5, 3)
        elif bug == "unpatchify_rows_columns":
            x = x.reshape(len(x), ROWS, COLUMNS, PATCH, PATCH, CHANNELS)
            x = x.transpose(0, 1, 4, 2, 3, 5)
        else:
            x = x.reshape(len(x), ROWS, COLUMNS, PATCH, PATCH, CHANNELS)
            x = x.transpose(0, 1, 3, 2, 4, 5)
        return taps.tap("velocity", x.reshape(len(x), ROWS * PATCH, COLUMNS * PATCH, CHANNELS))

    def __call__(self, x: mx.array, embeds: mx.array, t: mx.array) -> mx.array:
        img, emb, txt = self.patches(x), self.time(t), self.text(embeds)
        for i in range(JOINT):
            img, txt = self.joint(i, img, txt, emb)
        x = mx.concatenate([img, txt], 1)
        for i in range(SINGLE):
            x = self.single(i, x, emb)
        return self.head_of(x, emb)


def schedule(bug: str | None) -> Array:
    """Sigmas from 1 to 0; diffusers shifts the smallest one twice."""
    shift = 3.0 if bug == "shift_of_sd3" else SHIFT
    smallest = 1 / 1000
    if bug != "sigma_min_shifted_once":
        smallest = shift * smallest / (1 + (shift - 1) * smallest)
    sigmas = np.linspace(1, smallest, STEPS)
    if bug == "linspace_to_zero":
        sigmas = np.linspace(1, 0, STEPS + 1)[:-1]
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    last = sigmas[-1] if bug == "last_sigma_repeated" else 0
    return np.append(sigmas, last).astype(np.float32)


def guide(both: mx.array, bug: str | None, step: int) -> mx.array:
    """Classifier-free guidance of the negative prompt and the prompt."""
    negative, positive = both[:1], both[1:]
    if bug == "guidance_chunks_swapped":
        negative, positive = positive, negative
    delta = taps.tap("guide.delta", positive - negative)
    if bug == "guidance_off_in_last_step" and step == STEPS - 1:
        return positive
    start = positive if bug == "guidance_from_conditional" else negative
    guided = start + GUIDANCE * delta
    if bug == "guidance_rescaled":
        rescaled = guided * (positive.std() / guided.std())
        return 0.7 * rescaled + 0.3 * guided
    return guided


def sample(net: Net, x: mx.array, embeds: mx.array, sigmas: Array, bug: str | None) -> None:
    first = x
    for i in range(STEPS):
        taps.set_step(i)
        t = sigmas[i + 1 if bug == "timestep_of_next_sigma" else i]
        t = t * 1000 if bug == "timestep_not_divided" else t
        if bug == "timestep_bfloat16":
            t = t.astype(ml_dtypes.bfloat16).astype(np.float32)
        times = taps.tap("in.t", mx.full((2,), float(t), mx.float32), kind="schedule")
        both = net(mx.concatenate([x, x]), embeds, times)
        guided = taps.tap("guided", guide(both, bug, i))
        start = first if bug == "euler_from_noise" else x
        dt = float(sigmas[i + 1]) - float(sigmas[i])
        x = (start.astype(mx.float32) + dt * guided.astype(mx.float32)).astype(net.dtype)
        if bug == "latents_float16":
            x = x.astype(mx.float16).astype(net.dtype)
        x = taps.tap("latents", x)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value = given(folder)
    parameters = converted(checkpoint(folder, "transformer"), bug)
    net = Net(parameters, bug, dtype)
    start = value("pipeline/noise")
    if bug == "noise_reshaped":
        start = start.reshape(1, ROWS * PATCH, COLUMNS * PATCH, CHANNELS)
    else:
        start = start.transpose(0, 2, 3, 1)
    x = mx.array(np.ascontiguousarray(start)).astype(net.dtype)
    embeds = mx.array(value("pipeline/prompt_embeds")).astype(net.dtype)
    if bug == "last_text_token_dropped":
        embeds = embeds[:, :-1]
    sigmas, kept = schedule(bug), None
    if weights:
        narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        kept = {k: v.astype(narrow) for k, v in parameters.items()}
    blocks = ("in.*", "patch", "ctx", "time.fc2", "mm?.img", "mm?.txt", "solo?", "velocity")
    blocks += ("guided", "latents")
    with port_trace(out, dump, dtype, blocks, kept):
        taps.tap("in.noise", x, kind="input")
        taps.tap("in.embeds", embeds, kind="input")
        taps.tap("in.sigmas", sigmas, kind="schedule")
        sample(net, x, embeds, sigmas, bug)


NO_COUNTERPART = (r"^time\.angles$", r"^guide\.delta$")

LOWER = r"(lower|reduced|less|half|narrower)[ -]precision|rounded to|rounds|\bcast|narrow"
SWAP = r"swap|exchang|order|chunk|rotat|permut"
BUGS = (
    Bug(
        "qk_swapped_in_fused",
        "The image's fused weight of mm1 has k before q.",
        (r"load|weight|swap|order|exchang|permut",),
        "weights",
    ),
    Bug(
        "text_down_from_image",
        "The text's last MLP layer in mm0 is loaded with the image's.",
        (r"load|weight|dupl|same param",),
        "weights",
    ),
    Bug(
        "single_blocks_reversed",
        "The single blocks are loaded in reverse order.",
        (r"load|weight|revers|swap|order|index",),
        "weights",
    ),
    Bug(
        "glu_halves_swapped",
        "The fused MLP weight has linear_2 first, so SiLU is applied to the wrong half.",
        (r"swap|exchang|order|other half|wrong half|halves|load|weight|linear_[12]",),
        "weights",
    ),
    Bug(
        "v_part_not_transposed",
        "The v part of solo1's fused weight is not transposed.",
        (r"transpos",),
        "weights",
    ),
    Bug(
        "context_weight_float16",
        "The weight of the text projection went through float16.",
        (r"(?<!b)f(loat)?16|" + LOWER, r"load|weight"),
        "weights",
    ),
    Bug(
        "registers_zero",
        "The register tokens are not loaded and stay zero.",
        (r"regist|zero|load|weight|missing param",),
        "weights",
    ),
    Bug(
        "time_bias_dropped",
        "The bias of the time embedding's second layer is not loaded.",
        (r"bias",),
        "weights",
    ),
    Bug(
        "patch_weight_channel_order",
        "The patch weight keeps the order (channel, row, column) of its inputs.",
        (r"order|permut|layout|channel|load|weight",),
        "weights",
    ),
    Bug(
        "pos_centre_rounding",
        "The middle of the position table is rounded the other way for an odd number of rows.",
        (r"position|\bpos\b|pos_embed|crop|cent(er|re)|offset|table",),
    ),
    Bug(
        "pos_column_major",
        "The position table is read column by column.",
        (r"position|\bpos\b|pos_embed|transpos|ax[ei]s|column",),
    ),
    Bug(
        "pos_without_stride",
        "Positions are twelve successive entries, without the table's row stride.",
        (r"position|\bpos\b|pos_embed|crop|stride|offset|table",),
    ),
    Bug(
        "time_sin_first",
        "The sines come before the cosines.",
        (r"\bsin|\bcos|flip|order|swap|halves",),
    ),
    Bug(
        "time_freq_shift_one",
        "The frequencies are divided by half - 1.",
        (r"frequenc|downscale|freq_shift|half ?(-|−|minus) ?1|exponent|period",),
    ),
    Bug(
        "timestep_not_divided",
        "The model is given timesteps up to 1000, not up to 1.",
        (r"1000|1,000|factor|scale|divid|multipl|timestep",),
        "schedule",
    ),
    Bug(
        "time_cached",
        "The time embedding of the first step is used in all steps.",
        (r"stale|cache|reus|(first|earlier|previous|other|same) step|step 0|constant|not updated",),
    ),
    Bug(
        "timestep_bfloat16",
        "The timestep is rounded to bfloat16 before the model.",
        (r"bf16|bfloat|timestep|" + LOWER,),
        "schedule",
    ),
    Bug(
        "single_silu_missing",
        "The modulation of single blocks is made without SiLU.",
        (r"silu|swish|activation",),
    ),
    Bug(
        "final_chunks_as_in_blocks",
        "The last scale and shift are taken in the blocks' order.",
        (SWAP + r"|shift.{0,40}scale|scale.{0,40}shift",),
    ),
    Bug(
        "final_extra_norm",
        "A LayerNorm is applied before the last modulation, where the model has none.",
        (
            r"(appl|extra|addition|remove|again|one more).{0,60}norm",
            r"norm.{0,60}(appl|extra|addition|remove|again|none)",
        ),
    ),
    Bug(
        "mlp_gate_chunk_first",
        "solo1 takes the MLP's chunks as gate, shift, scale.",
        (SWAP + r"|(shift|scale).{0,40}gate|gate.{0,40}(shift|scale)",),
    ),
    Bug(
        "mods_interleaved",
        "The text modulation in mm0 is split as interleaved channels, not as six chunks.",
        (r"interleav|chunk|split|reshape|layout|order|stride|permut",),
    ),
    Bug("gate_tanh", "solo0's gates pass a tanh.", (r"tanh",)),
    Bug(
        "text_uses_image_modulation",
        "mm1's text uses the image's shifts, scales and gates.",
        (r"image|\bimg|stream|norm1\.linear|wrong modulation|modulation of",),
    ),
    Bug(
        "single_residual_running",
        "The MLP's residual in single blocks begins after attention, not at the block's input.",
        (r"residual|skip|\bmid\b|attention.{0,60}(added|twice|kept|too)",),
    ),
    Bug(
        "norm2_without_residual",
        "The text's second norm in mm0 is of attention alone.",
        (r"residual|skip|\badd(ed|s|end)?\b|\bsum\b",),
    ),
    Bug("ln_eps_1e6", "The blocks' norms have eps 1e-6.", (r"\beps",)),
    Bug(
        "norm2_unbiased",
        "The variance of the single blocks' second norm is divided by n - 1.",
        (r"unbiased|bessel|n ?(-|−|minus) ?1|ddof|correction|variance",),
    ),
    Bug("qk_rms", "q and k have RMSNorm, not LayerNorm.", (r"rms|\bmean\b|cent(er|re)",)),
    Bug(
        "qk_norm_whole_width",
        "q and k are normed over all heads together.",
        (r"head|axis|axes|width|across|whole|before.{0,30}(split|reshap)",),
    ),
    Bug(
        "k_norm_missing",
        "solo1's k is not normed.",
        (
            r"(missing|not appl|skip|without|lack|absent|no ).{0,60}norm",
            r"norm.{0,60}(missing|not appl|skip|lack|absent)|not norm|un-?norm",
        ),
    ),
    Bug(
        "scale_of_width",
        "Scores are scaled by the width, not by a head's channels.",
        (r"scale|sqrt|root|√",),
    ),
    Bug(
        "heads_not_moved_back",
        "mm1's attention output is joined without moving the heads' axis back.",
        (r"head|transpos|reshape|layout|ax[ei]s|permut",),
    ),
    Bug("four_heads", "Attention has four heads of 8 channels.", (r"head",)),
    Bug("causal_single", "Attention of single blocks is causal.", (r"causal|mask|triang",)),
    Bug(
        "padding_masked",
        "Padding of the negative prompt is masked in attention.",
        (r"mask|padding",),
    ),
    Bug(
        "v_joined_text_first",
        "mm0 joins v with the text first, q and k with the image first.",
        (r"order|concat|swap|roll|rotat|token|stream|permut",),
    ),
    Bug(
        "probabilities_bfloat16",
        "solo1's attention weights are rounded to bfloat16.",
        (r"bf16|bfloat|" + LOWER,),
    ),
    Bug(
        "silu_of_product",
        "solo1's SiLU is applied to the product of both halves.",
        (r"silu|swish|product|gate.{0,30}multipl",),
    ),
    Bug(
        "sigmoid_gate",
        "The gate of the text's MLP in mm0 is a sigmoid, not SiLU.",
        (r"sigmoid|silu|swish|\bglu",),
    ),
    Bug(
        "last_text_token_dropped",
        "The last text token is cut off.",
        (r"token|length|shape|truncat|crop|cut|shorter|missing row",),
        "inputs",
    ),
    Bug(
        "decoded_tokens_off_by_one",
        "The decoded tokens begin one too late.",
        (r"token|slice|offset|off by one|crop|roll|shifted|rows",),
    ),
    Bug(
        "unpatchify_channels_first",
        "The last layer's channels are read as (channel, row, column).",
        (r"unpatch|order|permut|layout|channel|ax[ei]s|transpos|reshape|arrang",),
    ),
    Bug(
        "unpatchify_rows_columns",
        "Rows and columns inside a patch are exchanged.",
        (r"unpatch|swap|order|permut|layout|ax[ei]s|transpos|reshape|exchang|arrang",),
    ),
    Bug(
        "noise_reshaped",
        "The noise is reshaped to channels last, not transposed.",
        (r"reshap|transpos|layout|order|permut|ax[ei]s|noise",),
        "inputs",
    ),
    Bug(
        "guidance_from_conditional",
        "Guidance starts from the conditional prediction.",
        (r"guidance|conditional|cfg",),
    ),
    Bug(
        "guidance_chunks_swapped",
        "The predictions of the prompt and the negative prompt are exchanged.",
        (r"swap|exchang|order|halves|(un)?conditional|negative",),
    ),
    Bug(
        "guidance_rescaled",
        "The guided prediction is rescaled to the deviation of the conditional one.",
        (r"rescal|standard deviation|\bstd\b|factor|multipl|scaled by|times",),
    ),
    Bug(
        "guidance_off_in_last_step",
        "The last step has no guidance.",
        (r"guidance|conditional|cfg",),
    ),
    Bug(
        "sigma_min_shifted_once",
        "The smallest sigma is not shifted before the others are spaced.",
        (r"sigma|schedule|shift|timestep",),
        "schedule",
    ),
    Bug(
        "shift_of_sd3",
        "The schedule's shift is 3.0, not 1.73.",
        (r"shift|sigma|schedule|timestep",),
        "schedule",
    ),
    Bug(
        "linspace_to_zero",
        "Sigmas are spaced from 1 to 0 with the end left out.",
        (r"sigma|schedule|spac|timestep|shift|linspace",),
        "schedule",
    ),
    Bug(
        "timestep_of_next_sigma",
        "The model is given the timestep of the next sigma.",
        (r"timestep|next|off by one|index|one step|sigma|schedule",),
        "schedule",
    ),
    Bug(
        "last_sigma_repeated",
        "The smallest sigma is repeated at the end in place of 0.",
        (r"sigma|schedule|terminal|last|zero|\b0\b",),
        "schedule",
    ),
    Bug(
        "euler_from_noise",
        "Each step starts from the noise, not from the last latents.",
        (r"noise|initial|stale|(first|previous|earlier|last|old) (latents|sample|value|step)",),
    ),
    Bug(
        "latents_float16",
        "The latents are rounded to float16 after each step.",
        (r"(?<!b)f(loat)?16|" + LOWER,),
    ),
)
