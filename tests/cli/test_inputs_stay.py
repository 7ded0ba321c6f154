"""No command replaces a file that it reads, whatever it was asked to overwrite."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from lydite.cli.main import lydite
from lydite.core.errors import FileError

COMMANDS = [
    "audit model --digests model/vae/config.json",
    "audit model --against digests.json --digests digests.json",
    "parity model --steps 1 --size 32x32 --html model/model_index.json",
    "sampler plot karras -m model --html model/model_index.json",
    "calibrate merge set --out set/merged",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_input_is_not_replaced(
    command: str, untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.startswith("parity"):
        pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(untrained, "model")
    Path("prompts.txt").write_text("a star\n")
    for words in (
        ["audit", "model", "--digests", "digests.json"],
        ["calibrate", "run", "--prompts", "prompts.txt", "--steps", "1", "--out", "set", "-q"],
    ):
        if words[0] in command.split()[0]:
            assert CliRunner().invoke(lydite, words).exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    overwrite = [] if "merge" in command else ["--overwrite"]
    result = CliRunner().invoke(lydite, [*command.split(), *overwrite])
    assert isinstance(result.exception, FileError), result.output
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
