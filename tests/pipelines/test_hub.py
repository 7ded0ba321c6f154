"""Models by path and by hub id; the hub's own cache layout, without a network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lydite.core.errors import FileError
from lydite.pipelines.model_files import UNWANTED, WANTED, locate
from lydite.pipelines.pipeline import Pipeline
from support.hub import serving

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


IDS = ["nobody/nothing", "a/b", "stabilityai/stable-diffusion-3.5-medium", "a/b.c@refs/pr/1"]


@pytest.mark.parametrize("model", IDS)
def test_an_absent_repository_is_one_line(model: str) -> None:
    with pytest.raises(FileError, match="hub") as caught:
        locate(model)
    assert "\n" not in str(caught.value)


def test_the_hubs_error_is_cut_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("unreachable " * 40)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(FileError) as caught:
        locate("someone/model")
    assert str(caught.value).endswith("unreachable unreachable …")


@pytest.mark.parametrize(("name", "hint"), [("embeded", True), ("Embedded", True), ("sd3", False)])
def test_the_embedded_model_misspelt(name: str, hint: bool) -> None:
    with pytest.raises(FileError) as caught:
        locate(name)
    assert ("Did you mean embedded?" in str(caught.value)) is hint


@pytest.mark.parametrize(
    "model", ["nowhere", "a/b/c", "a/b.safetensors", "a/b.CKPT", "../x/y", "a/b@", "a\x1b/b"]
)
def test_what_is_no_hub_id_is_not_downloaded(model: str) -> None:
    with pytest.raises(FileError, match="no such file or folder"):
        locate(model)


def test_nothing_is_downloaded_because_a_file_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(FileError, match="--model"):
        locate("evil-owner/evil-name", fetch=False)


def test_nothing_is_downloaded_for_a_refiner_either(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def located(name: str, *, fetch: bool = True) -> Path:
        asked.append((name, fetch))
        return locate(name) if name == "embedded" else locate("nowhere")

    monkeypatch.setattr("lydite.pipelines.pipeline.locate", located)
    with pytest.raises(FileError, match="nowhere"):
        Pipeline.open("embedded", refiner="owner/refiner", fetch=False)
    assert asked == [("embedded", False), ("owner/refiner", False)]


REPOSITORY = "someone/sd-3.5-tiny"


def test_a_model_is_downloaded_by_its_id(untrained: Path, tmp_path: Path) -> None:
    """The whole way, with a stand-in for the hub on this machine."""

    def inspect(model: str, *options: str) -> tuple[int, str]:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.address,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-m", "lydite", "inspect", model, *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr.splitlines()[-1] if done.stderr else ""

    with serving(untrained, REPOSITORY) as hub:
        hub.gated = True
        status, text = inspect(REPOSITORY)
        assert status == 2 and "gated" in text
        hub.gated = False
        status, text = inspect("someone/other-3.5")
        assert status == 2 and "neither a folder here nor a public model" in text
        status, text = inspect(REPOSITORY, "--revision", "nosuch")
        assert status == 2 and "no revision nosuch" in text
        hub.cut, hub.cuts = "transformer/diffusion_pytorch_model.safetensors", 100
        status, text = inspect(REPOSITORY)
        assert status == 2 and "The same command resumes" in text
        hub.cuts, before = 0, len(hub.requests)
        assert inspect(REPOSITORY)[0] == 0
        fetched = {path for method, path, _ in hub.requests[before:] if method == "GET"}
        (resumed,) = (path for path in fetched if "/resolve/" in path)  # what was complete stays
        assert resumed.endswith("transformer/diffusion_pytorch_model.safetensors")
        before = len(hub.requests)
        assert inspect(f"{REPOSITORY}@fp16")[0] == 0
        assert inspect(REPOSITORY, "--revision", "fp16")[0] == 0
        assert not [path for _, path, _ in hub.requests[before:] if "/resolve/" in path]


LISTED = {  # files of published repositories, and whether they are downloaded
    "model_index.json": True,
    "transformer/config.json": True,
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": True,
    "transformer/diffusion_pytorch_model.safetensors.index.json": True,
    "scheduler/scheduler_config.json": True,
    "tokenizer/merges.txt": True,
    "tokenizer_3/spiece.model": True,
    "text_encoder/model.safetensors": True,
    "text_encoder/model.fp16.safetensors": False,
    "vae/diffusion_pytorch_model.bf16.safetensors": False,
    "text_encoder/model.safetensors.index.fp16.json": False,
    "unet/diffusion_pytorch_model.bin": False,
    "text_encoders/t5xxl_fp16.safetensors": False,
    "sd3_medium.safetensors": False,
    "v1-5-pruned.ckpt": False,
    "pipeline.py": False,
    "transformer/model.py": False,
    "README.md": False,
    "images/teaser.png": False,
}


def test_only_what_is_read_is_downloaded() -> None:
    from huggingface_hub.utils import filter_repo_objects

    options = {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
    taken = set(filter_repo_objects(LISTED, **options))  # pyright: ignore[reportArgumentType]
    assert taken == {name for name, wanted in LISTED.items() if wanted}


@pytest.mark.parametrize("ending", ["safetensors", "sft", "json", "bin", "ckpt", "pt", "pth", "pkl",
                                    "gguf", "npz"])  # fmt: skip
def test_the_name_of_a_file_is_no_hub_id(ending: str) -> None:
    with pytest.raises(FileError, match="no such file or folder"):
        locate(f"models/name.{ending.upper()}")
