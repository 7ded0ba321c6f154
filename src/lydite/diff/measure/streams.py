"""Two streams of tokens in one value, as image and text: a port may join them in either order."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lydite.trace.reader import Trace

Joined = Mapping[int, tuple[int, ...]]  # tokens of a joined value → tokens of a stream in it


def joined_streams(reference: Trace) -> Joined:
    """How many tokens joined values may have: those of two other values of the trace together.

    They may be joined in attention alone, as q, k and v (batch, heads, tokens, width).
    """
    counts = {event.shape[1] for event in reference.events if len(event.shape) == 3}
    heads = {event.shape[2] for event in reference.events if len(event.shape) == 4}
    found: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for count in sorted(counts | heads):
        found[count] = tuple(n for n in sorted(counts) if 1 < n < count - 1 and count - n in counts)
    return {count: firsts for count, firsts in found.items() if firsts}


def in_other_order(value: NDArray[Any], count: int, first: int) -> NDArray[Any]:
    """The value with the `first` of its `count` tokens put last, along each axis of tokens."""
    axes = [axis for axis, size in enumerate(value.shape) if size == count]
    if len(value.shape) < 4 and len(axes) > 1:
        axes = axes[:-1]  # the width: scores have heads as well
    return np.roll(value, [-first] * len(axes), axes)


def other_orders(value: NDArray[Any], joined: Joined) -> Iterator[NDArray[Any]]:
    """The value with its two streams exchanged, in every way that the tokens permit."""
    for count in {*value.shape[:-1]} & joined.keys():
        for first in joined[count]:
            yield in_other_order(value, count, first)
