"""Convolutions over time: padding in front, and the frames of earlier calls."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lydite.diff.findings.evidence import Recorded
from lydite.diff.findings.replay.convolution_form import unpadded
from lydite.diff.findings.replay.convolutions import other_convolution
from lydite.diff.findings.replay.layer_input import wrong_input
from support.findings import evidence

torch.manual_seed(3)
X, BEFORE, OLDER = (
    torch.randn(1, 4, 3, 5, 6),
    torch.randn(1, 4, 2, 5, 6),
    torch.randn(1, 4, 2, 5, 6),
)
KERNEL, BIAS = torch.randn(6, 4, 3, 3, 3), torch.randn(6)


def convolved(
    frames: torch.Tensor, kernel: torch.Tensor = KERNEL, space: str = "constant"
) -> torch.Tensor:
    return F.conv3d(F.pad(frames, (1, 1, 1, 1, 0, 0), space), kernel, BIAS)


def joined(*frames: torch.Tensor) -> torch.Tensor:
    return torch.cat(frames, 2)


ZEROS, FIRST = torch.zeros_like(BEFORE), X[:, :, :1]
CAUSAL = convolved(joined(ZEROS, X))
CACHED = convolved(joined(BEFORE, X))


def found(right: torch.Tensor, wrong: torch.Tensor, given: torch.Tensor = X) -> tuple[str, str]:
    values = [
        Recorded("other [in.0]", OLDER.numpy()), Recorded("m [in.0]", given.numpy()),
        Recorded("m [in.1]", BEFORE.numpy()),
    ]  # fmt: skip
    known = {"weight": KERNEL.double().numpy(), "bias": BIAS.double().numpy()}
    e = replace(
        evidence(right.numpy(), wrong.numpy()), before=lambda: values, parameters=lambda: known
    )
    finding = other_convolution(e) or wrong_input(e)
    return (finding.cause, finding.evidence) if finding is not None else ("", "")


@pytest.mark.parametrize(
    ("right", "wrong", "cause", "words"),
    [
        (CAUSAL, convolved(joined(FIRST, FIRST, X)), "other-cache", "2 frames of padding in front"),
        (CAUSAL, convolved(joined(ZEROS[:, :, :1], X, ZEROS[:, :, :1])), "other-cache", "behind"),
        (CAUSAL, convolved(joined(ZEROS, X), KERNEL.flip(2)), "kernel-flipped", "in time"),
        (CAUSAL, convolved(joined(OLDER, X)), "other-cache", "the last frames of other"),
        (CAUSAL, convolved(joined(ZEROS, X), space="replicate"), "other-padding", "border"),
        (CACHED, CAUSAL, "other-cache", "the cache is not used"),
        (CACHED, convolved(joined(BEFORE.flip(2), X)), "other-cache", "reverse order"),
        (
            CACHED,
            convolved(joined(ZEROS[:, :, :1], BEFORE[:, :, 1:], X)),
            "other-cache",
            "only the last 1",
        ),
    ],
)
def test_what_is_put_before_the_first_frame(
    right: torch.Tensor, wrong: torch.Tensor, cause: str, words: str
) -> None:
    found_cause, text = found(right, wrong)
    assert found_cause == cause and words in text


def test_padding_before_the_layer_is_found_in_its_input() -> None:
    wide = F.pad(X, (1, 1, 1, 1, 2, 0), "replicate")
    core, form = unpadded(wide.numpy())
    assert np.array_equal(wide.numpy()[core], X.numpy())
    assert form.before == (2, 1, 1) and form.mode == ("edge",) * 3
    right = F.conv3d(wide, KERNEL, BIAS)
    zeros = F.conv3d(F.pad(X, (1, 1, 1, 1, 0, 0)).repeat_interleave(
        torch.tensor([3, 1, 1]), 2), KERNEL, BIAS)  # fmt: skip
    assert found(right, zeros, wide)[0] == "other-padding"
    core, form = unpadded(X.numpy())
    assert np.array_equal(X.numpy()[core], X.numpy()) and form.before == (0, 0, 0)


def test_frames_of_nowhere_name_nothing() -> None:
    assert found(CAUSAL, convolved(joined(torch.randn_like(BEFORE), X))) == ("", "")
