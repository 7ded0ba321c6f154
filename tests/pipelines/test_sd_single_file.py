"""Original files of SD 1.x, 2.x, SDXL and its refiner, against diffusers' own converters."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError, WeightsError
from lydite.core.tensorfile import save
from lydite.pipelines.families import sd_single_file
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import Component, folder_component
from lydite.sampling.scheduler_config import read_scheduler_config
from lydite.weights.load import parameter_hash
from lydite.weights.maps import unet as unet_map
from lydite.weights.rules import resolve
from support import tiny_sd, tiny_sd3

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

Tensors = dict[str, Any]
FULL = pytest.mark.parametrize("name", tiny_sd.FULL_UNETS)


def meta_unet(name: str) -> Any:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel(**tiny_sd.FULL_UNETS[name])


def convert(tensors: Tensors, config: Any) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    named = {f"model.diffusion_model.{name}": x for name, x in tensors.items()}
    return convert_ldm_unet_checkpoint(named, dict(config))


@FULL
def test_the_table_is_the_references_for_every_tensor_of_the_real_model(name: str) -> None:
    model = meta_unet(name)
    tensors = model.state_dict()
    original = tiny_sd.original_unet(tensors, model.config)
    assert len(original) == len(tensors)
    source_of = {id(x): source for source, x in original.items()}
    converted = {target: source_of[id(x)] for target, x in convert(original, model.config).items()}
    assert converted.keys() == tensors.keys()
    down = [kind.startswith("Cross") for kind in model.config.down_block_types]
    rules = unet_map.original(2, down, down[::-1])
    resolution = resolve(original, rules)
    assert not resolution.surplus
    assert {t: recipe.sources for t, recipe in resolution.recipes.items()} == {
        target: (source,) for target, source in converted.items()
    }
    for recipe in resolution.recipes.values():  # and our model takes these shapes
        assert recipe.shape([tuple(original[recipe.sources[0]].shape)])


@FULL
def test_the_config_of_the_real_model_is_read_off_its_shapes(name: str) -> None:
    model = meta_unet(name)
    original = tiny_sd.original_unet(model.state_dict(), model.config)
    shapes = sd_single_file.Shapes({key: tuple(x.shape) for key, x in original.items()})
    class_name, raw, _ = sd_single_file._unet(shapes, {})  # pyright: ignore[reportPrivateUsage]
    assert class_name == "UNet2DConditionModel"
    for key, value in tiny_sd.FULL_UNETS[name].items():
        found = raw[key]
        assert (tuple(found) if isinstance(found, list) else found) == value, key
    assert raw["in_channels"] == model.config.in_channels


# Networks of one file: component -> prefix and how its tensors get their original names.
OPENCLIP = tiny_sd.original_openclip


def last_layer_twice(tensors: Tensors) -> Tensors:
    """OpenCLIP's names with one more layer than SD 2 uses, and its projection."""
    found = tiny_sd.original_openclip(tensors)
    extra = {
        n.replace("blocks.1.", "blocks.2."): x + 1 for n, x in found.items() if "blocks.1." in n
    }
    return {**found, **extra, "text_projection": np.ones((64, 64), np.float32)}


def old_names(tensors: Tensors) -> Tensors:
    return {name.removeprefix("text_model."): x for name, x in tensors.items()}


def new_names(tensors: Tensors) -> Tensors:
    return {f"text_model.{name}": x for name, x in old_names(tensors).items()}


FILES: dict[str, dict[str, tuple[str, Any]]] = {
    "sd1": {"text_encoder": ("cond_stage_model.transformer.", new_names)},
    "sd1-old": {"text_encoder": ("cond_stage_model.transformer.", old_names)},
    "sd2": {"text_encoder": ("cond_stage_model.model.", last_layer_twice)},
    "sdxl": {
        "text_encoder": ("conditioner.embedders.0.transformer.", new_names),
        "text_encoder_2": ("conditioner.embedders.1.model.", OPENCLIP),
    },
    "sdxl-refiner": {"text_encoder_2": ("conditioner.embedders.0.model.", OPENCLIP)},
    "inpainting": {"text_encoder": ("cond_stage_model.transformer.", new_names)},
}
EXTRA = {
    "alphas_cumprod": np.ones(4, np.float32),
    "model_ema.decay": np.ones((), np.float32),
    "model_ema.diffusion_modelinput_blocks00weight": np.ones(3, np.float32),
}
# What a file cannot show, or only by the sizes of the real model.
UNSEEN = {
    "unet": ("sample_size", "upcast_attention", "addition_time_embed_dim"),
    "text_encoder": ("eos_token_id", "projection_dim"),
    "text_encoder_2": ("eos_token_id",),
    "vae": (),
}


def small_unet(name: str) -> Any:
    """The real model's shape at a tenth of its width."""
    settings = dict(tiny_sd.FULL_UNETS[name.removesuffix("-old")])
    levels = len(settings["block_out_channels"])
    settings["block_out_channels"] = (64, 128, 128, 64)[:levels]
    if settings.get("use_linear_projection"):
        settings["attention_head_dim"] = (1, 2, 2, 1)[:levels]
    settings["layers_per_block"] = 1
    settings["norm_num_groups"] = 32
    if "addition_embed_type" in settings:
        settings["addition_time_embed_dim"] = 256
    if name == "sdxl":
        settings["transformer_layers_per_block"] = (1, 1, 2)
    if name == "sdxl-refiner":
        settings["transformer_layers_per_block"] = 2
    from diffusers import UNet2DConditionModel

    return tiny_sd3.randomize(UNet2DConditionModel(**settings))


def make_clip(projection: bool, activation: str) -> Any:
    model = tiny_sd3.make_clip(90, 64, 1, activation)
    if projection:
        return model
    from transformers import CLIPTextModel

    return tiny_sd3.randomize(CLIPTextModel(model.config))


class Made(NamedTuple):
    """A folder in diffusers' layout, and the same as one original file."""

    name: str
    folder: Path
    path: Path
    tensors: Tensors


@pytest.fixture(scope="module", params=FILES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(3)
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    unet = small_unet(name)
    scaling = 0.13025 if "xl" in name else 0.18215
    vae = tiny_sd3.make_vae(
        sizes=tiny_sd3.ORIGINAL, latent_channels=4, scaling_factor=scaling, shift_factor=None
    )
    unet.save_pretrained(folder / "unet")
    vae.save_pretrained(folder / "vae")
    parts = {
        "model.diffusion_model.": tiny_sd.original_unet(
            tiny_sd3.read_tensors(folder / "unet"), unet.config
        ),
        "first_stage_model.": tiny_sd3.original_vae(tiny_sd3.read_tensors(folder / "vae")),
    }
    for component, (prefix, rename) in FILES[name].items():
        quick = rename in (new_names, old_names)
        encoder = make_clip(component == "text_encoder_2", "quick_gelu" if quick else "gelu")
        encoder.save_pretrained(folder / component)
        parts[prefix] = rename(tiny_sd3.read_tensors(folder / component))
    tensors = {prefix + key: x for prefix, part in parts.items() for key, x in part.items()}
    path = folder / "model.safetensors"
    save(path, {**tensors, **EXTRA})
    return Made(name, folder, path, tensors)


def test_file_and_folder_fill_the_same_models(checkpoint: Made) -> None:
    _, folder, path, _ = checkpoint
    assert sd_single_file.SINGLE_FILE.audit_leftovers(path).clean
    found = sd_single_file.SINGLE_FILE.components(path)
    assert set(found) == {each.name for each in folder.iterdir() if each.is_dir()}
    for name, component in found.items():
        expected = folder_component(folder / name, KINDS)
        unseen = {key: getattr(expected.config, key) for key in UNSEEN[name]}
        assert replace(component.config, **unseen) == expected.config
        component.check()
        assert component.kind == expected.kind
        loaded = parameter_hash(component.load(mx.float32))
        assert loaded == parameter_hash(expected.load(mx.float32))


def test_the_references_converters_read_the_same_file(checkpoint: Made) -> None:
    from diffusers.loaders import single_file_utils as reference

    name, folder, _, tensors = checkpoint
    as_torch = lambda: {n: torch.from_numpy(x.copy()) for n, x in tensors.items()}  # noqa: E731
    converted = {
        "unet": reference.convert_ldm_unet_checkpoint(as_torch(), read_config(folder / "unet")),
        "vae": reference.convert_ldm_vae_checkpoint(as_torch(), read_config(folder / "vae")),
    }
    for component, (prefix, rename) in FILES[name].items():
        if rename in (new_names, old_names):
            converted[component] = reference.convert_ldm_clip_checkpoint(as_torch())
        else:
            model = torch.nn.Module()
            model.config = type("Config", (), {"hidden_size": 64})()
            converted[component] = reference.convert_open_clip_checkpoint(model, as_torch(), prefix)
    for component, found in converted.items():
        if component == "text_encoder" and name == "sd2":
            # The reference knows the real model's layer 23 by its name, ours is layer 2.
            found = {n: x for n, x in found.items() if ".2." not in n and "projection" not in n}
        expected = tiny_sd3.read_tensors(folder / component)
        found = {name.removeprefix("text_model."): x for name, x in found.items()}
        expected = {name.removeprefix("text_model."): x for name, x in expected.items()}
        assert found.keys() == expected.keys(), component
        for key, x in expected.items():
            np.testing.assert_array_equal(found[key].numpy(), x, err_msg=key)


def read_config(folder: Path) -> dict[str, Any]:
    import json

    return json.loads((folder / "config.json").read_text())


def test_the_scheduler_that_a_file_implies(checkpoint: Made) -> None:
    name, _, path, tensors = checkpoint
    found = sd_single_file.SINGLE_FILE.components(path)
    config = sd_single_file.scheduler_config(found)
    expected = {
        "sd2": ("DDIMScheduler", "v_prediction"),
        "sdxl": ("EulerDiscreteScheduler", "epsilon"),
        "sdxl-refiner": ("EulerDiscreteScheduler", "epsilon"),
    }
    assert (config["_class_name"], config["prediction_type"]) == expected.get(
        name, ("PNDMScheduler", "epsilon")
    )
    levels = read_scheduler_config(config, where="here").levels(0, 1).levels
    assert (round(min(levels), 4), round(max(levels), 4)) == (0.0292, 14.6146)  # of all three
    marks = {"v_pred": np.zeros(0, np.float32), "ztsnr": np.zeros(0, np.float32)}
    marked = path.with_name("marked.safetensors")
    save(marked, {**tensors, **marks})
    config = sd_single_file.scheduler_config(sd_single_file.SINGLE_FILE.components(marked))
    assert config["prediction_type"] == "v_prediction" and config["rescale_betas_zero_snr"]


def one_network(path: Path, tensors: Tensors) -> Component:
    save(path, tensors)
    (component,) = sd_single_file.SINGLE_FILE.components(path).values()
    return component


def test_a_unet_or_a_vae_alone_may_come_without_its_prefix(
    checkpoint: Made, tmp_path: Path
) -> None:
    _, folder, _, tensors = checkpoint
    for name, prefix in (("unet", "model.diffusion_model."), ("vae", "first_stage_model.")):
        part = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
        component = one_network(tmp_path / "bare.safetensors", part)
        assert component.name == name
        expected = folder_component(folder / name, KINDS).load(mx.float32)
        assert parameter_hash(component.load(mx.float32)) == parameter_hash(expected)


@pytest.mark.parametrize(
    "name",
    [
        "input_blocks.0.0.weight",
        "input_blocks.1.0.out_layers.3.bias",
        "input_blocks.2.0.op.weight",
        "middle_block.1.transformer_blocks.0.attn2.to_k.weight",
        "middle_block.1.proj_in.weight",
        "time_embed.0.weight",
        "output_blocks.1.0.skip_connection.weight",
        "out.2.weight",
    ],
)
def test_a_tensor_that_shows_the_geometry_is_named_for_its_own_fault(
    checkpoint: Made, name: str, tmp_path: Path
) -> None:
    tensors = checkpoint.tensors
    prefix = "model.diffusion_model."
    part = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
    x = part[name]
    rest = {n: array for n, array in part.items() if n != name}
    for damage in ({name: x.reshape(-1)[:-1]}, {f"{name}x": x}, {}):
        component = one_network(tmp_path / "x.safetensors", {**rest, **damage})
        with pytest.raises(WeightsError) as caught:
            component.load(mx.float32)
        assert f"({name}" in str(caught.value), str(caught.value)


def test_files_of_other_models_are_refused_as_such(tmp_path: Path) -> None:
    sd3 = {"model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": np.zeros(3)}
    assert not sd_single_file.SINGLE_FILE.matches(sd3)
    assert not sd_single_file.SINGLE_FILE.matches({"double_blocks.0.img_attn.qkv.weight": 0})
    model = small_unet("sd1")
    model.save_pretrained(tmp_path)
    tensors = tiny_sd.original_unet(tiny_sd3.read_tensors(tmp_path), model.config)
    with pytest.raises(ConfigError, match="class labels"):
        one_network(
            tmp_path / "x.safetensors",
            {**tensors, "label_emb.weight": np.zeros((9, 9), np.float32)},
        )


def test_two_text_encoders_in_one_place_are_refused(tmp_path: Path) -> None:
    weight = np.zeros((2, 2), np.float32)
    name = "text_model.encoder.layers.0.mlp.fc1.weight"
    prefixes = ("cond_stage_model.transformer.", "conditioner.embedders.0.transformer.")
    save(tmp_path / "x.safetensors", {prefix + name: weight for prefix in prefixes})
    with pytest.raises(ConfigError, match="two networks for text_encoder"):
        sd_single_file.SINGLE_FILE.components(tmp_path / "x.safetensors")
