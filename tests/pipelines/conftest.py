"""Tiny pipelines of Stable Diffusion 1.x, 2.x and XL, each made once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sd_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant; tests that change one copy it."""
    from support import tiny_sd  # imports torch

    root = tmp_path_factory.mktemp("pipelines")
    return cache(lambda variant: tiny_sd.make_pipeline(root / variant, variant))
