"""What is said of the operation between the value that a port uses and the reference's."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lydite.diff.findings.evidence import Recorded
from lydite.diff.findings.replay.between import exchanged_layers, missing_operation
from lydite.diff.findings.replay.variants import Source
from support.findings import Array, evidence

torch.manual_seed(1)
X, Y = torch.randn(2, 12, 16) + 0.3, torch.randn(2, 12, 16)
GAIN = torch.randn(16)
NORMED = F.layer_norm(X, (16,)) * GAIN


def said(used: torch.Tensor, wanted: torch.Tensor, named: Mapping[str, torch.Tensor] = {}) -> str:
    values = [Recorded(name, value.numpy()) for name, value in named.items()]
    e = replace(evidence(wanted.numpy(), used.numpy()), before=lambda: values)
    return missing_operation(e, used.numpy(), wanted.numpy())


@pytest.mark.parametrize(
    ("wanted", "words", "reverse"),
    [
        (F.layer_norm(X, (16,)) * GAIN + 1, "layer norm lies between", "the normed value"),
        (F.silu(X), "silu lies between", "after the activation silu"),
        (X + Y, "net/y is not added", "already added net/y"),
        (X + 0.3 * GAIN * Y, "differ by net/y times a gate", "differ by net/y"),
        (F.silu(NORMED), "silu of a layer norm", "silu of a layer norm"),
        (2 * X - 1, "2 · x -1", "0.5 · x +0.5"),
    ],
)
def test_the_operation_between_two_values_is_told(
    wanted: torch.Tensor, words: str, reverse: str
) -> None:
    named = {"net/y": Y, "net/normed": NORMED}
    assert words in said(X, wanted, named) and reverse in said(wanted, X, named)


def test_a_gate_is_told_from_few_tokens() -> None:
    x, y = X[:, :5], Y[:, :5]
    assert "differ by net/y times a gate" in said(x, x + 0.3 * GAIN * y, {"net/y": y})
    assert said(x, X[:, 5:10], {"net/y": y}) == ""


def test_of_unrelated_values_nothing_is_told() -> None:
    assert said(X, Y, {"net/x": X}) == said(X, Y[:, :6]) == ""
    assert said(X, X * Y, {"net/x": X, "net/y": Y}) == ""


def test_layers_of_one_size_that_may_be_exchanged() -> None:
    weight = np.eye(16)
    base = evidence(X.numpy(), Y.numpy())
    values = [Recorded("net/other [in.0]", Y.numpy()), Recorded("net/x [in.0]", X.numpy())]
    used: Array = Y.numpy()
    e = replace(
        base,
        parameters=lambda: {"weight": weight},
        parameters_like=lambda shape: [("net/other.weight", weight)] if shape == (16, 16) else [],
        before=lambda: values,
    )
    assert "net/other takes" in exchanged_layers(e, Source("y", used, lambda: None))
    assert not exchanged_layers(e, Source("x", X.numpy(), lambda: None))
    assert not exchanged_layers(replace(e, parameters=dict), Source("y", used, lambda: None))


def test_a_group_norm_of_one_picture_needs_a_weight_of_the_model() -> None:
    picture = torch.randn(1, 16, 6, 6)
    weight, bias = 1 + torch.rand(16), torch.randn(16)
    normed = F.group_norm(picture, 4, weight, bias)
    e = replace(
        evidence(normed.numpy(), picture.numpy()),
        parameters_like=lambda shape: [("net/norm.weight", weight.numpy())],
    )
    assert "group norm" in missing_operation(e, picture.numpy(), normed.numpy())
    other = picture * (1 + torch.rand(16, 1, 1))  # a scale per channel alone
    assert not missing_operation(e, picture.numpy(), other.numpy())
