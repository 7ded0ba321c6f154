"""The verdict in words: one sentence first, numbers in it."""

from collections.abc import Sequence

from lydite.diff.calls import Pairing
from lydite.diff.reach import Reach
from lydite.diff.result import Finding, Row

SHOWN = 3  # names in a sentence


def divergence(
    rows: Sequence[Row],
    first: int,
    last: Row | None,
    findings: Sequence[Finding],
    between: int = 0,
) -> str:
    """Where, how much, since when, and what it looks like.

    `between` counts the port's values without a counterpart since the last agreement.
    """
    row = rows[first]
    step = f" at step {row.step}" if len({each.step for each in rows}) > 1 else ""
    if row.error is None:
        what = f"{row.name} is the first value that cannot be right{step}: it has another shape"
    else:
        explained = f"rounding explains {row.floor:.2g}" if row.floor else "nothing is explained"
        what = f"{row.name} is the first wrong value{step}: error {row.error:.3g} where {explained}"
    parts = [what]
    inputs = [
        each
        for each in rows[:first]
        if (each.site, each.step, each.call) == (row.site, row.step, row.call)
        and each.place.startswith("in")
        and each.error is not None
        and not each.wrong
    ]
    if inputs and not row.place.startswith("in"):
        worst = max(each.error or 0.0 for each in inputs)
        parts.append(f"its inputs agree ({worst:.2g})")
    elif last is not None:
        parts.append(f"the last agreement is {last.name} ({last.error or 0.0:.2g})")
        if between:
            parts.append(f"{_values(between)} of the port between them {_have(between)}")
    sentence = "; ".join(parts) + "."
    if findings:
        sentence += f" {findings[0].evidence.rstrip('.')}."
    return sentence


def agreement(rows: Sequence[Row], far: Reach, pairing: Pairing) -> str:
    """How many values agree, and how close they come to their limits."""
    known = [row for row in rows if row.error is not None and not row.wrong]
    if not known:
        return "The tables agree; no activation was recorded on both sides."
    worst = max(known, key=lambda row: (row.error or 0.0) / (row.floor or 1.0))
    ratio = (worst.error or 0.0) / (worst.floor or 1.0)
    text = (
        f"All {len(known)} values agree: the largest error is {ratio:.1f} × rounding "
        f"({worst.error:.2g} at {worst.name})."
    )
    coarse = {row.dtype for row in known} & {"bf16", "f16", "f8_e4m3", "f8_e5m2"}
    if coarse:
        blind = max(row.limit or 0.0 for row in known)
        text += (
            f" In {' and '.join(sorted(coarse))} differences below {blind:.1g} cannot be seen at "
            "the coarsest place; run the port in float32 to see more."
        )
    theirs, ours = len(pairing.unpaired_reference), len(pairing.unpaired_port)
    if theirs or ours:
        text += f" {theirs} names of the reference and {ours} of the port have no counterpart."
    if far.after and far.last is not None:
        count = len(far.after)
        were = "was" if count == 1 else "were"
        text += (
            f" {_values(count)} of the port after {far.last.name} {were} not compared "
            f"({_listed(far.names)})."
        )
    return text


def unreached(rows: Sequence[Row], far: Reach) -> str:
    """That what was compared agrees, and that it does not reach the end."""
    known = [row for row in rows if row.error is not None and not row.wrong]
    count = len(far.after)
    if far.last is None:
        text = f"No value was compared: {_values(count)} of the port {_have(count)}"
    else:
        step = f", step {far.last.step}" if len({row.step for row in rows}) > 1 else ""
        text = (
            f"The end was not compared. All {len(known)} compared values agree, but "
            f"{_values(count)} of the port after {far.last.name}{step} {_have(count)}"
        )
    if far.unlike:
        text += f" that could be compared ({far.unlike} of another shape, or without values)"
    text += f": {_listed(far.names)}."
    if far.unlike < count:
        return f"{text} Give their names in the reference, or null, in a map.json (--map)."
    return f"{text} Record them whole and in one shape on both sides."


def _listed(names: Sequence[str]) -> str:
    """The first names, and the last."""
    if len(names) <= SHOWN + 1:
        return ", ".join(names)
    return f"{', '.join(names[:SHOWN])} … {names[-1]}"


def _values(count: int) -> str:
    return f"{count} value{'s' if count != 1 else ''}"


def _have(count: int) -> str:
    return f"{'has' if count == 1 else 'have'} no counterpart"
