"""Sizes read off the shapes of tensors: the majority decides, and one damaged tensor does not."""

from typing import Any, NoReturn

from lydite.core.tensorfile import TensorInfo
from lydite.pipelines.inferred_models import InferredModel, InferredNetwork, Shapes, _unpacked
from lydite.weights.quantized_format import GROUP

AXES = {"blocks.{i}.q.weight": "width width", "blocks.{i}.up.weight": "hidden width", "in": "width"}


def shapes(**changed: tuple[int, ...]) -> Shapes:
    """Three blocks of width 8 and 32."""
    tensors: dict[str, tuple[int, ...]] = {"in": (8,)}
    for block in range(3):
        tensors |= {f"blocks.{block}.q.weight": (8, 8), f"blocks.{block}.up.weight": (32, 8)}
    return Shapes(tensors | {name.replace("_", "."): shape for name, shape in changed.items()})


def test_one_damaged_tensor_changes_no_size() -> None:
    assert shapes().sizes(AXES) == {"width": 8, "hidden": 32}
    for damaged in ((9, 8), (8, 9), (9, 9), (8,), (8, 8, 8), (0, 8)):
        assert shapes(blocks_1_q_weight=damaged).sizes(AXES) == {"width": 8, "hidden": 32}
        assert shapes(blocks_1_up_weight=damaged).sizes(AXES) == {"width": 8, "hidden": 32}


def test_a_tensor_speaks_where_its_other_axes_are_what_most_have() -> None:
    alone = Shapes({"a": (8, 5), "b": (9, 7), "w": (8,), "v": (8,)})
    axes = {"a": "width out", "b": "width out", "w": "width", "v": "width"}
    assert alone.sizes(axes) == {"width": 8, "out": 5}  # b has another width


def test_blocks_are_counted_without_those_that_few_tensors_have() -> None:
    patterns = ("blocks.{i}.q.weight", "blocks.{i}.up.weight")
    assert shapes().count(*patterns) == 3
    assert dict(shapes().numbers(*patterns)) == {0: 2, 1: 2, 2: 2}
    assert shapes(blocks_3_q_weight=(8, 8)).count(*patterns) == 4  # half of the others' tensors
    many = Shapes({f"blocks.{n}.{part}": (1,) for n in range(3) for part in "abc"})
    odd = Shapes({**many.tensors, "blocks.7.a": (1,)})
    assert odd.count("blocks.{i}.{part}") == 3  # a third of them
    assert Shapes({"blocks.1000.a": (1,)}).numbers("blocks.{i}.a") == {}  # no model has so many
    assert Shapes({"blocks.999.a": (1,)}).count("blocks.{i}.a") == 1000
    assert Shapes({}).count("blocks.{i}.a") == 1


def test_most_means_half_or_more() -> None:
    for whole, found in ((5, True), (6, True), (7, False)):
        assert shapes().most("blocks.{i}.q.weight", whole) is found


def info(dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo("x", dtype, shape, 0, 0)


def test_quantized_weights_count_as_wide_as_they_were() -> None:
    tensors = {
        "a.weight": info("U32", 6, 16), "a.scales": info("F32", 6, 2),
        "b.weight": info("F32", 6, 16), "b.scales": info("F32", 6, 2),
        "c.weight": info("U32", 6, 16), "d.weights": info("U32", 6, 16),
        "e.weight": info("U32", 6, 16), "e.scales": info("F32", 12),
    }  # fmt: skip
    found = _unpacked(tensors)
    assert found.pop("a.weight") == (6, 2 * GROUP)
    assert found == {name: each.shape for name, each in tensors.items() if name != "a.weight"}


def layout(**options: object) -> InferredModel:
    def never(*_: object) -> NoReturn:
        raise AssertionError

    networks = (
        InferredNetwork("transformer", "model.", "blocks.", never),
        InferredNetwork("vae", "vae.", "decoder.", never),
    )
    usual = {"title": "T", "networks": networks, "kinds": {}, "main": "transformer"}
    found: dict[str, Any] = usual | {"alone": ("transformer",)} | options
    return InferredModel(**found)


def test_a_file_is_of_a_layout_by_its_main_network() -> None:
    assert layout().matches(["model.blocks.0", "vae.decoder.x"])
    assert layout().matches(["blocks.0", "blocks.1"])  # without its prefix
    assert layout().matches(["vae.decoder.x"])  # no main network at all
    assert not layout().matches(["model.other.0", "vae.decoder.x"])  # another family's
    assert not layout().matches(["vae.other.x"]) and not layout().matches([])
    assert not layout(alone=()).matches(["blocks.0"])
    names = ["model.blocks.0", "model.blocks.1", "blocks.0"]  # one of them is left over
    assert [each.prefix for each in layout()._networks(names)] == ["model."]
