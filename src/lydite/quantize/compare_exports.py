"""Exports side by side: how each was made, and how far its pictures are from the original's."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from lydite.calibrate.store.set_file import NAME as SET_FILE
from lydite.core.config import read_json
from lydite.core.errors import FileError, InputError, at, counted
from lydite.evaluate.evaluation import LIMITS, Evaluation
from lydite.evaluate.intervals import Summary, summarize
from lydite.evaluate.latent_errors import CANDIDATE, RECORD, REFERENCE, latent_errors
from lydite.evaluate.paired import MOST_PSNR, SMALLEST_SSIM, psnr, ssim
from lydite.evaluate.pictures import SetPictures, paired_pictures
from lydite.pipelines.picture import Pixels
from lydite.quantize.provenance import Provenance, read_provenance

EVALUATION = "evaluation"  # a folder with both sets
METRICS = ("psnr", "ssim", "latent_error")
SHOWN = 3  # pictures, of the worst and of the median ones; of each a third of all at most


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
    def pictures(self) -> int:
        """How many the figures are of."""
        summary = self.metric("psnr")
        return 0 if summary is None else summary.n

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


def on_common_pictures(
    exports: Sequence[Export], against: Path | None = None
) -> tuple[list[Export], list[str]]:
    """The exports, with figures of the pictures that all of them have, and a note that says so.

    They stay as they are where all were evaluated with as many pictures, or where the sets of
    pictures are not there.
    """
    counts = [export.pictures for export in exports]
    folders = _sets(exports, against)
    if len(set(counts)) == 1 or folders is None:
        return list(exports), []
    with _opened(folders) as sources:
        names = _common(sources)
        changed = [
            replace(export, evaluation=_measured(export.evaluation, sources[0], source, names))
            for export, source in zip(exports, sources[1:], strict=True)
        ]
    listed = ", ".join(f"{export.name} {export.pictures}" for export in exports)
    note = (
        f"the exports were evaluated with different numbers of pictures ({listed}): the figures "
        f"here are of the {counted(len(names), 'picture')} that all have."
    )
    return changed, [note]


def _common(sources: Sequence[SetPictures]) -> set[str]:
    """Names of pictures with the same prompt and seed in all sets."""
    images = [
        {(f"{image.number:06}", image.prompt, image.seed) for image in source.opened.plan.images}
        for source in sources
    ]
    found = {name for name, _, _ in set.intersection(*images)}
    if not found:
        raise InputError(
            f"{', '.join(source.where for source in sources)}: no picture of one prompt and seed "
            "is in all of these sets. Quantize again with the same --eval-prompts."
        )
    return found


def _measured(
    evaluation: Evaluation, reference: SetPictures, candidate: SetPictures, names: set[str]
) -> Evaluation:
    """The evaluation with the figures of METRICS of these pictures alone."""
    values: dict[str, list[float]] = {}
    for _, one, other in paired_pictures(reference, candidate, names):
        values.setdefault("psnr", []).append(psnr(one, other))
        if min(one.shape[:2]) >= SMALLEST_SSIM:
            values.setdefault("ssim", []).append(ssim(one, other))
    numbers = {int(name) for name in names}
    steps, errors = latent_errors(reference.opened, candidate.opened, numbers)
    if steps:
        values["latent_error"] = errors[:, -1].tolist()
    figures = {name: summarize(each, LIMITS[name]) for name, each in values.items()}
    return msgspec.structs.replace(evaluation, paired=figures)


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or the whole path where two would be the same."""
    short = [os.path.basename(os.path.realpath(folder)) for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _read_evaluation(path: Path) -> Evaluation:
    try:
        return msgspec.convert(read_json(path), Evaluation)
    except msgspec.ValidationError as error:
        raise FileError(f"{at(path)}: not the record of an evaluation ({error}).") from error


def differences(exports: Sequence[Export], *, common: bool = False) -> list[str]:
    """Why the figures of some exports do not compare with those of the first.

    `common`: they are of the same pictures, whatever the records say.
    """
    first, found = exports[0], list[str]()
    for other in exports[1:]:
        if other.provenance.source_hash != first.provenance.source_hash:
            found.append(f"{other.name} was made from another model than {first.name}.")
        if other.pictures != first.pictures:
            most = max(first.pictures, other.pictures)
            found.append(
                f"{first.name} was evaluated with {counted(first.pictures, 'picture')}, "
                f"{other.name} with {other.pictures}, and their sets are not both there: the means "
                f"do not compare. Quantize again with --eval-images {most} and the same prompts."
            )
            continue
        for key in ("request",) if common else ("prompts", "seeds", "request"):
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
    """Of all exports, those that are worst on average, and others in the middle."""

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
        names = _common(sources)
        values = {
            name: tuple(psnr(pictures[0], each) for each in pictures[1:])
            for name, pictures in _together(sources, names)
        }
        order = sorted(values, key=lambda name: fmean(values[name]))
        worst, median = _chosen([name for name in order if min(values[name]) < MOST_PSNR], order)
        rows = {
            name: Row(
                name,
                sources[0].prompts[name],
                pictures[0],
                tuple(pictures[1:]),
                values[name],
            )
            for name, pictures in _together(sources, {*worst, *median})
        }
    return Pictures(tuple(rows[n] for n in worst), tuple(rows[n] for n in median))


def _chosen(different: Sequence[str], order: Sequence[str]) -> tuple[list[str], list[str]]:
    """The worst of those that differ from the original, and others in the middle of all."""
    count = min(SHOWN, -(-len(order) // 3))
    worst = list(different[:count])
    middle = (len(order) - 1) / 2
    others = [number for number, name in enumerate(order) if name not in worst]
    nearest = sorted(others, key=lambda number: abs(number - middle))[:count]
    return worst, [order[number] for number in sorted(nearest)]


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


def _together(
    sources: Sequence[SetPictures], names: set[str]
) -> Iterator[tuple[str, list[Pixels]]]:
    """The picture of every source, name by name."""
    wanted = (
        ((name, pixels) for name, pixels in source.pictures() if name in names)
        for source in sources
    )
    for pictures in zip(*wanted, strict=True):
        yield pictures[0][0], [pixels for _, pixels in pictures]
