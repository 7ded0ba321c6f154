"""The modules of a comparison as a tree, with their errors."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lydite.diff.result import Row
from lydite.report.diff.row_text import number, ratio, times

MAX_LEVELS = 20  # browsers refuse deeply nested pages, and a name may have 500 dots


@dataclass(frozen=True)
class Tally:
    """How many values, how many of them wrong, and the worst of them."""

    state: str  # "right", "wrong", "first"
    wrong: int
    total: int
    worst: str


@dataclass(frozen=True)
class Line:
    """One row of a module's table."""

    index: int
    cells: tuple[str, ...]
    state: str  # "right", "wrong", "first"


@dataclass(frozen=True)
class Values:
    """A module's own rows; empty columns are left out."""

    head: tuple[str, ...]
    lines: tuple[Line, ...]
    port: str  # the module's name in the port, where it is another
    tally: "Tally"
    open: bool


@dataclass(frozen=True)
class Branch:
    """A module: its own values and the modules inside it."""

    label: str
    tally: Tally
    open: bool
    values: Values | None
    branches: "tuple[Branch, ...]"


def build_tree(rows: Sequence[Row], first: int | None) -> tuple[Branch, ...]:
    """The top of the tree, in order of execution; modules around row `first` are open."""
    root = _Node("")
    for index, row in enumerate(rows):
        node = root
        for part in segments(row.site):
            node = node.children.setdefault(part, _Node(part))
        node.rows.append(index)
    return tuple(_branch(node, rows, first) for node in root.children.values())


def segments(name: str) -> list[str]:
    """`net/blocks.2.attn` as `net`, `/blocks`, `.2`, `.attn`."""
    parts = [part for part in re.findall(r"[./]?[^./]*", name) if part]
    head, rest = parts[:MAX_LEVELS], "".join(parts[MAX_LEVELS:])
    return [*head, rest] if rest else head


@dataclass
class _Node:
    label: str
    rows: list[int] = field(default_factory=list)
    children: "dict[str, _Node]" = field(default_factory=dict)


def _branch(node: _Node, rows: Sequence[Row], first: int | None) -> Branch:
    label = node.label
    while not node.rows and len(node.children) == 1:  # merged with its only child
        (node,) = node.children.values()
        label += node.label
    branches = tuple(_branch(child, rows, first) for child in node.children.values())
    inside = _indices(node)
    return Branch(
        label=label.lstrip("./") or label,
        tally=_tally(inside, rows, first),
        open=first in inside,
        values=_values(node.rows, rows, first) if node.rows else None,
        branches=branches,
    )


def _indices(node: _Node) -> set[int]:
    indices = set(node.rows)
    for child in node.children.values():
        indices |= _indices(child)
    return indices


def _tally(indices: Collection[int], rows: Sequence[Row], first: int | None) -> Tally:
    known = [(value, at) for at in indices if (value := ratio(rows[at])) is not None]
    wrong = sum(rows[at].wrong for at in indices)
    return Tally(
        "first" if first in indices else "wrong" if wrong else "right",
        wrong,
        len(indices),
        times(rows[max(known)[1]]) if known else "",
    )


def _values(indices: Sequence[int], rows: Sequence[Row], first: int | None) -> Values:
    """The table of a module; `call` and `note` only where they are not empty."""
    own = [rows[index] for index in indices]
    columns = {
        "step": [str(row.step) for row in own],
        "call": [str(row.call) for row in own] if any(row.call for row in own) else [],
        "slot": [row.slot for row in own],
        "error": ["shape" if row.error is None and row.wrong else number(row.error) for row in own],
        "rounding": [number(row.floor) for row in own],
        "limit": [number(row.limit) for row in own],
        "error ÷ rounding": [times(row) if row.error is not None else "" for row in own],
        "shape": ["×".join(map(str, row.shape)) or "scalar" for row in own],
        "note": [row.note for row in own] if any(row.note for row in own) else [],
    }
    columns = {name: cells for name, cells in columns.items() if cells}
    lines = tuple(
        Line(index, cells, _tally([index], rows, first).state)
        for index, cells in zip(indices, zip(*columns.values(), strict=True), strict=True)
    )
    names = list(dict.fromkeys(row.port_site for row in own if row.port_site != row.site))
    return Values(
        tuple(columns), lines, ", ".join(names[:3]), _tally(indices, rows, first), first in indices
    )
