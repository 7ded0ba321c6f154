"""Score a judge on the seeded bugs: where it points, how much it flags, its false alarms.

Both sides are arguments: `reference(dtype, part)` gives two folders, the reference's trace and a
second one that shows its own rounding, and `port(case, dtype)` writes a trace of the port with a
case applied. A judge is `judge(reference, port, floor)` and returns anything with `verdict`
("agree", "diverge", or another word that is no alarm), `site`, `slot` and `step`, and `flagged` or
`rows`. "NAME, injected" is the judge NAME on a port that runs on the reference's values; it flags
its wrong rows and `sources`.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lydite.trace.reader import Trace
from seeded_bugs.cases import Bug, Control, Part, Site

Judge = Callable[[Path, Path, Path], Any]
Case = Bug | Control | None  # None: the port as it is
Reference = Callable[[str, Part], tuple[Path, Path]]  # dtype of the port -> reference, floor
Port = Callable[[Case, str], Path]
INJECTED = ", injected"
BLOCK_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Score:
    """The result of one judge on one case."""

    judge: str
    dtype: str
    case: str
    kind: str  # "bug", "control", "clean"
    held_out: bool
    seen: bool  # the bug is above rounding in this dtype
    verdict: str
    site: str | None
    slot: str | None
    step: int | None
    truth: str
    exact: bool  # the site itself, or another that holds the same array
    block: bool  # the right block, or better
    component: bool
    flagged: int  # values, counted at each step
    sites: int  # sites, counted once over all steps
    kinds: int  # sites, counted once over all steps and blocks
    confirms: bool  # injected: the site of the run without injection is among them
    causes: tuple[str, ...]  # named by the judge, best first
    cause: str

    @property
    def alarm(self) -> bool:
        return self.verdict == "diverge"


def run(
    cases: Iterable[Case],
    *,
    dtypes: Iterable[str],
    judges: Mapping[str, Judge],
    reference: Reference,
    port: Port,
    done: Callable[[Path], None] = lambda folder: None,
) -> Iterator[Score]:
    """One score per dtype, case and judge; `done` gets each port folder when all have judged it."""
    cases = list(cases)
    for dtype in dtypes:
        same: dict[Path, SameArrays] = {}
        for case in cases:
            trace, floor = reference(dtype, case.part if isinstance(case, Bug) else "draw")
            if trace not in same:
                same[trace] = SameArrays(trace)
            folder = port(case, dtype)
            plain: dict[str, Any] = {}
            for name, judge in judges.items():
                plain[name] = verdict = judge(trace, folder, floor)
                free = plain.get(name.removesuffix(INJECTED))
                yield score(name, dtype, case, verdict, same[trace], free)
            done(folder)


def score(
    judge: str, dtype: str, case: Case, verdict: Any, same: "SameArrays", free: Any = None
) -> Score:
    """A verdict compared with the truth; `free` is the judge's verdict without injection."""
    site = _site(verdict)
    truth = case.site if isinstance(case, Bug) else ()
    exact = block = component = False
    if site is not None and isinstance(case, Bug):
        in_step = verdict.step in (None, case.step)
        exact = in_step and _module(site) in same.all(truth, case.step)
        block = exact or any(block_of(site.name) == block_of(true.name) for true in truth)
        component = block or site.name.partition("/")[0] == case.component
    findings = getattr(verdict, "findings", ())
    wrong = _wrong(verdict)
    before = _site(free) if free is not None else None
    return Score(
        judge=judge,
        dtype=dtype,
        case=case.id if case else "clean",
        kind="bug" if isinstance(case, Bug) else "control" if case else "clean",
        held_out=isinstance(case, Bug) and case.held_out,
        seen=isinstance(case, Bug) and dtype in case.seen_in,
        verdict=verdict.verdict,
        site=site.name if site else None,
        slot=site.slot if site else None,
        step=verdict.step,
        truth=" | ".join(map(str, truth)),
        exact=exact,
        block=block,
        component=component,
        flagged=_flagged(verdict),
        sites=len(wrong),
        kinds=len({(BLOCK_NUMBER.sub(".*", name), slot) for name, slot in wrong}),
        confirms=before is not None and _module(before) in wrong,
        causes=tuple(finding.cause for finding in findings),
        cause=case.cause if isinstance(case, Bug) else "",
    )


class SameArrays:
    """Sites of a trace that hold one array, such as a module's input and its first child's."""

    def __init__(self, folder: Path) -> None:
        self._hashes: dict[tuple[Site, int], set[str]] = {}
        self._sites: dict[tuple[str, int], set[Site]] = {}
        with Trace.open(folder) as trace:
            for event in trace.events:
                site = Site(event.name, event.slot)
                if event.hash:
                    self._hashes.setdefault((site, event.step), set()).add(event.hash)
                    self._sites.setdefault((event.hash, event.step), set()).add(site)

    def all(self, sites: Iterable[Site], step: int) -> set[Site]:
        """These sites and every other with the same content at this step."""
        same = set(sites)
        for site in list(same):
            for hash in self._hashes.get((site, step), ()):
                same |= self._sites[hash, step]
        return same


@dataclass(frozen=True)
class Summary:
    """One line of the table: a judge in a dtype on one part of the bugs."""

    judge: str
    dtype: str
    part: str  # "dev", "held-out"
    bugs: int  # above rounding
    exact: int
    block: int
    component: int
    flagged: float  # median over those bugs
    sites: float  # median
    sites_mean: float
    kinds: float  # median
    confirmed: int
    unseen: int  # below rounding
    unseen_fair: int  # of these: no alarm, or at the right site
    clean_flagged: int
    controls: int
    false_alarms: int  # controls and the clean port


def summarize(scores: Iterable[Score]) -> list[Summary]:
    """The table of the bench."""
    scores = list(scores)
    keys = dict.fromkeys((s.judge, s.dtype) for s in scores)
    lines: list[Summary] = []
    for judge, dtype in keys:
        rows = [s for s in scores if (s.judge, s.dtype) == (judge, dtype)]
        sound = [s for s in rows if s.kind != "bug"]
        for part in ("dev", "held-out"):
            bugs = [s for s in rows if s.kind == "bug" and s.held_out == (part == "held-out")]
            seen = [s for s in bugs if s.seen]
            unseen = [s for s in bugs if not s.seen]
            lines.append(
                Summary(
                    judge,
                    dtype,
                    part,
                    bugs=len(seen),
                    exact=sum(s.exact for s in seen),
                    block=sum(s.block for s in seen),
                    component=sum(s.component for s in seen),
                    flagged=statistics.median([s.flagged for s in seen] or [0]),
                    sites=statistics.median([s.sites for s in seen] or [0]),
                    sites_mean=statistics.fmean([s.sites for s in seen] or [0]),
                    kinds=statistics.median([s.kinds for s in seen] or [0]),
                    confirmed=sum(s.confirms for s in seen),
                    unseen=len(unseen),
                    unseen_fair=sum(not s.alarm or s.exact for s in unseen),
                    clean_flagged=sum(s.flagged for s in sound if s.kind == "clean"),
                    controls=sum(s.kind == "control" for s in sound),
                    false_alarms=sum(s.alarm for s in sound),
                )
            )
    return lines


def block_of(name: str) -> str:
    """The block a site is in: up to the first number, or a middle block, or the first child."""
    component, _, path = name.partition("/")
    match = re.match(r"(?:[^.]+\.)*?(?:\d+|mid_block)(?=\.|$)", path)
    return f"{component}/{match.group() if match else path.partition('.')[0]}"


def _site(verdict: Any) -> Site | None:
    if verdict.site is None:
        return None
    return Site(verdict.site, verdict.slot or "out")


def _module(site: Site) -> Site:
    """A parameter that differs counts as its module's output."""
    module, _, last = site.name.rpartition(".")
    return Site(module) if last in ("weight", "bias") else site


def _flagged(verdict: Any) -> int:
    flagged = getattr(verdict, "flagged", None)
    if flagged is not None:
        return flagged if isinstance(flagged, int) else len(flagged)
    return len(_rows(verdict))


def _wrong(verdict: Any) -> set[Site]:
    """The sites that a judge with rows flags."""
    return {Site(row.site, row.slot) for row in _rows(verdict)}


def _rows(verdict: Any) -> list[Any]:
    """Wrong values, and the tables and inputs that are wrong by themselves."""
    wrong = [row for row in getattr(verdict, "rows", ()) if row.wrong]
    known = {id(row) for row in wrong}
    return wrong + [row for row in getattr(verdict, "sources", ()) if id(row) not in known]
