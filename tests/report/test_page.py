"""Pages: everything inside, nothing fetched, every text escaped, every picture in words."""

import base64
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any, get_args

import numpy as np
import pytest

from lydite.evaluate.intervals import summarize
from lydite.report.activations import _lead
from lydite.report.contact_sheets import png_bytes
from lydite.report.page import (
    Block,
    Callout,
    Chapter,
    Commands,
    Comparison,
    Comparisons,
    Exhibit,
    Exhibits,
    Fact,
    Facts,
    Figure,
    Figures,
    Fold,
    Page,
    Table,
    Text,
    made_here,
    render,
)
from lydite.report.quantization import _mean

EVIL = "<script>alert(1)</script> \" onerror='x' & </style>"
PNG = png_bytes(np.zeros((4, 4, 3), np.uint8))
FIGURE = Figure(PNG, f"alt {EVIL}", f"caption {EVIL}", f"note {EVIL}", "bad")
BLOCKS: tuple[Block, ...] = (
    Text(f"text {EVIL}"),
    Callout(f"callout {EVIL}", "warn"),
    Facts((Fact(f"value {EVIL}", f"label {EVIL}"),)),
    Figures((FIGURE, FIGURE), size="small", crisp=True),
    Comparisons((Comparison(PNG, PNG, PNG, f"pair {EVIL}", f"apart {EVIL}"),)),
    Exhibits((Exhibit(FIGURE, f"title {EVIL}", ((f"term {EVIL}", f"detail {EVIL}"),)),)),
    Table((f"head {EVIL}", "number"), ((f"cell {EVIL}", "1"),), numeric=frozenset({1})),
    Commands((f"command {EVIL}",)),
    Fold(f"summary {EVIL}", (Text(f"folded {EVIL}"), Fold("inner", (Figures((FIGURE,)),)))),
)
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Seen(HTMLParser):
    """Tags with their attributes, the text outside <style>, and whether every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return "".join(self.words)


def page(*blocks: Block) -> Page:
    chapter = Chapter(f"chapter {EVIL}", f"lead {EVIL}", blocks)
    facts = (Fact(f"top {EVIL}", f"under {EVIL}", "good"),)
    return Page(f"page {EVIL}", f"opening {EVIL}", (chapter,) * 3, facts, f"footer {EVIL}")


def test_every_kind_of_block_is_tried_here() -> None:
    assert {type(block) for block in BLOCKS} == set(get_args(Block))


def test_all_text_arrives_as_text() -> None:
    seen = Seen(render(page(*BLOCKS)).decode())
    assert not seen.open and not seen.all("script")
    assert not [row for _, row in seen.tags if "onerror" in row]
    places = "page opening top under footer chapter lead text callout value label caption note"
    places += " pair apart title term detail head cell command summary folded"
    for place in places.split():
        assert f"{place} {EVIL}" in seen.text, place


def test_every_picture_is_inside_and_has_words_for_it() -> None:
    images = Seen(render(page(*BLOCKS)).decode()).all("img")
    assert len(images) == 3 * (4 + 3)
    for image in images:
        assert str(image["alt"]).split(": ")[-1] in (
            f"alt {EVIL}",
            f"pair {EVIL}",
            "difference of candidate and reference",
        )
        kind, _, data = str(image["src"]).partition(",")
        assert kind == "data:image/png;base64" and base64.b64decode(data) == PNG


def test_nothing_is_fetched() -> None:
    html = render(page(*BLOCKS)).decode()
    seen = Seen(html)
    assert not seen.all("link") and not seen.all("iframe")
    for _, attributes in seen.tags:
        for name in ("src", "href", "srcset", "action", "poster"):
            assert str(attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
    assert "http:" not in html and "https:" not in html
    assert "url(" not in html and "@import" not in html


def test_links_lead_to_chapters_of_the_page() -> None:
    seen = Seen(render(page()).decode())
    targets = {f"#{section['id']}" for section in seen.all("section")}
    assert {link["href"] for link in seen.all("a")} == targets and len(targets) == 3


def test_the_same_page_gives_the_same_text() -> None:
    assert render(page(*BLOCKS)) == render(page(*BLOCKS))


def test_a_page_of_ours_is_told_from_a_strangers() -> None:
    assert made_here(render(page()))
    assert not made_here(b"<!doctype html><title>lydite report</title>")
    escaped = Page('<meta name="generator" content="lydite report">', "", ())
    body = render(escaped).replace(b'<meta name="generator" content="lydite report">', b"")
    assert not made_here(body)  # a title is no mark


def test_a_name_that_is_not_utf8_is_no_error() -> None:
    assert b"set ?.sqlite" in render(Page("set \udcff.sqlite", "", ()))


@pytest.mark.parametrize("alt", ["", "  "])
def test_a_picture_without_words_is_refused(alt: str) -> None:
    with pytest.raises(ValueError, match="'star' has no alt text"):
        Figure(PNG, alt, "star")


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells; the head has 2"):
        Table(("a", "b"), (("1", "2"), ("1",)))


def test_reports_need_neither_mlx_nor_torch() -> None:
    code = (
        "import sys, lydite.report.page, lydite.report.contact_sheets;"
        "sys.exit(any(name in sys.modules for name in ('mlx.core', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_mean_is_written_with_its_interval_where_it_has_one() -> None:
    summary = summarize([1.0, 1.5, 2.0, 2.5, 3.0])
    assert summary.ci95 is not None
    assert _mean(None, ".1f") == "–" and _mean(summarize([2.5]), ".1f") == "2.5"
    assert _mean(summary, ".2f") == f"2.00 ({summary.ci95[0]:.2f} to {summary.ci95[1]:.2f})"


@pytest.mark.parametrize(("part", "said"), [(None, ""), ((1, 1), ""), ((2, 3), "Part 2 of 3")])
def test_statistics_of_a_part_of_a_set_say_so(part: Any, said: str) -> None:
    about = {"model": "m", "model_hash": "a" * 64, "set": "b" * 64, "conditions": {}, "part": part}
    text = " ".join(_lead(about))
    assert ("Part" in text) == bool(said) and said in text
    assert text.startswith("Model m, parameters aaaaaaaaaaaa. Set bbbbbbbbbbbb.")
    text = " ".join(_lead({**about, "model": None, "set": None}))
    assert "Model without a name" in text and "Several sets." in text


def place(html: str, pattern: str) -> list[tuple[str, ...]]:
    """What stands in the groups of a pattern, wherever it occurs."""
    found = re.findall(pattern, html, re.DOTALL)
    return [each if isinstance(each, tuple) else (each,) for each in found]


def html_of(*blocks: Block, **more: Any) -> str:
    return render(Page("page", "", (Chapter("chapter", "", blocks),), **more)).decode()


def uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def test_the_pictures_of_a_pair_stand_where_their_words_say() -> None:
    """The reference covers the candidate, and the words beside them are in this order."""
    one, two, three = (png_bytes(np.full((2, 2, 3), level, np.uint8)) for level in (1, 2, 3))
    html = html_of(Comparisons((Comparison(one, two, three, "a star", "psnr 9"),)))
    reference, candidate, difference = uri(one), uri(two), uri(three)
    assert place(html, r'<img src="([^"]*)" alt="([^"]*)">') == [
        (candidate, "candidate: a star"),
        (reference, "reference: a star"),
        (difference, "difference of candidate and reference"),
    ]
    ((covering,),) = place(html, r'<div class="cover"><img src="([^"]*)"')
    assert covering == reference and "<figcaption>reference | candidate</figcaption>" in html
    assert html.index("a star</h3>") < html.index(candidate) < html.index("psnr 9</p>")


def test_names_and_values_stand_at_their_places() -> None:
    html = html_of(
        Facts((Fact("12", "pictures", "good"), Fact("3", "misses", "bad"))),
        Callout("odd", "warn"),
        Text("words"),
        Commands(("one", "two")),
        Fold("more", (Text("inside"),)),
        facts=(Fact("7", "on top"),),
        footer="made here",
    )
    assert place(html, r'<div class="(\w+)"><dt>(.*?)</dt><dd>(.*?)</dd></div>') == [
        ("note", "on top", "7"), ("good", "pictures", "12"), ("bad", "misses", "3"),
    ]  # fmt: skip
    assert place(html, r'<p class="callout (\w+)">(.*?)</p>') == [("warn", "odd")]
    assert place(html, r"<code><span>(\w+)</span>\s*<span>(\w+)</span>") == [("one", "two")]
    ((summary, inner),) = place(html, r"<details>\s*<summary>(.*?)</summary>(.*?)</details>")
    assert summary == "more" and "<p>inside</p>" in inner and "words" not in inner
    assert "<footer>made here</footer>" in html and "<footer>" not in html_of(Text("words"))


def test_numbers_of_a_table_stand_to_the_right_in_head_and_rows() -> None:
    html = html_of(Table(("name", "n", "note", "m"), (("a", "1", "x", "2"),), frozenset({1, 3})))
    for tag, cells in (("th", "name n note m"), ("td", "a 1 x 2")):
        assert place(html, rf"<{tag}((?: [^>]*)?)>(.*?)</{tag}>") == [
            (' scope="col"' * (tag == "th") + ' class="numeric"' * (at in (1, 3)), cell)
            for at, cell in enumerate(cells.split())
        ]
    assert 'aria-label="Table: name, n, note, m"' in html


def test_captions_and_frames_are_those_of_their_pictures() -> None:
    pngs = [png_bytes(np.full((2, 2, 3), level, np.uint8)) for level in (1, 2, 3)]
    figures = (
        Figure(pngs[0], "first", "one", "note", "bad"), Figure(pngs[1], "second", "", "alone"),
        Figure(pngs[2], "third"),
    )  # fmt: skip
    html = html_of(Figures(figures, size="large", crisp=True), Figures(figures[:1]))
    assert place(html, r'<div class="grid ([^"]*)">') == [("large crisp",), ("medium",)]
    found = place(html, r'<figure class="(\w+)">\s*<img src="([^"]*)" alt="(\w+)">(.*?)</figure>')
    assert [(*each[:3], " ".join(re.sub("<[^>]*>", " ", each[3]).split())) for each in found] == [
        ("bad", uri(pngs[0]), "first", "one note"), ("note", uri(pngs[1]), "second", "alone"),
        ("note", uri(pngs[2]), "third", ""), ("bad", uri(pngs[0]), "first", "one note"),
    ]  # fmt: skip
    assert html.count("<figcaption>one <small>note</small></figcaption>") == 2
    assert html.count("<figcaption>") == 3
    shown = html_of(Exhibits((Exhibit(figures[0], "title", (("term", "text"), ("b", "c"))),)))
    assert place(shown, r"<dt>(\w+)</dt><dd>(\w+)</dd>") == [("term", "text"), ("b", "c")]
    assert place(shown, r'<div class="(\w+)"><img src="([^"]*)"') == [("bad", uri(pngs[0]))]
    assert "<h3>title</h3>" in shown


def test_the_chapters_are_listed_where_there_are_more_than_two() -> None:
    for count in (1, 2, 3, 5):
        chapters = tuple(Chapter(f"title {n}", f"lead {n}") for n in range(count))
        html = render(Page("page", "opening", chapters)).decode()
        links = place(html, r'<a href="#([\w-]+)">(.*?)</a>')
        heads = place(
            html, r'<section id="([\w-]+)">\s*<h2><span class="number">(\d)</span>(.*?)</h2>'
            r'\s*<p class="lead">(.*?)</p>',
        )  # fmt: skip
        assert [(number, title, lead) for _, number, title, lead in heads] == [
            (f"{n + 1}", f"title {n}", f"lead {n}") for n in range(count)
        ]
        wanted = [(where, title) for where, _, title, _ in heads]
        assert links == (wanted if count > 2 else [])
        assert "<title>page</title>" in html and "<h1>page</h1>" in html
