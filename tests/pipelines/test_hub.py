"""Models by path and by hub id; the hub's own cache layout, without a network."""

import shutil
from pathlib import Path

import pytest

from lydite.core.errors import FileError
from lydite.pipelines.model_files import locate
from lydite.pipelines.pipeline import Pipeline

COMMIT = "0" * 40


def test_a_hub_id_is_found_in_the_cache_offline(
    untrained: Path, tmp_path: Path, monkeypatch
) -> None:
    repository = tmp_path / "models--someone--tiny-sd3"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(untrained, snapshot)
    # the cache keeps files as blobs and links to them from the snapshot
    blobs = repository / "blobs"
    blobs.mkdir()
    for index, path in enumerate(sorted(snapshot.rglob("*.safetensors"))):
        path.rename(blobs / str(index))
        path.symlink_to(blobs / str(index))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    path = locate("someone/tiny-sd3")
    assert path == snapshot
    Pipeline.open(path)


@pytest.mark.parametrize("model", ["nobody/nothing", "a/b"])
def test_an_absent_repository_is_one_line(model: str) -> None:
    with pytest.raises(FileError, match="hub") as caught:
        locate(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["nowhere", "a/b/c", "a/b.safetensors", "../x/y"])
def test_what_is_no_hub_id_is_not_downloaded(model: str) -> None:
    with pytest.raises(FileError, match="no such file or folder"):
        locate(model)
