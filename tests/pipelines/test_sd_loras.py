"""Pictures with LoRAs against diffusers and PEFT, in each spelling of a file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import WeightsError
from lydite.core.request import Request
from lydite.core.tensorfile import save
from lydite.pipelines.picture import read_pixels, read_record
from lydite.pipelines.pipeline import Pipeline
from support import tiny_sd, tiny_sd3
from support.against_diffusers import draw_reference, guidance, load_reference, off_by, run

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
REQUEST = Request(prompt="a red star", negative="fox", steps=3, guidance=4.0, width=32, height=40)
RANKS = (2, 3)  # of the layers in turn
LINEARS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2")
TEXT_LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


def layers(pipeline: Any, *, convolutions: bool) -> dict[tuple[str, str], tuple[int, ...]]:
    """The shapes of weights that a LoRA changes, by network and path."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for name in ("unet", "text_encoder", "text_encoder_2"):
        endings = LINEARS if name == "unet" else TEXT_LINEARS
        endings += ("conv1", "downsamplers.0.conv") if convolutions and name == "unet" else ()
        network = getattr(pipeline, name, None)
        for path, module in network.named_modules() if network is not None else ():
            if path.endswith(endings) and hasattr(module, "weight"):
                found[name, path] = tuple(module.weight.shape)
    assert len(found) > 40
    return found


def write_lora(path: Path, pipeline: Any, spelling: str, seed: int = 0) -> Path:
    """A file in the names of PEFT, or in those of kohya's scripts over two kinds of names."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    chosen = layers(pipeline, convolutions=spelling == "peft")
    for number, ((name, layer), shape) in enumerate(chosen.items()):
        rank = RANKS[number % 2] if spelling != "peft" else RANKS[0]
        down = rng.normal(size=(rank, *shape[1:])).astype(np.float32) * 0.3
        up = rng.normal(size=(shape[0], rank, *(1,) * (len(shape) - 2))).astype(np.float32) * 0.3
        if spelling == "peft":
            tensors |= {f"{name}.{layer}.lora_A.weight": down, f"{name}.{layer}.lora_B.weight": up}
            continue
        if name != "unet":
            layer = layer if layer.startswith("text_model.") else f"text_model.{layer}"
            prefix = "lora_te2_" if name == "text_encoder_2" else "lora_te1_"
            prefix = "lora_te_" if spelling == "kohya" else prefix
        else:
            prefix = "lora_unet_"
            if spelling == "kohya-original":
                original = tiny_sd.original_unet({f"{layer}.weight": 0}, pipeline.unet.config)
                layer = next(iter(original)).removesuffix(".weight")
        stem = prefix + layer.replace(".", "_")
        tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
        # one for all: diffusers 0.42 loses the alphas of attention layers that differ
        tensors[f"{stem}.alpha"] = np.array(1.5, np.float32)
    save(path, tensors)
    return path


@pytest.mark.parametrize(
    ("variant", "spellings"),
    [("sd1", ("peft", "kohya")), ("sdxl", ("peft", "kohya-original"))],
)
def test_pictures_are_as_of_diffusers_and_peft(
    sd_folder: Any, variant: str, spellings: tuple[str, ...], tmp_path: Path
) -> None:
    """Each file alone, and two at once with weights."""
    pytest.importorskip("peft")
    name = "StableDiffusionXLPipeline" if variant == "sdxl" else "StableDiffusionPipeline"
    theirs = load_reference(name, sd_folder(variant))
    plain = next(Pipeline.open(sd_folder(variant)).generate(REQUEST, [1])).pixels.astype(int)
    files = [
        write_lora(tmp_path / f"{spelling}.safetensors", theirs, spelling, seed)
        for seed, spelling in enumerate(spellings)
    ]
    for file in files:
        theirs.load_lora_weights(file.parent, weight_name=file.name, adapter_name=file.stem[:5])
    names = [file.stem[:5] for file in files]
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.7, -0.4)):
        theirs.set_adapters(names, list(weights))
        loras = [(file, weight) for file, weight in zip(files, weights, strict=True) if weight]
        picture = next(Pipeline.open(sd_folder(variant), loras=loras).generate(REQUEST, [1]))
        assert (
            off_by(picture.pixels, draw_reference(theirs, REQUEST, 1, **guidance(REQUEST))) <= 1
        ), weights
        assert np.abs(picture.pixels - plain).max() > 20  # it changes the picture


def test_the_command_line(sd_folder: Any, tmp_path: Path) -> None:
    theirs = load_reference("StableDiffusionPipeline", sd_folder("sd1"))
    file = write_lora(tmp_path / "style.safetensors", theirs, "kohya")
    common = ("--steps", 2, "--size", "32x32", "-s", 3, "-q", "-m", sd_folder("sd1"))
    pictures: list[np.ndarray] = []
    for number, options in enumerate(
        ((), ("--lora", file), ("--lora", f"{file}:0"), ("--lora", f"{file}:0.5") * 2)
    ):
        out = tmp_path / f"{number}.png"
        given = ("-o", out, "--record-paths")
        assert run("generate", "a red star", *options, *common, *given).exit_code == 0
        pictures.append(read_pixels(out))
    assert np.array_equal(pictures[0], pictures[2])
    apart = np.abs(pictures[1].astype(int) - pictures[3])  # half of it twice is the whole
    assert apart.max() <= 1 and not np.array_equal(pictures[0], pictures[1])
    again = ("generate", "--from", tmp_path / "3.png", "-o", tmp_path / "again.png", "-q")
    assert run(*again).exit_code == 0
    assert np.array_equal(read_pixels(tmp_path / "again.png"), pictures[3])
    hashes = [read_record(tmp_path / f"{number}.png").model_hash for number in range(4)]
    assert len(set(hashes)) == 4  # the weight of a LoRA counts too
    result = run("audit", file, "--for", sd_folder("sd1"))
    assert result.exit_code == 0 and "of unet" in result.output and "ranks 2 to 3" in result.output


def test_the_lora_of_another_model_is_refused(sd_folder: Any, tmp_path: Path) -> None:
    theirs = load_reference("StableDiffusionXLPipeline", sd_folder("sdxl"))
    file = write_lora(tmp_path / "sdxl.safetensors", theirs, "kohya-original")
    for spoiled in (sd_folder("sd1"), sd_folder("sd2")):
        with pytest.raises(WeightsError, match=r"sdxl\.safetensors: "):
            Pipeline.open(spoiled, loras=[(file, 1.0)])
        with pytest.raises(WeightsError):
            run("audit", file, "--for", spoiled)
    tensors = tiny_sd3.read_tensors(file)
    save(tmp_path / "more.safetensors", {**tensors, "lora_unet_x.alpha": np.ones(1, np.float32)})
    with pytest.raises(WeightsError, match="lora_unet_x"):
        Pipeline.open(sd_folder("sdxl"), loras=[(tmp_path / "more.safetensors", 1.0)])
