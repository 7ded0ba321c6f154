"""Confidence intervals: they cover, and agree with scipy where it has the same."""

import numpy as np
import pytest

from lydite.evaluate import intervals
from lydite.evaluate.intervals import FEWEST, growth, mean_interval, share_interval, summarize


@pytest.mark.parametrize("kind", ["normal", "skewed"])
def test_the_interval_contains_the_true_mean_in_95_of_100(kind: str) -> None:
    g = np.random.Generator(np.random.PCG64(11))
    inside, repetitions = 0, 500
    for _ in range(repetitions):
        noise = g.normal(size=30) if kind == "normal" else g.gamma(4.0, size=30) - 4.0
        low, high = mean_interval(3.0 + noise) or (0.0, 0.0)
        inside += low <= 3.0 <= high
    assert 0.93 <= inside / repetitions <= 0.97


@pytest.mark.parity
def test_the_interval_of_few_values_is_students() -> None:
    from scipy import stats

    for n in range(FEWEST, 10):
        x = np.random.Generator(np.random.PCG64(n)).normal(size=n)
        theirs = stats.ttest_1samp(x, 0).confidence_interval(0.95)
        assert mean_interval(x) == pytest.approx((theirs.low, theirs.high), rel=1e-4)


@pytest.mark.parity
def test_the_interval_of_many_values_is_near_scipys_bootstrap() -> None:
    from scipy import stats

    x = np.random.Generator(np.random.PCG64(1)).gamma(2.0, size=300)
    theirs = stats.bootstrap((x,), np.mean, method="BCa", rng=1).confidence_interval
    ours = mean_interval(x)
    assert ours is not None
    width = theirs.high - theirs.low
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.08 * width)


@pytest.mark.parity
@pytest.mark.parametrize(("right", "count"), [(0, 5), (5, 5), (3, 10), (1, 1), (990, 1000)])
def test_the_interval_of_a_share_is_wilsons(right: int, count: int) -> None:
    from scipy import stats

    theirs = stats.binomtest(right, count).proportion_ci(method="wilson")
    ours = share_interval([True] * right + [False] * (count - right))
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-6)


def test_an_interval_ends_where_the_values_of_its_metric_end() -> None:
    for n in (6, 20):  # Student's and the bootstrap's
        psnr = [*[100.0] * (n - 1), 60.0]
        free, limited = mean_interval(psnr), mean_interval(psnr, (0, 100))
        assert free is not None and limited is not None
        assert free[1] > 100 and limited == (free[0], 100)
        error = [*[0.01] * (n - 1), 2.0]
        assert (mean_interval(error) or (0, 0))[0] < 0 == (mean_interval(error, (0, 9)) or (1,))[0]


def test_a_share_of_none_and_of_all_ends_exactly_at_0_and_1() -> None:
    for n in range(1, 60):
        assert share_interval([False] * n)[0] == 0 and share_interval([True] * n)[1] == 1


def test_few_values_have_no_interval() -> None:
    assert mean_interval(range(FEWEST - 1)) is None
    assert mean_interval(range(FEWEST)) is not None


def test_summary_of_one_of_two_and_of_equal_values() -> None:
    one = summarize([2.0])
    assert (one.mean, one.median, one.std, one.ci95, one.n) == (2.0, 2.0, None, None, 1)
    two = summarize([1.0, 3.0])
    assert (two.min, two.max, two.n, two.std) == (1, 3, 2, pytest.approx(2**0.5))
    assert two.mean == 2 and two.ci95 is None
    assert summarize([5.0] * 30).ci95 == (5.0, 5.0)
    assert summarize([1.0, 2.0, 9.0]).median == 2
    for wrong in [], [1.0, float("nan")], [[1.0]]:
        with pytest.raises(ValueError):
            summarize(wrong)


@pytest.mark.parametrize("n", [5, 9, 10, 11])
def test_from_ten_values_on_the_interval_is_the_bootstraps(n: int) -> None:
    skewed = summarize(np.arange(n) ** 3.0)
    assert skewed.ci95 is not None
    middle = (skewed.ci95[0] + skewed.ci95[1]) / 2
    assert (middle == pytest.approx(skewed.mean)) == (n < 10)  # Student's is symmetrical


def test_the_same_values_give_the_same_interval() -> None:
    x = np.random.Generator(np.random.PCG64(3)).normal(size=50)
    assert mean_interval(x) == mean_interval(x.copy())


def test_growth_is_the_factor_of_a_step() -> None:
    assert growth([0.0, 1e-3 * 1.5, 1e-3 * 1.5**2, 1e-3 * 1.5**3]) == pytest.approx(1.5)
    assert growth([0.0, 1.0]) is None


def test_two_errors_above_0_have_a_growth_and_one_has_none() -> None:
    assert growth([0.1, 0.2]) == pytest.approx(2) and growth([0.1, 0.0, 0.4]) == pytest.approx(2)
    assert growth([0.1]) is growth([0.0, 0.1]) is growth([]) is None


def test_an_interval_is_of_two_thousand_resamples_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(3).normal(size=40)
    whole = intervals._studentized(values)
    assert whole.shape == (2000,)
    monkeypatch.setattr(intervals, "PIECE", 40 * 999)
    np.testing.assert_array_equal(intervals._studentized(values), whole)
