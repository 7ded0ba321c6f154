"""What is in a checkpoint, as a tree, without reading tensor data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lydite.core.tensorfile import TensorInfo

MAX_DEPTH = 32  # of the tree: the rest of a name with more dots than that stays in one piece


@dataclass
class Branch:
    """One dotted prefix: how many tensors, parameters and bytes are under it."""

    name: str
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict[str, int])  # dtype -> tensors
    children: "dict[str, Branch]" = field(default_factory=dict[str, "Branch"])
    leaf: TensorInfo | None = None


def tree(tensors: Mapping[str, TensorInfo]) -> Branch:
    """The names of a checkpoint as a tree of dotted parts, numbers in numeric order."""
    root = Branch("")
    for name in sorted(tensors, key=_natural):
        info = tensors[name]
        branch = root
        _count(branch, info)
        for part in name.split(".", MAX_DEPTH - 1):
            branch = branch.children.setdefault(part, Branch(part))
            _count(branch, info)
        branch.leaf = info
    return root


def _count(branch: Branch, info: TensorInfo) -> None:
    branch.tensors += 1
    branch.parameters += info.size
    branch.nbytes += info.nbytes
    branch.dtypes[info.dtype] = branch.dtypes.get(info.dtype, 0) + 1


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [
        (part.isdecimal(), int(part) if part.isdecimal() and len(part) < 19 else 0, part)
        for part in name.split(".", MAX_DEPTH - 1)
    ]
