"""Values and shapes on both sides of their limits; numbers of joined plans; open files."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lydite.calibrate.settings import Image, Plan
from lydite.calibrate.store import reader
from lydite.calibrate.store.merge import _joined
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.shards import Entry, TensorEntry
from lydite.calibrate.store.value_checks import LatentShapes, ValueLimits, value_problems
from support.calibration import draw

WAVE = np.linspace(-1, 1, 9, dtype=np.float32)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (WAVE, None), (WAVE * 1e4, None), (WAVE * 1.001e4, "values up to 1.001e+04"),
        (-WAVE * 1.001e4, "values up to"), (np.full(9, 3.0, np.float32), "all values are 3"),
        (WAVE[:1], None), (WAVE * 0.51e-6, None), (WAVE * 0.49e-6, "all values are"),
        (np.r_[WAVE, np.nan].astype(np.float32), "1 NaN and 0 Inf among 10 values"),
        (np.r_[WAVE, np.inf, -np.inf].astype(np.float32), "0 NaN and 2 Inf"),
        (np.arange(9), None), (np.full(9, 7), None), (np.full(9, 7, np.uint8), "all values are 7"),
        (np.zeros(0, np.float32), None),
    ],
)  # fmt: skip
def test_values_that_no_network_should_be_given(values: Any, problem: str | None) -> None:
    found = list(value_problems({"x": values}, ValueLimits()))
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(f"x: {problem}")


def entry(shape: tuple[int, ...] = (8, 4, 16), **changes: Any) -> Entry:
    tensors = {"x": TensorEntry(changes.pop("dtype", "F32"), shape, "")}
    return msgspec.structs.replace(Entry("k", "sample", "p", tensors, 0, 0, 0), **changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None), ({"shape": (16, 8, 4)}, None), ({"shape": (8, 8, 16)}, "x: expected height"),
        ({"shape": (4, 8, 16)}, "x: expected height"), ({"shape": (8, 4)}, "x: expected height"),
        ({"shape": (8, 4, 0)}, "x: expected"), ({"shape": (24, 12, 16)}, "x: expected height"),
        ({"sigma": 0.0}, None), ({"sigma": -1e-9}, "sigma is"), ({"sigma": 1e6}, None),
        ({"sigma": 1.1e6}, "sigma is"), ({"timestep": -1e6}, None), ({"timestep": -1.1e6}, "times"),
        ({"sigma": float("nan")}, "sigma is nan"), ({"dtype": "I32"}, "x: expected floats"),
        ({"tensors": {}}, "expected a latent x, found nothing"),
    ],
)  # fmt: skip
def test_shapes_and_noise_levels(changes: dict[str, Any], problem: str | None) -> None:
    found = LatentShapes({"height": 64, "width": 32}).problem(entry(**changes))
    assert found is None if problem is None else found and found.startswith(problem)


def test_pictures_have_the_size_of_the_run() -> None:
    shapes = LatentShapes({"height": 64, "width": 32})
    for shape, fits in (((64, 32, 3), True), ((32, 64, 3), False), ((64, 32, 4), False)):
        tensors = {"pixels": TensorEntry("U8", shape, "")}
        found = shapes.problem(Entry("k", "picture", "p", tensors, 0, 0))
        assert (found is None) == fits
    assert shapes.problem(Entry("k", "picture", "p", {}, 0, 0))
    blocks = {"blocks": 1, "height": 64, "width": 32}
    for conditions in ({}, {"height": 64}, {"height": 0, "width": 32}, blocks):
        assert LatentShapes(conditions).problem(entry((1, 2))) is None


def test_the_rare_shape_is_the_odd_one() -> None:
    shapes = LatentShapes({})
    for number, shape in enumerate(((2, 3), (4, 5), (4, 5))):
        shapes.problem(entry(shape, image=number))
    assert [label for label, _ in shapes.odd_shapes()] == ["image 0 step 0"]


def test_images_of_two_sets_keep_their_numbers_where_they_can() -> None:
    first = Plan((Image(0, "a", 0), Image(5, "b", 1)), (0, 4), pictures=False)
    second = Plan((Image(5, "c", 2), Image(1, "b", 1), Image(2, "d", 3)), (2,), conditioning=True)
    joined = _joined([first, second])
    assert {(image.number, image.prompt) for image in joined.images} == {
        (0, "a"), (5, "b"), (6, "c"), (2, "d"),
    }  # fmt: skip
    assert [image.number for image in joined.images] == [0, 2, 5, 6] and joined.steps == (0, 2, 4)
    assert joined.pictures and joined.conditioning
    assert not _joined([first]).conditioning and not _joined([first]).pictures


def test_only_some_shards_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_OPEN", 3)
    draw(tmp_path, 5)
    with CalibrationSet.open(tmp_path) as opened:
        for row in (*opened.rows("sample"), *opened.rows("picture")):
            opened.read(row)
            assert 1 <= len(opened._open) <= 3
        kept = list(opened._open.values())
        assert len(kept) == 3
    assert all(shard._file.closed for shard in kept) and not opened._open
