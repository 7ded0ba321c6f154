"""diffusers recorded, and our pipeline held against it: every variant, every precision."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lydite.core.errors import FileError, InputError, LyditeError
from lydite.core.request import Request
from lydite.diff.compare import compare
from lydite.pipelines import recording
from lydite.pipelines.pipeline import Pipeline
from lydite.reference.jobs import Dtype, Job, ReferenceFailed, TraceOutput
from lydite.reference.recording import _schedule, _steps_after, _unpinned, record
from lydite.trace.reader import Trace
from lydite.trace.selftest import check_selftest
from support import tiny_sd, tiny_sd3
from support.distance import relative_l2

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

VARIANTS = [*tiny_sd3.VARIANTS, "without T5"]
REQUEST = Request(
    prompt="a red star",
    negative="blue fox",
    steps=3,
    guidance=5.0,
    width=32,
    height=48,
    text_length=24,
)
# What modules of the reference do that ours leave to functions, or that do nothing in a run.
FUNCTIONS = (
    "act", "act_1", "act_fn", "activation_fn", "conv_act", "dropout", "nonlinearity", "silu",
    "time_proj", "to_out.1",
)  # fmt: skip


class Models:
    """Tiny checkpoints and their traces, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[tuple[str, ...], Path] = {}

    def folder(self, variant: str) -> Path:
        if (variant,) not in self.made:
            name, t5 = ("sd3-medium", False) if variant == "without T5" else (variant, True)
            path = tiny_sd3.make_pipeline(self.root / variant, name, t5=t5)
            self.made[variant,] = path
        return self.made[variant,]

    def job(self, variant: str, folder: Path, dtype: Dtype = "float32", **changes: Any) -> Job:
        job = Job(
            family="sd3",
            model=str(self.folder(variant)),
            request=self.pipeline(variant).plan(REQUEST).request,
            seed=1,
            outputs=(TraceOutput(str(folder), dtype),),
            name="tiny",
            model_hash=self.pipeline(variant).model_hash,
        )
        return msgspec.structs.replace(job, **changes)

    def pipeline(self, variant: str, dtype: str = "float32") -> Pipeline:
        pipeline = Pipeline.open(self.folder(variant), dtype=dtype)
        pipeline.name = "tiny"
        return pipeline

    def reference(self, variant: str, dtype: Dtype = "float32") -> Trace:
        key = ("reference", variant, dtype)
        if key not in self.made:
            self.made[key] = self.root / f"reference-{variant}-{dtype}"
            job = self.job(variant, self.made[key], dtype)
            record(job, job.outputs[0])
        return Trace.open(self.made[key])

    def ours(self, variant: str, dtype: str = "float32") -> Trace:
        key = ("ours", variant, dtype)
        if key not in self.made:
            self.made[key] = self.root / f"ours-{variant}-{dtype}"
            pipeline = self.pipeline(variant, dtype)
            recording.record(pipeline, pipeline.plan(REQUEST), 1, self.made[key])
        return Trace.open(self.made[key])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def values(trace: Trace, name: str, slot: str = "out", step: int = 0) -> np.ndarray:
    event = trace.find(name, slot, step)
    assert event is not None, (name, slot, step)
    return trace.read(event)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_value_agrees_in_float32(models: Models, variant: str) -> None:
    verdict = compare(
        models.reference(variant), models.ours(variant), floor=models.reference(variant, "float64")
    )
    assert verdict.verdict == "agree", verdict.sentence
    assert not any(row.wrong for row in verdict.rows)
    assert all(gate.passed for gate in verdict.gates)
    assert max((row.error or 0) / (row.floor or 1) for row in verdict.rows) < 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["sd3.5-medium"])
def test_every_value_agrees_in_narrow_precision(models: Models, variant: str, dtype: Any) -> None:
    verdict = compare(
        models.reference(variant),
        models.ours(variant, dtype),
        floor=models.reference(variant, dtype),
    )
    assert verdict.verdict == "agree", verdict.sentence
    assert not any(row.wrong for row in verdict.rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_what_we_compute_in_functions_has_no_counterpart(models: Models, variant: str) -> None:
    verdict = compare(models.reference(variant), models.ours(variant))
    assert verdict.unpaired_port == ()
    unexplained = [name for name in verdict.unpaired_reference if not name.endswith(FUNCTIONS)]
    assert unexplained == []


def test_both_sides_say_the_same_of_themselves(models: Models) -> None:
    theirs, ours = models.reference("sd3.5-medium"), models.ours("sd3.5-medium")
    assert theirs.header.conditions == ours.header.conditions
    assert (theirs.header.side, theirs.header.dtype) == ("reference", "float32")
    assert theirs.header.framework.startswith("torch 2") and theirs.header.complete
    assert theirs.header.selftest and not check_selftest(theirs)
    own, other = ours.weights(), theirs.weights()
    assert own and other and own.keys() == other.keys()


def test_names_between_the_networks_are_equal_strings(models: Models) -> None:
    names = [
        {
            (event.name, event.kind, event.step)
            for event in trace.events
            if event.name.startswith("pipeline/")
        }
        for trace in (models.reference("sd3.5-medium"), models.ours("sd3.5-medium"))
    ]
    assert names[0] == names[1]


def test_the_picture_is_the_one_diffusers_draws_unwatched(models: Models) -> None:
    """Our one batch of negative prompt and prompt gives what its two calls give."""
    from diffusers import StableDiffusion3Pipeline

    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(models.folder("sd3.5-large"))
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        REQUEST.prompt,
        negative_prompt=REQUEST.negative,
        num_inference_steps=REQUEST.steps,
        guidance_scale=REQUEST.guidance,
        width=REQUEST.width,
        height=REQUEST.height,
        max_sequence_length=REQUEST.text_length,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images[0]
    assert relative_l2(values(models.reference("sd3.5-large"), "pipeline/image"), image) < 1e-5


def test_float64_is_float64_even_where_the_reference_pins_float32(models: Models) -> None:
    exact = models.reference("sd3-medium", "float64")
    narrow = {
        event.name
        for event in exact.events
        if event.dtype not in ("f64", "i64") and event.kind != "selftest"
    }
    assert narrow == {"pipeline/noise"}  # what both runs are given
    ours, theirs = (
        values(trace, "transformer/time_text_embed.time_proj")
        for trace in (exact, models.reference("sd3-medium"))
    )
    assert 1e-9 < relative_l2(theirs, ours) < 1e-4  # sin(1000 x) in float32


def test_noise_can_be_given(models: Models, tmp_path: Path) -> None:
    noise = values(models.reference("sd3-medium"), "pipeline/noise")
    np.save(tmp_path / "noise.npy", noise)
    job = models.job("sd3-medium", tmp_path / "run", seed=99, noise=str(tmp_path / "noise.npy"))
    record(job, job.outputs[0])
    with Trace.open(tmp_path / "run") as trace:
        expected = values(models.reference("sd3-medium"), "pipeline/image")
        assert np.array_equal(values(trace, "pipeline/image"), expected)
        assert trace.header.conditions["noise"] == "given"


def test_without_guidance_only_the_prompt_is_run(models: Models, tmp_path: Path) -> None:
    pipeline = models.pipeline("sd3-medium")
    run = pipeline.plan(REQUEST.replace(guidance=1.0))
    job = models.job("sd3-medium", tmp_path / "theirs", request=run.request)
    record(job, job.outputs[0])
    recording.record(pipeline, run, 1, tmp_path / "ours")
    with Trace.open(tmp_path / "theirs") as theirs, Trace.open(tmp_path / "ours") as ours:
        assert values(theirs, "pipeline/token_ids").shape == (1, 77)
        for name in ("pipeline/velocity", "pipeline/latents"):
            moved = values(ours, name, step=2).transpose(0, 3, 1, 2)
            assert relative_l2(moved, values(theirs, name, step=2)) < 1e-5


@pytest.mark.parametrize("first", [0, 1, 2, 4])
@pytest.mark.parametrize("name", ["EulerDiscrete", "HeunDiscrete", "PNDM"])
def test_the_latents_of_every_step_are_recorded_once(name: str, first: int) -> None:
    """Also of img2img, which leaves out the first steps of the list; PNDM then skips one."""
    import diffusers

    scheduler = getattr(diffusers, f"{name}Scheduler")()
    if name == "PNDM":
        scheduler.register_to_config(skip_prk_steps=True)
    scheduler.set_timesteps(5)
    listed = scheduler.timesteps[first * scheduler.order :]
    after = [_steps_after(scheduler, index, first) for index in range(len(listed))]
    _, timesteps = _schedule(scheduler, first)
    whole = list(range(len(timesteps)))[name == "PNDM" and first > 1 :]
    assert [step for step, _ in after if step is not None] == whole
    assert [after for step, after in after if step is not None] == [*whole[1:], 0]


def test_injected_values_replace_its_own(models: Models, tmp_path: Path) -> None:
    given = models.reference("sd3-medium")
    inject: dict[str, Any] = {"inject": str(given.folder), "inject_at": "pipeline/noise"}
    job = models.job("sd3-medium", tmp_path / "run", seed=99, **inject)
    record(job, job.outputs[0])
    with Trace.open(tmp_path / "run") as trace:
        assert np.array_equal(values(trace, "pipeline/image"), values(given, "pipeline/image"))


def test_what_it_cannot_do_is_said_before_a_trace_is_begun(models: Models, tmp_path: Path) -> None:
    np.save(tmp_path / "noise.npy", np.zeros((1, 16, 8, 8)))
    cases: list[tuple[dict[str, Any], type[LyditeError], str]] = [
        ({"request": REQUEST.replace(width=33)}, InputError, "divisible by"),
        ({"model": str(tmp_path / "sd3.safetensors")}, FileError, "--components"),
        ({"model": str(tmp_path)}, ReferenceFailed, "diffusers cannot load it"),
        ({"noise": str(tmp_path / "noise.npy")}, InputError, r"expected \[1, 16, 12, 8\]"),
    ]
    for changes, kind, message in cases:
        job = models.job("sd3-medium", tmp_path / "run", **changes)
        with pytest.raises(kind, match=message):
            record(job, job.outputs[0])
    assert not (tmp_path / "run").exists()


def test_the_reference_is_given_no_pickle_no_code_and_no_adapter(tmp_path: Path) -> None:
    """A folder may hold files that we do not read, and that diffusers or transformers would."""
    pickle = b"cos\nsystem\n(S'false'\ntR."
    model = tiny_sd.make_pipeline(tmp_path / "model", "sd1")
    (model / "safety_checker").mkdir()
    (model / "safety_checker" / "pytorch_model.bin").write_bytes(pickle)
    index = json.loads((model / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    index["scheduler"] = ["mine", index["scheduler"][1]]
    (model / "model_index.json").write_text(json.dumps(index))
    (model / "scheduler" / "mine.py").write_text("raise SystemExit")
    adapter = {"peft_type": "LORA", "target_modules": ["q_proj"], "base_model_name_or_path": "a/b"}
    (model / "text_encoder" / "adapter_config.json").write_text(json.dumps(adapter))
    (model / "text_encoder" / "adapter_model.bin").write_bytes(pickle)
    job = Job(
        family="sd",
        model=str(model),
        request=Pipeline.open(model).plan(Request("a", steps=1, width=32, height=32)).request,
        seed=1,
        outputs=(TraceOutput(str(tmp_path / "trace")),),
        prediction="eps",
    )
    with pytest.raises(ReferenceFailed, match="mine is not one of the libraries"):
        record(job, job.outputs[0])
    index["scheduler"][0] = "diffusers"
    (model / "model_index.json").write_text(json.dumps(index))
    record(job, job.outputs[0])
    weights = model / "vae" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name("weights.safetensors"))
    weights.with_suffix(".bin").write_bytes(pickle)
    with pytest.raises(ReferenceFailed, match="no file named"):
        record(job, job.outputs[0])


def test_products_with_a_buffer_of_float32_are_in_float64() -> None:
    frequencies, ids = torch.rand(2, 3, 1), torch.arange(4).expand(2, 1, 4)
    with _unpinned(torch):  # a rotary embedding, as transformers computes it
        found = frequencies.float() @ ids.float()
    assert found.dtype is torch.float64
    assert torch.equal(found, frequencies.double() @ ids.double())
