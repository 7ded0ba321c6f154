"""Fixtures: a small random model, and a calibration set that was drawn with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.pipelines.pipeline import Pipeline


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> "Pipeline":
    """Two blocks, the first with both kinds of attention."""
    from support import replays

    return replays.loaded(replays.make_small(tmp_path_factory.mktemp("models") / "small"))


@pytest.fixture(scope="session")
def drawn(pipeline: "Pipeline", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images and nine samples."""
    from support import replays

    return replays.draw_set(tmp_path_factory.mktemp("sets") / "set", pipeline)


@pytest.fixture
def opened(drawn: Path) -> "Iterator[CalibrationSet]":
    """The same, open."""
    from lydite.calibrate.store.reader import CalibrationSet

    with CalibrationSet.open(drawn) as found:
        yield found
