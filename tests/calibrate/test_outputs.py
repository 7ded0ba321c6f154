"""Output files of the calibrate verbs: new, or replaced when asked, and never inside a set."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lydite.calibrate.npz_export import export_npz
from lydite.core.errors import FileError, LyditeError
from support.calibration import draw
from support.calibration_cli import calibrate

COMMANDS = {
    "sheet": ("verify", "--sheet"),
    "manifest": ("export", "--manifest"),
}


@pytest.fixture(params=sorted(COMMANDS))
def write(request: pytest.FixtureRequest) -> Callable[..., object]:
    verb, option = COMMANDS[request.param]

    def run(folder: Path, path: Path, *more: str) -> None:
        result = calibrate(verb, folder, option, path, *more)
        if isinstance(result.exception, LyditeError):
            assert not result.stdout  # refused before the work
            raise result.exception

    return run


@pytest.fixture
def made(tmp_path: Path) -> Path:
    draw(tmp_path / "set", 2)
    return tmp_path / "set"


def test_a_file_is_made_with_its_folder_and_replaced_when_asked(
    made: Path, tmp_path: Path, write: Callable[..., object]
) -> None:
    path = tmp_path / "new" / "deep" / "out"
    write(made, path)
    path.write_text("mine")
    with pytest.raises(FileError, match="exists already"):
        write(made, path)
    assert path.read_text() == "mine"
    write(made, path, "--overwrite")
    assert path.read_bytes() != b"mine" and list(path.parent.iterdir()) == [path]


def test_nothing_is_written_into_a_set(
    made: Path, tmp_path: Path, write: Callable[..., object]
) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    (tmp_path / "way").symlink_to(made / "shards")
    for path in (made / "set.json", made / "new", made / "shards" / "new", tmp_path / "way" / "a"):
        with pytest.raises(FileError, match="lies inside the calibration set"):
            write(made, path, "--overwrite")
    with pytest.raises(FileError, match="lies inside the calibration set"):
        export_npz(made, made / "npz")
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_bound_that_would_bound_nothing_is_refused(made: Path, value: str) -> None:
    result = calibrate("verify", made, "--absmax", value)
    assert f"--absmax is {float(value)}" in str(result.exception)
