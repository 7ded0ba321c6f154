"""`lydite parity`: one command from token ids to the picture, on tiny models."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import fields

from lydite.cli.main import lydite
from lydite.cli.parity import (
    TRACES,
    ImageDifference,
    _folder,
    _print,
    _record,
    by_component,
    check_recorded,
    check_reference,
    image_difference,
)
from lydite.cli.recording import reference_job
from lydite.core.errors import FileError, InputError
from lydite.core.request import Request
from lydite.diff.result import Finding, Gate, Row, Verdict
from lydite.pipelines import pipeline, steps
from lydite.reference import jobs
from lydite.reference.jobs import Job, ReferenceFailed, ReferenceMissing, TraceOutput
from lydite.sampling.denoiser import Guided
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import Capture, TraceWriter
from support import tiny_sd3

STEPS = 2
SMALL = ["-n", "fox", "--steps", str(STEPS), "--size", "32x48", "--text-length", "8", "--seed", "1"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(lydite, ["parity", *map(str, arguments)])


def row(site: str, error: float | None, *, wrong: bool = False, floor: float | None = 1e-7) -> Row:
    return Row(site, site, "out", 0, 0, "activation", (1,), "f32", error, floor, 1e-6, wrong)


def test_the_reference_is_told_all_of_the_run(untrained: Path) -> None:
    opened = pipeline.Pipeline.open(untrained)
    request = Request("a fox", steps=2, width=32, height=32, text_length=4, strength=0.5)
    planned = opened.plan(request, np.zeros((32, 32, 3), np.uint8))
    outputs, capture = (TraceOutput("ref", "float64"),), Capture("stats", ("vae/*",), budget=99)
    job = reference_job(opened, planned, 7, outputs, capture, inject="other", inject_at="vae/*")
    assert (job.seed, job.outputs, job.request) == (7, outputs, planned.request)
    assert (job.level, job.points, job.budget) == ("stats", ("vae/*",), 99)
    assert (job.name, job.model_hash) == (str(untrained), opened.model_hash)
    usual = {each.name for each in fields(Job) if getattr(job, each.name) == each.default}
    assert usual == {"prediction", "components", "mask", "noise"}  # as they are in this run


@pytest.mark.parametrize("other", [{"schedule": "karras"}, {"sampler": "heun"}])
def test_another_sampler_or_schedule_than_the_references_is_refused(
    other: dict[str, Any], untrained: Path
) -> None:
    opened = pipeline.Pipeline.open(untrained)
    planned = opened.plan(Request("a fox", steps=2, width=32, height=32, text_length=4, **other))
    with pytest.raises(InputError, match="the reference runs the checkpoint's own") as error:
        reference_job(opened, planned, 0, (), Capture("full", ("*",), budget=9))
    assert all(f"--{option} {name}" in str(error.value) for option, name in other.items())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers")
    return tiny_sd3.make_pipeline(tmp_path_factory.mktemp("parity") / "model", "sd3.5-medium")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Result]:
    """The traces of one whole run, with the reference in a process of its own."""
    keep = tmp_path_factory.mktemp("parity") / "traces"
    return keep, run(model, "a red star", *SMALL, "--keep-traces", keep)


@pytest.fixture
def recorded(traces: tuple[Path, Result], monkeypatch) -> None:
    """The reference's traces are copied; another precision is recorded in this process."""
    from lydite.reference.recording import record

    folders = {"float32": traces[0] / "reference", "float64": traces[0] / "floor"}

    def run_job(job: Job, on_step: Callable[[], None]) -> None:
        for output in job.outputs:
            if output.dtype in folders:
                shutil.copytree(folders[output.dtype], output.folder)
                for _ in range(STEPS):
                    on_step()
            else:
                record(job, output, on_step)

    monkeypatch.setattr(jobs, "run_job", run_job)


def test_rows_are_summed_up_by_network_in_order() -> None:
    rows = (
        row("text_encoder/a", 2e-7),
        row("transformer/b", 3e-7),
        row("transformer", 1e-7),
        row("transformer/c", None),
        row("vae/d", None),
        row("pipeline/e", 0.0),
        row("pipeline/f", 5e-7, floor=0.0),
        row("pipeline/g", 0.0, wrong=True),  # of a verdict that is agree
    )
    found = by_component(Verdict("agree", "", rows=rows))
    assert [(each.name, each.values, each.error, each.verdict) for each in found] == [
        ("text_encoder", 1, 2e-7, "agree"),
        ("transformer", 2, 3e-7, "agree"),
        ("vae", 0, None, "agree"),
        ("pipeline", 3, 5e-7, "agree"),
    ]
    assert [each.ratio for each in found[2:]] == [None, None]
    assert found[0].ratio == pytest.approx(2)


def test_what_is_printed_is_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (row("text_encoder/a", 2e-7), row("vae/b", 3e-4, wrong=True), row("vae/c", None))
    finding = Finding("scaled", "It is doubled.", "Halve it.")
    verdict = Verdict("diverge", "It diverges.", site="vae/b", rows=rows, findings=(finding,),
                      gates=(Gate("ids", True, "3 equal"), Gate("dump", False, "odd")))  # fmt: skip
    _print(verdict, by_component(verdict), ImageDifference(3, 1000, 2000))
    text = capsys.readouterr().out
    assert text.startswith("diverge  It diverges.\n  scaled: It is doubled.\n    fix: Halve it.\n")
    assert "gates: ids ok (3 equal); dump FAILED (odd)\n" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["text_encoder", "1", "2.00e-07", "1.0e-07", "2", "agree"] in lines
    assert ["vae", "1", "3.00e-04", "1.0e-07", "3e+03", "diverge"] in lines
    assert "largest difference 3 of 255, 1,000 of 2,000 pixels equal" in text
    _print(verdict, (), None)
    text = capsys.readouterr().out
    assert "picture: not compared" in text and "component" not in text


def test_the_first_to_diverge_is_told_from_those_that_follow() -> None:
    misplaced = row("text_encoder/a", 1.0, wrong=True)
    rows = (misplaced, row("transformer/b", 0.1, wrong=True), row("vae/c", 0.2, wrong=True))
    verdict = Verdict("diverge", "", site="transformer/b", rows=rows, ignored_rows=(misplaced,))
    assert [each.verdict for each in by_component(verdict)] == ["agree", "diverge", "follow"]


def test_a_reference_that_differs_from_itself_proves_nothing() -> None:
    for floor in (1e-2, 0.1, None):
        check_reference(Verdict("agree", "", rows=(row("a", 1e-3, floor=floor),)))
    for floor, words in ((0.9, "0.9"), (0.11, "0.11")):
        rows = row("a", 1e-3), row("b", 0.8, floor=floor)
        with pytest.raises(ReferenceFailed, match=rf"differs from itself by {words} at b, step 0"):
            check_reference(Verdict("agree", "", rows=rows))


@pytest.fixture
def unrecorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The command without its runs: the traces hold one value, the verdict is a given one."""
    stub = SimpleNamespace(given=[], planned=[], verdict=Verdict("agree", ""), name="vae/x")
    stub.captures = []
    stub.model = SimpleNamespace(path=tmp_path)

    def plan(prompt: str, options: dict[str, Any], dtype: str) -> tuple[Any, None, int]:
        stub.planned.append((prompt, options["model"], dtype))
        return SimpleNamespace(model=stub.model), None, 0

    def record(*words: Any, quiet: bool) -> None:
        stub.captures.append(words[5])
        for name in TRACES:
            with TraceWriter(words[4] / name, Header(side=name)) as writer:
                if stub.name:
                    writer.add(stub.name, np.zeros(3, np.float32))

    def compared(theirs: Trace, ours: Trace, *, floor: Trace, checkpoint: Path | None) -> Verdict:
        stub.given.append([*(trace.folder.name for trace in (theirs, ours, floor)), checkpoint])
        return stub.verdict

    module = "lydite.cli.parity"
    monkeypatch.setattr("lydite.reference.jobs.check_installed", lambda: None)
    monkeypatch.setattr(f"{module}.plan_recording", plan)
    monkeypatch.setattr(f"{module}._record", record)
    monkeypatch.setattr("lydite.diff.compare.compare", compared)
    return stub


@pytest.mark.parametrize(("dtype", "rounded"), [("float32", "float64"), ("float16", "float16")])
def test_our_networks_are_freed_before_the_reference_runs(
    dtype: str, rounded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    stub: Any = SimpleNamespace(model=SimpleNamespace(unload=lambda: done.append("unloaded")))
    drawn: Any = SimpleNamespace(steps=2)

    def recorded(side: str, times: int) -> Callable[..., None]:
        def record(*words: Any, on_step: Callable[[], None] | None = None, **more: Any) -> None:
            done.append((side, words[-1] if on_step else words[0]))
            for _ in range(times):
                (on_step or words[1])()

        return record

    monkeypatch.setattr("lydite.cli.parity.reference_job", lambda *words: words[3])
    monkeypatch.setattr("lydite.cli.parity.record_port", recorded("ours", 2))
    monkeypatch.setattr("lydite.reference.jobs.run_job", recorded("theirs", 4))
    capture = Capture("full", ("*",), budget=9)
    _record(stub, drawn, 0, dtype, tmp_path, capture, quiet=True)
    outputs = (
        TraceOutput(str(tmp_path / "reference")),
        TraceOutput(str(tmp_path / "floor"), rounded),  # type: ignore[arg-type]
    )
    assert done == [("ours", tmp_path / "port"), "unloaded", ("theirs", outputs)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_command_compares_with_both_runs_of_the_reference(
    dtype: str, tmp_path: Path, unrecorded: SimpleNamespace
) -> None:
    unrecorded.verdict = Verdict("agree", "", rows=(row("b", 0.8, floor=0.9),))
    result = run("--dtype", dtype)
    assert unrecorded.given == [["reference", "port", "floor", tmp_path]]
    assert unrecorded.planned == [("a large red star above a small blue ring", None, dtype)]
    if dtype == "float32":  # rounding of 0.9 is none
        assert isinstance(result.exception, ReferenceFailed)
    else:
        assert result.exit_code == 0 and "picture: not compared" in result.stdout


def test_what_is_recorded_is_what_was_asked_for(unrecorded: SimpleNamespace) -> None:
    assert run("--points", "vae/*", "--points", "vae/x", "--budget", "3MB").exit_code == 0
    assert unrecorded.captures == [Capture("full", ("vae/*", "vae/x"), budget=3_000_000)]


def test_a_single_file_has_no_folder_to_look_into(
    tmp_path: Path, unrecorded: SimpleNamespace
) -> None:
    unrecorded.model.path = tmp_path / "model.safetensors"
    unrecorded.model.path.write_bytes(b"")
    assert run("model.safetensors", "a fox").exit_code == 0
    assert unrecorded.given[0][-1] is None
    assert unrecorded.planned == [("a fox", "model.safetensors", "float32")]


@pytest.mark.parametrize(("word", "status"), [("agree", 0), ("diverge", 1), ("cannot-compare", 2)])
def test_the_verdict_is_the_exit_status_and_what_comes_next_is_printed(
    word: Any, status: int, tmp_path: Path, unrecorded: SimpleNamespace
) -> None:
    unrecorded.verdict = Verdict(word, "A sentence.", rows=(row("vae/x", 0.0),))
    page, keep = tmp_path / "page.html", tmp_path / "kept"
    again = ["some model", "a fox", "--steps", "3"]
    result = run(*again, "--html", page, "-q")
    assert result.exit_code == status and f"page: {page}" in result.stdout and page.exists()
    following = "lydite parity 'some model' 'a fox' --steps 3 --keep-traces traces"
    assert (f"next: {following}\n" in result.stdout) == (word != "agree")
    assert ("next:" in result.stdout) == (word != "agree")
    result = run(*again, "--keep-traces", keep)
    assert result.exit_code == status and "page:" not in result.stdout
    assert f"next: lydite diff {keep}/reference {keep}/port --floor {keep}/floor" in result.stdout
    result = run(*again, "--json")
    assert result.exit_code == status and json.loads(result.stdout)["verdict"] == word


def test_a_page_is_not_replaced_unasked_and_never_an_input(
    tmp_path: Path, unrecorded: SimpleNamespace
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    for inputs in ([], [page], ["m", "--components", page], ["m", "--image", page]):
        result = run(*inputs, "--html", page)
        assert isinstance(result.exception, FileError | InputError), inputs
        if inputs:
            result = run(*inputs, "--html", page, "--overwrite")
            assert isinstance(result.exception, FileError | InputError), inputs
    assert page.read_text() == "mine" and not unrecorded.given
    assert run("--html", page, "--overwrite").exit_code == 0 and page.read_text() != "mine"


def test_points_that_name_no_value_are_an_error_of_the_command(
    unrecorded: SimpleNamespace,
) -> None:
    unrecorded.name = ""
    assert run().exit_code == 0
    result = run("--points", "nothing/*")
    assert isinstance(result.exception, InputError) and "nothing/*" in str(result.exception)


def test_traces_that_nobody_keeps_are_removed() -> None:
    with _folder(None) as folder:
        (folder / "port").mkdir()
    assert not folder.exists()


@pytest.mark.parametrize("name", TRACES)
def test_a_folder_with_one_earlier_trace_is_refused(name: str, tmp_path: Path) -> None:
    with _folder(tmp_path) as folder:
        assert folder == tmp_path
    (tmp_path / name).mkdir()
    with pytest.raises(FileError, match=f"{name}: exists"), _folder(tmp_path):
        pass


def test_without_the_extra_it_says_so_first(monkeypatch) -> None:
    def missing() -> None:
        raise ReferenceMissing("torch is not installed")

    monkeypatch.setattr(jobs, "check_installed", missing)
    assert isinstance(run("/no/such/model").exception, ReferenceMissing)


def test_a_pixel_is_equal_when_all_its_channels_are(tmp_path: Path) -> None:
    picture = np.zeros((1, 2, 2, 3), np.float32)
    traces: list[Trace] = []
    for name in ("reference", "port"):
        with TraceWriter(tmp_path / name, Header()) as writer:
            writer.add("pipeline/image", picture)
        traces.append(Trace.open(tmp_path / name))
        picture[0, 0, 0, 1] = 9 / 255
    assert image_difference(*traces) == ImageDifference(largest=9, equal=3, pixels=4)


def test_pictures_that_are_missing_or_of_another_size_are_not_compared(tmp_path: Path) -> None:
    shapes = {"a": (1, 4, 4, 3), "b": (1, 4, 5, 3), "none": None, "no values": (1, 4, 4, 3)}
    traces = {}
    for name, shape in shapes.items():
        capture = Capture("stats" if name == "no values" else "full")
        with TraceWriter(tmp_path / name, Header(), capture=capture) as writer:
            writer.add("x", np.zeros(1))
            if shape:
                writer.add("pipeline/image", np.zeros(shape, np.float32))
        traces[name] = Trace.open(tmp_path / name)
    assert image_difference(traces["a"], traces["a"]) == ImageDifference(0, 16, 16)
    for other in ("b", "none", "no values"):
        assert image_difference(traces["a"], traces[other]) is None
        assert image_difference(traces[other], traces["a"]) is None


def test_patterns_without_a_value_are_named(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "empty", Header()).close()
    with Trace.open(tmp_path / "empty") as trace:
        check_recorded(trace, ())
        with pytest.raises(InputError, match=r"vae\*,pipeline\*: no value"):
            check_recorded(trace, ("vae*,pipeline*",))


@pytest.mark.parity
def test_they_agree_and_the_traces_stay_for_diff(model: Path, traces) -> None:
    keep, result = traces
    assert result.exit_code == 0, result.output or result.exception
    lines = result.stdout.splitlines()
    assert lines[0].startswith("agree  All ")
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae"):
        assert any(line.startswith(f"{name} ") and "agree" in line for line in lines)
    assert any(line.startswith("picture: largest difference ") for line in lines)
    assert lines[-1] == f"next: lydite diff {keep}/reference {keep}/port --floor {keep}/floor"
    assert sorted(path.name for path in keep.iterdir()) == ["floor", "port", "reference"]
    again = run(model, "a red star", *SMALL, "--keep", keep)  # the option's old name
    assert isinstance(again.exception, FileError) and "exists" in str(again.exception)


@pytest.mark.parity
def test_json_holds_what_diff_reports_and_more(model: Path, recorded: None) -> None:
    result = run(model, "a red star", *SMALL, "--dtype", "bfloat16", "--json")
    assert result.exit_code == 0, result.output or result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["verdict"] == "agree" and found["rows"] and found["gates"]
    assert found["floor_source"].startswith("measured")
    assert {each["name"] for each in found["components"]} >= {"pipeline", "transformer", "vae"}
    assert sum(each["values"] for each in found["components"]) == len(found["rows"])
    assert found["image"]["pixels"] == 32 * 48 and found["image"]["largest"] < 64


@pytest.mark.parity
def test_a_bug_is_found_where_it_is(model: Path, recorded: None, monkeypatch) -> None:
    def swapped(uncond: Any, cond: Any, scale: float) -> Any:
        return cond + scale * (uncond - cond)

    def guided(*args: Any, **options: Any) -> Guided[Any]:
        return Guided(*args, **{**options, "guide": swapped})

    monkeypatch.setattr(steps, "Guided", guided)
    result = run(model, "a red star", *SMALL)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("diverge  pipeline/velocity is the first wrong value at step 0")
    assert any(line.startswith("pipeline ") and "diverge" in line for line in lines)
    assert any(line.startswith("vae ") and "follow" in line for line in lines)
    assert lines[-1].endswith("--keep-traces traces") and "lydite parity" in lines[-1]


def test_noise_that_the_reference_does_not_draw_is_refused(model: Path) -> None:
    result = run(model, *SMALL, "--noise", "mlx")
    assert isinstance(result.exception, InputError) and "torch's noise" in str(result.exception)
