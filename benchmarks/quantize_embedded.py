"""Pictures of the embedded model after each method of quantization, against full precision.

Same prompts, same noise; the median PSNR with a 95 % interval, and the errors of the modules.
All pictures of a setting are drawn in one batch, so a GPU needs seconds for them.

    python benchmarks/quantize_embedded.py --set SET --images 256 rtn:4:channel gptq:3:64
    python benchmarks/quantize_embedded.py --set SET taqdit:4:channel:8 --iterations 1000

A setting is METHOD:BITS:GROUP[:ACTIVATION_BITS][:OPTION=VALUE]…; options are those of the recipe.
groups=N: ranges of activations for N groups of steps; qqmm=1: inputs in the format of the weights.
METHOD:nvfp4:own is a floating-point format; METHOD:PLAN.json:own has the widths of a plan that
`lydite quantize plan --save` wrote.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import lydite  # noqa: F401  # before MLX, so that it gets a fast BLAS

# isort: split
import mlx.core as mx
import numpy as np

from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.request import Request
from lydite.evaluate.embedded_metrics import held_out
from lydite.evaluate.intervals import summarize
from lydite.models.layers import at_timestep
from lydite.pipelines.noise import NOISES
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.blocks import Block, BlockRows, Rows, choose_samples, find_blocks
from lydite.quantize.methods.reconstruct import Recipe
from lydite.quantize.plan import read_plan, uniform_plan
from lydite.quantize.quantize_blocks import (
    DATA_FREE,
    BlockResult,
    Method,
    Settings,
    quantize_blocks,
    round_layers,
)
from lydite.quantize.quantized_weight import exchange_layer
from lydite.weights.load import parameter_specs
from lydite.weights.quantized_format import FORMATS


class Drawer:
    """Draws all pictures of one network in a few batches."""

    def __init__(self, pipeline: Pipeline, prompts: list[str], steps: int, batch: int) -> None:
        self._pipeline, self._batch = pipeline, batch
        self._run = pipeline.plan(Request("", steps=steps))
        runs = [pipeline.plan(Request(prompt, steps=steps)) for prompt in prompts]
        found = [pipeline.encode(run) for run in runs]
        for each in found:
            mx.eval(each)
        self._text = np.stack([np.array(each["text"]) for each in found])  # (N, 2, S, D)
        self._pooled = np.stack([np.array(each["pooled"]) for each in found])
        noise = [NOISES["torch"]((seed,), self._run.shape, self._run.convention.stream).first()
                 for seed in range(len(prompts))]  # fmt: skip
        self._noise = np.concatenate([np.array(each) for each in noise])

    def pictures(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        parts: list[Any] = []
        for first in range(0, len(self._noise), self._batch):
            latents = self._latents(slice(first, first + self._batch))
            parts += [
                self._pipeline.decode(latents[n : n + 16]) for n in range(0, len(latents), 16)
            ]
        return np.concatenate([np.stack(list(part)) for part in parts])

    def _latents(self, part: slice) -> mx.array:
        net = self._pipeline.model.network("transformer")
        swap = (1, 0, 2, 3)
        text = mx.array(self._text[part].transpose(swap)).flatten(0, 1)  # negative first
        pooled = mx.array(self._pooled[part].transpose(swap[:3])).flatten(0, 1)
        text, x = net.embed_text(text), mx.array(self._noise[part])
        positions = net.positions(*x.shape[1:3])
        sigmas = self._run.schedule.sigmas.tolist()
        guidance = self._run.request.guidance or 1.0
        for sigma, after, at in zip(sigmas, sigmas[1:], self._run.schedule.timesteps, strict=False):
            tables = net.modulation(mx.array([at], dtype=mx.float32), pooled)
            tables = {path: table[0] for path, table in tables.items()}
            with at_timestep(float(at)):
                outputs = net(mx.concatenate([x, x]), text, tables, positions)
            negative, positive = mx.split(outputs, 2)
            x = x + (after - sigma) * (negative + guidance * (positive - negative))
            mx.eval(x)
        return x


def psnr(one: Any, other: Any) -> Any:
    error = ((one.astype(np.float64) - other) ** 2).mean(axis=(1, 2, 3))
    return 10 * np.log10(255**2 / np.maximum(error, 1e-3))


def read_setting(text: str, shapes: Any, recipe: Recipe) -> Settings:
    method, bits, group, *rest = text.split(":")
    if method not in get_args(Method):
        raise SystemExit(f"{text}: unknown method; expected {', '.join(get_args(Method))}.")
    named = dict(each.split("=") for each in rest if "=" in each)
    act = next((int(each) for each in rest if "=" not in each), None)
    own = {key: named.pop(key) for key in ("unit", "search", "start") if key in named}
    switches = {key: named.pop(key) == "1" for key in ("shift", "migrate") if key in named}
    modulation = int(named.pop("modulation", 8))
    inputs = {"act_groups": int(named.pop("groups", 1)), "quantize_input": "qqmm" in named}
    named.pop("qqmm", None)
    recipe = replace(recipe, **{k: type(getattr(recipe, k))(float(v)) for k, v in named.items()})
    if bits.endswith(".json"):
        plan = read_plan(Path(bits), shapes)
    elif bits in FORMATS:
        plan = uniform_plan(shapes, 4, 64, mode=bits)  # pyright: ignore[reportArgumentType]
    else:
        size = 0 if group == "channel" else int(group)
        plan = uniform_plan(shapes, int(bits), size, modulation_bits=modulation)
    return Settings(method, plan, act, recipe=recipe, **inputs, **own, **switches)  # pyright: ignore[reportArgumentType]


class SharedRows(BlockRows):
    """Rows of several settings: the network is run on the set once, not once for each of them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept, self._rows = dict(self._others), super()._captured(self.blocks[0])

    def begin(self) -> None:
        self.quantized, self._others = {}, dict(self._kept)
        self.full = dict(self.original)

    def _captured(self, block: Block) -> list[Rows]:
        return self._rows if block is self.blocks[0] else super()._captured(block)


_shared: list[SharedRows] = []


def quantized(pipeline: Pipeline, folder: Path | None, settings: Settings, most: int) -> Any:
    net = pipeline.model.network("transformer")
    if settings.method in DATA_FREE and not settings.act_bits:
        blocks = find_blocks(pipeline.family, net)
        modules = dict(net.named_modules())
        for block in blocks:
            layers = {path: modules[path] for path in block.linears}
            yield BlockResult(block.path, round_layers(layers, settings))
        return
    assert folder is not None
    with CalibrationSet.open(folder) as opened:
        if not _shared:
            chosen = choose_samples(opened, 1, 1 << 40, most)
            _shared.append(SharedRows(pipeline, opened, chosen))
        rows = _shared[0]
        rows.begin()
        yield from quantize_blocks(rows, pipeline.family, settings)
        rows.install(rows.original)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--set", type=Path)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--samples", type=int, default=1 << 30)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=700)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pipeline = Pipeline.open(options.model, dtype="float32")
    pipeline.model.prepare()
    net = pipeline.model.network("transformer")
    shapes = parameter_specs(net)
    drawer = Drawer(pipeline, list(held_out())[: options.images], options.steps, options.batch)
    start = time.perf_counter()
    wanted = drawer.pictures()
    print(f"{len(wanted)} pictures in {time.perf_counter() - start:.1f} s", flush=True)
    recipe = Recipe(iterations=options.iterations, batch=64, rounding_rate=1e-2)
    originals = {p: m for p, m in net.named_modules() if f"{p}.weight" in shapes}
    found: list[dict[str, Any]] = []
    for text in options.settings:
        settings = read_setting(text, shapes, recipe)
        start = time.perf_counter()
        results = list(quantized(pipeline, options.set, settings, options.samples))
        spent = time.perf_counter() - start
        weights = {path: weight for each in results for path, weight in each.weights.items()}
        for path, weight in weights.items():
            exchange_layer(net, path, weight.layer())
        values = psnr(wanted, drawer.pictures())
        for path in weights:
            exchange_layer(net, path, originals[path])
        errors = [error for each in results for error in each.errors]
        better = [error.after < error.nearest for error in errors]
        low, high = median_interval(values)
        row = {
            "setting": text, "psnr": float(np.median(values)), "low": low, "high": high,
            "mean": summarize(values.tolist()).mean, "seconds": spent,
            "bits_per_weight": settings.plan.bits_per_weight(shapes),
            "better": sum(better), "units": len(better),
            "error": float(np.mean([e.after / e.nearest for e in errors])) if errors else None,
        }  # fmt: skip
        found.append(row)
        print(
            f"{text:50} {row['psnr']:6.2f} ({low:.2f} to {high:.2f})  mean {row['mean']:.2f}  "
            f"{row['bits_per_weight']:.2f} bits  {spent:6.1f} s  error × {row['error'] or 1:.3f} "
            f"better {sum(better)}/{len(better)}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


def median_interval(values: Any) -> tuple[float, float]:
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(values, (2000, len(values))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


if __name__ == "__main__":
    main()
