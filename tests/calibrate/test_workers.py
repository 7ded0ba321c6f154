"""Workers that draw: the same set as one process makes, whoever is killed."""

import multiprocessing
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from lydite.calibrate import ray_cluster as cluster
from lydite.calibrate import worker_pool
from lydite.calibrate.model_session import ModelSession, model_hash, open_pipeline
from lydite.calibrate.request_record import conditions_of
from lydite.calibrate.run import Model, RunCallbacks, run_here
from lydite.calibrate.settings import Description, Plan, Settings, plan_of
from lydite.calibrate.store.writer import Writer
from lydite.calibrate.worker_pool import Pool, PoolCallbacks, WorkerHandle
from lydite.calibrate.workers import run_workers
from lydite.core import files
from lydite.core.errors import CalibrationError, FileError, InputError, NotFiniteError
from lydite.core.request import Request
from support.calibration import FaultyDisk, same_blas

REQUEST = Request("", steps=2, guidance=3.0, text_length=4, width=32, height=32)
PLAN = plan_of([(f"a fox in snow {n}", n) for n in range(4)], (0, 1))


@pytest.fixture(scope="module")
def settings(untrained: Path) -> Settings:
    pipeline = open_pipeline(Model(str(untrained)), "float32")
    conditions = conditions_of(pipeline.plan(REQUEST).request, "float32")
    return Settings(model_hash(pipeline), conditions, "BF16", str(untrained))


@pytest.fixture(scope="module")
def whole(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The content hash of the set that one process makes."""
    folder = tmp_path_factory.mktemp("whole")
    session = ModelSession.open(Description(settings, PLAN), Model(settings.model))
    with Writer.start(folder, settings, PLAN) as writer:
        run_here(writer, session, RunCallbacks())
        return writer.content_hash


@pytest.fixture(autouse=True)
def blas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in same_blas().items():
        monkeypatch.setenv(name, value)


def test_a_killed_worker_costs_its_image_only(
    settings: Settings, whole: str, tmp_path: Path
) -> None:
    notes: list[str] = []
    finished: list[int] = []

    def stepped(image: int, step: int) -> None:
        if not notes and image == 1:
            notes.append("killed")
            for child in multiprocessing.active_children():
                child.kill()

    with Writer.start(tmp_path, settings, PLAN) as writer:
        watcher = RunCallbacks(stepped, finished.append, notes.append)
        run_workers(writer, Model(settings.model), 2, watcher)
        assert writer.content_hash == whole
    assert sorted(finished) == [0, 1, 2, 3]
    assert any("another takes over" in note for note in notes[1:])
    assert not multiprocessing.active_children()


def lost_worker(task: Any = None) -> Any:
    process = Mock(exitcode=-9)
    return WorkerHandle(process, Mock(), task)


def test_the_task_of_a_lost_worker_comes_next_and_losses_count_for_each_task() -> None:
    pool = Pool(
        Mock(), (), ["b", "c"], PoolCallbacks(Mock(), noted=(noted := Mock())), "image {}".format
    )
    pool._spawn = (spawn := Mock())  # type: ignore[method-assign]

    def lose(task: str | None) -> None:
        handle = lost_worker(task)
        pool.handles.append(handle)
        pool.lost(handle)
        assert handle.process.join.called and not pool.handles

    for task in ("a", "a", "z", None, None):
        lose(task)
        assert task is None or pool.waiting.popleft() == task
    assert spawn.call_count == noted.call_count == 5
    assert "at image z" in noted.call_args_list[2].args[0]
    assert list(pool.waiting) == ["b", "c"]
    for task, where in (
        ("a", "3 workers ended at image a"),
        (None, "3 workers ended at its start"),
    ):
        with pytest.raises(CalibrationError, match=where):
            lose(task)
    assert spawn.call_count == 5 and list(pool.waiting) == ["b", "c"]


def test_a_pool_that_ends_or_is_stopped_leaves_no_worker_and_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handles = [lost_worker("a"), lost_worker("b")]
    pool = Pool(Mock(), (), ["c", "d"], PoolCallbacks(Mock(), stopping=lambda: True))
    waiting = iter([[], [handles[0].pipe], [handles[1].pipe]])
    for handle in handles:
        handle.pipe.recv.side_effect = EOFError

    def spawn() -> None:
        pool.handles.append(handles[len(pool.handles)])

    pool._spawn = spawn  # type: ignore[method-assign]
    monkeypatch.setattr("lydite.calibrate.worker_pool.wait", lambda *_: next(waiting))
    with pytest.raises(KeyboardInterrupt):
        pool.run(2)
    assert not pool.waiting
    for handle in handles:  # asked once, and not replaced
        handle.pipe.send.assert_called_once_with(None)
    pool = Pool(Mock(), (), ["c"], PoolCallbacks(Mock(side_effect=ValueError)))
    handle = lost_worker("c")
    handle.pipe.recv.return_value = ("result", 1)
    pool._spawn = lambda: pool.handles.append(handle)  # type: ignore[method-assign]
    monkeypatch.setattr("lydite.calibrate.worker_pool.wait", lambda *_: [handle.pipe])
    with pytest.raises(ValueError):
        pool.run(1)
    for ended in (handle.pipe.close, handle.process.terminate, handle.process.join):
        ended.assert_called_once_with()


def test_a_worker_computes_on_one_core_and_hears_ctrl_c_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGINT)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    monkeypatch.setattr(worker_pool, "use_one_thread", (one_thread := Mock()))
    pipe, start = Mock(), MagicMock()
    pipe.recv.side_effect = ["task", None]
    start.return_value.__enter__.return_value = Mock(return_value="done")
    try:
        worker_pool._work(pipe, start, ("argument",))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    sent = [call.args[0] for call in pipe.send.call_args_list]
    assert sent == [("ready", None), ("result", "done"), ("end", None)]
    one_thread.assert_called_once_with()
    start.assert_called_once_with("argument")


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (KeyboardInterrupt(), ("end", None)), (InputError("no"), ("error", CalibrationError)),
        (NotFiniteError("NaN"), ("error", NotFiniteError)),
    ],
)  # fmt: skip
def test_how_a_worker_says_that_it_ends(
    error: BaseException, sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "use_one_thread", Mock())
    monkeypatch.setattr(signal, "signal", Mock())
    pipe = Mock()
    worker_pool._work(pipe, Mock(side_effect=error), ())
    ((what, value),) = (call.args[0] for call in pipe.send.call_args_list)
    assert (what, value if value is None else type(value)) == sent
    assert value is None or str(value) == str(error)


def test_a_run_that_is_stopped_leaves_whole_images_and_no_worker(
    settings: Settings, whole: str, tmp_path: Path
) -> None:
    seen: list[int] = []
    watcher = RunCallbacks(lambda image, step: seen.append(image), stopping=lambda: bool(seen))
    with Writer.start(tmp_path, settings, PLAN) as writer:
        with pytest.raises(KeyboardInterrupt):
            run_workers(writer, Model(settings.model), 1, watcher)
        assert len(writer.missing()) >= 3 and not multiprocessing.active_children()
        session = ModelSession.open(Description(settings, writer.plan), Model(settings.model))
        run_here(writer, session, RunCallbacks())
        assert writer.content_hash == whole


def test_what_goes_wrong_in_a_worker_is_one_clear_error(settings: Settings, tmp_path: Path) -> None:
    wrong = Settings("0" * 64, settings.conditions, settings.dtype, settings.model)
    with (
        Writer.start(tmp_path, wrong, PLAN) as writer,
        pytest.raises(CalibrationError, match="not the one the set was made with"),
    ):
        run_workers(writer, Model(settings.model), 1, RunCallbacks())
    assert not multiprocessing.active_children()


def test_a_disk_that_fills_up_is_told_with_the_command_to_go_on(
    settings: Settings, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = FaultyDisk(1, "ENOSPC", once=False)
    watcher = RunCallbacks(finished=lambda image: monkeypatch.setattr(files, "system", full))
    with (
        Writer.start(tmp_path, settings, PLAN, resume="COMMAND") as writer,
        pytest.raises(FileError, match=r"No space left.* resume with: COMMAND"),
    ):
        run_workers(writer, Model(settings.model), 1, watcher)
    assert full.hits and not multiprocessing.active_children()
    monkeypatch.undo()
    with Writer.start(tmp_path, settings, PLAN) as writer:
        assert 0 < len(writer.missing()) < 4
        session = ModelSession.open(Description(settings, writer.plan), Model(settings.model))
        run_here(writer, session, RunCallbacks())
        assert writer.content_hash == whole


def test_a_task_of_ray_returns_the_shard_that_a_worker_would_hand_over(
    settings: Settings, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import msgspec

    def not_finite(*_: object) -> None:
        raise NotFiniteError("image 0: NaN")

    told = msgspec.json.encode(Description(settings, PLAN))
    with Writer.start(tmp_path, settings, PLAN) as writer:
        for image, wanted in writer.missing().items():
            name, data = cluster.draw(told, Model(settings.model), (image.number, tuple(wanted)))
            (tmp_path / "incoming" / name).write_bytes(data)
        writer.collect()
        assert writer.content_hash == whole
    monkeypatch.setattr(ModelSession, "items", not_finite)
    error = cluster.draw(told, Model(settings.model), (0, (None,)))
    assert isinstance(error, NotFiniteError) and error.exit_code == 1
    strange = msgspec.json.encode(Description(Settings("1", settings.conditions), Plan((), ())))
    assert isinstance(cluster.draw(strange, Model(settings.model), (0, ())), CalibrationError)
    cluster._session.cache_clear()


def test_without_ray_the_error_says_how_to_get_it(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        Writer.start(tmp_path, settings, PLAN) as writer,
        pytest.raises(InputError, match=r"lydite\[ray\]"),
    ):
        cluster.run_ray(writer, Model(settings.model), "auto", RunCallbacks())


def test_ray_does_not_take_sigterm_while_it_starts(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    fake: Any = ModuleType("ray")

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    fake.init, fake.put, fake.shutdown = init, bytes, lambda: None
    fake.remote = lambda **_: lambda task: task
    monkeypatch.setitem(sys.modules, "ray", fake)
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with (
            Writer.start(tmp_path, settings, PLAN) as writer,
            pytest.raises(KeyboardInterrupt),
        ):
            watcher = RunCallbacks(stopping=lambda: bool(heard))
            cluster.run_ray(writer, Model(settings.model), "auto", watcher)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM, signal.SIGTERM]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:x", "127.0.0.1:99999"])
def test_an_address_where_no_cluster_is_is_refused_at_once(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with (
        Writer.start(tmp_path, settings, PLAN) as writer,
        pytest.raises(InputError, match="no cluster there"),
    ):
        cluster.run_ray(writer, Model(settings.model), address, RunCallbacks())
