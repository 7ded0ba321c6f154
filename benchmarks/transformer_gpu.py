"""FLUX.1's and Qwen-Image's transformers at their real size on a GPU: ours against diffusers.

    python benchmarks/transformer_gpu.py                    all parts
    python benchmarks/transformer_gpu.py --parts step --model qwen --sides ours 4-bit
    python benchmarks/transformer_gpu.py --tiny             small layers, to see that it runs

Parts:
    layers   one block of each kind and one layer of each text encoder, with the same weights on
             both sides: errors against torch in float32, and the time of a call
    step     one call of the whole transformer for a picture of 1024², batch 1: time and memory

Weights are random and bfloat16. Sides of a step, each in a process of its own: `ours` and `4-bit`
(rounded to nearest, as `--bits 4` does it), diffusers `eager`, and `compiled`: its repeated blocks
under `torch.compile`, as diffusers advises for these models. A step in a row is one of ten of which
only the last is waited for.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from sd3_gpu import IN_A_ROW, in_a_row, measure

PARTS = ("layers", "step")
SIDES = ("ours", "4-bit", "eager", "compiled")
FLUX: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
QWEN: dict[str, Any] = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
CONFIGS = {"flux": FLUX, "qwen": QWEN}
TEXT = {"flux": 512, "qwen": 128}  # tokens: FLUX.1-dev's length, a prompt of three sentences
T5: dict[str, Any] = {
    "vocab_size": 1000,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 1,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
QWEN_TEXT: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 1,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
}
TINY = {"num_attention_heads": 2, "num_layers": 2, "num_single_layers": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="of a step")
    parser.add_argument("--size", type=int, help="side of the picture in pixels")
    parser.add_argument("--repeat", type=int, default=10, help="timed calls")
    parser.add_argument("--tiny", action="store_true", help="small layers and pictures")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = options.size or (64 if options.tiny else 1024)
    if options.side:
        run = run_ours if options.side in SIDES[:2] else run_diffusers
        print(json.dumps(run(options, options.model[0])))
        return
    if "layers" in options.parts:
        compare_layers(options)
    for model in options.model if "step" in options.parts else ():
        print_steps(options, model)


def print_steps(options: argparse.Namespace, model: str) -> None:
    print(f"{model}, one step at {options.size}², {TEXT[model]} text tokens", flush=True)
    found: dict[str, Any] = {}
    for side in options.sides:
        command = [sys.executable, __file__, "--model", model, "--side", side]
        command += ["--size", str(options.size), "--repeat", str(options.repeat)]
        command += ["--tiny"] if options.tiny else []
        done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"  {side}: failed with exit code {done.returncode}", flush=True)
            continue
        row = found[side] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"  {side:<9} {row['step']:8.2f} ms, in a row {row['in a row']:.2f}; "
            f"{row['held']:.2f} GiB of weights, peak {row['peak']:.2f}",
            flush=True,
        )
    for ours in (side for side in SIDES[:2] if side in found):
        for theirs in (side for side in SIDES[2:] if side in found):
            rows = [(found[ours][key], found[theirs][key]) for key in ("in a row", "peak")]
            times, peaks = (a / b if b else float("nan") for a, b in rows)
            print(f"  {ours} / {theirs}: time {times:.2f}, peak memory {peaks:.2f}", flush=True)


def settings(options: argparse.Namespace, model: str, **more: Any) -> dict[str, Any]:
    config = CONFIGS[model] | (TINY if options.tiny else {}) | more
    return {key: value for key, value in config.items() if key in CONFIGS[model]}


# ---- one step ----------------------------------------------------------------------------------


def run_ours(options: argparse.Namespace, model: str) -> dict[str, float]:
    import lydite  # noqa: F401

    # isort: split
    import mlx.core as mx

    from lydite.models.layers import Linear, QuantizedLinear, join_weights
    from lydite.quantize.quantized_weight import exchange_layer
    from lydite.weights.load import parameters
    from lydite.weights.quantized_format import GROUP, formats_for

    network = our_network(model, settings(options, model))
    network.set_dtype(mx.bfloat16)
    if options.side == "4-bit":
        shapes = {path: array.shape for path, array in parameters(network).items()}
        formats = formats_for(4, shapes)
        for path, layer in list(network.named_modules()):
            chosen = formats.get(f"{path}.weight")
            if isinstance(layer, Linear) and chosen:
                packed = QuantizedLinear.from_linear(layer, GROUP, chosen.bits)
                mx.eval(packed.parameters())
                exchange_layer(network, path, packed)
    mx.eval(network.parameters())
    join_weights(network)
    arguments = our_arguments(network, model, *draw_inputs(options, model), mx.bfloat16)
    mx.eval(arguments)
    step = mx.compile(network)

    def one_step() -> None:
        mx.async_eval(step(*arguments))

    def steps() -> None:
        before = arguments[0]
        for _ in range(IN_A_ROW):
            after = step(before, *arguments[1:])
            mx.async_eval(after)
            mx.eval(before)  # as the pipeline does: one step while the next is prepared
            before = after

    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    found = measure({"step": one_step}, mx.synchronize, options.repeat)
    found |= in_a_row(steps, mx.synchronize)
    return found | {"held": held / 2**30, "peak": mx.get_peak_memory() / 2**30}


def run_diffusers(options: argparse.Namespace, model: str) -> dict[str, float]:
    import torch

    torch.set_grad_enabled(False)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.set_default_device(device)
    torch.set_default_dtype(torch.bfloat16)
    network = their_network(model, settings(options, model))
    if options.side == "compiled":
        network.compile_repeated_blocks(dynamic=False)
    arguments = their_arguments(model, *draw_inputs(options, model), torch.bfloat16)
    wait = torch.cuda.synchronize if on_gpu else lambda: None

    def one_step() -> None:
        network(**arguments)

    def steps() -> None:
        for _ in range(IN_A_ROW):
            network(**arguments)

    held = torch.cuda.memory_allocated() if on_gpu else 0
    one_step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    found = measure({"step": one_step}, wait, options.repeat) | in_a_row(steps, wait)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return found | {"held": held / 2**30, "peak": peak / 2**30}


# ---- one network, on both sides ----------------------------------------------------------------


def our_network(model: str, config: dict[str, Any]) -> Any:
    from lydite.models.flux import FluxConfig, FluxTransformer
    from lydite.models.qwen_image import QwenImageConfig, QwenImageTransformer

    if model == "flux":
        return FluxTransformer(FluxConfig(**config))
    return QwenImageTransformer(QwenImageConfig(**config))


def their_network(model: str, config: dict[str, Any]) -> Any:
    import diffusers as d

    network: Any = {"flux": d.FluxTransformer2DModel, "qwen": d.QwenImageTransformer2DModel}[model]
    return network(**config).eval()


def draw_inputs(options: argparse.Namespace, model: str) -> tuple[Any, Any, Any, int]:
    """Packed latents, text features, pooled text, and the rows and columns of the picture."""
    generator, side = np.random.default_rng(0), options.size // 16

    def draw(*shape: int) -> Any:
        return generator.standard_normal(shape, np.float32)

    config = CONFIGS[model]
    text = draw(1, TEXT[model], config["joint_attention_dim"])
    return draw(1, side * side, config["in_channels"]), text, draw(1, 768), side


def our_arguments(
    network: Any, model: str, tokens: Any, text: Any, pooled: Any, side: int, dtype: Any
) -> list[Any]:
    """What a pipeline computes before the first step is computed here, too."""
    import mlx.core as mx

    cast = lambda x: mx.array(x).astype(dtype)  # noqa: E731
    timestep = mx.array([500.0])
    if model == "flux":
        tables = network.modulation(timestep, cast(pooled), mx.array([4.0]))
    else:
        tables = network.modulation(timestep, dtype)
    tables = {path: mx.contiguous(table[0]) for path, table in tables.items()}
    text = network.embed_text(cast(text))
    return [cast(tokens), text, tables, network.positions(text.shape[1], side, side)]


def their_arguments(
    model: str, tokens: Any, text: Any, pooled: Any, side: int, dtype: Any
) -> dict[str, Any]:
    import torch

    cast = lambda x: torch.tensor(x, dtype=dtype)  # noqa: E731
    found: dict[str, Any] = {
        "hidden_states": cast(tokens),
        "encoder_hidden_states": cast(text),
        "timestep": torch.full((1,), 0.5, dtype=torch.float32).to(dtype),
        "return_dict": False,
    }
    if model == "qwen":
        return found | {"img_shapes": [[(1, side, side)]]}
    ids = torch.zeros(side, side, 3)
    ids[..., 1], ids[..., 2] = torch.arange(side)[:, None], torch.arange(side)[None]
    return found | {
        "pooled_projections": cast(pooled),
        "guidance": torch.full((1,), 4.0, dtype=torch.float32),
        "img_ids": ids.reshape(-1, 3),
        "txt_ids": torch.zeros(text.shape[1], 3),
    }


# ---- one layer, the same weights on both sides -------------------------------------------------


def compare_layers(options: argparse.Namespace) -> None:
    """Errors against torch in float32, of both sides in bfloat16 and of ours in float32."""
    import lydite  # noqa: F401

    # isort: split
    import torch

    torch.set_grad_enabled(False)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    kinds = {
        "FLUX.1, one double block": ("flux", {"num_layers": 1, "num_single_layers": 0}),
        "FLUX.1, one single block": ("flux", {"num_layers": 0, "num_single_layers": 1}),
        "Qwen-Image, one block": ("qwen", {"num_layers": 1}),
    }
    print("relative L2 against torch in float32; ms of a call in bfloat16", flush=True)
    for name, (model, layers) in kinds.items():
        if model in options.model:
            compare_blocks(options, name, model, settings(options, model, **layers))
    compare_text(options, "T5-XXL, one layer", *t5_pair(options))
    compare_text(options, "Qwen2.5-VL-7B, one layer", *qwen_text_pair(options))


def compare_blocks(
    options: argparse.Namespace, name: str, model: str, config: dict[str, Any]
) -> None:
    import mlx.core as mx

    theirs, ours = their_network(model, config), our_network(model, config)
    inputs = draw_inputs(options, model)

    def run_theirs(dtype: Any) -> Any:
        cast_parameters(theirs, dtype)
        arguments = their_arguments(model, *inputs, dtype)
        return lambda: theirs(**arguments)[0]

    def run_ours(dtype: Any) -> Any:
        copy_weights(theirs, ours, dtype)
        arguments = our_arguments(ours, model, *inputs, dtype)
        mx.eval(arguments)
        step = mx.compile(ours)
        return lambda: step(*arguments)

    print_errors(options, name, run_theirs, run_ours)


def t5_pair(options: argparse.Namespace) -> tuple[Any, Any, str]:
    import transformers as t

    from lydite.models.text.t5 import T5Config, T5EncoderModel

    config: dict[str, Any] = T5 | (
        {"d_ff": 64, "d_model": 128, "num_heads": 2} if options.tiny else {}
    )
    theirs = t.T5EncoderModel(t.T5Config(**config))
    shared: dict[str, Any] = {
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    }
    ours = T5EncoderModel(T5Config(**config, **shared, layer_norm_epsilon=1e-6))
    return theirs.eval(), ours, ""


def qwen_text_pair(options: argparse.Namespace) -> tuple[Any, Any, str]:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    from lydite.models.text.qwen import Qwen2_5_VLTextEncoder, QwenConfig

    tiny = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4}
    config: dict[str, Any] = QWEN_TEXT | (tiny | {"num_key_value_heads": 2} if options.tiny else {})
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    sections = [half // 4, (half - half // 4) // 2, half - half // 4 - (half - half // 4) // 2]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    settings: Any = qwen.Qwen2_5_VLTextConfig(**config, rope_parameters=rope)
    theirs = qwen.Qwen2_5_VLTextModel(settings)
    ours = Qwen2_5_VLTextEncoder(QwenConfig(**config, rope_theta=1e6))
    return theirs.eval(), ours, "model.language_model."


def compare_text(
    options: argparse.Namespace, name: str, theirs: Any, ours: Any, prefix: str
) -> None:
    import mlx.core as mx
    import torch

    ids = np.random.default_rng(0).integers(0, 1000, (1, 512))

    def run_theirs(dtype: Any) -> Any:
        cast_parameters(theirs, dtype)
        tokens = torch.tensor(ids)
        return lambda: theirs(input_ids=tokens)[0]

    def run_ours(dtype: Any) -> Any:
        copy_weights(theirs, ours, dtype, prefix)
        tokens = mx.array(ids)

        def call() -> mx.array:
            found: Any = ours(tokens)
            return found.last if prefix else found

        return call

    print_errors(options, name, run_theirs, run_ours)


def cast_parameters(network: Any, dtype: Any) -> None:
    """Frequencies of the rotary embedding are no parameters: they stay in float32."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)


def copy_weights(theirs: Any, ours: Any, dtype: Any, prefix: str = "") -> None:
    """Names are the same on both sides; these networks have no convolutions."""
    import mlx.core as mx

    known = {
        prefix + path: mx.array(weight.float().cpu().numpy()).astype(dtype)
        for path, weight in theirs.state_dict().items()
        if path != "encoder.embed_tokens.weight"  # T5's `shared` again
    }
    ours.load_weights(list(known.items()))
    mx.eval(ours.parameters())


def print_errors(options: argparse.Namespace, name: str, run_theirs: Any, run_ours: Any) -> None:
    import mlx.core as mx
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    run_theirs(torch.bfloat16)  # both sides have these values in both precisions
    exact = run_theirs(torch.float32)().float().cpu().numpy()

    def error(found: Any) -> float:
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    call = run_theirs(torch.bfloat16)
    rounded = error(call().float().cpu().numpy())
    theirs = measure({"call": call}, wait, options.repeat)["call"]
    same = error(np.array(run_ours(mx.float32)()))
    call = run_ours(mx.bfloat16)
    ours_rounded = error(np.array(call().astype(mx.float32)))
    ours = measure({"call": lambda: mx.async_eval(call())}, mx.synchronize, options.repeat)["call"]
    print(
        f"  {name:<25} float32 {same:.1e}; bfloat16 ours {ours_rounded:.2e}, torch {rounded:.2e}; "
        f"ours {ours:.2f} ms, torch {theirs:.2f}, ours / torch {ours / theirs:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
