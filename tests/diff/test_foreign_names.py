"""Pairs of a port that shares no name with the reference, after a bug has spoilt its values."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.divergence.first import RowTests, first_divergence
from lydite.diff.divergence.write_injection import isolate
from lydite.diff.pairing.blocks import BlockMap, LastWords, ScopeRules
from lydite.diff.pairing.name_matching import StepsFromNames, match_weights, module_renames
from lydite.diff.pairing.pair_traces import pair_traces
from lydite.diff.pairing.paired_events import Pairing
from lydite.diff.pairing.similarity import other_slots
from lydite.diff.result import Row
from lydite.trace.events import Header, Site
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

WIDTH, TOKENS, BLOCKS = 16, 12, 4
REFERENCE = {"up": "net/blocks.{}.ff.proj", "down": "net/blocks.{}.ff.out"}
PORT = {"up": "model.layer{}.w1", "down": "model.layer{}.w2"}


class Net:
    """Blocks of two matrices with a residual; `wrong` takes the input of a matrix and spoils it."""

    def __init__(self) -> None:
        draw = np.random.default_rng(5)
        self.up = draw.standard_normal((BLOCKS, WIDTH, WIDTH)) / 4
        self.down = draw.standard_normal((BLOCKS, WIDTH, WIDTH)) / 4
        self.x = draw.standard_normal((2, TOKENS, WIDTH))
        self.head = draw.standard_normal((WIDTH, 3))

    def run(self, names: dict[str, str], wrong: Any = None) -> list[tuple[Any, ...]]:
        x, events = self.x, [("noise", self.x, {"kind": "input"})]
        for i in range(BLOCKS):
            h = x if wrong is None else wrong(x, i)
            u = np.tanh(h @ self.up[i])
            d = u @ self.down[i]
            events += [(names["up"].format(i), u, {}), (names["down"].format(i), d, {})]
            x = x + d
        return [*events, ("head", x @ self.head, {})]


def write(
    folder: Path,
    events: list[tuple[Any, ...]],
    weights: Mapping[str, Any] | None = None,
    **header: Any,
) -> Trace:
    with TraceWriter(folder, Header(**header)) as writer:
        if weights:
            writer.add_weights(weights)
        for name, value, more in events:
            writer.add(name, np.asarray(value, np.float32), **more)
    return Trace.open(folder)


def names(found: Pairing) -> dict[str, str]:
    return {each.port_event.name: each.event.name for each in found.pairs}


@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_first_wrong_value_has_its_name(tmp_path: Path, block: int) -> None:
    net = Net()
    reference = write(tmp_path / "ref", net.run(REFERENCE))
    port = write(tmp_path / "port", net.run(PORT, lambda x, i: x * 1.5 if i == block else x))
    found = compare(reference, port)
    assert (found.verdict, found.port_site) == ("diverge", PORT["up"].format(block))
    assert found.site == REFERENCE["up"].format(block)


def test_likeness_pairs_where_nothing_is_equal(tmp_path: Path) -> None:
    net = Net()
    reference = write(tmp_path / "ref", net.run(REFERENCE))
    events = net.run(PORT, lambda x, i: x + 0.7 * np.roll(x, 1, axis=1))
    port = write(tmp_path / "port", [*events, ("more", net.x**2, {})])  # no count of values helps
    found = pair_traces(reference, port)
    wanted = {PORT[n].format(i): REFERENCE[n].format(i) for n in PORT for i in range(BLOCKS)}
    assert wanted.items() <= names(found).items()
    assert any("similarity" in remark for remark in found.remarks)


def test_values_of_chance_are_not_paired(tmp_path: Path) -> None:
    net, draw = Net(), np.random.default_rng(8)
    reference = write(tmp_path / "ref", net.run(REFERENCE))
    other = [
        (name, draw.standard_normal(np.shape(value)) if "layer" in name else value, more)
        for name, value, more in net.run(PORT)
    ]
    found = pair_traces(reference, write(tmp_path / "port", other))
    assert not any(each.how == "similarity" for each in found.pairs)


def test_a_sum_between_modules_is_found_at_the_input_of_the_next(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    a, total, y = (draw.standard_normal((2, 5, 8)) for _ in range(3))
    reference = write(
        tmp_path / "ref",
        [("net/a", a, {}), ("net/b", total, {"slot": "in.0"}), ("net/b", y, {})],
    )
    assert other_slots(reference) == [Site("net/b", "in.0")]
    port = write(tmp_path / "port", [("one", a, {}), ("residual", total, {}), ("two", y, {})])
    found = {each.port_event.name: (each.event.name, each.event.slot) for each in pair_traces(
        reference, port).pairs}  # fmt: skip
    assert found["residual"] == ("net/b", "in.0")


def test_what_a_module_was_given_by_another_is_no_value_of_its_own(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((2, 5, 8))
    trace = write(tmp_path / "ref", [("a", x, {}), ("b", x, {"slot": "in.0"}), ("b", 2 * x, {})])
    assert other_slots(trace) == []


def test_noise_and_tables_pair_by_their_kind(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    x, end = draw.standard_normal((1, 4, 6, 6)), draw.standard_normal((1, 3))
    tables = np.linspace(1, 0, 5), np.linspace(1000, 200, 4)
    about = {"kind": "schedule"}
    reference = write(tmp_path / "ref", [
        ("pipeline/sigmas", tables[0], about), ("pipeline/timesteps", tables[1], about),
        ("pipeline/noise", x, {"kind": "input"}), ("net/end", end, {}),
    ])  # fmt: skip
    port = write(tmp_path / "port", [
        ("tab", tables[0] ** 2, about), ("z", draw.standard_normal(x.shape), {"kind": "input"}),
        ("y", end, {}),
    ])  # fmt: skip
    found = names(pair_traces(reference, port))
    assert found["tab"] == "pipeline/sigmas" and found["z"] == "pipeline/noise"


def test_one_row_of_a_batch_pairs_with_the_batch(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    time, end = np.repeat(draw.standard_normal((1, 40)), 2, axis=0), draw.standard_normal((2, 9))
    reference = write(tmp_path / "ref", [("net/time", time, {}), ("net/end", end, {})])
    port = write(tmp_path / "port", [("t", time[:1], {}), ("e", end, {})])
    assert names(pair_traces(reference, port)) == {"t": "net/time", "e": "net/end"}
    assert compare(reference, port).verdict == "agree"


def test_steps_in_names(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    latents = draw.standard_normal((3, 1, 4, 5, 5))
    reference = write(
        tmp_path / "ref", [("pipeline/latents", x, {"step": i}) for i, x in enumerate(latents)]
    )
    latents[1:] += 0.1
    port = write(tmp_path / "port", [(f"step_{i}/lat", x, {}) for i, x in enumerate(latents)])
    found = compare(reference, port)
    assert (found.verdict, found.port_site, found.step) == ("diverge", "step_1/lat", 1)
    assert any("read from its names" in remark for remark in found.remarks)


def test_a_number_that_is_no_step_stays(tmp_path: Path) -> None:
    x = np.zeros(3)
    trace = write(tmp_path / "a", [(name, x, {}) for name in ("footstep3/x", "step4", "b.2")])
    assert StepsFromNames.of(trace).trace is trace


def test_beginnings_are_carried_over() -> None:
    names = {"clip_l/t.a": "enc/a", "clip_l/t.b.c": "enc/b.c", "clip_g/q": "e/z"}
    rules = ScopeRules({name: (Site(ref),) for name, ref in names.items()})
    assert rules.predict("clip_l/t.d") == Site("enc/d")
    assert rules.predict("clip_g/t.d") is None


def test_one_block_tells_the_others_once_blocks_are_known() -> None:
    pairs = {f"h.{i}.x": (Site(f"net/block.{i}.layer.0.y"),) for i in range(3)}
    pairs |= {"h.0.q": (Site("net/block.0.layer.1.q"), Site("net/block.0.layer.1.k"))}
    blocks = BlockMap(pairs)
    expected = (Site("net/block.2.layer.1.q"), Site("net/block.2.layer.1.k"))
    assert blocks.from_other_blocks("h.2.q", pairs) == expected
    assert blocks.from_other_blocks("h.2.z", pairs) is None


def test_equal_outputs_do_not_decide_about_inputs(tmp_path: Path) -> None:
    """A container and the last module in it give one value, and take others; one is equal."""
    draw = np.random.default_rng(6)
    x, h, y = (draw.standard_normal((2, 5, 8)) for _ in range(3))
    reference = write(tmp_path / "ref", [
        ("net/attn", x, {"slot": "in.0"}), ("net/attn.out", h, {"slot": "in.0"}),
        ("net/attn.out", y, {}), ("net/attn.drop", y, {"slot": "in.0"}), ("net/attn.drop", y, {}),
    ])  # fmt: skip
    port = write(tmp_path / "port", [("a", x, {"slot": "in.0"}), ("a", y, {})])
    found = compare(reference, port)
    assert found.verdict == "agree"
    assert [(row.site, row.slot) for row in found.rows] == [
        ("net/attn", "in.0"),
        ("net/attn.out", "out"),
    ]


def test_an_array_under_another_name_is_no_end_that_was_not_compared(tmp_path: Path) -> None:
    y = np.random.default_rng(7).standard_normal((2, 5, 8))
    reference = write(tmp_path / "ref", [("net/head", y, {}), ("net", y, {"slot": "out.logits"})])
    port = write(tmp_path / "port", [("head", y, {}), ("model", y, {})])
    assert compare(reference, port).verdict == "agree"


@pytest.mark.parametrize(
    ("times", "estimated", "first"), [(2.0, True, None), (2.0, False, 1), (5.0, True, 1)]
)
def test_an_estimated_limit_has_a_margin(times: float, estimated: bool, first: int | None) -> None:
    def row(name: str, error: float) -> Row:
        about: dict[str, Any] = {"error": error, "floor": 1e-7, "limit": 1e-6}
        return Row(name, name, "out", 0, 0, "activation", (4,), "f32", **about, wrong=error > 1e-6)

    rows = [row("net/a", 0.0), row("net/b", times * 1e-6), row("net/c", 1e-7)]
    assert first_divergence(rows, RowTests(), estimated=estimated).first == first


def test_the_wrong_part_of_a_joined_value_is_named(tmp_path: Path) -> None:
    draw = np.random.default_rng(10)
    q, k, v, end = (draw.standard_normal((2, 6, 8)) for _ in range(4))
    reference = write(
        tmp_path / "ref", [("net/to_q", q, {}), ("net/to_k", k, {}), ("net/to_v", v, {}),
                           ("net/end", end, {})]
    )  # fmt: skip
    joined = np.concatenate([q, k + 0.1, v], axis=-1)
    port = write(tmp_path / "port", [("qkv", joined, {}), ("end", end + 1, {})])
    assert compare(reference, port).site == "net/to_k"


@pytest.mark.parametrize("wrong", [None, 1, 2])
def test_two_projections_that_are_one_in_the_reference(tmp_path: Path, wrong: int | None) -> None:
    draw = np.random.default_rng(11)
    values = draw.standard_normal((3, 2, 6, 16))
    ends = draw.standard_normal((3, 2, 6, 8))
    theirs, ours = [], []
    for i in range(3):
        off = 0.3 * draw.standard_normal((2, 6, 8)) if wrong is not None and i >= wrong else 0.0
        up, gate = values[i, ..., :8] + (off if i != wrong else 0.0), values[i, ..., 8:] + off
        theirs += [(f"net/b.{i}.proj", values[i], {}), (f"net/b.{i}.out", ends[i], {})]
        ours += [(f"l{i}.up", up, {}), (f"l{i}.gate", gate, {}), (f"l{i}.y", ends[i] + off, {})]
    found = compare(write(tmp_path / "ref", theirs), write(tmp_path / "port", ours))
    if wrong is None:
        assert found.verdict == "agree" and len(found.rows) == 9
        assert any("part 2 of 2" in remark for remark in found.remarks)
    else:
        assert (found.verdict, found.site) == ("diverge", f"net/b.{wrong}.proj")
        assert found.port_site == f"l{wrong}.gate"


def test_two_bugs_are_two_places_when_the_port_runs_on_the_references_values(
    tmp_path: Path,
) -> None:
    net = Net()

    def run(out: Path, given: Trace | None = None) -> Trace:
        """The port, wrong in two blocks; with `given` it goes on with those values."""
        events: list[tuple[Any, ...]] = [("noise", net.x, {"kind": "input"})]

        def tap(name: str, value: Any) -> Any:
            events.append((name, value, {}))
            event = given.find(name) if given else None
            return value if event is None or given is None else given.read(event)

        x = net.x
        for i in range(BLOCKS):
            u = tap(PORT["up"].format(i), np.tanh((1.5 if i in (1, 3) else 1) * x @ net.up[i]))
            x = x + tap(PORT["down"].format(i), u @ net.down[i])
        tap("head", x @ net.head)
        return write(out, events)

    def rerun(values: Path, out: Path) -> None:
        with Trace.open(values) as given:
            run(out, given)

    reference = write(tmp_path / "ref", net.run(REFERENCE))
    found = isolate(reference, run(tmp_path / "port"), rerun, tmp_path)
    assert [row.site for row in found.sources] == [REFERENCE["up"].format(i) for i in (1, 3)]


def rows_of(*errors: float) -> list[Row]:
    about: dict[str, Any] = {"floor": 1e-7, "limit": 1e-6}
    return [
        Row(f"net/{i}", f"net/{i}", "out", 0, 0, "activation", (4,), "f32", error=error, **about,
            wrong=error > 1e-6)
        for i, error in enumerate(errors)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "first"),
    [
        ((1e-7, 9e-6, 8e-6, 0.5, 0.4), 3),  # a jump that the small error does not explain
        ((1e-7, 9e-6, 2e-4, 5e-3, 0.5), 1),  # an error that grows
        ((1e-7, 1e-3, 0.9), 1),  # not a small one
    ],
)
def test_the_error_that_explains_what_follows_is_the_bug(
    errors: tuple[float, ...], first: int
) -> None:
    assert first_divergence(rows_of(*errors), RowTests()).first == first


def test_a_guessed_pair_is_no_bug_while_what_follows_agrees() -> None:
    rows = rows_of(1e-7, 0.5, 1e-7, 1e-7, 1e-7, 1e-7)
    assert first_divergence(rows, RowTests()).first == 1
    assert first_divergence(rows, RowTests(is_guessed=lambda at: at == 1)).first is None


@pytest.mark.parametrize(
    ("error", "dtype", "peak", "undecided"),
    [(3e-5, "f32", 4, True), (3e-4, "f32", 4, False), (3e-5, "f32", 20, False),
     (1.5e-5, "bf16", 4, True), (3e-5, "bf16", 4, False), (3e-5, "i64", 4, False)],
)  # fmt: skip
def test_an_estimate_decides_only_what_is_far_from_it(
    error: float, dtype: str, peak: float, undecided: bool
) -> None:
    """Far: many limits, fewer of them in coarse precision; or an error of a few numbers only."""
    rows = [replace(row, dtype=dtype, peak=peak * error) for row in rows_of(error)]
    for anchored in (True, False):
        found = first_divergence(
            rows, RowTests(is_anchored=lambda _, known=anchored: known), estimated=True
        )
        assert (found.first, found.undecided) == (0, undecided and not anchored)


def test_a_tensor_pairs_with_a_field_and_outputs_in_another_order(tmp_path: Path) -> None:
    draw = np.random.default_rng(12)
    text, image, end = (draw.standard_normal(shape) for shape in ((1, 5, 8), (1, 9, 8), (1, 3)))
    reference = write(tmp_path / "ref", [
        ("block", text, {}), ("block", image, {"slot": "out.1"}),
        ("net", end, {"slot": "out.sample"}),
    ])  # fmt: skip
    port = write(tmp_path / "port", [
        ("block", image, {}), ("block", text, {"slot": "out.1"}), ("net", end, {}),
    ])  # fmt: skip
    found = compare(reference, port)
    assert found.verdict == "agree" and len(found.rows) == 3


def test_the_last_agreement_is_upstream_not_the_last_in_time(tmp_path: Path) -> None:
    draw = np.random.default_rng(13)
    x, a, other, b = (draw.standard_normal((2, 5, 8)) for _ in range(4))

    def events(wrong: float) -> list[tuple[Any, ...]]:
        return [
            ("net", x, {"slot": "in.0"}), ("net.a", x, {"slot": "in.0"}), ("net.a", a, {}),
            ("net.other", x, {"slot": "in.0"}), ("net.other", other, {}),
            ("net.b", a, {"slot": "in.0"}), ("net.b", b + wrong, {}), ("net", b + wrong, {}),
        ]  # fmt: skip

    port = [event for event in events(0.5) if event[2].get("slot") is None]
    found = compare(write(tmp_path / "ref", events(0.0)), write(tmp_path / "port", port))
    assert (found.site, found.last_agreement) == ("net.b", "net.a")


def test_an_output_taken_from_another_layer_is_no_agreement(tmp_path: Path) -> None:
    """The port returns its second layer, which the reference has too, but not at its end."""
    layers = [np.random.default_rng(n).standard_normal((2, 12, 16)) for n in range(4)]

    def events(name: str, end: str, taken: int) -> list[tuple[Any, ...]]:
        inner = [(f"{name}{n}", layer, {}) for n, layer in enumerate(layers)]
        return [*inner, (end, layers[taken], {})]

    reference = write(tmp_path / "ref", events("net/layers.", "pipeline/text", 2))
    for taken, verdict in ((2, "agree"), (1, "diverge")):
        port = write(tmp_path / f"port{taken}", events("stage", "features", taken))
        assert compare(reference, port).verdict == verdict


def test_a_factor_that_a_norm_hides_is_the_bug(tmp_path: Path) -> None:
    """A multiple of the right value before a norm: what follows agrees until the residual."""
    draw = np.random.default_rng(3)
    x, weight = draw.standard_normal((2, 12, 16)), draw.standard_normal((16, 16))

    def events(names: tuple[str, ...], factor: float) -> list[tuple[Any, ...]]:
        h = factor * np.tanh(x @ weight)
        n = h / np.sqrt((h * h).mean(-1, keepdims=True))
        y = n @ weight
        z = np.tanh(y)
        values = (h, n, y, z, z @ weight)
        inner = [(name, value, {}) for name, value in zip(names, values, strict=False)]
        inputs = [
            (names[-1], value, {"slot": f"in.{n}"}) for n, value in enumerate((h, values[-1]))
        ]
        return [*inner, *(inputs if factor == 1.0 else ()), (names[-1], h + values[-1], {})]

    names = tuple(f"net/{name}" for name in ("embed", "norm", "up", "act", "down", "sum"))
    reference = write(tmp_path / "ref", events(names, 1.0))
    port = write(tmp_path / "port", events(tuple("abcdef"), 4.0))
    assert compare(reference, port).port_site == "a"


def layers_with_inputs(wrong: bool) -> tuple[list[Any], list[Any]]:
    """Three layers of a scaled norm and two products; the port, with names of its own, adds 1."""
    draw = np.random.default_rng(12)
    products = draw.standard_normal((3, 2, 16, 16)) / 4
    scales = 1 + 0.5 * draw.standard_normal((3, 16))
    theirs: list[Any] = []
    ours: list[Any] = []
    for events, own in ((theirs, False), (ours, True)):
        x = np.random.default_rng(13).standard_normal((2, 6, 16))
        for i in range(3):
            norm = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
            taken = norm * (scales[i] + (1.0 if own and wrong else 0.0))
            up = taken @ products[i, 0]
            y = np.tanh(up) @ products[i, 1]
            x = x + y
            if own:
                events += [(f"l{i}/n", norm, {}), (f"l{i}/f", taken, {"slot": "in.0"})]
                events += [(f"l{i}/f/a", up, {}), (f"l{i}/f", y, {}), (f"l{i}", x, {})]
            else:
                name = f"net/blocks.{i}"
                events += [(f"{name}.norm", norm, {}), (f"{name}.ff", taken, {"slot": "in.0"})]
                events += [(f"{name}.ff.up", taken, {"slot": "in.0"}), (f"{name}.ff.up", up, {})]
                events += [(f"{name}.ff.down", np.tanh(up), {"slot": "in.0"})]
                events += [(f"{name}.ff.down", y, {}), (f"{name}.ff", y, {}), (name, x, {})]
    return theirs, ours


@pytest.mark.parametrize("wrong", [False, True])
def test_inputs_of_names_of_its_own_are_compared(tmp_path: Path, wrong: bool) -> None:
    theirs, ours = layers_with_inputs(wrong)
    found = compare(write(tmp_path / "ref", theirs), write(tmp_path / "port", ours))
    assert found.verdict == ("diverge" if wrong else "agree"), found.sentence
    inputs = [row.port_name for row in found.rows if row.port_slot == "in.0"]
    assert inputs == [f"l{i}/f [in.0]" for i in range(3)]
    if wrong:
        assert (found.site, found.port_site, found.port_slot) == ("net/blocks.0.ff", "l0/f", "in.0")
        assert found.sentence.startswith("l0/f [in.0] (in the reference: net/blocks.0.ff [in.0])")
    assert found.unpaired_port == ()


def test_a_multiple_of_the_references_value_is_its_counterpart(tmp_path: Path) -> None:
    """A norm takes the factor out, the residual does not."""
    draw = np.random.default_rng(14)
    x, w = draw.standard_normal((2, 6, 16)), draw.standard_normal((16, 16)) / 4
    sides: list[Trace] = []
    for side, names, factor in (("ref", ("net/embed", "net/norm", "net/fc", "net"), 1.0),
                                ("port", ("tokens", "n", "p", "end"), 0.25)):  # fmt: skip
        embedded = factor * x
        norm = embedded / embedded.std(-1, keepdims=True)
        values = (embedded, norm, norm @ w, embedded + norm @ w)
        sides.append(
            write(tmp_path / side, [(n, v, {}) for n, v in zip(names, values, strict=True)])
        )
    found = compare(*sides)
    assert (found.verdict, found.port_site) == ("diverge", "tokens")
    assert found.findings[0].cause == "scaled"


@pytest.mark.parametrize(("estimated", "first"), [(True, 2), (False, 1)])
def test_little_above_an_estimated_limit_is_not_the_cause_of_a_jump(
    estimated: bool, first: int
) -> None:
    rows = rows_of(1e-7, 2e-6, 1e-4, 2e-4)
    assert first_divergence(rows, RowTests(), estimated=estimated).first == first


def test_tables_of_one_length_are_counterparts(tmp_path: Path) -> None:
    """Their numbers may have nothing in common: another spacing begins at another timestep."""
    draw = np.random.default_rng(15)
    x = draw.standard_normal((1, 4, 8, 8))
    tables = {"t": np.array([999.0, 500, 1]), "s": np.array([157.0, 3.4, 0.03, 0])}
    theirs = [(f"pipeline/{name}", table, {"kind": "schedule"}) for name, table in tables.items()]
    ours = [
        (f"own_{n}", table / 9, {"kind": "schedule"})
        for n, table in zip("ab", tables.values(), strict=True)
    ]
    found = compare(
        write(tmp_path / "ref", [*theirs, ("pipeline/latents", x, {})]),
        write(tmp_path / "port", [*ours, ("latents", x + 1, {})]),
    )
    assert (found.site, found.port_site) == ("pipeline/t", "own_a")


@pytest.mark.parametrize(("own", "site"), [("prompt_features", "pipeline/prompt_embeds"),
                                           ("other", None)])  # fmt: skip
def test_a_result_of_another_layer_is_no_agreement(
    tmp_path: Path, own: str, site: str | None
) -> None:
    """It equals a value that agrees; what the reference has in its place is told by the name."""
    draw = np.random.default_rng(16)
    first, second, pooled = (
        draw.standard_normal(shape) for shape in ((2, 5, 8), (2, 5, 8), (2, 8))
    )
    layers = [("net/layers.0", first, {}), ("net/layers.1", first, {"slot": "in.0"})]
    layers += [("net/layers.1", second, {}), ("net", second, {"slot": "out.last"})]
    theirs = [*layers, ("pipeline/prompt_embeds", first, {}), ("pipeline/pooled", pooled, {})]
    ours = [("l0", first, {}), ("l1", second, {}), (own, second, {}), ("pool", pooled, {})]
    found = compare(write(tmp_path / "ref", theirs), write(tmp_path / "port", ours))
    assert (found.verdict, found.site) == ("diverge" if site else "agree", site)


def test_as_many_values_of_one_shape_are_paired_in_order(tmp_path: Path) -> None:
    net, draw = Net(), np.random.default_rng(3)
    reference = write(tmp_path / "ref", net.run(REFERENCE))
    noise = [
        (name, value if name in ("noise", "head") else draw.standard_normal(value.shape), more)
        for name, value, more in net.run(PORT)
    ]
    found = pair_traces(reference, write(tmp_path / "port", noise))
    wanted = {PORT[n].format(i): REFERENCE[n].format(i) for n in PORT for i in range(BLOCKS)}
    assert wanted.items() <= names(found).items()


def streams(wrong: bool, *, port: bool) -> list[tuple[Any, ...]]:
    """Two blocks that join text and image tokens, and return both; the port keeps them joined."""
    draw = np.random.default_rng(8)
    weights = draw.standard_normal((2, WIDTH, WIDTH)) / 4
    text, image = draw.standard_normal((1, 3, WIDTH)), draw.standard_normal((1, 5, WIDTH))
    events: list[tuple[Any, ...]] = [("noise", image, {"kind": "input"})]
    both = np.concatenate([text, image], 1)
    for i, weight in enumerate(weights):
        mixed = both @ weight
        mixed = np.roll(mixed, 1, 1) if wrong and i else mixed
        both = both + np.tanh(mixed)
        if port:
            events += [(f"b{i}/mix", mixed, {}), (f"b{i}/end", both, {})]
        else:
            events += [(f"net/blocks.{i}.mix", mixed, {})]
            events += [(f"net/blocks.{i}", both[:, :3], {})]
            events += [(f"net/blocks.{i}", both[:, 3:], {"slot": "out.1"})]
    return [*events, ("net/head" if not port else "last", both[:, 3:] ** 3, {})]


@pytest.mark.parametrize("wrong", [False, True])
def test_tokens_of_two_values_in_one(tmp_path: Path, wrong: bool) -> None:
    reference = write(tmp_path / "ref", streams(False, port=False))
    port = write(tmp_path / "port", streams(wrong, port=True))
    ends = [p for p in pair_traces(reference, port).pairs if p.port_event.name.endswith("/end")]
    assert [[event.slot for event in pair.reference] for pair in ends] == [["out", "out.1"]] * 2
    found = compare(reference, port)
    assert (found.verdict, found.port_site) == (("diverge", "b1/mix") if wrong else ("agree", None))


def test_a_sum_recorded_under_a_layers_name_is_paired_by_its_value(tmp_path: Path) -> None:
    """The parameters are those of the layer, the value is what the module around it returns."""
    draw = np.random.default_rng(5)
    x, weight, table = (draw.standard_normal(s) for s in ((2, 6, 8), (WIDTH, 8), (6, WIDTH)))
    patches = x @ weight.T
    end = ("net/end", np.tanh(patches + table), {})
    values = [("net/embed.proj", patches, {}), ("net/embed", patches + table, {}), end]
    reference = write(tmp_path / "ref", values, {"net/embed.proj.weight": weight})
    own = [("tok", patches + table, {}), ("last", end[1] + 1, {})]
    port = write(tmp_path / "port", own, {"tok.weight": weight})
    assert names(pair_traces(reference, port))["tok"] == "net/embed"
    assert compare(reference, port).port_site == "last"


@pytest.mark.parametrize("known", [("lin1", "q"), ("q",)])
def test_a_block_that_holds_the_weight_of_a_norm_is_not_the_norm(
    known: tuple[str, ...], tmp_path: Path
) -> None:
    draw = np.random.default_rng(8)
    weights = {name: draw.standard_normal((WIDTH, 2)) for name in ("lin1", "q")}
    theirs = {"lin1": "net/single.0.proj.weight", "q": "net/single.0.attn.norm_q.weight"}
    own = {"lin1": "s.0.lin1.w", "q": "s.0.q"}
    reference = write(tmp_path / "ref", [], {theirs[name]: weights[name] for name in known})
    port = write(tmp_path / "port", [], {own[name]: weights[name] for name in known})
    found = module_renames(match_weights(port.weights() or {}, reference.weights() or {}))
    assert ("s.0" in found) == (known == ("q",))


def test_the_embeddings_of_tokens_are_no_result_whatever_their_name_is(tmp_path: Path) -> None:
    """They begin the run; the result is recorded by hand behind the last module."""
    draw = np.random.default_rng(9)
    states = [draw.standard_normal((2, 6, WIDTH)) for _ in range(6)]
    theirs = [(f"enc/layer.{n}", x, {"slot": slot})
              for n, x in enumerate(states) for slot in ("in.0", "out")]  # fmt: skip
    theirs += [("pipeline/prompt_embeds", states[4], {}), ("pipeline/more", np.tanh(states[4]), {})]
    own = [("embedded", states[0], {}), *((f"l{n}", x, {}) for n, x in enumerate(states))]
    own += [("result", states[4], {}), ("other", np.tanh(states[4]), {})]
    reference, port = write(tmp_path / "ref", theirs), write(tmp_path / "port", own)
    assert compare(reference, port).verdict == "agree"
    assert names(pair_traces(reference, port)).get("embedded") != "pipeline/prompt_embeds"


def test_a_layer_that_is_left_out_keeps_its_counterpart(tmp_path: Path) -> None:
    """The value under its name is the layer's input, which the reference records before it."""
    draw = np.random.default_rng(6)
    x, weight = draw.standard_normal((2, 6, WIDTH)), draw.standard_normal(WIDTH)
    y = x * weight
    values = [("net/block", x, {}), ("net/norm", y, {}), ("net/end", np.tanh(y), {})]
    reference = write(tmp_path / "ref", values, {"net/norm.weight": weight})
    own = [("b", x, {}), ("final", x, {}), ("last", np.tanh(x), {})]
    port = write(tmp_path / "port", own, {"final.weight": weight})
    assert names(pair_traces(reference, port))["final"] == "net/norm"
    assert compare(reference, port).port_site == "final"


def test_last_words_tell_counterparts_in_other_places() -> None:
    words = LastWords(
        {
            "words.0.mixer.qkv": (Site("a/refiner.0.attn.to_q"), Site("a/refiner.0.attn.to_k")),
            "words.0.mid": (Site("a/refiner.0.norm2", "in.0"),),
        }
    )
    sites = [
        Site("a/layers.0.attn.to_q"), Site("a/layers.0.attn.to_k"), Site("a/layers.0.norm2", "in.0")
    ]  # fmt: skip
    assert words.counterparts("pix.0.mixer.qkv", sites) == [tuple(sites[:2])]
    assert words.counterparts("pix.0.mid", sites) == [(sites[2],)]
    assert words.counterparts("pix.0.other", sites) == []
    gates = LastWords({"r.0.gate_up": (Site("a/refiner.0.w_1"), Site("a/refiner.0.w_3"))})
    later = [Site("a/layers.0.w_1"), Site("a/layers.0.w_3")]  # never one of them twice
    assert all(len(set(place)) == 2 for place in gates.counterparts("t.0.gate_up", later))


def test_of_two_streams_the_ports_first_wrong_value_is_named(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 6, WIDTH))
    text, image = ("net/text", np.tanh(x[:, :2])), ("net/image", np.sin(x[:, 2:]))
    rest = [(f"net/later.{i}", x + i) for i in range(8)]

    def record(folder: str, values: list[tuple[str, Any]], wrong: float) -> Trace:
        events = [("net/in", x), *((name, value + wrong) for name, value in values), *rest]
        return write(tmp_path / folder, [(name, value, {}) for name, value in events])

    reference = record("ref", [text, image], 0.0)
    found = compare(reference, record("port", [image, text], 0.5))
    assert found.port_site == "net/image"


def test_an_error_that_a_norm_hides_and_a_residual_passes_on(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    x = draw.standard_normal((2, 8, WIDTH))

    def run(shift: float) -> list[tuple[Any, ...]]:
        start = np.tanh(x) + shift
        normed = start - start.mean(-1, keepdims=True)
        inner = [(f"net/block.mlp.{i}", normed * (i + 2), {}) for i in range(5)]
        return [
            ("net/start", start, {}),
            ("net/block", start, {"slot": "in.0"}),
            ("net/block.norm", normed, {}),
            *inner,
            ("net/block", start + normed * 6, {}),
        ]

    found = compare(write(tmp_path / "ref", run(0.0)), write(tmp_path / "port", run(0.4)))
    assert (found.verdict, found.site) == ("diverge", "net/start")


def test_one_number_against_an_axis_of_one(tmp_path: Path) -> None:
    reference = write(
        tmp_path / "ref", [("net/a", np.float32(3.0), {}), ("net/b", np.arange(20.0), {})]
    )
    port = write(
        tmp_path / "port", [("first", np.full((1, 1), 3.0), {}), ("second", np.arange(20.0), {})]
    )
    assert compare(reference, port).verdict == "agree"


def test_other_weights_are_the_answer_where_no_value_can_show_them(tmp_path: Path) -> None:
    ids = [("ids", np.arange(8), {"kind": "ids"})]
    weight = np.random.default_rng(0).standard_normal((8, 8))
    reference = write(tmp_path / "ref", ids, {"net/a.weight": weight})
    port = write(tmp_path / "port", ids, {"net/a.weight": 1.5 * weight})
    found = compare(reference, port)
    assert found.verdict == "diverge" and "weights differ" in found.sentence


def test_an_input_of_another_shape_is_not_the_first_wrong_value(tmp_path: Path) -> None:
    """A port may pass it in another form; what comes of it decides."""
    x = np.random.default_rng(0).standard_normal((2, 6, WIDTH))

    def run(inputs: Any, wrong: float) -> list[tuple[Any, ...]]:
        values = [("net/a", x, {}), ("net/b", inputs, {"slot": "in.0"})]
        return [*values, ("net/b", np.tanh(x) + wrong, {}), ("net/c", np.sin(x) + wrong, {})]

    reference = write(tmp_path / "ref", run(x, 0.0))
    found = compare(reference, write(tmp_path / "port", run(x[:, :3], 0.5)))
    assert (found.site, found.slot) == ("net/b", "out")


@pytest.mark.parametrize("floor", [False, True])
def test_a_value_recorded_elsewhere_may_differ_by_its_own_rounding(
    tmp_path: Path, floor: bool
) -> None:
    """The value of another place rounds more than the one it was paired with."""
    draw = np.random.default_rng(23)
    values = [draw.standard_normal((2, 5, 8)) for _ in range(8)]

    def events(error: float, swapped: bool) -> list[tuple[Any, ...]]:
        noisy = values[1] * (1 + error * draw.standard_normal(values[1].shape))
        second = noisy if swapped else values[2]
        end = [(f"net.v{n}", value, {}) for n, value in enumerate(values[3:])]
        return [("net.x", values[0], {}), ("net.y", noisy, {}), ("net.z", second, {}), *end]

    reference = write(tmp_path / "ref", events(0.0, False), dtype="float32")
    second = write(tmp_path / "floor", events(0.2, False), dtype="bfloat16") if floor else None
    port = write(tmp_path / "port", events(0.2, True), dtype="bfloat16")
    found = compare(reference, port, floor=second)
    assert found.verdict == ("agree" if floor else "diverge")


@pytest.mark.parametrize(("base", "verdict"), [(100.0, "agree"), (10_000.0, "diverge")])
def test_rows_that_are_turned_by_other_angles_are_the_rotated_ones(
    tmp_path: Path, base: float, verdict: str
) -> None:
    """A rotation keeps the length of each row: not q before it, but q after it is the pair."""
    draw = np.random.default_rng(24)
    raw = draw.standard_normal((2, 1, 3, 9, 8))

    def turned(x: Any, base: float) -> Any:
        angles = np.outer(np.arange(9), base ** -np.linspace(0, 1, 4, endpoint=False))
        a, b = x[..., :4], x[..., 4:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def out(q: Any, k: Any) -> Any:
        return np.tanh(q) * k

    q, k = (turned(x, 100.0) for x in raw)
    own_q, own_k = (turned(x, base).swapaxes(1, 2) for x in raw)
    theirs: list[tuple[Any, ...]] = [("net.norm_q", raw[0], {}), ("net.norm_k", raw[1], {})]
    theirs += [("net.sdpa", q, {"slot": "in.query"}), ("net.sdpa", k, {"slot": "in.key"})]
    theirs += [("net.sdpa", out(q, k), {})]
    ours = [("t.q", own_q, {}), ("t.k", own_k, {}), ("t.result", out(own_q, own_k), {})]
    found = compare(write(tmp_path / "ref", theirs), write(tmp_path / "port", ours))
    assert found.verdict == verdict
    if verdict == "diverge":
        assert (found.site, found.slot, found.port_site) == ("net.sdpa", "in.query", "t.q")
