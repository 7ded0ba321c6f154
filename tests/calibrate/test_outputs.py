"""Results go to new files or over our own of that kind; whatever else is there stays as it is."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from lydite.calibrate.npz_export import export_npz
from lydite.calibrate.store.status import write_manifest
from lydite.core.errors import FileError, LyditeError
from lydite.core.outputs import check_output, png_kind
from support.calibration import draw
from support.calibration_cli import calibrate

SHEET = png_kind("contact sheet")


def write_sheet(folder: Path, path: Path) -> None:
    """By the command that does it."""
    result = calibrate("verify", folder, "--sheet", path)
    if isinstance(result.exception, LyditeError):
        raise result.exception


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "sheet": write_sheet,
    "manifest": write_manifest,
}


@pytest.fixture(params=sorted(WRITERS))
def write(request: pytest.FixtureRequest) -> Callable[[Path, Path], object]:
    return WRITERS[request.param]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    draw(tmp_path / "set", 2)
    return tmp_path / "set"


def test_a_new_file_is_made_with_its_folder_and_replaced_by_the_next(
    made: Path, tmp_path: Path, write: Callable[[Path, Path], object]
) -> None:
    path = tmp_path / "new" / "deep" / "out"
    write(made, path)
    first = path.read_bytes()
    shutil.rmtree(made)
    draw(made, 3)
    write(made, path)
    assert path.read_bytes() != first
    assert os.listdir(path.parent) == ["out"]


def test_a_file_of_another_kind_stays(
    made: Path, tmp_path: Path, write: Callable[[Path, Path], object]
) -> None:
    prompts, photo = tmp_path / "prompts.txt", tmp_path / "photo.png"
    prompts.write_text("a red star\n")
    Image.new("RGB", (8, 8), "green").save(photo)
    (tmp_path / "empty").touch()
    export_npz(made, tmp_path / "npz")
    foreign = [prompts, photo, tmp_path / "empty", tmp_path / "npz" / "manifest.json"]
    before = {path: path.read_bytes() for path in foreign}
    for path in foreign:
        with pytest.raises(FileError, match="not overwritten"):
            write(made, path)
    assert {path: path.read_bytes() for path in foreign} == before


def test_links_devices_pipes_and_folders_are_refused(
    made: Path, tmp_path: Path, write: Callable[[Path, Path], object]
) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    write(made, tmp_path / "ours")
    (tmp_path / "live").symlink_to(tmp_path / "ours")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    kept = sorted(os.listdir(tmp_path))
    for name, message in (
        ("dangling", "is a link"),
        ("live", "is a link"),
        ("pipe", "a device or a pipe"),
        ("folder", "is a folder"),
        ("file/within", "Not a directory"),
    ):
        with pytest.raises(FileError, match=message):
            write(made, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == kept
    assert (tmp_path / "dangling").is_symlink() and (tmp_path / "pipe").is_fifo()
    with pytest.raises(FileError, match="a device or a pipe"):
        check_output(Path(os.devnull), SHEET)


def test_nothing_is_written_into_a_set(
    made: Path, tmp_path: Path, write: Callable[[Path, Path], object]
) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    (tmp_path / "way").symlink_to(made / "shards")
    for path in (made / "set.json", made / "new", made / "shards" / "new", tmp_path / "way" / "a"):
        with pytest.raises(FileError, match="lies inside the calibration set"):
            write(made, path)
    with pytest.raises(FileError, match="lies inside the calibration set"):
        export_npz(made, made / "npz")
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_a_marked_picture_is_one_for_other_programs_too(made: Path, tmp_path: Path) -> None:
    write_sheet(made, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        picture.load()  # check sums of all chunks
        assert picture.info["Software"] == "lydite: contact sheet"
    picture.resize((9, 9)).save(tmp_path / "changed.png")  # by another program, without the mark
    with pytest.raises(FileError, match="not a lydite contact sheet"):
        check_output(tmp_path / "changed.png", SHEET)


def test_the_commands_refuse_before_they_work(made: Path, tmp_path: Path) -> None:
    taken = tmp_path / "prompts.txt"
    taken.write_text("a red star\n")
    for words in (
        ("verify", made, "--sheet", taken),
        ("export", made, "--manifest", taken, "--out", tmp_path / "npz"),
    ):
        result = calibrate(*words)
        assert isinstance(result.exception, LyditeError) and not result.stdout
        assert "not overwritten" in str(result.exception)
    assert taken.read_text() == "a red star\n" and not (tmp_path / "npz").exists()


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_bound_that_would_bound_nothing_is_refused(made: Path, value: str) -> None:
    result = calibrate("verify", made, "--absmax", value)
    assert f"--absmax is {float(value)}" in str(result.exception)
