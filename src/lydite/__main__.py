"""`lydite`, which is also `python -m lydite`: so light that it hears Ctrl-C before all else."""

import sys


def main() -> None:
    """Load the command line and run it; Ctrl-C while it loads is one word and status 130."""
    try:
        _listen()
        from lydite.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    finally:
        _leave()


def _listen() -> None:
    """Have an interrupt raised again that came in a callback, where Python drops it.

    Each import of a module has such a callback.
    """
    import signal

    def heard(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            sys.__unraisablehook__(lost)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = heard


def _leave() -> None:
    """Nothing is left to tell: Ctrl-C, where it is heard at all, just ends what still goes on."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    exec("")  # else an interrupt within one, as dataclasses use it, would decide our status


if __name__ == "__main__":
    main()
