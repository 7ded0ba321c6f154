"""Score `lydite diff` on bugs planted in ports by people who had not read the comparison.

Where a bug lies is computed: it is the first tap, in the port's order, whose value differs from
that of the same port without the bug. A place is

    exact      the verdict names that tap, or another name of the same value
    next       that tap has no counterpart; the verdict names the first wrong one that has
    gate       the bug is one of loading, tokens, schedule or inputs, and the verdict names it
    neighbour  the verdict names the tap before or after
    wrong, agree, cannot, error    otherwise

Bugs that do not change the port's last value by more than rounding are left out.
"""

import argparse
import hashlib
import importlib
import itertools
import json
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from blind_bugs.planting import Array, Bug
from blind_bugs.rewriting import rewrite
from lydite.diff.compare import compare
from lydite.diff.findings import HypothesisFailed
from lydite.trace.events import Event
from lydite.trace.reader import Trace

ROUNDS = {
    7: ("cogvideox", "chroma", "controlnet", "umt5", "wan_vae", "dit_dpm"),
    8: ("auraflow", "kandinsky", "lumina2", "mistral", "siglip", "taesd"),
    9: ("hunyuanvideo", "cliptext", "dinov2", "mochivae"),
    10: ("ddpm_heun", "mochi", "stableaudio", "deberta"),
    11: ("zimage", "sdvae", "fluxkontext", "llamatext", "sd35", "unipc", "omnigen", "openclip"),
    12: ("t5enc", "fluxmlx", "qwenimage", "dcae", "sana", "sd15"),
    13: ("sdxl_ldm", "qwen3_text", "pixart_sigma", "ltxvideo"),
    14: ("wan_t2v", "cogview4"),
    15: ("hunyuandit", "gemma2text", "flux2_bfl", "cascade_prior"),
    17: ("kandinsky5", "ltx_vae", "hidream", "kandinsky3"),
    18: ("lumina_next", "bria_mlx"),
}
PORTS = tuple(port for ports in ROUNDS.values() for port in ports)
PORTS_WITH_MORE = (  # round 16: bugs that others planted later
    *("chroma", "lumina2", "hunyuanvideo", "zimage", "fluxkontext", "qwenimage"),
    *("sd15", "sana", "pixart_sigma", "sd35", "dcae", "qwen3_text"),
)
LIMITS = {"float32": 5e-6, "bfloat16": 1e-2}  # relative L2, about 20 times the rounding
FLOORS = {"float32": "float64", "bfloat16": "bfloat16"}
PLACES = ("exact", "next", "gate", "neighbour", "wrong", "agree", "cannot", "error")
CAUSES = ("right", "none", "wrong")
KINDS = {"ids": "ids", "schedule": "schedule", "inputs": "input"}  # gate -> kind of an event


@dataclass(frozen=True)
class Score:
    """The judged verdict on one bug."""

    port: str
    bug: str
    what: str
    place: str  # one of PLACES, or "unobservable"
    cause: str = ""
    truth: str = ""
    site: str = ""
    port_site: str = ""
    sentence: str = ""
    finding: str = ""


def error(clean: Array, other: Array) -> float:
    """Relative L2; infinite for another shape, or where only one of the two is finite."""
    if clean.shape != other.shape:
        return np.inf
    a, b = clean.astype(np.float64), other.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return np.inf
    a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30))


def content(values: Array) -> str:
    """Equal for the same numbers in any order of axes."""
    return hashlib.sha256(np.sort(values.astype(np.float64), axis=None).tobytes()).hexdigest()


@dataclass(frozen=True)
class Truth:
    """Where the port with a bug differs from the port without it."""

    bugged: Trace
    wrong: tuple[Event, ...]  # in the port's order
    parameters: tuple[str, ...]
    observable: bool

    @classmethod
    def of(cls, clean: Trace, bugged: Trace, limit: float) -> "Truth":
        pairs = [(clean.find(*event.id), event) for event in bugged.events]
        wrong = tuple(
            event
            for own, event in pairs
            if own is not None and error(clean.read(own), bugged.read(event)) > limit
        )
        before, after = clean.weights() or {}, bugged.weights() or {}
        changed = [
            name
            for name, info in before.items()
            if name not in after or (after[name].shape, after[name].hash) != (info.shape, info.hash)
        ]
        last, other = clean.read(clean.events[-1]), bugged.read(bugged.events[-1])
        return cls(bugged, wrong, tuple(changed), error(last, other) > limit)

    def same_value(self, event: Event) -> list[Event]:
        """The wrong events that hold the same numbers, under whatever name."""
        own = content(self.bugged.read(event))
        size = np.prod(event.shape)
        return [
            other
            for other in self.wrong
            if np.prod(other.shape) == size and content(self.bugged.read(other)) == own
        ]

    def distance(self, event: Event, verdict: Any) -> int:
        """How many taps lie between the event and the verdict's place."""
        order = list(dict.fromkeys((e.name, e.step, e.call) for e in self.bugged.events))
        found = [i for i, (name, step, _) in enumerate(order) if named(name, step, verdict)]
        here = order.index((event.name, event.step, event.call))
        return min((abs(here - i) for i in found), default=len(order))


def named(name: str, step: int, verdict: Any) -> bool:
    """Whether the verdict's place has this name; a name may contain the step itself."""
    own_step = re.search(r"step(\d+)", name)
    if verdict.port_site == name:
        at = verdict.step if verdict.port_step is None else verdict.port_step
        return own_step is not None or at in (None, step)
    if own_step is None or verdict.port_site is None:
        return False
    rest = name.replace(own_step[0], "").strip("/")
    return verdict.port_site.strip("/") == rest and verdict.step == int(own_step[1])


def is_at(event: Event, verdict: Any) -> bool:
    """Whether the verdict is this tap; of an input the tap's name is enough."""
    if not named(event.name, event.step, verdict):
        return False
    return event.slot.startswith("in") or verdict.port_slot in (None, "", event.slot)


def placed(verdict: Any, bug: Bug, truth: Truth, without: tuple[str, ...]) -> str:
    """The place of a verdict, one of PLACES."""
    if verdict.verdict != "diverge":
        return "agree" if verdict.verdict == "agree" else "cannot"
    if truth.wrong and any(is_at(e, verdict) for e in truth.same_value(truth.wrong[0])):
        return "exact"
    if bug.gate:
        kind = KINDS.get(bug.gate)
        names = [e.name for e in truth.wrong if e.kind == kind] if kind else truth.parameters
        text = f"{verdict.sentence} {verdict.port_site or ''} {first_finding(verdict)}"
        if any(re.search(rf"(?<![\w./]){re.escape(name)}(?!\w)", text) for name in names):
            return "gate"
    if not truth.wrong:
        return "wrong"
    if any(re.search(p, truth.wrong[0].name) for p in without):
        paired = (e for e in truth.wrong if not any(re.search(p, e.name) for p in without))
        following = next(paired, None)
        if following and any(is_at(e, verdict) for e in truth.same_value(following)):
            return "next"
    return "neighbour" if truth.distance(truth.wrong[0], verdict) <= 1 else "wrong"


def first_finding(verdict: Any) -> str:
    """Cause, evidence and fix of the first finding; empty without one."""
    if not verdict.findings:
        return ""
    finding = verdict.findings[0]
    return " | ".join(str(part) for part in (finding.cause, finding.evidence, finding.fix) if part)


def explained(verdict: Any, bug: Bug, names: set[str]) -> str:
    """Whether the finding has words of the cause; names of taps and parameters do not count.

    One that says where the error is, and claims no cause, is not wrong.
    """
    text = first_finding(verdict)
    if not text:
        return "none"
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, " ")
    if any(re.search(w, text, re.IGNORECASE) for w in bug.words):
        return "right"
    return "none" if verdict.findings[0].confidence == "observed" else "wrong"


class Bench:
    """One port in a folder of its own: the reference's traces, and the port's in each variant."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        self.module, self.folder = module, folder

    def reference(self, dtype: str) -> Trace:
        if not (self.folder / f"ref_{dtype}").exists():
            self.module.reference(self.folder, dtype)
        return Trace.open(self.folder / f"ref_{dtype}")

    def port(self, bug: str | None, **variant: Any) -> Trace:
        out = self.folder / "port" / "-".join(map(str, (bug, *variant.values())))
        if not out.exists():
            self.reference("float32")
            self.module.port(self.folder, out, bug, **variant)
        return Trace.open(out)

    def verdict(self, port: Trace, dtype: str, with_floor: bool) -> Any:
        reference = self.reference("float32")
        floor = self.reference(FLOORS[dtype]) if with_floor else None
        return compare(reference, port, floor=floor, checkpoint=self.folder / "model")

    def score(self, bug: Bug, with_floor: bool, seed: int | None, **variant: Any) -> Score:
        dtype = variant["dtype"]
        clean, bugged = self.port(None, **variant), self.port(bug.name, **variant)
        without = self.module.NO_COUNTERPART
        if seed is not None:
            written = self.folder / "rewritten"
            shutil.rmtree(written, ignore_errors=True)
            reference = self.reference("float32") if seed % 2 else None
            spelled = rewrite(clean, written / "clean", seed, reference)
            rewrite(bugged, written / "bugged", seed, reference)
            shutil.rmtree(bugged.folder)
            clean, bugged = Trace.open(written / "clean"), Trace.open(written / "bugged")
            names = [name for name in spelled if any(re.search(p, name) for p in without)]
            without = tuple(re.escape(spelled[name]) for name in names)
        truth = Truth.of(clean, bugged, LIMITS[dtype])
        first = str(truth.wrong[0]) if truth.wrong else ", ".join(truth.parameters)
        score = Score(self.module.NAME, bug.name, bug.what, "unobservable", truth=first)
        if not truth.observable:
            return score
        try:
            verdict = self.verdict(bugged, dtype, with_floor)
        except Exception as failure:  # noqa: BLE001 - a crash is a result
            return Score(
                **asdict(score) | dict(place="error", cause="none", sentence=repr(failure))
            )
        finally:
            shutil.rmtree(bugged.folder)
        place = placed(verdict, bug, truth, without)
        names = {e.name for t in (bugged, self.reference("float32")) for e in t.events}
        names = {n for n in names | set(bugged.weights() or {}) if "/" in n or "." in n}
        cause = "right" if place == "gate" else explained(verdict, bug, names)
        step = "" if verdict.step is None else f" step {verdict.step}"
        changes = dict(place=place, cause=cause, site=f"{verdict.site} [{verdict.slot}]")
        changes |= dict(port_site=f"{verdict.port_site} [{verdict.port_slot}]{step}")
        changes |= dict(sentence=verdict.sentence, finding=first_finding(verdict))
        return Score(**asdict(score) | changes)


def print_scores(title: str, scores: list[Score]) -> None:
    seen = [s for s in scores if s.place != "unobservable"]
    places, causes = Counter(s.place for s in seen), Counter(s.cause for s in seen)
    found = "  ".join(f"{p} {places[p]}" for p in PLACES if places[p])
    words = "  ".join(f"{c} {causes[c]}" for c in CAUSES)
    print(f"{title:12} {len(seen):4} bugs ({len(scores) - len(seen)} unobservable)", end="  ")
    print(f"place: {found}  cause: {words}", flush=True)


def print_miss(score: Score) -> None:
    print(f"  {score.port}/{score.bug}: {score.place}, cause {score.cause}. {score.what}")
    print(f"    truth {score.truth}; verdict {score.site}, {score.port_site}")
    print(f"    {score.sentence}\n    {score.finding or 'no finding'}", flush=True)


def score_clean(bench: Bench) -> int:
    """All variants of the port without bugs; the number of those that do not agree."""
    failed = 0
    choices = (("full", "blocks"), (True, False), LIMITS, (True, False))
    for dump, weights, dtype, with_floor in itertools.product(*choices):
        port = bench.port(None, dump=dump, weights=weights, dtype=dtype)
        verdict = bench.verdict(port, dtype, with_floor)
        failed += verdict.verdict != "agree"
        variant = f"{dump}, weights {weights}, {dtype}, floor {with_floor}"
        print(f"{bench.module.NAME}: {variant}: {verdict.verdict}", flush=True)
        if verdict.verdict != "agree":
            print(f"    {verdict.port_site}: {verdict.sentence}\n    {first_finding(verdict)}")
    return failed


def score_rewrites(bench: Bench, count: int) -> int:
    """The port without bugs, written again at random; the number of those that diverge."""
    failed = 0
    for seed, dtype in itertools.product(range(count), LIMITS):
        clean = bench.port(None, dump="full", weights=True, dtype=dtype)
        out = bench.folder / "rewritten" / f"{seed}-{dtype}"
        rewrite(clean, out, seed, bench.reference("float32") if seed % 2 else None)
        verdict = bench.verdict(Trace.open(out), dtype, with_floor=seed % 2 == 0)
        if verdict.verdict == "diverge":
            failed += 1
            print(f"{bench.module.NAME}: seed {seed}, {dtype}")
            print(f"    {verdict.port_site}: {verdict.sentence}\n    {first_finding(verdict)}")
        shutil.rmtree(out)
    print(f"{bench.module.NAME}: {failed} of {2 * count} rewritten traces diverge", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--ports", nargs="+", choices=PORTS, help="all without it")
    parser.add_argument("--only", default="", help="regular expression of bugs")
    parser.add_argument(
        "--more", action="store_true", help="bugs that were planted later (round 16)"
    )
    parser.add_argument("--dump", choices=("full", "blocks"), default="full")
    parser.add_argument("--no-weights", action="store_true")
    parser.add_argument("--no-floor", action="store_true")
    parser.add_argument("--dtype", choices=tuple(LIMITS), default="float32")
    parser.add_argument("--clean", action="store_true", help="ports without bugs, all variants")
    parser.add_argument(
        "--rewrites",
        type=int,
        default=0,
        metavar="N",
        help="ports without bugs, N times with other names, layouts and rounding, fewer values",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="bugs of ports that are written again; odd: with names of other values",
    )
    parser.add_argument("--json", type=Path, help="write all scores here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", HypothesisFailed)
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    variant = dict(dump=options.dump, weights=not options.no_weights, dtype=options.dtype)
    scores: list[Score] = []
    failed = 0
    for name in options.ports or (PORTS_WITH_MORE if options.more else PORTS):
        module = importlib.import_module(f"blind_bugs.{name}")
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            bench = Bench(module, Path(folder))
            if options.rewrites:
                failed += score_rewrites(bench, options.rewrites)
            if options.clean:
                failed += score_clean(bench)
            if options.clean or options.rewrites:
                continue
            planted = module.MORE_BUGS if options.more else module.BUGS
            bugs = [bug for bug in planted if re.search(options.only, bug.name)]
            own = [bench.score(bug, not options.no_floor, options.seed, **variant) for bug in bugs]
        print_scores(name, own)
        scores += own
    for score in scores:
        if score.place not in ("exact", "unobservable") or score.cause in ("none", "wrong"):
            print_miss(score)
    if len({score.port for score in scores}) > 1:
        print_scores("all", scores)
    if options.json:
        options.json.write_text(json.dumps([asdict(score) for score in scores], indent=1))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
