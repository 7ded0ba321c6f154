"""Attention: the softmax over another axis, a mask missing, too much or inverted."""

from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.diff.findings.evidence import FEW, Evidence, apart, explanation, norm
from lydite.diff.measure.distance import wide
from lydite.diff.result import Finding

MIN_MASKED = 16  # positions masked on one side only
CLOSE = 1e-2  # to one, of sums in any precision
MAX_MATRICES, MAX_VALUES, MAX_ROWS = 8, 2**22, 256  # measured


@dataclass(frozen=True)
class Rows:
    """Measurements of some rows of attention probabilities."""

    sums: tuple[float, float]  # least and most
    columns: bool  # whether every column sums to one
    entropy: tuple[float, float]  # least and most, over that of equal probabilities
    typical: float  # the mean entropy


def softmax_axis(e: Evidence) -> Finding | None:
    """Columns sum to one where the reference's rows do."""
    reference, port = e.values
    if not e.same_shape or port.ndim < 2 or min(port.shape[-2:]) < 3:
        return None
    if not _sums_to_one(reference, -1) or _sums_to_one(port, -1):
        return None
    for axis in range(port.ndim - 1):
        if port.shape[axis] > 2 and _sums_to_one(port, axis):
            rows = port.sum(-1, dtype=np.float64)
            return Finding(
                "softmax-axis",
                f"The port sums to one along {e.axis(axis)}, the reference along "
                f"{e.axis(port.ndim - 1)}; there the port's sums are from {rows.min():.3g} to "
                f"{rows.max():.3g}.",
                "Take the softmax over the last axis, the keys.",
            )
    return None


def mask(e: Evidence) -> Finding | None:
    """Equal to the reference once what only one side masks is masked on both."""
    reference, port = e.values
    if not e.same_shape or port.ndim < 2 or port.shape[-1] < 3:
        return None
    if not (_sums_to_one(reference, -1) and _sums_to_one(port, -1)):
        return None
    more, fewer = (reference == 0) & (port > 0), (port == 0) & (reference > 0)
    if max(more.sum(), fewer.sum()) < MIN_MASKED:
        return None
    both = (reference > 0) & (port > 0)
    left = apart(_renormalised(port, both), _renormalised(reference, both))
    if left > max(FEW * e.rounding * max(e.norms), 0.03 * e.lost):
        return None
    if fewer.sum() < MIN_MASKED:
        cause = "mask-missing"
        what = f"attends to {int(more.sum())} of {port.size} positions that are masked in"
        fix = "Apply the reference's mask: padding, causal, or that of a joint sequence."
    elif more.sum() < MIN_MASKED:
        cause, what = "mask-extra", f"masks {int(fewer.sum())} positions more than"
        fix = "Remove a mask that the reference does not apply here."
    else:
        cause, what = "mask-differs", "masks other positions than"
        fix = "Compare the two masks: inverted, shifted by one, or of another prompt."
    return explanation(
        cause,
        f"The port {what} the reference; where neither is masked they agree up to the sum of a "
        f"row; {e.leaves(left)}.",
        fix,
        left <= e.noise(),
    )


def causal_mask(e: Evidence) -> Finding | None:
    """In the reference the first token sees itself alone; in the port it sees later ones."""
    if not e.same_shape or e.port.ndim != 3 or e.port.shape[1] < 3 or e.variety < 8:
        return None
    if any("forms of attention" in words for words in e.ruled_out):  # no mask is one of them
        return None
    reference, port = e.values
    for name, v in e.near():
        if v.ndim != 3 or v.shape[:2] != port.shape[:2]:
            continue
        first_only = _is_value(e, reference[:, 0], v[:, 0]) and not any(
            _is_value(e, rows[:, row], v[:, row])
            for rows, row in ((reference, 1), (reference, -1), (port, 0))
        )
        if first_only and _is_value(e, port[:, -1], v[:, -1]):
            return Finding(
                "mask-inverted",
                f"In the port the last token's row is its own row of {name}, in the reference the "
                "first token's is: each token sees itself and those after it.",
                "Invert the mask: a token sees itself and those before it.",
            )
        if first_only:
            return Finding(
                "mask-missing",
                f"In the reference the first token's row is its own row of {name}: it sees no "
                "other. In the port it is a mixture.",
                "Use a causal mask: a token sees itself and those before it.",
            )
    return None


def _is_value(e: Evidence, row: NDArray[Any], value: NDArray[Any]) -> bool:
    """Whether rows (B, D) hold the heads of (B, D/r), each r times: several queries share one."""
    share, rest = divmod(row.shape[-1], value.shape[-1])
    if rest or share < 1 or row.size < 8 or float(np.ptp(row)) == 0:
        return False
    for width in range(1, value.shape[-1] + 1):
        if value.shape[-1] % width == 0:
            heads = value.reshape(len(value), -1, width)
            left = apart(row, np.repeat(heads, share, axis=1).reshape(row.shape))
            if left <= FEW * e.rounding * norm(row):
                return True
            if share == 1:
                return False
    return False


def measure_rows(values: NDArray[Any]) -> Rows:
    """Sums and entropy of a bounded number of rows of (…, queries, keys)."""
    queries, keys = values.shape[-2:]
    matrices = values.reshape(-1, queries, keys)
    few = min(max(1, MAX_VALUES // (queries * keys)), MAX_MATRICES)
    part = wide(matrices[:: -(-matrices.shape[0] // few)][:, : max(1, MAX_VALUES // keys)])
    sums = part.sum(-1, dtype=np.float64)
    whole = part.shape[1] == queries
    columns = whole and bool((np.abs(part.sum(-2, dtype=np.float64) - 1) < CLOSE).all())
    p = part.reshape(-1, keys)[:: -(-sums.size // MAX_ROWS)].astype(np.float64)
    logs = np.log(p, where=p > 0, out=np.zeros_like(p))
    entropy = -(p * logs).sum(-1) / log(keys)
    span = (float(entropy.min()), float(entropy.max()))
    return Rows((float(sums.min()), float(sums.max())), columns, span, float(entropy.mean()))


def _sums_to_one(values: NDArray[Any], axis: int) -> bool:
    if values.min() < 0 or values.max() > 1 + CLOSE:
        return False
    return bool((np.abs(values.sum(axis, dtype=np.float64) - 1) < CLOSE).all())


def _renormalised(values: NDArray[Any], kept: NDArray[np.bool_]) -> NDArray[Any]:
    values = np.where(kept, values, 0)
    total = values.sum(-1, keepdims=True, dtype=np.float64)
    return values / np.where(total > 0, total, 1)
