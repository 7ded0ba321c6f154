"""`lydite calibrate repair`: undamaged items stay, the rest is drawn again."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lydite.cli.calibrate.draw_missing import WorkerOptions, resume, worker_options
from lydite.cli.calibrate.model_options import model_words
from lydite.cli.calibrate.verify import first_names

if TYPE_CHECKING:
    from lydite.calibrate.store.repair import Repaired

FOLDER = click.Path(path_type=Path)


@click.command("repair")
@click.argument("folder", metavar="SET", type=FOLDER)
@click.option("--no-run", is_flag=True, help="Only drop what is damaged; draw nothing.")
@worker_options
def repair(
    folder: Path,
    no_run: bool,
    model: str | None,
    components: str | None,
    workers: int,
    ray: str | None,
    quiet: bool,
) -> None:
    """Drop damaged items, sample by sample, and draw them again, with what is missing.

    Damaged files move to SET/quarantine; nothing is deleted.

    \b
    lydite calibrate repair set/
    lydite calibrate repair set/ --no-run
    """
    from lydite.calibrate.store.repair import repair as repair_set
    from lydite.calibrate.store.set_file import read_description
    from lydite.calibrate.store.status import is_drawable, resume_advice

    worker_settings = WorkerOptions(workers, ray, quiet)
    options = ["--no-run"] if no_run else [*model_words(model, components), *worker_settings.words]
    done = repair_set(folder, *options)
    _print(folder, done)
    settings = read_description(folder).settings
    if no_run or not done.missing:
        return
    if not is_drawable(settings):
        click.echo(
            f"missing   {done.missing} items. Resume with: {resume_advice(folder, settings)}"
        )
        return
    resume(folder, model, components, worker_settings)


@click.command("rebuild", hidden=True)
@click.argument("folder", metavar="SET", type=FOLDER)
def rebuild(folder: Path) -> None:
    """The same as repair --no-run: a set has no index on disk that could be rebuilt."""
    from lydite.calibrate.store.repair import repair as repair_set

    click.echo("note: sets have no index file any more; this is repair --no-run.", err=True)
    _print(folder, repair_set(folder, "--no-run"))


def _print(folder: Path, done: "Repaired") -> None:
    facts = [f"{done.items} undamaged items"]
    if done.dropped:
        facts.append(f"dropped {len(done.dropped)} damaged items ({first_names(done.dropped)})")
    if done.quarantined:
        facts.append(f"moved {len(done.quarantined)} files to quarantine")
    if done.rewritten:
        facts.append("wrote set.json again" + (" from the shards" if done.from_shards else ""))
    if done.from_shards:
        facts.append("images that were not drawn yet are not in its plan")
    if done.missing:
        facts.append(f"{done.missing} items are missing")
    click.echo(f"{folder}: {'; '.join(facts)}.")
