"""Chapter: prompts the model has not seen, judged, with every miss shown."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lydite import embedded
from lydite.demo.chapter import DemoChapter, Result, Settings
from lydite.demo.demo import Demo, Drawn, Tick
from lydite.demo.scene_text import ATTRIBUTE_NAMES, prompt_text, reading_text
from lydite.embedded.captions import Prompt, held_out_prompts
from lydite.evaluate.judge import load_judge
from lydite.evaluate.prompt_accuracy import Reading, check
from lydite.report.contact_sheets import Tile, contact_sheet, png_bytes
from lydite.report.page import (
    Block,
    Callout,
    Chapter,
    Exhibit,
    Exhibits,
    Fact,
    Figure,
    Figures,
    Fold,
    Table,
)

TITLE = "Prompts it has not seen, judged"


@dataclass(frozen=True, eq=False)
class Judged:
    """A picture of a held-out prompt, what the judge read, and which words it matches."""

    prompt: Prompt
    drawn: Drawn
    reading: Reading
    marks: Mapping[str, list[bool]]  # per attribute, for each time the prompt states it

    @property
    def missed(self) -> tuple[str, ...]:
        """The attributes that are not as the prompt says."""
        return tuple(name for name, right in self.marks.items() if not all(right))


def judged(demo: Demo, tick: Tick) -> tuple[Judged, ...]:
    """Draw every held-out prompt, prompt i from seed i, and have the judge read the pictures."""
    prompts = held_out_prompts(demo.settings.held_out, demo.settings.held_out_seed)
    drawn = [
        demo.draw(demo.plan(prompt.text), seed, f"held_out/{seed + 1:02d}.png", tick)
        for seed, prompt in enumerate(prompts)
    ]
    judge = load_judge(embedded.MODEL / "judge.safetensors")
    readings = judge.readings(np.stack([picture.pixels for picture in drawn]))
    return tuple(
        Judged(prompt, picture, reading, check(reading, prompt.says))
        for prompt, picture, reading in zip(prompts, drawn, readings, strict=True)
    )


def run(demo: Demo, tick: Tick) -> Result:
    """Judge, and show the misses first."""
    results = judged(demo, tick)
    misses = tuple(one for one in results if one.missed)
    kept = len(results) - len(misses)
    tiles = [Tile(one.drawn.pixels, one.prompt.text, bool(one.missed)) for one in results]
    path = demo.save("held_out.png", contact_sheet(tiles, columns=9, side=160, text=12))
    lines = [f"{kept} of {len(results)} match the prompt completely: {path}"]
    lines += [f"missed {_names(one)}: “{one.prompt.text}”" for one in misses]
    lead = (
        f"{len(results)} prompts, those of several objects with pairs of objects that training "
        "never showed. A second small network, the judge, reads shapes, colours, sizes and places "
        "off each picture. A prompt counts as matched only when all that it says is there at once."
    )
    everything = Figures(tuple(_figure(one) for one in results), size="small")
    blocks: list[Block] = [
        _missed(misses, len(results)),
        _table(results),
        Fold(f"All {len(results)} pictures, misses framed", (everything,)),
    ]
    if misses:
        blocks.insert(1, Exhibits(tuple(_exhibit(one) for one in misses)))
    fact = Fact(f"{kept} / {len(results)}", "held-out prompts matched completely")
    return Result(tuple(lines), Chapter(TITLE, lead, tuple(blocks)), fact)


def _missed(misses: tuple[Judged, ...], total: int) -> Callout:
    if not misses:
        return Callout(f"None of the {total} was missed.", "good")
    return Callout(
        f"{len(misses)} of {total} missed something. The judge may be wrong too; look for "
        "yourself.",
        "warn",
    )


def _table(results: tuple[Judged, ...]) -> Table:
    rows: list[tuple[str, ...]] = []
    for name, words in ATTRIBUTE_NAMES.items():
        marks = [mark for one in results for mark in one.marks[name]]
        if marks:
            rows.append((words, str(sum(marks)), str(len(marks)), f"{np.mean(marks):.0%}"))
    right = sum(not one.missed for one in results)
    rows.append(
        ("everything at once", str(right), str(len(results)), f"{right / len(results):.0%}")
    )
    return Table(
        ("what prompts say", "right", "times stated", "share"),
        tuple(rows),
        numeric=frozenset({1, 2, 3}),
    )


def _exhibit(one: Judged) -> Exhibit:
    details = (
        ("missed", _names(one)),
        ("asked", prompt_text(one.prompt.says)),
        ("the judge reads", reading_text(one.reading, one.prompt.says)),
        ("file", f"held_out/{one.drawn.path.name}, seed {one.drawn.seed}"),
    )
    return Exhibit(_figure(one), f"“{one.prompt.text}”", details)


def _figure(one: Judged) -> Figure:
    return Figure(
        png_bytes(one.drawn.pixels),
        one.prompt.text,
        one.prompt.text,
        f"missed {_names(one)}" if one.missed else "",
        "bad" if one.missed else "note",
    )


def _names(one: Judged) -> str:
    return ", ".join(ATTRIBUTE_NAMES[name] for name in one.missed)


def _steps(settings: Settings) -> int:
    return settings.held_out * settings.steps


CHAPTER = DemoChapter(TITLE, _steps, run)
