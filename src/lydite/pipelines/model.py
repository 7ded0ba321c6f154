"""One model: the networks of a checkpoint, loaded when used, its tokenizers and its scheduler.

Which networks make up a model, and how they work together, is the business of its family.
"""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from lydite.core.checkpoint import open_checkpoint
from lydite.core.config import read_config, read_json
from lydite.core.errors import ConfigError, InputError, WeightsError, first_of, shown
from lydite.models import kernels
from lydite.models.layers import (
    FLOAT_PRODUCTS,
    input_products,
    join_weights,
    on_cpu,
    round_inputs,
)
from lydite.pipelines.textual_inversion import Embedding, with_vectors
from lydite.tokenizers.templates import TemplateTokenizer
from lydite.tokenizers.tokenizer import Tokenizer
from lydite.weights.audit import TensorView, audit, check_values, stored
from lydite.weights.load import add_changes, load, parameter_specs
from lydite.weights.lora import Lora, changes
from lydite.weights.quantized_format import RANGE, Formats, contradictions, formats_for
from lydite.weights.rules import Rule, Shape

DTYPES = ("float32", "bfloat16", "float16")
AnyTokenizer = Tokenizer | TemplateTokenizer
LoadTokenizer = Callable[[Path, int | None], AnyTokenizer]  # folder, length where it can be chosen


@dataclass(frozen=True)
class Kind:
    """One network class: how its config is read, how it is built, which names its files use."""

    config: type[Any]
    build: Callable[[Any], nn.Module]
    rules: tuple[Rule, ...]
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] | None = None
    keep_float32: tuple[str, ...] = ()  # when the rest runs in float16
    flat: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict  # the keys of a nested config
    quantized: bool = False  # its linears are rounded where a model is loaded in few bits


@dataclass(frozen=True)
class Component:
    """One network of a checkpoint, ready to be audited or loaded."""

    name: str
    path: Path
    kind: Kind
    config: Any
    rules: tuple[Rule, ...]
    prefix: str = ""  # of its tensors, in a file that holds several networks
    declared: Mapping[str, Any] | None = None  # `quantization` of its config.json

    @property
    def where(self) -> str:
        return f"{self.path} ({self.name})" if self.prefix else str(self.path)

    @contextmanager
    def scope(self) -> Generator[TensorView]:
        """Its tensors, by the names its rules know."""
        with open_checkpoint(self.path) as checkpoint:
            yield TensorView(checkpoint, self.prefix)

    @property
    def expected(self) -> Mapping[str, Shape]:
        """Path and shape of every parameter."""
        return _expected(self.kind.build, self.config, self.where)

    def check(self) -> None:
        """Audit names, shapes, dtypes and values without loading; WeightsError when not clean."""
        self.check_declared()
        with self.scope() as scope:
            ledger = audit(scope, self.expected, self.rules, where=self.where)
            ledger.require_clean()
            check_values(ledger, scope, self.rules).require_clean()

    def load(self, dtype: mx.Dtype, bits: int | None = None) -> nn.Module:
        """The network with its weights, or WeightsError."""
        self.check_declared()
        model = _build(self.kind.build, self.config, self.where)
        keep = self.kind.keep_float32 if dtype == mx.float16 else ()
        with self.scope() as scope:
            load(
                model,
                scope,
                self.rules,
                where=self.where,
                dtype=dtype,
                keep_float32=keep,
                formats=self._rounded(bits),
            )
        if self.rounds_inputs:
            round_inputs(model)
        return model

    @cached_property
    def formats(self) -> Formats:
        """How its file stores the weights that are quantized."""
        with self.scope() as scope:
            return stored(scope, self.expected, self.rules).formats

    @property
    def rounds_inputs(self) -> bool:
        """Whether its config says that inputs are rounded to the format of the weights."""
        return (self.declared or {}).get("quantize_input") is True

    def rounding_of_inputs(self) -> str | None:
        """How the inputs of its linears are rounded on this device, in words."""
        modes = {each.mode for each in self.formats.values()} & set(FLOAT_PRODUCTS)
        if self.rounds_inputs and modes:
            mode = min(modes)
            if input_products(modes) == "mx.qqmm":
                return f"activations are rounded to {mode} by the products of this device."
            return f"activations in {mode} are simulated: this device has no such products."
        if any(RANGE in each.extras for each in self.formats.values()):
            return "activations in few bits are simulated: products are computed with floats."
        return None

    def check_declared(self) -> None:
        """WeightsError where the config says one quantization and the file holds another."""
        if self.declared is not None and (wrong := contradictions(self.declared, self.formats)):
            raise WeightsError(f"{self.where}: {first_of(wrong, 3, '; ')}.")

    @property
    def widens(self) -> bool:
        """Whether the network runs in float32 where the others run in float16.

        A VAE does, because of its range, unless its config denies it (`force_upcast`).
        """
        return self.name == "vae" and getattr(self.config, "force_upcast", True)

    def nbytes(self, dtype: mx.Dtype, bits: int | None = None) -> int:
        """What its parameters take in memory."""
        formats, total = self.formats or self._rounded(bits), 0
        keep = self.kind.keep_float32 if dtype == mx.float16 else ()
        for path, shape in self.expected.items():
            size = 4 if any(fnmatchcase(path, pattern) for pattern in keep) else dtype.size
            total += formats[path].nbytes(shape, size) if path in formats else prod(shape) * size
        return total

    def _rounded(self, bits: int | None) -> Formats:
        """The weights that are rounded while they are read."""
        return formats_for(bits, self.expected) if bits and self.kind.quantized else {}


def folder_component(
    folder: Path,
    kinds: Mapping[str, Kind],
    name: str | None = None,
    weights: Path | None = None,
    class_name: str | None = None,
) -> Component:
    """The network in one component's folder.

    `weights` names one file of it; `class_name` is what model_index.json says, which has precedence
    over the network's own config.
    """
    path = folder / "config.json"
    raw = read_json(path)
    declared = class_name or raw.get("_class_name") or raw.get("architectures")
    declared = declared[0] if isinstance(declared, list) and len(declared) == 1 else declared
    if not isinstance(declared, str) or declared not in kinds:
        raise ConfigError(
            f"{path}: the class is {shown(declared)}; supported are {', '.join(sorted(kinds))}."
        )
    kind = kinds[declared]
    quantization = raw.pop("quantization", None)
    if quantization is not None and not isinstance(quantization, dict):
        raise ConfigError(f"{path}: quantization is {shown(quantization)}; expected an object.")
    raw = kind.flat(raw)
    config = read_config(kind.config, raw, where=path, ignored=kind.ignored, fixed=kind.fixed)
    return Component(
        name or os.path.basename(os.path.realpath(folder)),
        weights or folder,
        kind,
        config,
        kind.rules,
        declared=quantization,
    )


def _build(build: Callable[[Any], nn.Module], config: Any, where: str) -> nn.Module:
    try:
        return build(config)
    except (OverflowError, InputError) as error:  # sizes that only together are too large
        raise ConfigError(f"{where}: no model can have this config ({error}).") from error


@lru_cache(maxsize=8)  # an audit asks several times
def _expected(build: Callable[[Any], nn.Module], config: Any, where: str) -> Mapping[str, Shape]:
    return parameter_specs(_build(build, config, where))


def default_dtype() -> str:
    """The default dtype of the networks: bfloat16 is slower than float32 on a CPU."""
    return "float32" if on_cpu() else "bfloat16"


@dataclass(eq=False)
class Model:
    """A checkpoint whose networks are all in memory, or, with `low_memory`, only while needed."""

    path: Path
    components: Mapping[str, Component]
    scheduler: Mapping[str, Any]  # scheduler_config.json
    tokenizers: Mapping[str, tuple[Path, LoadTokenizer]]  # encoder -> its folder, how it is read
    dtype: str = "float32"
    low_memory: bool = False
    bits: int | None = None  # of the weights of transformers and large text encoders
    loras: tuple[tuple[Lora, float], ...] = ()  # merged into networks when they are loaded
    embeddings: tuple[Embedding, ...] = ()  # words of textual inversion
    _loaded: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    _tokenizers: dict[tuple[str, int | None], AnyTokenizer] = field(
        default_factory=dict[tuple[str, int | None], AnyTokenizer]
    )

    def __contains__(self, name: str) -> bool:
        return name in self.components

    def config(self, name: str) -> Any:
        """The config of one network."""
        return self.components[name].config

    def prepare(self) -> None:
        """Load every network, or audit it, values included, where it will be loaded later.

        No run starts on weights that would only be found wrong at its end.
        """
        width, dtype = self._width(), getattr(mx, self.dtype)
        with kernels.compiled_meanwhile(width, dtype) if width else nullcontext():
            for name, component in self.components.items():
                if self.low_memory:
                    component.check()
                else:
                    self.network(name)

    def _width(self) -> int | None:
        """Channels of the transformer's tokens; None of another network."""
        config = self.config("transformer") if "transformer" in self else None
        return getattr(config, "inner_dim", None)

    def network(self, name: str) -> Any:
        """The network, loaded now if it is not in memory."""
        if name not in self._loaded:
            network: Any = self.components[name].load(self.dtype_of(name), self.bits)
            if self.loras:
                where = ", ".join(str(lora.path) for lora, _ in self.loras)
                add_changes(network, changes(self.loras, name), where=where)
            if words := self._words(name):
                tokens = network.text_model.embeddings.token_embedding
                tokens.weight = with_vectors(tokens.weight, self._known_ids(name), words, name)
            join_weights(network)
            self._loaded[name] = network
        return self._loaded[name]

    def release(self, name: str) -> None:
        """The network is not needed for now. In low-memory mode nobody may hold a reference."""
        if self.low_memory and self._loaded.pop(name, None):
            mx.clear_cache()

    def unload(self) -> None:
        """Free every network."""
        self._loaded.clear()
        mx.clear_cache()

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the networks that are in memory now."""
        return tuple(self._loaded)

    def dtype_of(self, name: str) -> mx.Dtype:
        """The dtype of one network."""
        in_float32 = self.dtype == "float16" and self.components[name].widens
        return mx.float32 if in_float32 else getattr(mx, self.dtype)

    def tokenizer(self, encoder: str, length: int | None = None) -> AnyTokenizer:
        """The tokenizer of `encoder`; `length` is its number of tokens where that can be chosen."""
        key = encoder, length
        if key not in self._tokenizers:
            folder, load_tokenizer = self.tokenizers[encoder]
            tokenizer = load_tokenizer(folder, length)
            for word in self._words(encoder):
                assert isinstance(tokenizer, Tokenizer)
                tokenizer.add_word(word.token, len(word.vectors[encoder]))
            self._tokenizers[key] = tokenizer
        return self._tokenizers[key]

    def _words(self, encoder: str) -> list[Embedding]:
        return [each for each in self.embeddings if encoder in each.vectors]

    def _known_ids(self, encoder: str) -> int:
        """How many ids the tokenizer has without the words of textual inversion."""
        tokenizer = self.tokenizer(encoder)
        assert isinstance(tokenizer, Tokenizer)
        return tokenizer.vocab_size - self._added_ids(encoder)

    def _added_ids(self, encoder: str) -> int:
        return sum(len(word.vectors[encoder]) for word in self._words(encoder))

    def token_ids(
        self, encoder: str, prompts: Sequence[str], length: int | None = None
    ) -> mx.array:
        """One row of ids for each prompt: (prompts, length)."""
        tokenizer = self.tokenizer(encoder, length)
        return self.checked_ids(encoder, np.stack([tokenizer(prompt) for prompt in prompts]))

    def checked_ids(self, encoder: str, ids: NDArray[np.int32]) -> mx.array:
        """Ids that the encoder has, or ConfigError."""
        vocabulary = self.config(encoder).vocab_size
        if self._words(encoder) and self._known_ids(encoder) <= vocabulary:
            vocabulary = self._known_ids(encoder) + self._added_ids(encoder)
        if int(ids.max()) >= vocabulary:  # MLX would read past the table without an error
            raise ConfigError(
                f"{self.tokenizers[encoder][0]}: gives token {ids.max()}, but {encoder} has only "
                f"{vocabulary}. The tokenizer belongs to another model."
            )
        return mx.array(ids)


def join_features(states: Sequence[mx.array], where: Path) -> mx.array:
    """Features of several encoders side by side; ConfigError when their tokenizers disagree."""
    lengths = sorted({state.shape[1] for state in states})
    if len(lengths) > 1:
        raise ConfigError(
            f"{where}: the tokenizers pad prompts to {lengths} tokens; expected one length. "
            "model_max_length of a tokenizer_config.json is wrong."
        )
    return mx.concatenate(list(states), axis=-1)
