"""What was collected so far, and the file a killed collection goes on from: whole, or not there."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from lydite.calibrate.activations.histogram import BINS
from lydite.calibrate.activations.moments import FIELDS, Moments
from lydite.calibrate.settings import Settings, canonical, digest
from lydite.calibrate.store.files import write_sealed
from lydite.core.errors import CalibrationError, LyditeError, at
from lydite.core.tensorfile import TensorFile, encoded_header

Key = tuple[str, str, int]  # layer, place, band
_DTYPES = dict(zip(FIELDS, ("<f4", "<f4", "<f8", "<f8", "<i8", "<i8", "<i8"), strict=True))


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides the statistics beside the samples: equal where two can be joined."""

    settings: Settings  # of the set
    bands: dict[int, int]  # the band of each kept step
    group: int  # neighbouring channels in one histogram; 0: all of a place

    @property
    def identity(self) -> str:
        """Equal for statistics that can be joined."""
        return digest([self.settings.decisive, sorted(self.bands.items()), self.group])


@dataclass
class Collected:
    """Statistics of some samples of a set."""

    about: About
    keys: list[str] = field(default_factory=list)  # of the samples, in the order they came
    table: dict[Key, Moments] = field(default_factory=dict)

    def add(self, key: str, band: int, seen: Mapping[tuple[str, str], Moments]) -> None:
        """Take in what one sample showed."""
        for (layer, place), moments in seen.items():
            known = self.table.get((layer, place, band))
            self.table[layer, place, band] = known.joined(moments) if known else moments
        self.keys.append(key)

    def join(self, other: "Collected", where: Path) -> None:
        """Take in statistics of other samples of the same run."""
        if other.about.identity != self.about.identity:
            raise CalibrationError(
                f"{at(where)}: statistics of another model, run, --per or --group than the first. "
                "Only what was collected alike can be merged."
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


def content_hash(collected: Collected) -> str:
    """Over all samples and statistics, whatever order they came in; 0 and -0 are the same."""
    total = hashlib.sha256("\n".join(sorted(collected.keys)).encode())
    for key in sorted(collected.table):
        moments = collected.table[key]
        total.update(f"\n{key} {moments.count}\n".encode())
        for name, dtype in _DTYPES.items():
            total.update((getattr(moments, name) + np.zeros((), dtype)).astype(dtype).tobytes())
    return total.hexdigest()


def bands_of(steps: tuple[int, ...], per: str) -> dict[int, int]:
    """The band of each kept step: its own number, one of N even parts, or 0 for all."""
    if per == "step":
        return {step: step for step in steps}
    parts = 1 if per == "all" else int(per)
    return {step: index * parts // len(steps) for index, step in enumerate(steps)}


def save_state(path: Path, collected: Collected) -> None:
    """Write everything, with a hash over it, under its name only when it is on disk."""
    places = [[*key, moments.count, len(moments.mean)] for key, moments in collected.table.items()]
    total = hashlib.sha256()
    for piece in _pieces(collected):
        total.update(piece)
    told = {
        "about": msgspec.to_builtins(collected.about, str_keys=True),
        "keys": collected.keys,
        "places": places,
        "sha256": total.hexdigest(),
    }
    specs = {
        name: (np.dtype(dtype), (sum(getattr(m, name).size for m in collected.table.values()),))
        for name, dtype in _DTYPES.items()
    }
    head = encoded_header(path, specs, {"collected": canonical(told).decode()})
    write_sealed(path, [head, *_pieces(collected)])


def load_state(path: Path) -> Collected:
    """What `save_state` wrote; any changed bit of it is an error."""
    try:
        with TensorFile.open(path) as file:
            told = msgspec.json.decode(file.header.metadata["collected"])
            flat = {name: np.array(file.read(name)) for name in _DTYPES}
        about = msgspec.convert(told["about"], About, strict=False)
        found = Collected(about, list(told["keys"]))
        starts = dict.fromkeys(_DTYPES, 0)
        for layer, place, band, count, channels in told["places"]:
            arrays = {}
            for name in FIELDS:
                size = _groups(channels, about.group) * BINS if name == "counts" else channels
                part = flat[name][starts[name] : starts[name] + size]
                arrays[name] = part.reshape(-1, BINS) if name == "counts" else part
                starts[name] += size
            found.table[layer, place, band] = Moments.from_arrays(count, arrays)
        total = hashlib.sha256()
        for piece in _pieces(found):
            total.update(piece)
        if total.hexdigest() != told["sha256"]:
            raise CalibrationError("its hash is another")
    except (LyditeError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"{at(path)}: damaged ({error}). Remove its folder to start anew."
        ) from error
    return found


def _groups(channels: int, group: int) -> int:
    return -(-channels // (group or channels))


def _pieces(collected: Collected) -> Iterator[bytes]:
    """All arrays in the order of a safetensors file: by width, then by name; places in theirs."""
    order = sorted(_DTYPES, key=lambda name: (-np.dtype(_DTYPES[name]).itemsize, name))
    for name in order:
        arrays = (getattr(moments, name) for moments in collected.table.values())
        yield b"".join(np.ascontiguousarray(each, _DTYPES[name]).tobytes() for each in arrays)
