"""What one trace shows by itself."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from lydite.diff.trace_health import Remark, examine, headroom
from lydite.trace.events import Event, Header, Stats
from lydite.trace.reader import Trace
from lydite.trace.writer import Capture, TraceWriter

Array = NDArray[Any]
DRAW = np.random.default_rng(0)
LEVELS = ("full", "stats")


def normal(*shape: int) -> Array:
    return DRAW.standard_normal(shape).astype(np.float32)


@pytest.fixture(params=LEVELS)
def examined(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Write a trace, whole or as statistics, and examine it."""

    def run(write: Callable[[TraceWriter], None]) -> dict[str, Remark]:
        folder = tmp_path / "run"
        with TraceWriter(folder, Header(), Capture(level=request.param)) as writer:
            write(writer)
        with Trace.open(folder) as trace:
            return {remark.kind: remark for remark in examine(trace)}

    run.level = request.param  # pyright: ignore[reportFunctionMemberAccess]
    yield run


def test_a_sound_run_needs_no_remark(examined: Any) -> None:
    def write(w: TraceWriter) -> None:
        for step in range(3):
            w.add("t/blocks.0", normal(2, 8, 16), step=step)
            w.add("t/blocks.1", 5 * normal(2, 8, 16), step=step)

    assert examined(write) == {}


def test_who_made_the_first_nan(examined: Any) -> None:
    def write(w: TraceWriter) -> None:
        broken = normal(4, 8)
        broken[1, 2] = np.nan
        w.add("t/a", normal(4, 8), slot="in.0")
        w.add("t/a", normal(4, 8))
        w.add("t/b", normal(4, 8), slot="in.0", step=1)
        w.add("t/b", normal(4, 8), slot="in.1", step=1)
        w.add("t/b", normal(4, 8), step=1)
        w.add("t/b", broken, slot="out.1", step=1)
        w.add("t/c", broken, slot="in.0", step=1)

    remark = examined(write)["not-finite"]
    assert remark.serious and remark.site == "t/b" and remark.step == 1
    assert "t/b [out.1], step 1 from finite inputs (in.0, in.1)" in remark.sentence
    assert "1 NaN of 32 values" in remark.sentence


def test_a_maker_that_was_not_recorded(examined: Any) -> None:
    broken = np.full((4, 8), np.inf, np.float16)

    def seen_at_output(w: TraceWriter) -> None:
        w.add("t/a", broken)

    sentence = examined(seen_at_output)["not-finite"].sentence
    assert "32 Inf of 32 values, first at t/a" in sentence
    assert "65504" in sentence


def test_a_nan_that_came_in(examined: Any) -> None:
    def write(w: TraceWriter) -> None:
        w.add("t/a", np.full((4, 8), np.nan, np.float32), slot="in.0")
        w.add("t/a", np.full((4, 8), np.nan, np.float32))

    assert "first at t/a [in.0]" in examined(write)["not-finite"].sentence


def test_masks_may_be_infinite(examined: Any) -> None:
    mask = np.where(np.tri(8, dtype=bool), 0, -np.inf).astype(np.float32)

    def write(w: TraceWriter) -> None:
        w.add("t/attn", mask, slot="in.attention_mask")
        w.add("t/causal_mask", mask)
        if examined.level == "full":
            w.add("t/scores", mask + 1)  # told from a bug by its values only

    assert "not-finite" not in examined(write)


def test_what_would_overflow_in_float16(examined: Any) -> None:
    def write(w: TraceWriter) -> None:
        w.add("t/a", 1e3 * normal(4, 8))
        w.add("t/b", np.array([1.0, -131008.0], np.float32))
        w.add("t/c", np.array([1.0, 7e4], np.float32))

    remark = examined(write)["f16-overflow"]
    assert not remark.serious and remark.site == "t/b"
    assert "2 values at 2 sites" in remark.sentence and "2 × 65504" in remark.sentence


def test_little_room_in_float16(examined: Any) -> None:
    def write(w: TraceWriter) -> None:
        w.add("t/a", np.array([1.0, 32752.0], np.float32))

    assert "50% of float16's range" in examined(write)["f16-headroom"].sentence


@pytest.mark.parametrize(("share", "reported"), [(0.24, False), (0.26, True)])
def test_a_quarter_of_the_range_is_reported(examined: Any, share: float, reported: bool) -> None:
    def write(w: TraceWriter) -> None:
        w.add("t/a", np.array([1.0, 65504.0 * share], np.float32))

    assert ("f16-headroom" in examined(write)) == reported


def test_headroom_is_a_fraction() -> None:
    assert headroom(Stats(2, -65504.0, 3.0)) == 1.0
    assert headroom(Stats(2, nan=2)) == 0.0


def test_growth_along_the_blocks_is_called_normal(examined: Any) -> None:
    def write(w: TraceWriter) -> None:
        for block in range(6):
            w.add(f"t/transformer_blocks.{block}", 10.0 ** (block + 1) * normal(2, 8))
            w.add(f"t/transformer_blocks.{block}.attn", normal(2, 8))

    remark = examined(write)["range-grows"]
    assert not remark.serious and remark.site == "t/transformer_blocks.5"
    assert "t/transformer_blocks.0 to" in remark.sentence and "blocks.5, of 6." in remark.sentence


def test_small_values_may_grow(examined: Any) -> None:
    def write(w: TraceWriter) -> None:
        for block in range(3):
            w.add(f"t/transformer_blocks.{block}", 10.0 ** (block - 2) * normal(2, 8))

    assert "range-grows" not in examined(write)


@pytest.mark.parametrize(
    ("peaks", "reported"),
    [
        ((100.0, 1.1e4), True), ((100.0, 0.9e4), False),  # large enough
        ((1000.0, 1.1e4), True), ((1200.0, 1.1e4), False),  # ten times the first
        ((1.1e4, 100.0), False), ((1.1e4,), False),
    ],
)  # fmt: skip
def test_how_much_growth_is_reported(
    examined: Any, peaks: tuple[float, ...], reported: bool
) -> None:
    def write(w: TraceWriter) -> None:
        for block, peak in enumerate(peaks):
            w.add(f"t/blocks.{block}", np.array([0, peak], np.float32))

    assert ("range-grows" in examined(write)) == reported


@pytest.mark.parametrize(("bias", "serious"), [(0.0, False), (1.0, True)])
def test_a_layer_whose_parameters_are_zero_may_be_right(
    examined: Any, bias: float, serious: bool
) -> None:
    """As the embedded model's last text encoder, which gives zeros."""
    parameters = {"net/last.norm.weight": np.zeros(8), "net/last.norm.bias": np.full(8, bias)}

    def write(w: TraceWriter) -> None:
        for name in ("net/last.norm", "net/last", "net"):
            w.add(name, normal(4, 8), slot="in.0")
            w.add(name, np.zeros((4, 8), np.float32))
        w.add_weights(parameters)

    remark = examined(write)["all-zero"]
    assert remark.serious == serious and "net/last.norm, net/last, net:" in remark.sentence
    assert ("parameters of net/last.norm are zero" in remark.sentence) != serious


def test_dead_outputs(examined: Any) -> None:
    def write(w: TraceWriter) -> None:
        w.add("t/zero", normal(4, 8), slot="in.0")
        w.add("t/zero", np.zeros((4, 8), np.float32))
        w.add("t/after", np.zeros((4, 8), np.float32), slot="in.0")
        w.add("t/after", np.zeros((4, 8), np.float32))
        w.add("t/one", np.ones((4, 8), np.float32))
        w.add("t/table", np.zeros((4, 8), np.float32), kind="input")

    found = examined(write)
    assert found["all-zero"].serious and "at t/zero:" in found["all-zero"].sentence
    assert "t/one, 1 at the first" in found["constant"].sentence


def test_the_same_in_every_step(examined: Any) -> None:
    text, stuck = normal(4, 8), normal(4, 8)

    def write(w: TraceWriter) -> None:
        for step in range(3):
            w.add("t/context", text, slot="in.0", step=step)
            w.add("t/context", text, step=step)
            w.add("t/time", normal(4, 8), slot="in.0", step=step)
            w.add("t/time", stuck, step=step)
            w.add("t/good", normal(4, 8), step=step)

    remark = examined(write)["same-in-every-step"]
    assert remark.serious and remark.site == "t/time" and remark.step is None
    assert "t/context" not in remark.sentence


def test_the_same_in_every_step_with_inputs_unknown(examined: Any) -> None:
    text = normal(4, 8)

    def write(w: TraceWriter) -> None:
        for step in range(2):
            w.add("t/context", text, step=step)

    remark = examined(write)["same-in-every-step"]
    assert not remark.serious and "Right for text" in remark.sentence


def softmax(scores: Array, axis: int = -1) -> Array:
    e = np.exp(scores - scores.max(axis, keepdims=True))
    return (e / e.sum(axis, keepdims=True)).astype(np.float32)


def attention(folder: Path, values: Array, name: str, level: Any = "full") -> list[Remark]:
    with TraceWriter(folder, Header(), Capture(level=level)) as writer:
        writer.add(name, values)
    with Trace.open(folder) as trace:
        return [remark for remark in examine(trace) if remark.kind == "attention"]


@pytest.mark.parametrize("name", ["t/attn.attn_weights", "t/attn.softmax", "t/anything"])
def test_probabilities_are_summed_up(tmp_path: Path, name: str) -> None:
    (remark,) = attention(tmp_path / "a", softmax(normal(2, 4, 20, 24)), name)
    assert not remark.serious and "rows sum to one, entropy" in remark.sentence


@pytest.mark.parametrize("name", ["t/attn.attention_probs", "t/anything"])
def test_columns_that_sum_to_one(tmp_path: Path, name: str) -> None:
    for number, shape in enumerate([(2, 4, 20, 20), (2, 4, 20, 24)]):
        values = softmax(normal(*shape), -2)
        (remark,) = attention(tmp_path / str(number), values, name)
        assert remark.serious and "softmax runs over the wrong axis" in remark.sentence


def test_rows_that_do_not_sum_to_one(tmp_path: Path) -> None:
    values = 0.5 * softmax(normal(2, 4, 20, 20))
    for level in LEVELS:
        (remark,) = attention(tmp_path / level, values, "t/probs", level)
        assert remark.serious and "rows sum to 0.5" in remark.sentence
    assert attention(tmp_path / "other", values, "t/other") == []


def test_attention_that_collapsed(tmp_path: Path) -> None:
    (remark,) = attention(tmp_path / "a", softmax(600 * normal(1, 2, 32, 32)), "t/probs")
    assert not remark.serious and "1/√d" in remark.sentence


@pytest.mark.parametrize(
    ("scale", "keys", "reported"),
    [(600, 32, True), (600, 15, False), (600, 16, True), (3, 32, False)],
)
def test_when_attention_counts_as_collapsed(
    tmp_path: Path, scale: float, keys: int, reported: bool
) -> None:
    values = softmax(scale * normal(1, 2, 32, keys))
    (remark,) = attention(tmp_path / "a", values, "t/probs")
    assert ("1/√d" in remark.sentence) == reported


@pytest.mark.parametrize(("keys", "found"), [(3, 0), (4, 1)])
def test_few_keys_are_not_taken_for_attention(tmp_path: Path, keys: int, found: int) -> None:
    values = softmax(normal(1, 2, 8, keys))
    assert len(attention(tmp_path / "a", values, "t/anything")) == found


def test_values_are_enough_without_statistics(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with TraceWriter(folder, Header()) as writer:
        writer.add("t/a", np.full((2, 2), np.nan, np.float32))
    lines = folder / "events.jsonl"
    event = msgspec.json.decode(lines.read_bytes(), type=Event)
    lines.write_bytes(msgspec.json.encode(msgspec.structs.replace(event, stats=None)) + b"\n")
    with Trace.open(folder) as trace:
        assert [remark.kind for remark in examine(trace)] == ["not-finite"]


def test_nothing_to_look_at(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with TraceWriter(folder, Header(), Capture(level="stats")) as writer:
        writer.add("t/empty", np.zeros((0, 4), np.float32))
        writer.add("selftest/special", np.array([np.nan, np.inf]), kind="selftest")
        writer.add("t/ids", np.zeros((2, 4), np.int64), kind="ids")
    with (folder / "events.jsonl").open("ab") as lines:
        lines.write(b'{"i": 9, "name": "t/bare", "shape": [2], "dtype": "f32"}\n')
    with Trace.open(folder) as trace:
        assert examine(trace) == ()


def test_serious_remarks_come_first(examined: Any, tmp_path: Path) -> None:
    def write(w: TraceWriter) -> None:
        w.add("t/a", np.array([1.0, 1e6], np.float32))
        w.add("t/b", np.array([np.nan, 1e6], np.float32))

    assert list(examined(write)) == ["not-finite", "f16-overflow"]


def test_many_sites_are_counted_not_listed(examined: Any) -> None:
    def write(w: TraceWriter) -> None:
        for number in range(40):
            w.add(f"t/zero.{number}", np.zeros((4, 8), np.float32))

    sentence = examined(write)["all-zero"].sentence
    assert "and 36 more" in sentence and len(sentence) < 300


@pytest.mark.parametrize(("keys", "noted"), [(16, True), (15, False)])
@pytest.mark.parametrize(("entropy", "collapsed"), [(0.019, True), (0.021, False)])
def test_attention_on_one_key_is_noted(
    entropy: float, collapsed: bool, keys: int, noted: bool, tmp_path: Path
) -> None:
    def measured(rest: float) -> float:
        p = np.r_[1 - rest, np.full(keys - 1, rest / (keys - 1))]
        return float(-(p * np.log(p)).sum() / np.log(keys))

    rest = float(min(np.linspace(1e-6, 0.05, 20_000), key=lambda r: abs(measured(r) - entropy)))
    row = np.r_[1 - rest, np.full(keys - 1, rest / (keys - 1))]
    rows = np.stack([np.roll(row, n % keys) for n in range(keys)]).astype(np.float32)
    with TraceWriter(tmp_path / "run", Header()) as writer:
        writer.add("t/attn_weights", rows[None])
    with Trace.open(tmp_path / "run") as trace:
        (remark,) = (each for each in examine(trace) if each.kind == "attention")
    assert ("nearly every query attends to one" in remark.sentence) == (collapsed and noted)
    assert not remark.serious
