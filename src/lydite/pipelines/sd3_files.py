"""The parts of a Stable Diffusion 3 checkpoint, found and held against each other."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lydite.core.errors import ConfigError, FileError
from lydite.core.jsonfile import read_json
from lydite.pipelines import single_file
from lydite.pipelines.catalog import find_components
from lydite.pipelines.components import Component
from lydite.sampling.schedules import FlowMatchConfig, read_flow_config
from lydite.tokenizers.tokenizer import Tokenizer, load_clip_tokenizer, load_t5_tokenizer

PIPELINES = frozenset({"StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline"})
NEEDED = ("transformer", "vae", "text_encoder", "text_encoder_2")
SD3_SCHEDULER = FlowMatchConfig(num_train_timesteps=1000, shift=3.0)  # a single file carries none


@dataclass(frozen=True)
class SD3Files:
    """Networks, schedule and tokenizers of one checkpoint."""

    path: Path
    components: dict[str, Component]
    scheduler: FlowMatchConfig
    tokenizers: dict[str, Path]  # encoder -> folder of its tokenizer

    def tokenizer(self, encoder: str, length: int | None = None) -> Tokenizer:
        """The tokenizer that feeds `encoder`; `length` is T5's number of tokens."""
        if encoder == "text_encoder_3":
            return _t5(self.tokenizers[encoder], length or 256)
        return _clip(self.tokenizers[encoder])


def open_files(path: Path, extra: Path | None = None) -> SD3Files:
    """Find every part of the checkpoint at `path`; parts it lacks come from the folder `extra`."""
    folders = [folder for folder in (path, extra) if folder and folder.is_dir()]
    if path.is_dir():
        _require_sd3(path)
    components = find_components(path)
    if not path.is_dir():
        single_file.leftovers(path).require_clean()
    if extra:
        components = {**find_components(extra), **components}
    missing = [name for name in NEEDED if name not in components]
    if missing:
        raise FileError(
            f"{path}: has no {', '.join(missing)}. Name a diffusers folder that has "
            "with --components FOLDER."
        )
    tokenizers = {
        encoder: _first(folders, encoder.replace("text_encoder", "tokenizer"), path)
        for encoder in ("text_encoder", "text_encoder_2", "text_encoder_3")
        if encoder in components
    }
    scheduler = SD3_SCHEDULER
    if path.is_dir():
        config = path / "scheduler" / "scheduler_config.json"
        scheduler = read_flow_config(read_json(config), where=config)
    _check_widths(path, components)
    return SD3Files(path, components, scheduler, tokenizers)


def _require_sd3(folder: Path) -> None:
    index = folder / "model_index.json"
    if not index.exists():
        raise FileError(
            f"{folder}: no model_index.json here; expected a whole pipeline in diffusers' layout."
        )
    class_name = read_json(index).get("_class_name")
    if class_name not in PIPELINES:
        raise ConfigError(
            f"{index}: _class_name is {class_name!r}; supported: {sorted(PIPELINES)}."
        )


def _first(folders: list[Path], name: str, path: Path) -> Path:
    for folder in folders:
        if (folder / name).is_dir():
            return folder / name
    raise FileError(
        f"{path}: has no {name}. Name a diffusers folder that has with --components FOLDER."
    )


def _check_widths(path: Path, components: dict[str, Component]) -> None:
    """The text encoders and the VAE have to fit the transformer they feed."""
    transformer = components["transformer"].config
    clips = [components[name].config for name in ("text_encoder", "text_encoder_2")]
    if any(clip.projection_dim is None for clip in clips):
        raise ConfigError(f"{path}: a text encoder's config has no projection_dim.")
    facts = {
        "pooled_projection_dim": (
            transformer.pooled_projection_dim,
            sum(clip.projection_dim for clip in clips),
            "the two text encoders' pooled outputs together",
        ),
        "in_channels": (
            transformer.in_channels,
            components["vae"].config.latent_channels,
            "the VAE's latent channels",
        ),
    }
    if "text_encoder_3" in components:
        facts["joint_attention_dim"] = (
            transformer.joint_attention_dim,
            components["text_encoder_3"].config.d_model,
            "T5's width",
        )
    for key, (expected, found, what) in facts.items():
        if expected != found:
            raise ConfigError(f"{path}: transformer has {key} {expected}, but {what} is {found}.")
    widths = sum(clip.hidden_size for clip in clips)
    if widths > transformer.joint_attention_dim:
        raise ConfigError(
            f"{path}: the two CLIP widths together are {widths}, more than the transformer's "
            f"joint_attention_dim {transformer.joint_attention_dim}."
        )


@lru_cache(maxsize=8)
def _clip(folder: Path) -> Tokenizer:
    return load_clip_tokenizer(folder)


@lru_cache(maxsize=8)
def _t5(folder: Path, length: int) -> Tokenizer:
    return load_t5_tokenizer(folder, max_length=length)
