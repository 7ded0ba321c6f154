"""Prompts to token ids as transformers' tokenizers do for CLIP, T5 and Qwen2, from their files.

Reference: huggingface/transformers 5.22.2, models/clip/tokenization_clip.py,
models/t5/tokenization_t5.py and models/qwen2/tokenization_qwen2.py. As there, a file gives
vocabulary, merges, character map and special tokens; how text is split is written here, so that a
file cannot bring a pattern of its own.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import tokenizers
from lydite.core.errors import ConfigError, InputError
from lydite.tokenizers.special_tokens import read_special_tokens
from lydite.tokenizers.vocabulary import find, read_bpe, read_unigram
from tokenizers import Regex, models, normalizers, pre_tokenizers

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

    def __call__(self, text: str) -> NDArray[np.int32]:
        """Ids of `text`: (max_length,), or fewer without padding."""
        ids = [*self._before, *self._encode(text).ids[: self._capacity], *self._after]
        if self._pad is not None:
            ids += [self._pad] * (self.max_length - len(ids))
        return np.array(ids, dtype=np.int32)

    def truncated(self, text: str, length: int | None = None) -> str | None:
        """The end of `text` that does not fit and is cut off; None when everything fits.

        `length` is a limit lower than `max_length`.
        """
        offsets = self._encode(text).offsets
        capacity = self._capacity - (0 if length is None else self.max_length - length)
        return text[offsets[capacity][0] :] if len(offsets) > capacity else None

    @property
    def _capacity(self) -> int:
        return self.max_length - len(self._before) - len(self._after)

    def _encode(self, text: str) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except TypeError as error:  # half of a surrogate pair
            raise InputError(f"the prompt is not valid Unicode: {text[:40]!r}.") from error


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


def load_qwen2_tokenizer(folder: Path, max_length: int) -> Tokenizer:
    """From tokenizer.json, or vocab.json and merges.txt. Nothing is added to the text's own ids."""
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
    special.add_to(backend, folder)
    return Tokenizer(backend, before=[], after=[], pad=None, max_length=max_length)
