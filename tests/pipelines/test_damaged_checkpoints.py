"""Every tensor of every network damaged in every way, and the load refused with its name.

The reference makes the checkpoints; each is damaged one tensor at a time and goes through the real
loader, in diffusers' layout and in the original one, where the file alone tells the geometry.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
from support import tiny_sd, tiny_sd3

PREFIXES = {network.name: network.prefix for network in SINGLE_FILE.networks}

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

Tensors = dict[str, Any]
NETWORKS = [f"transformer {variant}" for variant in tiny_sd3.VARIANTS]
NETWORKS += ["vae", "text_encoder", "text_encoder_2", "text_encoder_3"]

# Heads of 64, as the single file has them, and hardly anything else.
SIZES = replace(tiny_sd3.ORIGINAL, heads=1, clip_g=64, t5_heads=1)


@dataclass(frozen=True)
class Sound:
    """A checkpoint without fault: its tensors, where to write them, and what is found there."""

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


def in_folder(network: str, folder: Path) -> Sound:
    make(network).save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    component = folder_component(folder, KINDS)
    return Sound(tiny_sd3.read_tensors(folder), path, lambda: [component])


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


LAYOUTS = {"diffusers": in_folder, "original": in_one_file}


@pytest.fixture(scope="module", params=[f"{name} {each}" for name in NETWORKS for each in LAYOUTS])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    network, _, layout = request.param.rpartition(" ")
    torch.manual_seed(0)
    return LAYOUTS[layout](network, tmp_path_factory.mktemp("network"))


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """These files need not survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def drop(name: str, x: Any) -> Tensors:
    return {}


def rename(name: str, x: Any) -> Tensors:
    return {f"{name}.renamed": x}


def renumber(name: str, x: Any) -> Tensors | None:
    """joint_blocks.1 is called joint_blocks.8."""
    other = re.sub(r"\.(\d+)\.", lambda found: f".{int(found[1]) + 7}.", name, count=1)
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
def test_every_tensor_is_caught_and_named(sound: Sound, mutation: str) -> None:
    found, tried = survivors(sound, mutation)
    assert tried and not found, found


@pytest.mark.parametrize("variant", ["sd1", "sdxl"])
def test_every_tensor_of_a_pipeline_is_caught_and_named(variant: str, tmp_path: Path) -> None:
    """Stable Diffusion 1.x and XL: each tensor is damaged in one way, and named by the audit."""
    folder = tiny_sd.make_pipeline(tmp_path / variant, variant)
    for path in sorted(folder.glob("*/*.safetensors")):
        component, tensors = folder_component(path.parent, KINDS), tiny_sd3.read_tensors(path)
        for number, mutation in enumerate(MUTATIONS.values()):
            damaged = {name: mutation(name, x) for name, x in list(tensors.items())[number::7]}
            others = {name: x for name, x in tensors.items() if name not in damaged}
            changed = {name: x for found in damaged.values() for name, x in (found or {}).items()}
            path.unlink()
            save(path, others | changed)
            with component.scope() as scope:
                ledger = audit(scope, component.expected, component.rules, where=variant)
                if ledger.clean:
                    ledger = check_values(ledger, scope, component.rules)
            rows = [row for name in ledger.WRONG for row in getattr(ledger, name)]
            named = {row.tensor.removeprefix("text_model.") for row in rows}  # a CLIP's, or none
            assert named == {name.removeprefix("text_model.") for name in (*damaged, *changed)}
            with pytest.raises(WeightsError):
                component.load(mx.float32)
