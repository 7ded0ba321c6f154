"""Options reach what they are for: the model that is opened, and the request that is planned."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from lydite import embedded
from lydite.calibrate.activations.collect import Selection
from lydite.calibrate.blocks import BlockOptions
from lydite.calibrate.run import Model
from lydite.calibrate.settings import plan_of
from lydite.cli import generate
from lydite.cli.calibrate.draw_missing import WorkerOptions, _run_on_workers, draw_missing
from lydite.cli.main import lydite
from lydite.cli.request_options import read_request
from lydite.core.errors import FileError, InputError
from lydite.core.files import DiskError
from lydite.core.request import Request
from lydite.pipelines import picture
from lydite.pipelines.pipeline import Pipeline
from support.calibration import draw

# Of each verb the words before its options, and the options of its own that decide the model.
VERBS = {
    "generate a": ("low_memory", "bits", "tile", "loras", "refiner", "embeddings"),
    "trace a": (),
    "parity embedded a": (),
    "calibrate run --prompts p.txt --out set": (),
    "evaluate models other --against embedded --prompts p.txt --out run": (),
}
MODEL = {
    "components": ("--components c", "c"),
    "dtype": ("--dtype bfloat16", "bfloat16"),
    "low_memory": ("--low-memory", True),
    "bits": ("--bits 3", 3),
    "tile": ("--tile 96", 96),
    "loras": ("--lora l:0.5 --lora k", [("l", 0.5), ("k", 1.0)]),
    "refiner": ("--refiner r", "r"),
    "embeddings": ("--embedding e:word", [("e", "word")]),
}
REQUEST = {
    "negative": ("--negative snow", "snow"),
    "steps": ("--steps 7", 7),
    "guidance": ("--guidance 2.5", 2.5),
    "guidance_steps": ("--guidance 1,2.5", (1.0, 2.5)),
    "guidance_rescale": ("--guidance-rescale 0.5", 0.5),
    "guidance_interval": ("--guidance-interval 0.25:0.75", (0.25, 0.75)),
    "width": ("--width 64", 64),
    "height": ("--size 64x96", 96),
    "sampler": ("--sampler heun", "heun"),
    "options": ("--option s_noise=0.5 --option eta=1 --eta 0.25", {"s_noise": 0.5, "eta": 0.25}),
    "schedule": ("--schedule karras", "karras"),
    "convention": ("--convention a1111", "a1111"),
    "text_length": ("--text-length 9", 9),
    "noise": ("--noise mlx", "mlx"),
    "clip_skip": ("--clip-skip 2", 2),
    "true_guidance": ("--true-guidance 3", 3.0),
}
WITH_IMAGES = {"strength": ("--strength 0.5", 0.5), "feather": ("--feather 3", 3)}
GENERATE = {
    "weighting": ("--weighting compel", "compel"),
    "refine_from": ("--refine-from 0.5", 0.5),
}


class Planned(Exception):
    """Everything is read: the model is opened and the request is made."""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command until its request is planned: the model's options, request and pictures."""
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("a\n")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("image.png")

    def open_model(name: str, **options: Any) -> Any:
        def plan(request: Request, *pictures: Any) -> None:
            raise Planned({"name": name, **options}, request, pictures)

        return SimpleNamespace(plan=plan)

    monkeypatch.setattr(Pipeline, "open", open_model)
    monkeypatch.setattr("lydite.reference.jobs.check_installed", lambda: None)

    def run(words: str) -> Any:
        result = CliRunner().invoke(lydite, words.split())
        assert isinstance(result.exception, Planned), result.exception or result.output
        return result.exception.args

    return run


@pytest.mark.parametrize("verb", VERBS)
def test_options_decide_the_model_and_the_request(verb: str, planned: Any) -> None:
    model, request, _ = planned(verb)
    assert model["name"] == "embedded" and model.get("fetch", True)
    recorded = verb.startswith(("trace", "parity"))
    dtype, steps = ("float32", 4) if recorded else ("auto", None)  # few enough to keep
    prompt = "a" if verb.startswith(("generate", "trace", "parity")) else ""
    assert request == Request(prompt, steps=steps)
    plain = {"bits": None, "tile": None, "low_memory": False, "refiner": None, "components": None}
    assert {**plain, "dtype": dtype} | model == {**model, "dtype": dtype} | plain
    for name in ("components", "dtype", *VERBS[verb]):
        words, value = MODEL[name]
        if verb.startswith("evaluate"):  # the reference is opened first
            words = words.replace("--dtype", "--against-dtype")
        assert planned(f"{verb} {words}")[0] == model | {name: value}, name
    known = REQUEST
    if verb.startswith(("generate", "trace", "parity")):
        known = known | WITH_IMAGES
        words = f"{verb} -m org/model" if not verb.startswith("parity") else "parity org/model a"
        assert planned(f"{words} --revision r1")[0] == model | {"name": "org/model@r1"}
        image, mask = planned(f"{verb} --image image.png --mask image.png")[2]
        assert image.shape == (8, 8, 3) and mask.shape == (8, 8)
    if verb.startswith("generate"):
        known = known | GENERATE
    alone = {"guidance": {"guidance_steps"}, "guidance_steps": {"guidance"}, "height": {"width"}}
    for name, (words, value) in known.items():
        changed = planned(f"{verb} {words}")[1]
        assert getattr(changed, name) == value, name
        differ = {each for each in Request.__struct_fields__
                  if getattr(changed, each) != getattr(request, each)}  # fmt: skip
        assert differ - alone.get(name, set()) == {name}
    if verb.startswith("generate"):
        assert {*known, "prompt"} == set(Request.__struct_fields__)  # each one can be typed


def test_a_picture_decides_what_is_not_typed(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("c", "r", "m", "l", "e"):
        Path(name).touch()
    known: dict[str, Any] = {
        "model": "m", "dtype": "bfloat16", "components": "c", "refiner": "r", "bits": 3,
        "tile": 96, "loras": (("l", 0.5),), "embeddings": (("e", "word"),),
    }  # fmt: skip
    values = {name: value for name, (_, value) in (REQUEST | WITH_IMAGES | GENERATE).items()}
    record = picture.Record(
        request=Request("old", **values), seed=7, model_hash="0" * 64, **known, image="image.png",
        mask="image.png",
    )  # fmt: skip
    monkeypatch.setattr(picture, "read_record", lambda path: record)
    monkeypatch.setattr("lydite.pipelines.model_files.locate", lambda name, fetch=True: Path(name))
    model, request, (image, mask) = planned("generate --from x.png")
    assert request == record.request and image is not None and mask is not None
    lists = {name: list(known.pop(name)) for name in ("loras", "embeddings")}
    known = {"name": known.pop("model"), **known, **lists}
    assert model == {**known, "low_memory": False, "fetch": False}
    for words, name, value in (
        ("--model l", "name", "l"), ("--components l", "components", "l"), ("--bits 4", "bits", 4),
        ("--dtype float32", "dtype", "float32"), ("--tile 64", "tile", 64),
        ("--refiner l", "refiner", "l"), ("--lora c", "loras", [("c", 1.0)]),
        ("--embedding c", "embeddings", [("c", None)]),
    ):  # fmt: skip
        assert planned(f"generate --from x.png {words}")[0] == model | {name: value}
    seeds = generate._read_seeds({"seeds": (), "batch": 2}, record)
    assert seeds == (7, 8) and generate._read_seeds({"seeds": ("3",), "batch": 1}, record) == (3,)


def test_a_seed_that_nobody_named_is_random() -> None:
    drawn = {generate._read_seeds({"seeds": (), "batch": 1}, None)[0] for _ in range(20)}
    assert len(drawn) == 20 and max(drawn) > 2**24 and max(drawn) < 2**32


class Reached(Exception):
    """The call that the options are for."""


@pytest.fixture
def reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command until a function is called: its arguments, as positions and by name."""
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("one\ntwo\n")
    Path("given").mkdir()
    draw(Path("set"), 1)  # settings of another tool: nothing is drawn from it
    request = (Request(), "float16")
    monkeypatch.setattr("lydite.calibrate.request_record.request_of", lambda _: request)

    def run(words: str, target: str, call: int = 1) -> Any:
        calls: list[Any] = []

        def stop(*positions: Any, **named: Any) -> None:
            calls.append((positions, named))
            if len(calls) == call:
                raise Reached

        with monkeypatch.context() as patch:
            patch.setattr(target, stop)
            result = CliRunner().invoke(lydite, words.split())
        assert isinstance(result.exception, Reached), result.exception or result.output
        return calls[-1]

    return run


def test_what_a_set_is_to_hold(reached: Any) -> None:
    target, words = "lydite.cli.calibrate.run._check_settings", "calibrate run --prompts p.txt"
    (out, conditions, dtype, plan), _ = reached(f"{words} --out new", target)
    assert (out, conditions["steps"], dtype) == (Path("new"), 16, "F32")
    assert plan == plan_of([("one", 0), ("two", 1)], range(16))
    more = "--images 3 --seed 5 --keep-steps 0,2 --store-dtype bfloat16 --conditioning --steps 4"
    (_, conditions, dtype, plan), _ = reached(f"{words} --out new {more}", target)
    assert (conditions["steps"], dtype) == (4, "BF16")
    assert plan == plan_of([("one", 5), ("two", 6), ("one", 7)], [0, 2], conditioning=True)


def test_what_is_taken_of_a_set(reached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in ("blocks", "activations"):
        monkeypatch.setattr(f"lydite.cli.calibrate.{verb}.open_model", lambda *given: given[1:])
    target, words = "lydite.calibrate.blocks.store_blocks", "calibrate blocks set --out new"
    (_, model, out, *rest), named = reached(words, target)
    assert (model, out, named["options"]) == ((None, None), Path("new"), [])
    assert rest == [BlockOptions(0, "F16", "*"), 2 * 10**9]
    more = "--tokens 5 --modules *.ff --store-dtype float32 --budget 3kB -m m --components c"
    (_, model, _, *rest), named = reached(f"{words} {more}", target)
    assert rest == [BlockOptions(5, "F32", "*.ff"), 3000] and model == ("m", "c")
    assert named["options"] == ["--model", "m", "--components", "c"]

    target = "lydite.calibrate.activations.collect.collect"
    words = "calibrate activations set --out new.sqlite"
    (_, _, out, selection), _ = reached(words, target)
    assert (out, selection) == (Path("new.sqlite"), Selection("step", 0, (1, 1)))
    more = "--group-steps 4 --group 8 --part 2/3 -m m"
    (_, model, _, selection), named = reached(f"{words} {more}", target)
    assert selection == Selection("4", 8, (2, 3)) and model == ("m", None)
    assert named["options"] == ["--model", "m"]


def test_how_sensitivities_are_measured(reached: Any) -> None:
    target = "lydite.quantize.sensitivity.measure_sensitivity"
    words = "quantize plan embedded --set set"
    (pipeline, _), named = reached(words, target)
    kept = ("group", "images", "file")
    assert [named[name] for name in kept] == [64, 4, None] and pipeline.model.dtype == "float16"
    _, named = reached(f"{words} --group channel --images 7 --sensitivity s.json", target)
    assert [named[name] for name in kept] == [0, 7, Path("s.json")]


def test_both_sides_of_an_evaluation(reached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr("lydite.cli.evaluate.models._check_side", lambda *a: checked.append(a))
    words = "evaluate models given --against embedded --prompts p.txt --images 3 --seed 4 --out run"
    words += " --bits 3 --dtype bfloat16 --against-dtype float16 --keep-steps every:4 --steps 8"
    words += f" --components {embedded.MODEL} --workers 2"
    target = "lydite.cli.evaluate.models.draw_side"
    wanted = plan_of([("one", 4), ("two", 5), ("one", 6)], [0, 4])
    given, parts = str(Path("given").absolute()), str(embedded.MODEL)
    for call, folder, model, dtype in (
        (1, "reference", Model("embedded", parts), "float16"),
        (2, "candidate", Model(given, parts, bits=3), "bfloat16"),
    ):
        (*found, request, plan, settings, resume), _ = reached(words, target, call)
        assert found == [Path("run", folder), model, dtype] and plan == wanted
        assert (*found, request, plan) in checked
        assert request.steps == 8 and settings == WorkerOptions(2, None, quiet=False)
        assert sorted(resume.split()[2:]) == sorted(words.split()[2:])


@pytest.mark.parametrize(
    ("text", "sides"),
    [("64", (64, 64)), ("64x96", (64, 96)), ("64X96", (64, 96)), ("64×96", (64, 96)),
     ("1", (1, 1)), ("999999x1", (999_999, 1)),
     *((wrong, None) for wrong in ("0", "0x64", "64x0", "1000000", "64x1000000", "64x", "x64", "-1",
                                   "", "64x64x64", "6.4"))],
)  # fmt: skip
def test_sizes_of_a_picture(text: str, sides: tuple[int, int] | None) -> None:
    if sides is None:
        with pytest.raises(InputError, match="--size is"):
            read_request({"size": text})
    else:
        request = read_request({"size": text})
        assert (request.width, request.height) == sides


def test_only_a_model_that_is_typed_may_be_downloaded(reached: Any) -> None:
    target = "lydite.calibrate.model_session.open_pipeline"
    (model, dtype), _ = reached("calibrate run --out set", target)
    assert (model, dtype) == (Model("embedded", None, fetch=False), "float16")
    (model, _), _ = reached("calibrate run --out set -m owner/name --components given", target)
    assert model == Model("owner/name", str(Path("given").absolute()), fetch=True)


@pytest.mark.parametrize(
    ("options", "target"),
    [((1, None), "run.run_here"), ((2, None), "workers.run_workers"),
     ((1, "auto"), "ray_cluster.run_ray")],
)  # fmt: skip
def test_who_draws(
    options: tuple[int, str | None], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"lydite.calibrate.{target}", (draw := Mock()))
    monkeypatch.setattr("lydite.calibrate.model_session.ModelSession", Mock(return_value="session"))
    writer, pipeline, callbacks = Mock(), Mock(), cast(Any, "callbacks")
    model = Model("m")
    _run_on_workers(writer, pipeline, model, WorkerOptions(*options, quiet=True), callbacks)
    alone = target == "run.run_here"
    given = ("session",) if alone else (model, options[1] or options[0])
    draw.assert_called_once_with(writer, *given, callbacks)
    assert pipeline.model.unload.called is not alone  # workers have their own


def test_too_little_space_is_told_with_the_command_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = DiskError(tmp_path, OSError(28, "No space left on device"))
    monkeypatch.setattr("lydite.calibrate.model_session.item_sizes", Mock())
    monkeypatch.setattr("lydite.calibrate.request_record.request_of", lambda _: (None, ""))
    monkeypatch.setattr("lydite.calibrate.run.require_space_for", Mock(side_effect=full))
    with pytest.raises(FileError, match=r"No space left.*resume with: lydite again$"):
        draw_missing(
            tmp_path / "set", Mock(), Mock(), Mock(), Model("m"), WorkerOptions(1, None, True),
            command="lydite again",
        )  # fmt: skip
    assert not (tmp_path / "set").exists()
