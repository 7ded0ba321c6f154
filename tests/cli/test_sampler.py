"""`lydite sampler`: lists, tables, pictures, comparisons, verdicts; errors in one line."""

import io
import json
import re
import subprocess
import sys
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from rich.console import Console

from lydite.cli.main import lydite
from lydite.cli.sampler.compare import _cell, _relative
from lydite.cli.sampler.list import _samplers
from lydite.cli.sampler.options import finite, read_options
from lydite.conform.mistakes import PLANTED
from lydite.core.errors import InputError, LyditeError
from lydite.sampling.registry import SAMPLERS, SCHEDULES

ROOT = Path(__file__).parents[2]
CANDIDATE = ROOT / "examples/sampler_candidate.py"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(lydite, ["sampler", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """The error that `main` prints in one line, and ends with its exit code."""
    result = run(*arguments)
    assert isinstance(result.exception, LyditeError) and result.stdout == ""
    assert result.exception.exit_code == 2
    return str(result.exception)


def candidate(problem: Path, folder: Path, change: tuple[str, str] | None = None) -> None:
    program = CANDIDATE
    if change:
        text = CANDIDATE.read_text()
        assert change[0] in text
        program = folder.parent / "changed.py"
        program.write_text(text.replace(*change))
    subprocess.run([sys.executable, program, problem, folder], check=True)


def test_list_has_every_name_with_proof_and_source() -> None:
    found = json.loads(run("list", "--json").stdout)
    assert [each["name"] for each in found["samplers"]] == list(SAMPLERS)
    assert [each["name"] for each in found["schedules"]] == list(SCHEDULES)
    for each in (*found["samplers"], *found["schedules"]):
        assert each["proofs"] and each["proof"] and each["source"] and each["about"]
    lines = run("list").stdout.splitlines()  # no terminal: one line each
    assert [line.split("\t")[0] for line in lines] == [*SAMPLERS, *SCHEDULES]


@pytest.mark.parametrize("width", [100, 260])
def test_the_list_on_a_terminal_has_every_name(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lydite.cli.sampler import list as listed

    monkeypatch.setattr(
        listed, "wide_console", lambda: Console(force_terminal=True, width=width, no_color=True)
    )
    lydite.main(["sampler", "list"], standalone_mode=False)
    text = capsys.readouterr().out
    assert f"{len(SAMPLERS)} samplers" in text and f"{len(SCHEDULES)} schedules" in text
    shown = set(re.sub(r"\x1b\[[0-9;]*m", " ", text).split())
    assert {*SAMPLERS, *SCHEDULES} <= shown
    assert ("proofs" in text.split("euler")[0]) == (width == 260)
    lydite.main(["sampler", "list", "karras"], standalone_mode=False)
    text = capsys.readouterr().out
    assert (
        "1 schedule" in text
        and "1 schedules" not in text
        and "sampler" not in text.split("karras")[0]
    )


def test_list_can_be_narrowed() -> None:
    found = json.loads(run("list", "karras", "--json").stdout)
    assert [each["name"] for each in found["schedules"]] == ["karras"] and not found["samplers"]
    flow = json.loads(run("list", "--noise-model", "flow", "--json").stdout)
    assert all("flow" in each["laws"] for each in flow["samplers"]) and flow["samplers"]
    assert len(json.loads(run("show", "karras", "--json").stdout)["timesteps"]) == 10
    assert len(json.loads(run("show", "karras", "-n", 4, "--json").stdout)["timesteps"]) == 4
    assert len(json.loads(run("show", "euler", "--json").stdout)["run"]) == 8
    assert "in its name" in refused("list", "nothing-like-it")


@pytest.mark.parametrize("name", SCHEDULES)
def test_show_every_schedule(name: str) -> None:
    if SCHEDULES[name].needs:
        pytest.skip("needs an option")
    result = run("show", name, "--steps", 6, "--json")
    found = json.loads(result.stdout)
    assert len(found["sigmas"]) == len(found["timesteps"]) + 1 == len(found["c_in"]) + 1
    assert run("show", name, "--steps", 6).exit_code == 0


def test_show_a_schedule_in_numbers_one_can_check() -> None:
    found = json.loads(run("show", "karras", "--steps", 3, "--option", "rho=1", "--json").stdout)
    high, low = found["sigmas"][0], found["sigmas"][2]
    assert found["sigmas"][1] == pytest.approx((high + low) / 2)
    assert found["c_in"][0] == pytest.approx(1 / (high**2 + 1) ** 0.5)
    assert found["timesteps"][0] == pytest.approx(999)
    text = run("show", "karras", "--steps", 3).stdout
    assert "sigma" in text and "c_in" in text and "Karras" in text and "options: rho=7.0" in text


@pytest.mark.parametrize("options", [(), ("--model", "edm"), ("--convention", "comfyui")])
def test_the_table_of_a_schedule_holds_the_numbers_of_the_json(options: tuple[str, ...]) -> None:
    found = json.loads(run("show", "karras", "-n", 5, *options, "--json").stdout)
    lines = [line.split() for line in run("show", "karras", "-n", 5, *options).stdout.splitlines()]
    at = lines.index(["step", "sigma", "timestep", "c_in"])
    columns = zip(found["sigmas"], found["timesteps"], found["c_in"], strict=False)
    for index, (sigma, timestep, scale) in enumerate(columns):
        wanted = [str(index), f"{sigma:.7g}", f"{timestep:.6g}", f"{scale:.6f}"]
        assert lines[at + 1 + index] == [cell if cell != "-0" else "0" for cell in wanted]
    assert lines[at + 6] == ["end", "0"]
    text = run("show", "karras", "-n", 5, *options).stdout
    assert f"{found['model']}, 5 steps" in text and "not 5" not in text
    assert ("comfyui" in text) == ("comfyui" in options)


@pytest.mark.parametrize("name", ["euler", "heun", "euler_ancestral", "dpmpp_sde"])
def test_the_table_of_a_sampler_holds_the_numbers_of_the_json(name: str) -> None:
    found = json.loads(run("show", name, "-n", 3, "--json").stdout)
    text = run("show", name, "-n", 3).stdout
    lines = [line.split() for line in text.splitlines()]
    at = lines.index(["step", "sigma", "to", "x", "denoised"])

    def few(values: list[float]) -> list[str]:
        return [f"{value:+.5f}" for value in values]

    assert lines[at + 1] == few(found["start"]) and lines[at + 5][1:] == few(found["exact"])
    for index, step in enumerate(found["run"]):
        sigmas = [f"{step['sigma']:.5g}", f"{step['sigma_next']:.5g}"]
        wanted = [str(index), *sigmas, *few(step["x"]), *few(step["denoised"])]
        assert lines[at + 2 + index] == wanted
    assert text.splitlines()[-1].endswith(f": {found['error']:.3g}")
    assert ("which a sampler with noise" in text) == (found["noise"] != "none")
    assert (f"order {found['order'] or 0:g}, " in text) == (found["order"] is not None)
    calls = found["calls"]
    assert f"{calls} call{'s' if calls > 1 else ''} of the network" in text


def test_a_convention_changes_the_timesteps() -> None:
    ours = json.loads(run("show", "karras", "--json").stdout)
    theirs = json.loads(run("show", "karras", "--convention", "comfyui", "--json").stdout)
    assert theirs["timesteps"] == [round(t) for t in ours["timesteps"]]


@pytest.mark.parametrize("name", SAMPLERS)
def test_show_every_sampler(name: str) -> None:
    found = json.loads(run("show", name, "--json").stdout)
    assert found["run"] and found["error"] is not None
    assert run("show", name, "--steps", 1).exit_code == 0


def test_show_has_the_note_of_a_sampler() -> None:
    assert "note: with fewer than about 25 steps" in run("show", "uni_pc").stdout
    assert "note:" not in run("show", "euler").stdout


def test_names_are_completed() -> None:
    values = {"COMP_WORDS": "lydite sampler show dpmpp_2m", "COMP_CWORD": "3"}
    values["_LYDITE_COMPLETE"] = "bash_complete"
    found = CliRunner().invoke(lydite, [], env=values, prog_name="lydite").stdout
    assert "plain,dpmpp_2m\n" in found and "plain,dpmpp_2m_sde\n" in found


def test_show_a_sampler_against_the_exact_end() -> None:
    coarse = json.loads(run("show", "heun", "--steps", 10, "--json").stdout)
    fine = json.loads(run("show", "heun", "--steps", 40, "--json").stdout)
    assert 0 < fine["error"] < coarse["error"] / 4
    assert "error against the exact end" in run("show", "heun").stdout
    assert "eta" in run("show", "euler_ancestral").stdout


def test_show_reads_the_levels_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.write_text(
        '{"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, '
        '"num_train_timesteps": 1000}'
    )
    ours, theirs = (
        json.loads(run("show", "flow_shift", "--model", model, "--json").stdout)["sigmas"]
        for model in ("sd3", tmp_path)
    )
    assert ours == theirs
    euler = '{"_class_name": "EulerDiscreteScheduler", "beta_schedule": "scaled_linear", '
    path.write_text(euler + '"beta_start": 0.00085, "beta_end": 0.012}')
    found = json.loads(run("show", "karras", "--model", tmp_path, "--json").stdout)
    assert found["sigmas"][0] == pytest.approx(14.6146, rel=1e-5)
    path.write_text(euler + '"beta_start": "x"}')
    assert "beta_start" in refused("show", "karras", "--model", tmp_path)


def test_compare_two_schedules() -> None:
    found = json.loads(run("compare", "beta_timesteps", "beta_sigmas", "-n", 20, "--json").stdout)
    assert found["first"] == 1 and found["largest"] > 3
    assert "are the same" in run("compare", "exponential", "polyexponential").stdout
    assert "part at step 1" in run("compare", "beta_timesteps", "beta_sigmas").stdout


def test_compare_two_samplers() -> None:
    found = json.loads(run("compare", "euler", "dpmpp_2m", "--json").stdout)
    assert found["first"] == 1 and len(found["rows"]) == 8  # the first step is of order 1 in both
    same = run("compare", "dpmpp_2m_sde", "dpmpp_2m", "--option", "eta=0").stdout
    assert "are the same" in same


@pytest.mark.parametrize("names", [("karras", "normal"), ("euler", "heun"), ("heun", "heun")])
def test_the_table_of_a_comparison_holds_the_numbers_of_the_json(names: tuple[str, str]) -> None:
    found = json.loads(run("compare", *names, "-n", 4, "--json").stdout)
    text = run("compare", *names, "-n", 4).stdout
    lines = [line.split() for line in text.splitlines()]
    at = lines.index(["step", *names, "difference"])
    for line, row in zip(lines[at + 1 :], found["rows"], strict=True):
        wanted = f"{row['difference']:.2e}" if row["difference"] else "0"
        assert (line[0], line[-1]) == (str(row["step"]), wanted)
        one, other = (np.atleast_1d(row[side]) for side in "ab")
        size = np.abs(one).max() if names[0] == "karras" else max(1.0, np.abs(one).max())
        assert row["difference"] == pytest.approx(np.abs(other - one).max() / max(size, 1e-12))
    largest = max(row["difference"] for row in found["rows"])
    assert found["largest"] == largest == found["rows"][found["at"]]["difference"]
    parted = [row["step"] for row in found["rows"] if row["difference"] > 1e-9]
    assert found["first"] == (parted[0] if parted else None)
    assert ("are the same" in text) == (names[0] == names[1])
    if parted:
        assert f"part at step {parted[0]}; at step {found['at']} " in text


def test_plots_are_pictures(tmp_path: Path) -> None:
    sigmas, errors = tmp_path / "s.png", tmp_path / "e.png"
    assert run("plot", "karras", "normal", "-o", sigmas).exit_code == 0
    page = tmp_path / "e.html"
    assert run("plot", "euler", "heun", "-o", errors, "--html", page).exit_code == 0
    for path in (sigmas, errors):
        with Image.open(path) as picture:
            assert picture.size == (1100, 680) and np.unique(np.asarray(picture)).size > 20
    text = page.read_text()
    assert "data:image/png" in text and "heun" in text and "<script" not in text
    assert not re.search(r'(src|href)="http', text)
    assert "exists already" in refused("plot", "euler", "-o", errors)
    replaced = run("plot", "euler", "heun", "-o", errors, "--html", page, "--overwrite")
    assert replaced.exit_code == 0


@pytest.mark.parametrize(
    "asked",
    [
        ["--guidance", "3"],
        ["--prediction", "v"],
        ["--model", "sd3", "--steps", "5", "--guidance", "4"],
        ["--prediction", "denoised", "--denoiser", "gaussian"],
        ["--convention", "comfyui", "--schedule", "normal"],
        ["--denoiser", "zero", "--steps", "1"],
    ],
)
def test_the_example_conforms(asked: list[str], tmp_path: Path) -> None:
    problem, folder = tmp_path / "p.json", tmp_path / "run"
    assert run("conform", "--write", problem, *asked).exit_code == 0
    candidate(problem, folder)
    result = run("conform", problem, folder)
    assert result.exit_code == 0 and result.stdout.startswith("conforms  euler"), result.stdout


def test_a_deviation_says_step_cause_and_fix(tmp_path: Path) -> None:
    problem, folder = tmp_path / "p.json", tmp_path / "run"
    run("conform", "--write", problem, "--guidance", 3)
    candidate(problem, folder, ("x + (x - denoised) / sigma", "x + denoised"))
    result = run("conform", problem, folder)
    assert result.exit_code == 1 and result.stdout.startswith("deviates  euler: x of step 0")
    assert "denoised-as-derivative" in result.stdout and "fix: The derivative" in result.stdout
    found = json.loads(run("conform", problem, folder, "--json").stdout)
    assert found["verdict"] == "deviates" and found["step"] == 0
    assert found["error"] > 1e3 * found["floor"] > 0
    assert set(found["findings"][0]) == {"cause", "evidence", "fix"}
    rows = run("conform", problem, folder, "--all").stdout
    assert len(rows.splitlines()) > len(result.stdout.splitlines())
    lines = [line.split() for line in rows.splitlines() if line[:1] in set("→·✓")]
    for line, row in zip(lines, found["rows"], strict=True):
        assert line[0] == "✓" if not row["wrong"] else line[0] in "→·"
        numbers = [f"{row['error']:.2e}", f"{row['floor']:.1e}", f"{row['limit']:.1e}"]
        assert line[1] == str(row["step"]) and line[-3:] == numbers and row["name"] in line[2]
    assert [line[0] for line in lines].count("→") == 1


def test_a_trace_of_something_else_cannot_be_judged(tmp_path: Path) -> None:
    problem, folder = tmp_path / "p.json", tmp_path / "run"
    run("conform", "--write", problem)
    candidate(problem, folder, ('"sampler/', '"mine/'))
    result = run("conform", problem, folder)
    assert result.exit_code == 2 and result.stdout.startswith("cannot-judge")


def test_schedules_alone(tmp_path: Path) -> None:
    problem = tmp_path / "p.json"
    result = run("conform", "--write", problem, "--schedule-only", "--schedule", "karras")
    assert result.exit_code == 0 and "tables only" in result.stdout
    assert json.loads(problem.read_text())["sampler"] is None
    other = tmp_path / "q.json"
    made = json.loads(run("conform", "--write", other, "-n", 5, "--json").stdout)
    assert made == {"problem": str(other), "sampler": "euler", "schedule": "karras", "steps": 5}
    assert "exists" in refused("conform", "--write", other)
    assert run("conform", "--write", other, "--overwrite", "--steps", 3).exit_code == 0
    assert len(json.loads(other.read_text())["sigmas"]) == 4


def test_an_answer_in_json(tmp_path: Path) -> None:
    problem, answer = tmp_path / "p.json", tmp_path / "answer.json"
    result = run("conform", "--write", problem, "--schedule-only", "-n", 5)
    assert f"lydite sampler conform {problem} answer.json" in result.stdout
    sigmas = json.loads(problem.read_text())["sigmas"]
    answer.write_text(json.dumps({"sigmas": sigmas}))
    assert run("conform", problem, answer).exit_code == 0
    answer.write_text(json.dumps({"sigmas": sigmas[:-1]}))
    result = run("conform", problem, answer)
    assert result.exit_code == 1 and "last-step-dropped" in result.stdout
    assert "not there" in refused("conform", problem, tmp_path / "missing")


def test_an_answer_without_x_is_not_judged(tmp_path: Path) -> None:
    problem, answer = tmp_path / "p.json", tmp_path / "answer.json"
    run("conform", "--write", problem, "-n", 5)
    tables = json.loads(problem.read_text())
    answer.write_text(json.dumps({key: tables[key] for key in ("sigmas", "timesteps")}))
    result = run("conform", problem, answer)
    assert result.exit_code == 2 and "nothing of euler was judged" in result.stdout


def test_help_counts_the_mistakes() -> None:
    causes = len({mistake.cause for mistake in PLANTED})
    text = " ".join(run("conform", "--help").stdout.split())
    assert f"replaying {causes} known mistakes" in text


def test_c_in_and_timesteps_are_those_of_the_models_network() -> None:
    found = json.loads(run("show", "karras", "--model", "edm", "-n", 4, "--json").stdout)
    np.testing.assert_allclose(found["timesteps"], np.log(found["sigmas"][:-1]) / 4)
    np.testing.assert_allclose(found["c_in"], 1 / np.hypot(found["sigmas"][:-1], 0.5))
    assert "-1.55365" in run("show", "karras", "--model", "edm", "-n", 4).stdout
    found = json.loads(run("show", "karras", "--model", "cosmos", "-n", 4, "--json").stdout)
    np.testing.assert_allclose(found["c_in"], 1 / (1 + np.array(found["sigmas"][:-1])))


def test_a_plot_says_which_schedule_does_not_end_in_0(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    run("plot", "karras", "kl_optimal_a1111", "-o", tmp_path / "a.png", "--html", page, "-n", 5)
    rows = re.findall(r"<tr>(.*?)</tr>", page.read_text(), re.DOTALL)
    assert "0.0291672" in rows[-1] and len(rows) == 1 + 6  # the last is kl_optimal_a1111's alone
    assert 'class="grid whole"' in page.read_text()


def test_the_writer_of_the_example_is_the_documented_one() -> None:
    block = re.search(
        r"```python\n(.*?)```", (ROOT / "docs/trace-format.md").read_text(), re.DOTALL
    )
    assert block is not None
    functions = block[1][block[1].index("def put") :].strip()
    text = CANDIDATE.read_text()
    assert functions in text
    own = text[text.index("def main") : text.index("# What follows")]
    assert len([line for line in own.splitlines() if line.strip()]) <= 45


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "eulr"], "Did you mean euler"),
        (["show", "DPM++ 2M Karras"], "Did you mean --sampler dpmpp_2m --schedule karras?"),
        (["show", "heun", "--schedule", "kerras"], "Did you mean karras?"),
        (["show", "karras", "--convention", "A1111"], "Did you mean a1111?"),
        (["show", "karras", "--model", "sd9"], "none of sd15"),
        (["show", "karras", "--option", "rho"], "expected NAME=VALUE"),
        (["show", "karras", "--option", "tau=1"], "has no option 'tau'"),
        (["show", "flow_shift", "--model", "sd15"], "is for flow models"),
        (["show", "euler", "--option", "bogus=1"], "has no option 'bogus'"),
        (["compare", "euler", "karras"], "not of one kind"),
        (["compare", "euler", "heun", "--option", "bogus=1"], "neither of the two"),
        (["plot", "euler", "karras"], "one kind"),
        (["plot", "karras", "-o", "x.gif"], ".png"),
        (["plot", *list(SCHEDULES)[:13]], "at most 12"),
        (["plot", "euler", "--option", "eta=1"], "run with their defaults"),
        (["plot", "karras", "--option", "bogus=1"], "none of these schedules"),
        (["plot", "karras", "--schedule", "normal"], "are for samplers"),
        (["show", "karras", "--option", "rho=[1]"], "no number and no word"),
        (["show", "karras", "--option", "=1"], "expected NAME=VALUE"),
        (["plot", "euler", "--steps", "4"], "--steps is for schedules"),
        (["plot", "karras", "--denoiser", "mixture"], "are for samplers"),
        (["conform"], "nothing to judge"),
        (["conform", "p.json", "run", "--steps", "4"], "goes with --write"),
        (["conform", "p.json", "run", "--seed", "0"], "goes with --write"),
        (["conform", "p.json", "run", "--schedule-only"], "goes with --write"),
        (["conform", "p.json", "run", "-o", "eta=1"], "goes with --write"),
        (["conform", "p.json"], "nothing to judge"),
        (["conform", "p.json", "run", "--write", "q.json"], "without it"),
        (["conform", "p.json", "--write", "q.json"], "without it"),
        (["conform", "--write", "p.json", "--schedule-only", "--sampler", "heun"], "tables"),
        (["conform", "--write", "p.json", "--schedule-only", "-o", "eta=1"], "tables"),
        (["conform", "missing.json", "run"], "no such file"),
        (["conform", "--write", "p.json", "--sampler", "nobody"], "no sampler 'nobody'"),
        (["conform", "--write", "p.json", "--guidance", "3", "--denoiser", "zero"], "nothing"),
        (["conform", "--write", "p.json", "--guidance", "nan"], "finite"),
        (["conform", "--write", "p.json", "--prediction", "eps", "-m", "sd3"], "noise table"),
        (["conform", "--write", "p.json", "--prediction", "edm"], "needs the model"),
        (["conform", "--write", "p.json", "--option", "bogus=1"], "has no option 'bogus'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = refused(*arguments)
    assert said in text and "\n" not in text and list(tmp_path.iterdir()) == []


def test_an_error_is_one_line_on_the_command_line() -> None:
    command = [sys.executable, "-m", "lydite", "sampler", "show", "eulr"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1


def test_help_imports_neither_mlx_nor_numpy() -> None:
    code = (
        "import sys; from lydite.cli.main import lydite;"
        "lydite.main(['sampler', 'conform', '--help'], standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('mlx.core', 'numpy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_the_error_that_is_shown_is_the_largest_of_the_last_x() -> None:
    shown = CliRunner().invoke(lydite, ["sampler", "show", "euler", "--steps", "3", "--json"])
    found = json.loads(shown.stdout)
    apart = np.abs(np.array(found["run"][-1]["x"]) - found["exact"])
    assert found["error"] == apart.max() > apart.min()


def test_the_list_has_the_numbers_of_every_sampler() -> None:
    console = Console(width=400, file=io.StringIO())
    console.print(_samplers(list(SAMPLERS.values()), whole=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = {words[0]: words[1:] for line in lines if (words := line.split())}
    for name, sampler in SAMPLERS.items():
        numbers = [] if sampler.order is None else [f"{sampler.order:g}"]
        numbers.append(str(sampler.calls))
        if sampler.noise != "none":
            numbers.append(sampler.noise)
        wanted = [word for text in numbers for word in text.split()]
        assert rows[name][: len(wanted)] == wanted, name


def test_values_of_options_and_numbers_of_json() -> None:
    pairs = ("eta=0.5", "order=2", "final=null", "lower=true", "kind=midpoint", 'quoted="a"')
    assert read_options(pairs) == {
        "eta": 0.5, "order": 2, "final": None, "lower": True, "kind": "midpoint", "quoted": "a",
    }  # fmt: skip
    for wrong in ("eta", "=1", "a b=1", "eta=[1]", "eta={}"):
        with pytest.raises(InputError, match="--option"):
            read_options([wrong])
    assert finite({"a": [1.0, inf, (-inf, nan)], "b": "x", "c": 2}) == {
        "a": [1.0, None, [None, None]], "b": "x", "c": 2,
    }  # fmt: skip


def test_what_has_no_counterpart_has_no_difference() -> None:
    assert _relative(None, 1.0) is None and _relative(1.0, None) is None
    assert _relative(0.0, 0.0) == 0.0 and _relative(2.0, 1.0) == 0.5
    assert _relative(0.0, 1e-12) == 1.0
    assert _cell(None) == "–" and _cell([1.0, -0.5]) == "+1.00000 -0.50000"
    assert _cell(1 / 3) == "0.3333333"
