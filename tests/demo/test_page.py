"""The demo's chapters on a few small pictures, and the page they end in."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lydite import embedded
from lydite.core.errors import FileError
from lydite.demo import page
from lydite.demo.chapter import PROMPTS, Result, Settings
from lydite.demo.chapters import against_diffusers, planted_bug, reproduce_from_png
from lydite.demo.chapters.accuracy import judged
from lydite.demo.demo import Demo
from lydite.diff.result import Verdict
from lydite.evaluate.prompt_accuracy import score
from lydite.pipelines.picture import read_pixels, read_record, write_picture
from lydite.reference.jobs import ReferenceMissing
from lydite.report.page import Chapter

FEW = Settings(prompts=("a red star", "<b>ring & star"), held_out=3, steps=2)


def no_reference(*arguments: object, **options: object) -> None:
    raise ReferenceMissing("torch is not installed; pip install 'lydite[reference]' adds it.")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo(page.make_folder(tmp_path_factory.mktemp("demo") / "new"), FEW)


@pytest.fixture(scope="module")
def results(demo: Demo) -> Iterator[dict[str, Result]]:
    """Every chapter's result by its title; its steps are as many as it announces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(against_diffusers, "run_job", no_reference)
        results: dict[str, Result] = {}
        for chapter in page.CHAPTERS:
            ticks: list[None] = []
            results[chapter.title] = chapter.run(demo, lambda ticks=ticks: ticks.append(None))
            assert results[chapter.title].chapter.title == chapter.title
            if chapter is not against_diffusers.CHAPTER:
                assert len(ticks) == chapter.steps(FEW), chapter.title
        yield results


def test_every_chapter_reports_its_findings(results: dict[str, Result]) -> None:
    lines = [line for result in results.values() for line in result.lines]
    assert any("tensors of 5 networks" in line and "clean" in line for line in lines)
    assert any("2 pictures" in line for line in lines)
    assert any("pictures/02.png again: identical" in line for line in lines)
    assert "one-plus-missing, found at its place: transformer/transformer_blocks.1.norm1" in lines
    assert all(result.passed for result in results.values())


def test_the_numbers_of_a_network_in_4_bits_are_told_the_right_way_round(
    results: dict[str, Result],
) -> None:
    result = results["The network in 4 bits"]
    numbers = re.fullmatch(
        r".* takes ([\d.]+) times less memory than in 16 bits.* rounds (\d+) % of .*",
        result.chapter.lead,
    )
    left = re.fullmatch(r"GPTQ leaves (\d+) % of the error .*", result.lines[0])
    assert numbers and 2 < float(numbers[1]) < 4 and 0 < int(numbers[2]) < 50
    assert left and result.fact and result.fact.value == f"{left[1]} %" and 0 < int(left[1]) < 100


def test_every_picture_is_a_file_that_can_be_replayed(demo: Demo, results: object) -> None:
    names = {str(path.relative_to(demo.folder)) for path in demo.folder.rglob("*.png")}
    pictures = {"pictures/01.png", "pictures/02.png", "again.png"}
    pictures |= {"held_out/01.png", "held_out/02.png", "held_out/03.png"}
    assert names == pictures | {"sheet.png", "steps.png", "held_out.png", "planted.png"}
    for name in pictures:
        record = read_record(demo.folder / name)
        assert (record.model, record.dtype) == (embedded.NAME, "float32")
        assert record.request.steps == 2
        assert read_pixels(demo.folder / name).shape == (128, 128, 3)
    assert read_record(demo.folder / "pictures/02.png").request.prompt == "<b>ring & star"


def test_the_page_holds_every_chapter_and_every_miss(
    demo: Demo, results: dict[str, Result]
) -> None:
    path = page.write_page(demo.folder, list(results.values()))
    html = path.read_text()
    assert path.name == "index.html"
    for title in results:
        assert title in html
    assert "&lt;b&gt;ring &amp; star" in html and "<b>ring" not in html
    assert "pip install &#39;lydite[reference]&#39;" in html
    assert "noise 100%" in html and "noise 0%" not in html  # of the input of each step
    assert "missed something" in html and "the judge reads" in html  # two steps draw only fog
    assert html.count("<img") == 2 + 2 + 3 + 2 + 6 + 2 + html.count('class="exhibit"')
    assert str(demo.folder) not in html  # it may be mailed


def test_kept_prompts_are_those_the_judge_scores(demo: Demo, results: dict[str, Result]) -> None:
    pictures = judged(demo, lambda: None)
    whole = score([one.reading for one in pictures], [one.prompt.says for one in pictures])
    kept = sum(not one.missed for one in pictures)
    assert kept == round(whole.everything * len(pictures)) < len(pictures)
    fact = results["Prompts it has not seen, judged"].fact
    assert fact and fact.value == f"{kept} / {len(pictures)}"


def test_previews_end_in_the_picture_itself(demo: Demo) -> None:
    drawn = demo.draw(demo.plan("star"), 3, "star.png", lambda: None, previews=True)
    assert len(drawn.previews) == 2
    assert np.array_equal(drawn.previews[-1], drawn.pixels)
    assert not np.array_equal(drawn.previews[0], drawn.pixels)


def test_a_picture_that_differs_from_its_replay_is_reported(demo: Demo, results: object) -> None:
    path = demo.folder / "pictures/02.png"
    kept = path.read_bytes()
    other = demo.draw(demo.plan("a blue heart"), 5, "other.png", lambda: None)
    write_picture(path, other.pixels, read_record(path), overwrite=True)
    try:
        result = reproduce_from_png.run(demo, lambda: None)
    finally:
        path.write_bytes(kept)
    assert not result.passed and "DIFFERENT" in result.lines[0]


@pytest.mark.parametrize("site", [planted_bug.SITE, "vae/decoder.conv_in", None])
def test_a_bug_that_is_not_found_at_its_place_is_reported(site: str | None, demo: Demo) -> None:
    picture = np.zeros((8, 8, 3), np.uint8)
    verdict = Verdict("diverge" if site else "agree", "", site=site)
    result = planted_bug._result(demo, verdict, (picture, picture))
    assert result.passed == (site == planted_bug.SITE) == ("not found" not in result.lines[0])


def test_prompts_of_the_sheet_are_read_to_their_end(demo: Demo) -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 12
    assert not any(demo.pipeline.truncated(demo.plan(prompt)) for prompt in PROMPTS)


@pytest.mark.parametrize("name", ["index.html", "sheet.png"])
def test_a_folder_that_holds_other_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("<title>my homepage</title>")
    with pytest.raises(FileError, match="holds files, and no page of an earlier demo"):
        page.make_folder(tmp_path)
    assert (tmp_path / name).read_text() == "<title>my homepage</title>"


def test_an_older_page_of_ours_is_replaced(tmp_path: Path) -> None:
    page.write_page(tmp_path, [])
    assert page.make_folder(tmp_path) == tmp_path
    result = Result((), Chapter("a newer chapter", ""))
    assert "a newer chapter" in page.write_page(tmp_path, [result]).read_text()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for path in (tmp_path / "taken", tmp_path / "taken" / "deeper"):
        with pytest.raises(FileError, match=r"(?i)not a (folder|directory)"):
            page.make_folder(path)
