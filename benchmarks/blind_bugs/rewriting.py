"""Traces written again as another engineer might have recorded the same port."""

import random
import re
from collections import defaultdict
from math import prod
from pathlib import Path

import numpy as np

from blind_bugs.planting import Array
from lydite.trace.events import Event, Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

FREE = ("activation", "input")  # kinds whose values may be rounded and laid out in other ways


BORROWED = 0.3  # of the names, where some are those of other values in the reference


def rewrite(trace: Trace, out: Path, seed: int, reference: Trace | None = None) -> dict[str, str]:
    """Write `trace` to `out` with other names, layouts and rounding, and fewer values.

    A name keeps its layout over all steps, and two traces of one port are written alike. With a
    reference some names are those that it gives to other values. Returns the new names by the old.
    """
    names = list(dict.fromkeys(event.name for event in trace.events))
    choose = random.Random(seed)
    kept = choose.choice((1.0, 1.0, 0.7, 0.4, 0.15))
    spelling = choose.choice(("own", "own", "words", "numbers"))
    layouts = choose.choice(("own", "axes", "rows"))
    noise = choose.choice((0.0, 3e-8, 1e-7))
    step_in_name = choose.random() < 0.2
    with_weights = choose.random() < 0.6
    last = trace.events[-1].name
    present = {name for name in names if _of(seed, name).random() < kept or name == last}
    if reference is not None:
        spelled, present, step_in_name = _borrowed(trace, reference, seed), set(names), False
    else:
        spelled = _spelled(names, spelling, seed)
    generator = np.random.default_rng(seed)
    header = Header(dtype=trace.header.dtype, conditions=trace.header.conditions)
    with TraceWriter(out, header) as writer:
        for event in trace.events:
            if event.name not in present:
                continue
            value = trace.read(event)
            if event.kind in FREE and value.dtype.kind == "f":
                if event.dtype in ("f32", "f64"):
                    value = value * (1 + noise * generator.standard_normal(value.shape))
                layout = _layout(value, layouts, _of(seed, f"{event.name} {value.ndim}"))
                value = _laid_out(value.astype(np.float32), layout)
            name = spelled[event.name]
            if step_in_name and event.step:
                name = f"step{event.step}/{name}"
            writer.add(
                name,
                value,
                slot=event.slot,
                kind=event.kind,
                step=0 if step_in_name else event.step,
                dtype=_dtype(event),
            )
    if with_weights and (trace.folder / "weights.json").exists():
        (out / "weights.json").write_bytes((trace.folder / "weights.json").read_bytes())
    return spelled


def _of(seed: int, name: str) -> random.Random:
    """Choices for one name, which do not depend on the other names."""
    return random.Random(f"{seed} {name}")


def _borrowed(trace: Trace, reference: Trace, seed: int) -> dict[str, str]:
    """Names of which some are the reference's for other values of that size, in all blocks."""
    templates: dict[tuple[int, int], list[str]] = defaultdict(list)
    for event in reference.events:
        if event.slot == "out" and event.kind == "activation":
            path = event.name.rpartition("/")[2]
            key = prod(event.shape), len(re.findall(r"\d+", path))
            templates[key].append(re.sub(r"\d+", "{}", path))
    own = {event.name: event.name for event in trace.events}
    taken, given = set(own), dict[str, str]()
    for event in trace.events:
        if event.kind != "activation" or event.slot != "out":
            continue
        template = re.sub(r"\d+", "{}", event.name)
        numbers = re.findall(r"\d+", event.name)
        choices = _of(seed, template)
        if template not in given:
            possible = sorted({*templates[prod(event.shape), len(numbers)]} - set(given.values()))
            borrows = possible and choices.random() < BORROWED
            given[template] = choices.choice(possible) if borrows else template
        name = given[template].format(*numbers)
        if own[event.name] == event.name and name not in taken:
            own[event.name] = name
            taken.add(name)
    return own


def _spelled(names: list[str], spelling: str, seed: int) -> dict[str, str]:
    if spelling == "own":
        return {name: name for name in names}
    if spelling == "numbers":
        return {name: f"v{at}" for at, name in enumerate(names)}
    syllables = ["ka", "lo", "mi", "tu", "re", "sa", "no", "vi", "pe", "du"]

    def word(part: str) -> str:
        own = "".join(c for c in part if not c.isdigit())
        digits = "".join(c for c in part if c.isdigit())
        return "".join(_of(seed, own).choices(syllables, k=3)) + digits

    spelled = {name: "/".join(map(word, name.replace(".", "/").split("/"))) for name in names}
    if len(set(spelled.values())) < len(spelled):  # two words became one
        return {name: f"v{at}" for at, name in enumerate(names)}
    return spelled


def _layout(value: Array, layouts: str, choose: random.Random) -> tuple[int, ...]:
    """A permutation of the axes; empty where the first two become one."""
    axes = list(range(value.ndim))
    if layouts == "rows" and value.ndim == 3 and choose.random() < 0.5:
        return ()
    if layouts == "axes" and value.ndim == 4 and choose.random() < 0.7:
        return choose.choice(((0, 2, 3, 1), (0, 3, 1, 2)))
    return tuple(axes)


def _laid_out(value: Array, axes: tuple[int, ...]) -> Array:
    if axes or value.ndim < 2:
        return value.transpose(axes) if axes else value
    return value.reshape(-1, *value.shape[2:])


def _dtype(event: Event) -> str | None:
    return event.dtype if event.dtype != "f32" else None
