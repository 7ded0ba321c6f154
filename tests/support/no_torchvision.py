"""Reference libraries that declare torchvision as a dependency, without it.

torchvision has no build for the torch of the tests. These packages lie in a folder of their own
(Makefile), because others that find them installed import the parts that need it.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(sys.prefix, "no_torchvision")


def import_reference(name: str) -> Any:
    """The module `package.module`, without the `__init__.py` of its package."""
    package = name.partition(".")[0]
    if not (FOLDER / package).is_dir():
        pytest.skip(f"{package} is not installed in {FOLDER.name}; `make .venv/tested` does it")
    shell = ModuleType(package)
    shell.__path__ = [str(FOLDER / package)]
    sys.modules[package] = shell
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[package]  # torchmetrics would take it for an installed package


def import_lpips(monkeypatch: pytest.MonkeyPatch, **networks: Callable[..., Any]) -> Any:
    """The package lpips with these functions as `torchvision.models`."""
    if not (FOLDER / "lpips").is_dir():
        pytest.skip(f"lpips is not installed in {FOLDER.name}; `make .venv/tested` does it")
    torchvision, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    vars(models).update(networks)
    vars(torchvision)["models"] = models
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    for module in [name for name in sys.modules if name.partition(".")[0] == "lpips"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("lpips")
