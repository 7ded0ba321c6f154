"""One whole image and its parts: ours against diffusers, same machine, same weights.

    .venv/bin/python benchmarks/step.py                      the demo's size, on this machine
    .venv/bin/python benchmarks/step.py --threads 1          where others use the machine too
    .venv/bin/python benchmarks/step.py --preset sd3-medium --size 512 --dtype bfloat16 --step-only
    LYDITE_KERNELS=on .venv/bin/python benchmarks/step.py --check-kernels      on a GPU

A random checkpoint is written once; each side then runs in a process of its own, turn and turn
about, so that neither warms the other up and peak memory is its own. Ratios are ours / theirs:
below 1 we are faster. Beside each stands the ratio of CPU times, which other programs disturb
least, and which compares two sides of one thread each. Needs the `reference` extra. On CUDA both
sides use the GPU.

`--check-kernels` compares each kernel of `lydite.models.kernels` with its plain form, in all dtypes
and at odd widths, and measures both; status 1 if one is wrong.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROUNDS = 3
WARM_UP = 3
os.environ.setdefault("MLX_ENABLE_TF32", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--preset", choices=("demo", "embedded", "sd3-medium"), default="embedded")
    parser.add_argument("--size", type=int, default=128, help="side of the picture in pixels")
    parser.add_argument("--batch", type=int, default=1, help="pictures; guidance doubles it")
    parser.add_argument("--text-length", type=int, default=16, help="tokens beside CLIP's 77")
    parser.add_argument("--steps", type=int, default=8, help="of the whole image")
    parser.add_argument("--repeat", type=int, default=10, help="timed runs per round")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--step-only", action="store_true", help="leave the whole image out")
    parser.add_argument("--threads", type=int, help="of either side's CPU arithmetic")
    parser.add_argument("--torch-compile", action="store_true", help="the reference compiled too")
    parser.add_argument("--check-kernels", action="store_true", help="of this GPU, nothing else")
    parser.add_argument("--side", choices=("ours", "diffusers"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check_kernels:
        sys.exit(check_kernels())
    if options.side:
        run = run_ours if options.side == "ours" else run_diffusers
        print(json.dumps(run(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        write_checkpoint(options)
        results = {"ours": [], "diffusers": []}
        for _ in range(ROUNDS):
            for side, rows in results.items():
                rows.append(in_a_process(side, options))
    report(options, results)


def check_kernels() -> int:
    """Largest errors of the kernels and of the plain forms, and the times of both."""
    import mlx.core as mx
    import mlx.nn as nn

    from lydite.models import kernels
    from lydite.models.layers import GroupNorm, gelu_tanh, norm_silu

    def add_gated(norm: Any, x: mx.array, y: mx.array, gate: mx.array, *_: Any) -> mx.array:
        return kernels.add_gated(x, y, gate)

    def norm_modulate(
        norm: Any, x: mx.array, y: mx.array, gate: mx.array, shift: mx.array, scale: mx.array
    ) -> mx.array:
        return kernels.norm_modulate(norm, x, shift=shift, scale=scale)

    def add_norm_modulate(
        norm: Any, x: mx.array, y: mx.array, gate: mx.array, shift: mx.array, scale: mx.array
    ) -> mx.array:
        return kernels.add_norm_modulate(norm, x, y, gate, shift=shift, scale=scale)[1]

    def gelu(norm: Any, x: mx.array, *_: Any) -> mx.array:
        return gelu_tanh(x)

    def group_norm_silu(
        norm: Any, x: mx.array, y: mx.array, gate: mx.array, shift: mx.array, _: Any
    ) -> mx.array:
        width = x.shape[-1]
        groups = GroupNorm(width // 8 if width % 8 == 0 else 1, width, eps=1e-6)
        groups.update({"weight": 1 + gate[0], "bias": shift[0]})
        return norm_silu(groups, x)

    if not kernels.in_use():
        print(f"kernels are off on {mx.default_device()}; {kernels.VARIABLE}=on turns them on.")
        return 2
    mode, wrong = os.environ.get(kernels.VARIABLE, ""), 0
    rounding = {mx.float32: 5e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
    for dtype, least in rounding.items():
        for (B, L, D), rows in (((2, 4096, 1536), 2), ((3, 7, 1531), 1), ((2, 5, 40), 2)):
            x, y = (mx.random.normal((B, L + 1, D)).astype(dtype)[:, 1:] for _ in range(2))
            vectors = [mx.random.normal((rows, D)).astype(dtype) for _ in range(3)]
            norm = nn.LayerNorm(D, eps=1e-6, affine=False)
            arrays = [x, y, *vectors]
            for call in (add_gated, norm_modulate, add_norm_modulate, gelu, group_norm_silu):
                fused, seconds = call(norm, *arrays), _seconds(call, norm, *arrays)
                os.environ[kernels.VARIABLE] = "off"
                exact = call(norm, *(each.astype(mx.float32) for each in arrays))
                plain, plain_seconds = call(norm, *arrays), _seconds(call, norm, *arrays)
                os.environ[kernels.VARIABLE] = mode
                error, plain_error = (
                    float((mx.abs(each.astype(mx.float32) - exact) / (1 + mx.abs(exact))).max())
                    for each in (fused, plain)
                )
                limit = max(plain_error, least)  # a kernel rounds less often than the plain form
                wrong += not error <= limit
                print(
                    f"{str(dtype).removeprefix('mlx.core.'):<9} {call.__name__:<18} {B}×{L}×{D}: "
                    f"error {error:.1e}{'' if error <= limit else ' WRONG'} (plain "
                    f"{plain_error:.1e}, at most {limit:.1e}), {1e6 * seconds:.1f} µs (plain "
                    f"{1e6 * plain_seconds:.1f})",
                    flush=True,
                )
    print(f"{wrong} results are wrong" if wrong else "kernels are right")
    return 1 if wrong else 0


def _seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Of one call, of 20 in one evaluation."""
    import mlx.core as mx

    times: list[float] = []
    for _ in range(4):
        start = time.perf_counter()
        mx.eval([run(*arguments) for _ in range(20)])
        times.append((time.perf_counter() - start) / 20)
    return min(times)


def write_checkpoint(options: argparse.Namespace) -> None:
    """Random weights in the geometry of the preset."""
    from untrained_sd3 import TRANSFORMER, VAE, make_untrained

    if options.preset == "demo":
        make_untrained(options.folder)
        return
    small = options.preset == "embedded"
    transformer = replace(
        TRANSFORMER,
        num_layers=6 if small else 24,
        attention_head_dim=64,
        num_attention_heads=3 if small else 24,
        caption_projection_dim=192 if small else 1536,
        joint_attention_dim=256 if small else 4096,
        pooled_projection_dim=192 if small else 2048,
        pos_embed_max_size=24 if small else 192,
        qk_norm="rms_norm" if small else None,
    )
    vae = replace(VAE, block_out_channels=(32, 64, 64, 64) if small else (128, 256, 512, 512))
    make_untrained(
        options.folder,
        transformer=transformer,
        vae=replace(vae, norm_num_groups=8 if small else 32),
        clip_widths=(64, 128) if small else (768, 1280),
    )


def run_ours(options: argparse.Namespace) -> dict[str, Any]:
    from lydite.core.fast_blas import preload

    blas = preload().describe()
    import mlx.core as mx
    import numpy as np

    from lydite.core.request import Request
    from lydite.pipelines.pipeline import Pipeline

    pipeline = Pipeline.open(options.folder, dtype=options.dtype)
    request = Request(
        "a red fox",
        steps=options.steps,
        guidance=3.0,
        width=options.size,
        height=options.size,
        text_length=options.text_length,
    )
    run = pipeline.plan(request)
    denoiser = pipeline.denoiser(run, pipeline.encode(run), options.batch)
    vae: Any = pipeline.model.network("vae")
    first = float(run.schedule.sigmas[0])
    channels, height, width = run.shape
    shape = options.batch, height, width, channels
    x = mx.array(np.random.default_rng(0).standard_normal(shape, np.float32))

    def text() -> None:
        mx.eval(pipeline.encode(run))

    def step() -> None:
        mx.eval(denoiser(x, first))

    def decode() -> None:
        mx.eval(vae.decode(x.astype(pipeline.model.dtype_of("vae"))))

    def image() -> None:
        list(pipeline.generate(run, range(options.batch), batch=options.batch))

    result = measure(options, {"text": text, "step": step, "decode": decode, "image": image})
    peak = mx.get_peak_memory() if mx.default_device() != mx.Device(mx.cpu) else peak_rss()
    return {**result, "peak": peak, "runs_on": f"mlx {mx.default_device()}; {blas}"}


def run_diffusers(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from diffusers import StableDiffusion3Pipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(
        options.folder, text_encoder_3=None, tokenizer_3=None, torch_dtype=dtype
    ).to(device)
    pipeline.set_progress_bar_config(disable=True)
    transformer, config = pipeline.transformer, pipeline.transformer.config
    if options.torch_compile:
        transformer = pipeline.transformer = torch.compile(transformer)
    side = options.size // pipeline.vae_scale_factor
    double = 2 * options.batch
    inputs = {
        "hidden_states": torch.randn(double, 16, side, side),
        "encoder_hidden_states": torch.randn(
            double, 77 + options.text_length, config.joint_attention_dim
        ),
        "pooled_projections": torch.randn(double, config.pooled_projection_dim),
    }
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    timestep = torch.full((double,), 500.0, device=device)
    latent = inputs["hidden_states"][: options.batch]
    torch.set_grad_enabled(False)

    def text() -> None:
        pipeline.encode_prompt("a red fox", None, None, max_sequence_length=options.text_length)

    def step() -> None:
        transformer(**inputs, timestep=timestep)

    def decode() -> None:
        pipeline.vae.decode(latent)

    def image() -> None:
        pipeline(
            "a red fox",
            num_inference_steps=options.steps,
            guidance_scale=3.0,
            width=options.size,
            height=options.size,
            max_sequence_length=options.text_length,
            num_images_per_prompt=options.batch,
        )

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    parts = {"text": text, "step": step, "decode": decode, "image": image}
    result = measure(options, parts, wait)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_rss()
    return {**result, "peak": peak, "runs_on": f"torch {torch.__version__} {device}"}


def measure(
    options: argparse.Namespace,
    parts: dict[str, Callable[[], None]],
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Medians of wall and CPU time of each part once warm, in seconds."""
    result: dict[str, Any] = {}
    for name, run in parts.items():
        if options.step_only and name != "step":
            continue
        times = [timed(run, wait) for _ in range(WARM_UP + options.repeat)][WARM_UP:]
        walls, cpus = zip(*times, strict=True)
        result[name], result[f"{name} cpu"] = statistics.median(walls), statistics.median(cpus)
    return result


def timed(run: Callable[[], None], wait: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wait()
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_rss() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_a_process(side: str, options: argparse.Namespace) -> dict[str, Any]:
    arguments = [*sys.argv[1:], "--side", side, "--folder", str(options.folder)]
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if options.threads else ()
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ | dict.fromkeys(names, str(options.threads)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def report(options: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> None:
    """The best round of each side, since other work on the machine only ever adds time."""
    print(
        f"{options.preset}, {options.size}², batch {options.batch} with guidance, {options.dtype}"
    )
    for side, rows in results.items():
        print(f"  {side:<10} {rows[0]['runs_on']}")
    rows = [
        ("text", "text encoders", "ms", 1e3),
        ("step", f"one step, {77 + options.text_length} text tokens", "ms", 1e3),
        ("decode", "VAE decoder", "ms", 1e3),
        ("image", f"whole image, {options.steps} steps", "ms", 1e3),
        ("peak", "peak memory of the process", "MiB", 2**-20),
    ]
    for key, label, unit, scale in rows:
        if key in results["ours"][0]:
            ours, theirs = (scale * best(results[side], key) for side in results)
            figures = f"ours {ours:9.1f} {unit:<3}   diffusers {theirs:9.1f} {unit:<3}"
            line = f"  {label:<28} {figures}   ratio {ours / theirs:.2f}"
            if f"{key} cpu" in results["ours"][0]:
                ours, theirs = (best(results[side], f"{key} cpu") for side in results)
                line += f"   cpu {ours / theirs:.2f}"
            print(line)


def best(rows: list[dict[str, Any]], key: str) -> float:
    return min(row[key] for row in rows)


if __name__ == "__main__":
    main()
