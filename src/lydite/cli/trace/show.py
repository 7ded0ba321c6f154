"""`lydite trace show`: what a trace holds, and single values as files of NumPy."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from lydite.cli.request_options import overwrite_option
from lydite.core.errors import InputError, first_of, shown
from lydite.core.outputs import check_output, write_output

if TYPE_CHECKING:
    from lydite.trace.events import Event
    from lydite.trace.reader import Trace

SHOWN = 60  # lines without --all


@click.command("show")
@click.argument("folder", metavar="TRACE", type=click.Path(path_type=Path))
@click.argument("name", required=False)
@click.option("--slot", help="An input or output of the module, as in.0; by default out.")
@click.option("--step", type=int, help="By default the first that was recorded.")
@click.option("--call", type=int, default=0, show_default=True, help="Which call in a step.")
@click.option("--save", type=click.Path(path_type=Path), metavar="FILE.npy",
              help="Write the values of NAME as an array of NumPy.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help=f"More than {SHOWN} lines.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@overwrite_option
def command(folder: Path, name: str | None, **options: Any) -> None:
    """List the values of TRACE, or those whose name contains NAME; save one to a file.

    \b
    lydite trace show ref                                         every value
    lydite trace show ref noise                                   names that contain "noise"
    lydite trace show ref pipeline/noise --save noise.npy         start a port from the same noise
    lydite trace show ref transformer/transformer_blocks.0 --slot in.0 --step 2 --save x.npy
    """
    from lydite.trace.reader import Trace

    with Trace.open(folder) as trace:
        if options["save"] is not None:
            _save(trace, name, options)
            return
        events = [event for event in trace.events if event.kind != "selftest"]
        chosen = [event for event in events if name is None or name in event.name]
        if not chosen:
            raise InputError(f"{folder}: no name contains {shown(name)}; {len(events)} values.")
        rows = [_row(trace, event) for event in chosen]
    if options["as_json"]:
        click.echo(json.dumps({"values": rows}, indent=1))
        return
    for line in _lines(rows if options["everything"] else rows[:SHOWN]):
        click.echo(line)
    if len(rows) > SHOWN and not options["everything"]:
        click.echo(f"and {len(rows) - SHOWN:,} more; --all lists them.")


def _row(trace: "Trace", event: "Event") -> dict[str, Any]:
    stats = event.stats
    return {
        "name": event.name,
        "slot": event.slot,
        "step": event.step,
        "call": event.call,
        "shape": list(event.shape),
        "dtype": event.dtype,
        "values": trace.has_values(event),
        "min": stats.min if stats else None,
        "max": stats.max if stats else None,
        "rms": stats.rms if stats else None,
    }


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        place = row["name"] if row["slot"] == "out" else f"{row['name']}:{row['slot']}"
        where = f"step {row['step']}" + (f" call {row['call']}" if row["call"] else "")
        shape = "×".join(map(str, row["shape"])) or "one number"
        size = "" if row["rms"] is None else f"  rms {row['rms']:.4g}"
        kept = "" if row["values"] else "  statistics only"
        yield f"{place:<60} {where:<14} {shape} {row['dtype']}{size}{kept}"


def _save(trace: "Trace", name: str | None, options: dict[str, Any]) -> None:
    path = options["save"]
    if name is None:
        raise InputError("--save needs NAME, the whole name of one value.")
    if path.suffix != ".npy":
        raise InputError(f"--save {shown(str(path))}: expected a name that ends in .npy.")
    check_output(path, overwrite=options["overwrite"], inputs=[trace.folder])
    slot, call = options["slot"] or "out", options["call"]
    there = [event for event in trace.events if event.name == name]
    steps = sorted({event.step for event in there if (event.slot, event.call) == (slot, call)})
    step = options["step"] if options["step"] is not None else (steps or [0])[0]
    event = trace.find(name, slot, step, call)
    if event is None:
        found = sorted({f"{e.slot} step {e.step} call {e.call}" for e in there})
        hint = f"it has {first_of(found, 6)}" if found else "list names without --save"
        raise InputError(f"{trace.folder}: no {slot} of {shown(name)}, step {step}; {hint}.")
    values = trace.read(event)
    if values.dtype.isbuiltin != 1:  # bfloat16 or float8, which NumPy's files do not hold
        values = values.astype(np.float32)
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    write_output(path, buffer.getvalue(), overwrite=options["overwrite"])
    shape = "×".join(map(str, values.shape)) or "one number"
    click.echo(f"{path}: {name}:{slot}, step {step}, {shape} {values.dtype}")
