"""`lydite calibrate repair` and `rebuild`: what is whole stays, the rest is drawn again."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lydite.cli.calibrate_drawing import Hands, check_hands, hands_options, resume

if TYPE_CHECKING:
    from lydite.calibrate.repair import Repaired

FOLDER = click.Path(path_type=Path)


@click.command("repair")
@click.argument("folder", metavar="SET", type=FOLDER)
@click.option("--no-run", is_flag=True, help="Only take out what is damaged; draw nothing.")
@hands_options
def repair(
    folder: Path,
    no_run: bool,
    model: str | None,
    components: str | None,
    workers: int,
    ray: str | None,
    quiet: bool,
) -> None:
    """Take out what is damaged, sample by sample, and draw it again, with what is missing.

    Damaged files go to SET/quarantine; nothing is deleted.

    \b
    lydite calibrate repair set/
    lydite calibrate repair set/ --no-run
    """
    from lydite.calibrate.repair import repair as mend

    hands = Hands(workers, ray, quiet)
    check_hands(hands)
    _print(folder, mend(folder))
    if not no_run:
        from lydite.calibrate.steady import preload_steady

        preload_steady()  # before MLX
        resume(folder, model, components, hands)


@click.command("rebuild")
@click.argument("folder", metavar="SET", type=FOLDER)
def rebuild(folder: Path) -> None:
    """Make the index, and if need be set.json, from the shards alone. No model is needed.

    \b
    lydite calibrate rebuild set/
    """
    from lydite.calibrate.repair import rebuild as build

    _print(folder, build(folder))


def _print(folder: Path, done: "Repaired") -> None:
    facts = [f"items that are whole: {done.items}"]
    if done.again:
        facts.append(f"to be drawn again: {len(done.again)} ({', '.join(done.again[:4])})")
    if done.mended:
        facts.append(f"headers written anew: {done.mended}")
    if done.quarantined:
        facts.append(f"files moved to quarantine: {len(done.quarantined)}")
    if done.index_rebuilt:
        facts.append("the index was made anew")
    if done.set_rewritten:
        facts.append("set.json was made anew from the shards: images not yet drawn are not in it")
    click.echo(f"{folder}: {'; '.join(facts)}.")
