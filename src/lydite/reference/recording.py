"""A picture drawn by the reference and recorded: every module, and what passes between networks.

The names are those of lydite.pipelines.recording.
"""

import contextlib
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

CHANNELS_FIRST = {3: "b c s", 4: "b c h w", 5: "b c t h w"}


def record(job: Job, output: TraceOutput, on_step: Callable[[], None] = lambda: None) -> None:
    """Draw the job's picture with the reference on the CPU, and leave a trace in a folder."""
    family = find_reference_family(job.family)
    with _imported(family) as (torch, pipeline_class), torch.no_grad():
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
                _draw(job, family, pipeline, noise, recorder, on_step)


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
) -> None:
    request = job.request
    guided = family.is_guided(request)
    prompts = (request.negative, request.prompt)[not guided :]
    conditioning = {
        name: recorder.record(f"pipeline/{name}", value, dims=dims)
        for name, (value, dims) in family.encode(pipeline, prompts, request).items()
    }

    def step_ended(_: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        finished, total = _finished_steps(pipeline.scheduler, index)
        if finished == recorder.step:  # half of a step, whose latents are corrected next
            return {}
        latents = family.unpack(pipeline, values["latents"], request)
        dims = CHANNELS_FIRST.get(latents.ndim)
        latents = recorder.record(pipeline_sites.LATENTS, latents, dims=dims)
        recorder.step = finished % total  # what follows the loop is at step 0
        on_step()
        return {"latents": family.pack(pipeline, latents)}

    dims = CHANNELS_FIRST.get(noise.ndim)
    noise = recorder.record(pipeline_sites.NOISE, noise, kind="input", dims=dims)
    dtype = next(iter(conditioning.values())).dtype
    arguments = {
        "guidance_scale": request.guidance,
        **family.arguments(conditioning, request, guided),
    }
    image = pipeline(
        **arguments,
        num_inference_steps=request.steps,
        height=request.height,
        width=request.width,
        latents=family.pack(pipeline, noise.to(dtype)),
        output_type="np",
        callback_on_step_end=step_ended,
    ).images[0]
    recorder.record(pipeline_sites.IMAGE, image, dims="h w c")


def _load(
    job: Job, family: ReferenceFamily, output: TraceOutput, torch: Any, pipeline_class: Any
) -> Any:
    path = Path(job.model)
    options: dict[str, Any] = {"dtype": getattr(torch, output.dtype), "local_files_only": True}
    try:
        if path.is_dir():
            absent = {part: None for part in family.optional if not (path / part).is_dir()}
            pipeline = pipeline_class.from_pretrained(path, **options, **absent)
        elif job.components is None:
            raise FileError(
                f"{at(path)}: a single file has no configs and no tokenizers, and diffusers would "
                "fetch them from the hub. Name a diffusers folder that has with --components."
            )
        else:
            pipeline = pipeline_class.from_single_file(
                str(path), config=str(job.components), **options
            )
            family.mend_single_file(pipeline)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ReferenceFailed(f"{at(path)}: diffusers cannot load it ({reason:.300}).") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


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

    class Unpinned(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
            return func(*args, **kwargs)

    return Unpinned()


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
            sigmas, timesteps = _schedule(self)
            recorder.record(pipeline_sites.SIGMAS, sigmas, kind="schedule")
            recorder.record(pipeline_sites.TIMESTEPS, timesteps, kind="schedule")

        def step(self, model_output: Any, *args: Any, **kwargs: Any) -> Any:
            value = family.unpack(pipeline, model_output, job.request)
            value = recorder.record(site, value, dims=CHANNELS_FIRST.get(value.ndim))
            return super().step(family.pack(pipeline, value), *args, **kwargs)

        def time_shift(self, mu: float, sigma: float, t: Any) -> Any:
            """Of flow models; it and what follows would be in float32, as in `_unpinned`."""
            t = np.asarray(t, np.float64) if output.dtype == "float64" else t
            return super().time_shift(mu, sigma, t)

    return Recorded.from_config(scheduler.config)


def _schedule(scheduler: Any) -> tuple[Any, Any]:
    """Sigmas and timesteps of whole steps; a class without sigmas has a table of ᾱ instead."""
    timesteps = scheduler.timesteps
    if _is_pndm(scheduler):  # lists its second timestep twice
        timesteps = np.delete(to_numpy(timesteps), 1)
    elif getattr(scheduler, "order", 1) == 2:  # all but the first
        timesteps = np.concatenate([to_numpy(timesteps)[:1], to_numpy(timesteps)[1::2]])
    if hasattr(scheduler, "sigmas"):
        sigmas = to_numpy(scheduler.sigmas)
        if getattr(scheduler, "order", 1) == 2:
            sigmas = np.concatenate([sigmas[:1], sigmas[1::2]])
        return sigmas, timesteps
    shares = to_numpy(scheduler.alphas_cumprod).astype(np.float64)[np.asarray(timesteps, int)]
    last = float(getattr(scheduler, "final_alpha_cumprod", 1.0))
    shares = np.append(shares, last)
    return np.sqrt((1 - shares) / shares), timesteps


def _finished_steps(scheduler: Any, index: int) -> tuple[int, int]:
    """How many steps are finished after the loop's iteration `index`, and how many there are."""
    iterations = len(scheduler.timesteps)
    if _is_pndm(scheduler):  # a first step of two iterations
        return max(index, 0), iterations - 1
    if getattr(scheduler, "order", 1) == 2:  # all but the last are of two iterations
        last = index == iterations - 1
        return (index + 1) // 2 + last * (index % 2 == 0), (iterations + 1) // 2
    return index + 1, iterations


def _is_pndm(scheduler: Any) -> bool:
    return hasattr(scheduler, "plms_timesteps") and len(scheduler.timesteps) > 2


@contextlib.contextmanager
def _imported(family: ReferenceFamily) -> Generator[tuple[Any, Any]]:
    """torch and the pipeline class, with the libraries' progress bars and advice silenced."""
    with contextlib.ExitStack() as stack:
        try:
            import torch
            from diffusers.utils import logging as diffusers_logging
            from transformers.utils import logging as transformers_logging

            stack.enter_context(_silent(diffusers_logging))
            stack.enter_context(_silent(transformers_logging))
            pipeline_class = family.pipeline_class()
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
