"""The page of a comparison: complete, safe with any names, the first wrong value visible."""

import base64
import hashlib
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from PIL import Image, ImageColor

from lydite.core.errors import FileError
from lydite.diff.compare import compare
from lydite.diff.name_map import read_name_map
from lydite.diff.result import Finding, Gate, Row, Verdict
from lydite.report.diff.heat_maps import NOT_FINITE
from lydite.report.diff.page import (
    MAX_CONDITION,
    MAX_LINES,
    MAX_NAMES,
    NARROW,
    TONES,
    WIDE,
    WORDS,
    _checks,
    _conditions,
    _facts,
    _headline,
    _listed,
    _names,
    _sections,
    _sentence,
    _where,
    render_page,
    write_page,
)
from lydite.report.diff.pictures import LONGEST, _worst
from lydite.report.diff.read_values import Sides, apart
from lydite.report.diff.row_text import first_wrong
from lydite.report.diff.wrong_value import show_value
from lydite.report.page import Fold, Table, Text
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import Capture, TraceWriter
from support.toy_transformer import record

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)></style>&amp;{{ 7 * 7 }}"
SITE = "net/blocks.2.attn.to_v"


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, tag: str, attribute: str) -> list[str]:
        return [
            str(attrs[attribute]) for name, attrs in self.tags if name == tag and attribute in attrs
        ]

    def image(self, alt: str) -> np.ndarray:
        images = [attrs for tag, attrs in self.tags if tag == "img" and "src" in attrs]
        (source,) = (str(attrs["src"]) for attrs in images if alt in str(attrs["alt"]))
        image = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
        return np.asarray(image.convert("RGB"))


def page(reference: Path, port: Path) -> tuple[Verdict, Page]:
    with Trace.open(reference) as expected, Trace.open(port) as trace:
        verdict = compare(expected, trace)
        return verdict, Page(render_page(verdict, expected, trace))


def write(folder: Path, values: dict[str, Any], dims: str | None = None, **more: Any) -> Path:
    with TraceWriter(folder, Header(side="reference", dtype="float32"), **more) as writer:
        for name, value in values.items():
            writer.add(name, value, dims=dims)
    return folder


def row(site: str = "a", error: float | None = 1e-7, **more: Any) -> Row:
    wrong = error is None or not error < 1e-5
    default = Row(site, site, "out", 0, 0, "activation", (2, 3), "f32", error, 1e-7, 1e-6, wrong)
    return replace(default, **more)


def at_row(rows: list[Row], index: int) -> Verdict:
    it = rows[index]
    return Verdict(
        "diverge", "It diverges.", site=it.site, port_site=it.port_site, slot=it.slot,
        step=it.step, error=it.error, floor=it.floor, limit=it.limit, rows=tuple(rows),
    )  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("toy") / "ref", side="reference")


@pytest.fixture(scope="module")
def buggy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("toy") / "port", bug="transpose", shuffle=True)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace.open(write(tmp_path_factory.mktemp("empty") / "run", {"z": np.zeros(1)}))


def test_a_divergence(reference: Path, buggy: Path, tmp_path: Path) -> None:
    verdict, shown = page(reference, buggy)
    text = shown.text.replace("\N{NON-BREAKING HYPHEN}", "-")
    assert "They diverge" in text and f"{SITE} is the first wrong value" in text
    first = next(index for index, row in enumerate(verdict.rows) if row.wrong)
    links = shown.values("a", "href")
    assert links.count(f"#r{first}") == 2  # in the wide curve and in the narrow one
    assert {f"#r{index}" for index, row in enumerate(verdict.rows) if row.wrong} <= set(links)
    opened = [attrs for tag, attrs in shown.tags if tag == "details" and "open" in attrs]
    assert len(opened) == 5  # net, blocks, 2, attn, to_v
    for side in ("reference", "port", "port − reference"):
        assert any(alt.startswith(f"heat map, {side}:") for alt in shown.values("img", "alt"))

    path = tmp_path / "new" / "diff.html"
    with Trace.open(reference) as expected, Trace.open(buggy) as trace:
        write_page(path, verdict, expected, trace)
        assert SITE in path.read_text() and list(path.parent.iterdir()) == [path]
        with pytest.raises(FileError):
            write_page(tmp_path, verdict, expected, trace)


def test_nothing_is_fetched_and_one_script_runs(reference: Path, buggy: Path) -> None:
    with Trace.open(reference) as expected, Trace.open(buggy) as trace:
        html = render_page(compare(expected, trace), expected, trace)
    shown = Page(html)
    assert not {"link", "iframe", "object", "base", "form"} & {tag for tag, _ in shown.tags}
    for _, attributes in shown.tags:
        for name in ("src", "href", "srcset", "action", "poster", "xlink:href"):
            assert str(attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
        assert not [name for name in attributes if name.startswith("on")]
    assert not [word for word in ("http:", "https:", "url(", "@import") if word in html]
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (a["content"] for t, a in shown.tags if t == "meta" and "http-equiv" in a)
    assert f"script-src 'sha256-{digest}'" in str(policy) and "default-src 'none'" in str(policy)


def test_any_name_is_shown_as_text(tmp_path: Path) -> None:
    long = "x" * 900
    names = (EVIL, long, "." * 900, "a//b..c")
    header = Header(conditions={EVIL: EVIL, "prompt": EVIL}, framework=EVIL[:99])
    for side in ("ref", "port"):
        with TraceWriter(tmp_path / side, header) as writer:
            for name in names:
                scale = 1 if side == "ref" else 2
                writer.add(name, scale * np.ones((2, 3, 4), np.float32), slot=f"out.{EVIL}")
    rows = [row(name, 1.0, slot=f"out.{EVIL}", note=EVIL) for name in names]
    rows += [row(EVIL, 1.0, port_site=f"port {EVIL}"), row(long, None)]
    verdict = replace(
        at_row(rows, 0),
        sentence=EVIL, last_agreement=EVIL, remarks=(EVIL,), health=(EVIL,), floor_source=EVIL,
        findings=(Finding(EVIL, EVIL, EVIL),), gates=(Gate(EVIL, False, EVIL),),
        unpaired_reference=(EVIL,), unpaired_port=(EVIL,) * 500, sources=(rows[0],),
    )  # fmt: skip
    shown = Page(render_page(verdict, Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port")))
    assert [tag for tag, _ in shown.tags].count("script") == 1
    assert not [True for _, attrs in shown.tags if "onerror" in attrs or attrs.get("src") == "x"]
    assert shown.text.count(EVIL) > 20 and long in shown.text


def test_an_agreement_shows_its_largest_error(reference: Path, tmp_path: Path) -> None:
    verdict, shown = page(reference, record(tmp_path / "port", shuffle=True))
    assert verdict.verdict == "agree" and "They agree" in shown.text
    assert "The largest error" in shown.text
    assert shown.values("use", "class").count("wrong") == 1  # in the legend


def test_runs_that_cannot_be_compared(reference: Path, tmp_path: Path) -> None:
    port = record(tmp_path / "port", conditions={"prompt": "a moon", "steps": 2})
    verdict, shown = page(reference, port)
    assert verdict.verdict == "cannot-compare" and "✗ failed" in shown.text
    assert "≠\N{NO-BREAK SPACE}prompt" in shown.text and "tree" not in shown.values("div", "class")


@pytest.mark.parametrize(("bug", "words"), [("shift", "value over position"), ("pad", "2 of 10")])
def test_a_failed_gate_shows_what_differs(
    bug: str, words: str, reference: Path, tmp_path: Path
) -> None:
    _, shown = page(reference, record(tmp_path / "port", bug=bug))
    assert "The value that differs" in shown.text and words in shown.text


def test_a_parameter_that_differs_is_shown_by_its_statistics(tmp_path: Path) -> None:
    for side, scale in (("ref", 1.0), ("port", 2.0)):
        with TraceWriter(tmp_path / side, Header()) as writer:
            writer.add("a", np.ones(3, np.float32))
            writer.add_weights({"net/w": np.arange(6, dtype=np.float32).reshape(2, 3) * scale})
    verdict = Verdict("diverge", "The weights differ.", site="net/w", port_site="net/w", step=0)
    shown = Page(render_page(verdict, Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port")))
    assert "2×3" in shown.text and "3.03" in shown.text  # rms


def test_errors_without_a_logarithm(empty: Trace) -> None:
    errors = [0.0, 1e-7, math.inf, math.nan, 1e-320, 1.7e308, None]
    rows = [row(f"a.{index}", error) for index, error in enumerate(errors)]
    rows.append(row("not.compared", None, wrong=False, floor=None, limit=None))
    shown = Page(render_page(at_row(rows, 2), empty, empty))
    assert all(word in shown.text for word in ("∞ ×", "shape"))
    links = set(shown.values("a", "href"))
    assert {f"#r{index}" for index in range(7)} <= links and "#r7" not in links
    positions = shown.values("use", "x") + shown.values("use", "y")
    assert positions and all(math.isfinite(float(value)) for value in positions)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_value_that_is_not_finite(value: float, tmp_path: Path) -> None:
    good = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    bad = good.copy()
    bad[1, 2, 3] = value
    _, shown = page(write(tmp_path / "ref", {"a": good}), write(tmp_path / "port", {"a": bad}))
    assert "[1, 2, 3]" in shown.text
    for name, count in (("NaN", np.isnan(value)), ("infinite", np.isinf(value))):
        assert bool(re.search(rf"{name}\s*0\s*1", shown.text)) == count
    marked = (shown.image("heat map, port:") == ImageColor.getrgb(NOT_FINITE)).all(axis=-1)
    assert marked.any() == (not math.isfinite(value)) and marked.mean() < 0.1


def test_the_page_is_about_the_call_of_the_verdict() -> None:
    rows = [row(error=1e-7), row(error=1e-3), row(error=1e-2, call=1), row("b", error=1e-2)]
    assert [first_wrong(at_row(rows, index)) for index in (1, 2, 3)] == [1, 2, 3]


def test_the_headline_has_a_step_where_there_are_several() -> None:
    rows = [row(error=1e-7), row(error=1e-2)]
    assert _headline(at_row(rows, 1)) == "They diverge at a"
    rows[1] = replace(rows[1], step=3)
    assert _headline(at_row(rows, 1)) == "They diverge at a, step 3"


def test_the_values_that_are_shown_are_those_of_the_row(tmp_path: Path) -> None:
    """A module is called in several steps, several times in one, and has several slots."""
    folders = []
    for side in ("ref", "port"):
        with TraceWriter(tmp_path / side, Header(side="reference")) as writer:
            for name in ("a", "b"):
                for step in (0, 2):
                    for call in (0, 1):
                        for slot in ("in.0", "out"):
                            level = "ab".index(name) * 1000 + step * 100 + call * 10 + len(slot)
                            value = np.full((2, 3), level + (side == "port"), np.float32)
                            writer.add(name, value, slot=slot, step=step)
        folders.append(tmp_path / side)
    with Trace.open(folders[0]) as expected, Trace.open(folders[1]) as trace:
        sides = Sides.of(Verdict("agree", ""), expected, trace)
        for name, step, call, slot in (
            ("a", 0, 0, "out"), ("a", 0, 1, "out"), ("a", 2, 0, "out"), ("a", 2, 1, "in.0"),
            ("b", 0, 0, "in.0"), ("b", 2, 1, "out"),
        ):  # fmt: skip
            level = "ab".index(name) * 1000 + step * 100 + call * 10 + len(slot)
            pair = sides.find(row(name, step=step, call=call, slot=slot))
            assert pair is not None
            value = sides.read(pair)
            assert value.reference is not None and (value.reference == level).all()
            assert value.port is not None and (value.port == level + 1).all()
        assert sides.find(row("a", call=2)) is None and sides.find(row("a", step=1)) is None
        rows = [row("a", error=1e-7), row("a", error=1.0, call=1), row("b", error=2.0)]
        shown = Page(render_page(at_row(rows, 1), expected, trace)).text
    assert re.search(r"\bmax1314\s", shown) and "6 of 6 values differ" in shown


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """The port's values are larger by 1, its weights by 2; each side has one of its own."""
    traces: list[Trace] = []
    for by, side in enumerate(("ref", "port")):
        folder = tmp_path_factory.mktemp("two") / side
        with TraceWriter(folder, Header(side="reference")) as writer:
            for level, name in enumerate("abc"):
                writer.add(name, np.full((2, 3), 10.5 * level + by, np.float32), step=level)
            for name in ("w", f"only {side}"):
                writer.add_weights({name: np.full(4, 5 + 2 * by, np.float32)})
        traces.append(Trace.open(folder))
    return traces[0], traces[1]


def sections(verdict: Verdict, two: tuple[Trace, Trace]) -> dict[str, Any]:
    found = _sections(verdict, Sides.of(verdict, *two))
    assert [section.title for section in found][-1] == "Checks and conditions"
    return {section.title: section for section in found}


def numbers(section: Any, name: str) -> tuple[str, str]:
    """A statistic of the reference and of the port."""
    (tensor,) = section.blocks
    assert tensor.numbers.head == ("", "reference", "port")
    return {row[0]: row[1:] for row in tensor.numbers.rows}[name]


def test_the_value_of_a_section_is_the_one_that_its_title_names(two: tuple[Trace, Trace]) -> None:
    rows = [row("a", 1e-7), row("b", 2e-7, step=1), row("c", 1e-8, step=2)]
    agree = sections(Verdict("agree", "", rows=tuple(rows)), two)
    assert list(agree)[:3] == [
        "Error of every value", "Modules", "The largest error, below its limit",
    ]  # fmt: skip
    largest = agree["The largest error, below its limit"]
    assert largest.lead == "b, step 1: 2×3, f32" and numbers(largest, "max") == ("10.5", "11.5")
    assert agree["Modules"].lead.startswith("0 of 3 values are above")
    (curves,) = agree["Error of every value"].blocks
    assert (curves.wide.width, curves.wide.height) == WIDE > NARROW
    assert (curves.narrow.width, curves.narrow.height) == NARROW and WIDE[0] > 2 * WIDE[1]
    rows[2] = row("c", 1.0, step=2)
    wrong = sections(at_row(rows, 2), two)
    assert wrong["The wrong value"].lead == "c, step 2: 2×3, f32"
    assert numbers(wrong["The wrong value"], "max") == ("21", "22")
    assert wrong["Modules"].lead.startswith("1 of 3 values are above")
    (tree,) = wrong["Modules"].blocks
    assert [(branch.label, branch.open) for branch in tree.branches] == [
        ("a", False), ("b", False), ("c", True),
    ]  # fmt: skip
    gate = Verdict("cannot-compare", "", site="b", port_site="b", rows=tuple(rows[:2]))
    failed = sections(gate, two)["The value that differs"]
    assert numbers(failed, "max") == ("10.5", "11.5") and failed.lead.startswith("b")
    nothing = sections(Verdict("agree", ""), two)
    assert list(nothing) == ["Checks and conditions"]


@pytest.mark.parametrize(
    ("site", "port_site", "maxima"),
    [("w", "w", ("5", "7")), ("only ref", "only ref", ("5", "")), ("x", "only port", ("", "7")),
     ("only ref", None, ("5", "")), ("w", "only port", ("5", "7"))],
)  # fmt: skip
def test_a_parameter_is_shown_on_the_sides_that_have_it(
    site: str, port_site: str | None, maxima: tuple[str, str], two: tuple[Trace, Trace]
) -> None:
    verdict = Verdict("cannot-compare", "", site=site, port_site=port_site, rows=(row("a"),))
    shown = sections(verdict, two)
    assert shown["The parameter that differs"].lead == site
    assert numbers(shown["The parameter that differs"], "max") == maxima
    unknown = sections(replace(verdict, site="x", port_site="y"), two)
    assert "The parameter that differs" not in unknown


def test_the_head_of_the_page_names_both_runs_in_order(two: tuple[Trace, Trace]) -> None:
    finding = Finding("scaled", "It is twice as large.", "Halve it.")
    for answer, tone, word in (
        ("agree", "good", "They agree"), ("diverge", "bad", "They diverge"),
        ("cannot-compare", "warn", "Cannot compare"),
    ):  # fmt: skip
        verdict: Verdict = replace(Verdict("agree", "A sentence."), verdict=answer)  # type: ignore[arg-type]
        html = render_page(replace(verdict, findings=(finding,)), *two)
        assert f"<title>{word}: ref, port</title>" in html
        assert f'<header class="verdict {tone}">' in html
        text = " ".join(Page(html).text.split())
        assert f"lydite diff ref port {word} A sentence." in text
        assert "scaled It is twice as large. Fix Halve it." in text
    assert WORDS.keys() == TONES.keys()


def test_every_list_of_the_checks_has_its_own_heading(empty: Trace) -> None:
    verdict = replace(
        at_row([row("a", error=1.0)], 0),
        gates=(Gate("weights", True, "all equal"), Gate("ids", False, "2 of 10 differ")),
        floor_source="from the reference", sources=(row("own", 2e-3, step=4),),
        remarks=("a remark",), health=("a NaN",),
        unpaired_reference=("reference one", "reference two"), unpaired_port=("port one",),
    )  # fmt: skip
    section = _checks(verdict, empty, empty)
    tables = {b.head[0]: b for b in section.blocks if isinstance(b, Table)}
    folds = {b.summary: b.blocks for b in section.blocks if isinstance(b, Fold)}
    assert tables["check"].rows == (
        ("weights", "✓ passed", "all equal"), ("ids", "✗ failed", "2 of 10 differ"),
    )  # fmt: skip
    sources = tables["wrong on the reference's inputs"]
    assert sources.rows == (("own", "4", "0.002", "1.00e-7", "20,000 ×"),)
    assert sources.numeric == {1, 2, 3, 4}
    assert tables["remarks"].rows == (("a remark",),)
    assert tables["unusual values"].rows == (("a NaN",),)
    assert {title: [line for (line,) in inner[0].rows] for title, inner in folds.items()} == {  # type: ignore[union-attr]
        "Only in the reference (2)": ["reference one", "reference two"],
        "Only in the port (1)": ["port one"],
    }
    assert Text("Rounding: from the reference.") in section.blocks
    bare = _checks(Verdict("agree", ""), empty, empty)
    assert [type(block) for block in bare.blocks] == [Table]


def facts(verdict: Verdict) -> dict[str, tuple[str, str]]:
    """The key numbers by the first word of their labels."""
    return {fact.label.partition(" ")[0]: (fact.value, fact.tone) for fact in _facts(verdict)}


def test_the_key_numbers_are_those_of_the_rows() -> None:
    rows = [row(error=2e-7), row(error=4e-7), row("b", error=1e-3), row("c", error=1.0)]
    found = [(fact.value, fact.tone) for fact in _facts(at_row(rows, 2))]
    assert found[0] == ("0.001", "bad") and found[-1] == ("2", "bad")
    assert [value for value, _ in found[1:-1]] == ["1.00e-7", "10,000 ×", "2"]
    shape = facts(at_row([row(error=None)], 0))
    assert shape["error"] == ("other shape", "bad") and "rounding" not in shape
    assert "rounding" not in facts(at_row([row(error=1.0, floor=None)], 0))
    good = facts(Verdict("agree", "", rows=tuple(rows[:2])))
    assert good == {"rounding:": ("4.0 ×", "good"), "of": ("0", "good")}
    assert facts(Verdict("cannot-compare", "", rows=tuple(rows[:2]))).keys() == {"of"}
    assert not _facts(Verdict("agree", ""))


def test_the_place_of_the_verdict() -> None:
    one = at_row([row("a", error=1.0)], 0)
    assert dict(_where(one)) == {"value": "a", "step": "0"}
    other = dict(_where(replace(one, port_site="b", slot="in.0", last_agreement="z", step=None)))
    assert other == {"value": "a [in.0]", "in the port": "b", "last agreement": "z"}
    assert _where(replace(one, site=None)) == []


def test_evidence_that_the_first_finding_repeats_is_left_out() -> None:
    finding = Finding("id", "It is off by 2", "fix")
    verdict = replace(at_row([row("a", error=1.0)], 0), findings=(finding,))
    repeated = replace(verdict, sentence="It diverges. It is off by 2.")
    for one, text in ((repeated, "It diverges."), (verdict, verdict.sentence)):
        assert _sentence(one) == text
    assert _sentence(replace(repeated, findings=())) == repeated.sentence


@pytest.mark.parametrize("count", [0, 1, MAX_LINES, MAX_LINES + 1, MAX_NAMES, MAX_NAMES + 3])
def test_lists_are_folded_where_they_are_long_and_cut_where_they_are_longer(count: int) -> None:
    lines = [f"line {index}" for index in range(count)]
    blocks = _listed("remarks", lines)
    assert len(blocks) == bool(count)
    for block in blocks:
        assert isinstance(block, Fold) == (count > MAX_LINES)
        table = block.blocks[0] if isinstance(block, Fold) else block
        assert isinstance(table, Table)
        cells = [cell for (cell,) in table.rows]
        assert cells[: min(count, MAX_NAMES)] == lines[:MAX_NAMES]
        assert cells[MAX_NAMES:] == (["and 3 more"] if count > MAX_NAMES else [])


def test_conditions_that_differ_are_marked(tmp_path: Path) -> None:
    sides = []
    for side, steps, dtype in (("ref", 4, "float32"), ("port", 5, "float32")):
        conditions = {"steps": steps, "prompt": "a", f"only {side}": 1, "long": "x" * 900}
        with TraceWriter(tmp_path / side, Header(dtype=dtype, conditions=conditions)) as writer:
            writer.add("a", np.ones(3))
        sides.append(Trace.open(tmp_path / side))
    table = _conditions(*sides)
    found = {name.removeprefix("≠\N{NO-BREAK SPACE}"): (a, b) for name, a, b in table.rows}
    marked = [name for name, _, _ in table.rows if name.startswith("≠")]
    assert marked == ["≠\N{NO-BREAK SPACE}steps"] and found["steps"] == ("4", "5")
    assert found["only ref"] == ("1", "") and found["only port"] == ("", "1")
    assert found["folder"] == (str(tmp_path / "ref"), str(tmp_path / "port"))
    assert found["values"] == ("1", "1") and found["run ended"] == ("by itself", "by itself")
    assert len(found["long"][0]) == MAX_CONDITION
    header = msgspec.structs.replace(sides[0].header, complete=False)
    ended = {
        name: cells
        for name, *cells in _conditions(replace(sides[0], header=header, lost=3), sides[1]).rows
    }
    assert ended["≠\N{NO-BREAK SPACE}run ended"] == ["incomplete", "by itself"]
    assert ended["≠\N{NO-BREAK SPACE}values"] == ["1, 3 lost", "1"]


def test_runs_have_the_names_of_their_folders_where_these_differ() -> None:
    assert _names(Path("x/a"), Path("y/b")) == ("a", "b")
    assert _names(Path("x/a"), Path("y/a")) == ("x/a", "y/a")


def test_a_page_is_not_replaced_unasked(reference: Path, empty: Trace, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("mine")
    with pytest.raises(FileError, match="exists"):
        write_page(path, Verdict("agree", ""), empty, empty)
    assert path.read_text() == "mine"
    write_page(path, Verdict("agree", ""), empty, empty, overwrite=True)
    assert "They agree" in path.read_text()


def test_values_without_a_counterpart_are_read_again_by_the_verdicts_names(tmp_path: Path) -> None:
    value = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    folders = [
        write(tmp_path / side, {names[0]: value, names[1]: value + 1, "z": value})
        for side, names in (("ref", ("a", "b")), ("port", ("p", "q")))
    ]
    with Trace.open(folders[0]) as expected, Trace.open(folders[1]) as trace:
        rows = (row("a", port_site="p"), row("b", port_site="q"), row("z"))
        sides = Sides.of(Verdict("agree", "", rows=rows), expected, trace)
        found = {pair.event.name: pair.port_event.name for pair in sides.pairing.pairs}
        assert found == {"a": "p", "b": "q", "z": "z"}
        assert sides.find(rows[1]) and not sides.find(replace(rows[1], step=1))
        assert not Sides.of(Verdict("cannot-compare", ""), expected, trace).pairing.pairs


@pytest.mark.parametrize("dtype", ["f4", "f8", "bool", "i8", "c8", "bfloat16"])
def test_values_of_any_shape_and_dtype(dtype: str, tmp_path: Path) -> None:
    shapes = ["", "0", "1", "7", "500", "3x0x2", "1x1x1x1", "2x3", "1x900", "900x1", "300x400"]
    shapes += ["1x3x8x8", "2x16x5x7", "1x2x3x4x5", "2x1x2x3x2x4", "3x40x40", "40x40x3"]
    draw = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    traces = []
    for side in ("ref", "port"):
        values: dict[str, Any] = {}
        for name in shapes:
            shape = tuple(int(size) for size in name.split("x") if size)
            value = np.abs(3 * draw.standard_normal(shape))
            if dtype == "f8" and value.size:
                value.reshape(-1)[0] = 1e308 if side == "ref" else -1e308
            values[f"a/{name}"] = value.astype(kind)
        traces.append(Trace.open(write(tmp_path / side, values)))
    sides = Sides.of(Verdict("agree", ""), *traces)
    shown = {pair.event.name: show_value(sides.read(pair)) for pair in sides.pairing.pairs}
    assert len(shown) == len(shapes) and all(tensor.numbers.rows for tensor in shown.values())
    assert all(shown[f"a/{name}"].maps for name in ("2x3", "300x400", "2x16x5x7", "2x1x2x3x2x4"))


def test_one_wrong_value_of_a_million_is_visible(tmp_path: Path) -> None:
    good = np.random.default_rng(0).standard_normal((1, 1000, 1200)).astype(np.float32)
    bad = good * np.float32(1 + 1e-7)
    bad[0, 777, 311] += 5
    _, shown = page(write(tmp_path / "ref", {"a": good}), write(tmp_path / "port", {"a": bad}))
    cells = shown.image("heat map, port −").astype(int)
    middle = np.median(cells.reshape(-1, 3), axis=0)
    assert "[0, 777, 311]" in shown.text
    assert (np.abs(cells - middle).sum(axis=2) > 100).sum() == 1


def test_the_planes_that_differ_most_are_shown_first(tmp_path: Path) -> None:
    good = np.random.default_rng(0).standard_normal((1, 9, 8, 8)).astype(np.float32)
    apart = np.array([1, 0, 0, 5, 0, 0, 0, 0, 3], np.float32).reshape(1, 9, 1, 1)
    folders = [write(tmp_path / side, {"a": good + add}, "b c h w")
               for side, add in (("ref", 0), ("port", apart))]  # fmt: skip
    _, shown = page(*folders)
    assert [int(at) for at in re.findall(r"channel (\d)", shown.text)][:3] == [3, 8, 0]


def test_close_numbers_are_shown_with_enough_digits(tmp_path: Path) -> None:
    good = np.linspace(1, 2, 600, dtype=np.float32).reshape(20, 30)
    bad = good.copy()
    bad[3, 4] += 0.0024
    _, shown = page(write(tmp_path / "ref", {"a": good}), write(tmp_path / "port", {"a": bad}))
    expected, value = (f"{side[3, 4]:.5g}" for side in (good, bad))
    assert expected in shown.text and value in shown.text


def test_other_shapes_are_shown_separately(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).standard_normal
    reference = write(tmp_path / "ref", {"a": draw((1, 5, 4)), "b": draw((1, 5, 4))})
    port = write(tmp_path / "port", {"a": draw((1, 7, 4)), "b": draw((1, 7, 4))})
    verdict, shown = page(reference, port)
    alts = shown.values("img", "alt")
    assert verdict.error is None and "other shape" in shown.text
    assert any(alt.startswith("heat map, reference") for alt in alts)
    assert not any("−" in alt.split(":")[0] for alt in alts)


def test_statistics_alone_make_a_page(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).standard_normal((1, 5, 4)).astype(np.float32)
    folders = [
        write(tmp_path / side, {"a": value}, capture=Capture(level="stats"))
        for side, value in (("ref", draw), ("port", draw * 3))
    ]
    _, shown = page(*folders)
    assert "Only statistics" in shown.text and "rms" in shown.text
    assert not shown.values("img", "alt")


def test_values_that_cannot_be_read(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    expected = Trace.open(write(tmp_path / "ref", {"a": values}))
    trace = Trace.open(write(tmp_path / "port", {"a": values * 2}))
    verdict = compare(expected, trace)
    expected.close()
    next((tmp_path / "ref").glob("t-*")).write_bytes(b"broken")
    assert "t-00000.safetensors" in Page(render_page(verdict, expected, trace)).text


@pytest.mark.parametrize("given", [True, False])
def test_names_that_only_a_map_pairs(given: bool, reference: Path, tmp_path: Path) -> None:
    names = {event.name for event in Trace.open(reference).events if "attn" in event.name}
    renames = {name: f"n{index}" for index, name in enumerate(sorted(names))}
    port = record(tmp_path / "port", rename=lambda n: renames.get(n, n), bug="transpose")
    path = tmp_path / "map.json"
    path.write_text(json.dumps({new: old for old, new in renames.items()}))
    with Trace.open(reference) as expected, Trace.open(port) as trace:
        name_map = read_name_map(path)
        verdict = compare(expected, trace, renames=name_map)
        shown = Page(render_page(verdict, expected, trace, name_map if given else None))
    assert verdict.site == SITE and f"{renames[SITE]} (in the reference: {SITE}" in shown.text
    assert any("port − reference" in alt for alt in shown.values("img", "alt"))


@pytest.mark.parametrize(
    ("shape", "dims", "kind"),
    [
        ((1, 3, 12, 10), None, "bytes"),
        ((1, 12, 10, 3), "b h w c", "unit"),
        ((12, 10, 3), None, "signed"),
        ((12, 10, 3), None, "levels"),
    ],
)
def test_final_images_side_by_side(
    shape: tuple[int, ...], dims: str | None, kind: str, tmp_path: Path
) -> None:
    drawn = np.random.default_rng(0).integers(0, 256, shape)
    other = drawn.copy()
    other.reshape(-1)[7] ^= 128
    change = {
        "bytes": lambda x: x.astype(np.uint8),
        "levels": lambda x: x.astype(np.float32),
        "unit": lambda x: (x / 255).astype(np.float32),
        "signed": lambda x: (x / 127.5 - 1).astype(np.float32),
    }[kind]
    folders = [
        write(tmp_path / side, {"pipeline/image": change(value)}, dims)
        for side, value in (("ref", drawn), ("port", other))
    ]
    _, shown = page(*folders)
    pixels = [shown.image(f"The {side}'s picture") for side in ("reference", "port")]
    last = drawn[0] if drawn.ndim == 4 else drawn
    last = last.transpose(1, 2, 0) if last.shape[0] == 3 else last
    assert np.array_equal(pixels[0], last) and (pixels[0] != pixels[1]).sum() == 1
    assert "by up to 128 of 255" in shown.text


def test_many_rows_make_a_small_page(empty: Trace) -> None:
    draw = np.random.default_rng(0)
    rows = [
        row(
            f"transformer/transformer_blocks.{index // 30 % 24}.attn.part_{index % 15}",
            float(10 ** draw.uniform(-8, -6.5 if index < 3000 else 0)),
            slot="in.0" if index % 2 else "out",
            step=index // 720,
            call=index // 15 % 2,
        )
        for index in range(7200)
    ]
    rows[1234] = row("vae/lonely", 2e-5)
    html = render_page(at_row(rows, 1234), empty, empty)
    assert len(html.encode()) < 2_500_000 and html.count("<a href") < 4000
    assert html.count('href="#r1234"') == 2


def test_a_nan_on_one_side_is_infinitely_far() -> None:
    nan, inf = math.nan, math.inf
    one, other = np.array([1.0, nan, nan, inf, inf, 2.0]), np.array([1.0, nan, 1.0, inf, 1.0, 5.0])
    for pair in ((one, other), (other, one)):
        assert apart(*pair).tolist() == [0, 0, inf, 0, inf, 3]


def test_one_wrong_pixel_of_a_large_picture_is_not_smoothed_away() -> None:
    away = np.zeros((LONGEST * 2 + 1, LONGEST), np.int16)
    away[-1, 3] = 7
    shown = _worst(away)
    assert max(shown.shape) <= LONGEST and shown.max() == 7
