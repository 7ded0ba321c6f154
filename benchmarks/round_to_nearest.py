"""What plain round-to-nearest does to the embedded model: the baseline that methods have to beat.

    .venv/bin/python benchmarks/round_to_nearest.py --plot docs/embedded-gelu.png > table.md

Every linear of the transformer is rounded on an asymmetric grid from the smallest to the largest
value of each output channel (ch) or of 64 inputs of it (g64), and computed in float32 again. A8
rounds the inputs of these linears as well: to one grid for each linear, set beforehand on other
prompts (tensor), or to one for each token, set as it comes (token). Prompt i starts from seed i
everywhere. FID is the Fréchet distance on the judge's features, not on Inception's. On two cores
256 prompts take an hour; the table goes to stdout.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from lydite import embedded
from lydite.core.request import Request
from lydite.embedded.captions import Prompt, held_out_prompts
from lydite.embedded.scenes import paint, sample_scenes
from lydite.evaluate.distributions import Moments, frechet_distance
from lydite.evaluate.judge import Judge, load_judge
from lydite.evaluate.paired import psnr
from lydite.evaluate.prompt_accuracy import score
from lydite.models.layers import Linear
from lydite.pipelines.pipeline import Pipeline
from post_gelu_activations import plot

os.environ.setdefault("MLX_ENABLE_TF32", "0")
SEED, CALIBRATION_SEED, OTHER_SEED = 99991, 99993, 99994  # of scenes; training drew from others
TINY = 1e-30  # keeps a group of equal values from 0 / 0

Ranges = dict[str, tuple[float, float]]  # of each linear's inputs, by its path


@dataclass(frozen=True)
class Setting:
    """How the linears are rounded."""

    name: str
    weight_bits: int | None = None
    group: int | None = None  # inputs that share a grid; None: all of an output channel
    inputs: str | None = None  # 8 bits: one grid for the "tensor" or for each "token"


SETTINGS = (
    Setting("full precision"),
    Setting("W4 ch", 4),
    Setting("W4 g64", 4, 64),
    Setting("W3 ch", 3),
    Setting("W3 g64", 3, 64),
    Setting("W2 ch", 2),
    Setting("W2 g64", 2, 64),
    Setting("W4A8 ch, tensor", 4, inputs="tensor"),
    Setting("W4A8 g64, token", 4, 64, inputs="token"),
)


@dataclass(frozen=True)
class Drawn:
    """Pictures of all prompts, their last latents and features."""

    pictures: NDArray[np.uint8]  # (N, 128, 128, 3)
    latents: NDArray[np.float64]  # (N, 16 · 16 · 16)
    features: NDArray[np.float32]  # (N, 96)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [setting.name for setting in SETTINGS[1:]]
    parser.add_argument("--prompts", type=int, default=256, help="held-out prompts")
    parser.add_argument("--calibration", type=int, default=16, help="other prompts, for the ranges")
    parser.add_argument("--model", type=Path, default=embedded.MODEL, help="a model of its kind")
    parser.add_argument("--steps", type=int, help="by default the model's own number")
    parser.add_argument("--guidance", type=float, help="by default the model's own")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SETTING")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="draw post-GELU activations over the steps here")
    options = parser.parse_args()
    prompts = held_out_prompts(options.prompts, SEED)
    judge = load_judge(options.model / "judge.safetensors")
    scenes = judge.features(paint(sample_scenes(options.prompts, SEED, held_out=True)))
    others = judge.features(paint(sample_scenes(options.prompts, OTHER_SEED, held_out=True)))
    full = draw(SETTINGS[0], prompts, judge, {}, options)
    figures = {SETTINGS[0].name: against(full, full, scenes, prompts, judge)}
    chosen = [setting for setting in SETTINGS if setting.name in options.only]
    ranges = measure_ranges(options) if any(each.inputs == "tensor" for each in chosen) else {}
    for setting in chosen:
        rounded = draw(setting, prompts, judge, ranges, options)
        figures[setting.name] = against(rounded, full, scenes, prompts, judge)
    drawn = frechet_distance(Moments.of(others), Moments.of(scenes))
    figures["other drawn scenes"] = {"fid_to_drawn": drawn}
    print(markdown(figures))
    if options.json:
        run = Pipeline.open(options.model).plan(request_of(options))
        facts = {"prompts": options.prompts, "steps": run.steps, "guidance": run.request.guidance}
        options.json.write_text(json.dumps({**facts, "settings": figures}, indent=1) + "\n")
    if options.plot:
        plot(options.plot, options.model, request_of(options))


def draw(
    setting: Setting,
    prompts: Sequence[Prompt],
    judge: Judge,
    ranges: Ranges,
    options: argparse.Namespace,
) -> Drawn:
    import mlx.core as mx

    pipeline = Pipeline.open(options.model, dtype="float32")
    for path, linear in linears(pipeline.model.network("transformer")):
        if setting.weight_bits:
            weight = rounded_weight(np.array(linear.weight), setting.weight_bits, setting.group)
            linear.weight = mx.array(weight)
        if setting.inputs == "tensor":
            pass_inputs_through(linear, fixed_grid(*ranges[path]))
        elif setting.inputs == "token":
            pass_inputs_through(linear, grid_per_token)
    drawn = list(each_picture(pipeline, prompts, setting.name, options))
    pictures, latents = (np.stack(parts) for parts in zip(*drawn, strict=True))
    return Drawn(pictures, latents.reshape(len(prompts), -1), judge.features(pictures))


def each_picture(
    pipeline: Pipeline, prompts: Sequence[Prompt], name: str, options: argparse.Namespace
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.float64]]]:
    console = Console(stderr=True)
    for seed, prompt in enumerate(track(prompts, f"{name:<15}", console=console)):
        run = pipeline.plan(request_of(options).replace(prompt=prompt.text))
        (batch,) = pipeline.denoise(run, [seed])
        (pixels,) = pipeline.decode(batch.x)
        yield pixels, np.array(batch.x, np.float64)


def request_of(options: argparse.Namespace) -> Request:
    return Request(steps=options.steps, guidance=options.guidance)


def rounded_weight(weight: NDArray[Any], bits: int, group: int | None) -> NDArray[np.float32]:
    """A weight (out, in) in `bits` and back, each channel or each group of it on its own grid."""
    groups = weight.astype(np.float64).reshape(len(weight), -1, group or weight.shape[1])
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    return on_grid(groups, low, high, bits).reshape(weight.shape).astype(np.float32)


def on_grid(x: Any, low: Any, high: Any, bits: int) -> Any:
    """x, a NumPy or an MLX array from `low` to `high`, on the nearest of 2 ** bits levels."""
    step = (high - low) / (2**bits - 1)
    return ((x - low) / (step + TINY)).round() * step + low


def fixed_grid(low: float, high: float) -> Callable[[Any], Any]:
    import mlx.core as mx

    return lambda x: on_grid(mx.clip(x, low, high), low, high, 8)


def grid_per_token(x: Any) -> Any:
    return on_grid(x, x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True), 8)


def measure_ranges(options: argparse.Namespace) -> Ranges:
    """The smallest and the largest input of each linear over all steps."""
    pipeline = Pipeline.open(options.model, dtype="float32")
    ranges: Ranges = {}

    def watched(path: str) -> Callable[[Any], Any]:
        def look(x: Any) -> Any:
            low, high = ranges.get(path, (np.inf, -np.inf))
            ranges[path] = min(low, x.min().item()), max(high, x.max().item())
            return x

        return look

    for path, linear in linears(pipeline.model.network("transformer")):
        pass_inputs_through(linear, watched(path))
    prompts = held_out_prompts(options.calibration, CALIBRATION_SEED)
    for _ in each_picture(pipeline, prompts, "input ranges", options):
        pass
    return ranges


def linears(network: Any) -> list[tuple[str, Any]]:
    return [(path, each) for path, each in network.named_modules() if isinstance(each, Linear)]


def pass_inputs_through(linear: Linear, change: Callable[[Any], Any]) -> None:
    """Python looks `__call__` up on the class, so this linear gets a class of its own."""

    class Changed(Linear):
        def __call__(self, x: Any) -> Any:
            return super().__call__(change(x))

    object.__setattr__(linear, "__class__", Changed)


def against(
    rounded: Drawn, full: Drawn, scenes: Any, prompts: Sequence[Prompt], judge: Judge
) -> dict[str, Any]:
    """Paired errors against full precision, prompt accuracy, and distances between sets."""
    accuracy = score(judge.readings(rounded.pictures), [prompt.says for prompt in prompts])
    figures: dict[str, Any] = {
        "fid_to_drawn": frechet_distance(Moments.of(rounded.features), Moments.of(scenes)),
        "accuracy": asdict(accuracy),
    }
    if rounded is full:
        return figures
    error = np.linalg.norm(rounded.latents - full.latents, axis=1)
    size = np.linalg.norm(full.latents, axis=1)
    pairs = zip(rounded.pictures, full.pictures, strict=True)
    decibels = np.array([psnr(one, other) for one, other in pairs])
    return {
        "latent_median": float(np.median(error / size)),
        "latent_total": float(np.linalg.norm(error) / np.linalg.norm(size)),
        "psnr_median": float(np.median(decibels)),
        "psnr_mean": float(decibels.mean()),
        "fid_to_full": frechet_distance(Moments.of(rounded.features), Moments.of(full.features)),
        **figures,
    }


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "latent error, median": lambda row: f"{row['latent_median']:.3f}",
    "of all": lambda row: f"{row['latent_total']:.3f}",
    "PSNR dB, median": lambda row: f"{row['psnr_median']:.1f}",
    "mean": lambda row: f"{row['psnr_mean']:.1f}",
    "everything right": lambda row: f"{row['accuracy']['everything']:.1%}",
    "FID to full precision": lambda row: f"{row['fid_to_full']:.3f}",
    "to drawn scenes": lambda row: f"{row['fid_to_drawn']:.3f}",
}


def markdown(figures: dict[str, dict[str, Any]]) -> str:
    def cell(value: Callable[[dict[str, Any]], str], row: dict[str, Any]) -> str:
        try:
            return value(row)
        except KeyError:  # nothing is measured against itself
            return "–"

    lines = [["", *COLUMNS], ["---", *["---:"] * len(COLUMNS)]]
    lines += [
        [name, *(cell(value, row) for value in COLUMNS.values())] for name, row in figures.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
