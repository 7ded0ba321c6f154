"""AWQ's scaling of input channels, where it can be folded into the linear before.

Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
Acceleration", MLSys 2024, arXiv 2306.00978. Input channels that are large get larger weights, which
are rounded with a smaller share of error, and the linear before gives correspondingly less.

Between the value and the output projection of an attention lies only a weighted mean over tokens,
so that channels of the values can be scaled. The rows of the value projections, which are divided,
have grids of their own and are rounded as before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lydite.quantize.grid import Floats

RATIOS = tuple(np.linspace(0, 1, 20).tolist())  # 0: no scaling
MOST_ROWS = 4096  # of the inputs by which a ratio is chosen
GIVING, TAKING = ("to_v", "add_v_proj"), ("to_out.0", "to_add_out")


class Linears(NamedTuple):
    """Linears whose outputs are, after a weighted mean over tokens, inputs of others."""

    giving: tuple[str, ...]
    taking: tuple[str, ...]


def value_pairs(weights: Mapping[str, Floats]) -> list[Linears]:
    """The value and output projections of each attention; text and image share the channels."""
    found: list[Linears] = []
    for path in weights:
        stem = path.removesuffix(GIVING[0])
        if path == stem or not stem.endswith("."):
            continue
        pair = Linears(
            *(tuple(stem + name for name in names if stem + name in weights)
              for names in (GIVING, TAKING))
        )  # fmt: skip
        width = {len(weights[name]) for name in pair.giving}
        if pair.taking and width == {weights[name].shape[1] for name in pair.taking}:
            found.append(pair)
    return found


def fold_scales(
    pair: Linears,
    weights: Mapping[str, Floats],
    biases: Mapping[str, Floats],
    inputs: Mapping[str, Floats],
    rounded: Callable[[str, Floats], Floats],
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Weights and biases of a pair that compute the same, and round better.

    `inputs` are those of the linears that take, `rounded` gives a weight as it is after rounding.
    """
    scales = find_scales(
        [weights[name] for name in pair.taking],
        [inputs[name] for name in pair.taking],
        [lambda weight, name=name: rounded(name, weight) for name in pair.taking],
    )
    changed = {name: weights[name] / scales[:, None] for name in pair.giving}
    changed |= {name: weights[name] * scales for name in pair.taking}
    return changed, {name: biases[name] / scales for name in pair.giving if name in biases}


def find_scales(
    weights: Sequence[Floats],
    inputs: Sequence[Floats],
    rounded: Sequence[Callable[[Floats], Floats]],
) -> Floats:
    """The scale of each input channel, mean|x| ** ratio, with the least error of the outputs."""
    flat = [_some(each.reshape(-1, each.shape[-1])) for each in inputs]
    mean = np.maximum(np.mean([np.abs(x).mean(axis=0) for x in flat], axis=0), 1e-6)
    best, kept = np.inf, np.ones_like(mean)
    for ratio in RATIOS:
        scales = mean**ratio
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        error = 0.0
        for weight, x, own in zip(weights, flat, rounded, strict=True):
            change = own(weight * scales) / scales - weight
            error += float(
                np.square(x @ change.T).sum() / max(np.square(x @ weight.T).sum(), 1e-30)
            )
        if error < best:
            best, kept = error, scales
    return kept


def _some(x: Floats) -> Floats:
    return x[:: max(len(x) // MOST_ROWS, 1)]
