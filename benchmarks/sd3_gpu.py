"""One step of a model of SD3-medium's size on a GPU: ours against diffusers, same machine.

    .venv/bin/python benchmarks/sd3_gpu.py            512² and 1024², batch 2, bfloat16
    .venv/bin/python benchmarks/sd3_gpu.py --tiny     two small layers, to see that it runs

A step is one call of the transformer for a prompt and its negative. Ours runs under `mx.compile`,
as the pipeline runs it, diffusers eagerly and under `torch.compile`; weights are random. Each side
has a process of its own. README.md beside this says how to run MLX on a CUDA machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIDES = ("ours", "eager", "compiled")
WARM_UP = 3
IN_A_ROW = 10  # steps
CONFIG: dict[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
TINY = {"num_layers": 2, "num_attention_heads": 2, "caption_projection_dim": 128}
TEXT = 77 + 256  # tokens of CLIP and of T5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", help="sides of the picture in pixels")
    parser.add_argument(
        "--batch", type=int, default=2, help="of the transformer, guidance included"
    )
    parser.add_argument("--repeat", type=int, default=20, help="timed steps")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--tiny", action="store_true", help="a small model and picture")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sizes = options.sizes or ([64, 128] if options.tiny else [512, 1024])
    options.config = CONFIG | (TINY if options.tiny else {})
    if options.side:
        run = run_ours if options.side == "ours" else run_diffusers
        print(json.dumps(run(options)))
        return
    layers, width = options.config["num_layers"], options.config["caption_projection_dim"]
    print(
        f"{layers} layers of width {width}, batch {options.batch}, bfloat16, {TEXT} text tokens, "
        f"median of {options.repeat} steps",
        flush=True,
    )
    results = {}
    for side in options.sides:
        results[side] = in_a_process(side)
        print_side(side, results[side])
    print_ratios(options, results)


def run_ours(options: argparse.Namespace) -> dict[str, Any]:
    import mlx.core as mx
    import mlx.nn as nn

    from lydite.models.layers import attention, join_weights, split_heads
    from lydite.models.mmdit import MMDiT, MMDiTConfig

    def draw(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(mx.bfloat16)

    def wait() -> None:
        mx.synchronize()

    config, batch = MMDiTConfig(**options.config), options.batch
    model = MMDiT(config)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    join_weights(model)
    step = mx.compile(model)
    # What does not change over the steps of a picture: the pipeline computes it before the first.
    tables = model.modulation(mx.array([500.0]), draw(batch, config.pooled_projection_dim))
    tables = {path: mx.contiguous(table[0]) for path, table in tables.items()}
    text = model.embed_text(draw(batch, TEXT, config.joint_attention_dim))
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and in_a_block(name)
    ]
    sizes: dict[int, dict[str, float]] = {}
    for size in options.sizes:
        side, tokens = size // 8, (size // 16) ** 2
        latent, positions = draw(batch, side, side, 16), model.positions(side, side)
        heads = [
            split_heads(draw(batch, tokens + TEXT, config.inner_dim), config.num_attention_heads)
            for _ in range(3)
        ]
        streams = {
            (count, width): draw(batch, count, width)
            for count in (tokens, TEXT)
            for width in (config.inner_dim, 4 * config.inner_dim)
        }
        mx.eval(tables, text, latent, positions, heads, streams)

        def one_step(latent: mx.array = latent, positions: mx.array = positions) -> None:
            mx.async_eval(step(latent, text, tables, positions))

        def products(tokens: int = tokens, streams: dict[Any, mx.array] = streams) -> None:
            mx.async_eval(
                [
                    linear(streams[TEXT if of_text(name) else tokens, linear.weight.shape[1]])
                    for name, linear in linears
                ]
            )

        def attentions(heads: list[mx.array] = heads) -> None:
            q, k, v = heads
            mx.async_eval(
                [attention(q, k, v, scale=0.125) for _ in range(options.config["num_layers"])]
            )

        def steps(latent: mx.array = latent, positions: mx.array = positions) -> None:
            for _ in range(IN_A_ROW):
                after = step(latent, text, tables, positions)
                mx.async_eval(after)
                mx.eval(latent)  # as the pipeline does: one step while the next is prepared
                latent = after
            mx.eval(latent)

        if not bool(mx.isfinite(step(latent, text, tables, positions)).all()):
            raise ArithmeticError("ours is not finite")
        parts = {"step": one_step, "products": products, "attention": attentions}
        sizes[size] = measure(parts, wait, options.repeat)
        sizes[size] |= in_a_row(steps, wait)
    version = getattr(mx, "__version__", "")
    return {"sizes": sizes, "runs_on": f"mlx {version}, mx.compile, {mx.default_device()}"}


def run_diffusers(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F
    from diffusers import SD3Transformer2DModel

    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_device(device)
    config, batch = options.config, options.batch
    network: Any = SD3Transformer2DModel
    model = network(**config).to(device).eval()
    # Without dynamic=False the second size would be compiled for all sizes, and be slower.
    step = torch.compile(model, dynamic=False) if options.side == "compiled" else model
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and in_a_block(name)
    ]
    sizes: dict[int, dict[str, float]] = {}
    for size in options.sizes:
        side, tokens = size // 8, (size // 16) ** 2
        inputs = {
            "hidden_states": torch.randn(batch, 16, side, side),
            "encoder_hidden_states": torch.randn(batch, TEXT, config["joint_attention_dim"]),
            "pooled_projections": torch.randn(batch, config["pooled_projection_dim"]),
            "timestep": torch.full((batch,), 500.0, dtype=torch.float32),
        }
        shape = (batch, tokens + TEXT, config["num_attention_heads"], 64)
        heads = [torch.randn(shape).transpose(1, 2) for _ in range(3)]
        streams = {
            (count, width): torch.randn(batch, count, width)
            for count in (tokens, TEXT)
            for width in (config["caption_projection_dim"], 4 * config["caption_projection_dim"])
        }

        def one_step(inputs: dict[str, Any] = inputs) -> None:
            step(**inputs)

        def products(tokens: int = tokens, streams: dict[Any, Any] = streams) -> None:
            for name, linear in linears:
                linear(streams[TEXT if of_text(name) else tokens, linear.in_features])

        def attentions(heads: list[Any] = heads) -> None:
            for _ in range(options.config["num_layers"]):
                F.scaled_dot_product_attention(*heads)

        wait = torch.cuda.synchronize if device == "cuda" else lambda: None

        def steps(inputs: dict[str, Any] = inputs) -> None:
            for _ in range(IN_A_ROW):
                step(**inputs)

        parts = {"step": one_step, "products": products, "attention": attentions}
        sizes[size] = measure(parts, wait, options.repeat)
        sizes[size] |= in_a_row(steps, wait)
    return {"sizes": sizes, "runs_on": f"torch {torch.__version__}, {options.side}, {device}"}


def in_a_block(name: str) -> bool:
    """Whether a linear runs once per token: those of the norms run once per picture."""
    return name.startswith("transformer_blocks.") and "norm" not in name


def of_text(name: str) -> bool:
    return "add_" in name or "context" in name


def measure(
    parts: dict[str, Callable[[], None]], wait: Callable[[], None], repeat: int
) -> dict[str, float]:
    """Medians in ms once warm: of each part, and of the time until a step is handed to the GPU."""
    result = {}
    for name, run in parts.items():
        times = [timed(run, wait) for _ in range(WARM_UP + repeat)][WARM_UP:]
        handed, whole = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        result[name] = whole
        if name == "step":
            result["handed over"] = handed
    return result


def in_a_row(run: Callable[[], None], wait: Callable[[], None]) -> dict[str, float]:
    """ms of a step of several, of which only the last is waited for."""
    times = [timed(run, wait)[1] for _ in range(4)][1:]
    return {"in a row": 1e3 * statistics.median(times) / IN_A_ROW}


def timed(run: Callable[[], None], wait: Callable[[], None]) -> tuple[float, float]:
    wait()
    start = time.perf_counter()
    run()
    handed = time.perf_counter() - start
    wait()
    return handed, time.perf_counter() - start


def in_a_process(side: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--side", side],
        env=os.environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def print_side(side: str, result: dict[str, Any]) -> None:
    print(f"{side}: {result['runs_on']}")
    for size, row in result["sizes"].items():
        rest = row["step"] - row["products"] - row["attention"]
        print(
            f"  {size:>4}²  step {row['step']:8.2f} ms = products {row['products']:.2f} "
            f"+ attention {row['attention']:.2f} + rest {rest:.2f}; "
            f"handed over after {row['handed over']:.2f}; in a row {row['in a row']:.2f}",
            flush=True,
        )


def print_ratios(options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Ours / theirs, of steps in a row: below 1 we are faster."""
    for size in options.sizes:
        steps = {side: result["sizes"][str(size)]["in a row"] for side, result in results.items()}
        line = "   ".join(f"{side} {step:.2f} ms" for side, step in steps.items())
        for side in ("eager", "compiled"):
            if {"ours", side} <= steps.keys():
                line += f"   ours / {side} {steps['ours'] / steps[side]:.2f}"
        print(f"{size:>5}²  {line}")


if __name__ == "__main__":
    main()
