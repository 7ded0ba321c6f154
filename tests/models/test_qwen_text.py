"""Qwen2.5-VL's text tower and Qwen3 against transformers, through the real loader."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import ConfigError
from lydite.core.tensorfile import save
from lydite.models.text.qwen import Qwen2_5_VLTextEncoder, Qwen3TextEncoder, QwenTextModel
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.model import Component, folder_component
from lydite.trace.mlx_capture import walk
from lydite.weights.audit import audit
from lydite.weights.load import parameter_hash, parameters
from support import tiny_qwen_image, tiny_sd3, tiny_z_image
from support.distance import relative_l2

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}


MODELS = {
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", tiny_qwen_image.make_text_encoder),
    "qwen3": ("Qwen3Model", tiny_z_image.make_text_encoder),
    "qwen3 with head": ("Qwen3ForCausalLM", tiny_z_image.make_text_encoder),
}
Pair = tuple[Any, Component]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.manual_seed(1)
    class_name, make = MODELS[request.param]
    folder = tmp_path_factory.mktemp("text") / "text_encoder"
    make().save_pretrained(folder)
    reference = getattr(transformers, class_name).from_pretrained(folder).eval()
    return reference, folder_component(folder, KINDS, class_name=class_name)


def prompts(length: int, batch: int = 2) -> np.ndarray:
    return np.random.default_rng(1).integers(3, 320, (batch, length), dtype=np.int32)


def run_reference(
    model: Any, ids: np.ndarray, mask: np.ndarray | None = None, state: int = -1
) -> np.ndarray:
    """What QwenImagePipeline takes from the model, or with -2 what ZImagePipeline does."""
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(np.ones_like(ids) if mask is None else mask),
            output_hidden_states=True,
        )
    return output.hidden_states[state].float().numpy()


def run_port(model: Any, ids: np.ndarray, state: int = -1) -> np.ndarray:
    output = model(mx.array(ids))
    array = output.last if state == -1 else output.hidden_states[state]
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("state", [-1, -2, 1])
@pytest.mark.parametrize("length", [1, 9, 300])
def test_equal_in_float32(pair: Pair, length: int, state: int) -> None:
    reference, component = pair
    expected = run_reference(reference, prompts(length), state=state)
    found = run_port(component.load(mx.float32), prompts(length), state)
    assert relative_l2(found, expected) < 5e-6  # measured at most 6e-7


def test_padding_on_the_right_changes_nothing_before_it(pair: Pair) -> None:
    """As the pipelines pad: with the mask in the reference, without one here."""
    reference, component = pair
    ids = prompts(12)
    mask = (np.arange(12) < np.array([[12], [7]])).astype(np.int64)
    expected = run_reference(reference, ids, mask)
    found = run_port(component.load(mx.float32), ids)
    assert relative_l2(found[0], expected[0]) < 5e-6
    assert relative_l2(found[1, :7], expected[1, :7]) < 5e-6


def test_with_the_mask_padding_itself_is_equal(tmp_path: Path) -> None:
    """FLUX.2-klein uses the features of padding."""
    reference = tiny_z_image.make_text_encoder()
    reference.save_pretrained(tmp_path)
    ids, mask = prompts(12), np.arange(12) < np.array([[12], [7]])
    expected = run_reference(reference, ids, mask.astype(np.int64), state=2)
    output = folder_component(tmp_path, KINDS).load(mx.float32)(
        mx.array(ids), mx.array(mask.tolist())
    )
    assert relative_l2(np.array(output.hidden_states[2]), expected) < 5e-6


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_good_as_the_references_own(pair: Pair, name: str) -> None:
    reference, component = pair
    exact = run_reference(reference, prompts(60))
    half = tiny_sd3.reload(reference, component.path, getattr(torch, name))
    expected = relative_l2(run_reference(half, prompts(60)), exact)
    found = relative_l2(run_port(component.load(HALF[name]), prompts(60)), exact)
    assert found < 2 * expected  # measured at most 1.2 times


def test_every_module_has_a_name_of_the_reference(pair: Pair) -> None:
    reference, component = pair
    names = {name for name, _ in reference.named_modules()}
    model = component.load(mx.float32)
    assert isinstance(model, Qwen2_5_VLTextEncoder | Qwen3TextEncoder | QwenTextModel)
    assert {path for path, _ in walk(model)} <= names
    assert set(parameters(model)) <= set(reference.state_dict())


def test_vision_tower_and_head_are_dropped_for_a_reason(pair: Pair) -> None:
    component = pair[1]
    with component.scope() as scope:
        ledger = audit(scope, component.expected, component.rules, where="here")
    assert ledger.clean
    vision = {"visual"} if "VL" in type(pair[0]).__name__ else set()
    assert {row.tensor.split(".")[0] for row in ledger.dropped} == {"lm_head", *vision}


def test_names_of_the_modules_are_read_like_the_published_ones(pair: Pair, tmp_path: Path) -> None:
    reference, component = pair
    tensors = tiny_sd3.read_tensors(component.path)
    prefixes = {"model.": "model.language_model.", "visual.": "model.visual.", "lm_": "lm_"}
    if "VL" not in type(reference).__name__:
        prefixes["model."] = "" if type(reference).__name__ == "Qwen3Model" else "model."
    moved = {
        new + name.removeprefix(old): x
        for name, x in tensors.items()
        for old, new in prefixes.items()
        if name.startswith(old)
    }
    assert len(moved) == len(tensors)
    save(tmp_path / "model.safetensors", moved)
    moved_component = replace(component, path=tmp_path)
    hashes = [parameter_hash(each.load(mx.float32)) for each in (component, moved_component)]
    assert hashes[0] == hashes[1]


# text_encoder/config.json of Qwen/Qwen-Image, without its vision_config and text_config
PUBLISHED = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.1",
    "use_cache": True,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
    "vocab_size": 152064,
}


def read(folder: Path, raw: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(raw))
    return folder_component(folder, KINDS).config


def test_flat_and_nested_configs_say_the_same(tmp_path: Path) -> None:
    published = read(tmp_path, PUBLISHED)
    assert (published.rope_theta, published.num_key_value_heads) == (1e6, 4)
    newest = transformers.Qwen2_5_VLConfig.from_dict(deepcopy(PUBLISHED)).to_dict()
    assert "hidden_size" not in newest
    nested = read(tmp_path, {**newest, "architectures": PUBLISHED["architectures"]})
    assert nested.layer_types == ("full_attention",) * 28
    for name in ("hidden_size", "rope_theta", "rms_norm_eps", "num_hidden_layers"):
        assert getattr(nested, name) == getattr(published, name)
    both = PUBLISHED | {"text_config": PUBLISHED | {"num_hidden_layers": 7, "rope_theta": 5e5}}
    theirs: Any = transformers.Qwen2_5_VLConfig.from_dict(deepcopy(both)).text_config
    ours = read(tmp_path, both)
    assert ours.num_hidden_layers == theirs.num_hidden_layers == 7
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2_vl"}, "model_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
    ],
)
def test_config_we_cannot_run_is_refused(tmp_path: Path, change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, PUBLISHED | change)


def test_qwen3_s_published_config_is_accounted_for(tmp_path: Path) -> None:
    raw = transformers.Qwen3Config(head_dim=128, hidden_size=2560, num_hidden_layers=36).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": ["Qwen3Model"]}))
    config = folder_component(tmp_path, KINDS).config
    assert (config.width, config.num_hidden_layers) == (128, 36)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "attention_bias": True}))
    with pytest.raises(ConfigError, match="attention_bias"):
        folder_component(tmp_path, KINDS, class_name="Qwen3Model")
