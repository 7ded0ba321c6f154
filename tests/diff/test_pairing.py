"""Pairing: what belongs together when two people named and ordered things differently."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.diff.compare import compare
from lydite.diff.name_map import Rename, check_name_map, read_name_map
from lydite.diff.pairing.name_matching import match_spelling, match_weights, module_renames, tokens
from lydite.diff.pairing.pair_traces import pair_traces
from lydite.diff.pairing.paired_events import Pairing
from lydite.trace.events import Header, Site
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

G = np.random.default_rng(0)
VALUES = {name: G.standard_normal((2, 5, 8)).astype(np.float32) for name in "abcdefgh"}


def write(folder: Path, events: list[tuple[Any, ...]], weights: Any = None) -> Trace:
    """A trace of (name, value[, more]) events."""
    with TraceWriter(folder, Header()) as writer:
        for name, value, *more in events:
            writer.add(name, np.asarray(value), **(more[0] if more else {}))
        if weights:
            writer.add_weights(weights)
    return Trace.open(folder)


def names(found: Pairing) -> dict[str, str]:
    return {each.port_event.name: each.event.name for each in found.pairs}


def test_spelling_and_scopes_do_not_matter() -> None:
    found = match_spelling(
        ["Blocks.0/attn", "x/y.z", "final"], ["net/blocks.0.attn", "y.z", "other/final"]
    )
    assert found == {
        "Blocks.0/attn": "net/blocks.0.attn",
        "x/y.z": "y.z",
        "final": "other/final",
    }


def test_an_ambiguous_tail_is_no_match() -> None:
    assert match_spelling(["out"], ["a/out", "b/out"]) == {}
    assert tokens("A/b.c[0]") == ("a", "b", "c", "0")


def test_equal_parameters_pin_modules(tmp_path: Path) -> None:
    w = {key: G.standard_normal((4, 6)).astype(np.float32) for key in ("one", "two")}
    reference = write(
        tmp_path / "ref",
        [("net/first", VALUES["a"]), ("net/second", VALUES["b"])],
        {"net/first.weight": w["one"], "net/second.weight": w["two"]},
    )
    port = write(
        tmp_path / "port",
        [("m/zeta", VALUES["b"] * 3), ("m/eta", VALUES["a"] * 3)],  # wrong, and in another order
        {"m/zeta.weight": w["two"].T.copy(), "m/eta.weight": w["one"].T.copy()},
    )
    ours, theirs = port.weights(), reference.weights()
    assert ours and theirs
    assert module_renames(match_weights(ours, theirs)) == {
        "m/zeta": "net/second",
        "m/eta": "net/first",
    }
    assert names(pair_traces(reference, port)) == {"m/zeta": "net/second", "m/eta": "net/first"}


def test_a_last_layer_with_a_table_of_the_network_is_not_the_network(tmp_path: Path) -> None:
    w = {key: G.standard_normal((4, 6)).astype(np.float32) for key in ("table", "one", "head")}
    theirs = {"net.table": w["table"], "net.one.weight": w["one"], "net.head.weight": w["head"]}
    ours = {"net.last.table": w["table"], "net.a.weight": w["one"], "net.last.b.weight": w["head"]}
    reference = write(tmp_path / "r", [("net.one", VALUES["a"])], theirs).weights()
    port = write(tmp_path / "p", [("net.a", VALUES["a"])], ours).weights()
    assert reference and port
    found = module_renames(match_weights(port, reference))
    assert found == {"net.a": "net.one", "net.last.b": "net.head"}


def test_a_name_of_a_module_with_a_value_inside_of_it(tmp_path: Path) -> None:
    table = VALUES["b"][0]
    events = [
        ("net/embed.proj", VALUES["a"]),
        ("net/embed.table", table),
        ("net/embed", VALUES["c"]),
    ]
    reference = write(tmp_path / "r", events)
    port = write(tmp_path / "p", [("proj", VALUES["a"]), ("embed", 2 * table), ("x", VALUES["c"])])
    assert names(pair_traces(reference, port))["embed"] == "net/embed.table"


def test_a_module_that_returns_what_it_takes_has_no_input_of_another(tmp_path: Path) -> None:
    """The value of a dropout is that of the activation before it, and so is its input."""
    a, b, c = (VALUES[name] for name in "abc")
    dropped = ("net/drop", b, {"slot": "in.0"}), ("net/drop", b)
    events = [("net/fc", a), ("net/act", b), *dropped, ("net/end", c)]
    reference = write(tmp_path / "r", [("net/act", a[:, :4], {"slot": "in.0"}), *events])
    own = [("up", a), ("gelu", a, {"slot": "in.0"}), ("gelu", 1.001 * b), ("down", 1.001 * c)]
    pairs = pair_traces(reference, write(tmp_path / "p", own)).pairs
    assert ("net/drop", "in.0") not in {(each.event.name, each.event.slot) for each in pairs}


@pytest.mark.parametrize("slot", ["out", "in.0"])
def test_parameters_of_a_model_whose_result_is_a_field_pair_no_value(
    slot: str, tmp_path: Path
) -> None:
    """A model holds some tokens itself; its port has them beside the layer that takes them."""
    tokens = {"net/tokens": G.standard_normal((4, 8)).astype(np.float32)}
    reference = write(
        tmp_path / "ref",
        [("net", VALUES["a"], {"slot": "out.sample"}), ("net/in", VALUES["b"])],
        tokens,
    )
    own = {"ctx.tokens": tokens["net/tokens"]}
    port = write(
        tmp_path / "port", [("ctx", VALUES["b"], {"slot": slot}), ("end", VALUES["a"])], own
    )
    found = names(pair_traces(reference, port))
    assert found == {"ctx": "net/in", "end": "net"}


def test_order_shape_and_content_pair_what_names_do_not(tmp_path: Path) -> None:
    sites = ["net/embed", "net/layer.0.query", "net/layer.0.mlp", "net/head"]
    reference = write(
        tmp_path / "ref", [(n, VALUES[v]) for n, v in zip(sites, "abcd", strict=True)]
    )
    port = write(
        tmp_path / "port",
        [
            ("stem", VALUES["a"]),
            ("blk0_q", VALUES["b"]),
            ("extra", VALUES["h"]),
            ("top", VALUES["d"]),
        ],
    )
    found = pair_traces(reference, port)
    assert names(found) == {"stem": "net/embed", "blk0_q": "net/layer.0.query", "top": "net/head"}
    assert found.unpaired_reference == ("net/layer.0.mlp",)
    assert found.unpaired_port == ("extra",)


def test_fused_projections_are_taken_apart(tmp_path: Path) -> None:
    q, k, v = (VALUES[name] for name in "abc")
    reference = write(tmp_path / "ref", [("attn.to_q", q), ("attn.to_k", k), ("attn.to_v", v)])
    port = write(tmp_path / "port", [("attn.qkv", np.concatenate([q, k, v], axis=-1))])
    (found,) = pair_traces(reference, port).pairs
    assert [event.name for event in found.reference] == ["attn.to_q", "attn.to_k", "attn.to_v"]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_map_gives_the_axis_of_fused_values(tmp_path: Path, axis: int) -> None:
    k, v = VALUES["a"], VALUES["b"]
    reference = write(tmp_path / "ref", [("k", k), ("v", v)])
    port = write(tmp_path / "port", [("fused", np.concatenate([k, v], axis=axis))])
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"fused": {"ref": ["k", "v"], "axis": axis}}))
    verdict = compare(reference, port, renames=read_name_map(path))
    assert verdict.verdict == "agree" and len(verdict.rows) == 1


def test_a_last_value_that_joins_other_layers_is_that_of_the_reference(tmp_path: Path) -> None:
    layers = [(f"net/layers.{n}", VALUES[v]) for n, v in enumerate("abc")]
    joined = [np.concatenate([VALUES[v] for v in pair], axis=-1) for pair in ("ab", "bc")]
    reference = write(tmp_path / "ref", [*layers, ("pipeline/embeds", joined[0])])
    own = [(f"L{n}", value) for n, (_, value) in enumerate(layers)]
    port = write(tmp_path / "port", [*own, ("prompt", joined[1])])
    assert names(pair_traces(reference, port))["prompt"] == "pipeline/embeds"
    verdict = compare(reference, port)
    assert (verdict.verdict, verdict.port_site) == ("diverge", "prompt")


def test_a_query_before_its_rotation_is_not_the_result_of_the_attention(tmp_path: Path) -> None:
    query, result = ({"slot": slot} for slot in ("in.query", "out"))
    reference = write(
        tmp_path / "ref",
        [
            ("net/x", VALUES["a"]),
            ("net/attn", VALUES["b"], query),
            ("net/attn", VALUES["c"], result),
            ("net/out", VALUES["d"]),
        ],
    )
    port = write(
        tmp_path / "port",
        [(n, VALUES[v]) for n, v in zip(("start", "q", "turned", "end"), "aebf", strict=True)],
    )
    found = pair_traces(reference, port)
    assert names(found)["turned"] == "net/attn" and "q" not in names(found)


def test_a_port_without_steps_is_paired_in_order(tmp_path: Path) -> None:
    values = [VALUES[name] for name in "abc"]
    reference = write(tmp_path / "ref", [("x", v, {"step": i}) for i, v in enumerate(values)])
    port = write(tmp_path / "port", [("x", v) for v in values])
    found = pair_traces(reference, port).pairs
    assert [(each.event.step, each.port_event.call) for each in found] == [(0, 0), (1, 1), (2, 2)]


def test_a_port_that_counts_steps_from_1_is_paired_by_step(tmp_path: Path) -> None:
    a, b, c, d = (VALUES[name] for name in "abcd")
    reference = write(
        tmp_path / "ref",
        [
            (n, v + i, {"step": i})
            for i in range(3)
            for n, v in (("x", a), ("q", b), ("k", c), ("v", d))
        ],
    )
    fused = np.concatenate([b, c, d], axis=-1)
    steps = [("x", a, {"step": 1}), ("x", a + 2, {"step": 3})]  # one of them was not recorded
    steps += [("qkv", fused + i, {"step": i + 1}) for i in range(3)]
    selftest = ("selftest/f32", np.arange(8, dtype=np.float32), {"kind": "selftest"})  # at step 0
    steps.sort(key=lambda event: event[2]["step"])
    port = write(tmp_path / "port", [selftest, *steps])
    found = pair_traces(reference, port).pairs
    assert {(each.event.name, each.event.step, each.port_event.step) for each in found} == {
        *(("x", 0, 1), ("x", 2, 3)),
        *(("q", step, step + 1) for step in range(3)),
    }


def test_inputs_may_be_named_on_one_side(tmp_path: Path) -> None:
    reference = write(tmp_path / "ref", [("m", VALUES["a"], {"slot": "in.hidden_states"})])
    port = write(tmp_path / "port", [("m", VALUES["a"], {"slot": "in.0"})])
    (found,) = pair_traces(reference, port).pairs
    assert (found.event.slot, found.port_event.slot) == ("in.hidden_states", "in.0")


def test_outputs_in_another_order_are_mapped(tmp_path: Path) -> None:
    reference = write(tmp_path / "ref", [("b", VALUES["a"]), ("b", VALUES["b"], {"slot": "out.1"})])
    port = write(tmp_path / "port", [("c", VALUES["b"]), ("c", VALUES["a"], {"slot": "out.1"})])
    path = tmp_path / "map.json"
    path.write_text('{"c": {"ref": "b", "ports": {"out": "out.1", "out.1": "out"}}}')
    found = pair_traces(reference, port, read_name_map(path)).pairs
    assert {(each.event.slot, each.port_event.slot) for each in found} == {
        ("out", "out.1"),
        ("out.1", "out"),
    }


@pytest.mark.parametrize(
    "text",
    ['{"a": 3}', '{"a": {"reff": "b"}}', '{"a": {"ref": [1]}}', '{"a": {"axis": "x"}}',
     '{"a": {"ports": []}}', '{"a": {"ports": {"out": 1}}}', '{"a": {"dims": 3}}',
     '{"a": {"ref_dims": ["b"]}}'],
)  # fmt: skip
def test_a_bad_map_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_name_map(path)
    assert "'a'" in str(error.value) and "\n" not in str(error.value)


def test_what_an_entry_of_a_map_says(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    whole = {
        "ref": ["x", "y"],
        "dims": "b c",
        "ref_dims": "c b",
        "ports": {"out": "out.1"},
        "axis": 1,
    }
    entries = {"gone": None, "plain": "r", "own": {}, "none": {"ref": None}, "whole": whole}
    path.write_text(json.dumps(entries))
    found = read_name_map(path)
    assert found["gone"].ref == found["none"].ref == ()
    assert found["plain"].ref == (Site("r"),) and found["own"].ref == (Site("own"),)
    assert found["own"].axis == -1 and not found["own"].slots and found["own"].dims is None
    assert found["whole"] == Rename((Site("x"), Site("y")), "b c", "c b", {"out": "out.1"}, axis=1)


def test_entries_that_do_not_fit_are_remarks_and_none_that_fits_is_an_error(tmp_path: Path) -> None:
    reference = write(tmp_path / "ref", [("a", VALUES["a"]), ("b", VALUES["b"])])
    port = write(tmp_path / "port", [("p", VALUES["a"]), ("q", VALUES["b"])])
    fits = {"p": Rename((Site("a"),))}
    wrong = {f"x{n}": Rename((Site("a"),)) for n in range(6)}
    assert check_name_map(fits, reference, port) == (fits, ())
    for count in (1, 4, 5, 6):
        some = dict(list(wrong.items())[:count])
        useful, remarks = check_name_map(fits | some, reference, port)
        assert useful == fits and len(remarks) == min(count, 4)
        assert (f"{count - 3} more entries" in remarks[-1]) == (count > 4)
    _, (remark,) = check_name_map(fits | {"q": Rename((Site("c"),))}, reference, port)
    assert "'c' is not a value of the reference" in remark
    assert check_name_map({}, reference, port) == ({}, ())
    with pytest.raises(InputError, match="No entry"):
        check_name_map(wrong, reference, port)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_time_of_one_step_is_no_table_of_times(rows: int, tmp_path: Path) -> None:
    """A port that records the sigma of each step as a schedule has no table with one entry."""
    sigmas, draw = np.array([0.875, 0.5, 0.0]), np.random.default_rng(0)
    for side in ("reference", "port"):
        with TraceWriter(tmp_path / side, Header()) as writer:
            if side == "reference":
                writer.add("pipeline/sigmas", sigmas, kind="schedule")
            for step in (0, 1):
                if side == "port":
                    time = np.full(rows, sigmas[step])
                    writer.add("step.time", time, kind="schedule", step=step)
                writer.add("pipeline/latents", draw.standard_normal((4, 8)) * 0 + step, step=step)
    found = compare(Trace.open(tmp_path / "reference"), Trace.open(tmp_path / "port"))
    assert found.verdict == "agree", found.sentence
