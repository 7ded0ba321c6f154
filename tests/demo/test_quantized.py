"""The chapter of 4 bits: what each method is given, and the set that is drawn for it."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lydite import embedded
from lydite.calibrate.run import RunCallbacks
from lydite.core.request import Request
from lydite.demo.chapter import Settings
from lydite.demo.chapters import quantized
from lydite.demo.demo import Demo
from lydite.embedded.captions import training_prompts
from lydite.evaluate import embedded_metrics
from lydite.pipelines.pipeline import Pipeline
from lydite.report.page import Callout, Figures, Table
from support.png_pixels import png_pixels


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


def test_each_picture_is_drawn_by_the_weights_that_its_caption_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pictures of a prompt have one seed; those of GPTQ are the nearer ones."""
    ticks: list[None] = []
    calls: list[tuple[str, str, int]] = []

    class Drawing:
        def __init__(self, name: str, level: int) -> None:
            self.name, self.level = name, level

        def plan(self, request: Request) -> Any:
            return SimpleNamespace(steps=2, request=request)

        def generate(self, run: Any, seeds: list[int]) -> Iterator[Any]:
            calls.append((self.name, run.request.prompt, seeds[0]))
            pixels = np.full((8, 8, 3), self.level + seeds[0], np.uint8)
            yield SimpleNamespace(pixels=pixels)

    def quantize(pipeline: Any, folder: Path, method: str) -> Any:
        assert pipeline.name == "full"
        less = 0.25 if method == "gptq" else 1.0
        units = [SimpleNamespace(after=less, nearest=1.0), SimpleNamespace(after=0.5, nearest=1.0)]
        changed = {"a": 0.5 * less, "b": 0.25}
        return SimpleNamespace(units=units, changed=changed, bytes_before=700, bytes_after=200)

    full = Drawing("full", 100)
    quantized_levels = {"rtn": 110, "gptq": 104}
    demo = Demo(tmp_path, Settings(prompts=("star", "ring"), steps=2))
    monkeypatch.setattr(Demo, "pipeline", full)
    monkeypatch.setattr(Demo, "plan", lambda _, p: SimpleNamespace(request=Request(p), steps=2))
    monkeypatch.setattr(quantized, "_calibrate", lambda *_: None)
    monkeypatch.setattr(quantized, "_quantize", quantize)

    def opened(folder: Path, **options: str) -> Drawing:
        assert folder.name == "model" and options == {"dtype": "float32"}
        return Drawing(folder.parent.name, quantized_levels[folder.parent.name])

    monkeypatch.setattr(quantized.Pipeline, "open", opened)
    result = quantized.run(demo, lambda: ticks.append(None))
    table, figures, callout = result.chapter.blocks[:3]
    assert isinstance(table, Table) and isinstance(figures, Figures)
    shown = [
        (figure.note, figure.caption.partition(":")[0], int(png_pixels(figure.png).max()))
        for figure in figures.items
    ]
    names = {"full": "full precision", "rtn": "rounded to nearest", "gptq": "by GPTQ"}
    levels = {"full": 100} | quantized_levels
    assert shown == [
        (prompt, words, levels[name] + seed)
        for seed, prompt in enumerate(("star", "ring"))
        for name, words in names.items()
    ]
    assert sorted(calls) == sorted((n, p, s) for n in names for s, p in enumerate(("star", "ring")))
    assert len(ticks) == 2 * 3 * 2
    rtn, gptq = (20 * math.log10(255 / by) for by in (10, 4))
    assert table.rows == (
        ("rounded to nearest", f"{rtn:.1f} dB", f"{rtn:.1f} dB"),
        ("by GPTQ", f"{gptq:.1f} dB", f"{gptq:.1f} dB"),
    )
    assert figures.items[2].caption.endswith(f"{gptq:.1f} dB")
    assert result.lines[0].startswith("GPTQ leaves 38 % of") and result.passed
    assert result.lines[1].endswith(f"rounded to nearest {rtn:.1f} dB, by GPTQ {gptq:.1f} dB")
    assert "takes 3.5 times less" in result.chapter.lead and "rounds 19 %" in result.chapter.lead
    assert result.fact and result.fact.value == "38 %" and isinstance(callout, Callout)


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
