"""Feature networks of metrics, loaded from the files that people have."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from lydite.core.checkpoint import open_checkpoint
from lydite.core.config import Size, read_config, read_json
from lydite.core.dtypes import mlx_to_numpy
from lydite.core.errors import ConfigError, FileError, InputError, WeightsError, at
from lydite.evaluate.resize import RESIZERS, ClipResizer, Pixels, Values, check_pixels
from lydite.models.features.clip_vision import CLIPModel, read_clip_config
from lydite.models.features.inception import InceptionV3
from lydite.models.features.lpips import LAYERS, SMALLEST, Backbone, Features, Heads
from lydite.tokenizers.tokenizer import load_clip_tokenizer
from lydite.weights.audit import TensorView, audit
from lydite.weights.load import load, parameter_hash, parameter_specs
from lydite.weights.maps import features as maps
from lydite.weights.rules import Rule

Kind = Literal["inception", "clip"]
Vectors = NDArray[np.float32]  # (N, D)
BATCH = 8  # pictures at a time, of those that are resized
PIXELS = 2**20  # at a time, of pictures that keep their size

# What is downloaded is a pickle, which is never read here.
_CONVERTED = "as a safetensors file (`lydite inspect FILE.pth` prints the command that converts it)"
INCEPTION_FILE = (
    "the Inception network of FID, pt_inception-2015-12-05-6726825d.pth of pytorch-fid "
    f"(github.com/mseitzer/pytorch-fid/releases, fid_weights), {_CONVERTED}"
)
CLIP_FOLDER = (
    "a CLIP model with both towers: download the folder of openai/clip-vit-large-patch14 from the "
    "Hugging Face hub, with model.safetensors, config.json, preprocessor_config.json and the "
    "tokenizer's files"
)
BACKBONE_FILES: Mapping[Backbone, str] = {
    "alex": "torchvision's AlexNet, alexnet-owt-7be5be79.pth (download.pytorch.org/models), "
    f"{_CONVERTED}",
    "vgg": f"torchvision's VGG16, vgg16-397923af.pth (download.pytorch.org/models), {_CONVERTED}",
}
HEADS_FILES: Mapping[Backbone, str] = {
    net: f"the heads of LPIPS for {net}, {net}.pth of version 0.1 "
    f"(github.com/richzhang/PerceptualSimilarity, lpips/weights/v0.1), {_CONVERTED}"
    for net in BACKBONE_FILES
}


@dataclass(frozen=True)
class FeatureNetwork:
    """A loaded network: pictures in bytes (N, H, W, 3) to named vectors."""

    name: str
    digest: str  # of the weights
    preprocess: str  # how pictures are resized
    prepare: Callable[[Pixels], Values]
    run: Callable[[mx.array], Mapping[str, mx.array]]
    tokenize: Callable[[str], NDArray[np.int32]] | None = None
    run_text: Callable[[mx.array], mx.array] | None = None

    def __call__(self, pixels: Pixels) -> dict[str, Vectors]:
        """inception: `pool3` (N, 2048), `spatial` (N, 2023), `logits` (N, 1008), without bias.

        clip: `image` (N, D), not normalised.
        """
        check_pixels(pixels)
        parts: dict[str, list[Vectors]] = {}
        for batch in _batches(len(pixels), BATCH):
            outputs = self.run(mx.array(self.prepare(pixels[batch])))
            mx.eval(*outputs.values())  # one batch's activations at a time
            for name, value in outputs.items():
                parts.setdefault(name, []).append(mlx_to_numpy(value.flatten(1)))
        return {name: np.concatenate(vectors) for name, vectors in parts.items()}

    def encode_text(self, prompts: Sequence[str]) -> Vectors:
        """Prompts to vectors (N, D) of the space of `image`, not normalised.

        What exceeds CLIP's 77 tokens is cut off.
        """
        if self.tokenize is None or self.run_text is None:
            raise InputError(f"{self.name}: has no text encoder. Load a CLIP folder.")
        vectors: list[Vectors] = []
        for batch in _batches(len(prompts), BATCH):
            ids = np.stack([self.tokenize(prompt) for prompt in prompts[batch]])
            vectors.append(mlx_to_numpy(self.run_text(mx.array(ids))))
        return np.concatenate(vectors)


def load_features(kind: Kind, path: Path, *, resize: str = "clean") -> FeatureNetwork:
    """FID's Inception from its file, or CLIP from its folder.

    `resize` is for Inception, by clean-fid's names: clean, legacy_tensorflow (torch-fidelity, ADM),
    legacy_pytorch (pytorch-fid). CLIP resizes as its folder says.
    """
    if kind == "inception":
        return _load_inception(path, resize)
    if kind == "clip":
        return _load_clip(path)
    raise InputError(f"feature network {kind!r}: expected inception or clip.")


def _load_inception(path: Path, resize: str) -> FeatureNetwork:
    if resize not in RESIZERS:
        raise InputError(f"resizing {resize!r}: expected {', '.join(RESIZERS)}.")
    model = _loaded(InceptionV3(), path, maps.INCEPTION, INCEPTION_FILE)

    def run(x: mx.array) -> dict[str, mx.array]:
        output = model(x)
        return {"pool3": output.pool, "spatial": output.spatial, "logits": output.logits}

    name = "inception-v3-compat"  # torch-fidelity's
    return FeatureNetwork(name, parameter_hash(model), resize, RESIZERS[resize], run)


def _load_clip(folder: Path) -> FeatureNetwork:
    if not folder.is_dir():
        raise FileError(f"{at(folder)}: no such folder. Expected {CLIP_FOLDER}.")
    config = folder / "config.json"
    text, vision = read_clip_config(read_json(config), where=at(config))
    prepare = _read_preprocessor(folder / "preprocessor_config.json", vision.image_size)
    tokenizer = load_clip_tokenizer(folder)
    if tokenizer.vocab_size > text.vocab_size:
        raise ConfigError(
            f"{at(folder)}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the text encoder {text.vocab_size}."
        )
    try:
        model = CLIPModel(text, vision)
    except OverflowError as error:  # sizes that only together are too large
        raise ConfigError(f"{at(config)}: no model can have this config ({error}).") from error
    _loaded(model, folder, maps.CLIP, CLIP_FOLDER)
    name = f"clip-{vision.num_hidden_layers}x{vision.hidden_size}-patch{vision.patch_size}"
    return FeatureNetwork(
        name,
        parameter_hash(model),
        f"clip bicubic {prepare.shortest_edge} crop {prepare.crop}",
        prepare,
        lambda x: {"image": model.encode_image(x)},
        tokenizer,
        model.encode_text,
    )


@dataclass(frozen=True, kw_only=True)
class PreprocessorConfig:
    """The keys of preprocessor_config.json that decide the pixels."""

    size: Size | dict[str, Size]
    crop_size: Size | dict[str, Size]
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]


_PREPROCESSOR_FIXED: Mapping[str, Any] = {
    "do_resize": True,
    "do_center_crop": True,
    "do_rescale": True,
    "do_normalize": True,
    "default_to_square": False,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
_PREPROCESSOR_IGNORED = frozenset(
    {
        "data_format",
        "do_convert_rgb",
        "feature_extractor_type",
        "image_processor_type",
        "processor_class",
    }
)


def _read_preprocessor(path: Path, image_size: int) -> ClipResizer:
    raw = {key: value for key, value in read_json(path).items() if value is not None}
    config = read_config(
        PreprocessorConfig,
        raw,
        where=at(path),
        ignored=_PREPROCESSOR_IGNORED,
        fixed=_PREPROCESSOR_FIXED,
    )
    size = config.size if isinstance(config.size, int) else config.size.get("shortest_edge")
    crop = config.crop_size
    height, width = (
        (crop, crop) if isinstance(crop, int) else (crop.get("height"), crop.get("width"))
    )
    if size is None or (height, width) != (image_size, image_size) or size < image_size:
        raise ConfigError(
            f"{at(path)}: size {config.size}, crop_size {config.crop_size}; expected a crop of "
            f"{image_size}, the model's, and a shortest_edge of at least that."
        )
    return ClipResizer(size, image_size, config.image_mean, config.image_std)


@dataclass(frozen=True)
class Lpips:
    """A loaded LPIPS, version 0.1."""

    name: str
    digest: str  # of backbone and heads
    net: Backbone
    features: Features
    heads: Heads

    def __call__(self, first: Pixels, second: Pixels) -> NDArray[np.float32]:
        """The distance of each pair of pictures in bytes (N, H, W, 3): (N,)."""
        for pixels in (first, second):
            check_pixels(pixels)
        if first.shape != second.shape:
            raise InputError(f"{self.name}: pictures of {first.shape} against {second.shape}.")
        height, width = first.shape[1:3]
        if min(height, width) < SMALLEST[self.net]:
            raise InputError(
                f"{self.name}: pictures of {width}×{height}; expected at least "
                f"{SMALLEST[self.net]} pixels in each direction."
            )
        distances: list[NDArray[np.float32]] = []
        for batch in _batches(len(first), max(1, PIXELS // (height * width))):
            activations = [
                self.features(mx.array(pixels[batch]).astype(mx.float32) / 127.5 - 1)
                for pixels in (first, second)
            ]
            distances.append(mlx_to_numpy(self.heads(*activations)))
        return np.concatenate(distances)


def load_lpips(net: Backbone, backbone: Path, heads: Path) -> Lpips:
    """LPIPS from torchvision's file of the backbone and lpips' file of the heads."""
    if net not in LAYERS:
        raise InputError(f"LPIPS backbone {net!r}: expected {' or '.join(LAYERS)}.")
    features = _loaded(Features(net), backbone, maps.LPIPS_BACKBONE, BACKBONE_FILES[net])
    weights = _loaded(Heads(net), heads, maps.LPIPS_HEADS, HEADS_FILES[net])
    parts = parameter_hash(features) + parameter_hash(weights)
    digest = hashlib.sha256(parts.encode()).hexdigest()
    return Lpips(f"lpips-{net}-0.1", digest, net, features, weights)


M = TypeVar("M", bound=nn.Module)


def _loaded(model: M, path: Path, rules: Sequence[Rule], expected: str) -> M:
    """`model` with its weights in float32; errors say which file is expected."""
    if not path.exists():
        raise FileError(f"{at(path)}: no such file. Expected {expected}.")
    with open_checkpoint(path) as checkpoint:
        view, where = TensorView(checkpoint), at(path)
        ledger = audit(view, parameter_specs(model), rules, where=where)
        wrong = {name: rows for name in ledger.WRONG if (rows := getattr(ledger, name))}
        if wrong:
            counts = ", ".join(
                f"{len(rows)} {name.replace('_', ' ')} ({rows[0].tensor:.100}, …)"
                for name, rows in wrong.items()
            )
            raise WeightsError(f"{where}: not the expected tensors: {counts}. Expected {expected}.")
        load(model, view, rules, where=where, dtype=mx.float32)
    return model


def _batches(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
