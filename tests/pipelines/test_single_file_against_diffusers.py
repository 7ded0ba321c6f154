"""SD3's single file, made from a reference model and proven by the reference's own converters.

Then ours: from the single file and from the folder come the same parameters, bit for bit.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError, WeightsError
from lydite.core.tensorfile import save
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.families.sd3_single_file import SINGLE_FILE
from lydite.pipelines.model import Component, folder_component
from lydite.pipelines.model_files import find_components
from lydite.pipelines.pipeline import Pipeline
from lydite.weights.load import parameter_hash, parameters
from support import tiny_sd3

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

PREFIXES = {network.name: network.prefix for network in SINGLE_FILE.networks}
CLIP_L, T5 = PREFIXES["text_encoder"], PREFIXES["text_encoder_3"]
Tensors = dict[str, Any]

# What no tensor shows: the size of picture; the end of text, 2 being the highest token in use; and
# what T5's feed_forward_proj says already.
UNSEEN = {
    "transformer": ["sample_size"],
    "text_encoder": ["eos_token_id"],
    "text_encoder_2": ["eos_token_id"],
    "text_encoder_3": ["dense_act_fn", "is_gated_act"],
}
ONE_VARIANT = pytest.mark.parametrize("folder", ["sd3.5-medium"], indirect=True)


@pytest.fixture(scope="module", params=tiny_sd3.VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline in diffusers' layout; CLIP-L unprojected, as a single file has to leave it."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_sd3.make_pipeline(folder, request.param, sizes=tiny_sd3.ORIGINAL)
    path = folder / "text_encoder" / "model.safetensors"
    width = tiny_sd3.ORIGINAL.clip_l
    identity = {"text_projection.weight": np.eye(width, dtype=np.float32)}
    save(path, {**tiny_sd3.read_tensors(path), **identity})
    return folder


@pytest.fixture(scope="module")
def tensors(folder: Path) -> Tensors:
    return tiny_sd3.original_file(folder)


@pytest.fixture(scope="module")
def clip_l(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """One CLIP-L in its folder and under the single file's names, with a projection of its own."""
    folder = tmp_path_factory.mktemp("clip") / "text_encoder"
    tiny_sd3.make_clip(90, tiny_sd3.ORIGINAL.clip_l, 1, "quick_gelu").save_pretrained(folder)
    return folder, {CLIP_L + name: x for name, x in tiny_sd3.read_tensors(folder).items()}


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    folder = tmp_path_factory.mktemp("t5")
    tiny_sd3.make_t5(tiny_sd3.ORIGINAL).save_pretrained(folder)
    return {T5 + name: x for name, x in tiny_sd3.read_tensors(folder).items()}


def write(path: Path, tensors: Tensors) -> Path:
    save(path, tensors)
    return path


def as_torch(tensors: Tensors) -> dict[str, Any]:
    return {name: torch.from_numpy(x.copy()) for name, x in tensors.items()}


def assert_equal(converted: dict[str, Any], folder: Path) -> None:
    """What the reference converted is what the reference had saved."""
    expected = tiny_sd3.read_tensors(folder)
    assert converted.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(converted[name].numpy(), x, err_msg=name)


def test_the_references_converters_read_our_single_file(folder: Path, tensors: Tensors) -> None:
    from diffusers.loaders import single_file_utils as reference

    config = json.loads((folder / "vae" / "config.json").read_text())
    vae = reference.convert_ldm_vae_checkpoint(as_torch(tensors), config)
    assert_equal(vae, folder / "vae")
    t5 = reference.convert_sd3_t5_checkpoint_to_diffusers(as_torch(tensors))
    assert_equal(t5, folder / "text_encoder_3")
    clip = reference.convert_ldm_clip_checkpoint(
        as_torch(tensors), "text_encoders.clip_g.transformer."
    )
    assert_equal(clip, folder / "text_encoder_2")
    part = {name: x for name, x in tensors.items() if "diffusion_model" in name}
    transformer = reference.convert_sd3_transformer_checkpoint_to_diffusers(as_torch(part))
    assert_equal(transformer, folder / "transformer")


def test_the_reference_leaves_clip_l_unprojected(folder: Path, tensors: Tensors) -> None:
    """With a projection in the file and without: hence our rules drop it and fill in identity."""
    from diffusers.loaders.single_file_utils import create_diffusers_clip_model_from_ldm
    from transformers import CLIPTextModelWithProjection

    stored = {f"{CLIP_L}text_projection.weight": np.full((64, 64), 3, np.float32)}
    for checkpoint in (tensors, {**tensors, **stored}):
        model = create_diffusers_clip_model_from_ldm(
            CLIPTextModelWithProjection,
            as_torch(checkpoint),
            subfolder="text_encoder",
            config=str(folder),
            local_files_only=True,
        )
        assert_equal(model.state_dict(), folder / "text_encoder")


def test_single_file_and_folder_fill_the_same_models(
    folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    ours = find_components(write(tmp_path / "sd3.safetensors", tensors))
    theirs = find_components(folder)
    assert ours.keys() == theirs.keys()
    for name, component in theirs.items():
        unseen = {key: getattr(component.config, key) for key in UNSEEN.get(name, ())}
        assert replace(ours[name].config, **unseen) == component.config
        ours[name].check()
        for dtype in (mx.float32, mx.bfloat16):
            assert parameter_hash(ours[name].load(dtype)) == parameter_hash(component.load(dtype))


def test_a_transformer_alone_may_come_without_its_prefix(
    folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    prefix = PREFIXES["transformer"]
    part = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
    (bare,) = find_components(write(tmp_path / "bare.safetensors", part)).values()
    assert parameter_hash(bare.load(mx.float32)) == parameter_hash(
        folder_component(folder / "transformer", KINDS).load(mx.float32)
    )
    write(tmp_path / "bare.safetensors", {**part, "vae.decoder.weight": np.zeros(3)})
    with pytest.raises(WeightsError, match=r"unexpected \(vae\.decoder\.weight: "):
        bare.load(mx.float32)


def test_one_tensor_without_its_prefix_does_not_turn_the_file_into_a_bare_one(
    tensors: Tensors, tmp_path: Path
) -> None:
    name = "model.diffusion_model.joint_blocks.0.x_block.attn.proj.bias"
    moved = {n: x for n, x in tensors.items() if n != name}
    moved[name.removeprefix("model.diffusion_model.")] = tensors[name]
    path = write(tmp_path / "sd3.safetensors", moved)
    with pytest.raises(WeightsError, match=f"missing \\({name}: "):
        find_components(path)["transformer"].check()
    with pytest.raises(WeightsError, match=r"unexpected \(joint_blocks\.0\."):
        SINGLE_FILE.audit_leftovers(path).require_clean()


def test_the_whole_pipeline_opens_from_one_file(
    folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    extra = {f"text_encoders.{each}.logit_scale": np.float32(4.6) for each in ("clip_l", "clip_g")}
    path = write(
        tmp_path / "sd3.safetensors", {**tensors, **{n: np.array(x) for n, x in extra.items()}}
    )
    pipeline = Pipeline.open(path, components=folder)
    assert set(pipeline.model.components) == set(PREFIXES)
    dropped = SINGLE_FILE.audit_leftovers(path).dropped
    assert {each.tensor for each in dropped} == set(extra)
    assert all("contrastive" in each.detail for each in dropped)


@ONE_VARIANT
@pytest.mark.parametrize(
    "name",
    [
        "model.diffusion_model.context_embedder.weight",
        "model.diffusion_model.y_embedder.mlp.0.weight",
        "model.diffusion_model.x_embedder.proj.weight",
        "model.diffusion_model.final_layer.linear.weight",
        "model.diffusion_model.pos_embed",
        "first_stage_model.decoder.conv_in.weight",
        "text_encoders.clip_g.transformer.text_model.embeddings.token_embedding.weight",
        "text_encoders.t5xxl.transformer.shared.weight",
        "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention"
        ".relative_attention_bias.weight",
    ],
)
def test_a_tensor_that_tells_the_geometry_is_blamed_for_its_own_fault(
    folder: Path, tensors: Tensors, tmp_path: Path, name: str
) -> None:
    """Not the config, nor its neighbours: the whole pipeline's first error is about this tensor."""
    x = tensors[name]
    turned = x.swapaxes(0, 1) if x.ndim == 4 else x.swapaxes(-1, -2)
    for damage in ({name: turned}, {name: x.reshape(-1)}, {f"{name}x": x}, {}):
        rest = {n: array for n, array in tensors.items() if n != name}
        path = write(tmp_path / "sd3.safetensors", {**rest, **damage})
        with pytest.raises(WeightsError) as caught:
            Pipeline.open(path, components=folder).model.prepare()
        assert f"({name}" in str(caught.value), str(caught.value)


@ONE_VARIANT
@pytest.mark.parametrize(
    "name",
    [
        "stray",
        "model.diffusion_model.stray",
        "first_stage_model.loss.w",
        f"{CLIP_L}stray",
        "text_encoders.clip_l.stray",
        f"{T5}scaled_fp8",
        "cond_stage_model.w",
    ],
)
def test_an_unknown_tensor_is_refused_by_name(
    folder: Path, tensors: Tensors, tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / "sd3.safetensors", {**tensors, name: np.zeros(3, np.float32)})
    with pytest.raises(WeightsError, match=f"unexpected \\({name}: "):
        Pipeline.open(path, components=folder).model.prepare()


def one_part(path: Path, tensors: Tensors) -> Component:
    (component,) = SINGLE_FILE.components(write(path, tensors)).values()
    return component


def test_clip_l_is_unprojected_whatever_the_file_holds(
    clip_l: tuple[Path, Tensors], tmp_path: Path
) -> None:
    _, tensors = clip_l
    projection = f"{CLIP_L}text_projection.weight"
    without = {name: x for name, x in tensors.items() if name != projection}
    path = tmp_path / "sd3.safetensors"
    hashes = {parameter_hash(one_part(path, each).load(mx.float32)) for each in (tensors, without)}
    assert len(hashes) == 1
    model = one_part(path, tensors).load(mx.float32)
    np.testing.assert_array_equal(parameters(model)["text_projection.weight"], np.eye(64))


def test_position_ids_inside_a_single_file_are_dropped(
    clip_l: tuple[Path, Tensors], tmp_path: Path
) -> None:
    ids = {f"{CLIP_L}text_model.embeddings.position_ids": np.arange(77)[None]}
    one_part(tmp_path / "sd3.safetensors", {**clip_l[1], **ids}).load(mx.float32)


def test_t5_in_fp8_loads_as_the_values_it_holds(t5: Tensors, tmp_path: Path) -> None:
    narrow = {name: x.astype(ml_dtypes.float8_e4m3fn) for name, x in t5.items()}
    model = one_part(tmp_path / "sd3.safetensors", narrow).load(mx.float32)
    name = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
    reference = torch.from_numpy(t5[T5 + name]).to(torch.float8_e4m3fn).float()
    np.testing.assert_array_equal(parameters(model)[name], reference.numpy())


def test_t5_may_hold_its_table_twice_but_not_two_tables(t5: Tensors, tmp_path: Path) -> None:
    path, table, twin = (
        tmp_path / "x.safetensors",
        f"{T5}shared.weight",
        f"{T5}encoder.embed_tokens.weight",
    )
    expected = parameter_hash(one_part(path, t5).load(mx.float32))
    both = {**t5, twin: t5[table]}
    only = {**{n: x for n, x in t5.items() if n != table}, twin: t5[table]}
    for tensors in (both, only):
        assert parameter_hash(one_part(path, tensors).load(mx.float32)) == expected
    differing = one_part(path, {**t5, twin: t5[table] + 1})
    for attempt in (differing.check, lambda: differing.load(mx.float32)):
        with pytest.raises(WeightsError, match=f"{twin}: should repeat {table}"):
            attempt()


@pytest.mark.parametrize("quant", [(False, False), (True, False), (True, True)])
def test_a_vae_with_and_without_its_quant_convs(quant: tuple[bool, bool], tmp_path: Path) -> None:
    model = tiny_sd3.make_vae(
        sizes=tiny_sd3.ORIGINAL, use_quant_conv=quant[0], use_post_quant_conv=quant[1]
    )
    model.save_pretrained(tmp_path / "vae")
    tensors = tiny_sd3.original_vae(tiny_sd3.read_tensors(tmp_path / "vae"))
    named = {f"first_stage_model.{name}": x for name, x in tensors.items()}
    ours = one_part(tmp_path / "x.safetensors", named)
    assert (ours.config.use_quant_conv, ours.config.use_post_quant_conv) == quant
    theirs = folder_component(tmp_path / "vae", KINDS).load(mx.float32)
    assert parameter_hash(ours.load(mx.float32)) == parameter_hash(theirs)


def test_old_names_of_the_vaes_attention(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    tiny_sd3.make_vae().save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    component = folder_component(tmp_path, KINDS)
    expected = parameter_hash(component.load(mx.float32))
    renamed = {"to_q.": "query.", "to_k.": "key.", "to_v.": "value.", "to_out.0.": "proj_attn."}
    new = tiny_sd3.read_tensors(path)
    old = dict(new)
    for ours, theirs in renamed.items():
        old = {name.replace(ours, theirs): x for name, x in old.items()}
    assert len(old.keys() - new.keys()) == 16
    write(path, old)
    assert parameter_hash(component.load(mx.float32)) == expected
    assert_equal(
        AutoencoderKL.from_pretrained(tmp_path).state_dict(), write_to(tmp_path / "n", new)
    )
    lacking = "decoder.mid_block.attentions.0.query.weight"
    write(path, {name: x for name, x in old.items() if name != lacking})
    with pytest.raises(WeightsError, match=f"missing \\({lacking}: "):
        component.load(mx.float32)


def write_to(folder: Path, tensors: Tensors) -> Path:
    write(folder / "model.safetensors", tensors)
    return folder


def test_a_folder_that_the_reference_saved_in_shards(tmp_path: Path) -> None:
    model = tiny_sd3.make_transformer("sd3.5-medium")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (folder_component(tmp_path / name, KINDS) for name in ("whole", "shards"))
    assert parameter_hash(whole.load(mx.float32)) == parameter_hash(shards.load(mx.float32))


def test_another_architecture_in_one_file_is_refused_as_such(tmp_path: Path) -> None:
    sd1 = {
        "model.diffusion_model.input_blocks.0.0.weight": np.zeros((4, 4)),
        "first_stage_model.encoder.conv_in.weight": np.zeros((4, 4)),
    }
    with pytest.raises(ConfigError, match="unet"):  # two tensors of a file of SD1
        find_components(write(tmp_path / "other.safetensors", sd1))
    with pytest.raises(ConfigError, match="no network we know"):
        find_components(write(tmp_path / "other.safetensors", {"layer.weight": np.zeros(3)}))
