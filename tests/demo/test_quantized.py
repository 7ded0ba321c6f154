"""The chapter of 4 bits: what each method is given, and the set that is drawn for it."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lydite import embedded
from lydite.calibrate.run import RunCallbacks
from lydite.demo.chapter import Settings
from lydite.demo.chapters import quantized
from lydite.demo.demo import Demo
from lydite.embedded.captions import training_prompts
from lydite.evaluate import embedded_metrics
from lydite.pipelines.pipeline import Pipeline


def test_gptq_sees_the_set_and_rounding_to_nearest_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    opened = SimpleNamespace(settings=SimpleNamespace(model_hash="h"), content_hash="c")

    def quantize(pipeline: Any, used: Any, samples: Any, settings: Any, work: Any) -> list[Any]:
        given[settings.method] = used, samples, settings.plan
        return []

    monkeypatch.setattr(quantized.CalibrationSet, "open", lambda _: nullcontext(opened))
    monkeypatch.setattr(quantized, "choose_samples", lambda *words: words[1:])
    monkeypatch.setattr(quantized, "quantize_network", quantize)
    monkeypatch.setattr(quantized, "export", lambda *_: None)
    monkeypatch.setattr(quantized, "provenance", lambda *words: words[-1])
    pipeline = Pipeline.open(embedded.NAME)
    for method in ("rtn", "gptq"):
        made: Any = quantized._quantize(pipeline, tmp_path, method)
        assert made == {"source_model": "embedded", "source_hash": "h", "set_hash": "c"}
    assert given["rtn"][0] is None and given["gptq"][0] is opened
    for _, samples, plan in given.values():
        assert samples == (1, quantized.SAMPLES, quantized.SAMPLES)
        assert {each.bits for each in plan.layers.values()} == {4, 8}
        assert {each.group for each in plan.layers.values()} == {64}


def test_the_set_is_of_training_prompts_with_seeds_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []

    def run(writer: Any, session: Any, callbacks: RunCallbacks) -> None:
        plans.append(writer.plan)
        callbacks.stepped(0, 0)

    monkeypatch.setattr(quantized, "run_here", run)
    ticks: list[None] = []
    demo = Demo(tmp_path, Settings(prompts=("star",), steps=2))
    quantized._calibrate(demo, tmp_path / "set", lambda: ticks.append(None))
    (plan,) = plans
    count = quantized.CALIBRATED
    assert [image.seed for image in plan.images] == list(range(1000, 1000 + count))
    assert len(ticks) == 1
    prompts = [prompt.text for prompt in training_prompts(count, seed=4242)]
    assert [image.prompt for image in plan.images] == prompts
    assert plan.steps == (0, 1) and not plan.pictures
    assert quantized.CHAPTER.steps(demo.settings) == 2 * (count + 1 * 3)


def test_the_demo_of_the_documentation() -> None:
    """Its prompts are held out from training by the seed that the evaluation takes."""
    settings = Settings()
    assert (settings.held_out, settings.steps, len(settings.prompts)) == (36, 16, 12)
    assert settings.held_out_seed == embedded_metrics.SEED
