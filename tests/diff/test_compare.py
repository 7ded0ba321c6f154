"""`compare` on a toy transformer: bugs found at their place, differences that are none let pass."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.diff.compare import compare
from lydite.diff.name_map import read_name_map
from lydite.diff.result import Verdict
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import Capture, TraceWriter
from support.toy_transformer import record

SITES = {
    "transpose": "net/blocks.2.attn.to_v",
    "swap": "net/blocks.2.attn.to_k",
    "root": "net/blocks.2.attn",
    "merge": "net/blocks.2.attn",
    "gelu": "net/blocks.2.mlp.act",
    "bias": "net/blocks.2.mlp",
    "chunks": "net/blocks.2.attn",
    "rms": "net/blocks.2.norm",
    "unbiased": "net/blocks.2.norm",
    "eps": "net/blocks.2.norm",
    "skip-norm": "net/blocks.2.attn",
    "pad": "pipeline/token_ids",
    "shift": "pipeline/sigmas",
    "noise": "pipeline/noise",
}
BELOW_BF16 = {"gelu", "unbiased", "eps"}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reference in four precisions."""
    root = tmp_path_factory.mktemp("reference")
    names = ("float64", "float32", "bfloat16", "float16")
    return {name: record(root / name, side="reference", dtype=name) for name in names}


def judge(
    reference: Path, port: Path, floor: Path | None = None, renames: Path | None = None
) -> Verdict:
    return compare(
        Trace.open(reference),
        Trace.open(port),
        floor=Trace.open(floor) if floor else None,
        renames=read_name_map(renames) if renames else None,
    )


@pytest.mark.parametrize("with_floor", [True, False])
@pytest.mark.parametrize("bug", SITES)
def test_a_bug_is_found_where_it_is(
    bug: str, with_floor: bool, traces: dict[str, Path], tmp_path: Path
) -> None:
    port = record(tmp_path / "port", bug=bug, shuffle=True)
    found = judge(traces["float32"], port, traces["float64"] if with_floor else None)
    assert (found.verdict, found.site, found.exit_code) == ("diverge", SITES[bug], 1)
    assert found.step == 0 and found.findings is not None


@pytest.mark.parametrize("bug", [bug for bug in SITES if bug not in BELOW_BF16])
def test_a_bug_shows_through_bfloat16(bug: str, traces: dict[str, Path], tmp_path: Path) -> None:
    port = record(tmp_path / "port", bug=bug, dtype="bfloat16", shuffle=True)
    found = judge(traces["float32"], port, traces["bfloat16"])
    assert (found.verdict, found.site) == ("diverge", SITES[bug])


def test_what_bfloat16_hides_is_said_to_be_hidden(traces: dict[str, Path], tmp_path: Path) -> None:
    port = record(tmp_path / "port", bug="gelu", dtype="bfloat16", shuffle=True)
    found = judge(traces["float32"], port, traces["bfloat16"])
    assert found.verdict == "agree" and "rounding" in found.sentence


@pytest.mark.parametrize("with_floor", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "difference",
    [
        {"shuffle": True},
        {"channels_first": False},
        {"channels_first": False, "dims": True},
        {"fused": True},
        {"split_batch": True},
        {"first_step": 1},
        {"bug": "stage"},  # a value written down before the norm instead of after it
        {"inputs": False},
        {"skip": ("net/blocks.1", "net/blocks.2.mlp.up")},
        {"rename": lambda name: name.replace("/", ".").upper()},
        {"rename": lambda name: name.split("/")[-1] if "blocks" in name else name},
        {
            "rename": lambda name: (
                name.replace("net/blocks.", "model.layers.")
                .replace("attn.to_", "self_attention.w")
                .replace("mlp.up", "ffn.fc1")
            )
        },
    ],
    ids=lambda value: next(iter(value)),
)
def test_an_equal_but_different_port_agrees(
    difference: dict[str, Any],
    dtype: str,
    with_floor: bool,
    traces: dict[str, Path],
    tmp_path: Path,
) -> None:
    port = record(tmp_path / "port", dtype=dtype, **difference)
    floor = traces["float64" if dtype == "float32" else dtype] if with_floor else None
    found = judge(traces["float32"], port, floor)
    assert found.verdict == "agree", found.sentence


@pytest.mark.parametrize("seed", range(8))
def test_no_clean_run_is_called_wrong(seed: int, tmp_path: Path) -> None:
    reference = record(tmp_path / "ref", side="reference", seed=seed, scale=1.0 + seed)
    for dtype in ("float32", "bfloat16"):
        port = record(tmp_path / dtype, dtype=dtype, seed=seed, shuffle=True, scale=1.0 + seed)
        assert judge(reference, port).verdict == "agree"


def test_a_value_of_another_point_is_a_remark(traces: dict[str, Path], tmp_path: Path) -> None:
    found = judge(traces["float32"], record(tmp_path / "port", bug="stage"))
    assert any("net/blocks.2.norm" in remark and "not a bug" in remark for remark in found.remarks)


def test_a_bug_is_found_after_a_value_of_another_stage(
    traces: dict[str, Path], tmp_path: Path
) -> None:
    port = record(tmp_path / "port", bug="gelu")
    reference = record(tmp_path / "ref", side="reference", bug="stage")
    found = judge(reference, port)
    assert found.site == "net/blocks.2.mlp.act"


def test_runs_of_another_prompt_are_not_compared(traces: dict[str, Path], tmp_path: Path) -> None:
    port = record(tmp_path / "port", conditions={"prompt": "a ring", "steps": 2})
    found = judge(traces["float32"], port)
    assert found.verdict == "cannot-compare" and "prompt" in found.sentence
    assert found.exit_code == 2


def test_traces_with_nothing_in_common_are_not_compared(tmp_path: Path) -> None:
    reference = record(tmp_path / "ref", side="reference", steps=1)
    port = record(tmp_path / "port", steps=1, skip=(), rename=lambda name: f"x{hash(name)}")
    only = Trace.open(port).events[:1]
    assert only  # the trace is readable; what it holds is cut down to a value of its own
    lines = (port / "events.jsonl").read_text().splitlines()
    strange = json.loads(lines[0]) | {"name": "elsewhere", "shape": [3], "kind": "scalar"}
    for key in ("shard", "key", "hash"):
        strange.pop(key, None)
    (port / "events.jsonl").write_text(json.dumps(strange) + "\n")
    assert judge(reference, port).verdict == "cannot-compare"


def test_a_map_joins_names_and_leaves_out(traces: dict[str, Path], tmp_path: Path) -> None:
    port = record(
        tmp_path / "port",
        rename=lambda name: f"n{abs(hash(name)) % 10**8}" if "attn" in name else name,
        bug="transpose",
    )
    names = {e.name for e in Trace.open(traces["float32"]).events if "attn" in e.name}
    renames = {f"n{abs(hash(name)) % 10**8}": name for name in names}
    path = tmp_path / "map.json"
    path.write_text(json.dumps(renames | {"net/blocks.0": None}))
    found = judge(traces["float32"], port, renames=path)
    assert found.site == SITES["transpose"]
    assert found.port_site and found.port_site.startswith("n") and found.port_site != found.site
    assert "net/blocks.0" in found.unpaired_reference


def test_the_errors_before_the_bug_are_rounding(traces: dict[str, Path], tmp_path: Path) -> None:
    port = record(tmp_path / "port", bug="swap", shuffle=True)
    found = judge(traces["float32"], port, traces["float64"])
    at = next(i for i, row in enumerate(found.rows) if row.wrong)
    before = [row for row in found.rows[:at] if row.error is not None]
    assert before and all(row.error < 1e-5 for row in before if row.error is not None)
    assert found.last_agreement == before[-1].site
    assert found.error is not None and found.error > 0.1


def test_a_nan_is_a_divergence(traces: dict[str, Path], tmp_path: Path) -> None:
    port = record(tmp_path / "port")
    trace = Trace.open(port)
    event = trace.events[-1]
    values = np.array(trace.read(event))
    values[0, 0] = np.nan
    from lydite.core import tensorfile

    assert event.shard and event.key
    with tensorfile.TensorFile.open(port / event.shard) as file:
        tensors = {name: np.array(file.read(name)) for name in file.header.tensors}
    trace.close()
    tensors[event.key] = values
    tensorfile.save(port / event.shard, tensors)
    found = judge(traces["float32"], port)
    assert found.site == "pipeline/latents" and found.error == float("inf")


def written(folder: Path, values: dict[str, Any], level: Any = "full", **more: Any) -> Path:
    with TraceWriter(folder, Header(**more), Capture(level)) as writer:
        for name, value in values.items():
            kind = "ids" if "ids" in name else "activation"
            writer.add(name, np.asarray(value), kind=kind)
    return folder


@pytest.mark.parametrize("level", ["sketch", "stats"])
@pytest.mark.parametrize(
    ("factor", "answer"), [(1.0, "agree"), (1.05, "diverge"), (0.0, "diverge")]
)
def test_sketches_and_statistics_are_compared(
    level: str, factor: float, answer: str, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).standard_normal((3, 40, 30)).astype(np.float32)
    found = judge(
        written(tmp_path / "ref", {"a": values, "b": values + 1}, level),
        written(tmp_path / "port", {"a": values, "b": (values + 1) * np.float32(factor)}, level),
    )
    assert found.verdict == answer
    if factor == 1.05:
        assert found.site == "b" and found.error == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("level", ["full", "sketch", "stats"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("count", "answer"), [(0, "agree"), (1, "diverge"), (48, "diverge")])
def test_nan_and_inf_are_a_divergence_whatever_was_kept(
    level: str, value: float, count: int, answer: str, tmp_path: Path
) -> None:
    """The finite values are all zero: neither their moments nor their sketch show it."""
    values = np.random.default_rng(0).standard_normal((4, 12)).astype(np.float32)
    broken = np.zeros_like(values)
    broken.flat[:count] = value
    found = judge(
        written(tmp_path / "ref", {"a": values, "b": np.zeros_like(values), "c": values}, level),
        written(tmp_path / "port", {"a": values, "b": broken, "c": values}, level),
    )
    assert (found.verdict, found.site) == (answer, "b" if count else None)


def test_a_port_that_runs_the_prompt_alone_has_half_of_the_ids(tmp_path: Path) -> None:
    ids, value = np.array([[7, 8, 9], [1, 2, 3]]), {"net": np.ones((2, 3), np.float32)}
    reference = written(tmp_path / "ref", {"pipeline/ids": ids} | value)
    for own, answer in (([1, 2, 3], "agree"), ([7, 8, 9], "agree"), ([1, 2, 4], "diverge")):
        port = written(tmp_path / f"port{own}", {"pipeline/ids": np.array(own)} | value)
        assert judge(reference, port).verdict == answer


def test_a_trace_that_fails_its_self_test_is_not_compared(tmp_path: Path) -> None:
    value = {"net": np.ones((2, 3), np.float32)}
    good = written(tmp_path / "good", value)
    with TraceWriter(tmp_path / "bad", Header()) as writer:
        writer.add("selftest/f32", np.arange(8, dtype=np.float32)[::-1].copy(), kind="selftest")
        writer.add("net", value["net"])
    for reference, port, side in (
        (good, tmp_path / "bad", "port"),
        (tmp_path / "bad", good, "ref"),
    ):
        found = judge(reference, port)
        assert (found.verdict, found.exit_code) == ("cannot-compare", 2)
        assert f"the {side}" in found.sentence and "self-test" in found.sentence


@pytest.mark.parametrize(("count", "more"), [(8, 0), (9, 1), (12, 4)])
def test_assumptions_are_listed_but_not_all(count: int, more: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    right = {
        f"net/v{n}": draw.standard_normal((n + 3, n + 4)).astype(np.float32) for n in range(count)
    }
    turned = {name: np.ascontiguousarray(value.T) for name, value in right.items()}
    found = judge(written(tmp_path / "ref", right), written(tmp_path / "port", turned))
    assert found.verdict == "agree"
    assert sum("axis order" in remark for remark in found.remarks) == count - more
    told = [remark for remark in found.remarks if "more assumptions of this kind" in remark]
    assert told == ([f"{more} more assumptions of this kind"] if more else [])
