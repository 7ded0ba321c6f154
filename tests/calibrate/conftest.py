"""Where the tests that flush thousands of times work, and a small model with a set of its own."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.pipelines.pipeline import Pipeline


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a disk in memory, where there is one: a flush costs nothing there."""
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> "Pipeline":
    """A small random model with both kinds of attention."""
    from support import replays

    return replays.loaded(replays.make_small(tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(scope="session")
def drawn(pipeline: "Pipeline", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of three images and nine samples, drawn with it."""
    from support import replays

    return replays.draw_set(tmp_path_factory.mktemp("sets") / "set", pipeline)


@pytest.fixture
def opened(drawn: Path) -> "Iterator[CalibrationSet]":
    """The same, open."""
    from lydite.calibrate.store.reader import CalibrationSet

    with CalibrationSet.open(drawn) as found:
        yield found


@pytest.fixture(scope="session")
def whole(drawn: Path, pipeline: "Pipeline", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of its activations."""
    from lydite.calibrate.activations.collect import Selection, collect
    from lydite.calibrate.store.reader import CalibrationSet

    path = tmp_path_factory.mktemp("statistics") / "whole.sqlite"
    with CalibrationSet.open(drawn) as found:
        assert collect(found, pipeline, path, Selection(group=32)) == 9
    return path
