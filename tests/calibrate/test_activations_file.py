"""The file of statistics: merged, pooled, asked in SQL, and never trusted when it was changed."""

import contextlib
import json
import sqlite3
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lydite.calibrate.activations.collect import Selection, collect
from lydite.calibrate.activations.file import (
    merge_files,
    read_file,
    read_summary,
    write_file,
)
from lydite.calibrate.activations.queries import read_curves
from lydite.calibrate.activations.statistics_state import (
    Provenance,
    content_hash,
    load_state,
    save_state,
)
from lydite.calibrate.store.reader import CalibrationSet
from lydite.core.errors import CalibrationError, FileError
from lydite.pipelines.pipeline import Pipeline
from support import replays


def test_two_halves_merged_are_the_whole(
    opened: CalibrationSet,
    pipeline: Pipeline,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves = [tmp_path / "a.sqlite", tmp_path / "b.sqlite"]
    for number, path in enumerate(halves, 1):
        collect(opened, pipeline, path, Selection(group=32, part=(number, 2)))
    assert merge_files(halves, tmp_path / "merged.sqlite") == 9
    merged, expected = read_file(tmp_path / "merged.sqlite"), read_file(whole)
    assert merged.table.keys() == expected.table.keys() and merged.keys == expected.keys
    for key, moments in expected.table.items():
        other = merged.table[key]
        for name in ("count", "low", "high", "zeros", "negative", "counts"):
            np.testing.assert_array_equal(getattr(other, name), getattr(moments, name))
        scale = float(moments.absmax.max())
        assert np.abs(other.mean - moments.mean).max() <= 1e-12 * scale
        assert np.abs(other.variance - moments.variance).max() <= 1e-12 * scale**2
    assert read_summary(tmp_path / "merged.sqlite").set == read_summary(whole).set
    with monkeypatch.context() as patched:

        def of_others(path: Path) -> Any:
            return msgspec.structs.replace(read_summary(path), set=path.stem)

        patched.setattr("lydite.calibrate.activations.file.read_summary", of_others)
        merge_files(halves, tmp_path / "merged.sqlite", overwrite=True)
    assert read_summary(tmp_path / "merged.sqlite").set is None  # of several
    with pytest.raises(CalibrationError, match="would count twice"):
        merge_files([halves[0], halves[0]], tmp_path / "twice.sqlite")
    collect(opened, pipeline, tmp_path / "other.sqlite", Selection(group_steps="all", part=(2, 2)))
    with pytest.raises(CalibrationError, match="collected in the same way"):
        merge_files([halves[0], tmp_path / "other.sqlite"], tmp_path / "unlike.sqlite")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.sqlite", "b.sqlite", "merged.sqlite", "other.sqlite"
    ]  # fmt: skip


def test_bands_pool_the_steps(
    opened: CalibrationSet, pipeline: Pipeline, whole: Path, tmp_path: Path
) -> None:
    collect(opened, pipeline, tmp_path / "all.sqlite", Selection(group_steps="all"))
    pooled, apart = read_file(tmp_path / "all.sqlite"), read_file(whole)
    key = ("transformer_blocks.0.ff.net.2", "in")
    steps = [apart.table[*key, step] for step in range(replays.STEPS)]
    assert pooled.table[*key, 0].count == sum(each.count for each in steps)
    np.testing.assert_array_equal(
        pooled.table[*key, 0].high, np.max([each.high for each in steps], axis=0)
    )


def test_the_file_answers_in_sql(whole: Path) -> None:
    found = read_file(whole)
    moments = found.table["transformer_blocks.0.ff.net.2", "in", 2]
    with contextlib.closing(sqlite3.connect(whole)) as connection:
        rows = connection.execute(
            "SELECT channel, count, absmax, middle, variance, negative FROM channels "
            "WHERE layer = 'transformer_blocks.0.ff.net.2' AND place = 'in' AND band = 2"
        ).fetchall()
        (least,) = connection.execute(
            "SELECT min(min) FROM layers WHERE layer LIKE '%.net.2' AND place = 'in'"
        ).fetchone()
    table = np.array(rows)
    np.testing.assert_array_equal(table[:, 0], np.arange(len(moments.mean)))
    assert set(table[:, 1]) == {moments.count}
    np.testing.assert_array_equal(table[:, 2], moments.absmax)
    middle = (moments.low.astype(np.float64) + moments.high) / 2
    np.testing.assert_allclose(table[:, 3], middle, rtol=1e-15)
    np.testing.assert_allclose(table[:, 4], moments.variance, rtol=1e-15)
    np.testing.assert_allclose(table[:, 5], moments.negative / moments.count, rtol=1e-15)
    assert -0.1701 < least < 0  # the dip of GELU
    told = read_summary(whole)
    assert told.samples == 9 and len(told.model_hash) == 64


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE channel SET mean = mean + 1e-9 WHERE place = 3 AND channel = 5",
        "DELETE FROM channel WHERE place = 3",
        "DELETE FROM band; DELETE FROM statistic",
        "DELETE FROM place WHERE id = 1",
        "UPDATE place SET layer = 'other' WHERE id = 1",
        "UPDATE place SET layer = printf('%.*c', 100000, 'x') WHERE id = 1",
        "UPDATE channel SET min = 'text' WHERE place = 1",
        "UPDATE channel SET max = NULL WHERE place = 1",
        "UPDATE statistic SET count = 0",
        "UPDATE statistic SET count = 'many'",
        "UPDATE sketch SET counts = x'00'",
        "UPDATE sketch SET counts = zeroblob(20000000) WHERE place = 1 AND band = 0",
        "UPDATE about SET value = printf('%.*c', 100000, '[')",
        "UPDATE about SET value = '{}'",
        "ALTER TABLE channel RENAME TO c; CREATE VIEW channel AS WITH RECURSIVE n(i) AS "
        "(SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT i AS place, 0 AS band, i AS channel, 0.0 "
        "AS min, 0.0 AS max, 0.0 AS mean, 0.0 AS squares, 0 AS zeros, 0 AS negatives FROM n",
        "CREATE TRIGGER t AFTER INSERT ON place BEGIN SELECT 1; END",
    ],
)
def test_a_changed_file_is_neither_merged_nor_drawn(
    whole: Path, tmp_path: Path, change: str
) -> None:
    path = tmp_path / "changed.sqlite"
    path.write_bytes(whole.read_bytes())
    assert read_curves(path)[0]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(change)
        connection.commit()
    with pytest.raises(CalibrationError, match="damaged"):
        read_curves(path)
    with pytest.raises(CalibrationError, match="damaged"):
        merge_files([path], tmp_path / "merged.sqlite")


def test_a_histogram_that_unpacks_to_much_more_is_not_unpacked(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.sqlite"
    path.write_bytes(whole.read_bytes())
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE sketch SET counts = ?", (zlib.compress(bytes(2**26)),))
        connection.commit()
    tracemalloc.start()
    try:
        with pytest.raises(CalibrationError, match="damaged"):
            read_curves(path)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_a_folder_beside_the_file_keeps_what_is_not_ours(whole: Path, tmp_path: Path) -> None:
    work = tmp_path / "merged.sqlite.work"
    work.mkdir()
    (work / "thesis.txt").write_text("mine")
    merge_files([whole], tmp_path / "merged.sqlite")
    assert [path.name for path in work.iterdir()] == ["thesis.txt"]
    (tmp_path / "other.sqlite.work").symlink_to(work)
    with pytest.raises(FileError, match="link"):
        merge_files([whole], tmp_path / "other.sqlite")


@pytest.mark.parametrize(
    "changes",
    [
        {"collected": "no JSON"}, {"collected": "[]"}, {"collected": "{}"}, {}, {"keys": 3},
        {"about": 3}, {"about": {}}, {"places": 3}, {"places": [[1]]}, {"sha256": "0"},
        {"places": [["layer", "input", 0, 1, "three"]]}, {"places": []},
    ],
)  # fmt: skip
def test_a_state_whose_description_was_changed_is_damaged(
    changes: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    save_state(state, read_file(whole))
    tensors = load_file(state)
    with safe_open(state, "np") as file:
        record = file.metadata()
    save_file(tensors, state, record)
    assert content_hash(load_state(state)) == content_hash(read_file(whole))
    summary = json.loads(record["collected"])
    given = {"collected": json.dumps(summary | changes)} if changes else {"other": ""}
    save_file(tensors, state, {**given, **{k: v for k, v in changes.items() if k == "collected"}})
    with pytest.raises(CalibrationError, match=r"damaged .*Remove its folder to start again"):
        load_state(state)


def test_what_a_killed_run_left_of_the_file_is_not_added_to(whole: Path, tmp_path: Path) -> None:
    out, temporary = tmp_path / "out.sqlite", tmp_path / "finished"
    temporary.write_bytes(whole.read_bytes())
    summary = msgspec.to_builtins(read_summary(whole))
    write_file(read_file(whole), out, temporary, summary)
    assert not temporary.exists() and out.read_bytes() == whole.read_bytes()
    assert content_hash(read_file(out)) == content_hash(read_file(whole))


@pytest.mark.parametrize("length", [1000, 1001])
def test_names_of_layers_have_a_largest_length(length: int, whole: Path, tmp_path: Path) -> None:
    statistics = read_file(whole)
    (_, place, band), moments = next(iter(statistics.table.items()))
    statistics.table = {("x" * length, place, band): moments}
    summary = msgspec.to_builtins(read_summary(whole))
    write_file(statistics, tmp_path / "out", tmp_path / "temporary", summary)
    if length == 1000:
        assert read_file(tmp_path / "out").table.keys() == statistics.table.keys()
    else:
        with pytest.raises(CalibrationError, match="a name of more than 1000 characters"):
            read_file(tmp_path / "out")


def test_statistics_are_joined_only_of_one_set_one_grouping_of_steps_and_of_channels() -> None:
    def identity(fields: str = "a", bands: tuple[int, ...] = (0, 0, 1), group: int = 0) -> str:
        settings: Any = SimpleNamespace(hashed_fields={"prompt": fields})
        return Provenance(settings, dict(enumerate(bands)), group).identity

    changed = [identity("b"), identity(bands=(0, 1, 1)), identity(group=4)]
    assert identity() == identity() and len({identity(), *changed}) == 4
