"""`lydite`: one command, one verb per file, each imported only when it is used."""

import contextlib
import difflib
import importlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version as package_version
from typing import Any

import click

from lydite import __version__
from lydite.cli.safe_streams import PipeClosed, discard_output, one_line, safe_streams
from lydite.core.errors import LyditeError

# What MLX raises on Metal, on CUDA and on a CPU.
_UNCOMPILED = "Failed to compile kernel"  # MLX compiles some kernels while it runs
_OUT_OF_MEMORY = re.compile(r"(?i)out of memory|insufficient memory|unable to allocate|malloc")
PIPE_CLOSED = 141  # as of a program that SIGPIPE ended


class Verbs(click.Group):
    """Looks a verb up by name, so that `lydite inspect` never pays for the others.

    A verb is `command` of a module, or another name in it: `lydite.cli.calibrate.status:status`.
    """

    def __init__(self, *arguments: Any, verbs: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        module, _, name = self._verbs[cmd_name].partition(":")
        return getattr(importlib.import_module(module), name or "command")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._verbs and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self._verbs, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else f" See {ctx.command_path} --help."
            raise click.UsageError(f"No such command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)


VERBS = {
    "demo": "lydite.cli.demo",
    "generate": "lydite.cli.generate",
    "inspect": "lydite.cli.inspect",
    "audit": "lydite.cli.audit",
    "parity": "lydite.cli.parity",
    "trace": "lydite.cli.trace",
    "diff": "lydite.cli.diff",
    "sampler": "lydite.cli.sampler",
    "calibrate": "lydite.cli.calibrate",
    "evaluate": "lydite.cli.evaluate",
    "quantize": "lydite.cli.quantize",
    "doctor": "lydite.cli.doctor",
}


@click.group(
    cls=Verbs,
    verbs=VERBS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version", is_flag=True, help="Print the version and exit; with -v, what it runs on."
)
@click.option("-v", "--verbose", is_flag=True, help="With --version: MLX, device and BLAS.")
@click.pass_context
def lydite(ctx: click.Context, version: bool, verbose: bool) -> None:
    """Run, verify and quantize diffusion models on MLX.

    \b
    lydite demo                                     a page of results; nothing is downloaded
    lydite inspect model.safetensors                tensors of a checkpoint
    lydite audit   sd3-folder/                      exactly the tensors that the model needs?
    lydite generate "a red fox" --model sd3-folder/ draw a picture
    lydite parity  sd3-folder/                      the same numbers as diffusers?
    lydite trace -- python port.py                  record the values of a port's run
    lydite diff    reference/ port/                 the first wrong value of the port
    lydite sampler list                             samplers and schedules; test your own
    lydite calibrate run --prompts p.txt --out set/ inputs of the network, for a quantizer
    lydite evaluate A --against B --prompts p.txt   how far apart are two models?
    lydite quantize sd3-folder/ --bits 4 --out q4/  weights in 4 bits, with a report
    lydite doctor                                   does this machine compute exactly?

    lydite VERB --help has the options and examples. Exit status: 0 fine, 1 something is wrong with
    the model or the numbers, 2 the input could not be used, 130 interrupted, 141 the reader of the
    output closed it.
    """
    if version:
        click.echo(_version(verbose))
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Entry point: every error a user can correct is one line on stderr, without a traceback."""
    with safe_streams():
        status = _run()
    if status == PIPE_CLOSED:
        discard_output()
    sys.exit(status)


def _run() -> int:
    try:
        lydite.main(standalone_mode=False, color=_color())
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    except PipeClosed:
        return PIPE_CLOSED
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        with _unwritable_stderr():
            error.show()
        return 2
    except LyditeError as error:
        _print_error(f"{click.style('error:', fg='red', bold=True)} {one_line(str(error))}")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):  # Abort is a RuntimeError
        _print_error("interrupted")
        return 130
    except (MemoryError, RuntimeError) as error:
        if _UNCOMPILED in str(error):
            _print_error(
                f"error: MLX: {one_line(str(error).splitlines()[0])}. If it is a missing header "
                "of CUDA, try: pip install nvidia-cuda-crt. --device cpu needs no such kernel."
            )
            return 2
        if isinstance(error, RuntimeError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        _print_error(
            "error: not enough memory. Where a model runs, try --low-memory, --bits 4, --batch 1, "
            "--tile 512 or a smaller --size."
        )
        return 2
    except OSError as error:  # of stdout: a full disk behind a redirection
        _print_error(f"error: {one_line(str(error))}")
        return 2
    return 0


def _color() -> bool | None:
    return False if os.environ.get("NO_COLOR") else None


def _print_error(text: str) -> None:
    with _unwritable_stderr():
        click.echo(text, err=True, color=_color())


def _unwritable_stderr() -> contextlib.AbstractContextManager[None]:
    """Where stderr is full or its reader has gone, the exit status still says what happened."""
    return contextlib.suppress(OSError, PipeClosed)


def _version(verbose: bool) -> str:
    lines = [f"lydite {__version__}"]
    if verbose:
        from lydite.core.device import current_device
        from lydite.core.fast_blas import preload

        device = current_device()
        lines += [
            f"python {sys.version.split()[0]} on {platform.platform(terse=True)}",
            f"mlx {package_version('mlx')} on {device.chip} ({device.kind.upper()})",
            device.shortcuts,
        ]
        if sys.platform == "linux":
            lines.append(f"blas {preload().describe()}")
    return "\n".join(lines)
