"""What an export copies of a model's folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lydite import embedded
from lydite.core.errors import InputError
from lydite.pipelines.model_files import DEFAULTS
from lydite.pipelines.model_hash import model_hash
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.export import WEIGHTS, _files, check_exportable, export
from lydite.quantize.grid import fit_grid
from lydite.quantize.quantized_weight import QuantizedWeight


def test_weights_that_are_not_used_and_other_files_stay_behind(tmp_path: Path) -> None:
    folder = shutil.copytree(embedded.MODEL, tmp_path / "model")
    expected = set(_files(Pipeline.open(folder)))
    assert {Path("model_index.json"), Path("scheduler/scheduler_config.json")} <= expected
    assert any(path.parts[0] == "vae" and path.suffix == ".safetensors" for path in expected)
    assert not any(path.parts[0] == "transformer" for path in expected)  # it is written anew
    weights = next((folder / "vae").glob("*.safetensors"))
    shutil.copy(weights, weights.with_suffix(".fp16.safetensors"))
    (folder / "vae" / "code.py").write_text("raise SystemExit")
    (folder / "other").mkdir()
    (folder / "other" / "notes.txt").write_text("not in the index")
    tokenizer = sorted(each.name for each in folder.glob("tokenizer*"))[0]
    texts = {Path(tokenizer, name) for name in ("merges.txt", "spiece.model", "vocab.json")}
    for path in texts:
        (folder / path).touch()
    assert set(_files(Pipeline.open(folder))) == expected | texts


def test_all_that_makes_the_model_is_copied(tmp_path: Path) -> None:
    folder = shutil.copytree(embedded.MODEL, tmp_path / "model")
    (folder / DEFAULTS).write_text(json.dumps({"steps": 3, "guidance": 2.5}))
    source = Pipeline.open(folder)
    shutil.copytree(folder / "transformer", tmp_path / "export" / "transformer")  # written anew
    for path in _files(source):
        (tmp_path / "export" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / path, tmp_path / "export" / path)
    export = Pipeline.open(tmp_path / "export")
    assert export.defaults == source.defaults != Pipeline.open(embedded.MODEL).defaults
    assert model_hash(export.model) == model_hash(source.model)


def linked_weights(folder: Path) -> Path:
    """The folder again, its weights links to files outside, as in the hub's cache."""
    copy = shutil.copytree(folder, folder.with_name("snapshot"))
    blobs = folder.with_name("blobs")
    blobs.mkdir()
    for number, path in enumerate(sorted(copy.rglob("*.safetensors"))):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    return copy


def linked_folder(folder: Path) -> Path:
    """The folder through a link to it."""
    link = folder.with_name("link")
    link.symlink_to(folder)
    return link


def relative_folder(folder: Path) -> Path:
    """The folder from beside it, by a way that goes up and down again."""
    return Path("..", folder.parent.name, folder.name)


def one_layer(pipeline: Pipeline) -> dict[str, QuantizedWeight]:
    """A layer of zeros: an export needs one."""
    path = "transformer_blocks.0.ff.net.2"
    rows, inputs = pipeline.model.components["transformer"].expected[f"{path}.weight"]
    weight = np.zeros((rows, inputs), np.float32)
    grid = fit_grid(weight, 4, 64)
    return {path: QuantizedWeight(grid.round(weight), grid, np.zeros(rows, np.float32))}


@pytest.mark.parametrize("given", [linked_weights, linked_folder, relative_folder])
def test_an_export_is_whole_however_its_model_is_reached(
    given: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(embedded.MODEL, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    source = Pipeline.open(given(folder))
    export(source, one_layer(source), tmp_path / "export")
    copied = set(_files(Pipeline.open(folder)))
    written = {path for path in (tmp_path / "export").rglob("*") if not path.is_dir()}
    network = {Path("transformer", name) for name in ("config.json", WEIGHTS)}
    assert {path.relative_to(tmp_path / "export") for path in written} == copied | network
    assert not any(path.is_symlink() for path in written)
    opened = Pipeline.open(tmp_path / "export")
    assert {*opened.model.components} == {*source.model.components}


def test_a_folder_that_lacks_parts_is_not_written_again(untrained: Path) -> None:
    check_exportable(Pipeline.open(untrained))
    with pytest.raises(InputError, match="only whole folders"):
        check_exportable(Pipeline.open(untrained, components=untrained))
