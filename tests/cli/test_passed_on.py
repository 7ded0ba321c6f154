"""Options reach what they are for: the model that is opened, and the request that is planned."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from lydite.cli import generate
from lydite.cli.main import lydite
from lydite.core.request import Request
from lydite.pipelines import picture
from lydite.pipelines.pipeline import Pipeline

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
    dtype = "float32" if verb.startswith(("trace", "parity")) else "auto"
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
