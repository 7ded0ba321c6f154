"""LoRA files: which weights they change, and by how much.

W becomes W + weight · (alpha / rank) · up · down. A file names its layers in one of many ways:
kohya's (`lora_unet_down_blocks_0_….lora_down.weight`), diffusers' and PEFT's
(`unet.down_blocks.0.….lora_A.weight`), each over diffusers' or over the original module names. All
of them are looked up in one index of the modules that the networks have, so a tensor either has its
place or is an error. The change of a stored tensor goes through the same rules as the tensor.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lydite.core.config import JsonError, parse_object
from lydite.core.dtypes import FLOAT_NAMES, widen
from lydite.core.errors import WeightsError, shown
from lydite.core.tensorfile import TensorFile
from lydite.weights.rules import Array, Recipe, Rule, Shape, resolve, stored_names


@dataclass(frozen=True)
class Network:
    """A network that a LoRA may change."""

    name: str  # as in a pipeline folder: unet, transformer, text_encoder …
    shapes: Mapping[str, Shape]  # of its parameters
    tables: Sequence[tuple[Rule, ...]]  # one for each way its tensors are named


@dataclass(frozen=True)
class Layer:
    """The change of one stored weight: scale · up · (mid ·) down."""

    network: Network
    module: str  # as the file names it
    recipes: tuple[Recipe, ...]  # the parameters made from the stored weight
    down: Array  # (r, I) or (r, I, h, w)
    up: Array  # (O, r) or (O, r, 1, 1)
    mid: Array | None  # (r, r, h, w)
    scale: float

    def change(self) -> Array:
        """What is added to the stored weight, in float32."""
        down, up = _float32(self.down), _float32(self.up)
        up = up.reshape(up.shape[:2])
        if self.mid is not None:
            down = down.reshape(down.shape[:2])
            total = np.einsum("or,rskl,si->oikl", up, _float32(self.mid), down, optimize=True)
        else:
            product = up @ down.reshape(len(down), -1)
            total = product.reshape(len(up), *down.shape[1:])
        return total * np.float32(self.scale)


@dataclass(frozen=True)
class Lora:
    """A LoRA file, every tensor of it matched with a network's weight."""

    path: Path
    layers: tuple[Layer, ...]
    networks: frozenset[str] = field(default=frozenset())  # those it changes


def read_lora(path: Path, networks: Sequence[Network]) -> Lora:
    """Match every tensor of a LoRA file with a weight of one of `networks`, or WeightsError."""
    file = TensorFile.open(path)
    try:
        modules, surplus = _modules(file.header.tensors)
        _refuse_other_methods(path, surplus)
        index = _index(networks)
        alphas = _Alphas(path, file.header.metadata)
        layers: list[Layer] = []
        for module, names in modules.items():
            place = index.get(_module_name(module))
            if place is None:
                surplus += names.values()
            else:
                layers.append(_layer(file, module, names, *place, alphas))
    finally:
        file.close()
    if surplus or not layers:
        total = len(file.header.tensors)
        raise WeightsError(
            f"{path}: {len(surplus)} of {total} tensors have no place in "
            f"{', '.join(network.name for network in networks)}: {shown(sorted(surplus)[:5])}. "
            "Is it a LoRA, and of this model?"
        )
    return Lora(path, tuple(layers), frozenset(layer.network.name for layer in layers))


def changes(loras: Sequence[tuple[Lora, float]], network: str) -> Iterator[tuple[str, Array]]:
    """Each parameter of the network that LoRAs with these weights change, and its total change."""
    found: defaultdict[str, list[tuple[Layer, Recipe, float]]] = defaultdict(list)
    for lora, weight in loras:
        for layer in lora.layers:
            if layer.network.name == network:
                for recipe in layer.recipes:
                    found[recipe.target].append((layer, recipe, weight))
    for target, parts in found.items():
        shape = parts[0][0].network.shapes[target]
        total = np.zeros(shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # `add_changes` refuses such values
            for layer, recipe, weight in parts:
                change = recipe.build([_fitting(layer.change(), recipe, shape)])
                total += np.float32(weight) * change
        yield target, total


Names = dict[str, str]  # role (down, up, mid, alpha) -> tensor

_ENDINGS = tuple(
    re.compile(rf"(?P<module>.+?){ending}")
    for ending in (
        r"\.lora_(?P<role>down|up|mid)\.weight",
        r"\.lora_(?P<role>[AB])(\.[^.]+)?\.weight",  # PEFT may write the adapter's name
        r"\.lora\.(?P<role>down|up)\.weight",
        r"\.lora_linear_layer\.(?P<role>down|up)\.weight",
        r"_lora\.(?P<role>down|up)\.weight",  # diffusers before 0.22: processor.to_q_lora
        r"\.(?P<role>alpha)",
    )
)
_ROLES = {"A": "down", "B": "up"}


def _modules(names: Mapping[str, Any]) -> tuple[dict[str, Names], list[str]]:
    """Module -> its tensors by role; and the tensors that are none of these."""
    modules: defaultdict[str, Names] = defaultdict(dict)
    surplus: list[str] = []
    for name in names:
        matched = next(filter(None, (ending.fullmatch(name) for ending in _ENDINGS)), None)
        if matched is None:
            surplus.append(name)
            continue
        role = _ROLES.get(matched["role"], matched["role"])
        module = matched["module"]
        if modules[module].setdefault(role, name) != name:
            surplus.append(name)
    return modules, surplus


def _module_name(name: str) -> str:
    """The name of a module as it is now, from one that diffusers had before 0.22."""
    stem, _, last = name.replace(".processor.", ".").rpartition(".")
    if stem.endswith(".self_attn"):
        return f"{stem}.{_TEXT_ATTENTION.get(last, last)}"
    if stem and last == "to_out":
        return f"{stem}.to_out.0"
    return f"{stem}.{last}" if stem else name


_TEXT_ATTENTION = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}

_OTHER_METHODS = {
    "DoRA": (".dora_scale", ".lora_magnitude_vector"),
    "LoHa": (".hada_",),
    "LoKr": (".lokr_",),
    "OFT": (".oft_",),
    "a full difference of weights": (".diff", ".diff_b"),
    "a LoRA with biases": (".lora_B.bias", ".lora_up.bias"),
}


def _refuse_other_methods(path: Path, names: Sequence[str]) -> None:
    for method, marks in _OTHER_METHODS.items():
        for name in names:
            if any(mark in name for mark in marks):
                raise WeightsError(f"{path}: {name} is of {method}, which is not supported.")


Place = tuple[Network, tuple[Recipe, ...]]

_NETWORK = ("diffusion_model.", "model.diffusion_model.", "base_model.model.", "")
_PREFIXES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # before a dotted name; before a name in kohya's style, whose dots are underscores
    "unet": (("unet.", *_NETWORK), ("lora_unet_",)),
    "transformer": (("transformer.", *_NETWORK), ("lora_unet_", "lora_transformer_")),
    "text_encoder": (("text_encoder.",), ("lora_te_", "lora_te1_")),
    "text_encoder_2": (("text_encoder_2.",), ("lora_te2_",)),
    "text_encoder_3": (("text_encoder_3.",), ("lora_te3_",)),
}


def _index(networks: Sequence[Network]) -> dict[str, Place]:
    """Every name that a file may have for a module with a weight."""
    index: dict[str, Place] = {}
    for network in networks:
        dotted, kohya = _PREFIXES[network.name]
        for table in network.tables:
            for source, recipes in _stored_weights(network, table).items():
                module = source.removesuffix(".weight")
                # transformers 5 has no `text_model.`
                for name in dict.fromkeys((module, module.removeprefix("text_model."))):
                    flat = name.replace(".", "_")
                    for key in (*(p + name for p in dotted), *(p + flat for p in kohya)):
                        index.setdefault(key, (network, recipes))
    return index


def _stored_weights(network: Network, table: tuple[Rule, ...]) -> dict[str, tuple[Recipe, ...]]:
    """Stored weights of linears and convolutions, each with the parameters made from it."""
    stored = {
        source
        for path, shape in network.shapes.items()
        if len(shape) > 1
        for source in stored_names(path, table)
    }
    found: defaultdict[str, list[Recipe]] = defaultdict(list)
    for recipe in resolve(stored, table).recipes.values():
        if len(recipe.sources) == 1 and recipe.sources[0].endswith(".weight"):
            found[recipe.sources[0]].append(recipe)
    return {source: tuple(recipes) for source, recipes in found.items()}


def _layer(
    file: TensorFile,
    module: str,
    names: Names,
    network: Network,
    recipes: tuple[Recipe, ...],
    alphas: "_Alphas",
) -> Layer:
    path = file.header.path
    if "down" not in names or "up" not in names:
        raise WeightsError(f"{path}: {module} has {shown(sorted(names))}; down and up are needed.")
    down, up = file.read(names["down"]), file.read(names["up"])
    mid = file.read(names["mid"]) if "mid" in names else None
    rank = len(down) if down.ndim else 0
    alpha = file.read(names["alpha"]) if "alpha" in names else None
    square = mid is None or (
        mid.ndim == 4 and mid.shape[:2] == (rank, rank) and down.shape[2:] in ((), (1, 1))
    )
    if not (
        down.ndim in (2, 4)
        and up.ndim in (2, 4)
        and up.shape[1:] in ((rank,), (rank, 1, 1))
        and square
        and rank
    ):
        raise WeightsError(
            f"{path}: {module}: down {down.shape} and up {up.shape} are not of one rank."
        )
    if alpha is not None and alpha.size != 1:
        raise WeightsError(f"{path}: {names['alpha']} has {alpha.size} values; expected one.")
    for role, dtype in ((role, file.header.tensors[role].dtype) for role in names.values()):
        if dtype not in FLOAT_NAMES and role != names.get("alpha"):
            raise WeightsError(f"{path}: {role} is stored as {dtype}; expected a float type.")
        if not np.isfinite(_float32(file.read(role))).all():
            raise WeightsError(f"{path}: {role} has values that are NaN or infinite.")
    scale = alphas.scale(network.name, module, rank, None if alpha is None else float(alpha.item()))
    layer = Layer(network, module, recipes, down, up, mid, scale)
    for recipe in recipes:
        _check_shape(path, layer, recipe)
    return layer


def _check_shape(path: Path, layer: Layer, recipe: Recipe) -> None:
    kernel = (layer.mid if layer.mid is not None else layer.down).shape[2:]
    shape = (len(layer.up), layer.down.shape[1], *kernel)
    expected = layer.network.shapes[recipe.target]
    if not any(_fits(candidate, recipe, expected) for candidate in _ranks(shape)):
        raise WeightsError(
            f"{path}: {layer.module} changes a weight of shape {shape}, but "
            f"{layer.network.name}'s {recipe.target} is {expected}. Is it a LoRA of this model?"
        )


def _ranks(shape: Shape) -> list[Shape]:
    """The shape, and the same as a linear or as a 1 × 1 convolution."""
    if len(shape) == 2:
        return [shape, (*shape, 1, 1)]
    return [shape, shape[:2]] if shape[2:] == (1, 1) else [shape]


def _fits(shape: Shape, recipe: Recipe, expected: Shape) -> bool:
    try:
        return recipe.shape([shape]) == expected
    except ValueError:
        return False


def _fitting(change: Array, recipe: Recipe, expected: Shape) -> Array:
    """The change with the dimensions that the stored weight has."""
    for shape in _ranks(change.shape):
        if _fits(shape, recipe, expected):
            return change.reshape(shape)
    raise AssertionError(f"{recipe.target}: {change.shape}")  # checked when the file was read


class _Settings(msgspec.Struct):
    """What PEFT says of one network in the header; whatever else it says has no influence."""

    lora_alpha: float | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None


class _Alphas:
    """alpha / rank of each module: from a tensor, from PEFT's settings in the header, or 1."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        try:
            text = metadata.get("lora_adapter_metadata", "{}")
            for key, value in parse_object(text.encode()).items():
                network, _, name = key.rpartition(".")
                found[network][name] = value
            self._settings = {name: msgspec.convert(raw, _Settings) for name, raw in found.items()}
        except (JsonError, msgspec.ValidationError) as error:
            raise WeightsError(f"{path}: lora_adapter_metadata in its header: {error}.") from error
        for settings in self._settings.values():
            if settings.use_dora:
                raise WeightsError(f"{path}: is of DoRA, which is not supported.")
            for pattern in settings.alpha_pattern or ():
                if not _MODULE.fullmatch(pattern):  # a regular expression may take for ever
                    raise WeightsError(f"{path}: alpha_pattern {shown(pattern)} is no module name.")

    def scale(self, network: str, module: str, rank: int, alpha: float | None) -> float:
        settings = self._settings.get(network, _Settings())
        divisor = rank**0.5 if settings.use_rslora else float(rank)
        if alpha is None:
            alpha = settings.lora_alpha
            own = module.removeprefix(f"{network}.")
            for pattern, value in (settings.alpha_pattern or {}).items():
                name = pattern.strip("^$")
                if own == name or (pattern[0] != "^" and own.endswith(f".{name}")):
                    alpha = value
                    break
        return 1.0 if alpha is None else alpha / divisor


_MODULE = re.compile(r"\^?[\w.-]+\$?")  # PEFT's patterns, as far as programs write them


def _float32(array: Array) -> Array:
    return widen(array).astype(np.float32, copy=False)
