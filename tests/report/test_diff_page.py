"""The page of a comparison: whole, safe with strangers' names, the first wrong value in sight."""

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
import numpy as np
import pytest
from PIL import Image

from lydite.core.errors import FileError
from lydite.diff.compare import compare
from lydite.diff.renames import read_renames
from lydite.diff.result import Finding, Gate, Row, Verdict
from lydite.report.diff import render_page, write_page
from lydite.report.diff_tensor import picture
from lydite.report.diff_values import Sides
from lydite.trace.events import Header
from lydite.trace.store import Trace
from lydite.trace.writer import Capture, TraceWriter
from support.toy_transformer import record

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)></style>&amp;{{ 7 * 7 }}"
VOID = {"meta", "img", "br", "hr", "input", "wbr"}
SITE = "net/blocks.2.attn.to_v"


class Seen(HTMLParser):
    """Tags, what encloses each, and the text outside styles and scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None], tuple[dict[str, str | None], ...]]] = []
        self.words: list[str] = []
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        around = tuple(attributes for name, attributes in self.open if name == "details")
        self.tags.append((tag, found, around))
        if tag not in VOID:
            self.open.append((tag, found))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs), ()))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] not in ("style", "script"):
            self.words.append(data)

    def all(self, tag: str, of: str = "") -> list[dict[str, str | None]]:
        found = [attributes for name, attributes, _ in self.tags if name == tag]
        return [row for row in found if not of or of in str(row.get("class")).split()]

    def around(self, identity: str) -> tuple[dict[str, str | None], ...]:
        return next(inside for _, row, inside in self.tags if row.get("id") == identity)

    @property
    def text(self) -> str:
        return "".join(self.words)


def page(reference: Path, port: Path, **more: Any) -> tuple[Verdict, Seen]:
    with Trace.open(reference) as theirs, Trace.open(port) as ours:
        verdict = compare(theirs, ours)
        return verdict, Seen(render_page(verdict, theirs, ours, **more))


def trace(folder: Path, values: dict[str, Any], **more: Any) -> Path:
    """A hand-written trace; a value may come with what else is said of it."""
    with TraceWriter(folder, Header(side="reference", dtype="float32"), **more) as writer:
        for name, value in values.items():
            array, said = value if isinstance(value, tuple) else (value, {})
            writer.add(name, array, **said)
    return folder


def row(site: str = "a", error: float | None = 1e-7, **more: Any) -> Row:
    wrong = error is None or not error < 1e-5
    filled: dict[str, Any] = {"floor": 1e-7, "limit": 1e-6, "wrong": wrong, **more}
    return Row(
        site, filled.pop("port_site", site), filled.pop("place", "out"), filled.pop("step", 0),
        filled.pop("call", 0), "activation", (2, 3), "f32", error, **filled,
    )  # fmt: skip


def at_row(rows: list[Row], index: int, **more: Any) -> Verdict:
    it = rows[index]
    return Verdict(
        "diverge", "It diverges.", site=it.site, port_site=it.port_site, place=it.place,
        step=it.step, error=it.error, floor=it.floor, limit=it.limit, rows=tuple(rows), **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("toy") / "ref", side="reference")


@pytest.fixture(scope="module")
def buggy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("toy") / "port", bug="transpose", shuffle=True)


@pytest.fixture(scope="module")
def diverged(reference: Path, buggy: Path) -> tuple[Verdict, Seen]:
    return page(reference, buggy)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace.open(trace(tmp_path_factory.mktemp("empty") / "run", {"z": np.zeros(1)}))


def test_the_verdict_stands_first_with_its_place(diverged: tuple[Verdict, Seen]) -> None:
    verdict, seen = diverged
    text = seen.text.replace("\N{NON-BREAKING HYPHEN}", "-")
    assert "They diverge" in text and f"{SITE} is the first wrong value" in text
    assert verdict.last_agreement and verdict.last_agreement in text
    assert seen.all("header", "bad")


def test_the_curve_holds_the_first_divergence(diverged: tuple[Verdict, Seen]) -> None:
    verdict, seen = diverged
    first = next(at for at, each in enumerate(verdict.rows) if each.wrong)
    links = [link["href"] for link in seen.all("a")]
    assert links.count(f"#r{first}") == 2  # for a desk and for a phone
    assert len(seen.all("g", "mark")) == 2 and f"{SITE}, step 0\nerror" in seen.text
    assert {f"#r{at}" for at, each in enumerate(verdict.rows) if each.wrong} <= set(links)


def test_the_tree_is_open_on_the_way_to_the_site_only(diverged: tuple[Verdict, Seen]) -> None:
    verdict, seen = diverged
    first = next(at for at, each in enumerate(verdict.rows) if each.wrong)
    assert all("open" in details for details in seen.around(f"r{first}"))
    opened = [details for details in seen.all("details") if "open" in details]
    assert len(opened) == len(seen.around(f"r{first}")) == 5  # net, blocks, 2, attn, to_v
    assert len([tr for tr in seen.all("tr") if "id" in tr]) == len(verdict.rows)
    assert [tr["id"] for tr in seen.all("tr", "first")] == [f"r{first}"]


def test_the_wrong_value_is_drawn_on_both_sides(diverged: tuple[Verdict, Seen]) -> None:
    alts = [str(image["alt"]) for image in diverged[1].all("img")]
    for side in ("reference", "port", "port − reference"):
        assert any(alt.startswith(f"heat map, {side}:") for alt in alts)
    assert any("Density" in alt for alt in alts)


def test_nothing_is_fetched_and_only_our_script_runs(reference: Path, buggy: Path) -> None:
    with Trace.open(reference) as theirs, Trace.open(buggy) as ours:
        html = render_page(compare(theirs, ours), theirs, ours)
    seen = Seen(html)
    assert not {"link", "iframe", "object", "base", "form"} & {name for name, _, _ in seen.tags}
    for _, attributes, _ in seen.tags:
        for name in ("src", "href", "srcset", "action", "poster", "xlink:href"):
            assert str(attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
        assert not [name for name in attributes if name.startswith("on")]
    assert "http:" not in html and "https:" not in html
    assert "url(" not in html and "@import" not in html
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (meta["content"] for meta in seen.all("meta") if "http-equiv" in meta)
    assert f"script-src 'sha256-{digest}'" in str(policy) and "default-src 'none'" in str(policy)


def test_strangers_names_arrive_as_text(tmp_path: Path) -> None:
    long = "x" * 900
    values = {name: np.ones((2, 3, 4), np.float32) for name in (EVIL, long, "." * 900, "a//b..c")}
    conditions = {EVIL: EVIL, "prompt": EVIL}
    for side in ("ref", "port"):
        with TraceWriter(tmp_path / side, Header(conditions=conditions, framework=EVIL[:99])) as w:
            for name, value in values.items():
                w.add(name, value * (1 if side == "ref" else 2), slot=f"out.{EVIL}")
    theirs, ours = Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port")
    rows = [row(name, 1.0, place=f"out.{EVIL}", note=EVIL) for name in values]
    rows += [row(EVIL, 1.0, port_site=f"port {EVIL}"), row(long, None)]
    verdict = replace(
        at_row(rows, 0),
        sentence=EVIL, last_agreement=EVIL, remarks=(EVIL,), health=(EVIL,), floor_source=EVIL,
        findings=(Finding(EVIL, EVIL, EVIL),), gates=(Gate(EVIL, False, EVIL),),
        unpaired_reference=(EVIL,), unpaired_port=(EVIL,) * 500, sources=(rows[0],),
    )  # fmt: skip
    html = render_page(verdict, theirs, ours)
    seen = Seen(html)
    assert len(seen.all("script")) == 1
    assert not [True for _, found, _ in seen.tags if "onerror" in found or found.get("src") == "x"]
    assert seen.text.count(EVIL) > 20 and "49" not in seen.text.split("{{ 7 * 7")[1][:6]
    assert long in seen.text and max(len(inside) for _, _, inside in seen.tags) < 40


def test_an_agreement_shows_its_largest_error(reference: Path, tmp_path: Path) -> None:
    verdict, seen = page(reference, record(tmp_path / "port", shuffle=True))
    assert verdict.verdict == "agree" and "They agree" in seen.text and seen.all("header", "good")
    assert not seen.all("use", "wrong")[1:]  # the one in the legend
    assert "within its limit" in seen.text and "largest error: " in seen.text


def test_runs_that_cannot_be_compared_have_a_page(reference: Path, tmp_path: Path) -> None:
    port = record(tmp_path / "port", conditions={"prompt": "a moon", "steps": 2})
    verdict, seen = page(reference, port)
    assert verdict.verdict == "cannot-compare" and seen.all("header", "warn")
    assert "✗ failed" in seen.text and "≠\N{NO-BREAK SPACE}prompt" in seen.text
    assert not seen.all("div", "curve") and not seen.all("div", "tree")


@pytest.mark.parametrize(("bug", "shown"), [("shift", "value over position"), ("pad", "2 of 10")])
def test_a_failed_gate_shows_what_failed(
    bug: str, shown: str, reference: Path, tmp_path: Path
) -> None:
    verdict, seen = page(reference, record(tmp_path / "port", bug=bug))
    assert "The value that differs" in seen.text
    assert verdict.sentence in seen.text and shown in seen.text
    assert not seen.all("g", "mark")


def test_a_parameter_that_differs_is_told_by_its_statistics(tmp_path: Path) -> None:
    for side, scale in (("ref", 1.0), ("port", 2.0)):
        with TraceWriter(tmp_path / side, Header()) as writer:
            writer.add("a", np.ones(3, np.float32))
            writer.add_weights({"net/w": np.arange(6, dtype=np.float32).reshape(2, 3) * scale})
    verdict = Verdict("diverge", "The weights differ.", site="net/w", port_site="net/w", step=0)
    theirs, ours = Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port")
    text = Seen(render_page(verdict, theirs, ours)).text
    assert "The parameter that differs" in text and "2×3" in text and "3.03" in text  # rms


def test_errors_without_a_logarithm_have_lanes(empty: Trace) -> None:
    errors = [0.0, 1e-7, math.inf, math.nan, 1e-320, 1.7e308, None]
    rows = [row(f"a.{at}", error) for at, error in enumerate(errors)]
    rows.append(row("kept.nothing", None, wrong=False, floor=None, limit=None))
    seen = Seen(render_page(at_row(rows, 2), empty, empty))
    text = seen.text
    assert all(word in text for word in ("∞ ×", "shape", "the shapes differ"))
    links = {link["href"] for link in seen.all("a")}
    assert {f"#r{at}" for at in range(7)} <= links and "#r7" not in links
    numbers = [str(use.get(key)) for use in seen.all("use") for key in ("x", "y") if key in use]
    assert numbers and all(math.isfinite(float(value)) for value in numbers)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_value_that_is_not_finite_is_drawn(value: float, tmp_path: Path) -> None:
    good = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    bad = good.copy()
    bad[1, 2, 3] = value
    verdict, seen = page(trace(tmp_path / "ref", {"a": good}), trace(tmp_path / "port", {"a": bad}))
    assert verdict.verdict == "diverge" and "[1, 2, 3]" in seen.text
    assert any(str(image["alt"]).startswith("heat map, port") for image in seen.all("img"))


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "bool", "i8", "u1", "c8", "c16", "bfloat16"])
def test_values_of_any_shape_and_dtype_are_drawn(dtype: str, tmp_path: Path) -> None:
    shapes = ["", "0", "1", "7", "500", "3x0x2", "1x1x1x1", "2x3", "1x900", "900x1", "300x400"]
    shapes += ["1x3x8x8", "2x16x5x7", "1x5x7x16", "1x2x3x4x5", "2x1x2x3x2x4", "3x40x40", "40x40x3"]
    draw = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    folders = []
    for side in ("ref", "port"):
        values: dict[str, Any] = {}
        for name in shapes:
            shape = tuple(int(size) for size in name.split("x") if size)
            value = np.abs(3 * draw.standard_normal(shape))
            if dtype == "f8" and value.size:
                value.reshape(-1)[0] = 1e308 if side == "ref" else -1e308
            values[f"a/{name}"] = value.astype(kind)
        folders.append(trace(tmp_path / side, values))
    sides = Sides.of(Verdict("agree", ""), Trace.open(folders[0]), Trace.open(folders[1]))
    drawn = {pair.site.name: picture(sides.read(pair)) for pair in sides.pairing.pairs}
    assert len(drawn) == len(shapes) and all(tensor.numbers.rows for tensor in drawn.values())
    assert all(drawn[f"a/{name}"].maps for name in ("2x3", "300x400", "2x16x5x7", "2x1x2x3x2x4"))


def test_one_wrong_value_of_a_million_is_seen(tmp_path: Path) -> None:
    good = np.random.default_rng(0).standard_normal((1, 1000, 1200)).astype(np.float32)
    bad = good * np.float32(1 + 1e-7)
    bad[0, 777, 311] += 5
    verdict, seen = page(trace(tmp_path / "ref", {"a": good}), trace(tmp_path / "port", {"a": bad}))
    (image,) = (i for i in seen.all("img") if str(i["alt"]).startswith("heat map, port −"))
    data = base64.b64decode(str(image["src"]).partition(",")[2])
    cells = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    middle = np.median(cells.reshape(-1, 3), axis=0)
    assert verdict.verdict == "diverge" and "[0, 777, 311]" in seen.text
    assert (np.abs(cells - middle).sum(axis=2) > 100).sum() == 1
    assert "a cell is the worst of 4 × 4" in seen.text


def test_shapes_that_do_not_fit_are_drawn_apart(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).standard_normal
    reference = trace(tmp_path / "ref", {"a": draw((1, 5, 4)), "b": draw((1, 5, 4))})
    port = trace(tmp_path / "port", {"a": draw((1, 7, 4)), "b": draw((1, 7, 4))})
    verdict, seen = page(reference, port)
    alts = [str(image["alt"]) for image in seen.all("img")]
    assert verdict.error is None and "other shape" in seen.text
    assert any(alt.startswith("heat map, reference") for alt in alts)
    assert any(alt.startswith("heat map, port") for alt in alts)
    assert not any("−" in alt.split(":")[0] for alt in alts)


def test_statistics_alone_make_a_page(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).standard_normal((1, 5, 4)).astype(np.float32)
    capture = Capture(level="stats")
    verdict, seen = page(
        trace(tmp_path / "ref", {"a": draw}, capture=capture),
        trace(tmp_path / "port", {"a": draw * 3}, capture=capture),
    )
    assert verdict.verdict == "diverge" and "Only statistics were kept" in seen.text
    assert "rms" in seen.text and not seen.all("img")


def test_values_that_cannot_be_read_do_not_stop_the_page(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    theirs = Trace.open(trace(tmp_path / "ref", {"a": values}))
    ours = Trace.open(trace(tmp_path / "port", {"a": values * 2}))
    verdict = compare(theirs, ours)
    theirs.close()
    next((tmp_path / "ref").glob("t-*")).write_bytes(b"broken")
    text = Seen(render_page(verdict, theirs, ours)).text
    assert "The wrong value" in text and "t-00000.safetensors" in text


@pytest.mark.parametrize("given", [True, False])
def test_names_that_only_a_map_joins_are_found(
    given: bool, reference: Path, tmp_path: Path
) -> None:
    names = {event.name for event in Trace.open(reference).events if "attn" in event.name}
    renames = {name: f"n{at}" for at, name in enumerate(sorted(names))}
    port = record(tmp_path / "port", rename=lambda n: renames.get(n, n), bug="transpose")
    path = tmp_path / "map.json"
    path.write_text(json.dumps({new: old for old, new in renames.items()}))
    with Trace.open(reference) as theirs, Trace.open(port) as ours:
        told = read_renames(path)
        verdict = compare(theirs, ours, renames=told)
        seen = Seen(render_page(verdict, theirs, ours, told if given else None))
    assert verdict.site == SITE and f"in the port{renames[SITE]}" in seen.text.replace("\n", "")
    assert any("port − reference" in str(image["alt"]) for image in seen.all("img"))


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((1, 3, 12, 10), None), ((1, 12, 10, 3), "b h w c"), ((12, 10, 3), None)],
)
@pytest.mark.parametrize("kind", ["bytes", "unit", "signed"])
def test_final_pictures_stand_side_by_side(
    shape: tuple[int, ...], dims: str | None, kind: str, tmp_path: Path
) -> None:
    drawn = np.random.default_rng(0).integers(0, 256, shape)
    other = drawn.copy()
    other.reshape(-1)[7] ^= 128
    change = {
        "bytes": lambda x: x.astype(np.uint8),
        "unit": lambda x: (x / 255).astype(np.float32),
        "signed": lambda x: (x / 127.5 - 1).astype(np.float32),
    }[kind]
    folders = [
        trace(tmp_path / side, {"pipeline/image": (change(value), {"dims": dims})})
        for side, value in (("ref", drawn), ("port", other))
    ]
    _, seen = page(*folders)
    pictures = {str(image["alt"]): image for image in seen.all("img")}
    pixels = []
    for whose in ("reference", "port"):
        source = str(pictures[f"The {whose}'s picture"]["src"]).partition(",")[2]
        pixels.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(source)))))
    last = drawn[0] if drawn.ndim == 4 else drawn
    last = last.transpose(1, 2, 0) if last.shape[0] == 3 else last
    assert np.array_equal(pixels[0], last) and (pixels[0] != pixels[1]).sum() == 1
    assert seen.all("div", "swipe") and "by up to 128 of 255" in seen.text


def test_twenty_thousand_rows_stay_small_and_keep_the_first(empty: Trace) -> None:
    draw = np.random.default_rng(0)
    rows = [
        row(
            f"transformer/transformer_blocks.{at // 30 % 24}.attn.part_{at % 15}",
            float(10 ** draw.uniform(-8, -6.5 if at < 9000 else 0)),
            place="in.0" if at % 2 else "out",
            step=at // 720,
            call=at // 15 % 2,
        )
        for at in range(20_160)
    ]
    rows[4321] = row("vae/lonely", 2e-5)
    html = render_page(at_row(rows, 4321), empty, empty)
    seen = Seen(html)
    links = [link["href"] for link in seen.all("a")]
    assert len(html.encode()) < 5_000_000 and len(links) < 4000
    assert links.count("#r4321") == 2
    assert all("open" in details for details in seen.around("r4321"))


def test_the_page_is_written_whole_or_not_at_all(
    diverged: Any, empty: Trace, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "diff.html"
    write_page(path, diverged[0], empty, empty)
    assert Seen(path.read_text()).all("header", "bad") and list(path.parent.iterdir()) == [path]
    with pytest.raises(FileError):
        write_page(tmp_path, diverged[0], empty, empty)
