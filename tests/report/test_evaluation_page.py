"""The page of an evaluation: its tables hold the figures, its pictures are those of the pairs."""

import base64
import io
import re
from collections.abc import Callable
from html import unescape
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from lydite.evaluate.evaluation import Distance, Evaluation, Pair, StepError
from lydite.evaluate.intervals import Summary
from lydite.evaluate.pictures import FolderPictures
from lydite.report import evaluation as module
from lydite.report.evaluation import SHOWN, WIDEST, _curve, _difference, page
from lydite.report.page import Callout, Comparisons, Figures, Page, Table, Text
from support.png_pixels import png_pixels

PSNR = Summary(30.5, 31.25, 2.5, (28.0, 33.0), 25.0, 36.0, 8)
LATENT = Summary(0.25, 0.2, None, None, 0.1, 0.4, 1)
EMPTY = Evaluation({}, {}, [], None, [], 0, [], {"pictures": 3})


def rows(html: str) -> list[tuple[str, ...]]:
    """The cells of every row of every table."""
    return [
        tuple(
            unescape(cell).strip() for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)
        )
        for row in re.findall(r"<tr>(.*?)</tr>", html, re.S)
    ]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[FolderPictures]:
    """Fourteen pairs; the candidate is brighter by the number of the pair."""
    folders = [tmp_path_factory.mktemp(name) for name in ("reference", "candidate")]
    for side, folder in enumerate(folders):
        for number in range(SHOWN + 2):
            width = 2 * WIDEST if number == 0 else 16
            pixels = np.full((8, width, 3), 100 + side * number, np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:02}.png")
    return [FolderPictures.open(folder) for folder in folders]


def write(evaluation: Evaluation, sides: list[FolderPictures]) -> str:
    return page(evaluation, *sides).decode()


def test_figures_with_intervals(sides: list[FolderPictures]) -> None:
    distribution = {
        "fid": Distance(12.5, (8, 9)),
        "prompt_accuracy": Distance(0.5, (8,), ci95=(0.25, 0.75)),
    }
    evaluation = replace(
        EMPTY, paired={"psnr": PSNR, "latent_error": LATENT}, distribution=distribution,
        flat_field=[{"steps": 4, "reference": 1.0, "candidate": 2.5}],
        identical=2, warnings=["be <careful>"],
        record={"pictures": {"pairs": 8}, "reference": {"model": "m", "dtype": "bf16"},
                "candidate": {"model": "m", "dtype": "f32", "bits": 4}, "nothing": None},
    )  # fmt: skip
    html = write(evaluation, sides)
    cells = rows(html)
    assert ("psnr", "30.5", "28 to 33", "31.25", "25", "2.5", "8") in cells
    assert ("latent_error", "0.25", "–", "0.2", "0.4", "–", "1") in cells
    assert ("fid", "12.5", "–", "8 and 9") in cells
    assert ("prompt_accuracy", "0.5", "0.25 to 0.75", "8") in cells
    assert ("4", "1.00", "2.50") in cells and ("candidate.bits", "4") in cells
    assert not [row for row in cells if row[0] == "nothing"]
    assert "be &lt;careful&gt;" in html and "2 pairs are identical" in html
    assert "m in f32, 4 bits against m in bf16" in html and "8 pairs of pictures" in html


@pytest.fixture
def made(sides: list[FolderPictures], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Page]:
    """The page of an evaluation before it is HTML."""
    pages: list[Page] = []
    monkeypatch.setattr(module, "render", lambda one: pages.append(one) or b"")
    monkeypatch.setattr(module, "draw", lambda chart: np.zeros((2, 2, 3), np.uint8))

    def make(evaluation: Evaluation, **options: str) -> Page:
        page(evaluation, *sides, **options)
        return pages[-1]

    return make


def test_each_chapter_has_its_own_blocks(made: Callable[..., Page]) -> None:
    whole = made(
        replace(
            EMPTY,
            paired={"psnr": PSNR, "latent_error": LATENT},
            distribution={"fid": Distance(12.5, (8, 9), ci95=(11.0, 14.0))},
            steps=[StepError(0, PSNR), StepError(1, LATENT)],
            growth=1.25,
            flat_field=[{"steps": 4, "reference": 1.0, "candidate": 2.5}],
            worst=[Pair("02", {"psnr": 40.0})],
            warnings=["odd"],
            identical=1,
        )
    )
    chapters = {chapter.title: chapter for chapter in whole.chapters}
    assert list(chapters) == ["Figures", "Error over steps", "Flat field", "Pairs", "Record"]
    warning, same, paired, sets = chapters["Figures"].blocks
    assert isinstance(warning, Callout) and (warning.text, warning.tone) == ("odd", "warn")
    assert isinstance(same, Callout) and same.tone == "good" and "1 pair" in same.text
    assert isinstance(paired, Table) and isinstance(sets, Table)
    assert dict(zip(paired.head, paired.rows[0], strict=True)) == {
        "paired": "psnr", "mean": "30.5", "95 % interval": "28 to 33", "median": "31.25",
        "worst": "25", "spread": "2.5", "pictures": "8",
    }  # fmt: skip
    assert dict(zip(paired.head, paired.rows[1], strict=True))["worst"] == "0.4"
    assert paired.numeric == {1, 2, 3, 4, 5, 6}
    assert dict(zip(sets.head, sets.rows[0], strict=True)) == {
        "sets": "fid", "value": "12.5", "95 % interval": "11 to 14", "pictures": "8 and 9",
    }  # fmt: skip
    assert sets.numeric == {1, 2}
    assert "grows" in chapters["Error over steps"].lead
    assert "Growth: 1.25 a step" in chapters["Error over steps"].lead
    (figures,), (flat,) = (chapters[title].blocks for title in ("Error over steps", "Flat field"))
    assert isinstance(figures, Figures) and figures.size == "whole"
    assert isinstance(flat, Table)
    assert dict(zip(flat.head, flat.rows[0], strict=True)) == {
        "steps": "4", "reference": "1.00", "candidate": "2.50",
    }  # fmt: skip
    assert flat.numeric == {0, 1, 2}
    assert "most damaged" in chapters["Pairs"].lead and "interval" in chapters["Figures"].lead
    assert [(fact.value, fact.label) for fact in whole.facts] == [
        ("30.5", "psnr, mean"), ("0.25", "latent_error, mean"),
    ]  # fmt: skip
    assert (whole.title, whole.lead) == ("candidate against reference", "3 pictures.")
    bare = made(replace(EMPTY, steps=[StepError(0, PSNR)] * 2))
    assert [chapter.title for chapter in bare.chapters] == ["Figures", "Error over steps", "Record"]
    assert bare.chapters[0].lead == "" and not bare.chapters[0].blocks
    assert "Growth" not in bare.chapters[1].lead and not bare.facts
    judge = made(replace(EMPTY, distribution={"frechet_judge": Distance(1.0, (1,))}))
    assert [type(block) for block in judge.chapters[0].blocks] == [Table, Text]
    other = made(replace(EMPTY, distribution={"fid": Distance(1.0, (1,))}))
    assert [type(block) for block in other.chapters[0].blocks] == [Table]


def test_a_pair_has_the_reference_above_and_the_candidate_below(
    made: Callable[..., Page], sides: list[FolderPictures]
) -> None:
    (chapter,) = (
        each
        for each in made(replace(EMPTY, worst=[Pair("05", {"psnr": 40.0}, seed=0)])).chapters
        if each.title == "Pairs"
    )
    (block,) = chapter.blocks
    assert isinstance(block, Comparisons)
    (pair,) = block.items
    pictures = [png_pixels(png) for png in (pair.reference, pair.candidate, pair.difference)]
    assert [int(picture.mean()) for picture in pictures] == [100, 105, 128 + 16 * 5]
    assert all(picture.shape == (8, 16, 3) for picture in pictures)  # none is enlarged
    assert (pair.title, pair.note) == ("05", "psnr 40, seed 0; difference × 16")
    one, other = (np.full((8, 8, 3), level, np.uint8) for level in (100, 90))
    assert (_difference(one, other)[1] == 128 - 80).all()  # darker: below grey


def test_the_record_shows_all_that_is_known(sides: list[FolderPictures]) -> None:
    """0, False, and nothing in a list are values; None is none."""
    record = {
        "pictures": {"pairs": 0, "reference": 3}, "seeds": {"first": 0, "last": None},
        "request": {"guidance": 0.0, "negative": "", "inner": {"deep": False}}, "list": [],
    }  # fmt: skip
    html = write(replace(EMPTY, record=record), sides)
    known = rows(html)
    assert known[known.index(("name", "value")) + 1 :] == [
        ("pictures.pairs", "0"), ("pictures.reference", "3"), ("seeds.first", "0"),
        ("request.guidance", "0.0"), ("request.negative", ""), ("request.inner.deep", "False"),
        ("list", "[]"),
    ]  # fmt: skip


def test_what_there_is_not_is_not_shown(sides: list[FolderPictures]) -> None:
    html = write(EMPTY, sides)
    assert "3 pictures." in html and "candidate against reference" in html
    single = replace(
        EMPTY, record={"pictures": 1}, distribution={"frechet_judge": Distance(0, (1,))}
    )
    html_of_one = page(single, *sides, title="q4: gptq").decode()
    assert "1 picture." in html_of_one and "<h1>q4: gptq</h1>" in html_of_one
    assert "Against reference." in html_of_one and "frechet_judge: Fréchet" in html_of_one
    for text in ("identical", "Flat field", "<img", "Error over steps", "95 % interval"):
        assert text not in html
    one = replace(EMPTY, steps=[StepError(0, PSNR)])
    assert "Error over steps" not in write(one, sides)
    assert "Error over steps" in write(replace(EMPTY, steps=[StepError(0, PSNR)] * 2), sides)
    assert "Two sets." in write(replace(EMPTY, record={"pictures": {"pairs": 0}}), sides)


def test_the_worst_pairs_with_their_pictures(sides: list[FolderPictures]) -> None:
    names = list(sides[0].names)
    worst = [Pair(name, {"psnr": 40.0 - int(name)}, seed=7) for name in reversed(names)]
    worst[1] = replace(worst[1], prompt="a <ring>", seed=None)
    html = write(replace(EMPTY, worst=worst), sides)
    images = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        for data in re.findall(r'base64,([^"]+)"', html)
    ]
    assert len(images) == 3 * SHOWN == 36 and "a &lt;ring&gt;" in html
    shown = [pair.name for pair in worst[:SHOWN]]
    for name, at in zip(shown, range(0, 3 * SHOWN, 3), strict=True):
        three = images[at : at + 3]
        plain = sorted(int(image.mean()) for image in three)
        difference = int(
            _difference(*(np.full((1, 1, 3), v, np.uint8) for v in plain[:2]))[1].mean()
        )
        assert plain[:2] == [100, 100 + int(name)] and plain[2] == difference
    notes = re.findall(r"psnr [^<]*", html)
    assert "seed 7" in notes[0] and "seed" not in notes[1] and "difference ×" in notes[0]
    wide = write(replace(EMPTY, worst=[Pair("00", {"psnr": 1.0})]), sides)
    sizes = {
        Image.open(io.BytesIO(base64.b64decode(data))).size
        for data in re.findall(r'base64,([^"]+)"', wide)
    }
    assert sizes == {(WIDEST, 4)}


def test_the_curve_is_of_steps_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    draw = module.draw
    monkeypatch.setattr(module, "draw", lambda chart: drawn.append(chart) or draw(chart))
    steps = [
        StepError(0, Summary(0, 0, 0, (0, 0), 0, 0, 8)),
        StepError(3, PSNR),
        StepError(5, LATENT),
    ]
    steps.append(StepError(6, replace(LATENT, median=0.0)))  # most pictures are without error
    _curve(replace(EMPTY, steps=steps))
    (chart,) = drawn
    assert [(line.name, list(line.points)) for line in chart.lines] == [
        ("mean", [(3, 30.5), (5, 0.25), (6, 0.25)]),
        ("median", [(3, 31.25), (5, 0.2), (6, 0.0)]),
        ("worst picture", [(3, 36.0), (5, 0.4), (6, 0.4)]),
        ("interval, low", [(3, 28.0)]),
        ("interval, high", [(3, 33.0)]),
    ]
    assert (chart.x_label, chart.x_scale, chart.y_scale) == ("step", "linear", "log")
    assert chart.y_label.startswith("relative error")
    _curve(replace(EMPTY, steps=[StepError(0, LATENT)] * 2))
    assert [line.name for line in drawn[1].lines] == ["mean", "median", "worst picture"]


@pytest.mark.parametrize(("by", "factor"), [(1, 32), (3, 32), (4, 16), (100, 1), (155, 1)])
def test_a_small_difference_is_enlarged(by: int, factor: int) -> None:
    one = np.full((4, 4, 3), 100, np.uint8)
    found, difference = _difference(one, np.full_like(one, 100 + by))
    assert found == factor and (difference == min(128 + factor * by, 255)).all()


def test_a_few_large_differences_do_not_hide_the_others() -> None:
    one = np.full((100, 100, 3), 100, np.uint8)
    for pixels, factor in ((5, 32), (20, 1)):  # of 10,000: below and above a thousandth
        other = one + np.uint8(1)
        other.reshape(-1, 3)[:pixels] += 120
        assert _difference(one, other)[0] == factor


def test_pairs_keep_their_order(sides: list[FolderPictures]) -> None:
    names = ["05", "02"]
    html = write(replace(EMPTY, worst=[Pair(name, {"psnr": 1.0}) for name in names]), sides)
    assert html.index(">05<") < html.index(">02<")
