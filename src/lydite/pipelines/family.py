"""What a family of models is: data and a few functions. Everything above knows `Family` only.

Other packages add families by an entry point of the group `lydite.families` that names a `Family`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lydite.core.errors import ConfigError, shown
from lydite.core.request import Request
from lydite.pipelines.inpainting import Mask, mask_channels
from lydite.pipelines.model import Component, Kind, LoadTokenizer, Model
from lydite.pipelines.observer import Observer
from lydite.pipelines.picture import Pixels
from lydite.sampling.denoiser import Guide, Prediction, Strength, cfg
from lydite.sampling.program_conventions import Convention, Meaning
from lydite.sampling.registry import Sampler
from lydite.sampling.scheduler_config import Grid, Mu
from lydite.sampling.schedules.schedule import Schedule
from lydite.weights.lora import Network as LoraNetwork
from lydite.weights.rules import Rule

if TYPE_CHECKING:
    from lydite.pipelines.inferred_models import InferredModel

# What --guidance is. cfg: the scale of classifier-free guidance, on above 1. above_0: that scale
# less 1, on above 0. negative: as cfg, on only with a negative prompt. distilled: an input of the
# network; `true_guidance` is the scale, on only with a negative prompt.
GuidanceKind = Literal["cfg", "above_0", "negative", "distilled"]
Conditioning = Mapping[str, mx.array]  # the family's own arrays, computed from the prompts
BUILT_IN = (
    "sd3",
    "flux2",  # before flux, whose single files have some of its names
    "flux",
    "qwen_image",
    "z_image",
    "sdxl",
    "sd",
)  # modules of lydite.pipelines.families, imported when they are reached
Pattern = tuple[str, str]  # of a module's name and of its slot; `*` matches anything


@dataclass(frozen=True)
class Defaults:
    """How a model is meant to be run, where neither the request nor its files say it."""

    steps: int = 28
    guidance: float = 7.0
    text_length: int | None = None  # None: no text encoder takes a length
    strength: float = 0.6  # of img2img
    mask_strength: float = 1.0  # of inpainting
    untrained: tuple[str, ...] = ()  # text encoders whose output means nothing
    true_guidance: float | None = None  # with a negative prompt, where guidance is "distilled"
    guided: bool = True  # False: distilled to run without classifier-free guidance


@dataclass(frozen=True, eq=False)
class Run:
    """A request planned for one model: completed, checked, and its schedule made."""

    request: Request  # without None where the family uses the value
    schedule: Schedule
    sampler: Sampler
    options: Mapping[str, Any]  # of the sampler, the convention's included
    convention: Convention
    prediction: Prediction
    strength: Strength  # of guidance, at each sigma
    is_guided: bool  # the network is also evaluated with the negative prompt
    guidance: GuidanceKind
    unit_variance: bool  # of the noise a text-to-image run starts from
    variance_preserving: bool  # of the latents of the checkpoint's scheduler: x/√(1 + σ²)
    shape: tuple[int, ...]  # of one image's latents in torch's order: (C, h, w)
    image: Pixels | None = None  # img2img: at the size of the picture
    image_hash: str | None = None  # of the image as it was given
    mask: NDArray[np.uint8] | None = None  # inpainting: at the size of the picture
    mask_hash: str | None = None
    first: int = 0  # number of its first step, where it goes on from another run
    stop: int | None = None  # steps after which the refiner goes on
    refining: "Run | None" = None  # of the refiner

    def __repr__(self) -> str:
        request, extras = self.request, [f"{self.steps} steps"]
        extras += [f"{request.width}×{request.height}", f"guidance {request.guidance:g}"]
        extras += ["with an image"] if self.image is not None else []
        extras += ["with a mask"] if self.mask is not None else []
        facts = ", ".join([*extras, f"{self.sampler.name} on {self.schedule.name}"])
        return f"<Run {shown(request.prompt)}: {facts}>"

    @property
    def prompts(self) -> tuple[str, ...]:
        """The negative prompt where it is used, then the prompt."""
        return (self.request.negative, self.request.prompt)[not self.is_guided :]

    @property
    def steps(self) -> int:
        """How many steps run: fewer than requested in img2img, and before a refiner."""
        return len(self.schedule.timesteps) if self.stop is None else self.stop

    @property
    def all_steps(self) -> int:
        """With those of the refiner."""
        return self.steps + (self.refining.steps if self.refining else 0)


@dataclass(frozen=True)
class LatentSpace:
    """The size of a model's latents; their values are the VAE's business."""

    channels: int
    factor: int  # pixels of a side for one of the latents
    patch: int  # latents of a side for one token of the network
    default: tuple[int, int]  # width and height in pixels the model was made for
    largest: int | None = None  # pixels of a side, where the model has a limit
    packed: int = 1  # of a side: latents of the VAE for one of these

    @property
    def vae_factor(self) -> int:
        """Pixels of a side for one of the VAE's latents."""
        return self.factor // self.packed

    @property
    def multiple(self) -> int:
        """Width and height are multiples of this."""
        return self.factor * self.patch

    def shape(self, width: int, height: int) -> tuple[int, ...]:
        """Of one image's latents, in torch's order."""
        return self.channels, height // self.factor, width // self.factor

    def tokens(self, width: int, height: int) -> int:
        """How many image tokens the network has: dynamic schedule shifts depend on it."""
        return (height // self.multiple) * (width // self.multiple)


class Network(Protocol):
    """A network with all that is constant over the steps of one batch."""

    def __call__(self, x: mx.array, timestep: float, prompts: int) -> mx.array:
        """Its outputs for the last `prompts` of the run's prompts: (prompts·B, …) in float32.

        x is (B, …), scaled as the prediction type wants it, in float32.
        """
        ...


@dataclass(frozen=True)
class TraceNames:
    """How a recorded run names its values: as the reference does."""

    # Where a module of ours has an input or output under another name than the reference's:
    # name, slot -> the reference's name ("": the same), slot. The first that matches is used. With
    # `*` at the end of the old and the new one, the rest stays.
    renames: Mapping[Pattern, Pattern] = field(default_factory=dict[Pattern, Pattern])
    # Four axes with channels last here and first in the reference, though no shape shows it.
    # The first pattern that matches the name decides.
    channels_last: tuple[Pattern, ...] = ()
    # Of what is computed for all steps at once: values without an axis of steps.
    constant: tuple[Pattern, ...] = ()
    # Of those: computed once for a run. The others are computed again between two steps.
    once: tuple[Pattern, ...] = ()
    # Conditioning array -> its name after `pipeline/`, and its axes.
    conditioning: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])

    def reference_site(self, name: str, slot: str) -> Pattern:
        """The name and slot under which the reference has what ours has here."""
        return _reference_site(tuple(self.renames.items()), name, slot)


@dataclass(frozen=True)
class BlockRule:
    """Modules that are units of reconstruction, by a regular expression for their paths.

    `streams`: of these slots, (B, tokens, D), some tokens are kept, the same for one stream. Other
    slots are kept whole: each output of an attention depends on all tokens of its inputs.
    """

    modules: str
    streams: Mapping[str, str]  # slot -> stream


@dataclass(frozen=True)
class Variant:
    """What differs between the models of one family, as read off their configs."""

    defaults: Defaults
    scheduler: Mapping[str, Any]  # the scheduler config of a checkpoint that has none


@dataclass(frozen=True)
class Family:
    """A family of models, such as Stable Diffusion 3."""

    name: str  # "sd3"
    title: str  # "Stable Diffusion 3 and 3.5"
    pipelines: frozenset[str]  # _class_name in model_index.json
    kinds: Mapping[str, Kind]  # network classes, by their names in model_index.json
    required: tuple[str, ...]  # components without which nothing runs
    network: str  # the component that the sampler drives
    encoders: tuple[str, ...]  # text encoders, in the order they run
    tokenizers: Mapping[str, LoadTokenizer]  # encoder -> how its tokenizer is read
    defaults: Defaults
    scheduler: Mapping[str, Any]  # the scheduler config of a checkpoint that has none
    check: Callable[[Path, Mapping[str, Component]], None]  # their sizes fit each other
    latents: Callable[[Model], LatentSpace]
    encode: Callable[[Model, Sequence[str], Request, Observer], Conditioning]
    bind: Callable[[Model, Conditioning, Run, int, Observer], Network]  # for a size of batch
    # Component -> the network classes that `check` and the other functions work with.
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    # Instead of the defaults and the scheduler above: of these components and model_index.json.
    variant: Callable[[Mapping[str, Component], Mapping[str, Any]], Variant] | None = None
    guidance: GuidanceKind = "cfg"
    guide: Guide = cfg  # how the outputs for both prompts are combined
    flow_grid: Grid = "trained"  # of flow models: the steps before the shift
    mu: Mu | None = None  # the dynamic shift of an image, where the scheduler's line is not used
    strength: Meaning = "diffusers_sd3"  # of img2img: how many steps a share of them is
    # What an image is: the start of a run, with a strength, or shown to the network in every step.
    image: Literal["start", "reference"] = "start"
    inpaints: bool = False
    skips_layers: bool = False  # `encode` follows the request's clip_skip
    weighs_prompts: bool = False  # `encode` follows the request's weighting
    # Textual inversion: tensor of a file -> text encoder. Empty: not supported.
    embeddings: Mapping[str, str] = field(default_factory=dict[str, str])
    refines: bool = False  # a second model of the family may run the last steps
    # What a model cannot draw without: "image", and "mask" where its network takes it.
    needs: Callable[[Model], tuple[str, ...]] = lambda model: ()
    # Of a network that takes a mask: what it is given beside the latents, and whether the image is
    # encoded even where nothing of it stays, which draws from the generator.
    mask_channels: Callable[[Mask, mx.array, int], mx.array] = mask_channels
    encodes_unused_image: bool = False
    names: TraceNames = TraceNames()
    blocks: tuple[BlockRule, ...] = ()
    inferred: "tuple[InferredModel, ...]" = ()  # layouts of files and folders without configs
    # The tables by which a LoRA may name the weights of a network.
    lora_tables: Callable[[Component], tuple[tuple[Rule, ...], ...]] = lambda component: (
        component.kind.rules,
        component.rules,
    )

    def check_components(self, path: Path, components: Mapping[str, Component]) -> None:
        """ConfigError for a component of another class than the family's, or of another size."""
        for name, classes in self.classes.items():
            kind = components[name].kind if name in components else None
            if kind is not None and all(self.kinds[known] is not kind for known in classes):
                found = [known for known in self.kinds if self.kinds[known] is kind]
                raise ConfigError(
                    f"{path}: {name} is a {' or '.join(found) or 'network of another family'}; "
                    f"{self.title} has {' or '.join(classes)} there."
                )
        self.check(path, components)

    def lora_networks(self, components: Mapping[str, Component]) -> list[LoraNetwork]:
        """The networks that a LoRA may change."""
        return [
            LoraNetwork(name, components[name].expected, self.lora_tables(components[name]))
            for name in (self.network, *self.encoders)
            if name in components
        ]

    def variant_of(self, components: Mapping[str, Component], index: Mapping[str, Any]) -> Variant:
        """Defaults and scheduler for a model of these components and this model_index.json."""
        if self.variant is None:
            return Variant(self.defaults, self.scheduler)
        return self.variant(components, index)

    @property
    def recorded(self) -> tuple[str, ...]:
        """The networks of a trace."""
        return (*self.encoders, self.network, "vae")


@lru_cache(maxsize=100_000)
def _reference_site(renames: tuple[tuple[Pattern, Pattern], ...], name: str, slot: str) -> Pattern:
    for (names, slots), (new_name, new_slot) in renames:
        if fnmatchcase(name, names) and fnmatchcase(slot, slots):
            return _renamed(name, names, new_name), _renamed(slot, slots, new_slot)
    return name, slot


def _renamed(text: str, pattern: str, new: str) -> str:
    if new.endswith("*"):
        return new[:-1] + text[len(pattern) - 1 :]
    return new or text


@lru_cache(maxsize=100_000)
def matches(patterns: tuple[Pattern, ...], name: str, slot: str) -> bool:
    """Whether the first pattern for the name matches the slot."""
    for names, slots in patterns:
        if fnmatchcase(name, names):
            return fnmatchcase(slot, slots)
    return False


def families() -> Iterator[Family]:
    """Each family, imported when it is reached."""
    for name in BUILT_IN:
        yield import_module(f"lydite.pipelines.families.{name}").FAMILY
    for point in entry_points(group="lydite.families"):
        yield point.load()


def find_family(class_name: object, where: object) -> Family:
    """The family of a pipeline class, as model_index.json names it."""
    known: list[str] = []
    for family in families():
        if isinstance(class_name, str) and class_name in family.pipelines:
            return family
        known.append(f"{family.title} ({', '.join(sorted(family.pipelines))})")
    raise ConfigError(
        f"{where}: the pipeline class is {shown(class_name)}; supported are {'; '.join(known)}."
    )


def network_classes(class_name: object = None) -> Mapping[str, Kind]:
    """Of the family of a pipeline class; of all families where it is unknown or not given."""
    kinds: dict[str, Kind] = {}
    for family in families():
        if isinstance(class_name, str) and class_name in family.pipelines:
            return family.kinds
        kinds.update(family.kinds)
    return kinds


def check_equal(path: Path, facts: Mapping[str, tuple[int, int, str]]) -> None:
    """ConfigError for the first key of the transformer that differs from what it has to fit.

    `facts`: key -> its value, the value of another component, and what that value is.
    """
    for key, (value, other, what) in facts.items():
        if value != other:
            raise ConfigError(f"{path}: transformer has {key} {value}, but {what} is {other}.")
