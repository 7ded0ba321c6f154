"""No command replaces a file that it reads, whatever it was asked to overwrite."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from lydite.cli.main import lydite
from lydite.core.errors import FileError
from lydite.trace.events import Header
from lydite.trace.writer import TraceWriter

INDEX = "model/model_index.json"
DRAW = "--steps 1 --size 32x32"
WITH_METRICS = "--inception net.pt --clip clip --lpips alex alex.pt heads.pt"
COMMANDS = [
    "audit model --digests model/vae/config.json",
    "audit model --against digests.json --digests digests.json",
    f"parity model --html {INDEX}",
    "parity model --image image.png --html image.png",
    "parity model --image image.png --mask mask.png --html mask.png",
    f"parity x.pt --components model --html {INDEX}",
    f"generate star -m model {DRAW} --image image.png -o image.png",
    f"generate --from drawn.png -m model {DRAW} -o drawn.png",
    "trace show ref x --save ref/x.npy",
    *(f"diff ref port --html {name}/trace.json" for name in ("ref", "port")),
    *(f"diff ref port --repro {name}" for name in ("ref", "port")),
    "diff ref port --floor floor --html floor/trace.json",
    "diff ref port --map map.json --html map.json",
    f"diff ref port --checkpoint model --html {INDEX}",
    f"sampler plot karras -m model --html {INDEX}",
    "sampler plot karras -m model -o model/plot.png",
    f"sampler conform -m model --write {INDEX}",
    "calibrate merge set --out set/merged",
    "calibrate verify set --sheet set/sheet.png",
    "calibrate export set --out npz --manifest set/set.json",
    "calibrate activations stats.png --plot stats.png",
    "evaluate models model --against embedded --html model/model_index.json",
    "evaluate models embedded --against model --html model/model_index.json",
    "evaluate models x.pt --components model --against embedded --html model/vae/config.json",
    "evaluate models embedded --against embedded --prompts prompts.txt --html prompts.txt",
    "evaluate images ref port --html ref/trace.json",
    "evaluate images ref port --html port/trace.json",
    "evaluate set set --html set/set.json",
    "evaluate set clip --against set --html set/set.json",
    *(
        f"evaluate {words} {WITH_METRICS} --html {name}"
        for words in ("models embedded --against embedded", "images ref port", "set set")
        for name in ("net.pt", "clip/config.json", "alex.pt", "heads.pt")
    ),
    f"quantize plan model --bpw 4.5 --set set --save {INDEX}",
    f"quantize plan x.pt --components model --bpw 4.5 --set set --save {INDEX}",
    "quantize plan embedded --bpw 4.5 --set set --save set/set.json",
    "quantize plan embedded --bpw 4.5 --set set --sensitivity map.json --save map.json",
    "quantize compare ref port --html port/trace.json",
    "quantize compare ref port --against set --html set/set.json",
]
OUTPUTS = {"digests", "html", "keep", "manifest", "out", "output", "plot", "repro", "save", "sheet",
           "write"}  # fmt: skip
# Inputs that no output of the command can replace, and why.
KEPT = {
    "generate": {
        "model",
        "components",
        "refiner",
        "loras",
        "embeddings",
        "prompts",  # no pictures
        "mask",
    },  # in pipelines/test_sd_families.py: not every model takes one
    "trace": {"model", "components", "image", "mask", "inject"},  # only a trace is replaced
    "audit": {"base"},  # --for writes nothing
    "sampler conform": {"problem", "answer"},  # not together with --write
    "calibrate activations": {"model", "components"},  # no pictures and no pages
}


@pytest.fixture(scope="module")
def folder(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an input of every kind."""
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copytree(untrained, "model")
        Path("prompts.txt").write_text("a star\n")
        for name in ("map.json", "net.pt", "alex.pt", "heads.pt", "x.pt", "stats.png"):
            Path(name).write_text("{}")
        Path("clip").mkdir()
        Path("clip/config.json").write_text("{}")
        for name in ("ref", "port", "floor"):
            with TraceWriter(Path(name), Header()) as writer:
                writer.add("x", np.zeros(1))
        for name in ("image.png", "mask.png"):
            Image.fromarray(np.zeros((32, 32), np.uint8)).save(name)
        for command in (
            "audit model --digests digests.json",
            "calibrate run --prompts prompts.txt --steps 1 --out set -q",
            f"generate star -m model {DRAW} --text-length 4 -o drawn.png -q",
        ):
            assert CliRunner().invoke(lydite, command.split()).exit_code == 0
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_input_is_not_replaced(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.startswith("parity"):
        pytest.importorskip("diffusers")
    monkeypatch.chdir(folder)
    before = contents(folder)
    overwrite = [] if "merge" in command else ["--overwrite"]
    result = CliRunner().invoke(lydite, [*command.split(), *overwrite])
    assert isinstance(result.exception, FileError), result.output
    assert re.search("belongs to the input|lies inside the calibration set", str(result.exception))
    assert contents(folder) == before


def commands(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that can overwrite a file, by its words."""
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        if isinstance(found, click.Group):
            yield from commands(found, (*words, name))
        elif found and any(parameter.name == "overwrite" for parameter in found.params):
            yield " ".join((*words, name)), found


def names_a_file(parameter: click.Parameter) -> bool:
    metavar = set((parameter.metavar or "").replace(":", "|").replace("[", "|").split("|"))
    kinds = {"FILE", "FOLDER", "HUB-ID", "MODEL", "PICTURE", "SET", "TRACE"}
    is_path = isinstance(parameter.type, click.Path) or parameter.name in ("model", "lpips")
    return is_path or bool(metavar & kinds)


@pytest.mark.parametrize(("words", "command"), [*commands(lydite)])
def test_every_input_of_a_command_is_tried(words: str, command: click.Command) -> None:
    inputs = {one.name for one in command.params if names_a_file(one)} - OUTPUTS
    tried: set[str | None] = set()
    for each in COMMANDS:
        if each.startswith(f"{words} "):
            given = each.removeprefix(f"{words} ").split()
            values = command.make_context(words, given, resilient_parsing=True).params
            written = {Path(str(values[name])) for name in OUTPUTS & set(values) if values[name]}
            for name in inputs:
                read = {Path(word) for word in flat(values.get(name))}
                if any(read & {path, *path.parents} for path in written):
                    tried.add(name)
    assert tried == inputs - KEPT.get(words, set())


def flat(value: Any) -> Iterator[str]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from flat(each)
    elif value is not None:
        yield str(value)
