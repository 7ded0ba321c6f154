"""Which value of the port belongs to which value of the reference.

Names first: the porter's map, equal names, equal names but for spelling, modules whose parameters
are equal; then order, shape and content. What pairs in some blocks pairs in all of them, equal or
not; what is most like each other over all blocks is one, and what stands alone between two pairs is
taken for one. The rest is reported.
"""

from collections.abc import Mapping
from dataclasses import replace

from lydite.diff.alignment import align, between, joined_parts, only_parts, repeated_names
from lydite.diff.calls import Pair, Pairing, pair_events
from lydite.diff.claims import Claims
from lydite.diff.look import is_input
from lydite.diff.names import match_spelling
from lydite.diff.renames import Rename
from lydite.diff.roles import pair_roles
from lydite.diff.steps import Counted
from lydite.diff.templates import Blocks
from lydite.trace.store import Trace

UNSEEN = ("weights", "siblings", "place", "likeness")  # ways to pair that no equal value speaks for
FOLLOWING = 8  # agreeing values after one that differs that prove it is not what it was taken for


def pair(reference: Trace, port: Trace, renames: Mapping[str, Rename] | None = None) -> Pairing:
    """Pair two traces; `renames` is the porter's word and wins."""
    theirs, ours = Counted.of(reference), Counted.of(port)
    told = {
        ours.name(name): replace(rename, ref=tuple(map(theirs.name, rename.ref)))
        for name, rename in (renames or {}).items()
    }
    found = _pair(theirs.trace, ours.trace, told)
    said = [
        f"the steps of the {side} are read from its names"
        for side, each in (("reference", theirs), ("port", ours))
        if each.original
    ]
    return Pairing(
        tuple(
            replace(each, reference=theirs.back(each.reference), port=ours.back(each.port))
            for each in found.pairs
        ),
        theirs.written(found.unpaired_reference),
        ours.written(found.unpaired_port),
        (*said, *found.remarks),
    )


def _pair(reference: Trace, port: Trace, renames: Mapping[str, Rename]) -> Pairing:
    names = Claims(reference, port)
    for ours, rename in renames.items():
        if rename.ref:
            names.found[ours] = (rename, rename.how)
        else:
            names.ignored.add(ours)
    spelled = match_spelling(names.left(), names.free())
    names.add({a: b for a, b in spelled.items() if a == b}, "name")
    names.add({a: b for a, b in spelled.items() if a != b}, "spelling")
    names.follow_weights()
    names.join(joined_parts)
    equal, close = align(reference, port, names.free(), names.left(), names.refs())
    names.add(equal, "equal")
    names.add(close, "order")
    names.share()
    names.follow_siblings()
    names.follow_scopes()
    names.join(only_parts)
    names.follow_kinds()
    names.add(pair_roles(reference, port, names.outputs(), names.left(), names.refs()), "likeness")
    repeated = repeated_names(reference) | repeated_names(port)
    pairs = names.refs()
    theirs = {name: event for name, event in names.theirs.items() if not is_input(name)}
    ours = {name: event for name, event in names.ours.items() if name not in names.ignored}
    names.add(between(theirs, ours, pairs, Blocks(pairs), repeated), "place")
    names.follow_siblings()
    names.follow_scopes()
    found = pair_events(reference, port, names)
    if strays := _strays(names, found) - renames.keys():
        names.drop(strays, UNSEEN)
        found = pair_events(reference, port, names)
    return replace(found, remarks=(*found.remarks, *_assumed(found)))


def _strays(names: Claims, found: Pairing) -> set[str]:
    """Names that were paired unseen and differ, while what comes right after them agrees.

    A port may keep scale and shift the other way round: that its values differ from what its name
    says is no bug then, and the name no counterpart.
    """
    outs = [each for each in found.pairs if each.port_site.slot == "out"]
    agreed: dict[int, bool | None] = {}

    def agree(each: Pair) -> bool | None:
        if each.site.i not in agreed:
            agreed[each.site.i] = names.look.agree(each.reference, each.port)
        return agreed[each.site.i]

    strays: set[str] = set()
    for at in reversed(range(len(outs))):
        here = outs[at].port_site.name
        if outs[at].how not in UNSEEN or here in strays or agree(outs[at]) is not False:
            continue
        after = [
            other
            for other in outs[at + 1 :]
            if other.port_site.name not in {here, *strays}
            and (other.scope, other.site.step) == (outs[at].scope, outs[at].site.step)
        ][:FOLLOWING]
        if after and all(agree(other) is not False for other in after):
            strays.add(here)
    return strays


def _assumed(found: Pairing) -> tuple[str, ...]:
    """What was paired by its place or its likeness alone, said once each."""
    said: list[str] = []
    for how, words in (("place", "by place alone"), ("likeness", "by likeness")):
        guessed = {each.port_site.name: each.site.name for each in found.pairs if each.how == how}
        if guessed:
            ours, theirs = next(iter(guessed.items()))
            more = f", and {len(guessed) - 1} more" if len(guessed) > 1 else ""
            said.append(f"paired {words}: {ours} with the reference's {theirs}{more}")
    return tuple(said)
