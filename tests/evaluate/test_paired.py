"""PSNR, SSIM and MS-SSIM against scikit-image and torchmetrics, on odd sizes and flat pictures."""

from collections.abc import Callable

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.evaluate.paired import MOST_PSNR, ms_ssim, psnr, ssim
from lydite.pipelines.picture import Pixels

Metric = Callable[[Pixels, Pixels], float]


def _pair(height: int, width: int, noise: float = 20.0) -> tuple[Pixels, Pixels]:
    g = np.random.Generator(np.random.PCG64(height * 1000 + width))
    y, x = np.mgrid[:height, :width]
    scene = 128 + 60 * np.sin(x / 7 + y / 11) + 40 * np.cos(y / 5)
    one = np.stack([scene, scene[::-1], 255 - scene], axis=-1)
    other = 0.9 * one + 25 + g.normal(0, noise, one.shape)  # paler, brighter and noisy
    return one.clip(0, 255).astype(np.uint8), other.clip(0, 255).astype(np.uint8)


SIZES = [(11, 11), (64, 64), (101, 77), (13, 200), (130, 128)]


@pytest.mark.parametrize("size", SIZES)
def test_psnr_and_ssim_are_those_of_scikit_image(size: tuple[int, int]) -> None:
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

    one, other = _pair(*size)
    assert psnr(one, other) == pytest.approx(peak_signal_noise_ratio(one, other), rel=1e-9)
    theirs = structural_similarity(
        one,
        other,
        channel_axis=-1,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
        data_range=255,
    )
    assert ssim(one, other) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("size", [(176, 176), (192, 208)])
def test_all_are_those_of_torchmetrics_and_pytorch_msssim(size: tuple[int, int]) -> None:
    import pytorch_msssim
    import torch
    from torchmetrics.functional import image

    one, other = _pair(*size)
    a, b = (torch.tensor(x).permute(2, 0, 1)[None].double() for x in (one, other))
    _, full = image.structural_similarity_index_measure(
        a, b, data_range=255.0, return_full_image=True
    )
    pairs = {
        psnr: image.peak_signal_noise_ratio(a, b, data_range=255.0),
        ssim: full[..., 5:-5, 5:-5].mean(),  # without the border, where it mirrors the picture
        ms_ssim: pytorch_msssim.ms_ssim(a, b, data_range=255),
    }
    for metric, theirs in pairs.items():
        assert metric(one, other) == pytest.approx(float(theirs), rel=1e-4), metric.__name__


@pytest.mark.parametrize("metric", [psnr, ssim, ms_ssim])
def test_equal_pictures(metric: Metric) -> None:
    one, _ = _pair(180, 177)
    flat = np.full_like(one, 77)
    best = MOST_PSNR if metric is psnr else 1.0
    assert metric(one, one) == pytest.approx(best)
    assert metric(flat, flat) == pytest.approx(best)


def test_known_answers() -> None:
    black, white = np.zeros((20, 20, 3), np.uint8), np.full((20, 20, 3), 255, np.uint8)
    assert psnr(black, white) == pytest.approx(0)  # and not the 27.8 dB of wrapped differences
    grey = np.full_like(black, 100)
    assert psnr(grey, grey + 10) == pytest.approx(10 * np.log10(255**2 / 100))
    c1 = (0.01 * 255) ** 2  # flat pictures have no contrast: the term of the means is left
    expected = (2 * 100 * 110 + c1) / (100**2 + 110**2 + c1)
    assert ssim(grey, grey + 10) == pytest.approx(expected)


def test_ms_ssim_of_an_inverted_picture_is_0() -> None:
    one, _ = _pair(176, 176)
    assert ms_ssim(one, 255 - one) == 0 > ssim(one, 255 - one)


def test_noise_lowers_every_metric() -> None:
    for metric in psnr, ssim, ms_ssim:
        scores = [metric(*_pair(180, 180, noise)) for noise in (2, 8, 32, 96)]
        assert scores == sorted(scores, reverse=True)


def test_pictures_of_two_sizes_and_small_ones() -> None:
    one, _ = _pair(20, 30)
    with pytest.raises(InputError, match="30×20"):
        psnr(one, one[:, :20])
    with pytest.raises(InputError, match="at least 176"):
        ms_ssim(one, one)
    with pytest.raises(InputError, match="at least 11"):
        ssim(one[:8], one[:8])


def test_no_pair_is_nearer_than_equal_pictures() -> None:
    one = np.full((256, 256, 3), 100, np.uint8)
    other = one.copy()
    other[7, 8, 1] += 1  # 101 dB
    assert psnr(one, one) == psnr(one, other) == 100
    other[:2] += 1
    assert psnr(one, other) == pytest.approx(10 * np.log10(255**2 * 256 / 2), abs=0.1)
