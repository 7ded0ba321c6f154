"""Weights of parts of a prompt, in the syntax of A1111 or of compel; off unless asked for.

Reference: A1111 (82a973c) by its behaviour, compel 2.5.1. Both change the text encoder's output.

- A1111: `(word)` is 1.1 times, `[word]` 1/1.1 times, `(word:1.3)` 1.3 times; `\\(` is a bracket.
  Each token's features are multiplied by its weight; then all features of the prompt are scaled by
  one number, so that their mean is as before.
- compel: `word++` is 1.1² times, `word--` 0.9² times, `(some words)1.3` 1.3 times. A token's
  features are moved away from those of the empty prompt, or towards them. Parts below 1 are hidden
  from the encoder as well, and both outputs are mixed. Nothing is normalised.

The pooled text of SDXL has no weights: it is of the words alone (A1111) or of the prompt as it is
written (compel). A prompt is cut after 75 tokens; neither A1111's `BREAK` and its chunks nor
compel's `.and()`, `.blend()` and `.swap()` are there.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import InputError, shown
from lydite.pipelines.model import Model
from lydite.tokenizers.tokenizer import Tokenizer

Part = tuple[str, float]  # text and its weight
STEP = 1.1  # of one bracket in A1111
PLUS, MINUS = 1.1, 0.9  # of one sign in compel
LEAST = 1e-5  # weight in compel: 0 would be an infinite share
LARGEST = 1000  # weight; people write 0 to 2


def parse_a1111(prompt: str) -> list[Part]:
    """The parts of a prompt; neighbours of one weight are one part."""
    parts: list[Part] = []
    open_brackets: list[tuple[str, int]] = []  # bracket, number of the first part in it

    def close(factor: float) -> None:
        _, first = open_brackets.pop()
        parts[first:] = [(text, weight * factor) for text, weight in parts[first:]]

    for found in _A1111.finditer(prompt):
        text, number = found[0], found["weight"]
        innermost = open_brackets[-1][0] if open_brackets else ""
        if text in "([":
            open_brackets.append((text, len(parts)))
        elif number is not None and innermost == "(":
            close(_number(number, prompt))
        elif text == ")" and innermost == "(":
            close(STEP)
        elif text == "]" and innermost == "[":
            close(1 / STEP)
        else:
            parts.append((text[1:] if text.startswith("\\") and len(text) > 1 else text, 1.0))
    while open_brackets:
        close(STEP if open_brackets[-1][0] == "(" else 1 / STEP)
    if any(re.search(r"\bBREAK\b", text) for text, _ in parts):
        raise InputError(f"weighting a1111: BREAK is not supported, in {shown(prompt)}.")
    return _joined(parts, "")


_A1111 = re.compile(
    r"\\[()\[\]\\]|\\|[(\[]|:\s*(?P<weight>[+-]?[.\d]+)\s*\)|[)\]]|[^\\()\[\]:]+|:", re.DOTALL
)


def parse_compel(prompt: str) -> list[Part]:
    """The parts of a prompt; neighbours of one weight are one part."""
    if found := re.search(r"\.(swap|blend|and|add|attend)\(|\b(use|with)Lora\(", prompt):
        raise InputError(f"weighting compel: {found[0]}…) is not supported, in {shown(prompt)}.")
    text = re.sub(r",(\S)", r", \1", prompt)
    parts: list[Part] = []
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        found_parts, position = _compel_part(text, position) or _free_word(text, position)
        parts += found_parts
    return _joined(parts, " ")


_WORD = re.compile(  # without a character that means something, unless it is escaped
    r'(?:\\[()",.+\-=]|[-+](?![\s()",.+\-=]|$)|[^\s()",.+\-=])+'
)
_SIGNS = re.compile(r"\++|-+")
_WEIGHT = re.compile(r"\++|-+|\d+\.\d*|\.\d+|\d+")


def _compel_part(
    text: str, position: int, *, inside: bool = False
) -> tuple[list[Part], int] | None:
    """A group or a word with its weight; within a group also a word or a mark without one."""
    if text[position] == "(":
        parts: list[Part] = []
        position += 1
        while position < len(text) and text[position] != ")":
            if text[position].isspace():
                position += 1
                continue
            found = _compel_part(text, position, inside=True)
            if found is None:
                return None
            parts, position = parts + found[0], found[1]
        if position == len(text):
            return None
        operator, end = _WEIGHT.match(text, position + 1), position + 1
    elif word := _WORD.match(text, position):
        parts, end = [(_unescaped(word[0]), 1.0)], word.end()
        operator = _SIGNS.match(text, end)
        if operator is None and not inside:
            return None  # compel takes all up to the next space
    elif inside and text[position] in ",.":
        return [(text[position], 1.0)], position + 1
    else:
        return None
    if operator is None:
        return parts, end
    sign = operator[0]
    if sign[0] in "+-":
        factor = (PLUS if sign[0] == "+" else MINUS) ** len(sign)
    else:
        factor = _number(sign, text)
    return [(part, weight * factor) for part, weight in parts], operator.end()


def _free_word(text: str, position: int) -> tuple[list[Part], int]:
    end = next((i for i in range(position, len(text)) if text[i].isspace()), len(text))
    return [(_unescaped(text[position:end]), 1.0)], end


def _unescaped(word: str) -> str:
    return word.replace("\\(", "(").replace("\\)", ")").replace('\\"', '"')


def _number(text: str, prompt: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"the weight {text!r} is no number, in {shown(prompt)}.") from None


def _joined(parts: Sequence[Part], between: str) -> list[Part]:
    joined: list[Part] = []
    for text, weight in parts:
        if joined and joined[-1][1] == weight:
            joined[-1] = joined[-1][0] + between + text, weight
        else:
            joined.append((text, weight))
    return joined or [("", 1.0)]


PARSERS: dict[str, Callable[[str], list[Part]]] = {"a1111": parse_a1111, "compel": parse_compel}


def parse(prompt: str, weighting: str) -> list[Part]:
    """The parts of a prompt; InputError for weights that no text encoder's output can take."""
    try:
        parts = PARSERS[weighting](prompt)
    except (RecursionError, OverflowError):
        raise InputError(
            f"weighting {weighting}: too many brackets or signs in {shown(prompt)}."
        ) from None
    for text, weight in parts:
        if not abs(weight) <= LARGEST:
            raise InputError(
                f"weighting {weighting}: the weight of {shown(text)} is {weight:g}; expected "
                f"-{LARGEST} to {LARGEST}."
            )
    return parts


@dataclass(frozen=True, eq=False)
class EncoderRows:
    """What a text encoder is given for some prompts, and how its outputs become features."""

    ids: mx.array  # (R, S)
    hidden: mx.array | None  # (R, S) of booleans: tokens that no other sees
    combine: Callable[[mx.array], mx.array]  # features (R, S, D) -> (prompts, S, D)
    pooled: list[int]  # the row of each prompt's pooled text


def encoder_rows(
    model: Model, encoder: str, prompts: Sequence[str], weighting: str | None
) -> EncoderRows:
    """Plain prompts, a row each, or with weights in one of the two syntaxes."""
    if weighting is None:
        ids = model.token_ids(encoder, prompts)
        return EncoderRows(ids, None, lambda features: features, list(range(len(prompts))))
    tokenizer = model.tokenizer(encoder)
    assert isinstance(tokenizer, Tokenizer)
    parts = [parse(prompt, weighting) for prompt in prompts]
    tokens = [tokenizer.join([text for text, _ in each]) for each in parts]
    weights = [
        np.array([1.0 if owner < 0 else each[owner][1] for owner in owners], np.float32)
        for each, (_, owners) in zip(parts, tokens, strict=True)
    ]
    ids = [row for row, _ in tokens]
    if weighting == "a1111":
        scales = mx.array(np.stack(weights))[:, :, None]
        rows = model.checked_ids(encoder, np.stack(ids))
        return EncoderRows(rows, None, lambda x: _a1111(x, scales), list(range(len(prompts))))
    return _compel_rows(model, encoder, prompts, parts, tokens, weights)


def _a1111(features: mx.array, weights: mx.array) -> mx.array:
    """Multiplied, with the mean of each prompt as before."""
    weighted = features.astype(mx.float32) * weights
    mean = features.astype(mx.float32).mean(axis=(1, 2), keepdims=True)
    weighted = weighted * (mean / weighted.mean(axis=(1, 2), keepdims=True))
    plain = (weights == 1).all(axis=(1, 2), keepdims=True)
    return mx.where(plain, features, weighted.astype(features.dtype))


def _compel_rows(
    model: Model,
    encoder: str,
    prompts: Sequence[str],
    parts: Sequence[Sequence[Part]],
    tokens: Sequence[tuple[NDArray[np.int32], list[int]]],
    weights: Sequence[NDArray[np.float32]],
) -> EncoderRows:
    """Rows: the empty prompt, each prompt as it is written, then its words, whole and with parts
    below 1 hidden in turn."""
    tokenizer = model.tokenizer(encoder)
    ids = [tokenizer(""), *(tokenizer(prompt) for prompt in prompts)]
    hidden = [np.zeros(len(ids[0]), bool) for _ in ids]
    scales = [np.ones(len(ids[0]), np.float32) for _ in ids]
    mixes: list[list[tuple[int, float]]] = []  # of each prompt: rows and their shares
    for each, (row, owners), weight in zip(parts, tokens, weights, strict=True):
        below = [number for number, (_, w) in enumerate(each) if w < 1 and number in owners]
        mix = [(len(ids), 1.0)]
        for number in (-2, *below):  # -2: nothing is hidden
            if number >= 0:
                share = math.tan((1 - max(each[number][1], LEAST)) * math.pi / 2)
                mix.append((len(ids), share))
            ids.append(row)
            hidden.append(np.array(owners) == number)
            scales.append(weight)
        mixes.append(mix)
    factors = mx.array(np.stack(scales))[:, :, None]

    def combine(features: mx.array) -> mx.array:
        wide = features.astype(mx.float32)
        moved = mx.where(factors == 1, wide, wide[:1] + (wide - wide[:1]) * factors)
        combined = [moved[mix[0][0]] for mix in mixes]
        for number, mix in enumerate(mixes):
            total = sum(share for _, share in mix)
            if len(mix) > 1:
                combined[number] = mx.stack([moved[r] * (s / total) for r, s in mix]).sum(axis=0)
        return mx.stack(combined).astype(features.dtype)

    rows = model.checked_ids(encoder, np.stack(ids))
    mask = mx.array(np.stack(hidden)) if np.stack(hidden).any() else None
    return EncoderRows(rows, mask, combine, list(range(1, 1 + len(prompts))))


def plain_text(prompt: str, weighting: str) -> str:
    """The words of a prompt without the signs of its weights."""
    between = " " if weighting == "compel" else ""
    return between.join(text for text, _ in parse(prompt, weighting))
