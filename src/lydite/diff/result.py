"""What a comparison says, as plain data that the command line, the page and machines share."""

from dataclasses import dataclass, field
from typing import Literal

Answer = Literal["agree", "diverge", "cannot-compare"]
EXIT_CODES: dict[Answer, int] = {"agree": 0, "diverge": 1, "cannot-compare": 2}


@dataclass(frozen=True)
class Finding:
    """Something recognised in a wrong value: what it is, how we know, what to change."""

    cause: str  # a short stable word: "transposed", "scaled", "not-finite" …
    evidence: str  # one sentence with the numbers
    fix: str  # one sentence that says what to do


@dataclass(frozen=True)
class Row:
    """One value of the reference and its counterpart."""

    site: str  # event name in the reference
    port_site: str  # event name in the port
    place: str  # "out", "in.0" …
    step: int
    call: int
    kind: str
    shape: tuple[int, ...]
    dtype: str  # of the port
    error: float | None  # relative L2 against the more precise reference; None: not comparable
    floor: float | None  # what rounding alone may do here
    limit: float | None  # the error from which this value counts as wrong
    wrong: bool
    peak: float | None = None  # largest difference over the reference's rms
    note: str = ""  # what was assumed to compare the two: an axis order, joined parts

    @property
    def name(self) -> str:
        """The place for people."""
        parts = [self.site if self.place == "out" else f"{self.site} [{self.place}]"]
        parts += [f"call {self.call}"] if self.call else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Gate:
    """One thing that has to be equal before any activation is looked at."""

    name: str  # "dump", "conditions", "ids", "schedule", "weights", "inputs"
    passed: bool
    detail: str
    compared: bool = True  # False: nothing was there to compare, so nothing is known

    @property
    def word(self) -> str:
        """What became of it, in a word or two."""
        return "FAILED" if not self.passed else "ok" if self.compared else "not compared"


@dataclass(frozen=True)
class Verdict:
    """The answer, first as one sentence."""

    verdict: Answer
    sentence: str
    site: str | None = None
    port_site: str | None = None
    place: str | None = None
    step: int | None = None
    last_agreement: str | None = None
    error: float | None = None
    floor: float | None = None
    limit: float | None = None
    findings: tuple[Finding, ...] = ()
    gates: tuple[Gate, ...] = ()
    rows: tuple[Row, ...] = ()  # in execution order
    aside: tuple[Row, ...] = ()  # differ, but are not the bug: recorded at another stage, not used
    sources: tuple[Row, ...] = ()  # after injection: every place that goes wrong by itself
    remarks: tuple[str, ...] = ()  # what was assumed, noticed, not the bug
    unpaired_reference: tuple[str, ...] = ()
    unpaired_port: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()  # "reference", "port": its trace was cut off
    floor_source: str = ""  # where the floor comes from
    health: tuple[str, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        """0 agrees, 1 diverges, 2 could not compare."""
        return EXIT_CODES[self.verdict]
