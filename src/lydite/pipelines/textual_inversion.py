"""Textual inversion: learnt vectors that stand for a word of the prompt.

Reference: diffusers 0.42.1, loaders/textual_inversion.py. A file holds the vectors of one word for
each text encoder: one tensor under any name for Stable Diffusion 1.x and 2.x, `clip_l` and `clip_g`
for XL. A word of several vectors takes the place of several tokens; written in capitals too, where
diffusers takes the first vector alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.core.dtypes import FLOAT_NAMES, NAMES, widen
from lydite.core.errors import InputError, WeightsError, at, is_unicode, shown
from lydite.core.tensorfile import TensorFile

MOST_VECTORS = 75  # tokens that CLIP reads of a prompt
ANY_NAME = ""  # in a table of tensors: a file with a single tensor, whatever its name
_NAMELESS = ("emb_params", "clip_l", "clip_g")  # names of tensors that are no words


@dataclass(frozen=True)
class Embedding:
    """A word and its vectors for each text encoder, (N, D) in float32."""

    path: Path
    token: str
    vectors: Mapping[str, NDArray[np.float32]]


def read_embeddings(
    files: Sequence[tuple[Path | str, str | None]],
    encoders: Mapping[str, str],
    widths: Mapping[str, int],
) -> tuple[Embedding, ...]:
    """Files, each with its word or None, for the encoders that have a width: see below."""
    found = {tensor: name for tensor, name in encoders.items() if name in widths}
    return tuple(read_embedding(Path(path), word, found, widths) for path, word in files)


def read_embedding(
    path: Path, token: str | None, encoders: Mapping[str, str], widths: Mapping[str, int]
) -> Embedding:
    """A file of textual inversion, every tensor of it used, or WeightsError.

    `encoders`: tensor -> text encoder; `widths`: text encoder -> width of its embeddings. Without
    `token` the word is the tensor's name, or the file's where the tensor's says nothing.
    """
    if not encoders:
        raise InputError(f"{path}: this model takes no textual inversion.")
    with TensorFile.open(path) as file:
        names = sorted(file.header.tensors)
        table = dict(encoders)
        if ANY_NAME in table and len(names) == 1 and names[0] not in ("clip_l", "clip_g"):
            table = {names[0]: table[ANY_NAME]}
        if set(names) != set(table):
            wanted = "one tensor" if ANY_NAME in table else " and ".join(sorted(table))
            raise WeightsError(
                f"{path}: has {len(names)} tensors, {shown(names[:5])}; a textual inversion of "
                f"this model has {wanted}."
            )
        vectors = {
            encoder: _vectors(path, name, file.read(name), widths[encoder], encoder)
            for name, encoder in table.items()
        }
    if token is None:
        token = path.stem if names[0] in _NAMELESS else names[0]
    if not token.strip() or not is_unicode(token):
        raise InputError(
            f"{at(path)}: the word is {shown(token)}; name another with --embedding FILE:WORD."
        )
    return Embedding(path, token, vectors)


def _vectors(
    path: Path, name: str, array: NDArray[np.generic], width: int, encoder: str
) -> NDArray[np.float32]:
    """(N, D), checked."""
    is_float = NAMES[array.dtype] in FLOAT_NAMES
    if array.ndim not in (1, 2) or array.shape[-1] != width or not is_float:
        raise WeightsError(
            f"{path}: {name} is {array.dtype} of shape {array.shape}; expected floats of width "
            f"{width}, as {encoder} has. Is it of this model?"
        )
    rows = widen(array).astype(np.float32).reshape(-1, width)
    if not 1 <= len(rows) <= MOST_VECTORS or not np.isfinite(rows).all():
        raise WeightsError(
            f"{path}: {name} has {len(rows)} vectors; expected 1 to {MOST_VECTORS}, all finite."
        )
    return rows


def with_vectors(
    table: mx.array, known: int, embeddings: Sequence[Embedding], encoder: str
) -> mx.array:
    """A table of token embeddings with the vectors behind its first `known` rows."""
    rows = [mx.array(each.vectors[encoder]).astype(table.dtype) for each in embeddings]
    return mx.concatenate([table[:known], *rows])
