"""Recording our pipeline: nothing in it changes, and the names are the reference's."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lydite.core.device import current_device
from lydite.core.request import Request
from lydite.pipelines.families.sd3 import NAMES
from lydite.pipelines.observer import StepReporter
from lydite.pipelines.picture import Picture
from lydite.pipelines.pipeline import Pipeline
from lydite.pipelines.recording import record as record_run
from lydite.trace.reader import Trace
from lydite.trace.recorder import Injection
from lydite.trace.selftest import check_selftest
from lydite.trace.writer import Capture
from lydite.weights.load import parameter_hash, parameters
from support.same_pixels import assert_same

REQUEST = Request("a red fox", negative="snow", steps=3, width=32, height=48, text_length=4)


def record(
    pipeline: Pipeline, request: Request, seed: int, folder: Path, **options: Any
) -> Picture:
    return record_run(pipeline, pipeline.plan(request), seed, folder, **options)


@pytest.fixture(scope="module")
def pipeline(untrained: Path) -> Pipeline:
    return Pipeline.open(untrained)


@pytest.fixture(scope="module")
def trace(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("traces") / "run"
    pipeline.name = "untrained"
    record(pipeline, REQUEST, 7, folder)
    return Trace.open(folder)


def values(trace: Trace, name: str, slot: str = "out", step: int = 0) -> np.ndarray:
    event = trace.find(name, slot, step)
    assert event is not None, (name, slot, step)
    return trace.read(event)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("guidance", [4.0, 1.0])
def test_recording_changes_no_bit_of_the_picture_and_no_weight(
    untrained: Path, tmp_path: Path, dtype: str, guidance: float
) -> None:
    pipeline = Pipeline.open(untrained, dtype=dtype)
    request = REQUEST.replace(guidance=guidance)

    def hashes() -> list[str]:
        return [parameter_hash(pipeline.model.network(name)) for name in pipeline.model.components]

    weights = hashes()
    (before,) = pipeline.generate(request, [7])
    recorded = record(pipeline, request, 7, tmp_path / "run")
    (after,) = pipeline.generate(request, [7])
    assert np.array_equal(before.pixels, after.pixels)
    assert_same(before.pixels, recorded.pixels, most=1 if dtype == "float32" else 24)
    assert hashes() == weights


def test_every_network_and_everything_between_them_is_there(trace: Trace) -> None:
    names = {event.name for event in trace.events}
    assert {name.split("/")[0] for name in names} == {
        "selftest", "pipeline", "text_encoder", "text_encoder_2", "transformer", "vae",
    }  # fmt: skip
    assert {name for name in names if name.startswith("pipeline/")} == {
        f"pipeline/{name}"
        for name in (
            "token_ids", "token_ids_2", "prompt_embeds", "pooled", "sigmas", "timesteps", "noise",
            "velocity", "latents", "image",
        )
    }  # fmt: skip
    kinds = {event.name: event.kind for event in trace.events}
    assert kinds["pipeline/token_ids"] == kinds["pipeline/token_ids_2"] == "ids"
    assert kinds["pipeline/sigmas"] == kinds["pipeline/timesteps"] == "schedule"
    assert kinds["pipeline/noise"] == "input"
    assert trace.header.complete and trace.header.selftest and not check_selftest(trace)


def test_the_header_says_what_decides_the_run(trace: Trace) -> None:
    conditions = dict(trace.header.conditions)
    assert len(conditions.pop("checkpoint")) == 64
    assert conditions == {
        "model": "untrained",
        "prompt": "a red fox",
        "negative": "snow",
        "seed": 7,
        "noise": "torch",
        "width": 32,
        "height": 48,
        "steps": 3,
        "guidance": 7.0,
        "sampler": "euler",
        "schedule": "sd3_diffusers",
        "text_length": 4,
    }
    header = trace.header
    assert (header.side, header.dtype) == (
        "port",
        "float32",
    ) and header.device == current_device().describe()
    assert header.framework.startswith("mlx 0.")


def test_each_step_has_its_own_values(trace: Trace) -> None:
    steps = Counter((event.name, event.slot, event.step, event.call) for event in trace.events)
    assert set(steps.values()) == {1}
    for name in (
        "pipeline/velocity",
        "pipeline/latents",
        "transformer",
        "transformer/transformer_blocks.0.norm1.linear",
        "transformer/time_text_embed",
    ):
        found = [event.step for event in trace.events if (event.name, event.slot) == (name, "out")]
        assert found == [0, 1, 2], name
    assert all(event.step == 0 for event in trace.events if event.name.startswith("vae"))


def test_what_is_computed_for_all_steps_at_once_is_kept_step_by_step(
    trace: Trace, pipeline: Pipeline
) -> None:
    timesteps = values(trace, "pipeline/timesteps")
    for step in range(3):
        told = values(trace, "transformer/time_text_embed", "in.0", step)
        assert told.tolist() == [np.float32(timesteps[step])]
        assert values(trace, "transformer/time_text_embed", "out", step).shape[:2] == (1, 2)
    # with two steps and two prompts the axes look alike
    pooled = values(trace, "pipeline/pooled")
    assert np.array_equal(values(trace, "transformer/time_text_embed", "in.1"), pooled)
    assert trace.find("transformer/time_text_embed", "in.1", 1) is None


def test_two_steps_of_two_prompts_are_not_confused(pipeline: Pipeline, tmp_path: Path) -> None:
    record(pipeline, REQUEST.replace(steps=2), 7, tmp_path / "run")
    with Trace.open(tmp_path / "run") as trace:
        for name in ("time_text_embed.text_embedder", "context_embedder"):
            event = trace.find(f"transformer/{name}")
            assert event is not None and event.shape[0] == 2
            assert trace.find(f"transformer/{name}", step=1) is None


def test_the_image_is_the_picture_before_rounding(trace: Trace, pipeline: Pipeline) -> None:
    (picture,) = pipeline.generate(REQUEST, [7])
    image = values(trace, "pipeline/image")
    assert image.dtype == np.float32 and not np.array_equal(image * 255, picture.pixels)
    assert_same(picture.pixels, np.round(image * 255).astype(np.uint8))


def test_axes_are_named_where_a_shape_may_not_show_them(trace: Trace) -> None:
    dims = {(event.name, event.slot): event.dims for event in trace.events}
    assert dims["pipeline/noise", "out"] == dims["pipeline/latents", "out"] == "b h w c"
    assert dims["transformer", "in.hidden_states"] == dims["transformer", "out"] == "b h w c"
    assert dims["vae/decode", "in.0"] == dims["vae/decoder.conv_in", "out"] == "b h w c"
    assert dims["vae/decoder.mid_block.attentions.0.to_q", "out"] is None
    assert dims["transformer/transformer_blocks.0.attn.to_q", "out"] is None


def test_weights_are_described_under_their_checkpoints_names(
    trace: Trace, pipeline: Pipeline
) -> None:
    infos = trace.weights()
    assert infos is not None
    assert infos.keys() == {
        f"{name}/{path}"
        for name in pipeline.model.components
        for path in parameters(pipeline.model.network(name))
    }
    assert infos["transformer/proj_out.weight"].hash


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("text_encoder out.last", "text_encoder out.last_hidden_state"),
        ("text_encoder_2 out.pooled", "text_encoder_2 out.text_embeds"),
        ("text_encoder/text_model out.pooled", "text_encoder/text_model out.pooler_output"),
        ("text_encoder out.hidden_states.1", "text_encoder out.hidden_states.1"),
        ("text_encoder_3 out", "text_encoder_3 out.last_hidden_state"),
        ("text_encoder_3/shared out", "text_encoder_3/encoder.embed_tokens out"),
        (
            "transformer/transformer_blocks.11 in.0",
            "transformer/transformer_blocks.11 in.encoder_hidden_states",
        ),
        (
            "transformer/transformer_blocks.1.attn2 in.0",
            "transformer/transformer_blocks.1.attn2 in.hidden_states",
        ),
        (
            "transformer/transformer_blocks.1.attn.to_q in.0",
            "transformer/transformer_blocks.1.attn.to_q in.0",
        ),
        (
            "transformer/transformer_blocks.1.norm1.linear in.0",
            "transformer/transformer_blocks.1.norm1.linear in.0",
        ),
        (
            "transformer/transformer_blocks.1.norm1_context in.1",
            "transformer/transformer_blocks.1.norm1_context in.table",
        ),
        ("transformer/pos_embed in.0", "transformer/pos_embed in.0"),
        ("vae/decode in.0", "vae/decode in.0"),
    ],
)
def test_sites_are_named_as_in_the_reference(ours: str, theirs: str) -> None:
    name, slot = ours.split()
    assert " ".join(NAMES.reference_site(name, slot)) == theirs


def test_another_runs_noise_gives_its_picture(
    trace: Trace, pipeline: Pipeline, tmp_path: Path
) -> None:
    (expected,) = pipeline.generate(REQUEST, [7])
    inject = Injection(trace, ("pipeline/noise",))
    picture = record(pipeline, REQUEST, 8, tmp_path / "run", inject=inject)
    assert_same(picture.pixels, expected.pixels)


def test_a_run_on_its_own_values_is_the_same_run(
    trace: Trace, pipeline: Pipeline, tmp_path: Path
) -> None:
    (expected,) = pipeline.generate(REQUEST, [7])
    inject = Injection(trace, ("*:*",))
    picture = record(pipeline, REQUEST, 7, tmp_path / "run", inject=inject)
    assert_same(picture.pixels, expected.pixels)
    with Trace.open(tmp_path / "run") as again:
        assert [event.hash for event in again.events] == [event.hash for event in trace.events]


@pytest.mark.parametrize(
    "name",
    [
        *("text_encoder", "transformer/transformer_blocks.0.norm1.linear"),
        *("transformer/norm_out.linear", "vae/decoder.conv_in"),
    ],
)
def test_a_value_of_another_run_changes_the_picture(
    trace: Trace, pipeline: Pipeline, tmp_path: Path, name: str
) -> None:
    """Also of a module that computes the values of all steps at once."""
    request, seed = REQUEST.replace(prompt="an old blue ship"), 8
    (plain,) = pipeline.generate(request, [seed])
    options = {"inject": Injection(trace, (f"{name}:*",)), "capture": Capture("stats")}
    picture = record(pipeline, request, seed, tmp_path / "run", **options)
    assert not np.array_equal(picture.pixels, plain.pixels)


def test_only_what_is_asked_for_is_kept(pipeline: Pipeline, tmp_path: Path) -> None:
    capture = Capture("stats", ("pipeline/*", "vae/decoder.conv_in:out"))
    record(pipeline, REQUEST, 7, tmp_path / "run", capture=capture)
    with Trace.open(tmp_path / "run") as trace:
        kept = {event.name for event in trace.events if not event.name.startswith("pipeline/")}
        assert kept == {"vae/decoder.conv_in"}
        image, noise = trace.find("pipeline/image"), trace.find("pipeline/noise")
        assert image and noise and not trace.has_values(image) and trace.has_values(noise)


def test_an_interrupted_run_leaves_what_it_had(pipeline: Pipeline, tmp_path: Path) -> None:
    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    (before,) = pipeline.generate(REQUEST, [7])
    with pytest.raises(KeyboardInterrupt):
        record(pipeline, REQUEST, 7, tmp_path / "run", observer=StepReporter(interrupt))
    (after,) = pipeline.generate(REQUEST, [7])
    assert np.array_equal(before.pixels, after.pixels)
    with Trace.open(tmp_path / "run") as trace:
        assert not trace.header.complete and trace.find("pipeline/latents")
