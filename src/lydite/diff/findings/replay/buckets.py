"""The buckets of T5's relative positions.

Source: transformers 5.22.2, T5Attention._relative_position_bucket.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from math import log

import numpy as np

from lydite.diff.findings.evidence import Array, Evidence
from lydite.diff.findings.replay.positions import found_rows
from lydite.diff.findings.replay.variants import fit_tolerance
from lydite.diff.result import Finding

COUNTS = (32, 16, 64, 8, 4, 12, 24, 48, 128)
FURTHEST = (128, *range(3, 128), 256, 512, 1000, 1024)


@dataclass(frozen=True)
class Buckets:
    """How the distances of keys become rows of the table."""

    count: int
    furthest: int
    both: bool = True  # directions
    sign: int = 1
    off: int = 0  # added to each distance
    rounded: bool = False  # not truncated
    zero_after: bool = False

    def __str__(self) -> str:
        words = f"of {'both directions' if self.both else 'one direction (causal, as a decoder)'}"
        words += " with the other sign" if self.sign < 0 else ""
        words += f" with distances that are off by one ({self.off:+d})" if self.off else ""
        words += ", far ones rounded, not truncated" if self.rounded else ""
        words += ", with a token's distance 0 to itself among the later keys" * self.zero_after
        return f"{words}, {self.count} up to a distance of {self.furthest}"

    def of(self, distance: Array) -> Array:
        """The bucket of each distance: half of them exact, the others logarithmic."""
        distance = self.sign * distance + self.off
        start, count = np.zeros_like(distance), self.count
        if self.both:
            count //= 2
            start = np.where(distance >= 0 if self.zero_after else distance > 0, count, 0)
            distance = np.abs(distance)
        else:
            distance = np.maximum(-distance, 0)
        exact = count // 2
        far = np.log(np.maximum(distance, 1) / exact) / log(self.furthest / exact) * (count - exact)
        whole = np.rint(far) if self.rounded else np.floor(far + 1e-6)
        far = np.minimum(exact + whole.astype(int), count - 1)
        return start + np.where(distance < exact, distance, far)


def other_buckets(e: Evidence) -> Finding | None:
    """Buckets of another direction, with other limits, or of other distances."""
    if not e.same_shape or min(e.port.shape, default=0) < 1:
        return None
    right, wrong = _whole_numbers(e) if e.port.ndim == 2 else _rows_of_table(e)
    if right is None or wrong is None or min(right.shape) < 4 or np.array_equal(right, wrong):
        return None
    sides = [_of_distances(table) for table in (right, wrong)]
    if sides[0] is None or sides[1] is None:
        return None
    distance = np.arange(right.shape[1] + right.shape[0] - 1) - (right.shape[0] - 1)
    usual = [b for b in _usual() if np.array_equal(b.of(distance), sides[0])]
    for each in usual:
        used = next((b for b in _variants(each) if np.array_equal(b.of(distance), sides[1])), None)
        if used is not None:
            return Finding(
                "other-buckets",
                f"The port has buckets of relative positions {used}, the reference {each}.",
                f"Compute the buckets {each}.",
            )
    return None


def _of_distances(table: Array) -> Array | None:
    """The bucket of each distance, from the first key of the last query on; None if others."""
    found = np.concatenate([table[::-1, 0], table[0, 1:]])
    queries, keys = table.shape
    at = np.arange(keys)[None] - np.arange(queries)[:, None] + queries - 1
    return found if np.array_equal(found[at], table) else None


def _usual() -> Iterator[Buckets]:
    for both, count, furthest in product((True, False), COUNTS, FURTHEST):
        if furthest > count // (2 if both else 1) // 2:
            yield Buckets(count, furthest, both)


def _variants(right: Buckets) -> Iterator[Buckets]:
    """The same buckets in other forms, the likeliest first."""
    forms = [
        dict(zero_after=True),
        dict(rounded=True),
        dict(off=1),
        dict(off=-1),
        dict(sign=-1),
        dict(both=not right.both),
        dict(both=not right.both, sign=-1),
    ]
    yield from (replace(right, **form) for form in forms)
    same_count = (b for b in _usual() if (b.count, b.both) == (right.count, right.both))
    yield from chain(same_count, _usual())
    yield from (replace(b, sign=-1) for b in _usual())


def _whole_numbers(e: Evidence) -> tuple[Array | None, Array | None]:
    """Both values, where the reference's are whole numbers."""
    right, wrong = e.values
    whole = bool((right == np.rint(right)).all()) and float(right.min()) >= 0
    return (right, wrong) if whole else (None, None)


def _rows_of_table(e: Evidence) -> tuple[Array | None, Array | None]:
    """Which row of the module's table each position has, for both values (queries, keys, width)."""
    weight = e.parameters().get("weight")
    if e.port.ndim != 3 or weight is None or weight.shape[1:] != e.port.shape[2:]:
        return None, None
    near = fit_tolerance(e) * float(np.linalg.norm(weight, axis=-1).max())
    sides = (found_rows(value.reshape(-1, value.shape[2]), weight, near) for value in e.values)
    right, wrong = (rows.reshape(e.port.shape[:2]) for rows in sides)
    return (None, None) if min(right.min(), wrong.min()) < 0 else (right, wrong)
