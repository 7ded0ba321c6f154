"""`tap("name", x)`: record values in hand-written code, and replace them by the reference's.

A script needs only the taps: LYDITE_TRACE=FOLDER records, LYDITE_INJECT=FOLDER with
LYDITE_INJECT_AT=NAME,NAME… returns another trace's values. Without them a tap costs one look-up.
Inside `with Recorder.start(folder):` taps write to that recorder.
The folder has to be new; in Python, `recording(folder, overwrite=True)` replaces a trace.
"""

import atexit
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from lydite.core.errors import InputError
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.recorder import Injection, InjectionSource, Recorder, entered
from lydite.trace.writer import Capture

T = TypeVar("T")


def tap(
    name: str, x: T, *, slot: str = "out", kind: str = "activation", dims: str | None = None
) -> T:
    """Record `x` if a recorder is active; return it, or the reference's value when injecting."""
    recorder = active()
    if recorder is None:
        return x
    return recorder.record(name, x, slot=slot, kind=kind, dims=dims)


def set_step(step: int) -> None:
    """Set the step of the loop that the next taps belong to."""
    if (recorder := active()) is not None:
        recorder.step = step


def active() -> Recorder | None:
    """The recorder that taps write to, or None: of `recording`, of a `with`, of the environment."""
    if isinstance(_active, Recorder):
        return _active
    if (recorder := entered()) is not None:
        return recorder
    return _active.start() if _active is not None else None


@contextmanager
def recording(
    target: Path | str | Recorder,
    *,
    header: Header | None = None,
    capture: Capture | None = None,
    inject: InjectionSource | None = None,
    overwrite: bool = False,
) -> Generator[Recorder]:
    """Let taps write to a new trace in a folder, or to a recorder, which is then left open.

    `overwrite=True` replaces a trace that is already in the folder, as in `Recorder.start`.
    """
    global _active
    if isinstance(target, Recorder):
        before, _active = _active, target
        try:
            yield target
        finally:
            _active = before
    else:
        started = Recorder.start(
            target, header=header, capture=capture, inject=inject, overwrite=overwrite
        )
        with started, recording(started):
            yield started


def injection(folder: Path | str, at: str | tuple[str, ...]) -> Injection:
    """What to inject: the trace in `folder` at patterns, given as a tuple or with commas."""
    patterns = tuple(part.strip() for part in at.split(",")) if isinstance(at, str) else at
    patterns = tuple(part for part in patterns if part)
    if not patterns:
        raise InputError("nothing to inject: give at least one name, such as 'vae/*'.")
    return Injection(Trace.open(Path(folder)), patterns)


class _FromEnvironment:
    """Starts the environment's recorder at the first tap; worker processes have none."""

    def start(self) -> Recorder:
        global _active
        folder, reference, at = (os.environ.get(name) for name in _VARIABLES)
        if not folder or bool(reference) != bool(at):
            raise InputError(
                f"{_VARIABLES[1]} and {_VARIABLES[2]} are given together, and with {_VARIABLES[0]}."
            )
        inject = injection(reference, at) if reference and at else None
        recorder = Recorder.start(folder, inject=inject)
        atexit.register(_close_at_exit, recorder, getattr(sys, "last_value", None))
        _active = recorder
        return recorder


def _close_at_exit(recorder: Recorder, before: object) -> None:
    # The interpreter stores an uncaught exception in sys.last_value before it ends.
    recorder.close(complete=getattr(sys, "last_value", None) is before)


_VARIABLES = ("LYDITE_TRACE", "LYDITE_INJECT", "LYDITE_INJECT_AT")
_active: Recorder | _FromEnvironment | None = (
    _FromEnvironment() if any(os.environ.get(name) for name in _VARIABLES) else None
)
