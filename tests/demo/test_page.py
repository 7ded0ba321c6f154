"""The demo's chapters on a few small pictures, and the page they end in."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lydite.demo.parts import Told
from lydite.demo.settings import PROMPTS, Settings
from lydite.demo.studio import Studio
from lydite.reference.diffusers_sd3 import ReferenceMissing

from lydite import embedded
from lydite.core.errors import FileError
from lydite.demo import comparison, replay, story
from lydite.demo.accuracy import judged
from lydite.embedded.accuracy import score
from lydite.pipelines.images import read_pixels
from lydite.pipelines.metadata import read_record
from lydite.report.page import Chapter

FEW = Settings(prompts=("a red star", "<b>ring & star"), held_out=3, steps=2)


def no_reference(*arguments: object, **options: object) -> None:
    raise ReferenceMissing("torch is not installed; pip install 'lydite[reference]' adds it.")


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    return Studio(story.claim(tmp_path_factory.mktemp("demo") / "new"), FEW)


@pytest.fixture(scope="module")
def told(studio: Studio) -> Iterator[dict[str, Told]]:
    """Every chapter by its title, with the steps it was said to take counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison.diffusers_sd3, "draw", no_reference)
        chapters: dict[str, Told] = {}
        for part in story.PARTS:
            ticks: list[None] = []
            chapters[part.title] = part.tell(studio, lambda ticks=ticks: ticks.append(None))
            if part is not comparison.PART:
                assert len(ticks) == part.steps(FEW), part.title
        yield chapters


def test_every_chapter_says_what_it_found(told: dict[str, Told]) -> None:
    lines = [line for each in told.values() for line in each.lines]
    assert any("tensors of 5 networks" in line and "clean" in line for line in lines)
    assert any("2 pictures" in line for line in lines)
    assert any("pictures/02.png again: identical" in line for line in lines)
    assert "one-plus-missing, found at its place: transformer/transformer_blocks.1.norm1" in lines
    assert all(each.fine for each in told.values())


def test_every_picture_is_a_file_that_can_be_replayed(studio: Studio, told: object) -> None:
    names = {str(path.relative_to(studio.folder)) for path in studio.folder.rglob("*.png")}
    pictures = {"pictures/01.png", "pictures/02.png", "again.png"}
    pictures |= {"held_out/01.png", "held_out/02.png", "held_out/03.png"}
    assert names == pictures | {"sheet.png", "steps.png", "held_out.png", "planted.png"}
    for name in pictures:
        record = read_record(studio.folder / name)
        assert (record.model, record.steps, record.dtype) == (embedded.NAME, 2, "float32")
        assert read_pixels(studio.folder / name).shape == (128, 128, 3)
    assert read_record(studio.folder / "pictures/02.png").prompt == "<b>ring & star"


def test_the_page_holds_every_chapter_and_every_miss(studio: Studio, told: dict[str, Told]) -> None:
    page = story.write_page(studio.folder, list(told.values()))
    html = page.read_text()
    assert page.name == "index.html"
    for title in told:
        assert title in html
    assert "&lt;b&gt;ring &amp; star" in html and "<b>ring" not in html
    assert "pip install &#39;lydite[reference]&#39;" in html
    assert "missed something" in html and "the judge reads" in html  # two steps draw only fog
    assert html.count("<img") == 2 + 2 + 3 + 2 + 2 + html.count('class="exhibit"')
    assert str(studio.folder) not in html  # it may be mailed


def test_kept_prompts_are_those_the_judge_scores(studio: Studio, told: dict[str, Told]) -> None:
    results = judged(studio, lambda: None)
    whole = score([one.reading for one in results], [one.prompt.says for one in results])
    kept = sum(not one.missed for one in results)
    assert kept == round(whole.everything * len(results)) < len(results)
    fact = told["Prompts it has not seen, judged"].fact
    assert fact and fact.value == f"{kept} / {len(results)}"


def test_previews_end_in_the_picture_itself(studio: Studio) -> None:
    request = studio.request("star")
    drawn = studio.draw(request, 3, "star.png", lambda: None, previews=True)
    assert len(drawn.previews) == 2
    assert np.array_equal(drawn.previews[-1], drawn.pixels)
    assert not np.array_equal(drawn.previews[0], drawn.pixels)


def test_a_picture_that_comes_out_otherwise_is_said(studio: Studio, told: object) -> None:
    path = studio.folder / "pictures/02.png"
    kept = path.read_bytes()
    other = studio.draw(studio.request("a blue heart"), 5, "other.png", lambda: None)
    from lydite.pipelines.metadata import write_png

    write_png(path, other.pixels, read_record(path))
    try:
        result = replay.tell(studio, lambda: None)
    finally:
        path.write_bytes(kept)
    assert not result.fine and "DIFFERENT" in result.lines[0]


def test_prompts_of_the_sheet_are_read_to_their_end(studio: Studio) -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 12
    for encoder in ("text_encoder", "text_encoder_2"):
        tokenizer = studio.pipeline.files.tokenizer(encoder)
        assert not any(tokenizer.truncated(prompt) for prompt in PROMPTS)


def test_a_folder_that_holds_a_strangers_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<title>my homepage</title>")
    with pytest.raises(FileError, match=r"index.html: is there already and was not made by"):
        story.claim(tmp_path)
    assert (tmp_path / "index.html").read_text() == "<title>my homepage</title>"


def test_an_older_page_of_ours_is_replaced(tmp_path: Path) -> None:
    story.write_page(tmp_path, [])
    assert story.claim(tmp_path) == tmp_path
    told = Told((), Chapter("a newer chapter", ""))
    assert "a newer chapter" in story.write_page(tmp_path, [told]).read_text()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for path in (tmp_path / "taken", tmp_path / "taken" / "deeper"):
        with pytest.raises(FileError, match="cannot hold the demo"):
            story.claim(path)
