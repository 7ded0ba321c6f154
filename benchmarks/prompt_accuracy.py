"""Prompt accuracy of the embedded model: in our pipeline and, from the same noise, in diffusers.

    .venv/bin/python benchmarks/prompt_accuracy.py --prompts 1024 --bare 256

Held-out prompts name pairs of objects never seen in training. Prompt i starts from seed i on both
sides, at the model's own steps and guidance; the judge reads every picture. A quarter of an hour
per thousand prompts on two cores. Needs the `reference` extra, but for `--sides ours`.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from lydite import embedded
from lydite.core.request import Request
from lydite.embedded.captions import Prompt, bare_nouns, held_out_prompts
from lydite.evaluate.prompt_accuracy import PromptAccuracy, Reading, check, score

if TYPE_CHECKING:  # imports MLX, which reads the variable below
    from lydite.pipelines.pipeline import Pipeline

os.environ.setdefault("MLX_ENABLE_TF32", "0")
SEEDS = {"held out": 99991, "bare nouns": 99992}  # of the prompts; training drew from others
TOGETHER = 16  # prompts a call, in diffusers

Pictures = NDArray[np.uint8]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=1024, help="held-out prompts")
    parser.add_argument("--bare", type=int, default=256, help="prompts of one to three words")
    parser.add_argument("--model", type=Path, default=embedded.MODEL, help="a model of its kind")
    parser.add_argument("--steps", type=int, help="by default the model's own number")
    parser.add_argument("--guidance", type=float, help="by default the model's own")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--out", type=Path, help="write figures, failures and pictures here")
    options = parser.parse_args()
    sets = {
        "held out": held_out_prompts(options.prompts, SEEDS["held out"]),
        "bare nouns": bare_nouns(options.bare, SEEDS["bare nouns"]),
    }
    figures: dict[str, Any] = {}
    for side in options.sides:
        for name, prompts in sets.items():
            start = time.perf_counter()
            pictures = SIDES[side]([prompt.text for prompt in prompts], options)
            seconds = time.perf_counter() - start
            figures[f"{side}, {name}"] = measure(pictures, prompts) | {"seconds": seconds}
            report(f"{side}, {name}", figures[f"{side}, {name}"])
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                file = options.out / f"{side}-{name.replace(' ', '-')}.npz"
                np.savez_compressed(file, pictures=pictures)
    if options.out:
        (options.out / "prompt-accuracy.json").write_text(json.dumps(figures, indent=1) + "\n")


def draw_ours(texts: Sequence[str], options: argparse.Namespace) -> Pictures:
    pipeline, request = open_pipeline(options)
    pictures: list[Any] = []
    for seed, text in enumerate(track(texts, "ours")):
        picture = next(pipeline.generate(request.replace(prompt=text), [seed]))
        pictures.append(picture.pixels)
    return np.stack(pictures)


def open_pipeline(options: argparse.Namespace) -> "tuple[Pipeline, Request]":
    """The pipeline, and the request with the model's own values where none are given."""
    from lydite.pipelines.pipeline import Pipeline

    pipeline = Pipeline.open(options.model, dtype="float32")
    request = Request(steps=options.steps, guidance=options.guidance)
    return pipeline, pipeline.plan(request).request


def draw_with_diffusers(texts: Sequence[str], options: argparse.Namespace) -> Pictures:
    import torch
    from diffusers import StableDiffusion3Pipeline
    from diffusers.utils import logging

    logging.set_verbosity_error()  # it would say for each prompt what the stub of a T5 cannot read
    model: Any = StableDiffusion3Pipeline.from_pretrained(options.model)
    model.set_progress_bar_config(disable=True)
    _, request = open_pipeline(options)
    pictures: list[Any] = []
    for first in track(range(0, len(texts), TOGETHER), "diffusers"):
        group = list(texts[first : first + TOGETHER])
        images = model(
            group,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            max_sequence_length=request.text_length,
            generator=[torch.Generator().manual_seed(first + i) for i in range(len(group))],
            output_type="np",
        ).images
        pictures.extend((images * 255).round().astype(np.uint8))
    return np.stack(pictures)


SIDES: dict[str, Callable[[Sequence[str], argparse.Namespace], Pictures]] = {
    "ours": draw_ours,
    "diffusers": draw_with_diffusers,
}


def measure(pictures: Pictures, prompts: Sequence[Prompt]) -> dict[str, Any]:
    from lydite.evaluate.judge import load_judge

    readings = load_judge(embedded.MODEL / "judge.safetensors").readings(pictures)
    says = [prompt.says for prompt in prompts]
    by_count: dict[int, list[int]] = {}
    for index, scene in enumerate(says):
        by_count.setdefault(len(scene.things), []).append(index)
    return {
        "all": asdict(score(readings, says)),
        **{
            f"{count} objects": asdict(scored(readings, prompts, chosen))
            for count, chosen in sorted(by_count.items())
            if len(chosen) < len(says)
        },
        "wrong": [
            {"prompt": prompt.text, "seed": seed, "missed": missed}
            for seed, (prompt, reading) in enumerate(zip(prompts, readings, strict=True))
            if (missed := [k for k, marks in check(reading, prompt.says).items() if not all(marks)])
        ],
    }


def scored(
    readings: Sequence[Reading], prompts: Sequence[Prompt], chosen: Sequence[int]
) -> PromptAccuracy:
    return score([readings[i] for i in chosen], [prompts[i].says for i in chosen])


def report(name: str, figures: dict[str, Any]) -> None:
    parts = {part: row for part, row in figures.items() if isinstance(row, dict)}
    for part, row in parts.items():
        each = ", ".join(f"{key} {value:.1%}" for key, value in row["attributes"].items())
        title = f"{name}, {part}" if part != "all" else name
        print(f"{title}: {row['prompts']} prompts, everything {row['everything']:.1%} ({each})")
    print(f"{name}: {figures['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
