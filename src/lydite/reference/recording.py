"""A picture drawn by the reference and recorded: every module, and what passes between networks.

The names are those of lydite.pipelines.recording.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from lydite.core.errors import FileError, InputError, at
from lydite.reference.family import ReferenceFamily, find_reference_family
from lydite.reference.jobs import INSTALL, Job, ReferenceFailed, ReferenceMissing, TraceOutput
from lydite.trace import pipeline_sites
from lydite.trace.arrays import to_numpy
from lydite.trace.events import Header, dtype_name
from lydite.trace.recorder import InjectionSource, Recorder
from lydite.trace.taps import injection
from lydite.trace.writer import Capture, TraceWriter

GIVEN = (".json", ".safetensors", ".txt", ".model", ".jinja")  # the last: of chats, in a sandbox
NOT_RUN = ("safety_checker", "feature_extractor", "image_encoder")  # for judging and other inputs
CHANNELS_FIRST = {3: "b c s", 4: "b c h w", 5: "b c t h w"}


def record(job: Job, output: TraceOutput, on_step: Callable[[], None] = lambda: None) -> None:
    """Draw the job's picture with the reference on the CPU, and leave a trace in a folder."""
    family = find_reference_family(job.family)
    with _imported(_pipeline_class(job, family)) as (torch, pipeline_class), torch.no_grad():
        from lydite.trace.torch_capture import record_modules, write_selftest

        pipeline = _load(job, family, output, torch, pipeline_class)
        try:
            family.check(pipeline, job.request)
        except ValueError as error:
            raise InputError(f"diffusers refuses the request: {error}") from error
        noise = _noise(job, family, pipeline, torch)
        header = Header(
            side="reference",
            framework=f"torch {torch.__version__}",
            device="cpu",
            dtype=output.dtype,
            conditions=job.conditions,
        )
        writer = TraceWriter(
            Path(output.folder), header, Capture(job.level, job.points, budget=job.budget)
        )
        inject = injection(job.inject, job.inject_at) if job.inject else None
        with FamilyRecorder(writer, family, inject=inject) as recorder:
            write_selftest(recorder, tuple(dict.fromkeys(("f32", "i64", dtype_name(output.dtype)))))
            recorder.writer.add_weights(_weights(family, pipeline))
            with ExitStack() as stack:
                for name, network in _networks(family, pipeline).items():
                    if name.startswith("text_encoder"):
                        handle = network.register_forward_pre_hook(
                            _ids_hook(recorder, name), with_kwargs=True
                        )
                        stack.callback(handle.remove)
                    methods = ("decode",) if name == "vae" else ()
                    stack.enter_context(
                        record_modules(recorder, network, scope=name, methods=methods)
                    )
                pipeline.scheduler = _recorded(job, output, family, pipeline, recorder)
                if output.dtype == "float64":
                    stack.enter_context(_unpinned(torch))
                _draw(job, family, pipeline, noise, recorder, on_step, torch)


def _pipeline_class(job: Job, family: ReferenceFamily) -> Callable[[], type]:
    import_class = family.pipeline_class
    if job.image is not None:
        import_class = family.mask_pipeline_class if job.mask else family.image_pipeline_class
    if import_class is None:
        raise InputError(f"the reference of {family.name} is recorded for text to image only.")
    return import_class


class FamilyRecorder(Recorder):
    """Marks pictures and latents as channels first, which a shape may not show."""

    def __init__(
        self,
        writer: TraceWriter,
        family: ReferenceFamily,
        *,
        inject: InjectionSource | None = None,
    ) -> None:
        super().__init__(writer, inject=inject)
        self._family = family

    def record(
        self,
        name: str,
        value: Any,
        *,
        slot: str = "out",
        kind: str = "activation",
        dims: str | None = None,
    ) -> Any:
        known = name in self._family.channels_first or name.startswith("vae/")
        if known and value.ndim == 5 and value.shape[2] == 1:  # a video network's single frame
            picture = value[:, :, 0]
            dims = CHANNELS_FIRST[4]
            recorded = super().record(name, picture, slot=slot, kind=kind, dims=dims)
            return value if recorded is picture else recorded[:, :, None]
        if dims is None and value.ndim == 4 and known:
            dims = CHANNELS_FIRST[4]
        return super().record(name, value, slot=slot, kind=kind, dims=dims)


def _draw(
    job: Job,
    family: ReferenceFamily,
    pipeline: Any,
    noise: Any,
    recorder: Recorder,
    on_step: Callable[[], None],
    torch: Any,
) -> None:
    request = job.request
    guided = family.is_guided(request)
    prompts = (request.negative, request.prompt)[not guided :]
    conditioning = {
        name: recorder.record(f"pipeline/{name}", value, dims=dims)
        for name, (value, dims) in family.encode(pipeline, prompts, request).items()
    }

    def step_ended(_: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        step, following = _steps_after(pipeline.scheduler, index, pipeline.scheduler.first_step)
        if step is None:
            return {}
        recorder.step = step
        latents = family.unpack(pipeline, values["latents"], request)
        dims = CHANNELS_FIRST.get(latents.ndim)
        latents = recorder.record(pipeline_sites.LATENTS, latents, dims=dims)
        recorder.step = following
        on_step()
        return {"latents": family.pack(pipeline, latents)}

    arguments = {
        "guidance_scale": request.guidance,
        **family.arguments(conditioning, request, guided),
        "num_inference_steps": request.steps,
        "output_type": "np",
        "callback_on_step_end": step_ended,
    }
    with ExitStack() as stack:
        if request.strength is None:  # no img2img
            dims = CHANNELS_FIRST.get(noise.ndim)
            noise = recorder.record(pipeline_sites.NOISE, noise, kind="input", dims=dims)
            dtype = next(iter(conditioning.values())).dtype
            arguments["latents"] = family.pack(pipeline, noise.to(dtype))
            arguments |= {"height": request.height, "width": request.width}
            if job.image is not None:
                arguments["image"] = _opened(job.image)
        else:
            earlier = family.draws_before_noise(pipeline, request, job.mask is not None)
            stack.enter_context(_float32_noise(torch, recorder, earlier))
            arguments |= _image_arguments(job, torch.Generator().manual_seed(job.seed))
        image = pipeline(**arguments).images[0]
    recorder.record(pipeline_sites.IMAGE, image, dims="h w c")


def _load(
    job: Job, family: ReferenceFamily, output: TraceOutput, torch: Any, pipeline_class: Any
) -> Any:
    path = Path(job.model)
    if not path.is_dir() and job.components is None:
        raise FileError(
            f"{at(path)}: a single file has no configs and no tokenizers, and diffusers would "
            "fetch them from the hub. Name a diffusers folder that has with --components."
        )
    options: dict[str, Any] = {"dtype": getattr(torch, output.dtype), "local_files_only": True}
    folder = path if path.is_dir() else Path(job.components or "")
    with _only_what_we_read(folder) as given:
        try:
            if path.is_dir():
                absent = {part: None for part in family.optional if not (given / part).is_dir()}
                pipeline = pipeline_class.from_pretrained(
                    given, use_safetensors=True, **options, **absent
                )
            else:
                pipeline = pipeline_class.from_single_file(str(path), config=str(given), **options)
                family.mend_single_file(pipeline)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = reason.replace(str(given), str(folder))
            raise ReferenceFailed(
                f"{at(path)}: diffusers cannot load it ({reason:.300})."
            ) from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@contextlib.contextmanager
def _only_what_we_read(folder: Path) -> Generator[Path]:
    """A folder of links to configs, tokenizers and safetensors of a checkpoint.

    Other files may be pickles, code, or adapters that diffusers and transformers would load.
    """
    with tempfile.TemporaryDirectory(prefix="lydite-reference-") as name:
        for file in (*folder.glob("*.json"), *folder.glob("*/*")):
            known = file.suffix in GIVEN and not file.name.startswith("adapter")
            if known and file.parent.name not in NOT_RUN and file.is_file():
                link = Path(name, file.relative_to(folder))
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(file.absolute())
        yield Path(name)


def _noise(job: Job, family: ReferenceFamily, pipeline: Any, torch: Any) -> Any:
    """The start in float32 whatever the run's precision: a seed means other noise in bfloat16."""
    assert job.request.height and job.request.width, "a planned request has a size"
    shape = family.noise_shape(pipeline, job.request.height, job.request.width)
    if job.noise is None:
        return torch.randn(shape, generator=torch.Generator().manual_seed(job.seed))
    try:
        given = np.load(job.noise, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise FileError(f"{at(Path(job.noise))}: no .npy file of noise ({error}).") from error
    if given.shape != shape:
        raise InputError(f"noise has shape {list(given.shape)}; expected {list(shape)}.")
    return torch.from_numpy(given.astype(np.float32))


def _networks(family: ReferenceFamily, pipeline: Any) -> dict[str, Any]:
    networks = {name: getattr(pipeline, name) for name in family.networks}
    return {name: network for name, network in networks.items() if network is not None}


def _weights(family: ReferenceFamily, pipeline: Any) -> dict[str, np.ndarray]:
    """Parameters and tables by name; what is shared between modules once, under its first name."""
    seen: set[int] = set()
    weights: dict[str, np.ndarray] = {}
    for scope, network in _networks(family, pipeline).items():
        for name, value in network.state_dict().items():
            if value.data_ptr() not in seen:
                site = f"{scope}/{name}"
                weights[site] = family.used_weight(site, to_numpy(value))
            seen.add(value.data_ptr())
    return weights


def _ids_hook(recorder: Recorder, encoder: str) -> Callable[..., Any]:
    site = pipeline_sites.token_ids(encoder)

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (recorder.record(site, args[0], kind="ids", dims="b s"), *args[1:]), kwargs
        ids = recorder.record(site, kwargs["input_ids"], kind="ids", dims="b s")
        return args, {**kwargs, "input_ids": ids}

    return hook


def _unpinned(torch: Any) -> Any:
    """A mode in which float32 that the reference asks for by name is float64.

    It computes sinusoids of timesteps, T5's norms and the sampler's steps in float32 whatever the
    model's precision. A float64 run with those pins would hide how much they round.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    products = {each.default for each in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)}

    class Unpinned(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
            if func in products:  # they take one precision; buffers of float32 are as they were
                factors = [x for x in args if isinstance(x, torch.Tensor)]
                if any(x.dtype is torch.float64 for x in factors):
                    args = [x.double() if isinstance(x, torch.Tensor) else x for x in args]
            return func(*args, **kwargs)

    return Unpinned()


def _float32(latents: Any) -> Any:
    """In float32 even where `_unpinned` would keep float64."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return latents.to(torch.float32)


def _recorded(
    job: Job, output: TraceOutput, family: ReferenceFamily, pipeline: Any, recorder: Recorder
) -> Any:
    """The scheduler, recording its tables and what each step is given."""
    site = pipeline_sites.prediction(job.prediction)
    scheduler = pipeline.scheduler

    class Recorded(type(scheduler)):
        @wraps(type(scheduler).set_timesteps)  # a pipeline asks for the names of its parameters
        def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
            super().set_timesteps(*args, **kwargs)
            self.first_step = _first_step(job, pipeline)
            sigmas, timesteps = _schedule(self, self.first_step)
            recorder.record(pipeline_sites.SIGMAS, sigmas, kind="schedule")
            recorder.record(pipeline_sites.TIMESTEPS, timesteps, kind="schedule")

        def step(self, model_output: Any, *args: Any, **kwargs: Any) -> Any:
            value = family.unpack(pipeline, model_output, job.request)
            value = recorder.record(site, value, dims=CHANNELS_FIRST.get(value.ndim))
            result = super().step(family.pack(pipeline, value), *args, **kwargs)
            return (_float32(result[0]),) if family.float32_latents else result

        def time_shift(self, mu: float, sigma: float, t: Any) -> Any:
            """Of flow models; it and what follows would be in float32, as in `_unpinned`."""
            t = np.asarray(t, np.float64) if output.dtype == "float64" else t
            return super().time_shift(mu, sigma, t)

    return Recorded.from_config(scheduler.config)


def _schedule(scheduler: Any, first: int) -> tuple[Any, Any]:
    """Sigmas and timesteps from step `first` on; a class without sigmas has a table of ᾱ."""
    timesteps = to_numpy(scheduler.timesteps)
    if _is_pndm(scheduler):  # lists its second timestep twice; img2img cuts that list
        timesteps = np.delete(timesteps, 1)
        first = max(first - 1, min(first, 1))
    elif getattr(scheduler, "order", 1) == 2:  # all but the first
        timesteps = np.concatenate([timesteps[:1], timesteps[1::2]])
    if hasattr(scheduler, "sigmas"):
        sigmas = to_numpy(scheduler.sigmas)
        if getattr(scheduler, "order", 1) == 2:
            sigmas = np.concatenate([sigmas[:1], sigmas[1::2]])
    else:
        shares = to_numpy(scheduler.alphas_cumprod).astype(np.float64)[timesteps.astype(int)]
        shares = np.append(shares, float(getattr(scheduler, "final_alpha_cumprod", 1.0)))
        sigmas = np.sqrt((1 - shares) / shares)
    return sigmas[first:], timesteps[first:]


def _steps_after(scheduler: Any, index: int, first: int) -> tuple[int | None, int]:
    """After iteration `index` of the loop: the step whose latents these are, and the next one.

    None: half of a step, whose latents are corrected next. What follows the loop is at step 0.
    """
    order = getattr(scheduler, "order", 1)
    last = index + order * first == len(scheduler.timesteps) - 1
    if _is_pndm(scheduler):  # a first step of two iterations; one that is late skips the next
        step = None if index == 0 else index - 1 + (first > 1)
    elif order == 2:  # all but the last are of two iterations
        step = index // 2 if index % 2 or last else None
    else:
        step = index
    return step, 0 if step is None or last else step + 1


def _is_pndm(scheduler: Any) -> bool:
    return hasattr(scheduler, "plms_timesteps") and len(scheduler.timesteps) > 2


def _first_step(job: Job, pipeline: Any) -> int:
    """Of img2img: how many steps its strength leaves out."""
    if job.request.strength is None or job.request.steps is None:
        return 0
    _, run = pipeline.get_timesteps(job.request.steps, job.request.strength, "cpu")
    return job.request.steps - run


def _image_arguments(job: Job, generator: Any) -> dict[str, Any]:
    """The arguments of a pipeline that starts from an image."""
    assert job.image is not None
    arguments: dict[str, Any] = {
        "image": _opened(job.image),
        "strength": job.request.strength,
        "generator": generator,
    }
    if job.mask is not None:
        size = {"height": job.request.height, "width": job.request.width}
        arguments |= {"mask_image": _opened(job.mask), **size}
    return arguments


def _opened(png: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(png))


def _float32_noise(torch: Any, recorder: Recorder, earlier: int) -> Any:
    """A mode in which a generator draws in float32 whatever the run's precision.

    A seed means other noise in each precision. After so many `earlier` draws the noise is recorded.
    """
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    class Float32Noise(TorchDispatchMode):
        drawn = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is not torch.ops.aten.randn.generator:
                return func(*args, **kwargs)
            with _disable_current_modes():
                noise = func(*args, **{**kwargs, "dtype": torch.float32})
            if self.drawn == earlier:
                dims = CHANNELS_FIRST.get(noise.ndim)
                noise = recorder.record(pipeline_sites.NOISE, noise, kind="input", dims=dims)
            self.drawn += 1
            return noise.to(kwargs.get("dtype") or torch.float32)

    return Float32Noise()


@contextlib.contextmanager
def _imported(import_class: Callable[[], type]) -> Generator[tuple[Any, Any]]:
    """torch and the pipeline class, with the libraries' progress bars and advice silenced."""
    with contextlib.ExitStack() as stack:
        try:
            import torch
            from diffusers.utils import logging as diffusers_logging
            from transformers.utils import logging as transformers_logging

            stack.enter_context(_silent(diffusers_logging))
            stack.enter_context(_silent(transformers_logging))
            pipeline_class = import_class()
        except (ImportError, OSError, RuntimeError) as error:  # a wheel for another machine, say
            reason = " ".join(str(error).split())
            raise ReferenceMissing(
                f"torch and diffusers do not start ({reason:.200}); {INSTALL}"
            ) from error
        yield torch, pipeline_class


@contextlib.contextmanager
def _silent(logging: Any) -> Generator[None]:
    """Errors only, in the logging module that diffusers and transformers each have."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
