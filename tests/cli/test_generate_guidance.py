"""Guidance and the sampler's numbers as options of `lydite generate`, on the untrained model."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner, Result

from lydite.cli import generate
from lydite.cli.main import lydite
from lydite.cli.request_options import idle_options, long_start, read_request
from lydite.core.errors import InputError, LyditeError
from lydite.core.request import Request
from lydite.pipelines.family import Run
from lydite.pipelines.picture import read_pixels, read_record
from lydite.pipelines.pipeline import Pipeline

SMALL = ["--steps", "3", "--size", "32x32", "--text-length", "4", "--seed", "5"]


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(lydite, ["generate", *(str(each) for each in arguments)])
    if result.exception and not isinstance(result.exception, (LyditeError, SystemExit)):
        raise result.exception
    return result


def draw(model: Path, out: Path, *arguments: object) -> Result:
    return run("a red fox", "-m", model, *SMALL, "-o", out, *arguments)


def same(first: Path, second: Path) -> bool:
    return np.array_equal(read_pixels(first), read_pixels(second))


def test_every_number_is_remembered_and_replayed(untrained, tmp_path) -> None:
    first, again, plain = (tmp_path / f"{name}.png" for name in ("first", "again", "plain"))
    numbers = ("--guidance", "3.25,5,2", "--guidance-rescale", 0.7, "--guidance-interval", "0:0.6")
    eta = ("--sampler", "euler_ancestral", "--eta", 0.5, "--option", "s_noise=0.9")
    assert draw(untrained, first, *numbers, *eta).exit_code == 0
    request = read_record(first).request
    assert request.guidance_steps == (3.25, 5.0, 2.0) and request.guidance == 5.0
    assert (request.guidance_rescale, request.guidance_interval) == (0.7, (0.0, 0.6))
    assert request.options == {"eta": 0.5, "s_noise": 0.9}
    assert run("--from", first, "-m", untrained, "-o", again).exit_code == 0
    assert same(first, again) and read_record(again) == read_record(first)
    draw(untrained, plain)
    assert not same(first, plain)


@pytest.mark.parametrize(
    "change",
    [
        ("--guidance", "2"),
        ("--guidance", "5,5,2"),
        ("--guidance-rescale", "1"),
        ("--guidance-interval", "0:0.5"),
        ("--sampler", "ddim", "--eta", "1"),
        ("--sampler", "euler_ancestral", "--eta", "0"),
        ("--sampler", "euler_ancestral", "--option", "s_noise=0.5"),
    ],
)
def test_each_number_changes_the_picture(untrained, tmp_path, change) -> None:
    plain, other = tmp_path / "plain.png", tmp_path / "other.png"
    draw(untrained, plain, "--guidance", "5", *change[: 2 if "--sampler" in change else 0])
    assert draw(untrained, other, "--guidance", "5", *change).exit_code == 0
    assert not same(plain, other)


def test_options_override_what_a_picture_remembers(untrained, tmp_path) -> None:
    first, other, third = (tmp_path / f"{name}.png" for name in ("first", "other", "third"))
    numbers = ("--sampler", "euler_ancestral", "--eta", 0.5, "--option", "s_noise=0.9")
    draw(untrained, first, *numbers, "--guidance", "5,5,2")
    source = ("--from", first, "-m", untrained)
    run(*source, "-o", other, "--eta", 0.25, "--guidance", 4)
    request = read_record(other).request
    assert request.options == {"eta": 0.25, "s_noise": 0.9}
    assert (request.guidance, request.guidance_steps) == (4.0, ())
    result = run(*source, "-o", third, "--sampler", "euler")  # which has neither
    assert result.exit_code == 0 and read_record(third).request.options == {}


NUMBERS = ("steps", "guidance", "guidance_rescale", "width", "height", "text_length", "strength",
           "clip_skip", "feather", "true_guidance", "refine_from")  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_given_as_0_is_not_left_out(name: str) -> None:
    base = Request(**dict.fromkeys(NUMBERS, 2), options={"eta": 2.0})
    given = read_request({name: "0" if name == "guidance" else 0}, base)
    assert given == base.replace(**{name: 0})
    assert read_request({"eta": 0.0}, base).options == {"eta": 0.0}
    assert read_request(dict.fromkeys(NUMBERS), base) == base


def test_a_picture_from_before_these_options_is_still_read(untrained, tmp_path) -> None:
    import json

    from PIL import Image, PngImagePlugin

    path, old, again = tmp_path / "new.png", tmp_path / "old.png", tmp_path / "again.png"
    draw(untrained, path)
    with Image.open(path) as image:
        record = json.loads(image.info["lydite"])
        for name in ("guidance_steps", "guidance_rescale", "guidance_interval", "options"):
            del record[name]
        info = PngImagePlugin.PngInfo()
        info.add_itxt("lydite", json.dumps(record))
        image.save(old, pnginfo=info)
    assert run("--from", old, "-m", untrained, "-o", again).exit_code == 0
    assert same(path, again)


def _notes(typed: str = "", guidance: str = "above_1", sampler: str = "", **run: Any) -> list[str]:
    """What is noted of a run with such options."""
    request = Request("a", **run.pop("request", {}))
    schedule = SimpleNamespace(name=run.pop("schedule", "sd3_diffusers"))
    method = SimpleNamespace(name=sampler or "euler", note="odd", pair=run.pop("pair", False))
    plain = {"image": None, "mask": None, "is_guided": True, "steps": 30}
    planned = SimpleNamespace(
        request=request, guidance=guidance, sampler=method, schedule=schedule, **plain | run
    )
    return list(idle_options(cast(Run, planned), set(typed.split())))


SNOW = {"negative": "snow", "guidance": 0.5}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ""),
        ({"typed": "strength"}, "--strength does nothing without --image."),
        ({"typed": "strength", "image": 1}, ""),
        ({"typed": "feather"}, "--feather does nothing without --mask."),
        ({"typed": "feather", "mask": 1}, ""),
        ({"typed": "true_guidance"}, "--true-guidance does nothing with this model"),
        ({"typed": "true_guidance", "guidance": "distilled"}, ""),
        ({"is_guided": False, "request": SNOW}, "--negative does nothing with --guidance 0.5; "
                                                "above 1 it does."),
        ({"is_guided": False, "request": SNOW, "guidance": "above_0"}, "--negative does nothing "
                                                "with --guidance 0.5; above 0 it does."),
        ({"is_guided": False, "request": SNOW, "guidance": "distilled"},
         "--negative does nothing with --true-guidance 1; above 1 it does."),
        ({"is_guided": False, "guidance": "negative", "request": {"guidance": 1.5}},
         "--guidance 1.5 does nothing without --negative; --negative ' ' turns it on."),
        ({"is_guided": False, "guidance": "negative", "request": {"guidance": 1.0}}, ""),
        ({"is_guided": False, "typed": "guidance_rescale"},
         "--guidance-rescale does nothing with --guidance 0."),
        ({"is_guided": False, "typed": "guidance_interval", "guidance": "distilled"},
         "--guidance-interval does nothing without --negative."),
        ({"is_guided": False, "typed": "true_guidance", "guidance": "distilled",
          "request": {"true_guidance": 3.0, "negative": "snow"}},
         "--negative does nothing with --true-guidance 3; above 1 it does.; "
         "--true-guidance does nothing with --true-guidance 3."),
        ({"typed": "guidance_rescale guidance_interval"}, ""),
        ({"sampler": "uni_pc", "steps": 24}, "uni_pc: odd."),
        ({"sampler": "uni_pc_bh2", "steps": 24, "schedule": "flow_shift"}, "uni_pc_bh2: odd."),
        ({"sampler": "uni_pc", "steps": 25}, ""),
        ({"sampler": "uni_pc", "steps": 24, "schedule": "karras"}, ""),
        ({"steps": 2}, ""),
        ({"pair": True, "request": {"guidance": 1.5}}, "euler is made for a --guidance between 0 "
                                                       "and 1, as 0.6; 1.5 is very strong."),
        ({"pair": True, "request": {"guidance": 1.0}}, ""),
        ({"pair": True, "request": {"guidance": 1.5}, "guidance": "distilled"}, ""),
    ],
)  # fmt: skip
def test_an_option_that_does_nothing_is_said(given: dict[str, Any], expected: str) -> None:
    notes = "; ".join(_notes(**given))
    assert notes.startswith(expected) and bool(notes) == bool(expected)


@pytest.mark.parametrize(
    ("request_", "noted"),
    [
        ({"schedule": "karras", "steps": 20}, True),
        ({"schedule": "exponential", "steps": 28}, True),
        ({"schedule": "kl_optimal", "steps": 8}, True),
        ({"schedule": "laplace", "steps": 40}, True),
        ({"schedule": "karras", "steps": 60}, False),
        ({"schedule": "kl_optimal", "steps": 20}, False),
        ({"schedule": "beta_sigmas", "steps": 8}, False),
        ({"schedule": "simple", "steps": 2}, False),
        ({"steps": 2}, False),
        ({"steps": 16}, False),
    ],
)
def test_a_schedule_with_a_long_first_step_is_noted_for_flow_models(
    request_: dict[str, Any], noted: bool
) -> None:
    """As drawn: these are the ones that leave the embedded model's background grey."""
    pipeline = Pipeline.open("embedded")
    (note,) = [*long_start(pipeline.plan(Request("a", **request_)))] or [""]
    assert ("grey background" in note) == noted
    image = np.zeros((128, 128, 3), np.uint8)
    assert not [*long_start(pipeline.plan(Request("a", strength=0.5, **request_), image))]


def test_a_long_first_step_is_noted_for_no_other_models() -> None:
    for kind, notes in (("flow", 1), ("ve", 0)):
        prediction = SimpleNamespace(noise_model=SimpleNamespace(name=kind))
        schedule = SimpleNamespace(name="karras", sigmas=np.array([1.0, 0.5, 0.2, 0.0]))
        planned = SimpleNamespace(prediction=prediction, schedule=schedule, steps=3)
        assert len([*long_start(cast(Run, planned))]) == notes


def test_notes_are_printed(untrained, tmp_path) -> None:
    result = draw(untrained, tmp_path / "a.png", "--sampler", "uni_pc", "--strength", "0.5")
    assert result.exit_code == 0
    for note in ("--strength does nothing without --image.", "uni_pc: with fewer than about 25"):
        assert f"note: {note}" in result.stderr


def test_options_that_do_something_are_not_noted(untrained, tmp_path) -> None:
    picture = tmp_path / "a.png"
    assert "note" not in draw(untrained, picture, "-n", "snow", "--guidance-rescale", 0.5).stderr
    below = ("-n", "snow", "--sampler", "euler_cfg_pp", "--guidance", 0.6)
    assert "note" not in draw(untrained, tmp_path / "b.png", *below).stderr
    one = ("--sampler", "euler_cfg_pp", "--guidance", 1)
    assert "note" not in draw(untrained, tmp_path / "d.png", *one).stderr
    again = ("--from", picture, "-m", untrained, "--image", picture, "--strength", 0.5)
    assert "note" not in run(*again, "-o", tmp_path / "c.png").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--guidance", "strong"], "--guidance is 'strong'; expected a number, or one for each"),
        (["--guidance", "5,"], "--guidance is '5,'"),
        (["--guidance", "5,3"], "guidance table has 2 scales for 3 steps; give one for each"),
        (["--guidance-rescale", "2"], "guidance_rescale is 2.0; expected 0 to 1"),
        (["--guidance-interval", "0.5"], "--guidance-interval is '0.5'; expected two shares"),
        (["--guidance-interval", "0.8:0.2"], "guidance interval is 0.8 to 0.2"),
        (["--guidance-interval", "nan:1"], "guidance interval is nan to 1"),
        (["--eta", "0.5"], "sampler euler has no option 'eta'"),
        (["--sampler", "ddim", "--eta", "nan"], "option eta is nan; expected 0 to 10"),
        (["--sampler", "ddim", "--option", "eta"], "--option is 'eta'; expected NAME=N"),
        (["--sampler", "ddim", "--option", "etta=1"], "sampler ddim has no option 'etta'"),
    ],
)
def test_bad_numbers_are_one_clear_error(untrained, tmp_path, arguments, message) -> None:
    result = draw(untrained, tmp_path / "x.png", *arguments)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception) and "\n" not in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dtype", "widens", "rounding", "first", "said"),
    [
        ("float16", True, "", False, ["exceeds the range of float16"]),
        ("float16", False, "", False, []),
        ("bfloat16", True, "", False, []),
        ("float32", True, "inputs are rounded", False, ["inputs are rounded"]),
        ("float32", True, "", True, ["compiles kernels"]),
    ],
)
def test_what_to_know_of_the_model_before_the_work(
    dtype: str, widens: bool, rounding: str, first: bool, said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("idle_options", "long_start", "image_notes"):
        monkeypatch.setattr(generate, name, lambda *_: [])
    monkeypatch.setattr("lydite.core.device.compiles_kernels_first", lambda: first)
    component = SimpleNamespace(widens=widens, rounding_of_inputs=lambda: rounding)
    parts = {"vae": component, "transformer": component}
    pipeline: Any = SimpleNamespace(
        model=SimpleNamespace(dtype=dtype, components=parts),
        family=SimpleNamespace(network="transformer"),
        truncated=lambda run: [],
    )
    run: Any = None
    notes = list(generate._notes(pipeline, [run], {}, set(), None))
    assert all(text in note for note, text in zip(notes, said, strict=True))


def test_prompts_on_stdin_end_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lydite.calibrate.prompts.MAX_BYTES", 10)
    stdin = SimpleNamespace(buffer=io.BytesIO(b"one\ntwo\n\n\n"))
    monkeypatch.setattr("sys.stdin", stdin)
    assert generate._prompts_on_stdin() == ["one", "two"]
    stdin.buffer = io.BytesIO(b"one\ntwo\n\n\n\n")
    with pytest.raises(InputError, match="standard input: more than 10 bytes"):
        generate._prompts_on_stdin()
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="no prompt on standard input"):
        generate._prompts_on_stdin()
