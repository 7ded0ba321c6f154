"""Which wrong value is the bug, and how far the comparison reaches.

A wrong computation spoils what is computed from it, so the first wrong value is the bug, with some
exceptions: a value that differs while the values after it agree was recorded at another point
(before a norm instead of after it), has another order of axes or channels, or is not used.

Values without a counterpart do no harm while something after them is compared. After the last
compared value nothing is: an agreement has to reach the port's last value or the reference's.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf, prod
from typing import Any

from numpy.typing import NDArray

from lydite.diff.measure.axes import best_fit, possible_fits
from lydite.diff.measure.channels import in_order_of
from lydite.diff.measure.distance import relative_error, wide
from lydite.diff.measure.masks import are_inverted
from lydite.diff.measure.rounding import FINE, K_COARSE, UNIT
from lydite.diff.measure.rows import Comparison
from lydite.diff.pairing.paired_events import BY_NAME, Pair
from lydite.diff.result import Row
from lydite.trace.events import Event
from lydite.trace.reader import Trace

ESTIMATE_MARGIN = 3.0  # times the limit: by how much an estimated limit may be too low
MEASURED_MARGIN = 2.0  # the same of a measured one, where a port may round in other places
# The same where nothing shows how much error came in: unrecorded operations, and a dtype's width.
OPEN_MARGIN, OPEN_MARGIN_COARSE = 100.0, 20.0
CLOSED_MARGIN = 10.0  # the same where all that came in is known, over many operations
SMALL_FINE = 1e-4  # an error in float32 that sines of large angles give
LARGE_FINE = 3e-3  # an error in float32 that no rounding gives
SPREAD = 12.0  # largest over mean error of rounding, which is in every number
RELATED = 1.0  # relative error of a guessed pair above which it may be no pair
UNRELATED = 2.0  # relative error that no two values of one size have
JUMP = 300.0  # times the largest error over limit before it: not the same error, grown
JUMP_OF_ESTIMATE = 20.0  # the same where the limit before it may be too low
DILUTED = 0.1  # of an error: what is left of it in the module around it, if that agrees
GONE = 1e-3  # the same where values after that module are wrong
FOLLOWING = 4  # agreeing values after a misplaced one that prove the computation is right
SAME_FORM = 2.0  # ratio of the errors of one value at two steps in a form of the port's own
NEARBY = 60  # events around a value among which a misplaced value is searched


@dataclass(frozen=True)
class Divergence:
    """The first wrong row that is the bug, by index."""

    first: int | None
    ignored: tuple[int, ...] = ()  # wrong rows that are not the bug
    undecided: bool = False  # the first wrong row may be within the limit, which is an estimate
    instead_of: int | None = None  # the reference's first wrong row, which the port computes later


Test = Callable[[int], bool]  # of a row by its index


@dataclass(frozen=True)
class RowTests:
    """What is asked of a wrong row, by its index."""

    is_misplaced: Test = lambda _: False  # its value was recorded at another point
    is_guessed: Test = lambda _: False  # its pair is a guess
    is_mispaired: Test | None = None  # its guess is false; without it, where it is misplaced
    is_doubled: Test = lambda _: False  # the port has the counterpart's value under another name
    is_impossible: Test = lambda _: False  # the counterpart is computed before the value's inputs
    is_anchored: Test = lambda _: True  # the values that it was computed from agree
    spoils: Test = lambda _: False  # what is computed from it is wrong
    is_used: Test = lambda _: True  # something that is computed from it is compared
    is_whole: Test = lambda _: True  # all that its module returns is compared
    is_reordered: Test = lambda _: False  # it has the right channels in another order
    leads_to_right: Test = lambda _: False  # a later value that agrees is computed from it


def first_divergence(
    rows: Sequence[Row],
    tests: RowTests,
    *,
    estimated: bool = False,
    port_order: Sequence[int] | None = None,
) -> Divergence:
    """The first wrong row in order of execution that is not ignored.

    With `estimated` limits, and in 16 bits, where a port may round between operations that the
    reference computes as one, a value a little above its limit is ignored when no later value is;
    so is a small error where not all that comes in is known. `port_order` has the number of each
    row's event in the port: of two wrong values that the sides compute in another order, neither is
    computed from the other, and the port's first is named.
    """
    ignored: list[int] = []
    judge = _Judge(rows, tests, estimated)
    for index, row in enumerate(rows):
        if not row.wrong:
            continue
        if judge.is_ignored(index, ignored):
            ignored.append(index)
            continue
        unsure = judge.is_unsure(index)
        first = index
        if port_order is not None and not unsure:
            others = (at for at in judge.beside(index) if port_order[at] < port_order[index])
            earlier = [at for at in others if not judge.is_ignored(at, ignored)]
            first = min((*earlier, index), key=lambda at: port_order[at])
        return Divergence(first, tuple(ignored), unsure, None if first == index else index)
    return Divergence(None, tuple(ignored))


@dataclass(frozen=True)
class _Judge:
    """Whether a wrong row is the bug."""

    rows: Sequence[Row]
    tests: RowTests
    estimated: bool

    def is_ignored(self, index: int, ignored: Collection[int]) -> bool:
        """Whether a wrong row is not the bug; `ignored` rows before it are not either."""
        rows, tests, row = self.rows, self.tests, self.rows[index]
        agrees_after = not tests.spoils(index) and _agrees_after(rows, index, tests.is_doubled)
        rest_agrees = _rest_of_step_agrees(rows, index, tests.is_doubled)
        return (
            _is_lost_in_rounding(row)
            or tests.is_impossible(index)
            or (agrees_after and (row.error is None or tests.is_misplaced(index)))
            or (rest_agrees and tests.leads_to_right(index))
            or (self._may_be_too_low(index) and _is_marginal(rows, index, self._margin))
            or (tests.is_guessed(index) and self._is_false_guess(index, agrees_after))
            or _is_overtaken(rows, index, tests.is_guessed, estimated=self.estimated)
            or _was_ignored(rows, index, ignored)
            or _outer_module_agrees(
                rows, index, lambda at: self._shows_all(index, at), tests.is_reordered
            )
        )

    def is_unsure(self, index: int) -> bool:
        """Whether the first wrong value, and all after it, may be rounding."""
        rows, tests = self.rows, self.tests
        # Two values that have nothing in common may be no counterparts.
        certain = [
            rows[at]
            for at in range(index, len(rows))
            if not tests.is_guessed(at) or (rows[at].error or inf) <= RELATED
        ]
        near = all(_may_be_rounding(other) for other in certain if other.wrong)
        small = self.estimated or _is_small(rows[index])
        return small and near and not tests.is_anchored(index)

    def beside(self, index: int) -> list[int]:
        """Later wrong rows of the same step and component, which the port may compute first."""
        rows, row, is_guessed = self.rows, self.rows[index], self.tests.is_guessed
        return [
            at
            for at in range(index + 1, len(rows))
            if rows[at].wrong
            and (rows[at].step, rows[at].scope) == (row.step, row.scope)
            and (is_guessed(index) or not is_guessed(at) or _is_same(rows[at], row))
        ]

    @property
    def _margin(self) -> float:
        return ESTIMATE_MARGIN if self.estimated else MEASURED_MARGIN

    def _may_be_too_low(self, index: int) -> bool:
        """Whether the limit may be: a port may subtract large values, and the reference not."""
        row = self.rows[index]
        is_small = _is_small(row) and not self.tests.is_anchored(index)
        return self.estimated or row.dtype not in FINE or is_small

    def _is_false_guess(self, index: int, agrees_after: bool) -> bool:
        tests = self.tests
        return (
            (agrees_after and tests.is_used(index))
            or (tests.is_doubled(index) and not tests.spoils(index))
            or _all_agree_after(self.rows, index, tests.is_doubled)
            or (tests.is_mispaired or tests.is_misplaced)(index)
        )

    def _shows_all(self, index: int, at: int) -> bool:
        is_first = self.tests.is_guessed(index) and self.rows[at].slot == "out"
        return self.tests.is_whole(at) or is_first


def _was_ignored(rows: Sequence[Row], index: int, ignored: Collection[int]) -> bool:
    """Whether the same value of an earlier call is no bug, and is as far from its counterpart.

    A port that has a value in a form of its own has it so at every step, in every call, and one of
    another shape in every block.
    """
    row = rows[index]
    return any(
        _is_as_wrong(rows[at], row)
        and (
            (rows[at].site, rows[at].slot) == (row.site, row.slot)
            if (rows[at].step, rows[at].call) < (row.step, row.call)
            else row.error is None and _has_role(rows[at], row)
        )
        for at in ignored
    )


def _has_role(one: Row, other: Row) -> bool:
    """Whether two values have one last word in both traces, as those of two blocks."""
    words = [
        [row.site.rpartition(".")[2], row.port_site.rpartition(".")[2]] for row in (one, other)
    ]
    return words[0] == words[1] and one.slot == other.slot


def _is_as_wrong(one: Row, other: Row) -> bool:
    """Whether two errors are large and nearly equal, or both shapes differ."""
    if one.error is None or other.error is None:
        return one.error is other.error
    larger, smaller = max(one.error, other.error), min(one.error, other.error)
    return smaller > LARGE_FINE and larger < SAME_FORM * smaller


def _same_call(one: Row, other: Row) -> bool:
    """Whether one call returned both: the reference's order of them says nothing.

    A module returns its probabilities of attention after what it computes from them.
    """
    inner = other.site.startswith(f"{one.site}.") and one.slot.startswith("out.")
    return (inner or one.site == other.site) and one.call == other.call


def _is_same(one: Row, other: Row) -> bool:
    """Whether one call returned both, or both are one value of a module."""
    return _same_call(one, other) or _same_value(one, other)


def _same_value(one: Row, other: Row) -> bool:
    """Whether both are one value of a module, in two calls: a port may run the other one first."""
    return (one.site, one.slot) == (other.site, other.slot)


def first_isolated(rows: Sequence[Row]) -> Divergence:
    """The first wrong row of a run on the reference's values, where errors do not propagate."""
    return Divergence(next((index for index, row in enumerate(rows) if row.wrong), None))


def _is_lost_in_rounding(row: Row) -> bool:
    """Whether rounding alone may give errors as large as those between unrelated values."""
    return row.limit is not None and row.limit >= RELATED and (row.error or inf) < UNRELATED


def _is_marginal(rows: Sequence[Row], index: int, margin: float) -> bool:
    """Whether a value is little above its limit, and no later value is far above its own."""
    row, later = rows[index], rows[index + 1 :]
    if row.error is None or not row.limit or row.error > margin * row.limit:
        return False
    compared = [other for other in later if other.error is not None]
    return bool(compared) and not any(
        other.wrong and (other.error is None or other.error > margin * (other.limit or 0.0))
        for other in later
    )


def _is_overtaken(rows: Sequence[Row], index: int, is_guessed: Test, *, estimated: bool) -> bool:
    """Whether a value is little above its limit, and a later one so far that this is not its cause.

    An error that grows does so little by little; one that appears at once was made there, and is in
    what follows. A value that was as wrong at an earlier step already has a form of its own, and
    a guess of another shape or size may be no counterpart.
    """
    largest = over_limit(rows[index])
    if not 1 < largest <= OPEN_MARGIN:
        return False
    jump = JUMP_OF_ESTIMATE if estimated and largest <= ESTIMATE_MARGIN else JUMP
    before = {(row.site, row.slot): row for row in rows[:index] if row.wrong}
    for at in range(index + 1, len(rows)):
        other, over = rows[at], over_limit(rows[at])
        if is_guessed(at) and (other.error is None or other.error > UNRELATED):
            continue
        known = before.get((other.site, other.slot))
        if known is not None and _is_as_wrong(known, other):
            continue
        if over >= jump * largest and _lasts(rows, at, DILUTED * jump * largest):
            return True
        largest = max(largest, over)
    return False


def _lasts(rows: Sequence[Row], index: int, least: float) -> bool:
    """Whether one of the values after this one is as far over its limit, or there are none."""
    following = [other for other in rows[index + 1 :] if other.site != rows[index].site]
    return not following or any(over_limit(other) >= least for other in following[:FOLLOWING])


def _may_be_rounding(row: Row) -> bool:
    """Whether an error is near its limit, and in all numbers of the value, not in a few."""
    if row.dtype not in UNIT or row.error is None or (row.peak or 0.0) > SPREAD * row.error:
        return False
    if row.dtype in FINE and row.error > LARGE_FINE:
        return False
    return over_limit(row) <= open_margin(row.dtype)


def open_margin(dtype: str) -> float:
    """By how much an error may be above an estimated limit where little is known."""
    return OPEN_MARGIN if dtype in FINE else OPEN_MARGIN_COARSE


def _is_small(row: Row) -> bool:
    """Whether an error is as small as operations give that a reference does in one precision only.

    A second run does not measure those: sinusoids are float32 in most references.
    """
    return row.dtype in FINE and row.error is not None and row.error < SMALL_FINE


def over_limit(row: Row) -> float:
    """The error in limits; infinite where there is none to compare."""
    if row.error is None:
        return inf if row.wrong else 0.0
    return row.error / row.limit if row.limit else inf if row.error else 0.0


def _outer_module_agrees(
    rows: Sequence[Row], index: int, is_whole: Test, is_reordered: Test
) -> bool:
    """Whether a module around this one returns what it should: nothing else sees the error.

    So does the module of a first input, as a layer whose weights have the order of the input.

    All that it returns has to be compared: of two streams, the other one may be right. Of a guess
    the first is enough: a port may have a value in a form of its own.

    Where other values are wrong later, what is left of the error could be their cause: it has to be
    gone. That is so where tokens are in another order inside of the module. Of right numbers in
    another order nothing is left.
    """
    row, later = rows[index], rows[index + 1 :]
    others_wrong = any(o.wrong and (o.site, o.slot) != (row.site, row.slot) for o in later)
    left = (GONE if others_wrong else DILUTED) * (row.error or inf)
    is_first_input = (row.slot, row.port_slot) == ("in.0", "in.0")
    returned: dict[str, list[bool]] = {}  # all that a module returns has to agree
    for at, other in enumerate(later, index + 1):
        is_around = row.site.startswith((f"{other.site}.", f"{other.site}/"))
        is_result = is_first_input and row.site == other.site
        is_around = is_around or is_result
        same_call = (other.step, other.call) == (row.step, row.call)
        if is_around and same_call and other.slot.startswith("out") and other.error is not None:
            is_gone = other.error <= left or (is_result and other.dtype not in FINE)
            agrees = other.agrees and is_whole(at) and (is_gone or is_reordered(index))
            returned.setdefault(other.site, []).append(agrees)
    return any(map(all, returned.values()))


def _agrees_after(rows: Sequence[Row], index: int, is_doubled: Test) -> bool:
    """Whether the values right after this one, in the same component, agree.

    Another stream may run first, which does not depend on it: the next value of its own counts too.
    """
    row = rows[index]
    has_scopes = any("/" in other.site for other in rows)  # else the trace is one component
    # A video is decoded frame by frame: the next frame does not depend on this value.
    seen = {(other.site, other.slot) for other in rows[:index] if other.step == row.step}
    same_pass = takewhile(
        lambda at: (
            rows[at].step != row.step
            or rows[at].site == row.site
            or (rows[at].site, rows[at].slot) not in seen
        ),
        (at for at in range(index + 1, len(rows)) if not is_doubled(at)),
    )
    following = [
        at
        for at in same_pass
        if (not has_scopes or rows[at].scope == row.scope)
        and rows[at].site != row.site
        and rows[at].error is not None
    ]
    own = [at for at in following if len(row.shape) > 2 and rows[at].shape[:-1] == row.shape[:-1]][
        :1
    ]
    if not own and _is_end_of_stream(rows, index):
        return False
    following = following[:FOLLOWING]
    return bool(following) and not any(rows[at].wrong for at in (*following, *own))


def _all_agree_after(rows: Sequence[Row], index: int, is_doubled: Test) -> bool:
    """Whether what was compared after this value, in any component, agrees to the end."""
    later = (at for at in range(index + 1, len(rows)) if not is_doubled(at))
    following = [rows[at] for at in later if rows[at].site != rows[index].site]
    return any(other.agrees for other in following) and not any(other.wrong for other in following)


def _rest_of_step_agrees(rows: Sequence[Row], index: int, is_doubled: Test) -> bool:
    """Whether what was compared after this value in its step agrees, up to the step's end."""
    step = [at for at in range(index + 1, len(rows)) if rows[at].step == rows[index].step]
    following = [rows[at] for at in step if not is_doubled(at)]
    return any(row.agrees for row in following) and not any(row.wrong for row in following)


def doubled_rows(rows: Sequence[Row], pairs: Sequence[Pair]) -> set[int]:
    """Wrong rows of which another value of the port has the reference's value, under its name.

    A module may return what its last layer did; a port records that once.
    """
    agreeing: dict[str, set[str]] = defaultdict(set)
    for row, pair in zip(rows, pairs, strict=True):
        if row.agrees and pair.event.hash and len(pair.reference) == 1:
            agreeing[pair.event.hash].add(pair.port_event.name)
    return {
        index
        for index, (row, pair) in enumerate(zip(rows, pairs, strict=True))
        if row.wrong
        and pair.how not in (*BY_NAME, "end")
        and agreeing[pair.event.hash or ""] - {pair.port_event.name}
    }


def _is_end_of_stream(rows: Sequence[Row], index: int) -> bool:
    """Whether a value is the last of its tokens, and later ones are wrong: those of both streams.

    Then the values right after it are those of another stream and show nothing about it.
    """
    row = rows[index]
    if len(row.shape) < 3 or not any(other.wrong for other in rows[index + 1 :]):
        return False
    leading = row.shape[:-1]
    same = [other.shape[:-1] == leading and other.step == row.step for other in rows]
    return any(same[:index]) and not any(same[index + 1 :])


def misplaced_value(
    traces: Comparison, pair: Pair, row: Row, taken: Collection[str] = (), *, inside: bool = False
) -> str | None:
    """A remark, when one side's value equals another of the other side's near it; else None.

    With `inside`, values of modules inside the value's own count too. Values of the reference
    that are `taken`, by hash, have a counterpart of their own: a port that has one of them
    twice has it once where another belongs.
    """
    if len(pair.port) > 1 or len(pair.reference) > 1:
        return None
    limit = max(row.limit or 0.0, 1e-3 if row.dtype in ("bf16", "f16") else 1e-5)
    reference, port, floor = traces.reference, traces.port, traces.floor
    event, port_event = pair.event, pair.port_event
    if reference.has_values(event) and port.has_values(port_event):
        value, expected = wide(port.read(port_event)), wide(reference.read(event))
        if _equal_in_some_order(value, expected, limit):
            return f"{row.name}: same values in another axis order; not a bug"
        if has_own_channels(value, expected, limit):
            return f"{row.name}: same values with the last axis in another order; not a bug"
        if are_inverted(value, expected):
            return f"{row.name}: the mask has ones for the other tokens; not a bug"
    for trace, own, other_trace, other, side in (
        (port, port_event, reference, event, "reference"),
        (reference, event, port, port_event, "port"),
    ):
        if not trace.has_values(own):
            continue
        value = wide(trace.read(own))
        without = taken if side == "reference" else ()
        for near, candidate in values_nearby(other_trace, other, inside=inside, without=without):
            second = floor.find(*near.id) if floor is not None and side == "reference" else None
            rounding = 0.0
            if second is not None and floor is not None and floor.has_values(second):
                rounding = relative_error(wide(floor.read(second)), candidate)
            allowed = max(limit, K_COARSE * rounding) if rounding < RELATED else limit
            if _equal_in_some_order(value, candidate, allowed):
                return f"{row.name}: equals {near} of the {side}; recorded there, not a bug"
    return None


def values_nearby(
    trace: Trace,
    event: Event,
    *,
    inside: bool = True,
    any_size: bool = False,
    without: Collection[str] = (),
) -> Iterable[tuple[Event, NDArray[Any]]]:
    """Other values of a trace around one event, of its size unless any will do.

    Without `inside`, values of modules inside its module are left out: a module that returns what a
    part of it returned has left something out, which is a bug. Hashes `without` are left out.
    """
    size = prod(event.shape)
    for other in trace.events:
        if other.hash in without:
            continue
        if not inside and other.name.startswith((f"{event.name}.", f"{event.name}/")):
            continue
        near = abs(other.i - event.i) <= NEARBY and other.i != event.i and other.step == event.step
        alike = (any_size or prod(other.shape) == size) and other.kind == event.kind
        if near and alike and trace.has_values(other):
            yield other, wide(trace.read(other))


def _equal_in_some_order(value: NDArray[Any], other: NDArray[Any], limit: float) -> bool:
    fit, error = best_fit(possible_fits(value.shape, other.shape), value, other)
    return fit is not None and error <= limit and relative_error(fit.apply(value), other) <= limit


def has_own_channels(value: NDArray[Any], expected: NDArray[Any], limit: float) -> bool:
    """Whether a port has the right numbers with the last axis in an order of its own."""
    ordered = in_order_of(expected, value)
    return ordered is not None and relative_error(ordered, expected) <= limit


@dataclass(frozen=True)
class Coverage:
    """The last compared value, and what the port computes after it."""

    last: Row | None
    uncovered: tuple[Event, ...]  # of the port, after the last compared value
    not_comparable: int  # of these: paired, but with another shape or without values
    complete: bool  # the port's last value was compared, or the reference's

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what was not compared, in order."""
        return tuple(dict.fromkeys(event.name for event in self.uncovered))


def coverage(
    traces: Comparison, pairs: Sequence[Pair], rows: Sequence[Row], ignored: Collection[str]
) -> Coverage:
    """`rows` are those of `pairs`; names of the port in `ignored` have no counterpart."""
    compared = [(pair, row) for pair, row in zip(pairs, rows, strict=True) if row.agrees]
    last = max(compared, key=lambda entry: _end(entry[0].port), default=None)
    start = _end(last[0].port) if last else -1
    hashes = {event.hash for pair, _ in compared for event in pair.port if event.hash}
    owners = {event.i for pair, _ in compared for event in pair.port}
    # A module around the last one returns what that returned: the same array under another name.
    uncovered = tuple(
        event
        for event in _results(traces.port, ignored)
        if event.i > start and event.hash not in hashes and event.alias_of not in owners
    )
    paired = {event.i for pair in pairs for event in pair.port}
    final = max((event.i for event in _results(traces.reference, ())), default=None)
    finished = any(event.i == final for pair, _ in compared for event in pair.reference)
    not_comparable = sum(event.i in paired for event in uncovered)
    return Coverage(last[1] if last else None, uncovered, not_comparable, not uncovered or finished)


def unpaired_between(
    port: Trace, before: Pair, here: Pair, pairs: Sequence[Pair], ignored: Collection[str]
) -> tuple[str, ...]:
    """The values without a counterpart that the port computes between two pairs, by name."""
    paired = {event.i for pair in pairs for event in pair.port}
    start, end = _end(before.port), min(event.i for event in here.port)
    between = (e for e in _results(port, ignored) if start < e.i < end and e.i not in paired)
    return tuple(dict.fromkeys(event.name for event in between))


def _results(trace: Trace, ignored: Collection[str]) -> list[Event]:
    """What the run computed: no inputs, no tables, no self-tests."""
    return [
        event
        for event in trace.events
        if event.kind == "activation" and event.slot.startswith("out") and event.name not in ignored
    ]


def _end(events: Sequence[Event]) -> int:
    return max(event.i for event in events)
