"""`calibrate run`, `activations`, `blocks` and `quantize` in small, in processes that fail or are
killed.

A command runs in a fork of this process, which has imported all it needs and computed nothing: MLX
has no threads yet, and the child comes to its work at once. Whatever the code calls safe there is
written down at that moment, so that it can be looked for afterwards.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from lydite.core.fast_blas import use_one_thread

use_one_thread()  # before MLX

import lydite.cli.calibrate.activations  # noqa: E402  what a command would import by itself
import lydite.cli.calibrate.blocks  # noqa: E402
import lydite.cli.calibrate.run  # noqa: E402
import lydite.cli.quantize.model  # noqa: E402, F401
from lydite.calibrate import blocks  # noqa: E402, F401
from lydite.calibrate import ray_cluster as cluster  # noqa: E402, F401
from lydite.calibrate import workers as pool  # noqa: E402, F401
from lydite.calibrate.activations import collect as activations  # noqa: E402
from lydite.calibrate.activations.file import STATE, read_file  # noqa: E402
from lydite.calibrate.activations.statistics_state import Statistics, load_state  # noqa: E402
from lydite.calibrate.store.reader import CalibrationSet  # noqa: E402
from lydite.calibrate.store.shards import Entry, Item  # noqa: E402
from lydite.calibrate.store.verify import verify  # noqa: E402
from lydite.calibrate.store.writer import Committed, ImportedShards, Writer  # noqa: E402
from lydite.cli.main import main  # noqa: E402
from lydite.core import files  # noqa: E402
from lydite.pipelines import model_hash  # noqa: E402
from lydite.quantize import quantize_model  # noqa: E402, F401
from lydite.quantize.quantize_blocks import BlockResult  # noqa: E402
from lydite.quantize.work import BLOCKS, Work, read_result  # noqa: E402
from support.calibration import KINDS, Fault, FaultyDisk  # noqa: E402, F401
from untrained_sd3 import TRANSFORMER, VAE, make_untrained  # noqa: E402

Name = Literal["run", "activations", "blocks", "quantize"]
QUANTIZE = ["--method", "joint", "--act-bits", "8", "--act-groups", "2", "--group", "32",
            "--iterations", "2", "--eval-images", "2", "--tune", "1"]  # fmt: skip
SMALL = ["--steps", "2", "--keep-steps", "0", "--size", "32x32", "--text-length", "4"]
PATIENCE = 120  # seconds for a command, and for workers to see that their run is gone


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status, all that it said, its calls to the disk and those hit."""

    status: int
    said: str
    calls: int = 0  # not known of a process that was killed
    hits: int = 0

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL


class FillingDisk(FaultyDisk):
    """Fills the disk before the k-th call; what fails from then on does so by itself."""

    def __init__(self, k: int, filler: Path) -> None:
        super().__init__(k)
        self._filler = filler

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self.k:
            self.hits += 1
            with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))


class Job:
    """One command with all that it works on, and what it promised of its result."""

    def __init__(
        self, name: Name, root: Path, notes: Path, *, images: int, workers: int = 1
    ) -> None:
        self.name: Name = name
        self.root, self.out = root, root / "a result"  # with a space, which messages must quote
        self.work = root / "a result.work"
        self._promised, self._said, self._counts = (
            notes / name for name in ("promised", "said", "counts")
        )
        words = _typed(name, root, images)
        _by_itself([*words, "--out", str(self.out)])
        self._whole = self._content()
        self.words = [*words, "--workers", str(workers)] if name == "run" else words
        self.words += ["--out", str(self.out)]
        self.start_anew()
        begin = time.monotonic()
        undisturbed = self.run()
        self.calls, self.seconds = undisturbed.calls, time.monotonic() - begin
        assert undisturbed.status == 0, undisturbed.said
        self.check_finished()

    @property
    def promised(self) -> set[str]:
        """What was called safe since the result was begun."""
        return set(self._promised.read_text().splitlines()) if self._promised.exists() else set()

    @property
    def is_final(self) -> bool:
        """Whether the command would refuse to replace the result."""
        return self.name == "quantize" and self.out.exists() and not self.work.exists()

    def start_anew(self) -> None:
        """Forget the result."""
        for path in (self.out, self.work, self._promised):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def run(
        self,
        system: FaultyDisk | None = None,
        *,
        words: list[str] | None = None,
        after: float | None = None,
        workers_too: bool = False,
    ) -> Ended:
        """Let the command work on that disk; `after` so many seconds it is killed."""
        self._counts.unlink(missing_ok=True)
        child = _fork(lambda: self._work(words or self.words, system or FaultyDisk()))
        if after is not None:
            time.sleep(after)
            (os.killpg if workers_too else os.kill)(child, signal.SIGKILL)
        status = _awaited(child)
        counts = self._counts.read_text().split() if self._counts.exists() else []
        return Ended(status, self._said.read_text(), *map(int, counts))

    def check_kept(self) -> None:
        """What was promised is there, and whole."""
        if promised := self.promised:
            lost = promised - self._held()
            assert not lost, f"promised and lost: {sorted(lost)}"

    def check_finished(self) -> None:
        """The result is that of a command which nothing disturbed, and nothing else is left."""
        self.check_kept()
        assert self._content() == self._whole, "not what an undisturbed command makes"
        left = [path for path in self.root.rglob(f".*{files.PART}")]
        assert not left and not self.work.exists(), left

    def _work(self, words: list[str], system: FaultyDisk) -> int:
        handle = os.open(self._said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        _write_down_promises(self._promised, self.name)
        # The clock decides when a hash is kept, and keeping it may fail: its calls are not counted.
        setattr(model_hash, "cache_folder", lambda: None)  # noqa: B010
        files.system = system
        try:
            return _command(words)
        finally:
            self._counts.write_text(f"{system.calls} {system.hits}")

    def _held(self) -> set[str]:
        """Items with their digests; or the samples that a state or a file of statistics counts."""
        if self.name == "quantize":
            blocks = (self.work / BLOCKS).glob("*.safetensors")
            return {read_result(path).path for path in blocks} if not self.out.exists() else (
                self.promised)  # fmt: skip
        if self.name == "activations":
            found = set(read_file(self.out).keys if self.out.exists() else ())
            state = self.work / STATE
            return found | set(load_state(state).keys if state.exists() else ())
        verdict = verify(self.out)
        assert verdict.sound, verdict.damage
        with CalibrationSet.open(self.out) as opened:
            return {f"{row.key} {row.digest}" for row in opened.rows(None)}

    def _content(self) -> bytes:
        if self.name == "activations":
            return self.out.read_bytes()
        if self.name == "quantize":
            made = [path for path in self.out.rglob("*") if path.is_file()]
            kept = [path for path in sorted(made) if "evaluation" not in path.parts]
            return b"".join(path.name.encode() + path.read_bytes() for path in kept)
        verdict = verify(self.out)
        assert verdict.complete and not verdict.quarantined, verdict
        return str(verdict.content_hash).encode()


def _typed(name: Name, root: Path, images: int) -> list[str]:
    """What is typed after `lydite`, but for --out; what it works on is made."""
    width = 32 if name == "quantize" else 16
    assert _awaited(_fork(lambda: _make_model(root / "model", width))) == 0
    (root / "prompts.txt").write_text("a red star\na fox in snow\n")
    run = [
        "calibrate",
        "run",
        "-m",
        str(root / "model"),
        "--prompts",
        str(root / "prompts.txt"),
        *SMALL,
    ]
    run += ["--images", str(images), "--quiet"]
    if name == "run":
        return run
    assert _awaited(_fork(lambda: _command([*run, "--out", str(root / "a set")]))) == 0
    if name == "quantize":
        return [name, str(root / "model"), "--set", str(root / "a set"), *QUANTIZE, "--quiet"]
    words = ["calibrate", name, str(root / "a set"), "--quiet"]
    return [*words, "--tokens", "4"] if name == "blocks" else words


def _make_model(folder: Path, width: int) -> int:
    """As small as it can be: a command comes to its end in a quarter of a second."""
    sizes = {"num_layers": 1, "attention_head_dim": width // 2, "num_attention_heads": 2}
    widths = {
        "caption_projection_dim": width,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 24,
    }
    make_untrained(
        folder,
        transformer=replace(TRANSFORMER, **sizes, **widths),
        vae=replace(VAE, block_out_channels=(8, 8, 8, 8)),
        clip_widths=(8, 16),
    )
    return 0


def _command(words: list[str]) -> int:
    """The status of a command that runs in this process, as the entry point runs it."""
    sys.argv = ["lydite", *words]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _by_itself(words: list[str]) -> None:
    """A command in a process that was started for it, as a person does."""
    command = [sys.executable, "-m", "lydite", *words]
    subprocess.run(command, check=True, timeout=PATIENCE)


def _fork(work: Callable[[], int]) -> int:
    """The number of a child that leads a group of its own and ends with the status of `work`."""
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "no fork beside threads"
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setpgrp()
            signal.alarm(PATIENCE)
            status = work()
        except BaseException:  # noqa: BLE001  nothing of it may reach what is above the fork
            traceback.print_exc()
        finally:
            os._exit(status)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # it was faster
        os.setpgid(child, child)
    return child


def _awaited(child: int) -> int:
    """The status of a child, when it and all of its group are gone."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            os.killpg(child, 0)
        except ProcessLookupError:
            return status
        time.sleep(0.02)
    raise AssertionError("a worker outlived its run")


def _write_down_promises(path: Path, name: Name) -> None:
    """From now on what is called safe: committed items, samples in the state, finished blocks."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    commit, collect, save = Writer.commit, Writer.collect, activations.save_state
    add = Work.add

    def note(entries: Iterable[Entry]) -> None:
        os.write(handle, "".join(f"{e.key} {e.digest}\n" for e in entries).encode())

    def committed(self: Writer, items: Iterable[Item]) -> Committed:
        items = list(items)
        result = commit(self, items)
        note(item.entry for item in items)
        return result

    def collected(self: Writer) -> ImportedShards:
        result = collect(self)
        note(row.entry for row in self.rows(None))
        return result

    def saved(path: Path, statistics: Statistics) -> None:
        save(path, statistics)
        os.write(handle, f"{statistics.keys[-1]}\n".encode())

    def added(self: Work, number: int, result: BlockResult) -> None:
        add(self, number, result)
        os.write(handle, f"{result.path}\n".encode())

    Work.add = added
    if name == "quantize":
        return  # the sets that it draws for its evaluation end inside the result
    Writer.commit, Writer.collect = committed, collected
    activations.save_state = saved
    activations.collect = partial(activations.collect, share=0)  # a state after each sample
