"""`lydite diff` on the command line: verdict, exit status, JSON, errors in one line."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from lydite.cli.diff import (
    _around,
    _gates_text,
    _next,
    _print,
    _print_layers,
    _print_sources,
    _print_unpaired,
    _repro_text,
)
from lydite.cli.main import lydite
from lydite.core.errors import FileError, InputError, TraceError
from lydite.core.tensorfile import save
from lydite.diff.result import Finding, Gate, Row, Verdict
from lydite.trace import json_files
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter
from support.toy_transformer import record

FIELDS = {
    "verdict", "site", "port_site", "step", "last_agreement", "error", "floor", "findings",
}  # fmt: skip


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(lydite, ["diff", *map(str, arguments)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("traces")
    record(root / "reference", side="reference")
    for bug in ("", "unbiased", "pad"):
        record(root / (bug or "clean"), bug=bug, shuffle=True)
    return {path.name: path for path in root.iterdir()}


def test_agreement_exits_with_0(folders: dict[str, Path]) -> None:
    result = run(folders["reference"], folders["clean"])
    assert result.exit_code == 0 and result.stdout.startswith("agree")


def test_a_divergence_exits_with_1_and_says_one_sentence_first(folders: dict[str, Path]) -> None:
    result = run(folders["reference"], folders["unbiased"])
    first = result.stdout.splitlines()[0]
    assert result.exit_code == 1 and first.startswith("diverge  net/blocks.2.norm")
    assert "n − 1" in first and "fix:" in result.stdout
    found = json.loads(run(folders["reference"], folders["unbiased"], "--json").stdout)
    sites = [row["site"] for row in found["rows"]]
    table = result.stdout.split("gates:")[0].splitlines()
    assert len(sites) > 20 and len(table) < 20  # the rows around the bug, and the last
    assert any(line.startswith(("·", "✓")) and sites[-1] in line for line in table[-2:])


def test_json_has_the_keys_that_scripts_read(folders: dict[str, Path]) -> None:
    result = run(folders["reference"], folders["unbiased"], "--json")
    found = json.loads(result.stdout)
    assert set(found) >= FIELDS and found["verdict"] == "diverge"
    assert found["site"] == found["port_site"] == "net/blocks.2.norm"
    assert {"cause", "evidence", "fix"} <= set(found["findings"][0])
    assert found["place"] == found["rows"][0]["place"] == "out" and found["aside"] == []


def test_a_page_is_written_and_not_replaced_unasked(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    result = run(folders["reference"], folders["unbiased"], "--html", page)
    assert result.exit_code == 1 and f"page: {page}" in result.stdout
    assert "They diverge" in page.read_text()
    page.write_text("mine")
    assert "exists" in str(run(folders["reference"], folders["clean"], "--html", page).exception)
    assert page.read_text() == "mine"
    assert run(folders["reference"], folders["clean"], "--html", page, "--overwrite").exit_code == 0
    assert "They agree" in page.read_text()
    inside = folders["reference"] / "page.html"
    assert "input" in str(run(folders["reference"], folders["clean"], "--html", inside).exception)


def test_a_tolerance_of_the_user_wins(folders: dict[str, Path]) -> None:
    assert run(folders["reference"], folders["unbiased"], "--tolerance", "5").exit_code == 0
    assert run(folders["reference"], folders["clean"], "--tolerance", "1e-12").exit_code == 1


def test_quantized_lists_layers_and_judges_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with TraceWriter(tmp_path / "other", Header()) as writer:
        writer.add("nothing/in/common", np.ones((3, 5), np.float32))
    assert run(folders["reference"], tmp_path / "other", "--quantized").exit_code == 2
    result = run(folders["reference"], folders["unbiased"], "--quantized")
    assert result.exit_code == 0 and "accumulated" in result.stdout
    layers = json.loads(
        run(folders["reference"], folders["unbiased"], "--quantized", "--json").stdout
    )["layers"]
    assert max(layers, key=lambda each: each["accumulated"])["by_step"]


@pytest.mark.parametrize(
    ("verdict", "rows", "status"),
    [("cannot-compare", 0, 2), ("cannot-compare", 1, 0), ("agree", 0, 0), ("diverge", 1, 0)],
)
def test_quantized_fails_only_where_there_is_nothing_to_list(
    verdict: Any, rows: int, status: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Verdict(verdict, "", rows=tuple(_row(index) for index in range(rows)))
    monkeypatch.setattr("lydite.diff.compare.compare", lambda *_, **__: found)
    result = run(folders["reference"], folders["clean"], "--quantized")
    assert result.exit_code == status and result.stdout.startswith("layer")


def test_the_first_wrong_operation_is_written_alone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    sides, repro = (folders["reference"], folders["unbiased"]), tmp_path / "wrong"
    error = json.loads(run(*sides, "--json", "--repro", repro).stdout)["error"]
    out = subprocess.run([sys.executable, repro / "check.py"], capture_output=True, check=True)
    assert f"error {error:.2e}" in out.stdout.decode()
    names = {path.name for path in repro.iterdir()}
    assert names >= {"check.py", "expected.npy", "port.npy"} and len(names) > 3
    (repro / "port.npy").write_bytes(b"mine")
    assert "exists already" in str(run(*sides, "--repro", repro).exception)
    assert (repro / "port.npy").read_bytes() == b"mine"
    assert run(*sides, "--repro", repro, "--overwrite").exit_code == 1
    assert (repro / "port.npy").read_bytes() != b"mine"


def test_no_reproduction_where_all_agree(folders: dict[str, Path], tmp_path: Path) -> None:
    result = run(folders["reference"], folders["clean"], "--repro", tmp_path / "wrong")
    assert "repro: not written" in result.stdout and not (tmp_path / "wrong").exists()


def test_parameters_come_from_the_checkpoint(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x, weight = draw.normal(size=(40, 16)).astype("f4"), draw.normal(size=(16, 16)).astype("f4")
    save(tmp_path / "model.safetensors", {"layer.weight": weight})
    for side, w in (("ref", weight), ("port", weight.T)):
        with TraceWriter(tmp_path / side, Header()) as writer:
            writer.add("net/layer", x, slot="in.0")
            writer.add("net/layer", x @ w.T)
    given = (tmp_path / "ref", tmp_path / "port", "--checkpoint", tmp_path / "model.safetensors")
    assert "its weight transposed" in run(*given).stdout
    missing = run(*given[:3], tmp_path / "none.safetensors")
    assert isinstance(missing.exception, FileError)


def test_what_cannot_be_compared_exits_with_2(folders: dict[str, Path], tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "other", Header()) as writer:
        writer.add("nothing/alike", np.ones(3))
    for options in ((), ("--json",), ("--all",)):
        result = run(folders["reference"], tmp_path / "other", *options)
        assert result.exit_code == 2 and "cannot-compare" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere", "nowhere"), "no such folder"),
        (("{reference}", "{clean}", "--map", "nowhere.json"), "nowhere.json"),
        (("{reference}", "{clean}", "--floor", "nowhere"), "no such folder"),
        (("{reference}", "{clean}", "--tolerance", "nan"), "tolerance"),
        (("{reference}", "{clean}", "--tolerance", "0"), "tolerance"),
        (("{reference}", "{clean}", "--rerun", ""), "--rerun is empty"),
        (("{reference}", "{clean}", "--rerun", "'a"), "is not a command"),
        (("{reference}", "{clean}", "--rerun", "/no/such/program"), "cannot be run"),
        (("{reference}", "{clean}", "--rerun", "false"), "ended with status 1"),
        (("{reference}", "{clean}", "--rerun", "true"), "wrote no trace"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: tuple[str, ...], says: str, folders: dict[str, Path]
) -> None:
    filled = [text.format(**{k: str(v) for k, v in folders.items()}) for text in arguments]
    result = run(*filled)
    error = result.exception  # `main` prints it in one line
    assert getattr(error, "exit_code", result.exit_code) == 2
    assert says in f"{error} {result.stderr}" and not result.stdout


def test_f16_a_trace_of_too_many_events_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison takes time and memory for each event, and a stranger decides their number."""
    assert json_files.MAX_EVENTS == 1_000_000  # the limit that SECURITY.md states
    with Trace.open(folders["reference"]) as reference, Trace.open(folders["clean"]) as port:
        most = max(len(reference.events), len(port.events))
    monkeypatch.setattr(json_files, "MAX_EVENTS", most)
    assert run(folders["reference"], folders["clean"]).exit_code == 0
    monkeypatch.setattr(json_files, "MAX_EVENTS", most - 1)
    result = run(folders["reference"], folders["clean"])
    assert isinstance(result.exception, TraceError) and not result.stdout
    assert f"more than {most - 1:,} events" in str(result.exception)


def test_what_is_printed_says_why_a_value_passes(folders: dict[str, Path]) -> None:
    shown = run(folders["reference"], folders["unbiased"], "--all").stdout.splitlines()
    head = next(line for line in shown if "rounding" in line and "limit" in line)
    assert head.split() == ["value", "step", "error", "limit", "rounding", "×"]
    for line in shown:
        if line.startswith("✓"):
            error, limit = map(float, line.split()[-4:-2])
            assert error <= limit * 1.05  # two digits are printed


def test_the_table_holds_the_numbers_of_the_json(folders: dict[str, Path]) -> None:
    sides = folders["reference"], folders["unbiased"]
    found = json.loads(run(*sides, "--json").stdout)
    table = run(*sides, "--all").stdout.split("gates:")[0].splitlines()
    lines = [line for line in table if line.startswith(("→", "·", "✓"))]
    assert len(lines) == len(found["rows"])
    for line, row in zip(lines, found["rows"], strict=True):
        mark, *_, step, error, limit, rounding, times = line.split()
        first = (row["site"], row["place"], row["step"]) == (
            found["site"], found["place"], found["step"],
        )  # fmt: skip
        assert mark == ("→" if first else "·" if row["wrong"] else "✓")
        assert (int(step), error) == (row["step"], f"{row['error']:.2e}")
        assert (limit, rounding) == (f"{row['limit']:.1e}", f"{row['floor']:.1e}")
        assert times == f"{row['error'] / row['floor']:.3g}"


def _row(index: int, error: float | None = 1e-7, **changes: Any) -> Row:
    known = Row(f"v{index}", f"v{index}", "out", 0, 0, "activation", (2,), "f32", error, 1e-7, 1e-6,
                False)  # fmt: skip
    return replace(known, **changes)


def test_a_row_of_another_shape_is_marked_and_one_that_was_not_compared_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = (_row(0), _row(1, None), _row(2, None, wrong=True), _row(3, 1.0, wrong=True))
    verdict = Verdict("diverge", "", site="v3", slot="out", step=0, rows=rows)
    _print(verdict, True)
    table = [line.split() for line in capsys.readouterr().out.splitlines()[2:6]]
    assert [line[:2] for line in table] == [
        ["✓", "v0"], ["v1", "not"], ["·", "v2"], ["→", "v3"],
    ]  # fmt: skip
    assert table[2][2] == "shape" and table[1][1:3] == ["not", "compared"]


def test_rows_around_the_bug_and_the_last_one() -> None:
    rows = tuple(_row(index, wrong=index >= 20) for index in range(40))
    bug = Verdict("diverge", "", site="v20", slot="out", step=0, rows=rows)
    assert [row.site for row in _around(bug)] == [f"v{i}" for i in (*range(15, 26), 39)]
    early = replace(bug, site="v2")
    assert [row.site for row in _around(early)] == [f"v{i}" for i in (*range(8), 39)]
    last = replace(bug, site="v39")
    assert [row.site for row in _around(last)] == [f"v{i}" for i in range(34, 40)]
    aside = (*rows[:18], _row(18, None), *rows[19:])  # not compared: not a row of the table
    assert "v18" not in {row.site for row in _around(replace(bug, rows=aside))}
    assert not _around(replace(bug, site="elsewhere"))


def test_an_agreement_lists_the_largest_errors_in_units_of_rounding() -> None:
    rows = tuple(
        _row(index, error=index * 1e-8, floor=1e-7 * (1 + index % 2)) for index in range(9)
    )
    shown = _around(Verdict("agree", "", rows=rows))
    assert [row.site for row in shown] == ["v8", "v6", "v4", "v7", "v5"]


def test_gates_that_ran_stand_before_those_that_could_not() -> None:
    gates = (
        Gate("ids", True, "none", compared=False), Gate("dump", True, "3 values"),
        Gate("schedule", True, "none", compared=False), Gate("weights", False, "2 differ"),
        Gate("inputs", False, "odd", compared=False),
    )  # fmt: skip
    text = _gates_text(Verdict("agree", "", gates=gates))
    assert text == (
        "dump ok (3 values); weights FAILED (2 differ); inputs FAILED (odd); "
        "not compared (ids, schedule: none)"
    )
    assert "not compared" not in _gates_text(Verdict("agree", "", gates=gates[1:2]))
    assert _gates_text(Verdict("agree", "", gates=gates[:1])).startswith("none could run")


@pytest.mark.parametrize(
    ("changes", "given", "option"),
    [
        ({}, {}, "--checkpoint"),
        ({"slot": "out.1"}, {}, "--checkpoint"),
        ({"slot": "in.0"}, {}, "--repro"),
        ({}, {"checkpoint": True}, "--repro"),
        ({}, {"checkpoint": True, "repro": True}, None),
        ({"verdict": "agree"}, {}, None),
        ({"error": None}, {}, None),
        ({"findings": (Finding("a", "b", "c"),)}, {}, None),
    ],
)
def test_what_brings_a_verdict_without_a_cause_further(
    changes: dict[str, Any], given: dict[str, bool], option: str | None
) -> None:
    verdict = replace(Verdict("diverge", "", slot="out", error=1.0), **changes)
    following = _next(verdict, **{"checkpoint": False, "repro": False} | given)
    assert following is None if option is None else following and following.startswith(option)


def test_long_lists_are_cut_unless_all_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(function: Callable[..., None], *arguments: Any) -> list[str]:
        function(*arguments)
        return capsys.readouterr().out.splitlines()

    sources = Verdict("diverge", "", sources=tuple(_row(index) for index in range(11)))
    assert len(printed(_print_sources, sources, True)) == 12
    head, *lines = printed(_print_sources, sources, False)
    assert len(lines) == 10 and head.startswith("11 values are") and "--all" in head
    assert lines[1] == "  v1, step 0: error 1.0e-07" and "--all" not in str(
        printed(_print_sources, replace(sources, sources=sources.sources[:10]), False)
    )
    for count, text in ((0, "no value is"), (1, "1 value is")):
        (head, *_) = printed(
            _print_sources, replace(sources, sources=sources.sources[:count]), False
        )
        assert head.startswith(text)
    (line,) = printed(_print_unpaired, "port", ["a", "b", "c"], False)
    assert line == "only in the port: a, b, c"
    (line,) = printed(_print_unpaired, "port", ["a", "b", "c", "d", "e"], False)
    assert line.startswith("only in the port: a, b, c and 2 more")
    assert not printed(_print_unpaired, "port", [], True)
    layers = Verdict("agree", "", rows=tuple(_row(index) for index in range(21)))
    assert printed(_print_layers, layers, None, False, False)[-2:][0].startswith("… and 1 more")
    assert len(printed(_print_layers, layers, None, False, True)) == 1 + 21 + 1
    assert not [
        line for line in printed(_print_layers, layers, layers, False, True) if "rerun" in line
    ]


def test_all_names_are_listed_one_a_line(folders: dict[str, Path], tmp_path: Path) -> None:
    port = record(tmp_path / "port", skip=("net/blocks.1", "net/blocks.2.mlp.up"))
    shown = run(folders["reference"], port, "--all").stdout.splitlines()
    at = shown.index("only in the reference, 2 names:")
    assert [line.strip() for line in shown[at + 1 : at + 3]] == [
        "net/blocks.1",
        "net/blocks.2.mlp.up",
    ]


def test_an_unfinished_trace_is_reported_after_the_sentence(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    port = record(tmp_path / "port")
    header = json.loads((port / "trace.json").read_text())
    (port / "trace.json").write_text(json.dumps(header | {"complete": False}))
    shown = run(folders["reference"], port).stdout.splitlines()
    assert shown[1].startswith("incomplete: the run of the port")
    assert json.loads(run(folders["reference"], port, "--json").stdout)["incomplete"] == ["port"]


def test_a_mistake_in_the_map_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"net/blocks.2.norn": "net/blocks.2.norm"}')
    result = run(folders["reference"], folders["clean"], "--map", tmp_path / "map.json")
    assert isinstance(result.exception, InputError)
    assert "'net/blocks.2.norm'" in str(result.exception) and not result.stdout


def test_rerun_names_the_modules_that_are_wrong_on_the_right_inputs(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    script = tmp_path / "port.py"
    script.write_text(
        "import os, pathlib\n"
        "from support.toy_transformer import Options, record\n"
        "options = Options(bug='unbiased', shuffle=True,\n"
        "                  inject=pathlib.Path(os.environ['LYDITE_INJECT']))\n"
        "record(pathlib.Path(os.environ['LYDITE_TRACE']), options)\n"
    )
    again = ("--rerun", f"{sys.executable} {script}", "--json")
    wrong: list[set[str]] = []
    for options in ((), ("--tolerance", "1e-12")):
        result = run(folders["reference"], folders["unbiased"], *again, *options)
        wrong.append({row["site"] for row in json.loads(result.stdout)["sources"]})
    assert wrong[0] == {"net/blocks.2.norm"} and len(wrong[1]) > 5
    shown = run(folders["reference"], folders["unbiased"], *again[:2]).stdout.splitlines()
    at = next(n for n, line in enumerate(shown) if line.startswith("1 value is still wrong"))
    assert shown[at + 1].startswith("  net/blocks.2.norm")


def test_what_is_said_of_a_reproduction(tmp_path: Path) -> None:
    found = SimpleNamespace(name="net/norm", inputs={"x": np.ones(3)})
    assert _repro_text(tmp_path, [found]) == (  # type: ignore[list-item]
        f"repro: {tmp_path / 'check.py'}, beside it what the operation gets and returns"
    )
    found.inputs = {}
    assert "not written; no value from which net/norm" in _repro_text(
        tmp_path,
        [found],  # type: ignore[list-item]
    )
    assert "no operation is wrong by itself" in _repro_text(tmp_path, [])


def test_remarks_and_the_health_of_a_trace_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _print(Verdict("agree", "fine", remarks=("one",), health=("two",), floor_source="three"), False)
    lines = capsys.readouterr().out.splitlines()
    assert {"note: one", "health: two", "rounding: three"} <= set(lines)
