"""CLIP text encoder against transformers: tiny, random weights, every parameter off 0 and 1."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.config import read_config, read_json
from lydite.core.errors import ConfigError, InputError
from lydite.models.text import clip
from support.distance import relative_l2

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.parity

START, END = 98, 99
TOLERANCE = 5e-6  # fp32, three layers: measured at most 6e-7; the GELUs are over 1e-4 apart
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
# The same three things from either side.
OUTPUTS = ("last", "pooled", "penultimate")


def make_reference(folder: Path, *, projection: bool = True, **options):
    """A transformers model with random weights, saved in `folder`."""
    settings = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        "projection_dim": 48,
        "hidden_act": "quick_gelu",
        "bos_token_id": START,
        "eos_token_id": END,
    }
    kind = reference_class(projection)
    model = kind(transformers.CLIPTextConfig(**settings | options)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            elif "embedding" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model


def reference_class(projection: bool):
    if projection:
        return transformers.CLIPTextModelWithProjection
    return transformers.CLIPTextModel


def load_ours(folder: Path, *, projection: bool = True, dtype: str = "float32"):
    raw = read_json(folder / "config.json")
    config = read_config(
        clip.CLIPTextConfig, raw, where=folder, ignored=clip.IGNORED, fixed=clip.FIXED
    )
    model = clip.CLIPTextModel(config, projection=projection)
    prefix = "" if projection else "text_model."  # 5.x writes none for CLIPTextModel
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    weights = [(prefix + name, array.astype(DTYPES[dtype])) for name, array in arrays.items()]
    model.load_weights(weights, strict=True)
    return model


def run_reference(model, ids: np.ndarray) -> dict[str, np.ndarray]:
    with torch.no_grad():
        output = model(torch.tensor(ids), output_hidden_states=True)
    pooled = output.text_embeds if "text_embeds" in output else output.pooler_output
    tensors = (output.last_hidden_state, pooled, output.hidden_states[-2])
    return {name: tensor.float().numpy() for name, tensor in zip(OUTPUTS, tensors, strict=True)}


def run_ours(model: clip.CLIPTextModel, ids: np.ndarray) -> dict[str, np.ndarray]:
    output = model(mx.array(ids))
    return {name: np.array(getattr(output, name).astype(mx.float32)) for name in OUTPUTS}


def prompts(length: int) -> np.ndarray:
    """Two rows: one ends early and is padded with END, one fills its length."""
    ids = np.random.default_rng(1).integers(3, START, (2, length), dtype=np.int32)
    ids[:, 0] = START
    ids[0, length // 2 :] = END
    ids[1, -1] = END
    return ids


@pytest.mark.parametrize("length", [2, 5, 77])
@pytest.mark.parametrize("projection", [True, False], ids=["projection", "plain"])
@pytest.mark.parametrize("hidden_act", ["quick_gelu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_float32_matches_reference(tmp_path, hidden_act, projection, length):
    reference = make_reference(tmp_path, projection=projection, hidden_act=hidden_act)
    ours = run_ours(load_ours(tmp_path, projection=projection), prompts(length))
    for name, expected in run_reference(reference, prompts(length)).items():
        assert relative_l2(ours[name], expected) < TOLERANCE, name


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_layer_norm_eps_comes_from_the_config(tmp_path, eps):
    reference = make_reference(tmp_path, layer_norm_eps=eps)
    ours = run_ours(load_ours(tmp_path), prompts(9))
    for name, expected in run_reference(reference, prompts(9)).items():
        assert relative_l2(ours[name], expected) < TOLERANCE, name


def test_every_hidden_state_matches(tmp_path):
    reference = make_reference(tmp_path)
    with torch.no_grad():
        expected = reference(torch.tensor(prompts(9)), output_hidden_states=True).hidden_states
    states = load_ours(tmp_path)(mx.array(prompts(9))).hidden_states
    assert len(states) == len(expected) == 4
    for state, tensor in zip(states, expected, strict=True):
        assert relative_l2(np.array(state), tensor.numpy()) < TOLERANCE


@pytest.mark.parametrize(
    ("eos_token_id", "row"),
    [
        pytest.param(END, [START, 5, 7, END, 11, END, 3], id="first-of-two"),
        pytest.param(END, [START, 5, 7, 3, 11, 4, 3], id="none-gives-position-0"),
        pytest.param(97, [START, 5, 97, END, END, 97, 3], id="not-the-highest-id"),
        pytest.param(2, [START, 5, 2, 7, END, END, 3], id="legacy-takes-the-highest-id"),
    ],
)
def test_pooled_is_taken_where_the_reference_takes_it(tmp_path, eos_token_id, row):
    reference = make_reference(tmp_path, eos_token_id=eos_token_id)
    ids = np.array([row, row[:1] + row[:0:-1]], dtype=np.int32)
    ours = run_ours(load_ours(tmp_path), ids)["pooled"]
    assert relative_l2(ours, run_reference(reference, ids)["pooled"]) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("projection", [True, False], ids=["projection", "plain"])
@pytest.mark.parametrize("hidden_act", ["quick_gelu", "gelu"])
def test_half_precision_is_as_good_as_the_references(tmp_path, hidden_act, projection, dtype):
    exact = make_reference(tmp_path, projection=projection, hidden_act=hidden_act)
    half = reference_class(projection).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    expected = run_reference(exact, prompts(77))
    theirs = run_reference(half, prompts(77))
    ours = run_ours(load_ours(tmp_path, projection=projection, dtype=dtype), prompts(77))
    for name in OUTPUTS:
        # measured: 0.9 to 1.2 times the reference's own distance from float32
        assert relative_l2(ours[name], expected[name]) < 2 * relative_l2(
            theirs[name], expected[name]
        ), name


def test_tokens_after_a_position_do_not_reach_it(tmp_path):
    make_reference(tmp_path)
    ids = prompts(12)
    changed = ids.copy()
    changed[:, 6:] = 50
    before, after = (run_ours(load_ours(tmp_path), x)["last"] for x in (ids, changed))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert not np.array_equal(before[:, 6:], after[:, 6:])


def test_more_tokens_than_positions_is_an_error(tmp_path):
    make_reference(tmp_path, max_position_embeddings=10)
    with pytest.raises(InputError, match="11 tokens for 10 positions"):
        load_ours(tmp_path)(mx.array(prompts(11)))


# text_encoder/config.json of CompVis/stable-diffusion-v1-4, and the keys that 4.2x to 4.4x wrote
# into the text_config of a CLIPModel: everything a PretrainedConfig had.
STABLE_DIFFUSION_1_4 = {
    "_name_or_path": "openai/clip-vit-large-patch14",
    "architectures": ["CLIPTextModel"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dropout": 0.0,
    "eos_token_id": 2,
    "hidden_act": "quick_gelu",
    "hidden_size": 768,
    "initializer_factor": 1.0,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 77,
    "model_type": "clip_text_model",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "torch_dtype": "float32",
    "transformers_version": "4.22.0.dev0",
    "vocab_size": 49408,
}
PRETRAINED_CONFIG_4 = {
    "add_cross_attention": False,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tie_word_embeddings": True,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
}


def read(raw):
    return read_config(
        clip.CLIPTextConfig, raw, where="config.json", ignored=clip.IGNORED, fixed=clip.FIXED
    )


def test_config_of_every_generation_is_accounted_for():
    generation = dict.fromkeys(transformers.GenerationConfig._get_default_generation_params())
    current = transformers.CLIPTextConfig().to_dict()
    assert read(STABLE_DIFFUSION_1_4 | PRETRAINED_CONFIG_4 | generation).eos_token_id == 2
    assert read(current).projection_dim == 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"model_type": "clip_vision_model"}, "model_type"),
        ({"num_attention_heads": 7}, "not a multiple"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps"),
        ({"eos_token_id": [2]}, "eos_token_id"),
        ({"per_layer_config": {}}, "not understood"),
    ],
)
def test_config_we_cannot_run_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read(STABLE_DIFFUSION_1_4 | change)


def test_projection_needs_its_width():
    with pytest.raises(InputError, match="projection_dim"):
        clip.CLIPTextModel(read(STABLE_DIFFUSION_1_4), projection=True)


@pytest.mark.parametrize("end", [-1, 2**31, 10**30])
def test_an_end_token_beyond_32_bits_is_refused(end: int) -> None:
    sound = {
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1),
        **{"max_position_embeddings": 8, "hidden_act": "gelu", "layer_norm_eps": 1e-5},
    }
    assert read_config(
        clip.CLIPTextConfig, {**sound, "eos_token_id": 2**31 - 1}, where="config.json"
    )
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_config(clip.CLIPTextConfig, {**sound, "eos_token_id": end}, where="config.json")
