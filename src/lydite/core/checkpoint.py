"""The weights of one model, in one safetensors file or in the many that an index names."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from numpy.typing import NDArray

from lydite.core.config import read_json
from lydite.core.errors import FileError, TensorFileError, shown
from lydite.core.tensorfile import TensorFile, TensorInfo, refuse_other_formats, unknown_tensor

STEMS = ("diffusion_pytorch_model", "model")  # diffusers' name, then that of transformers


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Open weights: the names of all tensors are known, values are read on demand."""

    path: Path  # the file or the index
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    _file_of_tensor: Mapping[str, TensorFile]
    _closer: contextlib.ExitStack

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> NDArray[Any]:
        """The tensor in its stored dtype, read-only."""
        return self._find(name).read(name)

    def file_of(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._find(name).header.path

    def close(self) -> None:
        """Close every file; arrays already read stay valid."""
        self._closer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> TensorFile:
        if name not in self._file_of_tensor:
            raise unknown_tensor(self.path, name, self._file_of_tensor)
        return self._file_of_tensor[name]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.safetensors` file, a `.safetensors.index.json`, or a folder that holds either.

    A folder may also hold 0.safetensors, 1.safetensors and so on without an index.
    """
    weight_map, numbered = None, _numbered_shards(path) if os.path.isdir(path) else []
    if os.path.isdir(path) and not numbered:
        path = _find_weights(path)
    files = numbered or [path]
    if path.suffix == ".json":
        weight_map = _read_weight_map(path)
        files = _find_shards(path, sorted(set(weight_map.values())))
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(TensorFile.open(file)) for file in files]
        if weight_map is not None:
            _check_index(path, weight_map, opened)
        file_of = {name: file for file in opened for name in file.header.tensors}
        if len(file_of) < sum(len(file.header.tensors) for file in opened):
            raise TensorFileError(f"{path}: some tensors are in two of its files.")
        tensors = {name: file.header.tensors[name] for name, file in file_of.items()}
        return Checkpoint(path, tuple(files), tensors, file_of, stack.pop_all())


_SHARD = re.compile(r"-\d+-of-\d+\.")  # model-00001-of-00002.safetensors, model.fp16-00001-of-…
_INDEX = re.compile(r".+\.safetensors\.index(\.[^.]+)?\.json")


def _numbered_shards(folder: Path) -> list[Path]:
    """0.safetensors, 1.safetensors, …: two or more, and no other weights beside them."""
    found = {file.name for file in folder.glob("*.safetensors*")}
    files = [f"{index}.safetensors" for index in range(len(found))]
    return [folder / file for file in files] if len(found) > 1 and found == {*files} else []


def _find_weights(folder: Path) -> Path:
    """The only file or index of weights in `folder`."""
    try:
        listed = sorted(os.listdir(folder))
    except OSError as error:
        raise FileError(f"{folder}: cannot be read ({error.strerror or error}).") from error
    names = [n for n in listed if n[0] != "." and n.isprintable()]  # macOS writes ._ copies
    singles = [n for n in names if n.endswith(".safetensors") and not _SHARD.search(n)]
    weights = singles + [n for n in names if _INDEX.fullmatch(n)]
    plain = [stem + end for stem in STEMS for end in (".safetensors", ".safetensors.index.json")]
    variants = [[n for n in weights if n.startswith(f"{stem}.")] for stem in STEMS]
    for group in (*([name] for name in plain if name in weights), *variants, weights):
        if len(group) == 1:
            return folder / group[0]
        if group:
            raise FileError(f"{folder}: weights could be any of {shown(group)}. Name one of them.")
    for name in names:
        refuse_other_formats(folder / name)
    expected = f"Expected {', '.join(plain)}, or one other *.safetensors or its index"
    raise FileError(f"{folder}: no weights. {expected}; found {shown(names)}.")


def _read_weight_map(index: Path) -> dict[str, str]:
    # metadata.total_size is not checked: published indexes with tied weights often have it wrong.
    weight_map = read_json(index).get("weight_map")
    entries = cast(dict[str, object], weight_map if isinstance(weight_map, dict) else {})
    if not entries or not all(isinstance(shard, str) for shard in entries.values()):
        rule = "expected a weight_map from tensor names to file names"
        raise TensorFileError(f"{index}: {rule}. Is it the index of a safetensors checkpoint?")
    return cast(dict[str, str], entries)


def _find_shards(index: Path, names: Sequence[str]) -> list[Path]:
    """The shards called `names`, all present and none outside the places of `index`."""
    folder = index.parent
    for name in names:
        if not name.isprintable() or re.search(r"[/\\:]", name):
            raise TensorFileError(
                f"{index}: {shown(name)} is not a plain file name. Do not use it."
            )
        refuse_other_formats(folder / name)
        if not name.endswith(".safetensors"):
            raise TensorFileError(f"{index}: {shown(name)} is not named *.safetensors.")
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        count = f"{len(missing)} of {len(names)} shards are missing"
        raise FileError(f"{index}: {count}: {shown(missing)}. Download them into {folder}.")
    places = _places(folder)
    for name in names:
        target = Path(os.path.realpath(folder / name))
        if not any(target.is_relative_to(place) for place in places):
            link = f"{shown(name)} is a link that leads out of the folder, to {shown(str(target))}"
            raise FileError(f"{index}: {link}. Put the file itself there.")
    return [folder / name for name in names]


def _places(folder: Path) -> list[Path]:
    """Where a shard may lie: beside its index, or in the blobs of the same Hugging Face cache.

    An index cannot make links, but the archive or clone it came in can, and they may lead anywhere.
    The hub's own links go from models--*/snapshots/<revision>/ to models--*/blobs, and from there
    (since huggingface_hub 2) to the blobs that all repositories of the cache share.
    """
    real = Path(os.path.realpath(folder))
    for parent in (real, *real.parents):
        if parent.name == "snapshots" and "--" in parent.parent.name:
            return [real, parent.parent / "blobs", parent.parent.parent / "blobs"]
    return [real]


def _check_index(index: Path, weight_map: Mapping[str, str], files: Sequence[TensorFile]) -> None:
    """Each tensor is in exactly one shard, the one that the index names."""
    shards: dict[str, str] = {}
    for file in files:
        for name in file.header.tensors:
            shard = file.header.path.name
            if shards.setdefault(name, shard) != shard:
                both = f"{shards[name]} and {shard}. Download the index and its shards again."
                raise TensorFileError(f"{index}: tensor {shown(name)} is in both {both}")
    for name in (*shards, *weight_map):
        actual, listed = shards.get(name, "no shard"), weight_map.get(name, "no shard")
        if actual != listed:
            fault = f"tensor {shown(name)} is in {actual}, by the index in {listed}"
            raise TensorFileError(f"{index}: {fault}. Download the index and its shards again.")
