"""Chapter: every tensor of the embedded model is accounted for before a step is run."""

from dataclasses import dataclass
from math import prod

from lydite import embedded
from lydite.demo.chapter import DemoChapter, Result
from lydite.demo.demo import Demo, Tick
from lydite.pipelines.audits import audit_model
from lydite.pipelines.model_files import find_components
from lydite.report.page import Callout, Chapter, Fact, Table

TITLE = "Every tensor accounted for"


@dataclass(frozen=True)
class Audited:
    """One network of the model."""

    name: str
    parameters: int
    loaded: int
    dropped: int
    wrong: int


def audited() -> tuple[Audited, ...]:
    """The audit of the embedded model, network by network."""
    components = find_components(embedded.MODEL)
    return tuple(
        Audited(
            name,
            parameters=sum(prod(shape) for shape in components[name].expected.values()),
            loaded=len(ledger.loaded),
            dropped=len(ledger.dropped),
            wrong=sum(len(getattr(ledger, wrong)) for wrong in ledger.WRONG),
        )
        for name, ledger in audit_model(embedded.MODEL).items()
    )


def run(demo: Demo, tick: Tick) -> Result:
    """Audit, and say what was found."""
    networks = audited()
    tensors, wrong = (sum(getattr(row, name) for row in networks) for name in ("loaded", "wrong"))
    parameters = sum(row.parameters for row in networks)
    line = (
        f"{tensors} tensors of {len(networks)} networks, {parameters / 1e6:.1f} M parameters: "
        f"{f'NOT CLEAN, {wrong} wrong' if wrong else 'clean'}"
    )
    rows = [
        (row.name, f"{row.parameters:,}", str(row.loaded), str(row.dropped), str(row.wrong))
        for row in networks
    ]
    lead = (
        "Before anything is drawn, every tensor in the checkpoint is compared with the model "
        "it is loaded into: name, shape, dtype, and values for NaN and Inf. With one tensor too "
        "many, too few or of another shape nothing runs."
    )
    table = Table(
        ("network", "parameters", "tensors", "dropped", "wrong"),
        tuple(rows),
        numeric=frozenset({1, 2, 3, 4}),
    )
    verdict = Callout(
        f"{wrong} tensors are wrong; lydite audit lists them."
        if wrong
        else "Clean: every tensor has its place, and every place its tensor.",
        "bad" if wrong else "good",
    )
    fact = Fact(str(tensors), "tensors accounted for", "bad" if wrong else "note")
    return Result((line,), Chapter(TITLE, lead, (table, verdict)), fact, passed=not wrong)


CHAPTER = DemoChapter(TITLE, lambda settings: 0, run)
