"""OmniGen's transformer with its two guidance scales, as functions on torch tensors.

Latents are channels last, weights (in, out), q, k, v one product; blocks are counted from 1. This
program packs its own rows: it strips the padding of the ids, pads them again, and builds positions
and visibility. Reference pictures are embedded once, before the loop.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, OmniGenTransformer2DModel
from diffusers.pipelines.omnigen.processor_omnigen import OmniGenCollator
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
from lydite.trace.arrays import to_numpy
from lydite.trace.function_capture import watch_function
from lydite.trace.taps import set_step, tap
from lydite.trace.torch_capture import record_modules

NAME = "omnigen"
HEADS, HEAD, HIDDEN, LAYERS, VOCABULARY, WAVE = 3, 12, 52, 3, 41, 20
WIDTH, CHANNELS, PATCH, GRID, BASE = HEADS * HEAD, 4, 2, 11, 64
ROWS, COLUMNS = 6, 10  # of the latents
REFERENCES = ((4, 6), (6, 4))  # rows and columns of the reference pictures' latents
LONGEST, TRAINED, THETA = 131072, 4096, 10000.0
SHORT = (1.0, 1.05, 1.1, 1.3, 1.75, 2.2)
LONG = (1.05, 1.2, 1.9, 4.5, 11.0, 23.0)
STEPS, GUIDANCE, PICTURE_GUIDANCE = 2, 2.5, 1.6
PICTURE, BOS, PAD = 0, 1, 2  # ids
PROMPT = (BOS, 17, 9, *(PICTURE,) * 6, 33, *(PICTURE,) * 6, 21, 8, 30)
NEGATIVE = (BOS, 5, 12, 39, 7, 7, 28, 19, 3, 14, 26, 11, 40, 22, 6, 16, 35, 24, 10, 4, 31, 13, 8)
PICTURES_ONLY = (BOS, 17, *(PICTURE,) * 6, 33, *(PICTURE,) * 6, 8)


def made() -> OmniGenTransformer2DModel:
    """The model; embeddings are small, as those of a trained language model are."""
    config: dict[str, Any] = dict(in_channels=CHANNELS, patch_size=PATCH, hidden_size=WIDTH)
    config |= dict(num_attention_heads=HEADS, num_key_value_heads=HEADS, num_layers=LAYERS)
    config |= dict(intermediate_size=HIDDEN, vocab_size=VOCABULARY, pad_token_id=PAD)
    config |= dict(rope_scaling={"short_factor": list(SHORT), "long_factor": list(LONG)})
    config |= dict(pos_embed_max_size=GRID, time_step_dim=WAVE)
    model = OmniGenTransformer2DModel(**config)
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            parameter.data.mul_(0.2)
        if "to_q" in name or "to_k" in name:
            parameter.data.mul_(1.8)
        if "to_out" in name or "down_proj" in name:
            parameter.data.mul_(1.5)
        if "linear_2" in name or "norm_out" in name:
            parameter.data.mul_(3)
    return model


def reference(folder: Path, dtype: str) -> None:
    """The pipeline's loop: rows with prompt and pictures, without both, with pictures alone."""
    model = saved(randomised(made, 61), folder, "transformer", dtype)
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True, num_train_timesteps=1)
    scheduler.set_timesteps(sigmas=np.linspace(1, 0, STEPS + 1)[:STEPS].tolist())
    pictures = [noise(2 + i, CHANNELS, *size) for i, size in enumerate(REFERENCES)]

    def row(ids: tuple[int, ...], *starts: int) -> dict[str, Any]:
        spans = [[start, start + 6] for start in starts] or None
        given_pictures = pictures if starts else None
        return {"input_ids": list(ids), "pixel_values": given_pictures, "image_sizes": spans}

    rows = [row(PROMPT, 3, 10), row(NEGATIVE), row(PICTURES_ONLY, 2, 9)]
    size = [8 * ROWS, 8 * COLUMNS]
    packed = OmniGenCollator(PAD, WIDTH).process_mllm_input(rows, [size] * len(rows))
    ids, positions, mask, _, latents, spans = packed
    with (
        reference_trace(folder, dtype) as recorder,
        record_modules(recorder, model, scope="transformer", weights=True),
        watch_function(recorder, F, "scaled_dot_product_attention"),
    ):
        x = noise(1, 1, CHANNELS, ROWS, COLUMNS).to(model.dtype)
        recorder.record("pipeline/sigmas", scheduler.sigmas, kind="schedule")
        recorder.record("pipeline/timesteps", scheduler.timesteps, kind="schedule")
        recorder.record("pipeline/noise", x, kind="input")
        recorder.record("pipeline/input_ids", ids, kind="ids")
        recorder.record("pipeline/position_ids", positions, kind="input")
        recorder.record("pipeline/attention_mask", mask, kind="input")
        for i, picture in enumerate(pictures):
            recorder.record(f"pipeline/input_img_latents.{i}", picture[None], kind="input")
        timesteps: Any = scheduler.timesteps
        step: Any = scheduler.step
        for i, t in enumerate(timesteps):
            recorder.step = i
            rows_in = torch.cat([x] * len(ids))
            time = t.expand(len(ids))
            inputs = (rows_in, time, ids, latents, spans, mask.to(model.dtype), positions)
            text, nothing, picture = model(*inputs, return_dict=False)[0].chunk(3)
            velocity = nothing + PICTURE_GUIDANCE * (picture - nothing)
            velocity = velocity + GUIDANCE * (text - picture)
            recorder.record("pipeline/noise_pred", velocity)
            x = step(velocity, t, x, return_dict=False)[0]
            recorder.record("pipeline/latents", x)


def converted(w: dict[str, Array], bug: str | None) -> dict[str, Tensor]:
    """Parameters by this program's names."""
    old = {name: torch.from_numpy(value) for name, value in w.items()}
    new: dict[str, Tensor] = {}

    def dense(name: str, source: str) -> None:
        new[f"{name}.w"] = old[f"{source}.weight"].T.contiguous()
        if f"{source}.bias" in old:
            new[f"{name}.b"] = old[f"{source}.bias"]

    sources = {"canvas_in": "output_image_proj", "picture_in": "input_image_proj"}
    if bug == "patch_projections_exchanged":
        sources = dict(zip(sources, reversed(sources.values()), strict=True))
    for name, source in sources.items():
        kernel = old[f"patch_embedding.{source}.weight"]  # (width, channels, rows, columns)
        if not (bug == "picture_kernel_not_permuted" and name == "picture_in"):
            kernel = kernel.permute(0, 2, 3, 1)
        new[f"{name}.w"] = kernel.reshape(WIDTH, -1).T.contiguous()
        new[f"{name}.b"] = old[f"patch_embedding.{source}.bias"]
    table = old["patch_embedding.pos_embed"]
    if bug == "grid_recomputed_unit_spacing":
        table = sines(1.0)[None]
    new["grid"] = table.reshape(GRID, GRID, WIDTH)
    clocks = ["time_token", "t_embedder"]
    if bug == "clocks_exchanged":
        clocks.reverse()
    for name, source in zip(("clock_token", "clock_mod"), clocks, strict=True):
        dense(f"{name}.1", f"{source}.linear_1")
        dense(f"{name}.2", f"{source}.linear_2")
    new["words"] = old["embed_tokens.weight"]
    for i in range(1, LAYERS + 1):
        name, source = f"stack.{i}", f"layers.{i - 1}"
        if bug == "second_block_counted_from_zero" and i == 2:
            source = "layers.2"
        heads = [old[f"{source}.self_attn.to_{s}.weight"] for s in "qkv"]
        qkv = torch.cat(heads)
        if bug == "qkv_packed_by_head" and i == 1:
            qkv = torch.stack([x.reshape(HEADS, HEAD, WIDTH) for x in heads], 1)
            qkv = qkv.reshape(3 * WIDTH, WIDTH)
        new[f"{name}.qkv.w"] = qkv.T.contiguous()
        dense(f"{name}.back", f"{source}.self_attn.to_out.0")
        dense(f"{name}.wide", f"{source}.mlp.gate_up_proj")
        dense(f"{name}.down", f"{source}.mlp.down_proj")
        norms = ["input_layernorm", "post_attention_layernorm"]
        if bug == "block_norms_exchanged" and i == 3:
            norms.reverse()
        for short, long in zip(("norm_a", "norm_m"), norms, strict=True):
            new[f"{name}.{short}.g"] = old[f"{source}.{long}.weight"]
    new["end_norm.g"] = old["norm.weight"]
    dense("end_mod", "norm_out.linear")
    dense("end_out", "proj_out")
    if bug == "back_not_transposed":
        new["stack.2.back.w"] = new["stack.2.back.w"].T.contiguous()
    if bug == "down_quantised_to_bytes":
        down = new["stack.3.down.w"]
        scale = down.abs().max() / 127
        new["stack.3.down.w"] = (down / scale).round() * scale
    return new


def sines(spacing: float) -> Tensor:
    """The table of positions of all the grid's cells: first along a row, then along a column."""
    at = torch.arange(GRID, dtype=torch.float64) * spacing
    omega = THETA ** -(torch.arange(WIDTH // 4).double() / (WIDTH // 4))
    waves = at[:, None] * omega
    waves = torch.cat([waves.sin(), waves.cos()], 1)
    along = waves[None].expand(GRID, GRID, -1)
    return torch.cat([along, along.transpose(0, 1)], -1).float()


class Pack:
    """The rows of a batch: ids, padded on the left, where pictures go, positions, visibility."""

    def __init__(self, ids: Array, bug: str | None) -> None:
        cells = (ROWS // PATCH) * (COLUMNS // PATCH)
        rows = [[int(x) for x in row[np.argmax(row != PAD) :]] for row in ids]
        if bug == "bos_stripped_from_first_chunk":
            rows[0] = rows[0][1:]
        n = max(len(row) for row in rows)
        if bug == "bos_stripped_from_first_chunk":
            n = ids.shape[1]
        self.n, self.total = n, n + 1 + cells
        self.ids = torch.full((len(rows), n), PAD)
        real = torch.ones(len(rows), self.total, dtype=torch.bool)
        self.spans: list[list[tuple[int, int]]] = []
        for i, row in enumerate(rows):
            right = bug == "padded_on_the_right"
            begin = 0 if right else n - len(row)
            self.ids[i, begin : begin + len(row)] = torch.tensor(row)
            real[i, :n] = False
            real[i, begin : begin + len(row)] = True
            self.spans.append(self.runs(self.ids[i].tolist()))
        self.positions = (real.cumsum(1) - 1).clamp(min=0)
        if bug == "positions_count_padding":
            self.positions = torch.arange(self.total).repeat(len(rows), 1)
        if bug == "clock_shares_position":  # with the first cell of the canvas
            self.positions[:, n + 1 :] -= 1
        self.visible = self.visibility(real, bug)

    @staticmethod
    def runs(row: list[int]) -> list[tuple[int, int]]:
        """Beginning and end of the runs of the pictures' placeholder."""
        edges = np.flatnonzero(np.diff([0, *(x == PICTURE for x in row), 0]))
        return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

    def visibility(self, real: Tensor, bug: str | None) -> Tensor:
        """Which key (last axis) a query sees."""
        at = torch.arange(self.total)
        canvas = at > self.n
        seen = (at[:, None] >= at) | canvas[:, None]
        if bug == "canvas_causal":
            seen = at[:, None] >= at
        if bug == "clock_sees_canvas":
            seen[self.n] = True
        seen = seen.repeat(len(real), 1, 1)
        for i, spans in enumerate(self.spans):
            for begin, end in spans:
                if bug != "pictures_causal":
                    seen[i, begin:end, begin:end] = True
        if bug == "padding_visible":
            return seen
        return (seen & real[:, None]) | ~real[:, :, None]


class Painter:
    """The transformer; `p` are its parameters in the run's precision."""

    def __init__(self, p: dict[str, Tensor], bug: str | None, dtype: torch.dtype) -> None:
        self.p, self.bug, self.dtype = {k: v.to(dtype) for k, v in p.items()}, bug, dtype
        self.clock_of_first_step: Tensor | None = None

    def dense(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.p[f"{name}.w"]
        return y + self.p[f"{name}.b"] if f"{name}.b" in self.p else y

    def rms(self, name: str, x: Tensor) -> Tensor:
        eps = 1e-6 if self.bug == "rms_eps" else 1e-5
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        return tap(name, y.to(x.dtype) * self.p[f"{name}.g"])

    def patches(self, x: Tensor) -> Tensor:
        """(batch, cells, pixels and channels of a cell) of (batch, rows, columns, channels)."""
        b, h, w, c = x.shape
        x = x.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(b, -1, PATCH * PATCH * c)

    def cells(self, h: int, w: int) -> Tensor:
        """The middle of the table of positions, for h x w cells."""
        odd = 1 if self.bug == "grid_middle_rounded_up" else 0
        top, left = (GRID - h + odd) // 2, (GRID - w + odd) // 2
        return self.p["grid"][top : top + h, left : left + w].reshape(h * w, WIDTH)

    def embedded(self, name: str, x: Tensor) -> Tensor:
        """Patches of a picture or of the canvas, with their positions."""
        y = tap(f"{name}.patched", self.dense(name.split(".")[0], self.patches(x)))
        if self.bug == "pictures_without_positions" and name.startswith("picture"):
            return tap(name, y)
        return tap(name, y + self.cells(x.shape[1] // PATCH, x.shape[2] // PATCH))

    def prompt(self, pack: Pack, pictures: list[Tensor]) -> Tensor:
        """Embeddings of the rows' ids, with pictures in place of placeholders."""
        x = F.embedding(pack.ids, self.p["words"])
        late = 1 if self.bug == "picture_written_one_late" else 0
        for i, spans in enumerate(pack.spans):
            given_pictures = pictures
            if self.bug == "pictures_in_reverse":
                given_pictures = pictures[::-1]
            for (begin, end), picture in zip(spans, given_pictures, strict=False):
                x[i, begin + late : end + late] = picture[0]
        return tap("prompt", x)

    def clock(self, t: Tensor) -> Tensor:
        half = WAVE // 2
        last = half - 1 if self.bug == "wave_reaches_longest_period" else half
        angles = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(half) / last)
        return tap("wave", torch.cat([angles.cos(), angles.sin()], -1).to(self.dtype))

    def time(self, name: str, wave: Tensor) -> Tensor:
        return tap(name, self.dense(f"{name}.2", F.silu(self.dense(f"{name}.1", wave))))

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of (rows, positions, heads, half a head); the first row's serve all."""
        bug = self.bug
        if bug != "turns_of_each_row":
            positions = positions[:1]
        factors = torch.tensor(LONG if bug == "long_factors" else SHORT)
        exponents = torch.arange(0, HEAD, 2).float() / HEAD
        frequencies = 1 / (factors * THETA**exponents)
        angles = positions[..., None].float() * frequencies
        base = LONGEST if bug == "attention_factor_of_longest" else TRAINED
        size = math.sqrt(1 + math.log(LONGEST / TRAINED) / math.log(base))
        cos, sin = angles.cos() * size, angles.sin() * size
        return tap("turns.cos", cos)[:, :, None], tap("turns.sin", sin)[:, :, None]

    def turned(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = turns
        y = x.float()
        if self.bug == "turns_neighbours":
            a, b = y[..., ::2], y[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def attention(self, name: str, x: Tensor, seen: Tensor, turns: Any) -> Tensor:
        bug, (b, n, _) = self.bug, x.shape
        qkv = tap(f"{name}.qkv", self.dense(f"{name}.qkv", x))
        q, k, v = qkv.reshape(b, n, 3, HEADS, HEAD).unbind(2)
        q = tap(f"{name}.q", self.turned(q, turns))
        if bug == "attention_factor_on_queries_only":
            size = math.sqrt(1 + math.log(LONGEST / TRAINED) / math.log(TRAINED))
            k = tap(f"{name}.k", self.turned(k, (turns[0] / size, turns[1] / size)))
        else:
            k = tap(f"{name}.k", self.turned(k, turns))
        if bug == "values_turned" and name == "stack.2":
            v = self.turned(v, turns)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * HEAD**-0.5
        if bug == "visibility_added_as_number":
            scores = scores + seen[:, None].float()
        else:
            scores = scores.masked_fill(~seen[:, None], -math.inf)
        shares = scores.softmax(-1)
        if bug == "shares_float16" and name == "stack.1":
            shares = shares.half().float()
        y = torch.einsum("bhqk,bkhd->bqhd", shares.to(x.dtype), v)
        y = tap(f"{name}.mixed", y.reshape(b, n, WIDTH))
        return tap(f"{name}.back", self.dense(f"{name}.back", y))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        wide = tap(f"{name}.wide", self.dense(f"{name}.wide", x))
        gate, up = wide.chunk(2, -1)
        if self.bug == "silu_on_second_half" and name == "stack.2":
            gate, up = up, gate
        return tap(f"{name}.down", self.dense(f"{name}.down", F.silu(gate) * up))

    def block(self, i: int, x: Tensor, seen: Tensor, turns: Any) -> Tensor:
        name = f"stack.{i}"
        h = x + self.attention(name, self.rms(f"{name}.norm_a", x), seen, turns)
        start = x if self.bug == "attention_lost_in_second_sum" and i == 2 else h
        return tap(name, start + self.mlp(name, self.rms(f"{name}.norm_m", h)))

    def canvas(self, x: Tensor) -> Tensor:
        """(batch, rows, columns, channels) of the cells."""
        h, w = ROWS // PATCH, COLUMNS // PATCH
        x = x.reshape(len(x), h, w, PATCH, PATCH, CHANNELS)
        if self.bug == "pixels_of_cell_transposed":
            x = x.transpose(3, 4)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(len(x), ROWS, COLUMNS, CHANNELS)

    def end(self, x: Tensor, c: Tensor) -> Tensor:
        bug = self.bug
        x = self.rms("end_norm", x)
        cells = (ROWS // PATCH) * (COLUMNS // PATCH)
        begin = x.shape[1] - cells - (1 if bug == "canvas_cut_one_early" else 0)
        x = x[:, begin : begin + cells]
        mod = tap("end_mod", self.dense("end_mod", F.silu(c)))[:, None]
        shift, scale = mod.chunk(2, -1)
        if bug == "scale_before_shift":
            shift, scale = scale, shift
        if bug == "end_layer_norm_uncentered":
            x = (x.float() * torch.rsqrt(x.float().square().mean(-1, True) + 1e-6)).to(x.dtype)
        else:
            x = F.layer_norm(x, (WIDTH,), eps=1e-6)
        x = tap("end_moved", x * (1 + scale) + shift)
        return self.canvas(tap("end_out", self.dense("end_out", x)))

    def __call__(self, x: Tensor, t: Tensor, pack: Pack, prompt: Tensor) -> Tensor:
        bug = self.bug
        wave = self.clock(t)
        token, mod = self.time("clock_token", wave), self.time("clock_mod", wave)
        if bug == "clock_token_kept_in_cache":
            token = self.clock_of_first_step = (
                token if self.clock_of_first_step is None else self.clock_of_first_step
            )
        parts = [prompt, token[:, None], self.embedded("canvas_in", x)]
        if bug == "clock_before_prompt":
            parts = [parts[1], parts[0], parts[2]]
        x = tap("joined", torch.cat(parts, 1))
        turns = self.turns(pack.positions)
        for i in range(1, LAYERS + 1):
            x = self.block(i, x, pack.visible, turns)
        return tap("velocity", self.end(x, token if bug == "modulated_by_clock_token" else mod))


def schedule(bug: str | None) -> tuple[Tensor, Tensor]:
    """Levels from 0, noise, to 1, and the times of the steps."""
    levels = torch.linspace(0, 1, STEPS + 1)
    if bug == "levels_from_one":
        levels = 1 - levels
    if bug == "last_level_zero":
        levels[-1] = 0
    times = levels[:-1]
    return levels, times + 1 / STEPS if bug == "times_of_next_level" else times


def guided(rows: Tensor, bug: str | None) -> Tensor:
    """Both guidances: of the pictures, and of the text beside the pictures."""
    text, nothing, picture = rows.chunk(3)
    if bug == "text_guided_from_nothing":
        return nothing + PICTURE_GUIDANCE * (picture - nothing) + GUIDANCE * (text - nothing)
    return nothing + PICTURE_GUIDANCE * (picture - nothing) + GUIDANCE * (text - picture)


def port(
    folder: Path,
    out: Path,
    bug: str | None,
    dump: str = "full",
    weights: bool = True,
    dtype: str = "float32",
) -> None:
    value, run = given(folder), getattr(torch, dtype)
    net = Painter(converted(checkpoint(folder, "transformer"), bug), bug, run)

    def latents(name: str) -> Tensor:
        return torch.from_numpy(value(f"pipeline/{name}")).permute(0, 2, 3, 1).to(run)

    x = latents("noise")
    pictures = [latents(f"input_img_latents.{i}") for i in range(len(REFERENCES))]
    pack = Pack(value("pipeline/input_ids"), bug)
    levels, times = schedule(bug)
    kept = {k: to_numpy(v) for k, v in net.p.items()} if weights else None
    blocks = ("pack.*", "loop.*", "picture_in.?", "prompt", "canvas_in", "clock_token")
    blocks += ("joined", "stack.?", "end_out", "velocity")
    with torch.no_grad(), port_trace(out, dump, dtype, blocks, kept):
        tap("loop.levels", levels, kind="schedule")
        tap("loop.times", times, kind="schedule")
        tap("loop.start", x, kind="input")
        tap("pack.ids", pack.ids, kind="ids")
        tap("pack.positions", pack.positions, kind="input")
        tap("pack.visible", pack.visible, kind="input")
        for i, picture in enumerate(pictures):
            tap(f"pack.picture_{i}", picture, kind="input")
        embedded = [net.embedded(f"picture_in.{i}", y) for i, y in enumerate(pictures)]
        prompt = net.prompt(pack, embedded)
        for i in range(STEPS):
            set_step(i)
            rows = net(x.repeat(3, 1, 1, 1), times[i].expand(3), pack, prompt)
            velocity = tap("loop.guided", guided(rows, bug))
            x = (x.float() + (levels[i + 1] - levels[i]) * velocity).to(run)
            if bug == "latents_kept_float16":
                x = x.half().to(run)
            tap("loop.x", x)


NO_COUNTERPART: tuple[str, ...] = (r"^prompt$",)

LOADED = r"load|checkpoint|conver|\bweights?\b|parameter"
SWAPPED = r"swap|exchang|\border\b|permut|revers|mixed up|the other way|interchang"
POSITION = r"position|coordinate|\bindex|\bindices"
VISIBLE = r"mask|causal|visib|bidirection|attend|\bsees?\b|\bseen\b|future|hidden keys"
SCHEDULE = r"schedul|sigma|timestep|\btimes?\b|levels?\b"
HALF = r"f16|float16|fp16|half.precision|\bhalf\b|precision|round"
BUGS = (
    Bug(
        "patch_projections_exchanged",
        "The projection of pictures has the canvas's weights, and the other way.",
        (LOADED, SWAPPED, r"(in|out)put_image_proj"),
        "weights",
    ),
    Bug(
        "picture_kernel_not_permuted",
        "The kernel of pictures' patches is flattened as (channel, row, column).",
        (LOADED, SWAPPED, r"layout|channels?.(first|last)|transpos|flatten|reshap"),
        "weights",
    ),
    Bug(
        "grid_recomputed_unit_spacing",
        "The grid's positions are recomputed with spacing 1, not base size / grid size.",
        (LOADED, r"spacing|base.?size|recomput|\bgrid|\bscal(e|ed|ing)\b|sincos|pos_?embed"),
        "weights",
    ),
    Bug(
        "clocks_exchanged",
        "The time token has the weights of the modulation's time embedding, and vice versa.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "second_block_counted_from_zero",
        "Block 2 has the weights of layers.2, which are the third block's.",
        (LOADED, r"layers\.2|another (layer|block)|other (layer|block)|dupl|off.by.one|\bindex"),
        "weights",
    ),
    Bug(
        "qkv_packed_by_head",
        "Block 1's fused weight has q, k, v head by head; it is split into three thirds.",
        (LOADED, SWAPPED, r"interleav|heads?\b|layout|fused|\bpack|\bsplit"),
        "weights",
    ),
    Bug(
        "block_norms_exchanged",
        "The two norms of the last block have each other's weights.",
        (LOADED, SWAPPED),
        "weights",
    ),
    Bug(
        "back_not_transposed",
        "The square output weight of block 2's attention is not transposed.",
        (LOADED, r"transpos"),
        "weights",
    ),
    Bug(
        "down_quantised_to_bytes",
        "The last block's down projection went through eight bits.",
        (LOADED, r"quanti|8.?bit|int8|byte|round|precision"),
        "weights",
    ),
    Bug(
        "bos_stripped_from_first_chunk",
        "The first chunk of the prompt lost its BOS as the later ones do.",
        (r"\bbos\b|begin|start token|first token|token|\bids?\b|padd|shift|missing",),
        "ids",
    ),
    Bug(
        "padded_on_the_right",
        "Rows are padded on the right.",
        (r"padd|left|right|\bside\b|shift|align|token|\bids?\b",),
        "ids",
    ),
    Bug(
        "levels_from_one",
        "The levels run from 1 to 0, as if sigmas were not inverted.",
        (SCHEDULE, r"invert|revers|flip|1 ?- ?|direction|descend|ascend|sign"),
        "schedule",
    ),
    Bug(
        "last_level_zero",
        "The level appended at the end is 0, not 1.",
        (SCHEDULE, r"terminal|final|\blast\b|append|\bend\b|zero"),
        "schedule",
    ),
    Bug(
        "times_of_next_level",
        "A step's time is that of the level it goes to.",
        (SCHEDULE, r"off.by.one|\bnext\b|shift|\bindex"),
        "schedule",
    ),
    Bug(
        "positions_count_padding",
        "Positions count padding.",
        (POSITION, r"padd|offset|shift|arange"),
        "inputs",
    ),
    Bug(
        "clock_shares_position",
        "The canvas begins at the time token's position.",
        (POSITION, r"off.by.one|shift|offset"),
        "inputs",
    ),
    Bug("canvas_causal", "The canvas's tokens see each other causally.", (VISIBLE,), "inputs"),
    Bug("clock_sees_canvas", "The time token sees the canvas.", (VISIBLE,), "inputs"),
    Bug("pictures_causal", "Reference pictures are causal.", (VISIBLE,), "inputs"),
    Bug("padding_visible", "Padding is attended to.", (VISIBLE, r"padd"), "inputs"),
    Bug("rms_eps", "RMS norms have eps 1e-6.", (r"\beps",)),
    Bug(
        "grid_middle_rounded_up",
        "The cut out of the grid's table begins one cell late where the margin is odd.",
        (
            r"crop|cent(re|er)|middle|off.by.one|\bcut\b|round|offset|shift|margin",
            r"position|pos_?embed|\bgrid|coordinate|sincos",
        ),
    ),
    Bug(
        "pictures_without_positions",
        "Reference pictures lack the grid's positions.",
        (
            r"position|pos_?embed|\bgrid|sincos",
            r"(not|never) added|(missing|lacks?)( an?| the)? (term|summand|addend)",
        ),
    ),
    Bug(
        "picture_written_one_late",
        "Pictures are written one place after their placeholders.",
        (
            r"off.by.one|shift|offset|\blate\b|\broll|one (place|token|position|row)",
            r"placeholder|scatter|insert|written|wrong (place|position|index|rows?\b|tokens?\b)",
        ),
    ),
    Bug(
        "pictures_in_reverse",
        "The second picture stands where the first belongs.",
        (SWAPPED, r"(wrong|other|second|different) (picture|image|reference)"),
    ),
    Bug(
        "wave_reaches_longest_period",
        "The time's frequencies divide by half - 1.",
        (r"frequenc|freq_shift|downscale|half ?- ?1|denominator|exponent|\bperiod|divi",),
    ),
    Bug(
        "turns_of_each_row",
        "RoPE uses each row's own positions; the reference uses the first row's for all.",
        (
            r"(first|each|every|own|one|other) (row|batch|sample|prompt|example|element|sequence)",
            r"broadcast|\bbatch|per.(row|sample)|shared",
            POSITION,
        ),
    ),
    Bug(
        "long_factors",
        "RoPE has the factors of long sequences.",
        (r"long|short|factor|frequenc|\bscal(e|ed|ing)\b|theta|\bbase\b|inv_freq",),
    ),
    Bug(
        "attention_factor_of_longest",
        "RoPE's attention factor takes the logarithm of the longest length.",
        (
            r"factor|magnitude|amplitude|\bscal(e|ed|ing)\b|mscale|multipl|times|too (large|small)",
            r"1\.19|1\.13|0\.9[56]",
        ),
    ),
    Bug(
        "attention_factor_on_queries_only",
        "Keys are rotated without the attention factor.",
        (r"factor|magnitude|amplitude|\bscal(e|ed|ing)\b|mscale|multipl|1\.19|0\.84",),
    ),
    Bug(
        "turns_neighbours",
        "RoPE pairs neighbours instead of halves.",
        (r"halves|half|interleav|neighbo|adjacent|\bpair|rotate_half",),
    ),
    Bug(
        "values_turned",
        "Block 2 rotates its values too.",
        (
            r"\bvalues?\b.*(rope|rotat|rotary|turn)|(rope|rotat|rotary|turn).*\bvalues?\b",
            r"\bv\b.*(rope|rotat|rotary|turn)|(rope|rotat|rotary|turn).*\bv\b",
        ),
    ),
    Bug(
        "visibility_added_as_number",
        "The 0/1 visibility is added to the scores; nothing is hidden.",
        (VISIBLE, r"additive|padd|softmax"),
    ),
    Bug(
        "shares_float16",
        "Attention's probabilities of block 1 are float16.",
        (HALF,),
    ),
    Bug(
        "silu_on_second_half",
        "Block 2's MLP activates the second half.",
        (r"second half|halves|\bup\b|gate|chunk|silu|activation", SWAPPED),
    ),
    Bug(
        "attention_lost_in_second_sum",
        "Block 2 adds its MLP to the block's input, without the attention.",
        (
            r"residual|skip connection|(block|layer)'?s? (own )?input|input of the (block|layer)",
            r"att\w*.*(missing|not added|left out|lost|dropped)|without (the )?attention",
        ),
    ),
    Bug(
        "pixels_of_cell_transposed",
        "A cell's pixels are put down by column.",
        (r"transpos|\brows?\b|column|unpatch|pixel|layout|\bax[ei]s\b|height|width", SWAPPED),
    ),
    Bug(
        "canvas_cut_one_early",
        "The canvas is cut out one token early, with the time token.",
        (
            r"off.by.one|slice|\bcut\b|shift|offset|\broll|early|time token",
            r"one (token|position|row|place)",
        ),
    ),
    Bug(
        "scale_before_shift",
        "The last modulation is split as scale, shift.",
        (r"chunk|split|\bscale\b|\bshift\b|half|halves", SWAPPED),
    ),
    Bug(
        "end_layer_norm_uncentered",
        "The last LayerNorm does not subtract the mean.",
        (r"\bmean\b|rms|cent(er|re)|subtract|layer ?norm",),
    ),
    Bug(
        "clock_token_kept_in_cache",
        "The time token of the first step is used in all.",
        (
            r"cache|stale|first step|step 0|previous step|earlier step|not (updated|recomputed)",
            r"(same|reused|constant|unchanged|kept).*step|step.*(same|reused|constant|unchanged|kept)",
        ),
    ),
    Bug(
        "clock_before_prompt",
        "The time token stands before the prompt.",
        (r"concat|\bjoin|\broll|time token|prepend|shift|first token|sequence", SWAPPED),
    ),
    Bug(
        "modulated_by_clock_token",
        "The last modulation takes the time token's embedding.",
        (
            r"time_token|time token|t_embedder|clock|\btemb\b",
            r"(wrong|other|another|different) (input|embedding|value|tensor|condition)",
        ),
    ),
    Bug(
        "text_guided_from_nothing",
        "Text guidance starts from the row without anything, not from that with pictures.",
        (r"guidance|\bcfg\b|uncond|img_cond|formula|combin",),
    ),
    Bug("latents_kept_float16", "Latents are kept in float16.", (HALF,)),
)
