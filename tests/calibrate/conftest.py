"""Where the tests that flush thousands of times work, and a small model with a set of its own."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.small_set import drawn, opened, pipeline

if TYPE_CHECKING:
    from lydite.pipelines.pipeline import Pipeline

__all__ = ("drawn", "memory", "opened", "pipeline", "whole")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a disk in memory, where there is one: a flush costs nothing there."""
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def whole(drawn: Path, pipeline: "Pipeline", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of its activations."""
    from lydite.calibrate.activations.collect import Selection, collect
    from lydite.calibrate.store.reader import CalibrationSet

    path = tmp_path_factory.mktemp("statistics") / "whole.sqlite"
    with CalibrationSet.open(drawn) as found:
        assert collect(found, pipeline, path, Selection(group=32)) == 9
    return path
