"""Quantized layers in files: recognised by their shapes, loaded as they are, or refused."""

from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lydite.core.errors import InputError, WeightsError
from lydite.models.layers import Linear, QuantizedLinear
from lydite.weights.audit import PACKED, audit, compare, digests
from lydite.weights.audit import stored as found_in
from lydite.weights.load import _check_input, load, parameter_hash, parameter_specs
from lydite.weights.quantized_format import (
    BIAS,
    BITS,
    DIVISOR,
    FORMATS,
    GROUPS,
    RANGE,
    SHIFT,
    TIMES,
    Format,
    Mode,
    contradictions,
    declaration,
    formats_for,
    is_inner,
    is_sensitive,
    stored_formats,
)
from support.memory_checkpoint import in_memory

INPUTS, ROWS, RANK = 128, 8, 4


class Toy(nn.Module):
    """One linear to quantize, one without a bias, one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Linear(INPUTS, ROWS)
        self.b = Linear(INPUTS, ROWS, bias=False)
        self.c = Linear(INPUTS, ROWS)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(bits: int = 4, group: int = 64, mode: Mode = "affine") -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "a.bias": normal(ROWS, seed=1),
        "c.weight": normal(ROWS, INPUTS, seed=2),
        "c.bias": normal(ROWS, seed=3),
    }
    for seed, name in enumerate("ab"):
        weight = mx.array(normal(ROWS, INPUTS, seed=4 + seed))
        parts = mx.quantize(weight, group_size=group, bits=bits, mode=mode)
        names = ("weight", "scales", "biases")
        arrays |= {f"{name}.{n}": np.array(x) for n, x in zip(names, parts, strict=False)}
    return arrays


def extras() -> dict[str, Any]:
    """What a layer may hold beside MLX's own arrays."""
    return {
        "a.input_range": np.array([0.05, 128, 255], np.float32),
        "a.input_shift": normal(INPUTS, seed=7),
        "a.input_divisor": np.full(INPUTS, 2, np.float32),
        "a.low_rank_down": normal(RANK, INPUTS, seed=8),
        "a.low_rank_up": normal(ROWS, RANK, seed=9),
    }


def unpacked(arrays: dict[str, Any], **options: Any) -> mx.array:
    """The values of the first weight."""
    weight, scales = mx.array(arrays["a.weight"]), mx.array(arrays["a.scales"])
    biases = mx.array(arrays["a.biases"]) if "a.biases" in arrays else None
    return mx.dequantize(weight, scales, biases, dtype=mx.float32, **options)


def loaded(arrays: dict[str, Any], dtype: mx.Dtype = mx.float32) -> Toy:
    model = Toy()
    load(model, in_memory(arrays), (), where="here", dtype=dtype)
    return model


def refusal(arrays: dict[str, Any]) -> str:
    model = Toy()
    before = parameter_hash(model)
    with pytest.raises(WeightsError) as caught:
        load(model, in_memory(arrays), (), where="here", dtype=mx.float32)
    assert parameter_hash(model) == before
    ledger = audit(in_memory(arrays), parameter_specs(model), (), where="here")
    assert str(caught.value).startswith("here: ") and "\n" not in str(caught.value)
    assert not ledger.clean or "NaN" in str(caught.value) or "Inf" in str(caught.value)
    return str(caught.value)


FLOATS = [n for n, array in (stored() | extras()).items() if array.dtype == np.float32]
CASES = [(mode, bits, group) for mode, (b, g) in FORMATS.items() for bits in b for group in g]


@pytest.mark.parametrize(("mode", "bits", "group"), CASES)
def test_every_format_is_recognised_and_computes_as_its_values(
    mode: Mode, bits: int, group: int
) -> None:
    arrays = stored(bits, group, mode)
    formats = found_in(in_memory(arrays), parameter_specs(Toy()), ()).formats
    assert formats == dict.fromkeys(("a.weight", "b.weight"), Format(bits, group, mode))
    model, x = loaded(arrays), mx.array(normal(3, INPUTS))
    assert isinstance(model.a, QuantizedLinear) and type(model.c) is Linear
    weight = unpacked(arrays, group_size=group, bits=bits, mode=mode)
    expected = x @ weight.T + mx.array(arrays["a.bias"])
    np.testing.assert_allclose(np.array(model.a(x)), np.array(expected), rtol=1e-4, atol=1e-4)


def test_scales_take_the_dtype_of_the_model_and_integers_stay() -> None:
    arrays = {**stored(), **extras()}
    arrays["a.scales"] = arrays["a.scales"].astype(ml_dtypes.bfloat16)
    model = loaded(arrays, mx.float16)
    parts: dict[str, Any] = dict(model.a.items())
    assert parts["scales"].dtype == mx.float16 and parts["weight"].dtype == mx.uint32
    assert parts["low_rank_up"].dtype == mx.float16
    assert parts["input_range"].dtype == parts["input_shift"].dtype == mx.float32
    np.testing.assert_array_equal(np.array(model.a.weight), arrays["a.weight"])


def test_ranges_for_groups_of_steps_are_read_with_their_times() -> None:
    steps = {
        "a.input_range": np.array([[0.05, 128, 255], [0.1, 0, 255]], np.float32),
        "a.input_times": np.array([500, 0], np.float32),
    }
    arrays = {**stored(), **steps}
    assert found_in(in_memory(arrays), parameter_specs(Toy()), ()).formats["a.weight"].steps == 2
    parts: dict[str, Any] = dict(loaded(arrays, mx.float16).a.items())
    for name in ("input_range", "input_times"):
        assert parts[name].dtype == mx.float32
        np.testing.assert_array_equal(np.array(parts[name]), arrays[f"a.{name}"])
    wrong = {**arrays, "a.input_times": np.array([0, 500], np.float32)}
    with pytest.raises(WeightsError, match="cannot round"):
        loaded(wrong)
    del arrays["a.input_times"]
    assert "1 missing (a.input_times" in refusal(arrays)
    arrays = {**stored(), "a.input_times": steps["a.input_times"]}
    assert "a.input_times" in refusal(arrays)


@pytest.mark.parametrize("rows", [3, 40])
def test_what_a_layer_holds_beside_its_weight_is_computed(rows: int) -> None:
    arrays = {**stored(), **extras()}
    model, x = loaded(arrays), normal(rows, INPUTS)
    weight = unpacked(arrays)
    u = (x - arrays["a.input_shift"]) / arrays["a.input_divisor"]
    u = (np.clip(np.rint(u / np.float32(0.05)) + 128, 0, 255) - 128) * np.float32(0.05)
    branch = x @ arrays["a.low_rank_down"].T @ arrays["a.low_rank_up"].T
    expected = u @ np.array(weight).T + branch + arrays["a.bias"]
    np.testing.assert_allclose(np.array(model.a(mx.array(x))), expected, rtol=1e-3, atol=1e-3)


def test_a_shift_brings_a_bias_to_a_layer_without_one() -> None:
    arrays = {**stored(), "b.input_shift": normal(INPUTS), "b.bias": normal(ROWS)}
    arrays["a.input_shift"] = arrays["b.input_shift"]
    formats = found_in(in_memory(arrays), parameter_specs(Toy()), ()).formats
    assert formats["a.weight"].extras == (SHIFT,) and formats["b.weight"].extras == (SHIFT, BIAS)
    model = loaded(arrays)
    np.testing.assert_array_equal(np.array(model.b.bias), arrays["b.bias"])
    del arrays["b.input_shift"]
    assert "1 unexpected (b.bias" in refusal(arrays)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.biases", "1 missing (a.biases: needed by its quantized weight)"),
        ("a.low_rank_up", "1 missing (a.low_rank_up: needed by its quantized weight)"),
        ("a.weight", "missing (a.weight"),
        ("a.bias", "1 missing (a.bias"),
        # without these the others are not recognised
        ("a.scales", "a.weight: stored as U32, expected a float type, or scales that fit it"),
        ("a.low_rank_down", "1 unexpected (a.low_rank_up"),
    ],
)
def test_a_missing_part_is_named(name: str, expected: str) -> None:
    arrays = {**stored(), **extras()}
    del arrays[name]
    assert expected in refusal(arrays)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("a.weight", (ROWS, 17)),
        ("a.weight", (ROWS - 1, 16)),
        ("a.scales", (ROWS, 3)),
        ("a.scales", (ROWS - 1, 2)),
        ("a.scales", (ROWS * 2,)),
        ("a.scales", (ROWS, 0)),
        ("a.biases", (ROWS, 1)),
        ("a.input_range", (2,)),
        ("a.input_shift", (1,)),
        ("a.low_rank_up", (ROWS, RANK + 1)),
        ("a.low_rank_down", (RANK, INPUTS - 1)),
        ("a.low_rank_down", ()),
    ],
)
def test_a_part_of_a_wrong_shape_is_named(name: str, shape: tuple[int, ...]) -> None:
    arrays = {**stored(), **extras()}
    arrays[name] = np.zeros(shape, arrays[name].dtype)
    assert name in refusal(arrays)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("a.weight", np.int32),
        ("a.weight", np.float32),
        ("a.scales", np.uint8),  # only formats without offsets have such scales
        ("a.scales", np.int64),
        ("a.biases", np.uint32),
        ("a.input_range", np.int32),
        ("a.low_rank_up", np.uint8),
    ],
)
def test_a_part_of_a_wrong_dtype_is_named(name: str, dtype: Any) -> None:
    arrays = {**stored(), **extras()}
    arrays[name] = arrays[name].astype(dtype)
    assert name in refusal(arrays)


def test_scales_of_a_format_without_offsets_are_bytes() -> None:
    arrays = stored(4, 32, "mxfp4")
    arrays["a.scales"] = arrays["a.scales"].astype(np.float32)
    assert "1 missing (a.biases" in refusal(arrays)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_no_number_is_refused_by_name(name: str, value: float) -> None:
    arrays = {**stored(), **extras()}
    arrays[name] = arrays[name].copy()
    arrays[name].flat[1] = value
    assert name in refusal(arrays)


@pytest.mark.parametrize(
    ("path", "inner", "sensitive"),
    [
        ("transformer_blocks.3.attn.to_q.weight", True, False),
        ("single_transformer_blocks.0.proj_mlp.weight", True, False),
        ("down_blocks.1.attentions.0.transformer_blocks.2.ff.net.2.weight", True, False),
        ("encoder.block.0.layer.1.DenseReluDense.wo.weight", True, False),
        ("layers.7.feed_forward.w1.weight", True, False),
        ("noise_refiner.0.attention.to_v.weight", True, False),
        ("transformer_blocks.3.norm1.linear.weight", True, True),
        ("transformer_blocks.3.img_mod.1.weight", True, True),
        ("layers.7.adaLN_modulation.0.weight", True, True),
        ("down_blocks.1.resnets.0.time_emb_proj.weight", True, True),
        ("proj_out.weight", False, False),
        ("transformer_blocks.3.attn.to_q.bias", False, False),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", False, False),
        ("text_model.encoder.layers.0.embed.weight", False, False),
        ("norm_out.linear.weight", False, True),
    ],
)
def test_which_weights_are_rounded_and_which_in_8_bits(
    path: str, inner: bool, sensitive: bool
) -> None:
    assert (is_inner(path), is_sensitive(path)) == (inner, sensitive)
    found = formats_for(4, {path: (64, 128), "blocks.0.odd.weight": (64, 100)})
    assert {name: each.bits for name, each in found.items()} == (
        {path: 8 if sensitive else 4} if inner else {}
    )
    with pytest.raises(InputError, match="bits is 7"):
        formats_for(7, {})


def test_rounding_again_is_refused() -> None:
    with pytest.raises(WeightsError, match="quantized already"):
        load(
            Toy(),
            in_memory(stored()),
            (),
            where="here",
            dtype=mx.float32,
            formats={"c.weight": Format(4)},
        )


def test_a_config_says_what_the_file_holds() -> None:
    formats = {
        "a.weight": Format(4, 64),
        "b.weight": Format(4, 64),
        "c.weight": Format(8, 32),
    }
    declared = declaration(formats)
    assert declared == {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "c": {"group_size": 32, "bits": 8, "mode": "affine"},
    }
    assert contradictions(declared, formats) == []
    assert contradictions({**declared, "a": False}, formats) == [
        "a: config.json says False, and the file holds it quantized"
    ]
    (wrong,) = contradictions({**declared, "c": {"group_size": 32, "bits": 4}}, formats)
    assert wrong == "c: config.json says bits 4, the file holds 8"
    assert len(contradictions({"group_size": 32, "bits": 4}, formats)) == 3
    assert "no weight of the file is quantized" in contradictions(declared, {})[0]


def test_of_formats_that_are_as_common_the_smallest_is_declared() -> None:
    """In every process: the order of a set of texts changes from one to the next."""
    formats = [Format(bits, group) for bits in BITS for group in GROUPS]
    declared = declaration({f"{i}.weight": each for i, each in enumerate(formats)})
    assert (declared["group_size"], declared["bits"]) == (min(GROUPS), min(BITS))


@pytest.mark.parametrize(("mode", "bits", "group"), CASES)
def test_sizes_are_those_of_the_arrays(mode: Mode, bits: int, group: int) -> None:
    arrays = stored(bits, group, mode)
    parts = [arrays.get(f"a.{n}") for n in ("weight", "scales", "biases")]
    size = sum(part.nbytes for part in parts if part is not None)
    chosen = Format(bits, group, mode)
    assert chosen.nbytes((ROWS, INPUTS), 4) == size
    halves = chosen.nbytes((ROWS, INPUTS), 2)
    assert chosen.bits_per_weight == 8 * halves / (ROWS * INPUTS)


@pytest.mark.parametrize(
    ("name", "fits", "wrong"),
    [
        (
            RANGE,
            [[1, 0, 1], [1e-9, 1, 1], [1, 0, 65535], [[1, 0, 255], [2, 3, 15]]],
            [[0, 0, 1], [-1, 0, 1], [1, -1, 1], [1, 2, 1], [1, 0, 0.5], [1, 0, 65536],
             [[1, 0, 255], [0, 0, 1]]],
        ),
        (DIVISOR, [[1, 1e-9]], [[1, 0], [-1, 1]]),
        (TIMES, [[500], [900, 500, 0]], [[500, 500], [0, 500]]),
        (SHIFT, [[0, -1]], []),
    ],
)  # fmt: skip
def test_roundings_of_inputs_that_no_program_writes(
    name: str, fits: list[Any], wrong: list[Any]
) -> None:
    for values in fits:
        _check_input(f"a.{name}", np.array(values, np.float32), "label", "where")
    for values in wrong:
        with pytest.raises(WeightsError, match=r"where: label: \[.* cannot round or divide inputs"):
            _check_input(f"a.{name}", np.array(values, np.float32), "label", "where")


@pytest.mark.parametrize(("quantized", "undecided"), [(False, 7), (True, 0)])
def test_quantized_layers_are_compared_only_with_quantized_ones(
    quantized: bool, undecided: int
) -> None:
    """Those of a full-precision reference are not wrong; the layer that stays is compared."""
    arrays = stored()
    plain = stored() | {f"{n}.weight": normal(ROWS, INPUTS, seed=4 + i) for i, n in enumerate("ab")}
    plain = {name: x for name, x in plain.items() if not name.endswith(("scales", "biases"))}
    specs = parameter_specs(Toy())
    other = in_memory(arrays if quantized else plain)
    reference = digests(other, specs, ())
    changed = arrays | {"c.bias": arrays["c.bias"] + 1}
    for file, different in ((arrays, []), (changed, ["c.bias"])):
        source = in_memory(file)
        ledger = compare(audit(source, specs, (), where="here"), source, specs, (), reference)
        assert [finding.tensor for finding in ledger.different] == different
        assert [finding.detail for finding in ledger.undecidable] == [PACKED] * undecided


@pytest.mark.parametrize(
    ("inputs", "words", "groups"),
    [(128, 13, 2), (260, 65, 8), (128, 16, 0), (128, 28, 2)],  # 3.25 bits, 32.5 a group, 0, 7 bits
)
def test_shapes_that_no_format_gives_are_not_quantized(
    inputs: int, words: int, groups: int
) -> None:
    def formats(inputs: int, words: int, groups: int) -> dict[str, Format]:
        found = {"a.weight": ("U32", (8, words)), "a.scales": ("F16", (8, groups))}
        return stored_formats(found, {"a.weight": (8, inputs)})

    assert formats(128, 16, 2) == {"a.weight": Format(4)}
    assert formats(inputs, words, groups) == {}
