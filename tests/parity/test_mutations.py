"""Every tensor of every network damaged in every way, and the load refused with its name.

The reference makes the checkpoints; each is damaged one tensor at a time and goes through the real
loader, in diffusers' layout and in the original one, where the file alone tells the geometry.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny
from lydite.core.errors import WeightsError
from lydite.core.tensorfile import save
from lydite.pipelines import single_file
from lydite.pipelines.components import folder_component

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

Tensors = dict[str, Any]
NETWORKS = [f"transformer {variant}" for variant in tiny.VARIANTS]
NETWORKS += ["vae", "text_encoder", "text_encoder_2", "text_encoder_3"]


# Heads of 64, as the single file has them, and hardly anything else.
ORIGINAL = replace(tiny.ORIGINAL, heads=1, clip_g=64, t5_heads=1)


@dataclass(frozen=True)
class Sound:
    """A checkpoint without fault: its tensors, where to write them, and how they are loaded."""

    tensors: Tensors
    path: Path
    load: Callable[[], object]


def make(network: str, sizes: tiny.Sizes) -> Any:
    name, _, variant = network.partition(" ")
    if name == "transformer":
        return tiny.make_transformer(variant, pooled=sizes.clip_l + sizes.clip_g, sizes=sizes)
    if name == "vae":
        levels = {"down_block_types": ("DownEncoderBlock2D",) * 2, "use_post_quant_conv": False}
        levels |= {"up_block_types": ("UpDecoderBlock2D",) * 2}
        return tiny.make_vae(sizes=sizes, block_out_channels=(32, 64), **levels)
    if name == "text_encoder_3":
        return tiny.make_t5(sizes)
    width = sizes.clip_l if name == "text_encoder" else sizes.clip_g
    return tiny.make_clip(90, width, sizes.clip_heads, "gelu")


def in_folder(network: str, folder: Path) -> Sound:
    make(network, tiny.SMALL).save_pretrained(folder)
    (weights,) = folder.glob("*.safetensors")
    component = folder_component(folder)
    return Sound(tiny.read_tensors(folder), weights, lambda: component.load(mx.float32))


def in_one_file(network: str, folder: Path) -> Sound:
    name = network.partition(" ")[0]
    make(network, ORIGINAL).save_pretrained(folder / name)
    tensors = tiny.read_tensors(folder / name)
    if name == "transformer":
        tensors = tiny.original_transformer(tensors)
    if name == "vae":
        tensors = tiny.original_vae(tensors)
    if name == "text_encoder":
        del tensors["text_projection.weight"]
    shutil.rmtree(folder / name)
    path, prefix = folder / "sd3.safetensors", single_file.NETWORKS[name][0]

    def load() -> None:
        for component in single_file.components(path).values():
            component.load(mx.float32)
        single_file.leftovers(path).require_clean()

    return Sound({prefix + key: array for key, array in tensors.items()}, path, load)


LAYOUTS = {"diffusers": in_folder, "original": in_one_file}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here need not survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module", params=[f"{n} {l}" for n in NETWORKS for l in LAYOUTS])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    network, _, layout = request.param.rpartition(" ")
    torch.manual_seed(0)
    return LAYOUTS[layout](network, tmp_path_factory.mktemp("network"))


def drop(name: str, x: Any) -> Tensors:
    return {}


def rename(name: str, x: Any) -> Tensors:
    return {f"{name}.renamed": x}


def count_on(name: str, x: Any) -> Tensors | None:
    """joint_blocks.1 is called joint_blocks.8."""
    other = re.sub(r"\.(\d+)\.", lambda found: f".{int(found[1]) + 7}.", name, count=1)
    return {other: x} if other != name else None


def flatten(name: str, x: Any) -> Tensors | None:
    return {name: x.reshape(-1)} if x.ndim > 1 else None


def add_axis(name: str, x: Any) -> Tensors:
    return {name: x[None]}


def fold(name: str, x: Any) -> Tensors | None:
    """As many values in another shape."""
    return (
        {name: x.reshape(-1, 2, x.shape[0])}
        if x.ndim > 1 and x.size % (2 * x.shape[0]) == 0
        else None
    )


def transpose(name: str, x: Any) -> Tensors | None:
    if x.ndim == 1:
        return None
    y = x.swapaxes(0, 1) if x.ndim == 4 else x.swapaxes(-1, -2)
    return {name: y} if y.shape != x.shape else None  # else undecidable: see test_audits


def cast(name: str, x: Any) -> Tensors:
    return {name: (x * 100).astype(np.int32)}


def poison(value: float) -> Callable[[str, Any], Tensors]:
    def put(name: str, x: Any) -> Tensors:
        y = x.copy()
        y.flat[x.size // 2] = value
        return {name: y}

    return put


MUTATIONS = {
    "dropped": drop,
    "renamed": rename,
    "renumbered": count_on,
    "flattened": flatten,
    "extra axis": add_axis,
    "folded": fold,
    "transposed": transpose,
    "integers": cast,
    "NaN": poison(float("nan")),
    "Inf": poison(float("-inf")),
}


def survivors(sound: Sound, mutation: str) -> tuple[list[str], int]:
    """Damages the loader let pass or blamed on something else, and how many were tried."""
    found: list[str] = []
    tried = 0
    for name, array in sound.tensors.items():
        changed = MUTATIONS[mutation](name, array)
        if changed is None:
            continue
        tried += 1
        save(sound.path, {**{n: x for n, x in sound.tensors.items() if n != name}, **changed})
        try:
            sound.load()
            found.append(f"{name} was loaded")
        except WeightsError as error:
            if not all(each in str(error) for each in {name, *changed}):
                found.append(f"{name} is not named: {error}")
    return found, tried


def test_nothing_is_caught_in_the_sound_one(sound: Sound) -> None:
    save(sound.path, sound.tensors)
    sound.load()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_tensor_is_caught_and_named(sound: Sound, mutation: str) -> None:
    found, tried = survivors(sound, mutation)
    assert tried and not found, found
