"""Mistakes of published ports of Stable Diffusion 1.x and XL, planted in ours, found by `diff`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.device import GPU_BRANCHES
from lydite.core.request import Request
from lydite.core.tensorfile import save
from lydite.models import layers, unet
from lydite.pipelines.pipeline import Pipeline
from seeded_bugs import cases
from seeded_bugs.causes import judged
from seeded_bugs.scoring import SameArrays, score
from seeded_bugs.tiny_model import MODELS
from support import tiny_sd
from support.planted_bugs import Bug, Subject, check_found, recorded
from support.tiny_sd3 import read_tensors

pytest.importorskip("torch")
pytestmark = pytest.mark.parity
NOT_NAMED = ("upsampling-interpolated",)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    root = tmp_path_factory.mktemp("bugs")
    sdxl = MODELS["sdxl"]
    with recorded(sdxl.make(root / "model"), sdxl.request, root) as subject:
        yield subject


def test_the_port_itself_agrees(subject: Subject, tmp_path: Path) -> None:
    verdict = subject.verdict(Bug("", None), tmp_path / "port")
    assert verdict.verdict == "agree", verdict.sentence


@pytest.mark.parametrize("bug", cases.bugs("sdxl"), ids=lambda bug: bug.id)
def test_the_bug_is_found(subject: Subject, tmp_path: Path, bug: cases.Bug) -> None:
    pipeline = Pipeline.open(subject.model)
    with bug.apply(pipeline):
        subject.record(pipeline, tmp_path / "port")
    verdict = subject.compare(tmp_path / "port")
    found = score("lydite", "float32", bug, verdict, SameArrays(subject.reference.folder))
    assert found.exact, verdict.sentence
    results = ("named", "none") if bug.id in NOT_NAMED else ("named",)
    assert judged(bug.cause, found.causes) in results, verdict.sentence


# Weights whose products and sums exceed the range of float16, while every value stays in it.
STRESS = {
    "q·k": ("attn1.to_q.weight", "attn1.to_k.weight"),
    "sums of group norm": ("conv_in.weight", "conv_in.bias"),
}
LARGE = 300.0
REQUEST = Request(prompt="a red star", negative="blue fox", steps=1, width=32, height=40)


@pytest.fixture(scope="module", params=STRESS)
def stressed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("stress")
    model = tiny_sd.make_pipeline(root / "model", "sdxl")
    (file,) = (model / "unet").glob("*.safetensors")
    tensors = {
        name: array * np.float32(LARGE) if name.endswith(STRESS[request.param]) else array
        for name, array in read_tensors(model / "unet").items()
    }
    save(file, tensors)
    with recorded(model, REQUEST, root, dtype="float16") as subject:
        yield request.param, subject


def narrow_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None
) -> mx.array:
    return mx.softmax((q @ k.swapaxes(-1, -2)) * scale, axis=-1) @ v


def narrow_group_norm(self: layers.GroupNorm, x: mx.array) -> mx.array:
    B, H, W, C = x.shape
    groups = x.reshape(B, H * W, self.num_groups, -1)
    mean = groups.mean(axis=(1, 3), keepdims=True)
    variance = ((groups - mean) * (groups - mean)).mean(axis=(1, 3), keepdims=True)
    normed = (groups - mean) * mx.rsqrt(variance + self.eps)
    return normed.reshape(B, H, W, C) * self.weight + self.bias


NARROW = {
    "q·k": Bug(
        "unet/down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0",
        "not-finite",
        patch.object(unet, "attention", narrow_attention),
    ),
    "sums of group norm": Bug(
        "unet/down_blocks.0.resnets.0.norm1",
        "repeated",  # all 0: divided by the root of an infinite variance
        patch.object(layers.GroupNorm, "__call__", narrow_group_norm),
    ),
}


def test_an_overflow_of_float16_is_found(stressed: tuple[str, Subject], tmp_path: Path) -> None:
    name, subject = stressed
    check_found(subject, NARROW[name], tmp_path / "port")


def test_large_values_stay_finite_in_float16(stressed: tuple[str, Subject]) -> None:
    """What is narrow in the bugs above is wide in ours."""
    name, subject = stressed
    if name == "q·k" and os.environ.get(GPU_BRANCHES):
        pytest.skip("MLX has a kernel that sums in float32 on GPUs; on a CPU it sums in float16")
    pictures = [
        next(Pipeline.open(subject.model, dtype=dtype).generate(subject.request, [1])).pixels
        for dtype in ("float32", "float16")
    ]
    apart = np.abs(pictures[0].astype(int) - pictures[1])
    assert pictures[0].std() > 5 and apart.mean() < 3
