"""Mistakes of published ports of FLUX and Qwen-Image, planted in ours and found by `diff`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lydite.core.request import Request
from lydite.models import layers, modulation, qwen_image, rotary_attention
from lydite.models.text import qwen
from lydite.models.vae import qwen_image as vae
from lydite.pipelines.families import bound_transformer
from lydite.pipelines.families import qwen_image as family
from lydite.pipelines.pipeline import Pipeline
from lydite.sampling.denoiser import cfg
from support import tiny_qwen_image
from support.planted_bugs import Bug, Subject, check_found, recorded

pytest.importorskip("torch")
pytestmark = pytest.mark.parity

REQUEST = Request(
    prompt="a red star", negative="blue fox in the snow", steps=4, width=48, height=64
)
BLOCK, LAYER = "transformer/transformer_blocks.0", "text_encoder/model.language_model.layers.0"


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    root = tmp_path_factory.mktemp("bugs")
    with recorded(tiny_qwen_image.make_pipeline(root / "model"), REQUEST, root) as subject:
        yield subject


def scheduler(**changes: Any) -> Callable[[Pipeline], None]:
    def change(pipeline: Pipeline) -> None:
        keys = {**pipeline.model.scheduler, **changes}
        pipeline.model.scheduler = {key: x for key, x in keys.items() if x is not None}

    return change


def of_family(**changes: Any) -> Callable[[Pipeline], None]:
    def change(pipeline: Pipeline) -> None:
        pipeline.family = replace(pipeline.family, **changes)

    return change


def scale_last(self: modulation.AdaLayerNorm, x: mx.array, table: mx.array) -> mx.array:
    return modulation.norm_modulate(self.norm, x, shift=table[:, 0], scale=table[:, 1])


position_ids = qwen_image.position_ids


def from_the_corner(text_length: int, rows: int, columns: int) -> np.ndarray:
    ids = position_ids(text_length, rows, columns)
    ids[text_length:] -= ids[text_length:].min(axis=0)
    return ids


def up_activated(self: qwen.MLP, x: mx.array) -> mx.array:
    return self.down_proj(layers.silu(self.up_proj(x)) * self.gate_proj(x))


attention = mx.fast.scaled_dot_product_attention


def inverted(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any) -> mx.array:
    ones = mx.ones((q.shape[2], q.shape[2]), mx.bool_)
    return attention(q, k, v, scale=scale, mask=mx.triu(ones))


def unmasked(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any) -> mx.array:
    return attention(q, k, v, scale=scale)


def padded_before(self: layers.Conv2d, x: mx.array) -> mx.array:
    """As a causal convolution pads time, here on the rows."""
    if self.weight.shape[1] == 1:
        return nn.Conv2d.__call__(self, x)
    x = mx.pad(x, [(0, 0), (2, 0), (1, 1), (0, 0)])
    return mx.conv2d(x, self.weight) + self.bias


def channels_last(latents: mx.array) -> mx.array:
    B, height, width, C = latents.shape
    x = latents.reshape(B, height // 2, 2, width // 2, 2, C).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(B, height * width // 4, 4 * C)


def turned_back(x: mx.array, table: rotary_attention.Rotation) -> mx.array:
    return rotary_attention._rotate(x, table.cos, -table.sin)


BUGS = {
    "mu fixed": Bug("pipeline/sigmas", "flow-shift", change=of_family(mu=lambda *_: 1.15)),
    "mu by the points of FLUX": Bug(
        "pipeline/sigmas",
        "flow-shift",
        change=scheduler(max_shift=1.15, max_image_seq_len=4096),
    ),
    "linear shift": Bug(
        "pipeline/sigmas", "flow-shift", change=scheduler(time_shift_type="linear")
    ),
    "no terminal stretch": Bug(
        "pipeline/sigmas", "terminal-stretch", change=scheduler(shift_terminal=None)
    ),
    "scale and shift of norm_out exchanged": Bug(
        "transformer/norm_out",
        "scale-shift-exchanged",
        patch.object(modulation.AdaLayerNorm, "__call__", scale_last),
    ),
    "positions not centred": Bug(
        f"{BLOCK}.attn.to_out.0",
        "rotation-in-attention",
        patch.object(qwen_image, "position_ids", from_the_corner),
    ),
    "rotation in the other direction": Bug(
        f"{BLOCK}.attn.to_out.0",
        "rotation-in-attention",
        patch.object(rotary_attention, "rotate", turned_back),
    ),
    "template cut one token early": Bug(
        "pipeline/prompt_embeds",
        "not-cropped",
        patch.object(family, "QWEN_IMAGE", replace(family.QWEN_IMAGE, dropped=33)),
    ),
    "template cut one token late": Bug(
        "pipeline/prompt_embeds",
        "cropped",
        patch.object(family, "QWEN_IMAGE", replace(family.QWEN_IMAGE, dropped=35)),
    ),
    "activation on the wrong half": Bug(
        f"{LAYER}.mlp.down_proj",
        "gate-exchanged",
        patch.object(qwen.MLP, "__call__", up_activated),
    ),
    "mask inverted": Bug(
        f"{LAYER}.self_attn.o_proj",
        "attention-mask",
        patch.object(mx.fast, "scaled_dot_product_attention", inverted),
    ),
    "mask missing": Bug(
        f"{LAYER}.self_attn.o_proj",
        "attention-mask",
        patch.object(mx.fast, "scaled_dot_product_attention", unmasked),
    ),
    "causal padding": Bug(
        "vae/decoder.conv_in",
        "shifted-pixels",
        patch.object(layers.Conv2d, "__call__", padded_before),
    ),
    "latents not denormalized": Bug(
        "vae/decode",
        "affine-per-channel",
        patch.object(vae.AutoencoderKLQwenImage, "denormalize", lambda self, latents: latents),
    ),
    "patches with channels last": Bug(
        "transformer", "patch-order", patch.object(bound_transformer, "pack_latents", channels_last)
    ),
    "guidance without norms": Bug(
        "pipeline/velocity", "other-guidance", change=of_family(guide=cfg)
    ),
}


def test_the_port_itself_agrees(subject: Subject, tmp_path: Path) -> None:
    verdict = subject.verdict(Bug("", None), tmp_path / "port")
    assert verdict.verdict == "agree", verdict.sentence


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_found(subject: Subject, tmp_path: Path, name: str) -> None:
    check_found(subject, BUGS[name], tmp_path / "port")
