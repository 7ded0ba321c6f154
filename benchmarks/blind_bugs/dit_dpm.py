"""DiT with classifier-free guidance and DPM-Solver++ (2M) in torch: four steps.

The step is a part of each name, blocks count from 1, patches are flattened for a matrix product,
q, k and v are fused. The embedding of timestep and class is computed once; diffusers has a copy
in each block. The sampler's arithmetic is recorded too.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel, DPMSolverMultistepScheduler
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
from lydite.trace.arrays import to_numpy
from lydite.trace.function_capture import watch_function
from lydite.trace.taps import tap
from lydite.trace.torch_capture import record_modules

NAME = "dit_dpm"
HEADS, HEAD, LAYERS, CHANNELS, SIZE, PATCH = 2, 12, 3, 4, 8, 2
WIDTH, GRID, CLASSES, STEPS, GUIDANCE = HEADS * HEAD, SIZE // PATCH, 10, 4, 3.5


def reference(folder: Path, dtype: str) -> None:
    """The loop of DiTPipeline; latents are recorded once, not for both halves of the batch."""

    def make() -> DiTTransformer2DModel:
        return DiTTransformer2DModel(
            num_attention_heads=HEADS,
            attention_head_dim=HEAD,
            in_channels=CHANNELS,
            out_channels=2 * CHANNELS,
            num_layers=LAYERS,
            sample_size=SIZE,
            patch_size=PATCH,
            num_embeds_ada_norm=CLASSES,
        )

    model = randomised(make, 17)
    first = model.transformer_blocks[0].norm1.emb
    for block in model.transformer_blocks[1:]:  # as in converted checkpoints
        block.norm1.emb.load_state_dict(first.state_dict())
    model = saved(model, folder, "transformer", dtype)
    scheduler: Any = DPMSolverMultistepScheduler()
    scheduler.set_timesteps(STEPS)
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        labels = recorder.record("pipeline/class_labels", torch.tensor([7, CLASSES]), kind="ids")
        x = noise(1, 1, CHANNELS, SIZE, SIZE).to(model.dtype)
        x = recorder.record("pipeline/noise", x, kind="input")
        for recorder.step, t in enumerate(scheduler.timesteps):
            out = model(torch.cat([x, x]), t.expand(2), class_labels=labels).sample
            cond, null = out[:, :CHANNELS].chunk(2)
            eps = recorder.record("pipeline/noise_pred", null + GUIDANCE * (cond - null))
            if scheduler.step_index is None:
                scheduler._init_step_index(t)
            clean = scheduler.convert_model_output(eps, sample=x)
            recorder.record("pipeline/pred_original", clean)
            x = recorder.record("pipeline/latents", scheduler.step(eps, t, x).prev_sample)


def converted(folder: Path, bug: str | None) -> dict[str, Tensor]:
    """Parameters: the patch kernel as a matrix over (row, column, channel), q, k, v fused."""
    w = {k: torch.from_numpy(v) for k, v in checkpoint(folder, "transformer").items()}
    order = (0, 1, 2, 3) if bug == "patch_kernel_channels_first" else (0, 2, 3, 1)
    new = {"patch.weight": w["pos_embed.proj.weight"].permute(order).reshape(WIDTH, -1)}
    new["patch.bias"] = w["pos_embed.proj.bias"]
    emb = "transformer_blocks.0.norm1.emb"
    new["label.weight"] = w[f"{emb}.class_embedder.embedding_table.weight"]
    plain = {f"temb.fc{i}": f"{emb}.timestep_embedder.linear_{i}" for i in (1, 2)}
    plain |= {"head.ada": "proj_out_1", "head.fc": "proj_out_2"}
    for i in range(LAYERS):
        source = LAYERS - 1 - i if bug == "blocks_loaded_backwards" else i
        old, b = f"transformer_blocks.{source}", f"blk{i + 1}"
        plain |= {f"{b}/ada": f"{old}.norm1.linear", f"{b}/attn/out": f"{old}.attn1.to_out.0"}
        plain |= {f"{b}/mlp/fc1": f"{old}.ff.net.0.proj", f"{b}/mlp/fc2": f"{old}.ff.net.2"}
        qkv = "vqk" if bug == "fused_order_vqk" and i == 1 else "qkv"
        for end in ("weight", "bias"):
            parts = [w[f"{old}.attn1.to_{x}.{end}"] for x in qkv]
            new[f"{b}/attn/qkv.{end}"] = torch.cat(parts)
    new |= {f"{a}.{end}": w[f"{b}.{end}"] for a, b in plain.items() for end in ("weight", "bias")}
    if bug == "time_bias_not_loaded":
        new["temb.fc2.bias"] = torch.zeros_like(new["temb.fc2.bias"])
    if bug == "square_weight_transposed":
        new["blk2/attn/out.weight"] = new["blk2/attn/out.weight"].T.contiguous()
    if bug == "label_table_shifted":
        new["label.weight"] = new["label.weight"].roll(1, 0)
    return new


class Net:
    def __init__(self, p: dict[str, Tensor], bug: str | None, dtype: torch.dtype) -> None:
        self.p, self.bug, self.dtype = {k: v.to(dtype) for k, v in p.items()}, bug, dtype
        self.at = ""
        self.places = self.positions().to(dtype)

    def positions(self) -> Tensor:
        """Sines and cosines of the column, then of the row."""
        bug = self.bug
        row, column = np.mgrid[:GRID, :GRID].reshape(2, -1).astype(np.float64)
        if bug == "positions_centered":
            row, column = row + 0.5, column + 0.5
        omega = 10000.0 ** -(np.arange(WIDTH // 4) / (WIDTH / 4))
        parts = [row, column] if bug == "positions_row_first" else [column, row]
        ends = [np.cos, np.sin] if bug == "positions_cos_first" else [np.sin, np.cos]
        whole = np.concatenate([f(x[:, None] * omega) for x in parts for f in ends], 1)
        return torch.from_numpy(whole.astype(np.float32))

    def tap(self, name: str, x: Tensor, slot: str = "out") -> Tensor:
        return tap(f"{self.at}/{name}", x, slot=slot)

    def fc(self, name: str, x: Tensor) -> Tensor:
        bias = self.p[f"{name}.bias"]
        if self.bug == "qkv_bias_missing" and name == "blk1/attn/qkv":
            bias = None
        return self.tap(name, F.linear(x, self.p[f"{name}.weight"], bias))

    def norm(self, x: Tensor, eps: float) -> Tensor:
        if self.bug == "norm_rms" and eps == 1e-5:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        return F.layer_norm(
            x, (WIDTH,), eps=1e-3 if self.bug == "norm_eps" and eps == 1e-6 else eps
        )

    def embedding(self, t: Tensor, labels: Tensor) -> Tensor:
        bug, half = self.bug, 128
        shift = 0 if bug == "time_freq_shift" else 1
        period = 1000 if bug == "time_period" else 10000
        a = t.float()[:, None] * torch.exp(-math.log(period) * torch.arange(half) / (half - shift))
        parts = [a.sin(), a.cos()] if bug == "time_sin_first" else [a.cos(), a.sin()]
        x = self.fc("temb.fc1", self.tap("temb.sinusoid", torch.cat(parts, -1).to(self.dtype)))
        x = self.fc("temb.fc2", F.gelu(x) if bug == "time_gelu" else F.silu(x))
        y = self.tap("label", self.p["label.weight"][labels])
        return self.tap("cond", x if bug == "label_not_added" else x + y)

    def attention(self, name: str, x: Tensor) -> Tensor:
        bug, (b, s, _) = self.bug, x.shape
        y = self.fc(f"{name}/qkv", x)
        if bug == "heads_before_qkv" and name == "blk1/attn":
            q, k, v = y.view(b, s, HEADS, 3, HEAD).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = y.view(b, s, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        scale = WIDTH**-0.5 if bug == "attention_scale" else HEAD**-0.5
        scores = (q @ k.transpose(-1, -2) * scale).float()
        if bug == "scores_bf16" and name == "blk3/attn":
            scores = scores.bfloat16().float()
        y = self.tap(f"{name}/core", scores.softmax(-1).to(v.dtype) @ v)
        y = y if bug == "heads_not_transposed" and name == "blk2/attn" else y.transpose(1, 2)
        return self.fc(f"{name}/out", y.reshape(b, s, WIDTH))

    def block(self, i: int, x: Tensor, cond: Tensor) -> Tensor:
        bug, b = self.bug, f"blk{i}"
        self.tap(b, x, "in.0")
        ada = self.fc(f"{b}/ada", cond if bug == "ada_silu_missing" else F.silu(cond))
        c = [y[:, None] for y in ada.chunk(6, -1)]
        if bug == "ada_scale_first":
            c[0], c[1] = c[1], c[0]
        if bug == "ada_gates_last":
            c = [c[0], c[1], c[4], c[2], c[3], c[5]]
        y = self.tap(f"{b}/mod1", self.norm(x, 1e-6) * (1 + c[1]) + c[0])
        y = self.attention(f"{b}/attn", y)
        x1 = x + (y if bug == "attention_gate_missing" and i == 3 else c[2] * y)
        x1 = self.tap(f"{b}/mid", x1)
        n = self.norm(x if bug == "mlp_of_block_input" and i == 2 else x1, 1e-5)
        one = 0 if bug == "one_plus_missing" and i == 1 else 1
        y = self.fc(f"{b}/mlp/fc1", self.tap(f"{b}/mod2", n * (one + c[4]) + c[3]))
        if bug == "mlp_silu" and i == 2:
            y = F.silu(y)
        else:
            y = F.gelu(y, approximate="none" if bug == "gelu_erf" else "tanh")
        y = self.fc(f"{b}/mlp/fc2", self.tap(f"{b}/mlp/act", y))
        y = y.half().to(y.dtype) if bug == "mlp_f16" and i == 1 else y
        start = x if bug == "mlp_residual_of_input" and i == 3 else x1
        return self.tap(
            b, start + (c[2] if bug == "mlp_gate_of_attention" and i == 2 else c[5]) * y
        )

    def __call__(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        bug, (b, p, g) = self.bug, (x.shape[0], PATCH, GRID)
        x = x.view(b, CHANNELS, g, p, g, p).permute(0, 2, 4, 3, 5, 1)
        x = x.transpose(1, 2) if bug == "tokens_column_major" else x
        x = self.fc("patch", x.reshape(b, g * g, -1))
        x = x if bug == "positions_missing" else x + self.places
        cond = self.embedding(t, labels)
        for i in range(1, LAYERS + 1):
            x = x if bug == "block_skipped" and i == 2 else self.block(i, x, cond)
        shift, scale = self.fc("head.ada", F.silu(cond))[:, None].chunk(2, -1)
        if bug == "head_scale_first":
            shift, scale = scale, shift
        x = self.tap("head.mod", self.norm(x, 1e-6) * (1 + scale) + shift)
        x = self.fc("head.fc", x)
        if bug == "unpatch_channels_first":
            x = x.view(b, g, g, 2 * CHANNELS, p, p).permute(0, 3, 1, 4, 2, 5)
        elif bug == "unpatch_rows_columns":
            x = x.view(b, g, g, p, p, 2 * CHANNELS).permute(0, 5, 1, 4, 2, 3)
        else:
            x = x.view(b, g, g, p, p, 2 * CHANNELS).permute(0, 5, 1, 3, 2, 4)
        return self.tap("net", x.reshape(b, 2 * CHANNELS, SIZE, SIZE))


def schedule(bug: str | None) -> tuple[Tensor, Tensor]:
    """Timesteps and sigmas, with a last sigma of 0."""
    betas = torch.linspace(1e-4, 0.02, 1000)
    if bug == "betas_scaled_linear":
        betas = torch.linspace(1e-4**0.5, 0.02**0.5, 1000) ** 2
    cumulated = torch.cumprod(1 - betas, 0).double()
    sigmas = ((1 - cumulated) / cumulated).sqrt()
    times = np.linspace(0, 999, STEPS + 1).round()[::-1][:-1].astype(np.int64)
    if bug == "spacing_trailing":
        times = np.arange(1000, 0, -1000 / STEPS).round().astype(np.int64) - 1
    if bug == "spacing_leading":
        times = (np.arange(STEPS) * (1000 // STEPS))[::-1].astype(np.int64)
    chosen = [sigmas[int(t)] for t in times]
    if bug == "sigmas_karras":
        ramp = torch.linspace(0, 1, STEPS).double()
        top, low = sigmas[-1] ** (1 / 7), sigmas[0] ** (1 / 7)
        chosen = list((top + ramp * (low - top)) ** 7)
    if bug == "timesteps_one_less":
        times = times - 1
    last = sigmas[0] if bug == "last_sigma_not_zero" else torch.zeros(())
    return torch.from_numpy(times.copy()), torch.stack([*chosen, last]).float()


def both(sigma: float) -> tuple[float, float]:
    """Alpha and sigma of a variance-preserving process."""
    alpha = 1 / math.sqrt(sigma**2 + 1)
    return alpha, sigma * alpha


def advanced(
    x: Tensor, clean: list[Tensor], sigmas: list[float], i: int, bug: str | None
) -> Tensor:
    """One step of DPM-Solver++ (2M): first order at both ends."""
    i = i - 1 if bug == "sigma_of_step_before" and i == 2 else i
    (alpha, sigma), (_, here) = both(sigmas[i + 1]), both(sigmas[i])
    if bug == "alpha_of_current":
        alpha = both(sigmas[i])[0]

    def log_snr(s: float) -> float:
        a, b = both(s)
        return math.log(a) - math.log(b) if b else math.inf

    h = log_snr(sigmas[i + 1]) - log_snr(sigmas[i])
    gain = 1 - math.exp(-h)
    y = sigma / here * x + alpha * gain * clean[-1]
    if bug == "noise_added" and i < STEPS - 1:
        y = y + 0.1 * sigma * noise(9, *x.shape)
    lower = i == STEPS - 1 and bug != "second_order_at_end"
    if len(clean) < 2 or lower or bug == "first_order_only":
        return y
    r = (log_snr(sigmas[i]) - log_snr(sigmas[i - 1])) / (1.0 if math.isinf(h) else h)
    r = 1 / r if bug == "ratio_inverted" else r
    slope = (clean[-1] - clean[-2]) / r
    slope = -slope if bug == "slope_sign" else slope
    if bug == "slope_of_heun":
        return y - alpha * (gain / h - 1) * slope
    return y + (1.0 if bug == "half_missing" else 0.5) * alpha * gain * slope


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, kind = given(folder), getattr(torch, dtype)
    net = Net(converted(folder, bug), bug, kind)
    times, sigmas = schedule(bug)
    labels = torch.from_numpy(value("pipeline/class_labels"))
    if bug == "null_label_zero":
        labels = torch.tensor([labels[0], 0])
    if bug == "labels_swapped":
        labels = labels.flip(0)
    x = torch.from_numpy(value("pipeline/noise")).to(kind)
    x = x * sigmas[0].to(kind) if bug == "noise_times_sigma" else x
    blocks = (
        "*blk?:out",
        "*/net",
        "*/eps",
        "*/x0",
        "*/latent",
        "times",
        "sigmas",
        "labels",
        "start",
    )
    with port_trace(out, dump, dtype, blocks, None) as recorder:
        tap("times", times, kind="schedule")
        tap("sigmas", sigmas, kind="schedule")
        tap("labels", labels, kind="ids")
        tap("start", x, kind="input")
        if weights:
            recorder.writer.add_weights({k: to_numpy(v) for k, v in net.p.items()})
        history: list[Tensor] = []
        for i, t in enumerate(times):
            net.at = f"step{i}"
            y = net(torch.cat([x, x]), t.expand(2), labels)
            y = y[:, CHANNELS:] if bug == "variance_half_taken" else y[:, :CHANNELS]
            cond, null = y.chunk(2)
            if bug == "guidance_order":
                cond, null = null, cond
            base = cond if bug == "guidance_from_cond" else null
            eps = base + (GUIDANCE + 0.5 * (bug == "guidance_scale")) * (cond - null)
            if bug == "guidance_three_channels":
                eps = torch.cat([eps[:, :3], cond[:, 3:]], 1)
            if bug == "guidance_off_at_end" and i == STEPS - 1:
                eps = cond
            eps = net.tap("eps", eps)
            alpha, sigma = both(float(sigmas[i]))
            if bug == "clean_without_alpha":
                clean = x - float(sigmas[i]) * alpha * eps
            elif bug == "velocity_prediction":
                clean = alpha * x - sigma * eps
            else:
                clean = (x.float() - sigma * eps.float()) / alpha
            clean = clean.clamp(-1, 1) if bug == "clean_clamped" else clean
            history.append(net.tap("x0", clean.to(kind)))
            used = [history[0], history[-1]] if bug == "history_not_moved" and i > 1 else history
            x = advanced(x.float(), [z.float() for z in used], sigmas.tolist(), i, bug)
            x = x.bfloat16() if bug == "latents_bf16" and i == 1 else x
            x = net.tap("latent", x.to(kind))


NO_COUNTERPART: tuple[str, ...] = ()

SWAP, WEIGHT = r"shift|swap|order|chunk", r"load|weight|param"
SOLVER = r"order|solver|multistep|2m|dpm"
BUGS = (
    Bug(
        "patch_kernel_channels_first",
        "The patch kernel is c, h, w.",
        (r"order|transp|perm",),
        "weights",
    ),
    Bug(
        "blocks_loaded_backwards",
        "Blocks are in reverse order.",
        (WEIGHT, r"order|swap"),
        "weights",
    ),
    Bug("fused_order_vqk", "Block 2's product is v, q, k.", (WEIGHT, r"order|fuse"), "weights"),
    Bug("time_bias_not_loaded", "A bias is zero.", (r"bias|zero|load",), "weights"),
    Bug("square_weight_transposed", "A square weight is transposed.", (r"transpos",), "weights"),
    Bug(
        "label_table_shifted", "The label table is shifted.", (WEIGHT, r"shift|row|roll"), "weights"
    ),
    Bug(
        "betas_scaled_linear",
        "Betas are scaled-linear.",
        (r"beta|schedule|sigma|scaled.linear",),
        "schedule",
    ),
    Bug(
        "spacing_trailing",
        "Timesteps have trailing spacing.",
        (r"spacing|trail|linspace",),
        "schedule",
    ),
    Bug(
        "spacing_leading",
        "Timesteps have leading spacing.",
        (r"spacing|lead|linspace",),
        "schedule",
    ),
    Bug("sigmas_karras", "Sigmas are Karras'.", (r"karras|rho|sigma",), "schedule"),
    Bug(
        "timesteps_one_less",
        "Timesteps are one too small.",
        (r"off by|offset|\bone\b|- ?1",),
        "schedule",
    ),
    Bug(
        "last_sigma_not_zero",
        "The last sigma is the smallest.",
        (r"last|final|zero|sigma",),
        "schedule",
    ),
    Bug("null_label_zero", "The null label is 0.", (r"label|\bids?\b|class|token",), "ids"),
    Bug("labels_swapped", "The labels are swapped.", (r"label|\bids?\b|class|swap|order",), "ids"),
    Bug(
        "noise_times_sigma",
        "The noise is multiplied by sigma.",
        (r"scale|sigma|factor|times",),
        "inputs",
    ),
    Bug(
        "positions_row_first",
        "Rows come before columns.",
        (r"row|column|swap|ax[ei]s|order|transp",),
    ),
    Bug("positions_cos_first", "Cosines of positions come first.", (r"sin|cos|flip|order|swap",)),
    Bug("positions_centered", "Positions are at 0.5, 1.5 …", (r"offset|position|shift|0\.5|cent",)),
    Bug("positions_missing", "Positions are not added.", (r"position|added|adds|missing|term",)),
    Bug("tokens_column_major", "Tokens are in column order.", (r"order|token|permut|transpos",)),
    Bug("qkv_bias_missing", "Block 1's q, k, v have no bias.", (r"bias",)),
    Bug("norm_rms", "The second norm is RMSNorm.", (r"rms|mean|layer ?norm|cent",)),
    Bug("norm_eps", "The first norm has eps 1e-3.", (r"\beps",)),
    Bug("time_freq_shift", "Timestep frequencies divide by half.", (r"shift|freq|half|sinus",)),
    Bug("time_period", "The largest period is 1000.", (r"period|freq|theta|base|1000",)),
    Bug("time_sin_first", "The timestep's sines come first.", (r"sin|cos|flip|order|swap",)),
    Bug("time_gelu", "The timestep embedding uses GELU.", (r"gelu|silu|activation",)),
    Bug(
        "label_not_added", "The label is not added.", (r"label|class|added|adds|missing|term|sum",)
    ),
    Bug(
        "heads_before_qkv",
        "Block 1 splits heads before q, k, v.",
        (r"head|interleav|order|reshape",),
    ),
    Bug("attention_scale", "Scores are divided by the root of all heads.", (r"scale|sqrt|root",)),
    Bug("scores_bf16", "Block 3's scores are in bfloat16.", (r"bf16|bfloat|precision|cast",)),
    Bug(
        "heads_not_transposed",
        "Block 2 merges heads untransposed.",
        (r"head|transpos|permut|reshape",),
    ),
    Bug("ada_silu_missing", "SiLU before the modulation is missing.", (r"silu|activation",)),
    Bug("ada_scale_first", "Scale and shift are swapped.", (SWAP,)),
    Bug("ada_gates_last", "Gates are the last chunks.", (SWAP, r"gate")),
    Bug("attention_gate_missing", "Block 3 has no attention gate.", (r"gate",)),
    Bug(
        "mlp_of_block_input",
        "Block 2's MLP reads the block's input.",
        (r"residual|\binput|parallel",),
    ),
    Bug(
        "one_plus_missing", "Block 1 multiplies by scale, not 1 + scale.", (r"1 ?\+|\bone\b|scale",)
    ),
    Bug("mlp_silu", "Block 2's MLP uses SiLU.", (r"silu|swish|activation",)),
    Bug("gelu_erf", "The MLP uses erf GELU.", (r"gelu|erf",)),
    Bug("mlp_f16", "Block 1's MLP is rounded to float16.", (r"f16|float16|half|precision",)),
    Bug("mlp_residual_of_input", "Block 3 adds the MLP to its input.", (r"residual|\binput|skip",)),
    Bug("mlp_gate_of_attention", "Block 2's MLP has attention's gate.", (r"gate|chunk",)),
    Bug("block_skipped", "Block 2 is skipped.", (r"skip|missing|not (run|called)",)),
    Bug("head_scale_first", "The last scale and shift are swapped.", (SWAP,)),
    Bug(
        "unpatch_channels_first",
        "Patches are c, h, w at the end.",
        (r"patch|order|permut|channel",),
    ),
    Bug(
        "unpatch_rows_columns",
        "Patches are transposed at the end.",
        (r"patch|order|permut|transpos",),
    ),
    Bug(
        "variance_half_taken",
        "The variance is taken as noise.",
        (r"half|halves|chunk|varian|split|channel",),
    ),
    Bug(
        "guidance_order",
        "Guidance takes the halves in the other order.",
        (r"guidance|cfg|swap|order",),
    ),
    Bug(
        "guidance_from_cond", "Guidance starts at the conditioned result.", (r"guidance|cfg|scale",)
    ),
    Bug("guidance_scale", "The guidance scale is 4.", (r"guidance|cfg|scale",)),
    Bug("guidance_three_channels", "Three channels are guided.", (r"guidance|cfg|channel",)),
    Bug("guidance_off_at_end", "The last step has no guidance.", (r"guidance|cfg",)),
    Bug(
        "clean_without_alpha",
        "The clean image is not divided by alpha.",
        (r"alpha|divid|scale|factor",),
    ),
    Bug(
        "velocity_prediction", "The result is taken as velocity.", (r"\bv\b|velocity|predict|eps",)
    ),
    Bug("clean_clamped", "The clean image is clamped.", (r"clamp|clip|thresh",)),
    Bug(
        "history_not_moved",
        "The first result stays in the history.",
        (r"histor|previous|stale|older",),
    ),
    Bug(
        "latents_bf16",
        "Latents of a step are rounded to bfloat16.",
        (r"bf16|bfloat|precision|cast",),
    ),
    Bug("sigma_of_step_before", "Step 2 uses step 1's sigmas.", (r"sigma|off by|index",)),
    Bug("alpha_of_current", "Alpha is that of the current step.", (r"alpha|sigma|coefficient",)),
    Bug("noise_added", "Noise is added in each step.", (r"noise|stochastic|sde|ancestral|random",)),
    Bug("second_order_at_end", "The last step is of second order.", (SOLVER,)),
    Bug("first_order_only", "All steps are of first order.", (SOLVER, r"euler|ddim|first")),
    Bug(
        "ratio_inverted",
        "The ratio of steps is inverted.",
        (r"ratio|invers|invert|\br\b|r0|coeff",),
    ),
    Bug(
        "slope_sign",
        "The second-order term has the other sign.",
        (r"sign|negat|second|correction",),
    ),
    Bug("slope_of_heun", "The second-order term is Heun's.", (r"heun|midpoint|second",)),
    Bug(
        "half_missing", "The second-order term lacks 1/2.", (r"half|0\.5|1/2|factor|second|twice",)
    ),
)
