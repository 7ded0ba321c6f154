"""From the options of `lydite quantize MODEL` to settings; what cannot be done is refused."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite.cli.calibrate.draw_missing import StopRequest
from lydite.cli.calibrate.model_options import SampleBar
from lydite.core.errors import FileError, InputError, at, counted, is_unicode
from lydite.core.files import size_text, try_folder

if TYPE_CHECKING:
    from lydite.calibrate.run import Model
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.pipelines.pipeline import Pipeline
    from lydite.quantize.plan import Plan
    from lydite.quantize.quantize_blocks import Settings

METHODS = (
    *("rtn", "hqq", "awq", "gptq", "adaround", "joint", "taqdit", "smoothquant", "ptq4dit"),
    "dwq",  # rtn, then tuned
)
ITERATIONS, TUNED = 1000, 200
BPW = click.FloatRange(2.25, 9)  # 2 bits in groups of 128 to 8 bits in groups of 32


def check_options(ctx: click.Context, options: dict[str, Any]) -> None:
    """Refuse options that would do nothing."""
    default = click.core.ParameterSource.DEFAULT
    given = {name for name in options if ctx.get_parameter_source(name) is not default}
    decided = ("bits", "group", "convolutions") if options["format"] != "affine" else ()
    for one, others in {
        "format": decided,
        "plan_file": ("bits", "group", "bpw", "convolutions", "format"),
        "bpw": ("bits", "convolutions", "format"),
        "against": ("eval_images", "eval_prompts"),
    }.items():
        if one in given and (idle := [name for name in others if name in given]):
            words = [f"--{name.removesuffix('_file').replace('_', '-')}" for name in (one, *idle)]
            raise InputError(f"{words[0]} decides what {', '.join(words[1:])} would: leave it out.")


def check_places(out: Path, model: "Model", options: dict[str, Any]) -> None:
    """Refuse names that cannot be recorded, and results inside what they are made from."""
    if not is_unicode(f"{model.name}{out}"):
        raise InputError("the names of MODEL and --out must be valid Unicode: they are recorded.")
    inputs = [Path(model.name), options["set_folder"], options["against"]]
    real = Path(os.path.realpath(out))
    for source in (Path(each) for each in inputs if each is not None):
        if source.exists() and real.is_relative_to(os.path.realpath(source)):
            raise FileError(f"{at(out)}: is inside the input {at(source)}. Give another --out.")
    try_folder(real.parent)  # it is made with the first file in it


def read_settings(pipeline: "Pipeline", options: dict[str, Any]) -> "Settings":
    """What the options ask for."""
    from lydite.models.layers import FLOAT_PRODUCTS
    from lydite.quantize.methods.reconstruct import short_recipe
    from lydite.quantize.plan import read_plan, uniform_plan
    from lydite.quantize.quantize_blocks import AFFINE_ONLY, Settings

    shapes = pipeline.model.components[pipeline.family.network].expected
    if options["plan_file"] is not None:
        plan = read_plan(options["plan_file"], shapes)
    else:
        plan = uniform_plan(
            shapes,
            int(options["bits"]),
            group_size(options),
            convolutions=options["convolutions"],
            mode=options["format"],
        )
    modes = {each.mode for each in plan.layers.values()} - {"affine"}
    if modes and (options["method"] in (*AFFINE_ONLY, "dwq") or options["tune"]):
        raise InputError(
            f"{min(modes)} has no offsets to learn, nor steps of one size: use --method rtn or "
            "gptq, without --tune."
        )
    coarse = any(each.group == 0 and each.bits <= 4 for each in plan.layers.values())
    if options["method"] == "smoothquant" and coarse:
        raise InputError(
            "smoothquant makes weights of some inputs much larger, and one scale for each "
            "channel in 4 bits then loses the others. Give --group 64, or --bits 8."
        )
    if options["method"] in ("taqdit", "smoothquant", "ptq4dit") and not options["act_bits"]:
        raise InputError(f"{options['method']} rounds activations too: add --act-bits 8.")
    if options["act_groups"] > 1 and not options["act_bits"]:
        raise InputError("--act-groups are groups of ranges of activations: add --act-bits 8.")
    if options["quantize_input"] and (options["act_bits"] or not modes & {*FLOAT_PRODUCTS}):
        raise InputError(
            "--quantize-input rounds inputs to the format of the weights: give --format nvfp4 "
            "or mxfp8, without --act-bits."
        )
    if options["bpw"] and options["dry_run"]:
        raise InputError(
            "--bpw measures every layer first. Instead of --dry-run, use `lydite quantize plan "
            "MODEL --bpw`."
        )
    is_dwq = options["method"] == "dwq"
    return Settings(
        "rtn" if is_dwq else options["method"],
        plan,
        options["act_bits"],
        act_groups=options["act_groups"],
        quantize_input=options["quantize_input"],
        recipe=short_recipe(options["iterations"], options["seed"], bool(options["act_bits"])),
        rank=options["rank"] or 0,
        tune=options["tune"] or (TUNED if is_dwq else 0),
        start="gptq" if options["method"] in ("adaround", "joint") else "weights",
    )


def measured_plan(
    pipeline: "Pipeline", opened: "CalibrationSet", options: dict[str, Any]
) -> "Plan":
    """Bits of each layer by its measured sensitivity."""
    from lydite.quantize.mixed import mixed_plan
    from lydite.quantize.quantize_blocks import CALIBRATED
    from lydite.quantize.sensitivity import measure_sensitivity

    stop = StopRequest()
    with SampleBar(quiet=options["quiet"], unit="layer") as bar, stop.listening():
        sensitivity = measure_sensitivity(
            pipeline,
            opened,
            group=group_size(options),
            on_layer=bar.done,
            stopping=lambda: stop.asked,
        )
    shapes = pipeline.model.components[pipeline.family.network].expected
    calibrated = options["method"] in CALIBRATED
    return mixed_plan(shapes, sensitivity, options["bpw"], calibrated=calibrated)


def group_size(options: dict[str, Any]) -> int:
    """Inputs that share a scale; 0: those of a channel."""
    return 0 if options["group"] == "channel" else int(options["group"])


def plan_text(pipeline: "Pipeline", settings: "Settings") -> str:
    """How many layers get how many bits, the size before and after, and the method."""
    from lydite.quantize.provenance import method_text
    from lydite.weights.quantized_format import bits_per_weight, bytes_in_memory

    component = pipeline.model.components[pipeline.family.network]
    shapes, plan = component.expected, settings.plan
    before = bytes_in_memory(shapes, 2)
    formats = plan.formats(shapes, settings.rank)
    after = bytes_in_memory(shapes, 2, formats)
    counts = Counter(each.bits for each in plan.layers.values())
    widths = ", ".join(f"{count} in {bits} bits" for bits, count in sorted(counts.items()))
    inputs = settings.activations, settings.act_bits, settings.act_groups
    return (
        f"{pipeline.family.network}: {counted(len(plan.layers), 'layer')} ({widths}), "
        f"{bits_per_weight(formats, shapes):.2f} bits per weight; {size_text(before)} in 16 "
        f"bits → {size_text(after)}. Method {method_text(settings.method, *inputs)}."
    )
