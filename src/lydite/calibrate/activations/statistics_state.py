"""Statistics of some samples, and the state file from which an interrupted collection resumes."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from lydite.calibrate.activations.moments import BINS, FIELDS, Moments
from lydite.calibrate.settings import Settings, canonical, digest
from lydite.core.errors import CalibrationError, LyditeError, at
from lydite.core.files import write_atomic
from lydite.core.tensorfile import TensorFile, encoded_header

Key = tuple[str, str, int]  # layer, place, band
_DTYPES = dict(zip(FIELDS, ("<f4", "<f4", "<f8", "<f8", "<i8", "<i8", "<i8"), strict=True))


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides the statistics beside the samples: equal where two can be joined."""

    settings: Settings  # of the set
    bands: dict[int, int]  # the band of each kept step
    group: int  # neighbouring channels in one histogram; 0: all of a place

    @property
    def identity(self) -> str:
        """Equal for statistics that can be joined."""
        return digest([self.settings.hashed_fields, sorted(self.bands.items()), self.group])


@dataclass
class Statistics:
    """Statistics of some samples of a set."""

    provenance: Provenance
    keys: list[str] = field(default_factory=list)  # of the samples, in the order they came
    table: dict[Key, Moments] = field(default_factory=dict)

    def add(self, key: str, band: int, moments_by_place: Mapping[tuple[str, str], Moments]) -> None:
        """Add the statistics of one sample."""
        for (layer, place), moments in moments_by_place.items():
            known = self.table.get((layer, place, band))
            self.table[layer, place, band] = known.joined(moments) if known else moments
        self.keys.append(key)

    def join(self, other: "Statistics", where: Path) -> None:
        """Add the statistics of other samples of the same run."""
        if other.provenance.identity != self.provenance.identity:
            raise CalibrationError(
                f"{at(where)}: statistics of another model, run, --group-steps or --group than the "
                "first. Only statistics collected in the same way can be merged."
            )
        if shared := set(self.keys) & set(other.keys):
            raise CalibrationError(
                f"{at(where)}: {len(shared)} of its samples are in another file already, and would "
                "count twice. Merge files of different samples."
            )
        for key, moments in other.table.items():
            known = self.table.get(key)
            self.table[key] = known.joined(moments) if known else moments
        self.keys.extend(other.keys)


def content_hash(statistics: Statistics) -> str:
    """Over all samples and statistics, whatever order they came in; 0 and -0 are the same."""
    content = ContentHash(statistics.keys)
    for key, moments in sorted(statistics.table.items(), key=lambda item: item[0]):
        content.add(key, moments)
    return content.hexdigest()


class ContentHash:
    """The same hash, of statistics that come one by one in the order of their keys."""

    def __init__(self, samples: Iterable[str]) -> None:
        self._total = hashlib.sha256("\n".join(sorted(samples)).encode())

    def add(self, key: Key, moments: Moments) -> None:
        """Add the statistics of one place and band."""
        self._total.update(f"\n{key} {moments.count}\n".encode())
        for name, dtype in _DTYPES.items():
            values = getattr(moments, name) + np.zeros((), dtype)
            self._total.update(values.astype(dtype).tobytes())

    def hexdigest(self) -> str:
        """Of all that was added."""
        return self._total.hexdigest()


def group_steps(steps: tuple[int, ...], rule: str) -> dict[int, int]:
    """The band of each kept step: its own number, one of N even parts, or 0 for all."""
    if rule == "step":
        return {step: step for step in steps}
    parts = 1 if rule == "all" else int(rule)
    return {step: index * parts // len(steps) for index, step in enumerate(steps)}


def save_state(path: Path, statistics: Statistics) -> None:
    """Write everything, with a hash over it, under its name only when it is on disk."""
    places = [[*key, moments.count, len(moments.mean)] for key, moments in statistics.table.items()]
    total = hashlib.sha256()
    for piece in _pieces(statistics):
        total.update(piece)
    summary = {
        "about": msgspec.to_builtins(statistics.provenance, str_keys=True),
        "keys": statistics.keys,
        "places": places,
        "sha256": total.hexdigest(),
    }
    specs = {
        name: (np.dtype(dtype), (sum(getattr(m, name).size for m in statistics.table.values()),))
        for name, dtype in _DTYPES.items()
    }
    head = encoded_header(path, specs, {"collected": canonical(summary).decode()})
    write_atomic(path, chain([head], _pieces(statistics)))


def load_state(path: Path) -> Statistics:
    """What `save_state` wrote; any changed bit of it is an error."""
    try:
        with TensorFile.open(path) as file:
            summary = msgspec.json.decode(file.header.metadata["collected"])
            flat = {name: np.array(file.read(name)) for name in _DTYPES}
        about = msgspec.convert(summary["about"], Provenance, strict=False)
        statistics = Statistics(about, list(summary["keys"]))
        starts = dict.fromkeys(_DTYPES, 0)
        for layer, place, band, count, channels in summary["places"]:
            arrays = {}
            for name in FIELDS:
                size = _groups(channels, about.group) * BINS if name == "counts" else channels
                part = flat[name][starts[name] : starts[name] + size]
                arrays[name] = part.reshape(-1, BINS) if name == "counts" else part
                starts[name] += size
            statistics.table[layer, place, band] = Moments.from_arrays(count, arrays)
        total = hashlib.sha256()
        for piece in _pieces(statistics):
            total.update(piece)
        if total.hexdigest() != summary["sha256"]:
            raise CalibrationError("wrong hash")
    except (LyditeError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"{at(path)}: damaged ({error}). Remove its folder to start again."
        ) from error
    return statistics


def _groups(channels: int, group: int) -> int:
    return -(-channels // (group or channels))


def _pieces(statistics: Statistics) -> Iterator[bytes]:
    """All arrays in the order of a safetensors file: by width, then by name; places in theirs."""
    order = sorted(_DTYPES, key=lambda name: (-np.dtype(_DTYPES[name]).itemsize, name))
    for name in order:
        arrays = (getattr(moments, name) for moments in statistics.table.values())
        yield b"".join(np.ascontiguousarray(each, _DTYPES[name]).tobytes() for each in arrays)
