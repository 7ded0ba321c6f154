"""`lydite generate` as a person uses it, on the untrained model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lydite import embedded
from lydite.cli.generate import (
    DEBUG,
    _check_names,
    _read_prompts,
    read_modes,
)
from lydite.cli.main import lydite
from lydite.cli.picture_files import recorded_name
from lydite.cli.request_options import read_embedding_option, read_lora_option, read_seeds
from lydite.core.errors import FileError, InputError, LyditeError
from lydite.core.request import Request
from lydite.pipelines.picture import Record, read_pixels, read_record, write_picture

SMALL = ["--steps", "2", "--size", "32x32", "--text-length", "4"]


def run(*arguments: object) -> Result:
    """Run in this process; a LyditeError comes back as the result's exception."""
    return CliRunner().invoke(lydite, [str(each) for each in arguments])


def draw(model: Path, *arguments: object) -> Result:
    result = run("generate", "a red fox", "-m", model, *SMALL, *arguments)
    if result.exception and not isinstance(result.exception, (LyditeError, SystemExit)):
        raise result.exception
    return result


def test_a_picture_is_replayed_bit_for_bit_from_its_own_metadata(untrained, tmp_path) -> None:
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    draw(
        untrained, "--seed", 0, "--guidance", 3.5, "-n", "snow", "--dtype", "bfloat16", "-o", first
    )
    result = run("generate", "--from", first, "-m", untrained, "-o", again)
    assert result.exit_code == 0, result.exception
    assert np.array_equal(read_pixels(first), read_pixels(again))
    assert read_record(first) == read_record(again) and "note" not in result.stderr
    assert read_record(first).seed == 0  # 0 is a seed


def test_a_picture_of_another_model_is_refused_unless_one_is_named(untrained, tmp_path) -> None:
    first = tmp_path / "first.png"
    draw(untrained, "--seed", 0, "-o", first, "--record-paths")
    record = msgspec.structs.replace(read_record(first), model_hash="0" * 64, device="another")
    write_picture(first, read_pixels(first), record, overwrite=True)
    result = run("generate", "--from", first, "-o", tmp_path / "a.png")
    assert "was made with another model than the one at" in str(result.exception)
    assert not (tmp_path / "a.png").exists()
    result = run("generate", "--from", first, "-m", untrained, "-o", tmp_path / "b.png")
    assert result.exit_code == 0 and not result.stdout.startswith("note")
    assert "note: the model is not the one this picture was made with." in result.stderr
    assert "note: the picture was drawn on 'another'" in result.stderr


def test_an_absolute_path_is_not_written_into_the_picture(untrained, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(untrained.parent)
    picture, again = tmp_path / "a.png", tmp_path / "b.png"
    draw(untrained, "--seed", 1, "-o", picture)
    assert read_record(picture).model == untrained.name
    assert run("generate", "--from", picture, "-o", again).exit_code == 0  # found from here
    monkeypatch.chdir(tmp_path)
    result = run("generate", "--from", picture, "-o", tmp_path / "c.png")
    assert isinstance(result.exception, InputError) and "--model" in str(result.exception)
    draw(untrained, "--seed", 1, "-o", picture, "--record-paths", "--overwrite")
    assert read_record(picture).model == str(untrained)
    assert run("generate", "--from", picture, "-o", tmp_path / "c.png").exit_code == 0
    assert np.array_equal(read_pixels(again), read_pixels(tmp_path / "c.png"))


def test_a_relative_path_is_written_as_typed(untrained, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(untrained.parent.parent)
    relative = Path(untrained.parent.name, untrained.name)
    draw(relative, "--seed", 1, "-o", tmp_path / "a.png")
    assert read_record(tmp_path / "a.png").model == str(relative)


def test_every_prompt_of_a_file_or_of_standard_input_is_drawn(untrained, tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text("a red star\n\na blue ring\n")
    options = ["-m", untrained, *SMALL, "--seed", 1]
    from_file = ["--prompts", tmp_path / "prompts.txt", "--preview", 1]
    result = run("generate", *from_file, *options, "-o", tmp_path / "a.png", "--overwrite")
    assert "add {prompt} or {index}" in str(result.exception)
    assert run("generate", *from_file, *options, "-o", tmp_path / "{index}.png").exit_code == 0
    records = [read_record(tmp_path / f"{index}.png") for index in (0, 1)]
    assert [record.request.prompt for record in records] == ["a red star", "a blue ring"]
    assert all((tmp_path / f"{index}_step001.png").exists() for index in (0, 1))
    arguments = [str(word) for word in ("generate", "-", *options, "-o", tmp_path / "s{index}.png")]
    result = CliRunner().invoke(lydite, arguments, input="a red star\na blue ring\n")
    assert result.exit_code == 0, result.exception
    for index in (0, 1):
        assert np.array_equal(
            read_pixels(tmp_path / f"{index}.png"), read_pixels(tmp_path / f"s{index}.png")
        )


def test_json_describes_every_picture(untrained, tmp_path) -> None:
    result = draw(untrained, "--seed", "1-2", "--json", "-o", f"{tmp_path}/")
    pictures = json.loads(result.stdout)["pictures"]
    assert [(picture["seed"], picture["steps"]) for picture in pictures] == [(1, 2), (2, 2)]
    assert all(Path(picture["path"]).is_file() for picture in pictures)


@pytest.mark.parametrize("ending", ["jpg", "webp"])
def test_other_formats_carry_the_settings_too(untrained, tmp_path, ending: str) -> None:
    first, again = tmp_path / f"first.{ending}", tmp_path / f"again.{ending}"
    draw(untrained, "--seed", 1, "-o", first)
    assert run("generate", "--from", first, "-m", untrained, "-o", again).exit_code == 0
    assert read_record(first) == read_record(again)
    assert np.array_equal(read_pixels(first), read_pixels(again))


def test_width_and_height_are_two_options(untrained, tmp_path) -> None:
    path = tmp_path / "a.png"
    options = ["--steps", 1, "--width", 32, "--height", 48, "--text-length", 4, "--seed", 1]
    assert run("generate", "a", "-m", untrained, *options, "-o", path).exit_code == 0
    assert read_pixels(path).shape == (48, 32, 3)


def test_options_override_what_a_picture_remembers(untrained, tmp_path) -> None:
    first, other = tmp_path / "first.png", tmp_path / "other.png"
    draw(untrained, "--seed", 3, "-o", first)
    run("generate", "a blue ring", "--from", first, "-m", untrained, "--seed", 4, "-o", other)
    record = read_record(other)
    assert record.request == read_record(first).request.replace(prompt="a blue ring")
    assert (record.seed, record.request.steps, record.request.width) == (4, 2, 32)


def test_metadata_is_readable_by_other_tools(untrained, tmp_path) -> None:
    path = tmp_path / "picture.png"
    draw(untrained, "--seed", 12, "-n", "ünïcode 🦊", "-o", path)
    with Image.open(path) as image:
        info = image.info
    lines = str(info["parameters"]).split("\n")
    assert lines[0] == "a red fox" and lines[1] == "Negative prompt: ünïcode 🦊"
    assert lines[2].startswith(
        "Steps: 2, Sampler: Euler, Schedule type: sd3_diffusers, CFG scale: 7"
    )
    assert "Seed: 12, Size: 32x32" in lines[2]
    assert json.loads(info["lydite"])["negative"] == "ünïcode 🦊"


def test_several_seeds_in_batches_get_names_of_their_own(untrained, tmp_path) -> None:
    draw(
        untrained,
        "--seed",
        "5-6,9",
        "--batch",
        2,
        "-o",
        tmp_path / "{index:02d}_{seed}_{prompt}.png",
    )
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00_5_a_red_fox.png", "01_6_a_red_fox.png", "02_9_a_red_fox.png"]


def test_a_batch_from_one_seed_counts_upwards(untrained, tmp_path) -> None:
    draw(untrained, "--seed", 7, "--batch", 2, "-o", f"{tmp_path}/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lydite_7.png", "lydite_8.png"]


def test_nothing_is_overwritten_unasked(untrained, tmp_path) -> None:
    path = tmp_path / "picture.png"
    draw(untrained, "--seed", 1, "-o", path)
    before = path.read_bytes()
    draw(untrained, "--seed", 2, "-o", path)
    assert path.read_bytes() == before and (tmp_path / "picture_2.png").exists()
    draw(untrained, "--seed", 2, "-o", path, "--overwrite")
    assert read_record(path).seed == 2


def test_previews_are_written_every_n_steps(untrained, tmp_path) -> None:
    draw(untrained, "--seed", 1, "--steps", 6, "--preview", 2, "-o", tmp_path / "a.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.png",
        "a_step002.png",
        "a_step004.png",
    ]


def test_previews_of_every_batch_are_kept_and_overwrite_nothing(untrained, tmp_path) -> None:
    for _ in range(2):
        options = ("--low-memory", "--batch", 1, "-s", "1-2", "--preview", 1)
        draw(untrained, *options, "-o", tmp_path / "p{index}.png")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"p0_step001.png", "p1_step001.png", "p0_step001_2.png", "p1_step001_2.png"} <= names


def test_a_run_that_ends_in_nan_saves_nothing(untrained, tmp_path) -> None:
    result = draw(untrained, "--seed", 1, "--guidance", "1e38", "-o", tmp_path / "a.png")
    assert "NaN" in str(result.exception) and not list(tmp_path.iterdir())


def test_options_are_refused_before_weights_are_read(untrained, tmp_path) -> None:
    folder = shutil.copytree(untrained, tmp_path / "model")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    result = run("generate", "a", "-m", folder, "--size", "33x33")
    assert "width is 33" in str(result.exception)


def test_img2img_replays_and_refuses_another_image(untrained, tmp_path) -> None:
    source, out = tmp_path / "in.png", tmp_path / "out.png"
    Image.new("RGB", (40, 40), "red").save(source)
    options = ("--image", source, "--strength", 0.5, "--record-paths")
    draw(untrained, "--seed", 1, *options, "-o", out)
    assert run("generate", "--from", out, "-o", tmp_path / "same.png").exit_code == 0
    assert np.array_equal(read_pixels(out), read_pixels(tmp_path / "same.png"))
    Image.new("RGB", (40, 40), "blue").save(source)
    result = run("generate", "--from", out, "-o", tmp_path / "other.png")
    assert isinstance(result.exception, InputError) and "not the image" in str(result.exception)
    chosen = tmp_path / "chosen.png"  # another image that is asked for is taken
    Image.new("RGB", (40, 40), "green").save(chosen)
    assert (
        run("generate", "--from", out, "--image", chosen, "-o", tmp_path / "o.png").exit_code == 0
    )
    source.unlink()
    result = run("generate", "--from", out, "-o", tmp_path / "other.png")
    assert isinstance(result.exception, InputError) and "--image" in str(result.exception)


def test_a_cut_prompt_is_said(untrained, tmp_path) -> None:
    path = tmp_path / "a.png"
    result = run("generate", "x " * 76 + "tail", "-m", untrained, *SMALL, "-s", 1, "-o", path)
    assert "it does not read" in result.stderr and "tail" in result.stderr


def test_debug_names_every_place(untrained, tmp_path) -> None:
    result = draw(untrained, "--seed", 1, "--debug", "all", "-o", tmp_path / "a.png")
    for place in (
        "text_encoder_2 pooled",
        "step 1 transformer uncond + cond",
        "step 1 latents",
        "vae output",
    ):
        assert place in result.stderr


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--size", "100x"], InputError, "--size is '100x'; expected WIDTHxHEIGHT"),
        (["--seed", "abc"], InputError, "--seed is 'abc'"),
        (["--seed", "9-3"], InputError, "rising range"),
        (["--batch", "0"], InputError, "--batch is 0"),
        (["--debug", "nans"], InputError, "--debug has nans"),
        (["--out", "a.gif"], InputError, "end the name in .png"),
        (["--out", "{nope}.png"], InputError, "the fields are"),
        (["--out", "{seed.__class__}.png"], InputError, "the fields are"),
        (["--out", "{prompt:d}.png"], InputError, "--out"),
        (["--image", "absent.png"], FileError, "absent.png: no such file"),
        (["--image", __file__], FileError, "cannot be read as an image"),
        (["--guidance", "nan"], InputError, "guidance is nan"),
        (["--negative", "a" * 10_001], InputError, "10001 characters"),
        (["--text-length", "100000000"], InputError, "text_length is 100000000"),
        (["--overwrite", "--seed", "1-2"], InputError, "add {seed}"),
        (["--width", "32"], InputError, "--size and --width together"),
        (["--prompts", "absent.txt"], InputError, "a PROMPT and --prompts together"),
        (["red", "fox"], InputError, "put it in quotes"),
    ],
)
def test_bad_options_are_one_clear_error(untrained, tmp_path, arguments, kind, message) -> None:
    result = run("generate", "a", "-m", untrained, "-o", tmp_path / "x.png", *SMALL, *arguments)
    assert isinstance(result.exception, kind)
    assert message in str(result.exception) and "\n" not in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("absent", "absent: no such file or folder"),
        ("absent/model.safetensors", "no such file or folder"),
        ("nobody/nothing", "not found here, and the download from the hub failed"),
    ],
)
def test_a_model_that_is_not_there(model: str, message: str) -> None:
    result = run("generate", "a", "-m", model)
    assert isinstance(result.exception, FileError) and message in str(result.exception)


def test_a_prompt_is_asked_for() -> None:
    assert "no prompt" in str(run("generate").exception)


def test_the_embedded_model_is_the_default_and_is_run_as_it_is_meant(tmp_path) -> None:
    result = run("generate", "a large red star", "--seed", 1, "-o", tmp_path / "a.png")
    assert result.exit_code == 0, result.exception
    record = read_record(tmp_path / "a.png")
    request = record.request
    assert (record.model, request.steps, request.guidance) == ("embedded", 16, 3.0)
    assert (request.text_length, request.width, request.height) == (16, 128, 128)


def test_the_embedded_model_is_found_again_by_its_name(tmp_path) -> None:
    for name in ("a", "b"):
        source = ["--from", tmp_path / "a.png"] if name == "b" else ["a star", "--steps", 1]
        result = run("generate", *source, "--seed", 1, "-o", tmp_path / f"{name}.png")
        assert result.exit_code == 0, result.exception
    assert np.array_equal(read_pixels(tmp_path / "a.png"), read_pixels(tmp_path / "b.png"))


def test_a_picture_without_our_metadata_cannot_be_replayed(tmp_path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    result = run("generate", "--from", tmp_path / "plain.png")
    assert "has no 'lydite' metadata" in str(result.exception)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": name} for name in ("", "nosuch", "load", "array", "int32", "bool_", "float64")]
    + [{"dtype": None}, {"dtype": ["float32"]}, {"prompt": "a" * 10_001}],
)
def test_f11_values_that_a_picture_remembers_are_checked(tmp_path, changes) -> None:
    """Metadata is a stranger's text, and a dtype the name of anything in MLX."""
    record = Record(
        request=Request("a star", steps=1),
        seed=1,
        model=embedded.NAME,
        model_hash="0" * 64,
        dtype="float32",
    )
    text = PngInfo()
    text.add_itxt("lydite", json.dumps({**json.loads(record.to_json()), **changes}))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=text)
    result = run("generate", "--from", tmp_path / "a.png", "-o", tmp_path / "b.png")
    assert isinstance(result.exception, LyditeError), result.exception
    assert next(iter(changes)) in str(result.exception) and not (tmp_path / "b.png").exists()


def test_f11_nested_metadata_is_refused(tmp_path) -> None:
    text = PngInfo()
    text.add_itxt("lydite", '{"zzz": ' + "[" * 20_000)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=text)
    result = run("generate", "--from", tmp_path / "a.png")
    assert isinstance(result.exception, FileError), result.exception


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"\xff", "not UTF-8"),
        (b"a" * 10_001, "characters"),
        (b"a\0b", "no text"),
        (b"", "no prompt"),
    ],
)
def test_standard_input_that_is_no_prompt_is_refused(given: bytes, message: str) -> None:
    result = CliRunner().invoke(lydite, ["generate", "-"], input=given)
    assert isinstance(result.exception, InputError) and message in str(result.exception)


def test_the_process_prints_one_line_and_exits_with_2(tmp_path) -> None:
    command = [sys.executable, "-m", "lydite", "generate", "a", "-m", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error:")


def test_ctrl_c_keeps_what_is_finished(untrained, tmp_path) -> None:
    command = [sys.executable, "-m", "lydite", "generate", "a fox", "-m", str(untrained)]
    command += [*SMALL, "--seed", "1-500", "-o", f"{tmp_path}/"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("lydite_*.png")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    finished = list(tmp_path.iterdir())
    assert f"{len(finished)} of 500 pictures are saved" in errors and "Traceback" not in errors
    assert finished and all(read_pixels(path).shape == (32, 32, 3) for path in finished)


def test_a_picture_that_is_written_is_counted(untrained, tmp_path, monkeypatch) -> None:
    generate = sys.modules["lydite.cli.generate"]
    save = generate._save

    def interrupted(*arguments: object) -> object:
        found = save(*arguments)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(generate, "_save", interrupted)
    said = "interrupted: 1 of 3 pictures are saved."
    for options, is_said in (((), True), (("--json",), True), (("--json", "-q"), False)):
        out = tmp_path / "".join(("out", *options))
        result = draw(untrained, "--seed", "1-3", *options, "-o", f"{out}/")
        assert result.stderr.count(said) == is_said
        assert [path.name for path in out.iterdir()] == ["lydite_1.png"]
        if "--json" in options:
            assert not result.stdout
            assert (f"{out}/lydite_1.png" in result.stderr) == is_said


def test_what_is_changed_of_an_image_is_said(untrained, tmp_path) -> None:
    from PIL import Image

    resized = "note: --image is 40×32; it is resized to 32×32."
    dropped = "note: --image has transparent pixels; their transparency is dropped."
    for size, mode, colour, notes in (
        ((32, 32), "RGB", "red", []),
        ((40, 32), "RGB", "red", [resized]),
        ((32, 32), "RGBA", (9, 9, 9, 255), []),
        ((32, 32), "RGBA", (9, 9, 9, 254), [dropped]),
        ((40, 32), "LA", (9, 0), [resized, dropped]),
    ):
        Image.new(mode, size, colour).save(tmp_path / "photo.png")
        result = draw(untrained, "--image", tmp_path / "photo.png", "-o", f"{tmp_path}/out/")
        assert result.exit_code == 0
        assert [line for line in result.stderr.splitlines() if "--image" in line] == notes


@pytest.mark.parametrize("name", ["model", "image"])
def test_a_name_that_is_not_utf8_does_not_lose_the_picture(untrained, tmp_path, name) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    if name == "model":
        odd.symlink_to(untrained)
        result = draw(odd, "-o", tmp_path / "a.png")
    else:
        Image.new("RGB", (32, 32), "red").save(odd)
        result = draw(untrained, "--image", odd, "-o", tmp_path / "a.png")
    assert result.exit_code == 0, result.exception
    assert read_record(tmp_path / "a.png").seed >= 0
    result = run("generate", "a\udcff", "-m", untrained)
    assert "not valid Unicode" in str(result.exception)


def test_an_input_is_not_replaced_and_a_bad_folder_is_found_first(untrained, tmp_path) -> None:
    photo = tmp_path / "photo.png"
    Image.new("RGB", (32, 32), "red").save(photo)
    before = photo.read_bytes()
    result = draw(untrained, "--image", photo, "-o", photo, "--overwrite")
    assert isinstance(result.exception, FileError) and "input" in str(result.exception)
    assert photo.read_bytes() == before
    result = draw(untrained, "-o", photo / "a.png")
    assert isinstance(result.exception, FileError) and "Not a directory" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "lora", "embedding"),
    [
        ("a.safetensors", ("a.safetensors", 1.0), ("a.safetensors", None)),
        ("a.safetensors:0.5", ("a.safetensors", 0.5), ("a.safetensors", "0.5")),
        ("a.safetensors:-1", ("a.safetensors", -1.0), ("a.safetensors", "-1")),
        ("c:a.safetensors", ("c:a.safetensors", 1.0), ("c", "a.safetensors")),
        ("there:2", ("there:2", 1.0), ("there:2", None)),
        ("7", ("7", 1.0), ("7", None)),
    ],
)
def test_a_file_with_its_weight_or_word(
    text: str, lora: object, embedding: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there:2").touch()
    assert read_lora_option(text) == lora and read_embedding_option(text) == embedding


@pytest.mark.parametrize("weight", ["nan", "inf"])
def test_a_weight_that_is_no_number_is_refused(weight: str) -> None:
    with pytest.raises(InputError, match="expected a number"):
        read_lora_option(f"a.safetensors:{weight}")


def test_modes_of_debug() -> None:
    assert read_modes(None) == read_modes("") == set() and read_modes("all") == set(DEBUG)
    first, second = DEBUG[:2]
    assert read_modes(f"{first}, {second}") == {first, second} and read_modes(first) == {first}
    with pytest.raises(InputError, match="expected"):
        read_modes(f"{first},everything")


@pytest.mark.parametrize(
    ("texts", "batch", "seeds"),
    [
        (("7",), 1, (7,)), (("7",), 3, (7, 8, 9)), (("7", "2"), 4, (7, 2)), (("0",), 2, (0, 1)),
        (("3-5",), 1, (3, 4, 5)), ((str(2**64 - 1),), 1, (2**64 - 1,)),
        ((str(-(2**63)),), 1, (-(2**63),)),
        ((str(2**64),), 1, None), ((str(2**64 - 1),), 2, None), ((str(-(2**63) - 1),), 1, None),
        (("x",), 1, None), (("5-3",), 1, None), (("4-4",), 1, (4,)), (("4-4",), 2, (4, 5)),
        (("1-10000",), 1, tuple(range(1, 10_001))), (("1-10001",), 1, None),
        (("0",), 1024, tuple(range(1024))), (("0",), 1025, None), (("0",), 0, None),
    ],
)  # fmt: skip
def test_seeds(texts: tuple[str, ...], batch: int, seeds: tuple[int, ...] | None) -> None:
    if seeds is not None:
        assert read_seeds(texts, batch) == seeds
        return
    with pytest.raises(InputError, match="--seed" if 1 <= batch <= 1024 else "--batch"):
        read_seeds(texts, batch)


@pytest.mark.parametrize(
    ("template", "prompts", "seeds", "fits"),
    [
        ("a.png", 1, 1, True), ("a.png", 2, 1, False), ("a.png", 1, 2, False),
        ("{seed}.png", 1, 2, True), ("{seed}.png", 2, 1, False), ("{index:03d}.png", 2, 2, True),
        ("{prompt}.png", 2, 1, True), ("{prompt}.png", 1, 2, False), ("{prompt}{seed}", 2, 2, True),
    ],
)  # fmt: skip
def test_every_picture_of_a_run_has_a_name_of_its_own(
    template: str, prompts: int, seeds: int, fits: bool
) -> None:
    given = template, [f"p{n}" for n in range(prompts)], range(seeds)
    if fits:
        _check_names(*given)
        return
    with pytest.raises(InputError, match="one name"):
        _check_names(*given)


def test_what_a_picture_remembers_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    there = str(tmp_path / "folder")
    for name, absolute, wanted in (
        (None, False, None), (embedded.NAME, True, embedded.NAME), ("org/m", True, "org/m"),
        ("folder", False, "folder"), ("folder", True, there), (there, False, "folder"),
        (there, True, there),
    ):  # fmt: skip
        assert recorded_name(name, absolute=absolute) == wanted


def test_where_prompts_come_from(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    assert _read_prompts(("a star",), None, "old") == ["a star"]
    assert _read_prompts((), None, "old") == ["old"]
    assert _read_prompts((), file, "old") == ["one", "two"]
    for words, given in ((("a", "star"), None), (("a star",), file), ((), None)):
        with pytest.raises(InputError, match=r"prompt|PROMPT"):
            _read_prompts(words, given, "")
