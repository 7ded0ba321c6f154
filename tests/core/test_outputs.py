"""Output files that users name: what is refused, and when."""

import errno
import os
from pathlib import Path

import pytest

from lydite.core.errors import FileError
from lydite.core.files import NameTaken, atomic_path, system, write_atomic
from lydite.core.outputs import check_output, write_output


def test_only_a_regular_file_is_replaced_and_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "live").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, reason in (
        ("dangling", "is a link"),
        ("live", "is a link"),
        ("pipe", "a device or a pipe"),
        ("folder", "is a folder"),
        (".", "is a folder"),
        ("file/within", "Not a directory"),
        ("nul\0", "null"),
    ):
        with pytest.raises(FileError, match=reason):
            check_output(tmp_path / name, overwrite=True)
    with pytest.raises(FileError, match="exists already"):
        check_output(tmp_path / "file")
    check_output(tmp_path / "file", overwrite=True)
    check_output(tmp_path / "new" / "deep" / "file")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file", "folder", "live", "pipe"]


def test_an_input_is_never_an_output(tmp_path: Path) -> None:
    source = tmp_path / "trace"
    source.mkdir()
    (source / "trace.json").write_text("{}")
    os.link(source / "trace.json", tmp_path / "other name")
    (tmp_path / "way").symlink_to(source)
    for path in (source / "trace.json", source / "new", tmp_path / "way" / "new"):
        with pytest.raises(FileError, match="input"):
            check_output(path, overwrite=True, inputs=[source])
    with pytest.raises(FileError, match="input"):
        check_output(tmp_path / "other name", overwrite=True, inputs=[source / "trace.json"])
    check_output(tmp_path / "beside", inputs=[source, source / "trace.json", tmp_path / "missing"])


def test_a_folder_that_cannot_be_written_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FileError, match="Read-only file system"):
        check_output(tmp_path / "new" / "file")


# As FAT, exFAT and some network disks answer; the last: for a file that has too many.
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_a_file_that_came_meanwhile_stays_also_without_hard_links(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(system, "link", refuse)
    before = len(os.listdir("/dev/fd"))
    write_output(tmp_path / "new", b"data")
    assert len(os.listdir("/dev/fd")) == before
    assert (tmp_path / "new").read_bytes() == b"data"
    with pytest.raises(FileError, match="exists already"):
        write_output(tmp_path / "new", b"other")
    with pytest.raises(NameTaken):
        write_atomic(tmp_path / "new", b"other", replace=False)
    with pytest.raises(NameTaken), atomic_path(tmp_path / "new", replace=False) as temporary:
        temporary.write_bytes(b"other")
    assert (tmp_path / "new").read_bytes() == b"data" and os.listdir(tmp_path) == ["new"]
