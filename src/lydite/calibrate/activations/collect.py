"""Statistics of a network's activations over a calibration set, collected sample by sample.

Samples are taken in the order of the set, each is counted in whole or not at all, and the state is
written beside the result from time to time. So a collection that was killed goes on where its state
ends, and its file is the file of one that was not, byte for byte.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lydite.calibrate.activations.file import KIND, read_file, write_file
from lydite.calibrate.activations.merge import FINISHED, STATE, working, workplace
from lydite.calibrate.activations.places import Places
from lydite.calibrate.activations.state import (
    About,
    Collected,
    bands_of,
    load_state,
    save_state,
)
from lydite.calibrate.model_session import require_model
from lydite.calibrate.outputs import check_output
from lydite.calibrate.replay import latent_of, network, replaying
from lydite.calibrate.store import files as disk
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.writer import command_line, resumable
from lydite.core.errors import CalibrationError, FileError, at
from lydite.pipelines.pipeline import Pipeline

SHARE = 20  # the state is written when this many times as long as writing takes has passed


@dataclass(frozen=True)
class Wanted:
    """What is collected of a set."""

    per: str = "step"  # step, all, or a number of even parts of the kept steps
    group: int = 0  # channels in one histogram; 0: all of a place
    part: tuple[int, int] = (1, 1)  # this share of the samples: for several machines


@dataclass(frozen=True)
class Progress:
    """One more sample is counted in."""

    done: int
    total: int
    label: str


def collect(
    opened: CalibrationSet,
    pipeline: Pipeline,
    out: Path,
    wanted: Wanted,
    *,
    on_sample: Callable[[Progress], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
    share: float = SHARE,
    options: Sequence[str] = (),
) -> int:
    """Collect into `out`, going on from what a killed run left; how many samples were new.

    When asked to stop it keeps what it has, and raises KeyboardInterrupt. `options` say where the
    model is, for the command that errors name.
    """
    check_output(out, KIND)
    rows = _rows(opened, wanted)
    about = About(opened.settings, bands_of(opened.plan.steps, wanted.per), wanted.group)
    if _is_there(out, about, rows) and not workplace(out).exists():
        return 0
    with resumable(_command(opened.folder, out, wanted, options)), working(out) as work:
        if _is_there(out, about, rows):  # by one who was killed, or whom we waited for
            disk.remove(work / STATE)
            return 0
        collected = _resumed(work, about, rows)
        before = len(collected.keys)
        saver = _Saver(work / STATE, share)
        places = Places(network(pipeline), wanted.group)
        with replaying(pipeline, opened.settings, places) as replay:
            for done, row in enumerate(rows[before:], before + 1):
                entry = row.entry
                replay.run(entry, latent_of(opened, row))
                collected.add(row.key, about.bands[_step(row)], places.taken())
                on_sample(Progress(done, len(rows), entry.label))
                if done < len(rows):
                    saver.save(collected, now=stopping())
        require_model(opened.settings, pipeline)  # nothing that looked on left a trace
        write_file(collected, out, work / FINISHED, _told(opened, collected, wanted))
        disk.remove(work / STATE)
    return len(rows) - before


def _command(folder: Path, out: Path, wanted: Wanted, options: Sequence[str]) -> str:
    """What goes on with it."""
    part = "/".join(map(str, wanted.part))
    asked = ("--per", wanted.per, "--group", wanted.group, "--part", part, *options)
    return command_line("lydite", "calibrate", "activations", folder, "--out", out, *asked)


class _Saver:
    """Writes the state seldom enough that it costs little."""

    def __init__(self, path: Path, share: float) -> None:
        self._path, self._share = path, share
        self._after = time.monotonic()

    def save(self, collected: Collected, *, now: bool) -> None:
        begin = time.monotonic()
        if begin < self._after and not now:
            return
        save_state(self._path, collected)
        end = time.monotonic()
        self._after = end + self._share * (end - begin)
        if now:
            raise KeyboardInterrupt


def _rows(opened: CalibrationSet, wanted: Wanted) -> list[Row]:
    rows = list(opened.rows("sample"))
    number, parts = wanted.part
    rows = rows[len(rows) * (number - 1) // parts : len(rows) * number // parts]
    if not rows:
        raise CalibrationError(
            f"{at(opened.folder)}: holds no samples for this. Run: lydite calibrate status "
            f"{at(opened.folder)}"
        )
    strange = {row.step for row in rows} - set(opened.plan.steps)
    if strange:
        raise CalibrationError(
            f"{at(opened.folder)}: has samples of step {sorted(map(str, strange))[0]}, which is "
            "not in its plan."
        )
    return rows


def _is_there(out: Path, about: About, rows: Sequence[Row]) -> bool:
    """Whether the file holds just these statistics; any other is left as it is."""
    if not out.exists():
        return False
    found = read_file(out)
    if found.about.identity == about.identity and found.keys == [row.key for row in rows]:
        return True
    raise FileError(
        f"{at(out)}: holds statistics of other samples, or collected in another way. Give another "
        "name, or remove it first."
    )


def _resumed(work: Path, about: About, rows: Sequence[Row]) -> Collected:
    """What a run that was killed had written; nothing when there was none."""
    if not (work / STATE).exists():
        return Collected(about)
    found = load_state(work / STATE)
    if found.about.identity != about.identity:
        raise CalibrationError(
            f"{at(work)}: was begun with another set, --per or --group. Give the same to go on "
            "with it, or remove this folder."
        )
    if found.keys != [row.key for row in rows[: len(found.keys)]]:
        raise CalibrationError(
            f"{at(work)}: the set has other samples now than when this was begun. Remove this "
            "folder to start anew."
        )
    return found


def _told(opened: CalibrationSet, collected: Collected, wanted: Wanted) -> dict[str, Any]:
    return {
        "samples": len(collected.keys),
        "set": opened.content_hash,
        "model": opened.settings.model,
        "model_hash": opened.settings.model_hash,  # was found equal before and after
        "per": wanted.per,
        "part": list(wanted.part),
    }


def _step(row: Row) -> int:
    assert row.step is not None, "a sample has a step"
    return row.step
