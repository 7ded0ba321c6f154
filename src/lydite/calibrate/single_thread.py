"""The same bits whatever the number of cores and workers: BLAS on one thread.

OpenBLAS cuts large products into pieces by the number of its threads, and the last bits follow. On
two threads the VAE of the embedded model gives other values than on one: two pictures of sixteen
came out with another pixel. More cores are put to use by `--workers`, one each.
"""

import os

from lydite.core.blas import preload

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def preload_steady() -> None:
    """Load BLAS to run on one thread; only works before mlx.core is imported."""
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    preload()
