"""The port's first wrong value is named where nothing but its place pairs it."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.divergence.earlier import EarlierValues, same_role
from lydite.diff.divergence.search import DivergenceSearch
from lydite.diff.measure.aligned import Layouts
from lydite.diff.measure.rows import GATED, Comparison, measure_rows
from lydite.diff.pairing.exchanged import without_exchanges
from lydite.diff.pairing.pair_names import compatible
from lydite.diff.pairing.pair_traces import pair_traces
from lydite.diff.pairing.paired_events import Pair
from lydite.diff.read_evidence import EvidenceReader
from lydite.diff.reference_parameters import ParameterValues
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

WIDTH, TOKENS = 16, 12


def write(folder: Path, events: Iterable[tuple[Any, ...]]) -> Trace:
    """Events of (name, value), (name, value, slot), with a step and with a kind."""
    with TraceWriter(folder, Header(dtype="float32")) as writer:
        for name, value, *place in events:
            known = dict(zip(("slot", "step", "kind"), place, strict=False))
            kept = value if np.iscomplexobj(value) else value.astype(np.float32)
            writer.add(name, kept, **known)
    return Trace.open(folder)


def network(folder: Path, *, port: bool, order: Iterable[int] = (0, 1, 2)) -> Trace:
    """Three blocks of a norm and a layer, the layers of the port under names of its own."""
    draw = np.random.default_rng(0)
    layers = draw.standard_normal((3, WIDTH, 2 * WIDTH)) / 4
    back = draw.standard_normal((3, 2 * WIDTH, WIDTH)) / 4
    x = draw.standard_normal((2, TOKENS, WIDTH))
    events: list[tuple[Any, ...]] = [("start", x)] if port else [("net", x, "in.0")]
    for number, block in enumerate(order):
        wide = np.tanh(x @ layers[block])
        out = wide @ back[block]
        if port:
            events += [(f"b{block}.up", x @ layers[block]), (f"b{block}.down", out)]
        else:
            path = f"net/blocks.{number}"
            events += [(f"{path}.fc1", x, "in.0"), (f"{path}.fc1", x @ layers[block])]
            events += [(f"{path}.fc2", wide, "in.0"), (f"{path}.fc2", out)]
        x = x + out
    last = x @ layers[0]
    events += [("end", last)] if port else [("net/last", x, "in.0"), ("net/last", last)]
    return write(folder, events)


def test_a_block_that_runs_again_in_place_of_the_next(tmp_path: Path) -> None:
    reference = network(tmp_path / "r", port=False)
    assert compare(reference, network(tmp_path / "c", port=True)).verdict == "agree"
    verdict = compare(reference, network(tmp_path / "p", port=True, order=(0, 1, 1)))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "b1.up")


def test_tokens_that_are_left_out_are_named_where_they_are(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    text, extra = draw.standard_normal((2, 9, WIDTH)), draw.standard_normal((2, 3, WIDTH))
    layer, mixer = draw.standard_normal((2, WIDTH, WIDTH)) / 4

    def run(folder: Path, *, port: bool, missing: bool = False) -> Trace:
        embedded = text @ layer
        joined = embedded if missing else np.concatenate([extra, embedded], 1)
        mixed = np.tanh(joined) @ mixer
        pooled = np.repeat(mixed.mean(1, keepdims=True), 4, 1)
        if port:
            names = ["text", "embedded", "joined", "mixed", "pooled"]
            return write(folder, zip(names, [text, embedded, joined, mixed, pooled], strict=True))
        events = [("net", text, "in.0"), ("net/embed", text, "in.0"), ("net/embed", embedded)]
        events += [("net/mix", joined, "in.0")]
        return write(
            folder, [*events, ("net/mix", mixed), ("net/pool", mixed, "in.0"), ("net/pool", pooled)]
        )

    reference = run(tmp_path / "r", port=False)
    assert compare(reference, run(tmp_path / "c", port=True)).verdict == "agree"
    verdict = compare(reference, run(tmp_path / "p", port=True, missing=True))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "joined")


def test_patches_of_the_inputs_in_another_order(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    layer, mixer = draw.standard_normal((2, WIDTH, 2 * WIDTH)) / 4
    latents = [draw.standard_normal((4, 6, WIDTH // 4))] * 2
    gate = draw.standard_normal(2 * WIDTH)

    def run(folder: Path, *, port: bool, columns_first: bool = False) -> Trace:
        events: list[tuple[Any, ...]] = []
        for step, x in enumerate(latents):
            given = (x[None], "out", step, "input")
            patches = x.reshape(2, 2, 3, 2, -1).transpose(
                0, 2, *((3, 1) if columns_first else (1, 3)), 4
            )
            tokens = patches.reshape(-1, WIDTH)
            embedded = tokens @ layer
            wide = np.tanh(embedded * gate)
            mixed = wide @ mixer.T
            if port:
                events.append(("image", *given))
                own = {"x": x, "tokens": tokens, "embedded": embedded, "gate": gate, "mixed": mixed}
                events += [(name, value, "out", step) for name, value in own.items()]
            else:
                events += [("pipeline/latents", *given), ("net", x[None], "in.0", step)]
                events += [("net/embed", tokens[None], "in.0", step)]
                events += [("net/embed", embedded[None], "out", step)]
                events += [("net/gate", gate[None], "out", step)]
                events += [("net/mix", wide[None], "in.0", step)]
                events += [("net/mix", mixed[None], "out", step)]
        return write(folder, events)

    reference = run(tmp_path / "r", port=False)
    assert compare(reference, run(tmp_path / "c", port=True)).verdict == "agree"
    verdict = compare(reference, run(tmp_path / "p", port=True, columns_first=True))
    assert (verdict.verdict, verdict.port_site, verdict.step) == ("diverge", "tokens", 0)
    assert "between the inputs of the run and it" in verdict.sentence


def test_an_input_is_recorded_before_all_that_is_computed(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    layer, mixer = draw.standard_normal((2, WIDTH, WIDTH)) / 4
    x, turns = draw.standard_normal((TOKENS, WIDTH)), draw.standard_normal((3, WIDTH))

    def run(folder: Path, *, port: bool, first: int = 0) -> Trace:
        ids = np.stack(np.broadcast_arrays(0, *np.divmod(np.arange(TOKENS), 4)), -1)
        ids = ids + np.array([first, 0, 0])
        embedded, table = x @ layer, np.cos(ids @ turns)
        mixed = (embedded * table) @ mixer
        if port:
            own = [("x", x), ("ids", ids, "out", 0, "input"), ("embedded", embedded)]
            return write(folder, [*own, ("table", table), ("mixed", mixed)])
        events = [("net", x, "in.0"), ("net/embed", x, "in.0"), ("net/embed", embedded)]
        events += [("net/positions", ids, "in.0"), ("net/positions", table)]
        return write(folder, [*events, ("net/mix", embedded * table, "in.0"), ("net/mix", mixed)])

    reference = run(tmp_path / "r", port=False)
    assert compare(reference, run(tmp_path / "c", port=True)).verdict == "agree"
    verdict = compare(reference, run(tmp_path / "p", port=True, first=1))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "ids")
    assert verdict.site == "net/positions"


def test_a_right_time_is_not_blamed_for_what_is_made_of_it(tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    layer, mixer = (draw.standard_normal((width, WIDTH)) / 4 for width in (8, WIDTH))
    x, waves = draw.standard_normal((TOKENS, WIDTH)), np.arange(8)

    def run(folder: Path, *, port: bool, stale: bool = False) -> Trace:
        events: list[tuple[Any, ...]] = [
            ("prompt" if port else "pipeline/prompt", waves, "out", 0, "input")
        ]
        for step, time in enumerate(np.array([[0.0], [0.25]])):
            cosines = np.cos((0 if stale else 10 * time) * waves)
            scale = cosines @ layer
            mixed = (x + step) * scale @ mixer
            if port:
                events.append(("moment", time, "out", step, "schedule"))
                own = {"x": x + step, "scale": scale, "mixed": mixed}
                events += [(name, value, "out", step) for name, value in own.items()]
                continue
            events += [("net", np.repeat(time, 2), "in.1", step), ("net", x + step, "in.0", step)]
            events += [("net", waves, "in.2", step)]
            events += [("net/time", np.repeat(10 * time, 2), "in.0", step)]
            events += [("net/time.fc", cosines, "in.0", step)]
            events += [("net/time.fc", scale, "out", step), ("net/time", scale, "out", step)]
            events += [("net/mix", (x + step) * scale, "in.0", step)]
            events += [("net/mix", mixed, "out", step)]
        return write(folder, events)

    reference = run(tmp_path / "r", port=False)
    assert compare(reference, run(tmp_path / "c", port=True)).verdict == "agree"
    verdict = compare(reference, run(tmp_path / "p", port=True, stale=True))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "scale")


def test_a_wrong_value_has_the_place_of_its_role_in_earlier_blocks() -> None:
    def pair(number: int, word: str = "rot") -> Any:
        event = SimpleNamespace(name=f"net.{number}.q", slot="in.0", i=number)
        own = SimpleNamespace(name=f"b.{number}.{word}", slot="out", i=number)
        return SimpleNamespace(event=event, port_event=own)

    others = [pair(0), pair(1, "other"), pair(3)]
    assert same_role(pair(2), others) == others[:1]
    plain: Any = SimpleNamespace(
        event=pair(2).event, port_event=SimpleNamespace(name="rot", slot="out")
    )
    assert same_role(plain, others) == []


@pytest.mark.parametrize(
    ("loaded", "right"),
    [
        ("0q>0q 0k>0k 1q>1k 1k>1q 2q>2q 2k>2k", "0q>0q 0k>0k 1q>1q 1k>1k 2q>2q 2k>2k"),
        ("0q>0k 0k>0q 1q>1q 1k>1k", "0q>0q 0k>0k 1q>1q 1k>1k"),  # names decide
        ("0w>1w 1w>2w 2w>0w", "0w>0w 1w>1w 2w>2w"),
        ("0w>2w 1w>1w 2w>0w", "0w>2w 1w>1w 2w>0w"),  # counted from the other end
        ("1w>0w 2w>1w 3w>2w", "1w>0w 2w>1w 3w>2w"),
        ("0q>0q 0k>0k 1q>1k 1k>2q", "0q>0q 0k>0k 1q>1k 1k>2q"),  # no exchange
    ],
)
def test_exchanged_parameters(loaded: str, right: str) -> None:
    def modules(text: str) -> dict[str, str]:
        pairs = (word.split(">") for word in text.split())
        return {f"b.{a[0]}.w{a[1]}": f"net.{b[0]}.to_{b[1]}" for a, b in pairs}

    assert without_exchanges(modules(loaded)) == modules(right)


@pytest.mark.parametrize("runs_from_end", [False, True])
def test_two_blocks_are_exchanged_unless_they_run_in_that_order(runs_from_end: bool) -> None:
    loaded = {"b.0.w": "net.1.to", "b.1.w": "net.0.to"}
    own = {"b.0.w": 2 if runs_from_end else 1, "b.1.w": 1 if runs_from_end else 2}
    found = without_exchanges(loaded, (own, {"net.0.to": 5, "net.1.to": 9}))
    assert found == (loaded if runs_from_end else {"b.0.w": "net.0.to", "b.1.w": "net.1.to"})


def test_complex_rotations_are_no_counterpart_of_cosines(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    x = draw.standard_normal((2, TOKENS, WIDTH))
    angle = draw.uniform(0, 3, (2, TOKENS, WIDTH // 2))
    turned = x.reshape(2, TOKENS, -1, 2) @ [1, 1j] * np.exp(1j * angle)
    q = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    out = np.tanh(q)
    reference = write(
        tmp_path / "r",
        [
            ("net/norm", x),
            ("net/attn", x, "in.0"),
            ("net/attn", np.exp(1j * angle).astype(np.complex64), "in.1"),
            ("net/attn.sdpa", q, "in.0"),
            ("net/attn.sdpa", out),
            ("net/attn", out),
        ],
    )
    port = write(
        tmp_path / "p",
        [
            ("n", x),
            ("a", x, "in.0"),
            ("a", np.cos(angle), "in.1"),
            ("a", np.sin(angle), "in.2"),
            ("a.rotary", x, "in.x"),
            ("a.rotary", q),
            ("a", out),
        ],
    )
    assert compare(reference, port).verdict == "agree"
    pairs = {
        (str(pair.port_event.site), str(pair.event.site))
        for pair in pair_traces(reference, port).pairs
    }
    table, rotations = port.find("a", "in.1"), reference.find("net/attn", "in.1")
    assert table and rotations and table.shape == rotations.shape
    assert not compatible(table, [rotations])
    assert ("a.rotary [in.x]", "net/attn.sdpa [in.0]") not in pairs  # its input is another value


def test_results_of_the_first_of_two_networks(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    x, y = draw.standard_normal((2, 2, TOKENS, WIDTH))
    layers = draw.standard_normal((3, WIDTH, WIDTH)) / 4
    states = [x]
    for layer in layers:
        states.append(np.tanh(states[-1] @ layer))

    def run(folder: Path, taken: int, *, port: bool) -> Trace:
        events: list[tuple[Any, ...]] = []
        for n, layer in enumerate(layers):
            name = f"t{n}" if port else f"text/layers.{n}"
            events += [] if port else [(name, states[n], "in.0")]
            events += [(name, np.tanh(states[n] @ layer))]
        events += [("t.prompt" if port else "pipeline/prompt_embeds", states[taken])]
        events += [] if port else [("image/layer", y, "in.0")]
        return write(folder, [*events, ("v" if port else "image/layer", y @ layers[0])])

    reference = run(tmp_path / "r", 2, port=False)
    assert compare(reference, run(tmp_path / "c", 2, port=True)).verdict == "agree"
    verdict = compare(reference, run(tmp_path / "p", 3, port=True))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "t.prompt")


def test_fused_values_of_steps_that_are_counted_from_one(tmp_path: Path) -> None:
    """A value before the first step is at step 0: the numbers of the steps say nothing."""
    draw = np.random.default_rng(5)
    steps = draw.standard_normal((3, 2, 2, TOKENS, WIDTH))
    noise = draw.standard_normal((2, TOKENS, WIDTH))
    reference: list[tuple[Any, ...]] = [("net/start", noise)]
    port: list[tuple[Any, ...]] = [("start", noise)]
    for n, (a, b) in enumerate(steps):
        reference += [("net/attn.to_k", a, "out", n), ("net/attn.to_v", b, "out", n)]
        port += [("kv", np.concatenate([a, b], -1), "out", n + 1)]
    pairs = pair_traces(write(tmp_path / "r", reference), write(tmp_path / "p", port)).pairs
    fused = [pair for pair in pairs if pair.port_event.name == "kv"]
    assert [(pair.event.step, pair.port_event.step) for pair in fused] == [(0, 1), (1, 2), (2, 3)]


def test_modules_of_two_blocks_are_not_exchanged_for_an_inner_number() -> None:
    loaded = {
        f"decoder.upsamples.{block}.residual.0": (
            f"vae/decoder.up_blocks.{level}.resnets.{resnet}.norm1"
        )
        for block, level, resnet in ((0, 0, 0), (1, 0, 1), (7, 2, 1))
    }
    assert without_exchanges(loaded) == loaded


def summed(folder: Path, *, port: bool) -> Trace:
    """Attention, a sum after it and a scaled sum, which the port records with its input."""
    draw = np.random.default_rng(5)
    x, table = draw.standard_normal((2, TOKENS, WIDTH)), draw.standard_normal((WIDTH, WIDTH)) / 4
    attended = np.tanh(x @ table)
    total = x + attended
    normed = total / np.abs(total).max(-1, keepdims=True)
    last = normed @ table
    if port:
        events: list[tuple[Any, ...]] = [("start", x), ("scale", total, "in.0"), ("scale", normed)]
        return write(folder, [*events, ("end", last)])
    events = [("net", x, "in.0"), ("net/attn", x, "in.0"), ("net/attn", attended)]
    events += [("net/norm", total, "in.0"), ("net/last", normed, "in.0"), ("net/last", last)]
    return write(folder, events)


def test_inputs_of_a_call_are_known_by_where_the_reference_first_has_them(tmp_path: Path) -> None:
    reference, port = (summed(tmp_path / side, port=side == "p") for side in "rp")
    pairing = pair_traces(reference, port, {})
    traces, layouts = Comparison(reference, port), Layouts()
    pairs = [pair for pair in pairing.pairs if pair.event.kind not in GATED]
    parameters = ParameterValues(reference, None)
    reader = EvidenceReader(reference, port, pairing, layouts, parameters)
    rows = measure_rows(traces, pairs, layouts)
    search = DivergenceSearch(traces, pairing, pairs, rows, reader, layouts)
    inputs = search._first_of_inputs()
    assert inputs["scale", 0, 0] == 3  # net/norm [in.0]
    (attended,) = (e for e in reference.events if str(e) == "net/attn")
    (scaled,) = (e for e in port.events if str(e) == "scale")
    pairs[0] = Pair((attended,), (scaled,), "siblings")
    assert search._is_before_inputs(0, inputs)
    pairs[0] = Pair((attended,), (scaled,), "name")
    assert not search._is_before_inputs(0, inputs)
    pairs[0] = Pair((reference.events[-1],), (scaled,), "siblings")
    assert not search._is_before_inputs(0, inputs)


def test_tokens_that_only_repeat_others_are_not_missing(tmp_path: Path) -> None:
    """A reference may fill a prompt up with copies of its last token before the first layer."""
    draw = np.random.default_rng(7)
    text, layer, mixer = (draw.standard_normal(shape) for shape in ((9, 24), (24, WIDTH), (16, 16)))
    filled = np.concatenate([text, np.repeat(text[-1:], 3, 0)])

    def run(folder: Path, *, port: bool, factor: float = 1.0) -> Trace:
        wide = filled @ layer * factor
        ends = np.tanh(wide) @ mixer
        if port:
            return write(folder, [("x", text[::-1]), ("text", text), ("wide", wide), ("end", ends)])
        given = [("net", text[::-1], "in.0"), ("net/embed", filled, "in.0")]
        return write(folder, [*given, ("net/embed", wide), ("net/mix", ends)])

    reference = run(tmp_path / "r", port=False)
    assert compare(reference, run(tmp_path / "c", port=True)).verdict == "agree"
    verdict = compare(reference, run(tmp_path / "p", port=True, factor=1.5))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "wide")


def test_a_port_may_compute_a_step_for_one_row_of_the_batch(tmp_path: Path) -> None:
    draw = np.random.default_rng(8)
    time, layer = np.full((2, 1), 7.0), draw.standard_normal((WIDTH, WIDTH))
    frequencies = 10.0 ** -np.arange(WIDTH // 2)

    def run(folder: Path, *, rows: int, sine_first: bool = False) -> Trace:
        angles = time[:rows] * frequencies
        parts = [np.cos(angles), np.sin(angles)]
        waves = np.concatenate(parts[::-1] if sine_first else parts, 1)
        names = ("time", "waves", "up") if rows == 1 else ("net", "net/up", "net/up")
        values = zip(names, (time[:rows], waves, waves @ layer), strict=True)
        slots = ("out",) * 3 if rows == 1 else ("in.0", "in.0", "out")
        return write(folder, [(*value, slot) for value, slot in zip(values, slots, strict=True)])

    reference = run(tmp_path / "r", rows=2)
    assert compare(reference, run(tmp_path / "c", rows=1)).verdict == "agree"
    verdict = compare(reference, run(tmp_path / "p", rows=1, sine_first=True))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "waves")


def test_a_value_that_much_agrees_after_is_not_taken_for_the_wrong_one(tmp_path: Path) -> None:
    """A port's prompt is the reference's with pictures in it: another value, used rightly."""
    draw = np.random.default_rng(9)
    layers = draw.standard_normal((20, WIDTH, WIDTH)) / 4
    words, pictures = draw.standard_normal((2, TOKENS, WIDTH))

    def run(folder: Path, *, port: bool, wrong: bool = False) -> Trace:
        x = words + pictures
        events: list[tuple[Any, ...]] = [("start", pictures)]
        events += [("filled", x)] if port else [("net", pictures, "in.0"), ("net/words", words)]
        for number, layer in enumerate(layers):
            x = np.tanh(x @ layer)
            events.append((f"{'b' if port else 'net/blocks.'}{number}", x))
        end = np.roll(x, 2 if wrong else 1, 0)
        return write(folder, [*events, ("net", end)])

    reference = run(tmp_path / "r", port=False)
    assert compare(reference, run(tmp_path / "c", port=True)).verdict == "agree"
    verdict = compare(reference, run(tmp_path / "p", port=True, wrong=True))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "net")


def test_a_mask_that_hides_other_tokens_is_wrong_although_it_is_used_late(tmp_path: Path) -> None:
    search: Any = object.__new__(EarlierValues)
    right, other = np.array([[1, 1, 0, 0]]), np.array([[1, 0, 0, 0]])
    reference = write(tmp_path / "r", [("mask", right)])
    for number, (mask, is_other) in enumerate([(other, True), (1 - right, False), (right, False)]):
        port = write(tmp_path / f"p{number}", [("mask", mask)])
        search.traces = SimpleNamespace(reference=reference, port=port)
        assert search._is_another_mask(reference.events[0], port.events[0]) == is_other


def rotated(x: Any, table: Any) -> Any:
    pairs = (x[..., ::2] + 1j * x[..., 1::2]) * table
    return np.stack((pairs.real, pairs.imag), -1).reshape(x.shape)


@pytest.mark.parametrize(
    ("change", "site"),
    [
        (lambda angles: angles, None), (lambda angles: 2 * angles, "pe"),
        (lambda angles: -angles, "pe"),
    ],
)  # fmt: skip
def test_a_table_of_matrices_where_the_reference_has_complex_numbers(
    tmp_path: Path, change: Any, site: str | None
) -> None:
    draw = np.random.default_rng(2)
    streams = [draw.standard_normal((2, n, 8)) for n in (5, 9)]
    angles = [np.outer(np.arange(n) + n, 10.0 ** -np.arange(4)) for n in (5, 9)]
    own = change(np.concatenate(angles))
    tables = [np.exp(1j * a).astype(np.complex64) for a in angles]
    joined = np.concatenate(streams, 1)
    right = rotated(joined, np.exp(1j * np.concatenate(angles)))
    reference = [("net", joined, "in.0"), ("net/rope", tables[0]), ("net/rope", tables[1], "out.1")]
    reference += [("net/attn", joined, "in.0"), ("net/attn", tables[0], "in.1")]
    reference += [("net/attn", tables[1], "in.2"), ("net/attn.core", right, "in.0")]
    reference += [("net/attn.core", np.tanh(right)), ("net/attn", np.tanh(right))]
    matrices = np.stack([np.cos(own), -np.sin(own), np.sin(own), np.cos(own)], -1)
    wrong = rotated(joined, np.exp(1j * own))
    port = [("start", joined), ("pe", matrices.reshape(1, 14, 4, 2, 2))]
    port += [("query", wrong), ("result", np.tanh(wrong))]
    verdict = compare(write(tmp_path / "r", reference), write(tmp_path / "p", port))
    assert verdict.port_site == site


def test_a_wrong_rotation_of_a_normed_value_is_named(tmp_path: Path) -> None:
    """A rotation keeps the lengths of rows; a wrong one may not."""
    x = np.random.default_rng(2).standard_normal((2, 2, TOKENS, WIDTH))
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True))
    angles = np.outer(np.arange(TOKENS), 10.0 ** -np.arange(WIDTH // 2))
    right = rotated(normed, np.exp(1j * angles))
    cos, sin = (np.tile(table, 2) for table in (np.cos(angles), np.sin(angles)))
    turned = np.stack((-normed[..., 1::2], normed[..., ::2]), -1).reshape(x.shape)
    wrong = normed * cos + turned * sin
    reference = [("net", x, "in.0"), ("net/norm", x, "in.0"), ("net/norm", normed)]
    reference += [("net/core", right, "in.0"), ("net/core", np.tanh(right.sum(1)))]
    port = [("start", x), ("scaled", normed), ("query", wrong), ("result", np.tanh(wrong.sum(1)))]
    verdict = compare(write(tmp_path / "r", reference), write(tmp_path / "p", port))
    assert (verdict.verdict, verdict.port_site) == ("diverge", "query")
