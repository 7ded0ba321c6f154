"""Exports side by side: how each was made, and how far its pictures are from the original's."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from lydite.calibrate.store.set_file import NAME as SET_FILE
from lydite.core.config import read_json
from lydite.core.errors import FileError, InputError, at
from lydite.evaluate.evaluation import Evaluation
from lydite.evaluate.intervals import Summary
from lydite.evaluate.latent_errors import CANDIDATE, RECORD, REFERENCE
from lydite.evaluate.paired import psnr
from lydite.evaluate.pictures import SetPictures
from lydite.pipelines.picture import Pixels
from lydite.quantize.provenance import Provenance, read_provenance

EVALUATION = "evaluation"  # a folder with both sets
METRICS = ("psnr", "ssim", "latent_error")
SHOWN = 3  # pictures, of the worst and of the median ones


@dataclass(frozen=True, eq=False)
class Export:
    """A folder that `lydite quantize` made."""

    name: str
    folder: Path
    provenance: Provenance
    evaluation: Evaluation

    def metric(self, name: str) -> Summary | None:
        return self.evaluation.paired.get(name)

    @property
    def changed(self) -> float:
        """The share of integers that differ from rounding to nearest, mean over the layers."""
        return fmean(self.provenance.changed.values())

    def figures(self) -> dict[str, Any]:
        """Plain data of the comparison."""
        made = self.provenance
        return {
            "export": self.name,
            "method": made.method,
            "activations": made.activations,
            "act_bits": made.settings.get("act_bits"),
            "act_groups": made.settings.get("act_groups", 1),
            "bits_per_weight": made.bits_per_weight,
            "bytes_before": made.bytes_before,
            "bytes_after": made.bytes_after,
            **{name: self.metric(name) for name in METRICS},
            "units_improved": made.improved,
            "units": len(made.units),
            "integers_changed": self.changed,
        }


def read_exports(folders: Sequence[Path]) -> list[Export]:
    """All of them, or FileError."""
    found = [
        Export(name, folder, read_provenance(folder), _read_evaluation(folder / RECORD))
        for name, folder in zip(_names(folders), folders, strict=True)
    ]
    if not all(export.metric("psnr") for export in found):
        raise FileError(f"{RECORD}: without PSNR; it is no comparison of pictures.")
    return found


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or the whole path where two would be the same."""
    short = [os.path.basename(os.path.realpath(folder)) for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _read_evaluation(path: Path) -> Evaluation:
    try:
        return msgspec.convert(read_json(path), Evaluation)
    except msgspec.ValidationError as error:
        raise FileError(f"{at(path)}: not the record of an evaluation ({error}).") from error


def differences(exports: Sequence[Export]) -> list[str]:
    """Why the figures of some exports do not compare with those of the first."""
    first, found = exports[0], list[str]()
    for other in exports[1:]:
        if other.provenance.source_hash != first.provenance.source_hash:
            found.append(f"{other.name} was made from another model than {first.name}.")
        for key in ("prompts", "seeds", "request"):
            if other.evaluation.record.get(key) != first.evaluation.record.get(key):
                found.append(f"{other.name} was evaluated with other {key} than {first.name}.")
    return found


@dataclass(frozen=True, eq=False)
class Row:
    """One prompt: the original's picture, and that of each export with its PSNR."""

    name: str
    prompt: str
    reference: Pixels
    pictures: tuple[Pixels, ...]
    psnr: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Of all exports, those that are worst on average, and those in the middle."""

    worst: tuple[Row, ...]
    median: tuple[Row, ...]


def choose_pictures(exports: Sequence[Export], against: Path | None = None) -> Pictures | None:
    """None where the sets of pictures are not there.

    `against` is the set that the original drew; by default it is beside a candidate's.
    """
    folders = _sets(exports, against)
    if folders is None:
        return None
    with _opened(folders) as sources:
        names = sources[0].names
        if any(source.names != names for source in sources):
            raise InputError("the exports were evaluated with different numbers of pictures.")
        values = [
            [psnr(pictures[0], each) for each in pictures[1:]] for _, pictures in _together(sources)
        ]
        order = np.argsort(np.mean(values, axis=1), kind="stable").tolist()
        count = min(SHOWN, len(order))
        first = (len(order) - count + 1) // 2
        worst, median = order[:count], order[first : first + count]
        rows = {
            number: Row(
                names[number],
                sources[0].prompts[names[number]],
                pictures[0],
                tuple(pictures[1:]),
                tuple(values[number]),
            )
            for number, (_, pictures) in enumerate(_together(sources))
            if number in (*worst, *median)
        }
    return Pictures(tuple(rows[n] for n in worst), tuple(rows[n] for n in median))


def _sets(exports: Sequence[Export], against: Path | None) -> list[Path] | None:
    """The original's set and that of each export."""
    candidates = [export.folder / EVALUATION / CANDIDATE for export in exports]
    references = [export.folder / EVALUATION / REFERENCE for export in exports]
    reference = against or next((each for each in references if _is_set(each)), None)
    if reference is None or not all(map(_is_set, candidates)):
        return None
    return [reference, *candidates]


def _is_set(folder: Path) -> bool:
    return (folder / SET_FILE).exists()


@contextmanager
def _opened(folders: Sequence[Path]) -> Iterator[list[SetPictures]]:
    with ExitStack() as stack:
        sources: list[SetPictures] = []
        for folder in folders:
            sources.append(SetPictures.open(folder))
            stack.callback(sources[-1].close)
        yield sources


def _together(sources: Sequence[SetPictures]) -> Iterator[tuple[str, list[Pixels]]]:
    """The picture of every source, name by name."""
    for pictures in zip(*(source.pictures() for source in sources), strict=True):
        yield pictures[0][0], [pixels for _, pixels in pictures]
