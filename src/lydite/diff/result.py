"""The result of a comparison: plain data that the command line, the page and scripts share."""

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal, Self

from lydite.trace.events import Event, Site

Answer = Literal["agree", "diverge", "cannot-compare"]
Confidence = Literal["certain", "likely", "observed"]
EXIT_CODES: dict[Answer, int] = {"agree": 0, "diverge": 1, "cannot-compare": 2}
JSON_KEYS = {"slot": "place", "ignored_rows": "aside"}  # older spellings that scripts read


@dataclass(frozen=True)
class Finding:
    """What was recognised in a wrong value: its cause or, if only `observed`, where it is wrong."""

    cause: str  # a short stable id: "transposed", "scaled", "not-finite" …
    evidence: str  # one sentence with the numbers
    fix: str  # one sentence: what to change, or where to look
    confidence: Confidence = "certain"  # "likely": it explains most of the error, not all

    @property
    def label(self) -> str:
        """The id for people, with what it is worth."""
        worth = {"likely": " (likely)", "observed": " (observed; no cause known)"}
        return self.cause + worth.get(self.confidence, "")

    @property
    def advice(self) -> str:
        """What the last sentence is: a fix, or where to look."""
        return "next" if self.confidence == "observed" else "fix"


@dataclass(frozen=True)
class Row:
    """One value of the reference and its counterpart."""

    site: str  # event name in the reference
    port_site: str  # event name in the port
    slot: str  # "out", "in.0" …
    step: int
    call: int
    kind: str
    shape: tuple[int, ...]
    dtype: str  # of the port
    error: float | None  # relative L2 against the more precise reference; None: not comparable
    floor: float | None  # the error that rounding alone would give
    limit: float | None  # a larger error is wrong
    wrong: bool
    peak: float | None = None  # largest difference over the reference's rms
    note: str = ""  # what was assumed to compare the two: an axis order, concatenated parts
    port_slot: str = "out"

    @classmethod
    def of(cls, event: Event, port_event: Event) -> Self:
        """The row of two events, not measured yet."""
        return cls(
            event.name, port_event.name, event.slot, event.step, event.call, event.kind,
            tuple(event.shape), port_event.dtype, None, None, None, False,
            port_slot=port_event.slot,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The site for people."""
        name = str(Site(self.site, self.slot))
        return f"{name}, call {self.call}" if self.call else name

    @property
    def full_name(self) -> str:
        """The site for people: the port's own name first, where it is another."""
        return (
            self.name if self.site == self.port_site else with_port_name(self.name, self.port_name)
        )

    @property
    def port_name(self) -> str:
        """The port's site for people."""
        return str(Site(self.port_site, self.port_slot))

    @property
    def scope(self) -> str:
        """The component the value belongs to."""
        return scope_of(self.site)

    @property
    def agrees(self) -> bool:
        """Whether it was compared and is not wrong."""
        return self.error is not None and not self.wrong


@dataclass(frozen=True)
class Gate:
    """Something that has to be equal before any activation is compared."""

    name: str  # "dump", "conditions", "ids", "schedule", "weights", "inputs"
    passed: bool
    detail: str
    compared: bool = True  # False: there was nothing to compare, so nothing is known

    @property
    def word(self) -> str:
        """The outcome in a word or two."""
        return "FAILED" if not self.passed else "ok" if self.compared else "not compared"


@dataclass(frozen=True)
class Verdict:
    """The answer, first as one sentence."""

    verdict: Answer
    sentence: str
    site: str | None = None
    port_site: str | None = None
    slot: str | None = None
    port_slot: str | None = None
    step: int | None = None  # the reference's
    port_step: int | None = None  # where the port counts its steps otherwise
    last_agreement: str | None = None
    error: float | None = None
    floor: float | None = None
    limit: float | None = None
    findings: tuple[Finding, ...] = ()
    ruled_out: tuple[str, ...] = ()  # operations computed again of which no variant is the port's
    gates: tuple[Gate, ...] = ()
    rows: tuple[Row, ...] = ()  # in execution order
    ignored_rows: tuple[Row, ...] = ()  # wrong, not the bug: recorded at another point, or not used
    sources: tuple[Row, ...] = ()  # after injection: every site wrong on the reference's inputs
    remarks: tuple[str, ...] = ()  # what was assumed, or noticed beside the bug
    unpaired_reference: tuple[str, ...] = ()
    unpaired_port: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()  # "reference", "port": the run did not end by itself
    floor_source: str = ""  # how the rounding is known
    health: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 agrees, 1 diverges, 2 could not compare."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON, which has no infinity: null stands for it."""
        return to_json(asdict(self))


def to_json(value: Any) -> Any:
    """The value with JSON's key names, and null for numbers that are not finite."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, dict):
        return {JSON_KEYS.get(key, key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def scope_of(name: str) -> str:
    """The component that an event name begins with."""
    return name.split("/")[0]


def with_port_name(name: str, port_name: str) -> str:
    """The port's name for a value, then the reference's, where they differ."""
    return name if name == port_name else f"{port_name} (in the reference: {name})"
