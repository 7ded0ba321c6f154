"""Exports side by side: figures, warnings, and the pictures that are shown."""

import json
import re
import shutil
from base64 import b64decode
from dataclasses import replace
from html import unescape
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from lydite.cli.quantize.compare import command
from lydite.core.errors import FileError, InputError
from lydite.core.files import size_text
from lydite.evaluate.intervals import Summary
from lydite.evaluate.paired import SMALLEST_SSIM, psnr, ssim
from lydite.quantize import compare_exports
from lydite.quantize.compare_exports import (
    CANDIDATE,
    EVALUATION,
    RECORD,
    REFERENCE,
    Export,
    Pictures,
    Row,
    _chosen,
    _common,
    _measured,
    choose_pictures,
    differences,
    on_common_pictures,
    read_exports,
)
from lydite.report import quantization
from lydite.report.contact_sheets import png_bytes
from lydite.report.page import Callout, Figures, Page, Table, Text
from lydite.report.quantization import WIDEST, _cells, _mean, _short, page, table_rows
from support.exports import IMAGES, make_export
from support.png_pixels import png_pixels


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("exports")
    return [make_export(folder / "near", 1, method="gptq"), make_export(folder / "far", 4)]


def test_figures_are_those_of_the_records(folders: list[Path]) -> None:
    near, far = (export.figures() for export in read_exports(folders))
    assert near["export"] == "near" and near["method"] == "gptq"
    assert near["psnr"].mean > far["psnr"].mean + 6
    assert (near["units_improved"], near["units"], near["integers_changed"]) == (1, 3, 0.1875)
    assert near["latent_error"] is None
    psnr = near["psnr"]
    low, high = psnr.ci95
    cell = f"{psnr.mean:.2f} ({low:.2f} to {high:.2f})"
    assert low < psnr.mean < high and cell in table_rows(read_exports(folders))[0]


def test_the_worst_pictures_and_those_in_the_middle_are_shown(folders: list[Path]) -> None:
    chosen = choose_pictures(read_exports(folders))
    assert chosen is not None
    # the noise grows with the number
    assert [int(row.name) for row in chosen.worst] == [IMAGES - 1, IMAGES - 2]
    assert [int(row.name) for row in chosen.median] == [2, 1]
    assert all(row.psnr[0] > row.psnr[1] for row in chosen.worst)


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_no_picture_is_shown_twice_and_no_identical_one_among_the_worst(
    count: int, tmp_path: Path
) -> None:
    export = make_export(tmp_path / "q", 3, count=count)
    chosen = choose_pictures(read_exports([export]))
    assert chosen is not None
    worst, middle = ([row.name for row in rows] for rows in (chosen.worst, chosen.median))
    assert not set(worst) & set(middle) and len(worst) == min(3, -(-count // 3))
    same = make_export(tmp_path / "same", 0, count=count)
    exports = read_exports([same])
    chosen = choose_pictures(exports)
    assert chosen is not None and not chosen.worst and chosen.median
    assert "The worst pictures" not in page(exports, chosen, []).decode()


def test_exports_of_other_numbers_of_pictures_are_compared_on_those_that_all_have(
    folders: list[Path], tmp_path: Path
) -> None:
    fewer = make_export(tmp_path / "fewer", 2, count=IMAGES - 2)
    exports, notes = on_common_pictures(read_exports([*folders, fewer]))
    assert [export.metric("psnr").n for export in exports] == [3, 3, 3]  # type: ignore[union-attr]
    near, first = exports[0].metric("psnr"), read_exports(folders)[0].evaluation.worst
    assert near is not None
    expected = [pair.metrics["psnr"] for pair in first if int(pair.name) < 3]
    assert near.mean == pytest.approx(fmean(expected)) and near.min == min(expected)
    assert "near 5, far 5, fewer 3" in notes[0] and "the 3 pictures that all have" in notes[0]
    assert differences(exports, common=True) == []
    chosen = choose_pictures(exports)
    assert chosen is not None and {row.name for row in chosen.worst} <= {"000000", "000002"}
    names = [str(folder) for folder in (*folders, fewer)]
    result = CliRunner().invoke(command, names, catch_exceptions=False)
    assert "that all have" in result.output
    same, none = on_common_pictures(read_exports(folders))
    assert none == [] and same[0].metric("psnr") == read_exports(folders)[0].metric("psnr")
    bare = shutil.copytree(fewer, tmp_path / "bare")
    shutil.rmtree(bare / EVALUATION)
    exports, notes = on_common_pictures(read_exports([folders[0], bare]))
    (warning,) = differences(exports)
    assert notes == [] and "near was evaluated with 5 pictures, bare with 3" in warning
    assert "--eval-images 5" in warning


def test_figures_are_measured_again_of_the_pictures_that_are_named(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSIM needs pictures of its window's size; the latent error is that of the last step."""
    sizes = (SMALLEST_SSIM, 40), (40, SMALLEST_SSIM - 1), (40, 30)
    pairs: list[Any] = []
    for number, size in enumerate(sizes):
        one = np.random.default_rng(number).integers(60, 200, (*size, 3)).astype(np.uint8)
        pairs.append((f"{number:06}", one, one + np.uint8(1 + number)))
    reference: Any = SimpleNamespace(opened="reference")
    candidate: Any = SimpleNamespace(opened="candidate")
    asked: list[Any] = []

    def together(*words: Any) -> list[Any]:
        asked.append(words)
        return pairs

    def latents(*words: Any) -> Any:
        asked.append(words)
        return steps, np.array([[0.0, 0.5], [0.0, 0.25], [0.0, 0.0]])[:, : len(steps)]

    monkeypatch.setattr(compare_exports, "paired_pictures", together)
    monkeypatch.setattr(compare_exports, "latent_errors", latents)
    before, names = read_exports(folders)[0].evaluation, {"000000", "000001", "000002"}
    for steps in ((0, 4), ()):
        found = _measured(before, reference, candidate, names).paired
        assert found["psnr"].n == 3 and found["psnr"].max == psnr(*pairs[0][1:])
        values = [ssim(*pairs[number][1:]) for number in (0, 2)]
        assert found["ssim"].n == 2 and found["ssim"].mean == pytest.approx(fmean(values))
        assert ("latent_error" in found) == bool(steps)
        if steps:
            assert (found["latent_error"].mean, found["latent_error"].max) == (0.25, 0.5)
    assert asked[:2] == [(reference, candidate, names), ("reference", "candidate", {0, 1, 2})]


def test_which_pictures_are_shown() -> None:
    order = [f"{number}" for number in range(11)]
    assert _chosen(order, order) == (["0", "1", "2"], ["4", "5", "6"])
    assert _chosen(order[:1], order) == (["0"], ["4", "5", "6"])  # the others are identical
    assert _chosen([], order[:4]) == ([], ["1", "2"])
    assert _chosen(order[:2], order[:2]) == (["0"], ["1"])
    assert _chosen(order[:1], order[:1]) == (["0"], [])


def test_without_sets_there_are_no_pictures(folders: list[Path], tmp_path: Path) -> None:
    bare = [shutil.copytree(folder, tmp_path / folder.name) for folder in folders]
    shutil.rmtree(bare[0] / EVALUATION / REFERENCE)
    assert choose_pictures(read_exports(bare)) is not None  # the other has the same
    shutil.rmtree(bare[1] / EVALUATION / REFERENCE)
    assert choose_pictures(read_exports(bare)) is None
    original = folders[0] / EVALUATION / REFERENCE
    assert choose_pictures(read_exports(bare), original) is not None
    shutil.rmtree(bare[1] / EVALUATION / CANDIDATE)
    assert choose_pictures(read_exports(bare), original) is None


def test_exports_of_one_name_have_their_paths(folders: list[Path], tmp_path: Path) -> None:
    copy = shutil.copytree(folders[0], tmp_path / "near")
    assert [export.name for export in read_exports(folders)] == ["near", "far"]
    names = [export.name for export in read_exports([folders[0], copy])]
    assert names == [str(folders[0]), str(copy)]


def test_says_what_does_not_compare(folders: list[Path], tmp_path: Path) -> None:
    assert differences(read_exports(folders)) == []
    near, far = read_exports(folders)
    other = msgspec.structs.replace(far.provenance, source_hash="f" * 64)
    (warning,) = differences([near, replace(far, provenance=other)])
    assert warning == "far was made from another model than near."
    bare = replace(near, evaluation=msgspec.structs.replace(near.evaluation, paired={}))
    assert (near.pictures, bare.pictures) == (IMAGES, 0)
    for key in ("prompts", "seeds", "request"):
        changed: dict[str, Any] = {key: "another"}
        other = make_export(tmp_path / key, 1, **changed)
        exports = read_exports([*folders, other])
        (warning,) = differences(exports)
        assert warning == f"{key} was evaluated with other {key} than near."
        assert differences(exports, common=True) == ([warning] if key == "request" else [])
        assert len(differences(exports[::-1])) == 2  # both of the others differ from it


def test_refuses_records_that_break_a_rule(folders: list[Path], tmp_path: Path) -> None:
    broken = shutil.copytree(folders[0], tmp_path / "broken")
    (broken / RECORD).write_text("{}")
    with pytest.raises(FileError, match="not the record of an evaluation"):
        read_exports([broken])
    record = json.loads((folders[0] / RECORD).read_text())
    del record["paired"]["psnr"]
    (broken / RECORD).write_text(json.dumps(record))
    with pytest.raises(FileError, match="without PSNR"):
        read_exports([broken])
    (broken / RECORD).unlink()
    with pytest.raises(FileError, match="no such file"):
        read_exports([broken])


def test_one_table_one_page_and_json(folders: list[Path], tmp_path: Path) -> None:
    names = [str(folder) for folder in folders]
    page = tmp_path / "page.html"
    result = CliRunner().invoke(command, [*names, "--html", str(page)], catch_exceptions=False)
    assert result.exit_code == 0 and "near" in result.output
    html = page.read_text()
    assert html.count("data:image/png") == (2 + 2) * 3  # original and both exports
    assert "scene &lt;4&gt;" in html and "<4>" not in html
    result = CliRunner().invoke(command, [*names, "--json"], catch_exceptions=False)
    found = json.loads(result.output)
    assert [export["export"] for export in found["exports"]] == ["near", "far"]
    assert found["exports"][0]["psnr"]["ci95"]
    with pytest.raises(FileError, match="exists already"):
        CliRunner().invoke(command, [*names, "--html", str(page)], catch_exceptions=False)
    with pytest.raises(InputError, match="--html"):
        CliRunner().invoke(command, [*names, "--against", names[0]], catch_exceptions=False)


def test_the_page_holds_figures_pictures_and_records(folders: list[Path]) -> None:
    exports = read_exports(folders)
    html = page(exports, choose_pictures(exports), ["odd <sets>"]).decode()
    text = " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())
    for cell in (*table_rows(exports)[0], *table_rows(exports)[1]):
        assert cell in text
    assert "odd <sets>" in text and "2 exports of embedded" in text
    assert "The worst pictures" in text and "Pictures in the middle" in text
    assert "How each export was made" in text and "gptq" in text and "111111111111" in text
    assert "none to look at" not in text and f"PSNR {choose_psnr(exports):.2f}" in text
    bare = page(exports, None, []).decode()
    assert "none to look at" in bare and "data:image" not in bare


def test_each_chapter_of_the_page_shows_its_own_pictures(folders: list[Path]) -> None:
    exports = read_exports(folders)
    chosen = choose_pictures(exports)
    assert chosen is not None
    html = page(exports, chosen, []).decode()
    _, worst, middle, _ = re.split(r"</span>(?=The worst|Pictures in|Record)", html)
    for chapter, rows in ((worst, chosen.worst), (middle, chosen.median)):
        shown = re.findall(r"data:image/png;base64,([\w+/=]+)", chapter)
        drawn = [pixels for row in rows for pixels in (row.reference, *row.pictures)]
        assert [b64decode(text) for text in shown] == [png_bytes(pixels) for pixels in drawn]
        assert re.findall(r"PSNR ([\d.]+)", chapter) == [
            f"{value:.2f}" for row in rows for value in row.psnr
        ]


def test_each_column_of_the_page_is_of_its_own_export(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[Page] = []
    monkeypatch.setattr(quantization, "render", lambda one: pages.append(one) or b"")
    near, far = read_exports(folders)
    paired = {
        "psnr": Summary(30.0, 31.0, 2.0, (28.0, 33.0), 25.0, 36.0, 8),
        "ssim": Summary(0.5, 0.6, 0.1, (0.4, 0.7), 0.2, 0.9, 8),
        "latent_error": Summary(0.25, 0.2, None, None, 0.1, 0.4, 8),
    }
    near = replace(near, evaluation=msgspec.structs.replace(near.evaluation, paired=paired))
    made = msgspec.structs.replace(
        far.provenance, mlx="0.1", set_hash=None, method="rtn", settings={"rank": 4}, seed=5,
        changed={"a": 0.5}, units=[],
    )  # fmt: skip
    far = replace(
        far, provenance=made, evaluation=msgspec.structs.replace(far.evaluation, paired={})
    )
    wide = np.full((2, 2 * WIDEST, 3), 9, np.uint8)
    small = [np.full((2, 4, 3), level, np.uint8) for level in (10, 20)]
    rows = (
        Row("000001", "a star", wide, (small[0], small[1]), (30.25, 20.5)),
        Row("000000", "a ring", small[0], (small[1], wide), (1.0, 2.0)),
    )
    page([near, far], Pictures(rows[:1], rows[1:]), ["odd"])
    (shown,) = pages
    assert (shown.title, shown.lead) == ("embedded, quantized", "2 exports of embedded.")
    figures, worst, middle, record = shown.chapters
    warning, table = figures.blocks
    assert isinstance(warning, Callout) and (warning.text, warning.tone) == ("odd", "warn")
    assert isinstance(table, Table) and table.numeric == set(range(2, 10))
    assert dict(zip(table.head, table.rows[0], strict=True)) == {
        "export": "near", "method": "gptq", "bits per weight": "4.50", "size": "1000 bytes",
        "PSNR, mean": "30.00 (28.00 to 33.00)", "median": "31.00",
        "SSIM": "0.5000 (0.4000 to 0.7000)", "latent error": "0.25", "units improved": "1 of 3",
        "integers changed": "18.8 %",
    }  # fmt: skip
    assert table.rows[1] == (
        "far", "rtn", "4.50", "1000 bytes", "–", "–", "–", "–", "–", "50.0 %",
    )  # fmt: skip
    for chapter, row in ((worst, rows[0]), (middle, rows[1])):
        text, grid = chapter.blocks
        assert isinstance(text, Text) and text.text == row.prompt
        assert isinstance(grid, Figures) and grid.size == "small"
        one, other = (f"PSNR {value:.2f}" for value in row.psnr)
        captions = [(each.caption, each.note) for each in grid.items]
        assert captions == [("original", ""), ("near", one), ("far", other)]
        levels = [int(png_pixels(each.png).max()) for each in grid.items]
        assert levels == [int(each.max()) for each in (row.reference, *row.pictures)]
        widths = [png_pixels(each.png).shape[1] for each in grid.items]
        assert widths == [min(each.shape[1], WIDEST) for each in (row.reference, *row.pictures)]
    assert "worst" in worst.title.lower() and "middle" in middle.title
    (records,) = record.blocks
    assert isinstance(records, Table) and records.head == ("name", "near", "far")
    assert {name: cells for name, *cells in records.rows} == {
        "lydite, mlx": ["0.2, 0.32", "0.2, 0.1"],
        "model": ["embedded 000000000000"] * 2, "calibration set": ["1" * 12, "none"],
        "layers": ["2", "1"], "seed": ["0", "5"], "bits": ["4", "–"], "group": ["64", "–"],
        "rank": ["–", "4"],
    }  # fmt: skip
    page([near], None, [])
    assert [chapter.title for chapter in pages[1].chapters] == ["Figures", "Pictures", "Record"]
    assert "none to look at" in pages[1].chapters[1].lead and pages[1].lead.startswith("1 export ")
    page([near, far], Pictures((), rows[1:]), [])
    assert [chapter.title for chapter in pages[2].chapters][1:2] == ["Pictures in the middle"]


def choose_psnr(exports: list[Export]) -> float:
    chosen = choose_pictures(exports)
    assert chosen is not None
    return chosen.worst[0].psnr[0]


def test_a_cell_of_figures(folders: list[Path]) -> None:
    export = read_exports(folders)[0]
    made = msgspec.structs.replace(
        export.provenance, activations="simulated", units=[], bytes_after=2_500_000
    )
    for settings, inputs in (
        ({}, "in the format of the weights"),
        ({"act_bits": 8}, "in 8 bits"),  # as earlier versions wrote it
        ({"act_bits": 8, "act_groups": 3}, "in 8 bits with ranges for 3 groups of steps"),
    ):
        made = msgspec.structs.replace(made, settings=settings)
        cells = _cells(replace(export, provenance=made))
        assert cells[1] == f"gptq, activations {inputs}, simulated"
        assert replace(export, provenance=made).figures()["act_groups"] in (1, 3)
    assert cells[2] == "4.50" and cells[8] == "–"
    assert cells[3] == size_text(2_500_000) and cells[9] == "18.8 %" and cells[7] == "–"
    summary = Summary(1.5, 1.0, None, None, 1.0, 2.0, 1)
    assert _mean(summary, ".2f") == "1.50" and _mean(None, ".2f") == "–"
    assert _short(None) == "–" and len(_short("x" * 300)) == 202 and _short("x" * 200) == "x" * 200


def test_pictures_are_those_of_one_prompt_and_one_seed() -> None:
    def pictures(*images: tuple[int, str, int]) -> Any:
        numbered = [SimpleNamespace(number=n, prompt=text, seed=seed) for n, text, seed in images]
        plan = SimpleNamespace(images=numbered)
        return SimpleNamespace(opened=SimpleNamespace(plan=plan), where="set")

    one = pictures((0, "a", 1), (1, "b", 2), (2, "c", 3))
    assert _common([one, pictures((0, "a", 1), (1, "b", 9), (2, "d", 3))]) == {"000000"}
    with pytest.raises(InputError, match="no picture of one prompt and seed"):
        _common([one, pictures((0, "a", 2), (1, "c", 2), (3, "c", 3))])
