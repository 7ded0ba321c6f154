"""Distances between sets of features against their reference libraries and known answers."""

from typing import Any

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.evaluate.distributions import (
    Moments,
    frechet_distance,
    gaussian_mmd,
    inception_score,
    kernel_distance,
    precision_recall,
)

GOLDEN = 2.098176418723739


def _features(n: int, g: np.random.Generator) -> np.ndarray:
    return (g.random((n, 24)) - 0.5) @ (g.random((24, 24)) - 0.5)


def _two_sets(n: int = 300, m: int = 200) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.Generator(np.random.PCG64(5))
    return _features(n, g), _features(m, g)


def _frechet(one: np.ndarray, other: np.ndarray) -> float:
    return frechet_distance(Moments.of(one), Moments.of(other))


def test_frechet_is_what_the_usual_recipe_gives() -> None:
    one, other = _two_sets()
    # means, np.cov and scipy 1.17.1's linalg.sqrtm of the product of the covariances
    assert _frechet(one, other) == pytest.approx(GOLDEN, rel=1e-9)
    assert _frechet(other, one) == pytest.approx(GOLDEN, rel=1e-9)


def test_moments_of_batches_are_those_of_the_whole() -> None:
    one, _ = _two_sets()
    one = one + 1e4  # a large mean
    moments = Moments.empty(24)
    for batch in np.array_split(one, 7):
        moments.add(batch)
    np.testing.assert_allclose(moments.mean, one.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(moments.covariance, np.cov(one, rowvar=False), atol=1e-10)


def test_frechet_along_the_axes_is_a_sum_over_them() -> None:
    corners = np.array([[x, y] for x in (-1, 1) for y in (-1, 1)])
    one, other = corners * [1, 2] + [3, 0], corners * [4, 2.5]
    spread = 4 / 3  # variance of four values ±1
    assert _frechet(one, other) == pytest.approx(9 + spread * (3**2 + 0.5**2))


def test_fewer_pictures_than_features_are_enough() -> None:
    one = np.zeros((3, 50))
    one[:, 0] = (-1, 0, 1)  # variance 1
    other = np.zeros((3, 50))
    other[:, 1] = (-2, 0, 2)  # variance 4, in a direction of its own
    assert _frechet(one, other) == pytest.approx(5)


def test_a_set_is_no_distance_from_itself() -> None:
    one, _ = _two_sets(40)
    assert 0 <= _frechet(one, one[::-1]) < 1e-9
    assert precision_recall(one, one[::-1]) == (1.0, 1.0)
    with pytest.raises(InputError, match="need more than 3"):
        precision_recall(one[:3], one)
    assert gaussian_mmd(one, one) == pytest.approx(0, abs=1e-9)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:Metric")  # it keeps all features in memory
def test_frechet_kernel_distance_and_score_are_those_of_torchmetrics() -> None:
    import torch
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.inception import InceptionScore
    from torchmetrics.image.kid import KernelInceptionDistance

    class AsTheyAre(torch.nn.Module):
        num_features = 24

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    one, other = _two_sets(100, 100)
    width: Any = (24,)
    fid = FrechetInceptionDistance(AsTheyAre(), input_img_size=width)
    fid.set_dtype(torch.float64)
    # Parts of everything: then the mean over parts is the value of the sets.
    kid = KernelInceptionDistance(AsTheyAre(), subsets=2, subset_size=100)
    for features, real in (one, True), (other, False):
        fid.update(torch.tensor(features), real=real)
        kid.update(torch.tensor(features), real=real)
    assert _frechet(one, other) == pytest.approx(fid.compute().item(), rel=1e-4)
    assert kernel_distance(one, other) == pytest.approx(kid.compute()[0].item(), rel=1e-4)

    score = InceptionScore(AsTheyAre(), splits=10)
    score.update(torch.tensor(one * 20))
    torch.manual_seed(0)
    order = torch.randperm(100).numpy()  # as it shuffles
    torch.manual_seed(0)
    mean, std = (value.item() for value in score.compute())
    ours = inception_score(one[order] * 20)
    assert ours[0] == pytest.approx(mean, rel=1e-4)
    assert ours[1] == pytest.approx(std * np.sqrt(9 / 10), rel=1e-4)  # theirs is with n - 1
    moved = inception_score(one[order] * 20 + 5000)  # the same probabilities
    assert moved == pytest.approx(ours, rel=1e-6)


def test_precision_and_recall_are_those_of_prdc() -> None:
    from prdc import compute_prdc

    one, other = _two_sets(120, 90)
    theirs = compute_prdc(real_features=other, fake_features=one, nearest_k=3)
    precision, recall = precision_recall(one, other)
    assert precision == pytest.approx(theirs["precision"])
    assert recall == pytest.approx(theirs["recall"])
    assert 0 < precision < 1 and 0 < recall < 1


@pytest.mark.parity
def test_gaussian_mmd_is_a_mean_of_kernels() -> None:
    from scipy.spatial.distance import cdist

    one, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in _two_sets(50, 40))

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        return np.exp(-cdist(a, b, "sqeuclidean") / 200).mean()

    expected = 1000 * (kernel(one, one) + kernel(other, other) - 2 * kernel(one, other))
    assert gaussian_mmd(one * 3, other) == pytest.approx(expected, rel=1e-9)


def test_sets_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = _two_sets(50, 40)
    distances = (kernel_distance, gaussian_mmd, precision_recall)
    whole = [distance(one, other) for distance in distances]
    monkeypatch.setattr("lydite.evaluate.distributions.PIECE", 7)
    for distance, value in zip(distances, whole, strict=True):
        assert distance(one, other) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(("one", "other"), [((5, 3), (5, 4)), ((1, 3), (5, 3))])
def test_sets_that_cannot_be_compared(one: tuple[int, int], other: tuple[int, int]) -> None:
    a, b = np.ones(one), np.ones(other)
    for distance in (_frechet, kernel_distance, gaussian_mmd, precision_recall):
        with pytest.raises(InputError, match=r"expected|two or more"):
            distance(a, b)


def test_features_that_are_not_finite() -> None:
    with pytest.raises(InputError, match="finite"):
        Moments.of(np.array([[1.0, np.nan]]))


def test_what_is_as_far_as_the_third_neighbour_is_near() -> None:
    """As in the authors' code."""
    real = np.array([[0.0], [1.0], [2.0], [3.0]])
    for place, precision in ((-3.0, 1.0), (-3.001, 0.0)):
        assert precision_recall(np.full((4, 1), place), real)[0] == precision
