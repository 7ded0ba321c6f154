"""Every tensor of a checkpoint in exactly one bin, from headers alone. Decides nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any

from lydite.core.dtypes import FLOAT_NAMES
from lydite.core.errors import WeightsError, first_of
from lydite.weights.layout import Shape
from lydite.weights.rules import Recipe, Resolution, Rule, filling, resolve, stored_names
from lydite.weights.tensor_view import TensorView

TRANSPOSABLE = "square: a transposed copy has the same shape"


@dataclass(frozen=True)
class Finding:
    """One tensor, by its name in the file, and a remark on it."""

    tensor: str
    detail: str


@dataclass(frozen=True)
class Ledger:
    """The bins. A stored tensor is in one of loaded, dropped, unexpected, wrong_shape, wrong_dtype.

    `missing` and `filled` are not in the file. `not_finite`, `different` and `suspicious` come on
    top, from reading values. The load is refused when any bin of WRONG has an entry.
    """

    where: str
    loaded: tuple[str, ...] = ()
    dropped: tuple[Finding, ...] = ()
    filled: tuple[Finding, ...] = ()
    missing: tuple[Finding, ...] = ()
    unexpected: tuple[Finding, ...] = ()
    wrong_shape: tuple[Finding, ...] = ()
    wrong_dtype: tuple[Finding, ...] = ()
    not_finite: tuple[Finding, ...] = ()
    different: tuple[Finding, ...] = ()  # from a reference, or from its own copy
    suspicious: tuple[Finding, ...] = ()  # notes; they do not stop a load
    undecidable: tuple[Finding, ...] = ()  # a fault in these could not be seen

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
            rows: tuple[Finding, ...] = getattr(self, name)
            if rows:
                lines = [f"{row.tensor:.500}: {row.detail:.500}" for row in rows]
                parts.append(f"{len(rows)} {name.replace('_', ' ')} ({first_of(lines, 5, '; ')})")
        raise WeightsError(
            f"{self.where}: the checkpoint does not fit its model: {', '.join(parts)}. "
            "`lydite audit` lists everything."
        )

    def to_json(self) -> dict[str, Any]:
        """The bins as plain data."""
        rows: dict[str, Any] = {"where": self.where, "clean": self.clean, "loaded": self.loaded}
        for name in ("dropped", "filled", *self.WRONG, "suspicious", "undecidable"):
            rows[name] = [asdict(finding) for finding in getattr(self, name)]
        return rows


def audit(
    source: TensorView, expected: Mapping[str, Shape], rules: Sequence[Rule], *, where: str
) -> Ledger:
    """Sort every tensor of `source` into its bin against the parameters a model expects."""
    resolution = resolve(source.tensors, rules)
    verdicts = _Verdicts()
    missing: dict[str, str] = {}
    filled: dict[str, str] = {}
    undecidable: dict[str, str] = {}
    for target, shape in expected.items():
        recipe = resolution.recipes.get(target)
        names = recipe.sources if recipe else stored_names(target, rules, resolution.aliases)
        absent = [name for name in names if recipe is None or name not in source.tensors]
        if absent and (rule := filling(target, rules)):
            filled[target] = rule.because
        elif absent or recipe is None:
            for name in absent:
                missing.setdefault(name, f"needed for {target} {shape}")
        else:
            _judge(recipe, shape, source, verdicts)
            if next(rearrangements(shape), None):
                undecidable[names[0]] = TRANSPOSABLE
    _judge_the_rest(source, expected, resolution, verdicts)
    bins: dict[str, dict[str, str]] = {name: {} for name in _BINS}
    for name in source.tensors:
        verdict, detail = verdicts.get(name, ("unexpected", "what belongs with it is missing"))
        bins[verdict][name] = detail
    return Ledger(
        where=where,
        loaded=tuple(source.full_name(name) for name in bins.pop("loaded")),
        filled=findings(source, filled),
        missing=findings(source, missing),
        undecidable=findings(source, undecidable),
        **{name: findings(source, rows) for name, rows in bins.items()},
    )


def findings(source: TensorView, rows: Mapping[str, str]) -> tuple[Finding, ...]:
    """One finding per tensor, under its name in the file."""
    return tuple(Finding(source.full_name(name), detail) for name, detail in rows.items())


def rearrangements(shape: Shape) -> Iterator[tuple[int, ...]]:
    """Orders of the axes, other than the given one, that leave the shape as it is."""
    identity = tuple(range(len(shape)))
    for axes in permutations(identity):
        moved = [axis for axis in identity if axes[axis] != axis and shape[axis] > 1]
        if moved and all(shape[axes[axis]] == shape[axis] for axis in identity):
            yield axes


_BINS = ("loaded", "dropped", "unexpected", "wrong_shape", "wrong_dtype")


class _Verdicts(dict[str, tuple[str, str]]):
    """Stored name -> its bin and why. The first fault found stays; "loaded" gives way to any."""

    def settle(self, name: str, verdict: str, detail: str) -> None:
        if self.get(name, ("loaded", ""))[0] == "loaded":
            self[name] = verdict, detail


def _judge(recipe: Recipe, shape: Shape, source: TensorView, verdicts: _Verdicts) -> None:
    """Settle the tensors that one parameter is made from."""
    stored = [source.tensors[name].shape for name in recipe.sources]
    detail = ""
    try:
        found = recipe.shape(stored)
        if found != shape:
            read = "" if [found] == stored else f", read as {found}"
            detail = f"model expects {shape}, file has {', '.join(map(str, stored))}{read}"
            if sorted(found) == sorted(shape):
                detail += " (the same sizes in another order: stored transposed?)"
    except ValueError as error:
        detail = f"model expects {shape}, but {error}"
    for name in recipe.sources:
        _settle_dtype(name, source, verdicts)
        verdicts.settle(name, "wrong_shape" if detail else "loaded", detail)


def _judge_the_rest(
    source: TensorView, expected: Mapping[str, Shape], resolution: Resolution, verdicts: _Verdicts
) -> None:
    """Settle the tensors that no parameter, or only part of one, is made from."""
    for name, reason in resolution.dropped.items():
        verdicts.settle(name, "dropped", reason)
    for name, original in resolution.copies.items():
        ours, theirs = source.tensors[name].shape, source.tensors[original].shape
        label = source.full_name(original)
        _settle_dtype(name, source, verdicts)
        if ours != theirs:
            verdicts.settle(name, "wrong_shape", f"file has {ours}, but {theirs} for {label}")
        verdicts.settle(name, "dropped", f"a second copy of {label}")
    reasons = dict(resolution.surplus)
    for target, recipe in resolution.recipes.items():
        if target not in expected:
            reasons |= dict.fromkeys(recipe.sources, f"the model has no {target}")
    for name, reason in reasons.items():
        if info := source.tensors.get(name):
            verdicts.settle(name, "unexpected", f"{reason} ({info.dtype} {info.shape})")


def _settle_dtype(name: str, source: TensorView, verdicts: _Verdicts) -> None:
    dtype = source.tensors[name].dtype
    if dtype not in FLOAT_NAMES:
        verdicts.settle(name, "wrong_dtype", f"stored as {dtype}, expected a float type")
