"""Inception-v3 of the Fréchet Inception Distance: the TensorFlow graph of 2015-12-05.

Reference: torch-fidelity 0.4.0, feature_extractor_inceptionv3.py ("inception-v3-compat"), with the
names and the weights of pytorch-fid. The pools differ from torchvision's network: averages leave
the padding out, and the last block takes maxima.
"""

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from lydite.models.layers import max_pool

SIZE = 299  # height and width of the input
SPATIAL_CHANNELS = 7
EPS = 1e-3  # of every batch norm
CLASSES = 1008

Kernel = int | tuple[int, int]


class InceptionOutput(NamedTuple):
    """What metrics take. B pictures."""

    pool: mx.array  # (B, 2048), TensorFlow's `pool_3`: FID, KID, precision and recall
    spatial: mx.array  # (B, 17, 17, 7), the first channels of TensorFlow's `mixed_6/conv`: sFID
    logits: mx.array  # (B, 1008), without the bias of the last layer: Inception score


class BatchNorm(nn.Module):
    """Batch norm with stored statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = mx.ones((width,))
        self.bias = mx.zeros((width,))
        self.running_mean = mx.zeros((width,))
        self.running_var = mx.ones((width,))

    def __call__(self, x: mx.array) -> mx.array:
        scale = self.weight / mx.sqrt(self.running_var + EPS)
        return x * scale + (self.bias - self.running_mean * scale)


class BasicConv2d(nn.Module):
    """A convolution without bias, batch norm, ReLU. Of stride 1 it keeps the size."""

    def __init__(
        self, width_in: int, width: int, kernel: Kernel, *, stride: int = 1, same: bool = True
    ) -> None:
        super().__init__()
        height, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, columns // 2) if same and stride == 1 else 0
        self.conv = nn.Conv2d(
            width_in, width, (height, columns), stride=stride, padding=padding, bias=False
        )
        self.bn = BatchNorm(width)

    def __call__(self, x: mx.array) -> mx.array:
        weight = self.conv.weight
        # MLX's convolution on a CPU copies its input, also for a kernel of one pixel.
        x = x @ weight[:, 0, 0].T if weight.shape[1:3] == (1, 1) else self.conv(x)
        return nn.relu(self.bn(x))


class InceptionA(nn.Module):
    def __init__(self, width: int, pool_features: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(width, 64, 1)
        self.branch5x5_1 = BasicConv2d(width, 48, 1)
        self.branch5x5_2 = BasicConv2d(48, 64, 5)
        self.branch3x3dbl_1 = BasicConv2d(width, 64, 1)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, 3)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, 3)
        self.branch_pool = BasicConv2d(width, pool_features, 1)

    def __call__(self, x: mx.array) -> mx.array:
        branches = [
            self.branch1x1(x),
            self.branch5x5_2(self.branch5x5_1(x)),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
            self.branch_pool(average_pool(x)),
        ]
        return mx.concatenate(branches, axis=-1)


class InceptionB(nn.Module):
    """From 35 to 17 rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch3x3 = BasicConv2d(width, 384, 3, stride=2)
        self.branch3x3dbl_1 = BasicConv2d(width, 64, 1)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, 3)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, 3, stride=2)

    def __call__(self, x: mx.array) -> mx.array:
        branches = [
            self.branch3x3(x),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
            max_pool(x, 3, stride=2),
        ]
        return mx.concatenate(branches, axis=-1)


class InceptionC(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(width, 192, 1)
        self.branch7x7_1 = BasicConv2d(width, inner, 1)
        self.branch7x7_2 = BasicConv2d(inner, inner, (1, 7))
        self.branch7x7_3 = BasicConv2d(inner, 192, (7, 1))
        self.branch7x7dbl_1 = BasicConv2d(width, inner, 1)
        self.branch7x7dbl_2 = BasicConv2d(inner, inner, (7, 1))
        self.branch7x7dbl_3 = BasicConv2d(inner, inner, (1, 7))
        self.branch7x7dbl_4 = BasicConv2d(inner, inner, (7, 1))
        self.branch7x7dbl_5 = BasicConv2d(inner, 192, (1, 7))
        self.branch_pool = BasicConv2d(width, 192, 1)

    def __call__(self, x: mx.array) -> mx.array:
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        branches = [
            self.branch1x1(x),
            self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x))),
            self.branch7x7dbl_5(self.branch7x7dbl_4(double)),
            self.branch_pool(average_pool(x)),
        ]
        return mx.concatenate(branches, axis=-1)


class InceptionD(nn.Module):
    """From 17 to 8 rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch3x3_1 = BasicConv2d(width, 192, 1)
        self.branch3x3_2 = BasicConv2d(192, 320, 3, stride=2)
        self.branch7x7x3_1 = BasicConv2d(width, 192, 1)
        self.branch7x7x3_2 = BasicConv2d(192, 192, (1, 7))
        self.branch7x7x3_3 = BasicConv2d(192, 192, (7, 1))
        self.branch7x7x3_4 = BasicConv2d(192, 192, 3, stride=2)

    def __call__(self, x: mx.array) -> mx.array:
        seven = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        branches = [
            self.branch3x3_2(self.branch3x3_1(x)),
            self.branch7x7x3_4(seven),
            max_pool(x, 3, stride=2),
        ]
        return mx.concatenate(branches, axis=-1)


class InceptionE(nn.Module):
    """The pool is an average in the first of the two blocks, a maximum in the second."""

    def __init__(self, width: int, *, maximum: bool) -> None:
        super().__init__()
        self.maximum = maximum
        self.branch1x1 = BasicConv2d(width, 320, 1)
        self.branch3x3_1 = BasicConv2d(width, 384, 1)
        self.branch3x3_2a = BasicConv2d(384, 384, (1, 3))
        self.branch3x3_2b = BasicConv2d(384, 384, (3, 1))
        self.branch3x3dbl_1 = BasicConv2d(width, 448, 1)
        self.branch3x3dbl_2 = BasicConv2d(448, 384, 3)
        self.branch3x3dbl_3a = BasicConv2d(384, 384, (1, 3))
        self.branch3x3dbl_3b = BasicConv2d(384, 384, (3, 1))
        self.branch_pool = BasicConv2d(width, 192, 1)

    def __call__(self, x: mx.array) -> mx.array:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        # Zeros as padding: what comes out of a ReLU is never below them.
        pooled = max_pool(_padded(x), 3, stride=1) if self.maximum else average_pool(x)
        branches = [
            self.branch1x1(x),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        ]
        return mx.concatenate(branches, axis=-1)


class InceptionV3(nn.Module):
    """Pictures (B, 299, 299, 3) in -1 to 1, as `(pixels - 128) / 128`."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = BasicConv2d(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = BasicConv2d(32, 32, 3, same=False)
        self.Conv2d_2b_3x3 = BasicConv2d(32, 64, 3)
        self.Conv2d_3b_1x1 = BasicConv2d(64, 80, 1)
        self.Conv2d_4a_3x3 = BasicConv2d(80, 192, 3, same=False)
        self.Mixed_5b = InceptionA(192, 32)
        self.Mixed_5c = InceptionA(256, 64)
        self.Mixed_5d = InceptionA(288, 64)
        self.Mixed_6a = InceptionB(288)
        self.Mixed_6b = InceptionC(768, 128)
        self.Mixed_6c = InceptionC(768, 160)
        self.Mixed_6d = InceptionC(768, 160)
        self.Mixed_6e = InceptionC(768, 192)
        self.Mixed_7a = InceptionD(768)
        self.Mixed_7b = InceptionE(1280, maximum=False)
        self.Mixed_7c = InceptionE(2048, maximum=True)
        self.fc = nn.Linear(2048, CLASSES, bias=False)

    def __call__(self, x: mx.array) -> InceptionOutput:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))  # (B, 147, 147, 64)
        x = max_pool(x, 3, stride=2)  # (B, 73, 73, 64)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))  # (B, 71, 71, 192)
        x = max_pool(x, 3, stride=2)  # (B, 35, 35, 192)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))  # (B, 35, 35, 288)
        x = self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))  # (B, 17, 17, 768)
        x = self.Mixed_6d(x)
        spatial = x[..., :SPATIAL_CHANNELS]  # these are of branch1x1, TensorFlow's mixed_6/conv
        x = self.Mixed_7a(self.Mixed_6e(x))  # (B, 8, 8, 1280)
        x = self.Mixed_7c(self.Mixed_7b(x))  # (B, 8, 8, 2048)
        pool = x.mean(axis=(1, 2))  # (B, 2048)
        return InceptionOutput(pool, spatial, self.fc(pool))


def average_pool(x: mx.array) -> mx.array:
    """The mean of each pixel and its neighbours, as many as it has: (B, H, W, C), size kept."""
    _, H, W, _ = x.shape
    x = _padded(x)
    rows = x[:, :H] + x[:, 1 : H + 1] + x[:, 2:]
    total = rows[:, :, :W] + rows[:, :, 1 : W + 1] + rows[:, :, 2:]
    return total / mx.array(np.outer(_neighbours(H), _neighbours(W))[:, :, None])


def _padded(x: mx.array) -> mx.array:
    """A border of one pixel, zero."""
    return mx.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])


def _neighbours(length: int) -> np.ndarray:
    """How many of a position and its two neighbours exist."""
    positions = np.arange(length, dtype=np.float32)
    return np.minimum(positions, 1) + 1 + np.minimum(length - 1 - positions, 1)
