"""A component and a model by their data alone: dtypes, bits, declared quantization, tokenizers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lydite.core.device import GPU_BRANCHES
from lydite.core.errors import ConfigError, WeightsError
from lydite.pipelines import model as models
from lydite.pipelines.model import Component, Kind, Model, default_dtype, folder_component
from lydite.weights.quantized_format import RANGE, Format


class Network(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wo = nn.Linear(4, 2, bias=False)
        self.blocks = [{"ff": nn.Linear(64, 8, bias=False)}]


class Config:
    """Hashable, as dataclasses are that are frozen."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def component(
    name: str = "transformer",
    formats: dict[str, Format] | None = None,
    declared: dict[str, Any] | None = None,
    *,
    quantized: bool = False,
    **config: Any,
) -> Component:
    kind = Kind(Config, Network, (), keep_float32=("*wo*",), quantized=quantized)
    made = Component(name, Path(name), kind, Config(**config), (), declared=declared)
    vars(made)["formats"] = formats or {}  # as if read off a file
    return made


def test_the_default_dtype_is_narrow_where_that_is_faster(
    on_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GPU_BRANCHES, raising=False)
    assert default_dtype() == "float32"
    monkeypatch.setenv(GPU_BRANCHES, "1")
    assert default_dtype() == "bfloat16"


@pytest.mark.parametrize(
    ("name", "config", "widens"),
    [
        ("vae", {}, True),
        ("vae", {"force_upcast": True}, True),
        ("vae", {"force_upcast": False}, False),
        ("unet", {}, False),
    ],
)
def test_a_vae_runs_in_float32_beside_float16_unless_its_config_denies_it(
    name: str, config: dict[str, Any], widens: bool
) -> None:
    part = component(name, **config)
    assert part.widens is widens
    for dtype in ("float16", "bfloat16", "float32"):
        model = Model(Path(), {name: part}, {}, {}, dtype)
        wide = dtype == "float32" or (widens and dtype == "float16")
        assert model.dtype_of(name) == (mx.float32 if wide else getattr(mx, dtype))


def test_bytes_in_memory() -> None:
    plain, rounded = component(), component(quantized=True)
    assert [plain.nbytes(dtype) for dtype in (mx.float32, mx.bfloat16)] == [4 * 520, 2 * 520]
    assert plain.nbytes(mx.float16) == 4 * 8 + 2 * 512  # *wo* stays in float32
    assert plain.nbytes(mx.bfloat16, 4) == 2 * 520  # its kind is not rounded
    packed = Format(4).nbytes((8, 64), 2)
    assert rounded.nbytes(mx.bfloat16, 4) == 2 * 8 + packed < 2 * 520
    stored = component(formats={"blocks.0.ff.weight": Format(8)}, quantized=True)
    assert stored.nbytes(mx.bfloat16, 4) == 2 * 8 + Format(8).nbytes((8, 64), 2)  # as in the file


FP4 = {"a.weight": Format(4, 16, "nvfp4")}
RANGED = {"a.weight": Format(4, 64, extras=(RANGE,))}


@pytest.mark.parametrize(
    ("formats", "declared", "products", "says"),
    [
        ({}, None, "mx.qqmm", None),
        (FP4, None, "mx.qqmm", None),
        (FP4, {"quantize_input": True}, "mx.qqmm", "rounded to nvfp4 by the products of this"),
        (FP4, {"quantize_input": True}, "simulated", "activations in nvfp4 are simulated"),
        (FP4, {"quantize_input": "true"}, "mx.qqmm", None),
        (FP4, {"quantize_input": False}, "mx.qqmm", None),
        (RANGED, None, "mx.qqmm", "activations in few bits are simulated"),
        (RANGED, {"quantize_input": True}, "mx.qqmm", "activations in few bits are simulated"),
        ({"a.weight": Format(4)}, {"quantize_input": True}, "mx.qqmm", None),
    ],
)
def test_how_inputs_are_rounded_is_said(
    formats: dict[str, Format],
    declared: dict[str, Any] | None,
    products: str,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "input_products", lambda _: products)
    part = component(formats=formats, declared=declared)
    assert part.rounds_inputs is (declared == {"quantize_input": True})
    found = part.rounding_of_inputs()
    assert found is None if says is None else says in (found or "")


def test_a_config_that_contradicts_its_file_is_refused() -> None:
    formats = {f"{n}.weight": Format(4) for n in "abcd"}
    component(formats=formats, declared={"bits": 4, "group_size": 64}).check_declared()
    component(formats=formats).check_declared()
    with pytest.raises(WeightsError, match=r"a: .*bits 8.*; c: .*and 1 more") as caught:
        component(formats=formats, declared={"bits": 8}).check_declared()
    assert "d:" not in str(caught.value)
    with pytest.raises(WeightsError, match="no weight of the file is quantized"):
        component(declared={"bits": 8}).check_declared()


def test_quantization_in_a_config_is_an_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "N", "quantization": 4}))
    with pytest.raises(ConfigError, match="quantization is 4; expected an object"):
        folder_component(tmp_path, {"N": component().kind})


def test_a_tokenizer_is_read_once_for_each_length() -> None:
    read: list[tuple[Path, int | None]] = []

    def load(folder: Path, length: int | None) -> Any:
        read.append((folder, length))
        return SimpleNamespace()

    model = Model(Path(), {}, {}, {"text_encoder": (Path("t"), load)})
    first = model.tokenizer("text_encoder", 7)
    assert model.tokenizer("text_encoder", 7) is first
    assert model.tokenizer("text_encoder") is not first
    assert read == [(Path("t"), 7), (Path("t"), None)]


@pytest.mark.parametrize("low_memory", [False, True])
def test_no_run_starts_on_weights_that_would_be_found_wrong_at_its_end(
    low_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(Component, "check", lambda part: done.append(f"check {part.name}"))
    monkeypatch.setattr(
        Component, "load", lambda part, *_: done.append(f"load {part.name}") or Network(None)
    )
    parts = {name: component(name) for name in ("unet", "vae")}
    model = Model(Path(), parts, {}, {}, low_memory=low_memory)
    model.prepare()
    word = "check" if low_memory else "load"
    assert done == [f"{word} unet", f"{word} vae"]
    assert model.loaded == (() if low_memory else ("unet", "vae"))
    model.network("vae")
    model.release("vae")
    assert ("vae" in model.loaded) != low_memory
    model.unload()
    assert model.loaded == ()


def test_what_a_config_declares_is_checked_before_weights_are_read() -> None:
    wrong = component(declared={"bits": 8})
    for use in (wrong.check, lambda: wrong.load(mx.float32)):
        with pytest.raises(WeightsError, match="no weight of the file is quantized"):
            use()


def test_the_largest_id_that_an_encoder_has_is_taken_and_no_larger_one() -> None:
    part = component("text_encoder", vocab_size=11)
    tokenizers: Any = {"text_encoder": (Path("t"), None)}
    model = Model(Path(), {"text_encoder": part}, {}, tokenizers)
    assert model.checked_ids("text_encoder", np.array([[0, 10]], np.int32)).tolist() == [[0, 10]]
    with pytest.raises(ConfigError, match="gives token 11, but text_encoder has only 11"):
        model.checked_ids("text_encoder", np.array([[0, 11]], np.int32))
