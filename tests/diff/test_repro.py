"""The script beside a reproduction: names come from a trace, perhaps of a stranger."""

import ast
from pathlib import Path

import numpy as np
import pytest

from lydite.diff.repro import Reproduction


@pytest.mark.parametrize("name", ['a"""\nimport os\n"""', "a\\", 'a"', "a\\N{BULLET}", "a" * 5000])
def test_no_name_adds_a_statement_to_the_script(tmp_path: Path, name: str) -> None:
    one = np.ones(2, np.float32)
    scripts: list[str] = []
    for number, each in enumerate(("plain", name)):
        Reproduction(each, each, one, one, 1e-7, {each: one}).write(tmp_path / str(number))
        tree = ast.parse((tmp_path / str(number) / "check.py").read_text())
        scripts.append(ast.dump(ast.Module(tree.body[1:], [])))
    assert scripts[0] == scripts[1]
