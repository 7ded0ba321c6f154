"""quantization.json: written, read again, and refused where it breaks a rule."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lydite.core.errors import FileError
from lydite.quantize.provenance import NAME, read_provenance
from support.exports import PROVENANCE


def test_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(PROVENANCE.to_json())
    assert read_provenance(tmp_path) == PROVENANCE
    assert PROVENANCE.improved == 1


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
