from pathlib import Path

import pytest

from lydite.pipelines.sd3 import StableDiffusion3
from lydite.zoo.subject import make_subject


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_subject(tmp_path_factory.mktemp("subject"))


@pytest.fixture(scope="session")
def pipeline(subject: Path) -> StableDiffusion3:
    return StableDiffusion3.load(subject)
