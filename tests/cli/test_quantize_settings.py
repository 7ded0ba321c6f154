"""From the options of `lydite quantize MODEL` to settings: what each decides, what is refused."""

import json
import signal
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import msgspec
import pytest
from click.testing import CliRunner

from lydite.calibrate.run import Model
from lydite.cli.main import lydite
from lydite.cli.quantize import model
from lydite.cli.quantize.calibration import _draw_set
from lydite.cli.quantize.evaluation import shared_prompts
from lydite.cli.quantize.model import _round, _tune
from lydite.cli.quantize.plan import command as plan_command
from lydite.core.errors import InputError
from lydite.embedded.captions import training_prompts
from lydite.quantize.plan import LayerPlan, Plan
from lydite.quantize.quantize_blocks import Settings

FF, NORM = "transformer_blocks.0.ff.net.2", "transformer_blocks.0.norm1.linear"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings of a command, or its error."""
    found: list[Settings] = []
    monkeypatch.setattr(model, "plan_text", lambda _, settings: found.append(settings) or "")

    def run(words: str) -> Any:
        command = f"quantize embedded --dry-run --out nowhere/../out {words}"
        result = CliRunner().invoke(lydite, command.split())
        return str(result.exception) if result.exception else found.pop()

    return run


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("", {}),
        ("--method rtn", {"method": "rtn"}),
        ("--method dwq", {"method": "rtn", "tune": 200}),
        ("--method dwq --tune 7", {"method": "rtn", "tune": 7}),
        ("--tune 7", {"tune": 7}),
        ("--rank 5", {"rank": 5}),
        ("--act-bits 6", {"act_bits": 6, "mix": 0.5}),
        ("--act-bits 6 --act-groups 3", {"act_bits": 6, "act_groups": 3, "mix": 0.5}),
        ("--method adaround", {"method": "adaround", "start": "gptq"}),
        ("--method joint", {"method": "joint", "start": "gptq"}),
        ("--method taqdit --act-bits 8", {"method": "taqdit", "act_bits": 8, "mix": 0.5}),
        ("--seed 9 --iterations 70", {"seed": 9, "iterations": 70, "rounding_rate": 1e-2}),
        ("--iterations 10000", {"iterations": 10_000, "rounding_rate": 1e-3}),
        ("--format nvfp4 --quantize-input", {"quantize_input": True}),
    ],
)  # fmt: skip
def test_options_decide_settings(words: str, changes: dict[str, Any], settings: Any) -> None:
    plain = {"method": "gptq", "act_bits": None, "act_groups": 1, "quantize_input": False,
             "rank": 0, "tune": 0, "start": "weights"}  # fmt: skip
    recipe = {"iterations": 1000, "rounding_rate": 7e-3, "mix": 0.0, "seed": 0}
    found = settings(words)
    known = {name: getattr(found, name) for name in plain}
    known |= {name: getattr(found.recipe, name) for name in recipe}
    assert known == plain | recipe | changes


@pytest.mark.parametrize(
    ("words", "inner", "modulation"),
    [
        ("", LayerPlan(4, 64), LayerPlan(8, 64)),
        ("--bits 3 --group 32", LayerPlan(3, 32), LayerPlan(8, 32)),
        ("--bits 8 --group channel", LayerPlan(8, 0), LayerPlan(8, 0)),
        ("--format mxfp4", LayerPlan(4, 32, "mxfp4"), LayerPlan(8, 64)),
        ("--format nvfp4", LayerPlan(4, 16, "nvfp4"), LayerPlan(8, 64)),
        ("--format mxfp8", LayerPlan(8, 32, "mxfp8"), LayerPlan(8, 64)),
    ],
)
def test_options_decide_the_plan(
    words: str, inner: LayerPlan, modulation: LayerPlan, settings: Any
) -> None:
    layers = settings(words).plan.layers
    assert (layers[FF], layers[NORM]) == (inner, modulation)


def test_a_plan_of_a_file_is_taken_as_it_is(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = Plan({FF: LayerPlan(2, 32)})
    Path("plan.json").write_bytes(plan.to_json())
    assert settings("--plan plan.json").plan == plan
    coarse = Plan({FF: LayerPlan(4, 0), NORM: LayerPlan(8, 0)})
    Path("plan.json").write_bytes(coarse.to_json())
    smooth = "--plan plan.json --method smoothquant --act-bits 8"
    assert "--group 64" in settings(smooth)
    Path("plan.json").write_bytes(Plan({FF: LayerPlan(5, 0)}).to_json())
    assert settings(smooth).method == "smoothquant"


# Of each option the others that it decides: they are refused beside it.
DECIDES = {
    "--format mxfp4": ("--bits 4", "--group 64", "--convolutions"),
    "--plan x": ("--bits 4", "--group 64", "--bpw 4", "--convolutions", "--format mxfp4"),
    "--bpw 4": ("--bits 4", "--convolutions", "--format mxfp4"),
    "--against x": ("--eval-images 4", "--eval-prompts x"),
}  # fmt: skip


def test_options_that_would_do_nothing_are_refused(settings: Any) -> None:
    options = {*DECIDES, *(other for others in DECIDES.values() for other in others)}
    for one, other in combinations(sorted(options), 2):
        refused = other in DECIDES.get(one, ()) or one in DECIDES.get(other, ())
        found = settings(f"{one} {other}")
        assert ("leave it out" in str(found)) == refused, (one, other)
    assert "leave it out" not in str(settings("--format affine --bits 4 --group 32"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        *((f"--method {name} --format nvfp4", "no offsets") for name in ("hqq", "joint", "dwq")),
        ("--format nvfp4 --tune 3", "no offsets"),
        *((f"--method {name}", "add --act-bits") for name in ("taqdit", "ptq4dit", "smoothquant")),
        ("--act-groups 2", "add --act-bits"),
        ("--quantize-input", "--format nvfp4"),
        ("--quantize-input --format mxfp4", "--format nvfp4"),
        ("--quantize-input --format nvfp4 --act-bits 8", "without --act-bits"),
        ("--bpw 4", "quantize plan"),
    ],
)
def test_what_does_not_go_together(words: str, text: str, settings: Any) -> None:
    assert text in settings(words)


def test_what_goes_together(settings: Any) -> None:
    for words in ("--method rtn --format mxfp8 --quantize-input", "--method gptq --format mxfp4",
                  "--method smoothquant --act-bits 8 --group channel --bits 8"):  # fmt: skip
        assert isinstance(settings(words), Settings), words


# Of `quantize plan`: options for a plan of sizes alone too, or whose default holds until a set is
# given. Every other option is refused without one.
WITHOUT_A_SET = (
    *("--set", "--bits", "--group", "--modulation-bits", "--leave-out", "--save", "--overwrite"),
    *("--json", "--components", "--device", "--quiet"),
    *("--method", "--images", "--workers"),
)
PLAN_OPTIONS = {
    max(each.opts, key=len) for each in plan_command.params if isinstance(each, click.Option)
}


@pytest.mark.parametrize("option", sorted(PLAN_OPTIONS.difference(WITHOUT_A_SET)))
def test_a_plan_by_sensitivity_needs_a_set(option: str) -> None:
    result = CliRunner().invoke(lydite, ["quantize", "plan", "embedded", option, "4"])
    assert isinstance(result.exception, InputError) and result.exception.exit_code == 2
    assert f"{option} needs sensitivities" in str(result.exception)
    assert "give --set SET" in str(result.exception)


def test_a_plan_has_one_number_of_bits_or_an_average() -> None:
    words = "quantize plan embedded --bpw 4 --bits 4 --set x"
    result = CliRunner().invoke(lydite, words.split())
    assert "--bpw and --bits exclude each other" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "inner", "modulation"),
    [
        ("", LayerPlan(4, 64), LayerPlan(8, 64)),
        ("--bits 3 --group 32", LayerPlan(3, 32), LayerPlan(8, 32)),
        ("--modulation-bits 5 --group channel", LayerPlan(4, 0), LayerPlan(5, 0)),
        ("--leave-out *.ff.*", None, LayerPlan(8, 64)),
        ("--leave-out *.norm1.* --leave-out *.0.ff.*", None, None),
    ],
)
def test_the_options_of_a_plan(
    words: str, inner: LayerPlan | None, modulation: LayerPlan | None, tmp_path: Path
) -> None:
    save = tmp_path / "plan.json"
    result = CliRunner().invoke(
        lydite, ["quantize", "plan", "embedded", *words.split(), "--save", str(save), "--json"]
    )
    assert result.exit_code == 0, result.exception
    plan = msgspec.json.decode(save.read_bytes(), type=Plan)
    assert (plan.layers.get(FF), plan.layers.get(NORM)) == (inner, modulation)
    assert msgspec.convert(json.loads(result.stdout)["plan"], Plan) == plan


class Stopping:
    """A quantization whose user asks to stop at the first step, block or iteration."""

    def __init__(self, at: str, learned: bool) -> None:
        self.at, self.learned, self.finished = at, learned, 0
        self.settings = SimpleNamespace(tune=5)

    def steps_left(self) -> Any:
        return SimpleNamespace(learned=self.learned, finished=0, blocks=3, total=3)

    def round(self, stepped: Any, finished: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        if self.at == "step":
            stepped("blocks.0", 0, 0.5)
        finished(SimpleNamespace(path="blocks.0", errors=[]))
        self.finished += 1

    def tune(self, stepped: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        stepped(0, 0.5)
        self.finished += 1


@pytest.mark.parametrize(
    ("work", "at", "learned"),
    [(_round, "step", True), (_round, "block", False), (_tune, "iteration", False)],
)
def test_a_request_to_stop_is_heard_at_once(work: Any, at: str, learned: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    quantization = Stopping(at, learned)
    with pytest.raises(KeyboardInterrupt):
        work(quantization, True)
    assert not quantization.finished and signal.getsignal(signal.SIGINT) is before


def test_prompts_of_the_evaluation_that_are_in_the_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*prompts: str) -> Any:
        images = [SimpleNamespace(prompt=prompt) for prompt in prompts]
        return SimpleNamespace(plan=SimpleNamespace(images=images))

    against = {"against": "folder"}
    for evaluated, said in (
        (("a", "b", "c"), "(2 of 3, with other seeds)"), (("c", "d"), None), (("c",), None),
    ):  # fmt: skip
        monkeypatch.setattr(
            "lydite.calibrate.store.set_file.read_description",
            lambda _, each=evaluated: plan(*each),
        )
        sentence = shared_prompts(cast(Any, None), plan("a", "b", "b"), against)
        assert sentence is None if said is None else sentence and said in sentence
    assert shared_prompts(cast(Any, None), None, against) is None


def test_the_embedded_model_has_prompts_of_its_own(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []
    ctx: Any = SimpleNamespace(invoke=lambda _, **words: given.append(words))
    options = {"prompts": None, "quiet": True}
    _draw_set(tmp_path / "set", ctx, Model("embedded", "parts"), tmp_path, options)
    (words,) = given
    texts = words.pop("prompts").read_text().splitlines()
    assert len(texts) == words["images"] == 16 and len(set(texts)) > 10
    assert texts == [prompt.text for prompt in training_prompts(16, 4242)]
    assert words == {"images": 16, "model": "embedded", "components": "parts",
                     "out": tmp_path / "set", "quiet": True}  # fmt: skip
    with pytest.raises(InputError, match="Only the embedded model has prompts"):
        _draw_set(tmp_path / "set", ctx, Model("other", None), tmp_path, options)
