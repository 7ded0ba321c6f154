"""An agreement is only said of what was compared, and the end has to be."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import InputError
from lydite.diff.compare import compare
from lydite.diff.name_map import Rename
from lydite.diff.result import Verdict
from lydite.diff.verdict_text import divergence_text
from lydite.trace.events import Header, Site
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

RANDOM = np.random.default_rng(0)
# Sizes that nothing but the name can pair.
VALUES = {
    name: RANDOM.standard_normal((2, size)).astype(np.float32)
    for name, size in {"net/a": 7, "net/b": 11, "net/c": 13, "net": 17, "image": 19}.items()
}
STRANGE = RANDOM.standard_normal((3, 5, 23)).astype(np.float32)  # in no reference
KEPT = ("i", "name", "shape", "dtype")


def write(folder: Path, values: Mapping[str, Any], *, complete: bool = True) -> Trace:
    writer = TraceWriter(folder, Header(dtype="float32"))
    for name, value in values.items():
        writer.add(name, value)
    writer.close(complete=complete)
    return Trace.open(folder)


def judge(tmp_path: Path, port: Mapping[str, Any], **more: Any) -> Verdict:
    return compare(write(tmp_path / "ref", VALUES), write(tmp_path / "port", port), **more)


def some(names: Sequence[str]) -> dict[str, Any]:
    return {name: VALUES[name] for name in names}


@pytest.mark.parametrize(
    "port",
    [
        {**some(["net/a", "net/b"]), "made_up": STRANGE},
        {**some(["net/a", "net/b"]), "made_up": STRANGE, "more": STRANGE + 1},
    ],
)
def test_an_end_that_was_not_compared_is_no_agreement(tmp_path: Path, port: dict[str, Any]) -> None:
    found = judge(tmp_path, port)
    assert (found.verdict, found.exit_code) == ("cannot-compare", 2)
    for said in ("All 2 compared values agree", "after net/b", "made_up", "map.json"):
        assert said in found.sentence
    assert len(found.rows) == 2


@pytest.mark.parametrize(
    "port",
    [
        some(["net/a", "net/b"]),  # a part, all of it paired
        {"made_up": STRANGE, **some(["net/a", "net/b"])},  # what was made of it is compared
        some(list(VALUES)),
    ],
)
def test_a_part_that_is_compared_to_its_end_agrees(tmp_path: Path, port: dict[str, Any]) -> None:
    found = judge(tmp_path, port)
    assert found.verdict == "agree" and "not compared" not in found.sentence


def test_more_than_the_reference_has_agrees_and_is_told(tmp_path: Path) -> None:
    found = judge(tmp_path, {**VALUES, "upscaled": STRANGE})
    assert found.verdict == "agree"
    assert "1 value of the port after image was not compared (upscaled)" in found.sentence


def test_a_name_that_is_known_to_be_alone_is_no_open_end(tmp_path: Path) -> None:
    port = {**some(["net/a", "net/b"]), "made_up": STRANGE}
    assert judge(tmp_path, port, renames={"made_up": Rename(())}).verdict == "agree"


def test_inputs_that_were_not_compared_do_not_agree(tmp_path: Path) -> None:
    for side, shape, change in (("ref", (2, 7), 0.0), ("port", (2, 9), 1.0)):
        with TraceWriter(tmp_path / side, Header(dtype="float32")) as writer:
            writer.add("net/a", VALUES["net/a"])
            writer.add("net/b", np.ones(shape, np.float32), slot="in.0")
            writer.add("net/b", VALUES["net/b"] + change)
    found = compare(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"))
    assert found.site == "net/b" and "inputs agree" not in found.sentence
    assert "that agrees is net/a" in found.sentence


def test_values_before_the_bug_that_nobody_compared_are_counted(tmp_path: Path) -> None:
    port = {"net/a": VALUES["net/a"], "x": STRANGE, "y": STRANGE + 1, "net/c": VALUES["net/c"] + 1}
    found = judge(tmp_path, port)
    assert found.site == "net/c"
    assert "2 values of the port have no counterpart" in found.sentence
    last = found.rows[0]
    assert "between" not in divergence_text(found.rows, found.rows[1], last, ())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda x: x.T, "same values in another axis order; not a bug"),
        (lambda x: x[:, :4], "has another shape, and no later value does"),
        (lambda x: x + 1, None),
    ],
)
def test_a_wrong_value_that_later_ones_do_not_depend_on(
    value: Any, says: str | None, tmp_path: Path
) -> None:
    values = {f"net/{n}": RANDOM.standard_normal((7, 7)).astype(np.float32) for n in range(6)}
    changed = {**values, "net/1": np.ascontiguousarray(value(values["net/1"]))}
    found = compare(write(tmp_path / "ref", values), write(tmp_path / "port", changed))
    if says is None:
        assert (found.verdict, found.site) == ("diverge", "net/1")
    else:
        assert found.verdict == "agree"
        (remark,) = (each for each in found.remarks if each.startswith("net/1"))
        assert says in remark


@pytest.mark.parametrize("count", [3, 8, 11])
def test_what_was_assumed_of_axes_is_listed_up_to_a_number(tmp_path: Path, count: int) -> None:
    for side in ("ref", "port"):
        with TraceWriter(tmp_path / side, Header(dtype="float32")) as writer:
            for n in range(count):
                value, dims = STRANGE[:, : n % 3 + 2], f"a{n} b{n} c{n}"
                if side == "port":
                    value, dims = value.transpose(2, 0, 1), f"c{n} a{n} b{n}"
                writer.add(f"net/{n}", np.ascontiguousarray(value) + n, dims=dims)
    found = compare(Trace.open(tmp_path / "ref"), Trace.open(tmp_path / "port"))
    assert found.verdict == "agree" and all(row.note for row in found.rows)
    listed = [remark for remark in found.remarks if "from the traces" in remark]
    assert len(listed) == min(count, 8)
    assert (f"{count - 8} more assumptions" in found.remarks[-1]) == (count > 8)


@pytest.mark.parametrize("how", ["unfinished", "cut"])
def test_a_trace_that_was_cut_off_is_called_incomplete(tmp_path: Path, how: str) -> None:
    port = write(tmp_path / "port", VALUES, complete=how == "cut")
    if how == "cut":
        lines = port.folder / "events.jsonl"
        lines.write_bytes(lines.read_bytes()[:-9])
        port = Trace.open(port.folder)
    found = compare(write(tmp_path / "ref", VALUES), port)
    assert found.verdict == "agree" and found.incomplete == ("port",)
    assert compare(write(tmp_path / "again", VALUES), Trace.open(tmp_path / "ref")).incomplete == ()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"net/aa": Rename((Site("net/a"),))}, "'net/a'"),
        ({"net/aa": Rename(())}, "'net/a'"),
        ({"net/a": Rename((Site("imagee"),))}, "'image'"),
        ({"net/a": Rename((Site("net/b"), Site("net/z")))}, "'net/z'"),
    ],
)
def test_a_slip_in_the_map_is_an_error(tmp_path: Path, entry: dict[str, Rename], says: str) -> None:
    with pytest.raises(InputError) as error:
        judge(tmp_path, VALUES, renames=entry)
    assert says in str(error.value)


def test_rounding_is_expected_by_the_depth_of_the_reference_not_of_the_dump(tmp_path: Path) -> None:
    full, sparse = judge(tmp_path / "full", VALUES), judge(tmp_path / "few", some(["net/a", "net"]))
    floors = [next(r.floor for r in v.rows if r.site == "net") for v in (full, sparse)]
    assert floors[0] == floors[1]


def test_parameters_count_as_depth_where_few_values_were_recorded(tmp_path: Path) -> None:
    floors: list[float | None] = []
    for count in (1, 100):
        folder = tmp_path / str(count)
        with TraceWriter(folder, Header(dtype="float32")) as writer:
            writer.add("net", VALUES["net"])
            writer.add_weights({f"net/layers.{n}.weight": np.ones((2, 2)) for n in range(count)})
        trace = Trace.open(folder)
        floors.append(compare(trace, trace).rows[0].floor)
    assert floors[0] and floors[1] and floors[1] > 3 * floors[0]


def test_gates_that_saw_nothing_do_not_say_ok(tmp_path: Path) -> None:
    assert {gate.word for gate in judge(tmp_path, VALUES).gates} == {"not compared"}


def test_what_is_wrong_with_the_reference_alone_is_not_the_ports_health(tmp_path: Path) -> None:
    zeros = {**VALUES, "extra": np.zeros((2, 29), np.float32)}
    reference = write(tmp_path / "ref", zeros)
    alone = compare(reference, write(tmp_path / "port", VALUES))
    both = compare(reference, write(tmp_path / "both", zeros))
    assert not any(line.startswith("reference") for line in alone.health)
    assert any(line.startswith("reference") for line in both.health)


def test_an_end_of_which_nothing_was_kept_is_to_be_recorded_whole(tmp_path: Path) -> None:
    port = write(tmp_path / "port", some(["net/a", "net/b"]))
    lines = (port.folder / "events.jsonl").read_text().splitlines()
    last = {key: value for key, value in json.loads(lines[-1]).items() if key in KEPT}
    lines[-1] = json.dumps(last)
    (port.folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    found = compare(write(tmp_path / "ref", VALUES), Trace.open(port.folder))
    assert found.verdict == "cannot-compare"
    assert "after net/a" in found.sentence


def test_a_map_may_name_more_than_a_sparse_dump_has(tmp_path: Path) -> None:
    names = {"net/a": ("net/a",), "other.7": (), "other.8": ("net/z",)}
    renames = {name: Rename(tuple(map(Site, refs))) for name, refs in names.items()}
    found = judge(tmp_path, VALUES, renames=renames)
    assert found.verdict == "agree"
    assert {"other.7", "other.8"} <= set(" ".join(found.remarks).replace("'", " ").split())


def test_a_map_may_leave_the_step_out_of_a_name(tmp_path: Path) -> None:
    steps = {f"step{i}/{name}": value for i in range(2) for name, value in VALUES.items()}
    found = judge(
        tmp_path, steps, renames={name: Rename((Site(name),)) for name in ("net", "image")}
    )
    assert found.verdict == "agree"
