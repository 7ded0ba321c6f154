"""Whole pictures of a family against diffusers' own pipeline, and every verb on its folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from click.testing import CliRunner, Result

from lydite.cli.main import lydite
from lydite.core.request import Request
from lydite.pipelines.pipeline import Pipeline
from lydite.reference.jobs import Job
from lydite.reference.recording import record


def load_reference(name: str, folder: Path, **options: Any) -> Any:
    """The pipeline class `name` of diffusers, silent."""
    import diffusers

    pipeline = getattr(diffusers, name).from_pretrained(folder, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_reference(pipeline: Any, request: Request, seed: int, **options: Any) -> np.ndarray:
    """(H, W, 3) floats in 0…1; the guidance is among the options."""
    import torch

    if request.text_length is not None:
        options["max_sequence_length"] = request.text_length
    return pipeline(
        prompt=request.prompt,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(seed),
        width=request.width,
        height=request.height,
        output_type="np",
        **options,
    ).images[0]


def guidance(request: Request) -> dict[str, Any]:
    """Classifier-free guidance in the options of most pipelines."""
    return {"guidance_scale": request.guidance, "negative_prompt": request.negative}


def draw_port(pipeline: Pipeline, request: Request, seed: int, **options: Any) -> np.ndarray:
    """(H, W, 3) bytes."""
    return next(pipeline.generate(request, [seed], **options)).pixels


def off_by(pixels: np.ndarray, image: np.ndarray) -> int:
    """The largest difference in levels; the reference has to be a picture, not a flat field."""
    assert image.std() > 0.02
    return int(np.abs(pixels.astype(int) - (image * 255).round().astype(int)).max())


def run(*arguments: object) -> Result:
    """`lydite ARGUMENTS`, in this process, where torch is loaded already: so is the reference."""
    with patch("lydite.reference.jobs.run_job", _run_job):
        result = CliRunner().invoke(lydite, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def _run_job(job: Job, on_step: Callable[[], None] = lambda: None) -> None:
    for output in job.outputs:
        record(job, output, on_step)


def parity(folder: Path, *arguments: object) -> dict[str, Any]:
    """The verdict of `lydite parity`."""
    return json.loads(run("parity", folder, *arguments, "--json", "-q").output)


def calibrate(folder: Path, tmp_path: Path, *options: object) -> dict[str, int]:
    """A small calibration set, its activations and its blocks; returns the items of the blocks."""
    (tmp_path / "prompts.txt").write_text("a red star\nthe fox of snow in a blue ring\n")
    inputs = ("--prompts", tmp_path / "prompts.txt", "--steps", 2, "--conditioning")
    out = ("--out", tmp_path / "set", "-q")
    assert run("calibrate", "run", "-m", folder, *inputs, *options, *out).exit_code == 0
    assert run("calibrate", "verify", tmp_path / "set").exit_code == 0
    out = ("--out", tmp_path / "statistics.sqlite", "-q")
    assert run("calibrate", "activations", tmp_path / "set", *out).exit_code == 0
    out = ("--out", tmp_path / "blocks", "--tokens", 4, "-q")
    assert run("calibrate", "blocks", tmp_path / "set", *out).exit_code == 0
    return json.loads(run("calibrate", "status", tmp_path / "blocks", "--json").output)["items"]
