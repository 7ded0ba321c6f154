"""T5's relative positions: which entry of the bias table a pair of tokens gets.

Reference: huggingface/transformers 5.22.2, T5Attention._relative_position_bucket, bidirectional.
"""

import math

import numpy as np
from numpy.typing import NDArray


def relative_position_buckets(
    length: int, *, num_buckets: int, max_distance: int
) -> NDArray[np.int32]:
    """Bucket of each key position relative to each query position: (S, S).

    Half of them are for keys ahead of the query. In either half near distances have a bucket each
    and far ones share. A distance on a border (16, 32, 64 of 128) goes to the farther bucket; the
    1e-9 keeps rounding out of that.
    """
    half = num_buckets // 2
    exact = half // 2
    relative = np.arange(length)[None, :] - np.arange(length)[:, None]  # key minus query
    distance = np.abs(relative)
    share = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    far = exact + (share * (half - exact) + 1e-9).astype(np.int64)
    bucket = np.where(distance < exact, distance, np.minimum(far, half - 1))
    return (bucket + half * (relative > 0)).astype(np.int32)
