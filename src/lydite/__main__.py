"""`lydite`, which is also `python -m lydite`."""

import sys


def main() -> None:
    """Load the command line and run it; Ctrl-C while it loads is one word and status 130."""
    try:
        from lydite.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
