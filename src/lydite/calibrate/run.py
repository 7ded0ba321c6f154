"""A run: draw what a set misses, image by image, and commit each as it is finished.

An image is the unit of work. Whatever ends a run, finished images are in the set, and the one that
was under way is drawn again by the next run.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lydite.calibrate.settings import Plan, Settings, picture_key
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import NAME, read_description
from lydite.calibrate.store.writer import Writer, command_line
from lydite.core.dtypes import NUMPY_DTYPES
from lydite.core.errors import CalibrationError, LyditeError, NotFiniteError
from lydite.core.files import require_space

if TYPE_CHECKING:  # this file is read by processes that have no MLX yet
    from lydite.calibrate.model_session import ModelSession

HEADER = 600  # bytes that a shard takes for an item beside its arrays, about


@dataclass(frozen=True)
class Model:
    """Where the networks are, as a person names them; each worker opens them for itself."""

    name: str
    components: str | None = None
    fetch: bool = True  # a hub id may be downloaded; not so where only the set names it
    bits: int | None = None  # weights are rounded when the model is loaded


def resume_command(folder: Path, model: Model, *options: object) -> str:
    """The command that resumes a set, with the options that the set does not hold."""
    words: list[object] = ["lydite", "calibrate", "run", "--out", folder]
    if (folder / NAME).exists() and read_description(folder).settings.model != model.name:
        words += ["--model", model.name]
    if model.components:
        words += ["--components", model.components]
    return command_line(*words, *options)


def picklable_error(error: LyditeError) -> LyditeError:
    """The same message in an error that can be sent to another process."""
    kind = NotFiniteError if isinstance(error, NotFiniteError) else CalibrationError
    return kind(str(error))


@dataclass(frozen=True)
class RunCallbacks:
    """Callbacks of a run: progress, notes, and whether to stop after the current step."""

    stepped: Callable[[int, int], None] = lambda image, step: None
    finished: Callable[[int], None] = lambda image: None
    noted: Callable[[str], None] = lambda line: None
    stopping: Callable[[], bool] = lambda: False


def run_here(writer: Writer, session: "ModelSession", callbacks: RunCallbacks) -> None:
    """Draw all that is missing in this process; KeyboardInterrupt on a request to stop."""
    try:
        for image, wanted in writer.missing().items():

            def stepped(step: int, number: int = image.number) -> None:
                callbacks.stepped(number, step)
                if callbacks.stopping():
                    raise KeyboardInterrupt

            items = session.items(image, wanted, stepped)
            writer.commit(items)
            callbacks.finished(image.number)
            if callbacks.stopping():
                raise KeyboardInterrupt
    finally:
        session.require_unchanged()


@dataclass(frozen=True)
class Sizes:
    """How many values an item of each kind has."""

    sample: int
    picture: int
    conditioning: int


def require_space_for(folder: Path, settings: Settings, plan: Plan, sizes: Sizes) -> None:
    """Refuse what will not fit, before anything is written.

    A plan that was written stays with the set, and asking for fewer images would not shorten it.
    """
    known: set[str] = set()
    if (folder / NAME).exists():
        plan = read_description(folder).plan.joined(plan, folder)
        with contextlib.suppress(CalibrationError), CalibrationSet.open(folder) as opened:
            known = opened.index.keys()
    width, needed = NUMPY_DTYPES[settings.dtype].itemsize, 0
    for key, image, step in plan.keys(settings):
        if key in known:
            continue
        if step is not None:
            needed += sizes.sample * width + HEADER
        elif key == picture_key(settings, image):
            needed += sizes.picture + HEADER
        else:
            needed += sizes.conditioning * width + HEADER
    require_space(folder, needed)
