"""Every tensor of every network damaged in every way, and the load refused with its name.

The reference makes the checkpoints, and the damaged ones go through the real loader. In the
original layout the file alone tells the geometry: there one tensor is damaged at a time.
"""

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lydite.core.errors import WeightsError
from lydite.core.tensorfile import save
from lydite.pipelines.families.network_classes import KINDS
from lydite.pipelines.families.sd3_single_file import SINGLE_FILE
from lydite.pipelines.model import Component, folder_component
from lydite.weights.audit import audit, check_values
from support import tiny_flux, tiny_flux2, tiny_qwen_image, tiny_sd3, tiny_z_image

PREFIXES = {network.name: network.prefix for network in SINGLE_FILE.networks}

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

Tensors = dict[str, Any]
NETWORKS = [f"transformer {variant}" for variant in tiny_sd3.VARIANTS]
NETWORKS += ["vae", "text_encoder", "text_encoder_2", "text_encoder_3"]

PREFIX = re.compile(r"^(text_model|model(\.language_model)?)\.")  # of text encoders, or none
FLOW: dict[str, Callable[[Path], Path]] = {
    "flux": tiny_flux.make_pipeline,
    "flux2": tiny_flux2.make_pipeline,
    "qwen-image": tiny_qwen_image.make_pipeline,
    "z-image": tiny_z_image.make_pipeline,
}

# Heads of 64, as the single file has them, and hardly anything else.
SIZES = replace(tiny_sd3.ORIGINAL, heads=1, clip_g=64, t5_heads=1)


@dataclass(frozen=True)
class Sound:
    """A file without fault: its tensors, where to write them, and what is found there."""

    tensors: Tensors
    path: Path
    components: Callable[[], Iterable[Component]]

    def load(self) -> None:
        for component in self.components():
            component.load(mx.float32)
        SINGLE_FILE.audit_leftovers(self.path).require_clean()

    def check(self) -> None:
        for component in self.components():
            component.check()
        SINGLE_FILE.audit_leftovers(self.path).require_clean()


def make(network: str) -> Any:
    name, _, variant = network.partition(" ")
    if name == "transformer":
        return tiny_sd3.make_transformer(variant, pooled=SIZES.clip_l + SIZES.clip_g, sizes=SIZES)
    if name == "vae":
        blocks = {"block_out_channels": (32, 64), "use_post_quant_conv": False}
        blocks |= {"down_block_types": ("DownEncoderBlock2D",) * 2}
        return tiny_sd3.make_vae(sizes=SIZES, up_block_types=("UpDecoderBlock2D",) * 2, **blocks)
    if name == "text_encoder_3":
        return tiny_sd3.make_t5(SIZES)
    return tiny_sd3.make_clip(90, SIZES.clip_l, SIZES.clip_heads, "gelu")


def in_one_file(network: str, folder: Path) -> Sound:
    name, path = network.partition(" ")[0], folder / "sd3.safetensors"
    make(network).save_pretrained(folder / name)
    tensors = tiny_sd3.read_tensors(folder / name)
    shutil.rmtree(folder / name)
    if name == "transformer":
        tensors = tiny_sd3.original_transformer(tensors)
    if name == "vae":
        tensors = tiny_sd3.original_vae(tensors)
    if name == "text_encoder":
        del tensors["text_projection.weight"]
    prefix = PREFIXES[name]
    tensors = {prefix + key: array for key, array in tensors.items()}
    return Sound(tensors, path, lambda: SINGLE_FILE.components(path).values())


@pytest.fixture(scope="module", params=NETWORKS)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    torch.manual_seed(0)
    return in_one_file(request.param, tmp_path_factory.mktemp("network"))


def drop(name: str, x: Any) -> Tensors:
    return {}


def rename(name: str, x: Any) -> Tensors:
    return {f"{name}.renamed": x}


def renumber(name: str, x: Any) -> Tensors | None:
    """joint_blocks.1 is called joint_blocks.71."""
    other = re.sub(r"\.(\d+)\.", lambda found: f".{int(found[1]) + 70}.", name, count=1)
    return {other: x} if other != name else None


def reshape(name: str, x: Any) -> Tensors:
    """As many values in another shape: one more axis before or behind, folded, or flat."""
    shapes = [(1, *x.shape), (*x.shape, 1), (2, -1), (-1,)]
    return {name: x.reshape(shapes[len(name) % (4 if x.ndim > 1 else 2)])}


def transpose(name: str, x: Any) -> Tensors | None:
    """None where the shape stays the same: test_audits shows these as undecidable."""
    y = x.swapaxes(0, 1) if x.ndim == 4 else x.swapaxes(-1, x.ndim - 2)
    return {name: y} if y.shape != x.shape else None


def cast(name: str, x: Any) -> Tensors:
    return {name: (x * 100).astype(np.int32)}


def poison(name: str, x: Any) -> Tensors:
    y = x.copy()
    y.flat[0], y.flat[-1] = np.nan, -np.inf
    return {name: y}


MUTATIONS: dict[str, Callable[[str, Any], Tensors | None]] = {
    "dropped": drop,
    "renamed": rename,
    "renumbered": renumber,
    "reshaped": reshape,
    "transposed": transpose,
    "integers": cast,
    "poisoned": poison,
}


def survivors(sound: Sound, mutation: str) -> tuple[list[str], int]:
    """Damages that were let pass or blamed on something else, and how many were tried.

    A poisoned file is loaded. The others meet the check, whose first half a load begins with.
    """
    found: list[str] = []
    tried = 0
    for name, array in sound.tensors.items():
        changed = MUTATIONS[mutation](name, array)
        if changed is None:
            continue
        tried += 1
        sound.path.unlink(missing_ok=True)  # renaming over a file waits for the disk
        save(sound.path, {**{n: x for n, x in sound.tensors.items() if n != name}, **changed})
        try:
            sound.load() if mutation == "poisoned" else sound.check()
            found.append(f"{name} was loaded")
        except WeightsError as error:
            if not all(each in str(error) for each in (name, *changed)):
                found.append(f"{name} is not named: {error}")
    return found, tried


def test_nothing_is_wrong_with_the_sound_one(sound: Sound) -> None:
    save(sound.path, sound.tensors)
    sound.load()
    sound.check()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_every_tensor_of_a_single_file_is_caught_and_named(sound: Sound, mutation: str) -> None:
    found, tried = survivors(sound, mutation)
    assert tried and not found, found


def check_folder(folder: Path, rounds: int) -> None:
    """Damage a seventh of the tensors in one way, the next seventh in the next way, and so on.

    After seven rounds each tensor was damaged in every way. The audit has to name just these. What
    the model does not use, as the image tower of a text encoder, is not damaged.
    """
    (path,) = folder.glob("*.safetensors")
    component, tensors = folder_component(folder, KINDS), tiny_sd3.read_tensors(folder)
    with component.scope() as scope:
        sound = audit(scope, component.expected, component.rules, where=folder.name)
    tensors = {name: x for name, x in tensors.items() if name in sound.loaded}
    kinds = list(MUTATIONS.values())
    for number, (at, mutation) in product(range(rounds), enumerate(kinds)):
        some = list(tensors.items())[(at + number) % len(kinds) :: len(kinds)]
        damaged = {name: mutation(name, x) for name, x in some}
        others = {name: x for name, x in tensors.items() if name not in damaged}
        changed = {name: x for found in damaged.values() for name, x in (found or {}).items()}
        path.unlink()
        save(path, others | changed)
        with component.scope() as scope:
            ledger = audit(scope, component.expected, component.rules, where=folder.name)
            if ledger.clean:
                ledger = check_values(ledger, scope, component.rules)
        rows = [row for name in ledger.WRONG for row in getattr(ledger, name)]
        named = {PREFIX.sub("", row.tensor) for row in rows}
        assert named == {PREFIX.sub("", name) for name in (*damaged, *changed)}
        with pytest.raises(WeightsError):
            component.load(mx.float32)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_tensor_of_a_folder_is_caught_and_named(network: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make(network).save_pretrained(tmp_path)
    folder_component(tmp_path, KINDS).load(mx.float32)
    check_folder(tmp_path, len(MUTATIONS))


@pytest.mark.parametrize("variant", ["sd1", "sdxl", *FLOW])
def test_every_tensor_of_a_pipeline_is_caught_and_named(
    sd_folder: Any, variant: str, tmp_path: Path
) -> None:
    """Each tensor in one way."""
    folder = tmp_path / variant
    FLOW[variant](folder) if variant in FLOW else shutil.copytree(sd_folder(variant), folder)
    for path in sorted(folder.glob("*/*.safetensors")):
        check_folder(path.parent, 1)
