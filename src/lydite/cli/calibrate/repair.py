"""`lydite calibrate repair` and `rebuild`: what is whole stays, the rest is drawn again."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lydite.cli.calibrate.draw_missing import Hands, check_hands, hands_options, resume
from lydite.cli.calibrate.set_model import model_words
from lydite.cli.calibrate.verify import listed

if TYPE_CHECKING:
    from lydite.calibrate.store.repair import Repaired

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
    from lydite.calibrate.store.repair import repair as mend
    from lydite.calibrate.store.set_file import read_description
    from lydite.calibrate.store.status import again, is_drawable, status

    hands = Hands(workers, ray, quiet)
    check_hands(hands)
    again_with = ["--no-run"] if no_run else [*model_words(model, components), *hands.words]
    _print(folder, mend(folder, *again_with))
    left, settings = status(folder).missing, read_description(folder).settings
    if no_run or not left:
        return
    if not is_drawable(settings):
        click.echo(f"missing   {left} items. Go on with: {again(folder, settings)}")
        return
    resume(folder, model, components, hands)


@click.command("rebuild")
@click.argument("folder", metavar="SET", type=FOLDER)
def rebuild(folder: Path) -> None:
    """Make the index, and if need be set.json, from the shards alone. No model is needed.

    \b
    lydite calibrate rebuild set/
    """
    from lydite.calibrate.store.repair import rebuild as build

    _print(folder, build(folder))


def _print(folder: Path, done: "Repaired") -> None:
    facts = [f"items that are whole: {done.items}"]
    if done.again:
        facts.append(f"to be drawn again: {len(done.again)} ({listed(done.again)})")
    if done.mended:
        facts.append(f"headers written anew: {done.mended}")
    if done.quarantined:
        facts.append(f"files moved to quarantine: {len(done.quarantined)}")
    if done.index_rebuilt:
        facts.append("the index was made anew")
    if done.set_from:
        facts.append(f"set.json was written anew from {done.set_from}")
    if done.set_from == "the shards":
        facts.append("images that were not yet drawn are not in it")
    click.echo(f"{folder}: {'; '.join(facts)}.")
