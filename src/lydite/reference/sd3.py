"""diffusers' Stable Diffusion 3, recorded: every module, and what passes between the networks.

The names are those of lydite.pipelines.sd3_trace. The negative prompt and the prompt are encoded
as one batch in that order; diffusers would run each encoder twice, for the same numbers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from lydite.core.errors import FileError, InputError, at
from lydite.reference.diffusers_sd3 import imported
from lydite.reference.jobs import Job, ReferenceFailed, Run
from lydite.trace.arrays import to_numpy
from lydite.trace.events import Header, dtype_name
from lydite.trace.recorder import Recorder
from lydite.trace.taps import injection
from lydite.trace.writer import Capture

NETWORKS = ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae")
TOKEN_IDS = {
    "text_encoder": "pipeline/token_ids",
    "text_encoder_2": "pipeline/token_ids_2",
    "text_encoder_3": "pipeline/token_ids_3",
}
IMAGES = ("transformer", "transformer/pos_embed", "transformer/pos_embed.proj")


def record(job: Job, run: Run, on_step: Callable[[], None] = lambda: None) -> None:
    """Draw the job's picture with diffusers on the CPU, and leave a trace in the run's folder."""
    with imported() as (torch, pipeline_class), torch.no_grad():
        from lydite.trace.torch_capture import record_modules, write_selftest

        pipeline = _load(job, run, torch, pipeline_class)
        height, width = _checked_size(job, pipeline)
        noise = _noise(job, pipeline, height, width, torch)
        header = Header(
            side="reference",
            framework=f"torch {torch.__version__}",
            device="cpu",
            dtype=run.dtype,
            conditions=conditions(job, height, width),
        )
        capture = Capture(job.level, job.points, budget=job.budget)
        inject = injection(job.inject, job.inject_at) if job.inject else None
        with _Recorder.start(run.folder, header=header, capture=capture, inject=inject) as recorder:
            write_selftest(recorder, tuple(dict.fromkeys(("f32", "i64", dtype_name(run.dtype)))))
            recorder.writer.add_weights(_weights(pipeline))
            with ExitStack() as stack:
                for name, network in _networks(pipeline).items():
                    if name in TOKEN_IDS:
                        handle = network.register_forward_pre_hook(_ids_hook(recorder, name))
                        stack.callback(handle.remove)
                    methods = ("decode",) if name == "vae" else ()
                    stack.enter_context(
                        record_modules(recorder, network, scope=name, methods=methods)
                    )
                pipeline.scheduler = _recorded(pipeline.scheduler, recorder)
                if run.dtype == "float64":
                    stack.enter_context(_unpinned(torch))
                _draw(job, pipeline, noise, (height, width), recorder, on_step)


class _Recorder(Recorder):
    """Says of pictures and latents that channels come first: a shape may not show it."""

    def record(
        self,
        name: str,
        value: Any,
        *,
        slot: str = "out",
        kind: str = "activation",
        dims: str | None = None,
    ) -> Any:
        if dims is None and value.ndim == 4 and (name in IMAGES or name.startswith("vae/")):
            dims = "b c h w"
        return super().record(name, value, slot=slot, kind=kind, dims=dims)


def conditions(job: Job, height: int, width: int) -> dict[str, Any]:
    """Everything that decides the run, by the names of the trace format."""
    return {
        "model": job.name or job.model,
        "prompt": job.prompt,
        "negative": job.negative,
        "seed": job.seed,
        "noise": "given" if job.noise else "torch",
        "width": width,
        "height": height,
        "steps": job.steps,
        "guidance": job.guidance,
        "sampler": "euler",
        "schedule": "sd3_diffusers",
        "text_length": job.text_length,
    }


def _draw(
    job: Job,
    pipeline: Any,
    noise: Any,
    size: tuple[int, int],
    recorder: Recorder,
    on_step: Callable[[], None],
) -> None:
    guided, (height, width) = job.guidance > 1, size
    text, _, pooled, _ = pipeline.encode_prompt(
        [job.negative, job.prompt] if guided else [job.prompt],
        None,
        None,
        do_classifier_free_guidance=False,  # both are here already
        max_sequence_length=job.text_length,
    )
    text = recorder.record("pipeline/prompt_embeds", text, dims="b s d")
    pooled = recorder.record("pipeline/pooled", pooled, dims="b d")
    negative = {
        "negative_prompt_embeds": text[:1],
        "negative_pooled_prompt_embeds": pooled[:1],
    }

    def stepped(_: Any, index: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents = recorder.record("pipeline/latents", values["latents"], dims="b c h w")
        recorder.step = (index + 1) % job.steps  # what follows the loop is at step 0
        on_step()
        return {"latents": latents}

    noise = recorder.record("pipeline/noise", noise, kind="input", dims="b c h w")
    image = pipeline(
        prompt_embeds=text[-1:],
        pooled_prompt_embeds=pooled[-1:],
        **(negative if guided else {}),
        num_inference_steps=job.steps,
        guidance_scale=job.guidance,
        height=height,
        width=width,
        latents=noise.to(text.dtype),
        max_sequence_length=job.text_length,
        output_type="np",
        callback_on_step_end=stepped,
    ).images[0]
    recorder.record("pipeline/image", image, dims="h w c")


def _load(job: Job, run: Run, torch: Any, pipeline_class: Any) -> Any:
    path = Path(job.model)
    options: dict[str, Any] = {"dtype": getattr(torch, run.dtype), "local_files_only": True}
    try:
        if path.is_dir():
            parts = ("text_encoder_3", "tokenizer_3")
            absent = {part: None for part in parts if not (path / part).is_dir()}
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
            if (t5 := pipeline.text_encoder_3) is not None:
                # diffusers 0.42 leaves T5's second name for its table empty, and dropout on.
                t5.tie_weights()
                t5.eval()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ReferenceFailed(f"{at(path)}: diffusers cannot load it ({reason:.300}).") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _checked_size(job: Job, pipeline: Any) -> tuple[int, int]:
    own = pipeline.default_sample_size * pipeline.vae_scale_factor
    height, width = job.height or own, job.width or own
    try:  # before a trace is begun
        length = job.text_length
        pipeline.check_inputs(job.prompt, None, None, height, width, max_sequence_length=length)
    except ValueError as error:
        raise InputError(f"diffusers refuses the request: {error}") from error
    return height, width


def _noise(job: Job, pipeline: Any, height: int, width: int, torch: Any) -> Any:
    """The start in float32 whatever the run's precision: a seed means other noise in bfloat16."""
    factor = pipeline.vae_scale_factor
    shape = (1, pipeline.transformer.config.in_channels, height // factor, width // factor)
    if job.noise is None:
        return torch.randn(shape, generator=torch.Generator().manual_seed(job.seed))
    try:
        given = np.load(job.noise, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise FileError(f"{at(Path(job.noise))}: no .npy file of noise ({error}).") from error
    if given.shape != shape:
        raise InputError(f"noise has shape {list(given.shape)}; expected {list(shape)}.")
    return torch.from_numpy(given.astype(np.float32))


def _networks(pipeline: Any) -> dict[str, Any]:
    found = {name: getattr(pipeline, name) for name in NETWORKS}
    return {name: network for name, network in found.items() if network is not None}


def _weights(pipeline: Any) -> dict[str, np.ndarray]:
    """Parameters and tables by name; what is shared between modules once, under its first name."""
    seen: set[int] = set()
    weights: dict[str, np.ndarray] = {}
    for scope, network in _networks(pipeline).items():
        for name, value in network.state_dict().items():
            if value.data_ptr() not in seen:
                weights[f"{scope}/{name}"] = to_numpy(value)
            seen.add(value.data_ptr())
    return weights


def _ids_hook(recorder: Recorder, encoder: str) -> Callable[..., Any]:
    def hook(_: Any, args: tuple[Any, ...]) -> Any:
        return recorder.record(TOKEN_IDS[encoder], args[0], kind="ids", dims="b s"), *args[1:]

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


def _recorded(scheduler: Any, recorder: Recorder) -> Any:
    """The scheduler, telling its tables and what each step is given."""

    class Recorded(type(scheduler)):
        def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
            super().set_timesteps(*args, **kwargs)
            recorder.record("pipeline/sigmas", self.sigmas, kind="schedule")
            recorder.record("pipeline/timesteps", self.timesteps, kind="schedule")

        def step(self, model_output: Any, *args: Any, **kwargs: Any) -> Any:
            velocity = recorder.record("pipeline/velocity", model_output, dims="b c h w")
            return super().step(velocity, *args, **kwargs)

    return Recorded.from_config(scheduler.config)
