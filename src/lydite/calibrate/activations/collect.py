"""Statistics of a network's activations over a calibration set, statistics sample by sample.

Samples are taken in the order of the set, each is counted completely or not at all, and the state
is written beside the result from time to time. So a collection that was killed resumes where its
state ends, and its file equals that of one that was not, byte for byte.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lydite.calibrate.activations.file import (
    FINISHED,
    STATE,
    open_work_folder,
    read_file,
    work_folder,
    write_file,
)
from lydite.calibrate.activations.places import Places
from lydite.calibrate.activations.statistics_state import (
    Provenance,
    Statistics,
    group_steps,
    load_state,
    save_state,
)
from lydite.calibrate.model_session import require_model
from lydite.calibrate.replay import latent_of, network, replaying
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import check_output_path
from lydite.calibrate.store.writer import command_line, resumable
from lydite.core import files
from lydite.core.errors import CalibrationError, FileError, at
from lydite.pipelines.pipeline import Pipeline

SHARE = 20  # the state is written when this many times the duration of a write has passed


@dataclass(frozen=True)
class Selection:
    """What is statistics of a set."""

    group_steps: str = "step"  # step, all, or a number of even parts of the kept steps
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
    selection: Selection,
    *,
    on_sample: Callable[[Progress], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
    share: float = SHARE,
    options: Sequence[str] = (),
) -> int:
    """Collect into `out`, resuming an interrupted collection; how many samples were new.

    When asked to stop it saves its state and raises KeyboardInterrupt. `options` say where the
    model is, for the command that errors name.
    """
    check_output_path(out, overwrite=True)  # one that is there must be ours: see below
    rows = _rows(opened, selection)
    provenance = Provenance(
        opened.settings, group_steps(opened.plan.steps, selection.group_steps), selection.group
    )
    if _is_there(out, provenance, rows) and not work_folder(out).exists():
        return 0
    with resumable(_command(opened.folder, out, selection, options)), open_work_folder(out) as work:
        if _is_there(out, provenance, rows):  # by a killed process, or one that we waited for
            files.remove(work / STATE)
            return 0
        statistics = _resumed(work, provenance, rows)
        before = len(statistics.keys)
        saver = _Saver(work / STATE, share)
        places = Places(network(pipeline), selection.group)
        with replaying(pipeline, opened.settings, places) as replay:
            for done, row in enumerate(rows[before:], before + 1):
                entry = row.entry
                replay.run(entry, latent_of(opened, row))
                statistics.add(row.key, provenance.bands[_step(row)], places.taken())
                on_sample(Progress(done, len(rows), entry.label))
                if done < len(rows):
                    saver.save(statistics, now=stopping())
        require_model(opened.settings, pipeline)  # the observer changed nothing
        write_file(statistics, out, work / FINISHED, _summary(opened, statistics, selection))
        files.remove(work / STATE)
    return len(rows) - before


def _command(folder: Path, out: Path, selection: Selection, options: Sequence[str]) -> str:
    """The command that resumes it."""
    part = "/".join(map(str, selection.part))
    options_used = (
        "--group-steps",
        selection.group_steps,
        "--group",
        selection.group,
        "--part",
        part,
        *options,
    )
    return command_line("lydite", "calibrate", "activations", folder, "--out", out, *options_used)


class _Saver:
    """Writes the state seldom enough that it costs little."""

    def __init__(self, path: Path, share: float) -> None:
        self._path, self._share = path, share
        self._after = time.monotonic()

    def save(self, statistics: Statistics, *, now: bool) -> None:
        begin = time.monotonic()
        if begin < self._after and not now:
            return
        save_state(self._path, statistics)
        end = time.monotonic()
        self._after = end + self._share * (end - begin)
        if now:
            raise KeyboardInterrupt


def _rows(opened: CalibrationSet, selection: Selection) -> list[Row]:
    rows = list(opened.rows("sample"))
    number, parts = selection.part
    rows = rows[len(rows) * (number - 1) // parts : len(rows) * number // parts]
    if not rows:
        raise CalibrationError(
            f"{at(opened.folder)}: holds no samples for this. Run: lydite calibrate status "
            f"{at(opened.folder)}"
        )
    unplanned = {row.step for row in rows} - set(opened.plan.steps)
    if unplanned:
        raise CalibrationError(
            f"{at(opened.folder)}: has samples of step {sorted(map(str, unplanned))[0]}, which is "
            "not in its plan."
        )
    return rows


def _is_there(out: Path, provenance: Provenance, rows: Sequence[Row]) -> bool:
    """Whether the file holds just these statistics; any other is left as it is."""
    if not out.exists():
        return False
    statistics = read_file(out)
    if statistics.provenance.identity == provenance.identity and statistics.keys == [
        row.key for row in rows
    ]:
        return True
    raise FileError(
        f"{at(out)}: holds statistics of other samples, or statistics in another way. Give another "
        "name, or remove it first."
    )


def _resumed(work: Path, provenance: Provenance, rows: Sequence[Row]) -> Statistics:
    """What a run that was killed had written; nothing when there was none."""
    if not (work / STATE).exists():
        return Statistics(provenance)
    statistics = load_state(work / STATE)
    if statistics.provenance.identity != provenance.identity:
        raise CalibrationError(
            f"{at(work)}: was begun with another set, --group-steps or --group. Give the same to "
            "resume it, or remove this folder."
        )
    if statistics.keys != [row.key for row in rows[: len(statistics.keys)]]:
        raise CalibrationError(
            f"{at(work)}: the set has other samples now than when this was begun. Remove this "
            "folder to start anew."
        )
    return statistics


def _summary(
    opened: CalibrationSet, statistics: Statistics, selection: Selection
) -> dict[str, Any]:
    return {
        "samples": len(statistics.keys),
        "set": opened.content_hash,
        "model": opened.settings.model,
        "model_hash": opened.settings.model_hash,  # was found equal before and after
        "per": selection.group_steps,
        "part": list(selection.part),
    }


def _step(row: Row) -> int:
    assert row.step is not None, "a sample has a step"
    return row.step
