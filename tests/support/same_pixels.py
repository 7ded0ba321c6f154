"""Pictures of one run drawn twice: compiled, and not compiled because it is recorded."""

import numpy as np

from lydite.models.layers import on_cpu
from lydite.pipelines.picture import Pixels


def assert_same(picture: Pixels, recorded: Pixels, *, most: int = 1) -> None:
    """Equal on a CPU, where nothing is compiled; on a GPU last bits differ, by `most` levels."""
    if on_cpu():
        assert np.array_equal(picture, recorded)
    else:
        assert np.abs(picture.astype(int) - recorded).max() <= most
