"""The network classes we have, and one network of a checkpoint ready to be audited or loaded."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lydite.core.checkpoint import open_checkpoint
from lydite.core.config import read_config
from lydite.core.errors import ConfigError, InputError, shown
from lydite.core.jsonfile import read_json
from lydite.models.mmdit import MMDiT, MMDiTConfig
from lydite.models.text import clip, t5
from lydite.models.vae import kl
from lydite.weights.audit import audit
from lydite.weights.checks import check_values
from lydite.weights.layout import Shape
from lydite.weights.load import load, parameter_specs
from lydite.weights.maps import mmdit as mmdit_map
from lydite.weights.maps import text as text_map
from lydite.weights.maps import vae as vae_map
from lydite.weights.rules import Rule
from lydite.weights.tensor_view import TensorView


@dataclass(frozen=True)
class Kind:
    """One network class: how its config is read, how it is built, which names its files use."""

    config: type[Any]
    build: Callable[[Any], nn.Module]
    rules: tuple[Rule, ...]
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] | None = None
    keep_float32: tuple[str, ...] = ()  # when the rest runs in float16


@dataclass(frozen=True)
class Component:
    """One network of a checkpoint, ready to be audited or loaded."""

    name: str
    path: Path
    kind: Kind
    config: Any
    rules: tuple[Rule, ...]
    prefix: str = ""  # of its tensors, in a file that holds several networks

    @property
    def where(self) -> str:
        return f"{self.path} ({self.name})" if self.prefix else str(self.path)

    @contextmanager
    def scope(self) -> Generator[TensorView]:
        """Its tensors, by the names its rules know."""
        with open_checkpoint(self.path) as checkpoint:
            yield TensorView(checkpoint, self.prefix)

    def empty(self) -> nn.Module:
        """The network with placeholder parameters; nothing is evaluated."""
        return _build(self.kind.build, self.config, self.where)

    @property
    def expected(self) -> Mapping[str, Shape]:
        """Path and shape of every parameter."""
        return _expected(self.kind.build, self.config, self.where)

    def check(self) -> None:
        """Audit names, shapes, dtypes and values without loading; WeightsError when not clean."""
        with self.scope() as scope:
            ledger = audit(scope, self.expected, self.rules, where=self.where)
            ledger.require_clean()
            check_values(ledger, scope, self.rules).require_clean()

    def load(self, dtype: mx.Dtype) -> nn.Module:
        """The network with its weights, or WeightsError."""
        model = self.empty()
        keep = self.kind.keep_float32 if dtype == mx.float16 else ()
        with self.scope() as scope:
            load(model, scope, self.rules, where=self.where, dtype=dtype, keep_float32=keep)
        return model


KINDS: dict[str, Kind] = {
    "SD3Transformer2DModel": Kind(MMDiTConfig, MMDiT, mmdit_map.DIFFUSERS),
    "AutoencoderKL": Kind(
        kl.AutoencoderKLConfig, kl.AutoencoderKL, vae_map.DIFFUSERS, kl.IGNORED, kl.FIXED
    ),
    "CLIPTextModel": Kind(
        clip.CLIPTextConfig,
        lambda config: clip.CLIPTextModel(config, projection=False),
        text_map.CLIP,
        clip.IGNORED,
        clip.FIXED,
    ),
    "CLIPTextModelWithProjection": Kind(
        clip.CLIPTextConfig,
        lambda config: clip.CLIPTextModel(config, projection=True),
        text_map.CLIP,
        clip.IGNORED,
        clip.FIXED,
    ),
    "T5EncoderModel": Kind(
        t5.T5Config, t5.T5EncoderModel, text_map.T5, t5.IGNORED, t5.FIXED, t5.KEEP_FLOAT32
    ),
}


def folder_component(
    folder: Path,
    name: str | None = None,
    weights: Path | None = None,
    class_name: str | None = None,
) -> Component:
    """The network in one component's folder.

    `weights` names one file of it; `class_name` is what model_index.json says, which goes before
    what the network's own config says.
    """
    path = folder / "config.json"
    raw = read_json(path)
    found = class_name or raw.get("_class_name") or raw.get("architectures")
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(found, str) or found not in KINDS:
        raise ConfigError(
            f"{path}: the class is {shown(found)}; supported are {', '.join(sorted(KINDS))}."
        )
    kind = KINDS[found]
    config = read_config(kind.config, raw, where=path, ignored=kind.ignored, fixed=kind.fixed)
    return Component(name or folder.resolve().name, weights or folder, kind, config, kind.rules)


def _build(build: Callable[[Any], nn.Module], config: Any, where: str) -> nn.Module:
    try:
        return build(config)
    except (OverflowError, InputError) as error:  # sizes that only together are too large
        raise ConfigError(f"{where}: no model can have this config ({error}).") from error


@lru_cache(maxsize=8)  # an audit asks several times
def _expected(build: Callable[[Any], nn.Module], config: Any, where: str) -> Mapping[str, Shape]:
    return parameter_specs(_build(build, config, where))
