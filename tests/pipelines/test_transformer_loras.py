"""LoRAs of FLUX and Stable Diffusion 3 against diffusers and PEFT, in the spellings of files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import WeightsError
from lydite.core.request import Request
from lydite.core.tensorfile import save
from lydite.pipelines.pipeline import Pipeline
from support import tiny_flux, tiny_flux2, tiny_sd3
from support.against_diffusers import draw_reference, load_reference, off_by, run

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
REQUEST = Request(prompt="a red star", steps=2, guidance=4.0, width=32, height=48, text_length=24)
RANK, ALPHA = 2, 1.5
MODELS = {
    "flux": (tiny_flux, "FluxPipeline"),
    "flux2": (tiny_flux2, "Flux2KleinPipeline"),
    "sd3": (tiny_sd3, "StableDiffusion3Pipeline"),
}
# The stored weights that a LoRA changes, by their authors' names.
ORIGINAL = {
    "flux": (
        "double_blocks.0.img_attn.qkv",
        "double_blocks.0.img_attn.proj",
        "double_blocks.0.txt_attn.qkv",
        "double_blocks.0.txt_mlp.2",
        "double_blocks.0.img_mod.lin",
        "single_blocks.0.linear1",
        "single_blocks.0.linear2",
    ),
    "flux2": (
        "double_blocks.0.img_attn.qkv",
        "double_blocks.0.img_attn.proj",
        "double_blocks.0.txt_mlp.2",
        "single_blocks.0.linear1",
        "single_blocks.0.linear2",
    ),
    "sd3": (
        "joint_blocks.0.x_block.attn.qkv",
        "joint_blocks.0.context_block.attn.qkv",
        "joint_blocks.0.x_block.attn.proj",
        "joint_blocks.0.x_block.mlp.fc1",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: module.make_pipeline(root / name) for name, (module, _) in MODELS.items()}


def pictures(folder: Path, file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ours with the LoRA, and without."""
    with_lora, plain = Pipeline.open(folder, loras=[(file, 1.0)]), Pipeline.open(folder)
    drawn = [next(each.generate(REQUEST, [1])).pixels for each in (with_lora, plain)]
    assert np.abs(drawn[0].astype(int) - drawn[1]).max() > 10
    return drawn[0], drawn[1]


@pytest.mark.parametrize("name", MODELS)
def test_peft(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    """The transformer's linears and the first text encoder's; diffusers has none for Qwen3."""
    pytest.importorskip("peft")
    theirs = load_reference(MODELS[name][1], folders[name])
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for part in ("transformer", "text_encoder")[: 1 if name == "flux2" else 2]:
        for path, module in getattr(theirs, part).named_modules():
            if not path.endswith(
                ("to_q", "add_k_proj", "to_out.0", "net.2", "proj_mlp", "v_proj", "fc1", "mlp_proj")
            ):
                continue
            out, into = module.weight.shape
            down, up = rng.normal(size=(RANK, into)), rng.normal(size=(out, RANK))
            tensors[f"{part}.{path}.lora_A.weight"] = (down * 0.3).astype(np.float32)
            tensors[f"{part}.{path}.lora_B.weight"] = (up * 0.3).astype(np.float32)
    assert len(tensors) >= 20
    save(tmp_path / "peft.safetensors", tensors)
    theirs.load_lora_weights(tmp_path, weight_name="peft.safetensors")
    picture, _ = pictures(folders[name], tmp_path / "peft.safetensors")
    assert off_by(picture, draw_reference(theirs, REQUEST, 1, guidance_scale=REQUEST.guidance)) <= 1


def original_lora(folder: Path, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Module in the authors' names -> down and up."""
    module = MODELS[name][0]
    tensors = module.original_transformer(tiny_sd3.read_tensors(folder / "transformer"))
    rng = np.random.default_rng(1)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for layer in ORIGINAL[name]:
        out, into = tensors[f"{layer}.weight"].shape
        down, up = rng.normal(size=(RANK, into)), rng.normal(size=(out, RANK))
        found[layer] = (down * 0.3).astype(np.float32), (up * 0.3).astype(np.float32)
    return found


def kohya(layers: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for layer, (down, up) in layers.items():
        stem = f"lora_unet_{layer.replace('.', '_')}"
        tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
        tensors[f"{stem}.alpha"] = np.array(ALPHA, np.float32)
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_the_authors_names(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    """In kohya's style and with dots: the same picture; a fused weight is split with its change."""
    layers = original_lora(folders[name], name)
    dotted: dict[str, Any] = {}
    for layer, (down, up) in layers.items():
        stem = f"diffusion_model.{layer}"
        dotted |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        dotted[f"{stem}.alpha"] = np.array(ALPHA, np.float32)
    save(tmp_path / "kohya.safetensors", kohya(layers))
    save(tmp_path / "dotted.safetensors", dotted)
    picture, _ = pictures(folders[name], tmp_path / "kohya.safetensors")
    same, _ = pictures(folders[name], tmp_path / "dotted.safetensors")
    assert np.array_equal(picture, same)
    loras = [(tmp_path / "kohya.safetensors", 1.0)]
    changed, plain = (
        Pipeline.open(folders[name], loras=some).model.network("transformer")
        for some in (loras, [])
    )
    blocks: list[tuple[str, str, tuple[str, ...]]]
    blocks = [(ORIGINAL[name][0], "transformer_blocks", ())]
    if name == "flux":  # whose linear1 diffusers can only read in the size of the published model
        blocks.append(("single_blocks.0.linear1", "single_transformer_blocks", ("proj_mlp",)))
    for layer, block, more in blocks:
        pairs = [(each[block][0], each[block][0].attn) for each in (changed, plain)]
        ours, before = (
            [np.array(attn[part].weight) for part in ("to_q", "to_k", "to_v")]
            + [np.array(whole[part].weight) for part in more]
            for whole, attn in pairs
        )
        down, up = layers[layer]
        change = np.concatenate(ours) - np.concatenate(before)
        assert np.allclose(change, up @ down * (ALPHA / RANK), atol=1e-5)
    result = run("audit", tmp_path / "kohya.safetensors", "--for", folders[name])
    assert result.exit_code == 0 and "of transformer" in result.output


def test_kohya_for_flux(folders: dict[str, Path], tmp_path: Path) -> None:
    """As diffusers converts it."""
    pytest.importorskip("peft")
    layers = original_lora(folders["flux"], "flux")
    del layers["single_blocks.0.linear1"]
    save(tmp_path / "kohya.safetensors", kohya(layers))
    theirs = load_reference("FluxPipeline", folders["flux"])
    theirs.load_lora_weights(tmp_path, weight_name="kohya.safetensors")
    picture, _ = pictures(folders["flux"], tmp_path / "kohya.safetensors")
    assert off_by(picture, draw_reference(theirs, REQUEST, 1, guidance_scale=REQUEST.guidance)) <= 1


def test_the_lora_of_another_family_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "sd3.safetensors"
    layers = original_lora(folders["sd3"], "sd3")
    tensors = {f"{layer}.lora_A.weight": down for layer, (down, _) in layers.items()}
    save(file, {**tensors, **{f"{layer}.lora_B.weight": up for layer, (_, up) in layers.items()}})
    with pytest.raises(WeightsError, match="no place in"):
        Pipeline.open(folders["flux"], loras=[(file, 1.0)])
