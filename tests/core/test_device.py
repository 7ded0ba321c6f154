"""What a run computes on."""

import os
import platform
import resource
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lydite.core import device
from lydite.core.errors import ConfigError
from lydite.core.fast_blas import THREADS, cpu_threads


@pytest.mark.parametrize(
    ("content", "share"), [("1048576\n", None), (f"{2**60}\n", 1), ("max\n", 1), (None, 1)]
)
def test_memory_is_the_machines_or_its_containers(
    content: str | None, share: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    if content is not None:
        limit.write_text(content)
    monkeypatch.setattr(device, "_CONTAINER", limit)
    found = device._main_memory()
    assert 2**20 < found < 2**60 if share else found == 2**20


FAULTS = """
import resource, lydite, numpy as np
def use_and_free():
    arrays = [np.ones(1 << 18) for _ in range(16)]  # 2 MB each
use_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): use_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of another library")
def test_freed_memory_is_kept_unless_the_user_has_chosen() -> None:
    pages = 16 * 2 * 2**20 // resource.getpagesize()
    kept, returned = (
        int(subprocess.check_output([sys.executable, "-c", FAULTS], env=os.environ | chosen))
        for chosen in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072"})
    )
    assert kept < pages < returned


def fake_mlx(
    *, on_gpu: bool = False, metal: bool = False, cuda: bool = False, **info: object
) -> types.SimpleNamespace:
    """MLX as it would be on another machine."""
    mx = types.SimpleNamespace(cpu="cpu", gpu="gpu", Device=str, chosen=None, __version__="1")
    mx.default_device = lambda: "gpu" if on_gpu else "cpu"
    mx.device_info = lambda: info
    mx.set_default_device = lambda name: setattr(mx, "chosen", name)
    mx.metal = types.SimpleNamespace(is_available=lambda: metal)
    mx.cuda = types.SimpleNamespace(is_available=lambda: cuda)
    return mx


@pytest.fixture
def with_mlx(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.SimpleNamespace]:
    """Put an MLX of another machine in the place of this one's."""

    def use(**parts: Any) -> types.SimpleNamespace:
        mx = fake_mlx(**parts)
        monkeypatch.setitem(sys.modules, "mlx.core", mx)
        monkeypatch.setattr(device, "import_module", lambda _: mx)
        return mx

    for name in ("MLX_USE_CUDA_GRAPHS", "MLX_MAX_OPS_PER_BUFFER", "MLX_PTX_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # and removed again after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv(device.VARIABLE, "auto")
    return use


@pytest.mark.parametrize(
    ("parts", "tf32", "winograd", "says"),
    [
        ({}, None, None, "x86 (CPU)"),
        ({"metal": True}, None, None, "x86 (CPU)"),
        ({"on_gpu": True, "metal": True}, None, None, "x86 (GPU), TF32, Winograd"),
        ({"on_gpu": True, "metal": True}, "0", "0", "x86 (GPU)"),
        ({"on_gpu": True, "metal": True}, "1", "0", "x86 (GPU), TF32"),
        ({"on_gpu": True, "metal": True}, "0", "1", "x86 (GPU), Winograd"),
        ({"on_gpu": True, "cuda": True}, "1", "1", "x86 (GPU), TF32"),
        ({"on_gpu": True, "device_name": "M9"}, "0", "0", "M9 (GPU)"),
    ],
)
def test_a_device_says_its_chip_and_the_shortcuts_in_use(
    parts: dict[str, object],
    tf32: str | None,
    winograd: str | None,
    says: str,
    with_mlx: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86")
    for name, value in ((device.TF32, tf32), (device.WINOGRAD, winograd)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    with_mlx(**parts)
    found = device.current_device()
    assert found.describe() == says and found.kind == ("gpu" if parts.get("on_gpu") else "cpu")
    words = [f"{name} {'' if name in says else 'not '}used" for name in ("TF32", "Winograd")]
    assert found.shortcuts == ", ".join(words)


def test_memory_is_what_the_device_says_first(
    with_mlx: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_main_memory", lambda: 9)
    keys = ("max_recommended_working_set_size", "memory_size", "total_memory")
    for first in range(4):
        info = {key: number for number, key in enumerate(keys, 1) if number > first}
        with_mlx(**info | dict.fromkeys(keys[:first], 0))
        assert device.current_device().memory == (first + 1 if first < 3 else 9)


def test_a_device_is_taken_by_name(
    with_mlx: Callable[..., types.SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    mx = with_mlx(cuda=True)
    for name, chosen in ((None, None), ("auto", None), ("cpu", "cpu"), ("gpu", "gpu")):
        mx.chosen = None
        device.request_device(name)
        assert mx.chosen == chosen and os.environ[device.VARIABLE] == (name or "auto")
    with_mlx(metal=True)
    device.request_device("gpu")
    with_mlx()
    with pytest.raises(ConfigError, match=r"^--device gpu: this MLX has no GPU here"):
        device.request_device("gpu")
    monkeypatch.setattr(device, "_named_by", {})
    with pytest.raises(ConfigError, match=r"^LYDITE_DEVICE=gpu: this MLX has no GPU here"):
        device.use_device(mx := with_mlx())
    with pytest.raises(ConfigError, match="tpu: expected one of auto, cpu, gpu"):
        device.request_device("tpu")
    monkeypatch.delitem(sys.modules, "mlx.core")
    device.request_device("tpu")  # MLX is not there yet, and takes the variable when it is
    assert os.environ[device.VARIABLE] == "tpu"


def test_cuda_graphs_are_avoided_on_cuda_unless_the_user_has_chosen(
    with_mlx: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("MLX_USE_CUDA_GRAPHS", "MLX_MAX_OPS_PER_BUFFER")
    with_mlx(metal=True)
    device.avoid_cuda_graphs(10)
    assert not any(name in os.environ for name in names)
    with_mlx(cuda=True)
    device.avoid_cuda_graphs(10)
    assert [os.environ[name] for name in names] == ["0", "10"]
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "1")
    device.avoid_cuda_graphs(10)
    assert os.environ["MLX_USE_CUDA_GRAPHS"] == "1"


def test_kernels_are_compiled_first_on_cuda_with_an_empty_cache(
    with_mlx: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "gettempdir", lambda: str(tmp_path))
    for parts in ({}, {"on_gpu": True, "metal": True}, {"cuda": True}):
        with_mlx(**parts)
        assert not device.compiles_kernels_first()
    with_mlx(on_gpu=True, cuda=True)
    assert device.compiles_kernels_first()
    cache = tmp_path / "mlx" / "1" / "ptx"
    cache.mkdir(parents=True)
    assert device.compiles_kernels_first()
    (cache / "kernel.ptx").touch()
    assert not device.compiles_kernels_first()
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "other"))
    assert device.compiles_kernels_first()


@pytest.mark.parametrize(
    ("platform", "cores", "threads"), [("linux", 5, 3), ("darwin", 5, 5), ("darwin", None, 1)]
)
def test_threads_are_what_the_first_variable_says(
    platform: str, cores: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert cpu_threads() == threads
    for number, name in reversed(list(enumerate(THREADS, 2))):
        monkeypatch.setenv(name, str(number))
        assert cpu_threads() == number
    monkeypatch.setenv(THREADS[0], "many")
    assert cpu_threads() == 3
