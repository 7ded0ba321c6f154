"""Pairs that siblings and neighbours give, where values alone do not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.pairing.blocks import BlockMap, LastWords, SiblingRules
from lydite.diff.pairing.name_matching import match_spelling
from lydite.diff.pairing.pair_traces import pair_traces
from lydite.diff.pairing.paired_events import Pairing
from lydite.trace.events import Header, Site
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

G = np.random.default_rng(3)


def noise(*shape: int) -> Any:
    return G.standard_normal(shape).astype(np.float32)


def write(folder: Path, events: list[tuple[Any, ...]]) -> Trace:
    with TraceWriter(folder, Header()) as writer:
        for name, value, *more in events:
            writer.add(name, np.asarray(value), **(more[0] if more else {}))
    return Trace.open(folder)


def names(found: Pairing) -> dict[str, str]:
    return {each.port_event.name: each.event.name for each in found.pairs}


def sites(*names: str) -> tuple[Site, ...]:
    return tuple(map(Site, names))


def how(found: Pairing) -> dict[str, str]:
    return {each.port_event.name: each.how for each in found.pairs}


def test_two_examples_make_a_rule_and_one_does_not() -> None:
    one = {"joint.0.qkv": sites("b.1.q", "b.1.k")}
    assert SiblingRules(one).predict("joint.1.qkv") is None
    two = SiblingRules({**one, "joint.4.qkv": sites("b.5.q", "b.5.k")})
    assert two.predict("joint.2.qkv") == sites("b.3.q", "b.3.k")
    assert two.predict("joint.2.other") is None


def test_blocks_of_other_numbers_do_not_pair() -> None:
    blocks = BlockMap({f"j.{i}.x": sites(f"net/b.{i}.y") for i in range(3)})
    assert blocks.allows("j.4.norm2", "net/b.4.norm1.norm")
    assert not blocks.allows("j.4.norm2", "net/b.5.norm1.norm")
    assert blocks.allows("head", "net/b.5.norm1.norm")


def test_a_wrong_block_keeps_the_names_of_its_siblings(tmp_path: Path) -> None:
    values = {(i, n): noise(2, 6, 8) for i in range(4) for n in "uvw"}
    end = noise(2, 6, 4)
    reference = write(
        tmp_path / "ref",
        [(f"net/layers.{i}.{n}", values[i, n]) for i in range(4) for n in "uvw"]
        + [("net/final", end)],
    )
    ours = {"u": "alpha", "v": "beta", "w": "gamma"}
    wrong = {(3, "v"), (3, "w")}
    port = write(
        tmp_path / "port",
        [
            (f"blk{i}_{ours[n]}", noise(2, 6, 8) if (i, n) in wrong else values[i, n])
            for i in range(4)
            for n in "uvw"
        ]
        + [("final", noise(2, 6, 4))],
    )
    found = pair_traces(reference, port)
    assert names(found)["blk3_beta"] == "net/layers.3.v"
    assert how(found)["blk3_beta"] == "siblings"
    assert compare(reference, port).site == "net/layers.3.v"


def test_a_sibling_that_differs_while_all_after_it_agrees_is_no_counterpart(tmp_path: Path) -> None:
    values = [noise(2, 6) for _ in range(4)]
    after = [noise(3, 5) for _ in range(3)]
    halves = np.roll(values[3], 3, axis=1)  # scale and shift the other way round
    reference = write(
        tmp_path / "ref",
        [(f"net/layers.{i}.mod", v) for i, v in enumerate(values)]
        + [(f"net/rest_{n}", v) for n, v in zip("abc", after, strict=True)],
    )
    port = write(
        tmp_path / "port",
        [(f"blk{i}_ada", v) for i, v in enumerate([*values[:3], halves])]
        + [(f"rest_{n}", v) for n, v in zip("abc", after, strict=True)],
    )
    assert "blk3_ada" not in names(pair_traces(reference, port))
    assert compare(reference, port).verdict == "agree"


def test_equal_values_win_over_close_ones_with_better_names(tmp_path: Path) -> None:
    first, second = noise(2, 6, 8), noise(2, 6, 8)
    close = first + 0.2 * second
    reference = write(tmp_path / "ref", [("net/norm1.norm", close), ("net/norm2", first)])
    port = write(tmp_path / "port", [("norm1_norm", first), ("zeta", close)])
    # The streams run in another order, and names speak for the wrong pair.
    assert names(pair_traces(reference, port)) == {
        "norm1_norm": "net/norm2",
        "zeta": "net/norm1.norm",
    }


def test_a_dump_without_statistics_is_paired_by_content(tmp_path: Path) -> None:
    a, b = noise(2, 6, 8), noise(2, 6, 8)
    reference = write(tmp_path / "ref", [("net/first", a), ("net/second", b)])
    port = write(tmp_path / "port", [("p", a), ("q", b)])
    bare = tuple(msgspec.structs.replace(event, stats=None) for event in port.events)
    found = pair_traces(reference, replace(port, events=bare))
    assert names(found) == {"p": "net/first", "q": "net/second"}


def test_a_value_alone_between_two_pairs_is_taken_by_its_place(tmp_path: Path) -> None:
    a, b, c = noise(2, 6, 8), noise(2, 4), noise(2, 6, 8)
    reference = write(tmp_path / "ref", [("net/a", a), ("net/middle", b), ("net/result", c)])
    port = write(tmp_path / "port", [("zz", a), ("yy", noise(2, 4)), ("result", noise(2, 6, 8))])
    found = pair_traces(reference, port)
    assert (names(found)["yy"], how(found)["yy"]) == ("net/middle", "position")
    assert any("a guess" in remark and "yy" in remark for remark in found.remarks)
    right = write(tmp_path / "right", [("zz", a), ("yy", noise(2, 4)), ("result", c)])
    assert "yy" not in names(pair_traces(reference, right))  # what comes after it agrees


def test_a_wrong_fused_projection_finds_its_parts(tmp_path: Path) -> None:
    def block(i: int) -> list[tuple[Any, ...]]:
        parts = [(f"net/b.{i}.attn.to_{n}", noise(2, 6, 8)) for n in "qkv"]
        return [(f"net/b.{i}.mod", mods[i]), *parts]

    mods = [noise(2, 12) for _ in range(3)]
    reference = write(tmp_path / "ref", [each for i in range(3) for each in block(i)])
    port = write(
        tmp_path / "port",
        [
            each
            for i in range(3)
            for each in ((f"blocks.{i}.ada", mods[i]), (f"blocks.{i}.qkv", noise(2, 6, 24)))
        ],
    )
    found = [
        each
        for each in pair_traces(reference, port).pairs
        if each.port_event.name == "blocks.0.qkv"
    ]
    assert [e.name for e in found[0].reference] == [f"net/b.0.attn.to_{n}" for n in "qkv"]


def test_one_short_name_is_no_tail_of_a_long_one() -> None:
    assert match_spelling(["v"], ["text/block.0.attention.v"]) == {}
    assert match_spelling(["noise"], ["pipeline/noise"]) == {"noise": "pipeline/noise"}


def test_an_input_in_another_layout_is_one_and_settles_the_rest(tmp_path: Path) -> None:
    start, later = noise(1, 8, 8, 8), noise(1, 8, 8, 8)
    reference = write(
        tmp_path / "ref", [("pipe/noise", start, {"kind": "input"}), ("pipe/latents", later)]
    )
    port = write(
        tmp_path / "port",
        [
            ("noise", start.transpose(0, 2, 3, 1), {"kind": "input"}),
            ("latents", later.transpose(0, 2, 3, 1)),
        ],
    )
    found = compare(reference, port)
    assert found.verdict == "agree" and not found.ignored_rows


def test_an_axis_order_found_in_one_step_holds_in_the_next(tmp_path: Path) -> None:
    first, second = noise(1, 8, 8, 8), noise(1, 8, 8, 8)
    off = second + 0.05 * noise(1, 8, 8, 8)
    reference = write(tmp_path / "ref", [("x", first, {"step": 0}), ("x", second, {"step": 1})])
    port = write(
        tmp_path / "port",
        [(("x"), v.transpose(0, 2, 3, 1), {"step": i}) for i, v in enumerate((first, off))],
    )
    row = compare(reference, port).rows[1]
    assert row.error is not None and row.error < 0.1


@pytest.mark.parametrize(
    ("pairs", "known"),
    [
        ([(0, 0)], False), ([(0, 0)] * 2, True),  # block 0 is block 0
        ([(0, 1)] * 5, False), ([(0, 1), (1, 2)], True),  # a shift needs two blocks
        ([(0, 0)] * 9 + [(1, 2)], True), ([(0, 0)] * 8 + [(1, 2)], False),  # nine of ten agree
        ([(n, n + 1) for n in range(9)] + [(9, 3)], True),
        ([(n, n + 1) for n in range(8)] + [(9, 3)], False),
    ],
)  # fmt: skip
def test_most_pairs_have_to_agree_on_which_block_is_which(
    pairs: list[tuple[int, int]], known: bool
) -> None:
    named = {f"p.{a}.x{n}": sites(f"r.{b}.y{n}") for n, (a, b) in enumerate(pairs)}
    blocks = BlockMap(named)
    assert blocks.knows("p.7.z") == known
    shift = pairs[0][1] - pairs[0][0]
    assert blocks.allows("p.4.z", f"r.{4 + shift}.z")
    assert blocks.allows("p.4.z", f"r.{5 + shift}.z") == (not known)


def test_last_words_of_a_block_without_a_number() -> None:
    known = {
        f"enc/{n}/attn0/{own}/mix": sites(f"net/down.{n}.blocks.0.{ref}.sdpa")
        for n in range(2)
        for own, ref in (("self", "attn1"), ("cross", "attn2"))
    }
    free = sites("net/mid.blocks.0.attn1.sdpa", "net/mid.blocks.0.attn2.sdpa")
    words = LastWords(known)
    assert words.counterparts("mid/attn/cross/mix", free) == [free[1:]]
    assert words.counterparts("mid/attn/mix", free) == []  # the last word alone tells nothing


@pytest.mark.parametrize("wrong", [False, True])
def test_a_name_that_contains_others_is_the_module_around_them(tmp_path: Path, wrong: bool) -> None:
    reference, port = [], []
    x = noise(2, 6, 16)
    for block, own in (("a", "first"), ("b", "second")):
        inner, out = np.tanh(x), np.sin(3 * x)
        reference += [(f"net/{block}.norm", inner), (f"net/{block}.out", out)]
        reference += [(f"net/{block}.drop", out), (f"net/{block}", x + out)]
        own_sum = out if wrong and block == "b" else x + out
        port += [(f"{own}.n", inner), (f"{own}.o", out), (own, own_sum.transpose(1, 0, 2))]
        x = x + out
    last = [np.cos(port[-1][1].transpose(1, 0, 2)), np.cos(x)]
    reference.append(("net/end", last[1]))
    port.append(("end", last[0]))
    verdict = compare(write(tmp_path / "r", reference), write(tmp_path / "p", port))
    assert verdict.verdict == ("diverge" if wrong else "agree")
    assert verdict.port_site == ("second" if wrong else None)


def test_the_values_that_end_each_step_are_counterparts(tmp_path: Path) -> None:
    reference, port = [], []
    for step in range(3):
        at = {"step": step}
        given, guided, latents = noise(1, 4, 6, 8), noise(1, 4, 6, 8), noise(1, 4, 6, 8)
        reference += [("net", given, at), ("p/guided", guided, at), ("p/latents", latents, at)]
        port += [("out", given, at), ("pred", 3 * latents + noise(1, 4, 6, 8), at)]
        port += [("x0", noise(1, 4, 6, 8), at), ("x", 2 * guided + noise(1, 4, 6, 8), at)]
    found = pair_traces(write(tmp_path / "r", reference), write(tmp_path / "p", port))
    assert names(found)["x"] == "p/latents"


def test_calls_of_a_module_in_one_that_returns_fields(tmp_path: Path) -> None:
    tables = [noise(5, 8), noise(5, 8)]
    reference = [("net/rope", table) for table in tables]
    result = noise(2, 16)
    right = write(tmp_path / "r", [*reference, ("net", result, {"slot": "out.last"})])
    own = write(tmp_path / "p", [("local", tables[0]), ("global", tables[1]), ("y", result)])
    found = pair_traces(right, own)
    assert {name: each for name, each in names(found).items() if name != "y"} == {
        "local": "net/rope",
        "global": "net/rope",
    }
