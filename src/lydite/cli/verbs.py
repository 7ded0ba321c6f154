"""A group of commands, each imported only when it is used."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click


class Verbs(click.Group):
    """Looks a verb up by name, so that `lydite inspect` never pays for the others.

    A verb is `command` of a module, or another name in it: `lydite.cli.calibrate.status:status`.
    """

    def __init__(self, *arguments: Any, verbs: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        module, _, name = self._verbs[cmd_name].partition(":")
        return getattr(importlib.import_module(module), name or "command")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._verbs and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self._verbs, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else f" See {ctx.command_path} --help."
            raise click.UsageError(f"No such command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)
