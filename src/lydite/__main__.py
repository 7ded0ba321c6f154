"""`python -m lydite` is the command `lydite`."""

from lydite.cli.main import main

main()
