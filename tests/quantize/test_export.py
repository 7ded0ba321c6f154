"""What an export copies of a model's folder."""

import shutil
from pathlib import Path

from lydite import embedded
from lydite.pipelines.pipeline import Pipeline
from lydite.quantize.export import _files


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
