"""Every tensor of a checkpoint in exactly one bin, before a step is run. Decides nothing else.

Shapes and dtypes come from headers alone; `check_values` and `compare` read the data.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from lydite.core.dtypes import FLOAT_NAMES
from lydite.core.errors import WeightsError
from lydite.weights.digest import Digest, comparable, digest, same_values
from lydite.weights.layout import Array, Shape
from lydite.weights.rules import Resolution, Rule, filling, resolve, stored_names
from lydite.weights.source import Scope
from lydite.weights.values import count_nonfinite, suspicion


@dataclass(frozen=True)
class Finding:
    """One tensor and what there is to say of it."""

    tensor: str
    detail: str


@dataclass(frozen=True)
class Ledger:
    """The bins. The first two are fine; any entry in the next five means the load is refused."""

    where: str
    loaded: tuple[str, ...]
    dropped: tuple[Finding, ...]
    missing: tuple[Finding, ...]
    unexpected: tuple[Finding, ...]
    wrong_shape: tuple[Finding, ...]
    wrong_dtype: tuple[Finding, ...]
    not_finite: tuple[Finding, ...] = ()
    different: tuple[Finding, ...] = ()  # from a second checkpoint or its digests
    suspicious: tuple[Finding, ...] = ()  # notes; they do not stop a load
    undecidable: tuple[str, ...] = ()  # a transpose of these could not be seen

    WRONG = ("missing", "unexpected", "wrong_shape", "wrong_dtype", "not_finite", "different")

    @property
    def clean(self) -> bool:
        return not any(getattr(self, name) for name in self.WRONG)

    def require_clean(self) -> None:
        """Raise WeightsError with the first five tensors of each bin that should be empty."""
        if self.clean:
            return
        parts: list[str] = []
        for name in self.WRONG:
            findings: tuple[Finding, ...] = getattr(self, name)
            if findings:
                shown = "; ".join(f"{each.tensor}: {each.detail}" for each in findings[:5])
                more = f"; and {len(findings) - 5} more" if len(findings) > 5 else ""
                parts.append(f"{len(findings)} {name.replace('_', ' ')} ({shown}{more})")
        raise WeightsError(
            f"{self.where}: the checkpoint does not fit its model: {', '.join(parts)}. "
            "`lydite audit` lists everything."
        )

    def to_json(self) -> dict[str, Any]:
        """The bins as plain data."""
        rows: dict[str, Any] = {"where": self.where, "clean": self.clean}
        for name in ("loaded", "dropped", *self.WRONG, "suspicious", "undecidable"):
            entries = getattr(self, name)
            rows[name] = [
                {"tensor": each.tensor, "detail": each.detail}
                if isinstance(each, Finding)
                else each
                for each in entries
            ]
        return rows


def audit(
    source: Scope, expected: Mapping[str, Shape], rules: Sequence[Rule], *, where: str
) -> Ledger:
    """Sort every tensor of `source` into its bin against the parameters a model expects."""
    resolution = resolve(source.tensors, rules)
    full = source.full_name
    bad: dict[str, list[Finding]] = {name: [] for name in Ledger.WRONG}
    undecidable: list[str] = []
    used: set[str] = set()
    for target, shape in expected.items():
        recipe = resolution.recipes.get(target)
        sources = recipe.sources if recipe else stored_names(target, rules)
        absent = [name for name in sources if name not in source.tensors]
        if absent:
            if filling(target, rules) is None:
                bad["missing"] += [
                    Finding(full(name), f"needed for {target} {shape}") for name in absent
                ]
            continue
        assert recipe is not None
        infos = [source.tensors[name] for name in sources]
        used.update(sources)
        for name, info in zip(sources, infos, strict=True):
            if info.dtype not in FLOAT_NAMES:
                bad["wrong_dtype"].append(
                    Finding(full(name), f"stored as {info.dtype}, expected a float type")
                )
        try:
            found = recipe.shape([info.shape for info in infos])
        except ValueError as error:
            bad["wrong_shape"].append(Finding(full(sources[0]), str(error)))
            continue
        if found != shape:
            detail = f"model expects {shape}, file has {found}"
            if sorted(found) == sorted(shape):
                detail += " (the same sizes in another order: stored transposed?)"
            bad["wrong_shape"].append(Finding(full(sources[0]), detail))
        elif next(_rearrangements(shape), None):
            undecidable.append(full(sources[0]))
    bad["unexpected"] = _unexpected(source, resolution, used)
    wrong = {each.tensor for name in ("wrong_shape", "wrong_dtype") for each in bad[name]}
    return Ledger(
        where=where,
        loaded=tuple(full(name) for name in sorted(used) if full(name) not in wrong),
        dropped=tuple(Finding(full(name), why) for name, why in resolution.dropped.items()),
        undecidable=tuple(dict.fromkeys(undecidable)),
        **{name: _unique(findings) for name, findings in bad.items()},
    )


def check_values(ledger: Ledger, source: Scope) -> Ledger:
    """The same ledger after reading every tensor: NaN and Inf found, odd statistics noted."""
    not_finite: list[Finding] = []
    suspicious: list[Finding] = []
    for name, info in source.tensors.items():
        array = source.read(name)
        if trouble := describe_nonfinite(array):
            not_finite.append(Finding(source.full_name(name), trouble))
        elif info.dtype in FLOAT_NAMES and (note := suspicion(name, array)):
            suspicious.append(Finding(source.full_name(name), note))
    return replace(ledger, not_finite=tuple(not_finite), suspicious=tuple(suspicious))


def describe_nonfinite(array: Array) -> str | None:
    """How many values are NaN or infinite, in words, or None when all are finite."""
    nan, inf = count_nonfinite(array)
    return f"{nan} NaN and {inf} Inf of {array.size} values" if nan or inf else None


def digests(
    source: Scope, expected: Mapping[str, Shape], rules: Sequence[Rule]
) -> dict[str, Digest]:
    """Digest of every parameter, under the model's names: comparable across file layouts."""
    recipes = resolve(source.tensors, rules).recipes
    return {
        target: digest(
            recipes[target].build([source.read(name) for name in recipes[target].sources])
        )
        for target in expected
        if target in recipes and all(name in source.tensors for name in recipes[target].sources)
    }


def compare(
    ledger: Ledger,
    source: Scope,
    expected: Mapping[str, Shape],
    rules: Sequence[Rule],
    reference: Mapping[str, Digest],
) -> Ledger:
    """The same ledger with every parameter held against the digests of a reference."""
    different: list[Finding] = []
    undecidable: list[str] = []
    recipes = resolve(source.tensors, rules).recipes
    for target in expected:
        recipe, wanted = recipes.get(target), reference.get(target)
        if recipe is None or any(name not in source.tensors for name in recipe.sources):
            continue  # already in another bin
        label = source.full_name(recipe.sources[0])
        if wanted is None:
            different.append(Finding(label, "the reference has no such parameter"))
            continue
        array = recipe.build([source.read(name) for name in recipe.sources])
        ours = digest(array)
        if not comparable(ours, wanted):
            undecidable.append(label)
        elif not same_values(ours, wanted):
            different.append(Finding(label, _difference(array, wanted)))
    return replace(ledger, different=_unique(different), undecidable=tuple(undecidable))


def _rearrangements(shape: Shape) -> Iterator[tuple[int, ...]]:
    """Orders of the axes, other than the given one, that leave the shape as it is."""
    identity = tuple(range(len(shape)))
    for axes in permutations(identity):
        moved = [axis for axis in identity if axes[axis] != axis and shape[axis] > 1]
        if moved and all(shape[axes[axis]] == shape[axis] for axis in identity):
            yield axes


def _difference(array: Array, wanted: Digest) -> str:
    for axes in _rearrangements(array.shape):
        if same_values(digest(array.transpose(axes)), wanted):
            return f"transposed: equal to the reference with its axes in the order {axes}"
    return "values differ from the reference"


def _unexpected(source: Scope, resolution: Resolution, used: set[str]) -> list[Finding]:
    findings: list[Finding] = []
    for name, info in source.tensors.items():
        if name in used or name in resolution.dropped:
            continue
        reason = resolution.surplus.get(name, "no parameter of the model has this name")
        findings.append(Finding(source.full_name(name), f"{reason} ({info.dtype} {info.shape})"))
    return findings


def _unique(findings: list[Finding]) -> tuple[Finding, ...]:
    """One finding per tensor: a split tensor is met once for each of its parts."""
    return tuple({each.tensor: each for each in reversed(findings)}.values())[::-1]
