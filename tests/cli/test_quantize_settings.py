"""From the options of `lydite quantize MODEL` to settings: what each decides, what is refused."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from lydite.cli.main import lydite
from lydite.cli.quantize import model
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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--bpw 4", "--bpw needs sensitivities"),
        ("--sensitivity x.json", "--sensitivity needs sensitivities"),
        ("--bpw 4 --bits 4 --set x", "exclude each other"),
    ],
)
def test_a_plan_by_sensitivity_needs_a_set(words: str, text: str) -> None:
    result = CliRunner().invoke(lydite, f"quantize plan embedded {words}".split())
    assert text in str(result.exception)


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
