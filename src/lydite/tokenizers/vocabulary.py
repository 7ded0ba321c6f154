"""The vocabulary of a tokenizer folder: read with a size limit, and checked before use."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from lydite.core.errors import ConfigError, FileError
from lydite.core.files import read_bounded
from lydite.core.jsonfile import MAX_BYTES, read_json
from lydite.tokenizers.sentencepiece import check_charsmap, parse_model

T = TypeVar("T")


class BPEModel(msgspec.Struct):
    """The "model" of a CLIP tokenizer.json."""

    vocab: dict[str, int]
    merges: list[tuple[str, ...] | str]
    type: Literal["BPE"] = "BPE"


class UnigramModel(msgspec.Struct):
    """The "model" of a T5 tokenizer.json."""

    vocab: list[tuple[str, float]]
    type: Literal["Unigram"] = "Unigram"


@dataclass(frozen=True)
class Unigram:
    pieces: list[tuple[str, float]]  # text and log probability, by id
    charsmap: bytes  # characters to replace first, as SentencePiece stores them; may be empty
    special: Sequence[str]  # pieces to look for as a whole


def find(folder: Path, *names: str) -> Path:
    """The first of `names` that `folder` has."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileError(f"{folder}: no tokenizer here, expected {' or '.join(names)}.")


def read_bpe(path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids and merges from tokenizer.json, or from vocab.json and the merges.txt beside it."""
    if path.name == "tokenizer.json":
        model = convert(read_json(path).get("model"), BPEModel, path)
        vocab, merges, merges_path = model.vocab, model.merges, path
    else:
        vocab = convert(read_json(path), dict[str, int], path)
        merges_path = find(path.parent, "merges.txt")
        merges = _merge_lines(merges_path)
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise ConfigError(f"{path}: token ids are not 0 to {len(vocab) - 1} with each id once.")
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        pair = tuple(merge.split(" ")) if isinstance(merge, str) else merge
        if len(pair) != 2 or not vocab.keys() >= {*pair, "".join(pair)}:
            raise ConfigError(
                f"{merges_path}: merge {len(pairs)} {merge!r} is not two tokens that make a third."
            )
        pairs.append(pair)
    return vocab, pairs


def read_unigram(path: Path, extra: Sequence[str]) -> Unigram:
    """Pieces from tokenizer.json, or from spiece.model with the tokens `extra` after them."""
    try:
        if path.name == "tokenizer.json":
            raw = read_json(path)
            pieces = convert(raw.get("model"), UnigramModel, path).vocab
            unigram = Unigram(pieces, _json_charsmap(raw.get("normalizer")), ())
        else:
            model = parse_model(read_bounded(path, MAX_BYTES))
            pieces = [*model.pieces, *((text, 0.0) for text in extra)]
            unigram = Unigram(pieces, model.charsmap, model.special)
        if unigram.charsmap:
            check_charsmap(unigram.charsmap)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}.") from error
    for text, score in unigram.pieces:
        if not math.isfinite(score):
            raise ConfigError(f"{path}: the score of token {text!r} is {score}.")
    return unigram


def convert(value: Any, kind: type[T], where: Path) -> T:
    """`value` from JSON as `kind`, or a ConfigError that names the wrong entry."""
    try:
        msgspec.json.encode(value)  # raises at half of a surrogate pair
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}.") from error
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: text that is not valid Unicode.") from error


def _merge_lines(path: Path) -> list[tuple[str, ...] | str]:
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not UTF-8 (byte {error.start}).") from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return [line for line in lines if line and not line.startswith("#version")]


def _json_charsmap(normalizer: Any) -> bytes:
    """The character map of a normalizer, alone or as a step of a sequence."""
    steps = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    for step in steps if isinstance(steps, list) else []:
        if isinstance(step, dict) and step.get("type") == "Precompiled":
            return base64.b64decode(str(step.get("precompiled_charsmap", "")), validate=True)
    return b""
