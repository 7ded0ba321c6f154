"""`lydite trace`: record a run, check a trace by itself, show and save its values."""

from lydite.cli.trace.record import command as command
