"""A whole checkpoint audited, component by component, alone or against a second one."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from lydite.core.config import read_json
from lydite.core.errors import FileError, at
from lydite.core.outputs import write_output
from lydite.pipelines.model import Component
from lydite.pipelines.model_files import audit_leftovers, find_components, locate
from lydite.weights.audit import Finding, Ledger, audit, check_values, compare, digests
from lydite.weights.digest import Digest

Digests = dict[str, dict[str, Digest]]  # component -> parameter -> digest


def audit_model(
    path: Path, *, against: str | None = None, values: bool = True
) -> dict[str, Ledger]:
    """One ledger per network of the checkpoint at `path`."""
    components = find_components(path)
    reference = _reference(against, components) if against else {}
    ledgers: dict[str, Ledger] = {}
    for name, component in components.items():
        expected, rules = component.expected, component.rules
        with component.scope() as scope:
            ledger = audit(scope, expected, rules, where=component.where)
            if values:
                ledger = check_values(ledger, scope, rules)
            if name in reference:
                ledger = compare(ledger, scope, expected, rules, reference[name])
            elif against:
                note = Finding(component.where, f"{against} has no such network to compare with")
                ledger = replace(ledger, undecidable=(note, *ledger.undecidable))
        ledgers[name] = ledger
    if leftovers := audit_leftovers(path):
        ledgers["outside every network"] = leftovers
    return ledgers


def write_digests(path: Path, out: Path, *, overwrite: bool = False) -> None:
    """Write the digests of every parameter, for a later audit without this checkpoint at hand."""
    rows = {name: _digests(component) for name, component in find_components(path).items()}
    text = msgspec.json.format(msgspec.json.encode(rows), indent=1)
    write_output(out, text, overwrite=overwrite)


def _digests(component: Component) -> dict[str, Digest]:
    """Digests of one sound network's parameters, under the model's own names."""
    with component.scope() as scope:
        expected, rules = component.expected, component.rules
        audit(scope, expected, rules, where=component.where).require_clean()
        return digests(scope, expected, rules)


def _reference(against: str, components: Mapping[str, Component]) -> Digests:
    """The digests to compare each of `components` with, by the names of these."""
    path = locate(against)
    found = _read_digests(path) if path.suffix == ".json" and ".index." not in path.name else None
    if found is None:
        found = {name: _digests(component) for name, component in find_components(path).items()}
    matched: Digests = {}
    for name, component in components.items():
        twins = [
            rows
            for rows in found.values()
            if {target: row.shape for target, row in rows.items()} == component.expected
        ]
        if name in found or len(twins) == 1:  # a lone component goes by the name of its folder
            matched[name] = found[name] if name in found else twins[0]
    if not matched:
        raise FileError(
            f"{at(path)}: has {', '.join(found) or 'nothing'}, and none of {', '.join(components)}."
        )
    return matched


def _read_digests(path: Path) -> Digests:
    try:
        return msgspec.convert(read_json(path), Digests)
    except msgspec.ValidationError as error:
        raise FileError(
            f"{at(path)}: not a digests file of `lydite audit --digests` ({error})."
        ) from error
