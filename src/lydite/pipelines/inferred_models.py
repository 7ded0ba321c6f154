"""Checkpoints without configs: networks in one file or in folders, in names of their own.

Sizes are read off tensor shapes. The majority decides: one damaged tensor is then named by the
audit instead of changing the whole model to fit it. What no tensor shows, or only one and that one
is damaged, is what the family says is usual.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lydite.core.checkpoint import open_checkpoint
from lydite.core.config import read_config
from lydite.core.errors import ConfigError, shown
from lydite.core.tensorfile import TensorInfo
from lydite.pipelines.model import Component, Kind
from lydite.weights.audit import Finding, Ledger, TensorView, audit
from lydite.weights.quantized_format import GROUP
from lydite.weights.rules import Rule, Shape, fill, match, resolve

Found = Mapping[str, Component]  # networks of the file that are inferred already
Inferred = tuple[str, dict[str, Any], tuple[Rule, ...]]  # class, config, rules


@dataclass(frozen=True)
class Shapes:
    """Shapes of one network's tensors, by their names without the prefix."""

    tensors: Mapping[str, Shape]

    def renamed(self, rules: tuple[Rule, ...]) -> "Shapes":
        """Of the parameters that a table makes of these tensors, by the model's own names."""
        shapes: dict[str, Shape] = {}
        for target, recipe in resolve(self.tensors, rules).recipes.items():
            with suppress(KeyError, ValueError):  # a tensor is missing or damaged
                shapes[target] = recipe.shape([self.tensors[name] for name in recipe.sources])
        return Shapes(shapes)

    def sizes(self, axes: Mapping[str, str]) -> dict[str, int]:
        """The size of each axis that `axes` names for some tensors, as most of them have it.

        A tensor speaks for one of its axes only where the others are what most tensors have.
        """
        seen: list[list[tuple[str, int]]] = []
        for pattern, words in axes.items():
            for name, shape in self.tensors.items():
                slots = match(pattern, name)
                if slots is not None and len(shape) == len(words.split()):
                    seen.append(list(zip(fill(words, slots).split(), shape, strict=True)))
        return _majority(seen, _majority(seen, {}))

    def numbers(self, *patterns: str) -> Counter[int]:
        """Each number that {i} takes, and in how many tensors."""
        return Counter(
            int(slots["i"])
            for name in self.tensors
            for pattern in patterns
            if (slots := match(pattern, name)) and len(slots["i"]) < 4
        )

    def count(self, *patterns: str) -> int:
        """How many numbers {i} takes, leaving out those that far fewer tensors have than others."""
        found = self.numbers(*patterns)
        most = max(found.values(), default=0)
        return max((number for number, times in found.items() if 2 * times >= most), default=0) + 1

    def most(self, pattern: str, whole: int) -> bool:
        """Whether at least half of the `whole` tensors that `pattern` can stand for are here."""
        return 2 * sum(match(pattern, name) is not None for name in self.tensors) >= whole


def _majority(seen: list[list[tuple[str, int]]], sizes: Mapping[str, int]) -> dict[str, int]:
    """The commonest size of each axis, among tensors that do not contradict `sizes` elsewhere."""
    votes: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for tensor in seen:
        wrong = [
            index for index, (axis, size) in enumerate(tensor) if sizes.get(axis, size) != size
        ]
        for index, (axis, size) in enumerate(tensor):
            if wrong in ([], [index]):
                votes[axis][size] += 1
    return {axis: counter.most_common(1)[0][0] for axis, counter in votes.items()}


def _unpacked(tensors: Mapping[str, TensorInfo]) -> dict[str, Shape]:
    """Shapes as they would be if no weight were quantized, in groups of the usual size."""
    shapes = {name: info.shape for name, info in tensors.items()}
    for name, info in tensors.items():
        scales = shapes.get(f"{name.removesuffix('weight')}scales", ())
        if info.dtype == "U32" and name.endswith(".weight") and len(scales) == 2:
            shapes[name] = (*info.shape[:1], scales[1] * GROUP)
    return shapes


@dataclass(frozen=True)
class InferredNetwork:
    """One network of a file: where its tensors are, and how its config follows from them."""

    name: str  # of the component
    prefix: str  # of its tensors; with a slash at the end, the folder of its file
    mark: str  # how some of their names go on after the prefix
    infer: Callable[[Shapes, Found], Inferred]


@dataclass(frozen=True)
class InferredModel:
    """One layout of models without configs. Networks are inferred in the order they are listed.

    A network that has another prefix in another model of the family is listed once for each.
    """

    title: str  # of the layout, for messages
    networks: tuple[InferredNetwork, ...]
    kinds: Mapping[str, Kind]
    main: str  # the network by which files of this family differ from those of others
    alone: tuple[str, ...]  # networks whose tensors may come without their prefix
    leftovers: tuple[Rule, ...] = ()  # for tensors outside every network

    @property
    def in_folders(self) -> bool:
        """Whether each network has a folder of its own."""
        return all(network.prefix.endswith("/") for network in self.networks)

    def matches(self, names: Iterable[str]) -> bool:
        """Whether tensors are named as in this layout."""
        return bool(self._networks(list(names)))

    def tensors(self, path: Path) -> dict[str, TensorInfo]:
        """Of the file, or of the files in the folders of the networks, by prefix and name."""
        if not self.in_folders:
            with open_checkpoint(path) as checkpoint:
                return dict(checkpoint.tensors)
        tensors: dict[str, TensorInfo] = {}
        for prefix in dict.fromkeys(network.prefix for network in self.networks):
            if any((path / prefix).glob("*.safetensors")):
                with open_checkpoint(path / prefix) as checkpoint:
                    tensors |= {prefix + name: info for name, info in checkpoint.tensors.items()}
        return tensors

    def components(self, path: Path) -> dict[str, Component]:
        """The networks inside the file or the folder."""
        tensors = self.tensors(path)
        networks = self._networks(list(tensors))
        prefixes: dict[str, str] = {}
        for network in networks:
            if prefixes.setdefault(network.name, network.prefix) != network.prefix:
                raise ConfigError(
                    f"{path}: two networks for {network.name}: under {prefixes[network.name]} "
                    f"and under {network.prefix}."
                )
        found: dict[str, Component] = {}
        for network in networks:
            name, prefix = network.name, network.prefix
            inside = [key for key in tensors if key.startswith(prefix)]
            if not any(key.startswith(prefix + network.mark) for key in inside):
                raise ConfigError(
                    f"{path}: {shown(inside[0])} is not of {self.title}, "
                    f"whose {name} has {prefix}{network.mark}…"
                )
            where = f"{path} ({name}, read off its shapes)"
            here = {key.removeprefix(prefix): tensors[key] for key in inside}
            try:
                class_name, raw, rules = network.infer(Shapes(_unpacked(here)), found)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            kind = self.kinds[class_name]
            config = read_config(kind.config, raw, where=where)
            file, prefix = (path / prefix, "") if self.in_folders else (path, prefix)
            found[name] = Component(name, file, kind, config, rules, prefix)
        return found

    def audit_leftovers(self, path: Path) -> Ledger:
        """The tensors outside every network: dropped for a reason, or unexpected."""
        where = f"{path} (outside every network)"
        if self.in_folders:
            known = {network.prefix for network in self.networks}
            others = sorted(
                {f"{file.parent.name}/" for file in path.glob("*/*.safetensors")} - known
            )
            reason = f"holds weights of no network of {self.title}"
            return Ledger(where, undecidable=tuple(Finding(name, reason) for name in others))
        with open_checkpoint(path) as checkpoint:
            prefixes = tuple(network.prefix for network in self._networks(list(checkpoint.tensors)))
            if not prefixes:
                return Ledger(where)  # one component's file: all of it is that component's
            return audit(TensorView(checkpoint, exclude=prefixes), {}, self.leftovers, where=where)

    def _networks(self, names: list[str]) -> list[InferredNetwork]:
        """Those in the file; none when its main network is of another family."""
        for network in self.networks:
            if network.name in self.alone:
                bare = _count(names, network.mark)
                if bare > _count(names, network.prefix + network.mark):
                    return [replace(network, prefix="")]
        found = [network for network in self.networks if _count(names, network.prefix)]
        marked = [n for n in found if _count(names, n.prefix + n.mark)]
        has_main = any(network.name == self.main for network in found)
        if has_main and not any(network.name == self.main for network in marked):
            return []
        return found if marked else []


def _count(names: list[str], start: str) -> int:
    return sum(name.startswith(start) for name in names)
