"""Special tokens of a tokenizer folder: the text of each role, and how it is found in a prompt.

Reference: huggingface/transformers 5.22.2, tokenization_utils_base.py (`_from_pretrained`) and
tokenization_utils_tokenizers.py. Three generations of files say the same in different places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

import tokenizers
from lydite.core.errors import ConfigError
from lydite.core.jsonfile import read_json
from lydite.tokenizers.vocabulary import convert

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
