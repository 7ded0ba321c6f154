"""Prompts to token ids as transformers' tokenizers do for CLIP, T5 and Qwen2, from their files.

Reference: huggingface/transformers 5.22.2, models/clip/tokenization_clip.py,
models/t5/tokenization_t5.py, models/qwen2/tokenization_qwen2.py, tokenization_utils_base.py
(`_from_pretrained`) and tokenization_utils_tokenizers.py. As there, a file gives vocabulary,
merges, character map and special tokens; how text is split is written here, so that a file cannot
bring a pattern of its own. Three generations of files name the special tokens in different places.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

import tokenizers
from lydite.core.config import MAX_BYTES, read_json
from lydite.core.errors import ConfigError, FileError, InputError
from lydite.core.files import read_bounded
from lydite.tokenizers.sentencepiece import check_charsmap, parse_model
from tokenizers import Regex, models, normalizers, pre_tokenizers

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
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}.") from error


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


ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Token(msgspec.Struct, frozen=True):
    """A token that is looked for in the text as a whole, before the text is split."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # looked for after normalizing; None: unless special
    special: bool = False


class AddedToken(Token, frozen=True, kw_only=True):
    """An entry of "added_tokens" in tokenizer.json."""

    id: int


class Settings(msgspec.Struct):
    """The keys we act on in tokenizer_config.json and special_tokens_map.json."""

    bos_token: Token | str | None = None
    eos_token: Token | str | None = None
    unk_token: Token | str | None = None
    sep_token: Token | str | None = None
    pad_token: Token | str | None = None
    cls_token: Token | str | None = None
    mask_token: Token | str | None = None
    additional_special_tokens: list[Token | str] | None = None
    extra_special_tokens: list[Token | str] | dict[str, Token | str] | None = None
    added_tokens_decoder: dict[int, Token] | None = None
    model_max_length: int | float | None = None
    padding_side: Literal["right"] = "right"
    truncation_side: Literal["right"] = "right"


@dataclass(frozen=True)
class SpecialTokens:
    content: dict[str, str]  # role -> text
    tokens: list[Token | str]  # in the order they are added; of two with one text the last counts
    ids: dict[str, int]  # what the files say the id of a text is
    max_length: float

    def add_to(self, backend: tokenizers.Tokenizer, where: Path) -> dict[str, int]:
        """Add the tokens to `backend`; the id of each role."""
        backend.add_tokens([_library_token(token) for token in self.tokens])
        wrong = {t: i for t, i in self.ids.items() if backend.token_to_id(t) != i}
        if wrong:
            raise ConfigError(f"{where}: the vocabulary gives other ids than {wrong}.")
        ids = {role: backend.token_to_id(text) for role, text in self.content.items()}
        known = {role: index for role, index in ids.items() if index is not None}
        if ids != known:
            raise ConfigError(f"{where}: a special token has no text: {self.content}.")
        return known


def read_special_tokens(
    folder: Path, defaults: Mapping[str, str], extra: Sequence[str] = ()
) -> SpecialTokens:
    """Collect them from whichever files `folder` has.

    `defaults` are for roles no file names, `extra` for a tokenizer_config.json that lists none.
    """
    path = folder / "tokenizer_config.json"
    config = convert(_optional(path), Settings, path)
    table = config.added_tokens_decoder
    sources = [config]
    if table is None:  # before transformers 4.34
        path = folder / "special_tokens_map.json"
        sources.insert(0, convert(_optional(path), Settings, path))
        table = _old_table(folder, sources)
    in_table = {token.content: index for index, token in table.items()}

    roles: dict[str, Token | str] = {}
    for role in ROLES:
        token = next((getattr(s, role) for s in sources if getattr(s, role)), defaults.get(role))
        if token is not None:
            roles[role] = token
    if _extra_tokens([config]):
        extra = ()
    tokens: dict[Token | str, None] = dict.fromkeys(table[index] for index in sorted(table))
    for token in [*roles.values(), *_extra_tokens(sources), *extra]:
        if _content(token) not in in_table:
            tokens.setdefault(token)  # at its first place, once
    return SpecialTokens(
        content={role: _content(token) for role, token in roles.items()},
        tokens=list(tokens),
        ids=in_table,
        max_length=_max_length(config, folder / "tokenizer_config.json"),
    )


def _old_table(folder: Path, sources: Sequence[Settings]) -> dict[int, Token]:
    path = folder / "added_tokens.json"
    named = {_content(token) for s in sources for role in ROLES if (token := getattr(s, role))}
    named |= {_content(token) for token in _extra_tokens(sources)}
    table = {
        index: Token(text, special=text in named)
        for text, index in convert(_optional(path), dict[str, int], path).items()
    }
    path = folder / "tokenizer.json"
    entries = convert(_optional(path).get("added_tokens", []), list[AddedToken], path)
    return table | {token.id: token for token in entries}


def _extra_tokens(sources: Sequence[Settings]) -> list[Token | str]:
    lists = [s.extra_special_tokens or s.additional_special_tokens or [] for s in sources]
    return [
        token
        for tokens in lists
        for token in (tokens.values() if isinstance(tokens, dict) else tokens)
    ]


def _max_length(config: Settings, where: Path) -> float:
    length = config.model_max_length
    if length is not None and length < 2:
        raise ConfigError(f"{where}: model_max_length is {length}, too short for any text.")
    return float("inf") if length is None else length


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: Token | str) -> str:
    return token if isinstance(token, str) else token.content


def _library_token(token: Token | str) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, normalized=False, special=True)
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=not token.special if token.normalized is None else token.normalized,
        special=True,
    )


CLIP_MAX_LENGTH = 77
CLIP_TOKENS = {
    "bos_token": "<|startoftext|>",
    "eos_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
}
CLIP_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
QWEN2_TOKENS = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
T5_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
T5_UNK_ID = 2
T5_EXTRA_TOKENS = [f"<extra_id_{index}>" for index in reversed(range(100))]


class Tokenizer:
    """Text to a number of ids: cut on the right, the end token is never cut off, then padded.

    A tokenizer without a padding token gives as many ids as the text has.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        before: Sequence[int],
        after: Sequence[int],
        pad: int | None,
        max_length: int,
    ) -> None:
        if max_length < len(before) + len(after):
            raise InputError(f"a length of {max_length} tokens leaves no place for the end token.")
        self.max_length = max_length
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._backend, self._before, self._after, self._pad = backend, before, after, pad
        self._words: dict[int, range] = {}  # id of an added word -> the ids that stand for it

    def __call__(self, text: str) -> NDArray[np.int32]:
        """Ids of `text`: (max_length,), or fewer without padding."""
        return self.join([text])[0]

    def join(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], list[int]]:
        """Ids of texts one after the other, and of each the number of its text or -1."""
        pairs = [
            (index, number) for number, text in enumerate(texts) for index in self._encode(text)[0]
        ][: self._capacity]
        ids = [*self._before, *(index for index, _ in pairs), *self._after]
        owners = [-1] * len(self._before) + [number for _, number in pairs]
        if self._pad is not None:
            ids += [self._pad] * (self.max_length - len(ids))
        owners += [-1] * (len(ids) - len(owners))
        return np.array(ids, dtype=np.int32), owners

    def add_word(self, text: str, ids: int) -> None:
        """A word, looked for before the text is split, for which so many new ids stand."""
        if self._backend.token_to_id(text) is not None:
            raise InputError(f"the tokenizer knows {text!r} already; choose another word.")
        self._backend.add_tokens([tokenizers.AddedToken(text, normalized=True, special=False)])
        known = self._backend.get_vocab(with_added_tokens=True)[text]
        self._words[known] = range(self.vocab_size, self.vocab_size + ids)
        self.vocab_size += ids

    def truncated(self, text: str, length: int | None = None) -> str | None:
        """The end of `text` that does not fit and is cut off; None when everything fits.

        `length` is a limit lower than `max_length`.
        """
        offsets = self._encode(text)[1]
        capacity = self._capacity - (0 if length is None else self.max_length - length)
        return text[offsets[capacity][0] :] if len(offsets) > capacity else None

    @property
    def _capacity(self) -> int:
        return self.max_length - len(self._before) - len(self._after)

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and where the text of each begins and ends."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except TypeError as error:  # half of a surrogate pair
            raise InputError(f"the prompt is not valid Unicode: {text[:40]!r}.") from error
        if not self._words:
            return encoding.ids, encoding.offsets
        pairs = [
            (each, offset)
            for index, offset in zip(encoding.ids, encoding.offsets, strict=True)
            for each in self._words.get(index, (index,))
        ]
        return [index for index, _ in pairs], [offset for _, offset in pairs]


def load_clip_tokenizer(folder: Path) -> Tokenizer:
    """From tokenizer.json, or vocab.json and merges.txt; 77 ids unless the folder says fewer."""
    path = find(folder, "tokenizer.json", "vocab.json")
    vocab, merges = read_bpe(path)
    special = read_special_tokens(folder, CLIP_TOKENS)
    unk = special.content["unk_token"]
    if unk not in vocab:
        raise ConfigError(f"{path}: the vocabulary lacks {unk!r}, the token for unknown text.")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=unk,
            fuse_unk=False,
            continuing_subword_prefix="",
            end_of_word_suffix="</w>",
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CLIP_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    ids = special.add_to(backend, folder)
    return Tokenizer(
        backend,
        before=[ids["bos_token"]],
        after=[ids["eos_token"]],
        pad=ids["pad_token"],
        max_length=int(min(CLIP_MAX_LENGTH, special.max_length)),
    )


def load_t5_tokenizer(folder: Path, max_length: int = 256) -> Tokenizer:
    """From tokenizer.json, or spiece.model alone. The length is the pipeline's choice."""
    path = find(folder, "tokenizer.json", "spiece.model")
    unigram = read_unigram(path, T5_EXTRA_TOKENS)
    special = read_special_tokens(folder, T5_TOKENS, [*unigram.special, *T5_EXTRA_TOKENS])
    unk = special.content["unk_token"]
    if [text for text, _ in unigram.pieces[T5_UNK_ID : T5_UNK_ID + 1]] != [unk]:
        raise ConfigError(f"{path}: expected {unk!r} as token {T5_UNK_ID} of the vocabulary.")
    backend = tokenizers.Tokenizer(
        models.Unigram(unigram.pieces, unk_id=T5_UNK_ID, byte_fallback=False)
    )
    if unigram.charsmap:
        backend.normalizer = normalizers.Precompiled(unigram.charsmap)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True),
        ]
    )
    ids = special.add_to(backend, folder)
    return Tokenizer(
        backend, before=[], after=[ids["eos_token"]], pad=ids["pad_token"], max_length=max_length
    )


def load_qwen2_tokenizer(folder: Path, max_length: int, *, padded: bool = False) -> Tokenizer:
    """From tokenizer.json, or vocab.json and merges.txt. To the ids only padding is added."""
    path = find(folder, "tokenizer.json", "vocab.json")
    vocab, merges = read_bpe(path)
    special = read_special_tokens(folder, QWEN2_TOKENS)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            fuse_unk=False,
            continuing_subword_prefix="",
            end_of_word_suffix="",
        )
    )
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ids = special.add_to(backend, folder)
    pad = ids["pad_token"] if padded else None
    return Tokenizer(backend, before=[], after=[], pad=pad, max_length=max_length)
