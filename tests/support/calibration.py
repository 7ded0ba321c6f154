"""Small calibration sets, and a disk that fails or kills at the k-th call."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from lydite.calibrate.settings import Plan, Settings, plan_of
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.shards import Item, ItemBuilder
from lydite.calibrate.store.verify import verify
from lydite.calibrate.store.writer import Writer
from lydite.core import files
from lydite.core.fast_blas import preload

S = TypeVar("S", bound=files.SystemCalls)
Fault = Literal["ENOSPC", "EIO", "short", "kill", "interrupt"]
KINDS: tuple[tuple[Fault, bool], ...] = (  # of failure, and whether it comes once
    ("ENOSPC", True),
    ("ENOSPC", False),
    ("EIO", True),
    ("EIO", False),
    ("short", True),
    ("short", False),
)
STEPS = (0, 4, 8)
SETTINGS = Settings(
    "f00d", {"sampler": "euler", "schedule": "shifted", "shift": 3.0, "steps": 12}, "BF16"
)


def same_blas() -> dict[str, str]:
    """What the environment of another process needs to multiply as this one does, bit for bit."""
    kind = preload().kind
    return {"LYDITE_BLAS": kind if kind in ("torch", "openblas", "system") else "off"}


def plan(images: int, **keeps: bool) -> Plan:
    return plan_of([(f"a drawing of {n} cats", n) for n in range(images)], STEPS, **keeps)


def latent(image: int, step: int) -> NDArray[np.float32]:
    return np.random.default_rng([image, step]).standard_normal((4, 8, 8), np.float32)


def pixels(image: int) -> NDArray[np.uint8]:
    return np.random.default_rng(image).integers(0, 256, (16, 16, 3), np.uint8)


def items(builder: ItemBuilder, image: int) -> list[Item]:
    """All that is planned of one image."""
    samples = [
        builder.sample(image, step, {"x": latent(image, step)}, sigma=1 - step / 12, timestep=step)
        for step in STEPS
    ]
    return [*samples, builder.picture(image, pixels(image))]


def draw(folder: Path, images: int, acknowledge: Callable[[int], object] = int) -> str:
    """Make or finish a set, as a run does; its content hash."""
    with Writer.start(folder, SETTINGS, plan(images)) as writer:
        for image in writer.missing():
            writer.commit(items(writer.builder, image.number))
            acknowledge(image.number)
        return writer.content_hash


def check_kept(folder: Path, images: int, acknowledged: set[int]) -> None:
    """After a crash: what was acknowledged is there, whole, and nothing torn is."""
    if acknowledged:
        found = verify(folder)
        assert found.sound, found.damage
    with Writer.start(folder, SETTINGS, plan(images)) as writer:
        kept = {(row.image, row.step): writer.read(row)["x"] for row in writer.rows()}
        missing = {image.number for image in writer.missing()}
    assert not acknowledged & missing, (acknowledged, missing)
    for (image, step), values in kept.items():
        assert image is not None and step is not None
        np.testing.assert_array_equal(values, latent(image, step).astype(values.dtype))


def check_finished(folder: Path, images: int, content_hash: str) -> None:
    """A set that is finished now is like one that was never interrupted."""
    assert draw(folder, images) == content_hash
    found = verify(folder)
    assert found.complete and not found.quarantined, found
    assert not [path for path in folder.rglob("*") if path.name.endswith(files.PART)]
    with CalibrationSet.open(folder) as opened:
        assert opened.index.counts() == {"picture": images, "sample": images * len(STEPS)}


class FaultyDisk(files.SystemCalls):
    """Lets the k-th call fail, or it and all that follow; counts the calls."""

    def __init__(self, k: int = 0, fault: Fault = "EIO", *, once: bool = True) -> None:
        self.k, self.fault, self.once = k, fault, once
        self.calls = self.hits = 0

    def open(self, path: Path, flags: int) -> int:
        self._call()
        return super().open(path, flags)

    def write(self, handle: int, data: files.Bytes) -> int:
        if self.fault == "short" and self._is_hit(self.calls + 1):
            self.calls, self.hits = self.calls + 1, self.hits + 1
            if self.calls == self.k:
                return super().write(handle, memoryview(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._call()
        return super().write(handle, data)

    def sync(self, handle: int) -> None:
        self._call()
        super().sync(handle)

    def rename(self, old: Path, new: Path) -> None:
        self._call()
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        self._call()
        super().link(old, new)

    def unlink(self, path: Path) -> None:
        self._call()
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        self._call()
        super().mkdir(path)

    def _is_hit(self, call: int) -> bool:
        return bool(self.k) and (call == self.k or (call > self.k and not self.once))

    def _call(self) -> None:
        self.calls += 1
        if not self._is_hit(self.calls) or self.fault == "short":
            return
        self.hits += 1
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        number = getattr(errno, self.fault)
        raise OSError(number, os.strerror(number))


@contextmanager
def faulty(system: S) -> Iterator[S]:
    """The store on that disk, for a while."""
    healthy, files.system = files.system, system
    try:
        yield system
    finally:
        files.system = healthy
