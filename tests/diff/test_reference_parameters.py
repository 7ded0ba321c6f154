"""Parameters of the reference: recorded ones before those of a checkpoint, a module's own alone."""

from pathlib import Path

import numpy as np
import pytest

from lydite.core.errors import FileError
from lydite.core.tensorfile import save
from lydite.diff import reference_parameters
from lydite.diff.reference_parameters import ParameterValues
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter


def trace(folder: Path, *names: str, **weights: np.ndarray) -> Trace:
    with TraceWriter(folder, Header()) as writer:
        for name in names:
            writer.add(name, np.zeros(3, np.float32))
        for name, value in weights.items():
            writer.add(name.replace("__", "/").replace("_", "."), value, kind="weight")
    return Trace.open(folder)


def file(path: Path, **tensors: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shapes = {"w": (2, 3), "b": (2,), "v": (2, 3)}
    arrays = {name.replace("_", "."): np.full(shapes[name[-1]], value, np.float32)
              for name, value in tensors.items()}  # fmt: skip
    save(path, arrays)
    return path


def test_a_module_has_its_own_parameters_and_others_of_their_shape(tmp_path: Path) -> None:
    recorded = trace(tmp_path / "ref", "net/a", "net/ab", "vae/a")
    file(tmp_path / "model/net/x.safetensors", a_w=1, a_b=2, a_c_w=3, ab_w=4, d_w=5, d_b=6)
    file(tmp_path / "model/vae/x.safetensors", a_w=7)
    (tmp_path / "model/pipeline").mkdir()  # no weights in it
    with ParameterValues(recorded, tmp_path / "model") as known:
        own = known.of_module("net/a")
        assert {name: value.flat[0] for name, value in own.items()} == {"w": 1, "b": 2}
        assert own["w"].dtype == np.float64 and own["w"].shape == (2, 3)
        assert {name: value.flat[0] for name, value in known.like("net/a", (2, 3))} == {
            "net/ab.w": 4, "net/d.w": 5,
        }  # fmt: skip
        assert [name for name, _ in known.like("net/a", (2,))] == ["net/d.b"]
        assert not list(known.like("vae/a", (2, 3))) and not known.of_module("net/e")
        assert not known.is_unused


def test_recorded_parameters_come_first_and_too_large_ones_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = trace(tmp_path / "ref", "net/a", net__a_w=np.full((2, 3), 9.0, np.float32))
    path = file(tmp_path / "x.safetensors", a_w=1, a_b=2)  # of the only network
    with ParameterValues(recorded, path) as known:
        assert known.of_module("net/a")["w"].flat[0] == 9 and known.of_module("net/a")["b"][0] == 2
        monkeypatch.setattr(reference_parameters, "MAX_VALUES", 6)
        assert known.of_module("net/a")["w"].size == 6
        monkeypatch.setattr(reference_parameters, "MAX_VALUES", 5)
        assert known.of_module("net/a")["w"].size == 0 and known.of_module("net/a")["b"].size == 2
    with ParameterValues(recorded) as known:
        assert set(known.of_module("net/a")) == {"w"} and not known.is_unused


def test_a_checkpoint_whose_names_nobody_recorded(tmp_path: Path) -> None:
    path = file(tmp_path / "x.safetensors", a_w=1)
    for names, unused in (
        (("net/b",), True),
        (("net/b", "net/a"), False),
        (("net/a", "vae/a"), True),
    ):
        folder = tmp_path / "-".join(names).replace("/", "")
        with ParameterValues(trace(folder, *names), path) as known:
            assert known.is_unused == unused
    with pytest.raises(FileError):
        ParameterValues(trace(tmp_path / "t", "net/a"), tmp_path / "none.safetensors")


def test_a_scope_may_name_a_part_of_a_component(tmp_path: Path) -> None:
    recorded = trace(tmp_path / "ref", "vae/encoder/conv")
    file(tmp_path / "model/vae/x.safetensors", encoder_conv_w=1)
    with ParameterValues(recorded, tmp_path / "model") as known:
        assert set(known.of_module("vae/encoder/conv")) == {"w"} and not known.is_unused
