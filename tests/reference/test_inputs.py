"""What the reference is given: which files, which class, which noise; without torch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lydite.core.errors import ConfigError, FileError, InputError
from lydite.core.request import Request
from lydite.reference.family import BUILT_IN, find_reference_family
from lydite.reference.jobs import Job, ReferenceMissing
from lydite.reference.recording import (
    FamilyRecorder,
    _first_step,
    _float32_noise,
    _imported,
    _noise,
    _only_what_we_read,
    _pipeline_class,
    _schedule,
    _silent,
    _weights,
)
from lydite.reference.sd import draws_before_noise, noise_shape
from lydite.trace.events import Header
from lydite.trace.reader import Trace
from lydite.trace.writer import TraceWriter

GIVEN = {
    "model_index.json": True,
    "README.md": False,
    "weights.safetensors": False,  # only configs lie beside the folders
    "transformer/config.json": True,
    "transformer/model-00001-of-00002.safetensors": True,
    "transformer/diffusion_pytorch_model.bin": False,
    "transformer/model.py": False,
    "tokenizer/merges.txt": True,
    "tokenizer/spiece.model": True,
    "tokenizer/chat_template.jinja": True,
    "text_encoder/adapter_config.json": False,
    "text_encoder/adapter_model.safetensors": False,
    "safety_checker/model.safetensors": False,
    "feature_extractor/preprocessor_config.json": False,
    "image_encoder/model.safetensors": False,
    "transformer/deep/config.json": False,
}


def test_only_files_that_we_read_are_given(tmp_path: Path) -> None:
    for name in GIVEN:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "folder.json").mkdir()
    with _only_what_we_read(tmp_path) as given:
        found = {str(p.relative_to(given)): p.read_text() for p in given.rglob("*") if p.is_file()}
    assert found == {name: name for name, wanted in GIVEN.items() if wanted}
    assert not given.exists()


def job(**changes: Any) -> Job:
    request = Request("a", steps=10, width=64, height=32)
    usual = {"family": "sd3", "model": "m", "request": request, "seed": 1, "outputs": ()}
    return Job(**usual | changes)


def test_the_class_is_for_text_or_an_image_or_a_mask() -> None:
    names = ("pipeline_class", "image_pipeline_class", "mask_pipeline_class")
    family: Any = SimpleNamespace(name="x", **{name: name for name in names})
    inputs = ({}, {"image": b"x"}, {"image": b"x", "mask": b"y"})
    assert [_pipeline_class(job(**each), family) for each in inputs] == list(names)
    family.mask_pipeline_class = None
    with pytest.raises(InputError, match="the reference of x is recorded for text to image only"):
        _pipeline_class(job(**inputs[2]), family)
    assert find_reference_family("sd3").mask_pipeline_class is None


def test_noise_that_is_given_has_the_shape_of_the_latents(tmp_path: Path) -> None:
    family: Any = SimpleNamespace(noise_shape=lambda _, height, width: (1, 4, height, width))
    torch: Any = SimpleNamespace(from_numpy=lambda array: array)
    path = tmp_path / "noise.npy"
    np.save(path, np.ones((1, 4, 32, 64)))
    found = _noise(job(noise=str(path)), family, None, torch)
    assert found.shape == (1, 4, 32, 64) and found.dtype == np.float32
    np.save(path, np.ones((1, 4, 64, 32)))
    with pytest.raises(InputError, match=r"shape \[1, 4, 64, 32\]; expected \[1, 4, 32, 64\]"):
        _noise(job(noise=str(path)), family, None, torch)
    np.save(path, np.array([{}]), allow_pickle=True)
    for wrong in (path, tmp_path / "missing.npy"):
        with pytest.raises(FileError, match=r"no \.npy file of noise"):
            _noise(job(noise=str(wrong)), family, None, torch)


@pytest.mark.parametrize(
    ("masked", "channels", "strength", "draws"),
    [(True, 9, 1.0, 0), (True, 9, 0.99, 1), (True, 4, 1.0, 1), (False, 9, 1.0, 1)],
)
def test_the_image_is_encoded_where_something_of_it_stays(
    masked: bool, channels: int, strength: float, draws: int
) -> None:
    config = SimpleNamespace(in_channels=channels)
    vae = SimpleNamespace(config=SimpleNamespace(latent_channels=4))
    pipeline = SimpleNamespace(unet=SimpleNamespace(config=config), vae=vae, vae_scale_factor=8)
    assert draws_before_noise(pipeline, Request(strength=strength), masked) == draws
    assert noise_shape(pipeline, 64, 32) == (1, 4, 8, 4)


def test_a_strength_leaves_out_the_first_steps() -> None:
    pipeline = SimpleNamespace(get_timesteps=lambda steps, strength, device: (None, 4))
    assert _first_step(job(), pipeline) == 0
    late = job().request.replace(strength=0.4)
    assert _first_step(job(request=late), pipeline) == 6


def test_schedules_of_classes_without_sigmas_are_read_off_their_table() -> None:
    kept = np.linspace(0.9, 0.1, 10)
    scheduler = SimpleNamespace(
        timesteps=np.array([8, 4, 1]), alphas_cumprod=kept, final_alpha_cumprod=0.99
    )
    shares = np.array([kept[8], kept[4], kept[1], 0.99])
    for first in (0, 1):
        sigmas, timesteps = _schedule(scheduler, first)
        np.testing.assert_allclose(sigmas, np.sqrt((1 - shares) / shares)[first:])
        assert timesteps.tolist() == [8, 4, 1][first:]
    del scheduler.final_alpha_cumprod
    assert _schedule(scheduler, 0)[0][-1] == 0


def test_steps_of_two_calls_and_a_step_that_is_listed_twice() -> None:
    heun = SimpleNamespace(
        order=2, timesteps=np.array([9, 5, 5, 1, 1]), sigmas=np.array([9.0, 5, 5, 1, 1, 0])
    )
    sigmas, timesteps = _schedule(heun, 0)
    assert (sigmas.tolist(), timesteps.tolist()) == ([9, 5, 1, 0], [9, 5, 1])
    pndm = SimpleNamespace(
        plms_timesteps=None, timesteps=np.array([9, 5, 5, 1]), alphas_cumprod=np.full(10, 0.5)
    )
    for first, left in ((0, [9, 5, 1]), (1, [5, 1]), (2, [5, 1]), (3, [1])):
        assert _schedule(pndm, first)[1].tolist() == left


def test_an_unknown_family_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'sd9' has no reference; known are sd3, flux"):
        find_reference_family("sd9")
    assert all(find_reference_family(name).name == name for name in BUILT_IN)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "qwen_image"])
@pytest.mark.parametrize("guided", [False, True])
def test_the_negative_prompt_is_the_first_row_and_given_only_with_guidance(
    name: str, guided: bool
) -> None:
    rows = np.arange(2.0)[not guided :, None, None] + np.zeros((2 - (not guided), 5, 3))
    given = {"prompt_embeds": rows, "pooled": rows[:, 0], "time_ids": rows[:, 0]}
    if name == "z_image":  # one array for each prompt
        given = {"prompt_embeds": rows[-1:]}
        given |= {"negative_prompt_embeds": rows[:1]} if guided else {}
    request = Request(text_length=5, true_guidance=2.5, guidance=3.5, width=64, height=32)
    found = find_reference_family(name).arguments(given, request, guided)
    arrays = {key: np.asarray(value) for key, value in found.items() if "embeds" in key}
    assert "prompt_embeds" in arrays and any("negative" in key for key in arrays) == guided
    for key, value in arrays.items():
        assert len(value) == 1 and (value == (0.0 if "negative" in key else 1.0)).all(), key
    assert found.get("true_cfg_scale") == (2.5 if name == "flux" and guided else None)
    assert found.get("max_sequence_length", 5) == 5


@pytest.mark.parametrize(
    ("name", "shape", "kept", "dims"),
    [
        ("vae/conv", (1, 2, 4, 4), (1, 2, 4, 4), "b c h w"),
        ("transformer/pos_embed.proj", (1, 2, 4, 4), (1, 2, 4, 4), "b c h w"),
        ("transformer/other", (1, 2, 4, 4), (1, 2, 4, 4), None),
        ("vae/conv", (1, 2, 1, 4, 4), (1, 2, 4, 4), "b c h w"),  # a video of one frame
        ("vae/conv", (1, 2, 3, 4, 4), (1, 2, 3, 4, 4), None),
        ("transformer/other", (1, 2, 1, 4, 4), (1, 2, 1, 4, 4), None),
        ("vae/norm", (2, 4), (2, 4), None),
    ],
)
def test_pictures_are_marked_as_channels_first(
    name: str, shape: Any, kept: Any, dims: str | None, tmp_path: Path
) -> None:
    family, value = find_reference_family("sd3"), np.arange(np.prod(shape), dtype=np.float32)
    value = value.reshape(shape)
    with FamilyRecorder(TraceWriter(tmp_path / "t", Header()), family) as recorder:
        assert recorder.record(name, value) is value
    with Trace.open(tmp_path / "t") as trace:
        (event,) = trace.events
        assert tuple(event.shape) == kept and event.dims == dims
        assert np.array_equal(trace.read(event), value.reshape(kept))


def test_an_injected_frame_has_the_axes_of_the_video(tmp_path: Path) -> None:
    class Ones:
        def wants(self, name: str, slot: str) -> bool:
            return True

        def value(self, event_id: Any) -> Any:
            return np.ones((1, 2, 4, 4), np.float32)

    family = find_reference_family("qwen_image")
    with FamilyRecorder(TraceWriter(tmp_path / "t", Header()), family, inject=Ones()) as recorder:
        found = recorder.record("vae/conv", np.zeros((1, 2, 1, 4, 4), np.float32))
    assert found.shape == (1, 2, 1, 4, 4) and (found == 1).all()


@pytest.mark.parametrize("bars", [True, False])
def test_libraries_are_as_loud_afterwards_as_before(bars: bool) -> None:
    calls: list[Any] = []
    logging = SimpleNamespace(
        get_verbosity=lambda: 30,
        is_progress_bar_enabled=lambda: bars,
        set_verbosity_error=lambda: calls.append("errors only"),
        set_verbosity=calls.append,
        disable_progress_bar=lambda: calls.append("no bars"),
        enable_progress_bar=lambda: calls.append("bars"),
    )
    with pytest.raises(KeyError), _silent(logging):
        assert calls == ["errors only", "no bars"]
        raise KeyError
    assert calls[2:] == ([30, "bars"] if bars else [30])


@pytest.mark.parity
@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_a_library_that_does_not_start_is_missing(error: type[Exception]) -> None:
    def broken() -> type:
        raise error("a wheel\n for another machine")

    wanted = pytest.raises(ReferenceMissing, match=r"a wheel for another machine.*pip install")
    with wanted, _imported(broken):
        pass
    with pytest.raises(KeyError), _imported(lambda: dict):
        raise KeyError  # what happens inside is not the library's


@pytest.mark.parametrize("name", BUILT_IN)
def test_guidance_begins_above_the_scale_that_changes_nothing(name: str) -> None:
    family, key = find_reference_family(name), "true_guidance" if name == "flux" else "guidance"
    off = 0.0 if name == "z_image" else 1.0
    for negative in ("", "fog"):
        needs = name in ("flux", "qwen_image")  # no negative prompt, no second run
        for scale, guided in ((None, False), (off, False), (off + 0.1, negative or not needs)):
            changes: dict[str, Any] = {"negative": negative, key: scale}
            assert family.is_guided(Request(**changes)) == bool(guided)


def test_a_pipeline_for_filling_takes_no_negative_prompt() -> None:
    def plain(prompt: str, negative_prompt: str = "") -> None: ...
    def filling(prompt: str) -> None: ...

    check = find_reference_family("flux").check
    for call, negative in ((plain, "fog"), (filling, "")):
        check(SimpleNamespace(__call__=call), Request(negative=negative))
    with pytest.raises(ValueError, match="takes no negative prompt"):
        check(SimpleNamespace(__call__=filling), Request(negative="fog"))


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("earlier", [0, 1])
def test_the_noise_after_earlier_draws_is_recorded_and_drawn_in_float32(
    dtype: str, earlier: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    family, shape = find_reference_family("sd3"), (1, 2, 4, 4)

    def generator() -> Any:
        return torch.Generator().manual_seed(5)

    expected = generator()
    wanted = [torch.randn(shape, generator=expected) for _ in range(3)]
    with FamilyRecorder(TraceWriter(tmp_path / "t", Header()), family) as recorder:
        source = generator()
        with _float32_noise(torch, recorder, earlier):
            kind = getattr(torch, dtype)
            found = [torch.randn(shape, generator=source, dtype=kind) for _ in range(3)]
            assert torch.zeros(2).tolist() == [0, 0]  # nothing else is changed
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == kind and torch.equal(one, other.to(kind))
    with Trace.open(tmp_path / "t") as trace:
        (event,) = trace.events
        assert event.name == "pipeline/noise" and event.kind == "input" and event.dims == "b c h w"
        assert np.array_equal(trace.read(event), wanted[earlier].numpy())


@pytest.mark.parity
def test_a_weight_that_two_modules_share_is_recorded_once() -> None:
    torch = pytest.importorskip("torch")
    one = torch.nn.Linear(3, 3, bias=False)
    network = torch.nn.Sequential(one, torch.nn.Linear(3, 3))
    network[1].weight = one.weight
    family: Any = SimpleNamespace(networks=("vae", "absent"), used_weight=lambda name, x: x)
    pipeline = SimpleNamespace(vae=network, absent=None)
    assert _weights(family, pipeline).keys() == {"vae/0.weight", "vae/1.bias"}


@pytest.mark.parity
@pytest.mark.parametrize(
    ("prompts", "forced", "zeros"),
    [
        (("", "a"), True, True),
        (("", "a"), False, False),
        (("b", "a"), True, False),
        (("",), True, False),
    ],
)
def test_an_empty_negative_prompt_of_sdxl_is_zeros_where_its_config_says_so(
    prompts: tuple[str, ...], forced: bool, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    given: list[list[str]] = []

    def encode_prompt(texts: list[str], **_: Any) -> Any:
        given.append(texts)
        return torch.ones(len(texts), 2, 3), None, torch.ones(len(texts), 3), None

    pipeline = SimpleNamespace(
        config={"force_zeros_for_empty_prompt": forced}, encode_prompt=encode_prompt
    )
    monkeypatch.setattr("lydite.reference.sdxl._time_ids", lambda *_: torch.ones(2, 6))
    found = find_reference_family("sdxl").encode(pipeline, prompts, Request(width=64, height=64))
    assert given == [list(prompts[1:] if zeros else prompts)]
    for name, (value, _) in found.items():
        assert len(value) == len(prompts), name
    first = 0 if zeros else 1
    assert found["prompt_embeds"][0][0].unique().tolist() == [first]
    assert found["pooled"][0][0].unique().tolist() == [first]
    assert found["prompt_embeds"][0][-1].unique().tolist() == [1]
