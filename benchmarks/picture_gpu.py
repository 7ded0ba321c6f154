"""Whole pictures on a GPU: ours against diffusers, same machine, same files, random weights.

    python benchmarks/picture_gpu.py --folder BIG                      SD3-medium's size with T5-XXL
    python benchmarks/picture_gpu.py --folder BIG --model sdxl flux    other models
    python benchmarks/picture_gpu.py --folder SMALL --tiny             to see that it runs

The first run of a model writes its files: bfloat16, made by diffusers on the device. Each side has
a process of its own, which loads the files, draws one picture, and then draws `--repeat` more; the
median of these is the time of a picture, text encoders and decoder included. `compiled` is
diffusers with its denoiser and its decoder under `torch.compile`; its first picture includes the
compilation. `low-memory` and `4-bit` are `generate --low-memory` and `--bits 4`. Peak memory is
what each library's allocator reports. README.md beside this says how to run MLX on a CUDA machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THEIRS = ("eager", "compiled")
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "low-memory": {"low_memory": True},
    "4-bit": {"bits": 4},
}
SIDES = (*OURS, *THEIRS)
PROMPT = "a red fox in the snow at dawn"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, required=True, help="for the models' files")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["sd3"])
    parser.add_argument("--sizes", type=int, nargs="+", help="sides of the picture in pixels")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="pictures at a time")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--repeat", type=int, default=3, help="timed pictures after the first")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=("ours", *THEIRS))
    parser.add_argument("--tiny", action="store_true", help="small models and pictures")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sizes = options.sizes or ([64] if options.tiny else [512, 1024])
    if options.side:
        run = run_ours if options.side in OURS else run_diffusers
        print(json.dumps(run(options, options.folder / options.model[0])))
        return
    for model in options.model:
        make_once(options, model)
        print(f"{model}, bfloat16, {options.steps} steps, median of {options.repeat}", flush=True)
        for side in options.sides:
            print_side(side, in_a_process(model, side))


def run_ours(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import mlx.core as mx

    import lydite

    start = time.perf_counter()
    pipeline = lydite.open(str(folder), dtype="bfloat16", **OURS[options.side])
    pipeline.model.prepare()
    loaded = time.perf_counter() - start

    def draw(size: int, batch: int, seed: int) -> None:
        request = lydite.Request(PROMPT, steps=options.steps, width=size, height=size)
        seeds = range(seed, seed + batch)
        for _ in pipeline.generate(request, list(seeds), batch=batch):
            pass

    return {
        "load": loaded,
        "rows": measure(options, draw, mx.get_peak_memory, mx.reset_peak_memory),
        "runs_on": f"mlx {getattr(mx, '__version__', '')}, {mx.default_device()}",
    }


def run_diffusers(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch
    from diffusers import DiffusionPipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    loaded = time.perf_counter() - start
    if options.side == "compiled":
        # Without dynamic=False the second size would be compiled for all sizes, and be slower.
        name = "unet" if hasattr(pipeline, "unet") else "transformer"
        setattr(pipeline, name, torch.compile(getattr(pipeline, name), dynamic=False))
        pipeline.vae.decode = torch.compile(pipeline.vae.decode, dynamic=False)

    def draw(size: int, batch: int, seed: int) -> None:
        generators = [torch.Generator("cpu").manual_seed(seed + index) for index in range(batch)]
        pipeline(
            PROMPT,
            num_images_per_prompt=batch,
            num_inference_steps=options.steps,
            width=size,
            height=size,
            generator=generators,
            output_type="np",
        )

    on_gpu = device == "cuda"
    return {
        "load": loaded,
        "rows": measure(
            options,
            draw,
            torch.cuda.max_memory_allocated if on_gpu else lambda: 0,
            torch.cuda.reset_peak_memory_stats if on_gpu else lambda: None,
        ),
        "runs_on": f"torch {torch.__version__}, {options.side}, {device}",
    }


def measure(
    options: argparse.Namespace,
    draw: Callable[[int, int, int], None],
    peak: Callable[[], int],
    reset_peak: Callable[[], object],
) -> list[dict[str, Any]]:
    """Seconds and bytes for every size and batch; pictures come back as NumPy, so all is done."""
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for batch in options.batch:
            reset_peak()
            times: list[float] = []
            for seed in range(1 + options.repeat):
                start = time.perf_counter()
                draw(size, batch, seed)
                times.append(time.perf_counter() - start)
            rows.append(
                {
                    "size": size,
                    "batch": batch,
                    "first": times[0],
                    "picture": statistics.median(times[1:] or times),
                    "peak": peak(),
                }
            )
    return rows


def in_a_process(model: str, side: str) -> dict[str, Any]:
    words = [word for word in sys.argv[1:]]
    if "--model" in words:  # one model for each process
        first = words.index("--model")
        last = first + 1
        while last < len(words) and not words[last].startswith("-"):
            last += 1
        del words[first:last]
    done = subprocess.run(
        [sys.executable, __file__, *words, "--model", model, "--side", side],
        env=os.environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def print_side(side: str, result: dict[str, Any]) -> None:
    print(f"{side}: {result['runs_on']}; loaded in {result['load']:.1f} s")
    for row in result["rows"]:
        print(
            f"  {row['size']:>4}² × {row['batch']}  {row['picture']:7.3f} s, the first "
            f"{row['first']:.1f} s, peak {row['peak'] / 2**30:.1f} GiB",
            flush=True,
        )


# ---- random models, made by diffusers ----------------------------------------------------------


def make_once(options: argparse.Namespace, model: str) -> None:
    """Write the files of a model, in a process of its own: its memory is free afterwards."""
    folder = options.folder / model
    if not (folder / "model_index.json").exists():
        start = time.perf_counter()
        code = f"import picture_gpu; picture_gpu.make({model!r}, {str(folder)!r}, {options.tiny})"
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
        print(f"{model} written in {time.perf_counter() - start:.0f} s", flush=True)


def make(model: str, folder: str, tiny: bool) -> None:
    """Save the pipeline of a model; its tokenizers have a letter a token."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    MODELS[model](Path(folder), tiny)


def make_sd3(folder: Path, tiny: bool) -> None:
    import diffusers as d

    clips = [clip(*size, projection=True) for size in ([(32, 2, 2)] * 2 if tiny else CLIPS)]
    width = sum(each.config.projection_dim for each in clips)
    transformer: Any = d.SD3Transformer2DModel
    pipeline: Any = d.StableDiffusion3Pipeline
    save(
        pipeline(
            transformer=transformer(
                sample_size=128,
                num_layers=2 if tiny else 24,
                num_attention_heads=2 if tiny else 24,
                attention_head_dim=64,
                joint_attention_dim=64 if tiny else 4096,
                caption_projection_dim=128 if tiny else 1536,
                pooled_projection_dim=width,
                out_channels=16,
                pos_embed_max_size=192,
            ),
            vae=vae(tiny, latent_channels=16, scaling_factor=1.5305, shift_factor=0.0609),
            scheduler=d.FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=clips[0],
            text_encoder_2=clips[1],
            text_encoder_3=t5(tiny),
            tokenizer=clip_tokenizer(folder / "tokenizer", "<|endoftext|>"),
            tokenizer_2=clip_tokenizer(folder / "tokenizer_2", "!"),
            tokenizer_3=t5_tokenizer(folder / "tokenizer_3"),
        ),
        folder,
    )


def make_sdxl(folder: Path, tiny: bool) -> None:
    import diffusers as d

    sizes = [(32, 2, 2)] * 2 if tiny else CLIPS
    clips = [clip(*sizes[0], projection=False), clip(*sizes[1], projection=True)]
    unet: Any = d.UNet2DConditionModel
    pipeline: Any = d.StableDiffusionXLPipeline
    pooled = clips[1].config.projection_dim
    save(
        pipeline(
            unet=unet(
                sample_size=128,
                in_channels=4,
                out_channels=4,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                block_out_channels=(32, 64, 64) if tiny else (320, 640, 1280),
                layers_per_block=1 if tiny else 2,
                attention_head_dim=(2, 4, 4) if tiny else (5, 10, 20),
                transformer_layers_per_block=(1, 1, 1) if tiny else (1, 2, 10),
                cross_attention_dim=sum(each.config.hidden_size for each in clips),
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=32 if tiny else 256,
                projection_class_embeddings_input_dim=pooled + 6 * (32 if tiny else 256),
            ),
            vae=vae(tiny, latent_channels=4, scaling_factor=0.13025),
            scheduler=d.EulerDiscreteScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                timestep_spacing="leading",
                steps_offset=1,
            ),
            text_encoder=clips[0],
            text_encoder_2=clips[1],
            tokenizer=clip_tokenizer(folder / "tokenizer", "<|endoftext|>"),
            tokenizer_2=clip_tokenizer(folder / "tokenizer_2", "!"),
        ),
        folder,
    )


def make_sd15(folder: Path, tiny: bool) -> None:
    import diffusers as d

    text = clip(*((32, 2, 2) if tiny else CLIPS[0]), projection=False)
    unet: Any = d.UNet2DConditionModel
    pipeline: Any = d.StableDiffusionPipeline
    save(
        pipeline(
            unet=unet(
                sample_size=64,
                block_out_channels=(32, 64, 64, 64) if tiny else (320, 640, 1280, 1280),
                layers_per_block=1 if tiny else 2,
                attention_head_dim=2 if tiny else 8,
                cross_attention_dim=text.config.hidden_size,
            ),
            vae=vae(tiny, latent_channels=4, scaling_factor=0.18215),
            scheduler=d.PNDMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                skip_prk_steps=True,
                steps_offset=1,
            ),
            text_encoder=text,
            tokenizer=clip_tokenizer(folder / "tokenizer", "<|endoftext|>"),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ),
        folder,
    )


def make_flux(folder: Path, tiny: bool) -> None:
    import diffusers as d

    text = clip(*((32, 2, 2) if tiny else CLIPS[0]), projection=False)
    transformer: Any = d.FluxTransformer2DModel
    pipeline: Any = d.FluxPipeline
    save(
        pipeline(
            transformer=transformer(
                num_layers=1 if tiny else 19,
                num_single_layers=1 if tiny else 38,
                attention_head_dim=128,
                num_attention_heads=1 if tiny else 24,
                joint_attention_dim=64 if tiny else 4096,
                pooled_projection_dim=text.config.hidden_size,
                guidance_embeds=True,
            ),
            vae=vae(tiny, latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159),
            scheduler=d.FlowMatchEulerDiscreteScheduler(
                shift=3.0,
                use_dynamic_shifting=True,
                base_shift=0.5,
                max_shift=1.15,
                base_image_seq_len=256,
                max_image_seq_len=4096,
            ),
            text_encoder=text,
            text_encoder_2=t5(tiny),
            tokenizer=clip_tokenizer(folder / "tokenizer", "<|endoftext|>"),
            tokenizer_2=t5_tokenizer(folder / "tokenizer_2"),
        ),
        folder,
    )


CLIPS = [(768, 12, 12), (1280, 20, 32)]  # width, heads, layers: CLIP-L and OpenCLIP bigG
VOCABULARY = 49408


def clip(width: int, heads: int, layers: int, *, projection: bool) -> Any:
    import transformers as t

    config = t.CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        projection_dim=width,
        hidden_act="quick_gelu" if width == CLIPS[0][0] else "gelu",
        bos_token_id=VOCABULARY - 2,
        eos_token_id=VOCABULARY - 1,
    )
    return (t.CLIPTextModelWithProjection if projection else t.CLIPTextModel)(config)


def t5(tiny: bool) -> Any:
    import transformers as t

    return t.T5EncoderModel(
        t.T5Config(
            vocab_size=32128,
            d_model=64 if tiny else 4096,
            d_kv=64,
            d_ff=128 if tiny else 10240,
            num_layers=2 if tiny else 24,
            num_heads=2 if tiny else 64,
            feed_forward_proj="gated-gelu",
        )
    )


def vae(tiny: bool, **settings: Any) -> Any:
    import diffusers as d

    network: Any = d.AutoencoderKL
    quant = settings["latent_channels"] == 4
    return network(
        block_out_channels=(32, 32, 64, 64) if tiny else (128, 256, 512, 512),
        layers_per_block=1 if tiny else 2,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        sample_size=1024,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        force_upcast=False,
        **settings,
    )


def clip_tokenizer(folder: Path, pad: str) -> Any:
    import transformers as t

    import untrained_sd3

    untrained_sd3.write_clip_tokenizer(folder, pad=pad, size=VOCABULARY)
    return t.CLIPTokenizer.from_pretrained(folder)


def t5_tokenizer(folder: Path) -> Any:
    import transformers as t

    import untrained_sd3

    untrained_sd3.write_t5_tokenizer(folder)
    return t.AutoTokenizer.from_pretrained(folder)


def save(pipeline: Any, folder: Path) -> None:
    pipeline.save_pretrained(folder, safe_serialization=True)


MODELS = {"sd3": make_sd3, "sdxl": make_sdxl, "sd15": make_sd15, "flux": make_flux}


if __name__ == "__main__":
    main()
