"""Groups whose main job has no verb: `lydite quantize MODEL …`, `lydite evaluate MODEL …`.

The job is a verb of the group that users need not type. The group's `--help` shows its options.
"""

from typing import Any

import click

from lydite.cli.main import Verbs


class UnnamedVerb(click.Command):
    """A verb that is not typed: usage and hints leave its name out."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The argument first, as users type it."""
        return super().collect_usage_pieces(ctx)[::-1]


class _Context(click.Context):
    """Its path is that of the group."""

    @property
    def command_path(self) -> str:
        return super().command_path if self.parent is None else self.parent.command_path


UnnamedVerb.context_class = _Context


class VerbsAndOne(Verbs):
    """What is no verb of the group is the argument of its verb `unnamed`."""

    def __init__(self, *arguments: Any, unnamed: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._unnamed = unnamed

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Both forms."""
        main, inner = self._main(ctx)
        main.format_usage(inner, formatter)
        others = "|".join(name for name in self.list_commands(ctx) if name != self._unnamed)
        formatter.write_usage(ctx.command_path, f"{others} …", prefix=" " * len("Usage: "))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Those of the main job, then the other verbs."""
        main, inner = self._main(ctx)
        (argument,) = (each for each in main.params if isinstance(each, click.Argument))
        options = [each for each in main.get_params(inner) if each is not argument]
        records = [each.get_help_record(inner) for each in options]
        with formatter.section(f"Options of {ctx.command_path} {argument.metavar}"):
            formatter.write_dl([record for record in records if record is not None])
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The verbs that are typed."""
        rows: list[tuple[str, str]] = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and name != self._unnamed:
                rows.append((name, command.get_short_help_str(limit=80)))
        with formatter.section(f"Commands ({ctx.command_path} COMMAND --help has their options)"):
            formatter.write_dl(rows)

    def _main(self, ctx: click.Context) -> tuple[click.Command, click.Context]:
        main = self.get_command(ctx, self._unnamed)
        assert main is not None
        return main, main.context_class(main, info_name=self._unnamed, parent=ctx)
