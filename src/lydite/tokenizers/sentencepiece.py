"""A SentencePiece model file (`spiece.model`): the few fields of its protobuf a tokenizer needs.

Reference: google/sentencepiece, src/sentencepiece_model.proto; its character map is a double-array
trie (s-yata/darts-clone) followed by the replacement texts.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Field numbers. ModelProto: pieces, trainer_spec, normalizer_spec.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE, SCORE, TYPE = 1, 2, 3  # SentencePiece
MODEL_TYPE = 3  # TrainerSpec
CHARSMAP = 2  # NormalizerSpec

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # SentencePiece.Type
UNIGRAM = 1  # TrainerSpec.ModelType


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: list[tuple[str, float]]  # text and log probability, by id
    special: list[str]  # control and user-defined pieces, matched before the text is normalized
    charsmap: bytes  # empty when the model replaces no characters


def parse_model(data: bytes) -> SentencePieceModel:
    """Read a unigram model; raises ValueError with the reason in a few words."""
    pieces: list[tuple[str, float]] = []
    special: list[str] = []
    charsmap = b""
    for number, value in _fields(data):
        if number == PIECES and isinstance(value, bytes):
            piece = dict(_fields(value))
            text, score, kind = (
                piece.get(PIECE, b""),
                piece.get(SCORE, b"\0\0\0\0"),
                piece.get(TYPE),
            )
            if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4:
                raise ValueError(f"piece {len(pieces)} is not text and score")
            pieces.append((text.decode("utf-8"), struct.unpack("<f", score)[0]))
            if kind in (CONTROL, USER_DEFINED):
                special.append(pieces[-1][0])
        elif number == TRAINER and isinstance(value, bytes):
            if dict(_fields(value)).get(MODEL_TYPE, UNIGRAM) != UNIGRAM:
                raise ValueError("not a unigram model")
        elif number == NORMALIZER and isinstance(value, bytes):
            stored = dict(_fields(value)).get(CHARSMAP, b"")
            charsmap = stored if isinstance(stored, bytes) else b""
    return SentencePieceModel(pieces, special, charsmap)


def check_charsmap(charsmap: bytes) -> None:
    """Raise ValueError unless every walk through the trie ends inside it.

    The tokenizers library indexes without looking, and a bad map would stop the process's thread.
    """
    size = int.from_bytes(charsmap[:4], "little")
    text = charsmap[4 + size :]
    if size == 0 or size % 1024 or len(charsmap) < 4 + size:
        raise ValueError("the trie of the character map is not whole")
    units = np.frombuffer(charsmap, "<u4", count=size // 4, offset=4).astype(np.int64)
    nodes = np.flatnonzero(units < 2**31)  # the others are leaves
    offset = (units[nodes] >> 10) << ((units[nodes] & 2**9) >> 6)
    target = nodes ^ offset
    if target.max(initial=0) >= len(units):  # a node has 256 children, which lie in one piece
        raise ValueError("the trie of the character map leads outside")
    leaves = units[target[(units[nodes] >> 8) & 1 == 1]] & (2**31 - 1)
    starts = np.frombuffer(text, np.uint8)
    if leaves.max(initial=0) >= len(starts) or np.any(starts[leaves] & 0xC0 == 0x80):
        raise ValueError("the character map replaces by text it does not have")
    text.decode("utf-8")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) pairs of one protobuf message; numbers as int, the rest as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"protobuf wire type {wire} at byte {at}")
        if size > len(data) - at:
            raise ValueError(f"protobuf field of {size} bytes at byte {at} is cut off")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("protobuf number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"protobuf number longer than 10 bytes at byte {at}")
