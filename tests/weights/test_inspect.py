"""The tree of a checkpoint: every tensor once, sums that add up, numbers in their order."""

from hypothesis import given
from hypothesis import strategies as st

from lydite.core.tensorfile import TensorInfo
from lydite.weights.inspect import MAX_DEPTH, Branch, tree


def info(name: str, *shape: int, dtype: str = "F32") -> TensorInfo:
    size = 1
    for side in shape:
        size *= side
    return TensorInfo(name, dtype, shape, 0, 4 * size)


def leaves(branch: Branch) -> list[TensorInfo]:
    own = [branch.leaf] if branch.leaf else []
    return own + [leaf for child in branch.children.values() for leaf in leaves(child)]


NAMES = st.sets(st.text("ab.01", min_size=1, max_size=8), max_size=12)


@given(NAMES)
def test_every_tensor_is_a_leaf_and_every_branch_is_the_sum_of_its_own(names: set[str]) -> None:
    tensors = {name: info(name, 2, len(name)) for name in names}
    root = tree(tensors)
    assert sorted(leaf.name for leaf in leaves(root)) == sorted(names)

    def check(branch: Branch) -> None:
        inside = leaves(branch)
        assert branch.tensors == len(inside) == sum(branch.dtypes.values())
        assert branch.parameters == sum(leaf.size for leaf in inside)
        assert branch.nbytes == sum(leaf.nbytes for leaf in inside)
        for child in branch.children.values():
            check(child)

    check(root)


def test_numbers_are_counted_not_spelled() -> None:
    long = "1" * 18
    root = tree({name: info(name, 1) for name in (f"b.{long}", "b.10.w", "b.9.w", "b.x", "a")})
    assert list(root.children) == ["a", "b"]
    assert list(root.children["b"].children) == ["x", "9", "10", long]


def test_a_number_that_python_refuses_to_read_is_a_word() -> None:
    parts = ["1" * 5000, "2", "10"]
    root = tree({f"a.{part}": info(f"a.{part}", 1) for part in parts})
    assert set(root.children["a"].children) == set(parts)


def test_a_tensor_may_have_tensors_below_it() -> None:
    root = tree({"pos_embed": info("pos_embed", 3), "pos_embed.proj": info("pos_embed.proj", 4)})
    branch = root.children["pos_embed"]
    assert branch.leaf and branch.leaf.shape == (3,) and branch.parameters == 7


def test_dtypes_are_told_apart() -> None:
    root = tree({"a": info("a", 1, dtype="F16"), "b": info("b", 1), "c": info("c", 1)})
    assert root.dtypes == {"F16": 1, "F32": 2}


def test_a_name_of_dots_makes_no_endless_tree() -> None:
    name = "." * 10**6 + "9" * 5000
    branch, depth = tree({name: info(name, 1)}), 0
    while branch.children:
        (branch,) = branch.children.values()
        depth += 1
    assert depth == MAX_DEPTH == 32 and branch.leaf and branch.leaf.name == name
