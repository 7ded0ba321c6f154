"""Plans: which layer gets what, and one clear error for a file that fits no network."""

import json
from pathlib import Path
from typing import Any

import pytest

from lydite.core.errors import FileError, InputError, LyditeError
from lydite.quantize.plan import LayerPlan, Plan, read_plan, uniform_plan
from lydite.weights.quantized_format import bits_per_weight

SHAPES = {
    "transformer_blocks.0.attn.to_q.weight": (64, 64),
    "transformer_blocks.0.norm1.linear.weight": (384, 64),
    "transformer_blocks.0.ff.net.0.proj.weight": (256, 96),
    "transformer_blocks.0.attn.to_q.bias": (64,),
    "context_embedder.weight": (64, 64),
}
Q, NORM, FF = (path.removesuffix(".weight") for path in list(SHAPES)[:3])


def test_modulation_gets_more_bits_and_outer_layers_stay() -> None:
    plan = uniform_plan(SHAPES, 4, 32)
    assert {path: each.bits for path, each in plan.layers.items()} == {Q: 4, NORM: 8, FF: 4}
    assert uniform_plan(SHAPES, 4, 32, modulation_bits=4).layers[NORM].bits == 4
    assert uniform_plan(SHAPES, 8, 32, modulation_bits=4).layers[NORM].bits == 8  # the least
    assert FF not in uniform_plan(SHAPES, 4, 64).layers  # 96 inputs have no groups of 64
    with pytest.raises(InputError, match="groups of 128"):
        uniform_plan(SHAPES, 4, 128)


def test_bits_per_weight_count_scales_and_offsets() -> None:
    assert LayerPlan(4, 64).bits_per_weight((64, 64)) == 4.5
    assert LayerPlan(4, 0).bits_per_weight((64, 96)) == 5  # stored in groups of 32
    assert LayerPlan(4, 0).bits_per_weight((64, 256)) == 4.25  # of 128, the largest that there is
    plan = Plan({Q: LayerPlan(4, 64), NORM: LayerPlan(8, 32)})
    sizes = 64 * 64, 384 * 64
    assert plan.bits_per_weight(SHAPES) == (4.5 * sizes[0] + 9 * sizes[1]) / sum(sizes)


def test_a_plan_is_read_as_it_was_saved(tmp_path: Path) -> None:
    plan = Plan({Q: LayerPlan(3, 0), NORM: LayerPlan(8, 64)})
    path = tmp_path / "plan.json"
    path.write_bytes(plan.to_json())
    assert read_plan(path, SHAPES) == plan


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({Q: {"bits": 7}}, "bits 7, group 64"),
        ({Q: {"bits": 4, "group": 16}}, "bits 4, group 16"),
        ({Q: {"bits": 8, "group": 32, "mode": "mxfp4"}}, "mxfp4 with bits 8"),
        ({Q: {"bits": 4, "group": 0, "mode": "nvfp4"}}, "nvfp4 with bits 4, group 0"),
        ({}, "the plan has no layers"),
        ({Q: {"bits": 4, "scale": 1}}, "unknown field `scale`"),
        ({Q: {"bits": "4"}}, "Expected `int`"),
        ({Q: {"bits": 4, "mode": "int4"}}, "int4"),
        ({"attn.to_q": {"bits": 4}}, "attn.to_q: the network has no such layer"),
        ({FF: {"bits": 4, "group": 64}}, "96 inputs are no multiple of 64"),
        ([], "Expected `object`"),
    ],
)
def test_a_plan_that_does_not_fit_is_one_line(layers: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"layers": layers}))
    with pytest.raises(FileError) as caught:
        read_plan(path, SHAPES)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", '{"layers": {}, "version": 2}'])
def test_a_file_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(LyditeError, match=r"plan\.json") as caught:
        read_plan(path, SHAPES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "shape", "fits"),
    [
        ("transformer_blocks.0.attn.norm_q", (64,), False),
        ("transformer_blocks.0.conv", (64, 32, 3), False),
        ("down_blocks.0.resnets.0.conv1", (64, 32, 3, 3), True),
        ("conv_in", (64, 32, 3, 3), False),
        ("context_embedder", (64, 32), True),
    ],
)
def test_which_weights_a_plan_may_name(
    path: str, shape: tuple[int, ...], fits: bool, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(Plan({path: LayerPlan(4, 32)}).to_json())
    shapes = {**SHAPES, f"{path}.weight": shape}
    if fits:
        assert read_plan(file, shapes).layers.keys() == {path}
    else:
        with pytest.raises(FileError, match=f"{path}: the network has no such layer"):
            read_plan(file, shapes)


def test_a_branch_is_counted() -> None:
    plan = Plan({Q: LayerPlan(4, 64), FF: LayerPlan(8, 32)})
    shapes = {f"{Q}.weight": (64, 64), f"{FF}.weight": (64, 96)}
    plain, branch = (bits_per_weight(plan.formats(shapes, rank), shapes) for rank in (0, 4))
    assert plain == pytest.approx(plan.bits_per_weight(shapes))
    assert branch - plain == pytest.approx(16 * 4 * (64 + 64) / (64 * 64 + 64 * 96))


def test_convolutions_only_where_they_are_asked_for() -> None:
    kernel = "down_blocks.0.resnets.0.conv1"
    shapes = {**SHAPES, f"{kernel}.weight": (64, 32, 3, 3), "conv_in.weight": (64, 32, 3, 3)}
    assert kernel not in uniform_plan(shapes, 4, 32).layers
    plan = uniform_plan(shapes, 4, 32, convolutions=True)
    assert plan.layers.keys() == {Q, NORM, FF, kernel} and plan.layers[kernel] == LayerPlan(4, 32)


@pytest.mark.parametrize(
    ("mode", "expected"), [("mxfp4", (4, 32)), ("mxfp8", (8, 32)), ("nvfp4", (4, 16))]
)
def test_a_format_has_bits_and_groups_of_its_own(mode: Any, expected: tuple[int, int]) -> None:
    plan = uniform_plan(SHAPES, 3, 128, mode=mode)
    assert plan.layers[Q] == LayerPlan(*expected, mode) == plan.layers[FF]
    assert plan.layers[NORM] == LayerPlan(8, 64)  # the modulation stays affine
