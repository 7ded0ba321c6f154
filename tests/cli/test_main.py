"""The command as a whole: help that teaches, versions, verbs loaded one by one."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from lydite import __version__
from lydite.cli.main import VERBS, lydite, main
from lydite.cli.request_options import typed_arguments, with_revision
from lydite.core.errors import InputError


def test_help_shows_what_to_type_and_every_verb() -> None:
    text = CliRunner().invoke(lydite, []).output
    assert "lydite generate" in text and "Exit status" in text
    for verb in VERBS:
        assert f"  {verb} " in text


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_teaches_by_example(verb: str) -> None:
    result = CliRunner().invoke(lydite, [verb, "--help"])
    assert result.exit_code == 0 and len(result.output.splitlines()) > 8


@pytest.mark.parametrize("group", ["sampler", "calibrate"])
def test_a_group_alone_prints_its_help(group: str) -> None:
    result = CliRunner().invoke(lydite, [group])
    assert result.exit_code == 0 and f"lydite {group} " in result.output


def test_the_shell_completes_sampler_names() -> None:
    complete = ShellComplete(lydite, {}, "lydite", "_LYDITE_COMPLETE")
    items = complete.get_completions(["generate", "--sampler"], "dpmpp_2m")
    assert {item.value for item in items} >= {"dpmpp_2m", "dpmpp_2m_sde"}
    for words, begun, name in (
        (["generate", "--sampler"], "eul", "euler"),
        (["generate", "--schedule"], "kar", "karras"),
        (["generate", "--convention"], "a11", "a1111"),
        (["sampler", "show"], "kar", "karras"),
        (["sampler", "show"], "eul", "euler"),
    ):
        found = [item.value for item in complete.get_completions(words, begun)]
        assert name in found and all(each.startswith(begun) for each in found)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("[metal::malloc] Attempting to allocate 9 bytes"), "not enough memory"),
        (RuntimeError("CUDA error: out of memory"), "not enough memory"),
        (RuntimeError("Failed to compile kernel: mma.h(55): error\nmore"), "compile kernel: mma.h"),
    ],
)
def test_an_error_of_mlx_that_a_user_can_mend_is_one_line_and_another_is_not(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(raised: Exception) -> None:
        raise raised

    monkeypatch.setattr(lydite, "main", lambda **_: fail(error))
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and said in printed and len(printed.splitlines()) == 1
    monkeypatch.setattr(lydite, "main", lambda **_: fail(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        main()


def test_version_says_what_it_runs_on() -> None:
    assert CliRunner().invoke(lydite, ["--version"]).output == f"lydite {__version__}\n"
    verbose = CliRunner().invoke(lydite, ["--version", "-v"]).output
    assert "mlx 0." in verbose and "TF32 not used, Winograd not used" in verbose


def test_help_imports_neither_mlx_nor_numpy() -> None:
    code = (
        "import sys; from lydite.cli.main import lydite;"
        "lydite.main(['generate', '--help'], standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('mlx.core', 'numpy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_an_unknown_verb_or_option_exits_with_2() -> None:
    for arguments in (["dance"], ["inspect", "--nope"]):
        command = [sys.executable, "-m", "lydite", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_misspelt_verb_is_corrected() -> None:
    result = CliRunner().invoke(lydite, ["genrate", "a red star"])
    assert result.exit_code == 2 and "'generate'" in result.stderr


def test_a_closed_pipe_is_no_error(untrained) -> None:
    command = f"{sys.executable} -m lydite inspect {untrained} --all | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert not done.stderr and done.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    ("arguments", "status"), [(["dance"], 2), (["inspect", "absent"], 2), (["--version"], 0)]
)
def test_the_exit_status_does_not_need_stderr(arguments: list[str], status: int) -> None:
    command = [sys.executable, "-m", "lydite", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, check=False)
    assert done.returncode == status


@pytest.mark.parametrize(
    "line",
    [
        "lydite.cli.calibrate.run:run --prompts p.txt --out set --conditioning --option eta=1 -q",
        "lydite.cli.evaluate.models:command A --against B --prompts p.txt --json --lpips vgg a b",
        "lydite.cli.parity:command MODEL PROMPT --overwrite --points vae/* --points unet/* --json",
        "lydite.cli.quantize.model:command MODEL --out q4 --bits 4 --quiet",
        "lydite.cli.trace.record:command PROMPT --overwrite --steps 2",
    ],
)
def test_the_command_that_resumes_or_goes_on_means_the_same(line: str) -> None:
    place, *arguments = line.split()
    module, _, name = place.partition(":")
    command = getattr(import_module(module), name)
    with command.make_context(name, list(arguments)) as typed:
        words = typed_arguments(typed, ())
    with command.make_context(name, list(words)) as again:
        assert again.params == typed.params and len(words) >= len(arguments)


@pytest.mark.parametrize(
    ("model", "revision", "name"),
    [
        ("org/m", None, "org/m"), ("org/m", "v1", "org/m@v1"), ("org/m@x", "v1", None),
        ("folder", "v1", None), ("a/b/c", "v1", None), ("there/m", "v1", None),
    ],
)  # fmt: skip
def test_a_revision_is_of_a_hub_id(
    model: str, revision: str | None, name: str | None, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "m").mkdir(parents=True)
    if name is not None:
        assert with_revision(model, revision) == name
        return
    with pytest.raises(InputError, match="not a hub id"):
        with_revision(model, revision)
