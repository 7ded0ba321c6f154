"""quantization.json: written, read again, and refused where it breaks a rule."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lydite.core.errors import FileError
from lydite.quantize.provenance import NAME, method_text, read_provenance
from support.exports import PROVENANCE


def test_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(PROVENANCE.to_json())
    assert read_provenance(tmp_path) == PROVENANCE
    assert PROVENANCE.improved == 1
    assert PROVENANCE.summary == "gptq, 4.50 bits per weight, 1000 bytes instead of 3.9 KiB"
    assert (tmp_path / NAME).read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("rtn", None, None, 1), "rtn"),
        (("rtn", None, 8, 3), "rtn"),  # asked for, and not done
        (("gptq", "simulated", 8, 1), "gptq, activations in 8 bits, simulated"),
        (("gptq", "simulated", 4, 2),
         "gptq, activations in 4 bits with ranges for 2 groups of steps, simulated"),
        (("rtn", "mx.qqmm", None, 1), "rtn, activations in the format of the weights, mx.qqmm"),
    ],
)  # fmt: skip
def test_a_method_says_how_it_rounds_inputs(words: Any, text: str) -> None:
    assert method_text(*words) == text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source_hash", "abc"),
        ("changed", {}),
        ("changed", {"layer": 1.5}),
        ("units", [{"path": "a", "nearest": -1, "after": 0}]),
        ("activations", "real"),
        ("bits_per_weight", 0),
        ("unknown", 1),
    ],
)
def test_refuses_what_breaks_a_rule(tmp_path: Path, key: str, value: Any) -> None:
    raw = {**msgspec.to_builtins(PROVENANCE), key: value}
    (tmp_path / NAME).write_text(json.dumps(raw))
    with pytest.raises(FileError, match="not the record"):
        read_provenance(tmp_path)


def test_refuses_a_folder_without_it(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="lydite quantize"):
        read_provenance(tmp_path)
