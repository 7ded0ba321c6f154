"""Every method on a small model, block by block, from a few samples."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.calibrate.store.reader import CalibrationSet
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize import quantize_blocks as quantize_blocks_module
from lydite.quantize.blocks import BlockRows, choose_samples
from lydite.quantize.input_ranges import InputRange
from lydite.quantize.methods.reconstruct import Recipe
from lydite.quantize.plan import uniform_plan
from lydite.quantize.quantize_blocks import BlockResult, Settings, quantize_blocks
from lydite.quantize.work import read_result, write_result
from lydite.weights.load import parameter_hash, parameter_specs
from lydite.weights.quantized_format import is_sensitive

FEW = Recipe(iterations=3, batch=4, rounding_rate=1e-2)


def quantized(
    pipeline: Pipeline,
    opened: CalibrationSet,
    blocks: int = 1,
    finished: Mapping[str, BlockResult] | None = None,
    **options: Any,
) -> list[BlockResult]:
    """The results of the first blocks."""
    net = pipeline.model.network("transformer")
    before = parameter_hash(net)
    plan = uniform_plan(parameter_specs(net), options.pop("bits", 3), 64)
    settings = Settings(plan=plan, recipe=FEW, **options)
    rows = BlockRows(pipeline, opened, choose_samples(opened, 1, 1 << 30))
    steps = quantize_blocks(rows, pipeline.family, settings, finished=finished)
    results = [next(steps) for _ in range(blocks)]
    rows.install(rows.original)
    assert parameter_hash(net) == before
    for block, result in zip(rows.blocks, results, strict=False):
        assert set(result.weights) == {p for p in block.linears if p in plan.layers}
        assert result.errors and all(0 < each.after < 1 for each in result.errors)
    return results


@pytest.mark.parametrize(
    ("method", "act_bits"),
    [
        ("rtn", 8),
        ("hqq", None),
        ("gptq", None),
        ("awq", None),
        ("adaround", 8),
        ("joint", None),
        ("taqdit", 8),
        ("smoothquant", 8),
        ("ptq4dit", 8),
    ],
)
def test_every_method_gives_every_planned_layer(
    method: Any, act_bits: int | None, pipeline: Pipeline, opened: CalibrationSet
) -> None:
    results = quantized(pipeline, opened, method=method, act_bits=act_bits)
    for path, weight in results[0].weights.items():
        inside = not is_sensitive(f"{path}.weight")  # modulation is computed outside the blocks
        assert ("input_range" in weight.extras) == (act_bits is not None and inside)
        assert weight.grid.bits == (3 if inside else 8)


def test_awq_scales_values_and_what_takes_them(
    pipeline: Pipeline, opened: CalibrationSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = quantized(pipeline, opened, method="awq")[0]
    monkeypatch.setattr("lydite.quantize.quantize_blocks.value_pairs", lambda _: ())
    plain = quantized(pipeline, opened, method="awq")[0]
    changed = {
        path
        for path, weight in scaled.weights.items()
        if not np.array_equal(weight.grid.scales, plain.weights[path].grid.scales)
    }
    names = [path.split("attn")[-1].lstrip("2.") for path in changed]
    assert {"to_v", "to_out.0"} <= set(names) <= {"to_v", "to_out.0", "add_v_proj", "to_add_out"}
    assert sum(each.after for each in scaled.errors) < sum(each.after for each in plain.errors)


def test_learned_rounding_may_start_from_gptq(pipeline: Pipeline, opened: CalibrationSet) -> None:
    options: dict[str, Any] = {"method": "adaround", "bits": 2}
    usual, begun = (
        quantized(pipeline, opened, start=start, **options)[0] for start in ("weights", "gptq")
    )
    error = [sum(each.after for each in result.errors) for result in (usual, begun)]
    assert error[1] < error[0]  # after three iterations


@pytest.mark.parametrize("method", ["gptq", "taqdit"])
def test_a_low_rank_branch_makes_the_error_smaller(
    method: Any, pipeline: Pipeline, opened: CalibrationSet
) -> None:
    options: dict[str, Any] = {"method": method, "bits": 2, "act_bits": 8}
    plain, ranked = (quantized(pipeline, opened, rank=rank, **options) for rank in (0, 8))
    without, with_branch = (
        sum(error.after for result in each for error in result.errors) for each in (plain, ranked)
    )
    assert with_branch < without
    weight = ranked[0].weights["transformer_blocks.0.ff.net.0.proj"]
    assert weight.extras["low_rank_down"].shape[0] == weight.format.rank == 8
    modulation = ranked[0].weights["transformer_blocks.0.norm1.linear"]
    assert modulation.format.rank == 0


def test_a_branch_sees_the_input_it_was_computed_for(
    pipeline: Pipeline, opened: CalibrationSet
) -> None:
    """At 6 bits the layer is the linear it came from, with a shift and a divisor too."""
    (first,) = quantized(pipeline, opened, method="taqdit", bits=6, act_bits=8, rank=8)
    modules = dict(pipeline.model.network("transformer").named_modules())
    path = "transformer_blocks.0.ff.net.2"
    weight, linear = first.weights[path], modules[path]
    assert {"input_shift", "input_divisor", "low_rank_up"} <= set(weight.extras)
    shift, divisor = weight.extras["input_shift"], weight.extras["input_divisor"]
    # an input inside the range whatever the channel
    noise = np.random.default_rng(0).uniform(-1, 1, (50, len(shift))).astype(np.float32)
    x = mx.array(shift + 0.05 * divisor * noise)
    expected, found = linear(x), weight.layer()(x)  # pyright: ignore[reportCallIssue]
    assert np.abs(np.array(found - expected)).max() < 0.05 * np.abs(np.array(expected)).max()


def test_gptq_is_better_than_nearest(pipeline: Pipeline, opened: CalibrationSet) -> None:
    for result in quantized(pipeline, opened, 2, method="gptq"):
        for error in result.errors:
            assert error.after < 0.9 * error.nearest


@pytest.mark.parametrize("method", ["rtn", "joint", "taqdit", "ptq4dit"])
def test_groups_of_steps_have_ranges_of_their_own(
    method: Any, pipeline: Pipeline, opened: CalibrationSet
) -> None:
    options: dict[str, Any] = {"method": method, "bits": 8, "act_bits": 4}
    one, many = (quantized(pipeline, opened, act_groups=groups, **options) for groups in (1, 3))
    extras = many[0].weights["transformer_blocks.0.ff.net.2"].extras
    assert extras["input_range"].shape == (3, 3) and len(set(extras["input_range"][:, 0])) == 3
    assert (np.diff(extras["input_times"]) < 0).all()
    assert [extras[name].ndim for name in ("input_shift", "input_divisor") if name in extras] == (
        [1, 1] if method == "taqdit" else []
    )
    errors = [sum(error.after for error in each[0].errors) for each in (many, one)]
    assert errors[0] < errors[1]


def test_each_range_is_of_the_inputs_at_its_own_steps(
    pipeline: Pipeline, opened: CalibrationSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row counts for one group: the first ones have the larger timesteps."""
    seen: list[list[int]] = []
    times: list[Any] = []
    for_groups, group_times = InputRange.for_groups, quantize_blocks_module.group_times

    def keep(self: InputRange, groups: Iterable[tuple[float, Any]]) -> InputRange:
        listed = list(groups)
        seen.append([len(values) for _, values in listed])
        return for_groups(self, listed)

    def keep_times(own: Any, groups: int) -> list[float]:
        times.append(own)
        return group_times(own, groups)

    monkeypatch.setattr(InputRange, "for_groups", keep)
    monkeypatch.setattr(quantize_blocks_module, "group_times", keep_times)
    for groups in (3, 2):
        quantized(pipeline, opened, method="rtn", act_bits=8, act_groups=groups)
        first, *others = np.unique(times[-1], return_counts=True)[1][::-1].tolist()
        counts = [first, *others] if groups == 3 else [first + others[0], others[1]]
        assert len(seen) > 3 and seen == [counts] * len(seen)
        seen.clear()


def test_a_finished_block_from_its_file_is_followed_by_the_same_block(
    pipeline: Pipeline, opened: CalibrationSet, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"method": "joint", "bits": 4, "act_bits": 8, "act_groups": 3}
    first, second = quantized(pipeline, opened, 2, **options)
    for name, result in (("first", first), ("second", second)):
        write_result(tmp_path / name, result)
    finished = {first.path: read_result(tmp_path / "first")}
    _, again = quantized(pipeline, opened, 2, finished=finished, **options)
    write_result(tmp_path / "again", again)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "second").read_bytes()
