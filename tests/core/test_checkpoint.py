"""Which file a folder means, what an index may name, and many files read as one."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.checkpoint import open_checkpoint
from lydite.core.errors import FileError, LyditeError, TensorFileError
from lydite.core.tensorfile import TensorFile, save

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def write(path: Path, *names: str) -> None:
    """A file whose tensors hold its own name, to see later where a tensor came from."""
    save(path, {name: np.frombuffer(path.name.encode(), np.uint8) for name in names})


def write_index(path: Path, weight_map: object, **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"weight_map": weight_map, **more}))
    return path


def sharded(folder: Path, index: str = INDEX) -> Path:
    """Two shards and their index."""
    write(folder / FIRST, "a", "b")
    write(folder / SECOND, "c")
    return write_index(folder / index, {"a": FIRST, "b": FIRST, "c": SECOND})


def refusal(path: Path, kind: type[LyditeError]) -> str:
    """The message with which `path` is refused, checked to be one line that names it."""
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and message.isprintable() and len(message) < 1000
    return message


def test_one_file_is_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros(0)})
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.path, checkpoint.files, checkpoint.nbytes) == (path, (path,), 48)
        assert checkpoint.tensors["a"].shape == (2, 3)
        assert checkpoint.file_of("a") == path
        np.testing.assert_array_equal(checkpoint.read("a"), np.arange(6.0).reshape(2, 3))


def test_many_files_are_read_as_one(tmp_path: Path) -> None:
    with open_checkpoint(sharded(tmp_path)) as checkpoint:
        assert checkpoint.path == tmp_path / INDEX
        assert checkpoint.files == (tmp_path / FIRST, tmp_path / SECOND)
        assert list(checkpoint.tensors) == ["a", "b", "c"]
        assert checkpoint.nbytes == 2 * len(FIRST) + len(SECOND)
        for name, file in {"a": FIRST, "b": FIRST, "c": SECOND}.items():
            assert checkpoint.read(name).tobytes().decode() == file
            assert checkpoint.file_of(name).name == file


def test_unknown_tensor_is_reported_with_the_closest_name(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", "block.0.weight")
    with open_checkpoint(tmp_path) as checkpoint:
        for find in (checkpoint.read, checkpoint.file_of):
            with pytest.raises(TensorFileError, match=r"Did you mean 'block\.0\.weight'"):
                find("block.0.weigth")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors as Linux does")
def test_closing_gives_back_every_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(sharded(tmp_path))
    assert len(os.listdir("/proc/self/fd")) > before
    checkpoint.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_bad_shard_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path)
    (tmp_path / SECOND).write_bytes(b"")
    opened: list[TensorFile] = []
    real = TensorFile.open
    monkeypatch.setattr(TensorFile, "open", lambda path: opened.append(real(path)) or opened[-1])
    with pytest.raises(TensorFileError, match="empty") as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path / SECOND) in str(caught.value)
    assert len(opened) == 1
    with pytest.raises(FileError, match="already closed"):
        opened[0].read("a")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["diffusion_pytorch_model.safetensors", "model.safetensors"], 0),
        (["model.safetensors", "aaa.safetensors"], 0),
        (["model.safetensors", "model.fp16.safetensors"], 0),
        (["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"], 0),
        (["diffusion_pytorch_model.fp16.safetensors", "other.safetensors"], 0),
        (["model.fp16.safetensors", "model.fp32.bin"], 0),
        (["flux1-dev.safetensors", "ae.bin", "config.json", "README.md"], 0),
        (["model.safetensors", "._model.safetensors", ".hidden.safetensors"], 0),
        (["weights.safetensors", "._weights.safetensors"], 0),
        (["weights.safetensors", "new\nline.safetensors"], 0),
        (["model.safetensors", "model-00001-of-00002.safetensors"], 0),
    ],
    ids=lambda value: "+".join(value).replace("\n", "|") if isinstance(value, list) else "",
)
def test_folder_means_the_preferred_file(names: list[str], expected: int, tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / name, "a")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path / names[expected]


@pytest.mark.parametrize(
    "index",
    [
        "diffusion_pytorch_model.safetensors.index.json",
        "model.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.safetensors.index.fp16.json",
        "flux1-dev.safetensors.index.json",
    ],
)
def test_folder_with_shards_means_their_index(index: str, tmp_path: Path) -> None:
    sharded(tmp_path, index)
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path / index
        assert len(checkpoint.files) == 2


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "model"])
def test_folder_means_the_plain_index_rather_than_a_variant(stem: str, tmp_path: Path) -> None:
    index = sharded(tmp_path, f"{stem}.safetensors.index.json")
    write(tmp_path / f"{stem}.fp16.safetensors", "a")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == index


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"),
        ("model-00001-of-00002.fp16.safetensors", "model-00002-of-00002.fp16.safetensors"),
    ],
)
def test_variant_shards_are_found_through_their_index(
    first: str, second: str, tmp_path: Path
) -> None:
    write(tmp_path / first, "a")
    write(tmp_path / second, "b")
    write_index(tmp_path / "model.safetensors.index.fp16.json", {"a": first, "b": second})
    with open_checkpoint(tmp_path) as checkpoint:
        assert [file.name for file in checkpoint.files] == [first, second]


@pytest.mark.parametrize(
    "names",
    [
        ["a.safetensors", "b.safetensors"],
        ["model.fp16.safetensors", "model.non_ema.safetensors"],
        ["a.safetensors", "b.safetensors.index.json"],
    ],
    ids="+".join,
)
def test_folder_that_could_mean_several_files_lists_them(names: list[str], tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / name, "a")
    message = refusal(tmp_path, FileError)
    assert all(name in message for name in names) and "Name one of them" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.ckpt", "unet.pth", "x.pt"])
def test_folder_with_pickles_alone_says_why_not(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    (tmp_path / "config.json").touch()
    message = refusal(tmp_path, FileError)
    assert str(tmp_path / name) in message and "can run code" in message and "python -c" in message


@pytest.mark.parametrize("names", [[], ["config.json"], [FIRST, SECOND], [FIRST]], ids="+".join)
def test_folder_without_weights_says_what_was_expected(names: list[str], tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / name, "a")
    message = refusal(tmp_path, FileError)
    assert "no weights" in message and "diffusion_pytorch_model.safetensors" in message
    assert all(name in message for name in names)


@pytest.mark.parametrize(
    "name", ["missing", "missing.safetensors", "missing.safetensors.index.json"]
)
def test_missing_path_is_a_file_error(name: str, tmp_path: Path) -> None:
    assert "o such file" in refusal(tmp_path / name, FileError)


def test_total_size_is_not_believed(tmp_path: Path) -> None:
    sharded(tmp_path)
    raw: dict[str, Any] = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps(raw | {"metadata": {"total_size": 1}}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.nbytes > 1


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"weight_map": null}',
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": "x.safetensors", "b": 1}}',
        '{"weight_map": {"a": ["x.safetensors"]}}',
    ],
)
def test_index_without_a_weight_map_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    assert "weight_map" in refusal(tmp_path / INDEX, TensorFileError)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map": {"a": "x", "a": "y"}}', "{'a': 1}", "{"]
)
def test_index_that_is_not_strict_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    refusal(tmp_path / INDEX, FileError)


HOSTILE = [
    *(
        "",
        ".",
        "..",
        "/",
        "\\",
        "a",
        "a.json",
        "CON",
        "~",
        "*",
        "model.safetensors ",
        "x.safetensors.exe",
    ),
    *("/etc/passwd", "/etc/x.safetensors", "../x.safetensors", "../../outside/x.safetensors"),
    *(
        "sub/x.safetensors",
        "./x.safetensors",
        "sub/../x.safetensors",
        "x.safetensors/",
        "//x.safetensors",
    ),
    *(
        "..\\x.safetensors",
        "sub\\x.safetensors",
        "\\\\host\\share\\x.safetensors",
        "C:\\x.safetensors",
    ),
    *(
        "C:x.safetensors",
        "x.safetensors:stream",
        "file:///etc/x.safetensors",
        "http://a.b/x.safetensors",
    ),
    *(
        "x\0.safetensors",
        "x.safetensors\0",
        "x\n.safetensors",
        "\x1b[2Jx.safetensors",
    ),
    *("x\u202e.safetensors", "x\u2028.safetensors", "\x7f.safetensors", "x\t.safetensors"),
]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_index_may_name_only_plain_files_beside_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    for place in (tmp_path, folder, folder / "sub", tmp_path / "outside"):
        place.mkdir(exist_ok=True)
        write(place / "x.safetensors", "a")
    write_index(folder / INDEX, {"a": name})
    monkeypatch.setattr(TensorFile, "open", lambda path: pytest.fail(f"opened {path}"))
    message = refusal(folder / INDEX, TensorFileError)
    assert "plain file name" in message or "not named *.safetensors" in message


@pytest.mark.parametrize("name", ["..．.safetensors", "․․∕x.safetensors", "．．／x.safetensors"])
def test_look_alikes_of_a_way_out_are_names_like_any_other(name: str, tmp_path: Path) -> None:
    write_index(tmp_path / INDEX, {"a": name})
    assert "1 of 1 shards are missing" in refusal(tmp_path / INDEX, FileError)
    write(tmp_path / name, "a")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.files == (tmp_path / name,)


def test_shard_name_too_long_for_the_system_is_missing(tmp_path: Path) -> None:
    write_index(tmp_path / INDEX, {"a": "n" * 5000 + ".safetensors"})
    assert "1 of 1 shards are missing" in refusal(tmp_path / INDEX, FileError)


def test_index_of_pickles_says_why_not(tmp_path: Path) -> None:
    shard = "pytorch_model-00001-of-00001.bin"
    index = write_index(tmp_path / "pytorch_model.bin.index.json", {"a": shard})
    with pytest.raises(FileError, match="can run code"):
        open_checkpoint(index)


def test_missing_shards_are_counted_and_named(tmp_path: Path) -> None:
    names = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    for name in names[1:3]:
        write(tmp_path / name, name)
    (tmp_path / names[3]).mkdir()
    (tmp_path / names[4]).symlink_to("nowhere")
    message = refusal(write_index(tmp_path / INDEX, {name: name for name in names}), FileError)
    assert "3 of 5 shards are missing" in message
    assert all((name in message) == (name not in names[1:3]) for name in names)


def test_tensor_that_its_shard_does_not_hold_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_index(tmp_path / INDEX, {"a": FIRST, "b": FIRST, "c": SECOND, "gone": SECOND})
    message = refusal(tmp_path / INDEX, TensorFileError)
    assert f"tensor 'gone' is in no shard, by the index in {SECOND}" in message


def test_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_index(tmp_path / INDEX, {"a": FIRST, "c": SECOND})
    message = refusal(tmp_path / INDEX, TensorFileError)
    assert f"tensor 'b' is in {FIRST}, by the index in no shard" in message


def test_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_index(tmp_path / INDEX, {"a": FIRST, "b": SECOND, "c": SECOND})
    message = refusal(tmp_path / INDEX, TensorFileError)
    assert f"tensor 'b' is in {FIRST}, by the index in {SECOND}" in message


@pytest.mark.parametrize("listed", [FIRST, SECOND])
def test_tensor_in_two_shards_is_refused(listed: str, tmp_path: Path) -> None:
    write(tmp_path / FIRST, "a", "b")
    write(tmp_path / SECOND, "b")
    write_index(tmp_path / INDEX, {"a": FIRST, "b": listed, "c": SECOND})
    message = refusal(tmp_path / INDEX, TensorFileError)
    assert f"tensor 'b' is in both {FIRST} and {SECOND}" in message


@pytest.mark.parametrize("shared", [False, True], ids=["own blobs", "shared blobs"])
@pytest.mark.parametrize("component", ["", "transformer"])
def test_hub_cache_is_read_through_its_links(shared: bool, component: str, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--name"
    sharded(tmp_path / "made")
    folder = repository / "snapshots" / "0123abcd" / component
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, made in enumerate(sorted((tmp_path / "made").iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        if shared:  # huggingface_hub 2: the repository's blob is itself a link to the cache's
            store = tmp_path / "hub" / "blobs" / "00" / f"{number:064x}"
            store.parent.mkdir(parents=True, exist_ok=True)
            made.rename(store)
            blob.symlink_to(os.path.relpath(store, blob.parent))
        else:
            made.rename(blob)
        (folder / made.name).symlink_to(os.path.relpath(blob, folder))
    (tmp_path / "elsewhere").symlink_to(tmp_path / "hub")
    for root in ("hub", "elsewhere"):
        with open_checkpoint(tmp_path / root / folder.relative_to(tmp_path / "hub")) as checkpoint:
            assert checkpoint.read("c").size == len(SECOND)


@pytest.mark.parametrize(
    "folder", ["model", "models--a--b/snapshots/rev", "snapshots/rev", "models--a--b/other/rev"]
)
def test_link_that_leads_out_is_refused(folder: str, tmp_path: Path) -> None:
    index = sharded(tmp_path / "download" / folder)
    shard = index.with_name(SECOND)
    shard.rename(tmp_path / "private.safetensors")
    shard.symlink_to(tmp_path / "private.safetensors")
    message = refusal(index, FileError)
    assert SECOND in message and "leads out of the folder" in message


def test_blobs_folder_that_is_a_link_opens_no_way_out(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    index = sharded(repository / "snapshots" / "rev")
    (tmp_path / "private").mkdir()
    index.with_name(SECOND).rename(tmp_path / "private" / "x")
    (repository / "blobs").symlink_to(tmp_path / "private")
    index.with_name(SECOND).symlink_to("../../blobs/x")
    assert "leads out of the folder" in refusal(index, FileError)


def test_blobs_of_what_is_no_hub_cache_are_outside(tmp_path: Path) -> None:
    index = sharded(tmp_path / "photos" / "snapshots" / "rev")
    (tmp_path / "photos" / "blobs").mkdir()
    index.with_name(SECOND).rename(tmp_path / "photos" / "blobs" / "x")
    index.with_name(SECOND).symlink_to("../../blobs/x")
    assert "leads out of the folder" in refusal(index, FileError)


def test_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    index = sharded(tmp_path / "model")
    (tmp_path / "model" / "store").mkdir()
    index.with_name(SECOND).rename(tmp_path / "model" / "store" / "x")
    index.with_name(SECOND).symlink_to("store/x")
    with open_checkpoint(index) as checkpoint:
        assert checkpoint.files[1] == index.with_name(SECOND)


def test_numbered_files_hold_each_tensor_once(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.safetensors", f"t{number}")
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.path, len(checkpoint.files)) == (tmp_path, 3)
        assert [checkpoint.file_of(f"t{n}").name for n in range(3)] == [
            f"{n}.safetensors" for n in range(3)
        ]
    write(tmp_path / "1.safetensors", "t0")
    assert "some tensors are in two of its files" in refusal(tmp_path, TensorFileError)
    write(tmp_path / "9.safetensors", "t9")
    assert "Name one of them" in refusal(tmp_path, FileError)


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    assert "cannot be read (Permission denied)" in refusal(tmp_path, FileError)
