"""`lydite doctor`, `--device` and LYDITE_DEVICE."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lydite.cli.doctor import OLDEST_MACOS, _platform_problems
from lydite.cli.main import lydite
from lydite.core import files
from lydite.core.errors import ConfigError
from lydite.models import numeric_probe
from lydite.models.numeric_probe import Reading


def test_nothing_is_wrong_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("lydite.cli.doctor.ROOM", 0)
    result = CliRunner().invoke(lydite, ["doctor", str(tmp_path), "--json"])
    report = json.loads(result.output)
    assert result.exit_code == 0 and report["problems"] == []
    assert all(reading["exact"] for reading in report["numbers"]) and len(report["numbers"]) == 6
    assert report["disk"]["writable"] and list(tmp_path.iterdir()) == []
    assert str(Path.home()) not in result.output


def test_what_is_printed_is_what_the_json_holds(tmp_path: Path) -> None:
    report = json.loads(CliRunner().invoke(lydite, ["doctor", str(tmp_path), "--json"]).output)
    text = CliRunner().invoke(lydite, ["doctor", str(tmp_path)]).output
    lines = {line.partition(" ")[0]: " ".join(line.split()) for line in text.splitlines()}
    assert lines.keys() > report["versions"].keys()
    for name, version in report["versions"].items():
        assert lines[name] == f"{name} {version}"
    device = report["device"]
    assert f"{device['memory'] / 2**30:.0f} GiB" in lines["device"]
    assert device["chip"] in lines["device"] and device["kind"].upper() in lines["device"]
    for reading in report["numbers"]:
        row = f"{reading['operation']:<13}{reading['dtype']:<9}"
        (line,) = [line for line in text.splitlines() if line.startswith(row)]
        assert f"{reading['error']:.1e}, limit {reading['limit']:.0e}: ok" in line
    assert ("blas" in lines) == ("blas" in device) and "GiB free" in lines["folder"]
    for name, word in (("hard_links", "hard links"), ("file_locks", "file locks")):
        assert (f"no {word}" in lines["folder"]) != report["disk"][name]


def test_says_what_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    off = Reading("conv", "bfloat16", 0.054, 4e-3)
    monkeypatch.setattr(numeric_probe, "probe", lambda: [off])
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(files.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    result = CliRunner().invoke(lydite, ["doctor", str(tmp_path)])
    assert result.exit_code == 1
    assert "MLX_CONV_WINOGRAD=0" in result.output and "Intel" in result.output
    assert result.output.count("problem:") == 2 and "No problem" not in result.output
    result = CliRunner().invoke(lydite, ["doctor", str(tmp_path), "--json"])
    assert result.exit_code == 1 and len(json.loads(result.output)["problems"]) == 2


@pytest.mark.parametrize(
    ("version", "macos", "machine", "problems"),
    [
        ((3, 11), "", "x86_64", 0), ((3, 10), "", "x86_64", 1), ((3, 99), "", "x86_64", 1),
        ((3, 11), f"{OLDEST_MACOS}.1", "x86_64", 1),
        ((3, 11), f"{OLDEST_MACOS}.1", "arm64", 0), ((3, 11), f"{OLDEST_MACOS - 1}.9", "arm64", 1),
    ],
)  # fmt: skip
def test_platforms(
    version: tuple[int, int], macos: str, machine: str, problems: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    monkeypatch.setattr(sys, "platform", "darwin" if macos else "linux")
    monkeypatch.setattr("platform.mac_ver", lambda: (macos, ("", "", ""), ""))
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert len(_platform_problems()) == problems


def test_little_room_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("lydite.cli.doctor.ROOM", 2**60)
    result = CliRunner().invoke(lydite, ["doctor", str(tmp_path)])
    assert result.exit_code == 0 and "warning: only" in result.output
    result = CliRunner().invoke(lydite, ["doctor", str(tmp_path / "missing")])
    assert result.exit_code == 1 and "problem: Cannot write" in result.output


def test_a_disk_that_cannot_do_much(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(*arguments: object) -> None:
        raise OSError(45, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(files.fcntl, "flock", refuse)
    abilities = files.disk_abilities(tmp_path)
    assert abilities["writable"] and not abilities["hard_links"] and not abilities["file_locks"]
    assert files.disk_abilities(tmp_path / "missing")["writable"] is False


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process without the variables that tests set."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_", "LYDITE_"))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True)


SHORTCUTS = "print(os.environ['MLX_ENABLE_TF32'], os.environ['MLX_CONV_WINOGRAD'])"


@pytest.mark.parametrize("first", ["import lydite, mlx.core", "import mlx.core, lydite"])
def test_shortcuts_are_off_unless_the_user_wants_them(first: str):
    assert run(f"import os; {first}; {SHORTCUTS}").stdout == "0 0\n"
    done = run(f"import os; {first}; {SHORTCUTS}", MLX_CONV_WINOGRAD="1")
    assert done.stdout == "0 1\n"


@pytest.mark.parametrize(
    "first", ["import lydite, mlx.core as mx", "import mlx.core as mx, lydite"]
)
def test_the_device_of_the_variable_is_used(first: str):
    done = run(f"{first}; print(mx.default_device())", LYDITE_DEVICE="cpu")
    assert done.stdout == "Device(cpu, 0)\n"
    assert run(f"{first}; print('started')", LYDITE_DEVICE="").stdout == "started\n"


def test_a_device_that_is_not_there():
    import mlx.core as mx

    from lydite.core.device import has_gpu

    assert "expected one of" in run("import lydite, mlx.core", LYDITE_DEVICE="tpu").stderr
    if not has_gpu(mx):
        command = ["generate", "a red star", "--device", "gpu"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LYDITE_DEVICE", "auto")
            result = CliRunner().invoke(lydite, command)
        assert isinstance(result.exception, ConfigError) and "no GPU" in str(result.exception)


def test_out_of_memory_is_one_line():
    code = """
import sys
import lydite.cli.main as cli
import lydite.pipelines.pipeline as p
def fail(*a, **k): raise RuntimeError("[METAL] Command buffer failed: Insufficient Memory")
p.Pipeline.open = fail
sys.argv = ["lydite", "generate", "a red star"]
cli.main()
"""
    done = run(code)
    assert done.returncode == 2 and done.stderr.startswith("error: not enough memory.")
    assert len(done.stderr.splitlines()) == 1
