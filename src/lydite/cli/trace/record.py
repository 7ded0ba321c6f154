"""`lydite trace`: record a run of Lydite, of the reference, or of any script with taps."""

import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lydite.cli.recording import (
    LEVELS,
    capture_options,
    floor_dtype,
    plan_recording,
    read_capture,
    record_port,
    reference_job,
    seed_option,
)
from lydite.cli.request_options import (
    image_options,
    model_options,
    request_options,
    typed_arguments,
    typed_options,
)
from lydite.core.errors import FileError, InputError, shown

if TYPE_CHECKING:
    from lydite.trace.writer import Capture

DTYPES = ("float32", "bfloat16", "float16", "float64")
COMMAND = "lydite.command"  # in the context: what follows --
FOR_COMMANDS = {"prompt", "out", "overwrite", "inject", "at", "quiet"}


VERBS = {"check": "lydite.cli.trace.check", "show": "lydite.cli.trace.show"}


class _WithCommand(click.Command):
    """Keeps what follows `--` apart: it is another program's. `check` and `show` are verbs."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args and args[0] in VERBS:
            verb: click.Command = importlib.import_module(VERBS[args[0]]).command
            return verb.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)


@click.command("trace", cls=_WithCommand)
@click.argument("prompt", required=False)
@model_options
@click.option("--side", type=click.Choice(("ours", "reference")), default="ours",
              show_default=True, help="ours: MLX; reference: diffusers on torch.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True,
              help="Precision of the run; float64 for the reference only.")  # fmt: skip
@seed_option
@request_options
@image_options
@click.option("--level", type=click.Choice(LEVELS), default="full", show_default=True,
              help="full: values; sketch: 1,024 sums of each; stats: moments.")  # fmt: skip
@capture_options
@click.option("--inject", metavar="TRACE", type=click.Path(path_type=Path), envvar="LYDITE_INJECT",
              help="Replace values of the run by those of this trace …")  # fmt: skip
@click.option("--at", metavar="PATTERN,…", envvar="LYDITE_INJECT_AT",
              help="… at these names: NAME (its outputs) or NAME:SLOT.")  # fmt: skip
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FOLDER",
              envvar="LYDITE_TRACE",
              help="A new folder; trace-SIDE-DTYPE by default.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace a trace that is there already.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar, only errors.")
@click.pass_context
def command(
    ctx: click.Context,
    prompt: str | None,
    inject: Path | None,
    at: str | None,
    out: Path | None,
    overwrite: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Record every intermediate tensor of a run, for `lydite diff`.

    Records the inputs and outputs of every module and the values between the networks: token ids,
    text features, sigmas, noise, and latents and velocity at each step. Both sides use the same
    names. Recording changes the picture by rounding at most. By default four steps are run.

    \b
    lydite trace "a red star"                       our side, the embedded model
    lydite trace "a red star" --side reference      diffusers, the same noise
    lydite trace "a red star" --side reference --dtype float64    for lydite diff --floor
    lydite trace "a fox" -m sd3-folder/ --dtype bfloat16 --size 512x512 --budget 20GB
    lydite trace "a fox" -m sd3-folder/ --points 'transformer/transformer_blocks.0*'

    Any program that calls `lydite.trace.taps.tap`, or writes docs/trace-format.md by itself, is
    run with LYDITE_TRACE in its environment (and LYDITE_INJECT, LYDITE_INJECT_AT):

    \b
    lydite trace -o port -- python port.py "a red star"
    lydite trace -o port -- cargo run --release
    lydite trace -o port2 --inject reference --at 'vae/*' -- python port.py

    \b
    lydite trace check port                         what one trace shows without a reference
    lydite trace show port                          its values; NAME --save x.npy saves one

    The same variables stand for --out, --inject and --at here, so our own side can be what
    `lydite diff --rerun "lydite trace …"` runs again.

    Exit status: 0 recorded, 1 the model or its numbers are wrong, 2 the input could not be used,
    130 interrupted; of a program, its own.
    """
    if bool(inject) != bool(at):
        raise InputError("--inject and --at go together: which trace, and where.")
    program: tuple[str, ...] | None = ctx.meta.get(COMMAND)
    if program is not None:
        _check_program(ctx, prompt, program)
        folder = _free_folder(out or Path("trace-port"), overwrite, inject)
        sys.exit(_run_program(program, folder, inject, at, quiet))
    if not prompt:
        raise InputError('no prompt. Example: lydite trace "a red star".')
    side, dtype = options.pop("side"), options.pop("dtype")
    if side == "ours" and dtype == "float64":
        raise InputError("--dtype float64 is for --side reference; ours runs in float32 at most.")
    capture = read_capture(options["level"], options["points"], options["budget"])
    folder = out or Path(f"trace-{side}-{dtype}")
    _record(prompt, options, side, dtype, folder, capture, inject, at, overwrite, quiet)
    if not quiet:
        click.echo(summary(folder))
        click.echo(f"next: {_next(ctx, side)}")


def summary(folder: Path) -> str:
    """What a trace holds, in a line."""
    from lydite.trace.reader import Trace

    with Trace.open(folder) as trace:
        events = [event for event in trace.events if event.kind != "selftest"]
        whole = sum(trace.has_values(event) for event in events)
    size = sum(path.stat().st_size for path in folder.iterdir())
    kept = "" if whole == len(events) else f", {len(events) - whole:,} of them without their values"
    values = "1 value" if len(events) == 1 else f"{len(events):,} values"
    return f"{folder}: {values}{kept}, {size / 1e6:,.1f} MB"


def _record(
    prompt: str,
    options: dict[str, Any],
    side: str,
    dtype: Any,
    folder: Path,
    capture: "Capture",
    inject: Path | None,
    at: str | None,
    overwrite: bool,
    quiet: bool,
) -> None:
    from lydite.cli.progress import StepBar
    from lydite.reference.jobs import TraceOutput, run_job
    from lydite.trace.taps import injection

    ours = side == "ours"
    _check_not_input(folder, inject)
    pipeline, run, seed = plan_recording(prompt, options, dtype if ours else "float32")
    if ours:
        _free_folder(folder, overwrite, inject)
        with StepBar(run.steps, quiet=quiet) as bar:
            source = injection(inject, at) if inject and at else None
            record_port(
                pipeline, run, seed, folder, capture=capture, on_step=bar.advance, inject=source
            )
        return
    more = {"inject": str(inject), "inject_at": at} if inject else {}
    outputs = (TraceOutput(str(folder), dtype),)
    job = reference_job(pipeline, run, seed, outputs, capture, **more)
    _free_folder(folder, overwrite, inject)
    with StepBar(run.steps, quiet=quiet) as bar:
        run_job(job, bar.advance)


def _check_not_input(folder: Path, inject: Path | None) -> None:
    if inject is not None and os.path.realpath(folder) == os.path.realpath(inject):
        raise InputError(f"--out {folder} is the trace of --inject; give another folder.")


def _free_folder(folder: Path, overwrite: bool, inject: Path | None) -> Path:
    """The folder, checked to be free for a new trace."""
    from lydite.core.files import try_folder
    from lydite.trace.writer import remove_trace

    _check_not_input(folder, inject)
    try_folder(folder.parent)
    if overwrite:
        remove_trace(folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileError(f"{folder}: not empty. Give a new folder, or --overwrite a trace.")
    except OSError as error:
        raise FileError(f"{shown(str(folder))}: {error.strerror or error}.") from error
    return folder


def _check_program(ctx: click.Context, prompt: str | None, program: tuple[str, ...]) -> None:
    typed = typed_options(ctx)
    if prompt is not None or typed - FOR_COMMANDS:
        first = shown(prompt) if prompt is not None else f"--{min(typed - FOR_COMMANDS)}"
        raise InputError(
            f"{first.replace('_', '-')} does not apply to another program; before -- only "
            "--out, --overwrite, --inject and --at are allowed."
        )
    if not program:
        raise InputError("nothing after --. Name the program: lydite trace -- python port.py.")
    if shutil.which(program[0]) is None:
        raise InputError(f"{shown(program[0])}: no such program.")


def _run_program(
    program: tuple[str, ...], folder: Path, inject: Path | None, at: str | None, quiet: bool
) -> int:
    """Run it on this terminal and return its exit status."""
    from lydite.trace.reader import is_trace

    names = ("LYDITE_TRACE", "LYDITE_INJECT", "LYDITE_INJECT_AT")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment["LYDITE_TRACE"] = str(folder.absolute())
    if inject and at:
        environment |= {"LYDITE_INJECT": str(inject.absolute()), "LYDITE_INJECT_AT": at}
    # Ctrl-C reaches the program too, and its own end is waited for. An exception here could fall
    # between the end of the program and the note of its status, which would be lost.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = subprocess.run(program, env=environment, check=False).returncode
    except OSError as error:
        raise FileError(f"{shown(program[0])}: {error.strerror or error}.") from error
    finally:
        signal.signal(signal.SIGINT, before)
    if is_trace(folder):
        if not quiet:
            click.echo(summary(folder), err=True)
            click.echo(f"next: lydite diff REFERENCE {shlex.quote(str(folder))}", err=True)
    else:
        click.echo(
            f"note: {folder} holds no trace. The program has to call lydite.trace.taps.tap, or to "
            "write to the folder in LYDITE_TRACE itself.",
            err=True,
        )
    return status if status >= 0 else 128 - status


def _next(ctx: click.Context, side: str) -> str:
    """The command to type after this one: the other side's trace, or the comparison."""
    dtype = "float32" if ctx.params["dtype"] == "float64" else ctx.params["dtype"]
    names = {
        "ours": Path(f"trace-ours-{dtype}"),
        "reference": Path("trace-reference-float32"),
        "floor": Path(f"trace-reference-{floor_dtype(dtype)}"),
    }
    if ctx.params["out"] is None:
        ours, theirs, floor = (str(path) if path.is_dir() else None for path in names.values())
        if ours and theirs:
            more = ["--floor", floor] if floor else []
            return shlex.join(["lydite", "diff", theirs, ours, *more])
    other = "ours" if side == "reference" else "reference"
    typed = typed_arguments(
        ctx, without=("side", "dtype", "out", "overwrite", "quiet", "inject", "at")
    )
    more = ["--dtype", dtype] if other == "ours" and dtype != "float32" else []
    return shlex.join(["lydite", "trace", *typed, "--side", other, *more])
