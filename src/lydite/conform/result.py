"""What the judge says; plain data, shared by the command line and tests."""

from dataclasses import dataclass
from typing import Literal

Answer = Literal["conforms", "deviates", "cannot-judge"]
EXIT_CODES: dict[str, int] = {"conforms": 0, "deviates": 1, "cannot-judge": 2}


@dataclass(frozen=True)
class Finding:
    """What the candidate did, how we know, and what to change."""

    cause: str
    evidence: str
    fix: str


@dataclass(frozen=True)
class Row:
    """One value of the candidate against ours."""

    name: str  # "x", "sigma", "timestep", "model_input", "prediction", "denoised"
    step: int
    call: int
    error: float | None  # None: missing, or of another shape
    floor: float
    limit: float
    judged: bool  # False: looked at, but right or wrong by x alone

    @property
    def wrong(self) -> bool:
        return self.error is None or not self.error <= self.limit


@dataclass(frozen=True)
class Verdict:
    """The answer, first as one sentence."""

    verdict: Answer
    sentence: str
    step: int | None = None
    error: float | None = None
    floor: float | None = None
    findings: tuple[Finding, ...] = ()
    rows: tuple[Row, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]
