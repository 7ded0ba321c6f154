"""A whole checkpoint audited, component by component, alone or against a second one."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec

from lydite.core.errors import FileError
from lydite.core.files import write_atomic
from lydite.pipelines import single_file
from lydite.pipelines.catalog import find_components
from lydite.pipelines.components import Component
from lydite.pipelines.hub import locate
from lydite.weights.audit import Ledger, audit
from lydite.weights.checks import check_values, compare, digests
from lydite.weights.digest import Digest

Digests = dict[str, dict[str, Digest]]  # component -> parameter -> digest


def audit_model(
    path: Path, *, against: str | None = None, values: bool = True
) -> dict[str, Ledger]:
    """One ledger per network of the checkpoint at `path`."""
    components = find_components(path)
    reference = _reference(against) if against else None
    ledgers: dict[str, Ledger] = {}
    for name, component in components.items():
        expected = component.expected
        with component.scope() as scope:
            ledger = audit(scope, expected, component.rules, where=component.where)
            if values:
                ledger = check_values(ledger, scope, component.rules)
            if reference is not None:
                theirs = _counterpart(name, against or "", reference, len(components))
                ledger = compare(ledger, scope, expected, component.rules, theirs)
        ledgers[name] = ledger
    if not path.is_dir():
        rest = single_file.leftovers(path)
        if rest.dropped or rest.unexpected:
            ledgers["outside every network"] = rest
    return ledgers


def write_digests(path: Path, out: Path) -> None:
    """Write the digests of every parameter, for a later audit without this checkpoint at hand."""
    rows = {
        name: {target: asdict(digest) for target, digest in digests_of(component).items()}
        for name, component in find_components(path).items()
    }
    write_atomic(out, msgspec.json.format(msgspec.json.encode(rows), indent=1))


def digests_of(component: Component) -> dict[str, Digest]:
    """Digests of one network's parameters, under the model's own names."""
    with component.scope() as scope:
        return digests(scope, component.expected, component.rules)


def _reference(against: str) -> Digests:
    path = Path(against).expanduser()
    if path.suffix != ".json":
        components = find_components(locate(against))
        return {name: digests_of(component) for name, component in components.items()}
    try:
        return msgspec.json.decode(path.read_bytes(), type=Digests)
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}).") from error
    except msgspec.DecodeError as error:
        raise FileError(
            f"{path}: not a digests file of `lydite audit --digests` ({error})."
        ) from error


def _counterpart(
    name: str, against: str, reference: Digests, components: int
) -> Mapping[str, Digest]:
    """The reference's component of this name; of two lone components, whatever they are called."""
    if name in reference:
        return reference[name]
    if components == 1 and len(reference) == 1:
        return next(iter(reference.values()))
    raise FileError(f"{against}: has no {name}; it has {', '.join(reference)}.")
