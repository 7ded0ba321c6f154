"""Mistakes planted in the port: where `diff` says that the first wrong value is."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lydite.cli.recording import read_capture, reference_job
from lydite.core.errors import NotFiniteError
from lydite.core.request import Request
from lydite.diff.compare import compare
from lydite.diff.result import Verdict
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.recording import record
from lydite.reference import recording as reference_recording
from lydite.reference.jobs import TraceOutput
from lydite.trace.reader import Trace

CAPTURE = read_capture("full", (), "2GB")
NOTHING = nullcontext()


@dataclass(frozen=True)
class Bug:
    """What is changed in the port; where the first wrong value is, and what is said of it."""

    site: str
    cause: str | None
    plant: AbstractContextManager[Any] = NOTHING
    change: Callable[[Pipeline], None] = lambda pipeline: None


@dataclass(frozen=True)
class Subject:
    """A model, a request, and what diffusers does with them in float32 and float64."""

    model: Path
    request: Request
    reference: Trace
    floor: Trace
    dtype: str = "float32"  # of the port

    def verdict(self, bug: Bug, folder: Path) -> Verdict:
        """What `diff` says of a run of the port with the bug."""
        with bug.plant:
            pipeline = Pipeline.open(self.model, dtype=self.dtype)
            bug.change(pipeline)
            self.record(pipeline, folder)
        return self.compare(folder)

    def record(self, pipeline: Pipeline, folder: Path) -> None:
        """A run of the port; one that ends in values that are not finite is kept up to there."""
        with suppress(NotFiniteError):
            record(pipeline, pipeline.plan(self.request), 1, folder, capture=CAPTURE)

    def compare(self, folder: Path) -> Verdict:
        """What `diff` says of a recorded run."""
        with Trace.open(folder) as port:
            return compare(self.reference, port, floor=self.floor)


@contextmanager
def recorded(
    model: Path, request: Request, root: Path, dtype: str = "float32"
) -> Iterator[Subject]:
    """Record the reference under `root`."""
    pipeline = Pipeline.open(model)
    outputs = TraceOutput(str(root / "reference")), TraceOutput(str(root / "floor"), "float64")
    job = reference_job(pipeline, pipeline.plan(request), 1, outputs, CAPTURE)
    for output in outputs:
        reference_recording.record(job, output)
    with Trace.open(root / "reference") as reference, Trace.open(root / "floor") as floor:
        yield Subject(model, request, reference, floor, dtype)


def check_found(subject: Subject, bug: Bug, folder: Path) -> None:
    """The bug is found where it is, and its cause is named where it is known."""
    verdict = subject.verdict(bug, folder)
    assert verdict.verdict == "diverge"
    assert verdict.site == bug.site, verdict.sentence
    causes = [finding.cause for finding in verdict.findings]
    assert (bug.cause in causes) if bug.cause else not causes, verdict.sentence
