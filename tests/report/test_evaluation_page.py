"""The page of an evaluation: its tables hold the figures, its pictures are those of the pairs."""

import base64
import io
import re
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
    _curve(replace(EMPTY, steps=steps))
    (chart,) = drawn
    assert {line.name: list(line.points) for line in chart.lines} == {
        "mean": [(3, 30.5), (5, 0.25)],
        "median": [(3, 31.25), (5, 0.2)],
        "worst picture": [(3, 36.0), (5, 0.4)],
        "interval, low": [(3, 28.0)],
        "interval, high": [(3, 33.0)],
    }
    assert chart.y_scale == "log"


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
