"""`lydite demo`: the main job from end to end, on the model inside the package."""

import shlex
import sys
from pathlib import Path

import click

PROMPTS = (
    "a large red star above a small blue ring",
    "a green heart on a gradient from lavender to navy",
    "a small yellow moon, a pink square and a white cross",
    "a purple circle to the left of an orange triangle",
    "star",
    "a big cyan ring in the bottom right corner on maroon",
)


@click.command("demo")
@click.option("-o", "--out", default="demo", show_default=True, help="Folder for the pictures.")
def command(out: str) -> None:
    """Audit the model inside the package, draw with it, judge the pictures, replay one.

    The model is a tiny Stable Diffusion 3 that learnt drawn scenes: shapes, colours, sizes, places
    and backgrounds. Nothing is downloaded.
    """
    from lydite import embedded
    from lydite.pipelines.audits import audit_model

    folder = Path(out)
    click.secho("1  audit: every tensor of the embedded model accounted for", bold=True)
    for name, ledger in audit_model(embedded.MODEL).items():
        state = "clean" if ledger.clean else "NOT CLEAN"
        click.echo(f"   {name}: {len(ledger.loaded)} loaded, {state}")

    click.secho("2  pictures", bold=True)
    paths = [folder / f"demo_{seed}.png" for seed in range(len(PROMPTS))]
    for seed, (prompt, path) in enumerate(zip(PROMPTS, paths, strict=True)):
        click.echo(f"   {prompt}")
        _generate(prompt, "--seed", str(seed), "--out", str(path))

    click.secho("3  what the judge reads off them", bold=True)
    _judge(paths)

    click.secho("4  replay from a picture's own metadata", bold=True)
    again = folder / "demo_0_again.png"
    _generate("--from", str(paths[0]), "--out", str(again))
    click.echo(f"   {'identical' if _same(paths[0], again) else 'DIFFERENT'}")

    lydite = shlex.quote(sys.argv[0])
    click.secho("5  next", bold=True)
    click.echo(f'   {lydite} generate "a small pink heart above a large blue square"')
    click.echo(f"   {lydite} inspect {shlex.quote(str(embedded.MODEL))}")
    click.echo(f'   {lydite} generate "a red fox" --model YOUR-SD3-FOLDER')


def _generate(*arguments: str) -> None:
    from lydite.cli.main import lydite

    lydite.main(["generate", *arguments, "--overwrite"], standalone_mode=False)


def _judge(paths: list[Path]) -> None:
    import numpy as np

    from lydite import embedded
    from lydite.embedded.judge import load_judge
    from lydite.embedded.scenes import COLORS
    from lydite.embedded.shapes import SHAPES
    from lydite.pipelines.images import read_pixels

    judge = load_judge(embedded.MODEL / "judge.safetensors")
    for reading in judge.readings(np.stack([read_pixels(path) for path in paths])):
        seen = [
            f"{('small', 'large')[found.thing.size or 0]} "
            f"{COLORS[found.thing.color or 0]} {SHAPES[found.thing.shape or 0]}"
            for found in reading.objects
        ]
        click.echo(f"   {', '.join(seen)}")


def _same(first: Path, second: Path) -> bool:
    import numpy as np

    from lydite.pipelines.images import read_pixels

    return np.array_equal(read_pixels(first), read_pixels(second))
