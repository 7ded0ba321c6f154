"""`lydite calibrate`: calibration sets, one verb a command, each imported only when it is used."""

import click

from lydite.cli.main import Verbs

VERBS = {
    "run": "lydite.cli.calibrate.run:run",
    "status": "lydite.cli.calibrate.status:status",
    "verify": "lydite.cli.calibrate.verify:verify",
    "repair": "lydite.cli.calibrate.repair:repair",
    "rebuild": "lydite.cli.calibrate.repair:rebuild",
    "activations": "lydite.cli.calibrate.activations:activations",
    "blocks": "lydite.cli.calibrate.blocks:blocks",
    "merge": "lydite.cli.calibrate.merge:merge",
    "export": "lydite.cli.calibrate.export:export",
    "import": "lydite.cli.calibrate.import_:import_",
}


@click.group("calibrate", cls=Verbs, verbs=VERBS, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Make and check calibration sets: the inputs of a network at each step, over many images.

    \b
    lydite calibrate run --prompts prompts.txt --images 100 --out set/
    lydite calibrate run --out set/                  resume it
    lydite calibrate status set/                     what is there, what is missing, time left
    lydite calibrate verify set/ --sheet sheet.png   compare every byte with its hash
    lydite calibrate repair set/                     drop and draw again what is damaged
    lydite calibrate activations set/ --out a.sqlite statistics of every layer and channel
    lydite calibrate blocks set/ --out blocks/       inputs and outputs of attention and MLP
    lydite calibrate merge set-a/ set-b/ --out all/  join sets made on several machines
    lydite calibrate export set/ --out npz/          one npz file a step, for other tools

    A set is one folder. A run may be killed at any moment; nothing that was committed is lost.
    Exit status: 0 fine, 1 verify finds the set damaged, incomplete or unhealthy, or values are not
    finite, 2 the input or the disk could not be used, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        return
    from lydite.core.fast_blas import use_one_thread

    use_one_thread()  # before MLX
