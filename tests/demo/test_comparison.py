"""Two pictures held against each other, and what is said when there is no second one."""

import numpy as np
import pytest
from lydite.demo.settings import Settings
from lydite.demo.studio import Studio
from lydite.reference.diffusers_sd3 import ReferenceMissing

from lydite.demo import comparison, sheet
from lydite.demo.comparison import FILES, compare


def grey(value: int) -> np.ndarray:
    return np.full((4, 5, 3), value, np.uint8)


def test_the_largest_difference_and_the_equal_pixels_are_counted() -> None:
    ours, theirs = grey(100), grey(100)
    theirs[1, 2, 0] = 103
    theirs[3, 3] = 99
    found = compare(ours, theirs)
    assert (found.largest, found.equal, found.gain) == (3, 18, 85)
    assert found.difference[1, 2].tolist() == [255] * 3
    assert found.difference[3, 3].tolist() == [85] * 3 and found.difference.sum() == 3 * (255 + 85)


@pytest.mark.parametrize(("low", "high"), [(0, 255), (255, 0)])
def test_differences_do_not_wrap_around(low: int, high: int) -> None:
    found = compare(grey(low), grey(high))
    assert (found.largest, found.equal, found.gain) == (255, 0, 1)
    assert (found.difference == 255).all()


def test_equal_pictures_differ_nowhere() -> None:
    found = compare(grey(7), grey(7))
    assert (found.largest, found.equal) == (0, 20) and not found.difference.any()


def test_without_diffusers_it_says_how_to_get_it_and_leaves_no_old_files(
    tmp_path, monkeypatch
) -> None:
    def missing(*arguments: object, **options: object) -> None:
        raise ReferenceMissing("torch is not installed; pip install 'lydite[reference]' adds it.")

    monkeypatch.setattr(comparison.diffusers_sd3, "draw", missing)
    for name in FILES:
        (tmp_path / name).write_bytes(b"of an earlier run")
    told = comparison.tell(Studio(tmp_path, Settings(steps=2)), lambda: None)
    assert told.fine and told.fact is None
    assert "Skipped: torch is not installed; pip install" in told.lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("apart", "words", "tone"),
    [
        (0, "equal in all 16,384 pixels", "good"),
        (1, "largest difference 1 of 255, 16,383 of 16,384 pixels equal", "good"),
        (2, "largest difference 2 of 255, 16,383 of 16,384 pixels equal", "warn"),
    ],
)
def test_a_difference_is_said_as_it_is(
    tmp_path, monkeypatch, apart: int, words: str, tone: str
) -> None:
    studio = Studio(tmp_path, Settings(prompts=("star",), steps=1))
    ours = sheet.draw(studio, lambda: None)[0].pixels
    theirs = ours.astype(np.int64)
    theirs[5, 6, 1] += apart if theirs[5, 6, 1] < 128 else -apart
    monkeypatch.setattr(comparison.diffusers_sd3, "draw", lambda *a, **k: theirs.astype(np.uint8))
    told = comparison.tell(studio, lambda: None)
    assert told.lines[0].startswith(words) and told.fine
    assert told.fact and (told.fact.value, told.fact.tone) == (f"{apart} / 255", tone)
    assert all((tmp_path / name).is_file() for name in FILES)
