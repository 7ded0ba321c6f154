"""Tokens that are sums of embeddings, positions and a class token."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from lydite.diff.findings.evidence import Evidence, Recorded
from lydite.diff.findings.replay.token_sums import other_terms
from support.findings import Array, evidence

DRAW = np.random.default_rng(6)
PATCHES = DRAW.standard_normal((2, 16, 3, 3))
TOKENS = PATCHES.reshape(2, 16, 9).swapaxes(1, 2)
CLASS, TABLE = DRAW.standard_normal(16), DRAW.standard_normal((12, 16))


def embedded(tokens: Array, table: Array = TABLE, first: Array = CLASS) -> Array:
    whole = np.concatenate((np.broadcast_to(first, (2, 1, 16)), tokens), 1)
    return whole + table[: whole.shape[1]]


RIGHT = embedded(TOKENS)


def at_sum(port: Array) -> Evidence:
    values = [Recorded("net/m.patches", PATCHES)]
    parameters = [("net/m.class_token", CLASS), ("net/m.positions.weight", TABLE)]
    return replace(
        evidence(RIGHT, port, floor=1e-8),
        before=lambda: values,
        parameters_inside=lambda width: parameters if width == 16 else [],
    )


@pytest.mark.parametrize(
    ("port", "cause", "words"),
    [
        (embedded(TOKENS, first=0 * CLASS), "term-missing", "class_token: it is missing"),
        (np.concatenate((RIGHT[:, :1], TOKENS), 1), "term-missing", "row 1 of net/m.positions"),
        (embedded(TOKENS, TABLE[1:]), "other-positions", "+1 position "),
        (embedded(TOKENS, np.roll(TABLE[:10], 2, 0)), "other-positions", "-2 positions"),
        (embedded(TOKENS, TABLE.astype(ml_dtypes.bfloat16)), "rounded", "precision"),
        (np.roll(RIGHT - TABLE[:10], -1, 1) + TABLE[:10], "parts-reordered", "another order"),
    ],
)
def test_the_terms_of_wrong_tokens_are_named(port: Array, cause: str, words: str) -> None:
    found = other_terms(at_sum(port))
    assert found is not None and found.cause == cause and words in found.fix


def test_tokens_that_are_no_such_sums_name_nothing() -> None:
    assert other_terms(at_sum(RIGHT * 1.01)) is None
    assert other_terms(at_sum(RIGHT + DRAW.standard_normal(16))) is None
    assert other_terms(replace(at_sum(TOKENS[:, [0] * 10]), reference=RIGHT**2)) is None
    assert other_terms(replace(at_sum(RIGHT[:, ::-1]), parameters_inside=lambda _: [])) is None
