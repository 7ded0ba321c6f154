"""Errors of tables, and runs without noise."""

import numpy as np
import pytest

from lydite.conform.convergence import quiet_options
from lydite.conform.measure import table_error
from lydite.core.errors import InputError
from lydite.sampling.registry import SAMPLERS, find_sampler


def test_the_error_of_a_small_sigma_is_relative() -> None:
    sigmas = np.array([14.6, 1.0, 1e-3, 0.0])
    wrong = sigmas * [1, 1, 1.001, 1]
    assert table_error(wrong, sigmas) == pytest.approx(1e-3)
    assert table_error(np.add(sigmas, [0, 0, 0, 1e-6]), sigmas) > 1


def test_quiet_options_switch_the_noise_off() -> None:
    quiet = 0
    for name in SAMPLERS:
        sampler = find_sampler(name)
        try:
            options = quiet_options(name)
        except InputError:
            assert sampler.noise != "none" and "eta" not in sampler.options
            continue
        assert sampler.noise == "none" or options["eta"] == 0
        quiet += sampler.noise != "none"
    assert quiet > 5
