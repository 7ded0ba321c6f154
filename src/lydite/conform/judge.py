"""Hold a candidate against the problem: which step goes wrong, by how much, and why."""

import math
from pathlib import Path

import numpy as np

from lydite.conform.answers import (
    Candidate,
    CannotRead,
    read_answer,
    read_candidate,
    recorded_before,
)
from lydite.conform.explain import JUDGED, MOST_FINDINGS, explain, explain_tables
from lydite.conform.measure import (
    SIGMA,
    UNIT,
    Bound,
    Key,
    bounds,
    error_of,
    timestep_limit,
)
from lydite.conform.problem import Problem
from lydite.conform.replay import CannotReplay, Run, plan_for, run
from lydite.conform.result import Finding, Row, Verdict
from lydite.core.errors import InputError, at
from lydite.trace.reader import Trace


def judge_path(problem: Problem, path: Path) -> Verdict:
    """The verdict on an answer: a JSON file, or a trace folder."""
    if path.is_file():
        return judge(problem, read_answer(path, problem))
    if not path.exists():
        raise InputError(
            f"{at(path)}: not there. Expected an answer: a JSON file, or the folder of a trace."
        )
    return judge_trace(problem, path)


def judge_trace(problem: Problem, folder: Path) -> Verdict:
    """The verdict on a trace folder."""
    with Trace.open(folder) as trace:
        try:
            candidate = read_candidate(trace, problem)
        except CannotRead as error:
            return Verdict("cannot-judge", f"{error}.")
    return judge(problem, candidate)


def judge(problem: Problem, candidate: Candidate) -> Verdict:
    """The verdict on what a candidate wrote."""
    plan = plan_for(problem)
    try:
        exact = run(plan)
    except CannotReplay as error:
        return Verdict("cannot-judge", f"the problem itself cannot be run: {error}.")
    candidate = recorded_before(candidate, problem, exact.steps) or candidate
    rows = table_rows(problem, candidate)
    asked_for_x = problem.sampler is not None
    if candidate.values or candidate.shapes or (asked_for_x and not candidate.tables):
        rows += _rows(exact, candidate, bounds(plan, exact, candidate.dtype))
    if not any(row.judged for row in rows):
        return Verdict(
            "cannot-judge",
            "nothing was judged: the answer has no x, sigma or timestep of any step of this "
            "problem. Write x after step i as event sampler/x with step i.",
        )
    wrong = next((row for row in rows if row.judged and row.wrong), None)
    remarks = candidate.remarks + (() if candidate.complete else (UNFINISHED,))
    if wrong is None and problem.sampler is not None and not any(row.name == "x" for row in rows):
        return Verdict(
            "cannot-judge",
            f"nothing of {problem.sampler} was judged: the answer has no x. Its sigmas and "
            "timesteps are right. Write x after each step.",
            rows=tuple(rows),
            remarks=remarks,
        )
    if wrong is None:
        return _conforms(problem, candidate, rows, remarks)
    findings = _shape(problem, candidate) or (
        *(explain_tables(plan, candidate) if candidate.tables else ()),
        *explain(plan, candidate),
        *_length(exact, candidate),
    )
    findings = tuple({finding.cause: finding for finding in findings}.values())[:MOST_FINDINGS]
    return Verdict(
        "deviates",
        _sentence(problem, wrong, findings),
        wrong.step,
        wrong.error,
        wrong.floor,
        findings,
        tuple(rows),
        remarks,
    )


UNFINISHED = "trace.json says the run did not end by itself (`complete` is false)"


def _rows(exact: Run, candidate: Candidate, limits: dict[Key, Bound]) -> list[Row]:
    """In the order of a run: a step's sigma, timestep and calls, then its x."""
    names = ("sigma", "timestep", "model_input", "prediction", "denoised", "x")
    has_x = any(name == "x" for name, _, _ in candidate.values) or bool(candidate.shapes)
    wanted = {key for key in exact.values if key[0] == "x"} if has_x else set()
    rows = []
    for key in sorted(
        wanted | set(candidate.values), key=lambda k: (k[1], k[0] == "x", k[2], names.index(k[0]))
    ):
        name, step, call = key
        value, ours = candidate.values.get(key), exact.values.get(key)
        judged = name in JUDGED
        if ours is None and name != "x":
            continue  # another number of calls, or a step that ours does not have
        error = None if value is None or ours is None else error_of(name, value, ours)
        bound = limits.get(key, Bound(0.0, 0.0))
        rows.append(Row(name, step, call, error, bound.floor, bound.limit, judged))
    return rows


def _conforms(
    problem: Problem, candidate: Candidate, rows: list[Row], remarks: tuple[str, ...]
) -> Verdict:
    judged = [row for row in rows if row.judged]
    xs = [row for row in judged if row.name == "x"]
    worst = max(xs or judged, key=lambda row: row.error or 0.0)
    if xs:
        what = f"{problem.sampler}, {len(xs)} step{'s' if len(xs) > 1 else ''}"
    else:
        what = f"{problem.schedule or 'schedule'}, {problem.steps} steps"
    sentence = (
        f"{what}: the largest error is {worst.error:.1e}, where rounding makes {worst.floor:.1e} "
        f"and {worst.limit:.1e} is allowed."
    )
    other = next((row for row in rows if not row.judged and row.wrong), None)
    if other is not None:
        remarks += (
            f"sampler/{other.name} of step {other.step} differs ({other.error:.1e}) although every "
            "x is right: perhaps it is recorded elsewhere",
        )
    return Verdict("conforms", sentence, None, worst.error, worst.floor, (), tuple(rows), remarks)


def _sentence(problem: Problem, wrong: Row, findings: tuple[Finding, ...]) -> str:
    what = problem.sampler or problem.schedule or "the schedule"
    place = f"{wrong.name} of step {wrong.step}" + (f", call {wrong.call}" if wrong.call else "")
    if wrong.error is None:
        far = "is missing or of another shape"
    elif wrong.error == float("inf"):
        far = "is not finite"
    elif wrong.name == "timestep":
        far = f"is off by {wrong.error:.3g}"
    else:
        far = f"is off by {wrong.error:.1e}, where rounding makes {wrong.floor:.1e}"
    why = findings[0].evidence.split(". ")[0].rstrip(".") + "." if findings else UNKNOWN
    return f"{what}: {place} {far}. {why}"


UNKNOWN = (
    "No mistake known here gives these numbers; record sampler/timestep, sampler/model_input, "
    "sampler/prediction and sampler/denoised too."
)


def _shape(problem: Problem, candidate: Candidate) -> tuple[Finding, ...]:
    if not candidate.shapes:
        return ()
    shape, needed = candidate.shapes[0], math.prod(problem.shape)
    if math.prod(shape) <= needed or math.prod(shape) % needed:
        return (
            Finding(
                "other-shape",
                f"The candidate's x has {math.prod(shape)} values, in shape {shape}; expected "
                f"{needed}, in shape {problem.shape}.",
                "Write all of x after each step, as one list or in the problem's shape.",
            ),
        )
    return (
        Finding(
            "broadcast",
            f"The candidate's x has shape {candidate.shapes[0]}, expected {problem.shape}: a sigma "
            "with axes of its own was broadcast against it.",
            "Give a sigma as many axes as x, all but the first of length 1 (append_dims), or make "
            "it a plain number.",
        ),
    )


def _length(exact: Run, candidate: Candidate) -> tuple[Finding, ...]:
    """A count of steps that differs says something, whatever else is wrong."""
    if not candidate.steps or candidate.steps == exact.steps:
        return ()
    more = "more" if candidate.steps > exact.steps else "fewer"
    return (
        Finding(
            f"{more}-steps",
            f"The candidate wrote {candidate.steps} steps, {more} than the {exact.steps} of the "
            "problem.",
            "n steps go over the n pairs of n + 1 sigmas; write x once after each.",
        ),
    )


def table_rows(problem: Problem, candidate: Candidate) -> list[Row]:
    """Every entry of the candidate's tables against the problem's."""
    rows = []
    for name, right, limit in (
        ("sigma", np.array(problem.sigmas), SIGMA),
        ("timestep", np.array(problem.timesteps), timestep_limit(problem)),
    ):
        table = candidate.tables.get(f"{name}s")
        if table is None:
            continue
        for entry in range(max(len(right), len(table))):
            error = None
            if entry < len(right) and entry < len(table):
                error = error_of(name, table[entry], right[entry])
            rows.append(Row(name, entry, 0, error, UNIT["f32"], limit, judged=True))
    return rows
