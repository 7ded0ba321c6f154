"""`lydite inspect`: the tree of any safetensors, from headers alone, or one clear line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lydite.cli.inspect import _size
from lydite.cli.main import main
from lydite.core.tensorfile import save

Run = Callable[..., tuple[int, str, str]]

TENSORS: dict[str, Any] = {
    "blocks.0.weight": np.zeros((3, 4), np.float32),
    "blocks.10.weight": np.zeros((3, 4), np.float16),
    "blocks.9.weight": np.zeros((3, 4), ml_dtypes.bfloat16),
    "blocks": np.zeros((), np.int64),
    "scale": np.zeros((0, 7), ml_dtypes.float8_e4m3fn),
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, stdout and stderr of a `lydite` command, in this process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lydite", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(tmp_path / "any.safetensors", TENSORS)
    return tmp_path / "any.safetensors"


def test_packed_integers_are_not_counted_as_parameters(run: Run, tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", {"a.weight": np.zeros((2, 4), np.uint32), "b": np.zeros(3)})
    _, out, _ = run("inspect", tmp_path / "a.safetensors")
    assert "2 tensors, 11 values, in U32 several weights each" in out


def test_the_tree_of_any_file(run: Run, file: Path) -> None:
    status, out, err = run("inspect", file, "--all")
    lines = [line.split() for line in out.splitlines()]
    assert status == 0 and not err
    assert lines[0][:4] == ["any.safetensors", "5", "tensors,", "37"]
    assert ["weight", "F16", "[3,", "4]", "24", "B"] in lines
    assert ["scale", "F8_E4M3", "[0,", "7]", "0", "B"] in lines
    assert ["blocks", "I64", "[]", "8", "B"] in lines
    assert [line[0] for line in lines[1:]] == [
        *("blocks", "blocks", "0", "weight", "9", "weight", "10", "weight", "scale"),
    ]


def test_depth_limits_the_tree(run: Run, file: Path) -> None:
    for depth in (1, 2, 3, 4):
        lines = run("inspect", file, "--depth", depth)[1].splitlines()
        levels = [(len(line) - len(line.lstrip())) // 2 for line in lines]
        assert levels == [level for level in (0, 1, 1, 2, 3, 2, 3, 2, 3, 1) if level <= depth]
    assert run("inspect", file, "--depth", 0)[0] == 2
    assert run("inspect", file, "--depth", 10**6)[0] == 0


def test_json_is_one_object_that_adds_up(run: Run, file: Path) -> None:
    status, out, _ = run("inspect", file, "--json")
    report = json.loads(out)
    part = report["parts"]["any.safetensors"]
    assert status == 0 and report["model"] == str(file)
    assert {row["name"]: row["shape"] for row in part["tensors"]} == {
        name: list(x.shape) for name, x in TENSORS.items()
    }
    assert part["parameters"] == sum(x.size for x in TENSORS.values())
    assert part["nbytes"] == sum(x.nbytes for x in TENSORS.values())
    assert part["files"] == [str(file)]


def test_a_pipeline_shows_each_of_its_networks(run: Run, untrained: Path) -> None:
    status, out, _ = run("inspect", untrained, "--json")
    parts = json.loads(out)["parts"]
    assert status == 0
    assert set(parts) == {"transformer", "vae", "text_encoder", "text_encoder_2"}
    status, out, _ = run("inspect", untrained)
    assert status == 0 and "transformer  " in out and "pos_embed" in out


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.235 MB"), (10**9, "1 GB"),
     (5 * 10**12, "5 TB")],
)  # fmt: skip
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert _size(nbytes) == text


def test_the_table_of_memory_holds_the_numbers_of_the_json(run: Run, untrained: Path) -> None:
    memory = json.loads(run("inspect", untrained, "--json")[1])["memory"]
    out = run("inspect", untrained)[1]
    lines = [line.split("  ") for line in out[out.index("weights in memory") :].splitlines()]
    cells = {words[1]: [word.strip() for word in words[2:] if word.strip()] for words in lines[2:]}
    columns = list(memory.values())
    for name in columns[0]["networks"]:
        assert cells[name] == [_size(column["networks"][name]) for column in columns]
    assert cells["together"] == [_size(column["together"]) for column in columns]
    assert cells["with --low-memory"] == [_size(column["low_memory"]) for column in columns]
    assert all(c["together"] == sum(c["networks"].values()) > c["low_memory"] for c in columns)


def test_a_component_and_its_file(run: Run, untrained: Path) -> None:
    folder = untrained / "vae"
    for path in (folder, folder / "diffusion_pytorch_model.safetensors"):
        status, out, _ = run("inspect", path)
        assert status == 0 and "decoder" in out


def test_no_tensor_is_read(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(np, "frombuffer", refuse)
    assert run("inspect", file, "--all")[0] == 0


def test_a_shard_index_and_its_folder(run: Run, file: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    file.rename(file.with_name(shard))
    index = file.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, shard)}))
    for path in (index, file.parent):
        status, out, _ = run("inspect", path)
        assert status == 0 and "5 tensors" in out


def unreadable(folder: Path) -> dict[str, Path]:
    """Things that are no checkpoint, by what they are."""
    (folder / "garbage.safetensors").write_bytes(b"\xff" * 4096)
    (folder / "short.safetensors").write_bytes(b"abc")
    (folder / "notes.txt").write_text("a fox in the snow")
    (folder / "empty").mkdir()
    (folder / "pickles").mkdir()
    (folder / "pickles" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    save(folder / "cut.safetensors", {"a": np.zeros(100)})
    whole = (folder / "cut.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:-8])
    names = ("garbage.safetensors", "short.safetensors", "notes.txt", "empty", "pickles")
    found = {name: folder / name for name in (*names, "cut.safetensors")}
    return {**found, "missing file": folder / "no.safetensors", "missing": folder / "a" / "b" / "c"}


def test_what_cannot_be_read_is_one_line_and_exit_2(run: Run, tmp_path: Path) -> None:
    for what, path in unreadable(tmp_path).items():
        for options in ([], ["--json"]):
            status, out, err = run("inspect", path, *options)
            assert (status, out) == (2, ""), what
            assert err.startswith("error: ") and err.count("\n") == 1 and str(path) in err, what


def test_a_pipeline_with_pickles_only_says_so(run: Run, untrained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(untrained, copy)
    for path in (copy / "text_encoder").glob("*.safetensors"):
        path.rename(path.with_name("pytorch_model.bin"))
    status, _, err = run("inspect", copy, "--json")
    assert status == 2 and "pickle" in err and "text_encoder" in err


def test_from_a_shell(untrained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lydite", "inspect"]
    done = subprocess.run([*command, untrained, "--json"], capture_output=True, check=False)
    assert done.returncode == 0 and len(json.loads(done.stdout)["parts"]) == 4
    (tmp_path / "x.safetensors").write_bytes(b"\0" * 100)
    done = subprocess.run([*command, tmp_path / "x.safetensors"], capture_output=True, check=False)
    assert done.returncode == 2 and not done.stdout and b"Traceback" not in done.stderr
