"""Published configs are read and make models of the published size; hostile ones make one error."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError, FileError, LyditeError, WeightsError
from lydite.core.tensorfile import save
from lydite.pipelines.families import sd3, sdxl
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import Component, folder_component
from lydite.pipelines.model_files import INDEX, open_model
from lydite.weights.load import parameter_specs
from support.published_configs import (
    CLIP_G,
    CLIP_L,
    SD3_MEDIUM,
    SD35_LARGE,
    SD35_MEDIUM,
    SDXL_CLIP,
    T5_XXL,
    VAE,
)

# Parameters as the reference counts them, the transformers' positional tables with them.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "sd3-medium": (SD3_MEDIUM, 2_084_951_104),
    "sd3.5-large": (SD35_LARGE, 8_146_280_768),
    "sd3.5-medium": (SD35_MEDIUM, 2_469_663_936),
    "sd3 vae": (VAE, 83_819_683),
    "clip-l": (CLIP_L, 123_650_304),
    "clip-g": (CLIP_G, 694_659_840),
    "t5-xxl": (T5_XXL, 4_762_310_656),
    "clip-l without projection": (SDXL_CLIP, 123_060_480),
}


def class_of(config: dict[str, Any]) -> str:
    return config.get("_class_name") or config["architectures"][0]


def component(folder: Path, config: dict[str, Any]) -> Component:
    (folder / "config.json").write_text(json.dumps(config))
    return folder_component(folder, KINDS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_make_models_of_the_published_size(name: str, tmp_path: Path) -> None:
    config, size = PUBLISHED[name]
    specs = component(tmp_path, config).expected
    assert sum(math.prod(shape) for shape in specs.values()) == size


@pytest.mark.parity
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_reference_counts_as_many(name: str) -> None:
    torch = pytest.importorskip("torch")
    diffusers, transformers = (pytest.importorskip(each) for each in ("diffusers", "transformers"))
    config, size = PUBLISHED[name]
    class_name = class_of(config)
    with torch.device("meta"):
        if "architectures" in config:
            cls = getattr(transformers, class_name)
            model = cls(cls.config_class(**config))
        else:  # the table of a real one is gigabytes, even on the meta device
            less = {**config, "pos_embed_max_size": 1}
            model = getattr(diffusers, class_name).from_config(less)
    table = config.get("caption_projection_dim", 0) * config.get("pos_embed_max_size", 0) ** 2
    assert sum(parameter.numel() for parameter in model.parameters()) + table == size


def test_the_largest_is_sized_up_without_being_allocated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SD35_LARGE))
    code = f"""if True:
        import resource
        from pathlib import Path
        from lydite.pipelines.families.network_classes import KINDS
        from lydite.pipelines.model import folder_component
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert len(folder_component(Path({str(tmp_path)!r}), KINDS).expected) > 1000
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kilobytes = int(done.stdout) // (1024 if sys.platform == "darwin" else 1)
    assert kilobytes < 200_000  # 8 billion parameters would be 32 GB


HOSTILE = [
    (SD3_MEDIUM, "num_layers", 10**9),
    (SD3_MEDIUM, "num_layers", 10**100),
    (SD3_MEDIUM, "num_attention_heads", -24),
    (SD3_MEDIUM, "patch_size", 0),
    (SD3_MEDIUM, "joint_attention_dim", "4096"),
    (SD3_MEDIUM, "pooled_projection_dim", None),
    (SD3_MEDIUM, "in_channels", {"a": {"b": {"c": []}}}),
    (SD3_MEDIUM, "dual_attention_layers", list(range(10**5))),
    (SD3_MEDIUM, "caption_projection_dim", 1537),
    (SD3_MEDIUM, "out_channels", 1.5),
    (SD3_MEDIUM, "qk_norm", "layer_norm"),
    (SD3_MEDIUM, "pos_embed_type", "rope"),
    (VAE, "block_out_channels", [128] * 10**5),
    (VAE, "block_out_channels", [128, 256, 512]),
    (VAE, "block_out_channels", [100, 256, 512, 512]),
    (VAE, "block_out_channels", []),
    (VAE, "down_block_types", ["AttnDownEncoderBlock2D"] * 4),
    (VAE, "act_fn", "relu"),
    (VAE, "latents_mean", [0.1] * 16),
    (CLIP_L, "num_attention_heads", 7),
    (CLIP_L, "hidden_act", "swish"),
    (CLIP_L, "layer_norm_eps", 0),
    (CLIP_L, "vocab_size", 2**40),
    (CLIP_L, "is_decoder", True),
    (T5_XXL, "feed_forward_proj", "gated-silu"),
    (T5_XXL, "is_gated_act", False),
    (T5_XXL, "relative_attention_num_buckets", 3),
    (T5_XXL, "d_ff", [10240]),
]


@pytest.mark.parametrize(
    ("config", "key", "value"),
    HOSTILE,
    ids=[f"{key}={str(value)[:20]}" for _, key, value in HOSTILE],
)
def test_a_config_we_cannot_run_is_refused_with_its_key(
    config: dict[str, Any], key: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        component(tmp_path, {**config, key: value})
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "config.json")) and key in message
    assert message.isprintable() and len(message) < 500


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_key_left_out_or_added_is_named(name: str, tmp_path: Path) -> None:
    config = PUBLISHED[name][0]
    with pytest.raises(ConfigError, match="not understood \\['new_arithmetic'\\]"):
        component(tmp_path, {**config, "new_arithmetic": True})
    for field in fields(KINDS[class_of(config)].config):
        if field.default is MISSING:
            less = {key: value for key, value in config.items() if key != field.name}
            with pytest.raises(ConfigError, match=f"missing \\['{field.name}'\\]"):
                component(tmp_path, less)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"_class_name": "HunyuanDiT2DModel"},
        {"_class_name": ["SD3Transformer2DModel", "AutoencoderKL"]},
        {"_class_name": {"a": 1}},
        {"architectures": 5},
        {"architectures": []},
        {"architectures": "CLIP"},
        {"architectures": ["CLIPTextModel", "T5EncoderModel"]},
        {"architectures": [["CLIPTextModel"]]},
    ],
    ids=str,
)
def test_a_class_we_do_not_have_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="supported are AutoencoderKL, "):
        component(tmp_path, config)


def test_sizes_that_only_together_are_too_large_are_a_config_error(tmp_path: Path) -> None:
    huge = component(tmp_path, {**SD3_MEDIUM, "patch_size": 1024, "out_channels": 2**20})
    with pytest.raises(ConfigError, match="no model can have this config"):
        len(huge.expected)
    bare = component(
        tmp_path, {key: value for key, value in CLIP_L.items() if key != "projection_dim"}
    )
    with pytest.raises(ConfigError, match="no projection_dim"):
        len(bare.expected)


def test_an_index_decides_the_class_as_in_diffusers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CLIP_L))
    plain = folder_component(tmp_path, KINDS, class_name="CLIPTextModel")
    assert "text_projection.weight" not in plain.expected
    assert "text_projection.weight" in folder_component(tmp_path, KINDS).expected


TINY_CLIP = {
    **CLIP_L,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "projection_dim": 8,
    "vocab_size": 11,
}


def write_clip(folder: Path, **config: Any) -> dict[str, Any]:
    clip = component(folder, {**TINY_CLIP, **config})
    draw = np.random.default_rng(0)
    tensors = {n: draw.standard_normal(s).astype(np.float32) for n, s in clip.expected.items()}
    save(folder / "model.safetensors", tensors)
    return tensors


def test_check_and_load_agree(tmp_path: Path) -> None:
    tensors = write_clip(tmp_path)
    clip = folder_component(tmp_path, KINDS)
    clip.check()
    model = clip.load(mx.bfloat16)
    assert parameter_specs(model) == clip.expected
    name = "text_model.final_layer_norm.bias"
    tensors[name][3] = np.inf
    save(tmp_path / "model.safetensors", tensors)
    for attempt in (clip.check, lambda: clip.load(mx.float32)):
        with pytest.raises(WeightsError, match=f"{name}: 0 NaN and 1 Inf of 8 values"):
            attempt()


def test_position_ids_of_old_files_are_dropped(tmp_path: Path) -> None:
    ids = {"text_model.embeddings.position_ids": np.arange(77)[None]}
    save(tmp_path / "model.safetensors", {**write_clip(tmp_path), **ids})
    folder_component(tmp_path, KINDS).load(mx.float32)


def test_clip_as_transformers_5_saves_it_without_projection(tmp_path: Path) -> None:
    tensors = write_clip(tmp_path, architectures=["CLIPTextModel"])
    clip = folder_component(tmp_path, KINDS)
    shortened = {name.removeprefix("text_model."): x for name, x in tensors.items()}
    save(tmp_path / "model.safetensors", shortened)
    clip.load(mx.float32)
    del shortened["encoder.layers.0.mlp.fc1.bias"]
    save(tmp_path / "model.safetensors", shortened)
    with pytest.raises(WeightsError, match=r"missing \(encoder\.layers\.0\.mlp\.fc1\.bias: "):
        clip.load(mx.float32)


def test_a_shard_index_is_read_as_one(tmp_path: Path) -> None:
    tensors = write_clip(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save(tmp_path / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model = folder_component(tmp_path, KINDS).load(mx.float32)
    table: Any = model["text_model"]["embeddings"]["token_embedding"]["weight"]
    np.testing.assert_array_equal(table, tensors["text_model.embeddings.token_embedding.weight"])


def test_every_error_is_one_of_ours(tmp_path: Path) -> None:
    write_clip(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(LyditeError):
        folder_component(tmp_path, KINDS).load(mx.float32)


OTHER_CLASSES = [
    {"_class_name": "FluxPipeline"},
    {"_class_name": "QwenImagePipeline"},
    {"_class_name": "ZImagePipeline"},
    {"_class_name": "StableDiffusionPipeline"},
    {"_class_name": "StableDiffusionXLPipeline"},
    {"text_encoder": "vae"},
    {"text_encoder_3": "text_encoder"},
    {"transformer": "vae"},
    {"vae": "transformer"},
]


@pytest.mark.parametrize("changes", OTHER_CLASSES, ids=str)
def test_components_of_other_classes_are_an_error(
    changes: dict[str, str], untrained: Path, tmp_path: Path
) -> None:
    """An index may name any family, and any network class at any place of it."""
    model = shutil.copytree(untrained, tmp_path / "model")
    index = json.loads((model / INDEX).read_text())
    for key, value in changes.items():
        if key == "_class_name":
            index[key] = value
        else:
            index[key] = index[value]
            shutil.rmtree(model / key, ignore_errors=True)
            shutil.copytree(untrained / value, model / key)
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises((ConfigError, FileError)):
        open_model(model)


def parts(**configs: dict[str, Any]) -> Any:
    return {
        name: SimpleNamespace(config=SimpleNamespace(**config)) for name, config in configs.items()
    }


UNET = {"cross_attention_dim": 8, "in_channels": 4, "out_channels": 4, "addition_embed_type": "x",
        "addition_time_embed_dim": 2, "projection_class_embeddings_input_dim": 16}  # fmt: skip
CLIP = {"hidden_size": 4, "projection_dim": 4}
SDXL = {"unet": UNET, "vae": {"latent_channels": 4}, "text_encoder": CLIP, "text_encoder_2": CLIP}
MMDIT = {"pooled_projection_dim": 8, "in_channels": 16, "joint_attention_dim": 12}
SD3 = {"transformer": MMDIT, "vae": {"latent_channels": 16}, "text_encoder": CLIP,
       "text_encoder_2": CLIP, "text_encoder_3": {"d_model": 12}}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "sound", "name", "change", "said"),
    [
        (sdxl, SDXL, "unet", {}, None),
        (sdxl, SDXL, "unet", {"in_channels": 9}, None),  # inpainting
        (sdxl, SDXL, "unet", {"projection_class_embeddings_input_dim": 14}, None),  # a refiner's
        (sdxl, SDXL, "unet", {"projection_class_embeddings_input_dim": 15}, "expected 16 or"),
        (sdxl, SDXL, "unet", {"cross_attention_dim": 7}, "cross_attention_dim 7"),
        (sdxl, SDXL, "unet", {"in_channels": 8}, "8 input"),
        (sdxl, SDXL, "unet", {"out_channels": 8}, "8 output"),
        (sdxl, SDXL, "unet", {"addition_embed_type": None}, "not SDXL's"),
        (sdxl, SDXL, "vae", {"latent_channels": 5}, "5 latent channels"),
        (sd3, SD3, "vae", {}, None),
        (sd3, SD3, "vae", {"latent_channels": 4}, "in_channels"),
        (sd3, SD3, "text_encoder", {"projection_dim": 5}, "pooled_projection_dim"),
        (sd3, SD3, "text_encoder_2", {"projection_dim": None}, "no projection_dim"),
        (sd3, SD3, "text_encoder_3", {"d_model": 13}, "joint_attention_dim"),
        (sd3, SD3, "text_encoder", {"hidden_size": 8}, None),
        (sd3, SD3, "text_encoder", {"hidden_size": 9}, "together are 13"),
    ],
)
def test_components_that_do_not_fit_each_other(
    family: Any, sound: dict[str, Any], name: str, change: dict[str, Any], said: str | None
) -> None:
    configs = sound | {name: sound[name] | change}
    if said is None:
        family.check(Path("model"), parts(**configs))
        return
    with pytest.raises(ConfigError, match=said):
        family.check(Path("model"), parts(**configs))
