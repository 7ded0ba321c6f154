"""Classifier-free guidance: its fixed points and a hand-computed value."""

import mlx.core as mx
import numpy as np

from lydite.sampling.guidance import cfg

UNCOND = np.array([1.0, -2.0, 0.5], np.float32)
COND = np.array([2.0, 1.0, 0.5], np.float32)


def test_scale_zero_is_uncond_and_scale_one_is_cond():
    np.testing.assert_array_equal(cfg(UNCOND, COND, 0.0), UNCOND)
    np.testing.assert_array_equal(cfg(UNCOND, COND, 1.0), COND)


def test_scale_seven_goes_beyond_cond():
    np.testing.assert_array_equal(cfg(UNCOND, COND, 7.0), [8.0, 19.0, 0.5])


def test_equal_predictions_are_left_alone():
    np.testing.assert_array_equal(cfg(COND, COND, 7.0), COND)


def test_mlx_arrays_stay_mlx_arrays():
    guided = cfg(mx.array(UNCOND), mx.array(COND), 4.5)
    assert isinstance(guided, mx.array)
    assert guided.dtype == mx.float32
    np.testing.assert_allclose(np.array(guided), cfg(UNCOND, COND, 4.5), rtol=1e-6)
