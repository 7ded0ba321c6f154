"""Sources of pictures: folders, npz files; what is converted, and what is refused."""

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lydite.core.errors import FileError, InputError, LyditeError
from lydite.evaluate.pictures import common_names, open_source, paired_pictures


def _picture(seed: int, side: int = 24) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (side, side, 3), np.uint8)


def _folder(path: Path, *seeds: int, ending: str = ".png") -> Path:
    path.mkdir(parents=True)
    for seed in seeds:
        Image.fromarray(_picture(seed)).save(path / f"{seed}{ending}")
    return path


def test_pictures_pair_by_name_whatever_their_ending_and_folder(tmp_path: Path) -> None:
    one, other = _folder(tmp_path / "a", 1, 2), _folder(tmp_path / "b", 1, 2, ending=".bmp")
    _folder(one / "deep", 3)
    _folder(other / "deep", 3)
    (one / "notes.txt").write_text("not a picture")
    (one / "._1.png").write_bytes(b"\0\5\x16\7")  # what macOS keeps beside a file
    sources = open_source(one), open_source(other)
    names = common_names(*sources)
    assert names == {"1", "2", "deep/3"}
    for name, a, b in paired_pictures(*sources, names):
        assert np.array_equal(a, b), name


def test_names_without_a_partner(tmp_path: Path) -> None:
    a, b, c = (
        open_source(_folder(tmp_path / name, *seeds))
        for name, seeds in (("a", (1, 2)), ("b", (2, 3)), ("c", (7,)))
    )
    with pytest.raises(InputError, match="1 picture without a partner"):
        common_names(a, b)
    assert common_names(a, b, only_common=True) == {"2"}
    with pytest.raises(InputError, match="no name in common"):
        common_names(a, c, only_common=True)


def test_pairs_of_two_sizes(tmp_path: Path) -> None:
    one, other = _folder(tmp_path / "a", 1), _folder(tmp_path / "b", 1)
    Image.fromarray(_picture(1, 30)).save(other / "1.png")
    sources = open_source(one), open_source(other)
    with pytest.raises(InputError, match="30×30"):
        list(paired_pictures(*sources, {"1"}))


def test_other_modes_are_converted_and_that_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    rgb = _picture(1)
    Image.fromarray(np.dstack([rgb, np.full((24, 24), 7, np.uint8)])).save(folder / "rgba.png")
    Image.fromarray(rgb[:, :, 0]).save(folder / "grey.png")
    Image.fromarray(rgb[:, :, 0].astype(np.uint16) * 257).save(folder / "sixteen.png")
    Image.fromarray(rgb).save(folder / "lossy.jpg")
    source = open_source(folder)
    pictures = dict(source.pictures())
    assert np.array_equal(pictures["rgba"], rgb)
    for name in "grey", "sixteen":
        assert np.array_equal(pictures[name], np.repeat(rgb[:, :, :1], 3, axis=2)), name
    notes = " ".join(source.notes())
    assert "JPEG" in notes and "1 RGBA" in notes and "1 L" in notes


def test_an_npz_file_is_read_picture_by_picture(tmp_path: Path) -> None:
    pictures = np.stack([_picture(seed)[:5] for seed in range(5)])  # not square
    for save in np.savez, np.savez_compressed:
        save(tmp_path / "p.npz", arr_0=pictures, labels=np.arange(5))
        source = open_source(tmp_path / "p.npz")
        assert source.names == tuple(f"{n:06}" for n in range(5))
        found = [pixels for _, pixels in source.pictures()]
        assert np.array_equal(np.stack(found), pictures)


def _npz_that_lies(path: Path, count: int) -> None:
    """A header of many pictures, and the bytes of one."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({count}, 8, 8, 3), }}"
    header = text.ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(192)
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("arr_0.npy", data)


def test_bad_files_are_one_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    twice = _folder(tmp_path / "twice", 1)
    Image.fromarray(_picture(1)).save(twice / "1.bmp")
    text = tmp_path / "x.npz"
    text.write_bytes(b"no zip")
    floats = tmp_path / "f.npz"
    np.savez(floats, arr_0=np.zeros((2, 8, 8, 3)))
    other = tmp_path / "x.txt"
    other.write_text("no picture")
    for path, match in (
        (empty, "no picture"), (twice, "one name"), (text, "not a readable"), (floats, "0 arrays"),
        (tmp_path / "missing", "no such"), (other, "expected a folder"),
    ):  # fmt: skip
        with pytest.raises(LyditeError, match=match):
            open_source(path)
    columns = tmp_path / "columns.npz"  # their bytes are in another order
    np.savez(columns, arr_0=np.asfortranarray(np.zeros((2, 8, 8, 3), np.uint8)))
    with pytest.raises(InputError, match="0 arrays"):
        open_source(columns)
    packed = tmp_path / "packed.npz"
    np.savez(packed, arr_0=np.zeros((2, 8, 8, 3), np.uint8))
    data = bytearray(packed.read_bytes())
    data[6] |= 1  # says that it is encrypted, here and in the directory at the end
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    packed.write_bytes(data)
    with pytest.raises(FileError, match="not a readable npz"):
        open_source(packed)
    lies = tmp_path / "lies.npz"
    _npz_that_lies(lies, 3)
    with pytest.raises(FileError, match="ends before picture 1"):
        list(open_source(lies).pictures())
    for count in (0, 10**7):
        _npz_that_lies(lies, count)
        with pytest.raises(InputError, match="pictures of shape"):
            open_source(lies)
    broken = _folder(tmp_path / "broken", 1)
    data = (broken / "1.png").read_bytes()
    (broken / "1.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(FileError, match=r"1\.png"):
        list(open_source(broken).pictures())


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ((1, 1, 1), True), ((3, 4, 5), True), ((4, 4, 5), False), ((3, 3, 7), False),
        ((0, 4, 5), False), ((1, 0, 5), False),
    ],
)  # fmt: skip
def test_how_many_pictures_of_which_size_an_npz_file_may_hold(
    shape: tuple[int, int, int], taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lydite.evaluate.pictures.MOST_PICTURES", 3)
    monkeypatch.setattr("lydite.evaluate.pictures.MOST_PIXELS", 20)
    np.savez(tmp_path / "p.npz", arr_0=np.zeros((*shape, 3), np.uint8))
    if taken:
        assert len(list(open_source(tmp_path / "p.npz").pictures())) == shape[0]
    else:
        with pytest.raises(InputError, match="pictures of shape"):
            open_source(tmp_path / "p.npz")
