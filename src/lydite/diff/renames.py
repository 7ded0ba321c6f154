"""map.json: what a porter says about names, axes and outputs that differ."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lydite.core.errors import InputError, at, shown
from lydite.core.jsonfile import read_json
from lydite.diff.steps import Counted
from lydite.trace.store import Trace


@dataclass(frozen=True)
class Rename:
    """The reference's name for a port's name; several names are parts joined along `axis`."""

    ref: tuple[str, ...]  # empty: no counterpart
    dims: str | None = None
    ref_dims: str | None = None
    ports: Mapping[str, str] = field(default_factory=dict)
    axis: int = -1
    how: str = "map"  # who says so: the porter, or an earlier pairing


def read_renames(path: Path) -> dict[str, Rename]:
    """Port name -> rename; names that are not in the file stay as they are."""
    return {name: _rename(path, name, value) for name, value in read_json(path).items()}


def check_renames(renames: Mapping[str, Rename], reference: Trace, port: Trace) -> tuple[str, ...]:
    """InputError at the first entry that is a slip of the pen; a remark on those of no use here.

    One map serves dumps of a port that hold more and less, so a name may well be missing. It is a
    slip when a name that the map does not have is nearly the same, or when no entry fits at all.
    """
    ours, theirs = (Counted.of(trace).names for trace in (port, reference))
    unused = [name for name in renames if name not in ours]
    for name in unused:
        others = ours - renames.keys()
        if len(unused) == len(renames) or get_close_matches(name, others, n=1, cutoff=0.8):
            raise InputError(
                f"The map's {shown(name)}: the port has no such value{_near(name, ours)}"
            )
    for name, rename in renames.items():
        for ref in rename.ref if name in ours else ():
            if ref not in theirs:
                raise InputError(
                    f"The map's {shown(name)}: the reference has no value {shown(ref)}"
                    f"{_near(ref, theirs)}"
                )
    if not unused:
        return ()
    few = ", ".join(unused[:3]) + (" …" if len(unused) > 3 else "")
    return (f"the map names what this trace does not have: {few}",)


def _near(name: str, names: Collection[str]) -> str:
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; close to it: {', '.join(map(shown, close))}." if close else "."


def _rename(path: Path, name: str, value: Any) -> Rename:
    if value is None:
        return Rename(())
    if isinstance(value, str):
        return Rename((value,))
    where = f"{at(path)}: {shown(name)}"
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a name, null or an object, found {shown(value)}.")
    unknown = set(value) - {"ref", "dims", "ref_dims", "ports", "axis"}
    if unknown:
        raise InputError(f"{where}: {shown(sorted(unknown))} not understood.")
    ref = value.get("ref", name)
    refs = [] if ref is None else ref if isinstance(ref, list) else [ref]
    ports, axis = value.get("ports", {}), value.get("axis", -1)
    texts = [*refs, *(value[key] for key in ("dims", "ref_dims") if value.get(key) is not None)]
    if not isinstance(ports, dict) or not all(
        isinstance(v, str) for v in [*texts, *ports.values()]
    ):
        raise InputError(
            f"{where}: ref, dims, ref_dims and ports hold texts; found {shown(value)}."
        )
    if not isinstance(axis, int):
        raise InputError(f"{where}: axis is {shown(axis)}; expected a number.")
    return Rename(tuple(refs), value.get("dims"), value.get("ref_dims"), ports, axis)
