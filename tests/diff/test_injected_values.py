"""Injection: every bug is one wrong place, whatever it spoils downstream."""

from pathlib import Path

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.divergence.write_injection import isolate, write_injection
from lydite.diff.measure.rounding import UNIT
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.recorder import Injection
from lydite.trace.taps import injection, recording, set_step, tap
from lydite.trace.writer import TraceWriter
from support.toy_transformer import Options, record

SOURCES = {
    "transpose": ["net/blocks.2.attn.to_v"],
    "swap": ["net/blocks.2.attn.to_k", "net/blocks.2.attn.to_v"],
    "root": ["net/blocks.2.attn"],
    "gelu": ["net/blocks.2.mlp.act"],
    "bias": ["net/blocks.2.mlp"],
    "rms": ["net/blocks.2.norm"],
    "unbiased": ["net/blocks.2.norm"],
    "": [],
    "stage": [],
}


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize("bug", SOURCES)
def test_one_bug_is_one_wrong_place(bug: str, channels_first: bool, tmp_path: Path) -> None:
    def run(folder: Path, inject: Path | None) -> Path:
        options = Options(
            bug=bug, channels_first=channels_first, shuffle=True, inject=inject, steps=1
        )
        return record(folder, options)

    reference = Trace.open(record(tmp_path / "ref", side="reference", steps=1))
    port = Trace.open(run(tmp_path / "port", None))
    found = isolate(reference, port, lambda values, out: _none(run(out, values)), tmp_path)
    assert [row.site for row in found.sources] == SOURCES[bug]
    assert found.verdict == ("diverge" if SOURCES[bug] else "agree")


def _none(_: object) -> None:
    return None


@pytest.mark.parametrize(("bug", "sources"), [("", []), ("transpose", SOURCES["transpose"])])
def test_a_coarse_port_is_held_against_the_references_rounding_at_each_place(
    bug: str, sources: list[str], tmp_path: Path
) -> None:
    reference = Trace.open(record(tmp_path / "ref", side="reference"))
    coarse = Options(side="reference", dtype="bfloat16", inject=tmp_path / "ref")
    floor = Trace.open(record(tmp_path / "floor", coarse))

    def run(folder: Path, inject: Path | None) -> None:
        record(folder, Options(dtype="bfloat16", bug=bug, shuffle=True, inject=inject))

    run(tmp_path / "port", None)
    port = Trace.open(tmp_path / "port")
    found = isolate(reference, port, lambda values, out: run(out, values), tmp_path, floor=floor)
    assert [row.site for row in found.sources] == sources
    assert found.floor_source.startswith("measured")
    # nothing adds up: the last value is judged as strictly as the first
    limits = [row.limit / UNIT["bf16"] for row in found.rows if row.limit and row.dtype == "bf16"]
    assert max(limits) < 16


def test_a_little_rounding_of_a_correct_port_is_no_wrong_place(tmp_path: Path) -> None:
    """Attention outputs at 4e-6 were listed for a port that agrees."""
    draw = np.random.default_rng(0)
    values = {f"net/layer{n}": draw.standard_normal((4, 32)).astype("f4") for n in range(6)}

    def write(folder: Path, error: float) -> Trace:
        with TraceWriter(folder, Header(dtype="float32")) as writer:
            for name, value in values.items():
                noise = error * draw.standard_normal(value.shape).astype("f4")
                writer.add(name, value * (1 + noise))
        return Trace.open(folder)

    def sources(error: float) -> list[str]:
        folder = tmp_path / str(error)
        reference, port = write(folder / "ref", 0.0), write(folder / "port", 1e-7)
        found = isolate(reference, port, lambda _, out: _none(write(out, error)), folder)
        return [row.site for row in found.sources]

    assert sources(4e-6) == []
    assert sources(0.1) == list(values)


def test_an_error_that_is_carried_on_belongs_to_its_first_place(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    given, attended, fed = (draw.standard_normal((2, 6, 8)).astype("f4") for _ in range(3))

    def write(folder: Path, gate: float, own: float) -> Trace:
        with TraceWriter(folder, Header()) as writer:
            after = given + gate * attended
            writer.add("block.norm", after, slot="in.0")
            writer.add("block", (after + fed).swapaxes(1, 2))  # its copy of `after`, not the norm's
            writer.add("head", fed * own)
        return Trace.open(folder)

    reference = write(tmp_path / "reference", 0.5, 1.0)
    carried = compare(reference, write(tmp_path / "carried", 0.7, 1.0), isolated=True)
    assert [row.site for row in carried.sources] == ["block.norm"]
    assert "same error as block.norm [in.0]" in {row.note for row in carried.rows}
    both = compare(reference, write(tmp_path / "both", 0.7, 1.1), isolated=True)
    assert [row.site for row in both.sources] == ["block.norm", "head"]
    # the same code at every step is one place, however often it is wrong
    assert len(both.sources) == len({(row.site, row.slot) for row in both.sources})


def test_errors_of_several_places_are_told_apart(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    right = {name: draw.standard_normal((2, 9)).astype("f4") for name in "abcdef"}
    gaps = {name: 0.3 * draw.standard_normal((2, 9)).astype("f4") for name in "abc"}
    carried = {"d": "b", "e": "a", "f": "c"}  # each has the error of one before it

    def write(folder: Path, errors: dict[str, str]) -> Trace:
        with TraceWriter(folder, Header()) as writer:
            for name, value in right.items():
                writer.add(f"net/{name}", value + gaps.get(errors.get(name, ""), 0))
        return Trace.open(folder)

    wrong = {**{name: name for name in "abc"}, **carried}
    found = compare(write(tmp_path / "ref", {}), write(tmp_path / "port", wrong), isolated=True)
    assert [row.site for row in found.sources] == ["net/a", "net/b", "net/c"]
    notes = {row.site: row.note for row in found.rows}
    for name, source in carried.items():
        assert notes[f"net/{name}"] == f"same error as net/{source}"


def test_a_wrong_input_is_a_place_too_though_it_is_put_right(tmp_path: Path) -> None:
    def write(folder: Path, noise: float) -> Trace:
        with TraceWriter(folder, Header()) as writer:
            writer.add("noise", np.arange(6, dtype="f4") + noise, kind="input")
            writer.add("net", np.arange(6, dtype="f4"))
        return Trace.open(folder)

    found = compare(write(tmp_path / "a", 0.0), write(tmp_path / "b", 0.5), isolated=True)
    assert (found.verdict, found.site) == ("diverge", "noise")
    assert [row.site for row in found.sources] == ["noise"]


def test_calls_that_make_up_a_batch_get_their_own_rows(tmp_path: Path) -> None:
    batch = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("f4")
    with TraceWriter(tmp_path / "reference", Header()) as writer:
        writer.add("net", batch)
    with TraceWriter(tmp_path / "port", Header()) as writer:
        for row in (1, 0):  # the prompt first
            writer.add("net", batch[row : row + 1] * 1.01)
    reference, port = Trace.open(tmp_path / "reference"), Trace.open(tmp_path / "port")
    write_injection(reference, port, tmp_path / "values")
    with Trace.open(tmp_path / "values") as values:
        for call, row in enumerate((1, 0)):
            event = values.find("net", call=call)
            assert event and np.array_equal(values.read(event), batch[row : row + 1])


def test_a_call_without_a_counterpart_does_not_move_the_others(tmp_path: Path) -> None:
    first, second = np.random.default_rng(0).standard_normal((2, 5)).astype("f4")
    with TraceWriter(tmp_path / "reference", Header()) as writer:
        writer.count("net", "out", 0)  # a call that was not recorded
        writer.add("net", second)
    with TraceWriter(tmp_path / "port", Header()) as writer:
        writer.add("net", first)
        writer.add("net", second)
    reference, port = Trace.open(tmp_path / "reference"), Trace.open(tmp_path / "port")
    write_injection(reference, port, tmp_path / "values")
    with Trace.open(tmp_path / "values") as values:
        assert values.find("net", call=0) is None
        event = values.find("net", call=1)
        assert event and np.array_equal(values.read(event), second)


@pytest.mark.parametrize("bug", ["", "mix", "grow", "step"])
def test_a_port_that_uses_taps_needs_nothing_more(bug: str, tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((2, 8, 8)).astype("f4") / 3

    def port(bug: str) -> None:
        x = np.linspace(-1, 1, 32, dtype="f4").reshape(4, 8)
        for step in range(3):
            set_step(step)
            mixed = tap("mix", x @ (weights[0].T if bug == "mix" else weights[0]))
            grown = tap("grow", mixed @ weights[1] * (1.01 if bug == "grow" else 1))
            x = tap("latents", x - grown / (2 if bug == "step" else 3))

    def run(folder: Path, bug: str, inject: Injection | None = None) -> None:
        with recording(folder, inject=inject):
            port(bug)

    def rerun(values: Path, out: Path) -> None:
        run(out, bug, injection(values, "*:*"))

    run(tmp_path / "reference", "")
    run(tmp_path / "port", bug)
    with Trace.open(tmp_path / "reference") as theirs, Trace.open(tmp_path / "port") as ours:
        found = isolate(theirs, ours, rerun, tmp_path)
    guilty = {"": [], "mix": ["mix"], "grow": ["grow"], "step": ["latents"]}
    assert [row.site for row in found.sources] == guilty[bug]
