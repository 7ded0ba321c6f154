"""Ports with other names: does `lydite diff` find the site that the right map would show?

    .venv/bin/python benchmarks/score_seeded_bugs.py --keep traces --no-inject    record once
    .venv/bin/python benchmarks/score_renamed_traces.py traces/sd3

Each recorded trace is written again with other names (seeded_bugs.renamed_traces) and compared
twice: with the map that is right for it, and without any. A bug counts as found where both give the
same first wrong value, or two values that hold the same array. A few minutes for each naming on two
cores.
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
from lydite.diff.name_map import Rename
from lydite.diff.result import Verdict
from lydite.trace.events import Site
from lydite.trace.reader import Trace
from seeded_bugs.cases import bugs, controls
from seeded_bugs.renamed_traces import NAMINGS, write_renamed

FLOORS = {"float32": "float64", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Case:
    """One recorded trace."""

    id: str
    part: str = "draw"
    bug: bool = False


@dataclass(frozen=True)
class Score:
    """The verdicts on a case with the right map, and without a map."""

    case: Case
    right: Verdict
    unaided: Verdict
    same: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("traces", type=Path, help="the folder sd3 of score_seeded_bugs.py --keep")
    parser.add_argument("--namings", default=",".join(NAMINGS))
    parser.add_argument("--dtype", default="float32", choices=FLOORS)
    parser.add_argument("--only", default="", help="ids of cases, with commas")
    options = parser.parse_args()
    cases = [Case("clean"), *(Case(control.id) for control in controls() if control.dump is None)]
    cases += [Case(bug.id, bug.part, bug=True) for bug in bugs() if options.dtype in bug.seen_in]
    wanted = options.only.split(",") if options.only else [case.id for case in cases]
    cases = [case for case in cases if case.id in wanted]
    for name in options.namings.split(","):
        judge = partial(score, options.traces, name, options.dtype)
        with ProcessPoolExecutor(2) as pool:
            report(name, list(pool.map(judge, cases)))


def score(traces: Path, naming: str, dtype: str, case: Case) -> Score:
    """One case with one naming."""
    folder = Path(tempfile.mkdtemp())
    try:
        recorded, renamed = traces / f"port-{dtype}-{case.id}", folder / "renamed"
        names = {
            name: Rename(tuple(map(Site, refs if isinstance(refs, list) else [refs])))
            for name, refs in write_renamed(recorded, renamed, NAMINGS[naming]).items()
        }
        with (
            Trace.open(traces / f"reference-{case.part}-float32") as reference,
            Trace.open(traces / f"reference-{case.part}-{FLOORS[dtype]}") as floor,
            Trace.open(renamed) as port,
        ):
            right = compare(reference, port, floor=floor, renames=names)
            unaided = compare(reference, port, floor=floor)
            return Score(case, right, unaided, is_same(right, unaided, port))
    finally:
        shutil.rmtree(folder)


def is_same(right: Verdict, unaided: Verdict, port: Trace) -> bool:
    """Whether two verdicts point at one array of the port."""
    if (right.verdict, right.step) != (unaided.verdict, unaided.step):
        return False
    arrays = [
        {event.hash for event in port.events if event.name == verdict.port_site and event.hash}
        for verdict in (right, unaided)
    ]
    return right.port_site == unaided.port_site or bool(arrays[0] & arrays[1])


def report(naming: str, scores: list[Score]) -> None:
    """The misses, then the score."""
    bugs = [score for score in scores if score.case.bug]
    sound = [score for score in scores if not score.case.bug]
    for score in scores:
        if not score.same:
            site, right = score.unaided.port_site or score.unaided.verdict, score.right.port_site
            print(f"{naming} {score.case.id}: {site}, right {right or 'no bug'}")
    alarms = sum(score.unaided.verdict == "diverge" for score in sound)
    print(f"{naming}: {NAMINGS[naming].about}")
    print(
        f"  {sum(score.same for score in bugs)} of {len(bugs)} bugs at the site the right map "
        f"shows; {alarms} false alarms on {len(sound)} clean ports"
    )


if __name__ == "__main__":
    main()
