"""Pictures of one run drawn twice: with products joined or compiled, and not, as it is recorded."""

import numpy as np

from lydite.models.layers import on_cpu
from lydite.pipelines.picture import Pixels


def assert_same(picture: Pixels, recorded: Pixels, *, most: int = 1) -> None:
    """Last bits differ with the shapes of products: by one level on a CPU, `most` on a GPU."""
    assert np.abs(picture.astype(int) - recorded).max() <= (1 if on_cpu() else most)
