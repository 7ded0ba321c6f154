"""Pages: everything inside, nothing fetched, every text escaped, every picture in words."""

import base64
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
