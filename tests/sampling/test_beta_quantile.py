"""The Beta quantile against SciPy, and where its value is known."""

import math

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.sampling.schedules.beta_quantile import beta_integral, beta_quantile

SHARES = (0.0, 1e-12, 1e-6, *np.linspace(0.001, 0.999, 334).tolist(), 0.5, 1 - 1e-6, 1.0)
SHAPES = ((0.6, 0.6), (0.5, 0.5), (1, 1), (2, 5), (0.1, 0.1), (0.3, 4), (30, 2), (0.6, 0.8), (1, 3))


@pytest.mark.parity
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_the_quantile_is_scipys(a: float, b: float):
    stats = pytest.importorskip("scipy.stats")
    ours = [beta_quantile(share, a, b) for share in SHARES]
    np.testing.assert_allclose(ours, stats.beta.ppf(SHARES, a, b), rtol=1e-9, atol=0)


@pytest.mark.parity
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_the_integral_is_scipys(a: float, b: float):
    stats = pytest.importorskip("scipy.stats")
    ours = [beta_integral(x, a, b) for x in SHARES]
    np.testing.assert_allclose(ours, stats.beta.cdf(SHARES, a, b), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_the_quantile_undoes_the_integral(a: float, b: float):
    for share in SHARES:
        x = beta_quantile(share, a, b)
        if x < 1 - 1e-9:  # nearer to 1 float64 has too few numbers
            assert beta_integral(x, a, b) == pytest.approx(share, rel=1e-9)


def test_quantiles_that_are_known():
    assert beta_quantile(0.3, 1, 1) == pytest.approx(0.3, rel=1e-14)
    assert beta_quantile(0.3, 2, 1) == pytest.approx(math.sqrt(0.3), rel=1e-14)
    assert beta_quantile(0.3, 0.5, 0.5) == pytest.approx(math.sin(0.15 * math.pi) ** 2, rel=1e-14)
    assert beta_quantile(0.5, 0.6, 0.6) == 0.5  # exactly: half an index is rounded by it


@pytest.mark.parametrize("share", (-0.1, 1.1, float("nan")))
def test_a_share_outside_is_refused(share: float):
    with pytest.raises(InputError, match="beta quantile of"):
        beta_quantile(share, 0.6, 0.6)
