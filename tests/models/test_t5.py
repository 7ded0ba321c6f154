"""T5 encoder against transformers: tiny, random weights, every parameter off 0 and 1."""

from fnmatch import fnmatch
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.config import read_config, read_json
from lydite.core.errors import ConfigError
from lydite.models.text import t5
from support.distance import relative_l2
from support.published_configs import T5_XXL

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.parity

TOLERANCE = 5e-6  # fp32, three blocks: measured at most 1e-6
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


def make_reference(folder: Path, *, size: float = 1.0, **options):
    """A transformers model with random weights, saved in `folder`; `size` scales `wo`."""
    settings = {
        "vocab_size": 100,
        "d_model": 64,
        "d_kv": 12,  # not d_model / num_heads, as in T5 1.1 small
        "d_ff": 160,
        "num_layers": 3,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
    }
    model = transformers.T5EncoderModel(transformers.T5Config(**settings | options)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            elif "shared" in name or "relative" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
            if name.endswith(".q.weight"):
                parameter.mul_(12**-0.5)  # the scale that T5 leaves to its weights
            if name.endswith(".wo.weight"):
                parameter.mul_(size)
    model.save_pretrained(folder)
    return model


def load_ours(folder: Path, dtype: str = "float32", keep: tuple[str, ...] = ()):
    raw = read_json(folder / "config.json")
    config = read_config(t5.T5Config, raw, where=folder, ignored=t5.IGNORED, fixed=t5.FIXED)
    model = t5.T5EncoderModel(config)
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    kept = {name for name in arrays if any(fnmatch(name, pattern) for pattern in keep)}
    model.load_weights(
        [(name, x if name in kept else x.astype(DTYPES[dtype])) for name, x in arrays.items()],
        strict=True,
    )
    return model


def run_reference(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids)).last_hidden_state.float().numpy()


def run_ours(model: t5.T5EncoderModel, ids: np.ndarray) -> np.ndarray:
    return np.array(model(mx.array(ids)).astype(mx.float32))


def prompts(length: int) -> np.ndarray:
    """Two rows, the first padded from its middle on: T5 attends to padding."""
    ids = np.random.default_rng(1).integers(3, 100, (2, length), dtype=np.int32)
    ids[0, length // 2 :] = 0
    return ids


@pytest.mark.parametrize("length", [1, 9, 300])  # 300: farther apart than max_distance
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("feed_forward_proj", ["gated-gelu", "relu", "gelu"])
def test_float32_matches_reference(tmp_path, feed_forward_proj, num_layers, length):
    reference = make_reference(tmp_path, feed_forward_proj=feed_forward_proj, num_layers=num_layers)
    ours = run_ours(load_ours(tmp_path), prompts(length))
    assert relative_l2(ours, run_reference(reference, prompts(length))) < TOLERANCE


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_layer_norm_epsilon_comes_from_the_config(tmp_path, eps):
    reference = make_reference(tmp_path, layer_norm_epsilon=eps)
    ours = run_ours(load_ours(tmp_path), prompts(9))
    assert relative_l2(ours, run_reference(reference, prompts(9))) < TOLERANCE


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(8, 20), (32, 128), (64, 1000)])
def test_buckets_come_from_the_config(tmp_path, num_buckets, max_distance):
    reference = make_reference(
        tmp_path,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
    )
    ours = run_ours(load_ours(tmp_path), prompts(150))
    assert relative_l2(ours, run_reference(reference, prompts(150))) < TOLERANCE


@pytest.mark.parametrize("num_buckets", [4, 8, 32, 36, 64])
@pytest.mark.parametrize("max_distance", [20, 64, 100, 128, 256, 1000, 1024])
def test_every_distance_falls_into_the_references_bucket(num_buckets, max_distance):
    length = 1100
    positions = torch.arange(length)
    expected = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket(
        positions[None, :] - positions[:, None],
        bidirectional=True,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    ours = t5.relative_position_buckets(length, num_buckets=num_buckets, max_distance=max_distance)
    np.testing.assert_array_equal(ours, expected.numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("feed_forward_proj", ["gated-gelu", "relu"])
def test_half_precision_is_as_good_as_the_references(tmp_path, feed_forward_proj, dtype):
    exact = make_reference(tmp_path, feed_forward_proj=feed_forward_proj)
    half = transformers.T5EncoderModel.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    kept = {name for name, p in half.named_parameters() if p.dtype == torch.float32}
    keep = t5.KEEP_FLOAT32 if dtype == "float16" else ()
    assert kept == {n for n, _ in half.named_parameters() if any(fnmatch(n, k) for k in keep)}

    expected = run_reference(exact, prompts(256))
    theirs = relative_l2(run_reference(half, prompts(256)), expected)
    model = load_ours(tmp_path, dtype, keep)
    assert model(mx.array(prompts(4))).dtype == DTYPES[dtype]
    # measured: 1.0 to 1.2 times the reference's own distance from float32
    assert relative_l2(run_ours(model, prompts(256)), expected) < 2 * theirs


def test_float16_survives_what_float16_cannot_hold(tmp_path):
    """Residuals of 1e6: fine where `wo` is float32, as transformers loads it."""
    exact = make_reference(tmp_path, size=3e5)
    expected = run_reference(exact, prompts(20))
    half = transformers.T5EncoderModel.from_pretrained(tmp_path, dtype=torch.float16)
    theirs = relative_l2(run_reference(half, prompts(20)), expected)
    ours = run_ours(load_ours(tmp_path, "float16", t5.KEEP_FLOAT32), prompts(20))
    assert relative_l2(ours, expected) < 2 * theirs < 0.02


def test_float16_everywhere_clamps_as_the_reference_does(tmp_path):
    """What pipeline.to(float16) makes of it: overflow becomes the largest number, not infinity."""
    make_reference(tmp_path, size=1e5, num_layers=1)
    half = transformers.T5EncoderModel.from_pretrained(tmp_path).half()
    expected = run_reference(half, prompts(20))
    ours = run_ours(load_ours(tmp_path, "float16"), prompts(20))
    # measured 1e-3; 7e-3 when clamped to 65504 instead of 64504
    assert relative_l2(ours, expected) < 3e-3


def read(raw):
    return read_config(t5.T5Config, raw, where="config.json", ignored=t5.IGNORED, fixed=t5.FIXED)


def test_config_of_every_generation_is_accounted_for():
    assert read(T5_XXL).num_layers == 24
    assert read(transformers.T5Config().to_dict()).feed_forward_proj == "relu"
    before_4_19 = {k: v for k, v in T5_XXL.items() if k not in ("dense_act_fn", "is_gated_act")}
    assert read(before_4_19).feed_forward_proj == "gated-gelu"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "umt5"}, "model_type"),  # a bias table in every block
        ({"dense_act_fn": "relu"}, "contradicts"),
        ({"is_gated_act": False}, "contradicts"),
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj"),
        ({"relative_attention_num_buckets": 31}, "makes no buckets"),
        ({"relative_attention_max_distance": 8}, "makes no buckets"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_config_we_cannot_run_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read(T5_XXL | change)
