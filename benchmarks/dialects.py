"""Ports with names of their own: does `lydite diff` find the place that the right map would show?

    .venv/bin/python benchmarks/zoo.py --keep traces --no-inject       the traces, once
    .venv/bin/python benchmarks/dialects.py traces

Each trace of the bench is told again in other names (lydite.zoo.dialects) and compared twice: with
the map that is right for it, and without any. The same first wrong value counts as found; another
that holds the same array does too. A few minutes for each dialect on two cores.
"""

import argparse
import os
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # arrays are tiny: threads only wait

from lydite.diff.compare import compare
from lydite.diff.renames import Rename
from lydite.diff.result import Verdict
from lydite.trace.store import Trace
from lydite.zoo.cases import bugs, controls
from lydite.zoo.dialects import DIALECTS, retell

FLOORS = {"float32": "float64", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Case:
    """One trace of the bench."""

    id: str
    part: str = "draw"
    bug: bool = False


@dataclass(frozen=True)
class Score:
    """What was said of a case with the right map, and without one."""

    case: Case
    right: Verdict
    said: Verdict
    same: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("traces", type=Path, help="what benchmarks/zoo.py --keep made")
    parser.add_argument("--dialects", default=",".join(DIALECTS))
    parser.add_argument("--dtype", default="float32", choices=FLOORS)
    parser.add_argument("--only", default="", help="ids of cases, with commas")
    options = parser.parse_args()
    cases = [Case("clean"), *(Case(each.id) for each in controls() if each.dump is None)]
    cases += [Case(bug.id, bug.part, bug=True) for bug in bugs() if options.dtype in bug.seen_in]
    wanted = options.only.split(",") if options.only else [case.id for case in cases]
    cases = [case for case in cases if case.id in wanted]
    for name in options.dialects.split(","):
        judge = partial(score, options.traces, name, options.dtype)
        with ProcessPoolExecutor(2) as pool:
            report(name, list(pool.map(judge, cases)))


def score(traces: Path, dialect: str, dtype: str, case: Case) -> Score:
    """One case in one dialect."""
    folder = Path(tempfile.mkdtemp())
    try:
        told = retell(traces / f"port-{dtype}-{case.id}", folder / "told", DIALECTS[dialect])
        names = {
            ours: Rename(tuple(refs) if isinstance(refs, list) else (refs,))
            for ours, refs in told.items()
        }
        with (
            Trace.open(traces / f"reference-{case.part}-float32") as reference,
            Trace.open(traces / f"reference-{case.part}-{FLOORS[dtype]}") as floor,
            Trace.open(folder / "told") as port,
        ):
            right = compare(reference, port, floor=floor, renames=names)
            said = compare(reference, port, floor=floor)
            return Score(case, right, said, is_same(right, said, port))
    finally:
        shutil.rmtree(folder)


def is_same(right: Verdict, said: Verdict, port: Trace) -> bool:
    """Whether two verdicts point at one array of the port."""
    if (right.verdict, right.step) != (said.verdict, said.step):
        return False
    arrays = [
        {event.hash for event in port.events if event.name == found.port_site and event.hash}
        for found in (right, said)
    ]
    return right.port_site == said.port_site or bool(arrays[0] & arrays[1])


def report(dialect: str, scores: list[Score]) -> None:
    """The misses, then the score."""
    found = [each for each in scores if each.case.bug]
    sound = [each for each in scores if not each.case.bug]
    for each in scores:
        if not each.same:
            said, right = each.said.port_site or each.said.verdict, each.right.port_site
            print(f"{dialect} {each.case.id}: said {said}, right {right or 'no bug'}")
    alarms = sum(each.said.verdict == "diverge" for each in sound)
    print(f"{dialect}: {DIALECTS[dialect].about}")
    print(
        f"  {sum(each.same for each in found)} of {len(found)} bugs at the place the right map "
        f"shows; {alarms} false alarms on {len(sound)} clean ports"
    )


if __name__ == "__main__":
    main()
