"""Which networks a path holds: a pipeline, a component, a file beside its config, a single file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import ConfigError, FileError, LyditeError
from lydite.core.tensorfile import save
from lydite.pipelines.model_files import find_components, open_model
from lydite.pipelines.model_hash import model_hash
from support.other_programs import make_flux

NAMES = {"transformer", "vae", "text_encoder", "text_encoder_2"}


def with_index(folder: Path, changes: dict[str, Any]) -> Path:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, **changes}))
    return folder


@pytest.fixture
def pipeline(untrained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change: configs copied, weights linked."""
    shutil.copytree(untrained, tmp_path / "pipeline", copy_function=shutil.copy)
    return tmp_path / "pipeline"


def test_a_pipeline_folder_names_its_networks(untrained: Path) -> None:
    found = find_components(untrained)
    assert set(found) == NAMES
    assert all(component.path == untrained / name for name, component in found.items())
    for component in found.values():
        component.check()


def test_settings_and_parts_without_weights_are_passed_over(pipeline: Path) -> None:
    changes = {
        "requires_safety_checker": True,
        "feature_extractor": [None, None],
        "image_processor": ["transformers", "CLIPImageProcessor"],
        "tokenizer_3": ["transformers", "T5TokenizerFast"],
        "tokenizer_4": ["transformers", "CLIPTokenizer"],
        "other_scheduler": ["diffusers", "DDIMScheduler"],
        "extractor": ["transformers", "CLIPFeatureExtractor"],
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "_name_or_path": "somewhere",
    }
    assert set(find_components(with_index(pipeline, changes))) == NAMES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transformer": ["diffusers", "HunyuanDiT2DModel"]}, "transformer is a HunyuanDiT2D"),
        ({"../vae": ["diffusers", "AutoencoderKL"]}, "'../vae' is not a folder's name"),
        ({"a/b": ["diffusers", "AutoencoderKL"]}, "not a folder's name"),
        ({"image_encoder": ["transformers", "CLIPVisionModel"]}, "image_encoder is a CLIPVision"),
        ({"odd": [{"a": 1}]}, "odd is a {'a': 1}"),
    ],
)
def test_an_index_we_cannot_follow_is_refused(
    pipeline: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"model_index\.json") as caught:
        find_components(with_index(pipeline, changes))
    assert message in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("index", ["{}", '{"_class_name": "X"}', '{"vae": "AutoencoderKL"}'])
def test_an_index_without_networks_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(ConfigError, match="names no network"):
        find_components(tmp_path)


def test_the_index_decides_the_class_of_a_component(pipeline: Path) -> None:
    plain = {"text_encoder": ["transformers", "CLIPTextModel"]}
    found = find_components(with_index(pipeline, plain))
    assert "text_projection.weight" not in found["text_encoder"].expected
    assert "text_projection.weight" in found["text_encoder_2"].expected


def test_a_component_that_the_index_names_has_to_be_there(pipeline: Path) -> None:
    shutil.rmtree(pipeline / "vae")
    with pytest.raises(FileError, match="vae"):
        find_components(pipeline)


def test_a_component_of_its_own(untrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(find_components(untrained / "vae")) == {"vae"}
    monkeypatch.chdir(untrained / "vae")
    assert set(find_components(Path())) == {"vae"}


def test_a_file_beside_its_config(untrained: Path) -> None:
    path = untrained / "vae" / "diffusion_pytorch_model.safetensors"
    (component,) = find_components(path).values()
    assert (component.name, component.path) == ("vae", path)
    component.check()


def test_one_component_replaces_that_of_a_pipeline(untrained: Path, tmp_path: Path) -> None:
    """By the name of its folder, or by its class; a file or a folder; nothing is passed over."""
    whole = open_model(untrained)[1]
    shutil.copytree(untrained / "transformer", tmp_path / "mine" / "transformer")
    shutil.copytree(untrained / "transformer", tmp_path / "finetuned")
    shutil.copytree(untrained / "text_encoder", tmp_path / "encoder")
    weights = "diffusion_pytorch_model.safetensors"
    for name in (f"mine/transformer/{weights}", "mine/transformer", f"finetuned/{weights}"):
        path = tmp_path / name
        family, model, defaults = open_model(path, untrained)
        assert set(model.components) == NAMES
        assert model.components["transformer"].path == path
        assert model.scheduler == whole.scheduler
        assert model_hash(model) == model_hash(whole)
        assert (family, defaults) == (open_model(untrained)[0], open_model(untrained)[2])
        with pytest.raises(FileError, match=r"one component of a pipeline.*--components"):
            open_model(path)
    with pytest.raises(ConfigError, match=r"folder is named encoder; .* has .*text_encoder_2"):
        open_model(tmp_path / "encoder", untrained)


@pytest.mark.parametrize("variant", ["sd1", "sdxl"])
def test_a_pipeline_without_its_index_is_not_taken_for_another_programs_folder(
    variant: str, sd_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(sd_folder(variant), tmp_path / "model")
    (tmp_path / "model" / "model_index.json").unlink()
    for open_it in (find_components, open_model):
        with pytest.raises(FileError, match=r"model_index\.json is missing, though .*unet, vae"):
            open_it(tmp_path / "model")


def test_flux_without_its_index_is_not_taken_for_mfluxs(tmp_path: Path) -> None:
    folder = make_flux(tmp_path / "model")
    assert find_components(folder)
    (folder / "model_index.json").unlink()
    with pytest.raises(FileError, match=r"model_index\.json is missing, though .*transformer, vae"):
        open_model(folder)


def test_a_single_file_is_one_whatever_lies_beside_it(untrained: Path, tmp_path: Path) -> None:
    shutil.copy(untrained / "vae" / "config.json", tmp_path)
    path = tmp_path / "sd3.safetensors"
    save(path, {"model.diffusion_model.joint_blocks.0.x": np.zeros(3)})
    assert set(find_components(path)) == {"transformer"}


def test_nothing_to_be_found(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"neither model_index\.json"):
        find_components(tmp_path)
    with pytest.raises(FileError, match="no such file"):
        find_components(tmp_path / "nowhere.safetensors")
    (tmp_path / "text.safetensors").write_text("not a checkpoint")
    with pytest.raises(LyditeError):
        find_components(tmp_path / "text.safetensors")
    save(tmp_path / "lonely.safetensors", {"layer.weight": np.zeros(3)})
    with pytest.raises(ConfigError, match=r"needs its config\.json beside it"):
        find_components(tmp_path / "lonely.safetensors")
