"""A convolution computed again is that of its definition, in any form."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from lydite.diff.findings.replay.convolution_form import Form

PADDING = {"zeros": "constant", "reflect": "reflect", "wrap": "wrap", "edge": "edge"}


@pytest.mark.parametrize("mode", PADDING)
@pytest.mark.parametrize(
    ("sizes", "kernel"), [((9,), (3,)), ((6, 11), (3, 3)), ((7, 10), (1, 2)), ((5, 6, 7), (3,) * 3)]
)
@pytest.mark.parametrize(("stride", "before", "dilation", "groups"), [
    (1, 1, 1, 1), (2, 0, 1, 2), (1, 2, 2, 1), (3, 1, 1, 2),
])  # fmt: skip
def test_a_convolution_of_any_form(
    mode: str, sizes: tuple[int, ...], kernel: tuple[int, ...],
    stride: int, before: int, dilation: int, groups: int,
) -> None:  # fmt: skip
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 4, *sizes))
    weight, bias = draw.standard_normal((6, 4 // groups, *kernel)), draw.standard_normal(6)
    after = before + dilation * max(kernel)
    wide = np.pad(x, [(0, 0), (0, 0), *[(before, after)] * len(sizes)], cast(Any, PADDING[mode]))
    pixels = np.argwhere(np.ones([max(1, size // stride - 1) for size in sizes], bool))
    form = Form(weight, bias, stride, before, mode, dilation)
    found = form.at(x, pixels)
    for number, pixel in enumerate(pixels):
        window = wide[(..., *(slice(stride * at, stride * at + dilation * taps, dilation)
                              for at, taps in zip(pixel, kernel, strict=True)))]  # fmt: skip
        parts = [
            np.tensordot(window[:, group], part, (range(1, window.ndim), range(1, part.ndim)))
            for group, part in zip(
                np.split(np.arange(4), groups), np.split(weight, groups), strict=True
            )
        ]
        assert np.allclose(found[:, :, number], np.concatenate(parts, axis=1) + bias)
    assert np.allclose(replace(form, bias=None).at(x, pixels), found - bias[:, None])
