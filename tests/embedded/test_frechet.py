"""The Fréchet distance against known answers."""

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.embedded.frechet import frechet_distance

GOLDEN = 2.098176418723739


def _features(n: int, g: np.random.Generator) -> np.ndarray:
    return (g.random((n, 24)) - 0.5) @ (g.random((24, 24)) - 0.5)


def test_it_is_what_the_usual_recipe_gives() -> None:
    g = np.random.Generator(np.random.PCG64(5))
    one, other = _features(300, g), _features(200, g)
    # means, np.cov and scipy 1.17.1's linalg.sqrtm of the product of the covariances
    assert frechet_distance(one, other) == pytest.approx(GOLDEN, rel=1e-9)
    assert frechet_distance(other, one) == pytest.approx(GOLDEN, rel=1e-9)


def test_along_the_axes_it_is_a_sum_over_them() -> None:
    corners = np.array([[x, y] for x in (-1, 1) for y in (-1, 1)])
    one, other = corners * [1, 2] + [3, 0], corners * [4, 2.5]
    spread = 4 / 3  # variance of four values ±1
    assert frechet_distance(one, other) == pytest.approx(9 + spread * (3**2 + 0.5**2))


def test_fewer_pictures_than_features_are_enough() -> None:
    one = np.zeros((3, 50))
    one[:, 0] = (-1, 0, 1)  # variance 1
    other = np.zeros((3, 50))
    other[:, 1] = (-2, 0, 2)  # variance 4, in a direction of its own
    assert frechet_distance(one, other) == pytest.approx(5)


def test_a_set_is_no_distance_from_itself() -> None:
    features = _features(40, np.random.Generator(np.random.PCG64(6)))
    assert 0 <= frechet_distance(features, features[::-1]) < 1e-12


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [((5, 3), (5, 4), "expected"), ((5,), (5,), "expected"), ((1, 3), (5, 3), "two or more")],
)
def test_sets_that_cannot_be_compared(
    one: tuple[int, ...], other: tuple[int, ...], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        frechet_distance(np.ones(one), np.ones(other))
