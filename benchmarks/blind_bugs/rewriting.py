"""Correct traces written again as another engineer might have recorded the same port."""

import random
from pathlib import Path

import numpy as np

from blind_bugs.planting import Array
from lydite.trace.events import Event, Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

FREE = ("activation", "input")  # kinds whose values may be rounded and laid out in other ways


def rewrite(trace: Trace, out: Path, seed: int) -> str:
    """Write `trace` to `out` with other names, layouts and rounding, and fewer values.

    A name keeps its layout over all steps. Returns what was changed.
    """
    choose = random.Random(seed)
    names = list(dict.fromkeys(event.name for event in trace.events))
    kept = choose.choice((1.0, 1.0, 0.7, 0.4, 0.15))
    spelling = choose.choice(("own", "own", "words", "numbers"))
    layouts = choose.choice(("own", "axes", "rows"))
    noise = choose.choice((0.0, 3e-8, 1e-7))
    step_in_name = choose.random() < 0.2
    with_weights = choose.random() < 0.6
    last = trace.events[-1].name
    present = {name for name in names if choose.random() < kept or name == last}
    spelled = _spelled(names, spelling, choose)
    generator = np.random.default_rng(seed)
    permutations: dict[tuple[str, int], tuple[int, ...]] = {}
    header = Header(dtype=trace.header.dtype, conditions=trace.header.conditions)
    with TraceWriter(out, header) as writer:
        for event in trace.events:
            if event.name not in present:
                continue
            value = trace.read(event)
            if event.kind in FREE and value.dtype.kind == "f":
                if event.dtype in ("f32", "f64"):
                    value = value * (1 + noise * generator.standard_normal(value.shape))
                key = event.name, value.ndim
                if key not in permutations:
                    permutations[key] = _layout(value, layouts, choose)
                value = _laid_out(value.astype(np.float32), permutations[key])
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
    changes = f"kept {kept}, names {spelling}, layout {layouts}, noise {noise}"
    return f"{changes}, step in name {step_in_name}, weights {with_weights}"


def _spelled(names: list[str], spelling: str, choose: random.Random) -> dict[str, str]:
    if spelling == "own":
        return {name: name for name in names}
    if spelling == "numbers":
        return {name: f"v{at}" for at, name in enumerate(names)}
    syllables = ["ka", "lo", "mi", "tu", "re", "sa", "no", "vi", "pe", "du"]
    words: dict[str, str] = {}

    def word(part: str) -> str:
        own = "".join(c for c in part if not c.isdigit())
        digits = "".join(c for c in part if c.isdigit())
        if own not in words:
            words[own] = "".join(choose.choices(syllables, k=3))
        return words[own] + digits

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
