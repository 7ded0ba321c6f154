"""What a run computes on."""

from pathlib import Path

import pytest

from lydite.core import device


@pytest.mark.parametrize(("content", "share"), [("1048576\n", None), ("max\n", 1), (None, 1)])
def test_memory_is_the_machines_or_its_containers(
    content: str | None, share: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    if content is not None:
        limit.write_text(content)
    monkeypatch.setattr(device, "_CONTAINER", limit)
    found = device._main_memory()
    assert found > 2**20 if share else found == 2**20
