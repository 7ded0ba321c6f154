"""The hash of a model's files: every byte counts, and the second time it costs nothing."""

import hashlib
import json
import os
import shutil
from dataclasses import replace as replace_fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from lydite.cli.main import lydite
from lydite.core.errors import FileError, InputError, LyditeError
from lydite.core.request import Request
from lydite.core.tensorfile import TensorFile, save
from lydite.pipelines import model_hash as hashing
from lydite.pipelines.model_files import open_model
from lydite.pipelines.model_hash import component_hash, joined_hash, model_hash, sampled_hash
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.textual_inversion import Embedding
from lydite.weights.lora import Lora

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def hash_of(folder: Path) -> str:
    return model_hash(open_model(folder)[1])


@pytest.fixture
def copy(untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(untrained, tmp_path / "model"))


def change_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "at"),
    [(WEIGHTS, -1), (WEIGHTS, -5000), ("tokenizer/vocab.json", 3), ("vae/*.safetensors", -64)],
)
def test_every_byte_counts(untrained: Path, copy: Path, name: str, at: int) -> None:
    assert hash_of(copy) == hash_of(untrained)
    change_byte(next(copy.glob(name)), at)
    try:
        assert hash_of(copy) != hash_of(untrained)
    except LyditeError:
        assert name.endswith("json")  # not read at all any more


def test_the_way_it_is_stored_does_not_count(untrained: Path, copy: Path) -> None:
    with TensorFile.open(copy / WEIGHTS) as file:
        tensors = {name: file.read(name) for name in file.header.tensors}
        save(copy / WEIGHTS, tensors, {"format": "pt", "note": "written again"})
    config = copy / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()), indent=7))
    assert hash_of(copy) == hash_of(untrained)


def test_the_second_time_no_tensor_is_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "SETTLED", 0.0)
    first = hash_of(copy)
    with monkeypatch.context() as patched:
        patched.setattr("lydite.core.checkpoint.Checkpoint.read", None)
        assert hash_of(copy) == first
    before = os.stat(copy / WEIGHTS)
    change_byte(copy / WEIGHTS, -1)
    os.utime(copy / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hash_of(copy) != first  # the size and the time of change are as they were


def test_networks_of_one_file_have_their_own_hashes_cold_and_warm(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tensors = open_model(copy)[1], dict[str, np.ndarray]()
    for name, component in model.components.items():
        with component.scope() as scope:
            tensors |= {f"{name}.{tensor}": scope.read(tensor) for tensor in scope.tensors}
    save(copy / "all.safetensors", tensors, {})
    together = {
        name: replace_fields(component, path=copy / "all.safetensors", prefix=f"{name}.")
        for name, component in model.components.items()
    }
    apart = {name: component_hash(component) for name, component in model.components.items()}
    monkeypatch.setattr(hashing, "SETTLED", 0.0)
    for _ in ("cold", "warm"):
        assert {name: component_hash(each) for name, each in together.items()} == apart
    assert len(hashing._read_cache()) == len(set(apart.values())) == len(apart)


def test_a_file_of_a_moment_ago_is_not_cached(copy: Path) -> None:
    change_byte(copy / WEIGHTS, -1)  # a clock may not tell two changes apart
    hash_of(copy)
    known = hashing._read_cache()
    assert len(known) == 0


def test_the_cache_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hashing, "MOST_CACHED", 2)
    for name in "abc":
        hashing._add_to_cache(name, name * 64)
    assert hashing._read_cache() == {"b": "b" * 64, "c": "c" * 64}


def test_a_damaged_cache_is_no_cache(copy: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "lydite" / hashing.CACHE
    cache.parent.mkdir(parents=True)
    for text in ("[", "{}", '{"a": 1}', "\x00"):
        cache.write_text(text)
        assert len(hash_of(copy)) == 64


def test_a_picture_is_not_replayed_with_another_model_unasked(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "1", "--size", "32x32", "--text-length", "4", "-s", "1"]

    def run(*words: str) -> BaseException | None:
        return CliRunner().invoke(lydite, ["generate", *words, "-q"]).exception

    assert run("a fox", "-m", "model", *small, "-o", "a.png") is None
    assert run("--from", "a.png", "-o", "b.png") is None
    change_byte(copy / WEIGHTS, -1)
    error = run("--from", "a.png", "-o", "c.png")
    assert isinstance(error, InputError) and "another model" in str(error)
    assert not Path("c.png").exists()
    assert run("--from", "a.png", "-m", "model", "-o", "d.png") is None  # with a note


def test_a_picture_of_version_0_1_knows_its_model(untrained: Path) -> None:
    pipeline = Pipeline.open(untrained)
    request = Request("a fox", steps=1, width=32, height=32, text_length=4)
    record = pipeline.record(pipeline.plan(request), 1)
    old = replace(record, model_hash=sampled_hash(pipeline.model))
    assert pipeline.made(record) and pipeline.made(old)
    assert not pipeline.made(replace(record, model_hash="0" * 64))


def test_a_file_of_a_tokenizer_is_bounded(copy: Path) -> None:
    os.truncate(copy / "tokenizer" / "merges.txt", 2**40)  # a hole: reading it would take hours
    with pytest.raises(FileError, match="more than"):
        hash_of(copy)


def test_the_hash_in_users_files_stays_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the formula would call every picture and set of today another model's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # computed, not found in the user's cache
    known = "7fd274d29c8aa93192da3fb035838b04be85b892cb22887f49c2d06ce17de602"
    assert Pipeline.open("embedded").model_hash == known
    digest = hashlib.sha256(b"a b").hexdigest()
    assert joined_hash("a", "b") == digest


def test_every_part_of_a_model_counts(untrained: Path, tmp_path: Path) -> None:
    model = open_model(untrained)[1]
    lora, word = tmp_path / "lora", tmp_path / "word"
    lora.write_bytes(b"lora")
    word.write_bytes(b"word")
    changed = {
        "as it is": model,
        "a note of the scheduler": replace_fields(model, scheduler={**model.scheduler, "_x": 1}),
        "the scheduler": replace_fields(model, scheduler={**model.scheduler, "shift": 9.0}),
        "a component less": replace_fields(
            model, components={k: v for k, v in model.components.items() if k != "vae"}
        ),
        "a config": replace_fields(
            model,
            components={
                **model.components,
                "vae": replace_fields(
                    model.components["vae"],
                    config=replace_fields(model.config("vae"), scaling_factor=0.5),
                ),
            },
        ),
        "no tokenizers": replace_fields(model, tokenizers={}),
        "a LoRA": replace_fields(model, loras=((Lora(lora, ()), 1.0),)),
        "its weight": replace_fields(model, loras=((Lora(lora, ()), 0.5),)),
        "another LoRA": replace_fields(model, loras=((Lora(word, ()), 1.0),)),
        "a word": replace_fields(model, embeddings=(Embedding(word, "w", {}),)),
        "its name": replace_fields(model, embeddings=(Embedding(word, "v", {}),)),
    }
    hashes = {name: model_hash(each) for name, each in changed.items()}
    assert hashes["as it is"] == hashes["a note of the scheduler"]
    assert len(set(hashes.values())) == len(hashes) - 1


def test_hidden_files_and_folders_are_no_part_of_a_tokenizer(tmp_path: Path) -> None:
    for name in ("b.json", "a.txt", ".DS_Store"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    found = list(hashing.tokenizer_files(tmp_path))
    assert found == [(n, hashlib.sha256(n.encode()).hexdigest()) for n in ("a.txt", "b.json")]


def test_without_a_home_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "cache_folder", lambda: None)
    hashing._add_to_cache("a", "b")
    assert hashing._read_cache() == {}


STATUS = {"st_mtime": 5.0, "st_ctime": 6.0, "st_mtime_ns": 5, "st_ctime_ns": 6} | dict.fromkeys(
    ("st_dev", "st_ino", "st_size"), 1
)


def test_a_hash_is_kept_for_one_state_of_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("a")

    def identity(name: str = "a", prefix: str = "", changes: Any = None) -> str | None:
        status = SimpleNamespace(**STATUS | (changes or {}))
        with monkeypatch.context() as patch:
            patch.setattr(hashing.time, "time", lambda: 100.0)
            patch.setattr(hashing.os, "stat", lambda _: status)
            return hashing._identity([tmp_path / name], prefix)

    kept = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    others = {identity(changes={name: 9}) for name in kept}
    others |= {identity("b"), identity(prefix="vae.")}
    assert len(others | {identity()}) == len(kept) + 3
    assert identity("link") == identity()
    for name in ("st_mtime", "st_ctime"):  # from two seconds on a change has another time
        assert identity(changes={name: 98.5}) is None
        assert identity(changes={name: 98.0}) is not None


def test_five_hundred_networks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    full = {f"{number}": "x" for number in range(500)}
    (tmp_path / "lydite").mkdir()
    (tmp_path / "lydite" / hashing.CACHE).write_text(json.dumps(full))
    hashing._add_to_cache("new", "y")
    assert list(hashing._read_cache()) == [*list(full)[1:], "new"]
