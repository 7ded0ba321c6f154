"""The script beside a reproduction: names come from a trace, perhaps of a stranger."""

import ast
from pathlib import Path

import numpy as np
import pytest

from lydite.core.errors import FileError
from lydite.diff.repro import Reproduction


@pytest.mark.parametrize("name", ["in.0.npy", "expected.npy", "port.npy", "check.py"])
def test_one_name_that_is_taken_keeps_all_from_being_written(tmp_path: Path, name: str) -> None:
    one = np.ones(2, np.float32)
    reproduction = Reproduction("a", "b", one, one, 1e-7, {"in.0": one})
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileError, match=name):
        reproduction.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(FileError, match=name):
        reproduction.write(tmp_path, overwrite=True, inputs=[tmp_path / name])
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    reproduction.write(tmp_path, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("name", ['a"""\nimport os\n"""', "a\\", 'a"', "a\\N{BULLET}", "a" * 5000])
def test_no_name_adds_a_statement_to_the_script(tmp_path: Path, name: str) -> None:
    one = np.ones(2, np.float32)
    scripts: list[str] = []
    for number, each in enumerate(("plain", name)):
        Reproduction(each, each, one, one, 1e-7, {each: one}).write(tmp_path / str(number))
        tree = ast.parse((tmp_path / str(number) / "check.py").read_text())
        scripts.append(ast.dump(ast.Module(tree.body[1:], [])))
    assert scripts[0] == scripts[1]
