"""`lydite doctor`: does this machine compute exactly, and what does it lack?"""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import click

from lydite import __version__
from lydite.cli.request_options import device_option
from lydite.core.device import VARIABLE

PYTHONS = ((3, 11), (3, 14))
PACKAGES = ("mlx", "mlx-metal", "mlx-cuda-13", "mlx-cpu", "numpy", "tokenizers")
OPTIONAL = ("torch", "diffusers", "transformers", "ray")  # the reference, and --ray
OLDEST_MACOS = 14
ROOM = 20 * 2**30  # free bytes below which a large model or a calibration set may not fit


@dataclass
class Report:
    """What was found; `problems` and `warnings` say what to do."""

    versions: dict[str, str]
    device: dict[str, Any]
    numbers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    disk: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])


@click.command("doctor")
@click.argument("folder", type=click.Path(path_type=Path), default=".")
@device_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(folder: Path, as_json: bool) -> None:
    """Check this machine: versions, device, exactness of its arithmetic, disk.

    A matrix product and a convolution are computed in each dtype and compared with float64. FOLDER,
    by default the current one, is where pictures, traces and calibration sets will be written.
    Paste the output into a bug report; it has no names of files or users.

    \b
    lydite doctor
    lydite doctor /Volumes/Disk/sets         can a calibration set be kept there?
    lydite doctor --device cpu --json

    Exit status: 0 no problem was found, 1 there is one; the last lines say what to do.
    """
    report = examine(folder)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    if report.problems:
        sys.exit(1)


def examine(folder: Path) -> Report:
    """Everything `lydite doctor` finds."""
    from lydite.core.device import TF32, WINOGRAD, current_device
    from lydite.core.fast_blas import preload
    from lydite.core.files import disk_abilities
    from lydite.models import kernels
    from lydite.models.numeric_probe import probe

    device = current_device()
    report = Report(
        _versions(),
        {
            **asdict(device),
            "shortcuts": device.shortcuts,
            VARIABLE: os.environ.get(VARIABLE, "auto"),
            "variables": {name: os.environ.get(name, "") for name in (TF32, WINOGRAD)},
            "kernels": kernels.in_use(),
        },
    )
    if sys.platform == "linux" and device.kind == "cpu":
        report.device["blas"] = preload().describe().split(":")[0]
    report.problems += _platform_problems()
    for reading in probe():
        report.numbers.append({**asdict(reading), "exact": reading.is_exact})
        if not reading.is_exact:
            report.problems.append(
                f"{reading.operation} in {reading.dtype} has a relative error of "
                f"{reading.error:.1e}; expected at most {reading.limit:.0e}. {reading.advice}"
            )
    report.disk = disk_abilities(folder)
    free = report.disk["free"]
    if not report.disk["writable"]:
        report.problems.append(
            "Cannot write to this folder: it is missing, or you have no permission. Make it, or "
            "name another one: lydite doctor FOLDER"
        )
    elif free is not None and free < ROOM:
        report.warnings.append(
            f"only {free / 2**30:.1f} GiB are free in this folder; a large model or calibration "
            f"set may need {ROOM / 2**30:.0f} GiB. Free space, or check another disk: "
            "lydite doctor FOLDER"
        )
    return report


def _versions() -> dict[str, str]:
    versions = {
        "lydite": __version__,
        "python": f"{platform.python_version()} {platform.machine()}",
        "system": platform.platform(terse=True),
    }
    for name in (*PACKAGES, *OPTIONAL):
        try:
            versions[name] = package_version(name)
        except PackageNotFoundError:
            if name in OPTIONAL:
                versions[name] = "not installed (optional)"
    return versions


def _platform_problems() -> list[str]:
    problems: list[str] = []
    (low, high), version = PYTHONS, sys.version_info[:2]
    if not low <= version <= high:
        problems.append(
            f"Python is {version[0]}.{version[1]}; tested are {low[0]}.{low[1]} to "
            f"{high[0]}.{high[1]}. Make a virtual environment with one of these."
        )
    if sys.platform == "darwin" and platform.machine() != "arm64":
        problems.append(
            "This Python is for Intel, perhaps under Rosetta; MLX needs an arm64 one. Install "
            "Python for Apple silicon and make a new virtual environment."
        )
    macos = platform.mac_ver()[0]
    if macos and int(macos.split(".")[0]) < OLDEST_MACOS:
        problems.append(
            f"macOS is {macos}; MLX needs {OLDEST_MACOS} or newer. Update macOS, or compute on "
            "another machine."
        )
    return problems


def _print(report: Report) -> None:
    for name, version in report.versions.items():
        click.echo(f"{name:<13}{version}")
    device = report.device
    memory = f"{device['memory'] / 2**30:.0f} GiB"
    chosen = (
        "chosen by MLX" if device[VARIABLE] in ("", "auto") else f"{VARIABLE}={device[VARIABLE]}"
    )
    click.echo(f"{'device':<13}{device['chip']} ({device['kind'].upper()}, {memory}, {chosen})")
    given = ", ".join(f"{name}={value or 'unset'}" for name, value in device["variables"].items())
    click.echo(f"{'fast math':<13}{device['shortcuts']} ({given})")
    if device["kind"] == "gpu":
        click.echo(f"{'kernels':<13}{'own, beside those of MLX' if device['kernels'] else 'MLX'}")
    if "blas" in device:
        click.echo(f"{'blas':<13}{device['blas']}")
    for reading in report.numbers:
        mark = "ok" if reading["exact"] else "TOO LARGE"
        click.echo(
            f"{reading['operation']:<13}{reading['dtype']:<9} relative error "
            f"{reading['error']:.1e}, limit {reading['limit']:.0e}: {mark}"
        )
    disk = report.disk
    free = "free space unknown" if disk["free"] is None else f"{disk['free'] / 2**30:.1f} GiB free"
    words = {"hard_links": "hard links", "file_locks": "file locks", "full_sync": "full flush"}
    abilities = [word if disk[name] else f"no {word}" for name, word in words.items()]
    click.echo(f"{'folder':<13}{free}; {', '.join(abilities)}")
    for warning in report.warnings:
        click.echo(f"{click.style('warning:', fg='yellow', bold=True)} {warning}")
    for problem in report.problems:
        click.echo(f"{click.style('problem:', fg='red', bold=True)} {problem}")
    if not report.problems:
        click.echo("No problem found.")
