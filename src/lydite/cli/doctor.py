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

PYTHONS = ((3, 11), (3, 14))
PACKAGES = ("mlx", "numpy", "tokenizers", "torch", "diffusers", "transformers", "ray")
ROOM = 20 * 2**30  # free bytes below which a large model or a calibration set may not fit


@dataclass
class Report:
    """What was found; `problems` says what is off and how to correct it."""

    versions: dict[str, str]
    device: dict[str, Any]
    numbers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    disk: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])


@click.command("doctor")
@click.argument("folder", type=click.Path(path_type=Path), default=".")
@device_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(folder: Path, as_json: bool) -> None:
    """Check this machine: versions, device, exactness of its arithmetic, disk.

    A product and a convolution are computed in each dtype and compared with float64. FOLDER, by
    default the current one, is where pictures, traces and sets will be written. Paste the output
    into a bug report; it has no names of files or users.

    \b
    lydite doctor
    lydite doctor /Volumes/Disk/sets         can a calibration set be kept there?
    lydite doctor --device cpu --json

    Exit status: 0 nothing is wrong, 1 something is off; the last lines say what to do.
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
    from lydite.core.device import VARIABLE, current_device
    from lydite.core.fast_blas import preload
    from lydite.core.files import disk_abilities
    from lydite.models.numeric_probe import probe

    device = current_device()
    report = Report(
        _versions(),
        {
            **asdict(device),
            "shortcuts": device.shortcuts,
            VARIABLE: os.environ.get(VARIABLE, "auto"),
        },
    )
    if sys.platform == "linux":
        report.device["blas"] = preload().describe().split(":")[0]
    report.problems += _platform_problems()
    for reading in probe():
        report.numbers.append({**asdict(reading), "exact": reading.is_exact})
        if not reading.is_exact:
            report.problems.append(
                f"{reading.operation} in {reading.dtype} is off by {reading.error:.1e}; expected "
                f"{reading.limit:.0e} or less. {reading.advice}"
            )
    report.disk = disk_abilities(folder)
    free = report.disk["free"]
    if not report.disk["writable"]:
        report.problems.append("The folder cannot be written. Give another one.")
    elif free is not None and free < ROOM:
        report.problems.append(
            f"{free / 2**30:.1f} GiB are free here. Large models and calibration sets need more."
        )
    return report


def _versions() -> dict[str, str]:
    versions = {
        "lydite": __version__,
        "python": f"{platform.python_version()} {platform.machine()}",
        "system": platform.platform(terse=True),
    }
    for name in PACKAGES:
        try:
            versions[name] = package_version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
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
    return problems


def _print(report: Report) -> None:
    for name, version in report.versions.items():
        click.echo(f"{name:<13}{version}")
    device = report.device
    memory = f"{device['memory'] / 2**30:.0f} GiB"
    click.echo(f"{'device':<13}{device['chip']} ({device['kind'].upper()}, {memory})")
    click.echo(f"{'shortcuts':<13}{device['shortcuts']}")
    if "blas" in device:
        click.echo(f"{'blas':<13}{device['blas']}")
    for reading in report.numbers:
        mark = "exact" if reading["exact"] else "OFF"
        click.echo(
            f"{reading['operation']:<13}{reading['dtype']:<9} error {reading['error']:.1e}, "
            f"expected at most {reading['limit']:.0e}: {mark}"
        )
    disk = report.disk
    free = "unknown" if disk["free"] is None else f"{disk['free'] / 2**30:.1f} GiB"
    abilities = [name.replace("_", " ") for name in ("hard_links", "file_locks", "full_sync")]
    has = [name for name in abilities if disk[name.replace(" ", "_")]]
    lacks = [f"no {name}" for name in abilities if name not in has]
    click.echo(f"{'disk':<13}{free} free, {', '.join(has + lacks)}")
    for problem in report.problems:
        click.echo(f"{click.style('off:', fg='red', bold=True):<5} {problem}")
    if not report.problems:
        click.echo("nothing is wrong.")
