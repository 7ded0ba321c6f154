"""The page of `lydite diff --html`: verdict, error curve, module tree, the wrong value, pictures.

One file that fetches nothing. Names come from strangers' files: templates escape every text, no
data stands inside a script, and the page's own policy runs no script but the one made here.
"""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from lydite.core.files import write_atomic
from lydite.diff.result import Verdict
from lydite.report.diff_curve import Curve, draw
from lydite.report.diff_facts import around, breakable, facts, sentence, where
from lydite.report.diff_pictures import Pictures, final_pictures
from lydite.report.diff_rows import closest, first_wrong
from lydite.report.diff_tensor import Tensor, headline, parameter, picture
from lydite.report.diff_tree import Branch, grow
from lydite.report.diff_values import Renames, Sides
from lydite.report.page import GENERATOR, Fold, Table, Text, environment
from lydite.trace.store import Trace

WIDE, NARROW = (1000.0, 400.0), (380.0, 330.0)
WORDS = {"agree": "They agree", "diverge": "They diverge", "cannot-compare": "Cannot compare"}
TONES = {"agree": "good", "diverge": "bad", "cannot-compare": "warn"}


@dataclass(frozen=True)
class Curves:
    """One curve for a desk, one for a phone."""

    wide: Curve
    narrow: Curve


@dataclass(frozen=True)
class Tree:
    """The modules, the way to the bug open."""

    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Section:
    """A chapter whose blocks are a page's, or this page's own."""

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
) -> None:
    """Write the page of a comparison, whole or not at all; `renames` is the map it had."""
    page = render_page(verdict, reference, port, renames)
    write_atomic(path, page.encode(errors="replace"))  # a folder's name need not be UTF-8


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
        word=WORDS[verdict.verdict],
        tone=TONES[verdict.verdict],
        sentence=breakable(sentence(verdict)),
        sides=_names(reference.folder, port.folder),
        facts=facts(verdict),
        where=[(term, breakable(text)) for term, text in where(verdict)],
        sections=_sections(verdict, Sides.of(verdict, reference, port, renames)),
    )


def _names(reference: Path, port: Path) -> tuple[str, str]:
    """What to call the two runs: the folders' last names, where they tell them apart."""
    if reference.name and port.name and reference.name != port.name:
        return reference.name, port.name
    return str(reference), str(port)


def _sections(verdict: Verdict, sides: Sides) -> list[Section]:
    first = first_wrong(verdict)
    sections = [_curve(verdict, first), _tree(verdict, first), _tensor(verdict, sides, first)]
    if pictures := final_pictures(sides):
        lead = f"{pictures.name}, as both runs left it. {pictures.caption}"
        sections.append(Section("The picture", lead, (pictures,)))
    sections.append(Section(*around(verdict, sides.reference, sides.port)))
    return [section for section in sections if section is not None]


def _curve(verdict: Verdict, first: int | None) -> Section | None:
    wide, narrow = (draw(verdict.rows, first, *size) for size in (WIDE, NARROW))
    if wide is None or narrow is None:
        return None
    lead = (
        "Relative error of every value in order of execution. The band is what rounding explains; "
        "a diamond lies above its limit. Point at a dot for its numbers, click it for its row."
    )
    return Section("Error along the run", lead, (Curves(wide, narrow),))


def _tree(verdict: Verdict, first: int | None) -> Section | None:
    if not verdict.rows:
        return None
    wrong = sum(row.wrong for row in verdict.rows)
    lead = (
        f"{wrong:,} of {len(verdict.rows):,} values are beyond their limit. Beside a module stands "
        "its worst error in units of rounding."
    )
    return Section("Modules", lead, (Tree(grow(verdict.rows, first)),))


def _tensor(verdict: Verdict, sides: Sides, first: int | None) -> Section | None:
    """The wrong value; of a verdict at a gate what it failed at; else the nearest to its limit."""
    at = first if first is not None else closest(verdict.rows)
    if first is None and verdict.site is not None:
        if found := sides.find_name(verdict.site, verdict.port_site):
            tensor = picture(sides.read(found))
            return Section("The value that differs", str(found.site), (tensor,))
        ours, theirs = sides.port.weights() or {}, sides.reference.weights() or {}
        if verdict.site in theirs or verdict.port_site in ours:
            tensor = parameter(theirs.get(verdict.site), ours.get(verdict.port_site or ""))
            return Section("The parameter that differs", verdict.site, (tensor,))
    if at is None or not (found := sides.find(verdict.rows[at])):
        return None
    tensor = picture(sides.read(found, verdict.rows[:at]))
    title = "The wrong value" if first is not None else "The largest error, within its limit"
    return Section(title, headline(verdict.rows[at]), (tensor,))
