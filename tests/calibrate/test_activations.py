"""Statistics of activations: NumPy's over all the data, and nothing is changed by looking."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lydite.calibrate.activations.collect import Selection, collect
from lydite.calibrate.activations.file import read_file
from lydite.calibrate.activations.moments import BOUND, FLOOR, Moments
from lydite.calibrate.activations.places import SLOTS, Places
from lydite.calibrate.replay import Replay, network, replaying
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.errors import LyditeError, NotFiniteError
from lydite.models.layers import on_cpu
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.recording import record
from lydite.trace.mlx_capture import walk
from lydite.trace.reader import Trace
from lydite.weights.load import parameter_hash
from support import replays

Values = dict[tuple[str, str, int], NDArray[np.float32]]  # layer, port, step


def everything(opened: CalibrationSet, pipeline: Pipeline) -> Values:
    """All values of all samples, one array for each layer, port and step."""
    seen: dict[tuple[str, str, int], list[NDArray[np.float32]]] = {}
    observer = replays.Everything(Places(network(pipeline)).wants)
    with replaying(pipeline, opened.settings, observer) as replay:
        for row in opened.rows("sample"):
            replay.run(row.entry, opened.read(row)["x"])
            assert row.step is not None
            for (path, port), arrays in observer.values.items():
                flat = [array.reshape(-1, array.shape[-1]) for array in arrays]
                seen.setdefault((path, port, row.step), []).extend(flat)
            observer.values.clear()
    return {key: np.concatenate(parts) for key, parts in seen.items()}


def check(found: Moments, values: NDArray[np.float32]) -> None:
    """Against NumPy over the concatenated values."""
    wide = values.astype(np.float64)
    assert found.count == len(values)
    np.testing.assert_array_equal(found.low, values.min(axis=0))
    np.testing.assert_array_equal(found.high, values.max(axis=0))
    np.testing.assert_array_equal(found.absmax, np.abs(values).max(axis=0))
    np.testing.assert_array_equal(found.zeros, (values == 0).sum(axis=0))
    np.testing.assert_array_equal(found.negative, (values < 0).sum(axis=0))
    scale = np.abs(wide).max()
    limit = 1e-12 if on_cpu() else 1e-6  # a GPU sums in float32
    assert np.abs(found.mean - wide.mean(axis=0)).max() <= limit * scale
    assert np.abs(found.variance - wide.var(axis=0)).max() <= limit * scale**2
    mean, variance = found.whole()
    assert abs(mean - wide.mean()) <= limit * scale
    assert abs(variance - wide.var()) <= limit * scale**2
    for share in (0.001, 0.5, 0.999):
        true = float(np.quantile(values, share, method="inverted_cdf"))
        assert abs(found.quantile(share) - true) <= abs(true) * BOUND + FLOOR


def test_statistics_are_numpys_over_the_concatenated_data(
    opened: CalibrationSet, pipeline: Pipeline, whole: Path
) -> None:
    values, found = everything(opened, pipeline), read_file(whole)
    layers = Places(network(pipeline)).layers
    places = [key for key in values if key[0] in layers]
    assert len(layers) > 30 and len(places) == 2 * len(layers) * replays.STEPS
    for layer, port, step in places:
        check(found.table[layer, SLOTS[port], step], values[layer, port, step])


@pytest.mark.parametrize("name", ["attn", "attn2"])
def test_q_k_v_and_softmax_are_those_of_the_attention(
    name: str, opened: CalibrationSet, pipeline: Pipeline
) -> None:
    path, places = f"transformer_blocks.0.{name}", Places(network(pipeline))
    observer = replays.Everything(places.wants)
    row = next(iter(opened.rows("sample")))
    for each in (places, observer):
        with replaying(pipeline, opened.settings, each) as replay:
            replay.run(row.entry, opened.read(row)["x"])
    streams = (("norm_q", "norm_k", "to_v"), ("norm_added_q", "norm_added_k", "add_v_proj"))
    made = [  # q, k and v as (B, H, L, D/H), of the image and then of the text
        [_by_head(observer.values[f"{path}.{part}", "out"][0]) for part in parts]
        for parts in (streams if name == "attn" else streams[:1])
    ]
    q, k, v = (
        np.concatenate(parts, axis=2).astype(np.float64) for parts in zip(*made, strict=True)
    )
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    # These are the weights that the network used: they give what leaves its attention.
    tokens = made[0][0].shape[2]
    attended = (weights @ v).swapaxes(1, 2)[:, :tokens]
    given = observer.values[f"{path}.to_out.0", "in.0"][0]
    np.testing.assert_allclose(attended.reshape(given.shape), given, atol=1e-5)
    seen = places.taken()
    for part, values in (("q", q), ("k", k), ("v", v)):
        merged = values.swapaxes(1, 2).reshape(-1, 64).astype(np.float32)
        check(seen[path, part], merged)
    found = seen[path, "softmax"]
    by_head = weights.transpose(0, 2, 3, 1).reshape(-1, 4)
    assert found.count == len(by_head)
    np.testing.assert_allclose(found.mean, by_head.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.high, by_head.max(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.variance, by_head.var(axis=0), rtol=1e-4)


def _by_head(value: NDArray[np.float32]) -> NDArray[np.float32]:
    """(B, H, L, D/H) of what a norm gives, as it is, or of what a projection gives."""
    if value.ndim == 4:
        return value
    B, L, _ = value.shape
    return value.reshape(B, L, 4, -1).swapaxes(1, 2)


def test_values_are_those_the_trace_records(
    opened: CalibrationSet, pipeline: Pipeline, tmp_path: Path
) -> None:
    observer = replays.Everything(Places(network(pipeline)).wants)
    run = pipeline.plan(replays.REQUEST.replace(prompt=replays.PROMPTS[1]))
    record(pipeline, run, 1, tmp_path / "trace")
    compared = 0
    with (
        Trace.open(tmp_path / "trace") as trace,
        replaying(pipeline, opened.settings, observer) as replay,
    ):
        for row in opened.rows("sample"):
            if row.image != 1:
                continue
            observer.values.clear()
            replay.run(row.entry, opened.read(row)["x"])
            assert row.step is not None
            for (path, port), (value,) in observer.values.items():
                event = trace.find(f"transformer/{path}", port, row.step, 0)
                if event is None and row.step:  # what is the same at every step is recorded once
                    event = trace.find(f"transformer/{path}", port, 0, 0)
                if event is not None:
                    expected = trace.read(event)
                    # The set was drawn with joined products: on some CPUs their last bits differ.
                    np.testing.assert_allclose(value, expected, 1e-4, 1e-4, err_msg=path)
                    compared += 1
    assert compared >= 2 * len(Places(network(pipeline)).layers) * replays.STEPS


def test_where_guidance_is_off_the_negative_prompt_is_not_counted(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    request = replays.REQUEST.replace(guidance_interval=(0.0, 0.5))
    guided = replays.draw_set(tmp_path / "guided", pipeline, images=1)
    folder = replays.draw_set(tmp_path / "set", pipeline, images=1, request=request)
    with CalibrationSet.open(folder) as opened, CalibrationSet.open(guided) as other:
        collect(opened, pipeline, tmp_path / "out.sqlite", Selection())
        key = ("norm_out.linear", "in.0", 2)  # computed for all steps at once, from the text
        (one,), (negative, prompt) = (everything(each, pipeline)[key] for each in (opened, other))
    assert np.array_equal(one, prompt) and not np.array_equal(one, negative)
    table = read_file(tmp_path / "out.sqlite").table
    for layer in ("norm_out.linear", "time_text_embed.text_embedder.linear_1"):
        assert [table[layer, "in", step].count for step in range(3)] == [2, 2, 1]
    for layer in ("context_embedder", "pos_embed.proj", "transformer_blocks.0.attn.to_q"):
        counts = [table[layer, "in", step].count for step in range(3)]
        assert counts[0] == counts[1] == 2 * counts[2]


def test_looking_changes_only_last_bits_and_leaves_nothing_behind(
    opened: CalibrationSet, pipeline: Pipeline
) -> None:
    class Blind:
        def wants(self, path: str, slot: str) -> bool:
            return False

        def add(self, path: str, slot: str, value: object) -> None:
            raise AssertionError

    model = network(pipeline)
    before, classes = parameter_hash(model), [type(module) for _, module in walk(model)]
    results: list[list[NDArray[np.float32]]] = []
    for observer in (Blind(), Places(model)):
        with replaying(pipeline, opened.settings, observer) as replay:
            rows = list(opened.rows("sample"))
            results.append([replay.run(row.entry, opened.read(row)["x"]) for row in rows])
    plain = Replay(pipeline, opened.settings, Blind())
    results.append([plain.run(row.entry, opened.read(row)["x"]) for row in rows])
    for first, second, third in zip(*results, strict=True):
        assert np.array_equal(first, second) or not on_cpu()
        np.testing.assert_allclose(first, third, 1e-4, 1e-4)  # third: with joined products
    with pytest.raises(RuntimeError), replaying(pipeline, opened.settings, Places(model)):
        raise RuntimeError
    assert [type(module) for _, module in walk(model)] == classes
    assert parameter_hash(model) == before


def test_values_that_are_counted_in_pieces_are_counted_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(0).standard_normal((1000, 7)).astype(np.float32) + 40
    monkeypatch.setattr("lydite.calibrate.activations.moments.VALUES_AT_ONCE", 500)
    check(Moments.of(values), values)
    monkeypatch.setattr("lydite.calibrate.activations.moments.VALUES_AT_ONCE", 3)  # less than a row
    check(Moments.of(values), values)


def test_what_is_not_finite_is_named(opened: CalibrationSet, pipeline: Pipeline) -> None:
    row = next(iter(opened.rows("sample")))
    latent = np.full_like(opened.read(row)["x"], np.nan)
    places = Places(network(pipeline))
    with replaying(pipeline, opened.settings, places) as replay:
        replay.run(row.entry, latent)
        with pytest.raises(NotFiniteError, match=r"pos_embed\.proj \[in\]"):
            places.taken()


def test_another_model_is_refused(opened: CalibrationSet, tmp_path: Path) -> None:
    other = replays.loaded(replays.make_small(tmp_path / "other", seed=1))
    with pytest.raises(LyditeError, match="not the one the set was made with"):
        collect(opened, other, tmp_path / "out.sqlite", Selection())
    assert not (tmp_path / "out.sqlite").exists() and not list(tmp_path.glob("*.work"))
