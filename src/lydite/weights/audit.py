"""Does a checkpoint hold exactly what a model needs?

`audit` puts every tensor into exactly one bin, from headers alone. The checks behind it read
values: NaN and Inf, zeros, a constant, a fresh initialisation, differences from another checkpoint.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from lydite.core.checkpoint import Checkpoint
from lydite.core.dtypes import FLOAT_NAMES, NAMES, widen
from lydite.core.errors import WeightsError, first_of
from lydite.core.tensorfile import TensorInfo
from lydite.weights.digest import Digest, comparable, digest, same_values
from lydite.weights.quantized_format import Formats, packed_shapes, stored_formats
from lydite.weights.rules import (
    Array,
    Recipe,
    Resolution,
    Rule,
    Shape,
    filling,
    resolve,
    stored_names,
)


class TensorView:
    """Tensors of `checkpoint` under `prefix` and not under `exclude`, by their names without it."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str = "", exclude: tuple[str, ...] = ()
    ) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix
        self.tensors: Mapping[str, TensorInfo] = {
            name.removeprefix(prefix): info
            for name, info in checkpoint.tensors.items()
            if name.startswith(prefix) and not name.startswith(exclude)
        }

    def read(self, name: str) -> Array:
        return self._checkpoint.read(self._prefix + name)

    def full_name(self, name: str) -> str:
        """The name in the file, for messages."""
        return self._prefix + name


TRANSPOSABLE = "square: a transposed copy has the same shape"
PACKED = "quantized, and not in the reference; `lydite evaluate` shows what that changes"


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


@dataclass(frozen=True)
class Stored:
    """What a file has to hold for a model, after it is seen which weights it holds quantized."""

    formats: Formats  # of the quantized weights
    expected: Mapping[str, Shape]  # with the arrays of quantized layers in place of their weights
    dtypes: Mapping[str, frozenset[str]]  # of those arrays
    resolution: Resolution


def stored(source: TensorView, expected: Mapping[str, Shape], rules: Sequence[Rule]) -> Stored:
    """Find the quantized weights of a file, and how all parameters are made from its tensors."""
    resolution = resolve(source.tensors, rules)
    if not any(info.dtype == "U32" for info in source.tensors.values()):
        return Stored({}, expected, {}, resolution)  # no packed integers: nothing is quantized
    arrays = {name: _as_array(recipe) for name, recipe in resolution.recipes.items()}
    found: dict[str, tuple[str, Shape]] = {}
    for name, recipe in arrays.items():
        infos = [source.tensors[each] for each in recipe.sources if each in source.tensors]
        if len(infos) == len(recipe.sources) and len({info.dtype for info in infos}) == 1:
            with suppress(ValueError):  # it does not fit, which the audit will say
                found[name] = infos[0].dtype, recipe.shape([info.shape for info in infos])
    formats = stored_formats(found, expected)
    packed = packed_shapes(formats, expected)
    dtypes = dict.fromkeys(packed, frozenset(FLOAT_NAMES))
    for path, each in formats.items():
        dtypes[path] = frozenset({"U32"})
        if each.mode != "affine":
            dtypes[f"{path.removesuffix('weight')}scales"] = frozenset({"U8"})
    others = {path: shape for path, shape in expected.items() if path not in formats}
    recipes = {**resolution.recipes, **{name: arrays[name] for name in packed if name in arrays}}
    return Stored(formats, {**others, **packed}, dtypes, replace(resolution, recipes=recipes))


def _as_array(recipe: Recipe) -> Recipe:
    """How an array of a quantized layer is made: under the model's own name it is stored as it is.

    Under another name the layout has to be one that moves rows, or the weight is not found.
    """
    layout = recipe.layout
    own = recipe.sources == (recipe.target,)
    return replace(recipe, layout=None) if own and layout and not layout.rows else recipe


def audit(
    source: TensorView, expected: Mapping[str, Shape], rules: Sequence[Rule], *, where: str
) -> Ledger:
    """Sort every tensor of `source` into its bin against the parameters a model expects."""
    found = stored(source, expected, rules)
    resolution = found.resolution
    verdicts = _Verdicts()
    missing: dict[str, str] = {}
    filled: dict[str, str] = {}
    undecidable: dict[str, str] = {}
    for target, shape in found.expected.items():
        recipe, packed = resolution.recipes.get(target), target in found.dtypes
        names = recipe.sources if recipe else stored_names(target, rules, resolution.aliases)
        absent = [name for name in names if recipe is None or name not in source.tensors]
        if absent and (rule := filling(target, rules)):
            filled[target] = rule.because
        elif absent or recipe is None:
            reason = "by its quantized weight" if packed else f"for {target} {shape}"
            for name in absent:
                missing.setdefault(name, f"needed {reason}")
        else:
            _judge(recipe, shape, found.dtypes.get(target), source, verdicts)
            if not packed and next(rearrangements(shape), None):
                undecidable[names[0]] = TRANSPOSABLE
    _judge_the_rest(source, found.expected, resolution, verdicts)
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


def _judge(
    recipe: Recipe,
    shape: Shape,
    dtypes: frozenset[str] | None,
    source: TensorView,
    verdicts: _Verdicts,
) -> None:
    """Settle the tensors that one parameter, or an array of a quantized layer, is made from."""
    stored = [source.tensors[name].shape for name in recipe.sources]
    detail = ""
    try:
        found = recipe.shape(stored)
        if found != shape:
            read = "" if [found] == stored else f", read as {found}"
            what = "model" if dtypes is None else "a quantized layer"
            detail = f"{what} expects {shape}, file has {', '.join(map(str, stored))}{read}"
            if sorted(found) == sorted(shape):
                detail += " (the same sizes in another order: stored transposed?)"
    except ValueError as error:
        detail = f"model expects {shape}, but {error}"
    for name in recipe.sources:
        _settle_dtype(name, source, verdicts, dtypes)
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


def _settle_dtype(
    name: str, source: TensorView, verdicts: _Verdicts, dtypes: frozenset[str] | None = None
) -> None:
    dtype = source.tensors[name].dtype
    if dtype in (dtypes or FLOAT_NAMES):
        return
    detail = f"stored as {dtype}, expected a float type"
    if dtypes is not None:
        detail = f"stored as {dtype} in a quantized layer"
    elif dtype == "U32":
        detail += ", or scales that fit it in a quantized layer"
    verdicts.settle(name, "wrong_dtype", detail)


# Exponent bits all set is NaN or Inf; integer tests are many times faster than isfinite on bf16.
_EXPONENT_MASKS = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0 << 48}
_CHUNK = 1 << 22  # elements per pass: the temporary stays small beside any real tensor
_SAMPLE = 1 << 18  # elements looked at for statistics


def count_nonfinite(array: Array) -> tuple[int, int]:
    """How many values are NaN and how many infinite."""
    name = NAMES.get(array.dtype, "")
    if array.dtype.kind in "biu":
        return 0, 0
    flat = array.reshape(-1)
    nan = inf = 0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        if mask := _EXPONENT_MASKS.get(name):
            bits = part.view(f"u{part.dtype.itemsize}")
            part = part[(bits & bits.dtype.type(mask)) == mask]
        wide = widen(part)
        nan += int(np.isnan(wide).sum())
        inf += int(np.isinf(wide).sum())
    return nan, inf


def suspicion(name: str, array: Array) -> str | None:
    """Why these finite values look wrong, in a few words, or None. Never a proof: a note."""
    if array.size < 2 or array.dtype.kind in "biu":
        return None
    sample = _sample(array)
    low, high = float(sample.min()), float(sample.max())
    vector = array.ndim < 2
    if low == high and _all_equal(array):
        if vector and (name.endswith("bias") and low == 0.0):
            return None  # zero biases are common and harmless
        return "all zero" if low == 0.0 else f"constant ({low:g})"
    if vector or sample.size < 1024:
        return None
    return _fresh(array, sample)


def _fresh(array: Array, sample: Array) -> str | None:
    """Uniform within ±1/√fan_in, or normal with σ 0.02 or 1: what torch and transformers draw."""
    bound = 1 / math.sqrt(math.prod(array.shape[1:]))
    mean, std, peak = float(sample.mean()), float(sample.std()), float(np.abs(sample).max())
    noise = 4 / math.sqrt(sample.size)  # four standard errors, relative
    if abs(mean) > noise * std:
        return None
    if 0.97 * bound < peak < 1.005 * bound and abs(std * math.sqrt(3) / bound - 1) < noise:
        return f"looks freshly initialised (uniform ±{bound:.4g} = 1/√fan_in)"
    squares = np.square(sample - mean)
    kurtosis = float(np.square(squares).mean()) / std**4  # ** 4 takes ten times as long
    if abs(kurtosis - 3) < 6 * math.sqrt(24 / sample.size):
        for sigma in (0.02, 1.0):
            if abs(std / sigma - 1) < noise:
                return f"looks freshly initialised (normal, σ {sigma:g})"
    return None


def _sample(array: Array) -> Array:
    flat = array.reshape(-1)
    stride = max(1, flat.size // _SAMPLE)
    return widen(flat[::stride]).astype(np.float64)


def _all_equal(array: Array) -> bool:
    flat = array.reshape(-1)
    return all(
        bool((flat[start : start + _CHUNK] == flat[0]).all())
        for start in range(0, flat.size, _CHUNK)
    )


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
    found = stored(source, expected, rules)
    digested: dict[str, Digest] = {}
    for target, shape in found.expected.items():
        array = parameter(target, shape, source, found.resolution, rules)
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
    found = stored(source, expected, rules)
    layers = (path.rpartition(".")[0] for path in found.formats)
    packed = {layer for layer in layers if f"{layer}.scales" not in reference}
    expected, resolution = found.expected, found.resolution
    fine = {*ledger.loaded, *(finding.tensor for finding in ledger.filled)}
    for target, shape in expected.items():
        recipe, wanted = resolution.recipes.get(target), reference.get(target)
        names = recipe.sources if recipe else (target,)
        if any(source.full_name(name) not in fine for name in names):
            continue  # in another bin already
        if target.rpartition(".")[0] in packed:  # a method may have changed the bias as well
            undecidable[names[0]] = PACKED
            continue
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
