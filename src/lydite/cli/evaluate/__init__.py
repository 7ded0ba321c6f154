"""`lydite evaluate`: how far apart two models or two sets of pictures are."""

import click

from lydite.cli.unnamed_verb import VerbsAndOne

UNNAMED = "models"
VERBS = {
    UNNAMED: "lydite.cli.evaluate.models",
    "images": "lydite.cli.evaluate.images",
    "set": "lydite.cli.evaluate.set",
}


class _ModelsByDefault(VerbsAndOne):
    """`lydite evaluate MODEL --against …` is `lydite evaluate models MODEL --against …`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*VERBS, "-h", "--help"):
            args = [UNNAMED, *args]
        return super().parse_args(ctx, args)


@click.group(
    "evaluate", cls=_ModelsByDefault, verbs=VERBS, unnamed=UNNAMED, invoke_without_command=True,
    no_args_is_help=True,
)  # fmt: skip
def command() -> None:
    """Measure how far apart two models, or two sets of pictures, are.

    \b
    lydite evaluate MODEL --against MODEL --prompts prompts.txt --out run/
    lydite evaluate embedded --against embedded --bits 4 --images 64 --out run/ --html page.html
    lydite evaluate images a/ b/                       pictures of equal names
    lydite evaluate set set/                           the pictures of a calibration set

    The same prompts, noise and settings on both sides: PSNR, SSIM and the error of the latents over
    the steps need no network. LPIPS, FID, KID and CLIP need weights that you have: --lpips,
    --inception, --clip. Every mean comes with its 95 % confidence interval.
    """
    from lydite.core.fast_blas import use_one_thread

    use_one_thread()  # before MLX: a run is the same on any number of cores
