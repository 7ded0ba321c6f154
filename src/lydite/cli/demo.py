"""`lydite demo`: the main job from end to end, on a model made on the spot."""

from pathlib import Path

import click

PROMPTS = ("a red fox in snow", "the sea at night", "two cups of tea")


@click.command("demo")
@click.option(
    "-o", "--out", default="demo", show_default=True, help="Folder for the model and pictures."
)
def command(out: str) -> None:
    """Make a tiny model, audit it, draw with it, replay a picture.

    The model has every part of Stable Diffusion 3 and random weights, so its pictures are coloured
    noise: what you see is that the whole road works on this machine. Nothing is downloaded.
    """
    from lydite.pipelines.audits import audit_model
    from lydite.pipelines.untrained import make_untrained

    folder = Path(out)
    model = folder / "untrained-sd3"
    click.secho(
        "1  a tiny Stable Diffusion 3 with random weights (untrained: it draws noise)", bold=True
    )
    make_untrained(model)
    click.echo(f"   {model}")

    click.secho("2  audit: every tensor accounted for", bold=True)
    for name, ledger in audit_model(model).items():
        click.echo(
            f"   {name}: {len(ledger.loaded)} loaded, {'clean' if ledger.clean else 'NOT CLEAN'}"
        )

    click.secho("3  pictures", bold=True)
    _draw(model, folder)

    click.secho("4  next", bold=True)
    click.echo(f"   lydite inspect {model}")
    click.echo(
        f"   lydite generate --from {folder / 'demo_0.png'}    the same picture, bit for bit"
    )
    click.echo('   lydite generate "a red fox" --model YOUR-SD3-FOLDER')


def _draw(model: Path, folder: Path) -> None:
    import numpy as np

    from lydite.cli.main import lydite
    from lydite.pipelines.images import read_pixels

    # 256 text tokens of zeros would be most of the work, and there is no T5 to fill them
    settings = ["-m", str(model), "--steps", "8", "--text-length", "16", "--overwrite"]
    for seed, prompt in enumerate(PROMPTS):
        path = folder / f"demo_{seed}.png"
        lydite.main(
            ["generate", prompt, *settings, "--seed", str(seed), "--out", str(path)],
            standalone_mode=False,
        )
    again = folder / "demo_0_again.png"
    lydite.main(
        ["generate", "--from", str(folder / "demo_0.png"), "--overwrite", "--out", str(again)],
        standalone_mode=False,
    )
    same = np.array_equal(read_pixels(folder / "demo_0.png"), read_pixels(again))
    click.echo(f"   replayed from its own metadata: {'identical' if same else 'DIFFERENT'}")
