"""map.json: which names, axes and slots of the port differ from the reference's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lydite.core.config import read_json
from lydite.core.errors import InputError, at, shown
from lydite.diff.pairing.name_matching import StepsFromNames
from lydite.trace.events import Site
from lydite.trace.reader import Trace

MAX_REMARKS = 4  # about entries of a map that are of no use


@dataclass(frozen=True)
class Rename:
    """Where the reference has a value of the port; several sites are concatenated along `axis`."""

    ref: tuple[Site, ...]  # empty: no counterpart
    dims: str | None = None
    ref_dims: str | None = None
    slots: Mapping[str, str] = field(default_factory=dict)  # port's slot → reference's
    axis: int = -1
    how: str = "map"  # from the map, or how the names were paired


def read_name_map(path: Path) -> dict[str, Rename]:
    """Port name → rename; names that are not in the file stay as they are."""
    return {name: _rename(path, name, value) for name, value in read_json(path).items()}


def check_name_map(
    renames: Mapping[str, Rename], reference: Trace, port: Trace
) -> tuple[dict[str, Rename], tuple[str, ...]]:
    """The entries that name values of both traces, and a remark about each of the others.

    One map serves dumps that hold more and less. A map of which no entry fits is an InputError.
    """
    names, reference_names = (StepsFromNames.of(trace).names for trace in (port, reference))
    useful: dict[str, Rename] = {}
    remarks: list[str] = []
    for name, rename in renames.items():
        missing = next((ref.name for ref in rename.ref if ref.name not in reference_names), None)
        if name not in names:
            remarks.append(f"map: {shown(name)} is not a value of the port{_similar(name, names)}")
        elif missing is not None:
            remarks.append(
                f"map: {shown(name)}: {shown(missing)} is not a value of the reference"
                f"{_similar(missing, reference_names)}"
            )
        else:
            useful[name] = rename
    if renames and not useful:
        raise InputError(f"{remarks[0].rstrip('.')}. No entry of the map fits the two traces.")
    if len(remarks) > MAX_REMARKS:
        more = f"map: {len(remarks) - MAX_REMARKS + 1} more entries without a counterpart"
        remarks[MAX_REMARKS - 1 :] = [more]
    return useful, tuple(remarks)


def _similar(name: str, names: Collection[str]) -> str:
    similar = get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; similar names: {', '.join(map(shown, similar))}." if similar else "."


def _rename(path: Path, name: str, value: Any) -> Rename:
    if value is None:
        return Rename(())
    if isinstance(value, str):
        return Rename((Site(value),))
    where = f"{at(path)}: {shown(name)}"
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a name, null or an object, found {shown(value)}.")
    unknown = set(value) - {"ref", "dims", "ref_dims", "ports", "axis"}
    if unknown:
        raise InputError(f"{where}: unknown keys {shown(sorted(unknown))}.")
    ref = value.get("ref", name)
    refs = [] if ref is None else ref if isinstance(ref, list) else [ref]
    slots, axis = value.get("ports", {}), value.get("axis", -1)
    texts = [*refs, *(value[key] for key in ("dims", "ref_dims") if value.get(key) is not None)]
    if not isinstance(slots, dict) or not all(
        isinstance(text, str) for text in [*texts, *slots.values()]
    ):
        raise InputError(
            f"{where}: ref, dims, ref_dims and ports contain strings; found {shown(value)}."
        )
    if not isinstance(axis, int):
        raise InputError(f"{where}: axis is {shown(axis)}; expected a number.")
    return Rename(tuple(map(Site, refs)), value.get("dims"), value.get("ref_dims"), slots, axis)
