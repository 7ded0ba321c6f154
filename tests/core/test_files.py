"""A file is whole under its name, or it is not there and nothing is left behind."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lydite.core import files
from lydite.core.errors import FileError
from lydite.core.files import atomic_path, read_bounded, write_atomic
from support.calibration import FaultyDisk, faulty


def test_written_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.bin"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file.bin"]


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"new")
        assert temporary.parent == tmp_path
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_path(path) as temporary:
        temporary.write_bytes(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_written_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError, match="not a folder"):
        write_atomic(tmp_path / "file" / "below", b"")
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(FileError, match="not a file"):
        write_atomic(tmp_path / "folder", b"")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_full_disk_is_a_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="No space left on device"):
        write_atomic(tmp_path / "file", b"x")
    assert os.listdir(tmp_path) == []


def test_a_file_that_another_process_takes_away_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stat = tmp_path / "file", Path.stat
    path.write_bytes(b"old")

    def seen_and_gone(self: Path, **options: bool) -> os.stat_result:
        found = stat(self, **options)
        if self == path:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", seen_and_gone)
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="not a file"):
        write_atomic(tmp_path / "pipe", b"")
    assert (tmp_path / "pipe").is_fifo()


def test_a_short_write_is_gone_on_with(tmp_path: Path) -> None:
    with faulty(FaultyDisk(2, "short")) as system:
        files.write_atomic(tmp_path / "file", [b"0123456789"])
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    assert system.calls == 7  # open, half, the other half, sync, rename, open and sync the folder


@pytest.mark.parametrize("k", range(1, 7))
def test_a_failing_call_leaves_the_old_file_or_the_new(tmp_path: Path, k: int) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with (
        faulty(FaultyDisk(k, "ENOSPC")),
        pytest.raises(files.DiskError, match=r"file: .*No space left on device; .* free\)"),
    ):
        files.write_atomic(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_bytes() == (b"old" if k < 5 else b"new")
    assert os.listdir(tmp_path) == ["file"]


def test_a_sweep_spares_what_a_live_process_writes(tmp_path: Path) -> None:
    for name in (".dead.part", ".live.part", "other.part", ".kept"):
        (tmp_path / name).write_bytes(b"")
    handle = os.open(tmp_path / ".live.part", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    files.remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".kept", ".live.part", "other.part"]
    os.close(handle)
    files.remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".kept", "other.part"]


def test_what_would_not_fit_is_not_started(tmp_path: Path) -> None:
    free = files.free_bytes(tmp_path / "not" / "there")
    assert free is not None and free > 0
    files.require_space(tmp_path, 0)
    with pytest.raises(FileError, match=r"needs about .* GiB .* are free"):
        files.require_space(tmp_path, free + 2**40)


def test_the_reserve_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda _: 16 * 2**20 + 5)
    files.require_space(tmp_path, 5)
    with pytest.raises(FileError, match=r"about 6 bytes and a reserve of 16\.0 MiB; 16\.0 MiB are"):
        files.require_space(tmp_path, 6)
    monkeypatch.setattr(files, "free_bytes", lambda _: None)  # the disk does not say
    files.require_space(tmp_path, 2**60)
    assert files.free_text(tmp_path) == "free space unknown"


def test_free_space_that_the_disk_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(files.shutil, "disk_usage", refuse)
    assert files.free_bytes(tmp_path) is None


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError, match="not a folder"):
        files.make_folder(tmp_path / "file")
    with pytest.raises(FileError, match=r"could not be written|not a folder"):
        files.make_folder(tmp_path / "file" / "below")


def test_sizes_are_for_people() -> None:
    assert [files.size_text(n) for n in (0, 1023, 1024, 1536, 5 * 2**20, 2**41)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "2048.0 GiB",
    ]


def test_a_moved_file_has_its_new_name_on_disk_before_it_loses_the_old(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for k, left in ((1, ["a"]), (2, ["a", "there/a"]), (4, ["a", "there/a"]), (0, ["there/a"])):
        (tmp_path / "a").write_bytes(b"x")
        if k:
            with faulty(FaultyDisk(k, "EIO")), pytest.raises(files.DiskError, match="free"):
                files.move(tmp_path / "a", tmp_path / "there" / "a")
        else:
            files.move(tmp_path / "a", tmp_path / "there" / "a")
        found = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("a")]
        assert sorted(found) == left
        (tmp_path / "there" / "a").unlink(missing_ok=True)


def test_a_file_system_without_links_and_a_taken_name_are_renamed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.EPERM, errno.EEXIST):
        (tmp_path / "a").write_bytes(b"new")
        (tmp_path / "b").write_bytes(b"old")

        def refuse(_: Path, new: Path, number: int = number) -> None:
            raise OSError(number, os.strerror(number), str(new))

        monkeypatch.setattr(files.system, "link", refuse)
        files.move(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b").read_bytes() == b"new" and not (tmp_path / "a").exists()


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(FileError, match="4"):
        read_bounded(path, 4)


def test_a_link_is_followed_unless_it_must_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_bounded(tmp_path / "link", 1) == b"x"
    assert read_bounded(tmp_path / "file", 1, follow=False) == b"x"
    with pytest.raises(FileError, match="cannot be read"):
        read_bounded(tmp_path / "link", 1, follow=False)


def test_what_cannot_be_read_is_a_file_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileError, match="no such file"):
        read_bounded(tmp_path / "nothing", 1)
    with pytest.raises(FileError, match=r"cannot be read \(.*null"):
        read_bounded(tmp_path / "a\0b", 1)

    class Broken:
        def __enter__(self) -> "Broken":
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self, _: int) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "open_regular", lambda *_, **__: Broken())
    with pytest.raises(FileError, match=r"file: cannot be read \(Input/output error\)"):
        read_bounded(tmp_path / "file", 1)


def test_a_file_has_the_rights_that_the_mask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOTTY, errno.EINVAL, errno.EIO])
def test_a_drive_that_cannot_flush_fully_flushes_as_it_can(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "_full_sync", refuse)
    monkeypatch.setattr(os, "fsync", flushed.append)
    if number == errno.EIO:
        with pytest.raises(files.DiskError, match="Input/output error"):
            write_atomic(tmp_path / "file", b"")
    else:
        write_atomic(tmp_path / "file", b"")
    assert len(flushed) == (0 if number == errno.EIO else 2)  # the file and its folder


def test_a_file_written_by_path_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    monkeypatch.setattr(files, "sync_path", lambda path: done.append(("flush", path.suffix)))
    give = files._give_name
    monkeypatch.setattr(
        files, "_give_name", lambda *a, **k: (done.append(("name", a[1].suffix)), give(*a, **k))
    )
    with files.atomic_path(tmp_path / "new.png") as path:
        path.write_bytes(b"x")
    assert done == [("flush", ".part"), ("name", ".png"), ("flush", tmp_path.suffix)]


def _write_by_path(path: Path) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"x")


@pytest.mark.parametrize(
    ("change", "flushed"),
    [
        (lambda folder: files.remove(folder / "old"), ["."]),
        (lambda folder: files.remove(folder / "nothing"), []),
        (lambda folder: files.make_folder(folder / "new" / "below"), [".", "new"]),
        (lambda folder: files.make_folder(folder / "there"), []),
        (lambda folder: files.move(folder / "old", folder / "there" / "old"), ["there", "."]),
        (lambda folder: write_atomic(folder / "there" / "file", b"x"), ["there"]),
        (lambda folder: _write_by_path(folder / "there" / "file"), ["there"]),
    ],
)
def test_a_changed_folder_is_flushed(
    change: Callable[[Path], None],
    flushed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "there").mkdir()
    flush, done = files.sync_path, list[Path]()
    monkeypatch.setattr(files, "sync_path", lambda path: (done.append(path), flush(path)))
    change(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in done if path.is_dir()]
    assert found == flushed


def test_on_a_mac_the_drive_is_flushed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(files.sys, "platform", "darwin")
    monkeypatch.setattr(files.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(files.fcntl, "fcntl", lambda *call: asked.append(call))
    files.system.sync(7)
    assert asked == [(7, 51)]


def test_leftovers_behind_a_link_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".0.part").touch()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    files.remove_leftovers(tmp_path / "link")
    assert (tmp_path / "theirs" / ".0.part").exists()
    (tmp_path / ".1.part").symlink_to(tmp_path / "theirs" / ".0.part")
    files.remove_leftovers(tmp_path)
    assert (tmp_path / ".1.part").is_symlink()


def test_locks_that_another_process_takes_or_that_a_disk_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [BlockingIOError(errno.EAGAIN, "taken"), FileNotFoundError(errno.ENOENT, "gone")]
    names: list[Path] = []
    real = files._temporary_name

    def flock(*_: int) -> None:
        if answers:
            raise answers.pop(0)

    monkeypatch.setattr(files, "_temporary_name", lambda folder: names.append(real(folder)) or names[-1])  # noqa: E501  # fmt: skip
    monkeypatch.setattr(files.fcntl, "flock", flock)
    write_atomic(tmp_path / "file", b"1")
    assert len(names) == 3  # one more for each that was lost
    answers.append(OSError(errno.ENOTSUP, "no locks"))
    write_atomic(tmp_path / "file", b"2")
    assert len(names) == 4 and (tmp_path / "file").read_bytes() == b"2"


def test_a_new_file_that_a_sweep_removed_before_it_was_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []

    def sweep(_: int, __: int) -> None:
        if not swept:
            swept.extend(tmp_path.glob(".*"))
            (left,) = swept
            left.unlink()
            left.touch()  # a file of another process that has the same name

    monkeypatch.setattr(files.fcntl, "flock", sweep)
    write_atomic(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"
    assert sorted(tmp_path.iterdir()) == sorted([*swept, tmp_path / "file"])


def test_a_folder_that_is_missing_is_made_only_if_asked(tmp_path: Path) -> None:
    with pytest.raises(files.DiskError, match="No such file"):
        write_atomic(tmp_path / "new" / "file", b"", make_parents=False)
    files.remove(tmp_path / "new" / "file")  # what does not exist is removed already
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors as Linux does")
def test_every_descriptor_is_closed_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ".0.part").touch()
    (tmp_path / "folder").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    write_atomic(tmp_path / "file", b"x")
    read_bounded(tmp_path / "file", 1)
    with atomic_path(tmp_path / "other") as temporary:
        temporary.write_bytes(b"x")
    files.move(tmp_path / "other", tmp_path / "folder" / "other")
    files.remove(tmp_path / "folder" / "other")
    files.make_folder(tmp_path / "new" / "deep")
    files.try_folder(tmp_path / "folder")
    files.disk_abilities(tmp_path)
    files.remove_leftovers(tmp_path)
    for refused in (
        lambda: read_bounded(tmp_path / "pipe", 1),
        lambda: read_bounded(tmp_path / "file", 0),
        lambda: write_atomic(tmp_path / "pipe", b""),
        lambda: write_atomic(tmp_path / "file", b"", replace=False),
        lambda: files.try_folder(tmp_path / "file"),
    ):
        with pytest.raises(FileError):
            refused()
    assert len(os.listdir("/proc/self/fd")) == before
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "new", "pipe"]


def test_the_cache_is_where_the_user_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert files.cache_folder() == Path("/elsewhere/lydite")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert files.cache_folder() == tmp_path / ".cache" / "lydite"
    monkeypatch.setenv("HOME", "not/absolute")
    assert files.cache_folder() is None


def test_what_a_disk_can_do(tmp_path: Path) -> None:
    abilities = files.disk_abilities(tmp_path)
    assert [abilities[name] for name in ("writable", "file_locks", "full_sync")] == [True] * 3
    assert abilities["free"] and os.listdir(tmp_path) == []
    missing = files.disk_abilities(tmp_path / "missing")
    assert not any(value for name, value in missing.items() if name != "free")
