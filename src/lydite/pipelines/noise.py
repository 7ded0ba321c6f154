"""What a seed means: torch's CPU generator, or MLX's own."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from lydite.sampling.noise import TorchGenerator

Draw = Callable[[], mx.array]  # the next normals of every image, (B, h, w, C) in float32


def torch_noise(seeds: Sequence[int], shape: tuple[int, int, int]) -> Draw:
    """As diffusers draws with one CPU generator per image; `shape` is (C, h, w), torch's order."""
    generators = [TorchGenerator(seed) for seed in seeds]

    def draw() -> mx.array:
        normals = np.stack([generator.randn(shape) for generator in generators])
        return mx.array(normals.transpose(0, 2, 3, 1))

    return draw


def mlx_noise(seeds: Sequence[int], shape: tuple[int, int, int]) -> Draw:
    """From `mx.random`, one key per image."""
    keys = [mx.random.key(seed % 2**64) for seed in seeds]

    def draw() -> mx.array:
        normals: list[mx.array] = []
        for index, key in enumerate(keys):
            keys[index], use = mx.random.split(key)
            normals.append(mx.random.normal(shape, key=use))
        return mx.stack(normals).transpose(0, 2, 3, 1)

    return draw


NOISES: dict[str, Callable[[Sequence[int], tuple[int, int, int]], Draw]] = {
    "torch": torch_noise,
    "mlx": mlx_noise,
}
