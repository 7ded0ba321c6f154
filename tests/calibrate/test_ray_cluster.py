"""What is asked of Ray, and what becomes of its answers: a stand-in runs tasks in this process."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lydite.calibrate import ray_cluster as cluster
from lydite.calibrate.run import Model, RunCallbacks
from lydite.calibrate.settings import Description
from lydite.calibrate.store.shards import ItemBuilder, write_shard
from lydite.calibrate.store.writer import Writer
from lydite.core.errors import CalibrationError, InputError, NotFiniteError
from support.calibration import SETTINGS, draw, items, plan

MODEL = Model("somewhere")


class _Lost(Exception):
    pass


class _Ray:
    """Answers in the reverse order of the questions."""

    exceptions = SimpleNamespace(RayError=_Lost)

    def __init__(self, folder: Path, cpus: int | None = 2) -> None:
        self.folder, self.cpus = folder, cpus
        self.given: list[dict[str, Any]] = []
        self.most = self.ended = 0
        self.answer: dict[int, Any] = {}  # instead of a shard

    def init(self, **options: Any) -> None:
        self.given.append(options)

    def shutdown(self) -> None:
        self.ended += 1

    def put(self, value: bytes) -> bytes:
        return value

    def remote(self, **options: Any) -> Any:
        self.given.append(options)
        return lambda task: SimpleNamespace(remote=lambda *question: question)

    def cluster_resources(self) -> dict[str, float]:
        return {} if self.cpus is None else {"CPU": float(self.cpus)}

    def wait(self, running: list[Any], timeout: float) -> Any:
        self.most = max(self.most, len(running))
        return [running[-1]], running[:-1]

    def get(self, question: Any) -> Any:
        encoded, model, (number, wanted) = question
        description = msgspec.json.decode(encoded, type=Description)
        assert model == MODEL and set(wanted) == {0, 4, 8, None}
        if isinstance(found := self.answer.get(number), _Lost):
            raise found
        if found is not None:
            return found
        name, _ = write_shard(self.folder, SETTINGS, items(ItemBuilder(description), number))
        return name, (self.folder / name).read_bytes()


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Ray:
    (tmp_path / "machine").mkdir()
    fake = _Ray(tmp_path / "machine")
    monkeypatch.setattr(cluster, "_ray", lambda: fake)
    return fake


def run(folder: Path, address: str = "auto", **callbacks: Any) -> str:
    with Writer.start(folder, SETTINGS, plan(9), resume="again") as writer:
        cluster.run_ray(writer, MODEL, address, RunCallbacks(**callbacks))
        return writer.content_hash


@pytest.mark.parametrize(("cpus", "most"), [(2, 4), (3, 6), (20, 9), (None, 2), (0, 2)])
def test_the_set_is_that_of_one_process(
    ray: _Ray, tmp_path: Path, cpus: int | None, most: int
) -> None:
    ray.cpus = cpus
    finished: list[int] = []
    assert run(tmp_path / "set", finished=finished.append) == draw(tmp_path / "whole", 9)
    assert sorted(finished) == list(range(9)) and ray.most == most and ray.ended == 1
    assert ray.given[1] == {"num_cpus": 1, "max_retries": 3}


def test_errors_of_tasks_end_the_run(ray: _Ray, tmp_path: Path) -> None:
    ray.answer = {5: NotFiniteError("image 5: NaN")}
    with pytest.raises(NotFiniteError, match="image 5: NaN"):
        run(tmp_path / "set")
    ray.answer = {5: _Lost("gone\nwith its machine")}
    with pytest.raises(CalibrationError, match=r"image 5: its task was lost 4 times \(gone with"):
        run(tmp_path / "set")
    assert ray.ended == 2
    ray.answer = {}
    assert run(tmp_path / "set") == draw(tmp_path / "whole", 9)


def test_a_request_to_stop_keeps_what_is_finished(ray: _Ray, tmp_path: Path) -> None:
    finished: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "set", finished=finished.append, stopping=lambda: len(finished) == 2)
    with Writer.start(tmp_path / "set", SETTINGS, plan(9)) as writer:
        assert len(writer.missing()) == 7 and ray.ended == 1


def test_where_the_cluster_is(ray: _Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error"}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    run(tmp_path / "auto")
    assert ray.given[0] == {"address": "10.0.0.1:6379", "include_dashboard": False, **quiet}
    monkeypatch.delenv("RAY_ADDRESS")
    assert cluster._where("auto") == {"address": None, "include_dashboard": False}
    with socket.create_server(("127.0.0.1", 0)) as server:
        for start in ("", "ray://"):
            address = f"{start}127.0.0.1:{server.getsockname()[1]}"
            ray.given.clear()
            run(tmp_path / f"set{start[:3]}", address)
            assert ray.given[0] == {"address": address, **quiet}
    for kind in (ConnectionError, RuntimeError, ValueError):

        def fail(kind: type[Exception] = kind, **_: Any) -> None:
            raise kind("no\nanswer")

        monkeypatch.setattr(ray, "init", fail)
        with pytest.raises(InputError, match=r"--ray auto: no cluster there \(no answer\)"):
            run(tmp_path / "none")
