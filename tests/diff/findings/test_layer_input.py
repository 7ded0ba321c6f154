"""A layer whose output alone the port records: the wrong operation before it is named."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lydite.diff.findings import find
from lydite.diff.findings.evidence import Recorded
from support.findings import evidence

torch.manual_seed(0)
X, Y = torch.randn(2, 12, 16) + 0.3, torch.randn(2, 12, 16)
WIDE = torch.randn(2, 12, 32)
PICTURE, SMALL = torch.randn(2, 8, 10, 10), torch.randn(2, 8, 5, 5)
WEIGHT, BIAS = torch.randn(24, 16), torch.randn(24)
KERNEL, OFFSET = torch.randn(8, 8, 3, 3), torch.randn(8)
Q, K, V = (torch.randn(2, 12, 16) for _ in range(3))


def linear(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, WEIGHT, BIAS)


def convolution(x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, KERNEL, OFFSET, padding=1)


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (16,)) * (1 + Y[:, :1]) + Y[:, 1:2]


def attention(scale: float | None = None) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (Q, K, V))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def enlarged(mode: str) -> torch.Tensor:
    return F.interpolate(SMALL, scale_factor=2, mode=mode)


QKV = {"net/attn.to_q": Q, "net/attn.to_k": K, "net/attn.to_v": V}
Layer = Callable[[torch.Tensor], torch.Tensor]


def causes(
    layer: Layer, right: torch.Tensor, wrong: torch.Tensor, named: dict[str, torch.Tensor]
) -> list[str]:
    """What is found at the output of a layer whose input only the reference recorded."""
    parameters = (WEIGHT, BIAS) if layer is linear else (KERNEL, OFFSET)
    parameters = () if layer is norm else parameters
    values = [Recorded("net/attn.m [in.0]", right.numpy())]
    values += [Recorded(name, value.numpy()) for name, value in named.items()]
    base = evidence(layer(right).numpy(), layer(wrong).numpy())
    known = dict(zip(("weight", "bias"), (p.double().numpy() for p in parameters), strict=False))
    changed = {"name": "net/attn.m", "before": lambda: values, "parameters": lambda: known}
    return [finding.cause for finding in find(type(base)(**{**vars(base), **changed}))]


@pytest.mark.parametrize(
    ("layer", "right", "wrong", "named", "cause"),
    [
        (linear, F.silu(X), F.gelu(X), {"net/x": X}, "other-activation"),
        (linear, F.silu(X), F.silu(Y), {"net/x": X, "net/y": Y}, "another-input"),
        (linear, attention(), attention(1.0), QKV, "attention-scale"),
        (linear, X, X.flip(0), {}, "input-rearranged"),
        (linear, X, X.roll(1, 1), {}, "input-rearranged"),
        (linear, X / 0.36 + 0.11, (X + 0.11) / 0.36, {"net/x": X}, "input-scaled"),
        (linear, X + Y, X, {"net/x": X, "net/y": Y}, "another-input"),
        (linear, X + Y, X - Y, {"net/x": X, "net/y": Y}, "other-sum"),
        (
            linear,
            F.silu(WIDE[..., :16]) * WIDE[..., 16:],
            F.silu(WIDE[..., 16:]) * WIDE[..., :16],
            {"net/wide": WIDE},
            "gate-exchanged",
        ),
        (
            linear,
            torch.cat((X[..., :8], Y[..., :8]), -1),
            torch.cat((Y[..., :8], X[..., :8]), -1),
            {"net/x": X[..., :8], "net/y": Y[..., :8]},
            "parts-reordered",
        ),
        (convolution, enlarged("nearest"), enlarged("bilinear"), {"net/x": SMALL}, "other-resize"),
        (convolution, F.silu(PICTURE), PICTURE, {"net/x": PICTURE}, "other-activation"),
        (norm, X + Y, X, {"net/x": X, "net/y": Y}, "another-input"),
    ],
)
def test_the_operation_before_the_layer_is_named(
    layer: Layer,
    right: torch.Tensor,
    wrong: torch.Tensor,
    named: dict[str, torch.Tensor],
    cause: str,
) -> None:
    assert causes(layer, right, wrong, named)[:1] == [cause]


@pytest.mark.parametrize("layer", [linear, norm])
def test_an_input_that_follows_from_nothing_recorded_names_nothing(layer: Layer) -> None:
    draw = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 12, 16))).float()
    assert not causes(layer, X, X * draw, {"net/x": X, "net/y": Y})
