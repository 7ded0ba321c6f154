"""How much space a run asks for before it writes: all that the set will still lack."""

from pathlib import Path

import pytest

from lydite.calibrate import run
from lydite.calibrate.run import HEADER, Sizes, require_space_for
from lydite.calibrate.settings import Plan
from lydite.calibrate.store.writer import Writer
from support.calibration import SETTINGS, STEPS, items, plan

SIZES = Sizes(sample=1000, picture=70, conditioning=20)
SAMPLES = len(STEPS) * (2 * 1000 + HEADER)  # of one image, in BF16
PICTURE, CONDITIONING = 70 + HEADER, 2 * 20 + HEADER


@pytest.fixture
def needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def ask(folder: Path, wanted: Plan) -> int:
        asked: list[int] = []
        monkeypatch.setattr(run, "require_space", lambda _, size: asked.append(size))
        require_space_for(folder, SETTINGS, wanted, SIZES)
        return asked[0]

    return ask


def test_every_kind_of_item_is_counted_with_its_size(needed, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert needed(new, plan(0)) == 0
    assert needed(new, plan(2, pictures=False)) == 2 * SAMPLES
    assert needed(new, plan(2)) == 2 * (SAMPLES + PICTURE)
    both = 2 * (SAMPLES + PICTURE + CONDITIONING)
    assert needed(new, plan(2, conditioning=True)) == both


def test_a_set_is_counted_with_all_that_it_plans_and_lacks(needed, tmp_path: Path) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(4)) as writer:
        writer.commit(items(writer.builder, 0))
    each = SAMPLES + PICTURE
    assert needed(tmp_path, plan(1)) == needed(tmp_path, plan(4)) == 3 * each
    assert needed(tmp_path, plan(6)) == 5 * each
    with Writer.start(tmp_path, SETTINGS, plan(4)) as writer:
        for number in (1, 2, 3):
            writer.commit(items(writer.builder, number))
    assert needed(tmp_path, plan(4)) == 0
