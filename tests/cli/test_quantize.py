"""`lydite quantize` on a small model: exports that load anywhere, resuming, errors."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lydite.calibrate.run import Model
from lydite.cli.main import lydite
from lydite.cli.quantize import calibration as quantize_calibration
from lydite.cli.quantize.model import _proof
from lydite.cli.quantize.plan import _print, _record
from lydite.cli.quantize.settings import check_places
from lydite.core.errors import FileError, InputError, LyditeError
from lydite.core.files import size_text
from lydite.pipelines.model_files import DEFAULTS, find_components
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize import quantize_model, quantize_network
from lydite.quantize.export import export
from lydite.quantize.grid import Grid
from lydite.quantize.plan import LayerPlan, Plan
from lydite.quantize.provenance import read_provenance
from lydite.quantize.quantize_blocks import BlockResult
from lydite.quantize.quantized_weight import QuantizedWeight
from lydite.quantize.sensitivity import Sensitivity
from lydite.quantize.work import read_result, write_result
from support import replays
from support.exports import PROVENANCE

EVALUATION = ["--eval-images", "2", "-q"]


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(lydite, ["quantize", *map(str, arguments)])


def _done(*arguments: object) -> Result:
    result = _run(*arguments)
    assert result.exit_code == 0, result.output or result.exception
    return result


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two blocks, meant to be run in two steps."""
    folder = replays.make_small(tmp_path_factory.mktemp("models") / "small")
    (folder / DEFAULTS).write_text('{"steps": 2}')
    return folder


@pytest.fixture(scope="module")
def calibration(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize") / "set"
    return replays.draw_set(folder, replays.loaded(small), images=2)


@pytest.fixture(scope="module")
def exported(small: Path, calibration: Path) -> Path:
    out = calibration.parent / "gptq"
    _done(small, "--bits", 3, "--set", calibration, "--out", out, *EVALUATION)
    return out


@pytest.fixture(scope="module")
def against(exported: Path) -> tuple[str, Path]:
    """The original's pictures, which need not be drawn again for each result."""
    return "--against", exported / "evaluation" / "reference"


def test_an_export_is_a_model_with_its_proof(exported: Path) -> None:
    record = read_provenance(exported)
    assert record.method == "gptq" and record.improved == len(record.units) == 2
    assert np.mean(list(record.changed.values())) > 0.05
    assert record.bytes_after < 0.55 * record.bytes_before
    evaluation = json.loads((exported / "evaluation.json").read_text())
    assert evaluation["paired"]["psnr"]["n"] == 2
    assert evaluation["record"]["seeds"]["first"] == 1_000_000  # apart from calibration
    assert not exported.with_name("gptq.work").exists()
    assert CliRunner().invoke(lydite, ["audit", str(exported)]).exit_code == 0


def test_only_packed_weights_are_in_memory(exported: Path) -> None:
    pipeline = Pipeline.open(exported, dtype="float32")
    layer = pipeline.model.network("transformer").transformer_blocks[0].ff.net[2]
    assert layer.weight.dtype == mx.uint32 and layer.bits == 3
    x = mx.random.normal((40, 256), key=mx.random.key(0))
    packed = mx.quantized_matmul(x, layer.weight, layer.scales, layer.biases, group_size=64, bits=3)
    assert mx.allclose(layer(x), packed + layer.bias, atol=1e-4).item()


# A network with the names and sizes of a file, and no code of lydite.
PLAIN_NETWORK = """
import json, sys, mlx.core as mx, mlx.nn as nn
weights = mx.load("q4/transformer/diffusion_pytorch_model.safetensors")
bits = json.load(open("q4/transformer/config.json"))["quantization"]
def build(path):
    names = {name[len(path):].split(".")[0] for name in weights if name.startswith(path)}
    if names and all(name.isdigit() for name in names):
        return [build(f"{path}{number}.") for number in range(max(map(int, names)) + 1)]
    if "scales" in names:
        rows, words = weights[path + "weight"].shape
        return nn.Linear(words * 32 // bits.get(path[:-1], bits)["bits"], rows, "bias" in names)
    part = nn.Module()
    for name in names:
        found = weights.get(path + name)
        part[name] = build(f"{path}{name}.") if found is None else mx.zeros_like(found)
    return part
net = build("")
"""


def test_plain_mlx_loads_it_as_the_documentation_says(exported: Path, tmp_path: Path) -> None:
    """In a process that has no lydite."""
    text = (Path(__file__).parents[2] / "docs/quantization.md").read_text()
    (printed,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "q4").symlink_to(exported)
    shown = """
block = net.transformer_blocks[0]
assert block.ff.net[2].bits == 3 and block.norm1.linear.bits == 8 and "lydite" not in sys.modules
mx.save("plain.npy", block.ff.net[2](mx.ones((1, 256))))
"""
    program = PLAIN_NETWORK + printed + shown
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=tmp_path)
    layer = Pipeline.open(exported, dtype="float32").model.network("transformer")
    own = np.array(layer.transformer_blocks[0].ff.net[2](mx.ones((1, 256))))
    assert np.allclose(np.load(tmp_path / "plain.npy"), own, atol=1e-3)


class _Killed(BaseException):
    pass


def test_a_killed_run_resumes_to_the_same_file(
    exported: Path,
    small: Path,
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (small, "--bits", 3, "--set", calibration, "--out", tmp_path / "again")
    added: list[str] = []
    with monkeypatch.context() as patch:
        add = quantize_network.Work.add

        def kill(self: Any, number: int, result: Any) -> None:
            if len(added) == 2:
                raise _Killed
            add(self, number, result)
            added.append(result.path)

        patch.setattr(quantize_network.Work, "add", kill)
        with pytest.raises(_Killed):
            CliRunner().invoke(lydite, ["quantize", *map(str, words), *EVALUATION])
    assert not (tmp_path / "again").exists()
    other_set = replays.draw_set(tmp_path / "set", replays.loaded(small), images=1)
    for number, other, what in ((2, 4, "--bits"), (4, other_set, " the calibration set")):
        refused = _run(*words[:number], other, *words[number + 1 :]).exception
        assert isinstance(refused, LyditeError) and what in str(refused)
    resumed = _done(*words, *EVALUATION[:2]).output
    assert "resuming: 1 of 2 blocks are done.\n" in resumed
    assert "transformer_blocks.1: error" in resumed and "transformer_blocks.0: e" not in resumed
    for name in ("transformer/diffusion_pytorch_model.safetensors", "quantization.json"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes()


def test_a_run_that_was_stopped_at_its_very_end_is_finished(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "out.work"
    out.mkdir()
    (work / "blocks").mkdir(parents=True)
    words = ("embedded", "--out", out)
    assert isinstance(_run(*words).exception, FileError) and work.exists()
    (work / "finished.txt").write_text("")
    assert f"{out}: finished" in _done(*words).output and not work.exists()
    assert isinstance(_run(*words).exception, FileError)


@pytest.mark.parametrize(
    "words",
    [
        ("--method", "taqdit", "--act-bits", 8, "--act-groups", 3, "--group", "channel",
         "--iterations", 2, "--samples", 4),
        ("--method", "rtn", "--rank", 4, "--samples", 2),
        ("--method", "gptq", "--format", "nvfp4", "--samples", 2),
        ("--method", "rtn", "--format", "mxfp8", "--quantize-input"),
        ("--method", "rtn", "--act-bits", 8, "--samples", 4),
    ],
)  # fmt: skip
def test_methods_end_in_models_that_run(
    words: tuple[object, ...],
    small: Path,
    calibration: Path,
    against: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, QuantizedWeight] = {}

    def keep(pipeline: Pipeline, weights: dict[str, QuantizedWeight], folder: Path) -> None:
        made.update(weights)
        export(pipeline, weights, folder)

    monkeypatch.setattr(quantize_model, "export", keep)
    _done(small, *words, "--set", calibration, *against, "--out", tmp_path / "out", "-q")
    record = read_provenance(tmp_path / "out")
    simulated = {"--act-bits", "--quantize-input"} & set(words)
    assert record.activations == ("simulated" if simulated else None)
    component = find_components(tmp_path / "out")["transformer"]
    assert ("simulated" in (component.rounding_of_inputs() or "")) == bool(simulated)
    layers = dict(component.load(mx.float32).named_modules())
    layer: Any = layers["transformer_blocks.0.ff.net.2"]
    assert layer.quantize_input == ("--quantize-input" in words)
    assert ("input_times" in layer) == ("--act-groups" in words)
    for path, weight in made.items():
        for name, array in weight.arrays().items():  # what was found is what is loaded
            found = np.array(layers[path][name])
            np.testing.assert_array_equal(found, array.astype(found.dtype), f"{path}.{name}")


def test_bits_by_sensitivity_and_scales_that_are_tuned(
    small: Path,
    calibration: Path,
    against: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = (small, "--method", "rtn", "--set", calibration, "--samples", 2, *against)
    for name, more in (("mixed", ("--bpw", 4)), ("tuned", ("--bits", 3, "--tune", 3))):
        result = _done(*words, *more, "--out", tmp_path / name)
        if name == "tuned":
            found = re.search(r"network: error (\S+) → (\S+)", result.output)
            assert found and 0 < float(found[2]) < float(found[1])
    mixed, tuned = (
        find_components(tmp_path / name)["transformer"].formats for name in ("mixed", "tuned")
    )
    assert mixed.keys() == tuned.keys()
    assert {each.bits for each in tuned.values()} == {3, 8} and len(set(mixed.values())) > 2
    assert read_provenance(tmp_path / "mixed").bits_per_weight == pytest.approx(4, abs=0.2)


def test_without_a_set_one_is_drawn(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_calibration, "SET_IMAGES", 2)
    (tmp_path / "prompts.txt").write_text("a red star\n")
    words = ("--prompts", tmp_path / "prompts.txt", "--samples", 2)
    result = _done(small, *words, "--out", tmp_path / "out", *EVALUATION[:2])
    assert "calibration set of 2 images" in result.output
    assert "2 of 4 samples of the set" in result.output
    shared = "prompts of the evaluation are in the calibration set too (1 of 1, with other seeds)"
    evaluation = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert f"note: {shared}" in result.output and shared in evaluation["warnings"][-1]
    assert "block 3 of" not in result.output
    assert result.output.count("rounded to nearest → as exported (gptq)") == 1
    record = read_provenance(tmp_path / "out")
    title = f"<h1>out: gptq, {record.bits_per_weight:.2f} bits per weight, "
    assert title in (tmp_path / "out/report.html").read_text()
    assert evaluation["record"]["candidate"]["model"] == "out"
    assert read_provenance(tmp_path / "out").set_hash is not None


def test_a_plan_is_printed_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"blocks.0.ff.weight": (256, 64), "blocks.0.norm1.linear.weight": (384, 64)}
    shapes |= {"blocks.1.ff.weight": (256, 64)}
    errors = {"blocks.0.ff": {3: 0.1}, "blocks.0.norm1.linear": {3: 0.4}, "blocks.1.ff": {3: 0.3}}
    plan = Plan({"blocks.0.ff": LayerPlan(4), "blocks.0.norm1.linear": LayerPlan(8)})
    measured = Sensitivity("", 64, 16, errors)
    _print(shapes, measured, plan, {"save": Path("plan.json")})
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert rows[1:4] == [
        ["blocks.0.norm1.linear", "24,576", "0.4000", "8", "bits"],
        ["blocks.1.ff", "16,384", "0.3000", "kept"],
        ["blocks.0.ff", "16,384", "0.1000", "4", "bits"],
    ]
    assert "2 layers (1 in 4 bits, 1 in 8 bits)" in out and "16 images" in out and not err
    assert f"{plan.bits_per_weight(shapes):.3f} bits per weight" in out
    record = _record(shapes, measured, plan)
    before, after = (256 + 384 + 256) * 64 * 2, record["bytes_after"]
    assert record["bytes_before"] == before and after < before * 0.7
    assert f"takes {size_text(before)} in 16 bits, {size_text(after)} with it" in out
    assert f"rounded to nearest: {record['expected_error']:.3g}\n" in out
    assert out.endswith("saved plan.json\n")
    _print(shapes, None, plan, {"save": None})
    out, err = capsys.readouterr()
    assert "expected error" not in out and "saved" not in out and "--set" in err
    assert _record(shapes, None, plan)["expected_error"] is None


def test_what_was_learned_is_said_in_a_sentence() -> None:
    text = _proof(PROVENANCE)
    share = 100 * sum(PROVENANCE.changed.values()) / len(PROVENANCE.changed)
    assert text.startswith(f"{share:.1f} % of the integers") and "1 of 3 modules" in text
    assert "modules" not in _proof(replace(PROVENANCE, units=[]))
    assert _proof(replace(PROVENANCE, method="rtn")) == "2 layers rounded to nearest."


def test_what_cannot_be_done_is_said_in_one_line(
    exported: Path, small: Path, calibration: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    wrong = {
        "exists already": ("embedded", "--out", exported),
        "quantized already": (exported, "--out", out),
        "no offsets": ("embedded", "--method", "adaround", "--format", "mxfp4", "--out", out),
        "leave it out": ("embedded", "--format", "mxfp4", "--group", 64, "--out", out),
        "--act-bits 8": ("embedded", "--method", "taqdit", "--out", out),
        "groups of ranges": ("embedded", "--act-groups", 2, "--out", out),
        "--format nvfp4": ("embedded", "--quantize-input", "--out", out),
        "--group 64": ("embedded", "--method", "smoothquant", "--act-bits", 8, "--group",
                       "channel", "--out", out),
    }  # fmt: skip
    for text, words in wrong.items():
        result = _run(*words)
        assert isinstance(result.exception, LyditeError) and text in str(result.exception), text
    for text, words in {
        "no prompts": ("--method", "rtn"),
        "one sample takes": ("--set", calibration, "--memory", "1kB"),
    }.items():
        result = _run(small, *words, "--out", tmp_path / text)
        assert isinstance(result.exception, LyditeError) and text in str(result.exception)
    assert not out.exists() and not out.with_name("out.work").exists()


@pytest.mark.parametrize("option", ["--prompts", "--eval-prompts"])
def test_prompts_are_read_before_the_work(option: str, tmp_path: Path) -> None:
    result = _run("embedded", option, tmp_path / "nope.txt", "--out", tmp_path / "out")
    assert isinstance(result.exception, LyditeError) and "nope.txt" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_help_shows_the_options_of_the_main_job_as_it_is_typed() -> None:
    for words, form in (
        (("--help",), "quantize MODEL [OPTIONS]\n"),
        (("embedded", "--help"), "quantize MODEL [OPTIONS]\n"),
        (("plan", "--help"), "quantize plan [OPTIONS] MODEL\n"),
    ):
        output = _run(*words).output
        usage = output.splitlines()[0] + "\n"
        assert usage.endswith(form) and "--bits" in output and "--bpw" in output
        assert not re.search(r"  (Of|For|That) ", output)
    assert "compare  Compare folders" in _run("--help").output
    unknown = _run("embedded", "--bitz").output
    assert "quantize MODEL [OPTIONS]" in unknown and "quantize --help'" in unknown


def test_where_a_result_may_be_written(tmp_path: Path) -> None:
    model, places = Model(str(tmp_path / "model")), {"set_folder": None, "against": None}
    (tmp_path / "model").mkdir()
    (tmp_path / "set").mkdir()
    check_places(tmp_path / "out", model, places)
    for name, changes in (
        ("model/out", {}), ("set/out", {"set_folder": tmp_path / "set"}),
        ("set/out", {"against": tmp_path / "set"}), ("model/../model", {}),
    ):  # fmt: skip
        with pytest.raises(FileError, match="inside the input"):
            check_places(tmp_path / name, model, places | changes)
    check_places(tmp_path / "a/b/out", model, places)
    assert not (tmp_path / "a").exists()  # it is made with the first file
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="file"):
        check_places(tmp_path / "file/out", model, places)
    with pytest.raises(InputError, match="Unicode"):
        check_places(tmp_path / "out\udcff", model, places)


def test_a_plan_is_shown_and_nothing_is_made(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = _run("embedded", "--bits", 4, "--method", "rtn", "--dry-run", "--out", out)
    assert result.exit_code == 0 and "bits per weight" in result.output and "rtn" in result.output
    assert not list(tmp_path.iterdir())
    without = _run("embedded", "--bits", 4, "--method", "rtn", "--dry-run")
    assert without.exit_code == 0 and without.output == result.output
    missing = _run("embedded", "--method", "rtn")
    assert missing.exit_code == 2 and "Missing option '--out'" in missing.output
    result = _run("embedded", "--bpw", 4.5, "--dry-run", "--out", out)
    assert isinstance(result.exception, LyditeError) and "quantize plan" in str(result.exception)


def test_another_model_is_refused(small: Path, calibration: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(small, copy)
    (weights,) = (copy / "transformer").glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    result = _run(copy, "--set", calibration, "--out", tmp_path / "out")
    assert isinstance(result.exception, LyditeError) and "not the one" in str(result.exception)


def test_a_folder_of_somebody_else_is_not_worked_in(tmp_path: Path) -> None:
    out, work, elsewhere = tmp_path / "out", tmp_path / "out.work", tmp_path / "elsewhere"
    work.mkdir()
    (work / "thesis.txt").write_text("mine")
    elsewhere.mkdir()
    words = ("embedded", "--method", "rtn", "--out", out, *EVALUATION)
    result = _run(*words)
    assert isinstance(result.exception, LyditeError) and "not of earlier" in str(result.exception)
    assert (work / "thesis.txt").read_text() == "mine"
    shutil.rmtree(work)
    work.symlink_to(elsewhere)
    assert isinstance(_run(*words).exception, LyditeError) and not list(elsewhere.iterdir())
    work.unlink()
    work.mkdir()
    (work / "work.txt").write_text("")
    (work / "model").symlink_to(elsewhere)
    assert isinstance(_run(*words).exception, LyditeError) and not list(elsewhere.iterdir())


def test_a_block_whose_record_was_changed_is_damaged(tmp_path: Path) -> None:
    grid = Grid(np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32), 4)
    weight = QuantizedWeight(np.zeros((2, 32), np.uint8), grid)
    path = tmp_path / "block.safetensors"
    write_result(path, BlockResult("block", {"a": weight}))
    assert read_result(path).weights["a"].grid.bits == 4
    data = path.read_bytes()
    path.write_bytes(data.replace(rb"\"a\":4", rb"\"a\":5"))
    assert path.read_bytes() != data
    with pytest.raises(LyditeError, match="damaged"):
        read_result(path)
    path.write_bytes(data)
    tensors = dict(load_file(path))
    with safe_open(path, "numpy") as file:
        record = file.metadata()
    save_file(tensors, path, record)
    assert read_result(path).path == "block"
    turned = tensors["a.integers"]
    for other in (turned.reshape(1, 64), turned.astype(np.int8)):  # the same bytes
        save_file({**tensors, "a.integers": other}, path, record)
        with pytest.raises(LyditeError, match="damaged"):
            read_result(path)
    for changed in ({}, {"block": "{"}, {"block": "{}", "hash": "0"}):
        save_file(tensors, path, changed)
        with pytest.raises(LyditeError, match="damaged"):
            read_result(path)


def test_pictures_of_another_model_are_no_reference(
    small: Path, against: tuple[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(small, copy)
    (weights,) = (copy / "transformer").glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    result = _run(copy, "--method", "rtn", *against, "--out", tmp_path / "out")
    assert isinstance(result.exception, LyditeError) and "not the one" in str(result.exception)
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ({"pos_embed.proj": {"bits": 4}}, "no such layer"),
        ({"proj_out": {"bits": 4, "group": 64, "mode": "mxfp4"}}, "no such format"),
    ],
)
def test_plans_that_cannot_be_written_are_refused(layers: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"layers": layers}))
    result = _run("embedded", "--plan", tmp_path / "plan.json", "--dry-run", "--out", "out")
    assert isinstance(result.exception, LyditeError) and text in str(result.exception)


@pytest.mark.parametrize(
    ("name", "values"), [("input_range", (0, 0, 0)), ("input_divisor", (0.0,) * 256)]
)
def test_inputs_that_cannot_be_rounded_are_refused(
    name: str, values: tuple[float, ...], exported: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exported / "transformer", copy / "transformer")
    path = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = dict(load_file(path))
    tensors[f"transformer_blocks.0.ff.net.2.{name}"] = np.array(values, np.float32)
    save_file(tensors, path)
    (component,) = find_components(copy / "transformer").values()
    with pytest.raises(LyditeError, match="cannot round or divide"):
        component.load(mx.float32)
