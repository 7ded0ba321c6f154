"""Names of pictures."""

import os
from functools import partial
from pathlib import Path

import pytest

from lydite.cli.picture_files import (
    LONGEST_NAME,
    check_template,
    picture_path,
    recorded_name,
    save_new,
    save_picture,
)
from lydite.core.errors import FileError, InputError
from lydite.core.files import DiskError, atomic_path
from lydite.core.request import Request

REQUEST = Request("../../etc/passwd: a\x00b 狐", guidance=7.0, width=32, height=16)


def write(path: Path, text: str) -> None:
    path.write_text(text)


def test_a_prompt_cannot_leave_the_folder() -> None:
    path = picture_path("out/{prompt}.png", REQUEST, seed=1, index=0, model="/models/x.safetensors")
    assert path == Path("out/etc_passwd_a_b_狐.png")


def test_fields_take_format_specs() -> None:
    template = check_template("{model}_{seed:06d}_{guidance:.1f}_{width}x{height}.png")
    path = picture_path(template, REQUEST, seed=12, index=0, model="a/sd3.safetensors")
    assert str(path) == "sd3_000012_7.0_32x16.png"


def test_a_folder_gets_the_default_name(tmp_path: Path) -> None:
    for folder in (tmp_path, f"{tmp_path}/new/"):
        assert check_template(str(folder)).endswith("/lydite_{seed}.png")


@pytest.mark.parametrize(
    "template",
    [
        *("{", "{}.png", "{seed!r}.png", "{seed[0]}.png", "{seed:{x}}.png"),
        *("{guidance:d}.png", "{seed:c}.png", "{seed:x}.png", "{prompt:d}.png", "{seed:100d}.png"),
    ],
)
def test_templates_that_are_refused(template: str) -> None:
    with pytest.raises(InputError, match="--out"):
        check_template(template)


def test_the_first_free_number_is_taken(tmp_path: Path) -> None:
    for name in ("a.png", "a_2.png"):
        (tmp_path / name).write_text("kept")
    save = partial(write, text="new")
    assert save_new(tmp_path / "a.png", save, overwrite=False).name == "a_3.png"
    assert (tmp_path / "a.png").read_text() == "kept"
    assert save_new(tmp_path / "a.png", save, overwrite=True).name == "a.png"
    assert (tmp_path / "a.png").read_text() == "new"


def test_two_writers_of_one_name_both_keep_their_file(tmp_path: Path) -> None:
    def slow(path: Path) -> None:  # the other writer comes while this one is at work
        with atomic_path(path, replace=False) as temporary:
            temporary.write_text("slow")
            if not (tmp_path / "a.png").exists():
                save_new(tmp_path / "a.png", partial(write, text="fast"), overwrite=False)

    assert save_new(tmp_path / "a.png", slow, overwrite=False).name == "a_2.png"
    assert (tmp_path / "a.png").read_text() == "fast"
    assert (tmp_path / "a_2.png").read_text() == "slow"


@pytest.mark.parametrize("name", ["{seed:999999999}.png", "x" * 300 + ".png", ""])
def test_names_no_file_system_takes_are_refused_before_any_work(name: str) -> None:
    with pytest.raises(InputError, match="--out"):
        check_template(name)


@pytest.mark.parametrize(
    "fields", ["{prompt}", "{prompt}{model}", "{prompt}{seed}{guidance}{steps}"]
)
def test_no_prompt_makes_a_longer_name_than_the_template_may(fields: str) -> None:
    def accepted(length: int) -> bool:
        try:
            return bool(check_template(f"{'x' * length}{fields}.png"))
        except InputError:
            return False

    longest = max(filter(accepted, range(LONGEST_NAME)))
    for letter in ("a", "é", "狐", "𝕏"):
        request = Request(100 * letter, guidance=10 / 3, steps=1000)
        path = picture_path(
            f"{'x' * longest}{fields}.png", request, seed=2**53, index=0, model=100 * letter
        )
        numbered = path.with_name(f"{path.stem}_step9999_99{path.suffix}")
        assert len(os.fsencode(numbered.name)) <= 255  # what file systems take
    assert not accepted(longest + 1) and longest > 40


def test_a_finished_picture_is_not_lost_when_its_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def save(path: Path) -> None:
        if path.parent.name == "gone":
            raise DiskError(path, OSError(28, "No space left on device"))
        path.write_text("a picture")

    with pytest.raises(FileError, match=r"No space left.* The finished picture is at ") as caught:
        save_picture(tmp_path / "gone" / "a.png", save, overwrite=False)
    place = Path(str(caught.value).rpartition(" is at ")[2].removesuffix("."))
    assert place.read_text() == "a picture"


def test_names_that_are_not_utf8_are_names(tmp_path: Path) -> None:
    template = check_template(f"{tmp_path}/o\udcff.png")
    assert picture_path(template, REQUEST, seed=1, index=0, model="m").parent == tmp_path
    assert check_template("~/a.png") == str(Path.home() / "a.png")


@pytest.mark.parametrize("second", [OSError(28, "full"), FileError("also full")])
def test_where_no_disk_takes_a_picture_the_first_error_is_told(
    second: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    errors = [second, FileError("the first")]

    def save(path: Path) -> None:
        raise errors.pop()

    with pytest.raises(FileError, match=r"^the first$"):
        save_picture(tmp_path / "a.png", save, overwrite=False)


def test_a_picture_remembers_the_name_of_a_file_and_not_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").touch()
    there = str(tmp_path / "m.safetensors")
    assert recorded_name(there, absolute=False) == "m.safetensors"
    assert recorded_name(there, absolute=True) == there
    for name in (None, "embedded", "owner/name", "/no/such/file"):
        assert recorded_name(name, absolute=False) == recorded_name(name, absolute=True) == name
