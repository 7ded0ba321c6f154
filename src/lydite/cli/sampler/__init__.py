"""`lydite sampler`: what there is, what it does, how two differ, and whether yours is right."""

import click

from lydite.cli.main import Verbs

VERBS = {
    "list": "lydite.cli.sampler.list:list_",
    "show": "lydite.cli.sampler.show:show",
    "plot": "lydite.cli.sampler.plot:plot",
    "compare": "lydite.cli.sampler.compare:compare",
    "conform": "lydite.cli.sampler.conform:conform",
}


@click.group("sampler", cls=Verbs, verbs=VERBS, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """List, show and compare samplers and schedules, and test your own. Needs no model.

    \b
    lydite sampler list                                 every name, its proof and its source
    lydite sampler show karras --steps 10               sigmas, timesteps and c_in
    lydite sampler show dpmpp_2m                        options, and a small run with its numbers
    lydite sampler plot karras exponential beta_sigmas -o sigmas.png
    lydite sampler compare normal sgm_uniform           where two differ, and by how much
    lydite sampler conform --write problem.json         a problem for a sampler in any language …
    lydite sampler conform problem.json answer.json     … and the verdict on its answer
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
