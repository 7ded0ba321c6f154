"""Names of pictures."""

from functools import partial
from pathlib import Path

import pytest
from lydite.cli.paths import check_template, picture_path, save_new
from lydite.pipelines.sd3 import Request

from lydite.core.errors import InputError

REQUEST = Request("../../etc/passwd: a\x00b 狐", width=32, height=16)


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
    assert check_template(str(tmp_path)).endswith("/lydite_{seed}.png")


@pytest.mark.parametrize(
    "template", ["{", "{}.png", "{seed!r}.png", "{seed[0]}.png", "a", "{seed:{x}}.png"]
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
        path.write_text("first")
        if not (tmp_path / "a.png").exists():
            save_new(tmp_path / "a.png", partial(write, text="second"), overwrite=False)

    assert save_new(tmp_path / "a.png", slow, overwrite=False).name == "a_2.png"
    assert (tmp_path / "a.png").read_text() == "second"
    assert (tmp_path / "a_2.png").read_text() == "first"


@pytest.mark.parametrize("name", ["{seed:999999999}.png", "x" * 300 + ".png", ""])
def test_names_no_file_system_takes_are_refused_before_any_work(name: str) -> None:
    with pytest.raises(InputError, match="--out"):
        check_template(name)
