"""What an export copies of a model's folder."""

import json
import shutil
from pathlib import Path

import pytest

from lydite import embedded
from lydite.core.errors import InputError
from lydite.pipelines.model_files import DEFAULTS
from lydite.pipelines.model_hash import model_hash
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.export import _files, check_exportable


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


def test_a_folder_that_lacks_parts_is_not_written_again(untrained: Path) -> None:
    check_exportable(Pipeline.open(untrained))
    with pytest.raises(InputError, match="only whole folders"):
        check_exportable(Pipeline.open(untrained, components=untrained))
