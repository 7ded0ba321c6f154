"""Limits, counts and defaults in the source: none changes by accident.

Tests that import a number follow it wherever it goes. Those of `diff` are left out: they are tuned
on recorded bugs, and tests stand on both sides of each.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "lydite"
# Written by `python tests/test_numbers.py`; a difference is a change of behaviour.
KNOWN = Path(__file__).parent / "data" / "numbers.txt"


def is_number(node: ast.expr | None) -> bool:
    """Whether an expression is made of numbers alone, as 2**20, True or (1, 2)."""
    match node:
        case ast.Constant(value):
            return isinstance(value, bool | int | float)
        case ast.UnaryOp(operand=one):
            return is_number(one)
        case ast.BinOp(left=one, right=other):
            return is_number(one) and is_number(other)
        case ast.Tuple(elts):
            return bool(elts) and all(map(is_number, elts))
    return False


def numbers(nodes: list[ast.stmt], place: str = "") -> Iterator[tuple[str, ast.expr]]:
    """Names of constants, fields and parameters with their numbers, in order of the source."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None and is_number(node.value):
                yield f"{place}{', '.join(map(ast.unparse, targets))}", node.value
        elif isinstance(node, ast.ClassDef):
            yield from numbers(node.body, f"{place}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            given = node.args
            named = [*given.posonlyargs, *given.args]
            defaults = [
                *zip(named[len(named) - len(given.defaults) :], given.defaults, strict=True),
                *zip(given.kwonlyargs, given.kw_defaults, strict=True),
            ]
            for parameter, value in defaults:
                if value is not None and is_number(value):
                    yield f"{place}{node.name}({parameter.arg})", value
            yield from numbers([each for each in node.body if isinstance(each, ast.FunctionDef)],
                               f"{place}{node.name}.")  # fmt: skip


def table() -> str:
    files = sorted(SOURCE.rglob("*.py"))
    found = {path.relative_to(SOURCE).as_posix(): numbers(ast.parse(path.read_text()).body)
             for path in files if path.relative_to(SOURCE).parts[0] != "diff"}  # fmt: skip
    lines = {
        name: [f"  {what} = {ast.unparse(value)}" for what, value in each]
        for name, each in found.items()
    }
    return "".join("\n".join((name, *each, "")) for name, each in lines.items() if each)


def test_numbers_and_defaults_change_only_on_purpose() -> None:
    meant = "where the change is meant, run: python tests/test_numbers.py"
    assert table().splitlines() == KNOWN.read_text().splitlines(), meant


if __name__ == "__main__":
    KNOWN.write_text(table())
