"""`lydite quantize plan MODEL`: how sensitive each layer is, and a width for each."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from lydite.cli.calibrate.draw_missing import (
    StopRequest,
    WorkerOptions,
    absolute_model,
    process_options,
)
from lydite.cli.calibrate.model_options import SampleBar, note_on_stop
from lydite.cli.quantize.settings import BPW, METHODS, group_size
from lydite.cli.request_options import components_option, device_option, overwrite_option
from lydite.cli.tables import wide_console
from lydite.core.errors import InputError, counted
from lydite.core.files import size_text
from lydite.weights.quantized_format import BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lydite.calibrate.run import Model
    from lydite.quantize.plan import Plan
    from lydite.quantize.sensitivity import Sensitivity
    from lydite.weights.rules import Shape

WIDTHS = [str(bits) for bits in BITS]


@click.command("plan")
@click.argument("model", metavar="MODEL")
@click.option("--set", "set_folder", type=click.Path(path_type=Path), metavar="SET",
              help="A calibration set of MODEL, on which sensitivities are measured.")  # fmt: skip
@click.option("--bpw", type=BPW, metavar="X",
              help="Bits per weight on average over all quantized layers, scales included: each "
                   "layer gets its own number of bits. Needs --set.")  # fmt: skip
@click.option("--method", type=click.Choice(METHODS), default="gptq", show_default=True,
              help="Method that will use the plan. Methods that learn from the set make the errors "
                   "of all layers smaller, except those that compute modulation.")  # fmt: skip
@click.option("--bits", type=click.Choice(WIDTHS), help="Number of bits, the same for all layers.")
@click.option("--group", type=click.Choice(("32", "64", "128", "channel")), default="64",
              show_default=True, help="Number of inputs that share a scale.")  # fmt: skip
@click.option("--modulation-bits", type=click.Choice(WIDTHS),
              help="Least number of bits of layers that compute modulation. By default 8 with "
                   "--bits, and with --bpw what their sensitivity demands.")  # fmt: skip
@click.option("--leave-out", multiple=True, metavar="PATTERN",
              help="Layers that stay as they are, such as '*.0.attn.*'; repeatable.")  # fmt: skip
@click.option("--images", type=click.IntRange(1, 100_000), default=4, show_default=True,
              help="Number of images of the set on which each layer is measured.")  # fmt: skip
@click.option("--sensitivity", type=click.Path(path_type=Path), metavar="FILE",
              help="File that keeps what is measured; by default in the user's cache. A file that "
                   "exists is extended.")  # fmt: skip
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE",
              help="Write the plan, for `lydite quantize MODEL --plan FILE`.")  # fmt: skip
@overwrite_option
@process_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@components_option
@device_option
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def command(**options: Any) -> None:
    """Measure how sensitive each layer is, and suggest its bits.

    One layer after the other is rounded to nearest, and a few images of the set are drawn; its
    error is the relative error of their latents. Layers are listed from the most to the least
    sensitive. Interrupt it and run the same command again to resume.

    \b
    lydite quantize plan embedded                                sizes only
    lydite quantize plan sd3/ --set set/ --bpw 4.5 --save plan.json
    lydite quantize plan sd3/ --set set/ --bpw 4.5 --modulation-bits 8 --leave-out '*blocks.0.*'
    lydite quantize plan sd3/ --set set/ --bpw 4.5 --workers 4
    lydite quantize sd3/ --plan plan.json --set set/ --out mixed/
    """
    from lydite.calibrate.model_session import open_pipeline
    from lydite.core.outputs import check_output, write_output

    _check(options)
    if options["save"] is not None:
        read = ("model", "components", "set_folder", "sensitivity")
        given = [Path(options[name]) for name in read if options[name]]
        check_output(options["save"], overwrite=options["overwrite"], inputs=given)
    model = absolute_model(options["model"], options["components"])
    pipeline = open_pipeline(model, "auto")
    component = pipeline.model.components[pipeline.family.network]
    shapes = component.expected
    sensitivity = None if options["set_folder"] is None else _measure(model, options)
    plan = _suggested(shapes, sensitivity, options)
    if options["save"] is not None:
        write_output(options["save"], plan.to_json(), overwrite=options["overwrite"])
    if options["as_json"]:
        import msgspec

        click.echo(
            msgspec.json.format(msgspec.json.encode(_record(shapes, sensitivity, plan)), indent=1)
        )
        return
    _print(shapes, sensitivity, plan, options)


def _check(options: dict[str, Any]) -> None:
    if options["bpw"] is not None and options["bits"] is not None:
        raise InputError("--bpw and --bits exclude each other.")
    if options["set_folder"] is None:
        for name in ("bpw", "sensitivity", "ray"):
            if options[name] is not None:
                raise InputError(
                    f"--{name} needs sensitivities, and they are measured on a calibration set: "
                    "give --set SET."
                )


def _measure(model: "Model", options: dict[str, Any]) -> "Sensitivity":
    from lydite.calibrate.model_session import open_pipeline
    from lydite.calibrate.request_record import request_of
    from lydite.calibrate.store.reader import CalibrationSet
    from lydite.quantize.sensitivity import in_processes, measure_sensitivity, on_ray

    stop, quiet = StopRequest(), options["quiet"] or options["as_json"]
    workers = WorkerOptions(options["workers"], options["ray"], quiet)
    elsewhere = in_processes(model, workers.workers) if workers.workers > 1 else None
    if workers.ray is not None:
        elsewhere = on_ray(model, workers.ray)
    with CalibrationSet.open(options["set_folder"]) as opened:
        pipeline = open_pipeline(model, request_of(opened.settings.conditions)[1])
        with SampleBar(quiet=quiet, unit="layer") as bar, stop.listening(), note_on_stop():
            return measure_sensitivity(
                pipeline,
                opened,
                group=group_size(options),
                images=options["images"],
                file=options["sensitivity"],
                elsewhere=elsewhere,
                on_layer=bar.done,
                on_note=lambda line: None if quiet else click.echo(line, err=True),
                stopping=lambda: stop.asked,
            )


def _suggested(
    shapes: "Mapping[str, Shape]", sensitivity: "Sensitivity | None", options: dict[str, Any]
) -> "Plan":
    from lydite.quantize.mixed import left_in, mixed_plan
    from lydite.quantize.plan import KEPT_BITS, uniform_plan
    from lydite.quantize.quantize_blocks import CALIBRATED

    modulation = None if options["modulation_bits"] is None else int(options["modulation_bits"])
    if sensitivity is not None and options["bpw"] is not None:
        return mixed_plan(
            shapes,
            sensitivity,
            options["bpw"],
            modulation_bits=modulation or min(BITS),
            leave_out=options["leave_out"],
            calibrated=options["method"] in CALIBRATED,
        )
    plan = uniform_plan(
        shapes,
        int(options["bits"] or 4),
        group_size(options),
        modulation_bits=modulation or KEPT_BITS,
    )
    return left_in(plan, options["leave_out"])


def _sizes(shapes: "Mapping[str, Shape]", plan: "Plan") -> tuple[int, int]:
    """Bytes of the network's weights, before in 16 bits and after."""
    from lydite.weights.quantized_format import bytes_in_memory

    return bytes_in_memory(shapes, 2), bytes_in_memory(shapes, 2, plan.formats(shapes))


def _record(
    shapes: "Mapping[str, Shape]", sensitivity: "Sensitivity | None", plan: "Plan"
) -> dict[str, Any]:
    from lydite.quantize.mixed import expected_error

    before, after = _sizes(shapes, plan)
    return {
        "bits_per_weight": plan.bits_per_weight(shapes),
        "bytes_before": before,
        "bytes_after": after,
        "expected_error": None if sensitivity is None else expected_error(plan, sensitivity),
        "plan": plan,
        "sensitivity": sensitivity,
    }


def _print(
    shapes: "Mapping[str, Shape]",
    sensitivity: "Sensitivity | None",
    plan: "Plan",
    options: dict[str, Any],
) -> None:
    from lydite.quantize.mixed import expected_error

    if sensitivity is not None:
        wide_console().print(_table(shapes, sensitivity, plan))
        click.echo(
            "error: relative, of the latents at the end, when only this layer is rounded to "
            f"nearest; {counted(sensitivity.images, 'image')}."
        )
    counts = Counter(each.bits for each in plan.layers.values())
    widths = ", ".join(f"{count} in {bits} bits" for bits, count in sorted(counts.items()))
    before, after = _sizes(shapes, plan)
    click.echo(
        f"plan: {counted(len(plan.layers), 'layer')} ({widths}), "
        f"{plan.bits_per_weight(shapes):.3f} bits per weight; the network takes "
        f"{size_text(before)} in 16 bits, {size_text(after)} with it."
    )
    if sensitivity is not None:
        click.echo(
            "expected error of the latents, all layers of the plan rounded to nearest: "
            f"{expected_error(plan, sensitivity):.3g}"
        )
    else:
        click.echo(
            "note: no sensitivities, and so only a uniform plan: they need data. Give --set SET.",
            err=True,
        )
    if options["save"] is not None:
        click.echo(f"saved {options['save']}")


def _table(shapes: "Mapping[str, Shape]", sensitivity: "Sensitivity", plan: "Plan") -> Table:
    """From the most to the least sensitive layer; errors as they were measured."""
    widths = sorted({bits for errors in sensitivity.errors.values() for bits in errors})
    table = Table("layer", box=None, pad_edge=False)
    for title in ("weights", *(f"error, {bits} bits" for bits in widths), "plan"):
        table.add_column(title, justify="right", no_wrap=True)
    for path in sorted(sensitivity.errors, key=lambda path: -sensitivity.errors[path][widths[-1]]):
        rows, inputs = shapes[f"{path}.weight"]
        errors = [f"{sensitivity.errors[path][bits]:.4f}" for bits in widths]
        own = f"{plan.layers[path].bits} bits" if path in plan.layers else "kept"
        table.add_row(path, f"{rows * inputs:,}", *errors, own)
    return table
