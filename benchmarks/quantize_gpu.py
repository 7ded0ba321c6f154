"""Learned rounding of a model of SD3-medium's size on a GPU, and one step of the result.

    python benchmarks/quantize_gpu.py                 all parts
    python benchmarks/quantize_gpu.py --tiny          small shapes, to see that it runs
    python benchmarks/quantize_gpu.py --parts step
    python benchmarks/quantize_gpu.py --parts path --size 512 --iterations 8 --memory 4GB 8GB
    python benchmarks/quantize_gpu.py --parts path … --folder WORK       twice: the second goes on

Parts, each in a process of its own:
    ours, ours-tf32       TaQ-DiT W4A8, per channel: the attention and the feed-forward of a block
    torch, torch-tf32     the same iteration in plain PyTorch: diffusers' modules, float32, eager
    step                  the network in bfloat16 and in 4 bits at 1024²: time and memory
    gptq                  GPTQ of a block, and the search of its ranges
    path                  calibrate, TaQ-DiT with few iterations, export, run: the commands
Weights are random; some channels of the inputs and of the activations behind GELU are outliers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from sd3_gpu import CONFIG, TEXT, TINY

PARTS = ("ours", "ours-tf32", "torch", "torch-tf32", "step", "gptq", "path")
WARM_UP = 4
OUTLIERS = 12  # channels
ITERATIONS = 20_000  # of TaQ-DiT
UNITS = {"attention": 24, "feed-forward": 24, "feed-forward of text": 23}  # of SD3-medium
RATE, RANGE_RATE, BALANCE = 1e-3, 4e-5, 0.01
SHARPNESS = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--batch", type=int, default=32, help="rows of an iteration")
    parser.add_argument("--rows", type=int, default=48, help="rows in memory")
    parser.add_argument("--image-tokens", type=int, default=1024)
    parser.add_argument("--text-tokens", type=int, default=154)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--images", type=int, default=4, help="of the path's calibration set")
    parser.add_argument("--steps", type=int, default=8, help="of a picture of the path")
    parser.add_argument("--size", type=int, help="side of the picture of a step, in pixels")
    parser.add_argument(
        "--memory", nargs="+", default=["4GB"], help="for a call; of the path, one run each"
    )
    parser.add_argument("--folder", type=Path, help="of the path: kept, and a second run goes on")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.config = CONFIG | (TINY if options.tiny else {})
    options.size = options.size or (128 if options.tiny else 1024)
    if options.tiny:
        options.batch, options.rows, options.image_tokens, options.text_tokens = 4, 16, 32, 8
    if options.part:
        run = {"step": run_step, "gptq": run_gptq, "path": run_path}.get(options.part)
        run = run or (run_torch if options.part.startswith("torch") else run_ours)
        run(options)
        return
    found: dict[str, dict[str, float]] = {}
    for part in options.parts:
        found |= in_a_process(part)
    for unit in UNITS:
        rows = {part: found[f"{part} {unit}"]["ms"] for part in PARTS if f"{part} {unit}" in found}
        for ours in (part for part in rows if part.startswith("ours")):
            ratios = [f"{rows[ours] / rows[p]:.2f} of {p}" for p in rows if p.startswith("torch")]
            if ratios:
                print(f"{unit}: {ours} takes {', '.join(ratios)}")
    for part in PARTS:
        rows = [
            found[f"{part} {unit}"]["ms"] * n
            for unit, n in UNITS.items()
            if f"{part} {unit}" in found
        ]
        if len(rows) == len(UNITS):
            hours = sum(rows) * ITERATIONS / 3.6e6
            print(
                f"{part}: {hours:.1f} h for {ITERATIONS} iterations of {sum(UNITS.values())} units"
            )


def in_a_process(part: str) -> dict[str, Any]:
    """Run a part and pass on what it prints; lines of JSON are its results."""
    found: dict[str, Any] = {}
    environment = os.environ | {"MLX_ENABLE_TF32": "1" if part.endswith("tf32") else "0"}
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("{"):
                row = json.loads(line)
                found[f"{part} {row['unit']}"] = row
    return found


def report(unit: str, times: list[float], peak: int, **more: float) -> None:
    ms = 1e3 * statistics.median(times)
    row = {"ms": ms, "peak GiB": peak / 2**30, **more}
    line = {"unit": unit} | {key: round(value, 3) for key, value in row.items()}
    print(json.dumps(line), flush=True)


def draw_inputs(options: argparse.Namespace, unit: str) -> list[Any]:
    """Rows of image tokens and, for the attention, of text tokens; some channels are outliers."""
    generator = np.random.default_rng(0)
    dim = options.config["caption_projection_dim"]
    image, text = options.image_tokens, options.text_tokens
    tokens = {"attention": [image, text], "feed-forward": [image]}.get(unit, [text])
    found: list[Any] = []
    for count in tokens:
        x = generator.standard_normal((options.rows, count, dim), np.float32)
        x[..., generator.choice(dim, OUTLIERS)] *= 20
        found.append(x)
    return found


def draw_weights(shape: tuple[int, int], *, behind_gelu: bool) -> tuple[Any, Any]:
    """Weight and bias; before a GELU some outputs are outliers."""
    generator = np.random.default_rng(shape[0])
    weight = generator.standard_normal(shape, np.float32) * shape[1] ** -0.5
    bias = 0.1 * generator.standard_normal(shape[0], np.float32)
    if behind_gelu:
        weight[generator.choice(shape[0], OUTLIERS)] *= 10
    return weight, bias


# Ours


def run_ours(options: argparse.Namespace) -> None:
    import mlx.core as mx

    import lydite  # noqa: F401
    from lydite.cli.recording import read_bytes
    from lydite.models.mmdit import JointBlock, MMDiTConfig
    from lydite.quantize.methods.reconstruct import Recipe, reconstruct

    block = JointBlock(MMDiTConfig(**options.config), 0)
    recipe = Recipe(iterations=options.iterations, batch=options.batch, warm_up=0.0)
    for unit, module in zip(UNITS, (block.attn, block.ff, block.ff_context), strict=True):
        problem = our_problem(module, draw_inputs(options, unit), read_bytes(options.memory[0], ""))
        times: list[float] = []
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.perf_counter()
        reconstruct(problem, recipe, tick=lambda *_, times=times: times.append(time.perf_counter()))
        spent = time.perf_counter() - start
        each = np.diff(times)[WARM_UP:].tolist()
        report(unit, each, mx.get_peak_memory(), held=held / 2**30, first=times[0] - start)
        print(f"  {spent:.1f} s with compilation and held-out errors", flush=True)


def our_problem(module: Any, inputs: list[Any], memory: int) -> Any:
    import mlx.core as mx

    from lydite.models.layers import Linear
    from lydite.quantize.blocks import Rows
    from lydite.quantize.grid import fit_grid
    from lydite.quantize.input_ranges import is_behind_gelu, plain_range, time_aware_range
    from lydite.quantize.methods.reconstruct import Problem, Target
    from lydite.quantize.quantized_weight import exchange_layer
    from lydite.quantize.watch_modules import watch_calls
    from lydite.trace.mlx_capture import walk

    linears: dict[str, Any] = {p: layer for p, layer in walk(module) if isinstance(layer, Linear)}
    for path, layer in linears.items():
        weight, bias = draw_weights(layer.weight.shape, behind_gelu=path.endswith("proj"))
        layer.weight, layer.bias = mx.array(weight), mx.array(bias)
    arrays = {f"args.{n}": mx.array(x) for n, x in enumerate(inputs)}
    noisy = {key: x + 0.02 * mx.random.normal(x.shape) for key, x in arrays.items()}
    rows = Rows(list(range(len(inputs[0]))), {}, {}, arrays, noisy)
    rows.fit(module, memory)
    outputs = rows.forward(module, rows.full)
    ranges: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    seen: dict[int, str] = {}
    alive: list[Any] = []

    def keep(path: str, args: Any, kwargs: Any, output: Any) -> Any:
        alive.append(args[0])
        name = seen.setdefault(id(args[0]), path)
        if name == path:
            values = np.array(args[0])
            found = time_aware_range if is_behind_gelu(values).any() else plain_range
            ranges[name] = found(values, 8)
        weight = ranges[name].scaled(np.array(linears[path].weight))
        bias = np.array(linears[path].bias)
        targets[path] = Target(weight, bias, fit_grid(weight, 4, None), name)
        return output

    with watch_calls(linears, keep):
        mx.eval(rows.call(module, rows.arrays(rows.quantized, slice(0, 4))))

    def install(layers: Any) -> None:
        for path, layer in layers.items():
            exchange_layer(module, path, layer)

    return Problem(module, install, targets, ranges, [rows], [outputs])


# Plain PyTorch


def run_torch(options: argparse.Namespace) -> None:
    import torch
    from diffusers.models.attention import JointTransformerBlock

    torch.backends.cuda.matmul.allow_tf32 = options.part.endswith("tf32")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = options.config
    heads, head = config["num_attention_heads"], config["attention_head_dim"]
    block = JointTransformerBlock(heads * head, heads, head).to(device)
    block.requires_grad_(False)
    for unit, module in zip(UNITS, (block.attn, block.ff, block.ff_context), strict=True):
        inputs = [torch.tensor(x, device=device) for x in draw_inputs(options, unit)]
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        else:
            held = 0
        times = torch_times(options, module, inputs, device)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        report(unit, times, peak, held=held / 2**30)


def torch_times(options: argparse.Namespace, module: Any, inputs: list[Any], device: str) -> Any:
    import torch
    from torch import nn

    class TrialLinear(nn.Module):
        """AdaRound's weight, and an input that is rounded with LSQ's scale and QDrop's mask."""

        def __init__(self, linear: nn.Linear, *, moved: bool) -> None:
            super().__init__()
            shape: Any = tuple(linear.weight.shape)
            weight, bias = (torch.tensor(x, device=device) for x in draw_weights(
                shape, behind_gelu=shape[0] > shape[1]))  # fmt: skip
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            self.offset, self.step = low, (high - low) / 15
            position = ((weight - low) / self.step).clamp(0, 15)
            self.floor = position.floor()
            share = (position - self.floor).clamp(1e-4, 1 - 1e-4)
            self.alpha = nn.Parameter(-torch.log(1.2 / (share + 0.1) - 1))
            self.bias = bias
            self.scale = nn.Parameter(torch.tensor(0.05, device=device))
            self.zero = 128.0
            self.moved = moved
            self.shift = torch.randn(shape[1], device=device)
            self.divisor = torch.randint(1, 4, (shape[1],), device=device).float()

        def rounding(self) -> Any:
            return (torch.sigmoid(self.alpha) * 1.2 - 0.1).clamp(0, 1)

        def forward(self, x: Any) -> Any:
            weight = (self.floor + self.rounding()).clamp(0, 15) * self.step + self.offset
            bias = self.bias
            if self.moved:
                x = (x - self.shift) / self.divisor
                bias = bias + weight @ (self.shift / self.divisor)
            factor = 1 / (x.numel() * 255) ** 0.5
            scale = self.scale.abs().clamp(min=1e-9)
            scale = (scale * (1 - factor)).detach() + scale * factor
            steps = x / scale
            steps = steps + (steps.round() - steps).detach()
            rounded = ((steps + self.zero).clamp(0, 255) - self.zero) * scale
            rounded = torch.where(torch.rand_like(x) < 0.5, x, rounded)
            return nn.functional.linear(rounded, weight, bias)

    def call(batch: list[Any]) -> list[Any]:
        if len(batch) == 1:
            return [module(batch[0])]
        return list(module(hidden_states=batch[0], encoder_hidden_states=batch[1]))

    with torch.no_grad():
        parts = [call([x[n : n + 8] for x in inputs]) for n in range(0, options.rows, 8)]
    outputs = [torch.cat(each) for each in zip(*parts, strict=True)]
    noisy = [x + 0.02 * torch.randn_like(x) for x in inputs]
    layers: list[TrialLinear] = []
    for path, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear):
            layers.append(TrialLinear(linear, moved=path == "net.2"))
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, layers[-1])
    optimizers = [
        torch.optim.Adam([layer.alpha for layer in layers], lr=RATE),
        torch.optim.Adam([layer.scale for layer in layers], lr=RANGE_RATE),
    ]
    times: list[float] = []
    for _ in range(options.iterations):
        start = time.perf_counter()
        index = torch.randint(0, options.rows * 7 // 8, (options.batch,), device=device)
        batch = [
            torch.where(torch.rand_like(x[index]) < 0.5, x[index], y[index])
            for x, y in zip(inputs, noisy, strict=True)
        ]
        loss = torch.zeros((), device=device)
        for output, full in zip(call(batch), outputs, strict=True):
            squares = (output - full[index]).square()
            loss = loss + squares.mean(dim=(0, -1)).sum() * (256 / output.shape[1])
        for layer in layers:
            decided = (2 * layer.rounding() - 1).abs() ** SHARPNESS
            loss = loss + BALANCE * (1 - decided).sum()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.isfinite(loss)  # waits for the GPU
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[WARM_UP:]


# One step


def run_step(options: argparse.Namespace) -> None:
    import mlx.core as mx

    import lydite  # noqa: F401
    from lydite.models.layers import QuantizedLinear
    from lydite.models.mmdit import MMDiT, MMDiTConfig

    config = MMDiTConfig(**options.config)
    model = MMDiT(config)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    side, batch = options.size // 8, 2

    def draw(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(mx.bfloat16)

    tables = model.modulation(mx.array([500.0]), draw(batch, config.pooled_projection_dim))
    tables = {path: mx.contiguous(table[0]) for path, table in tables.items()}
    text = model.embed_text(draw(batch, TEXT, config.joint_attention_dim))
    latent, positions = draw(batch, side, side, 16), model.positions(side, side)
    mx.eval(tables, text, latent, positions)

    def measure(name: str) -> float:
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        step = mx.compile(model)
        times: list[float] = []
        for _ in range(WARM_UP + 20):
            mx.synchronize()
            start = time.perf_counter()
            mx.eval(step(latent, text, tables, positions))
            times.append(time.perf_counter() - start)
        ms = 1e3 * statistics.median(times[WARM_UP:])
        peak = mx.get_peak_memory() / 2**30
        print(f"{name}: {ms:.2f} ms, {held / 2**30:.2f} GiB held, {peak:.2f} GiB peak", flush=True)
        return ms

    plain = measure(f"step at {options.size}², bfloat16")
    pack_blocks(model)
    packed_ms = measure("step, 4 bits in groups of 64, modulation 8")
    print(f"step: 4 bits takes {packed_ms / plain:.3f} of bfloat16", flush=True)
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear) and "norm" not in path:
            inputs = layer.scales.shape[1] * 64
            layer.input_range = mx.array([0.05, 128.0, 255.0])
            if path.endswith("net.2"):
                layer.input_shift = mx.zeros(inputs, mx.bfloat16)
                layer.input_divisor = mx.ones(inputs, mx.bfloat16)
    simulated = measure("step, 4 bits with simulated 8-bit activations")
    print(f"step: W4A8, simulated, takes {simulated / plain:.3f} of bfloat16", flush=True)


def pack_blocks(model: Any) -> None:
    """Linears of the blocks in 4 bits, those of the modulation in 8."""
    import mlx.core as mx

    from lydite.models.layers import Linear, QuantizedLinear
    from lydite.quantize.quantized_weight import exchange_layer

    for path, layer in list(model.named_modules()):
        if isinstance(layer, Linear) and path.startswith("transformer_blocks."):
            packed = QuantizedLinear.from_linear(layer, 64, 8 if "norm" in path else 4)
            mx.eval(packed.parameters())
            exchange_layer(model, path, packed)


# GPTQ


def run_gptq(options: argparse.Namespace) -> None:
    import mlx.core as mx

    import lydite  # noqa: F401
    from lydite.quantize.grid import fit_grid
    from lydite.quantize.methods.gptq import gptq, prepare_inputs

    dim = options.config["caption_projection_dim"]
    # outputs, inputs, how many in a block, how many share a Hessian
    shapes = [(dim, dim, 8), (4 * dim, dim, 2), (dim, 4 * dim, 2)]
    total = {"Hessian": 0.0, "ranges": 0.0, "GPTQ": 0.0}
    for outputs, inputs, count in shapes:
        weight, _ = draw_weights((outputs, inputs), behind_gelu=False)
        x = mx.random.normal((options.batch * options.image_tokens, inputs))
        mx.eval(x)
        start = time.perf_counter()
        hessian = np.array(x.T @ x, np.float64)
        after = time.perf_counter()
        grid = fit_grid(weight, 4, 64, search="mse")
        searched = time.perf_counter()
        gptq(weight, prepare_inputs(hessian), grid)
        end = time.perf_counter()
        spent = {"Hessian": after - start, "ranges": searched - after, "GPTQ": end - searched}
        for name, seconds in spent.items():
            total[name] += count * seconds
        line = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items())
        print(f"gptq {outputs} × {inputs}: {line}", flush=True)
    line = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in total.items())
    print(f"gptq, a block of {sum(n for *_, n in shapes)} linears: {line}", flush=True)


# The commands


def run_path(options: argparse.Namespace) -> None:
    import mlx.core as mx

    from lydite.cli.main import lydite
    from lydite.models.mmdit import MMDiTConfig
    from untrained_sd3 import make_untrained

    def outliers(path: str, normals: Any) -> Any:
        if normals.ndim < 2:
            return (0.1 * normals + ("norm" in path and path.endswith("weight"))).astype("float16")
        weight = normals * (normals.size // normals.shape[0]) ** -0.5
        if path.endswith("net.0.proj.weight"):
            weight[:OUTLIERS] *= 10
        return weight.astype("float16")

    def run(*command: str) -> None:
        mx.clear_cache()
        mx.reset_peak_memory()
        start = time.perf_counter()
        lydite.main(list(command), standalone_mode=False)
        took, peak = time.perf_counter() - start, mx.get_peak_memory() / 2**30
        peak = max([peak, *(most for _, _, most in spent.values())])
        print(f"{command[0]}: {took:.1f} s, {peak:.2f} GiB peak", flush=True)

    spent = time_stages()
    config, widths, heads = options.config, (768, 1280), (12, 20)
    images, steps, iterations = options.images, options.steps, options.iterations
    if options.tiny:
        config = config | {"joint_attention_dim": 128, "pooled_projection_dim": 96}
        widths, heads, images, steps, iterations = (32, 64), (2, 2), 2, 2, 2
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        if not (folder / "prompts.txt").exists():
            start = time.perf_counter()
            make_untrained(folder / "model", transformer=MMDiTConfig(**config),
                           clip_widths=widths, clip_heads=heads, draw=outliers)  # fmt: skip
            print(f"model written: {time.perf_counter() - start:.1f} s", flush=True)
        (folder / "prompts.txt").write_text("a red fox\na blue hill\nan old tree\n")
        model, prompts = str(folder / "model"), str(folder / "prompts.txt")
        size = f"{options.size}x{options.size}"
        run("calibrate", "run", "-m", model, "--prompts", prompts, "--images", str(images),
            "--steps", str(steps), "--size", size, "--out", f"{folder}/set")  # fmt: skip
        for memory in options.memory:
            if (folder / memory).exists():  # an earlier run finished it
                continue
            run("quantize", model, "--method", "taqdit", "--bits", "4", "--group", "channel",
                "--act-bits", "8", "--set", f"{folder}/set", "--memory", memory,
                "--iterations", str(iterations), "--eval-prompts", prompts,
                "--eval-images", "2", "--out", f"{folder}/{memory}")  # fmt: skip
            for stage, (seconds, count, peak) in spent.items():
                print(f"  {stage}: {seconds:.1f} s in {count} calls, {peak:.2f} GiB peak")
            if "learning" in spent:
                learning, count, _ = spent["learning"]
                each = learning / count / iterations  # held-out errors and compilation included
                hours = each * ITERATIONS * count / 3600
                print(f"  {1e3 * each:.1f} ms an iteration on average, {hours:.1f} h for "
                      f"{ITERATIONS} of {count} modules", flush=True)  # fmt: skip
            spent.clear()
        made = f"{folder}/{options.memory[-1]}"
        run("generate", "a red fox", "--model", made, "--steps", str(steps), "--size", size,
            "--overwrite", "--out", f"{folder}/fox.png")  # fmt: skip


def time_stages() -> dict[str, tuple[float, int, float]]:
    """Seconds, calls and peak memory (GiB) of the stages of `lydite quantize`, filled as they run.

    Each module that was learned is a line: a run that is stopped has said how far it came.
    """
    import mlx.core as mx

    from lydite.cli.quantize import model
    from lydite.quantize import blocks, quantize_blocks, quantize_model

    spent: dict[str, tuple[float, int, float]] = {}

    def watch(holder: Any, name: str, stage: str) -> None:
        original = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            mx.synchronize()
            mx.reset_peak_memory()
            start = time.perf_counter()
            result = original(*args, **kwargs)
            mx.synchronize()
            took, peak = time.perf_counter() - start, mx.get_peak_memory() / 2**30
            seconds, count, most = spent.get(stage, (0.0, 0, 0.0))
            spent[stage] = seconds + took, count + 1, max(peak, most)
            if stage == "learning":
                parts = ", ".join(f"{each} {total[0]:.1f} s" for each, total in spent.items())
                print(f"module {count + 1}: {parts}; {peak:.2f} GiB peak", flush=True)
            return result

        setattr(holder, name, timed)

    watch(blocks.BlockRows, "_find_links", "rows of the first block")
    watch(blocks.BlockRows, "_advanced", "rows of the next block")
    watch(quantize_blocks._Block, "_input_range", "ranges of activations")
    watch(quantize_blocks._Block, "_target", "ranges of weights")
    watch(quantize_blocks, "capture_unit", "rows of a module")
    watch(quantize_blocks, "reconstruct", "learning")
    watch(quantize_model, "export", "export")
    watch(model, "evaluate_export", "evaluation")
    return spent


if __name__ == "__main__":
    main()
