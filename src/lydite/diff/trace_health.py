"""What one trace shows by itself: NaN and its origin, float16 range, constant values, attention.

Statistics are enough for nearly all of it; values are read a few rows at a time.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lydite.diff.findings.attention import CLOSE, Rows, measure_rows
from lydite.trace.events import Event, Stats
from lydite.trace.reader import Trace
from lydite.trace.statistics import measure, pieces

F16_MAX = 65504.0
TIGHT = 0.25  # of float16's range: reported
LARGE = 1e4  # of a residual stream
MAX_NAMES = 4  # in one sentence
COLLAPSED = 0.02  # of the largest entropy
MIN_KEYS = 4

_FLOATS = ("f64", "f32", "bf16", "f16", "f8_e4m3", "f8_e5m2")
_PROBABILITIES = re.compile(r"(attn|attention)_?(weights|probs)$|(^|[._/])(probs|softmax)$")
_BLOCK = re.compile(r"(.*?(?:blocks|layers|block|layer|resnets)\.)(\d+)$")


@dataclass(frozen=True)
class Remark:
    """Something unusual in one trace."""

    kind: str  # a short stable id
    site: str
    step: int | None
    sentence: str
    serious: bool


def examine(trace: Trace) -> tuple[Remark, ...]:
    """Check every event once, in order; serious remarks come first."""
    checks = (_NotFinite(trace), _Range(), _Growth(), _Constant(trace), _Steps(), _Attention(trace))
    for event in trace.events:
        if event.kind == "selftest":
            continue
        stats = event.stats
        if stats is None and trace.has_values(event):
            stats = measure(trace.read(event))
        if stats is not None and stats.count:
            for check in checks:
                check.add(event, stats)
    remarks = [remark for check in checks for remark in check.remarks()]
    return tuple(sorted(remarks, key=lambda remark: not remark.serious))


def headroom(stats: Stats) -> float:
    """The largest magnitude as a fraction of what float16 holds."""
    return _peak(stats) / F16_MAX


@dataclass
class _Calls:
    """A flag for each input of each module's latest call."""

    latest: dict[str, tuple[tuple[int, int], dict[str, bool]]] = field(default_factory=dict)

    def of(self, event: Event) -> dict[str, bool]:
        """Slot to flag, of the call that the event belongs to; empty when not recorded."""
        call, given = self.latest.get(event.name, (None, {}))
        if call != (event.step, event.call):
            given = {}
            self.latest[event.name] = ((event.step, event.call), given)
        return given


@dataclass
class _NotFinite:
    """The first NaN or infinity, and whether the inputs had any."""

    trace: Trace
    first: tuple[Event, Stats, tuple[str, ...]] | None = None
    later: int = 0
    calls: _Calls = field(default_factory=_Calls)

    def add(self, event: Event, stats: Stats) -> None:
        if self.first is not None:
            self.later += bool(stats.nan or stats.inf)
            return
        inputs = self.calls.of(event)
        if stats.nan or (stats.inf and not self._masked(event)):
            self.first = (event, stats, tuple(inputs))
        elif event.slot.startswith("in."):
            inputs[event.slot] = True

    def _masked(self, event: Event) -> bool:
        """Whether there is only −Inf, which is a mask; +Inf is not."""
        if not self.trace.has_values(event):
            return _is_mask(event)
        return not any((piece == np.inf).any() for piece in pieces(self.trace.read(event)))

    def remarks(self) -> Iterator[Remark]:
        if self.first is None:
            return
        event, stats, inputs = self.first
        counts = ((stats.nan, "NaN"), (stats.inf, "Inf"))
        text = " and ".join(f"{n} {word}" for n, word in counts if n)
        text += f" of {stats.count} values, "
        if event.slot.startswith("in."):
            text += f"first at {event}; its origin was not recorded"
        elif inputs:
            text += f"computed by {event} from finite inputs ({', '.join(inputs)})"
        else:
            text += f"first at {event}; its inputs were not recorded"
        if stats.inf and event.dtype == "f16":
            text += ". Float16 ends at 65504: compute this in bfloat16 or float32"
        if self.later:
            text += f". {self.later} later values have them too"
        yield Remark("not-finite", event.name, event.step, text + ".", True)


@dataclass
class _Range:
    """Values near the end of float16's range, or beyond it."""

    over: dict[str, None] = field(default_factory=dict)
    count: int = 0
    largest: tuple[float, Event] | None = None

    def add(self, event: Event, stats: Stats) -> None:
        if event.kind != "activation" or event.dtype not in _FLOATS or _is_mask(event):
            return
        peak = _peak(stats)
        if headroom(stats) > 1:
            self.count += 1
            self.over.setdefault(event.name)
        if self.largest is None or peak > self.largest[0]:
            self.largest = (peak, event)

    def remarks(self) -> Iterator[Remark]:
        if self.largest is None or self.largest[0] < TIGHT * F16_MAX:
            return
        peak, event = self.largest
        if self.over:
            kind = "f16-overflow"
            text = f"{self.count} values at {len(self.over)} sites would overflow in float16: "
            text += f"{_named(self.over)}; the largest is {peak:.3g} at {event}, "
            text += f"{peak / F16_MAX:.3g} × 65504. Use bfloat16 or float32."
        else:
            kind = "f16-headroom"
            text = f"The largest value, {peak:.3g} at {event}, takes {peak / F16_MAX:.0%} of "
            text += "float16's range."
        yield Remark(kind, event.name, event.step, text, False)


@dataclass
class _Growth:
    """Growth along a stack of blocks."""

    stacks: dict[str, dict[int, tuple[float, int]]] = field(default_factory=dict)  # peak, step

    def add(self, event: Event, stats: Stats) -> None:
        match = _BLOCK.match(event.name)
        if match is None or not event.slot.startswith("out") or event.kind != "activation":
            return
        stack = self.stacks.setdefault(f"{match[1]} [{event.slot}]", {})
        stack.setdefault(int(match[2]), (_peak(stats), event.step))  # the first step is enough

    def remarks(self) -> Iterator[Remark]:
        for name, stack in self.stacks.items():
            start, last = min(stack), max(stack)
            first, step = stack[start]
            where = max(stack, key=lambda number: stack[number])
            largest = stack[where][0]
            if len(stack) < 2 or largest < LARGE or largest < 10 * first:
                continue
            site = name.split(" ")[0]
            text = f"The range grows from {first:.3g} at {site}{start} to {largest:.3g} at "
            text += f"{site}{where}, of {last + 1}. A transformer's residual stream reaches 1e6 to "
            text += "1e7 in a few channels; when both sides agree this is not a bug."
            yield Remark("range-grows", f"{site}{where}", step, text, False)


@dataclass
class _Constant:
    """Outputs whose values are all zero, or all equal."""

    trace: Trace
    zero: dict[str, Event] = field(default_factory=dict)
    constant: dict[str, tuple[Event, float]] = field(default_factory=dict)
    calls: _Calls = field(default_factory=_Calls)

    def add(self, event: Event, stats: Stats) -> None:
        if event.kind != "activation" or stats.count < 2 or event.dtype not in _FLOATS:
            return
        constant = stats.min is not None and stats.min == stats.max and not stats.nan + stats.inf
        inputs = self.calls.of(event)
        if event.slot.startswith("in."):
            inputs[event.slot] = constant
            return
        if not constant or any(inputs.values()) or _is_mask(event):
            return  # a constant input explains a constant output
        if stats.min == 0.0:
            self.zero.setdefault(event.name, event)
        elif stats.min is not None:
            self.constant.setdefault(event.name, (event, stats.min))

    def remarks(self) -> Iterator[Remark]:
        of_zeros = self._layers_of_zeros()
        explained = {
            name: event
            for name, event in self.zero.items()
            if any(layer == name or _contains(name, layer) for layer in of_zeros)
        }
        if explained:
            first = next(iter(explained.values()))
            text = f"All values are zero at {_named(explained)}: the parameters of "
            text += f"{_named(of_zeros)} are zero. Right if they are zero in the checkpoint; "
            text += "otherwise they were not loaded."
            yield Remark("all-zero", first.name, first.step, text, False)
        if zero := {name: event for name, event in self.zero.items() if name not in explained}:
            first = next(iter(zero.values()))
            text = f"All values are zero at {_named(zero)}: a weight never loaded, a gate of "
            text += "zero, or a buffer never written."
            yield Remark("all-zero", first.name, first.step, text, True)
        if self.constant:
            first, value = next(iter(self.constant.values()))
            text = f"All values are equal at {_named(self.constant)}, {value:g} at the first."
            yield Remark("constant", first.name, first.step, text, False)

    def _layers_of_zeros(self) -> list[str]:
        """Layers that give zeros, and whose recorded parameters are all zero."""
        own: dict[str, list[bool]] = {}
        for parameter, info in (self.trace.weights() or {}).items() if self.zero else ():
            is_zero = info.stats is not None and info.stats.min == info.stats.max == 0
            own.setdefault(parameter.rpartition(".")[0], []).append(is_zero)
        return [name for name in self.zero if all(own.get(name, [False]))]


@dataclass
class _Steps:
    """Values that are equal in every step."""

    seen: dict[tuple[str, str, int], "_Site"] = field(default_factory=dict)

    def add(self, event: Event, stats: Stats) -> None:
        if event.kind != "activation" or event.dtype not in _FLOATS:
            return
        key = (event.name, event.slot, event.call)
        content = event.hash or str(stats)
        site = self.seen.get(key)
        if site is None:
            self.seen[key] = _Site(content, event.step, 1, True)
        elif event.step != site.step:
            same = site.same and site.content == content
            self.seen[key] = _Site(content, event.step, site.steps + 1, same)

    def remarks(self) -> Iterator[Remark]:
        given: dict[tuple[str, int], bool] = {}  # whether every input stayed the same
        for (name, slot, call), site in self.seen.items():
            if slot.startswith("in."):
                given[name, call] = given.get((name, call), True) and site.same
        stuck: dict[str, None] = {}
        still: dict[str, None] = {}
        for (name, slot, call), site in self.seen.items():
            if site.same and site.steps > 1 and not slot.startswith("in."):
                if (name, call) not in given:
                    still.setdefault(name)
                elif not given[name, call]:
                    stuck.setdefault(name)
        if stuck:
            text = f"The same value in every step, although an input changes: {_named(stuck)}. "
            text += "A cached value, or an input that is not used."
            yield Remark("same-in-every-step", next(iter(stuck)), None, text, True)
        if still:
            text = f"The same value in every step: {_named(still)}. Right for text and position "
            text += "tables, wrong for anything that depends on the latent or the timestep."
            yield Remark("same-in-every-step", next(iter(still)), None, text, False)


@dataclass(frozen=True)
class _Site:
    content: str
    step: int
    steps: int
    same: bool


@dataclass
class _Attention:
    """Probabilities: whether rows sum to one, and their entropy."""

    trace: Trace
    sites: dict[str, tuple[float, float]] = field(default_factory=dict)  # entropy: least, most
    found: list[Remark] = field(default_factory=list)

    def add(self, event: Event, stats: Stats) -> None:
        if event.name in self.sites or not _may_be_probabilities(event, stats):
            return
        named, mean = bool(_PROBABILITIES.search(event.name)), stats.mean or 0.0
        queries, keys = event.shape[-2:]
        if not named and min(abs(mean * keys - 1), abs(mean * queries - 1)) > CLOSE:
            return
        if self.trace.has_values(event):
            self._check(event, named, measure_rows(self.trace.read(event)))
        elif named and abs(mean * keys - 1) > CLOSE:
            self._wrong(event, f"rows sum to {mean * keys:.3g} on average")

    def _check(self, event: Event, named: bool, rows: Rows) -> None:
        low, high = rows.sums
        if high - 1 > CLOSE or 1 - low > CLOSE:
            if rows.columns:
                text = f"columns sum to one, rows to {low:.3g} to {high:.3g}: the softmax runs "
                self._wrong(event, text + "over the wrong axis")
            elif named:
                self._wrong(event, f"rows sum to {low:.3g} to {high:.3g}, not one")
        elif rows.typical < COLLAPSED and event.shape[-1] >= 16:
            text = (
                f"entropy is {rows.typical:.1%} of the largest: nearly every query attends to one "
            )
            self._wrong(event, text + "key; 1/√d of the scores may be missing", serious=False)
        else:
            self.sites[event.name] = rows.entropy

    def _wrong(self, event: Event, text: str, *, serious: bool = True) -> None:
        self.sites.setdefault(event.name, (0.0, 0.0))
        if len(self.found) < 2 * MAX_NAMES:
            sentence = f"Attention at {event}: {text}."
            self.found.append(Remark("attention", event.name, event.step, sentence, serious))

    def remarks(self) -> Iterator[Remark]:
        yield from self.found
        good = {name: span for name, span in self.sites.items() if span != (0.0, 0.0)}
        if good:
            low = min(least for least, _ in good.values())
            high = max(most for _, most in good.values())
            text = f"Attention probabilities at {_named(good)}: rows sum to one, entropy "
            text += f"{low:.0%} to {high:.0%} of uniform."
            yield Remark("attention", next(iter(good)), None, text, False)


def _may_be_probabilities(event: Event, stats: Stats) -> bool:
    if event.kind != "activation" or event.dtype not in _FLOATS or event.slot.startswith("in."):
        return False
    if len(event.shape) < 2 or min(event.shape[-2:]) < MIN_KEYS or stats.nan + stats.inf:
        return False
    low, high = stats.min, stats.max
    return low is not None and high is not None and low >= 0 and 0 < high <= 1 + CLOSE


def _contains(module: str, part: str) -> bool:
    return part.startswith((f"{module}.", f"{module}/"))


def _peak(stats: Stats) -> float:
    return max(abs(stats.min or 0.0), abs(stats.max or 0.0))


def _is_mask(event: Event) -> bool:
    """Whether −Inf and huge negative numbers are intended."""
    return "mask" in event.name.rsplit(".", 1)[-1].lower() or "mask" in event.slot.lower()


def _named(sites: Iterable[str]) -> str:
    names = list(sites)
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
