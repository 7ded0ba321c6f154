"""How far two arrays are apart."""

import numpy as np
from numpy.typing import ArrayLike


def relative_l2(ours: ArrayLike, theirs: ArrayLike) -> float:
    """‖ours − theirs‖ / ‖theirs‖, in float64."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert a.shape == b.shape, f"{a.shape} against {b.shape}"
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
