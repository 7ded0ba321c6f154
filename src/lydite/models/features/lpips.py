"""LPIPS: distances of normalised activations of AlexNet or VGG16, weighted by learned heads.

Reference: richzhang/PerceptualSimilarity, the package lpips 0.1.4 (lpips.py, version 0.1), on the
networks of torchvision (models/alexnet.py, models/vgg.py). Names of both.
"""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from lydite.models.layers import Conv2d, Linear, max_pool

EPS = 1e-10  # beside the length of an activation
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)

Backbone = Literal["alex", "vgg"]


@dataclass(frozen=True)
class Conv:
    """A convolution and a ReLU; `tap`: LPIPS compares what comes out."""

    width: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    tap: bool = False


@dataclass(frozen=True)
class Pool:
    size: int


# The rows of `features` as torchvision counts them, a ReLU behind each convolution.
LAYERS: dict[Backbone, tuple[Conv | Pool, ...]] = {
    "alex": (
        Conv(64, 11, stride=4, padding=2, tap=True),
        Pool(3),
        Conv(192, 5, padding=2, tap=True),
        Pool(3),
        Conv(384, tap=True),
        Conv(256, tap=True),
        Conv(256, tap=True),
    ),
    "vgg": (
        *(Conv(64), Conv(64, tap=True), Pool(2)),
        *(Conv(128), Conv(128, tap=True), Pool(2)),
        *(Conv(256), Conv(256), Conv(256, tap=True), Pool(2)),
        *(Conv(512), Conv(512), Conv(512, tap=True), Pool(2)),
        *(Conv(512), Conv(512), Conv(512, tap=True)),
    ),
}
SMALLEST: dict[Backbone, int] = {"alex": 31, "vgg": 16}  # pixels, for one position at the last tap


class Features(nn.Module):
    """Pictures (B, H, W, 3) in -1 to 1 to the activations that LPIPS compares."""

    def __init__(self, net: Backbone) -> None:
        super().__init__()
        self._layers = LAYERS[net]
        self.features: list[nn.Module] = []
        width = 3
        for layer in self._layers:
            if isinstance(layer, Pool):
                self.features.append(nn.Identity())
                continue
            conv = (
                Conv2d(width, layer.width, 3)
                if (layer.kernel, layer.stride) == (3, 1)
                else nn.Conv2d(width, layer.width, layer.kernel, layer.stride, layer.padding)
            )
            self.features += [conv, nn.Identity()]  # the ReLU has a number of its own
            width = layer.width

    def __call__(self, x: mx.array) -> list[mx.array]:
        x = (x - mx.array(SHIFT)) / mx.array(SCALE)
        taps: list[mx.array] = []
        index = 0
        for layer in self._layers:
            if isinstance(layer, Pool):
                x = max_pool(x, layer.size, stride=2)
                index += 1
                continue
            x = nn.relu(self.features[index](x))
            index += 2
            if layer.tap:
                taps.append(x)
        return taps


class Heads(nn.Module):
    """One weight per channel of each activation."""

    def __init__(self, net: Backbone) -> None:
        super().__init__()
        widths = [layer.width for layer in LAYERS[net] if isinstance(layer, Conv) and layer.tap]
        self.heads = [Linear(width, 1, bias=False) for width in widths]

    def __call__(self, first: list[mx.array], second: list[mx.array]) -> mx.array:
        """The distance of each pair of pictures: (B,)."""
        total = mx.array(0.0)
        for head, a, b in zip(self.heads, first, second, strict=True):
            difference = (normalised(a) - normalised(b)) ** 2
            total = total + head(difference).mean(axis=(1, 2, 3))
        return total


def normalised(x: mx.array) -> mx.array:
    """Of length 1 at each position, where the length is not 0."""
    return x / (mx.sqrt((x * x).sum(axis=-1, keepdims=True)) + EPS)
