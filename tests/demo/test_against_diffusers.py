"""Two pictures compared, and the chapter where there is no second one."""

from pathlib import Path

import numpy as np
import pytest

from lydite import embedded
from lydite.demo.chapter import Settings
from lydite.demo.chapters import against_diffusers, contact_sheet
from lydite.demo.chapters.against_diffusers import FILES, compare
from lydite.demo.demo import Demo, Tick
from lydite.pipelines.picture import read_pixels
from lydite.reference.jobs import Job, ReferenceMissing
from lydite.trace import pipeline_sites
from lydite.trace.events import Header
from lydite.trace.writer import TraceWriter


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

    monkeypatch.setattr(against_diffusers, "run_job", missing)
    for name in FILES:
        (tmp_path / name).write_bytes(b"of an earlier run")
    result = against_diffusers.run(Demo(tmp_path, Settings(steps=2)), lambda: None)
    assert result.passed and result.fact is None
    assert "Skipped: torch is not installed; pip install" in result.lines[0]
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    demo = Demo(tmp_path_factory.mktemp("demo"), Settings(prompts=("star",), steps=1))
    contact_sheet.draw(demo, lambda: None)
    return demo


@pytest.mark.parametrize(
    ("apart", "words", "tone"),
    [
        (0, "equal in all 16,384 pixels", "good"),
        (1, "largest difference 1 of 255, 16,383 of 16,384 pixels equal", "good"),
        (2, "largest difference 2 of 255, 16,383 of 16,384 pixels equal", "warn"),
    ],
)
def test_the_difference_is_reported(
    demo: Demo, monkeypatch, apart: int, words: str, tone: str
) -> None:
    theirs = read_pixels(demo.folder / contact_sheet.picture_name(0)).astype(np.int64)
    theirs[5, 6, 1] += apart if theirs[5, 6, 1] < 128 else -apart
    monkeypatch.setattr(against_diffusers, "draw_reference", lambda *_: theirs.astype(np.uint8))
    result = against_diffusers.run(demo, lambda: None)
    assert result.lines[0].startswith(words) and result.passed
    assert result.fact and (result.fact.value, result.fact.tone) == (f"{apart} / 255", tone)
    assert all((demo.folder / name).is_file() for name in FILES)


def test_the_reference_draws_the_same_request(demo: Demo, monkeypatch) -> None:
    jobs: list[Job] = []

    def run_job(job: Job, tick: Tick) -> None:
        jobs.append(job)
        with TraceWriter(Path(job.outputs[0].folder), Header(side="reference")) as writer:
            writer.add(pipeline_sites.IMAGE, np.full((4, 5, 3), 0.5, np.float32))

    monkeypatch.setattr(against_diffusers, "run_job", run_job)
    run = demo.plan("star")
    pixels = against_diffusers.draw_reference(demo.pipeline, run, 7, lambda: None)
    assert np.array_equal(pixels, grey(128))
    assert (jobs[0].request, jobs[0].seed) == (run.request, 7)
    assert jobs[0].points == (pipeline_sites.IMAGE,) and Path(jobs[0].model) == embedded.MODEL
