"""Metrics beside their reference libraries, in one run: pictures a second, and FID from features.

    .venv/bin/python benchmarks/evaluate_metrics.py
    .venv/bin/python benchmarks/evaluate_metrics.py --features 5000      a shorter FID

PSNR and SSIM against torchmetrics on pairs of 512×512; features of a CLIP vision tower of the size
of ViT-B/32 with random weights against transformers; the Fréchet distance of `--features` vectors
of 2048 numbers against means, np.cov and scipy's sqrtm, which is what FID tools compute. Needs the
`reference` and `dev` extras.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lydite.evaluate.distributions import Moments, frechet_distance
from lydite.evaluate.paired import psnr, ssim

PAIRS, SIDE = 12, 512
CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": 224, "patch_size": 32}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--features", type=int, default=50_000, help="vectors of each set")
    options = parser.parse_args()
    paired_metrics()
    clip_features()
    fid(options.features)


def paired_metrics() -> None:
    import torch
    from torchmetrics.functional import image

    g = np.random.Generator(np.random.PCG64(0))
    one = g.integers(0, 256, (PAIRS, SIDE, SIDE, 3)).astype(np.uint8)
    other = (one + g.integers(-20, 21, one.shape)).clip(0, 255).astype(np.uint8)
    a, b = (torch.tensor(x).permute(0, 3, 1, 2).float() for x in (one, other))

    def each(metric: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: [metric(x, y) for x, y in zip(one, other, strict=True)]

    def theirs(metric: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: [metric(a[n : n + 1], b[n : n + 1], data_range=255.0) for n in range(PAIRS)]

    for name, ours, reference in (
        ("PSNR", psnr, image.peak_signal_noise_ratio),
        ("SSIM", ssim, image.structural_similarity_index_measure),
    ):
        compare(f"{name}, {SIDE}×{SIDE}, pairs/s", PAIRS, each(ours), theirs(reference))


def clip_features() -> None:
    import mlx.core as mx
    import torch
    import transformers

    from lydite.models.features.clip_vision import CLIPVisionConfig, CLIPVisionTransformer

    config: Any = {**CLIP, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    theirs = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**config)).eval()
    ours = CLIPVisionTransformer(CLIPVisionConfig(**config))
    mx.eval(ours.parameters())
    pixels = np.random.Generator(np.random.PCG64(1)).normal(size=(8, 3, 224, 224))
    x, y = mx.array(np.moveaxis(pixels, 1, -1).astype(np.float32)), torch.tensor(pixels).float()

    @torch.no_grad()
    def run_theirs() -> Any:
        return theirs(pixel_values=y)

    compare("CLIP ViT-B/32 features, pictures/s", 8, lambda: mx.eval(ours(x)), run_theirs)


def fid(count: int) -> None:
    from scipy.linalg import sqrtm

    g = np.random.Generator(np.random.PCG64(2))
    mix = g.normal(size=(2048, 2048)).astype(np.float32) / 45
    one, other = (np.abs(g.normal(size=(count, 2048)).astype(np.float32) @ mix) for _ in range(2))
    values: dict[str, float] = {}

    def ours() -> None:
        moments = [Moments.empty(2048), Moments.empty(2048)]
        for side, features in zip(moments, (one, other), strict=True):
            for first in range(0, count, 1024):
                side.add(features[first : first + 1024])
        values["ours"] = frechet_distance(*moments)

    def theirs() -> None:
        apart = one.mean(axis=0, dtype=np.float64) - other.mean(axis=0, dtype=np.float64)
        first, second = (np.cov(x.astype(np.float64), rowvar=False) for x in (one, other))
        root: Any = sqrtm(first @ second)
        values["theirs"] = float(
            apart @ apart + np.trace(first) + np.trace(second) - 2 * np.trace(root.real)
        )

    compare(f"FID of {count:,} features, 1/s", 1, ours, theirs, repeat=1)
    apart = abs(values["ours"] - values["theirs"]) / values["theirs"]
    print(f"  value {values['ours']:.6f}, scipy's {values['theirs']:.6f}, relative {apart:.1e}")


def compare(
    name: str, count: int, ours: Callable[[], Any], theirs: Callable[[], Any], repeat: int = 3
) -> None:
    """The best of `repeat` runs of each, in turn, as counts a second and as a ratio of times."""
    best = [float("inf"), float("inf")]
    for _ in range(repeat):
        for index, function in enumerate((ours, theirs)):
            start = time.perf_counter()
            function()
            best[index] = min(best[index], time.perf_counter() - start)
    print(
        f"{name}: ours {count / best[0]:.3g}, reference {count / best[1]:.3g}, "
        f"ours takes {best[0] / best[1]:.2f} × its time",
        flush=True,
    )


if __name__ == "__main__":
    main()
