"""The Brownian path: a function of seed and sigma, with the noise models of Brownian motion."""

import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lydite.core.errors import InputError
from lydite.sampling.brownian import LEVELS, BrownianNoise, BrownianPath
from lydite.sampling.registry import find_sampler, make_schedule
from lydite.sampling.schedules.table import STABLE_DIFFUSION
from support.denoisers import FunctionDenoiser

SHAPE = (4, 6, 5)
SIGMAS = st.floats(0, 5000, allow_subnormal=False)


def noise(seeds: list[int], shape: tuple[int, ...] = SHAPE) -> BrownianNoise[np.ndarray]:
    return BrownianNoise(seeds, shape, lambda normals: normals)


@settings(deadline=None, max_examples=40)
@given(sigmas=st.lists(SIGMAS, min_size=2, max_size=8, unique=True))
def test_the_order_and_number_of_questions_does_not_matter(sigmas: list[float]):
    path = BrownianPath(3, SHAPE)
    found = [path.at(sigma) for sigma in sigmas]
    for sigma, value in zip(sigmas[::-1], found[::-1], strict=True):
        np.testing.assert_array_equal(BrownianPath(3, SHAPE).at(sigma), value)
        np.testing.assert_array_equal(path.at(sigma), value)


@settings(deadline=None, max_examples=40)
@given(a=SIGMAS, b=SIGMAS, c=SIGMAS)
def test_two_ways_added_are_the_whole_way(a: float, b: float, c: float):
    if len({a, b, c}) < 3 or min(abs(a - b), abs(b - c), abs(a - c)) < 1e-12:
        return

    def moved(start: float, end: float) -> np.ndarray:  # by fresh paths, as a sampler sees it
        return noise([11])(start, end) * math.sqrt(abs(end - start))

    whole, rounding = moved(a, c), max(1.0, math.sqrt(max(a, b, c)))  # of float32, in its size
    np.testing.assert_allclose(moved(a, b) + moved(b, c), whole, rtol=0, atol=1e-6 * rounding)
    np.testing.assert_array_equal(moved(c, a), -whole)


@pytest.mark.parametrize(
    ("a", "b"),
    (
        (14.6, 9.0),
        (9.0, 4.0),
        (4.0, 2.0),
        (1.0, 0.5),
        (2.01, 1.99),
        (1.0, 0.99),
        (0.3, 0.299),
        (0.03, 0.0),
        (1e-8, 0.0),
        (4518.0, 3.0),
        (8.0, 7.0),
        (0.001, 0.0009),
    ),
)
def test_increments_are_standard_normal(a: float, b: float):
    values = noise([5], (100_000,))(a, b).astype(np.float64)
    assert abs(values.mean()) < 4 / math.sqrt(1e5)  # four standard errors
    # a step of a thousandth is 66 of the cells that are crossed in straight lines
    fine = 2.0**-LEVELS * 2.0 ** math.floor(math.log2(max(a, 2.0**-20))) / abs(a - b)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / 1e5) + (fine if a > 1e-6 else 1)
    if a > 1e-6:  # below 2⁻²⁰ the path is one straight line
        assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / 1e5) + 4 * fine
    assert np.abs(values).max() < 6


def test_increments_that_do_not_overlap_are_independent():
    source = noise([5], (100_000,))
    points = (14.6, 9.0, 8.0, 4.1, 3.9, 2.0, 1.0, 0.6, 0.5, 0.3, 0.03, 0.0)
    steps = [source(a, b)[0] for a, b in itertools.pairwise(points)]
    correlations = np.corrcoef(steps)
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 5 / math.sqrt(1e5)


def test_values_do_not_depend_on_their_neighbours():
    values = noise([5], (2, 50_000))(3.0, 1.0)[0]
    assert abs(np.corrcoef(values)[0, 1]) < 5 / math.sqrt(5e4)
    shifted = np.corrcoef(values[0, :-1], values[0, 1:])[0, 1]
    assert abs(shifted) < 5 / math.sqrt(5e4)


def test_the_distribution_is_normal_all_along():
    values = np.sort(noise([9], (200_000,))(2.0, 1.0)[0].astype(np.float64))
    expected = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values[::50]])
    found = np.arange(len(values))[::50] / len(values)
    assert np.abs(expected - found).max() < 1.95 / math.sqrt(len(values))  # Kolmogorov, 0.1 %


def test_an_image_does_not_depend_on_its_batch():
    together, alone = noise([1, 2, 3]), noise([2])
    for a, b in ((9.0, 3.0), (3.0, 0.2)):
        np.testing.assert_array_equal(together(a, b)[1:2], alone(a, b))


def test_seeds_differ_and_large_ones_are_allowed():
    seeds = [0, 1, -1, 2**63, 2**64 - 2]
    values = noise(seeds)(3.0, 1.0)
    for one, other in itertools.combinations(range(len(seeds)), 2):
        assert not np.array_equal(values[one], values[other])


def test_the_path_of_seed_zero_stays_as_it_is():
    # Printed once. It is made of raw bits and a table, so no version of NumPy should move it.
    values = noise([0], (3,))(2.5, 0.7)[0]
    np.testing.assert_allclose(values, [-0.06443209, 1.5571824, 1.8136599], rtol=0, atol=1e-6)


def test_a_stochastic_sampler_is_stable_in_the_number_of_steps():
    def run(steps: int, source: Any) -> np.ndarray:
        schedule = make_schedule("karras", steps, STABLE_DIFFUSION)
        x = np.random.default_rng(0).standard_normal((1, *shape)) * float(schedule.sigmas[0])
        denoise = FunctionDenoiser(lambda x, sigma: x * (0.25 / (0.25 + sigma**2)))
        sampler = find_sampler("dpmpp_2m_sde")
        return list(sampler.run(denoise, x, schedule.sigmas.tolist(), noise=source))[-1].x

    shape = (2000,)
    rng = np.random.default_rng(1)
    on_path = run(60, noise([4], shape)) - run(120, noise([4], shape))
    free = run(60, lambda *_: rng.standard_normal((1, *shape))) - run(
        120, lambda *_: rng.standard_normal((1, *shape))
    )
    assert on_path.std() < 0.05 * free.std()


def test_noise_arrives_in_the_callers_library():
    source = BrownianNoise([1, 2], (4, 3, 5), lambda values: mx.array(values.transpose(0, 2, 3, 1)))
    values = source(3.0, 1.0)
    assert isinstance(values, mx.array)
    assert values.dtype == mx.float32
    assert values.shape == (2, 3, 5, 4)


@pytest.mark.parametrize("sigma", (-1.0, float("nan"), float("inf"), 2.0**21))
def test_a_sigma_outside_is_refused(sigma: float):
    with pytest.raises(InputError, match="Brownian path at sigma"):
        BrownianPath(0, SHAPE).at(sigma)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="to itself"):
        noise([1])(2.0, 2.0)
    with pytest.raises(InputError, match="at least one seed"):
        noise([])
    with pytest.raises(InputError, match=r"seed is 1\.5"):
        BrownianPath(1.5, SHAPE)  # pyright: ignore[reportArgumentType]
