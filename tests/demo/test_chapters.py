"""What each chapter says of right and of wrong results, without drawing them."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from PIL import ImageColor

from lydite.core import files
from lydite.core.errors import FileError
from lydite.demo import page
from lydite.demo.chapter import Result, Settings
from lydite.demo.chapters import (
    accuracy,
    against_diffusers,
    audit,
    contact_sheet,
    planted_bug,
    quantized,
    reproduce_from_png,
    steps,
)
from lydite.demo.demo import Demo, Drawn
from lydite.demo.scene_text import prompt_text, reading_text
from lydite.diff.result import Verdict
from lydite.embedded.captions import held_out_prompts
from lydite.embedded.scenes import SIDE
from lydite.evaluate.prompt_accuracy import ATTRIBUTES, Reading
from lydite.pipelines.family import Run
from lydite.pipelines.picture import Pixels, Record, read_pixels, read_record, write_picture
from lydite.pipelines.pipeline import Pipeline
from lydite.report.contact_sheets import MARK, Tile
from lydite.report.contact_sheets import contact_sheet as sheet_of
from lydite.report.page import Callout, Chapter, Commands, Exhibits, Fact, Figures, Fold, Table
from support.png_pixels import png_pixels

LARGEST = Settings()


def grey(level: int, side: int = SIDE) -> Pixels:
    return np.full((side, side, 3), level, np.uint8)


class Undrawn(Demo):
    """Every picture is grey, the level says its seed; the model only plans."""

    def draw(self, run: Run, seed: int, name: str, tick: Any, *, previews: bool = False) -> Drawn:
        request = run.request
        record = Record(
            request=request,
            seed=seed,
            model="embedded",
            model_hash="0123456789abcdef",
            dtype="float32",
        )
        write_picture(self.folder / name, grey(seed), record, overwrite=True)
        seen = tuple(grey(100 + n) for n in range(self.settings.steps)) if previews else ()
        return Drawn(request.prompt, seed, grey(seed), self.folder / name, seen)


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Undrawn(tmp_path, LARGEST)


def blocks(result: Result, kind: Any) -> list[Any]:
    return [block for block in result.chapter.blocks if isinstance(block, kind)]


def callout(result: Result) -> Callout:
    (found,) = blocks(result, Callout)
    return found


def levels(result: Result) -> list[tuple[str, int]]:
    """Each caption of a chapter, and which level of grey the picture above it has."""
    shown = [figure for figures in blocks(result, Figures) for figure in figures.items]
    found: list[tuple[str, int]] = []
    for figure in shown:
        (level,) = np.unique(png_pixels(figure.png)).tolist()
        found.append((figure.caption, level))
    return found


def test_the_audit_counts_what_is_wrong(monkeypatch: pytest.MonkeyPatch, demo: Demo) -> None:
    networks = (audit.Audited("vae", 1_500_000, 7, 1, 0), audit.Audited("text", 1_000, 3, 0, 0))
    for wrong, word, tone in ((0, "clean", "good"), (2, "NOT CLEAN, 2 wrong", "bad")):
        rows = (networks[0], replace(networks[1], wrong=wrong))
        monkeypatch.setattr(audit, "audited", lambda rows=rows: rows)
        result = audit.run(demo, lambda: None)
        assert result.lines == (f"10 tensors of 2 networks, 1.5 M parameters: {word}",)
        assert result.passed == (not wrong) and callout(result).tone == tone
        assert callout(result).text.startswith("2 tensors are wrong" if wrong else "Clean")
        assert result.fact == Fact("10", "tensors accounted for", "bad" if wrong else "note")
        (table,) = blocks(result, Table)
        assert table.rows == (
            ("vae", "1,500,000", "7", "1", "0"),
            ("text", "1,000", "3", "0", f"{wrong}"),
        )
        assert table.numeric == {1, 2, 3, 4}


def test_the_audit_is_of_all_parameters_of_the_embedded_model() -> None:
    networks = {each.name: each for each in audit.audited()}
    assert networks.keys() >= {"transformer", "vae", "text_encoder"}
    assert all(each.loaded and each.parameters > each.loaded for each in networks.values())
    assert not any(each.wrong for each in networks.values())


def _judged(*missed: str, level: int = 9) -> accuracy.Judged:
    prompt = held_out_prompts(1, 3)[0]
    marks = {name: [True, name not in missed] for name in ATTRIBUTES}
    marks["position"] = []  # never stated
    drawn = Drawn(prompt.text, 4, grey(level), Path("demo/held_out/05.png"))
    return accuracy.Judged(prompt, drawn, Reading((), (0, 0)), marks)


def test_misses_are_shown_and_counted(monkeypatch: pytest.MonkeyPatch, demo: Demo) -> None:
    for rest, misses in ((("color",), 1), ((), 0)):
        results = (_judged(level=1), _judged(*rest, level=2), _judged(level=3))
        monkeypatch.setattr(accuracy, "judged", lambda *_, results=results: results)
        result = accuracy.run(demo, lambda: None)
        text = results[0].prompt.text
        line = f"{3 - misses} of 3 match the prompt completely: {demo.folder / 'held_out.png'}"
        assert result.lines == (line, *[f"missed colour: “{text}”"] * misses)
        assert result.fact and result.fact.value == f"{3 - misses} / 3" and result.passed
        assert callout(result).tone == ("warn" if misses else "good")
        start = "1 of 3 missed something" if misses else "None of the 3 was missed"
        assert callout(result).text.startswith(start)
        rows = {row[0]: row[1:] for row in blocks(result, Table)[0].rows}
        assert rows["colour"] == (("5", "6", "83%") if misses else ("6", "6", "100%"))
        assert rows["everything at once"] == (("2", "3", "67%") if misses else ("3", "3", "100%"))
        assert "place" not in rows and len(rows) == len(ATTRIBUTES)
        (fold,) = blocks(result, Fold)
        figures = fold.blocks[0].items
        assert [figure.tone for figure in figures] == ["note", "bad" if misses else "note", "note"]
        assert [figure.note for figure in figures] == ["", "missed colour" if misses else "", ""]
        assert [png_pixels(figure.png).max() for figure in figures] == [1, 2, 3]
        framed = read_pixels(demo.folder / "held_out.png") == ImageColor.getrgb(MARK)
        assert framed.all(axis=2).any() == bool(misses)
        exhibits = [each for found in blocks(result, Exhibits) for each in found.items]
        assert len(exhibits) == misses == len(blocks(result, Exhibits))
        for exhibit in exhibits:
            assert png_pixels(exhibit.figure.png).max() == 2 and exhibit.title == f"“{text}”"
            details = dict(exhibit.details)
            assert details["asked"] == prompt_text(results[0].prompt.says)
            read = reading_text(results[0].reading, results[0].prompt.says)
            assert details["the judge reads"] == read
            assert dict(exhibit.details)["missed"] == "colour"
            assert dict(exhibit.details)["file"] == "held_out/05.png, seed 4"
            assert result.chapter.blocks[1] is blocks(result, Exhibits)[0]  # before the table


def test_sheets_have_the_columns_of_the_largest_demo(
    monkeypatch: pytest.MonkeyPatch, demo: Demo
) -> None:
    result = contact_sheet.run(demo, lambda: None)
    assert result.lines[0].startswith("12 pictures, ") and result.lines[0].endswith("sheet.png")
    figures = blocks(result, Figures)[0].items
    assert [figure.note for figure in figures] == [f"seed {n}" for n in range(12)]
    assert levels(result) == [(prompt, seed) for seed, prompt in enumerate(LARGEST.prompts)]
    assert [figure.caption for figure in figures] == list(LARGEST.prompts)
    assert result.fact and result.fact.value == "12" and "16 steps each" in result.chapter.lead
    names = [f"pictures/{n:02d}.png" for n in range(1, 13)]
    assert sorted(str(p.relative_to(demo.folder)) for p in demo.folder.rglob("*/*.png")) == names
    monkeypatch.setattr(accuracy, "judged", lambda *_: (_judged(),) * 36)
    accuracy.run(demo, lambda: None)
    steps.run(demo, lambda: None)
    for name, count, form in (
        ("sheet", 12, {"columns": 4, "side": 256}),
        ("held_out", 36, {"columns": 9, "side": 160, "text": 12}),
        ("steps", 16, {"columns": 8, "side": 160, "text": 13}),
    ):
        width, height = sheet_of([Tile(grey(0), "a")] * count, **form).size
        found = read_pixels(demo.folder / f"{name}.png").shape
        assert found[1] == width and abs(found[0] - height) < 160, name  # captions of more lines


def test_steps_are_numbered_and_say_how_noisy_their_input_is(demo: Demo) -> None:
    result = steps.run(demo, lambda: None)
    figures = blocks(result, Figures)[0].items
    assert [figure.caption for figure in figures] == [f"step {n}" for n in range(1, 17)]
    assert levels(result) == [(f"step {n + 1}", 100 + n) for n in range(16)]
    noises = [int(figure.note.removeprefix("noise ").removesuffix("%")) for figure in figures]
    assert noises[0] == 100 and noises == sorted(noises, reverse=True) and noises[-1] > 0
    assert result.lines == (f"“{LARGEST.prompts[2]}” in 16 steps: {demo.folder / 'steps.png'}",)
    assert "seed 2." in result.chapter.lead
    few = Undrawn(demo.folder, replace(LARGEST, prompts=("star",), steps=1))
    assert "seed 0." in steps.run(few, lambda: None).chapter.lead


@pytest.mark.parametrize("same", [True, False])
def test_a_replay_is_the_same_or_it_is_said(same: bool, demo: Demo) -> None:
    first = demo.draw(demo.plan(LARGEST.prompts[1]), 1, "pictures/02.png", lambda: None)
    if not same:
        write_picture(first.path, grey(2), read_record(first.path), overwrite=True)
    result = reproduce_from_png.run(demo, lambda: None)
    word = "identical" if same else "DIFFERENT"
    tone = "good" if same else "bad"
    assert result.lines == (f"pictures/02.png again: {word}",) and result.passed == same
    assert result.fact and (result.fact.value, result.fact.tone) == (word, tone)
    text = "Identical in every pixel." if same else "The two pictures differ."
    assert (callout(result).text, callout(result).tone) == (text, tone)
    assert levels(result) == [("first time", 1 if same else 2), ("replayed", 1)]
    rows = dict(blocks(result, Table)[0].rows)
    assert rows["guidance"] == f"{demo.plan('').request.guidance:g}"
    assert (rows["seed"], rows["steps"], rows["size"]) == ("1", "16", "128 × 128")
    assert rows["prompt"] == LARGEST.prompts[1] and rows["model"] == "embedded (0123456789)"
    assert blocks(result, Commands)[0].lines == ("lydite generate --from pictures/02.png",)


@pytest.mark.parametrize("apart", [0, 1, 2, 200])
def test_how_far_diffusers_is_apart_is_told(apart: int, demo: Demo) -> None:
    other = grey(9)
    other[0, 0, 1] += apart
    result = against_diffusers._result(demo, "star", against_diffusers.compare(grey(9), other))
    tone = "good" if apart < 2 else "warn"
    assert callout(result).tone == tone and result.fact and result.fact.tone == tone
    assert ("agree within 1" in callout(result).text) == (tone == "warn")
    amount = f"difference {apart} of 255, 16,383 of 16,384" if apart else "Equal in all 16,384"
    assert amount in callout(result).text and callout(result).text[0].isupper()
    figures = blocks(result, Figures)[0].items
    assert [figure.caption for figure in figures] == [
        "Lydite on MLX",
        "diffusers on torch",
        f"difference × {255 // max(apart, 1)}",
    ]
    assert [png_pixels(figure.png)[0, 0].tolist() for figure in figures] == [
        [9, 9, 9],
        [9, 9 + apart, 9],
        [255 // max(apart, 1) * apart] * 3,
    ]
    assert result.lines[0].endswith("difference.png")


@pytest.mark.parametrize(("site", "tone"), [(planted_bug.SITE, "good"), (None, "warn")])
def test_a_bug_is_found_at_its_place_or_that_is_said(site: str, tone: str, demo: Demo) -> None:
    rows: Any = (None,) * 1234
    verdict = Verdict("diverge", "It diverges.", site=site, rows=rows)
    result = planted_bug._result(demo, verdict, (grey(1), grey(2)))
    assert callout(result).tone == tone
    assert callout(result).text == f"It diverges. The bug was planted at {planted_bug.SITE}."
    assert result.lines[1].endswith("planted.png")
    assert levels(result) == [("as it should be", 1), ("with the planted bug", 2)]
    assert "among 1,234, without" in result.chapter.lead


def test_two_steps_are_recorded_with_and_without_the_bug(
    monkeypatch: pytest.MonkeyPatch, demo: Demo
) -> None:
    norm = demo.pipeline.model.network("transformer").transformer_blocks[1].norm1
    width = demo.pipeline.model.network("transformer").pos_embed.proj.weight.shape[0]
    x, table = mx.random.normal((1, 3, width)), mx.random.normal((1, 6, width))
    right, calls = type(norm), []

    def record(pipeline: Any, run: Run, seed: int, folder: Path, **_: Any) -> None:
        calls.append((run.steps, seed, type(norm) is right))
        (folder).mkdir()

    def generate(run: Run, seeds: list[int], **_: Any) -> Any:
        calls.append((run.steps, seeds[0], type(norm) is right))
        return iter([SimpleNamespace(pixels=grey(3))])

    def compare(reference: str, port: str) -> Verdict:
        calls.append((reference, port))
        return Verdict("diverge", "", site="x")

    monkeypatch.setattr(planted_bug, "record", record)
    monkeypatch.setattr(demo.pipeline, "generate", generate)
    monkeypatch.setattr(planted_bug.Trace, "open", lambda path: nullcontext(path.name))
    monkeypatch.setattr(planted_bug, "compare", compare)
    contact_sheet.draw(demo, lambda: None)
    result = planted_bug.run(demo, lambda: None)
    assert levels(result) == [("as it should be", 0), ("with the planted bug", 3)]
    assert (read_pixels(demo.folder / planted_bug.FILE) == 3).all()
    assert calls == [(16, 0, False), (2, 0, True), (2, 0, False), ("clean", "wrong")]
    assert type(norm) is right
    with planted_bug.planted_bug(demo.pipeline):
        wrong = norm(x, table)
    apart = norm(x, table) - wrong  # the 1 of 1 + scale
    np.testing.assert_allclose(np.array(apart), np.array(norm.norm(x)), atol=1e-5)


def test_announced_steps_are_those_of_the_settings() -> None:
    counts = {each.title: each.steps(LARGEST) for each in page.CHAPTERS}
    assert list(counts.values()) == [0, 12 * 16, 16, 36 * 16, 16, 16 + 4, 16 * (8 + 4 * 3), 16]
    one = replace(LARGEST, prompts=("star",), steps=1)
    assert planted_bug.CHAPTER.steps(one) == 3
    assert quantized.CHAPTER.steps(one) == 8 + 3


def test_methods_are_compared_by_their_mean_and_their_worst_picture() -> None:
    scores: Any = {"rtn": [30.0, 20.0], "gptq": [40.0, 36.0]}
    table = quantized._table(scores, {"rtn": 25.0, "gptq": 38.0})
    assert table.rows == (
        ("rounded to nearest", "25.0 dB", "20.0 dB"),
        ("by GPTQ", "38.0 dB", "36.0 dB"),
    )
    drawn: Any = {"rtn": [grey(1), grey(2)], "gptq": [grey(3), grey(4)]}
    figures = quantized._figures(("star", "ring"), [grey(5), grey(6)], drawn, scores)
    assert [(figure.caption, figure.note) for figure in figures] == [
        ("full precision", "star"),
        ("rounded to nearest: 30.0 dB", "star"),
        ("by GPTQ: 40.0 dB", "star"),
        ("full precision", "ring"),
        ("rounded to nearest: 20.0 dB", "ring"),
        ("by GPTQ: 36.0 dB", "ring"),
    ]
    assert len({figure.png for figure in figures}) == 6


def test_the_page_ends_in_commands_and_says_what_it_was_made_with(tmp_path: Path) -> None:
    results = [
        Result((), Chapter("first", "lead"), Fact("12", "of a fact")),
        Result((), Chapter("second", "lead")),
    ]
    assert all(result.passed for result in results)
    text = page.write_page(tmp_path, results).read_text()
    assert text.index("first") < text.index("second") < text.index("Now your own")
    assert "of a fact" in text and "lydite inspect YOUR-MODEL" in text
    assert "loads nothing from the internet" in text and ", MLX " in text


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise FileError(f"{folder}: no space.")

    monkeypatch.setattr(files, "try_folder", full)
    with pytest.raises(FileError, match="no space"):
        page.make_folder(tmp_path / "demo")


def test_the_demo_draws_in_float32_on_every_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "open", (opened := Mock()))
    pipeline = Demo(tmp_path, LARGEST).pipeline
    opened.assert_called_once_with("embedded", dtype="float32")
    pipeline.model.prepare.assert_called_once_with()  # type: ignore[attr-defined]
