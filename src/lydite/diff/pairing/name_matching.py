"""Names of the two traces: their spelling, steps in names, modules with equal parameters."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt

import msgspec

from lydite.diff.measure.rounding import UNIT
from lydite.trace.events import Event, Stats, WeightInfo
from lydite.trace.reader import Trace

Tokens = tuple[str, ...]
STEP = re.compile(r"(?:(?<=[/._\- ])|^)(?:step|steps|iter|iteration)[_\-. ]?(\d+)(?=[/._\- ]|$)")


def tokens(name: str) -> Tokens:
    """The words of a name: `Blocks/2.attn` and `blocks.2.attn` have the same."""
    return tuple(part for part in re.split(r"[/.:\[\]\s]+", name.lower()) if part)


def match_spelling(port: Iterable[str], reference: Iterable[str]) -> dict[str, str]:
    """Port name → reference name where only spelling or leading scopes differ, and uniquely."""
    port, reference = list(port), list(reference)
    matched: dict[str, str] = {name: name for name in set(port) & set(reference)}
    taken = set(matched.values())
    left = [name for name in port if name not in matched]
    by_tail: dict[Tokens, list[str]] = defaultdict(list)
    for name in reference:
        if name not in taken:
            parts = tokens(name)
            for start in range(len(parts)):
                if _is_tail(name, parts, start):
                    by_tail[parts[start:]].append(name)
    wanted_by: dict[str, list[str]] = defaultdict(list)
    for name in left:
        for candidate in _same_ending(tokens(name), by_tail):
            wanted_by[candidate].append(name)
    candidates: dict[str, list[str]] = defaultdict(list)
    for candidate, names in wanted_by.items():
        if len(names) == 1:
            candidates[names[0]].append(candidate)
    matched |= {name: only[0] for name, only in candidates.items() if len(only) == 1}
    return matched | _match_paths(set(port) - set(matched), set(reference) - set(matched.values()))


def _match_paths(port: Iterable[str], reference: Iterable[str]) -> dict[str, str]:
    """Names that differ only in their component: `first_stage_model/a.b` and `vae/a.b`."""
    sides: list[dict[Tokens, list[str]]] = []
    for names in (port, reference):
        paths: dict[Tokens, list[str]] = defaultdict(list)
        for name in names:
            paths[tokens(name.rpartition("/")[2])].append(name)
        sides.append(paths)
    port_paths, reference_paths = sides
    return {
        port_paths[path][0]: reference_paths[path][0]
        for path in port_paths.keys() & reference_paths.keys()
        if len(path) > 1 and len(port_paths[path]) == len(reference_paths[path]) == 1
    }


def match_weights(
    port: Mapping[str, WeightInfo], reference: Mapping[str, WeightInfo]
) -> dict[str, str]:
    """Port parameter → reference parameter where their values are the same in some layout.

    Range and moments do not change when axes move. Equal statistics of equal sizes that no other
    parameter has are taken for equal parameters.
    """
    buckets: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, info in reference.items():
        buckets[_size(info)].append(name)
    candidates: dict[str, list[str]] = defaultdict(list)
    for name, info in port.items():
        for other in buckets[_size(info)]:
            if same_values(info, reference[other]):
                candidates[name].append(other)
    counts = Counter(other for others in candidates.values() for other in others)
    return {
        name: others[0]
        for name, others in candidates.items()
        if len(others) == 1 and counts[others[0]] == 1
    }


def module_renames(weights: Mapping[str, str]) -> dict[str, str]:
    """Port module → reference module, from parameters that were matched.

    A block may hold a weight itself: what has this weight alone on the other side is not its
    counterpart, since the other layers of the block are not inside of it. Nor is a last layer the
    network that holds its table.
    """
    votes: dict[str, set[str]] = defaultdict(set)
    for name, reference_name in weights.items():
        votes[module_of(name)].add(module_of(reference_name))
    found = {name: next(iter(modules)) for name, modules in votes.items() if len(modules) == 1}
    blocks = {name for name, _ in _blocks_beside(found.items())}
    blocks |= {name for _, name in _blocks_beside((b, a) for a, b in found.items())}
    return {name: target for name, target in found.items() if name not in blocks}


def _blocks_beside(pairs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Pairs of a block with what is not around the counterparts of all of its layers."""
    targets: dict[str, set[str]] = defaultdict(set)
    for name, target in pairs:
        targets[name].add(target)
    return {
        (outer, other)
        for name, inner in targets.items()
        for outer in _around(name)
        for other in targets.get(outer, ())
        if not all(target.startswith((f"{other}.", f"{other}/")) for target in inner)
    }


def _around(name: str) -> Iterator[str]:
    """The modules around one, the innermost first."""
    while name := name[: max(name.rfind("."), name.rfind("/"), 0)]:
        yield name


def same_values(a: WeightInfo, b: WeightInfo) -> bool:
    """Whether two parameters hold the same values, whatever their axis order."""
    if a.hash and b.hash and a.hash == b.hash:
        return True
    if a.stats is None or b.stats is None or a.stats.rms is None or b.stats.rms is None:
        return False
    if a.stats.rms == 0.0 or a.stats.std == 0.0:
        return False  # many parameters are constant
    tolerance = 1e-5
    if a.dtype != b.dtype:  # one is rounded: that averages out in the moments
        unit = max(UNIT.get(info.dtype, 0.0) for info in (a, b))
        tolerance = max(unit / 4, 3 * unit / sqrt(max(a.stats.count, 1)))
    return close_stats(a.stats, b.stats, tolerance)


def close_stats(a: Stats, b: Stats, tolerance: float) -> bool:
    """Whether range and moments agree, relative to the size of the values."""
    if a.count != b.count or None in (a.rms, b.rms, a.mean, b.mean, a.min, b.min, a.max, b.max):
        return False
    scale = tolerance * max(abs(b.rms or 0.0), 1e-30)
    return (
        abs((a.rms or 0.0) - (b.rms or 0.0)) <= scale
        and abs((a.mean or 0.0) - (b.mean or 0.0)) <= scale
        and abs((a.min or 0.0) - (b.min or 0.0)) <= 10 * scale
        and abs((a.max or 0.0) - (b.max or 0.0)) <= 10 * scale
    )


def _is_tail(name: str, parts: Tokens, start: int) -> bool:
    """Whether the end of a name identifies it.

    One word does when only a scope or one other word comes before it: `v` does not identify
    `encoder.0.attention.v`; `noise` identifies `pipeline/noise`.
    """
    alone = start == len(parts) - 1
    return not alone or start <= 1 or tokens(name.rpartition("/")[2]) == parts[start:]


def _same_ending(parts: Tokens, by_tail: Mapping[Tokens, list[str]]) -> list[str]:
    """Reference names that end in this one, or in which this one ends."""
    if parts in by_tail:
        return by_tail[parts]
    for start in range(1, len(parts)):
        whole = [name for name in by_tail.get(parts[start:], ()) if tokens(name) == parts[start:]]
        if whole:
            return whole
    return []


def _size(info: WeightInfo) -> tuple[int, ...]:
    return tuple(sorted(size for size in info.shape if size != 1))


def module_of(parameter: str) -> str:
    """The module that a parameter belongs to."""
    return re.split(r"[./](?=[^./]*$)", parameter)[0]


@dataclass(frozen=True)
class StepsFromNames:
    """A trace whose names contain the step (`step3/latents`), with the step moved to the event.

    A hand-written dump often has one name per step and no `step` field. What is shown to the user
    keeps the names as they were written.
    """

    trace: Trace
    original: dict[int, Event]  # by event number; empty when nothing was changed

    @classmethod
    def of(cls, trace: Trace) -> "StepsFromNames":
        """The trace itself, unless several of its names differ in the number of a step only."""
        moved = {e.i: event for e in trace.events if (event := _with_step(e)) is not None}
        if len({event.step for event in moved.values()}) < 2:
            return cls(trace, {})
        calls: Counter[tuple[str, str, int]] = Counter()
        events: list[Event] = []
        for original in trace.events:
            event = moved.get(original.i, original)
            key = (event.name, event.slot, event.step)
            events.append(msgspec.structs.replace(event, call=calls[key]))
            calls[key] += 1
        return cls(replace(trace, events=tuple(events)), {event.i: event for event in trace.events})

    @property
    def names(self) -> set[str]:
        """Every name, as written and without its step."""
        written = {event.name for event in self.original.values()}
        return written | {event.name for event in self.trace.events}

    def without_step(self, name: str) -> str:
        """The name without its step, as this trace has it."""
        return _split_step(name)[0] if self.original else name

    def written_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """All names on disk that belong to these."""
        if not self.original:
            return tuple(names)
        wanted = set(names)
        events = (event for event in self.original.values() if event.kind != "selftest")
        written = dict.fromkeys(event.name for event in events)
        return tuple(name for name in written if self.without_step(name) in wanted)


def with_calls_in_names(reference: Trace, port: Trace, kept: Collection[str]) -> Trace:
    """The reference with one name for each call of a function that a module calls several times.

    A port has a name for each: q and k after the rotation. Names that are `kept`, and those of
    which the port records as many calls under one name, stay.
    """
    counts, port_counts = _outputs_by_step(reference), _outputs_by_step(port)
    known = {tuple(steps.values()) for steps in port_counts.values()}
    calls: dict[str, int] = {}
    for name, steps in counts.items():
        around = counts.get(name[: max(name.rfind("."), name.rfind("/"), 0)], Counter())
        times = {divmod(count, around[step] or count) for step, count in steps.items()}
        if len(times) == 1 and name not in kept and tuple(steps.values()) not in known:
            each, rest = times.pop()
            if each > 1 and not rest:
                calls[name] = each
    if not calls:
        return reference

    def renamed(event: Event) -> Event:
        if event.name not in calls:
            return event
        call, number = divmod(event.call, calls[event.name])
        return msgspec.structs.replace(event, name=f"{event.name} ({number})", call=call)

    return replace(reference, events=tuple(map(renamed, reference.events)))


def with_inputs_in_names(port: Trace, modules: Collection[str]) -> tuple[Trace, dict[str, str]]:
    """The port with a name for each input, but for those of `modules`; and whose inputs they are.

    A name that is not the reference's may be any part of its module: each input has a counterpart
    of its own. Inputs of `modules` are those of the module with this name in the reference.
    """
    owners: dict[str, str] = {}

    def renamed(event: Event) -> Event:
        prefix, _, slot = event.slot.partition(".")
        if prefix != "in" or event.name in modules or event.kind != "activation":
            return event
        # No number: those in names are the numbers of blocks.
        word = "abcdefghij"[int(slot) % 10] if slot.isdigit() else slot
        name = f"{event.name} (input {word})"
        owners[name] = event.name
        return msgspec.structs.replace(event, name=name, slot="out")

    events = tuple(map(renamed, port.events))
    return (replace(port, events=events), owners) if owners else (port, owners)


def _outputs_by_step(trace: Trace) -> dict[str, Counter[int]]:
    """How many times each name returned something in each step."""
    returned = {
        (event.name, event.step, event.call)
        for event in trace.events
        if event.slot.partition(".")[0] == "out" and event.kind == "activation"
    }
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for name, step, _ in sorted(returned):
        counts[name][step] += 1
    return counts


def _with_step(event: Event) -> Event | None:
    name, step = _split_step(event.name)
    if step is None or event.kind == "selftest" or event.step not in (0, step):
        return None
    return msgspec.structs.replace(event, name=name, step=step)


def _split_step(name: str) -> tuple[str, int | None]:
    match = STEP.search(name)
    if match is None:
        return name, None
    before, after = name[: match.start()], name[match.end() :]
    rest = before + after[1:] if after else before[:-1]
    return (rest, int(match[1])) if rest.strip("/._- ") else (name, None)
