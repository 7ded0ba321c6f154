"""Geometry read off shapes: what was put in comes out, and no single tensor bends it."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lydite.core.errors import ConfigError, LyditeError
from lydite.core.tensorfile import save
from lydite.models.mmdit import MMDiTConfig
from lydite.models.text.clip import CLIPTextConfig
from lydite.models.text.t5 import T5Config
from lydite.models.vae.kl import AutoencoderKLConfig
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.families.sd3_single_file import SINGLE_FILE
from lydite.pipelines.inferred_models import Shapes
from lydite.pipelines.model_files import find_components
from lydite.weights.audit import audit
from lydite.weights.load import parameter_specs
from lydite.weights.maps import mmdit, text, vae
from lydite.weights.rules import Rule, Shape, layout_of, stored_names

PREFIXES = {network.name: network.prefix for network in SINGLE_FILE.networks}

QUICK = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
COUNT = st.integers(1, 3)


def stored(class_name: str, config: Any, rules: tuple[Rule, ...], prefix: str) -> dict[str, Any]:
    """A file of zeros that `rules` would make this model from."""
    parts: defaultdict[str, list[Any]] = defaultdict(list)
    for target, shape in parameter_specs(KINDS[class_name].build(config)).items():
        (name,) = stored_names(target, rules)
        layout, array = layout_of(target, rules), np.zeros(shape, np.float32)
        parts[prefix + name].append(layout.inverse(array) if layout else array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


@st.composite
def transformers(draw: st.DrawFn) -> MMDiTConfig:
    depth, heads = draw(COUNT), draw(COUNT)
    return MMDiTConfig(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        num_layers=depth,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=draw(st.integers(1, 300)),
        caption_projection_dim=64 * heads,
        pooled_projection_dim=draw(st.integers(1, 300)),
        out_channels=16,
        pos_embed_max_size=draw(st.integers(1, 12)),
        dual_attention_layers=tuple(draw(st.sets(st.integers(0, depth - 1)).map(sorted))),
        qk_norm=draw(st.sampled_from([None, "rms_norm"])),
    )


@QUICK
@given(config=transformers(), bare=st.booleans())
def test_any_transformer(config: MMDiTConfig, bare: bool, tmp_path: Path) -> None:
    prefix = "" if bare else PREFIXES["transformer"]
    rules = mmdit.original(config.num_layers)
    save(tmp_path / "x.safetensors", stored("SD3Transformer2DModel", config, rules, prefix))
    (found,) = SINGLE_FILE.components(tmp_path / "x.safetensors").values()
    assert (found.config, found.prefix, found.name) == (config, prefix, "transformer")
    found.check()


@QUICK
@given(
    widths=st.lists(COUNT.map(lambda n: 32 * n), min_size=1, max_size=4),
    layers=COUNT,
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_any_vae(
    widths: list[int], layers: int, switches: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    config = AutoencoderKLConfig(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=tuple(widths),
        layers_per_block=layers,
        latent_channels=16,
        norm_num_groups=32,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=switches[0],
        use_post_quant_conv=switches[1],
        mid_block_add_attention=switches[2],
    )
    tensors = stored("AutoencoderKL", config, vae.original(len(widths)), PREFIXES["vae"])
    save(tmp_path / "x.safetensors", tensors)
    (found,) = SINGLE_FILE.components(tmp_path / "x.safetensors").values()
    assert found.config == config
    found.check()


def clip(
    width: int = 64, layers: int = 2, act: Any = "gelu", vocabulary: int = 99
) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=77,
        hidden_act=act,
        layer_norm_eps=1e-5,
        eos_token_id=2,
        projection_dim=width,
    )


def t5(width: int = 96, layers: int = 2, heads: int = 1, vocabulary: int = 50) -> T5Config:
    return T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=64,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=heads,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        layer_norm_epsilon=1e-6,
        feed_forward_proj="gated-gelu",
    )


def encoders(l: CLIPTextConfig, g: CLIPTextConfig, third: T5Config) -> dict[str, Any]:
    name = "CLIPTextModelWithProjection"
    tensors = {
        **stored(name, l, text.CLIP_L_ORIGINAL, PREFIXES["text_encoder"]),
        **stored(name, g, text.CLIP, PREFIXES["text_encoder_2"]),
        **stored("T5EncoderModel", third, text.T5, PREFIXES["text_encoder_3"]),
    }
    del tensors[f"{PREFIXES['text_encoder']}text_projection.weight"]
    return tensors


@QUICK
@given(heads=st.tuples(COUNT, COUNT, COUNT), layers=st.tuples(COUNT, COUNT, COUNT))
def test_any_text_encoders(heads: Any, layers: Any, tmp_path: Path) -> None:
    configs = (
        clip(64 * heads[0], layers[0], "quick_gelu"),
        clip(64 * heads[1], layers[1]),
        t5(layers=layers[2], heads=heads[2]),
    )
    save(tmp_path / "x.safetensors", encoders(*configs))
    found = SINGLE_FILE.components(tmp_path / "x.safetensors")
    assert tuple(component.config for component in found.values()) == configs
    for component in found.values():
        component.check()


REAL = {
    "sd3-medium": MMDiTConfig(*(128, 2, 16, 24, 64, 24), 4096, 1536, 2048, 16, 192),
    "sd3.5-large": MMDiTConfig(
        *(128, 2, 16, 38, 64, 38), 4096, 2432, 2048, 16, 192, qk_norm="rms_norm"
    ),
    "sd3.5-medium": MMDiTConfig(
        *(128, 2, 16, 24, 64, 24), 4096, 1536, 2048, 16, 384, tuple(range(13)), "rms_norm"
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_the_published_ones_are_recognised_at_their_full_size(name: str, tmp_path: Path) -> None:
    """From a file that is all header and hole."""
    rules, prefix = (
        mmdit.original(REAL[name].num_layers),
        PREFIXES["transformer"],
    )
    parts: defaultdict[str, list[Shape]] = defaultdict(list)
    for target, shape in parameter_specs(KINDS["SD3Transformer2DModel"].build(REAL[name])).items():
        (stored_name,) = stored_names(target, rules)
        layout = layout_of(target, rules)
        hole = np.broadcast_to(np.float16(0), shape)
        parts[prefix + stored_name].append(layout.inverse(hole).shape if layout else shape)
    header: dict[str, Any] = {}
    end = 0
    for key, (shape, *others) in parts.items():
        shape = ((1 + len(others)) * shape[0], *shape[1:])
        offsets = [end, end := end + 2 * math.prod(shape)]
        header[key] = {"dtype": "F16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    path = tmp_path / "sd3.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + end)
    (found,) = SINGLE_FILE.components(path).values()
    assert found.config == REAL[name]
    with found.scope() as scope:
        assert audit(scope, found.expected, found.rules, where="here").clean


def test_a_damaged_embedding_is_measured_by_the_text_encoders(tmp_path: Path) -> None:
    config = MMDiTConfig(
        *(128, 2, 16, 1, 64, 1), 96, 64, 128, 16, 4, dual_attention_layers=(), qk_norm=None
    )
    prefix = PREFIXES["transformer"]
    tensors = stored("SD3Transformer2DModel", config, mmdit.original(1), prefix)
    for name in ("context_embedder.weight", "y_embedder.mlp.0.weight"):
        tensors[prefix + name] = tensors[prefix + name].reshape(-1)
    alone = tmp_path / "alone.safetensors"
    save(alone, tensors)
    sd3 = SINGLE_FILE.components(alone)["transformer"].config
    assert (sd3.joint_attention_dim, sd3.pooled_projection_dim) == (4096, 2048)
    path = tmp_path / "x.safetensors"
    save(path, {**tensors, **encoders(clip(act="quick_gelu"), clip(), t5())})
    found = SINGLE_FILE.components(path)["transformer"].config
    assert (found.joint_attention_dim, found.pooled_projection_dim) == (96, 128)


def shapes(**tensors: Shape) -> Shapes:
    return Shapes({name.replace("_", "."): shape for name, shape in tensors.items()})


def test_the_majority_decides_a_size() -> None:
    found = shapes(a_0=(8, 3), a_1=(8, 3), a_2=(5, 3), b=(3,)).sizes({"a.{i}": "rows columns"})
    assert found == {"rows": 8, "columns": 3}
    assert shapes(a_0=(8,), a_1=(8, 3, 1)).sizes({"a.{i}": "rows columns"}) == {}


def test_a_tensor_that_is_wrong_elsewhere_has_no_say() -> None:
    axes = {"table": "vocabulary width", "norm.{i}": "width"}
    norms: dict[str, Shape] = {f"norm_{index}": (4,) for index in range(3)}
    assert shapes(table=(9, 4), **norms).sizes(axes) == {"vocabulary": 9, "width": 4}
    assert shapes(table=(4, 9), **norms).sizes(axes) == {"width": 4}


def test_an_axis_may_be_numbered() -> None:
    found = shapes(a_0=(8,), a_1=(16,)).sizes({"a.{i}": "width{i}"})
    assert found == {"width0": 8, "width1": 16}


def test_a_number_that_one_tensor_has_is_not_counted() -> None:
    names: dict[str, Shape] = {f"b_{i}_{part}": () for i in range(3) for part in "xyzw"}
    assert shapes(**names).count("b.{i}.{p}") == 3
    assert shapes(**names, b_7_x=()).count("b.{i}.{p}") == 3
    assert shapes(**names, **{f"b_{10**9}_x": (), f"b_{'9' * 6000}_x": ()}).count("b.{i}.{p}") == 3
    assert shapes(other=()).count("b.{i}.{p}") == 1


def test_most() -> None:
    some = shapes(n_0=(), n_1=(), other=())
    assert some.most("n.{i}", 4) and not some.most("n.{i}", 5)


@pytest.mark.parametrize(
    "names",
    [
        ["joint_blocks.0.x"],
        ["model.diffusion_model.joint_blocks.0.x"],
        ["first_stage_model.encoder.down.0.x"],
        ["text_encoders.clip_l.transformer.text_model.x"],
    ],
)
def test_a_few_stray_tensors_make_a_ledger_and_no_crash(names: list[str], tmp_path: Path) -> None:
    assert SINGLE_FILE.matches(names)
    path = tmp_path / "x.safetensors"
    save(path, dict.fromkeys(names, np.zeros(3)))
    for component in SINGLE_FILE.components(path).values():
        with pytest.raises(LyditeError, match="missing"):
            component.check()


@pytest.mark.parametrize(
    "names",
    [
        ["x"],
        ["transformer_blocks.0.attn.to_q.weight"],
        ["first_stage_model.decoder.up.0.x"],
        ["text_encoders.t5xxl.transformer.shared.weight"],
    ],
)
def test_other_models_are_refused_in_one_line(names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, dict.fromkeys(names, np.zeros(3)))
    with pytest.raises(ConfigError) as caught:
        find_components(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "SD3" in message and message.isprintable()


def test_a_width_no_head_fits_is_a_config_error(tmp_path: Path) -> None:
    config = replace(clip(), hidden_size=96, num_attention_heads=1, projection_dim=96)
    prefix = PREFIXES["text_encoder_2"]
    path = tmp_path / "x.safetensors"
    save(path, stored("CLIPTextModelWithProjection", config, text.CLIP, prefix))
    with pytest.raises(ConfigError, match="num_attention_heads"):
        SINGLE_FILE.components(path)
    odd = MMDiTConfig(*(128, 2, 16, 1, 96, 1), 96, 96, 128, 16, 4)
    tensors = stored("SD3Transformer2DModel", odd, mmdit.original(1), PREFIXES["transformer"])
    save(path, tensors)
    with pytest.raises(ConfigError, match="read off its shapes"):
        SINGLE_FILE.components(path)


def test_what_lies_outside_every_network(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    inside = {"model.diffusion_model.joint_blocks.0.x": np.zeros(3)}
    scales = {f"text_encoders.{each}.logit_scale": np.zeros(()) for each in ("clip_l", "t5xxl")}
    save(path, {**inside, **scales})
    ledger = SINGLE_FILE.audit_leftovers(path)
    assert ledger.clean and {each.tensor for each in ledger.dropped} == set(scales)
    save(path, {**inside, "text_encoders.other.logit_scale": np.zeros(())})
    assert [each.tensor for each in SINGLE_FILE.audit_leftovers(path).unexpected] == [
        "text_encoders.other.logit_scale"
    ]
    save(path, {"some.component": np.zeros(3)})
    assert SINGLE_FILE.audit_leftovers(path).clean
