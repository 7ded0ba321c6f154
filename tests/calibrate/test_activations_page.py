"""The page of statistics: what it says is what the file holds, and what it cannot say it leaves."""

import contextlib
import io
import re
import sqlite3
from html import unescape
from pathlib import Path

from PIL import Image

from lydite.calibrate.activations.collect import Selection, collect
from lydite.calibrate.activations.file import merge_files
from lydite.calibrate.activations.queries import read_curves
from lydite.calibrate.store.reader import CalibrationSet
from lydite.pipelines.pipeline import Pipeline
from lydite.report.activations import page, picture

MODULATION = "layer LIKE 'time_text_embed.%' OR layer GLOB '*norm*.linear'"


def words(path: Path) -> str:
    """The text of a page."""
    text = re.sub(r"<style>.*?</style>|<[^>]*>", " ", page(path).decode(), flags=re.DOTALL)
    return " ".join(unescape(text).split())


def most_drift(path: Path, where: str) -> float:
    """As the documentation asks for it in SQL."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute(
            "SELECT max(drift) FROM (SELECT max(p99_9 - p0_1) / min(p99_9 - p0_1) AS drift "
            f"FROM layers WHERE {where} GROUP BY layer, place)"
        ).fetchone()
    return found


def test_the_page_names_its_set_and_how_that_was_drawn(opened: CalibrationSet, whole: Path) -> None:
    told = words(whole)
    drawn = "euler, 3 steps, guidance 3, 64 × 64 pixels, computed in float32."
    assert f"Set {opened.content_hash[:12]}: {drawn}" in told
    assert "Part " not in told and "samples 9 places" in told and "steps 3 most" in told


def test_the_drift_on_the_cards_is_that_of_the_file(whole: Path) -> None:
    told = words(whole)
    most, modulation = most_drift(whole, f"NOT ({MODULATION})"), most_drift(whole, MODULATION)
    assert f"most drift over the steps, but for the modulation {most:.1f}×" in told
    assert f"most drift of the modulation {modulation:.1f}×" in told


def test_the_table_of_drift_has_the_first_and_the_last_step(whole: Path) -> None:
    curves, _ = read_curves(whole)
    curve = max(curves, key=lambda each: each.drift)
    first, last = (f"{curve.values['absmax'][at]:.4g}" for at in (0, -1))
    ranges = " ".join(f"{curve.spread[at]:.4g}" for at in (0, -1))
    assert first != last and f"{curve.drift:.2f} {ranges} {first} {last}" in words(whole)


def test_steps_that_are_counted_together_are_not_drawn_as_one_dot(
    opened: CalibrationSet, pipeline: Pipeline, tmp_path: Path
) -> None:
    path = tmp_path / "all.sqlite"
    collect(opened, pipeline, path, Selection(group_steps="all"))
    told = words(path)
    assert "All steps are counted together here" in told and "After GELU" in told
    for untold in ("Ranges over the steps", "drift", "widest", "Modulation"):
        assert untold not in told
    assert page(path).count(b"<img") == 1
    with Image.open(io.BytesIO(picture(path))) as drawn:
        assert drawn.height == 680


def test_parts_of_the_steps_and_of_the_samples_are_called_so(
    opened: CalibrationSet, pipeline: Pipeline, tmp_path: Path
) -> None:
    halves = [tmp_path / "a.sqlite", tmp_path / "b.sqlite"]
    for number, path in enumerate(halves, 1):
        collect(opened, pipeline, path, Selection(group_steps="2", part=(number, 2)))
    assert "Part 2 of 2 of its samples." in words(halves[1])
    assert b"over first step of a part for" in page(halves[1])
    merge_files(halves, tmp_path / "both.sqlite")
    told = words(tmp_path / "both.sqlite")
    assert f"Set {opened.content_hash[:12]}" in told and "Part " not in told
    assert "parts of the steps 2" in told
