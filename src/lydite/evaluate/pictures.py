"""Sets of pictures to compare: a folder of files, an npz file, a calibration set.

A source yields its pictures one after the other, in the order of their names, so that memory does
not depend on how many there are.
"""

import os
import zipfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import NAME as SET_FILE
from lydite.core.errors import FileError, InputError, LyditeError, at, counted, first_of, shown
from lydite.core.files import open_regular
from lydite.pipelines.picture import MOST_PIXELS, READ, Pixels, opened_image, read_pixels

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif")
MOST_PICTURES = 1_000_000
LOSSY = ("JPEG",)


class PictureSource(Protocol):
    """Pictures by name."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def prompts(self) -> Mapping[str, str]:
        """The prompt of each picture, where it is known."""
        ...

    def pictures(self) -> Iterator[tuple[str, Pixels]]:
        """In the order of `names`."""
        ...

    def notes(self) -> list[str]:
        """What a reader of the figures must know, after all pictures were read."""
        ...

    def close(self) -> None: ...


def open_source(path: Path) -> PictureSource:
    """A folder of pictures, an npz file, or a calibration set."""
    if path.is_dir():
        return SetPictures.open(path) if (path / SET_FILE).exists() else FolderPictures.open(path)
    if path.suffix.lower() == ".npz":
        return NpzPictures.open(path)
    if not path.exists():
        raise FileError(f"{at(path)}: no such folder or file.")
    raise FileError(f"{at(path)}: expected a folder of pictures, an npz file or a calibration set.")


@dataclass
class FolderPictures:
    """Files of a folder and the folders in it; a name is the path in it without its ending."""

    folder: Path
    files: Mapping[str, Path]
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    _lossy: int = 0
    _converted: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def open(cls, folder: Path) -> "FolderPictures":
        files: dict[str, Path] = {}
        for parent, folders, names in os.walk(folder):
            folders.sort()
            for name in sorted(names):
                path = Path(parent, name)
                if path.suffix.lower() not in ENDINGS or name.startswith("."):
                    continue
                key = path.relative_to(folder).with_suffix("").as_posix()
                if key in files:
                    raise InputError(
                        f"{at(folder)}: {at(files[key])} and {at(path)} have one name; expected "
                        "one picture a name."
                    )
                files[key] = path
                if len(files) > MOST_PICTURES:
                    raise InputError(f"{at(folder)}: more than {MOST_PICTURES:,} pictures.")
        if not files:
            raise InputError(f"{at(folder)}: no picture in it ({', '.join(ENDINGS)}).")
        return cls(folder, dict(sorted(files.items())))

    @property
    def where(self) -> str:
        return at(self.folder)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def pictures(self) -> Iterator[tuple[str, Pixels]]:
        for name, path in self.files.items():
            with opened_image(path, READ) as image:
                self._lossy += image.format in LOSSY
                if image.mode != "RGB":
                    self._converted[image.mode] = self._converted.get(image.mode, 0) + 1
            yield name, read_pixels(path)

    def notes(self) -> list[str]:
        notes: list[str] = []
        if self._lossy:
            notes.append(
                f"{self.where}: {counted(self._lossy, 'JPEG file')}, whose losses count as "
                "differences. Compare PNG files."
            )
        if self._converted:
            modes = ", ".join(f"{count} {mode}" for mode, count in sorted(self._converted.items()))
            notes.append(
                f"{self.where}: converted to RGB of 8 bits, transparency dropped: {modes}."
            )
        return notes

    def close(self) -> None:
        pass  # each file was closed


@dataclass
class NpzPictures:
    """The array (N, H, W, 3) of bytes in an npz file, as of ADM's evaluator; names are numbers."""

    path: Path
    member: str
    shape: tuple[int, ...]
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def open(cls, path: Path) -> "NpzPictures":
        with _opened_zip(path) as packed:
            found: dict[str, tuple[int, ...]] = {}
            for member in packed.namelist():
                with packed.open(member) as file:
                    shape, fortran, dtype = _npy_header(file)
                    if dtype == np.uint8 and len(shape) == 4 and shape[3] == 3 and not fortran:
                        found[member] = shape
        if len(found) != 1:
            raise InputError(
                f"{at(path)}: {len(found)} arrays of pictures in it; expected one of uint8 and "
                "shape (N, H, W, 3)."
            )
        ((member, shape),) = found.items()
        if not 1 <= shape[0] <= MOST_PICTURES or not 1 <= shape[1] * shape[2] <= MOST_PIXELS:
            raise InputError(f"{at(path)}: pictures of shape {shown(shape)} in it.")
        return cls(path, member, shape)

    @property
    def where(self) -> str:
        return at(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{number:06}" for number in range(self.shape[0]))

    def pictures(self) -> Iterator[tuple[str, Pixels]]:
        size = self.shape[1] * self.shape[2] * 3
        with _opened_zip(self.path) as packed, packed.open(self.member) as file:
            _npy_header(file)
            for name in self.names:
                data = file.read(size)
                if len(data) != size:
                    raise FileError(f"{self.where}: ends before picture {int(name)}.")
                yield name, np.frombuffer(data, np.uint8).reshape(self.shape[1:])

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


@dataclass
class SetPictures:
    """The finished pictures of a calibration set; names are the numbers of its images."""

    opened: CalibrationSet

    @classmethod
    def open(cls, folder: Path) -> "SetPictures":
        opened = CalibrationSet.open(folder)  # reads headers; keeps no file open
        if missing := opened.missing():
            raise InputError(
                f"{at(folder)}: the set lacks {counted(len(missing), 'image')}. Resume it with: "
                f"lydite calibrate run --out {at(folder)}"
            )
        if not opened.plan.pictures:
            raise InputError(f"{at(folder)}: a set without pictures.")
        return cls(opened)

    @property
    def where(self) -> str:
        return at(self.opened.folder)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{image.number:06}" for image in self.opened.plan.images)

    @property
    def prompts(self) -> Mapping[str, str]:
        return {f"{image.number:06}": image.prompt for image in self.opened.plan.images}

    def pictures(self) -> Iterator[tuple[str, Pixels]]:
        for row in self.opened.rows("picture"):
            (pixels,) = self.opened.read(row).values()
            yield f"{row.image:06}", np.asarray(pixels, np.uint8)

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        self.opened.close()


def paired_pictures(
    reference: PictureSource, candidate: PictureSource, names: set[str]
) -> Iterator[tuple[str, Pixels, Pixels]]:
    """The pictures with these names, which both sources have, in order."""
    wanted = (
        ((name, pixels) for name, pixels in source.pictures() if name in names)
        for source in (reference, candidate)
    )
    for (name, one), (other_name, other) in zip(*wanted, strict=True):
        assert name == other_name, "sources are in the order of their names"
        if one.shape != other.shape:
            raise InputError(
                f"picture {shown(name)} is {one.shape[1]}×{one.shape[0]} pixels in "
                f"{reference.where} and {other.shape[1]}×{other.shape[0]} in {candidate.where}; "
                "expected one size."
            )
        yield name, one, other


def common_names(
    reference: PictureSource, candidate: PictureSource, *, only_common: bool = False
) -> set[str]:
    """The names of the pairs: those of both sources, which must be the same unless only common
    ones are asked for."""
    one, other = set(reference.names), set(candidate.names)
    if not one & other:
        raise InputError(
            f"{reference.where} and {candidate.where}: no name in common "
            f"({shown(min(one))}, {shown(min(other))}). Pairs have equal names; give --unpaired "
            "to compare the sets only."
        )
    for source, lonely in (reference, one - other), (candidate, other - one):
        if lonely and not only_common:
            raise InputError(
                f"{source.where}: {counted(len(lonely), 'picture')} without a partner of that name "
                f"({first_of(sorted(lonely), 3)}). Give --common to compare the others, or "
                "--unpaired to compare the sets only."
            )
    return one & other


@contextmanager
def _opened_zip(path: Path) -> Generator[zipfile.ZipFile]:
    """Whatever is wrong with the file is one error."""
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as packed:
                yield packed
        except LyditeError:
            raise
        except Exception as error:  # of zipfile and NumPy, which raise anything for damaged files
            raise FileError(f"{at(path)}: not a readable npz file ({error}).") from error


def _npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of an npy file, which is left at its first value."""
    form = np.lib.format
    readers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    shape, fortran, dtype = readers[form.read_magic(file)](file)
    return tuple(shape), bool(fortran), np.dtype(dtype)
