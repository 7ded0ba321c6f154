"""The rows of each block are those of the network itself, sample by sample, in both versions."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from lydite.calibrate.replay import Replay, latent_of
from lydite.calibrate.store.index import Row
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.errors import CalibrationError, InputError
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.blocks import (
    TIMES,
    BlockRows,
    _flatten,
    _unflatten,
    choose_samples,
    find_blocks,
    output_arrays,
)
from lydite.quantize.plan import uniform_plan
from lydite.quantize.quantize_blocks import Settings, round_layers
from lydite.quantize.watch_modules import watch_calls
from lydite.weights.load import parameter_hash, parameter_specs
from lydite.weights.quantized_format import is_sensitive

Outputs = dict[str, list[np.ndarray]]


@pytest.mark.parametrize("linked", [True, False])
def test_rows_are_what_the_network_gives_its_blocks(
    linked: bool, pipeline: Pipeline, opened: CalibrationSet
) -> None:
    """Whether they are computed from those of the block before, or by the network from its start;
    behind blocks that are quantized the network is one with these layers."""
    before = parameter_hash(pipeline.model.network("transformer"))
    samples = choose_samples(opened, 1, 5)
    rows = BlockRows(pipeline, opened, samples)
    assert set(rows._links) == {rows.blocks[1].path}
    if not linked:
        rows._links.clear()
    plan = uniform_plan(parameter_specs(rows.network), 2, 64)
    replay = Replay(pipeline, opened.settings)

    def outputs(sample: Row) -> Outputs:
        seen: Outputs = {}

        def keep(path: str, args: Any, kwargs: Any, output: Any) -> Any:
            seen[path] = [np.array(array) for array in output_arrays(output)]
            return output

        with watch_calls({block.path: block.module for block in rows.blocks}, keep):
            Replay(pipeline, opened.settings).run(sample.entry, latent_of(opened, sample))
        return seen

    full = [outputs(sample) for sample in samples]
    walked: list[str] = []
    for block, groups in rows.walk():
        walked.append(block.path)
        assert parameter_hash(rows.network) == before  # at full precision whenever it is seen
        assert sorted(n for each in groups for n in each.samples) == list(range(len(samples)))
        rows.install(rows.quantized)  # of earlier blocks
        behind = [outputs(sample) for sample in samples]
        rows.install({path: rows.full[path] for path in rows.quantized})
        for each in groups:
            size = len(each) // len(each.samples)
            times = [replay.timestep(samples[n].entry) for n in each.samples]
            assert np.array_equal(each.shared[TIMES], np.repeat(np.array(times, np.float32), size))
            for side, known in ((each.full, full), (each.quantized, behind)):
                for number, found in enumerate(each.forward(block.module, side)):
                    wanted = np.concatenate([known[n][block.path][number] for n in each.samples])
                    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        changed = [
            np.abs(one[block.path][0] - other[block.path][0]).max()
            for one, other in zip(full, behind, strict=True)
        ]
        assert (min(changed) > 1e-3) == (len(walked) > 1)
        # the modulation is computed ahead of the blocks: linked rows leave out its rounding
        inside = [path for path in block.linears if not is_sensitive(f"{path}.weight")]
        layers = round_layers({path: rows.full[path] for path in inside}, Settings("rtn", plan))
        rows.quantized |= {path: weight.layer() for path, weight in layers.items()}
    assert walked == [block.path for block in rows.blocks] and len(walked) == 2
    rows.install(rows.original)
    assert parameter_hash(pipeline.model.network("transformer")) == before


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.mlp = [nn.Linear(4, 8), nn.Linear(8, 4)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = [Part() for _ in range(11)]


def test_a_block_has_its_own_linears_and_no_others() -> None:
    family: Any = SimpleNamespace(blocks=[SimpleNamespace(modules=r"blocks\.\d+\.(attn|mlp)")])
    net = Net()
    found = find_blocks(family, net)
    assert [block.path for block in found] == [f"blocks.{n}" for n in range(11)]
    for block, module in zip(found, net.blocks, strict=True):
        assert block.module is module
        assert set(block.linears) == {f"{block.path}.{x}" for x in ("attn", "mlp.0", "mlp.1")}
    nothing: Any = SimpleNamespace(blocks=[SimpleNamespace(modules="other")], title="A family")
    assert find_blocks(nothing, net) == []


def test_a_network_without_blocks_and_a_block_that_is_not_called_are_refused(
    pipeline: Pipeline, opened: CalibrationSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = BlockRows(pipeline, opened, choose_samples(opened, 1, 1))
    with pytest.raises(CalibrationError, match=r"blocks\.9: the network does not call it"):
        rows._inputs(SimpleNamespace(path="blocks.9", module=Part()), rows._samples[0])  # type: ignore[arg-type]
    monkeypatch.setattr("lydite.quantize.blocks.find_blocks", lambda *_: [])
    with pytest.raises(InputError, match="no blocks to learn from"):
        BlockRows(pipeline, opened, choose_samples(opened, 1, 1))


def test_arguments_of_a_call_are_the_same_after_they_were_kept() -> None:
    x, table = mx.arange(3), mx.ones((2, 2))
    args, kwargs = (x, None, [table, "word"]), {"mask": None, "sizes": (4, [x, 5])}
    leaves = _flatten(args, kwargs)
    assert leaves["args.0"] is x and leaves["args.2.0"] is table
    again, named = _unflatten(leaves)
    assert again[0] is x and again[1] is None and again[2][0] is table and again[2][1] == "word"
    assert named["mask"] is None and named["sizes"][0] == 4 and named["sizes"][1][0] is x
    assert _unflatten(_flatten((), {})) == ([], {})
