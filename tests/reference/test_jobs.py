"""The process the reference runs in: it ends when we end, and what goes wrong is one line."""

import importlib.util
import os
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lydite.core.errors import InputError, LyditeError
from lydite.core.request import Request
from lydite.reference import __main__ as process_main
from lydite.reference import jobs
from lydite.reference.jobs import (
    Job,
    ReferenceFailed,
    ReferenceMissing,
    Reply,
    TraceOutput,
    run_job,
)

REQUEST = Request("a “star”", width=64, height=64, options={"eta": 0.5})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    outputs = (TraceOutput(str(tmp_path / "run")),)
    return Job(
        family="sd3", model=str(tmp_path / "model"), request=REQUEST, seed=0, outputs=outputs
    )


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a shell script in the place of Python."""
    monkeypatch.setattr(jobs, "check_installed", lambda: None)

    def put(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return put


def error_text(job: Job, kind: type[LyditeError] = ReferenceFailed) -> str:
    with pytest.raises(kind) as caught:
        run_job(job)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    return str(caught.value)


def test_a_job_travels_as_json() -> None:
    outputs = (TraceOutput("a"), TraceOutput("b", "float64"))
    job = Job(
        family="sd3", model="model", request=REQUEST, seed=5, outputs=outputs, points=("vae/*",)
    )
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


def test_steps_are_counted_while_it_runs(job: Job, process) -> None:
    process("cat > /dev/null; echo '{}'; echo '{}'")
    steps: list[None] = []
    run_job(job, lambda: steps.append(None))
    assert len(steps) == 2


def test_its_own_words_come_back(job: Job, process) -> None:
    process("""cat > /dev/null; echo '{"error": "no such model"}'; echo noise >&2; exit 2""")
    assert error_text(job) == "no such model"


def test_what_is_not_installed_is_another_error(job: Job, process) -> None:
    process("""cat > /dev/null; echo '{"error": "get torch", "missing": true}'; exit 2""")
    assert error_text(job, ReferenceMissing) == "get torch"


def test_an_illegal_instruction_is_named(job: Job, process) -> None:
    process("kill -ILL $$")
    assert "SIGILL" in error_text(job)


def test_a_death_without_a_word_gives_the_last_line_it_printed(job: Job, process) -> None:
    process("echo first >&2; echo 'ImportError: no such thing' >&2; echo >&2; exit 7")
    assert "status 7" in error_text(job) and error_text(job).endswith("ImportError: no such thing")


def test_it_ends_when_we_are_interrupted(job: Job, process, tmp_path: Path) -> None:
    process(f"echo $$ > {tmp_path}/pid; cat > /dev/null; echo '{{}}'; exec sleep 60")

    def interrupt() -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_job(job, interrupt)
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_process_is_started_with_its_settings(job: Job, monkeypatch) -> None:
    class Started(Exception):
        pass

    def start(command: list[str], **options: Any) -> None:
        assert command[1:] == ["-P", "-m", "lydite.reference"]
        assert {**options["env"], **jobs.SETTINGS} == options["env"]
        raise Started

    for name in jobs.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jobs.subprocess, "Popen", start)
    with pytest.raises(Started):
        run_job(job)


def test_the_users_own_settings_win() -> None:
    assert jobs.environment({})["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert jobs.environment({"ONEDNN_MAX_CPU_ISA": "DEFAULT"})["ONEDNN_MAX_CPU_ISA"] == "DEFAULT"

    assert jobs.environment({})["HF_HUB_OFFLINE"] == "1"  # it fetches nothing


@pytest.mark.parametrize(
    ("last", "status", "errors", "says"),
    [
        (Reply("no such model"), 0, "", "no such model"),
        (Reply(), 130, "", "the reference was interrupted."),
        (Reply(), -9, "", "died of SIGKILL; was memory short?"),
        (Reply(), -4, "", "died of SIGILL; torch does not suit this CPU."),
        (Reply(), -11, "", "died of SIGSEGV; torch crashed."),
        (Reply(), 3, "", "ended with status 3: ?"),
        (Reply(), 3, f"a\n{'b' * 400}\n\n", f"ended with status 3: {'b' * 300}"),
    ],
)
def test_every_end_is_one_line(last: Reply, status: int, errors: str, says: str) -> None:
    error = jobs._failure(last, status, errors)
    assert type(error) is ReferenceFailed and str(error).endswith(says)


def test_whatever_torch_raises_is_one_line_and_what_it_prints_is_no_reply() -> None:
    code = """
import sys
import lydite.reference.__main__ as process
def fail(job, output, on_step):
    print("a library's advice")
    on_step()
    raise ArithmeticError("first line\\nsecond line")
process.record = fail
sys.exit(process.main())
"""
    job = Job(family="sd3", model="m", request=REQUEST, seed=0, outputs=(TraceOutput("run"),))
    done = subprocess.run(
        [sys.executable, "-c", code], input=msgspec.json.encode(job), capture_output=True
    )
    assert done.returncode == 2 and b"advice" in done.stderr
    replies = [msgspec.json.decode(line, type=Reply) for line in done.stdout.splitlines()]
    assert replies == [Reply(), Reply("the reference failed: ArithmeticError: first line")]


@pytest.mark.parametrize(
    ("error", "status", "reply"),
    [
        (None, 0, None),
        (KeyboardInterrupt(), 130, None),
        (InputError("no such size"), InputError.exit_code, Reply("no such size")),
        (ReferenceMissing("no torch"), ReferenceMissing.exit_code, Reply("no torch", True)),
        (MemoryError(), 2, Reply("the reference failed: MemoryError: ")),
        (ValueError("x" * 999), 2, Reply(f"the reference failed: ValueError: {'x' * 300}")),
    ],
)
def test_the_process_ends_with_a_status_and_at_most_one_error(
    error: BaseException | None, status: int, reply: Reply | None, monkeypatch, tmp_path: Path
) -> None:
    """In this process: what is stdin and stdout there are files here."""
    outputs = (TraceOutput("one"), TraceOutput("two", "float64"))
    job = Job(family="sd3", model="m", request=REQUEST, seed=0, outputs=outputs)
    recorded: list[TraceOutput] = []

    def record(job: Job, output: TraceOutput, on_step: Any) -> None:
        recorded.append(output)
        on_step()
        if error is not None:
            raise error

    stdin = SimpleNamespace(buffer=BytesIO(msgspec.json.encode(job)))
    replies = tmp_path / "replies"
    monkeypatch.setattr(process_main, "record", record)
    monkeypatch.setattr(process_main.sys, "stdin", stdin)
    monkeypatch.setattr(
        process_main.os, "dup", lambda _: os.open(replies, os.O_CREAT | os.O_WRONLY)
    )
    monkeypatch.setattr(process_main.os, "dup2", lambda *_: None)
    assert process_main.main() == status
    found = [msgspec.json.decode(line, type=Reply) for line in replies.read_bytes().splitlines()]
    assert recorded == list(outputs if error is None else outputs[:1])
    assert found == [Reply()] * len(recorded) + ([] if reply is None else [reply])


@pytest.mark.parametrize("absent", ["torch", "diffusers", "transformers"])
def test_without_the_extra_nothing_is_started(job: Job, monkeypatch, absent: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == absent else found("json")
    )
    text = error_text(job, ReferenceMissing)
    assert absent in text and "pip install 'lydite[reference]'" in text


@pytest.mark.parity
def test_the_real_process_reports_an_error_in_one_line(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    unknown = msgspec.structs.replace(job, family="sd9")  # refused before torch is imported
    assert "family 'sd9' has no reference" in error_text(unknown)
    assert not (tmp_path / "run").exists()
