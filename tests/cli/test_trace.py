"""`lydite trace` as a person uses it: our side, the reference's, and somebody's script."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from lydite.cli.main import lydite
from lydite.cli.recording import read_bytes
from lydite.cli.trace.record import _free_folder, _run_program
from lydite.core.dtypes import NUMPY_DTYPES
from lydite.core.errors import FileError, InputError
from lydite.trace.events import STORED_AS, Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

SMALL = ["--steps", "2", "--size", "32x32", "--text-length", "4"]
PORT = """
import sys
import numpy as np
from lydite.trace.taps import set_step, tap

x = np.arange(4, dtype=np.float32)
for step in range(2):
    set_step(step)
    x = tap("pipeline/latents", x + 1)
print("sum", x.sum())
sys.exit(int(sys.argv[1]))
"""


def run(*arguments: object) -> Result:
    """Run in this process; a LyditeError comes back as the result's exception."""
    return CliRunner().invoke(lydite, [str(each) for each in arguments])


def ran(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run as a person does, in a folder of its own."""
    command = [sys.executable, "-m", "lydite", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.fixture
def port(tmp_path: Path) -> Path:
    path = tmp_path / "port.py"
    path.write_text(PORT)
    return path


def test_our_side_is_written_down_and_the_next_command_said(
    untrained, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("trace", "a red fox", "-m", untrained, *SMALL, "--seed", 3)
    assert result.exit_code == 0, result.exception
    with Trace.open(tmp_path / "trace-ours-float32") as trace:
        assert trace.header.complete
        count = sum(event.kind != "selftest" for event in trace.events)
        said = trace.header.conditions
        assert (said["seed"], said["steps"], said["width"]) == (3, 2, 32)
        assert said["model"] == str(untrained)
    first, second = result.output.splitlines()
    assert first.startswith(f"trace-ours-float32: {count:,} values, ") and first.endswith(" MB")
    assert second.startswith("next: lydite trace 'a red fox' --model ")
    assert second.endswith("--seed 3 --steps 2 --size 32x32 --text-length 4 --side reference")


def test_levels_points_and_budget_decide_what_is_kept(untrained, tmp_path) -> None:
    options = ["--level", "sketch", "--points", "vae/*:out", "--points", "pipeline/*"]
    result = run("trace", "a", "-m", untrained, *SMALL, *options, "--budget", "5MB", "-q",
                 "-o", tmp_path / "run")  # fmt: skip
    assert result.exit_code == 0 and result.output == ""
    with Trace.open(tmp_path / "run") as trace:
        assert trace.header.capture["budget"] == 5_000_000
        names = {event.name.split("/")[0] for event in trace.events}
        assert names == {"vae", "pipeline"}
        assert all(event.sketch or trace.has_values(event) for event in trace.events)


def test_a_trace_is_replaced_only_when_asked_and_nothing_else_ever(untrained, tmp_path) -> None:
    out = tmp_path / "run"
    arguments = ["trace", "a", "-m", untrained, *SMALL, "--points", "pipeline/*", "-o", out]
    assert run(*arguments).exit_code == 0
    refused = run(*arguments)
    assert isinstance(refused.exception, FileError) and "--overwrite" in str(refused.exception)
    assert run(*arguments, "--overwrite").exit_code == 0
    (out / "letter.txt").write_text("keep me")
    assert isinstance(run(*arguments, "--overwrite").exception, FileError)
    assert (out / "letter.txt").read_text() == "keep me"


def test_another_traces_values_can_be_handed_to_ours(untrained, tmp_path) -> None:
    arguments = ["trace", "a", "-m", untrained, *SMALL, "--points", "pipeline/*", "-q"]
    run(*arguments, "--seed", 1, "-o", tmp_path / "one")
    inject = ["--inject", tmp_path / "one", "--at", "pipeline/noise"]
    assert run(*arguments, "--seed", 2, *inject, "-o", tmp_path / "two").exit_code == 0
    images = []
    for name in ("one", "two"):
        with Trace.open(tmp_path / name) as trace:
            event = trace.find("pipeline/image")
            assert event
            images.append(np.array(trace.read(event)))
    assert np.array_equal(*images)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no prompt"),
        (["a", "--dtype", "float64"], "for --side reference"),
        (["a", "--seed", "1-3"], "one picture"),
        (["a", "--budget", "lots"], "500MB"),
        (["a", "--inject", "x"], "go together"),
        (["a", "--at", "vae/*"], "go together"),
        (["--"], "nothing after --"),
        (["--", "no-such-program"], "no such program"),
        (["a red star", "--", "true"], "'a red star' does not apply to another program"),
        (["--text-length", "3", "--", "true"], "--text-length does not apply to another program"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(tmp_path, monkeypatch, arguments, said) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("trace", *arguments)
    assert isinstance(result.exception, InputError) and said in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_script_with_taps_is_recorded_and_ends_as_it_ends(tmp_path, port) -> None:
    done = ran("trace", "-o", "run", "--", sys.executable, port, "3", folder=tmp_path)
    assert done.returncode == 3
    assert done.stdout == "sum 14.0\n"  # and nothing of ours
    assert "run: 2 values" in done.stderr and "next: lydite diff REFERENCE run" in done.stderr
    with Trace.open(tmp_path / "run") as trace:
        assert [event.step for event in trace.events] == [0, 1]


def test_values_can_be_handed_to_a_script(tmp_path, port) -> None:
    ran("trace", "-o", "one", "--", sys.executable, port, "0", folder=tmp_path)
    path = tmp_path / "one" / "events.jsonl"
    assert json.loads(path.read_text().splitlines()[0])["name"] == "pipeline/latents"
    port.write_text(PORT.replace("x + 1", "x * 0"))
    inject = ["--inject", "one", "--at", "pipeline/*"]
    done = ran("trace", *inject, "--", sys.executable, port, "0", folder=tmp_path)
    assert done.stdout == "sum 14.0\n" and (tmp_path / "trace-port").is_dir()


def test_a_program_that_records_nothing_is_told_how(tmp_path) -> None:
    done = ran("trace", "--", "true", folder=tmp_path)
    assert done.returncode == 0 and "lydite.trace.taps.tap" in done.stderr


def test_options_after_the_dashes_belong_to_the_program(tmp_path) -> None:
    done = ran("trace", "--", "echo", "--side", "--help", "--", "x", folder=tmp_path)
    assert done.stdout == "--side --help -- x\n"


def test_a_program_killed_by_a_signal_is_passed_on_as_a_shell_does(tmp_path) -> None:
    done = ran("trace", "--", "sh", "-c", "kill -TERM $$", folder=tmp_path)
    assert done.returncode == 128 + signal.SIGTERM


def test_an_interrupt_waits_for_the_program(tmp_path) -> None:
    script = "import time\ntry:\n print('on', flush=True); time.sleep(60)\n"
    script += "except KeyboardInterrupt:\n print('bye', flush=True); raise SystemExit(5)\n"
    (tmp_path / "slow.py").write_text(script)
    command = [sys.executable, "-m", "lydite", "trace", "--", sys.executable, "slow.py"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    assert process.stdout and process.stdout.readline() == "on\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.stdout.read() == "bye\n" and process.wait() == 5
    process.stdout.close()


def test_the_status_of_the_program_survives_an_interrupt_at_its_end(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getppid(), signal.SIGINT); os._exit(5)"
    for _ in range(10):
        program = (sys.executable, "-S", "-c", code)
        assert _run_program(program, tmp_path / "none", None, None, quiet=True) == 5


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("2 GiB", 2**31), ("1.5k", 1500), ("77", 77)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1MB", "2 PB", "MB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        read_bytes(text)


@pytest.mark.parity
def test_each_command_names_the_next_one(untrained, tmp_path, monkeypatch) -> None:
    pytest.importorskip("diffusers")
    from lydite.reference import jobs
    from lydite.reference.recording import record

    # in this process, where diffusers may be loaded already; test_parity.py starts the other one
    monkeypatch.setattr(jobs, "run_job", lambda job, tick: record(job, job.outputs[0], tick))
    monkeypatch.chdir(tmp_path)
    options = ["trace", "a red fox", "-m", untrained, *SMALL, "--points", "pipeline/*"]
    reference = run(*options, "--side", "reference")
    assert reference.exit_code == 0, reference.exception
    command = shlex.split(reference.output.splitlines()[-1].removeprefix("next: lydite "))
    assert command[-2:] == ["--side", "ours"]
    ours = run(*command)
    assert ours.output.endswith("next: lydite diff trace-reference-float32 trace-ours-float32\n")
    assert run("diff", "trace-reference-float32", "trace-ours-float32").exit_code == 0


def _record(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    from lydite.trace.recorder import Recorder

    with Recorder.start(folder) as recorder:
        for name, array in arrays.items():
            recorder.record(name, array)
    return folder


def test_a_trace_is_checked_by_itself(tmp_path: Path) -> None:
    good = _record(tmp_path / "good", {"block.0": np.linspace(-1, 1, 50, dtype=np.float32)})
    result = run("trace", "check", good)
    assert result.exit_code == 0 and "nothing serious" in result.output
    bad = _record(tmp_path / "bad", {"block.1": np.array([1.0, np.nan, 2.0], np.float32)})
    result = run("trace", "check", bad, "--json")
    (remark,) = [row for row in json.loads(result.output)["remarks"] if row["serious"]]
    text = run("trace", "check", bad).output.splitlines()
    assert text[0] == f"serious  {remark['sentence']}" and text[-1].startswith(
        "1 values: 1 serious"
    )
    assert result.exit_code == 1 and "block.1" in remark["site"]
    large = _record(tmp_path / "large", {"block.2": np.array([1.0, 7e4], np.float32)})
    result = run("trace", "check", large)  # worth a note, and not wrong
    assert result.exit_code == 0 and "nothing serious, 1 notes" in result.output
    assert isinstance(run("trace", "check", tmp_path).exception, FileError)


def test_values_of_a_trace_are_listed_and_saved(tmp_path: Path) -> None:
    noise = np.arange(6, dtype=np.float32).reshape(2, 3)
    trace = _record(tmp_path / "t", {"pipeline/noise": noise, "block.0": noise + 1})
    assert "pipeline/noise" in run("trace", "show", trace).output
    assert "block.0" not in run("trace", "show", trace, "noise").output
    file = tmp_path / "noise.npy"
    assert run("trace", "show", trace, "pipeline/noise", "--save", file).exit_code == 0
    assert np.array_equal(np.load(file), noise)
    for arguments, text in (
        (("pipeline/noise", "--save", file), "exists"),
        (("nothing", "--save", tmp_path / "x.npy"), "no out of"),
        (("pipeline/noise", "--step", 9, "--save", tmp_path / "x.npy"), "step 9"),
        (("--save", tmp_path / "x.npy"), "NAME"),
        (("pipeline/noise", "--save", tmp_path / "x.txt"), ".npy"),
        (("absent",), "no name contains"),
    ):
        result = run("trace", "show", trace, *arguments)
        assert text in str(result.exception), (arguments, result.output)


@pytest.mark.parametrize("name", sorted(set(STORED_AS.values())))
def test_a_saved_value_can_be_loaded_whatever_its_dtype(name: str, tmp_path: Path) -> None:
    values = np.array([0, 1, 2]).astype(NUMPY_DTYPES[name])
    with TraceWriter(tmp_path / "t", Header()) as writer:
        writer.add("x", values)
    assert run("trace", "show", tmp_path / "t", "x", "--save", tmp_path / "x.npy").exit_code == 0
    assert np.array_equal(np.load(tmp_path / "x.npy"), values.astype(np.float64))


def test_the_list_of_values_holds_the_numbers_of_the_json(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", Header()) as writer:
        for index in range(61):
            writer.add(f"v{index}", np.full((2, 3), index, np.float32), step=index // 10)
        writer.add("v0", np.ones((), np.float32), slot="in.0")
        writer.add("v0", np.full((), 7, np.float32), slot="in.0")
        writer.add("selftest/f32", np.arange(8, dtype=np.float32), kind="selftest")
    found = json.loads(run("trace", "show", tmp_path / "t", "--json").output)["values"]
    assert len(found) == 63 and found[12]["min"] == found[12]["max"] == found[12]["rms"] == 12
    lines = run("trace", "show", tmp_path / "t", "--all").output.splitlines()
    for line, row in zip(lines, found, strict=True):
        place = row["name"] if row["slot"] == "out" else f"{row['name']}:{row['slot']}"
        assert line.split()[0] == place and f"step {row['step']} " in line
        assert f"rms {row['rms']:.4g}" in line and row["dtype"] in line
        assert ("2×3" if row["shape"] else "one number") in line
        assert ("call" in line) == bool(row["call"]) and "statistics" not in line
    short = run("trace", "show", tmp_path / "t").output.splitlines()
    assert short[:-1] == lines[:60] and short[-1].startswith("and 3 more")
    save = ("--save", tmp_path / "x.npy")
    assert run("trace", "show", tmp_path / "t", "v35", *save).exit_code == 0  # its only step is 3
    result = run("trace", "show", tmp_path / "t", "v35", "--step", 0, *save, "--overwrite")
    assert "step 0; it has out step 3 call 0" in str(result.exception)
    assert run("trace", "show", tmp_path / "t", "v0", "--slot", "in.0", "--call", 1, *save,
               "--overwrite").exit_code == 0  # fmt: skip
    assert np.load(tmp_path / "x.npy") == 7


def test_a_trace_is_not_written_over_its_injection_or_beside_other_files(tmp_path: Path) -> None:
    trace = _record(tmp_path / "t", {"x": np.zeros(2)})
    with pytest.raises(InputError, match="--inject"):
        _free_folder(tmp_path / "." / "t", True, trace)
    with pytest.raises(FileError, match="not empty"):
        _free_folder(trace, False, None)
    assert _free_folder(trace, True, None) == trace and not trace.exists()
    assert _free_folder(tmp_path / "new" / "t", False, None) == tmp_path / "new" / "t"
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "t"):
        with pytest.raises(FileError):
            _free_folder(folder, False, None)


def test_a_folder_that_cannot_be_read_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "t").mkdir()
    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(FileError, match="Permission denied"):
        _free_folder(tmp_path / "t", False, None)


def test_a_trace_whose_end_is_lost_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _record(tmp_path / "t", {"x": np.linspace(0, 1, 9)})
    assert "lost" not in run("trace", "check", folder).stdout
    before = Trace.open
    monkeypatch.setattr(Trace, "open", lambda path: replace(before(path), lost=3))
    assert "3 values at the end were lost" in run("trace", "check", folder).stdout
    assert json.loads(run("trace", "check", folder, "--json").stdout)["lost"] == 3


def test_a_program_gets_the_folder_and_what_is_injected(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LYDITE_INJECT", "old")
    code = "import os; print(sorted(k + '=' + v for k, v in os.environ.items() if 'LYDITE_' in k))"
    program = (sys.executable, "-c", code)
    assert _run_program(program, tmp_path / "t", None, None, True) == 0
    out, err = capfd.readouterr()
    assert out == f"['LYDITE_TRACE={tmp_path}/t']\n" and "holds no trace" in err
    assert _run_program(program, tmp_path / "t", tmp_path / "ref", "vae/*", True) == 0
    wanted = [
        f"LYDITE_INJECT={tmp_path}/ref",
        "LYDITE_INJECT_AT=vae/*",
        f"LYDITE_TRACE={tmp_path}/t",
    ]
    assert capfd.readouterr().out == f"{sorted(wanted)}\n"
    _record(tmp_path / "t", {"x": np.zeros(2)})
    assert _run_program((sys.executable, "-c", "exit(3)"), tmp_path / "t", None, None, False) == 3
    err = capfd.readouterr().err
    assert "next: lydite diff REFERENCE" in err and "1 value" in err
    assert _run_program((sys.executable, "-c", ""), tmp_path / "t", None, None, True) == 0
    assert not capfd.readouterr().err
    (tmp_path / "no_program").write_text("no program")
    (tmp_path / "no_program").chmod(0o755)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(FileError, match=r"no_program.*: Exec format error"):
        _run_program((str(tmp_path / "no_program"),), tmp_path / "t", None, None, True)
    assert signal.getsignal(signal.SIGINT) is handler
    killed = "import os; os.kill(os.getpid(), 15)"
    assert _run_program((sys.executable, "-c", killed), tmp_path / "t", None, None, True) == 143


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("500MB", 500 * 10**6), ("2GiB", 2 * 2**30), ("1.5kb", 1500), (" 3 t ", 3 * 10**12),
     ("1ki", 1024), ("0", None), ("-1", None), ("1.5.2MB", None), ("MB", None), ("1PB", None)],
)  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    if size is not None:
        assert read_bytes(text) == size
        return
    with pytest.raises(InputError, match="--memory"):
        read_bytes(text, "--memory")
