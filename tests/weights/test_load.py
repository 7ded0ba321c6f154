"""One door: a model is filled exactly, in the dtype asked for, or not touched at all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lydite.core.checkpoint import open_checkpoint
from lydite.core.dtypes import mlx_to_numpy
from lydite.core.errors import WeightsError
from lydite.weights.audit import TensorView
from lydite.weights.load import load, parameter_hash, parameter_specs, parameters, save, to_mlx
from lydite.weights.rules import OIHW_TO_OHWI, Alias, Convert, Fill, Join, Rule, Split
from support.memory_checkpoint import in_memory


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, kernel_size=3)
        self.layers = [nn.Linear(3, 3), nn.Linear(3, 5, bias=False)]


RULES: tuple[Rule, ...] = (
    Convert("conv.weight", OIHW_TO_OHWI),
    Split("pair", ("layers.0.bias", "conv.bias")),
    Join(("upper", "lower"), "layers.1.weight"),
    Alias("zeroth", "layers.0.weight"),
)
FOLDER: tuple[Rule, ...] = (RULES[0],)


def stored() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    shapes = {"conv.weight": (4, 2, 3, 3), "conv.bias": (4,), "layers.0.weight": (3, 3)}
    shapes |= {"layers.0.bias": (3,), "upper": (2, 3), "lower": (3, 3)}
    return {name: draw.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


NO_SPLIT = (RULES[0], *RULES[2:])


def fill(
    arrays: dict[str, Any],
    rules: Sequence[Rule] = NO_SPLIT,
    dtype: mx.Dtype = mx.float32,
    keep: Sequence[str] = (),
) -> Toy:
    model = Toy()
    load(model, in_memory(arrays), rules, where="here", dtype=dtype, keep_float32=keep)
    return model


def refusal(arrays: dict[str, Any], dtype: mx.Dtype = mx.float32) -> str:
    model = Toy()
    before = parameter_hash(model)
    with pytest.raises(WeightsError) as caught:
        load(model, in_memory(arrays), NO_SPLIT, where="here", dtype=dtype)
    assert parameter_hash(model) == before
    assert str(caught.value).startswith("here: ")
    return str(caught.value)


def test_every_parameter_has_the_values_of_the_file() -> None:
    arrays, model = stored(), fill(stored())
    np.testing.assert_array_equal(model.conv.weight, arrays["conv.weight"].transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(model.layers[0].bias, arrays["layers.0.bias"])
    joined = np.concatenate([arrays["upper"], arrays["lower"]])
    np.testing.assert_array_equal(model.layers[1].weight, joined)


def test_a_converted_weight_lies_in_the_order_in_which_it_is_read() -> None:
    assert np.array(fill(stored()).conv.weight, copy=False).flags.c_contiguous


@pytest.mark.parametrize("name", stored())
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_no_number_is_refused_by_name(name: str, value: float) -> None:
    arrays = stored()
    arrays[name].flat[1] = value
    assert f"{name}: " in refusal(arrays)


@pytest.mark.parametrize("name", stored())
def test_whatever_the_audit_refuses_is_not_loaded(name: str) -> None:
    arrays = stored()
    array = arrays.pop(name)
    assert f"missing ({name}: " in refusal(arrays)
    assert f"{name}x: the model has no" in refusal({**arrays, f"{name}x": array})
    assert f"{name}: stored as I32" in refusal({**arrays, name: array.astype(np.int32)})
    assert f"{name}: " in refusal({**arrays, name: array[None]})


def test_two_copies_that_differ_are_refused() -> None:
    arrays = stored()
    assert fill({**arrays, "zeroth": arrays["layers.0.weight"].copy()})
    message = refusal({**arrays, "zeroth": arrays["layers.0.weight"] + 1})
    assert "zeroth: should repeat layers.0.weight" in message


def test_one_tensor_may_hold_several_parameters() -> None:
    arrays = {name: x for name, x in stored().items() if not name.endswith("bias")}
    arrays["pair"] = np.arange(6, dtype=np.float32)
    model = nn.Module()
    model.layers = [nn.Linear(3, 3)]
    model.conv = nn.Linear(1, 3)
    rules = (*RULES[1:2], Fill("conv.weight", np.ones, because="a test"))
    part = {"pair": arrays["pair"], "layers.0.weight": arrays["layers.0.weight"]}
    load(model, in_memory(part), rules, where="here", dtype=mx.float32)
    np.testing.assert_array_equal(model.layers[0].bias, [0, 1, 2])
    np.testing.assert_array_equal(model.conv.bias, [3, 4, 5])
    np.testing.assert_array_equal(model.conv.weight, np.ones((3, 1)))
    part["pair"][4] = np.nan
    with pytest.raises(WeightsError, match="pair: 1 NaN"):
        load(model, in_memory(part), rules, where="here", dtype=mx.float32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_dtype_is_the_one_asked_for_but_for_those_kept(dtype: mx.Dtype) -> None:
    model = fill(stored(), dtype=dtype, keep=("*.1.weight",))
    assert model.layers[1].weight.dtype == mx.float32
    assert model.layers[0].weight.dtype == model.conv.bias.dtype == dtype


def test_a_value_beyond_float16_is_not_loaded_as_infinity() -> None:
    arrays = stored()
    arrays["conv.bias"][0] = 1e6
    fill(arrays)
    beyond = "conv.bias: has values beyond the range of mlx.core.float16"
    assert beyond in refusal(arrays, mx.float16)
    half = {**stored(), "conv.bias": arrays["conv.bias"].astype(ml_dtypes.bfloat16)}
    assert beyond in refusal(half, mx.float16)
    wide = {**stored(), "conv.bias": np.array([1e300, 0, 0, 0])}
    assert "beyond the range" in refusal(wide)


STORED_AS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("name", STORED_AS)
def test_every_float_type_is_read_exactly(name: str) -> None:
    x = np.random.default_rng(1).standard_normal((6, 4)).astype(STORED_AS[name])
    expected = x.astype(np.float32)
    for array, wanted in ((x, expected), (x.T, expected.T), (x[::2], expected[::2])):
        np.testing.assert_array_equal(np.array(to_mlx(array).astype(mx.float32)), wanted)
    arrays = {key: array.astype(STORED_AS[name]) for key, array in stored().items()}
    model = fill(arrays)
    np.testing.assert_array_equal(model.conv.bias, arrays["conv.bias"].astype(np.float32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_saved_and_loaded_again_is_the_same(tmp_path: Path, dtype: mx.Dtype) -> None:
    model = Toy()
    model.set_dtype(dtype)
    save(model, tmp_path / "toy.safetensors", FOLDER)
    again = Toy()
    with open_checkpoint(tmp_path / "toy.safetensors") as checkpoint:
        assert checkpoint.tensors["conv.weight"].shape == (4, 2, 3, 3)
        load(again, TensorView(checkpoint), FOLDER, where="here", dtype=dtype)
    assert parameter_hash(again) == parameter_hash(model)
    for path, value in parameters(model).items():
        assert mlx_to_numpy(value).dtype == mlx_to_numpy(parameters(again)[path]).dtype


def test_the_hash_tells_values_dtypes_and_names_apart() -> None:
    model = fill(stored())
    before = parameter_hash(model)
    assert parameter_hash(fill(stored())) == before
    assert parameter_hash(fill(stored(), dtype=mx.bfloat16)) != before
    changed = stored()
    changed["conv.bias"][0] = np.nextafter(changed["conv.bias"][0], np.float32(9))
    assert parameter_hash(fill(changed)) != before


@pytest.mark.parametrize("same_bytes", [mx.zeros((3, 2)), mx.zeros((2, 3), mx.int32)])
def test_the_hash_tells_shapes_and_dtypes_of_equal_bytes_apart(same_bytes: mx.array) -> None:
    first, second = nn.Module(), nn.Module()
    first.weight, second.weight = mx.zeros((2, 3)), same_bytes
    assert parameter_hash(first) != parameter_hash(second)


def test_specs() -> None:
    assert parameter_specs(Toy()) == {
        "conv.weight": (4, 3, 3, 2),
        "conv.bias": (4,),
        "layers.0.weight": (3, 3),
        "layers.0.bias": (3,),
        "layers.1.weight": (5, 3),
    }
