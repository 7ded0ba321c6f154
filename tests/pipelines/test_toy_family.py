"""A family defined outside the package, in this one file, goes through every verb.

The toy has latents of three channels at a quarter of the size, predicts v under a noise table,
reads words without a tokenizer, and has a twin on torch. Both sides are found by entry points.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from click.testing import CliRunner, Result

from lydite.cli.main import lydite
from lydite.core.config import Count, Size
from lydite.core.request import Request
from lydite.models.vae.kl import Posterior
from lydite.pipelines.family import (
    BlockRule,
    Conditioning,
    Defaults,
    Family,
    LatentSpace,
    Run,
    TraceNames,
)
from lydite.pipelines.model import Component, Kind, Model
from lydite.pipelines.observer import Observer
from lydite.pipelines.picture import read_pixels
from lydite.reference.family import ReferenceFamily
from lydite.weights.load import save
from support import against_diffusers

WORDS, FACTOR, CHANNELS = 64, 4, 3
SCHEDULER = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
}


def word_ids(prompt: str) -> list[int]:
    """As many ids as there are words, and one more."""
    return [0, *(1 + crc32(word.encode()) % (WORDS - 1) for word in prompt.split())]


# The family on MLX


@dataclass(frozen=True)
class ToyConfig:
    width: Size = 16
    layers: Count = 2


class ToyText(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, config.width)

    def __call__(self, ids: mx.array) -> mx.array:
        return self.embed(ids).mean(axis=1)  # (1, D)


class ToyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ff = nn.Linear(width, width)

    def __call__(self, x: mx.array) -> mx.array:
        return x + mx.tanh(self.ff(x))


class ToyNetwork(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.proj_in = nn.Linear(CHANNELS, config.width)
        self.time = nn.Linear(1, config.width)
        self.text = nn.Linear(config.width, config.width)
        self.blocks = [ToyBlock(config.width) for _ in range(config.layers)]
        self.proj_out = nn.Linear(config.width, CHANNELS)

    def __call__(self, x: mx.array, t: mx.array, text: mx.array) -> mx.array:
        B, h, w, C = x.shape
        tokens = self.proj_in(x.reshape(B, h * w, C)) + (self.time(t) + self.text(text))[:, None]
        for block in self.blocks:
            tokens = block(tokens)
        return self.proj_out(tokens).reshape(B, h, w, C)


class ToyVAE(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.decoder = nn.Linear(CHANNELS, CHANNELS)

    def encode(self, image: mx.array) -> Posterior:
        B, H, W, _ = image.shape
        parts = image.reshape(B, H // FACTOR, FACTOR, W // FACTOR, FACTOR, CHANNELS)
        mean = parts.mean(axis=(2, 4))
        return Posterior(mean, mx.zeros_like(mean))

    def decode(self, latents: mx.array) -> mx.array:
        x = mx.tanh(self.decoder(latents))
        return mx.repeat(mx.repeat(x, FACTOR, axis=1), FACTOR, axis=2)

    def normalize(self, latents: mx.array) -> mx.array:
        return latents * 2

    def denormalize(self, latents: mx.array) -> mx.array:
        return latents / 2


KINDS = {
    "ToyText": Kind(ToyConfig, ToyText, ()),
    "ToyNetwork": Kind(ToyConfig, ToyNetwork, ()),
    "ToyVAE": Kind(ToyConfig, ToyVAE, ()),
}


def encode(
    model: Model, prompts: Sequence[str], request: Request, observer: Observer
) -> Conditioning:
    encoder = model.network("text_encoder")
    rows = [encoder(mx.array([word_ids(prompt)])) for prompt in prompts]  # each at its own length
    return {"words": mx.concatenate(rows)}


@dataclass(frozen=True)
class BoundToy:
    network: ToyNetwork
    words: mx.array
    batch: int

    def __call__(self, x: mx.array, timestep: float, prompts: int) -> mx.array:
        rows = mx.repeat(self.words[-prompts:], self.batch, axis=0)
        times = mx.full((len(rows), 1), timestep / 1000, dtype=rows.dtype)
        inputs = mx.concatenate([x] * prompts).astype(rows.dtype)
        return self.network(inputs, times, rows).astype(mx.float32)


def bind(
    model: Model, conditioning: Conditioning, run: Run, batch: int, observer: Observer
) -> BoundToy:
    return BoundToy(model.network("network"), conditioning["words"], batch)


def check(path: Path, components: Mapping[str, Component]) -> None:
    assert components["network"].config.width == components["text_encoder"].config.width


FAMILY = Family(
    name="toy",
    title="Toy",
    pipelines=frozenset({"ToyPipeline"}),
    kinds=KINDS,
    required=("text_encoder", "network", "vae"),
    network="network",
    encoders=("text_encoder",),
    tokenizers={},
    defaults=Defaults(steps=5, guidance=2.0),
    scheduler=SCHEDULER,
    check=check,
    latents=lambda model: LatentSpace(CHANNELS, FACTOR, 1, (32, 32), 64),
    encode=encode,
    bind=bind,
    names=TraceNames(
        channels_last=(("network", "*"), ("vae/decode", "*")),
        conditioning={"words": ("words", "b d")},
    ),
    blocks=(BlockRule(r"blocks\.\d+\.ff", {"in.0": "image", "out": "image"}),),
)


# The same on torch


def twin_class() -> type:
    import torch
    from diffusers import EulerDiscreteScheduler
    from safetensors.torch import load_file
    from torch import nn as tnn

    class Text(tnn.Module):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__()
            self.embed = tnn.Embedding(WORDS, config.width)

        def forward(self, ids: Any) -> Any:
            return self.embed(ids).mean(dim=1)

    class Block(tnn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.ff = tnn.Linear(width, width)

        def forward(self, x: Any) -> Any:
            return x + torch.tanh(self.ff(x))

    class Network(tnn.Module):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__()
            self.proj_in = tnn.Linear(CHANNELS, config.width)
            self.time = tnn.Linear(1, config.width)
            self.text = tnn.Linear(config.width, config.width)
            self.blocks = tnn.ModuleList([Block(config.width) for _ in range(config.layers)])
            self.proj_out = tnn.Linear(config.width, CHANNELS)

        def forward(self, x: Any, t: Any, text: Any) -> Any:
            B, C, h, w = x.shape
            tokens = self.proj_in(x.permute(0, 2, 3, 1).reshape(B, h * w, C))
            tokens = tokens + (self.time(t) + self.text(text))[:, None]
            for block in self.blocks:
                tokens = block(tokens)
            return self.proj_out(tokens).reshape(B, h, w, C).permute(0, 3, 1, 2)

    class VAE(tnn.Module):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__()
            self.decoder = tnn.Linear(CHANNELS, CHANNELS)

        def decode(self, latents: Any) -> Any:
            x = torch.tanh(self.decoder(latents.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
            return x.repeat_interleave(FACTOR, 2).repeat_interleave(FACTOR, 3)

    @dataclass
    class Images:
        images: Any

    class ToyPipeline:
        text_encoder: Any
        network: Any
        vae: Any

        def __init__(self, folder: Path, dtype: Any) -> None:
            for name, kind in (("text_encoder", Text), ("network", Network), ("vae", VAE)):
                config = json.loads((folder / name / "config.json").read_text())
                network = kind(ToyConfig(config["width"], config["layers"]))
                network.load_state_dict(load_file(folder / name / "model.safetensors"))
                setattr(self, name, network.to(dtype).eval())
            self.scheduler: Any = EulerDiscreteScheduler.from_config(SCHEDULER)

        @classmethod
        def from_pretrained(cls, folder: Path, dtype: Any, **_: Any) -> Any:
            return cls(Path(folder), dtype)

        def set_progress_bar_config(self, **_: Any) -> None: ...

        def __call__(self, words: Any, negative_words: Any, latents: Any, **call: Any) -> Images:
            self.scheduler.set_timesteps(call["num_inference_steps"])
            rows = words if negative_words is None else torch.cat([negative_words, words])
            x = latents * self.scheduler.init_noise_sigma
            for index, t in enumerate(self.scheduler.timesteps):
                inputs = torch.cat([self.scheduler.scale_model_input(x, t)] * len(rows))
                times = torch.full((len(rows), 1), float(t) / 1000, dtype=rows.dtype)
                parts = self.network(inputs.to(rows.dtype), times, rows).chunk(len(rows))
                guided = parts[0] + call["guidance_scale"] * (parts[-1] - parts[0])
                x = self.scheduler.step(parts[-1] if len(rows) == 1 else guided, t, x).prev_sample
                x = call["callback_on_step_end"](self, index, t, {"latents": x})["latents"]
            image = self.vae.decode((x / 2).to(rows.dtype)) / 2 + 0.5
            return Images(image.clamp(0, 1).permute(0, 2, 3, 1).float().numpy())

    return ToyPipeline


def twin_encode(
    pipeline: Any, prompts: Sequence[str], request: Request
) -> dict[str, tuple[Any, str]]:
    import torch

    rows = [pipeline.text_encoder(torch.tensor([word_ids(prompt)])) for prompt in prompts]
    return {"words": (torch.cat(rows), "b d")}


REFERENCE = ReferenceFamily(
    name="toy",
    pipeline_class=twin_class,
    networks=("text_encoder", "network", "vae"),
    optional=(),
    channels_first=("network", "vae/decode"),
    encode=twin_encode,
    arguments=lambda conditioning, request, guided: {
        "words": conditioning["words"][-1:],
        "negative_words": conditioning["words"][:1] if guided else None,
    },
    noise_shape=lambda pipeline, height, width: (1, CHANNELS, height // FACTOR, width // FACTOR),
)


# The tests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "toy"
    index: dict[str, Any] = {"_class_name": "ToyPipeline", "scheduler": ["diffusers", "Scheduler"]}
    for seed, (name, kind) in enumerate(
        {"text_encoder": "ToyText", "network": "ToyNetwork", "vae": "ToyVAE"}.items()
    ):
        mx.random.seed(seed)
        config = ToyConfig()
        index[name] = ["toy", kind]
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps({"width": 16, "layers": 2}))
        save(KINDS[kind].build(config), folder / name / "model.safetensors", ())
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """This file as another package's, found by its entry points in every process."""
    root = tmp_path_factory.mktemp("site")
    about = root / "toy-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    module = Path(__file__).stem
    (about / "entry_points.txt").write_text(
        f"[lydite.families]\ntoy = {module}:FAMILY\n"
        f"[lydite.reference_families]\ntoy = {module}:REFERENCE\n"
    )
    paths = [str(root), str(Path(__file__).parent)]
    with pytest.MonkeyPatch.context() as patch:
        for path in paths:
            patch.syspath_prepend(path)
            patch.setenv("PYTHONPATH", path, prepend=":")
        yield
    sys.modules.pop(module, None)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(lydite, [str(each) for each in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_it_draws_and_replays(model: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    assert run("generate", "two words", "-m", model, "-s", 3, "-o", first, "-q").exit_code == 0
    run("generate", "--from", first, "-m", model, "-o", again, "-q")
    assert np.array_equal(read_pixels(first), read_pixels(again))
    assert read_pixels(first).shape == (32, 32, 3) and read_pixels(first).std() > 5
    run("generate", "x", "-m", model, "-i", first, "--strength", 0.5, "-s", 1, "-o", again, "-q")
    other = tmp_path / "other.png"
    run("generate", "x", "-m", model, "--sampler", "dpmpp_2m", "-s", 1, "-o", other, "-q")
    assert other.exists()


def test_it_is_audited(model: Path, tmp_path: Path) -> None:
    assert run("audit", model).exit_code == 0
    (model / "vae" / "model.safetensors").rename(tmp_path / "aside")
    try:
        save(ToyText(ToyConfig()), model / "vae" / "model.safetensors", ())
        assert run("audit", model).exit_code == 1
    finally:
        (tmp_path / "aside").replace(model / "vae" / "model.safetensors")


def test_it_is_recorded_and_compared(model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        options = ("-s", 1, "--steps", 2, "-o", tmp_path / name, "-q")
        assert run("trace", "two words", "-m", model, *options).exit_code == 0
    result = run("diff", tmp_path / "one", tmp_path / "two", "--json")
    assert json.loads(result.output)["verdict"] == "agree"


@pytest.mark.parity
@pytest.mark.parametrize("guidance", [2.0, 1.0])
def test_it_agrees_with_its_twin(model: Path, guidance: float) -> None:
    """Once with the twin in a process of its own, which finds it by its entry point too."""
    pytest.importorskip("diffusers")
    options = ("--guidance", guidance, "--json", "-q")
    run_here = run if guidance == 2.0 else against_diffusers.run
    verdict = json.loads(run_here("parity", model, "two words", *options).output)
    assert verdict["verdict"] == "agree", verdict["sentence"]
    assert verdict["image"]["largest"] <= 1
    assert {each["name"] for each in verdict["components"]} >= {"network", "vae", "text_encoder"}


def test_it_is_calibrated(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("two words\nthree more words\n")
    options = ("--prompts", prompts, "--steps", 3, "--conditioning", "--out", tmp_path / "set")
    assert run("calibrate", "run", "-m", model, *options, "-q").exit_code == 0
    assert run("calibrate", "verify", tmp_path / "set").exit_code == 0
    statistics = ("activations", tmp_path / "set", "--out", tmp_path / "stats.sqlite", "-q")
    assert run("calibrate", *statistics).exit_code == 0
    blocks = ("blocks", tmp_path / "set", "--out", tmp_path / "blocks", "--tokens", 4, "-q")
    assert run("calibrate", *blocks).exit_code == 0
    status = json.loads(run("calibrate", "status", tmp_path / "blocks", "--json").output)
    assert status["items"] == {"sample": 6}
