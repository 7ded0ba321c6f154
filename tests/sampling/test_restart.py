"""Restart: where it leaps, how often, and what A1111 makes of a number of steps."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.sampling.analytic import Mixture
from lydite.sampling.sampler_types import FLOW, VE, Step
from lydite.sampling.samplers.restart import Restart, a1111_plan, sample_restart

NOISE_MODELS = {"ve": VE, "flow": FLOW}
START = np.random.default_rng(2).standard_normal((2, 3))
SIGMAS = [9.0, 4.0, 2.5, 1.1, 0.5, 0.2, 0.04, 0.0]


def schedule(noise_model: str, steps: int) -> list[float]:
    first = 14.6 if noise_model == "ve" else 1.0
    return [*np.geomspace(first, 0.03, steps).tolist(), 0.0]


def walk(
    noise_model: str, sigmas: list[float], **options: Any
) -> tuple[list[Step[Any]], list[Any]]:
    """The steps, and between which sigmas noise was asked for."""
    asked: list[tuple[float, float]] = []

    def noise(sigma: float, sigma_next: float) -> np.ndarray:
        asked.append((sigma, sigma_next))
        return START

    steps = sample_restart(
        Mixture(noise_model=NOISE_MODELS[noise_model]), START, sigmas, noise=noise, **options
    )
    return list(steps), asked


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
@pytest.mark.parametrize(
    ("steps", "leaps", "length"),
    ((1, 0, 0), (19, 0, 0), (20, 1, 9), (35, 1, 9), (36, 2, 9), (50, 2, 12)),
)
def test_a1111_takes_the_steps_of_its_restarts_out_of_the_rest(
    steps: int, leaps: int, length: int, noise_model: str
):
    made, asked = walk(noise_model, schedule(noise_model, steps))
    assert len(made) == steps
    assert len(asked) == leaps
    up = [at for at, (one, two) in enumerate(pairwise(made), 1) if two.sigma > one.sigma_next]
    assert len(up) == leaps
    for at, (low, high) in zip(up, asked, strict=True):
        assert (made[at - 1].sigma_next, made[at].sigma) == (low, high)
        assert made[at + length - 1].sigma_next == low  # down again in `length` steps


@pytest.mark.parametrize("noise_model", NOISE_MODELS)
def test_a1111_restarts_between_the_sigmas_nearest_to_a_tenth_and_to_two(noise_model: str):
    levels, (restart,) = a1111_plan(NOISE_MODELS[noise_model], schedule(noise_model, 40))
    assert (restart.steps, restart.times) == (10, 2)
    assert len(levels) == 21  # 20 steps, and two times 10
    ratio = {"ve": lambda sigma: sigma, "flow": lambda sigma: sigma / (1 - sigma)}[noise_model]
    assert ratio(restart.low) == pytest.approx(0.1, rel=0.35)
    assert ratio(restart.high) == pytest.approx(2.0, rel=0.35)
    assert {restart.low, restart.high} <= set(levels)
    roots = np.array(levels[:-1]) ** (1 / 7)
    np.testing.assert_allclose(np.diff(roots), roots[1] - roots[0], rtol=1e-9)
    assert levels[-1] == 0


def test_a_schedule_without_a_zero_keeps_its_end():
    levels, _ = a1111_plan(VE, np.geomspace(14.6, 0.03, 41).tolist())
    assert len(levels) == 21
    assert (levels[0], levels[-1]) == pytest.approx((14.6, 0.03))


def test_a_restart_leaps_from_the_nearest_sigma_to_the_one_it_names():
    restarts = [Restart(low=0.45, high=3.0, steps=2, times=2)]
    steps, asked = walk("ve", SIGMAS, restarts=restarts)
    assert asked == [(0.5, 3.0)] * 2
    middle = pytest.approx(((3.0 ** (1 / 7) + 0.5 ** (1 / 7)) / 2) ** 7)
    again = [(3.0, middle), (middle, 0.5)]
    expected = [(9, 4), (4, 2.5), (2.5, 1.1), (1.1, 0.5), *again, *again, (0.5, 0.2)]
    assert [(step.sigma, step.sigma_next) for step in steps][:9] == expected
    assert [step.index for step in steps] == list(range(11))


@pytest.mark.parametrize("s_noise", (1.0, 1.003))
def test_a_leap_adds_the_noise_between_its_two_sigmas(s_noise: float):
    plain, _ = walk("ve", SIGMAS[:5], restarts=())
    lone = [Restart(low=0.5, high=3.0, steps=1, times=1)]
    steps, _ = walk("ve", SIGMAS[:5], restarts=lone, s_noise=s_noise)
    lifted = plain[-1].x + START * (s_noise * (3.0**2 - 0.5**2) ** 0.5)
    np.testing.assert_allclose(steps[-1].denoised, Mixture()(lifted, 3.0), rtol=1e-12)


@pytest.mark.parametrize(
    "wrong", ({"low": 2.0, "high": 0.1}, {"low": 0.0}, {"steps": 0}, {"times": 0})
)
def test_a_restart_that_goes_nowhere_is_refused(wrong: dict[str, Any]):
    with pytest.raises(InputError, match="0 < low < high"):
        Restart(**{"low": 0.1, "high": 2.0, "steps": 3, "times": 1} | wrong)


def test_no_leap_from_the_end() -> None:
    """Sigma 0 is the picture; noise on top of it would be left in."""
    steps, asked = walk("ve", SIGMAS, restarts=[Restart(0.001, 1.0, 3, 2)])
    assert len(steps) == len(SIGMAS) - 1 and not asked
