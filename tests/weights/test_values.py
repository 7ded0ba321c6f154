"""What the numbers of one tensor give away."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lydite.weights import audit
from lydite.weights.audit import count_nonfinite, suspicion

FLOATS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("name", FLOATS)
@given(x=hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32)))
def test_nan_and_inf_are_counted(name: str, x: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        stored = x.astype(FLOATS[name])
    wide = stored.astype(np.float64)
    assert count_nonfinite(stored) == (np.isnan(wide).sum(), np.isinf(wide).sum())


def test_one_in_the_last_of_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_CHUNK", 8)
    x = np.zeros((5, 4), np.float16)
    x[-1, -1], x[0, 0] = np.nan, np.inf
    assert count_nonfinite(x) == (1, 1)
    assert count_nonfinite(x.T) == (1, 1)
    for place in range(x.size):  # no value lies between two passes
        alone = np.zeros(x.size, np.float16)
        alone[place] = np.nan
        assert count_nonfinite(alone) == (1, 0)


def test_types_that_hold_no_infinity() -> None:
    assert count_nonfinite(np.array([1, 2])) == (0, 0)
    assert count_nonfinite(np.array([True])) == (0, 0)
    e4m3 = np.array([np.nan, 1, 448], ml_dtypes.float8_e4m3fn)
    assert count_nonfinite(e4m3) == (1, 0)
    assert count_nonfinite(np.zeros((0, 3), np.float32)) == (0, 0)
    assert count_nonfinite(np.array(np.nan, np.float32)) == (1, 0)


def fresh_uniform(shape: tuple[int, ...]) -> np.ndarray:
    bound = np.prod(shape[1:]) ** -0.5
    return DRAW.uniform(-bound, bound, shape).astype(np.float32)


def trained(shape: tuple[int, ...]) -> np.ndarray:
    """Heavier tails than a normal, as trained weights have."""
    return (DRAW.standard_t(5, shape) * 0.02).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("array", "note"),
    [
        (fresh_uniform((256, 64)), "uniform"),
        (fresh_uniform((64, 32, 3, 3)), "uniform"),
        (DRAW.normal(0, 0.02, (300, 64)), "σ 0.02"),
        (DRAW.normal(0, 1, (300, 64)), "σ 1"),
        (np.zeros((4, 4)), "all zero"),
        (np.full((4, 4), 0.5), "constant (0.5)"),
        (np.ones(32), "constant (1)"),
    ],
    ids=str,
)
def test_noted(array: np.ndarray, note: str, dtype: type) -> None:
    found = suspicion("x.weight", array.astype(dtype))
    assert found and note in found


@pytest.mark.parametrize(
    "array",
    [
        trained((300, 64)),
        DRAW.normal(0, 0.03, (300, 64)),
        DRAW.normal(0.001, 0.02, (300, 64)),
        DRAW.uniform(-0.1, 0.1, (256, 64)),
        fresh_uniform((256, 64)) + 0.01,
        DRAW.normal(0, 0.02, 500),
        DRAW.normal(0, 0.02, (5, 5)),
        np.array([0.0]),
        np.array(3.0),
        np.zeros((3, 0)),
    ],
    ids=str,
)
def test_not_noted(array: np.ndarray) -> None:
    assert suspicion("x.weight", array.astype(np.float32)) is None


@pytest.mark.parametrize("share", [0.95, 1.0, 1.03])
def test_only_a_range_of_one_over_the_root_of_the_inputs_looks_fresh(share: float) -> None:
    even = np.linspace(-1, 1, 64 * 64).reshape(64, 64) / 8
    assert bool(suspicion("x.weight", share * even)) == (share == 1)


def test_only_values_distributed_as_drawn_look_fresh() -> None:
    draw = np.random.default_rng(0)
    normal, peaked = draw.standard_normal((64, 64)), draw.laplace(size=(64, 64))
    for values, noted in ((normal, True), (peaked - peaked.mean(), False)):
        assert bool(suspicion("x.weight", 0.02 * values / values.std())) is noted


@pytest.mark.parametrize(("rows", "noted"), [(33, False), (32, True)])
def test_a_thousand_values_are_needed_to_tell(rows: int, noted: bool) -> None:
    values = np.random.default_rng(0).standard_normal((rows, 1024 // rows))
    assert values.size == (1024 if noted else 1023)
    values = 0.02 * (values - values.mean()) / values.std()
    assert bool(suspicion("x.weight", values)) is noted


def test_a_bias_of_zeros_is_common_and_an_integer_says_nothing() -> None:
    assert suspicion("x.bias", np.zeros(8, np.float32)) is None
    assert suspicion("x.bias", np.full(8, 2.0, np.float32)) == "constant (2)"
    assert suspicion("x.bias", np.zeros((8, 8), np.float32)) == "all zero"
    assert suspicion("x.weight", np.zeros(8, np.float32)) == "all zero"
    assert suspicion("x.weight", np.zeros((8, 8), np.int32)) is None


def test_one_value_that_the_sample_misses_is_still_no_constant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "_SAMPLE", 4)
    x = np.zeros((64, 4), np.float32)
    x[0, 1] = 1
    assert suspicion("x.weight", x) is None
