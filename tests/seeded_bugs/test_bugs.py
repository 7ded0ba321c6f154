"""Every seeded bug does what it says: wrong first where the truth is, and gone afterwards."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from lydite.pipelines.pipeline import Pipeline
from seeded_bugs.cases import FILES, Bug, bugs, find_bug
from seeded_bugs.tiny_model import SEED
from support.distance import relative_l2
from support.module_values import SHORT, Values, identities, observe

ROUNDING = 2e-6  # of the other order of sums in forwards that are written out
# tables, positions and relative biases, which the reference makes inside
OURS_ONLY = ("in.1", "in.2", "in.3", "in.table")


@pytest.fixture(scope="module")
def clean(pipeline: Pipeline):
    return cache(lambda part: observe(pipeline, part))


def part_of(bug: Bug) -> str:
    if bug.part == "encode":
        return "encode"
    return "pipeline" if bug.step else bug.component


def differences(values: Values, clean: Values) -> dict[tuple[str, str, int, int], float]:
    """Relative difference of each value both runs have; another shape counts as 1."""
    return {
        place: relative_l2(value, clean[place]) if value.shape == clean[place].shape else 1.0
        for place, value in values.items()
        if place in clean and not place[1].startswith(OURS_ONLY)
    }


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.id)
def test_is_wrong_first_where_the_truth_is_and_leaves_nothing(pipeline, clean, bug: Bug) -> None:
    before, right = identities(pipeline), clean(part_of(bug))
    with bug.apply(pipeline):
        wrong = observe(pipeline, part_of(bug))
    assert all(a is b for a, b in zip(before, identities(pipeline), strict=True))
    found = differences(wrong, right)
    first = next((place for place, error in found.items() if error > ROUNDING), None)
    if not bug.seen_in:  # what another library's kernel may do as well
        assert max(found.values()) < 1e-5
        return
    assert first is not None, "nothing changed"
    truth = [right.get((*place, bug.step, 0)) for place in bug.site]
    same = [x is not None and np.array_equal(np.ravel(x), np.ravel(right[first])) for x in truth]
    assert first[:2] in bug.site or any(same), f"first wrong value at {first}"
    assert first[2] == bug.step


def test_truncation_shows_in_the_bytes_and_nowhere_else(pipeline: Pipeline) -> None:
    right = next(pipeline.generate(SHORT, [SEED])).pixels
    with find_bug("pixels-truncated").apply(pipeline):
        wrong = next(pipeline.generate(SHORT, [SEED])).pixels
    assert 0.3 < (right != wrong).mean() < 0.6
    assert (right - wrong).max() == 1


def test_everything_is_as_it_was_after_all_of_them(pipeline, clean) -> None:
    for part in ("pipeline", "transformer", "encode", "vae", "text_encoder"):
        again = observe(pipeline, part)
        assert again.keys() == clean(part).keys()
        assert all(np.array_equal(x, again[place]) for place, x in clean(part).items())


@pytest.mark.parametrize(
    "id", ["linear-transposed", "scale-missing", "sine-before-cosine", "modulation-without-silu"]
)
def test_an_exception_in_the_run_leaves_nothing_either(pipeline, id: str) -> None:
    before = identities(pipeline)
    with pytest.raises(ZeroDivisionError), find_bug(id).apply(pipeline):
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(before, identities(pipeline), strict=True))


def test_the_page_of_classes_marks_those_without_a_seeded_bug() -> None:
    page = Path(__file__).parents[2] / "docs" / "bug-classes.md"
    rows = re.findall(r"^\| ([A-G]\d+)( –)? \|", page.read_text(encoding="utf-8"), re.M)
    assert {number for number, unseeded in rows if not unseeded} == {
        bug.bug_class for model in FILES for bug in bugs(model)
    }


def test_the_bench_is_large_and_split() -> None:
    every = bugs()
    assert len({bug.id for bug in every}) == len(every) >= 40
    held_out = [bug for bug in every if bug.held_out]
    assert 0.2 < len(held_out) / len(every) < 0.35
    components = {bug.component for bug in every}
    assert components >= {"transformer", "vae", "text_encoder", "text_encoder_3", "pipeline"}
    assert all(bug.fix.endswith(".") for bug in every)
