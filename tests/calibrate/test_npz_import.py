"""What an import takes in fits the settings and itself; what does not leaves no set behind."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from lydite.calibrate.npz_export import Exported, export_npz
from lydite.calibrate.npz_import import import_npz
from lydite.calibrate.settings import BLOCKS, Description, Plan, Settings
from lydite.calibrate.store.merge import merge
from lydite.calibrate.store.set_file import NAME, read_description, write_description
from lydite.calibrate.store.verify import SuspiciousItem, verify
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import CalibrationError, LyditeError
from support.calibration import SETTINGS, draw, items, plan
from support.calibration_cli import calibrate

Arrays = dict[str, NDArray[Any]]
SIZED = Settings("f00d", {"height": 64, "width": 48}, "F32")


def sample(image: int, step: int) -> Arrays:
    x = np.random.default_rng([image, step]).standard_normal((8, 6, 16), np.float32)
    return {"x": x, "timestep": np.asarray(9.0 - step), "sigma": np.asarray(1.0 - step / 9),
            "image_id": np.asarray(image)}  # fmt: skip


def folder_of(root: Path, change: Callable[[Arrays], object] = len, **manifest: object) -> Path:
    """Two images of two steps, the last sample changed, as another tool would write them."""
    (root / "samples").mkdir(parents=True)
    save: Any = np.savez  # its options are in the way of names to a type checker
    for image in range(2):
        for step in range(2):
            arrays = sample(image, step)
            if (image, step) == (1, 1):
                change(arrays)
            save(root / "samples" / f"{image:04}_{step:03}.npz", **arrays)
    images = [{"prompt": "a cat", "seed": 0}, {"prompt": "a dog", "seed": 0}]
    (root / "manifest.json").write_text(json.dumps({"images": images, **manifest}))
    return root


def put(name: str, value: object) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({name: np.asarray(value)})


def rename(arrays: Arrays) -> None:
    arrays["latent"] = arrays.pop("x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("x", np.ones((16, 8, 6), np.float32)), r"48×64 pixels, found shape \[16, 8, 6\]"),
        (put("x", np.ones((2, 8, 16), np.float32)), r"found shape \[2, 8, 16\]"),
        (put("x", np.ones((1, 8, 6, 16), np.float32)), r"found shape \[1, 8, 6, 16\]"),
        (put("x", np.ones((16, 12, 16), np.float32)), r"\[16, 12, 16\], most .* \[8, 6, 16\]"),
        (put("x", np.ones((8, 6, 4), np.float32)), r"\[8, 6, 4\], most of the set have"),
        (put("x", np.ones((8, 6, 16), np.int64)), "expected floats, found I64"),
        (rename, "expected a latent x, found latent"),
        (lambda arrays: arrays.pop("x"), "no array in it but labels"),
        (put("x", np.full((8, 6, 16), "?")), "a dtype safetensors knows"),
        (put("sigma", [1.0, 2.0]), "expected one number as sigma"),
        (put("timestep", np.nan), "expected one number as timestep"),
        (put("sigma", -1.0), "sigma is -1; expected 0 to"),
        (put("timestep", 1e300), r"timestep is 1e\+300"),
        (put("image_id", "one"), "expected one number as image_id"),
        (put("image_id", 7), "image_id is 7, not 1"),
    ],
)
def test_a_sample_that_does_not_fit_is_named_and_leaves_no_set(
    tmp_path: Path, change: Callable[[Arrays], object], message: str
) -> None:
    source = folder_of(tmp_path / "npz", change)
    with pytest.raises(CalibrationError, match=rf"samples/0001_001\.npz: .*{message}"):
        import_npz(source, tmp_path / "set", SIZED)
    assert not (tmp_path / "set").exists()


def test_what_fits_is_taken_in_whatever_the_factor_of_the_model(tmp_path: Path) -> None:
    done = import_npz(folder_of(tmp_path / "npz"), tmp_path / "set", SIZED)
    assert (done.items, done.missing, done.exported_hash) == (4, 0, None)
    found = verify(tmp_path / "set")
    assert found.complete and found.content_hash == done.content_hash
    larger = Settings("f00d", {"height": 32, "width": 24})
    assert import_npz(tmp_path / "npz", tmp_path / "other", larger).items == 4


def test_without_a_size_any_names_and_shapes_will_do_that_are_alike(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "npz")
    for path in (source / "samples").iterdir():
        with np.load(path) as loaded:
            latent = loaded["x"][0]
        np.savez(path, latent=latent)
    unsized = Settings("f00d", {"sampler": "euler"})
    assert import_npz(source, tmp_path / "set", unsized).items == 4
    assert verify(tmp_path / "set").complete
    blocks = Settings("f00d", {"height": 64, "width": 48, BLOCKS: {"tokens": 4}})
    assert import_npz(source, tmp_path / "blocks", blocks).items == 4
    assert verify(tmp_path / "blocks").complete


def test_shapes_that_differ_within_a_set_are_suspect(tmp_path: Path) -> None:
    for name, settings in (("sized", SIZED), ("unsized", SETTINGS)):
        with Writer.start(tmp_path / name, settings, plan(1, pictures=False)) as writer:
            for step, shape in zip(
                plan(1).steps, ((8, 6, 16), (16, 8, 6), (8, 6, 16)), strict=True
            ):
                x = np.random.default_rng(step).standard_normal(shape)
                writer.commit([writer.builder.sample(0, step, {"x": x})])
    (suspect,) = verify(tmp_path / "sized").suspects
    assert suspect.item == "image 0 step 4" and "found shape [16, 8, 6]" in suspect.why
    found = verify(tmp_path / "unsized")
    assert found.sound and not found.complete
    told = "x: shape [16, 8, 6], most of the set have [8, 6, 16]"
    assert found.suspects == (SuspiciousItem("image 0 step 4", told),)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no samples in it. Expected files as samples/0001_004.npz"),
        (["sample_0_0.npz"], r"sample_0_0\.npz: expected a file named as samples/0001_004\.npz"),
        (["0000_000.npz", "00000_000.npz"], r"0000_000\.npz: the same image and step as"),
    ],
)
def test_an_import_of_nothing_is_an_error(tmp_path: Path, names: list[str], message: str) -> None:
    (tmp_path / "npz" / "samples").mkdir(parents=True)
    (tmp_path / "npz" / "manifest.json").write_text('{"images": [{"prompt": "a", "seed": 0}]}')
    for name in names:
        np.savez(tmp_path / "npz" / "samples" / name, x=np.ones((8, 6, 16), np.float32))
    with pytest.raises(CalibrationError, match=message):
        import_npz(tmp_path / "npz", tmp_path / "set", SIZED)
    assert not (tmp_path / "set").exists()


def test_two_images_of_one_prompt_and_seed_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    images = [{"prompt": "a cat", "seed": 5}] * 2
    source = folder_of(tmp_path / "npz", images=images)
    with pytest.raises(CalibrationError, match="images 0 and 1 are one, 'a cat' with seed 5"):
        import_npz(source, tmp_path / "set", SIZED)
    assert not (tmp_path / "set").exists()


def test_settings_beside_those_of_the_manifest_must_be_the_same(tmp_path: Path) -> None:
    draw(tmp_path / "set", 1)
    export_npz(tmp_path / "set", tmp_path / "npz")
    other = msgspec.structs.replace(SETTINGS, model_hash="abc")
    with pytest.raises(CalibrationError, match="model_hash: 'f00d', 'abc'; the manifest's first"):
        import_npz(tmp_path / "npz", tmp_path / "back", other)
    assert not (tmp_path / "back").exists()
    assert import_npz(tmp_path / "npz", tmp_path / "back", SETTINGS).items == 4


def test_an_import_that_was_cut_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, commit, done = folder_of(tmp_path / "npz"), Writer.commit, [0]

    def interrupted(writer: Writer, made: Any) -> Any:
        done[0] += 1
        if done[0] == 2:
            raise KeyboardInterrupt
        return commit(writer, made)

    monkeypatch.setattr(Writer, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_npz(source, tmp_path / "set", SIZED)
    found = verify(tmp_path / "set")
    assert found.sound and found.missing == 2 and not found.complete
    assert import_npz(source, tmp_path / "set", SIZED).missing == 0
    assert verify(tmp_path / "set").complete


def test_a_broken_sample_does_not_take_away_a_set_that_was_there(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "npz")
    before = import_npz(source, tmp_path / "set", SIZED).content_hash
    images = [{"prompt": "a fox", "seed": 0}, {"prompt": "a hen", "seed": 0}]
    other = folder_of(tmp_path / "other", put("x", 1.0), images=[None, None, *images])
    for path in sorted((other / "samples").iterdir(), reverse=True):
        path.rename(path.with_name(f"{int(path.name[:4]) + 2:04}{path.name[4:]}"))
    with pytest.raises(CalibrationError, match=r"samples/0002_000\.npz: image_id is 0, not 2"):
        import_npz(other, tmp_path / "set", SIZED)
    found = verify(tmp_path / "set")
    assert found.sound and found.content_hash == before and not found.complete


def test_a_folder_that_was_there_stays_and_says_that_it_is_not_complete(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "npz", rename)
    (tmp_path / "set").mkdir()
    with pytest.raises(CalibrationError, match="expected a latent x"):
        import_npz(source, tmp_path / "set", SIZED)
    found = verify(tmp_path / "set")
    assert found.sound and found.missing == 2 and not found.complete


def test_a_set_that_is_not_complete_stays_so_on_its_way(tmp_path: Path) -> None:
    cut = plan(3, conditioning=True)
    with Writer.start(tmp_path / "set", SETTINGS, cut) as writer:
        writer.commit(items(writer.builder, 1))
    assert export_npz(tmp_path / "set", tmp_path / "npz") == Exported(3, 11, 15)
    done = import_npz(tmp_path / "npz", tmp_path / "back")
    assert (done.items, done.missing) == (4, 11) and done.exported_hash == done.content_hash
    assert read_description(tmp_path / "back").plan == cut
    result = calibrate("export", tmp_path / "set", "--out", tmp_path / "again")
    assert "missing   11 of 15 items; the set is incomplete" in result.stdout
    result = calibrate("import", tmp_path / "again", "--out", tmp_path / "third")
    assert (
        "missing   11 items" in result.stdout and f"content   {done.content_hash}" in result.stdout
    )


@pytest.mark.parametrize("drawn", range(5))
def test_what_is_planned_and_not_drawn_stays_planned(tmp_path: Path, drawn: int) -> None:
    """Whatever of an image is missing: samples of later steps, its picture, or nothing."""
    cut = plan(1)
    with Writer.start(tmp_path / "set", SETTINGS, cut) as writer:
        writer.commit(items(writer.builder, 0)[:drawn] or items(writer.builder, 0)[1:])
    export_npz(tmp_path / "set", tmp_path / "npz")
    import_npz(tmp_path / "npz", tmp_path / "back")
    assert read_description(tmp_path / "back").plan == cut


def test_a_changed_export_is_read_summary_its_hash(tmp_path: Path) -> None:
    whole = draw(tmp_path / "set", 1)
    export_npz(tmp_path / "set", tmp_path / "npz")
    result = calibrate("import", tmp_path / "npz", "--out", tmp_path / "same")
    assert f"content   {whole}" in result.stdout and "differs" not in result.stdout
    np.savez(tmp_path / "npz" / "samples" / "0000_004.npz", x=np.ones((4, 8, 8), np.float32))
    result = calibrate("import", tmp_path / "npz", "--out", tmp_path / "back")
    assert result.exit_code == 0 and f"differs   from what was exported, {whole}" in result.stdout


def test_settings_that_are_missing_are_asked_for_by_the_option(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "npz")
    result = calibrate("import", source, "--out", tmp_path / "set")
    assert "Give --settings FILE.json with model_hash" in str(result.exception)


def test_an_item_that_the_plan_does_not_know_is_not_exported_under_another_name(
    tmp_path: Path,
) -> None:
    draw(tmp_path / "set", 2)
    first, second = plan(2).images
    other = Plan((first, msgspec.structs.replace(second, seed=9)), plan(2).steps)
    write_description(tmp_path / "set", Description(SETTINGS, other))
    with pytest.raises(CalibrationError, match="from another set"):
        export_npz(tmp_path / "set", tmp_path / "npz")
    assert not (tmp_path / "npz").exists()


@pytest.mark.parametrize("kind", ["pipe", "npz pipe", "jpeg", "size", "shape", "brackets", "bool"])
def test_files_that_would_hang_or_exhaust_memory_are_refused(tmp_path: Path, kind: str) -> None:
    source = folder_of(tmp_path / "npz")
    picture, sample = source / "images" / "0000.png", next((source / "samples").iterdir())
    picture.parent.mkdir(exist_ok=True)
    picture.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(picture)
    elif kind == "npz pipe":
        (source / "conditioning").mkdir()
        os.mkfifo(source / "conditioning" / "0000_conditioning.npz")
    elif kind in ("jpeg", "size"):
        Image.new("RGB", (8, 8)).save(picture, "JPEG" if kind == "jpeg" else "PNG")
    else:
        shape = {"shape": "(1000000000000,)", "brackets": "(" * 5000, "bool": "(True,)"}[kind]
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
        with zipfile.ZipFile(sample, "w") as packed:
            data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
            packed.writestr("x.npy", data + bytes(4))
    with pytest.raises(CalibrationError, match=r"not a|expected shape \[64, 48, 3\]"):
        import_npz(source, tmp_path / "set", SIZED)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    "manifest",
    [
        {"images": [{"prompt": "\ud800", "seed": 0}, {"prompt": "a", "seed": 1}]},
        {"images": [{"prompt": "a", "seed": 2**80}, {"prompt": "b", "seed": 1}]},
    ],
)
def test_a_plan_that_cannot_be_leaves_no_folder(tmp_path: Path, manifest: dict[str, Any]) -> None:
    source = folder_of(tmp_path / "npz", **manifest)
    with pytest.raises(LyditeError):
        import_npz(source, tmp_path / "set", SIZED)
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"images": {}}, "no list of images|images"),
        ({"images": [], "steps": "all"}, "manifest.json"),
        ({"lydite": {"model_hash": 3}}, "lydite: .*Expected the settings of a set"),
    ],
)
def test_a_manifest_that_says_nothing_usable_is_named(
    manifest: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = folder_of(tmp_path / "npz")
    path = source / "manifest.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **manifest}))
    with pytest.raises(CalibrationError, match=message):
        import_npz(source, tmp_path / "set", SIZED)
    assert not (tmp_path / "set").exists()


def test_a_folder_without_samples_is_named(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "npz")
    (source / "samples").rename(source / "other")
    with pytest.raises(CalibrationError, match="no folder samples/ in it"):
        import_npz(source, tmp_path / "set", SIZED)


def test_a_merge_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no set was given"):
        merge([], tmp_path / "set")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("part", ["settings", "plan"])
def test_a_description_that_lost_a_part_is_damaged(part: str, tmp_path: Path) -> None:
    draw(tmp_path / "set", 1)
    path = tmp_path / "set" / NAME
    raw = json.loads(path.read_text())
    raw[part] = None
    path.write_text(json.dumps(raw))
    with pytest.raises(CalibrationError, match=r"damaged .*lydite calibrate repair"):
        read_description(tmp_path / "set")
