"""One writer: a second is refused at once by name, a dead one is no hindrance."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lydite.calibrate.activations import merge as activations_merge
from lydite.calibrate.store.lock import NAME, Claim, holder
from lydite.core.errors import CalibrationError

HOLD = """
import sys, time
from pathlib import Path
from lydite.calibrate.store.lock import Claim

claim = Claim(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the claim until it is killed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_writer_is_refused_in_under_a_second_and_a_dead_one_is_taken_over(
    tmp_path: Path,
) -> None:
    with held(tmp_path) as process:
        start = time.monotonic()
        with pytest.raises(CalibrationError, match=rf"by process {process.pid} on .*, since 20"):
            Claim(tmp_path)
        assert time.monotonic() - start < 1
        found = holder(tmp_path)
        assert found and found.pid == process.pid
        process.kill()
        process.wait()
        assert holder(tmp_path) is None
        Claim(tmp_path).release()


def test_a_note_without_a_lock_is_no_claim_even_if_its_process_number_lives(tmp_path: Path) -> None:
    note = {"pid": os.getpid(), "host": "here", "since": "long ago"}
    (tmp_path / NAME).write_text(json.dumps(note))
    assert holder(tmp_path) is None
    Claim(tmp_path).release()
    assert (tmp_path / NAME).read_bytes() == b""


def test_two_writers_in_one_process_are_two(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    with pytest.raises(CalibrationError, match=f"process {os.getpid()}"):
        Claim(tmp_path)
    claim.release()
    Claim(tmp_path).release()


def test_a_torn_note_does_not_hide_the_lock(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    (tmp_path / NAME).write_bytes(b'{"pid":')
    with pytest.raises(CalibrationError, match="by another process"):
        Claim(tmp_path)
    claim.release()


FORK = """
import os, sys, time
from pathlib import Path
from lydite.calibrate.store.lock import Claim

claim = Claim(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
os._exit(0)
"""


def test_a_forked_child_does_not_keep_the_claim_of_its_dead_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout and process.stdout.readline()
        process.wait()
        try:
            Claim(tmp_path).release()
        finally:
            os.killpg(process.pid, 9)


def test_a_folder_that_went_away_while_it_was_waited_for_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[Claim] = []

    class Late(Claim):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            claims.append(self)
            if len(claims) == 1:  # the one before was finished, and took it away
                shutil.rmtree(folder)
            elif len(claims) == 2:  # and then a third one made it
                (folder / NAME).unlink()
                (folder / NAME).touch()

    monkeypatch.setattr(activations_merge, "Claim", Late)
    with activations_merge.working(tmp_path / "out.sqlite") as work:
        assert len(claims) == 3 and claims[2].stands
        with pytest.raises(CalibrationError, match=f"being written by process {os.getpid()}"):
            Claim(work)
    assert not work.exists()
