"""Many workers, one writer: nothing twice, nothing lost, whoever dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lydite.calibrate.store.set_file import INCOMING, SHARDS
from lydite.calibrate.store.verify import verify
from lydite.calibrate.store.writer import ShardWriter, Writer
from lydite.core.errors import CalibrationError
from support.calibration import SETTINGS, check_finished, draw, items, latent, plan
from support.calibration_cli import calibrate

WORK = """
import sys
from support.calibration import items
from lydite.calibrate.store.writer import ShardWriter

folder, number = sys.argv[1], int(sys.argv[2])
worker = ShardWriter(folder)
for image in (2 * number, 2 * number + 1, (2 * number + 2) % 8):  # the last is the next one's too
    worker.write(items(worker.builder, image))
    print(image, flush=True)
"""


def test_four_processes_write_for_one_writer(tmp_path: Path) -> None:
    whole = draw(tmp_path / "whole", 8)
    folder = tmp_path / "set"
    with Writer.start(folder, SETTINGS, plan(8)) as writer:
        path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
        workers = [
            subprocess.Popen([sys.executable, "-c", WORK, str(folder), str(number)], env=path)
            for number in range(4)
        ]
        added = 0
        while any(worker.poll() is None for worker in workers):
            added += writer.collect().added
        added += writer.collect().added
        assert [worker.returncode for worker in workers] == [0] * 4
        assert added == 8 * 4 and writer.content_hash == whole
        assert len(list((folder / SHARDS).iterdir())) == 8
    assert list((folder / INCOMING).iterdir()) == []
    check_finished(folder, 8, whole)


def test_what_a_worker_handed_over_survives_the_writer(tmp_path: Path) -> None:
    draw(tmp_path, 1)
    with Writer.start(tmp_path, SETTINGS, plan(2)):
        pass
    worker = ShardWriter(tmp_path)  # nobody writes now
    worker.write(items(worker.builder, 1))
    (tmp_path / INCOMING / ".0123.part").write_bytes(b"a worker was killed in it")
    with Writer.start(tmp_path, SETTINGS, plan(2)) as writer:
        assert writer.recovered.added == 4 and not writer.missing()
    assert list((tmp_path / INCOMING).iterdir()) == []


def test_a_broken_shard_that_was_handed_over_is_told_and_is_no_damage_of_the_set(
    tmp_path: Path,
) -> None:
    draw(tmp_path, 1)
    worker = ShardWriter(tmp_path)
    worker.write(items(worker.builder, 0))
    (shard,) = (tmp_path / INCOMING).iterdir()
    assert verify(tmp_path).pending == 1 and not verify(tmp_path).broken
    data = shard.read_bytes()
    for torn in (data[:-1] + bytes([data[-1] ^ 1]), data[:100]):
        shard.write_bytes(torn)
        found = verify(tmp_path)
        assert found.complete and len(found.broken) == 1 and shard.name in found.broken[0]
    told = calibrate("verify", tmp_path).stdout
    assert f"incoming  {INCOMING}/{shard.name}" in told and "will quarantine it" in told
    with Writer.start(tmp_path, SETTINGS, plan(1)):
        pass
    assert "quarantine 1 damaged shards" in calibrate("verify", tmp_path).stdout


def test_a_shard_that_is_half_known_brings_the_other_half(tmp_path: Path) -> None:
    whole = draw(tmp_path / "whole", 1)
    with Writer.start(tmp_path / "set", SETTINGS, plan(1)) as writer:
        made = items(writer.builder, 0)
        writer.commit(made[:2])
        worker = ShardWriter(tmp_path / "set")
        worker.write(made[1:])
        assert writer.collect().added == 2 and writer.content_hash == whole


def test_a_second_content_or_another_run_is_set_aside_and_the_writer_goes_on(
    tmp_path: Path,
) -> None:
    with Writer.start(tmp_path, SETTINGS, plan(2)) as writer:
        writer.commit(items(writer.builder, 0))
        before = writer.content_hash
        worker = ShardWriter(tmp_path)
        worker.write([worker.builder.sample(0, 0, {"x": latent(5, 5)})])
        (tmp_path / INCOMING / f"{'a' * 64}.safetensors").write_bytes(b"torn")
        taken = writer.collect()
        assert (taken.added, len(taken.quarantined)) == (0, 2)
        assert writer.content_hash == before
        writer.commit(items(writer.builder, 1))
    with pytest.raises(CalibrationError, match="no items to write"):
        worker.write([])
