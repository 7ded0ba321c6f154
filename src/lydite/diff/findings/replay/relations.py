"""How a value that the port uses is related to the one it should use: what is missing between."""

import re
from collections import deque
from itertools import islice

import numpy as np

from lydite.diff.findings.evidence import FEW, Array, Evidence, comparable
from lydite.diff.findings.replay.between import missing_operation
from lydite.diff.findings.replay.norm_forms import norms
from lydite.diff.findings.replay.variants import (
    MAX_SOURCES,
    MAX_VALUES,
    apart_of,
    fit_tolerance,
    mark,
)
from lydite.diff.result import Finding

FEWEST = 16  # numbers of a value that may be a factor
MAX_MODULES = 6  # one after the other that a port may leave out
CHANGES: dict[str, str] = {"step": "an earlier or later step", "call": "another call"}
AXES = re.compile(r" with channels (last|first)$")
NUMBER = re.compile(r"\d+")


def with_relation(
    e: Evidence, found: Finding, used: str, right: str, otherwise: str = ""
) -> Finding:
    """A finding that a value is used in the place of another one, and what is between the two."""
    words = relation(e, used, right) or otherwise
    if not words:
        return found
    text = f"{found.evidence.rstrip('.')}: {words}."
    return Finding(found.cause, text, found.fix, found.confidence)


def site(e: Evidence) -> str:
    """The name of the wrong value itself."""
    return e.name if e.slot == "out" else f"{e.name} [{e.slot}]"


def relation(e: Evidence, used: str, right: str) -> str:
    """How the right value follows from the one that is used, in words; empty if unknown."""
    values = {} if used == right else _recorded(e)
    a, b = (_in_its_axes(values, name) for name in (used, right))
    if a is None or b is None:
        return of_names(used, right)
    text, modules = "", list[str]()
    recorded = values[AXES.sub("", used)], values[AXES.sub("", right)]
    for start, end in ((a, b), recorded, (recorded[0], _in_recorded_axes(used, b))):
        if modules := _modules_between(values, start, end):
            kind = _kind(e, values, modules[-1])
            text = f"the port's is the value before {_run(modules)}: this {kind} "
            text += "is not run (skipped), or it is an earlier one's"
        elif modules := _modules_between(values, end, start):
            text = f"the port's is the value after {_run(modules)}: run too early, or a later "
            text += "layer's"
        if modules:
            break
    if a.shape != b.shape or a.size > MAX_VALUES:
        return text or of_names(used, right) or _parts_of_one(values, a, b)
    named = text or of_names(used, right)
    with np.errstate(all="ignore"):  # an activation of another value may overflow
        operation = "" if named and not modules else _operation(e, values, a, b)
    return "; ".join(filter(None, (named, operation)))


def _in_its_axes(values: dict[str, Array], name: str) -> Array | None:
    """A recorded value in the order of axes that its name says."""
    value, words = values.get(AXES.sub("", name)), AXES.search(name)
    if value is None or words is None:
        return value
    return np.moveaxis(value, 1, -1) if words[1] == "last" else np.moveaxis(value, -1, 1)


def _in_recorded_axes(name: str, value: Array) -> Array:
    """A value in the order of axes that the value of a name had before it was moved."""
    words = AXES.search(name)
    if words is None or value.ndim < 3:
        return value
    return np.moveaxis(value, -1, 1) if words[1] == "last" else np.moveaxis(value, 1, -1)


def _kind(e: Evidence, values: dict[str, Array], module: str) -> str:
    """What a module is, by its name, its weight, or what it makes of its input."""
    if module.rpartition(".")[2].isdigit():
        return "block"
    weight = e.parameters_of(module).get("weight")
    if weight is None:
        return "norm" if _is_norm(e, values, module) else "layer"
    return {1: "norm", 2: "linear layer"}.get(weight.ndim, "convolution")


def _is_norm(e: Evidence, values: dict[str, Array], module: str) -> bool:
    """Whether a module returns a norm, without a weight, of what it takes."""
    named = ((*_split(name), value) for name, value in values.items())
    own = [(slot, value) for path, slot, value in named if path == module]
    results = [value for slot, value in own if slot == "out"]
    taken = [value.astype(np.float64) for slot, value in own if slot.startswith("in")]
    return any(
        apart_of(y, norm.value) <= fit_tolerance(e) * float(np.linalg.norm(y))
        for x in taken
        for y in results
        for norm in norms(x, -1)
    )


def _parts_of_one(values: dict[str, Array], used: Array, right: Array) -> str:
    """That both are neighbouring entries of one recorded value, and which ones."""
    for name, whole in values.items():
        parts = [_entries(whole, part) for part in (used, right)]
        if all(parts) and parts[0] != parts[1]:
            return f"the port's is {parts[0]} of {name}, the reference's {parts[1]}"
    return ""


def _entries(whole: Array, part: Array) -> str:
    """Which entries of one axis of a value another one is, in words; empty where it is none."""
    if whole.ndim != part.ndim or part.size < FEWEST or whole.size > MAX_VALUES:
        return ""
    longer = [axis for axis in range(part.ndim) if whole.shape[axis] != part.shape[axis]]
    if len(longer) != 1 or whole.shape[longer[0]] < part.shape[longer[0]]:
        return ""
    (axis,) = longer
    count = part.shape[axis]
    begins = (whole == part.take([0], axis)).all(tuple(n for n in range(part.ndim) if n != axis))
    for first in np.flatnonzero(begins[: whole.shape[axis] - count + 1]).tolist():
        if np.array_equal(whole.take(range(first, first + count), axis), part):
            return _named_entries(whole, axis, first, first + count - 1)
    return ""


def of_names(used: str, right: str) -> str:
    """That two values have the same name but for one number: another layer, step, call or row."""
    if NUMBER.sub("#", used) != NUMBER.sub("#", right):
        return ""
    pairs = list(zip(NUMBER.finditer(used), NUMBER.finditer(right), strict=True))
    apart = [(a, b) for a, b in pairs if a[0] != b[0]]
    if len(apart) != 1:
        return ""
    own, other = apart[0]
    before = used[: own.start()].rstrip()
    word = re.search(r"(step|call|part)$", before)
    if word is None:
        is_layer = "[" not in before
        what = "another layer or block" if is_layer else "another one of the values of this name"
        return f"that of {what}, number {own[0]}, not {other[0]}"
    if word[1] == "part":
        return f"that of another row of the batch, {own[0]}, not {other[0]}"
    return f"that of {CHANGES[word[1]]}, {own[0]}, not {other[0]}"


def _recorded(e: Evidence) -> dict[str, Array]:
    """The reference's values by name, with the wrong one itself."""
    values = {f"{e.name} [{slot}]": right for slot, (right, _) in e.inputs.items()}
    for each in islice(e.before(), MAX_SOURCES):
        values.setdefault(each.name, each.value)
    values.setdefault(site(e), e.reference)
    return values


def _modules_between(values: dict[str, Array], start: Array, end: Array) -> list[str]:
    """The modules that make one value of another, one after the other; the fewest there are."""
    takes: dict[str, set[bytes]] = {}
    gives: dict[str, list[bytes]] = {}
    for name, value in values.items():
        module, slot = _split(name)
        if slot.startswith("in"):
            takes.setdefault(module, set()).add(_key(value))
        elif slot == "out":
            gives.setdefault(module, []).append(_key(value))
    queue: deque[tuple[bytes, tuple[str, ...]]] = deque([(_key(start), ())])
    seen = {_key(start)}
    while queue:
        key, path = queue.popleft()
        for module, inputs in takes.items():
            for result in gives.get(module, ()) if key in inputs else ():
                if result == _key(end):
                    return [*path, module]
                if result not in seen and len(path) < MAX_MODULES - 1:
                    seen.add(result)
                    queue.append((result, (*path, module)))
    return []


def _named_entries(value: Array, axis: int, first: int, last: int) -> str:
    """Entries of an axis in words: those of the last but one are rows."""
    what = "rows" if axis == value.ndim - 2 else f"entries of axis {axis},"
    return f"{what} {first} to {last}"


def _operation(e: Evidence, values: dict[str, Array], used: Array, right: Array) -> str:
    """The operation that turns the used value into the right one."""
    x, y = (comparable(value)[0].astype(np.float64) for value in (used, right))
    near = max(1e-6, FEW * e.rounding) * float(np.linalg.norm(y))
    if apart_of(x, y) <= near or not y.any():
        return ""
    zero = y == 0
    if zero.any() and apart_of(x[~zero], y[~zero]) <= near:
        share = float(zero.mean())
        return f"the reference sets {share:.0%} of its numbers to zero (a mask, padding)"
    factor = float((x * y).sum() / max((x * x).sum(), 1e-300))
    if apart_of(factor * x, y) <= near:
        return f"the reference's is {factor:.6g} × that: a factor is missing, or twice there"
    for name, other in values.items():
        is_alike = other.shape == used.shape and other.size >= FEWEST
        if is_alike and apart_of(used * other, right) <= near:
            return f"the reference multiplies that by {name}: this factor (a gate) is missing"
    return missing_operation(e, used, right)


def _run(modules: list[str]) -> str:
    return modules[0] if len(modules) == 1 else f"{modules[0]} to {modules[-1]}"


def _split(name: str) -> tuple[str, str]:
    """The module with its step and call, and the slot."""
    match = re.search(r" \[([^\]]*)\]", name)
    return (name.replace(match[0], ""), match[1]) if match else (name, "out")


def _key(value: Array) -> bytes:
    """Equal for equal values, whatever axes of one entry they have."""
    shape = tuple(n for n in value.shape if n != 1)
    return repr(shape).encode() + mark(np.asarray(value, np.float32))
