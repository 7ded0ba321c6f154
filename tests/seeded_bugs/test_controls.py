"""Controls do something different and change nothing beyond rounding."""

import numpy as np
import pytest

from lydite.pipelines.pipeline import Pipeline
from lydite.trace.reader import Trace
from seeded_bugs.cases import Control, controls
from seeded_bugs.recording import record_port
from support.distance import relative_l2
from support.module_values import identities, observe


@pytest.mark.parametrize("control", controls(), ids=lambda control: control.id)
def test_changes_nothing_beyond_rounding(pipeline, control: Control) -> None:
    clean, before = observe(pipeline, control.component), identities(pipeline)
    with control.apply(pipeline):
        other = observe(pipeline, control.component)
    assert all(a is b for a, b in zip(before, identities(pipeline), strict=True))
    shared = [place for place in other if place in clean and place[0] != "pipeline/image"]
    assert len(shared) > 0.5 * len(clean)
    errors = [relative_l2(other[place], clean[place]) for place in shared]
    assert max(errors) < (1e-12 if control.exact else 5e-6)


def test_there_are_enough() -> None:
    assert len({control.id for control in controls()}) == len(controls()) >= 10


@pytest.mark.parametrize("id", ["dump-channels-first", "dump-without-batch"])
def test_a_dump_in_another_layout_holds_the_same_numbers(
    pipeline: Pipeline, tmp_path, id: str
) -> None:
    (control,) = (control for control in controls() if control.id == id)
    record_port(pipeline, tmp_path / "plain")
    record_port(pipeline, tmp_path / "other", dump=control.dump)
    plain, other = Trace.open(tmp_path / "plain"), Trace.open(tmp_path / "other")
    first, second = (
        [event for event in trace.events if event.kind != "selftest"] for trace in (plain, other)
    )
    assert [event.id for event in first] == [event.id for event in second]
    changed = [(a, b) for a, b in zip(first, second, strict=True) if a.shape != b.shape]
    assert len(changed) > 20
    for a, b in changed[:20]:
        assert np.array_equal(np.sort(plain.read(a), axis=None), np.sort(other.read(b), axis=None))
