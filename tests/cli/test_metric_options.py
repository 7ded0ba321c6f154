"""Which networks of metrics are loaded, and with what."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lydite.cli.evaluate.metric_options import read_metrics
from lydite.core.errors import InputError
from lydite.evaluate import features

PLAIN: dict[str, Any] = {
    "lpips": (), "inception": None, "clip": None, "resize": "clean", "no_cache": False,
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is loaded, as it is named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(features, "load_features", lambda *words, **more: (*words, more))
    monkeypatch.setattr(
        features, "load_lpips", lambda *words: SimpleNamespace(net=words[0], files=words[1:])
    )
    return lambda **given: read_metrics({**PLAIN, **given})


def test_only_what_is_asked_for_is_loaded(read: Any, tmp_path: Path) -> None:
    metrics = read()
    assert (metrics.networks.inception, metrics.networks.clip) == (None, None)
    assert metrics.networks.lpips == () and metrics.cache.is_relative_to(tmp_path)
    assert metrics.cache.name == "features" and read(no_cache=True).cache is None
    metrics = read(inception=Path("i"), resize="legacy_pytorch")
    assert metrics.networks.inception == ("inception", Path("i"), {"resize": "legacy_pytorch"})
    assert read(clip=Path("c")).networks.clip == ("clip", Path("c"), {})


def test_each_lpips_once(read: Any) -> None:
    both = read(lpips=(("alex", "a", "b"), ("vgg", "c", "d"))).networks.lpips
    assert [(one.net, one.files) for one in both] == [
        ("alex", (Path("a"), Path("b"))), ("vgg", (Path("c"), Path("d"))),
    ]  # fmt: skip
    with pytest.raises(InputError, match="each network once"):
        read(lpips=(("alex", "a", "b"), ("alex", "c", "d")))
    with pytest.raises(InputError, match="expected alex or vgg"):
        read(lpips=(("squeeze", "a", "b"),))
