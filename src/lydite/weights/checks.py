"""Checks that read values: NaN and Inf, odd statistics, differences from another checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lydite.core.dtypes import FLOAT_NAMES
from lydite.weights.audit import Finding, Ledger, findings, rearrangements
from lydite.weights.digest import Digest, comparable, digest, same_values
from lydite.weights.layout import Array, Shape
from lydite.weights.rules import Resolution, Rule, filling, resolve
from lydite.weights.tensor_view import TensorView
from lydite.weights.values import count_nonfinite, suspicion


def check_values(ledger: Ledger, source: TensorView, rules: Sequence[Rule]) -> Ledger:
    """The same ledger after reading every tensor: NaN and Inf found, odd statistics noted."""
    not_finite: dict[str, str] = {}
    suspicious: dict[str, str] = {}
    resolution = resolve(source.tensors, rules)
    for name, info in source.tensors.items():
        array = source.read(name)
        if trouble := describe_nonfinite(array):
            (suspicious if name in resolution.dropped else not_finite)[name] = trouble
        elif info.dtype in FLOAT_NAMES and (note := suspicion(name, array)):
            suspicious[name] = note
    return replace(
        ledger,
        not_finite=findings(source, not_finite),
        suspicious=findings(source, suspicious),
        different=(*ledger.different, *unequal_copies(source, resolution)),
    )


def describe_nonfinite(array: Array) -> str | None:
    """How many values are NaN or infinite, in words, or None when all are finite."""
    nan, inf = count_nonfinite(array)
    return f"{nan} NaN and {inf} Inf of {array.size} values" if nan or inf else None


def unequal_copies(source: TensorView, resolution: Resolution) -> tuple[Finding, ...]:
    """Tensors stored under two names with two values: nobody knows which one is meant."""
    unequal: dict[str, str] = {}
    for name, original in resolution.copies.items():
        first, second = source.read(name), source.read(original)
        if first.dtype == second.dtype and np.array_equal(first, second):
            continue
        pair = digest(first), digest(second)
        if comparable(*pair) and not same_values(*pair):
            unequal[name] = f"should repeat {source.full_name(original)}, but its values differ"
    return findings(source, unequal)


def parameter(
    target: str, shape: Shape, source: TensorView, resolution: Resolution, rules: Sequence[Rule]
) -> Array | None:
    """The value of one parameter, from the file or filled in; None when there is neither."""
    recipe = resolution.recipes.get(target)
    if recipe and all(name in source.tensors for name in recipe.sources):
        return recipe.build([source.read(name) for name in recipe.sources])
    rule = filling(target, rules)
    return rule.make(shape) if rule else None


def digests(
    source: TensorView, expected: Mapping[str, Shape], rules: Sequence[Rule]
) -> dict[str, Digest]:
    """Digest of every parameter of a clean checkpoint, under the model's names in any layout."""
    resolution = resolve(source.tensors, rules)
    digested: dict[str, Digest] = {}
    for target, shape in expected.items():
        array = parameter(target, shape, source, resolution, rules)
        if array is not None:
            digested[target] = digest(array)
    return digested


def compare(
    ledger: Ledger,
    source: TensorView,
    expected: Mapping[str, Shape],
    rules: Sequence[Rule],
    reference: Mapping[str, Digest],
) -> Ledger:
    """The same ledger with every loaded parameter compared with the digests of a reference."""
    different: dict[str, str] = {}
    undecidable: dict[str, str] = {}
    resolution = resolve(source.tensors, rules)
    fine = {*ledger.loaded, *(finding.tensor for finding in ledger.filled)}
    for target, shape in expected.items():
        recipe, wanted = resolution.recipes.get(target), reference.get(target)
        names = recipe.sources if recipe else (target,)
        if any(source.full_name(name) not in fine for name in names):
            continue  # in another bin already
        array = parameter(target, shape, source, resolution, rules)
        assert array is not None
        actual = digest(array)
        if wanted is None:
            different[names[0]] = f"the reference has no {target}"
        elif not comparable(actual, wanted):
            reason = f"{actual.dtype}, not comparable with the reference's {wanted.dtype}"
            undecidable[names[0]] = reason
        elif not same_values(actual, wanted):
            different[names[0]] = _difference(array, wanted)
    extra = sorted(reference.keys() - expected.keys())
    return replace(
        ledger,
        different=(
            *ledger.different,
            *findings(source, different),
            *(Finding(target, "only the reference has this parameter") for target in extra),
        ),
        undecidable=findings(source, undecidable),
    )


def _difference(array: Array, wanted: Digest) -> str:
    if array.shape != wanted.shape:
        return f"shape {array.shape}, in the reference {wanted.shape}"
    for axes in rearrangements(array.shape):
        if same_values(digest(array.transpose(axes)), wanted):
            return f"transposed: equal to the reference with its axes in the order {axes}"
    return "values differ from the reference"
