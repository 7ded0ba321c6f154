"""Bits do not depend on how many threads BLAS would take."""

import os
import subprocess
import sys

DECODE = """
from lydite.calibrate.single_thread import preload_steady
preload_steady()
import hashlib
import mlx.core as mx
import numpy as np
from lydite import embedded
from lydite.pipelines.sd3 import StableDiffusion3
vae = StableDiffusion3.load(embedded.MODEL).networks.get("vae")
image = vae.decode(mx.random.normal((1, 16, 16, 16), key=mx.random.key(0)))
print(hashlib.sha256(np.array(image).tobytes()).hexdigest())
"""


def test_a_large_product_has_the_same_bits_whatever_the_number_of_threads_asked_for() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", DECODE],
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads, "LYDITE_BLAS": "auto"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(found) == 1
