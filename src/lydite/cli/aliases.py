"""Options with old spellings, which are accepted and not shown."""

from typing import Any

import click

# What users type, and what earlier versions typed for the precision of stored values.
STORE_DTYPES = ("float32", "bfloat16", "float16")
_OLD_STORE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class AliasedOption(click.Option):
    """An option that also answers to the names in `old`; help and errors show the new one."""

    def __init__(self, *arguments: Any, old: tuple[str, ...], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._old = old

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser know all names, and nobody else."""
        shown, self.opts = self.opts, [*self.opts, *self._old]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


class StoreDtype(click.Choice[str]):
    """The precision of stored values."""

    def __init__(self) -> None:
        super().__init__(STORE_DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """One of STORE_DTYPES."""
        return super().convert(_OLD_STORE_DTYPES.get(value, value), param, ctx)


class ComputeDtype(click.Choice[str]):
    """The precision networks run in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """One of the choices; the old spellings of storage precision get an answer of their own."""
        if value in _OLD_STORE_DTYPES:
            new = _OLD_STORE_DTYPES[value]
            self.fail(
                f"--dtype is the compute precision; for stored values give --store-dtype {new}.",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)
