"""One writer: a second is refused at once by name, a dead one is no hindrance."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lydite.calibrate.activations import file as statistics_file
from lydite.calibrate.store.lock import NAME, WriterLock, _release_in_child, lock_owner
from lydite.core.errors import CalibrationError, FileError, LyditeError

HOLD = """
import sys, time
from pathlib import Path
from lydite.calibrate.store.lock import WriterLock

lock = WriterLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock until it is killed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_writer_is_refused_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        with pytest.raises(CalibrationError, match=rf"by process {process.pid} on .*, since 20"):
            WriterLock(tmp_path)
        found = lock_owner(tmp_path)
        assert found and found.pid == process.pid
        process.kill()
        process.wait()
        assert lock_owner(tmp_path) is None
        WriterLock(tmp_path).release()


def test_a_note_without_a_lock_is_not_a_lock(
    tmp_path: Path,
) -> None:
    note = {"pid": os.getpid(), "host": "here", "since": "long ago"}
    (tmp_path / NAME).write_text(json.dumps(note))
    assert lock_owner(tmp_path) is None
    WriterLock(tmp_path).release()
    assert (tmp_path / NAME).read_bytes() == b""


def test_two_writers_in_one_process_are_two(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    with pytest.raises(CalibrationError, match=f"process {os.getpid()}"):
        WriterLock(tmp_path)
    lock.release()
    WriterLock(tmp_path).release()


def test_a_torn_note_does_not_hide_the_lock(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    (tmp_path / NAME).write_bytes(b'{"pid":')
    with pytest.raises(CalibrationError, match="by another process"):
        WriterLock(tmp_path)
    lock.release()


FORK = """
import os, sys, time
from pathlib import Path
from lydite.calibrate.store.lock import WriterLock

lock = WriterLock(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
os._exit(0)
"""


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout and process.stdout.readline()
        process.wait()
        try:
            WriterLock(tmp_path).release()
        finally:
            os.killpg(process.pid, 9)


def test_a_folder_that_went_away_while_it_was_waited_for_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks: list[WriterLock] = []

    class Late(WriterLock):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            locks.append(self)
            if len(locks) == 1:  # the one before was finished, and took it away
                shutil.rmtree(folder)
            elif len(locks) == 2:  # and then a third one made it
                (folder / NAME).unlink()
                (folder / NAME).touch()

    monkeypatch.setattr(statistics_file, "WriterLock", Late)
    with statistics_file.open_work_folder(tmp_path / "out.sqlite") as work:
        assert len(locks) == 3 and locks[2].is_current
        with pytest.raises(CalibrationError, match=f"being written by process {os.getpid()}"):
            WriterLock(work)
    assert not work.exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_regular_file_is_locked(tmp_path: Path, kind: str) -> None:
    thesis = tmp_path / "thesis"
    thesis.write_text("years of work")
    if kind == "link":
        (tmp_path / NAME).symlink_to(thesis)
    elif kind == "pipe":
        os.mkfifo(tmp_path / NAME)
    else:
        (tmp_path / NAME).mkdir()
    with pytest.raises(FileError, match=NAME):
        WriterLock(tmp_path)
    assert lock_owner(tmp_path) is None and thesis.read_text() == "years of work"


def test_a_longer_note_of_a_dead_writer_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"pid": 1, "host": "h" * 200, "since": "then"}))
    lock = WriterLock(tmp_path)
    owner = lock_owner(tmp_path)
    lock.release()
    assert owner is not None and owner.pid == os.getpid()


def test_a_refused_writer_leaves_no_file_open(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(CalibrationError, match="being written by"):
        WriterLock(tmp_path)
    assert len(os.listdir("/dev/fd")) == before
    lock.release()


@pytest.mark.parametrize(
    ("call", "number", "message"),
    [
        ("fcntl.flock", errno.ENOLCK, "cannot be locked .*Keep the set on a local disk"),
        ("os.ftruncate", errno.EIO, "Input/output error"),
        ("lydite.core.files.system.write", errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_disk_that_cannot_lock_or_write_is_one_error_and_leaves_nothing_open(
    call: str, number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    before = sorted(os.listdir("/proc/self/fd")) if sys.platform == "linux" else []
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(LyditeError, match=message):
            WriterLock(tmp_path)
        if call == "fcntl.flock":
            assert lock_owner(tmp_path) is None
    if before:
        assert len(os.listdir("/proc/self/fd")) == len(before)
    WriterLock(tmp_path).release()


def test_a_child_closes_the_lock_and_leaves_the_note_of_its_parent(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    _release_in_child()  # as `os.fork` calls it
    assert lock._handle is None and (tmp_path / NAME).read_bytes()
    lock.release()
