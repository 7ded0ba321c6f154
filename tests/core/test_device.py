"""What a run computes on."""

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lydite.core import device


@pytest.mark.parametrize(("content", "share"), [("1048576\n", None), ("max\n", 1), (None, 1)])
def test_memory_is_the_machines_or_its_containers(
    content: str | None, share: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    if content is not None:
        limit.write_text(content)
    monkeypatch.setattr(device, "_CONTAINER", limit)
    found = device._main_memory()
    assert found > 2**20 if share else found == 2**20


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
