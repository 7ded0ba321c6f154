"""`lydite quantize`: the weights of a network in few bits."""

import click

from lydite.cli.unnamed_verb import VerbsAndOne

UNNAMED = "model"  # this verb is not typed: a model's folder may have any name but the others'
VERBS = {
    UNNAMED: "lydite.cli.quantize.model",
    "plan": "lydite.cli.quantize.plan",
    "compare": "lydite.cli.quantize.compare",
}


class _ModelByDefault(VerbsAndOne):
    """`lydite quantize MODEL --out …` is the verb `model`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and (args[0] == UNNAMED or args[0] not in (*VERBS, "-h", "--help")):
            args = [UNNAMED, *args]
        return super().parse_args(ctx, args)


@click.group(
    "quantize", cls=_ModelByDefault, verbs=VERBS, unnamed=UNNAMED, invoke_without_command=True,
    no_args_is_help=True,
)  # fmt: skip
def command() -> None:
    """Store the weights of a diffusion network in few bits, and measure what that costs.

    \b
    lydite quantize MODEL --bits 4 --out q4/                       GPTQ, groups of 64
    lydite quantize MODEL --method rtn --bits 4 --out q4/          round to nearest: no data
    lydite quantize MODEL --method taqdit --bits 4 --act-bits 8 --set set/ --out q4a8/
    lydite quantize plan MODEL --bpw 4.5 --set set/ --save plan.json
    lydite quantize compare q4/ q4a8/ --html page.html

    The result is a model folder for `lydite generate --model` and for MLX. With it come
    quantization.json (how it was made) and evaluation.json (how far its pictures are from those of
    the original).
    """
    from lydite.core.fast_blas import use_one_thread

    use_one_thread()  # before MLX: a run is the same on any number of cores
