"""The page of `lydite diff --html`: verdict, error curve, module tree, the wrong value, images.

One file that fetches nothing. Names come from files of other people: templates escape every text,
no data is inside a script, and the page's own policy runs no script but the one made here.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lydite.core.outputs import write_output
from lydite.diff.result import Verdict
from lydite.report.diff.error_curve import Curve, draw_curve
from lydite.report.diff.module_tree import Branch, build_tree
from lydite.report.diff.pictures import Pictures, final_pictures
from lydite.report.diff.read_values import Renames, Sides
from lydite.report.diff.row_text import closest, first_wrong, number, short, times
from lydite.report.diff.wrong_value import Tensor, headline, show_parameter, show_value
from lydite.report.page import GENERATOR, Fact, Fold, Table, Text, environment
from lydite.trace.events import Site
from lydite.trace.reader import Trace

WIDE, NARROW = (1000.0, 400.0), (380.0, 330.0)
WORDS = {"agree": "They agree", "diverge": "They diverge", "cannot-compare": "Cannot compare"}
TONES = {"agree": "good", "diverge": "bad", "cannot-compare": "warn"}
MAX_NAMES = 400  # of a list of names without a counterpart
MAX_LINES = 12  # of remarks that are not folded
MAX_CONDITION = 400  # characters


@dataclass(frozen=True)
class Curves:
    """One curve for wide screens, one for narrow ones."""

    wide: Curve
    narrow: Curve


@dataclass(frozen=True)
class Tree:
    """The modules; those around the bug are open."""

    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    lead: str
    blocks: tuple[Curves | Tree | Tensor | Pictures | Table | Text | Fold, ...]


def write_page(
    path: Path,
    verdict: Verdict,
    reference: Trace,
    port: Trace,
    *,
    renames: Renames | None = None,
    overwrite: bool = False,
) -> None:
    """Write the page of a comparison, atomically; `renames` is the map that `compare` had."""
    page = render_page(verdict, reference, port, renames)
    data = page.encode(errors="replace")  # a folder's name need not be UTF-8
    write_output(path, data, overwrite=overwrite)


def render_page(
    verdict: Verdict, reference: Trace, port: Trace, renames: Renames | None = None
) -> str:
    """The page as HTML."""
    templates = environment()
    script = templates.get_template("diff.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates.get_template("diff.html").render(
        generator=GENERATOR,
        script=Markup(script),
        script_hash=digest,
        verdict=verdict,
        headline=_breakable(_headline(verdict)),
        title=WORDS[verdict.verdict],
        tone=TONES[verdict.verdict],
        sentence=_breakable(_sentence(verdict)),
        sides=_names(reference.folder, port.folder),
        facts=_facts(verdict),
        where=[(term, _breakable(text)) for term, text in _where(verdict)],
        sections=_sections(verdict, Sides.of(verdict, reference, port, renames)),
    )


def _names(reference: Path, port: Path) -> tuple[str, str]:
    """The names of the two runs: the last part of their folders, where they differ."""
    if reference.name and port.name and reference.name != port.name:
        return reference.name, port.name
    return str(reference), str(port)


def _sections(verdict: Verdict, sides: Sides) -> list[Section]:
    first = first_wrong(verdict)
    sections = [_curve(verdict, first), _tree(verdict, first), _tensor(verdict, sides, first)]
    if pictures := final_pictures(sides):
        lead = f"{pictures.name} of both runs. {pictures.caption}"
        sections.append(Section("Final image", lead, (pictures,)))
    sections.append(_checks(verdict, sides.reference, sides.port))
    return [section for section in sections if section is not None]


def _curve(verdict: Verdict, first: int | None) -> Section | None:
    wide, narrow = (draw_curve(verdict.rows, first, *size) for size in (WIDE, NARROW))
    if wide is None or narrow is None:
        return None
    lead = (
        "Relative error of every value in order of execution. The band is from rounding to the "
        "limit; a diamond is above its limit. Hover over a dot for its numbers, click it for its "
        "row."
    )
    return Section("Error of every value", lead, (Curves(wide, narrow),))


def _tree(verdict: Verdict, first: int | None) -> Section | None:
    if not verdict.rows:
        return None
    wrong = sum(row.wrong for row in verdict.rows)
    lead = (
        f"{wrong:,} of {len(verdict.rows):,} values are above their limit. The number beside a "
        "module is its largest error ÷ rounding."
    )
    return Section("Modules", lead, (Tree(build_tree(verdict.rows, first)),))


def _tensor(verdict: Verdict, sides: Sides, first: int | None) -> Section | None:
    """The wrong value; for a failed gate what it failed at; else the largest error."""
    at = first if first is not None else closest(verdict.rows)
    if first is None and verdict.site is not None:
        if pair := sides.find_name(verdict.site, verdict.port_site):
            tensor = show_value(sides.read(pair))
            return Section("The value that differs", str(pair.event), (tensor,))
        weights, expected = sides.port.weights() or {}, sides.reference.weights() or {}
        if verdict.site in expected or verdict.port_site in weights:
            tensor = show_parameter(
                expected.get(verdict.site), weights.get(verdict.port_site or "")
            )
            return Section("The parameter that differs", verdict.site, (tensor,))
    if at is None or not (pair := sides.find(verdict.rows[at])):
        return None
    tensor = show_value(sides.read(pair, verdict.rows[:at]))
    title = "The wrong value" if first is not None else "The largest error, below its limit"
    return Section(title, headline(verdict.rows[at]), (tensor,))


def _headline(verdict: Verdict) -> str:
    """The answer and the end of the site's name: a full name fills lines."""
    word = WORDS[verdict.verdict]
    if verdict.verdict != "diverge" or verdict.site is None:
        return word
    step = f", step {verdict.step}" if len({row.step for row in verdict.rows}) > 1 else ""
    return f"{word} at {short(verdict.site.rpartition('/')[2], 40)}{step}"


def _sentence(verdict: Verdict) -> str:
    """The verdict's sentence without the evidence that the first finding repeats."""
    if not verdict.findings:
        return verdict.sentence
    evidence = f" {verdict.findings[0].evidence.rstrip('.')}."
    rest = verdict.sentence.removesuffix(evidence)
    return rest if rest.endswith(".") else verdict.sentence


def _where(verdict: Verdict) -> list[tuple[str, str]]:
    """Site and step of the verdict; also the port's name where it is another."""
    if verdict.site is None:
        return []
    terms = [("value", str(Site(verdict.site, verdict.slot or "out")))]
    renamed = verdict.port_site not in (None, verdict.site)
    own = Site(verdict.port_site or "", verdict.port_slot or "out")
    terms += [("in the port", str(own))] if renamed else []
    terms += [("step", str(verdict.step))] if verdict.step is not None else []
    terms += [("last agreement", verdict.last_agreement)] if verdict.last_agreement else []
    return terms


def _breakable(text: str) -> Markup:
    """The escaped text; a line may break after a dot or slash of a name, not inside 1e-7."""
    text = re.sub(r"(?<=\de)-(?=\d)", "\N{NON-BREAKING HYPHEN}", text)
    return Markup("<wbr>").join(re.split(r"(?<=\w[./])(?=[A-Za-z_])", text))


def _facts(verdict: Verdict) -> tuple[Fact, ...]:
    """The key numbers."""
    if not verdict.rows:
        return ()
    items: list[Fact] = []
    if (at := first_wrong(verdict)) is not None:
        row = verdict.rows[at]
        error = "other shape" if row.error is None else number(row.error)
        items.append(Fact(error, "error of the first wrong value", "bad"))
        if row.error is not None and row.floor is not None:
            items.append(Fact(number(row.floor), "rounding alone would give"))
            items.append(Fact(times(row), "rounding"))
        items.append(Fact(f"{at:,}", "values were compared before it"))
    elif verdict.verdict == "agree" and (at := closest(verdict.rows)) is not None:
        row = verdict.rows[at]
        label = f"rounding: the largest error, at {short(row.name, 44)}"
        items.append(Fact(times(row), label, "good"))
    wrong = sum(row.wrong for row in verdict.rows)
    label = f"of {len(verdict.rows):,} values are above their limit"
    items.append(Fact(f"{wrong:,}", label, "bad" if wrong else "good"))
    return tuple(items)


def _checks(verdict: Verdict, reference: Trace, port: Trace) -> Section:
    """The last section: gates, remarks, conditions, names without a counterpart."""
    blocks: list[Table | Text | Fold] = []
    if verdict.gates:
        marks = {"ok": "✓ passed", "FAILED": "✗ failed"}
        rows = tuple((g.name, marks.get(g.word, g.word), g.detail) for g in verdict.gates)
        blocks.append(Table(("check", "", "what was found"), rows))
    if verdict.floor_source:
        blocks.append(Text(f"Rounding: {verdict.floor_source}."))
    if verdict.sources:
        head = ("wrong on the reference's inputs", "step", "error", "rounding", "error ÷ rounding")
        cells = tuple(
            (row.name, str(row.step), number(row.error), number(row.floor), times(row))
            for row in verdict.sources[:MAX_NAMES]
        )
        blocks.append(Table(head, cells, numeric=frozenset({1, 2, 3, 4})))
    blocks += _listed("remarks", verdict.remarks)
    blocks += _listed("unusual values", verdict.health)
    blocks.append(_conditions(reference, port))
    blocks += _folded("Only in the reference", verdict.unpaired_reference)
    blocks += _folded("Only in the port", verdict.unpaired_port)
    lead = "What was checked before any value was compared, and how both runs were made."
    return Section("Checks and conditions", lead, tuple(blocks))


def _listed(title: str, lines: Sequence[str]) -> list[Table | Fold]:
    """Lines as a table, folded when they are many."""
    if not lines or len(lines) > MAX_LINES:
        return _folded(title, lines)
    return [Table((title,), tuple((line,) for line in lines))]


def _folded(title: str, lines: Sequence[str]) -> list[Table | Fold]:
    if not lines:
        return []
    rows = tuple((line,) for line in lines[:MAX_NAMES])
    left = len(lines) - len(rows)
    rows += ((f"and {left:,} more",),) if left else ()
    return [Fold(f"{title} ({len(lines):,})", (Table(("",), rows),))]


def _conditions(reference: Trace, port: Trace) -> Table:
    """Both headers side by side; differences are marked."""
    expected, conditions = _header(reference), _header(port)
    rows = tuple(
        (_marked(key, expected, conditions), expected.get(key, ""), conditions.get(key, ""))
        for key in dict.fromkeys([*expected, *conditions])
    )
    return Table(("condition", "reference", "port"), rows)


def _header(trace: Trace) -> dict[str, str]:
    header = trace.header
    facts = {
        "folder": str(trace.folder),
        "framework": header.framework,
        "device": header.device,
        "dtype": header.dtype,
        "values": f"{len(trace.events):,}" + (f", {trace.lost:,} lost" if trace.lost else ""),
        "run ended": "by itself" if header.complete else "incomplete",
    }
    facts |= {short(str(key), 80): _text(value) for key, value in header.conditions.items()}
    return {key: value for key, value in facts.items() if value}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return short(text, MAX_CONDITION)


def _marked(key: str, expected: Mapping[str, str], conditions: Mapping[str, str]) -> str:
    both = key in expected and key in conditions and key != "folder"
    return f"≠\N{NO-BREAK SPACE}{key}" if both and expected[key] != conditions[key] else key
