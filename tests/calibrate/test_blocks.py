"""Inputs and outputs of modules on disk: the right values, in a budget, whatever kills the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

from lydite.calibrate.blocks import (
    BlockOptions,
    BlockRecorder,
    SizeEstimate,
    _bytes,
    _command,
    store_blocks,
)
from lydite.calibrate.replay import network, replaying
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.verify import verify
from lydite.cli.calibrate.blocks import blocks
from lydite.core.errors import CalibrationError, InputError, LyditeError
from lydite.pipelines.pipeline import Pipeline
from lydite.trace.mlx_capture import walk
from lydite.weights.load import to_mlx
from support import replays

PLENTY = 10**9
KEPT = BlockOptions(tokens=5, dtype="F32")
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support import replays
from lydite.calibrate.blocks import BlockOptions, store_blocks
from lydite.calibrate.store.reader import CalibrationSet

def counted(done, total):
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)

with CalibrationSet.open(sys.argv[2]) as opened:
    pipeline = replays.loaded(Path(sys.argv[3]))
    stored = BlockOptions(5, "F32")
    store_blocks(opened, pipeline, Path(sys.argv[4]), stored, 10**9, on_sample=counted)
"""


def test_what_is_stored_is_what_the_modules_take_and_give(
    opened: CalibrationSet, pipeline: Pipeline, memory: Path
) -> None:
    store_blocks(opened, pipeline, memory / "blocks", KEPT, PLENTY)
    observer = replays.Everything(BlockRecorder(pipeline.family.blocks, 0).wants)
    with (
        CalibrationSet.open(memory / "blocks") as made,
        replaying(pipeline, opened.settings, observer) as replay,
    ):
        pairs = list(zip(made.rows("sample"), opened.rows("sample"), strict=True))
        chosen: set[tuple[int, ...]] = set()
        for stored, row in pairs:
            observer.values.clear()
            replay.run(row.entry, opened.read(row)["x"])
            arrays = made.read(stored)
            picked = {stream: arrays[f"tokens.{stream}"] for stream in ("image", "text")}
            assert {len(each) for each in picked.values()} == {5}
            chosen.add(tuple(picked["image"].tolist()))
            # attn, attn2, ff and ff_context of the first block; attn and ff of the last
            assert len(observer.values) == 4 + 2 + 2 + 2 + 3 + 2
            for (path, port), (value,) in observer.values.items():
                found = arrays[f"{path}.{port}"]
                if ".attn" in path and port.startswith("in"):
                    expected = value
                else:
                    text = "context" in path or port == "out.1"
                    expected = value[:, picked["text" if text else "image"]]
                np.testing.assert_array_equal(found, expected)
            assert (stored.entry.sigma, stored.image) == (row.entry.sigma, row.image)
    assert len(chosen) == len(pairs)  # each sample has its own


def test_of_a_call_for_each_prompt_the_first_is_kept(pipeline: Pipeline) -> None:
    recorder = BlockRecorder(pipeline.family.blocks, 0)
    path = "transformer_blocks.0.ff"
    assert recorder.wants(path, "out")
    for value in (1.0, 2.0):
        recorder.add(path, "out", mx.full((1, 4, 8), value))
    assert recorder.tensors[f"{path}.out"].max() == 1
    recorder.begin("next")
    recorder.add(path, "out", mx.full((1, 4, 8), 3.0))
    assert recorder.tensors[f"{path}.out"].min() == 3


def test_a_module_gives_the_stored_output_for_the_stored_input(
    opened: CalibrationSet, pipeline: Pipeline, memory: Path
) -> None:
    store_blocks(opened, pipeline, memory / "blocks", KEPT, PLENTY)
    modules = dict(walk(network(pipeline)))
    with CalibrationSet.open(memory / "blocks") as made:
        arrays = made.read(next(iter(made.rows("sample"))))
    for path in ("transformer_blocks.0.ff", "transformer_blocks.0.ff_context"):
        given = modules[path](to_mlx(arrays[f"{path}.in.0"]))  # pyright: ignore[reportCallIssue]
        np.testing.assert_allclose(np.array(given), arrays[f"{path}.out"], atol=1e-5)
    path = "transformer_blocks.0.attn"
    inputs = [to_mlx(arrays[f"{path}.in.{n}"]) for n in range(2)]
    for given, port, stream in zip(
        modules[path](*inputs),  # pyright: ignore[reportCallIssue]
        ("out", "out.1"),
        ("image", "text"),
        strict=True,
    ):
        kept = np.array(given)[:, arrays[f"tokens.{stream}"]]
        np.testing.assert_allclose(kept, arrays[f"{path}.{port}"], atol=1e-5)


def test_a_killed_run_is_finished_to_the_same_content(
    drawn: Path, pipeline: Pipeline, memory: Path
) -> None:
    tests = str(Path(replays.__file__).parents[1])
    arguments = [tests, drawn, pipeline.model.path, memory / "killed"]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    counted: list[int] = []
    with CalibrationSet.open(drawn) as opened:
        store_blocks(opened, pipeline, memory / "whole", KEPT, PLENTY)
        store_blocks(
            opened, pipeline, memory / "killed", KEPT, PLENTY,
            on_sample=lambda done, total: counted.append(done),
        )  # fmt: skip
    assert counted == [4, 5, 6, 7, 8, 9]
    found = [verify(memory / name) for name in ("whole", "killed")]
    assert all(each.complete for each in found)
    assert found[0].content_hash == found[1].content_hash


def test_the_budget_is_kept_and_told_before_a_byte_is_written(
    opened: CalibrationSet, pipeline: Pipeline, memory: Path
) -> None:
    told: list[tuple[SizeEstimate, bool]] = []

    def volume(found: SizeEstimate) -> None:
        told.append((found, (memory / "some").exists()))

    whole = store_blocks(opened, pipeline, memory / "all", KEPT, PLENTY)
    assert (whole.images, whole.samples) == (3, 9)
    budget = whole.bytes - 1
    found = store_blocks(opened, pipeline, memory / "some", KEPT, budget, on_estimate=volume)
    assert told == [(found, False)] and found.images == 2 and found.bytes <= budget
    with CalibrationSet.open(memory / "some") as made:
        assert [image.number for image in made.plan.images] == [0, 1]
    shards = sum(path.stat().st_size for path in (memory / "some" / "shards").iterdir())
    assert 0.85 * found.bytes < shards < found.bytes
    with pytest.raises(CalibrationError, match="holds other images"):
        store_blocks(opened, pipeline, memory / "some", KEPT, PLENTY)
    with pytest.raises(InputError, match="one image with its 3 samples takes"):
        store_blocks(opened, pipeline, memory / "none", KEPT, 1000)
    assert not (memory / "none").exists()


def test_one_block_at_a_time(opened: CalibrationSet, pipeline: Pipeline, memory: Path) -> None:
    kept = BlockOptions(5, "F32", "transformer_blocks.1.*")
    store_blocks(opened, pipeline, memory / "all", KEPT, PLENTY)
    store_blocks(opened, pipeline, memory / "one", kept, PLENTY)
    with CalibrationSet.open(memory / "all") as every, CalibrationSet.open(memory / "one") as one:
        whole, part = (made.read(next(iter(made.rows()))) for made in (every, one))
    names = {name for name in whole if name.startswith("transformer_blocks.1")}
    assert part.keys() == names | {"tokens.image"}  # its text goes nowhere: it is the last block
    assert all(np.array_equal(part[name], whole[name]) for name in part)
    with pytest.raises(InputError, match="fits no attention or feed-forward"):
        store_blocks(opened, pipeline, memory / "none", BlockOptions(modules="*.nothing"), PLENTY)


def test_the_command(drawn: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(blocks, list(map(str, arguments)))
        if isinstance(result.exception, LyditeError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    told = run(drawn, "--out", tmp_path / "blocks", "--tokens", 4)
    assert "9 samples of 3 images" in told and "KiB for" in told
    assert verify(tmp_path / "blocks").complete
    for arguments, message in (
        ((drawn, "--out", drawn), "--out is the set itself"),
        ((drawn, "--out", drawn / "blocks"), "lies inside the calibration set"),
        ((tmp_path, "--out", tmp_path / "b"), "no calibration set"),
        ((drawn, "--out", tmp_path / "b", "--budget", "much"), "--budget is 'much'"),
        ((tmp_path / "blocks", "--out", tmp_path / "b"), "made by another tool"),
        ((drawn, "--out", tmp_path / "blocks", "--tokens", 3), "made with other settings"),
    ):
        with pytest.raises(LyditeError, match=message):
            run(*arguments)
    assert not (tmp_path / "b").exists()
    assert os.listdir(tmp_path) == ["blocks"]


def test_a_request_to_stop_ends_it_after_the_sample_under_way(
    opened: CalibrationSet, pipeline: Pipeline, memory: Path
) -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        store_blocks(
            opened, pipeline, memory / "blocks", KEPT, PLENTY,
            on_sample=lambda number, _: done.append(number), stopping=lambda: len(done) == 2,
        )  # fmt: skip
    with CalibrationSet.open(memory / "blocks") as made:
        assert done == [1, 2] and len(list(made.rows("sample"))) == 2


def test_the_command_that_resumes_it_has_every_option() -> None:
    stored = BlockOptions(5, "BF16", "*.ff")
    found = _command(Path("set"), Path("out"), stored, 7, ["--model", "m"])
    assert found == (
        "lydite calibrate blocks set --out out --tokens 5 --modules '*.ff' --budget 7 "
        "--store-dtype bfloat16 --model m"
    )
    assert "--tokens" not in _command(Path("set"), Path("out"), BlockOptions(), 7, [])


def test_numbers_of_tokens_keep_their_width_in_the_estimate() -> None:
    floats, numbers = np.zeros(100, np.float32), np.zeros(100, np.int64)
    assert _bytes({"x": floats}, "F32") - _bytes({"x": floats}, "F16") == 200
    assert _bytes({"x": numbers}, "F32") == _bytes({"x": numbers}, "F16") >= 800


def test_tokens_of_a_level_with_another_length_are_stored_with_the_module(
    pipeline: Pipeline,
) -> None:
    recorder = BlockRecorder(pipeline.family.blocks, 5)
    recorder.begin("0")
    for path, length in (("transformer_blocks.0.ff", 9), ("transformer_blocks.1.ff", 7)):
        recorder.add(path, "in.0", mx.arange(length * 2.0).reshape(1, length, 2))
    first, second = recorder.chosen("image", 9), recorder.chosen("image", 7)
    tokens = {name: value.tolist() for name, value in recorder.tensors.items() if "tokens" in name}
    assert tokens == {
        "tokens.image": first.tolist(), "transformer_blocks.1.ff.tokens": second.tolist(),
    }  # fmt: skip
