"""What holds for every command that a test of this folder runs in its own process."""

from collections.abc import Iterator

import pytest

from lydite.cli.progress import StepBar


@pytest.fixture(autouse=True)
def bars_end_at_their_total(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Progress that ends at 64 of 80, or at 80 of 64, tells a wrong time all along."""
    uneven: list[str] = []
    leave = StepBar.__exit__

    def check(self: StepBar, kind: type[BaseException] | None, *rest: object) -> None:
        leave(self, kind, *rest)  # type: ignore[arg-type]
        if kind is None and self._done != self._total:
            uneven.append(f"{self._done} of {self._total} {self._unit}s")

    monkeypatch.setattr(StepBar, "__exit__", check)
    yield
    assert not uneven
