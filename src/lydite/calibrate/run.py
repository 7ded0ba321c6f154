"""A run: draw what a set misses, image by image, and commit each as it is finished.

An image is the unit of work. Whatever ends a run, finished images are in the set, and the one that
was under way is drawn again by the next run.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lydite.calibrate.settings import Settings, picture_key
from lydite.calibrate.store import files as disk
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import NAME as SET
from lydite.calibrate.store.set_file import Plan, read_description
from lydite.calibrate.store.writer import Writer, command_line
from lydite.core.dtypes import NUMPY_DTYPES
from lydite.core.errors import CalibrationError, LyditeError, NotFiniteError

if TYPE_CHECKING:  # this file is read by processes that have no MLX yet
    from lydite.calibrate.model_session import ModelSession

HEADER = 600  # bytes a shard and the index take beside the arrays of an item, about


@dataclass(frozen=True)
class Model:
    """Where the networks are, as a person names them; each worker opens them for itself."""

    name: str
    components: str | None = None


def resume_command(folder: Path, model: Model, *hands: object) -> str:
    """The command that goes on with a set, and what of it the set does not know."""
    words: list[object] = ["lydite", "calibrate", "run", "--out", folder]
    if (folder / SET).exists() and read_description(folder).settings.model != model.name:
        words += ["--model", model.name]
    if model.components:
        words += ["--components", model.components]
    return command_line(*words, *hands)


def portable(error: LyditeError) -> LyditeError:
    """The same for people, fit to be sent to another process."""
    kind = NotFiniteError if isinstance(error, NotFiniteError) else CalibrationError
    return kind(str(error))


@dataclass(frozen=True)
class Watcher:
    """What a run tells, and what it asks: whether it shall stop after the step under way."""

    stepped: Callable[[int, int], None] = lambda image, step: None
    finished: Callable[[int], None] = lambda image: None
    noted: Callable[[str], None] = lambda line: None
    stopping: Callable[[], bool] = lambda: False


def run_here(writer: Writer, session: "ModelSession", watcher: Watcher) -> None:
    """Draw all that is missing in this process; KeyboardInterrupt when told to stop."""
    try:
        for image, wanted in writer.missing().items():

            def stepped(step: int, number: int = image.number) -> None:
                watcher.stepped(number, step)
                if watcher.stopping():
                    raise KeyboardInterrupt

            items = session.items(image, wanted, stepped)
            writer.commit(items, drawn=time.time())
            watcher.finished(image.number)
            if watcher.stopping():
                raise KeyboardInterrupt
    finally:
        session.require_unchanged()


@dataclass(frozen=True)
class Sizes:
    """How many values an item of each kind has."""

    sample: int
    picture: int
    conditioning: int


def require_room(folder: Path, settings: Settings, plan: Plan, sizes: Sizes) -> None:
    """Refuse what will not fit, before anything is written.

    A plan that was written stays with the set, and asking for fewer images would not shorten it.
    """
    known: set[str] = set()
    if (folder / SET).exists():
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
    disk.require_room(folder, needed)
