from pathlib import Path

import pytest

from lydite.pipelines.pipeline import Pipeline
from seeded_bugs.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def pipeline(model: Path) -> Pipeline:
    return Pipeline.open(model)
