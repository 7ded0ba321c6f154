"""The verdict in words: one sentence first, numbers in it."""

from collections.abc import Sequence

from lydite.diff.pairing import Pairing
from lydite.diff.result import Finding, Row
from lydite.diff.rows import Sides


def divergence(
    rows: Sequence[Row], first: int, last: Row | None, findings: Sequence[Finding]
) -> str:
    """Where, how much, since when, and what it looks like."""
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
    ]
    if inputs and not row.place.startswith("in"):
        worst = max(each.error or 0.0 for each in inputs)
        parts.append(f"its inputs agree ({worst:.2g})")
    elif last is not None:
        parts.append(f"the last agreement is {last.name} ({last.error or 0.0:.2g})")
    sentence = "; ".join(parts) + "."
    if findings:
        sentence += f" {findings[0].evidence.rstrip('.')}."
    return sentence


def agreement(rows: Sequence[Row], sides: Sides, pairing: Pairing) -> str:
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
    alone = len(pairing.unpaired_reference) + len(pairing.unpaired_port)
    if alone:
        text += f" {alone} names have no counterpart."
    return text
