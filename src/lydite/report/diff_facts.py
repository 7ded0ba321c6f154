"""What stands around the pictures of a comparison: key figures, checks, conditions, leftovers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from lydite.diff.result import Verdict
from lydite.report.diff_rows import closest, first_wrong, number, short, times
from lydite.report.page import Fact, Fold, Table, Text
from lydite.trace.store import Trace

MOST_NAMES = 400  # of a list of names without a counterpart
MOST_LINES = 12  # of remarks in sight
MOST_LETTERS = 400  # of a condition


def sentence(verdict: Verdict) -> str:
    """The verdict's sentence without the evidence that the first card repeats."""
    if not verdict.findings:
        return verdict.sentence
    evidence = f" {verdict.findings[0].evidence.rstrip('.')}."
    rest = verdict.sentence.removesuffix(evidence)
    return rest if rest.endswith(".") else verdict.sentence


def where(verdict: Verdict) -> list[tuple[str, str]]:
    """The place, under its name in the port too where that is another."""
    if verdict.site is None:
        return []
    place = "" if verdict.place in (None, "out") else f" [{verdict.place}]"
    found = [("value", f"{verdict.site}{place}")]
    renamed = verdict.port_site not in (None, verdict.site)
    found += [("in the port", str(verdict.port_site))] if renamed else []
    found += [("step", str(verdict.step))] if verdict.step is not None else []
    found += [("last agreement", verdict.last_agreement)] if verdict.last_agreement else []
    return found


def breakable(text: str) -> Markup:
    """The text escaped; a name may go on in the next line after a dot or slash, 1e-7 may not."""
    text = re.sub(r"(?<=\de)-(?=\d)", "\N{NON-BREAKING HYPHEN}", text)
    return Markup("<wbr>").join(re.split(r"(?<=\w[./])(?=[A-Za-z_])", text))


def facts(verdict: Verdict) -> tuple[Fact, ...]:
    """The numbers to remember."""
    if not verdict.rows:
        return ()
    items: list[Fact] = []
    if (at := first_wrong(verdict)) is not None:
        row = verdict.rows[at]
        error = "other shape" if row.error is None else number(row.error)
        items.append(Fact(error, "error of the first wrong value", "bad"))
        if row.error is not None and row.floor is not None:
            items.append(Fact(number(row.floor), "of it is explained by rounding"))
            items.append(Fact(times(row), "rounding"))
        items.append(Fact(f"{at:,}", "values were compared before it"))
    elif verdict.verdict == "agree" and (at := closest(verdict.rows)) is not None:
        row = verdict.rows[at]
        label = f"rounding is the largest error, at {short(row.name, 44)}"
        items.append(Fact(times(row), label, "good"))
    wrong = sum(row.wrong for row in verdict.rows)
    label = f"of {len(verdict.rows):,} values are beyond their limit"
    items.append(Fact(f"{wrong:,}", label, "bad" if wrong else "good"))
    return tuple(items)


def around(
    verdict: Verdict, reference: Trace, port: Trace
) -> tuple[str, str, tuple[Table | Text | Fold, ...]]:
    """Title, lead and blocks of the last chapter."""
    blocks: list[Table | Text | Fold] = []
    if verdict.gates:
        marks = {"ok": "✓ passed", "FAILED": "✗ failed"}
        rows = tuple((g.name, marks.get(g.word, g.word), g.detail) for g in verdict.gates)
        blocks.append(Table(("check", "", "what was found"), rows))
    if verdict.floor_source:
        blocks.append(Text(f"Rounding is {verdict.floor_source}."))
    if verdict.sources:
        head = ("goes wrong by itself", "step", "error", "rounding", "error ÷ rounding")
        cells = tuple(
            (row.name, str(row.step), number(row.error), number(row.floor), times(row))
            for row in verdict.sources[:MOST_NAMES]
        )
        blocks.append(Table(head, cells, numeric=frozenset({1, 2, 3, 4})))
    blocks += _told("remarks", verdict.remarks)
    blocks += _told("health of the values", verdict.health)
    blocks.append(_conditions(reference, port))
    blocks += _folded("Only in the reference", verdict.unpaired_reference)
    blocks += _folded("Only in the port", verdict.unpaired_port)
    lead = "What was checked before any value was compared, and what both runs say of themselves."
    return "Checks and conditions", lead, tuple(blocks)


def _told(title: str, lines: Sequence[str]) -> list[Table | Fold]:
    """Lines that are worth reading: in sight while they are few."""
    if not lines or len(lines) > MOST_LINES:
        return _folded(title, lines)
    return [Table((title,), tuple((line,) for line in lines))]


def _folded(title: str, lines: Sequence[str]) -> list[Table | Fold]:
    if not lines:
        return []
    rows = tuple((line,) for line in lines[:MOST_NAMES])
    left = len(lines) - len(rows)
    rows += ((f"and {left:,} more",),) if left else ()
    return [Fold(f"{title} ({len(lines):,})", (Table(("",), rows),))]


def _conditions(reference: Trace, port: Trace) -> Table:
    """Both headers side by side; what differs is marked."""
    theirs, ours = _described(reference), _described(port)
    rows = tuple(
        (_marked(key, theirs, ours), theirs.get(key, ""), ours.get(key, ""))
        for key in dict.fromkeys([*theirs, *ours])
    )
    return Table(("condition", "reference", "port"), rows)


def _described(trace: Trace) -> dict[str, str]:
    header = trace.header
    facts = {
        "folder": str(trace.folder),
        "framework": header.framework,
        "device": header.device,
        "dtype": header.dtype,
        "values": f"{len(trace.events):,}" + (f", {trace.lost:,} lost" if trace.lost else ""),
        "run ended": "by itself" if header.complete else "cut off",
    }
    facts |= {short(str(key), 80): _text(value) for key, value in header.conditions.items()}
    return {key: value for key, value in facts.items() if value}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return short(text, MOST_LETTERS)


def _marked(key: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    both = key in theirs and key in ours and key != "folder"
    return f"≠\N{NO-BREAK SPACE}{key}" if both and theirs[key] != ours[key] else key
