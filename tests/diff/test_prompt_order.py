"""Ports that have the negative prompt last where the reference has it first."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.divergence.write_injection import isolate
from lydite.diff.pairing.pair_traces import pair_traces
from lydite.diff.prompt_order import views
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

DRAW = np.random.default_rng(5)
W = [DRAW.standard_normal((8, 8)) / 3 for _ in range(3)]
TEXT = DRAW.standard_normal((2, 6, 8))  # without a prompt, with one
START = DRAW.standard_normal((6, 8))
RIGHT = {"name", "equal", "kind", "spelling", "rows"}  # pairs that are no guess
Events = Iterable[tuple[str, Any, int]]


def write(folder: Path, events: Events, dtype: str = "float32") -> Trace:
    with TraceWriter(folder, Header(dtype=dtype)) as writer:
        for name, value, step in events:
            kind = "input" if name.endswith("noise") else "activation"
            writer.add(name, np.asarray(value, np.float32), step=step, kind=kind)
    return Trace.open(folder)


def run(*, batched: bool, prompt_first: bool, wrong: str = "", own: bool = False) -> Events:
    """Two steps of guidance; with a port's `own` names, and one value that is `wrong`."""
    name = {"pipeline/noise": "noise", "net/a": "m.first", "net/b": "m.second",
            "pipeline/guided": "loop.eps", "pipeline/latents": "loop.x"} if own else {}  # fmt: skip
    order = (1, 0) if prompt_first else (0, 1)
    x = START
    yield name.get("pipeline/noise", "pipeline/noise"), x, 0
    for step in range(2):
        results: dict[int, Any] = {}
        taken = [np.stack([TEXT[at] for at in order])] if batched else [TEXT[at] for at in order]
        for call, text in enumerate(taken):
            a = np.tanh((x + text) @ W[0]) + (0.1 if wrong == "a" else 0)
            b = np.tanh(a @ W[1]) * (2 if wrong == "b" else 1)
            yield name.get("net/a", "net/a"), a, step
            yield name.get("net/b", "net/b"), b, step
            results |= dict(zip(order, b, strict=True)) if batched else {order[call]: b}
        guided = results[0] + 4.0 * (results[1] - results[0])
        x = x - 0.1 * guided
        yield name.get("pipeline/guided", "pipeline/guided"), guided, step
        yield name.get("pipeline/latents", "pipeline/latents"), x, step


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("wrong", "site"), [("", None), ("a", "net/a"), ("b", "net/b")])
def test_the_prompt_may_come_first(
    tmp_path: Path, batched: bool, own: bool, wrong: str, site: str | None
) -> None:
    reference = write(tmp_path / "ref", run(batched=batched, prompt_first=False))
    port = write(tmp_path / "port", run(batched=batched, prompt_first=True, own=own, wrong=wrong))
    if not wrong:
        assert {pair.how for pair in pair_traces(*views(reference, port)[:2]).pairs} <= RIGHT
    found = compare(reference, port)
    assert (found.verdict, found.site) == ("diverge" if site else "agree", site)
    if not wrong:
        (remark,) = (text for text in found.remarks if "in the other order" in text)
        assert ("halves of the batch" if batched else "calls") in remark


@pytest.mark.parametrize("batched", [True, False])
def test_the_same_order_is_left_as_it_is(tmp_path: Path, batched: bool) -> None:
    reference = write(tmp_path / "ref", run(batched=batched, prompt_first=False))
    port = write(tmp_path / "port", run(batched=batched, prompt_first=False, wrong="b", own=True))
    _, ordered, remarks = views(reference, port)
    assert not remarks and not ordered.exchanged and ordered.events == port.events


def test_a_port_that_exchanges_the_prompts_itself_has_a_bug(tmp_path: Path) -> None:
    """It runs them one by one as the reference has them in its batch, and then stacks them."""

    def guided(pair: Any) -> Any:
        return pair[0] + 4.0 * (pair[1] - pair[0])

    parts = [np.tanh(TEXT @ w) for w in W]
    theirs = [(f"net/{n}", part, 0) for n, part in enumerate(parts)] + [("net/all", parts[2], 0)]
    theirs += [("pipeline/guided", guided(parts[2]), 0)]
    own = [(f"m.{n}", part[at], 0) for at in (0, 1) for n, part in enumerate(parts)]
    reference = write(tmp_path / "ref", theirs)
    for order, wrong in (((0, 1), ()), ((1, 0), ("stacked", "guided"))):
        stacked = parts[2][list(order)]
        ends = [("stacked", stacked, 0), ("guided", guided(stacked), 0)]
        found = compare(reference, write(tmp_path / f"port{order}", [*own, *ends]))
        assert found.verdict == ("diverge" if wrong else "agree")
        assert tuple(row.port_site for row in found.rows if row.wrong) == wrong


@pytest.mark.parametrize("batched", [True, False])
def test_a_rerun_gets_the_values_in_the_order_of_the_port(tmp_path: Path, batched: bool) -> None:
    reference = write(tmp_path / "ref", run(batched=batched, prompt_first=False))
    events = list(run(batched=batched, prompt_first=True))
    port = write(tmp_path / "port", events)

    def rerun(values: Path, out: Path) -> None:
        with Trace.open(values) as injected:
            for event in injected.events:
                own = port.find(*event.id)
                assert own is not None
                assert np.allclose(injected.read(event), port.read(own), atol=1e-5), event
        write(out, events)

    found = isolate(reference, port, rerun, tmp_path)
    assert found.verdict == "agree" and not found.sources


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_complex_rotations_are_cosines_beside_sines(tmp_path: Path, wrong: float) -> None:
    angles = DRAW.uniform(0, 3, (1, 7, 4))
    after = DRAW.standard_normal((7, 5))
    for side in ("ref", "port"):
        with TraceWriter(tmp_path / side, Header(dtype="float32")) as writer:
            if side == "ref":
                writer.add("net/att", np.exp(1j * angles).astype(np.complex64), slot="in.freqs")
            else:
                turned = angles[0] * (1 + wrong)
                table = np.stack([np.cos(turned), np.sin(turned)], -1)
                writer.add("net/att", table.astype(np.float32), slot="in.freqs")
            writer.add("net/att", after + (wrong if side == "port" else 0))
    reference, port = (Trace.open(tmp_path / side) for side in ("ref", "port"))
    found = compare(reference, port)
    assert [row.wrong for row in found.rows] == [wrong > 0] * 2
    assert found.slot == ("in.freqs" if wrong else None)


def test_what_each_call_computes_again_is_no_batch(tmp_path: Path) -> None:
    """A table of half the width in two calls has as many numbers as the reference's."""
    half = np.cos(np.outer(np.arange(22), 0.5 ** np.arange(8)))
    last = DRAW.standard_normal((2, 5, 8))
    reference = write(tmp_path / "ref", [("net/cos", np.hstack([half, half])[None], 0),
                                         ("net/last", last, 0)])  # fmt: skip
    own = [("m.cos", half, 0), ("m.last", last[0], 0), ("m.cos", half, 0), ("m.last", last[1], 0)]
    found = compare(reference, write(tmp_path / "port", own))
    assert found.verdict == "agree" and not any(
        "calls joined" in row.note for row in found.rows if row.site == "net/cos"
    )


def test_prompts_of_two_lengths_whose_values_are_wrong(tmp_path: Path) -> None:
    lengths = {"reference": (7, 4), "port": (4, 7)}
    traces = [
        write(tmp_path / side, [("net/a", DRAW.standard_normal((2, n, 8)), 0) for n in order])
        for side, order in lengths.items()
    ]
    _, port, remarks = views(*traces)
    assert [event.call for event in port.events] == [1, 0] and "calls" in remarks[0]
    assert views(traces[0], traces[0])[2] == ()


def test_a_result_that_joins_two_calls_has_the_order_of_the_reference(tmp_path: Path) -> None:
    """Nothing is computed from it that could take another order into account."""
    parts = [np.tanh(TEXT @ w) for w in W[:2]]
    calls = [(f"{{}}{n}", part[at], 0) for at in (0, 1) for n, part in enumerate(parts)]
    sides: list[Trace] = []
    for side, order in (("net/", [1, 0]), ("m.", [1, 0]), ("m.", [0, 1])):
        events = [(name.format(side), value, 0) for name, value, _ in calls]
        events.append((f"{side}all", parts[1][order], 0))
        sides.append(write(tmp_path / str(len(sides)), events))
    reference, right, wrong = sides
    assert compare(reference, right).verdict == "agree"
    found = compare(reference, wrong)
    assert (found.verdict, found.port_site) == ("diverge", "m.all")


def test_a_wrong_value_that_is_near_to_both_orders_shows_none(tmp_path: Path) -> None:
    """The two halves differ by 6 %, and half of that is wrong."""
    one = DRAW.standard_normal((6, 8))
    near, wrong = np.stack([one, 1.06 * one]), np.stack([1.03 * one] * 2)
    traces = [
        write(tmp_path / side, [(f"{side}/a", TEXT[order], 0), (f"{side}/b", value, 0)])
        for side, order, value in (("net", [0, 1], near), ("port", [1, 0], wrong))
    ]
    assert "halves of the batch" in views(*traces)[2][0]
