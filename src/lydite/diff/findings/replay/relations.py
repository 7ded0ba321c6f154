"""How a value that the port uses is related to the one it should use: what is missing between."""

import re
from collections import deque
from itertools import islice

import numpy as np

from lydite.diff.findings.evidence import FEW, Array, Evidence, comparable
from lydite.diff.findings.replay.between import missing_operation
from lydite.diff.findings.replay.variants import MAX_SOURCES, MAX_VALUES, apart_of, mark
from lydite.diff.result import Finding

FEWEST = 16  # numbers of a value that may be a factor
MAX_MODULES = 6  # one after the other that a port may leave out
CHANGES: dict[str, str] = {"step": "an earlier or later step", "call": "another call"}
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
    a, b = values.get(used), values.get(right)
    if a is None or b is None:
        return of_names(used, right)
    modules = _modules_between(values, a, b)
    if modules:
        text = f"the port's is the value before {_run(modules)}"
        operation = missing_operation(e, a, b) if len(modules) == 1 else ""
        what = f" ({operation})" if operation else ""
        return f"{text}: not run (skipped), or an earlier layer's{what}"
    if modules := _modules_between(values, b, a):
        text = f"the port's is the value after {_run(modules)}"
        return f"{text}: run too early, or a later layer's"
    named = of_names(used, right)
    if named or a.shape != b.shape or a.size > MAX_VALUES:
        return named
    return _operation(e, values, a, b)


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
