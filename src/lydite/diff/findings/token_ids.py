"""Token ids: padding, a missing first token, another vocabulary, the first that differs."""

from collections.abc import Iterator
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import Evidence, Hypothesis
from lydite.diff.result import Finding

Ids = NDArray[np.int64]

MAX_ROWS = 6
MIN_REPEATS = 3  # of tokens: unrelated texts do not repeat at the same positions
MAX_MISSING = 64  # tokens of a prompt template


def rows_swapped(e: Evidence) -> Finding | None:
    """The same prompts in another order."""
    expected, actual = _rows(e.reference), _rows(e.port)
    if not e.same_shape or not 2 <= len(expected) <= MAX_ROWS or np.array_equal(expected, actual):
        return None
    for order in permutations(range(len(expected))):
        if np.array_equal(actual, expected[list(order)]):
            return Finding(
                "batch-swapped",
                f"The {len(expected)} rows are the reference's in the order {order}.",
                "Stack the prompts in the reference's order: conditional and unconditional are "
                "swapped.",
            )
    return None


def pad_differs(e: Evidence) -> Finding | None:
    """Different only after the end of the text, where each side repeats one id."""
    if not e.same_shape:
        return None
    pads: set[tuple[int, int]] = set()
    first = None
    for row, (expected, actual) in enumerate(zip(_rows(e.reference), _rows(e.port), strict=True)):
        if (positions := np.flatnonzero(expected != actual)).size == 0:
            continue
        start = int(positions[0])
        tails = {(int(a), int(b)) for a, b in zip(expected[start:], actual[start:], strict=True)}
        if len(tails) != 1 or start == 0 or expected.size - start < 2:
            return None
        pads |= tails
        first = first or (row, start)
    if len(pads) != 1 or first is None:
        return None
    ((right, wrong),) = pads
    return Finding(
        "pad-id",
        f"The text agrees; from position {first[1]} of row {first[0]} on the reference pads with "
        f"{right}, the port with {wrong}.",
        f"Pad with {right}, as this tokenizer's configuration says; tokenizers of one pipeline may "
        "pad with different ids.",
    )


def pad_side(e: Evidence) -> Finding | None:
    """The same text, padded at the start instead of the end, or the reverse."""
    expected, actual = _first_unequal(e)
    if expected is None or actual is None or expected.size != actual.size or expected.size < 4:
        return None
    for row, other, side in ((expected, actual, "at the start"), (actual, expected, "at the end")):
        count = _run(row)
        text = row[: row.size - count]
        if count < 2 or text.size < 2 or _run(other[::-1]) < count:
            continue
        if np.array_equal(other[count:], text):
            return Finding(
                "pad-side",
                f"The port pads {side}, with {count} ids; the reference at the other side.",
                "Set the side of the padding to the reference's.",
            )
    return None


def ends_differ(e: Evidence) -> Finding | None:
    """The text agrees but for a first or last token: BOS, EOS, the tokens of a template."""
    expected, actual = _first_unequal(e)
    if expected is None or actual is None:
        return None
    if expected.size != actual.size and _run(expected) > 1 and _text(expected) == _text(actual):
        return Finding(
            "length-differs",
            f"The text agrees; the port has {actual.size} ids, the reference {expected.size}.",
            f"Pad to {expected.size}: padding is attended to in some encoders, and they need it.",
        )
    pairs = product(_texts(expected), _texts(actual))
    for right, wrong in sorted(pairs, key=lambda pair: abs(pair[0].size - pair[1].size)):
        short, long = sorted((right, wrong), key=lambda text: text.size)
        more = long.size - short.size
        if not 0 < more <= MAX_MISSING or short.size < 2:
            continue
        missing = long is right
        verb = "misses" if missing else "adds"
        undo, noun = "Add" if missing else "Remove", "the ids" if more > 1 else "the id"
        if np.array_equal(long[more:], short):
            cause = ("bos-missing" if missing else "bos-extra") if more == 1 else "prefix-differs"
            return Finding(
                cause,
                f"The port {verb} {noun} {_ids(long[:more])} at the start; the text after it "
                "agrees.",
                f"{undo} the token that starts a text ({_ids(long[:more])})."
                if more == 1
                else f"{undo} the {more} tokens at the start: a prompt template or system text.",
            )
        if np.array_equal(long[:-more], short):
            cause = ("eos-missing" if missing else "eos-extra") if more == 1 else "length-differs"
            return Finding(
                cause,
                f"The port {verb} {noun} {_ids(long[-more:])} at the end; the text before it "
                "agrees.",
                f"{undo} the token that ends a text ({_ids(long[-more:])})."
                if more == 1
                else "Compare the maximal length, where the text is cut, and the template's end.",
            )
    return None


def moved(e: Evidence) -> Finding | None:
    """Every id off by the same number."""
    if not e.same_shape:
        return None
    expected, actual = _rows(e.reference), _rows(e.port)
    by = int(actual.flat[0] - expected.flat[0])
    if by == 0 or np.unique(expected).size < 3 or not (actual - expected == by).all():
        return None
    return Finding(
        "ids-offset",
        f"Every id is the reference's {by:+d}.",
        "Look for special tokens counted before the vocabulary on one side only.",
    )


def other_vocabulary(e: Evidence) -> Finding | None:
    """The same pattern of repeats with other numbers: another numbering of the vocabulary."""
    expected, actual = _first_unequal(e)
    if expected is None or actual is None or not e.same_shape:
        return None
    size = expected.size - min(_run(expected), _run(actual)) + 1  # padding always repeats
    pairs = set(zip(expected[:size].tolist(), actual[:size].tolist(), strict=True))
    right, wrong = {a for a, _ in pairs}, {b for _, b in pairs}
    changed = sum(a != b for a, b in pairs)
    if not len(pairs) == len(right) == len(wrong) or changed < 4 or size - len(pairs) < MIN_REPEATS:
        return None
    return Finding(
        "other-vocabulary",
        f"Equal ids stay equal, but {changed} of {len(pairs)} tokens have another number.",
        "Read the numbers from the reference's vocabulary file; do not renumber the tokens.",
    )


def ids_differ(e: Evidence) -> Finding | None:
    """The first id that differs."""
    expected, actual = _rows(e.reference), _rows(e.port)
    if expected.shape == actual.shape and np.array_equal(expected, actual):
        return None
    for row, (a, b) in enumerate(zip(expected, actual, strict=False)):
        size = min(a.size, b.size)
        positions = np.flatnonzero(a[:size] != b[:size])
        if positions.size:
            first = int(positions[0])
            evidence = (
                f"Row {row} differs first at position {first}: {b[first]} instead of {a[first]}; "
                f"{positions.size} of {size} ids differ."
            )
            break
    else:
        evidence = f"{list(e.port.shape)} ids instead of {list(e.reference.shape)}."
    return Finding(
        "ids-differ",
        evidence,
        "Encode the word at that position alone on both sides. Compare lower-casing, spaces and "
        "Unicode normalization, then vocabulary and merges.",
    )


IDS: tuple[Hypothesis, ...] = (
    rows_swapped,
    pad_differs,
    pad_side,
    ends_differ,
    moved,
    other_vocabulary,
)


def _rows(array: NDArray[np.generic]) -> Ids:
    ids = np.rint(np.nan_to_num(array.astype(np.float64))).astype(np.int64)
    return ids.reshape(-1, ids.shape[-1]) if ids.ndim else ids.reshape(1, 1)


def _first_unequal(e: Evidence) -> tuple[Ids, Ids] | tuple[None, None]:
    for expected, actual in zip(_rows(e.reference), _rows(e.port), strict=False):
        if not np.array_equal(expected, actual):
            return expected, actual
    return None, None


def _run(row: Ids) -> int:
    """How many ids at the end are the same."""
    differ = np.flatnonzero(row != row[-1])
    return row.size - (int(differ[-1]) + 1 if differ.size else 0)


def _text(row: Ids) -> list[int]:
    """The ids without repeats at the end."""
    return row[: row.size - _run(row) + 1].tolist()


def _texts(row: Ids) -> Iterator[Ids]:
    """The row, and without its padding; the end token may itself be what pads."""
    yield row
    if (count := _run(row)) > 1:
        yield row[: row.size - count + 1]
        yield row[: row.size - count]


def _ids(ids: Ids) -> str:
    return ", ".join(str(number) for number in ids[:4]) + (" …" if ids.size > 4 else "")
