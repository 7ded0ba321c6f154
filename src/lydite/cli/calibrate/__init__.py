"""`lydite calibrate`: calibration sets, one verb a command, each imported only when it is used."""

import click

from lydite.cli.verbs import Verbs

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


@click.group("calibrate", cls=Verbs, verbs=VERBS)
def command() -> None:
    """Make and keep calibration sets: what the network is given, step by step, over many images.

    \b
    lydite calibrate run --prompts prompts.txt --images 100 --out set/
    lydite calibrate run --out set/                  go on where it stopped
    lydite calibrate status set/                     what is there, what is missing, time left
    lydite calibrate verify set/ --sheet sheet.png   is every byte what was written?
    lydite calibrate repair set/                     draw again what is damaged, and only that
    lydite calibrate activations set/ --out a.sqlite what every layer sees, channel by channel
    lydite calibrate blocks set/ --out blocks/       inputs and outputs of attention and MLP
    lydite calibrate merge set-a/ set-b/ --out all/  sets made on several machines
    lydite calibrate export set/ --out npz/          one npz file a step, for other tools

    A set is one folder. It can be killed at any moment and says afterwards whether it is whole.
    Exit status: 0 fine, 1 a set that verify finds damaged, incomplete or unhealthy, or values that
    are not finite, 2 the input or the disk could not be used, 130 interrupted.
    """
    from lydite.core.blas import use_one_thread

    use_one_thread()  # before MLX
