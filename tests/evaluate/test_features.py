"""Feature networks against their originals, with random weights, from pixels to vectors."""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from lydite.core.errors import ConfigError, FileError, InputError, WeightsError
from lydite.evaluate.features import load_features, load_lpips
from lydite.models.features.clip_vision import read_clip_config
from lydite.models.features.lpips import SMALLEST
from support.distance import relative_l2
from support.no_torchvision import FOLDER, import_lpips, import_reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file
transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.parity

TOLERANCE = 1e-5  # fp32; measured at most 1e-6


def pictures(count: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth colours with noise on them."""
    random = np.random.default_rng(seed)
    coarse = random.uniform(0, 255, (count, 4, 4, 3))
    rows = np.linspace(0, 3.99, height).astype(int)
    columns = np.linspace(0, 3.99, width).astype(int)
    noise = random.normal(0, 20, (count, height, width, 3))
    return (coarse[:, rows][:, :, columns] + noise).clip(0, 255).astype(np.uint8)


def channels_first(pixels: np.ndarray) -> Any:
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())


def randomize(model: Any, seed: int = 0) -> Any:
    """Weights that keep the size of activations; statistics of batch norms off 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("num_batches_tracked"):
            continue
        if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
            tensor.copy_(1 + 0.3 * noise.tanh())
        elif tensor.ndim < 2:
            tensor.copy_(0.2 * noise)
        else:
            tensor.copy_(noise * (2 / tensor[0].numel()) ** 0.5)
    return model.eval()


def save_state(model: Any, path: Path) -> Path:
    save_file({name: value.clone() for name, value in model.state_dict().items()}, path)
    return path


@pytest.fixture(scope="module")
def inception(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """torch-fidelity's network with random weights, and their file."""
    kind = import_reference("torch_fidelity.feature_extractor_inceptionv3")
    features = ["2048", "logits_unbiased"]
    with (
        patch.object(kind, "load_state_dict_from_url"),
        patch.object(kind.FeatureExtractorInceptionV3, "load_state_dict"),
    ):
        model = kind.FeatureExtractorInceptionV3("inception-v3-compat", features)
    path = tmp_path_factory.mktemp("inception") / "inception.safetensors"
    return randomize(model), save_state(model, path)


def test_inception_matches_torch_fidelity(inception: tuple[Any, Path]) -> None:
    reference, path = inception
    pixels = pictures(2, 61, 87)
    spatial: list[Any] = []
    branch = reference.Mixed_6d.branch1x1  # TensorFlow's mixed_6/conv, which ADM takes for sFID
    hook = branch.register_forward_hook(lambda module, inputs, output: spatial.append(output))
    with torch.no_grad():
        pool, logits = reference(channels_first(pixels))
    hook.remove()
    network = load_features("inception", path, resize="legacy_tensorflow")
    ours = network(pixels)
    assert {name: value.shape for name, value in ours.items()} == {
        "pool3": (2, 2048),
        "spatial": (2, 2023),
        "logits": (2, 1008),
    }
    seven = spatial[0][:, :7].permute(0, 2, 3, 1).flatten(1)
    for name, expected in {"pool3": pool, "spatial": seven, "logits": logits}.items():
        assert ours[name].dtype == np.float32
        assert relative_l2(ours[name], expected.numpy()) < TOLERANCE, name
        assert expected.numpy().std() > 0.01  # else any constant would do
    assert network.preprocess == "legacy_tensorflow"
    assert len(network.digest) == 64


def vision_table(widths: list[int | tuple[int, int, int, int] | str], pool: int) -> Any:
    """`features` as torchvision publishes it: a width is a 3 × 3 convolution, "M" a pool."""
    layers: list[Any] = []
    before = 3
    for entry in widths:
        if entry == "M":
            layers.append(torch.nn.MaxPool2d(pool, 2))
            continue
        shape = entry if isinstance(entry, tuple) else (entry, 3, 1, 1)
        layers += [torch.nn.Conv2d(before, *shape), torch.nn.ReLU(inplace=True)]
        before = shape[0]
    model = torch.nn.Module()
    model.features = torch.nn.Sequential(*layers)
    return randomize(model)


ALEXNET = [(64, 11, 4, 2), "M", (192, 5, 1, 2), "M", 384, 256, 256, "M"]
VGG16 = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", *[512, 512, 512, "M"] * 2]
NETWORKS = {
    "alexnet": lambda **options: vision_table(ALEXNET, 3),
    "vgg16": lambda **options: vision_table(VGG16, 2),
}


@pytest.mark.parametrize(("net", "torchvision_name"), [("alex", "alexnet"), ("vgg", "vgg16")])
def test_lpips_matches_lpips(tmp_path, monkeypatch, net, torchvision_name) -> None:
    lpips = import_lpips(monkeypatch, **NETWORKS)
    reference = lpips.LPIPS(net=net, verbose=False)  # the heads are the published ones
    backbone = NETWORKS[torchvision_name]()
    backbone.classifier = torch.nn.Linear(3, 5)
    heads = tmp_path / "heads.safetensors"
    state = {name: value for name, value in reference.state_dict().items() if name[:3] == "lin"}
    save_file({name: value for name, value in state.items() if name[:4] != "lins"}, heads)
    ours = load_lpips(net, save_state(backbone, tmp_path / "backbone.safetensors"), heads)
    for height, width in ((64, 64), (67, 45), (SMALLEST[net], SMALLEST[net])):
        first, second = pictures(2, height, width), pictures(2, height, width, seed=1)
        second[1] = first[1]  # one pair is equal
        a, b = (channels_first(pixels).float() / 127.5 - 1 for pixels in (first, second))
        with torch.no_grad():
            expected = reference(a, b).flatten().numpy()
        found = ours(first, second)
        assert found.dtype == np.float32
        assert expected[0] > 1e-3
        assert relative_l2(found, expected) < TOLERANCE
        assert found[1] == 0
    with pytest.raises(InputError, match="at least"):
        ours(first[:, :-1], second[:, :-1])
    with pytest.raises(InputError, match="against"):
        ours(first, second[:1])


TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 600}
VISION = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3}
SIZES = {"image_size": 32, "patch_size": 8}
PROMPTS = ["a red star", "", "the fox of snow in a blue ring " * 20]


def write_tokenizer(folder: Path) -> None:
    """Bytes and nothing merged: the smallest vocabulary that every text has ids in."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def make_clip(folder: Path, **options: Any) -> Any:
    """A transformers model with random weights and its processor, saved in `folder`."""
    end = 2 * 256 + 1
    model = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**TEXT, "num_hidden_layers": 2, "eos_token_id": end, **options},
            vision_config={**VISION, **SIZES, "num_hidden_layers": 2, **options},
            projection_dim=40,
        )
    )
    randomize(model).save_pretrained(folder)
    write_tokenizer(folder)
    processor(size={"shortest_edge": 36}, crop_size=32).save_pretrained(folder)
    return model


def processor(**options: Any) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return CLIPImageProcessorPil(**options)


@pytest.mark.parametrize("hidden_act", ["quick_gelu", "gelu"])
def test_clip_matches_transformers(tmp_path: Path, hidden_act: str) -> None:
    reference = make_clip(tmp_path, hidden_act=hidden_act)
    tokenizer = transformers.CLIPTokenizer.from_pretrained(tmp_path)
    network = load_features("clip", tmp_path)
    for height, width in ((32, 32), (45, 71), (200, 50)):
        pixels = pictures(2, height, width)
        values = processor(size={"shortest_edge": 36}, crop_size=32)(
            list(pixels), return_tensors="pt"
        )
        with torch.no_grad():
            expected = reference.get_image_features(**values).pooler_output.numpy()
        assert relative_l2(network(pixels)["image"], expected) < TOLERANCE
    ids = tokenizer(
        PROMPTS, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        text = reference.get_text_features(ids["input_ids"]).pooler_output.numpy()
    assert relative_l2(network.encode_text(PROMPTS), text) < TOLERANCE


def test_clip_config_in_the_form_of_the_published_files(tmp_path: Path) -> None:
    """They repeat a tower's keys in a dict, and the sizes of pictures are plain numbers."""
    reference = make_clip(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    text, vision = raw["text_config"], raw["vision_config"]
    del vision["hidden_act"], vision["layer_norm_eps"]  # transformers' own values
    raw["text_config_dict"] = {key: text[key] for key in [*TEXT, "num_hidden_layers"]}
    raw["text_config_dict"]["eos_token_id"] = text.pop("eos_token_id")
    text["hidden_size"] = 1  # the dict goes first
    (tmp_path / "config.json").write_text(json.dumps(raw))
    old = {"crop_size": 32, "size": 32, "resample": 3, "do_resize": True, "do_normalize": True}
    old |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "do_center_crop": True}
    old |= {"feature_extractor_type": "CLIPFeatureExtractor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old))
    pixels = pictures(1, 32, 32)
    network = load_features("clip", tmp_path)
    values = (channels_first(pixels) / 255 - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / (
        torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    )
    with torch.no_grad():
        expected = reference.get_image_features(values).pooler_output.numpy()
    assert relative_l2(network(pixels)["image"], expected) < TOLERANCE

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old | {"resample": 2}))
    with pytest.raises(ConfigError, match="resample"):
        load_features("clip", tmp_path)


@pytest.mark.parametrize("tower", ["text_config", "vision_config"])
@pytest.mark.parametrize("old", [None, {}, {"num_attention_heads": 4, "hidden_size": 64}])
def test_towers_are_merged_as_transformers_merges_them(tower: str, old: Any) -> None:
    newer = {"num_hidden_layers": 3, "hidden_size": 96, "layer_norm_eps": 1e-3}
    raw = {"model_type": "clip", tower: newer, f"{tower}_dict": old}
    found = read_clip_config(raw, where="here")[tower == "vision_config"]
    expected = getattr(transformers.CLIPConfig(**raw), tower)  # changes raw
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "layer_norm_eps"):
        assert getattr(found, key) == getattr(expected, key), key


def test_a_missing_file_names_the_download(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.safetensors"
    with pytest.raises(FileError, match=r"no such file.*pt_inception-2015-12-05"):
        load_features("inception", nothing)
    with pytest.raises(FileError, match=r"no such folder.*clip-vit-large-patch14"):
        load_features("clip", nothing)
    with pytest.raises(FileError, match=r"no such file.*alexnet-owt"):
        load_lpips("alex", nothing, nothing)


def test_another_network_is_refused_with_the_name_of_the_right_one(tmp_path: Path) -> None:
    path = save_state(NETWORKS["alexnet"](), tmp_path / "alexnet.safetensors")
    with pytest.raises(WeightsError, match=r"missing.*Expected the Inception network of FID"):
        load_features("inception", path)
    with pytest.raises(WeightsError, match=r"wrong shape.*vgg16-397923af"):
        load_lpips("vgg", path, path)
    with pytest.raises(WeightsError, match=r"missing.*lpips/weights/v0\.1"):
        load_lpips("alex", path, path)


def test_a_pth_file_loads_after_the_command_of_its_message(tmp_path, monkeypatch) -> None:
    """The heads as lpips ships them, of 2018."""
    source = tmp_path / "alex.pth"
    if not FOLDER.is_dir():
        pytest.skip(f"lpips is not installed in {FOLDER.name}")
    source.write_bytes((FOLDER / "lpips/weights/v0.1/alex.pth").read_bytes())
    backbone = save_state(NETWORKS["alexnet"](), tmp_path / "alexnet.safetensors")
    with pytest.raises(FileError, match="Convert it to safetensors") as refused:
        load_lpips("alex", backbone, source)
    _, _, code, *arguments = shlex.split(re.findall(r"python -c .*", str(refused.value))[0])
    monkeypatch.setattr(sys, "argv", ["-c", *arguments])
    exec(code, {})  # in this process, where torch is loaded already
    load_lpips("alex", backbone, source.with_suffix(".safetensors"))


def test_what_is_no_batch_of_pictures_is_refused(tmp_path: Path) -> None:
    make_clip(tmp_path)
    network = load_features("clip", tmp_path)
    wrongs: list[Any] = [np.zeros((2, 32, 32, 4), np.uint8), np.zeros((2, 32, 32, 3), np.float32)]
    for wrong in wrongs:
        with pytest.raises(InputError, match="expected bytes of shape"):
            network(wrong)
    with pytest.raises(InputError, match="legacy_pytorch"):
        load_features("inception", tmp_path, resize="legacy")
    other: Any = "dino"
    with pytest.raises(InputError, match="expected inception or clip"):
        load_features(other, tmp_path)
    with pytest.raises(InputError, match="alex or vgg"):
        load_lpips(other, tmp_path, tmp_path)
    with pytest.raises(InputError, match="no text encoder"):
        replace(network, tokenize=None).encode_text(["a"])


@pytest.mark.parametrize(
    "change",
    [{"crop_size": 31}, {"crop_size": {"height": 32, "width": 31}}, {"size": 31}, {"size": {}}],
)
def test_a_crop_that_is_not_the_models_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    make_clip(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match="crop"):
        load_features("clip", tmp_path)


def test_a_text_encoder_has_an_id_for_every_token(tmp_path: Path) -> None:
    make_clip(tmp_path)  # its tokenizer has 514
    config = json.loads((tmp_path / "config.json").read_text())
    for tokens, error in ((513, ConfigError), (514, WeightsError)):  # of weights for 600
        config["text_config"]["vocab_size"] = tokens
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(error) as caught:
            load_features("clip", tmp_path)
        said = f"the tokenizer has 514 tokens, the text encoder {tokens}"
        assert (said in str(caught.value)) == (tokens == 513)
