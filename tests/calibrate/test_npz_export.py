"""Merging, and the layout of npz files: to and fro without a changed bit."""

import json
import zipfile
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from lydite.calibrate import npz_files
from lydite.calibrate.npz_export import export_npz
from lydite.calibrate.npz_import import import_npz
from lydite.calibrate.settings import Description, Plan, Settings
from lydite.calibrate.settings import Image as PlannedImage
from lydite.calibrate.store.merge import merge
from lydite.calibrate.store.reader import CalibrationSet
from lydite.calibrate.store.set_file import SHARDS, encode_description, read_description
from lydite.calibrate.store.status import manifest, status, write_manifest
from lydite.calibrate.store.verify import verify
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import CalibrationError, FileError, InputError
from support.calibration import SETTINGS, check_finished, draw, items, latent, pixels, plan


def part(folder: Path, numbers: list[int]) -> None:
    """A set of some images of the whole."""
    images = tuple(image for image in plan(4).images if image.number in numbers)
    with Writer.start(folder, SETTINGS, Plan(images, plan(4).steps)) as writer:
        for number in numbers:
            writer.commit(items(writer.builder, number))


def test_sets_made_apart_become_the_set_made_at_once(tmp_path: Path) -> None:
    whole = draw(tmp_path / "whole", 4)
    part(tmp_path / "a", [0, 1, 2])
    part(tmp_path / "b", [2, 3])
    done = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert (done.items, done.known, done.content_hash) == (16, 4, whole)
    check_finished(tmp_path / "both", 4, whole)
    again = merge([tmp_path / "b"], tmp_path / "both")
    assert (again.items, again.known) == (0, 8)
    assert merge([tmp_path / "b"], tmp_path / "a").content_hash == whole  # into one of them


def test_equal_numbers_of_different_images_are_renumbered(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        images = (PlannedImage(0, f"a {name}", 0), PlannedImage(3, f"a large {name}", 0))
        with Writer.start(tmp_path / name, SETTINGS, Plan(images, (0,), pictures=False)) as writer:
            for image in images:
                x = latent(image.number, len(image.prompt))
                writer.commit([writer.builder.sample(image.number, 0, {"x": x})])
    merge([tmp_path / "cat", tmp_path / "dog"], tmp_path / "both")
    with CalibrationSet.open(tmp_path / "both") as both:
        numbered = [(image.number, image.prompt) for image in both.plan.images]
        assert [(row.image, row.entry.prompt) for row in both.rows()] == numbered
    assert numbered == [(0, "a cat"), (3, "a large cat"), (4, "a dog"), (5, "a large dog")]
    assert verify(tmp_path / "both").complete


def test_two_contents_of_one_sample_are_named_before_anything_is_written(tmp_path: Path) -> None:
    part(tmp_path / "a", [0])
    with Writer.start(tmp_path / "b", SETTINGS, plan(1)) as writer:
        writer.commit([writer.builder.sample(0, 4, {"x": latent(9, 9)})])
    with pytest.raises(CalibrationError, match=r"b: image 0 step 4 \(key [0-9a-f]{12}\) differs"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_two_pictures_of_one_image_are_named_before_anything_is_written(tmp_path: Path) -> None:
    for name, shade in (("a", 1), ("b", 2)):
        with Writer.start(tmp_path / name, SETTINGS, plan(1)) as writer:
            picture = np.full_like(pixels(0), shade)
            writer.commit([writer.builder.picture(0, picture)])
    with pytest.raises(CalibrationError, match="differs"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_sets_of_other_settings_or_with_damage_are_not_merged(tmp_path: Path) -> None:
    part(tmp_path / "a", [0])
    other = msgspec.structs.replace(SETTINGS, dtype="F16")
    Writer.start(tmp_path / "b", other, plan(1)).close()
    with pytest.raises(CalibrationError, match="dtype: 'BF16', 'F16'"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    (shard,) = (tmp_path / "a" / SHARDS).iterdir()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CalibrationError, match=r"damaged\. Run first: lydite calibrate repair"):
        merge([tmp_path / "a"], tmp_path / "both")


def test_the_npz_layout_holds_what_its_readers_expect(tmp_path: Path) -> None:
    draw(tmp_path / "set", 2)
    assert export_npz(tmp_path / "set", tmp_path / "npz").samples == 6
    with np.load(tmp_path / "npz" / "samples" / "0001_004.npz") as sample:
        stored = latent(1, 4).astype("bfloat16").astype(np.float32)
        np.testing.assert_array_equal(sample["x"], stored)
        assert (sample["x"].dtype, sample["image_id"].dtype) == (np.float32, np.int32)
        assert (sample["timestep"], sample["sigma"], sample["image_id"]) == (4, 1 - 4 / 12, 1)
    listed = json.loads((tmp_path / "npz" / "manifest.json").read_text())
    assert listed["images"][1]["prompt"] == "a drawing of 1 cats"
    with Image.open(tmp_path / "npz" / "images" / "0001.png") as picture:
        np.testing.assert_array_equal(np.asarray(picture), pixels(1))
    with pytest.raises(FileError, match="not empty"):
        export_npz(tmp_path / "set", tmp_path / "npz")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_there_and_back_is_the_same_set(tmp_path: Path, dtype: str) -> None:
    settings = msgspec.convert({**msgspec.to_builtins(SETTINGS), "dtype": dtype}, Settings)
    with Writer.start(tmp_path / "set", settings, plan(2, conditioning=True)) as writer:
        for number in range(2):
            text = writer.builder.conditioning(
                plan(2).images[number].prompt, {"t": latent(7, number)}
            )
            writer.commit([*items(writer.builder, number), text])
        whole = writer.content_hash
    export_npz(tmp_path / "set", tmp_path / "npz")
    assert import_npz(tmp_path / "npz", tmp_path / "back").items == 10
    found = verify(tmp_path / "back")
    assert found.complete and found.content_hash == whole
    assert read_description(tmp_path / "back").plan == plan(2, conditioning=True)


def foreign(folder: Path) -> None:
    """What another tool left: no settings, no sigma, NumPy's own writer."""
    (folder / "samples").mkdir(parents=True)
    for step in range(2):
        np.savez(
            folder / "samples" / f"0000_{step:03}.npz",
            x=latent(0, step),
            timestep=np.float32(step),
            image_id=np.int32(0),
        )
    images = [{"prompt": "a cat", "seed": 5, "filename": "0.png"}]
    (folder / "manifest.json").write_text(json.dumps({"images": images}))


def test_a_folder_of_another_tool_is_taken_in_with_settings_given(tmp_path: Path) -> None:
    foreign(tmp_path / "npz")
    with pytest.raises(CalibrationError, match="has no settings of the samples"):
        import_npz(tmp_path / "npz", tmp_path / "set")
    assert import_npz(tmp_path / "npz", tmp_path / "set", Settings("beef", {"steps": 2})).items == 2
    with CalibrationSet.open(tmp_path / "set") as opened:
        rows = list(opened.rows())
        np.testing.assert_array_equal(opened.read(rows[1])["x"], latent(0, 1))
    entry = rows[1].entry
    assert (entry.prompt, entry.seed, entry.timestep, entry.sigma) == ("a cat", 5, 1.0, None)


def test_a_broken_folder_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign(tmp_path)
    given = Settings("beef", {})
    sample = tmp_path / "samples" / "0000_001.npz"
    good = sample.read_bytes()
    sample.write_bytes(good[:200])
    with pytest.raises(CalibrationError, match=r"0000_001\.npz: not a readable npz"):
        import_npz(tmp_path, tmp_path / "set", given)
    np.savez_compressed(sample, x=np.zeros(2**20, np.uint8))
    assert sample.stat().st_size < 2**12
    with monkeypatch.context() as patch, pytest.raises(CalibrationError, match="unpacked, limit"):
        patch.setattr("lydite.calibrate.npz_files.MAX_BYTES", 2**20)
        import_npz(tmp_path, tmp_path / "set", given)
    np.savez(sample, x=np.array([object()]))
    with pytest.raises(CalibrationError, match="Object arrays cannot be loaded"):
        import_npz(tmp_path, tmp_path / "set", given)
    np.savez(sample, x=latent(0, 0), image_id=3)
    with pytest.raises(CalibrationError, match="image_id is 3, not 0"):
        import_npz(tmp_path, tmp_path / "set", given)
    sample.write_bytes(good)
    (tmp_path / "manifest.json").write_text('{"images": [null]}')
    with pytest.raises(CalibrationError, match="image 0: expected a prompt and a seed"):
        import_npz(tmp_path, tmp_path / "set", given)


def test_status_and_manifest_say_what_is_there(tmp_path: Path) -> None:
    draw(tmp_path / "set", 3)
    Writer.start(tmp_path / "set", SETTINGS, plan(4)).close()
    found = status(tmp_path / "set")
    assert (found.planned, found.missing, found.images, found.images_complete) == (16, 4, 4, 3)
    assert (found.items, found.shards) == ({"picture": 3, "sample": 9}, 3)
    assert found.seconds_left is None, "nobody said when anything was drawn"
    json.dumps(found.as_json())
    listed = manifest(tmp_path / "set")
    assert listed["content_hash"] == found.content_hash and len(listed["items"]) == 12
    write_manifest(tmp_path / "set", tmp_path / "manifest.json")
    assert json.loads((tmp_path / "manifest.json").read_text()) == json.loads(json.dumps(listed))


def test_a_manifest_has_a_version_and_all_that_describes_a_set(tmp_path: Path) -> None:
    content = draw(tmp_path / "set", 1)
    found = manifest(tmp_path / "set")
    described = read_description(tmp_path / "set")
    assert found["format"] == "lydite-calibration" and found["version"] == 1
    assert msgspec.convert(found["settings"], Settings) == described.settings == SETTINGS
    assert msgspec.convert(found["plan"], Plan) == described.plan
    assert (found["content_hash"], found["settings_hash"]) == (content, SETTINGS.hash)
    with CalibrationSet.open(tmp_path / "set") as opened:
        assert [(item["shard"], item["digest"], item["key"]) for item in found["items"]] == [
            (row.shard, row.digest, row.key) for row in opened.rows(None)
        ]


def test_what_the_layout_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    only = Plan((PlannedImage(0, "a cat", 0),), (0,), pictures=False)
    with Writer.start(tmp_path / "set", SETTINGS, only) as writer:
        tensors = {"x": latent(0, 0), "sigma": latent(0, 1)}
        writer.commit([writer.builder.sample(0, 0, tensors)])
    with pytest.raises(CalibrationError, match="image 0 step 0: the layout keeps sigma for itself"):
        export_npz(tmp_path / "set", tmp_path / "npz")
    assert not (tmp_path / "npz").exists()


def test_conditioning_has_no_number_and_is_merged_as_it_is(tmp_path: Path) -> None:
    for name in ("a cat", "a dog"):
        kept = Plan((PlannedImage(0, name, 0),), (0,), pictures=False, conditioning=True)
        with Writer.start(tmp_path / name, SETTINGS, kept) as writer:
            x = {"x": latent(0, len(name))}
            writer.commit(
                [
                    writer.builder.sample(0, 0, x),
                    writer.builder.conditioning(name, {"text": latent(1, 1)}),
                ]
            )
    merge([tmp_path / "a cat", tmp_path / "a dog"], tmp_path / "both")
    with CalibrationSet.open(tmp_path / "both") as both:
        rows = {row.entry.prompt: row for row in both.rows("conditioning")}
        assert sorted(rows) == ["a cat", "a dog"] and not both.missing()
        assert {row.image for row in rows.values()} == {None}
        assert rows["a dog"].entry.label == "conditioning of 'a dog'"


def test_files_may_be_as_long_as_their_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(npz_files.npz_bytes({"x": np.arange(9)}))
    with zipfile.ZipFile(path) as packed:
        size = sum(member.file_size for member in packed.infolist())
    described = Description(SETTINGS, plan(2))
    length = len(encode_description(described))
    for over in (0, 1):
        monkeypatch.setattr(npz_files, "MAX_BYTES", size - over)
        monkeypatch.setattr("lydite.calibrate.store.set_file.MAX_BYTES", length - over)
        with pytest.raises(CalibrationError, match="unpacked") if over else nullcontext():
            npz_files.read_npz(path)
        with pytest.raises(InputError, match="the plan of 2 images") if over else nullcontext():
            encode_description(described)
