"""LoRA files in every spelling, against diffusers' own names and against the definition."""

import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import WeightsError
from lydite.core.tensorfile import save
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import folder_component
from lydite.weights.load import add_changes, parameter_specs, parameters
from lydite.weights.lora import (
    Network,
    _index,  # pyright: ignore[reportPrivateUsage]
    changes,
    read_lora,
)
from lydite.weights.maps import text as text_map
from lydite.weights.maps import unet as unet_map
from lydite.weights.rules import stored_names
from support import tiny_sd, tiny_sd3
from support.distance import relative_l2

torch = pytest.importorskip("torch")
from support.unet_runs import inputs, run_port, run_reference  # noqa: E402

pytestmark = pytest.mark.parity

Tensors = dict[str, Any]
RANK = 3


class Model:
    """A U-Net and a text encoder of the reference, saved, and as a LoRA sees them."""

    def __init__(self, folder: Path, variant: str) -> None:
        torch.manual_seed(5)
        self.unet = tiny_sd.make_unet(variant)
        self.unet.save_pretrained(folder / "unet")
        self.text_encoder = tiny_sd3.make_clip(90, 16, 2, "gelu")
        self.text_encoder.save_pretrained(folder / "text_encoder")
        self.folder = folder
        down = [kind.startswith("Cross") for kind in self.unet.config.down_block_types]
        layers = self.unet.config.layers_per_block
        self.original = unet_map.original(layers, down, down[::-1])
        self.tables = {
            "unet": (unet_map.DIFFUSERS, self.original),
            "text_encoder": (text_map.CLIP,),
        }

    def reference(self, name: str) -> Any:
        return getattr(self, name)

    def load(self, name: str, dtype: mx.Dtype = mx.float32) -> Any:
        return folder_component(self.folder / name, KINDS).load(dtype)

    @cached_property
    def networks(self) -> list[Network]:
        return [
            Network(name, parameter_specs(self.load(name)), tables)
            for name, tables in self.tables.items()
        ]

    def modules(self, name: str) -> dict[str, Any]:
        """Every linear and convolution of the reference, by its path."""
        kinds = (torch.nn.Linear, torch.nn.Conv2d)
        found = self.reference(name).named_modules()
        return {path: module for path, module in found if isinstance(module, kinds)}


@pytest.fixture(scope="module", params=["sd1", "sdxl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def sd1(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("sd1"), "sd1")


def draw_pair(module: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Down and up of a random LoRA of one linear or convolution."""
    rng = np.random.default_rng(seed)
    shape = tuple(module.weight.shape)
    down = 0.1 * rng.standard_normal((RANK, *shape[1:]))
    up = 0.1 * rng.standard_normal((shape[0], RANK, *(1 for _ in shape[2:])))
    return down.astype(np.float32), up.astype(np.float32)


def definition(module: Any, down: Any, up: Any, scale: float) -> Any:
    """The weight's change, by running the pair on every basis vector of the input."""
    down, up = torch.as_tensor(down), torch.as_tensor(up)
    if down.ndim == 2:
        return scale * (up @ down)
    basis = torch.zeros(1, down.shape[1], 1, 1)
    change = torch.zeros(module.weight.shape)
    for channel in range(down.shape[1]):
        basis.zero_()[0, channel] = 1
        out = torch.nn.functional.conv2d(basis, down, padding=down.shape[-1] - 1)
        out = torch.nn.functional.conv2d(out, up)[0]
        change[:, channel] = out.flip(-1, -2)  # an impulse shows the kernel turned over
    return scale * change


def merged(model: Model, path: Path, name: str, weight: float = 1.0) -> Any:
    network = model.load(name)
    lora = read_lora(path, model.networks)
    add_changes(network, changes([(lora, weight)], name), where=path)
    return network


def assert_changed(model: Model, network: Any, name: str, expected: dict[str, Any]) -> None:
    """Every parameter is the reference's, with its change where there is one."""
    before, after = parameters(model.load(name)), parameters(network)
    for path, x in before.items():
        change = expected.get(path.removesuffix(".weight")) if path.endswith(".weight") else None
        if change is None:
            np.testing.assert_array_equal(after[path], x, err_msg=path)
            continue
        change = change.numpy()
        change = change.transpose(0, 2, 3, 1) if change.ndim == 4 else change
        assert relative_l2(np.array(after[path]) - np.array(x), change) < 2e-5, path


def kohya(model: Model, *, original: bool) -> tuple[Tensors, dict[str, Any]]:
    """A file in kohya's style, and by diffusers' path what each module's weight changes by."""
    tensors: Tensors = {}
    expected: dict[str, Any] = {}
    for seed, (path, module) in enumerate(model.modules("unet").items()):
        name = path
        if original:
            (stored,) = stored_names(f"{path}.weight", model.original)
            name = stored.removesuffix(".weight")
        down, up = draw_pair(module, seed)
        alpha = 1.0 + seed % 4
        stem = f"lora_unet_{name.replace('.', '_')}"
        tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
        tensors[f"{stem}.alpha"] = np.array(alpha, np.float32)
        expected[path] = definition(module, down, up, alpha / RANK)
    return tensors, expected


@pytest.mark.parametrize("original", [False, True], ids=["diffusers-names", "original-names"])
def test_kohya_files_change_every_weight_as_defined(
    model: Model, original: bool, tmp_path: Path
) -> None:
    tensors, expected = kohya(model, original=original)
    path = tmp_path / "lora.safetensors"
    save(path, tensors)
    assert_changed(model, merged(model, path, "unet"), "unet", expected)


def test_kohya_names_mean_what_the_reference_takes_them_for(model: Model) -> None:
    """kohya's trainer has SDXL under its original names, and SD 1.x under diffusers'."""
    from diffusers.loaders import lora_conversion_utils as conversion
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    original = bool(model.unet.config.addition_embed_type)
    tensors, _ = kohya(model, original=original)
    as_torch = {name: torch.from_numpy(np.array(x)) for name, x in tensors.items()}
    names = {id(x): name for name, x in as_torch.items()}
    state = dict(as_torch)
    if original:
        state = conversion._maybe_map_sgm_blocks_to_diffusers(state, model.unet.config)
    converted, _ = conversion._convert_non_diffusers_lora_to_diffusers(state)
    peft = convert_unet_state_dict_to_peft(
        {name.removeprefix("unet."): x for name, x in converted.items()}
    )
    reference = {
        names[id(x)].removesuffix(".lora_down.weight"): name.removesuffix(".lora_A.weight")
        for name, x in peft.items()
        if name.endswith(".lora_A.weight")
    }
    index = _index(model.networks)
    found = {name: index[name][1][0].target.removesuffix(".weight") for name in reference}
    assert len(reference) > 80
    assert found == reference


def test_diffusers_and_peft_files(sd1: Model, tmp_path: Path) -> None:
    tensors: Tensors = {}
    expected: dict[str, dict[str, Any]] = {"unet": {}, "text_encoder": {}}
    for name, found in expected.items():
        for seed, (module_path, module) in enumerate(sd1.modules(name).items()):
            pair = draw_pair(module, seed)
            for role, x in zip("AB", pair, strict=True):
                tensors[f"{name}.{module_path}.lora_{role}.weight"] = x
            found[module_path] = definition(module, *pair, 1.0)
    path = tmp_path / "lora.safetensors"
    save(path, tensors)
    for name, found in expected.items():
        assert_changed(sd1, merged(sd1, path, name), name, found)


def test_names_of_diffusers_before_it_used_peft(sd1: Model, tmp_path: Path) -> None:
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    tensors: Tensors = {}
    expected: dict[str, dict[str, Any]] = {"unet": {}, "text_encoder": {}}
    words = {"to_out.0": "to_out", "q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v"}
    words["out_proj"] = "to_out"
    for name, found in expected.items():
        for seed, (path, module) in enumerate(sd1.modules(name).items()):
            attention, dot, last = path.partition("attn1." if name == "unet" else "self_attn.")
            if not dot:
                continue
            middle = f"{dot}processor." if name == "unet" else dot
            stem = f"{name}.{attention}{middle}{words.get(last, last)}_lora"
            down, up = draw_pair(module, seed)
            tensors |= {f"{stem}.down.weight": down, f"{stem}.up.weight": up}
            found[path] = definition(module, down, up, 1.0)
    path = tmp_path / "lora.safetensors"
    save(path, tensors)
    for name, found in expected.items():
        assert len(found) >= 8
        assert_changed(sd1, merged(sd1, path, name), name, found)
    converted = convert_unet_state_dict_to_peft(
        {n.removeprefix("unet."): x for n, x in tensors.items() if n.startswith("unet.")}
    )
    modules = {n.split(".lora_")[0] for n in converted}
    assert modules == expected["unet"].keys()


def test_a_convolution_with_a_middle_part(sd1: Model, tmp_path: Path) -> None:
    path, name = tmp_path / "lora.safetensors", "mid_block.resnets.0.conv1"
    module = sd1.modules("unet")[name]
    rng = np.random.default_rng(0)
    out, width = module.weight.shape[:2]
    shapes = {"down": (RANK, width, 1, 1), "mid": (RANK, RANK, 3, 3), "up": (out, RANK, 1, 1)}
    parts = {role: rng.standard_normal(shape).astype(np.float32) for role, shape in shapes.items()}
    stem = f"lora_unet_{name.replace('.', '_')}.lora_"
    save(path, {f"{stem}{role}.weight": x for role, x in parts.items()})
    through = torch.nn.functional.conv2d(
        torch.as_tensor(parts["down"]).transpose(0, 1), torch.as_tensor(parts["mid"]), padding=2
    ).flip(-1, -2)
    expected = torch.einsum("or,irkl->oikl", torch.as_tensor(parts["up"])[..., 0, 0], through)
    assert_changed(sd1, merged(sd1, path, "unet"), "unet", {name: expected})


def test_two_loras_with_weights_and_the_network_that_results(sd1: Model, tmp_path: Path) -> None:
    """The merged network gives what the reference gives with the same weights added."""
    paths, reference = [], copy.deepcopy(sd1.unet)
    for number, weight in ((0, 0.7), (1, -0.4)):
        tensors: Tensors = {}
        for seed, (name, module) in enumerate(sd1.modules("unet").items()):
            if seed % 2 == number:
                down, up = draw_pair(module, seed)
                stem = f"unet.{name}.lora_"
                tensors |= {f"{stem}A.weight": down, f"{stem}B.weight": up}
                change = definition(module, down, up, weight)
                reference.get_submodule(name).weight.data += change
        paths.append(tmp_path / f"{number}.safetensors")
        save(paths[-1], tensors)
    loras = [read_lora(path, sd1.networks) for path in paths]
    network = sd1.load("unet")
    pairs = list(zip(loras, (0.7, -0.4), strict=True))
    add_changes(network, changes(pairs, "unet"), where="two LoRAs")
    tensors = inputs(reference)
    expected = run_reference(reference, tensors, 500.0)
    assert relative_l2(run_port(network, tensors, 500.0), expected) < 5e-6
    plain = run_reference(sd1.unet, tensors, 500.0)
    assert relative_l2(plain, expected) > 0.01  # they have an effect


def test_dtypes_stay_and_half_precision_is_rounded_once(sd1: Model, tmp_path: Path) -> None:
    tensors, _ = kohya(sd1, original=False)
    path = tmp_path / "lora.safetensors"
    save(path, {name: x.astype(np.float16) for name, x in tensors.items()})
    network = sd1.load("unet", mx.bfloat16)
    before = {name: np.array(x.astype(mx.float32)) for name, x in parameters(network).items()}
    lora = read_lora(path, sd1.networks)
    add_changes(network, changes([(lora, 1.0)], "unet"), where=path)
    assert all(x.dtype == mx.bfloat16 for x in parameters(network).values())
    for name, change in changes([(lora, 1.0)], "unet"):
        exact = mx.array(before[name] + change).astype(mx.bfloat16)
        assert mx.array_equal(parameters(network)[name], exact), name


GOOD = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"


def small_file(sd1: Model) -> Tensors:
    module = sd1.modules("unet")["mid_block.attentions.0.transformer_blocks.0.attn1.to_q"]
    down, up = draw_pair(module, 0)
    return {f"{GOOD}.lora_down.weight": down, f"{GOOD}.lora_up.weight": up}


METHODS = {
    "DoRA": (".dora_scale", ".lora_magnitude_vector"),
    "LoHa": (".hada_w1_a",),
    "LoKr": (".lokr_w1",),
    "OFT": (".oft_blocks",),
    "a full difference of weights": (".diff", ".diff_b"),
    "a LoRA with biases": (".lora_B.bias", ".lora_up.bias"),
}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lora_unet_mid_block_attentions_9_proj_in.lora_down.weight": (3, 4)}, "no place"),
        ({"stray": (3,)}, "1 of 3 tensors have no place.*stray"),
        *(
            ({f"{GOOD}{mark}": (3, 3)}, f"is of {method}, which is not supported")
            for method, marks in METHODS.items()
            for mark in marks
        ),
        ({f"{GOOD}.lora_down.weight": None}, "down and up are needed"),
        ({f"{GOOD}.lora_up.weight": None}, "down and up are needed"),
        ({f"{GOOD}.lora_up.weight": (32, 4)}, "not of one rank"),
        ({f"{GOOD}.lora_up.weight": (31, 3)}, "changes a weight of shape"),
        ({f"{GOOD}.lora_A.weight": (3, 32)}, "no place"),
        ({f"{GOOD}.alpha": (2,)}, "has 2 values"),
        ({f"{GOOD}.alpha": (0,)}, "has 0 values"),
        ({f"{GOOD}.lora_down.weight": ()}, "not of one rank"),
        ({f"{GOOD}.lora_down.weight": (3,)}, "not of one rank"),
        ({f"{GOOD}.lora_down.weight": (3, 32, 1)}, "not of one rank"),
        ({f"{GOOD}.lora_down.weight": (3, 32, 2, 2)}, "changes a weight of shape"),
        ({f"{GOOD}.lora_up.weight": (32, 3, 1)}, "not of one rank"),
        ({f"{GOOD}.lora_up.weight": (32, 3, 2, 1)}, "not of one rank"),
        ({f"{GOOD}.lora_mid.weight": (3, 3)}, "not of one rank"),
        ({f"{GOOD}.lora_mid.weight": (3, 4, 1, 1)}, "not of one rank"),
        (  # a middle part comes between two 1 × 1 convolutions
            {f"{GOOD}.lora_mid.weight": (3, 3, 1, 1), f"{GOOD}.lora_down.weight": (3, 32, 2, 2)},
            "not of one rank",
        ),
        (
            {f"{GOOD}.lora_down.weight": (0, 32), f"{GOOD}.lora_up.weight": (32, 0)},
            "not of one rank",
        ),
        (
            {f"{GOOD}.lora_down.weight": None, f"{GOOD}.lora_up.weight": None},
            "0 of 0 tensors have no place",
        ),
    ],
)
def test_what_has_no_place_is_refused_by_name(
    sd1: Model, extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tensors = small_file(sd1)
    for name, shape in extra.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.ones(shape, np.float32)
    path = tmp_path / "lora.safetensors"
    save(path, tensors)
    with pytest.raises(WeightsError, match=message):
        read_lora(path, sd1.networks)


@pytest.mark.parametrize(
    "settings",
    [
        '{"unet.lora_alpha": "x"}',
        '{"unet.lora_alpha": 1e999}',
        f'{{"unet.lora_alpha": 1{"0" * 400}}}',
        '{"unet.alpha_pattern": [1]}',
        '{"unet.alpha_pattern": {"(": 1}}',
        '{"unet.alpha_pattern": {"(a+)+b": 1}}',  # would take for ever on a long name
        "[" * 100_000,
    ],
)
def test_settings_of_peft_that_nobody_writes_are_refused(
    sd1: Model, settings: str, tmp_path: Path
) -> None:
    path = tmp_path / "lora.safetensors"
    save(path, small_file(sd1), {"lora_adapter_metadata": settings})
    with pytest.raises(WeightsError, match=r"lora_adapter_metadata|alpha_pattern"):
        read_lora(path, sd1.networks)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.complex64])
def test_only_floats_are_factors_and_alpha_may_be_an_integer(
    sd1: Model, tmp_path: Path, dtype: type
) -> None:
    path, tensors = tmp_path / "lora.safetensors", small_file(sd1)
    save(path, {**tensors, f"{GOOD}.alpha": np.array(6)})
    (layer,) = read_lora(path, sd1.networks).layers
    assert layer.scale == 6 / RANK
    for name in tensors:
        save(path, {**tensors, name: tensors[name].astype(dtype)})
        with pytest.raises(WeightsError, match=r"stored as \w+; expected a float type"):
            read_lora(path, sd1.networks)


def test_values_that_are_not_finite_are_refused(sd1: Model, tmp_path: Path) -> None:
    tensors = small_file(sd1)
    tensors[f"{GOOD}.lora_up.weight"][0, 0] = np.nan
    path = tmp_path / "lora.safetensors"
    save(path, tensors)
    with pytest.raises(WeightsError, match="NaN"):
        read_lora(path, sd1.networks)


def test_a_weight_beyond_the_range_is_one_error_without_a_warning(
    sd1: Model, tmp_path: Path
) -> None:
    path = tmp_path / "lora.safetensors"
    save(path, small_file(sd1))
    with pytest.raises(WeightsError, match="exceeds the range"):
        merged(sd1, path, "unet", weight=1e308)


def test_the_lora_of_another_model_is_refused(model: Model, sd1: Model, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save(path, kohya(model, original=True)[0])
    if model.unet.config.addition_embed_type:
        with pytest.raises(WeightsError, match="of this model"):
            read_lora(path, sd1.networks)
    else:
        assert read_lora(path, sd1.networks).networks == {"unet"}


def test_quantized_weights_are_not_merged_into(sd1: Model, tmp_path: Path) -> None:
    import mlx.nn as nn

    path = tmp_path / "lora.safetensors"
    save(path, small_file(sd1))
    network = sd1.load("unet")
    nn.quantize(
        network,
        group_size=32,
        class_predicate=lambda name, _: name.endswith("to_q") and "mid" in name,
    )
    lora = read_lora(path, sd1.networks)
    with pytest.raises(WeightsError, match="quantized"):
        add_changes(network, changes([(lora, 1.0)], "unet"), where=path)
