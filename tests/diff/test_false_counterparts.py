"""Values that are no counterparts: of other shapes, of other parts, of other places in a step."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.findings.replay.attention import _forms
from lydite.diff.measure.aligned import Layouts, align_values
from lydite.diff.measure.axes import has_parts_of, possible_fits
from lydite.diff.name_map import Rename
from lydite.diff.pairing.alignment import fused_values
from lydite.diff.pairing.blocks import BlockMap
from lydite.diff.pairing.name_matching import module_renames
from lydite.diff.pairing.pair_names import NamePairs
from lydite.diff.pairing.paired_events import Pair
from lydite.diff.pairing.pairing_methods import _is_source_of_earlier, by_sequences, by_values
from lydite.diff.pairing.results import by_ends_of_steps
from lydite.trace.events import Header, Site
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter
from support.findings import evidence

G = np.random.default_rng(4)


def write(
    folder: Path, events: Iterable[tuple[Any, ...]], weights: Mapping[str, Any] | None = None
) -> Trace:
    """Events of (name, value), with a slot and a step."""
    with TraceWriter(folder, Header(dtype="float32")) as writer:
        for name, value, *place in events:
            known = dict(zip(("slot", "step"), place, strict=False))
            writer.add(name, np.asarray(value, np.float32), **known)
        if weights:
            writer.add_weights(weights)
    return Trace.open(folder)


@pytest.mark.parametrize(
    ("port", "reference", "is_part"),
    [
        ((1, 36, 8), (2, 36, 8), True),  # half of the batch
        ((2, 36, 6, 8), (2, 36, 8), True),  # six times as many, on an axis of their own
        ((1, 4, 36, 8), (2, 36, 32), True),  # half of the batch, with heads apart
        ((36, 8), (2, 36, 8), True),
        ((72, 8), (2, 36, 24), True),  # a third of the width, with rows of rows
        ((2, 2, 3, 48), (2, 48, 4, 6), False),  # two axes are half as long
        ((2, 36, 8), (2, 36, 8), False),
    ],
)
def test_a_part_is_cut_along_one_axis(
    port: tuple[int, ...], reference: tuple[int, ...], is_part: bool
) -> None:
    assert has_parts_of(port, reference) == has_parts_of(reference, port) == is_part


def test_a_block_that_holds_a_table_is_not_what_is_computed_from_the_table() -> None:
    """The other layers of the block are not inside of the modulation, on either side."""
    found = {
        "layer0/ada.table": "blocks.0.scale_shift_table",
        "layer0/mlp/up.w": "blocks.0.ff.up.weight",
        "embed.cls": "embeddings.class_embedding",
        "embed/patch.w": "embeddings.patch.weight",
    }
    assert module_renames(found) == {
        "layer0/mlp/up": "blocks.0.ff.up",
        "embed": "embeddings",
        "embed/patch": "embeddings.patch",
    }
    back = module_renames({there: here for here, there in found.items()})
    assert "blocks.0" not in back and back["embeddings"] == "embed"


def test_what_is_close_and_has_other_parts_is_no_counterpart(tmp_path: Path) -> None:
    """A wrong block is closer to the module after the right one."""
    x, y, a, b = (G.standard_normal((2, 6, 8)) for _ in range(4))
    reference = write(tmp_path / "ref", [
        ("net/one.fc", a), ("net/one", x), ("net/two.fc", b), ("net/two", y),
    ])  # fmt: skip
    port = write(tmp_path / "port", [("p.0.lin", a + 1), ("p.0", 1.1 * y), ("p.1.lin", b + 1)])
    for is_known in (False, True):
        names = NamePairs(reference, port)
        if is_known:
            names.found["p.0.lin"] = Rename((Site("net/one.fc"),), how="weights")
            names.found["p.1.lin"] = Rename((Site("net/two.fc"),), how="weights")
        names.add({"p.0": Site("net/two")}, "order")
        assert ("p.0" in names.found) is not is_known
        names.add({"p.0": Site("net/one")}, "order")
        assert "p.0" in names.found


def test_values_recorded_by_hand_are_fused_only_where_they_are_equal(tmp_path: Path) -> None:
    clean, latents, given = (G.standard_normal((1, 2, 3, 4)) for _ in range(3))
    parts = [("pipe/clean", clean), ("pipe/latents", latents)]
    reference = write(tmp_path / "ref", [("net", given, "in.0"), ("net", given + 1), *parts])
    joined = np.concatenate([clean, latents], -1)
    for name, value, expected in (("close", 1.1 * joined, []), ("equal", joined, ["both"])):
        names = NamePairs(reference, write(tmp_path / name, [("both", value)]))
        fused = fused_values(
            names.comparer, names.free_events(), names.left_events(), BlockMap(names.refs())
        )
        assert [port for port, _ in fused] == expected


def sampler(folder: Path, *, port: bool, wrong: bool = False) -> Trace:
    """Steps of prediction, picture and latents; the port computes the picture first."""
    draw = np.random.default_rng(5)
    x = draw.standard_normal((1, 4, 8, 8))
    events: list[tuple[Any, ...]] = [("start" if port else "pipe/start", x)]
    for step in range(3):
        prediction = draw.standard_normal(x.shape)
        if wrong:
            prediction = 2 * np.roll(prediction, 1, -1)
        clean = x - 0.5 * prediction
        x = x - 0.1 * prediction
        if port:
            values = {"denoised": clean, "slope": prediction, "x": x}
        else:
            values = {"pipe/noise_pred": prediction, "pipe/clean": clean, "pipe/latents": x}
        events += [(name, value, "out", step) for name, value in values.items()]
    return write(folder, events)


def test_values_of_a_step_in_another_order_are_not_paired_in_sequence(tmp_path: Path) -> None:
    reference = sampler(tmp_path / "ref", port=False)
    port = sampler(tmp_path / "port", port=True, wrong=True)
    names = NamePairs(reference, port)
    by_sequences(names)
    assert "denoised" not in names.found and "slope" not in names.found
    found = compare(reference, port)
    assert found.verdict == "diverge" and found.port_site in ("denoised", "slope")
    pairs = {row.port_site: row.site for row in found.rows}
    assert pairs["x"] == "pipe/latents"


def test_the_picture_of_a_step_is_not_the_latents_after_it(tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    steps = [draw.standard_normal((3, 1, 4, 8, 8)) for _ in range(3)]
    sides: dict[str, list[tuple[Any, ...]]] = {"ref": [], "port": []}
    for step, (clean, latents, wrong) in enumerate(steps):
        sides["ref"] += [(name, value, "out", step) for name, value in
                         (("pipe/clean", clean), ("pipe/latents", latents))]  # fmt: skip
        sides["port"] += [
            ("denoised", latents + 0.1 * clean, "out", step),
            ("x", wrong, "out", step),
        ]
    names = NamePairs(
        write(tmp_path / "ref", sides["ref"]), write(tmp_path / "port", sides["port"])
    )
    by_values(names)
    assert "denoised" not in names.found
    by_ends_of_steps(names)
    assert names.refs() == {"x": (Site("pipe/latents"),)}


def test_the_order_of_axes_of_close_values_holds_for_wrong_ones(tmp_path: Path) -> None:
    """Any of the axes of one length may be the first in a wrong value."""
    x, y, z = (G.standard_normal((1, 36, 6)) for _ in range(3))
    reference = write(tmp_path / "ref", [("net/a", x), ("net/b", y)])
    port = write(tmp_path / "port", [("a", x.reshape(3, 3, 4, 6)), ("b", z.reshape(3, 3, 4, 6))])
    layouts = Layouts()
    for fit in possible_fits(port.events[0].shape, x.shape)[1:]:
        layouts.add(fit, Site("net/other"))  # in which other values are
    sides = zip(reference.events, port.events, strict=True)
    found = [align_values(Pair((a,), (b,), "name"), reference, port, layouts) for a, b in sides]
    fits = [each.fit for each in found]
    assert fits[0] is not None and fits[0] == fits[1] and fits[0].plain
    assert found[1].port is not None
    assert np.allclose(found[1].port, z.astype(np.float32))


def test_a_module_by_map_may_have_any_shape(tmp_path: Path) -> None:
    """What the user pairs is compared, and another shape is the verdict."""
    x = G.standard_normal((2, 6, 8))
    reference = write(tmp_path / "ref", [("net/a", x), ("net/b", x + 1)])
    port = write(tmp_path / "port", [("a", x), ("other", x[:, :4])])
    renames = {"other": Rename((Site("net/b"),), how="map")}
    found = compare(reference, port, renames=renames)
    assert (found.verdict, found.port_site) == ("diverge", "other")


def test_a_value_of_more_tokens_is_no_attention_of_fewer() -> None:
    for tokens, has_forms in ((18, False), (7, True)):
        shape = (1, tokens, 8)
        e = evidence(G.standard_normal(shape), G.standard_normal(shape))
        parts = {(False, False, part): G.standard_normal((1, 7, 8)) for part in "qkv"}
        assert bool([*_forms(e, parts, 2)]) is has_forms


def test_what_is_computed_after_the_scores_is_not_what_they_are_computed_from(
    tmp_path: Path,
) -> None:
    """The result of an attention has the axes of the query, with its heads together."""
    draw = np.random.default_rng(8)
    x, q, mixed = draw.standard_normal((3, 12, 32)).astype(np.float32)
    scores = draw.uniform(0, 1, (4, 12, 12)).astype(np.float32)
    with TraceWriter(tmp_path / "ref", Header(dtype="float32")) as writer:
        writer.add("net", x, slot="in.0")
        writer.add("net/q", x, slot="in.0")
        writer.add("net/q", q)
        writer.add("net/attn", q.reshape(12, 4, 8).swapaxes(0, 1), slot="in.q")
        writer.add("net/attn", scores, slot="out.1")
    with TraceWriter(tmp_path / "port", Header(dtype="float32")) as writer:
        for name, value in (("query", -q), ("scores", scores + 1), ("mixed", mixed)):
            writer.add(name, value)
    names = NamePairs(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"))
    names.found["scores"] = Rename((Site("net/attn", "out.1"),), how="similarity")
    sites = {name: _is_source_of_earlier(names, name, Site("net/q")) for name in names.port_names}
    assert sites == {"query": False, "scores": False, "mixed": True}


@pytest.mark.parametrize("guided", [True, False])
def test_a_wrong_guidance_is_not_one_of_the_two_predictions(guided: bool, tmp_path: Path) -> None:
    """It is closer to one of them than to the guided value, where the reference has that."""
    both = np.random.default_rng(9).standard_normal((2, 6, 8)).astype(np.float32)
    with TraceWriter(tmp_path / "ref", Header(dtype="float32")) as writer:
        writer.add("net/out", both)
        if guided:
            writer.add("guided", both[0] + 3 * (both[1] - both[0]))
    with TraceWriter(tmp_path / "port", Header(dtype="float32")) as writer:
        writer.add("out", both[1] + np.float32(0.1) * (both[0] - both[1]))
    names = NamePairs(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"))
    by_values(names)
    assert ("out" in names.found) == (not guided)
