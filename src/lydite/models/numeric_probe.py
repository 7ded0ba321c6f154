"""How exactly the device multiplies: one product and one convolution against float64 on the CPU.

The convolution has the shape of a real VAE's, wide enough for the shortcuts of Metal. What is
expected of each dtype is its own rounding of inputs and outputs, with sums in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.core.device import TF32, WINOGRAD

Floats = NDArray[np.float32]
Compute = Callable[[Floats, Floats, str], Floats]  # two inputs and a dtype -> the result in float32
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
# The largest relative error of a direct computation; measured ones are about half of it.
LIMITS = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}
# Metal takes Winograd's method from 256 channels of input and output together and 4096 positions.
WIDTH, SIDE = 128, 64


@dataclass(frozen=True)
class Reading:
    """The error of one operation in one dtype, relative to the size of the result."""

    operation: str  # matmul or conv
    dtype: str
    error: float
    limit: float

    @property
    def is_exact(self) -> bool:
        return self.error <= self.limit

    @property
    def advice(self) -> str:
        """What probably causes an error above the limit, and what to do."""
        if self.operation == "conv" and (self.dtype != "float32" or self.error < 5e-5):
            return f"This is the error of Winograd's method. Set {WINOGRAD}=0 before MLX starts."
        if self.dtype == "float32":
            return f"This is the error of TF32. Set {TF32}=0 before MLX's first product."
        return "No shortcut of MLX is known to do this; please report it."


def mlx_matmul(a: Floats, b: Floats, dtype: str) -> Floats:
    """a·b on the default device."""
    kind = DTYPES[dtype]
    return np.array((mx.array(a).astype(kind) @ mx.array(b).astype(kind)).astype(mx.float32))


def mlx_conv(x: Floats, weight: Floats, dtype: str) -> Floats:
    """A 3 × 3 convolution, (H, W, C) and (O, 3, 3, C), on the default device."""
    kind = DTYPES[dtype]
    inputs, weights = mx.array(x)[None].astype(kind), mx.array(weight).astype(kind)
    return np.array(mx.conv2d(inputs, weights, padding=1)[0].astype(mx.float32))


def probe(
    matmul: Compute = mlx_matmul, conv: Compute = mlx_conv, dtypes: tuple[str, ...] = tuple(DTYPES)
) -> list[Reading]:
    """A reading for each operation and dtype."""
    generator = np.random.Generator(np.random.PCG64(0))

    def normal(*shape: int) -> Floats:
        return generator.standard_normal(shape, dtype=np.float32)

    a, b = normal(512, 1024), normal(1024, 512)
    image, weight = normal(SIDE, SIDE, WIDTH), normal(WIDTH, 3, 3, WIDTH) / np.float32(34)
    readings: list[Reading] = []
    for dtype in dtypes:
        for name, compute, exact, left, right in (
            ("matmul", matmul, _exact_matmul, a, b),
            ("conv", conv, _exact_conv, image, weight),
        ):
            x, y = _rounded(left, dtype), _rounded(right, dtype)
            truth = exact(x, y)
            error = np.linalg.norm(compute(x, y, dtype) - truth) / np.linalg.norm(truth)
            readings.append(Reading(name, dtype, float(error), LIMITS[dtype]))
    return readings


def _rounded(array: Floats, dtype: str) -> Floats:
    """The values as the dtype holds them: rounding of the inputs is not an error of the device."""
    with mx.stream(mx.cpu):
        return np.array(mx.array(array).astype(DTYPES[dtype]).astype(mx.float32))


def _exact_matmul(a: Floats, b: Floats) -> NDArray[np.float64]:
    return a.astype(np.float64) @ b.astype(np.float64)


def _exact_conv(x: Floats, weight: Floats) -> NDArray[np.float64]:
    """Nine shifted products."""
    padded = np.pad(x.astype(np.float64), ((1, 1), (1, 1), (0, 0)))
    height, width = x.shape[:2]
    taps = weight.astype(np.float64).transpose(1, 2, 3, 0)  # (3, 3, C, O)
    return np.sum(
        [
            padded[row : row + height, column : column + width] @ taps[row, column]
            for row in range(3)
            for column in range(3)
        ],
        axis=0,
    )
